//! Many nodes: who is known to hold what, what moves between them and over which lines, and who decides where requests go.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Cloned;
use std::slice::Iter;

use kvarts_simulator::cluster::work::TraceWork;
use kvarts_simulator::cluster::*;
use kvarts_simulator::trace::{Request, TraceError};

const FILE: &str = include_str!("cluster.toml");
/// A block of the model in the file, of 512 tokens.
const BLOCK: u64 = 64 << 20;

fn cluster(change: impl FnOnce(&mut Cluster)) -> Cluster {
    let mut cluster = Cluster::parse(FILE).unwrap();
    change(&mut cluster);
    cluster
}

fn request(at_ms: f64, blocks: &[u64], output_tokens: u64) -> Result<Request, TraceError> {
    Ok(Request {
        at_ms,
        input_tokens: blocks.len() as u64 * 512,
        output_tokens,
        blocks: blocks.to_vec(),
        ..Request::default()
    })
}

type Requests<'a> = Cloned<Iter<'a, Result<Request, TraceError>>>;

fn simulation<'a>(
    cluster: &'a Cluster,
    requests: &'a [Result<Request, TraceError>],
) -> Simulation<'a, TraceWork<Requests<'a>>> {
    Simulation::new(cluster, TraceWork::new(requests.iter().cloned(), 1.0), 1).unwrap()
}

fn run(cluster: &Cluster, requests: &[Result<Request, TraceError>]) -> Counted {
    simulation(cluster, requests).run(|_, _| ()).unwrap()
}

fn near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 0.02, "{found} for {expected}");
}

fn blocks(from: u64, count: u64) -> Vec<u64> {
    (from..from + count).collect()
}

/// Sequences that were decoded by each node.
fn decoded(counted: &Counted) -> BTreeMap<u16, BTreeSet<u64>> {
    let mut by = BTreeMap::<u16, BTreeSet<u64>>::new();
    for batch in counted.schedule.as_ref().unwrap() {
        let alone = batch.tokens.iter().filter(|(_, tokens)| *tokens == 1).map(|(number, _)| *number);
        by.entry(batch.node).or_default().extend(alone);
    }
    by
}

#[test]
fn sixteen_nodes_that_share_a_first_block_are_all_known_as_owners() {
    let cluster = cluster(|cluster| {
        cluster.nodes.mixed = 16;
        cluster.router = RouterKind::RoundRobin;
    });
    // Each of sixteen prompts comes to one node, and later to the same one again.
    let requests: Vec<_> =
        (0..32u64).map(|n| request(n as f64 * 2000.0, &[0, 100 + n % 16, 200 + n % 16], 1)).collect();
    let counted = run(&cluster, &requests);
    assert_eq!((counted.with_owner, counted.to_owner), (31, 16));
}

#[test]
fn the_duplicate_factor_of_disks_counts_every_disk_and_nothing_but_disks() {
    let twelve = |disk: bool| {
        let cluster = cluster(|cluster| {
            cluster.nodes.mixed = 12;
            cluster.router = RouterKind::RoundRobin;
            cluster.network = None;
            cluster.disk = cluster.disk.filter(|_| disk);
        });
        let requests: Vec<_> = (0..12u64).map(|n| request(n as f64 * 2000.0, &blocks(0, 16), 1)).collect();
        let figures = run(&cluster, &requests).json(&cluster);
        assert_eq!(figures["hbm_duplicate_factor"], 12.0);
        figures["disk_duplicate_factor"].clone()
    };
    assert_eq!(twelve(true), 12.0);
    assert!(twelve(false).is_null());
}

#[test]
fn blocks_in_memory_and_not_on_disk_are_no_copies_on_disks() {
    // The disk is too small for one block: all is in memory.
    let cluster = cluster(|cluster| cluster.disk.as_mut().unwrap().gb = 0.01);
    let requests: Vec<_> = (0..4u64).map(|n| request(n as f64 * 2000.0, &blocks(16 * n, 16), 1)).collect();
    assert_eq!(run(&cluster, &requests).distinct, [(64, 64), (0, 0)]);
}

