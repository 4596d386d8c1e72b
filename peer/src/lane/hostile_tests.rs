//! Peers that do what no peer does: the bytes that are announced are right, every stream ends, and the connection is all that it
//! costs.
#![allow(clippy::disallowed_methods, reason = "plays a peer on a thread of its own")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::api::{Origins, ReadEnd, ReadEvent, ReadRequest, ReadStream};
use kvarts_contract::clock::ManualClock;
use kvarts_contract::error::{Kind as ErrorKind, Reason};
use kvarts_layout::plan::Order;
use kvarts_layout::{BlockKey, Geometry, OriginId, StoreId};
use kvarts_wire::proto;

use super::delivery::Delivery;
use super::frame::{Incoming, Kind, bare, frame};
use super::limits::{MAGIC, PIECES_MAX, SILENCE};
use super::tests::{
    Made, SERVER, content, events, expect_content, geometry, identity, keys, member, piece, places, serve,
    shape, wait_for,
};
use super::wire::{Broken, Plain, Wire};
use super::*;
use crate::path::Path;

/// A server that says these bytes to the first piece that it is asked for, number 1, and then ends the connection, or stays silent.
fn play(answer: Vec<u8>, stays: bool) -> SocketAddr {
    let listener = tests::listener();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        drop(listener);
        let wire = Plain::new(stream.try_clone().unwrap());
        member(SERVER).answer(&wire).unwrap();
        let mut incoming = Incoming::default();
        loop {
            match incoming.next(&wire, |_| Some(1 << 20)) {
                Ok(Some((head, _))) if head.kind == Kind::Read => break,
                Ok(None) => super::host::sleep(
                    None,
                    Some((&wire, super::wire::Ready::ToReceive)),
                    Some(Duration::from_secs(60)),
                ),
                Ok(_) => {}
                Err(_) => return,
            }
        }
        // The client may have had enough before all of it is sent.
        let _ = (&stream).write_all(&answer);
        if stays {
            while let Ok(1..) = (&stream).read(&mut [0; 4096]) {}
        }
        wire.close();
    });
    address
}

/// What an honest server would answer for these blocks.
fn honest(geometry: &Geometry, keys: &[BlockKey], order: Order) -> (proto::LaneAnswer, Vec<u8>) {
    let shape = shape(geometry);
    let delivery = Delivery { order, layers: 0..3, blocks: (0..keys.len() as u32).collect() };
    let (mut digests, mut bytes) = (Vec::new(), Vec::new());
    delivery.each(&shape, |chunk| {
        let some = content(&keys[chunk.block as usize], chunk.part, 1, chunk.bytes);
        digests.extend_from_slice(&crc32fast::hash(&some).to_le_bytes());
        bytes.extend(some);
    });
    let answer = proto::LaneAnswer {
        usable_blocks: keys.len() as u32,
        usable_layers: 3,
        origins: vec![1; 16 * keys.len()].into(),
        lives: vec![255; 16 * keys.len()].into(),
        digests: digests.into(),
        bytes: bytes.len() as u64,
        ..Default::default()
    };
    (answer, bytes)
}

fn said(answer: &proto::LaneAnswer, bytes: &[u8]) -> Vec<u8> {
    [&frame(Kind::Answer, 1, answer)[..], bytes].concat()
}

