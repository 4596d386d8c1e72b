//! `bench serve`: reads over gRPC on loopback beside a bare server that streams the same messages from memory, warm (the
//! store's files in the page cache), cold (from the device) and hot (tiles that the server keeps), and what a small reader
//! feels while others saturate the server.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, ValueEnum};
use kvarts_contract::api::{KvStore, Order, Parent, Placed, PutRequest};
use kvarts_contract::blocking::block_on;
use kvarts_layout::{BlockKey, Geometry};
use kvarts_store::home::RuntimeChoice;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use super::bare_server::BareServer;
use super::local::{self, Filled, Ping};
use super::pairs::{Contestant, LEAST_SHORT_ROUNDS, Sample, cpu_seconds, take_turns_within};
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, key};
use kvarts_client::{Client, ConnectOptions, endpoint};
use kvarts_server::config::{Config, Settings};
use kvarts_server::daemon::Daemon;
use kvarts_server::grpc::{incoming_tcp, transport};
use kvarts_terminal::Failure;
use kvarts_terminal::undo::Undo;
use kvarts_wire::digest::StreamDigest;
use kvarts_wire::proto;
use kvarts_wire::proto::reads_client::ReadsClient;
use kvarts_wire::{convert, limits};

const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;
/// Tokens of a block: those that engines use by default, so that a window holds several blocks.
const BLOCK_TOKENS: u32 = 16;
/// Bytes of a page of which one is read.
const PAGE_BYTES: u64 = 64 << 10;
/// Bytes of a page of which many are looked up.
const MATCH_PAGE_BYTES: u64 = 4096;
/// Readers that saturate the server while a small one is looked at.
const READERS: usize = 4;
/// How long rounds of large reads go on, on a slow machine with fewer of them.
const GRPC_TIME: Duration = Duration::from_secs(20);

/// The arguments of `bench serve`.
#[derive(Args, Debug)]
pub(super) struct ServeArgs {
    /// Parent of the store's directory [default: the current directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Rounds in which the contestants take turns
    #[arg(long, default_value_t = 61, value_parser = clap::value_parser!(u32).range(3..=1000))]
    pairs: u32,
    /// Size of the prefix in MiB
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(8..=1 << 16))]
    mib: u64,
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// One-block reads of the small reader, without and with concurrent large reads
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(20..=100_000))]
    small: u32,
    /// Runtime of the executors: auto, glommio or threads
    #[arg(long, default_value = "auto")]
    runtime: RuntimeChoice,
    /// Measure only this part
    #[arg(long, value_enum)]
    part: Option<Part>,
}

/// A part of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Part {
    /// Large reads over gRPC.
    Grpc,
    /// The local path.
    Local,
    /// A small reader next to large readers.
    Small,
}

