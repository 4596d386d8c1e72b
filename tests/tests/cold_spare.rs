//! Blocks that another node is said to have are asked of the bucket if that node does not give them: a peer that dies costs time, and no
//! hit that the bucket has.
#![allow(clippy::disallowed_methods, reason = "real stores on real directories, real time")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::cold_blocks::world::{Setting, World};
use crate::cold_blocks::{content, key};
use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_cold::testing::{Kind, Op};
use kvarts_contract::api::{Order, ReadEnd, ReadEvent, ReadSink, ReadStream, read_channel};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, OriginId};
use kvarts_peer::path::{Path, Piece};
use kvarts_peer::read::{Copies, NodePaths, OWN};
use kvarts_store::engine::Store;

/// The path of the other node in these worlds: the own disks are the first.
const PEER: PathId = PathId(1);
/// Blocks that the peer is said to have.
const THERE: [u64; 3] = [1, 2, 4];

/// What another node does with what it is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Peer {
    /// It gives good bytes.
    Gives,
    /// No connection can be made.
    Away,
    /// The connection breaks each time.
    Breaks,
    /// It says that it has not got it.
    Missing,
    /// What it sent was altered.
    Altered,
    /// It gives another production, and breaks after its first piece.
    OtherThenBreaks,
    /// Nothing comes.
    Hangs,
}

struct Other {
    peer: Peer,
    asked: AtomicU64,
    /// Of pieces that nothing comes of.
    silent: Mutex<Vec<ReadSink>>,
}

impl Path for Other {
    fn read(&self, Piece { request, origins, first }: Piece) -> Result<ReadStream, Reason> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let (sink, stream) = read_channel();
        let origin = match self.peer {
            Peer::Gives => OriginId([9; 16]),
            Peer::Away => return Err(Reason::Busy("the peer is away")),
            Peer::Hangs => {
                self.silent.lock().unwrap().push(sink);
                return Ok(stream);
            }
            Peer::OtherThenBreaks if asked == 0 => OriginId([3; 16]),
            Peer::Breaks | Peer::OtherThenBreaks => {
                return Err(Reason::Passing("the connection broke".to_owned()));
            }
            Peer::Missing | Peer::Altered => {
                let reason = |place| match self.peer {
                    Peer::Missing => Reason::NotHere(request.keys[place as usize]),
                    _ => Reason::Digest { shard: 0, segment: 0, offset: 0, expected: 1, found: 2 },
                };
                // Something was written before it was found out.
                request.into.chunk(0, 0, 8).unwrap().copy_in(0, &[0xEE; 8]);
                let failures = (0..request.keys.len() as u32).map(|place| (place, reason(place))).collect();
                sink.send(ReadEvent::End(ReadEnd { failures, ..ReadEnd::default() }));
                return Ok(stream);
            }
        };
        let (blocks, layers) = (request.keys.len() as u32, request.layers.clone().unwrap());
        for (place, wanted) in (0u32..).zip(&request.keys) {
            assert!(origins.admit((first + place) as usize, origin));
            let block = THERE.into_iter().find(|block| key(*block) == *wanted).unwrap();
            let each = request.into.chunk(layers.start, place, 1 << 19).unwrap().len();
            let bytes = match self.peer {
                Peer::Gives => content(block, 4 * each as u64),
                _ => vec![0xEE; 4 * each],
            };
            for layer in layers.clone() {
                let chunk = request.into.chunk(layer, place, each as u64).unwrap();
                chunk.copy_in(0, &bytes[layer as usize * each..(layer as usize + 1) * each]);
            }
        }
        match request.order {
            Order::Layers => layers.clone().for_each(|layer| sink.send(ReadEvent::Layer { layer, blocks })),
            Order::Blocks => (0..blocks).for_each(|block| sink.send(ReadEvent::Block(block))),
        }
        let usable_layers = layers.len() as u32;
        sink.send(ReadEvent::End(ReadEnd { usable_blocks: blocks, usable_layers, ..ReadEnd::default() }));
        Ok(stream)
    }
}

