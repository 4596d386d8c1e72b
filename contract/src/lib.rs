//! What a store of KV-cache blocks does for its callers, without a store behind it.
//!
//! [`KvStore`] is the contract: whatever is read is exactly what one producer put under that key and identity, or a typed miss
//! or an error. The engine (`kvarts_store`), the client (`kvarts_client`) and the reference model of the tests implement it and
//! pass one conformance suite. A caller of a store, or another store, needs this crate and `kvarts_layout`, and no engine.
//!
//! A store in a directory, and the state of a prompt in it ([`ModelBlocks`]; over a client all but the first line is the same):
//!
//! ```
//! use kvarts_contract::{BufMut, ModelBlocks};
//! use kvarts_store::home::Home;
//!
//! # let directory = std::env::temp_dir().join(format!("kvarts-contract-{}", std::process::id()));
//! let home = Home::in_directory(&directory, 256 << 20)?; // at most 256 MiB
//! let blocks = ModelBlocks::new(home.store().clone(), "my-engine", "llama-3.1-8b", "0e9e39f", "bf16", 64)?;
//!
//! // What an engine computed for a prompt of 128 tokens: the bytes of two blocks, all layers of each.
//! let prompt: Vec<u32> = (0..128).collect();
//! let mut state = BufMut::zeroed(2 * blocks.block_bytes())?;
//! state.fill(0x5a);
//! blocks.put(&prompt, state)?;
//!
//! // Another prompt that begins with the same tokens: its first two blocks need not be computed again.
//! let longer: Vec<u32> = (0..256).collect();
//! let usable = blocks.matched(&longer)?;
//! let mut layers = blocks.read_layers(&longer, usable)?;
//! for layer in &mut layers {
//!     // This layer is complete and verified: the engine computes with it while the next one comes.
//!     assert_eq!((layer.blocks, layer.bytes.len()), (2, 2 * blocks.block_bytes() / 32));
//! }
//! // Fewer, where a block could not be read: the rest is computed again.
//! assert_eq!(layers.end().map(|end| end.usable_blocks), Some(usable));
//! home.close()?;
//! # std::fs::remove_dir_all(&directory)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The names below are those that callers need; the modules have the rest, for those who implement a store.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)
)]

pub mod api;
pub mod batch;
pub mod blocking;
pub mod buffers;
pub mod class;
pub mod clock;
pub mod error;
pub mod events;
pub mod io_error;
pub mod model;
#[doc(hidden)]
pub mod sync;
pub mod ticket;

pub use api::{
    BlockOutcome, ContainsReply, ContainsRequest, DeleteOutcome, DeleteReply, DeleteRequest, Digests,
    Durability, KvStore, LayeredPut, LeaseId, LeaseTerms, MatchReply, MatchRequest, Missing, Order, Parent,
    Placed, PlanTerms, Planned, Presence, PutReply, PutRequest, ReadEnd, ReadEvent, ReadRequest, ReadStream,
    StepGate, Target, TiledRead, TiledRequest, TtlReply, TtlRequest, Verify,
};
pub use batch::{BatchId, Block, Completion, EventFds, Lane, Pages, PagesOptions};
pub use blocking::block_on;
pub use buffers::{Arena, Buf, BufMut, Region, SharedBuf};
pub use class::Class;
pub use clock::{Clock, Nanos, SystemClock};
pub use error::{Error, Kind, Reason, SpaceCause};
pub use events::{Cause, Event, EventKind, Gap, Sequence, SnapshotCursor, SnapshotPage, Subscription};
pub use model::{Layers, LoadedLayer, ModelBlocks};
pub use ticket::{Abandoned, Ticket};
