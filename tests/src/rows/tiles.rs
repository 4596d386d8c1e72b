//! Reads that come in tiles, while blocks are deleted, put again by other producers, evicted and moved between the tiles,
//! and tiles that are kept and given again. Of each block a read has the bytes of one production, which was there when the
//! read began or came later; what was deleted before it began is not given, kept or not.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_contract::api::{
    Arrived, BlockOutcome, DeleteRequest, Order, Parent, Placed, PutRequest, ReadRequest, Target, TileBytes,
    TileMemory, TiledRead,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::plan::Tile;
use kvarts_layout::{BlockKey, Layout};
use kvarts_store::engine::{CompactOptions, Limits, Options, StoreTiles, TileIdentity, TileRuns};

use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::{Desk, pages};
use crate::fixture;
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed, SimWorld, WorldConfig};
use crate::stage::{self, SimStage, Stage};

/// Blocks of a read.
const BLOCKS: u64 = 6;
/// Reads of one seed.
const READS: u64 = 12;

/// A tile that is kept: its memory, and what it was read from.
struct Kept {
    tile: Tile,
    order: Order,
    buf: SharedBuf,
    placed: Placed,
    identity: TileIdentity,
}

/// What a reader keeps with a tile: where its blocks lay, unless it was kept before.
type Reading = TiledRead<StoreTiles, Option<TileRuns>>;

/// A store whose blocks come and go, and who put what.
struct Scene<'a> {
    stage: &'a SimStage,
    desk: Desk<'a>,
    others: Desk<'a>,
    keys: Vec<BlockKey>,
    /// Of each block: who put it last, and whether it was deleted since.
    puts: Vec<(u64, bool)>,
    producers: u64,
    next_other: u64,
    kept: Vec<Kept>,
}

fn open(seed: Seed) -> Result<SimStage, String> {
    let every = std::time::Duration::from_secs(1 << 40);
    let options = Options {
        shards_per_directory: 1,
        segment_bytes: 64 << 10,
        budget_bytes: 768 << 10,
        limits: Limits { arena_bytes: 2 << 20, checkpoint_every: every, ..Limits::default() },
        ..Options::default()
    };
    SimStage::open(&SimWorld::new(seed.0, &WorldConfig::default()), &options)
        .map_err(|error| error.to_string())
}

