//! The names of blocks that a quota took out, read from their records, for the events (`shared::quota_events`).

use std::rc::Rc;

use kvarts_layout::BlockKey;
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::record::{self, Body};

use crate::engine::shared::Shared;
use crate::engine::shared::quota_events::Unnamed;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::Hold;
use crate::index::Lookup;
use kvarts_contract::class::Class;
use kvarts_contract::events::{Cause, EventKind, Subject};

/// Tells of what waits for this shard.
pub(crate) async fn tell(volume: &Volume) {
    for unnamed in volume.shared.unnamed.take(volume.shard) {
        match names(volume, &unnamed).await {
            Some(body) => tell_of(&volume.shared, &unnamed, &body),
            None => volume.shared.events.change().lose(),
        }
    }
}

fn tell_of(shared: &Shared, unnamed: &Unnamed, body: &Blocks) {
    let class = &unnamed.class;
    let mut change = shared.events.change();
    if !shared.names.is_current(&class.namespace) {
        // One event told of all of it.
        return;
    }
    let at_ms = shared.wall_ms();
    for &(block, print) in &unnamed.blocks {
        let Some(name) = body.blocks.get(usize::from(block)) else { return change.lose() };
        let key = BlockKey(name.key);
        if shared.index.key().of(class.namespace.local, &key, class.group, class.coordinate) != print {
            return change.lose();
        }
        if !matches!(shared.index.lookup(print), Lookup::Live(_)) {
            change.tell(at_ms, EventKind::Evicted, Cause::Quota, Subject::Block(class.name(key)));
        }
    }
}

/// The names of a record's blocks, from its header.
async fn names(volume: &Volume, unnamed: &Unnamed) -> Option<Blocks> {
    let info = &unnamed.info;
    let segment = volume.segments.borrow().get(&info.segment).map(Rc::clone)?;
    let _reading = Hold::new(&segment);
    let offset = u64::from(info.page) * PAGE_BYTES;
    let buf = volume.stage(usize::from(info.header_pages) * PAGE_BYTES as usize).await.ok()?;
    let buf = volume.driver.read_into(Class::Background, segment.file, offset, buf).await.ok()?;
    let image = buf.to_vec();
    let opened = record::open(&image, &volume.position(&segment, offset), &volume.shared.secret).ok()?;
    match opened.body().ok()? {
        Body::Blocks(blocks) => Some(blocks),
        _ => None,
    }
}
