//! What lies in different segments and shards, compared: copies of one block, parents, sequences, and what checkpoints
//! say of records.
//!
//! Every block and every named parent becomes a fingerprint of 80 bytes under what it is about. They are sorted, and
//! what is equal stands together then, wherever it lies. Beyond the memory that a check may take they go to temporary files.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::{Blocks, Parent};
use kvarts_layout::format::record::Body;
use kvarts_layout::format::trailer::SealReason;

use super::{Level, Options, Outcome, SegmentReport, Subject};
use crate::checkpoint::{Known, Listed};
use crate::contents::Graves;
use crate::findings::{self, Finding, Findings, Place};
use crate::spill::Sorter;
use crate::walk::{Met, Payload};

/// Why a deep check could not be ended.
#[derive(Debug)]
pub struct DeepError(pub String);

impl fmt::Display for DeepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DeepError {}

fn failed(error: &io::Error) -> DeepError {
    DeepError(format!(
        "a temporary file for comparing blocks could not be written or read ({error}): raise \
        --memory-mib, or set TMPDIR to a folder with more space"
    ))
}

/// Bytes of one fingerprint.
const BYTES: usize = 80;
/// What a fingerprint is about; the order in which those of one subject stand.
const PRODUCTION: u8 = 0;
const PARENT: u8 = 1;
const SEQUENCE: u8 = 2;

/// One fingerprint: 16 bytes of what it is about, the kind, and then by kind. As bytes, so that their order is the
/// sort's and a file of them needs no decoding.
type Print = [u8; BYTES];

/// A place as a fingerprint carries it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct At {
    shard: u32,
    segment: u32,
    offset: u64,
}

impl At {
    fn place(self) -> Place {
        Place { shard: Some(self.shard), segment: Some(self.segment), offset: Some(self.offset) }
    }
}

fn print(subject: &[u8; 16], kind: u8, origin: &[u8; 16], content: &[u8; 16], at: At) -> Print {
    let mut bytes = [0u8; BYTES];
    let fields: [&[u8]; 7] = [
        subject,
        &[kind],
        origin,
        content,
        &at.shard.to_be_bytes(),
        &at.segment.to_be_bytes(),
        &at.offset.to_be_bytes(),
    ];
    let mut to = bytes.iter_mut();
    for byte in fields.into_iter().flatten() {
        if let Some(place) = to.next() {
            *place = *byte;
        }
    }
    bytes
}

fn field<const N: usize>(print: &Print, at: usize) -> [u8; N] {
    print.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().unwrap_or([0; N])
}

fn at_of(print: &Print) -> At {
    At {
        shard: u32::from_be_bytes(field(print, 49)),
        segment: u32::from_be_bytes(field(print, 53)),
        offset: u64::from_be_bytes(field(print, 57)),
    }
}

/// The subject of a block: everything that its key is made of.
fn block_subject(namespace: &[u8; 32], key: &[u8; 32], blocks: &Blocks) -> [u8; 16] {
    crate::contents::subject(namespace, key, (blocks.group, blocks.coordinate))
}

fn first_half(bytes: &[u8; 32]) -> [u8; 16] {
    let [half, _] = *bytes.as_chunks::<16>().0 else { return [0; 16] };
    half
}

/// What all threads have collected.
#[derive(Debug)]
struct State {
    prints: Sorter<BYTES>,
    failed: Option<DeepError>,
    /// Records that a checkpoint lists, by shard; sorted.
    listed: BTreeMap<u32, Vec<Listed>>,
    found: Findings,
}

/// Collects fingerprints; of use only to a deep check.
#[derive(Debug)]
pub(super) struct Collector {
    level: Level,
    /// What is dead, by shard.
    graves: BTreeMap<u32, Graves>,
    state: Mutex<State>,
}

