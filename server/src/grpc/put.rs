//! `Put`: a header, then the bytes of all blocks.
//!
//! What arrives is taken in pieces of whole blocks: each piece has memory of the server's, is checked against the
//! digests that travelled with it, and is put as soon as it is whole. A client that stalls, damages, doubles, leaves
//! out or goes on too long loses its call, and the memory comes back; what it left incomplete was never put.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvarts_contract::buffers::BufMut;
use kvarts_contract::error::Reason;
use prost::Message;
use tonic::body::Body;

use super::answer::Answer;
use super::digest::StreamDigest;
use super::fault::{Fault, Outcome};
use super::messages::Messages;
use super::{convert, frame, limits};
use crate::calls::call::Call;
use crate::calls::upload::{Pieces, Upload};
use kvarts_wire::proto;

/// The messages of one put, each of which must come in time.
struct Incoming {
    messages: Messages,
    /// Where the next message must begin.
    at: u64,
    /// What of the last message was not used yet.
    rest: bytes::Bytes,
    /// Of the messages that have come so far.
    digest: StreamDigest,
}

impl Incoming {
    fn new(body: Body) -> Self {
        Self {
            messages: Messages::new(body),
            at: 0,
            rest: bytes::Bytes::new(),
            digest: StreamDigest::of_put(),
        }
    }

    /// Bytes of the next message, once it begins to arrive; none if there is none.
    async fn begun(&mut self) -> Outcome<Option<usize>> {
        let begun = tokio::time::timeout(limits::STALL, self.messages.begun()).await;
        begun.map_err(|_| Fault::late(LATE))?
    }

    async fn message(&mut self) -> Outcome<Option<proto::put_request::Part>> {
        let Some(message) = self.messages.message_within(limits::STALL, LATE).await? else { return Ok(None) };
        let message = proto::PutRequest::decode(message)
            .map_err(|error| Fault::malformed(format!("the message is not a valid PutRequest: {error}")))?;
        let part = message.part.ok_or_else(|| Fault::malformed("a put message is empty"))?;
        // Before anything is done with it: a header says where all bytes belong.
        let found = self.digest.put(&part);
        if found != message.crc32 {
            return Err(Fault::damaged(self.at, message.crc32, found));
        }
        Ok(Some(part))
    }

    async fn header(&mut self, call: &Call) -> Outcome<proto::PutHeader> {
        // Its keys are kept for as long as the put goes on.
        if let Some(length) = self.begun().await?.filter(|length| *length > limits::SMALL_REQUEST_BYTES) {
            call.keep_large(length).await?;
        }
        // ends: `STALL`, by its `message`; and the put's deadline
        match self.message().await? {
            Some(proto::put_request::Part::Header(header)) => Ok(header),
            Some(_) => Err(Fault::malformed("the first message of a put must be a header")),
            None => Err(Fault::malformed("the put has no header")),
        }
    }

    /// The next data message, whole and in order.
    async fn data(&mut self, call: &Call) -> Outcome<bytes::Bytes> {
        const AROUND: usize = 64;
        let most = limits::PUT_DATA_BYTES_MAX + AROUND;
        let too_long =
            || Fault::malformed("a message of the put has more than 4 MiB of data: send smaller messages");
        if self.begun().await?.is_some_and(|length| length > most) {
            return Err(too_long());
        }
        // ends: `STALL`, by its `message`; and the put's deadline
        let data = match self.message().await? {
            Some(proto::put_request::Part::Data(data)) => data,
            Some(_) => return Err(Fault::malformed("the put has a second header")),
            None => {
                return Err(Fault::malformed(format!(
                    "the put ended after {} bytes, but its header announces more bytes",
                    self.at
                )));
            }
        };
        if data.offset != self.at {
            return Err(Fault::malformed(format!(
                "the put has data for offset {}, but offset {} is expected: send the data in order",
                data.offset, self.at
            )));
        }
        if data.data.len() > limits::PUT_DATA_BYTES_MAX {
            return Err(too_long());
        }
        self.at += data.data.len() as u64;
        call.bytes_in.fetch_add(data.data.len() as u64, Ordering::Relaxed);
        Ok(data.data)
    }

