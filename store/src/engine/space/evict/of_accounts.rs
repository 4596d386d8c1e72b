//! Room in a quota: blocks of some accounts leave a shard, chosen by the store's policy among the segments in which their
//! blocks are the coldest. Nothing is punched for it: their bytes are dead until the budget needs them.
//!
//! The work is a walk over the accounts' records in this shard, which are kept apart from others', and the footers of a
//! few segments. Each time a share of what they have here goes, so that the next walk is that many bytes away.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvarts_layout::format::footer::Footer;

use super::choose::{self, Candidates};
use crate::engine::shared::record_class::RecordClass;
use crate::engine::shared::visibility::Departure;
use crate::engine::space::Space;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::segment::Segment;
use crate::index::OwnerCursor;

/// Each time at least this part of what the accounts have in the shard goes.
const SHARE: u64 = 16;
/// Records that are listed without a turn for others where no footer lists them yet.
const LISTED_AT_ONCE: usize = 64;

impl Space {
    /// Evicts blocks of these accounts, by their numbers in the ledger, that are worth `least` bytes, or all that may go. Gives how
    /// many blocks went.
    pub(crate) async fn evict_of(&self, accounts: &BTreeSet<u32>, least: u64) -> u64 {
        let shared = &self.volume.shared;
        // Expired leases are removed first: the choice sees only whether there is a lease.
        shared.index.expire(shared.clock.now());
        let (segments, bytes) = self.coldest_of(accounts).await;
        let wanted = least.max(bytes / SHARE);
        let is_theirs =
            |class: &RecordClass| accounts.contains(&shared.index.records().ledger().number_of(class.number));
        let among = Candidates { segments, of: Some(&is_theirs) };
        let (victims, footers) = choose::choose(self, shared.policy(), among, wanted).await;
        let mut section = Section::begin(&shared.work.quotas, &*shared.clock);
        let (mut columns, mut gone) = (BTreeMap::new(), 0);
        for number in self.last_first(victims.keys().copied().collect()) {
            let segment = self.volume.segments.borrow().get(&number).map(Rc::clone);
            if let Some(segment) = segment
                && let Some(leaving) = victims.get(&number)
                && let Some((generation, footer)) = footers.get(&number)
                && *generation == segment.generation.get()
            {
                let why = Departure::Quota;
                gone += self.evict_some((&segment, footer), (leaving, why), &mut columns, &mut section).await;
            }
        }
        gone
    }

    /// The segments in which these accounts have live blocks, those first of which a record was unused for longest, and the bytes
    /// of all these blocks.
    async fn coldest_of(&self, accounts: &BTreeSet<u32>) -> (Vec<(i64, Rc<Segment>)>, u64) {
        let shared = &self.volume.shared;
        let mut section = Section::begin(&shared.work.quotas, &*shared.clock);
        let (mut oldest, mut bytes, mut some) = (BTreeMap::<u32, u32>::new(), 0u64, Vec::new());
        for account in accounts {
            let mut cursor = Some(OwnerCursor::default());
            while let Some(from) = cursor {
                let owner = (self.volume.shard as u16, Some(*account));
                cursor = shared.index.records().snapshot_of(owner, from, &mut some);
                for (_, record, used) in some.iter().filter(|(_, record, _)| record.live > 0) {
                    bytes = bytes.saturating_add(record.share(record.live));
                    let oldest = oldest.entry(record.segment).or_insert(*used);
                    *oldest = (*oldest).min(*used);
                }
                section.step(some.len().max(1) as u64).await;
            }
        }
        let segments = self.volume.segments.borrow();
        let found = |(number, used)| {
            let segment = segments.get(&number)?;
            Some((shared.step_of(used), segment.first_sequence.get(), Rc::clone(segment)))
        };
        let mut all: Vec<_> = oldest.into_iter().filter_map(found).collect();
        all.sort_unstable_by_key(|(step, sequence, _)| (*step, *sequence));
        (all.into_iter().map(|(step, _, segment)| (step, segment)).collect(), bytes)
    }

    /// What a segment lists that is not sealed yet, or whose footer is being written.
    pub(super) async fn listed_in_memory(&self, segment: &Segment, section: &mut Section<'_>) -> Footer {
        let mut records = Vec::new();
        loop {
            {
                let tail = segment.tail.borrow();
                let listed = tail.sealing.as_ref().map_or(&tail.entries, |footer| &footer.records);
                let next = listed.iter().skip(records.len()).take(LISTED_AT_ONCE);
                let before = records.len();
                records.extend(next.cloned());
                if records.len() == before {
                    break Footer { records };
                }
            }
            section.step(LISTED_AT_ONCE as u64).await;
        }
    }
}
