//! What a hit is worth, and where a request should go.
//!
//! Pure functions: no I/O, no clock, no randomness. The caller brings what is measured (queues and rates of the ways to
//! the bytes, times of an engine) and gets numbers with the reason for them. The engine's callers and the simulator call
//! the same functions.
//!
//! - [`cost`]: how long prefill and decode take: from samples, from a device's data sheet, or from both;
//! - [`keep`]: what a stored byte is worth;
//! - [`plan`]: for one request, what is loaded from where, what is computed again, and what that gains;
//! - [`route`]: on which node, with which action, a request costs least;
//! - [`tails`]: what a session keeps of windows and states.
//!
//! Times are `f64` milliseconds, sizes `u64` bytes.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod cost;
pub mod keep;
pub mod plan;
pub mod route;
pub mod tails;
