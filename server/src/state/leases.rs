//! Leases by names that cannot be guessed, each for the tenant that took it.
//!
//! The engine numbers its leases one after the other. A client gets a random number instead, and it works for its
//! own tenant alone: another tenant's lease is answered as one that has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_contract::api::LeaseId;
use kvarts_contract::clock::Nanos;

use super::Model;

/// The leases of all tenants.
#[derive(Debug, Default)]
pub struct Leases(Mutex<All>);

#[derive(Debug, Default)]
struct All {
    tenants: BTreeMap<u32, OfTenant>,
    /// Tenants that are gone: what still runs for them takes no more leases.
    gone: BTreeSet<u32>,
}

/// The leases of one tenant.
#[derive(Debug, Default)]
struct OfTenant {
    held: BTreeMap<u64, HeldLease>,
    /// The same, soonest end first.
    ends: BTreeSet<(Nanos, u64)>,
}

/// A lease, and what an operator who asks is told of it.
#[derive(Clone, Debug)]
pub struct HeldLease {
    /// The engine's number of it.
    pub lease: LeaseId,
    /// When it ends.
    pub ends: Nanos,
    /// Whose blocks it holds.
    pub model: Arc<Model>,
    /// How many it held when it was taken.
    pub blocks: u32,
    /// The method that took it.
    pub method: &'static str,
    /// The way of that call.
    pub path: &'static str,
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
        let Some(of_tenant) = all.tenants.get_mut(&tenant) else { return max > 0 };
        of_tenant.forget_ended(now);
        of_tenant.held.len() < max
    }

    /// Remembers a lease under a name that was drawn at random; gives the name, which is never 0. None, and it is to be ended,
    /// where its tenant is gone meanwhile.
    pub fn add(&self, tenant: u32, drawn: u64, held: HeldLease) -> Option<u64> {
        let (name, ends) = (drawn.max(1), held.ends);
        let mut all = self.lock();
        if all.gone.contains(&tenant) {
            return None;
        }
        let of_tenant = all.tenants.entry(tenant).or_default();
        of_tenant.remove(name);
        of_tenant.held.insert(name, held);
        of_tenant.ends.insert((ends, name));
        Some(name)
    }

    /// Forgets the leases of tenants that are gone; they are to be ended.
    pub fn forget(&self, tenants: &[u32]) -> Vec<LeaseId> {
        let mut all = self.lock();
        all.gone.extend(tenants);
        let gone = tenants.iter().filter_map(|tenant| all.tenants.remove(tenant));
        gone.flat_map(|of_tenant| of_tenant.held.into_values().map(|held| held.lease)).collect()
    }

    /// The lease of this name, which is forgotten.
    pub fn take(&self, tenant: u32, name: u64) -> Option<LeaseId> {
        self.lock().tenants.get_mut(&tenant)?.remove(name).map(|held| held.lease)
    }

    /// The lease of this name, which from now on ends then.
    pub fn renew(&self, tenant: u32, name: u64, ends: Nanos) -> Option<LeaseId> {
        let mut all = self.lock();
        let of_tenant = all.tenants.get_mut(&tenant)?;
        let held = of_tenant.held.get_mut(&name)?;
        of_tenant.ends.remove(&(held.ends, name));
        of_tenant.ends.insert((ends, name));
        held.ends = ends;
        Some(held.lease)
    }

    /// Leases of these tenants that have not ended, those that end soonest first: tenant, name and what they are. At most `most`
    /// of them, and whether there are more.
    pub fn list(&self, tenants: &[u32], now: Nanos, most: usize) -> (Vec<(u32, u64, HeldLease)>, bool) {
        let mut all = self.lock();
        let mut soonest = BTreeSet::new();
        for tenant in tenants {
            let Some(of_tenant) = all.tenants.get_mut(tenant) else { continue };
            of_tenant.forget_ended(now);
            soonest.extend(of_tenant.ends.iter().take(most + 1).map(|&(ends, name)| (ends, *tenant, name)));
        }
        let more = soonest.len() > most;
        let held = |(_, tenant, name): (Nanos, u32, u64)| {
            Some((tenant, name, all.tenants.get(&tenant)?.held.get(&name)?.clone()))
        };
        (soonest.into_iter().take(most).filter_map(held).collect(), more)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::models::tests::model;

    fn held(lease: u64, ends: u64) -> HeldLease {
        let (lease, ends, model) = (LeaseId(lease), Nanos(ends), model());
        HeldLease { lease, ends, model, blocks: 3, method: "pin", path: "grpc" }
    }

    #[test]
    fn what_is_listed_are_the_leases_of_the_tenants_asked_for_that_have_not_ended_soonest_first() {
        let leases = Leases::default();
        for (tenant, name, ends) in [(1, 11, 100), (1, 12, 900), (2, 21, 300), (3, 31, 200), (1, 13, 400)] {
            leases.add(tenant, name, held(name, ends));
        }
        let names = |tenants: &[u32], most| {
            let (listed, more) = leases.list(tenants, Nanos(150), most);
            (listed.iter().map(|(tenant, name, _)| (*tenant, *name)).collect::<Vec<_>>(), more)
        };
        assert_eq!(names(&[1], 10), (vec![(1, 13), (1, 12)], false));
        assert_eq!(names(&[1, 2, 3], 10), (vec![(3, 31), (2, 21), (1, 13), (1, 12)], false));
        assert_eq!(names(&[1, 2, 3], 2), (vec![(3, 31), (2, 21)], true));
        assert_eq!(names(&[4], 10), (vec![], false));
    }

    #[test]
    fn a_lease_is_found_once_and_by_its_tenant_alone() {
        let leases = Leases::default();
        let name = leases.add(1, 77, held(5, 100)).unwrap();
        assert_eq!(leases.take(2, name), None);
        assert_eq!(leases.take(1, name), Some(LeaseId(5)));
        assert_eq!(leases.take(1, name), None);
    }

    #[test]
    fn a_tenant_that_is_gone_leaves_no_lease_and_takes_none() {
        let leases = Leases::default();
        for (tenant, name) in [(1, 11), (1, 12), (2, 21)] {
            leases.add(tenant, name, held(name, 100)).unwrap();
        }
        assert_eq!(leases.forget(&[1]), [LeaseId(11), LeaseId(12)]);
        assert_eq!((leases.take(1, 11), leases.add(1, 13, held(13, 100))), (None, None));
        assert_eq!((leases.take(2, 21), leases.forget(&[1]).len()), (Some(LeaseId(21)), 0));
    }

    #[test]
    fn what_has_ended_makes_room() {
        let leases = Leases::default();
        leases.add(1, 7, held(1, 100));
        leases.add(1, 8, held(2, 300));
        assert!(!leases.has_room(1, 2, Nanos(50)) && leases.has_room(2, 2, Nanos(50)));
        assert!(leases.has_room(1, 2, Nanos(200)));
        assert_eq!((leases.take(1, 7), leases.take(1, 8)), (None, Some(LeaseId(2))));
    }

    #[test]
    fn a_tenant_with_many_leases_is_counted_without_a_look_at_each() {
        let leases = Leases::default();
        for name in 1..=65_000 {
            leases.add(1, name, held(name, name + 1000));
        }
        assert!(!leases.has_room(1, 65_000, Nanos(1000)) && leases.has_room(1, 65_001, Nanos(1000)));
        assert_eq!(leases.renew(1, 2, Nanos(90_000)), Some(LeaseId(2)));
        let mut all = leases.lock();
        let many = all.tenants.get_mut(&1).unwrap();
        assert_eq!((many.forget_ended(Nanos(1003)), many.held.len()), (3, 64_998));
        assert_eq!((many.forget_ended(Nanos(1003)), many.ends.len()), (1, 64_998));
    }
}
