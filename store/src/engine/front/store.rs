//! The store that callers hold: opening, routing requests to executors, closing.

mod copies;
mod holding;
mod leaving;
mod lending;
mod measure;
mod reading;
mod returning;
mod space;

pub use reading::StoreTiles;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::{BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId, StoreId};

use super::executor;
use super::expiry;
use super::limits::Limits;
use super::lookup;
use super::presence;
use super::router::{Message, Router};
use crate::driver::{Devices, DriveLoad, Metrics};
use crate::engine::compact::{CompactOptions, CompactReport};
use crate::engine::recover::RecoveryReport;
use crate::engine::shared::directories::Directories;
use crate::engine::shared::health::Health;
use crate::engine::shared::policy::EvictionPolicy;
use crate::engine::shared::spare_room::OtherShards;
use crate::engine::shared::{Counts, Shared};
use crate::engine::volume::directory::Plan;
use crate::engine::write::delete;
use crate::engine::write::put::layers;
use crate::index::IndexMemory;
use crate::io::IoFacts;
use crate::ledger::SpaceReport;
use crate::rt::mailbox::{SendError, Sender, mailbox};
use crate::rt::{Join, Launcher};
use kvarts_contract::api::{
    ContainsReply, ContainsRequest, DeleteReply, DeleteRequest, DiskLink, KvStore, LayeredPut, LeaseId,
    MatchReply, MatchRequest, PutReply, PutRequest, ReadRequest, ReadStream, Sequence, SnapshotCursor,
    SnapshotPage, Subscription, Target, TileSource, TiledRequest, TtlReply, TtlRequest,
};
use kvarts_contract::buffers::Region;
use kvarts_contract::clock::Clock;
use kvarts_contract::error::{Error, LatchCause, Reason};
use kvarts_contract::io_error::DirId;
use kvarts_contract::sync::OnceLock;
use kvarts_contract::sync::atomic::{AtomicBool, Ordering};
use kvarts_contract::ticket::{Ticket, ticket};

pub use holding::Holding;
pub use measure::PlannedExtent;
pub(crate) use returning::DirectoryPlaces;
pub use space::{KnownNamespace, OfTenant, SEGMENTS_MIN, refuse_beyond_disk};

/// How a store is opened. What concerns the shape on disk counts only when the store is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directories that the launcher's I/O was given.
    pub directories: u16,
    /// Those of them that are not to be touched, because they could not be locked, say, each with why: a store of several is opened
    /// without them.
    pub absent: BTreeMap<u16, String>,
    /// Those of them, empty, that take the place of directories of the store that are lost for good: as many as are missing.
    pub replace: BTreeSet<u16>,
    /// When made: shards in each directory. More than executors, so that more executors can be used later.
    pub shards_per_directory: u32,
    /// When made: bytes of a segment file.
    pub segment_bytes: u64,
    /// Bytes that the store may have on disk.
    pub budget_bytes: u64,
    /// Whether that may be more than what the store has and what its disks have free. If not, opening says so;
    /// if so, puts are refused once the disk is full.
    pub budget_beyond_disk: bool,
    /// The most payload bytes of one record.
    pub record_bytes_max: u64,
    /// What is evicted first when there is no room.
    pub eviction: EvictionPolicy,
    /// Bytes that may be written to the devices in a day before puts are filtered: a block not requested before is
    /// then refused as [`Reason::NotAdmitted`]. `None` lets everything in.
    pub endurance_bytes_per_day: Option<u64>,
    /// Memory that the index may take: near it blocks are evicted as for want of disk, beyond it nothing is put. `None`
    /// takes what the disk's budget makes of it.
    pub index_bytes_max: Option<u64>,
    /// Executors. Any number opens any store.
    pub executors: usize,
    /// What executors may use.
    pub limits: Limits,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            directories: 1,
            absent: BTreeMap::new(),
            replace: BTreeSet::new(),
            shards_per_directory: 2,
            segment_bytes: kvarts_layout::format::DEFAULT_SEGMENT_BYTES,
            budget_bytes: 16 << 30,
            budget_beyond_disk: false,
            record_bytes_max: 8 << 20,
            eviction: EvictionPolicy::default(),
            endurance_bytes_per_day: None,
            index_bytes_max: None,
            executors: 1,
            limits: Limits::default(),
        }
    }
}

