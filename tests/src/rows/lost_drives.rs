//! Drives that fail, are absent at a start, are replaced and come back, with a start or while the store is open: in any order, over
//! several lives of a store, while blocks are put and deleted.
//!
//! What was acknowledged as deleted is not found, in no life and with no set of drives; what is read is what one producer put since; with half of
//! the drives the store opens; with more than half deletes are acknowledged; and when all are back, what was never deleted is there.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteOutcome, DeleteReply, DeleteRequest, Presence, PutReply, PutRequest,
    Target,
};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::io_error::DirId;
use kvarts_contract::ticket::Ticket;
use kvarts_fsck::disk::MemoryDisk;
use kvarts_layout::BlockKey;
use kvarts_store::engine::{CompactOptions, Limits, Options};

use super::costs::ensure;
use super::pool::{States, until};
use super::{Row, Tally};
use crate::audit;
use crate::conformance::{Desk, pages};
use crate::fixture;
use crate::sim::log::Mixer;
use crate::sim::{
    Crash, DiskConfig, Effect, Media, OpKind, Rng, Rule, Seed, SimWorld, When, Which, WorldConfig,
};
use crate::stage::{self, SimStage, Stage};
use crate::witness::{directories, media};

/// Lives of a store; in the last one all drives are back.
const LIVES: u64 = 6;
/// Steps of one life.
const STEPS: u64 = 24;
/// Keys of each of the two tenants.
const KEYS: u64 = 24;
const TENANTS: [&str; 2] = ["first", "second"];
/// Longer than a drive takes to come back.
const SLOW: Duration = Duration::from_millis(200);
const FIRST_SEGMENT: &str = "segment-00000000";
/// EIO, ENOENT, EROFS.
const ERRORS: [i32; 3] = [5, 2, 30];

/// What may be under one key.
#[derive(Clone, Debug, Default)]
struct Known {
    /// Producers whose bytes may be there.
    may: BTreeSet<u64>,
    /// It was put, durably, and never deleted.
    must: bool,
    /// It was ever deleted: a drive that comes back may take a later put of it along.
    deleted: bool,
}

/// What is known of a store, and its drives.
struct Story {
    rng: Rng,
    drives: u16,
    options: Options,
    known: [BTreeMap<u64, Known>; 2],
    disks: Vec<MemoryDisk>,
    /// Drives that were replaced, by their place, as they were then.
    replaced: Vec<(usize, MemoryDisk)>,
    log: Vec<String>,
    /// The next key that is never asked for.
    next: u64,
}

/// The answer to a delete.
type Deleted = Result<DeleteReply, Error>;

/// What a drive does in a life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    There,
    /// Everything in it fails from the start on.
    Absent(i32),
    /// It says nothing when it is asked what it holds.
    Silent,
    /// One of its segments cannot be opened.
    Unreadable(i32),
}

/// One life: the store, and a desk for each tenant.
struct Life<'a> {
    stage: &'a SimStage,
    desks: [Desk<'a>; 2],
    /// Drives that are not in use.
    out: BTreeSet<u16>,
    /// Those of them that cannot come back in this life: one that was replaced, or has operations that it never answers.
    for_good: BTreeSet<u16>,
}

impl Story {
    fn new(seed: Seed) -> Result<Self, String> {
        let mut rng = seed.child("drives").rng();
        let drives = *rng.pick(&[2u16, 3, 4, 5, 12]).unwrap_or(&2);
        // Where a drive hangs, much time passes.
        let is_hasty = seed.0 % 32 >= 16 && seed.0 % 4 != 3;
        let options = Options {
            directories: drives,
            shards_per_directory: 1 + rng.below(2) as u32,
            executors: 1 + rng.index(2),
            segment_bytes: 128 << 10,
            budget_bytes: 512 << 20,
            // Checkpoints beside everything else, too.
            limits: Limits {
                arena_bytes: 4 << 20,
                checkpoint_every: if is_hasty { Duration::from_micros(300) } else { Duration::from_secs(30) },
                ..Limits::default()
            },
            ..Options::default()
        };
        let disks = Self::made(seed, &options)?;
        let known = Default::default();
        Ok(Self { rng, drives, options, known, disks, replaced: Vec::new(), log: Vec::new(), next: KEYS })
    }

    /// An empty store.
    fn made(seed: Seed, options: &Options) -> Result<Vec<MemoryDisk>, String> {
        let world = world(seed, options.directories, None);
        let stage = SimStage::open(&world, options).map_err(|error| error.to_string())?;
        Ok(directories(&stage.close().map_err(|error| error.to_string())?))
    }

