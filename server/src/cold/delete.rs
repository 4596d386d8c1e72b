//! What is deleted does not come back from the bucket.
//!
//! Before the store deletes, restores of the namespace are broken off, spills of it are told not to name what they have, and
//! packs with such blocks are taken out of the manifest. Only then the delete can be acknowledged. Where the bucket cannot be told,
//! the store deletes all the same, and the caller hears that it was not acknowledged: what is in the bucket may come back.
//!
//! The same holds for blocks that are to live less long: copies that would outlive them go.

use std::time::Duration;

use kvarts_cold::withdraw::{Deleted, withdraw};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_store::api::{DeleteOutcome, DeleteReply, Target};
use kvarts_store::error::Reason;

use super::ColdTier;
use super::counts::add;
use super::restore::Closed;

/// What the tier has to say of a delete, and a namespace of which nothing is brought until the store has deleted.
#[derive(Debug)]
pub struct Deleting<'a> {
    failed: Option<String>,
    _closed: Closed<'a>,
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
        let is_open = self.spilling.withdraw(namespace);
        let outcome = match (&deleted, self.known(namespace)) {
            // Nothing of it is there, and nothing is on its way.
            (Deleted::Keys(keys) | Deleted::Later(keys, ..), Some(known))
                if !is_open && !keys.iter().any(|key| known.may_have(key)) =>
            {
                Ok(0)
            }
            _ => {
                let withdrawn = withdraw(&self.tier, namespace, &deleted, is_open);
                match tokio::time::timeout(left, withdrawn).await {
                    Ok(outcome) => outcome.map_err(|error| told(&error)),
                    Err(_) => Err("the bucket did not answer in time".to_owned()),
                }
            }
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
        Deleting { failed, _closed: closed }
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
fn told(error: &kvarts_cold::ColdError) -> String {
    tracing::debug!(%error, "the bucket was not told of a delete");
    error.for_tenants().to_owned()
}
