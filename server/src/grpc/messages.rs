//! The messages of a stream from a client, one at a time: the length of the next one is known before it is received.
//!
//! The task that takes them decides what must be there first: a turn, memory, a share. Until then what came stays in the
//! transport's window, and here at most one frame of it.

use std::pin::Pin;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use http_body::Body as _;
use tonic::body::Body;

use super::fault::{Fault, Outcome};
use super::limits;

/// Bytes in front of each message: whether it is compressed, and how long it is.
const PREFIX: usize = 5;

/// The messages that are still to come.
pub(super) struct Messages {
    body: Body,
    bytes: BytesMut,
    /// Of the message that has begun.
    length: Option<usize>,
}

impl Messages {
    pub(super) fn new(body: Body) -> Self {
        Self { body, bytes: BytesMut::new(), length: None }
    }

    /// Bytes of the next message as soon as it begins to arrive; none if there is none.
    pub(super) async fn begun(&mut self) -> Outcome<Option<usize>> {
        if let Some(length) = self.length {
            return Ok(Some(length));
        }
        while self.bytes.len() < PREFIX {
            if !self.more().await? {
                return match self.bytes.is_empty() {
                    true => Ok(None),
                    false => Err(Fault::malformed("the request is incomplete")),
                };
            }
        }
        if self.bytes.get_u8() != 0 {
            return Err(Fault::malformed("compressed requests are not supported"));
        }
        let length = usize::try_from(self.bytes.get_u32()).unwrap_or(usize::MAX);
        if length > limits::MESSAGE_BYTES_MAX {
            return Err(Fault::malformed(format!(
                "the request has {length} bytes, but the limit is {}",
                limits::MESSAGE_BYTES_MAX
            )));
        }
        self.length = Some(length);
        Ok(Some(length))
    }

    /// The next message, whole; none if there is none.
    pub(super) async fn message(&mut self) -> Outcome<Option<Bytes>> {
        let Some(length) = self.begun().await? else { return Ok(None) };
        self.bytes.reserve(length.saturating_sub(self.bytes.len()));
        while self.bytes.len() < length {
            if !self.more().await? {
                return Err(Fault::malformed("the request is incomplete"));
            }
        }
        self.length = None;
        Ok(Some(self.bytes.split_to(length).freeze()))
    }

    /// The same within a time.
    pub(super) async fn message_within(&mut self, timeout: Duration, what: &str) -> Outcome<Option<Bytes>> {
        let came = tokio::time::timeout(timeout, self.message()).await;
        came.map_err(|_| Fault::late(what))?
    }

    /// Takes what came; false at the end.
    async fn more(&mut self) -> Outcome<bool> {
        let body = &mut self.body;
        // ends: of requests the body's own time (`Arriving`), of puts `message_within` and `PIECE_TIMEOUT`
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        let Some(frame) = frame else { return Ok(false) };
        let frame = frame.map_err(|status| Fault::broken(&status))?;
        if let Ok(data) = frame.into_data() {
            self.bytes.extend_from_slice(&data);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Frame;
    use std::collections::VecDeque;
    use std::task::{Context, Poll};
    use tonic::Status;

    struct Pieces(VecDeque<Bytes>);

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
        }
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
    }

    #[tokio::test]
    async fn messages_are_whole_however_they_are_cut_and_their_length_is_known_before_they_are_received() {
        let wanted: [&[u8]; 4] = [b"one", b"", b"three and more", b"4"];
        let all: Vec<u8> = wanted.iter().flat_map(|message| framed(message)).collect();
        for size in [1, 2, 3, 7, 100] {
            let pieces = all.chunks(size).map(Bytes::copy_from_slice).collect();
            let mut messages = Messages::new(Body::new(Pieces(pieces)));
            for message in wanted {
                assert_eq!(messages.begun().await.unwrap(), Some(message.len()));
                assert!(messages.bytes.len() < size.max(1), "it is received before it was asked for");
                assert_eq!(messages.message().await.unwrap().unwrap(), message);
            }
            assert!(messages.begun().await.unwrap().is_none() && messages.message().await.unwrap().is_none());
        }
    }

    #[tokio::test]
    async fn what_is_no_message_or_too_long_is_refused_before_it_is_received() {
        let long = (limits::MESSAGE_BYTES_MAX as u32 + 1).to_be_bytes();
        for wrong in
            [vec![1, 0, 0, 0, 0], [&[0][..], &long].concat(), vec![0, 0], framed(b"abc")[..6].to_vec()]
        {
            let mut messages = Messages::new(Body::new(Pieces([Bytes::from(wrong.clone())].into())));
            let answer = messages.message().await;
            assert_eq!(answer.unwrap_err().code, tonic::Code::InvalidArgument, "{wrong:?}");
            assert!(messages.bytes.capacity() < 4096);
        }
    }
}
