//! A quantity that tenants share: each has a part that no other can take, and the rest goes by turns.
//!
//! Half of it is set aside in as many equal parts as there are tenants; with one tenant that is the same as all of it. What a
//! tenant has counts as its own up to that, and beyond as of the rest. Who finds too little waits, first come first served:
//! for the rest among all, and with those of its own tenant alone for what is set aside for that one.
//!
//! What is guaranteed to a tenant is what is set aside for it, and no more: one that asks for more than that at once waits
//! for its turn of the rest. A caller that can asks for less ([`Parts::own`]). When the tenants change, it is divided again
//! ([`Parts::divide`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The quantity, in whatever it is counted in.
#[derive(Clone, Debug)]
pub struct Parts(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// What there is, however many tenants there are, and the least for each of them.
    all: u64,
    least: u64,
    waiting_max: usize,
    state: Mutex<State>,
}

/// What is set aside for whom.
#[derive(Debug)]
struct Division {
    /// Each with its place among them.
    tenants: BTreeMap<u32, u64>,
    /// What each of them can have whatever the others do.
    each: u64,
    rest: u64,
    waiting_max: usize,
}

#[derive(Debug)]
struct State {
    division: Division,
    used: BTreeMap<u32, u64>,
    /// Of the rest.
    common: u64,
    /// Those who wait, by tenant and in the order in which they came.
    waiting: BTreeMap<u32, BTreeMap<u64, Waiting>>,
    next: u64,
}

#[derive(Debug)]
struct Waiting {
    amount: u64,
    granted: oneshot::Sender<Part>,
}

/// What a tenant has of it, until it is dropped.
#[derive(Debug)]
pub struct Part {
    parts: Parts,
    tenant: u32,
    amount: u64,
}

/// One that waits, for as long as it lives.
struct Place<'a>(&'a Parts, u32, u64);

impl Parts {
    /// `all` of it for these tenants: at least `least` for each, and at least as much for all others together. Those who
    /// wait share `waiting_max` places evenly.
    pub fn new(all: u64, tenants: &[u32], least: u64, waiting_max: usize) -> Self {
        let division = Division::of((all, least), tenants, waiting_max);
        let state = State { division, used: BTreeMap::new(), common: 0, waiting: BTreeMap::new(), next: 0 };
        Self(Arc::new(Shared { all, least, waiting_max, state: Mutex::new(state) }))
    }

