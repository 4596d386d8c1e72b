//! A directory as a bucket: for a file system that several nodes share, for backups, for trying things out.
//!
//! An object is a file that was written beside its place, flushed, and renamed. Conditional puts hold a lock on a file of
//! the directory, so that they are atomic among the processes that use it; the file system must keep `flock` (NFS does from
//! version 4 on). Under the lock the object is opened and its bytes are compared: what a file system remembers of names and times may be
//! seconds old on another machine, what it gives of a file that was opened afterwards may not.
//!
//! Who holds the lock and hangs keeps conditional puts from all others, because it may still rename what it compared: they fail after a while,
//! one thread of each process waits, and everything else goes on.
//!
//! The directory itself is never made here: where it is absent there is no bucket, and perhaps a disk that is not mounted.

use std::fs::{self, File, TryLockError};
use std::hash::BuildHasher;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use bytes::Bytes;
use kvarts_cold::time::BoxFuture;
use kvarts_cold::{Bucket, Condition, Facts, Fault, Listed, Places, Tag};
use tokio::sync::Semaphore;

/// Files that are being written; a process that died may leave some.
const PARTIAL: &str = ".partial-";
/// How often a name for one is drawn, while there is one of that name.
const DRAWS: u32 = 8;
/// Threads that wait for the file system at once. One that hangs keeps these, and no other thread of the process.
const AT_ONCE: usize = 32;

/// How long a conditional put waits for the lock: it is held for a comparison and a rename.
const LOCK_MOST: Duration = Duration::from_secs(5);
/// How often it is tried, at first and at last.
const LOCK_EVERY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// A bucket in a directory.
#[derive(Clone, Debug)]
pub struct Directory {
    path: Arc<PathBuf>,
    turns: Arc<Semaphore>,
    /// Who waits for the lock, one at a time.
    locks: Arc<Semaphore>,
    lock_most: Duration,
}

fn fault_of(error: &io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::NotFound => Fault::Missing,
        io::ErrorKind::PermissionDenied => Fault::Forbidden(error.to_string()),
        io::ErrorKind::UnexpectedEof => Fault::Length,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Fault::Refused(error.to_string()),
        _ => Fault::Unreachable(error.to_string()),
    }
}

/// Bytes of a file that are hashed at once.
const HASHED_AT_ONCE: usize = 256 << 10;

/// Which content bytes are.
fn tag(hasher: &blake3::Hasher) -> Tag {
    Tag(hasher.finalize().to_hex().to_string())
}

/// Which content pieces are that follow each other.
fn tag_of<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Tag {
    let mut hasher = blake3::Hasher::new();
    for piece in pieces {
        hasher.update(piece);
    }
    tag(&hasher)
}

/// Which content an open file has.
fn content(mut file: &File) -> io::Result<Tag> {
    let (mut hasher, mut piece) = (blake3::Hasher::new(), vec![0; HASHED_AT_ONCE]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(tag(&hasher)),
            came => {
                hasher.update(piece.get(..came).unwrap_or_default());
            }
        }
    }
}

/// An object's file, if there is one.
fn there(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Gives a file a name that no file has; false where one has it.
fn name_new(partial: &Path, path: &Path) -> io::Result<bool> {
    // A link is refused where the name is, whatever this machine remembers of it.
    match fs::hard_link(partial, path) {
        Ok(()) => fs::remove_file(partial).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        // A file system without links.
        Err(_) => fs::rename(partial, path).map(|()| true),
    }
}

fn modified_ms(file: &fs::Metadata) -> u64 {
    let modified = file.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    modified.map_or(0, |at| u64::try_from(at.as_millis()).unwrap_or(u64::MAX))
}

/// A name that no process draws a second time: several on different machines write into one folder, and their numbers may be the same.
#[allow(
    clippy::disallowed_types,
    reason = "random names of files that several machines create: not simulated"
)]
fn partial() -> String {
    let draw = || std::hash::RandomState::new().hash_one(std::process::id());
    format!("{PARTIAL}{:016x}{:016x}", draw(), draw())
}

/// Makes a file that was not there.
fn new_file(folder: &Path) -> io::Result<(PathBuf, File)> {
    let mut draws = 0;
    loop {
        let path = folder.join(partial());
        match File::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && draws < DRAWS => draws += 1,
            made => return made.map(|file| (path, file)),
        }
    }
}

