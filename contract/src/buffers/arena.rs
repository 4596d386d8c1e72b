//! Staging memory: one region, or a part of one, handed out in page-aligned pieces.
//!
//! A piece returns to the arena when the last range of it is dropped, and an operation under way holds its
//! buffers: so memory that the kernel may still write is never handed out again, whatever became of the task
//! that asked for it. The arena never grows: its size is a hard limit, and a caller that finds it full waits.
//!
//! Who waits is served in the order of asking. Whatever is too large for what is free is not starved by what is smaller:
//! a range is set apart for the caller that has waited longest, in which nothing else is handed out until all of it is free. Outside of it
//! others go on. A piece that returns is given to those who can go on with it, and they alone are woken.
//!
//! Pieces are contiguous, so pieces that are held leave gaps. Where several users must not hinder each other, each names the ranges in
//! which its pieces may lie ([`Within`]): one of its own, and one that it shares with others. No gaps of others are in its own range.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::task::{Poll, Waker};

use super::buf::BufMut;
use super::region::{PAGE, Region};
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

/// Where the pieces of one user may lie, in bytes of the region: in its own range first, in which no other user has pieces, and in one that
/// is shared with others. Either may be empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Within {
    /// The range of this user.
    pub own: Range<usize>,
    /// The range of all.
    pub shared: Range<usize>,
}

impl Within {
    /// Those of its ranges in which a piece of `len` bytes may lie, its own first.
    fn ranges(&self, len: usize) -> impl Iterator<Item = &Range<usize>> {
        [&self.own, &self.shared].into_iter().filter(move |range| range.len() >= len)
    }
}

/// A caller that waits.
#[derive(Debug)]
struct Waiting {
    len: usize,
    within: Within,
    waker: Waker,
    /// Where his piece is, once it is his.
    given: Option<usize>,
}

#[derive(Debug)]
struct Free {
    /// Free ranges by offset; neighbours are always merged.
    ranges: BTreeMap<usize, usize>,
    /// Who waits, by number, the longest first; and who was given a piece and has not come for it.
    queue: BTreeMap<u64, Waiting>,
    next: u64,
    /// By where the range begins in which he waits for room: who has waited longest there, and what is set apart for him.
    apart: BTreeMap<usize, (u64, Range<usize>)>,
    used: usize,
    used_max: usize,
}

impl Free {
    /// A free range of `len` bytes that the caller with this number may have, or one who does not wait yet.
    fn find(&self, len: usize, within: &Within, number: Option<u64>) -> Option<usize> {
        within.ranges(len).find_map(|range| {
            let apart = self.apart.get(&range.start).filter(|(first, _)| Some(*first) != number);
            let apart = apart.map_or(range.end..range.end, |(_, apart)| apart.clone());
            self.free_in(range).find_map(|(start, end)| {
                let before = start..end.min(apart.start);
                let behind = start.max(apart.end)..end;
                [before, behind].into_iter().find(|part| part.end >= part.start + len).map(|part| part.start)
            })
        })
    }

    /// What is free of a range: where each part begins and ends.
    fn free_in(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        let (begin, end) = (range.start, range.end);
        let first = self.ranges.range(..=begin).next_back().map_or(begin, |(&start, _)| start);
        let parts = self.ranges.range(first..end.max(first)).map(|(&start, &bytes)| (start, start + bytes));
        parts.map(move |(from, to)| (from.max(begin), to.min(end))).filter(|(from, to)| from < to)
    }

    /// Hands out a free range.
    fn hand_out(&mut self, offset: usize, len: usize) {
        let Some((&start, &bytes)) = self.ranges.range(..=offset).next_back() else { return };
        self.ranges.remove(&start);
        if offset > start {
            self.ranges.insert(start, offset - start);
        }
        if start + bytes > offset + len {
            self.ranges.insert(offset + len, start + bytes - offset - len);
        }
        self.used += len;
        self.used_max = self.used_max.max(self.used);
    }

