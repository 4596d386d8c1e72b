//! A read of tiles over a source from which blocks are missing: what is told, in which order, and how it ends.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use kvarts_layout::{ChunkShape, LayerShape};

use super::*;
use crate::api::read_channel;
use crate::blocking::block_on;
use crate::buffers::Region;

/// What a reader was told, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Told {
    Range { layer: u32, blocks: Range<u32>, offset: u64 },
    Layer(u32, u32),
    Block(u32),
}

/// A source from which some blocks are missing.
struct Lacking {
    missing: BTreeSet<u32>,
    order: Order,
    /// It has them at the second try.
    mends: bool,
}

impl TileSource for Lacking {
    fn begin(&self, tile: &Tile, into: Placed) -> Result<ReadStream, Reason> {
        assert_eq!(into.block_count(), tile.block_count());
        let (sink, stream) = read_channel();
        let blocks = tile.block_count();
        let is_missing = |block: &u32| self.missing.contains(&(tile.blocks.start + block));
        let failures: Vec<_> =
            (0..blocks).filter(is_missing).map(|block| (block, Reason::OutOfBounds)).collect();
        let usable_blocks = failures.first().map_or(blocks, |failure| failure.0);
        match self.order {
            Order::Layers => {
                for layer in tile.layers.clone() {
                    sink.send(ReadEvent::Layer { layer, blocks: usable_blocks });
                }
            }
            Order::Blocks => {
                let here = (0..blocks).filter(|block| !is_missing(block));
                here.for_each(|block| sink.send(ReadEvent::Block(block)));
            }
        }
        let usable_layers = tile.layer_count();
        sink.send(ReadEvent::End(ReadEnd { usable_blocks, usable_layers, failures, held_bytes: 0 }));
        Ok(stream)
    }

    fn instead(&self, short: &ShortTile<'_>) -> Option<Instead> {
        let (tile, told, order) = (short.tile.clone(), short.told, self.order);
        let goes_on = move |_, _| {
            let (sink, stream) = read_channel();
            let (usable_blocks, usable_layers) = (tile.block_count(), tile.layer_count());
            match order {
                Order::Layers => (tile.layers.start + told..tile.layers.end)
                    .for_each(|layer| sink.send(ReadEvent::Layer { layer, blocks: usable_blocks })),
                Order::Blocks => (told..usable_blocks).for_each(|block| sink.send(ReadEvent::Block(block))),
            }
            sink.send(ReadEvent::End(ReadEnd { usable_blocks, usable_layers, ..ReadEnd::default() }));
            stream
        };
        self.mends.then(|| Box::new(goes_on) as Instead)
    }
}

const LAYERS: [u64; 3] = [10, 4, 20];

/// How a read of five blocks went.
struct Went {
    told: Vec<Told>,
    end: ReadEnd,
    /// Tiles that were begun before their turn.
    begun_ahead: usize,
    /// The deadline did not pass.
    whole: bool,
    /// The most bytes that the reader had given at a time.
    most_bytes: u64,
}

/// Memory that says when it goes.
struct Given(Rc<Cell<u64>>, u64);

impl Drop for Given {
    fn drop(&mut self) {
        self.0.set(self.0.get() - self.1);
    }
}

fn shape() -> Arc<BlockShape> {
    let layer =
        |(layer, &bytes): (u32, &u64)| LayerShape { layer, chunks: vec![ChunkShape { bytes, align: 1 }] };
    Arc::new(BlockShape::new((0..).zip(&LAYERS).map(layer).collect()).unwrap())
}

fn read(order: Order, missing: &[u32], budget: u64, ahead: usize) -> Went {
    let went = read_until(order, missing, budget, ahead, usize::MAX);
    assert!(went.whole);
    went
}

/// The same where the deadline passes after `until` tiles.
fn read_until(order: Order, missing: &[u32], budget: u64, ahead: usize, until: usize) -> Went {
    let lacking = Lacking { missing: missing.iter().copied().collect(), order, mends: false };
    read_of(lacking, budget, ahead, until)
}

