//! What a server is measured beside: the same transport and the same messages, from memory, with nothing behind them.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use kvarts_store::api::Order;
use prost::Message;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use super::digest::Said;
use super::frame::{self, Outgoing, ReadBody};
use super::{limits, services};
use crate::proto;

/// Answers every read with so many messages of the same bytes, shared and not copied. Of the request it takes
/// what digests begin with, and nothing else.
#[derive(Clone, Debug)]
pub(crate) struct Bare {
    /// One message's bytes.
    pub(crate) bytes: Bytes,
    /// How many of them.
    pub(crate) messages: u64,
}

impl NamedService for Bare {
    const NAME: &'static str = proto::reads_server::SERVICE_NAME;
}

impl Service<http::Request<Body>> for Bare {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self { bytes, messages } = self.clone();
        let mut digested = crc32fast::Hasher::new();
        digested.update(&bytes);
        Box::pin(async move {
            let (to, incoming) = mpsc::channel(limits::FRAMES_WAITING);
            tokio::spawn(async move {
                // Who asks for nothing that can be read finds other digests.
                let asked = services::one_message(request.into_body()).await.unwrap_or_default();
                let asked = proto::ReadRequest::decode(asked).unwrap_or_default();
                let mut said = Said::of_read(Order::Layers, &asked);
                for number in 0..messages {
                    let offset = number * bytes.len() as u64;
                    let about = proto::ReadData { offset, ..proto::ReadData::default() };
                    let crc32 = said.read_data(&about, &digested, bytes.len());
                    if to.send(frame::data(&about, crc32, vec![bytes.clone()])).await.is_err() {
                        return;
                    }
                }
                // A client that is gone needs no status.
                let _ = to.send(Outgoing::End(Ok(()))).await;
            });
            let mut response = http::Response::new(Body::new(ReadBody::new(incoming)));
            let kind = http::HeaderValue::from_static("application/grpc");
            response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
            Ok(response)
        })
    }
}
