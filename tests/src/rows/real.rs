//! The engine on real file systems: the power cut on a disk in user space that remembers every write and flush, and file
//! systems that are shut down under it.
#![allow(clippy::disallowed_methods, reason = "runs on the machine's own file systems and clock")]

use std::cell::RefCell;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvarts_contract::error::{Error, Reason};
use kvarts_fsck::check::Level;
use kvarts_fsck::disk::{Disk, OpenError, RealDisk};
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};

use super::pool::{States, until};
use super::{Ask, Row, Tally};
use crate::block::fuse::{Bytes, FuseDisk, Log};
use crate::block::mounted::{FileSystem, Mounted, missing};
use crate::campaign::{Found, Judge, Ledger, Mix, Work, read_all, work_on};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed};
use crate::stage::Scratch;
use crate::witness::{examine_disks, problems};

/// Operations of a workload.
const OPS: usize = 40;
/// Images of one workload.
const IMAGES: u64 = 12;
/// How long a workload or an opening may take: only a hang takes that long.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The rows of this file.
pub(super) fn rows() -> [Row; 2] {
    let cuts = Row {
        id: "R3",
        what: "power cuts under ext4 and xfs: a disk in user space loses, tears and reorders writes that were not flushed",
        counts: "disk images",
        targets: [24, 500, 2_000],
        run: |ask, target| with(ask, target, &[], cut),
    };
    let shutdowns = Row {
        id: "R4",
        what: "ext4 and xfs shut down under the engine: what they had in memory is lost, every call fails from then on",
        counts: "shutdowns",
        targets: [16, 200, 1_000],
        run: |ask, target| with(ask, target, &["xfs_io"], shut_down),
    };
    [cuts, shutdowns]
}

fn with(
    ask: &Ask,
    target: u64,
    programs: &[&str],
    one: fn(FileSystem, Seed, &States) -> Result<(), String>,
) -> Tally {
    if let Some(why) = missing(&FileSystem::ALL, programs) {
        return Tally { skipped: Some(why), ..Tally::default() };
    }
    until(ask, target, |seed, states| {
        let system = FileSystem::ALL[(seed.0 % 2) as usize];
        one(system, seed, states).map_err(|why| format!("{}: {why}", system.name()))
    })
}

fn options(seed: Seed, folder: &Path) -> HomeOptions {
    let mut rng = seed.child("options").rng();
    HomeOptions {
        directories: vec![folder.join("store")],
        runtime: RuntimeChoice::Threads,
        store: Options {
            shards_per_directory: 1 + rng.below(2) as u32,
            segment_bytes: [64 << 10, 256 << 10][rng.index(2)],
            budget_bytes: 16 << 20,
            executors: 1 + rng.index(2),
            limits: Limits { arena_bytes: 2 << 20, register: false, ..Limits::default() },
            ..Options::default()
        },
        ..HomeOptions::default()
    }
}

