//! What arrives of a read in order, out of order, changed, lost and from elsewhere: what is announced of it, and what is not.

use super::*;
use bytes::Bytes;
use kvarts_contract::api::{Placed, Verify, read_channel};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_layout::{BlockKey, ChunkShape, Coordinate, Group, LayerShape, NamespaceId};

/// Bytes of a block's layers: two chunks in the first, one in the second.
const LAYERS: [&[u64]; 2] = [&[10, 6], &[8]];
const BLOCKS: u32 = 3;

fn shape() -> BlockShape {
    let chunks =
        |sizes: &[u64]| sizes.iter().map(|&bytes| ChunkShape { bytes, align: 1 }).collect::<Vec<_>>();
    let layers = (0u32..).zip(LAYERS).map(|(layer, sizes)| LayerShape { layer, chunks: chunks(sizes) });
    BlockShape::new(layers.collect()).unwrap()
}

fn request(order: Order) -> ReadRequest {
    let memory = SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, 24 * BLOCKS as usize).unwrap();
    ReadRequest {
        namespace: NamespaceId([1; 32]),
        group: Group(0),
        coordinate: Coordinate::Replicated,
        keys: (0..BLOCKS as u8).map(|n| BlockKey([n; 32])).collect(),
        layers: None,
        order,
        into: Placed::blocks(&shape(), memory, BLOCKS).unwrap(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    }
}

fn data(layer: u32, first_block: u32, blocks: u32, offset: u64, bytes: usize) -> Part {
    let data = (0..bytes).map(|at| (at as u64 + offset + u64::from(first_block)) as u8).collect::<Vec<_>>();
    Part::Data(proto::ReadData { layer, first_block, blocks, offset, data: data.into() })
}

fn layer(layer: u32, blocks: u32) -> Part {
    Part::Layer(proto::LayerReady { layer, blocks })
}

fn block(block: u32) -> Part {
    Part::Block(proto::BlockReady { block })
}

fn end(usable_blocks: u32, usable_layers: u32, failed: &[u32]) -> Part {
    let error = proto::Error { reason: proto::Reason::NotHere.into(), ..Default::default() };
    let failures = failed.iter().map(|&block| proto::read_end::Failure { block, error: Some(error.clone()) });
    Part::End(proto::ReadEnd { usable_blocks, usable_layers, failures: failures.collect() })
}

fn asked() -> proto::ReadRequest {
    proto::ReadRequest { namespace: vec![1; 32].into(), keys: vec![7; 96].into(), ..Default::default() }
}

/// The messages of a server that was asked for this.
fn messages(order: Order, parts: &[Part], asked: &proto::ReadRequest) -> Vec<proto::ReadReply> {
    let mut digest = StreamDigest::of_read(order, asked);
    let message = |part: &Part| proto::ReadReply { crc32: digest.read(part), part: Some(part.clone()) };
    parts.iter().map(message).collect()
}

/// What is announced of some messages, and how it ended; nothing if it did not.
fn take(
    order: Order,
    messages: &[proto::ReadReply],
) -> (Vec<ReadEvent>, Result<Option<ReadEnd>, Reason>, ReadEnd) {
    let (request, shape, asked) = (request(order), shape(), asked());
    let mut arrival = Arrival::new(&request, &shape, 0..2, &asked);
    let (sink, stream) = read_channel();
    let mut ended = Ok(None);
    for message in messages {
        ended = arrival.take(message, &sink);
        if !matches!(ended, Ok(None)) {
            break;
        }
    }
    let events = std::iter::from_fn(|| stream.try_next()).collect();
    (events, ended, arrival.broken(&Reason::OutOfBounds))
}

fn said(order: Order, parts: &[Part]) -> (Vec<ReadEvent>, Result<Option<ReadEnd>, Reason>, ReadEnd) {
    take(order, &messages(order, parts, &asked()))
}

/// Both orders: a whole read, in pieces and in several ranges.
fn good() -> [(Order, Vec<Part>); 2] {
    let layers = vec![
        data(0, 0, 3, 0, 30),
        data(0, 0, 3, 30, 18),
        layer(0, 3),
        data(1, 0, 2, 0, 16),
        data(1, 2, 1, 0, 8),
        layer(1, 3),
        end(3, 2, &[]),
    ];
    let blocks = vec![
        data(0, 0, 2, 0, 40),
        data(0, 0, 2, 40, 8),
        block(0),
        block(1),
        data(0, 2, 1, 0, 24),
        block(2),
        end(3, 2, &[]),
    ];
    [(Order::Layers, layers), (Order::Blocks, blocks)]
}

