//! Where the directories of an open store are: whose they are, whether one was taken away, and whether it is back.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::answered::{Asking, WITHIN, answered};
use super::{Found, LOCK, Lock, Stop, lock, silent};
use crate::engine::{DirectoryPlaces, Store};
use kvarts_contract::blocking::block_on;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Error;

/// How long a directory is out before it is tried for the first time. Each try doubles the time to the next: one that is lost again and
/// again costs little.
const FIRST_TRY: Duration = Duration::from_secs(10);
const LAST_TRY: Duration = Duration::from_secs(3600);

/// The directories that this process has.
#[derive(Debug)]
pub(super) struct Held {
    /// All of the store, in the order in which they were given.
    directories: Vec<PathBuf>,
    locks: Mutex<BTreeMap<u16, (Lock, Place)>>,
}

/// A directory, with device and number of the lock in it.
#[derive(Clone, Debug)]
struct Place {
    directory: PathBuf,
    device: u64,
    inode: u64,
    asking: Asking,
}

impl Place {
    fn of(lock: &Lock) -> Option<Self> {
        let facts = lock.file.metadata().ok()?;
        let (device, inode) = (facts.dev(), facts.ino());
        Some(Self { directory: lock.before.directory.clone(), device, inode, asking: Asking::default() })
    }

    /// Whether it was removed, renamed, or is another now. One on a drive that hangs is not known to be.
    fn is_gone(&self) -> bool {
        let (lock, here) = (self.directory.join(LOCK), (self.device, self.inode));
        let is_gone = move || match lock.metadata() {
            Ok(facts) => (facts.dev(), facts.ino()) != here,
            // Others say nothing about where the directory is.
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        self.asking.answered(WITHIN, is_gone) == Some(true)
    }
}

impl Held {
    pub(super) fn new(directories: Vec<PathBuf>, locks: Vec<Lock>) -> Self {
        let held =
            locks.into_iter().filter_map(|lock| Some((lock.at, Place::of(&lock).map(|at| (lock, at))?)));
        Self { directories, locks: Mutex::new(held.collect()) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u16, (Lock, Place)>> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, at: u16) -> Option<Place> {
        self.lock().get(&at).map(|(_, place)| place.clone())
    }

    /// The directories of these locks.
    pub(super) fn those(&self, are: impl Fn(&Lock) -> bool) -> Vec<PathBuf> {
        let locks = self.lock();
        let those = locks.values().filter(|(lock, _)| are(lock));
        those.map(|(_, place)| place.directory.clone()).collect()
    }

    pub(super) fn let_go_of_all(&self) -> Vec<Lock> {
        std::mem::take(&mut *self.lock()).into_values().map(|(lock, _)| lock).collect()
    }
}

impl DirectoryPlaces for Held {
    fn gone(&self) -> Vec<(u16, PathBuf)> {
        let places: Vec<(u16, Place)> =
            self.lock().iter().map(|(at, (_, place))| (*at, place.clone())).collect();
        let gone = places.into_iter().filter(|(_, place)| place.is_gone());
        gone.map(|(at, place)| (at, place.directory)).collect()
    }

    fn take_again(&self, at: u16) -> Result<bool, String> {
        let directory = self
            .directories
            .get(usize::from(at))
            .ok_or_else(|| format!("the store has no directory {at}"))?;
        if self.place(at).is_some_and(|place| !place.is_gone()) {
            return Ok(false);
        }
        let asked = directory.clone();
        let taken = answered(WITHIN, &Stop::default(), move || {
            // None is made: an absent or empty one is a disk that is not mounted.
            Found::look(&asked).is_store.then(|| lock(&asked))
        });
        let taken = taken.ok_or_else(|| silent(directory).to_string())?;
        let absent =
            || format!("{} contains no store: mount the disk of this directory", directory.display());
        let mut lock = taken.ok_or_else(absent)?.map_err(|error| error.to_string())?;
        lock.at = at;
        let place = Place::of(&lock).ok_or_else(absent)?;
        self.lock().insert(at, (lock, place));
        Ok(true)
    }

    fn let_go(&self, at: u16) {
        self.lock().remove(&at);
    }
}

/// The directories of an open store, to be looked at now and then.
#[derive(Clone, Debug)]
pub struct Places {
    store: Store,
    held: Arc<Held>,
    /// When each directory that was out is tried next, and after how long once more.
    tries: Arc<Mutex<BTreeMap<u16, (Nanos, Duration)>>>,
}

impl Places {
    pub(super) fn new(store: Store, held: Arc<Held>) -> Self {
        Self { store, held, tries: Arc::default() }
    }

    /// Whether the store has one directory.
    pub fn is_alone(&self) -> bool {
        self.held.directories.len() == 1
    }

    /// Notices if directories of the store were removed, renamed, or are others now, as where a file system was mounted over one: what is
    /// written there reaches no restart. A store of several goes on without them, one of this directory alone takes no more writes.
    /// Gives all of them.
    pub fn look(&self) -> Vec<PathBuf> {
        let gone = self.held.gone();
        gone.iter().for_each(|(at, directory)| self.store.take_as_gone(*at, directory));
        gone.into_iter().map(|(_, directory)| directory).collect()
    }

    /// Brings those back that are out, where their disks are mounted again, and says of each that was tried what came of it: the number of
    /// its blocks, or why it stays out. One that is out is tried after ten seconds, and then less and less often.
    pub fn bring_back(&self) -> Vec<(PathBuf, Result<u64, Error>)> {
        let mut tried = Vec::new();
        for at in self.store.health().out.into_keys().filter(|at| self.is_due(*at)) {
            let directory = self.held.directories.get(usize::from(at)).cloned().unwrap_or_default();
            tried.push((directory, block_on(self.store.bring_back(at))));
        }
        tried
    }

    /// Whether a directory that is out is to be tried now. An absent one is looked for each time, which costs nothing.
    fn is_due(&self, at: u16) -> bool {
        let now = self.store.clock().now();
        let mut tries = self.tries.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, wait) = tries.entry(at).or_insert((now.plus(FIRST_TRY), FIRST_TRY));
        let is_there = || {
            let directory = self.held.directories.get(usize::from(at)).cloned();
            let look = move || directory.is_some_and(|one: PathBuf| Found::look(Path::new(&one)).is_store);
            answered(WITHIN, &Stop::default(), look) == Some(true)
        };
        if now < *next || !is_there() {
            return false;
        }
        *wait = (*wait * 2).min(LAST_TRY);
        *next = now.plus(*wait);
        true
    }
}
