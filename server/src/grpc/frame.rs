//! Messages of a read as bytes for the connection, without copying what they carry.
//!
//! A message of data is a few bytes in front and then the read's memory itself, shared by reference. What is sent is
//! exactly what the contract's encoding of [`proto::ReadReply`] gives: any gRPC client reads it.

use std::any::Any;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body::Frame;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, fixed32};
use tokio::sync::mpsc::Receiver;

use super::fault::Fault;
use kvarts_wire::proto;

/// The fields of `data` and `crc32` in `ReadReply`, and of `data` in `ReadData`.
const REPLY_DATA: u32 = 1;
const REPLY_CRC32: u32 = 5;
const DATA_BYTES: u32 = 15;

/// One message, or the end.
#[derive(Debug)]
pub enum Outgoing {
    /// Bytes of one message, piece by piece.
    Message(Vec<Bytes>),
    /// The status; nothing follows.
    End(Result<(), Fault>),
}

/// A small message, encoded.
pub(super) fn message(part: proto::read_reply::Part, crc32: u32) -> Outgoing {
    let reply = proto::ReadReply { part: Some(part), crc32 };
    let mut out = BytesMut::with_capacity(reply.encoded_len() + 5);
    prefix(&mut out, reply.encoded_len());
    // The buffer grows as it must.
    let _ = reply.encode(&mut out);
    Outgoing::Message(vec![out.freeze()])
}

/// A message of data: `about` says everything but the bytes, which are not copied, and their digest.
pub fn data(about: &proto::ReadData, crc32: u32, bytes: Vec<Bytes>) -> Outgoing {
    let length: usize = bytes.iter().map(Bytes::len).sum();
    let key = encoded_len_varint(u64::from(DATA_BYTES) << 3);
    let inner = about.encoded_len() + key + encoded_len_varint(length as u64) + length;
    let outer = fixed32::encoded_len(REPLY_CRC32, &crc32)
        + encoded_len_varint(u64::from(REPLY_DATA) << 3)
        + encoded_len_varint(inner as u64)
        + inner;
    let mut out = BytesMut::with_capacity(outer - length + 5);
    prefix(&mut out, outer);
    // The order of fields is free, and this one must stand in front of what is not copied.
    fixed32::encode(REPLY_CRC32, &crc32, &mut out);
    encode_key(REPLY_DATA, WireType::LengthDelimited, &mut out);
    encode_varint(inner as u64, &mut out);
    about.encode_raw(&mut out);
    encode_key(DATA_BYTES, WireType::LengthDelimited, &mut out);
    encode_varint(length as u64, &mut out);
    let mut pieces = vec![out.freeze()];
    pieces.extend(bytes);
    Outgoing::Message(pieces)
}

/// An answer of one message.
pub(super) fn one(reply: &impl Message) -> http::Response<tonic::body::Body> {
    let mut out = BytesMut::with_capacity(reply.encoded_len() + 5);
    prefix(&mut out, reply.encoded_len());
    // The buffer grows as it must.
    let _ = reply.encode(&mut out);
    let (to, incoming) = tokio::sync::mpsc::channel(2);
    // There is room for both.
    let _ = to.try_send(Outgoing::Message(vec![out.freeze()]));
    let _ = to.try_send(Outgoing::End(Ok(())));
    response(ReadBody::new(incoming))
}

/// The response that has this body.
pub fn response(body: ReadBody) -> http::Response<tonic::body::Body> {
    let mut response = http::Response::new(tonic::body::Body::new(body));
    let kind = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}

/// gRPC's own prefix: not compressed, and so long. Messages have a bound far below 4 GiB.
fn prefix(out: &mut BytesMut, length: usize) {
    out.put_u8(0);
    out.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
}

/// What waits for a connection to take it: messages, and the rest of the one that it takes now.
///
/// The body of the response has it, and so has the task of the read: a connection asks for nothing while its client takes
/// nothing, and then the task must drop what waits.
#[derive(Debug)]
pub(super) struct Slot(Mutex<State>);

#[derive(Debug)]
struct State {
    /// None when nothing more will be taken.
    incoming: Option<Receiver<Outgoing>>,
    pieces: VecDeque<Bytes>,
    /// Pieces that were ever taken.
    taken: u64,
    /// Kept for as long as something may wait here.
    guard: Option<Arc<dyn Any + Send + Sync>>,
    given_up: bool,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps this for as long as something may wait here.
    pub(super) fn keep(&self, guard: Arc<dyn Any + Send + Sync>) {
        let mut state = self.lock();
        // A body that is gone keeps nothing.
        state.guard = state.incoming.is_some().then_some(guard);
    }

    /// Pieces that were ever taken.
    pub(super) fn taken(&self) -> u64 {
        self.lock().taken
    }

    /// Whether the client was waited for long enough.
    pub(super) fn is_given_up(&self) -> bool {
        self.lock().given_up
    }

    /// Waits for the client no longer: drops all that waits, and lets nothing more in. The guard stays until the stream
    /// is over: the client has not let go of it.
    pub(super) fn give_up(&self) {
        let mut state = self.lock();
        state.given_up = true;
        let dropped = (state.incoming.take(), std::mem::take(&mut state.pieces));
        drop(state);
        drop(dropped);
    }

    fn clear(&self) {
        let mut state = self.lock();
        let dropped = (state.incoming.take(), std::mem::take(&mut state.pieces), state.guard.take());
        drop(state);
        // What this wakes may look here.
        drop(dropped);
    }
}

/// The body of a response: messages as they come, then the status.
#[derive(Debug)]
pub struct ReadBody {
    slot: Arc<Slot>,
    ended: bool,
}

