//! What the directory costs: a look-up of many blocks over many nodes, and everything that a node has told to one that joins.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use kvarts_cluster::partition::Tag;
use kvarts_contract::api::{KvStore, Placed, PutRequest};
use kvarts_contract::buffers::BufMut;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::spec::{Kind, PartGeometry, Role};
use kvarts_layout::{BlockKey, Coordinate, Geometry, Group, Identity};
use kvarts_terminal::Failure;

use super::Bench;
use super::stage::{BLOCK_TOKENS, Model, chain_keys};
use crate::report::Report;
use crate::setup;

/// Blocks of one look-up.
const KEYS: u64 = 4096;
/// Nodes of that look-up.
const NODES: usize = 8;
/// How often each is done.
const TURNS: usize = 300;
/// Blocks of one put, and bytes of each.
const AT_ONCE: u64 = 1024;
const BLOCK_BYTES: u64 = 512;
/// How long everything may take to be told.
const PATIENCE: Duration = Duration::from_secs(300);

/// Both.
pub(super) fn measure(bench: &Bench<'_>, directory: &Path, report: &mut Report) -> Result<(), Failure> {
    look_up(bench, &directory.join("nodes"), report)?;
    announce(bench, &directory.join("announced"), report)
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn look_up(bench: &Bench<'_>, directory: &Path, report: &mut Report) -> Result<(), Failure> {
    let names: Vec<String> = (0..NODES).map(|n| format!("n{n}")).collect();
    let names: Vec<(&str, Option<u64>)> = names.iter().map(|name| (&**name, None)).collect();
    let eight = bench.nodes(directory, &names)?;
    let Model { ref namespace, group, coordinate, .. } = eight.model;
    let keys = chain_keys(9, KEYS);
    let tags: Vec<Tag> = keys.iter().map(|key| Tag::of(namespace, group, coordinate, key)).collect();
    let reader = eight.reader();
    let ask = || bench.runtime.block_on(reader.locate(&tags, Duration::from_secs(1)));
    let begun = Instant::now();
    while !ask().unasked.is_empty() {
        if begun.elapsed() > PATIENCE {
            return Err(Failure::user("the nodes cannot connect to each other"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut bare = Bare::new().map_err(Failure::user)?;
    let (mut asked, mut trips) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        let begun = Instant::now();
        let located = ask();
        asked.push(begun.elapsed().as_secs_f64());
        if !located.unasked.is_empty() {
            return Err(Failure::user("a node did not respond to a look-up"));
        }
        let begun = Instant::now();
        bare.trip().map_err(Failure::user)?;
        trips.push(begun.elapsed().as_secs_f64());
    }
    let (asked, trip) = (median(asked), median(trips));
    report.number("lookup_p50_us", asked * 1e6);
    report.number("bare_trip_p50_us", trip * 1e6);
    report.number("lookup_round_trips", asked / trip);
    Ok(())
}

/// Connections to as many threads as there are other nodes, each of which answers with as many bytes as a look-up has there.
struct Bare(Vec<TcpStream>);

const ASKED: usize = KEYS as usize / NODES * 16;
const ANSWERED: usize = KEYS as usize / NODES;

impl Bare {
    fn new() -> std::io::Result<Self> {
        let mut streams = Vec::new();
        for _ in 1..NODES {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let stream = TcpStream::connect(listener.local_addr()?)?;
            let mut other = listener.accept()?.0;
            stream.set_nodelay(true)?;
            other.set_nodelay(true)?;
            std::thread::spawn(move || {
                let mut bytes = vec![0; ASKED];
                while other.read_exact(&mut bytes).is_ok() && other.write_all(&bytes[..ANSWERED]).is_ok() {}
            });
            streams.push(stream);
        }
        Ok(Self(streams))
    }

    /// Asks all, then hears all.
    fn trip(&mut self) -> std::io::Result<()> {
        let bytes = vec![0; ASKED];
        let mut answer = vec![0; ANSWERED];
        self.0.iter_mut().try_for_each(|stream| stream.write_all(&bytes))?;
        self.0.iter_mut().try_for_each(|stream| stream.read_exact(&mut answer))
    }
}

/// A model of tiny blocks.
fn tiny() -> Result<(Identity, Geometry), Failure> {
    let kind = Kind::new("k").ok_or_else(|| Failure::user("the name of the part is not valid"))?;
    let role = Role::Page { bytes: BLOCK_BYTES };
    let part = PartGeometry { kind, role, heads: 0, align: 1, group: Group(0) };
    let geometry = Geometry::new(&[part], &[vec![0]]).map_err(Failure::user)?;
    let arrangement = Arrangement::new("bench", "canonical", "1");
    Ok((Identity::new("tiny", "bench", "bf16", arrangement, &geometry, BLOCK_TOKENS), geometry))
}

fn announce(bench: &Bench<'_>, directory: &Path, report: &mut Report) -> Result<(), Failure> {
    let (a, b) = (bench.home(&directory.join("a"))?, bench.home(&directory.join("b"))?);
    let announce = bench.arguments.announce;
    let (identity, geometry) = tiny()?;
    let namespace = a.store().register(&identity, &geometry).map_err(Failure::user)?;
    let shape = geometry.shape(Group(0), Coordinate::default(), BLOCK_TOKENS).map_err(Failure::user)?;
    let memory = BufMut::zeroed((AT_ONCE * shape.block_bytes()) as usize).map_err(Failure::user)?.share();
    for from in (0..announce).step_by(AT_ONCE as usize) {
        let to = (from + AT_ONCE).min(announce);
        let key = |n: u64| BlockKey(*blake3::hash(&n.to_le_bytes()).as_bytes());
        let keys: Vec<BlockKey> = (from..to).map(key).collect();
        let bytes = memory.slice(0, ((to - from) * shape.block_bytes()) as usize);
        let bytes =
            bytes.ok_or_else(|| Failure::user("the memory of the benchmark is too small for a put"))?;
        let from = Placed::blocks(&shape, bytes, keys.len() as u32).map_err(Failure::user)?;
        let put = PutRequest::new(namespace, Group(0), Coordinate::default(), keys, from);
        setup::expect_stored(&bench.runtime.block_on(a.store().put(put)))?;
    }
    let begun = Instant::now();
    let two = bench.join(vec![a, b], &[None, None])?;
    let known = || -> (u64, u64) {
        let all = two.nodes.iter().map(|node| node.status());
        all.fold((0, 0), |(entries, bytes), status| (entries + status.entries, bytes + status.entry_bytes))
    };
    while known().0 < announce {
        if begun.elapsed() > PATIENCE {
            return Err(Failure::User(format!(
                "only {} of {announce} blocks were announced within {} s",
                known().0,
                PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    report.fact("announced_blocks", announce);
    let took = begun.elapsed().as_secs_f64();
    report.number("announced_s", took);
    report.number("announced_s_per_million", took * 1e6 / announce as f64);
    let (entries, bytes) = known();
    report.number("directory_bytes_per_entry", bytes as f64 / entries as f64);
    Ok(())
}
