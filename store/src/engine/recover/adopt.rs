//! Takes what segments list into the index: definitions, deletes, records and their blocks.
//!
//! Segments come newest first, and the entries of one segment last first. So whatever kills or replaces a record
//! has been seen before the record: a block that is there already stays, one that is buried is left out, and no
//! second pass is needed. Short ids are resolved in log order before, segment by segment.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::rc::Rc;
use std::sync::Arc;

use kvarts_layout::arrange::RunLayout;
use kvarts_layout::format::body::{Blocks, Definition, ENCODING_RAW, layout_from_code};
use kvarts_layout::format::footer::{Content, Defined, Entry};
use kvarts_layout::format::record::{self, Body};
use kvarts_layout::format::{PAGE_BYTES, page_align};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use super::{Recovery, RecoveryReport};
use crate::engine::read::decode::{self, Stored};
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::engine::shared::recency::{AGE_MAX, EPOCH_S, steps_before};
use crate::engine::shared::record_class::{RecordClass, RecordForm};
use crate::engine::space::evict::batch::range_of;
use crate::engine::space::evict::pages::{Holes, Lying, touched};
use crate::engine::tasks::notify::yield_now;
use crate::engine::volume::pages::{CLASS, memory};
use crate::engine::volume::segment::Segment;
use crate::index::{
    EPOCHS, Entry as Indexed, Gathering, Heat, Location, Lookup, RecordId, RecordInfo, Recovered,
};
use kvarts_contract::error::{Reason, SpaceCause};

/// Blocks that are taken into the index at once while the store is open: about a millisecond's.
const BLOCKS_BESIDE: usize = 4096;
/// Records of a segment that are taken in before others have their turn.
const RECORDS_AT_ONCE: usize = 256;

/// Blocks on their way into the index, of all shards that an executor recovers: the more go there at once, the less each costs.
pub(crate) struct Batch {
    found: Option<Gathering>,
    records: Vec<RecordId>,
    conflicts: Vec<(Recovered, Indexed)>,
    last: Option<LastClass>,
    /// Some of the records may have no live block.
    has_empty: bool,
    /// Shards that are still to come, this one included.
    shards_left: usize,
    /// Blocks that go there at once, at most.
    most: usize,
    /// The store is open: a copy that others serve already stays.
    is_beside: bool,
    counts: BTreeMap<u32, Counts>,
}

/// What came of a shard.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    records: u64,
    blocks: u64,
    duplicates: u64,
}

impl Batch {
    /// Of this number of shards.
    pub(crate) fn new(shards: usize) -> Self {
        Self {
            found: None,
            records: Vec::new(),
            conflicts: Vec::new(),
            last: None,
            has_empty: false,
            shards_left: shards,
            most: usize::MAX,
            is_beside: false,
            counts: BTreeMap::new(),
        }
    }

    /// The same while the store is open: little at a time, for others look into the index meanwhile.
    pub(crate) fn beside(shards: usize) -> Self {
        Self { most: BLOCKS_BESIDE, is_beside: true, ..Self::new(shards) }
    }

    /// A shard begins that has about this number of blocks.
    pub(super) fn begin(&mut self, shared: &Shared, shard: u32, blocks: usize) {
        let all = blocks.saturating_mul(self.shards_left.max(1));
        self.shards_left = self.shards_left.saturating_sub(1);
        self.counts.entry(shard).or_default();
        if self.found.is_none() && blocks > 0 {
            let most = shared.batches.recovered_blocks.min(self.most);
            self.found = Some(shared.index.gathering(all.min(most)));
        }
    }

    /// Takes all of it into the index, and says in the reports of the shards what came of them.
    pub(crate) fn finish(mut self, shared: &Shared, reports: &mut [RecoveryReport]) -> Result<(), Reason> {
        self.flush(shared)?;
        for report in reports {
            let Counts { records, blocks, duplicates } =
                self.counts.get(&report.shard).copied().unwrap_or_default();
            (report.records, report.blocks, report.duplicates) = (records, blocks, duplicates);
        }
        Ok(())
    }

