//! The Kvarts engine: shards, log, index, recovery, and the one I/O seam.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)
)]

pub mod api;
pub mod batch;
pub mod driver;
pub mod engine;
pub mod error;
pub mod events;
pub mod home;
pub mod index;
pub mod io;
pub mod ledger;
mod memory_ids;
pub mod rt;
mod sync;
mod task;
