//! Copies of blocks that were first stored elsewhere, and what keeps them from outliving that: the time of their production goes with
//! them, and so does their end.

use super::{FULL, Store};
use crate::engine::front::expiry::{self, Change};
use crate::engine::front::produced::{self, ProducedPage};
use crate::engine::front::router::Message;
use crate::engine::write::put;
use kvarts_layout::NamespaceId;

use kvarts_contract::api::{PutReply, PutRequest, TtlReply, TtlRequest};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::sync::atomic::Ordering;
use kvarts_contract::ticket::{Ticket, ticket};

impl Store {
    pub(super) fn begin_put(
        &self,
        request: PutRequest,
        produced_ms: Option<u64>,
    ) -> Ticket<Result<PutReply, Error>> {
        let (reply, answer) = ticket();
        for (shard, part) in put::begin(&self.0.shared, (request, produced_ms), reply) {
            let Some(sender) = self.0.router.to(shard) else { continue };
            if let Err(error) = sender.try_send(Message::Put(shard, part))
                && let Message::Put(_, part) = error.into_inner()
            {
                put::refuse(part, &Reason::Busy(FULL));
            }
        }
        if self.0.shared.index_room.is_short() {
            // Executors that cannot be asked now are asked with the next put.
            let _ = self.shrink();
        }
        answer
    }

    /// What is put from now on is said to be produced later than this time, in milliseconds since 1970: at this time something was
    /// deleted, perhaps by a clock that is ahead.
    pub fn produce_after(&self, at_ms: u64) {
        self.0.shared.produced_after.fetch_max(at_ms, Ordering::Relaxed);
    }

    /// This moment in milliseconds since 1970, as lives of blocks are counted.
    pub fn wall_ms(&self) -> u64 {
        self.0.shared.wall_ms()
    }

    /// Something may have been deleted of a namespace, here or elsewhere: look-ups say another number of deletes from now on
    /// ([`ContainsReply::deletes`](kvarts_contract::api::ContainsReply::deletes)). For nodes, which read what others have.
    pub fn note_delete(&self, namespace: NamespaceId) {
        self.0.shared.names.note_delete(namespace);
    }

    /// When what is put now is said to be produced, in milliseconds since 1970.
    pub fn produced_now(&self) -> u64 {
        self.0.shared.produced_now()
    }

    /// When the blocks of a namespace that lie in a shard were produced; the first page begins at segment 0. A block that is moved
    /// meanwhile may be missing: ask again if [`Counts`](crate::engine::Counts) says that any was.
    pub fn produced(
        &self,
        shard: u32,
        namespace: NamespaceId,
        from: u32,
    ) -> Ticket<Result<ProducedPage, Error>> {
        let (reply, answer) = ticket();
        // The ticket is still here: it cannot have been dropped.
        let Some(namespace) = self.0.shared.names.get(namespace) else {
            let _ = reply.send(Err(Reason::UnknownNamespace(namespace).into()));
            return answer;
        };
        let message = Message::Produced(produced::Ask { shard, namespace, from }, reply);
        if let Some(Message::Produced(_, reply)) = self.0.router.offer(shard, message) {
            let _ = reply.send(Err(Reason::Busy(FULL).into()));
        }
        answer
    }

    /// As [`KvStore::set_ttl`](kvarts_contract::api::KvStore::set_ttl), of those blocks alone that would end later.
    pub fn shorten_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error> {
        Ok(expiry::set_ttl(&self.0.shared, request, Change::Sooner)?)
    }
}
