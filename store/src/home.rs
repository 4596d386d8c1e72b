//! A store on real directories: locked against other processes, on the best executors that run here.
//!
//! This is the only place that decides between the ring and threads, glommio and plain threads; what it decided,
//! and what an operator could do about it, stands in [`Home::notes`].

mod answered;
mod made;
mod places;
mod stop;
mod usable;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;

use fs2::FileExt;
use kvarts_layout::StoreId;
use kvarts_layout::format::DEFAULT_SEGMENT_BYTES;
use kvarts_layout::format::superblock::{FILE_BYTES, Superblock};
use rustix::fs::OFlags;

use crate::engine::{Executors, Options, Store};
use crate::io::{Features, Io, IoChoice, open_io};
use crate::rt::Launcher;
use crate::rt::glommio::GlommioLauncher;
use crate::rt::threads::{MakeIo, ThreadLauncher};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::shared;
use kvarts_contract::clock::{OsEntropy, SystemClock};
use kvarts_contract::error::{DirectoryCause, Error, Reason};

use answered::{WITHIN, answered};
pub use made::make;
use made::{Before, LOCK};
use places::Held;
pub use places::Places;
pub use stop::Stop;
pub use usable::{free_bytes, refuse_unusable, writable};

/// Segments that a budget should have, and the least size to which they shrink for it.
const SEGMENTS_WANTED: u64 = 64;
const SEGMENT_MIN: u64 = 32 << 20;

/// On what executors run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RuntimeChoice {
    /// glommio if it runs here, else plain threads.
    #[default]
    Auto,
    /// glommio or nothing.
    Glommio,
    /// Plain threads.
    Threads,
}

impl FromStr for RuntimeChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "glommio" => Ok(Self::Glommio),
            "threads" => Ok(Self::Threads),
            _ => Err(format!("the runtime {name:?} does not exist: use auto, glommio or threads")),
        }
    }
}

/// Where and how a store is opened.
#[derive(Clone, Debug, Default)]
pub struct HomeOptions {
    /// The directories; one that does not exist is made where the directory above it does. One for each device.
    pub directories: Vec<PathBuf>,
    /// The way to the disks.
    pub io: IoChoice,
    /// Features of the ring that are not to be used.
    pub features: Features,
    /// What executors run on.
    pub runtime: RuntimeChoice,
    /// Directories, empty, that take the place of those of the store that are lost for good: as many as are missing.
    pub replace: Vec<PathBuf>,
    /// Cores that executors are pinned to, in turn; empty for none.
    pub cores: Vec<usize>,
    /// What ends the waits for directories before the store is opened.
    pub stop: Stop,
    /// The store itself. `directories` and `absent` in it are filled in, and `replace` follows from the paths above.
    pub store: Options,
}

/// An open store in its directories. [`Home::close`] ends it: dropped without, it ends as a killed process would, and the next start scans its
/// newest segments. Clones of its store are refused afterwards.
#[derive(Debug)]
pub struct Home {
    store: Store,
    executors: Vec<Joined>,
    /// Held for as long as the store is open.
    held: Arc<Held>,
    notes: Vec<String>,
}

struct Joined(Box<dyn crate::rt::Join + Send>);

impl std::fmt::Debug for Joined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Joined")
    }
}

impl Home {
    /// Its directories, for a task that notices when one is taken away, and takes it again when it is back.
    pub fn places(&self) -> Places {
        Places::new(self.store.clone(), Arc::clone(&self.held))
    }

    /// Opens or makes a store in one directory, with at most `budget_bytes` on its disk and everything else as it is by default.
    pub fn in_directory(directory: impl Into<PathBuf>, budget_bytes: u64) -> Result<Self, Error> {
        Self::open(&HomeOptions {
            directories: vec![directory.into()],
            store: Options {
                budget_bytes,
                segment_bytes: fitting_segment(Some(budget_bytes)),
                ..Options::default()
            },
            ..HomeOptions::default()
        })
    }

