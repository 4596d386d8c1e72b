//! What one shard has on disk: segment files, checkpoints, tombstones, and the directory that they lie in.

pub(crate) mod checkpoint;
pub(crate) mod directory;
mod footers;
pub(crate) mod noted;
pub(crate) mod pages;
pub(crate) mod segment;
pub(crate) mod tombstones;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::{self, PAGE_BYTES, Position, checkpoint as on_disk};

use self::checkpoint::Slots;
use self::noted::Noted;
use self::segment::{Segment, SegmentState};
use self::tombstones::{Behind, Graves, TombstoneSet};
use super::shared::Shared;
use super::tasks::notify::{Notify, yield_now};
use super::tasks::steps::{AT_ONCE, Section};
use crate::driver::Driver;
use crate::index::RecordInfo;
use crate::rt::LocalTask;
use kvarts_contract::error::{MediaCause, Reason};
use kvarts_contract::{
    buffers::{Arena, BufMut},
    io_error::{DirId, FileId, IoError, Name},
};

/// What is said of writes to a directory that is out.
pub(crate) const OUT: &str = "the directory of the block has failed";

/// Runs a task of a shard beside what else its executor does.
pub(crate) type Spawn = Box<dyn Fn(LocalTask)>;

/// The files of one shard, and the way to them. What reads, makes room and writes stands on it.
pub(crate) struct Volume {
    pub(crate) shard: u32,
    pub(crate) dir: DirId,
    pub(crate) shared: Arc<Shared>,
    pub(crate) driver: Rc<Driver>,
    pub(crate) arena: Arena,
    pub(crate) segments: RefCell<BTreeMap<u32, Rc<Segment>>>,
    /// The last generation of each segment whose file is gone.
    pub(crate) retired: RefCell<BTreeMap<u32, u64>>,
    /// What the last checkpoint said of each segment that was in use and whose file is gone.
    pub(crate) lost: RefCell<BTreeMap<u32, on_disk::SegmentState>>,
    /// Segments whose files are there and could not be opened at the start, with what the last checkpoint said of them, if it
    /// did: theirs are misses until a start can open them, and what they may hold is deleted then as it is now.
    pub(crate) unreadable: RefCell<BTreeMap<u32, Option<on_disk::SegmentState>>>,
    /// The sequence of the next record.
    pub(crate) sequence: Cell<u64>,
    /// What was deleted, for as long as its records may lie on disk.
    pub(crate) tombstones: RefCell<TombstoneSet>,
    pub(crate) checkpoints: Slots,
    /// Small records that may be merged.
    pub(crate) noted: Noted,
    /// Wakes those who wait for something of the shard to be over.
    pub(crate) changed: Notify,
    /// Bytes of the budget that recovery took for files which are in no book: those not looked at yet, and those that cannot be opened.
    pub(crate) unbooked: Cell<u64>,
    /// Its tombstones are among those of the store: from the end of its recovery on.
    pub(crate) is_counted: Cell<bool>,
    /// The shard was, or is to be, opened anew: this one is no more.
    abandoned: Cell<bool>,
    /// Files of segments that were let go, to be closed with the shard.
    left: Rc<RefCell<Vec<FileId>>>,
    spawn: Spawn,
}

impl Volume {
    /// A shard without segments: recovery finds them.
    pub(crate) fn new(
        (shard, dir): (u32, DirId),
        shared: Arc<Shared>,
        (driver, arena): (Rc<Driver>, Arena),
        spawn: Spawn,
    ) -> Self {
        Self {
            shard,
            dir,
            shared,
            driver,
            arena,
            segments: RefCell::default(),
            retired: RefCell::default(),
            lost: RefCell::default(),
            unreadable: RefCell::default(),
            sequence: Cell::new(1),
            tombstones: RefCell::default(),
            checkpoints: Slots::default(),
            noted: Noted::default(),
            changed: Notify::default(),
            unbooked: Cell::default(),
            is_counted: Cell::default(),
            abandoned: Cell::default(),
            left: Rc::default(),
            spawn,
        }
    }

    /// Whether its directory is out: nothing is found here and nothing is written.
    pub(crate) fn is_out(&self) -> bool {
        self.abandoned.get() || self.shared.directories.is_idle(self.dir)
    }

    /// Why nothing is written here, if so.
    pub(crate) fn refuses_writes(&self) -> Option<Reason> {
        if self.is_out() { Some(Reason::Busy(OUT)) } else { self.shared.latched() }
    }

