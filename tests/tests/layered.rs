//! Puts whose layers come one after the other, in the simulation: no block of such a put is found before the put is sealed,
//! whatever the power does, and no other caller waits for a put that stands still.
//!
//! `KVARTS_SEEDS=n` runs n seeds of each instead of the few that every build runs; a failure prints its seed.

use std::cell::RefCell;
use std::pin::pin;
use std::task::{Context, Waker};

use kvarts_contract::api::{DeleteRequest, KvStore, Target};
use kvarts_contract::clock::Clock;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::DirId;
use kvarts_fsck::check::Level;
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_tests::campaign::layered::Layered;
use kvarts_tests::campaign::{
    Act, Aim, Driven, Judge, Ledger, Poller, act, defects, drive, read_all, reopen, verify,
};
use kvarts_tests::fixture;
use kvarts_tests::sim::media::errno::EIO;
use kvarts_tests::sim::{Crash, CrashState, Effect, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage};
use kvarts_tests::witness::{directories, examine, problems};

fn seeds(few: u64) -> u64 {
    std::env::var("KVARTS_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(few)
}

/// Records of two blocks of the first column: a put of three makes two.
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

fn bring(column: usize, first: u64, count: u64, producer: u64, durable: bool) -> Poller {
    Poller { column, first, count, producer, durable, skew: if producer.is_multiple_of(3) { 512 } else { 0 } }
}

/// A put by layers that ends before its `stop`th layer, or is sealed. Between its layers, what `between` does.
async fn by_layers(
    store: &Store,
    ledger: &RefCell<Ledger>,
    bring: Poller,
    stop: Option<u32>,
    between: &mut dyn AsyncBetween,
) {
    // A put that was given up just now may not have ended.
    let mut begun = Layered::begin(store, bring).await;
    for _ in 0..500 {
        if !matches!(begun, Err(Reason::Busy(_))) {
            break;
        }
        let mut yielded = false;
        std::future::poll_fn(|_| match std::mem::replace(&mut yielded, true) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        })
        .await;
        begun = Layered::begin(store, bring).await;
    }
    let mut put = match begun {
        Ok(put) => put,
        Err(reason) => return ledger.borrow_mut().refusals.push(reason),
    };
    for layer in 0..put.layers() {
        if stop == Some(layer) {
            return;
        }
        put.next().await;
        between.happens(store, ledger, layer).await;
    }
    if stop.is_none() {
        put.seal(ledger).await;
    }
}

/// What happens between two layers.
trait AsyncBetween {
    fn happens<'a>(
        &'a mut self,
        store: &'a Store,
        ledger: &'a RefCell<Ledger>,
        layer: u32,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>>;
}

struct Nothing;

impl AsyncBetween for Nothing {
    fn happens<'a>(
        &'a mut self,
        _: &'a Store,
        _: &'a RefCell<Ledger>,
        _: u32,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(std::future::ready(()))
    }
}

/// An ordinary durable put, answered while the other stands still.
struct Beside;

impl AsyncBetween for Beside {
    fn happens<'a>(
        &'a mut self,
        store: &'a Store,
        ledger: &'a RefCell<Ledger>,
        layer: u32,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(act(store, ledger, Act::Put(bring(1, u64::from(layer), 1, 10 + u64::from(layer), true))))
    }
}

/// Deletes of what lies in a segment that others append to, while this one stands still.
struct Buried;

impl AsyncBetween for Buried {
    fn happens<'a>(
        &'a mut self,
        store: &'a Store,
        ledger: &'a RefCell<Ledger>,
        layer: u32,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(async move {
            act(store, ledger, Act::Delete(Aim::Key([9, 2, 9][layer as usize % 3]))).await;
            act(store, ledger, Act::Put(bring(0, 9, 1, 41 + u64::from(layer), true))).await;
            // Forgets what nothing on disk can be old enough for.
            act(store, ledger, Act::Checkpoint).await;
        })
    }
}

