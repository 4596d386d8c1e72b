//! What offline tasks take of memory, counted: a check takes the same of a store that is eight times as large, but for a
//! few bytes a segment; what needs more says how much for each record, and keeps to it.
//!
//! Counted is what the calling thread has allocated, so every task runs on one thread here.

use std::alloc::{GlobalAlloc, Layout as Room, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_fsck::check::{Level, Options, check};
use kvarts_fsck::compact::{self, Place, Progress, in_place};
use kvarts_fsck::contents::{self, counted};
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::export::{Selection, export_counted};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::needs;
use kvarts_fsck::repair::{Site, repair};
use kvarts_fsck::store::{Store, survey};
use kvarts_fsck::window::Tally;
use kvarts_layout::arrange::LAYOUT_VERSION;
use kvarts_layout::format::body::{BlockName, Blocks, Definition, ENCODING_RAW, Parent};
use kvarts_layout::format::checkpoint::{
    CheckpointHeader, CheckpointWriter, Items, RecordState, SEGMENT_SEALED, SegmentState,
};
use kvarts_layout::format::footer::{self, Content, Defined, Entry, Footer};
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::names::{SUPERBLOCK, checkpoint_name, segment_name, shard_name};
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::trailer::{self, SealReason, Trailer};
use kvarts_layout::format::{PAGE_BYTES, Position, Secret, VERSION};
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::spec::Geometry;
use kvarts_layout::{Identity, StoreId};

struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that is about to end has nothing to count with.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is passed to the system's allocator unchanged; counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, room: Room) -> *mut u8 {
        count(room.size() as isize);
        // SAFETY: the caller keeps `alloc`'s contract, which is the system allocator's.
        unsafe { System.alloc(room) }
    }

    unsafe fn alloc_zeroed(&self, room: Room) -> *mut u8 {
        count(room.size() as isize);
        // SAFETY: the caller keeps `alloc_zeroed`'s contract, which is the system allocator's.
        unsafe { System.alloc_zeroed(room) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, room: Room) {
        count(-(room.size() as isize));
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(pointer, room) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, room: Room, bytes: usize) -> *mut u8 {
        // Both are there for a moment.
        count(bytes as isize);
        count(-(room.size() as isize));
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.realloc(pointer, room, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that the thread held while this ran, beyond those before.
fn peak_of<T>(work: impl FnOnce() -> T) -> u64 {
    let before = HELD.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    drop(work());
    (PEAK.with(Cell::get) - before) as u64
}

const SEGMENT_BYTES: u64 = 256 << 10;
const BLOCK: usize = 512;
/// Records in each segment: of one block each, the most that a store of its size can have.
const RECORDS: u32 = 24;
const STORE: StoreId = StoreId([3; 16]);

fn secret() -> Secret {
    Secret::new([5; 32])
}

fn identity() -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("small"),
        revision: text("one"),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: Geometry::opaque(BLOCK as u64).unwrap().fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: BTreeMap::new(),
    }
}

fn key(n: u64) -> [u8; 32] {
    *blake3::hash(&n.to_le_bytes()).as_bytes()
}

fn block(n: u64, parent: Parent) -> Blocks {
    Blocks {
        coordinate: 0,
        created_ms: 1,
        expires_ms: 0,
        namespace: 1,
        spec: 1,
        group: 0,
        blocks: vec![BlockName { key: key(n), origin: *key(n).first_chunk().unwrap() }],
        stored_lengths: Vec::new(),
        extensions: Vec::new(),
        first_block: None,
        layout_version: LAYOUT_VERSION,
        layout: 0,
        encoding: ENCODING_RAW,
        parent,
    }
}

/// The definitions and records of a segment.
fn bodies(number: u32) -> Vec<Body> {
    let (geometry, identity) = (Geometry::opaque(BLOCK as u64).unwrap(), identity());
    let spec = Definition { local: 1, id: geometry.fingerprint().0, canonical: geometry.canonical_bytes() };
    let name = Definition {
        local: 1,
        id: identity.namespace_id().unwrap().0,
        canonical: identity.encode().unwrap(),
    };
    let mut bodies = vec![Body::Spec(spec), Body::Identity(name)];
    for n in (0..u64::from(RECORDS)).map(|n| u64::from(number) * 1000 + n) {
        bodies.push(Body::Blocks(block(n, if n == 0 { Parent::Root } else { Parent::Key(key(n - 1)) })));
    }
    bodies
}

/// A sealed segment full of records; which sequence comes next, and what a checkpoint says of it.
fn segment(number: u32, mut sequence: u64) -> (Vec<u8>, u64, SegmentState, Vec<RecordState>) {
    let at = Position { store: STORE, shard: 0, segment: number, generation: 1, offset: 0 };
    let first = sequence;
    let header = SegmentHeader {
        position: at,
        secret: secret(),
        created_ms: 1,
        segment_bytes: SEGMENT_BYTES,
        first_sequence: first,
    };
    let mut file = header.encode().unwrap();
    let (mut entries, mut records) = (Vec::new(), Vec::new());
    for body in &bodies(number) {
        let offset = file.len() as u64;
        let payload = match body {
            Body::Blocks(blocks) => vec![blocks.blocks[0].key[0]; BLOCK],
            _ => Vec::new(),
        };
        let digests = if payload.is_empty() { Vec::new() } else { vec![crc32fast::hash(&payload)] };
        let payload_bytes = payload.len() as u64;
        let fields = Fields { sequence, durable_upto: 0, payload_bytes };
        let image = record::encode(&at.at(offset), &secret(), &fields, body, &digests).unwrap();
        let content = match body {
            Body::Spec(one) => Content::Spec(Defined { local: one.local, id: one.id }),
            Body::Identity(one) => Content::Identity(Defined { local: one.local, id: one.id }),
            Body::Blocks(blocks) => Content::Blocks(blocks.clone()),
            _ => unreachable!(),
        };
        if matches!(body, Body::Blocks(_)) {
            records.push(RecordState {
                generation: 1,
                offset,
                expires_ms: 0,
                segment: number,
                last_access_s: 1,
            });
        }
        let header_bytes = image.len() as u32;
        entries.push(Entry { offset, sequence, payload_bytes, header_bytes, content });
        file.extend(image);
        file.extend(payload);
        file.resize(file.len().next_multiple_of(PAGE_BYTES as usize), 0);
        sequence += 1;
    }
    let log_end = file.len() as u64;
    let footer = Footer { records: entries };
    let image = footer.encode(&at.at(log_end), &secret()).unwrap();
    let last = Trailer {
        footer_offset: log_end,
        footer_tag: footer::tag_of(&image).unwrap(),
        footer_bytes: image.len() as u32,
        record_count: footer.records.len() as u32,
        first_sequence: first,
        last_sequence: sequence - 1,
        log_end,
        reason: SealReason::Normal,
    };
    file.extend(image);
    let place = trailer::position(&at, SEGMENT_BYTES);
    file.resize(place.offset as usize, 0);
    file.extend(last.encode(&place, &secret()).unwrap());
    let state = SegmentState {
        generation: 1,
        first_sequence: first,
        last_sequence: sequence - 1,
        log_end: 0,
        segment: number,
        state: SEGMENT_SEALED,
    };
    (file, sequence, state, records)
}

/// A sound store of one shard with this number of segments.
fn store(segments: u32) -> MemoryDisk {
    let disk = MemoryDisk::new();
    let (mut sequence, mut states, mut records) = (1, Vec::new(), Vec::new());
    for number in 0..segments {
        let (file, next, state, listed) = segment(number, sequence);
        disk.plant(&format!("{}/{}", shard_name(0), segment_name(number)), file);
        sequence = next;
        records.extend(listed);
        states.push(state);
    }
    let position = Position { store: STORE, shard: 0, segment: 0, generation: 1, offset: 0 };
    let header = CheckpointHeader { position, created_ms: 1, next_sequence: sequence };
    let secret = secret();
    let mut writer = CheckpointWriter::new(&header, &secret);
    let mut file = writer.header().unwrap();
    // A chunk is read as a whole; that it is bounded is the format's rule.
    for some in records.chunks(100) {
        file.extend(writer.chunk(&Items::Records(some.to_vec())).unwrap());
    }
    file.extend(writer.chunk(&Items::Segments(states)).unwrap());
    file.extend(writer.end().unwrap());
    disk.plant(&format!("{}/{}", shard_name(0), checkpoint_name(0)), file);
    let superblock = Superblock {
        store: STORE,
        directory: 0,
        sequence: 1,
        secret: self::secret(),
        created_ms: 1,
        segment_bytes: SEGMENT_BYTES,
        min_reader: VERSION,
        clean: false,
        directories: 1,
        shards_total: 1,
        shards: vec![0],
        membership: Membership::default(),
    };
    disk.plant(SUPERBLOCK, [superblock.encode(0).unwrap(), superblock.encode(1).unwrap()].concat());
    disk
}

fn look(disk: &MemoryDisk) -> Store {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(disk.clone())];
    survey(&disks, &mut Findings::default()).unwrap().unwrap()
}

