//! Random scripts on the engine in the simulation: it answers as the reference model does, and the same seed gives
//! the same run.
//!
//! `KVARTS_SEEDS=n` runs n seeds instead of the few that every build runs; a failure prints its seed.

use std::sync::Arc;
use std::time::Duration;

use kvarts_store::api::KvStore;
use kvarts_store::rt::{Clock, Nanos};
use kvarts_tests::model::Model;
use kvarts_tests::script::{Op, Outcome, Player};
use kvarts_tests::sim::media::errno::{EAGAIN, EINTR};
use kvarts_tests::sim::{
    Effect, Latency, OpKind, Rng, Rule, Seed, SimClock, SimWorld, When, Which, WorldConfig,
};
use kvarts_tests::stage::{SimStage, Stage, small_options};

/// Operations of one script.
const OPS: usize = 60;

fn seeds(few: u64) -> u64 {
    std::env::var("KVARTS_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(few)
}

/// The model under the clock of a simulated world, which the engine's stage moves.
struct Beside {
    model: Model,
    clock: Arc<SimClock>,
}

impl Stage for Beside {
    fn store(&self) -> &dyn KvStore {
        &self.model
    }

    fn wait(&self, done: &mut dyn FnMut() -> bool) {
        assert!(done(), "the model answers at once");
    }

    fn rest(&self) {}

    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn advance(&self, _by: Duration) -> bool {
        true
    }
}

fn world(seed: u64) -> SimWorld {
    let mut config = WorldConfig::default();
    let mut rng = Seed(seed).child("world").rng();
    if rng.coin() {
        config.step_cost = Duration::from_micros(rng.between(1, 50));
    }
    if rng.coin() {
        config.disk.latency =
            Latency { read: (1, 5000), write: (1, 5000), flush: (1, 20_000), meta: (1, 3000) };
    }
    SimWorld::new(seed, &config)
}

/// Reads that are interrupted, and transfers that end short.
fn trouble(world: &SimWorld) {
    for effect in [Effect::Errno(EINTR), Effect::Errno(EAGAIN)] {
        world.disk().inject(Rule::new(Which::Kind(OpKind::Read), When::Odds(20_000), effect));
    }
    // One short read only: a read that ends short twice at one place has met the end of its file.
    let nth = world.seed().child("short").rng().between(1, 150);
    world.disk().inject(Rule::new(Which::Kind(OpKind::Read), When::Nth(nth), Effect::Short));
    for nth in (3..).step_by(11).take(20) {
        world.disk().inject(Rule::new(Which::Kind(OpKind::Write), When::Nth(nth), Effect::Short));
    }
}

/// Plays a script on the engine and, if asked, beside it on the model. Gives the digest of the event log.
fn play(seed: u64, compare: bool) -> u128 {
    let world = world(seed);
    let mut rng: Rng = Seed(seed).child("script").rng();
    let stage = SimStage::open(&world, &small_options(1 + rng.index(3))).unwrap();
    trouble(&world);
    let beside = Beside { model: Model::new(world.clock().clone()), clock: world.clock().clone() };
    let (mut engine, mut model) = (Player::new(&stage), Player::new(&beside));
    for step in 0..OPS {
        let op = Op::draw(&mut rng);
        let found = engine.play(&op);
        stage.audit();
        if step % 8 == 7 {
            stage.audit_all();
        }
        if compare {
            let expected = model.play(&op);
            assert!(found == expected, "seed {seed}, step {step}: {}", tell(&op, &found, &expected));
        }
    }
    world.disk().heal();
    stage.audit_all();
    stage.close().unwrap();
    world.disk().log().digest()
}

fn tell(op: &Op, found: &Outcome, expected: &Outcome) -> String {
    match (found, expected) {
        (Outcome::Read(Ok((events, end, bytes))), Outcome::Read(Ok((events2, end2, bytes2)))) => format!(
            "{op:?}\n engine: {events:?} {end:?}\n model: {events2:?} {end2:?}\n equal bytes: {}",
            bytes == bytes2
        ),
        _ => format!("{op:?}\n engine: {found:?}\n model: {expected:?}"),
    }
}

#[test]
fn the_engine_answers_as_the_model_does() {
    for seed in 0..seeds(25) {
        play(seed, true);
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let digests: Vec<_> = (0..seeds(5)).map(|seed| play(seed, false)).collect();
    for (seed, digest) in (0..).zip(&digests) {
        assert_eq!(play(seed, false), *digest, "seed {seed}");
    }
    assert!(digests.windows(2).all(|pair| pair[0] != pair[1]));
}
