//! What requests hold at a moment. A store at rest holds nothing but what leases say: whatever else is left is a leak.

use super::Store;
use crate::index::Lookup;

/// What is held by requests that are under way, and by leases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Holding {
    /// Leases and pins, those that have ended and were not swept up included.
    pub leases: usize,
    /// Blocks whose names a put or a delete has claimed.
    pub claims: usize,
    /// Bytes of quotas that are promised to puts.
    pub promised: u64,
    /// Bytes of the budget that are taken and that no file has.
    pub reserved: u64,
}

impl Store {
    /// What is held now. It walks the index: for tests, and to look for a leak.
    pub fn holding(&self) -> Holding {
        let shared = &self.0.shared;
        let (mut claims, mut entries) = (0, Vec::new());
        for partition in 0..shared.index.partitions() {
            shared.index.snapshot(partition, &mut entries);
            claims += entries.iter().filter(|entry| entry.state == Lookup::Pending).count();
        }
        let space = shared.space_report();
        let promised = space.namespaces.iter().map(|namespace| namespace.promised).sum();
        Holding { leases: shared.index.leases(), claims, promised, reserved: space.reserved }
    }
}