    /// Of each drive what it does: mostly few of them are out.
    fn fates(&mut self, last: bool) -> Vec<Fate> {
        let odds = if last { 0 } else { [0, 200_000, 400_000][self.rng.index(3)] };
        let mut fate = |at: u16| match self.rng.odds(odds) {
            false => Fate::There,
            true => match self.rng.below(6) {
                0 => Fate::Silent,
                1 | 2 if has_first_segment(&self.disks[usize::from(at)]) => {
                    Fate::Unreadable([5, 13, 24][self.rng.index(3)])
                }
                _ => Fate::Absent(ERRORS[self.rng.index(2)]),
            },
        };
        (0..self.drives).map(&mut fate).collect()
    }

    /// Replaces what is out for good, if that is possible; sometimes a drive that was replaced is put in again.
    fn replace(&mut self, fates: &[Fate]) -> Vec<u16> {
        let out: Vec<u16> =
            (0u16..).zip(fates).filter(|(_, fate)| is_out(**fate)).map(|(at, _)| at).collect();
        let others = fates.len() - out.len();
        if out.is_empty() || others * 2 < fates.len() || self.rng.below(3) > 0 {
            return Vec::new();
        }
        for &at in &out {
            let old = std::mem::take(&mut self.disks[usize::from(at)]);
            self.replaced.push((usize::from(at), old));
        }
        // What lay there alone is lost.
        for known in self.known.iter_mut().flat_map(BTreeMap::values_mut) {
            known.must = false;
        }
        out
    }

    fn live(&mut self, seed: Seed, last: bool) -> Result<(), String> {
        let mut fates = self.fates(last);
        let replace = if last { Vec::new() } else { self.replace(&fates) };
        replace.iter().for_each(|&at| fates[usize::from(at)] = Fate::There);
        // One that was replaced is there again, instead of the one in its place.
        let ghost = (!last && self.rng.below(4) == 0).then(|| self.replaced.last().cloned()).flatten();
        let ghost = ghost.filter(|(at, _)| {
            let others = fates.iter().filter(|fate| **fate == Fate::There).count();
            fates[*at] == Fate::There && replace.is_empty() && (others - 1) * 2 > fates.len()
        });
        let mut disks: Vec<MemoryDisk> = self.disks.iter().map(MemoryDisk::fork).collect();
        if let Some((at, old)) = &ghost {
            disks[*at] = old.fork();
        }
        let mut out: BTreeSet<u16> =
            (0u16..).zip(&fates).filter(|(_, fate)| is_out(**fate)).map(|(at, _)| at).collect();
        out.extend(ghost.iter().map(|(at, _)| *at as u16));
        self.log.push(format!("{fates:?}, replace {replace:?}, old {:?}", ghost.as_ref().map(|(at, _)| at)));
        let world = world(seed, self.drives, Some(media(&disks)));
        (0u16..).zip(&fates).for_each(|(at, fate)| fate.befall(&world, DirId(at)));
        let options = Options { replace: replace.iter().copied().collect(), ..self.options.clone() };
        let found = usize::from(self.drives) - out.len();
        let stage = match SimStage::open(&world, &options) {
            Ok(stage) => stage,
            Err(error) if found * 2 < usize::from(self.drives) => {
                let why = error.to_string();
                return ensure(found == 0 || why.contains("half are needed"), "another error", why);
            }
            Err(error) => return Err(format!("{found} of {} drives, and: {error}", self.drives)),
        };
        ensure(found * 2 >= usize::from(self.drives), "it opens with fewer than half", found)?;
        let desks = TENANTS.map(|name| Desk::new(&stage, name));
        let silent = (0u16..).zip(&fates).filter(|(_, fate)| **fate == Fate::Silent).map(|(at, _)| at);
        let for_good = silent.chain(ghost.iter().map(|(at, _)| *at as u16)).collect();
        let mut life = Life { stage: &stage, desks, out, for_good };
        self.look_at_all(&life)?;
        let told: BTreeSet<u16> = stage.engine().health().out.into_keys().collect();
        ensure(told == life.out, "health says that others are out", (&told, &life.out))?;
        for _ in 0..STEPS {
            self.step(&mut life, last)?;
        }
        self.look_at_all(&life)?;
        let lost: BTreeSet<u16> = stage.engine().health().out.into_keys().collect();
        let mut faulty = life.out.clone();
        faulty.extend((0u16..).zip(&fates).filter(|(_, fate)| **fate != Fate::There).map(|(at, _)| at));
        ensure(lost.is_subset(&faulty), "a sound drive is out", (&lost, &faulty))?;
        // What is out is on its disk and in no book.
        match life.out.is_empty() && told.is_empty() {
            true => drop(stage.look()?),
            false => drop(audit::books(stage.engine())?),
        }
        drop(life);
        let after = self.end(stage)?;
        for (at, disk) in directories(&after).into_iter().enumerate() {
            if ghost.as_ref().is_none_or(|(old, _)| *old != at) {
                self.disks[at] = disk;
            }
        }
        Ok(())
    }

