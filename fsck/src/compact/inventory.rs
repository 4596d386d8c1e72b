//! What a store holds, record by record, and which of its blocks are live: what its engine would find again.
//!
//! Two passes over the metadata: the first finds every delete and anything that is damaged, the second every record.
//! A block is live if its record has not expired and is not buried, and no newer production of it lies in its shard.
//! Of productions in several shards one counts, as for the engine.
//!
//! Memory: for each block on disk 40 bytes, for each record about 280 with what is planned of it; 10 TB of blocks of
//! 1 MiB, each in a record of its own, take 3.2 GB; in records of 8 blocks, 750 MB.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_layout::arrange::LAYOUT_VERSION;
use kvarts_layout::codec::Encoding;
use kvarts_layout::format::body::{
    Blocks, Definition, ENCODING_RAW, EXTENSION_ENCRYPTION, Parent, layout_from_code,
};
use kvarts_layout::format::checkpoint::{Items, RecordState, SegmentState};
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::format::names::{segment_name, shard_name};
use kvarts_layout::format::record::{self, Body};
use kvarts_layout::format::{PAGE, PAGE_BYTES};
use kvarts_layout::spec::Geometry;
use kvarts_layout::{BlockShape, Coordinate, Group, Identity};

use super::graves::Graves;
use super::refusal::{Refusal, refuse_unsound};
use crate::check::{Level, Options as CheckOptions, Outcome, SegmentReport, Stated, each_segment};
use crate::checkpoint::{Known, read_slot};
use crate::findings::Findings;
use crate::store::Store;
use crate::walk::Met;
use crate::window::{Tally, Window};

/// Names a block, or a place in a chain, among all of a store.
pub(super) type BlockHash = [u8; 16];

/// A namespace, as its definitions say it.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) id: [u8; 32],
    pub(super) identity: Vec<u8>,
    pub(super) spec_id: [u8; 32],
    pub(super) spec: Vec<u8>,
    pub(super) geometry: Geometry,
    pub(super) block_tokens: u32,
}

impl Space {
    /// The shape of its blocks of one group and coordinate.
    pub(super) fn shape(&self, group: u32, coordinate: u64) -> Option<BlockShape> {
        let coordinate = Coordinate::from_u64(coordinate)?;
        self.geometry.shape(Group(group), coordinate, self.block_tokens).ok()
    }
}

/// A segment.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// Index of its shard in [`Store::shards`].
    pub(super) shard: usize,
    pub(super) number: u32,
    pub(super) generation: u64,
    /// No record in it has a lower sequence; zero where that is not known.
    pub(super) first_sequence: u64,
    pub(super) role: Role,
    /// Bytes of records all of whose blocks are live, and the share of the others.
    pub(super) live_bytes: u64,
    /// The rest of its records.
    pub(super) dead_bytes: u64,
}

/// What may be done with a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// Nothing in it counts.
    Free,
    /// Sealed, and this program knows everything in it.
    Sealed,
    /// Unsealed, and this program knows everything in it.
    Tail,
    /// It stays: set aside, or with records that this program cannot rewrite.
    Fixed,
}

/// A record that has a live block.
#[derive(Clone, Debug)]
pub(super) struct Held {
    /// Index of its segment.
    pub(super) segment: u32,
    /// Index of its namespace.
    pub(super) space: u32,
    pub(super) offset: u64,
    pub(super) payload_bytes: u64,
    pub(super) sequence: u64,
    pub(super) coordinate: u64,
    pub(super) created_ms: u64,
    pub(super) expires_ms: u64,
    /// Of its first block among all blocks.
    pub(super) first: u64,
    pub(super) header_bytes: u32,
    pub(super) blocks: u32,
    pub(super) group: u32,
    pub(super) last_access_s: Option<u32>,
    pub(super) first_block: Option<u32>,
    /// What comes before it; `None` where nothing is known.
    pub(super) parent: Option<BlockHash>,
    pub(super) extensions: BlockHash,
    pub(super) layout: u8,
    pub(super) encoding: u8,
    /// Whether its blocks follow each other.
    pub(super) chained: bool,
}

/// What is known of one shard.
#[derive(Clone, Debug, Default)]
pub(super) struct ShardState {
    pub(super) graves: Graves,
    pub(super) next_sequence: u64,
    pub(super) known: Known,
    /// What its checkpoint says of records, by segment, generation and offset.
    recency: BTreeMap<(u32, u64, u64), (u64, u32)>,
}

