//! The simulated disk keeps and loses exactly what a disk may.

use kvarts_contract::io_error::Name;
use kvarts_store::io::EntryKind;
use proptest::prelude::*;

use super::super::crash::Crash;
use super::super::faults::Which;
use super::super::media::PAGE;
use super::super::media::errno::{EAGAIN, EEXIST, EINTR, EISDIR, ENOENT, ENOSPC, ENOTDIR, ENOTEMPTY, EXDEV};
use super::*;

/// One program that does one thing after the other.
struct Bench {
    disk: SimDisk,
    io: SimIo,
    tokens: u64,
}

const ROOT: DirId = DirId(0);
const BUFFERED: OpenMode = OpenMode { write: true, create: true, direct: false };
const DIRECT: OpenMode = OpenMode { write: true, create: true, direct: true };

fn name(path: &str) -> Name {
    Name { dir: ROOT, path: path.into() }
}

fn buf(len: usize) -> SharedBuf {
    SharedBuf::new(&Region::anonymous(len).unwrap(), 0, len).unwrap()
}

fn holding(bytes: &[u8]) -> SharedBuf {
    let buf = buf(bytes.len());
    buf.copy_in(0, bytes);
    buf
}

impl Bench {
    fn new(seed: u64) -> Self {
        Self::with(seed, &DiskConfig::default())
    }

    fn with(seed: u64, config: &DiskConfig) -> Self {
        let disk = SimDisk::new(config, SimClock::new(0), Seed(seed));
        Self { io: disk.io(), disk, tokens: 0 }
    }

    fn on(media: Media) -> Self {
        let disk = SimDisk::with_media(media, Latency::default(), SimClock::new(0), Seed(0));
        Self { io: disk.io(), disk, tokens: 0 }
    }

    fn submit(&mut self, op: Op) -> Token {
        self.tokens += 1;
        self.io.submit(Token(self.tokens), op);
        Token(self.tokens)
    }

    /// Everything that completes until nothing is under way, in that order.
    fn drain(&mut self) -> Vec<Completion> {
        let mut done = Vec::new();
        while self.disk.next_completion().is_some() {
            self.io.park(None);
            self.io.reap(&mut done);
        }
        done
    }

    fn run(&mut self, op: Op) -> Completion {
        self.submit(op);
        let mut done = self.drain();
        assert_eq!(done.len(), 1);
        done.pop().unwrap()
    }

    fn meta(&mut self, op: MetaOp) -> i32 {
        self.run(Op::Meta(op)).result
    }

    fn open(&mut self, path: &str, mode: OpenMode) -> FileId {
        let done = self.run(Op::Meta(MetaOp::Open { name: name(path), mode }));
        match done.reply {
            Some(Reply::Opened(file)) if done.result == 0 => file,
            _ => panic!("{done:?}"),
        }
    }

    /// A file whose name is durable.
    fn durable_file(&mut self, path: &str) -> FileId {
        let file = self.open(path, BUFFERED);
        assert_eq!(self.sync_dir(), 0);
        file
    }

    fn sync_dir(&mut self) -> i32 {
        self.meta(MetaOp::SyncDir { name: name("") })
    }

    fn write(&mut self, file: FileId, offset: u64, bytes: &[u8]) -> i32 {
        self.run(Op::Write { file, offset, from: holding(bytes), sync: false }).result
    }

    fn write_sync(&mut self, file: FileId, offset: u64, bytes: &[u8]) -> i32 {
        self.run(Op::Write { file, offset, from: holding(bytes), sync: true }).result
    }

    fn flush(&mut self, file: FileId) -> i32 {
        self.run(Op::Flush { file }).result
    }

    fn read(&mut self, file: FileId, offset: u64, len: usize) -> (i32, Vec<u8>) {
        let into = buf(len);
        let result = self.run(Op::Read { file, offset, into: into.clone() }).result;
        (result, into.to_vec())
    }

    fn inject(&self, which: Which, when: When, effect: Effect) {
        self.disk.inject(Rule::new(which, when, effect));
    }
}

const WRITES: Which = Which::Kind(OpKind::Write);
const READS: Which = Which::Kind(OpKind::Read);
const FLUSHES: Which = Which::Kind(OpKind::Flush);

/// Every way to cut the power now, with what is on the disk afterwards.
fn images(disk: &SimDisk) -> Vec<Media> {
    let state = disk.crash_state();
    state.enumerate(50, Seed(1)).into_iter().map(|crash| state.image(crash)).collect()
}

fn contents(media: &Media, path: &str) -> Option<Vec<u8>> {
    media.contents(ROOT, path)
}

