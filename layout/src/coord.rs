//! Shard coordinates: which part of a tensor-parallel state a block's bytes are.
//!
//! A coordinate belongs to one group of a model. `Replicated` state (MLA, or a model without tensor
//! parallelism) is stored once and read by every rank; a head range is stored once however many ranks hold it.

use std::fmt;

/// The part of a tensor-parallel state that a block holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub enum Coordinate {
    /// The whole state: any rank writes it, every rank reads it.
    #[default]
    Replicated,
    /// Heads `start .. start + count` of `of`. Build it with [`Coordinate::heads`].
    Heads {
        /// First head.
        start: u16,
        /// Number of heads, at least one.
        count: u16,
        /// Heads in the whole state.
        of: u16,
    },
}

impl Coordinate {
    /// A head range, or `None` if it is empty or reaches past the last head. The whole range is a head
    /// range too: it is not the same coordinate as `Replicated`.
    pub fn heads(start: u16, count: u16, of: u16) -> Option<Self> {
        let end = start.checked_add(count)?;
        (count > 0 && end <= of).then_some(Self::Heads { start, count, of })
    }

    /// Eight bytes that name this coordinate and no other: `start | count | of | 0`, each u16 little-endian;
    /// all zero for `Replicated`.
    pub const fn to_u64(self) -> u64 {
        match self {
            Self::Replicated => 0,
            Self::Heads { start, count, of } => start as u64 | (count as u64) << 16 | (of as u64) << 32,
        }
    }

    /// The coordinate that [`Coordinate::to_u64`] encoded, or `None` if no coordinate encodes so.
    pub fn from_u64(raw: u64) -> Option<Self> {
        if raw == 0 {
            return Some(Self::Replicated);
        }
        let [s0, s1, c0, c1, o0, o1, 0, 0] = raw.to_le_bytes() else { return None };
        Self::heads(u16::from_le_bytes([s0, s1]), u16::from_le_bytes([c0, c1]), u16::from_le_bytes([o0, o1]))
    }
}

impl fmt::Display for Coordinate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicated => write!(f, "replicated"),
            Self::Heads { start, count, of } => write!(f, "heads {start}+{count}/{of}"),
        }
    }
}

/// Why a state cannot be split over a number of ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TpError {
    /// No ranks.
    NoRanks,
    /// The rank is not one of them.
    Rank {
        /// The rank asked for.
        rank: u16,
        /// How many there are.
        ranks: u16,
    },
    /// Neither number divides the other, so heads would be cut or shared unevenly.
    Uneven {
        /// Heads in the state.
        heads: u16,
        /// How many ranks there are.
        ranks: u16,
    },
}

impl fmt::Display for TpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRanks => write!(f, "the number of tensor-parallel ranks is 0: use at least 1"),
            Self::Rank { rank, ranks } => {
                write!(
                    f,
                    "rank {rank} does not exist among {ranks} ranks: ranks count from 0, so the \
                    number must be below {ranks}"
                )
            }
            Self::Uneven { heads, ranks } => write!(
                f,
                "{heads} heads cannot be split evenly over {ranks} ranks: use a divisor or a multiple of \
                {heads}"
            ),
        }
    }
}

impl std::error::Error for TpError {}

/// The part of a state that one of `ranks` tensor-parallel ranks holds.
///
/// No heads (`heads == 0`: a latent or an opaque page) means that every rank holds the whole state. Up to
/// `heads` ranks hold equal runs of heads, one rank all of them; with more ranks than heads, neighbouring ranks
/// share one head each (2 heads on 8 ranks: ranks 0 to 3 hold head 0).
pub fn tensor_parallel(heads: u16, ranks: u16, rank: u16) -> Result<Coordinate, TpError> {
    if ranks == 0 {
        return Err(TpError::NoRanks);
    }
    if rank >= ranks {
        return Err(TpError::Rank { rank, ranks });
    }
    if heads == 0 {
        return Ok(Coordinate::Replicated);
    }
    let uneven = TpError::Uneven { heads, ranks };
    let (start, count) = if ranks <= heads {
        let count = exact_quotient(heads, ranks).ok_or(uneven)?;
        (rank.checked_mul(count).ok_or(uneven)?, count)
    } else {
        let sharers = exact_quotient(ranks, heads).ok_or(uneven)?;
        (rank.checked_div(sharers).ok_or(uneven)?, 1)
    };
    Coordinate::heads(start, count, heads).ok_or(uneven)
}

