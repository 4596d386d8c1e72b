//! A drive that hangs beside one that is sound, on one executor: what it costs is its own blocks. And one of two or twelve that is
//! sick in other ways, while blocks are put, segments filled, checkpoints written, while it is looked at, and at a start.

mod sick;

use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, PutRequest, ReadRequest};
use kvarts_contract::clock::Clock;
use kvarts_contract::io_error::DirId;
use kvarts_layout::BlockKey;
use kvarts_store::engine::{Limits, Options};

use super::costs::{SEGMENT, ensure, options};
use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::{Desk, pages};
use crate::fixture;
use crate::sim::log::Mixer;
use crate::sim::{DiskConfig, Effect, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use crate::stage::{self, SimStage, Stage};

/// Blocks of each drive.
const BLOCKS: usize = 64;
/// Puts that the drive which hangs is asked for: more bytes than a device may have in flight.
const HANGING: usize = 600;
/// Bytes that are read of the sound one: far more than those for which a class of transfers lets others pass.
const READ: u64 = 96 << 20;
/// Simulated time: what reads may take at most, all together.
const SOON: Duration = Duration::from_secs(20);

/// Puts wait for a drive that answers no write, or none of anything; reads and puts of the other one go on in their time, what is read of the first one ends
/// at its deadline.
fn hung(seed: Seed) -> Result<(), String> {
    let kinds: &[OpKind] = match seed.0 % 4 / 2 {
        0 => &[OpKind::Write, OpKind::Flush],
        _ => &[OpKind::Read, OpKind::Write, OpKind::Flush],
    };
    let options = Options {
        executors: 1,
        directories: 2,
        segment_bytes: 16 * SEGMENT,
        limits: Limits::default(),
        ..options(64 << 20)
    };
    let disk = DiskConfig { dirs: 2, ..DiskConfig::default() };
    let world = SimWorld::new(seed.0, &WorldConfig { disk, ..WorldConfig::default() });
    let stage = SimStage::open(&world, &options).map_err(|error| error.to_string())?;
    let desk = Desk::new(&stage, "drives");
    let of = |shard: u32| -> Vec<BlockKey> {
        let keys = (0..).map(|n| fixture::key(desk.chain, n));
        keys.filter(|key| stage.engine().shard_of(key) == shard).take(BLOCKS + HANGING).collect()
    };
    let (sound, sick) = (of(0), of(1));
    for keys in [&sound, &sick] {
        let outcomes = desk.outcomes(desk.request(pages(), &keys[..BLOCKS], 1));
        ensure(
            outcomes.iter().all(|one| *one == BlockOutcome::Stored),
            "not all blocks are stored",
            outcomes,
        )?;
    }
    let mut limited = Limited::fill(&stage)?;
    for kind in kinds {
        world.disk().inject(Rule::new(Which::Kind(*kind), When::From(1), Effect::Stuck).on(DirId(1)));
    }
    let one = |key: &BlockKey| desk.request(pages(), &[*key], 1);
    let _hanging: Vec<_> = sick[BLOCKS..].iter().map(|key| stage.store().put(one(key))).collect();
    stage.rest();
    let began = world.clock().now();
    let block = fixture::shape(pages().0, pages().1).block_bytes();
    for _ in 0..READ / (BLOCKS as u64 * block) + 1 {
        let (_, end) = desk.read(&desk.read_request(pages(), &sound[..BLOCKS]));
        ensure(end.usable_blocks as usize == BLOCKS, "blocks of the sound drive are not read", &end)?;
    }
    for key in &sound[BLOCKS..BLOCKS + 16] {
        let outcomes = desk.outcomes(one(key));
        ensure(outcomes == [BlockOutcome::Stored], "a block is not stored on the sound drive", outcomes)?;
    }
    let took = world.clock().now().since(began);
    ensure(took < SOON, "the sound drive waits for the other one", took)?;
    // What is asked of the one that hangs has an end.
    let by = |within: Duration| Some(world.clock().now().plus(within));
    let read = || {
        let request = ReadRequest {
            deadline: by(Duration::from_secs(2)),
            ..desk.read_request(pages(), &sick[..BLOCKS])
        };
        desk.read(&request).1
    };
    if kinds.contains(&OpKind::Read) {
        for _ in 0..4 {
            let end = read();
            ensure(end.usable_layers == 0, "layers of a drive that answers nothing", &end)?;
        }
        let outcomes =
            desk.outcomes(PutRequest { deadline: by(Duration::from_millis(200)), ..one(&sick[BLOCKS]) });
        let ended = matches!(outcomes[..], [BlockOutcome::Refused(_) | BlockOutcome::InFlight]);
        ensure(ended, "a put to a drive that answers nothing", &outcomes)?;
    }
    // Who asks is told which drive it is.
    stage.advance(Duration::from_secs(11));
    let loads = stage::drive(&world, stage.engine().drives()).map_err(|hang| hang.to_string())?;
    let loads = loads.map_err(|error| error.to_string())?;
    let silent: Vec<bool> = loads.iter().map(|load| load.unanswered >= Duration::from_secs(10)).collect();
    ensure(silent == [false, true], "the drive that hangs is not named", &loads)?;
    limited.goes_on()
}

/// A namespace that is at its quota, with sealed segments on both drives.
struct Limited<'a> {
    desk: Desk<'a>,
    stage: &'a SimStage,
    /// Keys of the sound drive and of the other one that are not here.
    sound: Vec<BlockKey>,
    sick: Vec<BlockKey>,
}

