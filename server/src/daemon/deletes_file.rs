//! The file in which this node keeps what was deleted in its cluster, in the first directory of the store that is in use. What another one has of
//! it is what a node has that was stopped meanwhile: the others send the rest.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::PathBuf;

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
        write!(f, "DeletesFile({})", self.directory().display())
    }
}

impl DeletesFile {
    /// That of a store in these directories.
    pub(super) fn new(directories: &[PathBuf], store: &Store) -> Self {
        Self { directories: directories.to_vec(), store: store.clone() }
    }

    /// Where it is now.
    fn directory(&self) -> PathBuf {
        let out = self.store.health().out;
        let in_use = (0u16..).zip(&self.directories).find(|(at, _)| !out.contains_key(at));
        in_use.map(|(_, directory)| directory).or(self.directories.first()).cloned().unwrap_or_default()
    }
}

/// Does it where it may wait for the disk.
fn written(what: impl FnOnce() -> io::Result<()> + Send + 'static) -> Written<'static> {
    let task = tokio::task::spawn_blocking(what);
    // ends: the disk; who waits for the list is told after `NOTED_WITHIN`
    Box::pin(async move { task.await.unwrap_or_else(|error| Err(io::Error::other(error))) })
}

impl Kept for DeletesFile {
    fn load(&self) -> io::Result<Vec<u8>> {
        let file = match File::open(self.directory().join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn append(&self, bytes: Vec<u8>) -> Written<'_> {
        let path = self.directory().join(FILE);
        written(move || {
            let mut file = OpenOptions::new().append(true).open(path)?;
            file.write_all(&bytes)?;
            file.sync_data()
        })
    }

    fn replace(&self, bytes: Vec<u8>) -> Written<'_> {
        let directory = self.directory();
        written(move || {
            let (path, new) = (directory.join(FILE), directory.join(format!("{FILE}.new")));
            let mut file = File::create(&new)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&new, &path)?;
            File::open(directory)?.sync_all()
        })
    }
}
