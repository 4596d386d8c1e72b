//! `bench serve`: reads over gRPC on loopback beside a bare server that streams the same messages from memory, and what
//! a small reader feels while others saturate the server.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use kvarts_layout::{BlockKey, Geometry};
use kvarts_store::api::{KvStore, Parent, Placed, PutRequest};
use kvarts_store::rt::blocking::block_on;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Channel;

use super::local::{self, Filled};
use super::pairs::{Contestant, Sample, cpu_seconds, take_turns};
use super::report::Report;
use super::setup::{self, Common, Scratch, key};
use crate::cli::Failure;
use crate::client::{Client, ConnectOptions, endpoint};
use crate::config::{Config, Settings};
use crate::daemon::Daemon;
use crate::grpc::bare::Bare;
use crate::grpc::{limits, transport, wire};
use crate::proto;
use crate::proto::reads_client::ReadsClient;

const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;
/// Tokens of a block: those that engines use by default, so that a window holds several blocks.
const BLOCK_TOKENS: u32 = 16;
/// Bytes of a page of which many are looked up.
const MATCH_PAGE_BYTES: u64 = 4096;
/// Readers that saturate the server while a small one is looked at.
const READERS: usize = 4;

/// The arguments of `bench serve`.
#[derive(Args, Debug)]
pub(super) struct ServeArgs {
    /// Where the store is made, in a directory of its own [default: the current directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Rounds in which the contestants take turns
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(3..=1000))]
    pairs: u32,
    /// MiB of the prefix
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(8..=1 << 16))]
    mib: u64,
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// One-block reads of the small reader, in quiet and in noise
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    small: u32,
}

/// A server with a prefix in it, and the bare one.
struct Ground {
    runtime: Runtime,
    daemon: Daemon,
    served: ReadsClient<Channel>,
    bare: ReadsClient<Channel>,
    request: proto::ReadRequest,
    /// A model of small pages, and one of them.
    small: proto::ReadRequest,
    /// Many pages that are looked up.
    many: proto::ReadRequest,
    bytes: u64,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &ServeArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = Common::quiet(arguments.dir.clone(), arguments.json, arguments.pairs);
    let scratch = Scratch::new(&common, (arguments.mib << 20) * 2 + (512 << 20))?;
    let ground = prepare(arguments, &scratch)?;
    let mut report = Report::new("serve");
    report.fact("mib", ground.bytes >> 20);
    report.fact("pairs", arguments.pairs);
    let reader = |name: &'static str, client: &ReadsClient<Channel>| -> Contestant<'_> {
        let (runtime, request, client) = (&ground.runtime, ground.request.clone(), client.clone());
        let bytes = ground.bytes;
        (name, Box::new(move || sample(runtime, &client, &request, bytes)))
    };
    let contestants =
        vec![reader("serve", &ground.served), reader("bare", &ground.bare), reader("again", &ground.bare)];
    let rounds = take_turns(arguments.pairs, contestants)?;
    let gib = ground.bytes as f64 / GIB;
    report.median("grpc_ratio", rounds.speed("serve", "bare"));
    report.control("control", rounds.speed("again", "bare"));
    report.median("grpc_mib_s", rounds.figure("serve", |one| gib * 1024.0 / one.seconds));
    report.median("bare_mib_s", rounds.figure("bare", |one| gib * 1024.0 / one.seconds));
    report.median("grpc_cpu_s_per_gib", rounds.figure("serve", |one| one.cpu / gib));
    report.median("bare_cpu_s_per_gib", rounds.figure("bare", |one| one.cpu / gib));
    let spec = setup::model(&arguments.model)?;
    let opaque = |bytes| Geometry::opaque(bytes).map_err(Failure::user);
    let (page, match_page) = (opaque(64 << 10)?, opaque(MATCH_PAGE_BYTES)?);
    local::run(
        &ground.daemon,
        (
            &Filled { geometry: spec.geometry(), block_tokens: BLOCK_TOKENS, request: &ground.request },
            &Filled { geometry: &page, block_tokens: 16, request: &ground.small },
            &Filled { geometry: &match_page, block_tokens: 16, request: &ground.many },
        ),
        arguments.pairs,
        &mut report,
    )?;
    small_reader(&ground, arguments.small, &mut report)?;
    report.note("both processes' work is in the CPU figures: client and server share this process");
    let Ground { runtime, daemon, served, bare, .. } = ground;
    drop((served, bare));
    runtime.block_on(daemon.stop()).map_err(Failure::User)?;
    runtime.shutdown_background();
    report.write(arguments.json, out)
}

