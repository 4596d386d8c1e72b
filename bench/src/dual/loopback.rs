//! The lane beside a bare pump: the same bytes over loopback, with the same options of the socket, from memory to memory.
//!
//! The lane's pieces come from memory that no disk fills, so that both do the same but for the lane itself and its digests, whose
//! time alone is measured besides and taken off.

use std::collections::VecDeque;
use std::io::{IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvarts_contract::api::{Origins, Placed, ReadEnd, ReadEvent, ReadRequest, ReadStream, read_channel};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_contract::clock::{OsEntropy, SystemClock};
use kvarts_contract::error::Reason;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::plan::Order;
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId, OriginId, StoreId,
};
use kvarts_peer::lane::{LaneClient, LaneServer, Machine, Member, Secret, ServeLimits, Served};
use kvarts_peer::path::{Path, Piece};
use kvarts_terminal::Failure;

use super::{Bench, PATIENCE};
use crate::pairs::{Contestant, Sample, cpu_seconds, summary, take_turns};
use crate::report::Report;

/// Bytes of each run.
const TOTAL: usize = 2 << 30;
/// Memory on both sides: more than the processor's caches have.
const POOL: usize = 64 << 20;
const CHUNK: usize = 64 << 10;
const LAYERS: usize = 4;
/// Pieces under way.
const AHEAD: usize = 8;
/// Rounds at most: processor time settles soon.
const ROUNDS_MAX: u32 = 7;

/// Both lengths of pieces that reads have.
pub(super) fn measure(bench: &Bench<'_>, report: &mut Report) -> Result<(), Failure> {
    let lane = Lane::new()?;
    for (name, piece) in [("peer", 1 << 20), ("peer_large", 4 << 20)] {
        let contestants: Vec<Contestant<'_>> = vec![
            ("pump", Box::new(move || pump(piece))),
            ("lane", Box::new(|| lane.run(piece))),
            ("digests", Box::new(|| digests(&lane.memory))),
        ];
        let rounds = take_turns(bench.arguments.common.pairs.min(ROUNDS_MAX), contestants)?;
        report.median(&format!("{name}_ratio"), rounds.speed("lane", "pump"));
        let triples = rounds.of("pump").iter().zip(rounds.of("lane")).zip(rounds.of("digests"));
        let cpu = triples.map(|((pump, lane), digests)| (lane.cpu - digests.cpu) / pump.cpu);
        report.median(&format!("{name}_cpu_ratio"), summary(cpu.collect()));
        let gib = TOTAL as f64 / f64::from(1 << 30);
        report.median(&format!("{name}_cpu_s_per_gib"), rounds.figure("lane", |lane| lane.cpu / gib));
    }
    Ok(())
}

fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<Sample, Failure> {
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    work()?;
    Ok(Sample { seconds: begun.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first: 0.0 })
}

fn options(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    Ok(rustix::net::sockopt::set_tcp_congestion(stream, "reno")?)
}

/// One thread writes pieces, the other reads them into chunks.
fn pump(piece: usize) -> Result<Sample, Failure> {
    let (to, from) = connection().map_err(Failure::user)?;
    let (source, mut target) = (vec![1_u8; POOL], vec![1_u8; POOL]);
    timed(move || {
        let sender = std::thread::spawn(move || send(to, &source, piece));
        receive(from, &mut target, piece).map_err(Failure::user)?;
        let sent = sender.join().map_err(|_| Failure::user("the sending thread panicked"))?;
        sent.map_err(Failure::user)
    })
}

fn connection() -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let to = TcpStream::connect(listener.local_addr()?)?;
    let from = listener.accept()?.0;
    options(&to)?;
    options(&from)?;
    Ok((to, from))
}

fn send(mut to: TcpStream, source: &[u8], piece: usize) -> std::io::Result<()> {
    let mut starts = (0..TOTAL / piece).map(|at| at * piece % POOL);
    starts.try_for_each(|start| to.write_all(&source[start..start + piece]))
}

fn receive(mut from: TcpStream, target: &mut [u8], piece: usize) -> std::io::Result<()> {
    for start in (0..TOTAL / piece).map(|at| at * piece % POOL) {
        let mut got = 0;
        while got < piece {
            let rest = &mut target[start + got..start + piece];
            let mut chunks: Vec<_> = rest.chunks_mut(CHUNK).take(64).map(IoSliceMut::new).collect();
            match from.read_vectored(&mut chunks)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                some => got += some,
            }
        }
    }
    Ok(())
}