    /// Other tasks have their turn, if there are any.
    pub(super) async fn let_others(&self) {
        if self.is_beside {
            yield_now().await;
        }
    }

    fn count(&mut self, shard: u32) -> &mut Counts {
        self.counts.entry(shard).or_default()
    }

    fn flush_if_full(&mut self, shared: &Shared) -> Result<(), Reason> {
        let most = shared.batches.recovered_blocks.min(self.most).max(1);
        let is_full = self.found.as_ref().is_some_and(|found| found.len() >= most);
        if is_full { self.flush(shared) } else { Ok(()) }
    }

    /// Puts what was found into the index. What is there already is newer, or another shard's.
    pub(super) fn flush(&mut self, shared: &Shared) -> Result<(), Reason> {
        let index = &shared.index;
        let Some(found) = &mut self.found else { return Ok(()) };
        index
            .insert_live(found, &mut self.conflicts)
            .map_err(|_| Reason::Bug("recovered blocks were refused by the index"))?;
        let has_lost = !self.conflicts.is_empty();
        self.settle_copies(shared);
        if has_lost || std::mem::take(&mut self.has_empty) {
            for record in std::mem::take(&mut self.records) {
                let shard = index.records().get(record).map(|info| u32::from(info.shard));
                if index.free_record(record).is_ok()
                    && let Some(shard) = shard
                {
                    self.count(shard).records -= 1;
                }
            }
        }
        self.records.clear();
        Ok(())
    }

    /// Of copies in several shards the one in the lowest shard counts, whichever shard is recovered first: so two starts
    /// serve the same bytes, and the checker, which cannot know in which order shards came, says the same. Two shards
    /// hold a block of different producers where a put was refused at its deadline and written all the same, or where
    /// an evicted block still stands in a segment that was not recycled.
    fn settle_copies(&mut self, shared: &Shared) {
        for (found, there) in std::mem::take(&mut self.conflicts) {
            let of = shared.index.records().get(found.location.record);
            let Some(mine) = of.map(|info| u32::from(info.shard)) else { continue };
            let counts = self.count(mine);
            (counts.blocks, counts.duplicates) = (counts.blocks - 1, counts.duplicates + 1);
            let Lookup::Live(at) = there.state else { continue };
            // Its own shard's recovery may be about to free it.
            let Some(info) = shared.index.records().hold(at.record) else { continue };
            let is_ours = u32::from(info.shard) > mine && !self.is_beside;
            let moved = (is_ours && !kvarts_layout::planted!("first-shard-wins"))
                .then(|| shared.index.replace_location(found.print, at, found.location));
            match moved {
                Some(Ok(Some(_))) => shared.supersede(at.record),
                // An older copy of this shard, or the other one has been replaced by a newer one of this.
                _ => shared.index.release_record(at.record),
            }
        }
    }
}

/// The class of the raw record before: neighbours are mostly of one.
struct LastClass {
    key: (u32, u32, u64, u8, u16, usize),
    class: Arc<RecordClass>,
    payload_bytes: u64,
}

/// The class and arrangement of a record of blocks, or `None` if this store cannot read it.
pub(super) fn class_of(
    shared: &Shared,
    namespace: &Arc<Namespace>,
    blocks: &Blocks,
) -> Option<(Arc<RecordClass>, Arc<RunLayout>)> {
    let coordinate = Coordinate::from_u64(blocks.coordinate)?;
    let layout = layout_from_code(blocks.layout)?;
    let form = RecordForm { layout, layout_version: blocks.layout_version, encoding: blocks.encoding };
    let class = shared.classes.intern(namespace, (Group(blocks.group), coordinate), form).ok()?;
    let count = u32::try_from(blocks.blocks.len()).ok()?;
    let layout = class.layout_of(count).ok()?;
    decode::payload_bytes(blocks, &layout)?;
    Some((class, layout))
}