fn prepare(arguments: &ServeArgs, scratch: &Scratch) -> Result<Ground, Failure> {
    let runtime = Runtime::new().map_err(Failure::user)?;
    let text = |value: &dyn std::fmt::Display| Some(value.to_string());
    let settings = Settings {
        directories: text(&scratch.path().join("store").display()),
        budget: text(&format!("{} MiB", arguments.mib * 2 + 512)),
        segment: text(&"32 MiB"),
        grpc: text(&"127.0.0.1:0"),
        metrics: text(&"none"),
        socket: text(&socket(scratch).display()),
        ..Settings::default()
    };
    let config = Config::resolve(None, |_| None, &settings).map_err(Failure::user)?;
    let daemon = runtime.block_on(Daemon::start(&config)).map_err(Failure::User)?;
    let address = daemon.grpc().ok_or_else(|| Failure::user("the server listens nowhere"))?;
    let options = ConnectOptions::to(format!("http://{address}"));
    let client = Client::connect(&options).map_err(Failure::user)?;
    let spec = setup::model(&arguments.model)?;
    let geometry = spec.geometry().clone();
    let (request, bytes) = fill(&client, &geometry, BLOCK_TOKENS, arguments.mib << 20)?;
    let small = fill(&client, &Geometry::opaque(64 << 10).map_err(Failure::user)?, 16, 64 << 10)?.0;
    let match_page = Geometry::opaque(MATCH_PAGE_BYTES).map_err(Failure::user)?;
    let many = fill(&client, &match_page, 16, MATCH_PAGE_BYTES * local::MATCH_KEYS)?.0;
    let messages = bytes / limits::FRAME_BYTES as u64;
    let bare = Bare { bytes: Bytes::from(vec![7; limits::FRAME_BYTES]), messages };
    let bare = runtime.block_on(serve_bare(bare)).map_err(Failure::user)?;
    let connect = |options: ConnectOptions| -> Result<ReadsClient<Channel>, Failure> {
        let endpoint = endpoint(&options).map_err(Failure::user)?;
        let channel = runtime.block_on(endpoint.connect()).map_err(Failure::user)?;
        Ok(ReadsClient::new(channel).max_decoding_message_size(limits::MESSAGE_BYTES_MAX))
    };
    let (served, bare) = (connect(options)?, connect(ConnectOptions::to(bare))?);
    Ok(Ground { daemon, served, bare, request, small, many, bytes, runtime })
}

/// Where the server's socket is: in the run's directory, or where its path is short enough.
fn socket(scratch: &Scratch) -> PathBuf {
    let inside = scratch.path().join("socket");
    if inside.as_os_str().len() < 100 {
        return inside;
    }
    std::env::temp_dir().join(format!("kvarts-bench-{}.sock", std::process::id()))
}

/// Starts the bare server; gives its endpoint.
async fn serve_bare(bare: Bare) -> std::io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let incoming = TcpListenerStream::new(listener);
    tokio::spawn(async move { transport().add_service(bare).serve_with_incoming(incoming).await });
    Ok(endpoint)
}

