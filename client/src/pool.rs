//! A pool of blocks in memory that the processes of one engine share: what a request needs is staged here before the engine promises it,
//! and stays for the next request for as long as there is room.
//!
//! [`Pool::stage`] asks for blocks of any number of columns (of each worker's coordinate, for example). Those that are here are held; the
//! others are read by whatever path has them, verified, and held. A stage tells how many leading blocks are here in every column
//! ([`Stage::look`]); it ends when all are, when the next one cannot come, or when nothing has come for its `silence`. There is no deadline for a
//! whole stage: a large one takes longer. What it holds stays where it is until the stage is dropped, so nothing that happens to
//! disks, networks or servers afterwards makes it unusable. A stage that is dropped early stops the reads that no other stage waits for.
//!
//! Memory that a disk may still write to is not used again, whatever became of the stage, of its read or of the connection.
//!
//! What an engine saves lies in a draft ([`Pool::draft`]), is put from there, and stays for the next request.
//!
//! Blocks lie in extents: a run of a chain's blocks, `[layer][part][block]`, so that a layer of the run is one stretch of memory whatever the
//! size of a block ([`Stretch`]). When room is needed extents that no stage holds go, those first that were used longest ago, and of one chain its
//! end before its beginning.

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

/// The name of a pool, which cannot be guessed: a process of the same tenant that knows it may attach to the pool. In text, 32 hexadecimal
/// digits.
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
        let wrong = || Error(Reason::Config("the name of a pool has 32 hexadecimal digits".to_owned()));
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

/// A pool of blocks. Cheap to clone; the memory is given back when the last clone, the last stage and the last read are gone.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

impl Pool {
    /// A pool over all of `region`, which nothing else uses: memory of [`Client::shared_pool`](super::Client::shared_pool), for example.
    pub fn new(store: Arc<dyn KvStore>, clock: &Arc<dyn Clock>, region: &Arc<Region>) -> Self {
        let book = Mutex::new(Book::new(store, region));
        let (region, clock) = (Arc::clone(region), Arc::clone(clock));
        Self(Arc::new(Inner { region, clock, news: Arc::default(), book }))
    }

    /// The memory that blocks lie in.
    pub fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    /// Holds and reads what a request needs. When this returns, reads have begun, and blocks that were here are held.
    pub fn stage(&self, request: StageRequest) -> Result<Stage, Error> {
        Stage::begin(&self.0, request)
    }

    /// Room for blocks of a column that an engine saves ([`Draft::stretches`]) and that are put from there ([`Draft::put`]). The first has
    /// `first_block` blocks of its chain before it. Keep the draft for as long as a device may write there.
    pub fn draft(
        &self,
        column: (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        first_block: u32,
    ) -> Result<Draft, Error> {
        Draft::begin(&self.0, column, keys, first_block, true)
    }

    /// The same for a thread that must not wait: `Busy` also where another thread goes on using the pool. One that begins a read may wait
    /// there for a connection.
    pub fn draft_now(
        &self,
        column: (Column, &Arc<BlockShape>),
        keys: &[BlockKey],
        first_block: u32,
    ) -> Result<Draft, Error> {
        Draft::begin(&self.0, column, keys, first_block, false)
    }

    /// Forgets every block that no stage holds; the next stage reads it again.
    pub fn clear(&self) {
        let mut book = self.0.book();
        while book.evict().is_some() {}
    }

    /// What the pool has and has done.
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
