//! A client of the local path promises what the embedded engine promises, whatever its memory is to the server, and
//! goes on where a restarted server goes on.

#![allow(clippy::disallowed_methods, reason = "real servers and their files stand outside the simulation")]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::served::{ClientStage, Served};
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, KvStore, MatchRequest, Order, Presence, ReadRequest,
};
use kvarts_contract::buffers::{Arena, BufMut, SharedBuf};
use kvarts_contract::error::Reason;
use kvarts_contract::model::ModelBlocks;
use kvarts_tests::conformance::{Desk, all, pages};
use kvarts_tests::fixture;
use rustix::fs::MemfdFlags;

/// Shared memory that the cases of the suite are run in.
const POOL_BYTES: usize = 64 << 20;

/// What does not hold over any path, or needs a server of its own: see `serve_conformance.rs`.
const NOT_SHARED: [&str; 5] = [
    "a lease counts against its tenant's cap until it ends",
    "events tell of each block, in order, and a snapshot with them is the content",
    "a point of another stream is a gap",
    "a put that a delete meets is refused, and stays away",
    "of two puts of one key at once one stores it whole",
];

fn run(stage: &ClientStage) {
    let mut count = 0;
    for (name, case) in all().into_iter().filter(|(name, _)| !NOT_SHARED.contains(name)) {
        eprintln!("guarantee: {name}");
        case(&Desk::new(stage, name));
        count += 1;
    }
    assert_eq!(count, all().len() - NOT_SHARED.len());
}

/// A file in memory, as an engine would have made it.
fn engine_memory(bytes: u64) -> std::os::fd::OwnedFd {
    let file = rustix::fs::memfd_create("engine", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

fn within(arena: Arena) -> impl Fn(usize) -> SharedBuf {
    move |bytes| arena.try_take(bytes).expect("room in the pool").share()
}

fn modes(stage: &ClientStage) -> Vec<&'static str> {
    let clients = stage.served.daemon().state().locals.clients();
    clients.iter().flat_map(|client| &client.modes).map(|mode| mode.name()).collect()
}

#[test]
fn a_client_whose_memory_is_not_shared_conforms_and_is_known_as_copied() {
    let stage = ClientStage::local("local-copied");
    assert_eq!(stage.client.path().name(), "local");
    run(&stage);
    assert_eq!(modes(&stage), ["copied"]);
    assert!(stage.served.metrics().contains("kvarts_clients{mode=\"copied\"} 1"));
}

#[test]
fn a_client_with_a_pool_of_the_servers_conforms_and_is_known_as_direct() {
    let stage = ClientStage::local("local-direct");
    let region = stage.client.pool(POOL_BYTES).unwrap();
    fixture::with_memory(within(Arena::new(Arc::clone(&region))), || run(&stage));
    assert!(modes(&stage).contains(&"direct"));
    let metrics = stage.served.metrics();
    assert!(metrics.contains("kvarts_clients{mode=\"direct\"} 1"), "{metrics}");
    assert!(metrics.contains("path=\"local\",method=\"get_layers\""), "{metrics}");
}

#[test]
fn a_client_whose_own_memory_is_adopted_conforms_and_is_known_as_adopted() {
    let stage = ClientStage::local("local-adopted");
    let region = stage.client.adopt(engine_memory(POOL_BYTES as u64), POOL_BYTES as u64).unwrap();
    fixture::with_memory(within(Arena::new(Arc::clone(&region))), || run(&stage));
    assert!(modes(&stage).contains(&"adopted"));
}

#[test]
fn reads_larger_than_all_windows_arrive_whole_in_both_orders() {
    let stage = ClientStage::local("local-windows");
    let desk = Desk::new(&stage, "windows");
    let keys = desk.keys(0..1200);
    // 28 MiB: four windows.
    let outcomes = desk.outcomes(desk.request(pages(), &keys, 1));
    let other = outcomes.iter().find(|outcome| **outcome != BlockOutcome::Stored);
    assert_eq!((outcomes.len(), other), (1200, None));
    for order in [Order::Layers, Order::Blocks] {
        let request = ReadRequest { order, ..desk.read_request(pages(), &keys) };
        let (events, end) = desk.read(&request);
        assert_eq!((end.usable_blocks, end.usable_layers, end.failures), (1200, 3, Vec::new()));
        assert_eq!(events.len(), if order == Order::Layers { 3 } else { 1200 });
        desk.expect_bytes(&request, &(0..1200).collect::<Vec<_>>(), 1);
    }
}

#[test]
fn the_best_path_is_the_local_one_on_a_socket_and_grpc_elsewhere() {
    let served = Served::start("local-best", "");
    let socket = format!("unix:{}", served.daemon().socket().unwrap().display());
    let name = |endpoint: String| Client::connect(&ConnectOptions::to(endpoint)).unwrap().path().name();
    assert_eq!((name(socket), name(served.endpoint())), ("local", "grpc"));
    let options = ConnectOptions { via: Via::Local, ..ConnectOptions::to(served.endpoint()) };
    assert!(Client::connect(&options).unwrap_err().to_string().contains("unix:PATH"));
}

#[test]
fn after_a_restart_of_the_server_a_client_goes_on_with_its_models_and_its_memory() {
    let mut stage = ClientStage::local("local-restart");
    let region = stage.client.pool(1 << 20).unwrap();
    let arena = Arena::new(Arc::clone(&region));
    let name = "restart";
    let (keys, namespace) = {
        let desk = Desk::new(&stage, name);
        let keys = desk.keys(0..8);
        assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 8]);
        (keys, desk.namespace)
    };
    let at = stage.served.daemon().grpc().unwrap();
    stage.served.restart_at(at);
    // The call that uses the broken connection notices it; the next call finds a new one.
    let need = kvarts_layout::prefix::Requirement {
        group: pages().0,
        coordinates: vec![pages().1],
        need: kvarts_layout::prefix::Need::All,
        absence: kvarts_layout::prefix::Absence::Required,
    };
    let requirements = kvarts_layout::Requirements::new(16, vec![need]).unwrap();
    let request = MatchRequest {
        namespace,
        keys: &keys,
        requirements: &requirements,
        recompute_tokens_max: u64::MAX,
        lease: None,
        plan: None,
    };
    let start = std::time::Instant::now();
    while stage.client.match_prefix(&request).is_err() {
        assert!(start.elapsed().as_secs() < 30, "the client does not find the server again");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    fixture::with_memory(within(arena), || {
        let desk = Desk { stage: &stage, namespace, chain: 0 };
        desk.expect(pages(), &keys, 1);
    });
    assert!(modes(&stage).contains(&"direct"));
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.is_file() {
            found.push(path);
        }
    }
}

