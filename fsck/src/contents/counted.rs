//! What counts in a store, decided without holding what it has: a byte for each block, and a sort that takes temporary files
//! where memory does not do. For tasks that go through a store of any size once.
//!
//! Footers are read three times: for what was deleted, for which production of a block counts, and for the task itself.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use super::{Fate, Graves, Remembered, Run, buried, subject, take};
use crate::check::{Level, Options, Stated, each_segment};
use crate::findings::Findings;
use crate::needs::{EXPORT_ROW_BYTES, EXPORT_SORT_BYTES};
use crate::spill::Sorter;
use crate::store::Store;
use crate::window::Tally;

/// A block that counts unless another one of the same name does: what it is about, the shard, its sequence from above, where it
/// is among the segment's blocks.
type Row = [u8; EXPORT_ROW_BYTES];

/// Blocks of a segment in the order in which it lists them.
#[derive(Debug)]
struct Listed {
    generation: u64,
    fates: Vec<Fate>,
}

/// What counts, by index into [`Store::shards`] and number of the segment.
#[derive(Debug, Default)]
pub struct Counted {
    listed: BTreeMap<(usize, u32), Listed>,
    times: BTreeMap<usize, Remembered>,
    /// What is wrong with the store's metadata.
    pub findings: Findings,
    /// Records whose namespace is not defined: they cannot be read.
    pub undefined: u64,
    /// Bytes of records of blocks.
    pub bytes: u64,
    /// The store was in use while it was read.
    pub live: bool,
}

/// Decides what counts. What has expired at `now_ms` (milliseconds since 1970) does not.
pub fn count(
    store: &Store,
    options: &Options,
    now_ms: u64,
    tally: &Tally,
    found: Findings,
) -> io::Result<Counted> {
    let options = Options { level: Level::Quick, ..options.clone() };
    let (graves, times) = buried(store, &options, tally);
    let memory = EXPORT_SORT_BYTES.min(options.memory_bytes);
    let counted = Counted { findings: found, live: options.live, ..Counted::default() };
    let state = Mutex::new((counted, Sorter::new(memory, &options.spill), Ok(())));
    let Stated { findings, .. } = each_segment(store, &options, tally, &|shard, segment, report| {
        let taken = take(store, (shard, segment), report, tally);
        let known = (graves.get(&shard), times.get(&shard), now_ms);
        let (mut fates, mut rows) = (Vec::new(), Vec::new());
        for run in &taken.runs {
            decide(run, known, &mut fates, &mut rows);
        }
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let (counted, sorter, sorted) = &mut *state;
        if sorted.is_ok() {
            *sorted = sorter.take(rows);
        }
        counted.findings.merge(taken.findings);
        counted.undefined = counted.undefined.saturating_add(taken.undefined);
        counted.bytes = taken.runs.iter().map(Run::bytes).fold(counted.bytes, u64::saturating_add);
        fates.shrink_to_fit();
        counted.listed.insert((shard, segment), Listed { generation: taken.view.generation, fates });
    });
    let (mut counted, sorter, sorted) = state.into_inner().unwrap_or_else(PoisonError::into_inner);
    sorted?;
    let mut before = None;
    sorter.finish(|row| {
        let subject = row.first_chunk::<16>().copied();
        if before == subject {
            counted.copy(row);
        }
        before = subject;
    })?;
    counted.findings.merge(findings);
    counted.findings.sort();
    counted.times = times;
    Ok(counted)
}

/// What becomes of the blocks of a record, as far as it can be told without the others.
fn decide(
    run: &Run,
    (graves, times, now_ms): (Option<&Graves>, Option<&Remembered>, u64),
    fates: &mut Vec<Fate>,
    rows: &mut Vec<Row>,
) {
    let expires_ms = expires(run, times);
    let expired = expires_ms != 0 && expires_ms <= now_ms;
    let namespace = run.namespace.id.0;
    let column = (run.blocks.group, run.blocks.coordinate);
    for (name, fate) in run.blocks.blocks.iter().zip(&run.fates) {
        let is_buried =
            || graves.is_some_and(|graves| graves.covers(&namespace, &name.key, column, run.sequence));
        let fate = match fate {
            Fate::Evicted => Fate::Evicted,
            _ if is_buried() => Fate::Deleted,
            _ if expired => Fate::Expired,
            _ => {
                rows.push(row(&subject(&namespace, &name.key, column), run, fates.len()));
                Fate::Live
            }
        };
        fates.push(fate);
    }
}

/// When a record expires: a checkpoint knows of changes.
fn expires(run: &Run, times: Option<&Remembered>) -> u64 {
    let place = (run.segment, run.generation, run.offset);
    times.and_then(|times| times.get(&place)).copied().unwrap_or(run.expires_ms)
}

fn row(subject: &[u8; 16], run: &Run, at: usize) -> Row {
    let mut row = [0u8; EXPORT_ROW_BYTES];
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
    let (shard, at) = (number(run.shard), number(at));
    // The newest of a shard comes first.
    let (age, segment) = ((!run.sequence).to_be_bytes(), run.segment.to_be_bytes());
    let fields: [&[u8]; 5] = [subject, &shard, &age, &segment, &at];
    for (to, from) in row.iter_mut().zip(fields.into_iter().flatten()) {
        *to = *from;
    }
    row
}

impl Counted {
    /// The block of a row does not count after all.
    fn copy(&mut self, row: &Row) {
        let number = |at: usize| -> Option<u32> {
            row.get(at..).and_then(|rest| rest.first_chunk::<4>()).map(|bytes| u32::from_be_bytes(*bytes))
        };
        let (Some(shard), Some(segment), Some(at)) = (number(16), number(28), number(32)) else { return };
        let listed = self.listed.get_mut(&(shard as usize, segment));
        if let Some(fate) = listed.and_then(|listed| listed.fates.get_mut(at as usize)) {
            *fate = Fate::Copy;
        }
    }

    /// Hands out every record of blocks, segment by segment, each in the order of its log, up to the first error. Gives how many
    /// blocks that counted were not found again: those of a segment that was used anew meanwhile.
    pub fn each_run<E: Send>(
        &self,
        store: &Store,
        options: &Options,
        tally: &Tally,
        each: &mut (dyn FnMut(&Run) -> Result<(), E> + Send),
    ) -> Result<u64, E> {
        // One thread: what is written has one order.
        let options = Options { level: Level::Quick, threads: 1, ..options.clone() };
        let state = Mutex::new((each, Ok(0u64)));
        each_segment(store, &options, tally, &|shard, segment, report| {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            let (each, done) = &mut *state;
            let (Ok(gone), Some(listed)) = (&mut *done, self.listed.get(&(shard, segment))) else { return };
            let taken = take(store, (shard, segment), report, tally);
            let blocks: usize = taken.runs.iter().map(|run| run.fates.len()).sum();
            if taken.view.generation != listed.generation || blocks != listed.fates.len() {
                let live = listed.fates.iter().filter(|fate| **fate == Fate::Live).count() as u64;
                *gone = gone.saturating_add(live);
                return;
            }
            let mut fates = listed.fates.iter();
            for mut run in taken.runs {
                run.expires_ms = expires(&run, self.times.get(&shard));
                run.fates = fates.by_ref().take(run.fates.len()).copied().collect();
                if let Err(error) = each(&run) {
                    *done = Err(error);
                    return;
                }
            }
        });
        state.into_inner().unwrap_or_else(PoisonError::into_inner).1
    }
}
