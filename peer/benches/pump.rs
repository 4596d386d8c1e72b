//! The lane beside a bare pump: the same bytes over loopback, with the same options of the socket, from memory to memory.
//!
//! `cargo bench -p kvarts-peer --bench pump`. Each round runs both, one after the other; ratios are of one round, and the median of
//! all rounds is told. The lane's pieces come from memory that no disk fills, so that both do the same but for the lane itself
//! and its digests, whose time alone is told apart.
#![allow(clippy::disallowed_methods, clippy::print_stdout, reason = "measures the machine, and says so")]

use std::io::{IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvarts_layout::identity::Arrangement;
use kvarts_layout::plan::Order;
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId, OriginId, StoreId,
};
use kvarts_peer::lane::{LaneClient, LaneServer, Member, Secret, ServeLimits, Served};
use kvarts_peer::path::{Path, Piece};
use kvarts_store::api::{Origins, Placed, ReadEnd, ReadEvent, ReadRequest, ReadStream, read_channel};
use kvarts_store::error::Reason;
use kvarts_store::io::{BufMut, SharedBuf};
use kvarts_store::rt::clock::{OsEntropy, SystemClock};

const TOTAL: usize = 4 << 30;
/// Memory on both sides: more than the processor's caches have.
const POOL: usize = 64 << 20;
const CHUNK: usize = 64 << 10;
const LAYERS: usize = 4;
const AHEAD: usize = 8;
const ROUNDS: usize = 5;

/// What a run took: bytes a second and processor seconds for each GiB.
#[derive(Clone, Copy)]
struct Took {
    rate: f64,
    cpu: f64,
}

fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn measure(bytes: usize, work: impl FnOnce()) -> Took {
    let (wall, before) = (Instant::now(), cpu());
    work();
    let gib = bytes as f64 / f64::from(1 << 30);
    Took { rate: bytes as f64 / wall.elapsed().as_secs_f64(), cpu: (cpu() - before) / gib }
}

fn options(stream: &TcpStream) {
    stream.set_nodelay(true).unwrap();
    rustix::net::sockopt::set_tcp_congestion(stream, "reno").unwrap();
}

/// One thread writes pieces, the other reads them into chunks.
fn pump(piece: usize) -> Took {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut from = listener.accept().unwrap().0;
    options(&to);
    options(&from);
    let (source, mut target) = (vec![1_u8; POOL], vec![1_u8; POOL]);
    measure(TOTAL, move || {
        let sender = std::thread::spawn(move || {
            for at in 0..TOTAL / piece {
                let start = at * piece % POOL;
                to.write_all(&source[start..start + piece]).unwrap();
            }
        });
        for at in 0..TOTAL / piece {
            let start = at * piece % POOL;
            let mut got = 0;
            while got < piece {
                let rest = &mut target[start + got..start + piece];
                let mut chunks: Vec<_> = rest.chunks_mut(CHUNK).take(64).map(IoSliceMut::new).collect();
                got += from.read_vectored(&mut chunks).unwrap();
            }
        }
        assert_eq!(from.read(&mut [0; 1]).unwrap(), 0);
        sender.join().unwrap();
    })
}

/// Blocks whose bytes are whatever their memory has: zeros, as nobody has written to it.
struct Zeros(Arc<BlockShape>);

impl Path for Zeros {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        let (Piece { request, origins, .. }, (sink, stream)) = (piece, read_channel());
        let digest = crc32fast::hash(&[0; CHUNK]);
        for block in 0..request.keys.len() as u32 {
            origins.admit(block as usize, OriginId([1; 16]));
            for part in 0..LAYERS as u32 {
                request.into.digests().unwrap().set(part, block, digest);
            }
        }
        let (usable_blocks, usable_layers) = (request.keys.len() as u32, LAYERS as u32);
        sink.send(ReadEvent::End(ReadEnd { usable_blocks, usable_layers, ..ReadEnd::default() }));
        Ok(stream)
    }
}

impl Served for Zeros {
    fn shape(&self, _: NamespaceId, _: Group, _: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        Ok(Arc::clone(&self.0))
    }
}

