//! The path over gRPC.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    ContainsReply, ContainsRequest, DeleteOutcome, DeleteReply, DeleteRequest, KvStore, LeaseId,
    MAX_REQUEST_BLOCKS, MatchReply, MatchRequest, PutReply, PutRequest, ReadRequest, ReadStream, Sequence,
    SnapshotCursor, SnapshotPage, Subscription, Target, TtlReply, TtlRequest, read_channel,
};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::events::EventLog;
use kvarts_contract::ticket::{Ticket, ticket};
use kvarts_layout::{Geometry, Identity, NamespaceId};

use super::messages::{self, millis};
use super::remote::{AGAIN, Remote, in_time, while_lost};
use super::{Path, download, upload};
use kvarts_wire::proto;
use kvarts_wire::{convert, fault};

/// gRPC over a network or a local socket. The tenant of a lease is the token's, whatever its terms say; its cap is the
/// smaller one of the terms' and the tenant's.
#[derive(Debug)]
pub(super) struct GrpcPath(pub(super) Arc<Remote>);

impl Path for GrpcPath {
    fn name(&self) -> &'static str {
        super::GRPC
    }

    fn matched(&self, wire: proto::MatchRequest) -> Result<proto::MatchReply, Error> {
        self.0.ask_again(|| {
            let (mut store, request) = (self.0.store(), self.0.request(wire.clone(), None));
            async move { store.r#match(request).await }
        })
    }
}

fn delete_message(request: &DeleteRequest, of_all: bool) -> proto::DeleteRequest {
    use proto::delete_request::{Keys, Target as Wire};
    let target = match &request.target {
        Target::Keys { column, keys } => {
            let column = column.map(|(group, coordinate)| convert::wire_column(group, coordinate));
            Wire::OfKeys(Keys { column, keys: convert::key_bytes(keys) })
        }
        Target::Prefix(key) => Wire::Prefix(key.as_bytes().to_vec().into()),
        Target::Namespace => Wire::Everything(true),
    };
    let namespace = request.namespace.as_bytes().to_vec().into();
    proto::DeleteRequest { namespace, target: Some(target), of_all }
}

fn delete_outcome(wire: &proto::delete_reply::Outcome) -> DeleteOutcome {
    use proto::delete_reply::What;
    match (wire.what(), &wire.error) {
        (What::NotHere, None) => DeleteOutcome::NotHere,
        (What::Deleted, None) => DeleteOutcome::Deleted,
        (_, Some(error)) => DeleteOutcome::Refused(fault::reason(error)),
        (What::Refused, None) => DeleteOutcome::Refused(Reason::Bug(
            "the server refused the request without \
            a reason",
        )),
    }
}

/// What can be said of a delete before it is sent.
fn check_delete(remote: &Remote, request: &DeleteRequest) -> Result<(), Reason> {
    if let Target::Keys { keys, .. } = &request.target {
        if keys.is_empty() {
            return Err(Reason::Empty);
        }
        if keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks"));
        }
    }
    let late = request.deadline.is_some_and(|deadline| deadline <= remote.clock.now());
    if late { Err(Reason::DeadlineInPast) } else { Ok(()) }
}

/// Deletes on a server that may be one of many; gives what it says, and which of the others do not have it.
pub(super) fn delete_everywhere(
    remote: &Arc<Remote>,
    request: DeleteRequest,
    of_all: bool,
) -> Ticket<Result<(DeleteReply, Vec<proto::NodeAway>), Error>> {
    let (reply, answer) = ticket();
    match check_delete(remote, &request) {
        Ok(()) => {
            let own = Arc::clone(remote);
            remote.spawn(async move {
                // A caller that is gone needs no answer.
                // ends: each of its calls has a time (`in_time`)
                let _ = reply.send(delete(&own, &request, of_all).await.map_err(Error));
            });
        }
        Err(reason) => {
            // The asking end is still here.
            let _ = reply.send(Err(Error(reason)));
        }
    }
    answer
}

async fn delete(
    remote: &Remote,
    request: &DeleteRequest,
    of_all: bool,
) -> Result<(DeleteReply, Vec<proto::NodeAway>), Reason> {
    let call = || {
        let (mut store, message) = (remote.store(), delete_message(request, of_all));
        let (left, message) = (remote.left(request.deadline), remote.request(message, request.deadline));
        in_time(left, async move { store.delete(message).await })
    };
    let mut answer = call().await;
    if let Err(Reason::UnknownNamespace(namespace)) = answer.as_ref().map(drop).map_err(fault::reason_of) {
        remote.register_again(namespace).await?;
        answer = call().await;
    }
    let reply = answer.map_err(|status| fault::reason_of(&status))?.into_inner();
    let outcomes = reply.outcomes.iter().map(delete_outcome).collect();
    Ok((DeleteReply { outcomes, blocks: reply.blocks }, reply.away))
}

