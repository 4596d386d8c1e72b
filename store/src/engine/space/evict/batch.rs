//! Takes a batch of blocks out and gives their pages back: each file is punched in one go and flushed once.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::format::body::{Blocks, Parent};
use kvarts_layout::format::footer::{Content, Entry, Footer};
use kvarts_layout::format::{PAGE_BYTES, page_align};
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::choose::{self, Leaving, Victims};
use super::coldest::{Footers, is_punchable};
use super::pages::{Holes, Lying, inside, without};
use crate::engine::shared::record_class::RecordClass;
use crate::engine::shared::visibility::{BlockOf, Departure};
use crate::engine::space::Space;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::checkpoint;
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::index::{BlockFingerprint, Eviction, Location, Lookup};
use crate::io::{MetaOp, Reply};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::{FileId, IoErrorKind};
use kvarts_contract::sync::atomic::Ordering::Relaxed;

/// Segments that are recycled before hollow ones go for the sake of what is buried.
const RECYCLED_BETWEEN: u64 = 8;
/// Segments whose footers are in memory at once.
const AT_ONCE: usize = 64;
/// A batch takes this many segments at most.
const SEGMENTS_MAX: u64 = 4;
/// A segment is worth a flush when at least one part in this many of it is dead.
const DEAD_PARTS: u64 = 16;
/// The unused gap between the last record and the footer is punched if it is at least one part in this many of the segment: a
/// punched file is not recycled.
const GAP_PARTS: u64 = 4;
/// Bytes that are given back in one go.
const PUNCH_BYTES: u64 = 1 << 20;
/// Steps for which a block stays that has lost the blocks before it: they may be on their way.
const ORPHAN_GRACE: u16 = 8;

/// What became of an attempt to make room.
#[derive(Debug)]
pub(crate) enum Made {
    /// This segment holds nothing and may be recycled.
    Segment(Rc<Segment>),
    /// Bytes were given back to the budget, or a segment holds nothing any more.
    Room,
    /// Nothing could be had.
    Nothing,
}

/// A segment of which pages are given back.
struct Punched {
    segment: Rc<Segment>,
    footer: Footer,
    ranges: Vec<(u64, u64)>,
}

/// Where a record of blocks lies, header and padding included.
pub(crate) fn range_of(entry: &Entry) -> (u64, u64) {
    let payload = page_align(entry.payload_bytes).unwrap_or(entry.payload_bytes);
    (entry.offset, u64::from(entry.header_bytes) + payload)
}

/// Bytes of records of blocks that are holes.
pub(crate) fn punched_bytes(entries: &[Entry], holes: &Holes) -> u64 {
    let blocks = entries.iter().filter(|entry| matches!(entry.content, Content::Blocks(_)));
    blocks.map(range_of).map(|(at, len)| inside(holes, at, len)).sum()
}

impl Space {
    /// Makes room for a segment: what is dead goes first, then what the policy chooses. One task at a time calls it.
    pub(crate) async fn make_room(&self) -> Made {
        // Expired leases are removed first: the choice sees only whether there is a lease.
        self.volume.shared.index.expire(self.volume.shared.clock.now());
        match self.recycle_dead(false).await {
            Made::Nothing => {}
            made => return made,
        }
        if !self.makes_holes().await {
            return Made::Nothing;
        }
        let segment_bytes = self.volume.shared.segment_bytes;
        let shortage = self.volume.shared.shortage();
        let wanted = shortage.clamp(segment_bytes, SEGMENTS_MAX * segment_bytes);
        let mut dead = BTreeSet::new();
        let mut had = 0;
        for segment in
            self.volume.segments.borrow().values().filter(|segment| is_punchable(&self.volume, segment))
        {
            let unused = segment.book.space().dead.saturating_sub(segment.unpunchable_bytes.get());
            let rest =
                segment.punchable_gap(segment_bytes / GAP_PARTS, segment_bytes).map_or(0, |(_, len)| len);
            let bytes = unused + if kvarts_layout::planted!("rest-is-no-room") { 0 } else { rest };
            if bytes >= segment_bytes / DEAD_PARTS {
                had += bytes;
                dead.insert(segment.number);
            }
        }
        let (mut victims, mut footers) = (Victims::new(), Footers::new());
        // Where what is unused is enough, nothing goes that is used.
        if had < shortage.clamp(1, wanted) {
            let policy = self.volume.shared.policy();
            (victims, footers) = choose::choose(self, policy, &|_| true, wanted - had).await;
        }
        dead.extend(victims.keys());
        let numbers = self.last_first(dead);
        let mut made = false;
        for some in numbers.chunks(AT_ONCE) {
            made |= self.give_back(some, &victims, &mut footers).await;
        }
        if made { Made::Room } else { Made::Nothing }
    }

