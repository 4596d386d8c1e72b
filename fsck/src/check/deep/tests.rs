//! Fingerprints by hand, in memory and in files.

use super::*;

const AT: At = At { shard: 1, segment: 2, offset: 4096 };

fn compare(prints: &[Print], most: usize) -> Findings {
    let found = |most: usize| {
        let (mut sorter, mut group, mut into) =
            (Sorter::of_rows(most), Group::default(), Findings::default());
        sorter.take(prints.iter().copied()).unwrap();
        sorter.finish(|print| group.take(print, &mut into)).unwrap();
        group.end(&mut into);
        into
    };
    let (from_files, from_memory) = (found(most), found(prints.len() + 1));
    assert_eq!(from_files, from_memory);
    from_memory
}

fn made(subject: u8, kind: u8, origin: u8, content: u8, at: At) -> Print {
    print(&[subject; 16], kind, &[origin; 16], &[content; 16], at)
}

#[test]
fn copies_are_called_what_they_are() {
    let elsewhere = At { shard: 3, segment: 9, offset: 8192 };
    for (origin, content, label) in
        [(1, 1, "copy-of-origin"), (1, 2, "origin-content-differs"), (2, 2, "superseded-copy")]
    {
        let here = At { offset: 8192, ..AT };
        let found = compare(&[made(5, PRODUCTION, 1, 1, AT), made(5, PRODUCTION, origin, content, here)], 1);
        assert_eq!((found.times(label), found.times("copy-in-two-shards")), (1, 0));
        let found =
            compare(&[made(5, PRODUCTION, 1, 1, AT), made(5, PRODUCTION, origin, content, elsewhere)], 1);
        assert_eq!((found.times(label), found.times("copy-in-two-shards")), (1, 1));
    }
    let different = compare(&[made(5, PRODUCTION, 1, 1, AT), made(6, PRODUCTION, 1, 2, AT)], 1);
    assert!(different.counts.is_empty());
}

#[test]
fn parents_that_are_not_here_are_counted_and_others_are_not() {
    let found =
        compare(&[made(5, PARENT, 0, 0, AT), made(5, PRODUCTION, 1, 1, AT), made(6, PARENT, 0, 0, AT)], 1);
    assert_eq!((found.times("parent-absent"), found.counts.len()), (1, 1));
    assert_eq!(found.notes[0].place, AT.place());
}

#[test]
fn a_sequence_that_was_given_twice_is_a_problem() {
    let other = At { segment: 7, ..AT };
    let found = compare(
        &[made(5, SEQUENCE, 0, 0, AT), made(5, SEQUENCE, 0, 0, other), made(4, SEQUENCE, 0, 0, AT)],
        2,
    );
    assert_eq!((found.times("sequence-repeated"), found.problem_count), (1, 1));
    assert_eq!(found.problems[0].place, other.place());
}