fn read_of(lacking: Lacking, budget: u64, ahead: usize, until: usize) -> Went {
    let (shape, given, order) = (shape(), Rc::new(Cell::new(0)), lacking.order);
    let mut read = TiledRead::new(lacking, Arc::clone(&shape), order, 0..3, 5);
    let (mut told, mut begun, mut begun_ahead, mut most_bytes) = (Vec::new(), 0, 0, 0);
    let mut grant = |read: &mut TiledRead<Lacking, Given>, tile: Tile| {
        let bytes = tile.bytes(&shape);
        let buf = SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, bytes as usize).unwrap();
        given.set(given.get() + bytes);
        most_bytes = most_bytes.max(given.get());
        read.grant(tile, buf, Given(Rc::clone(&given), bytes)).unwrap();
    };
    let early = loop {
        if read.under_way() == 0 {
            let Some(tile) = read.next_tile(budget) else { break None };
            begun += 1;
            if begun > until {
                break Some(Reason::DeadlinePassed);
            }
            grant(&mut read, tile);
        }
        while read.under_way() <= ahead {
            let Some(tile) = read.next_tile(budget) else { break };
            begun_ahead += 1;
            grant(&mut read, tile);
        }
        while let Some(arrived) = block_on(read.next()).unwrap() {
            told.push(match arrived {
                Arrived::Bytes(TileBytes { memory, layer, blocks, offset }) => {
                    let Tile { blocks: all, layers } = &memory.tile;
                    // In block order a range is of all layers of the tile.
                    let layer = if order == Order::Layers { layer } else { layers.start };
                    Told::Range { layer, blocks: all.start + blocks.start..all.start + blocks.end, offset }
                }
                Arrived::Layer { layer, blocks } => Told::Layer(layer, blocks),
                Arrived::Block(block) => Told::Block(block),
            });
        }
    };
    let (end, whole) = (read.end(early.as_ref()), early.is_none());
    drop(read);
    assert_eq!(given.get(), 0, "all memory is back");
    Went { told, end, begun_ahead, whole, most_bytes }
}

#[test]
fn what_is_told_does_not_depend_on_what_was_fetched_ahead() {
    for order in [Order::Blocks, Order::Layers] {
        for missing in [&[][..], &[0], &[3], &[1, 4], &[0, 1, 2, 3, 4]] {
            for budget in [1, 9, 15, 34, 70, 1000] {
                let alone = read(order, missing, budget, 0);
                assert_eq!(alone.begun_ahead, 0);
                assert!(alone.most_bytes <= budget.max(20), "{} of {budget}", alone.most_bytes);
                for ahead in 1..4 {
                    let went = read(order, missing, budget, ahead);
                    let case = format!("{order:?} {missing:?} {budget} {ahead}");
                    assert_eq!((&alone.told, &alone.end), (&went.told, &went.end), "{case}");
                    let few = budget == 1000 || alone.told.len() < 10;
                    assert!(went.begun_ahead > 0 || few, "nothing was fetched ahead");
                    assert!(went.most_bytes <= (ahead as u64 + 1) * budget.max(20), "{case}");
                }
            }
        }
    }
}

#[test]
fn what_a_source_has_at_the_second_try_is_told_once_and_in_order() {
    // Which layers and blocks are ready, and the bytes of each.
    let ready = |went: &Went| {
        let is_range = |told: &&Told| matches!(told, Told::Range { .. });
        let rest: Vec<Told> = went.told.iter().filter(|told| !is_range(told)).cloned().collect();
        let ranges = went.told.iter().filter_map(|told| match told {
            Told::Range { layer, blocks, .. } => Some(blocks.clone().map(|block| (*layer, block))),
            _ => None,
        });
        let mut ranges: Vec<(u32, u32)> = ranges.flatten().collect();
        ranges.sort_unstable();
        (rest, ranges)
    };
    for order in [Order::Blocks, Order::Layers] {
        for missing in [&[0][..], &[3], &[4], &[1, 4], &[0, 1, 2, 3, 4]] {
            for (budget, ahead) in [1, 9, 15, 34, 70, 1000].into_iter().flat_map(|it| [(it, 0), (it, 2)]) {
                let lacking = Lacking { missing: missing.iter().copied().collect(), order, mends: true };
                let went = read_of(lacking, budget, ahead, usize::MAX);
                let whole = read(order, &[], budget, ahead);
                let case = format!("{order:?} {missing:?} {budget} {ahead}");
                assert_eq!((ready(&went), &went.end), (ready(&whole), &whole.end), "{case}");
            }
        }
    }
}

