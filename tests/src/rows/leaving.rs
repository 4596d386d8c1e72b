//! Callers that leave: each kind of request is dropped after every number of steps of its world until it ends by
//! itself. Nothing half is visible afterwards, what was claimed, pinned, promised and lent is given back, and the same
//! request works when it is made again.

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Durability, KvStore, LeaseTerms, Order, Presence, PutReply,
    PutRequest, ReadEvent, ReadRequest, Target,
};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::Ticket;
use kvarts_layout::{BlockKey, Layout};
use kvarts_store::engine::{CompactOptions, Holding, Limits, Options, Store};

use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::{Desk, pages};
use crate::sim::log::Mixer;
use crate::sim::{Latency, Rng, Seed, SimWorld, WorldConfig};
use crate::stage::{self, SimStage, Stage};

/// Drops of one seed.
const DROPS: u64 = 24;
/// The kinds of requests.
const KINDS: u64 = 12;
/// Whose blocks these are: they can be compressed.
const PRODUCER: u64 = 1;

/// What is left when nothing is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Rest {
    holding: Holding,
    arena_bytes: u64,
    slots: u64,
    dropped_ops: u64,
}

fn rest(stage: &SimStage) -> Result<Rest, String> {
    stage.world().settle();
    let io = stage::drive(stage.world(), stage.engine().io()).map_err(|hang| hang.to_string())?;
    let io = io.map_err(|error| error.to_string())?;
    let sum = |of: fn(&kvarts_store::driver::Metrics) -> u64| io.iter().map(|(_, metrics)| of(metrics)).sum();
    Ok(Rest {
        holding: stage.engine().holding(),
        arena_bytes: sum(|metrics| metrics.arena_bytes),
        slots: sum(|metrics| metrics.slots),
        dropped_ops: sum(|metrics| metrics.dropped_ops),
    })
}

fn world(seed: Seed) -> SimWorld {
    let mut config = WorldConfig::default();
    let mut rng = seed.child("world").rng();
    config.disk.latency =
        Latency { read: (1000, 90_000), write: (1000, 90_000), flush: (1000, 300_000), meta: (1000, 90_000) };
    if rng.coin() {
        config.step_cost = Duration::from_micros(rng.between(1, 30));
    }
    SimWorld::new(seed.0, &config)
}

fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    let every = Duration::from_secs(1 << 40);
    Options {
        shards_per_directory: 2,
        segment_bytes: 256 << 10,
        budget_bytes: 6 << 20,
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, checkpoint_every: every, ..Limits::default() },
        ..Options::default()
    }
}

/// Polls a future once for each of `steps` steps of the world. Gives its answer, if it ended by then.
fn for_steps<T>(world: &SimWorld, steps: u64, future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..steps {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Some(value);
        }
        world.step();
    }
    None
}

/// One request, dropped after some steps; true if it ended before.
struct Scene<'a> {
    stage: &'a SimStage,
    desk: Desk<'a>,
    /// Blocks that were there before.
    old: Vec<BlockKey>,
    /// Blocks that were never put.
    new: Vec<BlockKey>,
}

