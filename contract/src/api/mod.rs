//! What a store does for its callers: one small trait, and the requests and answers of its methods.
//!
//! Guarantees first; the engine, the reference model and every client implement the same trait and pass the same
//! conformance suite.

pub mod by_layers;
pub mod delete;
pub mod digests;
pub mod leaving;
pub mod lookup;
pub mod origins;
pub mod placement;
pub mod presence;
pub mod progress;
pub mod put;
pub mod read;
pub mod step_gate;
pub mod tiled;

use std::time::Duration;

use kvarts_layout::{Geometry, Identity, NamespaceId};

pub use by_layers::LayeredPut;
pub use delete::{DeleteOutcome, DeleteReply, DeleteRequest, Target, TtlReply, TtlRequest};
pub use digests::Digests;
pub use leaving::{Leaving, SegmentBlocks};
pub use lookup::{
    Beyond, BeyondColumn, DiskLink, LeaseId, LeaseTerms, MAX_MATCH_ENTRIES, MatchReply, MatchRequest,
    Missing, PIN_BYTES, PlanTerms, Planned,
};
pub use origins::{Life, Origins};
pub use placement::Placed;
pub use presence::{ContainsReply, ContainsRequest, Presence};
pub use progress::ReadProgress;
pub use put::{BlockOutcome, Durability, MAX_REQUEST_BLOCKS, Parent, PutReply, PutRequest};
pub use read::{
    Order, Poller, ReadEnd, ReadEvent, ReadRequest, ReadSink, ReadStream, SMALL_READ_BYTES, Verify,
    read_channel, wanted_layers,
};
pub use step_gate::StepGate;
pub use tiled::{
    Arrived, Instead, Late, ShortTile, TileBytes, TileMemory, TileSource, TiledRead, TiledRequest,
};

use crate::clock::Nanos;
use crate::error::{Error, Reason, ShapeCause};
pub use crate::events::{Cause, Event, EventKind, Gap, Sequence, SnapshotCursor, SnapshotPage, Subscription};
use crate::ticket::{Ticket, ticket};

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

    /// The same for copies of blocks that were produced at this time, in milliseconds since 1970 ([`Life::produced_ms`]): where deletes
    /// go by the times of productions, a copy is as old as what it is a copy of. A store that keeps no such times takes them as any
    /// other blocks.
    fn put_copies(&self, request: PutRequest, produced_ms: u64) -> Ticket<Result<PutReply, Error>> {
        let _ = produced_ms;
        self.put(request)
    }

    /// Begins a put whose layers come one after the other, from memory that they use in turns
    /// ([`Placed::gated_layers`]): each is written when it is offered, and all blocks become visible together when
    /// the put is sealed, as [`KvStore::put`] says; nothing is visible before.
    ///
    /// Refused, with nothing kept of it, where the blocks must be put whole instead, by [`KvStore::put`] from memory that holds all layers:
    /// some of them are stored or are being put; they take less than a sixteenth of a segment, or more than one; too many such puts are
    /// under way in their shard, or it has too few segments for one; or this store is in another process, as a client's is. One that gets no
    /// segment by its deadline is refused with that.
    fn put_layers(&self, request: PutRequest) -> Ticket<Result<LayeredPut, Error>> {
        drop(request);
        let (reply, answer) = ticket();
        let _ = reply
            .send(Err(Reason::Shape(ShapeCause::Rule("this store does not support puts by layers")).into()));
        answer
    }

    /// Says which prefix can be restored now, from memory alone. With a lease, nothing of the usable prefix is
    /// evicted before the lease ends.
    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error>;

    /// Says of each block whether it can be read now, from memory alone. With a lease, none of those that are here
    /// is evicted before the lease ends.
    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error>;

    /// As [`KvStore::contains`], for callers that cannot wait for a store that is elsewhere. Dropping the ticket leaves a lease
    /// to end by itself.
    fn look_up(
        &self,
        request: &ContainsRequest<'_>,
        deadline: Option<Nanos>,
    ) -> Ticket<Result<ContainsReply, Error>> {
        let _ = deadline;
        let (reply, answer) = ticket();
        // The asking end is still here.
        let _ = reply.send(self.contains(request));
        answer
    }

    /// Ends a lease early; false if it had ended.
    fn unlock(&self, lease: LeaseId) -> bool;

    /// Makes a lease that is in force end `hold` from now, sooner or later than before. One that has ended is
    /// refused with [`Reason::LeaseEnded`]: look the blocks up again.
    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error>;

    /// Holds blocks against eviction and expiry until they are unpinned: [`KvStore::contains`] with a lease of
    /// [`LeaseTerms::UNLIMITED`], or any other term. Pins and leases end with the process at the latest.
    fn pin(
        &self,
        request: &ContainsRequest<'_>,
        tenant: u32,
        cap_bytes: u64,
    ) -> Result<ContainsReply, Error> {
        let terms = LeaseTerms { hold: LeaseTerms::UNLIMITED, tenant, cap_bytes };
        self.contains(&ContainsRequest { lease: Some(request.lease.unwrap_or(terms)), ..request.clone() })
    }

    /// Ends a pin; false if it had ended.
    fn unpin(&self, pin: LeaseId) -> bool {
        self.unlock(pin)
    }

    /// Deletes blocks, leased or not. From the call on they are not found; once the ticket says that they are
    /// deleted, no crash, recovery, compaction or late put brings them back. A put that is under way when it meets
    /// the delete is refused with [`Reason::Deleted`]; one that begins after the
    /// answer is kept. Reads under way deliver what they had found. A lease on a deleted block holds nothing more
    /// of it, but counts against its tenant's cap until it ends. The space comes back with the segment's reclaim.
    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>>;

    /// Changes how long blocks may live, from memory alone. A crash may forget the change until the next
    /// checkpoint, and a restart takes the longest time of blocks that lie in one record: set it again after a
    /// restart where it matters. A shorter time that is over by then may be forgotten with its block, which is back until
    /// the time of its put. A lease holds a block past its time.
    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error>;

    /// Sets how long blocks of a namespace may live whose put does not say: those of puts that begin from now on.
    /// `None` leaves it to eviction. Like the registration it holds for as long as the store is open.
    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error>;

    /// What happens to blocks from now on, or from a point that an earlier event or snapshot named. Nothing is
    /// missing between two events of a subscription: a subscriber that is too slow, or resumes where the store remembers
    /// nothing any more, is told [`Gap`] and takes a snapshot. No reader slows the store.
    fn subscribe(&self, from: Option<Sequence>) -> Subscription;

    /// A page of what is here now; the first with `None`, the next with the cursor of the one before. All pages
    /// together, changed by every event since [`SnapshotPage::sequence`], are the content.
    fn snapshot(&self, cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>>;

    /// Reads blocks into the caller's memory. What is announced is complete and verified, and it stays so; the
    /// destinations must be left alone until the stream has ended.
    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error>;

    /// Where the tiles of a [`TiledRead`] of these blocks come from. A store that has none refuses.
    fn tiles(&self, request: TiledRequest) -> Result<Box<dyn TileSource>, Error> {
        let _ = request;
        let why = "tiled reads are supported only by a store in this process: stage the blocks in a pool, and copy \
            the blocks from the pool";
        Err(Reason::Shape(ShapeCause::Rule(why)).into())
    }
}
