//! The driver over a device that the test plays, and over a real one.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Wake;
use std::time::Duration;

use super::*;
use crate::driver::ExtentDone;
use crate::io::{IoFacts, Op, Token, Unpark};
use kvarts_contract::buffers::Arena;
use kvarts_contract::buffers::region::{PAGE, Region};
use kvarts_contract::clock::{Clock, Entropy};

/// A device whose completions the test makes up.
#[derive(Default)]
struct Script {
    under_way: VecDeque<(Token, Op)>,
    ready: Vec<Completion>,
    /// Operations that were submitted and not sent.
    unsent: usize,
}

impl Script {
    /// Ends the oldest operation.
    fn end(&mut self, result: i32) -> Token {
        let (token, _) = self.under_way.pop_front().expect("something under way");
        self.answer(token, result);
        token
    }

    fn answer(&mut self, token: Token, result: i32) {
        self.ready.push(Completion { token, result, reply: None });
    }

    /// The oldest operation: where it begins and how long it is.
    fn asked(&self) -> (u64, usize) {
        range(&self.under_way.front().expect("something under way").1)
    }
}

fn range(op: &Op) -> (u64, usize) {
    match op {
        Op::Read { offset, into: buf, .. } | Op::Write { offset, from: buf, .. } => (*offset, buf.len()),
        Op::WriteV { offset, from: bufs, .. } => (*offset, bufs.iter().map(SharedBuf::len).sum()),
        Op::Flush { .. } | Op::Meta(_) => (0, 0),
    }
}

impl Io for Script {
    fn submit(&mut self, token: Token, op: Op) {
        self.under_way.push_back((token, op));
        self.unsent += 1;
    }
    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.send();
        out.append(&mut self.ready);
    }
    fn send(&mut self) {
        self.unsent = 0;
    }
    fn park(&mut self, _: Option<Duration>) {}
    fn unparker(&self) -> Arc<dyn Unpark> {
        no_thread()
    }
    fn register(&mut self, _: &Arc<Region>) -> Result<(), String> {
        Ok(())
    }
    fn unregister(&mut self, _: &Arc<Region>) {}
    fn facts(&self) -> IoFacts {
        IoFacts { backend: "script", features: Vec::new(), warnings: Vec::new() }
    }
}

fn no_thread() -> Arc<dyn Unpark> {
    struct NoThread;
    impl Unpark for NoThread {
        fn unpark(&self) {}
    }
    Arc::new(NoThread)
}

/// A clock that the test turns.
#[derive(Debug, Default)]
struct Hands(AtomicU64);

impl Clock for Hands {
    fn now(&self) -> Nanos {
        Nanos(self.0.load(Ordering::Relaxed))
    }
    fn unix_millis(&self) -> u64 {
        0
    }
}

#[derive(Debug)]
struct Zeros;

impl Entropy for Zeros {
    fn fill(&self, bytes: &mut [u8]) {
        bytes.fill(0);
    }
}

struct World {
    clock: Arc<dyn Clock>,
    hands: Arc<Hands>,
    entropy: Arc<dyn Entropy>,
    timers: Cell<usize>,
}

impl Runtime for World {
    fn spawn(&self, _: Class, _: LocalTask) {}
    fn sleep_until(&self, at: Nanos) -> LocalTask {
        self.timers.set(self.timers.get() + 1);
        let hands = Arc::clone(&self.hands);
        Box::pin(std::future::poll_fn(
            move |_| if hands.now() >= at { Poll::Ready(()) } else { Poll::Pending },
        ))
    }
    fn yield_now(&self) -> LocalTask {
        Box::pin(async {})
    }
    fn unparked(&self) -> LocalTask {
        Box::pin(async {})
    }
    fn set_reaper(&self, _: crate::rt::Reaper) {}
    fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }
    fn entropy(&self) -> &Arc<dyn Entropy> {
        &self.entropy
    }
}

/// Counts how often it was woken.
#[derive(Default)]
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Bench {
    driver: Driver,
    disk: Rc<RefCell<Script>>,
    world: Rc<World>,
    woken: Arc<Woken>,
}

impl Bench {
    fn new(limits: Limits) -> Self {
        Self::beside(limits, Devices::of(1, 1))
    }

    fn beside(limits: Limits, devices: Devices) -> Self {
        let hands = Arc::new(Hands::default());
        let clock = Arc::clone(&hands) as Arc<dyn Clock>;
        let world = Rc::new(World { clock, hands, entropy: Arc::new(Zeros), timers: Cell::new(0) });
        let disk = Rc::new(RefCell::new(Script::default()));
        let io = Rc::clone(&disk) as Rc<RefCell<dyn Io>>;
        let driver = Driver::beside(Rc::clone(&world) as Rc<dyn Runtime>, io, limits, devices);
        Self { driver, disk, world, woken: Arc::default() }
    }