#[test]
fn a_read_that_is_late_calls_nothing_good_that_was_not_announced() {
    let mut late = 0;
    for (missing, budget) in
        [&[][..], &[0], &[3], &[1, 4]].iter().flat_map(|m| [1, 15, 34, 70].map(|b| (m, b)))
    {
        for until in 0..16 {
            let Went { told, end, whole, .. } = read_until(Order::Blocks, missing, budget, 0, until);
            late += usize::from(!whole);
            let ready: Vec<u32> = told
                .iter()
                .filter_map(|one| if let Told::Block(at) = one { Some(*at) } else { None })
                .collect();
            let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
            for block in 0..5 {
                assert!(ready.contains(&block) != failed.contains(&block), "{block}: {ready:?} {end:?}");
            }
            let leading = (0..).zip(&ready).take_while(|(at, block)| at == *block).count();
            assert_eq!(end.usable_blocks as usize, leading, "{ready:?} {end:?}");
            let Went { told, end, whole, .. } = read_until(Order::Layers, missing, budget, 0, until);
            late += usize::from(!whole);
            let ready: Vec<u32> = told
                .iter()
                .filter_map(|one| if let Told::Layer(_, good) = one { Some(*good) } else { None })
                .collect();
            let layers = end.usable_layers as usize;
            assert!(end.usable_blocks == 0 || layers <= ready.len(), "{ready:?} {end:?}");
            assert!(ready.iter().take(layers).all(|good| *good >= end.usable_blocks), "{ready:?} {end:?}");
        }
    }
    assert!(late > 100, "{late}");
}

#[test]
fn each_good_block_and_each_layer_is_announced_once_and_after_its_bytes() {
    for missing in [&[][..], &[0], &[3], &[1, 4]] {
        let good = missing.first().copied().unwrap_or(5);
        for budget in [1, 9, 15, 34, 70, 1000] {
            let Went { told, end, .. } = read(Order::Blocks, missing, budget, 2);
            let ready: Vec<u32> = told
                .iter()
                .filter_map(|one| if let Told::Block(block) = one { Some(*block) } else { None })
                .collect();
            let expected: Vec<u32> = (0..5).filter(|block| !missing.contains(block)).collect();
            assert_eq!((ready, end.usable_blocks), (expected, good), "{missing:?} {budget}");
            let Went { told, end, .. } = read(Order::Layers, missing, budget, 2);
            let ready: Vec<(u32, u32)> = told
                .iter()
                .filter_map(
                    |one| if let Told::Layer(layer, good) = one { Some((*layer, *good)) } else { None },
                )
                .collect();
            let all = if good == 0 { 1 } else { 3 };
            let expected: Vec<(u32, u32)> = (0..all).map(|layer| (layer, good)).collect();
            assert!(ready == expected || budget == 1000 || budget == 70, "{ready:?} {missing:?} {budget}");
            assert_eq!((ready.last().unwrap().1, end.usable_blocks), (good, good));
            // Of each layer the bytes of all good blocks came before it was announced.
            let mut come = BTreeSet::new();
            for one in told {
                match one {
                    Told::Range { layer, blocks, .. } => come.extend(blocks.map(|block| (layer, block))),
                    Told::Layer(layer, good) => {
                        assert!((0..good).all(|block| come.contains(&(layer, block))), "{layer} {budget}");
                    }
                    Told::Block(_) => {}
                }
            }
        }
    }
}
