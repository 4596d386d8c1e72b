//! `bench dual`: reads over two paths at once beside the same reads over each of them alone, and what nodes cost each other.
//! What each node sends is limited, so that the paths and not this machine's one disk are what is measured.
//!
//! Peers alone are here; the own disk is in `own`, what goes wrong in the middle and what a node's own reads lose in `trouble`,
//! the directory in `directory`.

mod directory;
mod own;
mod trouble;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use kvarts_cluster::members::{Member, Members};
use kvarts_layout::identity::Arrangement;
use kvarts_layout::spec::shipped;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_peer::lane::ServeLimits;
use kvarts_peer::node::{ClusterNode, Column, NodeOptions, Secret};
use kvarts_store::api::{KvStore, Origins, Placed, PutRequest, ReadEvent, ReadRequest};
use kvarts_store::engine::Options;
use kvarts_store::home::Home;
use kvarts_store::io::{BufMut, SharedBuf};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::pairs::{Contestant, Sample, Summary, cpu_seconds, summary, take_turns};
use crate::report::Report;
use crate::setup::{self, Common, Scratch};
use kvarts_terminal::Failure;

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 64;
/// The pause before each read: longer than what a node's limit saves up.
const PAUSE: Duration = Duration::from_millis(200);
/// How long the directory may take to hear of what was put.
const PATIENCE: Duration = Duration::from_secs(30);

/// The arguments of `bench dual`.
#[derive(Args, Debug)]
pub(super) struct DualArgs {
    #[command(flatten)]
    common: Common,
    /// MiB of each read
    #[arg(long, default_value_t = 192, value_parser = clap::value_parser!(u64).range(16..=4096))]
    mib: u64,
    /// MiB a second that two equal paths bring together, and paths of three to one
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(16..=65536))]
    rate: u64,
    /// What is measured
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Part::Peers, Part::Own, Part::Trouble, Part::Directory])]
    only: Vec<Part>,
    /// Blocks that are announced to a node that joins
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1000..=10_000_000))]
    announce: u64,
}

/// What is measured.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Reads of which nothing is local, from two peers
    Peers,
    /// Reads from the own disk and a peer, both limited alike; as root
    Own,
    /// A path that collapses, a node that goes, and reads of a node that serves another one
    Trouble,
    /// Look-ups, and what a node that joins is told
    Directory,
}

/// Three nodes: two that serve, and the one that reads.
struct Trio {
    homes: Vec<Home>,
    nodes: Vec<Arc<ClusterNode>>,
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    shape: BlockShape,
}

impl Drop for Trio {
    fn drop(&mut self) {
        self.nodes.iter().for_each(|node| node.stop());
    }
}

/// Runs the benchmark.
pub(super) fn run(arguments: &DualArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    let scratch = Scratch::new(common, (arguments.mib << 20) * 8 + (3 << 30))?;
    let runtime = Runtime::new().map_err(Failure::user)?;
    let mut report = Report::new("dual");
    report.fact("mib", arguments.mib);
    report.fact("rate_mib", arguments.rate);
    report.fact("pairs", common.pairs);
    let rate = arguments.rate << 20;
    let is_wanted = |part| arguments.only.contains(&part);
    let peers = [("equal", [rate / 2, rate / 2]), ("three_to_one", [rate / 4 * 3, rate / 4])];
    for (name, rates) in peers.into_iter().filter(|_| is_wanted(Part::Peers)) {
        let trio = runtime.block_on(trio(common, &scratch.path().join(name), rates))?;
        measure(arguments, &runtime, &trio, (name, rates), &mut report)?;
    }
    if is_wanted(Part::Own) {
        own::measure(arguments, &runtime, &scratch.path().join("own"), &mut report)?;
    }
    if is_wanted(Part::Trouble) {
        trouble::measure(arguments, &runtime, &scratch.path().join("trouble"), &mut report)?;
    }
    if is_wanted(Part::Directory) {
        directory::measure(arguments, &runtime, scratch.path(), &mut report)?;
    }
    report.note("paths are limited by what a node serves to others (cluster.serve_rate), all nodes are on this machine");
    report.write(common.json, out)
}

fn model() -> Result<(Identity, Geometry), Failure> {
    let spec = shipped::load("llama-3.1-8b").ok_or_else(|| Failure::user("no such model"))?;
    let geometry = spec.geometry().clone();
    let arrangement = Arrangement::new("bench", "canonical", "1");
    Ok((Identity::new("dual", "bench", "bf16", arrangement, &geometry, BLOCK_TOKENS), geometry))
}

async fn trio(common: &Common, directory: &Path, rates: [u64; 2]) -> Result<Trio, Failure> {
    let [a, c] = rates.map(Some);
    nodes(common, directory, &[("a", a), ("c", c), ("b", None)]).await
}