    /// A clean stop, a kill or a power cut.
    fn end(&mut self, stage: SimStage) -> Result<Media, String> {
        let world = stage.world().clone();
        match self.rng.below(3) {
            0 => {
                stage.rest();
                world.disk().heal();
                stage.close().map_err(|error| error.to_string())
            }
            1 => {
                drop(stage);
                Ok(world.kill())
            }
            _ => Ok(stage.cut_power().image(Crash::Random(self.rng.next_u64()))),
        }
    }

    fn step(&mut self, life: &mut Life<'_>, last: bool) -> Result<(), String> {
        let tenant = self.rng.index(2);
        let some = || {
            let from = self.rng.below(KEYS);
            from..(from + 1 + self.rng.below(3)).min(KEYS)
        };
        let mut some = some;
        let keys = some();
        match self.rng.below(20) {
            0..=9 => self.put(life, tenant, keys),
            10..=12 => self.delete(life, tenant, Some(keys)),
            13 => self.delete(life, tenant, None),
            14 if !last
                && usize::from(self.drives) - life.out.len() > usize::from(self.drives).div_ceil(2) =>
            {
                let at = self.rng.below(u64::from(self.drives)) as u16;
                self.log.push(format!("drive {at} is lost"));
                let errno = ERRORS[self.rng.index(3)];
                let kind = if errno == 30 { Which::Mutating } else { Which::Any };
                let rule = Rule::new(kind, When::From(1), Effect::Errno(errno));
                life.stage.world().disk().inject(rule.on(DirId(at)));
                life.out.insert(at);
                Ok(())
            }
            15 => {
                let written = stage::drive(life.stage.world(), life.stage.engine().checkpoint());
                // A drive that is lost may fail it.
                written.map(drop).map_err(|hang| hang.to_string())
            }
            16 => self.compact(life),
            17 => self.bring_back(life, tenant),
            _ => self.look(life, tenant, keys),
        }
    }

    /// A drive that is out is well again, and comes back while blocks are put and deleted beside it.
    fn bring_back(&mut self, life: &mut Life<'_>, tenant: usize) -> Result<(), String> {
        // One that never answers is waited for: too many steps where checkpoints are written all the while.
        let is_hasty = self.options.limits.checkpoint_every < Duration::from_secs(1);
        let may_be_tried = |at: &u16| !is_hasty || !life.for_good.contains(at);
        let out: Vec<u16> = life.stage.engine().health().out.into_keys().filter(may_be_tried).collect();
        let Some(&at) = self.rng.pick(&out) else { return self.look(life, tenant, 0..KEYS) };
        let back = self.back_beside(life, at, |story| {
            let from = story.rng.below(KEYS);
            story.rng.coin().then_some(from..(from + 4).min(KEYS))
        })?;
        let may_fail = life.for_good.contains(&at);
        ensure(may_fail || back.is_ok(), "a drive that is well does not come back", (at, &back))?;
        if back.is_ok() {
            life.out.remove(&at);
        }
        self.look_at_all(life)
    }

    /// A drive is well again, and fails once more while it comes back.
    fn fail_on_the_way(&mut self, life: &Life<'_>, at: u16) -> Result<(), String> {
        let (world, engine) = (life.stage.world(), life.stage.engine().clone());
        world.disk().heal_one(DirId(at));
        let nth = 1 + self.rng.below(120);
        let fails = |from| Rule::new(Which::Any, When::From(from), Effect::Errno(ERRORS[0])).on(DirId(at));
        world.disk().inject(fails(nth));
        let back = stage::drive(world, async move { engine.bring_back(at).await });
        self.log.push(format!("drive {at} fails at operation {nth} of its return: {back:?}"));
        // Where it came back before that, a delete finds it out.
        world.disk().inject(fails(1));
        self.delete(life, 1, Some(0..1))?;
        let is_out = life.stage.engine().health().out.contains_key(&at);
        ensure(is_out, "a drive that failed on its way back is in use", at)
    }