impl ReadBody {
    /// A body of what comes from there.
    pub fn new(incoming: Receiver<Outgoing>) -> Self {
        let state = State {
            incoming: Some(incoming),
            pieces: VecDeque::new(),
            taken: 0,
            guard: None,
            given_up: false,
        };
        Self { slot: Arc::new(Slot(Mutex::new(state))), ended: false }
    }

    /// What waits for the connection.
    pub(super) fn slot(&self) -> &Arc<Slot> {
        &self.slot
    }

    fn trailers(&mut self, end: Result<(), Fault>) -> Frame<Bytes> {
        self.ended = true;
        self.slot.clear();
        let mut trailers = HeaderMap::new();
        let status = end.err().map_or_else(|| tonic::Status::ok(""), |fault| fault.status());
        if status.add_header(&mut trailers).is_err() {
            // A text that no header takes: the code alone, then.
            trailers.insert("grpc-status", HeaderValue::from(i32::from(status.code())));
        }
        Frame::trailers(trailers)
    }

    /// The next message, its pieces taken apart, or the first of them.
    fn next(&self, context: &mut Context<'_>) -> Poll<Next> {
        let mut state = self.slot.lock();
        loop {
            if let Some(piece) = state.pieces.pop_front() {
                state.taken += 1;
                return Poll::Ready(Next::Piece(piece));
            }
            let Some(incoming) = &mut state.incoming else { return Poll::Ready(Next::Cleared) };
            match incoming.poll_recv(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Outgoing::Message(pieces))) => state.pieces.extend(pieces),
                Poll::Ready(Some(Outgoing::End(end))) => return Poll::Ready(Next::End(end)),
                // The task of the read is gone without a status.
                Poll::Ready(None) => {
                    return Poll::Ready(Next::End(Err(Fault::busy("the read was interrupted"))));
                }
            }
        }
    }
}

/// What a body goes on with.
enum Next {
    Piece(Bytes),
    End(Result<(), Fault>),
    /// The client was given up.
    Cleared,
}

impl Drop for ReadBody {
    fn drop(&mut self) {
        self.slot.clear();
    }
}

impl http_body::Body for ReadBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let Poll::Ready(next) = self.next(context) else { return Poll::Pending };
        Poll::Ready(Some(match next {
            Next::Piece(piece) => Ok(Frame::data(piece)),
            Next::End(end) => Ok(self.trailers(end)),
            // Perhaps in the middle of a message: the stream is reset.
            Next::Cleared => {
                self.ended = true;
                self.slot.clear();
                Err(Fault::late("the client read no data for too long").status())
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(outgoing: Outgoing) -> Vec<u8> {
        let Outgoing::Message(pieces) = outgoing else { panic!("a message") };
        pieces.iter().flat_map(|piece| piece.iter().copied()).collect()
    }

    #[test]
    fn a_message_without_copies_is_the_contracts_encoding() {
        for (length, first_block) in [(0usize, 0), (1, 3), (127, 0), (128, 1), (1 << 20, 70_000)] {
            let whole: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let about =
                proto::ReadData { layer: 3, first_block, blocks: 9, offset: 1 << 40, ..Default::default() };
            let (left, right) = whole.split_at(length / 3);
            let parts = vec![Bytes::copy_from_slice(left), Bytes::copy_from_slice(right)];
            let found = bytes_of(data(&about, 7, parts));
            let (head, body) = found.split_at(5);
            assert_eq!(head[1..], (body.len() as u32).to_be_bytes());
            let reply = proto::ReadReply::decode(body).unwrap();
            let expected = proto::ReadData { data: Bytes::from(whole), ..about };
            assert_eq!((reply.part, reply.crc32), (Some(proto::read_reply::Part::Data(expected)), 7));
        }
    }

    #[test]
    fn what_waits_is_let_go_though_nobody_asks_the_body() {
        use http_body::Body as _;
        let (to, incoming) = tokio::sync::mpsc::channel(4);
        let mut body = ReadBody::new(incoming);
        let (slot, mut context) = (Arc::clone(body.slot()), Context::from_waker(std::task::Waker::noop()));
        let (memory, guard) = (Arc::new([7u8; 64]), Arc::new(()));
        struct Piece(Arc<[u8; 64]>);
        impl AsRef<[u8]> for Piece {
            fn as_ref(&self) -> &[u8] {
                &self.0[..]
            }
        }
        slot.keep(Arc::clone(&guard) as _);
        let message = || {
            let piece = || Bytes::from_owner(Piece(Arc::clone(&memory)));
            Outgoing::Message(vec![piece(), piece()])
        };
        to.try_send(message()).unwrap();
        to.try_send(message()).unwrap();
        // One piece was taken, one is left of its message, and a whole message waits.
        let Poll::Ready(Some(Ok(taken))) = Pin::new(&mut body).poll_frame(&mut context) else { panic!() };
        assert_eq!((slot.taken(), Arc::strong_count(&memory)), (1, 5));
        slot.give_up();
        assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&guard)), (2, 2));
        assert!(slot.is_given_up() && to.is_closed());
        drop(taken);
        assert_eq!(Arc::strong_count(&memory), 1);
        assert!(matches!(Pin::new(&mut body).poll_frame(&mut context), Poll::Ready(Some(Err(_)))));
        assert!(matches!(Pin::new(&mut body).poll_frame(&mut context), Poll::Ready(None)));
        assert_eq!(Arc::strong_count(&guard), 1, "it is kept until the stream is over");
    }

    #[test]
    fn a_small_message_is_decoded_as_it_was() {
        let ready = proto::LayerReady { layer: 1, blocks: 2 };
        let found = bytes_of(message(proto::read_reply::Part::Layer(ready), 9));
        let reply = proto::ReadReply::decode(&found[5..]).unwrap();
        assert_eq!((reply.part, reply.crc32), (Some(proto::read_reply::Part::Layer(ready)), 9));
    }
}
