//! What deletes, times to live, pins and events promise.

use std::collections::BTreeSet;
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteOutcome, DeleteReply, DeleteRequest, LeaseTerms, MAX_REQUEST_BLOCKS,
    Parent, Presence, PutRequest, Sequence, Target, TtlRequest,
};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::events::record::Content;
use kvarts_contract::events::{Cause, EventKind, Subject};
use kvarts_layout::{BlockKey, Coordinate, Group, IndexKey, Layout, NamespaceId};

use super::{Case, Desk, pages};
use crate::fixture;
use crate::stage::{ask, content_of};

pub(super) const CASES: &[Case] = &[
    ("a deleted block is a miss and may be put again", deleted),
    ("a delete of a column leaves the others, and one of all leaves none", columns),
    ("each key of a delete answers for itself", outcomes),
    ("a prefix takes what descends from it and nothing else", prefix),
    ("a namespace is emptied and can be used on", namespaces),
    ("a delete takes leased blocks, and the lease counts until it ends", leased),
    ("a put that a delete meets is refused, and stays away", met),
    ("deletes that cannot be are refused", refused),
    ("a put without a time to live has its namespace's", default_ttl),
    ("a time to live is changed block by block", set_ttl),
    ("a lease is renewed while it is in force", renewed),
    ("a pin holds blocks past their time", pinned),
    ("events tell of each block, in order, and a snapshot with them is the content", events),
    ("a point of another stream is a gap", gap),
];

const ODD: (Group, Coordinate) = (fixture::ODD, Coordinate::Replicated);

fn delete(desk: &Desk<'_>, target: Target) -> Result<DeleteReply, Error> {
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    ask(desk.stage, desk.stage.store().delete(request))
}

fn delete_keys(desk: &Desk<'_>, keys: &[BlockKey]) -> DeleteReply {
    delete(desk, Target::Keys { column: None, keys: keys.to_vec() }).expect("a well-formed delete")
}

fn presence(desk: &Desk<'_>, (group, coordinate): (Group, Coordinate), keys: &[BlockKey]) -> Vec<bool> {
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease: None };
    let reply = desk.stage.store().contains(&request).expect("a well-formed question");
    assert!(!reply.presence.contains(&Presence::Pending), "{reply:?}");
    reply.presence.iter().map(|one| *one == Presence::Here).collect()
}

fn deleted(desk: &Desk<'_>) {
    let keys = desk.keys(0..4);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    let reply = delete_keys(desk, &keys[1..3]);
    assert_eq!(reply, DeleteReply { outcomes: vec![DeleteOutcome::Deleted; 2], blocks: 2 });
    assert_eq!(presence(desk, pages(), &keys), [true, false, false, true]);
    desk.expect_missing(pages(), &keys, &[1, 2]);
    let again = desk.outcomes(desk.request(pages(), &keys, 2));
    let (stored, there) = (BlockOutcome::Stored, BlockOutcome::AlreadyThere);
    assert_eq!(again, [there.clone(), stored.clone(), stored, there]);
    desk.expect(pages(), &keys[1..3], 2);
    desk.expect(pages(), &keys[..1], 1);
}

fn columns(desk: &Desk<'_>) {
    let keys = desk.keys(0..2);
    for column in [pages(), ODD] {
        desk.store(column, &keys, 1, Layout::FullBlock);
    }
    let of_one = Target::Keys { column: Some(ODD), keys: vec![keys[0]] };
    assert_eq!(delete(desk, of_one).unwrap().blocks, 1);
    assert_eq!(
        (presence(desk, pages(), &keys), presence(desk, ODD, &keys)),
        (vec![true; 2], vec![false, true])
    );
    assert_eq!(
        delete_keys(desk, &keys),
        DeleteReply { outcomes: vec![DeleteOutcome::Deleted; 2], blocks: 3 }
    );
    assert_eq!(
        (presence(desk, pages(), &keys), presence(desk, ODD, &keys)),
        (vec![false; 2], vec![false; 2])
    );
}

