//! Which production of each block several reads of it are about.

use std::sync::{Arc, PoisonError};

use kvarts_layout::OriginId;

use crate::sync::Mutex;

/// What reads share that together are one: of each block they give bytes of one production only, the first that any of
/// them met, or a miss. Without it a block that is taken out and put anew by another producer between two reads would be
/// a mix, each part of it as it was put.
#[derive(Debug)]
pub struct Origins(Mutex<Vec<Option<OriginId>>>);

impl Origins {
    /// Of so many blocks, whichever production of each is met first.
    pub fn any(blocks: usize) -> Arc<Self> {
        Self::of(vec![None; blocks])
    }

    /// Of blocks of which some were met before.
    pub fn of(met: Vec<Option<OriginId>>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(met)))
    }

    /// What was met so far.
    pub fn met(&self) -> Vec<Option<OriginId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether bytes of this production of a block may be given: notes it if it is the first. No bytes of a block that
    /// there is not.
    pub fn admit(&self, block: usize, origin: OriginId) -> bool {
        let mut met = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        met.get_mut(block).is_some_and(|met| *met.get_or_insert(origin) == origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_production_that_is_met_is_the_only_one() {
        let origins = Origins::any(2);
        let [one, other] = [OriginId([1; 16]), OriginId([2; 16])];
        assert!(origins.admit(1, one) && origins.admit(1, one) && !origins.admit(1, other));
        assert!(!origins.admit(2, one), "there is no such block");
        assert_eq!(origins.met(), [None, Some(one)]);
        assert!(!Origins::of(origins.met()).admit(1, other) && origins.admit(0, other));
    }
}
