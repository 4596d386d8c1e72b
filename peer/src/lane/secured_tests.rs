//! Lanes that encrypt: a node that shows no certificate, or another one's, gets nothing, and neither does one that speaks plainly.
#![allow(clippy::disallowed_methods, reason = "plays a peer on a thread of its own")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::Origins;
use kvarts_contract::buffers::BufMut;
use kvarts_contract::buffers::stream::Stretch;
use kvarts_contract::clock::Clock;
use kvarts_layout::StoreId;
use kvarts_layout::plan::Order;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::certificates::Authority;
use super::secured::Secured;
use super::tests::{
    Made, SERVER, events, expect_content, keys, listener, member, piece, request, shape, wait_for,
};
use super::wire::{Broken, Plain, Wire};
use super::*;
use crate::credentials::{Credentials, Pem, name};
use crate::path::Path;

const CALLER: StoreId = StoreId([0x11; 16]);

/// What a node shows that says it is `node`: a certificate of `by`, which trusts `trusts`.
fn pem(by: &Authority, trusts: &Authority, node: StoreId, expired: bool) -> Pem {
    let made = by.make(&name(node), expired);
    Pem {
        certificate: made.certificate.into_bytes(),
        key: made.key.into_bytes(),
        authority: trusts.pem().as_bytes().to_vec(),
    }
}

fn secured(node: StoreId, pem: &Pem) -> Member {
    Member { credentials: Some(Credentials::new(node, pem).unwrap()), ..member(node) }
}

/// A member whose certificate is another node's.
fn impostor(node: StoreId, authority: &Authority, real: StoreId) -> Member {
    Member { node, ..secured(real, &pem(authority, authority, real, false)) }
}

fn start(made: &Arc<Made>, member: Member) -> LaneServer {
    LaneServer::start(made.clone(), listener(), member, ServeLimits::default()).unwrap()
}

#[test]
fn pieces_come_over_an_encrypted_lane_as_over_a_plain_one() {
    let (authority, made) = (Authority::new(), Made::new(300_000));
    let server = start(&made, secured(SERVER, &pem(&authority, &authority, SERVER, false)));
    let caller = secured(CALLER, &pem(&authority, &authority, CALLER, false));
    let client = LaneClient::connect(server.address(), SERVER, caller).unwrap();
    wait_for("a connection", || client.counts().connected);
    let namespace = client.open(&made.identity(), &made.geometry).unwrap();
    let shape = shape(&made.geometry);
    for order in [Order::Blocks, Order::Layers] {
        let request = request(namespace, &shape, keys(0..12), order);
        let stream = client.read(piece(request.clone(), &Origins::any(12))).unwrap();
        let (_, end) = events(&stream);
        assert_eq!((end.usable_blocks, end.failures), (12, vec![]));
        (0..12).for_each(|block| expect_content(&shape, &request, block, 0..3, 1));
    }
    let counts = client.counts();
    assert_eq!((counts.connections, counts.damaged, counts.failures), (1, 0, 0));
    assert_eq!(server.counts().let_in, 1);
    wait_for("memory", || server.counts().memory == 0);
}

#[test]
fn a_node_without_a_certificate_of_the_authority_for_itself_is_not_let_in_and_calls_nobody() {
    let (ours, theirs, made) = (Authority::new(), Authority::new(), Made::new(300));
    let good = || secured(CALLER, &pem(&ours, &ours, CALLER, false));
    let server = start(&made, secured(SERVER, &pem(&ours, &ours, SERVER, false)));
    let callers = [
        ("plain words", member(CALLER)),
        ("plain words without a secret", Member { secret: None, ..member(CALLER) }),
        ("another authority's", secured(CALLER, &pem(&theirs, &ours, CALLER, false))),
        ("one that has expired", secured(CALLER, &pem(&ours, &ours, CALLER, true))),
        ("another node's", impostor(CALLER, &ours, StoreId([0x33; 16]))),
        ("another secret", Member { secret: Some(Secret([9; 32])), ..good() }),
    ];
    for (what, caller) in callers {
        let client = LaneClient::connect(server.address(), SERVER, caller).unwrap();
        wait_for(what, || client.counts().attempts > 1);
        assert_eq!((client.counts().connections, server.counts().let_in), (0, 0), "{what}");
    }
    let servers = [
        ("plain words", member(SERVER)),
        ("another authority's", secured(SERVER, &pem(&theirs, &ours, SERVER, false))),
        ("one that has expired", secured(SERVER, &pem(&ours, &ours, SERVER, true))),
        ("another node's", impostor(SERVER, &ours, StoreId([0x33; 16]))),
    ];
    for (what, member) in servers {
        let server = start(&made, member);
        let client = LaneClient::connect(server.address(), SERVER, good()).unwrap();
        wait_for(what, || client.counts().attempts > 1);
        assert_eq!((client.counts().connections, server.counts().let_in), (0, 0), "{what}");
    }
    let client = LaneClient::connect(server.address(), SERVER, good()).unwrap();
    wait_for("a connection", || client.counts().connected);
}

