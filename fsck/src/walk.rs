//! Walks a segment without a usable footer from record to record, and says what counts in it by the recovery table.
//!
//! The walk goes from record to record where lengths are proven and from page to page elsewhere, to the end of the
//! segment. What had been flushed and what follows what is known only then, so rows are looked up afterwards; payloads
//! are verified on the way, so that every byte is read once.
//!
//! Memory: the bodies of one segment's records, which are no more than its footer would be.

use kvarts_layout::format::footer::{Content, Defined, Entry};
use kvarts_layout::format::record::{self, Body, Kind, Prefix};
use kvarts_layout::format::recovery::{
    Decision, Found, Later, Observed, Proof, RecordSighting, Scan, Severity, observe, record_row,
};
use kvarts_layout::format::seal::claimed_position;
use kvarts_layout::format::{PAGE, PAGE_BYTES, Position, Secret, is_zero};

use crate::findings::{self, Finding, Findings, Label, Place};
use crate::holes::{hole_end, touched};
use crate::names::Names;
use crate::verify::{BadChunk, Verified, verify};
use crate::window::Window;

/// What is walked, and what is known of it from elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Why.
    pub scan: Scan,
    /// The segment under its header's generation, or zero: then every generation is later.
    pub position: Position,
    /// No record of that generation has a lower sequence.
    pub first_sequence: u64,
    /// Of which generation `durable_upto` speaks.
    pub durable_generation: u64,
    /// Everything below had been flushed.
    pub durable_upto: u64,
    /// Where the trailer stands.
    pub end: u64,
    /// Whether the segment was sealed: then what the file has no bytes of was evicted.
    pub was_sealed: bool,
    /// Whether content ids are wanted.
    pub content_ids: bool,
}

/// What is known of a record's payload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Payload {
    /// There is none, or the header cannot be used.
    None,
    /// It was read.
    Read(Box<Verified>),
    /// It cannot be verified: why.
    Unusable(Label),
}

/// A record that proves itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Met {
    /// Where its header begins.
    pub offset: u64,
    /// What it is.
    pub found: Found,
    /// Its proven fixed part.
    pub prefix: Prefix,
    /// Its body, where that can be used.
    pub body: Option<Body>,
    /// Its payload.
    pub payload: Payload,
    /// The model that its blocks are of.
    pub model: Option<String>,
    /// The namespace that its blocks are in.
    pub namespace: Option<[u8; 32]>,
}

#[derive(Debug)]
enum Item {
    Record(Box<Met>),
    Run { found: Found, start: u64, end: u64 },
}

/// What a walk found.
#[derive(Debug, Default)]
pub struct Scanned {
    /// What the records say that they belong to.
    pub generation: u64,
    /// What counts.
    pub adopted: Vec<Met>,
    /// Of these, how many have damaged blocks beside sound ones.
    pub partly: u64,
    /// Records whose blocks are dead but whose bytes are kept.
    pub condemned: u64,
    /// Where the last record that counts ends.
    pub log_end: u64,
    /// The highest sequence of any proven record.
    pub last_sequence: u64,
    /// Everything below had been flushed.
    pub durable_upto: u64,
    /// Whether what the file has no bytes of was evicted.
    pub was_sealed: bool,
}

impl Scanned {
    /// What counts, as a footer lists it.
    pub fn entries(&self) -> Vec<Entry> {
        self.adopted.iter().filter_map(entry).collect()
    }

    /// Whether the segment holds anything that must be kept.
    pub fn is_worth_sealing(&self) -> bool {
        let says_something = |met: &Met| !matches!(met.body, Some(Body::Identity(_) | Body::Spec(_)));
        self.condemned > 0 || self.adopted.iter().any(says_something)
    }
}

/// A record as a footer lists it; `None` if it cannot be listed.
pub fn entry(met: &Met) -> Option<Entry> {
    let defined = |definition: &kvarts_layout::format::body::Definition| Defined {
        local: definition.local,
        id: definition.id,
    };
    let content = match met.body.as_ref()? {
        Body::Blocks(blocks) => Content::Blocks(blocks.clone()),
        Body::Identity(definition) => Content::Identity(defined(definition)),
        Body::Spec(definition) => Content::Spec(defined(definition)),
        Body::Tombstones(tombstones) => Content::Tombstones(tombstones.clone()),
        Body::Epoch(epoch) => Content::Epoch(*epoch),
        Body::Unknown(code) => Content::Unknown(*code),
    };
    Some(Entry {
        offset: met.offset,
        sequence: met.prefix.sequence,
        payload_bytes: met.prefix.payload_bytes,
        header_bytes: met.prefix.header_bytes,
        content,
    })
}

