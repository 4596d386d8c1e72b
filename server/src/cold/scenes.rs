//! Deletes, sweeps and refreshes of one namespace in many orders, over a bucket whose answers are slow, late or lost: what was acknowledged
//! as deleted is found never again, and what was to expire is not found afterwards.
//!
//! The store is a table here; what a sweep and a delete do around it is what the server does.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{join, join_all, select};
use kvarts_cold::testing::{Faulty, Kind, MemoryBucket, Op, Plan, VirtualTime};
use kvarts_cold::withdraw::{Deleted, Told, When};
use kvarts_cold::{Access, Bucket, ColdError, Limits, PushOptions, Pusher, Tier, TierOptions, Time};
use kvarts_layout::export::{ExportedBlock, ExportedNamespace, Run};
use kvarts_layout::format::body::Parent;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::spec::{Kind as Part, PartGeometry, Role};
use kvarts_layout::{BlockKey, ContentId, Coordinate, Geometry, Group, Identity, NamespaceId, OriginId};

use super::counts::Counts;
use super::spilling::Spilling;
use super::telling::Telling;

const COLUMN: (Group, Coordinate) = (Group(0), Coordinate::Replicated);
const BLOCK: u64 = 64;
const BLOCKS: u8 = 12;
/// How old a manifest may become.
const REFRESH: Duration = Duration::from_secs(30);

fn key(block: u8) -> BlockKey {
    BlockKey([block; 32])
}

/// What goes wrong with requests.
const KINDS: [Kind; 7] = [
    Kind::Slow(Duration::from_millis(700)),
    Kind::Slow(Duration::from_secs(3)),
    Kind::Late(Duration::from_millis(900)),
    Kind::Late(Duration::from_secs(4)),
    Kind::Afterwards(Duration::from_secs(5)),
    Kind::Lost,
    Kind::Changed,
];

/// A node, its store, and the bucket.
struct Scene {
    time: VirtualTime,
    faulty: Arc<Faulty>,
    tier: Tier,
    spilling: Spilling,
    telling: Telling,
    exported: Arc<ExportedNamespace>,
    namespace: NamespaceId,
    /// When each block of the store expires; zero for never.
    store: Mutex<BTreeMap<u8, u64>>,
    /// What was acknowledged: from when on a block is not to be found. Zero: from now on.
    promised: Mutex<BTreeMap<u8, u64>>,
    random: Mutex<u64>,
}

fn tier(time: &VirtualTime, faulty: &Arc<Faulty>, seed: u64) -> Tier {
    let limits = Limits { failures_before_pause: 1000, ..Limits::default() };
    let bucket = Arc::clone(faulty) as Arc<dyn Bucket>;
    let access = Access::new(bucket, Arc::new(time.clone()), limits, seed);
    Tier::new(
        access,
        TierOptions { refresh: 10 * REFRESH, tries_conditions: false, ..TierOptions::default() },
    )
}

impl Scene {
    fn new(seed: u64) -> Self {
        let part = PartGeometry {
            kind: Part::new("kv").unwrap(),
            role: Role::Stream { bytes: BLOCK / 16, tokens: 1 },
            heads: 0,
            align: 1,
            group: COLUMN.0,
        };
        let geometry = Geometry::new(&[part], &[vec![0]]).unwrap();
        let identity =
            Identity::new("scene", "1", "bf16", Arrangement::new("test", "flat", "1"), &geometry, 16);
        let namespace = identity.namespace_id().unwrap();
        let time = VirtualTime::default();
        let clock: Arc<dyn Time> = Arc::new(time.clone());
        let memory = MemoryBucket::new(Arc::clone(&clock));
        let faulty = Faulty::new(memory as Arc<dyn Bucket>, clock, seed);
        Self {
            tier: tier(&time, &faulty, seed),
            time,
            faulty,
            spilling: Spilling::default(),
            telling: Telling::default(),
            exported: Arc::new(ExportedNamespace { identity, geometry: Arc::new(geometry) }),
            namespace,
            store: Mutex::new((0..BLOCKS).map(|block| (block, 0)).collect()),
            promised: Mutex::default(),
            random: Mutex::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
        }
    }

    fn draw(&self, below: u64) -> u64 {
        let mut random = self.random.lock().unwrap();
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        (*random >> 11) % below
    }

    /// Other parts of the scene go on for a while, or for none.
    async fn pause(&self, most_ms: u64) {
        self.time.sleep(Duration::from_millis(self.draw(most_ms))).await;
    }

