//! Putting blocks: what a put does on the caller's thread, and what the executors do for it.
//!
//! On the caller's thread the request is checked, its missing blocks are reserved in the index (so that of two
//! puts of one block only one writes), cut into records and digested. Each record goes to the executor of the
//! shard that its first key names; there room is made within its quota if that is used up, it is appended, made durable if asked, and only then made live. The
//! last record to end gives the answer.
//!
//! Whatever happens to a put, its reservations end: a job that is dropped half-way abandons what it had reserved.

pub(crate) mod layers;
mod write;

use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use kvarts_layout::arrange::{LAYOUT_VERSION, RunLayout};
use kvarts_layout::format::body::{BlockName, Blocks, ENCODING_RAW, Parent as DiskParent, layout_code};
use kvarts_layout::format::page_align;
use kvarts_layout::plan::WritePlan;
use kvarts_layout::{BlockKey, Layout, OriginId};

use super::log::Log;
use crate::engine::shared::Shared;
use crate::engine::shared::quota::{self, Share};
use crate::engine::shared::recently_gone::Gone;
use crate::engine::shared::record_class::{RecordClass, RecordForm};
use crate::engine::shared::visibility::{BlockOf, Departure};
use crate::engine::tasks::notify::with_deadline;
use crate::engine::volume::segment::record_range;
use crate::index::{BlockFingerprint, Eviction, Lookup, Reservation, Ticket as Claim};
use crate::rt::LocalTask;
use kvarts_contract::api::{BlockOutcome, Durability, MAX_REQUEST_BLOCKS, Parent, PutReply, PutRequest};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason, SpaceCause};
use kvarts_contract::sync::{Mutex, MutexGuard};
use kvarts_contract::ticket::Reply;

/// Blocks of one record at most, whatever their size: the index counts them in sixteen bits.
const RECORD_BLOCKS_MAX: u32 = 4096;

/// What a record's header has at most beside its blocks and digests.
const HEADER_BYTES: u64 = 640;
/// What it has for a block.
const HEADER_BLOCK_BYTES: u64 = 48;

/// What the parts of one put share.
pub(crate) struct PutJob {
    shared: Arc<Shared>,
    request: PutRequest,
    /// When the blocks were first stored elsewhere, of which these are copies.
    produced_ms: Option<u64>,
    class: Arc<RecordClass>,
    prints: Vec<BlockFingerprint>,
    claim: Claim,
    state: Mutex<PutState>,
}

struct PutState {
    outcomes: Vec<BlockOutcome>,
    /// The first block of a chain that was refused for want of room, and why.
    refused: Option<(u32, Reason)>,
    /// What runs hang on that are not written yet, by their first blocks: it does not go meanwhile ([`Index::hang`]).
    holds: BTreeMap<u32, u64>,
    parts_left: usize,
    reply: Option<Reply<Result<PutReply, Error>>>,
}

/// What one executor does for a put.
pub(crate) struct PutPart {
    pub(crate) job: Arc<PutJob>,
    pub(crate) work: PutWork,
}

/// The kinds of work.
pub(crate) enum PutWork {
    /// Write these blocks of the request as one record.
    Write { run: Range<u32>, digests: Vec<u32>, share: Share },
    /// These blocks are here already: make sure that their record is as durable as was asked.
    Settle { places: Vec<u32>, segment: u32, end: u64 },
}

/// A part and the shard that it is for.
pub(crate) type Routed = (u32, PutPart);

/// Checks the request, reserves what is missing and cuts it into parts. If nothing is left to do, the answer has
/// been given.
pub(crate) fn begin(
    shared: &Arc<Shared>,
    (request, produced_ms): (PutRequest, Option<u64>),
    reply: Reply<Result<PutReply, Error>>,
) -> Vec<Routed> {
    let class = match check(shared, &request, false) {
        Ok(class) => class,
        Err(reason) => {
            // A caller that is gone needs no answer.
            let _ = reply.send(Err(reason.into()));
            return Vec::new();
        }
    };
    let (job, reservations) = reserve(shared, (request, produced_ms), class, reply);
    let mut parts = match job.hangs_on_refused() {
        Some(reason) => job.refuse_reserved(&reservations, &reason),
        None => job.writes(&reservations),
    };
    parts.extend(job.settles(&reservations));
    job.lock().parts_left = parts.len();
    if parts.is_empty() {
        job.answer();
    }
    parts
}

