//! Blocks that go last: those of chains that the program above the store has favoured for a time.
//!
//! They are no lease's: where nothing else is left they go as any other. How many there may be is bounded; beyond that none more
//! is favoured until the time of some is over. Kept in memory alone.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use crate::index::BlockFingerprint;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::atomic::{AtomicBool, Ordering::Relaxed};
use kvarts_contract::sync::{Mutex, MutexGuard};

/// Blocks that may be favoured at a time, with about 40 bytes of memory each.
const BLOCKS_MAX: usize = 1 << 18;
/// Chains that they may be of.
const CHAINS_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
struct Known {
    /// Of which chain each block is.
    blocks: BTreeMap<BlockFingerprint, u64>,
    /// Until when the blocks of each chain are favoured.
    chains: BTreeMap<u64, Nanos>,
}

impl Known {
    fn until(&self, print: BlockFingerprint) -> Option<Nanos> {
        self.chains.get(self.blocks.get(&print)?).copied()
    }

    /// Forgets what has ended.
    fn sweep(&mut self, now: Nanos) {
        self.chains.retain(|_, until| now < *until);
        let chains = &self.chains;
        self.blocks.retain(|_, chain| chains.contains_key(chain));
    }
}

/// Which blocks are favoured, and until when. Usable from any thread.
#[derive(Debug, Default)]
pub(crate) struct Favoured {
    /// Some may be: most stores have none, and look at no block twice.
    some: AtomicBool,
    known: Mutex<Known>,
}

/// Answers for some blocks at once.
pub(crate) struct Favours<'a> {
    known: Option<MutexGuard<'a, Known>>,
    now: Nanos,
}

impl Favours<'_> {
    /// Whether any block may be favoured.
    pub(crate) fn any(&self) -> bool {
        self.known.is_some()
    }

    /// Whether a block is.
    pub(crate) fn has(&self, print: BlockFingerprint) -> bool {
        let until = self.known.as_ref().and_then(|known| known.until(print));
        until.is_some_and(|until| self.now < until)
    }
}

impl Favoured {
    fn lock(&self) -> MutexGuard<'_, Known> {
        // Each change is one step.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Favours these blocks with a chain, whether they are here or not. Gives how many, which is fewer where there is no room.
    pub(crate) fn add(&self, chain: u64, prints: &[BlockFingerprint], until: Nanos, now: Nanos) -> usize {
        let mut known = self.lock();
        if known.blocks.len() + prints.len() > BLOCKS_MAX || known.chains.len() >= CHAINS_MAX {
            known.sweep(now);
        }
        if prints.is_empty() || known.chains.len() >= CHAINS_MAX && !known.chains.contains_key(&chain) {
            return 0;
        }
        let mut favoured = 0;
        for print in prints {
            if known.blocks.len() < BLOCKS_MAX || known.blocks.contains_key(print) {
                known.blocks.insert(*print, chain);
                favoured += 1;
            }
        }
        let told = known.chains.entry(chain).or_insert(until);
        *told = until.max(*told);
        self.some.store(true, Relaxed);
        favoured
    }

    /// The same for blocks that hang on one that is favoured: they are of its chain.
    pub(crate) fn add_behind(
        &self,
        parent: BlockFingerprint,
        prints: &[BlockFingerprint],
        now: Nanos,
    ) -> usize {
        if !self.some.load(Relaxed) {
            return 0;
        }
        let found = {
            let known = self.lock();
            known.blocks.get(&parent).and_then(|chain| Some((*chain, *known.chains.get(chain)?)))
        };
        match found {
            Some((chain, until)) if now < until => self.add(chain, prints, until, now),
            _ => 0,
        }
    }

    /// The blocks of a chain are favoured until then: longer, or not any more.
    pub(crate) fn set(&self, chain: u64, until: Nanos, now: Nanos) {
        let mut known = self.lock();
        if let Some(told) = known.chains.get_mut(&chain) {
            *told = until;
        }
        if until <= now {
            known.sweep(now);
            self.some.store(!known.blocks.is_empty(), Relaxed);
        }
    }

    /// Which of these blocks are favoured.
    pub(crate) fn which(&self, prints: &[BlockFingerprint], now: Nanos) -> Vec<bool> {
        let favours = self.at(now);
        prints.iter().map(|print| favours.has(*print)).collect()
    }

    /// What is favoured at a time.
    pub(crate) fn at(&self, now: Nanos) -> Favours<'_> {
        Favours { known: self.some.load(Relaxed).then(|| self.lock()), now }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prints(range: std::ops::Range<u64>) -> Vec<BlockFingerprint> {
        range.map(|n| BlockFingerprint::from_parts(n.wrapping_mul(0x9e37_79b9_7f4a_7c15), 5)).collect()
    }

    #[test]
    fn there_are_at_most_so_many_and_those_whose_time_is_over_make_room() {
        let favoured = Favoured::default();
        let (all, more) = (prints(0..BLOCKS_MAX as u64), prints(1 << 30..(1 << 30) + 10));
        assert!(!favoured.at(Nanos(0)).any());
        assert_eq!(favoured.add(1, &all, Nanos(100), Nanos(0)), BLOCKS_MAX);
        assert_eq!(favoured.add(2, &more, Nanos(200), Nanos(50)), 0);
        assert_eq!(favoured.add(1, &all[..5], Nanos(150), Nanos(50)), 5, "those that are favoured go on");
        assert_eq!(
            favoured.which(&all[4..6], Nanos(120)),
            [true, true],
            "a chain's time is that of its blocks"
        );
        assert_eq!(favoured.add(2, &more, Nanos(200), Nanos(150)), 10);
        assert_eq!(favoured.which(&all[4..6], Nanos(160)), [false, false]);
        assert_eq!(favoured.which(&more[..1], Nanos(200)), [false], "its time is over");
    }

    #[test]
    fn a_chains_time_is_that_of_all_of_its_blocks_and_what_hangs_on_it_is_of_it() {
        let favoured = Favoured::default();
        let all = prints(0..6);
        assert_eq!(favoured.add_behind(all[0], &all[1..], Nanos(0)), 0);
        favoured.add(7, &all[..2], Nanos(100), Nanos(0));
        assert_eq!(favoured.add_behind(all[1], &all[2..4], Nanos(10)), 2);
        assert_eq!(favoured.add_behind(all[5], &all[4..5], Nanos(10)), 0);
        favoured.set(7, Nanos(300), Nanos(50));
        assert_eq!(favoured.which(&all, Nanos(299)), [true, true, true, true, false, false]);
        favoured.set(7, Nanos(60), Nanos(60));
        assert!(!favoured.at(Nanos(60)).any(), "nothing is kept of what has ended");
    }
}