    fn poll<F: Future + Unpin>(&self, future: &mut F) -> Poll<F::Output> {
        let waker = Waker::from(Arc::clone(&self.woken));
        Pin::new(future).poll(&mut Context::from_waker(&waker))
    }

    fn woken(&self) -> u64 {
        self.woken.0.swap(0, Ordering::Relaxed)
    }

    fn read(&self, offset: u64, buf: &SharedBuf) -> Transfer {
        self.driver.read(Class::Foreground, FILE, offset, buf.clone())
    }

    /// Ends the oldest operation and lets the driver see it.
    fn end(&self, result: i32) -> Token {
        let token = self.disk.borrow_mut().end(result);
        self.driver.pump();
        token
    }

    fn under_way(&self) -> usize {
        self.disk.borrow().under_way.len()
    }

    fn next(&self, batch: &mut ReadBatch) -> Poll<Option<ExtentDone>> {
        let waker = Waker::from(Arc::clone(&self.woken));
        batch.poll_next(&mut Context::from_waker(&waker))
    }

    /// Nothing is left behind: no slot, no byte, no memory.
    fn assert_idle(&self, bufs: &[&SharedBuf]) {
        let metrics = self.driver.metrics();
        assert_eq!((metrics.slots, metrics.waiting_ops, metrics.in_flight_ops), (0, 0, 0), "{metrics:?}");
        assert_eq!(
            (metrics.in_flight_bytes, metrics.stuck_ops, metrics.stuck_bytes),
            (0, 0, 0),
            "{metrics:?}"
        );
        assert_eq!((metrics.dropped_ops, metrics.dropped_bytes), (0, 0), "{metrics:?}");
        for buf in bufs {
            assert_eq!(Arc::strong_count(buf.region()), 1, "memory is still held");
        }
    }
}

const FILE: FileId = FileId(3);
const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;

fn memory(pages: usize) -> SharedBuf {
    SharedBuf::new(&Region::anonymous(pages * PAGE).unwrap(), 0, pages * PAGE).unwrap()
}

fn kind<T: fmt::Debug>(polled: Poll<Result<T, IoError>>) -> IoErrorKind {
    match polled {
        Poll::Ready(Err(error)) => error.kind,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_whole_transfer_succeeds_and_gives_its_memory_back_before_it_is_polled() {
    let bench = Bench::new(Limits::default());
    let buf = memory(2);
    let mut read = bench.read(0, &buf);
    assert!(bench.poll(&mut read).is_pending());
    assert_eq!(bench.under_way(), 1);
    bench.end(2 * PAGE as i32);
    assert_eq!(Arc::strong_count(buf.region()), 1);
    assert_eq!(bench.woken(), 1);
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    bench.assert_idle(&[&buf]);
    assert_eq!(bench.driver.metrics().bytes_read, 2 * PAGE as u64);
}

#[test]
fn the_rest_of_a_short_transfer_is_asked_for_from_whole_pages_on() {
    let bench = Bench::new(Limits::default());
    let buf = memory(4);
    let mut read = bench.read(8192, &buf);
    bench.end(PAGE as i32);
    assert_eq!(bench.disk.borrow().asked(), (8192 + 4096, 3 * PAGE));
    // An odd place: direct I/O goes on at a page.
    bench.end(PAGE as i32 + 100);
    assert_eq!(bench.disk.borrow().asked(), (8192 + 8192, 2 * PAGE));
    assert!(bench.poll(&mut read).is_pending());
    bench.end(2 * PAGE as i32);
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    assert_eq!(bench.driver.metrics().short, 2);
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_short_vectored_transfer_goes_on_in_the_middle_of_a_buffer() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    let parts: Vec<Buf> =
        [(0, 10), (100, 20), (200, 30)].map(|(at, len)| buf.slice(at, len).unwrap().into()).into();
    let mut write = bench.driver.write_v(Class::Put, FILE, 5, parts, false);
    bench.end(15);
    {
        let disk = bench.disk.borrow();
        let Op::WriteV { offset, from, .. } = &disk.under_way.front().unwrap().1 else { panic!() };
        assert_eq!(*offset, 20);
        let ranges: Vec<_> = from.iter().map(|part| (part.offset(), part.len())).collect();
        assert_eq!(ranges, [(105, 15), (200, 30)]);
    }
    bench.end(45);
    assert_eq!(bench.poll(&mut write), Poll::Ready(Ok(())));
    bench.assert_idle(&[&buf]);
}

#[test]
fn more_ranges_than_one_operation_takes_are_several_operations() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    let parts: Vec<Buf> = (0..2500).map(|at| buf.slice(at, 1).unwrap().into()).collect();
    let mut write = bench.driver.write_v(Class::Put, FILE, 0, parts, true);
    for (offset, len) in [(0, 1024), (1024, 1024), (2048, 452)] {
        assert!(bench.poll(&mut write).is_pending());
        assert_eq!(bench.disk.borrow().asked(), (offset, len));
        bench.end(len as i32);
    }
    assert_eq!(bench.poll(&mut write), Poll::Ready(Ok(())));
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_file_that_ends_before_the_last_byte_is_an_error_that_says_where() {
    for first in [0, 100] {
        let bench = Bench::new(Limits::default());
        let buf = memory(2);
        let mut read = bench.read(4096, &buf);
        bench.end(first);
        if first > 0 {
            // The same odd end again, now counted from the page on: no progress.
            assert_eq!(bench.disk.borrow().asked(), (4096, 2 * PAGE));
            bench.end(first);
        }
        let Poll::Ready(Err(error)) = bench.poll(&mut read) else { panic!() };
        assert_eq!((error.kind, error.offset, error.len), (IoErrorKind::Eof, 4096, 8192));
        assert_eq!(error.file(), Some(FILE));
        bench.assert_idle(&[&buf]);
    }
}

#[test]
fn a_device_that_moves_a_little_for_ever_is_given_up_on() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1).slice(0, 1000).unwrap();
    let mut read = bench.read(0, &buf);
    let mut rounds = 0;
    while bench.poll(&mut read).is_pending() {
        bench.end(1);
        rounds += 1;
        assert!(rounds < 200);
    }
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_result_larger_than_the_request_is_an_error() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    let mut read = bench.read(0, &buf);
    bench.end(PAGE as i32 + 1);
    assert_eq!(kind(bench.poll(&mut read)), IoErrorKind::Other(0));
    bench.assert_idle(&[&buf]);
}

