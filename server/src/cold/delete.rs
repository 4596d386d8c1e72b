//! What is deleted does not come back from the bucket.
//!
//! Before the store deletes, restores of the namespace are broken off, sweeps are told not to name such blocks until it has, and
//! packs with such blocks are taken out of the manifest. Only then the delete can be acknowledged. Where the bucket cannot be told,
//! the store deletes all the same, and the caller hears that it was not acknowledged: what is in the bucket may come back.
//!
//! The same holds for blocks that are to live less long: copies that would outlive them go.

use std::time::Duration;

use kvarts_cold::withdraw::{Deleted, withdraw};
use kvarts_cold::{ColdError, Tier};
use kvarts_contract::api::{DeleteOutcome, DeleteReply, Target};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_peer::node::{Beside, Guard, Guarded};

use super::ColdTier;
use super::counts::add;
use super::restore::Closed;
use super::spilling::Withdrawing;

/// What the tier has to say of a delete. Until the store has deleted too nothing of the namespace is brought, and nothing that is
/// deleted is copied.
#[derive(Debug)]
pub struct Deleting<'a> {
    failed: Option<String>,
    _closed: Closed<'a>,
    _withdrawing: Withdrawing<'a>,
}

/// Takes what is deleted out of the bucket; gives the number of packs. With `is_open` a pack of the namespace may just be named here. The
/// bucket is not asked if it had nothing of it when it was asked last, at most `refresh` ago.
pub(super) async fn taken_out(
    tier: &Tier,
    namespace: NamespaceId,
    deleted: &Deleted,
    is_open: bool,
    refresh: Duration,
) -> Result<u64, ColdError> {
    if let Deleted::Keys(keys) | Deleted::Later(keys, ..) = deleted
        && let Some(known) = tier.remembered(namespace)
    {
        let age = tier.access().time().now().saturating_sub(known.read_at());
        let may_be_there = keys.iter().any(|key| known.may_have(key));
        if age <= refresh && !may_be_there && !is_open && !tier.is_unsettled(namespace) {
            return Ok(0);
        }
    }
    withdraw(tier, namespace, deleted, is_open).await
}

impl ColdTier {
    /// Takes out of the tier what is to be deleted, within the time that is left.
    pub async fn delete(&self, namespace: NamespaceId, target: &Target, left: Duration) -> Deleting<'_> {
        let deleted = match target {
            Target::Keys { keys, .. } => Deleted::Keys(keys.clone()),
            Target::Prefix(key) => Deleted::Prefix(*key),
            Target::Namespace => Deleted::Namespace,
        };
        self.take_out(namespace, deleted, left).await
    }

    /// Takes out of the tier what would outlive these blocks, which have so long to live from now on.
    pub async fn shorten(
        &self,
        namespace: NamespaceId,
        column: (Group, Coordinate),
        keys: &[BlockKey],
        ttl: Duration,
        left: Duration,
    ) -> Deleting<'_> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let expires_ms = self.tier.access().time().wall_ms().saturating_add(ttl_ms);
        self.take_out(namespace, Deleted::Later(keys.to_vec(), column, expires_ms), left).await
    }

    async fn take_out(&self, namespace: NamespaceId, deleted: Deleted, left: Duration) -> Deleting<'_> {
        let closed = self.flights.close(namespace).await;
        let withdrawing = self.spilling.withdraw(namespace, &deleted);
        self.touch(namespace);
        let taken = taken_out(&self.tier, namespace, &deleted, withdrawing.is_open, self.config.refresh);
        let outcome = match tokio::time::timeout(left, taken).await {
            Ok(outcome) => outcome.map_err(|error| told(&error)),
            Err(_) => Err("the bucket did not answer in time".to_owned()),
        };
        let failed = match outcome {
            Ok(packs) => {
                add(&self.counts.withdrawn_packs, packs);
                None
            }
            Err(why) => {
                add(&self.counts.delete_failures, 1);
                Some(format!("the cold tier may still have it: {why}"))
            }
        };
        Deleting { failed, _closed: closed, _withdrawing: withdrawing }
    }
}

/// How long the bucket may take where another node was asked to delete, and has told it.
const BESIDE: Duration = Duration::from_secs(5);

impl Beside for ColdTier {
    fn deleting<'a>(&'a self, namespace: NamespaceId, target: &'a Target) -> Guarded<'a> {
        Box::pin(async move {
            let deleting = self.delete(namespace, target, BESIDE).await;
            if let Err(why) = deleting.told() {
                // The node that was asked has told the bucket, or has not acknowledged the delete.
                tracing::warn!(%why, "the bucket was not asked about a delete of another node");
            }
            Box::new(deleting) as Guard<'a>
        })
    }
}

impl Deleting<'_> {
    /// Whether the tier was told.
    pub fn told(&self) -> Result<(), Reason> {
        self.failed.as_ref().map_or(Ok(()), |why| Err(Reason::Away(why.clone())))
    }

    /// The answer to a delete that the store has carried out.
    pub fn answer(&self, mut reply: DeleteReply) -> Result<DeleteReply, Reason> {
        let Some(why) = &self.failed else { return Ok(reply) };
        if reply.outcomes.is_empty() {
            return Err(Reason::Away(why.clone()));
        }
        for outcome in &mut reply.outcomes {
            if !matches!(outcome, DeleteOutcome::Refused(_)) {
                *outcome = DeleteOutcome::Refused(Reason::Away(why.clone()));
            }
        }
        Ok(reply)
    }
}

/// What the caller is told of it, who may be any tenant; the log has the rest.
fn told(error: &ColdError) -> String {
    tracing::debug!(%error, "the bucket was not told of a delete");
    error.for_tenants().to_owned()
}