    fn take_back(&mut self, mut offset: usize, mut len: usize) {
        self.used -= len;
        if let Some((&before, &bytes)) = self.ranges.range(..offset).next_back()
            && before + bytes == offset
        {
            self.ranges.remove(&before);
            (offset, len) = (before, bytes + len);
        }
        if let Some(after) = self.ranges.remove(&(offset + len)) {
            len += after;
        }
        self.ranges.insert(offset, len);
    }

    /// Sets apart the range that is soonest free, as far as can be told: around the largest one that is. It stays the
    /// same, or it would never be free. There is one in each range in which no other caller has one.
    fn set_apart(&mut self, number: u64, len: usize, within: &Within) {
        for range in within.ranges(len) {
            let largest = self.free_in(range).max_by_key(|(start, end)| end - start);
            let largest = largest.map_or(range.start, |(start, _)| start);
            let start = largest.min(range.end - len);
            self.apart.entry(range.start).or_insert((number, start..start + len));
        }
    }

    /// Gives pieces to those who can go on with what is free, in the order in which they came. They are to be woken.
    fn serve(&mut self) -> Vec<Waker> {
        let mut woken = Vec::new();
        // What was set apart for one who is given a piece elsewhere may be enough for those who came before him.
        loop {
            let before = woken.len();
            self.serve_once(&mut woken);
            if woken.len() == before {
                return woken;
            }
        }
    }

    fn serve_once(&mut self, woken: &mut Vec<Waker>) {
        let queue = &self.queue;
        let waits = |number: &u64| queue.get(number).is_some_and(|one| one.given.is_none());
        self.apart.retain(|_, (number, _)| waits(number));
        let of = |(number, one): (&u64, &Waiting)| {
            one.given.is_none().then(|| (*number, one.len, one.within.clone()))
        };
        let waiting: Vec<(u64, usize, Within)> = queue.iter().filter_map(of).collect();
        // Where a shorter piece was not found, a longer one is not.
        let mut too_long: BTreeMap<[usize; 4], usize> = BTreeMap::new();
        for (number, len, within) in waiting {
            let (own, shared) = (&within.own, &within.shared);
            let ranges = [own.start, own.end, shared.start, shared.end];
            let most = too_long.entry(ranges).or_insert(usize::MAX);
            let is_first = self.apart.values().any(|(first, _)| *first == number);
            let found = if is_first || len < *most { self.find(len, &within, Some(number)) } else { None };
            match (found, self.queue.get_mut(&number)) {
                (Some(offset), Some(one)) => {
                    one.given = Some(offset);
                    woken.push(one.waker.clone());
                    self.hand_out(offset, len);
                    self.apart.retain(|_, (first, _)| *first != number);
                }
                _ => {
                    self.set_apart(number, len, &within);
                    *most = len.min(*most);
                }
            }
        }
    }
}

struct Shared {
    region: Arc<Region>,
    /// Which part of the region it is.
    part: Range<usize>,
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

/// A place in the queue, until dropped.
struct Place<'a> {
    arena: &'a Shared,
    number: u64,
    len: usize,
}