    /// A drive is well again, and comes back to the open store; these keys of the first tenant are deleted beside it, from some moment of
    /// that on. Gives what came of it.
    fn back_beside(
        &mut self,
        life: &mut Life<'_>,
        at: u16,
        deleted: impl FnOnce(&mut Self) -> Option<Range<u64>>,
    ) -> Result<Result<u64, Error>, String> {
        life.stage.world().disk().heal_one(DirId(at));
        let engine = life.stage.engine().clone();
        let mut returning = Box::pin(async move { engine.bring_back(at).await });
        let mut context = Context::from_waker(Waker::noop());
        let mut back = None;
        // Some of it is done, a delete comes in between, and the rest is done.
        let steps = *self.rng.pick(&[0, 20, 60, 120, 240, 480]).unwrap_or(&0);
        for _ in 0..steps + self.rng.below(20) {
            if let Poll::Ready(ended) = returning.as_mut().poll(&mut context) {
                back = Some(ended);
                break;
            }
            life.stage.world().step();
        }
        // The delete ends before, or is under way all the while: then it waits for puts elsewhere that take long.
        let ends_before = self.rng.coin();
        let puts = if ends_before { Vec::new() } else { self.begin_slow_puts(life, at) };
        let beside = deleted(self).map(|range| begin_delete(life, range));
        let (ended, beside) = match beside {
            Some((range, deleted)) if ends_before => (Some((range, stage::ask(life.stage, deleted))), None),
            beside => (None, beside),
        };
        let back = match back {
            Some(back) => back,
            None => stage::drive(life.stage.world(), returning).map_err(|hang| hang.to_string())?,
        };
        let ended = ended.or_else(|| beside.map(|(range, ticket)| (range, stage::ask(life.stage, ticket))));
        puts.into_iter().for_each(|put| drop(stage::ask(life.stage, put)));
        let deleted = ended.map(|(range, reply)| self.note_delete(range, reply));
        self.log.push(format!("drive {at} comes back, beside it {deleted:?}"));
        Ok(back)
    }

    /// Puts begin of which the first on each other drive takes long to be written.
    fn begin_slow_puts(&mut self, life: &Life<'_>, at: u16) -> Vec<Ticket<Result<PutReply, Error>>> {
        let rule = Rule::new(Which::Kind(OpKind::Write), When::Nth(1), Effect::Delay(SLOW));
        for other in (0..self.drives).filter(|other| *other != at) {
            life.stage.world().disk().inject(rule.on(DirId(other)));
        }
        let first = self.next + 1;
        self.next += 16;
        let begin = |n: u64| {
            let request = life.desks[1].request(pages(), &life.desks[1].keys(n..n + 1), 1);
            let parent = kvarts_contract::api::Parent::Unknown;
            life.stage.store().put(PutRequest { parent, ..request })
        };
        (first..=self.next).map(begin).collect()
    }

    /// What a delete of some keys says, refused or not. Gives the keys and whether it was not.
    fn note_delete(&mut self, range: Range<u64>, reply: Deleted) -> (Range<u64>, bool) {
        let is_done = |one: &DeleteOutcome| !matches!(one, DeleteOutcome::Refused(_));
        let done = reply.is_ok_and(|reply| reply.outcomes.iter().all(is_done));
        for n in range.clone() {
            let known = self.known[0].entry(n).or_default();
            (known.must, known.deleted) = (false, true);
            if done {
                known.may.clear();
            }
        }
        (range, done)
    }

    /// Segments are emptied, and what kills nothing any more is forgotten.
    fn compact(&mut self, life: &Life<'_>) -> Result<(), String> {
        let options = CompactOptions { dead_thousandths: 0, ..CompactOptions::default() };
        let (world, engine) = (life.stage.world(), life.stage.engine());
        // A drive that is lost may fail either.
        let compacted = stage::drive(world, engine.compact(options));
        compacted.map(drop).map_err(|hang| hang.to_string())?;
        let some = self.rng.below(20 * u64::from(self.drives.min(3)));
        self.write_over(&life.desks[1], some);
        stage::drive(world, engine.checkpoint()).map(drop).map_err(|hang| hang.to_string())
    }

    /// Emptied segments are written over.
    fn write_over(&mut self, desk: &Desk<'_>, some: u64) {
        for _ in 0..some {
            self.next += 1;
            let parent = kvarts_contract::api::Parent::Unknown;
            let request = desk.request(pages(), &desk.keys(self.next..self.next + 1), 1);
            let _ = desk.stage.put(PutRequest { parent, ..request });
        }
    }

