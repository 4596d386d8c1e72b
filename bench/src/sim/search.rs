//! `kvarts sim search`: which cluster keeps a promise, within bounds, and what to tell `kvarts serve` for it.

use std::fmt::Write as _;
use std::io::Write;

use clap::Args;
use kvarts_simulator::cluster::search::{Promise, Searched, Tried, search};
use kvarts_simulator::cluster::{Bounds, Choices, DRIVES_MAX, NODES_MAX, What};
use serde_json::{Value, json};

use super::cluster::RunArgs;
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// The arguments of `sim search`.
#[derive(Args, Debug)]
pub(crate) struct SearchArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Target for the 99th percentile of the time to the first token, in milliseconds
    #[arg(long, value_name = "MS")]
    ttft_ms: f64,
    /// Target for the 99th percentile of the time for each further token, in milliseconds
    #[arg(long, value_name = "MS")]
    tpot_ms: f64,
    /// Maximum number of runs
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,
    /// Maximum number of nodes [default: twice the number in the file]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    nodes_max: Option<u32>,
    /// Maximum number of drives of a node [default: twice the number in the file, or four]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(0..=i64::from(DRIVES_MAX)))]
    drives_max: Option<u32>,
    /// Maximum cost of all nodes per hour, in the prices of the file
    #[arg(long, value_name = "COST")]
    cost_max: Option<f64>,
    /// Parameters to vary, separated by commas: limits, router, prefetch, nodes, hbm, dram, disk [default: all but hbm]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = what)]
    vary: Option<Vec<What>>,
}

fn what(name: &str) -> Result<What, String> {
    What::named(name).ok_or_else(|| {
        let names = What::NAMES.map(|(name, _)| name);
        format!("`{name}` cannot be varied: use one or more of {}", names.join(", "))
    })
}

impl SearchArgs {
    fn promise(&self) -> Result<Promise, Failure> {
        let sound = |ms: f64| ms.is_finite() && ms > 0.0;
        if sound(self.ttft_ms) && sound(self.tpot_ms) {
            return Ok(Promise { ttft_ms: self.ttft_ms, tpot_ms: self.tpot_ms });
        }
        Err(Failure::user("--ttft-ms and --tpot-ms must be above 0"))
    }

    fn bounds(&self) -> Result<Bounds, Failure> {
        if let Some(cost) = self.cost_max.filter(|cost| !(cost.is_finite() && *cost > 0.0)) {
            return Err(Failure::User(format!("--cost-max {cost}: the value must be above 0")));
        }
        Ok(Bounds {
            nodes_max: self.nodes_max,
            drives_max: self.drives_max,
            cost_max: self.cost_max,
            vary: self.vary.clone().unwrap_or_else(|| What::USUAL.to_vec()),
        })
    }
}

/// What makes configurations differ, as it is shown.
fn shown(one: &Tried) -> [String; 12] {
    let cluster = &one.cluster;
    let gb = |gb: f64| format!("{gb:.0}");
    [
        nodes(one),
        cluster.router.name().to_owned(),
        cluster.engine.prefetch.name().to_owned(),
        format!("{}/{}", cluster.engine.chunk_tokens, cluster.engine.batch_max),
        gb(cluster.hbm.gb),
        gb(cluster.dram.map_or(0.0, |tier| tier.gb)),
        cluster.disk.map_or_else(|| "0".into(), |tier| format!("{} of {:.0}", tier.drives, each_gb(one))),
        format!("{:.1}", one.ttft_ms),
        format!("{:.2}", one.tpot_ms),
        format!("{:.1}", one.tokens_per_s),
        format!("{:.2}", one.cost_per_hour),
        format!("{:.3}", one.cost_per_million),
    ]
}

fn each_gb(one: &Tried) -> f64 {
    one.cluster.disk.map_or(0.0, |disk| disk.gb / f64::from(disk.drives))
}

