//! The scrubber: reads all blocks in the background, so that damage is found before a client meets it.
//!
//! A run goes through a snapshot of the store, reads block after block in the lowest class with every digest
//! compared, and reports. What is damaged the engine itself makes a miss, as it does on any read; a scrubbed block
//! stays as cold as it was. A run has memory of its own, and pauses so that it keeps to its pace.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_contract::api::{KvStore, Order, Placed, ReadEnd, ReadRequest, Verify};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::plan::{Tile, Tiles};
use kvarts_layout::{BlockKey, BlockShape, IndexKey};
use kvarts_store::engine::Store;
use tokio::time::sleep;

use super::Bandwidth;

/// Bytes that are read at once; more only where a single layer of a block is more.
const PIECE_BYTES: u64 = 1 << 20;
/// Blocks that are read at once.
const PIECE_BLOCKS: usize = 256;
/// How long one piece may take, pauses not counted.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a run found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubReport {
    /// When it ended, in milliseconds since 1970; zero if it has not.
    pub ended_unix_ms: u64,
    /// Blocks that were read and compared with their digests.
    pub blocks_checked: u64,
    /// Their bytes.
    pub bytes_checked: u64,
    /// Those of them that were not what was written, or could not be read.
    pub blocks_damaged: u64,
    /// Blocks that went while they were looked for.
    pub blocks_gone: u64,
    /// Blocks that could not be looked at now.
    pub blocks_passed_over: u64,
}

impl ScrubReport {
    fn add(&mut self, other: &Self) {
        self.blocks_checked += other.blocks_checked;
        self.bytes_checked += other.bytes_checked;
        self.blocks_damaged += other.blocks_damaged;
        self.blocks_gone += other.blocks_gone;
        self.blocks_passed_over += other.blocks_passed_over;
    }
}

/// What all runs of a server have found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubTotals {
    /// Runs that have ended.
    pub runs: u64,
    /// Of all runs together, the one under way included.
    pub all: ScrubReport,
    /// The last one that has ended.
    pub last: ScrubReport,
    /// Whether one is under way.
    pub under_way: bool,
}

/// The scrubber of a server.
#[derive(Debug, Default)]
pub struct Scrub {
    turn: tokio::sync::Mutex<()>,
    totals: Mutex<ScrubTotals>,
}

/// Says that no run is under way when it goes, however the run ends.
struct UnderWay<'a>(&'a Scrub);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.lock().under_way = false;
    }
}

impl Scrub {
    fn lock(&self) -> MutexGuard<'_, ScrubTotals> {
        // Counters stay whole whatever panics beside them.
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was found so far.
    pub fn totals(&self) -> ScrubTotals {
        *self.lock()
    }

    /// Goes through the whole store, at most at this pace in bytes a second. Refused while another run is under way.
    pub async fn run(&self, store: &Store, pace: Option<u64>) -> Result<ScrubReport, Reason> {
        let _turn = self.turn.try_lock().map_err(|_| Reason::Busy("a scrub is under way"))?;
        let _under_way = UnderWay(self);
        self.lock().under_way = true;
        let mut run =
            Run { store, pace: pace.map(Bandwidth::new), memory: None, report: ScrubReport::default() };
        let mut cursor = None;
        loop {
            // ends: an executor answers from memory, or the store is closed
            let page = store.snapshot(cursor).await.map_err(|_| Reason::Busy("the store is closing"))?;
            let page = page.map_err(|error| error.0)?;
            for blocks in page.blocks.chunk_by(|a, b| column(a) == column(b)) {
                let before = run.report;
                run.column(blocks).await?;
                let mut found = run.report;
                found.blocks_checked -= before.blocks_checked;
                found.bytes_checked -= before.bytes_checked;
                found.blocks_damaged -= before.blocks_damaged;
                found.blocks_gone -= before.blocks_gone;
                found.blocks_passed_over -= before.blocks_passed_over;
                self.lock().all.add(&found);
            }
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        let report = ScrubReport { ended_unix_ms: store.clock().unix_millis(), ..run.report };
        let mut totals = self.lock();
        totals.runs += 1;
        totals.last = report;
        totals.all.ended_unix_ms = report.ended_unix_ms;
        Ok(report)
    }
}

fn column(block: &IndexKey) -> (kvarts_layout::NamespaceId, kvarts_layout::Group, u64) {
    (block.namespace, block.group, block.coordinate.to_u64())
}

/// A run under way.
struct Run<'a> {
    store: &'a Store,
    pace: Option<Bandwidth>,
    memory: Option<Arc<Region>>,
    report: ScrubReport,
}