    /// One drive is absent, or one segment of each cannot be opened, while what lies there is deleted and everything else is written over; then it is
    /// back.
    fn short(&mut self, seed: Seed, fate: Fate) -> Result<(), String> {
        let world_of =
            |nth, disks: &[MemoryDisk]| world(seed.nth(nth), disks.len() as u16, Some(media(disks)));
        let open = |world: &SimWorld, options: &Options| {
            SimStage::open(world, options).map_err(|error| error.to_string())
        };
        let stage = open(&world_of(0, &self.disks), &self.options)?;
        let desk = Desk::new(&stage, TENANTS[0]);
        // Of so few blocks that a drive has one segment, no other one tells how far it had come.
        let keys = if self.rng.coin() { KEYS } else { KEYS / 3 };
        for n in 0..keys {
            desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
        }
        let kept = if self.rng.coin() { Crash::LoseAll } else { Crash::KeepAll };
        self.disks = directories(&stage.cut_power().image(kept));

        let world = world_of(1, &self.disks);
        let last = self.drives - 1;
        (0..self.drives)
            .filter(|at| *at == last || !is_out(fate))
            .for_each(|at| fate.befall(&world, DirId(at)));
        let stage = open(&world, &self.options)?;
        let (desk, beside) = (Desk::new(&stage, TENANTS[0]), Desk::new(&stage, TENANTS[1]));
        let target = Target::Keys { column: None, keys: desk.keys(0..KEYS) };
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        let deleted = stage::ask(&stage, stage.store().delete(request)).map_err(|error| error.to_string())?;
        let is_done = |one: &DeleteOutcome| !matches!(one, DeleteOutcome::Refused(_));
        ensure(deleted.outcomes.iter().all(is_done), "a delete is refused", &deleted)?;
        for _ in 0..3 {
            self.write_over(&beside, 20 * u64::from(self.drives));
            let options = CompactOptions { dead_thousandths: 0, ..CompactOptions::default() };
            let compacted = stage::drive(&world, stage.engine().compact(options));
            compacted.map_err(|hang| hang.to_string())?.map_err(|error| error.to_string())?;
            let written = stage::drive(&world, stage.engine().checkpoint());
            written.map_err(|hang| hang.to_string())?.map_err(|error| error.to_string())?;
        }
        self.disks = directories(&stage.close().map_err(|error| error.to_string())?);

        let stage = open(&world_of(2, &self.disks), &self.options)?;
        let desks = TENANTS.map(|name| Desk::new(&stage, name));
        let life = Life { stage: &stage, desks, out: BTreeSet::new(), for_good: BTreeSet::new() };
        self.look(&life, 0, 0..KEYS)
    }

    /// One drive is lost with a third of the blocks, and comes back to the open store while all of them are deleted, at any moment. What is
    /// acknowledged as deleted is not found, then or after the next start; without a delete all of it is found.
    fn returned(&mut self, seed: Seed) -> Result<(), String> {
        let world_of = |nth, disks: &[MemoryDisk]| world(seed.nth(nth), 3, Some(media(disks)));
        let stage = SimStage::open(&world_of(0, &self.disks), &self.options);
        let stage = stage.map_err(|error| error.to_string())?;
        let desk = Desk::new(&stage, TENANTS[0]);
        for n in 0..KEYS {
            desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
        }
        let at = self.rng.below(3) as u16;
        let desks = TENANTS.map(|name| Desk::new(&stage, name));
        let mut life = Life { stage: &stage, desks, out: BTreeSet::new(), for_good: BTreeSet::new() };
        // So the drive has tombstones, in its checkpoint or behind it.
        self.write_over(&life.desks[1], 12);
        self.delete(&life, 1, Some(KEYS..self.next))?;
        if self.rng.coin() {
            let written = stage::drive(stage.world(), stage.engine().checkpoint());
            written.map_err(|hang| hang.to_string())?.map_err(|error| error.to_string())?;
        }
        // Where segments cannot get their bytes, files are half made when it is found out.
        let half_made = [OpKind::Allocate, OpKind::Truncate, OpKind::Remove].map(Which::Kind);
        let kinds = if self.rng.coin() { &half_made[..] } else { &[Which::Any] };
        for kind in kinds {
            let rule = Rule::new(*kind, When::From(1), Effect::Errno(ERRORS[0]));
            stage.world().disk().inject(rule.on(DirId(at)));
        }
        for _ in 0..if kinds.len() > 1 { 32 } else { 0 } {
            // No more than it takes: else blocks are evicted that are looked for below.
            if stage.engine().health().out.is_empty() {
                self.write_over(&life.desks[1], 4);
            }
        }
        let all = Rule::new(Which::Any, When::From(1), Effect::Errno(ERRORS[0]));
        stage.world().disk().inject(all.on(DirId(at)));
        // A delete that cannot be written there finds it out.
        self.write_over(&life.desks[1], 24);
        life.out.insert(at);
        self.delete(&life, 1, Some(0..1))?;
        for n in 0..KEYS {
            let known = Known { may: [1].into(), must: true, deleted: false };
            self.known[0].insert(n, known);
        }
        let is_out = stage.engine().health().out.contains_key(&at);
        ensure(is_out, "a drive that fails everything is in use", at)?;
        for _ in 0..self.rng.below(4) {
            self.fail_on_the_way(&life, at)?;
            look_at_counts(&stage)?;
        }
        let back = self.back_beside(&mut life, at, |story| story.rng.coin().then_some(0..KEYS))?;
        ensure(back.is_ok(), "a drive that is well does not come back", (at, &back))?;
        self.look_at_all(&life)?;
        audit::books(stage.engine())?;
        look_at_counts(&stage)?;
        for n in (0..KEYS).filter(|n| self.known[0][n].must) {
            let (_, end) =
                life.desks[0].read(&life.desks[0].read_request(pages(), &life.desks[0].keys(n..n + 1)));
            ensure(end.usable_blocks == 1, "a block is not found after its drive came back", n)?;
        }
        drop(life);
        self.disks = directories(&self.end(stage)?);
        let stage = SimStage::open(&world_of(1, &self.disks), &self.options);
        let stage = stage.map_err(|error| error.to_string())?;
        let desks = TENANTS.map(|name| Desk::new(&stage, name));
        self.look_at_all(&Life { stage: &stage, desks, out: BTreeSet::new(), for_good: BTreeSet::new() })
    }

