//! Pools that the processes of an engine share: what a scheduler stages its workers find in their own mapping of the same memory; other
//! tenants find nothing; and who dies leaves to the others what they have.
#![allow(clippy::disallowed_methods, reason = "real servers and their files stand outside the simulation")]

use std::sync::Arc;
use std::time::Duration;

use crate::served::{Beside, Served};
use kvarts_client::pool::{Column, Pool, Progress, Stage, StageRequest};
use kvarts_client::{Client, PoolName};
use kvarts_contract::api::{BlockOutcome, DeleteRequest, KvStore, Target};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_layout::{BlockKey, Layout};
use kvarts_server::state::auth::TokenHash;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::stage::Stage as _;

const BYTES: usize = 8 << 20;
const WAIT: Duration = Duration::from_secs(60);

#[test]
fn a_pipeline_over_a_client_is_told_of_pools() {
    let served = Served::start("pool-no-tiles", "");
    for client in [served.client(None), served.local(None)] {
        let stage = Beside(client);
        let desk = Desk::new(&stage, "no tiles");
        let request = desk.read_request(pages(), &desk.keys(0..1));
        let (group, coordinate) = pages();
        let tiled = request.tiled(&fixture::shape(group, coordinate)).0;
        let told = stage.store().tiles(tiled).err().unwrap().to_string();
        assert!(told.contains("stage the blocks in a pool"), "{told}");
    }
}

/// A scheduler: its client, and the pool that it has taken.
struct Scheduler {
    client: Client,
    pool: Pool,
    name: PoolName,
}

fn scheduler(client: Client) -> Scheduler {
    let (region, name) = client.shared_pool(BYTES).unwrap();
    let pool = Pool::new(client.store(), client.clock(), &region);
    Scheduler { client, pool, name }
}

impl Scheduler {
    fn stage(&self, name: &str, keys: &[BlockKey]) -> Stage {
        let (group, coordinate) = pages();
        let namespace = self.client.register(&fixture::identity(name), &fixture::geometry()).unwrap();
        let column = Column { namespace, group, coordinate };
        let request = StageRequest {
            columns: vec![(column, Arc::new(fixture::shape(group, coordinate)))],
            keys: keys.to_vec(),
            first_block: 0,
            silence: Duration::from_secs(20),
            class: Class::Foreground,
        };
        self.pool.stage(request).unwrap()
    }

    /// Stages blocks and looks at their bytes as a worker sees them.
    fn expect(&self, name: &str, keys: &[BlockKey], producer: u64, worker: &Arc<Region>) -> Stage {
        let stage = self.stage(name, keys);
        let all = Progress { staged: keys.len() as u32, is_over: true };
        assert_eq!((stage.wait(WAIT), stage.why()), (all, None));
        let (group, coordinate) = pages();
        let shape = fixture::shape(group, coordinate);
        let sizes = shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes as usize);
        for (part, size) in (0u32..).zip(sizes) {
            let mut found = Vec::new();
            for stretch in stage.stretches(0) {
                let (at, bytes) = stretch.part(&shape, part).unwrap();
                let all = SharedBuf::new(worker, at as usize, bytes as usize).unwrap().to_vec();
                found.extend(all.chunks(size).map(<[u8]>::to_vec));
            }
            for (key, chunk) in keys.iter().zip(&found) {
                let right = fixture::content(key, group, coordinate, producer, &shape);
                assert!(*chunk == right[part as usize], "part {part}");
            }
            assert_eq!(found.len(), keys.len());
        }
        stage
    }
}

#[test]
fn a_worker_sees_what_its_scheduler_staged_and_the_memory_counts_once_until_the_last_of_them_goes() {
    let served = Served::start("pool-shared", "");
    let stage = Beside(served.local(None));
    let desk = Desk::new(&stage, "pool");
    let keys = desk.keys(0..40);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    let mapped = || served.daemon().state().locals.mapped();
    let before = mapped();
    let scheduler = scheduler(served.local(None));
    let workers: Vec<(Client, Arc<Region>)> = (0..3)
        .map(|_| {
            let client = served.local(None);
            let memory = client.attach(scheduler.name).unwrap();
            (client, memory)
        })
        .collect();
    assert_eq!(mapped() - before, BYTES as u64, "once");
    let held = scheduler.expect("pool", &keys, 1, &workers[0].1);
    // The next request finds it there: no read, and the same bytes for every worker.
    let again = scheduler.expect("pool", &keys[..30], 1, &workers[2].1);
    let counts = scheduler.pool.counts();
    assert_eq!((counts.read, counts.hits), (40, 30));
    // What one worker writes the others see: it is one memory.
    let place = |memory: &Arc<Region>| SharedBuf::new(memory, BYTES - 4, 4).unwrap();
    place(&workers[1].1).copy_in(0, b"mine");
    assert_eq!(place(&workers[0].1).to_vec(), b"mine");
    drop((held, again));
    // The scheduler dies; its workers keep the memory, and what is attached to it can be attached to.
    let name = scheduler.name;
    drop(scheduler);
    let late = served.local(None);
    assert_eq!(place(&late.attach(name).unwrap()).to_vec(), b"mine");
    drop((workers, late));
    served.until("the memory is gone", |daemon| daemon.state().locals.mapped() == before);
    let refused = served.local(None).attach(name).unwrap_err().to_string();
    assert!(refused.contains("no session has a pool of this name"), "{refused}");
}

