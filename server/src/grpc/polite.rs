//! A connection that lets others have its thread, and one of so many.
//!
//! A large read on a fast network never finds its socket full, so its connection would move bytes for as long as
//! there are any, and everybody else on the thread would wait. Here a connection that has moved a few of them stands
//! at the end of the queue again.
//!
//! A server has as many connections as it was configured for. Who comes when all are taken is turned away at once, and
//! who has one and says nothing, or has no request for too long, loses it. So does whoever takes nothing of what the
//! server must keep for it (`held`).

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::transport::server::Connected;

use super::limits;
use crate::node::Node;

/// Bytes that a connection moves before it is somebody else's turn.
const TURN_BYTES: usize = 1 << 20;

/// A connection with turns.
#[derive(Debug)]
pub(super) struct Polite<S> {
    inner: S,
    /// Bytes moved in this turn.
    moved: usize,
    /// Bytes that were ever heard.
    heard: usize,
    since: Instant,
    /// When somebody must have been heard, or have made a request; until then.
    silence: Option<Pin<Box<Sleep>>>,
    line: Line,
    _place: Option<OwnedSemaphorePermit>,
}

/// A connection as its calls know it.
#[derive(Clone, Default, Debug)]
pub(super) struct Line(Arc<LineState>);

#[derive(Default, Debug)]
struct LineState {
    called: AtomicBool,
    cut: AtomicBool,
    /// Whoever reads from the connection.
    reader: AtomicWaker,
}

impl Line {
    /// A request came by it.
    pub(super) fn called(&self) {
        self.0.called.store(true, Ordering::Relaxed);
    }

    /// Ends the connection, with all of its streams and what is kept for them.
    pub(super) fn cut(&self) {
        self.0.cut.store(true, Ordering::SeqCst);
        self.0.reader.wake();
    }

    fn is_called(&self) -> bool {
        self.0.called.load(Ordering::Relaxed)
    }

    fn is_cut(&self) -> bool {
        self.0.cut.load(Ordering::SeqCst)
    }
}

/// Gives a connection that came in one of the server's places; `None` turns it away.
pub(super) fn place<S>(node: &Arc<Node>, inner: S) -> Option<Polite<S>> {
    let place = Arc::clone(&node.connections).try_acquire_owned().ok();
    if place.is_none() {
        node.metrics.refused("connect", "connections");
        if node.audit.may_tell() {
            tracing::warn!(target: "audit", "connection refused: there are as many as may be");
        }
    }
    place.map(|place| Polite::new(inner, Some(place)))
}

impl<S> Polite<S> {
    fn new(inner: S, place: Option<OwnedSemaphorePermit>) -> Self {
        let (since, line) = (Instant::now(), Line::default());
        Self { inner, moved: 0, heard: 0, since, silence: None, line, _place: place }
    }

    /// Whether nothing was heard for too long: no beginning of a connection, or no request.
    fn is_silent(&mut self, context: &mut Context<'_>) -> bool {
        if self.line.is_called() {
            self.silence = None;
            return false;
        }
        let begun = self.heard >= limits::PREFACE_BYTES;
        let until = self.since + if begun { limits::FIRST_REQUEST } else { limits::STALL };
        if Instant::now() >= until {
            return true;
        }
        let silence = self.silence.get_or_insert_with(|| Box::pin(sleep_until(until)));
        if silence.deadline() != until {
            silence.as_mut().reset(until);
        }
        silence.as_mut().poll(context).is_ready()
    }

    /// Whether the turn is over. The task is woken at once, behind all who wait already.
    fn is_over(&mut self, context: &Context<'_>) -> bool {
        let over = self.moved >= TURN_BYTES;
        if over {
            self.moved = 0;
            context.waker().wake_by_ref();
        }
        over
    }

