//! A store, a bucket, and packs in it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvarts_bucket::http::Connector;
use kvarts_bucket::s3::S3Bucket;
use kvarts_bucket::time::TokioTime;
use kvarts_cold::check::each_listed;
use kvarts_cold::format::names;
use kvarts_cold::{Access, Bucket, ColdError, Limits, PushOptions, Pusher, Tier, TierOptions};
use kvarts_layout::export::{ExportedBlock, ExportedNamespace, Run};
use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, ContentId, OriginId};
use kvarts_server::cold::{ColdConfig, Offer};
use kvarts_store::engine::{Options, Store};
use kvarts_store::home::Home;
use kvarts_terminal::Failure;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::{ClientOptions, RetryConfig};
use tokio::runtime::Runtime;

use super::ColdArgs;
use super::objects::Objects;
use crate::pairs::{Sample, cpu_seconds};
use crate::setup::{self, Subject, key};

/// The bucket that the benchmark's own storage has.
const OWN: &str = "blocks";
/// Blocks of one run of a pack.
const RUN_BYTES: u64 = 16 << 20;
/// The series of keys of the blocks in the bucket.
const IN_BUCKET: u64 = 11;

/// What everything stands on.
pub(super) struct Stage {
    store: Store,
    pub(super) runtime: Runtime,
    pub(super) subject: Subject,
    /// The same model in blocks of the length that own reads want.
    pub(super) own: Subject,
    exported: Arc<ExportedNamespace>,
    /// The benchmark's own storage.
    pub(super) objects: Option<Arc<Objects>>,
    builder: AmazonS3Builder,
    bucket: String,
    prefix: String,
}

/// Limits that a benchmark does not meet.
fn limits() -> Limits {
    Limits { requests_a_day: u64::MAX, ..Limits::default() }
}

