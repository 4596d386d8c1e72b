//! The cold tier behind this server: what a bucket has of blocks that are not here, and blocks that go there before they are evicted.
//!
//! - A look-up asks memory alone: manifests of the namespaces in use are read by time (`manifests`).
//! - A read of blocks that are not here, and are there, has them brought into the store (`restore`), each when its turn has come (`readers`), and takes them as they come
//!   (`path`, `landed`): the bucket is one of its paths (`ways`). What cannot be brought is a miss, as without the tier.
//! - Blocks near their eviction are copied into the bucket by a sweep beside everything else (`spill`). Eviction waits for nothing.
//! - What is deleted is taken out of the tier before the delete is acknowledged (`delete`, `telling`): it does not come back.
//! - All that a store has is copied when an operator asks for it (`push`).
//! - A bucket that does not keep conditions of puts is only read.
//!
//! Requests, bytes, memory and tasks are bounded; nothing of a bucket is believed (see `kvarts_cold`).

mod counts;
mod delete;
mod estimate;
mod landed;
mod manifests;
mod offer;
mod path;
mod push;
mod readers;
mod resting;
mod restore;
#[cfg(test)]
mod scenes;
mod spare;
mod spill;
mod spilling;
mod telling;
mod ways;
mod wish;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_bucket::time::TokioTime;
use kvarts_cold::{Access, Bucket, ColdError, Conditions, Fault, Limits, Tier, TierOptions};
use kvarts_peer::read::NodePaths;
use kvarts_planner::plan::Link;
use kvarts_store::engine::Store;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

pub use counts::{Counted, Counts};
pub use delete::Deleting;
pub use offer::{OFFERED_MOST, Offer};
pub use push::Copied;
pub use spare::Coming;
pub use wish::Wish;

use estimate::Estimate;
use manifests::Manifests;
use path::BucketPath;
use resting::Resting;
use restore::Flights;
use spilling::Spilling;
use telling::Telling;
use ways::Ways;

/// How long the bucket may take to say at the start whether it is there.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Of a manifest that could not be read again: how old it may become at least.
const STALE: Duration = Duration::from_secs(15 * 60);
/// What the way to the bucket is taken for before anything came over it: until the first byte, and bytes a second.
const FIRST_BYTE: Duration = Duration::from_millis(50);
const UNMEASURED_RATE: u64 = 125_000_000;

/// How old a manifest may become that could not be read again, by how often manifests are read: two times are missed at most where that
/// is seldom.
fn stale(refresh: Duration) -> Duration {
    STALE.max(refresh.saturating_mul(3))
}

/// Memory for manifests, where restores have so much: less where they have less than by default.
pub(crate) fn manifest_memory(restores: u64) -> usize {
    usize::try_from(restores / 2).unwrap_or(usize::MAX).min(128 << 20)
}

/// The same for indexes.
pub(crate) fn index_memory(restores: u64) -> usize {
    usize::try_from(restores / 4).unwrap_or(usize::MAX).min(64 << 20)
}

/// How a server uses a bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ColdConfig {
    /// The address of the bucket.
    pub bucket: String,
    /// Requests a day.
    pub requests: u64,
    /// Bytes written a day.
    pub written: u64,
    /// Bytes read a day.
    pub read: u64,
    /// How old the manifest of a namespace in use may become.
    pub refresh: Duration,
    /// Memory of restores.
    pub memory: u64,
    /// Whether blocks are copied into the bucket before they are evicted.
    pub spill: bool,
    /// How often a block must have been used to be worth it, 0 to 3.
    pub uses: u8,
    /// How long ago it must have been stored.
    pub age: Duration,
    /// The most bytes for each of its tokens: of more it is computed sooner than restored. None: no limit.
    pub token_bytes: Option<u64>,
    /// Bytes a second that go into the bucket.
    pub rate: u64,
    /// What look-ups without a plan are told of it.
    pub offer: Offer,
}

