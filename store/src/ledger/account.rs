//! What one namespace has on disk, what the namespaces of one tenant have together, and how much they may have.
//!
//! A quota counts live bytes: records with their headers and padding, as the index points at them. A put takes its
//! bytes as a [`Promise`] before it writes and keeps it until they are counted as live, so that the limits hold at
//! every moment and not only between puts.

use std::sync::Arc;

use kvarts_layout::NamespaceId;

use super::{Live, MakingRoom, lock};
use kvarts_contract::sync::{Mutex, OnceLock, Race, planted};

#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    live: u64,
    blocks: u64,
    promised: u64,
    limit: Option<u64>,
}

impl Figures {
    fn used(&self) -> u64 {
        self.live.saturating_add(self.promised)
    }

    fn moved(&mut self, before: Live, after: Live) {
        self.live = (self.live + after.bytes).saturating_sub(before.bytes);
        self.blocks = (self.blocks + after.blocks).saturating_sub(before.blocks);
    }

    fn promise(&mut self, bytes: u64) -> Result<(), OverQuota> {
        let wanted = self.used().saturating_add(bytes);
        match self.limit {
            Some(limit) if wanted > limit + u64::from(kvarts_layout::planted!("quota-off-by-one")) => {
                Err(OverQuota { limit, wanted })
            }
            _ => {
                self.promised = self.promised.saturating_add(bytes);
                Ok(())
            }
        }
    }

    fn release(&mut self, bytes: u64) {
        self.promised = self.promised.saturating_sub(bytes);
    }

    fn excess(&self, bytes: u64) -> u64 {
        self.limit.map_or(0, |limit| self.used().saturating_add(bytes).saturating_sub(limit))
    }
}

/// A namespace, or all of its tenant's together, would pass the limit.
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
    /// Live blocks.
    pub blocks: u64,
    /// Bytes promised to puts under way.
    pub promised: u64,
    /// The most that the two may be together.
    pub limit: Option<u64>,
}

/// What several namespaces have together, and may have. Usable from any thread.
#[derive(Debug, Default)]
pub struct Pool {
    figures: Mutex<Figures>,
    /// As in [`Account`].
    pub(crate) making_room: MakingRoom,
}

/// What a pool has, and may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolSpace {
    /// Live bytes of all its namespaces.
    pub live: u64,
    /// Bytes promised to puts under way.
    pub promised: u64,
    /// The most that the two may be together.
    pub limit: Option<u64>,
}

impl Pool {
    /// Sets the limit, or takes it away.
    pub fn set_limit(&self, limit: Option<u64>) {
        lock(&self.figures).limit = limit;
    }

    /// What it has and may have.
    pub fn space(&self) -> PoolSpace {
        let Figures { live, promised, limit, blocks: _ } = *lock(&self.figures);
        PoolSpace { live, promised, limit }
    }

    /// Bytes that must go before `bytes` more fit; zero if they do.
    pub fn excess(&self, bytes: u64) -> u64 {
        lock(&self.figures).excess(bytes)
    }
}

/// The account of one namespace. Usable from any thread.
#[derive(Debug)]
pub struct Account {
    namespace: NamespaceId,
    number: u32,
    /// Locked before the pool's.
    figures: Mutex<Figures>,
    pool: OnceLock<Arc<Pool>>,
    /// One task at a time makes room, others find it made.
    pub(crate) making_room: MakingRoom,
}

impl Account {
    pub(super) fn new(namespace: NamespaceId, number: u32) -> Self {
        let (figures, making_room) = (Mutex::default(), MakingRoom::default());
        Self { namespace, number, figures, pool: OnceLock::new(), making_room }
    }

    /// Its number in the open store, by which records know their account; never 0.
    pub fn number(&self) -> u32 {
        self.number
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
        let Figures { live, blocks, promised, limit } = *lock(&self.figures);
        NamespaceSpace { namespace: self.namespace, live, blocks, promised, limit }
    }

