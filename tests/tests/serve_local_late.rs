//! A local connection that breaks while disks write: the client's memory is used again only when no disk writes to it any
//! more, however late a disk is.
//!
//! Between client and server stands a relay that passes on what they say and plays a slow disk: a ring that was told of the
//! client's pages writes into them when a pipe is filled, long after the connection has gone.
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::io::{IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::served::{ClientStage, Served};
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, KvStore, Placed, Presence, ReadEvent, ReadRequest, ReadStream,
};
use kvarts_contract::buffers::{Region, SharedBuf, shared};
use kvarts_contract::error::Reason;
use kvarts_layout::BlockKey;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_wire::local::frame::{Head, Kind};
use kvarts_wire::local::limits::MAGIC;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// What the one in between saw and has.
#[derive(Default)]
struct Seen {
    /// What was kept back, with both ends of its connection: the client's, the server's.
    reads: Mutex<Vec<Kept>>,
    look_ups: Mutex<Vec<Kept>>,
    /// That a client left is not told.
    lasts: AtomicBool,
    /// Look-ups are kept back, too.
    slow: AtomicBool,
    /// Files that clients shared.
    files: Mutex<Vec<OwnedFd>>,
    /// Questions whether memory is still written to.
    asked: AtomicU64,
}

/// A frame that was kept back.
struct Kept {
    client: UnixStream,
    server: UnixStream,
    bytes: Vec<u8>,
}

impl Kept {
    /// Passes it on after all.
    fn pass_on(&self) {
        (&self.server).write_all(&self.bytes).unwrap();
    }
}

/// Passes on everything but reads.
struct Between {
    seen: Arc<Seen>,
    path: PathBuf,
}

impl Between {
    fn start(served: &Served) -> Self {
        let path = served.scratch.path().join("between.sock");
        let (listener, seen) = (UnixListener::bind(&path).unwrap(), Arc::new(Seen::default()));
        let (server, all) = (served.daemon().socket().unwrap().to_owned(), Arc::clone(&seen));
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = UnixStream::connect(&server) else { continue };
                let (back, forth) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let seen = Arc::clone(&all);
                std::thread::spawn(move || pass(&client, &forth, Some(&seen)));
                std::thread::spawn(move || pass(&server, &back, None));
            }
        });
        Self { seen, path }
    }

    fn client(&self) -> Client {
        self.patient(TIMEOUT)
    }

    fn patient(&self, call_timeout: Duration) -> Client {
        let endpoint = format!("unix:{}", self.path.display());
        let options = ConnectOptions { via: Via::Local, call_timeout, ..ConnectOptions::to(endpoint) };
        Client::connect(&options).unwrap()
    }

    /// The next read.
    fn read(&self) -> Kept {
        until("a read comes", || !self.seen.reads.lock().unwrap().is_empty());
        self.seen.reads.lock().unwrap().remove(0)
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Passes on what `from` says, with descriptors. What clients say in frames begins with one each time.
fn pass(from: &UnixStream, to: &UnixStream, seen: Option<&Seen>) {
    let mut bytes = vec![0; 1 << 20];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let got = rustix::net::recvmsg(from, parts, &mut control, RecvFlags::CMSG_CLOEXEC);
        let count = got.map_or(0, |got| got.bytes);
        if count == 0 && seen.is_some_and(|seen| seen.lasts.load(Ordering::SeqCst)) {
            return;
        }
        if count == 0 {
            let _ = to.shutdown(std::net::Shutdown::Write);
            return;
        }
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                files.extend(some);
            }
        }
        let said = bytes.get(..count).unwrap_or_default();
        let frames = said.strip_prefix(&MAGIC[..]).unwrap_or(said);
        if let (Some(seen), Ok(Some(head))) = (seen, Head::parse(frames)) {
            match head.kind {
                Kind::Read | Kind::Exists if head.kind == Kind::Read || seen.slow.load(Ordering::SeqCst) => {
                    let (client, server) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let all = if head.kind == Kind::Read { &seen.reads } else { &seen.look_ups };
                    all.lock().unwrap().push(Kept { client, server, bytes: said.to_vec() });
                    continue;
                }
                Kind::Settled => drop(seen.asked.fetch_add(1, Ordering::SeqCst)),
                Kind::Share => {
                    let copy = |file: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(file, 0).unwrap();
                    seen.files.lock().unwrap().extend(files.iter().map(copy));
                }
                _ => {}
            }
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        let sent = rustix::net::sendmsg(to, &[IoSlice::new(said)], &mut control, SendFlags::NOSIGNAL);
        let Ok(sent) = sent else { return };
        let mut stream = to;
        if stream.write_all(&said[sent..]).is_err() {
            return;
        }
    }
}

