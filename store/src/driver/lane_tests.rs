//! Lanes: what one device does not answer takes nothing from another.

use super::*;
use kvarts_contract::io_error::DirId;

impl Bench {
    /// Opens a file in a directory; the test says under which id.
    fn open(&self, dir: u16, file: FileId) -> FileId {
        let name = Name { dir: DirId(dir), path: "f".into() };
        let mut opening =
            Box::pin(self.driver.open(name, OpenMode { write: true, create: true, direct: true }));
        assert!(self.poll(&mut opening).is_pending());
        let (token, _) = self.disk.borrow_mut().under_way.pop_back().expect("it is asked");
        let reply = Some(Reply::Opened(file));
        self.disk.borrow_mut().ready.push(Completion { token, result: 0, reply });
        self.driver.pump();
        assert_eq!(self.poll(&mut opening), Poll::Ready(Ok(file)));
        file
    }

    /// Ends the oldest read of a file: there is one.
    fn end_on_read(&self, file: FileId) {
        let mut disk = self.disk.borrow_mut();
        let is_read = |op: &Op| matches!(op, Op::Read { file: on, .. } if *on == file);
        let at = disk.under_way.iter().position(|(_, op)| is_read(op)).expect("it went to the device");
        let (token, _) = disk.under_way.remove(at).expect("it is there");
        disk.answer(token, PAGE as i32);
        drop(disk);
        self.driver.pump();
    }

    /// Ends the oldest operation on a file.
    fn end_on(&self, file: FileId, result: i32) {
        let mut disk = self.disk.borrow_mut();
        let is_on =
            |op: &Op| matches!(op, Op::Read { file: on, .. } | Op::Write { file: on, .. } if *on == file);
        let at = disk.under_way.iter().position(|(_, op)| is_on(op)).expect("something on it");
        let (token, _) = disk.under_way.remove(at).expect("it is there");
        disk.answer(token, result);
        drop(disk);
        self.driver.pump();
    }
}

const PAGES: u64 = PAGE as u64;

fn two() -> (Bench, FileId, FileId) {
    let limits = Limits {
        max_ops: 8,
        max_bytes_in_flight: 4 * PAGES,
        foreground_reserve: PAGES,
        beside_urgent: PAGES,
        max_stuck_bytes: 2 * PAGES,
        ..Limits::default()
    };
    let bench = Bench::beside(limits, Devices::of(2, 1));
    let (sound, hung) = (bench.open(0, FileId(10)), bench.open(1, FileId(11)));
    (bench, sound, hung)
}

#[test]
fn a_device_that_answers_nothing_leaves_the_others_their_room_their_places_and_their_turn() {
    let (bench, sound, hung) = two();
    let buf = memory(1);
    // All that fits at its device, and all the places that its lane has.
    let mut puts: Vec<_> =
        (0..8).map(|at| bench.driver.write(Class::Put, hung, at * PAGES, buf.clone(), false)).collect();
    puts.iter_mut().for_each(|put| assert!(bench.poll(put).is_pending()));
    let stuck = bench.under_way();
    assert!((1..8).contains(&stuck), "{stuck}");
    // Far more than the bytes for which a class lets others pass.
    for round in 0..20_000 {
        let mut read = bench.driver.read(Class::Foreground, sound, round * PAGES, buf.clone());
        assert!(bench.poll(&mut read).is_pending());
        bench.end_on(sound, PAGE as i32);
        assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())), "read {round}");
    }
    let mut put = bench.driver.write(Class::Put, sound, 0, buf.clone(), false);
    assert!(bench.poll(&mut put).is_pending());
    bench.end_on(sound, PAGE as i32);
    assert_eq!(bench.poll(&mut put), Poll::Ready(Ok(())));
    assert_eq!(bench.under_way(), stuck);
    while bench.under_way() > 0 {
        bench.end(PAGE as i32);
    }
    puts.iter_mut().for_each(|put| assert_eq!(bench.poll(put), Poll::Ready(Ok(()))));
    bench.assert_idle(&[]);
}

