//! Clients of the local path that take their memory's pages away, keep what they were given, or ask and say nothing: the server
//! pays for nothing, is not killed, and others come in.
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]
#![allow(clippy::result_large_err, reason = "the contract's error, as it came")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::raw::{
    BLOCK, Raw, column, expect_nothing_left, expect_served, key_bytes, local_put, local_read, places,
};
use crate::served::{ClientStage, Served};
use kvarts_contract::api::{BlockOutcome, ReadRequest};
use kvarts_contract::buffers::{SharedBuf, shared};
use kvarts_layout::BlockKey;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_wire::local::frame::Kind;
use kvarts_wire::proto;
use prost::Message;
use rustix::fs::MemfdFlags;

fn stage(name: &str) -> ClientStage {
    ClientStage::open(name)
}

/// Bytes of memory that a file has.
fn taken(file: &OwnedFd) -> i64 {
    rustix::fs::fstat(file).unwrap().st_blocks * 512
}

#[test]
fn looking_into_memory_that_is_all_holes_takes_no_page_and_kills_nobody() {
    let stage = stage("local-holes");
    let desk = Desk::new(&stage, "holes");
    let keys = desk.keys(0..8);
    let mut raw = Raw::open(&stage.served);
    let file = shared::sealed(8 * BLOCK).unwrap();
    raw.share(proto::LocalMode::LocalDirect, 8 * BLOCK, &file).unwrap();
    raw.say(Kind::Put, 2, &local_put(desk.namespace, &keys, 77, vec![1; 8]));
    let reply = raw.answer::<proto::PutReply>().unwrap();
    let retry = |outcome: &proto::PutOutcome| outcome.error.as_ref().unwrap().kind() == proto::Kind::Retry;
    assert!(reply.outcomes.len() == 8 && reply.outcomes.iter().all(retry));
    // What a hole holds is zeros, and who says so has them stored.
    let zeros = crc32fast::hash(&vec![0; BLOCK as usize]);
    raw.say(Kind::Put, 3, &local_put(desk.namespace, &keys, 77, vec![zeros; 8]));
    let reply = raw.answer::<proto::PutReply>().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| outcome.what() == proto::put_outcome::What::Stored));
    assert_eq!(taken(&file), 0, "the server paid for pages by looking");
    drop((raw, file));
    expect_nothing_left(&stage.served);
    expect_served(&stage, 1);
}

#[test]
fn windows_for_memory_that_is_not_shared_are_registered_with_the_rings() {
    let stage = ClientStage::local("local-windows");
    let desk = Desk::new(&stage, "windows");
    let keys = desk.keys(0..4);
    desk.store(pages(), &keys, 1, kvarts_layout::Layout::LayerBlock);
    desk.expect(pages(), &keys, 1);
    assert_eq!(stage.served.daemon().state().locals.pinned(), kvarts_wire::local::limits::WINDOWS_BYTES);
}

#[test]
fn a_window_that_its_client_verifies_comes_with_digests_and_one_that_the_server_verifies_without() {
    let stage = stage("local-verified-windows");
    let desk = Desk::new(&stage, "verified windows");
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    for (memory, client_verifies) in [(5, true), (6, false)] {
        let mut raw = Raw::open(&stage.served);
        let file = shared::sealed(4 * BLOCK).unwrap();
        let mode = proto::LocalMode::LocalCopied.into();
        let share =
            proto::ShareRequest { memory, mode, bytes: 4 * BLOCK, client_verifies, pool: Default::default() };
        raw.say_with(Kind::Share, 1, &share, &file);
        raw.answer::<proto::ShareReply>().unwrap();
        raw.say(Kind::Read, 2, &local_read(desk.namespace, &keys, places(memory, 4)));
        let (mut parts, mut end) = (Vec::new(), None);
        while let Some((head, body)) = raw.hear() {
            match head.kind {
                Kind::Arrived => parts.extend(proto::LocalArrived::decode(&body[..]).unwrap().parts),
                Kind::End => end = proto::LocalEnd::decode(&body[..]).unwrap().end,
                _ => break,
            }
        }
        assert_eq!(end.unwrap().usable_blocks, 4);
        assert_eq!(parts.len(), 3, "one for each layer");
        let view = shared::map(&file, 4 * BLOCK, Box::new(())).unwrap();
        for (layer, part) in (0u64..).zip(parts) {
            let of = |(part, block): (u64, u64)| {
                let at = block * BLOCK + (layer * 2 + part) * 4096;
                SharedBuf::new(&view, at as usize, 4096).unwrap().crc32(0, 4096).to_le_bytes()
            };
            let chunks = (0..2).flat_map(|part| (0..4).map(move |block| (part, block)));
            let wanted: Vec<u8> = chunks.flat_map(of).collect();
            assert_eq!(part.digests, if client_verifies { wanted } else { Vec::new() });
        }
    }
}