/// Reserves what is missing.
fn reserve(
    shared: &Arc<Shared>,
    (request, produced_ms): (PutRequest, Option<u64>),
    class: Arc<RecordClass>,
    reply: Reply<Result<PutReply, Error>>,
) -> (Arc<PutJob>, Vec<Reservation>) {
    let prints = shared.prints_of(&class.namespace, &request.keys, (request.group, request.coordinate));
    let mut reservations = Vec::new();
    let claim = shared.index.reserve(&prints, &mut reservations);
    let outcome = |reservation: &Reservation| match reservation {
        Reservation::Live(_) => BlockOutcome::AlreadyThere,
        Reservation::InFlight => BlockOutcome::InFlight,
        Reservation::Reserved => BlockOutcome::Refused(Reason::Bug(
            "a reserved block is in no part of the \
            put",
        )),
    };
    let outcomes = reservations.iter().map(outcome).collect();
    let state = Mutex::new(PutState {
        outcomes,
        refused: None,
        holds: BTreeMap::new(),
        parts_left: 0,
        reply: Some(reply),
    });
    let job = PutJob { shared: Arc::clone(shared), request, produced_ms, class, prints, claim, state };
    (Arc::new(job), reservations)
}

/// Everything about a request that can be said before anything is begun. Only a put by layers may have memory that
/// layers share.
fn check(shared: &Arc<Shared>, request: &PutRequest, by_layers: bool) -> Result<Arc<RecordClass>, Reason> {
    if let Some(reason) = shared.latched() {
        return Err(reason);
    }
    if request.keys.is_empty() {
        return Err(Reason::Empty);
    }
    if request.keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    if request.deadline.is_some_and(|deadline| deadline <= shared.clock.now()) {
        return Err(Reason::DeadlineInPast);
    }
    if let Some(limit) = shared.index_is_full(request.keys.len() as u64) {
        return Err(Reason::NoSpace(SpaceCause::Index { limit }));
    }
    if !by_layers && request.from.gate().is_some() {
        // Memory that layers share has no bytes of all of them at once.
        return Err(Reason::Overlap);
    }
    let blocks = request.keys.len() as u32;
    check_keys(&request.keys, request.parent)?;
    if let Some(origins) = &request.origins
        && origins.len() != request.keys.len()
    {
        return Err(Reason::Length { expected: u64::from(blocks), found: origins.len() as u64 });
    }
    if request.from.block_count() != blocks {
        let found = u64::from(request.from.block_count());
        return Err(Reason::Length { expected: u64::from(blocks), found });
    }
    let namespace = shared.names.get(request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
    if let Some(reason) = shared.names.closed(request.namespace) {
        return Err(reason);
    }
    let shape = namespace.shape(request.group, request.coordinate)?;
    namespace.note_put();
    let run = record_blocks(shared, shape.block_bytes())?.min(blocks);
    let layout = request.layout.unwrap_or_else(|| Layout::auto(&shape, run));
    let form = RecordForm { layout, layout_version: LAYOUT_VERSION, encoding: ENCODING_RAW };
    let column = (request.group, request.coordinate);
    let known = shared.classes.known(&namespace, column, form);
    // A placement of another shape is found here, before anything is reserved or remembered.
    let blocks = blocks.min(RECORD_BLOCKS_MAX);
    let planned = match &known {
        Some(class) => class.layout_of(blocks)?,
        None => Arc::new(RunLayout::new(layout, LAYOUT_VERSION, &shape, blocks)?),
    };
    WritePlan::new(&planned, request.from.places(), 0)?;
    known.map_or_else(|| shared.classes.intern(&namespace, column, form), Ok)
}

/// Refuses keys that stand twice, and a parent among its own descendants.
fn check_keys(keys: &[BlockKey], parent: Parent) -> Result<(), Reason> {
    let mut sorted: Vec<&BlockKey> = keys.iter().collect();
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        if let [a, b] = pair
            && a == b
        {
            return Err(Reason::Duplicate(**a));
        }
    }
    match parent {
        Parent::Key(parent) if sorted.binary_search(&&parent).is_ok() => Err(Reason::OutOfOrder(parent)),
        _ => Ok(()),
    }
}

/// How many blocks of this size go into one record.
fn record_blocks(shared: &Shared, block_bytes: u64) -> Result<u32, Reason> {
    if block_bytes > shared.segment_bytes / 2 {
        return Err(Reason::TooMany("bytes in one block for this store's segments"));
    }
    let blocks = (shared.record_bytes_max / block_bytes.max(1)).max(1);
    Ok(u32::try_from(blocks).unwrap_or(u32::MAX).min(RECORD_BLOCKS_MAX))
}

