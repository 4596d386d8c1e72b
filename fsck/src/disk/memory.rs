//! A directory in memory: for tests of damage and of power cuts, with every change recorded.
//!
//! A cut keeps what was synced and, of the rest, whatever the test chooses, sector by sector.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Disk, DiskFile, DiskWriter, Node, NodeKind};

/// What a device writes wholly or not at all.
const SECTOR: usize = 512;

/// A change, in the order in which they were made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Bytes of a file.
    Write(String, u64, Vec<u8>),
    /// A hole: offset, bytes.
    Punch(String, u64, u64),
    /// The length of a file.
    SetLen(String, u64),
    /// A file is durable up to here.
    Sync(String),
    /// A folder was made.
    MakeFolder(String),
    /// A name was changed.
    Rename(String, String),
    /// A file's name was taken away.
    Remove(String),
    /// An empty folder was taken away.
    RemoveFolder(String),
    /// The names in a folder are durable up to here.
    SyncFolder(String),
}

#[derive(Clone, Debug, Default)]
struct Tree {
    files: BTreeMap<String, Arc<Vec<u8>>>,
    folders: BTreeSet<String>,
    /// Names that are something else than a file or folder.
    odd: BTreeMap<String, NodeKind>,
    /// Pages that the device does not give: file and page number.
    bad: BTreeSet<(String, u64)>,
    /// Pages that are holes: file and page number. They read as zeros.
    holes: BTreeSet<(String, u64)>,
    /// A page that is punched becomes zeros and no hole.
    solid: bool,
    /// Files that may not be opened, folders that may not be listed.
    refused: BTreeSet<String>,
    steps: Vec<Step>,
    /// Changes that still succeed; then everything fails, as after a power cut.
    fuse: Option<usize>,
}

/// A directory in memory. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemoryDisk(Arc<Mutex<Tree>>);