/// Nodes of these names, each with what it serves to others a second; the last is the one that reads.
async fn nodes(common: &Common, directory: &Path, names: &[(&str, Option<u64>)]) -> Result<Trio, Failure> {
    let options = Options { budget_bytes: 4 << 30, segment_bytes: 64 << 20, ..Options::default() };
    let mut homes = Vec::new();
    for (name, _) in names {
        homes.push(setup::open(common, &directory.join(name), options.clone())?);
    }
    let rates: Vec<Option<u64>> = names.iter().map(|(_, rate)| *rate).collect();
    join(homes, &rates).await
}

/// Makes a cluster of these stores.
async fn join(homes: Vec<Home>, rates: &[Option<u64>]) -> Result<Trio, Failure> {
    let (identity, geometry) = model()?;
    let (mut listeners, mut members) = (Vec::new(), Vec::new());
    for home in &homes {
        home.store().register(&identity, &geometry).map_err(Failure::user)?;
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(Failure::user)?;
        let address = listener.local_addr().map_err(Failure::user)?.to_string();
        members.push(Member { id: home.store().stats().store, address, zone: String::new() });
        listeners.push(listener);
    }
    let members = Members::new(1, members).map_err(Failure::user)?;
    let mut nodes = Vec::new();
    for ((home, listener), bytes_per_second) in homes.iter().zip(listeners).zip(rates.iter().copied()) {
        let options = NodeOptions {
            credentials: None,
            cluster: "bench".to_owned(),
            members: members.clone(),
            secret: Secret::new(b"a secret of a benchmark"),
            entries_max: 16 << 20,
            chains_max: 1,
            start: 1,
            serve: ServeLimits { bytes_per_second, ..ServeLimits::default() },
        };
        nodes.push(ClusterNode::start(home.store().clone(), listener, options).map_err(Failure::User)?);
    }
    let namespace = identity.namespace_id().map_err(Failure::user)?;
    nodes.iter().for_each(|node| node.know(&identity, &geometry, namespace));
    let group = geometry.groups().first().ok_or_else(|| Failure::user("a model without state"))?.group;
    let coordinate = geometry.coordinate(group, 1, 0).map_err(Failure::user)?;
    let shape = geometry.shape(group, coordinate, BLOCK_TOKENS).map_err(Failure::user)?;
    Ok(Trio { homes, nodes, namespace, group, coordinate, shape })
}

/// Keys of one chain.
fn chain_keys(chain: u64, count: u64) -> Vec<BlockKey> {
    (0..count).map(|n| BlockKey(*blake3::hash(&(chain << 32 | n).to_le_bytes()).as_bytes())).collect()
}

impl Trio {
    /// Blocks of a read.
    fn count(&self, arguments: &DualArgs) -> u64 {
        ((arguments.mib << 20) / self.shape.block_bytes()).max(1)
    }

    /// Copies blocks that one node has to another one, as they were produced.
    fn copy(&self, runtime: &Runtime, node: usize, keys: &[BlockKey]) -> Result<(), Failure> {
        self.until_known(runtime, keys, 1)?;
        let begun = Instant::now();
        let mut stored = 0;
        // Until there is a connection that carries bytes, none comes.
        while stored < keys.len() && begun.elapsed() < PATIENCE {
            let copied = runtime.block_on(self.nodes[node].replicate(self.column(keys), &self.shape, None));
            stored += copied.map_err(Failure::user)?.stored as usize;
        }
        if stored < keys.len() {
            return Err(Failure::user("the blocks were not copied"));
        }
        self.until_known(runtime, keys, 2)
    }

    fn put(&self, runtime: &Runtime, node: usize, keys: &[BlockKey]) -> Result<(), Failure> {
        for some in keys.chunks(4) {
            let bytes = self.shape.block_bytes() as usize * some.len();
            let mut memory = BufMut::zeroed(bytes).map_err(Failure::user)?;
            memory.fill(0x5a);
            let from = Placed::blocks(&self.shape, memory, some.len() as u32).map_err(Failure::user)?;
            let put = PutRequest::new(self.namespace, self.group, self.coordinate, some.to_vec(), from);
            runtime
                .block_on(self.homes[node].store().put(put))
                .map_err(Failure::user)?
                .map_err(Failure::user)?;
        }
        Ok(())
    }

    /// The node that reads.
    fn reader(&self) -> &Arc<ClusterNode> {
        &self.nodes[self.nodes.len() - 1]
    }