fn options(level: Level) -> Options {
    Options { level, threads: 1, memory_bytes: 64 << 10, ..Options::default() }
}

/// Nowhere: what is written is not kept.
struct Sunk;

impl std::io::Write for Sunk {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn checked(disk: &MemoryDisk, level: Level) -> u64 {
    peak_of(|| {
        let store = look(disk);
        let done = check(&store, &options(level), &Tally::default(), Findings::default()).unwrap();
        assert!(done.findings.is_clean(), "{:?}", done.findings.problems);
    })
}

fn repaired(disk: &MemoryDisk) -> u64 {
    let site = Site { disk: Arc::new(disk.clone()), writer: None };
    peak_of(|| assert_eq!(repair(&[site], &options(Level::Full), &Tally::default()).unwrap().actions, []))
}

fn listed(disk: &MemoryDisk) -> u64 {
    peak_of(|| {
        let contents =
            contents::read(&look(disk), &options(Level::Quick), 2, &Tally::default(), Findings::default());
        assert!(contents.runs.len() >= RECORDS as usize);
    })
}

/// An export sorts in so little memory that it takes temporary files.
fn exported(disk: &MemoryDisk) -> u64 {
    peak_of(|| {
        let (store, options, tally) = (look(disk), options(Level::Quick), Tally::default());
        let counted = counted::count(&store, &options, 2, &tally, Findings::default()).unwrap();
        let (of, at) = ((&store, &options), (2, &tally));
        let done = export_counted(of, &counted, &Selection::All, at, &mut Sunk).unwrap();
        assert!(done.totals.blocks >= u64::from(RECORDS) && done.blocks_left_out == 0);
    })
}

fn compacted(disk: &MemoryDisk) -> u64 {
    let options = compact::Options {
        utilisation_percent: 100,
        now_ms: 2,
        threads: 1,
        dry_run: true,
        ..compact::Options::default()
    };
    peak_of(|| {
        let place = Place { writer: Arc::new(disk.clone()), room_bytes: u64::MAX };
        let done = in_place(&look(disk), &[place], &options, &Progress::default()).unwrap();
        assert!(done.records_written > 0, "{done:?}");
    })
}

/// What a task takes of a small store, and what more of one that is eight times as large, by segment.
fn growth(what: impl Fn(&MemoryDisk) -> u64) -> (u64, u64) {
    let (small, large) = (16u32, 128u32);
    let (least, most) = (what(&store(small)), what(&store(large)));
    (least, most.saturating_sub(least) / u64::from(large - small))
}

#[test]
fn what_a_check_holds_does_not_grow_with_the_store_and_the_rest_keeps_to_what_is_documented() {
    /// A task, and the most that it may take beyond its buffers: bytes a segment, bytes a record of one block.
    type Task<'a> = (&'a str, &'a dyn Fn(&MemoryDisk) -> u64, u64, u64);
    // The figures of the table in ARCHITECTURE.md.
    let tasks: [Task<'_>; 7] = [
        ("quick check", &|disk| checked(disk, Level::Quick), 150, 0),
        ("full check", &|disk| checked(disk, Level::Full), 150, 0),
        ("repair", &repaired, 150, 0),
        ("deep check", &|disk| checked(disk, Level::Deep), 150, 50),
        ("compact", &compacted, 150, 350),
        ("ls, inspect", &listed, 150, 600),
        ("export", &exported, 150, 100),
    ];
    for (name, task, of_segment, of_record) in tasks {
        let (least, more) = growth(task);
        println!("{name}: {least} bytes, and {more} more a segment of {RECORDS} records");
        let most = of_segment + of_record * u64::from(RECORDS);
        assert!(more <= most, "{name}: {more} bytes a segment, {most} are documented");
        // Buffers: two of 1 MiB, or as much as the largest footer.
        assert!(least < 3 << 20, "{name}: {least} bytes for a small store");
    }
}

#[test]
fn what_is_told_before_a_task_begins_is_what_it_takes_at_most() {
    type Asked<'a> = (needs::Task, &'a dyn Fn(&MemoryDisk) -> u64);
    let tasks: [Asked<'_>; 4] = [
        (needs::Task::Deep(64 << 10), &|disk| checked(disk, Level::Deep)),
        (needs::Task::Compact, &compacted),
        (needs::Task::List, &listed),
        (needs::Task::Export, &exported),
    ];
    let disk = store(128);
    let sizes = needs::Sizes::of(&look(&disk), 1);
    let all = 128 * u64::from(RECORDS);
    assert!(sizes.segments == 128 && sizes.records >= all && sizes.records < 2 * all, "{sizes:?}");
    assert!(sizes.blocks >= all && sizes.blocks < 4 * all, "{sizes:?}");
    for (task, measure) in tasks {
        let (told, taken) = (sizes.need(task, 1).memory, measure(&disk));
        println!("{task:?}: {told} told, {taken} taken");
        // What does not grow, such as buffers and a footer, is not worth more words.
        assert!(taken <= told + (1 << 20), "{task:?}: {told} told, {taken} taken");
        assert!(told <= 4 * taken + (2 << 20), "{task:?}: {told} told, {taken} taken");
    }
}
