//! What a small read finds in front of it at the device: a bounded number of bytes, whatever others ask for.

use super::*;

const KIB: usize = 1 << 10;

/// A limit of 64 KiB beside small reads, which are remembered for a megabyte.
fn limits() -> Limits {
    let (max_bytes_in_flight, foreground_reserve) = (4 << 20, 1 << 20);
    Limits {
        max_bytes_in_flight,
        foreground_reserve,
        beside_small: 64 << 10,
        small_remembered: 1 << 20,
        ..Limits::default()
    }
}

fn small(bench: &Bench, buf: &SharedBuf) -> Transfer {
    bench.driver.read(Class::Small, FILE, 0, buf.clone())
}

/// Bytes under way.
fn in_flight(bench: &Bench) -> u64 {
    bench.driver.metrics().in_flight_bytes
}

#[test]
fn nobody_is_held_back_while_there_are_no_small_reads() {
    let bench = Bench::new(limits());
    let buf = memory(32);
    let reads: Vec<_> = (0..16).map(|_| bench.read(0, &buf)).collect();
    assert_eq!(in_flight(&bench), 16 * 128 * KIB as u64);
    drop(reads);
}

#[test]
fn beside_a_small_read_others_go_few_at_a_time_and_in_small_pieces_until_it_is_forgotten() {
    let bench = Bench::new(limits());
    let (page, large) = (memory(1), memory(32));
    let mut first = small(&bench, &page);
    bench.end(PAGE as i32);
    assert!(bench.poll(&mut first).is_ready());
    let reads: Vec<_> = (0..16).map(|_| bench.read(0, &large)).collect();
    // Eight of 128 KiB are remembered: their pieces are of 16 KiB, four at a time.
    let mut pieces = 0;
    while bench.driver.metrics().waiting_ops >= 8 {
        assert_eq!((bench.under_way(), in_flight(&bench)), (4, 64 * KIB as u64));
        let asked = bench.disk.borrow().asked().1;
        assert_eq!(asked, 16 * KIB);
        bench.end(asked as i32);
        pieces += 1;
    }
    assert!(pieces >= 4 * 8, "{pieces}");
    // The small read is forgotten: all others are under way at once.
    assert_eq!(bench.driver.metrics().waiting_ops, 0);
    assert!(in_flight(&bench) >= 8 * 128 * KIB as u64);
    drop(reads);
    while bench.under_way() > 0 {
        let asked = bench.disk.borrow().asked().1;
        bench.end(asked as i32);
    }
    bench.assert_idle(&[&page, &large]);
}

#[test]
fn a_small_read_goes_past_all_that_wait_and_never_waits_for_room_that_others_have() {
    let bench = Bench::new(limits());
    let (page, large) = (memory(1), memory(32));
    let reads: Vec<_> = (0..64).map(|_| bench.read(0, &large)).collect();
    // The device is full of what came before the first small read; the next one finds room at once.
    assert_eq!(in_flight(&bench), 4 << 20);
    let mut first = small(&bench, &page);
    assert_eq!(in_flight(&bench), 4 << 20);
    bench.end(128 * KIB as i32);
    let asked = bench
        .disk
        .borrow()
        .under_way
        .back()
        .map(|(_, op)| matches!(op, Op::Read { into, .. } if into.len() == PAGE));
    assert_eq!(asked, Some(true), "the small read went next, before those that waited");
    while bench.poll(&mut first).is_pending() {
        let asked = bench.disk.borrow().asked().1;
        bench.end(asked as i32);
    }
    let mut most = 0;
    for _ in 0..20 {
        let mut next = small(&bench, &page);
        most = most.max(in_flight(&bench) - PAGE as u64);
        while bench.poll(&mut next).is_pending() {
            let asked = bench.disk.borrow().asked().1;
            bench.end(asked as i32);
        }
    }
    assert!(most <= 128 * KIB as u64, "{most} bytes in front of a small read");
    drop(reads);
}

#[test]
fn small_reads_on_one_executor_are_remembered_on_another() {
    let small_reads = SmallReads::default();
    let here = Bench::beside(limits(), small_reads.clone());
    let there = Bench::beside(limits(), small_reads);
    let (page, large) = (memory(1), memory(32));
    let read = small(&here, &page);
    let reads: Vec<_> = (0..16).map(|_| there.read(0, &large)).collect();
    assert_eq!(in_flight(&there), 64 * KIB as u64);
    drop((read, reads));
}

#[test]
fn where_small_reads_have_much_under_way_others_may_have_as_much() {
    let bench = Bench::new(Limits { small_remembered: 64 << 20, ..limits() });
    let (page, large) = (memory(16), memory(32));
    let smalls: Vec<_> = (0..8).map(|_| small(&bench, &page)).collect();
    let reads: Vec<_> = (0..64).map(|_| bench.read(0, &large)).collect();
    assert_eq!(in_flight(&bench), 2 * 8 * 64 * KIB as u64);
    drop((smalls, reads));
}

#[test]
fn a_durable_write_is_not_cut_into_pieces_beside_small_reads() {
    let bench = Bench::new(limits());
    let (page, large) = (memory(1), memory(256));
    let mut first = small(&bench, &page);
    bench.end(PAGE as i32);
    assert!(bench.poll(&mut first).is_ready());
    let write = bench.driver.write(Class::Put, FILE, 0, large.clone(), true);
    assert_eq!(bench.disk.borrow().asked(), (0, 256 * PAGE));
    drop(write);
}
