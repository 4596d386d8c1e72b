//! The check of a whole store: every segment once, front to back, on several threads.
//!
//! Levels: [`Level::Quick`] reads metadata (superblocks, checkpoints, both ends and the footer of each segment, and
//! the tails that a crash left). [`Level::Full`] reads every record and verifies every digest. [`Level::Deep`] also
//! computes content ids and compares what lies in different segments and shards.
//!
//! Memory: for each thread one transfer buffer (2 MiB, or the largest footer) and the bodies of one segment's
//! records, which are no more than its footer, at most 64 MiB on disk; for each segment about 120 bytes, what its
//! checkpoint says of it among them. The size of the store does not enter otherwise. A deep check adds
//! [`Options::memory_bytes`] of fingerprints, beyond which sorted runs go to temporary files, and about 45 bytes for each
//! record that checkpoints list. `fsck/tests/memory.rs` holds all of it to that.

mod deep;
mod listed;
#[cfg(test)]
mod live_tests;
mod newest;
mod one;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvarts_layout::format::checkpoint::{SEGMENT_FREE, SegmentState};
use kvarts_layout::format::names::{segment_name, shard_name};

use crate::checkpoint::{self, Known};
use crate::contents::{self, Graves};
use crate::findings::{self, Finding, Findings, Place};
use crate::store::{Shard, Store};
use crate::window::{Tally, Window};

pub use deep::DeepError;
use newest::{Newest, Said};
pub use one::{Outcome, SegmentReport, Subject, check_segment};

/// How much is looked at.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Level {
    /// Metadata.
    Quick,
    /// All digests.
    #[default]
    Full,
    /// Content ids, and what lies in different places compared.
    Deep,
}

impl Level {
    /// A stable name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Full => "full",
            Self::Deep => "deep",
        }
    }
}

/// How a check is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// How much is looked at.
    pub level: Level,
    /// Threads that read and verify.
    pub threads: usize,
    /// The store may be in use: what changes meanwhile does not count.
    pub live: bool,
    /// Fingerprints of a deep check that are kept in memory.
    pub memory_bytes: usize,
    /// Where more of them go, for the time of the check.
    pub spill: std::path::PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            level: Level::Full,
            threads: 2,
            live: false,
            memory_bytes: 256 << 20,
            spill: std::env::temp_dir(),
        }
    }
}

/// Where the bytes of the segments are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct Accounting {
    /// Segment files.
    pub segments: u64,
    /// Bytes of these files.
    pub file_bytes: u64,
    /// Bytes that they take on the device.
    pub allocated_bytes: u64,
    /// Segment headers, trailers and footers.
    pub frame_bytes: u64,
    /// Headers of records that count.
    pub header_bytes: u64,
    /// Payloads of records that count, padding included.
    pub payload_bytes: u64,
    /// Everything else: room that was not used, and what no longer counts.
    pub unused_bytes: u64,
}

impl Accounting {
    /// Adds another.
    pub fn add(&mut self, other: &Self) {
        let sum = |mine: &mut u64, theirs: u64| *mine = mine.saturating_add(theirs);
        sum(&mut self.segments, other.segments);
        sum(&mut self.file_bytes, other.file_bytes);
        sum(&mut self.allocated_bytes, other.allocated_bytes);
        sum(&mut self.frame_bytes, other.frame_bytes);
        sum(&mut self.header_bytes, other.header_bytes);
        sum(&mut self.payload_bytes, other.payload_bytes);
        sum(&mut self.unused_bytes, other.unused_bytes);
    }
}

/// What a check of a whole store found.
#[derive(Clone, Debug, Default)]
pub struct Checked {
    /// What was found, superblocks included.
    pub findings: Findings,
    /// Records that count.
    pub records: u64,
    /// Blocks in them, copies included.
    pub blocks: u64,
    /// Where the bytes are.
    pub accounting: Accounting,
}