/// A server with a prefix in it, and a client of it.
struct Ground {
    daemon: Daemon,
    served: ReadsClient<Channel>,
    request: proto::ReadRequest,
    /// A model of small pages, and one of them.
    small: proto::ReadRequest,
    /// Many pages that are looked up.
    many: proto::ReadRequest,
    bytes: u64,
    _socket: Option<Undo>,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &ServeArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = Common::quiet(arguments.dir.clone(), arguments.json, arguments.pairs);
    let scratch = Scratch::new(&common, 3 * ((arguments.mib << 20) * 2 + (512 << 20)))?;
    let runtime = Runtime::new().map_err(Failure::user)?;
    // Warm: what is read lies in memory, as the bare server's does. Cold: it comes from the device.
    let warm = prepare(arguments, &scratch, &runtime, "warm", (Some("direct-io"), false))?;
    let cold = prepare(arguments, &scratch, &runtime, "cold", (None, false))?;
    // Hot: what is read again lies in the memory of requests.
    let hot = prepare(arguments, &scratch, &runtime, "hot", (None, true))?;
    let messages = warm.bytes / limits::FRAME_BYTES as u64;
    let bare = BareServer::of_memory(&Bytes::from(vec![7; limits::FRAME_BYTES]), messages);
    let (bare_at, bare) = prepare_bare(&runtime, bare)?;
    let mut report = Report::new("serve");
    report.fact("mib", warm.bytes >> 20);
    let wanted = |part| arguments.part.is_none_or(|only| only == part);
    if wanted(Part::Grpc) {
        let (_, least) = prepare_bare(&runtime, bare_file(&scratch, messages)?)?;
        let grounds = [&warm, &cold, &hot];
        large_reads(arguments.pairs, &runtime, grounds, (&bare, &least), &mut report)?;
        let (kept, read) = hot.daemon.state().memory.tiles().counts();
        report.fact("hot_tiles_kept", kept);
        report.fact("hot_tiles_read", read);
    }
    if wanted(Part::Local) {
        let spec = setup::model(&arguments.model)?;
        let opaque = |bytes| Geometry::opaque(bytes).map_err(Failure::user);
        let (page, match_page) = (opaque(PAGE_BYTES)?, opaque(MATCH_PAGE_BYTES)?);
        local::run(
            &cold.daemon,
            (
                &Filled { geometry: spec.geometry(), block_tokens: BLOCK_TOKENS, request: &cold.request },
                &Filled { geometry: &page, block_tokens: 16, request: &cold.small },
                &Filled { geometry: &match_page, block_tokens: 16, request: &cold.many },
            ),
            arguments.pairs,
            &mut report,
        )?;
    }
    if wanted(Part::Small) {
        let beside = |of: &Ground| {
            let at = endpoint_of(&of.daemon)?;
            Ok::<_, Failure>(Beside {
                small: (at.clone(), of.small.clone()),
                large: (at, of.request.clone()),
            })
        };
        let ours = small_reader("small_reader", "noise", &beside(&cold)?, arguments.small, &mut report)?;
        let kept =
            small_reader("small_reader_hot", "noise_hot", &beside(&hot)?, arguments.small, &mut report)?;
        // The same load on the same transport, with nothing behind it: what the processors make of it.
        let page = Bytes::from(vec![7; PAGE_BYTES as usize]);
        let page = BareServer::of_memory(&page, 1);
        let page = runtime.block_on(serve_bare(page)).map_err(Failure::user)?;
        let bare = Beside { small: (page, cold.small.clone()), large: (bare_at, cold.request.clone()) };
        let bare = small_reader("small_reader_bare", "noise_bare", &bare, arguments.small, &mut report)?;
        report.number("small_reader_noisy_p99_to_bare", ours / bare);
        report.number("small_reader_hot_noisy_p99_to_bare", kept / bare);
    }
    report.note(
        "the CPU figures include the work of the clients and the servers, because both run in \
        this process",
    );
    for Ground { daemon, served, .. } in [warm, cold, hot] {
        drop(served);
        runtime.block_on(daemon.stop()).map_err(Failure::User)?;
    }
    runtime.shutdown_background();
    report.write(arguments.json, out)
}

/// Reads of the whole prefix from each server in turn.
fn large_reads(
    pairs: u32,
    runtime: &Runtime,
    [warm, cold, hot]: [&Ground; 3],
    (bare, least): (&ReadsClient<Channel>, &ReadsClient<Channel>),
    report: &mut Report,
) -> Result<(), Failure> {
    let reader = |name: &'static str, client: &ReadsClient<Channel>, ground: &Ground| -> Contestant<'_> {
        let (request, client, bytes) = (ground.request.clone(), client.clone(), ground.bytes);
        (name, Box::new(move || sample(runtime, &client, &request, bytes)))
    };
    // Forwards and backwards each of the two that are the same follows the other once.
    let contestants = vec![
        reader("serve", &warm.served, warm),
        reader("bare", bare, warm),
        reader("again", bare, warm),
        reader("cold", &cold.served, cold),
        reader("least", least, warm),
        reader("hot", &hot.served, hot),
    ];
    let rounds = take_turns_within(GRPC_TIME, LEAST_SHORT_ROUNDS, pairs, contestants)?;
    report.fact("grpc_pairs", rounds.count());
    let gib = warm.bytes as f64 / GIB;
    report.median("grpc_ratio", rounds.speed("serve", "bare"));
    report.median("grpc_least_ratio", rounds.speed("serve", "least"));
    report.median("least_ratio", rounds.speed("least", "bare"));
    report.median("grpc_cold_ratio", rounds.speed("cold", "bare"));
    report.median("grpc_hot_ratio", rounds.speed("hot", "bare"));
    report.control("control", rounds.speed("again", "bare"));
    let names =
        [("grpc", "serve"), ("grpc_cold", "cold"), ("grpc_hot", "hot"), ("bare", "bare"), ("least", "least")];
    for (name, who) in names {
        report.median(&format!("{name}_mib_s"), rounds.figure(who, |one| gib * 1024.0 / one.seconds));
        report.median(&format!("{name}_cpu_s_per_gib"), rounds.figure(who, |one| one.cpu / gib));
    }
    Ok(())
}

