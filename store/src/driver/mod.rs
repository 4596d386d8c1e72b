//! What the engine does I/O with: futures and batches over one [`Io`], on one executor.
//!
//! What holds for every operation:
//! - it begins when it is asked for, not when it is awaited; if all slots are taken, when one is free;
//! - its memory belongs to it until the device is done with it, whatever becomes of the future: a future that is
//!   dropped, or whose deadline passes, leaves its memory in the slot, counted, until the completion arrives;
//! - it succeeds only if every byte was moved: the rest of a short transfer is asked for again, and a file that
//!   ends before is an error;
//! - transfers of all classes share the bytes in flight at a device by [`Class::shares`];
//! - what one device does not answer takes no room from another: each directory has a lane of its own.
//!
//! The runtime calls [`Driver::pump`] each turn of the executor, or reaps the [`Io`] itself and passes what it got to
//! [`Driver::on_completions`], not holding on to the `Io` while it does.

mod batch;
mod devices;
mod lane;
mod operations;
mod schedule;

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

pub use self::batch::{ExtentDone, ReadBatch};
pub use self::devices::Devices;
use self::devices::OVERDUE;
use self::operations::{Core, Outcome, Request, Work};
use crate::io::slots::Key;
use crate::io::{Completion, Computation, DirEntry, DiskSpace, Io, KeptFile, MetaOp, OpenMode, Reply};
use crate::task::{LocalTask, Runtime};
use kvarts_contract::buffers::buf::{Buf, BufMut, SharedBuf};
use kvarts_contract::io_error::{DirId, FileId, Name};
use kvarts_contract::io_error::{IoError, IoErrorKind};
use kvarts_contract::ticket::ticket;
use kvarts_contract::{class::Class, clock::Nanos};

/// Bytes whose work an executor does itself: it takes less time than to have it done.
const COMPUTED_AT_ONCE: usize = 128 << 10;
/// The classes of reads that an engine waits for: the first of [`Class::ALL`].
const URGENT: [Class; 2] = [Class::Small, Class::Foreground];

/// How much may be under way at once at each device, of one executor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Operations that wait, are under way or are stuck. More wait in their futures.
    pub max_ops: usize,
    /// Bytes of transfers at the device. A transfer larger than this goes piece by piece.
    pub max_bytes_in_flight: u64,
    /// The part of it that only [`Class::Foreground`] and [`Class::Small`] may use, so that a read which an engine
    /// waits for does not queue behind a full device.
    pub foreground_reserve: u64,
    /// Bytes that less urgent transfers may have at the device while there are urgent reads, small or foreground: what
    /// such a read finds in front of it. Where urgent ones have more than this there themselves, others may have as much.
    pub beside_urgent: u64,
    /// For how many bytes of less urgent transfers an urgent read is remembered: most come one after the other.
    pub urgent_remembered: u64,
    /// Bytes of operations past their deadline that no longer count as in flight, so that a device that answers some shows it.
    /// Beyond it they take the room of others, and when they have all of it transfers are refused at once.
    pub max_stuck_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_ops: 4096,
            max_bytes_in_flight: 16 << 20,
            foreground_reserve: 4 << 20,
            beside_urgent: 1 << 20,
            urgent_remembered: 64 << 20,
            max_stuck_bytes: 64 << 20,
        }
    }
}