/// What a store is and has done.
#[derive(Clone, Debug)]
pub struct Stats {
    /// The store's id.
    pub store: StoreId,
    /// Events since it was opened.
    pub counts: Counts,
    /// Memory of the index.
    pub index: IndexMemory,
    /// Memory that it may take.
    pub index_bytes_max: Option<u64>,
    /// Memory of why blocks went that are not here: bounded.
    pub departures_bytes: u64,
    /// Bytes allocated on disk.
    pub allocated_bytes: u64,
    /// Bytes that it may allocate.
    pub budget_bytes: u64,
    /// Deletes that are remembered, because a record that they kill may lie on disk: those of each shard.
    pub tombstones: u64,
    /// What the allocated bytes are.
    pub space: SpaceReport,
}

/// An open store. Cheap to clone; the last clone to go stops the executors without a checkpoint, as a crash
/// would: call [`Store::close`] for a clean stop.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    router: Arc<Router>,
    reports: Vec<RecoveryReport>,
    closed: AtomicBool,
    places: OnceLock<Arc<dyn DirectoryPlaces>>,
}

/// The executors of a store, to be joined after it was closed.
pub type Executors = Vec<Box<dyn Join + Send>>;

fn lost<T>(answer: Result<T, kvarts_contract::ticket::Abandoned>) -> Result<T, Reason> {
    answer.map_err(|_| Reason::Busy("the store is closing"))
}

impl Store {
    /// Opens the store in the launcher's directories, or makes one where they are empty. Returns when every block
    /// that survived can be read.
    pub async fn open(launcher: &dyn Launcher, options: &Options) -> Result<(Self, Executors), Error> {
        check(options)?;
        let mut senders = Vec::new();
        let mut threads = Vec::new();
        let devices = Devices::of(usize::from(options.directories), options.executors);
        for index in 0..options.executors {
            let (sender, inbox) = mailbox(options.limits.mailbox_messages);
            let body = executor::body(inbox, options.limits, options.directories, devices.of_executor(index));
            threads.push(launcher.launch(index, body).map_err(|why| Error(Reason::Config(why)))?);
            senders.push(sender);
        }
        let opened = Self::recover(launcher, options, senders.clone()).await;
        if opened.is_err() {
            senders.iter().for_each(Sender::close);
        }
        Ok((opened?, threads))
    }

    async fn recover(
        launcher: &dyn Launcher,
        options: &Options,
        executors: Vec<Sender<Message>>,
    ) -> Result<Self, Error> {
        let plan = Plan {
            directories: options.directories,
            absent: options.absent.clone(),
            replace: options.replace.clone(),
            shards_per_directory: options.shards_per_directory,
            segment_bytes: options.segment_bytes,
            budget: options.budget_bytes,
            record_bytes_max: options.record_bytes_max,
        };
        let first = executors.first().ok_or(Reason::Config("the store has no executor".to_owned()))?;
        let (reply, answer) = ticket();
        send(first, Message::OpenDirectories { plan, reply })?;
        let found = lost(answer.await)??;
        let mut shared = Shared::new(found.birth, launcher.clock(), launcher.entropy());
        shared.set_batches(options.limits.batches);
        let behind = !found.behind.is_empty();
        let shards = (&found.shards[..], executors.len());
        shared.set_directories(Directories::new(shards, found.out, found.superblocks, behind));
        let shared = Arc::new(shared);
        shared.set_policy(options.eviction);
        shared.index_room.set_limit(options.index_bytes_max);
        shared.admission.set(options.endurance_bytes_per_day, shared.clock.now());
        shared.begin_budget(found.superblock_bytes)?;
        let owners = found.shards.iter().map(|(shard, _)| shared.directories.owner(*shard)).collect();
        let router = Arc::new(Router { executors, owners });
        let (behind, current): (Vec<_>, Vec<_>) =
            found.shards.iter().partition(|(_, dir)| found.behind.contains(dir));
        let mut reports = router.adopt(&shared, &current, (None, false)).await?;
        if !behind.is_empty() {
            let told = Arc::new(router.graves().await?);
            reports.extend(router.adopt(&shared, &behind, (Some(told), false)).await?);
        }
        shared.check_directories()?;
        // Of a directory that was lost on the way nothing is there.
        reports.retain(|report| !shared.is_gone(report.shard));
        shared.forget_superseded();
        let closed = AtomicBool::new(false);
        shared.set_others(&router);
        router.settle(&shared).await?;
        let store = Self(Arc::new(Inner { shared, router, reports, closed, places: OnceLock::new() }));
        store.finish_deletes(&store.0.reports).await;
        if !options.budget_beyond_disk {
            store.check_room(found.is_new, options.budget_bytes).await?;
        }
        store.survey_chains()?;
        store.shrink()?;
        store.keep_compact(options)?;
        Ok(store)
    }

