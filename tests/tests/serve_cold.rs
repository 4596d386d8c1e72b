//! A server with a cold tier: what it spills comes back, here and on another node, and what was deleted does not.
#![allow(
    clippy::disallowed_methods,
    reason = "looks at files of a real bucket in a directory, and damages them"
)]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::served::{Beside, ClientStage, Served};
use kvarts_client::Client;
use kvarts_contract::api::{
    ContainsRequest, DeleteOutcome, DeleteRequest, KvStore, LeaseTerms, MatchRequest, Order, PlanTerms,
    Presence, ReadEvent, ReadRequest, Target,
};
use kvarts_contract::error::Kind;
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::{BlockKey, Layout, Requirements};
use kvarts_planner::cost::{Sample, Times};
use kvarts_planner::plan::Source;
use kvarts_server::cold::{ColdTier, Offer};
use kvarts_server::config::{Config, Settings};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture::{self, BLOCK_TOKENS};
use kvarts_tests::stage::{Scratch, ask};

/// Blocks of a run, and runs: enough for full segments in each shard.
const RUN: u64 = 8;
const RUNS: u64 = 96;

fn configured(bucket: &Scratch, more: &str) -> String {
    // No server makes it.
    std::fs::create_dir_all(bucket.path()).unwrap();
    format!(
        "[cold]\nbucket = 'file://{}'\nuses = 0\nage = 0\nrefresh = 1\nmemory = '128 MiB'\n{more}",
        bucket.path().display()
    )
}

fn node(name: &str, bucket: &Scratch) -> ClientStage {
    node_with(name, bucket, "")
}

/// The same; `more` is what else is set of the tier.
fn node_with(name: &str, bucket: &Scratch, more: &str) -> ClientStage {
    let served = Served::start(name, &configured(bucket, more));
    ClientStage { client: served.client(None), served }
}

fn cold(served: &Served) -> Arc<ColdTier> {
    Arc::clone(served.daemon().state().decided.cold.as_ref().unwrap())
}

fn count(served: &Served, name: &str) -> u64 {
    let counted = cold(served).counted();
    counted.counts.iter().find(|(known, ..)| *known == name).unwrap().2
}

/// Stores runs of blocks and has them spilled; gives those of which the bucket has all.
fn spilled(stage: &ClientStage, name: &str) -> Vec<Vec<BlockKey>> {
    let desk = Desk::new(stage, name);
    let runs: Vec<Vec<BlockKey>> = (0..RUNS).map(|run| desk.keys(run * RUN..(run + 1) * RUN)).collect();
    runs.iter().for_each(|keys| desk.store(pages(), keys, 1, Layout::FullBlock));
    let cold = cold(&stage.served);
    stage.served.runtime.block_on(cold.sweep()).unwrap();
    assert!(count(&stage.served, "spilled_blocks") >= 2 * RUN, "{:?}", cold.counted());
    let known = cold.known(desk.namespace).unwrap();
    let whole: Vec<_> = runs.into_iter().filter(|run| run.iter().all(|key| known.may_have(key))).collect();
    assert!(whole.len() >= 4, "{} runs are in the bucket", whole.len());
    whole
}

/// Waits until a node knows what the bucket has of a namespace.
fn know(served: &Served, desk: &Desk<'_>) {
    served.until("the manifest is known", |daemon| {
        let cold = daemon.state().decided.cold.as_ref().unwrap();
        cold.known(desk.namespace).is_some_and(|known| !known.manifest.packs.is_empty())
    });
}

/// Waits until what was brought is stored: a read ends before.
fn settle(served: &Served) {
    served.until("what was brought is stored", |daemon| {
        daemon.state().decided.cold.as_ref().unwrap().counted().under_way == 0
    });
}

fn here(client: &Client, desk: &Desk<'_>, keys: &[BlockKey]) -> usize {
    let (group, coordinate) = pages();
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease: None };
    client.contains(&request).unwrap().presence.iter().filter(|one| **one == Presence::Here).count()
}

