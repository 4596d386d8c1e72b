//! Blocks that go: tombstones live exactly as long as they must, expiry needs no lookup and no honest wall clock, and a
//! client that follows the events knows the content of a store that evicts.

use std::collections::BTreeSet;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteOutcome, DeleteRequest, LeaseId, Presence, PutRequest, Target,
};
use kvarts_contract::error::Reason;
use kvarts_contract::events::record::{Content, EventRecorder, replay};
use kvarts_contract::events::{Cause, EventKind, Subject};
use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey};
use kvarts_store::engine::{Limits, Options};
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::sim::media::errno::EIO;
use kvarts_tests::sim::{Crash, Effect, Media, OpKind, Rule, SimWorld, When, Which, WorldConfig};
use kvarts_tests::stage::{SimStage, Stage, ask, content_of, drive};

/// A store of about a dozen small segments, which writes checkpoints only where it must.
fn options(shards: u32) -> Options {
    let limits =
        Limits { arena_bytes: 2 << 20, checkpoint_every: Duration::from_secs(1 << 40), ..Limits::default() };
    Options {
        shards_per_directory: shards,
        segment_bytes: 64 << 10,
        budget_bytes: (1 << 20) * u64::from(shards),
        limits,
        ..Options::default()
    }
}

fn open(seed: u64, media: Option<Media>, shards: u32) -> SimStage {
    let config = WorldConfig::default();
    let world = match media {
        Some(media) => SimWorld::with_media(seed, &config, media),
        None => SimWorld::new(seed, &config),
    };
    SimStage::open(&world, &options(shards)).unwrap()
}

fn delete(desk: &Desk<'_>, target: Target) -> Vec<DeleteOutcome> {
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(desk.stage, desk.stage.store().delete(request)).unwrap().outcomes
}

/// Small blocks: several records go into a segment.
const ODD: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);

fn here(desk: &Desk<'_>, keys: &[BlockKey]) -> Vec<bool> {
    here_in(desk, pages(), keys)
}

fn here_in(desk: &Desk<'_>, (group, coordinate): (Group, Coordinate), keys: &[BlockKey]) -> Vec<bool> {
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease: None };
    let presence = desk.stage.store().contains(&request).unwrap().presence;
    presence.iter().map(|one| *one == Presence::Here).collect()
}

fn put_each(desk: &Desk<'_>, keys: &[BlockKey]) {
    for key in keys {
        assert_eq!(desk.outcomes(desk.request(pages(), &[*key], 1)), [BlockOutcome::Stored]);
    }
}

fn pin(desk: &Desk<'_>, (group, coordinate): (Group, Coordinate), keys: &[BlockKey]) -> LeaseId {
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease: None };
    desk.stage.store().pin(&request, 1, u64::MAX).unwrap().lease.unwrap()
}

/// What is left after everything that was not durable is lost.
fn cut(stage: SimStage) -> Media {
    stage.cut_power().image(Crash::LoseAll)
}

