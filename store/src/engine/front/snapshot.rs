//! What is here, by whole names: pages of a snapshot. They are read from what the segments list, on the executor that owns
//! them, and the index says what of it is live.

use crate::engine::read::Reads;
use kvarts_contract::api::{SnapshotCursor, SnapshotPage};
use kvarts_contract::error::Reason;
use kvarts_contract::events::PAGE_BLOCKS;

/// The page at a cursor: blocks of one segment of the cursor's shard, and where the next begins.
pub(crate) async fn page(reads: &Reads, shards: u32, cursor: SnapshotCursor) -> Result<SnapshotPage, Reason> {
    let mut page = SnapshotPage { sequence: cursor.sequence, blocks: Vec::new(), next: None };
    let mut first = cursor.record as usize;
    for segment in reads.segments_from(cursor.segment) {
        let entries = reads.listing(&segment).await?;
        let passed = if segment.number == cursor.segment { first } else { 0 };
        for (place, entry) in entries.iter().enumerate().skip(passed) {
            if page.blocks.len() >= PAGE_BLOCKS {
                let record = u32::try_from(place).unwrap_or(u32::MAX);
                page.next = Some(SnapshotCursor { segment: segment.number, record, ..cursor });
                return Ok(page);
            }
            let Some((class, named)) = reads.live(&segment, entry) else { continue };
            if reads.volume.shared.names.is_current(&class.namespace) {
                page.blocks.extend(named.iter().map(|block| class.name(block.key)));
            }
        }
        first = 0;
    }
    let next = cursor.shard + 1;
    page.next = (next < shards).then_some(SnapshotCursor { shard: next, segment: 0, record: 0, ..cursor });
    Ok(page)
}
