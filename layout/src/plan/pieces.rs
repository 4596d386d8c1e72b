//! The scatter list of a region, expanded from its runs when it is asked for.

use super::placement::{Address, Placed, Placement};
use super::step::{Along, Run};
use crate::arrange::PartPlace;

/// One wanted chunk: where it lies in its region, and where it belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Block within the record.
    pub block: u32,
    /// Block within the whole plan: what the placement counts by.
    pub ordinal: u32,
    /// Canonical index of the part within the block: its place among the block's digests, and by
    /// `RunLayout::layer_of_part` its layer.
    pub chunk: u32,
    /// Bytes from the region's start.
    pub source: u64,
    /// Bytes of the chunk.
    pub len: u64,
    /// Where the chunk belongs. In a direct region it is there already.
    pub destination: Address,
}

/// The pieces of one region, in file order.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    placement: &'a Placement,
    /// All parts of a block of the region's record.
    parts: &'a [PartPlace],
    runs: std::slice::Iter<'a, Run>,
    current: Option<Current<'a>>,
    /// A piece has no place.
    lost: bool,
}

/// The run that is being expanded, and its first part.
#[derive(Clone, Copy, Debug)]
struct Current<'a> {
    run: &'a Run,
    index: u32,
    place: &'a PartPlace,
    placed: Placed,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(placement: &'a Placement, parts: &'a [PartPlace], runs: &'a [Run]) -> Self {
        Self { placement, parts, runs: runs.iter(), current: None, lost: false }
    }

    /// Whether every piece was given: one that has no place would end them before.
    pub fn is_done(&self) -> bool {
        let expanded = self.current.is_none_or(|current| current.index >= current.run.count);
        expanded && self.runs.len() == 0 && !self.lost
    }

    /// Notes what is not there: then a piece is lost.
    fn found<T>(&mut self, found: Option<T>) -> Option<T> {
        self.lost |= found.is_none();
        found
    }

    fn next_run(&mut self) -> Option<Current<'a>> {
        let run = self.runs.next()?;
        let at = usize::from(run.chunk);
        let found = self.parts.get(at).zip(self.placement.part(u32::from(run.chunk)));
        let (place, placed) = self.found(found)?;
        Some(Current { run, index: 0, place, placed })
    }
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        let current = match self.current {
            Some(current) if current.index < current.run.count => current,
            _ => self.next_run()?,
        };
        let Current { run, index, place: first, placed } = current;
        self.current = Some(Current { index: index.saturating_add(1), ..current });
        let chunk = u32::from(run.chunk);
        match run.along {
            Along::Blocks => {
                let ordinal = run.ordinal.saturating_add(index);
                let slot = self.found(self.placement.slot(ordinal))?;
                Some(Piece {
                    block: run.block.saturating_add(index),
                    ordinal,
                    chunk,
                    source: run.source.saturating_add(first.step.saturating_mul(u64::from(index))),
                    len: first.bytes,
                    destination: placed.address(slot),
                })
            }
            Along::Parts => {
                let chunk = chunk.saturating_add(index);
                let place = usize::try_from(chunk).ok().and_then(|at| self.parts.get(at));
                let found = place.zip(self.placement.address(chunk, run.ordinal));
                let (place, destination) = self.found(found)?;
                Some(Piece {
                    block: run.block,
                    ordinal: run.ordinal,
                    chunk,
                    source: run.source.saturating_add(place.offset.saturating_sub(first.offset)),
                    len: place.bytes,
                    destination,
                })
            }
        }
    }
}
