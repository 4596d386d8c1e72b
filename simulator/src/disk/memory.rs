//! A disk in memory that keeps no zeros: what the engine writes of its own (headers, footers, checkpoints) is here, and
//! blocks of zeros take no memory, however many there are.
//!
//! Every operation completes at the next reap, in the order of submission. Nothing fails, nothing is lost: what a real
//! file system does without faults.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::{
    buffers::{Region, SharedBuf},
    io_error::{FileId, Name},
};
use kvarts_store::io::{Completion, DirEntry, EntryKind, Io, IoFacts, MetaOp, Op, Reply, Token, Unpark};

use super::pages::{PAGE_BYTES, Pages};

const PAGE: usize = PAGE_BYTES as usize;
const ENOENT: i32 = -2;
const EBADF: i32 = -9;
const EEXIST: i32 = -17;
/// Free bytes of the file system: it is never the disk that is full.
const FREE_BYTES: u64 = 1 << 60;

#[derive(Debug, Default)]
struct File {
    len: u64,
    /// Pages that the file system has set aside.
    allocated: Pages,
    /// Pages of these that were written.
    written: Pages,
    /// Pages that are not all zero.
    content: BTreeMap<u64, Box<[u8; PAGE]>>,
}

impl File {
    fn read(&self, mut offset: u64, into: &SharedBuf) -> usize {
        let here = self.len.saturating_sub(offset).min(into.len() as u64) as usize;
        let Some(into) = into.slice(0, here).filter(|into| !into.is_empty()) else { return 0 };
        into.fill(0);
        let end = offset + here as u64;
        let start = offset;
        for (page, bytes) in self.content.range(offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES)) {
            let (from, to) = (page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
            offset = start.max(from);
            let some = bytes.get((offset - from) as usize..(end.min(to) - from) as usize);
            into.copy_in((offset - start) as usize, some.unwrap_or_default());
        }
        here
    }

    fn write(&mut self, offset: u64, from: &SharedBuf) {
        let end = offset + from.len() as u64;
        self.allocated.add(offset, from.len() as u64);
        self.written.add(offset, from.len() as u64);
        let pages = offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
        self.len = self.len.max(end);
        // Payload, as a rule.
        if from.digest(0, from.len(), is_zero) {
            return self.zero(offset, end);
        }
        for page in pages {
            let (low, high) = ((page * PAGE_BYTES).max(offset), ((page + 1) * PAGE_BYTES).min(end));
            let (at, len) = ((low - offset) as usize, (high - low) as usize);
            if from.digest(at, len, is_zero) {
                self.zero(low, high);
                continue;
            }
            let bytes = self.content.entry(page).or_insert_with(|| Box::new([0; PAGE]));
            if let Some(place) =
                bytes.get_mut((low - page * PAGE_BYTES) as usize..).and_then(|b| b.get_mut(..len))
            {
                from.copy_out(at, place);
            }
        }
    }

    /// Makes a range zero.
    fn zero(&mut self, low: u64, high: u64) {
        let whole = low.div_ceil(PAGE_BYTES)..high / PAGE_BYTES;
        let gone: Vec<u64> = match whole.is_empty() {
            true => Vec::new(),
            false => self.content.range(whole.clone()).map(|(page, _)| *page).collect(),
        };
        gone.iter().for_each(|page| drop(self.content.remove(page)));
        for page in [low / PAGE_BYTES, high / PAGE_BYTES] {
            if let Some(bytes) = self.content.get_mut(&page).filter(|_| !whole.contains(&page)) {
                let start = page * PAGE_BYTES;
                let (from, to) = (low.max(start) - start, high.min(start + PAGE_BYTES).max(start) - start);
                if let Some(some) = bytes.get_mut(from as usize..to as usize) {
                    some.fill(0);
                }
            }
        }
    }

    fn punch(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.len.next_multiple_of(PAGE_BYTES));
        self.zero(offset, end);
        self.allocated.punch(offset, len);
        self.written.punch(offset, len);
    }

    fn truncate(&mut self, len: u64) {
        self.zero(len, self.len.max(len).next_multiple_of(PAGE_BYTES));
        self.allocated.cut(len);
        self.written.cut(len);
        self.len = len;
    }

    /// What begins below `upto` and was never written or punched since.
    fn holes(&self, upto: u64) -> Vec<(u64, u64)> {
        let mut holes: Vec<(u64, u64)> = Vec::new();
        for page in 0..self.len.div_ceil(PAGE_BYTES) {
            let at = page * PAGE_BYTES;
            if self.written.has(page) {
                continue;
            }
            let bytes = PAGE_BYTES.min(self.len - at);
            match holes.last_mut() {
                Some((start, len)) if *start + *len == at => *len += bytes,
                _ if at >= upto => break,
                _ => holes.push((at, bytes)),
            }
        }
        holes
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let (before, words, after) = (bytes.chunks_exact(64), 0u8, bytes.len() % 64);
    let rest = bytes.len() - after;
    before.map(|chunk| chunk.iter().fold(words, |all, byte| all | byte)).all(|all| all == 0)
        && bytes.get(rest..).is_none_or(|tail| tail.iter().all(|byte| *byte == 0))
}

#[derive(Debug, Default)]
struct Media {
    names: BTreeMap<Name, Rc<RefCell<File>>>,
    folders: BTreeSet<Name>,
    open: BTreeMap<u64, Rc<RefCell<File>>>,
    next: u64,
}