    /// In the order in which blocks go: what hangs on others was put after them, as a rule.
    fn last_first(&self, numbers: BTreeSet<u32>) -> Vec<u32> {
        let segments = self.volume.segments.borrow();
        let sequence = |number: &u32| segments.get(number).map_or(0, |segment| segment.first_sequence.get());
        let mut numbers: Vec<u32> = numbers.into_iter().collect();
        numbers.sort_by_cached_key(|number| std::cmp::Reverse(sequence(number)));
        numbers
    }

    /// A sealed segment in which nothing is live, the oldest first, to be recycled. One with holes has next to nothing
    /// left by then: it is set aside, and goes with others of its kind. `full`: also one that has much left.
    pub(crate) async fn recycle_dead(&self, full: bool) -> Made {
        let mut sealed: Vec<Rc<Segment>> = self.volume.segments.borrow().values().map(Rc::clone).collect();
        sealed.retain(|one| {
            let dead =
                one.state.get() == SegmentState::Sealed && self.volume.is_unread(one) && one.book.live() == 0;
            // Its dead pages are given back first: that takes no checkpoint.
            let punched_first = self.is_hollow(one) && !one.is_unpunchable() && !self.no_holes.get() && !full;
            dead && !(punched_first && one.book.space().dead >= self.volume.shared.segment_bytes / DEAD_PARTS)
        });
        sealed.sort_by_key(|segment| segment.first_sequence.get());
        for segment in sealed {
            let Ok(footer) = self.volume.read_footer(&segment, Class::Put).await else { continue };
            if !self.save_tombstones(&segment, &footer).await
                || segment.book.live() > 0
                || !self.evict_all(&segment, &footer).await
                || segment.state.get() != SegmentState::Sealed
                || segment.book.live() > 0
                || !self.volume.is_unread(&segment)
            {
                continue;
            }
            self.volume.shared.counters.segments_recycled.fetch_add(1, Relaxed);
            segment.state.set(SegmentState::Free);
            if !self.is_hollow(&segment) {
                return Made::Segment(segment);
            }
        }
        let hollow: u64 = self.hollow().iter().map(|segment| segment.book.allocated()).sum();
        // What was buried is kept while they stand. A checkpoint for every few segments is the price of forgetting it.
        let recycled = self.volume.shared.counters.segments_recycled.load(Relaxed);
        let buried = hollow > 0
            && !self.volume.tombstones.borrow().is_empty()
            && recycled.saturating_sub(self.hollow_removed_at.get()) >= RECYCLED_BETWEEN;
        // Where they are all that is missing, nothing need be evicted.
        let enough =
            hollow > 0 && hollow >= self.volume.shared.shortage().min(self.volume.shared.segment_bytes);
        match enough || self.volume.shared.has_too_many_files() || buried {
            true => {
                self.hollow_removed_at.set(recycled);
                self.remove_hollow().await
            }
            false => Made::Nothing,
        }
    }

    /// A free segment that cannot be recycled: it would lack the bytes, and what stands between its old footer and
    /// a new header could be taken for evicted.
    pub(crate) fn is_hollow(&self, segment: &Segment) -> bool {
        segment.is_holed() || segment.book.allocated() < self.volume.shared.segment_bytes
    }

