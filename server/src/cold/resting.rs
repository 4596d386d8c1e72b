//! Namespaces of which nothing is copied for a while, because the bucket does not take it: its manifest is full, or damaged, or others
//! change it all the time. Other namespaces are copied meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_layout::{BlockKey, NamespaceId};

/// How long after a first failure; after each further one twice as long...
const FIRST: Duration = Duration::from_secs(30);
/// ...but no longer than this.
const LONGEST: Duration = Duration::from_secs(15 * 60);
/// Blocks of a namespace that are remembered as let go, so that each counts once.
const COUNTED_MOST: usize = 1 << 16;

/// A block of a namespace: its group, coordinate and key.
pub(super) type Name = (u32, u64, BlockKey);

#[derive(Debug, Default)]
struct Rest {
    until: Duration,
    /// Failures in a row.
    failures: u32,
    /// The blocks that would be next now, and were counted as let go.
    counted: BTreeSet<Name>,
}

/// Which namespaces rest.
#[derive(Debug, Default)]
pub(super) struct Resting(Mutex<BTreeMap<NamespaceId, Rest>>);

impl Resting {
    fn all(&self) -> MutexGuard<'_, BTreeMap<NamespaceId, Rest>> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks of a namespace are next. If it rests they are let go: how many of them were not counted yet.
    pub(super) fn let_go(
        &self,
        namespace: NamespaceId,
        now: Duration,
        names: impl Iterator<Item = Name>,
    ) -> Option<u64> {
        let mut all = self.all();
        let rest = all.get_mut(&namespace).filter(|rest| now < rest.until)?;
        Some(rest.count(names))
    }

    /// The bucket did not take what was next of a namespace; all of that was counted. Gives how long the namespace rests.
    pub(super) fn failed(
        &self,
        namespace: NamespaceId,
        now: Duration,
        names: impl Iterator<Item = Name>,
    ) -> Duration {
        let mut all = self.all();
        let rest = all.entry(namespace).or_default();
        rest.count(names);
        let long = FIRST.saturating_mul(1 << rest.failures.min(8)).min(LONGEST);
        rest.failures = rest.failures.saturating_add(1);
        rest.until = now.saturating_add(long);
        long
    }

    /// The bucket took what was next of a namespace.
    pub(super) fn succeeded(&self, namespace: NamespaceId) {
        self.all().remove(&namespace);
    }
}

impl Rest {
    fn count(&mut self, names: impl Iterator<Item = Name>) -> u64 {
        let mut new = 0;
        let mut next = BTreeSet::new();
        for name in names {
            new += u64::from(!self.counted.contains(&name));
            if next.len() < COUNTED_MOST {
                next.insert(name);
            }
        }
        self.counted = next;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NamespaceId = NamespaceId([1; 32]);

    fn names(of: std::ops::Range<u8>) -> impl Iterator<Item = Name> {
        of.map(|block| (0, 0, BlockKey([block; 32])))
    }

    #[test]
    fn a_namespace_rests_longer_each_time_and_others_do_not() {
        let (resting, mut now, mut rests) = (Resting::default(), Duration::ZERO, Vec::new());
        for _ in 0..8 {
            assert_eq!(resting.let_go(ONE, now, names(0..1)), None);
            let long = resting.failed(ONE, now, names(0..1));
            rests.push(long.as_secs());
            let last = now + long - Duration::from_millis(1);
            assert!(resting.let_go(ONE, last, names(0..1)).is_some());
            assert_eq!(resting.let_go(NamespaceId([2; 32]), last, names(0..1)), None);
            now += long;
        }
        assert_eq!(rests, [30, 60, 120, 240, 480, 900, 900, 900]);
        resting.succeeded(ONE);
        assert_eq!(resting.failed(ONE, now, names(0..1)), FIRST);
    }

    #[test]
    fn a_block_that_is_let_go_counts_once_as_long_as_it_is_next() {
        let (resting, now) = (Resting::default(), Duration::ZERO);
        resting.failed(ONE, now, names(0..4));
        let counted = [0..4, 2..6, 2..6, 6..7, 2..3].map(|of| resting.let_go(ONE, now, names(of)));
        assert_eq!(counted, [Some(0), Some(2), Some(0), Some(1), Some(1)]);
    }
}
