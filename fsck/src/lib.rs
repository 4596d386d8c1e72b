//! The independent witness: offline check, repair, compaction and inspection of a Kvarts store.
//!
//! It knows the format from `kvarts-layout` alone and shares with the engine nothing but the labelled recovery table:
//! no path of the engine's code runs here, so that each of the two can convict the other.
//!
//! Invariants:
//! - Reading never writes: a [`disk::Disk`] cannot, and the check is given nothing else.
//! - Whatever lies on disk is a finding, never a panic: nothing outside tests unwraps or indexes here.
//! - Memory is bounded by the threads, not by the store: see [`check`].
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod artifact;
pub mod check;
pub mod checkpoint;
pub mod compact;
pub mod contents;
pub mod disk;
pub mod export;
pub mod findings;
pub mod holes;
pub mod inspect;
pub mod names;
pub mod needs;
pub mod remedy;
pub mod repair;
pub mod report;
pub mod segment;
mod spill;
pub mod store;
pub mod superblock;
pub mod tree;
pub mod verify;
pub mod walk;
pub mod window;
