//! Deleting blocks for good.
//!
//! On the caller's thread the blocks are taken out of the index and their names claimed, so that no put of them
//! begins; a namespace is given another short id, which cuts it off from all it holds. Then every shard writes down
//! what is dead in it, because a record of a block may lie in any of them: the block's own shard is where the first
//! key of its run belongs. A shard first waits for the writes that had begun, so that what they wrote is below the
//! sequence that the delete names; those that begin later find their claim gone and write nothing. When the records
//! of all shards are durable, the claims end and the delete is acknowledged.
//!
//! What a crash before that may leave: some of the shards have written it down and some have not. A block is then
//! deleted or here, as if the delete had named fewer blocks. A namespace goes whole or not at all: every shard marks
//! that the delete has begun before it writes its epoch, and that it has ended when the epochs of all are durable and
//! before any caller is told; a delete that some shard knows to have begun and not to have ended is finished when the store
//! is opened (`format::marks`).

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::task::{Poll, Waker};

use kvarts_layout::format::body::{Epoch, Tombstone, Tombstones};
use kvarts_layout::format::marks::Mark;
use kvarts_layout::format::record::Body;
use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey, NamespaceId};

use super::draft::{Draft, Written};
use super::log::Log;
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::engine::tasks::notify::{with_deadline, yield_now};
use crate::engine::tasks::steps::{AT_ONCE, Section};
use crate::engine::volume::{OUT, Volume};
use crate::index::{BlockFingerprint, Lookup, Ticket as Claim};
use crate::rt::{LocalTask, Runtime};
use kvarts_contract::api::{DeleteOutcome, DeleteReply, DeleteRequest, MAX_REQUEST_BLOCKS, Target};
use kvarts_contract::blocking::block_on;
use kvarts_contract::error::{DeleteCause, Error, Reason};
use kvarts_contract::events::Cause;
use kvarts_contract::sync::atomic::Ordering;
use kvarts_contract::sync::{Mutex, MutexGuard};
use kvarts_contract::ticket::Reply;
use kvarts_contract::{class::Class, clock::Nanos};

/// Bytes that a tombstone takes in its record and its segment's footer together, and a few to spare.
const TOMBSTONE_BYTES: u64 = 160;
/// Tombstones of one record at most: they are noted and written down in less than a millisecond.
const RECORD_TOMBSTONES_MAX: u64 = 512;
/// Blocks that are taken out of the index before others change it.
const BLOCKS_AT_ONCE: usize = AT_ONCE as usize;

/// Tombstones that all shards remember at most: about 800 MiB; and what one shard may, however many there are.
const REMEMBERED_ALL: usize = 1 << 23;
const REMEMBERED_SHARD: std::ops::RangeInclusive<usize> = 1 << 18..=1 << 21;

/// The answer that a delete is waiting to give.
pub(crate) type Answer = Reply<Result<DeleteReply, Error>>;

/// Which groups and coordinates.
enum Columns {
    One(Group, Coordinate),
    /// All, and these were known when their names were claimed.
    All(BTreeSet<(Group, Coordinate)>),
}

/// What dies.
enum Dead {
    /// These blocks, under these keys, in these columns.
    Blocks { keys: Vec<BlockKey>, columns: Columns, claim: Claim },
    /// Everything of the namespace.
    Namespace,
}

/// What the parts of one delete share.
pub(crate) struct DeleteJob {
    shared: Arc<Shared>,
    /// As it was before.
    namespace: Arc<Namespace>,
    dead: Dead,
    prints: Vec<BlockFingerprint>,
    deadline: Option<Nanos>,
    /// Under which set of directories it began ([`Shared::may_delete`]).
    began: u64,
    /// For each key of the request, its place in `Dead::Blocks::keys`; empty for a prefix.
    places: Vec<usize>,
    /// The shard that takes out of the index what is left, for all.
    lead: u32,
    state: Mutex<State>,
}

struct State {
    /// For each key, whether a block was under it.
    were: Vec<bool>,
    blocks: u64,
    parts_left: usize,
    /// Parts that run on an executor still, late or not.
    running: usize,
    refused: Option<Reason>,
    /// A part gave up waiting: the delete goes on, ends unacknowledged, and its claims end with it.
    late: bool,
    /// Its claims have ended.
    released: bool,
    /// Shards whose epoch is not durable yet, and who waits for them.
    epochs_left: usize,
    waiting: Vec<Waker>,
    reply: Option<Answer>,
}