    /// Divides it again, for these tenants. What each has stays its own; who waits for more than it can get now gets none.
    pub fn divide(&self, tenants: &[u32]) {
        let mut state = self.lock();
        let state = &mut *state;
        state.division = Division::of((self.0.all, self.0.least), tenants, self.0.waiting_max);
        let beyond = |(tenant, used): (&u32, &u64)| used.saturating_sub(state.division.own(*tenant));
        state.common = state.used.iter().map(beyond).sum();
        for (tenant, waiting) in &mut state.waiting {
            let most = state.division.most(*tenant);
            waiting.retain(|_, one| one.amount <= most);
        }
        state.waiting.retain(|_, waiting| !waiting.is_empty());
        self.grant(state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing yet, for a tenant.
    pub fn part(&self, tenant: u32) -> Part {
        Part { parts: self.clone(), tenant, amount: 0 }
    }

    /// An amount for a tenant, as soon as it is free; none if no tenant may have as much, or too many of the tenant wait.
    pub async fn take(&self, tenant: u32, amount: u64) -> Option<Part> {
        if let Some(part) = self.try_take(tenant, amount) {
            return Some(part);
        }
        let (granted, mut part) = oneshot::channel();
        // Dropped before the receiver is.
        let _place = self.wait(tenant, Waiting { amount, granted })?;
        // ends: its callers wait for `WAIT`; and those that have parts have deadlines
        (&mut part).await.ok()
    }

    /// An amount for a tenant, if it is free now and no other waits for it.
    pub fn try_take(&self, tenant: u32, amount: u64) -> Option<Part> {
        let mut part = self.part(tenant);
        part.set(amount).then_some(part)
    }

    fn wait(&self, tenant: u32, one: Waiting) -> Option<Place<'_>> {
        if one.amount > self.most(tenant) {
            return None;
        }
        let mut state = self.lock();
        let (number, waiting_max) = (state.next, state.division.waiting_max);
        state.next += 1;
        let waiting = state.waiting.entry(tenant).or_default();
        if waiting.len() >= waiting_max {
            return None;
        }
        waiting.insert(number, one);
        // It may have come back since it was looked for.
        self.grant(&mut state);
        Some(Place(self, tenant, number))
    }

    /// Gives those who wait what there is for them. While one waits for the rest, none that came later has any of it.
    fn grant(&self, state: &mut State) {
        let mut stay = BTreeSet::new();
        loop {
            let first = |(tenant, waiting): (&u32, &BTreeMap<u64, Waiting>)| {
                let (number, one) = waiting.first_key_value()?;
                (!stay.contains(tenant)).then_some((*number, *tenant, one.amount))
            };
            let Some((number, tenant, amount)) = state.waiting.iter().filter_map(first).min() else { return };
            if !state.change(tenant, (0, amount), stay.is_empty()) {
                stay.insert(tenant);
            } else if let Some(one) = state.forget(tenant, number) {
                // A place is given up before its receiver is: it is always there.
                let _ = one.granted.send(Part { parts: self.clone(), tenant, amount });
            }
        }
    }

    /// The most that a tenant gets at once.
    pub fn most(&self, tenant: u32) -> u64 {
        self.lock().division.most(tenant)
    }

    /// What is set aside for a tenant; none if it has the whole to itself, or nothing of its own.
    pub fn own(&self, tenant: u32) -> Option<u64> {
        Some(self.lock().division.own(tenant)).filter(|own| *own > 0)
    }

    /// Where in the whole lies what is set aside for a tenant, which may be nothing, and where the rest.
    pub fn ranges(&self, tenant: u32) -> [Range<u64>; 2] {
        let division = &self.lock().division;
        let count = division.tenants.len() as u64;
        let (begin, shared) =
            (division.tenants.get(&tenant).map(|place| place * division.each), count * division.each);
        [begin.map_or(0..0, |begin| begin..begin + division.each), shared..shared + division.rest]
    }

    /// What each tenant has beyond what is set aside for it, of those that have something beyond it.
    pub fn beyond(&self) -> BTreeMap<u32, u64> {
        let state = self.lock();
        let beyond = |(tenant, used): (&u32, &u64)| {
            let beyond = used.saturating_sub(state.division.own(*tenant));
            (beyond > 0).then_some((*tenant, beyond))
        };
        state.used.iter().filter_map(beyond).collect()
    }

    /// What is free, set aside or not, and how many wait.
    pub fn left(&self) -> (u64, usize) {
        (self.all() - self.used(), self.lock().waiting.values().map(BTreeMap::len).sum())
    }

    /// What all together have.
    pub fn used(&self) -> u64 {
        self.lock().used.values().sum()
    }

    /// All of it.
    pub fn all(&self) -> u64 {
        let division = &self.lock().division;
        division.rest + division.each * division.tenants.len() as u64
    }
}

impl Division {
    fn of((all, least): (u64, u64), tenants: &[u32], waiting_max: usize) -> Self {
        let count = tenants.len() as u64;
        let all = all.max(least * (count + 1));
        let each = if count > 1 && !kvarts_layout::planted!("nothing-set-aside") {
            (all / 2 / count).max(least)
        } else {
            0
        };
        Self {
            tenants: tenants.iter().copied().collect::<BTreeSet<u32>>().into_iter().zip(0..).collect(),
            each,
            rest: all - each * count,
            waiting_max: (waiting_max / tenants.len().max(1)).max(1),
        }
    }

    fn own(&self, tenant: u32) -> u64 {
        if self.tenants.contains_key(&tenant) { self.each } else { 0 }
    }

    fn most(&self, tenant: u32) -> u64 {
        self.rest + self.own(tenant)
    }
}

impl State {
    /// Changes what a tenant has, if there is so much: of the rest only where it may have more of that. Less is always
    /// granted.
    fn change(&mut self, tenant: u32, (from, to): (u64, u64), of_rest: bool) -> bool {
        let before = self.used.get(&tenant).copied().unwrap_or_default();
        let Some(after) = before.saturating_sub(from).checked_add(to) else { return false };
        let beyond = |used: u64| used.saturating_sub(self.division.own(tenant));
        let common = self.common.saturating_sub(beyond(before)).saturating_add(beyond(after));
        if common > self.common && (!of_rest || common > self.division.rest) {
            return false;
        }
        self.common = common;
        match after {
            0 => self.used.remove(&tenant),
            _ => self.used.insert(tenant, after),
        };
        true
    }

