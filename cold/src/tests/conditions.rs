//! A bucket that does not keep conditions of puts is read and never changed.

use super::fixture::*;
use crate::bucket::Bucket;
use crate::collect::{Retention, collect};
use crate::conditions::Conditions;
use crate::error::ColdError;
use crate::format::{names, samples};
use crate::testing::{Conditional, Kind, Op, Plan};
use crate::tier::{Tier, TierOptions};
use crate::withdraw::{Deleted, withdraw};

/// A tier that tries conditions, as those of programs do.
fn trying(world: &World) -> Tier {
    let bucket = std::sync::Arc::clone(&world.faulty) as std::sync::Arc<dyn Bucket>;
    let access = crate::Access::new(bucket, std::sync::Arc::new(world.time.clone()), limits(), 9);
    Tier::new(access, TierOptions::default())
}

#[test]
fn a_bucket_that_ignores_or_refuses_conditions_is_never_changed_and_deletes_say_so() {
    for conditional in [Conditional::Ignored, Conditional::MatchIgnored, Conditional::Refused] {
        let world = World::new();
        world.push(&[(1, 0, 5)]).unwrap();
        world.faulty.conditional(conditional);
        let tier = trying(&world);
        let before = world.memory.names();
        let is_read_only = |error: &ColdError| matches!(error, ColdError::ReadOnly(_));
        let pushed = world.time.run(push(&tier, &[(2, 0, 5)], options()));
        assert!(pushed.as_ref().is_err_and(is_read_only), "{conditional:?}: {pushed:?}");
        let deleted = world.time.run(withdraw(&tier, samples::namespace_id("r1"), &[Deleted::Namespace]));
        assert!(deleted.as_ref().is_err_and(is_read_only), "{conditional:?}: {deleted:?}");
        let retention = Retention { stored_bytes: Some(0), ..Retention::default() };
        let collected = world.time.run(collect(&tier, samples::namespace_id("r1"), &retention));
        assert!(collected.as_ref().is_err_and(is_read_only), "{conditional:?}: {collected:?}");
        let mut after = world.memory.names();
        after.retain(|name| name != names::CONDITIONS);
        assert_eq!(after, before, "{conditional:?}");
        assert!(tier.read_only().is_some_and(|why| why.contains("If-")), "{conditional:?}");
        assert_eq!(world.good(&tier, 1, 5), 5, "it is read as before");
    }
}

#[test]
fn conditions_are_tried_once_and_again_until_the_bucket_has_said_what_it_does() {
    let world = World::new();
    let tier = trying(&world);
    world.faulty.all(Some(Kind::Outage));
    assert!(world.time.run(tier.conditions()).is_err() && tier.read_only().is_none());
    assert!(world.time.run(push(&tier, &[(1, 0, 5)], options())).is_err());
    world.faulty.all(None);
    assert_eq!(world.time.run(tier.conditions()), Ok(Conditions::Kept));
    let asked = world.faulty.asked(Op::Swap);
    world.time.run(push(&tier, &[(1, 0, 5)], options())).unwrap();
    assert_eq!(world.faulty.asked(Op::Swap) - asked, 1, "the manifest alone");
    // The next one finds the object there.
    let other = trying(&world);
    assert_eq!(world.time.run(other.conditions()), Ok(Conditions::Kept));
    assert_eq!(world.faulty.asked(Op::Swap) - asked, 3);
}

#[test]
fn an_answer_that_is_lost_while_conditions_are_tried_says_nothing_against_the_bucket() {
    for lost in 0..3 {
        let world = World::new();
        let mut next = vec![None; lost];
        next.push(Some(Kind::Lost));
        world.faulty.plan(Plan { next: [(Op::Swap, next)].into(), ..Plan::default() });
        assert_eq!(world.time.run(trying(&world).conditions()), Ok(Conditions::Kept), "answer {lost}");
    }
}

#[test]
fn credentials_that_may_not_write_are_no_bucket_that_ignores_conditions() {
    let world = World::new();
    world.faulty.all(Some(Kind::Denied));
    let tier = trying(&world);
    assert!(world.time.run(tier.conditions()).is_err());
    assert_eq!(tier.read_only(), None);
}
