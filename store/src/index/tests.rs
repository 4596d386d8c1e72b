//! The index as its callers see it: by hand, against a model, from many threads, and weighed.

mod chains;
mod model;

use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use kvarts_contract::clock::Nanos;
use kvarts_layout::{BlockKey, Coordinate, Group};

const NEVER: LeaseTerms = LeaseTerms { until: None, tenant: 1, cap_bytes: u64::MAX };

fn info(blocks: u16) -> RecordInfo {
    RecordInfo {
        shard: 1,
        segment: 2,
        page: 3,
        header_pages: 1,
        payload_pages: 9,
        blocks: NonZeroU16::new(blocks).unwrap(),
        live: 0,
        class: 4,
        expires: 0,
        parent: 0,
        hangs: false,
    }
}

fn print(index: &Index, n: u64) -> BlockFingerprint {
    let mut key = BlockKey::default();
    key.0[..8].copy_from_slice(&n.to_le_bytes());
    index.key().of(1, &key, Group(0), Coordinate::Replicated)
}

fn at(record: RecordId, block: u16) -> Location {
    Location { record, block }
}

/// An index with one record of live blocks.
fn with_blocks(blocks: u16) -> (Index, RecordId, Vec<BlockFingerprint>) {
    let index = Index::new(&[1; 32], 0);
    let prints: Vec<_> = (0..u64::from(blocks)).map(|n| print(&index, n)).collect();
    let mut out = Vec::new();
    let ticket = index.reserve(&prints, &mut out);
    assert!(out.iter().all(|one| *one == Reservation::Reserved));
    let record = index.records().insert(info(blocks)).unwrap();
    assert_eq!(index.commit(ticket, record, &prints, 5), Ok(vec![]));
    (index, record, prints)
}

#[test]
fn a_block_is_pending_from_reservation_to_commit_and_then_live_where_it_was_written() {
    let index = Index::new(&[1; 32], 0);
    let prints: Vec<_> = (0..20).map(|n| print(&index, n)).collect();
    let (mut reserved, mut found) = (Vec::new(), Vec::new());
    let ticket = index.reserve(&prints[..10], &mut reserved);
    index.lookup_many(&prints, &mut found);
    assert_eq!(found[..10], [Lookup::Pending; 10]);
    assert_eq!(found[10..], [Lookup::Absent; 10]);
    let record = index.records().insert(info(10)).unwrap();
    assert_eq!(index.commit(ticket, record, &prints[..10], 5), Ok(vec![]));
    index.lookup_many(&prints[..10], &mut found);
    for (block, found) in (0..).zip(&found) {
        assert_eq!(*found, Lookup::Live(at(record, block)));
    }
    let located = index.locate(prints[3]).unwrap();
    assert_eq!(located.location, at(record, 3));
    assert_eq!(located.record, RecordInfo { live: 10, ..info(10) });
    assert_eq!(located.heat, Heat { frequency: 0, continued: false, epoch: 5 });
}

#[test]
fn a_second_put_of_a_block_is_told_that_it_is_in_flight_and_then_that_it_is_here() {
    let index = Index::new(&[1; 32], 0);
    let prints = [print(&index, 1), print(&index, 2), print(&index, 1)];
    let mut out = Vec::new();
    let first = index.reserve(&prints, &mut out);
    assert_eq!(out, [Reservation::Reserved, Reservation::Reserved, Reservation::InFlight]);
    let second = index.reserve(&prints[..1], &mut out);
    assert_eq!(out, [Reservation::InFlight]);
    let record = index.records().insert(info(2)).unwrap();
    // The second put has nothing to commit and nothing to abandon.
    index.abandon(second, &prints);
    assert_eq!(index.commit(second, record, &prints[..1], 0), Ok(vec![0]));
    assert_eq!(index.records().get(record).unwrap().live, 0);
    assert_eq!(index.commit(first, record, &prints[..2], 0), Ok(vec![]));
    let third = index.reserve(&prints[1..2], &mut out);
    assert_eq!(out, [Reservation::Live(at(record, 1))]);
    index.abandon(third, &prints);
    assert_eq!(index.lookup(prints[1]), Lookup::Live(at(record, 1)));
}