/// Changes a bit of these bytes wherever they lie on disk.
fn damage(folder: &Path, bytes: &[u8]) {
    let (mut all, mut hits) = (Vec::new(), 0);
    files(folder, &mut all);
    for path in all {
        let content = std::fs::read(&path).unwrap();
        let Some(at) = content.windows(64).position(|window| window == &bytes[..64]) else { continue };
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[bytes[9] ^ 4], at as u64 + 9).unwrap();
        file.sync_all().unwrap();
        hits += 1;
    }
    assert_eq!(hits, 1, "the block's bytes lie in one place");
}

#[test]
fn damage_on_disk_is_a_miss_in_each_mode_and_the_block_goes_out_of_service() {
    let stage = ClientStage::local("local-damage");
    let direct = Arena::new(stage.client.pool(4 << 20).unwrap());
    let adopted = Arena::new(stage.client.adopt(engine_memory(4 << 20), 4 << 20).unwrap());
    let (group, coordinate) = pages();
    for (mode, arena) in [("copied", None), ("direct", Some(direct)), ("adopted", Some(adopted))] {
        let desk = Desk::new(&stage, mode);
        let keys = desk.keys(0..6);
        let stored = vec![BlockOutcome::Stored; 6];
        assert_eq!(desk.outcomes(desk.request(pages(), &keys, 2)), stored, "{mode}");
        let chunks = fixture::content(&keys[3], group, coordinate, 2, &fixture::shape(group, coordinate));
        damage(stage.served.scratch.path(), &chunks[2]);
        let check = || {
            let request = desk.read_request(pages(), &keys);
            let (_, end) = desk.read(&request);
            assert_eq!(end.usable_blocks, 3, "{mode}: {end:?}");
            let digest =
                |failure: &(u32, Reason)| failure.0 == 3 && matches!(failure.1, Reason::Digest { .. });
            assert!(end.failures.iter().any(digest), "{mode}: {end:?}");
            desk.expect_bytes(&request, &[0, 1, 2], 2);
        };
        match arena {
            Some(arena) => fixture::with_memory(within(arena), check),
            None => check(),
        }
        // The server has seen for itself that it is the disk.
        let request =
            ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
        stage.served.until("the block is out of service", |_| {
            stage.client.contains(&request).unwrap().presence[3] == Presence::Absent
        });
        let rest = [0, 1, 2, 4, 5].map(|at| keys[at]);
        desk.expect(pages(), &rest, 2);
    }
    let counts = stage.served.daemon().state().engine.stats().counts;
    assert_eq!(counts.blocks_quarantined, 3);
}

/// The shortest way into a store is the same over a client, which takes the store's place.
#[test]
fn blocks_of_a_model_are_put_matched_and_read_by_layers_over_both_paths() {
    let served = Served::start("model-blocks", "");
    let prompt: Vec<u32> = (0..4).collect();
    for (client, revision) in [(served.local(None), "r1"), (served.client(None), "r2")] {
        let blocks = ModelBlocks::new(client, "one", "deepseek-v3", revision, "bf16", 1).unwrap();
        assert_eq!(blocks.matched(&prompt).unwrap(), 0, "{revision}");
        let mut state = BufMut::zeroed(4 * blocks.block_bytes()).unwrap();
        state.fill(0x5a);
        assert_eq!(blocks.put(&prompt, state).unwrap().outcomes, vec![BlockOutcome::Stored; 4]);
        assert_eq!(blocks.matched(&prompt).unwrap(), 4, "{revision}");
        let mut layers = blocks.read_layers(&prompt, 4).unwrap();
        for (at, layer) in layers.by_ref().enumerate() {
            assert_eq!((layer.layer, layer.blocks), (at as u32, 4));
            assert!(layer.bytes.to_vec().iter().all(|byte| *byte == 0x5a), "{revision}: layer {at}");
        }
        assert_eq!(layers.end().unwrap().usable_layers, 61);
    }
}