/// Puts about so many bytes, whole MiB of them; gives the read of all of them.
fn fill(
    client: &Client,
    geometry: &Geometry,
    block_tokens: u32,
    bytes: u64,
) -> Result<(proto::ReadRequest, u64), Failure> {
    let group = geometry.groups().first().map_or(kvarts_layout::Group(0), |group| group.group);
    let coordinate = geometry.coordinate(group, 1, 0).map_err(Failure::user)?;
    let shape = geometry.shape(group, coordinate, block_tokens).map_err(Failure::user)?;
    let namespace = client.register(&setup::identity("serve", block_tokens, geometry), geometry);
    let namespace = namespace.map_err(Failure::user)?;
    let blocks = (bytes / shape.block_bytes()).max(1);
    let keys: Vec<BlockKey> = (0..blocks).map(|number| key(3, number)).collect();
    let batch = usize::try_from((8 << 20) / shape.block_bytes()).unwrap_or(1).max(1);
    let memory = setup::noise(shape.block_bytes() as usize * batch)?;
    let mut parent = Parent::Root;
    for some in keys.chunks(batch) {
        let from = memory.slice(0, shape.block_bytes() as usize * some.len());
        let from = from.ok_or_else(|| Failure::user("no memory"))?;
        let request = PutRequest {
            namespace,
            group,
            coordinate,
            parent,
            first_block: None,
            keys: some.to_vec(),
            from: Placed::blocks(&shape, from, some.len() as u32).map_err(Failure::user)?,
            layout: None,
            durability: kvarts_store::api::Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        setup::expect_stored(&block_on(client.put(request)))?;
        parent = some.last().map_or(Parent::Root, |last| Parent::Key(*last));
    }
    let request = proto::ReadRequest {
        namespace: namespace.as_bytes().to_vec().into(),
        column: Some(wire::wire_column(group, coordinate)),
        keys: wire::key_bytes(&keys),
        ..proto::ReadRequest::default()
    };
    Ok((request, blocks * shape.block_bytes()))
}

/// Reads everything, checks every digest, and gives the bytes.
async fn read(mut client: ReadsClient<Channel>, request: proto::ReadRequest) -> Result<u64, Failure> {
    let mut stream = client.get_layers(request).await.map_err(Failure::user)?.into_inner();
    let mut bytes = 0;
    while let Some(reply) = stream.message().await.map_err(Failure::user)? {
        if let Some(proto::read_reply::Part::Data(data)) = reply.part {
            if crc32fast::hash(&data.data) != data.crc32 {
                return Err(Failure::user("bytes were damaged on the way"));
            }
            bytes += data.data.len() as u64;
        }
    }
    Ok(bytes)
}

fn sample(
    runtime: &Runtime,
    client: &ReadsClient<Channel>,
    request: &proto::ReadRequest,
    expected: u64,
) -> Result<Sample, Failure> {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let bytes = runtime.block_on(runtime.spawn(read(client.clone(), request.clone())));
    let bytes = bytes.map_err(Failure::user)??;
    let sample = Sample { seconds: start.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first: 0.0 };
    // The bare server sends whole messages: it may be short of one.
    if expected - bytes >= limits::FRAME_BYTES as u64 {
        return Err(Failure::User(format!("{bytes} of {expected} bytes came")));
    }
    Ok(sample)
}

/// How long one-block reads take while nobody else reads, and while others take all they can.
fn small_reader(ground: &Ground, count: u32, report: &mut Report) -> Result<(), Failure> {
    let idle = latencies(ground, count)?;
    let stop = Arc::new(AtomicBool::new(false));
    let others: Vec<_> = (0..READERS)
        .map(|_| {
            let (client, request, stop) = (ground.served.clone(), ground.request.clone(), Arc::clone(&stop));
            ground.runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) && read(client.clone(), request.clone()).await.is_ok() {}
            })
        })
        .collect();
    ground.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(200)).await });
    let noisy = latencies(ground, count);
    stop.store(true, Ordering::Relaxed);
    for other in others {
        ground.runtime.block_on(other).map_err(Failure::user)?;
    }
    let noisy = noisy?;
    let p99 = |sorted: &[f64]| sorted.get(sorted.len() * 99 / 100).copied().unwrap_or(f64::NAN);
    report.number("small_reader_p99_ratio", p99(&noisy) / p99(&idle));
    report.number("small_reader_idle_p99_us", p99(&idle) * 1e6);
    report.number("small_reader_noisy_p99_us", p99(&noisy) * 1e6);
    report.number("noise_mib", ground.bytes as f64 / MIB * READERS as f64);
    Ok(())
}

/// Seconds of one-block reads on a connection of their own, sorted.
fn latencies(ground: &Ground, count: u32) -> Result<Vec<f64>, Failure> {
    let address = ground.daemon.grpc().ok_or_else(|| Failure::user("the server listens nowhere"))?;
    let endpoint = endpoint(&ConnectOptions::to(format!("http://{address}"))).map_err(Failure::user)?;
    let channel = ground.runtime.block_on(endpoint.connect()).map_err(Failure::user)?;
    let client = ReadsClient::new(channel);
    let mut all = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        let done = ground.runtime.spawn(read(client.clone(), ground.small.clone()));
        ground.runtime.block_on(done).map_err(Failure::user)??;
        all.push(start.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(all)
}
