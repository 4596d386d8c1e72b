//! What every [`Io`] must do, as functions that panic where one does not.
//!
//! Each case works in a directory of its own below directory 0 and leaves what it made behind. The cases say
//! nothing about speed, and nothing that the simulated disk would have to break.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "these cases run only in tests, which may panic"
)]

use std::sync::Arc;
use std::time::Duration;

use super::{Completion, DirEntry, EntryKind, Io, MetaOp, Op, OpenMode, Reply, Token};
use kvarts_contract::buffers::buf::SharedBuf;
use kvarts_contract::buffers::region::{PAGE, Region};
use kvarts_contract::io_error::{DirId, FileId, Name};

const ENOENT: i32 = 2;
const EBADF: i32 = 9;
const EEXIST: i32 = 17;
const EINVAL: i32 = 22;

/// How often a case parks for one completion before it says that it never comes.
const PARKS_MAX: usize = 1000;

/// Opens a new way to the same disks; the things that the one before left on them are still there.
pub type Make<'a> = &'a mut dyn FnMut() -> Box<dyn Io>;

/// All cases, one after the other, each on an [`Io`] of its own.
pub fn all(make: Make<'_>) {
    for (number, (_, case)) in CASES.iter().enumerate() {
        let mut io = make();
        case(&mut Bench::new(&mut *io, &format!("case-{number}")));
    }
    dropped_with_operations_under_way(make);
}

/// One case: it panics where the [`Io`] does not do what it must.
pub type Case = fn(&mut Bench<'_>);

/// The cases that need one [`Io`] only, by name.
pub const CASES: [(&str, Case); 14] = [
    ("bytes written are bytes read", bytes_written_are_bytes_read),
    ("vectored transfers keep the order of their buffers", vectored_transfers_keep_order),
    ("a read past the end of a file returns fewer bytes", a_read_past_the_end_is_short),
    ("unaligned direct transfers fail and change nothing", unaligned_direct_transfers_fail),
    ("registered and unregistered memory give equal results", registered_memory_gives_equal_results),
    ("a region can be registered again", a_region_can_be_registered_again),
    ("a directory lists its names in order", a_directory_lists_its_names),
    (
        "a rename replaces an existing file, and a removed file cannot be found",
        renaming_replaces_and_removing_removes,
    ),
    ("a file has the length and the blocks that were set", a_file_has_the_length_it_was_given),
    ("names outside the directory are refused", names_outside_are_refused),
    ("a closed file cannot be used", a_closed_file_is_no_file),
    ("all operations complete, even if no queue can hold all of them", more_operations_than_any_queue),
    ("parking without work ends in time", parking_without_work_ends),
    ("a wake-up is not lost", an_unpark_is_not_lost),
];

/// One [`Io`] under test, and a directory for one case.
pub struct Bench<'a> {
    io: &'a mut dyn Io,
    dir: String,
    next: u64,
}

impl std::fmt::Debug for Bench<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl<'a> Bench<'a> {
    /// Makes the directory.
    pub fn new(io: &'a mut dyn Io, dir: &str) -> Self {
        let mut bench = Self { io, dir: dir.to_owned(), next: 0 };
        let name = bench.name("");
        let made = bench.run(Op::Meta(MetaOp::MakeDir { name })).result;
        assert!(made == 0 || made == -EEXIST, "the directory could not be created: {made}");
        bench
    }

    fn name(&self, path: &str) -> Name {
        let path = if path.is_empty() { self.dir.clone() } else { format!("{}/{path}", self.dir) };
        Name { dir: DirId(0), path: path.into() }
    }

    fn submit(&mut self, op: Op) -> Token {
        let token = Token(self.next);
        self.next += 1;
        self.io.submit(token, op);
        token
    }

