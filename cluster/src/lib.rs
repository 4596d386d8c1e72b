//! What the nodes of a cluster decide, as pure state machines: no I/O, no clock, no randomness. The caller brings the time
//! and what arrived, and gets what is to be done. The server and the simulation drive the same code.
//!
//! - [`members`]: who belongs to the cluster in one epoch, and the file that names them where nothing else runs;
//! - [`registry`]: which change of the members is due where nodes register themselves;
//! - [`partition`]: which member holds which part of the directory;
//! - [`directory`]: who has which block: hints that events feed, and that are rebuilt when they are lost;
//! - [`feed`]: what a node sends to those who hold the directory;
//! - [`ownership`]: who owns a chain of blocks, under leases with fencing tokens;
//! - [`sessions`]: who goes on from which blocks, and for how long they are held for it;
//! - [`hot`]: what is read so often that a copy is worth its bytes;
//! - [`paths`]: how fast each way to the bytes is, and how much waits there;
//! - [`dealer`]: which path reads which piece of one read.
//!
//! Times are [`Duration`](std::time::Duration)s since a start that the caller chooses.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod dealer;
pub mod deletes;
pub mod directory;
pub mod feed;
pub mod hot;
pub mod members;
pub mod ownership;
pub mod partition;
pub mod paths;
pub mod registry;
pub mod sessions;
