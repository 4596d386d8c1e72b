//! A real way to the disks that answers as one in memory does: all that is under way at once, in the order of submission.
//!
//! In which order completions arrive, and beside which tasks, is chance on a real device, and a store that decides
//! beside them decides differently from run to run. So a reap waits for everything that was submitted.
//!
//! And of what a file has on the disk only its own pages are counted, not the blocks in which the file system keeps where
//! they lie: how many those are is chance as well.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::{
    buffers::{Region, SharedBuf},
    io_error::{FileId, Name},
};
use kvarts_store::io::{Completion, Io, IoFacts, MetaOp, Op, Reply, Token, Unpark};

use super::pages::Pages;

/// How long it is slept at most before the device is looked at again.
const NAP: Duration = Duration::from_millis(20);

/// See the module.
pub struct Lockstep<T> {
    io: T,
    order: Vec<Token>,
    done: Vec<Completion>,
    books: Books,
}

type Own = Rc<RefCell<Pages>>;

/// The pages of each file.
#[derive(Debug, Default)]
struct Books {
    names: BTreeMap<Name, Own>,
    open: BTreeMap<FileId, Own>,
    /// Files that are being opened.
    opening: BTreeMap<Token, Own>,
    /// What is to be answered of files whose size is being asked.
    asked: BTreeMap<Token, u64>,
}

impl Books {
    fn change(&self, file: FileId, change: impl FnOnce(&mut Pages)) {
        if let Some(own) = self.open.get(&file) {
            change(&mut own.borrow_mut());
        }
    }

    fn submitted(&mut self, token: Token, op: &Op) {
        let all = |bufs: &[SharedBuf]| bufs.iter().map(|buf| buf.len() as u64).sum::<u64>();
        match op {
            Op::Write { file, offset, from, .. } => {
                self.change(*file, |pages| pages.add(*offset, from.len() as u64));
            }
            Op::WriteV { file, offset, from, .. } => {
                self.change(*file, |pages| pages.add(*offset, all(from)));
            }
            Op::Meta(MetaOp::Allocate { file, offset, len }) => {
                self.change(*file, |pages| pages.add(*offset, *len));
            }
            Op::Meta(MetaOp::PunchHole { file, offset, len }) => {
                self.change(*file, |pages| pages.punch(*offset, *len));
            }
            Op::Meta(MetaOp::Truncate { file, len }) => self.change(*file, |pages| pages.cut(*len)),
            Op::Meta(MetaOp::Stat { file }) => {
                let bytes = self.open.get(file).map(|own| own.borrow().bytes());
                self.asked.extend(bytes.map(|bytes| (token, bytes)));
            }
            Op::Meta(MetaOp::Open { name, .. }) => {
                let own = self.names.entry(name.clone()).or_default();
                self.opening.insert(token, Rc::clone(own));
            }
            Op::Meta(MetaOp::Close { file }) => drop(self.open.remove(file)),
            Op::Meta(MetaOp::Remove { name }) => drop(self.names.remove(name)),
            Op::Meta(MetaOp::Rename { from, to }) => {
                let own = self.names.remove(from);
                self.names.extend(own.map(|own| (to.clone(), own)));
            }
            Op::Read { .. } | Op::Flush { .. } | Op::Meta(_) => {}
        }
    }

    fn completed(&mut self, completion: &mut Completion) {
        let (opening, asked) = (self.opening.remove(&completion.token), self.asked.remove(&completion.token));
        match (&mut completion.reply, opening, asked) {
            (Some(Reply::Opened(file)), Some(own), _) => drop(self.open.insert(*file, own)),
            (Some(Reply::Stat { allocated, .. }), _, Some(bytes)) => *allocated = bytes,
            _ => {}
        }
    }
}

impl<T> std::fmt::Debug for Lockstep<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lockstep({} under way)", self.order.len())
    }
}

impl<T: Io> Lockstep<T> {
    /// Around `io`, whose directories are empty.
    pub fn new(io: T) -> Self {
        Self { io, order: Vec::new(), done: Vec::new(), books: Books::default() }
    }
}

impl<T: Io> Io for Lockstep<T> {
    fn submit(&mut self, token: Token, op: Op) {
        self.books.submitted(token, &op);
        self.order.push(token);
        self.io.submit(token, op);
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.io.reap(&mut self.done);
        while self.done.len() < self.order.len() {
            self.io.park(Some(NAP));
            self.io.reap(&mut self.done);
        }
        for token in self.order.drain(..) {
            if let Some(at) = self.done.iter().position(|one| one.token == token) {
                let mut one = self.done.swap_remove(at);
                self.books.completed(&mut one);
                out.push(one);
            }
        }
    }

    fn park(&mut self, timeout: Option<Duration>) {
        self.io.park(timeout);
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        self.io.unparker()
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<(), String> {
        self.io.register(region)
    }

    fn unregister(&mut self, region: &Arc<Region>) {
        self.io.unregister(region);
    }

    fn facts(&self) -> IoFacts {
        self.io.facts()
    }
}