    fn forget(&mut self, tenant: u32, number: u64) -> Option<Waiting> {
        let waiting = self.waiting.get_mut(&tenant)?;
        let one = waiting.remove(&number);
        if waiting.is_empty() {
            self.waiting.remove(&tenant);
        }
        one
    }
}

impl Part {
    /// How much it is.
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Changes the amount; false, and as before, if there is not as much now or another waits for it.
    pub fn set(&mut self, amount: u64) -> bool {
        let mut state = self.parts.lock();
        let (first, change) = (state.waiting.is_empty(), (self.amount, amount));
        let done = amount <= self.amount || !state.waiting.contains_key(&self.tenant);
        let done = done && state.change(self.tenant, change, first);
        if done && amount < self.amount && !first {
            self.parts.grant(&mut state);
        }
        drop(state);
        if done {
            self.amount = amount;
        }
        done
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Less is always granted.
        self.set(0);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if state.forget(self.1, self.2).is_some() {
            // What came after it has its turn.
            self.0.grant(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::blocking::block_on;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    type Taking<'a> = Pin<Box<dyn Future<Output = Option<Part>> + 'a>>;

    fn poll(taking: &mut Taking<'_>) -> Poll<Option<Part>> {
        taking.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn whatever_some_tenants_take_each_other_one_gets_its_part() {
        for count in [2, 3, 5] {
            let tenants: Vec<u32> = (1..=count).collect();
            let parts = Parts::new(600, &tenants, 0, 1000);
            let last = tenants.len() as u32;
            // All but the last take all that they get.
            let mut held = Vec::new();
            while let Some(part) = (1..last).find_map(|tenant| parts.try_take(tenant, 7)) {
                held.push(part);
            }
            let own = 600 / 2 / u64::from(count);
            let mut got = 0;
            while let Some(part) = parts.try_take(last, 7) {
                held.push(part);
                got += 7;
            }
            assert!(got + 7 > own, "{count} tenants: {got} of {own}");
        }
    }

    #[test]
    fn who_waits_is_served_in_turn_and_a_small_wish_does_not_pass_a_large_one() {
        let parts = Parts::new(10, &[1], 0, 100);
        let held = block_on(parts.take(1, 8)).unwrap();
        let mut large: Taking<'_> = Box::pin(parts.take(1, 6));
        assert!(poll(&mut large).is_pending());
        let mut small: Taking<'_> = Box::pin(parts.take(1, 1));
        assert!(poll(&mut small).is_pending(), "the large one was first");
        assert_eq!(parts.left().1, 2);
        drop(held);
        let Poll::Ready(Some(six)) = poll(&mut large) else { panic!("it was its turn") };
        assert!(matches!(poll(&mut small), Poll::Ready(Some(_))));
        drop((large, small, six));
        assert_eq!(parts.left(), (10, 0));
    }

    #[test]
    fn who_waits_no_longer_gives_up_its_turn_and_its_place() {
        let parts = Parts::new(10, &[1, 2], 0, 4);
        let held = [parts.try_take(1, 5).unwrap(), parts.try_take(1, 2).unwrap()];
        let mut waiting: Vec<Taking<'_>> = (0..2).map(|_| Box::pin(parts.take(1, 4)) as Taking<'_>).collect();
        assert!(waiting.iter_mut().all(|one| poll(one).is_pending()));
        assert!(
            matches!(poll(&mut (Box::pin(parts.take(1, 4)) as _)), Poll::Ready(None)),
            "places are bounded"
        );
        assert!(parts.try_take(2, 2).is_some(), "others have theirs");
        let mut other: Taking<'_> = Box::pin(parts.take(2, 5));
        assert!(poll(&mut other).is_pending(), "a tenant's own waiters have places of their own");
        drop(waiting);
        drop(held);
        assert!(matches!(poll(&mut other), Poll::Ready(Some(_))));
        drop(other);
        assert_eq!(parts.left(), (10, 0));
    }

    #[test]
    fn a_tenant_that_comes_later_has_its_part_like_the_others() {
        let parts = Parts::new(600, &[1, 2], 0, 4);
        let held = [parts.try_take(1, 450).unwrap(), parts.try_take(2, 100).unwrap()];
        let mut waiting: Taking<'_> = Box::pin(parts.take(2, 440));
        assert!(poll(&mut waiting).is_pending());
        parts.divide(&[1, 2, 3]);
        assert_eq!((parts.all(), parts.used(), parts.own(3)), (600, 550, Some(100)));
        assert!(matches!(poll(&mut waiting), Poll::Ready(None)), "no tenant gets so much any more");
        // The first tenant has more than it would get now. Until it gives that back, only the third tenant gets anything.
        assert!(parts.try_take(1, 1).is_none() && parts.try_take(2, 1).is_none());
        let third = parts.try_take(3, 100).unwrap();
        assert!(parts.try_take(3, 1).is_none());
        drop(held);
        assert!(parts.try_take(3, 300).is_some());
        drop((third, waiting));
        assert_eq!(parts.left(), (600, 0));
        // A tenant that left may have what belongs to no tenant.
        parts.divide(&[1, 2]);
        assert_eq!((parts.own(3), parts.most(3), parts.own(1)), (None, 300, Some(150)));
    }

    #[test]
    fn what_tenants_have_beyond_their_new_parts_is_of_the_rest_from_then_on() {
        let parts = Parts::new(600, &[1, 2], 0, 4);
        let held = [parts.try_take(1, 150).unwrap(), parts.try_take(2, 150).unwrap()];
        parts.divide(&[1, 2, 3]);
        // A third of a half is each one's own now, so of the two 50 each are of the rest.
        assert!(parts.try_take(3, 301).is_none(), "more than there is");
        let third = parts.try_take(3, 300).unwrap();
        assert_eq!(parts.used(), 600);
        drop((held, third));
        assert!(parts.try_take(3, 400).is_some() && parts.left() == (600, 0));
    }

    #[test]
    fn more_than_anybody_gets_is_refused_at_once() {
        let parts = Parts::new(10, &[1, 2], 0, 4);
        assert_eq!((parts.most(1), parts.all()), (8, 10));
        assert!(block_on(parts.take(1, 9)).is_none() && block_on(parts.take(1, u64::MAX)).is_none());
        assert!(block_on(parts.take(3, 7)).is_none(), "nothing is set aside for it");
        assert_eq!(parts.left(), (10, 0));
    }

    #[test]
    fn where_there_is_little_each_gets_the_least() {
        let parts = Parts::new(2, &[1, 2, 3], 1, 300);
        let all: Vec<_> = (1..=3).map(|tenant| parts.try_take(tenant, 1).unwrap()).collect();
        assert!(parts.try_take(1, 1).is_some(), "and one for the first that comes");
        assert_eq!((parts.all(), all.len()), (4, 3));
    }

    #[test]
    fn a_third_tenant_finds_its_part_though_two_take_all_they_can() {
        let parts = Parts::new(600, &[1, 2, 3], 0, 1);
        let mut all: Vec<Part> = Vec::new();
        for tenant in [1, 2, 1, 2] {
            let mut part = parts.part(tenant);
            while part.set(part.amount() + 10) {}
            all.push(part);
        }
        assert_eq!(parts.used(), 500, "two have their own and what is common");
        assert!(parts.try_take(1, 1).is_none() && parts.try_take(2, 1).is_none());
        let third = parts.try_take(3, 100).expect("what is set aside for it");
        assert!(parts.try_take(3, 1).is_none());
        drop((all, third));
        assert_eq!(parts.used(), 0);
        assert!(parts.try_take(3, 400).is_some() && parts.try_take(3, 401).is_none());
    }

    #[test]
    fn a_single_tenant_has_all_of_it_and_numbers_do_not_overflow() {
        let parts = Parts::new(7, &[0], 0, 1);
        assert!(parts.try_take(0, 8).is_none() && parts.try_take(0, u64::MAX).is_none());
        let all = parts.try_take(0, 7).unwrap();
        assert!(parts.try_take(0, 1).is_none() && parts.try_take(0, u64::MAX).is_none());
        drop(all);
        assert_eq!(parts.used(), 0);
    }
}
