//! Which directories of the store are in use, and which are out: not there when the store was opened, or lost since.
//!
//! A directory that is out takes no puts, and what would have gone there goes to shards of others. If it is gone, its blocks are not
//! found; if only writes fail there, they are read for as long as that goes. It comes back with a start that finds it, or while the store
//! is open (`front::store::returning`); either tells it first what was deleted meanwhile (`format::members`). Until then no shard
//! forgets a tombstone, and deletes are acknowledged only when the directories in use have begun a term without it.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use kvarts_layout::BlockKey;
use kvarts_layout::format::members::Members;
use kvarts_layout::format::superblock::Chosen;
use kvarts_layout::planted;

use super::Shared;
use super::recently_gone::Gone;
use crate::engine::tasks::steps::{AT_ONCE, Section};
use crate::index::{BlockFingerprint, Lookup};
use kvarts_contract::error::{DeleteCause, DirectoryCause, Reason};
use kvarts_contract::io_error::DirId;
use kvarts_contract::sync::atomic::{AtomicBool, Ordering};
use kvarts_contract::sync::{Mutex, MutexGuard};

/// The directories of a store.
#[derive(Debug, Default)]
pub(crate) struct Directories {
    /// The directory of each shard.
    of_shard: Vec<DirId>,
    /// Executors of the store.
    executors: usize,
    /// Of each directory, whether it is out, and whether what it holds is gone.
    each: Vec<Lost>,
    /// Whether any is out: asked at each look at the index.
    any_out: AtomicBool,
    /// One is behind, and no term has begun with it.
    behind: AtomicBool,
    /// Some segment could not be opened.
    unreadable: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct Lost {
    out: AtomicBool,
    gone: AtomicBool,
    /// It was out when the store was opened, and its part of the budget is not used.
    absent: AtomicBool,
    /// Its shards are being opened anew: they read and write, and nothing is found in them yet.
    returning: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// Why those are out that are.
    out: BTreeMap<DirId, String>,
    /// The superblocks of those in use.
    superblocks: BTreeMap<DirId, Chosen>,
    deletes: Deletes,
    /// The directory that comes back now, if one does, and whether deletes are held for it.
    back: Option<(DirId, bool)>,
    /// How often deletes were held: a delete that began before has no part for what came back.
    returns: u64,
}

/// Whether deletes are acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Deletes {
    /// All directories in use have begun a term.
    Acknowledged,
    /// A term has still to begin.
    #[default]
    Unsettled,
    /// No more than half of the directories are in use.
    Refused,
}

