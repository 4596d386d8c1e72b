//! Nodes on this machine's loopback: what they tell each other, what they read from each other, and what goes wrong.

mod common;
mod copies;
mod cut_connections;
mod deletes;
#[path = "../../tests/src/depth.rs"]
mod depth;
mod nodes;
#[path = "../../tests/tests/proxied/mod.rs"]
mod proxied;

mod silence;
mod strange_nodes;
