//! The records that a footer lists, compared with what lies there.

use kvarts_layout::BlockKey;
use kvarts_layout::format::footer::{Content, Entry, Footer};
use kvarts_layout::format::record::{Body, Prefix};
use kvarts_layout::format::recovery::{Decision, Found, Later, Proof, RecordSighting, Scan, record_row};
use kvarts_layout::format::trailer::{SealReason, Trailer};
use kvarts_layout::format::{PAGE_BYTES, Position};

use super::options::Level;
use super::outcome::{Outcome, Subject};
use crate::findings::{self, Finding, Findings};
use crate::holes::touched;
use crate::names::Names;
use crate::segment::Ends;
use crate::walk::{self, Met, Payload, about_payload, describe, look, read_payload};
use crate::window::Window;

/// Blocks that an entry lists.
pub(super) fn blocks_of(entry: &Entry) -> usize {
    match &entry.content {
        Content::Blocks(blocks) => blocks.blocks.len(),
        _ => 0,
    }
}

/// One sealed segment under way.
struct Listing<'a, 'w> {
    window: &'a mut Window<'w>,
    subject: &'a Subject<'a>,
    /// The segment under its generation.
    segment: Position,
    names: Names,
    into: &'a mut Findings,
    good: Vec<Met>,
    unlisted: Vec<Met>,
    /// Findings that need to know how far the segment had been flushed.
    padding: Vec<Met>,
    durable_upto: u64,
}

/// Reads what a footer lists, in log order.
pub(super) fn check(
    window: &mut Window<'_>,
    subject: &Subject<'_>,
    ends: &Ends,
    (trailer, footer): (Trailer, Footer),
    into: &mut Findings,
) -> Outcome {
    let segment = ends.trailer_position.at(0);
    let generation = segment.generation;
    if subject.level == Level::Quick {
        return Outcome::Sealed { generation, trailer, footer, good: Vec::new(), unlisted: Vec::new() };
    }
    // Sealed in order, everything up to the end of the log was flushed and is listed, without gaps.
    let in_order = trailer.reason == SealReason::Normal;
    let mut listing = Listing {
        window,
        subject,
        segment,
        names: Names::default(),
        into,
        good: Vec::new(),
        unlisted: Vec::new(),
        padding: Vec::new(),
        durable_upto: if in_order { trailer.log_end } else { 0 },
    };
    let mut next = PAGE_BYTES;
    for entry in &footer.records {
        if in_order {
            listing.gap(next, entry.offset);
        }
        listing.entry(entry);
        let payload = entry.payload_bytes.next_multiple_of(PAGE_BYTES);
        next = entry.offset.saturating_add(u64::from(entry.header_bytes)).saturating_add(payload);
    }
    if in_order {
        listing.gap(next, trailer.log_end);
    }
    for met in std::mem::take(&mut listing.padding) {
        let durable = met.offset < listing.durable_upto;
        about_payload(&listing.segment, &met, durable, listing.into);
    }
    let (good, unlisted) = (listing.good, listing.unlisted);
    Outcome::Sealed { generation, trailer, footer, good, unlisted }
}

impl Listing<'_, '_> {
    fn entry(&mut self, entry: &Entry) {
        let position = self.segment.at(entry.offset);
        let secret = &self.subject.keyring.secret;
        if matches!(entry.content, Content::Blocks(_))
            && touched(self.window.holes(), entry.offset, u64::from(entry.header_bytes))
        {
            // Evicted as a whole, by decision: nothing is expected there.
            return;
        }
        let seen = look(self.window, &position, secret);
        self.names.note(&seen);
        let (Some(prefix), body) = (seen.prefix, seen.body) else {
            self.report(entry, seen.found, None);
            return;
        };
        self.durable_upto = self.durable_upto.max(prefix.durable_upto);
        let mut met = Met {
            offset: entry.offset,
            found: seen.found,
            prefix,
            body,
            payload: Payload::None,
            model: self.model(entry),
            namespace: self.namespace(entry),
        };
        let believes = kvarts_layout::planted!("fsck-believes-footers");
        if let Some(field) = difference(entry, &met).filter(|_| !believes) {
            let finding = Finding::at(findings::FOOTER_DISAGREES, walk::place(&self.segment, entry.offset));
            self.into.take(self.lost(entry, finding.found(field)));
            self.keep_unlisted(&position, met);
            return;
        }
        match (&met.body, met.found) {
            (Some(body), Found::RecordWhole) if !self.names.define(body) => {
                met.payload = Payload::Unusable(findings::DEFINITION_DAMAGED);
            }
            (Some(body), Found::RecordUnread) => {
                let deep = self.subject.level == Level::Deep;
                met.payload = read_payload(
                    self.window,
                    (&position, secret),
                    (&prefix, body),
                    &mut self.names,
                    (true, deep),
                );
                if let Payload::Read(verified) = &met.payload {
                    met.found = if verified.is_whole() { Found::RecordWhole } else { Found::RecordBroken };
                }
            }
            _ => {}
        }
        self.report(entry, met.found, Some(&met));
        self.keep(met);
    }

