//! The bucket behind the node that is asked. What only the bucket has is restored into the node's store, and is deleted, by the tier's own code;
//! while the trouble lasts the bucket answers 503, refuses connections or answers nothing, in turn.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvarts_cold::promote::{Restored, Wanted, restore_and_tell};
use kvarts_cold::restore::FetchOptions;
use kvarts_cold::testing::{Faulty, Kind, MemoryBucket, Plan};
use kvarts_cold::time::BoxFuture;
use kvarts_cold::withdraw::{Deleted, withdraw};
use kvarts_cold::{Access, ColdError, Limits, PushOptions, Pusher, Tier, TierOptions, Time};
use kvarts_contract::api::{Durability, Order, Placed};
use kvarts_contract::buffers::{Arena, Region};
use kvarts_contract::clock::Clock;
use kvarts_layout::export::{ExportedBlock, ExportedNamespace, Run};
use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, ContentId, OriginId};
use kvarts_peer::read::Runner;

use super::guests::Guest;
use crate::conformance::pages;
use crate::fixture;
use crate::nodes::tasks::Owner;
use crate::sim::{Rng, SimClock};

/// Blocks that only the bucket has, and of each of its packs: what is deleted takes its pack with it.
const BLOCKS: u64 = 12;
const PACKED: usize = 2;
/// Memory of restores.
const MEMORY: usize = 4 << 20;
/// How long a restore or a delete lasts at most: until the bucket answers again, which is when the trouble ends and operations of the slow disk have
/// ended, and then for as long as the attempt that is under way, and the wait before the next one.
pub(super) const ENDS: Duration = Duration::from_secs(45 + 40 + 20);
/// After this time a bucket that answers again is in use again.
pub(super) const IN_USE: Duration = Duration::from_secs(31);

/// The time of the simulation, as the tier asks for it.
struct Simulated(Owner, Arc<SimClock>);

impl Time for Simulated {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.now().0)
    }

    fn wall_ms(&self) -> u64 {
        self.1.unix_millis()
    }

    fn sleep(&self, long: Duration) -> BoxFuture<'static, ()> {
        self.0.sleep_until(self.0.now().plus(long))
    }
}

/// A bucket, the tier over it, and the tenant whose blocks it has. Clones are the same one.
#[derive(Clone)]
pub(super) struct Bucket {
    guest: Guest,
    tier: Arc<Tier>,
    faulty: Arc<Faulty>,
    memory: Arc<Arena>,
    keys: Arc<Vec<BlockKey>>,
    /// What was to be deleted, and whether that was acknowledged.
    deleted: Arc<Mutex<BTreeMap<BlockKey, bool>>>,
}

impl Bucket {
    pub(super) fn new(guest: Guest, clock: &Arc<SimClock>, seed: u64) -> Result<Self, String> {
        let time: Arc<dyn Time> = Arc::new(Simulated(guest.owner.clone(), Arc::clone(clock)));
        let faulty = Faulty::new(MemoryBucket::new(Arc::clone(&time)), Arc::clone(&time), seed);
        let bucket = Arc::clone(&faulty) as Arc<dyn kvarts_cold::Bucket>;
        let tier = Tier::new(Access::new(bucket, time, Limits::default(), seed), TierOptions::default());
        let memory = Region::anonymous(MEMORY).map_err(|error| error.to_string())?;
        Ok(Self {
            guest,
            tier: Arc::new(tier),
            faulty,
            memory: Arc::new(Arena::new(memory)),
            keys: Arc::new(fixture::keys(9, 0..BLOCKS)),
            deleted: Arc::default(),
        })
    }

    fn deleted(&self) -> MutexGuard<'_, BTreeMap<BlockKey, bool>> {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Some of its blocks: all of a pack, or of several.
    pub(super) fn some(&self, rng: &mut Rng, most: usize) -> Vec<BlockKey> {
        let from = rng.index(self.keys.len() / PACKED);
        let to = from + rng.between(1, most as u64) as usize;
        self.keys.chunks(PACKED).skip(from).take(to - from).flatten().copied().collect()
    }

    pub(super) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    fn violation(&self, what: String) {
        self.guest.book.violation(what);
    }

    /// The blocks of a producer come into the bucket.
    pub(super) async fn fill(self, producer: u64) {
        let known = self.guest.store.identity_of(self.guest.namespace);
        let Some((identity, geometry)) = known else {
            return self.violation("the store does not know the namespace of the bucket's blocks".to_owned());
        };
        let exported = Arc::new(ExportedNamespace { identity, geometry: Arc::new(geometry) });
        for keys in self.keys.chunks(PACKED) {
            let (run, payload) = self.run(keys, producer);
            let mut pusher = Pusher::new(&self.tier, PushOptions::default());
            let pushed = pusher.add(&exported, &run, &payload).await;
            let finished = pusher.finish().await;
            if pushed.is_err() || !finished.as_ref().is_ok_and(|pushed| pushed.blocks == PACKED as u64) {
                return self.violation(format!("the bucket was not filled: {pushed:?}, {finished:?}"));
            }
        }
    }