async fn look_up(
    remote: &Remote,
    message: &proto::ExistsRequest,
    (namespace, deadline): (NamespaceId, Option<Nanos>),
) -> Result<proto::ExistsReply, Reason> {
    let call = || async {
        let ask = || {
            let (mut store, message) = (remote.store(), remote.request(message.clone(), deadline));
            // ends: what is left of the deadline (`in_time`), around all attempts
            async move { store.exists(message).await }
        };
        in_time(remote.left(deadline), while_lost(AGAIN.map(|_| ask()))).await
    };
    let mut answer = call().await;
    if let Err(Reason::UnknownNamespace(_)) = answer.as_ref().map(drop).map_err(fault::reason_of) {
        remote.register_again(namespace).await?;
        answer = call().await;
    }
    Ok(answer.map_err(|status| fault::reason_of(&status))?.into_inner())
}

impl KvStore for GrpcPath {
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error> {
        self.0.register(identity, geometry)
    }

    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>> {
        let (reply, answer) = ticket();
        match upload::check(&self.0, &request) {
            Ok(shape) => {
                let remote = Arc::clone(&self.0);
                self.0.spawn(async move { upload::run(remote, request, shape, reply).await });
            }
            Err(reason) => {
                // The asking end is still here.
                let _ = reply.send(Err(Error(reason)));
            }
        }
        answer
    }

    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error> {
        Ok(messages::matched_together(&self.matched(messages::matching(request, self.0.of_cluster))?)?)
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        let message = messages::asking(request, self.0.of_cluster);
        let found = self.0.ask_again(|| {
            let (mut store, request) = (self.0.store(), self.0.request(message.clone(), None));
            async move { store.exists(request).await }
        })?;
        Ok(messages::found(&found, request.keys.len())?)
    }

    fn look_up(
        &self,
        request: &ContainsRequest<'_>,
        deadline: Option<Nanos>,
    ) -> Ticket<Result<ContainsReply, Error>> {
        let (reply, answer) = ticket();
        let (message, keys, remote) =
            (messages::asking(request, self.0.of_cluster), request.keys.len(), Arc::clone(&self.0));
        let namespace = request.namespace;
        self.0.spawn(async move {
            let found = look_up(&remote, &message, (namespace, deadline)).await;
            // A caller that is gone needs no answer.
            let _ = reply.send(found.and_then(|found| messages::found(&found, keys)).map_err(Error));
        });
        answer
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        let (mut store, request) =
            (self.0.store(), self.0.request(proto::UnlockRequest { lease: lease.0 }, None));
        // A server that cannot be asked lets the lease end by itself.
        self.0.ask(async move { store.unlock(request).await }).is_ok_and(|reply| reply.ended_now)
    }

    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error> {
        let mut store = self.0.store();
        let request = self.0.request(proto::RenewRequest { lease: lease.0, hold_ms: millis(hold) }, None);
        self.0.ask(async move { store.renew(request).await }).map(drop)
    }

    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>> {
        let (reply, answer) = ticket();
        match check_delete(&self.0, &request) {
            Ok(()) => {
                let remote = Arc::clone(&self.0);
                self.0.spawn(async move {
                    // A caller that is gone needs no answer.
                    let deleted = delete(&remote, &request, false).await;
                    let _ = reply.send(deleted.map(|(reply, _)| reply).map_err(Error));
                });
            }
            Err(reason) => {
                // The asking end is still here.
                let _ = reply.send(Err(Error(reason)));
            }
        }
        answer
    }

    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        let message = proto::SetTtlRequest {
            namespace: request.namespace.as_bytes().to_vec().into(),
            column: Some(convert::wire_column(request.group, request.coordinate)),
            keys: convert::key_bytes(request.keys),
            expires_after_ms: request.ttl.map(millis),
        };
        let reply = self.0.ask_again(|| {
            let (mut store, request) = (self.0.store(), self.0.request(message.clone(), None));
            async move { store.set_ttl(request).await }
        })?;
        Ok(TtlReply { changed: reply.changed })
    }

    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error> {
        let message = proto::SetDefaultTtlRequest {
            namespace: namespace.as_bytes().to_vec().into(),
            expires_after_ms: ttl.map(millis),
        };
        let answer = self.0.ask_again(|| {
            let (mut store, request) = (self.0.store(), self.0.request(message.clone(), None));
            async move { store.set_default_ttl(request).await }
        });
        answer.map(drop)
    }

    /// Over gRPC events come by [`Client::watch`](super::Client::watch): this stream has ended before it began.
    fn subscribe(&self, _from: Option<Sequence>) -> Subscription {
        let log = EventLog::new(0, 0);
        log.close();
        log.subscribe(None)
    }

    /// Not over gRPC.
    fn snapshot(&self, _cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>> {
        let (reply, answer) = ticket();
        let what = "this client does not support snapshots yet: look blocks up with Exists".to_owned();
        // The asking end is still here.
        let _ = reply.send(Err(Error(Reason::Config(what))));
        answer
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        let shape = download::check(&self.0, &request)?;
        let (sink, stream) = read_channel();
        let remote = Arc::clone(&self.0);
        self.0.spawn(async move { download::run(remote, request, shape, sink).await });
        Ok(stream)
    }
}