fn world(peer: Peer, blocks: u64) -> World {
    let paths = move |store: &Store| {
        let paths = NodePaths::new(Arc::new(store.clone()));
        let (asked, silent) = Default::default();
        assert_eq!(paths.add("peer", Arc::new(Other { peer, asked, silent })), Some(PEER));
        paths
    };
    World::with("cold-spare", Setting { blocks, paths: Some(Box::new(paths)), ..Setting::default() })
}

/// Reads blocks of which the peer is said to have [`THERE`].
fn read(world: &World, blocks: &[u64], order: Order) -> (BTreeSet<u64>, ReadEnd) {
    let keys: Vec<BlockKey> = blocks.iter().map(|block| key(*block)).collect();
    let is_there = |wanted: &BlockKey| THERE.iter().any(|block| key(*block) == *wanted);
    let paths = |key| PathSet::default().with(if is_there(key) { PEER } else { OWN });
    let known = Copies::of(keys.iter().map(paths).collect());
    world.finish(blocks, order, world.begin_where(&keys, order, is_there, Some(known)))
}

const ALL: [u64; 6] = [0, 1, 2, 3, 4, 5];

#[test]
fn what_a_peer_gives_is_not_asked_of_the_bucket() {
    for order in [Order::Layers, Order::Blocks] {
        let world = world(Peer::Gives, 6);
        assert_eq!(read(&world, &ALL, order).0.len(), 6, "{order:?}");
        world.until("the restore has ended", || world.cold.counted().under_way == 0);
        let each = world.shape.block_bytes();
        assert_eq!((world.here(), world.count("restored_bytes")), (3, 3 * each));
        assert_eq!(world.count("not_from_nodes_blocks"), 0);
        assert_eq!((world.count("waited_reads"), world.count("over_read_bytes")), (1, 0));
    }
}

#[test]
fn what_a_peer_does_not_give_comes_from_the_bucket() {
    for peer in [Peer::Away, Peer::Breaks, Peer::Missing, Peer::Altered, Peer::Hangs] {
        for order in [Order::Layers, Order::Blocks] {
            let world = world(peer, 6);
            let (good, end) = read(&world, &ALL, order);
            assert_eq!(good.len(), 6, "{peer:?} {order:?}: {end:?}");
            assert_eq!(world.count("not_from_nodes_blocks"), 3, "{peer:?} {order:?}");
            world.until("the restores have ended", || world.cold.counted().under_way == 0);
            assert_eq!((world.here(), world.count("restored_blocks")), (6, 6), "each is brought once");
            assert_eq!((world.count("waited_reads"), world.count("lost_blocks")), (1, 0));
        }
    }
}

#[test]
fn a_read_of_which_peers_have_everything_and_give_nothing_comes_from_the_bucket() {
    let world = world(Peer::Away, 6);
    let (good, end) = read(&world, &[1, 2, 4], Order::Layers);
    assert_eq!(good.len(), 3, "{end:?}");
    assert_eq!((world.count("not_from_nodes_blocks"), world.count("waited_reads")), (3, 1));
}

#[test]
fn a_production_whose_peer_broke_off_is_read_as_the_buckets_one() {
    let world = world(Peer::OtherThenBreaks, 6);
    // By blocks, so that nothing of the first one was announced when its next piece fails.
    let (good, end) = read(&world, &ALL, Order::Blocks);
    assert_eq!(good.len(), 6, "{end:?}");
    assert_eq!(world.count("not_from_nodes_blocks"), 3);
}

#[test]
fn what_neither_a_peer_nor_the_bucket_gives_is_a_miss_and_the_read_ends() {
    for kind in [Kind::Missing, Kind::Altered, Kind::Denied] {
        for order in [Order::Layers, Order::Blocks] {
            let world = world(Peer::Missing, 6);
            let kinds = [vec![None], vec![Some(kind); 100]].concat();
            world.faulty.next(Op::Range, &kinds);
            let (good, end) = read(&world, &ALL, order);
            assert!(good.len() < 6 && !end.failures.is_empty(), "{kind:?} {order:?}: {good:?}");
        }
    }
    // A block of which the bucket knows nothing is asked for nowhere.
    let world = world(Peer::Missing, 2);
    let (good, end) = read(&world, &[0, 1, 2], Order::Blocks);
    assert_eq!((good.len(), end.failures.len()), (2, 1), "{end:?}");
    assert_eq!(world.count("not_from_nodes_blocks"), 1);
}