    /// Blocks of a producer as they are exported.
    fn run(&self, keys: &[BlockKey], producer: u64) -> (Run, Bytes) {
        let ((group, coordinate), shape) = (pages(), &self.guest.shape);
        let (mut payload, mut blocks) = (Vec::new(), Vec::new());
        for key in keys {
            let chunks = fixture::content(key, group, coordinate, producer, shape);
            let digests = chunks.iter().map(|chunk| crc32fast::hash(chunk)).collect();
            let bytes = chunks.concat();
            let content = ContentId(*blake3::hash(&bytes).as_bytes());
            blocks.push(ExportedBlock { key: *key, origin: OriginId([9; 16]), content, digests });
            payload.extend_from_slice(&bytes);
        }
        let run = Run {
            namespace: self.guest.namespace,
            coordinate,
            group,
            created_ms: self.tier.access().time().wall_ms(),
            expires_ms: 0,
            first_block: Some(0),
            parent: Parent::Root,
            block_bytes: shape.block_bytes(),
            blocks,
        };
        (run, Bytes::from(payload))
    }

    /// The bucket is in trouble from now on, or in other trouble than before.
    pub(super) fn trouble(&self, rng: &mut Rng) {
        let kind = match rng.below(6) {
            0 | 1 => Kind::Busy(None),
            2 => Kind::Busy(Some(Duration::from_secs(rng.between(1, 20)))),
            3 => Kind::Outage,
            4 => Kind::Silent,
            _ => {
                let kinds =
                    vec![Kind::Busy(None), Kind::Outage, Kind::Slow(Duration::from_secs(3)), Kind::Lost];
                return self.faulty.plan(Plan { thousandths: 400, kinds, ..Plan::default() });
            }
        };
        self.faulty.all(Some(kind));
    }

    /// It answers again.
    pub(super) fn heal(&self) {
        self.faulty.all(None);
    }

    async fn restored(&self, keys: &[BlockKey]) -> Result<Restored, ColdError> {
        let (group, coordinate) = pages();
        let wanted = Wanted {
            namespace: self.guest.namespace,
            group,
            coordinate,
            keys: keys.to_vec(),
            durability: Durability::Relaxed,
        };
        let options = FetchOptions::for_restore(1 << 20, 4);
        restore_and_tell(&self.tier, &self.guest.store, &wanted, &options, &*self.memory, |_| ()).await
    }

    /// Restores blocks, as many as come, and reads them.
    pub(super) async fn restore(&self, what: &str, keys: &[BlockKey]) {
        // While the bucket is in trouble it may fail; what it brings is looked at by the read.
        drop(self.restored(keys).await);
        self.read(what, keys).await;
    }

    /// Reads blocks into memory of its own: what requests share is for the other reads of the tenant.
    async fn read(&self, what: &str, keys: &[BlockKey]) -> Vec<u32> {
        let shape = &self.guest.shape;
        let memory = fixture::memory(shape.block_bytes() * keys.len() as u64, 0);
        match Placed::blocks(shape, memory, keys.len() as u32) {
            Ok(into) => self.guest.read_into(what, (keys, into), Order::Blocks, None).await,
            Err(_) => Vec::new(),
        }
    }

    /// Deletes blocks here and in the bucket; they are gone if the bucket says so.
    pub(super) async fn delete(&self, keys: &[BlockKey]) -> bool {
        keys.iter().for_each(|key| {
            self.deleted().entry(*key).or_default();
        });
        self.guest.delete(keys).await;
        let deleted = [Deleted::Keys(keys.to_vec())];
        let is_done = withdraw(&self.tier, self.guest.namespace, &deleted).await.is_ok();
        if is_done {
            self.deleted().extend(keys.iter().map(|key| (*key, true)));
        }
        is_done
    }

    /// Looks at a restore of everything, and at what is read afterwards: what was deleted is not there, and what no delete named is.
    async fn restore_everything(&self, what: &str) {
        let restored = self.restored(&self.keys).await;
        let good = self.read(what, &self.keys).await;
        let deleted = self.deleted().clone();
        for (at, key) in (0u32..).zip(&*self.keys) {
            let is_wrong = match deleted.get(key) {
                None => !good.contains(&at),
                Some(is_acknowledged) => *is_acknowledged && good.contains(&at),
            };
            if is_wrong {
                self.violation(format!(
                    "{what}: block {at}, deleted {deleted:?}: {good:?} after {restored:?}"
                ));
            }
        }
    }

    /// The bucket answers again: all comes back that was not deleted, and deletes are done.
    pub(super) async fn look(self) {
        self.restore_everything("a restore after the trouble").await;
        if !self.delete(&self.keys).await {
            self.violation("a delete failed although the bucket answers again".to_owned());
        }
        self.restore_everything("a restore after everything was deleted").await;
    }
}
