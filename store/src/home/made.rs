//! What opening has made in the directories of a store, so that a start that is refused leaves nothing behind.
//!
//! Only what this process made is removed, under the lock of its directory: two starts beside each other never remove what
//! the other one made. The order survives a kill at any point: while the superblock stands it is a store without blocks, and without
//! it folders are empty, as making a store leaves them.
#![allow(
    clippy::disallowed_methods,
    reason = "the creation of directories is not simulated: a simulated disk already has its directories"
)]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use kvarts_layout::format::names::{FileName, SUPERBLOCK};

use super::Lock;

/// The lock of a directory.
pub(super) const LOCK: &str = "lock";

/// A directory, and what was in it before it was opened.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) directory: PathBuf,
    /// Whether this process made it.
    is_made: bool,
    names: BTreeSet<OsString>,
}

impl Before {
    /// Looks, and makes the directory where it is absent.
    pub(super) fn look_and_make(directory: &Path) -> io::Result<Self> {
        let is_made = make(directory)?;
        Ok(Self { directory: directory.to_owned(), is_made, names: names(directory)? })
    }

    /// Looks again, under the lock that was just taken: a store that another process made in the meantime was there before, too.
    pub(super) fn look_again(&mut self) -> io::Result<()> {
        let had_lock = self.had(LOCK);
        self.names = names(&self.directory)?;
        if !had_lock {
            self.names.remove(OsString::from(LOCK).as_os_str());
        }
        Ok(())
    }

    fn had(&self, name: &str) -> bool {
        self.names.contains(OsString::from(name).as_os_str())
    }

    /// The folders of shards that are there, each with whether it was there before.
    fn folders(&self) -> Vec<(PathBuf, bool)> {
        // A directory that cannot be listed keeps what it has.
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name());
        let is_shard =
            |name: &OsString| matches!(name.to_str().and_then(FileName::parse), Some(FileName::Shard(_)));
        let folders = names.filter(is_shard);
        folders.map(|name| (self.directory.join(&name), self.names.contains(&name))).collect()
    }

    /// Removes the store that was made here, and files of these names beside it.
    fn remove_store(&self, beside: &[&str]) {
        let (folders, superblock) = (self.folders(), self.directory.join(SUPERBLOCK));
        if superblock.exists() {
            // Before the superblock there was nothing in any folder.
            let files = folders.iter().flat_map(|(folder, _)| std::fs::read_dir(folder)).flatten().flatten();
            let others = beside.iter().filter(|name| !self.had(name)).map(|name| self.directory.join(name));
            let files: Vec<PathBuf> = files.map(|entry| entry.path()).chain(others).collect();
            for file in files.iter().chain([&superblock]) {
                let _ = std::fs::remove_file(file);
            }
        }
        for (folder, _) in folders.iter().filter(|(_, was_there)| !was_there) {
            let _ = std::fs::remove_dir(folder);
        }
    }

    /// Removes the directory, if it was made and is empty.
    pub(super) fn remove_directory(&self) {
        if self.is_made {
            // What others put there meanwhile stays, and the directory with it.
            let _ = std::fs::remove_dir(&self.directory);
        }
    }
}

fn names(directory: &Path) -> io::Result<BTreeSet<OsString>> {
    std::fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect()
}

/// Removes what was made since these directories were locked: the store, where none of them had one, files of these names beside
/// it, locks, and the directories. What cannot be removed stays.
pub(super) fn remove(locks: Vec<Lock>, beside: &[&str]) {
    if locks.iter().all(|lock| !lock.before.had(SUPERBLOCK)) {
        locks.iter().for_each(|lock| lock.before.remove_store(beside));
    }
    for lock in locks {
        if !lock.before.had(LOCK) {
            let _ = std::fs::remove_file(lock.before.directory.join(LOCK));
        }
        lock.before.remove_directory();
    }
}