/// `EFAULT` of a client's file says that the client took its memory away. Of memory of this process it is a defect, and of
/// neither is the disk at fault.
#[test]
fn memory_that_a_client_took_away_is_no_fault_of_the_disk() {
    let bench = Bench::new(Limits::default());
    let file = kvarts_contract::buffers::shared::sealed(PAGE as u64).unwrap();
    let reaper: kvarts_contract::buffers::shared::Reaper = Arc::new(drop);
    let foreign =
        kvarts_contract::buffers::shared::map_foreign(file, PAGE as u64, Box::new(()), &reaper).unwrap();
    let buf = SharedBuf::new(&foreign, 0, PAGE).unwrap();
    let mut read = bench.read(0, &buf);
    bench.end(-14);
    assert_eq!(kind(bench.poll(&mut read)), IoErrorKind::Passing);
    assert!(foreign.has_failed());
    let own = memory(1);
    let mut read = bench.read(0, &own);
    bench.end(-14);
    assert_eq!(kind(bench.poll(&mut read)), IoErrorKind::Other(14));
}

#[test]
fn an_interrupted_transfer_is_repeated_but_not_for_ever() {
    for errno in [EINTR, EAGAIN] {
        let bench = Bench::new(Limits::default());
        let buf = memory(1);
        let mut read = bench.read(0, &buf);
        bench.end(-errno);
        bench.end(-errno);
        bench.end(PAGE as i32);
        assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
        assert_eq!(bench.driver.metrics().retried, 2);
        let mut read = bench.read(0, &buf);
        let mut rounds = 0;
        let error = loop {
            match bench.poll(&mut read) {
                Poll::Pending => bench.end(-errno),
                done => break kind(done),
            };
            rounds += 1;
            assert!(rounds < 100);
        };
        assert_eq!(error, IoErrorKind::Passing);
        bench.assert_idle(&[&buf]);
    }
}

#[test]
fn neither_a_flush_nor_a_durable_write_nor_a_name_operation_is_repeated() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    for errno in [EINTR, EAGAIN, EIO] {
        let mut flush = bench.driver.flush(FILE);
        bench.end(-errno);
        assert!(matches!(bench.poll(&mut flush), Poll::Ready(Err(_))));
        let mut write = bench.driver.write(Class::Put, FILE, 0, buf.clone(), true);
        bench.end(-errno);
        assert!(matches!(bench.poll(&mut write), Poll::Ready(Err(_))));
        let mut truncate = bench.driver.meta(MetaOp::Truncate { file: FILE, len: 0 });
        bench.end(-errno);
        assert!(matches!(bench.poll(&mut truncate), Poll::Ready(Err(_))));
        assert_eq!(bench.under_way(), 0);
    }
    assert_eq!(bench.driver.metrics().retried, 0);
    bench.assert_idle(&[&buf]);
}

