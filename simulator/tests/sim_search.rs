//! What a search tries, within which bounds, and what it says of it.
use kvarts_simulator::cluster::search::{Promise, Searched, search};
use kvarts_simulator::cluster::work::{SessionWork, Sessions};
use kvarts_simulator::cluster::*;

const FILE: &str = include_str!("cluster.toml");
const PROMISE: Promise = Promise { ttft_ms: 60_000.0, tpot_ms: 500.0 };

fn cluster() -> Cluster {
    let sets = ["nodes.mixed=4", "disk.drives=2", "hbm.gb=5", "dram.gb=10"].map(str::to_owned);
    Cluster::parse_with(FILE, &sets).unwrap()
}

/// A search of a few sessions, and the clusters that it ran.
fn found(from: &Cluster, promise: Promise, bounds: &Bounds, runs: u32) -> (Searched, Vec<Cluster>) {
    let mut ran = Vec::new();
    let of = Sessions { count: 12, turns: 3.0, per_second: 0.0, ..Sessions::named("chat").unwrap() };
    let choices = Choices::new(from, bounds).unwrap();
    let found = search::<RunError>(&choices, promise, runs, &mut |cluster| {
        ran.push(cluster.clone());
        Simulation::new(cluster, SessionWork::new(of, cluster.block_tokens), 1)?.run(|_, _| ())
    });
    (found.unwrap(), ran)
}

#[test]
fn drives_come_whole_with_their_room_their_rates_and_their_price() {
    let from = cluster();
    let (_, ran) = found(&from, PROMISE, &Bounds::default(), 400);
    let (file, mut counts) = (from.disk.unwrap(), Vec::new());
    for cluster in &ran {
        let Some(disk) = cluster.disk else { continue };
        let of = |total: f64| total / f64::from(disk.drives);
        assert_eq!(
            [of(disk.gb), of(disk.gb_per_s), of(disk.write_gb_per_s)],
            [1000.0, 6.0, 3.0],
            "{} drives of {file:?}",
            disk.drives
        );
        let without = Cluster { disk: None, ..cluster.clone() };
        let price = 1000.0 * 0.000_02 * f64::from(disk.drives * cluster.node_count());
        assert!((cluster.cost_per_hour() - without.cost_per_hour() - price).abs() < 1e-9);
        assert_eq!(disk.dwpd, file.dwpd, "endurance is by room");
        counts.push(disk.drives);
    }
    counts.sort_unstable();
    counts.dedup();
    assert!(counts.len() >= 2, "{counts:?}");
    assert!(ran.iter().any(|cluster| cluster.disk.is_none()));
}

#[test]
fn a_search_stays_within_its_bounds_from_its_first_run_on() {
    let from = cluster();
    let bounds = Bounds { nodes_max: Some(3), drives_max: Some(1), cost_max: Some(7.0), ..Bounds::default() };
    let (searched, ran) = found(&from, PROMISE, &bounds, 400);
    assert_eq!((searched.runs as usize, ran.is_empty()), (ran.len(), false));
    for cluster in &ran {
        assert!(cluster.node_count() <= 3 && cluster.disk.is_none_or(|disk| disk.drives <= 1), "{cluster:?}");
        assert!(cluster.cost_per_hour() <= 7.0, "{}", cluster.cost_per_hour());
    }
    assert!(searched.best.unwrap().cost_per_hour <= 7.0);
    // With room above the file's nodes, and a promise that more nodes keep better, they are tried.
    let mut one = Cluster { router: RouterKind::RoundRobin, ..from };
    one.nodes.mixed = 1;
    let bounds = Bounds { nodes_max: Some(7), vary: vec![What::Nodes], ..Bounds::default() };
    let (_, ran) = found(&one, Promise { ttft_ms: 1.0, tpot_ms: 1.0 }, &bounds, 150);
    let tried: Vec<_> = ran.iter().map(Cluster::node_count).collect();
    assert_eq!(tried, [1, 2, 3, 4, 6, 7]);
}

#[test]
fn only_what_may_vary_does() {
    let from = cluster();
    let (_, ran) = found(&from, PROMISE, &Bounds { vary: vec![What::Disk], ..Bounds::default() }, 400);
    for cluster in &ran {
        assert_eq!(Cluster { disk: from.disk, ..cluster.clone() }, from);
    }
    // From two drives to their neighbours, and on from those that nothing beats: these have more than enough.
    let mut drives: Vec<_> = ran.iter().map(|cluster| cluster.disk.map_or(0, |disk| disk.drives)).collect();
    drives.sort_unstable();
    assert_eq!(drives, [0, 1, 2, 3]);
    let (_, ran) = found(&from, PROMISE, &Bounds { vary: vec![What::Prefetch], ..Bounds::default() }, 400);
    let tried: Vec<_> = ran.iter().map(|cluster| cluster.engine.prefetch.name()).collect();
    assert_eq!(tried, ["overlap", "wait_complete", "best_effort", "timeout"]);
    let in_step = Cluster { engine: Engine { prefetch: Prefetch::Layerwise, ..from.engine }, ..from.clone() };
    let (_, ran) = found(&in_step, PROMISE, &Bounds { vary: vec![What::Prefetch], ..Bounds::default() }, 400);
    let tried: Vec<_> = ran.iter().map(|cluster| cluster.engine.prefetch.name()).collect();
    assert_eq!(tried, ["layerwise", "blocking"], "how an engine loads is its own");
    // Memory of devices comes with devices, the same part of what weights leave.
    let (_, ran) = found(&from, PROMISE, &Bounds { vary: vec![What::Hbm], ..Bounds::default() }, 400);
    let mut tried: Vec<_> = ran.iter().map(|cluster| (cluster.nodes.devices, cluster.hbm.gb)).collect();
    tried.sort_by_key(|one| one.0);
    let [(1, 5.0), (2, gb)] = tried.as_slice() else { panic!("{tried:?}") };
    assert!((gb / (5.0 * (160.0 - 16.06) / (80.0 - 16.06)) - 1.0).abs() < 1e-9, "{gb}");
    assert_eq!(found(&from, PROMISE, &Bounds { vary: Vec::new(), ..Bounds::default() }, 400).1, [from]);
}

