//! One executor: its shards' logs, and the mailbox through which other threads reach them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::BlockKey;

use super::limits::Limits;
use super::memory_audit::Table;
use super::staging::Registration;
use super::store::free_space;
use super::{descent, expiry, snapshot};
use crate::api::{DeleteRequest, SnapshotCursor, SnapshotPage};
use crate::engine::compact::chains::{self, Peers, Survey};
use crate::engine::compact::gather::{Gathered, Taken};
use crate::engine::compact::relocate::{Head, Moved};
use crate::engine::compact::{self, CompactOptions, CompactReport, Pace};
use crate::engine::read::job::ReadPart;
use crate::engine::read::lend::{self, LendPart};
use crate::engine::read::shard_read;
use crate::engine::recover::{self, RecoveryReport};
use crate::engine::shared::Shared;
use crate::engine::shared::health::Vigil;
use crate::engine::shared::quota_events;
use crate::engine::tasks::notify::{Turn, before};
use crate::engine::volume::checkpoint;
use crate::engine::volume::directory::{self, Found};
use crate::engine::write::delete::{self, Answer, DeletePart};
use crate::engine::write::log::Log;
use crate::engine::write::put::layers::{self, LayersPart};
use crate::engine::write::put::{self, PutPart};
use crate::error::{Error, Reason};
use crate::index::RecordId;
use crate::io::{Arena, DirId, Driver, IoFacts, Metrics, Region, SmallReads};
use crate::rt::mailbox::{Mailbox, Reply, SendError, Sender};
use crate::rt::{Body, Class, LocalTask, Nanos, Runtime, Seat};

/// What other threads ask of an executor.
pub(crate) enum Message {
    /// Read the superblocks, or make the store.
    OpenDirectories { plan: directory::Plan, reply: Reply<Result<Found, Reason>> },
    /// Take over shards and recover them.
    Adopt {
        shared: Arc<Shared>,
        shards: Vec<(u32, DirId)>,
        reply: Reply<Result<Vec<RecoveryReport>, Reason>>,
    },
    /// Do a part of a put.
    Put(u32, PutPart),
    /// Write layers as they come.
    PutLayers(u32, LayersPart),
    /// Do a part of a read.
    Read(u32, ReadPart),
    /// Prove where blocks lie, and hold them for somebody who reads them himself.
    Lend(u32, LendPart),
    /// Do a part of a delete.
    Delete(u32, DeletePart),
    /// Find what descends from a key, in all shards, and delete it.
    DeletePrefix {
        shared: Arc<Shared>,
        request: DeleteRequest,
        root: BlockKey,
        router: Arc<Router>,
        reply: Answer,
    },
    /// Say which blocks of a namespace stand behind which in this shard.
    Links(descent::Ask, Reply<Result<descent::Links, Reason>>),
    /// Say what is here, from this cursor on, of so many shards.
    Page { cursor: SnapshotCursor, shards: u32, reply: Reply<Result<SnapshotPage, Error>> },
    /// Write a checkpoint of every shard; to prove that it can be, also where the store takes no writes.
    Checkpoint { prove: bool, reply: Reply<Result<(), Reason>> },
    /// Give segments back until the budget is kept.
    Shrink,
    /// Tell of what quotas took out.
    Name,
    /// Say how many bytes the file systems of the directories have free.
    FreeSpace { directories: u16, reply: Reply<Result<u64, Reason>> },
    /// Empty segments of every shard that are mostly dead.
    Compact(CompactOptions, Reply<Result<CompactReport, Reason>>),
    /// Coordinate the merging of chains over all executors.
    Merge(Arc<Shared>, Peers, CompactOptions, Reply<Result<CompactReport, Reason>>),
    /// Compact without being asked from now on; with the way to all executors, also merge for them.
    KeepCompact(Option<(Arc<Shared>, Peers)>),
    /// List the small records of a shard.
    Survey(u32, Reply<Survey>),
    /// Read these records of a shard.
    Gather(u32, Vec<RecordId>, Reply<Result<Vec<Gathered>, Reason>>),
    /// Write blocks as a record of a shard.
    Rewrite(u32, Box<(Head, Vec<Taken>)>, Reply<Result<Moved, Reason>>),
    /// Say what the device path is and has done.
    Inspect(Reply<(IoFacts, Metrics)>),
    /// Say how large the tables of its shards are.
    Tables(Reply<Vec<Table>>),
    /// Forget the headers that reads have kept.
    ForgetHeaders(Reply<()>),
    /// Register memory of the caller with the ring, or say why it is used as it is.
    Register(Arc<Region>, Reply<Result<(), String>>),
    /// Forget it again.
    Unregister(Arc<Region>),
    /// End: finish what is under way, seal nothing, write a checkpoint if `clean`.
    Stop { clean: bool, reply: Reply<Result<(), Reason>> },
}

