//! Which of the waiting transfers goes to the device next: weighted (deficit) round robin over the classes.
//!
//! A class with work gets bytes in proportion to [`Class::shares`] while others have work too, and everything while
//! they have none; a class that had none does not save up. A class whose next transfer does not fit lets others pass,
//! but not for ever: after a number of bytes they wait until it fits. Within a class the order is first come, first served,
//! and a large transfer at the head is never overtaken, so that it cannot starve. The queues are threaded through
//! an array with one place for each slot: queueing allocates nothing, and leaving in the middle costs nothing.

use kvarts_contract::class::Class;

const NONE: u32 = u32::MAX;
/// Bytes for each share and turn.
const QUANTUM: u64 = 1024;
/// Bytes that others may send while the next transfer of a class does not fit. Small ones fill up what a large one
/// needs as soon as it is there: without this it would wait for as long as they keep coming.
const PASSED_MAX: u64 = 32 << 20;
/// No transfer is charged more than this, so that a turn ends after a bounded number of rounds.
const CHARGE_MAX: u64 = 8 << 20;

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u32,
    next: u32,
    /// The class it waits in; `None` if it does not wait.
    class: Option<Class>,
    cost: u64,
}

#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
    /// Bytes that the class may still send in this turn.
    deficit: u64,
    /// Bytes that others have sent since its first was found not to fit.
    passed: Option<u64>,
}

/// The queues. What waits is named by the place of its slot.
#[derive(Debug)]
pub(super) struct Schedule {
    links: Vec<Link>,
    lists: [List; Class::ALL.len()],
    waiting: usize,
    /// Whose turn it is, and whether it was granted its bytes already.
    turn: usize,
    granted: bool,
}