impl MemoryDisk {
    /// An empty directory.
    pub fn new() -> Self {
        Self::default()
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A directory of its own with the same content and no history.
    pub fn fork(&self) -> Self {
        let tree = self.tree();
        Self(Arc::new(Mutex::new(Tree { steps: Vec::new(), fuse: None, ..tree.clone() })))
    }

    /// Puts a file down, replacing what is there.
    pub fn plant(&self, path: &str, bytes: Vec<u8>) {
        let mut tree = self.tree();
        if let Some((folder, _)) = path.rsplit_once('/') {
            tree.folders.insert(folder.to_owned());
        }
        tree.holes.retain(|(file, _)| file != path);
        tree.files.insert(path.to_owned(), Arc::new(bytes));
    }

    /// Makes holes of whole pages: (offset, bytes).
    pub fn punch(&self, path: &str, holes: &[(u64, u64)]) {
        let page = super::ALIGN as u64;
        for &(at, len) in holes {
            self.tamper(path, |bytes| {
                let range = usize::try_from(at).unwrap_or(usize::MAX)..;
                let rest = bytes.get_mut(range).unwrap_or_default();
                let len = usize::try_from(len).unwrap_or(usize::MAX).min(rest.len());
                rest.iter_mut().take(len).for_each(|byte| *byte = 0);
            });
            let pages = at / page..at.saturating_add(len).div_ceil(page);
            self.tree().holes.extend(pages.map(|page| (path.to_owned(), page)));
        }
    }

    /// The holes of a file.
    pub fn holes(&self, path: &str) -> Vec<(u64, u64)> {
        let tree = self.tree();
        let page = super::ALIGN as u64;
        let mut holes: Vec<(u64, u64)> = Vec::new();
        for (_, number) in tree.holes.iter().filter(|(file, _)| file == path) {
            let at = number.saturating_mul(page);
            match holes.last_mut() {
                Some((start, len)) if start.saturating_add(*len) == at => *len = len.saturating_add(page),
                _ => holes.push((at, page)),
            }
        }
        holes
    }

    /// From now on a request for a hole writes zeros, as on a file system whose units are larger than a page.
    pub fn make_no_holes(&self) {
        self.tree().solid = true;
    }

    /// Makes a folder without a trace.
    pub fn plant_folder(&self, path: &str) {
        self.tree().folders.insert(path.to_owned());
    }

    /// Makes a name that is no file.
    pub fn plant_odd(&self, path: &str, kind: NodeKind) {
        self.tree().odd.insert(path.to_owned(), kind);
    }

    /// Takes a file away.
    pub fn remove(&self, path: &str) {
        self.tree().files.remove(path);
    }

    /// Takes a folder away, with everything in it.
    pub fn remove_folder(&self, path: &str) {
        let mut tree = self.tree();
        let inside = format!("{path}/");
        tree.files.retain(|file, _| !file.starts_with(&inside));
        tree.odd.retain(|name, _| !name.starts_with(&inside));
        tree.holes.retain(|(file, _)| !file.starts_with(&inside));
        tree.folders.retain(|folder| folder != path && !folder.starts_with(&inside));
    }

    /// The bytes of a file.
    pub fn contents(&self, path: &str) -> Option<Vec<u8>> {
        self.tree().files.get(path).map(|bytes| bytes.to_vec())
    }

    /// All files, by name.
    pub fn files(&self) -> Vec<String> {
        self.tree().files.keys().cloned().collect()
    }

    /// Changes a file without a trace.
    pub fn tamper(&self, path: &str, with: impl FnOnce(&mut Vec<u8>)) {
        let mut tree = self.tree();
        let Some(bytes) = tree.files.get_mut(path) else { return };
        with(Arc::make_mut(bytes));
        let bytes = Arc::clone(bytes);
        // A page that holds something is no hole any more.
        tree.holes.retain(|(file, page)| {
            let pages = bytes.chunks(super::ALIGN);
            let mut page = pages.skip(usize::try_from(*page).unwrap_or(usize::MAX)).take(1).flatten();
            file != path || page.all(|byte| *byte == 0)
        });
    }

    /// Makes a page unreadable.
    pub fn spoil(&self, path: &str, page: u64) {
        self.tree().bad.insert((path.to_owned(), page));
    }

    /// Makes a file that may not be opened, or a folder that may not be listed.
    pub fn refuse(&self, path: &str) {
        self.tree().refused.insert(path.to_owned());
    }

    /// Lets everything fail after this many further changes.
    pub fn cut_after(&self, changes: usize) {
        self.tree().fuse = Some(changes);
    }

    /// The changes so far.
    pub fn steps(&self) -> Vec<Step> {
        self.tree().steps.clone()
    }

    /// Makes one change, without recording it. Of a write that the power cut, `keep` says which sectors arrived.
    pub fn apply(&self, step: &Step, keep: &mut dyn FnMut() -> bool) {
        let mut tree = self.tree();
        match step {
            Step::Write(path, offset, bytes) => {
                let page = super::ALIGN as u64;
                let end = offset.saturating_add(bytes.len() as u64).div_ceil(page);
                for number in offset / page..end {
                    tree.holes.remove(&(path.clone(), number));
                }
                let file = Arc::make_mut(tree.files.entry(path.clone()).or_default());
                let mut at = usize::try_from(*offset).unwrap_or(usize::MAX);
                for sector in bytes.chunks(SECTOR) {
                    if keep() {
                        file.resize(file.len().max(at.saturating_add(sector.len())), 0);
                        if let Some(place) = file.get_mut(at..at.saturating_add(sector.len())) {
                            place.copy_from_slice(sector);
                        }
                    }
                    at = at.saturating_add(sector.len());
                }
            }
            Step::Punch(path, at, len) => {
                let page = super::ALIGN as u64;
                let kept: Vec<u64> = (at / page..at.saturating_add(*len) / page).filter(|_| keep()).collect();
                let file = Arc::make_mut(tree.files.entry(path.clone()).or_default());
                for number in &kept {
                    let from = usize::try_from(number.saturating_mul(page)).unwrap_or(usize::MAX);
                    let rest = file.get_mut(from..).unwrap_or_default();
                    rest.iter_mut().take(super::ALIGN).for_each(|byte| *byte = 0);
                }
                if !tree.solid {
                    tree.holes.extend(kept.into_iter().map(|number| (path.clone(), number)));
                }
            }
            Step::SetLen(path, len) if keep() => {
                let len = usize::try_from(*len).unwrap_or(usize::MAX);
                Arc::make_mut(tree.files.entry(path.clone()).or_default()).resize(len, 0);
            }
            Step::Remove(path) if keep() => {
                tree.holes.retain(|(file, _)| file != path);
                drop(tree.files.remove(path));
            }
            Step::RemoveFolder(path) if keep() => {
                // Where this is durable, so is that it was empty.
                tree.files.retain(|file, _| !file.starts_with(&format!("{path}/")));
                tree.folders.remove(path);
            }
            Step::MakeFolder(path) if keep() => drop(tree.folders.insert(path.clone())),
            Step::Rename(from, to) if keep() => {
                if let Some(bytes) = tree.files.remove(from) {
                    tree.files.insert(to.clone(), bytes);
                    let moved = tree.holes.iter().filter(|(file, _)| file == from);
                    let moved: Vec<_> = moved.map(|(_, page)| (to.clone(), *page)).collect();
                    tree.holes.extend(moved);
                    tree.holes.retain(|(file, _)| file != from);
                } else if tree.folders.remove(from) {
                    tree.folders.insert(to.clone());
                    let moved: Vec<String> = tree
                        .files
                        .keys()
                        .filter(|path| path.starts_with(&format!("{from}/")))
                        .cloned()
                        .collect();
                    for path in moved {
                        let name = path.replacen(from.as_str(), to, 1);
                        if let Some(bytes) = tree.files.remove(&path) {
                            tree.files.insert(name, bytes);
                        }
                    }
                }
            }
            _ => {}
        }
    }

    fn change(&self, step: Step) -> io::Result<()> {
        {
            let mut tree = self.tree();
            match &mut tree.fuse {
                Some(0) => return Err(io::Error::other("the power is cut")),
                Some(left) => *left = left.saturating_sub(1),
                None => {}
            }
            tree.steps.push(step.clone());
        }
        self.apply(&step, &mut || true);
        Ok(())
    }
}

impl Disk for MemoryDisk {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn visit(&self, folder: &str, each: &mut dyn FnMut(Node)) -> io::Result<()> {
        let tree = self.tree();
        if tree.refused.contains(folder) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if !folder.is_empty() && !tree.folders.contains(folder) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let inside = |path: &str| -> Option<String> {
            let name = if folder.is_empty() { path } else { path.strip_prefix(folder)?.strip_prefix('/')? };
            (!name.contains('/')).then(|| name.to_owned())
        };
        let files = tree.files.keys().map(|path| (path, NodeKind::File));
        let folders = tree.folders.iter().map(|path| (path, NodeKind::Folder));
        let odd = tree.odd.iter().map(|(path, kind)| (path, *kind));
        let nodes: Vec<Node> = files
            .chain(folders)
            .chain(odd)
            .filter_map(|(path, kind)| Some(Node { name: inside(path)?, kind }))
            .collect();
        drop(tree);
        nodes.into_iter().for_each(each);
        Ok(())
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        let tree = self.tree();
        if tree.refused.contains(path) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let bytes = tree.files.get(path).map(Arc::clone).ok_or(io::ErrorKind::NotFound)?;
        let bad = tree.bad.iter().filter(|(file, _)| file == path).map(|(_, page)| *page).collect();
        drop(tree);
        Ok(Box::new(MemoryFile { bytes, bad, holes: self.holes(path) }))
    }
}

impl DiskWriter for MemoryDisk {
    fn write_at(&self, path: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.change(Step::Write(path.to_owned(), offset, bytes.to_vec()))
    }

