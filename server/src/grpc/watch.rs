//! `Watch`: the engine's events as a stream, to each tenant its own.
//!
//! Who asks for it is first told what is here, so that it needs nothing else to begin, or to go on after a gap.
//!
//! A watcher reads at its own pace from the engine's ring and slows no other. One that is too slow is told that there is a
//! gap, and where the stream goes on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::error::Kind;
use kvarts_contract::events::{Cause, Event, EventKind, Gap, Subject, Subscription};
use kvarts_layout::{IndexKey, NamespaceId};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::convert;
use super::fault::{Fault, Outcome};
use super::listing::{self, Wanted};
use super::points::{known, point};
use crate::calls::call::Call;
use crate::state::Right;
use kvarts_wire::proto;
use kvarts_wire::proto::event::What;

/// Events that wait for a watcher's connection.
const WAITING: usize = 256;
/// How long events are gathered for one who takes runs.
const GATHER: Duration = Duration::from_millis(5);
/// How long a watcher's snapshot waits where the store has no time for a page.
const AGAIN: Duration = Duration::from_millis(50);

/// What a watcher asked for.
struct Watcher {
    call: Arc<Call>,
    wanted: Wanted,
    snapshot: bool,
    runs: bool,
    to: mpsc::Sender<Result<proto::Event, Status>>,
}

/// Why nothing more is sent.
enum Stop {
    /// The client or the store is gone.
    Over,
    /// The client takes nothing.
    Stalled,
}

/// Begins to watch.
pub(super) fn watch(
    call: Arc<Call>,
    wire: &proto::WatchRequest,
) -> Outcome<ReceiverStream<Result<proto::Event, Status>>> {
    let place = call.caller.tenant.watcher();
    let place = place.ok_or_else(|| Fault::busy("the tenant's limit of watchers is reached"))?;
    let wanted = Wanted::of(&call, &wire.namespace)?;
    let from = wire.after.map(|after| known(&call, after));
    // From here on nothing is missed, whenever the client hears of it.
    let subscription = call.state.store().subscribe(from);
    let lists = wire.snapshot && from.is_none();
    let (to, events) = mpsc::channel(WAITING);
    let watcher = Watcher { call, wanted, snapshot: wire.snapshot, runs: wire.runs, to };
    tokio::spawn(async move {
        let _place = place;
        let Watcher { call, to, .. } = &watcher;
        let stalled = tokio::select! {
            stop = watcher.follow(subscription, lists) => matches!(stop, Stop::Stalled),
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

impl Watcher {
    /// Sends what is here, if that is asked for, and events on.
    async fn follow(&self, mut subscription: Subscription, lists: bool) -> Stop {
        if lists && let Err(stop) = self.list(&mut subscription).await {
            return stop;
        }
        loop {
            let Some(next) = subscription.next(WAITING).await else { return Stop::Over };
            let told = match next {
                Ok(events) => self.pass_on(events).await,
                Err(gap) => self.resume(&mut subscription, gap).await,
            };
            if let Err(stop) = told {
                return stop;
            }
        }
    }

    async fn pass_on(&self, mut events: Vec<Event>) -> Result<(), Stop> {
        let is_few = events.len() < WAITING;
        events.retain(|event| self.wanted.has(&self.call, namespace_of(&event.subject)));
        let is_run = |a: &Event, b: &Event| self.runs && is_alike(a, b);
        for run in events.chunk_by(is_run) {
            // ends: as the client takes it, or after `stall_timeout`
            self.send(told(&self.call, run)).await?;
        }
        if self.runs && is_few {
            tokio::time::sleep(GATHER).await;
        }
        Ok(())
    }

    async fn resume(&self, subscription: &mut Subscription, gap: Gap) -> Result<(), Stop> {
        *subscription = self.call.state.store().subscribe(Some(gap.resume));
        // ends: as the client takes it, or after `stall_timeout`
        self.send(missing(&self.call, gap)).await?;
        if self.snapshot { self.list(subscription).await } else { Ok(()) }
    }

    /// Sends a snapshot; the subscription goes on behind it.
    async fn list(&self, subscription: &mut Subscription) -> Result<(), Stop> {
        let mut cursor = None;
        let sequence = loop {
            let page = match self.wanted.page(&self.call, cursor).await {
                Ok(page) => page,
                Err(reason) if reason.kind() == Kind::Retry => {
                    tokio::time::sleep(AGAIN).await;
                    continue;
                }
                Err(_) => return Err(Stop::Over),
            };
            for blocks in listing::columns(&page.blocks) {
                let most = if self.runs { WAITING } else { 1 };
                for some in blocks.chunks(most) {
                    // ends: as the client takes it, or after `stall_timeout`
                    self.send(present(some)).await?;
                }
            }
            cursor = page.next;
            if cursor.is_none() {
                break page.sequence;
            }
        };
        *subscription = self.call.state.store().subscribe(Some(sequence));
        let sequence = Some(point(&self.call, sequence));
        // ends: as the client takes it, or after `stall_timeout`
        self.send(proto::Event { sequence, what: What::Complete.into(), ..proto::Event::default() }).await
    }

    async fn send(&self, event: proto::Event) -> Result<(), Stop> {
        // Who takes nothing for a while is not watching any more.
        match tokio::time::timeout(self.call.state.stall_timeout.get(), self.to.send(Ok(event))).await {
            Ok(sent) => sent.map_err(|_| Stop::Over),
            Err(_) => Err(Stop::Stalled),
        }
    }
}

fn namespace_of(subject: &Subject) -> NamespaceId {
    match subject {
        Subject::Block(block) => block.namespace,
        Subject::Namespace(namespace) => *namespace,
    }
}

/// Whether two events differ in nothing but block and time.
fn is_alike(a: &Event, b: &Event) -> bool {
    let (Subject::Block(one), Subject::Block(other)) = (&a.subject, &b.subject) else { return false };
    let column = |block: &IndexKey| (block.namespace, block.group, block.coordinate);
    (a.kind, a.cause) == (b.kind, b.cause) && column(one) == column(other)
}

fn missing(call: &Call, gap: Gap) -> proto::Event {
    let sequence = Some(point(call, gap.resume));
    proto::Event { sequence, what: What::Gap.into(), ..proto::Event::default() }
}

/// Blocks of one column that are here.
fn present(blocks: &[IndexKey]) -> proto::Event {
    let Some(first) = blocks.first() else { return proto::Event::default() };
    proto::Event {
        what: What::Present.into(),
        namespace: Bytes::copy_from_slice(first.namespace.as_bytes()),
        key: listing::keys(blocks.iter()),
        column: Some(convert::wire_column(first.group, first.coordinate)),
        ..proto::Event::default()
    }
}

/// Events that differ in nothing but block and time.
fn told(call: &Call, run: &[Event]) -> proto::Event {
    let Some(event) = run.last() else { return proto::Event::default() };
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
            let blocks = run.iter().filter_map(|event| match &event.subject {
                Subject::Block(block) => Some(block),
                Subject::Namespace(_) => None,
            });
            (listing::keys(blocks), Some(convert::wire_column(block.group, block.coordinate)))
        }
        Subject::Namespace(_) => (Bytes::new(), None),
    };
    proto::Event {
        sequence: Some(point(call, event.sequence)),
        what: what.into(),
        namespace: Bytes::copy_from_slice(namespace_of(&event.subject).as_bytes()),
        key,
        column,
        unix_ms: event.at_ms,
        cause: cause.to_owned(),
    }
}
