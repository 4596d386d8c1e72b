//! What a read costs executors in calls of the allocator: a number for each request, and next to nothing for each megabyte.

use std::alloc::{GlobalAlloc, Layout as Room, System};
use std::cell::Cell;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_contract::api::{BlockOutcome, Durability, Order, Parent, PutRequest, ReadRequest, Verify};
use kvarts_contract::class::Class;
use kvarts_layout::spec::{Geometry, Kind, PartGeometry, Role};
use kvarts_layout::{Coordinate, Group, Identity, NamespaceId};
use kvarts_store::engine::Options;
use kvarts_store::home::HomeOptions;
use kvarts_tests::fixture::{self, Style};
use kvarts_tests::stage::{HomeStage, Stage};

use super::ALONE;

struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The thread of a test: what it makes is its own affair.
    static IS_CALLER: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    // A thread that is about to end has nothing to ask.
    if !IS_CALLER.try_with(Cell::get).unwrap_or(true) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed to the system's allocator unchanged; counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, room: Room) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `alloc`'s contract, which is the system allocator's.
        unsafe { System.alloc(room) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, room: Room) {
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(pointer, room) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, room: Room, size: usize) -> *mut u8 {
        count();
        // SAFETY: as for `dealloc`; the caller keeps `realloc`'s contract.
        unsafe { System.realloc(pointer, room, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const LAYERS: usize = 16;
const PAGES: (Group, Coordinate) = (Group(0), Coordinate::Replicated);

/// Sixteen layers of 64 KiB: a block is a megabyte.
fn geometry() -> Geometry {
    let role = Role::Stream { bytes: 4096, tokens: 1 };
    let part = PartGeometry { kind: Kind::new("latent").unwrap(), role, heads: 0, align: 1, group: PAGES.0 };
    Geometry::new(&[part], &vec![vec![0]; LAYERS]).unwrap()
}

fn read(stage: &HomeStage, namespace: NamespaceId, blocks: u32) {
    let shape = geometry().shape(PAGES.0, PAGES.1, fixture::BLOCK_TOKENS).unwrap();
    let request = ReadRequest {
        namespace,
        group: PAGES.0,
        coordinate: PAGES.1,
        keys: fixture::keys(1, 0..u64::from(blocks)),
        layers: None,
        order: Order::Layers,
        into: fixture::place(&shape, blocks, Style::Layers, 0).unwrap(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    };
    let (_, end) = stage.read(request).unwrap();
    assert_eq!((end.usable_blocks, end.failures), (blocks, Vec::new()));
}

/// Calls of the allocator on executors in the calmest of some reads of so much: checkpoints and sweeps fall into others.
fn calls_of(stage: &HomeStage, namespace: NamespaceId, blocks: u32) -> u64 {
    let calls = (0..12).map(|_| {
        let before = CALLS.load(Ordering::Relaxed);
        read(stage, namespace, blocks);
        CALLS.load(Ordering::Relaxed) - before
    });
    calls.min().unwrap()
}

#[test]
fn a_read_allocates_by_its_requests_and_not_by_its_megabytes() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    IS_CALLER.set(true);
    let store = Options { budget_bytes: 512 << 20, segment_bytes: 16 << 20, ..Options::default() };
    let stage =
        HomeStage::open("read-allocations", &HomeOptions { store, ..HomeOptions::default() }).unwrap();
    // Threads that read for executors allocate for each read: the figures are the ring's.
    if !stage.home().notes().iter().any(|note| note == "the interface to the disks is ring") {
        eprintln!("SKIPPED: a read's allocations are counted where disks are reached by io_uring");
        return;
    }
    let identity =
        Identity { spec_fingerprint: geometry().fingerprint(), ..fixture::identity("allocations") };
    let namespace = stage.store().register(&identity, &geometry()).unwrap();
    let shape = geometry().shape(PAGES.0, PAGES.1, fixture::BLOCK_TOKENS).unwrap();
    for n in 0..64 {
        let put = PutRequest {
            namespace,
            group: PAGES.0,
            coordinate: PAGES.1,
            parent: Parent::Unknown,
            first_block: Some(0),
            keys: fixture::keys(1, n..n + 1),
            from: fixture::place(&shape, 1, Style::Layers, 0).unwrap(),
            layout: None,
            durability: Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        assert_eq!(stage.put(put).unwrap().outcomes, [BlockOutcome::Stored]);
    }
    // As much as a read has under way at a time, and twice that: buffers are used again, and each record costs its look-up alone.
    let (some, more) = (calls_of(&stage, namespace, 32), calls_of(&stage, namespace, 64));
    println!("{some} calls for 32 MiB, {more} for 64");
    let a_mib = more.saturating_sub(some) as f64 / 32.0;
    assert!(some < 2500, "{some} calls for 32 MiB in 512 slices");
    assert!(
        a_mib < 16.0,
        "{a_mib:.1} calls for each record of a megabyte in 16 slices: {some} for 32, {more} for 64"
    );
}
