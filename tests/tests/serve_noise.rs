//! Bytes that are no conversation, at the port of gRPC: noise, frames that cannot be, a recorded conversation with
//! changes, and messages of any bytes. The server hangs up or answers with a status that blames the client, serves clients
//! that behave, stores nothing that was not put correctly, and keeps nothing.
//!
//! `KVARTS_NOISE` says how many inputs there are of each kind (30, by night 120), `KVARTS_NOISE_SEED` with which they begin (0).

#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plain::{METHODS, answer};
use crate::proxied::{Proxy, panics};
use crate::served::{Beside, ClientStage, Served};
use bytes::Bytes;
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, KvStore, Order, ReadRequest, Target,
};
use kvarts_contract::error::Reason;
use kvarts_tests::audit;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::depth::depth;
use kvarts_tests::sim::rng::{Rng, Seed};
use kvarts_tests::stage::ask;
use kvarts_wire::limits;
use kvarts_wire::proto;
use prost::Message;
use tonic::Code;
use tonic::transport::Endpoint;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How long a conversation may take that is not as it was.
const LISTENS: Duration = Duration::from_millis(200);
/// Blocks of the conversation.
const BLOCKS: u64 = 4;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// Inputs of each kind.
fn inputs() -> std::ops::Range<u64> {
    let first = number("KVARTS_NOISE_SEED", 0);
    first..first + number("KVARTS_NOISE", depth(30, 120))
}

fn random(rng: &mut Rng, length: usize) -> Vec<u8> {
    (0..length).map(|_| rng.next_u64() as u8).collect()
}

/// Sends bytes and nothing more, and reads until the server hangs up.
fn say(served: &Served, bytes: &[u8]) {
    say_until(served, bytes, || true);
}

/// The same; the server hears that no more comes when `done`, or after a while: a call may wait for what is never sent.
fn say_until(served: &Served, bytes: &[u8], mut done: impl FnMut() -> bool + Send) {
    let mut stream = TcpStream::connect(served.daemon().grpc().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut beside = stream.try_clone().unwrap();
    let (heard, hear) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // It may hang up before everything is sent, which is its right.
            let (first, rest) = bytes.split_at(bytes.len().min(PREFACE.len() + 9));
            let _ = beside.write_all(first);
            // What acknowledges the server's settings must not come before them. It may hang up on what it has, too.
            let _ = hear.recv_timeout(Duration::from_millis(50));
            let _ = beside.write_all(rest);
            let start = Instant::now();
            while !done() && start.elapsed() < LISTENS {
                std::thread::sleep(Duration::from_millis(5));
            }
            // A client that has closed its side is not answered any more.
            let _ = beside.shutdown(Shutdown::Write);
        });
        let mut answer = [0; 16384];
        loop {
            let answered = stream.read(&mut answer);
            // Whatever it is; perhaps no thread waits for it any more.
            let _ = heard.send(());
            match answered {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "the server does not hang up");
                    return;
                }
            }
        }
    });
}

/// A server, and a client that behaves.
struct Scene {
    stage: ClientStage,
    panics: usize,
}

impl Scene {
    fn open(name: &str) -> Self {
        let panics = panics();
        let stage = ClientStage::open(name);
        let desk = Desk::new(&stage, "undisturbed");
        let keys = desk.keys(0..4);
        assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
        Self { stage, panics }
    }

    fn expect_served(&self) {
        let desk = Desk::new(&self.stage, "undisturbed");
        desk.expect(pages(), &desk.keys(0..4), 1);
        assert_eq!(panics(), self.panics, "something panicked");
    }

    fn expect_free(&self) {
        self.stage.served.until("everything comes back", |daemon| {
            let state = daemon.state();
            let holding = state.engine.holding();
            state.memory.usage().iter().all(|usage| usage.used == 0)
                && state.calls() == 0
                && state.puts.left().1 == 0
                && (holding.claims, holding.promised, holding.reserved) == (0, 0, 0)
                && state.connections.all() - state.connections.free() <= 1
        });
    }

    fn end(mut self) {
        self.expect_served();
        self.expect_free();
        audit::books(&self.stage.served.daemon().state().engine).unwrap();
        let metrics = self.stage.served.metrics();
        let defects = |line: &&str| line.starts_with("kvarts_calls_total") && line.contains("INTERNAL");
        assert_eq!(metrics.lines().find(defects), None);
        self.stage.served.stop();
        assert_eq!(panics(), self.panics, "something panicked");
    }
}

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32).to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// Frames with heads that may be and bodies that may not.
fn frames(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = [PREFACE, &frame(4, 0, 0, &[])].concat();
    for _ in 0..rng.between(1, 20) {
        let length = [0, 4, 5, 6, 8, 9, 12, 100, 5000][rng.index(9)];
        let body = random(rng, length);
        let stream = [0, 1, 1, 3, 5, 2, 0x7fff_ffff, 0xffff_ffff][rng.index(8)];
        let mut one = frame(rng.below(14) as u8, rng.next_u64() as u8, stream, &body);
        if rng.below(10) == 0 {
            // Another length than it has.
            one[rng.index(3)] = rng.next_u64() as u8;
        }
        bytes.extend_from_slice(&one);
    }
    bytes
}