#[test]
fn what_was_written_is_read_back_and_a_read_stops_at_the_end() {
    let mut bench = Bench::new(1);
    let file = bench.open("f", BUFFERED);
    assert_eq!(bench.write(file, 700, b"abcdef"), 6);
    assert_eq!(bench.read(file, 698, 100), (8, [&[0, 0][..], b"abcdef", &[0; 92]].concat()));
    assert_eq!(bench.read(file, 706, 10).0, 0);
    let from = Box::new([holding(b"12"), holding(b"345")]);
    assert_eq!(bench.run(Op::WriteV { file, offset: 1, from, sync: false }).result, 5);
    assert_eq!(bench.read(file, 0, 7).1, b"\x0012345\0");
}

#[test]
fn what_was_flushed_survives_every_power_cut() {
    let mut bench = Bench::new(2);
    let file = bench.durable_file("f");
    let bytes: Vec<u8> = (0..5000_u32).map(|n| n.to_le_bytes()[0]).collect();
    bench.write(file, 0, &bytes);
    assert_eq!(bench.flush(file), 0);
    // Later writes elsewhere, and a file of no name, change nothing about it.
    bench.write(file, 8192, &[7; 1024]);
    bench.open("g", BUFFERED);
    let images = images(&bench.disk);
    assert!(images.len() >= 4);
    for image in images {
        assert_eq!(contents(&image, "f").unwrap()[..5000], bytes);
    }
}

#[test]
fn a_synced_write_survives_alone_and_older_ones_do_not_come_back_over_it() {
    let mut bench = Bench::new(3);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 2048]);
    bench.write_sync(file, 512, &[2; 512]);
    let mut seen = std::collections::BTreeSet::new();
    for image in images(&bench.disk) {
        let bytes = contents(&image, "f").unwrap();
        assert_eq!(bytes[512..1024], [2; 512]);
        seen.insert(bytes.iter().step_by(512).copied().collect::<Vec<_>>());
    }
    // The older write's other sectors are still undecided.
    assert!(
        seen.contains(&vec![0, 2]) && seen.contains(&vec![1, 2, 1, 1]) && seen.contains(&vec![1, 2]),
        "{seen:?}"
    );
}

#[test]
fn a_synced_write_takes_the_shape_of_its_file_with_it() {
    let mut bench = Bench::new(4);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 1024]);
    assert_eq!(bench.meta(MetaOp::Truncate { file, len: 100 }), 0);
    bench.write_sync(file, 4096, &[2; 512]);
    assert_eq!(bench.flush(file), 0);
    for image in images(&bench.disk) {
        let bytes = contents(&image, "f").unwrap();
        assert_eq!((bytes.len(), &bytes[..100], &bytes[100..4096]), (4608, &[1; 100][..], &[0; 3996][..]));
    }
}

#[test]
fn a_synced_write_that_ends_within_an_older_one_s_last_sector_keeps_the_longer_end() {
    let mut bench = Bench::new(4);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 300]);
    bench.write_sync(file, 0, &[2; 100]);
    for image in images(&bench.disk) {
        assert_eq!(contents(&image, "f").unwrap(), [[2; 100], [1; 100], [1; 100]].concat());
    }
}

#[test]
fn an_unflushed_write_may_be_torn_at_any_sector_and_never_within_one() {
    let mut bench = Bench::new(5);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 2048]);
    bench.flush(file);
    bench.write(file, 0, &[2; 2048]);
    let state = bench.disk.crash_state();
    assert_eq!(state.changes(), 1);
    let mut seen = std::collections::BTreeSet::new();
    let random = (0..300).map(Crash::Random);
    for crash in state.enumerate(0, Seed(0)).into_iter().chain(random) {
        let bytes = contents(&state.image(crash), "f").unwrap();
        let sectors: Vec<u8> = bytes.chunks(512).map(|sector| sector[0]).collect();
        assert!(bytes.chunks(512).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
        seen.insert(sectors);
    }
    assert_eq!(seen.len(), 16, "every subset of four sectors");
}

#[test]
fn a_short_last_sector_ends_where_the_write_ended() {
    let mut bench = Bench::new(6);
    let file = bench.durable_file("f");
    bench.write(file, 100, &[3; 1000]);
    let state = bench.disk.crash_state();
    let lens: std::collections::BTreeSet<_> =
        (0..100).map(|seed| contents(&state.image(Crash::Random(seed)), "f").unwrap().len()).collect();
    assert_eq!(lens.into_iter().collect::<Vec<_>>(), [0, 512, 1024, 1100]);
}