    fn run(&self, block: u8, expires_ms: u64) -> (Run, Bytes) {
        let bytes = Bytes::from(vec![block; BLOCK as usize]);
        let exported = ExportedBlock {
            key: key(block),
            origin: OriginId([block; 16]),
            content: ContentId(*blake3::hash(&bytes).as_bytes()),
            digests: vec![crc32fast::hash(&bytes)],
        };
        let run = Run {
            namespace: self.namespace,
            coordinate: COLUMN.1,
            group: COLUMN.0,
            created_ms: 1,
            expires_ms,
            first_block: Some(u32::from(block)),
            parent: block.checked_sub(1).map_or(Parent::Root, |before| Parent::Key(key(before).0)),
            block_bytes: BLOCK,
            blocks: vec![exported],
        };
        (run, bytes)
    }

    /// As `ColdTier::sweep`: lists what goes next, then reads it, packs it, names it.
    async fn sweep(&self) {
        let sweep = self.spilling.begin().await;
        let options = PushOptions { pack_bytes: 3 * BLOCK, ..PushOptions::default() };
        let may_name = |of, keys: &[BlockKey]| self.spilling.may_name(of, keys);
        let mut pusher = Pusher::new(&self.tier, options).guarded(may_name);
        let points = self.tier.points();
        pusher.listed(self.namespace, points.get(&self.namespace).copied().unwrap_or_default());
        let listed = self.store.lock().unwrap().clone();
        self.pause(2000).await;
        sweep.open(self.namespace);
        for (block, expires_ms) in listed {
            if sweep.is_gone(self.namespace, &key(block)) || !self.store.lock().unwrap().contains_key(&block)
            {
                continue;
            }
            self.pause(300).await;
            let (run, payload) = self.run(block, expires_ms);
            match pusher.add(&self.exported, &run, &payload).await {
                Ok(()) | Err(ColdError::Withdrawn) => {}
                Err(_) => break,
            }
        }
        let _ = pusher.flush().await;
        pusher.abandon();
        sweep.close(self.namespace);
    }

    /// As a call of `Delete` or `SetTtl`: the store, then the bucket, then the answer.
    async fn delete(&self, block: u8, how: u64) {
        let mut until_ms = 0;
        let deleted = match how {
            0 => Deleted::Prefix(key(block)),
            1 => {
                until_ms = self.time.wall_ms() + 2000;
                Deleted::Later(vec![key(block)], COLUMN, until_ms)
            }
            _ => Deleted::Keys(vec![key(block)]),
        };
        let withdrawing = self.spilling.withdraw(self.namespace, &deleted);
        self.pause(1500).await;
        let gone: Vec<u8> = if how == 0 { (block..BLOCKS).collect() } else { vec![block] };
        for block in &gone {
            let mut store = self.store.lock().unwrap();
            if until_ms == 0 {
                store.remove(block);
            } else if let Some(expires_ms) = store.get_mut(block) {
                *expires_ms = until_ms;
            }
        }
        let told = self.tell(&deleted).await;
        for block in gone.iter().filter(|_| told.is_ok()) {
            let mut promised = self.promised.lock().unwrap();
            let promise = promised.entry(*block).or_insert(until_ms);
            *promise = until_ms.min(*promise);
        }
        drop(withdrawing);
    }

    async fn tell(&self, deleted: &Deleted) -> Result<(), ColdError> {
        let told = Told { deleted: deleted.clone(), when: When::Now };
        self.telling.tell((&self.tier, &Counts::default()), self.namespace, &told).await
    }

    /// Looks for what was promised to be gone.
    async fn expect_gone(&self, tier: &Tier, what: &str) {
        let now_ms = self.time.wall_ms();
        let promised = self.promised.lock().unwrap().clone();
        let gone: Vec<BlockKey> =
            promised.iter().filter(|(_, until)| **until <= now_ms).map(|(block, _)| key(*block)).collect();
        let Ok(found) = tier.locate(self.namespace, COLUMN, &gone).await else { return };
        let back: Vec<_> = gone.iter().zip(found).filter(|(_, found)| found.is_some()).collect();
        assert!(back.is_empty(), "{what}: {back:?}");
    }
}

