//! Where every byte on disk belongs: by segment, by namespace, and for the store as a whole.
//!
//! Each byte that a store has allocated is one of four, and the four add up to what is allocated, always:
//!
//! - **live**: records that the index points at, header and padding included. Of a record of which only some blocks
//!   are live, that share of it: `record bytes * live blocks / blocks`, rounded down;
//! - **dead**: the rest of all records (deleted, evicted, expired, lost to another copy, or not visible yet), and
//!   the whole rest of a segment that failed and takes no more records;
//! - **free**: where records can still go: segments that hold nothing, the rest of open ones, and what has been
//!   taken of the budget for a file that is being made;
//! - **overhead**: everything else: segment headers, definitions, tombstones, footers, trailers and what stands
//!   empty before them, checkpoints, superblocks, directories.
//!
//! Bytes of evicted records that were given back to the file system as holes are none of them: they are not allocated.
//!
//! Nothing is scanned for it: a segment's [`Book`] is changed when bytes are given out and when a block becomes live
//! or stops being so. Every book is read and changed under its own lock, so each adds up at every moment, and hence
//! their sum does.
//!
//! Memory only, no clock, no I/O. Lock order: a shard of the index's records, then the ledger, then a book or an
//! account, and with an account's its pool's; a thread that holds one of these takes no other.

mod account;
mod book;
mod making_room;
mod report;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use kvarts_layout::NamespaceId;

use kvarts_contract::sync::atomic::{AtomicU64, Ordering::Relaxed};
use kvarts_contract::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use account::{Account, NamespaceSpace, OverQuota, Pool, PoolSpace, Promise};
pub use book::Book;
pub(crate) use making_room::MakingRoom;
pub use report::{Phase, SegmentView, ShardSpace, Space, SpaceReport};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is live of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Live {
    /// Bytes on disk: its share of the record's.
    pub(crate) bytes: u64,
    /// Blocks.
    pub(crate) blocks: u64,
}

#[derive(Debug, Default)]
struct Tables {
    /// By shard and number.
    books: BTreeMap<(u32, u32), Arc<Book>>,
    /// Bytes of segments that hold nothing, by shard.
    spare: BTreeMap<u32, Arc<AtomicU64>>,
    accounts: BTreeMap<NamespaceId, Arc<Account>>,
    /// The last number that an account was given.
    last_account: u32,
    /// By the salt of the tenant.
    pools: BTreeMap<Vec<u8>, Arc<Pool>>,
    /// By the number of a record class.
    classes: BTreeMap<u32, Arc<Account>>,
    /// Uses of segments that were begun.
    uses: Arc<AtomicU64>,
}

/// The books of all segments and the accounts of all namespaces. Usable from any thread.
#[derive(Debug, Default)]
pub struct Ledger(RwLock<Tables>);

impl Ledger {
    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The book of a segment, begun empty if there is none.
    pub fn open(&self, shard: u32, segment: u32) -> Arc<Book> {
        let mut tables = self.write();
        let tables = &mut *tables;
        let spare = Arc::clone(tables.spare.entry(shard).or_default());
        let begin = || Arc::new(Book::new(&tables.uses, &spare));
        Arc::clone(tables.books.entry((shard, segment)).or_insert_with(begin))
    }

    /// Which of all uses of all segments a segment is in; none if there is no such segment.
    pub(crate) fn incarnation(&self, shard: u32, segment: u32) -> Option<u64> {
        self.read().books.get(&(shard, segment)).map(|book| book.incarnation())
    }

    /// Forgets the book of a segment whose file is gone.
    pub fn close(&self, shard: u32, segment: u32) {
        if let Some(book) = self.write().books.remove(&(shard, segment)) {
            book.close();
        }
    }

    /// Forgets the books of all segments of a shard, and gives the bytes of the budget that they had.
    pub(crate) fn close_all_of(&self, shard: u32) -> u64 {
        let mut tables = self.write();
        let books = tables.books.extract_if((shard, 0)..=(shard, u32::MAX), |_, _| true);
        let closed = books.map(|(_, book)| {
            book.close();
            book.allocated()
        });
        closed.sum()
    }

    /// Bytes of a shard's segments that hold nothing.
    pub(crate) fn spare_of(&self, shard: u32) -> u64 {
        self.read().spare.get(&shard).map_or(0, |spare| spare.load(Relaxed))
    }

    /// Of all other shards the one that has most of them, and how many.
    pub(crate) fn most_spare_beside(&self, shard: u32) -> Option<(u32, u64)> {
        let tables = self.read();
        let others = tables.spare.iter().filter(|(other, _)| **other != shard);
        others.map(|(other, spare)| (*other, spare.load(Relaxed))).max_by_key(|(_, spare)| *spare)
    }