#[test]
fn doubled_and_unknown_completions_are_counted_and_touch_nothing() {
    let bench = Bench::new(Limits::default());
    let (first, second) = (memory(1), memory(1));
    let mut read = bench.read(0, &first);
    let token = bench.end(-EAGAIN);
    // The first submission's completion once more, while the second submission is under way.
    bench.disk.borrow_mut().answer(token, PAGE as i32);
    bench.driver.pump();
    assert!(bench.poll(&mut read).is_pending());
    let token = bench.end(PAGE as i32);
    bench.disk.borrow_mut().answer(token, 0);
    bench.driver.pump();
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    // And once more, while another operation has the slot.
    let mut other = bench.read(0, &second);
    bench.disk.borrow_mut().answer(token, PAGE as i32);
    for odd in [0, u64::MAX, 1 << 24, 0xff_ffff] {
        bench.disk.borrow_mut().answer(Token(odd), 1);
    }
    bench.driver.pump();
    assert!(bench.poll(&mut other).is_pending());
    assert_eq!(Arc::strong_count(second.region()), 3, "test, slot and device");
    assert_eq!(bench.driver.metrics().unknown_completions, 7);
    bench.end(PAGE as i32);
    assert_eq!(bench.poll(&mut other), Poll::Ready(Ok(())));
    bench.assert_idle(&[&first, &second]);
}

#[test]
fn completions_out_of_order_reach_their_own_futures() {
    let bench = Bench::new(Limits::default());
    let bufs: Vec<SharedBuf> = (1..=4).map(memory).collect();
    let mut reads: Vec<Transfer> = bufs.iter().map(|buf| bench.read(0, buf)).collect();
    let tokens: Vec<Token> = bench.disk.borrow().under_way.iter().map(|(token, _)| *token).collect();
    for number in [2, 0, 3, 1] {
        assert!(bench.poll(&mut reads[number]).is_pending());
        let result = if number == 3 { -EIO } else { bufs[number].len() as i32 };
        bench.disk.borrow_mut().answer(tokens[number], result);
        bench.driver.pump();
        let done = bench.poll(&mut reads[number]);
        if number == 3 {
            assert_eq!(kind(done), IoErrorKind::Media)
        } else {
            assert_eq!(done, Poll::Ready(Ok(())))
        }
    }
    bench.disk.borrow_mut().under_way.clear();
    bench.assert_idle(&bufs.iter().collect::<Vec<_>>());
}

#[test]
fn memory_of_a_dropped_future_stays_with_the_device_until_the_completion() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    drop(bench.read(0, &buf));
    assert!(Arc::strong_count(buf.region()) > 1);
    let metrics = bench.driver.metrics();
    assert_eq!((metrics.dropped_ops, metrics.dropped_bytes), (1, PAGE as u64));
    // The device forgets it before it completes: the slot still holds the memory.
    let (token, op) = bench.disk.borrow_mut().under_way.pop_front().unwrap();
    drop(op);
    assert_eq!(Arc::strong_count(buf.region()), 2);
    // No task waits for its rest.
    bench.disk.borrow_mut().answer(token, 100);
    bench.driver.pump();
    assert_eq!(bench.under_way(), 0);
    assert_eq!(bench.driver.metrics().late_completions, 1);
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_future_dropped_while_it_waits_was_never_there() {
    let limits = Limits { max_bytes_in_flight: PAGE as u64, foreground_reserve: 0, ..Limits::default() };
    let bench = Bench::new(limits);
    let (first, second, third) = (memory(1), memory(1), memory(1));
    let mut one = bench.read(0, &first);
    let two = bench.read(0, &second);
    let mut three = bench.read(4096, &third);
    drop(two);
    assert_eq!(Arc::strong_count(second.region()), 1);
    bench.end(PAGE as i32);
    assert_eq!(bench.poll(&mut one), Poll::Ready(Ok(())));
    assert_eq!(bench.disk.borrow().asked().0, 4096);
    bench.end(PAGE as i32);
    assert_eq!(bench.poll(&mut three), Poll::Ready(Ok(())));
    bench.assert_idle(&[&first, &second, &third]);
}

#[test]
fn an_operation_past_its_deadline_is_an_error_and_stays_quarantined() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    let mut read = bench.read(0, &buf).by(Nanos(10));
    assert!(bench.poll(&mut read).is_pending());
    bench.world.hands.0.store(10, Ordering::Relaxed);
    assert_eq!(kind(bench.poll(&mut read)), IoErrorKind::Deadline);
    drop(read);
    let metrics = bench.driver.metrics();
    assert_eq!((metrics.stuck_ops, metrics.stuck_bytes), (1, PAGE as u64));
    assert_eq!(metrics.in_flight_bytes, 0, "what is stuck does not take the others' room");
    assert_eq!(Arc::strong_count(buf.region()), 3);
    bench.end(PAGE as i32);
    bench.assert_idle(&[&buf]);
}

