//! Scans a segment without a footer for its records, as the recovery table says.
//!
//! The walk goes from record to record where lengths are proven and from page to page elsewhere, to the end of the
//! file: what is whole is adopted also beyond a hole. Only then is it known what had been flushed and what follows
//! what, so the rows are looked up in a second pass, which also reads the payloads that need it.
//!
//! Memory: one window, and the bodies of the records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvarts_layout::arrange::{PartPlace, Span};
use kvarts_layout::codec::Encoding;
use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::format::record::{self, Body, Kind, Prefix};
use kvarts_layout::format::recovery::{
    Decision, Found, Later, Observed, Proof, RecordSighting, Scan, observe, record_row,
};
use kvarts_layout::format::seal::claimed_position;
use kvarts_layout::format::{PAGE, PAGE_BYTES, Position, is_zero};

use super::Recovery;
use crate::engine::read::Reads;
use crate::engine::read::decode::Stored;
use crate::engine::shared::names::Namespace;
use crate::engine::space::evict::pages::{Holes, Lying, hole_end, touched};
use crate::engine::volume::pages::Pages;
use crate::engine::volume::segment::entry;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::FileId;

/// What is scanned, and what is known of it from elsewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'a> {
    pub(super) file: FileId,
    /// What of the file was given back. Empty for a segment in which holes do not count.
    pub(super) holes: &'a Holes,
    /// What of it is not there, which counts if its own footer proves that it was sealed.
    pub(super) if_sealed: &'a Holes,
    /// Bytes of the file: what follows is empty.
    pub(super) len: u64,
    pub(super) scan: Scan,
    /// Of the segment header, if it is sound, else zero: every generation is then later.
    pub(super) position: Position,
    /// No record of this generation has a lower sequence.
    pub(super) first_sequence: u64,
    /// Everything below had been flushed, says a trailer or a checkpoint of this generation.
    pub(super) durable_upto: u64,
    /// The generation that `durable_upto` speaks of.
    pub(super) durable_generation: u64,
}

/// What a scan found.
#[derive(Debug, Default)]
pub(super) struct Scanned {
    /// What the records say that they belong to.
    pub(super) generation: u64,
    /// What counts, as a footer lists it.
    pub(super) entries: Vec<Entry>,
    /// Records that were condemned: their bytes are kept.
    pub(super) condemned: u64,
    /// Where the last record that counts ends.
    pub(super) log_end: u64,
    /// The highest sequence of any proven record.
    pub(super) last_sequence: u64,
    /// A footer without a trailer proves that it was sealed and has lost blocks since.
    pub(super) was_sealed: bool,
}

/// One thing that the walk met.
enum Item {
    Record {
        offset: u64,
        found: Found,
        prefix: Prefix,
        body: Option<Body>,
    },
    /// Pages of one kind.
    Run {
        found: Found,
        start: u64,
        end: u64,
    },
}

struct Walk {
    items: Vec<Item>,
    durable_upto: u64,
    last_record: u64,
    /// Where the last proven record ends.
    records_end: u64,
    /// A proven footer.
    footer: bool,
    last_sequence: u64,
    /// The highest later generation that a record proves.
    ahead: Option<u64>,
}

/// Scans a segment, from the start again if a later generation than the one expected is proven.
pub(super) async fn scan(recovery: &mut Recovery<'_>, target: &Target<'_>) -> Result<Scanned, Reason> {
    let volume = recovery.volume;
    let end = volume.shared.segment_bytes - PAGE_BYTES;
    let mut pages = Pages::new(volume, target.file, end.min(target.len));
    let mut position = target.position;
    let mut walk = walk(recovery, &mut pages, &position, target, end).await?;
    if let Some(ahead) = walk.ahead {
        if target.position.generation != 0 {
            let row = record_row(&RecordSighting {
                found: Found::Ahead,
                scan: target.scan,
                proof: Proof::Open,
                later: Later::Nothing,
            });
            recovery.report.take(row, position.segment, 0);
        }
        position = position.under(ahead);
        walk = self::walk(recovery, &mut pages, &position, target, end).await?;
    }
    // What a footer lists was all on the device before it was written, so what is not there was evicted: the trailer stood
    // behind it, and was zeroed.
    let was_sealed = walk.footer
        && !kvarts_layout::planted!("footer-proves-nothing")
        && target.if_sealed.iter().any(|(at, _)| *at < walk.records_end);
    let target = &match was_sealed {
        true => Target { holes: target.if_sealed, scan: Scan::Rescan, ..*target },
        false => *target,
    };
    if was_sealed {
        walk = self::walk(recovery, &mut pages, &position, target, end).await?;
    }
    let scanned = decide(recovery, &mut pages, &position, target, walk).await;
    let scanned = scanned.map(|scanned| Scanned { was_sealed, ..scanned });
    recovery.report.scanned_bytes += pages.bytes_read;
    recovery.report.unreadable_pages += pages.unreadable;
    scanned
}