fn prepare(
    arguments: &ServeArgs,
    scratch: &Scratch,
    runtime: &Runtime,
    name: &str,
    (io_disable, hot): (Option<&str>, bool),
) -> Result<Ground, Failure> {
    let text = |value: &dyn std::fmt::Display| Some(value.to_string());
    let (socket, undo) = socket(scratch, name)?;
    let settings = Settings {
        directories: text(&scratch.path().join(name).display()),
        budget: text(&format!("{} MiB", arguments.mib * 2 + 512)),
        segment: text(&"32 MiB"),
        io_disable: io_disable.map(str::to_owned),
        memory: text(&format!("{} MiB", if hot { arguments.mib * 2 } else { 256 }.max(256))),
        cache: if hot { None } else { text(&0) },
        grpc: text(&"127.0.0.1:0"),
        metrics: text(&"none"),
        socket: text(&socket.display()),
        ..Settings::default()
    };
    let config = Config::resolve(None, |_| None, &settings).map_err(Failure::user)?;
    let config = Config { runtime: arguments.runtime, ..config };
    let daemon = runtime.block_on(Daemon::start(&config)).map_err(Failure::User)?;
    let options = ConnectOptions::to(endpoint_of(&daemon)?);
    let client = Client::connect(&options).map_err(Failure::user)?;
    let spec = setup::model(&arguments.model)?;
    let geometry = spec.geometry().clone();
    let (request, bytes) = fill(&client, &geometry, BLOCK_TOKENS, arguments.mib << 20)?;
    let small = fill(&client, &Geometry::opaque(PAGE_BYTES).map_err(Failure::user)?, 16, PAGE_BYTES)?.0;
    let match_page = Geometry::opaque(MATCH_PAGE_BYTES).map_err(Failure::user)?;
    let many = fill(&client, &match_page, 16, MATCH_PAGE_BYTES * local::MATCH_KEYS)?.0;
    let served = connect(runtime, &options)?;
    Ok(Ground { daemon, served, request, small, many, bytes, _socket: undo })
}

fn endpoint_of(daemon: &Daemon) -> Result<String, Failure> {
    let address = daemon.grpc().ok_or_else(|| Failure::user("the server has no gRPC address"))?;
    Ok(format!("http://{address}"))
}

/// A connection whose work is done on a runtime's threads.
fn connect(runtime: &Runtime, options: &ConnectOptions) -> Result<ReadsClient<Channel>, Failure> {
    let endpoint = endpoint(options).map_err(Failure::user)?;
    let channel = runtime.block_on(endpoint.connect()).map_err(Failure::user)?;
    Ok(ReadsClient::new(channel).max_decoding_message_size(limits::MESSAGE_BYTES_MAX))
}

/// Where a bare server listens, and a client of it.
fn prepare_bare(runtime: &Runtime, bare: BareServer) -> Result<(String, ReadsClient<Channel>), Failure> {
    let endpoint = runtime.block_on(serve_bare(bare)).map_err(Failure::user)?;
    let client = connect(runtime, &ConnectOptions::to(endpoint.clone()))?;
    Ok((endpoint, client))
}

/// A bare server of a file, which the page cache holds as it holds the warm store's.
fn bare_file(scratch: &Scratch, messages: u64) -> Result<BareServer, Failure> {
    let bytes = setup::noise(messages as usize * limits::FRAME_BYTES)?.to_vec();
    let path = scratch.path().join("bare");
    std::fs::write(&path, &bytes).map_err(Failure::user)?;
    let file = std::fs::File::open(&path).map_err(Failure::user)?;
    Ok(BareServer::of_file(file, &bytes, limits::FRAME_BYTES, messages))
}

/// Where a server's socket is: in the run's directory, or where its path is short enough.
fn socket(scratch: &Scratch, name: &str) -> Result<(PathBuf, Option<Undo>), Failure> {
    let inside = scratch.path().join(format!("{name}.sock"));
    if inside.as_os_str().len() < 100 {
        return Ok((inside, None));
    }
    let outside = std::env::temp_dir().join(format!("kvarts-bench-{}-{name}.sock", std::process::id()));
    let gone = outside.clone();
    // A server that ended well has removed it.
    let (undo, ()) = Undo::of(|| Ok(()), move || drop(std::fs::remove_file(gone))).map_err(Failure::User)?;
    Ok((outside, Some(undo)))
}

/// Starts the bare server; gives its endpoint.
async fn serve_bare(bare: BareServer) -> std::io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let incoming = incoming_tcp(Arc::new(listener));
    tokio::spawn(async move { transport().add_service(bare).serve_with_incoming(incoming).await });
    Ok(endpoint)
}

/// Puts about `bytes` bytes, whole MiB of them; gives the read of all of them.
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
        let from = from.ok_or_else(|| Failure::user("the memory of the benchmark is too small for a put"))?;
        let request = PutRequest {
            namespace,
            group,
            coordinate,
            parent,
            first_block: None,
            keys: some.to_vec(),
            from: Placed::blocks(&shape, from, some.len() as u32).map_err(Failure::user)?,
            layout: None,
            durability: kvarts_contract::api::Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        setup::expect_stored(&block_on(client.put(request)))?;
        parent = some.last().map_or(Parent::Root, |last| Parent::Key(*last));
    }
    let request = proto::ReadRequest {
        namespace: namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(group, coordinate)),
        keys: convert::key_bytes(&keys),
        ..proto::ReadRequest::default()
    };
    Ok((request, blocks * shape.block_bytes()))
}

