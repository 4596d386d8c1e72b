//! When blocks of a namespace were produced. The index does not keep it; what segments list does, and a search for what a delete
//! that comes late is to take needs it.

use std::sync::Arc;

use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::{BlockKey, Coordinate, Group};

use crate::engine::read::Reads;
use crate::engine::read::listing::parent_of;
use crate::engine::shared::names::Namespace;
use crate::engine::tasks::notify::Section;
use crate::engine::volume::segment::Segment;
use kvarts_contract::error::Reason;

/// Blocks after which a shard answers.
const ANSWER_BLOCKS: usize = 1 << 16;

/// A block that is here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Produced {
    /// Its group.
    pub group: Group,
    /// Its coordinate.
    pub coordinate: Coordinate,
    /// Its key.
    pub key: BlockKey,
    /// The block that it stands behind, if its put said so.
    pub parent: Option<BlockKey>,
    /// When it was first stored anywhere, in milliseconds since 1970; no later than that where records were merged.
    pub produced_ms: u64,
}

/// Some blocks of a namespace that lie in a shard.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ProducedPage {
    /// The blocks.
    pub blocks: Vec<Produced>,
    /// The segment to go on with, if there is more.
    pub next: Option<u32>,
}

/// What a shard is asked for.
pub(crate) struct Ask {
    pub(crate) shard: u32,
    pub(crate) namespace: Arc<Namespace>,
    /// The first segment.
    pub(crate) from: u32,
}

/// The blocks of a namespace that this shard lists and that are here.
pub(crate) async fn list(reads: &Reads, ask: &Ask) -> Result<ProducedPage, Reason> {
    let (mut blocks, mut section) = (Vec::new(), Section::default());
    for segment in reads.segments_from(ask.from) {
        if blocks.len() >= ANSWER_BLOCKS {
            return Ok(ProducedPage { blocks, next: Some(segment.number) });
        }
        for entry in reads.listing(&segment).await? {
            let Content::Blocks(of) = &entry.content else { continue };
            if segment.local(of.namespace) == ask.namespace.local {
                take(reads, (&segment, &entry, of), &mut blocks);
                reads.volume.shared.work.searches.add(1 + of.blocks.len() as u64);
                section.spend(1 + of.blocks.len() as u64 / 8).await;
            }
        }
    }
    Ok(ProducedPage { blocks, next: None })
}

/// The blocks of a record that are here.
fn take(reads: &Reads, (segment, entry, of): (&Segment, &Entry, &Blocks), blocks: &mut Vec<Produced>) {
    let Some(coordinate) = Coordinate::from_u64(of.coordinate) else { return };
    let (volume, namespace, group) = (&reads.volume, segment.local(of.namespace), Group(of.group));
    for (place, name) in of.blocks.iter().enumerate() {
        let key = BlockKey(name.key);
        let print = volume.shared.index.key().of(namespace, &key, group, coordinate);
        let found = volume.shared.index.locate(print);
        if found.is_some_and(|found| volume.is_at(segment, entry.offset, &found.record)) {
            let (parent, produced_ms) = (parent_of(of, place), of.created_ms);
            blocks.push(Produced { group, coordinate, key, parent, produced_ms });
        }
    }
}
