//! What each tenant asked for and got, by model: the counters that hit ratios are made of.
//!
//! Names of models come from clients, so a tenant has a bounded number of them here, and so has the server of tenants:
//! the next ones are counted together, as [`REST`]. A model of which nothing was counted for an hour makes room for another;
//! a tenant that is gone leaves nothing.

use std::collections::{BTreeMap, BTreeSet};

use kvarts_contract::api::Missing;

/// Tenants that are told apart.
pub(crate) const TENANTS_MAX: usize = 256;
/// Models of a tenant that are told apart.
pub(crate) const MODELS_MAX: usize = 32;
/// Samples of the history (an hour of them) for which nothing is counted of a model before another takes its place.
pub(crate) const IDLE_TICKS: u64 = 360;
/// The name of all others together.
pub(crate) const REST: &str = "other";
/// The name of the model where none was registered by the name that was asked for.
pub(crate) const UNREGISTERED: &str = "unregistered";

/// What became of the blocks that one tenant asked for of one model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// What lookups found: here, about to be, not here, and why not.
    pub(crate) lookups: Lookup,
    /// Blocks that reads delivered.
    pub(crate) delivered: u64,
    /// Blocks that reads did not deliver, by reason.
    pub(crate) missed: BTreeMap<&'static str, u64>,
    /// When something was last counted here.
    tick: u64,
}

/// What a lookup found, in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lookup {
    /// Usable now.
    pub here: u64,
    /// Being put now.
    pub pending: u64,
    /// Neither, and why.
    pub missing: Missing,
    /// Asked for under a name that no model was registered by.
    pub unregistered: u64,
}

impl Lookup {
    /// All of them with the name of what was found, as metrics tell it.
    pub(crate) fn named(&self) -> [(&'static str, u64); 9] {
        let Self { here, pending, missing, unregistered } = *self;
        let Missing { evicted, expired, deleted, out_of_service, never_stored, cut_off } = missing;
        [
            ("here", here),
            ("pending", pending),
            ("evicted", evicted),
            ("expired", expired),
            ("deleted", deleted),
            ("out_of_service", out_of_service),
            ("never_stored", never_stored),
            ("cut_off", cut_off),
            ("unregistered", unregistered),
        ]
    }

    /// Blocks that were asked for.
    pub(crate) fn asked(&self) -> u64 {
        self.named().iter().map(|(_, count)| count).sum()
    }

    /// What another lookup found is added.
    pub(crate) fn add(&mut self, other: &Self) {
        self.here += other.here;
        self.pending += other.pending;
        self.missing.evicted += other.missing.evicted;
        self.missing.expired += other.missing.expired;
        self.missing.deleted += other.missing.deleted;
        self.missing.out_of_service += other.missing.out_of_service;
        self.missing.never_stored += other.missing.never_stored;
        self.missing.cut_off += other.missing.cut_off;
        self.unregistered += other.unregistered;
    }
}

/// Of all tenants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usages {
    tenants: BTreeMap<String, BTreeMap<String, Usage>>,
    /// Samples of the history until now: the time here.
    tick: u64,
    /// What lookups found whose names are not told apart any more.
    past: Lookup,
}

impl Usages {
    /// Where this is counted.
    pub(crate) fn of(&mut self, tenant: &str, model: &str) -> &mut Usage {
        let models = place(&mut self.tenants, tenant, TENANTS_MAX);
        if told_apart(models) >= MODELS_MAX && !models.contains_key(model) {
            let named = models.iter().filter(|(name, _)| ![REST, UNREGISTERED].contains(&name.as_str()));
            let idle = named.min_by_key(|(_, usage)| usage.tick);
            let idle = idle.filter(|(_, usage)| self.tick.saturating_sub(usage.tick) >= IDLE_TICKS);
            if let Some(usage) = idle.map(|(name, _)| name.clone()).and_then(|name| models.remove(&name)) {
                self.past.add(&usage.lookups);
            }
        }
        let usage = place(models, model, MODELS_MAX);
        usage.tick = self.tick;
        usage
    }

