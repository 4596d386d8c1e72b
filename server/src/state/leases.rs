//! Leases by names that cannot be guessed, each for the tenant that took it.
//!
//! The engine numbers its leases one after the other. A client gets a random number instead, and it works for its
//! own tenant alone: another tenant's lease is answered as one that has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use kvarts_store::api::LeaseId;
use kvarts_store::rt::Nanos;

/// The leases of all tenants.
#[derive(Debug, Default)]
pub struct Leases(Mutex<BTreeMap<u32, OfTenant>>);

/// The leases of one tenant.
#[derive(Debug, Default)]
struct OfTenant {
    held: BTreeMap<u64, HeldLease>,
    /// The same, soonest end first.
    ends: BTreeSet<(Nanos, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct HeldLease {
    lease: LeaseId,
    ends: Nanos,
}

impl OfTenant {
    /// Forgets what has ended; gives how many leases it looked at.
    fn forget_ended(&mut self, now: Nanos) -> usize {
        let mut looked = 0;
        while let Some((ends, name)) = self.ends.pop_first() {
            looked += 1;
            if ends > now {
                self.ends.insert((ends, name));
                break;
            }
            self.held.remove(&name);
        }
        looked
    }

    fn remove(&mut self, name: u64) -> Option<HeldLease> {
        let held = self.held.remove(&name)?;
        self.ends.remove(&(held.ends, name));
        Some(held)
    }
}

impl Leases {
    /// Whether the tenant may take one more. What has ended is forgotten here.
    pub fn has_room(&self, tenant: u32, max: usize, now: Nanos) -> bool {
        let mut all = self.lock();
        let Some(of_tenant) = all.get_mut(&tenant) else { return max > 0 };
        of_tenant.forget_ended(now);
        of_tenant.held.len() < max
    }

    /// Remembers a lease under a name that was drawn at random; gives the name, which is never 0.
    pub fn add(&self, tenant: u32, drawn: u64, lease: LeaseId, ends: Nanos) -> u64 {
        let name = drawn.max(1);
        let mut all = self.lock();
        let of_tenant = all.entry(tenant).or_default();
        of_tenant.remove(name);
        of_tenant.held.insert(name, HeldLease { lease, ends });
        of_tenant.ends.insert((ends, name));
        name
    }

    /// The lease of this name, which is forgotten.
    pub fn take(&self, tenant: u32, name: u64) -> Option<LeaseId> {
        self.lock().get_mut(&tenant)?.remove(name).map(|held| held.lease)
    }

    /// The lease of this name, which from now on ends then.
    pub fn renew(&self, tenant: u32, name: u64, ends: Nanos) -> Option<LeaseId> {
        let mut all = self.lock();
        let of_tenant = all.get_mut(&tenant)?;
        let held = of_tenant.held.get_mut(&name)?;
        of_tenant.ends.remove(&(held.ends, name));
        of_tenant.ends.insert((ends, name));
        held.ends = ends;
        Some(held.lease)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, OfTenant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_found_once_and_by_its_tenant_alone() {
        let leases = Leases::default();
        let name = leases.add(1, 77, LeaseId(5), Nanos(100));
        assert_eq!(leases.take(2, name), None);
        assert_eq!(leases.take(1, name), Some(LeaseId(5)));
        assert_eq!(leases.take(1, name), None);
    }

    #[test]
    fn what_has_ended_makes_room() {
        let leases = Leases::default();
        leases.add(1, 7, LeaseId(1), Nanos(100));
        leases.add(1, 8, LeaseId(2), Nanos(300));
        assert!(!leases.has_room(1, 2, Nanos(50)) && leases.has_room(2, 2, Nanos(50)));
        assert!(leases.has_room(1, 2, Nanos(200)));
        assert_eq!((leases.take(1, 7), leases.take(1, 8)), (None, Some(LeaseId(2))));
    }

    #[test]
    fn a_tenant_with_many_leases_is_counted_without_a_look_at_each() {
        let leases = Leases::default();
        for name in 1..=65_000 {
            leases.add(1, name, LeaseId(name), Nanos(name + 1000));
        }
        assert!(!leases.has_room(1, 65_000, Nanos(1000)) && leases.has_room(1, 65_001, Nanos(1000)));
        assert_eq!(leases.renew(1, 2, Nanos(90_000)), Some(LeaseId(2)));
        let mut all = leases.lock();
        let many = all.get_mut(&1).unwrap();
        assert_eq!((many.forget_ended(Nanos(1003)), many.held.len()), (3, 64_998));
        assert_eq!((many.forget_ended(Nanos(1003)), many.ends.len()), (1, 64_998));
    }
}
