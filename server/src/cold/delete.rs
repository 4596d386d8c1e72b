//! What is deleted does not come back from the bucket.
//!
//! Before the store deletes, restores of the namespace are broken off, and sweeps are told not to name such blocks. When the store has
//! deleted, packs with such blocks are taken out of the manifest, and the manifest keeps what was deleted: so another program that listed its
//! blocks before, and names its packs later, leaves these out. Only then the delete can be acknowledged. It is in this order because
//! what a program lists after the manifest knows of a delete must not be what the store had before it. Where the bucket cannot be
//! told the store has deleted all the same, and the caller hears that it was not acknowledged: what is in the bucket may come back.
//!
//! The same holds for blocks that are to live less long: copies that would outlive them go.
//!
//! What another node of the cluster was asked is told to the bucket as it was, with its own time: this node may hear of it when younger
//! blocks of the same keys are there.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use kvarts_cluster::deletes::{Entry, What};
use kvarts_cold::ColdError;
use kvarts_cold::withdraw::{Deleted, Told, When};
use kvarts_contract::api::{DeleteOutcome, DeleteReply, Target};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};
use kvarts_peer::node::{Beside, Guarded, Underway};

use super::ColdTier;
use super::counts::add;
use super::restore::Closed;
use super::spilling::Withdrawing;

/// A delete that is under way. As long as this is here nothing of the namespace is brought, and nothing that is deleted is copied.
#[derive(Debug)]
pub struct Deleting<'a> {
    cold: &'a ColdTier,
    namespace: NamespaceId,
    told: Told,
    failed: Option<String>,
    _closed: Closed<'a>,
    _withdrawing: Withdrawing<'a>,
}

impl ColdTier {
    /// Something is about to be deleted from the store; the bucket is told of it when the store has deleted it ([`Deleting::tell`]).
    pub async fn delete(&self, namespace: NamespaceId, target: &Target) -> Deleting<'_> {
        let deleted = match target {
            Target::Keys { keys, .. } => Deleted::Keys(keys.clone()),
            Target::Prefix(key) => Deleted::Prefix(*key),
            Target::Namespace => Deleted::Namespace,
        };
        self.deleting(namespace, Told { deleted, when: When::Now }).await
    }

    /// The same for blocks that are to live for so long from now on.
    pub async fn shorten(
        &self,
        namespace: NamespaceId,
        column: (Group, Coordinate),
        keys: &[BlockKey],
        ttl: Duration,
    ) -> Deleting<'_> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let expires_ms = self.tier.access().time().wall_ms().saturating_add(ttl_ms);
        let deleted = Deleted::Later(keys.to_vec(), column, expires_ms);
        self.deleting(namespace, Told { deleted, when: When::Now }).await
    }

    async fn deleting(&self, namespace: NamespaceId, told: Told) -> Deleting<'_> {
        let closed = self.flights.close(namespace).await;
        let withdrawing = self.spilling.withdraw(namespace, &told.deleted);
        self.touch(namespace);
        // Until it is told.
        let failed = Some("the request to the bucket failed".to_owned());
        Deleting { cold: self, namespace, told, failed, _closed: closed, _withdrawing: withdrawing }
    }
}

/// How long the bucket may take where another node was asked to delete, and tells it too.
const BESIDE: Duration = Duration::from_secs(5);

impl Beside for ColdTier {
    fn carrying<'a>(&'a self, entry: &'a Entry) -> Guarded<'a> {
        let deleted = match &entry.what {
            What::Keys(_, keys) | What::Prefix(keys) => Deleted::Keys(keys.clone()),
            What::Everything => Deleted::Namespace,
            What::Sooner(column, keys, ends_ms) => Deleted::Later(keys.clone(), *column, *ends_ms),
        };
        let told = Told { deleted, when: When::Until(last_of(entry.below_ms)) };
        Box::pin(async move {
            let deleting = self.deleting(entry.namespace, told).await;
            Box::new(deleting) as Box<dyn Underway<'a> + 'a>
        })
    }
}

/// The last moment before a time.
fn last_of(below_ms: u64) -> u64 {
    below_ms.saturating_sub(1)
}

impl<'a> Underway<'a> for Deleting<'a> {
    fn done(mut self: Box<Self>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            // What this node named since the other one told the bucket was listed before its own store had deleted.
            self.tell(BESIDE).await;
            if let Err(why) = self.told() {
                // The node that was asked has told the bucket, or has not acknowledged it. The manifest that this one remembers is older.
                self.cold.tier.forget_manifest(self.namespace);
                // What this one named before it heard of it may have the end of before.
                if self.cold.read_only().is_none() {
                    self.cold.telling.owe(self.namespace, self.told.clone());
                }
                tracing::warn!(%why, "another node's delete or shorter time to live could not be stored \
                    in the bucket");
            }
        })
    }
}

impl Deleting<'_> {
    /// It was deleted in a cluster whose nodes say later times than this of what they produce since.
    pub fn of_cluster(&mut self, below_ms: u64) {
        self.told.when = When::NowUntil(last_of(below_ms));
    }

    /// The store has deleted it: takes it out of the bucket, within the time that is left.
    pub async fn tell(&mut self, left: Duration) {
        let cold = self.cold;
        let told = cold.telling.tell((&cold.tier, &cold.counts), self.namespace, &self.told);
        let why = match tokio::time::timeout(left, told).await {
            Ok(Ok(())) => {
                self.failed = None;
                return;
            }
            Ok(Err(error)) => told_of(&error),
            Err(_) => format!("the bucket has not responded within {:.1} s", left.as_secs_f64()),
        };
        add(&cold.counts.delete_failures, 1);
        self.failed = Some(format!(
            "the cold tier did not confirm the delete and may still contain the \
            block: {why}"
        ));
    }

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
fn told_of(error: &ColdError) -> String {
    tracing::debug!(%error, "a delete could not be stored in the bucket");
    error.for_tenants().to_owned()
}
