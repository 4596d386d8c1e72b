//! Reads over paths of given speeds, in virtual time.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const TICK: Duration = Duration::from_micros(50);

/// MiB a second of a path at a time.
type Speed = fn(Duration) -> f64;

fn all(paths: usize) -> PathSet {
    (0..paths as u16).fold(PathSet::default(), |set, path| set.with(PathId(path)))
}

/// `count` pieces of `bytes` bytes each, which lie on these paths.
fn pieces_of(count: u64, bytes: u64, paths: PathSet) -> Vec<Piece> {
    (0..count).map(|place| Piece { place, bytes, paths }).collect()
}

/// How a read went.
struct Ran {
    took: Duration,
    /// When the pieces of the first layer were here.
    first: Duration,
    /// The most bytes that were here and could not be delivered.
    ahead: u64,
    /// Bytes that paths brought, and those of the read.
    brought: u64,
    steps: u64,
}

/// How a path answers what it was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answers {
    InOrder,
    /// As a disk does: all that it was asked for comes at once, each part of it slower.
    SideBySide,
}

/// Each path brings what it is asked for in order, at its speed. `first` is how many pieces the first layer has.
fn run(pieces: &[Piece], first: usize, speeds: &[Speed]) -> Ran {
    let paths = Paths::new(speeds.len() as u16);
    run_of((Dealer::new(pieces.to_vec()), paths), pieces, first, speeds, Answers::InOrder)
}

fn run_of(
    (mut dealer, mut paths): (Dealer, Paths),
    pieces: &[Piece],
    first: usize,
    speeds: &[Speed],
    answers: Answers,
) -> Ran {
    let mut queues: Vec<VecDeque<(usize, f64)>> = vec![VecDeque::new(); speeds.len()];
    let mut now = Duration::ZERO;
    let mut ran = Ran { took: now, first: now, ahead: 0, brought: 0, steps: 0 };
    let (mut here, mut arrived, mut deliverable) = (0, vec![false; pieces.len()], 0);
    while !dealer.is_done() {
        assert!(now < Duration::from_secs(120), "a read that does not end");
        // The path that brings the next piece soonest takes it.
        let mut open: Vec<PathId> = (0..speeds.len() as u16).map(PathId).collect();
        let soonest = |open: &[PathId], paths: &Paths| {
            let ends = |path: &PathId| paths.expected(*path, pieces[0].bytes, now);
            open.iter().copied().min_by(|one, other| ends(one).total_cmp(&ends(other)))
        };
        while let Some(path) = soonest(&open, &paths) {
            match dealer.take(path, true, &mut paths, now) {
                Some(piece) => queues[usize::from(path.0)].push_back((piece, pieces[piece].bytes as f64)),
                None => open.retain(|other| *other != path),
            }
        }
        for (path, speed) in (0u16..).map(PathId).zip(speeds) {
            let at = usize::from(path.0);
            let mut budget = speed(now) * MIB as f64 * TICK.as_secs_f64();
            if answers == Answers::SideBySide {
                let each = budget / queues[at].len() as f64;
                queues[at].iter_mut().for_each(|(_, left)| *left = (*left - each).max(0.0));
                // Only what has come whole now is taken.
                budget = 0.0;
            }
            while let Some((piece, left)) = queues[at].front_mut() {
                let piece = *piece;
                if *left > budget {
                    *left -= budget;
                    break;
                }
                budget -= *left;
                queues[at].pop_front();
                ran.brought += pieces[piece].bytes;
                if let Arrived::First { cancel } = dealer.arrived(piece, path, &mut paths, now) {
                    here += pieces[piece].bytes;
                    arrived[piece] = true;
                    if let Some(other) = cancel {
                        queues[usize::from(other.0)].retain(|(waiting, _)| *waiting != piece);
                        dealer.cancelled(piece, other, &mut paths, now);
                    }
                }
            }
        }
        while arrived.get(deliverable) == Some(&true) {
            here -= pieces[deliverable].bytes;
            deliverable += 1;
        }
        ran.ahead = ran.ahead.max(here);
        now += TICK;
        if deliverable < first {
            ran.first = now;
        }
    }
    ran.took = now;
    ran.steps = dealer.steps();
    ran
}

/// 1 GiB in pieces of 1 MiB, which all lie on each of `paths` paths.
fn gib(paths: usize) -> Vec<Piece> {
    pieces_of(1024, MIB, all(paths))
}

fn alone(speed: Speed, first: usize) -> Ran {
    run(&gib(1), first, &[speed])
}

fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}

fn fast(_: Duration) -> f64 {
    300.0
}

fn third(_: Duration) -> f64 {
    100.0
}