#[test]
fn certificates_that_were_replaced_count_from_the_next_connection_on() {
    let (old, new, made) = (Authority::new(), Authority::new(), Made::new(300));
    let credentials = Credentials::new(SERVER, &pem(&old, &old, SERVER, false)).unwrap();
    let server = start(&made, Member { credentials: Some(credentials.clone()), ..member(SERVER) });
    let early = secured(CALLER, &pem(&old, &old, CALLER, false));
    let early = LaneClient::connect(server.address(), SERVER, early).unwrap();
    wait_for("a connection", || early.counts().connected);
    assert!(credentials.replace(&pem(&new, &new, CALLER, false)).is_err(), "another node's");
    credentials.replace(&pem(&new, &new, SERVER, false)).unwrap();
    let late = secured(CALLER, &pem(&old, &old, CALLER, false));
    let late = LaneClient::connect(server.address(), SERVER, late).unwrap();
    wait_for("a refusal", || late.counts().attempts > 1);
    assert!(early.counts().connected && late.counts().connections == 0);
    let renewed = secured(CALLER, &pem(&new, &new, CALLER, false));
    let renewed = LaneClient::connect(server.address(), SERVER, renewed).unwrap();
    wait_for("a connection", || renewed.counts().connected);
}

#[test]
fn credentials_that_cannot_be_used_are_told_before_anything_is_served() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let good = pem(&ours, &ours, SERVER, false);
    let told = |pem: &Pem| Credentials::new(SERVER, pem).unwrap_err();
    let words = told(&pem(&ours, &ours, CALLER, false));
    assert!(words.contains("is for another node") && words.contains(&name(SERVER)), "{words}");
    let key = pem(&theirs, &ours, SERVER, false).key;
    assert!(told(&Pem { key, ..good.clone() }).contains("cannot be used"));
    assert!(told(&Pem { key: b"none".to_vec(), ..good.clone() }).starts_with("key: "));
    assert!(told(&Pem { authority: Vec::new(), ..good.clone() }).starts_with("authority: "));
    assert!(told(&Pem { certificate: Vec::new(), ..good }).starts_with("certificate: "));
}

/// What a caller says through a listener that writes it down, in one whole connection.
fn overhear(real: SocketAddr) -> (SocketAddr, std::thread::JoinHandle<Vec<u8>>) {
    let listener = listener();
    let between = listener.local_addr().unwrap();
    let heard = std::thread::spawn(move || {
        let (mut near, far) = (listener.accept().unwrap().0, TcpStream::connect(real).unwrap());
        let (mut back, mut to_caller) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        let answers = std::thread::spawn(move || {
            let _ = std::io::copy(&mut back, &mut to_caller);
        });
        let (mut words, mut bytes) = (Vec::new(), [0; 4096]);
        while let Ok(got @ 1..) = near.read(&mut bytes) {
            words.extend_from_slice(&bytes[..got]);
            let _ = (&far).write_all(&bytes[..got]);
        }
        let _ = far.shutdown(std::net::Shutdown::Both);
        answers.join().unwrap();
        words
    });
    (between, heard)
}

#[test]
fn what_was_overheard_of_an_encrypted_lane_opens_no_other_one() {
    let (authority, made) = (Authority::new(), Made::new(300));
    let server = start(&made, secured(SERVER, &pem(&authority, &authority, SERVER, false)));
    let (between, heard) = overhear(server.address());
    let caller = secured(CALLER, &pem(&authority, &authority, CALLER, false));
    let client = LaneClient::connect(between, SERVER, caller).unwrap();
    wait_for("a connection", || client.counts().connected);
    client.open(&made.identity(), &made.geometry).unwrap();
    drop(client);
    let words = heard.join().unwrap();
    assert!(!words.windows(8).any(|some| some == limits::MAGIC), "nothing of it is readable");
    let before = server.counts();
    assert_eq!(before.let_in, 1);
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let _ = stream.write_all(&words);
    wait_for("a refusal", || server.counts().cut > before.cut);
    assert_eq!(server.counts().let_in, 1);
}

