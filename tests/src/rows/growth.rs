//! How work grows: the same request in a small form and in one eight times as large costs eight times as many steps, not
//! sixty-four, and a task never does as much in one go that other tasks wait for it. What the store does by itself (room
//! for one more segment, a checkpoint, a sweep of expired blocks) costs hardly more if the store has eight times as many
//! other blocks. Steps are counted, not timed, so the answer follows from the seed.

use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, DeleteRequest, Durability, MatchRequest, Order, Parent, PutRequest, ReadEnd, ReadEvent,
    ReadRequest, Target,
};
use kvarts_layout::prefix::{Absence, Need, Requirement, UNLIMITED};
use kvarts_layout::{BlockKey, Coordinate, Group, Requirements};
use kvarts_store::engine::{Compaction, Done, EvictionPolicy, Limits, Options, WorkDone};

use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::Desk;
use crate::fixture;
use crate::sim::log::Mixer;
use crate::sim::{DiskConfig, Effect, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use crate::stage::{SimStage, Stage, drive};

/// How many times as large the large form is.
const TIMES: u64 = 8;
/// Steps that one task may take before others have their turn.
const SECTION_MAX: u64 = 512;
/// What a request costs that does nothing: a cost that hardly grows is none that grows too fast.
const BESIDE: u64 = 200;

/// Steps of one kind.
pub type Kind = fn(&Done) -> WorkDone;

/// What a request has cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    /// Steps in all.
    pub steps: u64,
    /// The most steps of one task at a time.
    pub longest: u64,
}

/// How a cost may grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grows {
    /// As what is asked.
    AsAsked,
    /// By no more than half of it, however many blocks it is not about.
    Hardly,
}

/// A request whose cost is looked at.
#[derive(Debug)]
pub struct Scene {
    /// What it is.
    pub what: &'static str,
    /// How its cost may grow with its size.
    pub grows: Grows,
    /// The cost of one of this size, in a new world.
    pub cost: fn(Seed, u64) -> Result<Cost, String>,
}

/// All requests.
pub const SCENES: &[Scene] = &[
    Scene {
        what: "a read in layer order",
        grows: Grows::AsAsked,
        cost: |seed, size| reads(seed, size, Order::Layers, 1),
    },
    Scene {
        what: "a read in block order",
        grows: Grows::AsAsked,
        cost: |seed, size| reads(seed, size, Order::Blocks, 1),
    },
    Scene {
        what: "two equal reads in layer order",
        grows: Grows::AsAsked,
        cost: |seed, size| reads(seed, size, Order::Layers, 2),
    },
    Scene {
        what: "two equal reads in block order",
        grows: Grows::AsAsked,
        cost: |seed, size| reads(seed, size, Order::Blocks, 2),
    },
    Scene { what: "a match", grows: Grows::AsAsked, cost: matches },
    Scene { what: "a delete of a prefix", grows: Grows::AsAsked, cost: delete_prefix },
    Scene {
        what: "the footers that a delete of a prefix reads",
        grows: Grows::AsAsked,
        cost: footers_of_delete_prefix,
    },
    Scene { what: "room for a few blocks in a full store", grows: Grows::Hardly, cost: evictions },
    Scene {
        what: "a checkpoint of records",
        grows: Grows::AsAsked,
        cost: |seed, size| checkpoint(seed, size, 0),
    },
    Scene {
        what: "a checkpoint beside records of others",
        grows: Grows::Hardly,
        cost: |seed, size| checkpoint(seed, 40, size),
    },
    Scene {
        what: "a sweep of what has expired",
        grows: Grows::AsAsked,
        cost: |seed, size| sweep(seed, size, 0),
    },
    Scene {
        what: "a sweep beside what lasts",
        grows: Grows::Hardly,
        cost: |seed, size| sweep(seed, 40, size * 16),
    },
    Scene { what: "a look for chains beside other records", grows: Grows::Hardly, cost: merges },
    Scene { what: "a delete of keys in all columns", grows: Grows::AsAsked, cost: delete_keys },
    Scene {
        what: "checkpoints of a full store in which blocks are deleted",
        grows: Grows::Hardly,
        cost: deletes,
    },
];

