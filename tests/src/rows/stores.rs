//! Small whole stores that rows damage: what is in them, who put it, and what the engine and the checker say of them
//! afterwards.
//!
//! Each is a fact: made once for a program from a fixed seed, and forked for every damage. What the engine answers for
//! the sound one is what its answers are compared with.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvarts_contract::api::{
    ContainsRequest, DeleteRequest, Durability, KvStore, LeaseTerms, Order, Placed, PutRequest, ReadEvent,
    ReadRequest, ReadStream, Target, Verify,
};
use kvarts_contract::class::Class;
use kvarts_contract::error::Reason;
use kvarts_fsck::check::{Checked, Level, Options as CheckOptions};
use kvarts_fsck::contents as offline;
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::{CannotRun, survey};
use kvarts_fsck::window::Tally;
use kvarts_layout::format::seal::claimed_structure;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::{PAGE, Secret, Structure};
use kvarts_layout::{BlockKey, Layout, NamespaceId, StoreId};
use kvarts_store::engine::{CompactOptions, CompactReport, EvictionPolicy, Options, Store};

use crate::campaign::{Driven, Opened, drive, reopen};
use crate::conformance::Desk;
use crate::fixture::{self, Style};
use crate::sim::{Effect, Media, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use crate::stage::{self, SimStage, Stage};
use crate::witness::{directories, examine, media, small};

/// Keys of each column.
pub(super) const KEYS: u64 = 16;
/// The name of the namespace.
const NAME: &str = "damage";
/// The file system makes no holes.
const EOPNOTSUPP: i32 = 95;
/// A file cannot be removed now.
const EBUSY: i32 = 16;
/// Producers whose bytes may be found: those with odd numbers can be compressed.
const PRODUCERS: [u64; 4] = [1, 2, 3, 4];

/// Which of the fixture's columns, and the number of a key.
pub(super) type Name = (usize, u64);

/// A place in a store: which directory, which file, which byte.
pub(super) type Place = (usize, String, usize);

/// What the engine answers for a block: whose bytes they are, or why there are none.
pub(super) type Answer = Result<u64, Reason>;

/// What a store was made to hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Make {
    /// Puts and deletes, closed.
    Plain,
    /// The same, killed with an open segment.
    Killed,
    /// Two directories of two shards each.
    Spread,
    /// Most records encoded.
    Encoded,
    /// Chains merged, segments emptied and rewritten.
    Compacted,
    /// Full: blocks of many records were evicted, and others of the same records were not.
    Holed,
    /// Killed with an open segment that was used before, and that the newest checkpoint calls free.
    Recycled,
}

impl Make {
    /// All of them.
    pub(super) const ALL: [Self; 7] = [
        Self::Plain,
        Self::Killed,
        Self::Spread,
        Self::Encoded,
        Self::Compacted,
        Self::Holed,
        Self::Recycled,
    ];

    /// Whether it ended without a checkpoint.
    pub(super) fn is_killed(self) -> bool {
        matches!(self, Self::Killed | Self::Recycled)
    }
}

/// A store and what is known of it.
pub(super) struct Prepared {
    pub(super) make: Make,
    pub(super) options: Options,
    pub(super) config: WorldConfig,
    pub(super) disks: Vec<MemoryDisk>,
    /// The same store some operations earlier, stopped in the same way.
    pub(super) earlier: Vec<MemoryDisk>,
    /// What the engine answers.
    pub(super) sound: Answers,
    pub(super) keyring: (StoreId, Secret),
}

/// What an engine answered for every block, and what recovery said.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers {
    pub(super) blocks: BTreeMap<Name, Answer>,
    /// Read once more without a look at digests: what was found damaged must be missing by then.
    pub(super) again: BTreeMap<Name, bool>,
}

/// Bytes of every block that may have been put.
struct Contents(BTreeMap<(Name, u64), Vec<Vec<u8>>>);

fn contents() -> &'static Contents {
    static ALL: OnceLock<Contents> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all = BTreeMap::new();
        for (column, (group, coordinate)) in fixture::columns().into_iter().enumerate() {
            let shape = fixture::shape(group, coordinate);
            for (n, producer) in (0..KEYS).flat_map(|n| PRODUCERS.map(|producer| (n, producer))) {
                let content = fixture::content(&key(n), group, coordinate, producer, &shape);
                all.insert(((column, n), producer), content);
            }
        }
        Contents(all)
    })
}

