//! Power cuts: after every operation of the disk, with lost, torn and reordered changes, also while recovering.

use std::cell::RefCell;

use kvarts_store::engine::Store;

use super::Row;
use super::pool::{States, until};
use super::scene::{budgets, config, has_past, mix, options_with_past as options, run_on, sound};
use crate::campaign::{Driven, Judge, Ledger, Work, drive, observe, verify, verify_once, work_on};
use crate::sim::log::Mixer;
use crate::sim::{Crash, Media, Seed, SimWorld};

/// Operations of a workload of the first row.
const OPS: usize = 24;
/// Operations before those, of a store that has a past.
const PAST: usize = 60;
/// Images of one moment, besides the two extremes.
const IMAGES: usize = 4;

pub(super) fn power_cuts() -> Row {
    Row {
        id: "R1",
        what: "power cuts at every operation of random workloads, also in recovery, three deep",
        counts: "crash images",
        targets: [4_000, 100_000, 4_000_000],
        run: |ask, target| until(ask, target, |seed, states| workload(seed, OPS, IMAGES, states)),
    }
}

/// Whether this image with these promises was not looked at before. Only images are counted: the promises decide
/// merely whether looking again could show something else.
fn fresh(states: &States, looked: &States, image: &Media, ledger: &Ledger) -> bool {
    let digest = image.digest();
    states.reach(digest);
    let mut both = Mixer::new(0);
    both.bytes(&digest.to_le_bytes());
    ledger.promises(&mut both);
    looked.reach(both.value())
}

fn workload(seed: Seed, ops: usize, images: usize, states: &States) -> Result<(), String> {
    let past = if has_past(seed) { PAST } else { 0 };
    let options = options(seed);
    let work = Work { budgets: budgets(seed, &options), ..Work::new(past + ops, mix(seed)) };
    let ran = run_on(seed, &options, work, &[], past);
    sound(&ran)?;
    let looked = States::default();
    for (at, moment) in (0..).zip(&ran.moments) {
        let place = seed.nth(at);
        let mut all = moment.state.enumerate(images, place);
        let mut rng = place.child("pick").rng();
        let mut chosen = vec![Crash::LoseAll, Crash::KeepAll];
        // Devices of several directories lose what they had not written each for itself: one of them at a time too.
        let alone = |crash: &Crash| matches!(crash, Crash::Lagging(_) | Crash::Ahead(_));
        chosen.extend(all.extract_if(.., |crash| alone(crash)));
        let enough = chosen.len() + images;
        while chosen.len() < enough && !all.is_empty() {
            chosen.push(all.swap_remove(rng.index(all.len())));
        }
        for (n, crash) in (0..).zip(chosen) {
            let image = moment.state.image(crash);
            if fresh(states, &looked, &image, &moment.ledger) {
                let depth = if rng.below(24) == 0 { 2 } else { 0 };
                follow(place.nth(n), seed, image, &moment.ledger, depth, states)
                    .map_err(|why| format!("operation {at}, {crash:?}: {why}"))?;
            }
        }
    }
    Ok(())
}

