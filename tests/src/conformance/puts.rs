//! What puts promise.

use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, Durability, Parent, PutRequest};
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::{Layout, OriginId};

use super::{Case, Desk, pages};
use crate::fixture::{self, Style};

pub(super) const CASES: &[Case] = &[
    ("a block comes back as it was put, from any memory and in any layout", any_memory_any_layout),
    ("the first put of a key wins", first_put_wins),
    ("of a put only the missing blocks are written", only_missing_blocks),
    ("relaxed puts are visible when answered", relaxed_is_visible),
    ("of two puts of one key at once one stores it whole", one_of_two_at_once),
    ("many puts at once are all answered", many_at_once),
    ("the same key in two namespaces, groups or coordinates is two blocks", names_are_apart),
    ("a put whose ticket was dropped leaves every block whole or absent", dropped_ticket),
    ("a block is there until its time is over and can be put again afterwards", expiry),
    ("origins, parents and first blocks of any kind are taken", descriptions),
];

fn any_memory_any_layout(desk: &Desk<'_>) {
    let mut next = 0;
    for column in fixture::columns() {
        for layout in [Layout::FullBlock, Layout::LayerBlock] {
            for (style, skew) in [
                (Style::Blocks, 0),
                (Style::Blocks, 1),
                (Style::Layers, 0),
                (Style::Layers, 520),
                (Style::Paged, 0),
                (Style::Paged, 4095),
            ] {
                let keys = desk.keys(next..next + 5);
                next += 5;
                let request = desk.request_from(column, &keys, 1, (style, skew));
                let request = PutRequest { layout: Some(layout), ..request };
                assert_eq!(desk.outcomes(request), vec![BlockOutcome::Stored; 5], "{style:?} {skew}");
                desk.expect(column, &keys, 1);
            }
        }
    }
}

fn first_put_wins(desk: &Desk<'_>) {
    let keys = desk.keys(0..3);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    let again = desk.request(pages(), &keys, 2);
    assert_eq!(desk.outcomes(again.clone()), vec![BlockOutcome::AlreadyThere; 3]);
    let relaxed = PutRequest { durability: Durability::Relaxed, ..again };
    assert_eq!(desk.outcomes(relaxed), vec![BlockOutcome::AlreadyThere; 3]);
    desk.expect(pages(), &keys, 1);
}

fn only_missing_blocks(desk: &Desk<'_>) {
    use BlockOutcome::{AlreadyThere, Stored};
    let keys = desk.keys(0..7);
    desk.store(pages(), &[keys[1], keys[2], keys[5]], 1, Layout::FullBlock);
    let all = desk.request(pages(), &keys, 2);
    let expected = vec![Stored, AlreadyThere, AlreadyThere, Stored, Stored, AlreadyThere, Stored];
    assert_eq!(desk.outcomes(all), expected);
    let request = desk.read_request(pages(), &keys);
    assert_eq!(desk.read(&request).1.usable_blocks, 7);
    desk.expect_bytes(&request, &[1, 2, 5], 1);
    desk.expect_bytes(&request, &[0, 3, 4, 6], 2);
}

fn relaxed_is_visible(desk: &Desk<'_>) {
    let keys = desk.keys(0..4);
    let request = PutRequest { durability: Durability::Relaxed, ..desk.request(pages(), &keys, 1) };
    assert_eq!(desk.outcomes(request), vec![BlockOutcome::Stored; 4]);
    desk.expect(pages(), &keys, 1);
    // Asked for durably, it is made so; nothing is written twice.
    let durable = desk.request(pages(), &keys, 2);
    assert_eq!(desk.outcomes(durable), vec![BlockOutcome::AlreadyThere; 4]);
    desk.expect(pages(), &keys, 1);
}

fn one_of_two_at_once(desk: &Desk<'_>) {
    let keys = desk.keys(0..6);
    let store = desk.stage.store();
    let first = store.put(desk.request(pages(), &keys, 1));
    let second = store.put(desk.request(pages(), &keys, 2));
    let first = desk.stage.answer(first).unwrap().outcomes;
    let second = desk.stage.answer(second).unwrap().outcomes;
    assert_eq!(first, vec![BlockOutcome::Stored; 6]);
    let passed = |one: &BlockOutcome| matches!(one, BlockOutcome::InFlight | BlockOutcome::AlreadyThere);
    assert!(second.iter().all(passed), "{second:?}");
    desk.expect(pages(), &keys, 1);
}

fn many_at_once(desk: &Desk<'_>) {
    let store = desk.stage.store();
    let put = |n: u64| {
        let column = fixture::columns()[n as usize % 3];
        let request = desk.request(column, &desk.keys(n * 3..n * 3 + 3), n);
        let durability = if n.is_multiple_of(4) { Durability::Relaxed } else { Durability::Durable };
        store.put(PutRequest { durability, ..request })
    };
    let tickets: Vec<_> = (0..24).map(put).collect();
    for ticket in tickets {
        assert_eq!(desk.stage.answer(ticket).unwrap().outcomes, vec![BlockOutcome::Stored; 3]);
    }
    for n in 0..24 {
        desk.expect(fixture::columns()[n as usize % 3], &desk.keys(n * 3..n * 3 + 3), n);
    }
}

