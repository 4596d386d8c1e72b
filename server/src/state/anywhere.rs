//! Where the bytes of a read that has memory for all of it come from: this node, other nodes, the cold tier.

use std::sync::Arc;
use std::task::{Poll, Waker};

use kvarts_contract::api::{Order, Origins, ReadEvent, ReadRequest, ReadSink, ReadStream, read_channel};
use kvarts_contract::error::Error;
use kvarts_layout::BlockShape;

use super::ServerState;
use crate::cold::Wish;

impl ServerState {
    /// Begins a read. Where the cold tier may have what is not here it is asked first; what can be refused of the read is then told
    /// by its end.
    pub(crate) fn read(
        self: &Arc<Self>,
        request: ReadRequest,
        shape: &BlockShape,
        origins: Option<&Arc<Origins>>,
    ) -> Result<ReadStream, Error> {
        let cold = self.decided.cold.clone().filter(|cold| cold.may_bring(&wish(&request, shape)));
        let Some(cold) = cold else { return begin(self, request, shape, origins) };
        let ((sink, stream), state, shape) = (read_channel(), Arc::clone(self), Arc::new(shape.clone()));
        let (origins, reader) = (origins.cloned(), Arc::clone(&cold));
        let reading = async move {
            let coming = state.bring(wish(&request, &shape), request.deadline).await;
            let inner = match coming {
                None => begin(&state, request, &shape, origins.as_ref()),
                Some(coming) => {
                    let known = match &state.decided.cluster {
                        Some(node) => node.copies_of(&request.clone().tiled(&shape).0, &shape).await,
                        None => None,
                    };
                    let origins = origins.unwrap_or_else(|| Origins::any(request.keys.len()));
                    cold.read(request, &shape, origins, known, &coming)
                }
            };
            if sink.is_cancelled() {
                return;
            }
            match inner {
                Ok(inner) => forward(&inner, &sink).await,
                // The stream ends with nothing.
                Err(error) => tracing::debug!(%error, "a read that waited for the cold tier was refused"),
            }
        };
        reader.spawn(reading);
        Ok(stream)
    }
}

fn wish<'a>(request: &'a ReadRequest, shape: &BlockShape) -> Wish<'a> {
    let ReadRequest { namespace, group, coordinate, ref keys, order, .. } = *request;
    let (block_bytes, by_layers) = (shape.block_bytes(), order == Order::Layers);
    Wish { namespace, group, coordinate, keys, block_bytes, by_layers }
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
        // ends: the read's deadline; or the reader leaves (`poll_cancelled`)
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