#[test]
fn a_put_whose_block_was_deleted_in_flight_does_not_take_over_the_next_puts_claim() {
    let index = Index::new(&[1; 32], 0);
    let prints = [print(&index, 1), print(&index, 2)];
    let mut out = Vec::new();
    let first = index.reserve(&prints, &mut out);
    assert_eq!(index.delete(prints[0]), Deleted::Pending);
    let second = index.reserve(&prints[..1], &mut out);
    assert_eq!(out, [Reservation::Reserved]);
    let record = index.records().insert(info(2)).unwrap();
    assert_eq!(index.commit(first, record, &prints, 0), Ok(vec![0]));
    assert_eq!(index.lookup(prints[0]), Lookup::Pending);
    assert_eq!(index.records().get(record).unwrap().live, 1);
    index.abandon(first, &prints);
    assert_eq!(index.lookup(prints[0]), Lookup::Pending);
    index.abandon(second, &prints);
    assert_eq!(index.lookup(prints[0]), Lookup::Absent);
}

fn gathered(index: &Index, found: &[Recovered]) -> Gathering {
    let mut gathering = index.gathering(0);
    found.iter().for_each(|one| gathering.push(*one));
    gathering
}

#[test]
fn a_record_that_is_unknown_is_refused_and_nothing_changes() {
    let index = Index::new(&[1; 32], 0);
    let prints = [print(&index, 1), print(&index, 2)];
    let mut out = Vec::new();
    let ticket = index.reserve(&prints, &mut out);
    let unknown = RecordId(77);
    assert_eq!(index.commit(ticket, unknown, &prints, 0), Err(RecordError::Unknown(unknown)));
    assert_eq!(index.lookup(prints[0]), Lookup::Pending);
    index.abandon(ticket, &prints);
    let record = index.records().insert(info(2)).unwrap();
    let found = [(0, record), (1, unknown)].map(|(n, record)| Recovered {
        print: prints[n],
        location: at(record, 0),
        heat: Heat::default(),
    });
    assert_eq!(
        index.insert_live(&mut gathered(&index, &found), &mut Vec::new()),
        Err(RecordError::Unknown(unknown))
    );
    assert_eq!(index.lookup(prints[0]), Lookup::Absent);
    assert_eq!(index.records().get(record).unwrap().live, 0);
    index.insert_live(&mut gathered(&index, &found[..1]), &mut Vec::new()).unwrap();
    let moved = index.replace_location(prints[0], at(record, 0), at(unknown, 0));
    assert_eq!(moved, Err(RecordError::Unknown(unknown)));
    assert_eq!(index.lookup(prints[0]), Lookup::Live(at(record, 0)));
}

#[test]
fn the_second_copy_that_recovery_finds_is_reported_and_the_caller_chooses() {
    let (index, old, prints) = with_blocks(3);
    let new = index.records().insert(info(2)).unwrap();
    let heat = Heat { frequency: 2, continued: false, epoch: 9 };
    let found = [9, 1].map(|n| Recovered { print: print(&index, n), location: at(new, n as u16 % 2), heat });
    let mut conflicts = Vec::new();
    index.insert_live(&mut gathered(&index, &found), &mut conflicts).unwrap();
    let there = index.get(prints[1]).unwrap();
    assert_eq!(conflicts, [(found[1], there)]);
    assert_eq!(there.state, Lookup::Live(at(old, 1)));
    assert_eq!(index.records().get(new).unwrap().live, 1);
    assert_eq!(index.get(found[0].print).unwrap().heat, heat);
    assert_eq!(index.replace_location(prints[1], at(old, 2), at(new, 1)), Ok(None));
    assert_eq!(index.replace_location(prints[1], at(old, 1), at(new, 1)), Ok(Some(2)));
    assert_eq!(index.lookup(prints[1]), Lookup::Live(at(new, 1)));
    assert_eq!(index.records().get(new).unwrap().live, 2);
}

