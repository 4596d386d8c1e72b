//! Eviction in the simulation: blocks leave one by one, holes are punched, and power cuts, faults and the checker find
//! what the store says.
//!
//! `KVARTS_SEEDS=n` runs n seeds of each instead of what `kvarts_tests::depth` says; a failure prints its seed.

use std::cell::RefCell;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, Durability, LeaseTerms, MatchRequest, Parent, PlanTerms,
    Presence, PutRequest, Target,
};
use kvarts_fsck::check::Level;
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::spec::{RoleClass, shipped};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, Identity, NamespaceId, Requirements};
use kvarts_planner::cost::{Sample, Times};
use kvarts_store::engine::{EvictionPolicy, Limits, Options, Store};
use kvarts_tests::campaign::{Driven, Judge, Ledger, defects, observe, reopen, verify, work};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::depth::{depth, seeds};
use kvarts_tests::fixture::{self, BLOCK_TOKENS, Style};
use kvarts_tests::sim::{
    Crash, CrashState, Effect, Media, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig,
};
use kvarts_tests::stage::{SimStage, Stage, ask, drive};
use kvarts_tests::witness::{directories, examine, media, problems, recoverys_blocks};

const SEGMENT: u64 = 128 << 10;
/// What a file system answers that makes no holes.
const EOPNOTSUPP: i32 = 95;

fn here(desk: &Desk<'_>, keys: std::ops::Range<u64>) -> Vec<u64> {
    let (group, coordinate) = pages();
    let names = desk.keys(keys.clone());
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &names, lease: None };
    let found = desk.stage.store().contains(&request).unwrap().presence;
    keys.zip(found).filter(|(_, one)| *one == Presence::Here).map(|(n, _)| n).collect()
}