#[test]
fn names_are_durable_after_their_directory_was_synced_and_not_before() {
    let mut bench = Bench::new(7);
    let file = bench.open("a", BUFFERED);
    bench.write(file, 0, b"first");
    bench.flush(file);
    let state = bench.disk.crash_state();
    assert_eq!(contents(&state.image(Crash::LoseAll), "a"), None);
    assert_eq!(contents(&state.image(Crash::KeepAll), "a").unwrap(), b"first");
    bench.sync_dir();
    let state = bench.disk.crash_state();
    assert_eq!(
        (state.changes(), contents(&state.image(Crash::LoseAll), "a").unwrap()),
        (0, b"first".to_vec())
    );

    assert_eq!(bench.meta(MetaOp::Rename { from: name("a"), to: name("b") }), 0);
    let state = bench.disk.crash_state();
    let (lost, kept) = (state.image(Crash::LoseAll), state.image(Crash::KeepAll));
    assert_eq!((lost.paths(), kept.paths()), (vec!["0/a".to_owned()], vec!["0/b".to_owned()]));
    assert_eq!(contents(&kept, "b").unwrap(), b"first");

    bench.sync_dir();
    assert_eq!(bench.meta(MetaOp::Remove { name: name("b") }), 0);
    let state = bench.disk.crash_state();
    assert_eq!(state.image(Crash::LoseAll).paths(), ["0/b"]);
    assert!(state.image(Crash::KeepAll).paths().is_empty());
}

#[test]
fn a_lost_directory_takes_everything_in_it_along() {
    let mut bench = Bench::new(8);
    bench.meta(MetaOp::MakeDir { name: name("d") });
    bench.open("d/f", BUFFERED);
    bench.meta(MetaOp::SyncDir { name: name("d") });
    let state = bench.disk.crash_state();
    assert!(state.image(Crash::LoseAll).paths().is_empty());
    bench.sync_dir();
    assert_eq!(bench.disk.crash_state().image(Crash::LoseAll).paths(), ["0/d/f"]);
}

#[test]
fn a_sync_of_a_directory_covers_only_names_changed_before_it_was_submitted() {
    let mut bench = Bench::new(9);
    // The sync takes for ever, the open next to no time.
    bench.inject(Which::Kind(OpKind::SyncDir), When::Nth(1), Effect::Delay(Duration::from_secs(1)));
    bench.submit(Op::Meta(MetaOp::SyncDir { name: name("") }));
    bench.submit(Op::Meta(MetaOp::Open { name: name("f"), mode: BUFFERED }));
    assert_eq!(bench.drain().len(), 2);
    assert!(bench.disk.crash_state().image(Crash::LoseAll).paths().is_empty());
}

#[test]
fn a_flush_covers_only_writes_that_completed_before_it_was_submitted() {
    let mut bench = Bench::new(10);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 512]);
    bench.inject(FLUSHES, When::Nth(1), Effect::Delay(Duration::from_secs(1)));
    let (from, sync) = (holding(&[2; 512]), false);
    bench.submit(Op::Write { file, offset: 512, from: from.clone(), sync });
    let flush = bench.submit(Op::Flush { file });
    let write = bench.submit(Op::Write { file, offset: 1024, from, sync });
    let done = bench.drain();
    assert!(done.iter().all(|done| done.result >= 0));
    assert_eq!(done.last().unwrap().token, flush);
    assert!(done.iter().any(|done| done.token == write));
    let state = bench.disk.crash_state();
    assert_eq!(state.changes(), 2);
    assert_eq!(contents(&state.image(Crash::LoseAll), "f").unwrap(), [1; 512]);
}

#[test]
fn what_is_under_way_at_a_power_cut_may_be_there_afterwards() {
    let mut bench = Bench::new(11);
    let file = bench.durable_file("f");
    bench.submit(Op::Write { file, offset: 0, from: holding(&[1; 1024]), sync: true });
    bench.submit(Op::Meta(MetaOp::Open { name: name("g"), mode: BUFFERED }));
    let state = bench.disk.crash_state();
    assert_eq!(state.changes(), 2);
    assert_eq!(contents(&state.image(Crash::LoseAll), "f").unwrap(), [0u8; 0]);
    assert_eq!(contents(&state.image(Crash::KeepAll), "f").unwrap(), [1; 1024]);
    assert_eq!(state.image(Crash::KeepAll).paths(), ["0/f", "0/g"]);
    let torn = state.image(Crash::Torn { change: 0, cut: 1, tail: false });
    assert_eq!(contents(&torn, "f").unwrap(), [1; 512]);
    // Looking changed nothing.
    assert_eq!(contents(&bench.disk.media(), "f").unwrap(), [0u8; 0]);
}

