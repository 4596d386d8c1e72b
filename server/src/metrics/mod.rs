//! What is counted, and how it is told to Prometheus.
//!
//! Every miss has a reason; calls are counted by the path they came by, the method, its class and the tenant, with bytes and a
//! histogram of how long they took. The engine's own counters are read when metrics are asked for.

mod cluster;
mod histogram;
pub mod http;
mod text;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use histogram::Histogram;

/// By what calls are told apart.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CallName {
    /// The way they came: grpc, or local.
    pub path: &'static str,
    /// What was called.
    pub method: &'static str,
    /// What it was for: a class of the engine, or none.
    pub class: &'static str,
    /// For whom.
    pub tenant: String,
}

#[derive(Debug, Default)]
struct Calls {
    /// How they ended, by the description of the code.
    ended: BTreeMap<&'static str, u64>,
    took: Histogram,
    bytes_in: u64,
    bytes_out: u64,
}

/// What a server counts itself.
#[derive(Debug, Default)]
pub struct Metrics(Mutex<Counted>);

#[derive(Debug, Default)]
struct Counted {
    calls: BTreeMap<CallName, Calls>,
    /// By method.
    under_way: BTreeMap<&'static str, u64>,
    /// By method and by what was missing.
    refused: BTreeMap<(&'static str, &'static str), u64>,
    /// Blocks that were asked for and not delivered, by reason.
    misses: BTreeMap<&'static str, u64>,
    /// Blocks that were delivered.
    hits: u64,
    /// Clients of a path, by the mode they are in.
    modes: BTreeMap<&'static str, i64>,
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        // Counters stay whole whatever panics beside them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call was let in.
    pub fn call_began(&self, method: &'static str) {
        *self.lock().under_way.entry(method).or_default() += 1;
    }

    /// A call that was let in has ended. `bytes` are those of blocks: in and out.
    pub fn call_ended(&self, name: &CallName, how: &'static str, took: Duration, bytes: (u64, u64)) {
        let mut counted = self.lock();
        if let Some(under_way) = counted.under_way.get_mut(name.method) {
            *under_way = under_way.saturating_sub(1);
        }
        let calls = match counted.calls.get_mut(name) {
            Some(calls) => calls,
            None => counted.calls.entry(name.clone()).or_default(),
        };
        *calls.ended.entry(how).or_default() += 1;
        calls.took.add(took);
        calls.bytes_in += bytes.0;
        calls.bytes_out += bytes.1;
    }

    /// A call was not let in, for want of this.
    pub fn refused(&self, method: &'static str, want: &'static str) {
        *self.lock().refused.entry((method, want)).or_default() += 1;
    }

    /// Blocks that were asked for and not delivered.
    pub fn missed(&self, reason: &'static str, blocks: u64) {
        *self.lock().misses.entry(reason).or_default() += blocks;
    }

    /// Counts a read that ended: blocks delivered, and misses by reason.
    pub fn read_ended(&self, delivered: u64, missed: BTreeMap<&'static str, u64>) {
        let mut counted = self.lock();
        for (reason, blocks) in missed {
            *counted.misses.entry(reason).or_default() += blocks;
        }
        counted.hits += delivered;
    }

    /// Blocks that were delivered.
    pub fn hit(&self, blocks: u64) {
        self.lock().hits += blocks;
    }

    /// A client came (1) or went (-1), in this mode.
    pub fn client(&self, mode: &'static str, change: i64) {
        *self.lock().modes.entry(mode).or_default() += change;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_under_way_until_it_ends() {
        let metrics = Metrics::default();
        let name = CallName { path: "grpc", method: "get", class: "foreground", tenant: "a".to_owned() };
        metrics.call_began("get");
        assert_eq!(metrics.lock().under_way["get"], 1);
        metrics.call_ended(&name, "ok", Duration::from_millis(2), (0, 10));
        let counted = metrics.lock();
        assert_eq!((counted.under_way["get"], counted.calls[&name].bytes_out), (0, 10));
    }
}