#[test]
fn a_quarantined_block_is_a_miss_until_it_is_put_again_or_its_record_is_reclaimed() {
    let (index, record, prints) = with_blocks(3);
    let lease = index.match_and_lease(&prints, NEVER, Nanos(0), |_| 1, &mut Vec::new()).unwrap().unwrap();
    assert_eq!(index.quarantine(prints[0], at(record, 1)), None);
    assert_eq!(index.quarantine(prints[0], at(record, 0)), Some(2));
    assert_eq!(index.quarantine(prints[1], at(record, 1)), Some(1));
    assert_eq!(index.lookup(prints[0]), Lookup::Quarantined);
    assert_eq!(index.locate(prints[0]), None);
    assert!(!index.is_leased(prints[0], Nanos(0)));
    let mut out = Vec::new();
    let ticket = index.reserve(&prints[..1], &mut out);
    assert_eq!(out, [Reservation::Reserved]);
    let again = index.records().insert(info(1)).unwrap();
    assert_eq!(index.commit(ticket, again, &prints[..1], 0), Ok(vec![]));
    // The lease was on the bytes that failed, not on these.
    assert_eq!(index.try_evict(prints[0], at(record, 0), Nanos(0)), Eviction::Gone);
    assert_eq!(index.lookup(prints[0]), Lookup::Live(at(again, 0)));
    assert_eq!(index.try_evict(prints[0], at(again, 0), Nanos(0)), Eviction::Evicted { left: 0 });
    assert_eq!(index.try_evict(prints[1], at(record, 1), Nanos(0)), Eviction::Gone);
    assert_eq!(index.lookup(prints[1]), Lookup::Absent);
    assert!(index.unlock(lease));
    assert_eq!(index.records().free(record), Err(RecordError::InUse { live: 1 }));
    assert_eq!(index.delete(prints[2]), Deleted::Live { location: at(record, 2), left: 0 });
    assert!(index.records().free(record).is_ok());
}

#[test]
fn a_leased_block_is_busy_until_the_instant_its_lease_ends_swept_up_or_not() {
    let (index, record, prints) = with_blocks(2);
    let terms = LeaseTerms { until: Some(Nanos(100)), ..NEVER };
    let mut out = Vec::new();
    let lease = index.match_and_lease(&prints[..1], terms, Nanos(0), |_| 7, &mut out).unwrap().unwrap();
    assert_eq!(out, [Lookup::Live(at(record, 0))]);
    assert_eq!(index.pinned_bytes(1), 7);
    assert_eq!(index.try_evict(prints[1], at(record, 1), Nanos(0)), Eviction::Evicted { left: 1 });
    assert_eq!(index.try_evict(prints[0], at(record, 0), Nanos(99)), Eviction::Busy);
    assert_eq!(index.try_evict(prints[0], at(record, 0), Nanos(100)), Eviction::Evicted { left: 0 });
    assert_eq!(index.renew(lease, Nanos(900), Nanos(100)), Err(LeaseError::Expired));
    let swept = [99, 100, 100].map(|now| index.expire(Nanos(now)).leases);
    assert_eq!(swept, [0, 1, 0]);
    assert_eq!((index.pinned_bytes(1), index.leases()), (0, 0));
    assert!(!index.unlock(lease));
}