impl<'a> Limited<'a> {
    fn fill(stage: &'a SimStage) -> Result<Self, String> {
        let desk = Desk::new(stage, "quota");
        let (mut sound, mut sick) = (Vec::new(), Vec::new());
        for key in (0..8 * BLOCKS as u64).map(|n| fixture::key(desk.chain, n)) {
            match stage.engine().shard_of(&key) {
                0 => sound.push(key),
                _ => sick.push(key),
            }
        }
        // What lies on the drive that will hang goes first.
        for keys in [&mut sick, &mut sound] {
            for key in keys.drain(..BLOCKS) {
                let outcomes = desk.outcomes(desk.request(pages(), &[key], 1));
                ensure(outcomes == [BlockOutcome::Stored], "a block is not stored", outcomes)?;
            }
            stage.advance(Duration::from_secs(2));
        }
        let limited = Self { desk, stage, sound, sick };
        limited.set(limited.live())?;
        Ok(limited)
    }

    fn live(&self) -> u64 {
        let namespaces = self.stage.engine().stats().space.namespaces;
        namespaces.iter().find(|one| one.namespace == self.desk.namespace).map_or(0, |one| one.live)
    }

    fn set(&self, bytes: u64) -> Result<(), String> {
        let kept = self.stage.engine().set_quota(self.desk.namespace, Some(bytes));
        let kept = stage::drive(self.stage.world(), kept).map_err(|hang| hang.to_string())?;
        kept.map(drop).map_err(|error| error.to_string())
    }

    /// What is put on the sound drive takes the place of blocks there, and a lower limit is met as far as the other one lets it.
    fn goes_on(&mut self) -> Result<(), String> {
        let clock = self.stage.world().clock();
        let began = clock.now();
        // It needs room, too, and waits for its drive then.
        let hanging = self.stage.store().put(self.desk.request(pages(), &self.sick[..1], 1));
        let all = self.live();
        for eighths in [8, 7, 6] {
            // All that lies on the other drive fits, should none of it go.
            let limit = all / 8 * eighths;
            self.set(limit)?;
            for key in self.sound.split_off(self.sound.len() - BLOCKS) {
                let outcomes = self.desk.outcomes(self.desk.request(pages(), &[key], 1));
                ensure(outcomes == [BlockOutcome::Stored], "a block is refused at the quota", outcomes)?;
                ensure(self.live() <= limit, "more than the quota", self.live())?;
            }
        }
        drop(hanging);
        // What a put may wait for a drive that hangs, some times.
        let took = clock.now().since(began);
        ensure(took < 3 * SOON, "puts at a quota wait for the drive that hangs", took)
    }
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    hung(seed)?;
    sick::play(seed)?;
    let mut digest = Mixer::new(0);
    digest.word(seed.0);
    states.reach(digest.value());
    Ok(())
}

/// Row R43.
pub(super) fn row() -> Row {
    Row {
        id: "R43",
        what: "two drives of one executor, of which one hangs",
        counts: "stores with a drive that hangs",
        targets: [8, 40, 400],
        run: |ask, target| -> Tally { until(ask, target, one) },
    }
}
