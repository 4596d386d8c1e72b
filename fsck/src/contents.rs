//! What a store has: its artifacts, and of each block whether it counts or what made it dead.
//!
//! The rules are recovery's: a block counts in the newest record that has it, unless a tombstone or an epoch of its shard
//! reaches above that record's sequence, or its time is over. Where two shards hold a block, one of them counts.
//!
//! Memory: about 450 bytes for each record on disk and 100 for each of its blocks. Payloads are not read, and records of sealed segments only where they
//! define a namespace.

pub mod counted;
mod graves;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::format::names::{segment_name, shard_name};
use kvarts_layout::format::record::Body;
use kvarts_layout::format::trailer::SealReason;

pub use graves::{Graves, Remembered};

use crate::check::{Level, Options, Outcome, SegmentReport, Stated, each_segment};
use crate::findings::{self, Finding, Findings};
use crate::names::{Names, Namespace};
use crate::store::Store;
use crate::walk::look;
use crate::window::{Tally, Window};

/// What became of a block of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// It counts.
    Live,
    /// A tombstone or an epoch killed it.
    Deleted,
    /// Its time is over.
    Expired,
    /// Another record has the block, and that one counts.
    Copy,
    /// It was evicted: its bytes were given back.
    Evicted,
}

/// A record of blocks.
#[derive(Clone, Debug)]
pub struct Run {
    /// Index into [`Store::shards`].
    pub shard: usize,
    /// The segment.
    pub segment: u32,
    /// The segment's generation.
    pub generation: u64,
    /// Where its header begins.
    pub offset: u64,
    /// Bytes of its header.
    pub header_bytes: u32,
    /// Bytes of its payload without padding.
    pub payload_bytes: u64,
    /// Its sequence in its shard.
    pub sequence: u64,
    /// When it expires, in milliseconds since 1970; zero for never.
    pub expires_ms: u64,
    /// What it says.
    pub blocks: Blocks,
    /// Its namespace.
    pub namespace: Arc<Namespace>,
    /// What became of each of its blocks.
    pub fates: Vec<Fate>,
    /// Bytes of it that were given back.
    pub hole_bytes: u64,
}

impl Run {
    /// Bytes on disk, padding included.
    pub fn bytes(&self) -> u64 {
        u64::from(self.header_bytes).saturating_add(self.payload_bytes.next_multiple_of(PAGE_BYTES))
    }

    /// Blocks that count.
    pub fn live(&self) -> u64 {
        self.fates.iter().filter(|fate| **fate == Fate::Live).count() as u64
    }

    /// The share of its bytes that belongs to blocks that count.
    pub fn live_bytes(&self) -> u64 {
        let all = (self.fates.len() as u64).max(1);
        self.bytes().saturating_mul(self.live()).checked_div(all).unwrap_or(0)
    }
}

/// What a segment is, for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Nothing in it counts.
    Free,
    /// It was being written when the store stopped.
    Open,
    /// It is sealed.
    Sealed,
    /// It was sealed after a failed flush.
    Suspect,
    /// Its ends are damaged; its records were looked for one by one.
    Damaged,
    /// It is set aside, or cannot be opened.
    Quarantined,
}

/// A segment and where its bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct SegmentView {
    /// Its shard.
    pub shard: u32,
    /// Its number.
    pub segment: u32,
    /// What it is.
    pub state: State,
    /// What it holds in turn.
    pub generation: u64,
    /// Records that it has, definitions and deletes included.
    pub records: u64,
    /// Blocks that count.
    pub live_blocks: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of blocks that count, with their share of headers and padding.
    pub live_bytes: u64,
    /// Bytes of records of blocks that no longer count.
    pub dead_bytes: u64,
    /// Headers, footers, trailers, definitions and deletes.
    pub overhead_bytes: u64,
    /// Everything else.
    pub free_bytes: u64,
    /// Problems that reading its metadata met.
    pub problems: u64,
}

/// What a store has.
#[derive(Debug, Default)]
pub struct Contents {
    /// Its records of blocks, by shard, newest first.
    pub runs: Vec<Run>,
    /// Its segments, by shard and number.
    pub segments: Vec<SegmentView>,
    /// What is wrong with its metadata.
    pub findings: Findings,
    /// Records whose namespace is not defined: they cannot be read.
    pub undefined: u64,
    /// Tombstones and epochs that still reach.
    pub graves: u64,
    /// The store was in use while it was read: what is listed may be gone by now.
    pub live: bool,
}