    /// Opens the store, or makes one where the directories are empty; returns when every block that survived can be read. One process at a
    /// time has a directory. What is refused leaves nothing behind that was not there before.
    ///
    /// Raises this process's limit of open files to what it may have. The segments of a new store are as large as the options say:
    /// [`fitting_segment`] gives a size for a budget.
    pub fn open(options: &HomeOptions) -> Result<Self, Error> {
        if options.directories.is_empty() {
            return Err(Error(Reason::Config(
                "the store has no directory: name at least one directory".to_owned(),
            )));
        }
        let mut locks = Vec::new();
        match Self::open_locked(options, &mut locks) {
            Ok((store, executors, notes)) => {
                let held = Arc::new(Held::new(options.directories.clone(), locks));
                store.stands_in(Arc::clone(&held) as _);
                Ok(Self { store, executors, held, notes })
            }
            Err(refused) => {
                made::remove(locks, &[]);
                Err(refused)
            }
        }
    }

    /// Locks the directories and opens the store in them.
    fn open_locked(options: &HomeOptions, locks: &mut Vec<Lock>) -> Result<Opened, Error> {
        let absent = lock_all(&options.directories, &options.stop, locks)?;
        let descriptors = raise_descriptor_limit();
        let mut notes = Vec::new();
        let mut store_options = options.store.clone();
        let too_many = || {
            let count = options.directories.len();
            format!("the store has {count} directories, but the limit is {}", u16::MAX)
        };
        store_options.directories =
            u16::try_from(options.directories.len()).map_err(|_| Error(Reason::Config(too_many())))?;
        store_options.absent = absent;
        for one in &options.replace {
            let at = options.directories.iter().position(|directory| directory == one);
            let at = at.and_then(|at| u16::try_from(at).ok());
            let why = || {
                format!(
                    "the directory {} does not belong to the store: name only directories of the store",
                    one.display()
                )
            };
            store_options.replace.insert(at.ok_or_else(|| Error(Reason::Config(why())))?);
        }
        let (store, executors) = start(options, &store_options, &mut notes)?;
        let io = block_on(store.io())?;
        notes.extend(
            io.iter().take(1).map(|(facts, _)| format!("the interface to the disks is {}", facts.backend)),
        );
        for warning in io.iter().flat_map(|(facts, _)| &facts.warnings) {
            if !notes.contains(warning) {
                notes.push(warning.clone());
            }
        }
        store.set_files_cap(descriptors.saturating_sub(DESCRIPTORS_KEPT));
        notes.extend(shortage(store.files_max(), descriptors));
        Ok((store, executors.into_iter().map(Joined).collect(), notes))
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Those of its directories that are in memory (tmpfs): everything in them is lost at a reboot, also what was put as durable.
    pub fn in_memory(&self) -> Vec<PathBuf> {
        self.held.those(|lock| shared::is_in_memory(&lock.file).is_ok())
    }

    /// What was decided at the start, a line each, for the operator.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Finishes what is under way, writes a checkpoint, and lets go of the directories.
    pub fn close(self) -> Result<(), Error> {
        let closed = block_on(self.store.close());
        drop(self.end());
        closed
    }

    /// Stops as a killed process would, without a checkpoint: for tests of recovery.
    pub fn abandon(self) {
        block_on(self.store.halt());
        drop(self.end());
    }

    /// Closes the store of a start that is refused. If opening made it and nothing was stored since, it is removed, and with it files of
    /// these names beside it and the directories that were made. A store that was there stays as it is.
    pub fn take_back(self, beside: &[&str]) {
        let is_empty = self.store.stats().space.total.live == 0;
        // What is not written is a checkpoint of what is on disk already.
        let _ = block_on(self.store.close());
        let locks = self.end();
        if is_empty {
            made::remove(locks, beside);
        }
    }

    fn end(self) -> Vec<Lock> {
        let Self { store, executors, held, .. } = self;
        drop(store);
        for executor in executors {
            // An executor that panicked has been reported by its thread already.
            let _ = executor.0.join();
        }
        held.let_go_of_all()
    }
}

fn start(
    options: &HomeOptions,
    store: &Options,
    notes: &mut Vec<String>,
) -> Result<(Store, Executors), Error> {
    let (clock, entropy) = (SystemClock::new(), OsEntropy::new());
    let threads = || {
        let launcher = ThreadLauncher::new(clock.clone(), entropy.clone(), make_io(options));
        block_on(Store::open(&launcher.pinned_to(options.cores.clone()), store))
    };
    if options.runtime == RuntimeChoice::Threads || options.io == IoChoice::Pool {
        notes.push("executors run on plain threads".to_owned());
        return threads();
    }
    match GlommioLauncher::probe() {
        Ok(()) => {
            notes.push("executors run on glommio".to_owned());
            let launcher = GlommioLauncher::new(clock.clone(), entropy.clone(), make_io(options));
            let launcher: &dyn Launcher = &launcher.pinned_to(options.cores.clone());
            block_on(Store::open(launcher, store))
        }
        Err(why) if options.runtime == RuntimeChoice::Glommio => Err(Error(Reason::Config(why))),
        Err(why) => {
            notes.push(format!("executors run on plain threads: {why}"));
            threads()
        }
    }
}

/// Makes each executor's way to the disks on its own thread.
fn make_io(options: &HomeOptions) -> MakeIo {
    let (choice, directories) = (options.io, options.directories.clone());
    let features = options.features.clone();
    Arc::new(move |_| {
        let io = open_io(choice, &directories, &features).map_err(|error| error.to_string())?;
        let io: Rc<RefCell<dyn Io>> = Rc::new(RefCell::new(io));
        Ok(io)
    })
}

/// A store that was opened, its executors, and what was decided.
type Opened = (Store, Vec<Joined>, Vec<String>);

/// A directory that is this process's. It is let go when this is dropped, and by whatever ends the process.
#[derive(Debug)]
struct Lock {
    file: File,
    /// Which of the store's directories it is, in the order in which they were given.
    at: u16,
    before: Before,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file is not enough: a child that is between fork and exec has it open for a moment longer.
        // What cannot be unlocked is let go when the last of them closes it.
        let _ = FileExt::unlock(&self.file);
    }
}