#[test]
fn a_killed_process_loses_nothing_that_completed_and_a_later_power_cut_still_may() {
    let mut bench = Bench::new(12);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 512]);
    let killed = bench.disk.after_kill();
    assert_eq!(contents(&killed, "f").unwrap(), [1; 512]);
    let mut again = Bench::on(killed);
    let file = again.open("f", BUFFERED);
    assert_eq!(again.read(file, 0, 512), (512, vec![1; 512]));
    let state = again.disk.crash_state();
    assert_eq!(contents(&state.image(Crash::LoseAll), "f").unwrap(), [0u8; 0]);
    // Unless the next process flushes it.
    assert_eq!(again.flush(file), 0);
    assert_eq!(contents(&again.disk.crash_state().image(Crash::LoseAll), "f").unwrap(), [1; 512]);
}

#[test]
fn a_killed_process_has_nothing_open_so_that_removed_files_give_their_space_back() {
    let mut bench = Bench::new(12);
    let file = bench.open("f", BUFFERED);
    bench.write(file, 0, &[1; 8192]);
    bench.meta(MetaOp::Remove { name: name("f") });
    let (free, total) = bench.disk.media().space();
    assert_eq!(total - free, 8192);
    assert_eq!(bench.disk.after_kill().space(), (total, total));
}

#[test]
fn a_failed_flush_that_drops_its_changes_is_followed_by_one_that_succeeds_and_lies() {
    let mut bench = Bench::new(13);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 512]);
    bench.inject(FLUSHES, When::Nth(1), Effect::DropDirty);
    assert_eq!((bench.flush(file), bench.flush(file)), (-EIO, 0));
    assert_eq!(bench.read(file, 0, 512).1, [1; 512], "the cache still shows it");
    let state = bench.disk.crash_state();
    assert_eq!(state.changes(), 0);
    assert_eq!(contents(&state.image(Crash::KeepAll), "f").unwrap(), [0u8; 0], "the disk never got it");
}

#[test]
fn a_flush_refused_once_leaves_its_changes_to_the_next() {
    let mut bench = Bench::new(14);
    let file = bench.durable_file("f");
    bench.write(file, 0, &[1; 512]);
    bench.inject(FLUSHES, When::Nth(1), Effect::Errno(EIO));
    assert_eq!(bench.flush(file), -EIO);
    assert_eq!(contents(&bench.disk.crash_state().image(Crash::LoseAll), "f").unwrap(), [0u8; 0]);
    assert_eq!(bench.flush(file), 0);
    assert_eq!(contents(&bench.disk.crash_state().image(Crash::LoseAll), "f").unwrap(), [1; 512]);
}

#[test]
fn the_nth_operation_is_struck_once_or_from_then_on() {
    let mut bench = Bench::new(15);
    let file = bench.open("f", BUFFERED);
    bench.inject(WRITES, When::Nth(2), Effect::Errno(EINTR));
    bench.inject(WRITES, When::From(4), Effect::Errno(EAGAIN));
    let results: Vec<_> = (0..6).map(|_| bench.write(file, 0, b"x")).collect();
    assert_eq!(results, [1, -EINTR, 1, -EAGAIN, -EAGAIN, -EAGAIN]);
    assert_eq!(bench.disk.struck(), 4);
    bench.disk.heal();
    assert_eq!(bench.write(file, 0, b"x"), 1);
}

#[test]
fn a_rule_for_one_device_leaves_the_others_alone() {
    let mut bench = Bench::with(16, &DiskConfig { dirs: 2, ..DiskConfig::default() });
    bench.disk.inject(Rule::new(Which::Any, When::From(1), Effect::Errno(EIO)).on(DirId(1)));
    assert_eq!(bench.sync_dir(), 0);
    assert_eq!(bench.meta(MetaOp::SyncDir { name: Name { dir: DirId(1), path: "".into() } }), -EIO);
}

#[test]
fn short_reads_and_writes_move_fewer_bytes_and_say_so() {
    let mut bench = Bench::new(17);
    let file = bench.open("f", BUFFERED);
    bench.inject(WRITES, When::Nth(1), Effect::Short);
    let wrote = bench.write(file, 0, &[9; 4096]);
    assert!(wrote > 0 && wrote < 4096 && wrote % 512 == 0, "{wrote}");
    assert_eq!(contents(&bench.disk.media(), "f").unwrap().len(), wrote as usize);
    bench.write(file, 0, &[9; 4096]);
    bench.inject(READS, When::Nth(1), Effect::Short);
    let (read, bytes) = bench.read(file, 0, 4096);
    assert!(read > 0 && read < 4096);
    assert!(bytes[read as usize..].iter().all(|byte| *byte == 0));
    bench.disk.heal();
    bench.inject(READS, When::Nth(1), Effect::Zero);
    assert_eq!(bench.read(file, 0, 4096), (0, vec![0; 4096]));
}