    /// From now on it counts in this pool, too, with all that it has. It is in one pool for ever.
    pub fn join(&self, pool: &Arc<Pool>) {
        let figures = lock(&self.figures);
        if self.pool.set(Arc::clone(pool)).is_ok() {
            let mut pool = lock(&pool.figures);
            pool.live = pool.live.saturating_add(figures.live);
            pool.blocks = pool.blocks.saturating_add(figures.blocks);
            pool.promised = pool.promised.saturating_add(figures.promised);
        }
    }

    /// The pool that it counts in.
    pub fn pool(&self) -> Option<&Arc<Pool>> {
        self.pool.get()
    }

    pub(super) fn moved(&self, before: Live, after: Live) {
        let mut figures = lock(&self.figures);
        let mut changed = *figures;
        changed.moved(before, after);
        if planted(Race::CountInTwoSteps) {
            drop(figures);
            figures = lock(&self.figures);
        }
        (figures.live, figures.blocks) = (changed.live, changed.blocks);
        if let Some(pool) = self.pool.get() {
            lock(&pool.figures).moved(before, after);
        }
    }

    /// Takes bytes for a put before it writes them; given back when the promise is dropped.
    pub fn promise(self: &Arc<Self>, bytes: u64) -> Result<Promise, OverQuota> {
        let mut figures = lock(&self.figures);
        figures.promise(bytes)?;
        if let Some(pool) = self.pool.get()
            && let Err(over) = lock(&pool.figures).promise(bytes)
        {
            figures.release(bytes);
            return Err(over);
        }
        drop(figures);
        Ok(Promise { account: Arc::clone(self), bytes })
    }

    /// Bytes that must go before `bytes` more fit into its own limit; zero if they do.
    pub fn excess(&self, bytes: u64) -> u64 {
        lock(&self.figures).excess(bytes)
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
        if kvarts_layout::planted!("promise-leaked") {
            return;
        }
        let mut figures = lock(&self.account.figures);
        figures.release(self.bytes);
        if let Some(pool) = self.account.pool.get() {
            lock(&pool.figures).release(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(bytes: u64, blocks: u64) -> Live {
        Live { bytes, blocks }
    }

    #[test]
    fn promises_count_until_they_are_dropped() {
        let account = Arc::new(Account::new(NamespaceId([1; 32]), 1));
        let unlimited = account.promise(u64::MAX);
        assert!(unlimited.is_ok());
        drop(unlimited);
        account.set_limit(Some(100));
        account.moved(live(0, 0), live(60, 1));
        let first = account.promise(40).unwrap();
        assert_eq!(account.promise(1).err(), Some(OverQuota { limit: 100, wanted: 101 }));
        assert_eq!((account.excess(0), account.excess(5)), (0, 5));
        drop(first);
        assert!(account.promise(40).is_ok());
        account.set_limit(Some(50));
        assert_eq!(account.excess(0), 10, "a lower limit leaves an excess");
    }

    #[test]
    fn a_pool_is_the_sum_of_its_accounts_whenever_they_joined() {
        let pool = Arc::new(Pool::default());
        let account = |number| Arc::new(Account::new(NamespaceId([number; 32]), 1));
        let (first, second, stranger) = (account(1), account(2), account(3));
        first.moved(live(0, 0), live(30, 3));
        let before = first.promise(5).unwrap();
        for one in [&first, &second, &first] {
            one.join(&pool);
        }
        pool.set_limit(Some(100));
        second.moved(live(0, 0), live(20, 2));
        let after = second.promise(45).unwrap();
        assert_eq!(pool.space(), PoolSpace { live: 50, promised: 50, limit: Some(100) });
        assert_eq!(first.promise(1).err(), Some(OverQuota { limit: 100, wanted: 101 }));
        assert_eq!(first.space().promised, 5, "what the pool refused is given back");
        assert!(stranger.promise(1000).is_ok());
        drop((before, after));
        assert_eq!((first.space().blocks, second.space().blocks), (3, 2));
        second.moved(live(20, 2), live(0, 0));
        assert_eq!(second.space().blocks, 0);
        assert_eq!((pool.space().live, pool.space().promised, pool.excess(80)), (30, 0, 10));
    }
}