impl Contents {
    /// Whether deletes may be missing, because a checkpoint cannot be read: what was deleted may be listed as live.
    pub fn may_have_forgotten_deletes(&self) -> bool {
        may_have_forgotten_deletes(&self.findings)
    }
}

/// Whether these say that a checkpoint cannot be read: what was deleted may be listed as live.
pub fn may_have_forgotten_deletes(findings: &Findings) -> bool {
    let is_checkpoint = |one: &Finding| {
        let place = &one.place;
        place.shard.is_some() && place.segment.is_none() && place.offset.is_some()
    };
    let newer = findings.times(findings::CHECKPOINT_NEWER.name) > 0;
    newer || findings.problems.iter().any(is_checkpoint)
}

/// What one segment gave.
struct Taken {
    runs: Vec<Run>,
    view: SegmentView,
    findings: Findings,
    graves: Graves,
    undefined: u64,
}

/// Reads what a store has. What has expired at `now_ms` (milliseconds since 1970) does not count.
pub fn read(store: &Store, options: &Options, now_ms: u64, tally: &Tally, found: Findings) -> Contents {
    let options = Options { level: Level::Quick, ..options.clone() };
    let all = Mutex::new(Vec::new());
    let Stated { known, findings } = each_segment(store, &options, tally, &|shard, segment, report| {
        let taken = take(store, (shard, segment), report, tally);
        all.lock().unwrap_or_else(PoisonError::into_inner).push((shard, taken));
    });
    let taken = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut contents = Contents { findings: found, live: options.live, ..Contents::default() };
    contents.findings.merge(findings);
    let mut graves: BTreeMap<usize, Graves> = BTreeMap::new();
    let mut remembered: BTreeMap<usize, Remembered> = BTreeMap::new();
    for (at, shard) in store.shards.iter().enumerate() {
        let known = known.get(&shard.number).cloned().unwrap_or_default();
        let (buried, times) = graves::of_checkpoint(store, shard, &known, tally);
        graves.insert(at, buried);
        remembered.insert(at, times);
    }
    for (shard, one) in taken {
        graves.entry(shard).or_default().merge(one.graves);
        contents.findings.merge(one.findings);
        contents.undefined = contents.undefined.saturating_add(one.undefined);
        contents.segments.push(one.view);
        contents.runs.extend(one.runs);
    }
    graves::finish(&mut graves);
    contents.graves = graves.values().map(Graves::len).sum();
    contents.runs.sort_by_key(|run| (run.shard, std::cmp::Reverse(run.sequence)));
    decide(&mut contents.runs, &graves, &remembered, now_ms);
    contents.segments.sort_by_key(|view| (view.shard, view.segment));
    weigh(store, &mut contents);
    contents.findings.sort();
    contents
}

/// What is dead in each shard, by index into [`Store::shards`].
pub fn graves(store: &Store, options: &Options, tally: &Tally) -> BTreeMap<usize, Graves> {
    buried(store, options, tally).0
}

/// What is dead in each shard, and when records expire of which a checkpoint says so.
fn buried(
    store: &Store,
    options: &Options,
    tally: &Tally,
) -> (BTreeMap<usize, Graves>, BTreeMap<usize, Remembered>) {
    let options = Options { level: Level::Quick, ..options.clone() };
    let all = Mutex::new(BTreeMap::<usize, Graves>::new());
    let Stated { known, .. } = each_segment(store, &options, tally, &|shard, segment, report| {
        let taken = take(store, (shard, segment), report, tally);
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(shard).or_default().merge(taken.graves);
    });
    let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut remembered = BTreeMap::new();
    for (at, shard) in store.shards.iter().enumerate() {
        let known = known.get(&shard.number).cloned().unwrap_or_default();
        let (graves, times) = graves::of_checkpoint(store, shard, &known, tally);
        all.entry(at).or_default().merge(graves);
        remembered.insert(at, times);
    }
    graves::finish(&mut all);
    (all, remembered)
}

