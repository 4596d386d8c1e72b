//! The connection between two nodes that carries bytes.
//!
//! A node that serves ([`LaneServer`]) reads blocks of its store for others, below its own reads, and sends them straight from
//! the memory that its disks filled. A node that asks ([`LaneClient`]) is a [`Path`](crate::path::Path): bytes go from the socket
//! straight to their places, and are compared there with the digests that their producer's store keeps. Whatever the other side
//! says is bounded before anything is allocated for it; who breaks the protocol, or says nothing, loses the connection.
//!
//! | Question | File |
//! |---|---|
//! | What is a frame, and when is it none? | `frame` |
//! | Who is at the other end? | `hello` |
//! | What do its threads run on? | `host` |
//! | What do bytes go over? | `wire`; encrypted: `secured` |
//! | Which bytes follow an answer, and in which order? | `delivery` |
//! | How does a node serve? | `server`, `session`, `sender`, `asked`, `rate` |
//! | How does a node ask? | `client`, `courier`, `arrival` |
//! | What may there be at most? | [`limits`] |

mod arrival;
mod asked;
mod bell;
#[cfg(test)]
#[path = "../../tests/common/certificates.rs"]
mod certificates;
mod client;
mod connection;
mod courier;
#[cfg(test)]
mod decoder_tests;
mod delivery;
mod frame;
mod hello;
mod host;
#[cfg(test)]
mod hostile_tests;
pub mod limits;
mod rate;
mod secured;
#[cfg(test)]
mod secured_tests;
mod sender;
mod server;
mod serving;
mod session;
#[cfg(test)]
mod tests;
mod wire;

pub use bell::Bell;
pub use client::{ClientCounts, LaneClient};
pub use hello::{Member, Secret};
pub use host::Machine;
pub use server::{LaneServer, ServeCounts};
pub use serving::{ServeLimits, Served};
pub use wire::{Broken, Host, Join, Ready, Wire};