#[test]
fn leases_that_have_ended_are_swept_up_a_few_hundred_blocks_at_a_time_and_count_for_nothing_at_once() {
    let (index, _, prints) = with_blocks(3000);
    let mut out = Vec::new();
    let mut lease = |prints: &[_], cap_bytes| {
        let terms = LeaseTerms { until: Some(Nanos(10)), cap_bytes, ..NEVER };
        index.match_and_lease(prints, terms, Nanos(0), |_| 1, &mut out)
    };
    lease(&prints, 4000).unwrap();
    for some in prints[..1000].chunks(1) {
        lease(some, 4000).unwrap();
    }
    assert_eq!(lease(&prints[..1], 4000), Err(LeaseError::Cap { limit: 4000, wanted: 4001 }));
    assert_eq!((index.pinned_bytes(1), index.leases()), (4000, 1001));
    let mut sweeps = Vec::new();
    let mut go_on = true;
    while go_on {
        let swept = index.expire(Nanos(10));
        assert!(swept.leases <= 512);
        go_on = swept.more;
        sweeps.push(swept.leases);
    }
    assert!((8..12).contains(&sweeps.len()), "4000 blocks in pieces of 512: {sweeps:?}");
    assert_eq!(sweeps.iter().sum::<usize>(), 1001);
    assert_eq!((index.pinned_bytes(1), index.leases()), (0, 0));
    let mut entries = Vec::new();
    for partition in 0..index.partitions() {
        index.snapshot(partition, &mut entries);
        assert!(entries.iter().all(|entry| !entry.leased));
    }
    // What has ended and is not swept up yet is no reason to refuse another.
    let terms = LeaseTerms { until: Some(Nanos(10)), cap_bytes: 600, ..NEVER };
    for some in prints[..600].chunks(1) {
        index.match_and_lease(some, terms, Nanos(0), |_| 1, &mut out).unwrap();
    }
    let terms = LeaseTerms { until: Some(Nanos(99)), ..terms };
    let given = index.match_and_lease(&prints[..600], terms, Nanos(10), |_| 1, &mut out).unwrap();
    assert!(given.is_some() && index.pinned_bytes(1) == 600);
}

#[test]
fn a_block_under_two_leases_is_busy_until_both_have_ended() {
    let (index, record, prints) = with_blocks(1);
    let mut out = Vec::new();
    let mut lease = |until| {
        let terms = LeaseTerms { until, ..NEVER };
        index.match_and_lease(&prints, terms, Nanos(0), |_| 1, &mut out).unwrap().unwrap()
    };
    let (pin, first, second) = (lease(None), lease(Some(Nanos(10))), lease(Some(Nanos(20))));
    assert_eq!(index.renew(first, Nanos(30), Nanos(5)), Ok(()));
    assert_eq!(index.expire(Nanos(29)).leases, 1);
    assert!(!index.unlock(second));
    assert!(index.unlock(pin));
    let evict = |now| index.try_evict(prints[0], at(record, 0), Nanos(now));
    assert_eq!(evict(29), Eviction::Busy);
    assert!(index.unlock(first));
    assert_eq!(evict(29), Eviction::Evicted { left: 0 });
}

#[test]
fn a_lease_follows_its_block_through_compaction_and_does_not_stop_a_delete() {
    let (index, old, prints) = with_blocks(1);
    let pin = index.match_and_lease(&prints, NEVER, Nanos(0), |_| 1, &mut Vec::new()).unwrap().unwrap();
    let new = index.records().insert(info(1)).unwrap();
    assert_eq!(index.replace_location(prints[0], at(old, 0), at(new, 0)), Ok(Some(0)));
    assert_eq!(index.try_evict(prints[0], at(old, 0), Nanos(0)), Eviction::Gone);
    assert_eq!(index.try_evict(prints[0], at(new, 0), Nanos(0)), Eviction::Busy);
    assert_eq!(index.remove(prints[0], at(new, 0)), Some(0));
    // The next block under this key is not what was leased.
    let ticket = index.reserve(&prints, &mut Vec::new());
    assert_eq!(index.commit(ticket, new, &prints, 0), Ok(vec![]));
    assert_eq!(index.try_evict(prints[0], at(new, 0), Nanos(0)), Eviction::Evicted { left: 0 });
    assert!(index.unlock(pin));
}

