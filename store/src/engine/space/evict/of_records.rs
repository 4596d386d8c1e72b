//! Room in a quota: records that were chosen elsewhere (`shared::quota`) leave a shard. The index knows fingerprints only, so
//! the header of each is read for the names of its blocks, which events carry. Nothing is punched: the bytes are dead
//! until the budget needs them.

use std::collections::BTreeMap;

use kvarts_layout::format::footer::Content;

use crate::engine::shared::quota::{self, Gone, ToGo};
use crate::engine::shared::visibility::Departure;
use crate::engine::space::Space;
use crate::engine::tasks::steps::{AT_ONCE, Section};
use kvarts_contract::class::Class;

/// Blocks of a record that go without a turn for others.
const BLOCKS_AT_ONCE: usize = 64;

impl Space {
    /// Evicts the blocks of these records, each from its end, up to one that a lease holds or on which something hangs. Nothing more
    /// goes once no task waits for it.
    pub(crate) async fn evict_records(
        &self,
        records: &[ToGo],
        class: Class,
        is_over: &dyn Fn() -> bool,
    ) -> Gone {
        let shared = &self.volume.shared;
        let same =
            |(id, lies): &ToGo| shared.index.records().get(*id).filter(|info| quota::is_same(info, *lies));
        let mut section = Section::begin(&shared.work.quotas, &*shared.clock);
        let (mut columns, mut gone) = (BTreeMap::new(), Gone::default());
        for record in records {
            let (id, Some(info)) = (record.0, same(record)) else { continue };
            section.pause();
            let listed = self.reads.by_header(&info, class).await;
            let Some((segment, entry)) = listed.as_ref().filter(|_| same(record).is_some()) else { continue };
            let Content::Blocks(blocks) = &entry.content else { continue };
            let named = self.reads.live(segment, entry).map_or_else(Vec::new, |(_, named)| named);
            // The columns of a namespace are looked for among all.
            let is_new = !columns.contains_key(&segment.local(blocks.namespace));
            section.step(if is_new { AT_ONCE } else { 1 + named.len() as u64 }).await;
            if is_over() {
                break;
            }
            let own = named.iter().filter(|one| one.at.record == id);
            let mut leaving: Vec<_> = own.map(|one| (one.at, one.print)).collect();
            leaving.sort_unstable_by_key(|(at, _)| std::cmp::Reverse(at.block));
            let mut went = 0;
            for some in leaving.chunks(BLOCKS_AT_ONCE) {
                let of_these = self.evict_blocks(blocks, some, &mut columns, Departure::Quota);
                section.step(some.len() as u64).await;
                went += of_these;
                if of_these < some.len() as u64 {
                    break;
                }
            }
            gone.blocks += went;
            if went > 0 && went == leaving.len() as u64 {
                gone.records.push(id);
            }
        }
        gone
    }
}
