//! Clients of the local path that do what no client should: with their socket, with their memory, with their lives. The
//! server goes on, others are not disturbed, and nothing is kept of those who are gone.
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]
#![allow(clippy::result_large_err, reason = "the contract's error, as it came")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::raw::{
    BLOCK, Raw, column, expect_nothing_left, expect_served, key_bytes, local_put, local_read, places,
};
use crate::served::{ClientStage, Served};
use kvarts_client::{Client, Pinned};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, KvStore, LeaseTerms, Presence, ReadRequest, Target,
};
use kvarts_contract::buffers::{Arena, Region, SharedBuf, shared};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, Layout, NamespaceId};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::stage::{Stage, ask};
use kvarts_wire::limits::KEYS_MAX;
use kvarts_wire::local::frame::{Head, Kind, bare, frame};
use kvarts_wire::local::limits::{BODY_BYTES_MAX, LEASES_MAX, MAGIC, MEMORIES_MAX, REQUESTS_MAX};
use kvarts_wire::proto;
use prost::Message;
use rustix::fs::{FallocateFlags, MemfdFlags};

fn stage(name: &str) -> ClientStage {
    ClientStage::open(name)
}

#[test]
fn what_is_no_frame_ends_its_connection_and_no_other() {
    let stage = stage("local-garbage");
    let head = |kind, length| Head { length, kind, id: 5 }.bytes().to_vec();
    let mut too_long = head(Kind::Read, BODY_BYTES_MAX);
    too_long[0] = 1;
    let unknown = {
        let mut bytes = head(Kind::Read, 0);
        bytes[4] = 99;
        bytes
    };
    let noise: Vec<u8> = (0..4000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for (what, bytes) in [
        ("too long", too_long),
        ("unknown", unknown),
        ("a server's", head(Kind::Released, 0)),
        ("a second hello", frame(Kind::Hello, 1, &proto::Hello::default())),
        ("noise", noise),
    ] {
        let mut raw = Raw::open(&stage.served);
        raw.stream.write_all(&bytes).unwrap();
        assert!(raw.hear().is_none(), "{what}");
    }
    // Bodies that are no messages are answered, and the connection goes on.
    let mut raw = Raw::open(&stage.served);
    for kind in [Kind::Share, Kind::Read, Kind::Put, Kind::Match, Kind::Exists, Kind::Unlock, Kind::Renew] {
        let body = [0xff; 40];
        let head = Head { length: body.len(), kind, id: 9 };
        raw.stream.write_all(&[&head.bytes()[..], &body].concat()).unwrap();
        let error = raw.answer::<proto::UnlockReply>().unwrap_err();
        assert_eq!(error.reason(), proto::Reason::Malformed, "{kind:?}");
    }
    drop(raw);
    // Those that never say who they are, and say it wrong.
    let mut half = Raw::connect(&stage.served);
    half.stream.write_all(&MAGIC[..5]).unwrap();
    drop(half);
    let mut wrong = Raw::connect(&stage.served);
    wrong.stream.write_all(b"KVARTSL9 and more than that").unwrap();
    assert!(wrong.hear().is_none());
    let mut early = Raw::connect(&stage.served);
    early.stream.write_all(&[&MAGIC[..], &bare(Kind::Cancel, 1)].concat()).unwrap();
    assert!(early.hear().is_none());
    expect_served(&stage, 1);
    expect_nothing_left(&stage.served);
}

#[test]
fn descriptors_that_nobody_asked_for_or_cannot_be_shared_are_refused() {
    let stage = stage("local-descriptors");
    let open = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open, 1 << 20).unwrap();
    let mut raw = Raw::open(&stage.served);
    for mode in [proto::LocalMode::LocalDirect, proto::LocalMode::LocalCopied] {
        // Clients of these modes make the file for this purpose.
        let error = raw.share(mode, 1 << 20, &open).unwrap_err();
        assert!(error.message.contains("F_SEAL_SHRINK"), "{}", error.message);
    }
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    assert!(raw.share(proto::LocalMode::LocalAdopted, 4096, &pipe).is_err());
    let folder = rustix::fs::open("/", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    assert!(raw.share(proto::LocalMode::LocalAdopted, 4096, &folder).is_err());
    shared::seal(&open).unwrap();
    assert!(raw.share(proto::LocalMode::LocalAdopted, (1 << 20) + 4096, &open).is_err(), "longer than it is");
    assert!(raw.share(proto::LocalMode::LocalAdopted, 5000, &open).is_err(), "not whole pages");
    raw.share(proto::LocalMode::LocalAdopted, 1 << 20, &open).unwrap();
    assert!(raw.share(proto::LocalMode::LocalAdopted, 1 << 20, &open).is_err(), "a number in use");
    assert!(rustix::fs::ftruncate(&open, 0).is_err(), "what is shared cannot be shortened");
    for bytes in [0, 4095, u64::MAX - 4095, 1 << 60] {
        let mode = proto::LocalMode::LocalDirect.into();
        raw.say(Kind::Share, 3, &proto::ShareRequest { memory: 9, mode, bytes, ..Default::default() });
        assert!(raw.answer::<proto::ShareReply>().is_err(), "{bytes}");
    }
    raw.say_with(Kind::Unlock, 4, &proto::UnlockRequest { lease: 1 }, &open);
    while let Some((head, _)) = raw.hear() {
        assert_eq!(head.kind, Kind::Done, "a descriptor with a frame that has none");
    }
    expect_served(&stage, 1);
    expect_nothing_left(&stage.served);
}

/// A socket that is closed with what its other end has not taken, and waits for that: as long as it is told to. The last one to close it waits.
/// Gives its other end, too.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut full, _) = listener.accept().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.write(&[7; 1 << 16]).is_ok() {}
    full.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&full, Some(Duration::from_secs(600))).unwrap();
    (full.into(), other)
}

