//! `Watch`: the engine's events as a stream, to each tenant its own.
//!
//! A watcher reads at its own pace from the engine's ring and slows no other. One that is too slow is told that there is a
//! gap, and where the stream goes on.

use std::sync::Arc;

use bytes::Bytes;
use kvarts_contract::events::{Cause, Event, EventKind, Gap, Sequence, Subject};
use kvarts_layout::NamespaceId;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::convert;
use super::fault::{Fault, Outcome};
use crate::calls::call::Call;
use crate::state::Right;
use kvarts_wire::proto;
use kvarts_wire::proto::event::What;

/// Events that wait for a watcher's connection.
const WAITING: usize = 256;

/// Begins to watch.
pub(super) fn watch(
    call: Arc<Call>,
    wire: &proto::WatchRequest,
) -> Outcome<ReceiverStream<Result<proto::Event, Status>>> {
    let place = call.caller.tenant.watcher();
    let place = place.ok_or_else(|| Fault::busy("the tenant's limit of watchers is reached"))?;
    let from = wire.after.map(|after| known(&call, after));
    let (to, events) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        let _place = place;
        let stalled = tokio::select! {
            stalled = follow(&call, from, &to) => stalled,
            // ends: a drain, the token or the deadline: the arms below
            () = to.closed() => false,
            () = call.state.drain_asked() => false,
            () = call.state.gate.taken_away(&call.caller, Right::Read, &**call.state.clock()) => false,
            () = tokio::time::sleep_until(call.deadline) => false,
        };
        call.end(tonic::Code::Ok);
        // What waits for a client that takes nothing is dropped with the connection.
        let stall_timeout = call.state.stall_timeout.get();
        if stalled && tokio::time::timeout(stall_timeout, to.closed()).await.is_err() {
            if let Some(connection) = &call.connection {
                connection.cut();
            }
            // ends: the connection was cut, and drops the receiver
            to.closed().await;
        }
    });
    Ok(ReceiverStream::new(events))
}

/// Sends events on. True if it ended because the client takes none.
async fn follow(
    call: &Call,
    from: Option<Sequence>,
    to: &mpsc::Sender<Result<proto::Event, Status>>,
) -> bool {
    let mut subscription = call.state.store().subscribe(from);
    loop {
        let events = match subscription.next(WAITING).await {
            None => return false,
            Some(Ok(events)) => {
                events.iter().filter(|event| is_callers(call, event)).map(|event| told(call, event)).collect()
            }
            Some(Err(gap)) => {
                subscription = call.state.store().subscribe(Some(gap.resume));
                vec![missing(call, gap)]
            }
        };
        for event in events {
            // Who takes nothing for a while is not watching any more.
            match tokio::time::timeout(call.state.stall_timeout.get(), to.send(Ok(event))).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return false,
                Err(_) => return true,
            }
        }
    }
}

fn namespace_of(subject: &Subject) -> NamespaceId {
    match subject {
        Subject::Block(block) => block.namespace,
        Subject::Namespace(namespace) => *namespace,
    }
}

fn is_callers(call: &Call, event: &Event) -> bool {
    call.state.models.get(&call.caller, namespace_of(&event.subject)).is_ok()
}

/// A point as the caller may know it: the engine's number would tell what others do.
fn point(call: &Call, sequence: Sequence) -> proto::Sequence {
    let Sequence { stream, number } = call.state.event_mask.hide(call.caller.tenant.number, sequence);
    proto::Sequence { stream, number }
}

/// The point that a caller means. Of another stream than this one it is none of this one's.
fn known(call: &Call, after: proto::Sequence) -> Sequence {
    let (state, tenant) = (&call.state, call.caller.tenant.number);
    let now = state.store().subscribe(None).sequence().stream;
    let stream = if after.stream == state.event_mask.stream(tenant, now) { now } else { !now };
    Sequence { stream, number: state.event_mask.number(tenant, after.number) }
}

fn missing(call: &Call, gap: Gap) -> proto::Event {
    let sequence = Some(point(call, gap.resume));
    proto::Event { sequence, what: What::Gap.into(), ..proto::Event::default() }
}

fn told(call: &Call, event: &Event) -> proto::Event {
    let what = match event.kind {
        EventKind::Stored => What::Stored,
        EventKind::Evicted => What::Evicted,
        EventKind::Expired => What::Expired,
        EventKind::Deleted => What::Deleted,
        EventKind::Quarantined => What::Quarantined,
    };
    let cause = match event.cause {
        Cause::Put => "put",
        Cause::Moved => "moved",
        Cause::Room => "room",
        Cause::Quota => "quota",
        Cause::Ttl => "ttl",
        Cause::Key => "key",
        Cause::Prefix => "prefix",
        Cause::Namespace => "namespace",
        Cause::Damage => "damage",
    };
    let (key, column) = match &event.subject {
        Subject::Block(block) => {
            let column = convert::wire_column(block.group, block.coordinate);
            (Bytes::copy_from_slice(block.key.as_bytes()), Some(column))
        }
        Subject::Namespace(_) => (Bytes::new(), None),
    };
    proto::Event {
        sequence: Some(point(call, event.sequence)),
        what: what.into(),
        namespace: namespace_of(&event.subject).as_bytes().to_vec().into(),
        key,
        column,
        unix_ms: event.at_ms,
        cause: cause.to_owned(),
    }
}