#[test]
fn a_lost_write_is_acknowledged_and_the_old_bytes_stay() {
    let mut bench = Bench::new(18);
    let file = bench.open("f", BUFFERED);
    bench.write(file, 0, &[1; 512]);
    bench.inject(WRITES, When::Nth(1), Effect::Lost);
    assert_eq!(bench.write_sync(file, 0, &[2; 512]), 512);
    assert_eq!(bench.read(file, 0, 512).1, [1; 512]);
}

#[test]
fn a_misdirected_write_is_acknowledged_and_lands_elsewhere() {
    for seed in 0..20 {
        let mut bench = Bench::new(seed);
        let (f, g) = (bench.open("f", BUFFERED), bench.open("g", BUFFERED));
        bench.write(f, 0, &[1; 8192]);
        bench.write(g, 0, &[1; 8192]);
        bench.inject(WRITES, When::Nth(1), Effect::Misdirect);
        assert_eq!(bench.write(f, 4096, &[2; 512]), 512);
        let media = bench.disk.media();
        let (f, g) = (contents(&media, "f").unwrap(), contents(&media, "g").unwrap());
        assert_eq!(f[4096..4608], [1; 512]);
        assert_eq!(f.iter().chain(&g).filter(|byte| **byte == 2).count(), 512);
    }
}

#[test]
fn a_flipped_bit_is_exactly_one_in_a_read_or_for_good_in_a_write() {
    let mut bench = Bench::new(19);
    let file = bench.open("f", BUFFERED);
    let ones = |bytes: &[u8]| bytes.iter().map(|byte| byte.count_ones()).sum::<u32>();
    bench.write(file, 0, &[0; 4096]);
    bench.inject(READS, When::Nth(1), Effect::FlipBit);
    assert_eq!(ones(&bench.read(file, 0, 4096).1), 1);
    assert_eq!(ones(&bench.read(file, 0, 4096).1), 0);
    bench.inject(WRITES, When::Nth(1), Effect::FlipBit);
    bench.write(file, 0, &[0; 4096]);
    assert_eq!(ones(&bench.read(file, 0, 4096).1), 1);
}

#[test]
fn a_torn_write_fails_and_leaves_some_of_its_sectors() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let mut bench = Bench::new(seed);
        let file = bench.open("f", BUFFERED);
        bench.write(file, 0, &[1; 1024]);
        bench.inject(WRITES, When::Nth(1), Effect::Torn(EIO));
        assert_eq!(bench.write(file, 0, &[2; 1024]), -EIO);
        let bytes = bench.read(file, 0, 1024).1;
        seen.insert((bytes[0], bytes[512]));
    }
    assert_eq!(seen.len(), 4);
}

#[test]
fn a_stuck_operation_never_completes_and_keeps_its_memory() {
    let mut bench = Bench::new(20);
    let file = bench.open("f", BUFFERED);
    bench.inject(READS, When::Nth(1), Effect::Stuck);
    let into = buf(4096);
    let region = Arc::downgrade(into.region());
    bench.submit(Op::Read { file, offset: 0, into });
    assert!(bench.drain().is_empty());
    assert_eq!(bench.disk.under_way(), 1);
    assert!(region.upgrade().is_some());
    assert_eq!(bench.write(file, 0, b"others go on"), 12);
    bench.io.park(Some(Duration::from_secs(9)));
    assert_eq!(bench.disk.lock().clock.now().since(Nanos(0)).as_secs(), 9);
}

#[test]
fn a_completion_can_come_twice_when_asked_to() {
    let mut bench = Bench::new(21);
    bench.inject(Which::Any, When::Nth(1), Effect::Twice);
    let token = bench.submit(Op::Meta(MetaOp::List { name: name("") }));
    let done = bench.drain();
    assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [token, token]);
}

#[test]
fn completions_come_out_of_order_and_by_latency() {
    let mut bench = Bench::new(22);
    let file = bench.open("f", BUFFERED);
    let submitted: Vec<_> =
        (0..50).map(|_| bench.submit(Op::Read { file, offset: 0, into: buf(512) })).collect();
    let completed: Vec<_> = bench.drain().iter().map(|done| done.token).collect();
    assert_ne!(submitted, completed);
    let mut sorted = completed.clone();
    sorted.sort();
    assert_eq!(submitted, sorted);
}