/// Closes them where nothing waits for it.
fn let_go(files: Vec<OwnedFd>) {
    std::thread::spawn(move || drop(files));
}

/// Threads of this process that close what a client sent.
fn closing() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "kvarts-closing").count()
}

/// Whether the kernel refuses descriptors for a socket that wants none, as Linux 6.16 does.
fn refuses_descriptors(served: &Served) -> bool {
    let raw = Raw::connect(served);
    let (file, _) = rustix::pipe::pipe().unwrap();
    raw.try_send_with(b"K", &[&file]).is_err()
}

#[test]
fn a_descriptor_whose_close_waits_holds_up_no_other_session() {
    let stage = stage("local-lingering");
    let mut others = Vec::new();
    let mut linger = || {
        let (full, other) = lingering();
        others.push(other);
        full
    };
    // Of the server's threads each has several of everything.
    for round in 0..6 {
        if refuses_descriptors(&stage.served) {
            // Whatever it may be: neither taken nor kept in the queue of a connection that is closed.
            for what in [&MAGIC[..], b"no magic number", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
                let (raw, full) = (Raw::connect(&stage.served), linger());
                assert!(raw.try_send_with(what, &[&full]).is_err());
                let_go(vec![full]);
            }
        }
        // Shared, though it is no memory.
        let (mut raw, full) = (Raw::open(&stage.served), linger());
        let error = raw.share(proto::LocalMode::LocalAdopted, 4096, &full).unwrap_err();
        assert!(error.message.contains("in-memory file"), "{}", error.message);
        let_go(vec![full]);
        // More than are taken with one frame.
        let (mut many, files) = (Raw::open(&stage.served), Vec::from_iter((0..12).map(|_| linger())));
        many.try_send_with(b"x", &files.iter().collect::<Vec<_>>()).unwrap();
        let_go(files);
        // With a frame that has none, and in the queue of a connection that is cut off, if it is so quick.
        let (mut odd, files) = (Raw::open(&stage.served), vec![linger(), linger()]);
        odd.say_with(Kind::Unlock, 4, &proto::UnlockRequest { lease: 1 }, &files[0]);
        let _ = odd.try_send_with(b"y", &[&files[1]]);
        let_go(files);
        while many.hear().is_some() {}
        while odd.hear().is_some() {}
        expect_served(&stage, round);
    }
    // Who lets go of one last waits for it: the server or this test.
    assert!(closing() > 0, "nothing waits");
    // Their other ends close: what waited has ended.
    drop(others);
    expect_nothing_left(&stage.served);
    stage.served.until("all of them are closed", |_| closing() == 0);
}

