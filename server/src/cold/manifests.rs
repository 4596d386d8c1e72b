//! The manifests of namespaces in use, kept fresh by time: so that no look-up asks the bucket.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cold::tier::Known;
use kvarts_cold::{ColdError, Tier};
use kvarts_layout::NamespaceId;
use tokio::sync::Notify;

use super::counts::add;
use super::restore::KEPT_FOR;
use super::{ColdTier, stale};

/// Namespaces that are kept fresh: the one that was used longest ago makes room.
const NAMESPACES: usize = 64;
/// Refreshes without a use after which a namespace is not kept fresh any more.
const UNUSED: u32 = 20;

#[derive(Clone, Copy, Debug)]
struct Kept {
    used_at: Duration,
    /// When it was read last, or failed to be.
    tried_at: Option<Duration>,
}

/// Which namespaces are kept fresh.
#[derive(Debug, Default)]
pub(super) struct Manifests {
    kept: Mutex<BTreeMap<NamespaceId, Kept>>,
    /// A namespace is new.
    wanted: Notify,
    /// A manifest was read, or could not be.
    tried: Notify,
}

impl Manifests {
    fn kept(&self) -> MutexGuard<'_, BTreeMap<NamespaceId, Kept>> {
        // Each change is one step.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Namespaces whose manifest is known.
    pub(super) fn known(&self, tier: &Tier) -> u64 {
        self.kept().keys().filter(|namespace| tier.remembered(**namespace).is_some()).count() as u64
    }

    /// A namespace is used; gives whether its manifest was asked for before.
    fn touch(&self, namespace: NamespaceId, now: Duration) -> bool {
        let mut kept = self.kept();
        if let Some(known) = kept.get_mut(&namespace) {
            known.used_at = now;
            return known.tried_at.is_some();
        }
        if kept.len() >= NAMESPACES
            && let Some(oldest) = kept.iter().min_by_key(|(_, known)| known.used_at).map(|(id, _)| *id)
        {
            kept.remove(&oldest);
        }
        kept.insert(namespace, Kept { used_at: now, tried_at: None });
        drop(kept);
        self.wanted.notify_one();
        false
    }

    fn due(&self, now: Duration, refresh: Duration) -> Vec<NamespaceId> {
        let mut kept = self.kept();
        kept.retain(|_, known| now.saturating_sub(known.used_at) < refresh.saturating_mul(UNUSED));
        let is_due = |known: &Kept| known.tried_at.is_none_or(|at| now.saturating_sub(at) >= refresh);
        kept.iter().filter(|(_, known)| is_due(known)).map(|(id, _)| *id).collect()
    }

    fn was_tried(&self, namespace: NamespaceId, now: Duration) {
        if let Some(known) = self.kept().get_mut(&namespace) {
            known.tried_at = Some(now);
        }
        self.tried.notify_waiters();
    }
}

impl ColdTier {
    /// Reads manifests again when it is time.
    pub(super) async fn keep_manifests(self: Arc<Self>) {
        let refresh = self.config.refresh;
        let mut is_reached = true;
        loop {
            let now = self.tier.access().time().now();
            self.flights.rest(now);
            self.tier.access().look().await;
            for namespace in self.manifests.due(now, refresh) {
                let read = self.tier.read_manifest(namespace).await;
                add(&self.counts.manifest_failures, u64::from(read.is_err()));
                self.tell_whether_reached(&mut is_reached, read.err().as_ref());
                self.manifests.was_tried(namespace, self.tier.access().time().now());
            }
            self.telling.tell_owed((&self.tier, &self.counts)).await;
            tokio::select! {
                // ends: the next arm, which looks again after `refresh`
                () = self.manifests.wanted.notified() => {}
                () = tokio::time::sleep((refresh / 4).min(KEPT_FOR)) => {}
            }
        }
    }

    /// A line in the log when the bucket is reached no longer, and when it is again. What is wrong with one object says neither.
    fn tell_whether_reached(&self, is_reached: &mut bool, failed: Option<&ColdError>) {
        match failed {
            Some(error @ (ColdError::Bucket(..) | ColdError::Paused)) if *is_reached => {
                let why = self.told(error);
                tracing::warn!(%why, "the bucket of the cold tier cannot be reached, so look-ups do not \
                    find its blocks");
                *is_reached = false;
            }
            None if !*is_reached => {
                tracing::info!(bucket = self.bucket(), "the bucket of the cold tier can be reached again");
                *is_reached = true;
            }
            _ => {}
        }
    }

    /// A namespace is in use: its manifest is to be known.
    pub fn touch(&self, namespace: NamespaceId) {
        self.manifests.touch(namespace, self.tier.access().time().now());
    }

    /// What is known of a namespace, from memory alone. It counts as a use.
    pub fn known(&self, namespace: NamespaceId) -> Option<Arc<Known>> {
        let now = self.tier.access().time().now();
        self.manifests.touch(namespace, now);
        let known = self.tier.remembered(namespace)?;
        (now.saturating_sub(known.read_at()) < stale(self.config.refresh)).then_some(known)
    }

    /// The same; of a namespace that was not in use before its manifest is waited for, so long at most.
    pub async fn known_within(&self, namespace: NamespaceId, most: Duration) -> Option<Arc<Known>> {
        let tried = self.manifests.tried.notified();
        let mut tried = std::pin::pin!(tried);
        // Before the look, so that nothing in between is missed.
        tried.as_mut().enable();
        if let Some(known) = self.known(namespace) {
            return Some(known);
        }
        let wait = async {
            loop {
                if self.manifests.touch(namespace, self.tier.access().time().now()) {
                    return;
                }
                tried.as_mut().await;
                // ends: `most`, around all of it
                tried.set(self.manifests.tried.notified());
                tried.as_mut().enable();
            }
        };
        let _ = tokio::time::timeout(most, wait).await;
        self.known(namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_is_used_until_it_is_read_again_however_seldom_that_is() {
        for seconds in 1..=3600 {
            let refresh = Duration::from_secs(seconds);
            let stale = stale(refresh);
            assert!(stale >= refresh * 2 && stale >= Duration::from_secs(900), "{seconds}");
        }
        assert_eq!(stale(Duration::from_secs(30)), Duration::from_secs(900));
    }
}
