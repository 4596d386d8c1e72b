//! A read whose tiles come one after the other, and several reads that are one: of each block they give bytes of one
//! production, whatever happens between them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_contract::api::{
    Arrived, DeleteRequest, KvStore, Order, Origins, Placed, ReadEnd, ReadRequest, ReadStream, Target,
    TileBytes, TiledRead,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, Coordinate, Group, Layout};
use kvarts_store::engine::{CompactOptions, StoreTiles};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture::{self, Style};
use kvarts_tests::sim::{SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask, drive};
use kvarts_tests::witness::small;

const BLOCKS: u64 = 6;

fn open(seed: u64) -> SimStage {
    SimStage::open(&SimWorld::new(seed, &WorldConfig::default()), &small(2)).unwrap()
}

fn fill(desk: &Desk<'_>, producer: u64) {
    for n in 0..BLOCKS {
        desk.store(pages(), &desk.keys(n..n + 1), producer, Layout::LayerBlock);
    }
}

fn delete(stage: &SimStage, desk: &Desk<'_>, keys: Vec<BlockKey>) {
    let target = Target::Keys { column: Some(pages()), keys };
    ask(stage, stage.store().delete(DeleteRequest { namespace: desk.namespace, target, deadline: None }))
        .unwrap();
}

fn ended(stage: &SimStage, stream: &ReadStream) -> ReadEnd {
    drive(stage.world(), std::future::poll_fn(|context| stream.poll_end(context))).unwrap().unwrap()
}

/// Reads one layer of all blocks into memory of the whole.
fn layer(stage: &SimStage, desk: &Desk<'_>, into: &Placed, layer: u32, origins: &Arc<Origins>) -> ReadEnd {
    let request = ReadRequest {
        layers: Some(layer..layer + 1),
        into: into.clone(),
        ..desk.read_request(pages(), &desk.keys(0..BLOCKS))
    };
    let stream = stage.engine().read_part(request, origins, 0).unwrap();
    ended(stage, &stream)
}

fn memory((group, coordinate): (Group, Coordinate)) -> Placed {
    fixture::place(&fixture::shape(group, coordinate), BLOCKS as u32, Style::Layers, 0).unwrap()
}

/// A read of all blocks, tile by tile, and what has arrived of each chunk (block, part).
struct Tiled<'a> {
    stage: &'a SimStage,
    read: TiledRead<StoreTiles>,
    order: Order,
    arrived: BTreeMap<(u32, u32), Vec<u8>>,
    announced: Vec<u32>,
}

impl<'a> Tiled<'a> {
    fn begin(stage: &'a SimStage, desk: &Desk<'_>, order: Order) -> Self {
        let request = ReadRequest { order, ..desk.read_request(pages(), &desk.keys(0..BLOCKS)) };
        let (request, _) = request.tiled(&fixture::shape(pages().0, pages().1));
        let read = stage.engine().read_tiles(request).unwrap();
        Self { stage, read, order, arrived: BTreeMap::new(), announced: Vec::new() }
    }

    /// Reads the next tile of at most `bytes` bytes; false at the end.
    fn tile(&mut self, bytes: u64) -> bool {
        let shape = Arc::clone(self.read.shape());
        let Some(tile) = self.read.next_tile(bytes) else { return false };
        let len = tile.bytes(&shape) as usize;
        let memory = SharedBuf::new(&Region::anonymous(len).unwrap(), 0, len).unwrap();
        self.read.grant(tile, memory, ()).unwrap();
        while let Some(arrived) = drive(self.stage.world(), self.read.next()).unwrap().unwrap() {
            match arrived {
                Arrived::Bytes(TileBytes { memory, layer, blocks, .. }) => {
                    let first = memory.tile.blocks.start;
                    for chunk in memory.tile.chunks(self.order, &shape, layer, blocks) {
                        let bytes = memory.placed.chunk(chunk.part, chunk.block, chunk.bytes).unwrap();
                        self.arrived.insert((first + chunk.block, chunk.part), bytes.to_vec());
                    }
                }
                Arrived::Layer { blocks, .. } => self.announced.push(blocks),
                Arrived::Block(block) => self.announced.push(block),
            }
        }
        true
    }

    /// What has arrived of a block.
    fn block(&self, block: u32) -> Vec<Vec<u8>> {
        self.arrived.range((block, 0)..(block + 1, 0)).map(|(_, bytes)| bytes.clone()).collect()
    }
}

