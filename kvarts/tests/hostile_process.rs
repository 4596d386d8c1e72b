//! The program under clients that mean no good, or no harm and do it all the same: crowds of idle connections, streams
//! that are never read, uploads that never end, resets, storms, garbage. It answers others meanwhile, stays within its
//! memory, keeps nothing of those who are gone, and writes no secret into its log.
//!
//! `KVARTS_HOSTILE_CONNECTIONS` says how many idle connections there are, 500 if it is not set (2,000 by night), 10,000 for the
//! full size; fewer where the process may not have that many descriptors, which is said on standard error.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::depth::depth;
use crate::raw::{PAGE, Raw, TIMEOUT, framed, key, keys, page, put_messages, registration, with_token};
use crate::scratch::Scratch;
use bytes::Bytes;
use kvarts_server::state::auth::TokenHash;
use kvarts_wire::digest::StreamDigest;
use kvarts_wire::proto;
use kvarts_wire::proto::models_client::ModelsClient;
use kvarts_wire::proto::reads_client::ReadsClient;
use kvarts_wire::proto::store_client::StoreClient;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};

const BLOCKS: u64 = 64;
/// The server's memory of requests.
const MEMORY: usize = 64 << 20;
/// What one idle connection may cost, and what all else may grow by: the transport's buffers of a thousand streams.
const CONNECTION_BYTES: usize = 24 << 10;
const SLACK: usize = 64 << 20;
/// Descriptors of this process that are not idle connections.
const DESCRIPTORS_KEPT: u64 = 2048;

const RED: &str = "kvarts_red_secret_of_this_test";
const BLUE: &str = "kvarts_blue_secret_of_this_test";
const GREEN: &str = "kvarts_green_secret_of_this_test";
const ENDED: &str = "kvarts_ended_secret_of_this_test";

/// A server in a process of its own, and a client that behaves.
struct Server {
    child: Child,
    grpc: String,
    metrics: String,
    log: PathBuf,
    runtime: Runtime,
    namespace: Bytes,
    channel: Channel,
    reads: ReadsClient<Channel>,
    store: StoreClient<Channel>,
    _scratch: Scratch,
}

fn configuration() -> String {
    let token = |tenant: &str, token: &str, more: &str| {
        let hash = TokenHash::of(token);
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = ['read', 'write']\nhash = '{hash}'\n{more}\n")
    };
    let tenants =
        ["red", "blue", "green"].map(|name| format!("[[tenants]]\nname = '{name}'\ncalls = 4096\n")).concat();
    let tokens = [
        token("red", RED, ""),
        token("blue", BLUE, ""),
        token("green", GREEN, ""),
        token("red", ENDED, "expires = 1"),
    ];
    tenants + &tokens.concat()
}

impl Server {
    fn start(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let file = scratch.0.join("kvarts.toml");
        std::fs::write(&file, configuration()).unwrap();
        let log = scratch.0.join("log");
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvarts"))
            .current_dir(&scratch.0)
            .args(["serve", "--config", file.to_str().unwrap(), "--log-level", "debug"])
            .args([
                "--listen-grpc",
                "127.0.0.1:0",
                "--listen-metrics",
                "127.0.0.1:0",
                "--listen-socket",
                "none",
            ])
            .args(["--budget", "64 MiB", "--segment", "1 MiB", "--memory", &MEMORY.to_string()])
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let word = |name: &str| {
            let start = format!("{name}=");
            let found = line.split_whitespace().find_map(|word| word.strip_prefix(start.as_str()));
            found.unwrap_or_else(|| panic!("no {name} in {line:?}")).to_owned()
        };
        let (grpc, metrics) = (word("grpc"), word("metrics"));
        let runtime = Runtime::new().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{grpc}")).unwrap();
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        let models = ModelsClient::new(channel.clone());
        let reply = runtime.block_on(models.clone().register_model(with_token(registration(), RED)));
        let namespace = reply.unwrap().into_inner().namespace;
        let (reads, store) = (ReadsClient::new(channel.clone()), StoreClient::new(channel.clone()));
        let mut server =
            Self { child, grpc, metrics, log, runtime, namespace, channel, reads, store, _scratch: scratch };
        server.put();
        server
    }