/// Makes a directory of a store where it is absent, with its name durable: a store in it must not go with a power cut. Says
/// whether it did.
pub fn make(directory: &Path) -> io::Result<bool> {
    refuse_absent(directory)?;
    match std::fs::create_dir(directory) {
        Ok(()) => File::open(above(directory))?.sync_all().map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Refuses a directory of a store where the directory above it is absent: a disk that is not mounted gets no store on the root disk
/// in its place. Says what to do.
pub(super) fn refuse_absent(directory: &Path) -> io::Result<()> {
    let above = above(directory);
    if above.exists() {
        return Ok(());
    }
    let what = format!(
        "the directory {} does not exist: mount its disk if the directory is on another disk (`findmnt` \
        lists mounted disks), otherwise run `mkdir -p {}`",
        above.display(),
        above.display()
    );
    Err(io::Error::new(io::ErrorKind::NotFound, what))
}

pub(super) fn above(directory: &Path) -> &Path {
    directory.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Options;
    use crate::home::{Home, HomeOptions};

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kvarts-made-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn options(&self, directories: &[&str]) -> HomeOptions {
            let (segment_bytes, budget_bytes) = (4 << 20, 128 << 20);
            let store =
                Options { shards_per_directory: 2, segment_bytes, budget_bytes, ..Options::default() };
            let directories = directories.iter().map(|name| self.0.join(name)).collect();
            HomeOptions { directories, store, ..HomeOptions::default() }
        }

        /// All that is below, sorted.
        fn all(&self) -> Vec<String> {
            fn below(at: &Path, root: &Path, all: &mut Vec<String>) {
                for entry in std::fs::read_dir(at).unwrap() {
                    let path = entry.unwrap().path();
                    all.push(path.strip_prefix(root).unwrap().display().to_string());
                    if path.is_dir() {
                        below(&path, root, all);
                    }
                }
            }
            let mut all = Vec::new();
            below(&self.0, &self.0, &mut all);
            all.sort();
            all
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_store_that_was_made_in_vain_leaves_what_was_there_before_and_nothing_else() {
        let scratch = Scratch::new("vain");
        std::fs::create_dir(scratch.0.join("old")).unwrap();
        let before = scratch.all();
        let home = Home::open(&scratch.options(&["new", "old"])).unwrap();
        std::fs::write(scratch.0.join("new/beside"), "").unwrap();
        assert!(scratch.all().len() > 8, "{:?}", scratch.all());
        home.take_back(&["beside"]);
        assert_eq!(scratch.all(), before);
        // Of a making that a power cut stopped there are empty folders: they stay, and stay empty.
        std::fs::create_dir(scratch.0.join("old/shard-0002")).unwrap();
        let before = scratch.all();
        Home::open(&scratch.options(&["new", "old"])).unwrap().take_back(&[]);
        assert_eq!(scratch.all(), before);
        std::fs::remove_dir(scratch.0.join("old/shard-0002")).unwrap();
        // What others put there is not a store's, and stays.
        let home = Home::open(&scratch.options(&["new"])).unwrap();
        std::fs::write(scratch.0.join("new/of another"), "").unwrap();
        home.take_back(&[]);
        assert_eq!(scratch.all(), ["new", "new/of another", "old"]);
    }

    #[test]
    fn a_store_that_was_there_stays_as_it_is() {
        let scratch = Scratch::new("there");
        let options = scratch.options(&["a", "b"]);
        // Twice: each end writes one checkpoint of two.
        (0..2).for_each(|_| Home::open(&options).unwrap().close().unwrap());
        let names = scratch.all();
        std::fs::write(scratch.0.join("a/beside"), "").unwrap();
        Home::open(&options).unwrap().take_back(&["beside"]);
        let mut expected = names;
        expected.push("a/beside".to_owned());
        expected.sort();
        assert_eq!(scratch.all(), expected);
        Home::open(&options).unwrap().close().unwrap();
    }

    #[test]
    fn a_store_that_another_process_made_before_the_lock_was_taken_stays() {
        let scratch = Scratch::new("meanwhile");
        let directory = scratch.0.join("a");
        let mut before = Before::look_and_make(&directory).unwrap();
        Home::open(&scratch.options(&["a"])).unwrap().close().unwrap();
        let mut names = scratch.all();
        before.look_again().unwrap();
        let file = File::open(directory.join(LOCK)).unwrap();
        remove(vec![Lock { file, at: 0, before }], &[]);
        names.retain(|name| name != "a/lock");
        assert_eq!(scratch.all(), names);
    }

    #[test]
    fn what_opening_refuses_is_not_left_behind() {
        let scratch = Scratch::new("refused");
        let refused =
            |directories: &[&str]| Home::open(&scratch.options(directories)).unwrap_err().to_string();
        std::fs::create_dir(scratch.0.join("full")).unwrap();
        std::fs::write(scratch.0.join("full/of another"), "").unwrap();
        let before = scratch.all();
        assert!(refused(&["new", "full"]).contains("is not empty"));
        assert_eq!(scratch.all(), before);
        // The second directory of a store of one.
        Home::open(&scratch.options(&["one"])).unwrap().close().unwrap();
        let before = scratch.all();
        assert!(refused(&["one", "two"]).contains("the store has 1 directories, but 2 were given"));
        assert_eq!(scratch.all(), before);
        let absent = refused(&["no disk/kvarts"]);
        let expected = ["no disk does not exist: mount its disk", "otherwise run `mkdir -p "];
        assert!(expected.iter().all(|part| absent.contains(part)), "{absent}");
        assert_eq!(scratch.all(), before);
        // A directory that another process has is that process's.
        let home = Home::open(&scratch.options(&["one"])).unwrap();
        let before = scratch.all();
        assert!(refused(&["three", "one"]).contains("is in use by another process"));
        assert_eq!(scratch.all(), before);
        home.close().unwrap();
    }
}