/// A bucket behind a server.
#[derive(Debug)]
pub struct ColdTier {
    tier: Tier,
    config: ColdConfig,
    store: Store,
    counts: Counts,
    manifests: Manifests,
    flights: Flights,
    spilling: Spilling,
    telling: Telling,
    resting: Resting,
    ways: Ways,
    /// How fast the bucket is, by what restores brought.
    estimate: Mutex<Estimate>,
    runtime: Handle,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl ColdTier {
    /// Opens the bucket and begins to use it, as one of these paths of the node's reads if it has any already. Gives one line that says what is wrong with its address; a bucket that does not answer, or
    /// refuses, is a note: the server does without.
    pub async fn start(
        config: &ColdConfig,
        store: &Store,
        paths: Option<Arc<NodePaths>>,
        seed: u64,
        notes: &mut Vec<String>,
    ) -> Result<Arc<Self>, String> {
        let bucket = kvarts_bucket::open(&config.bucket).map_err(|why| format!("cold.bucket: {why}"))?;
        let cold = Self::over(bucket, config, store, paths, seed)?;
        notes.push(match cold.probe().await {
            Ok(()) => cold.probe_conditions().await,
            Err(why) => {
                let sentence = format!(
                    "cold.bucket: {why}; until the bucket can be reached, look-ups do not \
                        find its blocks"
                );
                tracing::warn!("{sentence}");
                sentence
            }
        });
        if cold.tier.access().keeps_versions() {
            let sentence = "the bucket of the cold tier keeps old versions of objects, so deleted objects \
                stay until a lifecycle rule deletes noncurrent versions";
            tracing::warn!("{sentence}");
            notes.push(sentence.to_owned());
        }
        Ok(cold)
    }

    /// The tier over a bucket. Must be called on a runtime.
    pub fn over(
        bucket: Arc<dyn Bucket>,
        config: &ColdConfig,
        store: &Store,
        paths: Option<Arc<NodePaths>>,
        seed: u64,
    ) -> Result<Arc<Self>, String> {
        let limits = Limits {
            requests_a_day: config.requests,
            written_bytes_a_day: config.written,
            read_bytes_a_day: config.read,
            ..Limits::default()
        };
        let access = Access::new(bucket, Arc::new(TokioTime::start()), limits, seed);
        // Manifests are read by `manifests`; a restore reads one itself only where that is far behind.
        let refresh = config.refresh.saturating_mul(10);
        let options = TierOptions {
            refresh,
            stale: STALE.max(refresh),
            manifest_memory: manifest_memory(config.memory),
            index_memory: index_memory(config.memory),
            ..TierOptions::default()
        };
        let path = Arc::<BucketPath>::default();
        let cold = Arc::new(Self {
            ways: Ways::new(paths, store, &path)?,
            tier: Tier::new(access, options),
            config: config.clone(),
            store: store.clone(),
            counts: Counts::default(),
            manifests: Manifests::default(),
            flights: Flights::new(config.memory),
            spilling: Spilling::default(),
            telling: Telling::default(),
            resting: Resting::default(),
            estimate: Mutex::default(),
            runtime: Handle::current(),
            tasks: Mutex::default(),
        });
        path.leads_to(&cold);
        let keeping = tokio::spawn(Arc::clone(&cold).keep_manifests());
        cold.tasks().push(keeping);
        if config.spill {
            let spilling = tokio::spawn(Arc::clone(&cold).keep_spilling());
            cold.tasks().push(spilling);
        }
        Ok(cold)
    }

    fn tasks(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the bucket answers.
    async fn probe(&self) -> Result<(), String> {
        let listed = self.tier.access().list("manifests", None, 1);
        match tokio::time::timeout(PROBE_TIMEOUT, listed).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(self.told(&error)),
            Err(_) => Err(format!("{}: the bucket has not responded in time", self.config.bucket)),
        }
    }

    /// What went wrong, with the bucket's address, for the log alone.
    fn told(&self, error: &ColdError) -> String {
        match error {
            ColdError::Bucket(_, Fault::NoBucket) => kvarts_bucket::absent(&self.config.bucket),
            error => format!("{}: {error}", self.config.bucket),
        }
    }

    /// Whether the bucket keeps conditions of puts, as a sentence; if it has not said so it is asked again before anything is written.
    async fn probe_conditions(&self) -> String {
        let bucket = &self.config.bucket;
        match tokio::time::timeout(PROBE_TIMEOUT, self.tier.conditions()).await {
            Ok(Ok(Conditions::Kept)) => format!("the cold tier is {bucket}"),
            Ok(Ok(Conditions::NotKept(why))) => {
                let sentence = format!(
                    "the cold tier {bucket} is READ-ONLY: {why}. Nothing is uploaded, and deletes of its blocks are not acknowledged"
                );
                tracing::warn!("{sentence}");
                sentence
            }
            Ok(Err(error)) => {
                format!("the write test of the cold tier {bucket} failed: {error}")
            }
            Err(_) => {
                format!("the cold tier is {bucket}; the write test did not finish in time")
            }
        }
    }

    /// Why nothing is written to the bucket, if it was found not to keep conditions of puts.
    pub fn read_only(&self) -> Option<String> {
        self.tier.read_only()
    }

    /// Ends what works for it. Restores under way are broken off: their blocks are misses.
    pub async fn stop(&self) {
        let tasks = std::mem::take(&mut *self.tasks());
        tasks.iter().for_each(JoinHandle::abort);
        self.flights.abort_all().await;
        for task in tasks {
            // It was told to end, and has no answer.
            // ends: it was aborted above, and waits for nothing that an abort does not end
            let _ = task.await;
        }
    }

    /// Whether the bucket would be asked now, or is left alone after failures.
    pub fn is_asked(&self) -> bool {
        !self.tier.access().is_paused()
    }

    fn estimate(&self) -> MutexGuard<'_, Estimate> {
        // Each change is one step.
        self.estimate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes a second that the restores of the last while brought, if there were any.
    fn brings(&self) -> Option<u64> {
        self.estimate().rate(self.tier.access().time().now())
    }

    /// How long a restore of this many bytes takes, by the restores of the last while.
    pub fn takes(&self, bytes: u64) -> Option<Duration> {
        let rate = self.brings()?;
        let latency = self.tier.first_byte_time().unwrap_or_default();
        Some(latency.saturating_add(Duration::from_secs_f64(bytes as f64 / rate as f64)))
    }

    /// The way to the bucket, by the restores of the last while; before the first one, as over a network of 1 Gbit/s.
    pub fn link(&self) -> Link {
        let assumed = self.assumed_link();
        let latency_ms =
            self.tier.first_byte_time().map_or(assumed.latency_ms, |time| time.as_secs_f64() * 1e3);
        let bytes_per_ms = self.brings().map_or(assumed.bytes_per_ms, |rate| rate as f64 / 1e3);
        Link { latency_ms, bytes_per_ms, ..assumed }
    }

    /// The same as it is taken to be before the first restore.
    pub fn assumed_link(&self) -> Link {
        Link {
            latency_ms: FIRST_BYTE.as_secs_f64() * 1e3,
            bytes_per_ms: UNMEASURED_RATE as f64 / 1e3,
            outstanding_bytes: self.ways.outstanding(),
        }
    }

    /// Runs a task of a read that waits for it.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// The address of its bucket.
    pub fn bucket(&self) -> &str {
        &self.config.bucket
    }

    /// What it was and is doing.
    pub fn counted(&self) -> Counted {
        let access = self.tier.access();
        Counted {
            counts: self.counts.all(),
            total: access.spent(),
            today: access.today(),
            limits: access.limits().clone(),
            is_paused: access.is_paused(),
            is_read_only: self.read_only().is_some(),
            manifests: self.manifests.known(&self.tier),
            memory: (self.tier.manifest_memory() + self.tier.index_memory()) as u64,
            under_way: self.flights.blocks() as u64,
        }
    }
}