impl Scene {
    /// Compares the cost of two sizes.
    pub fn compare(&self, seed: Seed, small: u64, large: u64) -> Result<(), String> {
        let (few, many) = ((self.cost)(seed, small)?, (self.cost)(seed, large)?);
        let times = large.div_ceil(small);
        let most = match self.grows {
            Grows::AsAsked => few.steps * times + few.steps * times / 4,
            Grows::Hardly => few.steps + few.steps / 2,
        };
        if many.steps > most + BESIDE {
            let (few, many) = (few.steps, many.steps);
            return Err(format!("{}: {few} steps of {small} blocks, {many} of {large}", self.what));
        }
        if many.longest > SECTION_MAX {
            let longest = many.longest;
            return Err(format!("{}: {longest} steps of {large} blocks in one go", self.what));
        }
        Ok(())
    }
}

/// What is counted while a request runs.
pub struct Meter<'a> {
    stage: &'a SimStage,
    kind: Kind,
    begun: u64,
    last: u64,
    longest: u64,
}

impl std::fmt::Debug for Meter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Meter({} steps)", self.last - self.begun)
    }
}

impl<'a> Meter<'a> {
    /// Counts from here on.
    pub fn new(stage: &'a SimStage, kind: Kind) -> Self {
        let begun = kind(&stage.engine().work_done()).steps;
        Self { stage, kind, begun, last: begun, longest: 0 }
    }

    /// Lets the world go on until `done`; looks at what each of its steps has cost.
    pub fn until(&mut self, steps_max: u64, mut done: impl FnMut() -> bool) -> Result<(), String> {
        let ran = self.stage.world().run_until(steps_max, || {
            let now = (self.kind)(&self.stage.engine().work_done()).steps;
            self.longest = self.longest.max(now - self.last);
            self.last = now;
            done()
        });
        ran.map_err(|hang| hang.to_string())
    }

    /// The cost up to now.
    pub fn cost(&self) -> Cost {
        let now = (self.kind)(&self.stage.engine().work_done()).steps;
        Cost { steps: now - self.begun, longest: self.longest.max(now - self.last) }
    }
}

/// The column of small blocks.
pub const SMALL: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);

/// A store whose records have one small block each, with room for twice as many bytes.
pub fn store_of_small_records(seed: Seed, shards: u32, bytes: u64) -> Result<SimStage, String> {
    small_records_within(seed, shards, bytes * 2 + (32 << 20))
}

/// The same within a budget.
fn small_records_within(seed: Seed, shards: u32, budget_bytes: u64) -> Result<SimStage, String> {
    let (group, coordinate) = SMALL;
    let most = fixture::shape(group, coordinate).block_bytes();
    open_store(seed, (shards, budget_bytes), most, Limits::default())
}

fn open_store(
    seed: Seed,
    (shards, budget_bytes): (u32, u64),
    record_bytes_max: u64,
    limits: Limits,
) -> Result<SimStage, String> {
    let disk = DiskConfig { capacity: budget_bytes + (32 << 20), ..DiskConfig::default() };
    let world = SimWorld::new(seed.0, &WorldConfig { disk, ..WorldConfig::default() });
    let options = Options {
        shards_per_directory: shards,
        segment_bytes: 256 << 10,
        budget_bytes,
        eviction: EvictionPolicy::Lru,
        record_bytes_max,
        executors: 1,
        limits: Limits { arena_bytes: 4 << 20, ..limits },
        ..Options::default()
    };
    SimStage::open(&world, &options).map_err(|error| error.to_string())
}

/// Puts `blocks` blocks of one chain, each a record of its own.
pub fn fill(desk: &Desk<'_>, blocks: u64) {
    put(desk, 0..blocks, None);
}

/// Of a chain longer than the budget the beginning is kept: so a full store takes many.
const SESSION: usize = 24;

