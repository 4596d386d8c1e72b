//! One executor: its shards, and the mailbox through which other threads reach them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::identity::TenantSalt;

use super::free_space::free_space;
use super::limits::Limits;
use super::memory_audit::{self, Table};
use super::produced::{self, ProducedPage};
use super::router::{Message, Router};
use super::{descent, expiry, leaving, snapshot};
use crate::driver::{Devices, Driver, Metrics};
use crate::engine::compact::chains::{self, Shards};
use crate::engine::compact::{self, Pace};
use crate::engine::read::job::ReadPart;
use crate::engine::read::lend::{self, LendPart};
use crate::engine::read::part_read;
use crate::engine::recover::{self, Batch, RecoveryReport};
use crate::engine::shard::Shard;
use crate::engine::shared::Shared;
use crate::engine::shared::directories::forget_gone;
use crate::engine::shared::health::Vigil;
use crate::engine::shared::quota::{self, Gone, QuotaScope, ToGo};
use crate::engine::tasks::fair_turn::FairTurn;
use crate::engine::tasks::notify::{Turn, with_deadline, yield_now};
use crate::engine::volume::Volume;
use crate::engine::volume::checkpoint;
use crate::engine::volume::directory::{self, Way, terms};
use crate::engine::volume::tombstones::Graves;
use crate::engine::write::delete::{self, DeletePart};
use crate::engine::write::put::layers::{self, LayersPart};
use crate::engine::write::put::{self, PutPart};
use crate::io::{IoFacts, MetaOp};
use crate::rt::mailbox::Mailbox;
use crate::rt::{Body, ExecutorContext, LocalTask, Runtime};
use kvarts_contract::api::{SnapshotCursor, SnapshotPage};
use kvarts_contract::error::{DirectoryCause, Error, Reason};
use kvarts_contract::ticket::{Reply, Ticket, ticket};
use kvarts_contract::{
    buffers::{Arena, Region},
    io_error::{DirId, FileId},
};
use kvarts_contract::{class::Class, clock::Nanos};

/// A shard that was given up, for as long as a task knows of it, and its files, to be closed then.
type Leaving = (Weak<Volume>, Rc<RefCell<Vec<FileId>>>);

struct Executor {
    rt: Rc<dyn Runtime>,
    driver: Rc<Driver>,
    /// Of each directory its own, so that a device that hangs keeps no other's.
    arenas: Rc<[Arena]>,
    shards: Rc<RefCell<BTreeMap<u32, Rc<Shard>>>>,
    /// Parts of puts and reads that have not ended.
    busy: Rc<Cell<usize>>,
    /// Whose search for descendants runs.
    searching: Rc<FairTurn<TenantSalt>>,
    /// A term is being begun: one at a time.
    settling: Rc<Turn>,
    /// Background tasks end.
    stopping: Rc<Cell<bool>>,
    limits: Limits,
    io: Rc<RefCell<dyn crate::io::Io>>,
    /// The staging memory until it is registered, and why it could not be.
    unregistered: Cell<Option<Arc<Region>>>,
    not_registered: Rc<RefCell<Option<String>>>,
    /// What it gave up of directories that are to come back, with the files of it that are still open.
    leaving: RefCell<Vec<Leaving>>,
    vigil: Vigil,
}

/// The first task of an executor: serves its mailbox until it is told to stop.
pub(crate) fn body(mailbox: Mailbox<Message>, limits: Limits, directories: u16, devices: Devices) -> Body {
    Box::new(move |context: ExecutorContext| {
        Box::pin(async move {
            let (rt, io) = (Rc::clone(&context.rt), Rc::clone(&context.io));
            let driver = Rc::new(Driver::beside(rt, io, limits.io, devices));
            let pump = Rc::clone(&driver);
            context.rt.set_reaper(Box::new(move || pump.pump()));
            mailbox.attach(Arc::clone(&context.unparker));
            // In large pages where there are some: a device that is told of each small one reads at half its speed.
            let directories = usize::from(directories);
            let bytes = limits.arena_bytes.max(directories * ARENA_MIN);
            let Ok((region, _)) = Region::anonymous_huge(bytes) else { return };
            let executor = Executor {
                rt: Rc::clone(&context.rt),
                driver,
                arenas: Arena::parts(&region, directories).into(),
                shards: Rc::default(),
                busy: Rc::default(),
                searching: Rc::default(),
                settling: Rc::default(),
                stopping: Rc::default(),
                limits,
                io: Rc::clone(&context.io),
                unregistered: Cell::new(limits.register.then(|| Arc::clone(&region))),
                not_registered: Rc::default(),
                leaving: RefCell::default(),
                vigil: Vigil::new(context.index),
            };
            let executor = Rc::new(executor);
            Rc::clone(&executor).serve(mailbox).await;
            executor.vigil.end();
        })
    })
}

