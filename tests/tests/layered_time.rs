//! Puts by layers and time, in the simulation: a caller that set a deadline is answered by it, whatever the disk does, and
//! the cost of a put that stands still for ever does not grow for the other puts.

use std::cell::RefCell;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use kvarts_contract::error::Reason;
use kvarts_fsck::check::Level;
use kvarts_store::engine::{EvictionPolicy, Limits, Options};
use kvarts_tests::campaign::layered::Layered;
use kvarts_tests::campaign::{Act, Aim, Driven, Judge, Ledger, Poller, act, drive, read_all};
use kvarts_tests::sim::{Effect, OpKind, Rule, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage};
use kvarts_tests::witness::{directories, examine, problems};

/// How long a caller cares.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a slow disk takes.
const SLOW: Duration = Duration::from_secs(40);
/// What answering takes, at most.
const MOMENT: Duration = Duration::from_millis(100);

fn options() -> Options {
    Options {
        shards_per_directory: 1,
        segment_bytes: 128 << 10,
        budget_bytes: 8 << 20,
        record_bytes_max: 48 << 10,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

fn open(seed: u64, options: &Options) -> SimStage {
    SimStage::open(&SimWorld::new(seed, &WorldConfig::default()), options).unwrap()
}

fn bring(first: u64, count: u64, producer: u64) -> Poller {
    Poller { column: 0, first, count, producer, durable: true, skew: 0 }
}

/// Waits in a stage.
fn wait<T>(stage: &SimStage, future: impl Future<Output = T>) -> T {
    match drive(stage.world(), u64::MAX, future) {
        Driven::Done(value) => value,
        Driven::Cut => panic!("cut without a limit"),
        Driven::Hung(hang) => panic!("it hangs: {hang}"),
    }
}

/// Offers all layers and seals.
fn finish(stage: &SimStage, mut put: Layered, ledger: &RefCell<Ledger>) {
    while put.offered() < put.layers() {
        wait(stage, put.next());
    }
    wait(stage, put.seal(ledger));
}

/// Begins one with a deadline, while what it needs comes only later; gives when it was answered, counted from then.
fn begin_late(stage: &SimStage, bring: Poller) -> Duration {
    let begun = stage.now();
    let answer = wait(stage, Layered::begin_by(stage.engine(), bring, Some(begun.plus(TIMEOUT))));
    assert!(matches!(answer, Err(Reason::DeadlinePassed)), "{answer:?}");
    stage.now().since(begun)
}

#[test]
fn one_that_waits_for_a_segment_is_answered_at_its_deadline_and_the_segment_is_the_next_ones() {
    let stage = open(1, &options());
    let ledger = RefCell::new(Ledger::default());
    wait(&stage, act(stage.engine(), &ledger, Act::Put(bring(0, 1, 1))));
    stage.rest();
    let (before, segments) = (stage.engine().holding(), stage.engine().segments().len());
    stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Open), When::Nth(1), Effect::Delay(SLOW)));
    let took = begin_late(&stage, bring(4, 2, 2));
    assert!(took >= TIMEOUT && took < TIMEOUT + MOMENT, "answered after {took:?}");
    assert_eq!(stage.world().disk().struck(), 1, "it was waiting for a segment");
    let after = stage.engine().holding();
    assert_eq!((after.claims, after.promised), (before.claims, before.promised));
    // The same blocks, at once: no put has claimed them. The put gets its turn when the one before has ended.
    let put = wait(&stage, Layered::begin(stage.engine(), bring(4, 2, 3))).unwrap();
    finish(&stage, put, &ledger);
    stage.rest();
    let made = stage.engine().segments().len();
    assert!(made > segments, "a segment was made that the first had no use for");
    let put = wait(&stage, Layered::begin(stage.engine(), bring(6, 2, 4))).unwrap();
    finish(&stage, put, &ledger);
    assert_eq!(stage.engine().segments().len(), made, "it is the next one's");
    assert_eq!(ledger.borrow().refusals, []);
    stage.rest();
    assert_eq!(stage.engine().holding(), before);
    stage.audit_all();
    let found = wait(&stage, read_all(stage.engine()));
    assert_eq!(ledger.borrow().violation(&found, Judge::Strict), None);
    let checked = examine(&directories(&stage.close().unwrap()), Level::Deep).unwrap();
    assert!(checked.findings.is_clean() && checked.blocks == 5, "{}", problems(&checked));
}

#[test]
fn one_that_waits_behind_another_that_gets_a_segment_is_answered_at_its_deadline_too() {
    let stage = open(2, &options());
    let ledger = RefCell::new(Ledger::default());
    wait(&stage, act(stage.engine(), &ledger, Act::Put(bring(0, 1, 1))));
    stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Open), When::Nth(1), Effect::Delay(SLOW)));
    let mut first = pin!(Layered::begin(stage.engine(), bring(4, 1, 2)));
    let mut context = Context::from_waker(Waker::noop());
    while stage.world().disk().struck() == 0 {
        assert!(first.as_mut().poll(&mut context).is_pending());
        stage.world().step();
    }
    let took = begin_late(&stage, bring(5, 1, 3));
    assert!(took < TIMEOUT + MOMENT, "answered after {took:?}");
    let put = wait(&stage, first).unwrap();
    finish(&stage, put, &ledger);
    let put = wait(&stage, Layered::begin(stage.engine(), bring(5, 1, 4))).unwrap();
    finish(&stage, put, &ledger);
    assert_eq!(ledger.borrow().refusals, []);
    stage.audit_all();
}

