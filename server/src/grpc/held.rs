//! Slow readers: what a read still holds when all of its work is done, bytes that its client has not taken, and when it is cut
//! off.
//!
//! They wait in the body's slot, and then in the transport, which has taken them from there and may not send them before the
//! client makes room. A client that takes nothing for as long as the server's timeout loses the read and what waits in
//! the slot. What the transport has it gives back only with its stream or its connection: a client that does not end
//! either within another timeout loses the connection, whether much is left there or only the stream itself. The call, and
//! with it the tenant's turn, lasts until everything is back: arena memory, and messages that are no data.

use std::any::Any;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kvarts_store::io::SharedBuf;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::answer::followed;
use super::call::Call;
use super::frame::{Outgoing, Slot};

/// Alive for as long as something of a read is held.
struct Keeper {
    _call: Arc<Call>,
    _here: Sender<Infallible>,
}

/// A piece of memory, and who waits for its return.
struct Kept {
    _piece: SharedBuf,
    _keeper: Arc<Keeper>,
}

/// Makes memory a part of what is held.
#[derive(Clone)]
pub(super) struct Holding(Arc<Keeper>);

impl Holding {
    /// The same memory, which is held until the last of its users is done.
    pub(super) fn keep(&self, piece: SharedBuf) -> SharedBuf {
        let kept: Arc<dyn Any + Send + Sync> =
            Arc::new(Kept { _piece: piece.clone(), _keeper: Arc::clone(&self.0) });
        piece.kept_by(kept)
    }
}

impl Holding {
    /// A message as it was, which is held until the transport is done with it.
    pub(super) fn follow(&self, outgoing: Outgoing) -> Outgoing {
        match outgoing {
            Outgoing::Message(pieces) => {
                Outgoing::Message(pieces.into_iter().map(|piece| followed(piece, &self.0)).collect())
            }
            end => end,
        }
    }
}

/// Whoever waits until nothing is held.
pub(super) struct Held {
    gone: Receiver<Infallible>,
    slot: Arc<Slot>,
}

impl Held {
    /// Begins to hold for a call: also what waits in the slot.
    pub(super) fn begin(call: &Arc<Call>, slot: &Arc<Slot>) -> (Self, Holding) {
        let (here, gone) = channel(1);
        let keeper = Arc::new(Keeper { _call: Arc::clone(call), _here: here });
        slot.keep(Arc::clone(&keeper) as _);
        (Self { gone, slot: Arc::clone(slot) }, Holding(keeper))
    }

    /// Whether nothing was held any more within this time.
    async fn is_gone(&mut self, timeout: Duration) -> bool {
        tokio::time::timeout(timeout, self.gone.recv()).await.is_ok()
    }

    /// Returns when nothing is held. A client that takes nothing for so long loses the read, and for twice as long `cut`
    /// is done to it.
    pub(super) async fn until_gone(mut self, timeout: Duration, cut: impl FnOnce()) {
        loop {
            let taken = self.slot.taken();
            // Whoever was given up already has had this timeout.
            if self.slot.is_given_up() {
                break;
            }
            if self.is_gone(timeout).await {
                return;
            }
            if self.slot.taken() == taken {
                break;
            }
        }
        self.slot.give_up();
        if !self.is_gone(timeout).await {
            cut();
            let _ = self.gone.recv().await;
        }
    }
}