/// Polls a future of the engine's from this thread; `around` is called before each poll with false and after it with true.
fn poll_until_done<T>(future: impl Future<Output = T>, around: &mut dyn FnMut(bool)) -> Result<T, String> {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        around(false);
        let polled = future.as_mut().poll(&mut context);
        around(true);
        if let Poll::Ready(value) = polled {
            return Ok(value);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Err(format!("it hangs: nothing for {TIMEOUT:?}"))
}

fn work(seed: Seed) -> Work {
    let mix = [Mix::Plain, Mix::Compacting][seed.child("mix").rng().index(2)];
    Work { timeout: Some(Duration::from_secs(20)), watched: true, ..Work::new(OPS, mix) }
}

/// A ledger that was in force: from some entry of the disk's log on, for certain from a later one on.
struct Dated {
    perhaps_from: usize,
    from: usize,
    ledger: Ledger,
}

/// What is promised if the power fails after `upto` entries of the log.
fn in_force(dated: &[Dated], upto: usize) -> Ledger {
    let sure = dated.iter().rposition(|one| one.from <= upto);
    let mut ledger = sure.map_or_else(Ledger::default, |at| dated[at].ledger.clone());
    let later = dated.iter().skip(sure.map_or(0, |at| at + 1));
    later.filter(|one| one.perhaps_from <= upto).for_each(|one| ledger.either(&one.ledger));
    ledger
}

fn promises(ledger: &Ledger) -> u128 {
    let mut mixer = Mixer::new(3);
    ledger.promises(&mut mixer);
    mixer.value()
}

/// A new file system. All seeds begin with the same one.
fn fresh(system: FileSystem) -> Result<Bytes, String> {
    static MADE: [OnceLock<Result<Bytes, String>>; 2] = [OnceLock::new(), OnceLock::new()];
    let make = || {
        let scratch = Scratch::new("fresh");
        std::fs::create_dir_all(scratch.path()).map_err(|error| error.to_string())?;
        let image = scratch.path().join("image");
        system.make(&image)?;
        Bytes::load(&image).map_err(|error| error.to_string())
    };
    MADE[system as usize].get_or_init(make).clone()
}

/// A workload on a file system over a disk that remembers.
fn remembered(system: FileSystem, seed: Seed, scratch: &Path) -> Result<(Log, Vec<Dated>), String> {
    let place = scratch.join("disk");
    std::fs::create_dir_all(&place).map_err(|error| error.to_string())?;
    let disk = FuseDisk::serve(&place, fresh(system)?, system.image_bytes())?;
    let mounted = Mounted::new(system, &disk.file(), &scratch.join("mounted"))?;
    let home = Home::open(&options(seed, mounted.place())).map_err(|error| error.to_string())?;
    let (ledger, mut rng) = (RefCell::new(Ledger::default()), seed.child("work").rng());
    let mut dated = vec![Dated { perhaps_from: 0, from: 0, ledger: Ledger::default() }];
    let (mut before, mut known) = (0, promises(&ledger.borrow()));
    let mut around = |polled: bool| {
        if !polled {
            before = disk.entries();
            return;
        }
        let now = promises(&ledger.borrow());
        if now != known {
            known = now;
            let ledger = ledger.borrow().clone();
            dated.push(Dated { perhaps_from: before, from: disk.entries(), ledger });
        }
    };
    poll_until_done(work_on(home.store(), &ledger, &mut rng, work(seed)), &mut around)?;
    // Stopped cleanly or not: both are cut.
    if rng.coin() {
        home.close().map_err(|error| error.to_string())?;
    } else {
        home.abandon();
    }
    mounted.unmount()?;
    Ok((disk.log(), dated))
}

fn cut(system: FileSystem, seed: Seed, states: &States) -> Result<(), String> {
    let scratch = Scratch::new("real-cuts");
    let (log, dated) = remembered(system, seed, scratch.path())?;
    let image = scratch.path().join("image");
    for n in 0..IMAGES {
        let mut rng = seed.child("cuts").nth(n).rng();
        let upto = rng.between(1, log.entries.len() as u64) as usize;
        let bytes = match n % 3 {
            0 => log.image(upto, |_, _| false),
            1 => log.image(upto, |_, _| true),
            // Each write is kept, lost or torn.
            _ => {
                let fates = seed.child("fates").nth(n);
                log.image(upto, |write, sector| match fates.nth(write as u64).rng().below(3) {
                    0 => false,
                    1 => true,
                    _ => fates.nth(write as u64).nth(sector as u64).rng().coin(),
                })
            }
        };
        bytes.store(&image, system.image_bytes()).map_err(|error| error.to_string())?;
        let mut mixer = Mixer::new(3);
        [seed.0, n, upto as u64].into_iter().for_each(|word| mixer.word(word));
        states.reach(mixer.value());
        let ledger = in_force(&dated, upto);
        judge(system, seed, (&image, &scratch.path().join("again")), &ledger)
            .map_err(|why| format!("image {n}, {upto} of {} entries: {why}", log.entries.len()))?;
    }
    Ok(())
}

/// Mounts an image, which replays its journal, opens the store on it, and compares it with what was promised. The
/// checkers of both, the store and the file system, find nothing.
fn judge(
    system: FileSystem,
    seed: Seed,
    (image, place): (&Path, &Path),
    ledger: &Ledger,
) -> Result<(), String> {
    let mounted = Mounted::new(system, image, place)?;
    witness(&mounted)?;
    let found = contents(seed, mounted.place())?;
    if let Some(violation) = ledger.violation(&found, Judge::Strict) {
        return Err(violation);
    }
    witness(&mounted)?;
    mounted.unmount()?;
    system.check(image)
}

/// What a store holds; it is stopped cleanly afterwards.
fn contents(seed: Seed, folder: &Path) -> Result<Found, String> {
    let options = options(seed, folder);
    let locked = |error: &Error| matches!(error.0, Reason::Locked(_));
    let home = unlocked(|| Home::open(&options), locked);
    let home = home.map_err(|error| format!("it does not open: {error}"))?;
    let found = poll_until_done(read_all(home.store()), &mut |_| ())?;
    home.close().map_err(|error| format!("it does not close: {error}"))?;
    Ok(found)
}

/// Opens something that a lock guards. A program that another worker starts has copies of this one's files until it has
/// become that program, and a lock ends with the last copy: one that was let go may be held for a moment longer.
fn unlocked<T, E>(open: impl Fn() -> Result<T, E>, locked: impl Fn(&E) -> bool) -> Result<T, E> {
    for _ in 0..500 {
        match open() {
            Err(error) if locked(&error) => std::thread::sleep(Duration::from_millis(10)),
            other => return other,
        }
    }
    open()
}

/// The store's own checker.
fn witness(mounted: &Mounted) -> Result<(), String> {
    let store = mounted.place().join("store");
    if !store.join(kvarts_layout::format::names::SUPERBLOCK).is_file() {
        return Ok(());
    }
    let locked = |error: &OpenError| matches!(error, OpenError::InUse);
    let disk = unlocked(|| RealDisk::open(&store, true, false), locked);
    let disk = disk.map_err(|error| format!("fsck: {error:?}"))?;
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let checked = examine_disks(&[disk], Level::Full).map_err(|error| format!("fsck: {error}"))?;
    if checked.findings.is_clean() { Ok(()) } else { Err(format!("fsck: {}", problems(&checked))) }
}

fn shut_down(system: FileSystem, seed: Seed, states: &States) -> Result<(), String> {
    let scratch = Scratch::new("shutdown");
    let (image, place) = (scratch.path().join("image"), scratch.path().join("mounted"));
    std::fs::create_dir_all(scratch.path()).map_err(|error| error.to_string())?;
    fresh(system)?.store(&image, system.image_bytes()).map_err(|error| error.to_string())?;
    let mounted = Mounted::new(system, &image, &place)?;
    let home = Home::open(&options(seed, mounted.place())).map_err(|error| error.to_string())?;
    let (ledger, mut rng) = (RefCell::new(Ledger::default()), seed.child("work").rng());
    let (start, after) = (Instant::now(), Duration::from_micros(Rng::between(&mut rng, 500, 60_000)));
    let mut ended = None;
    let mut around = |polled: bool| {
        if !polled && ended.is_none() && start.elapsed() >= after {
            ended = Some(mounted.shut_down());
        }
    };
    let work = Work { ops: 4 * OPS, ..work(seed) };
    poll_until_done(work_on(home.store(), &ledger, &mut rng, work), &mut around)?;
    let in_time = ended.is_some();
    if !in_time {
        ended = Some(mounted.shut_down());
    }
    ended.transpose()?;
    let latched = refused_for_good(home.store(), &ledger)?;
    home.abandon();
    mounted.unmount()?;
    let ledger = ledger.into_inner();
    let mut mixer = Mixer::new(4);
    [seed.0, u64::from(in_time), ledger.deletes].into_iter().for_each(|word| mixer.word(word));
    states.reach(mixer.value());
    if !latched {
        return Err("a durable put was acknowledged on a file system that was shut down".to_owned());
    }
    judge(system, seed, (&image, &place), &ledger)
}

/// Whether a durable put of something new is refused.
fn refused_for_good(store: &Store, ledger: &RefCell<Ledger>) -> Result<bool, String> {
    let before = ledger.borrow().acknowledged;
    let put =
        crate::campaign::Poller { column: 0, first: 11, count: 1, producer: 99, durable: true, skew: 0 };
    // A block that is there already is acknowledged without writing: it is deleted first, or tried to be.
    let delete = crate::campaign::Act::Delete(crate::campaign::Aim::Key(11));
    poll_until_done(crate::campaign::act(store, ledger, delete), &mut |_| ())?;
    poll_until_done(crate::campaign::act(store, ledger, crate::campaign::Act::Put(put)), &mut |_| ())?;
    Ok(ledger.borrow().acknowledged == before)
}
