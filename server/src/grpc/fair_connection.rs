//! A connection that shares its thread fairly, and has one of the server's places for connections.
//!
//! A large read on a fast network never finds its socket full: its connection would move bytes for as long as there are
//! any, while all other connections of the thread wait. A connection that has moved `TURN_BYTES` is therefore polled
//! again only after the others.
//!
//! A server has as many places as it was configured for. When all are taken, a new connection gets the place of the oldest
//! stranger (a client that has shown no token), and is refused where there is none. A connection loses its place when its
//! client sends no preface, makes no call for too long, or takes no answer (`connection`, `unsent`).

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::transport::server::Connected;

use super::limits;
use crate::state::connections::ConnectionHandle;
use crate::state::{ServerState, StallTimeout};

/// Bytes that a connection moves before the others of its thread are polled.
const TURN_BYTES: usize = 1 << 20;
/// The same before its client has shown a token: the headers of the first call are looked at before much of its body has come.
const STRANGERS_TURN_BYTES: usize = 16 << 10;

/// A connection that lets others have their turns.
#[derive(Debug)]
pub(super) struct FairConnection<S> {
    inner: S,
    /// Bytes moved in this turn.
    moved: usize,
    /// Bytes ever received.
    heard: usize,
    /// When the connection ends, unless something happens before.
    alarm: Option<Pin<Box<Sleep>>>,
    stall_timeout: Arc<StallTimeout>,
    handle: ConnectionHandle,
}

/// Gives a new connection one of the server's places; `None` refuses it.
pub(super) fn place<S>(state: &Arc<ServerState>, inner: S) -> Option<FairConnection<S>> {
    let free = Arc::clone(&state.connections).try_acquire_owned().ok();
    let place = free.or_else(|| state.strangers.displace(Instant::now()));
    if place.is_none() {
        state.metrics.refused("connect", "connections");
        if state.audit.may_tell() {
            tracing::warn!(target: "audit", "connection refused: all places are taken");
        }
    }
    place.map(|place| {
        FairConnection::new(inner, ConnectionHandle::new(&state.strangers, Some(place)), &state.stall_timeout)
    })
}

impl<S> FairConnection<S> {
    fn new(inner: S, handle: ConnectionHandle, stall_timeout: &Arc<StallTimeout>) -> Self {
        Self { inner, moved: 0, heard: 0, alarm: None, stall_timeout: Arc::clone(stall_timeout), handle }
    }

    /// Whether nothing happened for too long.
    fn is_idle(&mut self, context: &mut Context<'_>) -> bool {
        loop {
            let Some(until) = self.handle.until(&self.stall_timeout, self.heard >= limits::PREFACE_BYTES)
            else {
                // What ends meanwhile is seen when the alarm is due, or at the next ping.
                return false;
            };
            if Instant::now() >= until {
                return true;
            }
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(until)));
            // One that is due too early is put right when it is.
            if alarm.deadline() > until {
                alarm.as_mut().reset(until);
            }
            if alarm.as_mut().poll(context).is_pending() {
                return false;
            }
            alarm.as_mut().reset(until);
        }
    }

    fn turn(&self) -> usize {
        if self.handle.is_known() { TURN_BYTES } else { STRANGERS_TURN_BYTES }
    }

    /// Whether the turn is over. The task is woken at once, behind all that are ready already.
    fn is_over(&mut self, context: &Context<'_>) -> bool {
        let over = self.moved >= self.turn();
        if over {
            self.moved = 0;
            context.waker().wake_by_ref();
        }
        over
    }

    /// Counts what was moved; a connection that must wait for the network begins a new turn then.
    fn count<T>(&mut self, polled: &Poll<T>, bytes: usize) {
        self.moved = if polled.is_pending() { 0 } else { self.moved.saturating_add(bytes) };
    }
}

