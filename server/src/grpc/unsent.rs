//! Unsent data: bytes of a read that its client has not taken when the read's own work is done, and when a slow reader is
//! cut off.
//!
//! The bytes wait in the body's slot, and then in the transport, which has taken them from the slot and may not send them
//! before the client makes room. A client that takes nothing for the server's stall timeout loses the read and what waits
//! in the slot. The transport gives its part back only when the stream or the connection ends: a client that ends neither
//! within another stall timeout loses the connection, whether much is left there or only the stream itself. The call, and
//! with it the tenant's turn, lasts until everything is back: arena memory, and messages that carry no data.

use std::any::Any;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::SharedBuf;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::answer::followed;
use super::frame::{Outgoing, Slot};
use crate::calls::call::Call;

/// Lives for as long as some bytes of a read are unsent.
struct UnsentMark {
    _call: Arc<Call>,
    _here: Sender<Infallible>,
}

/// A piece of memory, and the mark that lives as long.
struct GuardedPiece {
    _piece: SharedBuf,
    _mark: Arc<UnsentMark>,
}

/// Counts memory and messages as unsent until their last user lets go of them.
#[derive(Clone)]
pub(super) struct UnsentGuard(Arc<UnsentMark>);

impl UnsentGuard {
    /// The same memory, counted as unsent until its last user is done.
    pub(super) fn keep(&self, piece: SharedBuf) -> SharedBuf {
        let guarded: Arc<dyn Any + Send + Sync> =
            Arc::new(GuardedPiece { _piece: piece.clone(), _mark: Arc::clone(&self.0) });
        piece.kept_by(guarded)
    }

    /// The same message, counted as unsent until the transport is done with it.
    pub(super) fn follow(&self, outgoing: Outgoing) -> Outgoing {
        match outgoing {
            Outgoing::Message(pieces) => {
                Outgoing::Message(pieces.into_iter().map(|piece| followed(piece, &self.0)).collect())
            }
            end => end,
        }
    }
}

/// The unsent bytes of one read, to wait for their end.
pub(super) struct Unsent {
    gone: Receiver<Infallible>,
    slot: Arc<Slot>,
}

impl Unsent {
    /// Begins to count for a call; what waits in the slot counts as well.
    pub(super) fn begin(call: &Arc<Call>, slot: &Arc<Slot>) -> (Self, UnsentGuard) {
        let (here, gone) = channel(1);
        let mark = Arc::new(UnsentMark { _call: Arc::clone(call), _here: here });
        slot.keep(Arc::clone(&mark) as _);
        (Self { gone, slot: Arc::clone(slot) }, UnsentGuard(mark))
    }

    /// Whether everything was sent or dropped within this time.
    async fn is_gone(&mut self, timeout: Duration) -> bool {
        tokio::time::timeout(timeout, self.gone.recv()).await.is_ok()
    }

    /// Returns when nothing is unsent. A client that takes nothing for `timeout` loses the read; after twice that `cut` is
    /// called.
    pub(super) async fn until_gone(mut self, timeout: Duration, cut: impl FnOnce()) {
        loop {
            let taken = self.slot.taken();
            // A read that was given up already has had this timeout.
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
            // ends: the connection was cut, and drops what it had
            let _ = self.gone.recv().await;
        }
    }
}