/// A disk that writes a page when it is told to. It was told of the page long before.
struct SlowDisk {
    ring: io_uring::IoUring,
    pipe: (OwnedFd, OwnedFd),
    _region: Arc<Region>,
}

impl SlowDisk {
    fn begin(file: &OwnedFd, at: usize) -> Self {
        let bytes = rustix::fs::fstat(file).unwrap().st_size as u64;
        let region = shared::map(file, bytes, Box::new(())).unwrap();
        let mut ring = io_uring::IoUring::new(4).unwrap();
        let memory = libc_vec(&region);
        #[allow(unsafe_code, reason = "the ring has pages of a region that lives as long as it")]
        // SAFETY: the region goes with the ring.
        unsafe { ring.submitter().register_buffers(&memory) }.unwrap();
        let pipe = rustix::pipe::pipe().unwrap();
        let fd = io_uring::types::Fd(pipe.0.as_raw_fd());
        let to = region.base().wrapping_add(at);
        let entry = io_uring::opcode::ReadFixed::new(fd, to, 4096, 0).build();
        #[allow(unsafe_code, reason = "as above")]
        // SAFETY: as above.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit().unwrap();
        Self { ring, pipe, _region: region }
    }

    fn write(mut self) {
        assert_eq!(rustix::io::write(&self.pipe.1, &[9; 4096]).unwrap(), 4096);
        self.ring.submit_and_wait(1).unwrap();
        assert_eq!(self.ring.completion().next().unwrap().result(), 4096);
    }
}

fn libc_vec(region: &Region) -> [libc::iovec; 1] {
    [libc::iovec { iov_base: region.base().cast(), iov_len: region.len() }]
}

/// Blocks that the server has.
fn stored(stage: &ClientStage, name: &str) -> (Vec<BlockKey>, ReadRequest) {
    let desk = Desk::new(stage, name);
    let keys = desk.keys(0..4);
    assert_eq!(desk.outcomes(desk.request(pages(), &keys, 1)), vec![BlockOutcome::Stored; 4]);
    let request = desk.read_request(pages(), &keys);
    (keys, request)
}

/// A read of the blocks into the memory, which is never answered.
fn reading(
    (stage, client): (&ClientStage, &Client),
    name: &str,
    region: &Arc<Region>,
) -> (ReadStream, SharedBuf) {
    let (_, request) = stored(stage, name);
    client.register(&fixture::identity(name), &fixture::geometry()).unwrap();
    let shape = fixture::shape(pages().0, pages().1);
    let bytes = shape.block_bytes() as usize * 4;
    let memory = SharedBuf::new(region, 8192, bytes).unwrap();
    let into = Placed::blocks(&shape, memory.clone(), 4).unwrap();
    (client.read(ReadRequest { into, ..request }).unwrap(), memory)
}