impl Directories {
    /// Of a store that was found: the directory of each shard, how many executors have them, the directories that are out, the
    /// superblocks of the others, and whether any of these is behind.
    pub(crate) fn new(
        (shards, executors): (&[(u32, DirId)], usize),
        out: BTreeMap<DirId, String>,
        superblocks: BTreeMap<DirId, Chosen>,
        behind: bool,
    ) -> Self {
        let all = out.keys().chain(superblocks.keys()).map(|dir| usize::from(dir.0) + 1).max().unwrap_or(0);
        let lost = |at: usize| {
            let is_out = || AtomicBool::new(out.keys().any(|dir| usize::from(dir.0) == at));
            Lost { out: is_out(), gone: is_out(), absent: is_out(), returning: AtomicBool::new(false) }
        };
        Self {
            of_shard: shards.iter().map(|(_, dir)| *dir).collect(),
            executors,
            each: (0..all).map(lost).collect(),
            any_out: AtomicBool::new(!out.is_empty()),
            behind: AtomicBool::new(behind),
            unreadable: AtomicBool::new(false),
            state: Mutex::new(State { out, superblocks, ..State::default() }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The executor of a shard. Shards of one directory follow each other, so an executor has few devices, and few executors have a
    /// device.
    pub(crate) fn owner(&self, shard: u32) -> usize {
        shard as usize * self.executors / self.of_shard.len().max(1)
    }

    /// A number for what one executor has of one device.
    pub(crate) fn lane_of(&self, shard: u32) -> u32 {
        (self.owner(shard) * self.each.len()) as u32 + self.of(shard)
    }

    /// The directory of a shard.
    pub(crate) fn of(&self, shard: u32) -> u32 {
        self.of_shard.get(shard as usize).map_or(shard, |dir| u32::from(dir.0))
    }

    /// Whether any is out.
    pub(crate) fn any_out(&self) -> bool {
        self.any_out.load(Ordering::Acquire)
    }

    /// Whether shards remember all that they know to be deleted: for a directory that is out, or for one that is behind, until it has been
    /// told and a term has begun with it.
    pub(crate) fn keeps_graves(&self) -> bool {
        self.behind.load(Ordering::Acquire) || (self.any_out() && !planted!("forgotten-while-out"))
    }

    /// Some segment could not be opened.
    pub(crate) fn note_unreadable(&self) {
        self.unreadable.store(true, Ordering::Release);
    }

    /// Whether everything that the store ever held may be found.
    pub(crate) fn is_whole(&self) -> bool {
        !self.any_out() && !self.unreadable.load(Ordering::Acquire)
    }

    /// Whether this one is.
    pub(crate) fn is_out(&self, dir: DirId) -> bool {
        self.any_out() && self.each.get(usize::from(dir.0)).is_some_and(|one| one.out.load(Ordering::Acquire))
    }

    /// Whether what this one holds is not here.
    pub(crate) fn is_gone(&self, dir: DirId) -> bool {
        self.any_out()
            && self.each.get(usize::from(dir.0)).is_some_and(|one| one.gone.load(Ordering::Acquire))
    }

    /// The same, but for one whose shards are being opened anew.
    pub(crate) fn has_lost(&self, dir: DirId) -> bool {
        self.is_gone(dir) && !self.is_returning(dir)
    }

    /// Whether shards of this one neither read nor write.
    pub(crate) fn is_idle(&self, dir: DirId) -> bool {
        self.is_out(dir) && !self.is_returning(dir)
    }

    fn is_returning(&self, dir: DirId) -> bool {
        self.each.get(usize::from(dir.0)).is_some_and(|one| one.returning.load(Ordering::Acquire))
    }

    /// Whether this one was out when the store was opened, asked for the first time.
    fn was_absent(&self, dir: DirId) -> bool {
        self.each.get(usize::from(dir.0)).is_some_and(|one| one.absent.swap(false, Ordering::AcqRel))
    }

    /// The shards of this one, each with it.
    pub(crate) fn shards_of(&self, dir: DirId) -> Vec<(u32, DirId)> {
        (0..).zip(&self.of_shard).filter(|(_, of)| **of == dir).map(|(shard, of)| (shard, *of)).collect()
    }

    /// One that is out begins to come back. Refused if it is not out, or if another one comes back now.
    pub(crate) fn begin_return(&self, dir: DirId) -> Result<Returning<'_>, Reason> {
        let mut state = self.lock();
        if state.back.is_some() {
            return Err(Reason::Busy("another directory of the store is being taken back into use"));
        }
        if !state.out.contains_key(&dir) {
            return Err(Reason::Config(format!("directory {} of the store is already in use", dir.0)));
        }
        state.back = Some((dir, false));
        Ok(Returning(self, dir))
    }

    /// One that was to come back is out as before, now for this reason.
    pub(crate) fn stays_out(&self, dir: DirId, why: &str) {
        if let Some(known) = self.lock().out.get_mut(&dir) {
            why.clone_into(known);
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.each.len()
    }

    /// How many of them are in use.
    pub(crate) fn in_use(&self) -> usize {
        self.each.len().saturating_sub(self.lock().out.len())
    }

    /// Why those are out that are.
    pub(crate) fn out(&self) -> BTreeMap<u16, String> {
        self.lock().out.iter().map(|(dir, why)| (dir.0, why.clone())).collect()
    }

    /// The superblocks of those in use, and what they have in common.
    pub(crate) fn superblocks(&self) -> (BTreeMap<DirId, Chosen>, Members) {
        let superblocks = self.lock().superblocks.clone();
        let found: Vec<_> = superblocks.values().map(|one| one.superblock.member()).collect();
        let members = Members::of(u32::try_from(self.count()).unwrap_or(u32::MAX), &found);
        (superblocks, members)
    }

    /// The superblock of a directory was written: a term that was begun for others counts for the next one, too.
    pub(crate) fn note(&self, dir: DirId, written: &Chosen) {
        if let Some(known) = self.lock().superblocks.get_mut(&dir)
            && !planted!("terms-not-noted")
        {
            known.clone_from(written);
        }
    }

    /// These directories have begun a term, if no other one was lost meanwhile; or there are too few of them for it.
    pub(crate) fn settle(&self, superblocks: BTreeMap<DirId, Chosen>, has_begun: bool) -> bool {
        let mut state = self.lock();
        if !state.superblocks.keys().eq(superblocks.keys()) {
            return false;
        }
        state.superblocks = superblocks;
        if has_begun {
            self.behind.store(false, Ordering::Release);
        }
        state.deletes = if has_begun { Deletes::Acknowledged } else { Deletes::Refused };
        true
    }
}

/// A directory comes back, or stays out as it was when this is dropped.
#[derive(Debug)]
pub(crate) struct Returning<'a>(&'a Directories, DirId);

impl Returning<'_> {
    /// Nothing in it is found from here on, where it was still read.
    pub(crate) fn hide(&self) {
        if let Some(one) = self.0.each.get(usize::from(self.1.0)) {
            one.gone.store(true, Ordering::Release);
        }
    }

    /// Deletes are refused from here on, also those that have begun, and the shards of the directory may be opened anew.
    pub(crate) fn hold_deletes(&self) {
        let Self(directories, dir) = self;
        let mut state = directories.lock();
        state.back = Some((*dir, true));
        state.returns += 1;
        directories.behind.store(true, Ordering::Release);
        if let Some(one) = directories.each.get(usize::from(dir.0)) {
            one.returning.store(true, Ordering::Release);
        }
    }

    /// It is in use, and what it holds is found. Refused if it was lost meanwhile.
    pub(crate) fn rejoin(self, superblock: Chosen) -> Result<(), Reason> {
        let Self(directories, dir) = &self;
        let mut state = directories.lock();
        let one = directories.each.get(usize::from(dir.0));
        let one = one.filter(|one| one.returning.swap(false, Ordering::AcqRel));
        let one = one
            .ok_or(Reason::Busy("the directory failed again while its disk was being taken back into use"))?;
        state.out.remove(dir);
        state.superblocks.insert(*dir, superblock);
        // Until a term has begun with it.
        state.deletes = Deletes::Unsettled;
        directories.behind.store(true, Ordering::Release);
        one.out.store(false, Ordering::Release);
        one.gone.store(false, Ordering::Release);
        directories.any_out.store(!state.out.is_empty(), Ordering::Release);
        drop(state);
        Ok(())
    }
}

impl Drop for Returning<'_> {
    fn drop(&mut self) {
        let Self(directories, dir) = self;
        let mut state = directories.lock();
        state.back = None;
        if let Some(one) = directories.each.get(usize::from(dir.0)) {
            one.returning.store(false, Ordering::Release);
        }
    }
}

