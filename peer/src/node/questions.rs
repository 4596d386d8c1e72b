//! Look-ups at one other node: messages of one call, which lasts as long as its connection.
//!
//! A call of its own for each look-up costs headers, a stream and several tasks on either side, more than the answer takes.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvarts_wire::proto::{LocateReply, LocateRequest};
use tokio::sync::{mpsc, oneshot};

/// Questions that were asked, and where more go.
#[derive(Debug, Default)]
pub(super) struct Questions(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    number: u64,
    /// The call, while there is one.
    to: Option<mpsc::Sender<LocateRequest>>,
    /// Questions of that call, each until its caller has the answer or asks no more.
    waiting: BTreeMap<u64, oneshot::Sender<LocateReply>>,
}

/// A caller that waits; it is forgotten when it does not any more.
struct Waiting<'a> {
    of: &'a Questions,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.of.lock().waiting.remove(&self.number);
    }
}

impl Questions {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks over the call that there is, or one that `begin` makes. Nothing if the call ends before the answer.
    pub(super) async fn ask(
        &self,
        asked: LocateRequest,
        begin: impl FnOnce() -> mpsc::Sender<LocateRequest>,
    ) -> Option<LocateReply> {
        let (answer, told) = oneshot::channel();
        let (waiting, to) = {
            let mut state = self.lock();
            let to = match state.to.take().filter(|to| !to.is_closed()) {
                Some(to) => to,
                None => {
                    // The answers to what went over the last one are lost.
                    state.waiting.clear();
                    begin()
                }
            };
            state.to = Some(to.clone());
            state.number += 1;
            let number = state.number;
            state.waiting.insert(number, answer);
            (Waiting { of: self, number }, to)
        };
        // ends: the time of the look-up (`locate`), or the call ends with its connection
        to.send(LocateRequest { number: waiting.number, ..asked }).await.ok()?;
        // Otherwise it would look as if there could be more questions, for as long as this one waits.
        drop(to);
        // ends: the time of the look-up (`locate`), or the call ends with its connection
        told.await.ok()
    }

    /// An answer came. One that no caller waits for is dropped.
    pub(super) fn answer(&self, answer: LocateReply) {
        let waiting = self.lock().waiting.remove(&answer.number);
        if let Some(waiting) = waiting {
            // Who asked may have gone.
            let _ = waiting.send(answer);
        }
    }

    /// A call is over: its callers hear that there is no answer.
    pub(super) fn end(&self, of: &mpsc::Sender<LocateRequest>) {
        let mut state = self.lock();
        if state.to.as_ref().is_some_and(|now| now.same_channel(of)) {
            state.to = None;
            state.waiting.clear();
        }
    }
}
