//! The index from several threads: leases against eviction, readers against quarantine, and what is counted.

use std::num::NonZeroU16;
use std::sync::Arc;

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use shuttle::thread;

use super::Scene;
use crate::engine::shared::grace::ReaderEpochs;
use crate::index::{
    BlockFingerprint, Deleted, Eviction, Index, LeaseTerms, Location, Lookup, RecordId, RecordInfo,
    Reservation,
};
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::Race;
use kvarts_contract::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

const NOW: Nanos = Nanos(10);
const TENANT: u32 = 1;
const TERMS: LeaseTerms = LeaseTerms { until: Some(Nanos(100)), tenant: TENANT, cap_bytes: u64::MAX };
const CLASS: u32 = 0;
const SPACE: NamespaceId = NamespaceId([7; 32]);

pub(super) fn scenes() -> Vec<Scene> {
    let scene = |name, play, finds, cost| Scene { name, play, finds, cost };
    vec![
        scene(
            "a lease and its match are one moment",
            leases,
            &[Race::LeaseAfterMatch, Race::HintAfterPins],
            5,
        ),
        scene(
            "a located block's record is that block's",
            readers,
            &[Race::RecordAfterLookup, Race::FreeIgnoresHold],
            5,
        ),
        scene(
            "a place that a read was sent to is not emptied before it is held",
            arrivals,
            &[Race::OneEpochIsEnough],
            3,
        ),
        scene("what is counted is what is there", counts, &[Race::CountInTwoSteps], 5),
    ]
}

fn info(segment: u32) -> RecordInfo {
    RecordInfo {
        shard: 0,
        segment,
        page: 1,
        header_pages: 1,
        payload_pages: 4,
        blocks: NonZeroU16::new(4).expect("not zero"),
        live: 0,
        parent: 0,
        hangs: false,
        class: CLASS,
        expires: 0,
    }
}

fn print(index: &Index, n: u8) -> BlockFingerprint {
    index.key().of(0, &BlockKey([n; 32]), Group(0), Coordinate::Replicated)
}

/// Puts blocks into a new record, and says where each is.
fn put(index: &Index, segment: u32, prints: &[BlockFingerprint]) -> Vec<(BlockFingerprint, Location)> {
    let mut found = Vec::new();
    let claim = index.reserve(prints, &mut found);
    assert!(found.iter().all(|found| *found == Reservation::Reserved));
    let record = index.records().insert(info(segment)).expect("numbers are left");
    let lost = index.commit(claim, record, prints, 0).expect("the record is there");
    assert!(lost.is_empty(), "no thread deletes");
    prints.iter().copied().zip((0..).map(|block| Location { record, block })).collect()
}

/// Takes a lease on all blocks and looks whether those that it was said to hold are held.
fn lease(index: &Index, prints: &[BlockFingerprint]) {
    let mut out = Vec::new();
    let lease = index.match_and_lease(prints, TERMS, NOW, |_| 1, &mut out).expect("no cap");
    for (print, found) in prints.iter().zip(&out) {
        let Lookup::Live(at) = found else { continue };
        assert_eq!(index.lookup(*print), Lookup::Live(*at), "a leased block was evicted");
        assert_eq!(index.try_evict(*print, *at, NOW), Eviction::Busy, "a lease does not hold");
    }
    if let Some(lease) = lease {
        assert!(index.unlock(lease), "a lease ended by itself");
    }
}

fn leases() {
    let index = Arc::new(Index::with_partitions(&[3; 32], 8, 1));
    let prints: Vec<_> = (0..3).map(|n| print(&index, n)).collect();
    let placed = put(&index, 1, &prints);
    let mut threads = Vec::new();
    for _ in 0..2 {
        let (index, prints) = (Arc::clone(&index), prints.clone());
        threads.push(thread::spawn(move || lease(&index, &prints)));
    }
    let evicting = Arc::clone(&index);
    threads.push(thread::spawn(move || {
        for (print, at) in placed {
            evicting.try_evict(print, at, NOW);
        }
    }));
    threads.into_iter().for_each(|thread| thread.join().expect("it did not panic"));
    assert_eq!((index.leases(), index.pinned_bytes(TENANT)), (0, 0));
    for print in prints {
        let leased = index.get(print).is_some_and(|entry| entry.leased);
        assert!(!leased, "a block looks leased and no lease is left");
    }
}

