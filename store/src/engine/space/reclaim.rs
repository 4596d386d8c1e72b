//! Making room where the file system makes no holes (see `evict`), or where holes gave none: the oldest sealed segment
//! that nothing holds is emptied and written anew.
//!
//! A block under a lease keeps its segment; so does a device read, and one that was told of a block there before the
//! block was moved (see `grace`). What is evicted is gone from the index before
//! the segment's header is written anew, so nobody is sent to bytes that are being replaced; and a reader that was
//! sent there before finds another record's header and answers a miss.

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::body::{BlockName, Blocks};
use kvarts_layout::format::footer::{Content, Footer};
use kvarts_layout::format::trailer::{self, Trailer};
use kvarts_layout::format::{PAGE, PAGE_BYTES};
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::evict::batch::Made;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::checkpoint;
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::engine::volume::tombstones::TombstoneSet;
use crate::engine::write::log::Log;
use crate::error::Reason;
use crate::events::{Cause, EventKind};
use crate::index::{Eviction, Lookup};
use crate::io::{BufMut, IoError};
use crate::rt::Class;

/// Blocks that go without a turn for others.
const BLOCKS_AT_ONCE: usize = 64;

impl Log {
    /// Whether no read holds a segment, and none is on its way that was sent there for a block which has moved since.
    /// Other executors move blocks too: ask after the look at what is live there.
    pub(crate) fn is_unread(&self, segment: &Segment) -> bool {
        segment.readers.get() == 0 && !self.shared.arrivals.are_awaited((self.shard, segment.number))
    }

    /// Empties a sealed segment. Those that hold nothing any more go first, then the oldest.
    pub(crate) async fn reclaim(&self) -> Result<Made, Reason> {
        let mut sealed: Vec<Rc<Segment>> = self
            .segments
            .borrow()
            .values()
            .filter(|segment| segment.state.get() == SegmentState::Sealed && self.is_unread(segment))
            .map(Rc::clone)
            .collect();
        sealed.sort_by_cached_key(|segment| (segment.book.live() > 0, segment.first_sequence.get()));
        for segment in sealed {
            let Ok(footer) = self.read_footer(&segment).await else { continue };
            if self.save_graves(&footer).await
                && self.is_unread(&segment)
                && self.evict_all(&segment, &footer).await
                && self.is_unread(&segment)
                && segment.state.get() == SegmentState::Sealed
                && segment.book.live() == 0
            {
                self.shared.counters.segments_recycled.fetch_add(1, Relaxed);
                segment.state.set(SegmentState::Free);
                if !self.is_hollow(&segment) {
                    return Ok(Made::Segment(segment));
                }
                return match self.remove_hollow().await {
                    Made::Nothing => Err(Reason::NoSpace),
                    made => Ok(made),
                };
            }
        }
        Err(Reason::NoSpace)
    }

    /// Makes sure that what a segment buries stands elsewhere on disk before the segment is written anew: a record
    /// that it kills may lie in another, and would come back. False if it could not be done.
    pub(crate) async fn save_graves(&self, footer: &Footer) -> bool {
        if !TombstoneSet::are_in(&footer.records, self.floor())
            || kvarts_layout::planted!("tombstones-recycled")
        {
            return true;
        }
        let version = self.graves.borrow().version();
        loop {
            self.checkpoints.settled().await;
            if self.checkpoints.cover(version) {
                return true;
            }
            match checkpoint::write(self).await {
                Ok(_) | Err(Reason::Busy(_)) => {}
                Err(_) => return false,
            }
        }
    }

    /// No record that a crash could bring back has a lower sequence: not in a segment that is in use, nor in one that
    /// was emptied and not yet written anew, because its footer still stands. One that was begun and holds no record yet
    /// does not count: what comes into it gets sequences of then. So nothing that is buried waits for a put by layers
    /// that stands still.
    pub(crate) fn floor(&self) -> u64 {
        let lowest = |segment: &Rc<Segment>| {
            let own = match segment.state.get() {
                SegmentState::Open if segment.tail.borrow().entries.is_empty() => self.sequence.get(),
                _ => segment.first_sequence.get(),
            };
            // Of what was there before, for as long as the header over it may not be durable.
            segment.may_come_back().map_or(own, |before| before.min(own))
        };
        if kvarts_layout::planted!("tombstone-forgotten-early") {
            return u64::MAX;
        }
        let segments = self.segments.borrow();
        let used = segments.values().filter(|segment| segment.generation.get() > 0);
        used.map(lowest).min().unwrap_or(u64::MAX)
    }

    /// Forgets what was buried and can lie nowhere any more.
    pub(crate) fn prune_graves(&self) {
        let floor = self.floor();
        self.change_graves(|graves| graves.prune(floor));
    }

