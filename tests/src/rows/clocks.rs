//! Clocks that jump, stand still and drift: what a lease or a time to live promises is counted on the monotonic clock
//! while a store is open, and on the wall clock only from one opening to the next.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, LeaseId, LeaseTerms, Presence, PutRequest, TtlRequest,
};
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_layout::BlockKey;
use kvarts_store::engine::{Limits, Options};

use super::pool::{States, until};
use super::scripts::{Beside, tell};
use super::{Row, Tally};
use crate::conformance::{Desk, pages};
use crate::model::Model;
use crate::script::{Op, Player};
use crate::sim::{Crash, Media, Rng, Seed, SimClock, SimWorld, WorldConfig};
use crate::stage::{SimStage, Stage, small_options};

/// Wall time at the beginning.
const START_MS: u64 = 1_800_000_000_000;
const HOUR_MS: i64 = 3_600_000;
const YEAR_MS: i64 = 365 * 24 * HOUR_MS;
/// Operations of a script.
const OPS: usize = 40;

/// The clock of a world as it would be if it were never set.
#[derive(Debug)]
struct Steady(Arc<SimClock>);

impl Clock for Steady {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn unix_millis(&self) -> u64 {
        START_MS + self.0.now().0 / 1_000_000
    }
}

/// Sets the wall clock, makes it drift, or stops it.
fn disturb(clock: &SimClock, rng: &mut Rng) {
    let back = if rng.coin() { -1 } else { 1 };
    match rng.below(5) {
        0 => clock.jump_wall(back * HOUR_MS),
        1 => clock.jump_wall(back * 10 * YEAR_MS),
        2 => clock.jump_wall(back * rng.between(1, 5_000).cast_signed()),
        3 => clock.drift_wall(back * rng.below(200).cast_signed()),
        _ => clock.freeze_wall(rng.coin()),
    }
}

/// Every answer of the engine is the model's, which knows nothing of the wall clock.
fn script(seed: Seed, states: &States) -> Result<(), String> {
    let world = SimWorld::new(seed.0, &WorldConfig::default());
    let mut rng = seed.child("script").rng();
    let stage =
        SimStage::open(&world, &small_options(1 + rng.index(2))).map_err(|error| error.to_string())?;
    let clock = Arc::clone(world.clock());
    let beside = Beside { model: Model::new(Arc::new(Steady(Arc::clone(&clock)))), clock };
    let (mut engine, mut model) = (Player::new(&stage), Player::new(&beside));
    for step in 0..OPS {
        if rng.coin() {
            disturb(world.clock(), &mut rng);
        }
        let op = Op::draw(&mut rng);
        let (found, expected) = (engine.play(&op), model.play(&op));
        if found != expected {
            return Err(format!("step {step}: {}", tell(&op, &found, &expected)));
        }
    }
    if engine.settle() != model.settle() {
        return Err("other blocks by events than in the model".to_owned());
    }
    states.reach(world.disk().log().digest());
    Ok(())
}

fn tight() -> Options {
    let every = Duration::from_secs(1 << 40);
    let limits = Limits { arena_bytes: 2 << 20, checkpoint_every: every, ..Limits::default() };
    Options {
        shards_per_directory: 1,
        segment_bytes: 64 << 10,
        budget_bytes: 1 << 20,
        limits,
        ..Options::default()
    }
}

fn open(seed: Seed, unix_millis: u64, media: Option<Media>) -> Result<SimStage, String> {
    let config = WorldConfig { unix_millis, ..WorldConfig::default() };
    let world = match media {
        Some(media) => SimWorld::with_media(seed.0, &config, media),
        None => SimWorld::new(seed.0, &config),
    };
    SimStage::open(&world, &tight()).map_err(|error| error.to_string())
}

fn here(desk: &Desk<'_>, keys: &[BlockKey], lease: Option<LeaseTerms>) -> (Vec<bool>, Option<LeaseId>) {
    let (group, coordinate) = pages();
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease };
    let reply = desk.stage.store().contains(&request).expect("a well-formed question");
    (reply.presence.iter().map(|one| *one == Presence::Here).collect(), reply.lease)
}

/// Pushes out whatever may go.
fn press(desk: &Desk<'_>, next: &mut u64) -> Result<(), String> {
    for _ in 0..24 {
        let key = desk.keys(*next..*next + 1);
        *next += 1;
        let outcomes = desk.outcomes(desk.request(pages(), &key, 1));
        if outcomes != [BlockOutcome::Stored] {
            return Err(format!("a store that can evict refuses: {outcomes:?}"));
        }
    }
    Ok(())
}

fn same(what: &str, found: &[bool], expected: &[bool]) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found:?}, not {expected:?}")) }
}