impl Scene<'_> {
    fn world(&self) -> &SimWorld {
        self.stage.world()
    }

    fn store(&self) -> &Store {
        self.stage.engine()
    }

    fn put(&self, kind: u64) -> Ticket<Result<PutReply, Error>> {
        let durability = if kind == 1 { Durability::Relaxed } else { Durability::Durable };
        // The third kind does not leave: its time ends.
        let deadline = (kind == 2).then(|| self.stage.now().plus(Duration::from_micros(150)));
        let layout = Some(if kind == 0 { Layout::LayerBlock } else { Layout::FullBlock });
        let request = self.desk.request(pages(), &self.new, PRODUCER);
        self.store().put(PutRequest { durability, deadline, layout, ..request })
    }

    fn target(&self, kind: u64) -> Target {
        match kind {
            5 => Target::Keys { column: None, keys: self.old.clone() },
            6 => Target::Prefix(self.old[0]),
            _ => Target::Namespace,
        }
    }

    fn read(&self, kind: u64, steps: u64) -> Result<bool, String> {
        let order = if kind == 3 { Order::Layers } else { Order::Blocks };
        let deadline = (kind == 4).then(|| self.stage.now().plus(Duration::from_micros(120)));
        let request = self.desk.read_request(pages(), &self.old);
        let request = ReadRequest { order, deadline, ..request };
        let stream = self.store().read(request.clone()).map_err(|error| error.to_string())?;
        let whole = async {
            loop {
                if let ReadEvent::End(end) = stream.next().await {
                    break end;
                }
            }
        };
        let Some(end) = for_steps(self.world(), steps, whole) else { return Ok(false) };
        let good = (0..self.old.len() as u32).filter(|at| {
            let failed = end.failures.iter().any(|(failed, _)| failed == at);
            let usable = if order == Order::Layers { *at < end.usable_blocks } else { true };
            usable && !failed && end.usable_layers == 3
        });
        self.desk.expect_bytes(&request, &good.collect::<Vec<_>>(), PRODUCER);
        Ok(true)
    }

    /// Makes a request of a kind and leaves it; true if it had ended by then.
    fn leave(&self, kind: u64, steps: u64) -> Result<bool, String> {
        let world = self.world();
        Ok(match kind {
            0..3 => {
                let answer = for_steps(world, steps, self.put(kind));
                if let Some(answer) = answer {
                    let reply = answer.map_err(|_| "a put without an answer")?;
                    self.judge_put(&reply.map_err(|error| error.to_string())?)?;
                    return Ok(true);
                }
                false
            }
            3 | 4 => self.read(kind, steps)?,
            5..8 => {
                let request = DeleteRequest {
                    namespace: self.desk.namespace,
                    target: self.target(kind),
                    deadline: None,
                };
                let ended = for_steps(world, steps, self.store().delete(request));
                if let Some(Ok(Ok(_))) = &ended {
                    self.expect_gone(if kind == 6 { &self.old[..1] } else { &self.old })?;
                }
                ended.is_some()
            }
            8 => {
                let options = CompactOptions {
                    dead_thousandths: 0,
                    merge_records_min: 2,
                    encode_cold_after: Some(Duration::ZERO),
                    ..CompactOptions::default()
                };
                for_steps(world, steps, self.store().compact(options)).is_some()
            }
            9 => for_steps(world, steps, self.store().checkpoint()).is_some(),
            10 => for_steps(world, steps, self.store().snapshot(None)).is_some(),
            _ => {
                // A pin that is held while its holder leaves and ended by another.
                let (group, coordinate) = pages();
                let terms = LeaseTerms { hold: Duration::from_secs(9), tenant: 1, cap_bytes: 1 << 30 };
                let request = ContainsRequest {
                    namespace: self.desk.namespace,
                    group,
                    coordinate,
                    keys: &self.old,
                    lease: Some(terms),
                };
                let lease = self.store().contains(&request).map_err(|error| error.to_string())?.lease;
                let put = self.put(0);
                let ended = for_steps(world, steps, put).is_some();
                let unlocked = lease.is_none_or(|lease| self.store().unlock(lease));
                if !unlocked {
                    return Err("a lease ended before its time".to_owned());
                }
                ended
            }
        })
    }

    fn presence(&self, keys: &[BlockKey]) -> Result<Vec<Presence>, String> {
        let (group, coordinate) = pages();
        let namespace = self.desk.namespace;
        let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
        Ok(self.store().contains(&request).map_err(|error| error.to_string())?.presence)
    }

    fn judge_put(&self, reply: &PutReply) -> Result<(), String> {
        self.world().settle();
        for (at, (key, outcome)) in self.new.iter().zip(&reply.outcomes).enumerate() {
            let there = self.presence(std::slice::from_ref(key))?[0];
            let expected = match outcome {
                BlockOutcome::Stored | BlockOutcome::AlreadyThere => Presence::Here,
                _ => Presence::Absent,
            };
            if there != expected {
                return Err(format!("block {at} was answered {outcome:?} and is {there:?}"));
            }
        }
        Ok(())
    }

    fn expect_gone(&self, keys: &[BlockKey]) -> Result<(), String> {
        let there = self.presence(keys)?;
        let gone = there.iter().all(|one| *one == Presence::Absent);
        if gone { Ok(()) } else { Err(format!("deleted, and {there:?}")) }
    }

    /// Every block is whole or absent, and what is said to be here can be read.
    fn whole(&self) -> Result<(), String> {
        let keys = [&self.old[..], &self.new[..]].concat();
        let presence = self.presence(&keys)?;
        let request = ReadRequest { order: Order::Blocks, ..self.desk.read_request(pages(), &keys) };
        let (_, end) = self.desk.read(&request);
        let failures: BTreeMap<u32, Reason> = end.failures.into_iter().collect();
        for (at, presence) in (0..).zip(&presence) {
            match (presence, failures.get(&at)) {
                (Presence::Here, None) => self.desk.expect_bytes(&request, &[at], PRODUCER),
                (Presence::Absent, Some(Reason::NotHere(_))) => {}
                (presence, reason) => {
                    return Err(format!("block {at} is {presence:?}, and read as {reason:?}"));
                }
            }
        }
        Ok(())
    }

    /// What was left can be asked for again.
    fn again(&self) -> Result<(), String> {
        let outcomes = self.desk.outcomes(self.desk.request(pages(), &self.new, PRODUCER));
        let fine = |one: &BlockOutcome| matches!(one, BlockOutcome::Stored | BlockOutcome::AlreadyThere);
        if outcomes.iter().all(fine) { Ok(()) } else { Err(format!("put again: {outcomes:?}")) }
    }
}

