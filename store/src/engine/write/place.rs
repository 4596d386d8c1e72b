//! The place of a record: whether it fits into a segment, and how it looks there.

use std::rc::Rc;

use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::{self, PAGE_BYTES, page_align};

use super::draft::{Draft, Payload, Room, Written, footer_share};
use super::image::Image;
use super::log::Log;
use crate::engine::shared::names::Namespace;
use crate::engine::volume::segment::{Hold, Segment, SegmentState, entry, record_bytes};
use kvarts_contract::error::Reason;

/// What a record would be at a place.
pub(crate) struct Sheet {
    pub(crate) headers: Vec<u8>,
    entries: Vec<Entry>,
    /// Where the record's own header begins.
    offset: u64,
    header_bytes: u32,
    payload_bytes: u64,
    /// Headers and payload.
    pub(crate) len: u64,
    pub(crate) footer_bytes: u64,
    /// The sequence after its own.
    next_sequence: u64,
}

impl Log {
    /// The record's image at the end of `segment`, or `None` if it does not fit. Nothing is awaited in here, so
    /// records get their places, sequences and positions in one order.
    pub(crate) fn try_place(
        &self,
        segment: &Rc<Segment>,
        draft: &Draft<'_>,
    ) -> Result<Option<Image>, Reason> {
        Ok(self.fitting(segment, draft)?.map(|sheet| self.take_place(segment, draft, sheet)))
    }

    /// What the record would be at the end of `segment`, if it fits.
    pub(crate) fn fitting(&self, segment: &Segment, draft: &Draft<'_>) -> Result<Option<Sheet>, Reason> {
        if let Some(Payload::Image { still, .. }) = &draft.payload
            && !still()
        {
            return Err(Reason::Busy("the blocks to be moved were evicted or deleted"));
        }
        let start = segment.tail.borrow().next;
        let sheet = self.sheet(segment, draft, start, true)?;
        Ok(self.fits(segment, sheet.len, sheet.footer_bytes).then_some(sheet))
    }

    /// Gives the record the place that its sheet is for. Nothing was awaited since that was made.
    pub(crate) fn take_place(&self, segment: &Rc<Segment>, draft: &Draft<'_>, sheet: Sheet) -> Image {
        let start = segment.tail.borrow().next;
        let Sheet { headers, mut entries, offset, header_bytes, payload_bytes, len, .. } = sheet;
        let mut tail = segment.tail.borrow_mut();
        tail.footer_bytes += sheet.footer_bytes;
        for entry in &entries {
            match &entry.content {
                Content::Spec(defined) => tail.defined.insert((true, defined.local)),
                Content::Identity(defined) => tail.defined.insert((false, defined.local)),
                _ => false,
            };
        }
        let records = record_bytes(&entries);
        segment.book.append(len, records);
        self.volume.shared.admission.spend(len);
        if matches!(draft.payload, Some(Payload::Placed { .. } | Payload::There(_))) {
            self.put_bytes.set(self.put_bytes.get() + records);
            self.volume.shared.wrote(records);
        }
        tail.entries.append(&mut entries);
        let given = tail.give_out(len);
        debug_assert_eq!(given, start);
        self.volume.sequence.set(sheet.next_sequence);
        let segment = Rc::clone(segment);
        let end = start + len;
        let _hold = Rc::new(Hold::new(&segment));
        let written =
            Written { segment: Rc::clone(&segment), offset, header_bytes, payload_bytes, end, _hold };
        Image { segment, offset: start, headers, written }
    }

