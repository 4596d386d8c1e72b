//! Compaction without being asked: a task of each executor that looks at the books by the clock and works where there
//! is a need.
//!
//! - **Dead space**: the store fills most of its budget and enough of that is dead. Segments that are mostly dead are
//!   emptied; what is cold in them is encoded on the way.
//! - **Small records**: enough of them were put since the last merge. The first executor merges for all.
//! - **Space is short**: next to nothing of the budget is left. Cold records are encoded where they lie.
//!
//! It runs in the lowest class, within a budget of device bytes a second, one record at a time in each shard. A stop
//! ends it after the record that it is at. It appends to logs, so nothing that makes room for an append may wait for
//! it; it begins nothing for which there is no room.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::chains::{Shards, merge, merge_all};
use super::{CompactOptions, Pace, segments};
use crate::engine::shard::Shard;
use crate::engine::shared::Shared;
use crate::rt::Runtime;

/// When a store compacts by itself, and how fast.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Compaction {
    /// How often it looks for something to do; `None` compacts only when asked to.
    pub every: Option<Duration>,
    /// Device bytes a second, read and written together, for each executor.
    pub bytes_per_second: u64,
    /// Thousandths of the budget that must be dead for segments to be emptied.
    pub dead_thousandths: u32,
    /// Small records of known prefixes that must have been put since the last merge for another one.
    pub merge_after_records: u64,
    /// Thousandths of the budget that must be taken for space to be short.
    pub short_thousandths: u32,
    /// How long blocks must have lain unused to be cold; `None` never encodes.
    pub encode_cold_after: Option<Duration>,
}

impl Default for Compaction {
    fn default() -> Self {
        Self {
            every: Some(Duration::from_secs(10)),
            bytes_per_second: 64 << 20,
            dead_thousandths: 250,
            merge_after_records: 4096,
            short_thousandths: 900,
            encode_cold_after: Some(Duration::from_secs(600)),
        }
    }
}

/// Thousandths of a segment that must be dead for it to be emptied without being asked: a move then writes less than
/// two thirds of what it frees.
const SEGMENT_DEAD_THOUSANDTHS: u32 = 600;
/// Small records that must follow each other to be merged.
const MERGE_RECORDS_MIN: u32 = 8;
/// The work of one pass is limited to this multiple of the bytes of its interval; then the need is computed again.
const INTERVALS_MAX: u64 = 3;

/// What there is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Need {
    empty: bool,
    encode: bool,
    merge: bool,
}

impl Compaction {
    /// `merged_at` is what the counter of small records said at the last merge, `has_left` whether that had no time for some.
    fn need(&self, shared: &Shared, merged_at: u64, has_left: bool) -> Need {
        if shared.latched().is_some() {
            return Need::default();
        }
        let report = shared.space_report();
        let part = |bytes: u64| u128::from(bytes) * 1000 / u128::from(report.budget.max(1));
        let short = part(report.total.allocated) >= u128::from(self.short_thousandths);
        let counts = shared.counters.counts();
        Need {
            empty: short && part(report.total.dead) >= u128::from(self.dead_thousandths),
            encode: short && self.encode_cold_after.is_some(),
            merge: has_left
                || counts.small_records_stored.saturating_sub(merged_at) >= self.merge_after_records,
        }
    }

    fn options(&self, need: Need, every: Duration) -> CompactOptions {
        let interval = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
        let most = self.bytes_per_second.saturating_mul(INTERVALS_MAX) / 1000;
        CompactOptions {
            // At a thousand no segment is worth it.
            dead_thousandths: if need.empty { SEGMENT_DEAD_THOUSANDTHS } else { 1000 },
            merge_records_min: MERGE_RECORDS_MIN,
            bytes_per_second: self.bytes_per_second,
            bytes_max: most.saturating_mul(interval).max(1),
            encode_cold_after: self.encode_cold_after,
            encode_in_place: need.encode,
        }
    }
}

/// The shards of an executor.
type Own = Rc<RefCell<BTreeMap<u32, Rc<Shard>>>>;

/// Runs until the executor stops. `merging` is given to one executor of a store.
pub(crate) async fn keep(
    rt: Rc<dyn Runtime>,
    stopping: Rc<std::cell::Cell<bool>>,
    (own, compaction): (Own, Compaction),
    merging: Option<(Arc<Shared>, Arc<dyn Shards>)>,
) {
    let first = own.borrow().values().next().map(|shard| Arc::clone(&shard.volume.shared));
    let (Some(every), Some(shared)) = (compaction.every, first) else { return };
    let (mut merged_at, mut noted) = (0, VecDeque::new());
    // One for all rounds: what a round did, the next one waits for.
    let mut pace = Pace::new(&rt, &compaction.options(Need::default(), every), Rc::clone(&stopping));
    while !stopping.get() {
        rt.sleep_until(rt.clock().now().plus(every)).await;
        if stopping.get() {
            break;
        }
        let need = compaction.need(&shared, merged_at, !noted.is_empty());
        let options = compaction.options(need, every);
        pace.renew(options.bytes_max);
        // What went wrong is tried again when the need is looked at again; an error that latches ends the need.
        if let Some((shared, shards)) = merging.as_ref().filter(|_| need.merge) {
            merged_at = shared.counters.counts().small_records_stored;
            let _ = match kvarts_layout::planted!("merge-looks-at-all") {
                true => merge_all(shared, &**shards, &options, &mut pace).await,
                false => merge(shared, &**shards, &options, &mut pace, &mut noted).await,
            };
        }
        if need.empty || need.encode {
            // Those that there are now: a directory may have come back.
            let shards: Vec<_> = own.borrow().values().map(Rc::clone).collect();
            let _ = segments::empty_all(&shards, &options, &mut pace).await;
        }
    }
}
