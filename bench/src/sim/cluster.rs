//! `kvarts sim TRACE --cluster FILE` and `kvarts sim search`: a whole cluster in virtual time.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use kvarts_simulator::cluster::work::{KINDS, SessionWork, Sessions, TraceWork};
use kvarts_simulator::cluster::{Cluster, Counted, FILE_BYTES_MAX, RouterKind, Simulation, page};
use kvarts_simulator::cluster::{search, search::Bounds, search::Promise, search::Tried};
use kvarts_simulator::trace::Trace;
use serde_json::{Map, Value, json};

use crate::setup::progress;
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// The workload and the cluster.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// The trace: JSON lines with `timestamp`, `input_length`, `output_length` and `hash_ids`
    trace: Option<PathBuf>,
    /// Sessions made from a seed instead: chat, agents-32k, agents-48k, agents-64k, coding, rollouts or idle-return
    #[arg(long, value_parser = kind, conflicts_with = "trace")]
    sessions: Option<Sessions>,
    /// How many sessions
    #[arg(long, requires = "sessions")]
    count: Option<u32>,
    /// How many of them begin a second; 0 for all at once
    #[arg(long, requires = "sessions")]
    per_second: Option<f64>,
    /// Multiplies the tokens that each turn of the sessions adds
    #[arg(long, requires = "sessions")]
    append_scale: Option<f64>,
    /// The cluster: a TOML file
    #[arg(long, value_name = "FILE", required = true)]
    cluster: Option<PathBuf>,
    /// A value in place of the file's, as `disk.gb_per_s=24`; may be given again
    #[arg(long, value_name = "TABLE.NAME=VALUE")]
    set: Vec<String>,
    /// Who decides where requests go, instead of the file's
    #[arg(long, value_parser = router)]
    router: Option<RouterKind>,
    /// Multiplies the trace's requests a second
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// The same seed gives the same run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write a page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The arguments of `sim search`.
#[derive(Args, Debug)]
pub(crate) struct SearchArgs {
    #[command(flatten)]
    run: RunArgs,
    /// The 99th percentile of the time to the first token that is promised
    #[arg(long, value_name = "MS")]
    ttft_ms: f64,
    /// The 99th percentile of the time for each further token that is promised
    #[arg(long, value_name = "MS")]
    tpot_ms: f64,
    /// Runs, at most
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,
}

fn kind(name: &str) -> Result<Sessions, String> {
    Sessions::named(name).ok_or_else(|| {
        let names: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
        format!("no sessions are called `{name}`: take one of {}", names.join(", "))
    })
}

fn router(name: &str) -> Result<RouterKind, String> {
    RouterKind::named(name).ok_or_else(|| {
        let names = RouterKind::ALL.map(RouterKind::name);
        format!("no router is called `{name}`: take one of {}", names.join(", "))
    })
}

fn fault(path: &Path, what: impl std::fmt::Display) -> Failure {
    Failure::User(format!("{}: {what}", path.display()))
}

impl RunArgs {
    fn cluster(&self) -> Result<Cluster, Failure> {
        let path = self.cluster.as_deref().ok_or_else(|| Failure::user("which cluster? `--cluster FILE`"))?;
        let long = std::fs::metadata(path).map_err(|error| fault(path, error))?.len() > FILE_BYTES_MAX as u64;
        if long {
            return Err(fault(path, format!("longer than {FILE_BYTES_MAX} bytes")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| fault(path, error))?;
        let cluster = Cluster::parse_with(&text, &self.set).map_err(|error| fault(path, error))?;
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return Err(Failure::User(format!("--scale {}: must be above 0", self.scale)));
        }
        Ok(Cluster { router: self.router.unwrap_or(cluster.router), ..cluster })
    }

    fn run(&self, cluster: &Cluster, what: &str) -> Result<Counted, Failure> {
        let tell =
            |now: f64, requests: u64| progress(&format!("{what}: {requests} requests, {:.0} s", now / 1e3));
        let counted = match (&self.trace, self.sessions) {
            (Some(path), _) => {
                let file = File::open(path).map_err(|error| fault(path, error))?;
                let trace =
                    Trace::new(BufReader::with_capacity(1 << 20, file)).in_blocks_of(cluster.block_tokens);
                let run = Simulation::new(cluster, TraceWork::new(trace, self.scale), self.seed);
                let counted = run.and_then(|run| run.run(tell)).map_err(|error| fault(path, error))?;
                if counted.requests + counted.refused == 0 {
                    return Err(fault(path, "it has no requests"));
                }
                counted
            }
            (None, Some(sessions)) => {
                let scale = self.append_scale.unwrap_or(1.0);
                let per_second = self.per_second.unwrap_or(sessions.per_second);
                if !(scale.is_finite() && scale > 0.0 && per_second.is_finite() && per_second >= 0.0) {
                    return Err(Failure::user("--append-scale is above 0, --per-second at least 0"));
                }
                let sessions = Sessions {
                    seed: self.seed,
                    count: self.count.unwrap_or(sessions.count),
                    per_second,
                    append_tokens: sessions.append_tokens * scale,
                    ..sessions
                };
                let run =
                    Simulation::new(cluster, SessionWork::new(sessions, cluster.block_tokens), self.seed);
                run.and_then(|run| run.run(tell)).map_err(Failure::user)?
            }
            (None, None) => return Err(Failure::user("which workload? a trace, or `--sessions KIND`")),
        };
        progress("");
        Ok(counted)
    }
}

/// Runs a cluster.
pub(super) fn run(arguments: &RunArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let cluster = arguments.cluster()?;
    let counted = arguments.run(&cluster, "simulating")?;
    let figures = counted.json(&cluster);
    if let Some(path) = &arguments.html {
        let title = format!("{} on {} nodes", cluster.model, cluster.node_count());
        std::fs::write(path, page(&title, &figures, &counted)).map_err(|error| fault(path, error))?;
    }
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, &figures).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    let mut table = Table::new(&[("FIGURE", Align::Left), ("VALUE", Align::Right)]);
    rows(&mut table, "", &figures);
    Ok(write!(out, "{table}")?)
}

