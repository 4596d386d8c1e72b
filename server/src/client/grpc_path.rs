//! The path over gRPC.

use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::prefix::Coverage;
use kvarts_layout::{Geometry, Identity, NamespaceId, UsablePrefix};
use kvarts_store::api::{
    ContainsReply, ContainsRequest, KvStore, LeaseId, LeaseTerms, MatchReply, MatchRequest, Presence,
    PutReply, PutRequest, ReadRequest, ReadStream, read_channel,
};
use kvarts_store::error::{Error, Reason};
use kvarts_store::rt::mailbox::{Ticket, ticket};

use super::remote::{Remote, lease};
use super::{Path, download, upload};
use crate::grpc::wire;
use crate::proto;

/// gRPC over a network or a local socket. The tenant of a lease is the token's, whatever its terms say; its cap is the
/// smaller one of the terms' and the tenant's.
#[derive(Debug)]
pub(super) struct GrpcPath(pub(super) Arc<Remote>);

impl Path for GrpcPath {
    fn name(&self) -> &'static str {
        "grpc"
    }
}

fn lease_ms(terms: Option<&LeaseTerms>) -> u64 {
    let whole = |hold: Duration| u64::try_from(hold.as_millis()).unwrap_or(u64::MAX).max(1);
    terms.map_or(0, |terms| whole(terms.hold))
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
        let message = proto::MatchRequest {
            namespace: request.namespace.as_bytes().to_vec().into(),
            keys: wire::key_bytes(request.keys),
            block_tokens: request.requirements.block_tokens(),
            requirements: wire::wire_requirements(request.requirements),
            recompute_tokens_max: Some(request.recompute_tokens_max),
            lease_ms: lease_ms(request.lease.as_ref()),
            lease_cap_bytes: request.lease.map(|terms| terms.cap_bytes),
        };
        let found = self.0.ask_again(|| {
            let (mut store, request) = (self.0.store(), self.0.request(message.clone(), None));
            async move { store.r#match(request).await }
        })?;
        let coverage = |one: &proto::match_reply::Coverage| {
            let column = wire::column(one.column.as_ref());
            let (group, coordinate) = column.map_err(|_| Reason::Bug("a coordinate that is none"))?;
            Ok(Coverage { group, coordinate, blocks: one.blocks })
        };
        let usable = UsablePrefix {
            coverage: found.coverage.iter().map(coverage).collect::<Result<_, Reason>>()?,
            longest: wire::boundary(found.longest),
            cheapest: wire::boundary(found.cheapest),
        };
        Ok(MatchReply { usable, pending: found.pending, lease: lease(found.lease) })
    }

    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error> {
        use proto::exists_reply::Presence as Wire;
        let message = proto::ExistsRequest {
            namespace: request.namespace.as_bytes().to_vec().into(),
            column: Some(wire::wire_column(request.group, request.coordinate)),
            keys: wire::key_bytes(request.keys),
            lease_ms: lease_ms(request.lease.as_ref()),
            lease_cap_bytes: request.lease.map(|terms| terms.cap_bytes),
        };
        let found = self.0.ask_again(|| {
            let (mut store, request) = (self.0.store(), self.0.request(message.clone(), None));
            async move { store.exists(request).await }
        })?;
        let presence: Vec<_> = found
            .presence()
            .map(|one| match one {
                Wire::Here => Presence::Here,
                Wire::Pending => Presence::Pending,
                Wire::Absent => Presence::Absent,
            })
            .collect();
        if presence.len() != request.keys.len() {
            return Err(Reason::Bug("an answer for another number of keys").into());
        }
        Ok(ContainsReply { presence, lease: lease(found.lease) })
    }

    fn unlock(&self, lease: LeaseId) -> bool {
        let (mut store, request) =
            (self.0.store(), self.0.request(proto::UnlockRequest { lease: lease.0 }, None));
        // A server that cannot be asked lets the lease end by itself.
        self.0.ask(async move { store.unlock(request).await }).is_ok_and(|reply| reply.ended_now)
    }

    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error> {
        let shape = download::check(&self.0, &request)?;
        let (sink, stream) = read_channel();
        let remote = Arc::clone(&self.0);
        self.0.spawn(async move { download::run(remote, request, shape, sink).await });
        Ok(stream)
    }
}