/// One shard's part of a delete. One that is dropped before it has answered is refused, so that no caller waits for it.
pub(crate) struct DeletePart {
    job: Arc<DeleteJob>,
    answered: bool,
}

impl DeletePart {
    fn answer(&mut self, result: &Result<(), Reason>) {
        if self.is_last_to_say(result) {
            self.job.answer();
        }
    }

    /// The same on an executor: what is claimed is let go of a few hundred at a time.
    async fn answer_in_turns(&mut self, result: &Result<(), Reason>) {
        if self.is_last_to_say(result) {
            self.job.note_delete();
            if !self.job.lock().late {
                self.job.release_in_turns().await;
            }
            self.job.answer();
        }
    }

    /// Tells what came of this part, and whether all parts have told.
    fn is_last_to_say(&mut self, result: &Result<(), Reason>) -> bool {
        !std::mem::replace(&mut self.answered, true) && self.job.note_answer(result)
    }
}

impl Drop for DeletePart {
    fn drop(&mut self) {
        self.answer(&Err(Reason::Busy("the store is closing")));
    }
}

/// Checks a request for keys or a namespace and takes its blocks out of the index: one part for every shard. If
/// there is nothing to do, the answer has been given.
pub(crate) fn begin(shared: &Arc<Shared>, request: DeleteRequest, reply: Answer) -> Vec<(u32, DeletePart)> {
    let job = match block_on(try_begin(shared, request)) {
        Ok(job) => job,
        Err(reason) => {
            // A caller that is gone needs no answer.
            let _ = reply.send(Err(reason.into()));
            return Vec::new();
        }
    };
    start(job, reply)
}

/// A part for each shard in use. What is out is told when it comes back.
fn start(mut job: DeleteJob, reply: Answer) -> Vec<(u32, DeletePart)> {
    let shards: Vec<u32> = job.shared.shards_in_use().collect();
    job.lead = shards.first().copied().unwrap_or(0);
    let state = job.state.get_mut().unwrap_or_else(PoisonError::into_inner);
    (state.parts_left, state.running, state.epochs_left) = (shards.len(), shards.len(), shards.len());
    state.reply = Some(reply);
    let job = Arc::new(job);
    let part = |shard| (shard, DeletePart { job: Arc::clone(&job), answered: false });
    shards.into_iter().map(part).collect()
}

/// Everything about a request that can be said before anything is begun. Gives the namespace, and under which set of directories the
/// delete begins.
pub(crate) fn check(shared: &Shared, request: &DeleteRequest) -> Result<(Arc<Namespace>, u64), Reason> {
    if let Some(reason) = shared.latched() {
        return Err(reason);
    }
    let began = shared.may_delete()?;
    if matches!(request.target, Target::Prefix(_)) && !shared.directories.is_whole() {
        return Err(Reason::NotDeleted(DeleteCause::NotAll));
    }
    if request.deadline.is_some_and(|deadline| deadline <= shared.clock.now()) {
        return Err(Reason::DeadlineInPast);
    }
    let namespace = shared.names.get(request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
    if let Target::Keys { column, keys } = &request.target {
        if keys.is_empty() {
            return Err(Reason::Empty);
        }
        if keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks"));
        }
        if let Some((group, coordinate)) = column {
            namespace.shape(*group, *coordinate)?;
        }
    }
    Ok((namespace, began))
}

async fn try_begin(shared: &Arc<Shared>, request: DeleteRequest) -> Result<DeleteJob, Reason> {
    let (namespace, began) = check(shared, &request)?;
    let terms = (request.deadline, began);
    match request.target {
        Target::Keys { column, keys } => {
            let all = || Columns::All(shared.classes.columns(&namespace));
            let columns = column.map_or_else(all, |(group, coordinate)| Columns::One(group, coordinate));
            let mut distinct = keys.clone();
            distinct.sort_unstable();
            distinct.dedup();
            let places = keys.iter().filter_map(|key| distinct.binary_search(key).ok()).collect();
            let mut job = blocks(shared, namespace, (distinct, columns, Cause::Key), terms).await;
            job.places = places;
            Ok(job)
        }
        Target::Namespace => {
            let retired =
                shared.retire(&namespace).ok_or(Reason::Busy("the namespace is being deleted already"))?;
            Ok(job(shared, retired, Dead::Namespace, terms))
        }
        Target::Prefix(_) => Err(Reason::Bug("the blocks that descend from a prefix were not searched")),
    }
}

