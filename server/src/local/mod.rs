//! The local path: programs on the same host, whose memory the server's disks write to.
//!
//! A client connects to the server's unix socket, says who it is by the same token as over gRPC, and shares memory
//! with the server in one of three modes. Requests then name places in that memory, and what travels over the socket is
//! a few messages for a whole prefix. `docs/LOCAL.md` describes what travels.
//!
//! What a client does to its memory or its socket harms no other:
//! - only files in memory are mapped, and only for devices: the server itself reads and writes them by their descriptors, so
//!   that a page that is not there, or a file that was shortened, is an error or zeros, and no signal;
//! - what is found in a client's memory proves nothing about a disk: a digest that does not match there is looked up
//!   again in memory of the server's own before a block is called damaged;
//! - a put is copied out of the client's memory first, and stored only if the copy has the digest that came with it;
//! - everything that a client holds belongs to its session and goes with it: requests, memories, leases, frames. A
//!   piece of memory that a device still writes to stays mapped until the device is done. Before the connection is closed,
//!   every way but the device's own into the client's memory has ended;
//! - what all sessions share of anything has a part that is set aside for each tenant.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod foreign;
mod incoming;
mod line;
mod listen;
mod memory;
mod outbox;
mod pinned;
mod places;
mod put;
mod read;
mod session;
mod short;
mod threads;

pub(crate) use listen::split;

use kvarts_wire::local::{Mode, frame, limits, socket};