impl Scene<'_> {
    /// Puts what is not here, by another producer than before.
    fn put(&mut self, blocks: impl Iterator<Item = usize>) {
        self.producers += 1;
        for at in blocks {
            let key = self.keys.get(at..at + 1).unwrap_or_default();
            let request = self.desk.request(pages(), key, self.producers);
            let request = PutRequest { parent: Parent::Unknown, layout: Some(Layout::LayerBlock), ..request };
            if self.desk.outcomes(request) == [BlockOutcome::Stored] {
                self.puts[at] = (self.producers, false);
            }
        }
    }

    fn delete(&mut self, blocks: &[usize]) -> Result<(), String> {
        if blocks.is_empty() {
            return Ok(());
        }
        let keys = blocks.iter().map(|at| self.keys[*at]).collect();
        let target = Target::Keys { column: Some(pages()), keys };
        let request = DeleteRequest { namespace: self.desk.namespace, target, deadline: None };
        stage::ask(self.stage, self.stage.store().delete(request)).map_err(|error| error.to_string())?;
        blocks.iter().for_each(|at| self.puts[*at].1 = true);
        Ok(())
    }

    /// Something happens to the blocks.
    fn change(&mut self, rng: &mut Rng) -> Result<(), String> {
        match rng.below(8) {
            0 | 1 => {
                let some: Vec<usize> = (0..BLOCKS as usize).filter(|_| rng.coin()).collect();
                self.delete(&some)?;
                self.put(some.into_iter());
            }
            2 => {
                // All of them, in the order of the first time: where segments are rewritten, each lies where it lay.
                self.delete(&(0..BLOCKS as usize).collect::<Vec<_>>())?;
                (0..rng.below(3)).for_each(|_| self.stage.world().settle());
                self.put(0..BLOCKS as usize);
            }
            3 => {
                let one = rng.index(BLOCKS as usize);
                self.delete(&[one])?;
            }
            4 | 5 => {
                for _ in 0..rng.below(14) {
                    self.next_other += 1;
                    let key = self.others.keys(self.next_other..self.next_other + 1);
                    self.others.outcomes(self.others.request(pages(), &key, 1));
                }
            }
            6 => {
                let options =
                    CompactOptions { dead_thousandths: 0, merge_records_min: 2, ..CompactOptions::default() };
                let compacted = stage::drive(self.stage.world(), self.stage.engine().compact(options));
                compacted.map_err(|hang| hang.to_string())?.map_err(|error| error.to_string())?;
            }
            _ => {}
        }
        Ok(())
    }

    /// A read of all blocks, tile by tile.
    fn read(&mut self, rng: &mut Rng, state: &mut Mixer) -> Result<(), String> {
        let order = if rng.coin() { Order::Layers } else { Order::Blocks };
        let request = ReadRequest { order, ..self.desk.read_request(pages(), &self.keys) };
        let (request, _) = request.tiled(&fixture::shape(pages().0, pages().1));
        let read: Reading = self.stage.engine().read_tiles(request).map_err(|error| error.to_string())?;
        let mut read = read.with_whole_tiles();
        let before = self.puts.clone();
        let (mut arrived, changes) = (BTreeMap::new(), rng.coin());
        let bytes = [1, 0, 40_000, 1 << 30][rng.index(4)] * read.shape().layers()[0].bytes().min(1 << 20);
        while let Some(kept) = self.begin(&mut read, order, bytes)? {
            self.take(&mut read, order, &mut arrived)?;
            [u64::from(kept), arrived.len() as u64, u64::from(read.good())]
                .iter()
                .for_each(|word| state.word(*word));
            if changes && rng.below(3) == 0 {
                self.change(rng)?;
            }
        }
        self.check(&before, &arrived, state)
    }

    /// Begins the next tile: one that is kept, if it still is what would be read. Nothing at the end.
    fn begin(&mut self, read: &mut Reading, order: Order, bytes: u64) -> Result<Option<bool>, String> {
        for at in 0..self.kept.len() {
            let one = &self.kept[at];
            if one.order != order || !read.accepts(&one.tile) {
                continue;
            }
            let recalled =
                read.source().recall(&one.tile, &one.identity).map_err(|error| error.to_string())?;
            let Some(stream) = recalled else {
                self.kept.swap_remove(at);
                break;
            };
            let (tile, buf, placed) = (one.tile.clone(), one.buf.clone(), one.placed.clone());
            read.give(TileMemory { tile, buf, placed, with: None }, stream);
            return Ok(Some(true));
        }
        let Some(tile) = read.next_tile(bytes) else { return Ok(None) };
        let len = tile.bytes(read.shape()) as usize;
        let region = Region::anonymous(len).map_err(|error| error.to_string())?;
        let buf = SharedBuf::new(&region, 0, len).ok_or("no memory")?;
        let begun = read.grant_by(tile, buf, |source, tile, placed| source.begin_known(tile, placed));
        begun.map_err(|error| error.to_string())?;
        Ok(Some(false))
    }

    /// Takes what arrives of the tile under way, and keeps the tile if it came whole.
    fn take(
        &mut self,
        read: &mut Reading,
        order: Order,
        arrived: &mut BTreeMap<(u32, u32), Vec<u8>>,
    ) -> Result<(), String> {
        let shape = Arc::clone(read.shape());
        loop {
            let next = stage::drive(self.stage.world(), read.next()).map_err(|hang| hang.to_string())?;
            let Some(next) = next.map_err(|late| format!("{late:?} without a deadline"))? else { break };
            let Arrived::Bytes(TileBytes { memory, layer, blocks, .. }) = next else { continue };
            for chunk in memory.tile.chunks(order, &shape, layer, blocks) {
                let bytes =
                    memory.placed.chunk(chunk.part, chunk.block, chunk.bytes).ok_or("no such chunk")?;
                arrived.insert((memory.tile.blocks.start + chunk.block, chunk.part), bytes.to_vec());
            }
        }
        if let Some(whole) = read.take_whole()
            && let Some(runs) = whole.with.clone()
        {
            let (tile, buf, placed) = (whole.tile.clone(), whole.buf.clone(), whole.placed.clone());
            if let Some(identity) = read.source().identity(&tile, runs) {
                self.kept.push(Kept { tile, order, buf, placed, identity });
            }
        }
        Ok(())
    }

    /// Whether all that arrived of each block was put by one producer who may have been met.
    fn check(
        &self,
        before: &[(u64, bool)],
        arrived: &BTreeMap<(u32, u32), Vec<u8>>,
        state: &mut Mixer,
    ) -> Result<(), String> {
        let ((group, coordinate), mut puts) = (pages(), before.iter().zip(&self.puts));
        for (at, key) in (0u32..).zip(&self.keys) {
            let Some(((then, deleted), (now, _))) = puts.next() else { break };
            let chunks: Vec<(&u32, &Vec<u8>)> =
                arrived.range((at, 0)..(at + 1, 0)).map(|((_, part), bytes)| (part, bytes)).collect();
            if chunks.is_empty() {
                continue;
            }
            let first = if *deleted { then + 1 } else { *then };
            let shape = fixture::shape(group, coordinate);
            let producer = (first..=*now).find(|producer| {
                let expected = fixture::content(key, group, coordinate, *producer, &shape);
                chunks.iter().all(|(part, bytes)| expected.get(**part as usize) == Some(*bytes))
            });
            let Some(producer) = producer else {
                return Err(format!("block {at}: no single producer from {first} to {now} put what arrived"));
            };
            state.word(producer - first);
        }
        Ok(())
    }
}

/// Reads of one store.
fn reads(seed: Seed, states: &States) -> Result<(), String> {
    let mut rng = seed.child("tiles").rng();
    let stage = open(seed)?;
    let (desk, others) = (Desk::new(&stage, "tiles"), Desk::new(&stage, "others"));
    let keys = desk.keys(0..BLOCKS);
    let puts = vec![(0, true); BLOCKS as usize];
    let mut scene =
        Scene { stage: &stage, desk, others, keys, puts, producers: 0, next_other: 0, kept: Vec::new() };
    scene.put(0..BLOCKS as usize);
    for number in 0..READS {
        let note = |what: String| format!("read {number}: {what}");
        let mut state = Mixer::new(seed.0);
        state.word(number);
        scene.read(&mut rng, &mut state).map_err(note)?;
        states.reach(state.value());
        scene.change(&mut rng).map_err(note)?;
    }
    Ok(())
}

/// Row R31.
pub(super) fn row() -> Row {
    Row {
        id: "R31",
        what: "reads in tiles while blocks go, come again and move; tiles that are kept and given again",
        counts: "reads",
        targets: [600, 60_000, 600_000],
        run: |ask, target| -> Tally { until(ask, target, reads) },
    }
}