impl Place<'_> {
    /// The piece that was given, or whom to wake.
    fn ask(&self, waker: &Waker) -> Poll<usize> {
        let mut free = self.arena.lock();
        let Some(one) = free.queue.get_mut(&self.number) else { return Poll::Pending };
        match one.given {
            Some(offset) => {
                free.queue.remove(&self.number);
                Poll::Ready(offset)
            }
            None => {
                one.waker.clone_from(waker);
                Poll::Pending
            }
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let woken = {
            let mut free = self.arena.lock();
            // Gone if the piece was fetched.
            let Some(left) = free.queue.remove(&self.number) else { return };
            if let Some(offset) = left.given {
                free.take_back(offset, self.len);
            }
            free.serve()
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Arena {
    /// An arena over a whole region, of which no range is in use elsewhere.
    pub fn new(region: Arc<Region>) -> Self {
        let end = region.len() / PAGE * PAGE;
        region.set_owned();
        Self::of(region, 0..end)
    }

    /// Arenas over equal parts of a region, of which no range is in use elsewhere: what is taken of one leaves the others whole.
    pub fn parts(region: &Arc<Region>, count: usize) -> Vec<Self> {
        let each = region.len() / PAGE / count.max(1) * PAGE;
        region.set_owned();
        (0..count.max(1)).map(|at| Self::of(Arc::clone(region), at * each..(at + 1) * each)).collect()
    }

    fn of(region: Arc<Region>, part: Range<usize>) -> Self {
        let free = Free {
            ranges: BTreeMap::from([(part.start, part.len())]),
            queue: BTreeMap::new(),
            next: 0,
            apart: BTreeMap::new(),
            used: 0,
            used_max: 0,
        };
        Self(Arc::new(Shared { region, part, free: Mutex::new(free) }))
    }

    /// The region, for registering it.
    pub fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    /// All of the arena, for one user.
    fn whole(&self) -> Within {
        let part = &self.0.part;
        Within { own: part.start..part.start, shared: part.clone() }
    }

    /// A buffer of exactly `len` bytes that begins on a page, or `None` if no free range is long enough now.
    pub fn try_take(&self, len: usize) -> Option<BufMut> {
        self.try_take_within(len, &self.whole())
    }

    /// The same, in ranges of the arena that begin and end on pages.
    pub fn try_take_within(&self, len: usize, within: &Within) -> Option<BufMut> {
        let pages = len.max(1).checked_next_multiple_of(PAGE)?;
        let offset = {
            let mut free = self.0.lock();
            let offset = free.find(pages, within, None)?;
            free.hand_out(offset, pages);
            offset
        };
        self.piece(offset, pages, len)
    }

    /// A buffer of exactly `len` bytes as soon as there is room, or `None` if the whole arena is smaller.
    pub async fn take(&self, len: usize) -> Option<BufMut> {
        self.take_within(len, &self.whole()).await
    }

    /// The same, in ranges of the arena that begin and end on pages: `None` if each of them is smaller.
    pub async fn take_within(&self, len: usize, within: &Within) -> Option<BufMut> {
        let pages = len.max(1).checked_next_multiple_of(PAGE)?;
        within.ranges(pages).next()?;
        let mut place = None;
        let offset = poll_fn(|context| match &place {
            None => match self.take_or_wait(pages, within, context.waker()) {
                Ok(offset) => Poll::Ready(offset),
                Err(waiting) => {
                    place = Some(waiting);
                    Poll::Pending
                }
            },
            Some(place) => place.ask(context.waker()),
        })
        .await;
        self.piece(offset, pages, len)
    }

    /// A free range, or a place in the queue.
    fn take_or_wait(&self, len: usize, within: &Within, waker: &Waker) -> Result<usize, Place<'_>> {
        let mut free = self.0.lock();
        if let Some(offset) = free.find(len, within, None) {
            free.hand_out(offset, len);
            return Ok(offset);
        }
        let number = free.next;
        free.next += 1;
        free.queue.insert(number, Waiting { len, within: within.clone(), waker: waker.clone(), given: None });
        free.set_apart(number, len, within);
        Err(Place { arena: &self.0, number, len })
    }

    fn piece(&self, offset: usize, pages: usize, len: usize) -> Option<BufMut> {
        let piece = Arc::new(Piece { arena: Arc::clone(&self.0), offset, len: pages });
        BufMut::of(&self.0.region, offset, len).map(|buf| buf.kept_by(piece))
    }

    /// How full the arena is.
    pub fn usage(&self) -> ArenaUse {
        let free = self.0.lock();
        ArenaUse { used: free.used, used_max: free.used_max, total: self.0.part.len() }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({:?})", self.usage())
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let woken = {
            let mut free = self.arena.lock();
            free.take_back(self.offset, self.len);
            free.serve()
        };
        woken.into_iter().for_each(Waker::wake);
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
        let buf = arena.try_take(3 * PAGE).unwrap().share();
        let slice = buf.slice(PAGE, 10).unwrap();
        drop(buf);
        assert!(arena.try_take(2 * PAGE).is_none(), "a slice still holds the piece");
        drop(slice);
        assert!(arena.try_take(4 * PAGE).is_some());
        assert_eq!(arena.usage(), ArenaUse { used: 0, used_max: 4 * PAGE, total: 4 * PAGE });
    }

    #[test]
    fn what_is_taken_of_one_part_leaves_the_others_whole() {
        let region = Region::anonymous(7 * PAGE).unwrap();
        let parts = Arena::parts(&region, 3);
        let all: Vec<_> = parts.iter().map(|part| part.try_take(2 * PAGE).unwrap().share()).collect();
        let mut places: Vec<usize> = all.iter().map(|buf| buf.as_ptr() as usize).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|two| two[1] - two[0] == 2 * PAGE), "{places:?}");
        assert!(parts.iter().all(|part| part.try_take(1).is_none()));
        drop(all);
        // One that waits in the second is served from the second.
        let [_, second, _] = &parts[..] else { panic!("three") };
        let held = second.try_take(PAGE).unwrap();
        let mut context = std::task::Context::from_waker(Waker::noop());
        let mut waits = std::pin::pin!(second.take(2 * PAGE));
        assert!(waits.as_mut().poll(&mut context).is_pending());
        assert!(parts[0].try_take(2 * PAGE).is_some() && parts[2].try_take(2 * PAGE).is_some());
        drop(held);
        assert!(matches!(waits.as_mut().poll(&mut context), Poll::Ready(Some(_))));
        assert_eq!(second.usage().total, 2 * PAGE);
    }

    #[test]
    fn pieces_of_others_leave_no_gaps_in_a_range_of_ones_own() {
        let arena = arena(12);
        let of = |number: usize| {
            let start = number * 3 * PAGE;
            Within { own: start..start + 3 * PAGE, shared: 6 * PAGE..12 * PAGE }
        };
        // One user fills what it may have, and gives every second page back.
        let mut held: Vec<_> =
            std::iter::from_fn(|| arena.try_take_within(PAGE, &of(0))).enumerate().collect();
        assert_eq!(held.len(), 9);
        held.retain(|(at, _)| at % 2 == 0);
        assert!(arena.try_take_within(2 * PAGE, &of(0)).is_none(), "it has gaps itself");
        // One that waits has a range set apart where it may lie, and hinders no other.
        let mut context = std::task::Context::from_waker(Waker::noop());
        let within = of(0);
        let mut waits = std::pin::pin!(arena.take_within(3 * PAGE, &within));
        assert!(waits.as_mut().poll(&mut context).is_pending());
        let own = arena.try_take_within(3 * PAGE, &of(1)).expect("it is its own");
        assert_eq!(own.offset(), 3 * PAGE);
        // Too long for any range of its own.
        assert!(arena.try_take_within(4 * PAGE, &of(1)).is_none());
        let within = of(1);
        let mut large = std::pin::pin!(arena.take_within(6 * PAGE, &within));
        let mut larger = std::pin::pin!(arena.take_within(7 * PAGE, &within));
        assert!(large.as_mut().poll(&mut context).is_pending());
        assert!(matches!(larger.as_mut().poll(&mut context), Poll::Ready(None)));
        let begins = |(_, piece): &(usize, BufMut)| piece.offset();
        held.retain(|one| begins(one) >= 3 * PAGE);
        assert!(matches!(waits.as_mut().poll(&mut context), Poll::Ready(Some(piece)) if piece.offset() == 0));
        assert!(large.as_mut().poll(&mut context).is_pending());
        held.clear();
        assert!(
            matches!(large.as_mut().poll(&mut context), Poll::Ready(Some(piece)) if piece.offset() == 6 * PAGE)
        );
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

    /// Counts how often it is woken.
    #[derive(Default)]
    struct Woken(std::sync::atomic::AtomicUsize);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }

    type Taking<'a> = std::pin::Pin<Box<dyn Future<Output = Option<BufMut>> + 'a>>;

    /// A caller that asks for `pages` pages, and counts its wakes.
    fn ask(arena: &Arena, pages: usize) -> (Taking<'_>, Arc<Woken>) {
        (Box::pin(arena.take(pages * PAGE)), Arc::default())
    }

    fn poll((taking, woken): &mut (Taking<'_>, Arc<Woken>)) -> Option<BufMut> {
        let waker = Waker::from(Arc::clone(woken));
        match taking.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            Poll::Ready(buf) => Some(buf.expect("the arena is larger")),
            Poll::Pending => None,
        }
    }

    fn wakes(one: &(Taking<'_>, Arc<Woken>)) -> usize {
        one.1.0.load(std::sync::atomic::Ordering::Relaxed)
    }

    #[test]
    fn who_asked_first_is_served_first_and_a_returned_piece_wakes_only_who_can_go_on() {
        let arena = arena(4);
        let mut held: Vec<BufMut> = (0..4).map(|_| arena.try_take(PAGE).unwrap()).collect();
        let mut all: Vec<_> = (0..100).map(|_| ask(&arena, 1)).collect();
        assert!(all.iter_mut().all(|one| poll(one).is_none()));
        for served in 0..100 {
            drop(held.remove(0));
            assert_eq!(wakes(&all[served]), 1);
            assert!(arena.try_take(PAGE).is_none(), "it is his who has waited longest");
            held.push(poll(&mut all[served]).expect("it is his turn"));
            let woken: usize = all.iter().map(wakes).sum();
            assert_eq!(woken, served + 1, "no other task has been woken");
        }
    }

    #[test]
    fn a_large_piece_is_not_starved_by_small_ones_that_keep_coming() {
        let arena = arena(16);
        let mut held: std::collections::VecDeque<BufMut> =
            (0..16).map(|_| arena.try_take(PAGE).unwrap()).collect();
        held.rotate_left(8);
        let mut large = ask(&arena, 8);
        assert!(poll(&mut large).is_none());
        let (mut rounds, mut small) = (0, 0);
        let piece = loop {
            if let Some(piece) = poll(&mut large) {
                break piece;
            }
            // The oldest returns, and others ask at once.
            held.pop_front();
            for _ in 0..2 {
                if let Some(piece) = arena.try_take(PAGE) {
                    held.push_back(piece);
                    small += 1;
                }
            }
            rounds += 1;
            assert!(rounds < 100, "it waits for ever");
        };
        assert_eq!((piece.len(), wakes(&large)), (8 * PAGE, 1));
        assert_eq!((rounds, small), (16, 8), "others go on meanwhile");
    }

    #[test]
    fn room_is_set_apart_in_the_shared_range_too_while_the_own_one_is_taken() {
        let arena = arena(24);
        let of = |user: usize| {
            let start = user * 4 * PAGE;
            Within { own: start..start + 4 * PAGE, shared: 8 * PAGE..24 * PAGE }
        };
        let _own = [0, 1].map(|user| arena.try_take_within(4 * PAGE, &of(user)).unwrap());
        let mut held: std::collections::VecDeque<BufMut> =
            (0..16).map(|_| arena.try_take_within(PAGE, &of(1)).unwrap()).collect();
        let within = of(0);
        let taking: Taking<'_> = Box::pin(arena.take_within(4 * PAGE, &within));
        let mut large = (taking, Arc::default());
        let mut rounds = 0;
        let piece = loop {
            if let Some(piece) = poll(&mut large) {
                break piece;
            }
            // The oldest piece of the other user returns, and it asks for others at once.
            held.pop_front();
            held.extend(arena.try_take_within(PAGE, &of(1)));
            rounds += 1;
            assert!(rounds < 100, "it waits for ever");
        };
        assert!(piece.offset() >= 8 * PAGE && rounds <= 16, "{} after {rounds}", piece.offset());
    }

    #[test]
    fn small_ones_go_on_beside_a_large_one_that_waits() {
        let arena = arena(8);
        let _long = arena.try_take(PAGE).unwrap();
        let short = arena.try_take(6 * PAGE).unwrap();
        let mut large = ask(&arena, 4);
        let mut small = ask(&arena, 2);
        assert!(poll(&mut large).is_none());
        assert!(poll(&mut small).is_none());
        drop(short);
        let (large, small) = (poll(&mut large), poll(&mut small));
        assert!(large.is_some() && small.is_some());
    }

    #[test]
    fn who_leaves_the_queue_leaves_nothing_behind() {
        let arena = arena(2);
        let held = arena.try_take(2 * PAGE).unwrap();
        let (mut first, mut second, mut third) = (ask(&arena, 2), ask(&arena, 2), ask(&arena, 1));
        assert!(poll(&mut first).is_none() && poll(&mut second).is_none() && poll(&mut third).is_none());
        drop(first);
        drop(held);
        // Given, and never fetched.
        assert_eq!((wakes(&second), wakes(&third)), (1, 0));
        drop(second);
        assert_eq!(wakes(&third), 1);
        drop(poll(&mut third).unwrap());
        assert_eq!(arena.usage().used, 0);
        assert!(arena.try_take(2 * PAGE).is_some(), "nothing is set apart for those who left");
    }

    proptest! {
        #[test]
        fn pieces_that_are_waited_for_never_share_a_page_and_everybody_is_served(
            steps in prop::collection::vec((1usize..=16, 0usize..4), 1..200),
        ) {
            let arena = arena(16);
            let (mut held, mut waiting): (Vec<BufMut>, Vec<_>) = (Vec::new(), Vec::new());
            for (pages, what) in steps {
                match what {
                    0 if !held.is_empty() => drop(held.swap_remove(pages % held.len())),
                    1 if !waiting.is_empty() => drop(waiting.remove(pages % waiting.len())),
                    _ => waiting.push(ask(&arena, pages)),
                }
                waiting.retain_mut(|one| poll(one).map(|buf| held.push(buf)).is_none());
                let mut ranges: Vec<_> = held.iter().map(|buf| (buf.offset(), buf.len())).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                prop_assert_eq!(arena.usage().used, held.iter().map(BufMut::len).sum::<usize>());
            }
            while !waiting.is_empty() {
                prop_assert!(!held.is_empty(), "who waits for what is free waits for ever");
                held.remove(0);
                waiting.retain_mut(|one| poll(one).map(|buf| held.push(buf)).is_none());
            }
            held.clear();
            prop_assert!(arena.try_take(16 * PAGE).is_some());
        }

        #[test]
        fn users_lie_where_they_may_and_one_with_nothing_has_its_range(
            steps in prop::collection::vec((0usize..3, 1usize..=6, 0usize..4), 1..200),
        ) {
            let arena = arena(24);
            let of = |user: usize| {
                let start = user * 4 * PAGE;
                Within { own: start..start + 4 * PAGE, shared: 12 * PAGE..24 * PAGE }
            };
            let within: Vec<Within> = (0..3).map(of).collect();
            let mut held: Vec<(usize, BufMut)> = Vec::new();
            let mut waiting: Vec<(usize, _)> = Vec::new();
            for (user, pages, what) in steps {
                match what {
                    0 if !held.is_empty() => drop(held.swap_remove(pages % held.len())),
                    1 if !waiting.is_empty() => drop(waiting.remove(pages % waiting.len())),
                    _ => {
                        let taking: Taking<'_> = Box::pin(arena.take_within(pages * PAGE, &within[user]));
                        waiting.push((user, (taking, Arc::default())));
                    }
                }
                waiting.retain_mut(|(user, one)| poll(one).map(|buf| held.push((*user, buf))).is_none());
                let mut ranges: Vec<_> = held.iter().map(|(_, buf)| (buf.offset(), buf.len())).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                for (user, buf) in &held {
                    let lies = buf.offset()..buf.offset() + buf.len();
                    let is_in = |range: &Range<usize>| range.start <= lies.start && lies.end <= range.end;
                    prop_assert!([&within[*user].own, &within[*user].shared].into_iter().any(is_in));
                }
                for (user, within) in within.iter().enumerate() {
                    let has = held.iter().any(|(one, _)| *one == user) || waiting.iter().any(|(one, _)| *one == user);
                    prop_assert!(has || arena.try_take_within(4 * PAGE, within).is_some());
                }
            }
            while !waiting.is_empty() {
                prop_assert!(!held.is_empty(), "who waits for what is free waits for ever");
                held.remove(0);
                waiting.retain_mut(|(user, one)| poll(one).map(|buf| held.push((*user, buf))).is_none());
            }
            held.clear();
            prop_assert!(arena.try_take(24 * PAGE).is_some());
        }

        #[test]
        fn pieces_never_share_a_page_and_all_come_back(steps in prop::collection::vec((0usize..9, any::<bool>()), 1..200)) {
            let arena = arena(16);
            let mut held: Vec<BufMut> = Vec::new();
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