#[test]
fn a_descriptor_is_taken_by_its_own_frame_though_others_arrive_with_it() {
    let stage = stage("local-together");
    let mut raw = Raw::open(&stage.served);
    let file = shared::sealed(4096).unwrap();
    for round in 0..300 {
        // The server finds them together in its socket or not, as it happens.
        for id in 0..4 {
            raw.say(Kind::Unlock, id, &proto::UnlockRequest { lease: 1 });
        }
        let mode = proto::LocalMode::LocalAdopted.into();
        raw.say_with(
            Kind::Share,
            9,
            &proto::ShareRequest { memory: 5, mode, bytes: 4096, ..Default::default() },
            &file,
        );
        raw.say(Kind::Unshare, 10, &proto::UnshareRequest { memory: 5 });
        let mut answered = Vec::new();
        for _ in 0..6 {
            let (head, _) = raw.hear().unwrap_or_else(|| panic!("cut off in round {round}"));
            assert_eq!(head.kind, Kind::Done);
            answered.push(head.id);
        }
        assert_eq!(answered, [0, 1, 2, 3, 9, 10]);
    }
    drop(raw);
    expect_nothing_left(&stage.served);
}

#[test]
fn requests_that_were_cancelled_count_until_they_have_ended() {
    let stage = stage("local-cancelled");
    let desk = Desk::new(&stage, "cancelled");
    let keys = desk.keys(0..100);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 100]);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, 100 * BLOCK);
    let (mut stream, namespace, all) = (raw.stream.try_clone().unwrap(), desk.namespace, keys.clone());
    let (wanted, stop) = (REQUESTS_MAX as u64 * 40, Arc::new(AtomicBool::new(false)));
    let asking = std::thread::spawn(move || {
        for id in 0..wanted {
            let put = frame(Kind::Put, id, &local_put(namespace, &all[..1], 1, vec![0]));
            stream.write_all(&[put, bare(Kind::Cancel, id)].concat()).unwrap();
        }
        stream.write_all(&frame(Kind::Unlock, wanted, &proto::UnlockRequest { lease: 1 })).unwrap();
    });
    let (done, state) = (Arc::clone(&stop), Arc::clone(stage.served.daemon().state()));
    std::thread::scope(|scope| {
        let watching = scope.spawn(move || {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                let clients = state.locals.clients();
                most = most.max(clients.iter().map(|client| client.under_way).max().unwrap_or(0));
            }
            most
        });
        while let Some((head, _)) = raw.hear() {
            if head.id == wanted {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let most = watching.join().unwrap();
        assert!(most as usize <= REQUESTS_MAX, "{most} under way");
    });
    asking.join().unwrap();
    drop(raw);
    expect_nothing_left(&stage.served);
}

#[test]
fn places_outside_of_shared_memory_or_over_each_other_are_refused() {
    let stage = stage("local-places");
    let desk = Desk::new(&stage, "places");
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, 4 * BLOCK);
    let mut refused = |what: &str, change: &dyn Fn(&mut proto::LocalPlaces)| {
        let mut into = places(1, 4);
        change(&mut into);
        raw.say(Kind::Read, 1, &local_read(desk.namespace, &keys, into.clone()));
        let error = raw.answer::<proto::UnlockReply>().unwrap_err();
        assert_eq!(error.kind(), proto::Kind::Invalid, "{what}: {error:?}");
        let put = proto::LocalPut { from: Some(into), ..local_put(desk.namespace, &keys, 1, vec![0; 4]) };
        raw.say(Kind::Put, 2, &put);
        let error = raw.answer::<proto::PutReply>().unwrap_err();
        assert_eq!(error.kind(), proto::Kind::Invalid, "{what}: {error:?}");
    };
    refused("no such memory", &|places| places.targets[3].memory = 2);
    refused("nowhere", &|places| places.targets[3].memory = 0);
    refused("past the end", &|places| places.slots[0] = 4);
    refused("far past the end", &|places| places.slots[0] = u32::MAX);
    refused("overflowing", &|places| places.targets[0].base = u64::MAX - 10);
    refused("strides that overflow", &|places| places.targets[0].stride = u64::MAX / 2);
    refused("over each other", &|places| places.targets[1].base = 100);
    refused("a slot twice", &|places| places.slots[1] = 0);
    refused("too few targets", &|places| places.targets.truncate(5));
    refused("too few slots", &|places| places.slots.truncate(3));
    refused("none", &|places| *places = proto::LocalPlaces::default());
    raw.say(Kind::Read, 1, &local_read(desk.namespace, &vec![BlockKey([1; 32]); KEYS_MAX + 1], places(1, 1)));
    assert_eq!(raw.answer::<proto::UnlockReply>().unwrap_err().reason(), proto::Reason::TooMany);
    raw.say(Kind::Put, 2, &local_put(desk.namespace, &keys, 1, vec![0; 3]));
    assert_eq!(raw.answer::<proto::PutReply>().unwrap_err().reason(), proto::Reason::Malformed);
    // Blocks of 20 MiB: a request for the most blocks is for more bytes than a request may be.
    let geometry = kvarts_layout::Geometry::opaque(20 << 20).unwrap();
    let identity = kvarts_layout::Identity {
        spec_fingerprint: geometry.fingerprint(),
        ..fixture::identity("of large blocks")
    };
    let large = stage.client.register(&identity, &geometry).unwrap();
    let mut read = local_read(large, &fixture::keys(3, 0..KEYS_MAX as u64), places(1, 1));
    read.read.as_mut().unwrap().column = None;
    raw.say(Kind::Read, 3, &read);
    assert_eq!(raw.answer::<proto::UnlockReply>().unwrap_err().reason(), proto::Reason::TooMany);
    drop(raw);
    expect_nothing_left(&stage.served);
    desk.expect(pages(), &keys, 1);
}