    /// What the record would be at `start`. With `define`, what the segment has not defined comes before it.
    pub(crate) fn sheet(
        &self,
        segment: &Segment,
        draft: &Draft<'_>,
        start: u64,
        define: bool,
    ) -> Result<Sheet, Reason> {
        let mut headers = Vec::new();
        let mut entries = Vec::new();
        let mut sequence = self.volume.sequence.get();
        if let Some(namespace) = draft.namespace.filter(|_| define) {
            let tail = segment.tail.borrow();
            let [spec, identity] = namespace.definitions();
            for (is_spec, definition) in [(true, spec), (false, identity)] {
                if tail.defined.contains(&(is_spec, definition.local)) {
                    continue;
                }
                let body = if is_spec { Body::Spec(definition) } else { Body::Identity(definition) };
                let offset = start + headers.len() as u64;
                let header = self.encode(segment, offset, sequence, &body, &[], 0)?;
                entries.push(entry(offset, sequence, header.len(), 0, &body));
                headers.extend_from_slice(&header);
                sequence += 1;
            }
        }
        let payload_bytes = draft.payload.as_ref().map_or(0, Payload::bytes);
        let offset = start + headers.len() as u64;
        let header = self.encode(segment, offset, sequence, &draft.body, draft.digests, payload_bytes)?;
        entries.push(entry(offset, sequence, header.len(), payload_bytes, &draft.body));
        let header_bytes =
            u32::try_from(header.len()).map_err(|_| Reason::TooMany("blocks in one record"))?;
        headers.extend_from_slice(&header);
        let image_bytes = page_align(payload_bytes).ok_or(Reason::TooMany("bytes in one record"))?;
        let len = headers.len() as u64 + image_bytes;
        let footer_bytes: u64 = entries.iter().map(footer_share).sum();
        let next_sequence = sequence + 1;
        Ok(Sheet { headers, entries, offset, header_bytes, payload_bytes, len, footer_bytes, next_sequence })
    }

    fn encode(
        &self,
        segment: &Segment,
        offset: u64,
        sequence: u64,
        body: &Body,
        digests: &[u32],
        payload_bytes: u64,
    ) -> Result<Vec<u8>, Reason> {
        let durable_upto = segment.tail.borrow().durable_upto;
        let fields = Fields { sequence, durable_upto, payload_bytes };
        let (position, secret) = (self.volume.position(segment, offset), &self.volume.shared.secret);
        Ok(record::encode(&position, secret, &fields, body, digests)?)
    }

    /// Whether `len` more bytes leave room for the footer and the trailer.
    pub(crate) fn fits(&self, segment: &Segment, len: u64, footer_bytes: u64) -> bool {
        let tail = segment.tail.borrow();
        let footer = page_align(tail.footer_bytes + footer_bytes + PAGE_BYTES).unwrap_or(u64::MAX);
        let end = tail.next.saturating_add(len).saturating_add(footer).saturating_add(PAGE_BYTES);
        end <= self.volume.shared.segment_bytes
            && tail.footer_bytes + footer_bytes + PAGE_BYTES <= format::MAX_FOOTER_BYTES as u64
            && segment.state.get() == SegmentState::Open
    }

    /// What the open segment has left for a record of this namespace; `None` without a segment, or with one in which
    /// nothing of the namespace lies yet: what it must define first is small, and so is what is lost by not asking.
    pub(crate) fn room(&self, namespace: &Namespace) -> Option<Room> {
        let open = self.open.borrow();
        let segment = open.as_ref().filter(|segment| segment.state.get() == SegmentState::Open)?;
        let tail = segment.tail.borrow();
        let [spec, identity] = namespace.definitions();
        if !tail.defined.contains(&(true, spec.local)) || !tail.defined.contains(&(false, identity.local)) {
            return None;
        }
        let bytes = self.volume.shared.segment_bytes.saturating_sub(tail.next + PAGE_BYTES);
        Some(Room { bytes, footer_bytes: tail.footer_bytes })
    }

    /// Whether records of `bytes` bytes find room in the open segment.
    pub(crate) fn takes(&self, bytes: u64) -> bool {
        let open = self.open.borrow();
        // A footer lists each block, each header has a page of its own: an eighth is more than either takes.
        open.as_ref().is_some_and(|segment| self.fits(segment, bytes + bytes / 8, bytes / 8))
    }
}
