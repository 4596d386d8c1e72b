//! Tiles that came whole and are kept: given again while their blocks lie where they were read from, and never else.

use kvarts_contract::api::{
    Arrived, DeleteRequest, Digests, Order, Parent, Placed, PutRequest, ReadEvent, ReadRequest, Target,
    TileBytes, TiledRead, Verify,
};
use kvarts_contract::{
    buffers::{Region, SharedBuf},
    io_error::DirId,
};
use kvarts_layout::plan::Tile;
use kvarts_layout::{BlockKey, Layout};
use kvarts_store::engine::{CompactOptions, Options, StoreTiles, TileIdentity, TileRuns};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::sim::{SimWorld, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask, drive};
use kvarts_tests::witness::small;

const BLOCKS: u64 = 4;

type Reading = TiledRead<StoreTiles, Option<TileRuns>>;

fn open(budget_bytes: u64) -> SimStage {
    let options = Options { budget_bytes, ..small(1) };
    SimStage::open(&SimWorld::new(31, &WorldConfig::default()), &options).unwrap()
}

fn fill(desk: &Desk<'_>, producer: u64) {
    for n in 0..BLOCKS {
        desk.store(pages(), &desk.keys(n..n + 1), producer, Layout::LayerBlock);
    }
}

fn delete(stage: &SimStage, desk: &Desk<'_>, keys: Vec<BlockKey>) {
    let target = Target::Keys { column: Some(pages()), keys };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(stage, stage.store().delete(request)).unwrap();
}

fn begin(stage: &SimStage, desk: &Desk<'_>, order: Order, verify: Verify) -> Reading {
    let request = ReadRequest { order, verify, ..desk.read_request(pages(), &desk.keys(0..BLOCKS)) };
    let (request, _) = request.tiled(&fixture::shape(pages().0, pages().1));
    stage.engine().read_tiles(request).unwrap().with_whole_tiles()
}

/// A tile of all blocks, in memory.
struct Kept {
    tile: Tile,
    placed: Placed,
    identity: TileIdentity,
}

impl Kept {
    /// Reads everything in one tile.
    fn read(stage: &SimStage, desk: &Desk<'_>, order: Order) -> Option<Self> {
        let mut read = begin(stage, desk, order, Verify::Always).with_digests();
        let shape = std::sync::Arc::clone(read.shape());
        let tile = read.next_tile(u64::MAX)?;
        let len = tile.bytes(&shape) as usize;
        let memory = SharedBuf::new(&Region::anonymous(len).unwrap(), 0, len).unwrap();
        read.grant_by(tile, memory, |source, tile, placed| source.begin_known(tile, placed)).unwrap();
        while drive(stage.world(), read.next()).unwrap().unwrap().is_some() {}
        let whole = read.take_whole()?;
        let (tile, placed) = (whole.tile.clone(), whole.placed.clone());
        let identity = read.source().identity(&tile, whole.with.clone()?)?;
        let complete = |digests: &Digests| {
            let known = |part| (0..BLOCKS as u32).all(|block| digests.get(part, block).is_some());
            (0..shape.chunk_count()).all(known)
        };
        assert!(placed.digests().is_some_and(complete));
        Some(Self { tile, placed, identity })
    }

    /// Whether it is given to a read that begins now.
    fn is_given(&self, stage: &SimStage, desk: &Desk<'_>, order: Order) -> bool {
        begin(stage, desk, order, Verify::Always)
            .source()
            .recall(&self.tile, &self.identity)
            .unwrap()
            .is_some()
    }
}

fn world_of(stage: &SimStage) -> Desk<'_> {
    let desk = Desk::new(stage, "kept");
    fill(&desk, 1);
    desk
}

