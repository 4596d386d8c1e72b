//! Nodes that read from each other: the lane between two of them, and reads that take several paths at once.
//!
//! - [`path`]: what a way to bytes is: own disks, a peer;
//! - [`read`]: one read over several of them;
//! - [`lane`]: the connection between two nodes that carries bytes.
//! - [`credentials`]: certificates of nodes;
//! - [`etcd`]: members that register themselves;
//! - [`node`]: what a node tells the others of its blocks, and how it asks them.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod credentials;
pub mod etcd;
pub mod lane;
pub mod node;
pub mod path;
pub mod read;
