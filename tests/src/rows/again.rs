//! Recovery twice: a store that was cut is recovered, cut while it recovers, and recovered again. Whatever is cut, and
//! however often, the answers are the same, and a recovery that had nothing left to do changes no byte.

use std::cell::RefCell;
use std::time::Duration;

use kvarts_fsck::check::Level;
use kvarts_fsck::disk::MemoryDisk;
use kvarts_fsck::store::CannotRun;
use kvarts_layout::format::seal::claimed_structure;
use kvarts_layout::format::{PAGE, Structure};
use kvarts_store::engine::{Limits, Options, Store};

use super::buried::deletes;
use super::pool::{States, until};
use super::scene::{batches, budgets, chunk_pages};
use super::{Row, Tally};
use crate::campaign::{
    Driven, Found, Judge, Ledger, Mix, Opened, Work, drive, observe, read_all, reopen, work_on,
};
use crate::sim::{Crash, CrashState, Media, Seed, SimWorld, WorldConfig};
use crate::witness::{
    checkers_rows, directories, examine, media, problems, recoverys_blocks, recoverys_rows,
};

/// Operations of a workload.
const OPS: usize = 18;
/// Moments of a workload that are looked at.
const MOMENTS: usize = 6;
/// Cuts of one recovery.
const CUTS: u64 = 5;

fn config(seed: Seed) -> WorldConfig {
    let mut rng = seed.child("config").rng();
    let step_cost = if rng.coin() { Duration::from_micros(rng.between(1, 40)) } else { Duration::ZERO };
    WorldConfig { step_cost, ..WorldConfig::default() }
}

/// Small segments, and in every second store so few of them that they are rewritten.
fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    let segment_bytes = 64 << 10;
    let options = Options {
        shards_per_directory: 1 + rng.below(2) as u32,
        segment_bytes,
        budget_bytes: if rng.coin() { 10 * segment_bytes } else { 48 << 20 },
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, batches: batches(seed), ..Limits::default() },
        ..Options::default()
    };
    Options { budget_bytes: options.budget_bytes + chunk_pages(&options), ..options }
}

/// What is on the disk at some moments of a workload, and what had been promised by then.
pub(super) fn moments(seed: Seed) -> Result<Vec<(CrashState, Ledger)>, String> {
    let world = SimWorld::new(seed.0, &config(seed));
    let (launcher, options) = (world.launcher(), options(seed));
    let ledger = RefCell::new(Ledger::default());
    let opened: RefCell<Option<Store>> = RefCell::default();
    let mut rng = seed.child("work").rng();
    let whole = async {
        let (store, executors) = Store::open(&launcher, &options).await.map_err(|error| error.to_string())?;
        opened.replace(Some(store.clone()));
        // Never above what it is opened with again, or opening would go on giving segments back.
        let budgets = budgets(seed, &options).filter(|budgets| budgets.most <= options.budget_bytes);
        let work = Work { budgets, ..Work::new(OPS, Mix::Compacting) };
        work_on(&store, &ledger, &mut rng, work).await;
        ledger.borrow_mut().allow_evicted_by(&store);
        opened.take();
        drop(executors);
        store.close().await.map_err(|error| error.to_string())
    };
    let (mut kept, mut seen) = (Vec::new(), 0_u64);
    let mut keep = seed.child("keep").rng();
    let mut watch = || {
        if let Some(store) = opened.borrow().as_ref() {
            ledger.borrow_mut().allow_evicted_by(store);
        }
        seen += 1;
        // Each moment is as likely as another to be among those that are kept.
        let at = keep.below(seen) as usize;
        let moment = || (world.disk().crash_state(), ledger.borrow().clone());
        if kept.len() < MOMENTS {
            kept.push(moment());
        } else if at < MOMENTS {
            kept[at] = moment();
        }
    };
    match observe(&world, u64::MAX, &mut watch, whole) {
        Driven::Done(ended) => ended?,
        other => return Err(format!("the workload ends with {other:?}")),
    }
    kept.push((world.cut_power(), ledger.into_inner()));
    Ok(kept)
}

fn found(opened: &Opened) -> Result<Found, String> {
    match drive(&opened.world, u64::MAX, read_all(&opened.store)) {
        Driven::Done(found) => Ok(found),
        other => Err(format!("reading ends with {other:?}")),
    }
}