/// Counters since the start, and what is there now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Metrics {
    /// Submissions, repeated ones included.
    pub submitted: u64,
    /// Operations that ended.
    pub completed: u64,
    /// Operations that ended with an error.
    pub failed: u64,
    /// Submissions repeated because they were interrupted.
    pub retried: u64,
    /// Submissions for the rest of a transfer that moved less than was asked for, or than fits one submission.
    pub short: u64,
    /// Completions that belong to no submission under way: doubled, or unknown.
    pub unknown_completions: u64,
    /// Operations that ended after their future was gone.
    pub late_completions: u64,
    /// Bytes read by operations that succeeded.
    pub bytes_read: u64,
    /// Bytes written by operations that succeeded.
    pub bytes_written: u64,
    /// Now: slots in use.
    pub slots: u64,
    /// Now: operations that wait to be submitted.
    pub waiting_ops: u64,
    /// Now: submissions under way.
    pub in_flight_ops: u64,
    /// Now: bytes of transfers under way.
    pub in_flight_bytes: u64,
    /// Now: operations past their deadline whose memory the device may still write.
    pub stuck_ops: u64,
    /// Now: their bytes.
    pub stuck_bytes: u64,
    /// Now: operations under way whose future was dropped.
    pub dropped_ops: u64,
    /// Now: their bytes.
    pub dropped_bytes: u64,
    /// Now: bytes of the executor's own memory that are handed out.
    pub arena_bytes: u64,
}

/// What one device has, now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DriveLoad {
    /// Bytes of transfers that it has.
    pub in_flight_bytes: u64,
    /// Transfers that wait for it.
    pub waiting: u64,
    /// Bytes of transfers that it has had for too long, or past their deadline.
    pub stuck_bytes: u64,
    /// For how long it has had what it has had for longest, without an answer.
    pub unanswered: Duration,
}

impl DriveLoad {
    /// Takes in what another executor has there.
    pub(crate) fn add(&mut self, other: &Self) {
        self.in_flight_bytes += other.in_flight_bytes;
        self.waiting += other.waiting;
        self.stuck_bytes += other.stuck_bytes;
        self.unanswered = self.unanswered.max(other.unanswered);
    }
}

struct Shared {
    core: RefCell<Core>,
    rt: Rc<dyn Runtime>,
    io: Rc<RefCell<dyn Io>>,
}

impl Shared {
    /// Hands over what may go, if the `Io` is not in use; then wakes whom it concerns.
    fn dispatch(&self) {
        if let Ok(mut io) = self.io.try_borrow_mut() {
            self.core.borrow_mut().dispatch(&mut *io, &**self.rt.clock());
        }
        self.wake();
    }

    /// The device goes on while what has come is looked at: that is megabytes of digests.
    fn send(&self) {
        if let Ok(mut io) = self.io.try_borrow_mut() {
            io.send();
        }
    }

    /// Wakes what has been collected, with nothing borrowed.
    fn wake(&self) {
        let mut wakers = std::mem::take(&mut self.core.borrow_mut().to_wake);
        wakers.drain(..).for_each(Waker::wake);
        let mut core = self.core.borrow_mut();
        if core.to_wake.is_empty() {
            // Keeps its memory for the next time.
            core.to_wake = wakers;
        }
    }
}

/// The driver of one executor. Cloning it gives another handle to the same driver.
#[derive(Clone)]
pub struct Driver {
    shared: Rc<Shared>,
    /// Reused by each pump.
    completions: Rc<RefCell<Vec<Completion>>>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("metrics", &self.metrics()).finish_non_exhaustive()
    }
}

impl Driver {
    /// A driver over an executor's `Io`, which nothing else may submit to.
    pub fn new(rt: Rc<dyn Runtime>, io: Rc<RefCell<dyn Io>>, limits: Limits) -> Self {
        Self::beside(rt, io, limits, Devices::of(1, 1))
    }

    /// The same, of an executor beside others.
    pub fn beside(rt: Rc<dyn Runtime>, io: Rc<RefCell<dyn Io>>, limits: Limits, devices: Devices) -> Self {
        let shared = Shared { core: RefCell::new(Core::new(limits, devices)), rt, io };
        Self { shared: Rc::new(shared), completions: Rc::default() }
    }

    /// Fills `into` from `offset` on, wholly or not at all as far as the caller may rely on it.
    pub fn read(&self, class: Class, file: FileId, offset: u64, into: SharedBuf) -> Transfer {
        self.transfer(class, offset, Work::Read(file, into))
    }

    /// Fills memory from `offset` on and gives it back full. If the read fails, or is given up, the memory is gone.
    pub fn read_into(&self, class: Class, file: FileId, offset: u64, into: BufMut) -> ReadInto {
        let len = into.len();
        self.read_part(class, file, offset, into, 0..len)
    }