    /// Finishes deletes of namespaces that a crash stopped between two shards. Where that cannot be done now, nothing
    /// of the namespace is found, and nothing can be put in it before it is deleted again.
    async fn finish_deletes(&self, reports: &[RecoveryReport]) {
        let half: BTreeSet<NamespaceId> =
            reports.iter().flat_map(|report| report.half_deleted.iter().copied()).collect();
        for namespace in half {
            self.0.shared.names.condemn(namespace);
            let request = DeleteRequest { namespace, target: Target::Namespace, deadline: None };
            // An error leaves it condemned. A namespace that nothing defines any more has no blocks.
            let _ = self.delete(request).await;
        }
    }

    /// Tells the index what hangs on what: recovery has taken in records in any order.
    fn survey_chains(&self) -> Result<(), Reason> {
        let first = self.0.router.executors.first().ok_or(Reason::Bug("the store has no executor"))?;
        send(first, Message::SurveyChains(Arc::clone(&self.0.shared)))
    }

    /// Lets every executor compact by need; the first one merges for all.
    fn keep_compact(&self, options: &Options) -> Result<(), Reason> {
        if options.limits.compaction.every.is_none() {
            return Ok(());
        }
        let executors = &self.0.router.executors;
        let mut merging = Some((Arc::clone(&self.0.shared), Arc::clone(&self.0.router)));
        executors.iter().try_for_each(|executor| send(executor, Message::KeepCompact(merging.take())))
    }

    /// What recovery found, shard by shard.
    pub fn recovery(&self) -> &[RecoveryReport] {
        &self.0.reports
    }

    /// What the store is and has done.
    pub fn stats(&self) -> Stats {
        let shared = &self.0.shared;
        let (allocated_bytes, budget_bytes) = shared.space();
        Stats {
            store: shared.store,
            counts: shared.counters.counts(),
            index: shared.index.memory(),
            index_bytes_max: shared.index_room.limit(),
            departures_bytes: shared.gone.bytes() as u64,
            allocated_bytes,
            budget_bytes,
            tombstones: shared.buried.load(Ordering::Relaxed),
            space: shared.space_report(),
        }
    }

    /// Blocks that are here and cannot be used, since a block before them is not, and the bytes that they take of those that
    /// are live: as they were counted last, twice a minute at most.
    pub fn cut_off(&self) -> (u64, u64) {
        self.0.shared.cut_off.counted()
    }

    /// Bytes that are being given back, since what is allocated is beyond the budget.
    pub fn over_budget(&self) -> u64 {
        self.0.shared.excess()
    }

    /// The bytes of a block of a column, also of a namespace that recovery found and that was not registered since.
    pub fn shape(
        &self,
        namespace: NamespaceId,
        group: Group,
        coordinate: Coordinate,
    ) -> Result<Arc<BlockShape>, Error> {
        let shared = &self.0.shared;
        let known = shared.names.get(namespace).ok_or(Reason::UnknownNamespace(namespace))?;
        Ok(known.shape(group, coordinate)?)
    }