/// Which executor owns which shard, and the way to it.
pub(crate) struct Router {
    pub(crate) executors: Vec<Sender<Message>>,
    /// The executor of each shard.
    pub(crate) owners: Vec<usize>,
}

impl Router {
    /// The number of shards.
    pub(crate) fn shards(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The executor of a shard.
    pub(crate) fn owner(&self, shard: u32) -> usize {
        self.owners.get(shard as usize).copied().unwrap_or(0)
    }

    /// The way to it.
    pub(crate) fn to(&self, shard: u32) -> Option<&Sender<Message>> {
        self.executors.get(self.owner(shard))
    }

    /// Sends a message to the executor of a shard.
    pub(crate) fn send(&self, shard: u32, message: Message) -> Result<(), Reason> {
        match self.offer(shard, message) {
            None => Ok(()),
            Some(_) => Err(Reason::Busy("the executor takes no more requests")),
        }
    }

    /// Sends a message to the executor of a shard, and gives it back if that takes no more.
    pub(crate) fn offer(&self, shard: u32, message: Message) -> Option<Message> {
        match self.to(shard) {
            Some(sender) => sender.try_send(message).err().map(SendError::into_inner),
            None => Some(message),
        }
    }

    /// Has the executors tell of what a quota has taken out, if it has. One that takes no message tells with its next
    /// sweep.
    pub(crate) fn name_evicted(&self, shared: &Shared) {
        if !shared.unnamed.is_empty() {
            for sender in &self.executors {
                let _ = sender.try_send(Message::Name);
            }
        }
    }

    /// Sends a part of a delete, or refuses it.
    pub(crate) fn delete(&self, shard: u32, part: DeletePart) {
        if let Some(Message::Delete(_, part)) = self.offer(shard, Message::Delete(shard, part)) {
            delete::refuse(part, &Reason::Busy("the executor takes no more requests"));
        }
    }
}

struct Executor {
    rt: Rc<dyn Runtime>,
    driver: Rc<Driver>,
    arena: Arena,
    logs: RefCell<BTreeMap<u32, Rc<Log>>>,
    /// Parts of puts and reads that have not ended.
    busy: Rc<Cell<usize>>,
    /// Whose search for descendants runs.
    searching: Rc<Turn>,
    /// No house is kept any more.
    stopping: Rc<Cell<bool>>,
    limits: Limits,
    io: Rc<RefCell<dyn crate::io::Io>>,
    registration: Rc<Registration>,
    vigil: Vigil,
}

/// The first task of an executor: serves its mailbox until it is told to stop.
pub(crate) fn body(mailbox: Mailbox<Message>, limits: Limits, small_reads: SmallReads) -> Body {
    Box::new(move |seat: Seat| {
        Box::pin(async move {
            let (rt, io) = (Rc::clone(&seat.rt), Rc::clone(&seat.io));
            let driver = Rc::new(Driver::beside(rt, io, limits.io, small_reads));
            let pump = Rc::clone(&driver);
            seat.rt.set_reaper(Box::new(move || pump.pump()));
            mailbox.attach(Arc::clone(&seat.unparker));
            // In large pages where there are some: a device that is told of each small one reads at half its speed.
            let Ok((region, _)) = Region::anonymous_huge(limits.arena_bytes) else { return };
            let executor = Executor {
                rt: Rc::clone(&seat.rt),
                driver,
                arena: Arena::new(region),
                logs: RefCell::default(),
                busy: Rc::default(),
                searching: Rc::default(),
                stopping: Rc::default(),
                limits,
                io: Rc::clone(&seat.io),
                registration: Rc::default(),
                vigil: Vigil::new(seat.index),
            };
            executor.serve(mailbox).await;
            executor.vigil.end();
        })
    })
}

impl Executor {
    async fn serve(&self, mailbox: Mailbox<Message>) {
        while let Some(message) = mailbox.recv(&*self.rt).await {
            match message {
                Message::OpenDirectories { plan, reply } => {
                    let (clock, entropy) = (self.rt.clock(), self.rt.entropy());
                    let found = directory::open(&self.driver, &self.arena, &plan, &**clock, &**entropy).await;
                    // A caller that is gone needs no answer, here and below.
                    let _ = reply.send(found);
                }
                Message::Adopt { shared, shards, reply } => {
                    let _ = reply.send(self.adopt(&shared, shards).await);
                    self.register_staging();
                }
                Message::Put(shard, part) => self.put(shard, part),
                Message::PutLayers(shard, part) => self.put_layers(shard, part),
                Message::Read(shard, part) => self.read(shard, part),
                Message::Lend(shard, part) => self.lend(shard, part),
                Message::Delete(shard, part) => self.delete(shard, part),
                Message::DeletePrefix { shared, request, root, router, reply } => {
                    let (rt, turn) = (Rc::clone(&self.rt), Rc::clone(&self.searching));
                    let deleting = async move {
                        let request = (request, root);
                        descent::delete_prefix(&shared, &router, request, reply, (&*rt, &turn)).await;
                    };
                    self.background(deleting);
                }
                Message::Links(ask, reply) => {
                    let Some(log) = self.log(ask.shard) else { continue };
                    self.background(async move {
                        let found = descent::links(&log, ask, &reply).await;
                        let _ = reply.send(found);
                    });
                }
                Message::Page { cursor, shards, reply } => {
                    let Some(log) = self.log(cursor.shard) else { continue };
                    self.background(async move {
                        let page = snapshot::page(&log, shards, cursor).await;
                        let _ = reply.send(page.map_err(Error));
                    });
                }
                Message::Checkpoint { prove, reply } => self.checkpoint(prove, reply),
                message @ (Message::Compact(..)
                | Message::Merge(..)
                | Message::Survey(..)
                | Message::Gather(..)
                | Message::Rewrite(..)) => self.compact(message),
                Message::KeepCompact(merging) => self.keep_compact(merging),
                Message::Shrink => self.shrink(),
                Message::Name => self.name_evicted(),
                Message::FreeSpace { directories, reply } => {
                    let _ = reply.send(free_space(&self.driver, directories).await);
                }
                Message::Inspect(reply) => drop(reply.send(self.inspect().await)),
                Message::Tables(reply) => drop(reply.send(self.tables())),
                Message::ForgetHeaders(reply) => self.forget_headers(reply),
                Message::Register(region, reply) => {
                    let _ = reply.send(self.io.borrow_mut().register(&region));
                }
                Message::Unregister(region) => self.io.borrow_mut().unregister(&region),
                Message::Stop { clean, reply } => {
                    let _ = reply.send(self.stop(clean).await);
                    return;
                }
            }
        }
    }