/// Which blocks count.
fn decide(
    runs: &mut [Run],
    graves: &BTreeMap<usize, Graves>,
    remembered: &BTreeMap<usize, Remembered>,
    now_ms: u64,
) {
    let mut seen = BTreeSet::<[u8; 16]>::new();
    for run in runs {
        if let Some(times) = remembered.get(&run.shard) {
            let place = (run.segment, run.generation, run.offset);
            run.expires_ms = times.get(&place).copied().unwrap_or(run.expires_ms);
        }
        let expired = run.expires_ms != 0 && run.expires_ms <= now_ms;
        let namespace = run.namespace.id.0;
        let column = (run.blocks.group, run.blocks.coordinate);
        for (name, fate) in run.blocks.blocks.iter().zip(&mut run.fates) {
            if *fate == Fate::Evicted {
                continue;
            }
            let graves = graves.get(&run.shard);
            let buried =
                graves.is_some_and(|graves| graves.covers(&namespace, &name.key, column, run.sequence));
            *fate = match (buried, expired) {
                (true, _) => Fate::Deleted,
                (false, true) => Fate::Expired,
                (false, false) if seen.insert(subject(&namespace, &name.key, column)) => Fate::Live,
                (false, false) => Fate::Copy,
            };
        }
    }
}

/// What a block's whole key comes to.
pub(crate) fn subject(namespace: &[u8; 32], key: &[u8; 32], (group, coordinate): (u32, u64)) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(namespace).update(key);
    hasher.update(&group.to_le_bytes()).update(&coordinate.to_le_bytes());
    let [half, _] = *hasher.finalize().as_bytes().as_chunks::<16>().0 else { return [0; 16] };
    half
}

/// Adds up what counts in each segment.
fn weigh(store: &Store, contents: &mut Contents) {
    let at: BTreeMap<(u32, u32), usize> =
        contents.segments.iter().enumerate().map(|(at, view)| ((view.shard, view.segment), at)).collect();
    for run in &contents.runs {
        let Some(shard) = store.shards.get(run.shard) else { continue };
        let Some(view) = at.get(&(shard.number, run.segment)).and_then(|at| contents.segments.get_mut(*at))
        else {
            continue;
        };
        let live = run.live_bytes();
        view.live_blocks = view.live_blocks.saturating_add(run.live());
        view.live_bytes = view.live_bytes.saturating_add(live);
        let dead = run.bytes().saturating_sub(live).saturating_sub(run.hole_bytes);
        view.dead_bytes = view.dead_bytes.saturating_add(dead);
    }
    for view in &mut contents.segments {
        let used = view.live_bytes.saturating_add(view.dead_bytes).saturating_add(view.overhead_bytes);
        view.free_bytes = view.bytes.saturating_sub(used);
    }
}

/// Takes one segment in.
fn take(store: &Store, (shard, segment): (usize, u32), report: &SegmentReport, tally: &Tally) -> Taken {
    let number = store.shards.get(shard).map_or(0, |shard| shard.number);
    let (state, generation, entries) = listed(report);
    let mut taken = Taken {
        runs: Vec::new(),
        view: SegmentView {
            shard: number,
            segment,
            state,
            generation,
            records: entries.len() as u64,
            live_blocks: 0,
            bytes: report.accounting.file_bytes,
            live_bytes: 0,
            dead_bytes: 0,
            overhead_bytes: report.accounting.frame_bytes,
            free_bytes: 0,
            problems: report.findings.problem_count,
        },
        findings: report.findings.clone(),
        graves: Graves::default(),
        undefined: 0,
    };
    let mut names = Names::default();
    let mut bodies = Bodies::new(store, (shard, segment), report);
    let holes = match &report.outcome {
        Outcome::Sealed { .. } => bodies.holes(),
        Outcome::Walked { scanned, .. } if scanned.was_sealed => bodies.holes(),
        // What was never written is no decision.
        _ => Vec::new(),
    };
    for entry in entries {
        match &entry.content {
            Content::Blocks(blocks) => {
                let Some(namespace) = names.get(blocks.namespace) else {
                    taken.undefined = taken.undefined.saturating_add(1);
                    continue;
                };
                let of = (shard, segment, generation);
                taken.runs.push(run(of, &entry, blocks, namespace, &holes));
                continue;
            }
            Content::Identity(_) | Content::Spec(_) => {
                if let Some(body) = bodies.read(&entry, tally) {
                    names.define(&body);
                }
            }
            Content::Tombstones(tombstones) => {
                for tombstone in &tombstones.entries {
                    match names.get(tombstone.namespace) {
                        Some(namespace) => taken.graves.bury(namespace.id.0, tombstone),
                        None => taken.undefined = taken.undefined.saturating_add(1),
                    }
                }
            }
            Content::Epoch(epoch) => taken.graves.bury_all(epoch),
            Content::Unknown(_) => {}
        }
        let bytes =
            u64::from(entry.header_bytes).saturating_add(entry.payload_bytes.next_multiple_of(PAGE_BYTES));
        taken.view.overhead_bytes = taken.view.overhead_bytes.saturating_add(bytes);
    }
    taken
}