    /// As [`Driver::read_into`], of a part of the memory.
    ///
    /// # Panics
    /// If the memory ends before.
    pub fn read_part(
        &self,
        class: Class,
        file: FileId,
        offset: u64,
        into: BufMut,
        part: Range<usize>,
    ) -> ReadInto {
        let read = self.read(class, file, offset, into.lent(part.start, part.len()));
        ReadInto(Some(into), read)
    }

    /// Writes `from` at `offset`; with `sync`, durably. An error says nothing about how much of it was written.
    pub fn write(
        &self,
        class: Class,
        file: FileId,
        offset: u64,
        from: impl Into<Buf>,
        sync: bool,
    ) -> Transfer {
        self.transfer(class, offset, Work::Write(file, from.into().lent(), sync))
    }

    /// Writes several buffers in turn.
    pub fn write_v(&self, class: Class, file: FileId, offset: u64, from: Vec<Buf>, sync: bool) -> Transfer {
        // In place: a buffer is the same bytes under either name.
        let from: Vec<SharedBuf> = from.into_iter().map(Buf::lent).collect();
        self.transfer(class, offset, Work::WriteV(file, from.into(), sync))
    }

    /// Makes every write that completed before this call durable. A failed one must not be repeated: see
    /// [`policy`](crate::io::policy).
    pub fn flush(&self, file: FileId) -> Transfer {
        self.transfer(Class::Put, 0, Work::Flush(file))
    }

    /// Executes an operation on names or files.
    pub fn meta(&self, op: MetaOp) -> Meta {
        Meta(self.start(Request::meta(op)))
    }

    /// Opens a file.
    pub async fn open(&self, name: Name, mode: OpenMode) -> Result<FileId, IoError> {
        self.reply(MetaOp::Open { name, mode }, |reply| match reply {
            Reply::Opened(file) => Some(file),
            _ => None,
        })
        .await
    }

    /// The names in a directory, sorted.
    pub async fn list(&self, name: Name) -> Result<Vec<DirEntry>, IoError> {
        self.reply(MetaOp::List { name }, |reply| match reply {
            Reply::Listing(entries) => Some(entries),
            _ => None,
        })
        .await
    }

    /// Length and allocated bytes of a file.
    pub async fn stat(&self, file: FileId) -> Result<(u64, u64), IoError> {
        self.reply(MetaOp::Stat { file }, |reply| match reply {
            Reply::Stat { len, allocated } => Some((len, allocated)),
            _ => None,
        })
        .await
    }

    /// The holes of a file that begin below `upto`, in order: (offset, bytes).
    pub async fn holes(&self, file: FileId, upto: u64) -> Result<Vec<(u64, u64)>, IoError> {
        self.reply(MetaOp::Holes { file, upto }, |reply| match reply {
            Reply::Holes(holes) => Some(holes),
            _ => None,
        })
        .await
    }

    /// The room of the file system that holds a directory.
    pub async fn space(&self, dir: DirId) -> Result<DiskSpace, IoError> {
        self.reply(MetaOp::Space { dir }, |reply| match reply {
            Reply::Space { free, total, device } => Some(DiskSpace { free, total, device }),
            _ => None,
        })
        .await
    }

    async fn reply<T>(&self, op: MetaOp, take: impl FnOnce(Reply) -> Option<T>) -> Result<T, IoError> {
        let request = Request::meta(op.clone());
        let reply = self.meta(op).await?;
        reply.and_then(take).ok_or_else(|| request.error(IoErrorKind::Other(0), 0))
    }

    /// Does work on `bytes` bytes that computes and waits for nothing. Where it may take long, other tasks go on meanwhile.
    pub async fn compute<T: Send + 'static>(
        &self,
        dir: DirId,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, IoError> {
        if bytes <= COMPUTED_AT_ONCE {
            return Ok(work());
        }
        let (reply, answer) = ticket();
        // A caller that is gone needs no answer.
        let work = Computation::new(move || drop(reply.send(work())));
        let op = MetaOp::Compute { dir, work: work.clone() };
        let refused = Request::meta(op.clone());
        if self.meta(op).await.is_err() {
            work.run();
        }
        answer.await.map_err(|_| refused.error(IoErrorKind::Other(0), 0))
    }