const TENANTS: &str = r#"
[[tenants]]
name = "a"
[[tenants]]
name = "b"
"#;

/// The end of a read of one layer that is part of a longer one.
fn read_a_part(
    raw: &mut Raw,
    (namespace, keys): (NamespaceId, &[BlockKey]),
    layer: u32,
    origins: Vec<bytes::Bytes>,
) -> Result<proto::LocalEnd, proto::Error> {
    let mut read = local_read(namespace, keys, places(1, keys.len() as u32));
    let layers = Some(proto::read_request::LayerRange { start: layer, end: layer + 1 });
    read.read = read.read.map(|read| proto::ReadRequest { layers, ..read });
    raw.say(Kind::Read, 5, &proto::LocalRead { part: true, origins, ..read });
    let mut end = None;
    loop {
        let (head, body) = raw.hear().expect("the connection stays");
        match head.kind {
            Kind::End => end = Some(proto::LocalEnd::decode(&body[..]).unwrap()),
            Kind::Released => return Ok(end.expect("the end comes first")),
            Kind::Failed => return Err(proto::Error::decode(&body[..]).unwrap()),
            _ => {}
        }
    }
}

#[test]
fn parts_of_a_read_are_of_one_production_of_each_block() {
    let stage = stage("parts");
    let desk = Desk::new(&stage, "parts");
    let keys = desk.keys(0..3);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, 8 * BLOCK);
    let what = (desk.namespace, &keys[..]);
    let first = read_a_part(&mut raw, what, 0, Vec::new()).unwrap();
    assert_eq!(first.end.unwrap().usable_blocks, 3);
    assert!(first.origins.len() == 3 && first.origins.iter().all(|origin| origin.len() == 16));
    let target = Target::Keys { column: Some(pages()), keys: vec![keys[1]] };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(&stage, stage.client.delete(request)).unwrap();
    desk.store(pages(), &keys[1..2], 2, Layout::LayerBlock);
    let next = read_a_part(&mut raw, what, 1, first.origins.clone()).unwrap();
    let end = next.end.unwrap();
    assert_eq!((end.usable_blocks, end.failures.len(), end.failures[0].block), (1, 1, 1), "{end:?}");
    // For the block without an origin in the request, the origin is told as always.
    let some = vec![first.origins[0].clone(), bytes::Bytes::new(), first.origins[2].clone()];
    assert_eq!(read_a_part(&mut raw, what, 1, some).unwrap().end.unwrap().usable_blocks, 3);
    for wrong in [vec![first.origins[0].clone(); 2], vec![bytes::Bytes::from_static(&[1; 15]); 3]] {
        let refused = read_a_part(&mut raw, what, 1, wrong).unwrap_err();
        assert!(refused.message.contains("origins"), "{refused:?}");
    }
}

