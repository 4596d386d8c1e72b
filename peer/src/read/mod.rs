//! One read over several paths.
//!
//! A read is cut into pieces (`cut`). A path that has room takes the next piece that it leads to, and one that comes late is
//! asked for again from another path (`kvarts_cluster::dealer`). The pieces of a read share what they have met of each block
//! ([`Origins`]): a path that has another production of a block says that the block is not there, and is not asked for it
//! again. What is announced is in its places, and nothing writes to it any more: see `request`.
//!
//! A read is one future (`drive`), which holds no lock while it waits and takes time, timers and a place to run from
//! outside ([`Runner`]).

mod bell;
mod cut;
mod drive;
mod failing;
mod last;
mod late;
mod nodes;
mod request;
mod runner;
mod scratch;
mod tiles;

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{
    MAX_REQUEST_BLOCKS, Origins, Placed, ReadSink, ReadStream, TiledRequest, read_channel, wanted_layers,
};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::BlockShape;

use last::Last;

pub(crate) use cut::PIECE_BYTES_LEAST;
pub(crate) use failing::BUSY_FOR;
pub use last::LastResort;
pub use nodes::{Brought, FAILURES, NodePaths, OWN, PathStatus};
pub use runner::{OnTokio, Runner, Task};
pub(crate) use runner::{in_time, sleep};
pub use tiles::MultiTiles;

/// Which paths lead to each block, as far as it is known. Reads that together are one share it: what one of them did not find
/// is not asked for again.
#[derive(Debug)]
pub struct Copies {
    paths: Mutex<Vec<PathSet>>,
    last: OnceLock<Last>,
    kept: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl Copies {
    /// Of each block the paths that are said to lead to it.
    pub fn of(paths: Vec<PathSet>) -> Arc<Self> {
        Arc::new(Self { paths: Mutex::new(paths), last: OnceLock::new(), kept: OnceLock::new() })
    }

    /// Keeps something for as long as the read lives: it goes when the read has ended, or was given up. The first that is set is kept.
    pub fn keep(&self, what: Arc<dyn Any + Send + Sync>) {
        // Of two the second one goes at once.
        let _ = self.kept.set(what);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PathSet>> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of some blocks.
    fn some(&self, blocks: Range<u32>) -> Vec<PathSet> {
        let all = self.lock();
        blocks.map(|block| all.get(block as usize).copied().unwrap_or_default()).collect()
    }

    /// These paths lead to a block as well.
    pub fn also(&self, block: u32, more: PathSet) {
        if let Some(paths) = self.lock().get_mut(block as usize) {
            *paths = paths.or(more);
        }
    }

    /// A block is not where this path leads.
    fn without(&self, block: u32, path: PathId) {
        if let Some(paths) = self.lock().get_mut(block as usize) {
            *paths = paths.without(path);
        }
    }
}

/// Blocks to be read by several paths.
#[derive(Clone, Debug)]
pub struct MultiRead {
    /// What is read.
    pub request: TiledRequest,
    /// Where to.
    pub into: Placed,
    /// The shape of its blocks.
    pub shape: Arc<BlockShape>,
    /// Which production of each block is wanted, or the first that is met.
    pub origins: Arc<Origins>,
    /// Where the blocks are.
    pub copies: Arc<Copies>,
    /// Which block of `origins` and `copies` the first block of the request is.
    pub first: u32,
    /// Nothing else is read of its blocks that has to be of the same production.
    pub is_alone: bool,
}

impl MultiRead {
    /// Refuses what a store refuses of a read.
    pub(crate) fn check(&self, now: Nanos) -> Result<(), Reason> {
        let (TiledRequest { keys, layers, deadline, .. }, into) = (&self.request, &self.into);
        match keys.len() {
            0 => return Err(Reason::Empty),
            1..=MAX_REQUEST_BLOCKS => {}
            _ => return Err(Reason::TooMany("blocks")),
        }
        let (expected, found) = (keys.len() as u64, u64::from(into.block_count()));
        if expected != found {
            return Err(Reason::Length { expected, found });
        }
        if into.gate().is_some() {
            return Err(Reason::Overlap);
        }
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(Reason::DeadlineInPast);
        }
        let mut sorted: Vec<_> = keys.iter().collect();
        sorted.sort_unstable();
        if let Some([key, _]) = sorted.array_windows().find(|[one, next]| one == next) {
            return Err(Reason::Duplicate(**key));
        }
        let layers = wanted_layers(Some(layers), &self.shape)?;
        Ok(into.places().check(&self.shape, layers)?)
    }
}

/// Reads by several paths, as [`KvStore::read`](kvarts_contract::api::KvStore::read) does by one: the same events, and an error
/// only where no path has the block.
pub fn read(read: MultiRead, nodes: &Arc<NodePaths>, runner: &Arc<dyn Runner>) -> Result<ReadStream, Reason> {
    read.check(runner.now())?;
    let (sink, stream) = read_channel();
    begin(read, nodes, runner, sink);
    Ok(stream)
}

/// As [`read`], of what was checked, for a stream that was given out before it was known where the blocks are.
pub(crate) fn begin(read: MultiRead, nodes: &Arc<NodePaths>, runner: &Arc<dyn Runner>, sink: ReadSink) {
    let mut reading = drive::Reading::new(read, Arc::clone(nodes), Arc::clone(runner), sink);
    // ends: the read's deadline, its reader leaves, or each path has given up
    runner.spawn(Box::pin(std::future::poll_fn(move |context| reading.poll(context))));
}

#[cfg(test)]
mod tests;
