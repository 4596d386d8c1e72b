//! Whatever bytes come over a lane: an end of the connection with a reason, no panic, no more memory than there may be, and nothing
//! announced that is not what its digests say.
#![allow(clippy::disallowed_methods, reason = "opens a descriptor")]

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use kvarts_contract::api::{Origins, ReadEvent, ReadProgress, ReadRequest, ReadStream, Verify, read_channel};
use kvarts_contract::buffers::stream::Stretch;
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::plan::Order;
use kvarts_layout::{BlockShape, Coordinate, Group, NamespaceId, StoreId};
use kvarts_wire::proto;
use proptest::prelude::*;
use prost::Message;
use rustix::io::Errno;

use super::arrival::Arrival;
use super::asked::{Asked, Namespaces};
use super::client::{Counters, Outline, Wanted};
use super::frame::{HEAD_BYTES, Head, Incoming, Kind, bare, frame};
use super::limits::{CHUNKS_MAX, KEYS_MAX, MAGIC, PIECE_BYTES_MAX, REQUEST_BYTES_MAX, TIMEOUT_MAX};
use super::serving::Served;
use super::tests::{SERVER, geometry, identity, keys, member, places, shape};
use super::wire::{Broken, Wire};
use crate::path::{Path, Piece};

/// A stream of bytes in memory that come in steps of these lengths, in turn, and then end. What is sent is kept.
#[derive(Debug)]
struct Tape {
    nothing: OwnedFd,
    steps: Vec<usize>,
    state: Mutex<(usize, usize, Vec<u8>)>,
    bytes: Vec<u8>,
}

impl Tape {
    fn new(bytes: Vec<u8>, steps: Vec<usize>) -> Self {
        Self {
            nothing: std::fs::File::open("/dev/null").unwrap().into(),
            steps,
            state: Mutex::default(),
            bytes,
        }
    }

    fn next(&self, room: usize) -> Result<&[u8], Errno> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, turn, _) = &mut *state;
        let step = self.steps.get(*turn % self.steps.len().max(1)).copied().unwrap_or(usize::MAX);
        *turn += 1;
        if step == 0 {
            return Err(Errno::AGAIN);
        }
        let end = at.saturating_add(step.min(room)).min(self.bytes.len());
        let some = &self.bytes[*at..end];
        *at = end;
        Ok(some)
    }

    /// Bytes that were taken.
    fn taken(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Wire for Tape {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.nothing.as_fd()
    }

    fn receive(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let some = self.next(into.len())?;
        into[..some.len()].copy_from_slice(some);
        Ok(some.len())
    }

    fn receive_into(&self, into: &mut Stretch) -> Result<usize, Errno> {
        let room = (0..).map_while(|at| into.range(at)).map(|range| range.len()).sum();
        let some = self.next(room)?;
        let filled = into.fill(some);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 -= some.len() - filled;
        Ok(filled)
    }

    fn send(&self, bytes: &[u8], _more: bool) -> Result<usize, Errno> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).2.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn send_from(&self, _: &mut Stretch) -> Result<usize, Errno> {
        Err(Errno::PIPE)
    }

    fn close(&self) {}
}

/// All frames that come, and why there are no more; and the most that was kept of a body.
fn frames(tape: &Tape, limit: usize) -> (Vec<(Head, Bytes)>, Broken) {
    let (mut incoming, mut found) = (Incoming::default(), Vec::new());
    loop {
        match incoming.next(tape, |_| Some(limit)) {
            Ok(Some(frame)) => found.push(frame),
            Ok(None) => {}
            Err(broken) => return (found, broken),
        }
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    use Kind::{Answer, Cancel, Doubt, Hello, Open, Ping, Pong, Proof, Read, Ready, Welcome};
    prop::sample::select(vec![Hello, Welcome, Proof, Ready, Open, Read, Cancel, Doubt, Ping, Answer, Pong])
}

fn steps() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![Just(0), 1usize..40, Just(usize::MAX)], 1..8)
        .prop_filter("something comes", |steps| steps.iter().any(|step| *step > 0))
}

