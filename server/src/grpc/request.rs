//! The body of a request while it arrives: in bounded time, and in bounded memory.
//!
//! A request that is one message is received whole before it is looked at, and only this module watches over that: a
//! message that never ends would keep its call for ever, and a crowd of them any amount of memory. So a message that is
//! large takes its part of what all large requests may have, before more of it is received, and keeps it until its answer
//! is gone. Each tenant has a part that no other can take, a request that waits holds nothing, and a client whose request has one must send.
//! Puts are streams, whose messages have timeout and turns of their own (`put.rs`). What needs no token (health,
//! reflection) shares nothing with others here: its messages are short, and it may be silent for so long.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;

use super::fault::Fault;
use super::limits;
use crate::calls::call::Call;
use crate::state::parts::Part;

type Taking = Pin<Box<dyn Future<Output = Option<Part>> + Send>>;

/// A request's body.
pub(super) struct Arriving {
    body: Body,
    /// Whose it is; none for calls that need no token.
    call: Option<Arc<Call>>,
    /// Bytes that have come.
    came: u64,
    /// The first bytes, which say how long the message is.
    prefix: Vec<u8>,
    /// What is waited for, and what came before that.
    taking: Option<(Taking, Frame<Bytes>)>,
    /// Since when a large message must go on coming.
    large: Option<Instant>,
    /// By when something must have happened.
    until: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Arriving {
    /// A body that arrives from now on.
    pub(super) fn new(body: Body, call: Option<Arc<Call>>) -> Self {
        let timeout = if call.is_some() { limits::STALL } else { limits::OPEN_CALL_SILENCE };
        let until = Instant::now() + timeout;
        let (came, prefix) = (0, Vec::new());
        Self { body, call, came, prefix, taking: None, large: None, until, alarm: None }
    }

    fn is_late(&mut self, context: &mut Context<'_>) -> bool {
        loop {
            if Instant::now() >= self.until {
                return true;
            }
            let until = self.until;
            let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(until)));
            if alarm.deadline() > until {
                alarm.as_mut().reset(until);
            }
            if alarm.as_mut().poll(context).is_pending() {
                return false;
            }
            // Something happened since it was set.
            alarm.as_mut().reset(until);
        }
    }

    /// Counts what came. A message that turns out to be large waits for its part with these bytes and no others.
    fn count(&mut self, frame: Frame<Bytes>) -> Option<Frame<Bytes>> {
        let data = frame.data_ref().map_or(&[][..], |data| &data[..]);
        self.came += data.len() as u64;
        let missing = 5usize.saturating_sub(self.prefix.len());
        self.prefix.extend(data.iter().take(missing));
        let Some(call) = &self.call else {
            self.until = Instant::now() + limits::OPEN_CALL_SILENCE;
            return Some(frame);
        };
        if let Some(since) = self.large {
            let sent = Duration::from_millis(self.came.saturating_mul(1000) / limits::LARGE_RATE);
            self.until = since + (limits::LARGE_GRACE + sent).min(limits::STALL);
            return Some(frame);
        }
        if self.came <= limits::SMALL_REQUEST_BYTES as u64 {
            return Some(frame);
        }
        let announced = self.prefix.get(1..5).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
        let announced = announced.map_or(usize::MAX, |bytes| u32::from_be_bytes(bytes) as usize);
        // It may be that much more comes than was announced, which its reader refuses.
        let (length, call) = (announced.max(self.came as usize), Arc::clone(call));
        self.until = call.deadline.min(Instant::now() + limits::WAIT);
        let taking = async move { call.state.receiving.take(call.caller.tenant.number, length).await };
        self.taking = Some((Box::pin(taking), frame));
        None
    }

    /// Waits for the part, if one is waited for.
    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Frame<Bytes>>, Fault>> {
        let Some((taking, _)) = &mut self.taking else { return Poll::Ready(Ok(None)) };
        let full = || Fault::busy("the memory for large requests is full: retry later");
        match taking.as_mut().poll(context) {
            Poll::Pending if self.is_late(context) => Poll::Ready(Err(full())),
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(Err(full())),
            Poll::Ready(Some(part)) => {
                if let Some(call) = &self.call {
                    call.keep(part);
                }
                let now = Instant::now();
                (self.large, self.until) = (Some(now), now + limits::LARGE_GRACE);
                Poll::Ready(Ok(self.taking.take().map(|(_, frame)| frame)))
            }
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
        loop {
            match self.poll_part(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(fault)) => return Poll::Ready(Some(Err(fault.status()))),
                Poll::Ready(Ok(Some(frame))) => return Poll::Ready(Some(Ok(frame))),
                Poll::Ready(Ok(None)) => {}
            }
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(frame) = self.count(frame) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Poll::Pending if self.is_late(context) => {
                    return Poll::Ready(Some(
                        Err(Fault::late("the request did not arrive in time").status()),
                    ));
                }
                other => return other,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.taking.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.taking {
            None => self.body.size_hint(),
            Some(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Body as _;
    use std::pin::pin;
    use std::task::Waker;

    /// A body of this many bytes, and then nothing more.
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

    #[tokio::test]
    async fn who_was_not_asked_for_a_token_takes_nothing_of_what_others_share() {
        let mut large = Arriving::new(Body::new(Begun(limits::LARGE_BYTES_MAX)), None);
        assert!(matches!(poll(&mut large), Poll::Ready(Some(Ok(_)))));
        assert!(large.taking.is_none() && poll(&mut large).is_pending());
        large.until = Instant::now();
        assert!(matches!(poll(&mut large), Poll::Ready(Some(Err(_)))), "it is silent for ever");
    }

    #[tokio::test]
    async fn a_request_that_does_not_end_is_late() {
        let mut endless = Arriving::new(Body::new(Begun(5)), None);
        assert!(matches!(poll(&mut endless), Poll::Ready(Some(Ok(_)))), "what came before is taken");
        assert!(poll(&mut endless).is_pending());
        endless.until = Instant::now();
        let Poll::Ready(Some(Err(status))) = poll(&mut endless) else { panic!("it goes on for ever") };
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
    }
}
