//! Collectors at the same time over a real S3 server, beside pushes: what a manifest names is there, and what was to go is gone.
#![allow(clippy::disallowed_methods, reason = "a real server, real time")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::cold_blocks::Model;
use crate::s3;
use bytes::Bytes;
use kvarts_bucket::s3::S3Bucket;
use kvarts_bucket::time::TokioTime;
use kvarts_cold::check::{Checked, Level, check};
use kvarts_cold::collect::{Collected, GRACE_LEAST, Retention, collect};
use kvarts_cold::time::BoxFuture;
use kvarts_cold::{
    Access, Bucket, ColdError, Condition, Facts, Fault, Limits, Listed, Places, PushOptions, Pusher, Tag,
    Tier, TierOptions, Time,
};
use object_store::aws::AmazonS3Builder;
use tokio::runtime::Runtime;

/// Bytes of a layer of a block, blocks of a pack.
const LAYER: u64 = 1024;
const PACK: u64 = 4;
const COLLECTORS: u64 = 4;

/// Real time, with a wall clock that can be put forward.
struct Forward(TokioTime, Arc<AtomicU64>);

impl Time for Forward {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn wall_ms(&self) -> u64 {
        self.0.wall_ms() + self.1.load(Ordering::Relaxed)
    }

    fn sleep(&self, long: Duration) -> BoxFuture<'static, ()> {
        self.0.sleep(long)
    }
}

/// A bucket that does not say what time it is, so that clocks can be put forward.
struct Timeless(S3Bucket);

impl Bucket for Timeless {
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        self.0.get(name, most)
    }

    fn get_range<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        into: &'a Places,
    ) -> BoxFuture<'a, Result<u64, Fault>> {
        self.0.get_range(name, range, into)
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>> {
        self.0.head(name)
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Vec<Bytes>,
        condition: Condition,
    ) -> BoxFuture<'a, Result<Tag, Fault>> {
        self.0.put(name, body, condition)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>> {
        self.0.delete(name)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: usize,
    ) -> BoxFuture<'a, Result<Vec<Listed>, Fault>> {
        self.0.list(prefix, after, most)
    }
}

struct World {
    server: s3::Server,
    runtime: Runtime,
    model: Arc<Model>,
    forward: Arc<AtomicU64>,
}

impl World {
    fn start() -> Option<Self> {
        Some(Self {
            server: s3::Server::start()?,
            runtime: Runtime::new().unwrap(),
            model: Arc::new(Model::new(LAYER)),
            forward: Arc::default(),
        })
    }

    fn bucket(&self) -> S3Bucket {
        let builder = AmazonS3Builder::new()
            .with_endpoint(format!("http://127.0.0.1:{}", self.server.port))
            .with_region("us-east-1")
            .with_access_key_id("some")
            .with_secret_access_key("secret")
            .with_allow_http(true);
        S3Bucket::new(builder, s3::BUCKET, "tier").unwrap()
    }

    fn tier_over(&self, bucket: Arc<dyn Bucket>, number: u64) -> Tier {
        let time = Forward(TokioTime::start(), Arc::clone(&self.forward));
        Tier::new(Access::new(bucket, Arc::new(time), Limits::default(), number + 1), TierOptions::default())
    }

    /// A node of its own.
    fn tier(&self, number: u64) -> Tier {
        self.tier_over(Arc::new(Timeless(self.bucket())), number)
    }

    /// All at once: collectors, and a node that pushes these blocks.
    fn beside(&self, retention: &Retention, blocks: Range<u64>) -> Vec<Collected> {
        let collectors: Vec<Tier> = (0..COLLECTORS).map(|number| self.tier(number)).collect();
        let (pusher, model) = (self.tier(COLLECTORS), Arc::clone(&self.model));
        self.runtime.block_on(async {
            let pushing = tokio::spawn(async move { push(&pusher, &model, blocks).await });
            let collecting: Vec<_> = collectors
                .into_iter()
                .map(|tier| {
                    let (retention, namespace) = (retention.clone(), self.model.namespace);
                    tokio::spawn(async move { collect(&tier, namespace, &retention).await })
                })
                .collect();
            let mut all = Vec::new();
            for one in collecting {
                all.push(one.await.unwrap().unwrap());
            }
            pushing.await.unwrap();
            all
        })
    }

    fn checked(&self) -> Checked {
        let checking = async { check(&self.tier(9), self.model.namespace, Level::Full, false).await };
        self.runtime.block_on(checking).unwrap()
    }
}

async fn push(tier: &Tier, model: &Model, blocks: Range<u64>) {
    let options = PushOptions { pack_bytes: PACK * model.shape.block_bytes(), ..PushOptions::default() };
    let mut pusher = Pusher::new(tier, options);
    for first in blocks.step_by(PACK as usize) {
        let (run, payload) = model.run(first..first + PACK);
        pusher.add(&model.exported(), &run, &payload).await.unwrap();
    }
    pusher.finish().await.unwrap();
}

#[test]
fn collectors_at_the_same_time_delete_what_is_to_go_once_and_nothing_that_is_named() {
    let Some(world) = World::start() else { return };
    let tier = world.tier(7);
    world.runtime.block_on(push(&tier, &world.model, 0..40));
    let first = world.checked();
    assert_eq!((first.packs, first.found.len(), first.orphans), (10, 0, 0));
    // Half of it is too much: each collector sees the same, and one decides.
    let most = first.stored_bytes / 2;
    let retention = Retention { stored_bytes: Some(most), grace: GRACE_LEAST, ..Retention::default() };
    let done = world.beside(&retention, 40..52);
    assert!(done.iter().map(|one| one.over_budget).sum::<u64>() >= 5, "{done:?}");
    assert!(done.iter().all(|one| one.deleted == 0), "the grace has not passed: {done:?}");
    let second = world.checked();
    assert!(second.found.is_empty() && second.orphans == 0, "{second:?}");
    assert_eq!(second.packs + second.condemned, 13, "each pack is named, or waits");
    // The grace is over: all of them delete, while another node pushes.
    world.forward.fetch_add(2 * 3_600_000, Ordering::Relaxed);
    let keeps_all = Retention { stored_bytes: None, ..retention };
    let done = world.beside(&keeps_all, 52..64);
    assert!(done.iter().map(|one| one.deleted).sum::<u64>() >= second.condemned, "{done:?}");
    let third = world.checked();
    assert!(third.found.is_empty() && third.orphans == 0, "{third:?}");
    assert_eq!((third.packs, third.condemned), (second.packs + 3, 0));
    let listed = world.runtime.block_on(tier.access().list("kvarts-cold-1/packs/", None, 1000)).unwrap();
    assert_eq!(listed.len() as u64, third.packs, "what was to go is gone");
}

#[test]
fn a_collector_whose_clock_is_hours_ahead_of_the_servers_says_so_and_changes_nothing() {
    let Some(world) = World::start() else { return };
    let tier = world.tier_over(Arc::new(world.bucket()), 1);
    world.runtime.block_on(push(&tier, &world.model, 0..8));
    let retention = Retention { age: Some(Duration::from_secs(3600)), ..Retention::default() };
    let collected = || world.runtime.block_on(collect(&tier, world.model.namespace, &retention));
    assert_eq!(collected().unwrap(), Collected::default());
    world.forward.fetch_add(5 * 3_600_000, Ordering::Relaxed);
    assert!(matches!(collected(), Err(ColdError::Clocks(_))), "{:?}", collected());
    assert_eq!(world.checked().packs, 2);
}
