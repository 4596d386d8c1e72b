//! Thread schedules: who goes on at each lock, atomic and wait of the engine, decided from the seed.

use kvarts_schedules::{Scene, all, run};

use super::pool::{self, States};
use super::{Ask, Row, Tally};
use crate::sim::Seed;

/// R15: scenes of a few threads under schedules that a seed decides.
pub(super) fn schedules() -> Row {
    Row {
        id: "R15",
        what: "who of several threads goes on at each lock, atomic and wait of index, leases, mailboxes, wake-ups, \
               tickets, streams and shared loads",
        counts: "distinct schedules, by who went on at each moment",
        targets: [20_000, 2_000_000, 50_000_000],
        run: run_row,
    }
}

fn run_row(ask: &Ask, target: u64) -> Tally {
    let scenes = all();
    pool::until(ask, target, |seed, states| one(seed, &scenes, states))
}

fn one(seed: Seed, scenes: &[Scene], states: &States) -> Result<(), String> {
    // A scene that takes longer is played as much less often.
    let weight = |scene: &Scene| 1.max(1000 / scene.cost);
    let mut draw = seed.rng().below(scenes.iter().map(|scene| u64::from(weight(scene))).sum());
    for (number, scene) in (0u128..).zip(scenes) {
        match draw.checked_sub(u64::from(weight(scene))) {
            Some(rest) => draw = rest,
            None => {
                let schedule = run(scene, seed.0, None)
                    .map_err(|failure| format!("the scene {:?}: {}", scene.name, failure.what))?;
                states.reach(schedule.digest.wrapping_add(number));
                return Ok(());
            }
        }
    }
    Err("no scene was drawn".to_owned())
}