proptest! {
    #[test]
    fn any_bytes_however_they_are_cut_up_are_frames_or_the_end_of_the_connection(
        bytes in prop::collection::vec(any::<u8>(), 0..300), steps in steps(), limit in 0usize..200,
    ) {
        let tape = Tape::new(bytes.clone(), steps);
        let (found, _) = frames(&tape, limit);
        let mut again = Vec::new();
        for (head, body) in &found {
            prop_assert!(head.length == body.len() && body.len() <= limit);
            again.extend(whole(head, body));
        }
        prop_assert!(bytes.starts_with(&again));
    }

    #[test]
    fn frames_come_back_however_they_are_cut_up_and_a_changed_bit_ends_the_connection_at_its_frame(
        said in prop::collection::vec((kinds(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..90)), 1..6),
        steps in steps(), flip in any::<prop::sample::Index>(),
    ) {
        let parts: Vec<Vec<u8>> = said
            .iter()
            .map(|(kind, number, body)| frame(*kind, *number, &proto::LaneProof { proof: body.clone().into() }))
            .collect();
        let (found, broken) = frames(&Tape::new(parts.concat(), steps.clone()), 200);
        let told: Vec<_> = found.iter().map(|(head, _)| (head.kind, head.number)).collect();
        prop_assert_eq!(told, said.iter().map(|(kind, number, _)| (*kind, *number)).collect::<Vec<_>>());
        prop_assert_eq!(broken, Broken::Gone);
        let mut bytes = parts.concat();
        let bit = flip.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        let before = parts.iter().scan(0, |end, part| { *end += part.len(); Some(*end) });
        let before = before.filter(|end| *end <= bit / 8).count();
        let (changed, broken) = frames(&Tape::new(bytes, steps), 200);
        prop_assert_eq!(&changed[..], &found[..before]);
        // A length that is greater now may be waited for.
        prop_assert!(broken == Broken::Gone || matches!(broken, Broken::Protocol(_)));
    }

    #[test]
    fn first_words_that_prove_nothing_let_nobody_in(
        bytes in prop::collection::vec(any::<u8>(), 0..200), steps in steps(),
        begins in 0u8..4, hello in hellos(), welcome in welcomes(), proof in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let proof = proto::LaneProof { proof: proof.into() };
        let to_called = [
            bytes.clone(),
            [&MAGIC[..], &bytes[..]].concat(),
            [&MAGIC[..], &frame(Kind::Hello, 0, &hello)[..], &bytes[..]].concat(),
            [&MAGIC[..], &frame(Kind::Hello, 0, &hello)[..], &frame(Kind::Proof, 0, &proof)[..]].concat(),
        ];
        let called = member(SERVER).answer(&Tape::new(to_called[usize::from(begins)].clone(), steps.clone()));
        prop_assert!(called.is_err(), "{called:?}");
        let to_caller = [
            bytes.clone(),
            frame(Kind::Welcome, 0, &welcome),
            [&frame(Kind::Welcome, 0, &welcome)[..], &bare(Kind::Ready, 0)].concat(),
            [&bare(Kind::Ready, 0)[..], &bytes].concat(),
        ];
        let caller = member(StoreId([1; 16])).call(&Tape::new(to_caller[usize::from(begins)].clone(), steps), SERVER);
        prop_assert!(caller.is_err(), "{caller:?}");
    }

    #[test]
    fn a_request_is_within_its_bounds_or_ends_the_connection(
        read in reads(), noise in prop::option::of((any::<prop::sample::Index>(), any::<u8>())), more in any::<u8>(),
    ) {
        let mut body = read.encode_to_vec();
        if let Some((at, byte)) = noise.filter(|_| !body.is_empty()) {
            let at = at.index(body.len());
            body[at] = byte;
            body.truncate(body.len() - usize::from(more % 4).min(body.len()));
        }
        let geometry = geometry(300);
        let mut namespaces = Namespaces::default();
        let open = proto::LaneOpen { namespace: 5, identity: identity(&geometry, b"salt").encode().unwrap().into() };
        namespaces.open(open.encode_to_vec().into()).unwrap();
        prop_assert!(body.len() <= REQUEST_BYTES_MAX);
        let _ = Namespaces::default().open(body.clone().into());
        let Ok(asked) = Asked::parse(body.into(), &namespaces, &Shapes, Nanos(7)) else { return Ok(()) };
        prop_assert!((1..=KEYS_MAX).contains(&asked.request.keys.len()) && asked.origins.len() == asked.request.keys.len());
        prop_assert!(asked.request.deadline.is_some_and(|at| at <= Nanos(7).plus(TIMEOUT_MAX)));
        prop_assert!(matches!(asked.request.class, Class::Prefetch | Class::Background) && asked.bytes() <= PIECE_BYTES_MAX);
        if let Ok(shape) = &asked.shape {
            prop_assert!(!asked.request.layers.is_empty() && asked.request.layers.end as usize <= shape.layers().len());
        }
    }

    /// The answer says what it wants, and any bytes follow: what is announced is what its digests say, and memory for which no
    /// reader waits is not written to.
    #[test]
    fn whatever_an_answer_says_what_is_announced_came_and_matches_its_digests(
        answer in answers(), bytes in prop::collection::vec(any::<u8>(), 0..2500), steps in steps(),
        by_blocks in any::<bool>(), right in prop::collection::vec(any::<bool>(), 18), waits in any::<bool>(),
    ) {
        let geometry = geometry(60);
        let shape = shape(&geometry);
        let order = if by_blocks { Order::Blocks } else { Order::Layers };
        let outline = Outline { order, shape: Arc::clone(&shape), layers: 0..3, blocks: 3 };
        let answer = fitting(answer, &outline, &bytes, &right);
        let (wanted, stream, request) = wanted(&shape, order);
        let mut waiting = waits.then_some(wanted);
        let counters = Counters::default();
        let tape = Tape::new(bytes.clone(), steps);
        let Ok(mut arrival) = Arrival::new(outline, &mut waiting, &answer) else {
            prop_assert_eq!(waiting.is_some(), waits, "who waits is told by the caller");
            return Ok(());
        };
        prop_assert!(arrival.left() <= shape.block_bytes() * 3);
        let mut scratch = vec![0; 100];
        let is_whole = loop {
            if arrival.is_whole() {
                break true;
            }
            if arrival.receive(&tape, &mut scratch, &counters).is_err() {
                break false;
            }
        };
        prop_assert!(tape.taken() as u64 <= answer.bytes, "no byte of what comes next");
        if !is_whole || !waits {
            return Ok(());
        }
        let said = answer.bytes as usize;
        drop(arrival.finish(&counters));
        let mut announced: BTreeSet<(u32, u32)> = BTreeSet::new();
        loop {
            match stream.next_blocking() {
                ReadEvent::Block(block) => announced.extend((0..3).map(|layer| (layer, block))),
                ReadEvent::Layer { layer, blocks } => announced.extend((0..blocks).map(|block| (layer, block))),
                ReadEvent::Released => {}
                ReadEvent::End(end) => {
                    prop_assert!(end.usable_blocks <= 3 && end.failures.iter().all(|(block, _)| *block < 3));
                    break;
                }
            }
        }
        // The digests in the order in which the bytes came.
        let digests: Vec<u32> = answer.digests.as_chunks::<4>().0.iter().copied().map(u32::from_le_bytes).collect();
        let delivery = comes(order, &answer);
        let (mut at, mut chunk) = (0, 0);
        delivery.each(&shape, |one| {
            let came = &bytes[at..at + one.bytes as usize];
            let place = request.into.chunk(one.part, one.block, one.bytes).unwrap().to_vec();
            if announced.contains(&(one.layer, one.block)) {
                assert!(crc32fast::hash(came) == digests[chunk] && place == came, "{one:?}");
            }
            (at, chunk) = (at + one.bytes as usize, chunk + 1);
        });
        assert_eq!(at, said);
        let sent: BTreeSet<(u32, u32)> = {
            let mut sent = BTreeSet::new();
            delivery.each(&shape, |one| {
                sent.insert((one.layer, one.block));
            });
            sent
        };
        prop_assert!(announced.is_subset(&sent), "nothing is announced that did not come");
    }
}

