//! What was deleted stays away: beside puts, compactions and eviction, from segments not yet rewritten, over power
//! cuts and restarts, for as long as a record of it lies anywhere.

use std::collections::BTreeSet;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_contract::api::{
    ContainsRequest, DeleteRequest, Durability, LeaseId, Parent, Presence, PutRequest, Target,
};
use kvarts_layout::{BlockKey, Coordinate, Group};
use kvarts_store::engine::{CompactOptions, Limits, Options};

use super::pool::States;
use super::scene::{batches, chunk_pages};
use crate::conformance::{Desk, pages};
use crate::fixture;
use crate::sim::{Crash, Latency, Media, Rng, Seed, SimWorld, WorldConfig};
use crate::stage::{self, SimStage, Stage};

/// Lives of a store.
const LIVES: u64 = 3;
/// Deletes of one life.
const DELETES: u64 = 4;
/// Small blocks: several records lie in a segment.
const ODD: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);

/// A store of about a dozen small segments, which writes checkpoints only where it must.
fn open(seed: Seed, media: Option<Media>) -> Result<SimStage, String> {
    let mut config = WorldConfig::default();
    config.disk.latency =
        Latency { read: (100, 9000), write: (100, 9000), flush: (100, 90_000), meta: (100, 9000) };
    let world = match media {
        Some(media) => SimWorld::with_media(seed.0, &config, media),
        None => SimWorld::new(seed.0, &config),
    };
    let every = Duration::from_secs(1 << 40);
    let limits =
        Limits { arena_bytes: 2 << 20, checkpoint_every: every, batches: batches(seed), ..Limits::default() };
    let options = Options {
        shards_per_directory: 1,
        segment_bytes: 64 << 10,
        budget_bytes: 1 << 20,
        limits,
        ..Options::default()
    };
    // What is buried takes chunks as well.
    let options = Options { budget_bytes: options.budget_bytes + 2 * chunk_pages(&options), ..options };
    SimStage::open(&world, &options).map_err(|error| error.to_string())
}

/// One life of a store.
struct Life<'a> {
    stage: &'a SimStage,
    desk: Desk<'a>,
    other: Desk<'a>,
    /// The next key that was not used yet.
    next: &'a mut u64,
    /// What was put in earlier rounds and lives, and is not deleted yet.
    old: &'a mut Vec<BlockKey>,
}