/// Reads everything, checks every digest, and gives the bytes.
async fn read(mut client: ReadsClient<Channel>, request: proto::ReadRequest) -> Result<u64, Failure> {
    let mut digest = StreamDigest::of_read(Order::Layers, &request);
    let mut stream = client.get_layers(request).await.map_err(Failure::user)?.into_inner();
    let mut bytes = 0;
    while let Some(reply) = stream.message().await.map_err(Failure::user)? {
        let Some(part) = reply.part else { return Err(Failure::user("a message of the server is empty")) };
        if digest.read(&part) != reply.crc32 {
            return Err(Failure::user("bytes were damaged in transit"));
        }
        if let proto::read_reply::Part::Data(data) = part {
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
        return Err(Failure::User(format!("only {bytes} of {expected} bytes were received")));
    }
    Ok(sample)
}

/// Threads for one client, as a process of its own would have.
fn client_threads(name: &str, threads: usize) -> Result<Runtime, Failure> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(threads).thread_name(name).enable_all().build().map_err(Failure::user)
}

/// Where a small reader and large ones read, and what.
struct Beside {
    small: (String, proto::ReadRequest),
    large: (String, proto::ReadRequest),
}

/// How long one-block reads take while no other client reads, and while others take all they can. Gives the
/// p99 of the latter.
fn small_reader(
    name: &str,
    noise_name: &str,
    Beside { small, large }: &Beside,
    count: u32,
    report: &mut Report,
) -> Result<f64, Failure> {
    let (own, others) = (client_threads("small", 1)?, client_threads("noise", 2)?);
    let (request, small) = (&small.1, connect(&own, &ConnectOptions::to(small.0.clone()))?);
    let idle = latencies(&own, &small, request, count)?;
    // What the scheduler alone makes of it: two threads that wake each other, and do nothing else.
    let mut ping = Ping::new(256)?;
    let idle_pings = pings(&mut ping, count)?;
    let stop = Arc::new(AtomicBool::new(false));
    let noise: Vec<_> = (0..READERS)
        .map(|_| {
            let client = connect(&others, &ConnectOptions::to(large.0.clone()))?;
            let request = large.1.clone();
            let stop = Arc::clone(&stop);
            Ok(others.spawn(async move {
                let mut bytes = 0;
                while !stop.load(Ordering::Relaxed) {
                    bytes += read(client.clone(), request.clone()).await?;
                }
                Ok::<u64, Failure>(bytes)
            }))
        })
        .collect::<Result<_, Failure>>()?;
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    let noisy = latencies(&own, &small, request, count);
    let noisy_pings = pings(&mut ping, count);
    let seconds = start.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    let mut bytes = 0;
    for one in noise {
        bytes += others.block_on(one).map_err(Failure::user)??;
    }
    let noisy = noisy?;
    let part = |sorted: &[f64], hundredths: usize| {
        sorted.get(sorted.len() * hundredths / 100).copied().unwrap_or(f64::NAN)
    };
    report.number(&format!("{name}_p99_ratio"), part(&noisy, 99) / part(&idle, 99));
    report.number(&format!("{name}_p50_ratio"), part(&noisy, 50) / part(&idle, 50));
    let noisy_pings = noisy_pings?;
    let all = [("idle", &idle), ("noisy", &noisy), ("idle_ping", &idle_pings), ("noisy_ping", &noisy_pings)];
    for (when, sorted) in all {
        report.number(&format!("{name}_{when}_p50_us"), part(sorted, 50) * 1e6);
        report.number(&format!("{name}_{when}_p99_us"), part(sorted, 99) * 1e6);
    }
    report.number(&format!("{noise_name}_mib_s"), bytes as f64 / MIB / (seconds + 0.2));
    own.shutdown_background();
    others.shutdown_background();
    Ok(part(&noisy, 99))
}

/// Seconds of bare ping-pongs, sorted.
fn pings(ping: &mut Ping, count: u32) -> Result<Vec<f64>, Failure> {
    let mut all = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        ping.pong()?;
        all.push(start.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(all)
}

/// Seconds of one-block reads, sorted.
fn latencies(
    runtime: &Runtime,
    client: &ReadsClient<Channel>,
    request: &proto::ReadRequest,
    count: u32,
) -> Result<Vec<f64>, Failure> {
    let mut all = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        let done = runtime.spawn(read(client.clone(), request.clone()));
        runtime.block_on(done).map_err(Failure::user)??;
        all.push(start.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(all)
}