#[test]
fn of_a_put_only_the_blocks_that_changed_are_refused() {
    let stage = stage("local-some-changed");
    let desk = Desk::new(&stage, "some changed");
    let keys = desk.keys(0..6);
    let mut raw = Raw::open(&stage.served);
    let _pool = raw.pool(1, 6 * BLOCK);
    let zeros = crc32fast::hash(&vec![0; BLOCK as usize]);
    let digests = [zeros, zeros, 5, zeros, 6, 7].to_vec();
    raw.say(Kind::Put, 2, &local_put(desk.namespace, &keys, 1, digests));
    let reply = raw.answer::<proto::PutReply>().unwrap();
    let stored = |outcome: &proto::PutOutcome| outcome.what() == proto::put_outcome::What::Stored;
    let found: Vec<bool> = reply.outcomes.iter().map(stored).collect();
    assert_eq!(found, [true, true, false, true, false, false]);
    let request = desk.read_request(pages(), &keys);
    let (_, end) = desk.read(&ReadRequest { order: kvarts_contract::api::Order::Blocks, ..request });
    let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
    assert_eq!(failed, [2, 4, 5]);
}

#[test]
fn memory_that_takes_no_bytes_any_more_is_an_error_of_its_client_alone() {
    let stage = stage("local-unwritable");
    let desk = Desk::new(&stage, "unwritable");
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    let mut raw = Raw::open(&stage.served);
    let file =
        rustix::fs::memfd_create("unwritable", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 8 * BLOCK).unwrap();
    shared::seal(&file).unwrap();
    raw.share(proto::LocalMode::LocalDirect, 8 * BLOCK, &file).unwrap();
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
    // Not on pages: the server copies.
    let mut into = places(77, 4);
    into.targets.iter_mut().for_each(|target| target.base += 64);
    raw.say(Kind::Read, 5, &local_read(desk.namespace, &keys, into.clone()));
    let (mut end, mut announced) = (None, 0);
    loop {
        let (head, body) = raw.hear().expect("the connection stays");
        match head.kind {
            Kind::End => end = proto::LocalEnd::decode(&body[..]).unwrap().end,
            Kind::Released => break,
            _ => announced += 1,
        }
    }
    let end = end.unwrap();
    assert_eq!((announced, end.usable_blocks, end.failures.len()), (0, 0, 4));
    assert!(end.failures.iter().all(|failure| failure.error.as_ref().unwrap().message.contains("unshare")));
    raw.say(Kind::Read, 6, &local_read(desk.namespace, &keys, into));
    assert_eq!(raw.answer::<proto::UnlockReply>().unwrap_err().reason(), proto::Reason::Malformed);
    desk.expect(pages(), &keys, 1);
    drop((raw, file));
    expect_nothing_left(&stage.served);
    assert_eq!(stage.served.daemon().state().engine.stats().counts.blocks_quarantined, 0);
}

