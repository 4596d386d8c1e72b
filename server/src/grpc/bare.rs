//! What a server is measured beside: the same transport and the same messages, from memory, with nothing behind them.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service;

use super::frame::{self, Outgoing, ReadBody};
use super::limits;
use crate::proto;

/// Answers every read with so many messages of the same bytes, shared and not copied.
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

    fn call(&mut self, _request: http::Request<Body>) -> Self::Future {
        let Self { bytes, messages } = self.clone();
        let crc32 = crc32fast::hash(&bytes);
        Box::pin(async move {
            let (to, incoming) = mpsc::channel(limits::FRAMES_WAITING);
            tokio::spawn(async move {
                for number in 0..messages {
                    let offset = number * bytes.len() as u64;
                    let about = proto::ReadData { offset, crc32, ..proto::ReadData::default() };
                    if to.send(frame::data(&about, vec![bytes.clone()])).await.is_err() {
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
