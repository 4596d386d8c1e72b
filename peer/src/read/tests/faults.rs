//! What goes wrong with paths, and what a reader sees of it: nothing but bytes of one production, or a reason.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{Order, ReadEnd, ReadEvent};
use kvarts_contract::error::Reason;
use proptest::prelude::*;

use super::harness::*;
use crate::read::{LastResort, OWN};

const PEER: PathId = PathId(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn set(mask: u16) -> PathSet {
    (0..4).filter(|bit| mask >> bit & 1 == 1).fold(PathSet::default(), |set, bit| set.with(PathId(bit)))
}

/// 8 layers of 4 MiB in 16 blocks.
fn wanted(order: Order) -> Wanted {
    Wanted { order, blocks: 16, layers: vec![vec![128 << 10; 2]; 8], deadline: None }
}

fn stage(order: Order, scripts: impl IntoIterator<Item = Script>) -> Stage {
    Stage::new(wanted(order), scripts.into_iter().collect())
}

const ORDERS: [Order; 2] = [Order::Layers, Order::Blocks];

/// Nothing was missed.
fn is_whole(went: &Went) -> bool {
    went.end.usable_blocks == 16 && went.end.usable_layers == 8 && went.end.failures.is_empty()
}

#[test]
fn a_copy_that_comes_late_never_overwrites_what_was_announced() {
    for order in ORDERS {
        for slow in [0, 1] {
            let stalls =
                || Script { lingers: ms(15), ..at_speed(|now| if now < ms(20) { 300.0 } else { 0.0 }) };
            let mut scripts = vec![stalls(), steady(300.0)];
            scripts.rotate_left(slow);
            let stage = stage(order, scripts);
            let went = stage.run(stage.all());
            assert!(is_whole(&went), "{went:?}");
            let status = stage.nodes.status(Default::default());
            assert!(status[slow].brought.cancelled > 0, "nothing was asked for twice: {status:?}");
        }
    }
}

#[test]
fn of_two_productions_of_a_block_one_is_read_and_the_other_path_does_not_have_it() {
    for order in ORDERS {
        let other =
            Script { has: Box::new(|block| Some(if block % 3 == 0 { 2 } else { 1 })), ..steady(300.0) };
        let stage = stage(order, [steady(300.0), other]);
        let went = stage.run(stage.all());
        assert!(is_whole(&went), "{went:?}");
        let status = stage.nodes.status(Default::default());
        assert!(status.iter().all(|path| path.brought.pieces > 0 && path.brought.failed == 0), "{status:?}");
        assert!(status.iter().all(|path| path.strikes == 0), "another production is no fault");
    }
}

#[test]
fn a_production_that_is_lost_with_its_path_is_read_as_another_one() {
    for order in ORDERS {
        for lost in [
            Script { dies: Some(ms(8)), ..steady(300.0) },
            Script {
                fault: Box::new(|n| if n < 3 { Fault::None } else { Fault::Damage(1) }),
                ..steady(300.0)
            },
        ] {
            // The peer is asked first and is faster: its production is met first.
            let other = Script { has: Box::new(|_| Some(2)), ..steady(30.0) };
            let wanted = Wanted { layers: vec![vec![512 << 10; 2]; 4], ..wanted(order) };
            let stage = Stage::new(wanted, vec![other, lost]);
            let went = stage.run(stage.all());
            let announced = !went.layers.is_empty() && went.layers[0].1 == 16;
            let whole = went.end.usable_blocks == 16 && went.end.failures.is_empty();
            // What was announced of a block is of one production: of that no other one is read.
            assert!(whole || (order == Order::Layers && announced), "{order:?} {went:?}");
        }
        // A peer whose production was met and that fails before anything was announced: all is read from the own disks. In
        // layer order nothing of it comes, as the own disks are asked for a second layer when the first one is whole.
        let (damages, good) = (Fault::Damage(1), u64::from(order == Order::Blocks));
        let slow = Script { has: Box::new(|_| Some(2)), ..steady(100.0) };
        let fails = Script {
            fault: Box::new(move |n| if n < good { Fault::None } else { damages }),
            ..steady(1000.0)
        };
        let wanted = Wanted { layers: vec![vec![512 << 10; 2]; 4], ..wanted(order) };
        let stage = Stage::new(wanted, vec![slow, fails]);
        let went = stage.run(stage.all());
        assert!(went.end.usable_blocks == 16 && went.end.failures.is_empty(), "{order:?} {went:?}");
        assert!(went.met.contains(&Some(origin(2))), "{:?}", went.met);
    }
}

#[test]
fn a_disk_that_hangs_holds_back_no_read_that_a_peer_can_serve() {
    for order in ORDERS {
        // It keeps what it was asked to read to until long after the end.
        let hangs = Script { lingers: ms(1500), ..at_speed(|now| if now < ms(20) { 300.0 } else { 0.0 }) };
        let stage = stage(order, [hangs, steady(300.0)]);
        for _ in 0..3 {
            let went = stage.run(stage.all());
            assert!(is_whole(&went) && went.end.held_bytes == 0 && went.took < ms(400), "{order:?} {went:?}");
        }
        assert!(stage.fakes[0].told().0 > 0, "nothing came from the disk before it hung");
    }
}

#[test]
fn a_peer_that_keeps_memory_holds_back_the_reads_that_it_had_begun_and_no_other() {
    for order in ORDERS {
        let hangs = Script { lingers: ms(1500), ..at_speed(|now| if now < ms(20) { 300.0 } else { 0.0 }) };
        let stage = stage(order, [steady(300.0), hangs]);
        let first = stage.run(stage.all());
        assert!(is_whole(&first) && first.took > ms(1000), "{first:?}");
        // It is asked by every read again, and keeps what it was asked to read to.
        let next = stage.run(stage.all());
        assert!(is_whole(&next) && next.took < ms(400), "{next:?}");
    }
}

#[test]
fn a_path_that_has_nothing_of_what_it_was_said_to_have_costs_nothing_but_time() {
    for order in ORDERS {
        for empty in [0, 1] {
            let nothing = Script { has: Box::new(|_| None), ..steady(1000.0) };
            let mut scripts = vec![nothing, steady(300.0)];
            scripts.rotate_left(empty);
            let stage = stage(order, scripts);
            let went = stage.run(stage.all());
            assert!(is_whole(&went), "{went:?}");
            // It is asked once for each block, which is in 8 layers.
            let (_, asked) = stage.fakes[empty].told();
            assert!(asked <= if order == Order::Layers { 12 } else { 32 }, "asked {asked} times");
        }
    }
}

#[test]
fn a_read_whose_own_disk_fails_in_the_middle_comes_from_the_peer() {
    for order in ORDERS {
        for fault in [Fault::Damage(3), Fault::Abandon, Fault::Busy] {
            let breaks =
                Script { fault: Box::new(move |n| if n < 4 { Fault::None } else { fault }), ..steady(300.0) };
            let stage = stage(order, [breaks, steady(300.0)]);
            let went = stage.run(stage.all());
            assert!(is_whole(&went), "{fault:?} {went:?}");
        }
        let stage = stage(order, [Script { dies: Some(ms(20)), ..steady(300.0) }, steady(300.0)]);
        assert!(is_whole(&stage.run(stage.all())));
    }
}

/// A path that is asked at last for what it has, and what it was asked for.
#[derive(Debug, Default)]
struct AtLast {
    has: Vec<u32>,
    asked: Mutex<Vec<u32>>,
}

impl LastResort for AtLast {
    fn path(&self) -> PathId {
        PathId(2)
    }

    fn leads_to(&self, blocks: &[u32]) -> Vec<bool> {
        self.asked.lock().unwrap().extend(blocks);
        blocks.iter().map(|block| self.has.contains(block)).collect()
    }
}

#[test]
fn a_peer_that_hangs_or_is_away_holds_back_no_block_that_the_last_resort_has() {
    let said = || (0..16).map(|block| set(if block < 8 { 1 } else { 2 })).collect::<Vec<_>>();
    let all = Some((ms(0), Duration::from_secs(60)));
    for order in ORDERS {
        for (peer, is_slow) in [
            (Script { lingers: ms(15), ..at_speed(|now| if now < ms(10) { 300.0 } else { 0.0 }) }, false),
            (at_speed(|_| 0.0), false),
            (Script { away: all, ..steady(300.0) }, false),
            (Script { away: Some((ms(0), ms(150))), ..steady(300.0) }, true),
            (steady(20.0), true),
        ] {
            let mut stage = stage(order, [steady(300.0), peer, steady(100.0)]);
            let last = Arc::new(AtLast { has: (0..16).collect(), ..AtLast::default() });
            stage.last = Some(Arc::clone(&last) as _);
            let went = stage.run(said());
            assert!(is_whole(&went), "{order:?} {went:?}");
            let mut asked = last.asked.lock().unwrap().clone();
            let count = asked.len();
            asked.sort_unstable();
            asked.dedup();
            assert_eq!(asked.len(), count, "each once");
            assert_eq!(count == 0, is_slow, "{order:?} {asked:?}");
            assert!(is_slow || went.took < ms(1200), "{order:?} {went:?}");
        }
        // Of a peer that comes back what the last resort does not have; nothing of it is given up meanwhile.
        let peer = at_speed(|now| if (ms(10)..ms(1500)).contains(&now) { 0.0 } else { 300.0 });
        let mut stage = stage(order, [steady(300.0), peer, steady(100.0)]);
        stage.last = Some(Arc::new(AtLast { has: (0..12).collect(), ..AtLast::default() }) as _);
        assert!(is_whole(&stage.run(said())), "{order:?}");
    }
}

#[test]
fn a_path_of_last_resort_is_asked_for_what_no_other_one_gives_and_once() {
    // The own disks have the first half, the peer is said to have the second one.
    let said = |count: u32| (0..count).map(|block| set(if block < 8 { 1 } else { 2 })).collect::<Vec<_>>();
    for order in ORDERS {
        for peer in [
            Script { dies: Some(ms(3)), ..steady(300.0) },
            Script { fault: Box::new(|_| Fault::Damage(0)), ..steady(300.0) },
            Script { has: Box::new(|_| None), ..steady(300.0) },
        ] {
            let mut stage = stage(order, [steady(300.0), peer, steady(100.0)]);
            let last = Arc::new(AtLast { has: (0..16).collect(), ..AtLast::default() });
            stage.last = Some(Arc::clone(&last) as _);
            let went = stage.run(said(16));
            assert!(is_whole(&went), "{order:?} {went:?}");
            let mut asked = last.asked.lock().unwrap().clone();
            let count = asked.len();
            asked.sort_unstable();
            asked.dedup();
            assert!(asked.len() == count && asked.iter().all(|block| *block >= 8), "{asked:?}");
            assert!(count > 0 && stage.fakes[2].told().0 > 0);
        }
        // Nothing fails: it is asked for nothing.
        let mut stage = stage(order, [steady(300.0), steady(300.0), steady(100.0)]);
        let last = Arc::new(AtLast { has: (0..16).collect(), ..AtLast::default() });
        stage.last = Some(Arc::clone(&last) as _);
        assert!(is_whole(&stage.run(said(16))));
        assert!(last.asked.lock().unwrap().is_empty() && stage.fakes[2].told() == (0, 0));
        // What is nowhere is asked for at the beginning, and what it does not have has failed.
        let nowhere = |block| if block < 12 { set(0) } else { set(1) };
        stage.last = Some(Arc::new(AtLast { has: (0..11).collect(), ..AtLast::default() }) as _);
        let went = stage.run((0..16).map(nowhere).collect());
        let failed: Vec<u32> = went.end.failures.iter().map(|(block, _)| *block).collect();
        assert_eq!((failed, went.end.usable_blocks), (vec![11], 11), "{order:?}");
    }
}

#[test]
fn a_path_that_fails_for_a_while_is_asked_again_where_there_is_no_other() {
    for order in ORDERS {
        for fault in [Fault::Abandon, Fault::Busy] {
            let some = Script {
                fault: Box::new(move |n| if n % 8 < 6 { fault } else { Fault::None }),
                ..steady(300.0)
            };
            let stage = stage(order, [some]);
            let went = stage.run(stage.all());
            assert!(is_whole(&went), "{fault:?} {went:?}");
        }
        let never = Script { fault: Box::new(|_| Fault::Busy), ..steady(300.0) };
        let stage = stage(order, [never]);
        let went = stage.run(stage.all());
        let failures = if order == Order::Blocks { 16 } else { went.end.failures.len() };
        assert_eq!((went.end.usable_blocks, went.end.failures.len()), (0, failures));
        assert!(went.end.failures.iter().all(|(_, reason)| matches!(reason, Reason::Busy(_))));
        assert!(stage.fakes[0].told().1 < 300 && went.took < ms(3000), "{went:?}");
    }
}

#[test]
fn a_connection_that_is_made_again_is_waited_for_and_one_that_is_not_costs_a_bounded_time() {
    for order in ORDERS {
        let away = |until| Script { away: Some((ms(20), ms(until))), ..steady(300.0) };
        let stage = stage(order, [away(820)]);
        let went = stage.run(stage.all());
        assert!(is_whole(&went) && went.took < ms(1200), "{went:?}");
        let stage = Stage::new(wanted(order), vec![away(60_000)]);
        let went = stage.run(stage.all());
        assert!(!is_whole(&went) && went.took < ms(1300), "{went:?}");
        assert!(stage.fakes[0].told().1 < 400, "asked {} times", stage.fakes[0].told().1);
        // What another one has as well does not wait.
        let stage = Stage::new(wanted(order), vec![away(60_000), steady(300.0)]);
        let went = stage.run(stage.all());
        assert!(is_whole(&went) && went.took < ms(300), "{went:?}");
    }
}

#[test]
fn a_peer_that_was_away_before_a_read_began_costs_it_its_blocks_and_no_time() {
    for order in ORDERS {
        let away = Script { away: Some((ms(0), ms(60_000))), ..steady(300.0) };
        let stage = stage(order, [steady(300.0), away]);
        stage.pass(ms(1500));
        let began = stage.world.time();
        let went = stage.run((0..16).map(|block| set(if block < 8 { 1 } else { 2 })).collect());
        assert_eq!(went.end.usable_blocks, 8, "{went:?}");
        assert!(went.took.saturating_sub(began) < ms(200), "{went:?}");
        let said = |reason: &Reason| *reason == Reason::Busy("the peer is away");
        assert!(went.end.failures.iter().all(|(_, reason)| said(reason)), "{went:?}");
    }
}

#[test]
fn a_peer_that_takes_everything_and_sends_no_piece_costs_its_blocks_and_a_bounded_time() {
    let hangs = || at_speed(|now| if now < ms(10) { 300.0 } else { 0.0 });
    for order in ORDERS {
        let alone = stage(order, [steady(300.0), hangs()]);
        let said = || (0..16).map(|block| set(if block < 8 { 1 } else { 2 })).collect::<Vec<_>>();
        let went = alone.run(said());
        assert!(went.end.usable_blocks >= 8 && !is_whole(&went), "{went:?}");
        assert!(went.took < ms(2600), "{order:?} {:?}", went.took);
        let is_told = |(_, reason): &(u32, Reason)| *reason == Reason::Busy(kvarts_wire::busy::PEER_SILENT);
        assert!(went.end.failures.iter().any(is_told), "{went:?}");
        // Of one that has brought nothing since then less is expected.
        let began = alone.world.time();
        let went = alone.run(said());
        assert!(went.end.usable_blocks == 8 && went.took.saturating_sub(began) < ms(900), "{went:?}");
        // What another one has as well comes from there.
        let other = stage(order, [steady(300.0), hangs(), steady(300.0)]);
        let went = other.run((0..16).map(|block| set(if block < 8 { 1 } else { 6 })).collect());
        assert!(is_whole(&went) && went.took < ms(600), "{order:?} {went:?}");
    }
}

#[test]
fn the_own_disks_reason_is_told_where_they_had_a_block_and_else_the_last_one() {
    let damaged = |block: u32| Script { fault: Box::new(move |_| Fault::Damage(block)), ..steady(300.0) };
    let none = || Script { has: Box::new(|_| None), ..steady(300.0) };
    let one = |scripts: Vec<Script>| {
        let wanted = Wanted { blocks: 1, layers: vec![vec![128 << 10; 2]; 2], ..wanted(Order::Blocks) };
        let stage = Stage::new(wanted, scripts);
        let went = stage.run(stage.all());
        went.end.failures[0].1.clone()
    };
    assert_eq!(one(vec![damaged(0), none()]), Reason::Config("damaged".to_owned()));
    assert_eq!(one(vec![none(), damaged(0)]), Reason::Config("damaged".to_owned()));
    assert!(matches!(one(vec![none(), none()]), Reason::NotHere(_)));
}

#[test]
fn what_no_path_leads_to_has_failed_at_once_and_what_stands_before_it_is_read() {
    for order in ORDERS {
        let stage = stage(order, [steady(300.0), steady(300.0)]);
        let went = stage.run(vec![PathSet::default(); 16]);
        assert_eq!((went.end.usable_blocks, went.end.failures.len()), (0, 16));
        assert!(went.layers.is_empty() && went.blocks.is_empty() && went.took <= TICK);
        // Path 9 does not exist.
        let copies = |block| if block == 5 { PathSet::default().with(PathId(9)) } else { set(3) };
        let went = stage.run((0..16).map(copies).collect());
        assert_eq!((went.end.usable_blocks, went.end.failures.len()), (5, 1));
        assert_eq!(went.blocks.len(), if order == Order::Blocks { 15 } else { 0 });
        assert!(matches!(went.end.failures[0], (5, Reason::NotHere(_))));
        let brought: u64 = stage.fakes.iter().map(|fake| fake.told().0).sum();
        assert!(
            order == Order::Blocks || brought <= 13 * MIB,
            "blocks behind the first that failed were read"
        );
    }
}

#[test]
fn a_block_that_turns_out_to_be_nowhere_ends_what_stands_behind_it() {
    for order in ORDERS {
        let without = || Script { has: Box::new(|block| (block != 5).then_some(1)), ..steady(300.0) };
        let stage = stage(order, [without(), without()]);
        let went = stage.run(stage.all());
        assert_eq!((went.end.usable_blocks, went.end.failures.len()), (5, 1), "{went:?}");
        assert_eq!(went.blocks.len(), if order == Order::Blocks { 15 } else { 0 });
        assert_eq!(went.end.usable_layers, 8);
    }
}

#[test]
fn a_deadline_ends_a_read_with_what_was_announced_and_memory_comes_back_later() {
    for order in ORDERS {
        for lingers in [ms(0), ms(30)] {
            let stalls = || Script { lingers, ..at_speed(|now| if now < ms(40) { 300.0 } else { 0.0 }) };
            let wanted = Wanted { deadline: Some(ms(60)), ..wanted(order) };
            let stage = Stage::new(wanted, vec![stalls(), stalls()]);
            let went = stage.run(stage.all());
            assert!(went.took >= ms(60) && went.took <= ms(61), "{:?}", went.took);
            assert!(went.layers.len() + went.blocks.len() >= 3, "{went:?}");
            assert!(lingers == ms(0) || went.end.held_bytes > 0, "{went:?}");
            let late = |(_, reason): &(u32, Reason)| *reason == Reason::DeadlinePassed;
            assert!(went.end.failures.iter().all(late), "{went:?}");
        }
    }
}

#[test]
fn a_reader_that_goes_away_cancels_everything() {
    let stage = stage(Order::Layers, [steady(300.0), steady(300.0)]);
    let (mut reading, stream, _) = stage.begin(stage.all());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(reading.poll(&mut context).is_pending());
    assert!(stage.nodes.status(Default::default()).iter().all(|path| path.outstanding > 0));
    drop(stream);
    assert!(reading.poll(&mut context).is_ready());
    drop(reading);
    let status = stage.nodes.status(Default::default());
    assert!(status.iter().all(|path| (path.outstanding, path.reads) == (0, 0)), "{status:?}");
}

#[test]
fn a_path_that_is_taken_away_is_replaced_by_the_others() {
    for order in ORDERS {
        let silent = Script { lingers: ms(5), ..at_speed(|now| if now < ms(20) { 300.0 } else { 0.0 }) };
        let stage = stage(order, [steady(300.0), silent]);
        let went = stage.run_with(stage.all(), |now| {
            if now == ms(25) {
                stage.nodes.remove(PEER);
            }
        });
        assert!(is_whole(&went), "{went:?}");
        assert_eq!(stage.nodes.status(Default::default()).len(), 1);
        let only = PathSet::default().with(OWN).with(PEER);
        assert!(is_whole(&stage.run(vec![only; 16])), "a number without a path");
    }
}

#[test]
fn a_read_that_is_broken_off_says_so_when_no_path_has_the_readers_memory_any_more() {
    let stage = stage(Order::Layers, [Script { lingers: ms(10), ..steady(300.0) }]);
    let (mut reading, stream, _) = stage.begin(stage.all());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(reading.poll(&mut context).is_pending());
    drop(reading);
    stage.pass(ms(9));
    assert_eq!(stream.try_next(), None);
    stage.pass(ms(2));
    assert_eq!(stream.try_next(), Some(ReadEvent::End(ReadEnd::default())));
}

#[test]
fn without_scratch_memory_nothing_is_asked_for_twice() {
    let stalls = at_speed(|now| if (ms(20)..ms(200)).contains(&now) { 0.0 } else { 300.0 });
    let stage = stage(Order::Layers, [stalls, steady(300.0)]).with_scratch(0);
    let went = stage.run(stage.all());
    assert!(is_whole(&went) && went.took > ms(200));
    assert!(stage.nodes.status(Default::default()).iter().all(|path| path.brought.cancelled == 0));
}

/// How a path behaves.
#[derive(Clone, Debug)]
struct Behaviour {
    speed: u32,
    stall: Option<(u64, u64)>,
    productions: Vec<u8>,
    /// Of a thousand pieces, how many go wrong in each of three ways; and by which seed.
    faults: Option<([u64; 3], u64)>,
    lingers: u64,
    dies: Option<u64>,
    removed: Option<u64>,
}

impl Behaviour {
    fn script(self) -> Script {
        let Self { speed, stall, productions, faults, lingers, dies, .. } = self;
        let at = move |now: Duration| {
            let stalls = stall.is_some_and(|(from, long)| (ms(from)..ms(from + long)).contains(&now));
            if stalls { 0.0 } else { f64::from(speed) }
        };
        let fault = move |n: u64| {
            let Some(([damage, abandon, busy], seed)) = faults else { return Fault::None };
            let mixed = (n ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let (mut die, block) = ((mixed >> 40) % 1000, mixed as u32 >> 8);
            for (share, fault) in
                [(damage, Fault::Damage(block)), (abandon, Fault::Abandon), (busy, Fault::Busy)]
            {
                if die < share {
                    return fault;
                }
                die -= share;
            }
            Fault::None
        };
        Script {
            has: Box::new(move |block| Some(productions[block as usize]).filter(|it| *it > 0)),
            fault: Box::new(fault),
            lingers: ms(lingers),
            dies: dies.map(ms),
            ..at_speed(at)
        }
    }

    /// Whether it brings what it has, sooner or later.
    fn is_reliable(&self) -> bool {
        self.faults.is_none() && self.dies.is_none() && self.removed.is_none()
    }
}

fn behaviours() -> impl Strategy<Value = Behaviour> {
    let production = prop_oneof![1 => Just(0u8), 8 => Just(1u8), 1 => Just(2u8)];
    let shares = || prop_oneof![Just(0u64), 0u64..200];
    (
        20u32..600,
        prop::option::of((0u64..60, 1u64..120)),
        prop::collection::vec(production, 24),
        prop::option::of(([shares(), shares(), shares()], any::<u64>())),
        0u64..30,
        prop::option::weighted(0.2, 0u64..80),
        prop::option::weighted(0.2, 0u64..80),
    )
        .prop_map(|(speed, stall, productions, faults, lingers, dies, removed)| Behaviour {
            speed,
            stall,
            productions,
            faults,
            lingers,
            dies,
            removed,
        })
}

fn wishes() -> impl Strategy<Value = Wanted> {
    let bytes = prop_oneof![Just(48u64 << 10), Just(200 << 10), Just(512 << 10), 100u64..700_000];
    let layers = prop::collection::vec(prop::collection::vec(bytes, 1..3), 1..5);
    let order = prop_oneof![Just(Order::Blocks), Just(Order::Layers)];
    (order, 1u32..24, layers, prop::option::weighted(0.3, 5u64..80)).prop_map(
        |(order, blocks, layers, deadline)| Wanted { order, blocks, layers, deadline: deadline.map(ms) },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// The stage looks at every event and at every write; here is what must be had.
    #[test]
    fn whatever_happens_to_paths_a_reader_has_what_one_of_them_brings_and_never_a_mix(
        wanted in wishes(),
        paths in prop::collection::vec(behaviours(), 1..4),
        masks in prop::collection::vec(1u16..16, 24),
    ) {
        let has_deadline = wanted.deadline.is_some();
        let blocks = wanted.blocks as usize;
        let stage = Stage::new(wanted.clone(), paths.iter().cloned().map(Behaviour::script).collect());
        let went = stage.run_with(masks[..blocks].iter().map(|mask| set(*mask)).collect(), |now| {
            for (number, path) in (0..).zip(&paths) {
                if path.removed.is_some_and(|removed| ms(removed) == now) {
                    stage.nodes.remove(PathId(number));
                }
            }
        });
        let bad: Vec<usize> = went.end.failures.iter().map(|(block, _)| *block as usize).collect();
        // A block is there if some path brings it whatever the others do.
        let is_there = |block: usize| {
            let said = paths.iter().enumerate().filter(|(path, _)| masks[block] >> path & 1 == 1);
            let having: Vec<_> = said.filter(|(_, path)| path.productions[block] > 0).map(|(_, path)| path).collect();
            let same = having.iter().all(|path| path.productions[block] == having[0].productions[block]);
            same && having.iter().any(|path| path.is_reliable())
        };
        if !has_deadline {
            let leading = (0..blocks).take_while(|block| is_there(*block)).count();
            prop_assert!(went.end.usable_blocks as usize >= leading, "{} < {leading}: {went:?}", went.end.usable_blocks);
            if wanted.order == Order::Blocks {
                prop_assert!((0..blocks).all(|block| !is_there(block) || !bad.contains(&block)), "{went:?}");
            }
            prop_assert_eq!(went.end.held_bytes, 0);
        }
        for (block, reason) in &went.end.failures {
            let said = |path: usize| masks[*block as usize] >> path & 1 == 1;
            let nowhere = (0..paths.len()).all(|path| !said(path) || paths[path].productions[*block as usize] == 0);
            let is_late = *reason == Reason::DeadlinePassed && has_deadline;
            if nowhere && paths.iter().all(Behaviour::is_reliable) {
                prop_assert!(matches!(reason, Reason::NotHere(_)) || is_late, "{reason:?}");
            }
        }
    }
}
