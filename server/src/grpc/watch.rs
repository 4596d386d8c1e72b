//! `Watch`: the engine's events as a stream, to each tenant its own.
//!
//! A watcher reads at its own pace from the engine's ring and slows nobody. Who is too slow is told that there is a
//! gap, and where the stream goes on.

use std::sync::Arc;

use bytes::Bytes;
use kvarts_layout::NamespaceId;
use kvarts_store::events::{Cause, Event, EventKind, Gap, Sequence, Subject};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::call::Call;
use super::{limits, wire};
use crate::proto;
use crate::proto::event::What;

/// Events that wait for a watcher's connection.
const WAITING: usize = 256;

/// Begins to watch.
pub(super) fn watch(
    call: Arc<Call>,
    wire: &proto::WatchRequest,
) -> ReceiverStream<Result<proto::Event, Status>> {
    let from = wire.after.map(|after| Sequence { stream: after.stream, number: after.number });
    let (to, events) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        tokio::select! {
            () = follow(&call, from, &to) => {}
            () = to.closed() => {}
            () = call.node.drain_asked() => {}
            () = tokio::time::sleep_until(call.deadline) => {}
        }
        call.end(tonic::Code::Ok);
    });
    ReceiverStream::new(events)
}

async fn follow(call: &Call, from: Option<Sequence>, to: &mpsc::Sender<Result<proto::Event, Status>>) {
    let mut subscription = call.node.store().subscribe(from);
    loop {
        let events = match subscription.next(WAITING).await {
            None => return,
            Some(Ok(events)) => events.iter().filter(|event| is_callers(call, event)).map(told).collect(),
            Some(Err(gap)) => {
                subscription = call.node.store().subscribe(Some(gap.resume));
                vec![missing(gap)]
            }
        };
        for event in events {
            // Who takes nothing for a while is not watching any more.
            let sent = tokio::time::timeout(limits::STALL, to.send(Ok(event))).await;
            if !matches!(sent, Ok(Ok(()))) {
                return;
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
    call.node.models.get(&call.caller, namespace_of(&event.subject)).is_ok()
}

fn point(sequence: Sequence) -> proto::Sequence {
    proto::Sequence { stream: sequence.stream, number: sequence.number }
}

fn missing(gap: Gap) -> proto::Event {
    proto::Event { sequence: Some(point(gap.resume)), what: What::Gap.into(), ..proto::Event::default() }
}

fn told(event: &Event) -> proto::Event {
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
            let column = wire::wire_column(block.group, block.coordinate);
            (Bytes::copy_from_slice(block.key.as_bytes()), Some(column))
        }
        Subject::Namespace(_) => (Bytes::new(), None),
    };
    proto::Event {
        sequence: Some(point(event.sequence)),
        what: what.into(),
        namespace: namespace_of(&event.subject).as_bytes().to_vec().into(),
        key,
        column,
        unix_ms: event.at_ms,
        cause: cause.to_owned(),
    }
}
