//! What calls do, whichever way they come: over gRPC (`grpc/`) or on the same host (`local/`).
//!
//! A face takes a request in and sends its answer; what is asked, whether it may be, what the engine is told, and what
//! is counted of it stands here once.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod beyond;
pub(crate) mod call;
mod cold;
pub(crate) mod directory;
pub(crate) mod download;
mod entries;
pub(crate) mod heavy;
pub(crate) mod lookups;
pub(crate) mod methods;
pub(crate) mod purge;
pub(crate) mod route;
pub(crate) mod sessions;
pub(crate) mod store;
pub(crate) mod upload;

use kvarts_wire::{convert, fault, limits};