/// The bytes of a frame.
fn whole(head: &Head, body: &Bytes) -> Vec<u8> {
    let mut made = bare(head.kind, head.number);
    made[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
    let mut digest = crc32fast::Hasher::new();
    digest.update(&made[..16]);
    digest.update(body);
    made[16..HEAD_BYTES].copy_from_slice(&digest.finalize().to_le_bytes());
    made.extend_from_slice(body);
    made
}

fn hellos() -> impl Strategy<Value = proto::LaneHello> {
    let node = prop_oneof![Just(vec![1; 16]), prop::collection::vec(any::<u8>(), 0..20)];
    let peer = prop_oneof![3 => Just(SERVER.0.to_vec()), 1 => prop::collection::vec(any::<u8>(), 0..20)];
    let nonce = prop_oneof![3 => Just(vec![3; 32]), 1 => prop::collection::vec(any::<u8>(), 0..40)];
    let cluster = prop_oneof![3 => Just("one".to_owned()), 1 => ".{0,20}"];
    (0u32..3, cluster, node, peer, nonce, any::<bool>()).prop_map(
        |(version, cluster, node, peer, nonce, secret)| {
            let (node, peer, nonce) = (node.into(), peer.into(), nonce.into());
            proto::LaneHello { version, cluster, node, peer, nonce, secret }
        },
    )
}

fn welcomes() -> impl Strategy<Value = proto::LaneWelcome> {
    let node = prop_oneof![3 => Just(SERVER.0.to_vec()), 1 => prop::collection::vec(any::<u8>(), 0..20)];
    let nonce = prop_oneof![3 => Just(vec![3; 32]), 1 => prop::collection::vec(any::<u8>(), 0..40)];
    let proof = prop::collection::vec(any::<u8>(), 0..40);
    (0u32..3, node, nonce, proof).prop_map(|(version, node, nonce, proof)| {
        let (node, nonce, proof) = (node.into(), nonce.into(), proof.into());
        proto::LaneWelcome { version, node, nonce, proof }
    })
}

fn reads() -> impl Strategy<Value = proto::LaneRead> {
    let number = || prop_oneof![4 => 0u32..5, 1 => any::<u32>()];
    let namespace = prop_oneof![4 => Just(5), 1 => any::<u32>()];
    let keys = (0usize..40, 0usize..2).prop_map(|(keys, odd)| vec![7; keys * 32 + odd]);
    let origins = prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(any::<u8>(), 0..60)];
    let rest = (number(), number(), any::<bool>(), any::<i32>(), any::<u64>(), origins);
    (namespace, keys, rest).prop_map(
        |(namespace, keys, (first_layer, layers, by_blocks, class, timeout_us, origins))| proto::LaneRead {
            namespace,
            column: None,
            keys: keys.into(),
            first_layer,
            layers,
            by_blocks,
            class,
            timeout_us,
            origins: origins.into(),
        },
    )
}