/// Puts blocks of chains of [`SESSION`] blocks.
fn put_sessions(desk: &Desk<'_>, numbers: std::ops::Range<u64>) {
    desk.keys(numbers).chunks(SESSION).for_each(|keys| put_keys(desk, keys, None));
}

/// Puts blocks of one chain.
fn put(desk: &Desk<'_>, numbers: std::ops::Range<u64>, expires_after: Option<Duration>) {
    put_keys(desk, &desk.keys(numbers), expires_after);
}

fn put_keys(desk: &Desk<'_>, keys: &[BlockKey], expires_after: Option<Duration>) {
    for (at, some) in keys.chunks(256).enumerate() {
        let before = (at * 256).checked_sub(1).map(|before| keys[before]);
        put_behind(desk, some, before.map_or(Parent::Root, Parent::Key), expires_after);
    }
}

fn put_behind(desk: &Desk<'_>, keys: &[BlockKey], parent: Parent, expires_after: Option<Duration>) {
    let request = desk.request(SMALL, keys, 1);
    let request =
        PutRequest { durability: Durability::Relaxed, parent, first_block: None, expires_after, ..request };
    let stored = desk.outcomes(request).iter().all(|one| *one == BlockOutcome::Stored);
    assert!(stored, "a store with room refuses a block");
}

/// Bytes that `blocks` records of one small block take.
pub const fn bytes_of(blocks: u64) -> u64 {
    blocks * (8 << 10)
}

/// `equal` equal reads of all blocks at once.
fn reads(seed: Seed, blocks: u64, order: Order, equal: usize) -> Result<Cost, String> {
    let stage = store_of_small_records(seed, 2, bytes_of(blocks))?;
    let desk = Desk::new(&stage, "growth");
    fill(&desk, blocks);
    let keys = desk.keys(0..blocks);
    let shared = stage.engine().stats().counts.bytes_shared;
    let mut meter = Meter::new(&stage, |done| done.reads);
    let ask = || ReadRequest { order, ..desk.read_request(SMALL, &keys) };
    let requests: Vec<_> = (0..equal).map(|_| ask()).collect();
    let streams = requests.iter().map(|request| stage.store().read(request.clone()));
    let streams = streams.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    let mut ends: Vec<Option<ReadEnd>> = vec![None; equal];
    meter.until(blocks * 2000 + 100_000, || {
        for (stream, end) in streams.iter().zip(&mut ends) {
            while let Some(event) = stream.try_next() {
                if let ReadEvent::End(ended) = event {
                    *end = Some(ended);
                }
            }
        }
        ends.iter().all(Option::is_some)
    })?;
    let cost = meter.cost();
    // One executor has both shards.
    let parts = stage.engine().work_done().parts.steps;
    if parts != equal as u64 {
        return Err(format!("{equal} reads in {parts} parts"));
    }
    if let Some(end) = ends.iter().flatten().find(|end| !end.failures.is_empty()) {
        return Err(format!("a read of what is here: {:?}", end.failures.first()));
    }
    for request in &requests {
        desk.expect_bytes(request, &[0, blocks as u32 / 2, blocks as u32 - 1], 1);
    }
    let shared = stage.engine().stats().counts.bytes_shared - shared;
    if equal > 1 && shared == 0 {
        return Err("equal reads that share nothing".to_owned());
    }
    Ok(cost)
}

