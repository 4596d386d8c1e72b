//! What one namespace has on disk, and how much it may have.
//!
//! A quota counts live bytes: records with their headers and padding, as the index points at them. A put takes its
//! bytes as a [`Promise`] before it writes and keeps it until they are counted as live, so that the limit holds at
//! every moment and not only between puts.

use std::sync::Arc;

use kvarts_layout::NamespaceId;

use super::lock;
use crate::sync::{Mutex, Race, planted};

#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    live: u64,
    promised: u64,
    limit: Option<u64>,
}

impl Figures {
    fn used(&self) -> u64 {
        self.live.saturating_add(self.promised)
    }
}

/// A namespace would pass its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverQuota {
    /// Bytes that it may have.
    pub limit: u64,
    /// Bytes that it would have.
    pub wanted: u64,
}

/// What one namespace has, and may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamespaceSpace {
    /// The namespace.
    pub namespace: NamespaceId,
    /// Live bytes.
    pub live: u64,
    /// Bytes promised to puts under way.
    pub promised: u64,
    /// The most that the two may be together.
    pub limit: Option<u64>,
}

/// The account of one namespace. Usable from any thread.
#[derive(Debug)]
pub struct Account {
    namespace: NamespaceId,
    figures: Mutex<Figures>,
    /// Held while room is made: one thread does it, others find it made.
    pub(crate) making_room: Mutex<()>,
}

impl Account {
    pub(super) fn new(namespace: NamespaceId) -> Self {
        Self { namespace, figures: Mutex::default(), making_room: Mutex::default() }
    }

    /// Whose it is.
    pub fn namespace(&self) -> NamespaceId {
        self.namespace
    }

    /// Sets the limit, or takes it away.
    pub fn set_limit(&self, limit: Option<u64>) {
        lock(&self.figures).limit = limit;
    }

    /// What it has and may have.
    pub fn space(&self) -> NamespaceSpace {
        let Figures { live, promised, limit } = *lock(&self.figures);
        NamespaceSpace { namespace: self.namespace, live, promised, limit }
    }

    pub(super) fn moved(&self, before: u64, after: u64) {
        let mut figures = lock(&self.figures);
        let live = (figures.live + after).saturating_sub(before);
        if planted(Race::CountInTwoSteps) {
            drop(figures);
            figures = lock(&self.figures);
        }
        figures.live = live;
    }

    /// Takes bytes for a put before it writes them; given back when the promise is dropped.
    pub fn promise(self: &Arc<Self>, bytes: u64) -> Result<Promise, OverQuota> {
        let mut figures = lock(&self.figures);
        let wanted = figures.used().saturating_add(bytes);
        match figures.limit {
            Some(limit) if wanted > limit => Err(OverQuota { limit, wanted }),
            _ => {
                figures.promised = figures.promised.saturating_add(bytes);
                drop(figures);
                Ok(Promise { account: Arc::clone(self), bytes })
            }
        }
    }

    /// Bytes that must go before `bytes` more fit; zero if they do.
    pub fn excess(&self, bytes: u64) -> u64 {
        let figures = lock(&self.figures);
        figures.limit.map_or(0, |limit| figures.used().saturating_add(bytes).saturating_sub(limit))
    }
}

/// Bytes of an account that a put has taken.
#[derive(Debug)]
pub struct Promise {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut figures = lock(&self.account.figures);
        figures.promised = figures.promised.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_count_until_they_are_dropped() {
        let account = Arc::new(Account::new(NamespaceId([1; 32])));
        let unlimited = account.promise(u64::MAX);
        assert!(unlimited.is_ok());
        drop(unlimited);
        account.set_limit(Some(100));
        account.moved(0, 60);
        let first = account.promise(40).unwrap();
        assert_eq!(account.promise(1).err(), Some(OverQuota { limit: 100, wanted: 101 }));
        assert_eq!((account.excess(0), account.excess(5)), (0, 5));
        drop(first);
        assert!(account.promise(40).is_ok());
        account.set_limit(Some(50));
        assert_eq!(account.excess(0), 10, "a lower limit leaves an excess");
    }
}