#[test]
fn what_arrives_in_order_and_whole_is_announced() {
    for (order, parts) in good() {
        let (events, ended, _) = said(order, &parts);
        assert_eq!(events.len(), if order == Order::Layers { 2 } else { 3 });
        let end = ended.unwrap().unwrap();
        assert_eq!((end.usable_blocks, end.usable_layers, end.failures.len()), (3, 2, 0));
    }
    // Blocks that fail, also in the middle of their range, are passed over.
    let parts = [data(0, 0, 1, 0, 5), data(0, 2, 1, 0, 24), block(2), end(0, 2, &[0, 1])];
    let (events, ended, _) = said(Order::Blocks, &parts);
    assert_eq!((events, ended.unwrap().unwrap().failures.len()), (vec![ReadEvent::Block(2)], 2));
    let parts = [data(0, 0, 2, 0, 32), layer(0, 2), data(1, 0, 1, 0, 8), layer(1, 1), end(1, 2, &[1])];
    assert_eq!(said(Order::Layers, &parts).1.unwrap().unwrap().usable_blocks, 1);
    // Nothing is usable, and no layer is worth a word.
    assert!(said(Order::Layers, &[end(0, 2, &[0])]).1.unwrap().is_some());
}

#[test]
fn what_has_not_arrived_is_not_announced_whatever_the_server_says() {
    let untrue = [
        ("a layer whose last byte is missing", vec![data(0, 0, 3, 0, 47), layer(0, 3)]),
        ("a layer of which nothing came", vec![layer(0, 3)]),
        ("a layer of blocks that did not come", vec![data(0, 0, 2, 0, 32), layer(0, 3)]),
        ("another layer than came", vec![data(0, 0, 3, 0, 48), layer(1, 3)]),
        ("a layer before its turn", vec![data(1, 0, 3, 0, 24)]),
        ("a layer past the end", vec![data(2, 0, 3, 0, 24)]),
        ("a layer twice", vec![data(0, 0, 3, 0, 48), layer(0, 3), layer(0, 3)]),
        ("a layer's bytes for the next", vec![data(0, 0, 3, 0, 48), layer(0, 3), layer(1, 3)]),
        (
            "more blocks than before",
            vec![data(0, 0, 2, 0, 32), layer(0, 2), data(1, 0, 3, 0, 24), layer(1, 3)],
        ),
        ("a gap between ranges", vec![data(0, 1, 2, 0, 32)]),
        ("a range again", vec![data(0, 0, 2, 0, 32), data(0, 0, 2, 0, 32)]),
        ("a range that overlaps", vec![data(0, 0, 2, 0, 32), data(0, 1, 2, 0, 32)]),
        ("a range before the last is whole", vec![data(0, 0, 2, 0, 31), data(0, 2, 1, 0, 16)]),
        ("a gap in a range", vec![data(0, 0, 3, 0, 20), data(0, 0, 3, 21, 27)]),
        ("a piece again", vec![data(0, 0, 3, 0, 20), data(0, 0, 3, 0, 20)]),
        ("more than a range has", vec![data(0, 0, 3, 0, 49)]),
        ("blocks that the read did not ask for", vec![data(0, 0, 4, 0, 64)]),
        ("blocks beyond all numbers", vec![data(0, u32::MAX, 2, 0, 32)]),
        ("a range of nothing", vec![data(0, 0, 0, 0, 0)]),
        ("a range from its middle", vec![data(0, 0, 3, 8, 40)]),
        ("the first of blocks that the read did not ask for", vec![data(0, 0, 4, 0, 32)]),
        ("a layer while a range comes", vec![data(0, 0, 2, 0, 32), data(0, 2, 1, 0, 10), layer(0, 2)]),
        ("a block in layer order", vec![data(0, 0, 3, 0, 48), block(0)]),
        ("an end of more layers", vec![data(0, 0, 3, 0, 48), layer(0, 3), end(3, 2, &[])]),
        ("an end of more blocks", vec![data(0, 0, 2, 0, 32), layer(0, 2), end(3, 1, &[])]),
        ("an end of nothing that came", vec![end(1, 1, &[])]),
        ("an end of layers that are not", vec![end(0, 3, &[])]),
        ("an end of blocks that are not", vec![end(0, 0, &[3])]),
        ("failures out of order", vec![end(0, 0, &[1, 0])]),
        ("a failure twice", vec![end(0, 0, &[1, 1])]),
    ];
    let untrue_of_blocks = [
        ("a block whose last byte is missing", vec![data(0, 0, 2, 0, 47), block(0)]),
        ("a block that did not come", vec![data(0, 0, 2, 0, 48), block(2)]),
        ("a block before any came", vec![block(0)]),
        ("a block twice", vec![data(0, 0, 1, 0, 24), block(0), block(0)]),
        ("a block of the range before", vec![data(0, 0, 1, 0, 24), data(0, 1, 1, 0, 24), block(0)]),
        ("a range before the last", vec![data(0, 1, 1, 0, 24), data(0, 0, 1, 0, 24)]),
        ("a range again", vec![data(0, 0, 1, 0, 24), data(0, 0, 1, 0, 24)]),
        ("a range from its middle", vec![data(0, 0, 1, 16, 8)]),
        ("the first of blocks that the read did not ask for", vec![data(0, 2, 2, 0, 24)]),
        ("blocks beyond all numbers", vec![data(0, u32::MAX, 2, 0, 24)]),
        ("a layer of its own", vec![data(1, 0, 1, 0, 24)]),
        ("a layer in block order", vec![data(0, 0, 1, 0, 24), layer(0, 1)]),
        ("an end without a word of a block", vec![data(0, 0, 2, 0, 48), block(0), end(1, 2, &[2])]),
        ("an end of more blocks", vec![data(0, 0, 1, 0, 24), block(0), end(2, 2, &[1, 2])]),
        ("an end of all", vec![end(3, 2, &[])]),
    ];
    let untrue = untrue.map(|one| (Order::Layers, one)).into_iter();
    for (order, (what, parts)) in untrue.chain(untrue_of_blocks.map(|one| (Order::Blocks, one))) {
        let (events, ended, broken) = said(order, &parts);
        assert!(matches!(ended, Err(Reason::Bug(_))), "{what}: {ended:?}");
        // What was announced before is good, and no more than that.
        let before =
            parts.iter().rev().skip(1).filter(|part| matches!(part, Part::Layer(_) | Part::Block(_)));
        assert_eq!(events.len(), before.count(), "{what}: {events:?}");
        match order {
            Order::Layers => assert_eq!(broken.usable_layers as usize, events.len(), "{what}"),
            Order::Blocks => assert_eq!(broken.failures.len(), 3 - events.len(), "{what}"),
        }
    }
}

