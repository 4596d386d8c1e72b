//! What is on a simulated disk: names and bytes as a running program sees them, what of it is durable, and the
//! ordered list of changes between the two.
//!
//! The device's unit is the sector of 512 bytes: it is written wholly or not at all. A file's change is volatile
//! until a flush that was submitted after the change had completed; a directory's until its `SyncDir`. Cloning a
//! whole disk copies no bytes (pages are shared until written), so that a campaign can fork thousands of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvarts_contract::io_error::DirId;
use kvarts_store::io::{DirEntry, EntryKind};

use super::log::Mixer;

/// What the device writes wholly or not at all.
pub const SECTOR: u64 = 512;
/// What the file system allocates.
pub const PAGE: u64 = 4096;

/// Errors as the kernel gives them.
#[allow(missing_docs, reason = "named as in errno(3)")]
pub mod errno {
    pub const ENOENT: i32 = 2;
    pub const EINTR: i32 = 4;
    pub const EIO: i32 = 5;
    pub const EBADF: i32 = 9;
    pub const EAGAIN: i32 = 11;
    pub const ENOMEM: i32 = 12;
    pub const EBUSY: i32 = 16;
    pub const EEXIST: i32 = 17;
    pub const EXDEV: i32 = 18;
    pub const ENOTDIR: i32 = 20;
    pub const EISDIR: i32 = 21;
    pub const EINVAL: i32 = 22;
    pub const ENFILE: i32 = 23;
    pub const EMFILE: i32 = 24;
    pub const ENOSPC: i32 = 28;
    pub const EROFS: i32 = 30;
    pub const EDQUOT: i32 = 122;
    pub const ENOTEMPTY: i32 = 39;
    pub const ECANCELED: i32 = 125;
}
use errno::{EEXIST, EISDIR, ENOENT, ENOSPC, ENOTDIR, ENOTEMPTY, EXDEV};

/// A file or directory, by number.
pub type Ino = u64;

/// A page: `None` is allocated and reads as zeros.
type Page = Option<Arc<[u8]>>;

/// The bytes of a file.
#[derive(Clone, Default, Debug)]
pub(super) struct Content {
    pages: Arc<BTreeMap<u64, Page>>,
    pub(super) len: u64,
}

/// A range cut at page borders: page number, where in the page, and the range of the whole it covers.
fn pages(offset: u64, len: u64) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let at = offset + done;
            let within = at % PAGE;
            let part = (PAGE - within).min(len - done);
            let range = done as usize..(done + part) as usize;
            done += part;
            (at / PAGE, within as usize, range)
        })
    })
}

