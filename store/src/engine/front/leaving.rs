//! Which blocks of a shard are near their eviction and were used: what a tier behind the disks may want to have before they go. And
//! which blocks a shard has, segment by segment, for a tier that is to have all of them.
//!
//! Eviction looks at the sealed segments whose oldest part is the oldest, and so does this, without choosing: it changes nothing,
//! holds nothing, and runs beside eviction as any other background task. It may name a block that stays, and miss one that goes.

use std::rc::Rc;

use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::{BlockKey, Coordinate, Group};

use crate::engine::compact::relocate::expires_ms;
use crate::engine::read::Reads;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::segment::{Segment, SegmentState};
use kvarts_contract::api::{Leaving, SegmentBlocks};
use kvarts_contract::error::Reason;

/// Segments that one question looks at.
const SEGMENTS: usize = 4;
/// Blocks that one answer names, about: a record more at most.
const BLOCKS: usize = 4096;

/// The blocks of a shard that may go next and were used at least so often since they were last cooled, those first that were unused
/// for longest.
pub(crate) async fn list(reads: &Reads, least_uses: u8) -> Result<Vec<Leaving>, Reason> {
    let mut segments: Vec<Rc<Segment>> = reads.segments_from(0);
    segments.retain(|segment| segment.state.get() == SegmentState::Sealed && segment.book.live() > 0);
    segments.sort_by_key(|segment| (segment.coldest.get(), segment.first_sequence.get()));
    let (mut found, mut blocks) = (Vec::new(), 0);
    let shared = &reads.volume.shared;
    for segment in segments.iter().take(SEGMENTS) {
        let entries = reads.listing(segment).await?;
        let mut section = Section::begin(&shared.work.evictions, &*shared.clock);
        for entry in &entries {
            let Content::Blocks(of) = &entry.content else { continue };
            section.step(of.blocks.len() as u64).await;
            for leaving in runs(reads, segment, entry, of, least_uses) {
                blocks += leaving.keys.len();
                found.push(leaving);
            }
            if blocks >= BLOCKS {
                return Ok(found);
            }
        }
    }
    Ok(found)
}

/// The blocks of the first segment of a shard from this number on that has any, and the number to go on with; none: there are no more. What is
/// moved to a segment before meanwhile is left out.
pub(crate) async fn held(reads: &Reads, from: u32) -> Result<SegmentBlocks, Reason> {
    let shared = &reads.volume.shared;
    for segment in reads.segments_from(from) {
        let entries = reads.listing(&segment).await?;
        let mut found = Vec::new();
        let mut section = Section::begin(&shared.work.evictions, &*shared.clock);
        for entry in &entries {
            let Content::Blocks(of) = &entry.content else { continue };
            section.step(of.blocks.len() as u64).await;
            found.extend(runs(reads, &segment, entry, of, 0));
        }
        drop(section);
        if !found.is_empty() {
            return Ok(SegmentBlocks { runs: found, next: segment.number.checked_add(1) });
        }
    }
    Ok(SegmentBlocks::default())
}

/// The stretches of a record that are live there and were used so often.
fn runs(reads: &Reads, segment: &Segment, entry: &Entry, of: &Blocks, least_uses: u8) -> Vec<Leaving> {
    let Some(coordinate) = Coordinate::from_u64(of.coordinate) else { return Vec::new() };
    let shared = &reads.volume.shared;
    let (namespace, group) = (segment.local(of.namespace), Group(of.group));
    let mut found: Vec<Leaving> = Vec::new();
    // Where the stretch that grows ends, and when its record expires.
    let mut grows: Option<(usize, u32)> = None;
    for (place, name) in of.blocks.iter().enumerate() {
        let key = BlockKey(name.key);
        let located = shared.index.locate(shared.index.key().of(namespace, &key, group, coordinate));
        let located = located.filter(|located| {
            located.heat.frequency >= least_uses
                && reads.volume.is_at(segment, entry.offset, &located.record)
                && usize::from(located.location.block) == place
        });
        let Some(located) = located else { continue };
        let expires = located.record.expires;
        if let Some(last) = found.last_mut().filter(|_| grows == Some((place, expires))) {
            last.keys.push(key);
        } else {
            let Some(class) = shared.classes.get(located.record.class) else { continue };
            if !shared.names.is_current(&class.namespace) {
                continue;
            }
            let before = place.checked_sub(1).and_then(|before| of.blocks.get(before));
            found.push(Leaving {
                namespace: class.namespace.id,
                group,
                coordinate,
                keys: vec![key],
                parent: of.parent.behind(before),
                first_block: of.first_block.and_then(|first| first.checked_add(place as u32)),
                created_ms: of.created_ms,
                expires_ms: expires_ms(shared, of.expires_ms, expires),
            });
        }
        grows = Some((place + 1, expires));
    }
    found
}