/// The distinct parts of a state over all of `ranks`, in rank order: what a block is whole with.
pub fn coordinates(heads: u16, ranks: u16) -> Result<Vec<Coordinate>, TpError> {
    // Checks the numbers once, for rank 0; the others fail in the same cases.
    tensor_parallel(heads, ranks, 0)?;
    let mut all = Vec::with_capacity(usize::from(heads.min(ranks).max(1)));
    for rank in 0..ranks {
        let coordinate = tensor_parallel(heads, ranks, rank)?;
        if all.last() != Some(&coordinate) {
            all.push(coordinate);
        }
    }
    Ok(all)
}

fn exact_quotient(number: u16, divisor: u16) -> Option<u16> {
    if number.checked_rem(divisor)? == 0 { number.checked_div(divisor) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_coordinate_survives_its_encoding(start: u16, count: u16, of: u16) {
            if let Some(coordinate) = Coordinate::heads(start, count, of) {
                prop_assert_eq!(Coordinate::from_u64(coordinate.to_u64()), Some(coordinate));
            }
        }

        #[test]
        fn a_decoded_coordinate_encodes_to_the_same_bytes(raw: u64) {
            if let Some(coordinate) = Coordinate::from_u64(raw) {
                prop_assert_eq!(coordinate.to_u64(), raw);
            }
        }
    }

    #[test]
    fn empty_and_overflowing_ranges_are_refused() {
        assert_eq!(Coordinate::heads(0, 0, 8), None);
        assert_eq!(Coordinate::heads(7, 2, 8), None);
        assert_eq!(Coordinate::heads(u16::MAX, 1, u16::MAX), None);
    }

    fn heads(start: u16, count: u16, of: u16) -> Coordinate {
        Coordinate::heads(start, count, of).unwrap()
    }

    #[test]
    fn heads_split_evenly_over_the_ranks() {
        assert_eq!(coordinates(8, 1), Ok(vec![heads(0, 8, 8)]));
        assert_eq!(
            coordinates(8, 4),
            Ok(vec![heads(0, 2, 8), heads(2, 2, 8), heads(4, 2, 8), heads(6, 2, 8)])
        );
        assert_eq!(tensor_parallel(8, 8, 7), Ok(heads(7, 1, 8)));
    }

    #[test]
    fn too_few_heads_are_shared_by_neighbouring_ranks() {
        let held: Vec<_> = (0..8).map(|rank| tensor_parallel(2, 8, rank).unwrap()).collect();
        assert_eq!(held[..4], [heads(0, 1, 2); 4]);
        assert_eq!(held[4..], [heads(1, 1, 2); 4]);
        assert_eq!(coordinates(2, 8), Ok(vec![heads(0, 1, 2), heads(1, 1, 2)]));
    }

    #[test]
    fn a_state_without_heads_is_replicated_on_every_rank() {
        assert_eq!(tensor_parallel(0, 8, 7), Ok(Coordinate::Replicated));
        assert_eq!(coordinates(0, 8), Ok(vec![Coordinate::Replicated]));
    }

    #[test]
    fn uneven_splits_and_absent_ranks_are_refused() {
        for (of, ranks) in [(8, 3), (8, 12), (5, 2), (2, 3), (3, 65_534)] {
            let uneven = Err(TpError::Uneven { heads: of, ranks });
            assert_eq!(tensor_parallel(of, ranks, 0), uneven);
            assert_eq!(coordinates(of, ranks).map(|_| Coordinate::Replicated), uneven);
        }
        assert_eq!(tensor_parallel(8, 4, 4), Err(TpError::Rank { rank: 4, ranks: 4 }));
        assert_eq!(tensor_parallel(0, 0, 0), Err(TpError::NoRanks));
        assert_eq!(coordinates(0, 0), Err(TpError::NoRanks));
    }

    proptest! {
        #[test]
        fn every_head_is_held_equally_often(small in 1u16..64, factor in 1u16..64, more_ranks: bool) {
            let large = small * factor;
            let (of, ranks) = if more_ranks { (small, large) } else { (large, small) };
            let mut holders = vec![0u16; usize::from(of)];
            for rank in 0..ranks {
                let Ok(Coordinate::Heads { start, count, of: all }) = tensor_parallel(of, ranks, rank) else {
                    panic!("{of} heads on {ranks} ranks");
                };
                prop_assert_eq!(all, of);
                for held in &mut holders[usize::from(start)..usize::from(start + count)] {
                    *held += 1;
                }
            }
            let times = if more_ranks { factor } else { 1 };
            prop_assert!(holders.iter().all(|&held| held == times));
            let distinct = coordinates(of, ranks).unwrap();
            prop_assert_eq!(distinct.len(), usize::from(of.min(ranks)));
            prop_assert!(distinct.is_sorted());
        }
    }
}
