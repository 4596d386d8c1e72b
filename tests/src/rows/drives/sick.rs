//! One of two or twelve drives is sick, in one way or another, while blocks are put, segments filled and checkpoints written, while
//! it is looked at, and at a start from any operation on.

use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, ReadEvent};
use kvarts_contract::clock::Clock;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::DirId;
use kvarts_store::engine::{Limits, Options};

use super::super::costs::{ensure, options};
use crate::conformance::{Desk, pages};
use crate::fixture;
use crate::sim::{Crash, DiskConfig, Effect, Media, Rng, Rule, Seed, SimWorld, When, Which, WorldConfig};
use crate::stage::{self, SimStage, Stage};

/// What is wrong with a drive.
#[derive(Clone, Copy, Debug)]
enum Sickness {
    /// It answers nothing any more.
    Hangs,
    /// It answers half a minute later, as one whose commands time out.
    TimesOut,
    /// It answers a tenth of a second later.
    IsSlow,
    /// Now and then it answers half a minute later.
    Flaps,
}

const SICKNESSES: [Sickness; 4] = [Sickness::Hangs, Sickness::TimesOut, Sickness::IsSlow, Sickness::Flaps];

impl Sickness {
    /// The rule for all that a drive is asked, from the `nth` on.
    fn rule(self, drive: DirId, nth: u64) -> Rule {
        let (late, slow) = (Duration::from_secs(30), Duration::from_millis(100));
        let (when, effect) = match self {
            Self::Hangs => (When::From(nth), Effect::Stuck),
            Self::TimesOut => (When::From(nth), Effect::Delay(late)),
            Self::IsSlow => (When::From(nth), Effect::Delay(slow)),
            Self::Flaps => (When::Odds(100_000), Effect::Delay(late)),
        };
        Rule::new(Which::Any, when, effect).on(drive)
    }
}

/// Simulated time that one request to a sound drive may take, beside any other.
const AT_ONCE: Duration = Duration::from_secs(2);
/// Simulated time after which a read ends beside a drive that does not answer: 10 s for the read that it follows, 10 s for its own, and the
/// intervals at which that is looked for.
const GIVEN_UP: Duration = Duration::from_secs(40);
/// Simulated time that a start may take.
const START: Duration = Duration::from_secs(300);
/// Blocks that are stored before it is.
const BEFORE: u64 = 24;
/// Requests to the sound drives while one is sick.
const ROUNDS: usize = 40;

/// A drive, what is wrong with it, and the store that it is a part of.
struct Case {
    seed: Seed,
    rng: Rng,
    sickness: Sickness,
    drive: DirId,
    options: Options,
}

/// A block that was stored, and whether on a sound drive.
type Stored = (u64, bool);

/// What is asked of sound drives is done at once, who looks has an answer, a read over all drives loses what the sick one has, and
/// a start ends.
pub(super) fn play(seed: Seed) -> Result<(), String> {
    let mut case = Case::new(seed);
    let world = SimWorld::new(seed.0, &case.world());
    let stage = SimStage::open(&world, &case.options).map_err(|error| error.to_string())?;
    let stored = case.beside_others(&world, &stage)?;
    case.start(world.disk().crash_state().image(Crash::LoseAll), &stored)
}

impl Case {
    fn new(seed: Seed) -> Self {
        let mut rng = seed.child("sick").rng();
        let sickness = *rng.pick(&SICKNESSES).unwrap_or(&Sickness::Hangs);
        let directories = *rng.pick(&[2u16, 12]).unwrap_or(&2);
        let drive = DirId(rng.below(u64::from(directories)) as u16);
        // Checkpoints beside all of it.
        let limits =
            Limits { arena_bytes: 8 << 20, checkpoint_every: Duration::from_secs(1), ..Limits::default() };
        let (executors, shards_per_directory) = (1 + rng.index(3), 1 + rng.below(2) as u32);
        let options = Options { directories, executors, shards_per_directory, limits, ..options(64 << 20) };
        Self { seed, rng, sickness, drive, options }
    }

    fn world(&self) -> WorldConfig {
        let disk =
            DiskConfig { dirs: self.options.directories, capacity: 256 << 20, ..DiskConfig::default() };
        WorldConfig { disk, ..WorldConfig::default() }
    }

    /// Whether a block is put on a sound drive now: once the sick one is out, all are.
    fn is_sound(&self, desk: &Desk<'_>, stage: &SimStage, n: u64) -> bool {
        let shard = stage.engine().shard_of(&fixture::key(desk.chain, n));
        shard / self.options.shards_per_directory != u32::from(self.drive.0)
    }

    fn within(
        &self,
        world: &SimWorld,
        most: Duration,
        what: &str,
        done: impl FnOnce() -> Result<(), String>,
    ) -> Result<(), String> {
        let begun = world.clock().now();
        done()?;
        let took = world.clock().now().since(begun);
        ensure(took < most, what, (took, self.sickness, self.options.directories, self.drive))
    }