fn tokens() -> String {
    let token = |tenant: &str, name: &str, rights: &str| {
        let hash = kvarts_server::state::auth::TokenHash::of(name);
        format!("[[tokens]]\ntenant = \"{tenant}\"\nrights = [{rights}]\nhash = \"{hash}\"\n")
    };
    let all = [
        token("a", "kvarts_a", "\"read\", \"write\""),
        token("a", "kvarts_reader", "\"read\""),
        token("a", "kvarts_writer", "\"write\""),
        token("b", "kvarts_b", "\"read\", \"write\""),
    ];
    format!("{TENANTS}{}", all.concat())
}

#[test]
fn tokens_and_tenants_are_those_of_grpc() {
    let served = Served::start("local-tokens", &tokens());
    for token in ["", "kvarts_wrong", "kvarts_a "] {
        if let Err(error) = Raw::with_token(&served, token) {
            assert_eq!(error.reason(), proto::Reason::Denied, "{token:?}");
        } else {
            assert_eq!(token.trim(), "kvarts_a", "let in with {token:?}");
        }
    }
    let (a, reader, b) =
        (served.local(Some("kvarts_a")), served.local(Some("kvarts_reader")), served.local(Some("kvarts_b")));
    let register =
        |client: &Client| client.register(&fixture::identity("same"), &fixture::geometry()).unwrap();
    let (of_a, of_b) = (register(&a), register(&b));
    assert_ne!(of_a, of_b);
    assert_eq!(register(&reader), of_a);
    let keys = fixture::keys(5, 0..2);
    let contains = |client: &Client, namespace| {
        let (group, coordinate) = pages();
        client.contains(&ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None })
    };
    let stage = ClientStage { client: a, served };
    let desk = Desk { stage: &stage, namespace: of_a, chain: 0 };
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 2]);
    assert_eq!(contains(&reader, of_a).unwrap().presence, vec![Presence::Here; 2]);
    assert_eq!(contains(&b, of_b).unwrap().presence, vec![Presence::Absent; 2]);
    let foreign = contains(&b, of_a).unwrap_err().0;
    assert_eq!(foreign, Reason::UnknownNamespace(of_a), "another tenant's is as unknown as none");
    let put = reader.put(desk.request(pages(), &fixture::keys(6, 0..1), 1));
    assert!(matches!(ask(&stage, put).unwrap_err().0, Reason::Denied(_)), "a reader cannot put");
}

#[test]
fn who_may_not_read_shares_no_memory_and_finds_nothing() {
    let served = Served::start("local-writer", &tokens());
    let mut raw = Raw::with_token(&served, "kvarts_writer").unwrap();
    let mode = proto::LocalMode::LocalDirect.into();
    raw.say(Kind::Share, 1, &proto::ShareRequest { memory: 1, mode, bytes: 4096, ..Default::default() });
    assert_eq!(raw.answer::<proto::ShareReply>().unwrap_err().reason(), proto::Reason::Denied);
    for (id, kind) in (2..).zip([Kind::Match, Kind::Exists, Kind::Read, Kind::Unlock, Kind::Renew]) {
        raw.stream.write_all(&bare(kind, id)).unwrap();
        let error = raw.answer::<proto::UnlockReply>().unwrap_err();
        assert_eq!(error.reason(), proto::Reason::Denied, "{kind:?}");
    }
    let mut reader = Raw::with_token(&served, "kvarts_reader").unwrap();
    reader.stream.write_all(&bare(Kind::Put, 9)).unwrap();
    assert_eq!(reader.answer::<proto::PutReply>().unwrap_err().reason(), proto::Reason::Denied);
    drop((raw, reader));
    expect_nothing_left(&served);
}

#[test]
fn a_session_has_as_many_memories_and_leases_as_it_may() {
    let stage = stage("local-bounds");
    let desk = Desk::new(&stage, "bounds");
    let keys = desk.keys(0..1);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), [BlockOutcome::Stored]);
    let mut raw = Raw::open(&stage.served);
    for memory in 1..=MEMORIES_MAX as u32 {
        drop(raw.pool(memory, 4096));
    }
    let mode = proto::LocalMode::LocalDirect.into();
    raw.say(
        Kind::Share,
        1,
        &proto::ShareRequest { memory: MEMORIES_MAX as u32 + 1, mode, bytes: 4096, ..Default::default() },
    );
    assert_eq!(raw.answer::<proto::ShareReply>().unwrap_err().reason(), proto::Reason::TooMany);
    let leased = proto::ExistsRequest {
        namespace: desk.namespace.as_bytes().to_vec().into(),
        column: column(),
        keys: key_bytes(&keys),
        lease_ms: 3_600_000,
        ..proto::ExistsRequest::default()
    };
    // Their number is what is bounded here, and not the bytes that they hold.
    let state = stage.served.daemon().state();
    state.engine.set_pin_share(None);
    state.gate.tenants().iter().for_each(|tenant| state.engine.set_pin_cap(tenant.number, None));
    for id in 0..LEASES_MAX as u64 {
        raw.say(Kind::Exists, id, &leased);
        assert_ne!(raw.answer::<proto::ExistsReply>().unwrap().lease, 0);
    }
    raw.say(Kind::Exists, 1, &leased);
    assert_eq!(raw.answer::<proto::ExistsReply>().unwrap_err().reason(), proto::Reason::Busy);
    drop(raw);
    expect_nothing_left(&stage.served);
    assert_eq!(stage.served.daemon().state().engine.holding().leases, 0);
}