impl Recovery<'_> {
    /// Takes in what a segment lists. Every newer segment has been taken in before.
    /// Blocks of which a hole has taken something have been evicted.
    pub(super) async fn adopt(&mut self, segment: &Rc<Segment>, entries: &[Entry]) -> Result<(), Reason> {
        let namespaces = self.resolve(segment, entries).await?;
        // What a segment buries may lie in the same segment.
        for (entry, namespace) in entries.iter().zip(&namespaces) {
            self.bury(entry, namespace);
            // One entry has up to a few hundred.
            if matches!(entry.content, Content::Tombstones(_)) {
                self.batch.let_others().await;
            }
        }
        let all: Vec<_> = entries.iter().zip(&namespaces).rev().collect();
        for some in all.chunks(RECORDS_AT_ONCE) {
            for (entry, namespace) in some {
                let Content::Blocks(blocks) = &entry.content else { continue };
                match namespace.first() {
                    Some(Some(namespace)) => self.record(segment, entry, blocks, namespace)?,
                    _ => self.report.undefined += 1,
                }
            }
            self.batch.let_others().await;
        }
        Ok(())
    }

    /// The namespaces that each entry names, in log order: a short id means what the nearest definition before it
    /// says. An identity counts only behind its spec in the same segment, even if the spec is known from another:
    /// otherwise what counts would depend on the order in which segments are taken in.
    async fn resolve(&mut self, segment: &Rc<Segment>, entries: &[Entry]) -> Result<Vec<Names>, Reason> {
        let mut known = BTreeMap::<u32, Arc<Namespace>>::new();
        let mut specs = BTreeSet::new();
        let mut resolved = Vec::with_capacity(entries.len());
        for entry in entries {
            let find = |local: u32| known.get(&local).map(Arc::clone);
            resolved.push(match &entry.content {
                Content::Blocks(blocks) => Names::One([find(blocks.namespace)]),
                Content::Tombstones(tombstones) => {
                    Names::Many(tombstones.entries.iter().map(|one| find(one.namespace)).collect())
                }
                Content::Spec(defined) => {
                    specs.insert(defined.id);
                    if !self.volume.shared.names.has_spec(defined.id)
                        && let Some(definition) = self.definition(segment, entry, defined).await?
                    {
                        // One that contradicts itself leaves its records undefined.
                        let _ = self.volume.shared.names.recover_spec(&definition);
                    }
                    Names::None
                }
                Content::Identity(defined) => {
                    let namespace = self.namespace(segment, entry, defined).await?;
                    match namespace.filter(|namespace| specs.contains(&namespace.spec.id.0)) {
                        Some(namespace) => {
                            segment.rename(defined.local, namespace.local);
                            known.insert(defined.local, namespace);
                        }
                        None => drop(known.remove(&defined.local)),
                    }
                    Names::None
                }
                Content::Epoch(_) | Content::Unknown(_) => Names::None,
            });
        }
        Ok(resolved)
    }

    async fn namespace(
        &mut self,
        segment: &Segment,
        entry: &Entry,
        defined: &Defined,
    ) -> Result<Option<Arc<Namespace>>, Reason> {
        let names = &self.volume.shared.names;
        if let Some(namespace) = names.get(NamespaceId(defined.id)) {
            return Ok(Some(namespace));
        }
        let definition = self.definition(segment, entry, defined).await?;
        Ok(definition.and_then(|definition| self.volume.shared.names.recover_identity(&definition).ok()))
    }

    /// The definition itself, from its record: a footer has only its ids. Needed once for each id.
    async fn definition(
        &mut self,
        segment: &Segment,
        entry: &Entry,
        defined: &Defined,
    ) -> Result<Option<Definition>, Reason> {
        let bytes = memory(self.volume, entry.header_bytes as usize)?;
        self.report.metadata_bytes += u64::from(entry.header_bytes);
        let read = self.volume.driver.read_into(CLASS, segment.file, entry.offset, bytes).await;
        let Ok(bytes) = read else { return Ok(None) };
        let position = self.volume.position(segment, entry.offset);
        let body = record::open(&bytes.to_vec(), &position, &self.volume.shared.secret)
            .and_then(|record| record.body());
        Ok(match body {
            Ok(Body::Spec(definition) | Body::Identity(definition)) if definition.id == defined.id => {
                Some(definition)
            }
            _ => None,
        })
    }

    fn bury(&mut self, entry: &Entry, namespaces: &Names) {
        let mut dead = self.volume.tombstones.borrow_mut();
        match &entry.content {
            Content::Epoch(epoch) => dead.bury_all(epoch),
            Content::Tombstones(tombstones) => {
                for (tombstone, namespace) in tombstones.entries.iter().zip(namespaces.iter()) {
                    match namespace {
                        Some(namespace) => dead.bury(namespace.id, tombstone),
                        None => self.report.undefined += 1,
                    }
                }
            }
            _ => {}
        }
    }

    fn record(
        &mut self,
        segment: &Segment,
        entry: &Entry,
        blocks: &Blocks,
        namespace: &Arc<Namespace>,
    ) -> Result<(), Reason> {
        let Some(class) = self.class(entry, blocks, namespace) else {
            self.report.unusable += 1;
            return Ok(());
        };
        let gone = self.gone(segment, entry, (blocks, &class));
        if gone.as_ref().is_some_and(|gone| gone.iter().all(|gone| *gone)) {
            self.report.evicted += blocks.blocks.len() as u64;
            return Ok(());
        }
        let is_gone = |block: u16| {
            gone.as_ref().is_some_and(|gone| gone.get(usize::from(block)).copied().unwrap_or(true))
        };
        let recency = self.checkpoint.recency(self.volume.position(segment, entry.offset));
        let expires_ms = recency.map_or(blocks.expires_ms, |recency| recency.expires_ms);
        if expires_ms != 0 && expires_ms <= self.now_ms {
            self.report.expired += 1;
            return Ok(());
        }
        let dead = self.volume.tombstones.borrow();
        if dead.covers(namespace.id, entry.sequence) {
            self.report.deleted += blocks.blocks.len() as u64;
            return Ok(());
        }
        let expires = if expires_ms == 0 { 0 } else { self.volume.shared.expiry_step(expires_ms) };
        self.volume.shared.note_expiry((self.volume.shard, segment.number), expires);
        let Some(info) = info(self.volume.shard, segment.number, entry, (blocks, class.number), expires)
        else {
            self.report.unusable += 1;
            return Ok(());
        };
        let info =
            RecordInfo { parent: self.volume.shared.parent_print(&class, blocks.parent).first(), ..info };
        let last_s = recency.map_or(blocks.created_ms / 1000, |recency| u64::from(recency.last_access_s));
        // Used since it was put.
        let used = last_s > (blocks.created_ms / 1000).saturating_add(EPOCH_S);
        let heat = Heat { frequency: u8::from(used), epoch: self.epoch_of(last_s), ..Heat::default() };
        let index = &self.volume.shared.index;
        let record = index.records().insert(info).map_err(|_| Reason::NoSpace(SpaceCause::Records))?;
        let second = u32::try_from(last_s.min(self.now_ms / 1000)).unwrap_or(u32::MAX);
        index.records().note_use(record, second);
        self.batch.count(self.volume.shard).records += 1;
        segment.note_cold(self.volume.shared.step_of(second));
        self.batch.records.push(record);
        let mut pushed = 0;
        for (block, name) in (0u16..).zip(&blocks.blocks) {
            if is_gone(block) {
                self.report.evicted += 1;
                self.batch.has_empty = true;
                continue;
            }
            let key = BlockKey(name.key);
            if !dead.is_empty()
                && dead.covers_block((namespace.id, key), (blocks.group, blocks.coordinate), entry.sequence)
            {
                self.report.deleted += 1;
                self.batch.has_empty = true;
                continue;
            }
            let print = index.key().of(namespace.local, &key, class.group, class.coordinate);
            let found = self.batch.found.get_or_insert_with(|| index.gathering(0));
            found.push(Recovered { print, location: Location { record, block }, heat });
            pushed += 1;
        }
        drop(dead);
        self.batch.count(self.volume.shard).blocks += pushed;
        self.batch.flush_if_full(&self.volume.shared)
    }

    fn class(
        &mut self,
        entry: &Entry,
        blocks: &Blocks,
        namespace: &Arc<Namespace>,
    ) -> Option<Arc<RecordClass>> {
        let count = blocks.blocks.len();
        if blocks.encoding != ENCODING_RAW {
            // The length is each record's own.
            let (class, layout) = class_of(&self.volume.shared, namespace, blocks)?;
            return (decode::payload_bytes(blocks, &layout)? == entry.payload_bytes).then_some(class);
        }
        let key =
            (namespace.local, blocks.group, blocks.coordinate, blocks.layout, blocks.layout_version, count);
        if self.batch.last.as_ref().is_none_or(|last| last.key != key) {
            let (class, layout) = class_of(&self.volume.shared, namespace, blocks)?;
            let payload_bytes = layout.payload_bytes();
            self.batch.last = Some(LastClass { key, class, payload_bytes });
        }
        let last = self.batch.last.as_ref()?;
        // Another length is another arrangement than the one that reads would compute.
        (last.payload_bytes == entry.payload_bytes).then(|| Arc::clone(&last.class))
    }

    /// Which blocks of a record holes have taken; `None` if there is no hole in it.
    fn gone(
        &self,
        segment: &Segment,
        entry: &Entry,
        (blocks, class): (&Blocks, &RecordClass),
    ) -> Option<Vec<bool>> {
        let holes = segment.holes.borrow();
        let holes: &Holes = &holes;
        let (at, len) = range_of(entry);
        if !touched(holes, at, len) {
            return None;
        }
        let count = blocks.blocks.len();
        let all = Some(vec![true; count]);
        let Ok(layout) = class.layout_of(u32::try_from(count).unwrap_or(u32::MAX)) else { return all };
        let Ok(stored) = Stored::of(blocks, &layout) else { return all };
        let lying = Lying {
            offset: entry.offset,
            header_bytes: u64::from(entry.header_bytes),
            payload_bytes: entry.payload_bytes,
            layout: &layout,
            stored: stored.as_ref().map(|stored| &stored.places),
        };
        Some((0u16..).take(count).map(|block| lying.is_gone(block, holes)).collect())
    }

    /// The coarse time of the index for a moment in the past.
    fn epoch_of(&self, last_s: u64) -> u16 {
        let age = steps_before((self.now_ms / 1000).saturating_sub(last_s));
        self.volume.shared.epoch().wrapping_sub(age.min(u64::from(AGE_MAX)) as u16) % EPOCHS
    }
}

/// The namespaces that one entry names.
enum Names {
    None,
    One([Option<Arc<Namespace>>; 1]),
    Many(Vec<Option<Arc<Namespace>>>),
}

impl std::ops::Deref for Names {
    type Target = [Option<Arc<Namespace>>];

    fn deref(&self) -> &Self::Target {
        match self {
            Self::None => &[],
            Self::One(one) => one,
            Self::Many(many) => many,
        }
    }
}

fn info(
    shard: u32,
    segment: u32,
    entry: &Entry,
    (blocks, class): (&Blocks, u32),
    expires: u32,
) -> Option<RecordInfo> {
    Some(RecordInfo {
        shard: u16::try_from(shard).ok()?,
        segment,
        page: u32::try_from(entry.offset / PAGE_BYTES).ok()?,
        header_pages: u16::try_from(u64::from(entry.header_bytes) / PAGE_BYTES).ok()?,
        payload_pages: u32::try_from(page_align(entry.payload_bytes)? / PAGE_BYTES).ok()?,
        blocks: u16::try_from(blocks.blocks.len()).ok().and_then(NonZeroU16::new)?,
        live: 0,
        class,
        expires,
        parent: 0,
        hangs: false,
    })
}
