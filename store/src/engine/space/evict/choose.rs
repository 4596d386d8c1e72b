//! Which blocks of a shard go: those that the policy ranks highest in the segments that are coldest, for as many bytes
//! as are wanted.
//!
//! The footers of a few segments (`coldest`) name their blocks; the index says of each whether it is here and how warm.
//! Of these the highest ranks are kept, as many as have the bytes. More segments are listed while one of the next may
//! hold something older than what was found. So the work is that of a few segments' blocks for each segment's worth of
//! room, and not of the store's; a use of a block costs nothing beyond its heat; and in a store of few segments the
//! choice is exact.
//!
//! What holds for every policy:
//! - a block under a lease stays, and so do those before it in its record;
//! - a block that is favoured goes when nothing else is left;
//! - a block does not go before what hangs on it, in its record or in others: of a chain the end goes first. What is listed of a
//!   chain is picked from its end, each block as soon as all that hangs on it is picked; the end of others lies in another shard,
//!   or is a put under way, and they stay;
//! - of equal rank those go that empty a segment, then those whose record was unused for longest, then the later in the
//!   log;
//! - where single blocks cannot be given back (layer-block layout, encoded records) a record goes as a whole, when the
//!   last of its blocks may.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvarts_layout::Coordinate;
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::{Blocks, ENCODING_RAW};
use kvarts_layout::format::footer::{Content, Entry, Footer};
use kvarts_layout::{BlockKey, Group, Layout};

use super::coldest::{Footers, LOOKED_AT, OLDEST_PARTS, Sample, coldest, footers, is_punchable};
use crate::engine::shared::policy::{Candidate, EvictionPolicy};
use crate::engine::shared::record_class::RecordClass;
use crate::engine::space::Space;
use crate::engine::tasks::steps::Section;
use crate::engine::volume::segment::Segment;
use crate::index::{BlockFingerprint, Located, Location, RecordInfo};

/// Blocks that are listed for one choice beyond the first segment's, about.
const BLOCKS_MAX: u64 = 64 << 10;

/// Records of a chain that are picked without a turn for others.
const PICKED_AT_ONCE: u64 = 64;

/// Blocks of one record on disk that go.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leaving {
    /// By their place in the index: where their times differ, each has a record of its own.
    pub(crate) blocks: Vec<(Location, BlockFingerprint)>,
}

/// What goes, by segment and by the page at which the record begins.
pub(crate) type Victims = BTreeMap<u32, BTreeMap<u32, Leaving>>;

/// What the blocks of a class have in common.
#[derive(Clone, Copy, Debug)]
struct Facts {
    whole: bool,
    boundary: bool,
    cost: i8,
}

impl Facts {
    fn of(class: &RecordClass) -> Self {
        Self {
            whole: class.encoding != ENCODING_RAW || class.layout == Layout::LayerBlock,
            boundary: class.is_boundary(),
            cost: class.namespace.worth(),
        }
    }
}

/// A record of a segment that was listed.
#[derive(Debug)]
struct Listed {
    segment: u32,
    page: u32,
    /// Bytes that a block gives back.
    share: u64,
    whole: bool,
    /// One behind the last block that stays.
    keep: u16,
    /// The block that it hangs on, and how often it counts there. 0 for nothing.
    parent: (u64, u32),
    /// All that is live of it is picked.
    picked: bool,
}

/// What is listed of a record and not picked: the last of it has something behind it that is not.
#[derive(Debug, Default)]
struct Waiting {
    /// In the order of the record.
    blocks: Vec<(Order, Picked)>,
    /// The least of what hangs on it and is picked, and its age: it goes after that, and was used as lately.
    behind: Option<(Order, u32)>,
}

/// In which order blocks go: the greatest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Order {
    rank: u32,
    used: Reverse<u32>,
    /// Later in the log, later in the record: what hangs on others was put after them.
    sequence: u64,
    /// Records behind it that are picked.
    behind: Reverse<u32>,
    segment: u32,
    page: u32,
    block: u16,
}

