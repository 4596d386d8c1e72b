//! Moves the last blocks out of segments of which little is left, so that what surrounds the records (definitions,
//! footer, trailer) is given back as well.
//!
//! It is bounded by what was put: moves write no more than a fixed share of that, so what it adds to write
//! amplification is known. The emptiest segment first.

use std::rc::Rc;

use crate::engine::compact::pack::Cold;
use crate::engine::compact::relocate::relocate;
use crate::engine::log::Log;
use crate::engine::segment::SegmentState;
use crate::index::{RecordCursor, RecordId};

/// A segment is thin when so many parts of it would hold what is live in it.
const THIN_PARTS: u64 = 12;
/// Thousandths of the bytes put that moves may write.
const SHARE_THOUSANDTHS: u64 = 25;

impl Log {
    /// Begins in the background, unless it is under way or there is nothing to do.
    pub(crate) fn thin_out_in_background(self: &Rc<Self>) {
        if self.thinning.get() || self.closing.get() || self.thinnest().is_none() {
            return;
        }
        self.thinning.set(true);
        let log = Rc::clone(self);
        self.spawn(Box::pin(async move {
            while let Some(segment) = log.thinnest().filter(|_| !log.closing.get()) {
                if !log.thin_out(segment).await {
                    break;
                }
            }
            log.thinning.set(false);
            log.changed.wake_all();
        }));
    }

    /// The emptiest thin segment that may be moved by what has been put.
    fn thinnest(&self) -> Option<u32> {
        let most = self.shared.segment_bytes / THIN_PARTS;
        let allowed = (self.put_bytes.get() / 1000 * SHARE_THOUSANDTHS).saturating_sub(self.thin_bytes.get());
        let segments = self.segments.borrow();
        let thin = segments.values().filter(|one| one.state.get() == SegmentState::Sealed && one.is_holed());
        let live = thin.map(|segment| (segment.book.live(), segment.number));
        live.filter(|(live, _)| *live > 0 && *live <= most.min(allowed)).min().map(|(_, number)| number)
    }

    /// Moves what is live in a segment; false if that could not be done.
    async fn thin_out(self: &Rc<Self>, segment: u32) -> bool {
        let mut records: Vec<(u32, RecordId)> = Vec::new();
        let (mut cursor, mut some) = (Some(RecordCursor::default()), Vec::new());
        while let Some(from) = cursor {
            cursor = self.shared.index.records().snapshot(from, &mut some);
            let here = some.iter().filter(|(_, record)| {
                u32::from(record.shard) == self.shard && record.segment == segment && record.live > 0
            });
            records.extend(here.map(|(id, record)| (record.page, *id)));
        }
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