#[test]
fn a_block_that_was_put_anew_between_two_tiles_of_a_read_is_missed_and_never_mixed() {
    for order in [Order::Layers, Order::Blocks] {
        let stage = open(11);
        let desk = Desk::new(&stage, "tiles");
        fill(&desk, 1);
        let mut tiled = Tiled::begin(&stage, &desk, order);
        // A tile is one layer of one block, or of all of them.
        let (block_bytes, layers) = (tiled.read.shape().block_bytes(), tiled.read.shape().layers().len());
        let layer_bytes = tiled.read.shape().layers()[0].bytes();
        assert!(layers > 1 && block_bytes > layer_bytes);
        let bytes = if order == Order::Layers { layer_bytes * BLOCKS } else { layer_bytes };
        assert!(tiled.tile(bytes));
        let gone = desk.keys(0..2);
        delete(&stage, &desk, gone.clone());
        for key in &gone {
            desk.store(pages(), &[*key], 2, Layout::LayerBlock);
        }
        while tiled.tile(bytes) {}
        let end = tiled.read.end(None);
        match order {
            Order::Layers => {
                let missed = [(0, Reason::NotHere(gone[0])), (1, Reason::NotHere(gone[1]))];
                assert_eq!((end.usable_blocks, &end.failures[..]), (0, &missed[..]));
                assert_eq!(tiled.announced.first(), Some(&(BLOCKS as u32)));
            }
            Order::Blocks => {
                // Of the first a layer had come before it was put again; the second is read as it is now.
                assert_eq!(end.failures, [(0, Reason::NotHere(gone[0]))]);
                assert_eq!(tiled.announced, (1..BLOCKS as u32).collect::<Vec<_>>());
                for block in 1..BLOCKS as u32 {
                    let producer = if block == 1 { 2 } else { 1 };
                    assert_eq!(tiled.block(block), expected(&desk, block, producer), "block {block}");
                }
            }
        }
    }
}

#[test]
fn a_read_whose_reader_takes_its_time_goes_on_where_compaction_has_moved_its_blocks() {
    let stage = open(12);
    let desk = Desk::new(&stage, "slow");
    fill(&desk, 1);
    let mut tiled = Tiled::begin(&stage, &desk, Order::Layers);
    let bytes = tiled.read.shape().layers()[0].bytes() * BLOCKS;
    assert!(tiled.tile(bytes));
    desk.store(pages(), &desk.keys(20..24), 1, Layout::LayerBlock);
    delete(&stage, &desk, desk.keys(20..24));
    let options = CompactOptions { dead_thousandths: 0, merge_records_min: 2, ..CompactOptions::default() };
    let report = drive(stage.world(), stage.engine().compact(options)).unwrap().unwrap();
    assert!(report.blocks_moved > 0, "{report:?}");
    while tiled.tile(bytes) {}
    assert_eq!((tiled.read.end(None).usable_blocks, tiled.read.end(None).failures.len()), (BLOCKS as u32, 0));
    for block in 0..BLOCKS as u32 {
        assert_eq!(tiled.block(block), expected(&desk, block, 1), "block {block}");
    }
}

/// The bytes of the blocks as one producer put them.
fn expected(desk: &Desk<'_>, block: u32, producer: u64) -> Vec<Vec<u8>> {
    let (group, coordinate) = pages();
    let key = &desk.keys(u64::from(block)..u64::from(block) + 1)[0];
    fixture::content(key, group, coordinate, producer, &fixture::shape(group, coordinate))
}

#[test]
fn a_block_that_was_put_anew_between_two_parts_of_a_read_is_missed_and_never_mixed() {
    let stage = open(1);
    let desk = Desk::new(&stage, "parts");
    fill(&desk, 1);
    let (group, coordinate) = pages();
    let shape = fixture::shape(group, coordinate);
    let layers = shape.layers().len() as u32;
    let (origins, into) = (Origins::any(BLOCKS as usize), memory(pages()));
    let first = layer(&stage, &desk, &into, 0, &origins);
    assert_eq!((first.usable_blocks, first.failures.len()), (BLOCKS as u32, 0));
    let gone = desk.keys(2..4);
    delete(&stage, &desk, gone.clone());
    for key in &gone {
        desk.store(pages(), &[*key], 2, Layout::LayerBlock);
    }
    for at in 1..layers {
        let end = layer(&stage, &desk, &into, at, &origins);
        let missed: Vec<_> =
            gone.iter().zip(2..).map(|(key, block)| (block, Reason::NotHere(*key))).collect();
        assert_eq!((end.usable_blocks, end.failures), (2, missed), "layer {at}");
    }
    for block in [0, 1, 4, 5] {
        assert_eq!(fixture::read_block(&into, block, &shape), expected(&desk, block, 1), "block {block}");
    }
    // A read that begins now has all of what is here now.
    let (origins, into) = (Origins::any(BLOCKS as usize), memory(pages()));
    for at in 0..layers {
        assert_eq!(layer(&stage, &desk, &into, at, &origins).usable_blocks, BLOCKS as u32);
    }
    for block in 0..BLOCKS as u32 {
        let producer = if (2..4).contains(&block) { 2 } else { 1 };
        assert_eq!(
            fixture::read_block(&into, block, &shape),
            expected(&desk, block, producer),
            "block {block}"
        );
    }
}

