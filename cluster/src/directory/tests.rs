//! The directory: a block is told where it was stored, until it is gone or its node has left.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::members::Member;

fn node(n: u8) -> NodeId {
    kvarts_layout::StoreId([n; 16])
}

fn members(epoch: u64, numbers: &[u8]) -> Members {
    let one = |n: &u8| Member { id: node(*n), address: format!("host-{n}:1"), zone: String::new() };
    Members::new(epoch, numbers.iter().map(one).collect()).unwrap()
}

fn tag(n: u32) -> Tag {
    let mut tag = [0; 16];
    tag[..4].copy_from_slice(&n.wrapping_mul(0x9E37_79B9).to_be_bytes());
    tag[4..8].copy_from_slice(&n.to_be_bytes());
    Tag(tag)
}

fn nodes_with(directory: &Directory, n: u32) -> Vec<NodeId> {
    directory.copies(&tag(n)).collect()
}

#[test]
fn a_block_is_where_it_was_stored_until_it_is_gone() {
    let mut directory = Directory::new(node(1), &members(1, &[1]), 100);
    // It is the only member: it holds everything.
    let stored = [Change::Stored(tag(1)), Change::Stored(tag(2))];
    assert_eq!(directory.apply(node(1), &stored).taken, 2);
    assert_eq!((nodes_with(&directory, 1), directory.len()), (vec![node(1)], 2));
    directory.apply(node(1), &[Change::Stored(tag(1)), Change::Gone(tag(2)), Change::Gone(tag(3))]);
    assert_eq!((nodes_with(&directory, 1), nodes_with(&directory, 2)), (vec![node(1)], vec![]));
    assert_eq!(directory.len(), 1, "a block that is stored again is one copy");
}

#[test]
fn what_a_snapshot_does_not_name_is_gone_and_what_happens_meanwhile_is_not() {
    let mut directory = Directory::new(node(1), &members(1, &[1, 2]), 100);
    let of = (0..).find(|n| directory.holder_of(&tag(*n)) == Some(node(1))).unwrap();
    let same = |n: &u32| tag(*n).partition() == tag(of).partition();
    let [old, kept, new] = *(0..).filter(same).take(3).collect::<Vec<u32>>() else { unreachable!() };
    let partition = tag(of).partition();
    let stored = |n| Change::Stored(tag(n));
    directory.apply(node(2), &[stored(old), stored(kept)]);
    directory.apply(node(1), &[stored(old)]);
    directory.begin_snapshot(node(2), partition);
    directory.apply(node(2), &[stored(kept), stored(new)]);
    directory.end_snapshot(node(2), partition);
    assert_eq!(nodes_with(&directory, old), [node(1)], "another node's copy is its own");
    assert_eq!(nodes_with(&directory, kept), [node(2)]);
    assert_eq!(nodes_with(&directory, new), [node(2)]);
}

#[test]
fn a_node_that_announces_without_end_takes_no_other_node_s_room() {
    let mut directory = Directory::new(node(1), &members(1, &[1, 2, 3]), 600);
    let stored = |from: u32, n: u8, directory: &mut Directory| {
        let changes: Vec<Change> = (from..from + 20_000).map(|n| Change::Stored(tag(n))).collect();
        directory.apply(node(n), &changes)
    };
    let known = |directory: &Directory| [1, 2, 3].map(|n| directory.len_of(node(n)));
    stored(0, 2, &mut directory);
    assert_eq!(known(&directory), [0, 400, 0], "half of the room, and its own part");
    for (from, n) in [(50_000, 3), (100_000, 1), (150_000, 2), (200_000, 1)] {
        stored(from, n, &mut directory);
        let known = known(&directory);
        assert!(known.iter().skip(usize::from(n == 3)).all(|of| *of >= 100), "what is its own: {known:?}");
    }
    assert_eq!(directory.len(), 600);
    // What goes makes room again, for the one that it was of and for others.
    let gone: Vec<Change> = (0..170_000).map(|n| Change::Gone(tag(n))).collect();
    directory.apply(node(2), &gone);
    stored(300_000, 3, &mut directory);
    let [one, two, three] = known(&directory);
    assert_eq!((two, one + three), (0, 500));
    assert!(one >= 100);
    // With one member less each has more for itself.
    directory.change_members(&members(2, &[1, 2]));
    for partition in crate::partition::Partition::all() {
        directory.tidy(partition);
    }
    assert_eq!(directory.len(), one);
    stored(0, 2, &mut directory);
    assert_eq!(directory.len(), 450 + one.min(150));
}