#[test]
fn two_equal_paths_take_half_the_time_of_one_and_bring_little_twice() {
    let (one, both) = (alone(fast, 8), run(&gib(2), 8, &[fast, fast]));
    let gain = ratio(one.took, both.took);
    assert!(gain > 1.95, "{gain}");
    assert!(both.brought <= 1030 * MIB, "{} MiB for 1024", both.brought / MIB);
    assert!(
        ratio(both.first, one.first) <= 1.15,
        "the first layer took {:?}, alone {:?}",
        both.first,
        one.first
    );
}

#[test]
fn paths_of_unequal_speed_add_up() {
    let (one, both) = (alone(fast, 8), run(&gib(2), 8, &[fast, third]));
    let sum = ratio(one.took, both.took) * 300.0 / 400.0;
    assert!(sum > 0.95, "{sum} of the sum of both");
    assert!(
        ratio(both.first, one.first) <= 1.15,
        "the first layer took {:?}, alone {:?}",
        both.first,
        one.first
    );
}

#[test]
fn the_first_layer_does_not_wait_for_what_was_asked_for_behind_it() {
    // Of disks that read side by side what they are asked for, and whose queues are long.
    let disk: Speed = |_| 1000.0;
    let of = |count: usize, first: u64| {
        let (pieces, mut paths) = (gib(count), Paths::new(count as u16));
        for path in (0..count as u16).map(PathId) {
            known(path, &mut paths);
        }
        let dealer = Dealer::new(pieces.clone()).with_first(first);
        run_of((dealer, paths), &pieces, 8, &vec![disk; count], Answers::SideBySide)
    };
    let (one, both, without) = (of(1, 8), of(2, 8), of(2, 0));
    let first = ratio(both.first, one.first);
    assert!(first <= 0.7, "the first layer took {:?}, alone {:?}", both.first, one.first);
    assert!(ratio(one.took, both.took) > 1.95, "{:?}, alone {:?}", both.took, one.took);
    assert!(ratio(without.first, one.first) > 1.15, "where nothing is first {:?}", without.first);
}

/// A path has brought 1,000 MiB in a second: its queue is of 20 MiB.
fn known(path: PathId, paths: &mut Paths) {
    for at in 0..1000 {
        paths.asked(path, MIB, Duration::from_millis(at));
        paths.arrived(path, MIB, Duration::from_millis(at + 1));
    }
}

#[test]
fn until_the_first_layer_is_here_a_quarter_of_a_queue_is_for_what_comes_behind_it() {
    let mut paths = Paths::new(2);
    let (one, now) = (PathId(0), Duration::from_secs(1));
    known(one, &mut paths);
    let mut dealer = Dealer::new(pieces_of(64, MIB, all(1))).with_first(2);
    let take_all = |dealer: &mut Dealer, paths: &mut Paths| {
        std::iter::from_fn(|| dealer.take(one, true, paths, now)).collect::<Vec<_>>()
    };
    assert_eq!(take_all(&mut dealer, &mut paths), [0, 1, 2, 3, 4]);
    assert_eq!(dealer.arrived(0, one, &mut paths, now), Arrived::First { cancel: None });
    assert_eq!(take_all(&mut dealer, &mut paths), [5]);
    dealer.withdraw(1);
    let rest = take_all(&mut dealer, &mut paths).len();
    assert!((14..=15).contains(&rest), "{rest} more when nothing of the first layer is wanted any more");
    // What stands for a piece of it is waited for as it was.
    let mut dealer = Dealer::new(pieces_of(64, MIB, all(1))).with_first(1);
    let parts = [0, 1].map(|place| Piece { place, bytes: MIB, paths: PathSet::default() });
    dealer.replace(0, parts);
    assert_eq!(dealer.first_open, 1);
    dealer.withdraw(64);
    assert_eq!(dealer.first_open, 0);
}

#[test]
fn a_path_that_collapses_in_the_middle_costs_less_than_a_quarter_of_the_better_paths_time() {
    let collapses: Speed = |now| if now < Duration::from_millis(850) { 300.0 } else { 30.0 };
    let (one, both) = (alone(fast, 8), run(&gib(2), 8, &[fast, collapses]));
    assert!(ratio(both.took, one.took) <= 0.8, "{:?}, the better one alone {:?}", both.took, one.took);
}

#[test]
fn a_path_that_never_brings_anything_costs_a_little_and_one_that_stops_in_the_middle_as_little() {
    let dead: Speed = |_| 0.0;
    let stops: Speed = |now| if now < Duration::from_millis(850) { 300.0 } else { 0.0 };
    let one = alone(fast, 8);
    for broken in [dead, stops] {
        let both = run(&gib(2), 8, &[fast, broken]);
        assert!(ratio(both.took, one.took) <= 1.05, "{:?}, the other one alone {:?}", both.took, one.took);
        let first = both.first.saturating_sub(one.first);
        assert!(first <= Duration::from_millis(100), "the first layer came {first:?} later");
    }
}