impl<S: AsyncRead + Unpin> FairConnection<S> {
    /// Reads; from a stranger no more than is left of its turn.
    fn poll_bytes(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.handle.is_known() {
            return Pin::new(&mut self.inner).poll_read(context, buffer);
        }
        let most = self.turn().saturating_sub(self.moved).min(buffer.remaining());
        let mut some = ReadBuf::new(buffer.initialize_unfilled_to(most));
        let polled = Pin::new(&mut self.inner).poll_read(context, &mut some);
        let heard = some.filled().len();
        buffer.advance(heard);
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FairConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.handle.register(context.waker());
        if self.handle.is_cut() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if self.is_over(context) {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let polled = self.poll_bytes(context, buffer);
        // That nothing came is no reason to forget what was sent in this turn.
        let heard = buffer.filled().len() - before;
        self.moved = self.moved.saturating_add(heard);
        self.heard = self.heard.saturating_add(heard);
        if self.heard > limits::STRANGERS_BYTES_MAX && !self.handle.is_known() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if polled.is_pending() && self.is_idle(context) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FairConnection<S> {
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

impl<S: Connected> Connected for FairConnection<S> {
    type ConnectInfo = ConnectionHandle;

    fn connect_info(&self) -> ConnectionHandle {
        self.handle.clone()
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
        let mut connection = fair(Endless);
        let _known = connection.handle.begin();
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

    fn fair<S>(inner: S) -> FairConnection<S> {
        FairConnection::new(inner, ConnectionHandle::new(&Arc::default(), None), &Arc::default())
    }

    fn poll<S: AsyncRead + Unpin>(connection: &mut FairConnection<S>) -> Option<io::ErrorKind> {
        let mut memory = [0; 16];
        let mut buffer = ReadBuf::new(&mut memory);
        let mut context = Context::from_waker(std::task::Waker::noop());
        match Pin::new(connection).poll_read(&mut context, &mut buffer) {
            Poll::Ready(Err(error)) => Some(error.kind()),
            _ => None,
        }
    }

    #[tokio::test]
    async fn who_says_nothing_is_hung_up_on() {
        let mut connection = fair(Silent);
        assert_eq!(poll(&mut connection), None);
        assert!(connection.alarm.is_some(), "it has so long and no longer");
        connection.handle.age(limits::STALL);
        assert_eq!(poll(&mut connection), Some(io::ErrorKind::TimedOut));
        // Less than every connection begins with is no better than nothing.
        connection.heard = limits::PREFACE_BYTES - 1;
        assert!(poll(&mut connection).is_some());
        // A client that has begun has longer, until its first call that is admitted.
        connection.heard = limits::PREFACE_BYTES;
        assert_eq!(poll(&mut connection), None);
        connection.handle.age(limits::STALL * (limits::FIRST_REQUEST_STALLS - 1));
        assert_eq!(poll(&mut connection), Some(io::ErrorKind::TimedOut));
    }

    #[tokio::test]
    async fn calls_that_need_no_token_keep_no_connection() {
        let mut connection = fair(Silent);
        connection.heard = limits::PREFACE_BYTES;
        let calls: Vec<_> = (0..1024).filter_map(|_| connection.handle.open_call()).collect();
        assert_eq!(calls.len(), limits::OPEN_CALLS_MAX);
        assert_eq!(poll(&mut connection), None);
        connection.handle.age(limits::STALL * limits::FIRST_REQUEST_STALLS);
        assert_eq!(poll(&mut connection), Some(io::ErrorKind::TimedOut));
    }

    #[tokio::test]
    async fn who_has_a_token_stays_while_something_is_under_way_and_not_for_ever_without() {
        let mut connection = fair(Silent);
        let call = connection.handle.begin();
        connection.handle.age(limits::STALL * 1000);
        assert_eq!(poll(&mut connection), None);
        drop(call);
        assert_eq!(poll(&mut connection), None);
        connection.handle.age(limits::STALL * limits::IDLE_STALLS);
        assert_eq!(poll(&mut connection), Some(io::ErrorKind::TimedOut));
        // An answer that is not taken ends it, whatever else is under way.
        let (_call, answer) = (connection.handle.begin(), connection.handle.answer());
        let later = connection.handle.answer();
        assert_eq!(poll(&mut connection), None);
        connection.handle.age(limits::STALL * 2);
        assert_eq!(poll(&mut connection), Some(io::ErrorKind::TimedOut));
        drop((answer, later));
        assert_eq!(poll(&mut connection), None);
    }

    #[tokio::test]
    async fn a_stranger_sends_so_much_and_no_more() {
        let mut connection = fair(Endless);
        let mut memory = vec![0; 1 << 20];
        let mut reads = 0;
        loop {
            let mut buffer = ReadBuf::new(&mut memory);
            let mut context = Context::from_waker(std::task::Waker::noop());
            match Pin::new(&mut connection).poll_read(&mut context, &mut buffer) {
                Poll::Ready(Err(_)) => break,
                Poll::Ready(Ok(())) => reads += buffer.filled().len(),
                Poll::Pending => {}
            }
            assert!(buffer.filled().len() <= STRANGERS_TURN_BYTES);
        }
        assert!(reads <= limits::STRANGERS_BYTES_MAX, "{reads}");
    }

    #[test]
    fn who_comes_when_all_places_are_taken_gets_that_of_the_oldest_stranger() {
        let (strangers, places) = (Arc::default(), Arc::new(tokio::sync::Semaphore::new(3)));
        let handle = || ConnectionHandle::new(&strangers, Arc::clone(&places).try_acquire_owned().ok());
        let (known, older, younger) = (handle(), handle(), handle());
        let _call = known.begin();
        assert_eq!((strangers.count(), places.available_permits()), ((2, 0), 0));
        assert!(strangers.displace(Instant::now()).is_none(), "both have just come");
        let later = Instant::now() + limits::STRANGERS_GRACE;
        let place = strangers.displace(later).unwrap();
        assert!(older.is_cut() && !younger.is_cut() && !known.is_cut());
        drop(older);
        assert_eq!(places.available_permits(), 0, "the place went on to who came");
        let other = strangers.displace(later).unwrap();
        assert!(younger.is_cut() && strangers.displace(later).is_none(), "clients with a token stay");
        drop((place, other));
        assert_eq!((strangers.count().0, places.available_permits()), (0, 2));
    }

    #[tokio::test]
    async fn a_connection_that_is_cut_off_ends_and_its_reader_is_woken() {
        let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
        let waker = Arc::clone(&wakes).into();
        let mut connection = fair(Silent);
        let (handle, mut memory) = (connection.connect_info(), [0; 16]);
        let mut poll = || {
            let mut buffer = ReadBuf::new(&mut memory);
            Pin::new(&mut connection).poll_read(&mut Context::from_waker(&waker), &mut buffer)
        };
        assert!(poll().is_pending());
        handle.cut();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(
            matches!(poll(), Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted)
        );
    }
}
