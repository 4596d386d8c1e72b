//! A read over gRPC: it is asked for, and what arrives is taken in until it ends or breaks off.

use std::ops::Range;
use std::sync::Arc;

use kvarts_contract::api::{Order, ReadEnd, ReadEvent, ReadRequest, ReadSink, wanted_layers};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockShape;
use tonic::{Code, Status, Streaming};

use super::arrival::Arrival;
use super::remote::{AGAIN, Remote, while_lost};
use super::timeouts::{GRACE, LONGEST};
use kvarts_wire::proto;
use kvarts_wire::{convert, fault};

/// What can be said of a read before it is sent; the shape of its blocks.
pub(super) fn check(remote: &Remote, request: &ReadRequest) -> Result<Arc<BlockShape>, Reason> {
    remote.check(&request.keys, &request.into, request.deadline)?;
    let (column, layers) = ((request.group, request.coordinate), request.layers.as_ref());
    let shape = remote.shape(request.namespace, column, &request.into, layers)?;
    wanted_layers(layers, &shape)?;
    Ok(shape)
}

/// Reads and announces until the end.
pub(super) async fn run(remote: Arc<Remote>, request: ReadRequest, shape: Arc<BlockShape>, sink: ReadSink) {
    let layers = request.layers.clone().unwrap_or(0..shape.layers().len() as u32);
    let asked = message(&request);
    let mut arrival = Arrival::new(&request, &shape, layers, &asked);
    let end = match all(&mut arrival, &remote, (&request, &asked), &sink).await {
        Ok(Some(end)) => end,
        Ok(None) => return,
        Err(reason) => arrival.broken(&reason),
    };
    sink.send(ReadEvent::End(end));
}

pub(super) fn message(request: &ReadRequest) -> proto::ReadRequest {
    let class = match request.class {
        Class::Small | Class::Foreground | Class::Put => proto::ReadClass::ReadForeground,
        Class::Prefetch => proto::ReadClass::ReadPrefetch,
        Class::Background => proto::ReadClass::ReadBackground,
    };
    let range =
        |layers: &Range<u32>| proto::read_request::LayerRange { start: layers.start, end: layers.end };
    proto::ReadRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(request.group, request.coordinate)),
        keys: convert::key_bytes(&request.keys),
        layers: request.layers.as_ref().map(range),
        class: class.into(),
    }
}

async fn open(
    remote: &Remote,
    asked: (&ReadRequest, &proto::ReadRequest),
) -> Result<Streaming<proto::ReadReply>, Status> {
    while_lost(AGAIN.map(|_| begin(remote, asked))).await
}

async fn begin(
    remote: &Remote,
    (request, asked): (&ReadRequest, &proto::ReadRequest),
) -> Result<Streaming<proto::ReadReply>, Status> {
    let call = remote.request(asked.clone(), request.deadline);
    let reply = match request.order {
        // ends: the time in the call's head, which the transport keeps until the answer begins
        Order::Blocks => remote.reads().get(call).await,
        // ends: the time in the call's head, which the transport keeps until the answer begins
        Order::Layers => remote.reads().get_layers(call).await,
    };
    Ok(reply?.into_inner())
}

/// Why a stream that had begun broke off. A message that the transport cannot read is no refusal.
fn broken(status: &Status) -> Reason {
    match status.code() {
        Code::OutOfRange | Code::Unimplemented if status.details().is_empty() => {
            Reason::remote(format!("a message of the read is not valid: {}", status.message()))
        }
        _ => fault::reason_of(status),
    }
}

/// Takes everything in; nothing if the caller stopped caring.
async fn all(
    arrival: &mut Arrival<'_>,
    remote: &Remote,
    (request, asked): (&ReadRequest, &proto::ReadRequest),
    sink: &ReadSink,
) -> Result<Option<ReadEnd>, Reason> {
    let left = remote.left(request.deadline).min(LONGEST);
    let until = tokio::time::Instant::now() + left + GRACE;
    let mut opened = open(remote, (request, asked)).await;
    if let Err(Reason::UnknownNamespace(namespace)) = opened.as_ref().map(drop).map_err(fault::reason_of) {
        remote.register_again(namespace).await?;
        opened = open(remote, (request, asked)).await;
    }
    let mut stream = opened.map_err(|status| fault::reason_of(&status))?;
    loop {
        // The server keeps the deadline; a network that stands still brings no word of it.
        let next =
            tokio::time::timeout_at(until, stream.message()).await.map_err(|_| Reason::DeadlinePassed)?;
        let Some(reply) = next.map_err(|status| broken(&status))? else { break };
        if sink.is_cancelled() {
            return Ok(None);
        }
        if let Some(end) = arrival.take(&reply, sink)? {
            return Ok(Some(end));
        }
    }
    Err(Reason::Busy("the connection was interrupted"))
}
