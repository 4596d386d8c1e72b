//! Sessions against a model that keeps each of them whole, and looks at all of them each time.

use proptest::prelude::*;

use super::*;

const HOLD: Duration = Duration::from_secs(10);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key(n: u32) -> BlockKey {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&n.to_le_bytes());
    BlockKey(key)
}

fn name(tenant: u32, id: u64) -> Name {
    Name { tenant, id }
}

fn stand(blocks: u32) -> Stand {
    Stand { namespace: NamespaceId([1; 32]), head: key(0), tip: key(blocks), blocks }
}

fn grant(lease: u64, from: u32, to: u32) -> Grant {
    Grant { lease, from, to }
}

fn open(sessions: &mut Sessions, id: u64, blocks: u32) {
    let grants = vec![grant(id * 100, 0, blocks)];
    sessions.open(name(1, id), stand(blocks), grants, HOLD, at(0)).unwrap();
}

fn is_empty(sessions: &Sessions) -> bool {
    let Sessions { all, ends, forks, chains, sessions, grants, tenants: _ } = sessions;
    let nothing = sessions.of.is_empty() && grants.of.is_empty();
    nothing && all.is_empty() && ends.is_empty() && forks.is_empty() && chains.is_empty()
}

#[test]
fn a_session_ends_with_its_lease_and_gives_back_what_it_held_once() {
    let mut sessions = Sessions::default();
    open(&mut sessions, 1, 4);
    assert_eq!(sessions.expire(at(9)), Ended::default());
    assert_eq!(sessions.renew(name(1, 1), HOLD, at(9)), Ok(vec![100]));
    assert!(sessions.see(name(1, 1), at(18)).is_some() && sessions.see(name(1, 1), at(19)).is_none());
    // At that time it is over, whether it was taken out or not.
    assert_eq!(sessions.renew(name(1, 1), HOLD, at(19)), Err(Refused::Unknown));
    let chain = (1, (NamespaceId([1; 32]), key(0)));
    let ended = Ended { leases: vec![100], chains: vec![chain], expired: 1 };
    assert_eq!((sessions.expire(at(19)), sessions.expire(at(30))), (ended, Ended::default()));
    assert!(is_empty(&sessions));
}

#[test]
fn what_a_fork_stands_on_outlives_its_parent_and_nothing_behind_it_does() {
    let mut sessions = Sessions::default();
    open(&mut sessions, 1, 4);
    sessions.extend(name(1, 1), (4, 4, key(8)), vec![grant(101, 4, 8)], at(1)).unwrap();
    sessions.extend(name(1, 1), (8, 4, key(12)), vec![grant(102, 8, 12)], at(1)).unwrap();
    assert_eq!(sessions.fork(name(1, 2), 1, (6, key(6)), at(60), at(1)), Ok(vec![100, 101, 102]));
    assert_eq!(sessions.see(name(1, 1), at(1)).unwrap().forks, 1);
    let ended = sessions.close(name(1, 1), at(2)).unwrap();
    // The chain is not free: the fork stands on it.
    assert_eq!(ended, Ended { leases: vec![102], chains: vec![], expired: 0 });
    assert_eq!(sessions.count(), (1, 1, 2));
    assert_eq!(sessions.close(name(1, 1), at(2)), None);
    assert_eq!(sessions.fork(name(1, 3), 1, (4, key(4)), HOLD, at(2)), Err(Refused::Unknown));
    // A fork of the fork that takes none of its blocks stands on the rest itself.
    sessions.extend(name(1, 2), (6, 2, key(70)), vec![grant(200, 6, 8)], at(2)).unwrap();
    sessions.fork(name(1, 4), 2, (5, key(5)), at(60), at(2)).unwrap();
    assert_eq!(sessions.see(name(1, 4), at(2)).unwrap().parent, Some((1, 5)));
    assert_eq!(sessions.close(name(1, 2), at(3)).unwrap().leases, [200]);
    let mut last = sessions.close(name(1, 4), at(3)).unwrap();
    last.leases.sort_unstable();
    assert_eq!((last.leases, last.chains.len()), (vec![100, 101], 1));
    assert!(is_empty(&sessions));
}

