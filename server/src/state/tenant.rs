//! One tenant: its name, its salt, and its shares of what all tenants use.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvarts_layout::identity::TenantSalt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::bandwidth::Bandwidth;
use kvarts_wire::limits::WATCHERS_MAX;

/// What a tenant may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantLimits {
    /// Bytes that its leases and pins may hold; none: a part of the budget, equal for all tenants.
    pub pin_bytes: Option<u64>,
    /// Calls that may be under way at a time.
    pub calls: usize,
    /// Bytes a second, both ways together; none for no limit.
    pub bandwidth: Option<u64>,
    /// Bytes on disk of all its namespaces together, as the engine counts a quota; none for no limit but the budget.
    pub disk: Option<u64>,
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self { pin_bytes: None, calls: 1024, bandwidth: None, disk: None }
    }
}

/// A tenant.
pub struct Tenant {
    /// Its name, in logs and metrics.
    pub name: String,
    /// Its number, by which the engine counts what it holds. No other tenant has it in the life of this process, and nothing
    /// that outlives the process knows it: on disk a tenant is its salt.
    pub number: u32,
    /// What keeps its namespaces apart from those of others. Empty where there is one tenant only.
    pub salt: TenantSalt,
    /// What it may use.
    pub limits: TenantLimits,
    turns: Arc<Semaphore>,
    watchers: Arc<Semaphore>,
    bandwidth: Option<Bandwidth>,
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenant")
            .field("name", &self.name)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// The salt of a tenant whose configuration names none.
pub fn salt_of(name: &str) -> TenantSalt {
    TenantSalt(blake3::derive_key("kvarts 2026 tenant salt v1", name.as_bytes()).to_vec())
}

impl Tenant {
    /// A tenant. `salt` is what the configuration says; without it one follows from the name.
    pub fn new(name: &str, number: u32, salt: Option<Vec<u8>>, limits: TenantLimits) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            number,
            salt: salt.map_or_else(|| salt_of(name), TenantSalt),
            turns: Arc::new(Semaphore::new(limits.calls)),
            watchers: Arc::new(Semaphore::new(WATCHERS_MAX)),
            bandwidth: limits.bandwidth.map(Bandwidth::new),
            limits,
        })
    }

    /// The one tenant of a server without tokens. Its namespaces are those of the embedded engine.
    pub fn only() -> Arc<Self> {
        Self::new("default", 0, Some(Vec::new()), TenantLimits::default())
    }

    /// One of the calls that the tenant may have under way, if one is left.
    pub fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.turns).try_acquire_owned().ok()
    }

    /// One of the places for those who watch events, if one is left.
    pub fn watcher(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.watchers).try_acquire_owned().ok()
    }

    /// Whether its bytes are counted against a rate.
    pub fn has_bandwidth(&self) -> bool {
        self.bandwidth.is_some()
    }

    /// Takes these bytes from the tenant's bandwidth; how long to wait until they are within it.
    pub fn toll(&self, bytes: u64) -> Duration {
        self.bandwidth.as_ref().map_or(Duration::ZERO, |bandwidth| bandwidth.spend(bytes))
    }

    /// Takes these bytes from the tenant's bandwidth before they are moved; what of them is not moved comes back.
    pub fn pay(self: &Arc<Self>, bytes: u64) -> (Paid, Duration) {
        let wait = self.toll(bytes);
        (Paid { tenant: Arc::clone(self), left: AtomicU64::new(bytes) }, wait)
    }

    /// The same if no other has to wait for it.
    pub fn try_pay(self: &Arc<Self>, bytes: u64) -> Option<Paid> {
        let pays = self.bandwidth.as_ref().is_none_or(|bandwidth| bandwidth.try_spend(bytes));
        pays.then(|| Paid { tenant: Arc::clone(self), left: AtomicU64::new(bytes) })
    }

    /// Waits until these bytes are within the tenant's bandwidth.
    pub async fn spend(&self, bytes: u64) {
        let wait = self.toll(bytes);
        if wait > Duration::ZERO {
            tokio::time::sleep(wait).await;
        }
    }
}

/// Bytes that were taken from a tenant's bandwidth and not moved yet.
#[derive(Debug)]
pub struct Paid {
    tenant: Arc<Tenant>,
    left: AtomicU64,
}

impl Paid {
    /// Counts `bytes` moved.
    pub fn moved(&self, bytes: u64) {
        let less = |left: u64| Some(left.saturating_sub(bytes));
        let _ = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

impl Drop for Paid {
    fn drop(&mut self) {
        if let Some(bandwidth) = &self.tenant.bandwidth {
            bandwidth.give_back(*self.left.get_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_differ_by_name_and_the_only_tenant_has_none() {
        let tenant = |name| Tenant::new(name, 1, None, TenantLimits::default());
        assert_ne!(tenant("a").salt, tenant("b").salt);
        assert_eq!(tenant("a").salt, tenant("a").salt);
        assert!(Tenant::only().salt.is_empty());
    }

    #[test]
    fn a_tenant_has_as_many_turns_as_it_was_given() {
        let tenant = Tenant::new("a", 1, None, TenantLimits { calls: 2, ..TenantLimits::default() });
        let (first, second) = (tenant.turn(), tenant.turn());
        assert!(first.is_some() && second.is_some() && tenant.turn().is_none());
        drop(first);
        assert!(tenant.turn().is_some());
    }
}