/// Until when a delete is waited for, and under which set of directories it began.
type Terms = (Option<Nanos>, u64);

fn job(shared: &Arc<Shared>, namespace: Arc<Namespace>, dead: Dead, (deadline, began): Terms) -> DeleteJob {
    let state = Mutex::new(State {
        were: Vec::new(),
        blocks: 0,
        parts_left: 0,
        running: 0,
        refused: None,
        late: false,
        released: false,
        epochs_left: 0,
        waiting: Vec::new(),
        reply: None,
    });
    let shared = Arc::clone(shared);
    DeleteJob {
        shared,
        namespace,
        dead,
        prints: Vec::new(),
        deadline,
        began,
        places: Vec::new(),
        lead: 0,
        state,
    }
}

/// Takes blocks out of the index, a few hundred at a time: all other changes of what is here wait for each. The keys are distinct.
async fn blocks(
    shared: &Arc<Shared>,
    namespace: Arc<Namespace>,
    (keys, columns, cause): (Vec<BlockKey>, Columns, Cause),
    terms: Terms,
) -> DeleteJob {
    let claim = shared.index.ticket();
    // From here on its claims end, however this ends.
    let mut job = job(shared, namespace, Dead::Blocks { keys, columns, claim }, terms);
    let Dead::Blocks { keys, columns, .. } = &job.dead else { return job };
    let listed = match columns {
        Columns::One(group, coordinate) => vec![(*group, *coordinate)],
        Columns::All(columns) => columns.iter().copied().collect(),
    };
    let (mut were, mut count, id) = (vec![false; keys.len()], 0, job.namespace.id);
    let mut section = Section::begin(&shared.work.deletes, &*shared.clock);
    let at_once = if kvarts_layout::planted!("delete-in-one-go") { usize::MAX } else { BLOCKS_AT_ONCE };
    for (group, coordinate) in listed {
        for (some, were) in keys.chunks(at_once).zip(were.chunks_mut(at_once)) {
            // What has expired was not here.
            let prints = shared.prints_of(&job.namespace, some, (group, coordinate));
            let name = |key: &BlockKey| IndexKey { namespace: id, key: *key, group, coordinate };
            let name_of = |place: usize| some.get(place).map(name).unwrap_or_default();
            for (was, live) in were.iter_mut().zip(shared.condemn(claim, &prints, cause, name_of)) {
                *was |= live;
                count += u64::from(live);
            }
            job.prints.extend(prints);
            shared.events.let_others();
            section.step(some.len() as u64).await;
            section.end_turn().await;
        }
    }
    drop(section);
    let state = job.state.get_mut().unwrap_or_else(PoisonError::into_inner);
    (state.were, state.blocks) = (were, count);
    job
}

/// The same for everything that was found to descend from a key, in all columns.
pub(crate) async fn begin_found(
    shared: &Arc<Shared>,
    ((namespace, began), keys): ((Arc<Namespace>, u64), Vec<BlockKey>),
    deadline: Option<Nanos>,
    reply: Answer,
) -> Vec<(u32, DeletePart)> {
    let columns = Columns::All(shared.classes.columns(&namespace));
    start(blocks(shared, namespace, (keys, columns, Cause::Prefix), (deadline, began)).await, reply)
}

impl DeleteJob {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A part has nothing more to say to the caller: because it is done, or because it is late. Says whether none has.
    fn note_answer(&self, result: &Result<(), Reason>) -> bool {
        let mut state = self.lock();
        let mut waiting = Vec::new();
        if let Err(reason) = result {
            state.refused.get_or_insert_with(|| reason.clone());
            waiting = std::mem::take(&mut state.waiting);
        }
        state.parts_left = state.parts_left.saturating_sub(1);
        let ended = state.parts_left == 0;
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        ended
    }