/// A match of all blocks in five columns, of which one reaches a part of the way. Each block is looked at once in each.
fn matches(seed: Seed, blocks: u64) -> Result<Cost, String> {
    let stage = store_of_small_records(seed, 2, bytes_of(blocks) * 2)?;
    let desk = Desk::new(&stage, "growth");
    fill(&desk, blocks);
    let keys = desk.keys(0..blocks);
    let state = (fixture::STATE, Coordinate::Replicated);
    desk.outcomes(desk.request(state, &keys[..keys.len() / 2], 1));
    let heads = |start, count| Coordinate::heads(start, count, 2).ok_or("heads of two");
    let need = |group, coordinates, need, tokens| Requirement {
        group,
        coordinates,
        need,
        absence: Absence::Recompute { tokens },
    };
    let groups = vec![
        need(fixture::PAGES, vec![heads(0, 1)?, heads(1, 1)?, heads(0, 2)?], Need::All, 1),
        need(fixture::ODD, vec![Coordinate::Replicated], Need::Last { tokens: 64 }, 1),
        need(fixture::STATE, vec![Coordinate::Replicated], Need::At, 1),
    ];
    let requirements = Requirements::new(fixture::BLOCK_TOKENS, groups).map_err(|error| error.to_string())?;
    let (namespace, requirements) = (desk.namespace, &requirements);
    let request = MatchRequest {
        namespace,
        keys: &keys,
        requirements,
        recompute_tokens_max: UNLIMITED,
        lease: None,
        plan: None,
    };
    let meter = Meter::new(&stage, |done| done.matches);
    stage.store().match_prefix(&request).map_err(|error| error.to_string())?;
    let steps = meter.cost().steps;
    match steps <= blocks * 5 {
        // It runs on its caller's thread, in one go.
        true => Ok(Cost { steps, longest: 0 }),
        false => Err(format!("{steps} steps for {blocks} blocks in five columns")),
    }
}

/// The delete of a chain of records that lie in eight shards. What a shard lists is few steps for each of its blocks.
fn delete_prefix(seed: Seed, blocks: u64) -> Result<Cost, String> {
    Ok(delete_chain(seed, blocks, |done| done.searches)?.0)
}

/// The same; what is counted is a segment's footer that is read. Each is read once.
fn footers_of_delete_prefix(seed: Seed, blocks: u64) -> Result<Cost, String> {
    let (cost, segments) = delete_chain(seed, blocks, |done| done.footers)?;
    if cost.steps > segments {
        return Err(format!("{} footers of {segments} segments were read", cost.steps));
    }
    Ok(cost)
}

/// What the delete of a chain costs, and how many segments there are.
fn delete_chain(seed: Seed, blocks: u64, kind: Kind) -> Result<(Cost, u64), String> {
    let stage = store_of_small_records(seed, 8, bytes_of(blocks))?;
    let desk = Desk::new(&stage, "growth");
    fill(&desk, blocks);
    stage.rest();
    let segments = stage.engine().segments().len() as u64;
    let target = Target::Prefix(desk.keys(0..1)[0]);
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    let mut meter = Meter::new(&stage, kind);
    let (mut ticket, mut answer) = (stage.store().delete(request), None);
    meter.until(blocks * 2000 + 100_000, || {
        answer = ticket.try_take();
        answer.is_some()
    })?;
    let answer = answer.ok_or("no answer")?.map_err(|_| "a delete without an answer")?;
    match answer.map_err(|error| error.to_string())?.blocks {
        deleted if deleted == blocks => Ok((meter.cost(), segments)),
        deleted => Err(format!("of a chain of {blocks} blocks {deleted} were deleted")),
    }
}

/// The cost of work that knows its own sections: each ends with the step by which it has enough.
fn in_sections(stage: &SimStage, cost: Cost, kind: Kind) -> Result<Cost, String> {
    const STEP_MAX: u64 = 256;
    let longest = kind(&stage.engine().work_done()).longest_steps.saturating_sub(STEP_MAX);
    if cost.steps == 0 { Err("nothing was counted".to_owned()) } else { Ok(Cost { longest, ..cost }) }
}

