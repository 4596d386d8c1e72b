//! A column of a match: the blocks of one group at one coordinate, as the index has them.

use kvarts_layout::{Coordinate, Group};

use crate::index::{BlockFingerprint, Lookup};

/// The blocks of one group at one coordinate, and what the index says of each.
pub(super) struct Column {
    pub(super) group: Group,
    pub(super) coordinate: Coordinate,
    pub(super) prints: Vec<BlockFingerprint>,
    pub(super) found: Vec<Lookup>,
}
