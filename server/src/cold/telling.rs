//! Deletes that are to be told to the bucket: those of a namespace that come while others are being told go together, as one change of its
//! manifest. So deletes one after the other cost a change each, and many at once cost few.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvarts_cold::withdraw::{Deleted, withdraw};
use kvarts_cold::{ColdError, Tier};
use kvarts_layout::NamespaceId;
use tokio::sync::oneshot;

use super::counts::{Counts, add};

/// Namespaces that are told at once, about: those that share a turn wait for each other.
const TURNS: usize = 16;

/// A delete that waits to be told.
#[derive(Debug)]
struct Waiting {
    deleted: Deleted,
    answer: oneshot::Sender<Result<(), ColdError>>,
}

/// Deletes that wait, by namespace.
#[derive(Debug, Default)]
pub(super) struct Telling {
    waiting: Mutex<BTreeMap<NamespaceId, Vec<Waiting>>>,
    turns: [tokio::sync::Mutex<()>; TURNS],
}

impl Telling {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<NamespaceId, Vec<Waiting>>> {
        // Each change is one step.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the bucket know of a delete that the store has carried out, together with those that wait.
    pub(super) async fn tell(
        &self,
        (tier, counts): (&Tier, &Counts),
        namespace: NamespaceId,
        deleted: &Deleted,
    ) -> Result<(), ColdError> {
        let [first, ..] = namespace.0;
        let Some(turn) = self.turns.get(usize::from(first) % TURNS) else { return Ok(()) };
        loop {
            let (answer, told) = oneshot::channel();
            let waiting = Waiting { deleted: deleted.clone(), answer };
            self.waiting().entry(namespace).or_default().push(waiting);
            let _turn = turn.lock().await;
            let all = self.waiting().remove(&namespace).unwrap_or_default();
            if !all.is_empty() {
                let (all, answers): (Vec<_>, Vec<_>) =
                    all.into_iter().map(|waiting| (waiting.deleted, waiting.answer)).unzip();
                let outcome = withdraw(tier, namespace, &all).await;
                add(&counts.withdrawn_packs, outcome.as_ref().copied().unwrap_or(0));
                for answer in answers {
                    // Of a caller that has given up no one waits for it.
                    let _ = answer.send(outcome.clone().map(drop));
                }
            }
            // Told here, or by the one that had the turn before; if that was given up half-way it has to be told again.
            if let Ok(outcome) = told.await {
                return outcome;
            }
        }
    }
}
