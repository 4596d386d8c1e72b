//! A put over gRPC: the blocks' bytes, gathered from the caller's memory into messages with their digests.

use std::sync::Arc;

use bytes::BytesMut;
use kvarts_contract::api::{BlockOutcome, Durability, Parent, PutReply, PutRequest};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Reply;
use kvarts_layout::{BlockShape, Layout};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::remote::Remote;
use super::timeouts::{GRACE, LONGEST};
use kvarts_wire::digest::StreamDigest;
use kvarts_wire::proto;
use kvarts_wire::proto::put_request::Part;
use kvarts_wire::{convert, fault, limits};

/// What can be said of a put before it is sent; the shape of its blocks.
pub(super) fn check(remote: &Remote, request: &PutRequest) -> Result<Arc<BlockShape>, Reason> {
    remote.check(&request.keys, &request.from, request.deadline)?;
    // What a path sends piece by piece can only be seen whole here.
    if let Some(origins) = request.origins.as_ref().filter(|origins| origins.len() != request.keys.len()) {
        let (expected, found) = (request.keys.len() as u64, origins.len() as u64);
        return Err(Reason::Length { expected, found });
    }
    if let Parent::Key(parent) = request.parent
        && request.keys.contains(&parent)
    {
        return Err(Reason::OutOfOrder(parent));
    }
    remote.shape(request.namespace, (request.group, request.coordinate), &request.from, None)
}

/// Sends a put and answers for it.
pub(super) async fn run(
    remote: Arc<Remote>,
    request: PutRequest,
    shape: Arc<BlockShape>,
    reply: Reply<Result<PutReply, Error>>,
) {
    let mut answer = send(&remote, &request, &shape, &reply).await;
    if let Err(Reason::UnknownNamespace(namespace)) = answer
        && remote.register_again(namespace).await.is_ok()
    {
        answer = send(&remote, &request, &shape, &reply).await;
    }
    // A caller that is gone needs no answer.
    let _ = reply.send(answer.map_err(Error));
}

async fn send(
    remote: &Remote,
    request: &PutRequest,
    shape: &BlockShape,
    reply: &Reply<Result<PutReply, Error>>,
) -> Result<PutReply, Reason> {
    let (to, messages) = mpsc::channel(limits::FRAMES_WAITING);
    let mut store = remote.store();
    let call = remote.request(ReceiverStream::new(messages), request.deadline);
    // The server keeps the deadline; a network that stands still brings no word of it.
    let call_timeout = remote.left(request.deadline).min(LONGEST) + GRACE;
    let answer = async move { tokio::time::timeout(call_timeout, store.put(call)).await };
    let mut digest = StreamDigest::of_put();
    let (answer, ()) = tokio::join!(answer, messages_of(request, shape, (&mut digest, to), reply));
    let answer = answer.map_err(|_| Reason::DeadlinePassed)?;
    let found = answer.map_err(|status| fault::reason_of(&status))?.into_inner();
    if digest.put_reply(&found) != found.crc32 {
        return Err(Reason::remote(
            "the answer to the put was damaged in transit, so it is unknown which blocks are stored: \
            look the blocks up",
        ));
    }
    if found.outcomes.len() != request.keys.len() {
        return Err(Reason::Bug("the reply has a wrong number of blocks"));
    }
    Ok(PutReply { outcomes: found.outcomes.iter().map(outcome).collect() })
}

pub(super) fn outcome(wire: &proto::PutOutcome) -> BlockOutcome {
    use proto::put_outcome::What;
    match (wire.what(), &wire.error) {
        (What::Stored, None) => BlockOutcome::Stored,
        (What::AlreadyThere, None) => BlockOutcome::AlreadyThere,
        (What::InFlight, None) => BlockOutcome::InFlight,
        (What::HeldElsewhere, None) => BlockOutcome::HeldElsewhere,
        (_, Some(error)) => BlockOutcome::Refused(fault::reason(error)),
        (What::Refused, None) => BlockOutcome::Refused(Reason::Bug(
            "the server refused the put without a \
            reason",
        )),
    }
}

pub(super) fn header(request: &PutRequest) -> proto::PutHeader {
    use proto::parent::Parent as Wire;
    let parent = match request.parent {
        Parent::Root => Some(Wire::Root(true)),
        Parent::Key(key) => Some(Wire::Key(key.as_bytes().to_vec().into())),
        Parent::Unknown => None,
    };
    let layout = match request.layout {
        None => proto::Layout::Auto,
        Some(Layout::FullBlock) => proto::Layout::FullBlock,
        Some(Layout::LayerBlock) => proto::Layout::LayerBlock,
    };
    let durability = match request.durability {
        Durability::Durable => proto::Durability::Durable,
        Durability::Relaxed => proto::Durability::Relaxed,
    };
    let whole = |after: std::time::Duration| u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1);
    let origins = request.origins.iter().flatten().flat_map(|origin| origin.0);
    proto::PutHeader {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(request.group, request.coordinate)),
        parent: Some(proto::Parent { parent }),
        first_block: request.first_block,
        keys: convert::key_bytes(&request.keys),
        layout: layout.into(),
        durability: durability.into(),
        expires_after_ms: request.expires_after.map_or(0, whole),
        origins: origins.collect::<Vec<u8>>().into(),
    }
}

/// Sends header and bytes until all are sent, the call has ended, or the caller stopped caring.
async fn messages_of(
    request: &PutRequest,
    shape: &BlockShape,
    (digest, to): (&mut StreamDigest, mpsc::Sender<proto::PutRequest>),
    reply: &Reply<Result<PutReply, Error>>,
) {
    let mut message = |part| {
        let crc32 = digest.put(&part);
        proto::PutRequest { part: Some(part), crc32 }
    };
    // ends: the call, after the put's time, drops the receiver
    if to.send(message(Part::Header(header(request)))).await.is_err() {
        return;
    }
    let sizes: Vec<u64> =
        shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
    let mut frame = Frame { offset: 0, bytes: BytesMut::with_capacity(limits::FRAME_BYTES) };
    for block in 0..request.keys.len() as u32 {
        for (index, &bytes) in (0u32..).zip(&sizes) {
            // The places were checked against the shape: each chunk has one.
            let Some(chunk) = request.from.chunk(index, block, bytes) else { return };
            let mut at = 0;
            while at < chunk.len() {
                let some = (chunk.len() - at).min(limits::FRAME_BYTES - frame.bytes.len());
                let before = frame.bytes.len();
                frame.bytes.resize(before + some, 0);
                chunk.copy_out(at, frame.bytes.get_mut(before..).unwrap_or_default());
                at += some;
                if frame.bytes.len() == limits::FRAME_BYTES
                    // ends: the call, after the put's time, drops the receiver
                    && (reply.is_cancelled() || to.send(message(frame.take())).await.is_err())
                {
                    return;
                }
            }
        }
    }
    if !frame.bytes.is_empty() {
        // A call that has ended has said why.
        // ends: the call, after the put's time, drops the receiver
        let _ = to.send(message(frame.take())).await;
    }
}

/// A message that is being filled.
struct Frame {
    offset: u64,
    bytes: BytesMut,
}

impl Frame {
    fn take(&mut self) -> Part {
        let next = BytesMut::with_capacity(limits::FRAME_BYTES);
        let data = std::mem::replace(&mut self.bytes, next).freeze();
        let offset = self.offset;
        self.offset += data.len() as u64;
        Part::Data(proto::PutData { offset, data })
    }
}