/// Takes the directories for this process. Gives those that cannot be taken, with why, where another one holds a store: that is opened
/// without them. None is made beside a store: an empty one there is a disk that is not mounted.
fn lock_all(
    directories: &[PathBuf],
    stop: &Stop,
    locks: &mut Vec<Lock>,
) -> Result<BTreeMap<u16, String>, Error> {
    let found: Vec<Option<Found>> =
        directories.iter().map(|directory| within_limit(directory, stop, Found::look)).collect();
    let beside_store = found.iter().flatten().any(|found| found.is_store);
    let mut absent = BTreeMap::new();
    for ((at, directory), found) in (0..).zip(directories).zip(found) {
        if beside_store && found.as_ref().is_some_and(|found| !found.exists) {
            absent
                .insert(at, format!("the directory {} does not exist: mount its disk", directory.display()));
            continue;
        }
        // One that has not answered is not waited for twice.
        let taken = found.and_then(|_| within_limit(directory, stop, lock));
        if stop.is_told() {
            locks.extend(taken.and_then(Result::ok));
            return Err(Error(Reason::Busy("the start was interrupted")));
        }
        match taken.unwrap_or_else(|| Err(silent(directory))) {
            Ok(mut taken) => {
                taken.at = at;
                locks.push(taken);
            }
            Err(refused) if beside_store && !matches!(refused, Error(Reason::Locked(_))) => {
                absent.insert(at, refused.to_string());
            }
            Err(refused) => return Err(refused),
        }
    }
    Ok(absent)
}

/// What is in the place of a directory.
struct Found {
    exists: bool,
    is_store: bool,
}

impl Found {
    fn look(directory: &Path) -> Self {
        let is_store = directory.join(kvarts_layout::format::names::SUPERBLOCK).exists();
        Self { exists: directory.exists(), is_store }
    }
}

/// What a call on the file system of a directory gives, if it returns in time.
fn within_limit<T: Send + 'static>(directory: &Path, stop: &Stop, call: fn(&Path) -> T) -> Option<T> {
    let directory = directory.to_owned();
    answered(WITHIN, stop, move || call(&directory))
}

fn silent(directory: &Path) -> Error {
    let what = format!("the directory {} has not responded for {} s", directory.display(), WITHIN.as_secs());
    Error(Reason::Directory(DirectoryCause::Unusable(what)))
}

