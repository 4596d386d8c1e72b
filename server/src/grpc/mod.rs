//! The gRPC face of a server: the services of `proto/`, the authentication layer around them, and their transport.
//!
//! A request is bounded and checked where it comes in (one place for each call), then it is the engine's: nothing
//! here waits for a device except through the engine's tickets and streams, and no request holds more memory than
//! it was given by the server's arenas.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod admin;
mod admission;
mod answer;
mod fair_connection;
pub mod frame;
mod health;
mod listing;
mod messages;
mod models;
mod points;
mod put;
mod read;
mod request;
mod serve;
mod services;
mod unsent;
mod watch;

use kvarts_wire::{convert, digest, fault, limits};

pub use serve::{Identity, Listeners, Tls, incoming_tcp, serve, transport};
pub use services::one_message;