#[test]
fn stuck_operations_leave_room_for_others_only_up_to_a_limit() {
    let page = PAGE as u64;
    let limits = Limits {
        max_ops: 16,
        max_bytes_in_flight: 2 * page,
        foreground_reserve: 0,
        max_stuck_bytes: 3 * page,
        ..Limits::default()
    };
    let bench = Bench::new(limits);
    let buf = memory(1);
    let mut under_way = Vec::new();
    for round in 0..8 {
        let mut read = bench.read(0, &buf).by(Nanos(round));
        bench.world.hands.0.store(round, Ordering::Relaxed);
        let expected = if round < 5 { IoErrorKind::Deadline } else { IoErrorKind::Passing };
        assert_eq!(kind(bench.poll(&mut read)), expected);
        under_way.push(bench.under_way());
    }
    // Three beyond what fits in flight, then nothing more goes to a device that never answers: it is refused.
    assert_eq!(under_way, [1, 2, 3, 4, 5, 5, 5, 5]);
    let metrics = bench.driver.metrics();
    assert_eq!((metrics.stuck_ops, metrics.in_flight_bytes), (5, 2 * page));
    while bench.under_way() > 0 {
        bench.end(PAGE as i32);
    }
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_deadline_before_there_is_a_slot_is_kept_too() {
    let bench = Bench::new(Limits { max_ops: 1, ..Limits::default() });
    let buf = memory(1);
    let mut first = bench.read(0, &buf);
    let mut second = bench.read(0, &buf).by(Nanos(5));
    assert!(bench.poll(&mut second).is_pending());
    bench.world.hands.0.store(5, Ordering::Relaxed);
    assert_eq!(kind(bench.poll(&mut second)), IoErrorKind::Deadline);
    bench.end(PAGE as i32);
    assert_eq!(bench.poll(&mut first), Poll::Ready(Ok(())));
    drop(second);
    bench.assert_idle(&[&buf]);
}

#[test]
fn operations_beyond_the_slots_wait_and_are_woken() {
    let bench = Bench::new(Limits { max_ops: 2, ..Limits::default() });
    let buf = memory(1);
    let mut reads: Vec<Transfer> = (0..5).map(|_| bench.read(0, &buf)).collect();
    assert!(reads.iter_mut().all(|read| bench.poll(read).is_pending()));
    assert_eq!(bench.under_way(), 2);
    let mut ended = 0;
    while !reads.is_empty() {
        bench.end(PAGE as i32);
        assert!(bench.woken() > 0);
        let before = reads.len();
        reads.retain_mut(|read| bench.poll(read).is_pending());
        // A slot that became free while they were polled may be taken at the next round.
        assert!(reads.iter_mut().all(|read| bench.poll(read).is_pending()));
        ended += before - reads.len();
        assert!(bench.under_way() <= 2);
    }
    assert_eq!(ended, 5);
    bench.assert_idle(&[&buf]);
}

#[test]
fn bytes_in_flight_stay_within_the_limit_and_a_larger_transfer_goes_in_pieces() {
    let page = PAGE as u64;
    let limits = Limits { max_bytes_in_flight: 4 * page, foreground_reserve: page, ..Limits::default() };
    let bench = Bench::new(limits);
    let buf = memory(8);
    let mut read = bench.driver.read(Class::Put, FILE, 0, buf.clone());
    let mut reads: Vec<Transfer> =
        (0..4).map(|_| bench.driver.read(Class::Put, FILE, 0, buf.slice(0, PAGE).unwrap())).collect();
    let mut offsets = Vec::new();
    while bench.under_way() > 0 {
        assert!(bench.driver.metrics().in_flight_bytes <= 3 * page, "the reserve is not for puts");
        let (offset, len) = bench.disk.borrow().asked();
        offsets.push((offset / page, len / PAGE));
        bench.end(len as i32);
    }
    assert_eq!(offsets, [(0, 3), (3, 3), (6, 2), (0, 1), (0, 1), (0, 1), (0, 1)]);
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    assert!(reads.iter_mut().all(|read| bench.poll(read).is_ready()));
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_foreground_read_finds_room_while_background_work_fills_the_device() {
    let page = PAGE as u64;
    let limits = Limits { max_bytes_in_flight: 4 * page, foreground_reserve: page, ..Limits::default() };
    let bench = Bench::new(limits);
    let buf = memory(1);
    let background: Vec<Transfer> =
        (0..20).map(|_| bench.driver.read(Class::Background, FILE, 0, buf.clone())).collect();
    assert_eq!(bench.under_way(), 3);
    let foreground = bench.read(4096, &buf);
    assert_eq!(bench.under_way(), 4);
    assert_eq!(range(&bench.disk.borrow().under_way.back().unwrap().1).0, 4096);
    drop((background, foreground));
}

#[test]
fn an_io_in_use_only_delays_what_is_submitted() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    let in_use = bench.disk.borrow_mut();
    let mut read = bench.read(0, &buf);
    let mut flush = bench.driver.flush(FILE);
    assert_eq!(bench.driver.pump(), 0);
    drop(in_use);
    assert_eq!(bench.under_way(), 0);
    bench.driver.pump();
    assert_eq!(bench.under_way(), 2);
    bench.end(0);
    bench.end(PAGE as i32);
    assert_eq!(bench.poll(&mut flush), Poll::Ready(Ok(())));
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    bench.assert_idle(&[&buf]);
}

#[test]
fn nothing_to_move_succeeds_without_the_device() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    let mut read = bench.read(0, &buf.slice(0, 0).unwrap());
    let mut write = bench.driver.write_v(Class::Put, FILE, 0, Vec::new(), true);
    assert_eq!(bench.poll(&mut read), Poll::Ready(Ok(())));
    assert_eq!(bench.poll(&mut write), Poll::Ready(Ok(())));
    assert_eq!(bench.driver.metrics().submitted, 0);
}

