//! Answers that come late, or after their caller gave up, bring back nothing that was taken out of a manifest.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join;
use kvarts_layout::NamespaceId;

use super::fixture::*;
use crate::format::{names, samples};
use crate::testing::{Kind, Op};
use crate::tier::{Tier, TierOptions};
use crate::time::Time;
use crate::withdraw::{Deleted, withdraw};

const SECOND: Duration = Duration::from_secs(1);

fn namespace() -> NamespaceId {
    samples::namespace_id("r1")
}

fn generation(tier: &Tier) -> Option<u64> {
    tier.remembered(namespace()).map(|known| known.manifest.generation)
}

/// A second from now everything is deleted.
async fn delete_later(world: &World, tier: &Tier) {
    world.time.sleep(SECOND).await;
    assert_eq!(withdraw(tier, namespace(), std::slice::from_ref(&Deleted::Namespace)).await, Ok(1));
}

fn bytes_of_manifest(world: &World) -> Bytes {
    world.memory.bytes(&names::manifest(namespace())).unwrap()
}

#[test]
fn a_manifest_that_was_asked_for_before_a_delete_and_comes_after_it_is_not_believed() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    world.faulty.next(Op::Get, &[Some(Kind::Late(9 * SECOND))]);
    let refresh = world.tier.read_manifest(namespace());
    let (read, ()) = world.time.run(join(refresh, delete_later(&world, &world.tier)));
    assert_eq!(read.unwrap().manifest.packs.len(), 1, "the old one came");
    assert_eq!((generation(&world.tier), world.good(&world.tier, 1, 5)), (Some(2), 0));
    // Nor is it where the manifest is not remembered any more.
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let tier = world.other_with_options(TierOptions { namespaces_max: 1, ..TierOptions::default() });
    world.faulty.next(Op::Get, &[Some(Kind::Late(9 * SECOND))]);
    let delete = async {
        delete_later(&world, &tier).await;
        tier.read_manifest(samples::namespace_id("r2")).await.unwrap();
        assert_eq!(generation(&tier), None);
    };
    world.time.run(join(tier.read_manifest(namespace()), delete)).0.unwrap();
    assert_eq!((generation(&tier), world.good(&tier, 1, 5)), (None, 0));
}

#[test]
fn a_read_that_asked_for_the_manifest_before_a_delete_does_not_find_what_was_deleted() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let reader = world.other();
    world.faulty.next(Op::Get, &[Some(Kind::Late(9 * SECOND))]);
    let (read, ()) = world.time.run(join(read(&reader, 1, 5), delete_later(&world, &reader)));
    assert_eq!(read.unwrap().0, vec![None; 5]);
}

#[test]
fn of_two_changes_whose_answers_cross_the_later_one_is_remembered() {
    let world = World::new();
    world.faulty.next(Op::Swap, &[Some(Kind::Late(9 * SECOND))]);
    let push = push(&world.tier, &[(1, 0, 5)], options());
    let (pushed, ()) = world.time.run(join(push, delete_later(&world, &world.tier)));
    assert_eq!(pushed.unwrap().packs, 1);
    assert_eq!((generation(&world.tier), world.good(&world.tier, 1, 5)), (Some(2), 0));
}

#[test]
fn a_change_that_others_built_upon_before_its_answer_came_does_not_hide_theirs() {
    let world = World::new();
    let other = world.other();
    world.faulty.next(Op::Swap, &[Some(Kind::Late(9 * SECOND))]);
    let others = async {
        world.time.sleep(SECOND).await;
        push(&other, &[(2, 0, 3)], options()).await.unwrap();
        world.tier.read_manifest(namespace()).await.unwrap();
    };
    world.time.run(join(push(&world.tier, &[(1, 0, 5)], options()), others)).0.unwrap();
    assert_eq!(generation(&world.tier), Some(2));
    assert_eq!((world.good(&world.tier, 1, 5), world.good(&world.tier, 2, 3)), (5, 3));
}

