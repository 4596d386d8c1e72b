//! A fault costs what it must and no more: what is not the disk's latches nothing, writes that fail evict nothing, a latch
//! can be lifted, and a store that is not well says so.
#![allow(clippy::disallowed_methods, reason = "one test runs executors on real threads")]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvarts_contract::api::{BlockOutcome, ContainsRequest, Presence};
use kvarts_contract::blocking::block_on;
use kvarts_contract::clock::{OsEntropy, SystemClock};
use kvarts_contract::error::{Kind, Reason};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy},
};
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_store::io::{Features, Io, IoChoice, open_io};
use kvarts_store::ledger::Phase;
use kvarts_store::rt::glommio::GlommioLauncher;
use kvarts_store::rt::threads::{MakeIo, ThreadLauncher};
use kvarts_store::rt::{Body, Join, Launcher};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::sim::crash::Crash;
use kvarts_tests::sim::media::errno::EIO;
use kvarts_tests::sim::{Effect, OpKind, Rule, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{Scratch, SimStage, Stage, drive};

/// What a kernel says when it lacks something else than disk: EINTR, EAGAIN, ENOMEM, EBUSY, ENFILE, EMFILE.
const PASSING: [i32; 6] = [4, 11, 12, 16, 23, 24];
const SEGMENT: u64 = 128 << 10;

fn options(budget_bytes: u64) -> Options {
    Options {
        segment_bytes: SEGMENT,
        budget_bytes,
        shards_per_directory: 1,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

fn open(seed: u64, budget_bytes: u64) -> (SimWorld, SimStage) {
    let world = SimWorld::new(seed, &WorldConfig::default());
    let stage = SimStage::open(&world, &options(budget_bytes)).unwrap();
    (world, stage)
}

fn fill(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> Vec<BlockOutcome> {
    keys.flat_map(|n| desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1))).collect()
}

fn from_now_on(kind: OpKind, errno: i32) -> Rule {
    Rule::new(Which::Kind(kind), When::From(1), Effect::Errno(errno))
}

fn refused(outcomes: &[BlockOutcome]) -> Vec<Reason> {
    let reason = |one: &BlockOutcome| match one {
        BlockOutcome::Refused(reason) => Some(reason.clone()),
        _ => None,
    };
    outcomes.iter().filter_map(reason).collect()
}

#[test]
fn what_passes_and_is_not_the_disks_latches_nothing_and_the_same_store_takes_puts_again() {
    let kinds = [OpKind::Open, OpKind::Allocate, OpKind::SyncDir, OpKind::Stat, OpKind::Write, OpKind::Flush];
    for kind in kinds {
        for errno in PASSING {
            let (world, stage) = open(1, 8 << 20);
            let desk = Desk::new(&stage, "passing");
            assert_eq!(fill(&desk, 0..3), vec![BlockOutcome::Stored; 3]);
            world.disk().inject(from_now_on(kind, errno));
            let reasons = refused(&fill(&desk, 10..40));
            assert!(!reasons.is_empty(), "{kind:?} {errno}: nothing met it");
            for reason in reasons {
                assert!(matches!(reason, Reason::Passing(_)), "{kind:?} {errno}: {reason}");
                assert_eq!(reason.kind(), Kind::Retry);
            }
            let closed = drive(&world, stage.engine().checkpoint()).expect("it ends");
            assert!(closed.is_ok() || closed.unwrap_err().kind() == Kind::Retry, "{kind:?} {errno}");
            assert_eq!(stage.engine().health().fault(), None);
            desk.expect(pages(), &desk.keys(0..3), 1);
            world.disk().heal();
            assert_eq!(fill(&desk, 50..80), vec![BlockOutcome::Stored; 30], "{kind:?} {errno}");
            drive(&world, stage.engine().checkpoint()).expect("it ends").expect("a checkpoint");
            stage.close().unwrap();
        }
    }
}

#[test]
fn refused_puts_evict_nothing_and_after_the_disk_is_well_all_are_taken() {
    for kind in [OpKind::Write, OpKind::Flush] {
        for errno in [EIO, 12] {
            let (world, stage) = open(2, 3 << 20);
            let desk = Desk::new(&stage, "evicting");
            assert_eq!(fill(&desk, 0..150), vec![BlockOutcome::Stored; 150]);
            let before = stage.engine().stats();
            assert!(before.counts.blocks_evicted > 0, "it is not full: {before:?}");
            world.disk().inject(from_now_on(kind, errno));
            assert_eq!(refused(&fill(&desk, 200..260)).len(), 60);
            let after = stage.engine().stats();
            assert_eq!(after.counts.blocks_evicted, before.counts.blocks_evicted, "{kind:?} {errno}");
            assert_eq!(after.space.shards[0].segments, before.space.shards[0].segments);
            world.disk().heal();
            assert_eq!(fill(&desk, 300..400), vec![BlockOutcome::Stored; 100], "{kind:?} {errno}");
            stage.audit_all();
            stage.close().unwrap();
        }
    }
}

fn here(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> usize {
    let (group, coordinate) = pages();
    let names = desk.keys(keys);
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &names, lease: None };
    let found = desk.stage.store().contains(&request).unwrap().presence;
    found.into_iter().filter(|one| *one == Presence::Here).count()
}

fn failing(errno: i32, nth: &[u64]) -> impl Iterator<Item = Rule> {
    nth.iter().map(move |nth| Rule::new(Which::Kind(OpKind::Write), When::Nth(*nth), Effect::Errno(errno)))
}

/// The device takes the page that it is asked with, and not the first write to the segment that is begun then.
#[test]
fn segments_that_failed_before_anything_counted_are_used_again() {
    for nth in [&[2, 5][..], &[3, 6], &[2, 4]] {
        let (world, stage) = open(3, 8 << 20);
        let desk = Desk::new(&stage, "barren");
        assert_eq!(fill(&desk, 0..100), vec![BlockOutcome::Stored; 100]);
        let (evicted, segments) =
            (|| stage.engine().stats().counts.blocks_evicted, || stage.engine().segments());
        let (before, had) = (segments().len(), (8 << 20) / SEGMENT as usize);
        assert!(evicted() == 0 && before < had - 8, "{before} of {had} segments");
        failing(EIO, &[1]).for_each(|rule| world.disk().inject(rule));
        fill(&desk, 100..101);
        let mut refused_in_all = 0;
        for round in 0..40u64 {
            world.disk().heal();
            failing(EIO, nth).for_each(|rule| world.disk().inject(rule));
            refused_in_all += refused(&fill(&desk, 200 + round..201 + round)).len();
        }
        world.disk().heal();
        println!("{nth:?}: {refused_in_all} refused, {before} segments, then {}", segments().len());
        assert_eq!(evicted(), 0, "{nth:?}: {} segments", segments().len());
        assert_eq!(here(&desk, 0..100), 100);
        assert_eq!(fill(&desk, 1000..1100), vec![BlockOutcome::Stored; 100], "{nth:?}");
        stage.audit_all();
        stage.close().unwrap();
    }
}

#[test]
fn a_segment_that_cannot_be_begun_is_left_alone_after_a_few_tries() {
    let (world, stage) = open(7, 3 << 20);
    world.disk().inject(from_now_on(OpKind::Punch, 95));
    let desk = Desk::new(&stage, "bad place");
    assert_eq!(fill(&desk, 0..150), vec![BlockOutcome::Stored; 150]);
    let recycled = || stage.engine().stats().counts.segments_recycled;
    let before = recycled();
    assert!(before > 0, "it is not full");
    let (mut rounds, mut number) = (0, 200);
    while recycled() < before + 4 && rounds < 200 {
        world.disk().heal();
        world.disk().inject(from_now_on(OpKind::Punch, 95));
        // The header of the next segment, behind the page with which the device is asked.
        let nth = if rounds == 0 { 1 } else { 2 };
        failing(EIO, &[nth]).for_each(|rule| world.disk().inject(rule));
        fill(&desk, number..number + 1);
        (rounds, number) = (rounds + 1, number + 1);
    }
    println!("{rounds} rounds, {} recycled", recycled() - before);
    assert!(rounds < 60, "one segment is tried again and again");
    world.disk().heal();
    assert_eq!(fill(&desk, 1000..1040), vec![BlockOutcome::Stored; 40]);
}

/// One region of the device is bad for good: here all that the file of the next segment has.
#[test]
fn puts_go_on_beside_a_place_that_fails_for_good_and_nobody_is_told() {
    for kind in [OpKind::Write, OpKind::Flush] {
        let (world, stage) = open(9, 8 << 20);
        let desk = Desk::new(&stage, "bad region");
        assert_eq!(fill(&desk, 0..3), vec![BlockOutcome::Stored; 3]);
        world.disk().inject(from_now_on(kind, EIO).named("segment-00000001"));
        let reasons = refused(&fill(&desk, 10..100));
        assert!(world.disk().struck() > 0, "{kind:?}: nothing met it");
        assert_eq!(reasons, [], "{kind:?}");
        assert_eq!(stage.engine().health(), kvarts_store::engine::Health::default());
        desk.expect(pages(), &desk.keys(0..3), 1);
        stage.close().unwrap();
    }
}

/// Each segment fails where a new file does not: what is here stays, but for a few segments, and the store comes back at once.
#[test]
fn a_device_that_fails_every_segment_and_no_other_file_loses_few_of_them() {
    let (world, stage) = open(10, 3 << 20);
    let desk = Desk::new(&stage, "bad segments");
    assert_eq!(fill(&desk, 0..150), vec![BlockOutcome::Stored; 150]);
    let evicted = || stage.engine().stats().counts.blocks_evicted;
    let before = evicted();
    for number in 0..100 {
        let end: &'static str = format!("segment-{number:08}").leak();
        world.disk().inject(from_now_on(OpKind::Write, EIO).named(end));
    }
    assert_eq!(refused(&fill(&desk, 200..260)).len(), 60);
    assert!(evicted() - before <= 60, "{} blocks went for puts that failed", evicted() - before);
    assert_eq!(stage.engine().health().failing.len(), 1);
    world.disk().heal();
    assert_eq!(fill(&desk, 300..400), vec![BlockOutcome::Stored; 100]);
    assert!(stage.engine().health().failing.is_empty());
    stage.audit_all();
    stage.close().unwrap();
}

#[test]
fn a_device_that_fails_writes_everywhere_is_told_of_until_it_takes_them_again() {
    let (world, stage) = open(11, 8 << 20);
    let desk = Desk::new(&stage, "bad device");
    assert_eq!(fill(&desk, 0..3), vec![BlockOutcome::Stored; 3]);
    world.disk().inject(from_now_on(OpKind::Write, EIO));
    assert_eq!(refused(&fill(&desk, 10..20)).len(), 10);
    let failing = stage.engine().health().failing;
    assert!(failing.get(&0).is_some_and(|why| why.contains("error")), "{failing:?}");
    assert_eq!(stage.engine().health().fault(), None, "it is no latch");
    world.disk().heal();
    assert_eq!(fill(&desk, 30..60), vec![BlockOutcome::Stored; 30]);
    assert!(stage.engine().health().failing.is_empty());
    stage.close().unwrap();
}

/// The header of a recycled segment fails once. What its footer lists may count after a crash, so nothing may be written
/// over that.
#[test]
fn asking_a_device_whether_it_takes_writes_again_overwrites_nothing_that_may_come_back() {
    let (world, stage) = open(12, 3 << 20);
    // Without holes, segments are emptied as a whole and rewritten.
    world.disk().inject(from_now_on(OpKind::Punch, 95));
    let desk = Desk::new(&stage, "coming back");
    assert_eq!(fill(&desk, 0..150), vec![BlockOutcome::Stored; 150]);
    let recycled = || stage.engine().stats().counts.segments_recycled;
    let (before, mut number) = (recycled(), 200);
    let mut met = 0;
    while met == 0 && number < 300 {
        let was = recycled();
        world.disk().heal();
        world.disk().inject(from_now_on(OpKind::Punch, 95));
        failing(EIO, &[1]).for_each(|rule| world.disk().inject(rule));
        // The first write after a roll is the header's.
        met += usize::from(!refused(&fill(&desk, number..number + 1)).is_empty() && recycled() > was);
        number += 1;
    }
    assert!(met > 0 && recycled() > before, "no header failed");
    world.disk().heal();
    world.disk().inject(from_now_on(OpKind::Punch, 95));
    // Only the page with which the device is asked is written: what is begun then fails.
    world.disk().inject(Rule::new(Which::Kind(OpKind::Write), When::From(2), Effect::Errno(EIO)));
    assert_eq!(refused(&fill(&desk, 400..401)).len(), 1);
    let media = stage.cut_power().image(Crash::LoseAll);
    let world = SimWorld::with_media(13, &WorldConfig::default(), media);
    let stage = SimStage::open(&world, &options(3 << 20)).unwrap();
    let problems: u64 = stage.engine().recovery().iter().map(|report| report.problems).sum();
    assert_eq!(problems, 0);
    stage.audit_all();
    stage.close().unwrap();
}

#[test]
fn what_was_put_last_stays_when_something_passing_breaks_its_segment_off() {
    for errno in [12, 11] {
        let (world, stage) = open(8, 3 << 20);
        let desk = Desk::new(&stage, "passing");
        assert_eq!(fill(&desk, 0..145), vec![BlockOutcome::Stored; 145]);
        assert!(stage.engine().stats().counts.blocks_evicted > 0, "it is not full");
        world.disk().inject(from_now_on(OpKind::Write, errno));
        assert_eq!(refused(&fill(&desk, 200..203)).len(), 3);
        world.disk().heal();
        assert_eq!(fill(&desk, 300..306), vec![BlockOutcome::Stored; 6]);
        assert_eq!(here(&desk, 100..145), 45, "{errno}: the newest went, and older ones stayed");
    }
}

#[test]
fn a_latch_is_lifted_when_every_shard_has_shown_that_it_can_be_written_to_and_not_before() {
    for kind in [OpKind::SyncDir, OpKind::Allocate, OpKind::Open] {
        let (world, stage) = open(4, 8 << 20);
        let desk = Desk::new(&stage, "lifted");
        assert_eq!(fill(&desk, 0..3), vec![BlockOutcome::Stored; 3]);
        world.disk().inject(from_now_on(kind, EIO));
        let latched =
            (10..30).find_map(|n| match stage.put(desk.request(pages(), &desk.keys(n..n + 1), 1)) {
                Ok(reply) => refused(&reply.outcomes).pop(),
                Err(error) => Some(error.0),
            });
        assert!(matches!(latched, Some(Reason::Latched(_))), "{kind:?}: {latched:?}");
        assert!(stage.engine().health().fault().is_some());
        if kind != OpKind::Allocate {
            // A checkpoint meets the same.
            drive(&world, stage.engine().resume()).expect("it ends").expect_err("nothing is well");
            assert!(stage.engine().health().fault().is_some());
        }
        world.disk().heal();
        let still = stage.put(desk.request(pages(), &desk.keys(40..41), 1)).expect_err("it is latched");
        assert_eq!(still.kind(), Kind::ReadOnly);
        drive(&world, stage.engine().resume()).expect("it ends").expect("the disk is well");
        assert_eq!(stage.engine().health().fault(), None);
        assert_eq!(fill(&desk, 50..80), vec![BlockOutcome::Stored; 30], "{kind:?}");
        desk.expect(pages(), &desk.keys(0..3), 1);
        stage.audit_all();
        stage.close().unwrap();
    }
}

#[test]
fn a_store_with_fewer_descriptors_than_it_could_use_goes_on_with_those_that_it_has() {
    let (_world, stage) = open(5, 8 << 20);
    stage.engine().set_files_cap(6);
    let desk = Desk::new(&stage, "descriptors");
    assert_eq!(fill(&desk, 0..200), vec![BlockOutcome::Stored; 200]);
    let segments = stage.engine().stats().space.shards[0].segments;
    assert!(segments <= 6, "{segments} files");
    assert!(stage.engine().files_max() > 100);
    stage.audit_all();
    stage.close().unwrap();
}

#[test]
fn a_close_reaches_every_executor_also_those_that_take_no_more_requests() {
    let world = SimWorld::new(6, &WorldConfig::default());
    let limits = Limits { mailbox_messages: 2, ..options(0).limits };
    let options =
        Options { executors: 2, shards_per_directory: 2, limits, budget_bytes: 8 << 20, ..options(0) };
    let (store, _threads) = drive(&world, Store::open(&world.launcher(), &options)).unwrap().unwrap();
    world.settle();
    // No executor takes anything out of the mailboxes until the world goes on.
    use kvarts_contract::api::KvStore;
    let stage = Bare(store.clone());
    let desk = Desk::new(&stage, "full");
    let puts: Vec<_> = (0..40).map(|n| store.put(desk.request(pages(), &desk.keys(n..n + 1), 1))).collect();
    drive(&world, store.close()).expect("it ends").expect("a clean stop");
    world.run_until(400_000, || world.executors() == 0).expect("every executor has ended");
    let mut refused = 0;
    for mut put in puts {
        let reply = put.try_take().expect("answered").expect("not abandoned").expect("well formed");
        refused += reply.outcomes.iter().filter(|one| matches!(one, BlockOutcome::Refused(_))).count();
    }
    assert!(refused > 0, "no mailbox was full");
}

/// Starts executors as another launcher does; each has a task beside its own that panics when it is told to.
struct Mined<L> {
    launcher: L,
    fuses: Vec<Arc<AtomicBool>>,
}

impl<L: Launcher> Launcher for Mined<L> {
    fn launch(&self, index: usize, body: Body) -> Result<Box<dyn Join + Send>, String> {
        let fuse = Arc::clone(&self.fuses[index]);
        let mined: Body = Box::new(move |seat| {
            let rt = Rc::clone(&seat.rt);
            let watching = async move {
                while !fuse.load(Ordering::Acquire) {
                    rt.sleep_until(rt.clock().now().plus(Duration::from_millis(1))).await;
                }
                panic!("as a test wants it");
            };
            seat.rt.spawn(Class::Background, Box::pin(watching));
            body(seat)
        });
        self.launcher.launch(index, mined)
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.launcher.clock()
    }

    fn entropy(&self) -> Arc<dyn Entropy> {
        self.launcher.entropy()
    }
}

/// A store on real threads, without a home.
struct Bare(Store);

impl Stage for Bare {
    fn store(&self) -> &dyn kvarts_contract::api::KvStore {
        &self.0
    }

    fn wait(&self, done: &mut dyn FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(60), "no answer");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn rest(&self) {}

    fn now(&self) -> kvarts_contract::clock::Nanos {
        self.0.clock().now()
    }

    fn advance(&self, _by: Duration) -> bool {
        false
    }
}

fn a_dead_executor(mined: Mined<impl Launcher>) {
    let options =
        Options { shards_per_directory: 4, executors: 2, budget_bytes: 16 << 20, ..options(16 << 20) };
    let (store, threads) = block_on(Store::open(&mined, &options)).unwrap();
    let stage = Bare(store.clone());
    let desk = Desk::new(&stage, "dead");
    let keys = desk.keys(0..40);
    assert_eq!(fill(&desk, 0..40), vec![BlockOutcome::Stored; 40]);
    // The first executor has the first half of the shards.
    let alive = |key: &kvarts_layout::BlockKey| store.shard_of(key) < 2;
    mined.fuses[1].store(true, Ordering::Release);
    stage.wait(&mut || store.health().dead_executors == 1);
    assert!(store.health().fault().is_some_and(|why| why.contains("executor 1 ended with a panic")));
    assert!(
        store.health().cured_by_a_restart().is_some_and(|why| why.contains("1 executors ended with a panic"))
    );
    // A block that no executor can deliver is not promised.
    let (group, coordinate) = pages();
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    use kvarts_contract::api::KvStore;
    let found = store.contains(&request).unwrap().presence;
    for (key, presence) in keys.iter().zip(found) {
        assert_eq!(presence == Presence::Here, alive(key), "{key}");
    }
    for n in 0..40 {
        let one = desk.keys(n..n + 1);
        match alive(&one[0]) {
            true => desk.expect(pages(), &one, 1),
            false => {
                let (_, end) = desk.read(&desk.read_request(pages(), &one));
                assert!(matches!(end.failures[..], [(0, Reason::NotHere(_))]), "{end:?}");
            }
        }
    }
    let refused = stage.put(desk.request(pages(), &desk.keys(50..51), 1)).expect_err("it is latched");
    assert_eq!(refused.kind(), Kind::ReadOnly);
    assert_eq!(block_on(store.resume()).expect_err("no executor answers").kind(), Kind::ReadOnly);
    block_on(store.close()).expect_err("one cannot be asked");
    drop((stage, store));
    let ended: Vec<_> = threads.into_iter().map(Join::join).collect();
    assert!(ended[0].is_ok() && ended[1].as_ref().is_err_and(|why| why.contains("panicked")), "{ended:?}");
}

fn fuses() -> Vec<Arc<AtomicBool>> {
    vec![Arc::default(), Arc::default()]
}

#[test]
fn a_dead_executor_is_told_of_and_its_blocks_are_not_promised() {
    let scratch = Scratch::new("dead");
    let make = |name: &str, choice: IoChoice| -> MakeIo {
        let directories = vec![scratch.below(name)];
        kvarts_store::home::make(&directories[0]).unwrap();
        Arc::new(move |_| {
            let io =
                open_io(choice, &directories, &Features::default()).map_err(|error| error.to_string())?;
            let io: Rc<RefCell<dyn Io>> = Rc::new(RefCell::new(io));
            Ok(io)
        })
    };
    let launcher = ThreadLauncher::new(SystemClock::new(), OsEntropy::new(), make("threads", IoChoice::Pool));
    a_dead_executor(Mined { launcher, fuses: fuses() });
    match GlommioLauncher::probe() {
        Ok(()) => {
            let io = make("glommio", IoChoice::Auto);
            let launcher = GlommioLauncher::new(SystemClock::new(), OsEntropy::new(), io);
            a_dead_executor(Mined { launcher, fuses: fuses() });
        }
        Err(why) => eprintln!("NOT RUN under glommio: {why}"),
    }
}

/// A directory that cannot be synced once, for want of a descriptor or by an error, costs a removed segment's bytes no longer than until
/// the next removal.
#[test]
fn a_removal_that_could_not_be_made_durable_is_made_so_by_the_next_one() {
    // An error of the first one, which is a checkpoint's, is another matter.
    for (errno, nths) in [(24, 1..4), (EIO, 2..3)] {
        for nth in nths {
            let (world, stage) = open(5, 6 << 20);
            let desk = Desk::new(&stage, "removed");
            assert_eq!(fill(&desk, 0..100), vec![BlockOutcome::Stored; 100]);
            let before = stage.engine().stats().space.shards[0].segments;
            let rule = Rule::new(Which::Kind(OpKind::SyncDir), When::Nth(nth), Effect::Errno(errno));
            world.disk().inject(rule);
            stage.engine().set_budget(3 << 20).unwrap();
            stage.wait(&mut || stage.engine().over_budget() == 0);
            assert_eq!(world.disk().struck(), 1, "{errno} {nth}");
            let after = stage.engine().segments();
            assert!(after.len() < before as usize, "{errno} {nth}: nothing was removed");
            assert!(after.iter().all(|one| one.phase != Phase::Lost), "{errno} {nth}: {after:?}");
            assert_eq!(stage.engine().health().fault(), None);
            stage.audit_all();
            stage.close().unwrap();
        }
    }
}