    fn punch(&self, path: &str, offset: u64, bytes: u64) -> io::Result<()> {
        self.change(Step::Punch(path.to_owned(), offset, bytes))
    }

    fn set_len(&self, path: &str, len: u64) -> io::Result<()> {
        self.change(Step::SetLen(path.to_owned(), len))
    }

    fn sync(&self, path: &str) -> io::Result<()> {
        self.change(Step::Sync(path.to_owned()))
    }

    fn make_folder(&self, path: &str) -> io::Result<()> {
        self.change(Step::MakeFolder(path.to_owned()))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let taken = {
            let tree = self.tree();
            tree.files.contains_key(to) || tree.folders.contains(to)
        };
        if taken {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.change(Step::Rename(from.to_owned(), to.to_owned()))
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.change(Step::Remove(path.to_owned()))
    }

    fn remove_folder(&self, path: &str) -> io::Result<()> {
        let inside = format!("{path}/");
        if self.tree().files.keys().any(|file| file.starts_with(&inside)) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        self.change(Step::RemoveFolder(path.to_owned()))
    }

    fn sync_folder(&self, path: &str) -> io::Result<()> {
        self.change(Step::SyncFolder(path.to_owned()))
    }
}

#[derive(Debug)]
struct MemoryFile {
    bytes: Arc<Vec<u8>>,
    bad: BTreeSet<u64>,
    holes: Vec<(u64, u64)>,
}

impl DiskFile for MemoryFile {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn allocated(&self) -> u64 {
        let holes = self.holes.iter().map(|(_, len)| *len).fold(0, u64::saturating_add);
        self.len().saturating_sub(holes)
    }

    fn holes(&self) -> Vec<(u64, u64)> {
        self.holes.clone()
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let page = super::ALIGN as u64;
        let end = offset.saturating_add(into.len() as u64);
        if self.bad.range(offset / page..end.div_ceil(page)).next().is_some() {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error()));
        }
        let rest = usize::try_from(offset).ok().and_then(|at| self.bytes.get(at..)).unwrap_or_default();
        let len = rest.len().min(into.len());
        if let (Some(to), Some(from)) = (into.get_mut(..len), rest.get(..len)) {
            to.copy_from_slice(from);
        }
        Ok(len)
    }
}
