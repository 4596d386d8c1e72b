//! What a fault, a start or a neighbour costs: what it must, and no more. Each scene is a small store in the simulation
//! to which one of them happens; what it may cost is counted in blocks, bytes, files and entries, never in time.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Durability, LeaseTerms, PIN_BYTES, Presence, PutRequest,
    Target,
};
use kvarts_contract::clock::Clock;
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::io_error::DirId;
use kvarts_layout::{BlockKey, Coordinate, Group};
use kvarts_store::engine::{EvictionPolicy, Limits, Options};
use kvarts_store::ledger::Phase;

use super::growth::SMALL;
use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::{Desk, pages};
use crate::fixture;
use crate::sim::log::Mixer;
use crate::sim::media::errno::{EIO, ENOMEM};
use crate::sim::{Crash, DiskConfig, Effect, Media, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use crate::stage::{SimStage, Stage, ask, drive};

pub(super) const SEGMENT: u64 = 128 << 10;
const DAY_MILLIS: u64 = 24 * 60 * 60 * 1000;

/// Something that happens to a store, and what it may cost.
struct Scene {
    what: &'static str,
    play: fn(Seed) -> Result<(), String>,
}

const SCENES: &[Scene] = &[
    Scene { what: "puts that a failing device refuses", play: refused_puts },
    Scene { what: "segments that fail when they are begun", play: failed_beginnings },
    Scene { what: "a latch", play: latch },
    Scene { what: "starts with a small put each", play: starts },
    Scene { what: "holes that are coarser than a page", play: coarse_holes },
    Scene { what: "a hole that was not flushed", play: unflushed_holes },
    Scene { what: "namespaces that come and go", play: namespaces },
    Scene { what: "leases of small blocks", play: small_pins },
    Scene { what: "blocks that the index has no room for", play: index_limit },
    Scene { what: "fewer descriptors than segments", play: descriptors },
    Scene { what: "room, where few blocks are old", play: old_blocks },
    Scene { what: "room, where segments lack much", play: rests },
    Scene { what: "room, where another shard uses nothing", play: spare_room },
    Scene { what: "room, where another shard's device hangs", play: hung_neighbour },
    Scene { what: "a damaged end of a segment with holes", play: super::ends::play },
    Scene { what: "a chain longer than the budget", play: super::prefixes::longer_than_the_budget },
    Scene { what: "a chain that grows and is not read", play: super::prefixes::grown_and_not_read },
];

pub(super) fn ensure(holds: bool, what: &str, found: impl Debug) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("{what}: {found:?}")) }
}

pub(super) fn options(budget_bytes: u64) -> Options {
    Options {
        segment_bytes: SEGMENT,
        budget_bytes,
        shards_per_directory: 1,
        executors: 1,
        eviction: EvictionPolicy::Lru,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

fn open(seed: Seed, options: &Options) -> Result<SimStage, String> {
    let world = SimWorld::new(seed.0, &WorldConfig::default());
    SimStage::open(&world, options).map_err(|error| error.to_string())
}

fn reopen(seed: Seed, media: Media, options: &Options) -> Result<SimStage, String> {
    reopen_on(0, seed, media, options)
}

/// The same, `day` days later than the first time.
fn reopen_on(day: u64, seed: Seed, media: Media, options: &Options) -> Result<SimStage, String> {
    let first = WorldConfig::default();
    let config = WorldConfig { unix_millis: first.unix_millis + day * DAY_MILLIS, ..first };
    let world = SimWorld::with_media(seed.0, &config, media);
    SimStage::open(&world, options).map_err(|error| error.to_string())
}

fn from_now_on(kind: OpKind, errno: i32) -> Rule {
    Rule::new(Which::Kind(kind), When::From(1), Effect::Errno(errno))
}

/// Puts blocks one by one.
fn put(desk: &Desk<'_>, numbers: Range<u64>) -> Vec<BlockOutcome> {
    numbers.flat_map(|n| desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1))).collect()
}

fn put_all(desk: &Desk<'_>, numbers: Range<u64>) -> Result<(), String> {
    let outcomes = put(desk, numbers.clone());
    let stored = outcomes.iter().filter(|one| **one == BlockOutcome::Stored).count() as u64;
    ensure(stored == numbers.end - numbers.start, "not all blocks are stored", outcomes)
}