#[test]
fn a_tombstone_outlives_its_segment_while_an_older_record_may_come_back_and_no_longer() {
    // Of a namespace: its epoch, and the marks of the delete's begin and end.
    for (seed, whole, graves) in [(1, false, 1), (2, true, 3)] {
        let stage = open(seed, None, 1);
        let desk = Desk::new(&stage, "deleted");
        let other = Desk::new(&stage, "beside");
        let keys = desk.keys(0..2);
        // Both are small and lie in one segment, which the second keeps from being recycled.
        assert_eq!(desk.outcomes(desk.request(ODD, &keys[..1], 1)), [BlockOutcome::Stored]);
        assert_eq!(other.outcomes(other.request(ODD, &keys[1..], 1)), [BlockOutcome::Stored]);
        pin(&other, ODD, &keys[1..]);
        // What is deleted is written down in another one.
        put_each(&other, &other.keys(50..54));
        match whole {
            true => drop(delete(&desk, Target::Namespace)),
            false => {
                let outcomes = delete(&desk, Target::Keys { column: None, keys: keys[..1].to_vec() });
                assert_eq!(outcomes, [DeleteOutcome::Deleted]);
            }
        }
        // Long enough that every other segment is rewritten several times.
        put_each(&other, &other.keys(100..220));
        let recycled = stage.engine().stats().counts.segments_recycled;
        assert!(recycled > 30, "{recycled}");
        assert_eq!(stage.engine().stats().tombstones, graves);
        let stage = open(seed + 10, Some(cut(stage)), 1);
        let (desk, other) = (Desk::new(&stage, "deleted"), Desk::new(&stage, "beside"));
        assert_eq!(here_in(&desk, ODD, &keys[..1]), [false]);
        assert_eq!(here_in(&other, ODD, &keys[1..]), [true]);
        assert_eq!(stage.engine().stats().tombstones, graves);
        // Nothing holds the segment any more: when it has gone, so does the tombstone.
        put_each(&other, &other.keys(300..420));
        assert_eq!(here_in(&other, ODD, &keys[1..]), [false]);
        drive(stage.world(), stage.engine().checkpoint()).unwrap().unwrap();
        assert_eq!(stage.engine().stats().tombstones, 0);
        let stage = open(seed + 20, Some(cut(stage)), 1);
        let desk = Desk::new(&stage, "deleted");
        assert_eq!((here_in(&desk, ODD, &keys[..1]), stage.engine().stats().tombstones), (vec![false], 0));
        assert_eq!(desk.outcomes(desk.request(ODD, &keys[..1], 2)), [BlockOutcome::Stored]);
    }
}

#[test]
fn a_block_that_was_evicted_and_then_deleted_does_not_come_back_from_a_segment_not_yet_written_anew() {
    // Of two shards the tombstone must reach both: runs go where their first key belongs, not each block.
    for seed in 0..6 {
        let stage = open(seed, None, 2);
        let desk = Desk::new(&stage, "deleted");
        let keys = desk.keys(0..40);
        for pair in keys.chunks(2) {
            assert_eq!(desk.outcomes(desk.request(pages(), pair, 1)).len(), 2);
        }
        let evicted: Vec<BlockKey> =
            keys.iter().filter(|key| here(&desk, &[**key]) == [false]).copied().collect();
        let outcomes = delete(&desk, Target::Keys { column: None, keys: keys.clone() });
        let absent = outcomes.iter().filter(|one| **one == DeleteOutcome::NotHere).count();
        assert_eq!(absent, evicted.len());
        let stage = open(seed + 100, Some(cut(stage)), 2);
        let desk = Desk::new(&stage, "deleted");
        assert_eq!(here(&desk, &keys), [false; 40]);
    }
}

#[test]
fn segments_whose_blocks_were_deleted_go_before_any_other() {
    let stage = open(3, None, 1);
    let desk = Desk::new(&stage, "order");
    let keys = desk.keys(0..12);
    put_each(&desk, &keys);
    // Of the older half nothing is deleted.
    delete(&desk, Target::Keys { column: None, keys: keys[6..].to_vec() });
    let evicted = || stage.engine().stats().counts.blocks_evicted;
    let mut more = desk.keys(100..200).into_iter();
    while stage.engine().stats().counts.segments_recycled < 3 {
        put_each(&desk, &[more.next().unwrap()]);
    }
    assert_eq!(evicted(), 0);
    assert_eq!(here(&desk, &keys[..6]), [true; 6]);
}

#[test]
fn a_delete_that_cannot_be_written_is_not_acknowledged_and_a_deadline_ends_the_wait() {
    let stage = open(4, None, 2);
    let desk = Desk::new(&stage, "failing");
    let keys = desk.keys(0..2);
    put_each(&desk, &keys);
    stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Flush), When::From(1), Effect::Stuck));
    let deadline = Some(stage.now().plus(Duration::from_secs(1)));
    let target = Target::Keys { column: None, keys: keys[..1].to_vec() };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline };
    let ticket = stage.store().delete(request);
    assert_eq!(here(&desk, &keys), [false, true]);
    let reply = ask(&stage, ticket).unwrap();
    assert_eq!(reply.outcomes, [DeleteOutcome::Refused(Reason::DeadlinePassed)]);
    drop(stage);
    let stage = open(5, None, 2);
    let desk = Desk::new(&stage, "failing");
    put_each(&desk, &keys);
    stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Write), When::From(1), Effect::Errno(EIO)));
    let outcomes = delete(&desk, Target::Keys { column: None, keys: keys[..1].to_vec() });
    assert!(matches!(outcomes[..], [DeleteOutcome::Refused(_)]), "{outcomes:?}");
    let request = DeleteRequest { namespace: desk.namespace, target: Target::Namespace, deadline: None };
    assert!(ask(&stage, stage.store().delete(request)).is_err());
    assert_eq!(here(&desk, &keys), [false; 2]);
}

