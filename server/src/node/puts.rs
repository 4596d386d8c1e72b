//! Turns of puts: what clients upload at once fits into memory, however many they are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::Memory;
use crate::grpc::limits::{MEMORY_PER_PUT, PUTS_WAITING};

/// The turns.
#[derive(Debug)]
pub struct Puts {
    all: Lane,
    /// What each tenant may have of them, where there are several.
    shares: BTreeMap<u32, Lane>,
}

/// Turns, and places to wait for one.
#[derive(Debug)]
struct Lane {
    turns: Semaphore,
    waiting: Arc<AtomicUsize>,
    waiting_max: usize,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    _of_share: Option<SemaphorePermit<'a>>,
    _of_all: SemaphorePermit<'a>,
}

/// One that waits, for as long as it lives.
struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Lane {
    fn new(turns: usize, waiting_max: usize) -> Self {
        let turns = Semaphore::new(turns.min(Semaphore::MAX_PERMITS));
        Self { turns, waiting: Arc::default(), waiting_max }
    }

    /// A place to wait, if there is one.
    fn place(&self) -> Option<Waiting> {
        let waiting = Waiting(Arc::clone(&self.waiting));
        (self.waiting.fetch_add(1, Ordering::Relaxed) < self.waiting_max).then_some(waiting)
    }

    /// A turn as soon as there is one; none if too many wait already.
    async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        if let Ok(turn) = self.turns.try_acquire() {
            return Some(turn);
        }
        let _waiting = self.place()?;
        self.turns.acquire().await.ok()
    }
}

impl Puts {
    /// As many as the memory of requests has room for. Where there are several tenants, each has at most half of the turns
    /// and of the places to wait, so that what one of them uploads leaves room for the others.
    pub fn new(memory: &Memory, tenants: &[u32]) -> Self {
        let total: usize = memory.usage().iter().map(|usage| usage.total).sum();
        let turns = usize::try_from(total as u64 / MEMORY_PER_PUT).unwrap_or(usize::MAX).max(2);
        // One that waits for its own share takes no place of others.
        let share = |tenant: &u32| (*tenant, Lane::new(turns / 2, PUTS_WAITING / 2));
        let shares = if tenants.len() > 1 { tenants.iter().map(share).collect() } else { BTreeMap::new() };
        Self { all: Lane::new(turns, PUTS_WAITING), shares }
    }

    /// A turn for a tenant as soon as there is one; none if too many wait already.
    pub async fn turn(&self, tenant: u32) -> Option<Turn<'_>> {
        let of_share = match self.shares.get(&tenant) {
            Some(share) => Some(share.turn().await?),
            None => None,
        };
        Some(Turn { _of_share: of_share, _of_all: self.all.turn().await? })
    }

    /// Turns that are left, and puts that wait for one.
    pub fn left(&self) -> (usize, usize) {
        let waiting = |lane: &Lane| lane.waiting.load(Ordering::Relaxed);
        (
            self.all.turns.available_permits(),
            waiting(&self.all) + self.shares.values().map(waiting).sum::<usize>(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_store::rt::blocking::block_on;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn there_are_as_many_turns_as_fit_and_a_bounded_queue() {
        let puts = Puts::new(&Memory::new(16 << 20, 4096).unwrap(), &[0]);
        let turns: Vec<_> = (0..4).map(|_| block_on(puts.turn(0)).unwrap()).collect();
        let mut waiting: Vec<_> = (0..PUTS_WAITING).map(|_| Box::pin(puts.turn(0))).collect();
        let mut context = Context::from_waker(Waker::noop());
        for one in &mut waiting {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(puts.left(), (0, PUTS_WAITING));
        assert!(matches!(pin!(puts.turn(0)).as_mut().poll(&mut context), Poll::Ready(None)));
        assert_eq!(puts.left(), (0, PUTS_WAITING));
        drop(turns);
        drop(waiting);
        assert_eq!(puts.left(), (4, 0));
    }

    #[test]
    fn no_tenant_takes_more_than_half_of_the_turns_and_places() {
        let puts = Puts::new(&Memory::new(16 << 20, 4096).unwrap(), &[1, 2]);
        let mut context = Context::from_waker(Waker::noop());
        let turns: Vec<_> = (0..2).map(|_| block_on(puts.turn(1)).unwrap()).collect();
        let mut waiting: Vec<_> = (0..PUTS_WAITING / 2).map(|_| Box::pin(puts.turn(1))).collect();
        for one in &mut waiting {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        assert!(matches!(pin!(puts.turn(1)).as_mut().poll(&mut context), Poll::Ready(None)));
        let others: Vec<_> = (0..2).map(|_| block_on(puts.turn(2)).unwrap()).collect();
        assert_eq!(puts.left(), (0, PUTS_WAITING / 2));
        drop(turns);
        assert!(matches!(waiting[0].as_mut().poll(&mut context), Poll::Ready(Some(_))), "its own came back");
        drop((waiting, others));
        assert_eq!(puts.left(), (4, 0));
    }
}