/// Answers of which most could be some.
fn answers() -> impl Strategy<Value = proto::LaneAnswer> {
    let failed = prop_oneof![
        3 => prop::collection::btree_set(0u32..3, 0..3).prop_map(|blocks| blocks.into_iter().collect::<Vec<_>>()),
        1 => prop::collection::vec(any::<u32>(), 0..4),
    ];
    let count = || prop_oneof![6 => 0u32..4, 1 => any::<u32>()];
    (count(), count(), failed, prop::collection::vec(any::<i32>(), 0..4), any::<u8>(), any::<u64>()).prop_map(
        |(usable_blocks, usable_layers, failed, mut reasons, seed, bytes)| {
            reasons.resize(failed.len(), i32::from(seed % 40));
            let origins = (0..48).map(|at| if at % 16 == 0 { seed % 3 } else { 1 }).collect::<Vec<u8>>();
            let (digests, origins) = (Bytes::new(), origins.into());
            let lives = Bytes::from(vec![seed; 48]);
            proto::LaneAnswer {
                usable_blocks,
                usable_layers,
                failed,
                reasons,
                origins,
                digests,
                bytes,
                lives,
            }
        },
    )
}

/// What an answer says that comes.
fn comes(order: Order, answer: &proto::LaneAnswer) -> super::delivery::Delivery {
    let (layers, blocks) = match order {
        Order::Layers => (answer.usable_layers, (0..answer.usable_blocks).collect()),
        Order::Blocks => (3, (0..3).filter(|block| !answer.failed.contains(block)).collect()),
    };
    let blocks = if answer.bytes == 0 { Vec::new() } else { blocks };
    super::delivery::Delivery { order, layers: 0..if answer.bytes == 0 { 0 } else { layers }, blocks }
}