#[test]
fn a_message_that_is_changed_lost_doubled_or_from_elsewhere_ends_the_read() {
    for (order, parts) in good() {
        let good = messages(order, &parts, &asked());
        let whole = take(order, &good).0;
        // `at` is the first message that is not what it should be.
        let expect_damaged = |what: &str, messages: &[proto::ReadReply], at: usize| {
            let (events, ended, _) = take(order, messages);
            assert!(matches!(ended, Err(Reason::Media(_))), "{what} {at}: {ended:?}");
            let before = parts.iter().take(at).filter(|part| matches!(part, Part::Layer(_) | Part::Block(_)));
            assert_eq!(events, whole[..before.count()], "{what} {at}");
        };
        for at in 0..good.len() {
            let with = |change: &dyn Fn(&mut Vec<proto::ReadReply>)| {
                let mut messages = good.clone();
                change(&mut messages);
                messages
            };
            expect_damaged("digest", &with(&|all| all[at].crc32 ^= 1 << (at % 32)), at);
            expect_damaged("no part", &with(&|all| all[at].part = None), at);
            if at + 1 < good.len() {
                expect_damaged("doubled", &with(&|all| all.insert(at, all[at].clone())), at + 1);
                expect_damaged("lost", &with(&|all| drop(all.remove(at))), at);
                expect_damaged("swapped", &with(&|all| all.swap(at, at + 1)), at);
            }
        }
        // Answers to another request: each of its fields changed, and the other call.
        let column = Some(proto::Column { group: 1, coordinate: None });
        let layers = Some(proto::read_request::LayerRange { start: 0, end: 2 });
        let mut keys = asked().keys.to_vec();
        keys[95] ^= 1;
        for other in [
            proto::ReadRequest { namespace: Bytes::new(), ..asked() },
            proto::ReadRequest { column, ..asked() },
            proto::ReadRequest { layers, ..asked() },
            proto::ReadRequest { class: 1, ..asked() },
            proto::ReadRequest { keys: keys.into(), ..asked() },
        ] {
            expect_damaged("another request", &messages(order, &parts, &other), 0);
        }
        let other = if order == Order::Layers { Order::Blocks } else { Order::Layers };
        expect_damaged("the other call", &messages(other, &parts, &asked()), 0);
    }
}
