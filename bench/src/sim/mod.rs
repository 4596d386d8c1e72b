//! `kvarts sim`: traces against tiers, in virtual time.
#![allow(
    clippy::disallowed_methods,
    reason = "the commands of the simulator read files and measure their own time"
)]

mod cluster;
pub(crate) mod disk;
mod engine;
mod search;

use std::io::Write;

use clap::{Args, Subcommand};

use kvarts_terminal::Failure;

/// Arguments of `kvarts sim`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SimArgs {
    #[command(subcommand)]
    command: Option<SimCommand>,
    #[command(flatten)]
    run: cluster::RunArgs,
}

#[derive(Subcommand, Debug)]
enum SimCommand {
    /// Replay a trace against the disk tier alone: the real engine on a disk in memory (`bench replay` uses a real disk)
    Disk(disk::DiskArgs),
    /// Find the configurations that meet targets of latency, with the best latency, throughput and cost
    Search(Box<search::SearchArgs>),
    /// Compare the times to the first token and the throughput in recordings of a real engine with a simulation
    Engine(engine::EngineArgs),
}

/// Runs one of the subcommands, or a cluster.
pub fn run(arguments: &SimArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.command {
        None => cluster::run(&arguments.run, out),
        Some(SimCommand::Disk(arguments)) => disk::run(arguments, out),
        Some(SimCommand::Search(arguments)) => search::run(arguments, out),
        Some(SimCommand::Engine(arguments)) => engine::run(arguments, out),
    }
}