#[test]
fn what_has_expired_goes_without_being_looked_up_and_a_jump_of_the_wall_clock_changes_nothing() {
    let stage = open(6, None, 1);
    let desk = Desk::new(&stage, "expiring");
    let keys = desk.keys(0..8);
    let minutes = |n: u64| PutRequest {
        expires_after: Some(Duration::from_secs(60 * n)),
        ..desk.request(pages(), &keys, 1)
    };
    assert_eq!(
        desk.outcomes(PutRequest {
            keys: keys[..3].to_vec(),
            from: desk.request(pages(), &keys[..3], 1).from,
            ..minutes(1)
        })
        .len(),
        3
    );
    assert_eq!(
        desk.outcomes(PutRequest {
            keys: keys[3..].to_vec(),
            from: desk.request(pages(), &keys[3..], 1).from,
            ..minutes(9)
        })
        .len(),
        5
    );
    let mut reader = stage.store().subscribe(None);
    for jump_s in [86_400, -2 * 86_400] {
        stage.world().clock().jump_wall(jump_s * 1000);
        assert_eq!(here(&desk, &keys), [true; 8]);
    }
    stage.advance(Duration::from_secs(90));
    stage.wait(&mut || stage.engine().stats().counts.blocks_expired == 3);
    let told = reader.try_next(100).unwrap();
    let names: BTreeSet<Subject> = told.iter().map(|event| event.subject).collect();
    let name = |key: &BlockKey| {
        let (group, coordinate) = pages();
        Subject::Block(IndexKey { namespace: desk.namespace, key: *key, group, coordinate })
    };
    assert_eq!(names, keys[..3].iter().map(name).collect());
    assert!(told.iter().all(|event| (event.kind, event.cause) == (EventKind::Expired, Cause::Ttl)));
    assert_eq!(here(&desk, &keys), [false, false, false, true, true, true, true, true]);
    // Across a restart the wall clock is what there is: it has been set a day back here, so nothing is over yet.
    let media = cut(stage);
    let stage = open(7, Some(media.clone()), 1);
    let desk = Desk::new(&stage, "expiring");
    assert_eq!(here(&desk, &keys[3..]), [true; 5]);
    // On a machine whose clock says that the nine minutes are over, they are.
    let late = WorldConfig::default();
    let late = WorldConfig { unix_millis: late.unix_millis + 600_000, ..late };
    let world = SimWorld::with_media(8, &late, media);
    let stage = SimStage::open(&world, &options(1)).unwrap();
    assert_eq!(here(&Desk::new(&stage, "expiring"), &keys[3..]), [false; 5]);
}

#[test]
fn a_changed_time_to_live_is_in_the_next_checkpoint() {
    let stage = open(9, None, 1);
    let desk = Desk::new(&stage, "changed");
    let keys = desk.keys(0..2);
    put_each(&desk, &keys);
    let (group, coordinate) = pages();
    let ttl = Some(Duration::from_secs(60));
    let request = kvarts_contract::api::TtlRequest {
        namespace: desk.namespace,
        group,
        coordinate,
        keys: &keys[..1],
        ttl,
    };
    assert_eq!(stage.store().set_ttl(&request).unwrap().changed, [true]);
    drive(stage.world(), stage.engine().checkpoint()).unwrap().unwrap();
    let config = WorldConfig::default();
    let late = WorldConfig { unix_millis: config.unix_millis + 300_000, ..config };
    let world = SimWorld::with_media(10, &late, cut(stage));
    let stage = SimStage::open(&world, &options(1)).unwrap();
    assert_eq!(here(&Desk::new(&stage, "changed"), &keys), [false, true]);
}

