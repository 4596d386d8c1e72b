//! `bench dual`: reads over two paths at once beside the same reads over each of them alone, and what nodes cost each other.
//! What each node sends is limited (`limits`), so that the paths and not this machine's one disk are what is measured.
//!
//! Peers alone are here; the own disk is in `own`, a path that collapses and what a node's own reads lose in `trouble`, a node
//! that is killed in `failover`, the lane beside a bare pump in `loopback`, the directory in `directory`; the nodes that
//! they all need in `stage`.

mod directory;
mod failover;
mod limits;
mod loopback;
mod own;
mod stage;
mod trouble;

use std::io::Write;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvarts_contract::buffers::BufMut;
use kvarts_terminal::Failure;
use tokio::runtime::Runtime;

use crate::pairs::{Contestant, Sample, Summary, summary, take_turns};
use crate::report::Report;
use crate::scratch::Scratch;
use crate::setup::Common;
use limits::{Limiter, Limits};
use stage::{Trio, chain_keys};

/// The pause before each read: longer than what a node's limit saves up.
const PAUSE: Duration = Duration::from_millis(200);
/// How long the directory may take to hear of what was put.
const PATIENCE: Duration = Duration::from_secs(30);

/// The arguments of `bench dual`.
#[derive(Args, Debug)]
pub(super) struct DualArgs {
    #[command(flatten)]
    common: Common,
    /// Size of each read in MiB
    #[arg(long, default_value_t = 192, value_parser = clap::value_parser!(u64).range(16..=4096))]
    mib: u64,
    /// Combined rate of the two paths in MiB/s, for equal paths and for paths with rates of 3 to 1
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(16..=65536))]
    rate: u64,
    /// Parts to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::value_variants().iter().copied())]
    only: Vec<Part>,
    /// Mechanism that limits the rates of the paths
    #[arg(long, value_enum, default_value = "auto")]
    limiter: Limiter,
    /// Number of blocks that are announced to a joining node
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1000..=10_000_000))]
    announce: u64,
}

/// What is measured.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Reads from two peers, without local blocks
    Peers,
    /// Reads from the own disk and a peer, both with the same limit; requires root
    Own,
    /// A path that becomes slow, a killed node, and the reads of a node while it serves another node
    Trouble,
    /// Reads without limits, compared with a bare copy over a socket
    Loopback,
    /// Look-ups, and announcements to a joining node
    Directory,
}

/// A run: what was asked for, and what it stands on.
struct Bench<'a> {
    arguments: &'a DualArgs,
    runtime: Runtime,
    limits: Limits,
}

/// Runs the benchmark.
pub(super) fn run(arguments: &DualArgs, out: &mut dyn Write) -> Result<(), Failure> {
    // A thread of its own: it may go to another network, and what it starts with it.
    let report = std::thread::scope(|scope| scope.spawn(|| measure(arguments)).join());
    report
        .map_err(|_| Failure::user("a thread of the benchmark panicked"))??
        .write(arguments.common.json, out)
}