/// Reads three blocks of a server that answers so; what is announced is right.
fn read(
    geometry: &Geometry,
    address: SocketAddr,
    order: Order,
    timeout: Duration,
) -> (usize, ReadEnd, Arc<LaneClient>) {
    let client = LaneClient::connect(address, SERVER, member(StoreId([1; 16]))).unwrap();
    wait_for("a connection", || client.counts().connected);
    let namespace = client.open(&identity(geometry, b"salt"), geometry).unwrap();
    let (shape, deadline) = (shape(geometry), Some(client.now().plus(timeout)));
    let into = places(&shape, 3);
    let (group, coordinate) = (kvarts_layout::Group(0), kvarts_layout::Coordinate::Replicated);
    let request = ReadRequest::new(namespace, group, coordinate, keys(0..3), into);
    let request = ReadRequest { order, deadline, ..request };
    let stream = client.read(piece(request.clone(), &Origins::any(3))).unwrap();
    let (told, end) = events(&stream);
    for event in &told {
        match event {
            ReadEvent::Block(block) => expect_content(&shape, &request, *block, 0..3, 1),
            ReadEvent::Layer { layer, blocks } => {
                (0..*blocks).for_each(|block| expect_content(&shape, &request, block, *layer..layer + 1, 1));
            }
            _ => panic!("{event:?}"),
        }
    }
    if order == Order::Blocks {
        assert_eq!(
            told.len() + end.failures.len(),
            3,
            "each block is announced or has failed: {told:?} {end:?}"
        );
    }
    assert_eq!(end.held_bytes, 0);
    (told.len(), end, client)
}

const LONG: Duration = Duration::from_secs(50);

#[test]
fn no_flipped_bit_of_an_answer_gives_a_wrong_byte_or_a_stream_that_does_not_end() {
    let geometry = geometry(100);
    let (answer, bytes) = honest(&geometry, &keys(0..3), Order::Blocks);
    let whole = said(&answer, &bytes);
    let head = whole.len() - bytes.len();
    for order in [Order::Blocks, Order::Layers] {
        let (answer, bytes) = honest(&geometry, &keys(0..3), order);
        let (told, end, _) = read(&geometry, play(said(&answer, &bytes), true), order, LONG);
        assert_eq!((told, end.usable_blocks), (3, 3), "{end:?}");
    }
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        let (told, end, _) = read(&geometry, play(flipped, false), Order::Blocks, LONG);
        match at < head {
            true => assert_eq!(told, 0, "byte {at}: {end:?}"),
            false => assert_eq!(told, 2, "byte {at}: {end:?}"),
        }
    }
}

#[test]
fn an_answer_that_is_cut_gives_what_came_whole_and_a_reason_to_ask_elsewhere_for_the_rest() {
    let geometry = geometry(100 << 10);
    for order in [Order::Blocks, Order::Layers] {
        let (answer, bytes) = honest(&geometry, &keys(0..3), order);
        let whole = said(&answer, &bytes);
        let mut before = 0;
        for cut in (0..whole.len()).step_by(4096).chain([whole.len() - 1]) {
            let (told, end, _) = read(&geometry, play(whole[..cut].to_vec(), false), order, LONG);
            assert!(end.failures.iter().all(|(_, reason)| reason.kind() == ErrorKind::Retry), "{end:?}");
            assert!(told >= before && told < 3 && !end.failures.is_empty(), "cut at {cut}: {told}");
            before = told;
        }
        assert_eq!(before, 2);
    }
}

#[test]
fn a_peer_owes_no_more_bytes_than_it_may_however_many_pieces_wait() {
    let geometry = geometry(1 << 20);
    let (shape, listener) = (shape(&geometry), tests::listener());
    let address = listener.local_addr().unwrap();
    let client = LaneClient::connect(address, SERVER, member(StoreId([1; 16]))).unwrap();
    let wire = Plain::new(listener.accept().unwrap().0);
    member(SERVER).answer(&wire).unwrap();
    wait_for("a connection", || client.counts().connected);
    let namespace = client.open(&identity(&geometry, b"salt"), &geometry).unwrap();
    let mut streams: Vec<ReadStream> = (0..10u8)
        .map(|n| {
            let request = tests::request(namespace, &shape, keys(n..n + 1), Order::Blocks);
            client.read(piece(request, &Origins::any(1))).unwrap()
        })
        .collect();
    // What is said after it comes after everything that the client asks for now.
    client.open(&identity(&geometry, b"another salt"), &geometry).unwrap();
    let mut incoming = Incoming::default();
    let mut next = || loop {
        match incoming.next(&wire, |_| Some(1 << 20)).unwrap() {
            Some((head, _)) => return head,
            None => super::host::sleep(
                None,
                Some((&wire, super::wire::Ready::ToReceive)),
                Some(Duration::from_secs(60)),
            ),
        }
    };
    let (mut asked, mut opened) = (Vec::new(), 0);
    while opened < 2 {
        let head = next();
        match head.kind {
            Kind::Open => opened += 1,
            Kind::Read => asked.push(head.number),
            kind => panic!("{kind:?}"),
        }
    }
    let most = super::limits::UNDER_WAY_BYTES / shape.block_bytes();
    assert_eq!(asked.len() as u64, most, "pieces of {} bytes", shape.block_bytes());
    // A piece that its reader drops before it was asked for is never asked for; each answer makes room for the next.
    drop(streams.pop());
    for answered in 0.. {
        let Some(number) = asked.get(answered).copied() else { break };
        let answer = proto::LaneAnswer { failed: vec![0], reasons: vec![1], ..Default::default() };
        wire.send(&frame(Kind::Answer, number, &answer), false).unwrap();
        if asked.len() < 9 {
            asked.push(next().number);
        }
    }
    assert_eq!(asked, (1..=9).collect::<Vec<_>>());
}