    fn column<'a>(&self, keys: &'a [BlockKey]) -> Column<'a> {
        let Self { namespace, group, coordinate, .. } = *self;
        Column { namespace, group, coordinate, keys }
    }

    /// Waits until the reader knows of so many copies of each block.
    fn until_known(&self, runtime: &Runtime, keys: &[BlockKey], copies: usize) -> Result<(), Failure> {
        let begun = Instant::now();
        let tags: Vec<_> = keys.iter().map(|key| self.column(keys).tag(key)).collect();
        loop {
            let located = runtime.block_on(self.reader().locate(&tags, Duration::from_secs(1)));
            if located.copies.iter().all(|nodes| nodes.len() == copies) {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                return Err(Failure::user("the directory does not know where the blocks are"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// One read of these blocks by layers.
    fn read(&self, keys: &[BlockKey], memory: &SharedBuf) -> Result<Sample, Failure> {
        self.read_with(keys, memory, |_| {})
    }

    /// The same; each layer is told as it comes.
    fn read_with(
        &self,
        keys: &[BlockKey],
        memory: &SharedBuf,
        came: impl FnMut(u32),
    ) -> Result<Sample, Failure> {
        self.reads().read_with(keys, memory, came)
    }

    /// What reads, for a thread of its own.
    fn reads(&self) -> Reads {
        let Self { namespace, group, coordinate, ref shape, .. } = *self;
        Reads { node: Arc::clone(self.reader()), namespace, group, coordinate, shape: shape.clone() }
    }
}

/// Reads on one node.
struct Reads {
    node: Arc<ClusterNode>,
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    shape: BlockShape,
}

impl Reads {
    fn read_with(
        &self,
        keys: &[BlockKey],
        memory: &SharedBuf,
        mut came: impl FnMut(u32),
    ) -> Result<Sample, Failure> {
        let into = Placed::blocks(&self.shape, memory.clone(), keys.len() as u32).map_err(Failure::user)?;
        let request = ReadRequest::new(self.namespace, self.group, self.coordinate, keys.to_vec(), into);
        // What nodes may send at once after a pause is there for every contestant.
        std::thread::sleep(PAUSE);
        let (begun, cpu) = (Instant::now(), cpu_seconds());
        let stream =
            self.node.read(request, &self.shape, &Origins::any(keys.len())).map_err(Failure::user)?;
        let mut first = 0.0;
        let end = loop {
            match stream.next_blocking() {
                ReadEvent::Layer { layer, .. } => {
                    if layer == 0 {
                        first = begun.elapsed().as_secs_f64();
                    }
                    came(layer);
                }
                ReadEvent::End(end) => break end,
                _ => {}
            }
        };
        if end.usable_blocks as usize != keys.len() {
            return Err(Failure::User(format!("the blocks did not come: {end:?}")));
        }
        Ok(Sample { seconds: begun.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first })
    }
}

fn measure(
    arguments: &DualArgs,
    runtime: &Runtime,
    trio: &Trio,
    (name, rates): (&str, [u64; 2]),
    report: &mut Report,
) -> Result<(), Failure> {
    let count = trio.count(arguments);
    let bytes = count * trio.shape.block_bytes();
    let [on_a, on_c, on_both] = [1, 2, 3].map(|chain| chain_keys(chain, count));
    trio.put(runtime, 0, &on_a)?;
    trio.put(runtime, 1, &on_c)?;
    trio.put(runtime, 0, &on_both)?;
    trio.copy(runtime, 1, &on_both)?;
    trio.until_known(runtime, &on_a, 1)?;
    trio.until_known(runtime, &on_c, 1)?;
    let memory = BufMut::zeroed(bytes as usize).map_err(Failure::user)?.share();
    let contestant = |name, keys| -> Contestant<'_> {
        let memory = memory.clone();
        (name, Box::new(move || trio.read(keys, &memory)))
    };
    let contestants = vec![contestant("a", &on_a), contestant("c", &on_c), contestant("both", &on_both)];
    let rounds = take_turns(arguments.common.pairs, contestants)?;
    let triples = || rounds.of("a").iter().zip(rounds.of("c")).zip(rounds.of("both"));
    let figure = |of: fn(&Sample, &Sample, &Sample) -> f64| -> Summary {
        summary(triples().map(|((a, c), both)| of(a, c, both)).collect())
    };
    report.median(&format!("{name}_ratio"), figure(|a, c, both| a.seconds.min(c.seconds) / both.seconds));
    let sum = (rates[0] + rates[1]) as f64;
    let of_sum = summary(rounds.of("both").iter().map(|both| bytes as f64 / both.seconds / sum).collect());
    report.median(&format!("{name}_sum_ratio"), of_sum);
    report
        .median(&format!("{name}_first_layer_ratio"), figure(|a, c, both| both.first / a.first.min(c.first)));
    let gib = bytes as f64 / f64::from(1 << 30);
    report.median(&format!("{name}_both_cpu_s_per_gib"), rounds.figure("both", |both| both.cpu / gib));
    Ok(())
}
