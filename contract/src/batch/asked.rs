//! What a piece of a batch asks the store for, and what it is answered.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use kvarts_layout::BlockKey;

use crate::api::{
    BlockOutcome, ContainsReply, DeleteOutcome, DeleteReply, LeaseId, Presence, PutReply, ReadEnd, ReadStream,
};
use crate::error::{Error, Reason};
use crate::ticket::{Abandoned, Ticket};

/// The answer for entries that were not processed when their batch was cancelled.
pub const CANCELLED: Reason = Reason::Busy("the batch was cancelled");
/// The refusal of a handle that is closed.
pub const CLOSED: Reason = Reason::Busy("the handle is closed");
const STOPPED: Reason = Reason::Busy("the store is closing");

/// Blocks of one column of a batch.
pub(super) struct Piece {
    pub(super) keys: Vec<BlockKey>,
    /// Where they stand among the distinct blocks of the batch; nothing if they are all of these, in their order.
    pub(super) at: Option<Vec<u32>>,
}

/// What a piece waits for.
pub(super) enum Asked {
    Put(Ticket<Result<PutReply, Error>>),
    Get(ReadStream),
    Look(Ticket<Result<ContainsReply, Error>>),
    Delete(Ticket<Result<DeleteReply, Error>>),
    /// The store refused it at once.
    Failed(Reason),
}

/// How a piece ended, before it is told key by key.
pub(super) enum Answer {
    Put(Result<Result<PutReply, Error>, Abandoned>),
    Get(Result<ReadEnd, Abandoned>),
    Looked(Result<Result<ContainsReply, Error>, Abandoned>),
    Deleted(Result<Result<DeleteReply, Error>, Abandoned>),
    Failed(Reason),
}

impl Asked {
    pub(super) fn poll(&mut self, waker: &Waker) -> Poll<Answer> {
        let mut context = Context::from_waker(waker);
        match self {
            Self::Put(ticket) => Pin::new(ticket).poll(&mut context).map(Answer::Put),
            Self::Get(stream) => stream.poll_end(&mut context).map(Answer::Get),
            Self::Look(ticket) => Pin::new(ticket).poll(&mut context).map(Answer::Looked),
            Self::Delete(ticket) => Pin::new(ticket).poll(&mut context).map(Answer::Deleted),
            Self::Failed(reason) => Poll::Ready(Answer::Failed(reason.clone())),
        }
    }
}

/// What became of each key of a piece.
pub(super) struct Told {
    pub(super) results: Vec<Result<(), Reason>>,
    pub(super) written: u32,
    pub(super) lease: Option<LeaseId>,
}

impl From<Vec<Result<(), Reason>>> for Told {
    fn from(results: Vec<Result<(), Reason>>) -> Self {
        Self { results, written: 0, lease: None }
    }
}

/// Says for each key how it went.
pub(super) fn tell(keys: &[BlockKey], answer: Answer) -> Told {
    let all = |reason: Reason| vec![Err(reason); keys.len()].into();
    match answer {
        Answer::Failed(reason) => all(reason),
        Answer::Put(Ok(Err(Error(reason))))
        | Answer::Looked(Ok(Err(Error(reason))))
        | Answer::Deleted(Ok(Err(Error(reason)))) => all(reason),
        Answer::Put(Err(Abandoned))
        | Answer::Get(Err(Abandoned))
        | Answer::Looked(Err(Abandoned))
        | Answer::Deleted(Err(Abandoned)) => all(STOPPED),
        Answer::Put(Ok(Ok(reply))) => {
            let written = reply.outcomes.iter().filter(|one| **one == BlockOutcome::Stored).count() as u32;
            let results = reply.outcomes.into_iter().map(stored).collect();
            Told { results, written, lease: None }
        }
        Answer::Get(Ok(end)) => {
            let mut results = vec![Ok(()); keys.len()];
            for (place, reason) in end.failures {
                if let Some(result) = results.get_mut(place as usize) {
                    *result = Err(reason);
                }
            }
            results.into()
        }
        Answer::Looked(Ok(Ok(ContainsReply { presence, lease, .. }))) => {
            let result = |(key, presence): (&BlockKey, Presence)| match presence {
                Presence::Here => Ok(()),
                Presence::Pending => Err(Reason::InFlight),
                Presence::Absent => Err(Reason::NotHere(*key)),
            };
            Told { results: keys.iter().zip(presence).map(result).collect(), written: 0, lease }
        }
        Answer::Deleted(Ok(Ok(reply))) => {
            let result = |(key, outcome): (&BlockKey, DeleteOutcome)| match outcome {
                DeleteOutcome::Deleted => Ok(()),
                DeleteOutcome::NotHere => Err(Reason::NotHere(*key)),
                DeleteOutcome::Refused(reason) => Err(reason),
            };
            keys.iter().zip(reply.outcomes).map(result).collect::<Vec<_>>().into()
        }
    }
}

fn stored(outcome: BlockOutcome) -> Result<(), Reason> {
    match outcome {
        BlockOutcome::Stored | BlockOutcome::AlreadyThere | BlockOutcome::HeldElsewhere => Ok(()),
        BlockOutcome::InFlight => Err(Reason::InFlight),
        BlockOutcome::Refused(reason) => Err(reason),
    }
}