/// Whether opening had a delete of a namespace to finish, which writes.
fn finishes(opened: &Opened) -> bool {
    opened.store.recovery().iter().any(|report| !report.half_deleted.is_empty())
}

/// Whether a store gives segments back in the background: a power cut may bring back more than its budget, what was given back as
/// holes. For as long as it does, it writes.
fn shrinks(opened: &Opened) -> bool {
    opened.store.over_budget() > 0
}

/// Recovers an image, cuts the recovery as often as asked, and recovers what is left.
fn twice(seed: Seed, settings: Seed, image: &Media, ledger: &Ledger, states: &States) -> Result<(), String> {
    let (config, options) = (config(settings), options(settings));
    let first = reopen(seed.child("first"), &config, &options, image.clone())?;
    let operations = first.world.disk().operations().1;
    let answers = found(&first)?;
    if let Some(violation) = ledger.violation(&answers, Judge::Strict) {
        return Err(violation);
    }
    // A later one answers the same. One that had nothing to finish is not followed by one that changes anything: only
    // the delete of a namespace that it found begun writes records, and what it wrote is sealed by the next one.
    let mut settled = first.world.kill();
    let mut finished = finishes(&first);
    for round in 2..5 {
        let next = reopen(seed.child("next").nth(round), &config, &options, settled.clone())?;
        same(&answers, &found(&next)?).map_err(|why| format!("recovery {round} of the same: {why}"))?;
        let left = next.world.kill();
        if left.digest() == settled.digest() || shrinks(&first) || shrinks(&next) {
            break;
        }
        if !finished {
            let changes = difference(&settled, &left);
            return Err(format!(
                "recovery {round} had nothing left to do, and has changed the disk: {changes}"
            ));
        }
        finished = finishes(&next);
        settled = left;
        if round == 4 {
            return Err("recovery never comes to rest".to_owned());
        }
    }
    let mut rng = seed.child("cuts").rng();
    for n in 0..CUTS.min(operations) {
        let cut = rng.between(1, operations);
        let world = SimWorld::with_media(seed.nth(n).0, &config, image.clone());
        let launcher = world.launcher();
        let _ = drive(&world, cut, Store::open(&launcher, &options));
        let state = world.cut_power();
        for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Random(rng.next_u64())] {
            let image = state.image(crash);
            if !states.reach(image.digest()) {
                continue;
            }
            let again = reopen(seed.nth(n).child("again"), &config, &options, image)?;
            same(&answers, &found(&again)?)
                .map_err(|why| format!("recovery cut after {cut} operations, {crash:?}: {why}"))?;
        }
    }
    Ok(())
}

/// The first byte in which two disks differ.
fn difference(before: &Media, after: &Media) -> String {
    let (before, after) = (directories(before), directories(after));
    for (old, new) in before.iter().zip(&after) {
        if old.files() != new.files() {
            return format!("{:?}, then {:?}", old.files(), new.files());
        }
        for path in old.files() {
            let (old, new) =
                (old.contents(&path).unwrap_or_default(), new.contents(&path).unwrap_or_default());
            if old != new {
                let at = old.iter().zip(&new).position(|(old, new)| old != new);
                return format!("{path} of {} bytes, then {}, from {at:?} on", old.len(), new.len());
            }
        }
    }
    "no file".to_owned()
}

fn same(first: &Found, second: &Found) -> Result<(), String> {
    let differs = first.iter().find(|(name, state)| second.get(name) != Some(state));
    differs.map_or(Ok(()), |(name, state)| {
        let tell = |state: Option<&Result<Vec<Vec<u8>>, _>>| match state {
            Some(Ok(chunks)) => format!("{} chunks", chunks.len()),
            Some(Err(reason)) => format!("{reason:?}"),
            None => "nothing".to_owned(),
        };
        Err(format!("{name:?}: {} first, {} then", tell(Some(state)), tell(second.get(name))))
    })
}

/// Ways to lose changes that were not durable: the extremes, and one of the others.
fn crashes(state: &CrashState, seed: Seed) -> Vec<Crash> {
    let all = state.enumerate(4, seed);
    let other = all.get(seed.child("pick").rng().index(all.len().max(1))).copied();
    [Crash::LoseAll, Crash::KeepAll].into_iter().chain(other).collect()
}