impl PutJob {
    fn lock(&self) -> MutexGuard<'_, PutState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which blocks are to be written: those that are reserved, less what is not let in, which is refused here.
    fn admit(&self, reservations: &[Reservation]) -> Vec<bool> {
        let is_reserved = |reservation: &Reservation| *reservation == Reservation::Reserved;
        let mut reserved: Vec<bool> = reservations.iter().map(is_reserved).collect();
        let wanted = self.prints.iter().zip(&reserved).filter(|(_, reserved)| **reserved);
        let now = self.shared.clock.now();
        let worth = self.class.namespace.worth();
        let admitted = self.shared.admission.admit(wanted.map(|(print, _)| *print), worth, now);
        let places = (0u32..).zip(&mut reserved).filter(|(_, reserved)| **reserved);
        for (place, reserved) in places.skip(admitted) {
            *reserved = false;
            let outcome = self.give_up(&(place..place + 1), Reason::NotAdmitted);
            self.shared.counters.blocks_not_admitted.fetch_add(1, Relaxed);
            if let Some(slot) = self.lock().outcomes.get_mut(place as usize) {
                *slot = outcome;
            }
        }
        reserved
    }

    /// One part for each run of reserved blocks, no longer than a record may be.
    fn writes(self: &Arc<Self>, reservations: &[Reservation]) -> Vec<Routed> {
        let limit = record_blocks(&self.shared, self.class.shape.block_bytes()).unwrap_or(1);
        let reservations = self.admit(reservations);
        let mut parts = Vec::new();
        let mut start = None;
        for (ordinal, reserved) in (0u32..).zip(reservations.into_iter().chain([false])) {
            match start {
                None if reserved => start = Some(ordinal),
                Some(first) if !reserved || ordinal - first == limit => {
                    parts.extend(self.write_part(first..ordinal));
                    start = reserved.then_some(ordinal);
                }
                _ => {}
            }
        }
        parts
    }

    /// The part that writes a run, or `None` if the namespace's quota refuses it.
    fn write_part(self: &Arc<Self>, run: Range<u32>) -> Option<Routed> {
        let (share, digests) = match self.share(&run).and_then(|share| Ok((share, self.digests(&run)?))) {
            Ok(both) => both,
            Err(reason) => {
                let outcome = self.give_up(&run, reason);
                let mut state = self.lock();
                if let Some(refused) = state.outcomes.get_mut(run.start as usize..run.end as usize) {
                    refused.fill(outcome);
                }
                return None;
            }
        };
        self.hold_before(run.start);
        let shard = self.request.keys.get(run.start as usize).map_or(0, |key| self.shared.shard_for(key));
        Some((shard, PutPart { job: Arc::clone(self), work: PutWork::Write { run, digests, share } }))
    }

    /// The digest of each chunk of a run, block by block, each in canonical order. Those that came with the request are not
    /// computed again.
    fn digests(&self, run: &Range<u32>) -> Result<Vec<u32>, Reason> {
        let chunks = self.class.shape.layers().iter().flat_map(|layer| &layer.chunks);
        let sizes: Vec<u64> = chunks.map(|chunk| chunk.bytes).collect();
        let known = self.request.from.digests();
        let mut digests = Vec::with_capacity(run.len() * sizes.len());
        for block in run.clone() {
            for (part, &bytes) in (0u32..).zip(&sizes) {
                if let Some(digest) = known.and_then(|known| known.get(part, block)) {
                    digests.push(digest);
                    continue;
                }
                let chunk = self.request.from.chunk(part, block, bytes);
                let chunk = chunk.ok_or(Reason::Bug("a chunk lies outside the memory of its put"))?;
                digests.push(chunk.digest(0, chunk.len(), crc32fast::hash));
            }
        }
        Ok(digests)
    }

    /// Takes what the record of a run will take of its namespace's quota, or says what is to be had first.
    fn share(&self, run: &Range<u32>) -> Result<Share, Reason> {
        let shape = &self.class.shape;
        let chunks: usize = shape.layers().iter().map(|layer| layer.chunks.len()).sum();
        let (blocks, chunks) = (run.len() as u64, chunks as u64);
        let header = HEADER_BYTES + blocks * (HEADER_BLOCK_BYTES + 4 * chunks);
        let payload = self.class.layout_of(run.len() as u32)?.image_bytes();
        let account = self.shared.index.records().ledger().account(self.class.namespace.id);
        quota::promise(&account, page_align(header).unwrap_or(header) + payload)
    }