    /// What the way to the disks is, and what went over it.
    async fn inspect(&self) -> (IoFacts, Metrics) {
        let mut facts = self.io.borrow().facts();
        facts.warnings.extend(self.registration.failure().await);
        facts.warnings.extend(self.notes_of_holes().await);
        let arena_bytes = self.arena.usage().used as u64;
        (facts, Metrics { arena_bytes, ..self.driver.metrics() })
    }

    fn tables(&self) -> Vec<Table> {
        let logs = self.logs.borrow();
        let of_shards = logs.values().flat_map(|log| log.tables());
        of_shards.chain(self.driver.tables()).collect()
    }

    async fn adopt(
        &self,
        shared: &Arc<Shared>,
        shards: Vec<(u32, DirId)>,
    ) -> Result<Vec<RecoveryReport>, Reason> {
        let mut reports = Vec::new();
        self.vigil.begin(shared, shards.iter().map(|(shard, _)| *shard).collect());
        for (shard, dir) in shards {
            let rt = Rc::clone(&self.rt);
            let spawn = Box::new(move |task| rt.spawn(Class::Put, task));
            let path = (Rc::clone(&self.driver), self.arena.clone());
            let log = Rc::new(Log::new((shard, dir), Arc::clone(shared), path, spawn));
            reports.push(recover::recover(&log).await?);
            self.keep_house(&log);
            self.keep_time(&log);
            self.logs.borrow_mut().insert(shard, log);
        }
        Ok(reports)
    }

