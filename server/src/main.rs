//! The `kvarts` program: one binary, every subcommand.

mod bench;
mod cli;
mod devices;
mod files;
mod fsck_cmd;
mod gpu_cmd;
mod human;
mod model_cmd;
mod offline;
mod serve_cmd;
mod table;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
