//! One call, from its admission to its end: who calls, whether the token allows it, by when, and what is counted.
//!
//! The authentication layer stands around every service: it knows each method's right from one table, so that no handler
//! can forget to ask. A path that is not in the table (health, reflection) carries no data and needs no right.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use kvarts_contract::class::Class;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::{Code, Request, Response, Status};
use tower::{Layer, Service};

use super::answer::Answer;
use super::connection::{ConnectionCall, ConnectionHandle, OpenCall};
use super::fault::{Fault, Outcome};
use super::limits;
use super::put;
use super::request::Arriving;
use crate::metrics::{CallName, Ended};
use crate::state::parts::Part;
use crate::state::{Caller, LayerTimes, Model, Right, ServerState, UnderWay};
use kvarts_layout::BlockKey;

/// A method of the contract.
#[derive(Debug)]
pub(crate) struct Method {
    /// Its path in the contract; empty for one that only the local path has.
    path: &'static str,
    /// Its name in metrics and logs.
    name: &'static str,
    /// The right that it needs.
    right: Right,
}

impl Method {
    pub(crate) const fn new(path: &'static str, name: &'static str, right: Right) -> Self {
        Self { path, name, right }
    }
}

/// Each method and the right that it needs.
const METHODS: &[Method] = &[
    Method::new("/kvarts.v1.Models/RegisterModel", "register_model", Right::Read),
    Method::new("/kvarts.v1.Models/ListModels", "list_models", Right::Read),
    Method::new("/kvarts.v1.Store/Put", "put", Right::Write),
    Method::new("/kvarts.v1.Store/Match", "match", Right::Read),
    Method::new("/kvarts.v1.Store/Exists", "exists", Right::Read),
    Method::new("/kvarts.v1.Store/Unlock", "unlock", Right::Read),
    Method::new("/kvarts.v1.Store/Pin", "pin", Right::Read),
    Method::new("/kvarts.v1.Store/Unpin", "unpin", Right::Read),
    Method::new("/kvarts.v1.Store/ListPins", "list_pins", Right::Read),
    Method::new("/kvarts.v1.Store/Renew", "renew", Right::Read),
    Method::new("/kvarts.v1.Store/SetDefaultTtl", "set_default_ttl", Right::Write),
    Method::new("/kvarts.v1.Store/SetTtl", "set_ttl", Right::Write),
    Method::new("/kvarts.v1.Store/Delete", "delete", Right::Write),
    Method::new("/kvarts.v1.Plans/Route", "route", Right::Read),
    Method::new("/kvarts.v1.Reads/Get", "get", Right::Read),
    Method::new("/kvarts.v1.Reads/GetLayers", "get_layers", Right::Read),
    Method::new("/kvarts.v1.Directory/Lookup", "lookup", Right::Read),
    Method::new("/kvarts.v1.Directory/Chain", "chain", Right::Write),
    Method::new("/kvarts.v1.Directory/Replicate", "replicate", Right::Write),
    Method::new("/kvarts.v1.Directory/Status", "cluster_status", Right::Admin),
    Method::new("/kvarts.v1.Admin/Watch", "watch", Right::Read),
    Method::new("/kvarts.v1.Admin/Stats", "stats", Right::Admin),
    Method::new("/kvarts.v1.Admin/Checkpoint", "checkpoint", Right::Admin),
    Method::new("/kvarts.v1.Admin/Resume", "resume", Right::Admin),
    Method::new("/kvarts.v1.Admin/Compact", "compact", Right::Admin),
    Method::new("/kvarts.v1.Admin/Scrub", "scrub", Right::Admin),
    Method::new("/kvarts.v1.Admin/Drain", "drain", Right::Admin),
    Method::new("/kvarts.v1.Admin/SetBudget", "set_budget", Right::Admin),
    Method::new("/kvarts.v1.Admin/Reload", "reload", Right::Admin),
];

/// A call that was let in. When the last clone of its `Arc` goes, the call has ended.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) state: Arc<ServerState>,
    pub(crate) caller: Caller,
    /// When the caller stops caring; never more than an hour away, but where the call goes through the whole store.
    pub(crate) deadline: Instant,
    /// The connection that it came by, over gRPC.
    pub(super) connection: Option<ConnectionHandle>,
    connection_call: Option<ConnectionCall>,
    /// What it takes of what is shared, until its answer is gone.
    parts: Mutex<Vec<Part>>,
    /// Bytes of blocks that came and went.
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    /// What the call is for, once that is known.
    class: OnceLock<&'static str>,
    /// When its layers came, and of what.
    layers: LayerTimes,
    /// The way it came.
    path: &'static str,
    name: &'static str,
    started: Instant,
    code: AtomicI32,
    _turn: OwnedSemaphorePermit,
    _under_way: UnderWay,
}

