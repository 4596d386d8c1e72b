//! All troubles at once: three hostile tenants, a member that is stopped, a peer whose disk hangs, a bucket that answers 503, and connections
//! that say nothing, while a tenant that behaves reads and puts as before, and an operator asks.
//!
//! What hostile tenants do is drawn from `KVARTS_SEED`. By night it lasts a minute with 10,000 connections, and the times are held to
//! what is promised; before each change it is short, and nothing is timed.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvarts_client::Client;
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, KvStore, Order, Placed, PutRequest, ReadEnd, ReadEvent, ReadRequest,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::identity::Arrangement;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_wire::digest::StreamDigest;
use kvarts_wire::proto;
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::depth::{depth, is_nightly};
use crate::proxy::{Fault, Proxy};
use crate::raw::{PAGE, Raw, framed};
use crate::scratch::Scratch;
use crate::served::http;
use ground::{HungDisk, MEMORY, Node, cluster, peers_address};

mod ground;

pub(crate) const GREEN: &str = "kvarts_green_secret_of_this_test";
pub(crate) const HOSTILE: [(&str, &str); 3] = [
    ("red", "kvarts_red_secret_of_this_test"),
    ("blue", "kvarts_blue_secret_of_this_test"),
    ("yellow", "kvarts_yellow_secret_of_this_test"),
];

/// Blocks of one prefix, a MiB.
const BLOCKS: usize = 16;
/// What all that is under way may take beside the memory of requests: the transport's buffers, and threads of what waits.
const SLACK: usize = 128 << 20;
const CONNECTION_BYTES: usize = 24 << 10;

fn column() -> (Group, Coordinate) {
    (Group(0), Coordinate::Replicated)
}

fn keys(prefix: u64) -> Vec<BlockKey> {
    (0..BLOCKS as u64).map(|block| BlockKey(crate::raw::key(prefix << 16 | block))).collect()
}

fn memory() -> (SharedBuf, Placed) {
    let bytes = PAGE * BLOCKS;
    let buf = SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
    (buf.clone(), Placed::blocks(&BlockShape::opaque(PAGE as u64).unwrap(), buf, BLOCKS as u32).unwrap())
}

/// A tenant, as one node knows it.
struct Tenant {
    client: Client,
    namespace: NamespaceId,
    content: Vec<Vec<u8>>,
}

impl Tenant {
    fn of(node: &Node, token: &str) -> Self {
        let client = node.client(token);
        let geometry = Geometry::opaque(PAGE as u64).unwrap();
        let identity =
            Identity::new("pages", "1", "bf16", Arrangement::new("test", "flat", "1"), &geometry, 16);
        let namespace = client.register(&identity, &geometry).unwrap();
        Self { client, namespace, content: (0..BLOCKS as u64).map(crate::raw::page).collect() }
    }

    fn put(&self, prefix: u64) {
        let ((group, coordinate), (buf, from)) = (column(), memory());
        self.content.iter().enumerate().for_each(|(at, page)| buf.copy_in(at * PAGE, page));
        let put = PutRequest::new(self.namespace, group, coordinate, keys(prefix), from);
        let reply = block_on(self.client.put(put)).unwrap().unwrap();
        let is_good =
            |outcome: &BlockOutcome| matches!(outcome, BlockOutcome::Stored | BlockOutcome::AlreadyThere);
        assert!(reply.outcomes.iter().all(is_good), "{:?}", reply.outcomes);
    }

    /// Reads a prefix; what comes is what was put.
    fn read(&self, prefix: u64, within: Option<Duration>) -> ReadEnd {
        let deadline = within.map(|within| self.client.clock().now().plus(within));
        let ((group, coordinate), (buf, into)) = (column(), memory());
        let request = ReadRequest {
            order: Order::Blocks,
            deadline,
            ..ReadRequest::new(self.namespace, group, coordinate, keys(prefix), into)
        };
        let stream = self.client.read(request).unwrap();
        let mut found = vec![0; PAGE];
        loop {
            match stream.next_blocking() {
                ReadEvent::Block(block) => {
                    buf.copy_out(block as usize * PAGE, &mut found);
                    assert!(found == self.content[block as usize], "a wrong byte in block {block}");
                }
                ReadEvent::Layer { .. } | ReadEvent::Released => {}
                ReadEvent::End(end) => return end,
            }
        }
    }

    fn has(&self, prefix: u64) -> bool {
        self.read(prefix, None).failures.is_empty()
    }