fn apart(prefill: u32, decode: u32, gb_per_s: f64) -> Cluster {
    cluster(|cluster| {
        (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (0, prefill, decode);
        cluster.network = Some(Way { gb_per_s, latency_ms: 0.0 });
    })
}

#[test]
fn state_that_moves_takes_room_on_the_line_with_all_its_bytes_from_the_prefill_s_beginning() {
    use kvarts_planner::cost::{Decode, Prefill};
    let times = apart(1, 1, 1.0).facts().unwrap().times;
    let (prefill, step) = (times.prefill_ms(0, 4096), times.decode_ms(1, 4096));
    // From the first token to the second one.
    let gap = |gb_per_s: f64| {
        let counted = run(&apart(1, 1, gb_per_s), &[request(0.0, &blocks(0, 8), 2)]);
        assert_eq!(counted.network_bytes, 8 * BLOCK);
        counted.tpot.mean()
    };
    let bytes = (8 * BLOCK) as f64;
    near(gap(0.5), bytes / 0.5e6 - prefill + step);
    // Where all but the last layer has gone before the prefill ends, the last one is left.
    near(gap(50.0), bytes / 32.0 / 50e6 + step);
}

#[test]
fn state_that_moves_waits_for_the_sender_s_line_and_for_the_receiver_s() {
    let last = |prefill: u32, decode: u32| {
        let mut cluster = apart(prefill, decode, 0.5);
        cluster.router = RouterKind::RoundRobin;
        let counted = run(&cluster, &[request(0.0, &blocks(0, 8), 2), request(0.0, &blocks(8, 8), 2)]);
        assert_eq!(counted.requests, 2);
        counted.end_ms
    };
    let line = (8 * BLOCK) as f64 / 0.5e6;
    let alone = last(2, 2);
    assert!(alone < 1.2 * line, "{alone}");
    // Two that leave one node, and two that come to one.
    assert!(last(1, 2) > 1.9 * line, "{}", last(1, 2));
    assert!(last(2, 1) > 1.9 * line, "{}", last(2, 1));
}

#[test]
fn what_peers_give_takes_room_on_their_lines() {
    let cluster = cluster(|cluster| {
        cluster.nodes.mixed = 3;
        cluster.router = RouterKind::RoundRobin;
        cluster.network = Some(Way { gb_per_s: 1.0, latency_ms: 0.0 });
        (cluster.engine.plans, cluster.engine.prefetch) = (false, Prefetch::WaitComplete);
    });
    // One node has it; two others ask for it at once.
    let prompt = blocks(0, 64);
    let counted = run(
        &cluster,
        &[request(0.0, &prompt, 1), request(60_000.0, &prompt, 1), request(60_000.0, &prompt, 1)],
    );
    assert_eq!((counted.hits.peer, counted.network_bytes), (126, 126 * BLOCK));
    near(counted.ttft.percentile(1.0), 126.0 * BLOCK as f64 / 1e6);
}

#[test]
fn what_a_peer_has_on_its_disk_only_is_read_there_and_stays_warm() {
    let cluster = cluster(|cluster| {
        cluster.router = RouterKind::RoundRobin;
        (cluster.dram, cluster.hbm.gb) = (None, 1.2);
        (cluster.engine.plans, cluster.engine.prefetch) = (false, Prefetch::WaitComplete);
        let disk = cluster.disk.as_mut().unwrap();
        (disk.single_owner, disk.policy) = (true, Policy::Lru);
        // Forty blocks.
        (disk.gb, disk.gb_per_s) = (40.5 * BLOCK as f64 / 1e9, 0.5);
    });
    let of = |n: usize, first: u64| request(n as f64 * 60_000.0, &blocks(first, 16), 1);
    // Every other one comes to the other node, which has what others ask for as long as its disk keeps it.
    let order = [0, 1000, 100, 0, 200, 1100, 200, 0];
    let requests: Vec<_> = order.iter().enumerate().map(|(n, first)| of(n, *first)).collect();
    let once = run(&cluster, &requests[..4]);
    assert_eq!((once.hits.peer, once.network_bytes), (15, 15 * BLOCK));
    assert!(once.ttft.percentile(1.0) > 15.0 * BLOCK as f64 / 0.5e6, "the holder's disk is slow");
    // What was read by the other node is not what leaves for the next one.
    let twice = run(&cluster, &requests).hits;
    // Of the holder's own prompts one came twice in a row; the other node had one block left itself.
    assert_eq!((twice.peer, twice.hbm), (29, 15 + 1), "{twice:?}");
}

fn cold_only(change: impl FnOnce(&mut Cluster)) -> Cluster {
    cluster(|cluster| {
        (cluster.dram, cluster.disk) = (None, None);
        cluster.router = RouterKind::RoundRobin;
        cluster.engine.plans = false;
        (cluster.engine.prefix_caching, cluster.engine.prefetch) = (false, Prefetch::WaitComplete);
        cluster.cold = Some(Cold { gb: 1e6, gb_per_s: 5.0, latency_ms: 0.0 });
        cluster.dual_path = true;
        change(cluster);
    })
}

#[test]
fn what_comes_by_another_node_s_way_to_the_cold_tier_goes_over_the_network_from_there() {
    let (long, other, tiny) = (blocks(0, 64), blocks(100, 64), blocks(200, 1));
    let requests = [
        request(0.0, &long, 1),
        request(60_000.0, &other, 1),
        request(200_000.0, &long, 1),
        request(200_000.0, &tiny, 1),
        // The node that it comes to reads already, the other one does not.
        request(200_000.0, &other, 1),
    ];
    let by = |network: Option<f64>| {
        let cluster = cold_only(|cluster| {
            cluster.network = network.map(|gb_per_s| Way { gb_per_s, latency_ms: 0.0 });
        });
        let counted = run(&cluster, &requests);
        assert_eq!((counted.hits.cold, counted.by_other_path, counted.cold_reads), (126, 1, 2));
        assert_eq!(counted.network_bytes, 63 * BLOCK);
        counted.ttft.percentile(1.0)
    };
    let prefill = by(None);
    assert!((by(Some(0.5)) - 63.0 * BLOCK as f64 / 0.5e6) < 500.0);
    near(by(Some(50.0)), prefill);
    assert!(by(Some(0.5)) > 2.0 * prefill);
}

#[test]
fn what_the_decoding_node_reads_for_the_other_one_does_not_move_back() {
    let (long, other) = (blocks(0, 64), blocks(100, 64));
    let requests = [
        request(0.0, &long, 2),
        request(60_000.0, &other, 2),
        request(200_000.0, &long, 2),
        request(200_000.0, &other, 2),
    ];
    let bytes = |dual_path| {
        let cluster = cold_only(|cluster| {
            (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (0, 1, 1);
            cluster.dual_path = dual_path;
        });
        let counted = run(&cluster, &requests);
        assert_eq!((counted.hits.cold, counted.by_other_path), (126, u64::from(dual_path)));
        counted.network_bytes / BLOCK
    };
    // One of them goes the other way: 63 blocks before its prefill, and the computed one back.
    assert_eq!((bytes(false), bytes(true)), (4 * 64, 4 * 64));
}

#[test]
fn writes_to_the_cold_tier_take_its_way_and_what_is_too_far_behind_is_left_out() {
    let requests = |count: u64| {
        let first = (0..count).map(|n| request(n as f64 * 1000.0, &blocks(16 * n, 16), 1));
        let again = (0..count).map(|n| request(900_000.0 + n as f64 * 1000.0, &blocks(16 * n, 16), 1));
        first.chain(again).collect::<Vec<_>>()
    };
    let counted = |gb_per_s| {
        let cluster = cold_only(|cluster| {
            cluster.nodes.mixed = 1;
            cluster.cold = Some(Cold { gb: 1e6, gb_per_s, latency_ms: 0.0 });
        });
        run(&cluster, &requests(4))
    };
    let fast = counted(5.0);
    assert_eq!((fast.cold_bytes_written / BLOCK, fast.hits.cold), (64, 60));
    // A prompt takes ten seconds to write, and the others come before it is: later one of them is written, and again no other.
    let slow = counted(16.0 * BLOCK as f64 / 10e9);
    assert_eq!((slow.cold_bytes_written / BLOCK, slow.hits.cold), (16 + 16, 15));
}

#[test]
fn a_burst_is_decoded_by_all_that_decode_and_not_by_the_first() {
    let burst: Vec<_> = (0..64u64).map(|n| request(0.0, &blocks(4 * n, 4), 200)).collect();
    for router in RouterKind::ALL {
        let cluster = cluster(|cluster| {
            (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (0, 2, 4);
            cluster.router = router;
        });
        let by = decoded(&simulation(&cluster, &burst).recording().run(|_, _| ()).unwrap());
        let counts: Vec<usize> = (2..6).map(|node| by[&node].len()).collect();
        assert_eq!(counts, [16; 4], "{}", router.name());
    }
}

#[test]
fn prefilling_nodes_beside_mixed_ones_have_them_decode_in_turn() {
    let burst: Vec<_> = (0..60u64).map(|n| request(0.0, &blocks(4 * n, 4), 200)).collect();
    let cluster = cluster(|cluster| {
        (cluster.nodes.mixed, cluster.nodes.prefill) = (4, 2);
        cluster.router = RouterKind::RoundRobin;
    });
    let by = decoded(&simulation(&cluster, &burst).recording().run(|_, _| ()).unwrap());
    // Ten of their own each, and a quarter of the twenty that the other two prefill.
    let counts: Vec<usize> = (0..4).map(|node| by[&node].len()).collect();
    assert_eq!(counts.iter().sum::<usize>(), 60);
    assert!(counts.iter().all(|count| (14..=16).contains(count)), "{counts:?}");
}

#[test]
fn dual_path_keeps_the_tokens_of_those_that_decode_near_their_mean() {
    // One long prompt, and short ones behind it: by requests alone half of them would join it.
    let burst: Vec<_> =
        (0..21u64).map(|n| request(0.0, &blocks(40 * n, if n == 0 { 31 } else { 1 }), 200)).collect();
    let by = |router| {
        let cluster = cluster(|cluster| {
            (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (0, 2, 2);
            cluster.router = router;
        });
        let by = decoded(&simulation(&cluster, &burst).recording().run(|_, _| ()).unwrap());
        [by[&2].len(), by[&3].len()]
    };
    assert_eq!((by(RouterKind::DualPath), by(RouterKind::RoundRobin)), ([1, 20], [10, 11]));
}

/// The mean time to the first token with each router.
fn ttft(cluster: &Cluster, requests: &[Result<Request, TraceError>]) -> BTreeMap<RouterKind, f64> {
    let of = |router| {
        let cluster = Cluster { router, ..cluster.clone() };
        (router, run(&cluster, requests).ttft.mean())
    };
    RouterKind::ALL.into_iter().map(of).collect()
}

fn oracle_is_best(by: &BTreeMap<RouterKind, f64>) {
    for (router, ms) in by {
        assert!(by[&RouterKind::Oracle] <= *ms, "{} {ms}: {by:?}", router.name());
    }
}

#[test]
fn an_oracle_keeps_the_node_free_to_which_the_next_prompt_will_want_to_go() {
    let cluster = cluster(|cluster| cluster.network = None);
    let mut requests = Vec::new();
    for n in 0..10u64 {
        let (at, prefix) = (n as f64 * 60_000.0, blocks(1000 * n, 48));
        requests.push(request(at, &prefix, 1));
        // A prompt of which nothing is there, and right behind it one that goes on from the first.
        requests.push(request(at + 30_000.0, &blocks(1000 * n + 500, 48), 1));
        let more = [&prefix[..], &[1000 * n + 900]].concat();
        requests.push(request(at + 30_010.0, &more, 1));
    }
    let by = ttft(&cluster, &requests);
    oracle_is_best(&by);
    for router in [RouterKind::CacheAware, RouterKind::OwnerServe] {
        assert!(by[&RouterKind::Oracle] < 0.8 * by[&router], "{by:?}");
    }
}

#[test]
fn an_oracle_knows_which_answers_end_soon() {
    // Two nodes whose memory is full: one will be free soon.
    let cluster = cluster(|cluster| {
        (cluster.hbm.gb, cluster.network) = (36.5 * BLOCK as f64 / 1e9, None);
    });
    let mut requests = Vec::new();
    for n in 0..10u64 {
        let at = n as f64 * 600_000.0;
        let (long, short) = if n % 2 == 0 { (4000, 400) } else { (400, 4000) };
        requests.push(request(at, &blocks(1000 * n, 24), long));
        requests.push(request(at + 1.0, &blocks(1000 * n + 100, 24), short));
        requests.push(request(at + 3000.0, &blocks(1000 * n + 200, 20), 2));
    }
    let by = ttft(&cluster, &requests);
    oracle_is_best(&by);
    assert!(by[&RouterKind::Oracle] < 0.8 * by[&RouterKind::OwnerServe], "{by:?}");
}

#[test]
fn an_oracle_waits_for_loads_even_where_engines_have_no_plans() {
    // One node has all of it in a memory that is slower than computing it.
    let cluster = cluster(|cluster| {
        cluster.engine.plans = false;
        cluster.engine.prefetch = Prefetch::WaitComplete;
        cluster.network = None;
        (cluster.hbm.gb, cluster.disk) = (4.5, None);
        cluster.dram.as_mut().unwrap().gb_per_s = 0.5;
    });
    let mut requests = Vec::new();
    for n in 0..6u64 {
        let at = n as f64 * 200_000.0;
        requests.push(request(at, &blocks(1000 * n, 48), 1));
        requests.push(request(at + 50_000.0, &blocks(1000 * n + 100, 60), 1));
        requests.push(request(at + 50_000.0, &blocks(1000 * n + 200, 60), 1));
        requests.push(request(at + 100_000.0, &blocks(1000 * n, 48), 1));
    }
    let by = ttft(&cluster, &requests);
    assert!(by[&RouterKind::Oracle] < 0.8 * by[&RouterKind::CacheAware], "{by:?}");
}

#[test]
fn sides_in_turns_share_reads_whatever_their_queues() {
    let cluster = |side| {
        cold_only(|cluster| {
            (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (0, 1, 1);
            cluster.dual_path_side = side;
        })
    };
    // Alone each time: the shorter queue is always the own one.
    let prompt = blocks(0, 8);
    let requests: Vec<_> = (0..9u64).map(|n| request(n as f64 * 10_000.0, &prompt, 2)).collect();
    let of = |side| {
        let counted = run(&cluster(side), &requests);
        (counted.cold_reads, counted.by_other_path)
    };
    assert_eq!((of(Side::Shorter), of(Side::Turns)), ((8, 0), (8, 4)));
    // Two nodes that prefill in turn, one of them the longer prompts: each has turns of its own.
    let prompts = (0..18u64).map(|n| request(n as f64 * 10_000.0, &blocks(100 * (n % 2), 8 + n % 2 * 8), 2));
    let prompts: Vec<_> = prompts.collect();
    let waited = |side| {
        let mut two = cluster(side);
        (two.nodes.prefill, two.network) = (2, Some(Way { gb_per_s: 0.5, latency_ms: 0.0 }));
        18.0 * run(&two, &prompts).ttft.mean()
    };
    let over_the_network = (4 * 7 + 4 * 15) as f64 * BLOCK as f64 * (1.0 / 0.5e6 - 1.0 / 5e6);
    near(waited(Side::Turns) - waited(Side::Shorter), over_the_network);
}

#[test]
fn owner_serve_waits_for_an_owner_from_whose_device_memory_nothing_can_be_read() {
    let cluster = cluster(|cluster| {
        cluster.nodes.mixed = 16;
        cluster.router = RouterKind::OwnerServe;
        (cluster.dram, cluster.disk) = (None, None);
    });
    // Its owner is busy with a turn of the prompt when another one comes: waiting is sooner than computing all of it again
    // elsewhere, where nothing can come from.
    let prompt = blocks(0, 48);
    let longer = [&prompt[..], &blocks(100, 8)].concat();
    let other = [&prompt[..], &blocks(200, 1)].concat();
    let counted = run(
        &cluster,
        &[request(0.0, &prompt, 1), request(60_000.0, &longer, 1), request(60_001.0, &other, 1)],
    );
    assert_eq!(counted.hits.hbm, 48 + 48);
}
