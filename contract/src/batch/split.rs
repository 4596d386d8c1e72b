//! Keys that stand more than once in a batch: what the store is asked leaves them out, what the caller is
//! answered has them in again.

use kvarts_layout::BlockKey;

use super::{BatchKind, Block};
use crate::error::Reason;

/// A key that stood before in its batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Repeat {
    place: u32,
    /// Where it stood first.
    first: u32,
    key: BlockKey,
}

/// Which keys of a batch stand again. A batch is at most `MAX_REQUEST_BLOCKS` keys: places fit in 32 bits.
#[derive(Debug, Default)]
pub(super) struct Split {
    /// By place.
    repeats: Vec<Repeat>,
}

impl Split {
    pub(super) fn of(blocks: &[Block]) -> Self {
        // An engine's scheduler waits for this, and most batches repeat nothing.
        if all_differ(blocks.iter().map(|block| &block.key)) {
            return Self::default();
        }
        let mut sorted: Vec<(&Block, u32)> = blocks.iter().zip(0u32..).collect();
        sorted.sort_unstable();
        let mut repeats = Vec::new();
        for run in sorted.chunk_by(|(a, _), (b, _)| a == b) {
            let Some((&(block, first), again)) = run.split_first() else { continue };
            repeats.extend(again.iter().map(|&(_, place)| Repeat { place, first, key: block.key }));
        }
        repeats.sort_unstable_by_key(|repeat| repeat.place);
        Self { repeats }
    }

    /// The places of those of `count` blocks that stand for the first time.
    pub(super) fn distinct(&self, count: usize) -> Vec<u32> {
        let mut repeats = self.repeats.iter().peekable();
        (0..count as u32).filter(|place| repeats.next_if(|repeat| repeat.place == *place).is_none()).collect()
    }

    /// Puts the results of repeated keys where they stand.
    pub(super) fn expand(
        &self,
        kind: BatchKind,
        results: Vec<Result<(), Reason>>,
    ) -> Vec<Result<(), Reason>> {
        if self.repeats.is_empty() {
            return results;
        }
        let mut whole = Vec::with_capacity(results.len() + self.repeats.len());
        let mut repeats = self.repeats.iter().peekable();
        let mut results = results.into_iter();
        loop {
            let place = whole.len() as u32;
            if let Some(repeat) = repeats.next_if(|repeat| repeat.place == place) {
                let first = whole.get(repeat.first as usize).cloned();
                whole.push(match kind {
                    BatchKind::Get => Err(Reason::Duplicate(repeat.key)),
                    _ => {
                        first.unwrap_or(Err(Reason::Bug("a repeated key comes before its first occurrence")))
                    }
                });
            } else if let Some(result) = results.next() {
                whole.push(result);
            } else {
                return whole;
            }
        }
    }
}

/// Whether all these keys differ, if that is soon seen: false says nothing.
pub(super) fn all_differ<'a>(keys: impl ExactSizeIterator<Item = &'a BlockKey>) -> bool {
    const TRIES: usize = 64;
    let mut seen = vec![0u64; (keys.len() * 2).next_power_of_two()];
    let last = seen.len() - 1;
    keys.map(|key| mark(key).max(1)).all(|mark| {
        let mut at = (mark.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize;
        for _ in 0..TRIES {
            match seen.get_mut(at & last) {
                Some(place) if *place == 0 => {
                    *place = mark;
                    return true;
                }
                Some(place) if *place != mark => at += 1,
                _ => return false,
            }
        }
        false
    })
}

/// A number that is equal for equal keys, and seldom for others.
fn mark(key: &BlockKey) -> u64 {
    let (words, _) = key.0.as_chunks();
    let mixed = |mark: u64, word: &[u8; 8]| mark.rotate_left(17) ^ u64::from_le_bytes(*word);
    words.iter().fold(0, mixed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::SpaceCause;
    use kvarts_layout::{Coordinate, Group};

    fn blocks(names: &[u8]) -> Vec<Block> {
        let block = |name: &u8| Block {
            group: Group(0),
            coordinate: Coordinate::Replicated,
            key: BlockKey([*name; 32]),
        };
        names.iter().map(block).collect()
    }

    #[test]
    fn repeats_are_left_out_and_come_back_where_they_stood() {
        let names = [5, 9, 5, 1, 9, 9, 2];
        let split = Split::of(&blocks(&names));
        let places: Vec<_> = split.repeats.iter().map(|repeat| (repeat.place, repeat.first)).collect();
        assert_eq!(places, [(2, 0), (4, 1), (5, 1)]);
        assert_eq!(split.distinct(7), [0, 1, 3, 6]);
        assert_eq!(Split::of(&blocks(&[5, 9, 1])).distinct(3), [0, 1, 2]);
        let mut columns = blocks(&[5, 5]);
        columns[1].group = Group(1);
        assert_eq!(Split::of(&columns).distinct(2), [0, 1], "blocks of two groups");
        let asked = vec![Ok(()), Err(Reason::InFlight), Ok(()), Err(Reason::NoSpace(SpaceCause::Disk))];
        let put = split.expand(BatchKind::Put, asked.clone());
        let wait = || Err(Reason::InFlight);
        assert_eq!(
            put,
            [Ok(()), wait(), Ok(()), Ok(()), wait(), wait(), Err(Reason::NoSpace(SpaceCause::Disk))]
        );
        let get = split.expand(BatchKind::Get, asked);
        let again = |name| Err(Reason::Duplicate(BlockKey([name; 32])));
        assert_eq!(
            get,
            [Ok(()), wait(), again(5), Ok(()), again(9), again(9), Err(Reason::NoSpace(SpaceCause::Disk))]
        );
    }

    #[test]
    fn a_batch_without_repeats_is_left_as_it_is() {
        let split = Split::of(&blocks(&[3, 1, 2]));
        let results = vec![Ok(()), Err(Reason::InFlight), Ok(())];
        assert_eq!(split.expand(BatchKind::Get, results.clone()), results);
    }
}