    /// Unregistered memory works the same; `Inspect` tells why it is not registered.
    fn register_staging(&self) {
        if self.limits.register {
            let registration = Rc::clone(&self.registration);
            let (arena, io, rt) = (self.arena.clone(), Rc::clone(&self.io), Rc::clone(&self.rt));
            self.background(async move { registration.make(&arena, &io, &*rt).await });
        }
    }

    /// What an operator should know of the holes of the file systems, a line for each directory.
    async fn notes_of_holes(&self) -> BTreeSet<String> {
        let logs: Vec<Rc<Log>> = self.logs.borrow().values().map(Rc::clone).collect();
        let mut notes = BTreeSet::new();
        for log in logs {
            notes.extend(log.note_of_holes().await);
        }
        notes
    }

    fn log(&self, shard: u32) -> Option<Rc<Log>> {
        self.logs.borrow().get(&shard).map(Rc::clone)
    }

    /// Runs a task in the lowest class; a stop waits for it.
    fn background(&self, task: impl Future<Output = ()> + 'static) {
        let busy = Busy::new(&self.busy);
        self.rt.spawn(
            Class::Background,
            Box::pin(async move {
                task.await;
                drop(busy);
            }),
        );
    }

    fn delete(&self, shard: u32, part: DeletePart) {
        let Some(log) = self.log(shard) else {
            return delete::refuse(part, &Reason::Bug("a delete for a shard of another executor"));
        };
        let (busy, rt) = (Busy::new(&self.busy), Rc::clone(&self.rt));
        self.rt.spawn(
            Class::Put,
            Box::pin(async move {
                delete::run(&log, part, &*rt).await;
                drop(busy);
            }),
        );
    }

    /// What a shard does by the clock: checkpoints where something was written, and sweeping up leases that
    /// ended.
    fn keep_house(&self, log: &Rc<Log>) {
        let (log, rt, stopping) = (Rc::clone(log), Rc::clone(&self.rt), Rc::clone(&self.stopping));
        let every = self.limits.checkpoint_every;
        let keeping = async move {
            let mut written = log.sequence.get();
            while !stopping.get() {
                rt.sleep_until(rt.clock().now().plus(every)).await;
                let shared = &log.shared;
                shared.index.expire(rt.clock().now());
                let _ = shared.epoch();
                if log.sequence.get() != written && !stopping.get() {
                    let sequence = log.sequence.get();
                    // One that fails costs recency until the next, which is due whether anything is put or not.
                    if checkpoint::write(&log).await.is_ok() {
                        written = sequence;
                    }
                }
            }
        };
        self.rt.spawn(Class::Background, Box::pin(keeping));
    }

    /// Takes out what has expired, by the clock.
    fn keep_time(&self, log: &Rc<Log>) {
        let (log, rt, stopping) = (Rc::clone(log), Rc::clone(&self.rt), Rc::clone(&self.stopping));
        let every = self.limits.expiry_sweep_every;
        let keeping = async move {
            while !stopping.get() {
                rt.sleep_until(rt.clock().now().plus(every)).await;
                if !stopping.get() {
                    expiry::sweep(&log).await;
                    // Whoever was to be asked for it may have been too busy to be asked.
                    quota_events::tell(&log).await;
                }
            }
        };
        self.rt.spawn(Class::Background, Box::pin(keeping));
    }