    /// The drive is sick while the others are used; gives what was stored.
    fn beside_others(&mut self, world: &SimWorld, stage: &SimStage) -> Result<Vec<Stored>, String> {
        let desk = Desk::new(stage, "sick");
        let put = |n: u64| desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
        let mut stored = Vec::new();
        for n in 0..BEFORE {
            ensure(put(n) == [BlockOutcome::Stored], "a block of a sound store is not stored", n)?;
            stored.push((n, self.is_sound(&desk, stage, n)));
        }
        world.disk().inject(self.sickness.rule(self.drive, 1));
        // What waits for it is not waited for.
        let waits = (100..).filter(|n| !self.is_sound(&desk, stage, *n) || *n > 5000).take(8);
        let waiting: Vec<_> =
            waits.map(|n| stage.store().put(desk.request(pages(), &desk.keys(n..n + 1), 1))).collect();
        let mut next = 10_000;
        for round in 0..ROUNDS {
            self.within(world, AT_ONCE, "a request beside a sick drive", || match round % 4 {
                0 | 1 => {
                    next = (next + 1..).find(|n| self.is_sound(&desk, stage, *n)).unwrap_or(next);
                    stored.push((next, true));
                    ensure(
                        put(next) == [BlockOutcome::Stored],
                        "a block is not stored on a sound drive",
                        next,
                    )
                }
                2 => {
                    let n =
                        stored.iter().filter(|(_, sound)| *sound).nth(round / 4).ok_or("none is sound")?.0;
                    let (_, end) = desk.read(&desk.read_request(pages(), &desk.keys(n..n + 1)));
                    ensure(end.usable_blocks == 1, "a block of a sound drive is not read", (n, end))
                }
                _ => {
                    let loads =
                        stage::drive(world, stage.engine().drives()).map_err(|hang| hang.to_string())?;
                    let facts = stage::drive(world, stage.engine().io()).map_err(|hang| hang.to_string())?;
                    loads.and(facts.map(drop)).map_err(|error| error.to_string())
                }
            })?;
            stage.advance(Duration::from_millis(self.rng.below(1500)));
        }
        self.within(world, GIVEN_UP, "a read over all drives", || {
            // The second follows the first where they want the same, and leads elsewhere.
            let reads = [BEFORE / 2, BEFORE].map(|most| desk.read_request(pages(), &desk.keys(0..most)));
            let streams = reads.map(|read| stage.store().read(read));
            for stream in streams {
                let stream = stream.map_err(|error| error.to_string())?;
                let mut end = None;
                stage.wait(&mut || {
                    while let Some(event) = stream.try_next() {
                        if let ReadEvent::End(ended) = event {
                            end = Some(ended);
                        }
                    }
                    end.is_some()
                });
                let end = end.ok_or("a read without an end")?;
                let is_sound =
                    |(block, _): &&(u32, _)| stored.get(*block as usize).is_some_and(|(_, sound)| *sound);
                let lost = end.failures.iter().find(is_sound);
                let what = "a read over all drives loses a block of a sound one";
                ensure(lost.is_none(), what, (self.sickness, &end))?;
                let bug = end.failures.iter().find(|(_, why)| matches!(why, Reason::Bug(_)));
                ensure(bug.is_none(), "a silent drive is called a defect", (self.sickness, &end))?;
            }
            Ok(())
        })?;
        drop(waiting);
        Ok(stored)
    }

    /// A start beside it ends, with all blocks of the others; when it is well, all are there that ever were acknowledged.
    fn start(&mut self, media: Media, stored: &[Stored]) -> Result<(), String> {
        let world = SimWorld::with_media(self.seed.0, &self.world(), media.clone());
        world.disk().inject(self.sickness.rule(self.drive, 1 + self.rng.below(40)));
        self.within(&world, START, "a start beside a sick drive", || {
            let stage = SimStage::open(&world, &self.options)
                .map_err(|error| format!("{:?}: {error}", self.sickness))?;
            let desk = Desk::new(&stage, "sick");
            for (n, _) in stored.iter().filter(|(_, sound)| *sound) {
                let (_, end) = desk.read(&desk.read_request(pages(), &desk.keys(*n..n + 1)));
                ensure(
                    end.usable_blocks == 1,
                    "a block of a sound drive is not here after a start",
                    (n, end),
                )?;
            }
            Ok(())
        })?;
        let world = SimWorld::with_media(self.seed.0, &self.world(), media);
        let stage = SimStage::open(&world, &self.options).map_err(|error| error.to_string())?;
        let desk = Desk::new(&stage, "sick");
        stored.iter().for_each(|(n, _)| desk.expect(pages(), &desk.keys(*n..n + 1), 1));
        Ok(())
    }
}