#[test]
fn of_a_node_that_left_nothing_is_told_and_its_entries_go() {
    let mut directory = Directory::new(node(1), &members(1, &[1, 2]), 1000);
    let changes: Vec<Change> = (0..500).map(|n| Change::Stored(tag(n))).collect();
    let held = directory.apply(node(2), &changes).taken;
    assert!(held > 100 && directory.len() == held);
    assert_eq!(
        directory.change_members(&members(2, &[1])).partitions.len(),
        held_by(2),
        "what the other one held"
    );
    assert!((0..500).all(|n| nodes_with(&directory, n).is_empty()));
    assert_eq!(directory.apply(node(2), &changes), Applied::default(), "it is no member");
    Partition::all().map(|partition| directory.tidy(partition)).for_each(drop);
    assert!(directory.is_empty());
    // A new node may have its number, and nothing of what it had.
    assert_eq!(directory.change_members(&members(3, &[1, 3])).members, [node(3)]);
    assert!((0..500).all(|n| nodes_with(&directory, n).is_empty()));
    // An older epoch changes nothing.
    assert_eq!(directory.change_members(&members(2, &[1])), Lacks::default());
    assert!(directory.apply(node(3), &changes).taken > 0);
}

/// Partitions that one of two nodes holds.
fn held_by(n: u8) -> usize {
    Holders::of(&members(1, &[1, 2])).held_by(node(n)).count()
}

#[test]
fn an_entry_takes_at_most_48_bytes_and_what_does_not_fit_is_left_out() {
    const MANY: u32 = 200_000;
    let mut directory = Directory::new(node(1), &members(1, &[1, 2]), u64::from(MANY));
    let changes: Vec<Change> = (0..2 * MANY + 10_000).map(|n| Change::Stored(tag(n))).collect();
    let applied = directory.apply(node(2), &changes);
    // Half of the room, and half of the rest.
    let room = u64::from(MANY) / 4 * 3;
    assert_eq!((applied.taken - applied.dropped, directory.len()), (room, room));
    assert_eq!(applied.taken + applied.refused + applied.elsewhere, changes.len() as u64);
    let each = directory.bytes() as f64 / room as f64;
    assert!(each <= 48.0, "{each} bytes");
}

#[test]
fn a_block_has_as_many_copies_as_a_reader_may_use_and_no_more() {
    let numbers: Vec<u8> = (1..=30).collect();
    let mut directory = Directory::new(node(1), &members(1, &numbers), 1000);
    let n = (0..).find(|n| directory.holder_of(&tag(*n)) == Some(node(1))).unwrap();
    for number in numbers {
        directory.apply(node(number), &[Change::Stored(tag(n))]);
    }
    assert_eq!(nodes_with(&directory, n).len(), HOLDERS_MAX);
}

proptest! {
    /// Against a plain set of pairs.
    #[test]
    fn the_directory_says_what_its_events_say(events in prop::collection::vec((1u8..5, 0u32..40, 0u8..8), 0..400)) {
        let all = [1, 2, 3, 4];
        let (mut epoch, mut present): (u64, BTreeSet<u8>) = (1, all.into());
        let mut directory = Directory::new(node(1), &members(1, &all), 10_000);
        let mut model: BTreeSet<(u32, u8)> = BTreeSet::new();
        for (of, n, what) in events {
            match what {
                0..4 if present.contains(&of) => {
                    let applied = directory.apply(node(of), &[Change::Stored(tag(n))]);
                    if applied.taken == 1 {
                        model.insert((n, of));
                    }
                }
                4..6 if present.contains(&of) => {
                    directory.apply(node(of), &[Change::Gone(tag(n))]);
                    model.remove(&(n, of));
                }
                // It leaves, or comes back.
                6 if of != 1 => {
                    epoch += 1;
                    if !present.remove(&of) {
                        present.insert(of);
                    }
                    model.retain(|(_, of)| present.contains(of));
                    let now: Vec<u8> = present.iter().copied().collect();
                    let begun: BTreeSet<Partition> = directory.change_members(&members(epoch, &now)).partitions.into_iter().collect();
                    let holds = |n: u32| directory.holder_of(&tag(n)) == Some(node(1)) && !begun.contains(&tag(n).partition());
                    model.retain(|(n, _)| holds(*n));
                }
                7 => {
                    directory.tidy(tag(n).partition());
                }
                _ => {}
            }
        }
        for n in 0..40 {
            let told: BTreeSet<NodeId> = nodes_with(&directory, n).into_iter().collect();
            let expected: BTreeSet<NodeId> = model.range((n, 0)..=(n, 255)).map(|(_, of)| node(*of)).collect();
            prop_assert_eq!(told, expected);
        }
    }
}

