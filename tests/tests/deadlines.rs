//! Deadlines over a disk that does not answer: a caller that set one is told in time, and told what the disk still holds.

use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, DeleteRequest, Durability, MatchRequest, Order, Parent, PlanTerms, PutRequest, ReadEvent,
    ReadRequest, ReadStream, Target, Verify,
};
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::Requirements;
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_planner::cost::{Sample, Times};
use kvarts_store::engine::Options;
use kvarts_tests::campaign::{Driven, drive, reopen};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture::{self, Style};
use kvarts_tests::sim::{Effect, OpKind, Rule, Seed, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask, small_options};

/// A store that holds three blocks, on a disk whose reads never end from now on.
fn stuck() -> (SimWorld, SimStage, ReadRequest) {
    let world = SimWorld::new(11, &WorldConfig::default());
    let stage = SimStage::open(&world, &small_options(1)).unwrap();
    let (group, coordinate) = fixture::columns()[0];
    let shape = fixture::shape(group, coordinate);
    let namespace = stage.store().register(&fixture::identity("a"), &fixture::geometry()).unwrap();
    let keys = fixture::keys(1, 0..3);
    let put = PutRequest {
        namespace,
        group,
        coordinate,
        parent: Parent::Root,
        first_block: Some(0),
        keys: keys.clone(),
        from: fixture::place(&shape, 3, Style::Blocks, 0).unwrap(),
        layout: None,
        durability: Durability::Durable,
        expires_after: None,
        origins: None,
        deadline: None,
    };
    assert_eq!(stage.put(put).unwrap().outcomes, vec![BlockOutcome::Stored; 3]);
    world.disk().inject(Rule::new(Which::Kind(OpKind::Read), When::From(1), Effect::Stuck));
    let read = ReadRequest {
        namespace,
        group,
        coordinate,
        keys,
        layers: None,
        order: Order::Layers,
        into: fixture::place(&shape, 3, Style::Blocks, 0).unwrap(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    };
    (world, stage, read)
}

fn end_of(stage: &SimStage, stream: &ReadStream) -> ReadEvent {
    let mut found = None;
    stage.wait(&mut || {
        found = stream.try_next();
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn a_read_of_a_stuck_disk_ends_at_its_deadline_and_delivers_nothing() {
    let (_world, stage, read) = stuck();
    let deadline = Nanos(stage.now().0).plus(Duration::from_millis(5));
    let stream = stage.store().read(ReadRequest { deadline: Some(deadline), ..read }).unwrap();
    let ReadEvent::End(end) = end_of(&stage, &stream) else { panic!("a layer of a stuck disk") };
    assert_eq!(end.usable_layers, 0);
    assert!(end.held_bytes > 0, "the disk may still write to the caller's memory");
    assert!(stage.now() < deadline.plus(Duration::from_millis(5)));
    assert_eq!(stream.try_next(), None, "the disk has let go of nothing");
}

#[test]
fn what_reads_ask_of_the_disks_is_outstanding_until_they_end_however_they_end() {
    let (world, stage, read) = stuck();
    let bytes = 3 * fixture::shape(pages().0, pages().1).block_bytes();
    let outstanding = || stage.engine().disk_link().link.outstanding_bytes;
    assert_eq!((outstanding(), stage.engine().disk_link().measured), (0, 0));
    let deadline = Nanos(stage.now().0).plus(Duration::from_millis(5));
    let late = stage.store().read(ReadRequest { deadline: Some(deadline), ..read.clone() }).unwrap();
    assert_eq!(outstanding(), bytes);
    let ReadEvent::End(_) = end_of(&stage, &late) else { panic!("a layer of a stuck disk") };
    assert_eq!(
        (outstanding(), stage.engine().disk_link().measured),
        (0, 0),
        "it was late: nothing was measured"
    );
    // A second one, that goes on when the disk does; and a third that shares its load and measures nothing.
    world.disk().heal();
    let place = || fixture::place(&fixture::shape(pages().0, pages().1), 3, Style::Blocks, 0).unwrap();
    let both = [(); 2].map(|()| stage.store().read(ReadRequest { into: place(), ..read.clone() }).unwrap());
    assert_eq!(outstanding(), 2 * bytes);
    for stream in &both {
        while !matches!(end_of(&stage, stream), ReadEvent::End(_)) {}
    }
    let link = stage.engine().disk_link();
    assert_eq!((link.link.outstanding_bytes, link.measured), (0, 1), "{link:?}");
    // Work in the background says nothing of what a caller in front waits for.
    let behind = ReadRequest { class: Class::Background, into: place(), ..read };
    let stream = stage.store().read(behind).unwrap();
    while !matches!(end_of(&stage, &stream), ReadEvent::End(_)) {}
    assert_eq!(stage.engine().disk_link().measured, link.measured);
}

/// Without probes and without a clock the line would be the same for ever: nothing is loaded, so nothing is measured.
#[test]
fn a_bad_patch_of_the_disks_does_not_keep_those_away_who_follow_plans() {
    let (world, stage, read) = stuck();
    world.disk().heal();
    let slow = Effect::Delay(Duration::from_millis(4));
    world.disk().inject(Rule::new(Which::Kind(OpKind::Read), When::From(1), slow));
    for _ in 0..4 {
        let into = fixture::place(&fixture::shape(pages().0, pages().1), 3, Style::Blocks, 0).unwrap();
        let stream = stage.store().read(ReadRequest { into, ..read.clone() }).unwrap();
        while !matches!(end_of(&stage, &stream), ReadEvent::End(_)) {}
    }
    world.disk().heal();
    // 10 us for each token: what a drive brings in a quarter of a millisecond is computed in half of one.
    let sample = |(cached, new)| Sample { cached, new, ms: new as f64 / 100.0 };
    let times = Times::new([(0, 10), (0, 1000), (1000, 10)].map(sample).to_vec(), None).unwrap();
    let (group, coordinate) = pages();
    let (need, absence) = (Need::All, Absence::Required);
    let needs = vec![Requirement { group, coordinates: vec![coordinate], need, absence }];
    let requirements = Requirements::new(fixture::BLOCK_TOKENS, needs).unwrap();
    let loads = || {
        let plan = PlanTerms::new(100, &times);
        let request = MatchRequest {
            namespace: read.namespace,
            keys: &read.keys,
            requirements: &requirements,
            recompute_tokens_max: u64::MAX,
            lease: None,
            plan: Some(plan),
        };
        !stage.store().match_prefix(&request).unwrap().plan.unwrap().plan.loads_nothing()
    };
    // A floor of loads goes through, always the same ones.
    let asked: Vec<usize> = (1..=64).filter(|_| loads()).collect();
    assert_eq!(asked, [16, 32, 48, 64]);
    // After a while without loads the disk is taken for a drive again.
    stage.advance(Duration::from_secs(20 * 60));
    assert!((0..20).all(|_| loads()));
}

#[test]
fn a_follower_ends_at_its_own_deadline_while_its_leader_waits() {
    let (world, stage, read) = stuck();
    let leader = stage.store().read(read.clone()).unwrap();
    stage.wait(&mut || world.disk().struck() > 0);
    let deadline = Nanos(stage.now().0).plus(Duration::from_millis(5));
    let (group, coordinate) = fixture::columns()[0];
    let into = fixture::place(&fixture::shape(group, coordinate), 3, Style::Blocks, 0).unwrap();
    let follower = stage.store().read(ReadRequest { into, deadline: Some(deadline), ..read }).unwrap();
    let ReadEvent::End(end) = end_of(&stage, &follower) else { panic!("a layer of a stuck disk") };
    assert_eq!((end.usable_layers, end.held_bytes), (0, 0), "nothing was read into the follower's memory");
    assert!(stage.now() < deadline.plus(Duration::from_millis(5)));
    assert_eq!(leader.try_next(), None);
}

/// Another put of the same blocks waits for the first one's flush.
#[test]
fn a_put_of_blocks_whose_flush_never_ends_is_answered_at_its_deadline() {
    let world = SimWorld::new(12, &WorldConfig::default());
    let stage = SimStage::open(&world, &small_options(1)).unwrap();
    let desk = Desk::new(&stage, "stuck");
    let keys = desk.keys(0..2);
    let relaxed = PutRequest { durability: Durability::Relaxed, ..desk.request(pages(), &keys, 1) };
    assert_eq!(desk.outcomes(relaxed), [BlockOutcome::Stored, BlockOutcome::Stored]);
    world.disk().inject(Rule::new(Which::Kind(OpKind::Flush), When::From(1), Effect::Stuck));
    for _ in 0..2 {
        let deadline = stage.now().plus(Duration::from_millis(5));
        let put = PutRequest { deadline: Some(deadline), ..desk.request(pages(), &keys, 2) };
        let late = BlockOutcome::Refused(Reason::DeadlinePassed);
        assert_eq!(stage.put(put).unwrap().outcomes, [late.clone(), late]);
        assert!(stage.now() < deadline.plus(Duration::from_millis(5)));
    }
    assert!(world.disk().struck() > 0, "nothing was flushed");
}

/// What descends from a key is found in footers on disk.
#[test]
fn a_delete_of_a_prefix_is_answered_at_its_deadline_while_the_disk_gives_no_footer() {
    let options = Options { segment_bytes: 64 << 10, ..small_options(1) };
    let world = SimWorld::new(13, &WorldConfig::default());
    let stage = SimStage::open(&world, &options).unwrap();
    let desk = Desk::new(&stage, "stuck");
    let keys = desk.keys(0..8);
    for n in 0..8 {
        let parent = if n == 0 { Parent::Root } else { Parent::Key(keys[n - 1]) };
        let put = PutRequest { parent, first_block: None, ..desk.request(pages(), &keys[n..=n], 1) };
        assert_eq!(desk.outcomes(put), [BlockOutcome::Stored]);
    }
    world.disk().inject(Rule::new(Which::Kind(OpKind::Read), When::From(1), Effect::Stuck));
    let deadline = stage.now().plus(Duration::from_millis(5));
    let target = Target::Prefix(keys[0]);
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: Some(deadline) };
    let answer = ask(&stage, stage.store().delete(request));
    assert_eq!(answer.unwrap_err().0, Reason::DeadlinePassed);
    assert!(world.disk().struck() > 0, "nothing was read");
    assert!(stage.now() < deadline.plus(Duration::from_millis(5)));
}

/// A put that was refused at its deadline is on disk all the same once the device is done with it, and a later put of one
/// of its blocks may lie in another shard. Both are whole; which of them a start finds is not up to who recovers first.
#[test]
fn of_two_producers_blocks_in_two_shards_every_start_serves_the_same_one() {
    let (options, config) = (small_options(2), WorldConfig::default());
    let world = SimWorld::new(14, &config);
    let stage = SimStage::open(&world, &options).unwrap();
    let desk = Desk::new(&stage, "twice");
    let shard = |key: &kvarts_layout::BlockKey| crc32fast::hash(&key.0) % 2;
    let many = desk.keys(0..32);
    let low = *many.iter().find(|key| shard(key) == 0).unwrap();
    let high = *many.iter().find(|key| shard(key) == 1).unwrap();
    // One of each kind: the late copy in the lower shard, and in the higher one.
    for (n, (first, second)) in (0..).zip([(low, high), (high, low)]) {
        let column = fixture::columns()[n];
        let slow = Effect::Delay(Duration::from_secs(40));
        world.disk().inject(Rule::new(Which::Kind(OpKind::Flush), When::Nth(1), slow));
        let deadline = Some(stage.now().plus(Duration::from_millis(5)));
        let put =
            PutRequest { deadline, parent: Parent::Unknown, ..desk.request(column, &[first, second], 1) };
        let late = BlockOutcome::Refused(Reason::DeadlinePassed);
        assert_eq!(stage.put(put).unwrap().outcomes, [late.clone(), late]);
        world.settle();
        world.disk().heal();
        let put = PutRequest { parent: Parent::Unknown, ..desk.request(column, &[second], 2) };
        assert_eq!(desk.outcomes(put), [BlockOutcome::Stored]);
        desk.expect(column, &[second], 2);
    }
    let media = world.kill();
    let whose = |seed: u64| {
        let opened = reopen(Seed(seed), &config, &options, media.clone()).unwrap();
        let twice: u64 = opened.store.recovery().iter().map(|report| report.duplicates).sum();
        assert_eq!(twice, 2, "two blocks have two copies");
        let held = opened.store.count_live();
        let closed = drive(&opened.world, u64::MAX, opened.store.close());
        assert!(matches!(closed, Driven::Done(Ok(()))), "{closed:?}");
        held
    };
    let first = whose(0);
    assert!((1..24).all(|seed| whose(seed) == first), "it depends on who recovers first");
}

/// A read that follows another waits as long as that one has to: so it follows none that is less urgent, whose transfers the device
/// has last.
#[test]
fn a_read_follows_none_that_is_less_urgent() {
    for (leads, follows) in [(Class::Background, false), (Class::Prefetch, false), (Class::Foreground, true)]
    {
        let (world, stage, read) = stuck();
        let shared = || stage.engine().stats().counts.bytes_shared;
        let first = stage.store().read(ReadRequest { class: leads, ..read.clone() }).unwrap();
        world.settle();
        // What the first one asked for never comes. What is asked for from now on does.
        world.disk().heal();
        let into = fixture::place(&fixture::shape(read.group, read.coordinate), 3, Style::Blocks, 0).unwrap();
        let second = stage.store().read(ReadRequest { into, ..read }).unwrap();
        world.settle();
        let came = std::iter::from_fn(|| second.try_next()).any(|event| matches!(event, ReadEvent::End(_)));
        assert_eq!(came, !follows, "behind a read of class {leads:?}");
        assert_eq!(shared(), 0);
        assert!(first.try_next().is_none(), "it waits still");
    }
}