#[test]
fn pieces_come_nearly_in_the_order_of_delivery() {
    let both = run(&gib(2), 8, &[fast, third]);
    assert!(both.ahead <= 16 * MIB, "{} MiB wait for an earlier piece", both.ahead / MIB);
}

#[test]
fn what_only_one_path_has_is_read_there_and_the_others_do_the_rest() {
    let only = |n: u16| PathSet::default().with(PathId(n % 2));
    let pieces: Vec<Piece> =
        (0..1024u16).map(|n| Piece { place: n.into(), bytes: MIB, paths: only(n) }).collect();
    let ran = run(&pieces, 8, &[fast, fast]);
    assert_eq!(ran.brought, 1024 * MIB);
    assert!(ratio(alone(fast, 8).took, ran.took) > 1.9);
}

#[test]
fn the_work_of_dealing_grows_with_the_pieces_and_not_faster() {
    let steps = |count| run(&pieces_of(count, MIB / 16, all(3)), 8, &[fast, fast, third]).steps;
    let (small, large) = (steps(1000), steps(8000));
    assert!(large <= small * 10, "{small} for 1,000 pieces, {large} for 8,000");
}

#[test]
fn a_piece_that_is_cut_is_read_by_the_parts_that_stand_for_it_and_before_what_follows() {
    let (one, other) = (PathId(0), PathId(1));
    let mut dealer = Dealer::new(vec![
        Piece { place: 0, bytes: 3 * MIB, paths: all(2) },
        Piece { place: 10, bytes: MIB, paths: all(2) },
    ]);
    let (mut paths, now) = (Paths::new(2), Duration::ZERO);
    assert_eq!(dealer.take(one, true, &mut paths, now), Some(0));
    dealer.missing(0, one, &mut paths, now);
    assert!(paths.is_usable(one, now) && paths.outstanding(one) == 0 && paths.strikes(one) == 0);
    let part = |place, paths| Piece { place, bytes: MIB, paths };
    let only = PathSet::default().with(other);
    let first = dealer.replace(0, [part(0, all(2)), part(1, only), part(2, PathSet::default())]);
    assert_eq!((first, dealer.take_lost(), dealer.take_lost()), (2, Some(4), None));
    dealer.withdraw(4);
    assert_eq!(dealer.take(one, true, &mut paths, now), Some(2));
    assert_eq!(dealer.take(other, true, &mut paths, now), Some(3));
    assert_eq!(dealer.take(one, true, &mut paths, now), Some(1));
    for (piece, path) in [(2, one), (3, other), (1, one)] {
        assert!(!dealer.is_done());
        dealer.arrived(piece, path, &mut paths, now);
    }
    assert!(dealer.is_done());
}

#[test]
fn a_path_that_is_left_alone_is_asked_for_what_nobody_else_has_and_second_requests_wait_for_memory() {
    let (one, other, now) = (PathId(0), PathId(1), Duration::ZERO);
    let mut paths = Paths::new(2);
    (0..3).for_each(|_| paths.failed(one, 0, now));
    assert!(!paths.is_usable(one, now));
    let only = PathSet::default().with(one);
    let mut dealer = Dealer::new(vec![
        Piece { place: 0, bytes: MIB, paths: all(2) },
        Piece { place: 1, bytes: MIB, paths: only },
    ]);
    assert_eq!(dealer.take(one, true, &mut paths, now), None);
    assert_eq!(dealer.take(other, true, &mut paths, now), Some(0));
    assert_eq!(dealer.take(one, true, &mut paths, now), Some(1));
    // The other one brings its piece, and could bring another.
    dealer.gone(one, &mut paths, now);
    assert_eq!(dealer.take_lost(), Some(1));
    let mut dealer = Dealer::new(pieces_of(1, MIB, all(2)));
    let mut paths = Paths::new(2);
    paths.asked(other, MIB, now);
    paths.arrived(other, MIB, now + TICK);
    assert_eq!(dealer.take(one, true, &mut paths, now), Some(0));
    let later = now + Duration::from_secs(1);
    assert_eq!(dealer.take(other, false, &mut paths, later), None);
    assert_eq!(dealer.take(other, true, &mut paths, later), Some(0));
}

#[test]
fn a_piece_comes_late_whatever_was_cancelled_behind_it() {
    let (slow, other) = (PathId(0), PathId(1));
    let mut paths = Paths::new(2);
    let mut dealer = Dealer::new(pieces_of(2, MIB, all(2)));
    for (path, millis) in [(slow, 10), (other, 15)] {
        paths.asked(path, MIB, Duration::ZERO);
        paths.arrived(path, MIB, Duration::from_millis(millis));
    }
    let now = Duration::from_millis(15);
    assert_eq!(dealer.take(slow, true, &mut paths, now), Some(0));
    assert_eq!(dealer.take(slow, true, &mut paths, now), Some(1));
    assert_eq!(dealer.take(other, true, &mut paths, now), Some(1), "twice as far back as the first");
    assert_eq!(dealer.arrived(1, other, &mut paths, now), Arrived::First { cancel: Some(slow) });
    dealer.cancelled(1, slow, &mut paths, now);
    let later = now + Duration::from_secs(1);
    assert_eq!(dealer.take(other, true, &mut paths, later), Some(0));
}

