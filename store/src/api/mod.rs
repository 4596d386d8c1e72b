//! What a store does for its callers: one small trait, and the requests and answers of its methods.
//!
//! Guarantees first; the engine, the reference model and every client implement the same trait and pass the same
//! conformance suite.

pub mod lookup;
pub mod placement;
pub mod presence;
pub mod put;
pub mod read;
pub mod turns;

use kvarts_layout::{Geometry, Identity, NamespaceId};

pub use lookup::{LeaseId, LeaseTerms, MatchReply, MatchRequest};
pub use placement::Placed;
pub use presence::{ContainsReply, ContainsRequest, Presence};
pub use put::{BlockOutcome, Durability, MAX_REQUEST_BLOCKS, Parent, PutReply, PutRequest};
pub use read::{Order, ReadEnd, ReadEvent, ReadRequest, ReadSink, ReadStream, Verify, read_channel};
pub use turns::Turns;

use crate::error::Error;
use crate::rt::mailbox::Ticket;

/// A store of KV-cache blocks.
///
/// Whatever is read is exactly what one producer put under that key and identity, or it is a typed miss or error:
/// never other bytes, never a mix. Methods may be called from any thread and never wait for a device; what takes
/// time answers through a ticket or a stream.
pub trait KvStore: Send + Sync {
    /// Makes a namespace known, for as long as the store is open; its identity is on disk, durably, before or
    /// with the first block that needs it. Registering the same identity again gives the same namespace.
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error>;

    /// Stores the blocks that are missing. Each block answers for itself: when `Stored` or `AlreadyThere` is
    /// answered it is as durable as was asked; whatever else is answered, nothing of it is visible. The first put
    /// of a key wins; its bytes are never mixed with another's. Dropping the ticket cancels what has not begun.
    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>>;

    /// Says which prefix can be restored now, from memory alone. With a lease, nothing of the usable prefix is
    /// evicted before the lease ends.
    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error>;

    /// Says of each block whether it can be read now, from memory alone. With a lease, none of those that are here
    /// is evicted before the lease ends.
    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error>;

    /// Ends a lease early; false if it had ended.
    fn unlock(&self, lease: LeaseId) -> bool;

    /// Reads blocks into the caller's memory. What is announced is complete and verified, and it stays so; the
    /// destinations must be left alone until the stream has ended.
    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error>;
}