#[test]
fn a_manifest_of_before_a_bucket_was_begun_anew_does_not_replace_the_new_one() {
    let world = World::new();
    for prefix in 1..4 {
        world.push(&[(prefix, 0, 5)]).unwrap();
    }
    let tier = world.other();
    world.faulty.next(Op::Get, &[Some(Kind::Late(7 * SECOND))]);
    let anew = async {
        world.time.sleep(SECOND).await;
        world.memory.take(&names::manifest(namespace()));
        world.faulty.next(Op::Swap, &[Some(Kind::Late(9 * SECOND))]);
        push(&tier, &[(9, 0, 3)], options()).await.unwrap();
    };
    world.time.run(join(tier.read_manifest(namespace()), anew)).0.unwrap();
    assert_eq!(generation(&tier), Some(1));
    assert_eq!((world.good(&tier, 1, 5), world.good(&tier, 9, 3)), (0, 3));
}

#[test]
fn an_old_answer_is_not_believed_and_a_bucket_that_was_begun_anew_is() {
    let world = World::new();
    world.push(&[(1, 0, 5)]).unwrap();
    let old = bytes_of_manifest(&world);
    world.time.pass(SECOND);
    world.time.run(withdraw(&world.tier, namespace(), std::slice::from_ref(&Deleted::Namespace))).unwrap();
    // As if something between here and the bucket had kept it.
    world.memory.set(&names::manifest(namespace()), old.to_vec());
    world.time.run(world.tier.read_manifest(namespace())).unwrap();
    assert_eq!((generation(&world.tier), world.good(&world.tier, 1, 5)), (Some(2), 0));
    // It is not known for ever, and then the bucket is right.
    world.time.pass(TierOptions::default().stale);
    world.time.run(world.tier.read_manifest(namespace())).unwrap();
    assert_eq!((generation(&world.tier), world.good(&world.tier, 1, 5)), (Some(1), 5));
    for prefix in 2..6 {
        world.push(&[(prefix, 0, 5)]).unwrap();
    }
    world.time.pass(SECOND);
    world.memory.take(&names::manifest(namespace()));
    world.time.run(push(&world.other(), &[(7, 0, 2)], options())).unwrap();
    world.time.run(world.tier.read_manifest(namespace())).unwrap();
    assert_eq!((generation(&world.tier), world.good(&world.tier, 7, 2)), (Some(1), 2));
    world.memory.take(&names::manifest(namespace()));
    world.time.run(world.tier.read_manifest(namespace())).unwrap();
    assert_eq!(generation(&world.tier), Some(0), "there is none");
}

#[test]
fn a_manifest_whose_put_was_given_up_and_happens_after_a_delete_meets_another_one() {
    let deleted = [
        Deleted::Keys(vec![samples::key(1, 0)]),
        Deleted::Later(vec![samples::key(1, 0)], COLUMN, 1),
        Deleted::Prefix(samples::key(1, 0)),
        Deleted::Namespace,
    ];
    for is_first in [true, false] {
        for deleted in &deleted {
            let world = World::new();
            if !is_first {
                world.push(&[(2, 0, 3)]).unwrap();
            }
            world.faulty.next(Op::Swap, &[Some(Kind::Afterwards(60 * SECOND)); 4]);
            assert!(world.push(&[(1, 0, 5)]).is_err());
            assert!(world.tier.is_unsettled(namespace()));
            world.time.run(withdraw(&world.tier, namespace(), std::slice::from_ref(deleted))).unwrap();
            assert!(!world.tier.is_unsettled(namespace()));
            world.time.pass(99 * SECOND);
            assert_eq!(world.good(&world.other(), 1, 5), 0, "{deleted:?}");
        }
    }
}

#[test]
fn a_push_that_is_broken_off_while_it_changes_the_manifest_is_not_settled() {
    let world = World::new();
    world.faulty.next(Op::Swap, &[Some(Kind::Late(9 * SECOND))]);
    let long = world.time.sleep(SECOND);
    let pushed = push(&world.tier, &[(1, 0, 5)], options());
    world.time.run(futures_util::future::select(Box::pin(pushed), long));
    assert!(world.tier.is_unsettled(namespace()));
    assert!(!world.other().is_unsettled(namespace()));
    // One that lost its race has happened or never does.
    let world = World::new();
    world.faulty.next(Op::Swap, &[Some(Kind::Changed); 40]);
    assert!(world.push(&[(1, 0, 5)]).is_err());
    assert!(!world.tier.is_unsettled(namespace()));
}
