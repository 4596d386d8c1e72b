//! A store that is stopped, or cut off, and started again and again keeps what it has: a start takes room for what it
//! writes and no more.

use kvarts_contract::api::{BlockOutcome, ContainsRequest, Presence};
use kvarts_fsck::check::Level;
use kvarts_store::engine::{EvictionPolicy, Limits, Options};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::sim::{Crash, Effect, Media, OpKind, Rule, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::SimStage;
use kvarts_tests::witness::{directories, examine, problems};

const SEGMENT: u64 = 512 << 10;
const RESTARTS: u64 = 60;
/// What a file system answers that makes no holes.
const EOPNOTSUPP: i32 = 95;

fn options(segments: u64) -> Options {
    Options {
        shards_per_directory: 2,
        segment_bytes: SEGMENT,
        budget_bytes: segments * SEGMENT,
        eviction: EvictionPolicy::Lru,
        executors: 1,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// How a run of the store ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Stop,
    /// The power is cut when everything under way has ended.
    Cut,
    /// The power is cut at once when the put is acknowledged.
    CutAtOnce,
}

/// What all runs did together, the first aside.
#[derive(Clone, Copy, Default, Debug)]
struct Sum {
    evicted: u64,
    written: u64,
    moved: u64,
    /// Segment files after the last.
    files: usize,
}

fn here(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> Vec<u64> {
    let (group, coordinate) = pages();
    let names = desk.keys(keys.clone());
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &names, lease: None };
    let found = desk.stage.store().contains(&request).unwrap().presence;
    keys.zip(found).filter(|(_, one)| *one == Presence::Here).map(|(n, _)| n).collect()
}

fn put(desk: &Desk<'_>, number: u64) {
    let outcomes = desk.outcomes(desk.request(pages(), &desk.keys(number..number + 1), 1));
    assert_eq!(outcomes, [BlockOutcome::Stored], "{number}");
}

/// Puts `first` blocks, then one after each of `RESTARTS` restarts. Gives what the restarts did, and which blocks were
/// here after the first run and after the last.
fn restart(seed: u64, options: &Options, first: u64, end: End, holes: bool) -> (Sum, Vec<u64>, Vec<u64>) {
    let mut media: Option<Media> = None;
    let (mut sum, mut before, mut after) = (Sum::default(), Vec::new(), Vec::new());
    for run in 0..=RESTARTS {
        let config = WorldConfig::default();
        let world = match media.take() {
            None => SimWorld::new(seed, &config),
            Some(media) => SimWorld::with_media(seed + run, &config, media),
        };
        if !holes {
            let rule = Rule::new(Which::Kind(OpKind::Punch), When::From(1), Effect::Errno(EOPNOTSUPP));
            world.disk().inject(rule);
        }
        let stage = SimStage::open(&world, options).unwrap();
        let desk = Desk::new(&stage, "restarts");
        if run == 0 {
            (0..first).for_each(|number| put(&desk, number));
        } else {
            put(&desk, first + run - 1);
            let put = stage.engine().stats().counts;
            if end != End::CutAtOnce {
                stage.audit_all();
            }
            let counts = stage.engine().stats().counts;
            sum.evicted += counts.blocks_evicted;
            sum.written += put.record_bytes_written;
            sum.moved += counts.moved_bytes_written;
            assert_eq!(counts.blocks_quarantined, 0);
        }
        after = here(&desk, 0..first + run);
        assert!(run == 0 || after.contains(&(first + run - 1)), "{run}");
        if run == 0 {
            before.clone_from(&after);
        }
        sum.files = stage.engine().segments().len();
        let image = match (end, run % 2) {
            (End::Stop, _) => stage.close().unwrap(),
            (_, 0) => stage.cut_power().image(Crash::LoseAll),
            (_, _) => stage.cut_power().image(Crash::KeepAll),
        };
        let checked = examine(&directories(&image), Level::Deep).unwrap();
        assert!(checked.findings.is_clean(), "{end:?}, {run}\n{}", problems(&checked));
        media = Some(image);
    }
    let world = SimWorld::with_media(seed, &WorldConfig::default(), media.unwrap());
    let stage = SimStage::open(&world, options).unwrap();
    let desk = Desk::new(&stage, "restarts");
    assert_eq!(here(&desk, 0..first + RESTARTS), after);
    after.iter().for_each(|n| desk.expect(pages(), &desk.keys(*n..n + 1), 1));
    stage.audit_all();
    (sum, before, after)
}

/// The blocks take a third of the budget, and each shard's open segment a fifth of what is left.
#[test]
fn restarts_evict_nothing_where_there_is_room_for_everything() {
    for (case, end) in [End::Stop, End::Cut, End::CutAtOnce].into_iter().enumerate() {
        let (sum, before, after) = restart(5000 + 100 * case as u64, &options(12), 40, end, true);
        println!("{end:?}: {sum:?}");
        assert_eq!(before.len(), 40, "{end:?}");
        assert_eq!(after.len() as u64, 40 + RESTARTS, "{end:?}: {sum:?}");
        assert_eq!(sum.evicted, 0, "{end:?}");
        assert!(sum.moved <= 3 * sum.written, "{end:?}: {sum:?}");
        // What is cut off at once moves nothing: the next start that lives longer does.
        assert!(end == End::CutAtOnce || sum.files <= 2 * 12, "{end:?}: {sum:?}");
    }
}

/// In a full store something goes for what comes, and little more.
#[test]
fn restarts_of_a_full_store_evict_what_they_write_and_no_segment_for_each() {
    for (case, end) in [End::Stop, End::Cut, End::CutAtOnce].into_iter().enumerate() {
        let (sum, before, after) = restart(5500 + 100 * case as u64, &options(12), 400, end, true);
        println!("{end:?}: {} before, {} after, {sum:?}", before.len(), after.len());
        assert!(before.len() > 100 && before.len() < 400, "{end:?}: {}", before.len());
        // A segment holds some 20 blocks: half an open one for each shard, and once one in advance.
        assert!(sum.evicted <= RESTARTS + 5 * 20, "{end:?}: {sum:?}");
        assert!(after.len() + 100 >= before.len(), "{end:?}: {} of {}", after.len(), before.len());
    }
}

#[test]
fn a_start_gives_back_what_the_stop_before_it_could_not() {
    let (config, options) = (WorldConfig::default(), options(64));
    let world = SimWorld::new(5900, &config);
    let stage = SimStage::open(&world, &options).unwrap();
    world.disk().inject(Rule::new(Which::Kind(OpKind::Punch), When::From(1), Effect::Errno(5)));
    put(&Desk::new(&stage, "restarts"), 0);
    assert!(stage.engine().stats().allocated_bytes > SEGMENT);
    let image = stage.close().unwrap();
    let stage = SimStage::open(&SimWorld::with_media(5901, &config, image), &options).unwrap();
    let left = stage.engine().stats().allocated_bytes;
    assert!(left < SEGMENT / 4, "{left} bytes for one block");
    assert_eq!(here(&Desk::new(&stage, "restarts"), 0..1), [0]);
}

/// What a segment lacks cannot be given back there, so the few blocks in it are moved, and then those of segments that are
/// half full at most. All blocks would fit into a quarter of the budget.
#[test]
fn restarts_where_the_file_system_makes_no_holes_move_before_they_evict() {
    for (case, end) in [End::Stop, End::Cut].into_iter().enumerate() {
        let options = Options { shards_per_directory: 1, ..options(16) };
        let (sum, before, after) = restart(5800 + 100 * case as u64, &options, 8, end, false);
        println!("{end:?}: {sum:?}");
        assert_eq!(before.len(), 8, "{end:?}");
        assert_eq!((sum.evicted, after.len() as u64), (0, 8 + RESTARTS), "{end:?}: {sum:?}");
        assert!(sum.moved <= 4 * sum.written, "{end:?}: {sum:?}");
    }
}