impl Call {
    /// The deadline by the engine's clock.
    pub(crate) fn engine_deadline(&self) -> kvarts_contract::clock::Nanos {
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.state.clock().now().plus(left)
    }

    /// Sets the class that metrics count the call in; the first one stays.
    pub(crate) fn set_class(&self, class: Class) {
        let name = match class {
            Class::Small => "small",
            Class::Foreground => "foreground",
            Class::Put => "put",
            Class::Prefetch => "prefetch",
            Class::Background => "background",
        };
        let _ = self.class.set(name);
    }

    /// Notes that the call reads these blocks by layers.
    pub(crate) fn note_layered_read(&self, model: &Arc<Model>, first: BlockKey, blocks: usize) {
        self.layers.read_begins(self.state.clock().unix_millis(), model, first, blocks);
    }

    /// A layer was handed on.
    pub(crate) fn layer_ready(&self, layer: u32) {
        self.layers.came(layer, self.started.elapsed());
    }

    /// The method, and the way that the call came.
    pub(super) fn way(&self) -> (&'static str, &'static str) {
        (self.name, self.path)
    }

    /// Takes this of what is shared until the call and its answer are gone.
    pub(super) fn keep(&self, part: Part) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).push(part);
    }

    /// Takes `bytes` bytes of what large requests and answers have, as soon as there is room.
    pub(super) async fn keep_large(&self, bytes: usize) -> Outcome<()> {
        let until = self.deadline.min(Instant::now() + limits::WAIT);
        let part = self.state.receiving.take(self.caller.tenant.number, bytes);
        let part = tokio::time::timeout_at(until, part).await.ok().flatten();
        let full = || Fault::busy("the server has as many large requests as fit into memory");
        self.keep(part.ok_or_else(full)?);
        Ok(())
    }

    /// Whether the call's end was recorded.
    fn has_ended(&self) -> bool {
        self.code.load(Ordering::Relaxed) != i32::from(Code::Cancelled)
    }

    /// How the call ended, for the metrics. Without it, it was cancelled.
    pub(crate) fn end(&self, code: Code) {
        self.code.store(code.into(), Ordering::Relaxed);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let class = self.class.get().copied().unwrap_or("none");
        let name =
            CallName { path: self.path, method: self.name, class, tenant: self.caller.tenant.name.clone() };
        let code = Code::from(self.code.load(Ordering::Relaxed));
        let took = self.started.elapsed();
        tracing::debug!(method = self.name, tenant = name.tenant, ?code, ?took, "call ended");
        let how = Ended {
            code: code_name(code),
            took,
            first_layer: self.layers.first(),
            bytes_in: self.bytes_in.load(Ordering::Relaxed),
            bytes_out: self.bytes_out.load(Ordering::Relaxed),
        };
        let tenant = self.caller.tenant.name.as_str();
        if let Some(read) = self.layers.take_read(self.path, tenant, how.code) {
            self.state.recent_reads.add(read);
        }
        self.state.metrics.call_ended(name, how);
    }
}

/// The name of a code as gRPC writes it.
fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// The method of this path in the contract.
pub(crate) fn method(path: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.path == path)
}