/// Takes the directory for this process.
#[allow(
    clippy::disallowed_methods,
    reason = "directory locks are not simulated, because a simulated disk has only one user"
)]
fn lock(directory: &Path) -> Result<Lock, Error> {
    let refuse = |what: String| Error(Reason::Directory(DirectoryCause::Unusable(what)));
    let shown = directory.display();
    if directory.exists() && !directory.is_dir() {
        return Err(refuse(format!("{shown} is not a directory")));
    }
    let before = Before::look_and_make(directory);
    let mut before = before.map_err(|error| {
        refuse(format!(
            "the directory {shown} could not be created: \
        {error}"
        ))
    })?;
    match take(directory) {
        Ok(file) => {
            before.look_again().map_err(|error| {
                refuse(format!(
                    "the directory {shown} could not be listed: \
                {error}"
                ))
            })?;
            Ok(Lock { file, at: 0, before })
        }
        Err(refused) => {
            before.remove_directory();
            Err(refused)
        }
    }
}

/// Opens and locks the file that says whose a directory is.
#[allow(
    clippy::disallowed_methods,
    reason = "directory locks are not simulated, because a simulated disk has only one user"
)]
fn take(directory: &Path) -> Result<File, Error> {
    let refuse = |what: String| Error(Reason::Directory(DirectoryCause::Unusable(what)));
    let shown = directory.display();
    let path = directory.join(LOCK);
    // A link would lock, or make, a file that is none of this store's; a pipe would block for ever.
    let plain = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .custom_flags(plain.bits().cast_signed())
        .open(&path);
    let odd = || refuse(format!("the lock in {shown} is not a regular file: remove {shown}/lock"));
    let file = match file {
        Ok(file) if file.metadata().is_ok_and(|facts| facts.is_file()) => file,
        Ok(_) => return Err(odd()),
        Err(_) if is_odd(&path) => return Err(odd()),
        Err(error) => return Err(refuse(format!("the lock file in {shown} could not be written: {error}"))),
    };
    // A start that was refused removes its lock: one that was opened before that is no lock of the directory any more.
    let number =
        |facts: std::io::Result<std::fs::Metadata>| facts.map(|facts| (facts.dev(), facts.ino())).ok();
    match FileExt::try_lock_exclusive(&file) {
        Ok(()) if number(file.metadata()) == number(path.metadata()) => Ok(file),
        Ok(()) => Err(held_by(directory, None)),
        Err(error) if error.kind() == fs2::lock_contended_error().kind() => {
            Err(held_by(directory, holder(&file)))
        }
        Err(error) => Err(refuse(format!("the directory {shown} could not be locked: {error}"))),
    }
}

fn held_by(directory: &Path, process: Option<u32>) -> Error {
    let process = process.map_or_else(String::new, |number| format!(" ({number})"));
    Error(Reason::Locked(format!(
        "the directory {} is in use by another process{process}",
        directory.display()
    )))
}

/// Where the kernel says which process holds which lock.
const LOCKS: &str = "/proc/locks";

/// The process that holds the lock of this file, where the kernel says so; none for this one, and for one of another container.
fn holder(file: &File) -> Option<u32> {
    let (facts, locks) = (file.metadata().ok()?, std::fs::read_to_string(LOCKS).ok()?);
    let (device, own) = (facts.dev(), std::process::id());
    let place =
        format!("{:02x}:{:02x}:{}", rustix::fs::major(device), rustix::fs::minor(device), facts.ino());
    // NUMBER: FLOCK ADVISORY WRITE PROCESS DEVICE:FILE FROM TO
    let fields = locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut found =
        fields.filter(|line| line.get(1) == Some(&"FLOCK") && line.get(5) == Some(&place.as_str()));
    found.find_map(|line| line.get(4)?.parse().ok()).filter(|number| *number != 0 && *number != own)
}