/// The same answer with lengths that fit, and digests of which some are those of the bytes that follow.
fn fitting(
    mut answer: proto::LaneAnswer,
    outline: &Outline,
    bytes: &[u8],
    right: &[bool],
) -> proto::LaneAnswer {
    if answer.usable_blocks > 3 || answer.usable_layers > 3 {
        return answer;
    }
    answer.bytes = 1;
    let delivery = comes(outline.order, &answer);
    let (mut at, mut chunk, mut digests) = (0, 0, Vec::new());
    delivery.each(&outline.shape, |one| {
        let end = at + one.bytes as usize;
        let digest = bytes.get(at..end).map_or(0, crc32fast::hash);
        let wrong = u32::from(!right[chunk % right.len()]);
        digests.extend_from_slice(&(digest ^ wrong).to_le_bytes());
        (at, chunk) = (end, chunk + 1);
    });
    answer.origins = answer.origins.slice(..delivery.blocks.len() * 16);
    answer.lives = answer.lives.slice(..delivery.blocks.len() * 16);
    (answer.bytes, answer.digests) = (delivery.bytes(&outline.shape), digests.into());
    answer
}

/// A reader that waits for three blocks.
fn wanted(shape: &Arc<BlockShape>, order: Order) -> (Wanted, ReadStream, ReadRequest) {
    let (sink, stream) = read_channel();
    let (group, coordinate) = (Group(0), Coordinate::Replicated);
    let request = ReadRequest::new(NamespaceId([0; 32]), group, coordinate, keys(0..3), places(shape, 3));
    let request = ReadRequest { order, verify: Verify::Always, ..request };
    let progress = ReadProgress::new(order, 3, 0..3);
    let (origins, kept) = (Origins::any(3), request.clone());
    let wanted = Wanted {
        request,
        origins,
        first: 0,
        sink,
        deadline: Nanos(u64::MAX),
        asked: Nanos(0),
        progress,
        namespace: 0,
    };
    (wanted, stream, kept)
}

/// A store of which only the shapes are asked.
#[derive(Debug)]
struct Shapes;

impl Path for Shapes {
    fn read(&self, _: Piece) -> Result<ReadStream, Reason> {
        Err(Reason::Empty)
    }
}

impl Served for Shapes {
    fn shape(&self, namespace: NamespaceId, group: Group, at: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        let geometry = geometry(PIECE_BYTES_MAX / 12);
        let shape = geometry.shape(group, at, 16).map_err(|_| Reason::UnknownNamespace(namespace))?;
        assert!(shape.layers().len() as u64 <= CHUNKS_MAX);
        Ok(Arc::new(shape))
    }
}