#[test]
fn a_tile_that_is_kept_is_given_as_it_was_read_with_all_that_is_told_of_a_read() {
    for order in [Order::Layers, Order::Blocks] {
        let stage = open(48 << 20);
        let desk = world_of(&stage);
        let kept = Kept::read(&stage, &desk, order).unwrap();
        let before = stage.engine().stats().counts.blocks_read;
        let mut read = begin(&stage, &desk, order, Verify::Always);
        assert!(read.accepts(&kept.tile));
        let stream = read.source().recall(&kept.tile, &kept.identity).unwrap().unwrap();
        let memory = kvarts_contract::api::TileMemory {
            tile: kept.tile.clone(),
            buf: SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, 4096).unwrap(),
            placed: kept.placed.clone(),
            with: None,
        };
        read.give(memory, stream);
        let (mut ranges, mut announced) = (0, 0);
        while let Some(arrived) = drive(stage.world(), read.next()).unwrap().unwrap() {
            match arrived {
                Arrived::Bytes(TileBytes { blocks, .. }) => ranges += blocks.len(),
                Arrived::Layer { blocks, .. } => announced += usize::from(u64::from(blocks) == BLOCKS),
                Arrived::Block(_) => announced += 1,
            }
        }
        let layers = read.shape().layers().len();
        let expected = if order == Order::Layers { (layers * BLOCKS as usize, layers) } else { (4, 4) };
        assert_eq!((ranges, announced), expected, "{order:?}");
        let end = read.end(None);
        assert_eq!((end.usable_blocks, end.usable_layers as usize, end.failures.len()), (4, layers, 0));
        assert!(read.next_tile(u64::MAX).is_none());
        assert_eq!(stage.engine().stats().counts.blocks_read, before + BLOCKS);
    }
}

#[test]
fn a_tile_with_a_block_that_was_deleted_or_put_anew_or_moved_is_not_given() {
    for order in [Order::Layers, Order::Blocks] {
        let stage = open(48 << 20);
        let desk = world_of(&stage);
        let kept = Kept::read(&stage, &desk, order).unwrap();
        assert!(kept.is_given(&stage, &desk, order));
        let other = if order == Order::Layers { Order::Blocks } else { Order::Layers };
        assert!(!kept.is_given(&stage, &desk, other), "its bytes lie in another order");
        let gone = desk.keys(2..3);
        delete(&stage, &desk, gone.clone());
        assert!(!kept.is_given(&stage, &desk, order), "deleted");
        assert!(Kept::read(&stage, &desk, order).is_none(), "a tile without a block is none to keep");
        desk.store(pages(), &gone, 2, Layout::LayerBlock);
        assert!(!kept.is_given(&stage, &desk, order), "put again");
        let kept = Kept::read(&stage, &desk, order).unwrap();
        assert!(kept.is_given(&stage, &desk, order));
        let options =
            CompactOptions { dead_thousandths: 0, merge_records_min: 2, ..CompactOptions::default() };
        let report = drive(stage.world(), stage.engine().compact(options)).unwrap().unwrap();
        assert!(report.blocks_moved > 0, "{report:?}");
        assert!(!kept.is_given(&stage, &desk, order), "moved");
        assert!(Kept::read(&stage, &desk, order).unwrap().is_given(&stage, &desk, order));
    }
}

/// Everything is deleted and put again in the same order, until segments are rewritten and blocks lie where they lay.
#[test]
fn a_tile_is_not_given_of_a_segment_that_was_written_anew_with_the_same_blocks_of_others() {
    let stage = open(768 << 10);
    let desk = world_of(&stage);
    let first = Kept::read(&stage, &desk, Order::Blocks).unwrap();
    for producer in 2..40 {
        delete(&stage, &desk, desk.keys(0..BLOCKS));
        fill(&desk, producer);
        assert!(!first.is_given(&stage, &desk, Order::Blocks), "producer {producer}");
    }
    assert!(Kept::read(&stage, &desk, Order::Blocks).unwrap().is_given(&stage, &desk, Order::Blocks));
}