/// Everything is sooner loaded.
fn two_seconds_a_token() -> Times {
    let samples = [1, 1000].map(|new| Sample { cached: 0, new, ms: new as f64 * 2e3 });
    Times::new(samples.to_vec(), None).unwrap()
}

#[test]
fn what_one_node_spills_another_reads_over_grpc_and_over_the_local_path() {
    let bucket = Scratch::new("cold-bucket");
    let first = node("cold-first", &bucket);
    let runs = spilled(&first, "shared");
    drop(first);
    let second = node("cold-second", &bucket);
    let desk = Desk::new(&second, "shared");
    know(&second.served, &desk);
    // A match says what is in the bucket, and asks it for nothing.
    let (group, coordinate) = pages();
    let (need, absence) = (Need::All, Absence::Required);
    let requirements = Requirements::new(
        BLOCK_TOKENS,
        vec![Requirement { group, coordinates: vec![coordinate], need, absence }],
    )
    .unwrap();
    let request = MatchRequest {
        namespace: desk.namespace,
        keys: &runs[0],
        requirements: &requirements,
        recompute_tokens_max: u64::MAX,
        lease: None,
        plan: None,
    };
    let before = cold(&second.served).counted().total.requests;
    for _ in 0..200 {
        let found = second.client.match_beyond(&request).unwrap();
        let cold = found.in_cold.expect("the bucket has it");
        assert_eq!((found.own.usable.longest.blocks, cold.longest.unwrap().blocks), (0, RUN as u32));
        let bytes = RUN * fixture::shape(group, coordinate).block_bytes();
        assert_eq!((cold.blocks, cold.bytes, cold.restore_ms), (RUN, bytes, None));
    }
    // A plan counts what the bucket would bring, at what the way there is taken for.
    let times = two_seconds_a_token();
    let prompt_tokens = RUN * u64::from(BLOCK_TOKENS) + 1;
    let terms = PlanTerms::new(prompt_tokens, &times);
    for client in [&second.client, &second.served.local(None)] {
        let request = MatchRequest { plan: Some(terms), ..request.clone() };
        let plan = client.match_prefix(&request).unwrap().plan.unwrap().plan;
        let bytes = RUN * fixture::shape(group, coordinate).block_bytes();
        assert_eq!((plan.boundary_blocks, plan.bytes_from(Source::Cold)), (RUN as u32, bytes), "{plan:?}");
        assert!(plan.load_ms + plan.stall_ms >= bytes as f64 / 125e3, "{plan:?}");
    }
    let asked = cold(&second.served).counted().total.requests - before;
    assert!(asked < 20, "{asked} requests for 200 matches: only manifests are read, by time");
    assert_eq!(here(&second.client, &desk, &runs[0]), 0);
    desk.expect(pages(), &runs[0], 1);
    settle(&second.served);
    assert_eq!(here(&second.client, &desk, &runs[0]), RUN as usize, "they were promoted");
    let local = Beside(second.served.local(None));
    let beside = Desk::new(&local, "shared");
    beside.expect(pages(), &runs[1], 1);
    // Readers at once have one restore.
    settle(&second.served);
    let before = count(&second.served, "restored_blocks");
    let clients: Vec<Client> = (0..4).map(|_| second.served.client(None)).collect();
    let wanted = &runs[2];
    std::thread::scope(|scope| {
        for client in clients {
            scope.spawn(move || {
                let beside = Beside(client);
                Desk::new(&beside, "shared").expect(pages(), wanted, 1);
            });
        }
    });
    settle(&second.served);
    assert_eq!(count(&second.served, "restored_blocks") - before, RUN);
    let found = second.client.match_beyond(&MatchRequest { keys: &runs[3], ..request }).unwrap();
    assert!(found.in_cold.unwrap().restore_ms.is_some(), "it was measured");
    let metrics = second.served.metrics();
    let line = format!("kvarts_cold_restored_blocks_total {}", 3 * RUN);
    assert!(metrics.lines().any(|one| one == line), "{metrics}");
    let stats = second.client.stats().unwrap().cold.unwrap();
    assert_eq!(stats.counts["restored_blocks"], 3 * RUN);
}