#[test]
fn nothing_beats_the_front_and_the_best_is_the_cheapest_that_keeps_the_promise() {
    let (searched, ran) = found(&cluster(), PROMISE, &Bounds::default(), 120);
    assert!(ran.len() <= 120 && searched.front.len() > 1, "{} {}", ran.len(), searched.front.len());
    let best = searched.best.unwrap();
    for one in &searched.front {
        let figures = [one.ttft_ms, -one.tokens_per_s, one.cost_per_million];
        let beaten = searched.front.iter().any(|other| {
            let others = [other.ttft_ms, -other.tokens_per_s, other.cost_per_million];
            others != figures && others.iter().zip(figures).all(|(other, one)| *other <= one)
        });
        assert!(!beaten && one.keeps && best.cost_per_million <= one.cost_per_million, "{one:?}");
    }
    // No run twice.
    for (at, cluster) in ran.iter().enumerate() {
        assert!(!ran[..at].contains(cluster), "{cluster:?}");
    }
}

#[test]
fn no_more_runs_than_were_asked_for_and_what_refuses_requests_is_never_the_best() {
    for runs in 1..14 {
        let (searched, ran) = found(&cluster(), PROMISE, &Bounds::default(), runs);
        assert_eq!((searched.runs, ran.len()), (runs, runs as usize));
    }
    // Room for prompts of two devices alone: with one of them requests are refused, and what is left is fast.
    let mut from = cluster();
    (from.nodes.devices, from.hbm.gb) = (2, 1.0);
    let bounds = Bounds { vary: vec![What::Hbm], ..Bounds::default() };
    let (searched, ran) = found(&from, PROMISE, &bounds, 400);
    assert_eq!(ran.iter().map(|cluster| cluster.nodes.devices).min(), Some(1));
    assert!(searched.front.iter().all(|one| one.refused == 0 && one.cluster.nodes.devices > 1));
    let impossible = Promise { ttft_ms: 1e-3, tpot_ms: 1e-3 };
    let (searched, _) = found(&from, impossible, &bounds, 400);
    assert!(searched.front.iter().all(|one| one.refused == 0 && !one.keeps));
}

#[test]
fn bounds_that_leave_nothing_are_told_in_one_sentence() {
    let told = |from: &Cluster, bounds: Bounds| Choices::new(from, &bounds).unwrap_err();
    let (from, usual) = (cluster(), Bounds::default);
    let fixed = |bounds: Bounds| Bounds { vary: Vec::new(), ..bounds };
    assert_eq!(
        told(&from, fixed(Bounds { nodes_max: Some(3), ..usual() })),
        "nodes_max: the file has 4 nodes, but the limit is 3: raise nodes_max, or let nodes vary"
    );
    assert_eq!(
        told(&from, fixed(Bounds { drives_max: Some(1), ..usual() })),
        "drives_max: the file has 2 drives for each node, but the limit is 1: raise drives_max, or let \
         disk vary"
    );
    assert_eq!(
        told(&from, Bounds { cost_max: Some(1.0), ..usual() }),
        "cost_max: the cheapest allowed cluster costs 5.00 an hour, but the limit is 1: raise cost_max"
    );
    let none = Cluster { disk: None, ..from.clone() };
    assert!(
        told(&none, Bounds { drives_max: Some(1), ..usual() })
            .starts_with("drives_max: the file has no [disk]")
    );
    let mut apart = from.clone();
    (apart.nodes.mixed, apart.nodes.prefill, apart.nodes.decode) = (0, 2, 2);
    assert_eq!(
        told(&apart, Bounds { nodes_max: Some(1), ..usual() }),
        "nodes_max: the limit is 1, but the kinds of nodes in the file need at least 2"
    );
    let table = "\n[measured]\nblock_bytes = 65536\nlayers = 4\nstep_ms = 1.0\n";
    let measured = Cluster::parse(&(FILE.to_owned() + table)).unwrap();
    assert!(
        told(&measured, Bounds { vary: vec![What::Hbm], ..usual() })
            .starts_with("vary: hbm varies with the number of devices")
    );
}
