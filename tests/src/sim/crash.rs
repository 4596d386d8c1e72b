//! Power cuts: which of the changes that were not durable are found on the disk afterwards.
//!
//! Nothing is promised for a volatile change, so any subset may survive, and of a write any subset of its sectors.
//! A punch may have reached any of its pages. Operations that were under way count as volatile changes too. With at most ten changes all subsets are
//! enumerated; with more, all prefixes, every single loss, every single survivor, and random ones. Directories are
//! devices of their own: one may have lost everything that another one kept. Small scopes go further: all subsets of
//! all [`Unit`]s.

use std::collections::{BTreeMap, BTreeSet};

use super::media::{Media, Node};
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
    /// Only the oldest, this number of them.
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
    /// Everything but what this directory's device had not made durable.
    Lagging(u16),
    /// Of the changes that were not durable only those that this directory's device had.
    Ahead(u16),
}

/// A change that is not durable.
#[derive(Clone, Copy, Debug)]
struct Change {
    seq: u64,
    /// Sectors, if it is a write.
    sectors: Option<usize>,
    /// The directory that it is in; none if no name leads to it.
    dir: Option<u16>,
}

/// What a power cut loses or keeps by itself: a change of a file's shape or of a name, or a sector of a write. Sectors
/// that would leave the disk as it is are no units.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Unit {
    seq: u64,
    sector: usize,
}

/// A disk at the moment of a power cut.
#[derive(Clone, Debug)]
pub struct CrashState {
    media: Media,
    changes: Vec<Change>,
}

impl CrashState {
    pub(super) fn new(media: Media) -> Self {
        let dirs = media.dirs();
        let mut changes = Vec::new();
        for (ino, node) in &media.nodes {
            let dir = dirs.get(ino).copied();
            match node {
                Node::File(file) => changes.extend(file.pending.iter().map(|(seq, change)| Change {
                    seq: *seq,
                    sectors: change.sectors(),
                    dir,
                })),
                Node::Dir(of) => {
                    changes.extend(of.pending.iter().map(|(seq, _)| Change {
                        seq: *seq,
                        sectors: None,
                        dir,
                    }));
                }
            }
        }
        changes.sort_unstable_by_key(|change| change.seq);
        Self { media, changes }
    }

    /// How many changes are not durable.
    pub fn changes(&self) -> usize {
        self.changes.len()
    }

    /// In how many directories something is not durable.
    pub fn devices(&self) -> usize {
        self.lagging().len()
    }

    fn lagging(&self) -> BTreeSet<u16> {
        self.changes.iter().filter_map(|change| change.dir).collect()
    }

    /// The disk after the power is back.
    pub fn image(&self, crash: Crash) -> Media {
        let place: BTreeMap<u64, (usize, Option<u16>)> =
            self.changes.iter().enumerate().map(|(at, change)| (change.seq, (at, change.dir))).collect();
        let mut media = self.media.clone();
        media
            .settle(&|seq, sector| place.get(&seq).is_some_and(|(at, dir)| crash.keeps((*at, *dir), sector)));
        media
    }

    /// What is kept or lost by itself, in order.
    pub fn units(&self) -> Vec<Unit> {
        let units = self.media.units();
        units.into_iter().map(|(seq, sector)| Unit { seq, sector }).collect()
    }

    /// The disk after the power is back, with those of `units` on it that `keep` chooses by their place.
    pub fn image_of(&self, units: &[Unit], keep: impl Fn(usize) -> bool) -> Media {
        let place: BTreeMap<Unit, usize> = units.iter().enumerate().map(|(at, unit)| (*unit, at)).collect();
        let mut media = self.media.clone();
        media.settle(&|seq, sector| place.get(&Unit { seq, sector }).is_some_and(|at| keep(*at)));
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
        let devices = self.lagging();
        if devices.len() > 1 {
            all.extend(devices.into_iter().flat_map(|dir| [Crash::Lagging(dir), Crash::Ahead(dir)]));
        }
        for (change, Change { sectors, .. }) in self.changes.iter().enumerate() {
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
    /// Whether a sector of the `at`th change, in directory `dir`, survives (sector zero stands for a change that has
    /// none).
    fn keeps(self, (at, dir): (usize, Option<u16>), sector: usize) -> bool {
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
            Self::Lagging(one) => dir != Some(one),
            Self::Ahead(one) => dir == Some(one),
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
