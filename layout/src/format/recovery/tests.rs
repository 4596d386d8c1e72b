//! The table has a row for everything, and only one; and it says what the policy says.

use std::collections::BTreeSet;

use super::super::unsound::Damage;
use super::*;

fn record_sightings() -> Vec<RecordSighting> {
    let mut all = vec![];
    for found in Found::ALL {
        for scan in Scan::ALL {
            for proof in Proof::ALL {
                for later in Later::ALL {
                    all.push(RecordSighting { found, scan, proof, later });
                }
            }
        }
    }
    all
}

fn segment_sightings() -> Vec<SegmentSighting> {
    let mut all = vec![];
    for header in HeaderSeen::ALL {
        for trailer in TrailerSeen::ALL {
            for known in Known::ALL {
                all.push(SegmentSighting { header, trailer, known });
            }
        }
    }
    all
}

#[test]
fn every_record_sighting_matches_exactly_one_row_and_every_row_is_matched() {
    let mut unused: BTreeSet<&str> = RECORD_ROWS.iter().map(|row| row.row.label).collect();
    assert_eq!(unused.len(), RECORD_ROWS.len(), "labels repeat");
    let sightings = record_sightings();
    assert_eq!(sightings.len(), 18 * 3 * 2 * 2);
    for sighting in sightings {
        let rows: Vec<_> = RECORD_ROWS.iter().filter(|row| row.matches(&sighting)).collect();
        assert_eq!(rows.len(), 1, "{sighting:?}: {rows:?}");
        unused.remove(record_row(&sighting).label);
    }
    assert_eq!(unused, BTreeSet::new());
}

#[test]
fn every_segment_sighting_matches_exactly_one_row_and_every_row_is_matched() {
    let mut unused: BTreeSet<&str> = SEGMENT_ROWS.iter().map(|row| row.row.label).collect();
    assert_eq!(unused.len(), SEGMENT_ROWS.len(), "labels repeat");
    let sightings = segment_sightings();
    assert_eq!(sightings.len(), 6 * 8 * 8);
    for sighting in sightings {
        let rows: Vec<_> = SEGMENT_ROWS.iter().filter(|row| row.matches(&sighting)).collect();
        assert_eq!(rows.len(), 1, "{sighting:?}: {rows:?}");
        unused.remove(segment_row(&sighting).label);
    }
    assert_eq!(unused, BTreeSet::new());
}