#[test]
fn one_whose_segment_never_comes_is_answered_at_its_deadline() {
    let stage = open(3, &options());
    stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Open), When::From(1), Effect::Stuck));
    let took = begin_late(&stage, bring(4, 2, 2));
    assert!(took < TIMEOUT + MOMENT, "answered after {took:?}");
    let after = stage.engine().holding();
    assert_eq!((after.claims, after.promised), (0, 0));
}

#[test]
fn whoever_waits_for_a_layer_that_is_never_written_is_told_at_the_deadline() {
    let stage = open(4, &options());
    let deadline = stage.now().plus(TIMEOUT);
    let mut put = wait(&stage, Layered::begin_by(stage.engine(), bring(0, 2, 1), Some(deadline))).unwrap();
    stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Write), When::From(1), Effect::Stuck));
    wait(&stage, put.next());
    let now = stage.now();
    assert!(now >= deadline && now.since(deadline) < MOMENT, "told {:?} after it", now.since(deadline));
    assert_eq!(put.why(), Some(Reason::DeadlinePassed));
    let after = stage.engine().holding();
    assert_eq!((after.claims, after.promised), (0, 0));
}

/// Puts and deletes until the oldest segments have been rewritten several times over; gives how many deletes there
/// were, and the most tombstones that a checkpoint left.
fn churn(stage: &SimStage, ledger: &RefCell<Ledger>) -> (u64, u64) {
    let (mut deletes, mut most) = (0, 0);
    for round in 0..150u64 {
        // Each key once: a later tombstone of a key takes the place of the one before.
        let keys = 100 + 4 * round..104 + 4 * round;
        for key in keys.clone() {
            wait(stage, act(stage.engine(), ledger, Act::Put(bring(key, 1, 10))));
        }
        for key in keys.skip(1) {
            wait(stage, act(stage.engine(), ledger, Act::Delete(Aim::Key(key))));
            deletes += 1;
        }
        if round >= 75 {
            wait(stage, act(stage.engine(), ledger, Act::Checkpoint));
            most = most.max(stage.engine().stats().tombstones);
        }
    }
    (deletes, most)
}

#[test]
fn what_it_hangs_on_stays_while_it_stands_still_and_afterwards() {
    let stage = open(6, &Options { budget_bytes: 2 << 20, eviction: EvictionPolicy::Lru, ..options() });
    let ledger = RefCell::new(Ledger::default());
    let fill = |keys: std::ops::Range<u64>| {
        let before = stage.engine().stats().counts.blocks_evicted;
        for key in keys {
            // Each hangs on nothing that is here.
            wait(&stage, act(stage.engine(), &ledger, Act::Put(bring(2 * key, 1, 10))));
        }
        stage.engine().stats().counts.blocks_evicted - before
    };
    let here = || wait(&stage, read_all(stage.engine()))[&(0, 0)].is_ok();
    wait(&stage, act(stage.engine(), &ledger, Act::Put(bring(0, 1, 1))));
    let mut put = wait(&stage, Layered::begin(stage.engine(), bring(1, 1, 2))).unwrap();
    wait(&stage, put.next());
    let evicted = fill(1000..1200);
    assert!(evicted > 60, "{evicted} evicted");
    assert!(here(), "what it hangs on is gone");
    finish(&stage, put, &ledger);
    assert!(here());
    // Its record hangs on it by now: of the two it does not go first.
    let both = || {
        let found = wait(&stage, read_all(stage.engine()));
        (found[&(0, 0)].is_ok(), found[&(0, 1)].is_ok())
    };
    for key in (1200..1400).step_by(5) {
        fill(key..key + 5);
        assert_ne!(both(), (false, true), "a block goes before what hangs on it");
    }
    stage.audit_all();
}

#[test]
fn one_that_stands_still_for_ever_keeps_no_tombstone() {
    // Some fifteen segments.
    let options = Options { budget_bytes: 2 << 20, ..options() };
    let most = |still: bool| {
        let stage = open(5, &options);
        let ledger = RefCell::new(Ledger::default());
        ledger.borrow_mut().allow_evicted_by(stage.engine());
        let mut put = still.then(|| wait(&stage, Layered::begin(stage.engine(), bring(8, 1, 2))).unwrap());
        if let Some(put) = &mut put {
            wait(&stage, put.next());
        }
        let counted = churn(&stage, &ledger);
        if let Some(put) = put {
            finish(&stage, put, &ledger);
        }
        let found = wait(&stage, read_all(stage.engine()));
        ledger.borrow_mut().allow_evicted_by(stage.engine());
        assert_eq!(ledger.borrow().violation(&found, Judge::Strict), None);
        assert_eq!(found[&(0, 8)].is_ok(), still, "what stood still is sealed all the same");
        stage.audit_all();
        let checked = examine(&directories(&stage.close().unwrap()), Level::Deep).unwrap();
        assert!(checked.findings.is_clean(), "{}", problems(&checked));
        counted
    };
    let (deletes, alone) = most(false);
    let (_, beside) = most(true);
    println!("{deletes} deletes: at most {alone} tombstones, {beside} beside one that stands still");
    assert!(alone > 0 && alone < deletes / 2, "tombstones must come and go: {alone} of {deletes}");
    assert!(beside <= alone, "{beside} tombstones beside one that stands still, {alone} without it");
}