fn contains(
    desk: &Desk<'_>,
    (group, coordinate): (Group, Coordinate),
    keys: &[BlockKey],
    lease: Option<LeaseTerms>,
) -> Result<Vec<Presence>, Error> {
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease };
    desk.stage.store().contains(&request).map(|reply| reply.presence)
}

/// Which of these blocks are here.
fn here(desk: &Desk<'_>, numbers: Range<u64>) -> Vec<u64> {
    let keys = desk.keys(numbers.clone());
    let found = contains(desk, pages(), &keys, None).expect("a look at few blocks");
    numbers.zip(found).filter(|(_, one)| *one == Presence::Here).map(|(n, _)| n).collect()
}

fn evicted(stage: &SimStage) -> u64 {
    stage.engine().stats().counts.blocks_evicted
}

/// While writes fail, refused puts evict nothing and take no segments; when they work again, all are taken.
fn refused_puts(seed: Seed) -> Result<(), String> {
    let mut rng = seed.child("fault").rng();
    let (kind, errno) = ([OpKind::Write, OpKind::Flush][rng.index(2)], [EIO, ENOMEM][rng.index(2)]);
    let stage = open(seed, &options(3 << 20))?;
    let desk = Desk::new(&stage, "costs");
    put_all(&desk, 0..150)?;
    let before = (evicted(&stage), stage.engine().segments().len());
    ensure(before.0 > 0, "the store is not full", before)?;
    stage.world().disk().inject(from_now_on(kind, errno));
    let outcomes = put(&desk, 200..230);
    let refused = |one: &BlockOutcome| matches!(one, BlockOutcome::Refused(_));
    ensure(outcomes.iter().all(refused), "a put is acknowledged that failed", &outcomes)?;
    let after = (evicted(&stage), stage.engine().segments().len());
    ensure(after == before, "refused puts evict blocks, or take segments", (before, after))?;
    stage.world().disk().heal();
    put_all(&desk, 300..360)?;
    stage.look_closely().map(drop)
}

/// What failed before anything in it counted is used again, so it costs no block of others.
fn failed_beginnings(seed: Seed) -> Result<(), String> {
    let nth = [&[2, 5][..], &[3, 6], &[2, 4]][seed.child("fault").rng().index(3)];
    let mut options = options(8 << 20);
    // No checkpoint meets the failures.
    options.limits.checkpoint_every = Duration::from_secs(1_000_000);
    let stage = open(seed, &options)?;
    let (desk, disk) = (Desk::new(&stage, "costs"), stage.world().disk());
    put_all(&desk, 0..100)?;
    let fail =
        |nth: u64| disk.inject(Rule::new(Which::Kind(OpKind::Write), When::Nth(nth), Effect::Errno(EIO)));
    fail(1);
    put(&desk, 100..101);
    for round in 0..40 {
        disk.heal();
        // A device that fails again and again is left alone for a while.
        stage.advance(Duration::from_secs(100));
        nth.iter().for_each(|nth| fail(*nth));
        put(&desk, 200 + round..201 + round);
    }
    disk.heal();
    let segments = stage.engine().segments().len();
    ensure(evicted(&stage) == 0 && here(&desk, 0..100).len() == 100, "blocks have gone", segments)?;
    put_all(&desk, 1000..1060)
}

/// A latch is lifted when every shard has shown that it can be written to, and not before.
fn latch(seed: Seed) -> Result<(), String> {
    let kind = [OpKind::SyncDir, OpKind::Open][seed.child("fault").rng().index(2)];
    let stage = open(seed, &options(8 << 20))?;
    let (desk, world) = (Desk::new(&stage, "costs"), stage.world());
    put_all(&desk, 0..3)?;
    world.disk().inject(from_now_on(kind, EIO));
    for n in 10..40 {
        // What latches it refuses it, as a whole or its block.
        let _ = stage.put(desk.request(pages(), &desk.keys(n..n + 1), 1));
    }
    let resume = || drive(world, stage.engine().resume()).map_err(|hang| hang.to_string());
    let fault = || stage.engine().health().fault().map(str::to_owned);
    ensure(fault().is_some(), "nothing latches", kind)?;
    ensure(resume()?.is_err() && fault().is_some(), "a latch is lifted while the device fails", kind)?;
    world.disk().heal();
    resume()?.map_err(|error| error.to_string())?;
    ensure(fault().is_none(), "a latch stays", fault())?;
    put_all(&desk, 50..60)
}

