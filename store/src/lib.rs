//! A store inside this process. Programs begin with [`home::Home`], and use what it opens by the trait `kvarts_contract::KvStore`; the other
//! modules (shards, log, index, recovery, and the one I/O seam) are for Kvarts itself, and change without notice.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::print_stderr)
)]

pub mod driver;
pub mod engine;
pub mod home;
pub mod index;
pub mod io;
pub mod ledger;
pub mod lend;
mod memory_ids;
pub mod rt;
mod task;
