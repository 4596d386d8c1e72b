//! Leases by names that nobody can guess, each for the tenant that took it.
//!
//! The engine numbers its leases one after the other. A client gets a random number instead, and it works for its
//! own tenant alone: another tenant's lease is answered as one that has ended.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kvarts_store::api::LeaseId;
use kvarts_store::rt::Nanos;

/// The leases of all tenants, by tenant and name.
#[derive(Debug, Default)]
pub struct Leases(Mutex<BTreeMap<(u32, u64), Held>>);

#[derive(Clone, Copy, Debug)]
struct Held {
    lease: LeaseId,
    ends: Nanos,
}

impl Leases {
    /// Whether the tenant may take one more. What has ended is forgotten here.
    pub fn has_room(&self, tenant: u32, max: usize, now: Nanos) -> bool {
        let mut held = self.lock();
        let of_tenant = (tenant, 0)..=(tenant, u64::MAX);
        if held.range(of_tenant.clone()).count() >= max {
            held.retain(|_, held| held.ends > now);
        }
        held.range(of_tenant).count() < max
    }

    /// Remembers a lease under a name that was drawn at random; gives the name, which is never 0.
    pub fn add(&self, tenant: u32, drawn: u64, lease: LeaseId, ends: Nanos) -> u64 {
        let name = drawn.max(1);
        self.lock().insert((tenant, name), Held { lease, ends });
        name
    }

    /// The lease of this name, which is forgotten.
    pub fn take(&self, tenant: u32, name: u64) -> Option<LeaseId> {
        self.lock().remove(&(tenant, name)).map(|held| held.lease)
    }

    /// The lease of this name, which from now on ends then.
    pub fn renew(&self, tenant: u32, name: u64, ends: Nanos) -> Option<LeaseId> {
        let mut held = self.lock();
        let held = held.get_mut(&(tenant, name))?;
        held.ends = ends;
        Some(held.lease)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<(u32, u64), Held>> {
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
}