    pub(crate) fn hollow(&self) -> Vec<Rc<Segment>> {
        let segments = self.volume.segments.borrow();
        let free = segments.values().filter(|segment| {
            segment.state.get() == SegmentState::Free
                && self.volume.is_unread(segment)
                && self.is_hollow(segment)
        });
        free.map(Rc::clone).collect()
    }

    /// Removes the files of hollow segments, after a checkpoint that says that they hold nothing: one that says that a
    /// segment is in use would make its file look lost.
    pub(crate) async fn remove_hollow(&self) -> Made {
        let hollow = self.hollow();
        let said = hollow.iter().all(|segment| segment.may_be_missing());
        if hollow.is_empty() || !(said || self.say_free().await) {
            return Made::Nothing;
        }
        let mut made = Made::Nothing;
        for segment in hollow {
            if self.remove_segment(&segment).await.is_ok() {
                made = Made::Room;
            }
        }
        made
    }

    /// Writes a checkpoint that was begun after this call.
    pub(crate) async fn say_free(&self) -> bool {
        loop {
            self.volume.checkpoints.settled().await;
            match checkpoint::write(&self.volume, Class::Put).await {
                Ok(_) => return true,
                Err(Reason::Busy(_)) if !self.volume.is_out() => {}
                Err(_) => return false,
            }
        }
    }

    /// Takes the victims in these segments out and gives back what is dead there; says whether that made room.
    async fn give_back(&self, numbers: &[u32], victims: &Victims, known: &mut Footers) -> bool {
        let segments: Vec<Rc<Segment>> = {
            let all = self.volume.segments.borrow();
            numbers.iter().filter_map(|number| all.get(number)).map(Rc::clone).collect()
        };
        let footers = self.footers(&segments, known).await;
        let mut section = Section::begin(&self.volume.shared.work.evictions, &*self.volume.shared.clock);
        let mut made = false;
        let mut punched = Vec::new();
        let mut columns = BTreeMap::new();
        for (segment, footer) in segments.into_iter().zip(footers) {
            let Ok(footer) = footer else {
                // It can be emptied as a whole only.
                segment.set_unpunchable();
                continue;
            };
            if !is_punchable(&self.volume, &segment) {
                continue;
            }
            let before = segment.book.live();
            if let Some(leaving) = victims.get(&segment.number) {
                self.evict_some((&segment, &footer), leaving, &mut columns, &mut section).await;
            }
            if segment.book.live() == 0 && !self.is_hollow(&segment) {
                // Recycled as a whole: that needs no flush.
                made |= before > 0;
                continue;
            }
            let ranges = self.unneeded(&segment, &footer, &mut section).await;
            if !self.volume.is_unread(&segment) {
                // Another executor has moved something out of it just now.
                continue;
            }
            if !ranges.is_empty() {
                // Nothing was awaited since the readers were counted: from here on they see that blocks are gone.
                segment.set_holed();
                self.reads.headers.forget_punched(segment.number, segment.generation.get(), &ranges);
                punched.push(Punched { segment, footer, ranges });
            } else {
                segment.unpunchable_bytes.set(segment.book.space().dead);
            }
        }
        drop(section);
        made | self.punch(punched).await
    }

    /// The footers of segments, those first that are known already.
    async fn footers(&self, some: &[Rc<Segment>], known: &mut Footers) -> Vec<Result<Footer, Reason>> {
        let mut all: Vec<_> = some
            .iter()
            .map(|segment| {
                let known = known.remove(&segment.number);
                known
                    .filter(|(generation, _)| *generation == segment.generation.get())
                    .map(|(_, footer)| Ok(footer))
            })
            .collect();
        let unknown = some.iter().zip(&all).filter(|(_, footer)| footer.is_none());
        let unknown: Vec<_> = unknown.map(|(segment, _)| Rc::clone(segment)).collect();
        let mut read = self.volume.read_footers(&unknown, Class::Put).await.into_iter();
        all.iter_mut().filter(|footer| footer.is_none()).for_each(|footer| *footer = read.next());
        all.into_iter().flatten().collect()
    }