fn outcomes(desk: &Desk<'_>) {
    let keys = desk.keys(0..3);
    desk.store(pages(), &keys[..1], 1, Layout::FullBlock);
    let asked = [keys[1], keys[0], keys[2], keys[0]];
    let reply = delete_keys(desk, &asked);
    use DeleteOutcome::{Deleted, NotHere};
    assert_eq!(reply, DeleteReply { outcomes: vec![NotHere, Deleted, NotHere, Deleted], blocks: 1 });
    assert_eq!(delete_keys(desk, &keys).outcomes, [NotHere, NotHere, NotHere]);
}

fn put(desk: &Desk<'_>, parent: Parent, keys: &[BlockKey]) {
    let request = PutRequest { parent, first_block: None, ..desk.request(pages(), keys, 1) };
    assert_eq!(desk.outcomes(request), vec![BlockOutcome::Stored; keys.len()]);
}

fn prefix(desk: &Desk<'_>) {
    let keys = desk.keys(0..20);
    put(desk, Parent::Root, &keys[..4]);
    put(desk, Parent::Key(keys[3]), &keys[4..6]);
    // Forks off behind the second block, and behind the fifth.
    put(desk, Parent::Key(keys[1]), &keys[6..8]);
    put(desk, Parent::Key(keys[4]), &keys[8..10]);
    // Not known to descend from anything.
    put(desk, Parent::Unknown, &keys[10..12]);
    // In another column, behind a block of this one.
    let odd = PutRequest { parent: Parent::Key(keys[9]), ..desk.request(ODD, &keys[12..14], 1) };
    assert_eq!(desk.outcomes(odd), vec![BlockOutcome::Stored; 2]);
    // Behind a block that is not here.
    put(desk, Parent::Key(keys[14]), &keys[15..16]);
    let gone = |range: &[usize]| (0..12).map(|n| !range.contains(&n)).collect::<Vec<_>>();
    let reply = delete(desk, Target::Prefix(keys[3])).unwrap();
    assert_eq!(reply, DeleteReply { outcomes: Vec::new(), blocks: 7 });
    assert_eq!(presence(desk, pages(), &keys[..12]), gone(&[3, 4, 5, 8, 9]));
    assert_eq!(presence(desk, ODD, &keys[12..14]), [false; 2]);
    // The key itself need not be here; what hangs behind another one stays.
    assert_eq!(delete(desk, Target::Prefix(keys[3])).unwrap().blocks, 0);
    assert_eq!(delete(desk, Target::Prefix(keys[14])).unwrap().blocks, 1);
    assert_eq!(delete(desk, Target::Prefix(keys[10])).unwrap().blocks, 1);
    assert_eq!(delete(desk, Target::Prefix(keys[0])).unwrap().blocks, 5);
    assert_eq!(presence(desk, pages(), &keys[10..12]), [false, true]);
}

fn namespaces(desk: &Desk<'_>) {
    let keys = desk.keys(0..40);
    let other = Desk::new(desk.stage, "a namespace beside the one that is emptied");
    for desk in [desk, &other] {
        desk.store(pages(), &keys, 1, Layout::LayerBlock);
        desk.store(ODD, &keys, 1, Layout::LayerBlock);
    }
    for round in 2..4 {
        let blocks = if round == 2 { 80 } else { 1 };
        assert_eq!(delete(desk, Target::Namespace), Ok(DeleteReply { outcomes: Vec::new(), blocks }));
        assert_eq!(presence(desk, pages(), &keys), [false; 40]);
        assert_eq!(presence(desk, ODD, &keys), [false; 40]);
        desk.store(pages(), &keys[..1], round, Layout::FullBlock);
        desk.expect(pages(), &keys[..1], round);
    }
    other.expect(pages(), &keys, 1);
    let again = desk
        .stage
        .store()
        .register(&fixture::identity("a namespace is emptied and can be used on"), &fixture::geometry());
    assert_eq!(again, Ok(desk.namespace));
}

