//! The disk tier alone: a trace against the engine itself.
//!
//! What a store keeps and evicts is decided by the engine's own code here, not by a model of it. [`Machine`] runs it on
//! the caller's thread and on the trace's clock; below it is either a disk in memory that keeps no zeros ([`MemoryIo`]) or
//! a real one whose completions come in the order of submission ([`Lockstep`]). Both see the same operations and answer
//! alike, so both decide the same: `kvarts sim disk` and `kvarts bench replay` give the same events, one by one.

mod bounds;
mod events;
mod lockstep;
mod machine;
mod memory;
mod pages;
mod replay;

pub use bounds::{Distinct, IdealHits, LruHits};
pub use events::{Happened, Kind};
pub use lockstep::Lockstep;
pub use machine::{Machine, MakeIo};
pub use memory::MemoryIo;
pub use replay::{Figures, Replay, Settings, block_key, identity};
