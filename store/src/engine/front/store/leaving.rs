//! What a tier behind the disks asks: which blocks are near their eviction, and what their namespaces are.

use kvarts_layout::{Geometry, Identity, NamespaceId};

use super::{FULL, Store};
use crate::engine::front::router::Message;
use kvarts_contract::api::{Leaving, SegmentBlocks};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::{Ticket, ticket};

impl Store {
    /// The number of shards: [`Store::leaving`] is asked of each.
    pub fn shards(&self) -> u32 {
        self.0.router.shards()
    }

    /// Blocks of a shard that are near their eviction and were used at least so often since they were last cooled (0 to 3). Nothing
    /// is held: who wants their bytes reads them, and what has gone by then is a miss. A background read does not count as a use.
    pub fn leaving(&self, shard: u32, least_uses: u8) -> Ticket<Result<Vec<Leaving>, Error>> {
        let (reply, answer) = ticket();
        if let Some(Message::Leaving { reply, .. }) =
            self.0.router.offer(shard, Message::Leaving { shard, least_uses, reply })
        {
            // The ticket is still here: it cannot have been dropped.
            let _ = reply.send(Err(Reason::Busy(FULL).into()));
        }
        answer
    }

    /// The blocks of a shard from a segment on, those of one segment, and the segment to go on with; none: there are no more. Nothing is held,
    /// and what is moved meanwhile may be left out.
    pub fn held(&self, shard: u32, from: u32) -> Ticket<Result<SegmentBlocks, Error>> {
        let (reply, answer) = ticket();
        if let Some(Message::Held { reply, .. }) =
            self.0.router.offer(shard, Message::Held { shard, from, reply })
        {
            // The ticket is still here: it cannot have been dropped.
            let _ = reply.send(Err(Reason::Busy(FULL).into()));
        }
        answer
    }

    /// The identity and geometry of a namespace that the store knows, registered or recovered.
    pub fn identity_of(&self, namespace: NamespaceId) -> Option<(Identity, Geometry)> {
        let known = self.0.shared.names.get(namespace)?;
        Some((Identity::decode(&known.canonical).ok()?, known.spec.geometry.clone()))
    }
}
