//! The records that are to go, of very many: those unused for longest, as many as are worth the bytes that are wanted.

use std::collections::BTreeSet;

use crate::index::RecordId;

/// Records that are kept at least: some of them may not go.
const LEAST: usize = 1024;

/// A record in the order in which they go.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Old {
    /// Second of its last use.
    pub(super) used: u32,
    /// Where it lies: shard, segment, page.
    pub(super) lies: (u16, u32, u32),
    pub(super) id: RecordId,
    /// Bytes that it gives.
    pub(super) share: u64,
}

/// The oldest of what is offered. Its memory is that of what is wanted, however much is offered.
#[derive(Debug)]
pub(super) struct Oldest {
    kept: BTreeSet<Old>,
    bytes: u64,
    wanted: u64,
    /// Only what goes after this one counts.
    behind: Option<Old>,
    /// Something was offered that is not kept and does not go before what is.
    is_cut: bool,
}

impl Oldest {
    /// For this many bytes, of what goes after `behind`.
    pub(super) fn behind(behind: Option<Old>, wanted: u64) -> Self {
        Self { kept: BTreeSet::new(), bytes: 0, wanted, behind, is_cut: false }
    }

    pub(super) fn offer(&mut self, one: Old) {
        if self.behind.is_some_and(|behind| one <= behind) {
            return;
        }
        let is_full = self.kept.len() >= LEAST && self.bytes >= self.wanted;
        if is_full && self.kept.last().is_some_and(|last| one > *last) {
            self.is_cut = true;
            return;
        }
        if self.kept.insert(one) {
            self.bytes = self.bytes.saturating_add(one.share);
        }
        while self.kept.len() > LEAST
            && let Some(last) = self.kept.last().copied()
            && self.bytes - last.share >= self.wanted
        {
            self.kept.pop_last();
            self.bytes -= last.share;
            self.is_cut = true;
        }
    }

    /// The oldest of what is left.
    pub(super) fn pop(&mut self) -> Option<Old> {
        self.kept.pop_first()
    }

    /// Whether there is more than was kept.
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn old(used: u32, id: u32, share: u64) -> Old {
        Old { used, lies: (0, 0, id), id: RecordId(id), share }
    }

    proptest! {
        #[test]
        fn what_is_kept_is_what_goes_first_and_another_pass_goes_on_behind_it(
            offered in prop::collection::vec((0..5000u32, 1..100u64), 0..4000),
            wanted in 0..200_000u64,
        ) {
            let mut all: Vec<Old> =
                (0..).zip(&offered).map(|(id, (used, share))| old(*used, id, *share)).collect();
            let (mut behind, mut seen) = (None, Vec::new());
            loop {
                let mut oldest = Oldest::behind(behind, wanted);
                all.iter().for_each(|one| oldest.offer(*one));
                let is_cut = oldest.is_cut();
                let kept: Vec<Old> = std::iter::from_fn(|| oldest.pop()).collect();
                let bytes: u64 = kept.iter().map(|one| one.share).sum();
                if is_cut {
                    prop_assert!(kept.len() >= LEAST && bytes >= wanted);
                    let last = kept.last().map_or(0, |last| last.share);
                    prop_assert!(kept.len() == LEAST || bytes - last < wanted, "no more than that");
                }
                behind = kept.last().copied().or(behind);
                seen.extend(kept);
                if !is_cut {
                    break;
                }
            }
            all.sort_unstable();
            prop_assert_eq!(seen, all);
        }
    }
}
