//! The last reads by layers, and when each layer came: for the status page. Bounded in number, and each in its layers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvarts_layout::BlockKey;
use kvarts_layout::identity::TenantSalt;

use super::Model;

/// Reads that are remembered.
const READS_MAX: usize = 32;
/// Layers of a read that are told apart.
const LAYERS_MAX: usize = 512;

/// A read by layers that has ended.
#[derive(Clone, Debug)]
pub struct LayeredRead {
    /// When it began, in milliseconds since 1970.
    pub began_ms: u64,
    /// How its bytes went: grpc, or local.
    pub path: &'static str,
    /// For whom.
    pub tenant: String,
    /// Of which model.
    pub model: Arc<Model>,
    /// The first block that was asked for.
    pub first: BlockKey,
    /// How many were.
    pub blocks: usize,
    /// How it ended, as gRPC calls it.
    pub code: &'static str,
    /// When each layer had come, since it began; none of a layer that did not.
    pub layers: Vec<Option<Duration>>,
}

/// The layers of one call, while they come.
#[derive(Debug, Default)]
pub struct LayerTimes {
    /// What is read.
    of: OnceLock<(u64, Arc<Model>, BlockKey, usize)>,
    first: OnceLock<Duration>,
    came: Mutex<Vec<Option<Duration>>>,
}

impl LayerTimes {
    /// What is read from now on. Said once.
    pub fn read_begins(&self, now_ms: u64, model: &Arc<Model>, first: BlockKey, blocks: usize) {
        let _ = self.of.set((now_ms, Arc::clone(model), first, blocks));
    }

    /// A layer came. One that comes in pieces has come with the last of them.
    pub fn came(&self, layer: u32, after: Duration) {
        self.first.get_or_init(|| after);
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        let layer = layer as usize;
        if layer >= came.len() && layer < LAYERS_MAX {
            came.resize(layer + 1, None);
        }
        if let Some(at) = came.get_mut(layer) {
            *at = Some(after);
        }
    }

    /// When the first one came.
    pub fn first(&self) -> Option<Duration> {
        self.first.get().copied()
    }

    /// The read, if any layer of it came.
    pub fn take_read(&mut self, path: &'static str, tenant: &str, code: &'static str) -> Option<LayeredRead> {
        let layers = std::mem::take(self.came.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (began_ms, model, first, blocks) = self.of.take().filter(|_| !layers.is_empty())?;
        Some(LayeredRead { began_ms, path, tenant: tenant.to_owned(), model, first, blocks, code, layers })
    }
}

/// The last of all.
#[derive(Debug, Default)]
pub struct RecentReads(Mutex<VecDeque<LayeredRead>>);

impl RecentReads {
    /// One has ended.
    pub fn add(&self, read: LayeredRead) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.truncate(READS_MAX - 1);
        all.push_front(read);
    }

    /// Those of a tenant, the last one first. One that had the name before and another salt is not it.
    pub fn of(&self, tenant: &str, salt: &TenantSalt) -> Vec<LayeredRead> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_its = |read: &&LayeredRead| read.tenant == tenant && read.model.identity.tenant_salt == *salt;
        all.iter().filter(is_its).cloned().collect()
    }

    /// Forgets those of these tenants.
    pub fn forget(&self, tenants: &[&str]) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|read| !tenants.contains(&read.tenant.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::models::tests::model;

    #[test]
    fn the_last_reads_are_remembered_each_with_the_last_time_of_its_layers() {
        let recent = RecentReads::default();
        for n in 0..100u64 {
            let mut times = LayerTimes::default();
            times.read_begins(n, &model(), BlockKey([7; 32]), 3);
            for (layer, ms) in [(0, 5), (2, 8), (2, 9), (u32::MAX, 10)] {
                times.came(layer, Duration::from_millis(ms));
            }
            assert_eq!(times.first(), Some(Duration::from_millis(5)));
            recent.add(times.take_read("grpc", if n % 2 == 0 { "a" } else { "b" }, "OK").unwrap());
        }
        let salt = TenantSalt::default();
        let of = recent.of("a", &salt);
        assert_eq!((of.len(), of[0].began_ms, recent.of("b", &salt)[0].began_ms), (READS_MAX / 2, 98, 99));
        let ms = Duration::from_millis;
        assert_eq!(of[0].layers, [Some(ms(5)), None, Some(ms(9))]);
        assert!(recent.of("a", &TenantSalt(vec![1])).is_empty(), "another tenant of that name");
        recent.forget(&["a"]);
        assert_eq!((recent.of("a", &salt).len(), recent.of("b", &salt).len()), (0, READS_MAX / 2));
        // A call that read nothing by layers is none of them.
        let mut times = LayerTimes::default();
        times.read_begins(1, &model(), BlockKey([7; 32]), 3);
        assert!(times.take_read("grpc", "a", "OK").is_none());
    }
}