#[test]
fn what_is_offered_is_counted_by_look_ups_that_make_no_plan_and_a_lease_is_not() {
    let bucket = Scratch::new("cold-offered");
    let first = node("cold-offer-first", &bucket);
    let runs = spilled(&first, "offered");
    drop(first);
    let (group, coordinate) = pages();
    let (need, absence) = (Need::All, Absence::Required);
    let wanted = vec![Requirement { group, coordinates: vec![coordinate], need, absence }];
    let requirements = Requirements::new(BLOCK_TOKENS, wanted).unwrap();
    let terms = LeaseTerms { hold: Duration::from_secs(60), tenant: 0, cap_bytes: u64::MAX };
    // How many of a run's blocks a match, a look-up and a look-up with a lease find, and how many the lease holds.
    let found = |client: &Client, desk: &Desk<'_>, keys: &[BlockKey]| {
        let namespace = desk.namespace;
        let request = MatchRequest {
            namespace,
            keys,
            requirements: &requirements,
            recompute_tokens_max: u64::MAX,
            lease: None,
            plan: None,
        };
        let matched = client.match_prefix(&request).unwrap().usable.longest.blocks as usize;
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: Some(terms) };
        let presence = client.contains(&request).unwrap().presence;
        let held = presence.iter().filter(|one| **one == Presence::Here).count();
        [matched, here(client, desk, keys), held]
    };
    let run = RUN as usize;
    for (offer, before, after) in [
        ("", [0; 3], [0; 3]),
        ("offer = 'on'\n", [run, run, 0], [run, run, 0]),
        ("offer = 1\n", [run, run, 0], [run, run, 0]),
        // Nothing was brought: it is not known that it is slower. Then it is.
        ("offer = 4000000000\n", [run, run, 0], [0; 3]),
    ] {
        let second = node_with("cold-offer-second", &bucket, offer);
        let local = Beside(second.served.local(None));
        let desk = Desk::new(&second, "offered");
        know(&second.served, &desk);
        for client in [&second.client, &local.0] {
            assert_eq!(found(client, &desk, &runs[0]), before, "{offer}");
            assert_eq!(found(client, &desk, &desk.keys(5000..5008)), [0; 3], "{offer}: of nothing");
        }
        let offered = count(&second.served, "offered_blocks");
        assert_eq!(offered, if before[0] > 0 { 4 * RUN } else { 0 }, "{offer}");
        desk.expect(pages(), &runs[1], 1);
        settle(&second.served);
        assert_eq!(found(&second.client, &desk, &runs[1]), [run; 3], "{offer}: what was brought is here");
        assert_eq!(found(&second.client, &desk, &runs[0]), after, "{offer}");
    }
    // A bucket that is gone: what could not be brought is not offered again.
    let second = node_with("cold-offer-gone", &bucket, "offer = 'on'\n");
    let desk = Desk::new(&second, "offered");
    know(&second.served, &desk);
    std::fs::remove_dir_all(bucket.path()).unwrap();
    assert_eq!(found(&second.client, &desk, &runs[0]), [run, run, 0]);
    let (_, end) = desk.read(&desk.read_request(pages(), &runs[0]));
    assert_eq!(end.usable_blocks, 0);
    settle(&second.served);
    assert_eq!(found(&second.client, &desk, &runs[0]), [0; 3]);
}

