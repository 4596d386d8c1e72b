//! Random scripts: the engine beside the reference model, and the same seed twice.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::KvStore;
use kvarts_contract::clock::{Clock, Nanos};

use super::Row;
use super::pool::until;
use crate::model::Model;
use crate::script::{Op, Outcome, Player};
use crate::sim::media::errno::{EAGAIN, EINTR};
use crate::sim::{Effect, Latency, OpKind, Rng, Rule, Seed, SimClock, SimWorld, When, Which, WorldConfig};
use crate::stage::{SimStage, Stage, small_options};

/// Operations of one script.
const OPS: usize = 60;

/// The model under the clock of a simulated world, which the engine's stage moves.
pub(super) struct Beside {
    pub(super) model: Model,
    pub(super) clock: Arc<SimClock>,
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
pub fn play(seed: u64, compare: bool) -> Result<u128, String> {
    let world = world(seed);
    let mut rng: Rng = Seed(seed).child("script").rng();
    let stage =
        SimStage::open(&world, &small_options(1 + rng.index(3))).map_err(|error| error.to_string())?;
    trouble(&world);
    let beside = Beside { model: Model::new(world.clock().clone()), clock: world.clock().clone() };
    let (mut engine, mut model) = (Player::new(&stage), Player::new(&beside));
    for step in 0..OPS {
        let op = Op::draw(&mut rng);
        let found = engine.play(&op);
        stage.look().map_err(|why| format!("step {step}, {op:?}: {why}"))?;
        if step % 8 == 7 {
            stage.look_closely().map_err(|why| format!("step {step}, {op:?}: {why}"))?;
        }
        if compare {
            let expected = model.play(&op);
            if found != expected {
                return Err(format!("step {step}: {}", tell(&op, &found, &expected)));
            }
        }
    }
    let (by_events, expected) = (engine.settle(), model.settle());
    if compare && by_events != expected {
        return Err(format!("{by_events:?} by events, {expected:?} in the model"));
    }
    world.disk().heal();
    stage.look_closely()?;
    stage.close().map_err(|error| error.to_string())?;
    Ok(world.disk().log().digest())
}

pub(super) fn tell(op: &Op, found: &Outcome, expected: &Outcome) -> String {
    match (found, expected) {
        (Outcome::Read(Ok((events, end, bytes))), Outcome::Read(Ok((events2, end2, bytes2)))) => format!(
            "{op:?}\n engine: {events:?} {end:?}\n model: {events2:?} {end2:?}\n equal bytes: {}",
            bytes == bytes2
        ),
        _ => format!("{op:?}\n engine: {found:?}\n model: {expected:?}"),
    }
}

/// The rows of this file.
pub(super) fn rows() -> Vec<Row> {
    vec![
        Row {
            id: "R16",
            what: "random scripts on the engine and on the reference model: every answer equal",
            counts: "runs with different event logs, of 60 operations each",
            targets: [300, 20_000, 200_000],
            run: |ask, target| {
                until(ask, target, |seed, states| {
                    states.reach(play(seed.0, true)?);
                    Ok(())
                })
            },
        },
        Row {
            id: "R28",
            what: "the same seed twice gives the same run, another seed another",
            counts: "event logs equal at both runs",
            targets: [60, 1_000, 10_000],
            run: |ask, target| {
                until(ask, target, |seed, states| {
                    let (first, second) = (play(seed.0, false)?, play(seed.0, false)?);
                    if first != second {
                        return Err("two runs of the seed differ".to_owned());
                    }
                    if !states.reach(first) {
                        return Err("it runs as another seed did".to_owned());
                    }
                    Ok(())
                })
            },
        },
    ]
}