/// The chain of the store's keys, which is a desk's own.
fn chain() -> u64 {
    static CHAIN: OnceLock<u64> = OnceLock::new();
    *CHAIN.get_or_init(|| {
        let namespace = fixture::identity(NAME).namespace_id().expect("a valid identity");
        u64::from_le_bytes(namespace.0[..8].try_into().expect("eight bytes"))
    })
}

/// The `n`th key.
pub(super) fn key(n: u64) -> BlockKey {
    fixture::key(chain(), n)
}

/// All stores of this kind of program.
pub(super) fn prepared(make: Make) -> &'static Prepared {
    static ALL: [OnceLock<Prepared>; Make::ALL.len()] = [const { OnceLock::new() }; Make::ALL.len()];
    let at = Make::ALL.iter().position(|one| *one == make).expect("one of them");
    ALL[at].get_or_init(|| unplanted(|| prepare(make, 40 + at as u64)))
}

/// Another store of the same kind, of which nothing may ever be found in the first.
pub(super) fn stranger() -> &'static Prepared {
    static ONE: OnceLock<Prepared> = OnceLock::new();
    ONE.get_or_init(|| unplanted(|| prepare(Make::Plain, 77)))
}

/// What is prepared is sound, also for a thread on which a bug is planted.
fn unplanted<T>(make: impl FnOnce() -> T) -> T {
    let bug = kvarts_layout::planted::current();
    kvarts_layout::planted::plant(None);
    let made = make();
    kvarts_layout::planted::plant(bug);
    made
}

fn options(make: Make) -> Options {
    let two = make == Make::Spread;
    let budget_bytes = match make {
        Make::Compacted => 640 << 10,
        Make::Holed => 3 << 20,
        _ => 48 << 20,
    };
    let eviction = if make == Make::Holed { EvictionPolicy::Lru } else { EvictionPolicy::default() };
    let options = small(if two { 2 } else { 1 });
    // Records of several of the larger blocks.
    let segment_bytes = if make == Make::Holed { 256 << 10 } else { options.segment_bytes };
    Options { directories: if two { 2 } else { 1 }, segment_bytes, budget_bytes, eviction, ..options }
}

fn prepare(make: Make, seed: u64) -> Prepared {
    let options = options(make);
    let mut config = WorldConfig::default();
    config.disk.dirs = options.directories;
    let world = SimWorld::new(seed, &config);
    let stage = SimStage::open(&world, &options).expect("a fresh disk");
    fill(&stage, make);
    if make == Make::Recycled {
        empty_some(&stage, &options);
    }
    // As it would be found if the machine had stopped here.
    let earlier = directories(&world.disk().after_kill());
    finish(&stage, make);
    if make == Make::Recycled {
        use_again(&stage, &earlier);
    }
    let image = match make.is_killed() {
        true => world.kill(),
        false => stage.close().expect("nothing fails"),
    };
    let disks = directories(&image);
    let bytes = disks[0].contents("superblock").expect("a superblock");
    let state = Superblock::decode(&bytes[..PAGE], 0, None).expect("a sound slot");
    let keyring = (state.store, state.secret);
    let sound = answers(&config, &options, image).expect("a sound store opens");
    let here = sound.blocks.values().filter(|answer| answer.is_ok()).count();
    assert!(here >= 10, "{make:?} holds {here} blocks only");
    let checked = examine(&disks, Level::Deep).expect("a sound store can be checked");
    assert!(checked.findings.is_clean(), "{make:?}: {}", crate::witness::problems(&checked));
    Prepared { make, options, config, disks, earlier, sound, keyring }
}

fn put(desk: &Desk<'_>, column: usize, keys: std::ops::Range<u64>, producer: u64, relaxed: bool) {
    let layout = [Layout::FullBlock, Layout::LayerBlock][keys.start as usize / 2 % 2];
    let durability = if relaxed { Durability::Relaxed } else { Durability::Durable };
    let keys = desk.keys(keys);
    let request = desk.request(fixture::columns()[column], &keys, producer);
    desk.outcomes(PutRequest { layout: Some(layout), durability, ..request });
}

