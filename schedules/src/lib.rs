//! The engine's own sources, compiled over a scheduler that decides, from a seed, which thread goes on.
//!
//! The modules of `kvarts-store` are included here by path, unchanged, except one: [`sync`], from which they all take
//! what threads share state by. There it is the standard library; here it is shuttle, which runs all threads of a
//! scene on one, and at every lock, atomic and wait picks the next at random. So a race shows by its seed and not by
//! luck, a lost wake-up is a deadlock that is seen at once, and `kvarts-store` itself pays nothing and has no feature
//! that could be switched on by mistake. The price is that the engine is compiled twice.
//!
//! What is explored is the order in which threads take turns. Weaker orders of memory are not: every atomic is
//! sequentially consistent here, whatever ordering it asks for.
#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "the engine's sources, of which the scenes use some"
)]

// The simulated disk and the fixtures of `kvarts-tests` name the store by its crate.
extern crate self as kvarts_contract;
extern crate self as kvarts_store;

#[path = "../../contract/src/api/mod.rs"]
pub mod api;
#[path = "../../contract/src/blocking.rs"]
pub mod blocking;
#[path = "../../contract/src/buffers/mod.rs"]
pub mod buffers;
#[path = "../../contract/src/class.rs"]
pub mod class;
#[path = "../../contract/src/clock.rs"]
pub mod clock;
#[path = "../../store/src/driver/mod.rs"]
pub mod driver;
#[path = "../../store/src/engine/mod.rs"]
pub mod engine;
#[path = "../../contract/src/error/mod.rs"]
pub mod error;
#[path = "../../contract/src/events/mod.rs"]
pub mod events;
#[path = "../../store/src/index/mod.rs"]
pub mod index;
#[path = "../../store/src/io/mod.rs"]
pub mod io;
#[path = "../../contract/src/io_error.rs"]
pub mod io_error;
#[path = "../../store/src/ledger/mod.rs"]
pub mod ledger;
#[path = "../../store/src/lend.rs"]
pub mod lend;
#[path = "../../store/src/memory_ids.rs"]
mod memory_ids;
#[path = "../../store/src/rt/mod.rs"]
pub mod rt;
#[path = "../../store/src/task.rs"]
mod task;
#[path = "../../contract/src/ticket.rs"]
pub mod ticket;

#[path = "../../tests/src/fixture.rs"]
mod fixture;
#[path = "../../tests/src/sim/mod.rs"]
mod sim;

mod explore;
mod scenes;
pub mod sync;
mod uses;

pub use explore::{Failure, Schedule, run, uses_of_read};
pub use scenes::{Scene, all, shared_bytes};
pub use sync::Race;