/// Things that are too large, or too many, each on purpose.
fn oversized() -> Vec<(&'static str, Vec<u8>)> {
    let begun = |more: Vec<u8>| [PREFACE, &frame(4, 0, 0, &[]), &more].concat();
    let literal = |name: &[u8], value: usize| {
        // A value of up to 16 KiB, its length in HPACK's way.
        let rest = value - 127;
        let length = [0x7f, (rest & 0x7f) as u8 | 0x80, (rest >> 7 & 0x7f) as u8];
        [&[0, name.len() as u8], name, &length, &vec![b'a'; value]].concat()
    };
    let setting = |id: u16, value: u32| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
    let big_header = literal(b"x", 16_000);
    vec![
        ("settings without end", begun(frame(4, 0, 0, &setting(0x99, 7).repeat(3000)))),
        ("settings of 16 MiB", begun([&[0xff, 0xff, 0xff, 4, 0, 0, 0, 0, 0][..], &[0; 60_000]].concat())),
        ("a window that overflows", begun(frame(4, 0, 0, &setting(4, u32::MAX)))),
        ("a frame size that cannot be", begun(frame(4, 0, 0, &setting(5, 1)))),
        ("a window larger than any", begun(frame(8, 0, 0, &0x7fff_ffffu32.to_be_bytes()).repeat(2))),
        ("settings again and again", begun(frame(4, 0, 0, &setting(3, 1)).repeat(5000))),
        ("pings again and again", begun(frame(6, 0, 0, &[7; 8]).repeat(5000))),
        ("a ping that is none", begun(frame(6, 0, 0, &[7; 9]))),
        (
            "headers of 64 KiB",
            begun([frame(1, 0, 1, &big_header), frame(9, 4, 1, &big_header.repeat(3))].concat()),
        ),
        (
            "headers that never end",
            begun([frame(1, 0, 1, b""), frame(9, 0, 1, &big_header).repeat(60)].concat()),
        ),
        (
            "headers of nothing that never end",
            begun([frame(1, 0, 1, b""), frame(9, 0, 1, b"").repeat(20_000)].concat()),
        ),
        ("a table of headers beyond bounds", begun(frame(1, 4, 1, &[0x3f, 0xff, 0xff, 0xff, 0xff, 0x0f]))),
        ("an index of no header", begun(frame(1, 4, 1, &[0xff, 0xff, 0xff, 0xff, 0x7f]))),
        ("more padding than frame", begun(frame(0, 8, 1, &[200, 1, 2]))),
        ("a stream before itself", begun(frame(2, 0, 1, &[0, 0, 0, 1, 9]))),
        ("a promise of a client", begun(frame(5, 4, 1, &[0, 0, 0, 2]))),
        ("half a preface", PREFACE[..13].to_vec()),
        ("a preface and half a frame", begun(vec![0, 1])),
    ]
}

#[test]
fn noise_and_frames_that_cannot_be_end_their_connection_and_no_other() {
    let scene = Scene::open("noise-frames");
    for (what, bytes) in oversized() {
        say(&scene.stage.served, &bytes);
        scene.expect_served();
        eprintln!("survived {what}");
    }
    for seed in inputs() {
        let mut rng = Seed(seed).child("noise").rng();
        let length = rng.index(4000);
        let noise = random(&mut rng, length);
        say(&scene.stage.served, &noise);
        say(&scene.stage.served, &[PREFACE, &noise].concat());
        say(&scene.stage.served, &frames(&mut rng));
        scene.expect_served();
    }
    scene.end();
}

/// What a client says who registers a model, puts blocks, looks for them and reads them, byte for byte.
fn recorded(scene: &Scene) -> Vec<u8> {
    let proxy = Proxy::start(scene.stage.served.daemon().grpc().unwrap());
    let options = ConnectOptions { via: Via::Grpc, ..ConnectOptions::to(proxy.endpoint()) };
    let through = Beside(Client::connect(&options).unwrap());
    let desk = Desk::new(&through, "recorded");
    let keys = desk.keys(0..BLOCKS);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; BLOCKS as usize]);
    let (group, coordinate) = pages();
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    through.0.contains(&request).unwrap();
    desk.expect(pages(), &keys, 1);
    desk.read(&ReadRequest { order: Order::Blocks, ..desk.read_request(pages(), &keys) });
    let bytes = proxy.carried().0;
    assert!(bytes.starts_with(PREFACE) && bytes.len() as u64 > BLOCKS * 24 * 1024, "{}", bytes.len());
    bytes
}