#[test]
fn a_full_disk_takes_nothing_new_and_lets_old_pages_be_overwritten() {
    let mut bench = Bench::with(23, &DiskConfig { capacity: 4 * PAGE, ..DiskConfig::default() });
    let file = bench.open("f", BUFFERED);
    let page = PAGE as usize;
    assert_eq!(bench.meta(MetaOp::Allocate { file, offset: 0, len: 2 * PAGE }), 0);
    assert_eq!(bench.write(file, 2 * PAGE, &vec![1; page]), page as i32);
    assert_eq!(bench.write(file, 3 * PAGE, &vec![1; 2 * page]), -ENOSPC);
    assert_eq!(bench.meta(MetaOp::Allocate { file, offset: 0, len: 5 * PAGE }), -ENOSPC);
    assert_eq!(bench.meta(MetaOp::Allocate { file, offset: 0, len: 1 << 50 }), -ENOSPC);
    assert_eq!(bench.write(file, 0, &vec![1; 3 * page]), 3 * page as i32);
    let space = bench.run(Op::Meta(MetaOp::Space { dir: ROOT })).reply;
    assert_eq!(space, Some(Reply::Space { free: PAGE, total: 4 * PAGE, device: 0 }));
    // Holes give space back, and read as zeros.
    assert_eq!(bench.meta(MetaOp::PunchHole { file, offset: 100, len: 2 * PAGE }), 0);
    let (_, bytes) = bench.read(file, 0, 3 * page);
    assert_eq!(bytes.iter().position(|byte| *byte == 0), Some(100));
    assert_eq!(bytes.iter().filter(|byte| **byte == 0).count(), 2 * page);
    let stat = bench.run(Op::Meta(MetaOp::Stat { file })).reply;
    assert_eq!(stat, Some(Reply::Stat { len: 3 * PAGE, allocated: 2 * PAGE }));
    assert_eq!(bench.meta(MetaOp::PunchHole { file, offset: 0, len: i64::MAX as u64 }), 0);
    // A removed file keeps its space for as long as it is open.
    bench.write(file, 0, &vec![1; 4 * page]);
    let free = |bench: &Bench| bench.disk.media().space().0;
    bench.meta(MetaOp::Remove { name: name("f") });
    assert_eq!(free(&bench), 0);
    bench.meta(MetaOp::Close { file });
    assert_eq!(free(&bench), 4 * PAGE);
}

#[test]
fn space_runs_out_at_the_nth_allocation_only() {
    let mut bench = Bench::new(24);
    let file = bench.open("f", BUFFERED);
    bench.inject(Which::Allocating, When::Nth(2), Effect::Errno(ENOSPC));
    let results = [0, 0, 1, 1, 2].map(|page| bench.write(file, page * PAGE, b"x"));
    assert_eq!(results, [1, 1, -ENOSPC, 1, 1]);
}

#[test]
fn direct_io_that_is_not_aligned_is_refused() {
    let mut bench = Bench::new(25);
    let file = bench.open("f", DIRECT);
    let page = PAGE as usize;
    assert_eq!(bench.write(file, 0, &vec![1; page]), page as i32);
    assert_eq!(bench.write(file, 512, &vec![1; page]), -EINVAL);
    assert_eq!(bench.write(file, 0, &[1; 512]), -EINVAL);
    let region = Region::anonymous(2 * page).unwrap();
    let into = SharedBuf::new(&region, 512, page).unwrap();
    assert_eq!(bench.run(Op::Read { file, offset: 0, into }).result, -EINVAL);
}

