//! Turns of puts: what clients upload at once fits into memory, however many they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::Memory;
use crate::grpc::limits::{MEMORY_PER_PUT, PUTS_WAITING};

/// The turns.
#[derive(Debug)]
pub struct Puts {
    turns: Semaphore,
    waiting: Arc<AtomicUsize>,
}

/// One that waits, for as long as it lives.
struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Puts {
    /// As many as the memory of requests has room for.
    pub fn new(memory: &Memory) -> Self {
        let total: usize = memory.usage().iter().map(|usage| usage.total).sum();
        let turns = usize::try_from(total as u64 / MEMORY_PER_PUT).unwrap_or(usize::MAX).max(2);
        Self { turns: Semaphore::new(turns.min(Semaphore::MAX_PERMITS)), waiting: Arc::default() }
    }

    /// A turn as soon as there is one; none if too many wait already.
    pub async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        if let Ok(turn) = self.turns.try_acquire() {
            return Some(turn);
        }
        let waiting = Waiting(Arc::clone(&self.waiting));
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= PUTS_WAITING {
            return None;
        }
        let turn = self.turns.acquire().await.ok();
        drop(waiting);
        turn
    }

    /// Turns that are left, and puts that wait for one.
    pub fn left(&self) -> (usize, usize) {
        (self.turns.available_permits(), self.waiting.load(Ordering::Relaxed))
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
        let puts = Puts::new(&Memory::new(16 << 20, 4096).unwrap());
        let turns: Vec<_> = (0..4).map(|_| block_on(puts.turn()).unwrap()).collect();
        let mut waiting: Vec<_> = (0..PUTS_WAITING).map(|_| Box::pin(puts.turn())).collect();
        let mut context = Context::from_waker(Waker::noop());
        for one in &mut waiting {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(puts.left(), (0, PUTS_WAITING));
        assert!(matches!(pin!(puts.turn()).as_mut().poll(&mut context), Poll::Ready(None)));
        assert_eq!(puts.left(), (0, PUTS_WAITING));
        drop(turns);
        drop(waiting);
        assert_eq!(puts.left(), (4, 0));
    }
}