impl Checked {
    fn add(&mut self, report: SegmentReport) {
        self.findings.merge(report.findings);
        self.records = self.records.saturating_add(report.records);
        self.blocks = self.blocks.saturating_add(report.blocks);
        self.accounting.add(&report.accounting);
    }
}

/// Bytes that a check of this level will read, about: for progress.
pub fn planned_bytes(store: &Store, level: Level) -> u64 {
    let segments: u64 = store.shards.iter().map(|shard| shard.segments.len() as u64).sum();
    match level {
        Level::Quick => segments.saturating_mul(2 << 20),
        Level::Full | Level::Deep => segments.saturating_mul(store.keyring.segment_bytes),
    }
}

/// Checks a store that [`crate::store::survey`] found; `findings` is what that said.
pub fn check(
    store: &Store,
    options: &Options,
    tally: &Tally,
    findings: Findings,
) -> Result<Checked, DeepError> {
    let deep = deep::Collector::new(options, dead(store, options, tally));
    let sum = Mutex::new(Checked { findings, ..Checked::default() });
    let add = |change: &dyn Fn(&mut Checked)| change(&mut sum.lock().unwrap_or_else(PoisonError::into_inner));
    let known = read_checkpoints(store, options, tally);
    for (shard, (known, found)) in store.shards.iter().zip(&known) {
        add(&|sum| {
            sum.findings.merge(found.clone());
            about_missing((store, shard), known, (options, tally), &mut sum.findings);
        });
        deep.expect(shard.number, known);
    }
    walk_segments(store, options, tally, &known, &|subject, _, report| {
        deep.take(subject, &report);
        sum.lock().unwrap_or_else(PoisonError::into_inner).add(report);
    });
    let mut sum = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    deep.finish(&mut sum.findings)?;
    sum.findings.sort();
    Ok(sum)
}

/// What is deleted in each shard, for a deep check: it must be known before the blocks that it kills are met.
fn dead(store: &Store, options: &Options, tally: &Tally) -> BTreeMap<u32, Graves> {
    if options.level != Level::Deep {
        return BTreeMap::new();
    }
    let graves = contents::graves(store, options, tally);
    let by_number = |(at, graves)| Some((store.shards.get::<usize>(at)?.number, graves));
    graves.into_iter().filter_map(by_number).collect()
}

/// Two for each core: while one waits for the device, the other computes digests.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().saturating_mul(2)).min(64)
}

/// What the checkpoints of a store say.
#[derive(Clone, Debug, Default)]
pub struct Stated {
    /// What the newest whole one of each shard knows, by its number.
    pub known: BTreeMap<u32, Known>,
    /// What is wrong with them, and with what they say is there. Where one is damaged, deletes may be forgotten.
    pub findings: Findings,
}

/// Checks every segment on its own and hands out what was found, with the index of its shard; answers with what the
/// checkpoints say.
pub fn each_segment(
    store: &Store,
    options: &Options,
    tally: &Tally,
    each: &(dyn Fn(usize, u32, &SegmentReport) + Sync),
) -> Stated {
    let known = read_checkpoints(store, options, tally);
    walk_segments(store, options, tally, &known, &|subject, shard, report| {
        each(shard, subject.segment, &report)
    });
    let mut stated = Stated::default();
    for (shard, (known, found)) in store.shards.iter().zip(known) {
        stated.findings.merge(found);
        about_missing((store, shard), &known, (options, tally), &mut stated.findings);
        stated.known.insert(shard.number, known);
    }
    stated
}