/// What one seed makes of it; gives how many deletes were acknowledged, and how many copies there are at the end.
fn play(seed: u64) -> (usize, usize) {
    let scene = Scene::new(seed);
    let plan =
        Plan { thousandths: [0, 150, 400][seed as usize % 3], kinds: KINDS.to_vec(), ..Plan::default() };
    scene.faulty.plan(plan);
    let sweeps = async {
        for _ in 0..3 {
            scene.pause(4000).await;
            scene.sweep().await;
        }
    };
    let refreshes = async {
        for _ in 0..12 {
            scene.pause(3000).await;
            let _ = scene.tier.read_manifest(scene.namespace).await;
            scene.expect_gone(&scene.tier, "here").await;
        }
    };
    let deletes = (0..4u8).map(|number| {
        let scene = &scene;
        async move {
            scene.pause(20_000).await;
            let block = (scene.draw(4) as u8) * 3 + u8::from(number == 0);
            scene.delete(block, scene.draw(6)).await;
            scene.expect_gone(&scene.tier, "after the answer").await;
        }
    });
    // Another node pushes blocks that stay, so that changes meet.
    let other = tier(&scene.time, &scene.faulty, seed + 1);
    let others = async {
        for block in [100, 101] {
            scene.pause(9000).await;
            let (run, payload) = scene.run(block, 0);
            let Ok(listed) = other.point(scene.namespace).await else { continue };
            let mut pusher = Pusher::new(&other, PushOptions::default());
            pusher.listed(scene.namespace, listed);
            let _ = pusher.add(&scene.exported, &run, &payload).await;
            let _ = pusher.finish().await;
        }
    };
    scene.time.run(join(join(sweeps, refreshes), join(join_all(deletes), others)));
    scene.faulty.plan(Plan::default());
    // Whatever was given up and is still on its way has happened by now.
    scene.time.pass(Duration::from_secs(60));
    let fresh = tier(&scene.time, &scene.faulty, seed + 2);
    let copies = scene.time.run(async {
        let _ = scene.tier.read_manifest(scene.namespace).await;
        scene.expect_gone(&scene.tier, &format!("seed {seed}: here, in the end")).await;
        scene.expect_gone(&fresh, &format!("seed {seed}: on a new node")).await;
        let all: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
        fresh.locate(scene.namespace, COLUMN, &all).await.unwrap()
    });
    let acknowledged = scene.promised.lock().unwrap().len();
    (acknowledged, copies.into_iter().flatten().count())
}

#[test]
fn what_was_deleted_or_has_expired_is_found_never_again_whatever_crosses_it() {
    let (mut acknowledged, mut copies) = (0, 0);
    for seed in 0..400 {
        let (some, more) = play(seed);
        (acknowledged, copies) = (acknowledged + some, copies + more);
    }
    // Most deletes are acknowledged, and other blocks are copied.
    assert!(acknowledged > 400 * 3 && copies > 400 * 3, "{acknowledged} {copies}");
}

#[test]
fn a_block_whose_delete_is_under_way_when_a_sweep_begins_is_not_copied_by_it() {
    let scene = Scene::new(1);
    scene.time.run(async {
        let deleted = Deleted::Keys(vec![key(2)]);
        let withdrawing = scene.spilling.withdraw(scene.namespace, &deleted);
        assert_eq!(scene.tell(&deleted).await, Ok(()));
        scene.sweep().await;
        scene.store.lock().unwrap().remove(&2);
        drop(withdrawing);
        let found = scene.tier.locate(scene.namespace, COLUMN, &[key(2), key(3)]).await.unwrap();
        assert!(found[0].is_none() && found[1].is_some());
    });
}

#[test]
fn deletes_that_are_told_at_once_are_few_changes_and_each_is_answered() {
    let scene = Scene::new(1);
    scene.faulty.all(Some(Kind::Slow(Duration::from_millis(100))));
    let deletes = (0..BLOCKS).map(|block| {
        let (scene, deleted) = (&scene, Deleted::Keys(vec![key(block)]));
        async move { scene.tell(&deleted).await }
    });
    let told = scene.time.run(join_all(deletes));
    assert!(told.iter().all(Result::is_ok), "{told:?}");
    let known = scene.time.run(scene.tier.read_manifest(scene.namespace)).unwrap();
    let deletions = &known.manifest.deletions;
    assert_eq!((known.manifest.generation, deletions.keys.len()), (2, usize::from(BLOCKS)));
}

#[test]
fn a_delete_that_waits_for_one_that_gives_up_is_told_all_the_same() {
    let scene = Scene::new(1);
    scene.faulty.next(Op::Get, &[Some(Kind::Silent)]);
    let deleted = [1, 2].map(|block| Deleted::Keys(vec![key(block)]));
    let told = scene.time.run(async {
        let impatient = async {
            let first = Box::pin(scene.tell(&deleted[0]));
            drop(select(first, Box::pin(scene.time.sleep(Duration::from_secs(1)))).await);
        };
        let late = async {
            scene.pause(1).await;
            scene.tell(&deleted[1]).await
        };
        join(impatient, late).await.1
    });
    assert_eq!(told, Ok(()));
    let known = scene.time.run(scene.tier.read_manifest(scene.namespace)).unwrap();
    // The first one was not acknowledged.
    assert_eq!(known.manifest.deletions.keys.len(), 1);
}