    /// Waits for `count` completions and gives them in the order of their tokens.
    fn wait(&mut self, count: usize) -> Vec<Completion> {
        let mut completions = Vec::new();
        // Only a park that nothing ends counts: a busy machine may give thousands of completions one by one.
        let mut fruitless = 0;
        while fruitless < PARKS_MAX {
            let before = completions.len();
            self.io.reap(&mut completions);
            if completions.len() >= count {
                break;
            }
            fruitless = if completions.len() == before { fruitless + 1 } else { 0 };
            self.io.park(Some(Duration::from_millis(100)));
        }
        assert_eq!(completions.len(), count, "some operations never completed, or completed twice");
        completions.sort_by_key(|completion| completion.token);
        completions
    }

    fn run(&mut self, op: Op) -> Completion {
        let token = self.submit(op);
        let completion = self.wait(1).pop().unwrap();
        assert_eq!(completion.token, token);
        completion
    }

    fn meta(&mut self, op: MetaOp) -> i32 {
        self.run(Op::Meta(op)).result
    }

    fn reply(&mut self, op: MetaOp) -> Reply {
        let completion = self.run(Op::Meta(op));
        assert_eq!(completion.result, 0);
        completion.reply.expect("a reply")
    }

    fn open(&mut self, path: &str, direct: bool) -> FileId {
        let name = self.name(path);
        let mode = OpenMode { write: true, create: true, direct };
        match self.reply(MetaOp::Open { name, mode }) {
            Reply::Opened(file) => file,
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, file: FileId, offset: u64, from: &SharedBuf, sync: bool) -> i32 {
        self.run(Op::Write { file, offset, from: from.clone(), sync }).result
    }

    fn read(&mut self, file: FileId, offset: u64, into: &SharedBuf) -> i32 {
        self.run(Op::Read { file, offset, into: into.clone() }).result
    }

    fn stat(&mut self, file: FileId) -> (u64, u64) {
        match self.reply(MetaOp::Stat { file }) {
            Reply::Stat { len, allocated } => (len, allocated),
            other => panic!("{other:?}"),
        }
    }

    fn listing(&mut self, path: &str) -> Vec<DirEntry> {
        let name = self.name(path);
        match self.reply(MetaOp::List { name }) {
            Reply::Listing(entries) => entries,
            other => panic!("{other:?}"),
        }
    }

    /// Whether files are known to go past the page cache, once one was opened so.
    fn is_direct(&self) -> bool {
        self.io.facts().features.iter().any(|(name, outcome)| *name == "direct-io" && outcome.is_ok())
    }
}

fn memory(pages: usize) -> SharedBuf {
    SharedBuf::new(&Region::anonymous(pages * PAGE).unwrap(), 0, pages * PAGE).unwrap()
}

/// Bytes that differ from page to page and from seed to seed.
fn pattern(buf: &SharedBuf, seed: u8) {
    let bytes: Vec<u8> =
        (0..buf.len()).map(|at| (at as u8).wrapping_mul(31) ^ (at / PAGE) as u8 ^ seed).collect();
    buf.copy_in(0, &bytes);
}

fn bytes_written_are_bytes_read(bench: &mut Bench<'_>) {
    for direct in [false, true] {
        let file = bench.open(&format!("file-{direct}"), direct);
        for (pages, sync) in [(1, false), (1, true), (64, false), (64, true)] {
            let (out, back) = (memory(pages), memory(pages));
            pattern(&out, pages as u8 + u8::from(sync));
            let len = out.len() as i32;
            assert_eq!(bench.write(file, PAGE as u64, &out, sync), len);
            assert_eq!(bench.run(Op::Flush { file }).result, 0);
            assert_eq!(bench.read(file, PAGE as u64, &back), len);
            assert_eq!(back.to_vec(), out.to_vec(), "direct {direct}, {pages} pages");
        }
        let first = memory(1);
        first.fill(9);
        assert_eq!(bench.read(file, 0, &first), PAGE as i32);
        assert_eq!(first.to_vec(), vec![0; PAGE], "pages that were never written are zero");
    }
}

fn vectored_transfers_keep_order(bench: &mut Bench<'_>) {
    for (direct, sync) in [(false, false), (true, false), (true, true)] {
        let file = bench.open(&format!("file-{direct}-{sync}"), direct);
        let whole = memory(8);
        pattern(&whole, 3);
        let parts = |buf: &SharedBuf, order: &[(usize, usize)]| -> Box<[SharedBuf]> {
            order.iter().map(|&(at, pages)| buf.slice(at * PAGE, pages * PAGE).unwrap()).collect()
        };
        let from = parts(&whole, &[(5, 3), (0, 1), (1, 4)]);
        let expected: Vec<u8> = from.iter().flat_map(SharedBuf::to_vec).collect();
        assert_eq!(bench.run(Op::WriteV { file, offset: 0, from, sync }).result, 8 * PAGE as i32);
        let back = memory(8);
        assert_eq!(bench.read(file, 0, &back), 8 * PAGE as i32);
        assert_eq!(back.to_vec(), expected);
    }
}

fn a_read_past_the_end_is_short(bench: &mut Bench<'_>) {
    for direct in [false, true] {
        let file = bench.open(&format!("file-{direct}"), direct);
        let (out, back) = (memory(2), memory(4));
        pattern(&out, 1);
        bench.write(file, 0, &out, false);
        assert_eq!(bench.read(file, 0, &back), 2 * PAGE as i32);
        assert_eq!(bench.read(file, 2 * PAGE as u64, &back), 0);
        assert_eq!(bench.read(file, 1 << 40, &back), 0);
        assert_eq!(bench.meta(MetaOp::Truncate { file, len: PAGE as u64 + 100 }), 0);
        assert_eq!(bench.read(file, 0, &back), PAGE as i32 + 100);
        assert_eq!(back.to_vec()[..PAGE + 100], out.to_vec()[..PAGE + 100]);
    }
}

fn unaligned_direct_transfers_fail(bench: &mut Bench<'_>) {
    let file = bench.open("file", true);
    let out = memory(2);
    pattern(&out, 1);
    assert_eq!(bench.write(file, 0, &out, false), 2 * PAGE as i32);
    if !bench.is_direct() {
        return;
    }
    let zeros = memory(2);
    let odd = [(0, 100, 300), (4, 0, PAGE), (7, 0, 8)];
    for (offset, at, len) in odd {
        let part = zeros.slice(at, len).unwrap();
        // A file system that can do it does it right; one that cannot says so.
        let result = bench.write(file, offset, &part, false);
        assert!(result == -EINVAL || result == len as i32, "{result}");
        if result == -EINVAL {
            let back = memory(2);
            assert_eq!(bench.read(file, 0, &back), 2 * PAGE as i32);
            assert_eq!(back.to_vec(), out.to_vec());
            assert_eq!(bench.read(file, offset, &part), -EINVAL);
        }
    }
}

fn registered_memory_gives_equal_results(bench: &mut Bench<'_>) {
    let file = bench.open("file", true);
    let (out, back) = (memory(16), memory(16));
    pattern(&out, 5);
    let registered = bench.io.register(out.region()).and_then(|()| bench.io.register(back.region()));
    let claimed = bench.io.facts().features.iter().any(|(name, on)| *name == "fixed-buffers" && on.is_ok());
    if let Err(why) = &registered {
        assert!(!claimed || why.contains("limit"), "{why}");
        assert!(!why.is_empty() && !why.contains('\n'));
    }
    assert_eq!(bench.write(file, 0, &out, false), 16 * PAGE as i32);
    assert_eq!(bench.read(file, 0, &back), 16 * PAGE as i32);
    assert_eq!(back.to_vec(), out.to_vec());
    let halves = |buf: &SharedBuf| -> Box<[SharedBuf]> {
        [8, 0].iter().map(|&at| buf.slice(at * PAGE, 8 * PAGE).unwrap()).collect()
    };
    for sync in [false, true] {
        pattern(&out, 6 + u8::from(sync));
        let written = bench.run(Op::WriteV { file, offset: 0, from: halves(&out), sync }).result;
        assert_eq!(written, 16 * PAGE as i32);
        back.fill(0);
        assert_eq!(bench.read(file, 0, &back), 16 * PAGE as i32);
        assert_eq!(back.to_vec(), [&out.to_vec()[8 * PAGE..], &out.to_vec()[..8 * PAGE]].concat());
    }
    // Half registered, half not.
    let other = memory(8);
    let mixed: Box<[SharedBuf]> = [other.clone(), back.slice(0, 8 * PAGE).unwrap()].into();
    pattern(&other, 9);
    let expected: Vec<u8> = mixed.iter().flat_map(SharedBuf::to_vec).collect();
    let written = bench.run(Op::WriteV { file, offset: 0, from: mixed, sync: false }).result;
    assert_eq!(written, 16 * PAGE as i32);
    assert_eq!(bench.read(file, 0, &back), 16 * PAGE as i32);
    assert_eq!(back.to_vec(), expected);
    bench.io.unregister(out.region());
    bench.io.unregister(back.region());
    assert_eq!(bench.write(file, 0, &out, true), 16 * PAGE as i32);
    assert_eq!(bench.read(file, 0, &back), 16 * PAGE as i32);
    assert_eq!(back.to_vec(), out.to_vec());
}

fn a_region_can_be_registered_again(bench: &mut Bench<'_>) {
    let file = bench.open("file", true);
    let out = memory(4);
    pattern(&out, 8);
    bench.write(file, 0, &out, false);
    for _ in 0..5 {
        let back = memory(4);
        let region = Arc::clone(back.region());
        let first = bench.io.register(&region);
        assert_eq!(bench.io.register(&region), first);
        // Under way while the region is unregistered: it must end as it began.
        let token = bench.submit(Op::Read { file, offset: 0, into: back.clone() });
        bench.io.unregister(&region);
        let completion = bench.wait(1).pop().unwrap();
        assert_eq!((completion.token, completion.result), (token, 4 * PAGE as i32));
        assert_eq!(back.to_vec(), out.to_vec());
        bench.io.unregister(&region);
        drop(back);
        assert_eq!(Arc::strong_count(&region), 1, "the region is still in use");
    }
}

fn a_directory_lists_its_names(bench: &mut Bench<'_>) {
    assert_eq!(bench.listing(""), vec![]);
    for path in ["b", "a", "c"] {
        bench.open(path, false);
    }
    let name = bench.name("dir");
    assert_eq!(bench.meta(MetaOp::MakeDir { name: name.clone() }), 0);
    assert_eq!(bench.meta(MetaOp::MakeDir { name }), -EEXIST);
    bench.open("dir/below", false);
    let entry = |name: &str, kind| DirEntry { name: name.into(), kind };
    let file = |name| entry(name, EntryKind::File);
    assert_eq!(bench.listing(""), [file("a"), file("b"), file("c"), entry("dir", EntryKind::Dir)]);
    assert_eq!(bench.listing("dir"), [file("below")]);
    let name = bench.name("");
    assert_eq!(bench.meta(MetaOp::SyncDir { name }), 0);
    let name = bench.name("absent");
    assert_eq!(bench.meta(MetaOp::List { name }), -ENOENT);
}

fn renaming_replaces_and_removing_removes(bench: &mut Bench<'_>) {
    let (old, new) = (bench.open("old", false), bench.open("new", false));
    let bytes = memory(1);
    bytes.fill(1);
    bench.write(old, 0, &bytes, true);
    bytes.fill(2);
    bench.write(new, 0, &bytes, true);
    let (from, to) = (bench.name("old"), bench.name("new"));
    assert_eq!(bench.meta(MetaOp::Rename { from: from.clone(), to: to.clone() }), 0);
    assert_eq!(bench.meta(MetaOp::Rename { from: from.clone(), to: to.clone() }), -ENOENT);
    let again = bench.open("new", false);
    bench.read(again, 0, &bytes);
    assert_eq!(bytes.to_vec(), vec![1; PAGE]);
    // The file that was replaced is still there for those that have it open.
    bench.read(new, 0, &bytes);
    assert_eq!(bytes.to_vec(), vec![2; PAGE]);
    assert_eq!(bench.meta(MetaOp::Remove { name: to.clone() }), 0);
    assert_eq!(bench.meta(MetaOp::Remove { name: to.clone() }), -ENOENT);
    let mode = OpenMode { write: false, create: false, direct: false };
    assert_eq!(bench.meta(MetaOp::Open { name: to, mode }), -ENOENT);
    assert_eq!(bench.listing(""), vec![]);
}

fn a_file_has_the_length_it_was_given(bench: &mut Bench<'_>) {
    let file = bench.open("file", true);
    assert_eq!(bench.stat(file), (0, 0));
    let mib = 1 << 20;
    assert_eq!(bench.meta(MetaOp::Allocate { file, offset: 0, len: mib }), 0);
    let (len, allocated) = bench.stat(file);
    assert_eq!(len, mib);
    assert!(allocated >= mib, "{allocated}");
    let bytes = memory(256);
    bytes.fill(7);
    assert_eq!(bench.write(file, 0, &bytes, true), mib as i32);
    assert_eq!(bench.meta(MetaOp::PunchHole { file, offset: 0, len: mib / 2 }), 0);
    assert_eq!(bench.reply(MetaOp::Holes { file, upto: u64::MAX }), Reply::Holes(vec![(0, mib / 2)]));
    let tail = mib - 2 * PAGE as u64;
    assert_eq!(bench.meta(MetaOp::PunchHole { file, offset: tail, len: PAGE as u64 }), 0);
    let holes = vec![(0, mib / 2), (tail, PAGE as u64)];
    assert_eq!(
        bench.reply(MetaOp::Holes { file, upto: u64::MAX }),
        Reply::Holes(holes),
        "holes must be in the order of the file"
    );
    assert_eq!(bench.reply(MetaOp::Holes { file, upto: tail }), Reply::Holes(vec![(0, mib / 2)]));
    let page = memory(1);
    page.fill(7);
    assert_eq!(bench.write(file, tail, &page, true), PAGE as i32);
    assert_eq!(bench.reply(MetaOp::Holes { file, upto: u64::MAX }), Reply::Holes(vec![(0, mib / 2)]));
    let (len, after) = bench.stat(file);
    assert_eq!(len, mib);
    assert!(after <= allocated - mib / 2, "{after} of {allocated}");
    assert_eq!(bench.read(file, 0, &bytes), mib as i32);
    let half = bytes.len() / 2;
    assert_eq!(bytes.slice(0, half).unwrap().to_vec(), vec![0; half]);
    assert_eq!(bytes.slice(half, half).unwrap().to_vec(), vec![7; half]);
    assert_eq!(bench.meta(MetaOp::Truncate { file, len: 0 }), 0);
    assert_eq!(bench.stat(file).0, 0);
    match bench.reply(MetaOp::Space { dir: DirId(0) }) {
        Reply::Space { free, total, .. } => assert!(free <= total && total > 0),
        other => panic!("{other:?}"),
    }
}

fn names_outside_are_refused(bench: &mut Bench<'_>) {
    for path in ["../escape", "/escape", "a//b", ".", "a/.."] {
        let name = Name { dir: DirId(0), path: path.into() };
        let mode = OpenMode { write: true, create: true, direct: false };
        assert!(bench.meta(MetaOp::Open { name: name.clone(), mode }) < 0, "{path}");
        assert!(bench.meta(MetaOp::Remove { name: name.clone() }) < 0, "{path}");
        assert!(bench.meta(MetaOp::MakeDir { name }) < 0, "{path}");
    }
    let name = Name { dir: DirId(u16::MAX), path: "file".into() };
    assert!(bench.meta(MetaOp::List { name }) < 0);
}

fn a_closed_file_is_no_file(bench: &mut Bench<'_>) {
    let file = bench.open("file", false);
    assert_eq!(bench.meta(MetaOp::Close { file }), 0);
    assert_eq!(bench.meta(MetaOp::Close { file }), -EBADF);
    let other = bench.open("other", false);
    assert_ne!(file, other);
    let buf = memory(1);
    assert_eq!(bench.read(file, 0, &buf), -EBADF);
    assert_eq!(bench.write(file, 0, &buf, false), -EBADF);
    assert_eq!(bench.run(Op::Flush { file }).result, -EBADF);
    assert_eq!(bench.stat(other).0, 0);
}

fn more_operations_than_any_queue(bench: &mut Bench<'_>) {
    const OPS: usize = 6000;
    let file = bench.open("file", false);
    let out = memory(16);
    pattern(&out, 2);
    bench.write(file, 0, &out, false);
    let first = bench.next;
    let bufs: Vec<SharedBuf> = (0..OPS).map(|_| memory(1).slice(0, 64).unwrap()).collect();
    for (number, buf) in bufs.iter().enumerate() {
        bench.submit(Op::Read { file, offset: (number % 1000) as u64, into: buf.clone() });
    }
    let completions = bench.wait(OPS);
    let whole = out.to_vec();
    for ((number, buf), completion) in bufs.iter().enumerate().zip(completions) {
        assert_eq!((completion.token.0, completion.result), (first + number as u64, 64));
        assert_eq!(buf.to_vec(), whole[number % 1000..][..64]);
        assert_eq!(
            Arc::strong_count(buf.region()),
            1,
            "the memory of an operation that has ended is still held"
        );
    }
}

fn parking_without_work_ends(bench: &mut Bench<'_>) {
    for _ in 0..3 {
        bench.io.park(Some(Duration::from_millis(1)));
        bench.io.park(Some(Duration::ZERO));
    }
    let mut completions = Vec::new();
    bench.io.reap(&mut completions);
    assert!(completions.is_empty());
}

fn an_unpark_is_not_lost(bench: &mut Bench<'_>) {
    let unparker = bench.io.unparker();
    // One that came before.
    unparker.unpark();
    bench.io.park(None);
    // One from another thread, perhaps before, perhaps during; each park would last for ever without it.
    for _ in 0..50 {
        std::thread::scope(|scope| {
            scope.spawn(|| unparker.unpark());
            bench.io.park(None);
        });
    }
    // Between reaps, with operations coming and going.
    let file = bench.open("file", false);
    for _ in 0..50 {
        unparker.unpark();
        assert_eq!(bench.read(file, 0, &memory(1)), 0);
        unparker.unpark();
        bench.io.park(None);
    }
}

fn dropped_with_operations_under_way(make: Make<'_>) {
    let out = memory(256);
    pattern(&out, 4);
    let mut io = make();
    let mut bench = Bench::new(&mut *io, "dropped");
    let file = bench.open("file", true);
    assert_eq!(bench.write(file, 0, &out, true), out.len() as i32);
    let into: Vec<SharedBuf> = (0..64).map(|_| memory(256)).collect();
    for buf in &into {
        bench.submit(Op::Read { file, offset: 0, into: buf.clone() });
        bench.submit(Op::Read { file, offset: 0, into: buf.slice(0, PAGE).unwrap() });
    }
    // Some have been handed over, some have not, some have ended.
    bench.io.reap(&mut Vec::new());
    bench.submit(Op::Read { file, offset: 0, into: out.clone() });
    drop(io);
    for buf in into.iter().chain([&out]) {
        assert_eq!(Arc::strong_count(buf.region()), 1, "memory is still held, or was leaked");
    }
    // The next one finds everything as it was.
    let mut io = make();
    let mut bench = Bench::new(&mut *io, "dropped");
    let file = bench.open("file", true);
    let back = memory(256);
    assert_eq!(bench.read(file, 0, &back), back.len() as i32);
    let expected = memory(256);
    pattern(&expected, 4);
    assert_eq!(back.to_vec(), expected.to_vec());
}
