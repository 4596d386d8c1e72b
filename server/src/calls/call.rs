//! One call, from its admission to its end: who calls, whether the token allows it, by when, and what is counted.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvarts_contract::class::Class;
use kvarts_layout::BlockKey;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tonic::Code;

use super::fault::{Fault, Outcome};
use super::limits;
use super::methods::Method;
use crate::counters::{CallName, Ended};
use crate::state::connections::{ConnectionCall, ConnectionHandle};
use crate::state::parts::Part;
use crate::state::{Caller, LayerTimes, Model, ServerState, UnderWay};

/// A call that was let in. When the last clone of its `Arc` goes, the call has ended.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) state: Arc<ServerState>,
    pub(crate) caller: Caller,
    /// When the caller stops caring; never more than an hour away, but where the call goes through the whole store.
    pub(crate) deadline: Instant,
    /// The connection that it came by, over gRPC.
    pub(crate) connection: Option<ConnectionHandle>,
    pub(crate) connection_call: Option<ConnectionCall>,
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
    pub(crate) name: &'static str,
    started: Instant,
    code: AtomicI32,
    _turn: OwnedSemaphorePermit,
    _under_way: UnderWay,
}

impl Call {
    /// The time that is left.
    pub(crate) fn left(&self) -> std::time::Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The deadline by the engine's clock.
    pub(crate) fn engine_deadline(&self) -> kvarts_contract::clock::Nanos {
        self.state.clock().now().plus(self.left())
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
    pub(crate) fn way(&self) -> (&'static str, &'static str) {
        (self.name, self.path)
    }

    /// Takes this of what is shared until the call and its answer are gone.
    pub(crate) fn keep(&self, part: Part) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).push(part);
    }

    /// Takes `bytes` bytes of what large requests and answers have, as soon as there is room.
    pub(crate) async fn keep_large(&self, bytes: usize) -> Outcome<()> {
        let until = self.deadline.min(Instant::now() + limits::WAIT);
        let part = self.state.receiving.take(self.caller.tenant.number, bytes);
        let part = tokio::time::timeout_at(until, part).await.ok().flatten();
        let full = || Fault::busy("the memory for large requests is full: retry later");
        self.keep(part.ok_or_else(full)?);
        Ok(())
    }

    /// Whether the call's end was recorded.
    pub(crate) fn has_ended(&self) -> bool {
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
        let why = format!("the token lacks the right `{right}`");
        refused("right", tenant, &why);
        return Err(Fault::forbidden(why));
    }
    let turn = caller.tenant.turn().ok_or_else(|| {
        let why = "the tenant's limit of concurrent calls is reached";
        refused("calls", tenant, why);
        Fault::busy(why)
    })?;
    let under_way = state.begin().ok_or_else(|| {
        let why = "the server is stopping";
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
        "scrub" | "compact" | "purge_tenant" | "cold_push" => limits::WHOLE_STORE_MAX,
        _ => limits::DEADLINE_MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::super::methods::METHODS;
    use super::*;

    #[test]
    fn a_call_about_the_whole_store_is_not_cut_off_where_others_are() {
        for Method { name, .. } in METHODS {
            let long = matches!(*name, "scrub" | "compact" | "purge_tenant" | "cold_push");
            assert_eq!(longest(name) > limits::DEADLINE_MAX, long, "{name}");
        }
        // Ten terabytes at two gigabytes a second take more than an hour; a slow device takes days.
        assert!(longest("scrub") >= Duration::from_secs(10 * 24 * 3600));
    }
}