/// A start takes room for what it writes. All blocks together would fit into a quarter of the budget.
fn starts(seed: Seed) -> Result<(), String> {
    const BEFORE: u64 = 40;
    const STARTS: u64 = 40;
    let options =
        Options { shards_per_directory: 2, segment_bytes: 4 * SEGMENT, ..options(12 * 4 * SEGMENT) };
    let stage = open(seed, &options)?;
    put_all(&Desk::new(&stage, "costs"), 0..BEFORE)?;
    let mut media = stage.close().map_err(|error| error.to_string())?;
    let (mut written, mut moved) = (0, 0);
    for start in 0..STARTS {
        let stage = reopen(seed.nth(start), media, &options)?;
        let desk = Desk::new(&stage, "costs");
        let (taken, files) = (stage.engine().stats().allocated_bytes, stage.engine().segments().len() as u64);
        let most = (BEFORE + start) * (48 << 10) + files * (32 << 10) + options.segment_bytes;
        ensure(taken <= most, "segments keep what they lack", (taken, most, files))?;
        put_all(&desk, BEFORE + start..BEFORE + start + 1)?;
        written += stage.engine().stats().counts.record_bytes_written;
        stage.rest();
        moved += stage.engine().stats().counts.moved_bytes_written;
        let found = here(&desk, 0..BEFORE + start + 1).len() as u64;
        ensure(found == BEFORE + start + 1, "blocks have gone after starts", (found, start))?;
        let files = stage.engine().segments().len();
        ensure(files <= 24, "each start leaves a file", files)?;
        media = match seed.nth(start).rng().index(3) {
            0 => stage.cut_power().image(Crash::LoseAll),
            _ => stage.close().map_err(|error| error.to_string())?,
        };
    }
    ensure(moved <= 3 * written, "starts move blocks again and again", (moved, written))
}

/// A hole of a page is zeros there, and gives nothing back: blocks go by whole segments, and none becomes damage.
fn coarse_holes(seed: Seed) -> Result<(), String> {
    let unit = [16 << 10, 64 << 10][seed.child("unit").rng().index(2)];
    let (config, options) = (WorldConfig::default(), options(3 << 20));
    let media = Media::new(config.disk.dirs, config.disk.capacity).with_unit(unit);
    let stage = reopen(seed, media, &options)?;
    let desk = Desk::new(&stage, "costs");
    for n in 0..60 {
        desk.outcomes(desk.request(pages(), &desk.keys(4 * n..4 * n + 4), 1));
        stage.advance(Duration::from_secs(20));
        // Of each record the first block is used, so the others would go alone.
        let first = desk.keys(4 * (n / 2)..4 * (n / 2) + 1);
        desk.read(&desk.read_request(pages(), &first));
    }
    let counts = stage.engine().stats().counts;
    ensure(counts.blocks_evicted > 30, "the store is not full", counts)?;
    let image = stage.close().map_err(|error| error.to_string())?;
    let stage = reopen(seed.nth(1), image, &options)?;
    let desk = Desk::new(&stage, "costs");
    for n in here(&desk, 0..240) {
        desk.expect(pages(), &desk.keys(n..n + 1), 1);
    }
    let damaged = stage.engine().stats().counts.blocks_quarantined;
    ensure(damaged == 0, "what was evicted is damage", damaged)
}

