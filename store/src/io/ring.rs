//! The real ring: io_uring, on the thread that made it.
//!
//! Invariants:
//! - an operation's buffers, its descriptor and its vector of ranges stay in `pending` from before the kernel
//!   sees the operation until its completion has been taken from the queue;
//! - no more operations are in the kernel than the completion queue has room for, so it never overflows; the
//!   others wait in `overflow`, in order;
//! - dropping cancels and waits within a bound; what the kernel has not given back by then is leaked, and
//!   counted, because it may still write there.
//!
//! [`Io::park`] waits in the kernel, with a poll of the wake-up's eventfd armed, so that an unpark ends it.

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, opcode, squeue};
use rustix::io::Errno;

use super::features::{Feature, Features, Outcomes};
use super::files::{Files, KeptFile, OpenFile};
use super::meta::{Meta, MetaThreads};
use super::ring_buffers::Registered;
use super::ring_setup::{Setup, make};
use super::slots::{Key, Slots};
use super::wake::Wake;
use super::workers::Done;
use super::{Completion, Io, IoFacts, MetaOp, Op, Token, Unpark};
use kvarts_contract::buffers::buf::SharedBuf;
use kvarts_contract::buffers::region::Region;
use kvarts_contract::buffers::vectors::IoVec;
use kvarts_contract::io_error::FileId;

/// The poll of the wake-up's eventfd; no [`Key`] packs to it.
const WAKE: u64 = u64::MAX;
/// Requests to cancel, whose own completions say nothing.
const CANCEL: u64 = u64::MAX - 1;
/// `POLLIN`.
const READABLE: u32 = 1;
/// `RWF_DSYNC`.
const DSYNC: i32 = 2;
/// `FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE`.
const PUNCH: i32 = 3;
/// The most that one operation moves, as the kernel has it; the rest comes back as a short result.
pub(crate) const MOVED_MAX: u32 = 0x7fff_f000;
/// The most ranges in one operation; the rest comes back as a short result.
pub(crate) const RANGES_MAX: usize = 1024;
/// Dropping waits this often, this long, for operations that do not end.
const DROP_WAITS: u32 = 20;
const DROP_WAIT: Duration = Duration::from_millis(100);

static LEAKED_OPS: AtomicU64 = AtomicU64::new(0);
static LEAKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Operations, and bytes of their buffers, that rings of this process left to the kernel for ever because they
/// did not end when the ring was dropped.
pub fn leaked() -> (u64, u64) {
    (LEAKED_OPS.load(Ordering::Relaxed), LEAKED_BYTES.load(Ordering::Relaxed))
}

/// One operation until its completion.
#[derive(Debug)]
struct Pending {
    token: Token,
    op: Op,
    file: Arc<OpenFile>,
    /// For vectored operations. The kernel may read it until the completion, so it lies on the heap.
    ranges: Box<[IoVec]>,
    /// Bytes written by a durable write whose flush is under way.
    written: Option<i32>,
    in_kernel: bool,
}

/// Why there is no ring.
#[derive(Debug)]
pub(super) enum RingError {
    /// There can be none here; the line says why, what that costs and how to allow it.
    Forbidden(String),
    /// Something that threads would lack too, such as a directory.
    Environment(String),
}

/// The ring of one executor.
pub(super) struct Ring {
    ring: IoUring,
    registered: Option<Registered>,
    outcomes: Outcomes,
    pending: Slots<Pending>,
    in_kernel: usize,
    in_kernel_max: usize,
    overflow: VecDeque<Key>,
    /// Completions that did not come from a worker, until they are reaped.
    ready: Vec<Completion>,
    /// Of worker threads.
    done: Arc<Done>,
    meta: MetaThreads,
    files: Arc<Files>,
    wake: Arc<Wake>,
    wake_armed: bool,
    /// Completions that no operation here waits for.
    unknown: u64,
    drop_waits: u32,
    /// Calls that are refused without asking the kernel.
    #[cfg(test)]
    refusals: std::cell::Cell<u32>,
}

