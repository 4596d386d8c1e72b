//! A lane between two ends of this process, over a socket: as a way to bytes it does what a store of its own does.
#![allow(clippy::disallowed_methods, reason = "waits for threads of its own")]

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvarts_contract::api::{
    KvStore, Origins, Placed, PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadSink, ReadStream, read_channel,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::BufMut;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::clock::{OsEntropy, SystemClock};
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::identity::{Arrangement, TenantSalt};
use kvarts_layout::plan::Order;
use kvarts_layout::spec::{Kind as Name, PartGeometry, Role};
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId, OriginId, StoreId,
};
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};

use super::*;
use crate::path::{Path, Piece};

pub(super) const SERVER: StoreId = StoreId(*b"the node served.");
const BLOCK_TOKENS: u32 = 16;

pub(super) fn member(node: StoreId) -> Member {
    let (clock, entropy) = (SystemClock::new(), OsEntropy::new());
    Member {
        cluster: "one".to_owned(),
        node,
        secret: Some(Secret([7; 32])),
        credentials: None,
        clock,
        entropy,
        host: Arc::new(super::host::Machine),
    }
}

/// Three layers of two chunks each, of `bytes` and of 64 bytes.
pub(super) fn geometry(bytes: u64) -> Geometry {
    let part = |kind: &str, bytes| PartGeometry {
        kind: Name::new(kind).unwrap(),
        role: Role::Page { bytes },
        heads: 0,
        align: 1,
        group: Group(0),
    };
    Geometry::new(&[part("k", bytes), part("v", 64)], &[vec![0, 1], vec![0, 1], vec![0, 1]]).unwrap()
}

pub(super) fn identity(geometry: &Geometry, salt: &[u8]) -> Identity {
    let arrangement = Arrangement::new("test", "canonical", "1");
    let mut identity = Identity::new("small", "1", "bf16", arrangement, geometry, BLOCK_TOKENS);
    identity.tenant_salt = TenantSalt(salt.to_vec());
    identity
}

pub(super) fn shape(geometry: &Geometry) -> Arc<BlockShape> {
    Arc::new(geometry.shape(Group(0), Coordinate::Replicated, BLOCK_TOKENS).unwrap())
}

pub(super) fn keys(range: Range<u8>) -> Vec<BlockKey> {
    range.map(|n| BlockKey([n; 32])).collect()
}

