//! Every segment of a store, once, front to back, on several threads; and what its checkpoints say.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use kvarts_layout::format::checkpoint::{SEGMENT_FREE, SegmentState};
use kvarts_layout::format::names::{segment_name, shard_name};

use super::newest::{Newest, Said};
use super::one::{self, check_segment};
use super::options::{Level, Options};
use super::outcome::{SegmentReport, Subject};
use crate::checkpoint::{self, Known};
use crate::findings::{self, Finding, Findings, Place};
use crate::store::{Shard, Store};
use crate::window::Tally;

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
pub(super) fn walk_segments(
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

/// Calls `each` for every number below `count`, on several threads.
pub(crate) fn on_threads(threads: usize, count: usize, each: impl Fn(usize) + Sync) {
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
pub(super) fn read_checkpoints(store: &Store, options: &Options, tally: &Tally) -> Vec<(Known, Findings)> {
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
pub(super) fn about_missing(
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
