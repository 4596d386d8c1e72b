//! Batches of pages over a real server: pages that lie anywhere, in each kind of memory and over each path, and a server
//! that goes away and comes back.

#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::sync::Arc;
use std::time::Duration;

use crate::served::Served;
use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::KvStore;
use kvarts_contract::batch::{
    BatchKind, Block, CANCELLED, Completion, Lane, Memory, Pages, PagesOptions, Terms,
};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::identity::Arrangement;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;

/// No page of the machine's, and no multiple of anything.
const PAGE: usize = 20_003;
const COUNT: usize = 40;

struct Handle {
    pages: Pages,
    shapes: Vec<(Group, Coordinate, BlockShape)>,
}

fn handle(client: &Client) -> Handle {
    let geometry = Geometry::opaque(PAGE as u64).unwrap();
    let arrangement = Arrangement::new("test", "pages", "1");
    let identity = Identity::new("batches", "1", "bytes", arrangement, &geometry, 1);
    let namespace = client.register(&identity, &geometry).unwrap();
    let options = PagesOptions { until_free: true, ..PagesOptions::new(namespace) };
    let pages = Pages::new(client.store(), options).unwrap();
    let shape = BlockShape::opaque(PAGE as u64).unwrap();
    Handle { pages, shapes: vec![(Group(0), Coordinate::Replicated, shape)] }
}

fn blocks(first: u8, count: usize) -> Vec<Block> {
    let block = |n| Block { group: Group(0), coordinate: Coordinate::Replicated, key: BlockKey([n; 32]) };
    (first..).take(count).map(block).collect()
}

impl Handle {
    fn submit(&self, kind: BatchKind, blocks: &[Block], places: &[SharedBuf], deadline: Option<Nanos>) {
        let memory = if places.is_empty() { Memory::Nowhere } else { Memory::Anywhere(places, &self.shapes) };
        let terms = Terms { deadline, hold: Duration::from_secs(60), ..Terms::default() };
        self.pages.submit(kind, blocks, &memory, &terms).unwrap();
    }

    fn answer(&self) -> Completion {
        let wait = Timespec { tv_sec: 60, tv_nsec: 0 };
        let mut told = Vec::new();
        while self.pages.drain(&mut told) == 0 {
            let bell = self.pages.event_fd(Lane::Load);
            assert!(poll(&mut [PollFd::new(&bell, PollFlags::IN)], Some(&wait)).unwrap() > 0, "no answer");
        }
        assert_eq!(told.len(), 1);
        told.remove(0)
    }

    fn ask(&self, kind: BatchKind, blocks: &[Block], places: &[SharedBuf]) -> Completion {
        self.submit(kind, blocks, places, None);
        self.answer()
    }
}

/// Pages here and there in a region.
fn places(region: &Arc<Region>, step: usize) -> Vec<SharedBuf> {
    let place = |n: usize| SharedBuf::new(region, 7 + (n * 13 % COUNT) * step + n % 5, PAGE).unwrap();
    (0..COUNT).map(place).collect()
}

fn fill(places: &[SharedBuf]) {
    for (n, place) in places.iter().enumerate() {
        place.copy_in(0, &bytes(n));
    }
}

fn bytes(n: usize) -> Vec<u8> {
    (0..PAGE).map(|at| (n * 31 + at / 3) as u8).collect()
}

fn there_and_back(client: &Client, region: &Arc<Region>, first: u8) {
    let (handle, blocks) = (handle(client), blocks(first, COUNT));
    let (from, into) = (places(region, PAGE + 10), places(region, PAGE + 77));
    fill(&from);
    assert!(handle.ask(BatchKind::Put, &blocks, &from).is_ok());
    from.iter().for_each(|place| place.fill(0));
    let backwards: Vec<Block> = blocks.iter().rev().copied().collect();
    assert!(handle.ask(BatchKind::Get, &backwards, &into).is_ok());
    for (n, place) in into.iter().rev().enumerate() {
        assert!(place.to_vec() == bytes(n), "page {n}");
    }
    assert!(handle.ask(BatchKind::Exists, &blocks, &[]).is_ok());
    let locked = handle.ask(BatchKind::Lock, &blocks, &[]);
    assert!(locked.is_ok() && handle.pages.unlock(locked.id));
    assert!(handle.ask(BatchKind::Delete, &blocks[..1], &[]).is_ok());
    let left = handle.ask(BatchKind::Exists, &blocks[..2], &[]);
    assert_eq!(left.results, [Err(Reason::NotHere(blocks[0].key)), Ok(())]);
    assert_eq!(handle.ask(BatchKind::Delete, &blocks[..1], &[]).error().map(Reason::kind), Some(Kind::Miss));
    handle.pages.close();
    assert!(handle.pages.is_free());
}