/// Everything that this is about, in a row.
async fn scene(store: &Store, ledger: &RefCell<Ledger>) {
    by_layers(store, ledger, bring(0, 0, 3, 4, true), None, &mut Beside).await;
    for stop in 0..=3 {
        by_layers(store, ledger, bring(0, 3, 2, 20 + u64::from(stop), true), Some(stop), &mut Nothing).await;
    }
    // Into the segment that they have left, over what they wrote.
    by_layers(store, ledger, bring(0, 3, 2, 5, false), None, &mut Nothing).await;
    // Tombstones of what lies in this segment and in the one before, and blocks that come again behind them.
    act(store, ledger, Act::Put(bring(0, 9, 1, 40, true))).await;
    by_layers(store, ledger, bring(1, 4, 3, 6, true), None, &mut Buried).await;
    act(store, ledger, Act::Delete(Aim::Key(4))).await;
    act(store, ledger, Act::Checkpoint).await;
    by_layers(store, ledger, bring(2, 0, 2, 7, true), None, &mut Nothing).await;
    by_layers(store, ledger, bring(0, 6, 1, 9, true), Some(2), &mut Nothing).await;
    act(store, ledger, Act::Put(bring(0, 7, 2, 8, true))).await;
}

struct Run {
    ledger: Ledger,
    state: CrashState,
    done: bool,
    operations: u64,
    struck: u64,
}

fn run(seed: Seed, cut: u64, rules: &[Rule]) -> Run {
    let world = SimWorld::new(seed.0, &WorldConfig::default());
    rules.iter().for_each(|rule| world.disk().inject(*rule));
    let (launcher, options) = (world.launcher(), options());
    let ledger = RefCell::new(Ledger::default());
    let whole = async {
        match Store::open(&launcher, &options).await {
            Ok((store, _executors)) => {
                scene(&store, &ledger).await;
                if let Err(error) = store.close().await {
                    ledger.borrow_mut().refusals.push(error.0);
                }
            }
            Err(error) => ledger.borrow_mut().refusals.push(error.0),
        }
    };
    let driven = drive(&world, cut, whole);
    assert!(!matches!(driven, Driven::Hung(_)), "seed {}: {driven:?}", seed.0);
    let (operations, struck) = (world.disk().operations().1, world.disk().struck());
    let done = matches!(driven, Driven::Done(()));
    Run { ledger: ledger.into_inner(), state: world.cut_power(), done, operations, struck }
}

/// What the checker says before recovery, what recovery finds, and what the checker says after it.
fn check(seed: Seed, state: &CrashState, crash: Crash, ledger: &Ledger, note: &str) {
    let image = state.image(crash);
    if let Ok(before) = examine(&directories(&image), Level::Deep) {
        assert!(before.findings.is_clean(), "{note}: before recovery\n{}", problems(&before));
    }
    let checked = verify(seed, &WorldConfig::default(), &options(), image, (ledger, Judge::Strict));
    let (opened, ..) = checked.unwrap_or_else(|why| panic!("{note}: {why}"));
    let after = examine(&directories(&opened.world.kill()), Level::Deep).expect("there is a store");
    assert!(after.findings.is_clean(), "{note}: after recovery\n{}", problems(&after));
}

