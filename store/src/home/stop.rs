//! A start that is told to stop: what waits in it ends, and what it made is removed.

use std::sync::{Arc, Mutex, PoisonError};

/// Tells a start that it is to end. Copies are of one start.
#[derive(Clone, Default)]
pub struct Stop(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    is_told: bool,
    /// What is done then.
    wakes: Vec<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stop").field(&self.is_told()).finish()
    }
}

impl Stop {
    /// Tells it.
    pub fn tell(&self) {
        let wakes = {
            let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            told.is_told = true;
            std::mem::take(&mut told.wakes)
        };
        wakes.into_iter().for_each(|wake| wake());
    }

    /// Whether it was told.
    pub fn is_told(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_told
    }

    /// Has this done once it is told, at once if it was: once for each wait of a start.
    pub fn on_told(&self, wake: impl FnOnce() + Send + 'static) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !told.is_told {
            told.wakes.push(Box::new(wake));
            return;
        }
        drop(told);
        wake();
    }
}
