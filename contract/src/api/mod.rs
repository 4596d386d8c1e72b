//! The interface of a store: one small trait, and the requests and answers of its methods.
//!
//! The engine, the reference model and every client implement this trait and pass the same conformance suite.

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
/// A read returns exactly the bytes that one producer put under this key and identity, or a typed miss or error: never other bytes, and
/// never a mix. Any thread may call a method, and no method waits for a device; longer operations answer with a ticket or a stream.
pub trait KvStore: Send + Sync {
    /// Registers a namespace for as long as the store is open. Its identity is on disk, durably, before or with the first block that needs
    /// it. A second registration of the same identity returns the same namespace.
    fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error>;

    /// Stores the missing blocks. Each block has its own outcome: with `Stored` or `AlreadyThere` the block is as durable as requested;
    /// with any other outcome no part of the block is visible. The first put of a key wins, and its bytes are never mixed with another
    /// put's bytes. Dropping the ticket cancels the work that has not begun.
    fn put(&self, request: PutRequest) -> Ticket<Result<PutReply, Error>>;

    /// The same for copies of blocks that were produced at this time, in milliseconds since 1970 ([`Life::produced_ms`]). If deletes use
    /// the times of productions, a copy is as old as its original. A store without production times handles the copies like any other
    /// blocks.
    fn put_copies(&self, request: PutRequest, produced_ms: u64) -> Ticket<Result<PutReply, Error>> {
        let _ = produced_ms;
        self.put(request)
    }

    /// Begins a put of layers that arrive one after the other and share memory ([`Placed::gated_layers`]). The store writes each layer when
    /// it is offered. All blocks become visible together when the put is sealed, as with [`KvStore::put`], and no block is visible before.
    ///
    /// The store refuses the put, and keeps none of it, if the blocks must be put whole with [`KvStore::put`] from memory that holds all
    /// layers: if some blocks are stored or are being put; if the blocks need less than a sixteenth of a segment or more than one segment;
    /// if too many such puts run in their shard, or the shard has too few segments; or if this store is in another process (a client). A
    /// put that gets no segment by its deadline fails with [`Reason::DeadlinePassed`].
    fn put_layers(&self, request: PutRequest) -> Ticket<Result<LayeredPut, Error>> {
        drop(request);
        let (reply, answer) = ticket();
        let _ = reply
            .send(Err(Reason::Shape(ShapeCause::Rule("this store does not support layered puts")).into()));
        answer
    }

    /// Returns the prefix that can be restored now, from memory alone. With a lease, no block of the usable prefix is evicted before the
    /// lease ends.
    fn match_prefix(&self, request: &MatchRequest<'_>) -> Result<MatchReply, Error>;

    /// Returns for each block whether it can be read now, from memory alone. With a lease, no present block is evicted before the lease
    /// ends.
    fn contains(&self, request: &ContainsRequest<'_>) -> Result<ContainsReply, Error>;

    /// As [`KvStore::contains`], for callers that must not wait for a remote store. If the ticket is dropped, a lease ends at its own time.
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

    /// Ends a lease early. Returns false if the lease had ended.
    fn unlock(&self, lease: LeaseId) -> bool;

    /// Sets the end of a current lease to `hold` from now, earlier or later than before. Fails with [`Reason::LeaseEnded`] if the lease has
    /// ended: look the blocks up again.
    fn renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Error>;

    /// Holds blocks against eviction and expiry until they are unpinned: [`KvStore::contains`] with a lease of [`LeaseTerms::UNLIMITED`],
    /// or of another term. Pins and leases end with the process at the latest.
    fn pin(
        &self,
        request: &ContainsRequest<'_>,
        tenant: u32,
        cap_bytes: u64,
    ) -> Result<ContainsReply, Error> {
        let terms = LeaseTerms { hold: LeaseTerms::UNLIMITED, tenant, cap_bytes };
        self.contains(&ContainsRequest { lease: Some(request.lease.unwrap_or(terms)), ..request.clone() })
    }

    /// Ends a pin. Returns false if the pin had ended.
    fn unpin(&self, pin: LeaseId) -> bool {
        self.unlock(pin)
    }

    /// Deletes blocks, leased or not. No look-up finds them after the call. When the ticket reports them deleted, no crash, recovery,
    /// compaction or late put brings them back. A put that runs at the same time as the delete fails with [`Reason::Deleted`]; a put that
    /// begins after the answer is kept. Reads in progress deliver the blocks that they had found. A lease on a deleted block holds none of
    /// its bytes, but counts against its tenant's cap until the lease ends. The space becomes free when the segment is reclaimed.
    fn delete(&self, request: DeleteRequest) -> Ticket<Result<DeleteReply, Error>>;

    /// Changes the time to live of blocks, from memory alone. A crash before the next checkpoint may undo the change. After a restart all
    /// blocks of one record have the longest time among them, so set the time again after a restart if it matters. If a restart forgets a
    /// shorter time that has passed, the expired block returns with the time to live of its put. A lease holds a block beyond its time to
    /// live.
    fn set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Error>;

    /// Sets the default time to live of a namespace, for puts without their own time that begin from now on. `None` leaves the blocks to
    /// eviction. Like the registration, the default lasts as long as the store is open.
    fn set_default_ttl(&self, namespace: NamespaceId, ttl: Option<Duration>) -> Result<(), Error>;

    /// Subscribes to the events of blocks from now on, or from the point named by an earlier event or snapshot. No event is missing between
    /// two events of a subscription: a subscriber that is too slow, or that resumes at a point that the store no longer remembers, receives
    /// a [`Gap`] and must take a snapshot. No reader slows the store.
    fn subscribe(&self, from: Option<Sequence>) -> Subscription;

    /// Returns a page of the present content: the first page with `None`, the next pages with the cursor of the previous page. The content
    /// is all pages together, changed by every event since [`SnapshotPage::sequence`].
    fn snapshot(&self, cursor: Option<SnapshotCursor>) -> Ticket<Result<SnapshotPage, Error>>;

    /// Reads blocks into the caller's memory. Announced bytes are complete and verified, and stay so. The caller must not use the
    /// destinations until the stream has ended.
    fn read(&self, request: ReadRequest) -> Result<ReadStream, Error>;

    /// Returns the source of the tiles of a [`TiledRead`] of these blocks. A store without such a source refuses.
    fn tiles(&self, request: TiledRequest) -> Result<Box<dyn TileSource>, Error> {
        let _ = request;
        let why = "tiled reads are supported only by a store in this process: stage the blocks in a pool, and copy \
            the blocks from the pool";
        Err(Reason::Shape(ShapeCause::Rule(why)).into())
    }
}