    /// One drive answers nothing any more, or no write and no flush, while blocks are put and deleted without a deadline: puts end, deletes go on
    /// without it, and so does what is read of the others. After the next start it has what it had, less what was deleted.
    fn hung(&mut self, seed: Seed) -> Result<(), String> {
        let stage = SimStage::open(&world(seed.nth(0), self.drives, Some(media(&self.disks))), &self.options);
        let stage = stage.map_err(|error| error.to_string())?;
        let desk = Desk::new(&stage, TENANTS[0]);
        for n in 0..KEYS {
            desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
        }
        let sick = self.rng.below(u64::from(self.drives)) as u16;
        let kinds: &[OpKind] = match self.rng.below(3) {
            0 => &[OpKind::Flush],
            1 => &[OpKind::Write, OpKind::Flush],
            _ => &[OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Allocate, OpKind::SyncDir],
        };
        for kind in kinds {
            let rule = Rule::new(Which::Kind(*kind), When::From(1), Effect::Stuck);
            stage.world().disk().inject(rule.on(DirId(sick)));
        }
        let began = stage.now();
        let mut stored = 0;
        for n in KEYS..2 * KEYS {
            let outcomes = desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
            stored += u64::from(outcomes == [BlockOutcome::Stored]);
        }
        ensure(stored >= KEYS / 2, "puts fail on drives that are sound", stored)?;
        let keys = desk.keys(0..KEYS / 2);
        let mut refused = 0;
        let deleted = loop {
            let target = Target::Keys { column: None, keys: keys.clone() };
            let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
            let reply = stage::ask(&stage, stage.store().delete(request)).map_err(|error| error.to_string());
            match reply {
                Ok(reply) if reply.outcomes.iter().all(|one| !matches!(one, DeleteOutcome::Refused(_))) => {
                    break reply;
                }
                reply if refused > 8 => return Err(format!("a delete waits for a drive: {reply:?}")),
                _ => refused += 1,
            }
            let until = stage.now().plus(Duration::from_secs(1));
            stage.wait(&mut || stage.now() >= until);
        };
        drop(deleted);
        let took = stage.now().since(began);
        ensure(took < Duration::from_secs(180), "a drive that hangs costs minutes", took)?;
        let out: Vec<u16> = stage.engine().health().out.into_keys().collect();
        ensure(out == [sick], "the drive that hangs is not the one that is out", &out)?;
        for n in KEYS / 2..KEYS {
            let (_, end) = desk.read(&desk.read_request(pages(), &desk.keys(n..n + 1)));
            let reads = end.usable_blocks == 1;
            ensure(reads || kinds.contains(&OpKind::Read), "a block cannot be read that was stored", n)?;
        }
        let world = stage.world().clone();
        drop(stage);
        self.disks = directories(&world.kill());
        let world = crate::rows::lost_drives::world(seed.nth(1), self.drives, Some(media(&self.disks)));
        let stage = SimStage::open(&world, &self.options).map_err(|error| error.to_string())?;
        let desks = TENANTS.map(|name| Desk::new(&stage, name));
        let life = Life { stage: &stage, desks, out: BTreeSet::new(), for_good: BTreeSet::new() };
        for n in KEYS / 2..KEYS {
            let mut known = Known::default();
            known.may.insert(1);
            self.known[0].insert(n, known);
        }
        self.look(&life, 0, 0..KEYS)?;
        for n in KEYS / 2..KEYS {
            let desk = &life.desks[0];
            let (_, end) = desk.read(&desk.read_request(pages(), &desk.keys(n..n + 1)));
            ensure(end.usable_blocks == 1, "a durable block is lost with a drive that hung", n)?;
        }
        Ok(())
    }