fn drops(seed: Seed, states: &States) -> Result<(), String> {
    let kind = seed.0 % KINDS;
    let stage = SimStage::open(&world(seed), &options(seed)).map_err(|error| error.to_string())?;
    let mut rng = seed.child("drops").rng();
    let (first, stride) = (rng.below(4), rng.between(1, 9));
    for number in 0..DROPS {
        let name = format!("leaving {number}");
        let desk = Desk::new(&stage, if kind == 7 { &name } else { "leaving" });
        let at = number * 16;
        let old = desk.keys(at..at + 3);
        put_old(&desk, &old, &mut rng)?;
        let before = rest(&stage)?;
        let new = desk.keys(at + 8..at + 11);
        let scene = Scene { stage: &stage, desk, old, new };
        let steps = first + number * stride;
        let note = |what: String| format!("request of kind {kind}, left after {steps} steps: {what}");
        scene.leave(kind, steps).map_err(note)?;
        let after = rest(&stage).map_err(note)?;
        if after != before {
            return Err(note(format!("{after:?} is left where {before:?} was before")));
        }
        scene.whole().map_err(note)?;
        stage.look().map_err(note)?;
        scene.again().map_err(note)?;
        let mut state = Mixer::new(kind);
        state.word(steps);
        state.bytes(&stage.world().disk().log().digest().to_le_bytes());
        states.reach(state.value());
    }
    quota(&stage).map_err(|what| format!("quota: {what}"))?;
    shrink(&stage).map_err(|what| format!("a lower budget: {what}"))?;
    stage.look_closely().map(drop)
}

fn put_old(desk: &Desk<'_>, old: &[BlockKey], rng: &mut Rng) -> Result<(), String> {
    let layout = [Layout::FullBlock, Layout::LayerBlock][rng.index(2)];
    let request = PutRequest { layout: Some(layout), ..desk.request(pages(), old, PRODUCER) };
    let outcomes = desk.outcomes(request);
    let stored = outcomes.iter().all(|one| *one == BlockOutcome::Stored);
    if stored { Ok(()) } else { Err(format!("{outcomes:?}")) }
}

/// A namespace is filled to its quota: at no moment is there a byte more, and a put that fits to the byte is taken.
fn quota(stage: &SimStage) -> Result<(), String> {
    let desk = Desk::new(stage, "quota");
    let space = || stage.engine().stats().space.namespaces;
    let of = |space: &[kvarts_store::ledger::NamespaceSpace]| {
        space.iter().find(|one| one.namespace == desk.namespace).map_or(0, |one| one.live + one.promised)
    };
    let one = desk.keys(0..1);
    if desk.outcomes(desk.request(pages(), &one, PRODUCER)) != [BlockOutcome::Stored] {
        return Err("the first put is refused".to_owned());
    }
    let each = of(&space());
    // Room for two of a kind and a byte less than for three.
    stage.engine().set_quota(desk.namespace, Some(3 * each - 1));
    for n in 1..8 {
        let key = desk.keys(n..n + 1);
        let put = stage.engine().put(desk.request(pages(), &key, PRODUCER));
        let mut most = 0;
        let mut put = std::pin::pin!(put);
        let mut context = Context::from_waker(Waker::noop());
        while put.as_mut().poll(&mut context).is_pending() {
            most = most.max(of(&space()));
            if !stage.world().step() {
                return Err("a put hangs".to_owned());
            }
        }
        most = most.max(of(&space()));
        if most >= 3 * each {
            return Err(format!("{most} bytes where {} are allowed", 3 * each - 1));
        }
    }
    let (group, coordinate) = pages();
    let keys = desk.keys(0..8);
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    let here = stage.engine().contains(&request).map_err(|error| error.to_string())?.presence;
    let here = here.iter().filter(|one| **one == Presence::Here).count();
    if here != 2 {
        return Err(format!("{here} blocks are here where two fit"));
    }
    stage.engine().set_quota(desk.namespace, None);
    Ok(())
}

/// Under a lower budget segments are removed, and what they had is free again.
fn shrink(stage: &SimStage) -> Result<(), String> {
    let allocated = || stage.engine().stats().allocated_bytes;
    let before = allocated();
    let lower = before - before / 3;
    if stage.engine().set_budget(lower).is_err() {
        // Less than the store's shards need.
        return Ok(());
    }
    stage.wait(&mut || allocated() <= lower);
    stage.world().settle();
    let holding = stage.engine().holding();
    if holding.reserved > 0 { Err(format!("{holding:?} is left")) } else { stage.look() }
}

/// Row R14.
pub(super) fn row() -> Row {
    Row {
        id: "R14",
        what: "requests dropped after every number of steps: put, read, delete, compact, checkpoint, snapshot, pins",
        counts: "drops that left different event logs behind",
        targets: [1_500, 100_000, 1_000_000],
        run: |ask, target| -> Tally { until(ask, target, drops) },
    }
}
