//! What a full store keeps of chains: beginnings, without which nothing behind them can be used.

use std::fmt::Debug;
use std::ops::Range;

use kvarts_contract::api::{BlockOutcome, ContainsRequest, Parent, Presence, PutRequest};
use kvarts_contract::error::Reason;
use kvarts_store::engine::{EvictionPolicy, Limits, Options};

use super::growth::SMALL;
use crate::conformance::Desk;
use crate::fixture;
use crate::sim::{Seed, SimWorld, WorldConfig};
use crate::stage::{SimStage, Stage};

const SEGMENT: u64 = 64 << 10;

fn ensure(holds: bool, what: &str, found: impl Debug) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("{what}: {found:?}")) }
}

fn open(seed: Seed, segments: u64) -> Result<SimStage, String> {
    let world = SimWorld::new(seed.0, &WorldConfig::default());
    let mut rng = seed.child("options").rng();
    let shards = 1 + rng.below(3) as u32;
    let options = Options {
        segment_bytes: SEGMENT,
        budget_bytes: (segments + 4 * u64::from(shards)) * SEGMENT,
        shards_per_directory: shards,
        executors: 1 + rng.index(2),
        eviction: [EvictionPolicy::Lru, EvictionPolicy::Weighted][rng.index(2)],
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    };
    SimStage::open(&world, &options).map_err(|error| error.to_string())
}

/// Puts blocks of the desk's chain behind those before them.
fn grow(desk: &Desk<'_>, numbers: Range<u64>) -> Vec<BlockOutcome> {
    let parent = numbers.start.checked_sub(1);
    let parent = parent.map_or(Parent::Root, |before| Parent::Key(fixture::key(desk.chain, before)));
    let request = desk.request(SMALL, &desk.keys(numbers), 1);
    desk.outcomes(PutRequest { parent, first_block: None, ..request })
}

/// Which blocks of the desk's chain are here.
fn here(desk: &Desk<'_>, numbers: Range<u64>) -> Vec<bool> {
    let keys = desk.keys(numbers);
    let (group, coordinate) = SMALL;
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    let found = desk.stage.store().contains(&request).expect("a look at few blocks").presence;
    found.into_iter().map(|one| one == Presence::Here).collect()
}

/// Of a chain longer than the budget the beginning is kept, and puts of the rest are told that there is no room for it.
pub(super) fn longer_than_the_budget(seed: Seed) -> Result<(), String> {
    let stage = open(seed, 16)?;
    let desk = Desk::new(&stage, "chain");
    let mut rng = seed.child("work").rng();
    // About twice what there is room for.
    let (blocks, mut outcomes) = (400, Vec::new());
    while outcomes.len() < blocks as usize {
        let begin = outcomes.len() as u64;
        outcomes.extend(grow(&desk, begin..(begin + rng.between(1, 2)).min(blocks)));
    }
    let here = here(&desk, 0..blocks);
    for (block, (outcome, here)) in outcomes.iter().zip(&here).enumerate() {
        let told = match outcome {
            BlockOutcome::Stored => *here,
            BlockOutcome::Refused(Reason::NoSpace(_)) => !here,
            _ => false,
        };
        ensure(told, "a put is not told what became of a block", (block, outcome, here))?;
    }
    let kept = here.iter().filter(|here| **here).count();
    let usable = here.iter().take_while(|here| **here).count();
    ensure(10 * usable >= 9 * kept, "what is kept is of no use", (usable, kept))?;
    ensure(kept >= 60 && kept < here.len(), "the chain is not longer than the budget", (kept, here.len()))?;
    stage.look_closely().map(drop)
}

/// What is put behind a chain keeps all of it, though its beginning is not read.
pub(super) fn grown_and_not_read(seed: Seed) -> Result<(), String> {
    // Each block of the chain may end up in a segment of which nothing else is left.
    let stage = open(seed, 40)?;
    let (desk, others) = (Desk::new(&stage, "chain"), Desk::new(&stage, "others"));
    let mut rng = seed.child("work").rng();
    let mut len = 16;
    for begin in 0..len {
        grow(&desk, begin..begin + 1);
    }
    let mut next = 0;
    while len < 56 {
        let some = rng.between(2, 5);
        let request = others.request(SMALL, &others.keys(next..next + some), 1);
        others.outcomes(PutRequest { parent: Parent::Unknown, first_block: None, ..request });
        next += some;
        if rng.below(6) == 0 {
            let outcomes = grow(&desk, len..len + 1);
            ensure(outcomes == [BlockOutcome::Stored], "the chain does not grow", outcomes)?;
            len += 1;
            stage.advance(std::time::Duration::from_secs(rng.between(1, 30)));
        }
    }
    let evicted = stage.engine().stats().counts.blocks_evicted;
    let here = here(&desk, 0..len);
    ensure(evicted > 30, "the store is not full", (evicted, next))?;
    ensure(here.iter().all(|here| *here), "a block goes that others were just put behind", here)
}