    fn put(&mut self) {
        let messages = put_messages(&self.namespace, 0..BLOCKS);
        let request = with_token(tokio_stream::iter(messages), RED);
        let reply = self.runtime.block_on(self.store.put(request)).unwrap().into_inner();
        assert!(reply.outcomes.iter().all(|one| one.error.is_none()), "{reply:?}");
    }

    fn read_request(&self, blocks: std::ops::Range<u64>) -> proto::ReadRequest {
        proto::ReadRequest { namespace: self.namespace.clone(), keys: keys(blocks), ..Default::default() }
    }

    /// The client that behaves reads one block and gets its bytes.
    fn expect_served(&mut self, number: u64) {
        let request = with_token(self.read_request(number..number + 1), RED);
        let found = self.runtime.block_on(async {
            let mut stream = self.reads.get(request).await?.into_inner();
            let mut bytes = Vec::new();
            while let Some(reply) = stream.message().await? {
                if let Some(proto::read_reply::Part::Data(data)) = reply.part {
                    bytes.extend_from_slice(&data.data);
                }
            }
            Ok::<_, tonic::Status>(bytes)
        });
        assert!(found.unwrap() == page(number), "other bytes");
    }

    fn metrics(&self) -> BTreeMap<String, u64> {
        let mut stream = TcpStream::connect(&self.metrics).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let value = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse::<f64>().ok()? as u64))
        };
        text.lines().filter_map(value).collect()
    }

    /// Waits until a figure of the metrics is what is wanted.
    fn until(&self, what: &str, wanted: impl Fn(&BTreeMap<String, u64>) -> bool) {
        let start = Instant::now();
        loop {
            let metrics = self.metrics();
            if wanted(&metrics) {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}: {metrics:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until nothing is kept of any client: no call, no memory, no connection but those of the one that behaves.
    fn until_free(&self) {
        let most = self.metrics()["kvarts_connections_limit"];
        self.until("everything comes back", |metrics| {
            let used = |part: &str| metrics[&format!("kvarts_request_memory_bytes{{part=\"{part}\"}}")];
            metrics["kvarts_calls_now"] == 0
                && used("large") == 0
                && used("small") == 0
                && metrics["kvarts_puts_waiting"] == 0
                && metrics["kvarts_connections_free"] == most - 1
        });
    }

    fn status(&self, field: &str) -> usize {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
    }

    /// Resident bytes now.
    fn resident(&self) -> usize {
        self.status("VmRSS")
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Stops it; the log of the whole run tells of no panic and no secret.
    fn end(mut self) -> String {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        let log = std::fs::read_to_string(&self.log).unwrap();
        assert!(log.contains("stopped, with a checkpoint"), "{log}");
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let hash = |token: &str| TokenHash::of(token).to_string();
        let secrets =
            [RED.to_owned(), BLUE.to_owned(), GREEN.to_owned(), ENDED.to_owned(), "not_a_token".to_owned()];
        let more = [hash(RED), hash(BLUE), hash(ENDED), hex(&key(0)), hex(&key(1))];
        for secret in secrets.iter().chain(&more) {
            assert!(!log.contains(secret.as_str()), "{secret} stands in the log");
        }
        assert!(!log.contains("panicked"), "{log}");
        log
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn idle_connections() -> usize {
    let wanted =
        std::env::var("KVARTS_HOSTILE_CONNECTIONS").map_or(depth(500, 2_000), |text| text.parse().unwrap());
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Not raised: then there are fewer.
    let _ = setrlimit(Resource::Nofile, limit);
    let most = getrlimit(Resource::Nofile)
        .current
        .map_or(wanted, |most| most.saturating_sub(DESCRIPTORS_KEPT) as usize);
    if most < wanted {
        eprintln!("SCALED DOWN: {most} connections instead of {wanted}; raise ulimit -n for all of them");
    }
    assert!(most >= 256, "the test needs 4096 descriptors: raise ulimit -n");
    most.min(wanted)
}

/// Reads of another tenant's model: refused, and forgotten. On connections of their own, which may be hung up on: data of
/// a call that was refused long ago is an error of the connection.
fn refused(server: &Server, read: &[u8]) -> Vec<Raw> {
    let mut all: Vec<Raw> = (0..50).map(|_| Raw::connect(&server.grpc)).collect();
    for raw in &mut all {
        for number in 0..20 {
            raw.call(number * 2 + 1, "/kvarts.v1.Reads/Get", Some(BLUE));
            raw.data(number * 2 + 1, read, true);
        }
    }
    all
}

#[test]
fn crowds_slow_readers_and_endless_uploads_cost_bounded_memory_and_leave_nothing() {
    let mut server = Server::start("crowds");
    server.expect_served(0);
    let (before, descriptors) = (server.resident(), server.descriptors());
    let count = idle_connections();
    let idle: Vec<Raw> = (0..count).map(|_| Raw::connect(&server.grpc)).collect();
    let left = server.metrics()["kvarts_connections_limit"];
    server.until("all idle connections are in", |metrics| {
        metrics["kvarts_connections_free"] as usize == left as usize - count - 1
    });
    server.expect_served(1);
    let crowd = server.resident();
    // A thousand reads of 4 MiB that their clients do not take, and uploads that send a byte now and then.
    // So few on a connection that their requests fit into the window that it begins with.
    let mut slow: Vec<Raw> = (0..50).map(|_| Raw::connect(&server.grpc)).collect();
    let read = framed(&server.read_request(0..BLOCKS));
    for raw in &mut slow {
        for number in 0..20 {
            raw.call(number * 2 + 1, "/kvarts.v1.Reads/Get", Some(RED));
            raw.data(number * 2 + 1, &read, true);
        }
    }
    let refused = refused(&server, &read);
    let mut uploads: Vec<Raw> = (0..10).map(|_| Raw::connect(&server.grpc)).collect();
    let header = proto::PutHeader {
        namespace: server.namespace.clone(),
        keys: keys(1000..1000 + BLOCKS),
        ..Default::default()
    };
    let part = proto::put_request::Part::Header(header);
    let header = proto::PutRequest { crc32: StreamDigest::of_put().put(&part), part: Some(part) };
    for raw in &mut uploads {
        for stream in 0..20 {
            raw.call(stream * 2 + 1, "/kvarts.v1.Store/Put", Some(RED));
            raw.data(stream * 2 + 1, &framed(&header), false);
            // A message of 4 MiB begins.
            raw.data(stream * 2 + 1, &[0, 0, 0x40, 0, 0], false);
        }
    }
    server.until("their calls are under way", |metrics| metrics["kvarts_calls_now"] >= 1000);
    let mut most = 0;
    for second in 0..3 {
        for raw in &mut uploads {
            for stream in 0..20 {
                raw.data(stream * 2 + 1, &[second], false);
            }
        }
        server.expect_served(2 + u64::from(second));
        most = most.max(server.resident());
        std::thread::sleep(Duration::from_millis(200));
    }
    eprintln!(
        "{count} idle connections: {} KiB each; then {} MiB resident with 1000 streams and 200 uploads, {} MiB before",
        (crowd.saturating_sub(before) / count) >> 10,
        most >> 20,
        before >> 20
    );
    let idle_bytes = crowd.saturating_sub(before);
    assert!(idle_bytes <= count * CONNECTION_BYTES + (16 << 20), "{idle_bytes} bytes for idle ones");
    assert!(
        most <= before + count * CONNECTION_BYTES + MEMORY + SLACK,
        "{most} bytes resident, {before} before"
    );
    // All of them go at once, in the middle of whatever they were doing.
    drop((idle, slow, refused, uploads));
    server.until_free();
    server.expect_served(5);
    assert!(
        server.descriptors() <= descriptors + 8,
        "{} descriptors, {descriptors} before",
        server.descriptors()
    );
    server.end();
}

#[test]
fn garbage_resets_and_storms_disturb_nobody() {
    let mut server = Server::start("garbage");
    server.expect_served(0);
    // Not HTTP/2 at all, or not for long.
    let mut noise = vec![0; 64 << 10];
    blake3::Hasher::new().update(b"noise").finalize_xof().fill(&mut noise);
    for garbage in
        [&noise[..], b"GET /metrics HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
    {
        let mut stream = TcpStream::connect(&server.grpc).unwrap();
        // It may hang up before everything is sent.
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        Raw(stream).until_closed();
    }
    for (kind, flags, stream, body) in [
        (1u8, 4u8, 1u32, &noise[..1000]), // headers that are none
        (0, 0, 7, &noise[..10]),          // data of no stream
        (4, 0, 0, &noise[..7]),           // settings of a size that none have
        (8, 0, 0, &[0, 0, 0, 0]),         // a window that grows by nothing
        (9, 4, 1, &noise[..10]),          // a continuation of nothing
        (3, 0, 0, &[0, 0, 0, 8]),         // a reset of the connection
    ] {
        let mut raw = Raw::connect(&server.grpc);
        raw.frame(kind, flags, stream, body);
        raw.until_closed();
    }
    let mut raw = Raw::connect(&server.grpc);
    let _ = raw.0.write_all(&[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]);
    raw.until_closed();
    server.expect_served(1);
    // Streams that are opened and reset, faster than any server could serve them.
    let read = framed(&server.read_request(0..BLOCKS));
    for _ in 0..10 {
        let mut raw = Raw::connect(&server.grpc);
        for stream in 0..500 {
            raw.call(stream * 2 + 1, "/kvarts.v1.Reads/Get", Some(RED));
            raw.data(stream * 2 + 1, &read, true);
            raw.reset(stream * 2 + 1);
        }
    }
    // Clients that come and go.
    for number in 0..1000 {
        let mut raw = Raw::connect(&server.grpc);
        match number % 4 {
            0 => raw.call(1, "/kvarts.v1.Store/Put", Some(RED)),
            1 => raw.call(1, "/kvarts.v1.Reads/GetLayers", Some("not_a_token")),
            2 => raw.call(1, "/kvarts.v1.Admin/Watch", Some(BLUE)),
            _ => {}
        }
    }
    server.expect_served(2);
    server.until_free();
    server.end();
}

#[test]
fn each_who_may_not_come_in_gets_the_right_status_and_a_line_in_the_log() {
    let mut server = Server::start("refused");
    let request = server.read_request(0..1);
    let (runtime, reads) = (&server.runtime, server.reads.clone());
    let code = |token: Option<&str>, request: &proto::ReadRequest| {
        let request = match token {
            Some(token) => with_token(request.clone(), token),
            None => Request::new(request.clone()),
        };
        let reply = runtime.block_on(async { reads.clone().get(request).await });
        reply.err().map_or(Code::Ok, |status| status.code())
    };
    assert_eq!(code(None, &request), Code::Unauthenticated);
    for token in ["not_a_token", "", ENDED] {
        assert_eq!(code(Some(token), &request), Code::Unauthenticated);
    }
    // Another tenant's model is as unknown as one that is not there.
    assert_eq!(code(Some(BLUE), &request), Code::InvalidArgument);
    assert_eq!(code(Some(RED), &request), Code::Ok);
    for (name, bad) in [
        ("an unknown model", proto::ReadRequest { namespace: vec![3; 32].into(), ..request.clone() }),
        ("layers past the end", {
            let layers = Some(proto::read_request::LayerRange { start: 0, end: u32::MAX });
            proto::ReadRequest { layers, ..request.clone() }
        }),
        ("a column that overflows", {
            let coordinate = Some(proto::Coordinate { start: u32::MAX, count: u32::MAX, of: 1 });
            proto::ReadRequest { column: Some(proto::Column { group: 0, coordinate }), ..request.clone() }
        }),
    ] {
        assert_eq!(code(Some(RED), &bad), Code::InvalidArgument, "{name}");
    }
    let mut admin = proto::admin_client::AdminClient::new(
        server
            .runtime
            .block_on(Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap().connect())
            .unwrap(),
    );
    let stats = admin.stats(with_token(proto::StatsRequest {}, RED));
    assert_eq!(server.runtime.block_on(stats).unwrap_err().code(), Code::PermissionDenied);
    // A message that says it is compressed: the server does not unpack it.
    let mut raw = Raw::connect(&server.grpc);
    raw.call(1, "/kvarts.v1.Reads/Get", Some(RED));
    raw.data(1, &[1, 0, 0, 0, 4, 0x1f, 0x8b, 8, 0], true);
    // Knocking without end makes no more lines than an operator can read.
    for _ in 0..300 {
        assert_eq!(code(Some("not_a_token"), &request), Code::Unauthenticated);
    }
    server.expect_served(0);
    drop(raw);
    let metrics = server.metrics();
    assert!(metrics["kvarts_calls_refused_total{method=\"get\",want=\"token\"}"] >= 304, "{metrics:#?}");
    assert_eq!(metrics["kvarts_calls_refused_total{method=\"stats\",want=\"right\"}"], 1);
    let log = server.end();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("call refused")).collect();
    let tells = |words: &str| lines.iter().any(|line| line.contains("audit") && line.contains(words));
    assert!(
        tells("a token is required") && tells("not valid on this server") && tells("right `admin`"),
        "{log}"
    );
    assert!(lines.len() >= 6, "{log}");
}

/// Reads of a whole prefix that their clients do not take, 20 on each of 20 connections.
fn slow_readers(server: &Server, token: &str, read: &[u8]) -> Vec<Raw> {
    let mut all: Vec<Raw> = (0..20).map(|_| Raw::connect(&server.grpc)).collect();
    for raw in &mut all {
        for number in 0..20 {
            raw.call(number * 2 + 1, "/kvarts.v1.Reads/Get", Some(token));
            raw.data(number * 2 + 1, read, true);
        }
    }
    all
}

/// Puts that begin a message and do not end it.
fn slow_putters(server: &Server, token: &str, namespace: &Bytes) -> Vec<Raw> {
    let header =
        proto::PutHeader { namespace: namespace.clone(), keys: keys(1000..1064), ..Default::default() };
    let part = proto::put_request::Part::Header(header);
    let header = proto::PutRequest { crc32: StreamDigest::of_put().put(&part), part: Some(part) };
    let mut all: Vec<Raw> = (0..10).map(|_| Raw::connect(&server.grpc)).collect();
    for raw in &mut all {
        for stream in 0..20 {
            raw.call(stream * 2 + 1, "/kvarts.v1.Store/Put", Some(token));
            raw.data(stream * 2 + 1, &framed(&header), false);
            raw.data(stream * 2 + 1, &[0, 0, 0x10, 0, 0, 1], false);
        }
    }
    all
}

#[test]
fn what_two_tenants_hold_costs_a_third_neither_reads_nor_puts() {
    let mut server = Server::start("three");
    // Blue has the same model, and what red and blue read is theirs.
    let of = |server: &Server, token| {
        let models = ModelsClient::new(server.channel.clone());
        let reply = server
            .runtime
            .block_on(async move { models.clone().register_model(with_token(registration(), token)).await });
        reply.unwrap().into_inner().namespace
    };
    let (blue, green) = (of(&server, BLUE), of(&server, GREEN));
    for (token, namespace) in [(BLUE, &blue), (GREEN, &green)] {
        let request = with_token(tokio_stream::iter(put_messages(namespace, 0..BLOCKS)), token);
        let reply = server.runtime.block_on(server.store.put(request)).unwrap().into_inner();
        assert!(reply.outcomes.iter().all(|one| one.error.is_none()), "{reply:?}");
    }
    let read = |namespace: &Bytes| proto::ReadRequest {
        namespace: namespace.clone(),
        keys: keys(0..BLOCKS),
        ..Default::default()
    };
    let red = framed(&read(&server.namespace));
    let readers = [slow_readers(&server, RED, &red), slow_readers(&server, BLUE, &framed(&read(&blue)))];
    let putters = [slow_putters(&server, RED, &server.namespace), slow_putters(&server, BLUE, &blue)];
    server.until("they hold what they get", |metrics| {
        metrics["kvarts_calls_now"] >= 500 && metrics["kvarts_puts_waiting"] > 100
    });
    // Green reads 4 MiB and puts as much, as often as it likes.
    for round in 1..4 {
        let mut reads = server.reads.clone();
        let request = with_token(read(&green), GREEN);
        let bytes = server.runtime.block_on(async {
            let mut stream = reads.get(request).await?.into_inner();
            let mut bytes = 0;
            while let Some(reply) = stream.message().await? {
                if let Some(proto::read_reply::Part::Data(data)) = reply.part {
                    bytes += data.data.len();
                }
            }
            Ok::<_, tonic::Status>(bytes)
        });
        assert_eq!(bytes.unwrap(), BLOCKS as usize * PAGE);
        let messages = put_messages(&green, round * 100..round * 100 + 16);
        let request = with_token(tokio_stream::iter(messages), GREEN);
        let reply = server.runtime.block_on(server.store.put(request)).unwrap().into_inner();
        assert!(reply.outcomes.iter().all(|one| one.error.is_none()), "{reply:?}");
    }
    drop((readers, putters));
    server.until_free();
    server.end();
}