/// Where the frames of a conversation begin, and the end.
fn frames_of(bytes: &[u8]) -> Vec<usize> {
    let mut starts = vec![PREFACE.len()];
    while let Some([a, b, c, ..]) = bytes.get(*starts.last().unwrap()..) {
        starts.push(starts.last().unwrap() + 9 + u32::from_be_bytes([0, *a, *b, *c]) as usize);
    }
    assert_eq!(starts.last(), Some(&bytes.len()), "the record is not whole frames");
    starts
}

/// A conversation with something changed.
fn changed(rng: &mut Rng, bytes: &[u8], starts: &[usize]) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    let which = rng.index(starts.len() - 1);
    let (start, end) = (starts[which], starts[which + 1]);
    match rng.below(8) {
        // Flips anywhere, in a frame's head, in the first bytes of its body, where messages have their lengths.
        0 => (0..rng.between(1, 8)).for_each(|_| changed[rng.index(bytes.len())] ^= 1 << rng.below(8)),
        1 => changed[start + rng.index(9)] ^= 1 << rng.below(8),
        2 | 3 => changed[(start + 9 + rng.index(48)).min(bytes.len() - 1)] ^= 1 << rng.below(8),
        4 => changed.truncate(rng.index(bytes.len())),
        5 => drop(changed.drain(start..end)),
        6 => {
            let again = bytes[start..end].to_vec();
            let at = starts[rng.index(starts.len())];
            changed.splice(at..at, again);
        }
        _ => {
            let (at, length) = (rng.index(bytes.len()), rng.index(300));
            let noise = random(rng, length);
            changed.splice(at..at, noise);
        }
    }
    changed
}

#[test]
fn a_recorded_conversation_with_changes_never_stores_other_bytes() {
    let scene = Scene::open("noise-changed");
    let desk = Desk::new(&scene.stage, "recorded");
    let keys = desk.keys(0..BLOCKS);
    let bytes = recorded(&scene);
    let starts = frames_of(&bytes);
    let forget = || {
        let target = Target::Keys { column: None, keys: keys.clone() };
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        ask(&scene.stage, scene.stage.client.delete(request)).unwrap();
    };
    // As it was it stores again what it stored, if it is given the time.
    forget();
    let state = Arc::clone(scene.stage.served.daemon().state());
    let stored_now = || state.engine.stats().counts.blocks_stored;
    while desk.read(&desk.read_request(pages(), &keys)).1.usable_blocks == 0 {
        let before = stored_now();
        say_until(&scene.stage.served, &bytes, || stored_now() > before);
        scene.expect_free();
    }
    desk.expect(pages(), &keys, 1);
    let mut stored = 0;
    for seed in inputs() {
        forget();
        let mut rng = Seed(seed).child("changed").rng();
        let (before, mut quiet) = (stored_now(), 0);
        say_until(&scene.stage.served, &changed(&mut rng, &bytes, &starts), || {
            quiet += u32::from(state.calls() == 0);
            stored_now() > before || quiet > 3
        });
        scene.expect_served();
        scene.expect_free();
        let request = ReadRequest { order: Order::Blocks, ..desk.read_request(pages(), &keys) };
        let (_, end) = desk.read(&request);
        assert!(end.failures.iter().all(|(_, reason)| matches!(reason, Reason::NotHere(_))), "{end:?}");
        let failed = |block: &u32| end.failures.iter().any(|(failed, _)| failed == block);
        let there: Vec<u32> = (0..BLOCKS as u32).filter(|block| !failed(block)).collect();
        stored += there.len();
        desk.expect_bytes(&request, &there, 1);
    }
    eprintln!("{stored} blocks stored by conversations with changes");
    assert!(stored > 0, "no change left the put as it was");
    drop(state);
    scene.end();
}

