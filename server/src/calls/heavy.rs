//! Work that keeps a processor busy for long, done where it holds up no other call.
//!
//! A look-up of a million entries would have a thread to itself that all connections share. Such work is done on other
//! threads, and by turns: each tenant has one of its own, so that what one asks for delays no other. It ends also where
//! no caller waits for its answer any more: then the lease that it took is ended, since its name was not told.

use std::sync::Arc;

use super::call::Call;
use super::fault::{Fault, Outcome};
use super::{limits, store};
use kvarts_contract::error::Reason;
use kvarts_wire::proto;

/// Bytes of a specification that are as much work as one entry of a look-up.
const SPEC_BYTES_PER_ENTRY: usize = 16;
/// A column's shape of a large model, in entries of a look-up.
const ENTRIES_PER_COLUMN: usize = 512;

/// What is counted of a node that a request may go to.
const CANDIDATES_PER_NODE: usize = 6;

/// An answer to a look-up.
pub(crate) trait Answer: Send + 'static {
    /// The name of the lease that was taken; 0 for none.
    fn lease(&self) -> u64 {
        0
    }
}

impl Answer for proto::MatchReply {
    fn lease(&self) -> u64 {
        self.lease
    }
}

impl Answer for proto::ExistsReply {
    fn lease(&self) -> u64 {
        self.lease
    }
}

impl Answer for proto::PinReply {
    fn lease(&self) -> u64 {
        self.lease
    }
}

impl Answer for proto::RouteReply {}
impl Answer for proto::SessionReply {}
impl Answer for proto::SetTtlReply {}
impl Answer for proto::RegisterModelReply {}
impl Answer for proto::ListModelsReply {}

/// An answer on its way to its caller.
struct Told<A: Answer>(Arc<Call>, Option<A>);

impl<A: Answer> Drop for Told<A> {
    fn drop(&mut self) {
        // Its caller is gone.
        if let Some(lease) = self.1.as_ref().map(A::lease).filter(|lease| *lease != 0) {
            store::unlock(&self.0, &proto::UnlockRequest { lease });
        }
    }
}

/// Does work over `entries` entries: here if they are few, else on another thread when it is the tenant's turn.
pub(crate) async fn heavily<A: Answer>(
    call: Arc<Call>,
    entries: usize,
    work: impl FnOnce(&Call) -> Outcome<A> + Send + 'static,
) -> Outcome<A> {
    if entries <= limits::LIGHT_ENTRIES {
        return work(&call);
    }
    let until = call.deadline.min(tokio::time::Instant::now() + limits::WAIT);
    let turn = tokio::time::timeout_at(until, call.state.heavy.take(call.caller.tenant.number, 1)).await;
    let turn =
        turn.ok().flatten().ok_or_else(|| Fault::busy("the tenant's limit of long look-ups is reached"))?;
    let done = tokio::task::spawn_blocking(move || {
        // Kept until the work is done, also where its caller is gone.
        let _turn = turn;
        let answer = work(&call)?;
        Outcome::Ok(Told(call, Some(answer)))
    });
    // ends: the call's deadline; the work goes through `entries` entries in memory
    let mut told = done.await.map_err(|_| Fault::busy("the server is stopping"))??;
    told.1.take().ok_or_else(|| Reason::Bug("an answer was read twice").into())
}

/// Entries that a match looks at.
pub(crate) fn of_match(wire: &proto::MatchRequest) -> usize {
    let columns: usize = wire.requirements.iter().map(|one| one.coordinates.len().max(1)).sum();
    of_keys(&wire.keys).saturating_mul(columns)
}

/// Candidates that a route counts.
pub(crate) fn of_route(wire: &proto::RouteRequest) -> usize {
    wire.nodes.len().saturating_mul(CANDIDATES_PER_NODE)
}

/// Keys of a request.
pub(crate) fn of_keys(keys: &[u8]) -> usize {
    keys.len() / 32
}

/// What a registration computes.
pub(crate) fn of_registration(wire: &proto::RegisterModelRequest) -> usize {
    use prost::Message;
    wire.encoded_len() / SPEC_BYTES_PER_ENTRY + wire.columns.len() * ENTRIES_PER_COLUMN
}