    /// The way to the disks, as reads find it now.
    pub fn disk_link(&self) -> DiskLink {
        self.0.shared.disk_path.at(self.0.shared.clock.now())
    }

    /// Bytes of a segment file.
    pub fn segment_bytes(&self) -> u64 {
        self.0.shared.segment_bytes
    }

    /// The clock that deadlines are measured by.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.0.shared.clock
    }

    /// What the way to the disks is, and what went over it, for each executor.
    pub async fn io(&self) -> Result<Vec<(IoFacts, Metrics)>, Error> {
        let mut answers = Vec::new();
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            send(sender, Message::Inspect(reply))?;
            answers.push(answer);
        }
        let mut all = Vec::new();
        for answer in answers {
            all.push(lost(answer.await)?);
        }
        Ok(all)
    }

    /// What the device of each directory has now, of all executors together.
    pub async fn drives(&self) -> Result<Vec<DriveLoad>, Error> {
        let mut all = vec![DriveLoad::default(); self.0.shared.directories.count()];
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            send(sender, Message::Drives(reply))?;
            all.iter_mut().zip(&lost(answer.await)?).for_each(|(all, own)| all.add(own));
        }
        Ok(all)
    }

    /// Registers memory with every executor's ring, so that reads into it and puts from it cost less. An error
    /// says why it is used unregistered: that works the same, only slower.
    pub async fn register_memory(&self, region: &Arc<Region>) -> Result<(), String> {
        let mut answers = Vec::new();
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            send(sender, Message::Register(Arc::clone(region), reply))
                .map_err(|reason| reason.to_string())?;
            answers.push(answer);
        }
        let mut outcome = Ok(());
        for answer in answers {
            outcome = outcome.and(lost(answer.await).map_err(|reason| reason.to_string()).flatten());
        }
        outcome
    }

    /// Forgets registered memory. Operations under way end as they are. False if an executor takes no message now:
    /// until it is asked again the memory stays, unless the store is closing, which forgets it anyway.
    pub fn unregister_memory(&self, region: &Arc<Region>) -> bool {
        let forget =
            |sender: &Sender<Message>| sender.try_send(Message::Unregister(Arc::clone(region))).is_ok();
        // All are asked, whatever the first says.
        self.0.router.executors.iter().map(forget).fold(true, |all, one| all & one)
    }

    /// Writes a checkpoint of every shard, so that the next open reads little.
    pub async fn checkpoint(&self) -> Result<(), Error> {
        Ok(self.checkpoint_all(false).await?)
    }

    async fn checkpoint_all(&self, prove: bool) -> Result<(), Reason> {
        let mut answers = Vec::new();
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            send(sender, Message::Checkpoint { prove, reply })?;
            answers.push(answer);
        }
        for answer in answers {
            lost(answer.await)??;
        }
        Ok(())
    }

    /// How the store is.
    pub fn health(&self) -> Health {
        self.0.shared.health()
    }

    /// This directory of the store, the `at`th that was given, was taken away: a store of several loses it, and one of this
    /// directory alone takes no more writes.
    pub(crate) fn take_as_gone(&self, at: u16, directory: &Path) {
        let (shared, dir) = (&self.0.shared, DirId(at));
        let is_known = shared.directories.is_out(dir);
        if !is_known && (shared.directories.count() <= 1 || shared.directories.in_use() <= 1) {
            shared.latch_taken_away(directory);
            return;
        }
        let why = LatchCause::TakenAway(directory.to_owned()).to_string();
        if shared.lose(dir, &why, true) {
            self.0.router.tell_lost(shared);
        }
    }

    /// Where its directories are: looked at before it resumes, and when one of them comes back.
    pub(crate) fn stands_in(&self, places: Arc<dyn DirectoryPlaces>) {
        let _ = self.0.places.set(places);
    }

    /// Has a store that latched read-only take writes again, if it can: each shard writes down, durably, all that it
    /// knows, and only if all of them have done so the latch is lifted. Segments in which a write or flush failed stay
    /// as they are. Where an executor has died the store must be opened again. Directories that are out are brought back where that goes;
    /// gives what came of each.
    pub async fn resume(&self) -> Result<Vec<(u16, Result<u64, Error>)>, Error> {
        if let Some(reason) = self.0.shared.latched().filter(|_| self.health().dead_executors > 0) {
            return Err(reason.into());
        }
        let latches = self.0.shared.latches();
        for (at, gone) in self.0.places.get().map(|places| places.gone()).unwrap_or_default() {
            if self.0.shared.directories.count() <= 1 {
                return Err(self.0.shared.latch_taken_away(&gone).into());
            }
            self.take_as_gone(at, &gone);
        }
        if !kvarts_layout::planted!("latch-lifted-unproven") {
            self.checkpoint_all(true).await?;
        }
        self.0.shared.lift_latch(latches)?;
        self.shrink()?;
        // Behind the latch: what comes back is written to.
        let mut back = Vec::new();
        for at in self.health().out.into_keys() {
            back.push((at, self.bring_back(at).await));
        }
        Ok(back)
    }

    /// Compacts now: merges chains of small records, and moves live blocks out of segments that are mostly dead. Reads
    /// and puts go on meanwhile; nothing that was acknowledged is lost by a crash in the middle.
    pub async fn compact(&self, options: CompactOptions) -> Result<CompactReport, Error> {
        let mut report = CompactReport::default();
        if options.merge_records_min > 0 {
            let first = self.0.router.executors.first().ok_or(Reason::Bug("the store has no executor"))?;
            let (reply, answer) = ticket();
            send(
                first,
                Message::Merge(Arc::clone(&self.0.shared), Arc::clone(&self.0.router), options, reply),
            )?;
            report.add(lost(answer.await)??);
        }
        let mut answers = Vec::new();
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            send(sender, Message::Compact(options, reply))?;
            answers.push(answer);
        }
        for answer in answers {
            report.add(lost(answer.await)??);
        }
        Ok(report)
    }

    /// Finishes what is under way, writes a checkpoint and stops the executors. Requests that come later are
    /// refused.
    pub async fn close(&self) -> Result<(), Error> {
        self.stop(true).await
    }

    /// Stops the executors without a checkpoint, as the end of the process would: for tests of recovery.
    pub async fn halt(&self) {
        // No caller is left to be told: the store is as good as crashed.
        let _ = self.stop(false).await;
    }

    async fn stop(&self, clean: bool) -> Result<(), Error> {
        if self.0.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let (mut answers, mut outcome) = (Vec::new(), Ok(()));
        for sender in &self.0.router.executors {
            let (reply, answer) = ticket();
            // It stops whatever waits in its mailbox. One that has ended by itself cannot be asked.
            match sender.send_over(Message::Stop { clean, reply }) {
                Ok(()) => answers.push(answer),
                Err(_) => outcome = Err(Error(Reason::Busy(ENDED))),
            }
        }
        for answer in answers {
            if let Err(reason) = lost(answer.await).flatten() {
                outcome = Err(Error(reason));
            }
        }
        self.0.router.executors.iter().for_each(Sender::close);
        self.0.shared.events.close();
        outcome
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.events.close();
        self.router.executors.iter().for_each(Sender::close);
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("id", &self.0.shared.store).finish_non_exhaustive()
    }
}

