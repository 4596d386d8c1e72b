//! What all sessions share of something, so that none of several tenants is left without: half of it is set aside in equal
//! parts, one for each tenant, and the rest is for whoever comes first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bounded amount of something, and who has how much of it.
#[derive(Debug)]
pub(super) struct Pot {
    total: u64,
    /// What each tenant can have whatever the others do.
    least: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used: BTreeMap<u32, u64>,
    /// Of what is set aside for nobody.
    common: u64,
}

/// What one tenant took, until it is dropped.
#[derive(Debug)]
pub(super) struct Part {
    pot: Arc<Pot>,
    tenant: u32,
    amount: u64,
}

impl Pot {
    /// So much, for so many tenants.
    pub(super) fn new(total: u64, tenants: usize) -> Arc<Self> {
        let least = total / 2 / (tenants.max(1) as u64);
        Arc::new(Self { total, least, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is used, by all together.
    pub(super) fn used(&self) -> u64 {
        self.lock().used.values().sum()
    }

    /// Nothing yet, for a tenant.
    pub(super) fn part(self: &Arc<Self>, tenant: u32) -> Part {
        Part { pot: Arc::clone(self), tenant, amount: 0 }
    }

    /// So much at once, or nothing.
    pub(super) fn take(self: &Arc<Self>, tenant: u32, amount: u64) -> Option<Part> {
        let mut part = self.part(tenant);
        part.set(amount).then_some(part)
    }

    /// Changes what a tenant has, if there is so much.
    fn change(&self, tenant: u32, from: u64, to: u64) -> bool {
        // Nobody has set aside what is more than there is; it is a bound on all tenants that there are.
        let mut state = self.lock();
        let before = state.used.get(&tenant).copied().unwrap_or_default();
        let Some(after) = before.saturating_sub(from).checked_add(to) else { return false };
        let beyond = |used: u64| used.saturating_sub(self.least);
        let common = (state.common.saturating_sub(beyond(before))).saturating_add(beyond(after));
        if to > from && common > self.total - self.total / 2 {
            return false;
        }
        state.common = common;
        if after == 0 {
            state.used.remove(&tenant);
        } else {
            state.used.insert(tenant, after);
        }
        true
    }
}

impl Part {
    /// How much it is.
    pub(super) fn amount(&self) -> u64 {
        self.amount
    }

    /// Makes it so much; false, and as before, if there is not so much.
    pub(super) fn set(&mut self, amount: u64) -> bool {
        let done = amount == self.amount || self.pot.change(self.tenant, self.amount, amount);
        if done {
            self.amount = amount;
        }
        done
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Less is always granted.
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_tenant_finds_its_part_though_two_take_all_they_can() {
        let pot = Pot::new(600, 3);
        let mut all: Vec<Part> = Vec::new();
        for tenant in [1, 2, 1, 2] {
            let mut part = pot.part(tenant);
            while part.set(part.amount() + 10) {}
            all.push(part);
        }
        assert_eq!(pot.used(), 500, "two have their own and what is common");
        assert!(pot.take(1, 1).is_none() && pot.take(2, 1).is_none());
        let third = pot.take(3, 100).expect("what is set aside for it");
        assert!(pot.take(3, 1).is_none());
        drop((all, third));
        assert_eq!(pot.used(), 0);
        assert!(pot.take(3, 400).is_some() && pot.take(3, 401).is_none());
    }

    #[test]
    fn a_single_tenant_has_all_of_it_and_numbers_do_not_overflow() {
        let pot = Pot::new(7, 1);
        assert!(pot.take(0, 8).is_none() && pot.take(0, u64::MAX).is_none());
        let all = pot.take(0, 7).unwrap();
        assert!(pot.take(0, 1).is_none() && pot.take(0, u64::MAX).is_none());
        drop(all);
        assert_eq!(pot.used(), 0);
    }
}