#[test]
fn a_reply_reaches_its_future_and_a_wrong_one_is_an_error() {
    let bench = Bench::new(Limits::default());
    let answers = [
        (Some(Reply::Stat { len: 5, allocated: 7 }), Ok((5, 7))),
        (Some(Reply::Opened(FILE)), Err(IoErrorKind::Other(0))),
        (None, Err(IoErrorKind::Other(0))),
    ];
    for (reply, expected) in answers {
        let mut stat = Box::pin(bench.driver.stat(FILE));
        assert!(bench.poll(&mut stat).is_pending());
        let (token, _) = bench.disk.borrow_mut().under_way.pop_front().unwrap();
        bench.disk.borrow_mut().ready.push(Completion { token, result: 0, reply });
        bench.driver.pump();
        let Poll::Ready(result) = bench.poll(&mut stat) else { panic!() };
        assert_eq!(result.map_err(|error| error.kind), expected);
    }
    bench.assert_idle(&[]);
}

#[test]
fn a_batch_reports_its_extents_in_the_order_in_which_they_end() {
    let bench = Bench::new(Limits::default());
    let bufs: Vec<SharedBuf> = (1..=4).map(memory).collect();
    let mut batch = bench.driver.batch(Class::Foreground);
    for (extent, buf) in (10..).zip(&bufs) {
        batch.push(extent, FILE, 0, buf.clone());
    }
    batch.push(99, FILE, 0, bufs[0].slice(0, 0).unwrap());
    batch.submit();
    assert_eq!(batch.outstanding(), 4);
    let report = |extent, result| Poll::Ready(Some(ExtentDone { extent, result }));
    assert_eq!(bench.next(&mut batch), report(99, Ok(())));
    assert!(bench.next(&mut batch).is_pending());
    let tokens: Vec<Token> = bench.disk.borrow().under_way.iter().map(|(token, _)| *token).collect();
    for number in [3, 1] {
        bench.disk.borrow_mut().answer(tokens[number], bufs[number].len() as i32);
    }
    bench.disk.borrow_mut().answer(tokens[0], -EIO);
    bench.driver.pump();
    assert_eq!(bench.woken(), 1);
    assert_eq!(bench.next(&mut batch), report(13, Ok(())));
    assert_eq!(bench.next(&mut batch), report(11, Ok(())));
    let Poll::Ready(Some(ExtentDone { extent: 10, result: Err(error) })) = bench.next(&mut batch) else {
        panic!()
    };
    assert_eq!(error.kind, IoErrorKind::Media);
    assert!(bench.next(&mut batch).is_pending());
    bench.disk.borrow_mut().answer(tokens[2], bufs[2].len() as i32);
    bench.driver.pump();
    assert_eq!(bench.next(&mut batch), report(12, Ok(())));
    assert_eq!(bench.next(&mut batch), Poll::Ready(None));
    bench.disk.borrow_mut().under_way.clear();
    bench.assert_idle(&bufs.iter().collect::<Vec<_>>());
}