    /// Evicts blocks of a segment, those behind others first, with what else there is of the same blocks. One stays that
    /// something hangs on by now: a put has begun behind it, or what hung on it has not gone yet.
    async fn evict_some(
        &self,
        (segment, footer): (&Segment, &Footer),
        leaving: &BTreeMap<u32, Leaving>,
        columns: &mut BTreeMap<u32, BTreeSet<(Group, Coordinate)>>,
        section: &mut Section<'_>,
    ) {
        for entry in footer.records.iter().rev() {
            let Content::Blocks(blocks) = &entry.content else { continue };
            let page = u32::try_from(entry.offset / PAGE_BYTES).unwrap_or(u32::MAX);
            match leaving.get(&page) {
                Some(leaving) => {
                    let mut some = leaving.blocks.clone();
                    some.sort_unstable_by_key(|(at, _)| std::cmp::Reverse(at.block));
                    self.evict_blocks(blocks, &some, columns, Departure::Evicted);
                    section.step(some.len() as u64).await;
                }
                None => self.evict_orphans(segment, entry, blocks),
            }
            section.step(1).await;
        }
    }

    /// Evicts blocks of a record, in this order, up to one that may not go; gives how many went.
    pub(super) fn evict_blocks(
        &self,
        blocks: &Blocks,
        some: &[(Location, BlockFingerprint)],
        columns: &mut BTreeMap<u32, BTreeSet<(Group, Coordinate)>>,
        why: Departure,
    ) -> u64 {
        // Records of the index that stand for one on disk are of one class.
        let mut known = some.iter().filter_map(|(at, _)| self.volume.shared.index.records().get(at.record));
        let Some(class) = known.next().and_then(|record| self.volume.shared.classes.get(record.class)) else {
            return 0;
        };
        let mut gone = 0;
        let columns = columns
            .entry(class.namespace.local)
            .or_insert_with(|| self.volume.shared.classes.columns(&class.namespace));
        for &(at, print) in some {
            let Some(name) = blocks.blocks.get(usize::from(at.block)) else { continue };
            let key = BlockKey(name.key);
            let here =
                self.volume.shared.index.key().of(class.namespace.local, &key, class.group, class.coordinate);
            if here != print {
                continue;
            }
            if self.volume.shared.index.hanging(print) > 0 {
                break;
            }
            let siblings: Vec<_> = siblings(&self.volume.shared, &class, &key, columns).collect();
            let now = self.volume.shared.clock.now();
            if siblings.iter().any(|(sibling, _)| self.volume.shared.index.is_leased(*sibling, now)) {
                // All of a block go together, and what is before it stays as long as it does.
                break;
            }
            match self.volume.shared.evict(print, at, why, BlockOf { class: &class, key }) {
                Eviction::Busy => break,
                Eviction::Gone => {}
                Eviction::Evicted { .. } => {
                    gone += 1;
                    for (sibling, at) in siblings {
                        let record = self.volume.shared.index.records().get(at.record);
                        let class = record.and_then(|record| self.volume.shared.classes.get(record.class));
                        if let Some(class) = class {
                            self.volume.shared.evict(sibling, at, why, BlockOf { class: &class, key });
                        }
                    }
                }
            }
        }
        gone
    }

