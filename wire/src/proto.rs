//! The public contract, compiled from `proto/`: messages, clients and servers of `kvarts.v1`. `wire/tests/generated.rs` makes the code.
#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated; the documentation is in proto/")]

include!("../../proto/generated/kvarts.v1.rs");

/// The compiled contract, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("../../proto/generated/kvarts.v1.bin");