/// A record's run of blocks, with what holes have taken of it.
fn run(
    (shard, segment, generation): (usize, u32, u64),
    entry: &Entry,
    blocks: &Blocks,
    namespace: &Arc<Namespace>,
    holes: &[(u64, u64)],
) -> Run {
    let place = (entry.offset, entry.header_bytes, entry.payload_bytes);
    let model = (&*namespace.geometry, namespace.block_tokens);
    let gone = crate::holes::gone(place, blocks, model, holes);
    let fate = |block| match gone.get(block).copied().unwrap_or(false) {
        true => Fate::Evicted,
        false => Fate::Live,
    };
    let bytes =
        u64::from(entry.header_bytes).saturating_add(entry.payload_bytes.next_multiple_of(PAGE_BYTES));
    Run {
        shard,
        segment,
        generation,
        offset: entry.offset,
        header_bytes: entry.header_bytes,
        payload_bytes: entry.payload_bytes,
        sequence: entry.sequence,
        expires_ms: blocks.expires_ms,
        blocks: blocks.clone(),
        namespace: Arc::clone(namespace),
        fates: (0..blocks.blocks.len()).map(fate).collect(),
        hole_bytes: crate::holes::inside(holes, entry.offset, bytes),
    }
}

/// What a segment lists, as its footer or a walk through it says.
fn listed(report: &SegmentReport) -> (State, u64, Vec<Entry>) {
    match &report.outcome {
        Outcome::Sealed { generation, trailer, footer, .. } => {
            let suspect = trailer.reason == SealReason::Suspect;
            let state = if suspect { State::Suspect } else { State::Sealed };
            (state, *generation, footer.records.clone())
        }
        Outcome::Walked { scanned, scan } => {
            let tail = *scan == kvarts_layout::format::recovery::Scan::Tail;
            let state = if tail { State::Open } else { State::Damaged };
            (state, scanned.generation, scanned.entries())
        }
        Outcome::Free => {
            let generation = report.ends.as_ref().and_then(crate::segment::Ends::generation);
            (State::Free, generation.unwrap_or(0), Vec::new())
        }
        Outcome::Quarantined | Outcome::Unseen => (State::Quarantined, 0, Vec::new()),
    }
}

/// The bodies of the definitions of one segment.
struct Bodies<'a> {
    store: &'a Store,
    place: (usize, u32),
    report: &'a SegmentReport,
    file: Option<Box<dyn crate::disk::DiskFile>>,
}

impl<'a> Bodies<'a> {
    fn new(store: &'a Store, place: (usize, u32), report: &'a SegmentReport) -> Self {
        Self { store, place, report, file: None }
    }

    fn file(&mut self) -> Option<&dyn crate::disk::DiskFile> {
        let (shard, segment) = self.place;
        let shard = self.store.shards.get(shard)?;
        if self.file.is_none() {
            let path = format!("{}/{}", shard_name(shard.number), segment_name(segment));
            self.file = self.store.directories.get(shard.directory)?.disk.open(&path).ok();
        }
        self.file.as_deref()
    }

    /// What of the segment is not there.
    fn holes(&mut self) -> Vec<(u64, u64)> {
        self.file().map(crate::disk::DiskFile::holes).unwrap_or_default()
    }

    /// A walk has it; a footer only says where it is.
    fn read(&mut self, entry: &Entry, tally: &Tally) -> Option<Body> {
        let generation = match &self.report.outcome {
            Outcome::Walked { scanned, .. } => {
                let met = scanned.adopted.iter().find(|met| met.offset == entry.offset)?;
                return met.body.clone();
            }
            Outcome::Sealed { generation, .. } => *generation,
            _ => return None,
        };
        let (shard, segment) = self.place;
        let shard = self.store.shards.get(shard)?;
        self.file()?;
        let keyring = &self.store.keyring;
        let mut window = Window::new(&**self.file.as_ref()?, keyring.segment_bytes, tally);
        window.read_ahead(false);
        let position = keyring.position(shard.number, segment).under(generation).at(entry.offset);
        look(&mut window, &position, &keyring.secret).body
    }
}