/// Answers that are no answers to what was asked.
fn impossible(geometry: &Geometry) -> Vec<(&'static str, Vec<u8>)> {
    let (answer, bytes) = honest(geometry, &keys(0..3), Order::Blocks);
    let changed = |change: &dyn Fn(&mut proto::LaneAnswer)| {
        let mut other = answer.clone();
        change(&mut other);
        said(&other, &bytes)
    };
    let cut = |bytes: &Bytes| bytes.slice(..bytes.len() - 4);
    vec![
        ("another number", [&frame(Kind::Answer, 2, &answer)[..], &bytes].concat()),
        ("another kind", [&frame(Kind::Welcome, 1, &answer)[..], &bytes].concat()),
        ("too few bytes", changed(&|answer| answer.bytes -= 1)),
        ("too many bytes", changed(&|answer| answer.bytes += 4096)),
        ("endless bytes", changed(&|answer| answer.bytes = u64::MAX)),
        ("too few digests", changed(&|answer| answer.digests = cut(&answer.digests))),
        ("too few origins", changed(&|answer| answer.origins = cut(&answer.origins))),
        ("too few lives", changed(&|answer| answer.lives = cut(&answer.lives))),
        ("too many blocks", changed(&|answer| answer.usable_blocks = u32::MAX)),
        ("too many layers", changed(&|answer| answer.usable_layers = 4)),
        (
            "a failed block that there is not",
            changed(&|answer| (answer.failed, answer.reasons) = (vec![3], vec![1])),
        ),
        ("no reason", changed(&|answer| answer.failed = vec![1])),
        ("fails downwards", changed(&|answer| (answer.failed, answer.reasons) = (vec![2, 1], vec![1, 1]))),
        ("no message", [&bare(Kind::Answer, 1)[..4], &[255; 64]].concat()),
        ("nothing that is a frame", vec![0x5a; 1 << 20]),
    ]
}

#[test]
fn an_answer_that_does_not_fit_costs_the_connection_and_no_wrong_byte() {
    let geometry = geometry(300);
    for (what, bytes) in impossible(&geometry) {
        let (told, end, client) = read(&geometry, play(bytes, true), Order::Blocks, LONG);
        assert_eq!((told, end.failures.len()), (0, 3), "{what}");
        assert!(end.failures.iter().all(|(_, reason)| reason.kind() == ErrorKind::Retry), "{what}: {end:?}");
        wait_for("the end of the connection", || !client.counts().connected);
    }
}

#[test]
fn what_comes_behind_an_answer_unasked_ends_the_connection_and_harms_nothing() {
    let geometry = geometry(300);
    let (answer, bytes) = honest(&geometry, &keys(0..3), Order::Blocks);
    let endless = [said(&answer, &bytes), said(&answer, &bytes).repeat(100)].concat();
    let (told, end, client) = read(&geometry, play(endless, true), Order::Blocks, LONG);
    assert_eq!((told, end.failures.len()), (3, 0));
    wait_for("the end of the connection", || !client.counts().connected);
    assert_eq!(client.counts().bytes, bytes.len() as u64);
}