/// Checks every segment, on several threads.
fn walk_segments(
    store: &Store,
    options: &Options,
    tally: &Tally,
    known: &[(Known, Findings)],
    each: &(dyn Fn(&Subject<'_>, usize, SegmentReport) + Sync),
) {
    let mut work = Vec::new();
    for ((at, shard), (known, _)) in store.shards.iter().enumerate().zip(known) {
        work.extend(shard.segments.iter().map(|&number| (at, shard, known, number)));
    }
    let newest = Newest::new(store, tally);
    // Shards in turn, so that every device has something to do from the first moment on.
    work.sort_by_key(|(_, shard, _, number)| (*number, shard.number));
    on_threads(options.threads, work.len(), |next| {
        let Some(&(at, shard, known, segment)) = work.get(next) else { return };
        let subject = Subject {
            keyring: &store.keyring,
            shard: shard.number,
            segment,
            known: known.segments.get(&segment),
            listed: known.listed.get(&segment).copied().unwrap_or(0),
            level: options.level,
        };
        let look = Look { store, shard, at, options, tally, newest: &newest };
        if let Some(report) = look.at_segment(&subject, Said::by(known, segment)) {
            each(&subject, at, report);
        }
    });
}

/// Reads what was written of every segment front to back and looks at nothing: what the device gives to as many
/// threads with as large transfers as a check has. Room that was never written is left out: a file system makes its
/// zeros up, faster than any device.
pub fn read_bare(store: &Store, written: &BTreeMap<(usize, u32), u64>, threads: usize, tally: &Tally) {
    let mut files: Vec<(usize, u32, u64)> =
        written.iter().map(|(&(shard, segment), &end)| (shard, segment, end)).collect();
    files.sort_by_key(|(shard, segment, _)| (*segment, *shard));
    on_threads(threads, files.len(), |next| {
        let Some(&(shard, segment, end)) = files.get(next) else { return };
        let Some(shard) = store.shards.get(shard) else { return };
        let Some(directory) = store.directories.get(shard.directory) else { return };
        let path = format!("{}/{}", shard_name(shard.number), segment_name(segment));
        let Ok(file) = directory.disk.open(&path) else { return };
        let mut window = Window::new(&*file, end, tally);
        let mut at = 0;
        while at < end {
            let read = window.some(at, u64::MAX).len() as u64;
            if read == 0 {
                break;
            }
            at = at.saturating_add(read);
        }
    });
}

/// How far each segment was written, by the index of its shard and its number.
pub fn written_ends(store: &Store, threads: usize) -> BTreeMap<(usize, u32), u64> {
    let ends = Mutex::new(BTreeMap::new());
    let options = Options { level: Level::Quick, threads, ..Options::default() };
    each_segment(store, &options, &Tally::default(), &|shard, segment, report| {
        let end = match &report.outcome {
            Outcome::Sealed { trailer, .. } => trailer.log_end,
            Outcome::Walked { .. } => store.keyring.segment_bytes,
            _ => 0,
        };
        ends.lock().unwrap_or_else(PoisonError::into_inner).insert((shard, segment), end);
    });
    ends.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `each` for every number below `count`, on several threads.
fn on_threads(threads: usize, count: usize, each: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return;
            }
            each(at);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, count.max(1)) {
            scope.spawn(work);
        }
        work();
    });
}

