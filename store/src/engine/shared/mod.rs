//! What all threads of one open store share: index, names, budget, counters.

pub(crate) mod admission;
pub(crate) mod batches;
pub(crate) mod budget;
pub(crate) mod chains;
pub(crate) mod directories;
pub(crate) mod disk_path;
pub(crate) mod due;
pub(crate) mod favoured;
pub(crate) mod grace;
pub(crate) mod health;
pub(crate) mod index_budget;
pub(crate) mod names;
pub(crate) mod policy;
pub(crate) mod quota;
pub(crate) mod recency;
pub(crate) mod recently_gone;
pub(crate) mod record_class;
pub(crate) mod spare_room;
pub(crate) mod visibility;

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kvarts_layout::StoreId;
use kvarts_layout::format::Secret;

use crate::engine::tasks::steps::Works;
use crate::index::{Heat, Index, RecordId};
use admission::Admission;
use batches::Batches;
use budget::Budget;
use chains::CutOff;
use directories::Directories;
use disk_path::DiskPath;
use due::{Due, stretch_of};
use favoured::Favoured;
use grace::ReaderEpochs;
use health::State;
use index_budget::IndexBudget;
use kvarts_contract::buffers::{Buf, BufMut};
use kvarts_contract::clock::{Clock, Entropy, Nanos};
use kvarts_contract::events::{EventLog, RING_BYTES};
use kvarts_contract::sync::atomic::{AtomicU64, Ordering};
use kvarts_contract::sync::{Mutex, OnceLock};
use names::Names;
use policy::EvictionPolicy;
use quota::SilentShards;
use recency::RecencyClock;
use recently_gone::RecentlyGone;
use record_class::RecordClasses;
use spare_room::SpareRoom;

/// Expiry is kept in steps of a tenth of a second: 32 bits of them last thirteen years.
pub(super) const EXPIRY_STEP_MS: u64 = 100;
/// Zero bytes that gaps between chunks are written from.
const ZERO_BYTES: usize = 64 << 10;