#[test]
fn what_was_deleted_does_not_come_back_from_the_bucket() {
    let bucket = Scratch::new("cold-deleted");
    let mut stage = node("cold-delete", &bucket);
    let runs = spilled(&stage, "deleted");
    let namespace = Desk::new(&stage, "deleted").namespace;
    let delete = |stage: &ClientStage, target| {
        let request = DeleteRequest { namespace, target, deadline: None };
        ask(stage, stage.client.delete(request))
    };
    let reply = delete(&stage, Target::Keys { column: None, keys: runs[0].clone() }).unwrap();
    assert_eq!(reply.outcomes, vec![DeleteOutcome::Deleted; RUN as usize]);
    assert!(count(&stage.served, "withdrawn_packs") > 0);
    let missing = |stage: &ClientStage| {
        let desk = Desk::new(stage, "deleted");
        let request = desk.read_request(pages(), &runs[0]);
        let (_, end) = desk.read(&request);
        assert_eq!((end.usable_blocks, end.failures.len()), (0, RUN as usize), "it came back");
    };
    missing(&stage);
    let at = stage.served.daemon().grpc().unwrap();
    stage.served.restart_at(at);
    missing(&stage);
    delete(&stage, Target::Namespace).unwrap();
    let desk = Desk::new(&stage, "deleted");
    let (_, end) = desk.read(&desk.read_request(pages(), &runs[1]));
    assert_eq!(end.usable_blocks, 0, "the namespace was deleted");
}

fn packs(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        match entry.path() {
            path if path.is_dir() => packs(&path, found),
            path if path.components().any(|part| part.as_os_str() == "packs") => found.push(path),
            _ => {}
        }
    }
}

#[test]
fn a_damaged_and_then_a_deleted_bucket_cost_hits_and_no_byte() {
    let bucket = Scratch::new("cold-damaged");
    let first = node("cold-damage-first", &bucket);
    let runs = spilled(&first, "damaged");
    let second = node("cold-damage-second", &bucket);
    let desk = Desk::new(&second, "damaged");
    know(&second.served, &desk);
    let mut all = Vec::new();
    packs(bucket.path(), &mut all);
    assert!(!all.is_empty());
    for path in &all {
        // One bit in each KiB: no block stays as it was.
        let mut bytes = std::fs::read(path).unwrap();
        bytes.iter_mut().step_by(1024).for_each(|byte| *byte ^= 1);
        std::fs::write(path, bytes).unwrap();
    }
    let (_, end) = desk.read(&desk.read_request(pages(), &runs[0]));
    assert_eq!((end.usable_blocks, end.failures.len()), (0, RUN as usize), "misses");
    settle(&second.served);
    assert_eq!(count(&second.served, "lost_blocks"), RUN);
    // The node that has it reads on, and so it does without any bucket.
    let own = Desk::new(&first, "damaged");
    own.expect(pages(), &runs[0], 1);
    std::fs::remove_dir_all(bucket.path()).unwrap();
    own.expect(pages(), &runs[1], 1);
    let (_, end) = desk.read(&desk.read_request(pages(), &runs[1]));
    assert_eq!(end.usable_blocks, 0);
    let put = second.client.stats().unwrap();
    assert!(put.latched.is_none());
    desk.store(pages(), &desk.keys(9000..9008), 1, Layout::FullBlock);
    desk.expect(pages(), &desk.keys(9000..9008), 1);
}

/// Changes a bit of a block wherever it lies on disk.
fn flip(directory: &Path, key: &BlockKey) {
    let (group, coordinate) = pages();
    let chunks = fixture::content(key, group, coordinate, 1, &fixture::shape(group, coordinate));
    let (mut left, mut hits) = (vec![directory.to_owned()], 0);
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let Ok(bytes) = std::fs::read(&path) else { continue };
        let Some(at) = bytes.windows(64).position(|window| window == &chunks[0][..64]) else { continue };
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[bytes[at] ^ 4], at as u64).unwrap();
        file.sync_all().unwrap();
        hits += 1;
    }
    assert_eq!(hits, 1, "the block's bytes lie in one place");
}