/// Lets a call in that came this way, or says why not. `header` is what the caller gives to be known by, `asked` how
/// long it wants to wait.
pub(crate) fn admit(
    state: &Arc<ServerState>,
    path: &'static str,
    method: &Method,
    header: Option<&[u8]>,
    asked: Option<Duration>,
) -> Outcome<Call> {
    let &Method { name, right, .. } = method;
    let refused = |want: &'static str, tenant: &str, why: &str| {
        state.metrics.refused(name, want);
        // Who knocks without end does not fill the disk with lines about it: what is left out is counted above.
        if state.audit.may_tell() {
            tracing::warn!(target: "audit", method = name, path, tenant, why, "call refused");
        }
    };
    let caller = state.gate.caller(header, state.clock().unix_millis() / 1000).map_err(|refusal| {
        refused("token", "", refusal.text());
        Fault::unauthenticated(refusal.text())
    })?;
    let tenant = caller.tenant.name.as_str();
    if !caller.rights.has(right) {
        let why = format!("the token does not have the right to {right}");
        refused("right", tenant, &why);
        return Err(Fault::forbidden(why));
    }
    let turn = caller.tenant.turn().ok_or_else(|| {
        let why = "the tenant has as many calls under way as it may";
        refused("calls", tenant, why);
        Fault::busy(why)
    })?;
    let under_way = state.begin().ok_or_else(|| {
        let why = "the server is about to stop";
        refused("drain", tenant, why);
        Fault::busy(why)
    })?;
    let started = Instant::now();
    let most = longest(name);
    let deadline = started + asked.unwrap_or(most).min(most);
    state.metrics.call_began(name);
    Ok(Call {
        state: Arc::clone(state),
        caller,
        deadline,
        connection: None,
        connection_call: None,
        parts: Mutex::default(),
        bytes_in: AtomicU64::new(0),
        bytes_out: AtomicU64::new(0),
        class: OnceLock::new(),
        layers: LayerTimes::default(),
        path,
        name,
        started,
        code: AtomicI32::new(Code::Cancelled.into()),
        _turn: turn,
        _under_way: under_way,
    })
}

/// The longest deadline of a method: of those that go through all there is, as long as that may take.
fn longest(name: &str) -> Duration {
    match name {
        "scrub" | "compact" => limits::WHOLE_STORE_MAX,
        _ => limits::DEADLINE_MAX,
    }
}

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
    let call = call.ok_or_else(|| Status::internal("a method that the server's table lacks"))?;
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
        let call = match admit(&self.layer.state, "grpc", method, header, asked) {
            Ok(mut call) => {
                call.connection_call = connection.as_ref().map(ConnectionHandle::begin);
                call.connection = connection;
                Arc::new(call)
            }
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
            let fault = Fault::busy("a connection has only a few calls without a token at a time");
            return Box::pin(async move { Ok(fault.status().into_http()) });
        }
        let place = place.flatten();
        let answer = self.inner.call(request.map(|body| Body::new(Arriving::new(body, None))));
        Box::pin(async move {
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
    fn a_call_about_the_whole_store_is_not_cut_off_where_others_are() {
        for Method { name, .. } in METHODS {
            let long = matches!(*name, "scrub" | "compact");
            assert_eq!(longest(name) > limits::DEADLINE_MAX, long, "{name}");
        }
        // Ten terabytes at two gigabytes a second take more than an hour; a slow device takes days.
        assert!(longest("scrub") >= Duration::from_secs(10 * 24 * 3600));
    }

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        assert_eq!(timeout(b"5S"), Some(Duration::from_secs(5)));
        assert_eq!(timeout(b"99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(timeout(b"250m"), Some(Duration::from_millis(250)));
        for wrong in ["", "S", "5", "-5S", "5s", "999999999S", "5 S"] {
            assert_eq!(timeout(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn every_method_of_the_contract_needs_a_right() {
        // What nodes say to each other is served to them alone, at an address of its own.
        let paths: Vec<_> =
            paths().into_iter().filter(|path| !path.starts_with("/kvarts.v1.Nodes/")).collect();
        assert_eq!(paths.len(), METHODS.len());
        for path in paths {
            assert!(METHODS.iter().any(|method| method.path == path), "{path} is not in the table");
        }
    }

    /// The paths of all methods, from the compiled contract.
    fn paths() -> Vec<String> {
        let text = include_str!("../../../proto/kvarts/v1/store.proto").to_owned()
            + include_str!("../../../proto/kvarts/v1/reads.proto")
            + include_str!("../../../proto/kvarts/v1/models.proto")
            + include_str!("../../../proto/kvarts/v1/admin.proto")
            + include_str!("../../../proto/kvarts/v1/plans.proto")
            + include_str!("../../../proto/kvarts/v1/directory.proto");
        let (mut service, mut paths) = ("", Vec::new());
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("service"), Some(name)) => service = name,
                (Some("rpc"), Some(name)) => {
                    let name = name.split('(').next().unwrap();
                    paths.push(format!("/kvarts.v1.{service}/{name}"));
                }
                _ => {}
            }
        }
        paths
    }
}