/// Bytes go back to the budget when they are gone from the disk for good: whatever a power cut brings back is within it.
fn unflushed_holes(seed: Seed) -> Result<(), String> {
    let budget = 3 << 20;
    let stage = open(seed, &options(budget))?;
    let (desk, disk) = (Desk::new(&stage, "costs"), stage.world().disk());
    let mut rng = seed.child("used").rng();
    let mut next = 0;
    let mut round = |desk: &Desk<'_>| {
        let put = stage.store().put(desk.request(pages(), &desk.keys(next..next + 4), 1));
        if ask(&stage, put).is_err() {
            // A segment that was emptied as a whole takes records again, and is flushed for their sake.
            disk.heal();
            let resumed = drive(stage.world(), stage.engine().resume()).expect("an end");
            resumed.expect("the device is well");
        }
        stage.advance(Duration::from_secs(20));
        let used = desk.keys(4 * rng.below(next / 4 + 1)..next + 4);
        desk.read(&desk.read_request(pages(), &used[..1]));
        next += 4;
    };
    (0..40).for_each(|_| round(&desk));
    ensure(evicted(&stage) > 0, "the store is not full", ())?;
    for _ in 0..20 {
        disk.heal();
        // What is written goes to a segment that is open, so what is flushed of a sealed one is holes.
        for segment in stage.engine().segments().iter().filter(|one| one.phase == Phase::Full) {
            disk.inject(from_now_on(OpKind::Flush, EIO).named(segment_name(segment.segment)));
        }
        round(&desk);
    }
    let counted = stage.engine().stats().allocated_bytes;
    let (free, total) = stage.cut_power().image(Crash::LoseAll).space();
    ensure(total - free <= budget, "a power cut brings back more than the budget", (total - free, counted))
}

/// How the names of segment files end.
fn segment_name(number: u32) -> &'static str {
    static NAMES: OnceLock<Vec<String>> = OnceLock::new();
    let names = NAMES.get_or_init(|| (0..512).map(|number| format!("segment-{number:08}")).collect());
    names.get(number as usize).map_or("no such segment", String::as_str)
}

/// What a namespace had in memory goes with it.
fn namespaces(seed: Seed) -> Result<(), String> {
    let stage = open(seed, &options(3 << 20))?;
    let desk = Desk::new(&stage, "costs");
    let most = |rounds: Range<u64>| -> Result<BTreeMap<&'static str, u64>, String> {
        let mut most = BTreeMap::new();
        for n in rounds {
            put_all(&desk, n..n + 1)?;
            let request =
                DeleteRequest { namespace: desk.namespace, target: Target::Namespace, deadline: None };
            ask(&stage, stage.store().delete(request)).map_err(|error| error.to_string())?;
            let tables = drive(stage.world(), stage.engine().tables()).map_err(|hang| hang.to_string())?;
            for table in tables.map_err(|error| error.to_string())? {
                let known = most.entry(table.name).or_default();
                *known = table.size.max(*known);
            }
        }
        Ok(most)
    };
    let (before, after) = (most(0..60)?, most(60..200)?);
    let grown = after.iter().find(|(name, size)| **size > before[**name] + before[**name] / 8 + 16);
    ensure(grown.is_none(), "a table grows with what was deleted", grown)
}

/// A block that is held takes memory however small it is, and counts so.
fn small_pins(seed: Seed) -> Result<(), String> {
    let stage = open(seed, &options(3 << 20))?;
    let desk = Desk::new(&stage, "costs");
    let count = seed.child("count").rng().between(4, 32);
    let keys = desk.keys(0..count);
    desk.outcomes(desk.request(SMALL, &keys, 1));
    let lease = |cap_bytes| LeaseTerms { hold: Duration::from_secs(60), tenant: 1, cap_bytes };
    let refused = contains(&desk, SMALL, &keys, Some(lease(count * PIN_BYTES - 1)));
    let cap = matches!(refused, Err(Error(Reason::PinCap { .. })));
    ensure(cap, "pins of small blocks are free", &refused)?;
    let held = contains(&desk, SMALL, &keys, Some(lease(count * PIN_BYTES)));
    ensure(held.is_ok(), "a lease within its cap is refused", held)
}

