//! Prefill times that requests bring: a table is made once from the same message, and remembered.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_planner::cost::Times;
use kvarts_wire::fault::Outcome;
use kvarts_wire::limits::TIMES_KEPT;
use kvarts_wire::{plans, proto};
use prost::Message;

/// The last tables that were asked for, by the digest of their message. They say nothing of whose they are: a tenant who
/// has the same message has the same times.
#[derive(Debug, Default)]
pub struct KnownTimes(Mutex<VecDeque<([u8; 32], Arc<Times>)>>);

impl KnownTimes {
    /// The times of a message.
    pub fn of(&self, wire: Option<&proto::PrefillTimes>) -> Outcome<Arc<Times>> {
        let Some(message) = wire else { return plans::times(None).map(Arc::new) };
        let digest = *blake3::hash(&message.encode_to_vec()).as_bytes();
        let known = |kept: &VecDeque<([u8; 32], Arc<Times>)>| {
            kept.iter().find(|(of, _)| *of == digest).map(|(_, times)| Arc::clone(times))
        };
        if let Some(times) = known(&self.0.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(times);
        }
        let times = Arc::new(plans::times(wire)?);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.truncate(TIMES_KEPT - 1);
        kept.push_front((digest, Arc::clone(&times)));
        Ok(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_made_once_and_the_oldest_is_forgotten() {
        let message = |ms: u32| proto::PrefillTimes {
            samples: vec![proto::prefill_times::Sample { cached: 0, new: 100, ms: f64::from(ms) }],
            roofline: None,
        };
        let known = KnownTimes::default();
        let first = known.of(Some(&message(1))).unwrap();
        assert!(Arc::ptr_eq(&first, &known.of(Some(&message(1))).unwrap()));
        for ms in 2..2 + TIMES_KEPT as u32 {
            known.of(Some(&message(ms))).unwrap();
        }
        assert!(!Arc::ptr_eq(&first, &known.of(Some(&message(1))).unwrap()));
        assert!(known.0.lock().unwrap().len() <= TIMES_KEPT);
        assert!(known.of(None).is_err() && known.of(Some(&message(0))).is_err());
    }
}
