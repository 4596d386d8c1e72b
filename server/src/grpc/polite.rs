//! A connection that lets others have its thread.
//!
//! A large read on a fast network never finds its socket full, so its connection would move bytes for as long as
//! there are any, and everybody else on the thread would wait. Here a connection that has moved a few of them stands
//! at the end of the queue again.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// Bytes that a connection moves before it is somebody else's turn.
const TURN_BYTES: usize = 1 << 20;

/// A connection with turns.
#[derive(Debug)]
pub(super) struct Polite<S> {
    inner: S,
    /// Bytes moved in this turn.
    moved: usize,
}

impl<S> Polite<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, moved: 0 }
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
        if self.is_over(context) {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        // That nothing came is no reason to forget what was sent in this turn.
        if polled.is_ready() {
            self.moved = self.moved.saturating_add(buffer.filled().len() - before);
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
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
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
        let mut connection = Polite::new(Endless);
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
}