/// The index has a budget: beyond it blocks are evicted, or none is put.
fn index_limit(seed: Seed) -> Result<(), String> {
    const BLOCKS: u64 = 1500;
    let record_bytes_max = fixture::shape(SMALL.0, SMALL.1).block_bytes();
    let options = Options { record_bytes_max, ..options(32 << 20) };
    let stage = open(seed, &options)?;
    small(&Desk::new(&stage, "costs"), 0..BLOCKS)?;
    let memory = |stage: &SimStage| {
        let memory = stage.engine().stats().index;
        memory.blocks as u64 * 29 + memory.record_bytes as u64
    };
    let limit = memory(&stage);
    let media = stage.close().map_err(|error| error.to_string())?;
    let options = Options { index_bytes_max: Some(limit), ..options };
    let stage = reopen(seed.nth(1), media, &options)?;
    let desk = Desk::new(&stage, "costs");
    for n in BLOCKS..3 * BLOCKS {
        desk.outcomes(PutRequest {
            durability: Durability::Relaxed,
            ..desk.request(SMALL, &desk.keys(n..n + 1), 1)
        });
    }
    ensure(evicted(&stage) > 0, "nothing is evicted for the index", limit)?;
    let found = memory(&stage);
    // A sixteenth beyond it nothing is put; a segment with its blocks is what it is looked at after.
    ensure(found <= limit + limit / 4, "the index takes more than it may", (found, limit))
}

/// Blocks that leave much of each segment empty: what segments lack is given back before any block is evicted.
fn rests(seed: Seed) -> Result<(), String> {
    let segment_bytes = SEGMENT / 2;
    let (budget, options) = (3 << 20, Options { segment_bytes, ..options(3 << 20) });
    let stage = open(seed, &options)?;
    let desk = Desk::new(&stage, "costs");
    put_all(&desk, 0..150)?;
    let (found, whole) = (here(&desk, 0..150).len() as u64, budget / segment_bytes);
    ensure(evicted(&stage) > 0, "the store is not full", found)?;
    ensure(found >= whole + whole / 8, "blocks go though segments lack bytes", (found, whole))?;
    stage.look_closely().map(drop)
}

/// Two shards, of which the first becomes short and the second holds segments with nothing in them; `hang` is a device that
/// takes no writes any more once that is so.
fn short_beside_unused(
    options: Options,
    hang: Option<DirId>,
    judge: impl FnOnce(&SimStage) -> Result<(), String>,
    seed: Seed,
) -> Result<(), String> {
    let dirs = if hang.is_some() { 2 } else { 1 };
    let options = Options { directories: dirs, ..options };
    let disk = DiskConfig { dirs, ..DiskConfig::default() };
    let world = SimWorld::new(seed.0, &WorldConfig { disk, ..WorldConfig::default() });
    let stage = SimStage::open(&world, &options).map_err(|error| error.to_string())?;
    let desk = Desk::new(&stage, "costs");
    let of = |shard: u32, count: usize| -> Vec<BlockKey> {
        let keys = (0..).map(|n| fixture::key(desk.chain, n));
        keys.filter(|key| stage.engine().shard_of(key) == shard).take(count).collect()
    };
    let put = |keys: &[BlockKey]| -> Result<(), String> {
        for key in keys {
            let outcomes = desk.outcomes(desk.request(pages(), &[*key], 1));
            ensure(outcomes == [BlockOutcome::Stored], "a block is not stored", outcomes)?;
        }
        Ok(())
    };
    let shards = options.shards_per_directory * u32::from(dirs);
    ensure(shards == 2, "another number of shards", shards)?;
    let (short, other) = (of(0, 120), of(1, 100));
    put(&short[..20])?;
    put(&other)?;
    let target = Target::Keys { column: None, keys: other };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(&stage, stage.store().delete(request)).map_err(|error| error.to_string())?;
    if let Some(dir) = hang {
        world.disk().inject(Rule::new(Which::Kind(OpKind::Write), When::From(1), Effect::Stuck).on(dir));
    }
    let began = world.clock().now();
    put(&short[20..])?;
    let took = world.clock().now().since(began);
    // Simulated time: not this machine's. One wait for the neighbour, and never a second one.
    ensure(took < Duration::from_secs(5), "puts wait for a neighbour", took)?;
    judge(&stage)
}

/// A shard that is short has what others do not use before it evicts.
fn spare_room(seed: Seed) -> Result<(), String> {
    let options = Options { shards_per_directory: 2, executors: 1 + seed.0 as usize % 2, ..options(6 << 20) };
    let judge = |stage: &SimStage| {
        let found = (evicted(stage), stage.engine().segments().len());
        ensure(found.0 == 0, "blocks go though another shard uses nothing", found)?;
        stage.look_closely().map(drop)
    };
    short_beside_unused(options, None, judge, seed)
}

