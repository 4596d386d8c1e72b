//! An answer until the client has it: its call lasts as long, and with it the tenant's turn and all that it took for the call.
//!
//! The transport takes a message before the client makes room for it, and keeps it for as long as the client likes. So
//! whatever is large in it says when it is really gone, and a connection whose client takes nothing is cut off (`state/connections.rs`).

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use crate::calls::call::Call;
use crate::state::connections::{Answered, ConnectionHandle};

/// Messages from this size on are followed until they are gone. Smaller ones the transport copies, or has a few of.
pub(super) const FOLLOWED_BYTES: usize = 1024;

/// What lives as long as something of an answer.
struct AnswerGuard {
    _call: Arc<Call>,
    _answered: Option<Answered>,
}

/// Bytes, and what lives as long as they.
pub(super) struct Followed<K> {
    bytes: Bytes,
    _guard: Arc<K>,
}

impl<K> AsRef<[u8]> for Followed<K> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The same bytes, with which `kept` lives.
pub(super) fn followed<K: Send + Sync + 'static>(bytes: Bytes, guard: &Arc<K>) -> Bytes {
    if bytes.len() < FOLLOWED_BYTES {
        return bytes;
    }
    Bytes::from_owner(Followed { bytes, _guard: Arc::clone(guard) })
}

/// The body of an answer.
pub(super) struct Answer {
    body: Body,
    guard: Arc<AnswerGuard>,
}

impl Answer {
    /// The same body, with which the call lives.
    pub(super) fn of(call: Arc<Call>, body: Body) -> Body {
        let answered = call.connection.as_ref().map(ConnectionHandle::answer);
        let guard = Arc::new(AnswerGuard { _call: call, _answered: answered });
        Body::new(Self { body, guard })
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        polled.map_ok(|frame| frame.map_data(|bytes| followed(bytes, &self.guard)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