    /// The account of a namespace, begun without a limit if there is none.
    pub fn account(&self, namespace: NamespaceId) -> Arc<Account> {
        if let Some(account) = self.read().accounts.get(&namespace) {
            return Arc::clone(account);
        }
        let mut tables = self.write();
        let Tables { accounts, last_account, .. } = &mut *tables;
        let begin = || {
            *last_account = last_account.saturating_add(1);
            Arc::new(Account::new(namespace, *last_account))
        };
        Arc::clone(accounts.entry(namespace).or_insert_with(begin))
    }

    /// Forgets the account of a namespace that has nothing, is promised nothing and has no limit.
    pub(crate) fn forget_account(&self, namespace: NamespaceId) {
        let mut tables = self.write();
        let is_idle = |account: &Arc<Account>| {
            let space = account.space();
            (space.live, space.promised, space.limit) == (0, 0, None)
        };
        if tables.accounts.get(&namespace).is_some_and(is_idle) {
            tables.accounts.remove(&namespace);
        }
    }

    /// What the namespaces of the tenant with this salt have together, if it was ever asked for.
    pub fn pool(&self, salt: &[u8]) -> Option<Arc<Pool>> {
        self.read().pools.get(salt).map(Arc::clone)
    }

    /// The same, begun without a limit if there is none.
    pub fn open_pool(&self, salt: &[u8]) -> Arc<Pool> {
        Arc::clone(self.write().pools.entry(salt.to_vec()).or_default())
    }

    /// Records of this record class belong to this namespace.
    pub fn assign(&self, class: u32, namespace: NamespaceId) {
        let account = self.account(namespace);
        self.write().classes.insert(class, account);
    }

    /// No record is of this record class any more.
    pub fn forget(&self, class: u32) {
        self.write().classes.remove(&class);
    }

    /// The number of the account that records of this record class belong to; 0 for a class without one.
    pub(crate) fn number_of(&self, class: u32) -> u32 {
        match self.read().classes.get(&class) {
            Some(account) => account.number(),
            _ => 0,
        }
    }

    /// What is live of a record has changed from `before` to `after`.
    pub(crate) fn moved(&self, (shard, segment): (u32, u32), class: u32, before: Live, after: Live) {
        if before == after {
            return;
        }
        let tables = self.read();
        if let Some(book) = tables.books.get(&(shard, segment)) {
            book.moved(before.bytes, after.bytes);
        }
        if let Some(account) = tables.classes.get(&class) {
            account.moved(before, after);
        }
    }

    /// The accounts that count in a pool.
    pub(crate) fn accounts_in(&self, pool: &Arc<Pool>) -> Vec<Arc<Account>> {
        let inside = |account: &&Arc<Account>| account.pool().is_some_and(|own| Arc::ptr_eq(own, pool));
        self.read().accounts.values().filter(inside).map(Arc::clone).collect()
    }

    /// All segments as they are, in order.
    pub fn segments(&self) -> Vec<SegmentView> {
        let view = |(&(shard, segment), book): (&(u32, u32), &Arc<Book>)| book.view(shard, segment);
        self.read().books.iter().map(view).collect()
    }

    /// All namespaces as they are, in order.
    pub fn namespaces(&self) -> Vec<NamespaceSpace> {
        self.read().accounts.values().map(|account| account.space()).collect()
    }

    /// How many segments there are.
    pub fn segment_count(&self) -> usize {
        self.read().books.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: NamespaceId = NamespaceId([1; 32]);

    #[test]
    fn a_record_counts_where_it_lies_and_for_whom() {
        let ledger = Ledger::default();
        let book = ledger.open(3, 7);
        book.set_allocated(1 << 20);
        book.begin(4096);
        book.append(12_288, 8192);
        ledger.assign(5, HERE);
        let live = |bytes, blocks| Live { bytes, blocks };
        ledger.moved((3, 7), 5, live(0, 0), live(8192, 8));
        ledger.moved((3, 7), 5, live(8192, 8), live(5000, 5));
        // Neither of these is known: a class without an account, a segment without a book.
        ledger.moved((3, 8), 4, live(0, 0), live(100, 1));
        let space = ledger.segments()[0].space;
        assert_eq!((space.live, space.dead, space.overhead), (5000, 3192, 4096 + 4096));
        assert_eq!(space.sum(), 1 << 20);
        assert_eq!((ledger.namespaces()[0].live, ledger.namespaces()[0].blocks), (5000, 5));
        ledger.close(3, 7);
        assert_eq!(ledger.segments(), []);
    }

    #[test]
    fn no_two_uses_of_segments_have_one_number_also_where_a_segment_was_removed_and_made_anew() {
        let ledger = Ledger::default();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..3 {
            for segment in 0..2 {
                assert_eq!(ledger.incarnation(1, segment), None);
                let book = ledger.open(1, segment);
                for _ in 0..2 {
                    book.begin(4096);
                    book.append(4096, 4096);
                    book.turn(Phase::Full);
                    assert!(seen.insert(ledger.incarnation(1, segment)), "{segment}");
                }
            }
            (0..2).for_each(|segment| ledger.close(1, segment));
        }
    }
}