    /// Notes that one shard's epoch is durable.
    fn note_durable_epoch(&self) {
        let mut state = self.lock();
        state.epochs_left = state.epochs_left.saturating_sub(1);
        let waiting = if state.epochs_left == 0 { std::mem::take(&mut state.waiting) } else { Vec::new() };
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Completes when the epochs of all shards are durable, or with why one of them may never be.
    async fn wait_for_durable_epochs(&self) -> Result<(), Reason> {
        poll_fn(|context| {
            let mut state = self.lock();
            match &state.refused {
                Some(reason) => Poll::Ready(Err(reason.clone())),
                None if state.epochs_left == 0 => Poll::Ready(Ok(())),
                None => {
                    if !state.waiting.iter().any(|waiting| waiting.will_wake(context.waker())) {
                        state.waiting.push(context.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Before a claim ends, before the answer, and when nothing of it is in the index any more: who asks behind it knows that there was
    /// one, and a copy that was begun before it is not put.
    fn note_delete(&self) {
        self.shared.names.note_delete(self.namespace.id);
    }

    fn answer(&self) {
        let mut state = self.lock();
        // A directory that was lost or came back between the check and the parts has none: until the others have begun a term, or have
        // told it, what is deleted could come back with it.
        let lost = match self.shared.may_delete() {
            Ok(now) if now == self.began || kvarts_layout::planted!("delete-spans-a-return") => None,
            Ok(_) => Some(Reason::Busy("a directory of the store was taken back into use during the delete")),
            Err(reason) => Some(reason),
        };
        let (refused, were) = (state.refused.clone().or(lost), std::mem::take(&mut state.were));
        let (late, blocks, reply) = (state.late, state.blocks, state.reply.take());
        drop(state);
        self.note_delete();
        if !late {
            // Before the answer: a put that begins after it must not meet the claim.
            self.release(refused.is_none());
        }
        let outcome = |place: &usize| match (&refused, were.get(*place)) {
            (Some(reason), _) => DeleteOutcome::Refused(reason.clone()),
            (None, Some(true)) => DeleteOutcome::Deleted,
            (None, _) => DeleteOutcome::NotHere,
        };
        let outcomes: Vec<_> = self.places.iter().map(outcome).collect();
        let answer = match refused {
            // Nowhere else to say it.
            Some(reason) if outcomes.is_empty() => Err(reason.into()),
            _ => Ok(DeleteReply { outcomes, blocks }),
        };
        self.shared.counters.blocks_deleted.fetch_add(blocks, Ordering::Relaxed);
        // A caller that is gone needs no answer.
        let _ = reply.map(|reply| reply.send(answer));
    }

    /// Lets puts of the names begin again.
    fn release(&self, acknowledged: bool) {
        if std::mem::replace(&mut self.lock().released, true) {
            return;
        }
        match &self.dead {
            Dead::Blocks { claim, .. } => self.shared.index.abandon(*claim, &self.prints),
            Dead::Namespace => self.shared.names.restore(self.namespace.id, acknowledged),
        }
    }

    /// The same for blocks, a few hundred at a time.
    async fn release_in_turns(&self) {
        let Dead::Blocks { claim, .. } = &self.dead else { return };
        if std::mem::replace(&mut self.lock().released, true) {
            return;
        }
        let mut section = Section::begin(&self.shared.work.deletes, &*self.shared.clock);
        for some in self.prints.chunks(AT_ONCE as usize) {
            self.shared.index.abandon(*claim, some);
            section.step(some.len() as u64).await;
        }
    }

    /// A mark of how far the delete of the namespace has come.
    fn mark(&self, mark: Mark, below: u64) -> Body {
        Body::Tombstones(Tombstones { entries: vec![mark.tombstone(self.namespace.local, below)] })
    }

    /// What a shard writes down of these keys: the body of a record, for everything below this sequence.
    fn tombstones(&self, keys: &[BlockKey], columns: &Columns, below: u64) -> Body {
        let (group, coordinate) = match columns {
            Columns::One(group, coordinate) => (Some(group.0), Some(coordinate.to_u64())),
            Columns::All(_) => (None, None),
        };
        let namespace = self.namespace.local;
        let tombstone = |key: &BlockKey| Tombstone { below, coordinate, namespace, group, key: key.0 };
        Body::Tombstones(Tombstones { entries: keys.iter().map(tombstone).collect() })
    }
}

impl Drop for DeleteJob {
    fn drop(&mut self) {
        // Whatever stopped it, its claims end.
        self.release(false);
    }
}

/// Does one shard's part on its executor.
pub(crate) async fn run(log: &Rc<Log>, part: DeletePart, rt: &dyn Runtime) {
    let job = Arc::clone(&part.job);
    run_part(log, part, rt).await;
    let is_last = {
        let mut state = job.lock();
        state.running = state.running.saturating_sub(1);
        state.running == 0
    };
    if is_last {
        job.release_in_turns().await;
    }
}

async fn run_part(log: &Rc<Log>, mut part: DeletePart, rt: &dyn Runtime) {
    let job = Arc::clone(&part.job);
    if let Some(reason) = log.volume.refuses_writes() {
        return part.answer_in_turns(&Err(reason)).await;
    }
    let deadline = job.deadline.map(|at| rt.sleep_until(at));
    let volume = Rc::clone(&log.volume);
    // A directory that is lost meanwhile is told when it comes back.
    let silence: LocalTask = Box::pin(async move {
        loop {
            volume.silence().await;
            if volume.is_out() {
                return;
            }
        }
    });
    let mut writing = pin!(write_down(log, &job));
    let ended = {
        let answered = pin!(with_deadline(writing.as_mut(), Some(silence)));
        with_deadline(answered, deadline).await
    };
    match ended {
        Some(Some(result)) => part.answer_in_turns(&result).await,
        Some(None) => part.answer_in_turns(&Err(Reason::Busy(OUT))).await,
        None => {
            job.lock().late = true;
            part.answer_in_turns(&Err(Reason::DeadlinePassed)).await;
            // Its result is not reported; the claims end with the last part.
            let _ = writing.await;
        }
    }
}

/// Refuses a part that no executor took.
pub(crate) fn refuse(mut part: DeletePart, reason: &Reason) {
    part.answer(&Err(reason.clone()));
}

/// Makes it durable in this shard that everything the delete names is dead up to now.
async fn write_down(log: &Rc<Log>, job: &DeleteJob) -> Result<(), Reason> {
    if !kvarts_layout::planted!("delete-does-not-wait") {
        log.writes.settled().await;
    }
    let whole = matches!(job.dead, Dead::Namespace);
    if !whole && !log.volume.shared.names.is_current(&job.namespace) {
        // What is put in it afterwards would be below this delete's sequence, and must not be.
        return Err(Reason::Busy("the namespace was deleted during the call"));
    }
    if let Dead::Blocks { keys, columns, .. } = &job.dead {
        if matches!(columns, Columns::All(known) if log.volume.shared.classes.columns(&job.namespace) != *known)
        {
            // A put of a column that was not known may have its place below, and its names are not claimed.
            return Err(Reason::Busy("a put added a new group or coordinate during the delete"));
        }
        if !has_room(&log.volume, &job.namespace, keys.len()) {
            let why = "the tenant's limit of remembered deletes is reached (retry when segments have \
                been recycled, or delete the whole namespace)";
            return Err(Reason::Busy(why));
        }
    }
    let below = log.volume.sequence.get();
    match &job.dead {
        Dead::Blocks { keys, columns, .. } => {
            let each =
                (log.volume.shared.segment_bytes / 4 / TOMBSTONE_BYTES).clamp(1, RECORD_TOMBSTONES_MAX);
            let records: Vec<_> = keys.chunks(each as usize).collect();
            let body_of =
                |at: usize| job.tombstones(records.get(at).copied().unwrap_or_default(), columns, below);
            write_all(log, job, records.len(), body_of).await?;
        }
        Dead::Namespace => {
            write_one(log, job, &job.mark(Mark::Begun, below)).await?;
            write_one(log, job, &Body::Epoch(Epoch { below, namespace: job.namespace.id.0 })).await?;
        }
    }
    if whole {
        job.note_durable_epoch();
        if log.volume.shard == job.lead {
            let blocks = forget(&log.volume.shared, &job.namespace).await;
            job.lock().blocks = blocks;
        }
        job.wait_for_durable_epochs().await?;
        write_one(log, job, &job.mark(Mark::Ended, log.volume.sequence.get())).await?;
    }
    Ok(())
}

/// Whether a shard can remember `more` more deletes of a namespace.
fn has_room(volume: &Volume, namespace: &Namespace, more: usize) -> bool {
    let dead = volume.tombstones.borrow();
    let is_own =
        |id: &NamespaceId| volume.shared.names.get(*id).is_some_and(|one| one.salt == namespace.salt);
    let own = dead.by_namespace().filter(|(id, _)| is_own(id)).map(|(_, count)| count).sum();
    fits(remembered(volume.shared.shards), dead.len(), own, more)
}

/// Tombstones that one of `shards` shards remembers.
fn remembered(shards: u32) -> usize {
    let (least, most) = (*REMEMBERED_SHARD.start(), *REMEMBERED_SHARD.end());
    (REMEMBERED_ALL / shards.max(1) as usize).clamp(least, most)
}

/// Keys of one delete beyond which it never fits.
pub(crate) fn keys_max(shards: u32) -> usize {
    remembered(shards) / 2
}

/// Whether a tenant that has `own` of `all` may have `more`: half of what others leave. So whatever some tenants do,
/// there is room for the next.
fn fits(limit: usize, all: usize, own: usize, more: usize) -> bool {
    let others = all.saturating_sub(own);
    own.saturating_add(more) <= limit.saturating_sub(others) / 2
}

/// Writes one record of a delete, durably.
async fn write_one(log: &Rc<Log>, job: &DeleteJob, body: &Body) -> Result<(), Reason> {
    write_all(log, job, 1, |_| body.clone()).await
}

/// Writes some records of a delete, durably. A directory whose log takes none is lost, and learns of the delete when it comes back.
async fn write_all(
    log: &Rc<Log>,
    job: &DeleteJob,
    count: usize,
    body_of: impl Fn(usize) -> Body,
) -> Result<(), Reason> {
    let written = try_write_all(log, job, count, body_of).await;
    if let Err(reason @ Reason::Media(_)) = &written
        && log.volume.shared.directories.in_use() > 1
    {
        log.volume.lose(&reason.to_string(), false);
    }
    written
}

async fn try_write_all(
    log: &Rc<Log>,
    job: &DeleteJob,
    count: usize,
    body_of: impl Fn(usize) -> Body,
) -> Result<(), Reason> {
    let mut all = Vec::with_capacity(count);
    for body in (0..count).map(&body_of) {
        // From here on also checkpoints say it. Of a delete that fails nothing has been reported.
        log.volume.change_tombstones(|dead| dead.bury_body(job.namespace.id, &body));
        all.push(append(log, job, body).await?);
        yield_now().await;
    }
    if kvarts_layout::planted!("delete-not-durable") {
        return Ok(());
    }
    // Those of one segment with one flush.
    for (written, at) in all.iter().zip(0..) {
        if log.make_durable(written).await.is_err() {
            // The flush failed: it goes elsewhere, the segment is never flushed again.
            let again = append(log, job, body_of(at)).await?;
            log.make_durable(&again).await?;
        }
    }
    Ok(())
}

async fn append(log: &Rc<Log>, job: &DeleteJob, body: Body) -> Result<Written, Reason> {
    let namespace = (!matches!(body, Body::Epoch(_))).then_some(&*job.namespace);
    log.append(Class::Put, &Draft { namespace, body, digests: &[], payload: None }).await
}

/// Takes what is left of a deleted namespace out of the index, a few hundred entries at a time. It cannot be found any
/// more, so no event is needed. Gives the number of blocks that were live.
async fn forget(shared: &Shared, namespace: &Namespace) -> u64 {
    let (index, mut entries, mut blocks) = (&shared.index, Vec::new(), 0);
    let mut section = Section::begin(&shared.work.deletes, &*shared.clock);
    for partition in 0..index.partitions() {
        let mut next = Some(BlockFingerprint::default());
        while let Some(from) = next {
            next = index.snapshot_part(partition, from, AT_ONCE as usize / 2, &mut entries);
            for entry in &entries {
                let Lookup::Live(at) = entry.state else { continue };
                let Some(record) = index.records().get(at.record) else { continue };
                let class = shared.classes.get(record.class);
                if class.is_none_or(|class| class.namespace.local != namespace.local) {
                    continue;
                }
                let here = shared.is_here(entry.print, &record);
                // Compaction may have moved it meanwhile.
                let mut found = Some(at);
                while let Some(at) = found {
                    match index.remove(entry.print, at) {
                        Some(left) => {
                            shared.free_if_empty(at.record, left);
                            blocks += u64::from(here);
                            break;
                        }
                        None => found = index.locate(entry.print).map(|moved| moved.location),
                    }
                }
            }
            section.step(1 + entries.len() as u64).await;
        }
    }
    if !kvarts_layout::planted!("deleted-namespace-remembered") {
        shared.classes.forget(namespace);
        shared.names.forget(namespace);
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deletes_that_are_remembered_for_one_tenant_leave_room_for_others() {
        let (limit, request) = (*REMEMBERED_SHARD.start(), MAX_REQUEST_BLOCKS);
        let mut all = 0;
        for tenant in 0..3 {
            let mut own = 0;
            while fits(limit, all, own, request / 4) {
                own += request / 4;
                all += request / 4;
            }
            assert!(own >= request >> tenant, "tenant {tenant} has {own}");
            assert!(!fits(limit, all, own, request / 4) && fits(limit, all, 0, 1));
        }
        assert!(fits(limit, 0, 0, request), "every tenant may send the largest request");
    }
}
