//! What the sessions of a node take of memory, counted: as many as there may be, forks among them, with as many grants as there may be.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvarts_cluster::sessions::{GRANTS_MAX, Grant, Name, SESSIONS_MAX, Sessions, Stand};
use kvarts_layout::{BlockKey, NamespaceId};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator unchanged; counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, room: Layout) -> *mut u8 {
        HELD.fetch_add(room.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract, which is the system allocator's.
        unsafe { System.alloc(room) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, room: Layout) {
        HELD.fetch_sub(room.size(), Ordering::Relaxed);
        // SAFETY: `pointer` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(pointer, room) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_hundred_thousand_sessions_fit_into_64_mib() {
    let (now, hold) = (Duration::ZERO, Duration::from_secs(60));
    let before = HELD.load(Ordering::Relaxed);
    let mut sessions = Sessions::default();
    let key = |n: usize| BlockKey(*blake3::hash(&n.to_le_bytes()).as_bytes());
    let each = (GRANTS_MAX / SESSIONS_MAX) as u32;
    for n in 0..SESSIONS_MAX {
        // Numbers as they come: drawn at random.
        let id = |n: usize| u64::from_le_bytes(key(n).0[..8].try_into().unwrap());
        let name = Name { tenant: 1, id: id(n) };
        let mut from = 0;
        if n % 4 == 3 {
            sessions.fork(name, id(n - n % 4), (1, key(1)), hold, now).unwrap();
            from = 1;
        } else {
            let stand = Stand { namespace: NamespaceId([1; 32]), head: key(n), tip: key(1), blocks: 2 };
            let grants = vec![Grant { lease: n as u64, from: 0, to: 2 }];
            sessions.open(name, stand, grants, hold, now).unwrap();
            from = from.max(2);
        }
        for turn in 1..each {
            let (first, end) = (from + turn - 1, from + turn);
            let grants = vec![Grant { lease: n as u64, from: first, to: end }];
            sessions.extend(name, (first, 1, key(n)), grants, now).unwrap();
        }
    }
    let (open, rests, grants) = sessions.count();
    assert_eq!((open, rests), (SESSIONS_MAX, 0));
    assert!(grants > GRANTS_MAX / 10 * 9 - SESSIONS_MAX, "{grants}");
    let held = HELD.load(Ordering::Relaxed) - before;
    println!("{held} bytes for {open} sessions with {grants} grants: {} each", held / open);
    assert!(held <= 64 << 20, "{held} bytes");
    assert_eq!(sessions.expire(now + hold).expired, SESSIONS_MAX);
    assert!(HELD.load(Ordering::Relaxed) - before < 1 << 20);
}
