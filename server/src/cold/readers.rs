//! Who waits for what flights bring. A flight whose readers have all left before its turn came is dropped, so that it is not in the way of
//! those that are waited for.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use kvarts_cold::promote::Memory;
use kvarts_cold::time::BoxFuture;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::NamespaceId;
use kvarts_layout::identity::TenantSalt;
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
    /// What flights of a namespace pass one after the other, and then what those of a tenant do.
    fn gates(&self, namespace: NamespaceId, tenant: &TenantSalt) -> [Arc<Semaphore>; 2];

    /// The turn of a flight has come; not if it was dropped.
    fn begins(&self, id: u64) -> bool;
}

/// The turn of a flight: memory for its blocks. Flights of one namespace wait behind each other, namespaces of one tenant take turns, and so
/// do tenants, however many namespaces each has: one that wants much is not in front of all others.
pub(super) struct Boarding<'a> {
    pub(super) flights: &'a dyn Flying,
    pub(super) id: u64,
    pub(super) namespace: NamespaceId,
    /// Whose it is.
    pub(super) tenant: TenantSalt,
    /// Its turn has come.
    pub(super) begun: Notify,
}

impl Memory for Boarding<'_> {
    fn take(&self, bytes: usize) -> BoxFuture<'_, Option<SharedBuf>> {
        Box::pin(async move {
            let [own, all] = self.flights.gates(self.namespace, &self.tenant);
            // Neither is ever closed.
            // ends: its flight: readers that leave before its turn drop it
            let first = own.acquire().await.ok()?;
            // It waits with one of each other namespace of its tenant, and then for memory with one of each other tenant.
            // ends: its flight: readers that leave before its turn drop it
            let passed = all.acquire().await.ok()?;
            let memory = self.flights.take(bytes).await?;
            drop((first, passed));
            if !self.flights.begins(self.id) {
                return None;
            }
            self.begun.notify_one();
            Some(memory)
        })
    }
}