fn leased(desk: &Desk<'_>) {
    let keys = desk.keys(0..2);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    let each = fixture::shape(pages().0, pages().1).block_bytes();
    let tenant = desk.chain as u32;
    let terms = LeaseTerms { hold: Duration::from_secs(60), tenant, cap_bytes: each * 3 };
    let ask = |keys| {
        let (group, coordinate) = pages();
        let lease = Some(terms);
        desk.stage.store().contains(&ContainsRequest {
            namespace: desk.namespace,
            group,
            coordinate,
            keys,
            lease,
        })
    };
    let lease = ask(&keys).unwrap().lease.unwrap();
    assert_eq!(delete_keys(desk, &keys).blocks, 2);
    assert_eq!(presence(desk, pages(), &keys), [false; 2]);
    desk.store(pages(), &keys, 2, Layout::FullBlock);
    let full = Reason::PinCap { limit: each * 3, wanted: each * 4 };
    assert_eq!(ask(&keys), Err(Error(full)));
    assert!(desk.stage.store().unlock(lease));
    let lease = ask(&keys).unwrap().lease.unwrap();
    assert!(desk.stage.store().unlock(lease));
    desk.expect(pages(), &keys, 2);
}

fn met(desk: &Desk<'_>) {
    let keys = desk.keys(0..6);
    let put = desk.stage.store().put(desk.request(pages(), &keys, 1));
    let reply = delete_keys(desk, &keys[2..4]);
    let outcomes = desk.stage.answer(put).expect("a well-formed put").outcomes;
    for (at, (outcome, key)) in outcomes.iter().zip(&keys).enumerate() {
        let here = presence(desk, pages(), &[*key]) == [true];
        match outcome {
            // The put was over when the delete came.
            BlockOutcome::Stored if (2..4).contains(&at) => {
                assert!(!here && reply.outcomes[at - 2] == DeleteOutcome::Deleted);
            }
            BlockOutcome::Stored => assert!(here),
            BlockOutcome::Refused(Reason::Deleted) => assert!(!here),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(presence(desk, pages(), &keys[2..4]), [false; 2]);
    let again = desk.outcomes(desk.request(pages(), &keys[2..4], 2));
    assert_eq!(again, [BlockOutcome::Stored, BlockOutcome::Stored]);
    desk.expect(pages(), &keys[2..4], 2);
}

fn refused(desk: &Desk<'_>) {
    let keys = desk.keys(0..1);
    let reason = |target| delete(desk, target).expect_err("it must be refused").0;
    assert_eq!(reason(Target::Keys { column: None, keys: Vec::new() }), Reason::Empty);
    let many = vec![keys[0]; MAX_REQUEST_BLOCKS + 1];
    assert_eq!(reason(Target::Keys { column: None, keys: many }), Reason::TooMany("blocks"));
    let column = Some((Group(9), Coordinate::Replicated));
    assert!(matches!(reason(Target::Keys { column, keys: keys.clone() }), Reason::Shape(_)));
    let stranger = NamespaceId([3; 32]);
    for target in
        [Target::Namespace, Target::Prefix(keys[0]), Target::Keys { column: None, keys: keys.clone() }]
    {
        let request = DeleteRequest { namespace: stranger, target: target.clone(), deadline: None };
        let refused = ask(desk.stage, desk.stage.store().delete(request)).unwrap_err();
        assert_eq!(refused.0, Reason::UnknownNamespace(stranger));
        let deadline = Some(desk.stage.now());
        let request = DeleteRequest { namespace: desk.namespace, target, deadline };
        let refused = ask(desk.stage, desk.stage.store().delete(request)).unwrap_err();
        assert_eq!(refused.0, Reason::DeadlineInPast);
    }
    let store = desk.stage.store();
    let unknown = Err(Error(Reason::UnknownNamespace(stranger)));
    assert_eq!(store.set_default_ttl(stranger, None), unknown);
    assert!(store.set_ttl(&TtlRequest { namespace: stranger, ..ttl_request(desk, &keys, None) }).is_err());
}

fn ttl_request<'a>(desk: &Desk<'_>, keys: &'a [BlockKey], ttl: Option<Duration>) -> TtlRequest<'a> {
    let (group, coordinate) = pages();
    TtlRequest { namespace: desk.namespace, group, coordinate, keys, ttl }
}

const MINUTE: Duration = Duration::from_secs(60);

fn default_ttl(desk: &Desk<'_>) {
    let (keys, store) = (desk.keys(0..4), desk.stage.store());
    desk.store(pages(), &keys[..1], 1, Layout::FullBlock);
    store.set_default_ttl(desk.namespace, Some(MINUTE)).unwrap();
    desk.store(pages(), &keys[1..2], 1, Layout::FullBlock);
    let longer = PutRequest { expires_after: Some(3 * MINUTE), ..desk.request(pages(), &keys[2..3], 1) };
    assert_eq!(desk.outcomes(longer), [BlockOutcome::Stored]);
    store.set_default_ttl(desk.namespace, None).unwrap();
    desk.store(pages(), &keys[3..], 1, Layout::FullBlock);
    assert_eq!(presence(desk, pages(), &keys), [true; 4]);
    if desk.stage.advance(2 * MINUTE) {
        assert_eq!(presence(desk, pages(), &keys), [true, false, true, true]);
    }
    if desk.stage.advance(2 * MINUTE) {
        assert_eq!(presence(desk, pages(), &keys), [true, false, false, true]);
    }
}

fn set_ttl(desk: &Desk<'_>) {
    let (keys, store) = (desk.keys(0..7), desk.stage.store());
    let request = PutRequest { expires_after: Some(3 * MINUTE), ..desk.request(pages(), &keys[..6], 1) };
    assert_eq!(desk.outcomes(request), vec![BlockOutcome::Stored; 6]);
    let changed = |keys: &[BlockKey], ttl| store.set_ttl(&ttl_request(desk, keys, ttl)).unwrap().changed;
    // One is shortened, one is kept for ever, one is asked for twice; one is not here.
    assert_eq!(changed(&[keys[1], keys[6]], Some(MINUTE)), [true, false]);
    assert_eq!(changed(&keys[2..3], None), [true]);
    assert_eq!(changed(&[keys[3], keys[3]], Some(9 * MINUTE)), [true, true]);
    assert_eq!(changed(&[keys[1], keys[4]], Some(MINUTE)), [true, true]);
    desk.expect(pages(), &keys[..6], 1);
    if desk.stage.advance(2 * MINUTE) {
        assert_eq!(presence(desk, pages(), &keys[..6]), [true, false, true, true, false, true]);
    }
    if desk.stage.advance(2 * MINUTE) {
        assert_eq!(presence(desk, pages(), &keys[..6]), [false, false, true, true, false, false]);
        assert_eq!(changed(&keys[..4], None), [false, false, true, true]);
    }
    if desk.stage.advance(20 * MINUTE) {
        desk.expect(pages(), &keys[2..4], 1);
    }
}

fn lease_on(desk: &Desk<'_>, keys: &[BlockKey], hold: Duration) -> kvarts_contract::api::LeaseId {
    let (group, coordinate) = pages();
    let lease = Some(LeaseTerms { hold, tenant: desk.chain as u32, cap_bytes: u64::MAX });
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys, lease };
    desk.stage.store().contains(&request).unwrap().lease.expect("something to hold")
}

fn renewed(desk: &Desk<'_>) {
    let (keys, store) = (desk.keys(0..1), desk.stage.store());
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    let lease = lease_on(desk, &keys, MINUTE);
    assert_eq!(store.renew(lease, 3 * MINUTE), Ok(()));
    if desk.stage.advance(2 * MINUTE) {
        assert_eq!(store.renew(lease, MINUTE), Ok(()));
        assert!(desk.stage.advance(2 * MINUTE));
        assert_eq!(store.renew(lease, MINUTE), Err(Error(Reason::LeaseEnded)));
    }
    let lease = lease_on(desk, &keys, MINUTE);
    assert!(store.unlock(lease));
    assert_eq!(store.renew(lease, MINUTE), Err(Error(Reason::LeaseEnded)));
}

fn pinned(desk: &Desk<'_>) {
    let (keys, store) = (desk.keys(0..2), desk.stage.store());
    let request = PutRequest { expires_after: Some(MINUTE), ..desk.request(pages(), &keys, 1) };
    assert_eq!(desk.outcomes(request), vec![BlockOutcome::Stored; 2]);
    let (group, coordinate) = pages();
    let keys_of_pin = &keys[..1];
    let request =
        ContainsRequest { namespace: desk.namespace, group, coordinate, keys: keys_of_pin, lease: None };
    let pin = store.pin(&request, desk.chain as u32, u64::MAX).unwrap().lease.unwrap();
    if desk.stage.advance(Duration::from_secs(400 * 86_400)) {
        assert_eq!(presence(desk, pages(), &keys), [true, false]);
        desk.expect(pages(), &keys[..1], 1);
    }
    assert!(store.unpin(pin));
    assert!(!store.unpin(pin));
    assert_eq!(presence(desk, pages(), &keys[..1]), [!desk.stage.advance(Duration::ZERO)]);
}

fn events(desk: &Desk<'_>) {
    let (keys, store) = (desk.keys(0..3), desk.stage.store());
    let keys: [BlockKey; 3] = keys.try_into().expect("three keys");
    let name = |key: BlockKey| {
        let (group, coordinate) = pages();
        IndexKey { namespace: desk.namespace, key, group, coordinate }
    };
    let mut reader = store.subscribe(None);
    let before = reader.sequence();
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    delete_keys(desk, &keys[1..2]);
    delete(desk, Target::Prefix(keys[2])).unwrap();
    delete(desk, Target::Namespace).unwrap();
    desk.store(pages(), &keys[..1], 2, Layout::FullBlock);
    let mine = |subject: &Subject| match subject {
        Subject::Block(block) => block.namespace == desk.namespace,
        Subject::Namespace(namespace) => *namespace == desk.namespace,
    };
    let (mut told, mut picture) = (Vec::new(), Content::default());
    loop {
        let events = reader.try_next(2).unwrap();
        if events.is_empty() {
            break;
        }
        for event in events {
            picture.apply(&event);
            told.push(event);
        }
    }
    let numbers: Vec<u64> = told.iter().map(|event| event.sequence.number).collect();
    let expected: Vec<u64> = (before.number + 1..).take(numbers.len()).collect();
    assert_eq!(numbers, expected);
    let told: Vec<_> = told
        .iter()
        .filter(|event| mine(&event.subject))
        .map(|event| (event.kind, event.cause, event.subject))
        .collect();
    let stored = |key| (EventKind::Stored, Cause::Put, Subject::Block(name(key)));
    // Of one put, blocks come in any order.
    assert_eq!(
        BTreeSet::from_iter(&told[..3]),
        BTreeSet::from_iter(&keys.each_ref().map(|key| stored(*key)))
    );
    let expected = [
        (EventKind::Deleted, Cause::Key, Subject::Block(name(keys[1]))),
        (EventKind::Deleted, Cause::Prefix, Subject::Block(name(keys[2]))),
        (EventKind::Deleted, Cause::Namespace, Subject::Namespace(desk.namespace)),
        stored(keys[0]),
    ];
    assert_eq!(told[3..], expected);
    let content = content_of(desk.stage);
    let here: BTreeSet<_> =
        content.blocks.iter().filter(|block| block.namespace == desk.namespace).copied().collect();
    assert_eq!(here, BTreeSet::from([name(keys[0])]));
    picture.blocks.retain(|block| block.namespace == desk.namespace);
    assert_eq!(picture.blocks, here);
}

fn gap(desk: &Desk<'_>) {
    let store = desk.stage.store();
    let now = store.subscribe(None).sequence();
    let earlier = Sequence { stream: now.stream ^ 1, ..now };
    assert!(store.subscribe(Some(earlier)).try_next(1).is_err());
    assert!(store.subscribe(Some(now)).try_next(1).is_ok());
    let page = ask(desk.stage, store.snapshot(None)).unwrap();
    if let Some(next) = page.next {
        let stale = kvarts_contract::api::SnapshotCursor { sequence: earlier, ..next };
        assert_eq!(ask(desk.stage, store.snapshot(Some(stale))), Err(Error(Reason::EventGap)));
    }
}
