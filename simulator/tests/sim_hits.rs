//! What is counted as a hit, and that everything that is asked for is counted: blocks by where they came from in time, requests as
//! ended or refused.
use std::cell::Cell;
use std::rc::Rc;

use kvarts_simulator::cluster::work::{Arrival, SessionWork, Sessions, TraceWork, Work};
use kvarts_simulator::cluster::*;
use kvarts_simulator::trace::{Request, TOKENS_MAX, Trace, TraceError};

const FILE: &str = include_str!("cluster.toml");
/// 1e9 bytes of a block of 512 tokens.
const BLOCK_GB: f64 = 0.067_108_864;

const POLICIES: [Prefetch; 6] = [
    Prefetch::Overlap,
    Prefetch::WaitComplete,
    Prefetch::BestEffort,
    Prefetch::Timeout,
    Prefetch::Blocking,
    Prefetch::Layerwise,
];

fn cluster(change: impl FnOnce(&mut Cluster)) -> Cluster {
    let mut cluster = Cluster::parse(FILE).unwrap();
    change(&mut cluster);
    cluster
}

fn request(at_ms: f64, blocks: std::ops::Range<u64>) -> Request {
    Request {
        at_ms,
        input_tokens: (blocks.end - blocks.start) * 512,
        output_tokens: 1,
        blocks: blocks.collect(),
        ..Request::default()
    }
}

fn run(cluster: &Cluster, requests: &[Request]) -> Counted {
    let work = TraceWork::new(requests.iter().cloned().map(Ok), 1.0);
    Simulation::new(cluster, work, 1).unwrap().run(|_, _| ()).unwrap()
}

/// A workload, and what it has asked for: requests, and blocks of those that fit.
struct Asking<W>(W, Rc<Cell<[u64; 2]>>, Cluster);

impl<W> Asking<W> {
    fn note(&self, arrival: &Arrival) {
        let [requests, blocks] = self.1.get();
        let tokens = arrival.input_tokens.saturating_add(arrival.output_tokens);
        let fits = tokens.div_ceil(512) <= (self.2.hbm.gb / BLOCK_GB) as u64;
        let more = arrival.input_tokens.div_ceil(512).min(arrival.blocks.len() as u64);
        self.1.set([requests + 1, blocks + if fits { more } else { 0 }]);
    }
}

impl<W: Work> Work for Asking<W> {
    fn next(&mut self) -> Result<Option<Arrival>, TraceError> {
        let next = self.0.next()?;
        next.iter().for_each(|arrival| self.note(arrival));
        Ok(next)
    }

    fn ended(&mut self, session: u32, now_ms: f64) -> Option<Arrival> {
        let next = self.0.ended(session, now_ms);
        next.iter().for_each(|arrival| self.note(arrival));
        next
    }
}

/// Everything that was asked for is in one place or the other.
fn expect_all_counted(cluster: &Cluster, work: impl Work, seed: u64) -> Counted {
    let asked = Rc::new(Cell::new([0; 2]));
    let work = Asking(work, Rc::clone(&asked), cluster.clone());
    let counted = Simulation::new(cluster, work, seed).unwrap().run(|_, _| ()).unwrap();
    let (Hits { hbm, dram, disk, peer, cold, miss }, [requests, blocks]) = (counted.hits, asked.get());
    let what = format!("{:?}, seed {seed}: {:?}", cluster.engine.prefetch, counted.hits);
    assert_eq!(counted.requests + counted.refused, requests, "{what}");
    assert_eq!(hbm + dram + disk + peer + cold + miss, blocks, "{what}");
    assert_eq!(counted.ttft.count(), counted.requests, "{what}");
    counted
}

#[test]
fn on_an_idle_node_only_what_came_before_a_request_began_is_a_hit() {
    let hits = |prefetch, timeout_ms| {
        let cluster = cluster(|cluster| {
            cluster.nodes.mixed = 1;
            (cluster.hbm.gb, cluster.dram) = (6.0, None);
            (cluster.engine.prefetch, cluster.engine.timeout_ms) = (prefetch, timeout_ms);
            cluster.engine.plans = false;
        });
        // Others fill device memory in between: 63 blocks of the last one are on disk alone.
        let mut requests = vec![request(0.0, 0..64)];
        requests.extend((1..4).map(|n| request(n as f64 * 60_000.0, 1000 * n..1000 * n + 64)));
        requests.push(request(600_000.0, 0..64));
        let counted = run(&cluster, &requests);
        let computed = (counted.hits.miss - 5) * 512 + 5 * 512;
        assert_eq!(counted.computed_tokens, computed);
        counted.hits
    };
    let of_disk = |disk| Hits { disk, miss: 4 * 64 + 64 - disk, ..Hits::default() };
    assert_eq!(hits(Prefetch::WaitComplete, 0.0), of_disk(63));
    assert_eq!(hits(Prefetch::BestEffort, 0.0), of_disk(0));
    // The first byte takes 0.1 ms, each block 5.59 ms more.
    assert_eq!(hits(Prefetch::Timeout, 100.0), of_disk(17));
    assert_eq!(hits(Prefetch::Timeout, 5.0), of_disk(0));
    assert_eq!(hits(Prefetch::Timeout, 1000.0), of_disk(63));
}