/// Everything that compaction has to know.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    pub(super) spaces: Vec<Space>,
    pub(super) segments: Vec<Segment>,
    pub(super) records: Vec<Held>,
    pub(super) shards: Vec<ShardState>,
    /// For each block of each record, what it is.
    pub(super) prints: Vec<BlockHash>,
    live: Vec<u64>,
    pub(super) live_blocks: u64,
    pub(super) expired_blocks: u64,
    pub(super) buried_blocks: u64,
    pub(super) duplicate_blocks: u64,
}

pub(super) fn path(store: &Store, segment: &Segment) -> String {
    let number = store.shards.get(segment.shard).map_or(0, |shard| shard.number);
    format!("{}/{}", shard_name(number), segment_name(segment.number))
}

fn truncate16(hasher: &blake3::Hasher) -> BlockHash {
    let hash = hasher.finalize();
    hash.as_bytes().first_chunk::<16>().copied().unwrap_or_default()
}

/// What a block is, wherever it lies.
fn print(space: &[u8; 32], blocks: &Blocks, key: &[u8; 32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(space).update(key);
    hasher.update(&blocks.group.to_le_bytes()).update(&blocks.coordinate.to_le_bytes());
    truncate16(&hasher)
}

/// The place before the first block of a prefix.
fn root_print(space: &[u8; 32], blocks: &Blocks) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"root").update(space);
    hasher.update(&blocks.group.to_le_bytes()).update(&blocks.coordinate.to_le_bytes());
    truncate16(&hasher)
}

impl Inventory {
    /// Finds out what a sound store holds at a moment. Refuses a store of which any part of the picture is missing:
    /// what that part deletes or holds would come back, or go.
    pub(super) fn take(store: &Store, now_ms: u64, threads: usize) -> Result<Self, Refusal> {
        Self::collect(store, now_ms, threads).map_err(Refusal::before_writing)
    }

    fn collect(store: &Store, now_ms: u64, threads: usize) -> Result<Self, Refusal> {
        let mut inventory = Self::default();
        let options = CheckOptions { level: Level::Quick, threads, ..CheckOptions::default() };
        let sum = Mutex::new((BTreeMap::new(), Findings::default()));
        let tally = Tally::default();
        let Stated { known, findings } = each_segment(store, &options, &tally, &|shard, number, report| {
            let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
            sum.1.merge(report.findings.clone());
            sum.0.insert((shard, number), Facts::of(report));
        });
        let (facts, mut found) = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.merge(findings);
        found.sort();
        refuse_unsound(Some(store), &found)?;
        for shard in &store.shards {
            let known = known.get(&shard.number).cloned().unwrap_or_default();
            inventory.shards.push(from_checkpoint(store, shard.directory, shard.number, known)?);
        }
        inventory.take_segments(&facts);
        let work: Vec<u32> = (0u32..).take(inventory.segments.len()).collect();
        let mut catalogue = Catalogue { store, known: BTreeMap::new() };
        // Deletes first: which records they kill is known only when all are.
        for &at in &work {
            inventory.bury(store, at)?;
        }
        let half: BTreeSet<[u8; 32]> =
            inventory.shards.iter().flat_map(|shard| shard.graves.half_deleted()).collect();
        inventory.shards.iter_mut().for_each(|shard| shard.graves.finish(&half));
        let mut offered = Vec::new();
        for &at in &work {
            inventory.read_records(&mut catalogue, at, now_ms, &mut offered)?;
        }
        inventory.settle(offered);
        Ok(inventory)
    }

    fn take_segments(&mut self, facts: &BTreeMap<(usize, u32), Facts>) {
        for (&(shard, number), facts) in facts {
            if let Some(state) = self.shards.get_mut(shard) {
                state.next_sequence = state.next_sequence.max(facts.last_sequence.saturating_add(1));
            }
            self.segments.push(Segment {
                shard,
                number,
                generation: facts.generation,
                first_sequence: facts.first_sequence,
                role: facts.role,
                live_bytes: 0,
                dead_bytes: 0,
            });
        }
    }