fn delete(desk: &Desk<'_>, column: usize, keys: std::ops::Range<u64>) {
    let target = Target::Keys { column: Some(fixture::columns()[column]), keys: desk.keys(keys) };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    stage::ask(desk.stage, desk.stage.store().delete(request)).expect("nothing fails");
}

fn fill(stage: &SimStage, make: Make) {
    let desk = Desk::new(stage, NAME);
    for n in (0..8).step_by(2) {
        put(&desk, 1, n..n + 2, 1 + n / 2 % 2, false);
        put(&desk, 2, n..n + 2, 1, false);
    }
    for n in 0..if make == Make::Encoded { 6 } else { 3 } {
        put(&desk, 0, n..n + 1, 1, false);
    }
    delete(&desk, 1, 2..4);
    // Another producer's bytes in the place of what was deleted.
    put(&desk, 1, 2..3, 3, false);
    checkpoint(stage);
}

fn finish(stage: &SimStage, make: Make) {
    let desk = Desk::new(stage, NAME);
    delete(&desk, 2, 0..1);
    put(&desk, 0, 8..9, 2, false);
    put(&desk, 1, 8..12, 2, false);
    if make == Make::Compacted {
        put_and_delete(&desk);
    }
    if matches!(make, Make::Encoded | Make::Compacted) {
        let report = compact(stage, (make == Make::Encoded).then_some(Duration::ZERO));
        assert!(report.blocks_moved > 4, "{report:?}");
        assert!(make != Make::Encoded || report.records_encoded > 2, "{report:?}");
    }
    if make == Make::Holed {
        evict_some(stage, &desk);
    }
    put(&desk, 2, 8..9, 4, false);
    delete(&desk, 1, 0..1);
    put(&desk, 1, 12..14, 1, true);
}

/// Enough that segments are rewritten.
fn put_and_delete(desk: &Desk<'_>) {
    for n in 0..24 {
        put(desk, 0, 9 + n % 4..10 + n % 4, 1 + n % 2, false);
        delete(desk, 0, 9 + n % 4..10 + n % 4);
    }
}

fn compact(stage: &SimStage, encode_cold_after: Option<Duration>) -> CompactReport {
    let options = CompactOptions {
        dead_thousandths: 0,
        merge_records_min: 2,
        encode_cold_after,
        ..CompactOptions::default()
    };
    let report = stage::drive(stage.world(), stage.engine().compact(options)).expect("it ends");
    report.expect("nothing fails")
}

fn checkpoint(stage: &SimStage) {
    stage::drive(stage.world(), stage.engine().checkpoint()).expect("it ends").expect("nothing fails");
}

/// Leaves segments that a checkpoint calls free: they were to be removed, and could not be.
fn empty_some(stage: &SimStage, options: &Options) {
    let inject = |kind, errno| {
        stage.world().disk().inject(Rule::new(Which::Kind(kind), When::From(1), Effect::Errno(errno)));
    };
    // Segments with holes are not used again.
    inject(OpKind::Punch, EOPNOTSUPP);
    put_and_delete(&Desk::new(stage, NAME));
    let report = compact(stage, None);
    assert!(report.segments_emptied > 0, "{report:?}");
    // Until then who was told of a block there may still come.
    stage.advance(Duration::from_secs(60));
    inject(OpKind::Remove, EBUSY);
    let allocated = stage.engine().stats().allocated_bytes;
    stage.engine().set_budget(allocated - 8 * options.segment_bytes).expect("it holds what counts");
    // What was told of a block there may still come.
    stage.advance(Duration::from_secs(60));
    // What runs beside them gets its turns.
    (0..4).for_each(|_| checkpoint(stage));
    stage.engine().set_budget(options.budget_bytes).expect("what it was");
    checkpoint(stage);
}

/// Puts until a segment that the checkpoint calls free is in use again, and some of what the store holds into it.
fn use_again(stage: &SimStage, earlier: &[MemoryDisk]) {
    let desk = Desk::new(stage, NAME);
    for n in KEYS..KEYS + 60 {
        let now = directories(&stage.world().disk().after_kill());
        if !recycled(&now, earlier).is_empty() {
            put(&desk, 1, 15..16, 2, false);
            put(&desk, 0, 15..16, 1, false);
            return;
        }
        put(&desk, 0, n..n + 1, 1, false);
    }
    panic!("no segment was used again");
}