#[test]
fn a_client_that_dies_while_it_reads_leaves_nothing_behind() {
    let stage = stage("local-dies-reading");
    let desk = Desk::new(&stage, "dies");
    let keys = desk.keys(0..400);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 400]);
    for round in 0..20 {
        let mut raw = Raw::open(&stage.served);
        let _pool = raw.pool(1, 400 * BLOCK);
        for id in 0..4 {
            raw.say(Kind::Read, id, &local_read(desk.namespace, &keys, places(1, 400)));
        }
        if round % 2 == 0 {
            // Something has arrived.
            raw.hear();
        }
        if round % 3 == 0 {
            raw.stream.write_all(&bare(Kind::Cancel, 2)).unwrap();
        }
    }
    expect_nothing_left(&stage.served);
    desk.expect(pages(), &keys, 1);
}

#[test]
fn a_client_that_dies_while_it_puts_leaves_blocks_whole_or_absent() {
    let stage = stage("local-dies-putting");
    let desk = Desk::new(&stage, "dies");
    for round in 0..10u64 {
        let keys = desk.keys(round * 100..round * 100 + 100);
        let mut raw = Raw::open(&stage.served);
        let pool = raw.pool(1, 100 * BLOCK);
        let mut digests = Vec::new();
        for (at, key) in keys.iter().enumerate() {
            let shape = fixture::shape(pages().0, pages().1);
            let block = fixture::content(key, pages().0, pages().1, 1, &shape).concat();
            digests.push(crc32fast::hash(&block));
            SharedBuf::new(&pool, at * BLOCK as usize, BLOCK as usize).unwrap().copy_in(0, &block);
        }
        raw.say(Kind::Put, 1, &local_put(desk.namespace, &keys, 1, digests));
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_millis(round));
        }
        drop(raw);
        expect_nothing_left(&stage.served);
        stage.rest();
        let request = desk.read_request(pages(), &keys);
        let (_, end) =
            desk.read(&ReadRequest { order: kvarts_contract::api::Order::Blocks, ..request.clone() });
        let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
        assert!(
            end.failures.iter().all(|(_, reason)| matches!(reason, Reason::NotHere(_) | Reason::InFlight))
        );
        let there: Vec<u32> = (0..100).filter(|block| !failed.contains(block)).collect();
        desk.expect_bytes(&request, &there, 1);
    }
}

/// Writes to memory until told to stop.
fn scribbler(region: &Arc<Region>, stop: &Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    let (memory, stop) = (SharedBuf::new(region, 0, region.len()).unwrap(), Arc::clone(stop));
    std::thread::spawn(move || {
        let mut byte = 0u8;
        while !stop.load(Ordering::Relaxed) {
            for at in (0..memory.len()).step_by(512) {
                memory.copy_in(at, &[byte]);
            }
            byte = byte.wrapping_add(1);
        }
    })
}