    /// Counts what was moved; whoever must wait for the network begins a new turn then.
    fn count<T>(&mut self, polled: &Poll<T>, bytes: usize) {
        self.moved = if polled.is_pending() { 0 } else { self.moved.saturating_add(bytes) };
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Polite<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.line.0.reader.register(context.waker());
        if self.line.is_cut() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if self.is_over(context) {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        // That nothing came is no reason to forget what was sent in this turn.
        let heard = buffer.filled().len() - before;
        self.moved = self.moved.saturating_add(heard);
        self.heard = self.heard.saturating_add(heard);
        if polled.is_pending() && self.is_silent(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Polite<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_over(context) {
            return Poll::Pending;
        }
        let polled = Pin::new(&mut self.inner).poll_write(context, bytes);
        let moved = if let Poll::Ready(Ok(moved)) = polled { moved } else { 0 };
        self.count(&polled, moved);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_over(context) {
            return Poll::Pending;
        }
        let polled = Pin::new(&mut self.inner).poll_write_vectored(context, pieces);
        let moved = if let Poll::Ready(Ok(moved)) = polled { moved } else { 0 };
        self.count(&polled, moved);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<S: Connected> Connected for Polite<S> {
    type ConnectInfo = Line;

    fn connect_info(&self) -> Line {
        self.line.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    /// Takes and gives everything at once.
    struct Endless;

    impl AsyncRead for Endless {
        fn poll_read(
            self: Pin<&mut Self>,
            _context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            buffer.put_slice(&[7; 4096]);
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Endless {
        fn poll_write(
            self: Pin<&mut Self>,
            _context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_moves_much_waits_its_turn_and_is_woken_for_it() {
        let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
        let waker = Arc::clone(&wakes).into();
        let mut context = Context::from_waker(&waker);
        let mut connection = Polite::new(Endless, None);
        let bytes = vec![1; 256 << 10];
        for turn in 1..4 {
            for _ in 0..4 {
                assert!(Pin::new(&mut connection).poll_write(&mut context, &bytes).is_ready());
            }
            assert!(Pin::new(&mut connection).poll_write(&mut context, &bytes).is_pending());
            assert_eq!(wakes.0.load(Ordering::Relaxed), turn);
        }
        let mut reads = 0;
        loop {
            let mut memory = [0; 4096];
            if Pin::new(&mut connection).poll_read(&mut context, &mut ReadBuf::new(&mut memory)).is_pending()
            {
                break;
            }
            reads += 1;
        }
        assert_eq!((reads, wakes.0.load(Ordering::Relaxed)), (TURN_BYTES / 4096, 4));
    }

    /// Says nothing.
    struct Silent;

    impl Connected for Silent {
        type ConnectInfo = ();

        fn connect_info(&self) {}
    }

    impl AsyncRead for Silent {
        fn poll_read(
            self: Pin<&mut Self>,
            _context: &mut Context<'_>,
            _buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[test]
    fn who_says_nothing_is_hung_up_on() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut memory = [0; 16];
        let mut poll = |connection: &mut Polite<Silent>| {
            let mut buffer = ReadBuf::new(&mut memory);
            Pin::new(connection).poll_read(&mut Context::from_waker(std::task::Waker::noop()), &mut buffer)
        };
        runtime.block_on(async {
            let mut connection = Polite::new(Silent, None);
            assert!(poll(&mut connection).is_pending());
            assert!(connection.silence.is_some(), "it has so long and no longer");
            connection.since -= limits::STALL;
            let Poll::Ready(Err(error)) = poll(&mut connection) else { panic!("it goes on for ever") };
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            // Less than every connection begins with is no better than nothing.
            (connection.heard, connection.silence) = (limits::PREFACE_BYTES - 1, None);
            assert!(poll(&mut connection).is_ready());
            // Whoever has begun has longer, until its first request.
            (connection.heard, connection.silence) = (limits::PREFACE_BYTES, None);
            assert!(poll(&mut connection).is_pending());
            connection.since -= limits::FIRST_REQUEST;
            assert!(poll(&mut connection).is_ready());
            connection.line.called();
            assert!(poll(&mut connection).is_pending() && connection.silence.is_none());
        });
    }

    #[test]
    fn a_connection_that_is_cut_off_ends_and_its_reader_is_woken() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _entered = runtime.enter();
        let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
        let waker = Arc::clone(&wakes).into();
        let mut connection = Polite::new(Silent, None);
        let (line, mut memory) = (connection.connect_info(), [0; 16]);
        let mut poll = || {
            let mut buffer = ReadBuf::new(&mut memory);
            Pin::new(&mut connection).poll_read(&mut Context::from_waker(&waker), &mut buffer)
        };
        assert!(poll().is_pending());
        line.cut();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(
            matches!(poll(), Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted)
        );
    }
}
