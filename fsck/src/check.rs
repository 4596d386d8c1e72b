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
mod each;
mod listed;
#[cfg(test)]
mod live_tests;
mod newest;
mod one;
mod options;
mod outcome;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kvarts_layout::format::names::{segment_name, shard_name};

use crate::contents::{self, Graves};
use crate::findings::Findings;
use crate::store::Store;
use crate::window::{Tally, Window};

pub use deep::DeepError;
pub(crate) use each::on_threads;
pub use each::{Stated, each_segment};
use each::{about_missing, read_checkpoints, walk_segments};
pub use one::check_segment;
pub use options::{Level, Options};
pub use outcome::{Accounting, Outcome, SegmentReport, Subject};

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
