//! Records that are encoded when they are moved: what is written, what it is read back as, what stays raw.

use std::time::Duration;

use kvarts_layout::format::body::{ENCODING_RAW, ENCODING_ZSTD_PLANES};

use super::encode::Cold;
use super::gather::{Gathered, gather};
use super::relocate::relocate;
use super::tests::{print, record_of, two_records};
use crate::engine::recover::recover;
use crate::engine::recover::tests::harness::{BLOCK_BYTES, Place, World};
use crate::index::{LeaseTerms, Lookup};

/// Everything is cold.
const ALL: Cold = Cold { after: Some(Duration::ZERO), only: false };
/// What has not been used for ten minutes.
const OLD: Cold = Cold { after: Some(Duration::from_secs(600)), only: true };

/// A place whose blocks 0..6 are encoded. Gives where the record's payload begins in its segment's file as well.
fn encoded() -> (Place, u32, u64) {
    let place = two_records();
    let (segment, at) = place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let moved = relocate(&world.shard, record_of(&world, 0), &|_| true, &ALL).await.unwrap();
        assert_eq!((moved.blocks, moved.records_encoded), (6, 1));
        assert_eq!(moved.bytes_raw, 6 * BLOCK_BYTES);
        assert!(moved.bytes_encoded < moved.bytes_raw / 4, "{moved:?}");
        let counts = world.shared.counters.counts();
        assert_eq!((counts.records_encoded, counts.encoded_bytes_before), (1, moved.bytes_raw));
        assert_eq!(counts.encoded_bytes_after, moved.bytes_encoded);
        let info = world.shared.index.records().get(record_of(&world, 0)).unwrap();
        let class = world.shared.classes.get(info.class).unwrap();
        assert_eq!(class.encoding, ENCODING_ZSTD_PLANES);
        (info.segment, (u64::from(info.page) + u64::from(info.header_pages)) * 4096)
    });
    (place, segment, at)
}

async fn all_of(world: &World, number: u64) -> Gathered {
    gather(&world.shard, record_of(world, number), &|_| true).await.unwrap().unwrap()
}

#[test]
fn a_crash_after_an_encoding_finds_the_encoded_record_by_its_digests() {
    let (place, ..) = encoded();
    // There is no footer: the tail is scanned and every chunk decoded.
    let (report, contents) = place.recovered();
    assert_eq!((report.blocks, report.duplicates, report.unusable), (8, 6, 0));
    assert_eq!(contents.len(), 8);
    let again = place.run(|world| async move {
        let report = recover(&world.shard.log).await.unwrap();
        let taken = all_of(&world, 0).await;
        assert_eq!((taken.blocks.len(), taken.damaged, taken.body.encoding), (6, 0, ENCODING_ZSTD_PLANES));
        (report.blocks, world.contents())
    });
    // By now it is sealed: the footer says the same.
    assert_eq!(again, (8, contents));
}

#[test]
fn an_encoded_record_is_moved_as_it_is_stored_and_may_be_split() {
    let (place, ..) = encoded();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let before = all_of(&world, 0).await;
        let (source, lengths) = (before.source, before.body.stored_lengths.clone());
        let bytes: Vec<_> = before.blocks.iter().map(|one| one.bytes.clone()).collect();
        let digests: Vec<_> = before.blocks.iter().map(|one| one.digests.clone()).collect();
        drop(before);
        let moved = relocate(&world.shard, source, &|block| block % 2 == 1, &ALL).await.unwrap();
        assert_eq!((moved.blocks, moved.records_encoded), (3, 0), "it is encoded already");
        let after = all_of(&world, 1).await;
        assert_eq!(after.body.stored_lengths, [lengths[1], lengths[3], lengths[5]]);
        for (one, at) in after.blocks.iter().zip([1, 3, 5]) {
            assert_eq!((&one.bytes, &one.digests), (&bytes[at], &digests[at]));
        }
    });
    let (report, contents) = place.recovered();
    assert_eq!((report.unusable, contents.len()), (0, 8));
}

#[test]
fn a_flipped_bit_of_a_stored_chunk_is_never_moved_and_never_adopted() {
    for byte in [0, 7, 20] {
        let (place, segment, at) = encoded();
        let file = place.segment(segment);
        let was = crate::engine::recover::tests::harness::contents_of(&file)[(at + byte) as usize];
        place.damage(&file, at + byte, &[was ^ 0x10]);
        place.run(move |world| async move {
            let report = recover(&world.shard.log).await.unwrap();
            // The record is the tail of the log: a torn one, so the older copy counts.
            assert_eq!((report.blocks, report.duplicates), (8, 0), "byte {byte}: {report:?}");
            let taken = all_of(&world, 0).await;
            assert_eq!((taken.body.encoding, taken.blocks.len()), (ENCODING_RAW, 6));
        });
        // Found later, in a log that goes on.
        let (place, segment, at) = encoded();
        place.run(move |world| async move {
            recover(&world.shard.log).await.unwrap();
            world.shard.reads.headers.forget();
        });
        let file = place.segment(segment);
        place.damage(&file, at + byte, &[was ^ 0x10]);
        place.run(move |world| async move {
            recover(&world.shard.log).await.unwrap();
            let moved = relocate(&world.shard, record_of(&world, 1), &|_| true, &ALL).await.unwrap();
            assert_eq!((moved.blocks, moved.damaged), (5, 1), "byte {byte}");
            let quarantined =
                (0..6).filter(|n| world.shared.index.lookup(print(&world, *n)) == Lookup::Quarantined);
            assert_eq!(quarantined.count(), 1);
        });
    }
}

#[test]
fn only_what_is_cold_and_not_leased_is_encoded() {
    let place = two_records();
    place.run(|world| async move {
        recover(&world.shard.log).await.unwrap();
        let (index, shard) = (&world.shared.index, &world.shard);
        let moved = relocate(shard, record_of(&world, 0), &|_| true, &OLD).await.unwrap();
        assert_eq!((moved.blocks, moved.records_encoded), (0, 0), "what was just put is warm");
        // Twenty minutes later, as ages in the index count.
        let then = world.shared.epoch().wrapping_sub(20);
        for number in [0, 1, 2, 3, 4, 5, 10, 11] {
            index.touch(&[print(&world, number)], then);
        }
        index.touch(&[print(&world, 3)], world.shared.epoch());
        let moved = relocate(shard, record_of(&world, 0), &|_| true, &OLD).await.unwrap();
        assert_eq!(moved.records_encoded, 0, "one block is warm");
        index.touch(&[print(&world, 3)], then);
        let (now, mut found) = (world.shared.clock.now(), Vec::new());
        let terms = LeaseTerms { until: None, tenant: 1, cap_bytes: 1 << 30 };
        index.match_and_lease(&[print(&world, 4)], terms, now, |_| 1, &mut found).unwrap();
        let moved = relocate(shard, record_of(&world, 0), &|_| true, &OLD).await.unwrap();
        assert_eq!(moved.records_encoded, 0, "one block is leased");
        let moved = relocate(shard, record_of(&world, 10), &|_| true, &OLD).await.unwrap();
        assert_eq!((moved.blocks, moved.records_encoded), (2, 1));
        let off = Cold { after: None, only: false };
        let moved = relocate(shard, record_of(&world, 0), &|_| true, &off).await.unwrap();
        assert_eq!((moved.blocks, moved.records_encoded), (6, 0), "switched off");
    });
}