/// Both ends of an encrypted lane whose sockets take little at once.
fn narrow() -> (Secured, Secured) {
    let authority = Authority::new();
    let listener = listener();
    sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    for socket in [&near, &far] {
        sockopt::set_socket_send_buffer_size(socket, 4096).unwrap();
    }
    let credentials = |node| Credentials::new(node, &pem(&authority, &authority, node, false)).unwrap();
    let near = Secured::calling(Arc::new(Plain::new(near)), &credentials(CALLER), SERVER).unwrap();
    let far = Secured::called(Arc::new(Plain::new(far)), &credentials(SERVER)).unwrap();
    let greet = |wire: &Secured| {
        let member = member(CALLER);
        wire.greet(&*member.host, &*member.clock, member.clock.now().plus(Duration::from_secs(60))).unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| greet(&near));
        greet(&far);
    });
    assert!(near.is_of(SERVER) && far.is_of(CALLER) && !far.is_of(SERVER));
    (near, far)
}

#[test]
fn bytes_arrive_once_and_in_order_however_little_a_socket_takes() {
    let (near, far) = narrow();
    let sent: Vec<u8> = (0..1_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let memory = |len| BufMut::zeroed(len).unwrap();
    let mut from = memory(sent.len());
    from.copy_in(0, &sent);
    let (from, to) = (from.share(), memory(sent.len()).share());
    let (mut source, mut target) = (Stretch::default(), Stretch::default());
    for at in 0..1000 {
        source.push(from.slice(at * 1000, 1000).unwrap());
        target.push(to.slice(at * 1000, 1000).unwrap());
    }
    let mut refusals = 0;
    while !target.is_done() {
        while !source.is_done() {
            match near.send_from(&mut source) {
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error, Errno::AGAIN);
                    refusals += 1;
                    break;
                }
            }
        }
        while let Ok(got) = far.receive_into(&mut target) {
            assert!(got > 0 || target.is_done());
            if target.is_done() {
                break;
            }
        }
    }
    assert!(refusals > 0 && to.to_vec() == sent);
    near.close();
    assert_eq!(far.receive(&mut [0; 10]), Ok(0), "its end is told");
}

#[test]
fn a_flipped_bit_ends_an_encrypted_lane() {
    let authority = Authority::new();
    let listener = listener();
    let address = listener.local_addr().unwrap();
    let flipping = std::thread::spawn(move || {
        let far = secured(SERVER, &pem(&authority, &authority, SERVER, false));
        let near = secured(CALLER, &pem(&authority, &authority, CALLER, false));
        let calling = std::thread::spawn(move || {
            let wire =
                near.connect(Arc::new(Plain::new(TcpStream::connect(address).unwrap())), SERVER).unwrap();
            (near, wire)
        });
        let stream = listener.accept().unwrap().0;
        let raw = stream.try_clone().unwrap();
        let wire = far.accept(Arc::new(Plain::new(stream))).unwrap();
        far.answer(&*wire).unwrap();
        let (_, called) = calling.join().unwrap();
        // Bytes that no side sealed.
        (&raw).write_all(&[0x17, 3, 3, 0, 32]).unwrap();
        (&raw).write_all(&[7; 32]).unwrap();
        let mut got = called.receive(&mut [0; 64]);
        while got == Err(Errno::AGAIN) {
            got = called.receive(&mut [0; 64]);
        }
        got
    });
    assert_eq!(flipping.join().unwrap(), Err(Errno::PROTO));
}

#[test]
fn one_who_connects_and_says_nothing_is_cut_after_a_time() {
    let authority = Authority::new();
    let (listener, far) = (listener(), secured(SERVER, &pem(&authority, &authority, SERVER, false)));
    let clock = kvarts_contract::clock::ManualClock::new(0);
    let far = Member { clock: clock.clone(), ..far };
    let _silent = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let wire = far.accept(Arc::new(Plain::new(listener.accept().unwrap().0))).unwrap();
    clock.advance(limits::HELLO);
    let until = clock.now();
    assert_eq!(wire.greet(&*far.host, &*clock, until), Err(Broken::Silent));
}