fn names_are_apart(desk: &Desk<'_>) {
    let keys = desk.keys(0..2);
    let other = Desk::new(desk.stage, "names are apart, the other namespace");
    let half = (fixture::PAGES, kvarts_layout::Coordinate::heads(1, 1, 2).unwrap());
    let columns = [fixture::columns().to_vec(), vec![half]].concat();
    for (producer, column) in (1..).zip(&columns) {
        desk.store(*column, &keys, producer, Layout::FullBlock);
        other.store(*column, &keys, producer + 100, Layout::FullBlock);
    }
    for (producer, column) in (1..).zip(&columns) {
        desk.expect(*column, &keys, producer);
        other.expect(*column, &keys, producer + 100);
    }
}

fn dropped_ticket(desk: &Desk<'_>) {
    let keys = desk.keys(0..6);
    drop(desk.stage.store().put(desk.request(pages(), &keys, 1)));
    // Whatever became of it ends: then each key is there or can be put again.
    let mut outcomes = vec![BlockOutcome::InFlight];
    for _ in 0..500 {
        if !outcomes.contains(&BlockOutcome::InFlight) {
            break;
        }
        desk.stage.rest();
        outcomes = desk.outcomes(desk.request(pages(), &keys, 2));
    }
    let done = |one: &BlockOutcome| matches!(one, BlockOutcome::Stored | BlockOutcome::AlreadyThere);
    assert!(outcomes.iter().all(done), "{outcomes:?}");
    let request = desk.read_request(pages(), &keys);
    assert_eq!(desk.read(&request).1.usable_blocks, 6);
    for block in 0..6 {
        let shape = fixture::shape(pages().0, pages().1);
        let found = fixture::read_block(&request.into, block, &shape);
        let key = &keys[block as usize];
        let of = |producer| fixture::content(key, pages().0, pages().1, producer, &shape);
        assert!(found == of(1) || found == of(2), "block {block} is a mix");
    }
}

fn expiry(desk: &Desk<'_>) {
    let (short, long) = (desk.keys(0..2), desk.keys(2..4));
    let seconds = |keys, seconds| {
        let expires_after = Some(Duration::from_secs(seconds));
        desk.outcomes(PutRequest { expires_after, ..desk.request(pages(), keys, 1) })
    };
    assert_eq!(seconds(&short, 10), vec![BlockOutcome::Stored; 2]);
    assert_eq!(seconds(&long, 3600), vec![BlockOutcome::Stored; 2]);
    desk.expect(pages(), &short, 1);
    if !desk.stage.advance(Duration::from_millis(9_700)) {
        return;
    }
    desk.expect(pages(), &short, 1);
    desk.stage.advance(Duration::from_millis(500));
    desk.expect_missing(pages(), &short, &[0, 1]);
    desk.expect(pages(), &long, 1);
    assert_eq!(desk.outcomes(desk.request(pages(), &short, 2)), vec![BlockOutcome::Stored; 2]);
    desk.expect(pages(), &short, 2);
    // A tenth of a second is a time, too: it is not over at once.
    let brief = desk.keys(4..5);
    let expires_after = Some(Duration::from_millis(100));
    desk.outcomes(PutRequest { expires_after, ..desk.request(pages(), &brief, 1) });
    desk.expect(pages(), &brief, 1);
}

fn descriptions(desk: &Desk<'_>) {
    let keys = desk.keys(0..8);
    let put = |keys: &[_], parent, first_block| {
        let origins = Some(vec![OriginId([7; 16]); keys.len()]);
        let request = desk.request(pages(), keys, 1);
        desk.outcomes(PutRequest { parent, first_block, origins, ..request })
    };
    assert_eq!(put(&keys[..2], Parent::Root, Some(0)), vec![BlockOutcome::Stored; 2]);
    assert_eq!(put(&keys[2..4], Parent::Key(keys[1]), Some(2)), vec![BlockOutcome::Stored; 2]);
    // The parent need not be here: it may have been evicted, or live in a peer.
    assert_eq!(put(&keys[6..], Parent::Key(keys[5]), Some(u32::MAX)), vec![BlockOutcome::Stored; 2]);
    assert_eq!(put(&keys[4..6], Parent::Unknown, None), vec![BlockOutcome::Stored; 2]);
    desk.expect(pages(), &keys, 1);
    let own = PutRequest { parent: Parent::Key(keys[1]), ..desk.request(pages(), &keys[..2], 1) };
    let error = desk.stage.put(own).unwrap_err();
    assert_eq!((error.kind(), error.0), (Kind::Invalid, Reason::OutOfOrder(keys[1])));
}