impl Ring {
    /// Makes a ring for the calling thread, over these directories.
    pub(super) fn new(dirs: &[PathBuf], features: &Features) -> Result<Self, RingError> {
        let Setup { ring, registered, outcomes } = make(features).map_err(RingError::Forbidden)?;
        let files = Files::new();
        let meta =
            Meta::new(dirs, &files, features.allows(Feature::DirectIo)).map_err(RingError::Environment)?;
        let wake = Wake::new()
            .map_err(|error| RingError::Environment(format!("an eventfd could not be created: {error}")))?;
        let done = Done::new(Arc::clone(&wake));
        let meta = MetaThreads::start(&meta, &done)
            .map_err(|error| RingError::Environment(format!("a thread could not be started: {error}")))?;
        let in_kernel_max = ring.params().cq_entries() as usize - 8;
        Ok(Self {
            ring,
            registered,
            outcomes,
            pending: Slots::new(),
            in_kernel: 0,
            in_kernel_max,
            overflow: VecDeque::new(),
            ready: Vec::new(),
            done,
            meta,
            files,
            wake,
            wake_armed: false,
            unknown: 0,
            drop_waits: DROP_WAITS,
            #[cfg(test)]
            refusals: std::cell::Cell::new(0),
        })
    }

    fn place(&self, buf: &SharedBuf) -> Option<u16> {
        self.registered.as_ref()?.place(buf)
    }

    fn common_place(&self, bufs: &[SharedBuf]) -> Option<u16> {
        if !self.outcomes.uses(Feature::VectoredFixed) {
            return None;
        }
        self.registered.as_ref()?.common_place(bufs)
    }

    fn sync_flags(&self, sync: bool) -> i32 {
        if sync && self.outcomes.uses(Feature::DurableWrite) { DSYNC } else { 0 }
    }

    /// The kernel's form of an operation. Its memory is what `pending` holds.
    fn entry(&self, pending: &Pending) -> squeue::Entry {
        let fd = Fd(pending.file.as_fd().as_raw_fd());
        let (ranges, count) = (pending.ranges.as_ptr().cast(), pending.ranges.len() as u32);
        if pending.written.is_some() {
            return opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build();
        }
        match &pending.op {
            Op::Read { offset, into, .. } => match self.place(into) {
                Some(place) => {
                    opcode::ReadFixed::new(fd, into.as_ptr(), len(into), place).offset(*offset).build()
                }
                None => opcode::Read::new(fd, into.as_ptr(), len(into)).offset(*offset).build(),
            },
            Op::Write { offset, from, sync, .. } => {
                let flags = self.sync_flags(*sync);
                match self.place(from) {
                    Some(place) => opcode::WriteFixed::new(fd, from.as_ptr(), len(from), place)
                        .offset(*offset)
                        .rw_flags(flags)
                        .build(),
                    None => opcode::Write::new(fd, from.as_ptr(), len(from))
                        .offset(*offset)
                        .rw_flags(flags)
                        .build(),
                }
            }
            Op::WriteV { offset, from, sync, .. } => {
                let flags = self.sync_flags(*sync);
                match self.common_place(from) {
                    Some(place) => opcode::WritevFixed::new(fd, ranges, count, place)
                        .offset(*offset)
                        .rw_flags(flags)
                        .build(),
                    None => opcode::Writev::new(fd, ranges, count).offset(*offset).rw_flags(flags).build(),
                }
            }
            Op::Flush { .. } => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Op::Meta(MetaOp::PunchHole { offset, len, .. }) => {
                opcode::Fallocate::new(fd, *len).offset(*offset).mode(PUNCH).build()
            }
            Op::Meta(_) => opcode::Nop::new().build(),
        }
    }

    /// Puts an operation in the submission queue, or behind those that wait for room.
    fn enqueue(&mut self, key: Key) {
        if !self.overflow.is_empty() || !self.push(key) {
            self.overflow.push_back(key);
        }
    }

    /// Whether there was room for it.
    fn push(&mut self, key: Key) -> bool {
        if self.in_kernel >= self.in_kernel_max {
            return false;
        }
        let Some(pending) = self.pending.get(key) else { return true };
        let entry = self.entry(pending).user_data(key.pack());
        if !self.push_entry(&entry) {
            return false;
        }
        if let Some(pending) = self.pending.get_mut(key) {
            pending.in_kernel = true;
        }
        self.in_kernel += 1;
        true
    }

