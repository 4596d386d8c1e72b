//! Blocks that a read wants, and which of them are not here.

use kvarts_contract::api::{ContainsRequest, KvStore, Presence};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

/// Blocks that a read wants.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// Their namespace.
    pub namespace: NamespaceId,
    /// Their group.
    pub group: Group,
    /// Their coordinate.
    pub coordinate: Coordinate,
    /// Their keys.
    pub keys: &'a [BlockKey],
    /// Bytes of each.
    pub block_bytes: u64,
    /// Whether their first layers are wanted before the last ones of any.
    pub by_layers: bool,
}

/// A block by its whole name.
pub(super) type Name = (NamespaceId, u32, u64, BlockKey);

impl Wish<'_> {
    pub(super) fn name(&self, key: &BlockKey) -> Name {
        (self.namespace, self.group.0, self.coordinate.to_u64(), *key)
    }

    /// Which of the blocks cannot be read here now, and whether a put of them is under way.
    pub(super) fn missing(&self, store: &dyn KvStore) -> Vec<(BlockKey, bool)> {
        let Self { namespace, group, coordinate, keys, .. } = *self;
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
        let Ok(found) = store.contains(&request) else { return Vec::new() };
        let missing = keys.iter().zip(&found.presence).filter(|(_, one)| **one != Presence::Here);
        missing.map(|(key, one)| (*key, *one == Presence::Pending)).collect()
    }

    /// Which of the blocks are not here, and no put brings them.
    pub(super) fn absent(&self, store: &dyn KvStore) -> Vec<BlockKey> {
        self.missing(store).into_iter().filter(|(_, is_pending)| !is_pending).map(|(key, _)| key).collect()
    }
}