macro_rules! counters {
    ($(#[doc = $help:literal] $name:ident),* $(,)?) => {
        /// Counters since the store was opened. Each only grows.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64),* }

        /// Counters since the store was opened.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Counts { $(#[doc = $help] pub $name: u64),* }

        impl Counts {
            /// All of them by name, in the order of their declaration.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            /// What each counts, in the same order: a sentence.
            pub fn helps() -> Vec<&'static str> {
                vec![$($help.trim_ascii()),*]
            }
        }

        impl Counters {
            pub(crate) fn counts(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Blocks written.
    blocks_stored,
    /// Blocks of puts that were already stored.
    blocks_deduplicated,
    /// Blocks of puts that were refused.
    blocks_refused,
    /// Blocks of puts that were refused because the daily write budget was used up.
    blocks_not_admitted,
    /// Payload bytes of the blocks written.
    payload_bytes_stored,
    /// Bytes of the records written, including headers and padding.
    record_bytes_written,
    /// Small records of known prefixes that puts wrote; they are candidates for merging.
    small_records_stored,
    /// Blocks that were moved to another record.
    blocks_moved,
    /// Bytes of the records that moves wrote, including headers and padding.
    moved_bytes_written,
    /// Raw records that were encoded.
    records_encoded,
    /// Payload bytes of encoded records, before encoding.
    encoded_bytes_before,
    /// Payload bytes of encoded records, after encoding.
    encoded_bytes_after,
    /// Blocks that were delivered completely and verified.
    blocks_read,
    /// Bytes read from devices by reads of blocks.
    device_bytes_read,
    /// Bytes of reads that were copied from another read of the same blocks (single flight).
    bytes_shared,
    /// Chunks whose digest did not match.
    chunks_damaged,
    /// Blocks taken out of service because of damage.
    blocks_quarantined,
    /// Segments recycled.
    segments_recycled,
    /// Bytes freed in the file system by punching holes.
    bytes_punched,
    /// Blocks evicted to make room.
    blocks_evicted,
    /// Blocks deleted.
    blocks_deleted,
    /// Blocks that expired.
    blocks_expired,
}

/// What all threads share.
pub(crate) struct Shared {
    pub(crate) store: StoreId,
    pub(crate) secret: Secret,
    pub(crate) segment_bytes: u64,
    pub(crate) shards: u32,
    /// When the store was made: expiry is counted from here.
    pub(crate) created_ms: u64,
    pub(crate) index: Index,
    pub(crate) names: Names,
    pub(crate) classes: RecordClasses,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) counters: Counters,
    pub(crate) events: Arc<EventLog>,
    /// Shards of which nothing is chosen for a quota.
    pub(crate) silent: SilentShards,
    /// Why blocks went that are not here.
    pub(crate) gone: RecentlyGone,
    /// The way to what other shards do not use.
    spare_room: SpareRoom,
    /// Which directories are in use.
    pub(crate) directories: Directories,
    /// What reads take.
    pub(crate) disk_path: DiskPath,
    /// Reads that do not hold their segments yet.
    pub(crate) arrivals: ReaderEpochs,
    /// The clocks at opening.
    pub(super) opened: (Nanos, u64),
    /// Productions from now on are said to be later than this, in milliseconds since 1970.
    pub(super) produced_after: AtomicU64,
    /// The most payload bytes of one record.
    pub(crate) record_bytes_max: u64,
    pub(super) budget: Budget,
    /// How much is done at a time.
    pub(crate) batches: Batches,
    /// Why nothing is written, if so, and who has died.
    pub(super) health: State,
    zeros: OnceLock<Option<Buf>>,
    /// Tombstones and epochs that checkpoints list, of all shards.
    pub(crate) buried: AtomicU64,
    /// The coarse time by which blocks age.
    pub(crate) ages: RecencyClock,
    /// What work has taken.
    pub(crate) work: Works,
    /// How much memory the index may take.
    pub(crate) index_room: IndexBudget,
    /// Where something will expire.
    pub(crate) due: Due,
    /// What is let in.
    pub(crate) admission: Admission,
    /// What goes last.
    pub(crate) favoured: Favoured,
    /// Live blocks that cannot be used, as they were counted last.
    pub(crate) cut_off: CutOff,
    /// How often blocks are being pointed elsewhere and are not counted as moved yet.
    pub(crate) switching: AtomicU64,
    /// The policy's place among all.
    eviction: AtomicU64,
    /// Records whose blocks another shard's recovery has taken over; held until all shards are recovered.
    superseded: Mutex<Vec<RecordId>>,
}

/// What a store begins with.
pub(crate) struct Birth {
    pub(crate) store: StoreId,
    pub(crate) secret: Secret,
    pub(crate) segment_bytes: u64,
    pub(crate) created_ms: u64,
    pub(crate) budget: u64,
    pub(crate) record_bytes_max: u64,
    pub(crate) shards: u32,
}

impl Shared {
    pub(crate) fn new(birth: Birth, clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        let mut seed = [0; 32];
        entropy.fill(&mut seed);
        let mut stream = [0; 8];
        entropy.fill(&mut stream);
        let opened = (clock.now(), clock.unix_millis());
        let budget = Budget::new(&birth);
        let index = Index::new(&seed, 0);
        let classes = RecordClasses::new(Arc::clone(index.records().ledger()));
        Self {
            store: birth.store,
            secret: birth.secret,
            segment_bytes: birth.segment_bytes,
            shards: birth.shards,
            created_ms: birth.created_ms,
            index,
            names: Names::default(),
            classes,
            clock,
            entropy,
            counters: Counters::default(),
            silent: SilentShards::default(),
            gone: RecentlyGone::default(),
            spare_room: SpareRoom::default(),
            directories: Directories::default(),
            disk_path: DiskPath::default(),
            arrivals: ReaderEpochs::default(),
            events: EventLog::new(u64::from_le_bytes(stream), RING_BYTES),
            opened,
            produced_after: AtomicU64::new(0),
            record_bytes_max: birth.record_bytes_max,
            budget,
            batches: Batches::default(),
            health: State::default(),
            zeros: OnceLock::new(),
            buried: AtomicU64::new(0),
            ages: RecencyClock::new(opened.0),
            work: Works::default(),
            due: Due::default(),
            index_room: IndexBudget::default(),
            admission: Admission::default(),
            favoured: Favoured::default(),
            cut_off: CutOff::default(),
            switching: AtomicU64::new(0),
            eviction: AtomicU64::new(0),
            superseded: Mutex::default(),
        }
    }

    /// How much is done at a time, from before the first shard is opened.
    pub(crate) fn set_batches(&mut self, batches: Batches) {
        self.batches = batches;
    }

    /// Its directories, from before the first shard is opened.
    pub(crate) fn set_directories(&mut self, directories: Directories) {
        self.directories = directories;
    }

    /// Zero bytes to write from; they are never written to.
    pub(crate) fn zeros(&self, len: u64) -> Option<Buf> {
        let zeros = self.zeros.get_or_init(|| BufMut::zeroed(ZERO_BYTES).ok().map(BufMut::freeze));
        zeros.as_ref()?.slice(0, usize::try_from(len).ok()?)
    }

    /// A time as expiry counts it: tenths of a second since the store was made; never zero, which means never.
    pub(crate) fn expiry_step(&self, at_ms: u64) -> u32 {
        let seconds = at_ms.saturating_sub(self.created_ms).div_ceil(EXPIRY_STEP_MS).max(1);
        u32::try_from(seconds).unwrap_or(u32::MAX)
    }

    /// When something ends that may live so long from now: in milliseconds since 1970, and as the index counts it.
    pub(crate) fn expires_after(&self, ttl: Duration) -> (u64, u32) {
        let passing = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let at_ms = self.wall_ms().saturating_add(passing).max(1);
        (at_ms, self.expiry_step(at_ms))
    }

    /// A record in this segment of a shard expires, or not (0).
    pub(crate) fn note_expiry(&self, place: (u32, u32), expires: u32) {
        if expires != 0 {
            self.due.note(place, stretch_of(expires));
        }
    }

    /// Whether the time of some record may be over.
    pub(crate) fn may_be_expired(&self) -> bool {
        self.due.may_be_over(stretch_of(self.expiry_now()))
    }

    /// Gives up the index's number of a record that has no live block left. A reader that still knows it finds another
    /// record's header, or none, and answers a miss.
    pub(crate) fn free_if_empty(&self, record: RecordId, left: u16) {
        if left == 0 {
            // Refused if a block of it became live meanwhile: then it is not empty.
            let _ = self.index.free_record(record);
        }
    }

    /// A held record has lost a block to another shard's copy while shards are recovered.
    pub(crate) fn supersede(&self, record: RecordId) {
        self.superseded.lock().unwrap_or_else(PoisonError::into_inner).push(record);
    }

    /// All shards are recovered: records that have lost their last block to another shard's copy are forgotten.
    pub(crate) fn forget_superseded(&self) {
        let superseded = std::mem::take(&mut *self.superseded.lock().unwrap_or_else(PoisonError::into_inner));
        for record in superseded {
            let records = self.index.records();
            let left = records.get(record).map_or(0, |info| info.live);
            self.free_if_empty(record, left);
            self.index.release_record(record);
        }
    }

    /// The coarse time that the index keeps of a block's last use.
    pub(crate) fn epoch(&self) -> u16 {
        self.ages.epoch(self.clock.now())
    }

    /// Bytes of blocks are written: what is here grows older.
    pub(crate) fn wrote(&self, bytes: u64) {
        self.ages.wrote(bytes, self.space().1, self.clock.now());
    }

    /// The second of this moment, as records know their last use.
    pub(crate) fn second(&self) -> u32 {
        u32::try_from(self.wall_ms() / 1000).unwrap_or(u32::MAX)
    }

    /// How many steps ago a record was used last whose last use was in this second: never too many.
    pub(crate) fn age_of(&self, second: u32) -> u32 {
        let ended_ms = u64::from(second) * 1000 + 999;
        self.ages.steps_in(Duration::from_millis(self.wall_ms().saturating_sub(ended_ms)), self.clock.now())
    }

    /// The same as a step since opening.
    pub(crate) fn step_of(&self, second: u32) -> i64 {
        self.ages.steps() as i64 - i64::from(self.age_of(second))
    }

    /// How long a block has not been used, at least, whose record was used last in this second.
    pub(crate) fn unused(&self, heat: &Heat, second: u32) -> Duration {
        let now = self.clock.now();
        let record = self.wall_ms().saturating_sub(u64::from(second) * 1000 + 999);
        self.ages.since(heat.age(self.ages.epoch(now)), now).max(Duration::from_millis(record))
    }

    /// What chooses the blocks that go.
    pub(crate) fn policy(&self) -> EvictionPolicy {
        let chosen = EvictionPolicy::ALL.get(self.eviction.load(Ordering::Relaxed) as usize);
        chosen.copied().unwrap_or_default()
    }

    /// Has blocks chosen by this policy from now on.
    pub(crate) fn set_policy(&self, policy: EvictionPolicy) {
        let at = EvictionPolicy::ALL.iter().position(|one| *one == policy).unwrap_or(0);
        self.eviction.store(at as u64, Ordering::Relaxed);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shared({})", self.store)
    }
}
