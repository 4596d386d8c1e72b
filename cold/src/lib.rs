//! The cold tier: an object storage behind the disks that keeps what outlives them.
//!
//! docs/COLD.md is the normative description. Invariants:
//! - Nothing that comes out of a bucket is believed: an index is proven by its pack's name, a block by its digests and its
//!   content id, a manifest by its hash. What cannot be proven is a miss.
//! - A pack is written before its index, and the index before the manifest that names it. Who reads begins at the manifest,
//!   so nothing is visible before it is whole.
//! - Packs never change, and their name is not used again for other bytes. Manifests change by compare-and-set alone.
//! - Requests, bytes, retries and memory are bounded; time, randomness and the network come through seams.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod format;