    /// An error said that the directory takes no writes: it is lost to a store of several, and one of this directory alone takes none
    /// any more.
    pub(crate) fn latch(&self, error: &IoError) -> Reason {
        let directories = &self.shared.directories;
        if directories.count() <= 1 || (directories.in_use() <= 1 && !self.is_out()) {
            return self.shared.latch(error);
        }
        self.lose(&error.to_string(), false);
        Reason::Media(MediaCause::Io(Box::new(error.clone())))
    }

    /// The directory is lost to the store.
    pub(crate) fn lose(&self, why: &str, is_gone: bool) {
        if self.shared.lose(self.dir, why, is_gone)
            && let Some(others) = self.shared.others()
        {
            others.tell_lost(&self.shared);
        }
    }

    /// Completes when its device has not answered something for ten seconds, and others do.
    pub(crate) async fn silence_alone(&self) {
        loop {
            self.driver.silence(self.dir).await;
            if self.driver.is_silent_alone(self.dir) {
                return;
            }
        }
    }

    /// Completes when its device has not answered something for ten seconds. If it is the only one that does not, the directory is lost.
    pub(crate) async fn silence(&self) {
        self.driver.silence(self.dir).await;
        let is_lost =
            self.driver.is_silent_alone(self.dir) && !kvarts_layout::planted!("silence-not-noticed");
        if self.shared.directories.in_use() > 1 && is_lost {
            self.lose("the disk has not responded for 10 s", false);
        }
    }

    /// Counts bytes of a file that is in no book yet.
    pub(crate) fn charge_unbooked(&self, bytes: u64) {
        self.unbooked.set(self.unbooked.get() + bytes);
        self.shared.charge(bytes);
    }

    /// What was here is gone with the directory.
    pub(crate) fn let_go(&self) {
        for segment in std::mem::take(&mut *self.segments.borrow_mut()).into_values() {
            segment.break_off(Reason::Busy(OUT));
            self.left.borrow_mut().push(segment.file);
        }
        // Its recovery may have ended between counting files and opening their books.
        let unbooked = self.unbooked.take();
        self.shared.give_budget(if kvarts_layout::planted!("lost-bytes-counted") { 0 } else { unbooked });
        self.changed.wake_all();
    }

    /// The shard is to be opened anew by another one: this one does nothing any more. Gives its files, which are all there when the last
    /// task that knows this one has ended.
    pub(crate) fn abandon(&self) -> Rc<RefCell<Vec<FileId>>> {
        self.abandoned.set(true);
        self.let_go();
        Rc::clone(&self.left)
    }

    /// The position of an offset in a segment.
    pub(crate) fn position(&self, segment: &Segment, offset: u64) -> Position {
        Position {
            store: self.shared.store,
            shard: self.shard,
            segment: segment.number,
            generation: segment.generation.get(),
            offset,
        }
    }

    /// Memory to read into or to write from, as soon as there is some.
    pub(crate) async fn stage(&self, bytes: usize) -> Result<BufMut, IoError> {
        match self.arena.take(bytes).await {
            Some(buf) => Ok(buf),
            // Larger than the arena: rare enough for memory of its own.
            None => BufMut::zeroed(bytes).map_err(|_| IoError::out_of_memory(bytes)),
        }
    }

    /// The directory of the shard's files.
    pub(crate) fn home(&self) -> Name {
        Name { dir: self.dir, path: format::names::shard_name(self.shard).into() }
    }

    /// A file of the shard.
    pub(crate) fn file_name(&self, name: &str) -> Name {
        let home = format::names::shard_name(self.shard);
        Name { dir: self.dir, path: format!("{home}/{name}").into() }
    }

    /// The header of a segment as it is now.
    pub(crate) fn header_image(&self, segment: &Segment) -> Result<Vec<u8>, Reason> {
        let header = SegmentHeader {
            position: self.position(segment, 0),
            secret: self.shared.secret.clone(),
            created_ms: self.shared.clock.unix_millis(),
            segment_bytes: self.shared.segment_bytes,
            first_sequence: segment.first_sequence.get(),
        };
        header.encode().map_err(|_| Reason::Bug("a segment header cannot be encoded"))
    }

    /// Runs a task beside what else is done.
    pub(crate) fn spawn(&self, task: crate::rt::LocalTask) {
        (self.spawn)(task);
    }

    /// Whether the index means by a record what begins at this offset of a segment.
    pub(crate) fn is_at(&self, segment: &Segment, offset: u64, record: &RecordInfo) -> bool {
        u32::from(record.shard) == self.shard
            && record.segment == segment.number
            && u64::from(record.page) * PAGE_BYTES == offset
    }