#[test]
fn pages_that_lie_anywhere_come_back_whole_in_each_kind_of_memory_and_over_each_path() {
    let served = Served::start("batches-anywhere", "");
    let bytes = 2 * COUNT * (PAGE + 100);
    let client = served.local(None);
    there_and_back(&client, &client.pool(bytes).unwrap(), 1);
    let file = rustix::fs::memfd_create("engine", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let whole = (bytes as u64).next_multiple_of(4096);
    rustix::fs::ftruncate(&file, whole).unwrap();
    there_and_back(&client, &client.adopt(file, whole).unwrap(), 50);
    there_and_back(&client, &Region::anonymous(bytes).unwrap(), 100);
    let far = Client::connect(&ConnectOptions::to(served.endpoint())).unwrap();
    there_and_back(&far, &Region::anonymous(bytes).unwrap(), 150);
}

#[test]
fn a_server_that_is_away_delays_no_submission_and_comes_back_by_itself() {
    let mut served = Served::start("batches-away", "");
    let grpc = served.daemon().grpc().unwrap();
    let client = served.local(None);
    let shared = client.pool(2 * COUNT * (PAGE + 100)).unwrap();
    let (handle, blocks, private) = (handle(&client), blocks(1, COUNT), Region::anonymous(1 << 21).unwrap());
    let from = places(&shared, PAGE + 10);
    fill(&from);
    assert!(handle.ask(BatchKind::Put, &blocks, &from).is_ok());
    served.stop();
    let soon = || Some(client.clock().now().plus(Duration::from_secs(5)));
    for kind in [BatchKind::Put, BatchKind::Get, BatchKind::Exists] {
        for region in [&shared, &private] {
            let memory = if kind == BatchKind::Exists { Vec::new() } else { places(region, PAGE + 10) };
            handle.submit(kind, &blocks, &memory, soon());
            let told = handle.answer();
            let kinds: Vec<_> = told.results.iter().map(|one| one.as_ref().map_err(Reason::kind)).collect();
            assert!(
                kinds.iter().all(|one| matches!(one, Err(Kind::Retry | Kind::Deadline))),
                "{kind:?} {kinds:?}"
            );
        }
    }
    served.open(grpc);
    let into = places(&private, PAGE + 10);
    for place in [&from, &into] {
        place.iter().for_each(|place| place.fill(0));
        assert!(handle.ask(BatchKind::Get, &blocks, place).is_ok());
        assert!(place.iter().enumerate().all(|(n, place)| place.to_vec() == bytes(n)));
    }
}

#[test]
fn whatever_is_cancelled_is_answered_once_and_is_free() {
    let served = Served::start("batches-cancelled", "");
    let client = served.local(None);
    let (handle, blocks, private) = (handle(&client), blocks(1, COUNT), Region::anonymous(1 << 21).unwrap());
    let from = places(&private, PAGE + 10);
    fill(&from);
    let mut cancelled = 0;
    for round in 0..50 {
        let kind = [BatchKind::Put, BatchKind::Get, BatchKind::Exists][round % 3];
        let memory = if kind == BatchKind::Exists { &[][..] } else { &from };
        let terms = Terms::default();
        let places =
            if memory.is_empty() { Memory::Nowhere } else { Memory::Anywhere(memory, &handle.shapes) };
        let id = handle.pages.submit(kind, &blocks, &places, &terms).unwrap();
        let in_time = handle.pages.cancel(id);
        let told = handle.answer();
        assert_eq!(told.id, id);
        cancelled += u32::from(told.results.iter().all(|one| *one == Err(CANCELLED)));
        assert!(in_time || told.error() != Some(&CANCELLED));
    }
    assert!(cancelled > 0);
    handle.pages.close();
    served.until("no memory in use", |_| handle.pages.is_free());
}