    /// Each with its tenant and its model.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&str, &str, &Usage)> {
        self.tenants.iter().flat_map(|(tenant, models)| {
            models.iter().map(move |(model, usage)| (tenant.as_str(), model.as_str(), usage))
        })
    }

    /// What all lookups found, also those whose names are gone.
    pub(crate) fn lookups(&self) -> Lookup {
        let mut sum = self.past;
        self.each().for_each(|(_, _, usage)| sum.add(&usage.lookups));
        sum
    }

    /// The same for the history: time goes on with it.
    pub(crate) fn sample(&mut self) -> Lookup {
        self.tick += 1;
        self.lookups()
    }

    /// Tells a tenant apart no more.
    pub(crate) fn forget(&mut self, tenant: &str) {
        for usage in self.tenants.remove(tenant).unwrap_or_default().into_values() {
            self.past.add(&usage.lookups);
        }
    }
}

/// Names beside the one of all others.
fn told_apart<V>(all: &BTreeMap<String, V>) -> usize {
    all.len() - usize::from(all.contains_key(REST))
}

fn place<'a, V: Default>(all: &'a mut BTreeMap<String, V>, name: &str, most: usize) -> &'a mut V {
    let is_told_apart = told_apart(all) < most || all.contains_key(name);
    all.entry(if is_told_apart { name } else { REST }.to_owned()).or_default()
}

/// Names that are told apart: the first ones, up to a limit, as long as they are not forgotten.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names(BTreeSet<String>);

impl Names {
    /// The name under which this one is counted.
    pub(crate) fn told(&mut self, name: String) -> String {
        if self.0.contains(&name) {
            return name;
        }
        if self.0.len() >= TENANTS_MAX {
            return REST.to_owned();
        }
        self.0.insert(name.clone());
        name
    }

    /// Another one may have its place.
    pub(crate) fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beyond_the_bound_are_counted_together() {
        let mut usages = Usages::default();
        for n in 0..1000 {
            usages.of("a", &format!("model-{n}")).delivered += 1;
        }
        assert_eq!(usages.each().count(), MODELS_MAX + 1);
        assert_eq!(usages.of("a", "model-0").delivered, 1);
        assert_eq!(usages.of("a", REST).delivered, 1000 - MODELS_MAX as u64);
        for n in 0..1000 {
            usages.of(&format!("tenant-{n}"), "model").delivered += 1;
        }
        assert_eq!(usages.tenants.len(), TENANTS_MAX + 1);
        let mut names = Names::default();
        let told: BTreeSet<_> = (0..1000).map(|n| names.told(format!("tenant-{n}"))).collect();
        assert_eq!((told.len(), names.told("tenant-0".to_owned())), (TENANTS_MAX + 1, "tenant-0".to_owned()));
    }

    #[test]
    fn a_name_that_nothing_used_for_an_hour_makes_room_and_sums_stay() {
        let mut usages = Usages::default();
        let count =
            |usages: &mut Usages, tenant: &str, model: &str| usages.of(tenant, model).lookups.here += 1;
        let told = |usages: &Usages, model: &str| usages.each().any(|(_, name, _)| name == model);
        for n in 0..MODELS_MAX {
            count(&mut usages, "a", &format!("old-{n:02}"));
        }
        count(&mut usages, "a", "new");
        assert!(!told(&usages, "new") && told(&usages, REST), "none of them is idle for long enough");
        for tick in 0..IDLE_TICKS {
            assert_eq!(usages.sample().here, MODELS_MAX as u64 + 1 + tick);
            count(&mut usages, "a", "old-00");
        }
        count(&mut usages, "a", "new");
        count(&mut usages, "a", "newer");
        assert!(told(&usages, "new") && told(&usages, "newer") && told(&usages, "old-00"));
        assert!(!told(&usages, "old-01") && !told(&usages, "old-02") && told(&usages, "old-03"));
        let all = usages.sample();
        usages.forget("a");
        assert_eq!((usages.each().count(), usages.sample()), (0, all), "what was asked for stays asked for");
    }
}