/// Segments whose first page is another one than it was: which directory, and the path.
pub(super) fn recycled(disks: &[MemoryDisk], earlier: &[MemoryDisk]) -> Vec<(usize, String)> {
    let page = |disks: &[MemoryDisk], at: usize, path: &str| {
        let bytes = disks.get(at)?.contents(path)?;
        bytes
            .get(..PAGE)
            .filter(|page| claimed_structure(page) == Some(Structure::SegmentHeader))
            .map(<[u8]>::to_vec)
    };
    let is_other = |(at, path): &(usize, String)| {
        let before = page(earlier, *at, path);
        before.is_some() && before != page(disks, *at, path)
    };
    files(disks).into_iter().filter(is_other).collect()
}

/// Puts until blocks must go. Of every record the first blocks are held, so the others go alone.
fn evict_some(stage: &SimStage, desk: &Desk<'_>) {
    put(desk, 0, 4..8, 1, false);
    put(desk, 0, 9..14, 1, true);
    for (column, keys) in [(0, 4..6), (0, 9..11), (1, 0..KEYS), (2, 0..KEYS)] {
        hold(desk, column, keys);
    }
    for first in (KEYS..KEYS + 240).step_by(8) {
        put(desk, 0, first..first + 8, 1, first % 16 == 0);
        hold(desk, 0, first..first + 1);
        stage.advance(Duration::from_secs(20));
    }
    let counts = stage.engine().stats().counts;
    assert!(counts.blocks_evicted > 20 && counts.bytes_punched > 64 << 10, "{counts:?}");
}

fn hold(desk: &Desk<'_>, column: usize, keys: std::ops::Range<u64>) {
    let (group, coordinate) = fixture::columns()[column];
    let terms = LeaseTerms { hold: LeaseTerms::UNLIMITED, tenant: 1, cap_bytes: 1 << 30 };
    let keys = desk.keys(keys);
    let request =
        ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: Some(terms) };
    desk.stage.store().contains(&request).expect("a lease that the cap allows");
}

/// Opens a store on this image and reads every block twice.
pub(super) fn answers(config: &WorldConfig, options: &Options, image: Media) -> Result<Answers, String> {
    let opened = reopen(Seed(7), config, options, image)?;
    read_answers(&opened)
}

/// What an open store answers for every block.
pub(super) fn read_answers(opened: &Opened) -> Result<Answers, String> {
    match drive(&opened.world, u64::MAX, ask_all(&opened.store)) {
        Driven::Done(answers) => answers,
        other => Err(format!("reading ends with {other:?}")),
    }
}

async fn ask_all(store: &Store) -> Result<Answers, String> {
    let namespace = store.register(&fixture::identity(NAME), &fixture::geometry());
    let namespace = namespace.map_err(|error| format!("the namespace is refused: {error}"))?;
    let mut answers = Answers::default();
    for column in 0..fixture::columns().len() {
        let (into, stream) = begin(store, namespace, column, Verify::Always);
        let failures = end(&stream).await;
        for n in 0..KEYS {
            let answer = match failures.get(&(n as u32)) {
                Some(reason) => Err(reason.clone()),
                None => Ok(whose((column, n), &into)?),
            };
            answers.blocks.insert((column, n), answer);
        }
        let (_, stream) = begin(store, namespace, column, Verify::Never);
        let failures = end(&stream).await;
        answers.again.extend((0..KEYS).map(|n| ((column, n), !failures.contains_key(&(n as u32)))));
    }
    Ok(answers)
}

fn begin(store: &Store, namespace: NamespaceId, column: usize, verify: Verify) -> (Placed, ReadStream) {
    let (group, coordinate) = fixture::columns()[column];
    let shape = fixture::shape(group, coordinate);
    let into = fixture::place(&shape, KEYS as u32, Style::Blocks, 0).expect("a valid placement");
    let stream = store.read(ReadRequest {
        namespace,
        group,
        coordinate,
        keys: (0..KEYS).map(key).collect(),
        layers: None,
        order: Order::Blocks,
        into: into.clone(),
        verify,
        class: Class::Foreground,
        deadline: None,
    });
    (into, stream.expect("a well-formed read"))
}

