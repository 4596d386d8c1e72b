//! The last hour, so that the status page shows what was before it was opened: a few counters, as they were every ten seconds.
//! Fixed in size. Nothing of it outlives the server; longer histories are Prometheus's.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

/// Between two samples.
pub(crate) const EVERY: Duration = Duration::from_secs(10);
/// An hour of them, and the one before it.
const SAMPLES_MAX: usize = 361;

/// Counters since the server's start, at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    /// Blocks that lookups asked for.
    pub asked: u64,
    /// Those of them that were here.
    pub found: u64,
    /// Bytes of blocks that calls brought.
    pub bytes_in: u64,
    /// Bytes of blocks that calls took away.
    pub bytes_out: u64,
    /// Live bytes on disk then; no counter.
    pub live: u64,
}

/// Samples with their times, in milliseconds since 1970, the oldest first.
#[derive(Debug, Default)]
pub struct History(Mutex<VecDeque<(u64, Sample)>>);

impl History {
    pub(crate) fn add(&self, now_ms: u64, sample: Sample) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while all.len() >= SAMPLES_MAX {
            all.pop_front();
        }
        all.push_back((now_ms, sample));
    }

    /// All of them: rows of the time in seconds since 1970 and what is named in `columns`.
    pub fn told(&self) -> Value {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let row = |&(ms, one): &(u64, Sample)| {
            json!([ms / 1000, one.asked, one.found, one.bytes_in, one.bytes_out, one.live])
        };
        json!({
            "every_seconds": EVERY.as_secs(),
            "columns": ["unix_seconds", "asked", "found", "bytes_in", "bytes_out", "live_bytes"],
            "samples": all.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_remembered_and_no_more() {
        let history = History::default();
        for n in 0..1000 {
            history.add(n * 10_000, Sample { asked: n, live: 7, ..Sample::default() });
        }
        let told = history.told();
        let samples = told["samples"].as_array().unwrap();
        assert_eq!(samples.len(), SAMPLES_MAX);
        assert_eq!(samples[0], json!([6390, 639, 0, 0, 0, 7]));
        assert_eq!(samples[SAMPLES_MAX - 1], json!([9990, 999, 0, 0, 0, 7]));
    }
}
