//! The `kvarts` program: every subcommand, but those that measure, which `kvarts-lab` has.

mod cli;
mod client_cmd;
mod cold_cmd;
mod compact_cmd;
mod config_cmd;
mod demo;
mod doctor;
mod exit_codes;
mod files;
mod fsck_cmd;
mod gpu_cmd;
mod health_cmd;
mod identity_cmd;
mod init_cmd;
mod lab_cmd;
mod metrics_address;
mod model_cmd;
mod needs;
mod offline;
mod plan_cmd;
mod replace_cmd;
mod serve_cmd;
mod sizes;
mod top;

fn main() -> std::process::ExitCode {
    cli::main()
}