#[test]
fn blocks_that_are_told_again_count_once_and_others_in_their_place_are_refused() {
    let mut sessions = Sessions::default();
    open(&mut sessions, 1, 4);
    let one = name(1, 1);
    let next = |lease| vec![grant(lease, 4, 6)];
    assert_eq!(sessions.extend(one, (4, 2, key(6)), next(101), at(1)), Ok(vec![]));
    assert_eq!(sessions.extend(one, (4, 2, key(6)), next(102), at(1)), Ok(vec![101]));
    assert_eq!(sessions.extend(one, (4, 2, key(9)), next(103), at(1)), Err(Refused::Diverged));
    let refused = Err(Refused::OutOfOrder { from: 0, blocks: 6 });
    assert_eq!(sessions.extend(one, (7, 2, key(9)), next(103), at(1)), refused);
    assert_eq!(sessions.extend(one, (u32::MAX, 2, key(9)), next(103), at(1)), refused);
    assert_eq!(sessions.extend(one, (0, 6, key(6)), vec![grant(104, 0, 6)], at(1)), Ok(vec![100, 102]));
    assert_eq!(sessions.count(), (1, 0, 1));
}

#[test]
fn no_session_of_another_tenant_is_seen_extended_forked_or_closed() {
    let mut sessions = Sessions::default();
    open(&mut sessions, 1, 4);
    let other = name(2, 1);
    assert_eq!(sessions.see(other, at(1)), None);
    assert_eq!(sessions.list(name(2, 0), 10, at(1)), []);
    assert_eq!(sessions.renew(other, HOLD, at(1)), Err(Refused::Unknown));
    assert_eq!(sessions.extend(other, (4, 1, key(5)), vec![], at(1)), Err(Refused::Unknown));
    assert_eq!(sessions.fork(name(2, 7), 1, (4, key(4)), HOLD, at(1)), Err(Refused::Unknown));
    assert_eq!(sessions.hand_over(other, at(1)), Err(Refused::Unknown));
    assert_eq!(sessions.close(other, at(1)), None);
    assert_eq!(sessions.list(name(1, 0), 10, at(1)).len(), 1);
}

#[test]
fn what_was_handed_over_only_waits_for_its_end_and_may_come_back() {
    let mut sessions = Sessions::default();
    open(&mut sessions, 1, 4);
    open(&mut sessions, 2, 4);
    assert_eq!(sessions.hand_over(name(1, 1), at(1)), Ok((stand(4), false)));
    // Of the last one on its chain the chain is free.
    assert_eq!(sessions.hand_over(name(1, 2), at(1)), Ok((stand(4), true)));
    assert_eq!(sessions.renew(name(1, 1), HOLD, at(2)), Err(Refused::HandedOver));
    assert_eq!(sessions.extend(name(1, 1), (4, 1, key(5)), vec![], at(2)), Err(Refused::HandedOver));
    assert!(sessions.see(name(1, 1), at(2)).unwrap().is_handed_over);
    let back = vec![grant(500, 0, 6)];
    assert_eq!(sessions.open(name(1, 1), stand(6), back, HOLD, at(3)), Ok(()));
    assert_eq!(sessions.open(name(1, 1), stand(6), vec![], HOLD, at(3)), Err(Refused::Taken));
    let fewer = sessions.open(name(1, 2), stand(3), vec![], HOLD, at(3));
    assert_eq!(fewer, Err(Refused::Fewer { blocks: 4 }));
    assert_eq!(sessions.see(name(1, 1), at(3)).unwrap().grants, 2);
    assert_eq!(sessions.expire(at(20)).expired, 2);
    assert!(is_empty(&sessions));
}

