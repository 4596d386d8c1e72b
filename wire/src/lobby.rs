//! Connections that have not said yet what they want: a number of places, and where all are taken the one that has been there
//! longest loses its own to the next. A connection that says nothing keeps no other out.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Places for connections.
#[derive(Clone, Debug)]
pub struct Lobby(Arc<Places>);

#[derive(Debug)]
struct Places {
    most: usize,
    taken: Mutex<Taken>,
}

/// Those that are taken, in the order in which they were.
#[derive(Debug, Default)]
struct Taken {
    next: u64,
    guests: BTreeMap<u64, Arc<Notify>>,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Guest {
    lobby: Lobby,
    number: u64,
    lost: Arc<Notify>,
}

impl Lobby {
    /// This number of places, one at least.
    pub fn new(most: usize) -> Self {
        Self(Arc::new(Places { most: most.max(1), taken: Mutex::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place: one that is free, or that of whom has had one for longest.
    pub fn enter(&self) -> Guest {
        let lost = Arc::new(Notify::new());
        let mut taken = self.lock();
        if taken.guests.len() >= self.0.most
            && let Some((_, oldest)) = taken.guests.pop_first()
        {
            // Also if it is not waited for yet.
            oldest.notify_one();
        }
        let number = taken.next;
        taken.next += 1;
        taken.guests.insert(number, Arc::clone(&lost));
        Guest { lobby: self.clone(), number, lost }
    }
}

impl Guest {
    /// What `work` gives, or nothing if another got the place before.
    pub async fn unless_lost<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = self.lost.notified() => None,
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.lobby.lock().guests.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_next_one_gets_the_place_of_whom_has_waited_longest_and_those_that_left_have_none() {
        let lobby = Lobby::new(2);
        let (first, second) = (lobby.enter(), lobby.enter());
        assert_eq!(first.unless_lost(async { 1 }).await, Some(1));
        let third = lobby.enter();
        assert_eq!(first.unless_lost(std::future::pending::<()>()).await, None);
        drop(second);
        let fourth = lobby.enter();
        for guest in [&third, &fourth] {
            assert_eq!(guest.unless_lost(std::future::ready(())).await, Some(()));
        }
        // One that has lost its place leaves no gap behind when it goes.
        drop(first);
        let fifth = lobby.enter();
        assert_eq!(third.unless_lost(std::future::pending::<()>()).await, None);
        drop((fourth, fifth));
        assert!(lobby.lock().guests.len() <= 1, "{:?}", lobby.lock().guests.len());
    }
}