async fn walk(
    recovery: &Recovery<'_>,
    pages: &mut Pages<'_>,
    segment: &Position,
    target: &Target<'_>,
    end: u64,
) -> Result<Walk, Reason> {
    let known = target.durable_generation == segment.generation;
    let same = target.position.generation == segment.generation;
    let mut walk = Walk {
        items: Vec::new(),
        durable_upto: if known { target.durable_upto } else { 0 },
        last_record: 0,
        records_end: 0,
        footer: false,
        last_sequence: if same { target.first_sequence.saturating_sub(1) } else { 0 },
        ahead: None,
    };
    let mut offset = PAGE_BYTES;
    while offset < end {
        if let Some(behind) = hole_end(target.holes, offset) {
            let behind = behind.min(end);
            walk.run(Found::Hole, offset, behind);
            offset = behind;
            continue;
        }
        let position = segment.at(offset);
        let secret = &recovery.volume.shared.secret;
        let bytes = pages.at(offset, PAGE).await?;
        let page = bytes.get(..PAGE).unwrap_or(bytes);
        let mut seen = if page.is_empty() || is_zero(page) {
            Observed { found: Found::Empty, prefix: None, body: None }
        } else {
            match Prefix::open(page, &position, secret) {
                Ok(prefix) => {
                    let bytes = pages.at(offset, prefix.header_bytes as usize).await?;
                    observe(bytes, &position, secret)
                }
                Err(_) => observe(page, &position, secret),
            }
        };
        if let Some(prefix) = seen.prefix.filter(|prefix| prefix.kind == Kind::Blocks)
            && touched(target.holes, offset, u64::from(prefix.header_bytes))
        {
            seen = Observed { found: Found::Hole, body: None, ..seen };
        }
        if seen.found == Found::Ahead {
            let claimed = pages.at(offset, PAGE).await.map(claimed_position)?;
            walk.ahead = walk.ahead.max(claimed.map(|claimed| claimed.generation));
        }
        walk.footer |= seen.found == Found::Footer;
        offset += walk.take(seen, offset, end);
    }
    Ok(walk)
}

impl Walk {
    /// Notes what was met and says how far to go on.
    fn take(&mut self, seen: Observed, offset: u64, end: u64) -> u64 {
        let fits = |prefix: &Prefix| prefix.record_bytes() <= end - offset;
        let Some(prefix) = seen.prefix else {
            self.run(seen.found, offset, offset + PAGE_BYTES);
            return PAGE_BYTES;
        };
        self.durable_upto = self.durable_upto.max(prefix.durable_upto);
        if !fits(&prefix) {
            self.items.push(Item::Record { offset, found: Found::Malformed, prefix, body: None });
            return PAGE_BYTES;
        }
        let mut found = seen.found;
        if !matches!(found, Found::Torn | Found::Hole) {
            if prefix.sequence <= self.last_sequence {
                found = Found::OutOfOrder;
            }
            self.last_sequence = self.last_sequence.max(prefix.sequence);
            self.last_record = offset;
            self.records_end = offset + prefix.record_bytes();
        }
        self.items.push(Item::Record { offset, found, prefix, body: seen.body });
        prefix.record_bytes()
    }

    fn run(&mut self, found: Found, start: u64, end: u64) {
        let behind = |one: &Item| matches!(one, Item::Run { found: Found::Hole | Found::Remains, end, .. } if *end == start);
        let found = match found {
            Found::Noise | Found::Empty if self.items.last().is_some_and(behind) => Found::Remains,
            found => found,
        };
        match self.items.last_mut() {
            Some(Item::Run { found: before, end: upto, .. }) if *before == found && *upto == start => {
                *upto = end;
            }
            _ => self.items.push(Item::Run { found, start, end }),
        }
    }
}

