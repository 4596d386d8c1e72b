//! A connection that shares its thread fairly, and has one of the server's places for connections.
//!
//! A large read on a fast network never finds its socket full: its connection would move bytes for as long as there are
//! any, while all other connections of the thread wait. A connection that has moved `TURN_BYTES` is therefore polled
//! again only after the others. Where several tenants have calls under way, all connections of one have such a turn together:
//! who opens a thousand gets no more of the threads than who has one, but for a least piece of each.
//!
//! A server has as many places as it was configured for, and a few more for administrators on the local socket. When all are
//! taken, a new connection gets the place of the oldest stranger (a client that has shown no token), and is refused where
//! there is none. A connection loses its place when its client sends no preface, makes no call for too long, or takes no
//! answer (`connections`, `unsent`), and when it rests and its tenant has more than its part of them.

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
pub(super) fn place<S>(state: &Arc<ServerState>, inner: S, is_local: bool) -> Option<FairConnection<S>> {
    let place = state.connections.take(Instant::now(), is_local);
    if place.is_none() {
        state.metrics.refused("connect", "connections");
        if state.audit.may_tell() {
            tracing::warn!(target: "audit", "connection refused: the limit of connections is reached");
        }
    }
    place.map(|place| {
        FairConnection::new(
            inner,
            ConnectionHandle::new(&state.connections, Some(place)),
            &state.stall_timeout,
        )
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
        if self.handle.is_known() { self.handle.part_of(TURN_BYTES) } else { STRANGERS_TURN_BYTES }
    }

    /// The most that is written at once: where the turn is a part of one, no more than is left of it.
    fn left(&self) -> usize {
        match self.turn() {
            TURN_BYTES.. => usize::MAX,
            turn => turn.saturating_sub(self.moved).max(1),
        }
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
        if heard > 0 && !self.handle.is_known() && !self.handle.hears(heard) {
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
        let bytes = bytes.split_at(bytes.len().min(self.left())).0;
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
        let left = self.left();
        let (mut fit, mut sum) = (0, 0);
        for piece in pieces {
            if piece.len() > left - sum {
                break;
            }
            (fit, sum) = (fit + 1, sum + piece.len());
        }
        let longer = pieces.get(fit).filter(|_| sum == 0);
        let polled = match longer {
            Some(piece) => Pin::new(&mut self.inner).poll_write(context, piece.split_at(left).0),
            None => Pin::new(&mut self.inner).poll_write_vectored(context, pieces.split_at(fit).0),
        };
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
    use crate::state::Places;
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
        let _known = connection.handle.begin(0, false).unwrap();
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

    #[test]
    fn connections_of_one_tenant_have_one_turn_together_while_another_has_calls() {
        let places = Arc::new(Places::new(64, &[1, 2]));
        let connection =
            || FairConnection::new(Endless, come(&places, Instant::now(), false).unwrap(), &Arc::default());
        let mut context = Context::from_waker(std::task::Waker::noop());
        let bytes = vec![1; 4 << 20];
        let mut moved = |connection: &mut FairConnection<Endless>, in_pieces: bool| {
            let mut sum = 0;
            loop {
                let pieces = [IoSlice::new(&bytes[..700]), IoSlice::new(&bytes)];
                let polled = match in_pieces {
                    true => Pin::new(&mut *connection).poll_write_vectored(&mut context, &pieces),
                    false => Pin::new(&mut *connection).poll_write(&mut context, &bytes),
                };
                match polled {
                    Poll::Ready(moved) => sum += moved.unwrap(),
                    Poll::Pending => return sum,
                }
            }
        };
        let (mut many, mut one): (Vec<_>, _) = ((0..8).map(|_| connection()).collect(), connection());
        let calls: Vec<_> = many.iter().map(|many| many.handle.begin(1, false).unwrap()).collect();
        assert!(moved(&mut many[0], false) >= TURN_BYTES, "it is alone");
        let call = one.handle.begin(2, false).unwrap();
        for in_pieces in [false, true] {
            let of_many: usize = many.iter_mut().map(|one| moved(one, in_pieces)).sum();
            assert_eq!(of_many, TURN_BYTES, "eight connections, one turn");
            assert!(moved(&mut one, in_pieces) >= TURN_BYTES);
        }
        drop(calls);
        let _again = many[0].handle.begin(1, false).unwrap();
        assert!(moved(&mut many[0], true) >= TURN_BYTES, "the others of it have nothing to do");
        drop(call);
        assert!(moved(&mut many[1], true) >= TURN_BYTES);
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
        let places = Arc::new(Places::new(16, &[]));
        FairConnection::new(inner, ConnectionHandle::new(&places, None), &Arc::default())
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
        let call = connection.handle.begin(0, false).unwrap();
        connection.handle.age(limits::STALL * 1000);
        assert_eq!(poll(&mut connection), None);
        drop(call);
        assert_eq!(poll(&mut connection), None);
        connection.handle.age(limits::STALL * limits::IDLE_STALLS);
        assert_eq!(poll(&mut connection), Some(io::ErrorKind::TimedOut));
        // An answer that is not taken ends it, whatever else is under way.
        let (_call, answer) = (connection.handle.begin(0, false).unwrap(), connection.handle.answer());
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
    fn strangers_send_so_much_together_and_who_sent_little_stays() {
        let places = Arc::new(Places::new(1024, &[]));
        let stranger = || ConnectionHandle::new(&places, None);
        let most = limits::STRANGERS_BYTES_MAX;
        let many: Vec<_> = (0..limits::STRANGERS_SUM_BYTES / most).map(|_| stranger()).collect();
        assert!(many.iter().all(|one| one.hears(most)));
        let new = stranger();
        assert!(new.hears(limits::STRANGERS_FEW_BYTES), "a handshake and a first call");
        assert!(!new.hears(1));
        // Of one that has shown its token, and of one that has left, nothing counts.
        let other = stranger();
        let _call = many[0].begin(0, false).unwrap();
        assert!(other.hears(limits::STRANGERS_FEW_BYTES + 1));
        drop(many);
        assert!(other.hears(most / 2));
    }

    fn come(places: &Arc<Places>, now: Instant, is_local: bool) -> Option<ConnectionHandle> {
        Some(ConnectionHandle::new(places, Some(places.take(now, is_local)?)))
    }

    #[test]
    fn who_comes_when_all_places_are_taken_gets_that_of_the_oldest_stranger() {
        let places = Arc::new(Places::new(3, &[]));
        let handle = || come(&places, Instant::now(), false);
        let (known, older, younger) = (handle().unwrap(), handle().unwrap(), handle().unwrap());
        let _call = known.begin(0, false).unwrap();
        assert_eq!((places.strangers(), places.free()), ((2, 0), 0));
        assert!(places.take(Instant::now(), false).is_none(), "both have just come");
        let later = Instant::now() + limits::STRANGERS_GRACE;
        let place = places.take(later, false).unwrap();
        assert!(older.is_cut() && !younger.is_cut() && !known.is_cut());
        drop(older);
        assert_eq!(places.free(), 0, "the place went on to who came");
        let other = places.take(later, false).unwrap();
        assert!(younger.is_cut() && places.take(later, false).is_none(), "clients with a token stay");
        drop((place, other));
        assert_eq!((places.strangers().0, places.free()), (0, 2));
    }

    #[test]
    fn a_tenant_with_all_the_connections_it_gets_leaves_others_their_part_and_loses_its_longest_idle_one() {
        let places = Arc::new(Places::new(64, &[1, 2]));
        let mut of_first: Vec<ConnectionHandle> = Vec::new();
        // Of 56 that may be known a quarter is the other's own.
        while let Some(one) = come(&places, Instant::now(), false) {
            drop(one.begin(1, false).unwrap());
            of_first.push(one);
            if of_first.iter().any(ConnectionHandle::is_cut) {
                break;
            }
        }
        assert_eq!(of_first.len(), 43, "42 and one that took the place of the first");
        assert!(of_first[0].is_cut() && !of_first[1].is_cut(), "the one that rested for longest went");
        let busy: Vec<_> = of_first[1..].iter().map(|one| one.begin(1, false).unwrap()).collect();
        let later = Instant::now() + limits::STRANGERS_GRACE;
        let one_more = come(&places, later, false).unwrap();
        assert!(one_more.begin(1, false).is_err() && !one_more.is_known(), "each has something to do");
        let of_second: Vec<_> = (0..14).map(|_| come(&places, later, false).unwrap()).collect();
        let _calls: Vec<_> = of_second.iter().map(|one| one.begin(2, false).unwrap()).collect();
        assert!(of_first[1..].iter().all(|one| !one.is_cut()), "its own part takes nothing of the first's");
        let beyond = come(&places, later, false).unwrap();
        assert!(
            beyond.begin(2, false).is_err(),
            "each has something to do, and what is common is the first's"
        );
        drop(busy);
        assert!(beyond.begin(2, false).is_ok(), "the first is furthest above its part");
        assert_eq!(of_first[1..].iter().filter(|one| one.is_cut()).count(), 1);
    }

    #[test]
    fn an_administrator_on_the_socket_finds_a_place_whatever_is_taken() {
        let places = Arc::new(Places::new(0, &[]));
        assert!(come(&places, Instant::now(), false).is_none());
        let one = come(&places, Instant::now(), true).unwrap();
        assert!(one.begin(0, false).is_err(), "it is kept for administrators");
        assert!(one.begin(0, true).is_ok() && one.is_known());
        let mut others = Vec::new();
        while let Some(other) = come(&places, Instant::now(), true) {
            // Each of them is an administrator's, and rests.
            drop(other.begin(0, true).unwrap());
            others.push(other);
            assert!(others.len() < 100);
            if one.is_cut() {
                break;
            }
        }
        assert_eq!(others.len(), limits::ADMINISTRATORS_PLACES, "the one that rested for longest made room");
        drop((one, others));
        assert_eq!(places.strangers().0, 0);
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