    fn put(&mut self, life: &Life<'_>, tenant: usize, keys: std::ops::Range<u64>) -> Result<(), String> {
        let (desk, producer) = (&life.desks[tenant], 1 + self.rng.below(1 << 20));
        for n in keys {
            let request = desk.request(pages(), &desk.keys(n..n + 1), producer);
            let request = PutRequest { parent: kvarts_contract::api::Parent::Unknown, ..request };
            // Refused as a whole where the delete of the namespace was stopped half-way by what was lost.
            let outcome = life.stage.put(request).ok().and_then(|reply| reply.outcomes.into_iter().next());
            let known = self.known[tenant].entry(n).or_default();
            known.may.insert(producer);
            known.must |= outcome == Some(BlockOutcome::Stored) && !known.deleted;
            let was_lost = !life.stage.engine().health().out.is_empty() || !life.out.is_empty();
            let is_there = matches!(outcome, Some(BlockOutcome::Stored | BlockOutcome::AlreadyThere));
            ensure(is_there || was_lost, "a put without a fault", (&outcome, n))?;
        }
        Ok(())
    }

    fn delete(
        &mut self,
        life: &Life<'_>,
        tenant: usize,
        keys: Option<std::ops::Range<u64>>,
    ) -> Result<(), String> {
        let desk = &life.desks[tenant];
        let target = match &keys {
            Some(keys) => Target::Keys { column: None, keys: desk.keys(keys.clone()) },
            None => Target::Namespace,
        };
        let request = || DeleteRequest { namespace: desk.namespace, target: target.clone(), deadline: None };
        let mut refused = None;
        // A drive that is lost costs no more than a delete for each of its shards, which is asked again.
        for _ in 0..8 {
            refused = match stage::ask(life.stage, life.stage.store().delete(request())) {
                Ok(reply) => reply.outcomes.into_iter().find_map(|one| match one {
                    DeleteOutcome::Refused(reason) => Some(reason),
                    _ => None,
                }),
                Err(error) => Some(error.0),
            };
            if refused.is_none() {
                break;
            }
            life.stage.rest();
        }
        let range = keys.unwrap_or(0..KEYS);
        self.log.push(format!("delete {tenant} {range:?}: {refused:?}"));
        for n in range {
            let known = self.known[tenant].entry(n).or_default();
            (known.must, known.deleted) = (false, true);
            if refused.is_none() {
                known.may.clear();
            }
        }
        let in_use = usize::from(self.drives) - life.stage.engine().health().out.len();
        let may = in_use * 2 > usize::from(self.drives);
        match refused {
            Some(reason) if may => Err(format!("{in_use} of {} drives, and a delete: {reason}", self.drives)),
            Some(Reason::Latched(_) | Reason::NotDeleted(_)) | None => {
                ensure(refused.is_none() == may, "a delete with half", in_use)
            }
            // Until it is known what is out.
            Some(_) => Ok(()),
        }
    }

    fn look(&self, life: &Life<'_>, tenant: usize, keys: std::ops::Range<u64>) -> Result<(), String> {
        let (desk, (group, coordinate)) = (&life.desks[tenant], pages());
        let names = desk.keys(keys.clone());
        let request =
            ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &names, lease: None };
        let found = desk.stage.store().contains(&request).map_err(|error| error.to_string())?.presence;
        for (n, (key, _)) in
            keys.zip(names.iter().zip(&found)).filter(|(_, (_, found))| **found == Presence::Here)
        {
            let known = self.known[tenant].get(&n).cloned().unwrap_or_default();
            ensure(!known.may.is_empty(), "a block is back that was deleted", (tenant, n))?;
            self.compare(desk, key, &known, n)?;
        }
        Ok(())
    }

    /// What is read is what one of the producers made, or a miss.
    fn compare(&self, desk: &Desk<'_>, key: &BlockKey, known: &Known, n: u64) -> Result<(), String> {
        let (group, coordinate) = pages();
        let request = desk.read_request(pages(), std::slice::from_ref(key));
        let (_, end) = desk.read(&request);
        if end.usable_blocks == 0 {
            return Ok(());
        }
        let shape = fixture::shape(group, coordinate);
        let read = fixture::read_block(&request.into, 0, &shape);
        let made = |producer: &u64| fixture::content(key, group, coordinate, *producer, &shape);
        ensure(known.may.iter().any(|producer| made(producer) == read), "bytes that nobody put", n)
    }

    fn look_at_all(&self, life: &Life<'_>) -> Result<(), String> {
        for tenant in 0..TENANTS.len() {
            self.look(life, tenant, 0..KEYS)?;
        }
        Ok(())
    }

    /// All drives are back: what was never deleted is there.
    fn look_for_all(&self, seed: Seed) -> Result<(), String> {
        let world = world(seed, self.drives, Some(media(&self.disks)));
        let stage = SimStage::open(&world, &self.options).map_err(|error| error.to_string())?;
        ensure(stage.engine().health().out.is_empty(), "a drive is out", stage.engine().health())?;
        let desks = TENANTS.map(|name| Desk::new(&stage, name));
        let life = Life { stage: &stage, desks, out: BTreeSet::new(), for_good: BTreeSet::new() };
        self.look_at_all(&life)?;
        for (tenant, known) in self.known.iter().enumerate() {
            for (n, _) in known.iter().filter(|(_, known)| known.must) {
                let desk = &life.desks[tenant];
                let request = desk.read_request(pages(), &desk.keys(*n..n + 1));
                let (_, end) = desk.read(&request);
                ensure(
                    end.usable_blocks == 1,
                    "a durable block is lost that was never deleted",
                    (tenant, n),
                )?;
            }
        }
        drop(life);
        stage.look_closely()?;
        stage.close().map(drop).map_err(|error| error.to_string())
    }
}