impl Shared {
    /// A directory of the store is lost: no more is written there, and if `is_gone`, nothing is found there either. False if that was
    /// known.
    pub(crate) fn lose(&self, dir: DirId, why: &str, is_gone: bool) -> bool {
        let directories = &self.directories;
        let mut state = directories.lock();
        let Some(lost) = directories.each.get(usize::from(dir.0)) else { return false };
        let was_gone = lost.gone.fetch_or(is_gone, Ordering::AcqRel);
        if lost.out.swap(true, Ordering::AcqRel) {
            let was_returning = lost.returning.swap(false, Ordering::AcqRel);
            if was_returning {
                state.out.insert(dir, why.to_owned());
            }
            return was_returning || (is_gone && !was_gone);
        }
        directories.any_out.store(true, Ordering::Release);
        state.out.insert(dir, why.to_owned());
        state.superblocks.remove(&dir);
        if !planted!("deletes-before-their-term") {
            state.deletes = Deletes::Unsettled;
        }
        true
    }

    /// Refused if fewer than half of the directories are in use.
    pub(crate) fn check_directories(&self) -> Result<(), Reason> {
        let (_, members) = self.directories.superblocks();
        if members.may_open() {
            return Ok(());
        }
        let (found, all) = (self.directories.in_use() as u32, self.directories.count() as u32);
        let first = self.directories.lock().out.values().next().cloned().unwrap_or_default();
        Err(Reason::Directory(DirectoryCause::TooFew { found, all, first }))
    }