/// Where the one that could give room hangs, the shard that is short evicts its own after one wait.
fn hung_neighbour(seed: Seed) -> Result<(), String> {
    let options = Options { executors: 1 + seed.0 as usize % 2, ..options(6 << 20) };
    let judge =
        |stage: &SimStage| ensure(evicted(stage) > 0, "nothing went", stage.engine().segments().len());
    short_beside_unused(options, Some(DirId(1)), judge, seed)
}

/// A store with fewer descriptors than it could use goes on with those that it has.
fn descriptors(seed: Seed) -> Result<(), String> {
    let files = seed.child("files").rng().between(4, 10);
    let stage = open(seed, &options(8 << 20))?;
    stage.engine().set_files_cap(files);
    put_all(&Desk::new(&stage, "costs"), 0..200)?;
    let found = stage.engine().segments().len() as u64;
    ensure(found <= files, "more segment files than descriptors", (found, files))
}

/// After a start as before it, what was unused for longest goes first, wherever it lies in the log. Few segments of many
/// are looked at.
fn old_blocks(seed: Seed) -> Result<(), String> {
    const BLOCKS: u64 = 700;
    let record_bytes_max = fixture::shape(SMALL.0, SMALL.1).block_bytes();
    let options = Options { segment_bytes: SEGMENT / 2, record_bytes_max, ..options(10 << 20) };
    let first = seed.child("old").rng().between(480, 640);
    let old = first..first + 20;
    let stage = open(seed, &options)?;
    small(&Desk::new(&stage, "costs"), 0..BLOCKS)?;
    ensure(evicted(&stage) == 0, "the store is full", stage.engine().segments().len())?;
    let media = stage.close().map_err(|error| error.to_string())?;
    let stage = reopen_on(4, seed.nth(1), media, &options)?;
    let desk = Desk::new(&stage, "costs");
    for used in [0..old.start, old.end..BLOCKS] {
        desk.read(&desk.read_request(SMALL, &desk.keys(used)));
    }
    let media = stage.close().map_err(|error| error.to_string())?;
    let stage = reopen_on(5, seed.nth(2), media, &options)?;
    let (desk, mut next) = (Desk::new(&stage, "costs"), BLOCKS);
    while evicted(&stage) == 0 && next < 2 * BLOCKS {
        small(&desk, next..next + 1)?;
        next += 1;
    }
    let keys = desk.keys(0..BLOCKS);
    let found = contains(&desk, SMALL, &keys, None).map_err(|error| error.to_string())?;
    let gone = (0..).zip(found).filter(|(_, one)| *one != Presence::Here).map(|(n, _)| n);
    let gone: Vec<u64> = gone.collect();
    let right = !gone.is_empty() && gone.iter().all(|n| old.contains(n));
    ensure(right, "others go than the oldest", (old, gone))
}

/// Puts small blocks, each a record of its own and behind the one before it.
fn small(desk: &Desk<'_>, numbers: Range<u64>) -> Result<(), String> {
    let one = |n: u64| PutRequest {
        durability: Durability::Relaxed,
        ..desk.request(SMALL, &desk.keys(n..n + 1), 1)
    };
    let outcomes: Vec<_> = numbers.flat_map(|n| desk.outcomes(one(n))).collect();
    ensure(outcomes.iter().all(|one| *one == BlockOutcome::Stored), "not all blocks are stored", outcomes)
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    let scene = &SCENES[seed.0 as usize % SCENES.len()];
    (scene.play)(seed).map_err(|why| format!("{}: {why}", scene.what))?;
    let mut digest = Mixer::new(0);
    digest.text(scene.what);
    digest.word(seed.0);
    states.reach(digest.value());
    Ok(())
}

/// Row R32.
pub(super) fn row() -> Row {
    fn run(ask: &super::Ask, target: u64) -> Tally {
        until(ask, target, one)
    }
    Row {
        id: "R32",
        what: "what a fault, a start or a neighbour may cost",
        counts: "faults, starts and neighbours",
        targets: [SCENES.len() as u64 * 2, SCENES.len() as u64 * 40, SCENES.len() as u64 * 400],
        run,
    }
}