#[test]
fn a_peer_that_says_nothing_or_stops_in_the_middle_ends_at_the_deadline() {
    let geometry = geometry(300);
    let (answer, bytes) = honest(&geometry, &keys(0..3), Order::Blocks);
    let whole = said(&answer, &bytes);
    let middle = whole.len() - bytes.len() / 2;
    for (length, good) in [(0, 0), (10, 0), (whole.len() - bytes.len(), 0), (middle, 1)] {
        let address = play(whole[..length].to_vec(), true);
        let (told, end, _) = read(&geometry, address, Order::Blocks, Duration::from_millis(300));
        assert!(told <= good, "{length}");
        assert!(end.failures.iter().all(|(_, reason)| reason.kind() == ErrorKind::Deadline), "{end:?}");
    }
}

/// A caller that has said the first words, and what it says then.
fn caller(server: &LaneServer) -> (TcpStream, Plain) {
    let stream = TcpStream::connect(server.address()).unwrap();
    let wire = Plain::new(stream.try_clone().unwrap());
    member(StoreId([2; 16])).call(&wire, SERVER).unwrap();
    (stream, wire)
}

fn asks(geometry: &Geometry, namespace: u32, blocks: u8) -> (Vec<u8>, proto::LaneRead) {
    let identity = identity(geometry, b"salt").encode().unwrap().into();
    let read = proto::LaneRead {
        namespace,
        keys: keys(0..blocks).iter().flat_map(|key| key.0).collect::<Vec<u8>>().into(),
        layers: 3,
        timeout_us: 60_000_000,
        ..Default::default()
    };
    (frame(Kind::Open, 0, &proto::LaneOpen { namespace: 5, identity }), read)
}

#[test]
fn a_caller_that_breaks_the_protocol_is_cut_and_nothing_of_it_stays() {
    let made = Made::new(300);
    made.holds.store(true, Ordering::SeqCst);
    let server = serve(made.clone(), ServeLimits::default());
    let (open, read) = asks(&made.geometry, 5, 3);
    let piece = |number, change: &dyn Fn(&mut proto::LaneRead)| {
        let mut other = read.clone();
        change(&mut other);
        frame(Kind::Read, number, &other)
    };
    let many: Vec<u8> = (0..=PIECES_MAX as u64).flat_map(|number| piece(number, &|_| {})).collect();
    let words = [
        ("no frame", vec![0xee; 64]),
        ("a frame of the other side", bare(Kind::Answer, 1)),
        ("a namespace that was not opened", piece(1, &|read| read.namespace = 6)),
        ("a namespace twice", open.clone()),
        (
            "no identity",
            frame(Kind::Open, 0, &proto::LaneOpen { namespace: 9, identity: vec![3; 90].into() }),
        ),
        ("a number twice", [piece(1, &|_| {}), piece(1, &|_| {})].concat()),
        ("too many pieces", many),
        ("no keys", piece(1, &|read| read.keys = Bytes::new())),
        ("half a key", piece(1, &|read| read.keys = vec![1; 40].into())),
        ("layers that there are not", piece(1, &|read| read.layers = 4)),
        ("layers past the end of numbers", piece(1, &|read| read.first_layer = u32::MAX)),
        ("the origins belong to other blocks", piece(1, &|read| read.origins = vec![1; 17].into())),
        (
            "too long a request",
            frame(Kind::Read, 1, &proto::LaneRead { keys: vec![1; 1 << 20].into(), ..read.clone() }),
        ),
    ];
    for (cut, (what, words)) in (1..).zip(words) {
        let (mut stream, _wire) = caller(&server);
        // It may be cut before it has said all.
        let _ = stream.write_all(&[open.clone(), words].concat());
        wait_for(what, || server.counts().cut == cut && server.counts().connections == 0);
        wait_for("the reads to be given up", || {
            made.end_given_up();
            server.counts().memory == 0
        });
    }
    // Strangers: no first word, half of them, the words of another connection.
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    wait_for("a stranger's end", || server.counts().cut == 14);
    drop(TcpStream::connect(server.address()).unwrap());
    wait_for("the end of one that goes", || server.counts().connections == 0);
}