/// Looks up the row of everything that the walk met, and does what it says.
async fn decide(
    recovery: &mut Recovery<'_>,
    pages: &mut Pages<'_>,
    segment: &Position,
    target: &Target<'_>,
    walk: Walk,
) -> Result<Scanned, Reason> {
    let mut scanned = Scanned {
        generation: segment.generation,
        log_end: PAGE_BYTES,
        last_sequence: walk.last_sequence,
        ..Scanned::default()
    };
    let sighting = |found, offset| RecordSighting {
        found,
        scan: target.scan,
        proof: if offset < walk.durable_upto { Proof::Durable } else { Proof::Open },
        later: if offset < walk.last_record { Later::Follows } else { Later::Nothing },
    };
    let mut names = BTreeMap::new();
    let mut specs = BTreeSet::new();
    for item in walk.items {
        let (offset, found, prefix, body) = match item {
            Item::Record { offset, found, prefix, body } => (offset, found, prefix, body),
            Item::Run { found, start, end } => {
                // Part of a run may lie below what had been flushed and part above.
                let upper =
                    (start < walk.durable_upto && walk.durable_upto < end).then_some(walk.durable_upto);
                let mut stop = false;
                for start in [Some(start), upper].into_iter().flatten() {
                    let row = record_row(&sighting(found, start));
                    recovery.report.take(row, segment.segment, start);
                    stop |= row.decision == Decision::Stop;
                }
                if stop {
                    break;
                }
                continue;
            }
        };
        let mut row = record_row(&sighting(found, offset));
        recovery.report.take(row, segment.segment, offset);
        if row.decision == Decision::Verify
            && let Some(Body::Blocks(blocks)) = &body
        {
            let position = segment.at(offset);
            let of = (blocks, &names, target.holes);
            let Some(whole) = verify(recovery, pages, &position, &prefix, of).await? else {
                continue;
            };
            let found = if whole || kvarts_layout::planted!("torn-tail-adopted") {
                Found::RecordWhole
            } else {
                Found::RecordBroken
            };
            row = record_row(&sighting(found, offset));
            recovery.report.take(row, segment.segment, offset);
        }
        match (row.decision, body) {
            (Decision::Adopt, Some(body)) => {
                define(recovery, &body, &mut names, &mut specs);
                scanned.adopt(offset, &prefix, &body);
            }
            (Decision::Condemn, _) => scanned.condemned += 1,
            (Decision::SkipRecord, Some(body @ Body::Unknown(_))) => scanned.adopt(offset, &prefix, &body),
            _ => {}
        }
    }
    Ok(scanned)
}

impl Scanned {
    fn adopt(&mut self, offset: u64, prefix: &Prefix, body: &Body) {
        let header_bytes = prefix.header_bytes as usize;
        self.entries.push(entry(offset, prefix.sequence, header_bytes, prefix.payload_bytes, body));
        self.log_end = offset + prefix.record_bytes();
    }

    /// Whether the segment holds anything that must be kept.
    pub(super) fn is_worth_sealing(&self) -> bool {
        let says_something =
            |entry: &Entry| !matches!(entry.content, Content::Identity(_) | Content::Spec(_));
        self.condemned > 0 || self.entries.iter().any(says_something)
    }
}

/// Takes in a definition, for the payloads behind it. As in `adopt`, an identity counts only behind its spec.
fn define(
    recovery: &mut Recovery<'_>,
    body: &Body,
    names: &mut BTreeMap<u32, Arc<Namespace>>,
    specs: &mut BTreeSet<[u8; 32]>,
) {
    let known = &recovery.volume.shared.names;
    match body {
        Body::Spec(definition) => {
            // Refused only if it contradicts itself; the records that use it are then undefined.
            let _ = known.recover_spec(definition);
            specs.insert(definition.id);
        }
        Body::Identity(definition) => {
            let namespace = known.recover_identity(definition).ok();
            match namespace.filter(|namespace| specs.contains(&namespace.spec.id.0)) {
                Some(namespace) => drop(names.insert(definition.local, namespace)),
                None => drop(names.remove(&definition.local)),
            }
        }
        _ => {}
    }
}

