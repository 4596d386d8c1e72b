//! Which blocks stand behind which: what a shard is asked, and what it answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvarts_layout::BlockKey;

use crate::engine::shared::names::Namespace;

/// A parent and a child of it.
pub(super) type Link = (BlockKey, BlockKey);

/// Records of a shard, by their segment and page; all of a segment where they would be too many to be named.
pub(super) type Places = BTreeMap<u32, Option<BTreeSet<u32>>>;

/// What a shard is asked for.
pub(crate) struct Ask {
    pub(crate) shard: u32,
    pub(super) namespace: Arc<Namespace>,
    /// Of which records; none: of all.
    pub(super) among: Option<Arc<Places>>,
    /// The first segment.
    pub(super) from: u32,
}

/// What a shard has.
pub(crate) struct Links {
    pub(super) links: Vec<Link>,
    /// The segment to go on with, if there is more.
    pub(super) next: Option<u32>,
}
