//! How long reads take over paths of given speeds.

use std::time::Duration;

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::Order;

use super::harness::*;
use crate::read::OWN;

/// 1 GiB: 64 layers of 16 MiB in 128 blocks.
fn gib(order: Order) -> Wanted {
    Wanted { order, blocks: 128, layers: vec![vec![64 << 10; 2]; 64], deadline: None }
}

fn stage(order: Order, speeds: Vec<Script>) -> Stage {
    Stage::new(gib(order), speeds.into_iter().map(|script| Script { writes: false, ..script }).collect())
}

fn took(order: Order, speeds: Vec<Script>) -> (Went, Stage) {
    let stage = stage(order, speeds);
    let went = stage.run(stage.all());
    assert_eq!(went.end.usable_blocks, 128);
    (went, stage)
}

fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}

const ORDERS: [Order; 2] = [Order::Layers, Order::Blocks];

#[test]
fn two_equal_paths_take_half_the_time_of_one_and_bring_little_twice() {
    for order in ORDERS {
        let (one, _) = took(order, vec![steady(300.0)]);
        let (both, stage) = took(order, vec![steady(300.0), steady(300.0)]);
        let gain = ratio(one.took, both.took);
        assert!(gain >= 1.95, "{gain}");
        let brought: u64 = stage.fakes.iter().map(|fake| fake.told().0).sum();
        assert!(brought <= 1032 * MIB, "{} MiB for 1024", brought / MIB);
        let first = ratio(both.first.unwrap(), one.first.unwrap());
        assert!(first <= 1.15, "the first took {first} times as long");
    }
}

#[test]
fn paths_of_unequal_speed_add_up() {
    for order in ORDERS {
        let (one, _) = took(order, vec![steady(300.0)]);
        for speeds in [[300.0, 100.0], [100.0, 300.0]] {
            let (both, _) = took(order, speeds.into_iter().map(steady).collect());
            let sum = ratio(one.took, both.took) * 300.0 / 400.0;
            assert!(sum >= 0.90, "{sum} of the sum of both");
            let first = ratio(both.first.unwrap(), one.first.unwrap());
            assert!(first <= 1.15, "the first took {first} times as long, {speeds:?}, {order:?}");
        }
    }
}

#[test]
fn a_path_that_collapses_or_dies_in_the_middle_costs_less_than_a_quarter_of_the_better_paths_time() {
    let middle = Duration::from_millis(850);
    let (one, _) = took(Order::Layers, vec![steady(300.0)]);
    let broken: [fn(Duration) -> Script; 3] = [
        |middle| at_speed(move |now| if now < middle { 300.0 } else { 30.0 }),
        |middle| at_speed(move |now| if now < middle { 300.0 } else { 0.0 }),
        |middle| Script { dies: Some(middle), ..steady(300.0) },
    ];
    for broken in broken {
        for own_breaks in [false, true] {
            let mut scripts = vec![steady(300.0), broken(middle)];
            if own_breaks {
                scripts.reverse();
            }
            let (both, _) = took(Order::Layers, scripts);
            assert!(
                ratio(both.took, one.took) <= 0.85,
                "{:?}, the better one alone {:?}",
                both.took,
                one.took
            );
        }
    }
}

#[test]
fn a_read_of_which_nothing_is_local_comes_from_two_peers_at_once() {
    let stage = stage(Order::Layers, vec![steady(300.0), steady(300.0), steady(300.0)]);
    let peers = PathSet::default().with(PathId(1)).with(PathId(2));
    let went = stage.run(vec![peers; 128]);
    let (one, _) = took(Order::Layers, vec![steady(300.0)]);
    assert!(ratio(one.took, went.took) >= 1.95 && went.end.usable_blocks == 128);
    assert_eq!(stage.fakes[0].told(), (0, 0));
    let brought = stage.nodes.status(Default::default());
    assert!(brought[usize::from(OWN.0)].brought.pieces == 0 && brought[1].brought.bytes > 500 * MIB);
}

#[test]
fn a_peer_that_has_half_of_the_blocks_takes_them_off_the_disk() {
    let stage = stage(Order::Layers, vec![steady(300.0), steady(300.0)]);
    let own = PathSet::default().with(OWN);
    let half = |block: usize| if block < 64 { own.with(PathId(1)) } else { own };
    let went = stage.run((0..128).map(half).collect());
    let (one, _) = took(Order::Layers, vec![steady(300.0)]);
    let gain = ratio(one.took, went.took);
    assert!(gain >= 1.9, "{gain}");
}

#[test]
fn the_work_of_a_read_grows_with_its_pieces_and_not_faster() {
    let steps = |layers| {
        let wanted = Wanted { layers: vec![vec![64 << 10; 2]; layers], ..gib(Order::Layers) };
        let scripts = [300.0, 300.0, 100.0].map(|speed| Script { writes: false, ..steady(speed) });
        let stage = Stage::new(wanted, scripts.into());
        stage.run(stage.all()).steps
    };
    let (small, large) = (steps(16), steps(128));
    assert!(large <= small * 9, "{small} for 256 MiB, {large} for 2 GiB");
    assert!(small < 256 * 42, "{small} for 256 pieces");
}