impl Stage {
    /// With the home of its store, which is closed last.
    pub(super) fn new(arguments: &ColdArgs, directory: &Path, budget: u64) -> Result<(Self, Home), Failure> {
        let runtime = Runtime::new().map_err(Failure::user)?;
        let spec = setup::model(&arguments.model)?;
        let geometry = spec.geometry();
        let group = geometry.groups().first().ok_or_else(|| Failure::user("the model has no state"))?.group;
        let coordinate = geometry.coordinate(group, 1, 0).map_err(Failure::user)?;
        let longer = arguments.block_tokens.max(arguments.own_block_tokens);
        let shape = geometry.shape(group, coordinate, longer).map_err(Failure::user)?;
        // What is spilled lies in segments that are full, and each has several blocks.
        let wanted = (arguments.mib << 17).clamp(1 << 20, 64 << 20);
        let segment_bytes = wanted.max(4 * shape.block_bytes()).next_power_of_two();
        let options = Options { budget_bytes: budget, segment_bytes, ..Options::default() };
        let home = setup::open(&arguments.common, &directory.join("store"), options)?;
        let subject = Subject::new(home.store(), &spec, Some(arguments.block_tokens))?;
        let own = Subject::new(home.store(), &spec, Some(arguments.own_block_tokens))?;
        let identity = setup::identity(spec.name(), arguments.block_tokens, geometry);
        let exported = Arc::new(ExportedNamespace { identity, geometry: Arc::new(geometry.clone()) });
        let (objects, builder, bucket, prefix) = match arguments.bucket.as_deref() {
            None => {
                let objects = Objects::start(arguments.manners()).map_err(Failure::user)?;
                let builder = AmazonS3Builder::new()
                    .with_endpoint(objects.endpoint())
                    .with_region("us-east-1")
                    .with_access_key_id("some")
                    .with_secret_access_key("secret")
                    .with_allow_http(true);
                (Some(objects), builder, OWN, "tier")
            }
            Some(url) => {
                let named = url.strip_prefix("s3://").filter(|rest| !rest.is_empty());
                let named = named.ok_or_else(|| Failure::User(format!("{url}: use s3://BUCKET/PREFIX")))?;
                let (bucket, prefix) = named.split_once('/').unwrap_or((named, "kvarts-bench"));
                (None, kvarts_bucket::s3::environment().map_err(Failure::user)?, bucket, prefix)
            }
        };
        let (bucket, prefix) = (bucket.to_owned(), format!("{prefix}/{}", std::process::id()));
        let store = home.store().clone();
        let stage = Self { store, runtime, subject, own, exported, objects, builder, bucket, prefix };
        Ok((stage, home))
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// The bucket, below a prefix of its own.
    pub(super) fn bucket(&self, below: &str) -> Result<Arc<dyn Bucket>, Failure> {
        let prefix = format!("{}/{below}", self.prefix);
        let bucket = S3Bucket::new(self.builder.clone(), &self.bucket, &prefix);
        Ok(Arc::new(bucket.map_err(Failure::user)?))
    }

    /// A tier over it that remembers nothing.
    pub(super) fn tier(&self, bucket: Arc<dyn Bucket>) -> Tier {
        let access = Access::new(bucket, Arc::new(TokioTime::start()), limits(), 1);
        Tier::new(access, TierOptions::default())
    }

    /// A client of the same bucket that has nothing of Kvarts but its HTTP, and the path of objects below a prefix.
    pub(super) fn bare(&self) -> Result<AmazonS3, Failure> {
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let builder = self.builder.clone().with_bucket_name(self.bucket.as_str()).with_retry(once);
        let builder = builder.with_client_options(ClientOptions::new().with_allow_http(true));
        let connector = Connector::new().map_err(Failure::user)?;
        builder.with_http_connector(connector).build().map_err(Failure::user)
    }

    /// The path of an object of the tier below a prefix.
    pub(super) fn path(&self, below: &str, name: &str) -> object_store::path::Path {
        object_store::path::Path::from(format!("{}/{below}/{name}", self.prefix))
    }

    /// Takes everything below a prefix out of the bucket.
    pub(super) fn clean(&self, below: &str) -> Result<(), Failure> {
        if let Some(objects) = &self.objects {
            objects.remove_below(&format!("/{}/{}/{below}/", self.bucket, self.prefix));
            return Ok(());
        }
        let tier = self.tier(self.bucket(below)?);
        self.wait(async {
            let mut names = Vec::new();
            each_listed(&tier, names::ROOT, |listed| names.push(listed.name.clone())).await?;
            for name in names {
                tier.access().delete(&name).await?;
            }
            Ok(())
        })
    }

    /// Keys of the blocks in the bucket: `mib` MiB of them.
    pub(super) fn keys(&self, mib: u64) -> Vec<BlockKey> {
        let blocks = ((mib << 20) / self.subject.shape.block_bytes()).max(1);
        (0..blocks).map(|block| key(IN_BUCKET, block)).collect()
    }

    /// Brings these blocks into the bucket.
    pub(super) fn push(&self, tier: &Tier, keys: &[BlockKey]) -> Result<(), Failure> {
        let block_bytes = self.subject.shape.block_bytes();
        let each = usize::try_from(RUN_BYTES / block_bytes).unwrap_or(1).max(1);
        let mut payload = vec![0; block_bytes as usize * each];
        setup::noise(payload.len())?.copy_out(0, &mut payload);
        let payload = Bytes::from(payload);
        let mut pusher = Pusher::new(tier, PushOptions::default());
        for (done, some) in keys.chunks(each).enumerate() {
            setup::progress(&format!("pushing: {} of {} blocks", done * each, keys.len()));
            let run = self.run(some, (done * each) as u32, &payload);
            let payload = payload.slice(..block_bytes as usize * some.len());
            self.wait(pusher.add(&self.exported, &run, &payload))?;
        }
        let pushed = self.wait(pusher.finish())?;
        setup::progress("");
        match pushed.blocks == keys.len() as u64 {
            true => Ok(()),
            false => Err(Failure::User(format!("not all blocks were pushed into the bucket: {pushed:?}"))),
        }
    }

    fn run(&self, keys: &[BlockKey], first: u32, payload: &Bytes) -> Run {
        let Subject { namespace, group, coordinate, ref shape, .. } = self.subject;
        let block_bytes = shape.block_bytes();
        let blocks = keys.iter().zip(payload.chunks(block_bytes as usize)).map(|(key, bytes)| {
            let mut rest = bytes;
            let chunks = shape.layers().iter().flat_map(|layer| &layer.chunks);
            let digests = chunks.map(|chunk| {
                let (own, behind) = rest.split_at(chunk.bytes as usize);
                rest = behind;
                crc32fast::hash(own)
            });
            let digests = digests.collect();
            let content = ContentId(*blake3::hash(bytes).as_bytes());
            ExportedBlock { key: *key, origin: OriginId([0x5a; 16]), content, digests }
        });
        let blocks = blocks.collect();
        let before = first.checked_sub(1).map(|before| key(IN_BUCKET, u64::from(before)));
        let parent = before.map_or(Parent::Root, |before| Parent::Key(before.0));
        let (created_ms, expires_ms, first_block) = (1, 0, Some(first));
        Run { namespace, coordinate, group, created_ms, expires_ms, first_block, parent, block_bytes, blocks }
    }

    /// Waits for the tier.
    pub(super) fn wait<T>(&self, asked: impl Future<Output = Result<T, ColdError>>) -> Result<T, Failure> {
        self.runtime.block_on(asked).map_err(Failure::user)
    }

    /// How long something takes, and the processor time of everything but the benchmark's own storage.
    pub(super) fn timed(&self, work: impl FnOnce() -> Result<(), Failure>) -> Result<Sample, Failure> {
        let of_storage = || self.objects.as_ref().map_or(0.0, |objects| objects.served().2);
        let (begun, cpu, storage) = (std::time::Instant::now(), cpu_seconds(), of_storage());
        work()?;
        let cpu = (cpu_seconds() - cpu - (of_storage() - storage)).max(0.0);
        Ok(Sample { seconds: begun.elapsed().as_secs_f64(), cpu, first: 0.0 })
    }

    pub(super) fn close(self) {
        self.runtime.shutdown_background();
    }
}

/// A tier of a server that may spill this number of bytes a second.
pub(super) fn config(rate: u64) -> ColdConfig {
    ColdConfig {
        bucket: String::new(),
        requests: u64::MAX,
        written: u64::MAX,
        read: u64::MAX,
        refresh: Duration::from_secs(60),
        memory: 256 << 20,
        // Sweeps are begun by the benchmark.
        spill: false,
        uses: 0,
        age: Duration::ZERO,
        token_bytes: None,
        rate,
        offer: Offer::Never,
    }
}