impl Life<'_> {
    fn keys(&mut self, count: u64) -> Vec<BlockKey> {
        *self.next += count;
        self.desk.keys(*self.next - count..*self.next)
    }

    /// Blocks of others, each in a record of its own.
    fn churn(&mut self, count: u64) {
        for _ in 0..count {
            *self.next += 1;
            let key = self.other.keys(*self.next..*self.next + 1);
            self.other.outcomes(self.other.request(pages(), &key, 1));
        }
    }

    fn pin(&self, key: &BlockKey) -> Option<LeaseId> {
        let (group, coordinate) = ODD;
        let keys = std::slice::from_ref(key);
        let request =
            ContainsRequest { namespace: self.other.namespace, group, coordinate, keys, lease: None };
        self.stage.store().pin(&request, 1, u64::MAX).ok()?.lease
    }

    fn here(&self, keys: &BTreeSet<BlockKey>) -> Result<(), String> {
        let keys: Vec<BlockKey> = keys.iter().copied().collect();
        for (group, coordinate) in [ODD, pages()] {
            let namespace = self.desk.namespace;
            let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
            let reply = self.stage.store().contains(&request).map_err(|error| error.to_string())?;
            if let Some(at) = reply.presence.iter().position(|one| *one != Presence::Absent) {
                return Err(format!("{}, deleted for good, is {:?}", keys[at], reply.presence[at]));
            }
        }
        Ok(())
    }

    /// Blocks of earlier rounds and lives: they lie in sealed segments, where a compaction moves them, and under lower
    /// sequences than a life that began anew would give.
    fn some_old(&mut self, rng: &mut Rng) -> Vec<BlockKey> {
        let some = if rng.below(3) == 0 { 0 } else { rng.below(4).min(self.old.len() as u64) };
        (0..some).map(|_| self.old.swap_remove(rng.index(self.old.len()))).collect()
    }

    /// Puts, lets go on for some steps, and deletes what was put, while a compaction may run.
    fn round(&mut self, rng: &mut Rng, gone: &mut BTreeSet<BlockKey>) -> Result<(), String> {
        let small = self.keys(3);
        let beside = self.other.keys(*self.next..*self.next + 1);
        *self.next += 1;
        self.desk.outcomes(PutRequest { parent: Parent::Unknown, ..self.desk.request(ODD, &small, 1) });
        // Something in the same segment that keeps it from being recycled for a while.
        self.other.outcomes(self.other.request(ODD, &beside, 1));
        let held = rng.coin().then(|| self.pin(&beside[0])).flatten();
        if rng.coin() {
            self.churn(rng.below(6));
        }
        let (aging, dying) = (self.keys(2), self.some_old(rng));
        let large = self.keys(rng.below(5));
        let world = self.stage.world();
        let put = |key: &BlockKey| {
            let durability = if rng.coin() { Durability::Durable } else { Durability::Relaxed };
            let request = self.desk.request(pages(), std::slice::from_ref(key), 1);
            self.stage.store().put(PutRequest { durability, parent: Parent::Unknown, ..request })
        };
        let puts: Vec<_> = large.iter().map(put).collect();
        let compact = rng.below(4) < if dying.is_empty() { 2 } else { 3 };
        let options =
            CompactOptions { dead_thousandths: 0, merge_records_min: 2, ..CompactOptions::default() };
        let mut compaction = Box::pin(self.stage.engine().compact(options));
        let mut context = Context::from_waker(Waker::noop());
        let mut running = compact && compaction.as_mut().poll(&mut context).is_pending();
        for _ in 0..rng.below(80) {
            world.step();
            running = running && compaction.as_mut().poll(&mut context).is_pending();
        }
        let mut keys: Vec<BlockKey> = small.iter().chain(&large).chain(&dying).copied().collect();
        let whole = rng.below(6) == 0;
        if whole {
            keys.append(self.old);
        }
        let target = match whole {
            true => Target::Namespace,
            false => Target::Keys { column: None, keys: keys.clone() },
        };
        let request = DeleteRequest { namespace: self.desk.namespace, target, deadline: None };
        let deleted = stage::ask(self.stage, self.stage.store().delete(request));
        for put in puts {
            let _ = stage::ask(self.stage, put);
        }
        if running {
            let ended = stage::drive(
                world,
                std::future::poll_fn(|context| match running {
                    true => compaction.as_mut().poll(context).map(drop),
                    false => Poll::Ready(()),
                }),
            );
            ended.map_err(|hang| hang.to_string())?;
        }
        // A delete that was refused promises nothing.
        let refused = |reply: &kvarts_contract::api::DeleteReply| {
            reply.outcomes.iter().any(|one| matches!(one, kvarts_contract::api::DeleteOutcome::Refused(_)))
        };
        if deleted.is_ok_and(|reply| !refused(&reply)) {
            gone.extend(keys);
        }
        self.here(gone)?;
        self.desk.outcomes(PutRequest { parent: Parent::Unknown, ..self.desk.request(ODD, &aging, 1) });
        self.old.extend(aging);
        self.churn([0, 3, 14, 40][rng.index(4)]);
        if rng.below(4) == 0 {
            let written = stage::drive(world, self.stage.engine().checkpoint());
            written.map_err(|hang| hang.to_string())?.map_err(|error| error.to_string())?;
        }
        if let Some(lease) = held.filter(|_| rng.coin()) {
            self.stage.store().unlock(lease);
            self.churn(rng.below(20));
        }
        self.here(gone)
    }
}

/// Deletes in several lives of a store; after each the power fails.
pub(super) fn deletes(seed: Seed, states: &States) -> Result<(), String> {
    let mut rng = seed.child("buried").rng();
    let (mut gone, mut old, mut next, mut media) = (BTreeSet::new(), Vec::new(), 0, None);
    for life in 0..LIVES {
        let note = |what: String| format!("life {life}: {what}");
        let stage = open(seed.nth(life), media.take()).map_err(note)?;
        let (desk, other) = (Desk::new(&stage, "deleted"), Desk::new(&stage, "beside"));
        let mut life = Life { stage: &stage, desk, other, next: &mut next, old: &mut old };
        life.here(&gone).map_err(note)?;
        for _ in 0..DELETES {
            life.round(&mut rng, &mut gone).map_err(note)?;
        }
        stage.look().map_err(note)?;
        let state = stage.cut_power();
        let crash = [Crash::LoseAll, Crash::KeepAll, Crash::Random(rng.next_u64())][rng.index(3)];
        let image = state.image(crash);
        states.reach(image.digest());
        media = Some(image);
    }
    let stage = open(seed.child("last"), media)?;
    let (desk, other) = (Desk::new(&stage, "deleted"), Desk::new(&stage, "beside"));
    let life = Life { stage: &stage, desk, other, next: &mut next, old: &mut old };
    life.here(&gone).map_err(|what| format!("in the end: {what}"))
}
