//! Two stores as two paths.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{
    Arrived, BlockOutcome, DeleteRequest, KvStore, Order, Origins, Placed, PutRequest, ReadEvent,
    ReadRequest, Target, TiledRead, TiledRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::clock::{OsEntropy, SystemClock};
use kvarts_contract::{class::Class, clock::Clock};
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_store::engine::{Options, Store};
use kvarts_store::io::scratch::Scratch;
use kvarts_store::io::{Features, Io, IoChoice, open_io};
use kvarts_store::rt::threads::{MakeIo, ThreadLauncher};
use tokio::runtime::Runtime;

use super::harness::origin;
use crate::read::{Copies, MultiRead, MultiTiles, NodePaths, OWN, OnTokio, Runner, read};

const TOKENS: u32 = 16;
const BLOCKS: u32 = 32;
const LAYERS: u32 = 6;
/// Of each of the two parts of a layer: 32 KiB.
const CHUNK: u64 = 2048 * TOKENS as u64;
const PEER: PathId = PathId(1);

fn geometry() -> Geometry {
    let part = |kind: &str| PartGeometry {
        kind: Kind::new(kind).unwrap(),
        role: Role::Stream { bytes: 2048, tokens: 1 },
        heads: 0,
        align: 1,
        group: Group(0),
    };
    Geometry::new(&[part("k"), part("v")], &vec![vec![0, 1]; LAYERS as usize]).unwrap()
}