/// A store that is always full.
fn options(seed: Seed) -> Options {
    let mut rng = seed.child("options").rng();
    let shards = 1 + rng.below(2);
    Options {
        shards_per_directory: shards as u32,
        segment_bytes: SEGMENT,
        budget_bytes: (2 + 2 * shards) * SEGMENT,
        eviction: EvictionPolicy::ALL[rng.index(2)],
        executors: 1 + rng.index(2),
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// One in which segments hold several records.
fn roomy(seed: Seed) -> Options {
    let (segment_bytes, budget_bytes) = (256 << 10, 3 << 20);
    Options { executors: 1, shards_per_directory: 2, segment_bytes, budget_bytes, ..options(seed) }
}

struct Ran {
    ledger: Ledger,
    state: CrashState,
    operations: u64,
    evicted: u64,
    punched: u64,
}

/// A workload up to some operation of the disk. After each it is noted what the store has evicted.
fn run(seed: Seed, ops: usize, cut: u64, rules: &[Rule]) -> Ran {
    let world = SimWorld::new(seed.0, &WorldConfig::default());
    rules.iter().for_each(|rule| world.disk().inject(*rule));
    let (launcher, options) = (world.launcher(), options(seed));
    let ledger = RefCell::new(Ledger::default());
    let opened: RefCell<Option<Store>> = RefCell::default();
    let counts = RefCell::new((0, 0));
    let mut rng = seed.child("work").rng();
    let whole = async {
        let Ok((store, _executors)) = Store::open(&launcher, &options).await else { return };
        opened.replace(Some(store.clone()));
        work(&store, &ledger, &mut rng, ops).await;
        ledger.borrow_mut().allow_evicted_by(&store);
        let done = store.stats().counts;
        counts.replace((done.blocks_evicted, done.bytes_punched));
        let _ = store.close().await;
        ledger.borrow_mut().allow_evicted_by(&store);
        opened.take();
    };
    let mut watch = || {
        if let Some(store) = opened.borrow().as_ref() {
            ledger.borrow_mut().allow_evicted_by(store);
        }
    };
    let driven = observe(&world, cut, &mut watch, whole);
    assert!(!matches!(driven, Driven::Hung(_)), "seed {}: {driven:?}", seed.0);
    let operations = world.disk().operations().1;
    let (evicted, punched) = counts.into_inner();
    Ran { state: world.cut_power(), ledger: ledger.into_inner(), operations, evicted, punched }
}

fn crashes(state: &CrashState, seed: Seed, some: usize) -> Vec<Crash> {
    let mut all = state.enumerate(some, seed);
    let mut rng = seed.child("pick").rng();
    let mut chosen = vec![Crash::LoseAll, Crash::KeepAll];
    for _ in 0..some {
        if !all.is_empty() {
            chosen.push(all.swap_remove(rng.index(all.len())));
        }
    }
    chosen
}

/// The engine and the checker say the same of an image, and nothing is wrong with it, before recovery and after.
fn check(seed: Seed, image: Media, ledger: &Ledger, note: &str) -> u64 {
    let before = match examine(&directories(&image), Level::Deep) {
        Ok(checked) => checked,
        Err(_) => return 0,
    };
    assert!(before.findings.is_clean(), "{note}: before recovery\n{}", problems(&before));
    let opened = reopen(seed, &WorldConfig::default(), &options(seed), image.clone()).unwrap();
    assert_eq!(before.blocks, recoverys_blocks(opened.store.recovery()), "{note}");
    let evicted = opened.store.recovery().iter().map(|report| report.evicted).sum();
    let after = examine(&directories(&opened.world.kill()), Level::Deep).unwrap();
    assert!(after.findings.is_clean(), "{note}: after recovery\n{}", problems(&after));
    let verified = verify(seed, &WorldConfig::default(), &options(seed), image, (ledger, Judge::Strict));
    verified.unwrap_or_else(|why| panic!("{note}: {why}"));
    evicted
}

#[test]
fn power_cuts_while_blocks_are_evicted_leave_each_here_or_gone_and_no_delete_undone() {
    let (mut evicted, mut punched, mut found, mut images) = (0, 0, 0, 0);
    for seed in (4000..4000 + seeds(10, 10)).map(Seed) {
        let whole = run(seed, 90, u64::MAX, &[]);
        assert_eq!(defects(&whole.ledger), Vec::<&_>::new(), "seed {}", seed.0);
        (evicted, punched) = (evicted + whole.evicted, punched + whole.punched);
        let mut rng = seed.child("cuts").rng();
        for _ in 0..depth(3, 8) {
            // Most of it: at first the store is not full.
            let cut = rng.between(whole.operations / 3, whole.operations);
            let ran = run(seed, 90, cut, &[]);
            for crash in crashes(&ran.state, seed.nth(cut), 3) {
                let note = format!("seed {}, cut {cut}, {crash:?}", seed.0);
                found += check(seed, ran.state.image(crash), &ran.ledger, &note);
                images += 1;
            }
        }
    }
    println!(
        "{images} images, {evicted} blocks evicted, {punched} bytes punched, {found} blocks found evicted"
    );
    assert!(evicted > 60 && punched > 512 << 10 && found > depth(30, 100), "{evicted} {punched} {found}");
}

#[test]
fn where_the_file_system_makes_no_holes_whole_segments_are_emptied() {
    let world = SimWorld::new(4200, &WorldConfig::default());
    let no_holes = Rule::new(Which::Kind(OpKind::Punch), When::From(1), Effect::Errno(EOPNOTSUPP));
    world.disk().inject(no_holes);
    let stage = SimStage::open(&world, &roomy(Seed(4200))).unwrap();
    let desk = Desk::new(&stage, "whole");
    for n in 0..120 {
        let outcomes = desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
        assert_eq!(outcomes, [BlockOutcome::Stored], "{n}");
        stage.audit();
    }
    let counts = stage.engine().stats().counts;
    assert_eq!(counts.bytes_punched, 0);
    assert!(counts.segments_recycled > 3 && counts.blocks_evicted > 30, "{counts:?}");
    assert!(world.disk().struck() <= 64, "it is asked for holes once: {}", world.disk().struck());
    stage.audit_all();
}

/// On xfs with large blocks, ext4 with clusters or a realtime device a hole of a page is zeros, and nothing is given back.
#[test]
fn where_holes_are_coarser_than_a_page_what_was_evicted_never_becomes_damage() {
    for (case, unit) in [(0, 16 << 10), (1, 64 << 10)] {
        let config = WorldConfig::default();
        let media = Media::new(config.disk.dirs, config.disk.capacity).with_unit(unit);
        let world = SimWorld::with_media(4210 + case, &config, media);
        let options = roomy(Seed(4210 + case));
        let stage = SimStage::open(&world, &options).unwrap();
        let desk = Desk::new(&stage, "coarse");
        for n in 0..100 {
            desk.outcomes(desk.request(pages(), &desk.keys(4 * n..4 * n + 4), 1));
            stage.advance(Duration::from_secs(20));
            // Of each record the first block is used, so the others would go alone.
            let first = desk.keys(4 * (n / 2)..4 * (n / 2) + 1);
            desk.read(&desk.read_request(pages(), &first));
            stage.audit();
        }
        let counts = stage.engine().stats().counts;
        assert!(counts.segments_recycled > 3 && counts.blocks_evicted > 30, "{counts:?}");
        assert_eq!(counts.bytes_punched, 0, "units of {unit}");
        let facts = drive(&world, stage.engine().io()).unwrap().unwrap();
        let told = |line: &String| line.contains("cannot punch holes of 4096 bytes");
        assert!(facts.iter().all(|(facts, _)| facts.warnings.iter().any(told)), "{facts:?}");
        for n in here(&desk, 0..400) {
            desk.expect(pages(), &desk.keys(n..n + 1), 1);
        }
        let state = stage.cut_power();
        for crash in [Crash::LoseAll, Crash::KeepAll] {
            let image = state.image(crash);
            let checked = examine(&directories(&image), Level::Deep).unwrap();
            assert!(checked.findings.is_clean(), "units of {unit}, {crash:?}\n{}", problems(&checked));
            let stage = SimStage::open(&SimWorld::with_media(1, &config, image), &options).unwrap();
            let desk = Desk::new(&stage, "coarse");
            let left = here(&desk, 0..400);
            assert!(left.len() > 20, "{left:?}");
            left.iter().for_each(|n| desk.expect(pages(), &desk.keys(*n..n + 1), 1));
            assert_eq!(stage.engine().stats().counts.blocks_quarantined, 0);
        }
    }
}

/// A file system that discards what it frees has the device do it at once: four holes at a time, of a segment each, keep
/// reads waiting for as long as all of them take.
#[test]
fn a_device_makes_one_hole_at_a_time_and_none_of_more_than_a_megabyte() {
    const TAKES_US: u64 = 1000;
    let mut config = WorldConfig::default();
    config.disk.latency.meta = (TAKES_US, TAKES_US);
    let world = SimWorld::new(4250, &config);
    let (segment_bytes, budget_bytes) = (4 << 20, 16 << 20);
    let options =
        Options { executors: 1, shards_per_directory: 1, segment_bytes, budget_bytes, ..roomy(Seed(4250)) };
    let stage = SimStage::open(&world, &options).unwrap();
    let desk = Desk::new(&stage, "pieces");
    let (mut holes, mut longest) = (std::collections::BTreeMap::new(), 0);
    let (group, coordinate) = pages();
    for n in 0.. {
        let keys = desk.keys(16 * n..16 * (n + 1));
        desk.outcomes(desk.request(pages(), &keys, 1));
        // Of every five neighbours one stays, so no segment goes as a whole.
        if n < 40 && n % 5 == 0 {
            let terms = LeaseTerms { hold: Duration::from_secs(3600), tenant: 1, cap_bytes: u64::MAX };
            let lease = Some(terms);
            let request =
                ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease };
            stage.store().contains(&request).unwrap();
        }
        let log = world.disk().log();
        for event in log.tail().filter(|event| event.op == "punch") {
            assert!(event.len <= 1 << 20, "{event}");
            longest = longest.max(event.len);
            holes.insert(event.step, event.time);
        }
        if holes.len() >= 12 && longest == 1 << 20 {
            break;
        }
        assert!(n < 200, "{} holes, the longest of {longest} bytes", holes.len());
    }
    for (before, after) in holes.values().zip(holes.values().skip(1)) {
        assert!(after.since(*before) >= Duration::from_micros(TAKES_US), "two holes at once: {holes:?}");
    }
}

#[test]
fn holes_that_became_written_zeros_are_damage_and_named() {
    let (mut holed, mut named) = (0, 0);
    for seed in (4300..4306).map(Seed) {
        let ran = run(seed, 120, u64::MAX, &[]);
        let disks = directories(&ran.state.image(Crash::KeepAll));
        assert!(examine(&disks, Level::Deep).unwrap().findings.is_clean());
        for disk in &disks {
            for path in disk.files() {
                // Planted anew: the same bytes, without holes.
                holed += disk.holes(&path).len();
                let bytes = disk.contents(&path).unwrap();
                disk.plant(&path, bytes);
            }
        }
        named += u64::from(!examine(&disks, Level::Deep).unwrap().findings.is_clean());
        // And the engine serves no zeros for blocks.
        let (config, judge) = (WorldConfig::default(), (&ran.ledger, Judge::BytesOnly));
        let verified = verify(seed, &config, &options(seed), media(&disks), judge);
        verified.unwrap_or_else(|why| panic!("seed {}: {why}", seed.0));
    }
    assert!(holed > 0 && named > 0, "{holed} holes, {named} stores with written zeros where records lay");
}

#[test]
fn a_store_that_is_full_for_long_keeps_its_books_its_files_and_its_memory() {
    for policy in EvictionPolicy::ALL {
        let world = SimWorld::new(4400, &WorldConfig::default());
        let options = Options { eviction: policy, ..roomy(Seed(4400)) };
        let stage = SimStage::open(&world, &options).unwrap();
        let desk = Desk::new(&stage, "long");
        let mut rng = Seed(4400).child(policy.name()).rng();
        let mut files = Vec::new();
        for round in 0..depth(200, 400u64) {
            let first = 4 * rng.below(100);
            desk.outcomes(desk.request(pages(), &desk.keys(first..first + 4), 1));
            // Some are used again and again.
            let again = 4 * rng.below(8);
            if here(&desk, again..again + 1).len() == 1 {
                desk.expect(pages(), &desk.keys(again..again + 1), 1);
            }
            stage.advance(Duration::from_millis(rng.below(500)));
            if round % 20 == 0 {
                stage.audit_all();
                files.push(stage.engine().segments().len());
            }
        }
        let counts = stage.engine().stats().counts;
        assert!(counts.bytes_punched > 0 && counts.blocks_quarantined == 0, "{}: {counts:?}", policy.name());
        let most = files.iter().max().copied().unwrap_or(0);
        assert!(most <= 4 * 12, "{}: {files:?}", policy.name());
        stage.close().unwrap();
    }
}

/// A hole ends a segment's file; one that is emptied as a whole is rewritten. A disk that is fast writes its budget in
/// a few seconds, so that the blocks of several segments are equally old.
#[test]
fn a_store_that_is_written_round_and_round_empties_whole_segments_and_makes_no_holes() {
    // Four times round either way.
    let (budget_mib, puts) = depth((6, 800), (24, 3000));
    for policy in EvictionPolicy::ALL {
        let world = SimWorld::new(4450, &WorldConfig::default());
        let options = Options { eviction: policy, budget_bytes: budget_mib << 20, ..roomy(Seed(4450)) };
        let stage = SimStage::open(&world, &options).unwrap();
        let desk = Desk::new(&stage, "round");
        for n in 0..puts {
            let outcomes = desk.outcomes(desk.request(pages(), &desk.keys(n..n + 1), 1));
            assert_eq!(outcomes, [BlockOutcome::Stored], "{n}");
            stage.advance(Duration::from_millis(1));
        }
        let counts = stage.engine().stats().counts;
        assert!(counts.segments_recycled > 8, "{}: {counts:?}", policy.name());
        assert_eq!(counts.bytes_punched, 0, "{}: {counts:?}", policy.name());
        stage.audit_all();
    }
}

/// Two models whose blocks have as many bytes: how long their engines compute a token is told with each plan.
#[test]
fn blocks_that_take_longer_to_compute_stay_longer_once_their_engine_has_said_so() {
    let left = |told: Option<[f64; 2]>| {
        let world = SimWorld::new(4470, &WorldConfig::default());
        // Of a record of one block that block is the last one, which no weight keeps for long: here a record has four.
        let (eviction, segment_bytes, budget_bytes) = (EvictionPolicy::Weighted, 512 << 10, 12 << 20);
        let options = Options { eviction, segment_bytes, budget_bytes, ..roomy(Seed(4470)) };
        let stage = SimStage::open(&world, &options).unwrap();
        let desks = ["one", "other"].map(|name| Desk::new(&stage, name));
        for (desk, ms) in desks.iter().zip(told.into_iter().flatten()) {
            tell_times(desk, ms);
        }
        for n in 0..150 {
            for desk in &desks {
                let outcomes = desk.outcomes(desk.request(pages(), &desk.keys(4 * n..4 * n + 4), 1));
                assert!(outcomes.iter().all(|one| *one == BlockOutcome::Stored), "{n}: {outcomes:?}");
            }
            stage.advance(Duration::from_secs(2));
        }
        desks.map(|desk| (0..150).map(|n| here(&desk, 4 * n..4 * n + 4).len()).sum::<usize>())
    };
    let ([one, other], [slow, fast], [faster, slower]) =
        (left(None), left(Some([10_000.0, 1.0])), left(Some([1.0, 10_000.0])));
    assert!(one.abs_diff(other) <= one.min(other) / 8, "{one} and {other}");
    assert!(4 * slow > 5 * fast && slow > one, "{slow} and {fast} in place of {one} and {other}");
    assert!(4 * slower > 5 * faster && slower > other, "{faster} and {slower} in place of {one} and {other}");
}

/// Two shipped models with equal traffic, of which no engine ever asks for a plan. A token of qwen3-next has a third of the bytes
/// that one of deepseek-v3 has, and is computed thirteen times as fast.
#[test]
fn without_a_plan_a_full_store_keeps_of_two_models_the_one_that_takes_longer_to_compute_for_its_bytes() {
    let left = |models: [&str; 2]| {
        let world = SimWorld::new(4480, &WorldConfig::default());
        let (eviction, segment_bytes, budget_bytes) = (EvictionPolicy::Weighted, 1 << 20, 24 << 20);
        let options = Options { eviction, segment_bytes, budget_bytes, ..roomy(Seed(4480)) };
        let stage = SimStage::open(&world, &options).unwrap();
        let all = ["deepseek-v3", "qwen3-next-80b"].into_iter().zip(models);
        let all: Vec<Model> = all.map(|(spec, called)| Model::new(&stage, spec, called)).collect();
        for n in 0..120 {
            all.iter().for_each(|model| model.put(&stage, n));
            stage.advance(Duration::from_secs(2));
        }
        all.iter().map(|model| model.bytes_left(&stage, 120)).collect::<Vec<u64>>()
    };
    let (known, unknown) = (left(["DeepSeek-V3", "Qwen3-Next-80B-A3B-Instruct"]), left(["ours", "theirs"]));
    // Their specs are known, whatever they are called.
    for kept in [known, unknown] {
        assert!(4 * kept[0] > 5 * kept[1], "{kept:?}");
    }
}

/// The stream of a shipped model, in blocks of one token.
struct Model {
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    shape: BlockShape,
    /// Blocks of about 280 KB.
    at_once: u64,
}

impl Model {
    fn new(stage: &SimStage, spec: &str, called: &str) -> Self {
        let spec = shipped::load(spec).unwrap();
        let identity = Identity {
            model: called.to_owned(),
            block_tokens: 1,
            spec_fingerprint: spec.fingerprint(),
            ..fixture::identity("1")
        };
        let namespace = stage.store().register(&identity, spec.geometry()).unwrap();
        let group =
            spec.geometry().groups().iter().find(|group| group.class == RoleClass::Stream).unwrap().group;
        let coordinate = spec.geometry().coordinate(group, 1, 0).unwrap();
        let shape = spec.geometry().shape(group, coordinate, 1).unwrap();
        let at_once = 281_088 / shape.block_bytes();
        Self { namespace, group, coordinate, shape, at_once }
    }

    fn keys(&self, n: u64) -> Vec<BlockKey> {
        fixture::keys(self.at_once, n * self.at_once..(n + 1) * self.at_once)
    }

    /// The `n`th of its prompts.
    fn put(&self, stage: &SimStage, n: u64) {
        let keys = self.keys(n);
        let request = PutRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            parent: Parent::Root,
            first_block: Some(0),
            from: fixture::place(&self.shape, keys.len() as u32, Style::Blocks, 0).unwrap(),
            keys,
            layout: None,
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        let reply = ask(stage, stage.store().put(request)).unwrap();
        assert!(reply.outcomes.iter().all(|one| *one == BlockOutcome::Stored), "{n}");
    }

    fn bytes_left(&self, stage: &SimStage, prompts: u64) -> u64 {
        let of = |n| {
            let (group, coordinate, keys) = (self.group, self.coordinate, &self.keys(n));
            let request = ContainsRequest { namespace: self.namespace, group, coordinate, keys, lease: None };
            let found = stage.store().contains(&request).unwrap().presence;
            found.iter().filter(|one| **one == Presence::Here).count() as u64
        };
        (0..prompts).map(of).sum::<u64>() * self.shape.block_bytes()
    }
}

/// Asks for a plan with an engine that computes 1,000 tokens in `ms`.
fn tell_times(desk: &Desk<'_>, ms: f64) {
    let times = Times::new(vec![Sample { cached: 0, new: 1000, ms }], None).unwrap();
    let (group, coordinate) = pages();
    let (need, absence) = (Need::All, Absence::Required);
    let needs = vec![Requirement { group, coordinates: vec![coordinate], need, absence }];
    let request = MatchRequest {
        namespace: desk.namespace,
        keys: &desk.keys(0..1),
        requirements: &Requirements::new(BLOCK_TOKENS, needs).unwrap(),
        recompute_tokens_max: u64::MAX,
        lease: None,
        plan: Some(PlanTerms::new(100, &times)),
    };
    assert!(desk.stage.store().match_prefix(&request).unwrap().plan.is_some());
}

/// `fallocate` fails now and then, or from some time on, with each error that it may give. Nothing is lost by it, books
/// and budget stay right, and when it works again room is made as before.
#[test]
fn a_hole_that_could_not_be_made_gives_nothing_back_and_takes_nothing_away() {
    let (eio, enospc) = (5, 28);
    for (case, (errno, when)) in [
        (eio, When::From(3)),
        (eio, When::Odds(400_000)),
        (enospc, When::From(3)),
        (enospc, When::Odds(400_000)),
        (EOPNOTSUPP, When::From(9)),
    ]
    .into_iter()
    .enumerate()
    {
        let seed = 4600 + case as u64;
        let world = SimWorld::new(seed, &WorldConfig::default());
        let options = roomy(Seed(seed));
        let stage = SimStage::open(&world, &options).unwrap();
        let desk = Desk::new(&stage, "punch");
        let mut number = 0u64;
        let mut round = |rounds: u64| {
            for _ in 0..rounds {
                let keys = desk.keys(number * 4..number * 4 + 4);
                let outcomes = desk.outcomes(desk.request(pages(), &keys, 1));
                assert_eq!(outcomes, vec![BlockOutcome::Stored; 4], "errno {errno}, {when:?}, {number}");
                desk.expect(pages(), &keys, 1);
                // Without it what goes empties segments as a whole, and no holes are made.
                if number >= 3 && number.is_multiple_of(3) {
                    let keys = desk.keys((number - 3) * 4..(number - 2) * 4);
                    let target = Target::Keys { column: None, keys };
                    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
                    ask(desk.stage, desk.stage.store().delete(request)).unwrap();
                }
                assert!(stage.engine().stats().allocated_bytes <= options.budget_bytes);
                stage.audit();
                number += 1;
            }
        };
        round(40);
        world.disk().inject(Rule::new(Which::Kind(OpKind::Punch), when, Effect::Errno(errno)));
        round(60);
        assert!(world.disk().struck() > 0, "errno {errno}, {when:?}");
        world.disk().heal();
        let before = stage.engine().stats().counts.bytes_punched;
        round(40);
        let counts = stage.engine().stats().counts;
        assert_eq!(counts.blocks_quarantined + counts.chunks_damaged, 0);
        // Segments that could not be punched meanwhile are emptied as a whole, so there may be no need for holes.
        assert!(errno != EOPNOTSUPP || counts.bytes_punched == before, "errno {errno}, {when:?}");
        let left = here(&desk, 0..number * 4);
        left.iter().for_each(|n| desk.expect(pages(), &desk.keys(*n..n + 1), 1));
        stage.audit_all();
        let image = stage.cut_power().image(Crash::LoseAll);
        let checked = examine(&directories(&image), Level::Deep).unwrap();
        assert!(checked.findings.is_clean(), "errno {errno}, {when:?}\n{}", problems(&checked));
    }
}