#[test]
fn what_may_go_is_with_the_device_before_anybody_looks_at_what_has_come() {
    let bench = Bench::new(Limits { max_ops: 2, ..Limits::default() });
    let buf = memory(1);
    let mut batch = bench.driver.batch(Class::Foreground);
    (0..4).for_each(|extent| batch.push(extent, FILE, 0, buf.clone()));
    batch.submit();
    let with_device = || (bench.under_way(), bench.disk.borrow().unsent);
    assert_eq!((with_device(), batch.try_next()), ((2, 0), None));
    // Room that completions make.
    for _ in 0..2 {
        bench.end(4096);
    }
    assert_eq!(with_device(), (2, 0));
    // All that has come can be had at once, in its order.
    let came: Vec<u64> = std::iter::from_fn(|| batch.try_next()).map(|done| done.extent).collect();
    assert_eq!((came, batch.outstanding()), (vec![0, 1], 2));
    for _ in 0..2 {
        bench.end(4096);
    }
    assert_eq!(std::iter::from_fn(|| batch.try_next()).count(), 2);
    assert_eq!(bench.next(&mut batch), Poll::Ready(None));
    bench.assert_idle(&[&buf]);
}

#[test]
fn batches_larger_than_the_slots_share_them_and_all_end() {
    let bench = Bench::new(Limits { max_ops: 3, ..Limits::default() });
    let buf = memory(1);
    let mut batches: Vec<ReadBatch> = (0..2).map(|_| bench.driver.batch(Class::Prefetch)).collect();
    let mut lone = None;
    for (number, batch) in batches.iter_mut().enumerate() {
        (0..50).for_each(|extent| batch.push(extent, FILE, number as u64 * 4096, buf.clone()));
        batch.submit();
        lone.get_or_insert_with(|| bench.read(0, &buf));
    }
    let mut lone = lone.unwrap();
    let (mut seen, mut lone_ended) = ([Vec::new(), Vec::new()], false);
    for round in 0..200 {
        lone_ended = lone_ended || bench.poll(&mut lone).is_ready();
        for (batch, seen) in batches.iter_mut().zip(&mut seen) {
            while let Poll::Ready(Some(done)) = bench.next(batch) {
                assert_eq!(done.result, Ok(()));
                seen.push(done.extent);
            }
        }
        if round == 60 {
            assert!(seen.iter().all(|seen| seen.len() > 10), "one batch starves the other");
        }
        if bench.under_way() == 0 {
            break;
        }
        bench.end(PAGE as i32);
    }
    assert!(lone_ended);
    for seen in seen {
        assert_eq!(seen, (0..50).collect::<Vec<_>>());
    }
    drop(batches);
    bench.assert_idle(&[&buf]);
}

#[test]
fn a_dropped_batch_gives_up_what_waits_and_leaves_memory_with_the_device() {
    let limits =
        Limits { max_ops: 3, max_bytes_in_flight: PAGE as u64, foreground_reserve: 0, ..Limits::default() };
    let bench = Bench::new(limits);
    let bufs: Vec<SharedBuf> = (0..5).map(|_| memory(1)).collect();
    let mut batch = bench.driver.batch(Class::Foreground);
    for buf in &bufs {
        batch.push(0, FILE, 0, buf.clone());
    }
    batch.submit();
    assert_eq!(bench.under_way(), 1);
    drop(batch);
    assert_eq!(Arc::strong_count(bufs[0].region()), 3);
    assert!(bufs[1..].iter().all(|buf| Arc::strong_count(buf.region()) == 1));
    assert_eq!(bench.driver.metrics().dropped_ops, 1);
    // The next batch has the state of the last one, but nothing of what was in it.
    let mut next = bench.driver.batch(Class::Foreground);
    assert_eq!(bench.next(&mut next), Poll::Ready(None));
    bench.end(PAGE as i32);
    assert_eq!(bench.next(&mut next), Poll::Ready(None));
    bench.assert_idle(&bufs.iter().collect::<Vec<_>>());
}

#[test]
fn a_batch_past_its_deadline_says_how_many_it_gave_up_and_can_be_used_again() {
    let bench = Bench::new(Limits::default());
    let buf = memory(1);
    let mut batch = bench.driver.batch(Class::Foreground);
    (0..3).for_each(|extent| batch.push(extent, FILE, 0, buf.clone()));
    {
        let mut next = Box::pin(batch.next_by(Nanos(10)));
        assert!(bench.poll(&mut next).is_pending());
        bench.end(PAGE as i32);
        assert!(matches!(bench.poll(&mut next), Poll::Ready(Ok(Some(_)))));
    }
    {
        let mut next = Box::pin(batch.next_by(Nanos(10)));
        assert!(bench.poll(&mut next).is_pending());
        bench.world.hands.0.store(10, Ordering::Relaxed);
        assert_eq!(bench.poll(&mut next), Poll::Ready(Err(2)));
    }
    assert_eq!(bench.world.timers.get(), 1, "one timer for one deadline");
    assert_eq!(bench.driver.metrics().stuck_ops, 2);
    batch.push(7, FILE, 0, buf.clone());
    batch.submit();
    bench.end(PAGE as i32);
    bench.end(PAGE as i32);
    assert!(bench.next(&mut batch).is_pending());
    bench.end(PAGE as i32);
    assert_eq!(bench.next(&mut batch), Poll::Ready(Some(ExtentDone { extent: 7, result: Ok(()) })));
    bench.assert_idle(&[&buf]);
}

