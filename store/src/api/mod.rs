//! What a store does for its callers.

pub mod placement;
pub mod put;
pub mod read;

pub use placement::Placed;
pub use put::{BlockOutcome, Durability, MAX_REQUEST_BLOCKS, Parent, PutReply, PutRequest};
pub use read::{Order, ReadEnd, ReadEvent, ReadRequest, ReadSink, ReadStream, Verify, read_channel};
