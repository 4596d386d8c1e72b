//! `kvarts bench`: the engine measured beside a bare loop, in one run.
//!
//! No figure here stands alone. Each is a ratio of two contestants that took turns on the same files, with the same
//! number of threads, ring flags, registered memory, request sizes and bytes in flight; beside it stands the same
//! ratio of the bare loop to itself (the control). Where the control strays from one, the machine was too restless,
//! and the report says that it is not to be quoted.
//!
//! This is the one place of the program that looks at the wall clock to time things, and that touches files beside
//! the store's own seam: it measures a real machine, so nothing of it runs in the simulation.
#![allow(
    clippy::disallowed_methods,
    reason = "benchmarks measure a real machine, with its clock, its threads and temporary files"
)]
#![allow(
    clippy::disallowed_types,
    reason = "the benchmark of look-ups compares the index with a plain hash map"
)]

mod bare;
mod bare_server;
mod churn;
mod cold;
mod crossover;
mod device;
mod digits;
mod dual;
mod encoded;
mod fio;
mod fsck;
mod gpu;
mod layers;
mod local;
mod lookup;
mod mixed;
mod open;
mod pairs;
mod put;
mod replay;
mod report;
mod scale;
mod scratch;
mod serve;
mod setup;
pub mod sim;
mod times;
mod trace;
mod traces;
mod verdict;

use std::io::Write;

use clap::{Args, Subcommand};

use kvarts_terminal::Failure;

/// Which part of the engine is measured.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Subcommand, Debug)]
enum BenchCommand {
    /// Read a long prefix layer by layer, cold, with every digest checked
    Layers(layers::LayersArgs),
    /// Put records durably, alone and in groups, into new and recycled files
    Put(put::PutArgs),
    /// Look up the keys of a prompt among a million blocks
    Match(lookup::MatchArgs),
    /// Open a store of a million blocks after a crash and after a clean stop
    Open(open::OpenArgs),
    /// Keep a full store in use and watch disk, memory, descriptors and write amplification
    Churn(churn::ChurnArgs),
    /// Replay a trace of requests and compare the hits with the hits of an exact LRU
    Replay(replay::ReplayArgs),
    /// Fill the index with up to a hundred million blocks, and measure the engine's background work
    Scale(scale::ScaleArgs),
    /// Write a synthetic trace of requests for `bench replay`
    Trace(trace::TraceArgs),
    /// Read layers from a nearly full store while puts, reclaim and compaction run
    Mixed(mixed::MixedArgs),
    /// Read a prefix encoded by compaction, and compare with the same bytes unencoded
    Encoded(encoded::EncodedArgs),
    /// Check a store with all digests, and compare with a bare sequential read of its files
    Fsck(fsck::FsckArgs),
    /// Read over gRPC on loopback, and compare with a bare server that streams from memory
    Serve(serve::ServeArgs),
    /// Read from two other nodes at once, and from each of them alone
    Dual(dual::DualArgs),
    /// Restore from object storage, compare with bare requests for the same bytes, and measure the effect on other reads
    Cold(cold::ColdArgs),
    /// Find the size of a layer's chunk from which full-block layout reads as fast as layer-block
    Crossover(crossover::CrossoverArgs),
    /// Measure the disks with one workload, and compare the prediction with another workload
    Times(times::TimesArgs),
    /// Load layers from disk to a device while an engine computes
    Gpu(gpu::GpuArgs),
}

/// Runs one of the subcommands. What it made on this machine is gone when it ends, however that is.
pub fn run(arguments: &BenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let done = measure(arguments, out);
    kvarts_terminal::undo::last_word();
    done
}

fn measure(arguments: &BenchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.command {
        BenchCommand::Layers(arguments) => layers::run(arguments, out),
        BenchCommand::Put(arguments) => put::run(arguments, out),
        BenchCommand::Match(arguments) => lookup::run(arguments, out),
        BenchCommand::Open(arguments) => open::run(arguments, out),
        BenchCommand::Churn(arguments) => churn::run(arguments, out),
        BenchCommand::Replay(arguments) => replay::run(arguments, out),
        BenchCommand::Scale(arguments) => scale::run(arguments, out),
        BenchCommand::Trace(arguments) => trace::run(arguments, out),
        BenchCommand::Mixed(arguments) => mixed::run(arguments, out),
        BenchCommand::Encoded(arguments) => encoded::run(arguments, out),
        BenchCommand::Fsck(arguments) => fsck::run(arguments, out),
        BenchCommand::Serve(arguments) => serve::run(arguments, out),
        BenchCommand::Dual(arguments) => dual::run(arguments, out),
        BenchCommand::Cold(arguments) => cold::run(arguments, out),
        BenchCommand::Crossover(arguments) => crossover::run(arguments, out),
        BenchCommand::Times(arguments) => times::run(arguments, out),
        BenchCommand::Gpu(arguments) => gpu::run(arguments, out),
    }
}