/// Blocks under a lease stay under pressure until it ends and not longer, whatever the wall clock does and however
/// long the monotonic one stands.
fn leases(seed: Seed, states: &States) -> Result<(), String> {
    let mut rng = seed.child("leases").rng();
    let stage = open(seed, START_MS, None)?;
    let desk = Desk::new(&stage, "leased");
    let keys = desk.keys(0..4);
    let mut next = 100;
    // The second half may live an hour only.
    for (at, key) in keys.iter().enumerate() {
        let expires_after = (at >= 2).then_some(Duration::from_secs(3600));
        let request = PutRequest { expires_after, ..desk.request(pages(), &[*key], 1) };
        if desk.outcomes(request) != [BlockOutcome::Stored] {
            return Err("a fresh store refuses".to_owned());
        }
    }
    let hold = Duration::from_secs(rng.between(2, 5) * 1000);
    let terms = LeaseTerms { hold, tenant: 3, cap_bytes: 1 << 30 };
    let lease = here(&desk, &keys, Some(terms)).1.ok_or("no lease on what is here")?;
    // Time stands: nothing ends.
    for _ in 0..rng.between(1, 3) {
        disturb(stage.world().clock(), &mut rng);
        press(&desk, &mut next)?;
        same("under a lease", &here(&desk, &keys, None).0, &[true; 4])?;
    }
    if rng.coin() {
        // Over the time to live of the second half, and still under the lease.
        stage.advance(hold - Duration::from_secs(1));
        disturb(stage.world().clock(), &mut rng);
        press(&desk, &mut next)?;
        same("a second before its end", &here(&desk, &keys, None).0, &[true; 4])?;
        stage.advance(Duration::from_secs(2));
    } else {
        stage.store().unlock(lease);
    }
    let expired = hold >= Duration::from_secs(3600) && stage.now() > Nanos(3_600_000_000_000);
    disturb(stage.world().clock(), &mut rng);
    if expired {
        same("past its time without a lease", &here(&desk, &keys[2..], None).0, &[false; 2])?;
    }
    // They were looked up, so they outlive blocks that were not looked up.
    for _ in 0..8 {
        press(&desk, &mut next)?;
    }
    same("without a lease, under pressure", &here(&desk, &keys, None).0, &[false; 4])?;
    if desk.stage.store().renew(lease, hold).is_ok() {
        return Err("a lease that had ended was renewed".to_owned());
    }
    stage.look()?;
    states.reach(stage.world().disk().log().digest());
    Ok(())
}

/// A restart counts from the wall clock of then: what has expired by it is gone, the rest is there until its time.
fn restart(seed: Seed, states: &States) -> Result<(), String> {
    let mut rng = seed.child("restart").rng();
    let stage = open(seed, START_MS, None)?;
    let desk = Desk::new(&stage, "restarted");
    let keys = desk.keys(0..6);
    let mut ends = Vec::new();
    for key in &keys {
        if rng.coin() {
            disturb(stage.world().clock(), &mut rng);
        }
        stage.advance(Duration::from_secs(rng.below(600)));
        let changed = rng.below(3) == 0;
        // A changed time that is over before a checkpoint says so leaves no trace: a restart takes that of the put.
        let least = if changed { 4 } else { 1 };
        let ttl = rng.coin().then(|| rng.between(least, 40) * 1000 + 500);
        let first = if changed { Some(Duration::from_secs(90_500)) } else { ttl.map(Duration::from_secs) };
        let request = PutRequest { expires_after: first, ..desk.request(pages(), &[*key], 1) };
        if desk.outcomes(request) != [BlockOutcome::Stored] {
            return Err("a fresh store refuses".to_owned());
        }
        if changed {
            let (group, coordinate) = pages();
            let (namespace, ttl) = (desk.namespace, ttl.map(Duration::from_secs));
            let request = TtlRequest { namespace, group, coordinate, keys: std::slice::from_ref(key), ttl };
            desk.stage.store().set_ttl(&request).map_err(|error| error.to_string())?;
        }
        ends.push(ttl.map(|ttl| START_MS + stage.now().0 / 1_000_000 + ttl * 1000));
    }
    let passed_ms = stage.now().0 / 1_000_000;
    let media = if rng.coin() {
        stage.close().map_err(|error| error.to_string())?
    } else {
        // A change of a time to live is durable with the next checkpoint.
        let written = crate::stage::drive(stage.world(), stage.engine().checkpoint());
        written.map_err(|hang| hang.to_string())?.map_err(|error| error.to_string())?;
        stage.cut_power().image(Crash::LoseAll)
    };
    let wall_ms = match rng.below(3) {
        0 => START_MS - rng.below(HOUR_MS.unsigned_abs()),
        1 => START_MS + passed_ms + rng.below(50_000_000),
        _ => START_MS + 10 * YEAR_MS.unsigned_abs(),
    };
    let stage = open(seed.child("again"), wall_ms, Some(media))?;
    let desk = Desk::new(&stage, "restarted");
    for _ in 0..3 {
        let now_ms = wall_ms + stage.now().0 / 1_000_000;
        // Expiry is counted in tenths of a second: nothing is asked within one of an end.
        let near = |end: &Option<u64>| end.is_some_and(|end| end.abs_diff(now_ms) <= 200);
        if !ends.iter().any(near) {
            let expected: Vec<bool> = ends.iter().map(|end| end.is_none_or(|end| now_ms < end)).collect();
            same("after a restart", &here(&desk, &keys, None).0, &expected)
                .map_err(|why| format!("{why}; ends {ends:?}, now {now_ms}, opened {wall_ms}"))?;
        }
        disturb(stage.world().clock(), &mut rng);
        stage.advance(Duration::from_secs(rng.between(1, 20_000)));
    }
    stage.look()?;
    states.reach(stage.world().disk().log().digest());
    Ok(())
}

/// Row R17.
pub(super) fn row() -> Row {
    Row {
        id: "R17",
        what: "clocks set by hours and years, stopped, drifting: leases under pressure, times to live, restarts",
        counts: "runs with different event logs",
        targets: [200, 30_000, 300_000],
        run: |ask, target| -> Tally {
            until(ask, target, |seed, states| match seed.0 % 3 {
                0 => script(seed, states),
                1 => leases(seed, states),
                _ => restart(seed, states),
            })
        },
    }
}
