//! The part of `bench serve` about the local path: cold layerwise reads into a client's pool beside the same reads of the
//! embedded engine, and what a warm call costs beside a bare ping-pong over a socket and an eventfd.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kvarts_contract::api::{KvStore, MatchRequest, Order, Placed, ReadRequest, Verify};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, NamespaceId, Requirements};
use rustix::event::EventfdFlags;

use super::pairs::{Contestant, LEAST_SHORT_ROUNDS, Sample, cpu_seconds, take_turns_within};
use super::report::Report;
use super::setup;
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_server::daemon::Daemon;
use kvarts_terminal::Failure;
use kvarts_wire::proto;

/// Keys of the lookup that is measured warm.
pub(super) const MATCH_KEYS: u64 = 1024;
/// What an eventfd is told: the number one, in the processor's order.
const ONE: [u8; 8] = if cfg!(target_endian = "little") { 1u64.to_le_bytes() } else { 1u64.to_be_bytes() };
/// Warm calls of each kind.
const CALLS: usize = 400;
/// Those of one kind that follow each other: where threads run is decided by who woke them last, and a call of another kind
/// in between would decide it.
const IN_A_ROW: usize = 20;
/// How long rounds of large reads go on, on a slow machine with fewer of them.
const TIME: Duration = Duration::from_secs(12);

/// A model in the store, and blocks of it.
pub(super) struct Filled<'a> {
    pub(super) geometry: &'a Geometry,
    pub(super) block_tokens: u32,
    pub(super) request: &'a proto::ReadRequest,
}

struct Subject {
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    shape: BlockShape,
    keys: Vec<BlockKey>,
    requirements: Requirements,
}

impl Subject {
    fn new(client: &Client, filled: &Filled<'_>) -> Result<Self, Failure> {
        let (geometry, block_tokens) = (filled.geometry, filled.block_tokens);
        let group = geometry.groups().first().map_or(Group(0), |group| group.group);
        let coordinate = geometry.coordinate(group, 1, 0).map_err(Failure::user)?;
        let shape = geometry.shape(group, coordinate, block_tokens).map_err(Failure::user)?;
        let identity = setup::identity("serve", block_tokens, geometry);
        let namespace = client.register(&identity, geometry).map_err(Failure::user)?;
        let (keys, _) = filled.request.keys.as_chunks::<32>();
        let need =
            Requirement { group, coordinates: vec![coordinate], need: Need::All, absence: Absence::Required };
        let requirements = Requirements::new(block_tokens, vec![need]).map_err(Failure::user)?;
        let keys = keys.iter().copied().map(BlockKey).collect();
        Ok(Self { namespace, group, coordinate, shape, keys, requirements })
    }

    fn bytes(&self) -> usize {
        self.shape.block_bytes() as usize * self.keys.len()
    }

    fn read(&self, region: &std::sync::Arc<Region>, keys: usize) -> Result<ReadRequest, Failure> {
        let bytes = self.shape.block_bytes() as usize * keys;
        let buf = SharedBuf::new(region, 0, bytes)
            .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a read"))?;
        Ok(ReadRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            keys: self.keys.get(..keys).unwrap_or_default().to_vec(),
            layers: None,
            order: Order::Layers,
            into: Placed::blocks(&self.shape, buf, keys as u32).map_err(Failure::user)?,
            verify: Verify::Always,
            class: Class::Foreground,
            deadline: None,
        })
    }
}

/// Reads and waits for the end.
fn whole(store: &dyn KvStore, request: ReadRequest) -> Result<(), Failure> {
    let blocks = request.keys.len();
    let stream = store.read(request).map_err(Failure::user)?;
    let end = stream.wait_end().map_err(Failure::user)?;
    if end.usable_blocks as usize != blocks {
        return Err(Failure::User(format!("a read did not return all blocks: {end:?}")));
    }
    Ok(())
}

/// Measures the local path of a server.
pub(super) fn run(
    daemon: &Daemon,
    (large, page, match_pages): (&Filled<'_>, &Filled<'_>, &Filled<'_>),
    pairs: u32,
    report: &mut Report,
) -> Result<(), Failure> {
    let socket = daemon.socket().ok_or_else(|| Failure::user("the server has no socket"))?;
    let options =
        ConnectOptions { via: Via::Local, ..ConnectOptions::to(format!("unix:{}", socket.display())) };
    let client = Client::connect(&options).map_err(Failure::user)?;
    let engine = &daemon.state().engine;
    let subject = Subject::new(&client, large)?;
    let pool = client.pool(subject.bytes()).map_err(Failure::user)?;
    let own = Region::anonymous(subject.bytes()).map_err(Failure::user)?;
    if let Err(why) = block_on(engine.register_memory(&own)) {
        report.note(format!("the embedded engine reads into unregistered memory: {why}"));
    }
    // Both memories have their pages before the first round.
    for region in [&pool, &own] {
        whole(engine, subject.read(region, subject.keys.len())?)?;
    }
    let reader = |name: &'static str, store: &'static str| -> Contestant<'_> {
        let (subject, pool, own, client) = (&subject, &pool, &own, &client);
        let read = move || {
            let (start, cpu) = (Instant::now(), cpu_seconds());
            match store {
                "local" => whole(client, subject.read(pool, subject.keys.len())?)?,
                // Memory that is not shared: through windows, and a copy out of them.
                "copied" => whole(client, subject.read(own, subject.keys.len())?)?,
                _ => whole(engine, subject.read(own, subject.keys.len())?)?,
            }
            Ok(Sample { seconds: start.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu, first: 0.0 })
        };
        (name, Box::new(read))
    };
    let contestants = vec![
        reader("local", "local"),
        reader("embedded", "embedded"),
        reader("again", "embedded"),
        reader("copied", "copied"),
    ];
    // A cold read is long enough for half as many rounds.
    let rounds = take_turns_within(TIME, LEAST_SHORT_ROUNDS, pairs.div_ceil(2), contestants)?;
    report.fact("local_pairs", rounds.count());
    let gib = subject.bytes() as f64 / (1u64 << 30) as f64;
    report.median("local_ratio", rounds.speed("local", "embedded"));
    report.control("local_control", rounds.speed("again", "embedded"));
    report.median("local_copied_ratio", rounds.speed("copied", "local"));
    report.median("local_copied_mib_s", rounds.figure("copied", |one| gib * 1024.0 / one.seconds));
    report.median("local_copied_cpu_s_per_gib", rounds.figure("copied", |one| one.cpu / gib));
    report.median("local_mib_s", rounds.figure("local", |one| gib * 1024.0 / one.seconds));
    report.median("embedded_mib_s", rounds.figure("embedded", |one| gib * 1024.0 / one.seconds));
    report.median("local_cpu_s_per_gib", rounds.figure("local", |one| one.cpu / gib));
    overheads(engine, &client, (page, match_pages), report)
}