/// The checkpoints of all shards, in their order.
fn read_checkpoints(store: &Store, options: &Options, tally: &Tally) -> Vec<(Known, Findings)> {
    let all = Mutex::new(vec![(Known::default(), Findings::default()); store.shards.len()]);
    on_threads(options.threads, store.shards.len(), |at| {
        let Some(shard) = store.shards.get(at).filter(|shard| shard.is_there) else { return };
        let Some(directory) = store.directories.get(shard.directory) else { return };
        let read = || {
            let mut found = Findings::default();
            let records = (tally, options.level == Level::Deep);
            let known = checkpoint::read(&*directory.disk, &store.keyring, shard.number, records, &mut found);
            (known, found)
        };
        let mut both = read();
        if options.live && !both.1.is_clean() {
            // It was being written: now the other one is.
            both = read();
        }
        if let Some(place) = all.lock().unwrap_or_else(PoisonError::into_inner).get_mut(at) {
            *place = both;
        }
    });
    all.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Segments that the newest checkpoint calls used and that are not there.
fn about_missing(
    (store, shard): (&Store, &Shard),
    known: &Known,
    (options, tally): (&Options, &Tally),
    into: &mut Findings,
) {
    let is_used = |state: &&SegmentState| state.state != SEGMENT_FREE;
    let missing = |known: &Known| -> Vec<u32> {
        let used = known.segments.values().filter(is_used).map(|state| state.segment);
        used.filter(|segment| shard.segments.binary_search(segment).is_err()).collect()
    };
    let mut gone = missing(known);
    if kvarts_layout::planted!("fsck-misses-lost-files") {
        gone.clear();
    }
    if options.live && !gone.is_empty() {
        // Listed before the checkpoint was read: it may be a new one, or one that the next checkpoint gives up.
        let Some(directory) = store.directories.get(shard.directory) else { return };
        let newer = checkpoint::read(
            &*directory.disk,
            &store.keyring,
            shard.number,
            (tally, false),
            &mut Findings::default(),
        );
        let still = missing(&newer);
        gone.retain(|segment| {
            let path = format!("{}/{}", shard_name(shard.number), segment_name(*segment));
            still.contains(segment) && directory.disk.open(&path).is_err()
        });
    }
    // What lies in a folder that cannot be listed may still be opened.
    gone.retain(|segment| {
        let path = format!("{}/{}", shard_name(shard.number), segment_name(*segment));
        store.directories.get(shard.directory).is_none_or(|directory| directory.disk.open(&path).is_err())
    });
    for segment in gone {
        let place = Place { shard: Some(shard.number), segment: Some(segment), offset: None };
        let uncounted = known.listed.get(&segment).copied().or(Some(0));
        into.take(Finding { uncounted, ..Finding::at(findings::SEGMENT_MISSING, place) });
    }
}

/// How segments of one shard are looked at.
struct Look<'a> {
    store: &'a Store,
    shard: &'a Shard,
    /// Which of the store's shards it is.
    at: usize,
    options: &'a Options,
    tally: &'a Tally,
    newest: &'a Newest<'a>,
}

impl Look<'_> {
    /// Looks at a segment of which a checkpoint `said` this; none if its directory is not there.
    fn at_segment(&self, subject: &Subject<'_>, mut said: Said) -> Option<SegmentReport> {
        let (shard, options) = (self.shard, self.options);
        let path = format!("{}/{}", shard_name(shard.number), segment_name(subject.segment));
        let directory = self.store.directories.get(shard.directory)?;
        let check = |subject: &Subject<'_>| match directory.disk.open(&path) {
            Ok(file) => check_segment(&*file, subject, self.tally),
            Err(error) if options.live && error.kind() == std::io::ErrorKind::NotFound => {
                // It was there when the folder was listed: the store has given its space back.
                let mut report = SegmentReport::default();
                report.findings.take(Finding::at(findings::LIVE_CHANGED, subject.place(None)));
                report
            }
            Err(error) => {
                let finding = Finding::at(findings::FILE_UNREADABLE, subject.place(None));
                let path = format!("{}/{path}", directory.disk.name());
                let mut report = SegmentReport::default();
                let uncounted = Some(subject.listed);
                report.findings.take(Finding { file: Some(path), uncounted, ..finding.found(error) });
                report
            }
        };
        let mut report = check(subject);
        if !options.live {
            return Some(report);
        }
        // A file that was given back and made again.
        while one::is_blank(&report) && said.is_used() {
            let Some(newer) = self.newest.after(self.at, subject.segment, &said) else { break };
            said = newer;
            report = check(&Subject { known: said.known.as_ref(), listed: said.listed, ..*subject });
        }
        let subject = Subject { known: said.known.as_ref(), listed: said.listed, ..*subject };
        one::forgive(&mut report, &subject, || check(&subject));
        Some(report)
    }
}
