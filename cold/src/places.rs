//! Memory for the bytes of a range, which are written there as they come.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_contract::buffers::{BufMut, SharedBuf};

use crate::fault::Fault;

/// Where the bytes of a range go: what is wanted of it to its places, what lies between to none. Never takes more bytes than the
/// range has.
///
/// While a request has it, nothing else touches the memory; a request that is broken off has written some of it.
#[derive(Clone, Debug)]
pub struct Places {
    /// By what is before them in the range.
    parts: Arc<[(u64, SharedBuf)]>,
    bytes: u64,
    came: Arc<AtomicU64>,
}

impl Places {
    /// Places of parts of a range, from front to back; each with what is before it in the range.
    pub fn new(bytes: u64, parts: Vec<(u64, SharedBuf)>) -> Self {
        Self { parts: parts.into(), bytes, came: Arc::default() }
    }

    /// One place for the whole range.
    pub fn whole(memory: SharedBuf) -> Self {
        Self::new(memory.len() as u64, vec![(0, memory)])
    }

    /// Memory of its own for a whole range.
    pub fn of_own(bytes: u64) -> Result<(Self, SharedBuf), Fault> {
        let memory = usize::try_from(bytes).ok().and_then(|bytes| BufMut::zeroed(bytes).ok());
        let memory = memory
            .ok_or_else(|| Fault::Refused("the memory for the answer could not be allocated".to_owned()))?
            .share();
        // A region has a page at least.
        let memory = memory.slice(0, bytes as usize).unwrap_or(memory);
        Ok((Self::whole(memory.clone()), memory))
    }

    /// Bytes of the range.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that came, again and again if the range was asked for again.
    pub fn came(&self) -> u64 {
        self.came.load(Ordering::Relaxed)
    }

    /// Takes bytes of the range; `at` is what is before them in it. Refuses what lies behind its end.
    pub fn take(&self, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let taken = at..at.checked_add(bytes.len() as u64).ok_or(Fault::Length)?;
        if taken.end > self.bytes {
            return Err(Fault::Length);
        }
        // The first part that ends behind the beginning.
        let first = self.parts.partition_point(|(from, part)| from + part.len() as u64 <= at);
        for (from, part) in self.parts.iter().skip(first) {
            let own = *from..from.saturating_add(part.len() as u64);
            let both = own.start.max(taken.start)..own.end.min(taken.end);
            if both.start >= both.end {
                break;
            }
            let within =
                |range: &Range<u64>, from: u64| (range.start - from) as usize..(range.end - from) as usize;
            let some = bytes.get(within(&both, taken.start)).ok_or(Fault::Length)?;
            part.copy_in(within(&both, own.start).start, some);
        }
        self.came.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the bytes of a whole range from other memory.
    pub(crate) fn take_all(&self, from: &SharedBuf) {
        for (before, part) in self.parts.iter() {
            part.copy_from(0, from, *before as usize, part.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(of: &[(u64, usize)]) -> (Places, Vec<SharedBuf>) {
        let memory: Vec<_> = of.iter().map(|(_, bytes)| BufMut::zeroed(*bytes).unwrap().share()).collect();
        let memory: Vec<_> =
            memory.iter().zip(of).map(|(one, (_, bytes))| one.slice(0, *bytes).unwrap()).collect();
        let at = of.iter().zip(&memory).map(|((at, _), one)| (*at, one.clone())).collect();
        (Places::new(20, at), memory)
    }

    #[test]
    fn bytes_come_in_any_pieces_and_what_lies_between_goes_nowhere() {
        let range: Vec<u8> = (1..=20).collect();
        for piece in 1..=20 {
            let (places, memory) = parts(&[(2, 3), (5, 4), (12, 8)]);
            for (number, bytes) in range.chunks(piece).enumerate() {
                places.take((number * piece) as u64, bytes).unwrap();
            }
            let got: Vec<Vec<u8>> = memory.iter().map(SharedBuf::to_vec).collect();
            assert_eq!(got, [&range[2..5], &range[5..9], &range[12..20]], "pieces of {piece}");
            assert_eq!(places.came(), 20);
        }
    }

    #[test]
    fn more_than_the_range_is_refused_and_written_nowhere() {
        let (places, memory) = parts(&[(12, 8)]);
        for (at, bytes) in [(0, 21), (13, 8), (20, 1), (u64::MAX, 2)] {
            assert_eq!(places.take(at, &vec![7; bytes]), Err(Fault::Length));
        }
        assert_eq!((memory[0].to_vec(), places.came()), (vec![0; 8], 0));
        assert_eq!(places.take(20, &[]), Ok(()));
    }
}