/// Its client says all of its blocks from then on, and was refused what its parent had had.
#[test]
fn a_fork_that_comes_back_from_another_node_has_all_of_its_blocks_itself() {
    let mut sessions = Sessions::default();
    open(&mut sessions, 1, 4);
    sessions.fork(name(1, 2), 1, (3, key(3)), HOLD, at(0)).unwrap();
    assert!(sessions.extend(name(1, 2), (0, 3, key(3)), vec![], at(0)).is_err());
    sessions.hand_over(name(1, 2), at(1)).unwrap();
    let back = vec![grant(200, 0, 5)];
    sessions.open(name(1, 2), stand(5), back, HOLD, at(1)).unwrap();
    assert_eq!(sessions.extend(name(1, 2), (0, 5, key(5)), vec![grant(201, 0, 5)], at(1)), Ok(vec![200]));
    // A fork of it stands on it, and not on what it stood on.
    sessions.fork(name(1, 3), 2, (2, key(2)), at(60), at(1)).unwrap();
    assert_eq!(sessions.see(name(1, 3), at(1)).unwrap().parent, Some((2, 2)));
    sessions.close(name(1, 2), at(2)).unwrap();
    sessions.close(name(1, 1), at(2)).unwrap();
    assert_eq!(sessions.count(), (1, 2, 2));
    sessions.close(name(1, 3), at(2)).unwrap();
    assert!(is_empty(&sessions));
}

#[test]
fn a_tenant_that_opens_without_end_takes_no_others_room() {
    let mut sessions = Sessions::new(100, 1000);
    sessions.share_among(2);
    let opened = |sessions: &mut Sessions, tenant| {
        let one = |id: &u64| sessions.open(name(tenant, *id), stand(1), vec![], HOLD, at(0)).is_ok();
        (0..200).take_while(one).count()
    };
    assert_eq!((opened(&mut sessions, 1), opened(&mut sessions, 2)), (75, 25));
    assert_eq!(sessions.fork(name(1, 500), 1, (1, key(1)), HOLD, at(0)), Err(Refused::Full));
    sessions.close(name(1, 0), at(1)).unwrap();
    assert!(sessions.has_room(2, 0));
    assert_eq!(sessions.forget(&[1]).chains.len(), 1);
    assert_eq!(sessions.count(), (25, 0, 0));
}

#[test]
fn one_session_has_a_bound_of_grants_and_of_depth() {
    let mut sessions = Sessions::default();
    open(&mut sessions, 1, 1);
    let last = GRANTS_OF_ONE as u32;
    for n in 1..last {
        let grants = vec![grant(u64::from(n), n, n + 1)];
        sessions.extend(name(1, 1), (n, 1, key(n + 1)), grants, at(1)).unwrap();
    }
    let more = vec![grant(9999, last, last + 1)];
    assert_eq!(sessions.extend(name(1, 1), (last, 1, key(last + 1)), more, at(1)), Err(Refused::Grants));
    let whole = vec![grant(9999, 0, last + 1)];
    let over = sessions.extend(name(1, 1), (0, last + 1, key(last + 1)), whole, at(1)).unwrap();
    assert_eq!(over.len(), GRANTS_OF_ONE);
    for depth in 1..DEPTH_MAX as u64 {
        let from = depth as u32;
        sessions.fork(name(1, depth + 1), depth, (from, key(from)), HOLD, at(1)).unwrap();
        sessions.extend(name(1, depth + 1), (from, 1, key(from + 1)), vec![], at(1)).unwrap();
    }
    let deepest = DEPTH_MAX as u32;
    let refused = sessions.fork(name(1, 900), DEPTH_MAX as u64, (deepest, key(deepest)), HOLD, at(1));
    assert_eq!(refused, Err(Refused::Depth));
}

/// A session of the model, which is never taken out.
#[derive(Clone, Debug)]
struct Plain {
    parent: Option<(usize, u32)>,
    blocks: u32,
    until: Duration,
    is_closed: bool,
    grants: Vec<Grant>,
}