#[test]
fn a_power_cut_at_every_operation_shows_nothing_that_was_not_sealed_and_loses_nothing_that_was() {
    let mut images = 0;
    for seed in (0..seeds(2)).map(Seed) {
        let whole = run(seed, u64::MAX, &[]);
        assert!(whole.done, "seed {}", seed.0);
        assert_eq!(defects(&whole.ledger), Vec::<&Reason>::new(), "seed {}", seed.0);
        assert_eq!(whole.ledger.refusals, [], "every put by layers finds room");
        let (group, coordinate) = fixture::columns()[1];
        let layers = fixture::shape(group, coordinate).layers().len() as u64;
        let (sealed, beside) = (3 + 3 + 2, 3 + 1 + layers + 2);
        assert_eq!(whole.ledger.acknowledged, sealed + beside);
        assert!(whole.ledger.deletes > 0);
        for cut in 1..=whole.operations {
            let run = run(seed, cut, &[]);
            let mut chosen = vec![Crash::LoseAll, Crash::KeepAll];
            let mut all = run.state.enumerate(4, seed.nth(cut));
            let mut rng = seed.nth(cut).rng();
            for _ in 0..4 {
                if !all.is_empty() {
                    chosen.push(all.swap_remove(rng.index(all.len())));
                }
            }
            for crash in chosen {
                let note = format!("seed {}, cut {cut}, {crash:?}", seed.0);
                check(seed.nth(cut), &run.state, crash, &run.ledger, &note);
                images += 1;
            }
        }
    }
    println!("{images} images");
    assert!(images > 300, "too few cuts to mean anything: {images}");
}

#[test]
fn a_write_or_flush_that_fails_is_not_acknowledged_and_leaves_nothing() {
    for kind in [OpKind::Write, OpKind::Flush] {
        for effect in [Effect::Errno(EIO), Effect::Torn(EIO), Effect::DropDirty] {
            if (effect == Effect::DropDirty) != (kind == OpKind::Flush) && effect != Effect::Errno(EIO) {
                continue;
            }
            let mut n = 1;
            loop {
                let run = run(Seed(7), u64::MAX, &[Rule::new(Which::Kind(kind), When::Nth(n), effect)]);
                if run.struck == 0 {
                    break;
                }
                let note = format!("{kind:?} {n} {effect:?}");
                assert_eq!(defects(&run.ledger), Vec::<&Reason>::new(), "{note}");
                for crash in [Crash::LoseAll, Crash::KeepAll] {
                    check(Seed(n), &run.state, crash, &run.ledger, &note);
                }
                n += 1;
            }
            assert!(n > 2, "{kind:?} was never struck");
        }
    }
}

/// Waits in a stage.
fn wait<T>(stage: &SimStage, future: impl Future<Output = T>) -> T {
    match drive(stage.world(), u64::MAX, future) {
        Driven::Done(value) => value,
        Driven::Cut => panic!("cut without a limit"),
        Driven::Hung(hang) => panic!("it hangs: {hang}"),
    }
}

#[test]
fn one_that_is_given_up_after_any_layer_changes_no_book_and_its_segment_is_used_again() {
    let stage = SimStage::open(&SimWorld::new(1, &WorldConfig::default()), &options()).unwrap();
    let ledger = RefCell::new(Ledger::default());
    wait(&stage, act(stage.engine(), &ledger, Act::Put(bring(0, 0, 2, 1, true))));
    wait(&stage, by_layers(stage.engine(), &ledger, bring(0, 2, 2, 2, true), None, &mut Nothing));
    // Makes the segment that the next ones leave to each other.
    wait(&stage, by_layers(stage.engine(), &ledger, bring(0, 4, 2, 30, true), Some(0), &mut Nothing));
    stage.rest();
    stage.audit_all();
    let books = || {
        let space = stage.engine().stats().space;
        (space.shards, space.namespaces, stage.engine().segments())
    };
    let before = books();
    for stop in 0..=3u32 {
        wait(&stage, by_layers(stage.engine(), &ledger, bring(0, 4, 2, 30, true), Some(stop), &mut Nothing));
        stage.rest();
        stage.audit_all();
        assert_eq!(books(), before, "given up after {stop} layers");
    }
    wait(&stage, by_layers(stage.engine(), &ledger, bring(0, 4, 2, 31, true), None, &mut Nothing));
    assert_eq!(stage.engine().segments().len(), before.2.len(), "it goes where those went");
    assert_eq!(ledger.borrow().refusals, []);
    let found = wait(&stage, read_all(stage.engine()));
    assert_eq!(ledger.borrow().violation(&found, Judge::Strict), None);
    let media = stage.close().unwrap();
    let checked = examine(&directories(&media), Level::Deep).unwrap();
    assert!(checked.findings.is_clean(), "{}", problems(&checked));
    assert_eq!(checked.blocks, 6);
}