/// What stands at one page: everything but its payload.
pub fn look(window: &mut Window<'_>, position: &Position, secret: &Secret) -> Observed {
    let page = window.bytes(position.offset, PAGE);
    if page.is_empty() || is_zero(page) {
        return Observed { found: Found::Empty, prefix: None, body: None };
    }
    match Prefix::open(page, position, secret) {
        Ok(prefix) => {
            let len = usize::try_from(prefix.header_bytes).unwrap_or(usize::MAX);
            observe(window.bytes(position.offset, len), position, secret)
        }
        Err(_) => observe(page, position, secret),
    }
}

/// Reads the payload of a proven record of blocks, where the definitions before it say how. In a segment that was `sealed`
/// holes are blocks that were evicted.
pub fn read_payload(
    window: &mut Window<'_>,
    (position, secret): (&Position, &Secret),
    (prefix, body): (&Prefix, &Body),
    names: &mut Names,
    (sealed, content_ids): (bool, bool),
) -> Payload {
    let Body::Blocks(blocks) = body else { return Payload::None };
    let chunks = match names.layout(blocks, prefix) {
        Ok(chunks) => chunks,
        Err(label) => return Payload::Unusable(label),
    };
    let len = usize::try_from(prefix.header_bytes).unwrap_or(usize::MAX);
    let digests: Vec<u32> = match record::open(window.bytes(position.offset, len), position, secret) {
        Ok(record) => record.digests().collect(),
        Err(_) => Vec::new(),
    };
    let start = position.offset.saturating_add(u64::from(prefix.header_bytes));
    let gone = match names.get(blocks.namespace).filter(|_| sealed) {
        Some(namespace) => {
            let place = (position.offset, prefix.header_bytes, prefix.payload_bytes);
            let model = (&*namespace.geometry, namespace.block_tokens);
            crate::holes::gone(place, blocks, model, window.holes())
        }
        None => Vec::new(),
    };
    Payload::Read(Box::new(verify(window, start, &chunks, &digests, gone, content_ids)))
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

/// Walks a segment, from the start again if a later generation than the expected one is proven.
pub fn scan(window: &mut Window<'_>, target: &Target, secret: &Secret, into: &mut Findings) -> Scanned {
    let mut position = target.position;
    let mut walked = walk(window, &position, target, secret);
    if let Some(ahead) = walked.ahead {
        if target.position.generation != 0 {
            let sighting = RecordSighting {
                found: Found::Ahead,
                scan: target.scan,
                proof: Proof::Open,
                later: Later::Nothing,
            };
            let place = place(&position, 0);
            let finding = Finding::at(record_row(&sighting), place);
            into.take(finding.expected(position.generation).found(ahead));
        }
        position = position.under(ahead);
        walked = walk(window, &position, target, secret);
    }
    // What a footer lists was all on the device before it was written, so what is not there was evicted: the trailer stood
    // behind it, and was zeroed.
    let holed =
        |walked: &Walk, window: &Window<'_>| window.holes().iter().any(|(at, _)| *at < walked.records_end);
    let proves = walked.footer && !kvarts_layout::planted!("fsck-footer-proves-nothing");
    if target.scan == Scan::Tail && proves && holed(&walked, window) {
        let target = Target { was_sealed: true, scan: Scan::Rescan, ..*target };
        walked = walk(window, &position, &target, secret);
        return decide(&position, &target, walked, into);
    }
    decide(&position, target, walked, into)
}

fn walk(window: &mut Window<'_>, segment: &Position, target: &Target, secret: &Secret) -> Walk {
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
    let mut names = Names::default();
    let mut offset = PAGE_BYTES;
    while offset < target.end {
        let hole = if target.was_sealed { hole_end(window.holes(), offset) } else { None };
        if let Some(behind) = hole {
            let behind = behind.min(target.end);
            walk.run(Found::Hole, offset, behind);
            offset = behind;
            continue;
        }
        let position = segment.at(offset);
        let mut seen = look(window, &position, secret);
        if let Some(prefix) = seen.prefix.filter(|prefix| target.was_sealed && prefix.kind == Kind::Blocks)
            && touched(window.holes(), offset, u64::from(prefix.header_bytes))
        {
            seen = Observed { found: Found::Hole, body: None, ..seen };
        }
        names.note(&seen);
        walk.footer |= seen.found == Found::Footer;
        if seen.found == Found::Ahead {
            let claimed = claimed_position(window.bytes(offset, PAGE));
            walk.ahead = walk.ahead.max(claimed.map(|claimed| claimed.generation));
        }
        let Some(prefix) = seen.prefix else {
            walk.run(seen.found, offset, offset.saturating_add(PAGE_BYTES));
            offset = offset.saturating_add(PAGE_BYTES);
            continue;
        };
        walk.durable_upto = walk.durable_upto.max(prefix.durable_upto);
        let mut met = Met {
            offset,
            found: seen.found,
            prefix,
            body: seen.body,
            payload: Payload::None,
            model: None,
            namespace: None,
        };
        if prefix.record_bytes() > target.end.saturating_sub(offset) {
            (met.found, met.body) = (Found::Malformed, None);
            walk.items.push(Item::Record(Box::new(met)));
            offset = offset.saturating_add(PAGE_BYTES);
            continue;
        }
        if !matches!(met.found, Found::Torn | Found::Hole) {
            if prefix.sequence <= walk.last_sequence {
                met.found = Found::OutOfOrder;
            }
            walk.last_sequence = walk.last_sequence.max(prefix.sequence);
            walk.last_record = offset;
            walk.records_end = offset.saturating_add(prefix.record_bytes());
        }
        let how = (target.was_sealed, target.content_ids);
        take_in(window, (&position, secret), &mut met, &mut names, how);
        walk.items.push(Item::Record(Box::new(met)));
        offset = offset.saturating_add(prefix.record_bytes());
    }
    walk
}

/// Takes in what a record defines, or reads its payload.
fn take_in(
    window: &mut Window<'_>,
    place: (&Position, &Secret),
    met: &mut Met,
    names: &mut Names,
    how: (bool, bool),
) {
    let Some(body) = &met.body else { return };
    match met.found {
        Found::RecordWhole if !names.define(body) => {
            met.payload = Payload::Unusable(findings::DEFINITION_DAMAGED)
        }
        Found::RecordUnread => {
            if let Body::Blocks(blocks) = body {
                let namespace = names.get(blocks.namespace);
                met.model = namespace.map(|namespace| namespace.model.clone());
                met.namespace = namespace.map(|namespace| namespace.id.0);
            }
            met.payload = read_payload(window, place, (&met.prefix, body), names, how);
            if let Payload::Read(verified) = &met.payload {
                met.found = if verified.is_whole() { Found::RecordWhole } else { Found::RecordBroken };
            }
        }
        _ => {}
    }
}

impl Walk {
    fn run(&mut self, found: Found, start: u64, end: u64) {
        let behind = |one: &Item| matches!(one, Item::Run { found: Found::Hole | Found::Remains, end, .. } if *end == start);
        let found = match found {
            Found::Noise | Found::Empty if self.items.last().is_some_and(behind) => Found::Remains,
            found => found,
        };
        match self.items.last_mut() {
            Some(Item::Run { found: before, end: upto, .. }) if *before == found && *upto == start => {
                *upto = end
            }
            _ => self.items.push(Item::Run { found, start, end }),
        }
    }
}

/// A place in a segment.
pub fn place(position: &Position, offset: u64) -> Place {
    Place { shard: Some(position.shard), segment: Some(position.segment), offset: Some(offset) }
}

/// Looks up the row of everything that the walk met.
fn decide(segment: &Position, target: &Target, walk: Walk, into: &mut Findings) -> Scanned {
    let mut scanned = Scanned {
        generation: segment.generation,
        log_end: PAGE_BYTES,
        last_sequence: walk.last_sequence,
        durable_upto: walk.durable_upto,
        was_sealed: target.was_sealed,
        ..Scanned::default()
    };
    let sighting = |found, offset| RecordSighting {
        found,
        scan: target.scan,
        proof: if offset < walk.durable_upto && !kvarts_layout::planted!("fsck-calls-damage-torn") {
            Proof::Durable
        } else {
            Proof::Open
        },
        later: if offset < walk.last_record { Later::Follows } else { Later::Nothing },
    };
    for item in walk.items {
        match item {
            Item::Run { found, start, end } => {
                // Part of a run may lie below what had been flushed and part above.
                let upper =
                    (start < walk.durable_upto && walk.durable_upto < end).then_some(walk.durable_upto);
                let mut stop = false;
                for start in [Some(start), upper].into_iter().flatten() {
                    let row = record_row(&sighting(found, start));
                    into.take(Finding::at(row, place(segment, start)));
                    stop |= row.decision == Decision::Stop;
                }
                if stop {
                    break;
                }
            }
            Item::Record(met) => {
                let sighting = sighting(met.found, met.offset);
                decide_record(segment, &sighting, *met, into, &mut scanned);
            }
        }
    }
    scanned
}

fn decide_record(
    segment: &Position,
    sighting: &RecordSighting,
    met: Met,
    into: &mut Findings,
    scanned: &mut Scanned,
) {
    let row = record_row(sighting);
    let durable = sighting.proof == Proof::Durable;
    let mut finding = Finding::at(row, place(segment, met.offset));
    describe(&mut finding, &met);
    // The engine misses the blocks whose digests fail, and serves the others.
    let sound = match &met.payload {
        Payload::Read(verified) if row.decision == Decision::Condemn => verified.sound_part(),
        _ => None,
    };
    if row.severity == Severity::Problem {
        count_lost(&mut finding, &met);
        if let (Some(_), Payload::Read(verified)) = (&sound, &met.payload) {
            finding.blocks = verified.damaged_blocks();
        }
    }
    into.take(finding);
    about_payload(segment, &met, durable, into);
    let end = met.offset.saturating_add(met.prefix.record_bytes());
    match (row.decision, &met.body) {
        (Decision::Adopt, Some(_)) | (Decision::SkipRecord, Some(Body::Unknown(_))) => {
            scanned.log_end = end;
            scanned.adopted.push(met);
        }
        (Decision::Condemn, _) => match sound {
            Some(sound) => {
                scanned.log_end = end;
                scanned.partly = scanned.partly.saturating_add(1);
                let (found, payload) = (Found::RecordWhole, Payload::Read(Box::new(sound)));
                scanned.adopted.push(Met { found, payload, ..met });
            }
            None => scanned.condemned = scanned.condemned.saturating_add(1),
        },
        // A payload that could not be verified above what had been flushed does not count.
        _ => {}
    }
}

/// Says in a finding what the record was about.
pub fn describe(finding: &mut Finding, met: &Met) {
    if let Some(Body::Blocks(blocks)) = &met.body {
        finding.key = blocks.blocks.first().map(|block| kvarts_layout::BlockKey(block.key));
        finding.model.clone_from(&met.model);
    }
    if let Payload::Read(verified) = &met.payload
        && let Some(BadChunk { block, offset, expected, found }) = verified.bad
    {
        if let Some(Body::Blocks(blocks)) = &met.body {
            let key = blocks.blocks.get(usize::try_from(block).unwrap_or(usize::MAX));
            finding.key = key.map(|block| kvarts_layout::BlockKey(block.key));
        }
        finding.expected = Some(format!("crc32 {expected:08x} of the chunk at {offset}"));
        finding.found = Some(format!("crc32 {found:08x}"));
    }
}

/// Says in a finding how many blocks are lost with the record.
pub fn count_lost(finding: &mut Finding, met: &Met) {
    if let Some(Body::Blocks(blocks)) = &met.body {
        finding.blocks = blocks.blocks.len() as u64;
    }
}

/// What else there is to say about a record than its row: undefined names, unknown encodings, padding.
pub fn about_payload(segment: &Position, met: &Met, durable: bool, into: &mut Findings) {
    let place = place(segment, met.offset);
    match &met.payload {
        Payload::None => {}
        Payload::Unusable(label) => {
            let lost = *label == findings::RECORD_UNDEFINED;
            let label = if lost && !durable { findings::RECORD_UNDEFINED_TAIL } else { *label };
            let mut finding = Finding::at(label, place);
            describe(&mut finding, met);
            count_lost(&mut finding, met);
            into.take(finding);
        }
        Payload::Read(verified) => {
            if let (Some(dirty), true) = (verified.dirty, verified.is_whole()) {
                let label = if durable { findings::PADDING_NOT_ZERO } else { findings::PADDING_TORN };
                into.take(Finding::at(label, Place { offset: Some(dirty), ..place }));
            }
        }
    }
}

/// Blocks of a record.
pub fn blocks_of(met: &Met) -> usize {
    match &met.body {
        Some(Body::Blocks(blocks)) => blocks.blocks.len(),
        _ => 0,
    }
}