fn identity() -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("two"),
        revision: text("1"),
        tokenizer: text("tok-1"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("theta=500000"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("canonical"), version: text("1") },
        block_tokens: TOKENS,
        spec_fingerprint: geometry().fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

fn keys() -> Vec<BlockKey> {
    (0..BLOCKS).map(|block| BlockKey([block as u8 + 1; 32])).collect()
}

/// The byte that all of a chunk consists of.
fn byte(production: u8, block: u32, part: u32) -> u8 {
    (u32::from(production) * 101 + block * 7 + part) as u8
}

fn memory(shape: &BlockShape) -> Placed {
    let bytes = (CHUNK * 2) as usize * BLOCKS as usize;
    let buf = || SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
    Placed::layers(shape, (0..LAYERS).map(|_| buf()).collect(), BLOCKS).unwrap()
}

fn each(into: &Placed, block: u32, mut look: impl FnMut(u32, SharedBuf)) {
    (0..LAYERS * 2).for_each(|part| look(part, into.chunk(part, block, CHUNK).unwrap()));
}

/// Which production a block is of, all of it.
fn production_of(into: &Placed, block: u32) -> u8 {
    let found: Vec<u8> = (1..=2)
        .filter(|production| {
            let mut is_all = true;
            each(into, block, |part, chunk| {
                is_all &= chunk.to_vec().iter().all(|it| *it == byte(*production, block, part));
            });
            is_all
        })
        .collect();
    assert_eq!(found.len(), 1, "block {block} is a mix");
    found[0]
}

struct Two {
    _scratch: [Scratch; 2],
    stores: [Store; 2],
    clock: Arc<dyn Clock>,
    runtime: Runtime,
    runner: Arc<dyn Runner>,
    nodes: Arc<NodePaths>,
    namespace: NamespaceId,
    shape: Arc<BlockShape>,
}

impl Two {
    fn open() -> Self {
        let scratch = [Scratch::new(), Scratch::new()];
        let clock = SystemClock::new();
        let store = |scratch: &Scratch| {
            let directory = vec![scratch.path().to_owned()];
            kvarts_store::home::make(&directory[0]).unwrap();
            let make: MakeIo = Arc::new(move |_| {
                let io = open_io(IoChoice::Pool, &directory, &Features::default());
                let io: Rc<RefCell<dyn Io>> = Rc::new(RefCell::new(io.map_err(|error| error.to_string())?));
                Ok(io)
            });
            let launcher = ThreadLauncher::new(Arc::clone(&clock) as _, OsEntropy::new(), make);
            let options = Options { segment_bytes: 16 << 20, budget_bytes: 256 << 20, ..Options::default() };
            block_on(Store::open(&launcher, &options)).unwrap().0
        };
        let stores = [store(&scratch[0]), store(&scratch[1])];
        let namespaces = stores.each_ref().map(|store| store.register(&identity(), &geometry()).unwrap());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let clock: Arc<dyn Clock> = clock;
        let runner: Arc<dyn Runner> = Arc::new(OnTokio::new(Arc::clone(&clock), runtime.handle().clone()));
        let nodes = NodePaths::new(Arc::new(stores[0].clone()));
        assert_eq!(nodes.add("peer", Arc::new(stores[1].clone())), Some(PEER));
        let shape = Arc::new(geometry().shape(Group(0), Coordinate::Replicated, TOKENS).unwrap());
        let [namespace, _] = namespaces;
        Self { _scratch: scratch, stores, clock, runtime, runner, nodes, namespace, shape }
    }

    /// Puts one production of all blocks into a store.
    fn put(&self, store: usize, production: u8) {
        let from = memory(&self.shape);
        (0..BLOCKS).for_each(|block| {
            each(&from, block, |part, chunk| chunk.fill(byte(production, block, part)));
        });
        let mut request = PutRequest::new(self.namespace, Group(0), Coordinate::Replicated, keys(), from);
        request.origins = Some(vec![origin(production); BLOCKS as usize]);
        let reply = block_on(self.stores[store].put(request)).unwrap().unwrap();
        assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{reply:?}");
    }

    fn delete(&self, store: usize, keys: Vec<BlockKey>) {
        let target = Target::Keys { column: Some((Group(0), Coordinate::Replicated)), keys };
        let request = DeleteRequest { namespace: self.namespace, target, deadline: None };
        block_on(self.stores[store].delete(request)).unwrap().unwrap();
    }

    fn copies() -> Arc<Copies> {
        Copies::of(vec![PathSet::default().with(OWN).with(PEER); BLOCKS as usize])
    }

    fn begin(&self, order: Order) -> (kvarts_contract::api::ReadStream, Placed) {
        let into = memory(&self.shape);
        let mut request = ReadRequest::new(self.namespace, Group(0), Coordinate::Replicated, keys(), into);
        request.order = order;
        let shape = Arc::clone(&self.shape);
        let (request, into) = request.tiled(&shape);
        let what = MultiRead {
            request,
            into: into.clone(),
            shape,
            origins: Origins::any(BLOCKS as usize),
            copies: Self::copies(),
            first: 0,
            is_alone: true,
        };
        (read(what, &self.nodes, &self.runner).unwrap(), into)
    }

    /// Reads everything: how many blocks are of each production.
    fn expect_whole(&self, order: Order) -> [usize; 2] {
        let (stream, into) = self.begin(order);
        let mut told = 0;
        let end = loop {
            match stream.next_blocking() {
                ReadEvent::End(end) => break end,
                ReadEvent::Layer { layer, blocks } => {
                    assert_eq!((layer, blocks), (told, BLOCKS));
                    told += 1;
                }
                ReadEvent::Block(block) => {
                    assert_eq!(block, told);
                    told += 1;
                }
                ReadEvent::Released => panic!("nothing was held"),
            }
        };
        assert_eq!((end.usable_blocks, end.usable_layers, end.failures), (BLOCKS, LAYERS, Vec::new()));
        assert_eq!(told, if order == Order::Layers { LAYERS } else { BLOCKS });
        let mut found = [0, 0];
        (0..BLOCKS).for_each(|block| found[usize::from(production_of(&into, block)) - 1] += 1);
        found
    }

    fn brought(&self) -> Vec<u64> {
        self.nodes.status(self.clock.now()).iter().map(|path| path.brought.pieces).collect()
    }
}

const ORDERS: [Order; 2] = [Order::Layers, Order::Blocks];

#[test]
fn two_stores_give_one_read_each_a_part_of_it() {
    let two = Two::open();
    (0..2).for_each(|store| two.put(store, 1));
    // Where a store gets no time of the machine the other one may bring all of a read.
    let both = (0..100).any(|n| {
        assert_eq!(two.expect_whole(ORDERS[n % 2]), [BLOCKS as usize, 0]);
        n > 0 && two.brought().iter().all(|pieces| *pieces > 0)
    });
    assert!(both, "{:?}", two.brought());
}

#[test]
fn blocks_that_were_produced_twice_are_each_of_one_production() {
    let two = Two::open();
    (0..2).for_each(|store| two.put(store, store as u8 + 1));
    for order in ORDERS {
        assert_eq!(two.expect_whole(order).iter().sum::<usize>(), BLOCKS as usize);
    }
    assert!(two.nodes.status(two.clock.now()).iter().all(|path| path.brought.failed == 0));
}

#[test]
fn what_one_store_does_not_have_any_more_comes_from_the_other() {
    let two = Two::open();
    (0..2).for_each(|store| two.put(store, 1));
    for (store, some) in [(0, 3..9), (1, 20..32)] {
        two.delete(store, keys()[some].to_vec());
    }
    for order in ORDERS {
        assert_eq!(two.expect_whole(order), [BLOCKS as usize, 0]);
    }
}

#[test]
fn a_read_goes_on_when_the_own_store_closes_under_it() {
    let two = Two::open();
    (0..2).for_each(|store| two.put(store, 1));
    let (stream, into) = two.begin(Order::Layers);
    block_on(two.stores[0].close()).unwrap();
    let end = stream.wait_blocking();
    assert_eq!((end.usable_blocks, end.usable_layers, end.failures), (BLOCKS, LAYERS, Vec::new()));
    (0..BLOCKS).for_each(|block| assert_eq!(production_of(&into, block), 1));
    assert_eq!(two.expect_whole(Order::Blocks), [BLOCKS as usize, 0]);
}

#[test]
fn many_reads_at_once_share_the_paths() {
    let two = Two::open();
    (0..2).for_each(|store| two.put(store, 1));
    let reads: Vec<_> = (0..24).map(|n| two.begin(ORDERS[n % 2])).collect();
    for (stream, into) in reads {
        let end = stream.wait_blocking();
        assert_eq!((end.usable_blocks, end.failures), (BLOCKS, Vec::new()));
        (0..BLOCKS).step_by(5).for_each(|block| assert_eq!(production_of(&into, block), 1));
    }
    let left = |status: &crate::read::PathStatus| (status.outstanding, status.reads) == (0, 0);
    // A read has ended before it has left its paths.
    while !two.nodes.status(two.clock.now()).iter().all(left) {
        std::thread::yield_now();
    }
    drop(two.runtime);
}

#[test]
fn the_tiles_of_a_read_come_from_both_stores_and_are_of_one_production() {
    let two = Two::open();
    (0..2).for_each(|store| two.put(store, store as u8 + 1));
    for order in ORDERS {
        let request = TiledRequest {
            namespace: two.namespace,
            group: Group(0),
            coordinate: Coordinate::Replicated,
            keys: keys(),
            layers: 0..LAYERS,
            order,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        };
        let known = (Origins::any(BLOCKS as usize), Two::copies());
        let tiles = MultiTiles::new(request, Arc::clone(&two.shape), known, &two.nodes, &two.runner);
        let mut tiled = TiledRead::<_, ()>::new(tiles, Arc::clone(&two.shape), order, 0..LAYERS, BLOCKS);
        let mut productions = BTreeMap::<u32, Vec<u8>>::new();
        while let Some(tile) = tiled.next_tile(3 << 20) {
            let bytes = tile.bytes(&two.shape) as usize;
            let memory = SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
            tiled.grant(tile, memory, ()).unwrap();
            while let Some(arrived) = block_on(tiled.next()).unwrap() {
                let Arrived::Bytes(bytes) = arrived else { continue };
                let tile = &bytes.memory.tile;
                for chunk in tile.chunks(order, &two.shape, bytes.layer, bytes.blocks.clone()) {
                    let found =
                        bytes.memory.placed.chunk(chunk.part, chunk.block, chunk.bytes).unwrap().to_vec();
                    let block = tile.blocks.start + chunk.block;
                    let of = (1..=2).find(|it| found.iter().all(|b| *b == byte(*it, block, chunk.part)));
                    productions.entry(block).or_default().push(of.expect("one of the two"));
                }
            }
        }
        let end = tiled.end(None);
        assert_eq!((end.usable_blocks, end.failures), (BLOCKS, Vec::new()));
        for (block, of) in productions {
            assert_eq!(of.len(), LAYERS as usize * 2);
            assert!(of.iter().all(|it| *it == of[0]), "block {block} is a mix: {of:?}");
        }
    }
}