#[test]
fn what_was_deleted_is_not_served_from_a_pool_and_what_was_put_again_is_read_again() {
    let served = Served::start("pool-deletes", "");
    let stage = Beside(served.local(None));
    let desk = Desk::new(&stage, "pool deletes");
    let keys = desk.keys(0..12);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    let scheduler = scheduler(served.local(None));
    let worker = served.local(None);
    let memory = worker.attach(scheduler.name).unwrap();
    drop(scheduler.expect("pool deletes", &keys, 1, &memory));
    let delete = |target| {
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        kvarts_contract::blocking::block_on(scheduler.client.delete(request)).unwrap().unwrap();
    };
    delete(Target::Keys { column: None, keys: vec![keys[7]] });
    assert_eq!(scheduler.stage("pool deletes", &keys).wait(WAIT).staged, 7);
    assert_eq!(scheduler.pool.counts().withdrawn, 12, "which of them it was is not told");
    // Another producer's bytes under the same keys.
    delete(Target::Namespace);
    assert_eq!(scheduler.stage("pool deletes", &keys).wait(WAIT).staged, 0);
    let outcomes = desk.outcomes(desk.request(pages(), &keys, 2));
    assert_eq!(outcomes, vec![BlockOutcome::Stored; 12]);
    drop(scheduler.expect("pool deletes", &keys, 2, &memory));
    drop(scheduler.expect("pool deletes", &keys, 2, &memory));
    assert!(scheduler.pool.counts().hits >= 24);
}

#[test]
fn after_a_restart_of_the_server_the_pool_is_the_same_memory_and_nothing_of_before_is_believed() {
    let mut served = Served::start("pool-restart", "");
    let (keys, scheduler, memory, worker) = {
        let stage = Beside(served.local(None));
        let desk = Desk::new(&stage, "pool restart");
        let keys = desk.keys(0..12);
        desk.store(pages(), &keys, 1, Layout::FullBlock);
        let scheduler = scheduler(served.local(None));
        let worker = served.local(None);
        let memory = worker.attach(scheduler.name).unwrap();
        drop(scheduler.expect("pool restart", &keys, 1, &memory));
        (keys, scheduler, memory, worker)
    };
    let at = served.daemon().grpc().unwrap();
    served.restart_at(at);
    // The call that finds the connection broken fails, and the next one makes another.
    let start = std::time::Instant::now();
    while scheduler.stage("pool restart", &keys).wait(WAIT).staged < 12 {
        assert!(start.elapsed() < WAIT);
    }
    drop(scheduler.expect("pool restart", &keys, 1, &memory));
    assert_eq!(
        scheduler.pool.counts().hits,
        12 + scheduler.pool.counts().withdrawn,
        "what was here was read again"
    );
    // The worker's connection shares the same memory again with its next call; so does one that comes now.
    drop(worker.stats());
    let late = served.local(None);
    let late_memory = late.attach(scheduler.name).unwrap();
    drop(scheduler.expect("pool restart", &keys, 1, &late_memory));
}

#[test]
fn a_name_is_of_no_use_to_another_tenant_nor_over_grpc_nor_for_another_memory() {
    let tenant = |name: &str| {
        let hash = TokenHash::of(&format!("kvarts_{name}"));
        format!(
            "[[tenants]]\nname = '{name}'\n[[tokens]]\ntenant = '{name}'\nrights = ['read', 'write']\nhash = '{hash}'\n"
        )
    };
    let file = ["red", "blue"].map(tenant).concat();
    let served = Served::start("pool-tenants", &file);
    let red = served.local(Some("kvarts_red"));
    let (memory, name) = red.shared_pool(BYTES).unwrap();
    SharedBuf::new(&memory, 0, 6).unwrap().copy_in(0, b"secret");
    assert_eq!(served.local(Some("kvarts_red")).attach(name).unwrap().len(), BYTES);
    let refused = served.local(Some("kvarts_blue")).attach(name).unwrap_err().to_string();
    assert!(refused.contains("no session has a pool of this name"), "{refused}");
    let refused = served.client(Some("kvarts_red")).attach(name).unwrap_err().to_string();
    assert!(refused.contains("unix:PATH"), "{refused}");
    assert!(served.local(Some("kvarts_red")).attach("0".repeat(32).parse().unwrap()).is_err());
}