/// What a caller is told whose request finds no place in a mailbox.
const FULL: &str = "the queue of the executor is full";

/// The answer to a request whose executor is gone.
const ENDED: &str = "the executor has ended";

fn send(sender: &Sender<Message>, message: Message) -> Result<(), Reason> {
    sender.try_send(message).map_err(|error| match error {
        SendError::Full(_) => Reason::Busy(FULL),
        SendError::Closed(_) => Reason::Busy(ENDED),
    })
}

fn check(options: &Options) -> Result<(), Error> {
    let config = |what: &str| Err(Error(Reason::Config(what.to_owned())));
    if options.directories == 0 || options.executors == 0 || options.shards_per_directory == 0 {
        return config("the store needs at least one directory, one executor and one shard");
    }
    if !kvarts_layout::format::is_segment_size(options.segment_bytes) {
        return config(
            "the segment size is not valid: it must be a multiple of a page, from 64 KiB to 16 GiB",
        );
    }
    if options.limits.arena_bytes < 1 << 20 {
        return config("the memory of an executor is too small: give each executor at least 1 MiB");
    }
    Ok(())
}

impl KvStore for Store {
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error> {
        let namespace = self.0.shared.names.register(identity, geometry)?.id;
        self.join_tenant(namespace, &identity.tenant_salt);
        Ok(namespace)
    }

    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>> {
        self.begin_put(request, None)
    }

