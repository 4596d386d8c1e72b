//! Many reads at once, each of which reports its own end, without a future for each.
//!
//! A layerwise read is thousands of extents; what it needs is "extent i is in your memory", in the order in which
//! they arrive. After the first batches have grown the tables, an extent allocates nothing.

use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::Shared;
use super::devices::OVERDUE;
use super::operations::{Request, Work};
use crate::io::slots::Key;
use crate::task::LocalTask;
use kvarts_contract::buffers::buf::SharedBuf;
use kvarts_contract::io_error::FileId;
use kvarts_contract::io_error::IoError;
use kvarts_contract::{class::Class, clock::Nanos};

/// The end of one extent of a [`ReadBatch`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExtentDone {
    /// The name it was pushed under.
    pub extent: u64,
    /// Whether its memory holds its bytes.
    pub result: Result<(), IoError>,
}

/// Reads that were pushed together. Dropping it gives up what is outstanding; memory that the device has stays
/// with it until it is done.
pub struct ReadBatch {
    shared: Rc<Shared>,
    key: Key,
    class: Class,
    timer: Option<(Nanos, LocalTask)>,
}

impl ReadBatch {
    pub(super) fn new(shared: Rc<Shared>, class: Class) -> Self {
        let key = shared.core.borrow_mut().open_batch();
        Self { shared, key, class, timer: None }
    }

    /// Adds a read. Extents of one batch go to the device in the order in which they are pushed, as far as the
    /// limits allow; call [`ReadBatch::submit`] after the last one.
    pub fn push(&mut self, extent: u64, file: FileId, offset: u64, into: SharedBuf) {
        let request = Request::transfer(self.class, offset, Work::Read(file, into));
        self.shared.core.borrow_mut().push(self.key, extent, request);
    }

    /// Hands over what may go now; the rest follows as the device catches up.
    pub fn submit(&mut self) {
        self.shared.dispatch();
        self.shared.send();
    }

    /// Extents that have not ended.
    pub fn outstanding(&self) -> usize {
        self.shared.core.borrow_mut().batch(self.key).map_or(0, |batch| batch.outstanding)
    }

    /// The next end, in the order in which they came; `None` if every extent has been reported.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<ExtentDone>> {
        let mut core = self.shared.core.borrow_mut();
        let Some(batch) = core.batch(self.key) else { return Poll::Ready(None) };
        if let Some((extent, result)) = batch.done.pop_front() {
            return Poll::Ready(Some(ExtentDone { extent, result }));
        }
        if batch.outstanding == 0 {
            return Poll::Ready(None);
        }
        match &batch.waker {
            Some(known) if known.will_wake(cx.waker()) => {}
            _ => batch.waker = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// The next end that has come already.
    pub fn try_next(&mut self) -> Option<ExtentDone> {
        let mut core = self.shared.core.borrow_mut();
        let (extent, result) = core.batch(self.key)?.done.pop_front()?;
        Some(ExtentDone { extent, result })
    }

    /// The next end, as [`ReadBatch::poll_next`] gives it.
    pub async fn next(&mut self) -> Option<ExtentDone> {
        self.submit();
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same for as long as the device answers: `Err` with how many extents were given up when it has not answered one of them for ten
    /// seconds. Their memory stays with the device; the batch is empty then and can be used again.
    pub async fn next_answered(&mut self) -> Result<Option<ExtentDone>, usize> {
        self.submit();
        poll_fn(|cx| self.poll_next_answered(cx)).await
    }

    fn poll_next_answered(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<ExtentDone>, usize>> {
        loop {
            if let Poll::Ready(done) = self.poll_next(cx) {
                return Poll::Ready(Ok(done));
            }
            if self.timer.is_none() {
                // One timer for all waits of some time: only that it goes off now and then counts.
                let at = self.shared.rt.clock().now().plus(OVERDUE / 2);
                self.timer = Some((at, self.shared.rt.sleep_until(at)));
            }
            if let Some((_, timer)) = &mut self.timer
                && timer.as_mut().poll(cx).is_pending()
            {
                return Poll::Pending;
            }
            self.timer = None;
            let now = self.shared.rt.clock().now();
            let mut core = self.shared.core.borrow_mut();
            if core.is_batch_overdue(self.key, now) {
                let given_up = core.batch(self.key).map_or(0, |batch| batch.outstanding);
                core.abandon_batch(self.key, true);
                drop(core);
                self.shared.dispatch();
                return Poll::Ready(Err(given_up));
            }
        }
    }

    /// The next end, or `Err` with how many extents were given up when the time is `at`. Their memory stays with
    /// the device; the batch is empty then and can be used again.
    pub async fn next_by(&mut self, at: Nanos) -> Result<Option<ExtentDone>, usize> {
        self.submit();
        poll_fn(|cx| self.poll_next_by(at, cx)).await
    }

    fn poll_next_by(&mut self, at: Nanos, cx: &mut Context<'_>) -> Poll<Result<Option<ExtentDone>, usize>> {
        if let Poll::Ready(done) = self.poll_next(cx) {
            return Poll::Ready(Ok(done));
        }
        // One timer for all waits with one deadline.
        if self.timer.as_ref().is_none_or(|(known, _)| *known != at) {
            self.timer = Some((at, self.shared.rt.sleep_until(at)));
        }
        if let Some((_, timer)) = &mut self.timer
            && timer.as_mut().poll(cx).is_pending()
        {
            return Poll::Pending;
        }
        self.timer = None;
        let given_up = self.outstanding();
        self.shared.core.borrow_mut().abandon_batch(self.key, true);
        self.shared.dispatch();
        Poll::Ready(Err(given_up))
    }
}

impl Drop for ReadBatch {
    fn drop(&mut self) {
        self.shared.core.borrow_mut().close_batch(self.key);
        self.shared.dispatch();
    }
}

impl fmt::Debug for ReadBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadBatch").field("class", &self.class).finish_non_exhaustive()
    }
}
