//! `bench cold`: restores from an object storage beside bare ranged requests for the same bytes, and what own reads feel of a
//! spill, of restores, and of a bucket that fails.
//!
//! The storage is one of the benchmark's own on loopback, with a latency and a rate (`objects`), or a real one that is named. Blocks
//! and their packs are in `stage`, the turns of restores in `restores`, own reads beside other work in `beside`, and beside
//! failures in `trouble`.

mod beside;
mod objects;
mod restores;
mod stage;
mod trouble;

use std::io::Write;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvarts_terminal::Failure;

use crate::report::Report;
use crate::scratch::Scratch;
use crate::setup::{self, Common};
use objects::Manners;
use stage::Stage;

/// The arguments of `bench cold`.
#[derive(Args, Debug)]
pub(super) struct ColdArgs {
    #[command(flatten)]
    common: Common,
    /// A real bucket, s3://BUCKET/PREFIX with the environment's credentials, instead of the benchmark's own
    #[arg(long, value_name = "URL")]
    bucket: Option<String>,
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Tokens of a block
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    block_tokens: u32,
    /// Size of a restore in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(4..=1 << 14))]
    mib: u64,
    /// Latency of the benchmark's own bucket: milliseconds from a request to its answer
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    latency_ms: u64,
    /// Bandwidth of the bucket in MiB/s, over all requests; 0 means no limit
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=1 << 20))]
    rate_mib: u64,
    /// Rate of a spill in MiB/s, like the setting `cold.rate`; 0 means no limit
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(0..=1 << 20))]
    spill_mib: u64,
    /// Reads from the own disk in each phase, of one block each
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    reads: u32,
    /// Tokens of a block that is read from the own disk
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    own_block_tokens: u32,
    /// Seconds during which new rounds of one part start; at least six rounds run, or --pairs rounds if --pairs is below six
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Parts to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Part::Restore, Part::Spill])]
    only: Vec<Part>,
}

/// What is measured.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Restores, compared with bare requests
    Restore,
    /// Reads from the own disk while blocks are spilled
    Spill,
    /// Reads from the own disk while blocks are restored
    Beside,
    /// Reads from the own disk while the bucket fails
    Trouble,
}

impl ColdArgs {
    /// Until when rounds of a part are begun that begins now.
    fn time(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    /// Bytes a second that a spill may copy.
    fn spill_rate(&self) -> u64 {
        if self.spill_mib == 0 { u64::MAX } else { self.spill_mib << 20 }
    }

    fn manners(&self) -> Manners {
        Manners {
            latency: Duration::from_millis(self.latency_ms),
            rate: (self.rate_mib > 0).then_some(self.rate_mib << 20),
        }
    }
}

/// Runs the benchmark.
pub(super) fn run(arguments: &ColdArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let common = &arguments.common;
    // Each restore writes all of it once.
    let written = (arguments.mib << 20) * (2 * u64::from(common.pairs) + 6);
    let scratch = Scratch::new(common, written + (2 << 30))?;
    let mut report = Report::new("cold");
    let (stage, home) = Stage::new(arguments, scratch.path(), written + (1 << 30))?;
    setup::describe(&mut report, common, &home)?;
    report.fact("model", stage.subject.name.clone());
    report.fact("block_bytes", stage.subject.shape.block_bytes());
    report.fact("mib", arguments.mib);
    report.fact("bucket", if arguments.bucket.is_some() { "real" } else { "loopback" });
    if arguments.bucket.is_none() {
        report.fact("latency_ms", arguments.latency_ms);
        report.fact("rate_mib", arguments.rate_mib);
    }
    let is_wanted = |part| arguments.only.contains(&part);
    if is_wanted(Part::Restore) {
        restores::measure(&stage, arguments, &mut report)?;
    }
    if is_wanted(Part::Spill) {
        beside::spill(&stage, arguments, &mut report)?;
    }
    if is_wanted(Part::Beside) {
        beside::restore(&stage, arguments, &mut report)?;
    }
    if is_wanted(Part::Trouble) {
        trouble::measure(&stage, arguments, &mut report)?;
    }
    stage.close();
    home.close().map_err(Failure::user)?;
    report.write(common.json, out)
}
