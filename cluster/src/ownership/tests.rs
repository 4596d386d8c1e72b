//! Ownership of chains: one owner at a time, leases that end by themselves, replicas, and bounds on all of them.

use proptest::prelude::*;

use super::*;

const CHAIN: Tag = Tag([5; 16]);
const OTHER: Tag = Tag([9; 16]);
const HOLD: Duration = Duration::from_secs(10);

fn node(n: u8) -> NodeId {
    kvarts_layout::StoreId([n; 16])
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A holder that goes on being confirmed.
fn confirmed(mut chains: Ownership) -> Ownership {
    chains.confirm(at(1000));
    chains
}

fn first() -> Ownership {
    confirmed(Ownership::take_over(1, true, 100, at(0)))
}

/// One that takes over from another.
fn next(epoch: u64, now: Duration) -> Ownership {
    let mut chains = Ownership::take_over(epoch, false, 100, now);
    chains.confirm(now);
    confirmed(chains)
}

#[test]
fn one_node_owns_a_chain_until_its_lease_ends_and_the_next_token_is_greater() {
    let mut chains = first();
    let lease = chains.claim(CHAIN, node(1), HOLD, at(0)).unwrap();
    assert_eq!(chains.claim(CHAIN, node(2), HOLD, at(9)), Err(Refused::Owned(lease)));
    assert!(chains.is_valid(&CHAIN, lease.token, at(9)));
    let renewed = chains.renew(CHAIN, node(1), lease.token, HOLD, at(9)).unwrap();
    assert_eq!((renewed.token, renewed.until), (lease.token, at(19)));
    let next = chains.claim(CHAIN, node(2), HOLD, at(19)).unwrap();
    assert!(next.token > lease.token);
    assert!(!chains.is_valid(&CHAIN, lease.token, at(19)));
    assert_eq!(chains.renew(CHAIN, node(1), lease.token, HOLD, at(19)), Err(Refused::Owned(next)));
    assert_eq!(chains.release(&CHAIN, node(1), lease.token, at(19)), Err(Refused::Stale));
    chains.release(&CHAIN, node(2), next.token, at(20)).unwrap();
    assert_eq!(chains.owner(&CHAIN, at(20)), None);
}

#[test]
fn an_owner_that_claims_again_for_less_owns_the_chain_as_long_as_it_was_told_before() {
    let mut chains = first();
    let long = chains.claim(CHAIN, node(1), HOLD, at(0)).unwrap();
    let short = chains.claim(CHAIN, node(1), at(1), at(0)).unwrap();
    // The answer of the first claim may come after that of the second.
    assert!(short.token > long.token && short.until == long.until);
    assert_eq!(chains.claim(CHAIN, node(2), HOLD, at(9)), Err(Refused::Owned(short)));
    chains.release(&CHAIN, node(1), short.token, at(9)).unwrap();
    assert!(chains.claim(CHAIN, node(2), HOLD, at(9)).is_ok());
}

#[test]
fn a_holder_that_another_may_have_taken_over_from_says_of_no_chain_who_owns_it() {
    let mut old = Ownership::take_over(1, true, 100, at(0));
    let lease = old.claim(CHAIN, node(1), LEASE_MAX, at(0)).unwrap();
    assert_eq!(old.look(&CHAIN, at(1)), Ok(lease));
    // Its owner gives the chain up where the next holder is, of which this one hears nothing.
    let mut new = Ownership::take_over(2, false, 100, at(6));
    new.confirm(at(6));
    assert!(matches!(new.look(&CHAIN, at(7)), Err(Refused::New(_))));
    assert_eq!(old.look(&CHAIN, at(7)), Err(Refused::Unconfirmed));
    assert_eq!(old.release(&CHAIN, node(1), lease.token, at(7)), Err(Refused::Unconfirmed));
}

#[test]
fn a_lease_that_was_given_up_at_a_new_holder_is_not_renewed_there_by_what_comes_late() {
    let lease = first().claim(CHAIN, node(1), LEASE_MAX, at(0)).unwrap();
    let mut new = Ownership::take_over(2, false, 100, at(1));
    new.confirm(at(2));
    let now = new.silent_until;
    new.confirm(now);
    new.release(&CHAIN, node(1), lease.token, now).unwrap();
    assert_eq!(new.renew(CHAIN, node(1), lease.token, HOLD, now), Err(Refused::Stale));
    assert_eq!(new.owner(&CHAIN, now), None);
    // Of a chain of which nothing was said it does not know.
    assert!(new.renew(OTHER, node(1), lease.token, HOLD, now).is_ok());
}

#[test]
fn no_lease_is_longer_than_the_longest() {
    let lease = first().claim(CHAIN, node(1), Duration::from_secs(1 << 40), at(0)).unwrap();
    assert_eq!(lease.until, LEASE_MAX);
}

#[test]
fn a_new_holder_grants_nothing_while_an_old_lease_may_be_valid_and_takes_one_over_that_is_renewed() {
    let mut old = first();
    let lease = old.claim(CHAIN, node(1), LEASE_MAX, at(100)).unwrap();
    let mut new = next(2, at(101));
    // The old holder may not know yet.
    assert!(matches!(new.renew(CHAIN, node(1), lease.token, HOLD, at(102)), Err(Refused::New(_))));
    assert!(matches!(new.claim(CHAIN, node(2), HOLD, at(110)), Err(Refused::New(_))));
    let renewed = new.renew(CHAIN, node(1), lease.token, HOLD, at(110)).unwrap();
    assert_eq!((renewed.owner, renewed.token), (node(1), lease.token));
    assert_eq!(new.claim(CHAIN, node(2), HOLD, at(119)), Err(Refused::Owned(renewed)));
    // The owner itself may claim, and its token grows.
    let again = new.claim(CHAIN, node(1), HOLD, at(119)).unwrap();
    assert!(again.token > lease.token && again.token.epoch == 2);
    // One that comes later than every old lease may last is not taken over.
    let mut late = next(3, at(200));
    let over = at(200) + CONFIRMED_FOR + LEASE_MAX + DRIFT + DRIFT;
    assert_eq!(late.renew(CHAIN, node(1), lease.token, HOLD, over), Err(Refused::Stale));
    assert!(late.claim(CHAIN, node(2), HOLD, over).is_ok());
}

#[test]
fn a_holder_that_was_not_confirmed_for_a_while_grants_nothing() {
    let mut chains = Ownership::take_over(1, true, 100, at(0));
    let lease = chains.claim(CHAIN, node(1), HOLD, at(4)).unwrap();
    assert_eq!(chains.renew(CHAIN, node(1), lease.token, HOLD, at(5)), Err(Refused::Unconfirmed));
    assert_eq!(chains.claim(CHAIN, node(1), HOLD, at(5)), Err(Refused::Unconfirmed));
    chains.confirm(at(2));
    assert!(chains.renew(CHAIN, node(1), lease.token, HOLD, at(6)).is_ok());
}

/// Members hear of a change at different times: until the last one that a new holder needs has heard of it, the old holder goes on.
#[test]
fn a_new_holder_is_silent_from_its_first_confirmation_on_and_not_from_when_it_heard() {
    let (mut old, mut new) = (first(), Ownership::take_over(2, false, 100, at(0)));
    assert_eq!(new.claim(CHAIN, node(2), HOLD, at(100)), Err(Refused::Unconfirmed));
    let lease = old.claim(CHAIN, node(1), LEASE_MAX, at(104)).unwrap();
    new.confirm(at(100));
    assert!(matches!(
        new.renew(CHAIN, node(3), Token { epoch: 1, number: 0 }, HOLD, at(104)),
        Err(Refused::New(_))
    ));
    new.confirm(at(lease.until.as_secs()));
    assert!(matches!(new.claim(CHAIN, node(2), HOLD, lease.until - HOLD), Err(Refused::New(_))));
    new.confirm(at(170));
    assert_eq!(new.claim(CHAIN, node(2), HOLD, at(170)).unwrap().owner, node(2));
}

#[test]
fn of_two_leases_of_an_old_holder_the_later_one_counts() {
    let mut old = first();
    let stale = old.claim(CHAIN, node(1), at(1), at(0)).unwrap();
    let valid = old.claim(CHAIN, node(2), HOLD, at(2)).unwrap();
    let mut new = next(2, at(3));
    // A node whose clock stood still renews first.
    new.renew(CHAIN, node(1), stale.token, HOLD, at(10)).unwrap();
    assert_eq!(new.renew(CHAIN, node(2), valid.token, HOLD, at(11)).unwrap().owner, node(2));
    assert!(matches!(new.renew(CHAIN, node(1), stale.token, HOLD, at(12)), Err(Refused::Owned(_))));
    // A token that no node can have been granted yet is refused.
    let forged = Token { epoch: 2, number: 1 << 60 };
    assert!(new.renew(CHAIN, node(3), forged, HOLD, at(13)).is_err());
}

#[test]
fn replicas_are_the_owners_to_grant_end_by_themselves_and_are_bounded() {
    let mut chains = first();
    let lease = chains.claim(CHAIN, node(1), LEASE_MAX, at(0)).unwrap();
    let other = Token { epoch: 0, number: 7 };
    assert_eq!(chains.replicate(&CHAIN, other, node(2), HOLD, at(0)), Err(Refused::Stale));
    for n in 2..2 + REPLICAS_MAX as u8 {
        chains.replicate(&CHAIN, lease.token, node(n), HOLD, at(0)).unwrap();
    }
    assert_eq!(chains.replicate(&CHAIN, lease.token, node(99), HOLD, at(0)), Err(Refused::Full));
    assert_eq!(chains.replicas(&CHAIN, at(9)).count(), REPLICAS_MAX);
    assert_eq!(chains.replicas(&CHAIN, at(10)).count(), 0);
    assert_eq!(
        chains.replicate(&CHAIN, lease.token, node(99), Duration::MAX, at(10)),
        Ok(at(10) + REPLICA_MAX)
    );
}

#[test]
fn chains_are_bounded_and_those_without_an_owner_make_room() {
    let mut chains = confirmed(Ownership::take_over(1, true, 3, at(0)));
    let tag = |n: u8| Tag([n; 16]);
    let first = chains.claim(tag(0), node(1), HOLD, at(0)).unwrap().token;
    for n in 1..3 {
        chains.claim(tag(n), node(1), HOLD, at(0)).unwrap();
    }
    assert_eq!(chains.claim(tag(3), node(1), HOLD, at(1)), Err(Refused::Full));
    chains.renew(tag(0), node(1), first, LEASE_MAX, at(2)).unwrap();
    chains.claim(tag(3), node(1), HOLD, at(11)).unwrap();
    assert_eq!(chains.len(), 2, "the one whose lease goes on, and the new one");
}

#[test]
fn a_node_that_claims_without_end_leaves_a_quarter_of_the_chains_to_others() {
    let mut chains = confirmed(Ownership::take_over(1, true, 40, at(0)));
    let tag = |n: u32| Tag(u128::from(n).to_be_bytes());
    for n in 0..1000 {
        let claimed = chains.claim(tag(n), node(1), LEASE_MAX, at(n.into()));
        assert!(claimed.is_ok() || claimed == Err(Refused::Full));
    }
    assert!(chains.len() <= 40);
    for n in 0..10 {
        assert!(chains.claim(tag(5000 + n), node(2), HOLD, at(1000)).is_ok(), "{n}");
    }
}

proptest! {
    /// Nodes keep the leases that they were told of, and ask one holder or the one before it, which does not know that it is
    /// none any more. At no time do two nodes have a lease that has not ended, and tokens only grow.
    #[test]
    fn at_most_one_node_has_a_lease_whatever_happens_to_its_holder(
        steps in prop::collection::vec((0u8..12, 0usize..3, 1u64..40, any::<bool>()), 1..400),
    ) {
        let (mut now, mut epoch, mut is_new) = (at(0), 1, false);
        let (mut holder, mut before) = (Ownership::take_over(1, true, 100, at(0)), None::<Ownership>);
        let mut known: [Option<Lease>; 3] = [None; 3];
        let mut greatest = Token::default();
        for (what, who, seconds, asks_old) in steps {
            let (id, hold) = (node(who as u8), at(seconds));
            let asked = before.as_mut().filter(|_| asks_old).unwrap_or(&mut holder);
            match (what, known[who].filter(|lease| now < lease.until)) {
                (0..3, _) => if let Ok(lease) = asked.claim(CHAIN, id, hold, now) {
                    prop_assert!(lease.token > greatest, "{:?} after {greatest:?}", lease.token);
                    (greatest, known[who]) = (lease.token, Some(lease));
                },
                (3..6, Some(lease)) => if let Ok(lease) = asked.renew(CHAIN, id, lease.token, hold, now) {
                    known[who] = Some(lease);
                },
                (6, Some(lease)) => if asked.release(&CHAIN, id, lease.token, now).is_ok() {
                    known[who] = None;
                },
                (7, _) => {
                    epoch += 1;
                    let new = Ownership::take_over(epoch, false, 100, now);
                    before = Some(std::mem::replace(&mut holder, new));
                    is_new = true;
                }
                // Until the new one is told that it is the holder, the old one may be.
                (8, _) if is_new => before.iter_mut().for_each(|before| before.confirm(now)),
                (8 | 9, _) => {
                    holder.confirm(now);
                    is_new = false;
                }
                _ => now += at(seconds) / 8,
            }
            let valid = known.iter().flatten().filter(|lease| now < lease.until).count();
            prop_assert!(valid <= 1, "{known:?} at {now:?}");
        }
    }
}
