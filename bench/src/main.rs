//! `kvarts-lab`: the commands that measure, which `kvarts` hands over to it.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kvarts_terminal::Failure;
use kvarts_terminal::program::{self, usage_fault};

/// Benchmark the engine against bare loops, and simulate traces in virtual time
#[derive(Parser, Debug)]
#[command(name = "kvarts-lab", bin_name = "kvarts", version, max_term_width = 80)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Benchmark Kvarts against bare programs over the same data
    Bench(Box<kvarts_bench::BenchArgs>),
    /// Simulate a disk tier, an engine or a cluster in virtual time
    Sim(Box<kvarts_bench::sim::SimArgs>),
}

fn main() -> ExitCode {
    program::main(run)
}

fn run(arguments: Vec<OsString>, out: &mut dyn Write) -> Result<(), Failure> {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        // Help and the version are answers, not faults.
        Err(error) if !error.use_stderr() => return Ok(write!(out, "{}", error.render())?),
        Err(error) => return Err(Failure::User(usage_fault(&error))),
    };
    match cli.command {
        Command::Bench(arguments) => kvarts_bench::run(&arguments, out),
        Command::Sim(arguments) => kvarts_bench::sim::run(&arguments, out),
    }
}