    /// Keeps what is good of a record that the footer lists as it is.
    fn keep(&mut self, mut met: Met) {
        if let (Found::RecordBroken, Payload::Read(verified)) = (met.found, &met.payload)
            && let Some(rest) = verified.sound_part()
        {
            // The engine misses the blocks whose digests fail, and serves the others.
            met.payload = Payload::Read(Box::new(rest));
            met.found = Found::RecordWhole;
        }
        match &met.payload {
            Payload::Unusable(_) => about_payload(&self.segment, &met, true, self.into),
            Payload::Read(verified) if verified.dirty.is_some() => self.padding.push(met.clone()),
            _ => {}
        }
        let is_good = matches!(
            met.found,
            Found::RecordWhole
                | Found::RecordUnread
                | Found::UnknownKind
                | Found::UnknownExtension
                | Found::Newer
        );
        let undefined = matches!(
            met.payload,
            Payload::Unusable(
                findings::RECORD_UNDEFINED | findings::DEFINITION_DAMAGED | findings::PAYLOAD_LENGTH
            )
        );
        if is_good && !undefined {
            self.good.push(met);
        }
    }

    fn model(&self, entry: &Entry) -> Option<String> {
        let Content::Blocks(blocks) = &entry.content else { return None };
        self.names.get(blocks.namespace).map(|namespace| namespace.model.clone())
    }

    fn namespace(&self, entry: &Entry) -> Option<[u8; 32]> {
        let Content::Blocks(blocks) = &entry.content else { return None };
        self.names.get(blocks.namespace).map(|namespace| namespace.id.0)
    }

    fn lost(&self, entry: &Entry, mut finding: Finding) -> Finding {
        if let Content::Blocks(blocks) = &entry.content {
            finding.blocks = blocks.blocks.len() as u64;
            finding.model = self.model(entry);
            finding.key = finding.key.or_else(|| blocks.blocks.first().map(|block| BlockKey(block.key)));
        }
        finding
    }

    /// The row for a listed record.
    fn report(&mut self, entry: &Entry, found: Found, met: Option<&Met>) {
        let sighting =
            RecordSighting { found, scan: Scan::Listed, proof: Proof::Durable, later: Later::Nothing };
        let row = record_row(&sighting);
        let mut finding = Finding::at(row, walk::place(&self.segment, entry.offset));
        if let Some(met) = met {
            describe(&mut finding, met);
        }
        if finding.is_problem() {
            finding = self.lost(entry, finding);
        }
        if let Some(Met { found: Found::RecordBroken, payload: Payload::Read(verified), .. }) = met
            && !verified.miscounted
        {
            finding.blocks = verified.damaged_blocks();
        }
        self.into.take(finding);
    }

    /// Pages that a footer written in order leaves no room for.
    fn gap(&mut self, from: u64, to: u64) {
        let mut offset = from;
        let mut reported = None;
        while offset < to {
            let position = self.segment.at(offset);
            let seen = look(self.window, &position, &self.subject.keyring.secret);
            let mut step = PAGE_BYTES;
            if let (Some(prefix), Some(body)) = (seen.prefix, seen.body)
                && prefix.record_bytes() <= to.saturating_sub(offset)
            {
                step = prefix.record_bytes();
                self.unlisted_record(&position, seen.found, prefix, body);
                reported = None;
            } else if reported != Some(seen.found) {
                reported = Some(seen.found);
                let row = record_row(&RecordSighting {
                    found: seen.found,
                    scan: Scan::Rescan,
                    proof: Proof::Durable,
                    later: Later::Nothing,
                });
                if row.decision != Decision::Adopt {
                    self.into.take(Finding::at(row, walk::place(&self.segment, offset)));
                }
            }
            offset = offset.saturating_add(step);
        }
    }

    fn unlisted_record(&mut self, position: &Position, found: Found, prefix: Prefix, body: Body) {
        let body = Some(body);
        let mut met = Met {
            offset: position.offset,
            found,
            prefix,
            body,
            payload: Payload::None,
            model: None,
            namespace: None,
        };
        let mut finding = Finding::at(findings::RECORD_NOT_LISTED, walk::place(&self.segment, met.offset));
        describe(&mut finding, &met);
        walk::count_lost(&mut finding, &met);
        self.into.take(finding);
        met.model = None;
        self.keep_unlisted(position, met);
    }

    /// Keeps a record that the footer does not list as it is, if it is whole.
    fn keep_unlisted(&mut self, position: &Position, mut met: Met) {
        let Some(body) = &met.body else { return };
        let secret = &self.subject.keyring.secret;
        if met.found == Found::RecordUnread {
            let about = (&met.prefix, body);
            met.payload =
                read_payload(self.window, (position, secret), about, &mut self.names, (true, false));
            if matches!(&met.payload, Payload::Read(verified) if verified.is_whole()) {
                met.found = Found::RecordWhole;
            }
        } else if met.found == Found::RecordWhole && !self.names.define(body) {
            return;
        }
        if met.found == Found::RecordWhole {
            self.unlisted.push(met);
        }
    }
}

/// The first field in which a proven record differs from what the footer says of it.
fn difference(entry: &Entry, met: &Met) -> Option<&'static str> {
    if entry.sequence != met.prefix.sequence {
        return Some("sequence");
    }
    if entry.payload_bytes != met.prefix.payload_bytes {
        return Some("payload_bytes");
    }
    if entry.header_bytes != met.prefix.header_bytes {
        return Some("header_bytes");
    }
    // What cannot be used has no body, and is reported as what it is.
    let known = walk::entry(met)?;
    (known.content != entry.content).then_some("content")
}
