//! Several reads that are one: of each block they give bytes of one production, whatever happens between them.

use std::sync::Arc;

use kvarts_layout::{BlockKey, Coordinate, Group, Layout};
use kvarts_store::api::{
    DeleteRequest, KvStore, Order, Origins, Placed, ReadEnd, ReadRequest, ReadStream, Target,
};
use kvarts_store::engine::CompactOptions;
use kvarts_store::error::Reason;
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
    let request = kvarts_store::api::LendRequest {
        namespace: desk.namespace,
        group,
        coordinate,
        keys: keys.clone(),
        layers: Some(0..1),
        class: kvarts_store::rt::Class::Foreground,
        deadline: None,
    };
    let engine = stage.home().store();
    let lent = kvarts_store::rt::blocking::block_on(engine.lend(request)).unwrap();
    assert!(lent.origins().met().iter().all(Option::is_some));
    let target = Target::Keys { column: Some(pages()), keys: keys[..1].to_vec() };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(&stage, engine.delete(request)).unwrap();
    desk.store(pages(), &keys[..1], 2, Layout::LayerBlock);
    let read = desk.read_request(pages(), &keys);
    let stream = engine.read_part(read, lent.origins(), 0).unwrap();
    let end = kvarts_store::rt::blocking::block_on(std::future::poll_fn(|context| stream.poll_end(context)));
    let end = end.unwrap();
    assert_eq!(end.failures, [(0, Reason::NotHere(keys[0]))]);
}
