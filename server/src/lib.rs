//! The server: the daemon, gRPC, the local path, tenants and metrics.
//!
//! Tests and other programs run one inside their own process ([`daemon::Daemon`]) and talk to it (crate `kvarts-client`).

pub(crate) mod calls;
pub mod cold;
pub mod config;
pub mod counters;
pub mod daemon;
pub mod grpc;
pub mod human;
pub mod local;
pub mod metrics;
pub(crate) mod returned;
pub(crate) mod sizes;
pub mod state;