impl Order {
    /// The same, no earlier than right after `other`.
    fn after(self, other: &Self) -> Self {
        Self {
            rank: self.rank.min(other.rank),
            used: self.used.min(other.used),
            sequence: self.sequence.min(other.sequence),
            behind: Reverse(self.behind.0.max(other.behind.0.saturating_add(1))),
            ..self
        }
    }
}

/// A block that is to go.
#[derive(Debug)]
struct Picked {
    /// Its record among those listed.
    of: usize,
    at: Location,
    print: BlockFingerprint,
    known: Candidate,
    /// How much hangs on it that is not in its record.
    hanging: u32,
}

/// A live block of a record that is being listed.
struct Seen {
    block: u16,
    found: Located,
    print: BlockFingerprint,
    rank: u32,
    known: Candidate,
}

struct Choice<'a> {
    space: &'a Space,
    policy: EvictionPolicy,
    of: &'a dyn Fn(&RecordClass) -> bool,
    wanted: u64,
    classes: BTreeMap<u32, Option<Facts>>,
    listed: Vec<Listed>,
    picked: BTreeMap<Order, Picked>,
    /// Bytes of what is picked, by rank.
    levels: BTreeMap<u32, u64>,
    /// Their sum.
    bytes: u64,
    blocks: u64,
    /// Segments of which some block stays.
    in_use: BTreeSet<u32>,
    /// What waits for others, by its place among what is listed; and those places by the block that the record waits for.
    waiting: BTreeMap<usize, Waiting>,
    waits_for: BTreeMap<u64, usize>,
    /// How many records are picked that hang on a block.
    released: BTreeMap<u64, u32>,
    /// Blocks on which something hangs that stays after all.
    needed: BTreeSet<u64>,
    samples: Vec<(Rc<Segment>, Sample)>,
}

/// Blocks that together have about `wanted` bytes, those of the highest rank, and the footers that were read for it.
pub(crate) async fn choose(
    space: &Space,
    policy: EvictionPolicy,
    of: &dyn Fn(&RecordClass) -> bool,
    wanted: u64,
) -> (Victims, Footers) {
    let mut section = Section::begin(&space.volume.shared.work.evictions, &*space.volume.shared.clock);
    let mut choice = Choice {
        space,
        policy,
        of,
        wanted,
        classes: BTreeMap::new(),
        listed: Vec::new(),
        picked: BTreeMap::new(),
        levels: BTreeMap::new(),
        bytes: 0,
        blocks: 0,
        in_use: BTreeSet::new(),
        waiting: BTreeMap::new(),
        waits_for: BTreeMap::new(),
        released: BTreeMap::new(),
        needed: BTreeSet::new(),
        samples: Vec::new(),
    };
    let mut kept = Footers::new();
    for some in coldest(space, &mut section).await.chunks(LOOKED_AT) {
        if some.first().is_none_or(|next| choice.is_enough(next)) {
            break;
        }
        section.pause();
        footers(&space.volume, some, &mut kept).await;
        for segment in some {
            match kept.get(&segment.number).filter(|_| is_punchable(&space.volume, segment)) {
                Some((_, footer)) if choice.blocks < BLOCKS_MAX || choice.bytes < wanted => {
                    choice.list(segment, footer, &mut section).await;
                }
                // Unreadable, or in use: its turn comes again.
                None => segment.coldest.set(space.volume.shared.ages.steps() as i64),
                Some(_) => {}
            }
        }
    }
    (choice.end(&mut section).await, kept)
}