/// What must be held now: of each session that lives all, and of what it stands on what begins before its place.
fn needed(model: &[Plain], now: Duration) -> BTreeSet<u64> {
    let mut needed = BTreeSet::new();
    for one in model.iter().filter(|one| !one.is_closed && now < one.until) {
        let (mut next, mut before) = (Some(one), u32::MAX);
        while let Some(one) = next {
            needed.extend(one.grants.iter().filter(|grant| grant.from < before).map(|grant| grant.lease));
            (next, before) =
                one.parent.map_or((None, 0), |(above, at)| (Some(&model[above]), at.min(before)));
        }
    }
    needed
}

#[derive(Clone, Debug)]
enum Step {
    Open(u32),
    Fork(usize, u32),
    Extend(usize, u32),
    Renew(usize, u64),
    Close(usize),
    HandOver(usize),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let of = 0usize..7;
    let one = prop_oneof![
        1 => (1u32..5).prop_map(Step::Open),
        3 => (of.clone(), 1u32..7).prop_map(|(of, at)| Step::Fork(of, at)),
        3 => (of.clone(), 1u32..4).prop_map(|(of, count)| Step::Extend(of, count)),
        2 => (of.clone(), 1u64..20).prop_map(|(of, hold)| Step::Renew(of, hold)),
        2 => of.clone().prop_map(Step::Close),
        1 => of.prop_map(Step::HandOver),
        2 => (1u64..8).prop_map(Step::Wait),
    ];
    proptest::collection::vec(one, 1..80)
}

/// The block before a place of a session.
fn tip(sessions: &Sessions, of: usize, place: u32, now: Duration) -> BlockKey {
    let stand = sessions.see(name(1, of as u64), now).map(|seen| seen.stand);
    stand.filter(|stand| stand.blocks == place).map_or(key(place), |stand| stand.tip)
}