#[test]
fn on_a_real_disk_what_was_written_is_read_and_a_file_that_is_too_short_says_so() {
    use crate::io::{Features, IoChoice, open_io, scratch::Scratch};
    for choice in [IoChoice::Auto, IoChoice::Pool] {
        let scratch = Scratch::new();
        let io = open_io(choice, &[scratch.path().to_owned()], &Features::default()).unwrap();
        // Small limits, so that a transfer goes in pieces and batches wait for slots.
        let limits = Limits {
            max_ops: 8,
            max_bytes_in_flight: 8 << 12,
            foreground_reserve: 1 << 12,
            ..Limits::default()
        };
        let io: Rc<RefCell<Box<dyn Io>>> = Rc::new(RefCell::new(io));
        let bench = Bench::new(limits);
        let driver = Driver::new(
            Rc::clone(&bench.world) as Rc<dyn Runtime>,
            Rc::clone(&io) as Rc<RefCell<dyn Io>>,
            limits,
        );
        let mut work = Box::pin(round_trip(driver.clone()));
        while bench.poll(&mut work).is_pending() {
            if driver.pump() == 0 {
                io.borrow_mut().park(Some(Duration::from_secs(1)));
            }
        }
        assert_eq!(driver.metrics().slots, 0);
    }
}

async fn round_trip(driver: Driver) {
    let name = Name { dir: DirId(0), path: "file".into() };
    let mode = OpenMode { write: true, create: true, direct: true };
    let file = driver.open(name.clone(), mode).await.unwrap();
    let (out, back) = (memory(64), memory(64));
    out.copy_in(0, &(0..64 * PAGE).map(|at| (at / 300) as u8).collect::<Vec<_>>());
    driver.write(Class::Put, file, 0, out.clone(), false).await.unwrap();
    driver.flush(file).await.unwrap();
    driver.read(Class::Foreground, file, 0, back.clone()).await.unwrap();
    assert_eq!(back.to_vec(), out.to_vec());
    back.fill(0);
    let mut batch = driver.batch(Class::Foreground);
    for page in 0..64 {
        let into = back.slice(page * PAGE, PAGE).unwrap();
        batch.push(page as u64, file, (page * PAGE) as u64, into);
    }
    let mut ended = std::collections::BTreeSet::new();
    while let Some(done) = batch.next().await {
        assert_eq!(done.result, Ok(()));
        assert!(ended.insert(done.extent));
    }
    assert_eq!(ended.len(), 64);
    assert_eq!(back.to_vec(), out.to_vec());
    driver.meta(MetaOp::Truncate { file, len: 10 * PAGE as u64 + 77 }).await.unwrap();
    let error = driver.read(Class::Foreground, file, 0, back.clone()).await.unwrap_err();
    assert_eq!(error.kind, IoErrorKind::Eof);
    let missing = Name { dir: DirId(0), path: "missing".into() };
    let read_only = OpenMode { write: false, create: false, direct: false };
    let error = driver.open(missing, read_only).await.unwrap_err();
    assert_eq!(error.kind, IoErrorKind::NotFound);
    assert!(error.to_string().contains("missing"), "{error}");
}

#[path = "urgent_tests.rs"]
mod urgent;

#[path = "lane_tests.rs"]
mod lanes;

#[path = "any_tests.rs"]
mod any_script;

#[test]
fn memory_that_is_read_into_comes_back_full_or_stays_with_the_device() {
    let bench = Bench::new(Limits::default());
    let arena = Arena::new(Region::anonymous(PAGE).unwrap());
    let read = |bytes| bench.driver.read_into(Class::Foreground, FILE, 0, arena.try_take(bytes).unwrap());
    let mut full = read(PAGE);
    assert!(bench.poll(&mut full).is_pending());
    bench.end(PAGE as i32);
    let Poll::Ready(Ok(buf)) = bench.poll(&mut full) else { panic!("it has ended") };
    assert_eq!((buf.len(), arena.usage().used), (PAGE, PAGE));
    drop(buf);
    // The read is given up: its memory is not handed out before the device is done with it.
    drop(read(PAGE));
    assert!(arena.try_take(1).is_none(), "memory that a device may write was handed out");
    bench.end(PAGE as i32);
    assert_eq!(arena.usage().used, 0);
    let mut failed = read(PAGE);
    bench.end(-EIO);
    assert!(matches!(bench.poll(&mut failed), Poll::Ready(Err(_))));
    assert_eq!(arena.usage().used, 0);
}