    /// Whether no read holds a segment, and none is on its way that was sent there for a block which has moved since.
    /// Other executors move blocks too: ask after the look at what is live there.
    pub(crate) fn is_unread(&self, segment: &Segment) -> bool {
        segment.readers.get() == 0 && !self.shared.arrivals.are_awaited((self.shard, segment.number))
    }

    /// No record that a crash could bring back has a lower sequence: not in a segment that is in use, nor in one that
    /// was emptied and not yet recycled, because its footer still stands. One that was begun and holds no record yet
    /// does not count: what comes into it gets sequences of then. So nothing that is buried waits for a put by layers
    /// that stands still. A segment that cannot be told may hold anything, and so may one that cannot be opened.
    pub(crate) fn floor(&self) -> u64 {
        let lowest = |segment: &Rc<Segment>| {
            let own = match segment.state.get() {
                SegmentState::Open if segment.tail.borrow().entries.is_empty() => self.sequence.get(),
                _ => segment.first_sequence.get(),
            };
            // Of what was there before, for as long as the header over it may not be durable.
            segment.may_come_back().map_or(own, |before| before.min(own))
        };
        if kvarts_layout::planted!("tombstone-forgotten-early") {
            return u64::MAX;
        }
        // Shards of a directory that is out may hold anything, and will ask for all of it.
        if self.shared.directories.keeps_graves() {
            return 0;
        }
        let (segments, unreadable) = (self.segments.borrow(), self.unreadable.borrow());
        let may_hold = |segment: &&Rc<Segment>| {
            segment.generation.get() > 0 || segment.state.get() == SegmentState::Suspect
        };
        let used = segments.values().filter(may_hold).map(lowest);
        let unknown = unreadable.values().map(|known| known.map_or(0, |known| known.first_sequence));
        let unknown = unknown.filter(|_| !kvarts_layout::planted!("unreadable-forgotten"));
        used.chain(unknown).min().unwrap_or(u64::MAX)
    }

    /// Forgets what was buried and can lie nowhere any more.
    pub(crate) async fn prune_tombstones(&self) {
        let mut section = Section::begin(&self.shared.work.checkpoints, &*self.shared.clock);
        let namespaces = self.tombstones.borrow().namespaces();
        let mut floor = u64::MAX;
        for namespace in namespaces {
            let mut behind = Some(Behind::default());
            while let Some(from) = behind {
                let most = AT_ONCE as usize;
                // It falls when a directory is lost. What it rises by waits for the next time.
                floor = self.floor().min(floor);
                self.change_tombstones(|dead| behind = dead.prune(namespace, from, (floor, most)));
                section.step(AT_ONCE).await;
            }
        }
        let floor = self.floor().min(floor);
        self.change_tombstones(|dead| dead.prune_namespaces(floor));
    }

    /// What is deleted here, for shards that were not told. Others have their turn in between.
    pub(crate) async fn add_graves(&self, graves: &mut Graves) {
        let mut section = Section::begin(&self.shared.work.deletes, &*self.shared.clock);
        let namespaces = self.tombstones.borrow().namespaces();
        for namespace in namespaces {
            let mut behind = Some(Behind::default());
            while let Some(from) = behind {
                let (at_once, count) = ((from, AT_ONCE as usize), &mut 0);
                (*count, behind) = graves.add_some(&self.tombstones.borrow(), namespace, at_once);
                section.step(*count as u64).await;
            }
        }
        graves.add_namespaces(&self.tombstones.borrow());
    }

    /// Changes what is buried; the store leaves room for the checkpoint that says it.
    pub(crate) fn change_tombstones(&self, change: impl FnOnce(&mut TombstoneSet)) {
        let mut dead = self.tombstones.borrow_mut();
        let before = dead.len() as u64;
        change(&mut dead);
        let after = dead.len() as u64;
        self.shared.buried.fetch_add(after.wrapping_sub(before), Relaxed);
    }
}

impl Drop for Volume {
    /// One that was given up is in no account any more: only now nothing is added to them.
    fn drop(&mut self) {
        if !self.abandoned.get() {
            return;
        }
        self.let_go();
        if self.is_counted.get() && !kvarts_layout::planted!("given-up-graves-counted") {
            self.shared.buried.fetch_sub(self.tombstones.borrow().len() as u64, Relaxed);
        }
        // A map of a hundred thousand takes milliseconds to be dropped.
        let mut dead = self.tombstones.take();
        (self.spawn)(Box::pin(async move {
            while dead.forget_some(AT_ONCE as usize) {
                yield_now().await;
            }
        }));
        self.checkpoints.give_back(&self.shared);
    }
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Volume(shard {}, {} segments)", self.shard, self.segments.borrow().len())
    }
}
