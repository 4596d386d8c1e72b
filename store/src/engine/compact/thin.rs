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
use crate::engine::space::evict::batch::Made;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::engine::write::log::Log;
use crate::index::{OwnerCursor, RecordId};

/// A segment is thin when so many parts of it would hold what is live in it.
const THIN_PARTS: u64 = 12;
/// Thousandths of the bytes put that moves may write.
const SHARE_THOUSANDTHS: u64 = 25;
/// What is moved to give a whole segment back, or to make one of short ones: so small a part of a segment.
const SHORT_PARTS: u64 = 4;
/// What is moved to give a whole segment back where there are no holes: half of one frees as much as it writes.
const WHOLE_PARTS: u64 = 2;
/// Short segments that a shard may keep; half as many where the budget has room for few segments.
const SHORT_MAX: usize = 8;

impl Log {
    /// Begins in the background, unless it is under way or there is nothing to do.
    pub(crate) fn thin_out_in_background(self: &Rc<Self>) {
        let needed = || {
            let fragments = !self.short_ones().is_empty() || self.hollow().len() > self.short_max();
            fragments
                || self.thinnest().is_some()
                || self.emptiest_whole().is_some()
                || self.must_ask_for_holes()
        };
        if self.thinning.get() || self.closing.get() || !needed() {
            return;
        }
        self.thinning.set(true);
        let log = Rc::clone(self);
        self.spawn(Box::pin(async move {
            // Until the segment that is being begun is the open one.
            log.changed.until(|| (!log.rolling.get()).then_some(())).await;
            log.thin_all_out().await;
            log.thinning.set(false);
            log.changed.wake_all();
        }));
    }

    async fn thin_all_out(self: &Rc<Self>) {
        while let Some(segment) = self.thinnest().filter(|_| !self.closing.get()) {
            if !self.thin_out(segment).await {
                break;
            }
        }
        for (live, segment) in self.short_ones() {
            if self.closing.get() || !self.takes(live) || !self.thin_out(segment).await {
                break;
            }
        }
        if self.must_ask_for_holes() {
            self.makes_holes().await;
        }
        while let Some((live, segment)) = self.emptiest_whole() {
            if self.closing.get() || !self.takes(live) || !self.thin_out(segment).await {
                break;
            }
        }
        if !self.closing.get() && self.emptied() > self.short_max() / 2 {
            self.remove_emptied().await;
        }
    }

    /// The emptiest thin segment that may be moved by what has been put.
    fn thinnest(&self) -> Option<u32> {
        let most = self.shared.segment_bytes / THIN_PARTS;
        let allowed = (self.put_bytes.get() / 1000 * SHARE_THOUSANDTHS).saturating_sub(self.thin_bytes.get());
        self.sealed_up_to(most.min(allowed), |one| one.is_holed()).next().map(|(_, number)| number)
    }

    /// Sealed segments with so much live at most, the emptiest first.
    fn sealed_up_to(&self, most: u64, of: impl Fn(&Segment) -> bool) -> impl Iterator<Item = (u64, u32)> {
        let segments = self.segments.borrow();
        let sealed = segments.values().filter(|one| one.state.get() == SegmentState::Sealed && of(one));
        let live = sealed.map(|one| (one.book.live(), one.number));
        let mut some: Vec<_> = live.filter(|(live, _)| *live > 0 && *live <= most).collect();
        some.sort_unstable();
        some.into_iter()
    }

    /// Short segments that a shard may keep.
    fn short_max(&self) -> usize {
        usize::try_from(2 * self.shared.segments_of_a_shard())
            .unwrap_or(SHORT_MAX)
            .clamp(SHORT_MAX / 2, SHORT_MAX)
    }

    /// The short segments that are to become one, if there are too many: the smallest.
    fn short_ones(&self) -> Vec<(u64, u32)> {
        let segment_bytes = self.shared.segment_bytes;
        let most = segment_bytes / SHORT_PARTS;
        let mut short: Vec<_> = self.sealed_up_to(most, |one| one.is_short(segment_bytes)).collect();
        let many = short.len() > self.short_max();
        short.truncate(if many { short.len() - self.short_max() / 2 } else { 0 });
        short
    }

    /// The segment to empty next where nothing less than a segment can be given back: if there is neither a segment that
    /// holds nothing nor room for one.
    fn emptiest_whole(&self) -> Option<(u64, u32)> {
        let spare = |one: &Segment| match one.state.get() {
            SegmentState::Free => !self.is_hollow(one),
            SegmentState::Sealed => one.book.live() == 0,
            _ => false,
        };
        if self.shared.shortage() == 0 || self.segments.borrow().values().any(|one| spare(one)) {
            return None;
        }
        let whole = |one: &Segment| (self.no_holes.get() || one.is_unpunchable()) && !self.is_hollow(one);
        self.sealed_up_to(self.shared.segment_bytes / WHOLE_PARTS, whole).next()
    }

    /// Whether it must be known whether the file system makes holes, and is not.
    fn must_ask_for_holes(&self) -> bool {
        self.shared.shortage() > 0 && !self.no_holes.get() && !self.has_holes.get()
    }

    /// Segments with less than their bytes that hold nothing.
    fn emptied(&self) -> usize {
        let segments = self.segments.borrow();
        let empty = |one: &&Rc<Segment>| {
            let state = one.state.get();
            let dead = state == SegmentState::Sealed && one.book.live() == 0;
            self.is_hollow(one) && (dead || state == SegmentState::Free)
        };
        segments.values().filter(empty).count()
    }

    /// Removes the files of segments that hold nothing and cannot be written anew. Nobody takes a segment meanwhile.
    async fn remove_emptied(&self) {
        self.changed.until(|| (!self.rolling.replace(true)).then_some(())).await;
        while let Made::Segment(_) = self.recycle_dead(true).await {}
        self.remove_hollow().await;
        self.rolling.set(false);
        self.changed.wake_all();
    }

    /// Moves what is live in a segment; false if that could not be done.
    async fn thin_out(self: &Rc<Self>, segment: u32) -> bool {
        let mut records: Vec<(u32, RecordId)> = Vec::new();
        let (mut cursor, mut some) = (Some(OwnerCursor::default()), Vec::new());
        let mut section = Section::begin(&self.shared.work.evictions, &*self.shared.clock);
        while let Some(from) = cursor {
            cursor = self.shared.index.records().snapshot_of((self.shard as u16, None), from, &mut some);
            let here = some.iter().filter(|(_, record, _)| record.segment == segment && record.live > 0);
            records.extend(here.map(|(id, record, _)| (record.page, *id)));
            section.step(some.len().max(1) as u64).await;
        }
        drop(section);
        // In the order in which they lie: chains stay together.
        records.sort_unstable();
        for (_, record) in records {
            if self.closing.get() {
                return false;
            }
            match relocate(self, record, &|_| true, &Cold::default()).await {
                Ok(moved) => self.thin_bytes.set(self.thin_bytes.get() + moved.bytes_written),
                Err(_) => return false,
            }
        }
        let segments = self.segments.borrow();
        segments.get(&segment).is_none_or(|segment| segment.book.live() == 0)
    }
}
