//! What a pool tells blocks of one key apart by.

use kvarts_layout::{Coordinate, Group, NamespaceId};

/// Blocks of one model, group and coordinate: what one worker has of a chain, for example.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Column {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
}