proptest! {
    /// Whatever clients do, and whenever they vanish: what sessions need is held, what none needs is given back once, and when all
    /// leases have ended nothing is left.
    #[test]
    fn what_is_held_is_what_living_sessions_need_and_nothing_leaks(steps in steps()) {
        let (mut sessions, mut model, mut held) = (Sessions::default(), Vec::<Plain>::new(), BTreeSet::new());
        let (mut now, mut lease) = (at(0), 0);
        let mut next_lease = || { lease += 1; lease };
        for step in steps {
            let lives = |of: usize| model.get(of).is_some_and(|one: &Plain| !one.is_closed && now < one.until);
            let mut over = Vec::new();
            match step {
                Step::Open(blocks) => {
                    let grants = vec![grant(next_lease(), 0, blocks)];
                    sessions.open(name(1, model.len() as u64), stand(blocks), grants.clone(), HOLD, now).unwrap();
                    held.extend(grants.iter().map(|one| one.lease));
                    model.push(Plain { parent: None, blocks, until: now + HOLD, is_closed: false, grants });
                }
                Step::Fork(of, place) => {
                    let is_possible = lives(of) && model[of].blocks >= place;
                    let tip = tip(&sessions, of, place, now);
                    let forked = sessions.fork(name(1, model.len() as u64), of as u64, (place, tip), HOLD, now);
                    if forked == Err(Refused::HandedOver) {
                        continue;
                    }
                    prop_assert_eq!(forked.is_ok(), is_possible);
                    if is_possible {
                        let parent = Some((of, place));
                        model.push(Plain { parent, blocks: place, until: now + HOLD, is_closed: false, grants: vec![] });
                    }
                }
                Step::Extend(of, count) => {
                    let from = model.get(of).map_or(0, |one| one.blocks);
                    let grants = vec![grant(next_lease(), from, from + count)];
                    let done = sessions.extend(name(1, of as u64), (from, count, key(from + count)), grants.clone(), now);
                    if done == Err(Refused::HandedOver) {
                        continue;
                    }
                    prop_assert_eq!(done.is_ok(), lives(of));
                    if done.is_ok() {
                        held.extend(grants.iter().map(|one| one.lease));
                        (model[of].blocks, model[of].grants) = (from + count, [model[of].grants.clone(), grants].concat());
                    }
                }
                Step::Renew(of, seconds) => {
                    let done = sessions.renew(name(1, of as u64), at(seconds), now);
                    if done == Err(Refused::HandedOver) {
                        continue;
                    }
                    prop_assert_eq!(done.is_ok(), lives(of));
                    if lives(of) {
                        model[of].until = now + at(seconds);
                    }
                }
                Step::Close(of) => {
                    let ended = sessions.close(name(1, of as u64), now);
                    prop_assert_eq!(ended.is_some(), lives(of));
                    if let Some(ended) = ended {
                        model[of].is_closed = true;
                        over = ended.leases;
                    }
                }
                Step::HandOver(of) => drop(sessions.hand_over(name(1, of as u64), now)),
                Step::Wait(seconds) => {
                    now += at(seconds);
                    over = sessions.expire(now).leases;
                }
            }
            for lease in over {
                prop_assert!(held.remove(&lease), "{lease} was given back twice");
            }
            prop_assert_eq!(&held, &needed(&model, now));
            prop_assert_eq!(sessions.count().2, held.len());
        }
        for lease in sessions.expire(now + SESSION_LEASE_MAX).leases {
            prop_assert!(held.remove(&lease));
        }
        prop_assert!(held.is_empty() && is_empty(&sessions), "{sessions:?}");
    }

    /// The store is asked to hold each grant at least as long as a session lives that needs it.
    #[test]
    fn no_grant_ends_in_the_store_before_the_last_session_that_needs_it(steps in steps()) {
        let (mut sessions, mut ends) = (Sessions::default(), BTreeMap::<u64, Duration>::new());
        let (mut now, mut count, mut lease) = (at(0), 0, 0);
        for step in steps {
            let of = |of: usize| name(1, of as u64);
            let seen = |sessions: &Sessions, of: Name| sessions.see(of, now).map(|seen| seen.stand);
            lease += 1;
            match step {
                Step::Open(blocks) => {
                    let grants = vec![grant(lease, 0, blocks)];
                    sessions.open(name(1, count), stand(blocks), grants, HOLD, now).unwrap();
                    ends.insert(lease, now + HOLD);
                    count += 1;
                }
                Step::Fork(parent, place) => {
                    let Some(stand) = seen(&sessions, of(parent)) else { continue };
                    let place = place.min(stand.blocks);
                    let tip = if place == stand.blocks { stand.tip } else { key(place) };
                    if let Ok(held) = sessions.fork(name(1, count), parent as u64, (place, tip), HOLD, now) {
                        ends.extend(held.into_iter().map(|lease| (lease, now + HOLD)));
                        count += 1;
                    }
                }
                Step::Extend(one, more) => {
                    let (Some(stand), Ok(left)) = (seen(&sessions, of(one)), sessions.left(of(one), now)) else { continue };
                    let end = stand.blocks + more;
                    let grants = vec![grant(lease, stand.blocks, end)];
                    sessions.extend(of(one), (stand.blocks, more, key(end)), grants, now).unwrap();
                    ends.insert(lease, now + left);
                }
                Step::Renew(one, seconds) => {
                    let held = sessions.renew(of(one), at(seconds), now).unwrap_or_default();
                    ends.extend(held.into_iter().map(|lease| (lease, now + at(seconds))));
                }
                Step::Close(one) => drop(sessions.close(of(one), now)),
                Step::HandOver(one) => drop(sessions.hand_over(of(one), now)),
                Step::Wait(seconds) => {
                    now += at(seconds);
                    sessions.expire(now);
                }
            }
            for (name, known) in sessions.all.iter().filter(|(_, known)| known.is != Is::Rest) {
                let (mut next, mut before) = (Some(*name), u32::MAX);
                while let Some(name) = next {
                    let one = &sessions.all[&name];
                    for grant in one.grants.iter().filter(|grant| grant.from < before) {
                        prop_assert!(ends[&grant.lease] >= known.until, "{grant:?} of {name:?}");
                    }
                    (next, before) = one.parent.map_or((None, 0), |(id, at)| (Some(Name { id, ..name }), at.min(before)));
                }
            }
        }
    }
}
