//! `bench trace`: writes a made-up trace of requests, as `bench replay` reads them.

use std::io::Write;

use clap::Args;

use crate::traces::{self, Shape};
use kvarts_terminal::Failure;

/// The arguments of `bench trace`.
#[derive(Args, Debug)]
pub(super) struct TraceArgs {
    /// Kind of the trace: chat, agents, scan, zipf, loop, uniform or shift
    #[arg(value_parser = shape)]
    shape: Shape,
    /// Number of requests
    #[arg(long, default_value_t = 8000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    requests: u32,
    /// The same seed gives the same trace
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn shape(name: &str) -> Result<Shape, String> {
    Shape::named(name).ok_or_else(|| {
        let names = Shape::ALL.map(Shape::name);
        format!("no shape is named `{name}`: use one of {}", names.join(", "))
    })
}

/// Writes the trace.
pub(super) fn run(arguments: &TraceArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let requests = arguments.shape.requests(arguments.seed, arguments.requests as usize);
    Ok(traces::write(&requests, out)?)
}
