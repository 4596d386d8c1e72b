//! The identification of blocks with the same key in a pool.

use kvarts_layout::{Coordinate, Group, NamespaceId};

/// The blocks of one model, group and coordinate: for example the blocks of one worker in a chain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Column {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
}