#[test]
fn the_work_of_dealing_grows_with_the_pieces_where_a_path_has_none_of_what_it_was_said_to_have() {
    let steps = |count| {
        let mut dealer = Dealer::new(pieces_of(count, MIB / 16, all(3)));
        let (mut paths, mut now) = (Paths::new(3), Duration::ZERO);
        while !dealer.is_done() {
            for path in (0..3).map(PathId) {
                let mut asked = Vec::new();
                while let Some(piece) = dealer.take(path, true, &mut paths, now) {
                    asked.push(piece);
                }
                now += TICK;
                for piece in asked {
                    match path {
                        PathId(0) => drop(dealer.arrived(piece, path, &mut paths, now)),
                        _ => dealer.missing(piece, path, &mut paths, now),
                    }
                }
            }
        }
        dealer.steps()
    };
    let (small, large) = (steps(1000), steps(8000));
    assert!(large <= small * 10, "{small} for 1,000 pieces, {large} for 8,000");
}

proptest! {
    /// Whatever fails, no piece is asked for where it is not, or by more than two at once; each is here once; and a read
    /// ends as soon as everything is here, or a piece has no path left.
    #[test]
    fn whatever_fails_a_read_ends_with_every_piece_that_some_path_brings(
        masks in prop::collection::vec(1u64..8, 1..60),
        fates in prop::collection::vec(0u8..10, 1..400),
    ) {
        let piece = |(place, mask): (u64, &u64)| Piece { place, bytes: MIB, paths: PathSet(*mask) };
        let pieces: Vec<Piece> = (0..).zip(&masks).map(piece).collect();
        let (mut dealer, mut paths) = (Dealer::new(pieces.clone()), Paths::new(3));
        let mut owed: Vec<(usize, PathId)> = Vec::new();
        let mut here = vec![0; pieces.len()];
        let (mut failed, mut lost) = (vec![0u64; pieces.len()], vec![false; pieces.len()]);
        let mut fates = fates.iter().cycle();
        // Long enough that no path is left alone for several failures.
        let mut now = Duration::ZERO;
        for _ in 0..10_000 {
            now += Duration::from_secs(11);
            for path in (0..3).map(PathId) {
                while let Some(piece) = dealer.take(path, true, &mut paths, now) {
                    prop_assert!(pieces[piece].paths.has(path) && failed[piece] & PathSet::bit(path) == 0);
                    prop_assert_eq!(here[piece], 0, "asked for although it is here");
                    owed.push((piece, path));
                    prop_assert!(owed.iter().filter(|(other, _)| *other == piece).count() <= 2);
                }
            }
            while let Some(piece) = dealer.take_lost() {
                prop_assert!(pieces[piece].paths.0 & !failed[piece] == 0, "lost although a path is left");
                prop_assert!(!lost[piece] && here[piece] == 0);
                lost[piece] = true;
                dealer.withdraw(piece);
            }
            if dealer.is_done() {
                break;
            }
            prop_assert!(!owed.is_empty(), "nothing is under way and nothing is taken");
            let (piece, path) = owed.remove(usize::from(*fates.next().unwrap()) % owed.len());
            match *fates.next().unwrap() {
                0..2 => {
                    failed[piece] |= PathSet::bit(path);
                    dealer.failed(piece, path, &mut paths, now);
                }
                2 => {
                    owed.retain(|(_, owes)| *owes != path);
                    failed.iter_mut().for_each(|paths| *paths |= PathSet::bit(path));
                    dealer.gone(path, &mut paths, now);
                }
                _ => match dealer.arrived(piece, path, &mut paths, now) {
                    Arrived::First { cancel } => {
                        here[piece] += 1;
                        if let Some(other) = cancel {
                            owed.retain(|owes| *owes != (piece, other));
                            dealer.cancelled(piece, other, &mut paths, now);
                        }
                    }
                    Arrived::Late => prop_assert_eq!(here[piece], 1),
                },
            }
        }
        prop_assert!(dealer.is_done());
        for (here, lost) in here.iter().zip(&lost) {
            prop_assert_eq!(*here + i32::from(*lost), 1);
        }
        for path in (0..3).map(PathId) {
            let owes: u64 = owed.iter().filter(|(_, owes)| *owes == path).map(|_| MIB).sum();
            prop_assert_eq!(paths.outstanding(path), owes, "requests that nobody counts");
        }
    }
}