impl Directory {
    /// The bucket in this directory. It is made by who operates it: where it is absent every request finds no bucket.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: Arc::new(path.as_ref().to_owned()),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            locks: Arc::new(Semaphore::new(1)),
            lock_most: LOCK_MOST,
        }
    }

    /// The same; a conditional put waits so long at most for the lock that other processes may hold.
    pub fn waiting_for_lock(self, most: Duration) -> Self {
        Self { lock_most: most, ..self }
    }

    /// Runs on a thread that may wait. The turn is given back when the work ends, and not when its caller gives up: work on a file system
    /// that hangs does not end, and its threads are not to become more and more.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        // ends: the time of the request that wants the turn (`patience`)
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let turn = turn.map_err(|error| Fault::Unreachable(error.to_string()))?;
        let own = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            let done = work(&own);
            drop(turn);
            done
        });
        // ends: the time of its request (`patience`); the thread and its turn, when the file system answers
        done.await.unwrap_or_else(|error| Err(Fault::Unreachable(error.to_string())))
    }

    fn path(&self, name: &str) -> Result<PathBuf, Fault> {
        let is_plain = |part: &str| !part.is_empty() && !part.starts_with('.');
        if name.split('/').all(is_plain) {
            Ok(self.path.join(name))
        } else {
            Err(Fault::Refused(format!("{name} is not a valid name of an object")))
        }
    }

    /// What an error means. What is missing where the directory is too is the bucket.
    fn fault(&self, error: &io::Error) -> Fault {
        match fault_of(error) {
            Fault::Missing if !self.path.is_dir() => Fault::NoBucket,
            fault => fault,
        }
    }

    /// Makes the folders between the directory and an object, and never the directory.
    fn make_folders(&self, folder: &Path) -> io::Result<()> {
        let mut path = self.path.to_path_buf();
        for part in folder.strip_prefix(&*self.path).unwrap_or(folder) {
            path.push(part);
            match fs::create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn lock(&self) -> io::Result<File> {
        let path = self.path.join(".lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        let (since, mut wait) = (Instant::now(), LOCK_EVERY.0);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) if since.elapsed() >= self.lock_most => {
                    let (path, seconds) = (path.display(), self.lock_most.as_secs_f64());
                    let why = format!(
                        "another process, which may hang, has locked the file {path} for {seconds} s: `fuser \
                        -v {path}` on the machine of that process shows the process"
                    );
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(wait);
                    wait = wait.saturating_mul(2).min(LOCK_EVERY.1);
                }
            }
        }
    }

    /// Writes an object beside its place, flushed.
    fn stage(&self, folder: &Path, body: &[Bytes]) -> io::Result<PathBuf> {
        self.make_folders(folder)?;
        let (partial, mut file) = new_file(folder)?;
        let written = body.iter().try_for_each(|piece| file.write_all(piece)).and_then(|()| file.sync_all());
        if written.is_err() {
            let _ = fs::remove_file(&partial);
        }
        written.map(|()| partial)
    }

    fn write(&self, name: &str, body: &[Bytes], condition: &Condition) -> Result<Tag, Fault> {
        let path = self.path(name)?;
        let folder = path.parent().ok_or_else(|| Fault::Refused(name.to_owned()))?;
        let partial = self.stage(folder, body).map_err(|error| self.fault(&error))?;
        let place = || -> io::Result<bool> {
            // Held until the new object is in its place.
            let _lock = if *condition == Condition::Any { None } else { Some(self.lock()?) };
            let is_placed = match condition {
                Condition::Any => fs::rename(&partial, &path).map(|()| true)?,
                Condition::Absent => there(&path)?.is_none() && name_new(&partial, &path)?,
                Condition::Is(known) => {
                    let holds =
                        there(&path)?.is_some_and(|file| content(&file).is_ok_and(|own| own == *known));
                    holds && fs::rename(&partial, &path).map(|()| true)?
                }
            };
            if is_placed {
                File::open(folder)?.sync_all()?;
            }
            Ok(is_placed)
        };
        match place() {
            Ok(true) => Ok(tag_of(body.iter().map(|piece| &piece[..]))),
            other => {
                // If it is in its place already, nothing is here any more.
                let _ = fs::remove_file(&partial);
                Err(other.map_or_else(|error| self.fault(&error), |_| Fault::Changed))
            }
        }
    }

    fn read(&self, name: &str, range: Option<Range<u64>>, most: u64) -> Result<Bytes, Fault> {
        let read = |path: PathBuf| -> io::Result<Result<Bytes, Fault>> {
            let mut file = File::open(path)?;
            let facts = file.metadata()?;
            let range = range.unwrap_or(0..facts.len());
            let wanted = range.end.saturating_sub(range.start);
            if wanted > most || range.end > facts.len() {
                return Ok(Err(Fault::Length));
            }
            let mut bytes = vec![0; usize::try_from(wanted).unwrap_or(0)];
            file.seek(SeekFrom::Start(range.start))?;
            file.read_exact(&mut bytes)?;
            Ok(Ok(bytes.into()))
        };
        read(self.path(name)?).map_err(|error| self.fault(&error))?
    }

    fn list_below(&self, prefix: &str, found: &mut Vec<Listed>) -> io::Result<()> {
        let folder = prefix.rsplit_once('/').map_or("", |(folder, _)| folder);
        let mut folders = vec![(self.path.join(folder), folder.to_owned())];
        while let Some((path, folder)) = folders.pop() {
            let entries = match fs::read_dir(path) {
                Err(error) if self.fault(&error) == Fault::Missing => continue,
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                let Ok(own) = entry.file_name().into_string() else { continue };
                if own.starts_with('.') {
                    continue;
                }
                let name = if folder.is_empty() { own } else { format!("{folder}/{own}") };
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    folders.push((entry.path(), name));
                } else if kind.is_file() && name.starts_with(prefix) {
                    // One that is deleted meanwhile is not there.
                    let Ok(known) = entry.metadata() else { continue };
                    found.push(Listed { name, bytes: known.len(), modified_ms: modified_ms(&known) });
                }
            }
        }
        Ok(())
    }

    /// Files of writers that died, or counts them: their last byte was written before that time.
    fn left_behind(&self, before_ms: u64, dry_run: bool) -> io::Result<u64> {
        let (mut folders, mut found) = (vec![self.path.to_path_buf()], 0);
        while let Some(folder) = folders.pop() {
            let entries = match fs::read_dir(folder) {
                Err(error) if self.fault(&error) == Fault::Missing => continue,
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                let (kind, name) = (entry.file_type()?, entry.file_name());
                if kind.is_dir() {
                    folders.push(entry.path());
                } else if kind.is_file() && name.as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
                    // One that has its place by now is not there.
                    let Ok(known) = entry.metadata() else { continue };
                    let is_old = modified_ms(&known) < before_ms;
                    let is_gone = is_old && (dry_run || fs::remove_file(entry.path()).is_ok());
                    found += u64::from(is_gone);
                }
            }
        }
        Ok(found)
    }
}