impl Content {
    /// Fills `into` from `offset`, with zeros where nothing was written. The length plays no part.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) {
        for (page, within, range) in pages(offset, into.len() as u64) {
            let into = &mut into[range];
            match self.pages.get(&page) {
                Some(Some(bytes)) => into.copy_from_slice(&bytes[within..within + into.len()]),
                _ => into.fill(0),
            }
        }
    }

    /// Puts bytes down. The length is the caller's to extend.
    fn put(&mut self, offset: u64, from: &[u8]) {
        let all = Arc::make_mut(&mut self.pages);
        for (page, within, range) in pages(offset, from.len() as u64) {
            let from = &from[range];
            let slot = all.entry(page).or_default();
            let bytes = slot.get_or_insert_with(|| vec![0; PAGE as usize].into());
            Arc::make_mut(bytes)[within..within + from.len()].copy_from_slice(from);
        }
    }

    fn allocate(&mut self, offset: u64, len: u64) {
        let all = Arc::make_mut(&mut self.pages);
        for (page, ..) in pages(offset, len) {
            all.entry(page).or_default();
        }
        self.len = self.len.max(offset + len);
    }

    fn punch(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len);
        let all = Arc::make_mut(&mut self.pages);
        let touched: Vec<u64> = all.range(offset / PAGE..end.div_ceil(PAGE)).map(|(page, _)| *page).collect();
        for page in touched {
            let from = offset.saturating_sub(page * PAGE) as usize;
            let to = (end - page * PAGE).min(PAGE) as usize;
            if to - from == PAGE as usize {
                all.remove(&page);
            } else if let Some(Some(bytes)) = all.get_mut(&page) {
                Arc::make_mut(bytes)[from..to].fill(0);
            }
        }
    }

    fn truncate(&mut self, len: u64) {
        if len < self.len {
            // What lies beyond the end reads as zeros if the file grows again.
            self.punch(len, u64::MAX - len);
        }
        self.len = len;
    }

    /// Pages that a write to the range would have to allocate.
    pub(super) fn missing(&self, offset: u64, len: u64) -> u64 {
        let wanted = offset / PAGE..(offset + len).div_ceil(PAGE);
        (wanted.end - wanted.start) - self.pages.range(wanted).count() as u64
    }

    pub(super) fn allocated(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    /// What was punched or never written, below the end: as the common file systems tell it.
    pub(super) fn holes(&self) -> Vec<(u64, u64)> {
        let end = self.len;
        let (mut holes, mut at) = (Vec::new(), 0);
        let written = self.pages.iter().filter(|(_, bytes)| bytes.is_some()).map(|(page, _)| page * PAGE);
        for data in written.filter(|data| *data < end).chain([end]) {
            if data > at {
                holes.push((at, data - at));
            }
            at = data + PAGE;
        }
        holes
    }

    fn digest(&self, into: &mut Mixer) {
        into.word(self.len);
        for (page, bytes) in &*self.pages {
            // Allocated and never written is a hole to every reader; zeros that were written are none.
            match bytes.as_deref() {
                Some(bytes) if *bytes == [0; PAGE as usize] => into.word(!*page),
                Some(bytes) => {
                    into.word(*page);
                    into.bytes(bytes);
                }
                None => {}
            }
        }
    }
}

/// Pages that a punch touches: each may be lost or kept by itself. Far more than any file has count as one.
pub(super) fn punched_pages(offset: u64, len: u64) -> usize {
    let pages = offset.saturating_add(len).div_ceil(PAGE) - offset / PAGE;
    if pages > 1 << 20 { 1 } else { pages as usize }
}

/// A change of a file that is not durable yet.
#[derive(Clone, Debug)]
pub(super) enum FileChange {
    /// Whole sectors from `offset` on, as they were after the write; the file then ends at `end` or later.
    /// A sector whose flag is false has become durable in another way.
    Write {
        offset: u64,
        bytes: Arc<[u8]>,
        end: u64,
        live: Vec<bool>,
    },
    Allocate {
        offset: u64,
        len: u64,
    },
    Punch {
        offset: u64,
        len: u64,
    },
    Truncate {
        len: u64,
    },
}

impl FileChange {
    /// Carries it out; of a write, the sectors that are live and that `keep` chooses; of a punch, the pages.
    fn apply(&self, content: &mut Content, keep: &dyn Fn(usize) -> bool) {
        match self {
            Self::Write { offset, bytes, end, live } => {
                for (at, sector) in bytes.chunks(SECTOR as usize).enumerate() {
                    if live[at] && keep(at) {
                        let from = offset + at as u64 * SECTOR;
                        content.put(from, sector);
                        content.len = content.len.max((from + SECTOR).min(*end));
                    }
                }
            }
            Self::Allocate { offset, len } => content.allocate(*offset, *len),
            Self::Punch { offset, len } => {
                let pages = punched_pages(*offset, *len);
                if pages == 1 && keep(0) || (0..pages).all(keep) {
                    return content.punch(*offset, *len);
                }
                for (_, page) in (offset / PAGE..).take(pages).enumerate().filter(|(at, _)| keep(*at)) {
                    let (from, to) = (page * PAGE, (page + 1) * PAGE);
                    let (from, to) = (from.max(*offset), to.min(offset.saturating_add(*len)));
                    content.punch(from, to - from);
                }
            }
            Self::Truncate { len } => content.truncate(*len),
        }
    }

    /// How many sectors a write has, or pages a punch.
    pub(super) fn sectors(&self) -> Option<usize> {
        match self {
            Self::Write { live, .. } => Some(live.len()),
            Self::Punch { offset, len } => Some(punched_pages(*offset, *len)),
            _ => None,
        }
    }