#[test]
fn callers_that_say_nothing_keep_no_peer_out_and_peers_have_a_number_of_places() {
    let server = serve(Made::new(300), ServeLimits { connections: 1, ..ServeLimits::default() });
    let most = serving::UNPROVEN_MAX as u64;
    let silent: Vec<TcpStream> =
        (0..4 * most).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let peer = caller(&server);
    wait_for("a peer", || server.counts().let_in == 1);
    // A second one shows as well whose it is, and finds no place.
    let one_more = caller(&server);
    assert_eq!((&one_more.0).read(&mut [0; 1]).unwrap(), 0);
    wait_for("the end of those that had to go", || server.counts().connections <= 1 + most);
    assert_eq!(server.counts().let_in, 1);
    drop(silent);
    wait_for("the end of those that said nothing", || server.counts().connections == 1);
    drop((peer, one_more));
}

#[test]
fn words_of_another_connection_prove_nothing() {
    let made = Made::new(300);
    let server = serve(made, ServeLimits::default());
    // An attacker between both hears the first words of one connection, and says them again in another.
    let listener = tests::listener();
    let between = listener.local_addr().unwrap();
    let real = server.address();
    let heard = std::thread::spawn(move || {
        let (mut near, mut far) = (listener.accept().unwrap().0, TcpStream::connect(real).unwrap());
        let (mut words, mut bytes) = (Vec::new(), [0; 4096]);
        for from_caller in [true, false, true, false] {
            let (from, to) = if from_caller { (&mut near, &mut far) } else { (&mut far, &mut near) };
            // The first words come in two writes.
            let mut got = from.read(&mut bytes).unwrap();
            if got == MAGIC.len() {
                got += from.read(&mut bytes[got..]).unwrap();
            }
            to.write_all(&bytes[..got]).unwrap();
            if from_caller {
                words.extend_from_slice(&bytes[..got]);
            }
        }
        words
    });
    let wire = Plain::new(TcpStream::connect(between).unwrap());
    member(StoreId([2; 16])).call(&wire, SERVER).unwrap();
    let words = heard.join().unwrap();
    wait_for("a connection", || server.counts().let_in == 1);
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(&words).unwrap();
    wait_for("a refusal", || server.counts().cut == 1);
    assert_eq!(server.counts().let_in, 1);
}

#[test]
fn words_that_were_changed_on_the_way_are_refused_by_both() {
    for change in 0..3 {
        let listener = tests::listener();
        let address = listener.local_addr().unwrap();
        // One side believes that there is no secret, that the other is of an older version, or is another node.
        let liar = std::thread::spawn(move || {
            let other = match change {
                0 => Member { secret: None, ..member(SERVER) },
                1 => Member { secret: Some(Secret([0; 32])), ..member(SERVER) },
                _ => member(StoreId([3; 16])),
            };
            other.answer(&Plain::new(listener.accept().unwrap().0))
        });
        let wire = Plain::new(TcpStream::connect(address).unwrap());
        let called = member(StoreId([2; 16])).call(&wire, SERVER);
        wire.close();
        assert!(called.is_err() && liar.join().unwrap().is_err(), "{change}: {called:?}");
        assert_ne!(called, Err(Broken::Silent));
    }
}

