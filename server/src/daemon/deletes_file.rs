//! The file in which this node keeps what was deleted in its cluster: the same in each directory of the store that is in use.
//!
//! A directory that was out has an earlier list, and is read together with the others; the next entry then writes the whole list everywhere.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use kvarts_peer::node::{FILE_BYTES_MAX, Kept, Written};
use kvarts_store::engine::Store;

/// Its name.
pub(super) const FILE: &str = "cluster-deletes";

/// The file.
pub(super) struct DeletesFile {
    directories: Vec<PathBuf>,
    store: Store,
}

impl fmt::Debug for DeletesFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeletesFile({:?})", self.directories)
    }
}

impl DeletesFile {
    /// That of a store in these directories.
    pub(super) fn new(directories: &[PathBuf], store: &Store) -> Self {
        Self { directories: directories.to_vec(), store: store.clone() }
    }

    /// Where it is now.
    fn in_use(&self) -> Vec<PathBuf> {
        let out = self.store.health().out;
        let in_use = (0u16..).zip(&self.directories).filter(|(at, _)| !out.contains_key(at));
        in_use.map(|(_, directory)| directory.clone()).collect()
    }
}

fn append(directory: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).open(directory.join(FILE))?;
    file.write_all(bytes)?;
    file.sync_data()
}

fn replace(directory: &Path, bytes: &[u8]) -> io::Result<()> {
    let (path, new) = (directory.join(FILE), directory.join(format!("{FILE}.new")));
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    File::open(directory)?.sync_all()
}

/// Does it where it may wait for the disk.
fn written(what: impl FnOnce() -> io::Result<()> + Send + 'static) -> Written<'static> {
    let task = tokio::task::spawn_blocking(what);
    // ends: the disk; who waits for the list is told after `NOTED_WITHIN`
    Box::pin(async move { task.await.unwrap_or_else(|error| Err(io::Error::other(error))) })
}

impl Kept for DeletesFile {
    fn load(&self) -> io::Result<Vec<Vec<u8>>> {
        let read = |directory: &PathBuf| {
            let mut bytes = Vec::new();
            match File::open(directory.join(FILE)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                file => drop(file?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?),
            }
            Ok(bytes)
        };
        self.in_use().iter().map(read).collect()
    }

    fn append(&self, bytes: Vec<u8>) -> Written<'_> {
        let all = self.in_use();
        written(move || all.iter().try_for_each(|directory| append(directory, &bytes)))
    }

    fn replace(&self, bytes: Vec<u8>) -> Written<'_> {
        let all = self.in_use();
        written(move || all.iter().try_for_each(|directory| replace(directory, &bytes)))
    }
}