#[test]
fn labels_are_kebab_case_and_belong_to_one_table() {
    let records = RECORD_ROWS.iter().map(|row| row.row);
    let segments = SEGMENT_ROWS.iter().map(|row| row.row);
    let mut seen = BTreeSet::new();
    for row in records.chain(segments) {
        assert!(seen.insert(row.label), "{} twice", row.label);
        assert!(row.label.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'), "{}", row.label);
        assert!(row.cause.len() > 20, "{}", row.label);
    }
}

#[test]
fn a_record_is_adopted_exactly_when_it_is_proven_whole_or_was_flushed_or_is_listed() {
    for sighting in record_sightings() {
        let flushed = sighting.proof == Proof::Durable || sighting.scan == Scan::Listed;
        let adopt = match sighting.found {
            Found::RecordWhole => true,
            Found::RecordUnread => flushed,
            _ => false,
        };
        assert_eq!(record_row(&sighting).decision == Decision::Adopt, adopt, "{sighting:?}");
    }
}

#[test]
fn what_had_been_flushed_and_is_gone_is_a_problem_and_a_torn_tail_is_not() {
    let gone = [Found::RecordBroken, Found::Torn, Found::Empty, Found::Noise, Found::Stale, Found::Foreign];
    for sighting in record_sightings() {
        if gone.contains(&sighting.found) {
            let flushed = sighting.proof == Proof::Durable || sighting.scan == Scan::Listed;
            let problem = record_row(&sighting).severity == Severity::Problem;
            assert_eq!(problem, flushed, "{sighting:?}");
        }
    }
}

#[test]
fn what_was_evicted_is_no_damage_and_loses_nothing_that_is_proven() {
    for sighting in record_sightings() {
        let row = record_row(&sighting);
        match sighting.found {
            Found::Hole => assert_eq!((row.severity, row.decision), (Severity::Normal, Decision::SkipPage)),
            Found::Remains if sighting.scan != Scan::Listed => {
                assert_ne!(row.severity, Severity::Problem, "{sighting:?}");
            }
            _ => {}
        }
    }
}

#[test]
fn holes_count_only_where_something_says_that_the_segment_was_sealed() {
    for sighting in segment_sightings() {
        let row = segment_row(&sighting);
        if row.decision == Decision::ScanTail {
            assert!(!sighting.may_have_holes(), "{sighting:?}");
        }
        if ["footer-damaged-rescan", "trailer-damaged-rescan", "trailer-lost", "trailer-misdirected"]
            .contains(&row.label)
        {
            assert!(sighting.may_have_holes(), "{sighting:?}");
        }
        assert!(row.label != "never-used" || !sighting.may_have_holes(), "{sighting:?}");
    }
}

#[test]
fn a_scan_never_stops_before_a_proven_record() {
    for sighting in record_sightings() {
        if sighting.later == Later::Follows {
            assert_ne!(record_row(&sighting).decision, Decision::Stop, "{sighting:?}");
        }
    }
}

#[test]
fn a_listed_record_that_is_not_there_is_condemned() {
    let readable = [Found::RecordWhole, Found::RecordUnread];
    let skipped = [Found::UnknownKind, Found::UnknownExtension, Found::Newer, Found::Ahead, Found::Hole];
    for sighting in record_sightings().into_iter().filter(|sighting| sighting.scan == Scan::Listed) {
        if !readable.contains(&sighting.found) && !skipped.contains(&sighting.found) {
            assert_eq!(record_row(&sighting).decision, Decision::Condemn, "{sighting:?}");
        }
    }
}

#[test]
fn a_segment_is_recycled_only_where_a_checkpoint_and_a_proven_generation_say_it_is_free() {
    for sighting in segment_sightings() {
        let row = segment_row(&sighting);
        if row.decision == Decision::Reuse {
            let proven = sighting.header == HeaderSeen::Sound
                || matches!(sighting.trailer, TrailerSeen::Sealed | TrailerSeen::FooterLost);
            assert!(proven && sighting.known == Known::Free, "{sighting:?}");
        }
    }
}

#[test]
fn a_footer_is_used_only_where_it_is_sound() {
    for sighting in segment_sightings() {
        if segment_row(&sighting).decision == Decision::UseFooter {
            assert_eq!(sighting.trailer, TrailerSeen::Sealed, "{sighting:?}");
        }
    }
}

#[test]
fn only_a_sound_header_makes_a_segment_normal() {
    for sighting in segment_sightings() {
        if segment_row(&sighting).severity == Severity::Normal {
            assert_eq!(sighting.header, HeaderSeen::Sound, "{sighting:?}");
        }
    }
}

#[test]
fn every_unsound_answer_is_found_as_something() {
    let claimed = super::super::samples::position(4096);
    let store = claimed.store;
    let cases = [
        (Unsound::Empty, Found::Empty, Found::Empty),
        (Unsound::Torn, Found::Noise, Found::Torn),
        (Unsound::Stale { generation: 1 }, Found::Stale, Found::Stale),
        (Unsound::Ahead { generation: 9 }, Found::Ahead, Found::Ahead),
        (Unsound::Misdirected { claimed }, Found::Misdirected, Found::Misdirected),
        (Unsound::Foreign { store }, Found::Foreign, Found::Foreign),
        (Unsound::Newer { version: 1 }, Found::Newer, Found::Newer),
        (Unsound::Damaged { what: Damage::Crc }, Found::Noise, Found::Noise),
        (Unsound::Damaged { what: Damage::Tag }, Found::Noise, Found::Noise),
        (Unsound::Damaged { what: Damage::Body }, Found::Malformed, Found::Malformed),
        (Unsound::Damaged { what: Damage::Padding }, Found::Malformed, Found::Malformed),
    ];
    for (unsound, prefix, header) in cases {
        assert_eq!((Found::of_prefix(&unsound), Found::of_header(&unsound)), (prefix, header), "{unsound}");
    }
}