#[test]
fn a_store_closes_under_one_that_stands_still_and_has_nothing_of_it() {
    let stage = SimStage::open(&SimWorld::new(2, &WorldConfig::default()), &options()).unwrap();
    let mut put = wait(&stage, Layered::begin(stage.engine(), bring(0, 0, 2, 1, true))).unwrap();
    wait(&stage, put.next());
    let before = stage.now();
    let world = stage.world().clone();
    let media = stage.close().unwrap();
    assert!(world.clock().now().since(before) < std::time::Duration::from_secs(5), "it was waited for");
    assert!(put.ended(), "it is told");
    let checked = examine(&directories(&media), Level::Deep).unwrap();
    assert!(checked.findings.is_clean() && checked.blocks == 0, "{}", problems(&checked));
}

#[test]
fn what_it_leaves_empty_in_the_segment_before_is_given_back_before_any_block_is_evicted() {
    let options = Options { budget_bytes: 4 << 20, ..options() };
    let stage = SimStage::open(&SimWorld::new(9, &WorldConfig::default()), &options).unwrap();
    let ledger = RefCell::new(Ledger::default());
    wait(&stage, act(stage.engine(), &ledger, Act::Put(bring(0, 0, 1, 1, true))));
    // Each closes a segment that holds one block, in a store of some thirty segments.
    for n in 0..40 {
        let producer = 50 + n;
        wait(
            &stage,
            by_layers(stage.engine(), &ledger, bring(2, n % 11, 1, producer, true), None, &mut Nothing),
        );
        wait(&stage, act(stage.engine(), &ledger, Act::Delete(Aim::Key(n % 11 + 1))));
        stage.audit();
    }
    assert_eq!(stage.engine().stats().counts.blocks_evicted, 0);
    let found = wait(&stage, read_all(stage.engine()));
    assert!(found[&(0, 0)].is_ok(), "the first block is still here");
    stage.audit_all();
}

#[test]
fn blocks_of_few_bytes_are_put_whole() {
    let options = Options { segment_bytes: 1 << 20, budget_bytes: 64 << 20, ..options() };
    let stage = SimStage::open(&SimWorld::new(10, &WorldConfig::default()), &options).unwrap();
    let few = wait(&stage, Layered::begin(stage.engine(), bring(1, 0, 1, 1, true)));
    assert!(matches!(few, Err(Reason::Shape(_))));
    assert!(wait(&stage, Layered::begin(stage.engine(), bring(0, 0, 3, 1, true))).is_ok());
}