async fn end(stream: &ReadStream) -> BTreeMap<u32, Reason> {
    loop {
        if let ReadEvent::End(end) = stream.next().await {
            return end.failures.into_iter().collect();
        }
    }
}

/// The producer whose bytes were read; an error if no producer has put them.
fn whose(name: Name, into: &Placed) -> Result<u64, String> {
    let (group, coordinate) = fixture::columns()[name.0];
    let found = fixture::read_block(into, name.1 as u32, &fixture::shape(group, coordinate));
    let all = &contents().0;
    let of = |producer: &u64| all.get(&(name, *producer)) == Some(&found);
    let known = PRODUCERS.into_iter().find(of);
    known.ok_or_else(|| format!("column {}, key {}: bytes that were never put", name.0, name.1))
}

impl Prepared {
    /// Forks of the directories, to be damaged.
    pub(super) fn fork(&self) -> Vec<MemoryDisk> {
        self.disks.iter().map(MemoryDisk::fork).collect()
    }

    /// What the engine answers on such directories, and the store that it left; an error if it does not open.
    pub(super) fn ask(&self, disks: &[MemoryDisk]) -> Result<(Answers, Opened), String> {
        let opened = reopen(Seed(7), &self.config, &self.options, media(disks))?;
        read_answers(&opened).map(|answers| (answers, opened))
    }

    /// Every file, with its directory.
    pub(super) fn files(&self) -> Vec<(usize, String)> {
        files(&self.disks)
    }
}

/// Every file of some directories, with its directory.
pub(super) fn files(disks: &[MemoryDisk]) -> Vec<(usize, String)> {
    let of = |(at, disk): (usize, &MemoryDisk)| {
        disk.files().into_iter().map(move |path| (at, path)).collect::<Vec<_>>()
    };
    disks.iter().enumerate().flat_map(of).collect()
}

/// Segments in which nothing counts, by their path.
pub(super) fn free_segments(disks: &[MemoryDisk]) -> BTreeSet<String> {
    let disks: Vec<Arc<dyn Disk>> = disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect();
    let store = survey(&disks, &mut Findings::default()).expect("it can be looked at").expect("a store");
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let contents = offline::read(&store, &options, 0, &Tally::default(), Findings::default());
    let free = contents.segments.iter().filter(|one| one.state == offline::State::Free);
    free.map(|one| format!("shard-{:04}/segment-{:08}", one.shard, one.segment)).collect()
}

/// What the checker says of directories, every digest looked at.
pub(super) fn look(disks: &[MemoryDisk]) -> Result<Checked, CannotRun> {
    examine(disks, Level::Full)
}

/// What bytes of a store's files are for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Zone {
    /// A slot of a superblock.
    Superblock,
    /// A segment's first page.
    SegmentHeader,
    /// A record's header.
    Header,
    /// Bytes of blocks, raw or stored.
    Payload,
    /// Zeros behind a payload, up to the page.
    Padding,
    /// The index of a sealed segment.
    Footer,
    /// Its last page.
    Trailer,
    /// A checkpoint file.
    Checkpoint,
    /// The last records of a segment that was not sealed: nothing behind them says that they had been flushed, so
    /// damage looks like a write that a power cut tore.
    Tail,
    /// Room of a segment that nothing that counts lies in.
    Unused,
}

/// A structure in a file: where it begins, what it is, its bytes without its payload.
pub(super) type Found = (usize, Structure, usize);

/// The structures that a file's bytes claim, front to back; payloads are stepped over, so what lies in them is none.
pub(super) fn structures(bytes: &[u8]) -> Vec<Found> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(page) = bytes.get(at..at + PAGE) {
        let Some(structure) = claimed_structure(page) else {
            at += PAGE;
            continue;
        };
        let total = match structure.rest_domain() {
            Some(_) => word(page, 72) as usize,
            None => PAGE,
        };
        let total = total.clamp(PAGE, bytes.len() - at);
        found.push((at, structure, total));
        let payload = if structure == Structure::Record { payload_bytes(page) } else { 0 };
        at += total + payload.next_multiple_of(PAGE);
    }
    found
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// What a record's header says of its payload.
pub(super) fn payload_bytes(page: &[u8]) -> usize {
    u64::from_le_bytes(page[96..104].try_into().expect("eight bytes")) as usize
}

