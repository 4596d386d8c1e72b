//! The admission of calls over gRPC: token, right, deadline and the tenant's turn.
//!
//! The authentication layer stands around every service: it knows each method's right from one table
//! (`calls/methods.rs`), so that no handler can forget to ask. A path that is not in the table (health, reflection)
//! carries no data and needs no right.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::body::Body;
use tonic::{Code, Request, Response, Status};
use tower::{Layer, Service};

use super::answer::Answer;
use super::fault::{Fault, Outcome};
use super::put;
use super::request::Arriving;
use crate::calls::call::{Call, admit};
use crate::calls::methods::{METHODS, Method};
use crate::state::connections::{ConnectionHandle, OpenCall};
use crate::state::{Right, ServerState};

/// The time in a `grpc-timeout` header: up to eight digits and a unit.
fn timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 {
        return None;
    }
    let number: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'H' => Duration::from_secs(number * 3600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Answers a call: takes it from the request, works for it until its deadline, and counts how it ended.
pub(crate) async fn answer<Q, A, F>(
    mut request: Request<Q>,
    work: impl FnOnce(Arc<Call>, Q) -> F,
) -> Result<Response<A>, Status>
where
    F: Future<Output = Outcome<A>>,
{
    let call = request.extensions_mut().remove::<Arc<Call>>();
    let call = call.ok_or_else(|| Status::internal("the table of methods lacks a method"))?;
    let work = work(Arc::clone(&call), request.into_inner());
    let result = tokio::time::timeout_at(call.deadline, work).await;
    match result.unwrap_or_else(|_| Err(Fault::late("the deadline passed"))) {
        Ok(answer) => {
            call.end(Code::Ok);
            Ok(Response::new(answer))
        }
        Err(fault) => {
            call.end(fault.code);
            Err(fault.status())
        }
    }
}

/// The call on the connection that it came by, if its tenant may have that.
fn on_connection(mut call: Call, connection: Option<ConnectionHandle>) -> Outcome<Call> {
    if let Some(connection) = &connection {
        let (tenant, is_administrator) = (&call.caller.tenant, call.caller.rights.has(Right::Admin));
        match connection.begin(tenant.number, is_administrator) {
            Ok(begun) => call.connection_call = Some(begun),
            Err(why) => {
                call.state.metrics.refused(call.name, "connections");
                if call.state.audit.may_tell() {
                    tracing::warn!(target: "audit", method = call.name, tenant = tenant.name, why, "call refused");
                }
                call.end(Code::Unavailable);
                return Err(Fault::busy(why));
            }
        }
    }
    call.connection = connection;
    Ok(call)
}

/// The layer that admits calls: token, right, deadline and the tenant's turn.
#[derive(Clone, Debug)]
pub(crate) struct AuthLayer {
    state: Arc<ServerState>,
    methods: Arc<BTreeMap<&'static str, &'static Method>>,
}

impl AuthLayer {
    pub(crate) fn new(state: Arc<ServerState>) -> Self {
        let methods = METHODS.iter().map(|method| (method.path, method)).collect();
        Self { state, methods: Arc::new(methods) }
    }
}

impl<S> Layer<S> for AuthLayer {
    type Service = AuthService<S>;

    fn layer(&self, inner: S) -> AuthService<S> {
        AuthService { layer: self.clone(), inner }
    }
}

/// Services behind that layer.
#[derive(Clone, Debug)]
pub(crate) struct AuthService<S> {
    layer: AuthLayer,
    inner: S,
}

impl<S> Service<http::Request<Body>> for AuthService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let connection = request.extensions().get::<ConnectionHandle>().cloned();
        let Some(method) = self.layer.methods.get(request.uri().path()) else {
            return self.open_call(connection.as_ref(), request);
        };
        let headers = request.headers();
        let header = headers.get(http::header::AUTHORIZATION).map(http::HeaderValue::as_bytes);
        let asked = headers.get("grpc-timeout").and_then(|value| timeout(value.as_bytes()));
        let admitted = admit(&self.layer.state, "grpc", method, header, asked);
        let call = match admitted.and_then(|call| on_connection(call, connection)) {
            Ok(call) => Arc::new(call),
            Err(fault) => return Box::pin(async move { Ok(fault.status().into_http()) }),
        };
        if call.name == "put" {
            return Box::pin(async move { Ok(put::serve(call, request.into_body()).await) });
        }
        let is_followed = !matches!(call.name, "get" | "get_layers" | "watch");
        let arriving = Arc::clone(&call);
        let mut request = request.map(|body| Body::new(Arriving::new(body, Some(arriving))));
        request.extensions_mut().insert(Arc::clone(&call));
        let answer = self.inner.call(request);
        Box::pin(async move {
            // ends: the call's deadline, by `answer`; of a read its own
            let answer = in_words(&call, answer.await?);
            // Reads follow their answers themselves, piece by piece.
            Ok(if is_followed { answer.map(|body| Answer::of(call, body)) } else { answer })
        })
    }
}

impl<S> AuthService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    /// A call that needs no token (health, reflection): it takes no part of what tenants share, its messages are short (see
    /// `serve`), and a connection has only a few at a time.
    fn open_call(
        &mut self,
        connection: Option<&ConnectionHandle>,
        request: http::Request<Body>,
    ) -> <Self as Service<http::Request<Body>>>::Future {
        let place = connection.map(ConnectionHandle::open_call);
        if let Some(None) = place {
            self.layer.state.metrics.refused("anybodys", "calls");
            let fault = Fault::busy("too many calls without a token on this connection");
            return Box::pin(async move { Ok(fault.status().into_http()) });
        }
        let place = place.flatten();
        let answer = self.inner.call(request.map(|body| Body::new(Arriving::new(body, None))));
        Box::pin(async move {
            // ends: health and reflection answer from memory; the request has `OPEN_CALL_SILENCE`
            let answer = answer.await?;
            Ok(answer.map(|body| Body::new(Counted { body, _place: place })))
        })
    }
}

/// The body of an answer to a call that needs no token, with the place that it takes.
struct Counted {
    body: Body,
    _place: Option<OpenCall>,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A refusal by the transport before the message was whole, in the contract's words: a message that cannot be read or is
/// too long is the client's mistake, and no defect.
fn in_words(call: &Call, response: http::Response<Body>) -> http::Response<Body> {
    let status = Status::from_header_map(response.headers()).filter(|_| !call.has_ended());
    let Some(status) = status else { return response };
    if !matches!(status.code(), Code::Internal | Code::OutOfRange) {
        call.end(status.code());
        return response;
    }
    let fault = Fault::malformed(status.message());
    call.end(fault.code);
    fault.status().into_http()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(timeout(b"5S"), Some(Duration::from_secs(5)));
        assert_eq!(timeout(b"99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(timeout(b"250m"), Some(Duration::from_millis(250)));
        for wrong in ["", "S", "5", "-5S", "5s", "999999999S", "5 S"] {
            assert_eq!(timeout(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
