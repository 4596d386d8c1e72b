//! A tier over a bucket with faults, and blocks to push.

use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::{BlockKey, Coordinate, Group};

use crate::access::{Access, Limits};
use crate::bucket::Bucket;
use crate::error::ColdError;
use crate::format::samples;
use crate::push::{PushOptions, Pushed, Pusher};
use crate::restore::{FetchOptions, Fetched, Lost, fetch, plan};
use crate::testing::{Faulty, MemoryBucket, Skewed, VirtualTime};
use crate::tier::{Tier, TierOptions};
use crate::time::Time;

pub(crate) const COLUMN: (Group, Coordinate) = (Group(0), Coordinate::Replicated);

pub(crate) struct World {
    pub(crate) time: VirtualTime,
    pub(crate) memory: Arc<MemoryBucket>,
    pub(crate) faulty: Arc<Faulty>,
    pub(crate) tier: Tier,
    seed: u64,
}

pub(crate) fn limits() -> Limits {
    Limits { failures_before_pause: 1000, ..Limits::default() }
}

impl World {
    pub(crate) fn new() -> Self {
        Self::seeded(1)
    }

    pub(crate) fn seeded(seed: u64) -> Self {
        Self::skewed(seed, 0)
    }

    /// The bucket's clock is ahead by this many milliseconds, or behind.
    pub(crate) fn skewed(seed: u64, ahead_ms: i64) -> Self {
        let time = VirtualTime::default();
        let clock: Arc<dyn Time> = Arc::new(time.clone());
        let memory = MemoryBucket::new(Arc::new(Skewed(time.clone(), ahead_ms)));
        let faulty = Faulty::new(Arc::clone(&memory) as Arc<dyn Bucket>, Arc::clone(&clock), seed);
        let tier = tier(Arc::clone(&clock), &faulty, limits(), seed);
        Self { time, memory, faulty, tier, seed }
    }

    pub(crate) fn limited(mut self, limits: Limits) -> Self {
        self.tier = tier(Arc::new(self.time.clone()), &self.faulty, limits, self.seed);
        self
    }

    /// Another node with the same bucket, which remembers nothing.
    pub(crate) fn other(&self) -> Tier {
        tier(Arc::new(self.time.clone()), &self.faulty, limits(), self.seed + 77)
    }

    /// The same with other options.
    pub(crate) fn other_with_options(&self, options: TierOptions) -> Tier {
        let bucket = Arc::clone(&self.faulty) as Arc<dyn Bucket>;
        let options = TierOptions { tries_conditions: false, ..options };
        Tier::new(Access::new(bucket, Arc::new(self.time.clone()), limits(), self.seed + 80), options)
    }

    /// The same, which may not ask for more than this.
    pub(crate) fn other_with_limits(&self, limits: Limits) -> Tier {
        tier(Arc::new(self.time.clone()), &self.faulty, limits, self.seed + 79)
    }

    /// The same with a clock that is ahead by this many milliseconds, or behind.
    pub(crate) fn other_with_clock(&self, ahead_ms: i64) -> Tier {
        let clock = Arc::new(Skewed(self.time.clone(), ahead_ms));
        tier(clock, &self.faulty, limits(), self.seed + 78)
    }

    pub(crate) fn push(&self, blocks: &[(u8, u32, u32)]) -> Result<Pushed, ColdError> {
        self.time.run(push(&self.tier, blocks, options()))
    }

    /// What the tier gives of blocks of a prefix.
    pub(crate) fn read(&self, tier: &Tier, prefix: u8, to: u32) -> (Vec<Option<Vec<u8>>>, Fetched) {
        self.time.run(read(tier, prefix, to)).unwrap()
    }

    /// Blocks of a prefix that the tier gives; each is what was put.
    pub(crate) fn good(&self, tier: &Tier, prefix: u8, to: u32) -> usize {
        let (blocks, _) = self.read(tier, prefix, to);
        for (block, bytes) in (0..).zip(&blocks) {
            if let Some(bytes) = bytes {
                assert_eq!(*bytes, samples::bytes_of(prefix, block), "a wrong byte of block {block}");
            }
        }
        blocks.iter().flatten().count()
    }
}

fn tier(time: Arc<dyn Time>, faulty: &Arc<Faulty>, limits: Limits, seed: u64) -> Tier {
    let bucket = Arc::clone(faulty) as Arc<dyn Bucket>;
    Tier::new(Access::new(bucket, time, limits, seed), unasked())
}

/// The usual options over a bucket that is known to keep conditions: tests count requests.
pub(crate) fn unasked() -> TierOptions {
    TierOptions { tries_conditions: false, ..TierOptions::default() }
}

/// Packs of five blocks.
pub(crate) fn options() -> PushOptions {
    PushOptions { pack_bytes: 5 * samples::BLOCK as u64, ..PushOptions::default() }
}

pub(crate) async fn push(
    tier: &Tier,
    blocks: &[(u8, u32, u32)],
    options: PushOptions,
) -> Result<Pushed, ColdError> {
    let mut pusher = Pusher::new(tier, options);
    if let Some(known) = tier.remembered(samples::namespace_id("r1")) {
        pusher.listed(samples::namespace_id("r1"), known.manifest.point());
    }
    for &(prefix, from, to) in blocks {
        let (run, payload) = samples::run("r1", prefix, from, to);
        pusher.add(&samples::namespace("r1"), &run, &payload).await?;
    }
    pusher.finish().await
}

pub(crate) fn keys(prefix: u8, to: u32) -> Vec<BlockKey> {
    (0..to).map(|block| samples::key(prefix, block)).collect()
}

pub(crate) fn small_ranges() -> FetchOptions {
    FetchOptions {
        gap_bytes: 1000,
        range_bytes: 1 << 20,
        late_least: Duration::from_secs(1),
        ..FetchOptions::default()
    }
}

pub(crate) async fn read(
    tier: &Tier,
    prefix: u8,
    to: u32,
) -> Result<(Vec<Option<Vec<u8>>>, Fetched), ColdError> {
    let found = tier.locate(samples::namespace_id("r1"), COLUMN, &keys(prefix, to)).await?;
    let wanted: Vec<_> =
        found.into_iter().enumerate().filter_map(|(ordinal, found)| Some((ordinal, found?))).collect();
    let options = small_ranges();
    let mut blocks = vec![None; to as usize];
    let fetched = fetch(tier, plan(&wanted, None, &options), &options, |arrived| match arrived.bytes {
        Ok(memory) => blocks[arrived.part.ordinal] = Some(memory.to_vec()),
        Err(Lost::Damaged | Lost::Unread(_)) => {}
        Err(Lost::NoMemory) => panic!("no memory"),
    });
    let fetched = fetched.await;
    Ok((blocks, fetched))
}
