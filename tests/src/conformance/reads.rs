//! What reads promise.

use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, Order, ReadEvent, ReadRequest, Verify};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_layout::Layout;

use super::{Case, Desk, pages};
use crate::fixture::{self, Style};

pub(super) const CASES: &[Case] = &[
    ("both orders deliver every byte into any memory", both_orders_any_memory),
    ("a read of some layers writes those and no others", some_layers),
    ("keys may be read in any order and any selection", any_selection),
    ("what is missing is named and the rest is delivered", missing_blocks),
    ("a read of nothing that is here ends with a reason for each", all_missing),
    ("many reads of the same blocks at once all get them", many_readers),
    ("a dropped stream ends its read and disturbs no other", dropped_stream),
    ("a deadline that is far away changes nothing", far_deadline),
    ("every way of verifying and every class delivers the same bytes", verify_and_class),
];

fn both_orders_any_memory(desk: &Desk<'_>) {
    for (chain, column) in (0..).zip(fixture::columns()) {
        let keys = desk.keys(chain * 10..chain * 10 + 7);
        desk.store(column, &keys[..3], 1, Layout::FullBlock);
        desk.store(column, &keys[3..], 1, Layout::LayerBlock);
        let shape = fixture::shape(column.0, column.1);
        for order in [Order::Layers, Order::Blocks] {
            for (style, skew) in
                Style::ALL.into_iter().flat_map(|style| [0, 1, 512].map(|skew| (style, skew)))
            {
                let into = fixture::place(&shape, 7, style, skew).unwrap();
                let request = ReadRequest { order, into, ..desk.read_request(column, &keys) };
                let (events, end) = desk.read(&request);
                assert_eq!((end.usable_blocks, end.failures, end.held_bytes), (7, Vec::new(), 0));
                assert_eq!(end.usable_layers, shape.layers().len() as u32);
                let expected: Vec<_> = match order {
                    Order::Blocks => (0..7).map(ReadEvent::Block).collect(),
                    Order::Layers => (0..shape.layers().len() as u32)
                        .map(|layer| ReadEvent::Layer { layer, blocks: 7 })
                        .collect(),
                };
                assert_eq!(events, expected, "{order:?} {style:?} {skew}");
                desk.expect_bytes(&request, &[0, 1, 2, 3, 4, 5, 6], 1);
            }
        }
    }
}

fn some_layers(desk: &Desk<'_>) {
    let keys = desk.keys(0..3);
    desk.store(pages(), &keys[..2], 1, Layout::FullBlock);
    desk.store(pages(), &keys[2..], 1, Layout::LayerBlock);
    let shape = fixture::shape(pages().0, pages().1);
    let of_chunk = fixture::layer_of_chunks(&shape);
    for order in [Order::Layers, Order::Blocks] {
        for layers in [0..1, 1..2, 2..3, 0..2, 1..3] {
            let request =
                ReadRequest { order, layers: Some(layers.clone()), ..desk.read_request(pages(), &keys) };
            let (events, end) = desk.read(&request);
            assert_eq!((end.usable_blocks, end.usable_layers), (3, layers.len() as u32), "{layers:?}");
            if order == Order::Layers {
                let expected: Vec<_> =
                    layers.clone().map(|layer| ReadEvent::Layer { layer, blocks: 3 }).collect();
                assert_eq!(events, expected);
            }
            desk.expect_bytes(&request, &[0, 1, 2], 1);
            for block in 0..3 {
                let chunks = fixture::read_block(&request.into, block, &shape);
                for (bytes, layer) in chunks.iter().zip(&of_chunk) {
                    let touched = bytes.iter().any(|byte| *byte != 0);
                    assert_eq!(touched, layers.contains(layer), "{order:?} {layers:?}: layer {layer}");
                }
            }
        }
    }
}

fn any_selection(desk: &Desk<'_>) {
    let keys = desk.keys(0..10);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    let picks: [&[usize]; 5] = [&[9], &[3, 4, 5], &[9, 8, 7], &[5, 0, 6, 1], &[0, 2, 4, 6, 8]];
    for pick in picks {
        let keys: Vec<_> = pick.iter().map(|&at| keys[at]).collect();
        for order in [Order::Layers, Order::Blocks] {
            let request = ReadRequest { order, ..desk.read_request(pages(), &keys) };
            assert_eq!(desk.read(&request).1.usable_blocks, keys.len() as u32);
            desk.expect_bytes(&request, &(0..keys.len() as u32).collect::<Vec<_>>(), 1);
        }
    }
}