#[test]
fn a_client_that_rewrites_its_memory_during_a_put_stores_only_what_it_digested() {
    let stage = stage("local-rewrites-put");
    let desk = Desk::new(&stage, "rewrites");
    let mut raw = Raw::open(&stage.served);
    let pool = raw.pool(1, 20 * BLOCK);
    let stop = Arc::new(AtomicBool::new(false));
    let scribbling = scribbler(&pool, &stop);
    let (mut stored, mut refused) = (0, 0);
    for round in 0..40u64 {
        let keys = desk.keys(round * 20..round * 20 + 20);
        let view = |at: usize| SharedBuf::new(&pool, at * BLOCK as usize, BLOCK as usize).unwrap();
        let digests: Vec<u32> = (0..20).map(|at| crc32fast::hash(&view(at).to_vec())).collect();
        raw.say(Kind::Put, round, &local_put(desk.namespace, &keys, 1, digests.clone()));
        let reply = raw.answer::<proto::PutReply>().unwrap();
        for ((outcome, key), digest) in reply.outcomes.iter().zip(&keys).zip(digests) {
            let request = desk.read_request(pages(), &[*key]);
            let (_, end) = desk.read(&request);
            match outcome.what() {
                proto::put_outcome::What::Stored => {
                    stored += 1;
                    assert_eq!(end.failures, Vec::new());
                    let shape = fixture::shape(pages().0, pages().1);
                    let bytes = fixture::read_block(&request.into, 0, &shape).concat();
                    assert_eq!(crc32fast::hash(&bytes), digest, "other bytes than were digested");
                }
                _ => {
                    refused += 1;
                    assert_eq!(outcome.error.as_ref().unwrap().kind(), proto::Kind::Retry);
                    assert_eq!(end.failures, vec![(0, Reason::NotHere(*key))]);
                }
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    scribbling.join().unwrap();
    assert!(refused > 0, "the memory never changed in between: {stored} stored");
    drop((raw, pool));
    expect_nothing_left(&stage.served);
}

#[test]
fn a_client_that_rewrites_or_empties_its_memory_during_reads_takes_no_block_from_others() {
    let stage = stage("local-rewrites-read");
    let desk = Desk::new(&stage, "rewrites");
    let keys = desk.keys(0..100);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 100]);
    let mut raw = Raw::open(&stage.served);
    let bytes = 100 * BLOCK;
    let file = shared::sealed(bytes).unwrap();
    raw.share(proto::LocalMode::LocalDirect, bytes, &file).unwrap();
    let region = shared::map(&file, bytes, Box::new(())).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let scribbling = scribbler(&region, &stop);
    let mut mismatched = 0;
    for id in 0..30 {
        raw.say(Kind::Read, id, &local_read(desk.namespace, &keys, places(77, 100)));
        // Memory that was given back to the kernel comes again as zeros.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, 0, bytes / 2).unwrap();
        loop {
            let (head, body) = raw.hear().expect("the connection stays");
            match head.kind {
                Kind::End => {
                    let end = proto::LocalEnd::decode(&body[..]).unwrap().end.unwrap();
                    mismatched += end.failures.len();
                }
                Kind::Released => break,
                _ => {}
            }
        }
        // Another reader of the same blocks at the same time gets them all.
        desk.expect(pages(), &keys, 1);
    }
    stop.store(true, Ordering::Relaxed);
    scribbling.join().unwrap();
    assert!(mismatched > 0, "nothing was rewritten at the right moment");
    let stats = stage.served.daemon().state().engine.stats();
    assert_eq!((stats.counts.chunks_damaged, stats.counts.blocks_quarantined), (0, 0));
    drop((raw, region, file));
    expect_nothing_left(&stage.served);
    desk.expect(pages(), &keys, 1);
}

#[test]
fn a_client_that_takes_no_answers_holds_up_nobody() {
    let stage = stage("local-takes-nothing");
    let desk = Desk::new(&stage, "takes nothing");
    let keys = desk.keys(0..64);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 64]);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, 64 * BLOCK);
    raw.stream.set_nonblocking(true).unwrap();
    let exists = proto::ExistsRequest {
        namespace: desk.namespace.as_bytes().to_vec().into(),
        column: column(),
        keys: key_bytes(&keys),
        ..proto::ExistsRequest::default()
    };
    let mut id = 10u64;
    let stuck = loop {
        let some = frame(Kind::Exists, id, &exists);
        id += 1;
        match raw.stream.write(&some) {
            Ok(count) if count == some.len() => {}
            Ok(_) => break true,
            Err(error) => break error.kind() == std::io::ErrorKind::WouldBlock,
        }
        if id > 2_000_000 {
            break false;
        }
    };
    assert!(stuck, "the server takes requests without end");
    expect_served(&stage, 1);
    desk.expect(pages(), &keys, 1);
    let queued = stage.served.daemon().state().locals.clients().len();
    assert_eq!(queued, 1);
    drop(raw);
    expect_nothing_left(&stage.served);
}