/// Judges an image, and goes on from it as deep as asked: a cut while it recovers, and a cut of what comes after.
fn follow(
    seed: Seed,
    settings: Seed,
    image: Media,
    ledger: &Ledger,
    depth: u32,
    states: &States,
) -> Result<(), String> {
    let (config, options) = (config(settings), options(settings));
    // A second start costs as much as the first one, and R22 is about it: here one image in four has it.
    if depth == 0 && seed.child("twice").rng().below(4) > 0 {
        return verify_once(seed, &config, &options, image, (ledger, Judge::Strict)).map(drop);
    }
    let (opened, found, operations) =
        verify(seed, &config, &options, image.clone(), (ledger, Judge::Strict))?;
    if depth == 0 {
        return Ok(());
    }
    let mut rng = seed.child("deeper").rng();
    let world = SimWorld::with_media(seed.child("recovering").0, &config, image);
    let launcher = world.launcher();
    let _ = drive(&world, rng.between(1, operations.max(1)), Store::open(&launcher, &options));
    let state = world.cut_power();
    for crash in [Crash::LoseAll, Crash::Random(seed.0)] {
        let image = state.image(crash);
        states.reach(image.digest());
        follow(seed.child("in recovery"), settings, image, ledger, 0, states)
            .map_err(|why| format!("cut while recovering, {crash:?}: {why}"))?;
    }
    let mut next = ledger.clone();
    next.adopt(&found, opened.store.stats().counts.blocks_evicted > 0);
    let ledger = RefCell::new(next);
    let cut = opened.world.disk().operations().1 + rng.between(1, 60);
    let mut watch = || ledger.borrow_mut().allow_evicted_by(&opened.store);
    let work = Work { budgets: budgets(settings, &options), ..Work::new(10, mix(settings)) };
    let worked = observe(&opened.world, cut, &mut watch, work_on(&opened.store, &ledger, &mut rng, work));
    if let Driven::Hung(hang) = worked {
        return Err(format!("after recovery: {hang}"));
    }
    ledger.borrow_mut().allow_evicted_by(&opened.store);
    let state = opened.world.cut_power();
    let ledger = ledger.into_inner();
    for crash in [Crash::LoseAll, Crash::Random(seed.0)] {
        let image = state.image(crash);
        states.reach(image.digest());
        follow(seed.child("again"), settings, image, &ledger, depth - 1, states)
            .map_err(|why| format!("cut after recovery, {crash:?}: {why}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::scene::{Ran, options, run};
    use super::*;
    use crate::campaign::Mix;
    use crate::rows::scene::directories;

    /// The first seeds whose scenes are like that.
    fn seeds(few: usize, like: impl Fn(Seed) -> bool) -> Vec<Seed> {
        let seeds: Vec<Seed> = (0..2000).map(Seed).filter(|seed| like(*seed)).take(few).collect();
        assert_eq!(seeds.len(), few, "too few scenes are like that");
        seeds
    }

    fn cut(seeds: &[Seed], ops: usize, images: usize) -> u64 {
        let states = States::default();
        for seed in seeds {
            workload(*seed, ops, images, &states).unwrap_or_else(|why| panic!("seed {}: {why}", seed.0));
        }
        states.len()
    }

    #[test]
    fn several_directories_lose_power_at_once_while_one_lags_and_nothing_acknowledged_is_lost() {
        let seeds = seeds(4, |seed| directories(seed) > 1);
        let devices = |seed: &Seed| run(*seed, 6, &[], true).moments.iter().any(|at| at.state.devices() > 1);
        assert!(seeds.iter().any(devices), "never had two devices something to lose");
        let images = cut(&seeds, 6, 1);
        assert!(images > 200, "{images} images");
    }

    #[test]
    fn power_cuts_under_compaction_of_several_directories_lose_nothing_acknowledged() {
        let seeds = seeds(2, |seed| mix(seed) == Mix::Compacting && directories(seed) > 1);
        let moved: u64 = seeds.iter().map(|seed| run(*seed, 20, &[], false).last.ledger.moved).sum();
        assert!(moved > 0, "nothing was compacted");
        let images = cut(&seeds, 20, 0);
        assert!(images > 100, "{images} images");
    }

    #[test]
    fn power_cuts_under_leases_and_recycling_lose_nothing_acknowledged() {
        let tight = |seed: Seed| {
            let options = options(seed);
            options.budget_bytes <= 10 * options.segment_bytes && options.segment_bytes == 64 << 10
        };
        let seeds = seeds(2, |seed| mix(seed) == Mix::Leasing && tight(seed));
        let ran: Vec<_> = seeds.iter().map(|seed| run(*seed, 60, &[], false)).collect();
        let sum = |of: fn(&Ran) -> u64| ran.iter().map(of).sum::<u64>();
        let (recycled, evicted) = (sum(|ran| ran.recycled), sum(|ran| ran.evicted));
        let leases = sum(|ran| ran.last.ledger.leases);
        assert!(
            recycled > 2 && evicted > 2 && leases > 4,
            "{recycled} segments recycled, {evicted} blocks evicted, {leases} leases"
        );
        let images = cut(&seeds, 60, 0);
        assert!(images > 200, "{images} images");
    }

    #[test]
    fn power_cuts_while_a_cut_is_recovered_from_lose_nothing_three_deep() {
        let states = States::default();
        for seed in [3, 5].map(Seed) {
            let ran = run(seed, 8, &[], true);
            for (at, moment) in (0..).zip(&ran.moments).skip(4).step_by(9) {
                let image = moment.state.image(Crash::Random(at));
                follow(seed.nth(at), seed, image, &moment.ledger, 2, &states)
                    .unwrap_or_else(|why| panic!("seed {}, operation {at}: {why}", seed.0));
            }
        }
        assert!(states.len() > 60, "{} images", states.len());
    }
}