    /// Whether deletes are acknowledged now, or why not. Gives a number that changes when a directory comes back: a delete that began under
    /// another one is not acknowledged, for it has no part there.
    pub(crate) fn may_delete(&self) -> Result<u64, Reason> {
        let state = self.directories.lock();
        let (deletes, back, returns) = (state.deletes, state.back, state.returns);
        drop(state);
        if back.is_some_and(|(_, holds)| holds) && !planted!("deletes-beside-a-return") {
            return Err(Reason::Busy("a directory of the store is being taken back into use"));
        }
        match deletes {
            Deletes::Acknowledged => Ok(returns),
            Deletes::Unsettled => {
                Err(Reason::Busy("a directory of the store has failed since the call began"))
            }
            Deletes::Refused => {
                let (in_use, all) = (self.directories.in_use() as u64, self.directories.count() as u64);
                Err(Reason::NotDeleted(DeleteCause::TooFew { in_use, all }))
            }
        }
    }

    /// Whether the directory of a shard is out.
    pub(crate) fn is_out(&self, shard: u32) -> bool {
        let dir = self.directories.of_shard.get(shard as usize);
        dir.is_some_and(|dir| self.directories.is_out(*dir))
    }

    /// Whether what lies in a shard is gone with its directory.
    pub(crate) fn is_gone(&self, shard: u32) -> bool {
        let dir = self.directories.of_shard.get(shard as usize);
        dir.is_some_and(|dir| self.directories.is_gone(*dir))
    }

    /// Whether that is so, and it is not being opened anew.
    fn has_lost(&self, shard: u32) -> bool {
        let dir = self.directories.of_shard.get(shard as usize);
        dir.is_some_and(|dir| self.directories.has_lost(*dir))
    }

    /// A directory is about to come back: what it may take of the budget is the store's again.
    pub(crate) fn add_part_of(&self, dir: DirId) {
        if self.directories.was_absent(dir) {
            self.add_absent_part();
        }
    }

    /// The shards whose directories are in use.
    pub(crate) fn shards_in_use(&self) -> impl Iterator<Item = u32> {
        (0..self.shards).filter(|shard| !self.is_out(*shard))
    }

    /// The shard that a record goes to, by its first key: so one long prefix spreads over all of them.
    pub(crate) fn shard_for(&self, key: &BlockKey) -> u32 {
        // Over the whole key: opaque keys may begin alike.
        let hash = crc32fast::hash(key.as_bytes());
        let shard = hash % self.shards.max(1);
        // Where writes fail it is no use to ask, while there are other devices.
        let is_avoided =
            |shard: u32| self.is_out(shard) || (self.directories.count() > 1 && self.is_failing(shard));
        if !is_avoided(shard) {
            return shard;
        }
        let in_use: Vec<u32> = (0..self.shards).filter(|shard| !is_avoided(*shard)).collect();
        let at = (hash / self.shards.max(1)) as usize % in_use.len().max(1);
        in_use.get(at).copied().unwrap_or(shard)
    }
}

/// Takes what the index has of shards that are gone out of it, a few hundred entries at a time. Which blocks these were cannot be told:
/// who follows the events must look again.
pub(crate) async fn forget_gone(shared: &Shared) {
    let (index, mut entries, mut any) = (&shared.index, Vec::new(), false);
    let mut section = Section::begin(&shared.work.deletes, &*shared.clock);
    for partition in 0..index.partitions() {
        let mut next = Some(BlockFingerprint::default());
        while let Some(from) = next {
            next = index.snapshot_part(partition, from, AT_ONCE as usize / 2, &mut entries);
            for entry in &entries {
                let Lookup::Live(at) = entry.state else { continue };
                let record = index.records().get(at.record);
                if record.is_some_and(|record| shared.has_lost(u32::from(record.shard)))
                    && let Some(left) = index.remove(entry.print, at)
                {
                    shared.free_if_empty(at.record, left);
                    shared.gone.note(entry.print, Gone::OutOfService);
                    any = true;
                }
            }
            section.step(1 + entries.len() as u64).await;
        }
    }
    if any {
        shared.events.change().lose();
    }
}