impl Schedule {
    pub(super) fn new() -> Self {
        let list = List { first: NONE, last: NONE, deficit: 0, passed: None };
        Self { links: Vec::new(), lists: [list; Class::ALL.len()], waiting: 0, turn: 0, granted: false }
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// Whether any waits that is less urgent than this class.
    pub(super) fn has_behind(&self, class: Class) -> bool {
        self.lists.iter().skip(class as usize + 1).any(|list| list.first != NONE)
    }

    /// Adds `index` at the end of its class.
    pub(super) fn push(&mut self, index: u32, class: Class, cost: u64) {
        let unlinked = Link { previous: NONE, next: NONE, class: None, cost: 0 };
        if self.links.len() <= index as usize {
            self.links.resize(index as usize + 1, unlinked);
        }
        debug_assert!(self.links[index as usize].class.is_none(), "waits already");
        let list = &mut self.lists[class as usize];
        let previous = std::mem::replace(&mut list.last, index);
        if previous == NONE {
            list.first = index;
        } else {
            self.links[previous as usize].next = index;
        }
        self.links[index as usize] = Link { previous, next: NONE, class: Some(class), cost };
        self.waiting += 1;
    }

    /// Takes `index` out, wherever it waits; false if it does not.
    pub(super) fn remove(&mut self, index: u32) -> bool {
        let Some(link) = self.links.get_mut(index as usize) else { return false };
        let Some(class) = link.class.take() else { return false };
        let (previous, next) = (link.previous, link.next);
        let list = &mut self.lists[class as usize];
        match previous {
            NONE => list.first = next,
            _ => self.links[previous as usize].next = next,
        }
        match next {
            NONE => list.last = previous,
            _ => self.links[next as usize].previous = previous,
        }
        if previous == NONE {
            // Another one is first now, which may fit.
            list.passed = None;
        }
        self.waiting -= 1;
        true
    }

    /// Takes the next one out. `fits` says whether the device has room for a transfer of a class and a cost; one
    /// that does not fit blocks its class, not the others.
    pub(super) fn next(&mut self, fits: impl Fn(Class, u64) -> bool) -> Option<u32> {
        if let Some(class) = self.lists.iter().position(|list| list.passed >= Some(PASSED_MAX)) {
            let first = self.lists[class].first;
            return fits(Class::ALL[class], self.links[first as usize].cost).then(|| self.send(class));
        }
        let mut blocked = 0;
        while blocked < Class::ALL.len() {
            let class = Class::ALL[self.turn];
            let list = self.lists[self.turn];
            if list.first == NONE {
                // Who has no work saves nothing up.
                self.lists[self.turn].deficit = 0;
                blocked += 1;
                self.pass();
                continue;
            }
            let cost = self.links[list.first as usize].cost;
            if !fits(class, cost) {
                self.lists[self.turn].passed.get_or_insert(0);
                blocked += 1;
                self.pass();
                continue;
            }
            let charge = cost.min(CHARGE_MAX);
            if !self.granted {
                self.granted = true;
                self.lists[self.turn].deficit += u64::from(class.shares()) * QUANTUM;
            }
            if self.lists[self.turn].deficit >= charge {
                self.lists[self.turn].deficit -= charge;
                return Some(self.send(self.turn));
            }
            blocked = 0;
            self.pass();
        }
        None
    }

    /// Takes the first of a class out: the others see it pass.
    fn send(&mut self, class: usize) -> u32 {
        let first = self.lists[class].first;
        let cost = self.links[first as usize].cost;
        self.remove(first);
        self.lists.iter_mut().filter_map(|list| list.passed.as_mut()).for_each(|passed| *passed += cost);
        first
    }

    fn pass(&mut self) {
        self.turn = (self.turn + 1) % Class::ALL.len();
        self.granted = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn classes_with_work_share_the_bytes_by_weight() {
        let mut schedule = Schedule::new();
        let cost = 64 << 10;
        for (class, index) in Class::ALL.into_iter().zip(0..) {
            (0..2000).for_each(|place| schedule.push(index * 2000 + place, class, cost));
        }
        let mut sent = [0_u32; Class::ALL.len()];
        for _ in 0..2450 {
            sent[(schedule.next(|_, _| true).unwrap() / 2000) as usize] += 1;
        }
        for (class, sent) in Class::ALL.into_iter().zip(sent) {
            assert!(sent.abs_diff(class.shares()) <= class.shares() / 10 + 16, "{class:?}: {sent}");
        }
    }

    #[test]
    fn a_class_that_had_little_to_do_has_saved_nothing_up() {
        let mut schedule = Schedule::new();
        for _ in 0..1000 {
            schedule.push(0, Class::Background, 1);
            assert_eq!(schedule.next(|_, _| true), Some(0));
            assert_eq!(schedule.next(|_, _| true), None);
        }
        let cost = 64 << 10;
        (0..1000).for_each(|index| schedule.push(index, Class::Background, cost));
        (1000..2000).for_each(|index| schedule.push(index, Class::Foreground, cost));
        let background = (0..200).filter_map(|_| schedule.next(|_, _| true)).filter(|index| *index < 1000);
        assert!(background.count() < 20, "background work pushed ahead of foreground reads");
    }

    #[test]
    fn a_class_alone_gets_everything_at_once_however_small_its_share() {
        let mut schedule = Schedule::new();
        (0..100).for_each(|index| schedule.push(index, Class::Background, 1 << 30));
        let order: Vec<_> = std::iter::from_fn(|| schedule.next(|_, _| true)).collect();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_transfer_that_does_not_fit_blocks_its_own_class_only_and_keeps_its_place() {
        let mut schedule = Schedule::new();
        schedule.push(0, Class::Put, 100);
        schedule.push(1, Class::Put, 1);
        schedule.push(2, Class::Background, 1);
        let small = |_, cost| cost < 100;
        assert_eq!(schedule.next(small), Some(2));
        assert_eq!(schedule.next(small), None);
        assert_eq!(schedule.next(|_, _| true), Some(0));
        assert_eq!(schedule.next(small), Some(1));
    }

    #[test]
    fn a_large_transfer_is_not_passed_for_ever_by_small_ones_that_keep_coming() {
        const MIB: u64 = 1 << 20;
        let mut schedule = Schedule::new();
        (0..64).for_each(|index| schedule.push(index, Class::Foreground, MIB));
        schedule.push(64, Class::Put, 4 * MIB);
        let (mut under_way, mut passed) = (VecDeque::new(), 0);
        loop {
            let in_flight = under_way.len() as u64 * MIB;
            let fits = |class, cost| in_flight + cost <= if class == Class::Put { 12 } else { 16 } * MIB;
            match schedule.next(fits) {
                Some(64) => break,
                Some(index) => {
                    under_way.push_back(index);
                    passed += MIB;
                }
                // One ends, and another of its kind is there at once.
                None => schedule.push(under_way.pop_front().expect("something goes"), Class::Foreground, MIB),
            }
            assert!(passed < 100 * MIB, "it still waits");
        }
        assert!(passed >= 16 * MIB, "what fits goes first");
    }

    proptest! {
        #[test]
        fn everything_comes_out_once_in_the_order_of_its_class(
            steps in prop::collection::vec((0_u8..10, 0..Class::ALL.len(), 1_u64..(20 << 20)), 1..200)
        ) {
            let mut schedule = Schedule::new();
            let mut model: [VecDeque<u32>; Class::ALL.len()] = Default::default();
            for (index, (step, class, cost)) in (0_u32..).zip(steps) {
                match step {
                    0..6 => {
                        schedule.push(index, Class::ALL[class], cost);
                        model[class].push_back(index);
                    }
                    6 => {
                        let middle = model[class].len() / 2;
                        if let Some(index) = model[class].remove(middle) {
                            prop_assert!(schedule.remove(index));
                            prop_assert!(!schedule.remove(index));
                        }
                    }
                    _ => {
                        let next = schedule.next(|_, _| true);
                        match model.iter_mut().find(|queue| next.is_some() && queue.front() == next.as_ref()) {
                            Some(queue) => drop(queue.pop_front()),
                            None => prop_assert!(next.is_none() && model.iter().all(VecDeque::is_empty)),
                        }
                    }
                }
                prop_assert_eq!(schedule.len(), model.iter().map(VecDeque::len).sum::<usize>());
            }
        }
    }
}