impl Choice<'_> {
    /// Whether nothing in the segment that comes next is likely to go before what is picked.
    fn is_enough(&self, next: &Segment) -> bool {
        let now = self.space.volume.shared.ages.steps() as i64;
        let Some((boundary, _)) = self.boundary() else { return false };
        let shared = &self.space.volume.shared;
        // With favoured blocks alone it is not enough, however lately the others were used.
        if boundary < 2 && self.blocks < BLOCKS_MAX && shared.favoured.at(shared.clock.now()).any() {
            return false;
        }
        let since = now - i64::from(self.policy.age_of(boundary));
        !kvarts_layout::planted!("eviction-lists-all")
            && (self.blocks >= BLOCKS_MAX || since <= next.coldest.get())
    }

    /// The rank at which what is picked becomes enough, and the bytes that rank above it; `None` if all is not enough.
    fn boundary(&self) -> Option<(u32, u64)> {
        let mut above = 0;
        for (rank, bytes) in self.levels.iter().rev() {
            if above + bytes >= self.wanted {
                return Some((*rank, above));
            }
            above += bytes;
        }
        None
    }

    fn facts(&mut self, class: u32) -> Option<Facts> {
        *self.classes.entry(class).or_insert_with(|| {
            let class = self.space.volume.shared.classes.get(class).filter(|class| (self.of)(class));
            class.map(|class| Facts::of(&class))
        })
    }

    /// Looks at every live block of a segment.
    async fn list(&mut self, segment: &Rc<Segment>, footer: &Footer, section: &mut Section<'_>) {
        let blocks = footer.records.iter().map(|entry| match &entry.content {
            Content::Blocks(blocks) => blocks.blocks.len() as u64,
            _ => 0,
        });
        let mut sample = Sample::of(blocks.sum());
        for entry in &footer.records {
            let Content::Blocks(blocks) = &entry.content else { continue };
            let mut next = self.record(segment, entry, blocks, &mut sample);
            while let Some(of) = next {
                section.step(PICKED_AT_ONCE).await;
                next = self.pick_from(of, &mut sample);
            }
            self.blocks += blocks.blocks.len() as u64;
            section.step(blocks.blocks.len() as u64).await;
        }
        self.samples.push((Rc::clone(segment), sample));
    }

    /// Ranks the live blocks of one record, and picks those that are among the highest so far. Gives a record with which to go on.
    fn record(
        &mut self,
        segment: &Segment,
        entry: &Entry,
        blocks: &Blocks,
        sample: &mut Sample,
    ) -> Option<usize> {
        let mut seen = self.seen(segment, entry, blocks);
        let first = seen.first()?;
        let (info, used) = (first.found.record, self.used(&seen));
        let facts = self.facts(info.class)?;
        self.rank(&mut seen, facts, used);
        let lives = u16::try_from(seen.len()).unwrap_or(u16::MAX);
        let of = self.listed.len();
        let share = share_of(&info, lives, facts.whole);
        self.listed.push(Listed {
            segment: segment.number,
            page: info.page,
            share,
            whole: facts.whole,
            keep: 0,
            parent: (info.parent, hanging_of(&seen)),
            picked: false,
        });
        let (sequence, behind) = (segment.first_sequence.get(), Reverse(0));
        let (mut blocks, used) = (Vec::with_capacity(seen.len()), Reverse(used));
        for Seen { block, found, print, rank, known } in seen {
            if rank == 0 {
                self.stays(of, block);
                continue;
            }
            let order =
                Order { rank, used, sequence, behind, segment: segment.number, page: info.page, block };
            let hanging = found.hanging;
            blocks.push((order, Picked { of, at: found.location, print, known, hanging }));
        }
        self.waiting.insert(of, Waiting { blocks, behind: None });
        self.pick_from(of, sample)
    }

    /// Picks what is listed of a record from its end, and so on with what it hangs on, a few records at once. Gives the record with
    /// which to go on.
    fn pick_from(&mut self, of: usize, sample: &mut Sample) -> Option<usize> {
        (0..PICKED_AT_ONCE).try_fold(of, |of, _| self.pick_record(of, sample))
    }

    /// Picks what is listed of a record from its end, up to a block on which something hangs that is not picked. If all of it is
    /// picked, gives the listed record that has waited for that.
    fn pick_record(&mut self, of: usize, sample: &mut Sample) -> Option<usize> {
        let is_held = |(_, one): &(Order, Picked)| {
            one.hanging > self.released.get(&one.print.first()).copied().unwrap_or(0)
        };
        let blocks = &self.waiting.get(&of)?.blocks;
        let held = blocks.iter().rposition(is_held);
        if let Some((_, held)) = held.and_then(|at| blocks.get(at)) {
            self.waits_for.insert(held.print.first(), of);
            if self.listed.get(of)?.whole {
                return None;
            }
        }
        let waiting = self.waiting.get_mut(&of)?;
        let behind = waiting.behind;
        let going: Vec<_> = waiting.blocks.drain(held.map_or(0, |at| at + 1)..).rev().collect();
        let mut last = None;
        for (mut order, mut picked) in going {
            if let Some((behind, age)) = behind {
                // A use of what is behind it was a use of it.
                picked.known.age = picked.known.age.min(age);
                order.rank = order.rank.min(self.policy.rank(&picked.known).max(1));
                order = order.after(&behind);
            }
            last = Some((order, picked.known.age));
            self.pick(order, picked, sample);
        }
        if held.is_some() {
            return None;
        }
        self.waiting.remove(&of);
        let record = self.listed.get_mut(of).filter(|record| record.keep == 0)?;
        record.picked = true;
        let (parent, count) = record.parent;
        if parent == 0 || count == 0 {
            return None;
        }
        *self.released.entry(parent).or_default() += count;
        let next = self.waits_for.remove(&parent)?;
        let waiting = self.waiting.get_mut(&next)?;
        let both = waiting.behind.into_iter().chain(last);
        waiting.behind = both.reduce(|one, other| (one.0.min(other.0), one.1.min(other.1)));
        Some(next)
    }

    fn pick(&mut self, order: Order, picked: Picked, sample: &mut Sample) {
        let share = self.listed.get(picked.of).map_or(0, |record| record.share);
        sample.add(order.rank, share);
        self.bytes += share;
        *self.levels.entry(order.rank).or_default() += share;
        self.picked.insert(order, picked);
        self.drop_least();
    }

    /// Drops ranks that the wanted bytes do not need any more: at most two levels for each block that is picked, so that no
    /// single step drops many.
    fn drop_least(&mut self) {
        for _ in 0..2 {
            let Some((rank, bytes)) = self.levels.first_key_value().map(|(rank, bytes)| (*rank, *bytes))
            else {
                return;
            };
            if self.bytes - bytes < self.wanted {
                return;
            }
            let Some((order, least)) = self.picked.pop_first() else { return };
            let share = self.listed.get(least.of).map_or(0, |record| record.share);
            self.bytes -= share;
            match bytes.saturating_sub(share) {
                0 => self.levels.remove(&rank),
                left => self.levels.insert(rank, left),
            };
            self.stays(least.of, order.block);
        }
    }

    /// The live blocks of a record, in order.
    fn seen(&self, segment: &Segment, entry: &Entry, blocks: &Blocks) -> Vec<Seen> {
        let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { return Vec::new() };
        let index = &self.space.volume.shared.index;
        let (namespace, group) = (segment.local(blocks.namespace), Group(blocks.group));
        let mut seen = Vec::new();
        for (block, name) in (0u16..).zip(&blocks.blocks) {
            let print = index.key().of(namespace, &BlockKey(name.key), group, coordinate);
            let Some(found) = index.locate(print) else { continue };
            if self.space.volume.is_at(segment, entry.offset, &found.record) && found.location.block == block
            {
                seen.push(Seen { block, found, print, rank: 0, known: Candidate::default() });
            }
        }
        seen
    }

    /// The second of the last use of any of these blocks.
    fn used(&self, seen: &[Seen]) -> u32 {
        let records = self.space.volume.shared.index.records();
        let mut last = None;
        let mut used = 0;
        for one in seen {
            if last.replace(one.found.location.record) != Some(one.found.location.record) {
                used = used.max(records.used(one.found.location.record));
            }
        }
        used
    }

    /// No rank is higher than those of the blocks behind; zero for what stays.
    fn rank(&self, seen: &mut [Seen], facts: Facts, used: u32) {
        let shared = &self.space.volume.shared;
        let (epoch, record_age) = (shared.epoch(), shared.age_of(used));
        let first_used = seen.iter().find(|one| one.found.heat.frequency > 0).map(|one| one.block);
        let mut least = u32::MAX;
        let favours = shared.favoured.at(shared.clock.now());
        // What is favoured goes after all else, and before nothing: a lease alone keeps a block.
        let others = if favours.any() { 2 } else { 1 };
        for one in seen.iter_mut().rev() {
            let heat = one.found.heat;
            one.known = Candidate {
                age: crate::engine::shared::recency::RecencyClock::age(heat.age(epoch), record_age),
                frequency: heat.frequency,
                tip: !facts.whole && one.block + 1 == one.found.record.blocks.get() && !heat.continued,
                passed: !facts.whole
                    && heat.frequency == 0
                    && first_used.is_some_and(|first| one.block > first),
                boundary: facts.boundary,
                cost: facts.cost,
            };
            let own = match one.found.leased {
                true => 0,
                false if favours.has(one.print) => 1,
                false => self.policy.rank(&one.known).max(others),
            };
            least = least.min(own);
            one.rank = least;
        }
        if facts.whole {
            seen.iter_mut().for_each(|one| one.rank = least);
        }
    }

    /// The block stays, and so do those before it in its record, and what that hangs on.
    fn stays(&mut self, of: usize, block: u16) {
        let Some(record) = self.listed.get_mut(of) else { return };
        record.keep = record.keep.max(block.saturating_add(1));
        self.in_use.insert(record.segment);
        let (parent, count) = record.parent;
        if parent != 0 && count > 0 {
            self.needed.insert(parent);
        }
        if std::mem::take(&mut record.picked)
            && let Some(released) = self.released.get_mut(&parent)
        {
            *released = released.saturating_sub(count);
        }
    }

    fn goes(&self, of: usize, block: u16) -> bool {
        self.listed.get(of).is_some_and(|one| block >= one.keep && !(one.whole && one.keep > 0))
    }

    fn segment_of(&self, picked: &Picked) -> Option<u32> {
        self.listed.get(picked.of).map(|record| record.segment)
    }

    /// What goes of what is picked.
    async fn end(mut self, section: &mut Section<'_>) -> Victims {
        for (of, waiting) in std::mem::take(&mut self.waiting) {
            section.step(1).await;
            if let Some((order, _)) = waiting.blocks.last() {
                self.stays(of, order.block);
            }
        }
        let full = self.boundary();
        let mut picked = self.enough(section).await;
        let spared = self.spare_others(&picked, section).await;
        self.keep_needed(&mut picked, section).await;
        let mut victims = Victims::new();
        for (order, block) in &picked {
            section.step(1).await;
            if let Some(record) = self.listed.get(block.of).filter(|_| self.goes(block.of, order.block)) {
                let leaving = victims.entry(record.segment).or_default().entry(record.page).or_default();
                leaving.blocks.push((block.at, block.print));
            }
        }
        self.note_coldest(full.map_or(0, |(boundary, _)| boundary), &spared);
        victims
    }

    /// What hangs on others comes before them: so where it stays after all, they are found in one pass.
    async fn keep_needed(&mut self, picked: &mut [(Order, Picked)], section: &mut Section<'_>) {
        picked.sort_unstable_by_key(|(order, _)| Reverse(*order));
        for (order, block) in picked {
            section.step(1).await;
            if self.needed.contains(&block.print.first()) || !self.goes(block.of, order.block) {
                self.stays(block.of, order.block);
            }
        }
    }

    /// Of what is picked as much as is wanted: all above the last rank that is needed, and of that rank segment by
    /// segment, those first that are emptied by it. A segment that is left in pieces costs its file.
    async fn enough(&mut self, section: &mut Section<'_>) -> Vec<(Order, Picked)> {
        let (boundary, above) = self.boundary().unwrap_or_default();
        let mut going = Vec::with_capacity(self.picked.len());
        let mut bytes_above = BTreeMap::<u32, u64>::new();
        let mut level = BTreeMap::<u32, Vec<(Order, Picked)>>::new();
        for (order, block) in std::mem::take(&mut self.picked).into_iter().rev() {
            section.step(1).await;
            match order.rank.cmp(&boundary) {
                Ordering::Greater => {
                    let share = self.listed.get(block.of).map_or(0, |record| record.share);
                    *bytes_above.entry(order.segment).or_default() += share;
                    going.push((order, block));
                }
                Ordering::Equal => level.entry(order.segment).or_default().push((order, block)),
                Ordering::Less => self.stays(block.of, order.block),
            }
        }
        let mut level: Vec<_> = level.into_iter().collect();
        level.sort_by_cached_key(|(segment, blocks)| {
            let first = blocks.first().map(|(order, _)| Reverse((order.used, order.sequence)));
            let above = bytes_above.get(segment).copied().unwrap_or(0);
            (self.in_use.contains(segment), Reverse(above), first)
        });
        let mut left = self.wanted.saturating_sub(above);
        for (order, block) in level.into_iter().flat_map(|(_, blocks)| blocks) {
            section.step(1).await;
            let record = self.listed.get(block.of).map(|record| (record.share, record.whole));
            match record {
                // A record that goes as a whole is not left in the middle.
                Some((share, whole)) if left > 0 || whole => {
                    left = left.saturating_sub(share);
                    going.push((order, block));
                }
                _ => self.stays(block.of, order.block),
            }
        }
        going
    }

    /// If the picked blocks empty enough whole segments, picked blocks of equal or lower rank in other segments stay until the
    /// next time. Emptying a segment frees more than its live bytes, so as a rule only a small remainder is wanted from
    /// another segment. A hole punched there would make that segment's file unfit for recycling: the file system would
    /// have to allocate and write its space anew. Gives the segments in which blocks stay for this reason.
    async fn spare_others(&mut self, picked: &[(Order, Picked)], section: &mut Section<'_>) -> BTreeSet<u32> {
        let (mut least, mut spared) = (BTreeMap::new(), BTreeSet::new());
        for (order, block) in picked {
            section.step(1).await;
            let Some(segment) = self.segment_of(block) else { continue };
            if self.goes(block.of, order.block) {
                let rank = least.entry(segment).or_insert(order.rank);
                *rank = order.rank.min(*rank);
            } else {
                self.in_use.insert(segment);
            }
        }
        let mut ranks: Vec<u32> = {
            let segments = self.space.volume.segments.borrow();
            let hollow = |number| segments.get(number).is_none_or(|segment| self.space.is_hollow(segment));
            let emptied = least.iter().filter(|(number, _)| !self.in_use.contains(number) && !hollow(number));
            emptied.map(|(_, rank)| *rank).collect()
        };
        ranks.sort_unstable();
        let enough = usize::try_from(self.wanted.div_ceil(self.space.volume.shared.segment_bytes))
            .unwrap_or(usize::MAX);
        let Some(rank) = ranks.len().checked_sub(enough.max(1)).and_then(|at| ranks.get(at).copied()) else {
            return spared;
        };
        for (order, block) in picked.iter().filter(|(order, _)| order.rank <= rank) {
            section.step(1).await;
            if let Some(segment) = self.segment_of(block).filter(|segment| self.in_use.contains(segment)) {
                self.stays(block.of, order.block);
                spared.insert(segment);
            }
        }
        spared
    }

    /// Notes of each listed segment when its oldest part was used that stays.
    fn note_coldest(&mut self, least: u32, spared: &BTreeSet<u32>) {
        let now = self.space.volume.shared.ages.steps() as i64;
        let part = self.wanted / OLDEST_PARTS;
        for (segment, mut sample) in std::mem::take(&mut self.samples) {
            let most = if spared.contains(&segment.number) { u32::MAX } else { least };
            let rank = sample.rank_of(part, most);
            segment.coldest.set(now - rank.map_or(0, |rank| i64::from(self.policy.age_of(rank))));
        }
    }
}

/// How many records of the index that these are all of hang on what is before them.
fn hanging_of(seen: &[Seen]) -> u32 {
    let records: BTreeSet<_> =
        seen.iter().filter(|one| one.found.record.hangs).map(|one| one.found.location.record).collect();
    records.len() as u32
}

/// Bytes that go with a block: of a record that goes as a whole its header as well.
fn share_of(record: &RecordInfo, lives: u16, whole: bool) -> u64 {
    let bytes = match whole {
        true => record.share(lives) / u64::from(lives.max(1)),
        false => u64::from(record.payload_pages) * PAGE_BYTES / u64::from(record.blocks.get()),
    };
    bytes.max(1)
}