#[test]
fn names_behave_as_a_file_system_s() {
    let mut bench = Bench::new(26);
    let open = |name, create| MetaOp::Open { name, mode: OpenMode { create, ..BUFFERED } };
    assert_eq!(bench.meta(open(name("no"), false)), -ENOENT);
    assert_eq!(bench.meta(MetaOp::MakeDir { name: name("d") }), 0);
    assert_eq!(bench.meta(MetaOp::MakeDir { name: name("d") }), -EEXIST);
    assert_eq!(bench.meta(open(name("d"), true)), -EISDIR);
    assert_eq!(bench.meta(open(name("d/x/y"), true)), -ENOENT);
    let file = bench.open("d/x", BUFFERED);
    assert_eq!(bench.meta(open(name("d/x/y"), true)), -ENOTDIR);
    bench.open("y", BUFFERED);
    assert_eq!(bench.meta(MetaOp::Rename { from: name("y"), to: name("d/y") }), -EXDEV);
    assert_eq!(bench.meta(MetaOp::Rename { from: name("y"), to: name("d") }), -EISDIR);
    assert_eq!(bench.meta(MetaOp::Rename { from: name("no"), to: name("y") }), -ENOENT);
    bench.meta(MetaOp::MakeDir { name: name("e") });
    assert_eq!(bench.meta(MetaOp::Rename { from: name("e"), to: name("d") }), -ENOTEMPTY);
    assert_eq!(bench.meta(MetaOp::Remove { name: name("d") }), -EISDIR);
    let Some(Reply::Listing(entries)) = bench.run(Op::Meta(MetaOp::List { name: name("") })).reply else {
        panic!()
    };
    let entries: Vec<_> = entries.iter().map(|entry| (&*entry.name, entry.kind)).collect();
    assert_eq!(entries, [("d", EntryKind::Dir), ("e", EntryKind::Dir), ("y", EntryKind::File)]);
    // A removed file can be used until it is closed, and not after.
    assert_eq!(bench.meta(MetaOp::Remove { name: name("d/x") }), 0);
    assert_eq!(bench.write(file, 0, b"x"), 1);
    assert_eq!(bench.meta(MetaOp::Close { file }), 0);
    assert_eq!(bench.write(file, 0, b"x"), -EBADF);
    let reader = OpenMode { write: false, create: false, direct: false };
    let file = bench.open("y", reader);
    assert_eq!(bench.write(file, 0, b"x"), -EBADF);
    assert_eq!(bench.read(file, 0, 1).0, 0);
}

#[test]
fn two_programs_share_one_disk_and_their_completions_stay_apart() {
    let mut bench = Bench::new(27);
    let file = bench.open("f", BUFFERED);
    let mut other = bench.disk.io();
    other.submit(Token(1), Op::Meta(MetaOp::Open { name: name("f"), mode: BUFFERED }));
    bench.submit(Op::Write { file, offset: 0, from: holding(b"shared"), sync: false });
    assert_eq!(bench.drain().len(), 1);
    let mut done = Vec::new();
    other.reap(&mut done);
    let Some(Reply::Opened(file)) = done.pop().unwrap().reply else { panic!() };
    let into = buf(6);
    other.submit(Token(2), Op::Read { file, offset: 0, into: into.clone() });
    other.park(None);
    assert_eq!(into.to_vec(), b"shared");
}

#[test]
fn a_clone_of_the_media_shares_pages_and_is_independent() {
    let mut bench = Bench::new(28);
    let file = bench.durable_file("f");
    bench.write(file, 0, &vec![1; 1 << 20]);
    let before = bench.disk.media();
    bench.write(file, 0, &[2; 512]);
    assert_eq!(contents(&before, "f").unwrap()[..512], [1; 512]);
    let digest = before.digest();
    assert_eq!(digest, before.clone().digest());
    assert_ne!(digest, bench.disk.media().digest());
}

#[test]
fn corruption_is_durable_and_only_where_it_was_planted() {
    let mut media = Media::new(1, 1 << 20);
    assert!(media.plant(ROOT, "f", &[5; 3000]));
    assert!(media.corrupt(ROOT, "f", 1000, |bytes| bytes[0] ^= 1, 1));
    assert!(!media.corrupt(ROOT, "f", 3000, |_| (), 1));
    assert!(!media.corrupt(ROOT, "g", 0, |_| (), 1));
    let image = Bench::on(media).disk.crash_state().image(Crash::LoseAll);
    let bytes = contents(&image, "f").unwrap();
    assert_eq!((bytes[1000], bytes.iter().filter(|byte| **byte != 5).count()), (4, 1));
}

/// A little workload: what it did is in the log.
fn workload(seed: u64) -> (u128, u128) {
    let mut bench = Bench::new(seed);
    bench.inject(WRITES, When::Odds(100_000), Effect::Short);
    bench.inject(READS, When::Odds(100_000), Effect::FlipBit);
    bench.inject(Which::Any, When::Odds(50_000), Effect::Errno(EIO));
    let file = loop {
        if let Some(Reply::Opened(file)) =
            bench.run(Op::Meta(MetaOp::Open { name: name("f"), mode: BUFFERED })).reply
        {
            break file;
        }
    };
    for n in 0..200_u64 {
        match n % 5 {
            0..3 => bench.submit(Op::Write {
                file,
                offset: n * 300,
                from: holding(&[n as u8; 900]),
                sync: n % 7 == 0,
            }),
            3 => bench.submit(Op::Read { file, offset: n * 200, into: buf(1000) }),
            _ => bench.submit(Op::Flush { file }),
        };
        if n % 16 == 0 {
            bench.drain();
        }
    }
    bench.drain();
    (bench.disk.log().digest(), bench.disk.media().digest())
}