    /// Fills memory from the messages.
    async fn fill(&mut self, call: &Call, pages: &mut BufMut) -> Outcome<()> {
        let mut filled = 0;
        while filled < pages.len() {
            if self.rest.is_empty() {
                self.rest = self.data(call).await?;
            }
            let some = self.rest.split_to(self.rest.len().min(pages.len() - filled));
            pages.copy_in(filled, &some);
            filled += some.len();
        }
        Ok(())
    }

    /// Nothing may follow.
    async fn end(&mut self) -> Outcome<()> {
        // ends: `STALL`, by its `message`; and the put's deadline
        if !self.rest.is_empty() || self.message().await?.is_some() {
            return Err(Fault::malformed(format!(
                "the header of the put announces {} bytes, but more bytes follow",
                self.at
            )));
        }
        Ok(())
    }
}

/// What a client is told whose next message does not come.
const LATE: &str = "the next message of the put did not arrive in time";

/// Serves one put over gRPC.
pub(super) async fn serve(call: Arc<Call>, body: Body) -> http::Response<Body> {
    let deadline = call.deadline;
    let reply = tokio::time::timeout_at(deadline, put(&call, body)).await;
    let reply = reply.unwrap_or_else(|_| Err(Fault::late("the deadline passed")));
    call.end(reply.as_ref().map_or_else(|fault| fault.code, |_| tonic::Code::Ok));
    match reply {
        Ok(reply) => frame::one(&reply).map(|body| Answer::of(call, body)),
        Err(fault) => fault.status().into_http(),
    }
}

async fn put(call: &Call, body: Body) -> Outcome<proto::PutReply> {
    let mut incoming = Incoming::new(body);
    let header = incoming.header(call).await?;
    let mut upload = Upload::check(call, header)?;
    upload.place(call).await;
    let block_bytes = usize::try_from(upload.shape.block_bytes()).map_err(|_| Reason::TooMany("bytes"))?;
    let mut pieces = Pieces::default();
    let each = upload.piece_blocks(call);
    let mut turn = None;
    for first in (0..upload.keys.len()).step_by(each) {
        let count = each.min(upload.keys.len() - first);
        let bytes = upload.shape.block_bytes().saturating_mul(count as u64);
        // A turn and memory are asked for when there is something to put into it, not for a client that only announces; and
        // what there is stays with the transport until then.
        if incoming.rest.is_empty() {
            incoming.begun().await?;
        }
        if !call.state.puts.go_on(&call.caller.tenant, bytes, &mut turn).await {
            return Err(Fault::busy("the memory for puts is full"));
        }
        let wait =
            tokio::time::timeout(limits::WAIT, call.state.take_memory(&call.caller.tenant, bytes)).await;
        let pages = wait.map_err(|_| Fault::busy("the server's memory for requests is full"))?;
        let mut pages = pages.ok_or(Reason::TooMany("bytes"))?;
        let filled = tokio::time::timeout(limits::PIECE_TIMEOUT, incoming.fill(call, &mut pages)).await;
        filled.map_err(|_| Fault::late("the bytes of the put arrived too slowly"))??;
        upload.place_again(call).await;
        let pages = pages.share();
        for run in upload.runs(first, first + count) {
            let part = pages.slice((run.start - first) * block_bytes, run.len() * block_bytes);
            pieces.put(&upload, run, part.ok_or(Reason::OutOfBounds)?, None, call).await?;
        }
    }
    incoming.end().await?;
    pieces.take_until(0).await?;
    upload.offer(call, &pieces.outcomes);
    call.state.trouble.put_ended(&pieces.outcomes, || call.state.engine.health());
    let mut reply = proto::PutReply { outcomes: convert::wire_outcomes(&pieces.outcomes), crc32: 0 };
    reply.crc32 = incoming.digest.put_reply(&reply);
    Ok(reply)
}
