//! Several nodes in one simulation: whole stores on simulated disks, the nodes' own tasks and the lane's own threads, over a
//! simulated network, by one clock and one seed.
//!
//! - [`threads`]: threads of which one runs at a time, until it sleeps;
//! - [`tasks`]: tasks and timers;
//! - [`net`]: what passes between nodes, when, and what becomes of it;
//! - [`wire`]: a connection that carries bytes;
//! - [`ledger`]: what was put, and what must not have happened;
//! - [`calls`]: calls between nodes;
//! - [`town`]: the nodes, and what happens next.

pub mod calls;
pub mod ledger;
pub mod net;
pub mod tasks;
pub mod threads;
pub mod town;
pub mod wire;