#[test]
fn a_lease_beyond_the_tenants_cap_is_refused_with_both_numbers_and_pins_nothing() {
    let (index, record, prints) = with_blocks(4);
    let capped = LeaseTerms { until: Some(Nanos(50)), tenant: 3, cap_bytes: 30 };
    let mut out = Vec::new();
    assert!(index.match_and_lease(&prints[..2], capped, Nanos(0), |_| 10, &mut out).is_ok());
    let refused = index.match_and_lease(&prints[1..], capped, Nanos(0), |_| 10, &mut out);
    assert_eq!(refused, Err(LeaseError::Cap { limit: 30, wanted: 50 }));
    assert_eq!(out[2], Lookup::Live(at(record, 3)));
    assert_eq!((index.pinned_bytes(3), index.leases()), (20, 1));
    assert!(index.is_leased(prints[1], Nanos(0)));
    assert!(!index.is_leased(prints[2], Nanos(0)));
    assert_eq!(index.try_evict(prints[3], at(record, 3), Nanos(0)), Eviction::Evicted { left: 3 });
    // Another tenant has a cap of its own, and what has ended does not count.
    let other = LeaseTerms { tenant: 4, ..capped };
    assert!(index.match_and_lease(&prints[..3], other, Nanos(0), |_| 10, &mut out).is_ok());
    let later = LeaseTerms { until: Some(Nanos(90)), ..capped };
    assert!(index.match_and_lease(&prints[..3], later, Nanos(50), |_| 10, &mut out).is_ok());
    assert_eq!(index.leases(), 1);
}

#[test]
fn a_lease_on_nothing_live_is_no_lease() {
    let index = Index::new(&[1; 32], 0);
    let prints = [print(&index, 1), print(&index, 2)];
    let ticket = index.reserve(&prints[..1], &mut Vec::new());
    let mut out = Vec::new();
    assert_eq!(index.match_and_lease(&prints, NEVER, Nanos(0), |_| 1, &mut out), Ok(None));
    assert_eq!(out, [Lookup::Pending, Lookup::Absent]);
    assert_eq!(index.leases(), 0);
    index.abandon(ticket, &prints);
}

#[test]
fn blocks_that_cost_nothing_count_as_a_byte_so_that_the_cap_bounds_their_number() {
    let (index, _, prints) = with_blocks(4);
    let capped = LeaseTerms { cap_bytes: 3, ..NEVER };
    let refused = index.match_and_lease(&prints, capped, Nanos(0), |_| 0, &mut Vec::new());
    assert_eq!(refused, Err(LeaseError::Cap { limit: 3, wanted: 4 }));
}

#[test]
fn snapshots_of_all_partitions_list_all_entries_in_fingerprint_order() {
    let (index, _, mut prints) = with_blocks(1000);
    prints.sort_unstable();
    let (mut some, mut all) = (Vec::new(), Vec::new());
    for partition in 0..index.partitions() {
        index.snapshot(partition, &mut some);
        all.extend(some.iter().map(|entry| entry.print));
    }
    assert_eq!(all, prints);
    index.snapshot(index.partitions(), &mut some);
    assert!(some.is_empty());
}

fn fill(index: &Index, blocks: u64, per_record: u16) {
    let mut conflicts = Vec::new();
    let all: Vec<_> = (0..blocks).collect();
    let mut found = Vec::new();
    for run in all.chunks(usize::from(per_record)) {
        let record = index.records().insert(info(per_record)).unwrap();
        found.extend((0..).zip(run).map(|(block, n)| Recovered {
            print: print(index, *n),
            location: at(record, block),
            heat: Heat::default(),
        }));
    }
    for batch in found.chunks(4096) {
        index.insert_live(&mut gathered(index, batch), &mut conflicts).unwrap();
        assert!(conflicts.is_empty());
    }
}

/// Growth by a quarter makes memory per block a sawtooth, so it is weighed at several sizes.
#[test]
fn an_index_weighs_at_most_64_bytes_a_block_and_40_with_16_block_records() {
    for expected in [0, 200_000] {
        for blocks in [200_000, 220_000, 240_000] {
            for (per_record, limit) in [(1, 64.0), (16, 40.0)] {
                let index = Index::new(&[1; 32], expected);
                fill(&index, blocks, per_record);
                let memory = index.memory();
                assert_eq!(memory.blocks as u64, blocks);
                assert_eq!(memory.records as u64, blocks.div_ceil(u64::from(per_record)));
                assert!(memory.bytes_per_block <= limit, "{blocks} by {per_record}: {memory:?}");
                assert!(memory.bytes as u64 >= blocks * 20, "{memory:?}");
            }
        }
    }
}