/// An engine's file of `/dev/shm` cannot be sealed. It is shortened before a read, between two, and while many are under way.
#[test]
fn memory_that_is_shortened_is_an_error_of_its_client_alone() {
    let stage = stage("local-shortened");
    let desk = Desk::new(&stage, "shortened");
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    for (round, kept) in
        (0..40u64).map(|round| (round, [0, 4096, 2 * BLOCK, 4 * BLOCK - 4096][round as usize % 4]))
    {
        let mut raw = Raw::open(&stage.served);
        let file = rustix::fs::memfd_create("engine", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * BLOCK).unwrap();
        raw.share(proto::LocalMode::LocalAdopted, 4 * BLOCK, &file).unwrap();
        let ask =
            |raw: &mut Raw, id| raw.say(Kind::Read, id, &local_read(desk.namespace, &keys, places(77, 4)));
        let end = |raw: &mut Raw| {
            let mut end = None;
            loop {
                match raw.hear().expect("the connection stays") {
                    (head, body) if head.kind == Kind::End => {
                        end = proto::LocalEnd::decode(&body[..]).unwrap().end;
                    }
                    (head, _) if head.kind == Kind::Released => return end.unwrap(),
                    _ => {}
                }
            }
        };
        if round % 2 == 0 {
            ask(&mut raw, 4);
            assert_eq!(end(&mut raw).usable_blocks, 4, "it may be short, but is not yet");
        }
        if round < 20 {
            rustix::fs::ftruncate(&file, kept).unwrap();
            ask(&mut raw, 5);
            let end = end(&mut raw);
            assert!(
                u64::from(end.usable_blocks) * BLOCK <= kept && !end.failures.is_empty(),
                "{kept}: {end:?}"
            );
            // What took no bytes takes none later, and its client is told so at once.
            ask(&mut raw, 6);
            assert_eq!(raw.answer::<proto::UnlockReply>().unwrap_err().reason(), proto::Reason::Malformed);
        } else {
            ask(&mut raw, 5);
            rustix::fs::ftruncate(&file, kept).unwrap();
            let _ = end(&mut raw);
        }
        // A put of bytes that are gone is one of zeros, which were not announced.
        let other = desk.keys(8..12);
        raw.say(Kind::Put, 7, &local_put(desk.namespace, &other, 77, vec![1; 4]));
        let reply = raw.answer::<proto::PutReply>();
        let stored = |outcome: &proto::PutOutcome| outcome.what() == proto::put_outcome::What::Stored;
        assert!(reply.is_err() || !reply.unwrap().outcomes.iter().any(stored));
    }
    desk.expect(pages(), &keys, 1);
    expect_nothing_left(&stage.served);
    let counts = stage.served.daemon().state().engine.stats().counts;
    assert_eq!((counts.blocks_quarantined, counts.chunks_damaged), (0, 0));
}

/// Half of the blocks lie on pages, which the disk writes to by itself, and half are copied, which fails: the failure says
/// nothing about what the disk still writes.
#[test]
fn memory_that_takes_no_bytes_is_held_until_the_last_word_about_its_read() {
    let stage = stage("local-held");
    let desk = Desk::new(&stage, "held");
    let keys = desk.keys(0..8);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 8]);
    let mut raw = Raw::open(&stage.served);
    let file = rustix::fs::memfd_create("held", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 17 * BLOCK).unwrap();
    shared::seal(&file).unwrap();
    raw.share(proto::LocalMode::LocalDirect, 17 * BLOCK, &file).unwrap();
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::FUTURE_WRITE).unwrap();
    let mut into = places(77, 8);
    into.targets.iter_mut().skip(3).for_each(|target| target.base += 8 * BLOCK + 64);
    raw.say(Kind::Read, 5, &local_read(desk.namespace, &keys, into));
    let end = loop {
        let (head, body) = raw.hear().expect("the connection stays");
        match head.kind {
            Kind::End => break proto::LocalEnd::decode(&body[..]).unwrap(),
            kind => assert_eq!(kind, Kind::Arrived),
        }
    };
    assert_eq!((end.end.unwrap().usable_blocks, end.held_bytes), (0, 17 * BLOCK));
    assert!(matches!(raw.hear(), Some((head, _)) if head.kind == Kind::Released));
    drop((raw, file));
    expect_nothing_left(&stage.served);
}

#[test]
fn memory_that_the_server_made_counts_for_as_long_as_a_client_may_keep_it() {
    let served = Served::start("local-kept", "[limits]\nshared = \"8 MiB\"\n");
    let mut kept = Vec::new();
    let mut made = |bytes: u64| {
        let mut raw = Raw::open(&served);
        let mode = proto::LocalMode::LocalCopied.into();
        raw.say(Kind::Share, 1, &proto::ShareRequest { memory: 1, mode, bytes, ..Default::default() });
        let answer = raw.answer::<proto::ShareReply>();
        kept.append(&mut raw.files);
        answer.map(drop)
    };
    assert!(made(1 << 20).is_ok() && made(1 << 20).is_ok());
    let error = made(4096).unwrap_err();
    assert!(
        error.kind() == proto::Kind::Retry && error.message.contains("a memfd of the client"),
        "{}",
        error.message
    );
    // A file of the client's own is the client's to keep.
    for _ in 0..8 {
        let (mut raw, file) = (Raw::open(&served), shared::sealed(2 << 20).unwrap());
        raw.share(proto::LocalMode::LocalCopied, 2 << 20, &file).unwrap();
        drop(raw);
        expect_nothing_left(&served);
    }
    assert!(served.local(None).pool(2 << 20).is_ok());
}

