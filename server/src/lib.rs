//! What the `kvarts` program is made of: the daemon, its gRPC face, its clients, and the command line.
//!
//! The program itself is [`main`]. The rest is public so that tests and other programs can run a server inside
//! their own process ([`daemon::Daemon`]) and talk to one ([`kvarts_client::Client`]).

mod bench;
mod cli;
mod client_cmd;
mod compact_cmd;
pub mod config;
mod config_cmd;
pub mod daemon;
mod demo;
mod devices;
mod files;
mod fsck_cmd;
mod gpu_cmd;
pub mod grpc;
mod human;
pub mod local;
pub mod metrics;
mod model_cmd;
pub mod node;
mod offline;
mod plan_cmd;
pub mod scrub;
mod serve_cmd;
mod sim_cmd;
mod table;
pub mod traces;

pub use cli::main;