fn rows(table: &mut Table, before: &str, figures: &Map<String, Value>) {
    for (name, value) in figures {
        match value {
            Value::Object(inner) => rows(table, &format!("{before}{name}."), inner),
            value => {
                let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                table.row([format!("{before}{name}"), shown]);
            }
        }
    }
}

/// What makes configurations differ, as it is shown.
fn shown(one: &Tried) -> [String; 9] {
    let (cluster, nodes) = (&one.cluster, &one.cluster.nodes);
    let gb = |gb: f64| format!("{gb:.0}");
    let count = match (nodes.mixed, nodes.prefill, nodes.decode) {
        (mixed, 0, 0) => mixed.to_string(),
        (mixed, prefill, decode) => format!("{mixed}+{prefill}P{decode}D"),
    };
    [
        count,
        cluster.router.name().to_owned(),
        format!("{}/{}", cluster.engine.chunk_tokens, cluster.engine.batch_max),
        gb(cluster.dram.map_or(0.0, |tier| tier.gb)),
        gb(cluster.disk.map_or(0.0, |tier| tier.gb)),
        format!("{:.1}", one.ttft_ms),
        format!("{:.2}", one.tpot_ms),
        format!("{:.1}", one.tokens_per_s),
        format!("{:.3}", one.cost_per_million),
    ]
}

/// Runs `sim search`.
pub(super) fn search_for(arguments: &SearchArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let cluster = arguments.run.cluster()?;
    let promise = Promise { ttft_ms: arguments.ttft_ms, tpot_ms: arguments.tpot_ms };
    if !(promise.ttft_ms > 0.0 && promise.tpot_ms > 0.0) {
        return Err(Failure::user("--ttft-ms and --tpot-ms are above 0"));
    }
    let bounds = Bounds { runs: arguments.runs, nodes: (0.5, 2.0) };
    let mut number = 0;
    let found = search::search(&cluster, promise, bounds, &mut |cluster| {
        number += 1;
        arguments.run.run(cluster, &format!("run {number} of at most {}", arguments.runs))
    })?;
    let paste = found.best.as_ref().map(paste);
    if arguments.run.json {
        let cluster = |one: &Tried| json!({ "figures": one, "cluster": one.cluster });
        let front: Vec<Value> = found.front.iter().map(cluster).collect();
        let best = found.best.as_ref().map(cluster);
        let all =
            json!({ "promise": promise, "runs": found.runs, "front": front, "best": best, "serve": paste });
        serde_json::to_writer_pretty(&mut *out, &all).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    let mut table = Table::new(&[
        ("NODES", Align::Right),
        ("ROUTER", Align::Left),
        ("CHUNK/BATCH", Align::Right),
        ("DRAM GB", Align::Right),
        ("DISK GB", Align::Right),
        ("TTFT P99 MS", Align::Right),
        ("TPOT P99 MS", Align::Right),
        ("TOKENS/S", Align::Right),
        ("COST/M", Align::Right),
    ]);
    found.front.iter().for_each(|one| table.row(shown(one)));
    write!(out, "{table}")?;
    match found.best.filter(|best| best.keeps) {
        Some(_) => writeln!(
            out,
            "{} runs; the cheapest that keeps the promise, for the configuration of `serve`:",
            found.runs
        )?,
        None => writeln!(
            out,
            "{} runs, and none keeps the promise; the nearest, for the configuration of `serve`:",
            found.runs
        )?,
    }
    Ok(writeln!(out, "\n{}", paste.unwrap_or_default())?)
}

/// What `kvarts serve` is told for it.
fn paste(best: &Tried) -> String {
    match best.cluster.disk {
        Some(disk) => {
            let policy = disk.policy.engine().name();
            let gib = (disk.gb * 1e9 / f64::from(1 << 30)).floor();
            format!("[store]\nbudget = \"{gib:.0} GiB\"\npolicy = \"{policy}\"")
        }
        None => "# no disk tier is worth its price here".to_owned(),
    }
}