#[test]
fn connections_that_say_nothing_wait_outside_and_others_come_in_after_them() {
    let stage = stage("local-silent");
    let most = kvarts_wire::local::limits::UNKNOWN_MAX;
    let silent: Vec<UnixStream> = (0..most * 2)
        .map_while(|_| {
            let socket = rustix::net::socket_with(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
                None,
            );
            let path = rustix::net::SocketAddrUnix::new(stage.served.daemon().socket().unwrap()).unwrap();
            let socket = socket.unwrap();
            rustix::net::connect(&socket, &path).ok().map(|()| UnixStream::from(socket))
        })
        .collect();
    assert!(silent.len() > most / 2, "{} connected", silent.len());
    // No more of them than may be unknown are kept: those that came first have gone.
    let is_closed = |one: &UnixStream| {
        matches!(rustix::net::recv(one, &mut [0; 1], rustix::net::RecvFlags::DONTWAIT), Ok((0, _)))
    };
    stage.served.until("the first ones are closed", |_| {
        silent.iter().take(silent.len().saturating_sub(most)).all(is_closed)
    });
    drop(silent);
    expect_served(&stage, 1);
    drop(Raw::open(&stage.served));
    expect_nothing_left(&stage.served);
}

#[test]
fn a_long_look_up_is_answered_while_the_session_goes_on() {
    let stage = stage("local-long-look-up");
    let desk = Desk::new(&stage, "long");
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    let mut raw = Raw::open(&stage.served);
    let all = [keys.clone(), desk.keys(4..20_000)].concat();
    let exists = |keys: &[BlockKey], lease_ms| proto::ExistsRequest {
        namespace: desk.namespace.as_bytes().to_vec().into(),
        column: column(),
        keys: key_bytes(keys),
        lease_ms,
        ..proto::ExistsRequest::default()
    };
    for id in 0..4 {
        raw.say(Kind::Exists, id, &exists(&all, 0));
    }
    raw.say(Kind::Exists, 4, &exists(&keys, 3_600_000));
    let mut answered = std::collections::BTreeMap::new();
    while answered.len() < 5 {
        let (head, body) = raw.hear().expect("the connection stays");
        assert_eq!(head.kind, Kind::Done);
        let reply = proto::ExistsReply::decode(&body[..]).unwrap();
        answered.insert(head.id, (reply.presence.len(), reply.lease != 0));
    }
    let long = (20_000, false);
    assert_eq!(answered.into_values().collect::<Vec<_>>(), [long, long, long, long, (4, true)]);
    drop(raw);
    expect_nothing_left(&stage.served);
    assert_eq!(stage.served.daemon().state().engine.holding().leases, 0);
}

#[test]
fn the_lease_of_a_long_look_up_ends_with_the_session_that_asked_for_it() {
    let stage = stage("local-lost-lease");
    let desk = Desk::new(&stage, "lost");
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    let exists = proto::ExistsRequest {
        namespace: desk.namespace.as_bytes().to_vec().into(),
        column: column(),
        keys: key_bytes(&[keys, desk.keys(4..60_000)].concat()),
        lease_ms: 3_600_000,
        ..proto::ExistsRequest::default()
    };
    let state = std::sync::Arc::clone(stage.served.daemon().state());
    for _ in 0..8 {
        let mut raw = Raw::open(&stage.served);
        raw.say(Kind::Exists, 1, &exists);
        // It leaves while it is looked up, as nearly as can be seen from outside.
        stage.served.until("the look-up is under way", |_| {
            state.heavy.used() > 0 || state.engine.holding().leases > 0
        });
        drop(raw);
        expect_nothing_left(&stage.served);
        assert_eq!(state.engine.holding().leases, 0);
    }
}