    /// Completes after a while.
    pub(crate) async fn pause(&self, time: Duration) {
        let rt = &self.shared.rt;
        rt.sleep_until(rt.clock().now().plus(time)).await;
    }

    /// A batch of reads that report their ends one by one.
    pub fn batch(&self, class: Class) -> ReadBatch {
        ReadBatch::new(Rc::clone(&self.shared), class)
    }

    /// Submits what may go, reaps the `Io` and wakes whom it concerns. Says how many completions there were.
    /// Never blocks.
    pub fn pump(&self) -> usize {
        self.shared.dispatch();
        let Ok(mut completions) = self.completions.try_borrow_mut() else { return 0 };
        if let Ok(mut io) = self.shared.io.try_borrow_mut() {
            io.reap(&mut completions);
        }
        self.on_completions(&mut completions)
    }

    /// Takes the completions that the executor reaped; leaves the vector empty. Says how many there were.
    pub fn on_completions(&self, completions: &mut Vec<Completion>) -> usize {
        let count = completions.len();
        if count > 0 {
            let mut core = self.shared.core.borrow_mut();
            completions.drain(..).for_each(|completion| core.complete(completion));
            drop(core);
            self.shared.dispatch();
            self.shared.send();
        }
        count
    }

    /// Completes when the device of a directory has not answered something for ten seconds.
    pub(crate) async fn silence(&self, dir: DirId) {
        let rt = &self.shared.rt;
        loop {
            rt.sleep_until(rt.clock().now().plus(OVERDUE / 4)).await;
            if self.shared.core.borrow().is_silent(usize::from(dir.0), rt.clock().now()) {
                return;
            }
        }
    }

    /// What each device has of this executor's, by its number.
    pub(crate) fn loads(&self) -> Vec<DriveLoad> {
        let now = self.shared.rt.clock().now();
        self.shared.core.borrow().loads(now)
    }

    /// Whether that is so now, and all other devices answer.
    pub(crate) fn is_silent_alone(&self, dir: DirId) -> bool {
        let now = self.shared.rt.clock().now();
        self.shared.core.borrow().is_silent_alone(usize::from(dir.0), now)
    }

    /// Whether the device of a directory has answered everything, and nothing waits for it.
    pub(crate) fn is_idle(&self, dir: DirId) -> bool {
        self.shared.core.borrow().is_idle(usize::from(dir.0))
    }

    /// Completes at this time.
    pub(crate) fn sleep_until(&self, at: Nanos) -> LocalTask {
        self.shared.rt.sleep_until(at)
    }

    /// An open file, for a caller that reads it itself: see [`Io::keep_file`].
    pub(crate) fn keep_file(&self, file: FileId) -> Option<KeptFile> {
        self.shared.io.borrow().keep_file(file)
    }

    /// What was done and what is under way.
    pub fn metrics(&self) -> Metrics {
        self.shared.core.borrow().metrics()
    }

    /// Places for operations, and for batches of reads: as many as there ever were at once.
    pub(crate) fn places(&self) -> (usize, usize) {
        self.shared.core.borrow().places()
    }

    fn transfer(&self, class: Class, offset: u64, work: Work) -> Transfer {
        Transfer(self.start(Request::transfer(class, offset, work)))
    }

    fn start(&self, request: Request) -> Operation {
        let shared = Rc::clone(&self.shared);
        let state = if request.is_empty() {
            Stage::Empty
        } else {
            let admitted = shared.core.borrow_mut().admit(request);
            match admitted {
                Ok(key) => Stage::Slot(key),
                Err(request) => Stage::Waiting(request),
            }
        };
        shared.dispatch();
        Operation { shared, state, deadline: None, timer: None }
    }
}

