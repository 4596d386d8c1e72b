//! Random scripts on the engine in the simulation: it answers as the reference model does, and the same seed gives
//! the same run.
//!
//! `KVARTS_SEEDS=n` runs n seeds instead of what `kvarts_tests::depth` says; a failure prints its seed.

use kvarts_tests::depth::seeds;
use kvarts_tests::rows::scripts::play;

#[test]
fn the_engine_answers_as_the_model_does() {
    for seed in 0..seeds(8, 25) {
        play(seed, true).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let digests: Vec<_> = (0..seeds(3, 5)).map(|seed| play(seed, false).unwrap()).collect();
    for (seed, digest) in (0..).zip(&digests) {
        assert_eq!(play(seed, false).unwrap(), *digest, "seed {seed}");
    }
    assert!(digests.windows(2).all(|pair| pair[0] != pair[1]));
}