/// The delete of keys under which there are blocks in two columns: a few hundred at a time, since all other changes wait for each.
fn delete_keys(seed: Seed, size: u64) -> Result<Cost, String> {
    let blocks = 4 * size;
    let (group, coordinate) = SMALL;
    let most = 64 * fixture::shape(group, coordinate).block_bytes();
    let stage = open_store(seed, (2, bytes_of(blocks) + (32 << 20)), most, Limits::default())?;
    let desk = Desk::new(&stage, "growth");
    fill(&desk, blocks);
    let keys = desk.keys(0..blocks);
    desk.outcomes(desk.request((fixture::STATE, Coordinate::Replicated), &keys[..1], 1));
    stage.rest();
    let target = Target::Keys { column: None, keys };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    let meter = Meter::new(&stage, |done| done.deletes);
    let answer = drive(stage.world(), stage.store().delete(request)).map_err(|hang| hang.to_string())?;
    let answer = answer.map_err(|_| "a delete without an answer")?.map_err(|error| error.to_string())?;
    if answer.blocks != blocks + 1 {
        return Err(format!("of {blocks} keys in two columns {} blocks were deleted", answer.blocks));
    }
    // It begins on its caller's thread.
    let longest = stage.engine().work_done().deletes.longest_steps;
    Ok(Cost { longest, ..meter.cost() })
}

/// Checkpoints that a full store writes, in hundreds of steps, while sessions are put and one key is deleted after each: what a segment
/// buries that is recycled stands in a checkpoint that was written since it was sealed, and needs none of its own.
fn deletes(seed: Seed, size: u64) -> Result<Cost, String> {
    const EOPNOTSUPP: i32 = 95;
    let sessions = size / 4 + 20;
    let blocks = 40 * SESSION as u64;
    let stage = small_records_within(seed, 1, bytes_of(blocks))?;
    // So that segments are recycled as a whole: files of such with holes are removed, which takes checkpoints of its own.
    stage.world().disk().inject(Rule::new(
        Which::Kind(OpKind::Punch),
        When::From(1),
        Effect::Errno(EOPNOTSUPP),
    ));
    let desk = Desk::new(&stage, "growth");
    put_sessions(&desk, 0..blocks);
    let meter = Meter::new(&stage, |done| done.checkpoints);
    let recycled = || stage.engine().stats().counts.segments_recycled;
    let before = recycled();
    for session in 0..sessions {
        let first = blocks + session * SESSION as u64;
        put_sessions(&desk, first..first + SESSION as u64);
        let target = Target::Keys { column: None, keys: desk.keys(first..first + 1) };
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        let deleted = drive(stage.world(), stage.store().delete(request)).map_err(|hang| hang.to_string())?;
        deleted.map_err(|_| "a delete without an answer")?.map_err(|error| error.to_string())?;
    }
    match recycled() - before {
        0..2 => Err("nothing was recycled".to_owned()),
        _ => Ok(Cost { steps: meter.cost().steps / 100, longest: 0 }),
    }
}

/// The look for chains that follows a few turns of a session, one block each, among other small records.
fn merges(seed: Seed, others: u64) -> Result<Cost, String> {
    const TURNS: u64 = 40;
    const EVERY: Duration = Duration::from_secs(10);
    let (group, coordinate) = SMALL;
    let most = 64 * fixture::shape(group, coordinate).block_bytes();
    let compaction = Compaction { every: Some(EVERY), merge_after_records: TURNS, ..Compaction::default() };
    let limits = Limits { compaction, ..Limits::default() };
    let budget = bytes_of(2 * (others + 2 * TURNS)) + (32 << 20);
    let stage = open_store(seed, (8, budget), most, limits)?;
    let desk = Desk::new(&stage, "growth");
    desk.keys(0..others).iter().for_each(|key| put_keys(&desk, &[*key], None));
    // These are looked at, and follow nothing.
    Meter::new(&stage, |done| done.merges)
        .until(1_000_000, || stage.engine().work_done().merges.steps >= 2 * others)?;
    stage.rest();
    let turns = desk.keys(others..others + TURNS);
    let mut meter = Meter::new(&stage, |done| done.merges);
    for (turn, key) in turns.iter().enumerate() {
        let parent = turn.checked_sub(1).map_or(Parent::Root, |before| Parent::Key(turns[before]));
        put_behind(&desk, &[*key], parent, None);
    }
    let merged = || stage.engine().stats().counts.blocks_moved;
    meter.until(100_000, || merged() >= TURNS)?;
    match merged() {
        TURNS => Ok(meter.cost()),
        moved => Err(format!("{moved} blocks were merged of a session of {TURNS}")),
    }
}