/// Where a future's operation is.
enum Stage {
    /// There was no slot for it yet.
    Waiting(Request),
    Slot(Key),
    /// It had nothing to do.
    Empty,
    Over,
}

struct Operation {
    shared: Rc<Shared>,
    state: Stage,
    deadline: Option<Nanos>,
    timer: Option<LocalTask>,
}

impl Operation {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        if let Poll::Ready(outcome) = self.advance(cx) {
            self.state = Stage::Over;
            return Poll::Ready(outcome);
        }
        let Some(at) = self.deadline else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| self.shared.rt.sleep_until(at));
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        let error = match std::mem::replace(&mut self.state, Stage::Over) {
            Stage::Waiting(request) => Some(request.error(IoErrorKind::Deadline, 0)),
            Stage::Slot(key) => {
                let mut core = self.shared.core.borrow_mut();
                let error = core.overdue(key);
                core.abandon(key, true);
                error
            }
            Stage::Empty | Stage::Over => None,
        };
        self.shared.dispatch();
        error.map_or(Poll::Pending, |error| Poll::Ready(Err(error)))
    }

    fn advance(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        if let Stage::Waiting(_) = self.state
            && let Stage::Waiting(request) = std::mem::replace(&mut self.state, Stage::Over)
        {
            let mut core = self.shared.core.borrow_mut();
            match core.admit(request) {
                Ok(key) => self.state = Stage::Slot(key),
                Err(request) => {
                    core.wait_for_slot(cx.waker());
                    self.state = Stage::Waiting(request);
                    return Poll::Pending;
                }
            }
            drop(core);
            self.shared.dispatch();
        }
        match self.state {
            Stage::Slot(key) => {
                let outcome = self.shared.core.borrow_mut().poll(key, cx.waker());
                match outcome {
                    Some(outcome) => {
                        // The slot that is free now may be what others wait for.
                        self.shared.dispatch();
                        Poll::Ready(outcome)
                    }
                    None => Poll::Pending,
                }
            }
            Stage::Empty => Poll::Ready(Ok(None)),
            // Polled after its end: a future may stay pending for ever then.
            Stage::Waiting(_) | Stage::Over => Poll::Pending,
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Stage::Slot(key) = self.state {
            self.shared.core.borrow_mut().abandon(key, false);
            self.shared.dispatch();
        }
    }
}

/// A transfer or a flush under way. Dropping it gives the operation up, not the memory (see the module).
#[must_use = "the operation has started, but its result is not used"]
pub struct Transfer(Operation);

impl Transfer {
    /// Ends with [`IoErrorKind::Deadline`] at `at` if it has not ended before.
    pub fn by(mut self, at: Nanos) -> Self {
        self.0.deadline = Some(at);
        self
    }
}

impl Future for Transfer {
    type Output = Result<(), IoError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx).map(|outcome| outcome.map(drop))
    }
}

/// A read into memory that the device has until its end. Dropping it gives the operation up, not the memory.
#[must_use = "the operation has started, but its result is not used"]
pub struct ReadInto(Option<BufMut>, Transfer);

impl Future for ReadInto {
    type Output = Result<BufMut, IoError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = std::task::ready!(Pin::new(&mut self.1).poll(cx));
        let into = self.0.take();
        Poll::Ready(ended.and_then(|()| into.ok_or_else(|| IoError::unplaced(0))))
    }
}

impl fmt::Debug for ReadInto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadInto").finish_non_exhaustive()
    }
}

/// A [`MetaOp`] under way. Dropping it does not undo it.
#[must_use = "the operation has started, but its result is not used"]
pub struct Meta(Operation);

impl Meta {
    /// Ends with [`IoErrorKind::Deadline`] at `at` if it has not ended before.
    pub fn by(mut self, at: Nanos) -> Self {
        self.0.deadline = Some(at);
        self
    }
}

impl Future for Meta {
    type Output = Result<Option<Reply>, IoError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx)
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").finish_non_exhaustive()
    }
}

impl fmt::Debug for Meta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meta").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
