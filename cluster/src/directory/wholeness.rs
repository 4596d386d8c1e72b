//! What a directory does not know: of which nodes it has not been sent everything, partition by partition.

use std::collections::{BTreeMap, BTreeSet};

use crate::partition::Partition;

/// Why copies of a node may be missing in a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    /// Its snapshot has not ended.
    Awaited,
    /// There was no room for some of them since its snapshot began.
    NoRoom,
}

/// For each partition the nodes, by number, of which copies may be missing.
#[derive(Debug, Default)]
pub(super) struct Lacking(BTreeMap<(Partition, u16), Why>);

impl Lacking {
    /// Everything of this node and partition is on its way, or is to be asked for.
    pub(super) fn expect_snapshot(&mut self, node: u16, partition: Partition) {
        self.0.insert((partition, node), Why::Awaited);
    }

    /// Everything has come, but for what there was no room for.
    pub(super) fn end_snapshot(&mut self, node: u16, partition: Partition) {
        if self.0.get(&(partition, node)) == Some(&Why::Awaited) {
            self.0.remove(&(partition, node));
        }
    }

    /// A copy was left out, or was dropped for another one.
    pub(super) fn leave_out(&mut self, node: u16, partition: Partition) {
        self.0.insert((partition, node), Why::NoRoom);
    }

    pub(super) fn keep_partitions(&mut self, is_held: impl Fn(Partition) -> bool) {
        self.0.retain(|(partition, _), _| is_held(*partition));
    }

    pub(super) fn forget(&mut self, node: u16) {
        self.0.retain(|(_, of), _| *of != node);
    }

    /// The nodes of which copies may be missing in a partition.
    pub(super) fn of(&self, partition: Partition) -> impl Iterator<Item = u16> + '_ {
        self.0.range((partition, 0)..=(partition, u16::MAX)).map(|((_, node), _)| *node)
    }

    pub(super) fn partitions(&self) -> BTreeSet<Partition> {
        self.0.keys().map(|(partition, _)| *partition).collect()
    }
}