/// Blocks whose bytes are whatever their memory has: zeros, as nothing has been written to it.
struct Zeros(Arc<BlockShape>);

impl Path for Zeros {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        let (Piece { request, origins, .. }, (sink, stream)) = (piece, read_channel());
        let digest = crc32fast::hash(&[0; CHUNK]);
        for block in 0..request.keys.len() as u32 {
            origins.admit(block as usize, OriginId([1; 16]));
            let digests = request.into.digests().ok_or(Reason::OutOfBounds)?;
            (0..LAYERS as u32).for_each(|part| digests.set(part, block, digest));
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
    fn new() -> Result<Self, Failure> {
        let role = Role::Page { bytes: CHUNK as u64 };
        let kind = Kind::new("kv").ok_or_else(|| Failure::user("the name of the part is not valid"))?;
        let part = PartGeometry { kind, role, heads: 0, align: 1, group: Group(0) };
        let geometry = Geometry::new(&[part], &vec![vec![0]; LAYERS]).map_err(Failure::user)?;
        let shape = geometry.shape(Group(0), Coordinate::Replicated, 16).map_err(Failure::user)?;
        let shape = Arc::new(shape);
        let member = |node| Member {
            cluster: "bench".to_owned(),
            node: StoreId([node; 16]),
            secret: Some(Secret([1; 32])),
            credentials: None,
            clock: SystemClock::new(),
            entropy: OsEntropy::new(),
            host: Arc::new(Machine),
        };
        let listener = TcpListener::bind("127.0.0.1:0").map_err(Failure::user)?;
        let served = Arc::new(Zeros(Arc::clone(&shape)));
        let server = LaneServer::start(served, listener, member(1), ServeLimits::default());
        let server = server.map_err(Failure::user)?;
        let client = LaneClient::connect(server.address(), StoreId([1; 16]), member(2));
        let client = client.map_err(Failure::user)?;
        let begun = Instant::now();
        while !client.counts().connected {
            if begun.elapsed() > PATIENCE {
                return Err(Failure::user("the client could not connect over loopback"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let arrangement = Arrangement::new("bench", "canonical", "1");
        let identity = Identity::new("bench", "1", "bf16", arrangement, &geometry, 16);
        let namespace = client.open(&identity, &geometry).map_err(Failure::user)?;
        let mut memory = BufMut::zeroed(POOL).map_err(Failure::user)?;
        memory.fill(1);
        Ok(Self { _server: server, client, shape, namespace, memory: memory.share() })
    }

    fn run(&self, piece: usize) -> Result<Sample, Failure> {
        let blocks = piece / (CHUNK * LAYERS);
        let keys: Vec<_> = (0..blocks).map(|block| BlockKey([block as u8; 32])).collect();
        let begin = |at: usize| -> Result<ReadStream, Failure> {
            let memory = self.memory.slice(at * piece % POOL, piece);
            let memory =
                memory.ok_or_else(|| Failure::user("the memory of the benchmark is too small for a read"))?;
            let into = Placed::blocks(&self.shape, memory, blocks as u32).map_err(Failure::user)?;
            let request =
                ReadRequest::new(self.namespace, Group(0), Coordinate::Replicated, keys.clone(), into);
            let request = ReadRequest { order: Order::Blocks, ..request };
            let piece = Piece { request, origins: Origins::any(blocks), first: 0 };
            self.client.read(piece).map_err(Failure::user)
        };
        timed(|| {
            let count = TOTAL / piece;
            let mut under_way = (0..AHEAD).map(begin).collect::<Result<VecDeque<_>, _>>()?;
            let mut next = AHEAD;
            while let Some(stream) = under_way.pop_front() {
                let end = stream.wait_end().map_err(Failure::user)?;
                if end.usable_blocks as usize != blocks {
                    return Err(Failure::User(format!("a piece was not received: {end:?}")));
                }
                if next < count {
                    under_way.push_back(begin(next)?);
                    next += 1;
                }
            }
            Ok(())
        })
    }
}

/// The digests of as many bytes.
fn digests(memory: &SharedBuf) -> Result<Sample, Failure> {
    timed(|| {
        let sum = (0..TOTAL / CHUNK).fold(0, |sum, at| sum ^ memory.crc32(at * CHUNK % POOL, CHUNK));
        std::hint::black_box(sum);
        Ok(())
    })
}
