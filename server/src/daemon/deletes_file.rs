//! The file in which this node keeps what was deleted in its cluster, in the store's first directory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use kvarts_peer::node::{FILE_BYTES_MAX, Kept, Written};

/// Its name.
pub(super) const FILE: &str = "cluster-deletes";

/// The file.
#[derive(Debug)]
pub(super) struct DeletesFile {
    directory: PathBuf,
}

impl DeletesFile {
    /// That of this directory.
    pub(super) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
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
        let file = match File::open(self.directory.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn append(&self, bytes: Vec<u8>) -> Written<'_> {
        let path = self.directory.join(FILE);
        written(move || {
            let mut file = OpenOptions::new().append(true).open(path)?;
            file.write_all(&bytes)?;
            file.sync_data()
        })
    }

    fn replace(&self, bytes: Vec<u8>) -> Written<'_> {
        let directory = self.directory.clone();
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
