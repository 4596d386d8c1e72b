//! Small writes of a connection, gathered: what several tasks say in one go leaves as one packet.
//!
//! A call is a header, a message and an end, which HTTP/2's tasks hand to a connection one after the other. Written as they come
//! they are three packets, each with its way through the kernel, and wake the other side three times. So what is small is held
//! until it is flushed, and a flush lets other tasks have one turn first, that what they have to say goes along. Nothing is held
//! longer than that.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that are held at most.
const HELD_MAX: usize = 16 << 10;

/// A stream whose small writes are gathered.
#[derive(Debug)]
pub(super) struct Gathered<S> {
    stream: S,
    held: Vec<u8>,
    /// How much of it was written.
    written: usize,
    /// Others had their turn since the last flush.
    waited: bool,
}

impl<S: AsyncWrite + Unpin> Gathered<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, held: Vec::new(), written: 0, waited: false }
    }

    /// Holds bytes if there is room.
    fn hold(&mut self, bytes: &[IoSlice<'_>]) -> Option<usize> {
        let len: usize = bytes.iter().map(|some| some.len()).sum();
        if self.held.len() + len > HELD_MAX {
            return None;
        }
        bytes.iter().for_each(|some| self.held.extend_from_slice(some));
        Some(len)
    }

    /// Writes what is held.
    fn drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(rest) = self.held.get(self.written..).filter(|rest| !rest.is_empty()) {
            match Pin::new(&mut self.stream).poll_write(context, rest) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(some)) => self.written += some,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        self.held.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(len) = self.hold(bytes) {
            return Poll::Ready(Ok(len));
        }
        // What came before goes first; then there is room, or it is so much that it goes as it is.
        match self.drain(context) {
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            Poll::Pending => return Poll::Pending,
        }
        if let Some(len) = self.hold(bytes) {
            return Poll::Ready(Ok(len));
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.held.is_empty() && !std::mem::replace(&mut self.waited, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        match self.drain(context) {
            Poll::Ready(Ok(())) => self.waited = false,
            other => return other,
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.drain(context) {
            Poll::Ready(Ok(())) => Pin::new(&mut self.stream).poll_shutdown(context),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use proptest::prelude::*;

    use super::*;

    /// What was written, each time; a write takes at most `most` bytes, and every second time nothing.
    #[derive(Default)]
    struct Recorder {
        writes: Vec<Vec<u8>>,
        most: usize,
        stalls: bool,
        is_shut: bool,
    }

    impl AsyncWrite for Recorder {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.stalls = !self.stalls;
            if self.stalls && self.most > 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let some = if self.most > 0 { bytes.len().min(self.most) } else { bytes.len() };
            self.writes.push(bytes[..some].to_vec());
            Poll::Ready(Ok(some))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.is_shut = true;
            Poll::Ready(Ok(()))
        }
    }

    fn write(stream: &mut Gathered<Recorder>, bytes: &[u8]) -> Poll<usize> {
        Pin::new(stream).poll_write(&mut Context::from_waker(Waker::noop()), bytes).map(Result::unwrap)
    }

    fn flush(stream: &mut Gathered<Recorder>) -> bool {
        Pin::new(stream).poll_flush(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn what_is_said_while_others_have_their_turn_goes_along() {
        let mut stream = Gathered::new(Recorder::default());
        assert_eq!(write(&mut stream, b"header "), Poll::Ready(7));
        assert!(!flush(&mut stream), "others have a turn");
        assert_eq!(write(&mut stream, b"message "), Poll::Ready(8));
        assert_eq!(write(&mut stream, b"end"), Poll::Ready(3));
        assert!(flush(&mut stream), "and only one");
        assert_eq!(stream.stream.writes, [b"header message end".to_vec()]);
        assert!(flush(&mut stream), "nothing is held");
        write(&mut stream, b"next").is_ready();
        assert!(!flush(&mut stream) && flush(&mut stream));
        assert_eq!(stream.stream.writes.len(), 2);
    }

    #[test]
    fn a_stream_that_ends_says_what_it_holds_before() {
        let mut stream = Gathered::new(Recorder::default());
        write(&mut stream, b"last words").is_ready();
        let ended = Pin::new(&mut stream).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        assert!(ended.is_ready() && stream.stream.is_shut);
        assert_eq!(stream.stream.writes, [b"last words".to_vec()]);
    }

    proptest! {
        #[test]
        fn bytes_leave_in_their_order_and_none_is_lost_or_doubled(
            lengths in prop::collection::vec((0usize..40_000, any::<bool>()), 1..20),
            most in 1usize..9000,
        ) {
            let mut stream = Gathered::new(Recorder { most, ..Recorder::default() });
            let mut said = Vec::new();
            for (at, (length, flushes)) in lengths.into_iter().enumerate() {
                let bytes: Vec<u8> = (0..length).map(|n| (n * 31 + at) as u8).collect();
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    if let Poll::Ready(some) = write(&mut stream, rest) {
                        rest = &rest[some..];
                    }
                }
                prop_assert!(stream.held.len() <= HELD_MAX);
                said.extend(bytes);
                while flushes && !flush(&mut stream) {}
            }
            while !flush(&mut stream) {}
            prop_assert_eq!(stream.stream.writes.concat(), said);
        }
    }
}