    /// Notes what a segment buries.
    fn bury(&mut self, store: &Store, at: u32) -> Result<(), Refusal> {
        let Some(segment) = self.segments.get(at as usize).cloned() else { return Ok(()) };
        if segment.role == Role::Free {
            return Ok(());
        }
        let (entries, whole, _) = listed(store, &segment, self.shards.get(segment.shard))?;
        if !whole && let Some(segment) = self.segments.get_mut(at as usize) {
            segment.role = Role::Fixed;
        }
        let Some(state) = self.shards.get_mut(segment.shard) else { return Ok(()) };
        let mut names = BTreeMap::<u32, [u8; 32]>::new();
        for entry in &entries {
            match &entry.content {
                Content::Identity(defined) => drop(names.insert(defined.local, defined.id)),
                Content::Epoch(epoch) => state.graves.bury_all(epoch),
                Content::Tombstones(tombstones) => {
                    for tombstone in &tombstones.entries {
                        let Some(name) = names.get(&tombstone.namespace) else {
                            return Err(damaged_at(
                                store,
                                &segment,
                                entry,
                                "a tombstone lacks the definition of its namespace",
                            ));
                        };
                        state.graves.bury(*name, tombstone);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes in the records of a segment.
    fn read_records(
        &mut self,
        catalogue: &mut Catalogue<'_>,
        at: u32,
        now_ms: u64,
        offered: &mut Vec<Offer>,
    ) -> Result<(), Refusal> {
        let Some(segment) = self.segments.get(at as usize).cloned() else { return Ok(()) };
        if matches!(segment.role, Role::Free) {
            return Ok(());
        }
        let (entries, _, holes) = listed(catalogue.store, &segment, self.shards.get(segment.shard))?;
        let mut specs = BTreeMap::<[u8; 32], Entry>::new();
        let mut names = BTreeMap::<u32, u32>::new();
        let mut used = 0u64;
        let mut movable = true;
        for entry in entries {
            let bytes = u64::from(entry.header_bytes)
                .saturating_add(entry.payload_bytes.next_multiple_of(PAGE_BYTES));
            match &entry.content {
                Content::Spec(defined) => drop(specs.insert(defined.id, entry)),
                Content::Identity(defined) => {
                    let space = self.space(catalogue, &segment, &entry, defined.id, &specs)?;
                    names.insert(defined.local, space);
                }
                Content::Blocks(blocks) => {
                    used = used.saturating_add(bytes);
                    let Some(&space) = names.get(&blocks.namespace) else {
                        return Err(damaged_at(
                            catalogue.store,
                            &segment,
                            &entry,
                            "a record lacks the definition of its namespace",
                        ));
                    };
                    movable &= is_movable(blocks);
                    self.offer((at, &segment), (&entry, &holes), (blocks, space), now_ms, offered);
                }
                Content::Unknown(_) => movable = false,
                Content::Tombstones(_) | Content::Epoch(_) => used = used.saturating_add(bytes),
            }
        }
        if let Some(segment) = self.segments.get_mut(at as usize) {
            segment.dead_bytes = used;
            if !movable && segment.role != Role::Free {
                segment.role = Role::Fixed;
            }
        }
        Ok(())
    }

    /// Takes in one record that may be live.
    fn offer(
        &mut self,
        (at, segment): (u32, &Segment),
        (entry, holes): (&Entry, &crate::holes::Holes),
        (blocks, space): (&Blocks, u32),
        now_ms: u64,
        offered: &mut Vec<Offer>,
    ) {
        let (Some(state), Some(named)) = (self.shards.get(segment.shard), self.spaces.get(space as usize))
        else {
            return;
        };
        let recency = state.recency.get(&(segment.number, segment.generation, entry.offset));
        let expires_ms = recency.map_or(blocks.expires_ms, |known| known.0);
        if expires_ms != 0 && expires_ms <= now_ms {
            self.expired_blocks = self.expired_blocks.saturating_add(blocks.blocks.len() as u64);
            return;
        }
        let first = self.prints.len() as u64;
        let number = self.records.len() as u32;
        let place = (entry.offset, entry.header_bytes, entry.payload_bytes);
        let gone = crate::holes::gone(place, blocks, (&named.geometry, named.block_tokens), holes);
        for (block, name) in (0u32..).zip(&blocks.blocks) {
            let print = print(&named.id, blocks, &name.key);
            self.prints.push(print);
            let column = (blocks.group, blocks.coordinate);
            if gone.get(block as usize).copied().unwrap_or(false) {
                // Evicted before: its bytes are not there.
            } else if state.graves.covers(&(named.id, name.key), column, entry.sequence) {
                self.buried_blocks = self.buried_blocks.saturating_add(1);
            } else {
                offered.push(Offer { print, record: number, block });
            }
        }
        let mut hasher = blake3::Hasher::new();
        for extension in &blocks.extensions {
            hasher.update(&extension.id.to_le_bytes()).update(&[u8::from(extension.critical)]);
            hasher.update(&(extension.bytes.len() as u64).to_le_bytes()).update(&extension.bytes);
        }
        let parent = match &blocks.parent {
            Parent::Root => Some(root_print(&named.id, blocks)),
            Parent::Key(key) => Some(print(&named.id, blocks, key)),
            Parent::Unknown => None,
        };
        self.records.push(Held {
            segment: at,
            space,
            offset: entry.offset,
            payload_bytes: entry.payload_bytes,
            sequence: entry.sequence,
            coordinate: blocks.coordinate,
            created_ms: blocks.created_ms,
            expires_ms,
            first,
            header_bytes: entry.header_bytes,
            blocks: blocks.blocks.len() as u32,
            group: blocks.group,
            last_access_s: recency.map(|known| known.1),
            first_block: blocks.first_block,
            parent,
            extensions: truncate16(&hasher),
            layout: blocks.layout,
            encoding: blocks.encoding,
            chained: parent.is_some() || blocks.first_block.is_some(),
        });
    }

    /// The namespace that an identity defines.
    fn space(
        &mut self,
        catalogue: &mut Catalogue<'_>,
        segment: &Segment,
        entry: &Entry,
        id: [u8; 32],
        specs: &BTreeMap<[u8; 32], Entry>,
    ) -> Result<u32, Refusal> {
        if let Some(&at) = catalogue.known.get(&id) {
            return Ok(at);
        }
        let clash = |what| damaged_at(catalogue.store, segment, entry, what);
        let identity = definition(catalogue.store, segment, entry)?;
        let named = Identity::decode(&identity.canonical).map_err(|_| clash("the identity is not valid"))?;
        let spec_entry =
            specs.get(&named.spec_fingerprint.0).ok_or_else(|| clash("an identity lacks its spec"))?;
        let spec = definition(catalogue.store, segment, spec_entry)?;
        let geometry = Geometry::decode_canonical(&spec.canonical)
            .map_err(|_| clash("the text of a spec is not valid"))?;
        if identity.id != id || geometry.fingerprint().0 != spec.id {
            return Err(clash("the fields of a definition contradict each other"));
        }
        let at = self.spaces.len() as u32;
        self.spaces.push(Space {
            id,
            identity: identity.canonical,
            spec_id: spec.id,
            spec: spec.canonical,
            geometry,
            block_tokens: named.block_tokens,
        });
        catalogue.known.insert(id, at);
        Ok(at)
    }

    /// Decides which production of each block counts.
    fn settle(&mut self, mut offered: Vec<Offer>) {
        self.live = vec![0; self.prints.len().div_ceil(64)];
        let rank = |offer: &Offer| {
            let held = self.records.get(offer.record as usize);
            let shard = held.and_then(|held| self.segments.get(held.segment as usize)).map(|one| one.shard);
            (offer.print, shard, std::cmp::Reverse(held.map(|held| held.sequence)), offer.record, offer.block)
        };
        offered.sort_unstable_by_key(rank);
        let mut last = None;
        let mut winners = Vec::new();
        for offer in &offered {
            if last == Some(offer.print) {
                self.duplicate_blocks = self.duplicate_blocks.saturating_add(1);
                continue;
            }
            last = Some(offer.print);
            winners.push((offer.record, offer.block));
        }
        drop(offered);
        let mut counts = vec![0u32; self.records.len()];
        for (record, block) in winners {
            let Some(held) = self.records.get(record as usize) else { continue };
            let bit = held.first.saturating_add(u64::from(block));
            if let Some(word) = self.live.get_mut((bit / 64) as usize) {
                *word |= 1 << (bit % 64);
                self.live_blocks = self.live_blocks.saturating_add(1);
            }
            if let Some(count) = counts.get_mut(record as usize) {
                *count = count.saturating_add(1);
            }
        }
        for (held, count) in self.records.iter().zip(counts) {
            let share = held.share(count);
            if let Some(segment) = self.segments.get_mut(held.segment as usize) {
                segment.live_bytes = segment.live_bytes.saturating_add(share);
                segment.dead_bytes = segment.dead_bytes.saturating_sub(share);
            }
        }
    }

    /// Whether a block of a record is live.
    pub(super) fn is_live(&self, held: &Held, block: u32) -> bool {
        let bit = held.first.saturating_add(u64::from(block));
        self.live.get((bit / 64) as usize).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }
}

impl Held {
    /// The bytes of `blocks` of its blocks, its header and padding shared out evenly.
    pub(super) fn share(&self, blocks: u32) -> u64 {
        let whole =
            u64::from(self.header_bytes).saturating_add(self.payload_bytes.next_multiple_of(PAGE_BYTES));
        whole.saturating_mul(u64::from(blocks)).checked_div(u64::from(self.blocks)).unwrap_or(0)
    }
}

/// A block that may be live.
#[derive(Clone, Copy, Debug)]
struct Offer {
    print: BlockHash,
    record: u32,
    block: u32,
}

struct Catalogue<'a> {
    store: &'a Store,
    known: BTreeMap<[u8; 32], u32>,
}

/// What the first pass keeps of a segment.
#[derive(Clone, Copy, Debug)]
struct Facts {
    role: Role,
    generation: u64,
    first_sequence: u64,
    last_sequence: u64,
}

impl Facts {
    fn of(report: &SegmentReport) -> Self {
        let header = report.ends.as_ref().and_then(|ends| ends.header.as_ref().ok());
        let generation = report.ends.as_ref().and_then(|ends| ends.generation()).unwrap_or(0);
        let first = header.map_or(0, |header| header.first_sequence);
        let mut facts = Self {
            role: Role::Fixed,
            generation,
            first_sequence: first,
            last_sequence: first.saturating_sub(1),
        };
        match &report.outcome {
            Outcome::Free => facts.role = Role::Free,
            Outcome::Sealed { trailer, .. } => {
                facts.role = Role::Sealed;
                facts.last_sequence = facts.last_sequence.max(trailer.last_sequence);
            }
            Outcome::Walked { scanned, .. } => {
                let newer = ["newer-record", "unknown-extension"];
                let passed_over = newer.iter().any(|label| report.findings.times(label) > 0);
                let whole = scanned.condemned == 0 && scanned.partly == 0 && !passed_over;
                facts.role = if whole { Role::Tail } else { Role::Fixed };
                facts.generation = scanned.generation;
                facts.last_sequence = facts.last_sequence.max(scanned.last_sequence);
            }
            Outcome::Unseen | Outcome::Quarantined => {}
        }
        facts
    }
}

/// Records, whether they are all that there is, and the holes beside them.
type Listed = (Vec<Entry>, bool, Vec<(u64, u64)>);

/// What a segment lists, in log order, and whether that is everything in it.
fn listed(store: &Store, segment: &Segment, state: Option<&ShardState>) -> Result<Listed, Refusal> {
    let clash = |why: String| Refusal::Damaged(format!("{}: {why}", path(store, segment)));
    let (Some(shard), Some(disk)) = (store.shards.get(segment.shard), disk_of(store, segment)) else {
        return Err(clash("the directory of the record was removed".to_owned()));
    };
    let subject = crate::check::Subject {
        keyring: &store.keyring,
        shard: shard.number,
        segment: segment.number,
        known: state.and_then(|state| state.known.segments.get(&segment.number)),
        listed: 0,
        level: Level::Quick,
    };
    let file = disk.open(&path(store, segment)).map_err(|error| clash(error.to_string()))?;
    let report = crate::check::check_segment(&*file, &subject, &Tally::default());
    Ok(match report.outcome {
        Outcome::Sealed { footer, .. } => (footer.records, true, file.holes()),
        Outcome::Walked { scanned, .. } => {
            let readable = |met: &Met| crate::walk::entry(met);
            let entries: Vec<Entry> = scanned.adopted.iter().filter_map(readable).collect();
            let whole = entries.len() == scanned.adopted.len();
            let holes = if scanned.was_sealed { file.holes() } else { Vec::new() };
            (entries, whole, holes)
        }
        _ => (Vec::new(), true, Vec::new()),
    })
}

/// The directory that a segment lies in.
pub(super) fn disk_of<'a>(store: &'a Store, segment: &Segment) -> Option<&'a Arc<dyn crate::disk::Disk>> {
    let shard = store.shards.get(segment.shard)?;
    store.directories.get(shard.directory).map(|directory| &directory.disk)
}

/// A definition, from its record: a footer has only its id.
fn definition(store: &Store, segment: &Segment, entry: &Entry) -> Result<Definition, Refusal> {
    let clash = |what| damaged_at(store, segment, entry, what);
    let disk = disk_of(store, segment).ok_or_else(|| clash("a directory was removed"))?;
    let file = disk.open(&path(store, segment)).map_err(|_| clash("a file cannot be opened"))?;
    let tally = Tally::default();
    let mut window = Window::new(&*file, store.keyring.segment_bytes, &tally);
    window.read_ahead(false);
    let shard = store.shards.get(segment.shard).map_or(0, |shard| shard.number);
    let position = store.keyring.position(shard, segment.number).under(segment.generation).at(entry.offset);
    let bytes = window.bytes(entry.offset, (entry.header_bytes as usize).max(PAGE));
    match record::open(bytes, &position, &store.keyring.secret).and_then(|record| record.body()) {
        Ok(Body::Identity(definition) | Body::Spec(definition)) => Ok(definition),
        _ => Err(clash("a definition cannot be read")),
    }
}

/// What the newest checkpoint of a shard says.
fn from_checkpoint(store: &Store, directory: usize, shard: u32, known: Known) -> Result<ShardState, Refusal> {
    let mut state = ShardState { next_sequence: 1, ..ShardState::default() };
    let Some(header) = known.header else { return Ok(ShardState { known, ..state }) };
    let Some(directory) = store.directories.get(directory) else { return Ok(state) };
    let mut names = BTreeMap::<u32, [u8; 32]>::new();
    let mut lost = false;
    let slot = header.position.segment;
    let mut take = |items: Items| match items {
        Items::Segments(_) => {}
        Items::Namespaces(defined) => names.extend(defined.into_iter().map(|one| (one.local, one.id))),
        Items::Records(records) => {
            let one = |one: RecordState| {
                ((one.segment, one.generation, one.offset), (one.expires_ms, one.last_access_s))
            };
            state.recency.extend(records.into_iter().map(one));
        }
        Items::Tombstones(tombstones) => {
            for tombstone in &tombstones {
                match names.get(&tombstone.namespace) {
                    Some(name) => state.graves.bury(*name, tombstone),
                    None => lost = true,
                }
            }
        }
        Items::Epochs(epochs) => epochs.iter().for_each(|epoch| state.graves.bury_all(epoch)),
    };
    let seen = read_slot(&*directory.disk, &store.keyring, (shard, slot), &Tally::default(), &mut take);
    if lost || !matches!(seen, crate::checkpoint::Slot::Whole(_)) {
        let path = crate::checkpoint::path(shard, slot);
        return Err(Refusal::Damaged(format!(
            "{}/{path} could not be read a second time",
            directory.disk.name()
        )));
    }
    state.next_sequence = state.next_sequence.max(header.next_sequence);
    state.known = known;
    Ok(state)
}

impl ShardState {
    /// What the checkpoint says of a segment that is left as it is.
    pub(super) fn stated(&self, segment: &Segment) -> Option<SegmentState> {
        let known = self.known.segments.get(&segment.number)?;
        (known.generation == segment.generation).then_some(*known)
    }

    /// What the checkpoint says of records in a segment that is left as it is.
    pub(super) fn records_in(&self, segment: &Segment) -> impl Iterator<Item = RecordState> + '_ {
        let (number, generation) = (segment.number, segment.generation);
        let range = (number, generation, 0)..=(number, generation, u64::MAX);
        self.recency.range(range).map(move |(&(_, _, offset), &(expires_ms, last_access_s))| RecordState {
            generation,
            offset,
            expires_ms,
            segment: number,
            last_access_s,
        })
    }
}

/// Whether this program can rewrite such a record.
fn is_movable(blocks: &Blocks) -> bool {
    let encoded = blocks.encoding == ENCODING_RAW || Encoding::from_code(blocks.encoding).is_some();
    let known =
        encoded && layout_from_code(blocks.layout).is_some() && blocks.layout_version == LAYOUT_VERSION;
    let encrypted = blocks.extensions.iter().any(|one| one.id == EXTENSION_ENCRYPTION);
    known && !encrypted && blocks.unknown_critical().is_none()
}

/// Damage that metadata shows only when it is put together.
fn damaged_at(store: &Store, segment: &Segment, entry: &Entry, what: &str) -> Refusal {
    Refusal::Damaged(format!("{} at {}: {what}", path(store, segment), entry.offset))
}