    fn put_copies(&self, request: PutRequest, produced_ms: u64) -> Ticket<Result<PutReply, Error>> {
        self.begin_put(request, Some(produced_ms))
    }

    fn put_layers(&self, request: PutRequest) -> Ticket<Result<LayeredPut, Error>> {
        let (reply, answer) = ticket();
        if let Some((shard, part)) = layers::begin(&self.0.shared, request, reply)
            && let Some(Message::PutLayers(_, part)) =
                self.0.router.offer(shard, Message::PutLayers(shard, part))
        {
            part.refuse(Reason::Busy(FULL));
        }
        if self.0.shared.index_room.is_short() {
            // Executors that cannot be asked now are asked with the next put.
            let _ = self.shrink();
        }
        answer
    }

    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        Ok(lookup::match_prefix(&self.0.shared, request)?)
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        Ok(presence::contains(&self.0.shared, request)?)
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        let shared = &self.0.shared;
        shared.index.unlock_at(lease, shared.clock.now())
    }

    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error> {
        let shared = &self.0.shared;
        let now = shared.clock.now();
        shared.index.renew(lease, now.plus(hold), now).map_err(|_| Error(Reason::LeaseEnded))
    }

    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        let (reply, answer) = ticket();
        let (shared, router) = (&self.0.shared, &self.0.router);
        if let Target::Prefix(root) = request.target {
            let (shared, router) = (Arc::clone(shared), Arc::clone(router));
            let message = Message::DeletePrefix { shared, request, root, router, reply };
            if let Some(Message::DeletePrefix { reply, .. }) = self.0.router.offer(0, message) {
                // The ticket is still here: it cannot have been dropped.
                let _ = reply.send(Err(Reason::Busy(FULL).into()));
            }
            return answer;
        }
        for (shard, part) in delete::begin(shared, request, reply) {
            router.delete(shard, part);
        }
        answer
    }

    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        Ok(expiry::set_ttl(&self.0.shared, request, expiry::Change::Any)?)
    }

    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error> {
        let known = self.0.shared.names.set_default_ttl(namespace, ttl);
        known.then_some(()).ok_or(Error(Reason::UnknownNamespace(namespace)))
    }

    fn subscribe(&self, from: Option<Sequence>) -> Subscription {
        self.0.shared.events.subscribe(from)
    }

    fn snapshot(&self, cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        let (reply, answer) = ticket();
        let sequence = self.0.shared.events.sequence();
        let first = SnapshotCursor { sequence, shard: 0, segment: 0, record: 0 };
        let cursor = cursor.unwrap_or(first);
        let shards = self.0.router.shards();
        let stale = cursor.sequence.stream != sequence.stream || cursor.shard >= shards;
        let refused = if stale {
            Some((reply, Reason::EventGap))
        } else {
            match self.0.router.offer(cursor.shard, Message::Page { cursor, shards, reply }) {
                Some(Message::Page { reply, .. }) => Some((reply, Reason::Busy(FULL))),
                _ => None,
            }
        };
        if let Some((reply, reason)) = refused {
            // The ticket is still here: it cannot have been dropped.
            let _ = reply.send(Err(reason.into()));
        }
        answer
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        self.begin_read(request, None)
    }

    fn tiles(&self, request: TiledRequest) -> Result<Box<dyn TileSource>, Error> {
        Ok(Box::new(self.tiles_of(request, None)?))
    }
}