/// Refuses directories of which another process has one, if it can be told without making or taking anything.
#[allow(
    clippy::disallowed_methods,
    reason = "directory locks are not simulated, because a simulated disk has only one user"
)]
pub fn refuse_taken(directories: &[PathBuf]) -> Result<(), Error> {
    for directory in directories {
        let plain = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut open = File::options();
        let file = open.write(true).custom_flags(plain.bits().cast_signed()).open(directory.join(LOCK));
        // What is no lock is for opening to judge.
        let Ok(file) = file else { continue };
        if let Err(error) = FileExt::try_lock_exclusive(&file)
            && error.kind() == fs2::lock_contended_error().kind()
        {
            return Err(held_by(directory, holder(&file)));
        }
    }
    Ok(())
}

/// Whether there is something else than a plain file.
#[allow(
    clippy::disallowed_methods,
    reason = "directory locks are not simulated, because a simulated disk has only one user"
)]
fn is_odd(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|facts| !facts.is_file())
}

/// Descriptors that are not for segment files: rings, checkpoints, directories on the way to a file.
const DESCRIPTORS_KEPT: u64 = 256;

/// What an operator should know where a full store may want more files than this process may have open.
fn shortage(files: u64, descriptors: u64) -> Option<String> {
    let wanted = files.saturating_add(DESCRIPTORS_KEPT);
    (wanted > descriptors).then(|| {
        format!(
            "the limit on open files is too low: a full store of this budget may need {wanted} files, but \
            this process may open only {descriptors}. Raise the limit (ulimit -n, LimitNOFILE), or create \
            the store with larger segments; until then, the store evicts blocks earlier than its budget \
            requires"
        )
    })
}

/// Bytes of a segment file of the store that one of these directories holds; none if none of them holds one that can be
/// read, which is for opening to judge, or if the start is told to stop before.
pub fn segment_bytes(directories: &[PathBuf], stop: &Stop) -> Option<u64> {
    superblock(directories, stop).map(|superblock| superblock.segment_bytes)
}

/// The id of the store that one of these directories holds, which is the node's in a cluster; none as with [`segment_bytes`].
pub fn store_id(directories: &[PathBuf], stop: &Stop) -> Option<StoreId> {
    superblock(directories, stop).map(|superblock| superblock.store)
}

fn superblock(directories: &[PathBuf], stop: &Stop) -> Option<Superblock> {
    directories.iter().find_map(|directory| within_limit(directory, stop, superblock_in)?)
}

#[allow(clippy::disallowed_methods, reason = "runs before a store is opened, and is not simulated")]
fn superblock_in(directory: &Path) -> Option<Superblock> {
    let mut bytes = Vec::new();
    let file = File::open(directory.join(kvarts_layout::format::names::SUPERBLOCK)).ok()?;
    file.take(FILE_BYTES as u64).read_to_end(&mut bytes).ok()?;
    Some(Superblock::decode_pair(&bytes, None).ok()?.superblock)
}

/// Bytes of a segment of a store that is made: the usual size, less where a budget has few of those.
pub fn fitting_segment(budget: Option<u64>) -> u64 {
    let share = budget.unwrap_or(u64::MAX) / SEGMENTS_WANTED;
    (1 << share.max(SEGMENT_MIN).ilog2()).min(DEFAULT_SEGMENT_BYTES)
}