    /// The sectors of a write that matter: the others are durable, or hold what the disk has at a place that nothing
    /// else pending changes. A change of shape is one.
    fn telling<'a>(&'a self, file: &'a File) -> Box<dyn Iterator<Item = usize> + 'a> {
        if let Self::Punch { offset, len } = self {
            return Box::new(0..punched_pages(*offset, *len));
        }
        let (offset, bytes, live) = match self {
            Self::Write { offset, bytes, live, .. } => (*offset, &**bytes, &**live),
            _ => (0, [0; 1].as_slice(), [true].as_slice()),
        };
        let shape = self.sectors().is_none();
        let idle = move |at: usize, sector: &[u8]| {
            let from = offset + at as u64 * SECTOR;
            let mut there = [0; SECTOR as usize];
            file.durable.read(from, &mut there);
            let covers = |change: &Self| match change {
                Self::Write { offset, bytes, .. } => (*offset..offset + bytes.len() as u64).contains(&from),
                Self::Punch { offset, len } => (*offset..offset.saturating_add(*len)).contains(&from),
                Self::Truncate { len } => from + SECTOR > *len,
                Self::Allocate { .. } => false,
            };
            let touched = file.pending.iter().filter(|(_, change)| covers(change)).count();
            !shape && touched == 1 && there == sector
        };
        let sectors = bytes.chunks(SECTOR as usize).enumerate();
        Box::new(sectors.filter(move |(at, sector)| live[*at] && !idle(*at, sector)).map(|(at, _)| at))
    }

    /// Takes the sectors in `from .. to` out of a write: something newer is durable there.
    fn supersede(&mut self, from: u64, to: u64) {
        if let Self::Write { offset, live, .. } = self {
            for (at, live) in live.iter_mut().enumerate() {
                let sector = *offset + at as u64 * SECTOR;
                *live &= sector < from || sector >= to;
            }
        }
    }
}

/// A change of a directory that is not durable yet.
#[derive(Clone, Debug)]
pub(super) enum DirChange {
    Link { name: Box<str>, ino: Ino },
    Unlink { name: Box<str>, ino: Ino },
    Rename { from: Box<str>, to: Box<str>, ino: Ino },
}