    /// Compacts by need until it stops.
    fn keep_compact(&self, merging: Option<(Arc<Shared>, Peers)>) {
        let logs: Vec<_> = self.logs.borrow().values().map(Rc::clone).collect();
        let work = (logs, self.limits.compaction);
        let keeping =
            compact::background::keep(Rc::clone(&self.rt), Rc::clone(&self.stopping), work, merging);
        self.rt.spawn(Class::Background, Box::pin(keeping));
    }

    /// Gives segments of every shard back, beside what else is done.
    fn shrink(&self) {
        for log in self.logs.borrow().values().map(Rc::clone) {
            let (rt, stopping) = (Rc::clone(&self.rt), Rc::clone(&self.stopping));
            self.rt.spawn(Class::Background, Box::pin(async move { log.shrink(&rt, &stopping).await }));
        }
    }

    fn forget_headers(&self, reply: Reply<()>) {
        self.logs.borrow().values().for_each(|log| log.headers.forget());
        let _ = reply.send(());
    }

    /// Tells of what quotas took out of every shard, beside what else is done.
    fn name_evicted(&self) {
        for log in self.logs.borrow().values().map(Rc::clone) {
            self.background(async move { quota_events::tell(&log).await });
        }
    }

    fn put(&self, shard: u32, part: PutPart) {
        let Some(log) = self.logs.borrow().get(&shard).map(Rc::clone) else {
            return put::refuse(part, &Reason::Bug("a put for a shard of another executor"));
        };
        let (busy, write) = (Busy::new(&self.busy), log.writes.begin());
        let deadline = part.deadline().map(|at| self.rt.sleep_until(at));
        self.rt.spawn(
            Class::Put,
            Box::pin(async move {
                put::run(&log, part, deadline).await;
                drop((busy, write));
            }),
        );
    }

    /// A stop does not wait for it as for other requests: it may stand still for as long as its caller likes. The log
    /// ends it (`Log::finish`).
    fn put_layers(&self, shard: u32, part: LayersPart) {
        let Some(log) = self.log(shard) else {
            return part.refuse(Reason::Bug("a put for a shard of another executor"));
        };
        let deadline = part.deadline().map(|at| self.rt.sleep_until(at));
        self.rt.spawn(Class::Put, Box::pin(async move { layers::run(&log, part, deadline).await }));
    }

    fn read(&self, shard: u32, part: ReadPart) {
        let Some(log) = self.logs.borrow().get(&shard).map(Rc::clone) else {
            return part.refuse(&Reason::Bug("a read for a shard of another executor"));
        };
        let (busy, window) = (Busy::new(&self.busy), self.limits.read_window_bytes);
        let class = part.class();
        let deadline = part.deadline().map(|at| self.rt.sleep_until(at));
        self.rt.spawn(
            class,
            Box::pin(async move {
                shard_read::run(&log, part, window, deadline).await;
                drop(busy);
            }),
        );
    }

    /// A stop waits for the answer, and not for who borrowed: what is held ends with the executor.
    fn lend(&self, shard: u32, part: LendPart) {
        let Some(log) = self.log(shard) else {
            return part.refuse(Reason::Bug("a loan of a shard of another executor"));
        };
        let (busy, class) = (Busy::new(&self.busy), part.class());
        let deadline = part.deadline().map(|at| self.rt.sleep_until(at));
        self.rt.spawn(
            class,
            Box::pin(async move {
                let held = lend::prove(&log, part, deadline).await;
                drop((busy, log));
                if let Some(held) = held {
                    held.until_given_back().await;
                }
            }),
        );
    }

