//! The program as it is run: every command, the server, its page, and several servers at once.
#![allow(
    clippy::disallowed_methods,
    reason = "real processes, files and sockets stand outside the simulation"
)]

mod admin_cli;
mod answers;
mod anybody;
mod bench_cli;
mod browser;
mod client_cli;
mod cluster_deletes;
mod cluster_etcd;
mod cluster_kill;
mod cluster_namespaces;
mod cold_cli;
mod cold_cluster;
mod cold_serve;
mod commands;
mod compact_cli;
mod daily_cli;
mod demo_cli;
#[path = "../../tests/src/depth.rs"]
mod depth;
mod documented;
#[path = "../../tests/tests/served/etcd.rs"]
mod etcd;
mod examples;
mod fsck_bad_input;
mod fsck_cli;
mod gpu_cli;
mod hostile_process;
mod memory_group;
mod metrics;
mod model_cli;
mod offline_cli;
mod output_cli;
mod page;
#[path = "../../bucket/tests/proxy/mod.rs"]
mod proxy;
mod quickstart;
mod raw;
mod reference;
mod refusals_cli;
mod replace_disk;
#[path = "../../bucket/tests/s3/mod.rs"]
mod s3;
mod sample;
mod scratch;
mod serve_process;
mod served;
mod session_cli;
mod sim_cli;
mod start_stopped;
mod trouble;