impl Run<'_> {
    /// Reads blocks of one column.
    async fn column(&mut self, blocks: &[IndexKey]) -> Result<(), Reason> {
        let Some(first) = blocks.first() else { return Ok(()) };
        let Ok(shape) = self.store.shape(first.namespace, first.group, first.coordinate) else {
            self.report.blocks_passed_over += blocks.len() as u64;
            return Ok(());
        };
        let all = 0..shape.layers().len() as u32;
        let some = usize::try_from(PIECE_BYTES / shape.block_bytes()).unwrap_or(1).clamp(1, PIECE_BLOCKS);
        for piece in blocks.chunks(some) {
            let mut keys: Vec<BlockKey> = piece.iter().map(|block| block.key).collect();
            // A block that moves may be listed twice.
            let mut seen = BTreeSet::new();
            keys.retain(|key| seen.insert(*key));
            let mut tiles = Tiles::new(Order::Blocks, all.clone(), keys.len() as u32);
            let mut failures = BTreeMap::new();
            while let Some(tile) = tiles.next(&shape, PIECE_BYTES) {
                tiles.pass(&tile);
                let failed = self.piece(first, &shape, &keys, &tile).await?.failures;
                failures
                    .extend(failed.into_iter().map(|(block, reason)| (tile.blocks.start + block, reason)));
            }
            self.count(&shape, keys.len() as u64, failures.into_values());
        }
        Ok(())
    }

    /// Reads some layers of some blocks, and says which failed.
    async fn piece(
        &mut self,
        of: &IndexKey,
        shape: &BlockShape,
        keys: &[BlockKey],
        tile: &Tile,
    ) -> Result<ReadEnd, Reason> {
        let bytes = tile.bytes(shape);
        let keys = keys.get(tile.blocks.start as usize..tile.blocks.end as usize).unwrap_or_default();
        if let Some(pace) = &self.pace {
            sleep(pace.spend(bytes)).await;
        }
        let request = ReadRequest {
            namespace: of.namespace,
            group: of.group,
            coordinate: of.coordinate,
            keys: keys.to_vec(),
            layers: Some(tile.layers.clone()),
            order: Order::Blocks,
            into: Placed::tile(Order::Blocks, shape, tile, self.memory(bytes)?)?,
            verify: Verify::Always,
            class: Class::Background,
            deadline: Some(self.store.clock().now().plus(TIMEOUT)),
        };
        let all_failed = |reason: Reason| {
            let failures = (0..keys.len() as u32).map(|block| (block, reason.clone())).collect();
            ReadEnd { failures, ..ReadEnd::default() }
        };
        let stream = match self.store.read(request) {
            Ok(stream) => stream,
            Err(error) => return Ok(all_failed(error.0)),
        };
        // ends: `TIMEOUT`, the deadline of the read
        let ended = std::future::poll_fn(|context| stream.poll_end(context)).await;
        let end = ended.map_err(|_| Reason::Busy("the store is closing"))?;
        if end.held_bytes > 0 {
            // A device may still write there.
            self.memory = None;
        }
        let late = end.failures.is_empty() && end.usable_layers < tile.layer_count();
        Ok(if late { all_failed(Reason::DeadlinePassed) } else { end })
    }

    fn memory(&mut self, bytes: u64) -> Result<SharedBuf, Reason> {
        let bytes = usize::try_from(bytes).map_err(|_| Reason::TooMany("bytes"))?;
        let region = match self.memory.take().filter(|region| region.len() >= bytes) {
            Some(region) => region,
            None => {
                let wanted = bytes.max(PIECE_BYTES as usize).next_multiple_of(4096);
                Region::anonymous(wanted).map_err(|_| Reason::TooMany("bytes"))?
            }
        };
        let buf = SharedBuf::new(&region, 0, bytes).ok_or(Reason::OutOfBounds)?;
        self.memory = Some(region);
        Ok(buf)
    }

    fn count(&mut self, shape: &BlockShape, blocks: u64, failures: impl Iterator<Item = Reason>) {
        let report = &mut self.report;
        let mut unchecked = 0;
        for reason in failures {
            match (&reason, reason.kind()) {
                (Reason::NotHere(_), _) => {
                    (report.blocks_gone, unchecked) = (report.blocks_gone + 1, unchecked + 1)
                }
                (Reason::Media(_), _) | (_, Kind::Corrupt) => {
                    report.blocks_damaged += 1;
                    tracing::warn!(target: "audit", %reason, "the scrub found a damaged block");
                }
                _ => {
                    (report.blocks_passed_over, unchecked) = (report.blocks_passed_over + 1, unchecked + 1);
                }
            }
        }
        let checked = blocks.saturating_sub(unchecked);
        report.blocks_checked += checked;
        report.bytes_checked += checked.saturating_mul(shape.block_bytes());
    }
}
