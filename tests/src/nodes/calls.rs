//! Calls between nodes: the messages are those of the nodes; what carries them is the simulated network.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Frame;
use kvarts_peer::node::Called;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, StdError, http};

use super::net::{Net, Way};

/// The calls of one node to another.
pub struct Caller {
    /// Over this network.
    pub net: Arc<Net>,
    /// From which node to which.
    pub way: Way,
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Caller({:?})", self.way)
    }
}

fn broken() -> Status {
    Status::unavailable("the connection is broken")
}

impl Called for Caller {
    fn call(&self, request: http::Request<Body>) -> BoxFuture<http::Response<Body>, StdError> {
        let (net, way) = (Arc::clone(&self.net), self.way);
        Box::pin(async move {
            let connection = net.connection(way);
            let back = (way.1, way.0);
            let pass = |this| Arc::clone(&net).pass(this, way, connection);
            pass(way).await.map_err(|()| broken())?;
            let node = net.node(way.1).ok_or_else(|| Status::unavailable("no node answers there"))?;
            let from = net.node(way.0).ok_or_else(broken)?.id();
            let (head, body) = request.into_parts();
            let what = head.uri.path().len() as u64;
            net.note("call", way, &[what]);
            let body = Body::new(Passing::new(&net, way, way, body));
            let answer = node.answer(from, http::Request::from_parts(head, body)).await;
            pass(back).await.map_err(|()| broken())?;
            net.note("answer", back, &[what]);
            let (head, body) = answer.into_parts();
            Ok(http::Response::from_parts(head, Body::new(Passing::new(&net, way, back, body))))
        })
    }
}

/// The messages of one direction of a call.
struct Passing {
    net: Arc<Net>,
    /// Whose connection it is, how often that had been broken, and the direction.
    of: Way,
    connection: u64,
    way: Way,
    inner: Body,
    /// One that is on its way, and its passage.
    under_way: Option<(Frame<Bytes>, Passage)>,
    breaks: Pin<Box<dyn Future<Output = ()> + Send>>,
    has_ended: bool,
}

type Passage = Pin<Box<dyn Future<Output = Result<(), ()>> + Send>>;

impl Passing {
    fn new(net: &Arc<Net>, of: Way, way: Way, inner: Body) -> Self {
        let connection = net.connection(of);
        let breaks = Box::pin(Arc::clone(net).breaks(of, connection));
        Self { net: Arc::clone(net), of, connection, way, inner, under_way: None, breaks, has_ended: false }
    }
}

impl http_body::Body for Passing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.has_ended {
            return Poll::Ready(None);
        }
        if this.breaks.as_mut().poll(context).is_ready() {
            this.has_ended = true;
            return Poll::Ready(Some(Err(broken())));
        }
        if this.under_way.is_none() {
            match ready!(Pin::new(&mut this.inner).poll_frame(context)) {
                Some(Ok(frame)) => {
                    if this.way == this.of && this.net.counts_out(this.of) {
                        this.net.break_calls(this.of);
                    }
                    let passage = Arc::clone(&this.net).pass(this.way, this.of, this.connection);
                    this.under_way = Some((frame, Box::pin(passage)));
                }
                end => {
                    this.has_ended = true;
                    return Poll::Ready(end);
                }
            }
        }
        let Some((_, passage)) = &mut this.under_way else { return Poll::Pending };
        let passed = ready!(passage.as_mut().poll(context));
        let frame = this.under_way.take().map(|(frame, _)| frame);
        match passed {
            Ok(()) => {
                let bytes = frame.as_ref().and_then(Frame::data_ref).map_or(0, Bytes::len);
                this.net.note("message", this.way, &[bytes as u64]);
                Poll::Ready(frame.map(Ok))
            }
            Err(()) => {
                this.has_ended = true;
                Poll::Ready(Some(Err(broken())))
            }
        }
    }
}