    /// One part for each segment that blocks which are here already must be durable in.
    fn settles(self: &Arc<Self>, reservations: &[Reservation]) -> Vec<Routed> {
        let mut ends = BTreeMap::<(u16, u32), (u64, Vec<u32>)>::new();
        if self.request.durability == Durability::Relaxed {
            return Vec::new();
        }
        for (place, reservation) in (0u32..).zip(reservations) {
            let Reservation::Live(location) = reservation else { continue };
            let Some(record) = self.shared.index.records().get(location.record) else { continue };
            let (_, end) = record_range(&record);
            let entry = ends.entry((record.shard, record.segment)).or_default();
            entry.0 = entry.0.max(end);
            entry.1.push(place);
        }
        let part = |((shard, segment), (end, places))| {
            let work = PutWork::Settle { places, segment, end };
            (u32::from(shard), PutPart { job: Arc::clone(self), work })
        };
        ends.into_iter().map(part).collect()
    }

    /// Why nothing may be stored behind what it hangs on: that was refused for want of room, and has not come since.
    fn hangs_on_refused(&self) -> Option<Reason> {
        if !self.shared.gone.any_refused() || !matches!(self.request.parent, Parent::Key(_)) {
            return None;
        }
        let parent = self.before(0);
        let refused = self.shared.index.lookup(parent) == Lookup::Absent
            && self.shared.gone.why(parent) == Some(Gone::NoRoom);
        refused.then(|| Reason::NoSpace(SpaceCause::Prefix { limit: self.shared.space().1 }))
    }

    /// Refuses all that is to be written. No part is left of it.
    fn refuse_reserved(&self, reservations: &[Reservation], reason: &Reason) -> Vec<Routed> {
        for (place, _) in (0u32..).zip(reservations).filter(|(_, one)| **one == Reservation::Reserved) {
            let outcome = self.give_up(&(place..place + 1), reason.clone());
            if let Some(slot) = self.lock().outcomes.get_mut(place as usize) {
                *slot = outcome;
            }
        }
        Vec::new()
    }

    /// What a run hangs on that begins with this block does not go until it is written, or refused.
    fn hold_before(&self, place: u32) {
        let before = self.before(place).first();
        if !kvarts_layout::planted!("beginnings-go-first") && self.shared.index.hang(before) {
            self.lock().holds.insert(place, before);
        }
    }

    /// Leaves to a record what the run was held by that begins with this block.
    fn take_hold(&self, place: u32) -> bool {
        self.lock().holds.remove(&place).is_some()
    }

    /// What stands before a block of the request, as far as it is known and what comes behind it is of no use without it; else the
    /// default.
    fn before(&self, place: u32) -> BlockFingerprint {
        if self.class.is_boundary() {
            return BlockFingerprint::default();
        }
        match (self.request.parent, place.checked_sub(1)) {
            (Parent::Unknown, _) => BlockFingerprint::default(),
            (_, Some(before)) => self.prints.get(before as usize).copied().unwrap_or_default(),
            (parent, None) => self.shared.asked_parent(&self.class, parent),
        }
    }

    /// A chain is kept up to the first block that there was no room for: what was stored behind it goes again, before anything
    /// of it was acknowledged.
    fn end_at(&self, refused: u32, reason: &Reason, outcomes: &mut [BlockOutcome]) {
        for (place, outcome) in outcomes.iter_mut().enumerate().skip(refused as usize) {
            if *outcome != BlockOutcome::Stored {
                continue;
            }
            let (Some(print), Some(key)) = (self.prints.get(place), self.request.keys.get(place)) else {
                break;
            };
            let Lookup::Live(at) = self.shared.index.lookup(*print) else { continue };
            let block = BlockOf { class: &self.class, key: *key };
            if let Eviction::Evicted { .. } = self.shared.evict(*print, at, Departure::Evicted, block) {
                *outcome = BlockOutcome::Refused(reason.clone());
                // It was never acknowledged: what comes behind it is refused as behind the others.
                self.shared.gone.note(*print, Gone::NoRoom);
            }
        }
    }