/// Evictions of a full store that takes a few more blocks, for each hundred that go: how many go at once, and when, is a matter of
/// chance. Their cost depends on the few, and on one look at the books of each segment, not on the size of the store.
fn evictions(seed: Seed, size: u64) -> Result<Cost, String> {
    const MORE: u64 = 120;
    let blocks = size * 8 + 1200;
    let stage = small_records_within(seed, 1, bytes_of(blocks))?;
    let desk = Desk::new(&stage, "growth");
    put_sessions(&desk, 0..blocks + MORE);
    stage.rest();
    let evicted = || stage.engine().stats().counts.blocks_evicted;
    let before = evicted();
    let mut meter = Meter::new(&stage, |done| done.evictions);
    put_sessions(&desk, blocks + MORE..blocks + 4 * MORE);
    meter.until(100_000, || evicted() > before)?;
    let cost = meter.cost();
    match evicted() - before {
        0 => Err(format!("nothing was evicted of {blocks} blocks")),
        gone => {
            let each = Cost { steps: cost.steps * 100 / gone, ..cost };
            in_sections(&stage, each, |done| done.evictions)
        }
    }
}

/// A checkpoint of `blocks` records, beside `others` records of another shard.
fn checkpoint(seed: Seed, blocks: u64, others: u64) -> Result<Cost, String> {
    let stage = store_of_small_records(seed, 1, bytes_of(blocks))?;
    let desk = Desk::new(&stage, "growth");
    fill(&desk, blocks);
    stage.rest();
    stage.engine().add_strangers(0, others * 160).map_err(|error| error.to_string())?;
    let meter = Meter::new(&stage, |done| done.checkpoints);
    let written = drive(stage.world(), stage.engine().checkpoint()).map_err(|hang| hang.to_string())?;
    written.map_err(|error| error.to_string())?;
    in_sections(&stage, meter.cost(), |done| done.checkpoints)
}

/// A sweep of `blocks` expired blocks, beside `others` blocks that last.
fn sweep(seed: Seed, blocks: u64, others: u64) -> Result<Cost, String> {
    let stage = store_of_small_records(seed, 1, bytes_of(blocks + others))?;
    let desk = Desk::new(&stage, "growth");
    put(&desk, 0..others, Some(Duration::from_secs(1_000_000)));
    put(&desk, others..others + blocks, Some(Duration::from_secs(3600)));
    stage.rest();
    let expired = || stage.engine().stats().counts.blocks_expired;
    let mut meter = Meter::new(&stage, |done| done.sweeps);
    meter.until(10_000_000, || expired() >= blocks)?;
    match expired() {
        gone if gone == blocks => in_sections(&stage, meter.cost(), |done| done.sweeps),
        gone => Err(format!("of {blocks} blocks whose time is over {gone} have gone")),
    }
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    let mut rng = seed.child("growth").rng();
    let scene = &SCENES[seed.0 as usize % SCENES.len()];
    let small = rng.between(20, 80);
    scene.compare(seed, small, small * TIMES)?;
    let mut digest = Mixer::new(0);
    digest.text(scene.what);
    digest.word(small);
    digest.word(seed.0);
    states.reach(digest.value());
    Ok(())
}

/// Row R30.
pub(super) fn row() -> Row {
    fn run(ask: &super::Ask, target: u64) -> Tally {
        until(ask, target, one)
    }
    Row {
        id: "R30",
        what: "requests of two sizes, whose work must grow as they do",
        counts: "requests of two sizes",
        targets: [24, 400, 4000],
        run,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_takes_blocks_that_lie_nowhere_however_many_came_before() {
        let stage = store_of_small_records(Seed(1), 1, bytes_of(16)).unwrap();
        // Those of a benchmark with a hundred million.
        for from in [0, 1 << 23, 1 << 24, 99_999_968] {
            let added = stage.engine().add_strangers(from, 32);
            added.unwrap_or_else(|error| panic!("from {from}: {error}"));
        }
        assert_eq!(stage.engine().stats().index.blocks, 4 * 32);
    }
}