/// What each byte of a file is for: ranges, front to back, without gaps.
pub(super) fn zones(path: &str, bytes: &[u8]) -> Vec<(std::ops::Range<usize>, Zone)> {
    if path.contains("checkpoint") {
        return vec![(0..bytes.len(), Zone::Checkpoint)];
    }
    let (mut all, mut at) = (Vec::new(), 0);
    let all_structures = structures(bytes);
    // Behind a footer or before it, records of an earlier generation are nothing any more.
    let own = bytes.get(..PAGE).filter(|page| claimed_structure(page) == Some(Structure::SegmentHeader));
    let own = own.map(|page| page[56..64].to_vec());
    let (mut log_end, mut sealed) = (bytes.len(), false);
    if let Some((trailer, ..)) = all_structures.iter().find(|one| one.1 == Structure::Trailer) {
        let page = &bytes[*trailer..*trailer + PAGE];
        if own.as_deref() == Some(&page[56..64]) {
            log_end = u64::from_le_bytes(page[120..128].try_into().expect("eight bytes")) as usize;
            sealed = true;
        }
    }
    // Everything below had been flushed, says a record of this generation.
    let durable =
        |one: &Found| u64::from_le_bytes(bytes[one.0 + 112..one.0 + 120].try_into().expect("eight bytes"));
    let of_now = |one: &&Found| own.as_deref().is_none_or(|own| own == &bytes[one.0 + 56..one.0 + 64]);
    let records = all_structures.iter().filter(|one| one.1 == Structure::Record).filter(of_now);
    let durable = records.map(durable).max().unwrap_or(0) as usize;
    for (start, structure, total) in all_structures {
        let is_tail = structure == Structure::Record && !sealed && start >= durable;
        let current = own.as_deref().is_none_or(|own| own == &bytes[start + 56..start + 64]);
        let counts = match structure {
            Structure::Record => start < log_end,
            // One that no trailer names was being written when the process ended.
            Structure::Footer => sealed,
            _ => true,
        };
        let counts = counts && current;
        if !counts || start < at {
            continue;
        }
        if start > at {
            all.push((at..start, Zone::Unused));
        }
        let zone = match structure {
            Structure::Superblock => Zone::Superblock,
            Structure::SegmentHeader => Zone::SegmentHeader,
            Structure::Record => Zone::Header,
            Structure::Footer => Zone::Footer,
            Structure::Trailer => Zone::Trailer,
            Structure::CheckpointHeader | Structure::CheckpointChunk => Zone::Checkpoint,
        };
        let zone = if is_tail { Zone::Tail } else { zone };
        all.push((start..start + total, zone));
        at = start + total;
        let payload = if structure == Structure::Record { payload_bytes(&bytes[start..]) } else { 0 };
        if payload > 0 {
            all.push((at..at + payload, if is_tail { Zone::Tail } else { Zone::Payload }));
            let end = at + payload.next_multiple_of(PAGE);
            if end > at + payload {
                all.push((at + payload..end, if is_tail { Zone::Tail } else { Zone::Padding }));
            }
            at = end;
        }
    }
    if at < bytes.len() {
        all.push((at..bytes.len(), Zone::Unused));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_every_file_has_one_zone_and_every_zone_is_met() {
        let mut seen = std::collections::BTreeSet::new();
        for make in Make::ALL {
            let store = prepared(make);
            for (at, path) in store.files() {
                let bytes = store.disks[at].contents(&path).unwrap();
                let mut end = 0;
                for (range, zone) in zones(&path, &bytes) {
                    assert_eq!(range.start, end, "{make:?} {path}");
                    end = range.end;
                    seen.insert(zone);
                }
                assert_eq!(end, bytes.len(), "{make:?} {path}");
            }
        }
        assert_eq!(seen.len(), 10, "{seen:?}");
    }
}
