//! The body of a request while it arrives: in bounded time, and in bounded memory.
//!
//! A request that is one message is received whole before anybody looks at it, and nobody else watches over that: a
//! message that never ends would keep its call for ever, and a crowd of them any amount of memory. So its bytes beyond
//! the first few are a part of what all requests together may have here, and all of them come within one patience.
//! Puts are streams, whose messages have patience and turns of their own (`put.rs`). What needs no token (health,
//! reflection) shares nothing with others here: its messages are short, and it may be silent for so long.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;

use super::fault::Fault;
use super::limits;

/// Bytes of large requests that are being received, of all together.
#[derive(Debug, Default)]
pub struct Receiving(AtomicU64);

/// A request's body.
pub(super) struct Arriving {
    body: Body,
    /// What is shared with others, if something is.
    all: Option<Arc<Receiving>>,
    /// Bytes that have come.
    came: u64,
    /// Those of them that are a part of what all may have.
    counted: u64,
    /// By when all of them must have come, and what wakes whoever waits for them then.
    until: Option<Instant>,
    /// From each that comes on, for those that need not end.
    silence: Option<Duration>,
    late: Option<Pin<Box<Sleep>>>,
}

impl Receiving {
    /// Bytes now.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn take(&self, bytes: u64) -> bool {
        let fits = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= limits::RECEIVING_BYTES_MAX);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits).is_ok()
    }
}

impl Arriving {
    /// A body that arrives from now on, within `patience` if there is a bound.
    pub(super) fn new(body: Body, all: &Arc<Receiving>, patience: Option<Duration>) -> Self {
        let until = patience.map(|patience| Instant::now() + patience);
        Self { body, all: Some(Arc::clone(all)), came: 0, counted: 0, until, silence: None, late: None }
    }

    /// A body that arrives from somebody who was not asked for a token.
    pub(super) fn of_anybody(body: Body) -> Self {
        let silence = limits::ANYBODYS_SILENCE;
        let until = Some(Instant::now() + silence);
        Self { body, all: None, came: 0, counted: 0, until, silence: Some(silence), late: None }
    }

    fn is_late(&mut self, context: &mut Context<'_>) -> bool {
        let Some(until) = self.until else { return false };
        let late = self.late.get_or_insert_with(|| Box::pin(sleep_until(until)));
        late.as_mut().poll(context).is_ready()
    }

    fn count(&mut self, bytes: usize) -> Result<(), Fault> {
        self.came = self.came.saturating_add(bytes as u64);
        let beyond = self.came.saturating_sub(limits::SMALL_REQUEST_BYTES);
        let more = beyond.saturating_sub(self.counted);
        if let Some(silence) = self.silence {
            (self.until, self.late) = (Some(Instant::now() + silence), None);
        }
        let Some(all) = &self.all else { return Ok(()) };
        if more > 0 && !all.take(more) {
            return Err(Fault::busy("the server receives as many large requests as fit into memory"));
        }
        self.counted = beyond;
        Ok(())
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if let Some(all) = &self.all {
            all.0.fetch_sub(self.counted, Ordering::SeqCst);
        }
    }
}

impl http_body::Body for Arriving {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                let counted = self.count(frame.data_ref().map_or(0, Bytes::len));
                Poll::Ready(Some(counted.map(|()| frame).map_err(|fault| fault.status())))
            }
            Poll::Pending if self.is_late(context) => {
                Poll::Ready(Some(Err(Fault::late("the request did not come in time").status())))
            }
            other => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Body as _;
    use std::pin::pin;
    use std::task::Waker;

    /// So many bytes, and then nothing more.
    struct Begun(usize);

    impl http_body::Body for Begun {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            match std::mem::take(&mut self.0) {
                0 => Poll::Pending,
                bytes => Poll::Ready(Some(Ok(Frame::data(vec![0; bytes].into())))),
            }
        }
    }

    fn poll(body: &mut Arriving) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        pin!(body).poll_frame(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn large_requests_share_what_may_be_received_and_small_ones_have_their_own() {
        let all = Arc::<Receiving>::default();
        let begun = |bytes| Arriving::new(Body::new(Begun(bytes)), &all, None);
        let small = limits::SMALL_REQUEST_BYTES as usize;
        let (mut first, mut second, mut little) =
            (begun(small + limits::RECEIVING_BYTES_MAX as usize), begun(small + 1), begun(small));
        assert!(matches!(poll(&mut first), Poll::Ready(Some(Ok(_)))));
        assert_eq!(all.bytes(), limits::RECEIVING_BYTES_MAX);
        let Poll::Ready(Some(Err(status))) = poll(&mut second) else { panic!("there was room for it") };
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert!(matches!(poll(&mut little), Poll::Ready(Some(Ok(_)))));
        drop((first, second));
        assert_eq!(all.bytes(), 0);
    }

    #[test]
    fn who_was_not_asked_for_a_token_takes_nothing_of_what_others_share() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut large = Arriving::of_anybody(Body::new(Begun(limits::RECEIVING_BYTES_MAX as usize)));
            assert!(matches!(poll(&mut large), Poll::Ready(Some(Ok(_)))));
            assert!(large.all.is_none() && poll(&mut large).is_pending());
            large.until = Some(Instant::now());
            large.late = None;
            tokio::time::sleep(Duration::from_millis(5)).await;
            assert!(matches!(poll(&mut large), Poll::Ready(Some(Err(_)))), "it is silent for ever");
        });
    }

    #[test]
    fn a_request_that_does_not_end_is_late() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let all = Arc::<Receiving>::default();
            let mut endless = Arriving::new(Body::new(Begun(5)), &all, Some(Duration::ZERO));
            assert!(matches!(poll(&mut endless), Poll::Ready(Some(Ok(_)))), "what came before is taken");
            tokio::time::sleep(Duration::from_millis(5)).await;
            let Poll::Ready(Some(Err(status))) = poll(&mut endless) else { panic!("it goes on for ever") };
            assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
            assert!(poll(&mut Arriving::new(Body::new(Begun(0)), &all, None)).is_pending());
        });
    }
}