    fn push_entry(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the memory and the descriptor of the entry are held by `pending` until its completion is taken
        // (module doc); entries that are no operations name only the wake-up's descriptor, which `Drop` keeps
        // open until the ring is closed, or a word.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Hands the submission queue over, and what waits behind it, as far as the kernel takes it.
    fn flush(&mut self) {
        loop {
            while let Some(&key) = self.overflow.front() {
                if !self.push(key) {
                    break;
                }
                self.overflow.pop_front();
            }
            let queued = self.ring.submission().len();
            if !self.must_enter(queued) {
                return;
            }
            let events = EnterFlags::GETEVENTS.bits();
            // SAFETY: no argument is passed, and the queue has `queued` entries that are whole.
            let enter = || unsafe { self.ring.submitter().enter::<u8>(queued as u32, 0, events, None) };
            #[cfg(test)]
            let enter = || match self.refusals.take() {
                0 => enter(),
                more => {
                    self.refusals.set(more - 1);
                    Err(std::io::Error::from(Errno::AGAIN))
                }
            };
            let entered = enter();
            // What the kernel refuses for now (no memory, a signal) it is offered again at the next reap.
            if entered.is_err() || self.overflow.is_empty() || self.in_kernel >= self.in_kernel_max {
                return;
            }
        }
    }

    /// Whether there is something to hand over, or completions that only a call makes visible.
    fn must_enter(&mut self, queued: usize) -> bool {
        let lazy = self.outcomes.uses(Feature::DeferTaskrun) || self.outcomes.uses(Feature::CoopTaskrun);
        let blind = lazy && !self.outcomes.uses(Feature::TaskrunFlag);
        let submission = self.ring.submission();
        queued > 0 || submission.taskrun() || submission.cq_overflow() || (blind && self.in_kernel > 0)
    }

    /// Takes completions from the queue.
    fn collect(&mut self) {
        loop {
            let Some(entry) = self.ring.completion().next() else { return };
            match entry.user_data() {
                WAKE => {
                    self.wake_armed = false;
                    self.wake.drain();
                }
                CANCEL => {}
                word => self.complete(Key::unpack(word), entry.result()),
            }
        }
    }

    fn complete(&mut self, key: Key, result: i32) {
        let durable = self.outcomes.uses(Feature::DurableWrite);
        let Some(pending) = self.pending.get_mut(key).filter(|pending| pending.in_kernel) else {
            self.unknown += 1;
            return;
        };
        pending.in_kernel = false;
        self.in_kernel -= 1;
        let sync = matches!(pending.op, Op::Write { sync: true, .. } | Op::WriteV { sync: true, .. });
        if sync && pending.written.is_none() {
            if durable && result == -Errno::OPNOTSUPP.raw_os_error() {
                self.outcomes.revoke(Feature::DurableWrite, "the file system refused this feature");
                self.enqueue(key);
                return;
            }
            // One that was submitted before the feature was revoked may be here too; a flush more is harmless.
            if !durable && result > 0 {
                pending.written = Some(result);
                self.enqueue(key);
                return;
            }
        }
        let result = match pending.written {
            Some(written) if result >= 0 => written,
            _ => result,
        };
        if let Some(pending) = self.pending.remove(key) {
            self.ready.push(Completion { token: pending.token, result, reply: None });
        }
    }

    /// Waits in the kernel for a completion; says whether one may have come.
    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let waited = match timeout {
            None => self.ring.submitter().submit_and_wait(1),
            Some(timeout) => {
                let timespec = Timespec::from(timeout);
                let args = SubmitArgs::new().timespec(&timespec);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        // Besides the end of the time there are signals; the caller looks again in either case.
        waited.is_ok()
    }

    /// Whether operations wait that the kernel would not take for now: nothing says when it does. Those that wait because there is enough
    /// in the kernel are none of them: its completions wake.
    fn unsent(&mut self) -> bool {
        let room = self.in_kernel < self.in_kernel_max;
        !self.ring.submission().is_empty() || (room && !self.overflow.is_empty())
    }

    fn arm_wake(&mut self) {
        if !self.wake_armed {
            let poll =
                opcode::PollAdd::new(Fd(self.wake.as_fd().as_raw_fd()), READABLE).build().user_data(WAKE);
            self.wake_armed = self.push_entry(&poll);
        }
    }

    fn something_to_reap(&self) -> bool {
        !self.ready.is_empty() || !self.done.is_empty()
    }
}

/// How many bytes of `buf` one operation moves.
fn len(buf: &SharedBuf) -> u32 {
    u32::try_from(buf.len()).unwrap_or(u32::MAX).min(MOVED_MAX)
}

impl Io for Ring {
    fn submit(&mut self, token: Token, op: Op) {
        let (file, ranges) = match op {
            // In the kernel's own threads, many at once: one waits for the file system, and they come in batches.
            Op::Meta(MetaOp::PunchHole { file, .. }) => (file, Box::default()),
            Op::Meta(op) => return self.meta.push(token, op),
            Op::Read { file, .. } | Op::Write { file, .. } | Op::Flush { file } => (file, Box::default()),
            Op::WriteV { file, ref from, .. } => {
                (file, from.iter().take(RANGES_MAX).map(IoVec::of).collect())
            }
        };
        let Some(file) = self.files.get(file) else {
            self.ready.push(Completion { token, result: -Errno::BADF.raw_os_error(), reply: None });
            return;
        };
        let key = self.pending.insert(Pending { token, op, file, ranges, written: None, in_kernel: false });
        self.enqueue(key);
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.flush();
        self.collect();
        out.append(&mut self.ready);
        self.done.take(out);
    }

    fn send(&mut self) {
        self.flush();
    }

    fn park(&mut self, timeout: Option<Duration>) {
        loop {
            self.arm_wake();
            self.flush();
            self.collect();
            if self.wake.take_unparked() || self.something_to_reap() {
                return;
            }
            // What the kernel has not taken yet must be offered again, and without the poll nothing else wakes.
            let stuck = !self.wake_armed || self.unsent();
            if stuck {
                let retry = Duration::from_millis(1);
                // Not in the kernel's own wait, which ends at once where not everything was taken.
                self.wake.wait(Some(timeout.map_or(retry, |timeout| timeout.min(retry))));
                return;
            }
            let more = self.wait(timeout);
            self.collect();
            if !more {
                return;
            }
        }
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.wake) as Arc<dyn Unpark>
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<(), String> {
        match &mut self.registered {
            Some(registered) => registered.add(&self.ring.submitter(), region),
            None => Err("registered buffers are disabled (the feature fixed-buffers is off)".to_owned()),
        }
    }

    fn unregister(&mut self, region: &Arc<Region>) {
        // Entries that name the region's place and that the kernel has not seen must reach it first.
        while !self.ring.submission().is_empty() {
            let before = self.ring.submission().len();
            self.flush();
            if self.ring.submission().len() >= before {
                break;
            }
        }
        if let Some(registered) = &mut self.registered {
            registered.remove(&self.ring.submitter(), region);
        }
    }

    fn keep_file(&self, file: FileId) -> Option<KeptFile> {
        self.files.keep(file)
    }

    fn facts(&self) -> IoFacts {
        let mut features = self.outcomes.list();
        let mut warnings = Vec::new();
        super::files::note_direct(&self.files, &mut features, &mut warnings);
        IoFacts { backend: "ring", features, warnings }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // What waits in `overflow` the kernel has never seen. What is in the submission queue it will see with the
        // requests to cancel, so it goes first.
        self.overflow.clear();
        self.flush();
        let under_way: Vec<u64> = self.pending.iter().map(|(key, _)| key.pack()).collect();
        for word in under_way {
            let cancel = opcode::AsyncCancel::new(word).build().user_data(CANCEL);
            if !self.push_entry(&cancel) {
                self.flush();
                self.push_entry(&cancel);
            }
        }
        let mut waits = self.drop_waits;
        while self.in_kernel > 0 && waits > 0 {
            self.overflow.clear();
            if !self.wait(Some(DROP_WAIT)) {
                waits -= 1;
            }
            self.collect();
        }
        for pending in self.pending.drain().filter(|pending| pending.in_kernel) {
            let bytes = bytes(&pending.op);
            LEAKED_OPS.fetch_add(1, Ordering::Relaxed);
            LEAKED_BYTES.fetch_add(bytes, Ordering::Relaxed);
            // On the heap, so that the vector of ranges and every Arc stay where they are for ever.
            let _ = Box::leak(Box::new(ManuallyDrop::new(pending)));
        }
    }
}

fn bytes(op: &Op) -> u64 {
    match op {
        Op::Read { into: buf, .. } | Op::Write { from: buf, .. } => buf.len() as u64,
        Op::WriteV { from: bufs, .. } => bufs.iter().map(|buf| buf.len() as u64).sum(),
        Op::Flush { .. } | Op::Meta(_) => 0,
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("pending", &self.pending.len())
            .field("in_kernel", &self.in_kernel)
            .field("unknown", &self.unknown)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