/// What warm calls cost: a lookup of many keys, and a read of one block.
fn overheads(
    engine: &kvarts_store::engine::Store,
    client: &Client,
    (page, match_pages): (&Filled<'_>, &Filled<'_>),
    report: &mut Report,
) -> Result<(), Failure> {
    let (page, many) = (Subject::new(client, page)?, Subject::new(client, match_pages)?);
    let pool = client.pool(page.bytes()).map_err(Failure::user)?;
    let find = |store: &dyn KvStore| {
        let request = MatchRequest {
            namespace: many.namespace,
            keys: &many.keys,
            requirements: &many.requirements,
            recompute_tokens_max: u64::MAX,
            lease: None,
            plan: None,
        };
        let found = store.match_prefix(&request).map_err(Failure::user)?;
        let (usable, all) = (found.usable.longest.blocks as usize, many.keys.len());
        match usable == all {
            true => Ok(()),
            false => Err(Failure::User(format!("a look-up found only {usable} of {all} blocks"))),
        }
    };
    let read = |store: &dyn KvStore| whole(store, page.read(&pool, 1)?);
    let (mut pings, mut pongs) = (Ping::new(33 << 10)?, Ping::new(256)?);
    // In turns, so that all meet the same noise.
    let kinds = 6;
    let mut all: Vec<Vec<_>> = (0..kinds).map(|_| Vec::with_capacity(CALLS)).collect();
    for turn in 0..CALLS * kinds {
        let kind = turn / IN_A_ROW % kinds;
        if let Some(times) = all.get_mut(kind) {
            let start = Instant::now();
            match kind {
                0 => find(client)?,
                1 => find(engine)?,
                2 => pings.pong()?,
                3 => read(client)?,
                4 => read(engine)?,
                _ => pongs.pong()?,
            }
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let p50 = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let p50: Vec<f64> = all.iter_mut().map(p50).collect();
    let [local_match, engine_match, ping, local_read, engine_read, pong] = p50[..] else {
        return Err(Failure::user("a measurement is missing"));
    };
    let of_match = (local_match - engine_match) / ping;
    let of_read = (local_read - engine_read) / pong;
    report.number("local_overhead_ratio", of_match.max(of_read));
    report.number("local_overhead_match_ratio", of_match);
    report.number("local_overhead_read_ratio", of_read);
    report.number("local_read_over_engine_us", (local_read - engine_read) * 1e6);
    for (name, seconds) in [
        ("local_match_us", local_match),
        ("engine_match_us", engine_match),
        ("ping_large_us", ping),
        ("local_read_us", local_read),
        ("engine_read_us", engine_read),
        ("ping_us", pong),
    ] {
        report.number(name, seconds * 1e6);
    }
    Ok(())
}

/// A bare ping-pong: a message over a socket to another thread, an eventfd back.
pub(super) struct Ping {
    socket: UnixStream,
    event: std::sync::Arc<std::os::fd::OwnedFd>,
    message: Vec<u8>,
}

impl Ping {
    pub(super) fn new(bytes: usize) -> Result<Self, Failure> {
        let (socket, mut other) = UnixStream::pair().map_err(Failure::user)?;
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map_err(Failure::user)?;
        let event = std::sync::Arc::new(event);
        let back = std::sync::Arc::clone(&event);
        let answer = move || {
            let mut message = vec![0; bytes];
            while other.read_exact(&mut message).is_ok() {
                if rustix::io::write(&back, &ONE).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("kvarts-bench".to_owned());
        thread.spawn(answer).map_err(Failure::user)?;
        Ok(Self { socket, event, message: vec![7; bytes] })
    }

    pub(super) fn pong(&mut self) -> Result<(), Failure> {
        self.socket.write_all(&self.message).map_err(Failure::user)?;
        rustix::io::read(&self.event, &mut [0; 8]).map(drop).map_err(Failure::user)
    }
}