impl Bucket for Directory {
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        let name = name.to_owned();
        Box::pin(self.blocking(move |own| {
            let bytes = own.read(&name, None, most)?;
            let tag = tag_of(std::iter::once(&bytes[..]));
            Ok((bytes, tag))
        }))
    }

    fn get_range<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        into: &'a Places,
    ) -> BoxFuture<'a, Result<u64, Fault>> {
        let name = name.to_owned();
        Box::pin(async move {
            // The thread that reads goes on if this is dropped, so it has memory of its own.
            let bytes = self.blocking(move |own| own.read(&name, Some(range), u64::MAX)).await?;
            into.take(0, &bytes)?;
            Ok(bytes.len() as u64)
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>> {
        let name = name.to_owned();
        Box::pin(self.blocking(move |own| {
            let look = |path: PathBuf| -> io::Result<Facts> {
                let file = File::open(path)?;
                let known = file.metadata()?;
                Ok(Facts { bytes: known.len(), tag: content(&file)?, modified_ms: modified_ms(&known) })
            };
            look(own.path(&name)?).map_err(|error| own.fault(&error))
        }))
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Vec<Bytes>,
        condition: Condition,
    ) -> BoxFuture<'a, Result<Tag, Fault>> {
        let name = name.to_owned();
        Box::pin(async move {
            // Who waits for the lock keeps one thread, and no reads from theirs. It is held until the work ends.
            let lock = match condition {
                Condition::Any => None,
                // ends: the time of the request that wants the lock (`patience`)
                Condition::Absent | Condition::Is(_) => Some(Arc::clone(&self.locks).acquire_owned().await),
            };
            self.blocking(move |own| {
                let _lock = lock;
                own.write(&name, &body, &condition)
            })
            .await
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>> {
        let name = name.to_owned();
        Box::pin(self.blocking(move |own| match fs::remove_file(own.path(&name)?) {
            Err(error) if own.fault(&error) == Fault::Missing => Ok(()),
            done => done.map_err(|error| own.fault(&error)),
        }))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: usize,
    ) -> BoxFuture<'a, Result<Vec<Listed>, Fault>> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        Box::pin(self.blocking(move |own| {
            let mut found = Vec::new();
            own.list_below(&prefix, &mut found).map_err(|error| own.fault(&error))?;
            found.retain(|one| after.as_ref().is_none_or(|after| one.name > *after));
            found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            found.truncate(most);
            Ok(found)
        }))
    }

    fn tidy<'a>(&'a self, before_ms: u64, dry_run: bool) -> BoxFuture<'a, Result<u64, Fault>> {
        Box::pin(
            self.blocking(move |own| own.left_behind(before_ms, dry_run).map_err(|error| own.fault(&error))),
        )
    }
}
