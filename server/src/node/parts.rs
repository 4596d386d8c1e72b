//! A quantity that tenants share: each has a part of it that nobody else can take, and the rest is whose turn it is.
//!
//! Half of it is cut into as many equal parts as there are tenants; with one tenant all of it is the rest. Who finds both
//! used up waits, first come first served, and with those of its own tenant alone for that tenant's part.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The quantity, in whatever it is counted in.
#[derive(Debug)]
pub struct Parts {
    own: BTreeMap<u32, Arc<Semaphore>>,
    each: usize,
    rest: Arc<Semaphore>,
    rest_all: usize,
    waiting: Waiting,
    waiting_max: usize,
}

/// Those who wait, by tenant.
#[derive(Clone, Default, Debug)]
struct Waiting(Arc<Mutex<BTreeMap<u32, usize>>>);

/// Some of it, until it is dropped.
#[derive(Debug)]
pub struct Part {
    _taken: OwnedSemaphorePermit,
}

/// One that waits, for as long as it lives.
struct Place(Waiting, u32);

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, usize>> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.0.lock();
        if let Some(count) = waiting.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.1);
            }
        }
    }
}

impl Parts {
    /// `all` of it for these tenants: at least `least` for each, and at least as much for all others together. Those who
    /// wait share `waiting_max` places evenly.
    pub fn new(all: usize, tenants: &[u32], least: usize, waiting_max: usize) -> Self {
        let count = tenants.len();
        let all = all.max(least * (count + 1)).min(Semaphore::MAX_PERMITS);
        let each = if count > 1 { (all / 2 / count).max(least) } else { 0 };
        let own = tenants.iter().filter(|_| each > 0).map(|tenant| (*tenant, Arc::new(Semaphore::new(each))));
        let own = own.collect::<BTreeMap<_, _>>();
        let rest_all = all - each * own.len();
        let waiting_max = (waiting_max / count.max(1)).max(1);
        let rest = Arc::new(Semaphore::new(rest_all));
        Self { own, each, rest, rest_all, waiting: Waiting::default(), waiting_max }
    }

    /// The most that anybody gets at once.
    pub fn most(&self) -> usize {
        self.rest_all.max(self.each)
    }

    /// So much for a tenant, as soon as it is there; none if it is more than anybody gets, or too many of the tenant wait.
    pub async fn take(&self, tenant: u32, count: u32) -> Option<Part> {
        if let Some(part) = self.try_take(tenant, count) {
            return Some(part);
        }
        if count as usize > self.most() {
            return None;
        }
        let _place = self.place(tenant)?;
        let own = self.own.get(&tenant).filter(|_| count as usize <= self.each);
        let rest = async {
            if count as usize > self.rest_all {
                std::future::pending::<()>().await;
            }
            Arc::clone(&self.rest).acquire_many_owned(count).await
        };
        let taken = match own {
            None => rest.await,
            Some(own) => tokio::select! {
                biased;
                taken = Arc::clone(own).acquire_many_owned(count) => taken,
                taken = rest => taken,
            },
        };
        taken.ok().map(|taken| Part { _taken: taken })
    }

    /// So much for a tenant, if it is there now and nobody waits for it.
    pub fn try_take(&self, tenant: u32, count: u32) -> Option<Part> {
        let own = self.own.get(&tenant);
        let of_own = own.and_then(|own| Arc::clone(own).try_acquire_many_owned(count).ok());
        let taken = of_own.or_else(|| Arc::clone(&self.rest).try_acquire_many_owned(count).ok());
        taken.map(|taken| Part { _taken: taken })
    }

    fn place(&self, tenant: u32) -> Option<Place> {
        let mut waiting = self.waiting.lock();
        let count = waiting.entry(tenant).or_default();
        if *count >= self.waiting_max {
            return None;
        }
        *count += 1;
        Some(Place(self.waiting.clone(), tenant))
    }

    /// What is left of it for anybody or somebody, and how many wait.
    pub fn left(&self) -> (usize, usize) {
        let own: usize = self.own.values().map(|own| own.available_permits()).sum();
        (own + self.rest.available_permits(), self.waiting.lock().values().sum())
    }

    /// All of it.
    pub fn all(&self) -> usize {
        self.rest_all + self.each * self.own.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_store::rt::blocking::block_on;
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
            let own = 600 / 2 / count as usize;
            let mut got = 0;
            while parts.try_take(last, 7).map(std::mem::forget).is_some() {
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
    fn more_than_anybody_gets_is_refused_at_once() {
        let parts = Parts::new(10, &[1, 2], 0, 4);
        assert_eq!((parts.most(), parts.all()), (6, 10));
        assert!(block_on(parts.take(1, 7)).is_none());
    }

    #[test]
    fn where_there_is_little_each_gets_the_least() {
        let parts = Parts::new(2, &[1, 2, 3], 1, 300);
        let all: Vec<_> = (1..=3).map(|tenant| parts.try_take(tenant, 1).unwrap()).collect();
        assert!(parts.try_take(1, 1).is_some(), "and one for whoever comes first");
        assert_eq!((parts.all(), all.len()), (4, 3));
    }
}
