//! Which blocks stand behind which: what a shard is asked, and what it answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_layout::BlockKey;

use crate::engine::shared::names::Namespace;

/// A parent and a child of it.
pub(super) type Link = (BlockKey, BlockKey);

/// Segments that need not be looked at again, and their generations then: nothing is added to them.
pub(super) type Listed = BTreeMap<u32, u64>;

/// What a shard is asked for.
pub(crate) struct Ask {
    pub(crate) shard: u32,
    pub(super) namespace: Arc<Namespace>,
    pub(super) listed: Listed,
    /// The first segment.
    pub(super) from: u32,
}

/// What a shard has.
pub(crate) struct Links {
    pub(super) links: Vec<Link>,
    pub(super) listed: Listed,
    /// The segment to go on with, if there is more.
    pub(super) next: Option<u32>,
}