#[test]
fn the_same_seed_gives_the_same_log_and_another_seed_another() {
    for seed in 0..5 {
        assert_eq!(workload(seed), workload(seed));
        assert_ne!(workload(seed).0, workload(seed + 100).0);
    }
}

#[test]
fn few_changes_are_enumerated_exhaustively_and_many_by_their_neighbours() {
    let mut bench = Bench::new(29);
    let file = bench.durable_file("f");
    for n in 0..10 {
        bench.write(file, n * 512, &[1; 512]);
    }
    let state = bench.disk.crash_state();
    let all = state.enumerate(9, Seed(0));
    assert_eq!(all.len(), 1024);
    let mut digests: Vec<_> = all.iter().map(|crash| state.image(*crash).digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 1024);
    bench.write(file, 10 * 512, &[1; 1024]);
    // Prefixes, drop-one, keep-one, random ones, and the two halves of the one write of two sectors.
    assert_eq!(bench.disk.crash_state().enumerate(9, Seed(0)).len(), 12 + 22 + 9 + 2);
}

proptest! {
    /// Against a plain vector: whatever is written, truncated and punched, reads find it; and after a flush every
    /// power cut does too.
    #[test]
    fn a_file_is_a_vector_of_bytes(
        script in prop::collection::vec((0_u8..6, 0_u64..20_000, 0_usize..6000, any::<u8>()), 1..25),
    ) {
        let mut bench = Bench::new(1);
        let file = bench.durable_file("f");
        let mut model: Vec<u8> = Vec::new();
        for (what, offset, len, byte) in script {
            let at = offset as usize;
            match what {
                0..=2 if len > 0 => {
                    let done = if what == 0 {
                        bench.write_sync(file, offset, &vec![byte; len])
                    } else {
                        bench.write(file, offset, &vec![byte; len])
                    };
                    prop_assert_eq!(done as usize, len);
                    model.resize(model.len().max(at + len), 0);
                    model[at..at + len].fill(byte);
                }
                3 => {
                    bench.meta(MetaOp::Truncate { file, len: offset });
                    model.resize(at, 0);
                }
                4 => {
                    bench.meta(MetaOp::PunchHole { file, offset, len: len as u64 });
                    let end = model.len().min(at + len);
                    model[at.min(end)..end].fill(0);
                }
                _ => {
                    bench.meta(MetaOp::Allocate { file, offset, len: len as u64 });
                    model.resize(model.len().max(at + len), 0);
                }
            }
            prop_assert_eq!(&contents(&bench.disk.media(), "f").unwrap(), &model);
        }
        prop_assert_eq!(contents(&bench.disk.crash_state().image(Crash::KeepAll), "f").unwrap(), model.clone());
        bench.flush(file);
        let state = bench.disk.crash_state();
        prop_assert_eq!(state.changes(), 0);
        prop_assert_eq!(contents(&state.image(Crash::LoseAll), "f").unwrap(), model);
    }

    /// Sector by sector, a power cut leaves a version that was written there since the last flush, or the last
    /// flushed one; never anything else, whatever was synced in between.
    #[test]
    fn after_a_cut_each_sector_holds_a_version_that_was_not_superseded(
        script in prop::collection::vec((0_u64..8, 1_usize..5, 0_u8..8), 1..20),
        seed in any::<u64>(),
    ) {
        let mut bench = Bench::new(1);
        let file = bench.durable_file("f");
        // The versions that each sector may hold.
        let mut may: Vec<Vec<u8>> = vec![vec![0]; 16];
        for (version, (sector, len, what)) in (1_u8..).zip(script) {
            let range = sector as usize..sector as usize + len;
            let bytes = vec![version; len * 512];
            match what {
                0 => {
                    prop_assert_eq!(bench.flush(file), 0);
                    may.iter_mut().for_each(|may| drop(may.drain(..may.len() - 1)));
                }
                1 | 2 => {
                    bench.write_sync(file, sector * 512, &bytes);
                    may[range].iter_mut().for_each(|may| *may = vec![version]);
                }
                _ => {
                    bench.write(file, sector * 512, &bytes);
                    may[range].iter_mut().for_each(|may| may.push(version));
                }
            }
        }
        let state = bench.disk.crash_state();
        for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Random(seed), Crash::Subset(seed)] {
            let mut bytes = contents(&state.image(crash), "f").unwrap();
            bytes.resize(16 * 512, 0);
            for (sector, may) in bytes.chunks(512).zip(&may) {
                prop_assert!(may.contains(&sector[0]), "{:?}: {} is none of {:?}", crash, sector[0], may);
                prop_assert!(sector.iter().all(|byte| *byte == sector[0]));
            }
        }
    }
}