/// Reads look up where a block is and use that place; one executor moves the block, and another, whose place it leaves,
/// empties that when it sees that the block has gone.
fn arrivals() {
    let arrivals = ReaderEpochs::default();
    let (place, emptied) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mut threads = Vec::new();
    for _ in 0..2 {
        let (arrivals, place, emptied) = (arrivals.clone(), Arc::clone(&place), Arc::clone(&emptied));
        threads.push(thread::spawn(move || {
            let arrival = arrivals.begin();
            let part = arrival.clone();
            let at = place.load(SeqCst);
            drop(arrival);
            let there = at == 1 || !emptied.load(SeqCst);
            assert!(there, "a place was emptied under a read that was sent there");
            drop(part);
        }));
    }
    let (moving, moved) = (arrivals.clone(), Arc::clone(&place));
    threads.push(thread::spawn(move || {
        let leaving = moving.leaving((0, 7));
        moved.store(1, SeqCst);
        drop(leaving);
    }));
    for _ in 0..3 {
        // While a reader is on the way there, it is not emptied.
        if place.load(SeqCst) == 1 && !arrivals.are_awaited((0, 7)) {
            emptied.store(true, SeqCst);
        }
    }
    threads.into_iter().for_each(|thread| thread.join().expect("it did not panic"));
    assert!(!arrivals.are_awaited((0, 7)), "no reader is left on the way");
}

fn readers() {
    let index = Arc::new(Index::with_partitions(&[3; 32], 8, 0));
    let damaged = print(&index, 1);
    let (_, at) = put(&index, 1, &[damaged])[0];
    let locating = Arc::clone(&index);
    let reader = thread::spawn(move || {
        for _ in 0..2 {
            if let Some(found) = locating.locate(damaged) {
                assert_eq!(found.location, at);
                assert_eq!(found.record.segment, 1, "a block was located in another one's record");
                assert!(found.record.live > 0, "a live block in a record that has none");
            }
        }
    });
    let holding = Arc::clone(&index);
    let holder = thread::spawn(move || {
        let Some(held) = holding.records().hold(at.record) else { return };
        if held.segment == 1 {
            let now = holding.records().get(at.record).map(|info| info.segment);
            assert_eq!(now, Some(1), "a held record's number was given out again");
        }
        holding.release_record(at.record);
    });
    // A digest did not match: the block is taken out of service, its record freed, and the number used again.
    if index.quarantine(damaged, at) == Some(0) {
        let _ = index.free_record(at.record);
    }
    for _ in 0..16 {
        index.records().insert(info(9)).expect("numbers are left");
    }
    reader.join().expect("it did not panic");
    holder.join().expect("it did not panic");
    assert_eq!(index.lookup(damaged), Lookup::Quarantined);
}

fn counts() {
    let index = Arc::new(Index::with_partitions(&[3; 32], 8, 1));
    index.records().ledger().assign(CLASS, SPACE);
    let book = index.records().ledger().open(0, 1);
    let prints: Vec<_> = (0..3).map(|n| print(&index, n)).collect();
    let mut threads = Vec::new();
    for _ in 0..2 {
        let (index, prints) = (Arc::clone(&index), prints.clone());
        threads.push(thread::spawn(move || put_some(&index, &prints)));
    }
    let (deleting, condemned) = (Arc::clone(&index), prints[1]);
    let deleter = thread::spawn(move || {
        let claim = deleting.ticket();
        let were = deleting.condemn(claim, &[condemned]);
        if let [Deleted::Live { location, left: 0 }] = were[..] {
            let _ = deleting.free_record(location.record);
        }
        deleting.abandon(claim, &[condemned]);
    });
    threads.into_iter().for_each(|thread| thread.join().expect("it did not panic"));
    deleter.join().expect("it did not panic");
    let mut of_records = std::collections::BTreeMap::<RecordId, u16>::new();
    for print in &prints {
        match index.lookup(*print) {
            Lookup::Live(at) => *of_records.entry(at.record).or_default() += 1,
            Lookup::Absent => {}
            other => panic!("a block stayed {other:?} and no thread works on it"),
        }
    }
    let share = |(record, live): (&RecordId, &u16)| {
        let info = index.records().get(*record).expect("a block points at it");
        assert_eq!(info.live, *live, "a record counts other blocks than point at it");
        info.share(*live)
    };
    let live: u64 = of_records.iter().map(share).sum();
    assert_eq!(book.live(), live, "the segment's book");
    assert_eq!(index.records().ledger().account(SPACE).space().live, live, "the namespace's account");
}

/// One put of several: writes the blocks that no other put writes.
fn put_some(index: &Index, prints: &[BlockFingerprint]) {
    let mut found = Vec::new();
    let claim = index.reserve(prints, &mut found);
    let mine: Vec<_> = prints
        .iter()
        .zip(&found)
        .filter(|(_, found)| **found == Reservation::Reserved)
        .map(|(print, _)| *print)
        .collect();
    if mine.is_empty() {
        return;
    }
    let record = index.records().insert(info(1)).expect("numbers are left");
    let lost = index.commit(claim, record, &mine, 0).expect("the record is there");
    if lost.len() == mine.len() {
        let _ = index.free_record(record);
    }
}