#[test]
fn a_directory_says_where_it_lacks_copies_until_each_node_has_sent_everything() {
    let mut directory = Directory::new(node(1), &members(1, &[1, 2, 3]), 100);
    let held: Vec<Partition> = directory.held().collect();
    let partial = |directory: &Directory, of: &[u8]| -> BTreeSet<Partition> {
        let of: Vec<NodeId> = of.iter().map(|n| node(*n)).collect();
        let lacks = |partition: &Partition| directory.lacking(*partition).any(|one| of.contains(&one));
        directory.held().filter(lacks).collect()
    };
    let lacking = |directory: &Directory, of: &[u8]| partial(directory, of).len();
    assert_eq!(lacking(&directory, &[1, 2, 3]), held.len(), "nothing has been sent");
    for n in [1, 2] {
        held.iter().for_each(|partition| directory.begin_snapshot(node(n), *partition));
        assert_eq!(lacking(&directory, &[n]), held.len(), "node {n}'s is under way");
        held.iter().skip(1).for_each(|partition| directory.end_snapshot(node(n), *partition));
        assert_eq!(partial(&directory, &[n]), BTreeSet::from([held[0]]));
        directory.end_snapshot(node(n), held[0]);
    }
    assert_eq!((lacking(&directory, &[1, 2]), lacking(&directory, &[1, 2, 3])), (0, held.len()));
    // It sends again, as after a connection that broke.
    directory.expect_all(node(2));
    assert_eq!((lacking(&directory, &[1]), lacking(&directory, &[2])), (0, held.len()));
    // Of one that left nothing is missing; of a new one everything is, and so of all in what is held from now on.
    directory.change_members(&members(2, &[1, 4]));
    let now: BTreeSet<Partition> = directory.held().collect();
    assert_eq!((lacking(&directory, &[2, 3]), lacking(&directory, &[4])), (0, now.len()));
    let gained = |partition: &&Partition| !held.contains(*partition);
    let gained: BTreeSet<Partition> = now.iter().filter(gained).copied().collect();
    assert_eq!(partial(&directory, &[1]), gained);
}

#[test]
fn a_full_directory_drops_what_nothing_asks_for_and_says_where_copies_are_missing() {
    const ROOM: u32 = 40_000;
    let mut directory = Directory::new(node(1), &members(1, &[1]), u64::from(ROOM));
    let all: Vec<Partition> = directory.held().collect();
    all.iter().for_each(|partition| directory.begin_snapshot(node(1), *partition));
    all.iter().for_each(|partition| directory.end_snapshot(node(1), *partition));
    let known = |directory: &mut Directory, of: std::ops::Range<u32>, asked: std::ops::Range<u32>| {
        let mut applied = Applied::default();
        for n in of {
            if n % 1_000 == 0 {
                asked.clone().for_each(|hot| drop(directory.asked(&tag(hot))));
            }
            let one = directory.apply(node(1), &[Change::Stored(tag(n))]);
            applied.dropped += one.dropped;
            applied.refused += one.refused;
        }
        applied
    };
    assert_eq!(known(&mut directory, 0..ROOM, 0..0), Applied::default());
    assert!(directory.partial().is_empty());
    let applied = known(&mut directory, ROOM..2 * ROOM, 0..2_000);
    assert_eq!(directory.len(), u64::from(ROOM));
    let count = |directory: &Directory, of: std::ops::Range<u32>| {
        of.filter(|n| directory.copies(&tag(*n)).next().is_some()).count()
    };
    let hot = count(&directory, 0..2_000);
    let (cold, new) = (count(&directory, 2_000..ROOM), count(&directory, ROOM..2 * ROOM));
    assert!(hot >= 1_900, "{hot} of 2,000 that are asked for are known");
    assert!(new > cold, "{new} new ones are known, {cold} old ones; {applied:?}");
    assert!(applied.refused * 20 <= u64::from(ROOM), "{applied:?}");
    assert_eq!(u64::from(2 * ROOM) - directory.len(), applied.dropped + applied.refused);
    assert!(directory.partial().len() > PARTITIONS / 2);
}