#[test]
fn what_is_damaged_here_comes_from_the_bucket_in_the_same_read() {
    let bucket = Scratch::new("cold-own-damage");
    let stage = node("cold-own", &bucket);
    let runs = spilled(&stage, "own-damage");
    let desk = Desk::new(&stage, "own-damage");
    know(&stage.served, &desk);
    let damage = || {
        let counts = stage.served.daemon().state().engine.stats().counts;
        (counts.chunks_damaged, counts.blocks_quarantined, count(&stage.served, "restored_blocks"))
    };
    let all: Vec<u32> = (0..RUN as u32).collect();
    let turns: [(Order, &[usize]); 4] =
        [(Order::Layers, &[3]), (Order::Blocks, &[5]), (Order::Layers, &[0, 7]), (Order::Blocks, &[0, 1, 6])];
    let mut blocks = 0;
    for ((order, damaged), keys) in turns.iter().zip(&runs) {
        damaged.iter().for_each(|at| flip(stage.served.scratch.path(), &keys[*at]));
        blocks += damaged.len() as u64;
        let request = ReadRequest { order: *order, ..desk.read_request(pages(), keys) };
        let (events, end) = desk.read(&request);
        assert_eq!((end.usable_blocks, end.failures), (RUN as u32, Vec::new()), "{order:?} {damaged:?}");
        desk.expect_bytes(&request, &all, 1);
        if *order == Order::Blocks {
            let told = events.iter().filter_map(|event| match event {
                ReadEvent::Block(block) => Some(*block),
                _ => None,
            });
            assert_eq!(told.collect::<Vec<_>>(), all);
        }
        settle(&stage.served);
        assert_eq!(here(&stage.client, &desk, keys), RUN as usize, "accepted again");
        assert_eq!(damage(), (blocks, blocks, blocks), "told as ever, and brought once");
    }
    // What the bucket has not got either is a failure with its reason, and a miss from then on.
    let keys = desk.keys(9000..9008);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    for order in [Order::Layers, Order::Blocks] {
        let at = if order == Order::Layers { 6 } else { 2 };
        flip(stage.served.scratch.path(), &keys[at]);
        let request = ReadRequest { order, ..desk.read_request(pages(), &keys[..7]) };
        let (_, end) = desk.read(&request);
        let failed: Vec<_> =
            end.failures.iter().map(|(block, reason)| (*block as usize, reason.kind())).collect();
        assert_eq!(
            (end.usable_blocks as usize, failed.first()),
            (at, Some(&(at, Kind::Corrupt))),
            "{order:?}"
        );
        let good: Vec<u32> = (0..at as u32).collect();
        desk.expect_bytes(&request, &good, 1);
    }
}

#[test]
fn a_wrong_address_is_refused_at_the_start() {
    let resolve =
        |file: &str| Config::resolve(Some((Path::new("k.toml"), file)), |_| None, &Settings::default());
    let refused = |file: &str| resolve(file).unwrap_err().to_string();
    assert!(
        refused("[cold]\nbucket = 'http://somewhere'\n")
            .contains("cold.bucket: \"http://somewhere\" is not valid: use s3://")
    );
    assert!(
        refused("[cold]\nrate = '1 MiB'\n")
            .contains("cold.rate: the setting needs a cold tier: set cold.bucket")
    );
    assert!(
        refused("[cold]\nbucket = 'file:///b'\nuses = 4\n").contains("cold.uses: the value must be 0 to 3")
    );
    assert!(
        refused("[cold]\nbucket = 'file:///b'\nspill = 'maybe'\n")
            .contains("cold.spill: the value must be on or off")
    );
    assert!(
        refused("[cold]\nbucket = 'file:///b'\noffer = 'yes'\n")
            .contains("cold.offer: the value must be off, on, or")
    );
    assert!(
        refused("[cold]\nbucket = 'file:///b'\noffer = 0\n")
            .contains("cold.offer: the value must be off, on, or")
    );
    let offer =
        |text: &str| resolve(&format!("[cold]\nbucket = 'file:///b'\n{text}")).unwrap().cold.unwrap().offer;
    assert_eq!(
        [offer(""), offer("offer = 'on'"), offer("offer = 8000")],
        [Offer::Never, Offer::InTime, Offer::SoonerThan(8000)]
    );
    assert!(resolve("").unwrap().cold.is_none(), "off by default");
    let cold = resolve("[cold]\nbucket = 's3://blocks/kvarts'\nage = 0\n").unwrap().cold.unwrap();
    assert_eq!(
        (cold.bucket.as_str(), cold.requests, cold.spill, cold.uses),
        ("s3://blocks/kvarts", 1_000_000, true, 1)
    );
}