fn measure(arguments: &DualArgs) -> Result<Report, Failure> {
    let common = &arguments.common;
    let mut report = Report::new("dual");
    let limits = match arguments.limiter {
        Limiter::Nodes => Ok(Limits::of_nodes()),
        Limiter::Auto | Limiter::Kernel => Limits::of_kernel(),
    };
    let limits = match limits {
        Ok(limits) => limits,
        Err(why) if arguments.limiter == Limiter::Kernel => return Err(Failure::User(why)),
        Err(why) => {
            report.note(format!(
                "limits by the kernel: SKIPPED ({why}); instead, each node limits the rate at which it sends"
            ));
            Limits::of_nodes()
        }
    };
    // Two reads' blocks on each of two nodes, which may lie in segments that are not full; no part begins before the last one's are gone.
    let scratch = Scratch::new(common, (arguments.mib << 20) * 5 + (4 << 30))?;
    let bench = Bench { arguments, runtime: Runtime::new().map_err(Failure::user)?, limits };
    report.fact("mib", arguments.mib);
    report.fact("rate_mib", arguments.rate);
    report.fact("pairs", common.pairs);
    report.fact("limiter", if bench.limits.is_of_kernel() { "kernel" } else { "nodes" });
    let rate = arguments.rate << 20;
    let is_wanted = |part| arguments.only.contains(&part);
    let peers = [("equal", [rate / 2, rate / 2]), ("three_to_one", [rate / 4 * 3, rate / 4])];
    for (name, rates) in peers.into_iter().filter(|_| is_wanted(Part::Peers)) {
        let part = scratch.part(name)?;
        let trio = bench.trio(part.path(), rates)?;
        peers_alone(&bench, &trio, (name, rates), &mut report)?;
    }
    if is_wanted(Part::Own) {
        own::measure(&bench, scratch.part("own")?.path(), &mut report)?;
    }
    if is_wanted(Part::Trouble) {
        trouble::measure(&bench, scratch.part("trouble")?.path(), &mut report)?;
        failover::measure(&bench, scratch.part("failover")?.path(), &mut report)?;
    }
    bench.limits.limit(&[]).map_err(Failure::User)?;
    if is_wanted(Part::Loopback) {
        loopback::measure(&bench, &mut report)?;
    }
    if is_wanted(Part::Directory) {
        directory::measure(&bench, scratch.part("directory")?.path(), &mut report)?;
    }
    report.note("all nodes run on this machine, and share its CPU cores and its disk");
    Ok(report)
}

/// Reads of which nothing is local.
fn peers_alone(
    bench: &Bench<'_>,
    trio: &Trio,
    (name, rates): (&str, [u64; 2]),
    report: &mut Report,
) -> Result<(), Failure> {
    let (runtime, count) = (&bench.runtime, bench.count(trio));
    let bytes = count * trio.model.shape.block_bytes();
    let [on_a, on_c, on_both] = [1, 2, 3].map(|chain| chain_keys(chain, count));
    trio.put(runtime, 0, &on_a)?;
    trio.put(runtime, 1, &on_c)?;
    [0, 1].iter().try_for_each(|node| trio.put(runtime, *node, &on_both))?;
    trio.until_known(runtime, &on_a, 1)?;
    trio.until_known(runtime, &on_c, 1)?;
    trio.until_known(runtime, &on_both, 2)?;
    let memory = BufMut::zeroed(bytes as usize).map_err(Failure::user)?.share();
    let contestant = |name, keys| -> Contestant<'_> {
        let memory = memory.clone();
        (name, Box::new(move || trio.read(keys, &memory)))
    };
    let contestants = vec![contestant("a", &on_a), contestant("c", &on_c), contestant("both", &on_both)];
    let rounds = take_turns(bench.arguments.common.pairs, contestants)?;
    let triples = || rounds.of("a").iter().zip(rounds.of("c")).zip(rounds.of("both"));
    let figure = |of: fn(&Sample, &Sample, &Sample) -> f64| -> Summary {
        summary(triples().map(|((a, c), both)| of(a, c, both)).collect())
    };
    report.median(&format!("{name}_ratio"), figure(|a, c, both| a.seconds.min(c.seconds) / both.seconds));
    if rates[0] == rates[1] {
        // Two paths that are the same.
        report.median(&format!("{name}_control"), figure(|a, c, _| a.seconds / c.seconds));
    }
    let sum = (rates[0] + rates[1]) as f64;
    let of_sum = summary(rounds.of("both").iter().map(|both| bytes as f64 / both.seconds / sum).collect());
    report.median(&format!("{name}_sum_ratio"), of_sum);
    let first = figure(|a, c, both| both.first / a.first.min(c.first));
    report.median(&format!("{name}_first_layer_ratio"), first);
    report.median(&format!("{name}_first_layer_ms"), rounds.figure("both", |both| both.first * 1e3));
    let gib = bytes as f64 / f64::from(1 << 30);
    report.median(&format!("{name}_both_cpu_s_per_gib"), rounds.figure("both", |both| both.cpu / gib));
    Ok(())
}