/// Nothing of a drive's returns is left in the counters of the store.
fn look_at_counts(stage: &SimStage) -> Result<(), String> {
    stage.rest();
    let tables = stage::drive(stage.world(), stage.engine().tables()).map_err(|hang| hang.to_string())?;
    audit::counts(stage.engine(), &tables.map_err(|error| error.to_string())?)
}

/// A delete of keys of the first tenant begins.
fn begin_delete(life: &Life<'_>, range: Range<u64>) -> (Range<u64>, Ticket<Deleted>) {
    let desk = &life.desks[0];
    let target = Target::Keys { column: None, keys: desk.keys(range.clone()) };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    (range, life.stage.store().delete(request))
}

fn has_first_segment(disk: &MemoryDisk) -> bool {
    disk.files().iter().any(|path| path.ends_with(FIRST_SEGMENT))
}

fn is_out(fate: Fate) -> bool {
    matches!(fate, Fate::Absent(_) | Fate::Silent)
}

impl Fate {
    fn befall(self, world: &SimWorld, dir: DirId) {
        let inject = |rule: Rule| world.disk().inject(rule.on(dir));
        match self {
            Self::There => {}
            Self::Absent(errno) => inject(Rule::new(Which::Any, When::From(1), Effect::Errno(errno))),
            Self::Silent => inject(Rule::new(Which::Any, When::From(1), Effect::Stuck)),
            Self::Unreadable(errno) => {
                let rule = Rule::new(Which::Kind(OpKind::Open), When::From(1), Effect::Errno(errno));
                inject(rule.named(FIRST_SEGMENT));
            }
        }
    }
}

fn world(seed: Seed, drives: u16, media: Option<Media>) -> SimWorld {
    let disk = DiskConfig { dirs: drives, capacity: 1 << 40, ..DiskConfig::default() };
    let config = WorldConfig { disk, ..WorldConfig::default() };
    match media {
        Some(media) => SimWorld::with_media(seed.0, &config, media),
        None => SimWorld::new(seed.0, &config),
    }
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    let mut story = Story::new(seed)?;
    if !seed.0.is_multiple_of(4) {
        story.drives = if seed.0 % 8 == 7 { 12 } else { 3 };
        let options = Options { directories: story.drives, shards_per_directory: 1, ..story.options.clone() };
        // Small enough for all to be written over.
        story.options = Options { budget_bytes: 8 << 20, ..options };
        if seed.0 % 4 == 3 {
            story.options.budget_bytes = 512 << 20;
        }
        story.disks = Story::made(seed, &story.options)?;
        match seed.0 % 4 {
            1 if seed.0 % 8 == 5 => story.returned(seed)?,
            1 => story.short(seed, Fate::Absent(ERRORS[0]))?,
            2 => story.short(seed, Fate::Unreadable(ERRORS[0]))?,
            _ => story.hung(seed)?,
        }
        states.reach(u128::from(seed.0));
        return Ok(());
    }
    let told =
        |story: &Story, what: String| format!("{} drives: {what}; {}", story.drives, story.log.join("; "));
    for life in 0..LIVES {
        let lived = story.live(seed.nth(life), life + 1 == LIVES);
        lived.map_err(|what| told(&story, format!("life {life}: {what}")))?;
        let mut digest = Mixer::new(life);
        story.disks.iter().flat_map(MemoryDisk::files).for_each(|path| digest.text(&path));
        digest.word(seed.0);
        states.reach(digest.value());
    }
    story.look_for_all(seed.nth(LIVES)).map_err(|what| told(&story, format!("at the end: {what}")))
}

/// Row R44.
pub(super) fn row() -> Row {
    Row {
        id: "R44",
        what: "two to twelve drives that fail, are absent, are replaced and come back, in six lives of a store",
        counts: "lives",
        targets: [120, 2_000, 20_000],
        run: |ask, target| -> Tally { until(ask, target, one) },
    }
}