#[test]
fn a_tile_with_a_block_that_was_evicted_or_whose_time_is_over_is_not_given() {
    let stage = open(768 << 10);
    let (desk, others) = (Desk::new(&stage, "kept"), Desk::new(&stage, "others"));
    fill(&desk, 1);
    let kept = Kept::read(&stage, &desk, Order::Layers).unwrap();
    for n in 0..200 {
        let request = others.request(pages(), &others.keys(n..n + 1), 1);
        others.outcomes(PutRequest { parent: Parent::Unknown, ..request });
    }
    let all = stage.store().read(desk.read_request(pages(), &desk.keys(0..BLOCKS))).unwrap();
    let end = drive(stage.world(), std::future::poll_fn(|context| all.poll_end(context))).unwrap().unwrap();
    assert!(!end.failures.is_empty(), "some were evicted");
    assert!(!kept.is_given(&stage, &desk, Order::Layers));

    let stage = open(48 << 20);
    let desk = Desk::new(&stage, "kept");
    let hour = std::time::Duration::from_secs(3600);
    let request = desk.request(pages(), &desk.keys(0..BLOCKS), 1);
    desk.outcomes(PutRequest { expires_after: Some(hour), ..request });
    let kept = Kept::read(&stage, &desk, Order::Layers).unwrap();
    assert!(kept.is_given(&stage, &desk, Order::Layers));
    assert!(stage.advance(hour * 2));
    assert!(!kept.is_given(&stage, &desk, Order::Layers));
}

#[test]
fn a_tile_is_given_to_no_other_namespace_and_to_no_part_of_a_read_that_met_another_production() {
    let stage = open(48 << 20);
    let desk = world_of(&stage);
    let kept = Kept::read(&stage, &desk, Order::Layers).unwrap();
    // The same keys of another model, as a client could name them.
    let other = Desk { stage: &stage, chain: desk.chain, namespace: Desk::new(&stage, "other").namespace };
    fill(&other, 1);
    assert!(!kept.is_given(&stage, &other, Order::Layers));
    // A read whose first layer was of the production before.
    let mut read = begin(&stage, &desk, Order::Layers, Verify::Always);
    let layer = read.shape().layers()[0].bytes() * BLOCKS;
    let tile = read.next_tile(layer).unwrap();
    assert_eq!(tile.layers, 0..1);
    let memory = SharedBuf::new(&Region::anonymous(layer as usize).unwrap(), 0, layer as usize).unwrap();
    read.grant(tile, memory, None).unwrap();
    while drive(stage.world(), read.next()).unwrap().unwrap().is_some() {}
    delete(&stage, &desk, desk.keys(0..BLOCKS));
    fill(&desk, 2);
    let new = Kept::read(&stage, &desk, Order::Layers).unwrap();
    assert!(new.is_given(&stage, &desk, Order::Layers));
    assert!(read.source().recall(&new.tile, &new.identity).unwrap().is_none());
}

#[test]
fn a_tile_that_was_not_verified_is_not_kept_and_damage_ends_it_once_it_is_found() {
    let stage = open(48 << 20);
    let desk = world_of(&stage);
    let mut read = begin(&stage, &desk, Order::Layers, Verify::Never);
    let tile = read.next_tile(u64::MAX).unwrap();
    let len = tile.bytes(read.shape()) as usize;
    let memory = SharedBuf::new(&Region::anonymous(len).unwrap(), 0, len).unwrap();
    read.grant_by(tile, memory, |source, tile, placed| source.begin_known(tile, placed)).unwrap();
    while drive(stage.world(), read.next()).unwrap().unwrap().is_some() {}
    assert!(read.take_whole().unwrap().with.is_none());
    let kept = Kept::read(&stage, &desk, Order::Layers).unwrap();
    let request = desk.read_request(pages(), &desk.keys(0..BLOCKS));
    let extent = &stage.engine().planned_extents(&request).unwrap()[0];
    let path = extent.path.clone();
    let spoil = |media: &mut kvarts_tests::sim::Media| {
        media.corrupt(DirId(0), &path, extent.offset + 9, |bytes| bytes[0] ^= 4, 1)
    };
    assert!(stage.world().disk().tamper(spoil), "{path}");
    assert!(kept.is_given(&stage, &desk, Order::Layers), "no read went there since");
    let stream = stage.store().read(desk.read_request(pages(), &desk.keys(0..BLOCKS))).unwrap();
    let ended = drive(stage.world(), async {
        loop {
            if let ReadEvent::End(end) = stream.next().await {
                break end;
            }
        }
    });
    assert!(!ended.unwrap().failures.is_empty());
    assert!(!kept.is_given(&stage, &desk, Order::Layers), "a block is out of service");
}
