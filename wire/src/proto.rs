//! The public contract, compiled from `proto/`: messages, clients and servers of `kvarts.v1`.
#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated; the documentation is in proto/")]

tonic::include_proto!("kvarts.v1");

/// The compiled contract, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kvarts.v1.bin"));