/// Reads that get no answer, of a client whose clock is turned by hand.
fn unanswered(address: SocketAddr) -> (Arc<LaneClient>, Arc<ManualClock>, Vec<ReadStream>) {
    let clock = ManualClock::new(0);
    let member = Member { clock: clock.clone(), ..member(StoreId([1; 16])) };
    let client = LaneClient::connect(address, SERVER, member).unwrap();
    wait_for("a connection", || client.counts().connected);
    let geometry = geometry(300);
    let namespace = client.open(&identity(&geometry, b"salt"), &geometry).unwrap();
    let read = |_| {
        let request = tests::request(namespace, &shape(&geometry), keys(0..3), Order::Blocks);
        client.read(piece(request, &Origins::any(3))).unwrap()
    };
    let streams = (0..2).map(read).collect();
    (client, clock, streams)
}

#[test]
fn a_peer_that_owes_something_and_says_nothing_for_long_loses_the_connection() {
    let (client, clock, mut streams) = unanswered(play(Vec::new(), true));
    clock.advance(SILENCE);
    // The thread looks when a stream is dropped.
    drop(streams.pop());
    let (told, end) = events(&streams[0]);
    assert!(
        told.is_empty() && end.failures.iter().all(|(_, reason)| reason.kind() == ErrorKind::Retry),
        "{end:?}"
    );
    wait_for("the end of the connection", || !client.counts().connected);
}

#[test]
fn a_caller_that_does_not_take_its_answers_is_cut_and_its_memory_comes_back() {
    let (made, clock) = (Made::new(1 << 20), ManualClock::new(0));
    let listener = tests::listener();
    let member = Member { clock: clock.clone(), ..member(SERVER) };
    let server = LaneServer::start(made.clone(), listener, member, ServeLimits::default()).unwrap();
    let (mut stream, wire) = caller(&server);
    let (open, read) = asks(&made.geometry, 5, 3);
    stream.write_all(&open).unwrap();
    stream.write_all(&bare(Kind::Ping, 0)).unwrap();
    let mut incoming = Incoming::default();
    wait_for("a pong", || {
        incoming.next(&wire, |head| (head.kind == Kind::Pong).then_some(0)).unwrap().is_some()
    });
    for number in 0..20 {
        stream.write_all(&frame(Kind::Read, number, &read)).unwrap();
    }
    wait_for("memory", || made.reads.load(Ordering::SeqCst) > 3);
    assert!(server.counts().memory <= ServeLimits::default().connection_memory + (1 << 20));
    wait_for("the end", || {
        // The thread looks when something is heard.
        clock.advance(Duration::from_secs(60));
        let _ = stream.write_all(&bare(Kind::Ping, 0));
        std::thread::sleep(Duration::from_millis(10));
        server.counts().cut == 1
    });
    wait_for("memory", || server.counts().memory == 0 && server.counts().connections == 0);
    // Six have room at a time, and the kernel takes a few off.
    assert!(made.reads.load(Ordering::SeqCst) <= 14, "{}", made.reads.load(Ordering::SeqCst));
}

#[test]
fn another_production_than_the_one_that_was_met_is_not_announced_whatever_a_peer_was_asked_for() {
    let geometry = geometry(300);
    for order in [Order::Blocks, Order::Layers] {
        let (answer, bytes) = honest(&geometry, &keys(0..3), order);
        let address = play(said(&answer, &bytes), true);
        let client = LaneClient::connect(address, SERVER, member(StoreId([1; 16]))).unwrap();
        wait_for("a connection", || client.counts().connected);
        let namespace = client.open(&identity(&geometry, b"salt"), &geometry).unwrap();
        let request = tests::request(namespace, &shape(&geometry), keys(0..3), order);
        let met = Origins::of(vec![None, Some(OriginId([2; 16])), Some(OriginId([1; 16]))]);
        let (told, end) = events(&client.read(piece(request, &met)).unwrap());
        let layer = |layer| ReadEvent::Layer { layer, blocks: 1 };
        match order {
            Order::Blocks => assert_eq!(told, [0, 2].map(ReadEvent::Block)),
            Order::Layers => assert_eq!(told, [0, 1, 2].map(layer)),
        }
        assert_eq!(end.failures, [(1, Reason::NotHere(keys(1..2)[0]))]);
        assert_eq!(met.met(), [1, 2, 1].map(|origin| Some(OriginId([origin; 16]))));
    }
}
