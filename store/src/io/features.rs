//! What the kernel may or may not offer, each of which can be forced off.
//!
//! Nothing here is needed: with every feature off the same bytes move, only slower. So a feature that misbehaves
//! on one machine is worked around from the command line, and tests run with each feature off in turn.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// One optional feature.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Feature {
    /// The ring is told that one thread alone submits (Linux 6.0).
    SingleIssuer,
    /// Completions are worked off when the executor asks for them, not in its way (Linux 6.1).
    DeferTaskrun,
    /// Completions do not interrupt the executor (Linux 5.19).
    CoopTaskrun,
    /// The ring shows without a system call that completions wait to be worked off (Linux 5.19).
    TaskrunFlag,
    /// Memory is pinned once, not at each transfer (Linux 5.19 for a table with empty places).
    FixedBuffers,
    /// Vectored transfers from and to pinned memory (Linux 6.15).
    VectoredFixed,
    /// A durable write is one operation, not a write and a flush.
    DurableWrite,
    /// The kernel's helper threads keep off the core to which the executor is pinned (Linux 5.14).
    WorkerAffinity,
    /// Transfers pass the page cache by.
    DirectIo,
}

impl Feature {
    /// All features.
    pub const ALL: [Self; 9] = [
        Self::SingleIssuer,
        Self::DeferTaskrun,
        Self::CoopTaskrun,
        Self::TaskrunFlag,
        Self::FixedBuffers,
        Self::VectoredFixed,
        Self::DurableWrite,
        Self::WorkerAffinity,
        Self::DirectIo,
    ];

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SingleIssuer => "single-issuer",
            Self::DeferTaskrun => "defer-taskrun",
            Self::CoopTaskrun => "coop-taskrun",
            Self::TaskrunFlag => "taskrun-flag",
            Self::FixedBuffers => "fixed-buffers",
            Self::VectoredFixed => "vectored-fixed",
            Self::DurableWrite => "durable-write",
            Self::WorkerAffinity => "worker-affinity",
            Self::DirectIo => "direct-io",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no feature's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownFeature(pub String);

impl fmt::Display for UnknownFeature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the I/O feature {:?} does not exist; the features that can be disabled are", self.0)?;
        for (place, feature) in Feature::ALL.into_iter().enumerate() {
            write!(f, "{} {feature}", if place == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl std::error::Error for UnknownFeature {}

/// Which features must not be used.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// Never used, wherever the kernel offers them.
    pub disable: BTreeSet<Feature>,
}

impl Features {
    /// Every feature off but those that `keep` names.
    pub fn only(keep: &[Feature]) -> Self {
        Self { disable: Feature::ALL.into_iter().filter(|feature| !keep.contains(feature)).collect() }
    }

    /// Whether the feature may be used.
    pub fn allows(&self, feature: Feature) -> bool {
        !self.disable.contains(&feature)
    }
}

/// A list of features to disable, as in `--io-disable fixed-buffers,defer-taskrun`. The empty list disables none.
impl FromStr for Features {
    type Err = UnknownFeature;

    fn from_str(list: &str) -> Result<Self, UnknownFeature> {
        let mut disable = BTreeSet::new();
        for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let feature = Feature::ALL.into_iter().find(|feature| feature.name() == name);
            disable.insert(feature.ok_or_else(|| UnknownFeature(name.to_owned()))?);
        }
        Ok(Self { disable })
    }
}

/// What became of each feature, in the order of [`Feature::ALL`].
#[derive(Clone, Debug)]
pub(super) struct Outcomes(Vec<(Feature, Result<(), String>)>);

impl Outcomes {
    /// Those that are disabled; of the others nothing is known yet.
    pub(super) fn new(features: &Features) -> Self {
        let off = |feature: &Feature| (*feature, Err("disabled by --io-disable".to_owned()));
        Self(features.disable.iter().map(off).collect())
    }

    /// Notes what became of a feature. The first thing noted stays.
    pub(super) fn note(&mut self, feature: Feature, outcome: Result<(), String>) {
        if !self.0.iter().any(|(known, _)| *known == feature) {
            self.0.push((feature, outcome));
        }
    }

    /// Notes that a feature that was in use turned out not to work.
    pub(super) fn revoke(&mut self, feature: Feature, reason: &str) {
        self.0.retain(|(known, _)| *known != feature);
        self.0.push((feature, Err(reason.to_owned())));
    }

    /// Whether it is known to be in use.
    pub(super) fn uses(&self, feature: Feature) -> bool {
        self.0.iter().any(|(known, outcome)| *known == feature && outcome.is_ok())
    }

    /// As [`IoFacts`](super::IoFacts) wants them.
    pub(super) fn list(&self) -> Vec<(&'static str, Result<(), String>)> {
        let mut list = self.0.clone();
        list.sort_by_key(|(feature, _)| *feature);
        list.into_iter().map(|(feature, outcome)| (feature.name(), outcome)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_names_disables_those_features() {
        let features: Features = " fixed-buffers,defer-taskrun, ".parse().unwrap();
        assert_eq!(features.disable, BTreeSet::from([Feature::FixedBuffers, Feature::DeferTaskrun]));
        assert!(!features.allows(Feature::FixedBuffers) && features.allows(Feature::DirectIo));
        assert_eq!("".parse(), Ok(Features::default()));
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_names_that_are_known() {
        let error = "fixed-buffers,turbo".parse::<Features>().unwrap_err().to_string();
        assert!(error.contains("\"turbo\""), "{error}");
        for feature in Feature::ALL {
            assert!(error.contains(feature.name()), "{error}");
            assert_eq!(feature.name().parse::<Features>().unwrap().disable, BTreeSet::from([feature]));
        }
    }
}