#[test]
fn a_batch_of_a_device_that_hangs_holds_no_place_of_anothers() {
    let (bench, sound, hung) = two();
    let buf = memory(1);
    let mut stuck = bench.driver.batch(Class::Foreground);
    (0..100).for_each(|at| stuck.push(at, hung, at * PAGES, buf.clone()));
    stuck.submit();
    let mut other = bench.driver.batch(Class::Foreground);
    (0..100).for_each(|at| other.push(at, sound, at * PAGES, buf.clone()));
    other.submit();
    let mut come = 0;
    while come < 100 {
        bench.end_on(sound, PAGE as i32);
        while let Poll::Ready(Some(done)) = bench.next(&mut other) {
            assert_eq!(done.result, Ok(()));
            come += 1;
        }
    }
    assert!(bench.next(&mut stuck).is_pending());
    drop((stuck, other));
    while bench.under_way() > 0 {
        bench.end(PAGE as i32);
    }
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_lane_that_is_full_of_what_is_stuck_refuses_at_once_until_its_device_answers() {
    let (bench, sound, hung) = two();
    let buf = memory(1);
    let mut answered = Vec::new();
    for round in 0..8 {
        let mut read = bench.driver.read(Class::Foreground, hung, 0, buf.clone()).by(Nanos(round));
        bench.world.hands.0.store(round, Ordering::Relaxed);
        answered.push(kind(bench.poll(&mut read)));
    }
    // Two are let off, and four have all the room.
    let [late, refused] = [IoErrorKind::Deadline, IoErrorKind::Passing];
    assert_eq!(answered, [late, late, late, late, late, late, refused, refused]);
    // Of a batch, too, whether it has places or not, and of puts.
    let mut batch = bench.driver.batch(Class::Foreground);
    (0..20).for_each(|at| batch.push(at, hung, at * PAGES, buf.clone()));
    for _ in 0..20 {
        let Poll::Ready(Some(done)) = bench.next(&mut batch) else { panic!("it waits") };
        assert_eq!(done.result.map_err(|error| error.kind), Err(refused));
    }
    let mut put = bench.driver.write(Class::Put, hung, 0, buf.clone(), false);
    assert_eq!(kind(bench.poll(&mut put)), refused);
    let mut read = bench.driver.read(Class::Foreground, sound, 0, buf.clone());
    assert!(bench.poll(&mut read).is_pending());
    bench.end_on(sound, PAGE as i32);
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    // It answers, and is used again.
    (0..6).for_each(|_| bench.end_on(hung, PAGE as i32));
    let mut read = bench.driver.read(Class::Foreground, hung, 0, buf.clone());
    assert!(bench.poll(&mut read).is_pending());
    bench.end_on(hung, PAGE as i32);
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    drop(batch);
    bench.assert_idle(&[&buf]);
}

#[test]
fn puts_that_a_device_never_takes_keep_no_read_out_for_long_though_nobody_gave_them_a_deadline() {
    let (bench, _, sick) = two();
    let buf = memory(1);
    let mut puts: Vec<_> =
        (0..2).map(|at| bench.driver.write(Class::Put, sick, at * PAGES, buf.clone(), false)).collect();
    puts.iter_mut().for_each(|put| assert!(bench.poll(put).is_pending()));
    // A small one is remembered: beside it others go few at a time, and there are many.
    let mut small = bench.driver.read(Class::Small, sick, 0, buf.clone());
    assert!(bench.poll(&mut small).is_pending());
    bench.end_on_read(sick);
    assert_eq!(bench.poll(&mut small), Poll::Ready(Ok(())));
    let mut read = bench.driver.read(Class::Foreground, sick, 0, buf.clone()).by(Nanos(5_000_000_000));
    assert!(bench.poll(&mut read).is_pending());
    bench.world.hands.0.store(5_000_000_000, Ordering::Relaxed);
    assert_eq!(kind(bench.poll(&mut read)), IoErrorKind::Deadline);
    bench.world.hands.0.store(20_000_000_000, Ordering::Relaxed);
    let mut read = bench.driver.read(Class::Foreground, sick, 0, buf.clone());
    assert!(bench.poll(&mut read).is_pending());
    bench.end_on_read(sick);
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    // They end when the device takes them after all.
    assert!(bench.driver.metrics().stuck_ops > 0);
    while bench.under_way() > 0 {
        bench.end(PAGE as i32);
    }
    puts.iter_mut().for_each(|put| assert_eq!(bench.poll(put), Poll::Ready(Ok(()))));
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_transfer_that_is_answered_in_part_after_all_is_stuck_no_more() {
    let (bench, _, sick) = two();
    let buf = memory(2);
    for is_dropped in [false, true] {
        let begun = bench.world.hands.0.load(Ordering::Relaxed);
        let mut late = bench.driver.read(Class::Foreground, sick, 0, buf.clone());
        assert!(bench.poll(&mut late).is_pending());
        bench.world.hands.0.store(begun + 20_000_000_000, Ordering::Relaxed);
        // Three more do not fit, and what is late is looked for.
        let mut more = bench.driver.read(Class::Foreground, sick, 0, buf.clone());
        let mut last = bench.driver.read(Class::Foreground, sick, 0, buf.clone());
        assert!(bench.poll(&mut more).is_pending() && bench.poll(&mut last).is_pending());
        assert_eq!(bench.driver.metrics().stuck_ops, 1);
        // Half of it, while no submission can be made.
        let held = bench.disk.borrow_mut().under_way.pop_front().expect("it is there");
        bench.disk.borrow_mut().answer(held.0, PAGE as i32);
        bench.driver.pump();
        assert_eq!(bench.driver.metrics().stuck_ops, 0);
        // The rest is asked for, also where the half that came is not wanted any more by then.
        let late = Some(late).filter(|_| !is_dropped);
        while bench.under_way() > 0 {
            let (token, op) = bench.disk.borrow_mut().under_way.pop_front().expect("it is there");
            let len = range(&op).1 as i32;
            bench.disk.borrow_mut().answer(token, len);
            bench.driver.pump();
        }
        if let Some(mut late) = late {
            assert_eq!(bench.poll(&mut late), Poll::Ready(Ok(())));
        }
        assert_eq!(bench.poll(&mut more), Poll::Ready(Ok(())));
        assert_eq!(bench.poll(&mut last), Poll::Ready(Ok(())));
        drop((more, last));
        bench.assert_idle(&[]);
    }
}

#[test]
fn an_urgent_read_of_one_device_makes_no_put_of_another_wait() {
    let (bench, sound, other) = two();
    let buf = memory(3);
    let mut read = bench.driver.read(Class::Foreground, sound, 0, buf.slice(0, PAGE).unwrap());
    assert!(bench.poll(&mut read).is_pending());
    let mut put = bench.driver.write(Class::Put, other, 0, buf.clone(), false);
    assert!(bench.poll(&mut put).is_pending());
    // Whole, and not in small pieces.
    let len = range(&bench.disk.borrow().under_way.back().expect("it goes").1).1;
    assert_eq!(len, 3 * PAGE);
    bench.end_on(other, 3 * PAGE as i32);
    bench.end_on(sound, PAGE as i32);
    assert_eq!(bench.poll(&mut put), Poll::Ready(Ok(())));
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    bench.assert_idle(&[&buf]);
}

/// Each executor has a device of its own, as in a store with a drive for each.
#[test]
fn a_machine_that_stands_still_is_no_fault_of_a_device_and_a_device_beside_one_that_answers_is_silent() {
    let devices = Devices::of(2, 2);
    let limits = Limits::default();
    let (one, other) =
        (Bench::beside(limits, devices.clone()), Bench::beside(limits, devices.of_executor(1)));
    let turn_to = |seconds: u64| {
        let hands = [&one, &other].map(|bench| Arc::clone(&bench.world.hands));
        hands.iter().for_each(|hands| hands.0.store(seconds * 1_000_000_000, Ordering::Relaxed));
    };
    turn_to(1);
    let (hung, sound) = (one.open(0, FileId(10)), other.open(1, FileId(11)));
    let buf = memory(1);
    let mut stuck = one.driver.read(Class::Foreground, hung, 0, buf.clone());
    let mut read = other.driver.read(Class::Foreground, sound, 0, buf.clone());
    assert!(one.poll(&mut stuck).is_pending() && other.poll(&mut read).is_pending());
    turn_to(13);
    assert!(!one.driver.is_silent_alone(DirId(0)), "neither has answered");
    other.end_on(sound, PAGE as i32);
    assert_eq!(other.poll(&mut read), Poll::Ready(Ok(())));
    assert!(one.driver.is_silent_alone(DirId(0)), "the other one has");
    assert!(!other.driver.is_silent_alone(DirId(1)));
    one.end_on(hung, PAGE as i32);
    assert_eq!(one.poll(&mut stuck), Poll::Ready(Ok(())));
    assert!(!one.driver.is_silent_alone(DirId(0)));
}
