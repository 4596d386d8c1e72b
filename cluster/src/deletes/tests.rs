//! The list of deletes: which entries a node sends, which it knows of another node, and which stay when the list is shortened.

use super::*;
use kvarts_layout::StoreId;

const HERE: NamespaceId = NamespaceId([1; 32]);
const THERE: NamespaceId = NamespaceId([2; 32]);
const COLUMN: Column = (Group(0), Coordinate::Replicated);

fn node(n: u8) -> NodeId {
    StoreId([n; 16])
}

fn key(n: u8) -> BlockKey {
    BlockKey([n; 32])
}

fn keys(namespace: NamespaceId, below_ms: u64, keys: &[u8]) -> Arc<Entry> {
    let keys = keys.iter().copied().map(key).collect();
    Arc::new(Entry { namespace, below_ms, what: What::Keys(None, keys) })
}

/// Takes in what another one tells, as far as it fits; gives how many entries did.
fn hear(log: &mut Log, told: &[Numbered]) -> usize {
    let mut new = 0;
    for Numbered { name, after, entry } in told {
        if log.told(*name, *after) == Told::New {
            log.add(*name, Arc::clone(entry), std::iter::empty());
            new += 1;
        }
    }
    new
}

#[test]
fn who_was_away_is_told_what_it_lacks_in_order_and_nothing_twice() {
    let (mut a, mut b) = (Log::default(), Log::default());
    for n in 1..=5u8 {
        a.add((node(1), u64::from(n)), keys(HERE, u64::from(n), &[n]), [node(2)].into_iter());
    }
    a.add((node(3), 1), keys(THERE, 9, &[9]), std::iter::empty());
    let (told, more) = a.beyond(b.known(), usize::MAX);
    assert_eq!((told.len(), more), (6, false));
    assert_eq!(hear(&mut b, &told[1..2]), 0, "what comes too early is not taken");
    assert_eq!((hear(&mut b, &told), hear(&mut b, &told)), (6, 0));
    assert_eq!(a.known(), b.known());
    assert!(a.beyond(b.known(), usize::MAX).0.is_empty());
    // In parts, however small.
    let mut c = Log::default();
    for round in 0..6 {
        let (told, more) = a.beyond(c.known(), 1);
        assert_eq!((told.len(), more), (1, round < 5));
        assert_eq!(hear(&mut c, &told), 1);
    }
}

#[test]
fn a_node_lacks_what_it_has_not_said_it_has_namespace_by_namespace() {
    let mut log = Log::default();
    log.add((node(1), 1), keys(HERE, 1, &[1]), [node(2), node(3)].into_iter());
    log.add((node(1), 2), keys(THERE, 2, &[2]), [node(2)].into_iter());
    assert!(log.lacks_of(&node(2), &HERE) && log.lacks_of(&node(2), &THERE));
    assert!(log.lacks_of(&node(3), &HERE) && !log.lacks_of(&node(3), &THERE) && !log.lacks(&node(4)));
    log.has(node(2), &Known::from([(node(1), 1), (node(2), 9)]));
    assert!(!log.lacks_of(&node(2), &HERE) && log.lacks_of(&node(2), &THERE));
    log.keep(|id| *id != node(3));
    log.has(node(2), &log.known().clone());
    assert!(log.is_settled());
}

#[test]
fn a_list_that_becomes_shorter_says_more_was_deleted_and_never_less() {
    let mut log = Log::default();
    for n in 1..=10u64 {
        let of = if n % 2 == 0 { HERE } else { THERE };
        log.add((node(1), n), keys(of, 100 + n, &[n as u8]), [node(2)].into_iter());
    }
    assert!(!log.shorten_to(usize::MAX, 10));
    let before = log.known().clone();
    assert!(log.shorten_to(usize::MAX, 9));
    assert_eq!((log.len(), log.known()), (7, &before));
    let (told, _) = log.beyond(&Known::new(), usize::MAX);
    let everything: Vec<(u64, NamespaceId, u64)> = told
        .iter()
        .filter(|told| told.entry.what == What::Everything)
        .map(|told| (told.name.1, told.entry.namespace, told.entry.below_ms))
        .collect();
    assert_eq!(everything, [(4, HERE, 104), (5, THERE, 105)]);
    // Who has come as far as the third lacks the others all the same.
    let mut other = Log::default();
    let told = log.beyond(&Known::from([(node(1), 3)]), usize::MAX).0;
    other.add((node(1), 3), keys(HERE, 1, &[1]), std::iter::empty());
    assert_eq!(hear(&mut other, &told), 7);
    assert!(log.lacks_of(&node(2), &HERE) && log.lacks_of(&node(2), &THERE));
    log.has(node(2), &before);
    assert!(log.is_settled());
    // Again and again it stays short.
    for n in 11..=1000u64 {
        log.add((node(1), n), keys(HERE, 100 + n, &[1]), std::iter::empty());
        log.shorten_to(usize::MAX, 9);
        assert!(log.len() <= 10, "{} entries", log.len());
        assert_eq!(log.entries().count(), log.len());
    }
}

#[test]
fn a_copy_that_was_read_before_a_delete_is_not_stored_behind_it() {
    let mut recent = Recent::default();
    let block = |n| (HERE, COLUMN, n);
    let (one, other) = (key(1), key(2));
    let before = recent.now();
    assert_eq!(recent.fate(before, block(&one), 5), CopyFate::Lives);
    recent.begin(keys(HERE, 10, &[1]));
    assert_eq!(recent.fate(before, block(&one), 9), CopyFate::Dies);
    assert_eq!(recent.fate(before, block(&one), 10), CopyFate::Lives, "it was produced later");
    assert_eq!(recent.fate(before, block(&other), 9), CopyFate::Lives);
    assert_eq!(
        recent.fate(recent.now(), block(&one), 9),
        CopyFate::Lives,
        "who is asked since has heard of it"
    );
    let before = recent.now();
    for (ends, expected) in [(70, 70), (50, 50), (60, 50)] {
        let what = What::Sooner(COLUMN, vec![one], ends);
        recent.begin(Arc::new(Entry { namespace: HERE, below_ms: 20, what }));
        assert_eq!(recent.fate(before, block(&one), 9), CopyFate::Ends(expected));
    }
    assert_eq!(recent.fate(before, (HERE, (Group(1), COLUMN.1), &one), 9), CopyFate::Lives);
    recent.begin(Arc::new(Entry { namespace: HERE, below_ms: 30, what: What::Prefix(vec![other]) }));
    assert_eq!(recent.fate(before, block(&one), 9), CopyFate::Dies, "it may descend from that key");
    assert_eq!(recent.fate(before, (THERE, COLUMN, &one), 9), CopyFate::Lives);
    assert!(recent.names(block(&one), 0) && !recent.names((THERE, COLUMN, &one), 0));
    assert!(!recent.names(block(&one), 30 + HINTS_MS), "hints are gone by then");
    for _ in 0..RECENT_ENTRIES {
        recent.begin(keys(THERE, 40, &[3]));
    }
    assert_eq!(recent.fate(before, block(&one), 99), CopyFate::Dies, "too long ago to tell");
    assert!(recent.entries.len() <= RECENT_ENTRIES);
}
