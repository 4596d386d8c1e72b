//! Power cuts: which of the changes that were not durable are found on the disk afterwards.
//!
//! Nothing is promised for a volatile change, so any subset may survive, and of a write any subset of its sectors.
//! A punch may have reached any of its pages. Operations that were under way count as volatile changes too. With at most ten changes all subsets are
//! enumerated; with more, all prefixes, every single loss, every single survivor, and random ones.

use std::collections::BTreeMap;

use super::media::{FileChange, Media, Node, punched_pages};
use super::rng::Seed;

/// Up to this many changes are enumerated exhaustively.
const EXHAUSTIVE: usize = 10;
/// At most this many cuts of one torn write.
const CUTS_MAX: usize = 64;

/// What survives. Changes are counted from the oldest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// Nothing that was not durable.
    LoseAll,
    /// Everything, also what was under way.
    KeepAll,
    /// The oldest so many.
    Prefix(usize),
    /// All but one.
    DropOne(usize),
    /// One alone.
    KeepOne(usize),
    /// Those whose bits are set.
    Subset(u64),
    /// Everything before `change`, and of it the sectors before `cut` (or with `tail` those from `cut` on).
    Torn {
        /// The write that is torn.
        change: usize,
        /// Where, in sectors.
        cut: usize,
        /// Its end survives instead of its beginning.
        tail: bool,
    },
    /// By the seed: each change is kept, lost or, if it is a write, torn anywhere.
    Random(u64),
}

/// A disk at the moment of a power cut.
#[derive(Clone, Debug)]
pub struct CrashState {
    media: Media,
    /// Each change's number, and its sectors if it is a write, its pages if it is a punch.
    changes: Vec<(u64, Option<usize>)>,
}

impl CrashState {
    pub(super) fn new(media: Media) -> Self {
        let mut changes = Vec::new();
        for node in media.nodes.values() {
            match node {
                Node::File(file) => changes.extend(file.pending.iter().map(|(seq, change)| match change {
                    FileChange::Write { live, .. } => (*seq, Some(live.len())),
                    FileChange::Punch { offset, len } => (*seq, Some(punched_pages(*offset, *len))),
                    _ => (*seq, None),
                })),
                Node::Dir(dir) => changes.extend(dir.pending.iter().map(|(seq, _)| (*seq, None))),
            }
        }
        changes.sort_unstable();
        Self { media, changes }
    }

    /// How many changes are not durable.
    pub fn changes(&self) -> usize {
        self.changes.len()
    }

    /// The disk after the power is back.
    pub fn image(&self, crash: Crash) -> Media {
        let place: BTreeMap<u64, usize> =
            self.changes.iter().enumerate().map(|(at, (seq, _))| (*seq, at)).collect();
        let mut media = self.media.clone();
        media.settle(&|seq, sector| place.get(&seq).is_some_and(|at| crash.keeps(*at, sector)));
        media
    }

    /// The ways in which this state is cut: exhaustive if it has few changes, otherwise with `random` random ones.
    pub fn enumerate(&self, random: usize, seed: Seed) -> Vec<Crash> {
        let changes = self.changes.len();
        let mut all = Vec::new();
        if changes <= EXHAUSTIVE {
            all.extend((0..1_u64 << changes).map(Crash::Subset));
        } else {
            all.extend((0..=changes).map(Crash::Prefix));
            all.extend((0..changes).flat_map(|at| [Crash::DropOne(at), Crash::KeepOne(at)]));
            all.extend((0..random as u64).map(|n| Crash::Random(seed.nth(n).0)));
        }
        for (change, (_, sectors)) in self.changes.iter().enumerate() {
            let sectors = sectors.unwrap_or(0);
            let step = sectors.div_ceil(CUTS_MAX / 2).max(1);
            for cut in (1..sectors).step_by(step) {
                all.extend([false, true].map(|tail| Crash::Torn { change, cut, tail }));
            }
        }
        all
    }
}

impl Crash {
    /// Whether a sector of the `at`th change survives (sector zero stands for a change that has none).
    fn keeps(self, at: usize, sector: usize) -> bool {
        match self {
            Self::LoseAll => false,
            Self::KeepAll => true,
            Self::Prefix(len) => at < len,
            Self::DropOne(one) => at != one,
            Self::KeepOne(one) => at == one,
            Self::Subset(bits) => {
                u32::try_from(at).ok().and_then(|at| bits.checked_shr(at)).unwrap_or(0) & 1 == 1
            }
            Self::Torn { change, cut, tail } => at < change || at == change && (sector < cut) != tail,
            Self::Random(seed) => {
                let change = Seed(seed).nth(at as u64);
                match change.rng().below(3) {
                    0 => false,
                    1 => true,
                    _ => change.nth(sector as u64).rng().coin(),
                }
            }
        }
    }
}