#[test]
fn a_message_of_any_bytes_is_answered_with_a_status_that_is_the_clients() {
    let scene = Scene::open("noise-messages");
    let served = &scene.stage.served;
    let endpoint = Endpoint::from_shared(served.endpoint()).unwrap();
    let channel = served.runtime.block_on(endpoint.connect()).unwrap();
    let desk = Desk::new(&scene.stage, "undisturbed");
    let keys: Bytes = desk.keys(8..10).iter().flat_map(|key| key.0).collect::<Vec<u8>>().into();
    let namespace: Bytes = desk.namespace.as_bytes().to_vec().into();
    // A message that many methods understand: a namespace, a column, keys.
    let column = Some(proto::Column {
        group: pages().0.0,
        coordinate: Some(proto::Coordinate { start: 0, count: 2, of: 2 }),
    });
    let good = proto::ExistsRequest { namespace, column, keys, ..Default::default() }.encode_to_vec();
    let mut refused = 0;
    for seed in inputs() {
        let mut rng = Seed(seed).child("messages").rng();
        let mut message = good.clone();
        match rng.below(4) {
            0 => {
                let length = rng.index(200);
                message = random(&mut rng, length);
            }
            1 => message.truncate(rng.index(good.len())),
            _ => (0..rng.between(1, 4)).for_each(|_| message[rng.index(good.len())] ^= 1 << rng.below(8)),
        }
        for method in METHODS {
            if let Err(status) = answer(served, &channel, None, (method, message.clone())) {
                let code = status.code();
                assert!(
                    !matches!(code, Code::Internal | Code::Unknown | Code::DeadlineExceeded),
                    "{method}: {status:?}"
                );
                refused += 1;
            }
        }
    }
    assert!(refused > inputs().count() * 9, "{refused}");
    drop(channel);
    scene.end();
}

/// What the transport refuses before a handler sees it says so as a handler would.
#[test]
fn a_message_that_is_too_long_or_cannot_be_read_is_an_invalid_argument_with_its_reason() {
    let scene = Scene::open("noise-undecodable");
    let served = &scene.stage.served;
    let endpoint = Endpoint::from_shared(served.endpoint()).unwrap();
    let channel = served.runtime.block_on(endpoint.connect()).unwrap();
    for method in METHODS {
        for message in [vec![0xff; 40], vec![0; 9 << 20]] {
            let length = message.len();
            let status = answer(served, &channel, None, (method, message)).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{method}, {length} bytes: {status:?}");
            assert!(!status.details().is_empty(), "{method}: no details");
        }
    }
    drop(channel);
    scene.end();
}

/// The headers of a call, as HPACK writes what it has no index for.
fn headers(path: &str) -> Vec<u8> {
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "test"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let field = |(name, value): (&str, &str)| {
        [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    fields.into_iter().flat_map(field).collect()
}

/// Until a request of one message is whole, only the limits of its connection and of the memory for receiving bound it.
#[test]
fn requests_that_never_become_whole_share_bounded_memory_and_end() {
    const CONNECTIONS: usize = 24;
    let scene = Scene::open("noise-endless");
    let state = Arc::clone(scene.stage.served.daemon().state());
    let begun = |path: &str, stream: u32| {
        // A message of 8 MiB begins; as much of it comes as a stream may have on its way.
        let mut bytes = frame(1, 4, stream, &headers(path));
        bytes.extend_from_slice(&frame(0, 0, stream, &[0, 0, 0x7f, 0, 0]));
        for _ in 0..120 {
            bytes.extend_from_slice(&frame(0, 0, stream, &[0; 16_000]));
        }
        bytes
    };
    let say = [PREFACE, &frame(4, 0, 0, &[])].concat();
    let endless = [begun("/kvarts.v1.Store/Exists", 1), begun("/kvarts.v1.Reads/Get", 3)].concat();
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(scene.stage.served.daemon().grpc().unwrap()).unwrap();
        stream.write_all(&say).unwrap();
        // The server says how much it takes at a time.
        let mut first = [0; 64];
        assert!(stream.read(&mut first).unwrap() > 9);
        stream.write_all(&frame(4, 1, 0, &[])).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        stream.write_all(&endless).unwrap();
        open.push(stream);
    }
    scene.stage.served.until("they fill what there is for them", |_| {
        state.receiving.bytes() > limits::LARGE_BYTES_MAX as u64 / 2
    });
    assert!(state.receiving.bytes() <= limits::LARGE_BYTES_MAX as u64);
    scene.stage.served.until("those for whom there is no room are sent away", |_| {
        state.calls() < 2 * CONNECTIONS as u64 && state.receiving.bytes() <= limits::LARGE_BYTES_MAX as u64
    });
    scene.expect_served();
    // Their connections stay, they do not; but for one whose bytes still come when its stream is long forgotten, which
    // HTTP/2 ends.
    scene.stage.served.until("they are ended", |_| state.calls() == 0 && state.receiving.bytes() == 0);
    let connected = state.connections.all() - state.connections.free();
    assert!(connected > CONNECTIONS / 2, "{connected}: it was their connections that ended");
    scene.expect_served();
    drop((open, state));
    scene.end();
}