    /// The answer, if this was the last part.
    fn finish(&self, outcomes: impl IntoIterator<Item = (u32, BlockOutcome)>) {
        let mut state = self.lock();
        for (place, outcome) in outcomes {
            if let Some(slot) = state.outcomes.get_mut(place as usize) {
                *slot = outcome;
            }
        }
        state.parts_left = state.parts_left.saturating_sub(1);
        let last = state.parts_left == 0;
        drop(state);
        if last {
            self.answer();
        }
    }

    fn answer(&self) {
        let mut state = self.lock();
        let mut outcomes = std::mem::take(&mut state.outcomes);
        let refused = state.refused.take();
        let Some(reply) = state.reply.take() else { return };
        drop(state);
        if let Some((place, reason)) = refused {
            self.end_at(place, &reason, &mut outcomes);
        }
        let count = |kind: fn(&BlockOutcome) -> bool| outcomes.iter().filter(|one| kind(one)).count() as u64;
        let counters = &self.shared.counters;
        counters.blocks_stored.fetch_add(count(|one| *one == BlockOutcome::Stored), Relaxed);
        counters.blocks_deduplicated.fetch_add(count(|one| *one == BlockOutcome::AlreadyThere), Relaxed);
        counters.blocks_refused.fetch_add(count(|one| matches!(one, BlockOutcome::Refused(_))), Relaxed);
        // A caller that is gone needs no answer.
        let _ = reply.send(Ok(PutReply { outcomes }));
    }

    /// Why the part should not be begun, if so.
    fn stopped(&self) -> Option<Reason> {
        self.stopped_at(0)
    }

    /// The same of a part that begins with this block: it is not if one before it was refused for want of room.
    fn stopped_at(&self, place: u32) -> Option<Reason> {
        let state = self.lock();
        if let Some((_, reason)) = state.refused.as_ref().filter(|(refused, _)| *refused < place) {
            return Some(reason.clone());
        }
        if state.reply.as_ref().is_none_or(Reply::is_cancelled) {
            return Some(Reason::Busy("the put was cancelled"));
        }
        let late = self.request.deadline.is_some_and(|deadline| deadline <= self.shared.clock.now());
        late.then_some(Reason::DeadlinePassed)
    }

    /// Ends the reservation of a run: nothing of it will be visible.
    fn give_up(&self, run: &Range<u32>, reason: Reason) -> BlockOutcome {
        if matches!(reason, Reason::NoSpace(_)) && self.request.parent != Parent::Unknown {
            let mut state = self.lock();
            if state.refused.as_ref().is_none_or(|(refused, _)| run.start < *refused) {
                state.refused = Some((run.start, reason.clone()));
            }
            drop(state);
            // What comes behind it would be of no use.
            if let Some(last) = run.end.checked_sub(1).and_then(|last| self.prints.get(last as usize)) {
                self.shared.gone.note(*last, Gone::NoRoom);
            }
        }
        let prints = self.prints.get(run.start as usize..run.end as usize);
        self.shared.index.abandon(self.claim, prints.unwrap_or_default());
        BlockOutcome::Refused(reason)
    }

    /// Whether no delete has met the run since it was reserved.
    fn is_claimed(&self, run: &Range<u32>) -> bool {
        let prints = self.prints.get(run.start as usize..run.end as usize).unwrap_or_default();
        self.shared.names.is_current(&self.class.namespace) && self.shared.index.holds(self.claim, prints)
    }

    fn origins(&self, run: &Range<u32>) -> Vec<OriginId> {
        let given =
            self.request.origins.as_ref().and_then(|origins| {
                origins.get(run.start as usize..run.end as usize).map(<[OriginId]>::to_vec)
            });
        given.unwrap_or_else(|| {
            // One call for all of them: each goes to the kernel.
            let mut bytes = vec![0; run.len() * size_of::<OriginId>()];
            self.shared.entropy.fill(&mut bytes);
            bytes.as_chunks().0.iter().map(|origin| OriginId(*origin)).collect()
        })
    }