/// As `16x1`: nodes, and devices of each.
fn nodes(one: &Tried) -> String {
    let nodes = &one.cluster.nodes;
    let count = match (nodes.mixed, nodes.prefill, nodes.decode) {
        (mixed, 0, 0) => mixed.to_string(),
        (0, prefill, decode) => format!("{prefill}P{decode}D"),
        (mixed, prefill, decode) => format!("{mixed}+{prefill}P{decode}D"),
    };
    format!("{count} x {}", nodes.devices)
}

/// Runs `sim search`.
pub(super) fn run(arguments: &SearchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let (promise, bounds) = (arguments.promise()?, arguments.bounds()?);
    let cluster = arguments.run.cluster()?;
    let choices = Choices::new(&cluster, &bounds).map_err(Failure::User)?;
    let mut number = 0;
    let found = search(&choices, promise, arguments.runs, &mut |cluster| {
        number += 1;
        arguments.run.run(cluster, &format!("run {number} of at most {}", arguments.runs))
    })?;
    let paste = found.best.as_ref().map(paste).unwrap_or_default();
    if arguments.run.json {
        let cluster = |one: &Tried| json!({ "figures": one, "cluster": one.cluster });
        let front: Vec<Value> = found.front.iter().map(cluster).collect();
        let best = found.best.as_ref().map(cluster);
        let all =
            json!({ "promise": promise, "runs": found.runs, "front": front, "best": best, "serve": paste });
        serde_json::to_writer_pretty(&mut *out, &all).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    write!(out, "{}", table(&found))?;
    let told = match found.best.filter(|best| best.keeps) {
        Some(_) => "the cheapest cluster that meets the targets",
        None => "the cluster that is nearest to the targets, because no cluster meets them",
    };
    writeln!(out, "{} runs. Configuration of `kvarts serve` on each node, for {told}:", found.runs)?;
    Ok(writeln!(out, "\n{paste}")?)
}

fn table(found: &Searched) -> Table {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        right("NODES"),
        ("ROUTER", Align::Left),
        ("PREFETCH", Align::Left),
        right("CHUNK/BATCH"),
        right("HBM GB"),
        right("DRAM GB"),
        right("DRIVES, GB"),
        right("TTFT P99 MS"),
        right("TPOT P99 MS"),
        right("TOKENS/S"),
        right("COST/H"),
        right("COST/M"),
    ]);
    found.front.iter().for_each(|one| table.row(shown(one)));
    table
}

/// What `kvarts serve` is told for it on each node, and in comments what engine and router are told.
fn paste(best: &Tried) -> String {
    let cluster = &best.cluster;
    let engine = &cluster.engine;
    let mut text = format!(
        "# {} {}, router {}; {:.0} GB of device memory and {:.0} GB of host memory for state\n# engine: \
        {} tokens in a step, {} sequences at once, prefetch {}\n",
        nodes(best),
        cluster.nodes.device,
        cluster.router.name(),
        cluster.hbm.gb,
        cluster.dram.map_or(0.0, |tier| tier.gb),
        engine.chunk_tokens,
        engine.batch_max,
        engine.prefetch.name(),
    );
    let Some(disk) = cluster.disk.filter(|disk| disk.gb > 0.0) else {
        return text + "# no disk tier, because a disk tier would cost more than it saves";
    };
    let years = best.drive_life_years.unwrap_or(0.0);
    let budget = match disk.gb * 1e9 / f64::from(1 << 30) {
        gib if gib >= 64.0 => format!("{:.0} GiB", gib.floor()),
        gib => format!("{:.0} MiB", (gib * 1024.0).floor()),
    };
    let _ = write!(
        text,
        "# drives: {} of {:.0} GB in each node, with one directory on each drive (`directories`); their \
        rated writes (DWPD) last {years:.1} years\n[store]\nbudget = \"{budget}\"\npolicy = \"{}\"",
        disk.drives,
        each_gb(best),
        disk.policy.engine().name(),
    );
    if disk.single_owner {
        // `serve` refuses it without members, which are the user's to name.
        text += "\n# [cluster]: set put = \"single\" and the members";
    }
    text
}