/// A segment file is a descriptor: takes all that this process may have, and says how many these are.
fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Refused only where a policy forbids it: then opening segments says so.
    let _ = setrlimit(Resource::Nofile, limit);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_shrink_with_a_small_budget() {
        assert_eq!([None, Some(1 << 40), Some(16 << 30)].map(fitting_segment), [256 << 20; 3]);
        assert_eq!(
            [1 << 28, 1 << 30, 5 << 30].map(|bytes| fitting_segment(Some(bytes))),
            [32 << 20, 32 << 20, 64 << 20]
        );
    }

    #[test]
    fn too_few_descriptors_for_a_full_store_are_told_of_with_what_helps() {
        let told = shortage(4096, 4096).expect("256 are for others");
        assert!(
            told.contains("need 4352 files") && told.contains("open only 4096") && told.contains("ulimit -n"),
            "{told}"
        );
        assert_eq!(shortage(4096, 4352), None);
        assert!(shortage(u64::MAX, 1024).is_some());
    }

    #[test]
    fn a_lock_is_let_go_even_while_a_child_that_has_not_begun_yet_has_it_open() {
        let directory = std::env::temp_dir().join(format!("kvarts-lock-{}", std::process::id()));
        let held = lock(&directory).unwrap();
        assert!(matches!(lock(&directory), Err(Error(Reason::Locked(_)))));
        let of_a_child = held.file.try_clone().unwrap();
        drop(held);
        lock(&directory).unwrap();
        drop(of_a_child);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// A folder for the directories of a store, and what opens it in these.
    fn scratch(name: &str, directories: &[&str]) -> (PathBuf, HomeOptions) {
        let scratch = std::env::temp_dir().join(format!("kvarts-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&scratch);
        std::fs::create_dir(&scratch).unwrap();
        let (segment_bytes, budget_bytes) = (4 << 20, 128 << 20);
        let store = Options { shards_per_directory: 1, segment_bytes, budget_bytes, ..Options::default() };
        let directories = directories.iter().map(|name| scratch.join(name)).collect();
        (scratch, HomeOptions { directories, store, ..HomeOptions::default() })
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test takes the directory away")]
    fn a_store_whose_only_directory_was_taken_away_takes_no_more_puts() {
        let (scratch, options) = scratch("taken-away", &["store"]);
        let (store, other) = (options.directories[0].clone(), scratch.join("other"));
        let home = Home::open(&options).unwrap();
        let places = home.places();
        assert!(places.look().is_empty() && home.store().health().latched.is_none());
        std::fs::rename(&store, &other).unwrap();
        assert_eq!(places.look(), [store.as_path()]);
        let latched = home.store().health().latched.unwrap();
        assert!(latched.contains("store") && latched.contains("after the store was opened"), "{latched}");
        // What is written down reaches the directory by its files, and no restart.
        let resumed = block_on(home.store().resume()).unwrap_err().to_string();
        assert!(resumed.contains("after the store was opened"), "{resumed}");
        // Another directory in its place is not the one that was there.
        std::fs::create_dir(&store).unwrap();
        File::create(store.join("lock")).unwrap();
        assert_eq!(places.look(), [store.as_path()]);
        std::fs::remove_dir_all(&store).unwrap();
        std::fs::rename(&other, &store).unwrap();
        assert!(places.look().is_empty());
        assert!(home.store().health().latched.is_some(), "it is for an operator to say that all is well");
        block_on(home.store().resume()).unwrap();
        home.close().unwrap();
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test takes the directory away")]
    fn a_store_loses_a_directory_that_is_taken_away_and_has_it_again_at_the_next_start() {
        let (scratch, options) = scratch("lost", &["first", "second"]);
        let (second, other) = (options.directories[1].clone(), scratch.join("other"));
        let home = Home::open(&options).unwrap();
        let places = home.places();
        std::fs::rename(&second, &other).unwrap();
        assert_eq!(places.look(), [second.as_path()]);
        let out = |home: &Home| home.store().health().out.get(&1).cloned().unwrap_or_default();
        assert!(
            out(&home).contains("after the store was opened") && home.store().health().latched.is_none(),
            "{}",
            out(&home)
        );
        home.close().unwrap();
        // Nothing is made in its place, and the store opens without it.
        let home = Home::open(&options).unwrap();
        assert!(out(&home).contains("second does not exist: mount its disk"), "{}", out(&home));
        assert!(!second.exists());
        home.close().unwrap();
        std::fs::create_dir(&second).unwrap();
        let home = Home::open(&options).unwrap();
        assert!(out(&home).contains("is empty, but other directories have a store"), "{}", out(&home));
        home.close().unwrap();
        std::fs::remove_dir_all(&second).unwrap();
        std::fs::rename(&other, &second).unwrap();
        let home = Home::open(&options).unwrap();
        assert_eq!(out(&home), "");
        home.close().unwrap();
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test takes the directory away")]
    fn a_directory_that_is_back_is_used_again_by_the_store_that_lost_it() {
        let (scratch, options) = scratch("returned", &["first", "second"]);
        let (second, other) = (options.directories[1].clone(), scratch.join("other"));
        let home = Home::open(&options).unwrap();
        let (store, places) = (home.store(), home.places());
        let refused = |why: &str| {
            let told = block_on(store.bring_back(1)).unwrap_err().to_string();
            assert!(told.contains(why), "{told}");
        };
        refused("directory 1 of the store is already in use");
        std::fs::rename(&second, &other).unwrap();
        // Looked at again and again, it is lost once: the other one goes on.
        (0..3).for_each(|_| assert_eq!(places.look(), [second.as_path()]));
        assert_eq!(store.health().latched, None);
        refused("second contains no store: mount the disk of this directory");
        // Nor by itself: nothing is there.
        assert!(places.bring_back().is_empty() && !second.exists());
        std::fs::create_dir(&second).unwrap();
        refused("second contains no store: mount the disk of this directory");
        std::fs::remove_dir(&second).unwrap();
        // Another store is none of this one's.
        let foreign = HomeOptions { directories: vec![second.clone()], ..options.clone() };
        Home::open(&foreign).unwrap().close().unwrap();
        refused("belongs to store");
        assert!(store.health().out.contains_key(&1));
        // What was refused is let go: another process may look at it.
        Home::open(&foreign).unwrap().close().unwrap();
        std::fs::remove_dir_all(&second).unwrap();
        std::fs::rename(&other, &second).unwrap();
        let resumed = block_on(store.resume()).unwrap();
        assert!(matches!(resumed[..], [(1, Ok(0))]), "{resumed:?}");
        assert_eq!((store.health().out.len(), places.look()), (0, vec![]));
        // It is this process's again.
        assert!(matches!(lock(&second), Err(Error(Reason::Locked(_)))));
        home.close().unwrap();
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test takes the directory away")]
    fn an_empty_directory_takes_the_place_of_one_that_is_lost_only_when_it_is_told_to() {
        let (scratch, options) = scratch("replaced", &["first", "second"]);
        let (second, old) = (options.directories[1].clone(), scratch.join("old"));
        Home::open(&options).unwrap().close().unwrap();
        std::fs::rename(&second, &old).unwrap();
        std::fs::create_dir(&second).unwrap();
        let replacing = HomeOptions { replace: vec![second.clone()], ..options.clone() };
        let elsewhere = HomeOptions { replace: vec![scratch.join("third")], ..options.clone() };
        let refused = Home::open(&elsewhere).unwrap_err().to_string();
        assert!(refused.contains("does not belong to the store"), "{refused}");
        let home = Home::open(&replacing).unwrap();
        assert!(home.store().health().out.is_empty());
        home.close().unwrap();
        let refused = Home::open(&replacing).unwrap_err().to_string();
        assert!(refused.contains("the directory is not empty"), "{refused}");
        let home = Home::open(&options).unwrap();
        assert!(home.store().health().out.is_empty());
        home.close().unwrap();
        // The one that was there before does not come back.
        std::fs::remove_dir_all(&second).unwrap();
        std::fs::rename(&old, &second).unwrap();
        let home = Home::open(&options).unwrap();
        let out = home.store().health().out;
        assert!(out.get(&1).is_some_and(|why| why.contains("was replaced")), "{out:?}");
        home.close().unwrap();
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test makes what stands in the way")]
    fn a_lock_that_is_a_link_or_no_file_is_refused_and_not_followed() {
        let scratch = std::env::temp_dir().join(format!("kvarts-odd-lock-{}", std::process::id()));
        let (directory, elsewhere) = (scratch.join("store"), scratch.join("elsewhere"));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("lock");
        let refused = || {
            let why = lock(&directory).unwrap_err().to_string();
            assert!(why.contains("is not a regular file: remove") && why.contains("store/lock"), "{why}");
        };
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        refused();
        assert!(!elsewhere.exists(), "a file was made where the link leads");
        std::fs::write(&elsewhere, "of another").unwrap();
        refused();
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        refused();
        std::fs::remove_dir(&path).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        refused();
        std::fs::remove_file(&path).unwrap();
        drop(lock(&directory).unwrap());
        // A directory that is not there is made.
        drop(lock(&scratch.join("other")).unwrap());
        std::fs::remove_dir_all(&scratch).unwrap();
    }
}
