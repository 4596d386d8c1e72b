//! Moves the last blocks out of segments of which little is left, so that what surrounds the records (definitions,
//! footer, trailer) is given back as well, and few files hold what is here.
//!
//! - Of segments with holes: the emptiest first. Moves write no more than a fixed share of what was put, so what this
//!   adds to write amplification is known.
//! - Of short segments, which stops and crashes leave behind: each start brings one more. When a shard has more than a
//!   few, the smallest become one. Those that have grown so are not the smallest next time, so a block is moved as often
//!   as the logarithm of the number of starts, and no more once its segment is not short.
//! - Where a segment can only be given back as a whole (no holes): if there is no room for another one, and what is
//!   moved is no more than what that frees. Without it live blocks would be evicted.
//!
//! What is moved goes into the segment that has just been begun: it never takes another one for that.

use std::rc::Rc;

use super::encode::Cold;
use super::relocate::relocate;
use super::segments::live_records;
use crate::engine::shard::Shard;
use crate::engine::space::Space;
use crate::engine::space::evict::batch::Made;
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, SegmentState};

/// A segment is thin when one part in this many would hold its live bytes.
const THIN_PARTS: u64 = 12;
/// Thousandths of the bytes put that moves may write.
const SHARE_THOUSANDTHS: u64 = 25;
/// What is moved to give a whole segment back, or to make one of short ones: so small a part of a segment.
const SHORT_PARTS: u64 = 4;
/// What is moved to give a whole segment back where there are no holes: half of one frees as much as it writes.
const WHOLE_PARTS: u64 = 2;
/// Short segments that a shard may keep; half as many where the budget has room for few segments.
const SHORT_MAX: usize = 8;

/// Begins in the background, unless it is under way or there is nothing to do.
pub(crate) fn in_background(shard: &Rc<Shard>) {
    let needed = || {
        let fragments =
            !short_ones(&shard.volume).is_empty() || shard.space.hollow().len() > short_max(&shard.volume);
        fragments || thinnest(shard).is_some() || emptiest_whole(shard).is_some() || must_ask_for_holes(shard)
    };
    if shard.log.thinning.get() || shard.log.closing.get() || !needed() {
        return;
    }
    shard.log.thinning.set(true);
    let own = Rc::clone(shard);
    shard.volume.spawn(Box::pin(async move {
        // Until the segment that is being begun is the open one.
        own.volume.changed.until(|| (!own.space.rolling.get()).then_some(())).await;
        thin_all_out(&own).await;
        own.log.thinning.set(false);
        own.volume.changed.wake_all();
    }));
}

async fn thin_all_out(shard: &Rc<Shard>) {
    while let Some(segment) = thinnest(shard).filter(|_| !shard.log.closing.get()) {
        if !thin_out(shard, segment).await {
            break;
        }
    }
    for (live, segment) in short_ones(&shard.volume) {
        if shard.log.closing.get() || !shard.log.takes(live) || !thin_out(shard, segment).await {
            break;
        }
    }
    if must_ask_for_holes(shard) {
        shard.space.makes_holes().await;
    }
    while let Some((live, segment)) = emptiest_whole(shard) {
        if shard.log.closing.get() || !shard.log.takes(live) || !thin_out(shard, segment).await {
            break;
        }
    }
    if !shard.log.closing.get() && emptied(shard) > short_max(&shard.volume) / 2 {
        remove_emptied(&shard.space).await;
    }
}

/// The emptiest thin segment that may be moved by what has been put.
fn thinnest(shard: &Shard) -> Option<u32> {
    let most = shard.volume.shared.segment_bytes / THIN_PARTS;
    let allowed =
        (shard.log.put_bytes.get() / 1000 * SHARE_THOUSANDTHS).saturating_sub(shard.moves.thin_bytes.get());
    sealed(&shard.volume, most.min(allowed), |one| one.is_holed()).next().map(|(_, number)| number)
}

/// Sealed segments with so much live at most, the emptiest first.
fn sealed(volume: &Volume, most: u64, of: impl Fn(&Segment) -> bool) -> impl Iterator<Item = (u64, u32)> {
    let segments = volume.segments.borrow();
    let sealed = segments.values().filter(|one| one.state.get() == SegmentState::Sealed && of(one));
    let live = sealed.map(|one| (one.book.live(), one.number));
    let mut some: Vec<_> = live.filter(|(live, _)| *live > 0 && *live <= most).collect();
    some.sort_unstable();
    some.into_iter()
}

/// Short segments that a shard may keep.
fn short_max(volume: &Volume) -> usize {
    usize::try_from(2 * volume.shared.segments_of_a_shard())
        .unwrap_or(SHORT_MAX)
        .clamp(SHORT_MAX / 2, SHORT_MAX)
}

/// The short segments that are to become one, if there are too many: the smallest.
fn short_ones(volume: &Volume) -> Vec<(u64, u32)> {
    let segment_bytes = volume.shared.segment_bytes;
    let most = segment_bytes / SHORT_PARTS;
    let mut short: Vec<_> = sealed(volume, most, |one| one.is_short(segment_bytes)).collect();
    let many = short.len() > short_max(volume);
    short.truncate(if many && !kvarts_layout::planted!("short-segments-stay") {
        short.len() - short_max(volume) / 2
    } else {
        0
    });
    short
}

/// The segment to empty next where nothing less than a segment can be given back: if there is neither a segment that
/// holds nothing nor room for one.
fn emptiest_whole(shard: &Shard) -> Option<(u64, u32)> {
    let spare = |one: &Segment| match one.state.get() {
        SegmentState::Free => !shard.space.is_hollow(one),
        SegmentState::Sealed => one.book.live() == 0,
        _ => false,
    };
    if shard.volume.shared.shortage() == 0 || shard.volume.segments.borrow().values().any(|one| spare(one)) {
        return None;
    }
    let whole =
        |one: &Segment| (shard.space.no_holes.get() || one.is_unpunchable()) && !shard.space.is_hollow(one);
    sealed(&shard.volume, shard.volume.shared.segment_bytes / WHOLE_PARTS, whole).next()
}

/// Whether it must be known whether the file system makes holes, and is not.
fn must_ask_for_holes(shard: &Shard) -> bool {
    shard.volume.shared.shortage() > 0 && !shard.space.no_holes.get() && !shard.space.has_holes.get()
}

/// Segments with less than their bytes that hold nothing.
fn emptied(shard: &Shard) -> usize {
    let segments = shard.volume.segments.borrow();
    let empty = |one: &&Rc<Segment>| {
        let state = one.state.get();
        let dead = state == SegmentState::Sealed && one.book.live() == 0;
        shard.space.is_hollow(one) && (dead || state == SegmentState::Free)
    };
    segments.values().filter(empty).count()
}

/// Removes the files of segments that hold nothing and cannot be recycled. No task takes a segment meanwhile.
async fn remove_emptied(space: &Space) {
    let _turn = space.roll_turn().await;
    while let Made::Segment(_) = space.recycle_dead(true).await {}
    space.remove_hollow().await;
}

/// Moves what is live in a segment; false if that could not be done.
async fn thin_out(shard: &Rc<Shard>, segment: u32) -> bool {
    for record in live_records(&shard.volume, segment).await {
        if shard.log.closing.get() {
            return false;
        }
        match relocate(shard, record, &|_| true, &Cold::default()).await {
            Ok(moved) => shard.moves.thin_bytes.set(shard.moves.thin_bytes.get() + moved.bytes_written),
            Err(_) => return false,
        }
    }
    let segments = shard.volume.segments.borrow();
    segments.get(&segment).is_none_or(|segment| segment.book.live() == 0)
}
