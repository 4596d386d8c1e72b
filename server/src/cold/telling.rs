//! Deletes that are to be told to the bucket: those of a namespace that come while others are being told go together, as one change of its
//! manifest. So deletes one after the other cost a change each, and many at once cost few.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cold::withdraw::{Told, withdraw_told};
use kvarts_cold::{ColdError, Tier};
use kvarts_layout::NamespaceId;
use tokio::sync::oneshot;

use super::counts::{Counts, add};

/// Namespaces that are told at once, about: those that share a turn wait for each other.
const TURNS: usize = 16;
/// Keys that are remembered at most of what could not be recorded: the oldest are forgotten.
const OWED_KEYS: usize = 1 << 16;
/// How long the bucket may take for one of these.
const OWED_TIMEOUT: Duration = Duration::from_secs(5);

/// A delete that waits to be told.
#[derive(Debug)]
struct Waiting {
    told: Told,
    answer: oneshot::Sender<Result<(), ColdError>>,
}

/// Deletes that wait, by namespace.
#[derive(Debug, Default)]
pub(super) struct Telling {
    waiting: Mutex<BTreeMap<NamespaceId, Vec<Waiting>>>,
    turns: [tokio::sync::Mutex<()>; TURNS],
    /// Entries of other nodes that could not be recorded in the bucket.
    owed: Mutex<VecDeque<(NamespaceId, Told)>>,
}

impl Telling {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<NamespaceId, Vec<Waiting>>> {
        // Each change is one step.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owed(&self) -> MutexGuard<'_, VecDeque<(NamespaceId, Told)>> {
        // Each change is one step.
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records this in the bucket when the bucket answers again.
    pub(super) fn owe(&self, namespace: NamespaceId, what: Told) {
        let mut owed = self.owed();
        owed.push_back((namespace, what));
        let mut keys: usize = owed.iter().map(|(_, what)| what.deleted.keys()).sum();
        while keys > OWED_KEYS
            && let Some((_, oldest)) = owed.pop_front()
        {
            keys -= oldest.deleted.keys();
        }
    }

    /// Records what could not be recorded before, until a request fails again.
    pub(super) async fn tell_owed(&self, (tier, counts): (&Tier, &Counts)) {
        let count = self.owed().len();
        for _ in 0..count {
            let Some((namespace, what)) = self.owed().pop_front() else { return };
            let told = tokio::time::timeout(OWED_TIMEOUT, self.tell((tier, counts), namespace, &what)).await;
            if !matches!(told, Ok(Ok(()))) {
                self.owe(namespace, what);
                return;
            }
        }
    }

    /// Has the bucket know of a delete that the store has carried out, together with those that wait.
    pub(super) async fn tell(
        &self,
        (tier, counts): (&Tier, &Counts),
        namespace: NamespaceId,
        what: &Told,
    ) -> Result<(), ColdError> {
        let [first, ..] = namespace.0;
        let Some(turn) = self.turns.get(usize::from(first) % TURNS) else { return Ok(()) };
        loop {
            let (answer, told) = oneshot::channel();
            let waiting = Waiting { told: what.clone(), answer };
            self.waiting().entry(namespace).or_default().push(waiting);
            // ends: its holder's requests have a time each (`patience`)
            let _turn = turn.lock().await;
            let all = self.waiting().remove(&namespace).unwrap_or_default();
            if !all.is_empty() {
                let (all, answers): (Vec<_>, Vec<_>) =
                    all.into_iter().map(|waiting| (waiting.told, waiting.answer)).unzip();
                let outcome = withdraw_told(tier, namespace, &all).await;
                add(&counts.withdrawn_packs, outcome.as_ref().copied().unwrap_or(0));
                for answer in answers {
                    // Of a caller that has given up no one waits for it.
                    let _ = answer.send(outcome.clone().map(drop));
                }
            }
            // Told here, or by the one that had the turn before; if that was given up half-way it has to be told again.
            // ends: told above, or its sender was dropped by who had the turn before
            if let Ok(outcome) = told.await {
                return outcome;
            }
        }
    }
}