#[test]
fn a_block_that_compaction_moved_between_two_parts_is_the_same_production() {
    let stage = open(2);
    let desk = Desk::new(&stage, "moved");
    fill(&desk, 1);
    let (group, coordinate) = pages();
    let shape = fixture::shape(group, coordinate);
    let (origins, into) = (Origins::any(BLOCKS as usize), memory(pages()));
    assert_eq!(layer(&stage, &desk, &into, 0, &origins).usable_blocks, BLOCKS as u32);
    // Neighbours go, and what is left is moved together.
    desk.store(pages(), &desk.keys(20..24), 1, Layout::LayerBlock);
    delete(&stage, &desk, desk.keys(20..24));
    let options = CompactOptions { dead_thousandths: 0, merge_records_min: 2, ..CompactOptions::default() };
    let report = drive(stage.world(), stage.engine().compact(options)).unwrap().unwrap();
    assert!(report.blocks_moved > 0, "{report:?}");
    for at in 1..shape.layers().len() as u32 {
        assert_eq!(layer(&stage, &desk, &into, at, &origins).usable_blocks, BLOCKS as u32);
    }
    for block in 0..BLOCKS as u32 {
        assert_eq!(fixture::read_block(&into, block, &shape), expected(&desk, block, 1), "block {block}");
    }
}

/// Two parts at once: one of them copies what the other loads, and knows as well whose it is.
#[test]
fn a_part_that_follows_another_reads_load_gives_one_production_only() {
    for seed in 0..8 {
        let stage = open(seed);
        let desk = Desk::new(&stage, "following");
        fill(&desk, 1);
        let keys = desk.keys(0..BLOCKS);
        let (old, into) = (Origins::any(BLOCKS as usize), memory(pages()));
        assert_eq!(layer(&stage, &desk, &into, 0, &old).usable_blocks, BLOCKS as u32);
        delete(&stage, &desk, keys.clone());
        fill(&desk, 2);
        let request = |into: &Placed| ReadRequest {
            order: Order::Layers,
            into: into.clone(),
            ..desk.read_request(pages(), &keys)
        };
        let (leading, following) = (memory(pages()), memory(pages()));
        let leader = stage.store().read(request(&leading)).unwrap();
        let follower = stage.engine().read_part(request(&following), &old, 0).unwrap();
        let end = ended(&stage, &leader);
        assert_eq!(end.usable_blocks, BLOCKS as u32);
        let end = ended(&stage, &follower);
        assert_eq!((end.usable_blocks, end.failures.len()), (0, BLOCKS as usize), "seed {seed}");
    }
}

#[test]
fn what_is_lent_says_whose_it_is_and_a_read_of_the_rest_is_of_the_same() {
    // On real files: the simulated disk has none to lend.
    let options = kvarts_store::home::HomeOptions { store: small(2), ..Default::default() };
    let stage = kvarts_tests::stage::HomeStage::open("origins-lent", &options).unwrap();
    let desk = Desk::new(&stage, "lent");
    fill(&desk, 1);
    let keys = desk.keys(0..BLOCKS);
    let (group, coordinate) = pages();
    let request = kvarts_store::lend::LendRequest {
        namespace: desk.namespace,
        group,
        coordinate,
        keys: keys.clone(),
        layers: Some(0..1),
        class: kvarts_contract::class::Class::Foreground,
        deadline: None,
    };
    let engine = stage.home().store();
    let lent = kvarts_contract::blocking::block_on(engine.lend(request)).unwrap();
    assert!(lent.origins().met().iter().all(Option::is_some));
    let target = Target::Keys { column: Some(pages()), keys: keys[..1].to_vec() };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(&stage, engine.delete(request)).unwrap();
    desk.store(pages(), &keys[..1], 2, Layout::LayerBlock);
    let read = desk.read_request(pages(), &keys);
    let stream = engine.read_part(read, lent.origins(), 0).unwrap();
    let end = kvarts_contract::blocking::block_on(std::future::poll_fn(|context| stream.poll_end(context)));
    let end = end.unwrap();
    assert_eq!(end.failures, [(0, Reason::NotHere(keys[0]))]);
}