    /// Evicts what is left of a stream whose blocks before it are not here (any more): it cannot be used.
    fn evict_orphans(&self, segment: &Segment, entry: &Entry, blocks: &Blocks) {
        let Parent::Key(parent) = blocks.parent else { return };
        let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { return };
        let index = &self.volume.shared.index;
        let (namespace, group) = (segment.local(blocks.namespace), Group(blocks.group));
        let print = |key: [u8; 32]| index.key().of(namespace, &BlockKey(key), group, coordinate);
        if index.lookup(print(parent)) != Lookup::Absent {
            return;
        }
        let now = self.volume.shared.epoch();
        let mut live = Vec::new();
        for (block, name) in (0u16..).zip(&blocks.blocks) {
            let Some(found) = index.locate(print(name.key)) else { continue };
            if self.volume.is_at(segment, entry.offset, &found.record) && found.location.block == block {
                live.push((found, BlockKey(name.key)));
            }
        }
        let Some((first, _)) = live.first() else { return };
        let Some(class) = self.volume.shared.classes.get(first.record.class) else { return };
        if class.is_boundary() || live.iter().any(|(found, _)| found.heat.age(now) < ORPHAN_GRACE) {
            return;
        }
        for (found, key) in live.into_iter().rev() {
            let why = Departure::Evicted;
            if self.volume.shared.evict(print(key.0), found.location, why, BlockOf { class: &class, key })
                == Eviction::Busy
            {
                return;
            }
        }
    }