#[test]
fn leases_are_weighed_too() {
    let (index, _, prints) = with_blocks(1000);
    let before = index.memory().bytes;
    let pin = index.match_and_lease(&prints, NEVER, Nanos(0), |_| 1, &mut Vec::new()).unwrap().unwrap();
    assert!(index.memory().bytes >= before + 1000 * (28 + 12));
    assert!(index.unlock(pin));
    assert_eq!(index.memory().bytes, before);
}

/// Live counts of all records against the entries that point at them.
fn audit(index: &Index) {
    let mut pointing = std::collections::BTreeMap::new();
    let mut entries = Vec::new();
    for partition in 0..index.partitions() {
        index.snapshot(partition, &mut entries);
        for entry in &entries {
            if let Lookup::Live(location) = entry.state {
                *pointing.entry(location.record).or_insert(0u16) += 1;
            }
        }
    }
    let (mut cursor, mut some) = (Some(RecordCursor::default()), Vec::new());
    while let Some(from) = cursor {
        cursor = index.records().snapshot(from, &mut some);
        for (id, info) in &some {
            assert_eq!(info.live, pointing.remove(id).unwrap_or(0), "{id}");
        }
    }
    assert!(pointing.is_empty(), "entries point at records that are not there: {pointing:?}");
}

#[test]
fn of_many_threads_that_put_the_same_blocks_exactly_one_writes_each() {
    let index = Index::new(&[1; 32], 0);
    let prints: Vec<_> = (0..3000).map(|n| print(&index, n)).collect();
    let writes = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (index, prints, writes) = (&index, &prints, &writes);
            scope.spawn(move || {
                let mut out = Vec::new();
                // Every thread walks the batches from another place, and gives up some at first.
                for round in 0..2 * 30 {
                    let batch = &prints[(round + thread * 7) % 30 * 100..][..100];
                    let ticket = index.reserve(batch, &mut out);
                    let won = |(print, one): (&BlockFingerprint, &Reservation)| {
                        (*one == Reservation::Reserved).then_some(*print)
                    };
                    let mine: Vec<_> = batch.iter().zip(&out).filter_map(won).collect();
                    if mine.is_empty() || (round + thread) % 3 == 0 {
                        index.abandon(ticket, &mine);
                        continue;
                    }
                    let record = index.records().insert(info(100)).unwrap();
                    assert_eq!(index.commit(ticket, record, &mine, 0), Ok(vec![]));
                    writes.fetch_add(mine.len(), Ordering::Relaxed);
                }
            });
        }
    });
    audit(&index);
    let live = index.memory().blocks;
    assert_eq!(writes.into_inner(), live);
    assert!(live > 1000, "{live}");
}

struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_block_reported_under_a_lease_stays_live_against_threads_that_evict_and_move_everything() {
    // One partition, so that a thread that wants to change it nearly always waits for its lock.
    let index = Index::with_partitions(&[1; 32], 0, 0);
    let prints: Vec<_> = (0..64).map(|n| print(&index, n)).collect();
    let done = AtomicBool::new(false);
    let kept = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2u16 {
            let (index, prints, done) = (&index, &prints, &done);
            scope.spawn(move || {
                let mut out = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    let ticket = index.reserve(prints, &mut out);
                    let record = index.records().insert(info(64)).unwrap();
                    assert!(index.commit(ticket, record, prints, 0).is_ok());
                    for (n, print) in (0..).zip(prints) {
                        let Lookup::Live(location) = index.lookup(*print) else { continue };
                        if (n + thread) % 3 == 0 {
                            assert!(index.replace_location(*print, location, at(record, n)).is_ok());
                        } else {
                            index.try_evict(*print, location, Nanos(5));
                        }
                    }
                    let _in_use = index.records().free(record);
                }
            });
        }
        // Also when an assertion fails, or the scope would wait for ever.
        let _stop = SetWhenDropped(&done);
        let (mut out, mut entries) = (Vec::new(), Vec::new());
        for round in 0..1000u64 {
            let until = if round % 2 == 0 { None } else { Some(Nanos(6)) };
            let some = &prints[(round % 8) as usize..][..56];
            let lease = index.match_and_lease(some, LeaseTerms { until, ..NEVER }, Nanos(5), |_| 1, &mut out);
            std::thread::yield_now();
            index.snapshot(0, &mut entries);
            let reported = some.iter().zip(&out).filter(|(_, found)| matches!(found, Lookup::Live(_)));
            for (print, _) in reported {
                // A block that was evicted and put again meanwhile would be live, but not leased.
                let entry = entries.iter().find(|entry| entry.print == *print);
                assert!(entry.is_some_and(|entry| entry.leased && matches!(entry.state, Lookup::Live(_))));
                kept.fetch_add(1, Ordering::Relaxed);
            }
            if let Some(lease) = lease.unwrap() {
                assert!(index.unlock(lease));
            }
        }
    });
    assert!(kept.into_inner() > 0, "no lease ever met a live block");
    assert_eq!((index.leases(), index.pinned_bytes(1)), (0, 0));
    audit(&index);
    for print in &prints {
        if let Lookup::Live(location) = index.lookup(*print) {
            assert!(matches!(index.try_evict(*print, location, Nanos(5)), Eviction::Evicted { .. }));
        }
    }
    assert_eq!(index.memory().blocks, 0);
}

#[test]
fn threads_that_do_everything_at_once_leave_every_live_count_right() {
    let index = Index::with_partitions(&[1; 32], 0, 3);
    let prints: Vec<_> = (0..200).map(|n| print(&index, n)).collect();
    std::thread::scope(|scope| {
        for thread in 1..=4u64 {
            let (index, prints) = (&index, &prints);
            scope.spawn(move || chaos(index, prints, thread));
        }
    });
    audit(&index);
    index.expire(Nanos(u64::MAX));
    assert_eq!(index.leases(), 0);
    let mut entries = Vec::new();
    for partition in 0..index.partitions() {
        index.snapshot(partition, &mut entries);
        assert!(entries.iter().all(|entry| !entry.leased && entry.state != Lookup::Pending));
    }
}

fn chaos(index: &Index, prints: &[BlockFingerprint], seed: u64) {
    let mut state = seed;
    let mut below = |n: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % n
    };
    let (mut reserved, mut found) = (Vec::new(), Vec::new());
    for round in 0..1500 {
        let from = below(180) as usize;
        let some = &prints[from..from + 20];
        let print = some[0];
        match below(8) {
            0 | 1 => {
                let ticket = index.reserve(some, &mut reserved);
                let record = index.records().insert(info(20)).unwrap();
                if below(4) > 0 {
                    assert!(index.commit(ticket, record, some, 0).is_ok());
                }
                index.abandon(ticket, some);
            }
            2 => {
                index.delete(print);
            }
            3 => {
                let until = Some(Nanos(round + below(9)));
                let terms = LeaseTerms { until, tenant: seed as u32, cap_bytes: 100 };
                if let Ok(Some(lease)) = index.match_and_lease(some, terms, Nanos(round), |_| 1, &mut found)
                    && below(2) == 0
                {
                    index.unlock(lease);
                }
            }
            4 => {
                let record = index.records().insert(info(20)).unwrap();
                if let Lookup::Live(location) = index.lookup(print) {
                    assert!(index.replace_location(print, location, at(record, 0)).is_ok());
                }
                let _in_use = index.records().free(record);
            }
            5 => {
                if let Some(located) = index.locate(print) {
                    assert!(located.record.live > 0, "a record with a live block counts none");
                    index.quarantine(print, located.location);
                }
            }
            6 => {
                if let Lookup::Live(location) = index.lookup(print) {
                    index.try_evict(print, location, Nanos(round));
                }
            }
            _ => index.touch(some, round as u16),
        }
    }
}
