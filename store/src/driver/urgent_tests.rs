//! What an urgent read, small or foreground, finds in front of it at the device: a bounded number of bytes, whatever
//! others ask for.

use super::*;

const KIB: usize = 1 << 10;

/// A limit of 64 KiB beside urgent reads, which are remembered for a megabyte.
fn limits() -> Limits {
    let (max_bytes_in_flight, foreground_reserve) = (4 << 20, 1 << 20);
    Limits {
        max_bytes_in_flight,
        foreground_reserve,
        beside_urgent: 64 << 10,
        urgent_remembered: 1 << 20,
        ..Limits::default()
    }
}

fn small(bench: &Bench, buf: &SharedBuf) -> Transfer {
    bench.driver.read(Class::Small, FILE, 0, buf.clone())
}

fn put(bench: &Bench, buf: &SharedBuf) -> Transfer {
    bench.driver.write(Class::Put, FILE, 0, buf.clone(), false)
}

/// Ends what is under way, the oldest first, until a transfer has ended.
fn end_until(bench: &Bench, transfer: &mut Transfer) {
    while bench.poll(transfer).is_pending() {
        let asked = bench.disk.borrow().asked().1;
        bench.end(asked as i32);
    }
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
    let devices = Devices::of(1, 2);
    let here = Bench::beside(limits(), devices.clone());
    let there = Bench::beside(limits(), devices.of_executor(1));
    let (page, large) = (memory(1), memory(32));
    let read = small(&here, &page);
    let reads: Vec<_> = (0..16).map(|_| there.read(0, &large)).collect();
    assert_eq!(in_flight(&there), 64 * KIB as u64);
    drop((read, reads));
}

#[test]
fn where_small_reads_have_much_under_way_others_may_have_as_much() {
    let bench = Bench::new(Limits { urgent_remembered: 64 << 20, ..limits() });
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

#[test]
fn puts_fill_the_device_while_nothing_is_read() {
    let bench = Bench::new(limits());
    let large = memory(32);
    let puts: Vec<_> = (0..32).map(|_| put(&bench, &large)).collect();
    assert_eq!(in_flight(&bench), 3 << 20);
    drop(puts);
}

#[test]
fn a_reader_that_asks_for_one_thing_after_the_other_never_finds_a_device_that_puts_have_filled_meanwhile() {
    let bench = Bench::new(Limits { urgent_remembered: 64 << 20, ..limits() });
    let (page, large) = (memory(1), memory(32));
    let mut first = bench.read(0, &page);
    end_until(&bench, &mut first);
    // Nothing is read at this moment.
    let mut puts: Vec<_> = (0..64).map(|_| put(&bench, &large)).collect();
    for _ in 0..40 {
        assert_eq!((bench.under_way(), in_flight(&bench)), (4, 64 * KIB as u64));
        assert_eq!(bench.disk.borrow().asked().1, 16 * KIB, "a piece of a put");
        let mut next = bench.read(0, &page);
        assert_eq!(in_flight(&bench), (64 * KIB + PAGE) as u64, "a foreground read does not wait for puts");
        end_until(&bench, &mut next);
    }
    puts.retain_mut(|put| bench.poll(put).is_pending());
    assert!(puts.len() < 64, "puts go on");
    drop(puts);
}

#[test]
fn foreground_reads_are_forgotten_after_so_many_bytes_of_puts() {
    let bench = Bench::new(limits());
    let (page, large) = (memory(1), memory(32));
    let mut first = bench.read(0, &page);
    end_until(&bench, &mut first);
    let puts: Vec<_> = (0..32).map(|_| put(&bench, &large)).collect();
    let mut pieces = 0;
    while in_flight(&bench) <= 64 * KIB as u64 {
        let asked = bench.disk.borrow().asked().1;
        bench.end(asked as i32);
        pieces += 1;
    }
    // Eight of 128 KiB are a megabyte; the last four of them were still under way.
    assert!((4 * 8..=8 * 8).contains(&pieces), "{pieces}");
    assert!(in_flight(&bench) > 2 << 20, "puts fill the device again");
    drop(puts);
}

#[test]
fn beside_much_that_is_read_puts_may_have_as_much_at_the_device() {
    let bench = Bench::new(Limits { urgent_remembered: 64 << 20, ..limits() });
    let large = memory(32);
    let reads: Vec<_> = (0..8).map(|_| bench.read(0, &large)).collect();
    let puts: Vec<_> = (0..64).map(|_| put(&bench, &large)).collect();
    assert_eq!(in_flight(&bench), 2 * 8 * 128 * KIB as u64);
    drop((reads, puts));
}

#[test]
fn what_an_engine_waits_for_is_not_held_back_by_what_else_it_waits_for() {
    let bench = Bench::new(limits());
    let large = memory(32);
    let reads: Vec<_> = (0..32).map(|_| bench.read(0, &large)).collect();
    assert_eq!(in_flight(&bench), 4 << 20);
    drop(reads);
}
