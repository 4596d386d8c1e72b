//! Every scene holds under many schedules, and every planted race is found under few; the same seed shows the same.

use kvarts_schedules::{Race, Scene, all, run, shared_bytes, uses_of_read};

/// Schedules within which a mistake must be found.
const FOUND_WITHIN: u64 = 3000;

/// How many schedules of a scene are tried here: a few milliseconds of each. The campaign tries many more.
fn few(scene: &Scene) -> u64 {
    (8000 / u64::from(scene.cost)).clamp(6, 1000)
}

/// The first seed that shows the mistake, and what it shows.
fn first(scene: &Scene, race: Race) -> (u64, kvarts_schedules::Failure) {
    (0..FOUND_WITHIN)
        .find_map(|seed| run(scene, seed, Some(race)).err().map(|failure| (seed, failure)))
        .unwrap_or_else(|| panic!("{race:?} was not found in {FOUND_WITHIN} schedules of {:?}", scene.name))
}

#[test]
fn scenes_hold_whoever_goes_first() {
    for scene in all() {
        for seed in 0..few(&scene) {
            if let Err(failure) = run(&scene, seed, None) {
                panic!("{:?}, seed {seed}: {}", scene.name, failure.what);
            }
        }
    }
    assert!(shared_bytes() > 0, "no read had anything from another one's load");
}

#[test]
fn each_planted_race_is_found_by_its_scene() {
    for scene in all() {
        for race in scene.finds {
            let (seed, failure) = first(&scene, *race);
            println!("{race:?}: seed {seed} after {} decisions: {}", failure.after.decisions, failure.what);
        }
    }
}

#[test]
fn a_read_uses_what_threads_share_for_each_block_that_is_looked_up_and_not_for_its_pieces() {
    // Of one record. Each block is 12 chunks: a use for each of them would be twice as many. What is counted are a look and a note of
    // use, each under a lock of its own in an index that has few blocks.
    let (few, many) = (uses_of_read(8), uses_of_read(40));
    println!("{few} uses for 8 blocks, {many} for 40");
    assert!(many - few <= 32 * 14, "{few} uses for 8 blocks, {many} for 40");
}

#[test]
fn no_race_is_without_a_scene() {
    let found: Vec<Race> = all().iter().flat_map(|scene| scene.finds.to_vec()).collect();
    for race in Race::ALL {
        assert!(found.contains(race), "{race:?} is planted, and no scene is there to find it");
    }
}

#[test]
fn the_same_seed_shows_the_same() {
    let scene = all().into_iter().find(|scene| scene.finds.contains(&Race::LeaseAfterMatch)).expect("one");
    let (seed, failure) = first(&scene, Race::LeaseAfterMatch);
    assert_eq!(run(&scene, seed, Some(Race::LeaseAfterMatch)), Err(failure));
    assert!(run(&scene, seed, None).is_ok(), "it is the race, not the scene, that fails");
    for scene in all() {
        let (one, other) = (run(&scene, 2, None), run(&scene, 3, None));
        assert_eq!(one, run(&scene, 2, None), "{:?}", scene.name);
        assert_ne!(one, other, "{:?}: two seeds are two schedules", scene.name);
    }
}