    /// Pages of a segment that no live block needs and that are no holes yet.
    async fn unneeded(
        &self,
        segment: &Segment,
        footer: &Footer,
        section: &mut Section<'_>,
    ) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        for entry in &footer.records {
            let Content::Blocks(blocks) = &entry.content else { continue };
            // What dies meanwhile is given back next time; nothing in a sealed segment comes to life.
            section.step(blocks.blocks.len() as u64).await;
            let (live, class) = self.live_of(segment, entry, blocks);
            match class {
                None => ranges.push(range_of(entry)),
                Some(class) => {
                    let count = u32::try_from(blocks.blocks.len()).unwrap_or(u32::MAX);
                    let Ok(layout) = class.layout_of(count) else { continue };
                    let lying = Lying {
                        offset: entry.offset,
                        header_bytes: u64::from(entry.header_bytes),
                        payload_bytes: entry.payload_bytes,
                        layout: &layout,
                        stored: None,
                    };
                    if class.encoding == kvarts_layout::format::body::ENCODING_RAW {
                        ranges.extend(
                            lying.unneeded(|block| live.get(usize::from(block)).copied().unwrap_or(true)),
                        );
                    }
                }
            }
        }
        let mut ranges = without(&ranges, &segment.holes.borrow());
        ranges.extend(segment.punchable_gap(1, self.volume.shared.segment_bytes));
        ranges
    }

    /// Which blocks of a record the index has there, and their class; `None` if there is none.
    fn live_of(
        &self,
        segment: &Segment,
        entry: &Entry,
        blocks: &Blocks,
    ) -> (Vec<bool>, Option<Arc<RecordClass>>) {
        let index = &self.volume.shared.index;
        let (namespace, group) = (segment.local(blocks.namespace), Group(blocks.group));
        let mut class = None;
        let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { return (Vec::new(), None) };
        let is_live = |(block, name): (u16, &kvarts_layout::format::body::BlockName)| {
            let print = index.key().of(namespace, &BlockKey(name.key), group, coordinate);
            let Some(found) = index.locate(print) else { return false };
            let here =
                self.volume.is_at(segment, entry.offset, &found.record) && found.location.block == block;
            if here {
                class = Some(found.record.class);
            }
            here
        };
        let live = (0u16..).zip(&blocks.blocks).map(is_live).collect();
        (live, class.and_then(|class| self.volume.shared.classes.get(class)))
    }

    /// Gives back what a segment is sealed without, where that is much: a stop, or a crash, ends a segment early, and the
    /// next start begins another one. Its seal is durable and nothing else gives anything of it back meanwhile.
    pub(crate) async fn give_rest_back(&self, segment: &Rc<Segment>, records: &[Entry]) {
        let segment_bytes = self.volume.shared.segment_bytes;
        if self.no_holes.get() {
            return;
        }
        if let Some(rest) = segment.punchable_gap(segment_bytes / GAP_PARTS, segment_bytes) {
            let footer = Footer { records: records.to_vec() };
            self.punch(vec![Punched { segment: Rc::clone(segment), footer, ranges: vec![rest] }]).await;
            // Nothing of its records was given back: recovery has not even taken them in.
            segment.unpunchable_bytes.set(0);
        }
    }

    /// Gives a range back, a piece at a time: a file system that discards what it frees makes the device do it at once, and
    /// reads wait behind that.
    async fn punch_range(&self, file: FileId, (offset, len): (u64, u64)) {
        for begin in (0..len).step_by(PUNCH_BYTES as usize) {
            let piece = MetaOp::PunchHole { file, offset: offset + begin, len: PUNCH_BYTES.min(len - begin) };
            match self.volume.driver.meta(piece).await {
                Ok(_) => {}
                Err(error) if error.kind == IoErrorKind::Unsupported => self.no_holes.set(true),
                // What it left behind is seen by the caller. It is tried again with the next batch.
                Err(_) => {}
            }
        }
    }

    /// Gives ranges back, durably, and then their bytes to the budget.
    async fn punch(&self, some: Vec<Punched>) -> bool {
        for punched in &some {
            for &range in &punched.ranges {
                self.punch_range(punched.segment.file, range).await;
            }
        }
        let flushes: Vec<_> =
            some.iter().map(|punched| self.volume.driver.flush(punched.segment.file)).collect();
        let mut durable = Vec::with_capacity(some.len());
        for flush in flushes {
            durable.push(flush.await.is_ok());
        }
        let mut asked = Vec::with_capacity(some.len());
        for (punched, durable) in some.into_iter().zip(durable) {
            let segment = &punched.segment;
            segment.tried_rest();
            if !durable && !kvarts_layout::planted!("given-back-unflushed") {
                // Never flushed again in hope: its pages count as they did, for as long as it lives.
                segment.set_unpunchable();
                continue;
            }
            let file = segment.file;
            let stat = self.volume.driver.meta(MetaOp::Stat { file });
            asked.push((punched, stat, self.volume.driver.meta(MetaOp::Holes { file, upto: u64::MAX })));
        }
        let mut made = false;
        for (Punched { segment, footer, .. }, stat, holes) in asked {
            let (Ok(Some(Reply::Stat { allocated, .. })), Ok(Some(Reply::Holes(holes)))) =
                (stat.await, holes.await)
            else {
                segment.set_unpunchable();
                continue;
            };
            let before = segment.book.allocated();
            // A file system may need blocks of its own to say where the holes are.
            if allocated > before {
                self.volume.shared.charge(allocated - before);
            }
            segment.book.set_punched(allocated, punched_bytes(&footer.records, &holes));
            segment.holes.replace(holes);
            segment.unpunchable_bytes.set(segment.book.space().dead);
            let less = before.saturating_sub(allocated);
            self.volume.shared.counters.bytes_punched.fetch_add(less, Relaxed);
            self.volume.shared.give_budget(less);
            made |= less > 0;
        }
        made
    }
}

/// What else is here under a block's key and is of no use without it: its other coordinates, and with a block of a
/// stream its other groups. A boundary's state leaves by itself.
fn siblings<'a>(
    shared: &'a crate::engine::shared::Shared,
    class: &'a RecordClass,
    key: &'a BlockKey,
    columns: &'a BTreeSet<(Group, Coordinate)>,
) -> impl Iterator<Item = (BlockFingerprint, Location)> + 'a {
    let alone = class.is_boundary();
    let others = columns.iter().filter(move |(group, coordinate)| {
        (*group, *coordinate) != (class.group, class.coordinate) && (!alone || *group == class.group)
    });
    others.filter_map(move |(group, coordinate)| {
        let print = shared.index.key().of(class.namespace.local, key, *group, *coordinate);
        match shared.index.lookup(print) {
            Lookup::Live(at) => Some((print, at)),
            _ => None,
        }
    })
}
