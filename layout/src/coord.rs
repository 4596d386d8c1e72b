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

/// Why a number of tensor-parallel ranks does not fit a number of heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TpError {
    /// No ranks, or a rank that is not below the number of ranks.
    Rank,
    /// Neither number is a multiple of the other.
    Uneven {
        /// Heads of the state.
        heads: u16,
        /// Ranks asked for.
        ranks: u16,
    },
}

impl fmt::Display for TpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank => write!(f, "a rank must be below the number of ranks, which is at least one"),
            Self::Uneven { heads, ranks } => {
                write!(
                    f,
                    "{heads} heads cannot be split over {ranks} ranks: one must be a multiple of the other"
                )
            }
        }
    }
}

impl std::error::Error for TpError {}

/// The coordinate that a rank holds of a state with this many heads; `heads` 0 is a replicated state.
pub fn tensor_parallel(heads: u16, ranks: u16, rank: u16) -> Result<Coordinate, TpError> {
    if rank >= ranks {
        return Err(TpError::Rank);
    }
    if heads == 0 {
        return Ok(Coordinate::Replicated);
    }
    let uneven = TpError::Uneven { heads, ranks };
    let (count, start) = match (heads.checked_rem(ranks), ranks.checked_rem(heads)) {
        (Some(0), _) => {
            let count = heads.checked_div(ranks).ok_or(uneven)?;
            (count, rank.checked_mul(count).ok_or(uneven)?)
        }
        (_, Some(0)) => {
            (1, ranks.checked_div(heads).and_then(|copies| rank.checked_div(copies)).ok_or(uneven)?)
        }
        _ => return Err(uneven),
    };
    Coordinate::heads(start, count, heads).ok_or(uneven)
}

/// The distinct coordinates that this many ranks hold, in head order.
pub fn coordinates(heads: u16, ranks: u16) -> Result<Vec<Coordinate>, TpError> {
    if ranks == 0 {
        return Err(TpError::Rank);
    }
    let mut all =
        (0..ranks).map(|rank| tensor_parallel(heads, ranks, rank)).collect::<Result<Vec<_>, _>>()?;
    all.dedup();
    Ok(all)
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
}