fn recover_twice(seed: Seed, states: &States) -> Result<(), String> {
    // Every second seed is about what must not come back.
    if seed.0 % 2 == 1 {
        return deletes(seed, states);
    }
    for (at, (state, ledger)) in (0..).zip(moments(seed)?) {
        for (n, crash) in (0..).zip(crashes(&state, seed.nth(at))) {
            let image = state.image(crash);
            if states.reach(image.digest()) {
                twice(seed.nth(at).nth(n), seed, &image, &ledger, states)
                    .map_err(|why| format!("moment {at}, {crash:?}: {why}"))?;
            }
        }
    }
    Ok(())
}

/// The checker before and after recovery: clean both times, and of what recovery met it has the same rows and blocks.
pub(super) fn agree(seed: Seed, options: &Options, image: Media) -> Result<(), String> {
    let before = match examine(&directories(&image), Level::Deep) {
        Ok(checked) => checked,
        // Nothing was there yet.
        Err(CannotRun::NoStore(_)) => return Ok(()),
        Err(other) => return Err(format!("it cannot be checked: {other}")),
    };
    if !before.findings.is_clean() {
        return Err(format!("before recovery: {}", problems(&before)));
    }
    let opened = reopen(seed, &config(seed), options, image)?;
    let reports = opened.store.recovery().to_vec();
    let (checkers, recoverys) = (checkers_rows(&before), recoverys_rows(&reports));
    if checkers != recoverys {
        return Err(format!("the checker met {checkers:?}, recovery {recoverys:?}"));
    }
    if before.blocks != recoverys_blocks(&reports) {
        return Err(format!("the checker has {} blocks; recovery: {reports:?}", before.blocks));
    }
    let after = examine(&directories(&opened.world.kill()), Level::Deep).map_err(|why| why.to_string())?;
    if !after.findings.is_clean() {
        return Err(format!("after recovery: {}", problems(&after)));
    }
    // Finishing the delete of a namespace writes, and may empty segments of dead blocks to have room for it.
    let same = if finishes(&opened) { after.blocks <= before.blocks } else { after.blocks == before.blocks };
    if !same {
        return Err(format!("{} blocks before recovery, {} after: {reports:?}", before.blocks, after.blocks));
    }
    Ok(())
}

/// A store that is always full, stopped somewhere: many records have lost some of their blocks.
fn full(seed: Seed) -> Result<(Options, CrashState), String> {
    let segment_bytes = 128 << 10;
    let options = Options { segment_bytes, ..options(seed) };
    let options = Options { budget_bytes: 8 * segment_bytes + chunk_pages(&options), ..options };
    let world = SimWorld::new(seed.0, &config(seed));
    let launcher = world.launcher();
    let ledger = RefCell::new(Ledger::default());
    let mut rng = seed.child("work").rng();
    let whole = async {
        let (store, _executors) =
            Store::open(&launcher, &options).await.map_err(|error| error.to_string())?;
        work_on(&store, &ledger, &mut rng, Work::new(100, Mix::Plain)).await;
        store.checkpoint().await.map_err(|error| error.to_string())
    };
    match drive(&world, u64::MAX, whole) {
        Driven::Done(ended) => ended.map(|_| (options, world.cut_power())),
        other => Err(format!("the workload ends with {other:?}")),
    }
}

/// Checker and recovery agree on what eviction has left, also when the trailer of one of the segments is damaged: that
/// costs no block and brings none back.
fn evicted(seed: Seed, states: &States) -> Result<(), String> {
    let (options, state) = full(seed)?;
    for crash in crashes(&state, seed) {
        let image = state.image(crash);
        if !states.reach(image.digest()) {
            continue;
        }
        let note = |why: String| format!("{crash:?}: {why}");
        agree(seed, &options, image.clone()).map_err(note)?;
        let blocks = |image: &Media| -> Result<u64, String> {
            let opened = reopen(seed, &config(seed), &options, image.clone())?;
            Ok(opened.store.recovery().iter().map(|report| report.blocks).sum())
        };
        let before = blocks(&image).map_err(note)?;
        let disks = directories(&image);
        let holed = disks.iter().flat_map(|disk| disk.files().into_iter().map(move |path| (disk, path)));
        let sealed = |(disk, path): &(&MemoryDisk, String)| {
            let bytes = disk.contents(path).unwrap_or_default();
            let last = bytes.len().checked_sub(PAGE).and_then(|at| bytes.get(at..));
            !disk.holes(path).is_empty() && last.and_then(claimed_structure) == Some(Structure::Trailer)
        };
        let all: Vec<_> = holed.filter(sealed).collect();
        let mut rng = seed.child("trailer").rng();
        let Some((disk, path)) = all.get(rng.index(all.len().max(1))) else { continue };
        disk.tamper(path, |bytes| {
            let at = bytes.len() - PAGE + 130;
            bytes[at] ^= 1;
        });
        let checked = examine(&disks, Level::Deep).map_err(|why| note(why.to_string()))?;
        if checked.findings.problem_count > 1 {
            return Err(note(format!("the trailer of {path} alone was damaged: {}", problems(&checked))));
        }
        let after = blocks(&media(&disks)).map_err(note)?;
        if after != before {
            return Err(note(format!("{before} blocks, {after} when the trailer of {path} is damaged")));
        }
    }
    Ok(())
}