fn missing_blocks(desk: &Desk<'_>) {
    let keys = desk.keys(0..6);
    let here = [keys[0], keys[1], keys[3], keys[5]];
    desk.store(pages(), &here, 1, Layout::FullBlock);
    let missing = vec![(2, Reason::NotHere(keys[2])), (4, Reason::NotHere(keys[4]))];
    let request = desk.read_request(pages(), &keys);
    let (events, end) = desk.read(&request);
    assert_eq!((end.usable_blocks, &end.failures), (2, &missing));
    assert_eq!(events, (0..3).map(|layer| ReadEvent::Layer { layer, blocks: 2 }).collect::<Vec<_>>());
    desk.expect_bytes(&request, &[0, 1], 1);
    let request = ReadRequest { order: Order::Blocks, ..request };
    let (events, end) = desk.read(&request);
    assert_eq!((end.usable_blocks, &end.failures), (2, &missing));
    assert_eq!(events, [0, 1, 3, 5].map(ReadEvent::Block));
    desk.expect_bytes(&request, &[0, 1, 3, 5], 1);
}

fn all_missing(desk: &Desk<'_>) {
    let keys = desk.keys(0..2);
    for order in [Order::Layers, Order::Blocks] {
        let (events, end) = desk.read(&ReadRequest { order, ..desk.read_request(pages(), &keys) });
        assert!(!events.iter().any(|event| matches!(event, ReadEvent::Block(_))));
        assert_eq!(end.usable_blocks, 0);
        let expected = [(0, Reason::NotHere(keys[0])), (1, Reason::NotHere(keys[1]))];
        assert_eq!(end.failures, expected);
    }
}

fn many_readers(desk: &Desk<'_>) {
    let keys = desk.keys(0..8);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    let requests: Vec<_> = (0..12)
        .map(|n| {
            let order = if n % 3 == 0 { Order::Blocks } else { Order::Layers };
            let keys = &keys[n % 4..];
            ReadRequest { order, ..desk.read_request(pages(), keys) }
        })
        .collect();
    let streams: Vec<_> =
        requests.iter().map(|request| desk.stage.store().read(request.clone()).unwrap()).collect();
    for (request, stream) in requests.iter().zip(streams) {
        let (_, end) = desk.stage.events(&stream);
        assert_eq!((end.usable_blocks as usize, end.failures), (request.keys.len(), Vec::new()));
        desk.expect_bytes(request, &(0..end.usable_blocks).collect::<Vec<_>>(), 1);
    }
}

fn dropped_stream(desk: &Desk<'_>) {
    let keys = desk.keys(0..8);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    let store = desk.stage.store();
    let dropped: Vec<_> = (0..5).map(|_| store.read(desk.read_request(pages(), &keys)).unwrap()).collect();
    let request = desk.read_request(pages(), &keys);
    let stream = store.read(request.clone()).unwrap();
    drop(dropped);
    assert_eq!(desk.stage.events(&stream).1.usable_blocks, 8);
    desk.expect_bytes(&request, &[0, 1, 2, 3, 4, 5, 6, 7], 1);
    desk.expect(pages(), &keys, 1);
}

fn far_deadline(desk: &Desk<'_>) {
    let keys = desk.keys(0..4);
    let deadline = Some(desk.stage.now().plus(Duration::from_secs(3600)));
    let put = kvarts_contract::api::PutRequest { deadline, ..desk.request(pages(), &keys, 1) };
    assert_eq!(desk.outcomes(put), vec![BlockOutcome::Stored; 4]);
    let request = ReadRequest { deadline, ..desk.read_request(pages(), &keys) };
    let (_, end) = desk.read(&request);
    assert_eq!((end.usable_blocks, end.usable_layers, end.held_bytes), (4, 3, 0));
    desk.expect_bytes(&request, &[0, 1, 2, 3], 1);
}

fn verify_and_class(desk: &Desk<'_>) {
    let keys = desk.keys(0..4);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    for verify in
        [Verify::Always, Verify::Sample(0), Verify::Sample(500), Verify::Sample(1000), Verify::Never]
    {
        for class in Class::ALL {
            let request = ReadRequest { verify, class, ..desk.read_request(pages(), &keys) };
            assert_eq!(desk.read(&request).1.usable_blocks, 4);
            desk.expect_bytes(&request, &[0, 1, 2, 3], 1);
        }
    }
}
