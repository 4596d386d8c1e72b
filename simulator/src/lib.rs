//! Traces of requests against a cluster's tiers, in virtual time.
//!
//! - [`trace`]: requests, streamed from a file, with the place of whatever is wrong in it;
//! - [`disk`]: the disk tier alone: the engine itself, over a disk in memory or a real one, driven step by step on the
//!   trace's clock, so that both decide the same, event for event;
//! - [`cluster`]: nodes with all their tiers, engines and routers, as discrete events;
//! - [`recorded`]: what a real engine's scheduler decided, for the simulator to be held to it.
//!
//! Nothing here asks for the time or for randomness: the same input and seed give the same bytes of output.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod disk;
mod ids;
pub mod recorded;
pub mod trace;