/// What `KvStore::set_ttl` says of crashes: a shorter time that is over before any checkpoint says it is forgotten with
/// its block, which is then here until the time of its put, and no longer.
#[test]
fn a_shorter_time_that_ran_out_before_a_checkpoint_is_forgotten_in_a_crash_and_the_puts_time_counts() {
    let stage = open(11, None, 1);
    let desk = Desk::new(&stage, "shortened");
    let keys = desk.keys(0..2);
    for key in &keys {
        let request = desk.request(pages(), std::slice::from_ref(key), 1);
        let request = PutRequest { expires_after: Some(Duration::from_secs(600)), ..request };
        assert_eq!(desk.outcomes(request), [BlockOutcome::Stored]);
    }
    let (group, coordinate) = pages();
    let ttl = Some(Duration::from_secs(60));
    let request = kvarts_contract::api::TtlRequest {
        namespace: desk.namespace,
        group,
        coordinate,
        keys: &keys[..1],
        ttl,
    };
    assert_eq!(stage.store().set_ttl(&request).unwrap().changed, [true]);
    stage.advance(Duration::from_secs(100));
    assert_eq!(here(&desk, &keys), [false, true], "it is over");
    let media = cut(stage);
    let after = |seed, seconds: u64| {
        let config = WorldConfig::default();
        let late = WorldConfig { unix_millis: config.unix_millis + seconds * 1000, ..config };
        let world = SimWorld::with_media(seed, &late, media.clone());
        let stage = SimStage::open(&world, &options(1)).unwrap();
        here(&Desk::new(&stage, "shortened"), &keys)
    };
    assert_eq!(after(12, 100), [true, true], "no checkpoint said so");
    assert_eq!(after(13, 601), [false, false], "the put did");
}

#[test]
fn who_follows_the_events_knows_the_content_of_a_store_that_evicts_and_a_recording_gives_it_back() {
    for seed in 20..24 {
        let stage = open(seed, None, 2);
        let desk = Desk::new(&stage, "followed");
        put_each(&desk, &desk.keys(0..30));
        let (mut content, mut recorder) = (Content::default(), EventRecorder::new(Vec::new()));
        let mut cursor = None;
        let mut more = desk.keys(100..200).into_iter();
        let start = loop {
            let page = ask(&stage, stage.store().snapshot(cursor)).unwrap();
            if cursor.is_none() {
                recorder.begin(page.sequence).unwrap();
            }
            content.page(&page);
            recorder.page(&page).unwrap();
            cursor = page.next;
            // Between two pages things go on.
            put_each(&desk, &[more.next().unwrap(), more.next().unwrap()]);
            if cursor.is_none() {
                break page.sequence;
            }
        };
        let mut reader = stage.store().subscribe(Some(start));
        let mut evicted = 0;
        for key in more {
            put_each(&desk, &[key]);
            for event in reader.try_next(1000).unwrap() {
                evicted += u32::from(event.kind == EventKind::Evicted);
                content.apply(&event);
                recorder.event(&event).unwrap();
            }
        }
        assert!(evicted > 20, "{evicted}");
        assert_eq!(content.blocks, content_of(&stage).blocks);
        assert_eq!(replay(recorder.into_inner().as_slice()).unwrap(), content);
        // Another life is another stream.
        let last = reader.sequence();
        let stage = open(seed + 100, Some(cut(stage)), 2);
        assert!(stage.store().subscribe(Some(last)).try_next(1).is_err());
    }
}

#[test]
fn a_damaged_block_is_told_once_by_its_whole_name() {
    let stage = open(30, None, 1);
    let desk = Desk::new(&stage, "damaged");
    let keys = desk.keys(0..1);
    // What the segment needs besides is written with another block.
    put_each(&desk, &desk.keys(1..2));
    stage.world().disk().inject(Rule::new(Which::Kind(OpKind::Write), When::Nth(1), Effect::FlipBit));
    put_each(&desk, &keys);
    let mut reader = stage.store().subscribe(None);
    for _ in 0..2 {
        let (_, end) = desk.read(&desk.read_request(pages(), &keys));
        assert_eq!(end.usable_blocks, 0);
    }
    let told = reader.try_next(10).unwrap();
    assert_eq!(
        told.iter().map(|event| (event.kind, event.cause)).collect::<Vec<_>>(),
        [(EventKind::Quarantined, Cause::Damage)]
    );
    assert_eq!(content_of(&stage).blocks.len(), 1);
}