#[test]
fn blocks_that_are_late_are_taken_from_their_own_tier_and_the_last_ones_first() {
    let hits = |prefetch, timeout_ms| {
        let cluster = cluster(|cluster| {
            cluster.nodes.mixed = 1;
            (cluster.hbm.gb, cluster.dram.as_mut().unwrap().gb) = (89.5 * BLOCK_GB, 100.5 * BLOCK_GB);
            (cluster.engine.prefetch, cluster.engine.timeout_ms) = (prefetch, timeout_ms);
            cluster.engine.plans = false;
        });
        // Device memory keeps the first 25 blocks of the first prompt, host memory those from the 29th on, and the disk all.
        let requests = [request(0.0, 0..64), request(60_000.0, 1000..1064), request(120_000.0, 0..64)];
        run(&cluster, &requests).hits
    };
    let all = |hbm, disk, dram| Hits { hbm, disk, dram, miss: 192 - hbm - disk - dram, ..Hits::default() };
    assert_eq!(hits(Prefetch::WaitComplete, 0.0), all(25, 3, 35));
    assert_eq!(hits(Prefetch::BestEffort, 0.0), all(25, 0, 0));
    // One block from the disk by then. Seven have come from memory, behind two that have not.
    assert_eq!(hits(Prefetch::Timeout, 10.0), all(25, 1, 0));
    // All three, and 22 from memory at 1.34 ms each.
    assert_eq!(hits(Prefetch::Timeout, 30.0), all(25, 3, 22));
    assert_eq!(hits(Prefetch::Timeout, 60.0), all(25, 3, 35));
}

#[test]
fn hits_and_misses_are_all_that_was_asked_for_under_every_policy() {
    for seed in 1..4 {
        for prefetch in POLICIES {
            for (mixed, prefill, decode) in [(2, 0, 0), (0, 2, 1)] {
                let cluster = cluster(|cluster| {
                    (cluster.engine.prefetch, cluster.engine.timeout_ms) = (prefetch, 20.0);
                    (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) =
                        (mixed, prefill, decode);
                    (cluster.hbm.gb, cluster.dram.as_mut().unwrap().gb) = (12.0, 8.0);
                    cluster.disk.as_mut().unwrap().gb = 60.0;
                    cluster.cold = Some(Cold { gb: 1e5, gb_per_s: 5.0, latency_ms: 5.0 });
                    cluster.engine.plans = seed % 2 == 0;
                    cluster.router = RouterKind::RoundRobin;
                });
                let of = Sessions {
                    count: 16,
                    turns: 15.0,
                    per_second: 3.0,
                    think_ms: 300.0,
                    seed,
                    ..Sessions::named("coding").unwrap()
                };
                let counted = expect_all_counted(&cluster, SessionWork::new(of, 512), seed);
                let Hits { hbm, dram, disk, peer, cold, miss } = counted.hits;
                let tiers = [hbm, dram + disk + peer + cold, miss];
                assert!(tiers.iter().all(|blocks| *blocks > 0), "{prefetch:?}: {:?}", counted.hits);
            }
        }
    }
}

#[test]
fn every_request_that_arrives_ends_or_is_refused() {
    let mut state = 7u64;
    let mut draw = move |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    for (round, prefetch) in POLICIES.into_iter().cycle().take(12).enumerate() {
        let cluster = cluster(|cluster| {
            cluster.engine.prefetch = prefetch;
            cluster.hbm.gb = 2.0;
            if round % 2 == 1 {
                (cluster.nodes.mixed, cluster.nodes.prefill, cluster.nodes.decode) = (0, 1, 1);
            }
        });
        let sizes = [0, 1, 512, 5000, 14_000, 15_000, 1 << 20, TOKENS_MAX, u64::MAX / 2, u64::MAX];
        let requests: Vec<_> = (0..120)
            .map(|n| {
                let of = |at: u64| sizes[at as usize];
                let (input_tokens, output_tokens) = (of(draw(10)), of(draw(10)));
                let named = input_tokens < 20_000 && draw(2) == 0;
                let first = draw(5) * 100;
                let blocks = if named { (first..first + input_tokens / 512).collect() } else { Vec::new() };
                Ok(Request {
                    at_ms: n as f64 * 20.0,
                    input_tokens,
                    output_tokens,
                    blocks,
                    ..Request::default()
                })
            })
            .collect();
        let counted = expect_all_counted(&cluster, TraceWork::new(requests.into_iter(), 1.0), 1);
        assert!(counted.requests > 10 && counted.refused > 10, "{} {}", counted.requests, counted.refused);
    }
}

#[test]
fn a_prompt_that_is_too_long_for_any_memory_is_refused_and_not_lost() {
    // Blocks of one token: as many as a plan may have, and one more than fits.
    let cluster = cluster(|cluster| cluster.block_tokens = 1);
    let lines = format!(
        "{{\"timestamp\": 0, \"input_length\": {}, \"output_length\": 1, \"hash_ids\": []}}\n\
         {{\"timestamp\": 1, \"input_length\": 5, \"output_length\": 2, \"hash_ids\": [1, 2, 3, 4, 5]}}\n",
        TOKENS_MAX - 1
    );
    let work = TraceWork::new(Trace::new(lines.as_bytes()), 1.0);
    let counted = Simulation::new(&cluster, work, 1).unwrap().run(|_, _| ()).unwrap();
    assert_eq!((counted.requests, counted.refused), (1, 1));
}