impl Collector {
    pub(super) fn new(options: &Options, graves: BTreeMap<u32, Graves>) -> Self {
        let state = State {
            prints: Sorter::new(options.memory_bytes, &options.spill),
            failed: None,
            listed: BTreeMap::new(),
            found: Findings::default(),
        };
        Self { level: options.level, graves, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes which records a shard's checkpoint lists.
    pub(super) fn expect(&self, shard: u32, known: &Known) {
        if self.level == Level::Deep {
            self.state().listed.insert(shard, known.records.clone());
        }
    }

    /// Takes the records of one segment in.
    pub(super) fn take(&self, subject: &Subject<'_>, report: &SegmentReport) {
        if self.level != Level::Deep {
            return;
        }
        let records: &[Met] = match &report.outcome {
            Outcome::Sealed { good, .. } => good,
            Outcome::Walked { scanned, .. } => &scanned.adopted,
            _ => &[],
        };
        let mut prints = Vec::new();
        for met in records {
            let at = At { shard: subject.shard, segment: subject.segment, offset: met.offset };
            prints.push(sequence_print(met, at));
            if let Some(namespace) = &met.namespace {
                prints_of(met, namespace, (at, self.graves.get(&subject.shard)), &mut prints);
            }
        }
        let mut state = self.state();
        self.listed_in(subject, report, &mut state);
        if let Err(error) = state.prints.take(prints) {
            state.failed.get_or_insert(failed(&error));
        }
    }

    /// Compares what the checkpoint lists in a segment with what is there. Of one that was sealed in order, every
    /// record that was ever in the index is there.
    fn listed_in(&self, subject: &Subject<'_>, report: &SegmentReport, state: &mut State) {
        let Outcome::Sealed { generation, trailer, footer, .. } = &report.outcome else { return };
        if trailer.reason != SealReason::Normal {
            return;
        }
        let Some(listed) = state.listed.get(&subject.shard) else { return };
        let from = listed.partition_point(|one| (one.0, one.1) < (subject.segment, *generation));
        let here = listed.get(from..).unwrap_or_default().iter();
        let mut missing = Vec::new();
        for one in here.take_while(|one| (one.0, one.1) == (subject.segment, *generation)) {
            let offset = u64::from(one.2).saturating_mul(PAGE_BYTES);
            if footer.records.binary_search_by_key(&offset, |entry| entry.offset).is_err() {
                missing.push(offset);
            }
        }
        for offset in missing {
            let finding = Finding::at(findings::CHECKPOINT_DISAGREES, subject.place(Some(offset)));
            state.found.take(finding);
        }
    }

    /// Compares everything.
    pub(super) fn finish(self, into: &mut Findings) -> Result<(), DeepError> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = state.failed {
            return Err(failed);
        }
        into.merge(state.found);
        let mut group = Group::default();
        state.prints.finish(|print| group.take(print, into)).map_err(|error| failed(&error))?;
        group.end(into);
        Ok(())
    }
}

fn sequence_print(met: &Met, at: At) -> Print {
    let mut subject = [0u8; 16];
    let (low, high) = subject.split_at_mut(8);
    low.copy_from_slice(&u64::from(at.shard).to_be_bytes());
    high.copy_from_slice(&met.prefix.sequence.to_be_bytes());
    print(&subject, SEQUENCE, &[0; 16], &[0; 16], at)
}

/// The fingerprints of the blocks of one record that no delete has killed, and of the parent that the record names. A
/// deleted block is neither a copy nor a parent of another block.
fn prints_of(met: &Met, namespace: &[u8; 32], (at, graves): (At, Option<&Graves>), into: &mut Vec<Print>) {
    let (Some(Body::Blocks(blocks)), Payload::Read(verified)) = (&met.body, &met.payload) else { return };
    if !verified.is_whole() {
        return;
    }
    let column = (blocks.group, blocks.coordinate);
    let is_dead = |key: &[u8; 32]| {
        graves.is_some_and(|graves| graves.covers(namespace, key, column, met.prefix.sequence))
    };
    for (block, (name, content)) in (0u32..).zip(blocks.blocks.iter().zip(&verified.contents)) {
        if is_dead(&name.key) || verified.is_gone(block) {
            continue;
        }
        let subject = block_subject(namespace, &name.key, blocks);
        into.push(print(&subject, PRODUCTION, &name.origin, &first_half(content), at));
    }
    if let (Parent::Key(key), Some(first)) = (&blocks.parent, blocks.blocks.first())
        && !is_dead(&first.key)
        && !verified.is_gone(0)
    {
        let subject = block_subject(namespace, key, blocks);
        into.push(print(&subject, PARENT, &[0; 16], &[0; 16], at));
    }
}

/// What is about one subject, taken in one by one: memory does not grow with it.
#[derive(Debug, Default)]
struct Group {
    subject: Option<[u8; 17]>,
    /// The last production: origin, content, place.
    last: Option<([u8; 16], [u8; 16], At)>,
    is_there: Option<[u8; 16]>,
    shards: Option<(u32, bool)>,
}

impl Group {
    fn take(&mut self, print: &Print, into: &mut Findings) {
        let subject = field::<17>(print, 0);
        if self.subject != Some(subject) {
            self.end(into);
            self.subject = Some(subject);
        }
        let at = at_of(print);
        let (origin, content) = (field::<16>(print, 17), field::<16>(print, 33));
        match subject.last().copied() {
            Some(PRODUCTION) => self.production(origin, content, at, into),
            Some(PARENT) => {
                if self.is_there != Some(field(print, 0)) {
                    into.take(Finding::at(findings::PARENT_ABSENT, at.place()));
                }
            }
            _ => {
                if let Some((.., first)) = self.last {
                    let finding = Finding::at(findings::SEQUENCE_REPEATED, at.place());
                    let other =
                        format!("another copy is in segment {} at offset {}", first.segment, first.offset);
                    into.take(finding.found(other));
                }
                self.last = Some((origin, content, at));
            }
        }
    }

    fn production(&mut self, origin: [u8; 16], content: [u8; 16], at: At, into: &mut Findings) {
        if let Some((before, bytes, first)) = self.last {
            let label = match (before == origin, bytes == content) {
                (true, true) => findings::COPY_OF_ORIGIN,
                (true, false) => findings::ORIGIN_CONTENT_DIFFERS,
                (false, _) => findings::SUPERSEDED_COPY,
            };
            let other = format!(
                "another copy is in shard {} segment {} at offset {}",
                first.shard, first.segment, first.offset
            );
            into.take(Finding::at(label, at.place()).found(other));
        }
        match &mut self.shards {
            Some((shard, several)) => *several |= *shard != at.shard,
            None => self.shards = Some((at.shard, false)),
        }
        self.is_there = self.subject.map(|subject| field_of(&subject));
        self.last = Some((origin, content, at));
    }

    fn end(&mut self, into: &mut Findings) {
        if let (Some((_, true)), Some((.., at))) = (self.shards, self.last) {
            into.take(Finding::at(findings::COPY_IN_TWO_SHARDS, at.place()));
        }
        (self.last, self.shards) = (None, None);
    }
}

fn field_of(subject: &[u8; 17]) -> [u8; 16] {
    subject.first_chunk::<16>().copied().unwrap_or([0; 16])
}

#[cfg(test)]
mod tests;