/// Whether what is there of the payload matches its digests; `None` if it cannot be told, because the record says nothing that this
/// store can read.
async fn verify(
    recovery: &mut Recovery<'_>,
    pages: &mut Pages<'_>,
    position: &Position,
    prefix: &Prefix,
    (blocks, names, holes): (&Blocks, &BTreeMap<u32, Arc<Namespace>>, &Holes),
) -> Result<Option<bool>, Reason> {
    let Some(namespace) = names.get(&blocks.namespace) else {
        recovery.report.undefined += 1;
        return Ok(None);
    };
    let Some((_, layout)) = super::adopt::class_of(&recovery.volume.shared, namespace, blocks) else {
        recovery.report.unusable += 1;
        return Ok(None);
    };
    let Ok(stored) = Stored::of(blocks, &layout) else {
        recovery.report.unusable += 1;
        return Ok(None);
    };
    let expected = stored.as_ref().map_or(layout.payload_bytes(), |stored| stored.places.payload_bytes());
    if expected != prefix.payload_bytes {
        recovery.report.unusable += 1;
        return Ok(None);
    }
    let header = pages.at(position.offset, prefix.header_bytes as usize).await?;
    let Ok(record) = record::open(header, position, &recovery.volume.shared.secret) else {
        return Ok(Some(false));
    };
    let digests: Vec<u32> = record.digests().collect();
    let parts = (0u32..).zip(layout.parts());
    let all =
        (0..layout.blocks()).flat_map(|block| parts.clone().map(move |(part, place)| (block, part, place)));
    let place = |(block, part, place): (u32, u32, &PartPlace)| {
        let raw = Span { offset: place.offset + place.step * u64::from(block), len: place.bytes };
        let span = stored.as_ref().map_or(Some(raw), |stored| stored.places.chunk(block, part))?;
        Some((span, place.bytes))
    };
    let Some(chunks) = all.map(place).collect::<Option<Vec<_>>>() else { return Ok(Some(false)) };
    if chunks.len() != digests.len() {
        return Ok(Some(false));
    }
    let lying = Lying {
        offset: position.offset,
        header_bytes: u64::from(prefix.header_bytes),
        payload_bytes: prefix.payload_bytes,
        layout: &layout,
        stored: stored.as_ref().map(|stored| &stored.places),
    };
    let parts = layout.parts().len();
    let mut chunks: Vec<_> = chunks.into_iter().zip(digests).collect();
    if !holes.is_empty() && !kvarts_layout::planted!("scan-verifies-holes") {
        let blocks = 0..u16::try_from(layout.blocks()).unwrap_or(u16::MAX);
        let mut kept = blocks.flat_map(|block| std::iter::repeat_n(!lying.is_gone(block, holes), parts));
        chunks.retain(|_| kept.next().unwrap_or(true));
    }
    chunks.sort_unstable_by_key(|((span, _), _)| span.offset);
    let payload = position.offset + u64::from(prefix.header_bytes);
    let encoding = stored.map(|stored| stored.encoding);
    for ((span, len), digest) in chunks {
        let span = Span { offset: payload + span.offset, ..span };
        let found = match encoding {
            None => digest_of(pages, span).await?,
            Some(encoding) => decoded_digest(&recovery.log.space.reads, pages, span, (encoding, len)).await?,
        };
        if found != Some(digest) {
            return Ok(Some(false));
        }
    }
    Ok(Some(true))
}

/// The digest of bytes of a file; `None` if the file ends before.
async fn digest_of(pages: &mut Pages<'_>, span: Span) -> Result<Option<u32>, Reason> {
    let mut hasher = crc32fast::Hasher::new();
    let ended = each_piece(pages, span, |bytes| hasher.update(bytes)).await?;
    Ok(ended.then(|| hasher.finalize()))
}

/// The digest of the chunk of `len` bytes that is stored there; `None` if it cannot be decoded.
async fn decoded_digest(
    reads: &Reads,
    pages: &mut Pages<'_>,
    span: Span,
    (encoding, len): (Encoding, u64),
) -> Result<Option<u32>, Reason> {
    let mut stored = Vec::with_capacity(span.len as usize);
    if !each_piece(pages, span, |bytes| stored.extend_from_slice(bytes)).await? {
        return Ok(None);
    }
    Ok(reads.decoder.digest(encoding, &stored, len as usize).ok())
}

/// Shows bytes of a file in order; false if the file ends before.
async fn each_piece(pages: &mut Pages<'_>, span: Span, mut look: impl FnMut(&[u8])) -> Result<bool, Reason> {
    let (mut at, end) = (span.offset, span.end());
    while at < end {
        let bytes = pages.at(at, 1).await?;
        let left = usize::try_from(end - at).unwrap_or(usize::MAX);
        let bytes = bytes.get(..left).unwrap_or(bytes);
        if bytes.is_empty() {
            return Ok(false);
        }
        look(bytes);
        at += bytes.len() as u64;
    }
    Ok(true)
}
