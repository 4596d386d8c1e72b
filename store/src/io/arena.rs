//! Staging memory: one region, handed out in page-aligned pieces.
//!
//! A piece returns to the arena when the last [`Buf`] of it is dropped, and an operation under way holds its
//! buffers: so memory that the kernel may still write is never handed out again, whatever became of the task
//! that asked for it. The arena never grows: its size is a hard limit, and whoever finds it full waits.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, PoisonError};
use std::task::{Poll, Waker};

use super::mem::{Buf, PAGE, Region};
use crate::sync::{Mutex, MutexGuard};

/// How full an arena is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaUse {
    /// Bytes that are handed out.
    pub used: usize,
    /// The most bytes that were ever handed out at once.
    pub used_max: usize,
    /// Bytes in all.
    pub total: usize,
}

struct Free {
    /// Free ranges by offset; neighbours are always merged.
    ranges: BTreeMap<usize, usize>,
    waiting: Vec<Waker>,
    used: usize,
    used_max: usize,
}

struct Shared {
    region: Arc<Region>,
    free: Mutex<Free>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Free> {
        // Every change under the lock is whole before anything in it can panic.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One region, handed out in pieces. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct Arena(Arc<Shared>);

/// Returns its range to the arena when dropped.
struct Piece {
    arena: Arc<Shared>,
    offset: usize,
    len: usize,
}

impl Arena {
    /// An arena over a whole region.
    pub fn new(region: Arc<Region>) -> Self {
        let ranges = BTreeMap::from([(0, region.len())]);
        let free = Mutex::new(Free { ranges, waiting: Vec::new(), used: 0, used_max: 0 });
        Self(Arc::new(Shared { region, free }))
    }

    /// The region, for registering it.
    pub fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    /// A buffer of exactly `len` bytes that begins on a page, or `None` if no free range is long enough now.
    pub fn try_take(&self, len: usize) -> Option<Buf> {
        let pages = len.max(1).checked_next_multiple_of(PAGE)?;
        let offset = {
            let mut free = self.0.lock();
            let (&offset, &found) = free.ranges.iter().find(|&(_, &range)| range >= pages)?;
            free.ranges.remove(&offset);
            if found > pages {
                free.ranges.insert(offset + pages, found - pages);
            }
            free.used += pages;
            free.used_max = free.used_max.max(free.used);
            offset
        };
        let piece = Arc::new(Piece { arena: Arc::clone(&self.0), offset, len: pages });
        Buf::new(&self.0.region, offset, len).map(|buf| buf.kept_by(piece))
    }

    /// A buffer of exactly `len` bytes as soon as there is room, or `None` if the whole arena is smaller.
    pub async fn take(&self, len: usize) -> Option<Buf> {
        if len > self.0.region.len() {
            return None;
        }
        poll_fn(|context| {
            // Registered before the look, so that a piece returned in between wakes this task.
            self.0.lock().waiting.push(context.waker().clone());
            self.try_take(len).map_or(Poll::Pending, |buf| Poll::Ready(Some(buf)))
        })
        .await
    }

    /// How full the arena is.
    pub fn usage(&self) -> ArenaUse {
        let free = self.0.lock();
        ArenaUse { used: free.used, used_max: free.used_max, total: self.0.region.len() }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({:?})", self.usage())
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let waiting = {
            let mut free = self.arena.lock();
            free.used -= self.len;
            let (mut offset, mut len) = (self.offset, self.len);
            if let Some((&before, &bytes)) = free.ranges.range(..offset).next_back()
                && before + bytes == offset
            {
                free.ranges.remove(&before);
                (offset, len) = (before, bytes + len);
            }
            if let Some(after) = free.ranges.remove(&(offset + len)) {
                len += after;
            }
            free.ranges.insert(offset, len);
            std::mem::take(&mut free.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn arena(pages: usize) -> Arena {
        Arena::new(Region::anonymous(pages * PAGE).unwrap())
    }

    #[test]
    fn a_piece_returns_when_its_last_buffer_is_dropped() {
        let arena = arena(4);
        let buf = arena.try_take(3 * PAGE).unwrap();
        let slice = buf.slice(PAGE, 10).unwrap();
        drop(buf);
        assert!(arena.try_take(2 * PAGE).is_none(), "a slice still holds the piece");
        drop(slice);
        assert!(arena.try_take(4 * PAGE).is_some());
        assert_eq!(arena.usage(), ArenaUse { used: 0, used_max: 4 * PAGE, total: 4 * PAGE });
    }

    #[test]
    fn more_than_the_arena_holds_is_refused_at_once() {
        let arena = arena(2);
        let mut context = std::task::Context::from_waker(Waker::noop());
        let taken = std::pin::pin!(arena.take(3 * PAGE)).poll(&mut context);
        assert!(matches!(taken, Poll::Ready(None)));
    }

    #[test]
    fn who_waits_is_served_when_a_piece_returns() {
        let arena = arena(2);
        let held = arena.try_take(PAGE).unwrap();
        let mut context = std::task::Context::from_waker(Waker::noop());
        let mut taken = std::pin::pin!(arena.take(2 * PAGE));
        assert!(taken.as_mut().poll(&mut context).is_pending());
        drop(held);
        assert!(matches!(taken.as_mut().poll(&mut context), Poll::Ready(Some(buf)) if buf.len() == 2 * PAGE));
    }

    proptest! {
        #[test]
        fn pieces_never_share_a_page_and_all_come_back(steps in prop::collection::vec((0usize..9, any::<bool>()), 1..200)) {
            let arena = arena(16);
            let mut held: Vec<Buf> = Vec::new();
            for (pages, give_back) in steps {
                if give_back && !held.is_empty() {
                    held.swap_remove(pages % held.len());
                } else if let Some(buf) = arena.try_take(pages * PAGE) {
                    held.push(buf);
                }
                let mut ranges: Vec<_> = held.iter().map(|buf| (buf.offset(), buf.len().max(1))).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
            }
            held.clear();
            prop_assert!(arena.try_take(16 * PAGE).is_some());
        }
    }
}