    fn body(&self, run: &Range<u32>) -> (Blocks, u32) {
        let request = &self.request;
        let keys = request.keys.get(run.start as usize..run.end as usize).unwrap_or_default();
        let name = |(key, origin): (&BlockKey, OriginId)| BlockName { key: key.0, origin: origin.0 };
        let before = (run.start as usize).checked_sub(1).and_then(|at| request.keys.get(at));
        let parent = match request.parent.behind(before) {
            Parent::Unknown => DiskParent::Unknown,
            Parent::Root => DiskParent::Root,
            Parent::Key(key) => DiskParent::Key(key.0),
        };
        let created_ms = self.produced_ms.unwrap_or_else(|| self.shared.produced_now());
        let ttl = request.expires_after.or_else(|| self.shared.names.default_ttl(request.namespace));
        let (expires_ms, expires) = ttl.map_or((0, 0), |ttl| self.shared.expires_after(ttl));
        let blocks = Blocks {
            coordinate: request.coordinate.to_u64(),
            created_ms,
            expires_ms,
            namespace: self.class.namespace.local,
            spec: self.class.namespace.spec.local,
            group: request.group.0,
            blocks: keys.iter().zip(self.origins(run)).map(name).collect(),
            stored_lengths: Vec::new(),
            extensions: Vec::new(),
            first_block: request.first_block.and_then(|first| first.checked_add(run.start)),
            layout_version: self.class.layout_version,
            layout: layout_code(self.class.layout),
            encoding: ENCODING_RAW,
            parent,
        };
        (blocks, expires)
    }
}

impl Drop for PutJob {
    fn drop(&mut self) {
        std::mem::take(&mut self.lock().holds)
            .into_values()
            .for_each(|before| self.shared.index.let_go(before));
        // What was made live is not pending any more and stays.
        self.shared.index.abandon(self.claim, &self.prints);
    }
}

impl PutPart {
    /// When the caller stops caring.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.job.request.deadline
    }
}

/// Does one part on its shard's executor. `deadline` completes when the caller stops caring.
pub(crate) async fn run(log: &Rc<Log>, part: PutPart, mut deadline: Option<LocalTask>) {
    let PutPart { job, work } = part;
    match work {
        PutWork::Settle { places, segment, end } => {
            let found = log.volume.segments.borrow().get(&segment).map(Rc::clone);
            let mut settling = pin!(async {
                match found {
                    Some(segment) => segment.settle(&log.volume.driver, end).await,
                    None => Ok(()),
                }
            });
            let settled = with_deadline(settling.as_mut(), deadline).await;
            let outcome = match &settled {
                Some(Ok(())) => BlockOutcome::AlreadyThere,
                Some(Err(reason)) => BlockOutcome::Refused(reason.clone()),
                None => BlockOutcome::Refused(Reason::DeadlinePassed),
            };
            job.finish(places.into_iter().map(|place| (place, outcome.clone())));
            if settled.is_none() {
                // It may lead a flush that others wait for.
                let _ = settling.await;
            }
        }
        PutWork::Write { run, digests, share } => {
            let paid = match job.stopped().filter(|_| share.is_owed()) {
                None => with_deadline(pin!(share.paid(&log.volume.shared)), deadline.as_mut()).await,
                stopped => stopped.map(Err),
            };
            let promise = match paid.unwrap_or(Err(Reason::DeadlinePassed)) {
                Ok(promise) => promise,
                Err(reason) => {
                    let outcome = job.give_up(&run, reason);
                    return job.finish(run.map(|place| (place, outcome.clone())));
                }
            };
            let mut writing = pin!(write::write(log, &job, &run, &digests));
            let ended = with_deadline(writing.as_mut(), deadline).await;
            let late = ended.is_none();
            let mut deleted = Vec::new();
            let outcome = match ended {
                Some(Ok(lost)) => {
                    deleted = lost;
                    BlockOutcome::Stored
                }
                Some(Err(reason)) => job.give_up(&run, reason),
                None if kvarts_layout::planted!("late-put-visible") => {
                    BlockOutcome::Refused(Reason::DeadlinePassed)
                }
                None => job.give_up(&run, Reason::DeadlinePassed),
            };
            let outcome = |place: u32| match deleted.iter().any(|lost| run.start + u32::from(*lost) == place)
            {
                true => BlockOutcome::Refused(Reason::Deleted),
                false => outcome.clone(),
            };
            // What is live by now is counted as live.
            drop(promise);
            job.finish(run.clone().map(|place| (place, outcome(place))));
            if late {
                // What is under way holds the caller's memory until the device is done with it. What it wrote
                // stays invisible: its blocks are not reserved any more.
                let _ = writing.await;
            }
        }
    }
}

/// Refuses parts that no executor took.
pub(crate) fn refuse(part: PutPart, reason: &Reason) {
    let places: Vec<u32> = match part.work {
        PutWork::Write { run, .. } => {
            part.job.give_up(&run, reason.clone());
            run.collect()
        }
        PutWork::Settle { places, .. } => places,
    };
    part.job.finish(places.into_iter().map(|place| (place, BlockOutcome::Refused(reason.clone()))));
}