/// What a producer makes of a chunk.
pub(super) fn content(key: &BlockKey, part: u32, producer: u8, bytes: u64) -> Vec<u8> {
    let seed = u64::from(key.0[0]) * 1000 + u64::from(part) * 10 + u64::from(producer) + 1;
    (0..bytes).map(|at| (at.wrapping_mul(seed).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

pub(super) fn places(shape: &BlockShape, blocks: usize) -> Placed {
    let memory = BufMut::zeroed(shape.block_bytes() as usize * blocks).unwrap();
    Placed::blocks(shape, memory, blocks as u32).unwrap()
}

/// Every chunk that is announced is what the producer made.
pub(super) fn expect_content(
    shape: &BlockShape,
    request: &ReadRequest,
    block: u32,
    layers: Range<u32>,
    producer: u8,
) {
    let all: Vec<_> = shape.layers().iter().flat_map(|layer| &layer.chunks).collect();
    for part in kvarts_wire::local::parts(shape, &layers) {
        let bytes = all[part as usize].bytes;
        let found = request.into.chunk(part, block, bytes).unwrap().to_vec();
        let key = &request.keys[block as usize];
        assert!(found == content(key, part, producer, bytes), "part {part} of block {block}");
    }
}

pub(super) fn piece(request: ReadRequest, origins: &Arc<Origins>) -> Piece {
    Piece { request, origins: Arc::clone(origins), first: 0 }
}

pub(super) fn events(stream: &ReadStream) -> (Vec<ReadEvent>, ReadEnd) {
    let mut events = Vec::new();
    loop {
        match stream.next_blocking() {
            ReadEvent::End(end) => return (events, end),
            event => events.push(event),
        }
    }
}

pub(super) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let clock = SystemClock::new();
    while !done() {
        assert!(clock.now() < Nanos::default().plus(Duration::from_secs(300)), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A store in a directory of its own.
struct Stored {
    home: Option<Home>,
    path: std::path::PathBuf,
}

impl Stored {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("kvarts-lane-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let store = Options { budget_bytes: 64 << 20, segment_bytes: 4 << 20, ..Options::default() };
        let directories = vec![path.clone()];
        let runtime = RuntimeChoice::Threads;
        let options = HomeOptions { directories, runtime, store, ..HomeOptions::default() };
        Self { home: Some(Home::open(&options).unwrap()), path }
    }

    fn store(&self) -> &kvarts_store::engine::Store {
        self.home.as_ref().unwrap().store()
    }

    fn put(&self, geometry: &Geometry, salt: &[u8], keys: &[BlockKey], producer: u8) -> NamespaceId {
        let namespace = self.store().register(&identity(geometry, salt), geometry).unwrap();
        let (shape, from) = (shape(geometry), places(&shape(geometry), keys.len()));
        for (block, key) in (0u32..).zip(keys) {
            let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
            for (part, chunk) in (0u32..).zip(chunks) {
                let place = from.chunk(part, block, chunk.bytes).unwrap();
                place.copy_in(0, &content(key, part, producer, chunk.bytes));
            }
        }
        let put = PutRequest::new(namespace, Group(0), Coordinate::Replicated, keys.to_vec(), from);
        block_on(self.store().put(put)).unwrap().unwrap();
        namespace
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.home.take().unwrap().abandon();
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// A port at an address of this host that no other test has: clients of others, which try again and again, never find it.
pub(super) fn listener() -> TcpListener {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let [.., high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let process = std::process::id() as u8;
    TcpListener::bind((Ipv4Addr::new(127, process | 1, high, low), 0)).unwrap()
}

pub(super) fn serve(served: Arc<dyn Served>, limits: ServeLimits) -> LaneServer {
    LaneServer::start(served, listener(), member(SERVER), limits).unwrap()
}

pub(super) fn call(server: &LaneServer) -> Arc<LaneClient> {
    let client = LaneClient::connect(server.address(), SERVER, member(StoreId([1; 16]))).unwrap();
    wait_for("a connection", || client.counts().connected);
    client
}

pub(super) fn request(
    namespace: NamespaceId,
    shape: &BlockShape,
    keys: Vec<BlockKey>,
    order: Order,
) -> ReadRequest {
    let into = places(shape, keys.len());
    ReadRequest { order, ..ReadRequest::new(namespace, Group(0), Coordinate::Replicated, keys, into) }
}

#[test]
fn a_peer_s_blocks_come_with_the_events_the_bytes_and_the_failures_of_its_own_store() {
    let (geometry, stored) = (geometry(4096), Stored::new());
    let namespace = stored.put(&geometry, b"salt", &keys(0..20), 1);
    let server = serve(Arc::new(stored.store().clone()), ServeLimits::default());
    let client = call(&server);
    assert_eq!(client.open(&identity(&geometry, b"salt"), &geometry), Ok(namespace));
    assert_eq!(client.open(&identity(&geometry, b"salt"), &geometry), Ok(namespace), "as often as one likes");
    let shape = shape(&geometry);
    let wishes = [
        keys(0..20),
        keys(3..4),
        keys(15..25),
        [keys(0..2), keys(40..42), keys(5..8)].concat(),
        keys(50..53),
    ];
    for (wish, order, layers) in wishes.iter().flat_map(|wish| {
        let orders = [Order::Blocks, Order::Layers].into_iter();
        orders
            .flat_map(move |order| [None, Some(0..1), Some(1..3)].map(|layers| (wish.clone(), order, layers)))
    }) {
        let told = |path: &dyn Path| {
            let layers = layers.clone();
            let request = ReadRequest { layers, ..request(namespace, &shape, wish.clone(), order) };
            let origins = Origins::any(wish.len());
            let (events, end) = events(&path.read(piece(request.clone(), &origins)).unwrap());
            for event in &events {
                match event {
                    ReadEvent::Layer { layer, blocks } => (0..*blocks)
                        .for_each(|block| expect_content(&shape, &request, block, *layer..layer + 1, 1)),
                    ReadEvent::Block(block) => {
                        expect_content(&shape, &request, *block, request.layers.clone().unwrap_or(0..3), 1);
                    }
                    _ => panic!("{event:?}"),
                }
            }
            let leading = end.usable_blocks as usize;
            let met =
                origins.met().into_iter().take(if order == Order::Layers { leading } else { wish.len() });
            (events, end, met.collect::<Vec<_>>())
        };
        let (own, lane) = (told(stored.store()), told(&*client));
        if own.1.usable_blocks > 0 || order == Order::Blocks {
            assert_eq!(lane, own, "{wish:?} {order:?} {layers:?}");
        } else {
            assert_eq!((lane.1.usable_blocks, &lane.1.failures[0]), (0, &own.1.failures[0]));
        }
    }
    let counts = client.counts();
    assert_eq!((counts.connections, counts.pieces, counts.damaged), (1, 30, 0));
    wait_for("memory", || server.counts().memory == 0);
    server.stop();
}

#[test]
fn one_production_of_each_block_is_given_whichever_path_met_it_first() {
    let (geometry, one, other) = (geometry(4096), Stored::new(), Stored::new());
    let namespace = one.put(&geometry, b"", &keys(0..4), 1);
    other.put(&geometry, b"", &keys(2..6), 2);
    let shape = shape(&geometry);
    let servers =
        [&one, &other].map(|stored| serve(Arc::new(stored.store().clone()), ServeLimits::default()));
    let clients = servers.each_ref().map(call);
    let origins = Origins::any(6);
    let mut good = Vec::new();
    for (client, producer) in clients.iter().zip([1, 2]) {
        client.open(&identity(&geometry, b""), &geometry).unwrap();
        for layers in [0..1, 1..3] {
            let request = request(namespace, &shape, keys(0..6), Order::Blocks);
            let request = ReadRequest { layers: Some(layers.clone()), ..request };
            let (events, end) = events(&client.read(piece(request.clone(), &origins)).unwrap());
            for event in events {
                let ReadEvent::Block(block) = event else { panic!("{event:?}") };
                expect_content(&shape, &request, block, layers.clone(), producer);
                good.push((block, producer));
            }
            assert!(end.failures.iter().all(|(_, reason)| matches!(reason, Reason::NotHere(_))), "{end:?}");
        }
    }
    let halves = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2)].map(|block| vec![block; 2]).concat();
    good.sort_unstable();
    assert_eq!(good, halves);
}

#[test]
fn a_namespace_is_read_by_those_alone_who_know_all_of_its_identity() {
    let (geometry, stored) = (geometry(4096), Stored::new());
    let namespace = stored.put(&geometry, b"tenant", &keys(0..2), 1);
    let server = serve(Arc::new(stored.store().clone()), ServeLimits::default());
    let (client, shape) = (call(&server), shape(&geometry));
    let read = |namespace| {
        let request = request(namespace, &shape, keys(0..2), Order::Blocks);
        client.read(piece(request, &Origins::any(2))).map(|stream| events(&stream).1)
    };
    assert_eq!(read(namespace), Err(Reason::UnknownNamespace(namespace)), "its name alone is nothing");
    let other = client.open(&identity(&geometry, b"another"), &geometry).unwrap();
    let end = read(other).unwrap();
    let missing = keys(0..2).into_iter().map(Reason::NotHere);
    assert_eq!(end.failures, (0..).zip(missing).collect::<Vec<_>>());
    assert!(stored.store().shape(other, Group(0), Coordinate::Replicated).is_err(), "nothing was made of it");
    client.open(&identity(&geometry, b"tenant"), &geometry).unwrap();
    assert_eq!(read(namespace).unwrap().usable_blocks, 2);
}

#[test]
fn a_node_talks_only_to_those_of_its_cluster_its_secret_and_its_version_of_who_is_who() {
    let made = Made::new(4096);
    let server = serve(made.clone(), ServeLimits::default());
    let good = member(StoreId([1; 16]));
    let wrong = [
        (SERVER, Member { cluster: "two".to_owned(), ..good.clone() }),
        (SERVER, Member { secret: Some(Secret([8; 32])), ..good.clone() }),
        (SERVER, Member { secret: None, ..good.clone() }),
        (StoreId([9; 16]), good.clone()),
    ];
    for (peer, member) in wrong {
        let client = LaneClient::connect(server.address(), peer, member).unwrap();
        wait_for("a refusal", || client.counts().attempts > 1);
        assert_eq!((client.counts().connections, server.counts().let_in), (0, 0));
    }
    let bare = Member { secret: None, ..member(SERVER) };
    let open = LaneServer::start(made, listener(), bare, ServeLimits::default()).unwrap();
    let stays = LaneClient::connect(open.address(), SERVER, good.clone()).unwrap();
    wait_for("a refusal", || stays.counts().attempts > 1);
    let client = LaneClient::connect(open.address(), SERVER, Member { secret: None, ..good }).unwrap();
    wait_for("a connection", || client.counts().connected);
    assert_eq!(open.counts().let_in, 1);
}

#[test]
fn a_peer_that_went_away_is_found_again_and_until_then_reads_are_refused_at_once() {
    let made = Made::new(4096);
    let server = serve(made.clone(), ServeLimits::default());
    let (client, address) = (call(&server), server.address());
    let namespace = client.open(&made.identity(), &made.geometry).unwrap();
    let read = || {
        let request = request(namespace, &made.shape, keys(0..3), Order::Layers);
        client.read(piece(request, &Origins::any(3)))
    };
    assert_eq!(events(&read().unwrap()).1.usable_blocks, 3);
    made.holds.store(true, Ordering::SeqCst);
    let under_way = read().unwrap();
    wait_for("a read", || made.reads.load(Ordering::SeqCst) == 2);
    server.stop();
    let (_, end) = events(&under_way);
    assert!(end.failures.iter().all(|(_, reason)| reason.kind() == Kind::Retry) && end.failures.len() == 3);
    wait_for("the end", || !client.counts().connected);
    assert_eq!(read().unwrap_err().kind(), Kind::Retry);
    made.holds.store(false, Ordering::SeqCst);
    let mut listener = None;
    wait_for("the port", || {
        listener = TcpListener::bind(address).ok();
        listener.is_some()
    });
    let _server =
        LaneServer::start(made.clone(), listener.unwrap(), member(SERVER), ServeLimits::default()).unwrap();
    wait_for("a connection", || client.counts().connected);
    assert_eq!(events(&read().unwrap()).1.usable_blocks, 3);
}

/// Blocks that are made when they are asked for; the digests of `lies` are others.
pub(super) struct Made {
    pub(super) geometry: Geometry,
    pub(super) shape: Arc<BlockShape>,
    pub(super) lies: Mutex<BTreeSet<BlockKey>>,
    /// Reads begin and do not end until they are dropped.
    pub(super) holds: AtomicBool,
    held: Mutex<Vec<(Placed, ReadSink)>>,
    pub(super) reads: AtomicU64,
    verified: AtomicU64,
}

impl Made {
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        let geometry = geometry(bytes);
        let shape = shape(&geometry);
        let (lies, holds, held) = (Mutex::default(), AtomicBool::new(false), Mutex::default());
        let (reads, verified) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { geometry, shape, lies, holds, held, reads, verified })
    }

    pub(super) fn identity(&self) -> Identity {
        identity(&self.geometry, b"salt")
    }

    /// Ends the held reads for which no reader waits any more; gives how many there were.
    pub(super) fn end_given_up(&self) -> usize {
        let mut held = self.held.lock().unwrap();
        let before = held.len();
        held.retain(|(_, sink)| !sink.is_cancelled());
        before - held.len()
    }
}

impl Path for Made {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        let (Piece { request, origins, .. }, (sink, stream)) = (piece, read_channel());
        self.reads.fetch_add(1, Ordering::SeqCst);
        if request.verify == kvarts_contract::api::Verify::Always {
            self.verified.fetch_add(request.keys.len() as u64, Ordering::SeqCst);
        }
        if self.holds.load(Ordering::SeqCst) {
            self.held.lock().unwrap().push((request.into, sink));
            return Ok(stream);
        }
        let layers = request.layers.clone().unwrap();
        let all: Vec<_> = self.shape.layers().iter().flat_map(|layer| &layer.chunks).collect();
        for (block, key) in (0u32..).zip(&request.keys) {
            assert!(origins.admit(block as usize, OriginId([1; 16])));
            for part in kvarts_wire::local::parts(&self.shape, &layers) {
                let bytes = content(key, part, 1, all[part as usize].bytes);
                request.into.chunk(part, block, bytes.len() as u64).unwrap().copy_in(0, &bytes);
                let lie = self.lies.lock().unwrap().contains(key) && part == 4;
                if let Some(digests) = request.into.digests() {
                    digests.set(part, block, crc32fast::hash(&bytes) ^ u32::from(lie));
                }
            }
        }
        let (usable_blocks, usable_layers) = (request.keys.len() as u32, layers.len() as u32);
        sink.send(ReadEvent::End(ReadEnd { usable_blocks, usable_layers, ..ReadEnd::default() }));
        Ok(stream)
    }
}

impl Served for Made {
    fn shape(&self, _: NamespaceId, _: Group, _: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        Ok(Arc::clone(&self.shape))
    }
}

#[test]
fn what_does_not_match_its_digest_is_not_announced_and_the_peer_reads_it_again() {
    let made = Made::new(4096);
    let server = serve(made.clone(), ServeLimits::default());
    let client = call(&server);
    let namespace = client.open(&made.identity(), &made.geometry).unwrap();
    made.lies.lock().unwrap().extend(keys(2..3));
    let read = |order| {
        let request = request(namespace, &made.shape, keys(0..4), order);
        events(&client.read(piece(request, &Origins::any(4))).unwrap())
    };
    let (told, end) = read(Order::Blocks);
    assert_eq!(told, [0, 1, 3].map(ReadEvent::Block));
    assert!(matches!(end.failures[..], [(2, Reason::Digest { .. })]) && end.usable_blocks == 2, "{end:?}");
    let (told, end) = read(Order::Layers);
    let layer = |(layer, blocks)| ReadEvent::Layer { layer, blocks };
    // The part that is wrong is of the last layer.
    assert_eq!(told, [(0, 4), (1, 4), (2, 2)].map(layer));
    assert_eq!((end.usable_blocks, end.usable_layers, end.failures.len()), (2, 3, 1));
    wait_for("another look", || made.verified.load(Ordering::SeqCst) == 2);
    assert_eq!((client.counts().damaged, server.counts().doubts), (2, 2));
}

#[test]
fn a_stream_that_is_dropped_cancels_the_piece_on_both_sides_and_lets_go_of_its_memory() {
    let made = Made::new(4096);
    made.holds.store(true, Ordering::SeqCst);
    let server = serve(made.clone(), ServeLimits::default());
    let client = call(&server);
    let namespace = client.open(&made.identity(), &made.geometry).unwrap();
    let request = request(namespace, &made.shape, keys(0..4), Order::Layers);
    let keeper: Arc<dyn std::any::Any + Send + Sync> = Arc::new(());
    let request = ReadRequest { into: request.into.clone().kept_by(&keeper), ..request };
    let stream = client.read(piece(request, &Origins::any(4))).unwrap();
    wait_for("a read", || made.reads.load(Ordering::SeqCst) == 1);
    assert!(server.counts().memory > 0 && Arc::strong_count(&keeper) > 1);
    drop(stream);
    wait_for("the peer's end", || made.end_given_up() == 1);
    wait_for("memory", || server.counts().memory == 0 && Arc::strong_count(&keeper) == 1);
}

#[test]
fn a_piece_ends_at_its_deadline_with_nothing_held_whatever_its_peer_does() {
    let made = Made::new(4096);
    made.holds.store(true, Ordering::SeqCst);
    let server = serve(made.clone(), ServeLimits::default());
    let client = call(&server);
    let namespace = client.open(&made.identity(), &made.geometry).unwrap();
    let keeper: Arc<dyn std::any::Any + Send + Sync> = Arc::new(());
    for order in [Order::Blocks, Order::Layers] {
        let request = request(namespace, &made.shape, keys(0..4), order);
        let into = request.into.clone().kept_by(&keeper);
        let deadline = Some(client.now().plus(Duration::from_millis(50)));
        let stream = client.read(piece(ReadRequest { into, deadline, ..request }, &Origins::any(4))).unwrap();
        let (told, end) = events(&stream);
        assert!(told.is_empty() && end.held_bytes == 0, "{told:?} {end:?}");
        assert!(end.failures.iter().all(|(_, reason)| reason.kind() == Kind::Deadline));
        assert_eq!(end.usable_layers, if order == Order::Layers { 0 } else { 3 });
        wait_for("memory", || Arc::strong_count(&keeper) == 1);
    }
    assert!(client.counts().connected, "the connection goes on");
    made.holds.store(false, Ordering::SeqCst);
    let request = request(namespace, &made.shape, keys(0..4), Order::Blocks);
    assert_eq!(events(&client.read(piece(request, &Origins::any(4))).unwrap()).1.usable_blocks, 4);
}

#[test]
fn peers_share_a_server_fairly_and_its_memory_stays_within_its_bounds() {
    let made = Made::new(256 << 10);
    // Room for five pieces.
    let limits = ServeLimits { memory: 16 << 20, ..ServeLimits::default() };
    let server = serve(made.clone(), limits);
    let clients: Vec<_> = (0..3).map(|_| call(&server)).collect();
    let mut under_way = Vec::new();
    for client in std::iter::repeat_n(&clients, 24).flatten() {
        let namespace = client.open(&made.identity(), &made.geometry).unwrap();
        let request = request(namespace, &made.shape, keys(0..4), Order::Layers);
        under_way.push((client, client.read(piece(request, &Origins::any(4))).unwrap()));
    }
    let mut left = [24_i32; 3];
    let mut most_apart = 0;
    wait_for("all of them", || {
        assert!(server.counts().memory <= 16 << 20);
        under_way.retain(|(client, stream)| {
            let mut ended = false;
            while let Some(event) = stream.try_next() {
                ended |= matches!(event, ReadEvent::End(_));
            }
            let at = clients.iter().position(|one| Arc::ptr_eq(one, client)).unwrap();
            left[at] -= i32::from(ended);
            !ended
        });
        if left.iter().all(|left| *left > 0) {
            most_apart = most_apart.max(left.iter().max().unwrap() - left.iter().min().unwrap());
        }
        under_way.is_empty()
    });
    assert!(most_apart < 20, "one was left behind by {most_apart} of 24 pieces");
    wait_for("memory", || server.counts().memory == 0);
    assert_eq!(server.counts().pieces, 72);
}