impl DirChange {
    fn apply(&self, entries: &mut BTreeMap<Box<str>, Ino>) {
        let mut unlink = |name: &str, ino: Ino| {
            // Of another file by then, if an earlier change was lost.
            if entries.get(name) == Some(&ino) {
                entries.remove(name);
            }
        };
        match self {
            Self::Unlink { name, ino } => unlink(name, *ino),
            Self::Link { name, ino } => drop(entries.insert(name.clone(), *ino)),
            Self::Rename { from, to, ino } => {
                unlink(from, *ino);
                entries.insert(to.clone(), *ino);
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct File {
    pub(super) current: Content,
    durable: Content,
    pub(super) pending: Vec<(u64, FileChange)>,
    pub(super) handles: u32,
}

#[derive(Clone, Default, Debug)]
pub(super) struct Dir {
    current: BTreeMap<Box<str>, Ino>,
    durable: BTreeMap<Box<str>, Ino>,
    pub(super) pending: Vec<(u64, DirChange)>,
}

#[derive(Clone, Debug)]
pub(super) enum Node {
    File(File),
    Dir(Dir),
}

/// A disk's content. A clone is a snapshot and costs little.
#[derive(Clone, Debug)]
pub struct Media {
    pub(super) nodes: BTreeMap<Ino, Node>,
    roots: Vec<Ino>,
    next: Ino,
    /// Counts changes: a flush covers what is below its own number.
    pub(super) seq: u64,
    capacity: u64,
    /// What the file system gives back at once: parts of it that are punched become zeros.
    unit: u64,
}

type Outcome<T> = Result<T, i32>;

impl Media {
    /// Empty directories on a file system of `capacity` bytes.
    pub fn new(dirs: u16, capacity: u64) -> Self {
        let roots: Vec<Ino> = (0..u64::from(dirs)).collect();
        let nodes = roots.iter().map(|root| (*root, Node::Dir(Dir::default()))).collect();
        Self { nodes, next: roots.len() as u64, roots, seq: 0, capacity, unit: PAGE }
    }

    /// The same on a file system with larger units than a page.
    pub fn with_unit(self, unit: u64) -> Self {
        Self { unit, ..self }
    }

    /// Lets the file system grow or shrink.
    pub fn set_capacity(&mut self, capacity: u64) {
        self.capacity = capacity;
    }

    /// Free and total bytes.
    pub fn space(&self) -> (u64, u64) {
        let used: u64 =
            self.live().iter().map(|ino| self.file(*ino).map_or(0, |file| file.current.allocated())).sum();
        (self.capacity.saturating_sub(used), self.capacity)
    }

    /// What a running program can reach: by name, or because it has it open.
    fn live(&self) -> BTreeSet<Ino> {
        let open = |(ino, node): (&Ino, &Node)| match node {
            Node::File(file) => (file.handles > 0).then_some(*ino),
            Node::Dir(_) => None,
        };
        let mut live: BTreeSet<Ino> = self.nodes.iter().filter_map(open).collect();
        let mut next = self.roots.clone();
        while let Some(ino) = next.pop() {
            if live.insert(ino)
                && let Some(Node::Dir(dir)) = self.nodes.get(&ino)
            {
                next.extend(dir.current.values());
            }
        }
        live
    }

    /// The directory that each file and folder is in, by whatever name it has, had or may get.
    pub(super) fn dirs(&self) -> BTreeMap<Ino, u16> {
        let mut found = BTreeMap::new();
        let mut next: Vec<(Ino, u16)> = self.roots.iter().copied().zip(0..).collect();
        while let Some((ino, root)) = next.pop() {
            if found.insert(ino, root).is_some() {
                continue;
            }
            let Some(Node::Dir(dir)) = self.nodes.get(&ino) else { continue };
            let pending = dir.pending.iter().map(|(_, change)| match change {
                DirChange::Link { ino, .. }
                | DirChange::Unlink { ino, .. }
                | DirChange::Rename { ino, .. } => ino,
            });
            let all = dir.current.values().chain(dir.durable.values()).chain(pending);
            next.extend(all.map(|ino| (*ino, root)));
        }
        found
    }

    /// What a power cut may keep or lose by itself: the number of a change, and of a write the sector.
    pub(super) fn units(&self) -> Vec<(u64, usize)> {
        let mut units = Vec::new();
        for node in self.nodes.values() {
            match node {
                Node::File(file) => {
                    let of = |(seq, change): &(u64, FileChange)| {
                        change.telling(file).map(|sector| (*seq, sector)).collect::<Vec<_>>()
                    };
                    units.extend(file.pending.iter().flat_map(of));
                }
                Node::Dir(dir) => units.extend(dir.pending.iter().map(|(seq, _)| (*seq, 0))),
            }
        }
        units.sort_unstable();
        units
    }

    pub(super) fn file(&self, ino: Ino) -> Outcome<&File> {
        match self.nodes.get(&ino) {
            Some(Node::File(file)) => Ok(file),
            Some(Node::Dir(_)) => Err(EISDIR),
            None => Err(ENOENT),
        }
    }

    pub(super) fn file_mut(&mut self, ino: Ino) -> Outcome<&mut File> {
        match self.nodes.get_mut(&ino) {
            Some(Node::File(file)) => Ok(file),
            Some(Node::Dir(_)) => Err(EISDIR),
            None => Err(ENOENT),
        }
    }

    fn dir(&self, ino: Ino) -> Outcome<&Dir> {
        match self.nodes.get(&ino) {
            Some(Node::Dir(dir)) => Ok(dir),
            Some(Node::File(_)) => Err(ENOTDIR),
            None => Err(ENOENT),
        }
    }

    fn dir_mut(&mut self, ino: Ino) -> Outcome<&mut Dir> {
        match self.nodes.get_mut(&ino) {
            Some(Node::Dir(dir)) => Ok(dir),
            Some(Node::File(_)) => Err(ENOTDIR),
            None => Err(ENOENT),
        }
    }

    /// The node at a path; the empty path is the root.
    pub(super) fn look_up(&self, dir: DirId, path: &str) -> Outcome<Ino> {
        let root = *self.roots.get(usize::from(dir.0)).ok_or(ENOENT)?;
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        parts.try_fold(root, |at, part| self.dir(at)?.current.get(part).copied().ok_or(ENOENT))
    }

    /// The directory of a path's last component, and that component.
    fn parent<'a>(&self, dir: DirId, path: &'a str) -> Outcome<(Ino, &'a str)> {
        let (above, last) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.look_up(dir, above)?, last))
    }

    fn changed(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    fn change_dir(&mut self, ino: Ino, change: DirChange) -> Outcome<()> {
        let seq = self.changed();
        let dir = self.dir_mut(ino)?;
        change.apply(&mut dir.current);
        dir.pending.push((seq, change));
        Ok(())
    }

    /// Carries out a change of a file, volatile until flushed.
    pub(super) fn change_file(&mut self, ino: Ino, change: FileChange) -> Outcome<()> {
        let seq = self.changed();
        let file = self.file_mut(ino)?;
        change.apply(&mut file.current, &|_| true);
        file.pending.push((seq, change));
        Ok(())
    }

    /// Punches whole units, and writes zeros over what else of the range holds something.
    pub(super) fn punch(&mut self, ino: Ino, offset: u64, len: u64) -> Outcome<()> {
        let end = offset.saturating_add(len);
        let (from, to) = (offset.next_multiple_of(self.unit), end / self.unit * self.unit);
        if self.unit == PAGE {
            return self.change_file(ino, FileChange::Punch { offset, len });
        }
        if from >= to {
            return self.zero(ino, offset, end);
        }
        self.change_file(ino, FileChange::Punch { offset: from, len: to - from })?;
        self.zero(ino, offset, from)?;
        self.zero(ino, to, end)
    }

    fn zero(&mut self, ino: Ino, from: u64, to: u64) -> Outcome<()> {
        let written = |content: &Content, page: u64| matches!(content.pages.get(&page), Some(Some(_)));
        for (page, within, range) in pages(from, to.saturating_sub(from)).collect::<Vec<_>>() {
            if written(&self.file(ino)?.current, page) {
                self.write(ino, page * PAGE + within as u64, &vec![0; range.len()], false)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, parent: Ino, name: &str, node: Node) -> Outcome<Ino> {
        let ino = self.next;
        self.next += 1;
        self.nodes.insert(ino, node);
        self.change_dir(parent, DirChange::Link { name: name.into(), ino })?;
        Ok(ino)
    }

    /// A file by name; made if absent and wanted.
    pub(super) fn open(&mut self, dir: DirId, path: &str, create: bool) -> Outcome<Ino> {
        let (parent, name) = self.parent(dir, path)?;
        let there = self.dir(parent)?.current.get(name).copied();
        match there {
            Some(ino) => self.file(ino).map(|_| ino),
            None if create && !name.is_empty() => {
                let empty = Content::default();
                let file = File { current: empty.clone(), durable: empty, pending: Vec::new(), handles: 0 };
                self.add(parent, name, Node::File(file))
            }
            None => Err(if name.is_empty() { EISDIR } else { ENOENT }),
        }
    }

    pub(super) fn make_dir(&mut self, dir: DirId, path: &str) -> Outcome<()> {
        let (parent, name) = self.parent(dir, path)?;
        if name.is_empty() || self.dir(parent)?.current.contains_key(name) {
            return Err(EEXIST);
        }
        self.add(parent, name, Node::Dir(Dir::default())).map(drop)
    }

    pub(super) fn remove(&mut self, dir: DirId, path: &str) -> Outcome<()> {
        let (parent, name) = self.parent(dir, path)?;
        let ino = *self.dir(parent)?.current.get(name).ok_or(ENOENT)?;
        self.file(ino)?;
        self.change_dir(parent, DirChange::Unlink { name: name.into(), ino })
    }

    pub(super) fn rename(&mut self, dir: DirId, from: &str, to: (DirId, &str)) -> Outcome<()> {
        let (parent, name) = self.parent(dir, from)?;
        let (to_parent, to_name) = self.parent(to.0, to.1)?;
        if parent != to_parent {
            return Err(EXDEV);
        }
        let entries = &self.dir(parent)?.current;
        let ino = *entries.get(name).ok_or(ENOENT)?;
        match entries.get(to_name).and_then(|target| self.nodes.get(target)) {
            _ if name == to_name => return Ok(()),
            None => {}
            Some(Node::Dir(target)) if self.dir(ino).is_ok() && !target.current.is_empty() => {
                return Err(ENOTEMPTY);
            }
            Some(Node::Dir(_)) if self.dir(ino).is_err() => return Err(EISDIR),
            Some(Node::File(_)) if self.dir(ino).is_ok() => return Err(ENOTDIR),
            Some(_) => {}
        }
        self.change_dir(parent, DirChange::Rename { from: name.into(), to: to_name.into(), ino })
    }

    /// Makes the directory's changes before number `bound` durable.
    pub(super) fn sync_dir(&mut self, dir: DirId, path: &str, bound: u64) -> Outcome<()> {
        let ino = self.look_up(dir, path)?;
        let dir = self.dir_mut(ino)?;
        let covered = dir.pending.partition_point(|(seq, _)| *seq <= bound);
        for (_, change) in dir.pending.drain(..covered) {
            change.apply(&mut dir.durable);
        }
        Ok(())
    }

    pub(super) fn list(&self, dir: DirId, path: &str) -> Outcome<Vec<DirEntry>> {
        let kind = |ino: &Ino| if self.dir(*ino).is_ok() { EntryKind::Dir } else { EntryKind::File };
        let entries = &self.dir(self.look_up(dir, path)?)?.current;
        Ok(entries.iter().map(|(name, ino)| DirEntry { name: name.clone(), kind: kind(ino) }).collect())
    }

    /// Bytes at `offset`, up to the end of the file; how many there were.
    pub(super) fn read(&self, ino: Ino, offset: u64, into: &mut [u8]) -> Outcome<usize> {
        let content = &self.file(ino)?.current;
        let len = (into.len() as u64).min(content.len.saturating_sub(offset)) as usize;
        content.read(offset, &mut into[..len]);
        Ok(len)
    }

    /// Writes; with `sync`, durably. A full disk takes none of it.
    pub(super) fn write(&mut self, ino: Ino, offset: u64, from: &[u8], sync: bool) -> Outcome<()> {
        self.make_room(ino, offset, from.len() as u64)?;
        let change = self.whole_sectors(ino, offset, from)?;
        self.change_file(ino, change)?;
        if sync {
            self.settle_last(ino)?;
        }
        Ok(())
    }

    /// Of a write, some sectors only: what a failed or torn one may leave behind.
    pub(super) fn write_some(
        &mut self,
        ino: Ino,
        offset: u64,
        from: &[u8],
        mut keep: impl FnMut() -> bool,
    ) -> Outcome<()> {
        self.make_room(ino, offset, from.len() as u64)?;
        let mut change = self.whole_sectors(ino, offset, from)?;
        if let FileChange::Write { live, .. } = &mut change {
            live.iter_mut().for_each(|live| *live = keep());
        }
        self.change_file(ino, change)
    }

    fn make_room(&self, ino: Ino, offset: u64, len: u64) -> Outcome<()> {
        let missing = self.file(ino)?.current.missing(offset, len) * PAGE;
        if missing > 0 && missing > self.space().0 { Err(ENOSPC) } else { Ok(()) }
    }

    /// The sectors that a write touches, as they are after it.
    fn whole_sectors(&self, ino: Ino, offset: u64, from: &[u8]) -> Outcome<FileChange> {
        let end = offset + from.len() as u64;
        let first = offset / SECTOR * SECTOR;
        let last = end.next_multiple_of(SECTOR);
        // Bytes of an older, longer write in the last sector go with it.
        let end = end.max(self.file(ino)?.current.len.min(last));
        let mut bytes = vec![0; (last - first) as usize];
        let head = (offset - first) as usize;
        if from.len() < bytes.len() {
            self.file(ino)?.current.read(first, &mut bytes);
        }
        bytes[head..head + from.len()].copy_from_slice(from);
        let live = vec![true; bytes.len() / SECTOR as usize];
        Ok(FileChange::Write { offset: first, bytes: bytes.into(), end, live })
    }

    /// Makes the last write of a file durable. Older writes stay volatile where it does not cover them; but a
    /// change of the file's shape goes with it, and what is older than that, as they would in a journal.
    fn settle_last(&mut self, ino: Ino) -> Outcome<()> {
        let file = self.file_mut(ino)?;
        let Some((_, last)) = file.pending.pop() else { return Ok(()) };
        let is_shape = |(_, change): &(u64, FileChange)| !matches!(change, FileChange::Write { .. });
        let shaped = file.pending.iter().rposition(is_shape).map_or(0, |at| at + 1);
        for (_, change) in file.pending.drain(..shaped) {
            change.apply(&mut file.durable, &|_| true);
        }
        if let FileChange::Write { offset, bytes, .. } = &last {
            let to = offset + bytes.len() as u64;
            file.pending.iter_mut().for_each(|(_, write)| write.supersede(*offset, to));
        }
        last.apply(&mut file.durable, &|_| true);
        Ok(())
    }

    /// Makes the file's changes before number `bound` durable, or with `dropped` forgets them: they are seen by
    /// reads until the machine stops, no later flush writes them, and none says so.
    pub(super) fn flush(&mut self, ino: Ino, bound: u64, dropped: bool) -> Outcome<()> {
        let file = self.file_mut(ino)?;
        let covered = file.pending.partition_point(|(seq, _)| *seq <= bound);
        for (_, change) in file.pending.drain(..covered) {
            if !dropped {
                change.apply(&mut file.durable, &|_| true);
            }
        }
        Ok(())
    }

    pub(super) fn allocate(&mut self, ino: Ino, offset: u64, len: u64) -> Outcome<()> {
        self.make_room(ino, offset, len)?;
        self.change_file(ino, FileChange::Allocate { offset, len })
    }

    /// Only the changes that `keep` chooses (by number; of a write, by sector) reach the durable state, which is
    /// then all there is. The machine is off: nothing is open.
    pub(super) fn settle(&mut self, keep: &dyn Fn(u64, usize) -> bool) {
        for node in self.nodes.values_mut() {
            match node {
                Node::File(file) => {
                    for (seq, change) in file.pending.drain(..) {
                        let parts = matches!(change, FileChange::Write { .. } | FileChange::Punch { .. });
                        if parts || keep(seq, 0) {
                            change.apply(&mut file.durable, &|sector| keep(seq, sector));
                        }
                    }
                    file.current = file.durable.clone();
                    file.handles = 0;
                }
                Node::Dir(dir) => {
                    for (seq, change) in dir.pending.drain(..) {
                        if keep(seq, 0) {
                            change.apply(&mut dir.durable);
                        }
                    }
                    dir.current = dir.durable.clone();
                }
            }
        }
        self.forget_unreachable();
    }

    /// Frees what nothing can lead to any more. Only on a disk whose changes are all settled.
    fn forget_unreachable(&mut self) {
        let live = self.live();
        self.nodes.retain(|ino, _| live.contains(ino));
    }

    /// The process is gone: nothing is open.
    pub(super) fn close_all(&mut self) {
        for node in self.nodes.values_mut() {
            if let Node::File(file) = node {
                file.handles = 0;
            }
        }
    }

    /// A digest of all names and bytes as a program sees them: equal for disks that no program can tell apart.
    pub fn digest(&self) -> u128 {
        let mut mixer = Mixer::new(0);
        self.walk(|path, node| {
            mixer.text(path);
            match node {
                Node::File(file) => file.current.digest(&mut mixer),
                Node::Dir(_) => mixer.word(u64::MAX),
            }
        });
        mixer.value()
    }

    fn walk(&self, mut see: impl FnMut(&str, &Node)) {
        self.walk_by_number(|path, _, node| see(path, node));
    }

    fn walk_by_number(&self, mut see: impl FnMut(&str, Ino, &Node)) {
        let mut next: Vec<_> = self.roots.iter().rev().map(|ino| (ino.to_string(), *ino)).collect();
        while let Some((path, ino)) = next.pop() {
            let Some(node) = self.nodes.get(&ino) else { continue };
            see(&path, ino, node);
            if let Node::Dir(dir) = node {
                next.extend(dir.current.iter().rev().map(|(name, ino)| (format!("{path}/{name}"), *ino)));
            }
        }
    }

    /// The paths of these files, each after the number of its directory and a slash.
    pub(super) fn names(&self, of: &BTreeSet<Ino>) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        self.walk_by_number(|path, ino, _| {
            if of.contains(&ino) {
                names.insert(path.to_owned());
            }
        });
        names
    }

    /// The paths of all files, each after the number of its directory and a slash.
    pub fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.walk(|path, node| {
            if matches!(node, Node::File(_)) {
                paths.push(path.to_owned());
            }
        });
        paths
    }

    /// The paths of all folders, each after the number of its directory and a slash.
    pub fn folders(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.walk(|path, node| {
            if matches!(node, Node::Dir(_)) {
                paths.push(path.to_owned());
            }
        });
        paths
    }

    /// A file's bytes as a program sees them.
    pub fn contents(&self, dir: DirId, path: &str) -> Option<Vec<u8>> {
        let content = &self.file(self.look_up(dir, path).ok()?).ok()?.current;
        let mut bytes = vec![0; usize::try_from(content.len).ok()?];
        content.read(0, &mut bytes);
        Some(bytes)
    }

    /// Bytes that a file has on the device.
    pub fn allocated(&self, dir: DirId, path: &str) -> Option<u64> {
        let file = self.look_up(dir, path).and_then(|ino| self.file(ino));
        file.map(|file| file.current.allocated()).ok()
    }

    /// What a file's bytes are not there of, as a program is told: (offset, bytes).
    pub fn holes(&self, dir: DirId, path: &str) -> Vec<(u64, u64)> {
        let file = self.look_up(dir, path).and_then(|ino| self.file(ino));
        file.map(|file| file.current.holes()).unwrap_or_default()
    }

    /// Makes holes in a file behind everybody's back, durably.
    pub fn plant_holes(&mut self, dir: DirId, path: &str, holes: &[(u64, u64)]) {
        let Ok(ino) = self.look_up(dir, path) else { return };
        let Ok(file) = self.file_mut(ino) else { return };
        for &(offset, len) in holes {
            file.current.punch(offset, len);
            file.durable.punch(offset, len);
        }
    }

    /// Changes bytes of a file behind everybody's back, durably: what a failing medium does. False: no such bytes.
    pub fn corrupt(
        &mut self,
        dir: DirId,
        path: &str,
        offset: u64,
        with: impl FnOnce(&mut [u8]),
        len: usize,
    ) -> bool {
        let Ok(ino) = self.look_up(dir, path) else { return false };
        let Ok(file) = self.file_mut(ino) else { return false };
        if offset.checked_add(len as u64).is_none_or(|end| end > file.current.len) {
            return false;
        }
        let mut bytes = vec![0; len];
        file.current.read(offset, &mut bytes);
        with(&mut bytes);
        file.current.put(offset, &bytes);
        file.durable.put(offset, &bytes);
        file.durable.len = file.durable.len.max(offset + len as u64);
        true
    }

    /// Makes a folder, durably. False: it cannot be made.
    pub fn plant_folder(&mut self, dir: DirId, path: &str) -> bool {
        let made = self.make_dir(dir, path).is_ok();
        let Ok((parent, _)) = self.parent(dir, path) else { return false };
        let Ok(dir) = self.dir_mut(parent) else { return false };
        for (_, change) in dir.pending.drain(..) {
            change.apply(&mut dir.durable);
        }
        made
    }

    /// Writes a whole file, durably, and all names beside it: for planting what a test needs. False: its
    /// directory is not there.
    pub fn plant(&mut self, dir: DirId, path: &str, bytes: &[u8]) -> bool {
        let Ok(ino) = self.open(dir, path, true) else { return false };
        let Ok((parent, _)) = self.parent(dir, path) else { return false };
        let Ok(file) = self.file_mut(ino) else { return false };
        let mut content = Content::default();
        content.put(0, bytes);
        content.len = bytes.len() as u64;
        file.pending.clear();
        file.durable = content.clone();
        file.current = content;
        let Ok(dir) = self.dir_mut(parent) else { return false };
        for (_, change) in dir.pending.drain(..) {
            change.apply(&mut dir.durable);
        }
        true
    }
}