    fn until_read(&self, what: &str, prefix: u64) {
        let begun = Instant::now();
        while !self.has(prefix) {
            assert!(begun.elapsed() < Duration::from_secs(90), "{what} cannot be read");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Numbers from a seed.
struct Draw(u64);

impl Draw {
    fn of(seed: u64, who: &str) -> Self {
        let digest = blake3::hash(format!("{seed} {who}").as_bytes());
        Self(u64::from_le_bytes(*digest.as_bytes().first_chunk().unwrap()))
    }

    fn below(&mut self, most: u64) -> u64 {
        // Enough for a choice: splitmix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 27)) >> 8) % most
    }
}

/// What one hostile tenant does until `over` is set: reads that it does not take, puts that it does not end, calls that it takes
/// back, matches of many keys, reads of what only hung and stopped nodes have.
fn be_hostile(node: &Node, token: &str, mut draw: Draw, over: &AtomicBool, acts: &AtomicUsize) {
    let tenant = Tenant::of(node, token);
    tenant.put(1);
    let namespace = Bytes::copy_from_slice(tenant.namespace.as_bytes());
    let read = framed(&proto::ReadRequest {
        namespace: namespace.clone(),
        keys: keys(1).iter().flat_map(|key| key.0).collect(),
        ..Default::default()
    });
    let header = proto::PutHeader {
        namespace: namespace.clone(),
        keys: keys(5).iter().flat_map(|key| key.0).collect(),
        ..Default::default()
    };
    let part = proto::put_request::Part::Header(header);
    let header = framed(&proto::PutRequest { crc32: StreamDigest::of_put().put(&part), part: Some(part) });
    let mut held = Vec::new();
    while !over.load(Ordering::SeqCst) {
        match draw.below(6) {
            what @ 0..=2 => {
                let mut raw = Raw::connect(node.place("grpc"));
                for stream in (1..40).step_by(2) {
                    let (path, begins) = match what {
                        0 => ("/kvarts.v1.Store/Put", &header),
                        _ => ("/kvarts.v1.Reads/Get", &read),
                    };
                    raw.call(stream, path, Some(token));
                    raw.data(stream, begins, what != 0);
                    if what == 2 {
                        raw.reset(stream);
                    }
                }
                held.push(raw);
                if held.len() > 32 {
                    held.swap_remove(draw.below(32) as usize);
                }
            }
            3 => {
                let many: Vec<BlockKey> = (0..4_096).flat_map(|prefix| keys(prefix << 8)).collect();
                let ((group, coordinate), namespace) = (column(), tenant.namespace);
                let request = ContainsRequest { namespace, group, coordinate, keys: &many, lease: None };
                // Refused or answered: it is its own.
                let _ = tenant.client.contains(&request);
            }
            // It waits for its own memory, which its other reads have.
            _ => drop(tenant.read(draw.below(4), Some(Duration::from_secs(1)))),
        }
        acts.fetch_add(1, Ordering::SeqCst);
    }
}

/// Connections that say nothing, to every port of a node; as many as this process may have.
struct Silent {
    _tcp: Vec<TcpStream>,
    _local: Vec<UnixStream>,
}

impl Silent {
    fn connect(node: &Node, peers: &str, count: usize) -> (usize, Self) {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        // Not raised: then there are fewer.
        let _ = setrlimit(Resource::Nofile, limit);
        let most =
            getrlimit(Resource::Nofile).current.map_or(count, |most| most.saturating_sub(1024) as usize);
        if most < count {
            eprintln!("SCALED DOWN: {most} connections instead of {count}; raise ulimit -n for all of them");
        }
        let count = count.min(most);
        let ports = [node.place("grpc"), node.place("metrics"), peers];
        let tcp = (0..count * 4 / 5).map(|at| TcpStream::connect(ports[at % 3]).unwrap());
        let tcp: Vec<TcpStream> = tcp.collect();
        // A full queue of a socket says so at once: then nothing is held up.
        let local = (0..count / 5).filter_map(|_| UnixStream::connect(node.socket()).ok());
        let local: Vec<UnixStream> = local.collect();
        (tcp.len() + local.len(), Self { _tcp: tcp, _local: local })
    }
}

/// How long things took.
#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    fn note<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let done = work();
        self.0.push(begun.elapsed());
        done
    }

    fn at(&self, share: f64) -> Duration {
        let mut all = self.0.clone();
        all.sort_unstable();
        all[((all.len() - 1) as f64 * share) as usize]
    }
}

/// The tenant that behaves: it reads what is on the first node, and puts.
#[derive(Default)]
struct Course {
    reads: Times,
    puts: Times,
    /// Reads of what nodes have that do not answer.
    beyond: Times,
    next: u64,
}

impl Course {
    fn go(&mut self, green: &Tenant, times: usize) {
        for _ in 0..times {
            assert!(self.reads.note(|| green.has(1)), "what is on the node that is asked is read");
            if self.reads.0.len().is_multiple_of(4) {
                self.next += 1;
                self.puts.note(|| green.put(1_000 + self.next));
            }
        }
    }
}

/// Ends what others do when it is dropped, however that comes.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Asks for the health of a node all the time, until it is told to stop; gives the longest time that an answer took.
fn ask_for_health(node: &Node, over: &AtomicBool) -> Times {
    let mut times = Times::default();
    while !over.load(Ordering::SeqCst) {
        let answer = times.note(|| http(node.place("metrics"), "GET /health"));
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
    times
}

#[test]
fn whatever_goes_wrong_at_once_a_tenant_that_behaves_is_served_and_nothing_is_left_behind() {
    let seed = std::env::var("KVARTS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let scratch = Scratch::new("trouble");
    let bucket = Proxy::start(1);
    bucket.set(Some((Fault::Busy, (None, "/"))));
    let nodes = cluster(&scratch.0, bucket.port);
    let [asked, stopped, hung] = &nodes;
    let green = Tenant::of(asked, GREEN);
    green.put(1);
    for (node, prefix) in [(stopped, 2), (hung, 3)] {
        Tenant::of(node, GREEN).put(prefix);
        HOSTILE.iter().for_each(|(_, token)| Tenant::of(node, token).put(prefix));
        green.until_read("what another node has", prefix);
    }
    let mut idle = Course::default();
    idle.go(&green, depth(20, 1_000));
    let (resident, descriptors) = (asked.resident(), asked.descriptors());
    let free = asked.metrics()["kvarts_connections_free"];

    let peers = peers_address(&scratch.0, 1);
    let (connections, silent) = Silent::connect(asked, &peers, depth(300, 10_000));
    stopped.signal("-STOP");
    let disk = HungDisk::of(hung);
    let (over, acts) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut course = Course { next: idle.next, ..Course::default() };
    let mut most = 0;
    let health = std::thread::scope(|scope| {
        for (name, token) in HOSTILE {
            let (over, acts) = (&over, &acts);
            scope.spawn(move || be_hostile(asked, token, Draw::of(seed, name), over, acts));
        }
        let health = scope.spawn(|| ask_for_health(asked, &over));
        let ending = Ending(&over);
        let until = Instant::now() + depth(Duration::ZERO, Duration::from_secs(60));
        loop {
            course.go(&green, depth(20, 100));

            most = most.max(asked.resident());
            // What others have comes, or is a miss; a wrong byte is looked for by the read itself.
            [2, 3].iter().for_each(|prefix| drop(course.beyond.note(|| green.read(*prefix, None))));
            for command in [["stat", "--json"], ["cluster", "status"]] {
                asked.operator(&command);
            }
            if Instant::now() >= until && acts.load(Ordering::SeqCst) >= depth(30, 1_000) {
                break;
            }
        }
        drop(ending);
        health.join().unwrap()
    });
    let bound = resident + MEMORY + SLACK + connections * CONNECTION_BYTES;
    assert!(most <= bound, "{most} bytes resident, {resident} before");

    drop((silent, disk));
    stopped.signal("-CONT");
    asked.until("nothing is left behind", |metrics| {
        metrics["kvarts_calls_now"] == 0.0 && metrics["kvarts_connections_free"] >= free
    });
    green.until_read("what was on the node that stood still", 2);
    green.until_read("what was on the disk that hung", 3);
    // Connections to other nodes for bytes are made when they are first wanted.
    asked.until_few(descriptors + 48);
    tell(&idle, &course, &health, (acts.into_inner(), connections, most));
}

/// What it took; by night it is held to what is promised.
fn tell(idle: &Course, course: &Course, health: &Times, (acts, connections, most): (usize, usize, usize)) {
    let show = |what: &str, idle: &Times, now: &Times| {
        let (idle, now) = (idle.at(0.99), now.at(0.99));
        let ratio = now.as_secs_f64() / idle.as_secs_f64();
        eprintln!("{what}: p99 {idle:?} idle, {now:?} in trouble, {ratio:.2} times");
        ratio
    };
    let ratios = [show("reads", &idle.reads, &course.reads), show("puts", &idle.puts, &course.puts)];
    let longest = health.at(1.0);
    eprintln!("reads of what is with nodes that do not answer: {:?} at most", course.beyond.at(1.0));
    eprintln!(
        "health: {} answers, the longest after {longest:?}; {acts} hostile acts, {connections} silent connections, {} MiB resident",
        health.0.len(),
        most >> 20
    );
    if is_nightly() {
        assert!(longest <= Duration::from_millis(300), "{longest:?}");
        assert!(ratios.iter().all(|ratio| *ratio <= 3.0), "{ratios:?}");
    }
}