    /// Changes what is buried; the store leaves room for the checkpoint that says it.
    pub(crate) fn change_graves(&self, change: impl FnOnce(&mut TombstoneSet)) {
        let mut graves = self.graves.borrow_mut();
        let before = graves.len() as u64;
        change(&mut graves);
        let after = graves.len() as u64;
        self.shared.buried.fetch_add(after.wrapping_sub(before), Relaxed);
    }

    /// The footer of a sealed segment, from disk.
    pub(crate) async fn read_footer(&self, segment: &Segment) -> Result<Footer, Reason> {
        self.shared.work.footers.add(1);
        let shard = self.shard;
        let damaged = |what: String| Reason::Header { shard, segment: segment.number, offset: 0, what };
        let media = |error: IoError| Reason::Media(error.to_string());
        let trailer_at = self.shared.segment_bytes - PAGE_BYTES;
        let page = self.stage(PAGE).await.map_err(media)?;
        let read = self.driver.read_into(Class::Background, segment.file, trailer_at, page);
        let page = read.await.map_err(media)?;
        let position = trailer::position(&self.position(segment, 0), self.shared.segment_bytes);
        let trailer = Trailer::decode(&page.to_vec(), &position, &self.shared.secret)
            .map_err(|unsound| damaged(unsound.to_string()))?;
        let buf = self.stage(trailer.footer_bytes as usize).await.map_err(media)?;
        let read = self.driver.read_into(Class::Background, segment.file, trailer.footer_offset, buf);
        let buf = read.await.map_err(media)?;
        let position = self.position(segment, trailer.footer_offset);
        Footer::decode(&buf.to_vec(), &position, &self.shared.secret)
            .map_err(|unsound| damaged(unsound.to_string()))
    }

    /// The footers of sealed segments, read beside each other where it is known where they lie.
    pub(crate) async fn read_footers(&self, segments: &[Rc<Segment>]) -> Vec<Result<Footer, Reason>> {
        let mut ahead = Vec::with_capacity(segments.len());
        for segment in segments {
            let read = segment.footer_at.get().and_then(|(offset, bytes)| {
                let buf = BufMut::zeroed(bytes as usize).ok()?;
                Some((offset, self.driver.read_into(Class::Background, segment.file, offset, buf)))
            });
            ahead.push(read);
        }
        let mut footers = Vec::with_capacity(segments.len());
        for (segment, read) in segments.iter().zip(ahead) {
            footers.push(match read {
                None => self.read_footer(segment).await,
                Some((offset, read)) => match read.await {
                    Err(error) => Err(Reason::Media(error.to_string())),
                    Ok(buf) => {
                        let position = self.position(segment, offset);
                        let footer = Footer::decode(&buf.to_vec(), &position, &self.shared.secret);
                        footer.map_err(|unsound| Reason::Header {
                            shard: self.shard,
                            segment: segment.number,
                            offset,
                            what: unsound.to_string(),
                        })
                    }
                },
            });
        }
        footers
    }

    /// Evicts every block that the segment holds; false, and only some evicted, if one is leased.
    pub(crate) async fn evict_all(&self, segment: &Segment, footer: &Footer) -> bool {
        let mut section = Section::begin(&self.shared.work.evictions, &*self.shared.clock);
        for record in &footer.records {
            let Content::Blocks(blocks) = &record.content else { continue };
            for some in blocks.blocks.chunks(BLOCKS_AT_ONCE) {
                if !self.evict_named(segment, record.offset, (blocks, some)) {
                    return false;
                }
                section.step(some.len() as u64).await;
            }
        }
        true
    }

    /// Evicts some blocks of a record.
    fn evict_named(&self, segment: &Segment, offset: u64, (blocks, some): (&Blocks, &[BlockName])) -> bool {
        let index = &self.shared.index;
        let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { return true };
        for name in some {
            let key = BlockKey(name.key);
            let namespace = segment.local(blocks.namespace);
            let print = index.key().of(namespace, &key, Group(blocks.group), coordinate);
            let at = match index.lookup(print) {
                Lookup::Live(at) => at,
                Lookup::Quarantined => {
                    // A miss already; as absent it is one too, and takes no memory.
                    index.delete(print);
                    continue;
                }
                Lookup::Absent | Lookup::Pending => continue,
            };
            let Some(record) = index.records().get(at.record) else { continue };
            let here = {
                u32::from(record.shard) == self.shard
                    && record.segment == segment.number
                    && u64::from(record.page) * PAGE_BYTES == offset
            };
            let Some(class) = self.shared.classes.get(record.class).filter(|_| here) else { continue };
            let why = (EventKind::Evicted, Cause::Room);
            if self.shared.evict(print, at, why, (&class, key)) == Eviction::Busy {
                return false;
            }
        }
        true
    }
}
