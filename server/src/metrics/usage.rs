//! What each tenant asked for and got, by model: the counters that hit ratios are made of.
//!
//! Names of models come from clients, so a tenant has a bounded number of them here, and so has the server of tenants:
//! the next ones are counted together, as [`REST`].

use std::collections::{BTreeMap, BTreeSet};

use kvarts_contract::api::Missing;

/// Tenants that are told apart.
pub(super) const TENANTS_MAX: usize = 256;
/// Models of a tenant that are told apart.
pub(super) const MODELS_MAX: usize = 32;
/// The name of all others together.
pub(super) const REST: &str = "other";
/// The name of the model where none was registered by the name that was asked for.
pub(super) const UNREGISTERED: &str = "unregistered";

/// What became of the blocks that one tenant asked for of one model.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// What lookups found: here, about to be, not here, and why not.
    pub(super) lookups: Lookup,
    /// Blocks that reads delivered.
    pub(super) delivered: u64,
    /// Blocks that reads did not deliver, by reason.
    pub(super) missed: BTreeMap<&'static str, u64>,
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
    pub(super) fn named(&self) -> [(&'static str, u64); 9] {
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
    pub(super) fn asked(&self) -> u64 {
        self.named().iter().map(|(_, count)| count).sum()
    }

    /// What another lookup found is added.
    pub(super) fn add(&mut self, other: &Self) {
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
#[derive(Debug, Default)]
pub(super) struct Usages(BTreeMap<String, BTreeMap<String, Usage>>);

impl Usages {
    /// Where this is counted.
    pub(super) fn of(&mut self, tenant: &str, model: &str) -> &mut Usage {
        place(place(&mut self.0, tenant, TENANTS_MAX), model, MODELS_MAX)
    }

    /// Each with its tenant and its model.
    pub(super) fn each(&self) -> impl Iterator<Item = (&str, &str, &Usage)> {
        self.0.iter().flat_map(|(tenant, models)| {
            models.iter().map(move |(model, usage)| (tenant.as_str(), model.as_str(), usage))
        })
    }
}

fn place<'a, V: Default>(all: &'a mut BTreeMap<String, V>, name: &str, most: usize) -> &'a mut V {
    let is_told_apart = all.len() < most || all.contains_key(name);
    all.entry(if is_told_apart { name } else { REST }.to_owned()).or_default()
}

/// Names that are told apart: the first ones, up to a limit.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeSet<String>);

impl Names {
    /// The name under which this one is counted.
    pub(super) fn told(&mut self, name: String) -> String {
        if self.0.contains(&name) {
            return name;
        }
        if self.0.len() >= TENANTS_MAX {
            return REST.to_owned();
        }
        self.0.insert(name.clone());
        name
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
        assert_eq!(usages.0.len(), TENANTS_MAX + 1);
        let mut names = Names::default();
        let told: BTreeSet<_> = (0..1000).map(|n| names.told(format!("tenant-{n}"))).collect();
        assert_eq!((told.len(), names.told("tenant-0".to_owned())), (TENANTS_MAX + 1, "tenant-0".to_owned()));
    }
}
