//! What blocks hang on: counts that end where they began, whatever happens to blocks and records meanwhile.

use super::*;

/// A record of one block behind `parent`.
fn behind(index: &Index, n: u64, parent: BlockFingerprint) -> (RecordId, BlockFingerprint) {
    let (block, mut out) = (print(index, n), Vec::new());
    let ticket = index.reserve(&[block], &mut out);
    assert_eq!(out, [Reservation::Reserved]);
    let parent = parent.first();
    let hangs = index.hang(parent);
    let record = index.records().insert(RecordInfo { parent, hangs, ..info(1) }).unwrap();
    assert_eq!(index.commit(ticket, record, &[block], 5), Ok(vec![]));
    (record, block)
}

/// Takes a block out, and its record.
fn take(index: &Index, (record, block): (RecordId, BlockFingerprint)) {
    assert_eq!(index.remove(block, at(record, 0)), Some(0));
    index.free_record(record).unwrap();
}

#[test]
fn each_record_behind_a_block_counts_once_and_until_it_is_freed_however_many_there_are() {
    let (index, _, prints) = with_blocks(1);
    let mut children = Vec::new();
    for n in 1..=40 {
        children.push(behind(&index, n, prints[0]));
        assert_eq!(index.hanging(prints[0]), n as u32);
        assert_eq!(index.locate(prints[0]).unwrap().hanging, n as u32);
    }
    for (left, child) in (0..40).rev().zip(children) {
        take(&index, child);
        assert_eq!(index.hanging(prints[0]), left);
    }
}

#[test]
fn what_hangs_on_a_block_moves_with_it_and_goes_with_it() {
    for many in [1, 20] {
        let (index, record, prints) = with_blocks(1);
        let children: Vec<_> = (1..=many).map(|n| behind(&index, n, prints[0])).collect();
        let copy = index.records().insert(info(1)).unwrap();
        assert_eq!(index.replace_location(prints[0], at(record, 0), at(copy, 0)), Ok(Some(0)));
        assert_eq!(index.lookup(prints[0]), Lookup::Live(at(copy, 0)));
        assert_eq!(index.hanging(prints[0]), many as u32);
        index.delete(prints[0]);
        assert_eq!(index.hanging(prints[0]), 0);
        // It comes again: nothing hangs on this one, and what hung on the other takes nothing from it.
        let ticket = index.reserve(&prints, &mut Vec::new());
        let again = index.records().insert(info(1)).unwrap();
        assert_eq!(index.commit(ticket, again, &prints, 5), Ok(vec![]));
        assert_eq!(index.hanging(prints[0]), 0);
        children.into_iter().for_each(|child| take(&index, child));
        assert_eq!(index.hanging(prints[0]), 0);
    }
}

#[test]
fn nothing_hangs_on_a_block_that_is_not_here_or_that_nobody_knows() {
    let index = Index::new(&[1; 32], 0);
    assert!(!index.hang(print(&index, 7).first()) && !index.hang(0));
    let child = behind(&index, 1, print(&index, 7));
    assert!(!index.records().get(child.0).unwrap().hangs);
    take(&index, child);
}

#[test]
fn a_block_that_comes_in_place_of_a_damaged_one_has_nothing_behind_it() {
    let (index, record, prints) = with_blocks(1);
    for n in 1..=20 {
        behind(&index, n, prints[0]);
    }
    index.quarantine(prints[0], at(record, 0));
    let mut out = Vec::new();
    let _ticket = index.reserve(&prints, &mut out);
    assert_eq!((out, index.hanging(prints[0])), (vec![Reservation::Reserved], 0));
}

/// As recovery takes records in: what hangs on a block may come before it.
fn found(index: &Index, n: u64, parent: u64) -> RecordId {
    let ticket = index.reserve(&[print(index, n)], &mut Vec::new());
    let parent = print(index, parent).first();
    let record = index.records().insert(RecordInfo { parent, ..info(1) }).unwrap();
    assert_eq!(index.commit(ticket, record, &[print(index, n)], 5), Ok(vec![]));
    record
}

fn survey(index: &Index) {
    let (mut known, mut some, mut cursor) = (Known::default(), Vec::new(), Some(RecordCursor::default()));
    while let Some(from) = cursor {
        cursor = index.records().snapshot(from, &mut some);
        for (id, info) in &some {
            let mut walk = Walk::from(*id, info);
            let found = loop {
                // In steps: a walk goes on where it stopped.
                if let Some(found) = index.walk(&mut walk, &mut known, 3) {
                    break found;
                }
            };
            index.hang_record(*id, info, found);
        }
    }
}

#[test]
fn what_recovery_takes_in_is_counted_by_one_walk_in_any_order_and_once() {
    let index = Index::new(&[1; 32], 0);
    let records: BTreeMap<_, _> = [5, 2, 9, 1, 0, 3, 8, 7, 4, 6]
        .map(|n: u64| (n, found(&index, n, n.checked_sub(1).unwrap_or(100))))
        .into();
    survey(&index);
    survey(&index);
    for n in 0..10 {
        assert_eq!(index.hanging(print(&index, n)), u32::from(n < 9), "{n}");
    }
    for n in (0..10).rev() {
        assert_eq!(index.hanging(print(&index, n)), 0, "{n}");
        take(&index, (records[&n], print(&index, n)));
    }
}

#[test]
fn of_a_chain_that_leads_into_itself_some_block_has_nothing_behind_it() {
    let index = Index::new(&[1; 32], 0);
    for (n, parent) in [(0, 2), (1, 0), (2, 1), (3, 1), (7, 7)] {
        found(&index, n, parent);
    }
    survey(&index);
    assert!((0..3).any(|n| index.hanging(print(&index, n)) == 0));
    assert_eq!(index.hanging(print(&index, 7)), 0);
    // Moves hung them on each other: that ends.
    let index = Index::new(&[1; 32], 0);
    for (n, parent) in [(0, 2), (1, 0), (2, 1)] {
        found(&index, n, parent);
    }
    for n in 0..3 {
        let Located { location, record, .. } = index.locate(print(&index, n)).unwrap();
        index.hang_record(location.record, &record, Cut::Whole);
    }
    assert!((0..3).all(|n| index.hanging(print(&index, n)) == 1));
    survey(&index);
    assert!((0..3).any(|n| index.hanging(print(&index, n)) == 0));
    // A put that names a parent behind its own block finds nothing to hang on.
    let index = Index::new(&[1; 32], 0);
    let (_, first) = behind(&index, 1, print(&index, 2));
    let (_, second) = behind(&index, 2, first);
    assert_eq!((index.hanging(first), index.hanging(second)), (1, 0));
}

#[test]
fn a_block_is_cut_off_if_any_before_it_is_not_here() {
    let index = Index::new(&[1; 32], 0);
    let records: Vec<_> = (1..=20).map(|n| found(&index, n, n - 1)).collect();
    let cut = |n: usize| {
        let mut walk = Walk::from(records[n], &index.records().get(records[n]).unwrap());
        index.walk(&mut walk, &mut Known::default(), usize::MAX)
    };
    assert_eq!((cut(0), cut(1), cut(19)), (Some(Cut::Missing), Some(Cut::Missing), Some(Cut::Missing)));
    let ticket = index.reserve(&[print(&index, 0)], &mut Vec::new());
    assert_eq!(cut(19), Some(Cut::Whole), "what is on its way is here");
    index.abandon(ticket, &[print(&index, 0)]);
    assert_eq!(cut(19), Some(Cut::Missing));
}