fn expect_held(stream: &ReadStream) {
    match stream.next_blocking() {
        ReadEvent::End(end) => assert!(end.held_bytes > 0 && end.usable_blocks == 0, "{end:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_of_a_broken_connection_is_not_written_to_once_it_is_released() {
    let stage = ClientStage::open("late-pool");
    let between = Between::start(&stage.served);
    let client = between.client();
    let region = client.pool(1 << 20).unwrap();
    region.keep_pages(false);
    let kept = SharedBuf::new(&region, 0, 8192).unwrap();
    kept.fill(5);
    let (stream, memory) = reading((&stage, &client), "late", &region);
    let read = between.read();
    let disk = SlowDisk::begin(&between.seen.files.lock().unwrap()[0], 8192 + 4096);
    // The server is gone, as after a kill; its disk is not.
    read.client.shutdown(std::net::Shutdown::Both).unwrap();
    expect_held(&stream);
    assert_eq!(stream.next_blocking(), ReadEvent::Released);
    memory.fill(7);
    disk.write();
    assert!(memory.to_vec() == vec![7; memory.len()], "a late write is in memory that was given back");
    assert!(kept.to_vec() == vec![5; 8192], "what no read was about stays");
    assert_eq!(client.held_bytes(), 0);
}

#[test]
fn adopted_memory_is_held_until_the_server_says_that_nobody_writes() {
    expect_pages_stay("adopted", |client| client.adopt(shared::sealed(1 << 20).unwrap(), 1 << 20).unwrap());
}

/// A driver may know the pages: torch registers the memory that it is given and does not tell the client.
#[test]
fn a_pool_of_which_nothing_was_said_keeps_its_pages_when_the_connection_breaks() {
    expect_pages_stay("said-nothing", |client| client.pool(1 << 20).unwrap());
}

fn expect_pages_stay(name: &str, memory: impl FnOnce(&Client) -> Arc<Region>) {
    let stage = ClientStage::open(&format!("late-{name}"));
    let between = Between::start(&stage.served);
    let client = between.client();
    let region = memory(&client);
    let (stream, memory) = reading((&stage, &client), name, &region);
    let read = between.read();
    memory.fill(5);
    let disk = SlowDisk::begin(&between.seen.files.lock().unwrap()[0], 8192);
    // The server's session lasts.
    between.seen.lasts.store(true, Ordering::SeqCst);
    read.client.shutdown(std::net::Shutdown::Both).unwrap();
    expect_held(&stream);
    let asked = || between.seen.asked.load(Ordering::SeqCst);
    until("it is asked for more than once", || asked() > 2);
    assert_eq!((stream.try_next(), client.held_bytes()), (None, memory.len() as u64));
    disk.write();
    assert!(memory.to_vec()[..4096] == [9; 4096] && memory.to_vec()[4096..] == vec![5; memory.len() - 4096]);
    read.server.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(stream.next_blocking(), ReadEvent::Released);
    until("nothing is held", || client.held_bytes() == 0);
}

#[test]
fn a_client_that_goes_while_disks_write_gives_its_memory_back_as_safely() {
    let stage = ClientStage::open("late-gone");
    let between = Between::start(&stage.served);
    let client = between.client();
    let region = client.pool(1 << 20).unwrap();
    region.keep_pages(false);
    let (stream, memory) = reading((&stage, &client), "gone", &region);
    let _read = between.read();
    let disk = SlowDisk::begin(&between.seen.files.lock().unwrap()[0], 8192);
    drop(client);
    expect_held(&stream);
    assert_eq!(stream.next_blocking(), ReadEvent::Released);
    memory.fill(7);
    disk.write();
    assert!(memory.to_vec() == vec![7; memory.len()], "a late write is in memory that was given back");
}

#[test]
fn bytes_that_were_announced_before_the_end_stay() {
    let stage = ClientStage::open("late-announced");
    let client = stage.served.local(None);
    let (keys, request) = stored(&stage, "announced");
    client.register(&fixture::identity("announced"), &fixture::geometry()).unwrap();
    let region = client.pool(1 << 20).unwrap();
    let shape = fixture::shape(pages().0, pages().1);
    let memory = SharedBuf::new(&region, 0, shape.block_bytes() as usize * 4).unwrap();
    let into = Placed::blocks(&shape, memory, 4).unwrap();
    let request = ReadRequest { into, ..request };
    let stream = client.read(request.clone()).unwrap();
    assert_eq!(stream.wait_end().unwrap().usable_blocks, 4);
    drop((client, stream));
    let _ = keys;
    Desk { stage: &stage, namespace: request.namespace, chain: 0 }.expect_bytes(&request, &[0, 1, 2, 3], 1);
}

#[test]
fn a_look_up_that_is_not_answered_in_time_ends_no_read_and_no_other_look_up() {
    let stage = ClientStage::open("late-look-up");
    let between = Between::start(&stage.served);
    let client = between.patient(Duration::from_secs(3));
    let region = client.pool(1 << 20).unwrap();
    let (stream, _memory) = reading((&stage, &client), "look up", &region);
    let read = between.read();
    let desk = Desk::new(&stage, "look up");
    let keys = desk.keys(0..4);
    let (group, coordinate) = pages();
    let request = ContainsRequest { namespace: desk.namespace, group, coordinate, keys: &keys, lease: None };
    between.seen.slow.store(true, Ordering::SeqCst);
    assert_eq!(client.contains(&request).unwrap_err().0, Reason::DeadlinePassed);
    between.seen.slow.store(false, Ordering::SeqCst);
    // Its answer comes in front of that of the next one.
    between.seen.look_ups.lock().unwrap().remove(0).pass_on();
    let other = desk.keys(100..103);
    let found = client.contains(&ContainsRequest { keys: &other, ..request }).unwrap();
    assert_eq!(found.presence, vec![Presence::Absent; 3]);
    assert_eq!((stream.try_next(), client.held_bytes()), (None, 0), "the read goes on");
    read.pass_on();
    assert_eq!(stream.wait_end().unwrap().usable_blocks, 4);
}
