//! A pool of blocks in memory that the processes of one engine share. The blocks of a request are staged here before the engine relies on
//! them, and stay for later requests while there is room.
//!
//! [`Pool::stage`] requests blocks of any number of columns (for example of each worker's coordinate). Blocks in the pool are held; the
//! other blocks are read over any path that has them, verified, and held. A stage reports the number of leading blocks that are in the pool
//! in every column ([`Stage::look`]). It ends when all blocks are there, when the next block cannot arrive, or when no block has arrived
//! for its `silence`. A stage has no overall deadline, because a large stage takes longer. Its blocks stay in place until the stage is
//! dropped: later failures of disks, networks or servers do not make them unusable. A stage that is dropped early stops the reads that no
//! other stage waits for.
//!
//! The pool never reuses memory that a disk may still write to, even after the stage, its read or the connection has ended.
//!
//! An engine saves blocks into a draft ([`Pool::draft`]) and puts them from there. The blocks then stay for later requests.
//!
//! Blocks are stored in extents. An extent contains a run of consecutive blocks of a chain as `[layer][part][block]`, so that a layer of
//! the run is one stretch of memory for every size of block ([`Stretch`]). When the pool needs room, it evicts extents that no stage holds:
//! the least recently used first, and within a chain the end before the beginning.

mod book;
mod column;
mod draft;
mod extent;
mod news;
mod room;
mod stage;

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;

use kvarts_contract::api::KvStore;
use kvarts_contract::buffers::Region;
use kvarts_contract::clock::{Clock, Entropy, OsEntropy};
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, BlockShape};

use book::Book;
pub use book::Counts;
pub use column::Column;
pub use draft::{Draft, DraftTerms, Storing};
pub use kvarts_layout::plan::Stretch;
use news::News;
pub use stage::{Progress, Stage, StageRequest};

/// The name of a pool, which cannot be guessed. A process of the same tenant that knows the name may attach to the pool. As text it has 32
/// hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolName(pub(crate) [u8; 16]);

impl PoolName {
    pub(crate) fn new() -> Self {
        let mut name = [0; 16];
        OsEntropy::new().fill(&mut name);
        Self(name)
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Not the name: a reader of logs is not to attach.
impl fmt::Debug for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoolName")
    }
}

impl FromStr for PoolName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error(Reason::Config("the name of a pool must have 32 hexadecimal digits".to_owned()));
        let number =
            u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32 && !text.starts_with('+'));
        Ok(Self(number.ok_or_else(wrong)?.to_be_bytes()))
    }
}

/// How often a thread that must not wait lets others go first.
const TURNS: u32 = 1000;

/// What the parts of a pool share.
#[derive(Debug)]
struct Inner {
    region: Arc<Region>,
    clock: Arc<dyn Clock>,
    news: Arc<News>,
    book: Mutex<Book>,
}

/// A pool of blocks. Cheap to clone. The memory is freed when the last clone, the last stage and the last read are gone.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

impl Pool {
    /// A pool over all of `region`, which nothing else may use: for example memory of [`Client::shared_pool`](super::Client::shared_pool).
    pub fn new(store: Arc<dyn KvStore>, clock: &Arc<dyn Clock>, region: &Arc<Region>) -> Self {
        let book = Mutex::new(Book::new(store, region));
        let (region, clock) = (Arc::clone(region), Arc::clone(clock));
        Self(Arc::new(Inner { region, clock, news: Arc::default(), book }))
    }

    /// The memory of the blocks.
    pub fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    /// Holds and reads the blocks of a request. When the call returns, the reads have begun, and the present blocks are held.
    pub fn stage(&self, request: StageRequest) -> Result<Stage, Error> {
        Stage::begin(&self.0, request)
    }

    /// Reserves room for blocks of a column that an engine saves ([`Draft::stretches`]) and puts from there ([`Draft::put`]). `first_block`
    /// is the number of blocks before the first block in its chain. Keep the draft as long as a device may write there.
    pub fn draft(
        &self,
        column: (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        first_block: u32,
    ) -> Result<Draft, Error> {
        Draft::begin(&self.0, column, keys, first_block, true)
    }

    /// The same for a thread that must not wait. It also fails with `Busy` if another thread keeps using the pool: a thread that begins a
    /// read may wait for a connection meanwhile.
    pub fn draft_now(
        &self,
        column: (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        first_block: u32,
    ) -> Result<Draft, Error> {
        Draft::begin(&self.0, column, keys, first_block, false)
    }

    /// Removes every block that no stage holds. The next stage reads it again.
    pub fn clear(&self) {
        let mut book = self.0.book();
        while book.evict().is_some() {}
    }

    /// The content and the counters of the pool.
    pub fn counts(&self) -> Counts {
        self.0.book().counts()
    }
}

impl Inner {
    /// Who looks at a stage has it for a moment; who begins a read may have it for as long as a connection takes.
    fn book_soon(&self) -> Option<MutexGuard<'_, Book>> {
        for _ in 0..TURNS {
            match self.book.try_lock() {
                Ok(book) => return Some(book),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => thread::yield_now(),
            }
        }
        None
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Each change is one step.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