struct Lane {
    _server: LaneServer,
    client: Arc<LaneClient>,
    shape: Arc<BlockShape>,
    namespace: NamespaceId,
    memory: SharedBuf,
}

impl Lane {
    fn new() -> Self {
        let role = Role::Page { bytes: CHUNK as u64 };
        let part = PartGeometry { kind: Kind::new("kv").unwrap(), role, heads: 0, align: 1, group: Group(0) };
        let geometry = Geometry::new(&[part], &vec![vec![0]; LAYERS]).unwrap();
        let shape = Arc::new(geometry.shape(Group(0), Coordinate::Replicated, 16).unwrap());
        let member = |node| Member {
            cluster: "bench".to_owned(),
            node: StoreId([node; 16]),
            secret: Some(Secret([1; 32])),
            credentials: None,
            clock: SystemClock::new(),
            entropy: OsEntropy::new(),
            host: Arc::new(kvarts_peer::lane::Machine),
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let served = Arc::new(Zeros(Arc::clone(&shape)));
        let server = LaneServer::start(served, listener, member(1), ServeLimits::default()).unwrap();
        let client = LaneClient::connect(server.address(), StoreId([1; 16]), member(2)).unwrap();
        while !client.counts().connected {
            std::thread::sleep(Duration::from_millis(1));
        }
        let arrangement = Arrangement::new("bench", "canonical", "1");
        let identity = Identity::new("bench", "1", "bf16", arrangement, &geometry, 16);
        let namespace = client.open(&identity, &geometry).unwrap();
        let mut memory = BufMut::zeroed(POOL).unwrap();
        memory.fill(1);
        Self { _server: server, client, shape, namespace, memory: memory.share() }
    }

    fn run(&self, piece: usize) -> Took {
        let blocks = piece / (CHUNK * LAYERS);
        let keys: Vec<_> = (0..blocks).map(|block| BlockKey([block as u8; 32])).collect();
        let begin = |at: usize| {
            let memory = self.memory.slice(at * piece % POOL, piece).unwrap();
            let into = Placed::blocks(&self.shape, memory, blocks as u32).unwrap();
            let request =
                ReadRequest::new(self.namespace, Group(0), Coordinate::Replicated, keys.clone(), into);
            let request = ReadRequest { order: Order::Blocks, ..request };
            self.client.read(Piece { request, origins: Origins::any(blocks), first: 0 }).unwrap()
        };
        measure(TOTAL, || {
            let count = TOTAL / piece;
            let mut under_way: std::collections::VecDeque<_> = (0..AHEAD).map(begin).collect();
            for at in 0..count {
                let end = under_way.pop_front().unwrap().wait_end().unwrap();
                assert_eq!(end.usable_blocks as usize, blocks, "{end:?}");
                if at + AHEAD < count {
                    under_way.push_back(begin(at + AHEAD));
                }
            }
        })
    }
}

fn digests(memory: &SharedBuf) -> Took {
    measure(TOTAL, || {
        let sum = (0..TOTAL / CHUNK).fold(0, |sum, at| sum ^ memory.crc32(at * CHUNK % POOL, CHUNK));
        assert_eq!(std::hint::black_box(sum), sum);
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let lane = Lane::new();
    for piece in [1 << 20, 4 << 20] {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let (bare, run, digest) = (pump(piece), lane.run(piece), digests(&lane.memory));
            rounds.push((run.rate / bare.rate, (run.cpu - digest.cpu) / bare.cpu));
            println!(
                "piece {} KiB: pump {:.0} MiB/s {:.3} s/GiB, lane {:.0} MiB/s {:.3} s/GiB, of which digests {:.3}",
                piece >> 10,
                bare.rate / f64::from(1 << 20),
                bare.cpu,
                run.rate / f64::from(1 << 20),
                run.cpu,
                digest.cpu
            );
        }
        let ratio = median(rounds.iter().map(|round| round.0).collect());
        let cpu = median(rounds.iter().map(|round| round.1).collect());
        println!("{{\"piece_bytes\":{piece},\"peer_ratio\":{ratio:.2},\"cpu_ratio\":{cpu:.2}}}");
    }
}
