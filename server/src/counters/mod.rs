//! What a server counts.
//!
//! Every miss has a reason; calls are counted by the path they came by, the method, its class and the tenant, with their bytes;
//! how long they took is a histogram without tenants. Blocks are counted by tenant and model (`usage.rs`). The engine's own
//! counters are read when metrics are asked for (`metrics/text.rs`).

pub(crate) mod executors;
pub(crate) mod histogram;
pub mod history;
pub(crate) mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use histogram::Histogram;
pub use usage::Lookup;
use usage::{Names, REST, UNREGISTERED, Usage, Usages};

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

/// How a call ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// The name of its gRPC code.
    pub code: &'static str,
    /// How long it took.
    pub took: Duration,
    /// How long its first layer took, if it was a read of layers that delivered one.
    pub first_layer: Option<Duration>,
    /// Bytes of blocks that came.
    pub bytes_in: u64,
    /// Bytes of blocks that went.
    pub bytes_out: u64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Calls {
    /// How they ended, by the name of the code.
    pub(crate) ended: BTreeMap<&'static str, u64>,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

/// What a server counts itself.
#[derive(Debug, Default)]
pub struct Metrics {
    pub(crate) counted: Mutex<Counted>,
    /// The last hour.
    pub history: history::History,
    /// What executors said last.
    pub(crate) executors: executors::Executors,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) calls: BTreeMap<CallName, Calls>,
    pub(crate) tenants: Names,
    /// Tenants that are gone: what still ends for them is counted with all others.
    gone: BTreeSet<String>,
    /// Bytes in and out of calls whose tenant is gone.
    past: (u64, u64),
    /// By path, method and class. Not by tenant: each has many buckets.
    pub(crate) took: BTreeMap<(&'static str, &'static str, &'static str), Histogram>,
    /// By path and class.
    pub(crate) first_layer: BTreeMap<(&'static str, &'static str), Histogram>,
    /// By method.
    pub(crate) under_way: BTreeMap<&'static str, u64>,
    /// By method and by what was missing.
    pub(crate) refused: BTreeMap<(&'static str, &'static str), u64>,
    /// What was asked for and what became of it.
    pub(crate) usages: Usages,
    /// Clients of a path, by the mode they are in.
    pub(crate) modes: BTreeMap<&'static str, i64>,
}

impl Counted {
    /// The name under which a tenant is counted.
    fn named<'a>(&self, tenant: &'a str) -> &'a str {
        if self.gone.contains(tenant) { REST } else { tenant }
    }

    fn usage(&mut self, tenant: &str, model: &str) -> &mut Usage {
        let tenant = self.named(tenant);
        self.usages.of(tenant, model)
    }

    fn forget(&mut self, tenant: &str) {
        for (_, calls) in self.calls.extract_if(.., |name, _| name.tenant == tenant) {
            self.past = (self.past.0 + calls.bytes_in, self.past.1 + calls.bytes_out);
        }
        self.usages.forget(tenant);
        self.tenants.forget(tenant);
        self.gone.insert(tenant.to_owned());
    }
}

impl Metrics {
    /// Tells tenants apart no more that are gone, and those again that came.
    pub fn tenants_changed<'a>(
        &self,
        gone: impl Iterator<Item = &'a str>,
        new: impl Iterator<Item = &'a str>,
    ) {
        let mut counted = self.lock();
        gone.for_each(|tenant| counted.forget(tenant));
        for tenant in new {
            counted.gone.remove(tenant);
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Counted> {
        // Counters stay whole whatever panics beside them.
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the history keeps of the counters.
    pub(crate) fn sample(&self) -> history::Sample {
        let mut counted = self.lock();
        let lookups = counted.usages.sample();
        let (bytes_in, bytes_out) = counted.past;
        let (found, asked) = (lookups.here, lookups.asked());
        let mut sample = history::Sample { found, asked, bytes_in, bytes_out, ..history::Sample::default() };
        for calls in counted.calls.values() {
            sample.bytes_in += calls.bytes_in;
            sample.bytes_out += calls.bytes_out;
        }
        sample
    }

    /// A call was let in.
    pub fn call_began(&self, method: &'static str) {
        *self.lock().under_way.entry(method).or_default() += 1;
    }

    /// A call that was let in has ended.
    pub fn call_ended(&self, mut name: CallName, how: Ended) {
        let mut counted = self.lock();
        if let Some(under_way) = counted.under_way.get_mut(name.method) {
            *under_way = under_way.saturating_sub(1);
        }
        counted.took.entry((name.path, name.method, name.class)).or_default().add(how.took);
        if let Some(took) = how.first_layer {
            counted.first_layer.entry((name.path, name.class)).or_default().add(took);
        }
        let tenant = counted.named(&name.tenant).to_owned();
        name.tenant = counted.tenants.told(tenant);
        let calls = counted.calls.entry(name).or_default();
        *calls.ended.entry(how.code).or_default() += 1;
        calls.bytes_in += how.bytes_in;
        calls.bytes_out += how.bytes_out;
    }

    /// A call was not let in, for want of this.
    pub fn refused(&self, method: &'static str, want: &'static str) {
        *self.lock().refused.entry((method, want)).or_default() += 1;
    }

    /// A lookup found this of what it was asked for.
    pub fn looked_up(&self, tenant: &str, model: &str, found: Lookup) {
        self.lock().usage(tenant, model).lookups.add(&found);
    }

    /// A lookup asked for blocks of a model that was never registered, or not since the start.
    pub fn looked_up_unregistered(&self, tenant: &str, blocks: u64) {
        let found = Lookup { unregistered: blocks, ..Lookup::default() };
        self.looked_up(tenant, UNREGISTERED, found);
    }

    /// Counts a read that ended: blocks delivered, and those that were not, by reason.
    pub fn read_ended(&self, tenant: &str, model: &str, delivered: u64, missed: BTreeMap<&'static str, u64>) {
        let mut counted = self.lock();
        let usage = counted.usage(tenant, model);
        usage.delivered += delivered;
        for (reason, blocks) in missed {
            *usage.missed.entry(reason).or_default() += blocks;
        }
    }

    /// A read asked for blocks of a model that was never registered, or not since the start.
    pub fn read_unregistered(&self, tenant: &str, blocks: u64) {
        self.read_ended(tenant, UNREGISTERED, 0, [("REASON_UNKNOWN_NAMESPACE", blocks)].into());
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
        let took = Duration::from_millis(2);
        let how = Ended { code: "OK", took, first_layer: None, bytes_in: 0, bytes_out: 10 };
        metrics.call_ended(name.clone(), how);
        let counted = metrics.lock();
        assert_eq!((counted.under_way["get"], counted.calls[&name].bytes_out), (0, 10));
    }
}