/// How long a question for the free bytes of all disks takes at most.
const SPACE_WITHIN: Duration = Duration::from_secs(5);
/// How long a look at an executor waits for what a file system makes of holes.
const HOLES_WITHIN: Duration = Duration::from_secs(1);

/// How long what is under way in a directory may take to end before it comes back, and how often that is looked at.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(10);
const GIVEN_UP_LOOK: Duration = Duration::from_millis(10);

/// Staging memory of each directory at least.
const ARENA_MIN: usize = 1 << 20;

impl Executor {
    /// The staging memory of a directory.
    fn arena(&self, dir: DirId) -> &Arena {
        // There is a part for each directory, and one at least.
        &self.arenas[usize::from(dir.0) % self.arenas.len()]
    }

    async fn serve(self: Rc<Self>, mailbox: Mailbox<Message>) {
        while let Some(message) = mailbox.recv(&*self.rt).await {
            match message {
                Message::OpenDirectories { plan, reply } => {
                    let way = Way { driver: &self.driver, arenas: &self.arenas, rt: &*self.rt };
                    // A caller that is gone needs no answer, here and below.
                    let _ = reply.send(directory::open(&way, &plan).await);
                }
                Message::Adopt { shared, shards, told, beside: false, reply } => {
                    let batch = Batch::new(shards.len());
                    let _ = reply.send(self.adopt(&shared, shards, (told.as_deref(), batch)).await);
                }
                message @ (Message::Adopt { .. } | Message::GiveUp { .. } | Message::LookAgain { .. }) => {
                    self.bring_back(message);
                }
                Message::Graves(reply) => self.graves(reply),
                Message::Settle(shared, reply) => self.settle(shared, reply),
                Message::LetGo => self.let_go(),
                Message::Put(shard, part) => self.put(shard, part),
                Message::PutLayers(shard, part) => self.put_layers(shard, part),
                Message::Read(part) => self.read(part),
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
                    let Some(shard) = self.own(ask.shard) else { continue };
                    self.background(async move {
                        let found = descent::links(&shard.reads, ask, &reply).await;
                        let _ = reply.send(found);
                    });
                }
                Message::Page { cursor, shards, reply } => self.page(cursor, shards, reply),
                Message::Produced(ask, reply) => self.produced(ask, reply),
                message @ (Message::Leaving { .. } | Message::Held { .. }) => self.name_blocks(message),
                Message::Checkpoint { prove, reply } => self.checkpoint(prove, reply),
                message @ (Message::Compact(..)
                | Message::Merge(..)
                | Message::Survey(..)
                | Message::Gather(..)
                | Message::Rewrite(..)) => self.compact(message),
                Message::KeepCompact(merging) => self.keep_compact(merging),
                Message::SurveyChains(shared) => {
                    self.rt.spawn(Class::Background, Box::pin(async move { shared.count_cut_off().await }));
                }
                Message::Shrink => self.shrink(),
                Message::GiveSpare { shard, bytes, reply } => self.give_spare(shard, bytes, reply),
                Message::MakeRoom { shard, reply } => self.make_room(shard, reply),
                Message::EvictRecords { shard, records, reply } => self.evict_records(shard, records, reply),
                Message::MakeQuotaRoom { shared, scope, bytes, reply } => {
                    self.make_quota_room(shared, (scope, bytes), reply);
                }
                Message::FreeSpace { shared, reply } => self.free_space(shared, reply),
                Message::Inspect(reply) => self.inspect(reply),
                Message::Drives(reply) => drop(reply.send(self.driver.loads())),
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

    /// What is free on the disks, unless one of them does not say it in time.
    fn free_space(&self, shared: Arc<Shared>, reply: Reply<Result<u64, Reason>>) {
        let until = self.rt.sleep_until(self.rt.clock().now().plus(SPACE_WITHIN));
        let driver = Rc::clone(&self.driver);
        self.background(async move {
            let asking = pin!(free_space(&driver, &shared.directories));
            let silent = Err(Reason::Busy("the free space of a disk cannot be read"));
            let _ = reply.send(with_deadline(asking, Some(until)).await.unwrap_or(silent));
        });
    }

    /// What the way to the disks is, and what went over it. Of holes it says what is known within a second: a disk that hangs tells nothing.
    fn inspect(&self, reply: Reply<(IoFacts, Metrics)>) {
        let mut facts = self.io.borrow().facts();
        facts.warnings.extend(self.not_registered.borrow().clone());
        let arena_bytes = self.arenas.iter().map(|arena| arena.usage().used as u64).sum();
        let metrics = Metrics { arena_bytes, ..self.driver.metrics() };
        let in_use = |shard: &&Rc<Shard>| !shard.volume.is_out();
        let shards: Vec<Rc<Shard>> = self.shards.borrow().values().filter(in_use).map(Rc::clone).collect();
        let asked: Vec<_> = shards.iter().filter_map(|shard| self.ask_of_holes(shard)).collect();
        let until = self.rt.sleep_until(self.rt.clock().now().plus(HOLES_WITHIN));
        self.background(async move {
            let answered = pin!(async {
                for answer in asked {
                    let _ = answer.await;
                }
            });
            let _ = with_deadline(answered, Some(until)).await;
            // One line for each directory.
            let notes: BTreeSet<String> =
                shards.iter().filter_map(|shard| shard.space.note_of_holes()).collect();
            facts.warnings.extend(notes);
            let _ = reply.send((facts, metrics));
        });
    }

    /// Asks the file system of a shard whether it makes holes, unless that is known or being asked. What it began is ended, whether
    /// the answer is waited for or not: it has a file open, and room that it took.
    fn ask_of_holes(&self, shard: &Rc<Shard>) -> Option<Ticket<()>> {
        if !shard.space.may_ask_of_holes() {
            return None;
        }
        let (reply, answer) = ticket();
        let shard = Rc::clone(shard);
        let asking = async move {
            shard.space.makes_holes().await;
            let _ = reply.send(());
        };
        self.rt.spawn(Class::Background, Box::pin(asking));
        Some(answer)
    }

    fn tables(&self) -> Vec<Table> {
        let shards = self.shards.borrow();
        let of_shards = shards.values().flat_map(|shard| memory_audit::of_shard(shard));
        of_shards.chain(memory_audit::of_driver(&self.driver)).collect()
    }

    /// Does a part of what brings a directory back, while it goes on serving. A caller that is gone needs no answer.
    fn bring_back(self: &Rc<Self>, message: Message) {
        let own = Rc::clone(self);
        self.background(async move {
            match message {
                Message::Adopt { shared, shards, told, reply, .. } => {
                    let batch = Batch::beside(shards.len());
                    let adopted = own.adopt(&shared, shards, (told.as_deref(), batch)).await;
                    // The caller drops the set of deletes, which takes milliseconds.
                    drop(told);
                    let _ = reply.send(adopted);
                }
                Message::GiveUp { shared, dir, reply } => drop(reply.send(own.give_up(&shared, dir).await)),
                Message::LookAgain { shared, dir, reply } => {
                    let way = Way { driver: &own.driver, arenas: &own.arenas, rt: &*own.rt };
                    let _ = reply.send(directory::look_again(&way, &shared, dir).await);
                }
                _ => {}
            }
        });
    }

    /// A shard without segments.
    fn new_shard(&self, shared: &Arc<Shared>, (shard, dir): (u32, DirId)) -> Rc<Shard> {
        let rt = Rc::clone(&self.rt);
        let spawn = Box::new(move |task| rt.spawn(Class::Put, task));
        let path = (Rc::clone(&self.driver), self.arena(dir).clone());
        Shard::new((shard, dir), Arc::clone(shared), path, spawn, compact::thin::in_background)
    }

    /// Gives up its shards of a directory that is out. When the last task that knows of them has ended and the device has answered
    /// everything, nothing that was begun before can reach their files; then the directory is opened again by its path.
    async fn give_up(&self, shared: &Arc<Shared>, dir: DirId) -> Result<(), Reason> {
        let own: Vec<Rc<Shard>> =
            self.shards.borrow().values().filter(|shard| shard.volume.dir == dir).map(Rc::clone).collect();
        for old in own {
            let files = old.volume.abandon();
            old.reads.headers.forget();
            let empty = self.new_shard(shared, (old.volume.shard, dir));
            empty.volume.abandon();
            self.shards.borrow_mut().insert(old.volume.shard, empty);
            self.leaving.borrow_mut().push((Rc::downgrade(&old.volume), files));
        }
        let give_up = self.rt.clock().now().plus(GIVEN_UP_WITHIN);
        while !self.has_given_up(dir) {
            if self.rt.clock().now() >= give_up {
                return Err(Reason::Busy(
                    "the directory's disk has not yet completed all earlier operations",
                ));
            }
            self.rt.sleep_until(self.rt.clock().now().plus(GIVEN_UP_LOOK)).await;
        }
        let is_over = |(volume, _): &mut Leaving| volume.strong_count() == 0;
        let over: Vec<_> = self.leaving.borrow_mut().extract_if(.., is_over).collect();
        for file in over.into_iter().flat_map(|(_, files)| files.take()) {
            // One that cannot be closed is open until the store is.
            let _ = self.driver.meta(MetaOp::Close { file }).await;
        }
        let reopened = self.driver.meta(MetaOp::Reopen { dir }).await;
        reopened.map(drop).map_err(|error| directory::refused(&error))
    }

    /// Whether nothing is left of what it gave up of a directory.
    fn has_given_up(&self, dir: DirId) -> bool {
        let is_known = |volume: &Weak<Volume>| volume.upgrade().is_some_and(|volume| volume.dir == dir);
        self.driver.is_idle(dir) && !self.leaving.borrow().iter().any(|(volume, _)| is_known(volume))
    }

    async fn adopt(
        &self,
        shared: &Arc<Shared>,
        shards: Vec<(u32, DirId)>,
        (told, mut batch): (Option<&Graves>, Batch),
    ) -> Result<Vec<RecoveryReport>, Reason> {
        let (mut reports, mut failed) = (Vec::new(), None);
        self.vigil.begin(shared, shards.iter().map(|(shard, _)| *shard).collect());
        for (shard, dir) in shards {
            let adopted = self.new_shard(shared, (shard, dir));
            if !adopted.volume.is_out() {
                let recovering = pin!(recover::recover_told(&adopted.log, told, &mut batch));
                // A device that hangs now costs its own blocks, and not the start.
                let silent = pin!(adopted.volume.silence_alone());
                let silent = (!kvarts_layout::planted!("start-waits-for-a-drive")).then_some(silent);
                let recovered = with_deadline(recovering, silent).await;
                match recovered.unwrap_or(Err(Reason::Directory(DirectoryCause::Silent(dir.0)))) {
                    Ok(report) => reports.push(report),
                    // It may have been lost as it was told what was deleted.
                    Err(why)
                        if (directory::is_lost(&why) || adopted.volume.is_out())
                            && shared.directories.count() > 1 =>
                    {
                        adopted.volume.lose(&why.to_string(), true);
                    }
                    Err(why) => {
                        let files = adopted.volume.abandon();
                        self.leaving.borrow_mut().push((Rc::downgrade(&adopted.volume), files));
                        failed = Some(why);
                        break;
                    }
                }
            }
            self.upkeep_periodically(&adopted);
            self.sweep_expired(&adopted);
            self.shards.borrow_mut().insert(shard, adopted);
        }
        // Also of what failed: records that are in the index without their blocks would stay there.
        batch.finish(shared, &mut reports)?;
        if let Some(why) = failed {
            return Err(why);
        }
        // Of a directory that another shard of it, or another executor, has found to be lost.
        self.let_go();
        self.register_staging();
        Ok(reports)
    }

    /// Has the kernel keep the staging memory where it is, once. Unregistered memory works the same, so a start does not wait for it:
    /// its pages are made beside, which takes a processor for some milliseconds.
    fn register_staging(&self) {
        let in_use = self.shards.borrow().values().find(|shard| !shard.volume.is_out()).map(Rc::clone);
        let Some(shard) = in_use else { return };
        let Some(region) = self.unregistered.take() else { return };
        let (io, not_registered) = (Rc::clone(&self.io), Rc::clone(&self.not_registered));
        let registering = async move {
            let (volume, pages) = (&shard.volume, Arc::clone(&region));
            // What is not made now is made when it is registered.
            let _ = volume.driver.compute(volume.dir, region.len(), move || pages.populate().is_ok()).await;
            let registered = io.borrow_mut().register(&region);
            *not_registered.borrow_mut() = registered.err();
        };
        self.rt.spawn(Class::Background, Box::pin(registering));
    }

    /// What its shards know to be deleted.
    fn graves(&self, reply: Reply<Graves>) {
        let shards: Vec<_> = self.shards.borrow().values().map(Rc::clone).collect();
        self.background(async move {
            let mut graves = Graves::default();
            for shard in shards.iter().filter(|shard| !shard.volume.is_out()) {
                shard.volume.add_graves(&mut graves).await;
            }
            // A caller that is gone needs no answer.
            let _ = reply.send(graves);
        });
    }

    /// Forgets what was in directories that are gone, and has those in use begin a term.
    fn settle(&self, shared: Arc<Shared>, reply: Reply<()>) {
        let (driver, arenas, rt) = (Rc::clone(&self.driver), Rc::clone(&self.arenas), Rc::clone(&self.rt));
        let turn = Rc::clone(&self.settling);
        self.let_go();
        self.background(async move {
            let _turn = turn.take().await;
            if shared.directories.any_out() {
                forget_gone(&shared).await;
            }
            let way = Way { driver: &driver, arenas: &arenas, rt: &*rt };
            terms::settle(&way, &shared).await;
            let _ = reply.send(());
        });
    }

    /// Lets go of shards whose directory is gone.
    fn let_go(&self) {
        for shard in self.shards.borrow().values() {
            if shard.volume.shared.directories.has_lost(shard.volume.dir) {
                shard.volume.let_go();
                shard.space.give_residue_back();
                shard.reads.headers.forget();
            }
        }
    }

    fn own(&self, shard: u32) -> Option<Rc<Shard>> {
        self.shards.borrow().get(&shard).map(Rc::clone)
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
        let Some(shard) = self.own(shard) else {
            return delete::refuse(
                part,
                &Reason::Bug(
                    "a delete reached an executor that does not own the \
                shard",
                ),
            );
        };
        let (busy, rt) = (Busy::new(&self.busy), Rc::clone(&self.rt));
        self.rt.spawn(
            Class::Put,
            Box::pin(async move {
                delete::run(&shard.log, part, &*rt).await;
                drop(busy);
            }),
        );
    }

    /// Periodic upkeep of a shard, every `checkpoint_every`: leases that ended are swept up, the clock of recency goes on, a
    /// checkpoint is written if records were added, and what is cut off is counted, by the first shard whose turn it is.
    fn upkeep_periodically(&self, shard: &Rc<Shard>) {
        let (own, rt, stopping) = (Rc::downgrade(shard), Rc::clone(&self.rt), Rc::clone(&self.stopping));
        let every = self.limits.checkpoint_every;
        let mut written = shard.volume.sequence.get();
        let keeping = async move {
            while !stopping.get() {
                rt.sleep_until(rt.clock().now().plus(every)).await;
                // A shard that was opened anew has an upkeep of its own.
                let Some(shard) = own.upgrade() else { return };
                let shared = &shard.volume.shared;
                while shared.index.expire(rt.clock().now()).more {
                    yield_now().await;
                }
                let _ = shared.epoch();
                if shard.volume.is_out() {
                    continue;
                }
                // Whatever kept it from being durable may be over.
                let _ = shard.space.finish_removals().await;
                if shared.is_failing(shard.volume.shard) {
                    // Puts that would ask go elsewhere.
                    let _ = shard.space.look_for_trouble().await;
                }
                if shard.volume.sequence.get() != written && !stopping.get() {
                    let sequence = shard.volume.sequence.get();
                    // One that fails costs recency until the next, which is due whether anything is put or not.
                    if checkpoint::write(&shard.volume, Class::Background).await.is_ok() {
                        written = sequence;
                    }
                }
                if !stopping.get() {
                    shared.count_cut_off().await;
                }
            }
        };
        self.rt.spawn(Class::Background, Box::pin(keeping));
    }

    /// Takes out what has expired, by the clock.
    fn sweep_expired(&self, shard: &Rc<Shard>) {
        let (own, rt, stopping) = (Rc::downgrade(shard), Rc::clone(&self.rt), Rc::clone(&self.stopping));
        let every = self.limits.expiry_sweep_every;
        let keeping = async move {
            while !stopping.get() {
                rt.sleep_until(rt.clock().now().plus(every)).await;
                let Some(shard) = own.upgrade() else { return };
                if !stopping.get() {
                    expiry::sweep(&shard.reads).await;
                }
            }
        };
        self.rt.spawn(Class::Background, Box::pin(keeping));
    }

    /// Compacts by need until it stops.
    fn keep_compact(&self, merging: Option<(Arc<Shared>, Arc<Router>)>) {
        let work = (Rc::clone(&self.shards), self.limits.compaction);
        let merging = merging.map(|(shared, router)| (shared, router as Arc<dyn Shards>));
        let keeping =
            compact::background::keep(Rc::clone(&self.rt), Rc::clone(&self.stopping), work, merging);
        self.rt.spawn(Class::Background, Box::pin(keeping));
    }

    /// Gives segments of every shard back, beside what else is done.
    fn shrink(&self) {
        for shard in self.shards.borrow().values().map(Rc::clone) {
            let (rt, stopping) = (Rc::clone(&self.rt), Rc::clone(&self.stopping));
            self.rt
                .spawn(Class::Background, Box::pin(async move { shard.space.shrink(&rt, &stopping).await }));
        }
    }

    fn give_spare(&self, shard: u32, bytes: u64, reply: Reply<bool>) {
        let Some(shard) = self.own(shard) else { return };
        self.background(async move {
            let given = shard.space.give_spare(bytes).await;
            let _ = reply.send(given);
        });
    }

    fn make_room(&self, shard: u32, reply: Reply<bool>) {
        let Some(shard) = self.own(shard) else { return };
        self.background(async move {
            let made = shard.space.make_room_for_another().await;
            let _ = reply.send(made);
        });
    }

    fn evict_records(&self, shard: u32, (records, class): (Vec<ToGo>, Class), reply: Reply<Gone>) {
        let Some(shard) = self.own(shard) else { return };
        let busy = Busy::new(&self.busy);
        let evicting = async move {
            let gone = shard.space.evict_records(&records, class, &|| reply.is_cancelled()).await;
            let _ = reply.send(gone);
            drop(busy);
        };
        self.rt.spawn(class, Box::pin(evicting));
    }

    fn make_quota_room(&self, shared: Arc<Shared>, room: (QuotaScope, u64), reply: Reply<bool>) {
        let (driver, busy) = (Rc::clone(&self.driver), Busy::new(&self.busy));
        let class = if room.1 > 0 { Class::Put } else { Class::Background };
        let stopping = Rc::clone(&self.stopping);
        let making = async move {
            let timer = |at| driver.sleep_until(at);
            let ends: (&dyn Fn() -> bool, &dyn Fn() -> bool) = (&|| reply.is_cancelled(), &|| stopping.get());
            let made = quota::make_room(&shared, room, &timer, ends).await;
            let _ = reply.send(made);
            drop(busy);
        };
        self.rt.spawn(class, Box::pin(making));
    }

    fn page(&self, cursor: SnapshotCursor, shards: u32, reply: Reply<Result<SnapshotPage, Error>>) {
        let Some(shard) = self.own(cursor.shard) else { return };
        self.background(async move {
            let page = snapshot::page(&shard.reads, shards, cursor).await;
            let _ = reply.send(page.map_err(Error));
        });
    }

    fn produced(&self, ask: produced::Ask, reply: Reply<Result<ProducedPage, Error>>) {
        // A reply that is dropped says that the store is closing.
        let Some(shard) = self.own(ask.shard) else { return };
        self.background(async move {
            let found = produced::list(&shard.reads, &ask).await;
            let _ = reply.send(found.map_err(Error));
        });
    }

    fn forget_headers(&self, reply: Reply<()>) {
        self.shards.borrow().values().for_each(|shard| shard.reads.headers.forget());
        let _ = reply.send(());
    }

    /// When its caller stops waiting for a put: at its deadline, or when the device does not answer any more.
    fn end(&self, shard: &Rc<Shard>, deadline: Option<Nanos>) -> LocalTask {
        let volume = Rc::clone(&shard.volume);
        match deadline {
            Some(at) => self.rt.sleep_until(at),
            None => Box::pin(async move { volume.silence().await }),
        }
    }

    fn put(&self, shard: u32, part: PutPart) {
        let Some(shard) = self.own(shard) else {
            return put::refuse(part, &Reason::Bug("a put reached an executor that does not own the shard"));
        };
        let (busy, write) = (Busy::new(&self.busy), shard.log.writes.begin());
        let deadline = Some(self.end(&shard, part.deadline()));
        self.rt.spawn(
            Class::Put,
            Box::pin(async move {
                put::run(&shard.log, part, deadline).await;
                drop((busy, write));
            }),
        );
    }

    /// A stop does not wait for it as for other requests: it may stand still for as long as its caller likes. The log
    /// ends it (`Log::finish`).
    fn put_layers(&self, shard: u32, part: LayersPart) {
        let Some(shard) = self.own(shard) else {
            return part.refuse(Reason::Bug("a put reached an executor that does not own the shard"));
        };
        let deadline = part.deadline().map(|at| self.rt.sleep_until(at));
        self.rt.spawn(Class::Put, Box::pin(async move { layers::run(&shard.log, part, deadline).await }));
    }

    fn read(&self, part: ReadPart) {
        let (shards, busy, window) =
            (Rc::clone(&self.shards), Busy::new(&self.busy), self.limits.read_window_bytes);
        let class = part.class();
        let deadline = part.deadline().map(|at| self.rt.sleep_until(at));
        self.rt.spawn(
            class,
            Box::pin(async move {
                let of_shard = |shard| shards.borrow().get(&shard).map(|shard| Rc::clone(&shard.reads));
                part_read::run(&of_shard, part, window, deadline).await;
                drop(busy);
            }),
        );
    }

    /// A stop waits for the answer, and not for who borrowed: what is held ends with the executor.
    fn lend(&self, shard: u32, part: LendPart) {
        let Some(shard) = self.own(shard) else {
            return part.refuse(Reason::Bug(
                "a request to pin blocks reached an executor that does not own the shard",
            ));
        };
        let (busy, class) = (Busy::new(&self.busy), part.class());
        let deadline = part.deadline().map(|at| self.rt.sleep_until(at));
        self.rt.spawn(
            class,
            Box::pin(async move {
                let held = lend::prove(&shard.reads, part, deadline).await;
                drop((busy, shard));
                if let Some(held) = held {
                    held.until_given_back().await;
                }
            }),
        );
    }

    /// Writes a checkpoint of every shard while the executor goes on serving.
    fn checkpoint(&self, prove: bool, reply: Reply<Result<(), Reason>>) {
        let shards: Vec<_> = self.shards.borrow().values().map(Rc::clone).collect();
        let (rt, timeout, busy) = (Rc::clone(&self.rt), self.limits.stop_timeout, Busy::new(&self.busy));
        self.rt.spawn(
            Class::Background,
            Box::pin(async move {
                let _ = reply.send(checkpoint_all(&rt, &shards, timeout, prove).await);
                drop(busy);
            }),
        );
    }

    /// Names blocks of a shard for a tier behind the disks.
    fn name_blocks(&self, message: Message) {
        match message {
            Message::Leaving { shard, least_uses, reply } => {
                let Some(shard) = self.own(shard) else { return };
                self.background(async move {
                    let found = leaving::list(&shard.reads, least_uses).await;
                    let _ = reply.send(found.map_err(Error));
                });
            }
            Message::Held { shard, from, reply } => {
                let Some(shard) = self.own(shard) else { return };
                self.background(async move {
                    let found = leaving::held(&shard.reads, from).await;
                    let _ = reply.send(found.map_err(Error));
                });
            }
            _ => {}
        }
    }

    /// Does a part of a compaction while the executor goes on serving. A caller that is gone needs no answer.
    fn compact(&self, message: Message) {
        let (rt, stopping) = (Rc::clone(&self.rt), Rc::clone(&self.stopping));
        let task: LocalTask = match message {
            Message::Compact(options, reply) => {
                let shards: Vec<_> = self.shards.borrow().values().map(Rc::clone).collect();
                Box::pin(async move {
                    let mut pace = Pace::new(&rt, &options, stopping);
                    let _ = reply.send(compact::segments::empty_all(&shards, &options, &mut pace).await);
                })
            }
            Message::Merge(shared, router, options, reply) => Box::pin(async move {
                let mut pace = Pace::new(&rt, &options, stopping);
                let _ = reply.send(chains::merge_all(&shared, &*router, &options, &mut pace).await);
            }),
            Message::Survey(shard, reply) => {
                let Some(shard) = self.own(shard) else { return };
                let _ = reply.send(chains::survey(&shard));
                return;
            }
            Message::Gather(shard, records, reply) => {
                let Some(shard) = self.own(shard) else { return };
                Box::pin(async move { drop(reply.send(chains::take(&shard, records).await)) })
            }
            Message::Rewrite(shard, record, reply) => {
                let Some(shard) = self.own(shard) else { return };
                Box::pin(async move { drop(reply.send(chains::rewrite(&shard, &record.0, &record.1).await)) })
            }
            _ => return,
        };
        self.rt.spawn(Class::Background, task);
    }

    /// Waits until nothing is under way, with a bound: a device that hangs does not keep the process.
    async fn stop(&self, clean: bool) -> Result<(), Reason> {
        self.stopping.set(true);
        let give_up = self.rt.clock().now().plus(self.limits.stop_timeout);
        while self.busy.get() > 0 && self.rt.clock().now() < give_up {
            let now = self.rt.clock().now();
            self.rt.sleep_until(Nanos(now.0 + 1_000_000)).await;
        }
        let shards: Vec<_> = self.shards.borrow().values().map(Rc::clone).collect();
        if !clean {
            return Ok(());
        }
        let finish = async {
            for shard in shards.iter().filter(|shard| !shard.volume.is_out()) {
                shard.log.finish().await;
            }
            checkpoint_all(&self.rt, &shards, self.limits.stop_timeout, false).await
        };
        let finished = with_deadline(pin!(finish), Some(self.rt.sleep_until(give_up))).await;
        finished.unwrap_or(Err(Reason::Busy(
            "the store could not be closed in time, because a disk does not \
                respond",
        )))
    }
}

/// Writes a checkpoint of each log.
async fn checkpoint_all(
    rt: &Rc<dyn Runtime>,
    shards: &[Rc<Shard>],
    timeout: Duration,
    prove: bool,
) -> Result<(), Reason> {
    let give_up = rt.clock().now().plus(timeout);
    for shard in shards.iter().filter(|shard| !shard.volume.is_out()) {
        // One that the clock began may lack what was written since: another follows it.
        loop {
            let written = match prove {
                true => checkpoint::prove(&shard.volume, Class::Background).await,
                false => checkpoint::write(&shard.volume, Class::Background).await,
            };
            let Err(reason) = written else { break };
            if shard.volume.is_out() {
                break;
            }
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