    /// Writes a checkpoint of every shard while the executor goes on serving.
    fn checkpoint(&self, prove: bool, reply: Reply<Result<(), Reason>>) {
        let logs: Vec<_> = self.logs.borrow().values().map(Rc::clone).collect();
        let (rt, patience, busy) = (Rc::clone(&self.rt), self.limits.stop_patience, Busy::new(&self.busy));
        self.rt.spawn(
            Class::Background,
            Box::pin(async move {
                let _ = reply.send(checkpoint_all(&rt, &logs, patience, prove).await);
                drop(busy);
            }),
        );
    }

    /// Does a part of a compaction while the executor goes on serving. A caller that is gone needs no answer.
    fn compact(&self, message: Message) {
        let log = |shard: u32| self.logs.borrow().get(&shard).map(Rc::clone);
        let (rt, stopping) = (Rc::clone(&self.rt), Rc::clone(&self.stopping));
        let task: LocalTask = match message {
            Message::Compact(options, reply) => {
                let logs: Vec<_> = self.logs.borrow().values().map(Rc::clone).collect();
                Box::pin(async move {
                    let mut pace = Pace::new(&rt, &options, stopping);
                    let _ = reply.send(compact::segments::empty_all(&logs, &options, &mut pace).await);
                })
            }
            Message::Merge(shared, peers, options, reply) => Box::pin(async move {
                let mut pace = Pace::new(&rt, &options, stopping);
                let _ = reply.send(chains::merge(&shared, &peers, &options, &mut pace).await);
            }),
            Message::Survey(shard, reply) => {
                let Some(log) = log(shard) else { return };
                Box::pin(async move { drop(reply.send(chains::survey(&log).await)) })
            }
            Message::Gather(shard, records, reply) => {
                let Some(log) = log(shard) else { return };
                Box::pin(async move { drop(reply.send(chains::take(&log, records).await)) })
            }
            Message::Rewrite(shard, record, reply) => {
                let Some(log) = log(shard) else { return };
                Box::pin(async move { drop(reply.send(chains::rewrite(&log, &record.0, &record.1).await)) })
            }
            _ => return,
        };
        self.rt.spawn(Class::Background, task);
    }

    /// Waits until nothing is under way, with a bound: a device that hangs does not keep the process.
    async fn stop(&self, clean: bool) -> Result<(), Reason> {
        self.stopping.set(true);
        let give_up = self.rt.clock().now().plus(self.limits.stop_patience);
        while self.busy.get() > 0 && self.rt.clock().now() < give_up {
            let now = self.rt.clock().now();
            self.rt.sleep_until(Nanos(now.0 + 1_000_000)).await;
        }
        let logs: Vec<_> = self.logs.borrow().values().map(Rc::clone).collect();
        if !clean {
            return Ok(());
        }
        let finish = async {
            for log in &logs {
                log.finish().await;
            }
            checkpoint_all(&self.rt, &logs, self.limits.stop_patience, false).await
        };
        let finished = before(pin!(finish), Some(self.rt.sleep_until(give_up))).await;
        finished.unwrap_or(Err(Reason::Busy("the device did not let the store close in time")))
    }
}

/// Writes a checkpoint of each log.
async fn checkpoint_all(
    rt: &Rc<dyn Runtime>,
    logs: &[Rc<Log>],
    patience: Duration,
    prove: bool,
) -> Result<(), Reason> {
    let give_up = rt.clock().now().plus(patience);
    for log in logs {
        // One that the clock began may lack what was written since: another follows it.
        loop {
            let written = match prove {
                true => checkpoint::prove(log).await,
                false => checkpoint::write(log).await,
            };
            let Err(reason) = written else { break };
            let now = rt.clock().now();
            if !matches!(reason, Reason::Busy(_)) || now >= give_up {
                return Err(reason);
            }
            rt.sleep_until(Nanos(now.0 + 1_000_000)).await;
        }
    }
    Ok(())
}

/// Counts a task as under way until dropped.
struct Busy(Rc<Cell<usize>>);

impl Busy {
    fn new(count: &Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Self(Rc::clone(count))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
