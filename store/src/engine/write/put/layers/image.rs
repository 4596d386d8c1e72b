//! The payload of a record on its way to its place, layer by layer.

use std::iter::Peekable;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::plan::{WritePiece, WritePlan, WriteSource};

use super::Place;
use crate::driver::Transfer;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::Segment;
use kvarts_contract::api::Placed;
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::{buffers::Buf, io_error::IoError};

/// The most pieces of one write that is made without a copy.
const PIECES_MAX: usize = 512;

/// A payload under way to its place. Layers end within pages: the beginning of such a page is kept until the next
/// layer fills it, so each page is written once.
pub(super) struct Image<'a> {
    place: &'a Place,
    from: &'a Placed,
    /// What is left of the payload.
    plan: Peekable<WritePlan<'a>>,
    /// The beginning of a page that the next layer fills.
    carry: Vec<u8>,
    /// Bytes of the payload that have been given to writes: whole pages.
    done: u64,
}

impl<'a> Image<'a> {
    /// Nothing of it written.
    pub(super) fn new(place: &'a Place, from: &'a Placed) -> Result<Self, Reason> {
        let plan = WritePlan::new(&place.layout, from.places(), place.run.start)?;
        Ok(Self { place, from, plan: plan.peekable(), carry: Vec::new(), done: 0 })
    }

    /// Where the bytes of a layer end, what pads them included.
    fn end(&self, layer: u32) -> u64 {
        let next = layer.checked_add(1).and_then(|next| self.place.layout.layer_span(next));
        next.map_or(self.place.layout.image_bytes(), |span| span.offset)
    }

    /// Begins the writes of a layer, up to its last whole page. Layers come in order.
    pub(super) async fn issue(
        &mut self,
        volume: &Volume,
        segment: &Segment,
        layer: u32,
        writes: &mut Vec<Transfer>,
    ) -> Result<(), IoError> {
        let end = self.end(layer);
        let mut pieces: Vec<WritePiece> = Vec::new();
        while let Some(piece) = self.plan.next_if(|piece| piece.payload_offset < end) {
            pieces.push(piece);
        }
        let at = self.place.at + self.done;
        if let Some(buffers) = self.as_they_lie(volume, &pieces, end) {
            self.done = end;
            writes.push(volume.driver.write_v(Class::Put, segment.file, at, buffers, false));
            return Ok(());
        }
        let bytes = (end - self.done) as usize;
        let mut staging = volume.stage(bytes).await?;
        staging.copy_in(0, &self.carry);
        for piece in &pieces {
            let to = (piece.payload_offset - self.done) as usize;
            self.from.fill(piece, &mut staging, to).ok_or_else(|| IoError::unplaced(bytes))?;
        }
        let whole = bytes - bytes % PAGE_BYTES as usize;
        self.carry.resize(bytes - whole, 0);
        staging.copy_out(whole, &mut self.carry);
        self.done += whole as u64;
        if let Some(pages) = staging.first(whole).filter(|pages| !pages.is_empty()) {
            writes.push(volume.driver.write(Class::Put, segment.file, at, pages, false));
        }
        Ok(())
    }

    /// The pieces as buffers of the caller, if the device can take them as they lie.
    fn as_they_lie(&self, volume: &Volume, pieces: &[WritePiece], end: u64) -> Option<Vec<Buf>> {
        let whole = self.carry.is_empty() && end.is_multiple_of(PAGE_BYTES) && self.from.is_page_aligned();
        if !whole || pieces.is_empty() || pieces.len() > PIECES_MAX {
            return None;
        }
        let buffer = |piece: &WritePiece| match piece.source {
            _ if !piece.len.is_multiple_of(PAGE_BYTES) => None,
            WriteSource::Memory(at) if at.offset.is_multiple_of(PAGE_BYTES) => {
                self.from.slice(at, piece.len).map(Buf::from)
            }
            WriteSource::Memory(_) => None,
            WriteSource::Zeros => volume.shared.zeros(piece.len),
        };
        pieces.iter().map(buffer).collect()
    }
}