#[test]
fn memory_is_the_callers_again_only_when_its_layer_has_been_written() {
    let world = SimWorld::new(8, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    // No write ends from now on.
    world.disk().inject(Rule::new(Which::Kind(OpKind::Write), When::From(1), Effect::Stuck));
    let mut put = wait(&stage, Layered::begin(stage.engine(), bring(0, 0, 2, 1, true))).unwrap();
    let mut offered = pin!(put.next());
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..3000 {
        world.step();
        assert!(offered.as_mut().poll(&mut context).is_pending(), "given back while its write is under way");
    }
    assert!(world.disk().struck() >= 2, "the segment's header, and the layer");
}

#[test]
fn a_delete_does_not_wait_for_one_that_stands_still_and_it_is_refused_when_it_is_sealed() {
    let stage = SimStage::open(&SimWorld::new(3, &WorldConfig::default()), &options()).unwrap();
    let ledger = RefCell::new(Ledger::default());
    let mut put = wait(&stage, Layered::begin(stage.engine(), bring(0, 0, 3, 1, true))).unwrap();
    wait(&stage, put.next());
    let namespace = stage.engine().register(&fixture::identity("campaign"), &fixture::geometry()).unwrap();
    let (group, coordinate) = fixture::columns()[0];
    let target = Target::Keys { column: Some((group, coordinate)), keys: vec![fixture::key(7, 1)] };
    let deleted = stage.engine().delete(DeleteRequest { namespace, target, deadline: None });
    wait(&stage, deleted).unwrap().unwrap();
    while put.offered() < put.layers() {
        wait(&stage, put.next());
    }
    wait(&stage, put.seal(&ledger));
    assert_eq!(ledger.borrow().refusals, [Reason::Deleted, Reason::Deleted, Reason::Deleted]);
    let found = wait(&stage, read_all(stage.engine()));
    assert!(found.values().all(Result::is_err), "nothing of it is here");
    stage.audit_all();
}

#[test]
fn blocks_that_are_here_or_on_their_way_are_put_whole_and_puts_by_layers_are_few_at_once() {
    let stage = SimStage::open(&SimWorld::new(4, &WorldConfig::default()), &options()).unwrap();
    let ledger = RefCell::new(Ledger::default());
    let begin = |bring| wait(&stage, Layered::begin(stage.engine(), bring));
    let mut held = vec![begin(bring(0, 0, 1, 1, true)).unwrap()];
    assert!(matches!(begin(bring(0, 0, 2, 2, true)), Err(Reason::Busy(_))), "one of them is on its way");
    wait(&stage, act(stage.engine(), &ledger, Act::Put(bring(0, 1, 1, 3, true))));
    assert!(matches!(begin(bring(0, 1, 2, 4, true)), Err(Reason::Busy(_))), "one of them is here");
    for n in 2..12 {
        held.extend(begin(bring(1, n, 1, 5, true)));
    }
    assert!(held.len() <= 4, "{} at once", held.len());
    assert_eq!(ledger.borrow().refusals, []);
    drop(held);
    stage.rest();
    stage.audit_all();
    assert!(begin(bring(0, 0, 1, 6, true)).is_ok(), "they are forgotten when they end");
}

/// A caller that can read a disk can copy pages that were headers there. Written as a payload, and left without their own
/// header, they prove nothing: not under the generation in which they were read, and not under a later one.
#[test]
fn pages_of_headers_that_a_caller_writes_as_its_payload_are_no_records() {
    let world = SimWorld::new(5, &WorldConfig::default());
    let stage = SimStage::open(&world, &options()).unwrap();
    let ledger = RefCell::new(Ledger::default());
    wait(&stage, by_layers(stage.engine(), &ledger, bring(0, 0, 2, 1, true), None, &mut Nothing));
    let media = stage.world().disk().media();
    let segment = media.paths().into_iter().find(|path| path.ends_with(".kvs") || path.contains("segment"));
    let path = segment.expect("a segment file");
    let (dir, name) = path.split_once('/').expect("a directory and a name");
    let bytes = media.contents(DirId(dir.parse().unwrap()), name).expect("it can be read");
    let pages: Vec<Vec<u8>> = bytes.chunks(4096).take(8).map(<[u8]>::to_vec).collect();
    let mut put = wait(&stage, Layered::begin(stage.engine(), bring(0, 4, 2, 2, true))).unwrap();
    wait(&stage, put.forge(&pages));
    let state = stage.cut_power();
    for crash in [Crash::KeepAll, Crash::LoseAll, Crash::Random(3)] {
        let opened = reopen(Seed(6), &WorldConfig::default(), &options(), state.image(crash)).unwrap();
        let found = match drive(&opened.world, u64::MAX, read_all(&opened.store)) {
            Driven::Done(found) => found,
            _ => panic!("reading ends"),
        };
        assert_eq!(ledger.borrow().violation(&found, Judge::Strict), None, "{crash:?}");
        assert_eq!(found.values().filter(|state| state.is_ok()).count(), 2, "{crash:?}");
        println!("{crash:?}: {:?}", opened.store.recovery());
    }
}
