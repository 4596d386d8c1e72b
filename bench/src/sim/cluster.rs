//! `kvarts sim TRACE --cluster FILE`: a whole cluster in virtual time.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use kvarts_simulator::cluster::clients::ClientWork;
use kvarts_simulator::cluster::work::{KINDS, SessionWork, Sessions, TraceWork};
use kvarts_simulator::cluster::{Cluster, Counted, FILE_BYTES_MAX, RouterKind, Simulation, page};
use kvarts_simulator::trace::Trace;
use serde_json::{Map, Value};

use crate::setup::progress;
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// The workload and the cluster.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// The trace: JSON lines with `timestamp`, `input_length`, `output_length` and `hash_ids`
    trace: Option<PathBuf>,
    /// Generate sessions from the seed instead of a trace: chat, agents-32k, agents-48k, agents-64k, coding, rollouts or idle-return
    #[arg(long, value_parser = kind, conflicts_with = "trace")]
    sessions: Option<Sessions>,
    /// Number of sessions
    #[arg(long, requires = "sessions")]
    count: Option<u32>,
    /// Sessions that begin per second; with 0 all begin at once
    #[arg(long, requires = "sessions")]
    per_second: Option<f64>,
    /// Factor for the tokens that each turn of a session adds
    #[arg(long, requires = "sessions")]
    append_scale: Option<f64>,
    /// The cluster: a TOML file
    #[arg(long, value_name = "FILE", required = true)]
    cluster: Option<PathBuf>,
    /// Override a value of the file, for example `disk.gb_per_s=24`; can be repeated
    #[arg(long, value_name = "TABLE.NAME=VALUE")]
    set: Vec<String>,
    /// Override the router of the file
    #[arg(long, value_parser = router)]
    router: Option<RouterKind>,
    /// Factor for the requests per second of the trace
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Take the trace's order instead of its times: this number of clients sends requests, each one after the answer to its last request,
    /// and none before the request of `parent_chat_id` is answered
    #[arg(long, requires = "trace", conflicts_with = "scale", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    clients: Option<u32>,
    /// The same seed gives the same run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write a page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

fn kind(name: &str) -> Result<Sessions, String> {
    Sessions::named(name).ok_or_else(|| {
        let names: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
        format!("the kind of sessions `{name}` does not exist: use one of {}", names.join(", "))
    })
}

fn router(name: &str) -> Result<RouterKind, String> {
    RouterKind::named(name).ok_or_else(|| {
        let names = RouterKind::ALL.map(RouterKind::name);
        format!("no router is named `{name}`: use one of {}", names.join(", "))
    })
}

fn fault(path: &Path, what: impl std::fmt::Display) -> Failure {
    Failure::User(format!("{}: {what}", path.display()))
}

impl RunArgs {
    pub(super) fn cluster(&self) -> Result<Cluster, Failure> {
        let path = self.cluster.as_deref().ok_or_else(|| {
            Failure::user("the description of the cluster is missing: give `--cluster FILE`")
        })?;
        let long = std::fs::metadata(path).map_err(|error| fault(path, error))?.len() > FILE_BYTES_MAX as u64;
        if long {
            return Err(fault(path, format!("the file is longer than {FILE_BYTES_MAX} bytes")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| fault(path, error))?;
        let cluster = Cluster::parse_with(&text, &self.set).map_err(|error| fault(path, error))?;
        if !(1e-6..=1e6).contains(&self.scale) {
            return Err(Failure::User(format!("--scale {}: the value must be 1e-6 to 1e6", self.scale)));
        }
        Ok(Cluster { router: self.router.unwrap_or(cluster.router), ..cluster })
    }

    pub(super) fn run(&self, cluster: &Cluster, what: &str) -> Result<Counted, Failure> {
        let tell =
            |now: f64, requests: u64| progress(&format!("{what}: {requests} requests, {:.0} s", now / 1e3));
        let counted = match (&self.trace, self.sessions) {
            (Some(path), _) => {
                let file = File::open(path).map_err(|error| fault(path, error))?;
                let trace =
                    Trace::new(BufReader::with_capacity(1 << 20, file)).in_blocks_of(cluster.block_tokens);
                let counted = match self.clients {
                    Some(clients) => {
                        let work = ClientWork::new(trace, clients).map_err(|error| fault(path, error))?;
                        Simulation::new(cluster, work, self.seed).and_then(|run| run.run(tell))
                    }
                    None => {
                        let work = TraceWork::new(trace, self.scale);
                        Simulation::new(cluster, work, self.seed).and_then(|run| run.run(tell))
                    }
                };
                let counted = counted.map_err(|error| fault(path, error))?;
                if counted.requests + counted.refused == 0 {
                    return Err(fault(path, "the trace has no requests"));
                }
                counted
            }
            (None, Some(sessions)) => {
                let scale = self.append_scale.unwrap_or(1.0);
                let per_second = self.per_second.unwrap_or(sessions.per_second);
                if !(scale > 0.0 && scale <= 1e3 && (per_second == 0.0 || (1e-6..=1e9).contains(&per_second)))
                {
                    return Err(Failure::User(format!(
                        "--append-scale {scale}, --per-second {per_second}: the scale must be above 0 \
                        and at most 1000, and the rate must be 0 or from 1e-6 to 1e9",
                    )));
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
            (None, None) => {
                return Err(Failure::user("the workload is missing: give a trace or `--sessions KIND`"));
            }
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
