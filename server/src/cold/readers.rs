//! Who waits for what flights bring. A flight whose readers have all left before its turn came is dropped, so that it is not in the way of
//! those that are waited for.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use kvarts_cold::promote::Memory;
use kvarts_cold::time::BoxFuture;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::NamespaceId;
use tokio::sync::{Notify, Semaphore};

use super::ColdTier;
use super::counts::add;

/// A read that waits for some flights, while this lives.
#[derive(Debug)]
pub(super) struct Reading {
    cold: Weak<ColdTier>,
    flights: BTreeSet<u64>,
}

impl Reading {
    /// A read that is counted among the readers of these flights.
    pub(super) fn of(cold: &Arc<ColdTier>, flights: BTreeSet<u64>) -> Self {
        Self { cold: Arc::downgrade(cold), flights }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let Some(cold) = self.cold.upgrade() else { return };
        let dropped: u64 = self.flights.iter().map(|id| cold.flights.left(*id)).sum();
        add(&cold.counts.abandoned_blocks, dropped);
    }
}

/// What knows the flights, and has the memory for all of them.
pub(super) trait Flying: Memory {
    /// What flights of a namespace pass one after the other.
    fn gate(&self, namespace: NamespaceId) -> Arc<Semaphore>;

    /// The turn of a flight has come; not if it was dropped.
    fn begins(&self, id: u64) -> bool;
}

/// The turn of a flight: memory for its blocks. Flights of one namespace wait behind each other, and namespaces by turns, so that one that
/// wants much is not in front of all others.
pub(super) struct Boarding<'a> {
    pub(super) flights: &'a dyn Flying,
    pub(super) id: u64,
    pub(super) namespace: NamespaceId,
    /// Its turn has come.
    pub(super) begun: Notify,
}

impl Memory for Boarding<'_> {
    fn take(&self, bytes: usize) -> BoxFuture<'_, Option<SharedBuf>> {
        Box::pin(async move {
            let gate: Arc<Semaphore> = self.flights.gate(self.namespace);
            // Never closed. Who has passed it waits for memory with one of each other namespace.
            // ends: its flight: readers that leave before its turn drop it
            let passed = gate.acquire().await.ok()?;
            let memory = self.flights.take(bytes).await?;
            drop(passed);
            if !self.flights.begins(self.id) {
                return None;
            }
            self.begun.notify_one();
            Some(memory)
        })
    }
}