fn witness(seed: Seed, states: &States) -> Result<(), String> {
    // Every fourth seed is about what was evicted.
    if seed.0 % 4 == 3 {
        return evicted(seed, states);
    }
    for (at, (state, _)) in (0..).zip(moments(seed)?) {
        for crash in crashes(&state, seed.nth(at)) {
            let image = state.image(crash);
            if states.reach(image.digest()) {
                agree(seed, &options(seed), image).map_err(|why| format!("moment {at}, {crash:?}: {why}"))?;
            }
        }
    }
    Ok(())
}

/// The rows of this file.
pub(super) fn rows() -> Vec<Row> {
    vec![
        Row {
            id: "R22",
            what: "recovery cut at any operation and begun again, after workloads that compact; deletes over several lives",
            counts: "crash images, those of recoveries among them",
            targets: [1_500, 60_000, 600_000],
            run: |ask, target| -> Tally { until(ask, target, recover_twice) },
        },
        Row {
            id: "R26",
            what: "the checker before and after recovery of every image: clean, and of the same opinion",
            counts: "crash images of workloads that compact",
            targets: [1_000, 60_000, 600_000],
            run: |ask, target| -> Tally { until(ask, target, witness) },
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of budgets that are lowered: a file that was given back and made again may be without its length, also where it cannot
    /// have it when the store is opened; and a segment is called free before its file goes, also where the budget has room
    /// for what there is and only the checkpoint does not fit.
    #[test]
    fn segments_that_a_lowered_budget_gives_back_are_no_damage_wherever_power_is_cut() {
        for seed in [0, 89, 278, 322].map(Seed) {
            witness(seed, &States::default()).unwrap_or_else(|why| panic!("{seed:?}: {why}"));
        }
    }

    /// Under a tight budget, opening recycles two segments to have room for what finishing the delete of a namespace
    /// writes: blocks that it has deleted are on the disk before and not after.
    #[test]
    fn finishing_the_delete_of_a_namespace_may_recycle_what_it_has_deleted() {
        witness(Seed(56), &States::default()).unwrap();
    }

    /// Seeds 12 and 18 once said that a second recovery changes the disk: it seals what the first one wrote when it
    /// finished the delete of a namespace that the power cut had stopped between two shards.
    #[test]
    fn a_second_recovery_changes_the_disk_only_where_the_first_finished_the_delete_of_a_namespace() {
        let mut met = 0;
        for settings in [12, 18].map(Seed) {
            let (config, options) = (config(settings), options(settings));
            let again = |media: Media| reopen(settings, &config, &options, media).unwrap();
            for (at, (state, _)) in (0..).zip(moments(settings).unwrap()) {
                for crash in crashes(&state, settings.nth(at)) {
                    let first = again(state.image(crash));
                    let (finished, left) = (finishes(&first), first.world.kill());
                    let second = again(left.clone());
                    assert!(!finishes(&second), "finished once, a delete stays so");
                    let settled = second.world.kill();
                    assert!(finished || settled.digest() == left.digest(), "{}", difference(&left, &settled));
                    assert_eq!(again(settled.clone()).world.kill().digest(), settled.digest());
                    met += u64::from(finished && settled.digest() != left.digest());
                }
            }
        }
        assert!(met > 0, "no image has a delete to finish");
    }
}