#[test]
fn no_more_requests_are_taken_than_may_be_under_way() {
    let stage = stage("local-many-requests");
    let desk = Desk::new(&stage, "many");
    let keys = desk.keys(0..200);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 200]);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, 200 * BLOCK);
    let wanted = REQUESTS_MAX as u64 * 4;
    // From another thread: a client that takes no answers is not listened to.
    let (mut stream, namespace, all) = (raw.stream.try_clone().unwrap(), desk.namespace, keys.clone());
    let asking = std::thread::spawn(move || {
        for id in 0..wanted {
            let read = local_read(namespace, &all, places(1, 200));
            stream.write_all(&frame(Kind::Read, id, &read)).unwrap();
        }
    });
    let (mut ended, mut refused) = (0, 0);
    while ended + refused < wanted {
        let (head, body) = raw.hear().expect("the connection stays");
        match head.kind {
            Kind::Released => ended += 1,
            Kind::Failed => {
                assert_eq!(proto::Error::decode(&body[..]).unwrap().kind(), proto::Kind::Retry);
                refused += 1;
            }
            _ => {}
        }
    }
    asking.join().unwrap();
    assert!(ended >= REQUESTS_MAX as u64, "{ended} reads, {refused} refused");
    drop(raw);
    expect_nothing_left(&stage.served);
}

#[test]
fn leases_end_with_the_connection_that_took_them() {
    let stage = stage("local-leases");
    let desk = Desk::new(&stage, "leases");
    let keys = desk.keys(0..8);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 8]);
    let client = stage.served.local(None);
    client.register(&fixture::identity("leases"), &fixture::geometry()).unwrap();
    let (group, coordinate) = pages();
    let terms = LeaseTerms { hold: Duration::from_secs(3600), tenant: 0, cap_bytes: u64::MAX };
    let request =
        ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: Some(terms) };
    let lease = client.contains(&request).unwrap().lease.expect("all are here");
    let Pinned { lease: pinned, held, .. } =
        client.pin(desk.namespace, (group, coordinate), &keys, Duration::from_secs(60)).unwrap();
    assert_eq!((pinned.is_some(), held), (true, 8));
    let held = |daemon: &kvarts_server::daemon::Daemon| {
        daemon.state().locals.clients().iter().map(|client| client.leases).sum::<u32>()
    };
    assert_eq!(held(stage.served.daemon()), 2);
    client.renew(lease, Duration::from_secs(7200)).unwrap();
    assert!(client.unlock(pinned.unwrap()));
    drop(client);
    expect_nothing_left(&stage.served);
    // Nothing is held any more: the name that the lease had is unknown.
    assert!(stage.client.renew(lease, Duration::from_secs(1)).is_err());
    assert!(!stage.client.unlock(lease));
}

#[test]
fn a_pool_is_registered_with_the_rings_until_it_is_given_back() {
    let served = Served::start("local-registered", "");
    let client = served.local(None);
    let pinned = |daemon: &kvarts_server::daemon::Daemon| daemon.state().locals.pinned();
    let pool = client.pool(1 << 20).unwrap();
    assert_eq!(pinned(served.daemon()), 1 << 20);
    // It can be read into before, while and after it is registered: it is the same memory.
    let arena = Arena::new(pool);
    drop(arena);
    served.until("the pool is forgotten", |daemon| pinned(daemon) == 0);
    // One that goes at once may go before it was ever registered.
    for _ in 0..20 {
        drop(client.pool(1 << 20).unwrap());
    }
    drop(client);
    expect_nothing_left(&served);
}

#[test]
fn pools_leave_with_their_last_user_and_more_than_may_be_shared_is_refused() {
    let served = Served::start("local-pools", "[limits]\nshared = \"8 MiB\"\n");
    let client = served.local(None);
    let pool = client.pool(6 << 20).unwrap();
    assert!(client.pool(4 << 20).is_err());
    let piece = Arena::new(pool).try_take(4096).unwrap();
    assert_eq!(served.daemon().state().locals.mapped(), 6 << 20);
    drop(piece);
    served.until("the pool is forgotten", |daemon| daemon.state().locals.mapped() == 0);
    assert!(client.pool(4 << 20).is_ok());
    let mut left = Raw::open(&served);
    let _ = left.stream.read(&mut []);
    drop((left, client));
    expect_nothing_left(&served);
}
