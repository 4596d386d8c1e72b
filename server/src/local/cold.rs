//! Where the bytes of a read of the local path come from: this node, other nodes, the cold tier.

use std::sync::Arc;
use std::task::{Poll, Waker};

use kvarts_layout::BlockShape;
use kvarts_store::api::{Origins, ReadEvent, ReadRequest, ReadSink, ReadStream, read_channel};
use kvarts_store::error::Error;

use crate::cold::Wish;
use crate::state::ServerState;

/// Begins a read. Where the cold tier may have what is not here, the read begins when that has been brought: what can be refused of it is
/// then told by its end.
pub(super) fn read(
    state: &Arc<ServerState>,
    request: ReadRequest,
    shape: &BlockShape,
    origins: Option<&Arc<Origins>>,
) -> Result<ReadStream, Error> {
    let wish = wish(&request, shape);
    if !state.decided.cold.as_ref().is_some_and(|cold| cold.may_bring(&wish)) {
        return begin(state, request, shape, origins);
    }
    let ((sink, stream), state, shape) = (read_channel(), Arc::clone(state), shape.clone());
    let (origins, cold) = (origins.cloned(), state.decided.cold.clone());
    let reading = async move {
        let deadline = request.deadline;
        state.bring(self::wish(&request, &shape), deadline).await;
        if sink.is_cancelled() {
            return;
        }
        match begin(&state, request, &shape, origins.as_ref()) {
            Ok(inner) => forward(&inner, &sink).await,
            // The stream ends with nothing.
            Err(error) => tracing::debug!(%error, "a read that waited for the cold tier was refused"),
        }
    };
    match cold {
        Some(cold) => cold.spawn(reading),
        None => drop(reading),
    }
    Ok(stream)
}

fn wish<'a>(request: &'a ReadRequest, shape: &BlockShape) -> Wish<'a> {
    let ReadRequest { namespace, group, coordinate, ref keys, .. } = *request;
    Wish { namespace, group, coordinate, keys, block_bytes: shape.block_bytes() }
}

fn begin(
    state: &ServerState,
    request: ReadRequest,
    shape: &BlockShape,
    origins: Option<&Arc<Origins>>,
) -> Result<ReadStream, Error> {
    match (&state.decided.cluster, origins) {
        (Some(node), origins) => {
            let blocks = request.keys.len();
            node.read(request, shape, &origins.cloned().unwrap_or_else(|| Origins::any(blocks)))
        }
        (None, Some(origins)) => state.engine.read_part(request, origins, 0),
        (None, None) => state.store().read(request),
    }
}

/// Passes the events of a read on, until the last one or until the reader has left.
async fn forward(inner: &ReadStream, sink: &ReadSink) {
    loop {
        let event = std::future::poll_fn(|context| {
            let waker: &Waker = context.waker();
            if sink.poll_cancelled(&std::task::Context::from_waker(waker)).is_ready() {
                return Poll::Ready(None);
            }
            inner.poll_next(context).map(Some)
        });
        let Some(event) = event.await else { return };
        let is_last = match &event {
            ReadEvent::End(end) => end.held_bytes == 0,
            ReadEvent::Released => true,
            ReadEvent::Layer { .. } | ReadEvent::Block(_) => false,
        };
        sink.send(event);
        if is_last {
            return;
        }
    }
}