impl Media {
    fn run(&mut self, op: Op) -> (i32, Option<Reply>) {
        let moved = |bytes: usize| (i32::try_from(bytes).unwrap_or(i32::MAX), None);
        match op {
            Op::Read { file, offset, into } => self.on(file, |file| moved(file.read(offset, &into))),
            Op::Write { file, offset, from, .. } => self.on(file, |file| {
                file.write(offset, &from);
                moved(from.len())
            }),
            Op::WriteV { file, offset, from, .. } => self.on(file, |file| {
                let mut done = 0;
                for some in &from {
                    file.write(offset + done as u64, some);
                    done += some.len();
                }
                moved(done)
            }),
            Op::Flush { file } => self.on(file, |_| (0, None)),
            Op::Meta(op) => self.meta(op),
        }
    }

    fn on<T>(&self, file: FileId, then: impl FnOnce(&mut File) -> (i32, Option<T>)) -> (i32, Option<T>) {
        self.open.get(&file.0).map_or((EBADF, None), |file| then(&mut file.borrow_mut()))
    }

    fn meta(&mut self, op: MetaOp) -> (i32, Option<Reply>) {
        let said = |there: bool| (if there { 0 } else { ENOENT }, None);
        match op {
            MetaOp::Open { name, mode } => {
                if !self.names.contains_key(&name) {
                    if !mode.create {
                        return (ENOENT, None);
                    }
                    self.names.insert(name.clone(), Rc::default());
                }
                let Some(file) = self.names.get(&name) else { return (ENOENT, None) };
                let id = self.next;
                self.next += 1;
                self.open.insert(id, Rc::clone(file));
                (0, Some(Reply::Opened(FileId(id))))
            }
            MetaOp::Close { file } => (if self.open.remove(&file.0).is_some() { 0 } else { EBADF }, None),
            MetaOp::Allocate { file, offset, len } => self.on(file, |file| {
                file.allocated.add(offset, len);
                file.len = file.len.max(offset + len);
                (0, None)
            }),
            MetaOp::PunchHole { file, offset, len } => self.on(file, |file| {
                file.punch(offset, len);
                (0, None)
            }),
            MetaOp::Holes { file, upto } => self.on(file, |file| (0, Some(Reply::Holes(file.holes(upto))))),
            MetaOp::Truncate { file, len } => self.on(file, |file| {
                file.truncate(len);
                (0, None)
            }),
            MetaOp::Rename { from, to } => {
                let file = self.names.remove(&from);
                let there = file.is_some();
                file.and_then(|file| self.names.insert(to, file));
                said(there)
            }
            MetaOp::Remove { name } => said(self.names.remove(&name).is_some()),
            MetaOp::MakeDir { name } => (if self.folders.insert(name) { 0 } else { EEXIST }, None),
            MetaOp::SyncDir { .. } | MetaOp::Reopen { .. } => (0, None),
            MetaOp::List { name } => self.list(&name),
            MetaOp::Stat { file } => self
                .on(file, |file| (0, Some(Reply::Stat { len: file.len, allocated: file.allocated.bytes() }))),
            MetaOp::Compute { work, .. } => {
                work.run();
                (0, None)
            }
            MetaOp::Space { dir } => {
                let device = u64::from(dir.0);
                (0, Some(Reply::Space { free: FREE_BYTES, total: FREE_BYTES, device }))
            }
        }
    }

    fn list(&self, folder: &Name) -> (i32, Option<Reply>) {
        if !folder.path.is_empty() && !self.folders.contains(folder) {
            return (ENOENT, None);
        }
        let below = |name: &Name| {
            let path = match folder.path.is_empty() {
                true => &*name.path,
                false => name.path.strip_prefix(&*folder.path)?.strip_prefix('/')?,
            };
            (name.dir == folder.dir && !path.is_empty() && !path.contains('/')).then(|| path.to_owned())
        };
        let entry = |kind| move |name: String| DirEntry { name: name.into(), kind };
        let files = self.names.keys().filter_map(below).map(entry(EntryKind::File));
        let folders = self.folders.iter().filter_map(below).map(entry(EntryKind::Dir));
        let mut all: Vec<DirEntry> = files.chain(folders).collect();
        all.sort();
        (0, Some(Reply::Listing(all)))
    }
}

struct Awake;

impl Unpark for Awake {
    fn unpark(&self) {}
}

/// See the module.
#[derive(Debug, Default)]
pub struct MemoryIo {
    media: Media,
    waiting: Vec<(Token, Op)>,
}

impl Io for MemoryIo {
    fn submit(&mut self, token: Token, op: Op) {
        self.waiting.push((token, op));
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        for (token, op) in self.waiting.drain(..) {
            let (result, reply) = self.media.run(op);
            out.push(Completion { token, result, reply });
        }
    }

    fn park(&mut self, _: Option<Duration>) {}

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::new(Awake)
    }

    fn register(&mut self, _: &Arc<Region>) -> Result<(), String> {
        Ok(())
    }

    fn unregister(&mut self, _: &Arc<Region>) {}

    fn facts(&self) -> IoFacts {
        IoFacts { backend: "memory", features: Vec::new(), warnings: Vec::new() }
    }
}
