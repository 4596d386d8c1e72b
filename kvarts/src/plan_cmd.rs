//! `kvarts plan`: what restoring a prefix is worth, and where a request should go.
#![allow(clippy::disallowed_methods, reason = "reads files with samples and nodes that the user wrote")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use kvarts_layout::prefix::WindowPolicy;
use kvarts_layout::spec::{ModelSpec, shipped};
use kvarts_planner::cost::{
    self, Compute, Device, Interpolated, MAX_SAMPLES, Prefill, Roofline, Sample, Scaled, Told,
};
use kvarts_planner::plan::{Link, Links, Overlap, Part, Plan, Question, Run, Source, Sources};
use kvarts_planner::route;
use serde::Deserialize;
use serde_json::{Value, json};

use kvarts_server::human;
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// The longest file of samples or nodes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Arguments of `kvarts plan`.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(subcommand)]
    command: PlanCommand,
}

#[derive(Subcommand, Debug)]
enum PlanCommand {
    /// Plan the restore of a prefix: the part to load, the part to compute again, the time gained
    Restore(Box<RestoreArgs>),
    /// Show the bandwidth above which a load is faster than computing, for each model and device
    BreakEven {
        /// Tokens of the prefix
        #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u64).range(256..=1 << 24))]
        tokens: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a table of prefill times from samples, and show its error
    Calibrate {
        /// JSON lines: `{"cached": tokens, "new": tokens, "ms": time}`
        file: PathBuf,
        #[command(flatten)]
        engine: EngineArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Choose the node for a request, from a JSON file with the request and the nodes
    Route(RouteArgs),
}

#[derive(Args, Debug)]
struct EngineArgs {
    /// A shipped model
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// A device: a100, h100, h200, h20, b200 or l40s
    #[arg(long, default_value = "h100")]
    device: String,
    /// Number of devices that share the work
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    devices: u32,
}

#[derive(Args, Debug)]
struct RestoreArgs {
    #[command(flatten)]
    engine: EngineArgs,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 32_768, value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    tokens: u64,
    /// Number of leading tokens that are stored
    #[arg(long, default_value_t = 28_672)]
    stored: u64,
    /// Number of the stored tokens that are in the host's memory
    #[arg(long, default_value_t = 0)]
    in_dram: u64,
    /// Read speed of the disks, in GB/s: `kvarts doctor DIR` measures it (1,000 MiB/s are 1.05 GB/s)
    #[arg(long)]
    disk: f64,
    /// Read speed of the host's memory, in GB/s
    #[arg(long, default_value_t = 50.0)]
    dram: f64,
    /// MB already queued on the disks ahead of this request
    #[arg(long, default_value_t = 0)]
    queue_mb: u64,
    /// Stored windows and states: full, zero, or their distance in tokens
    #[arg(long, default_value = "full", value_parser = windows)]
    windows: Windows,
    /// When the engine computes: layers (each layer once this layer is loaded), or none (after the whole load)
    #[arg(long, default_value = "layers", value_parser = overlap)]
    overlap: Overlap,
    /// Measured prefills, as for `calibrate`
    #[arg(long, value_name = "FILE")]
    samples: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug)]
struct Windows(WindowPolicy);

fn windows(text: &str) -> Result<Windows, String> {
    match text {
        "full" => Ok(Windows(WindowPolicy::Full)),
        "zero" => Ok(Windows(WindowPolicy::Zero)),
        number => match number.parse() {
            Ok(tokens) => Ok(Windows(WindowPolicy::Periodic { tokens })),
            Err(_) => Err("the value must be full, zero, or a number of tokens".to_owned()),
        },
    }
}

/// What an engine computes while blocks are loaded, as it is written.
pub(crate) fn overlap(text: &str) -> Result<Overlap, String> {
    match text {
        "layers" => Ok(Overlap::Layers),
        "none" => Ok(Overlap::None),
        _ => Err("the value must be layers or none".to_owned()),
    }
}

#[derive(Args, Debug)]
struct RouteArgs {
    /// `{"prompt_tokens": n, "model": name, "device": name, "devices": n, "owner": [node, tokens], "nodes": [..]}`
    file: PathBuf,
    /// List the costs of every candidate node
    #[arg(long)]
    explain: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct RouteFile {
    prompt_tokens: u64,
    model: String,
    device: String,
    #[serde(default = "one")]
    devices: u32,
    #[serde(default)]
    owner: Option<(u32, u64)>,
    #[serde(default)]
    shared_tokens: u64,
    #[serde(default)]
    forked: bool,
    #[serde(default)]
    weights: route::Weights,
    nodes: Vec<route::NodeView>,
}

fn one() -> u32 {
    1
}

/// Runs one of the subcommands.
pub(crate) fn run(arguments: &PlanArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.command {
        PlanCommand::Restore(arguments) => restore(arguments, out),
        PlanCommand::BreakEven { tokens, json } => break_even(*tokens, *json, out),
        PlanCommand::Calibrate { file, engine, json } => calibrate(file, engine, *json, out),
        PlanCommand::Route(arguments) => routed(arguments, out),
    }
}

fn fault(path: &Path, what: impl std::fmt::Display) -> Failure {
    Failure::User(format!("{}: {what}", path.display()))
}

pub(crate) fn compute_of(model: &str) -> Result<Compute, Failure> {
    cost::model(model).ok_or_else(|| {
        let known: Vec<&str> = cost::MODELS.iter().map(|(name, _)| *name).collect();
        Failure::User(format!(
            "the compute times of model `{model}` are unknown; the times of these models \
            are known: {}",
            known.join(", ")
        ))
    })
}

pub(crate) fn device_of(device: &str) -> Result<Device, Failure> {
    cost::device(device).ok_or_else(|| {
        let known: Vec<&str> = cost::DEVICES.iter().map(|(name, _)| *name).collect();
        Failure::User(format!("no device is named `{device}`; the devices are {}", known.join(", ")))
    })
}

impl EngineArgs {
    fn roofline(&self) -> Result<Roofline, Failure> {
        Ok(Roofline::new(compute_of(&self.model)?, device_of(&self.device)?, self.devices))
    }
}

/// Samples of a file, each a line.
pub(crate) fn samples(path: &Path) -> Result<Vec<Sample>, Failure> {
    let file = std::fs::File::open(path).map_err(|error| fault(path, error))?;
    let mut samples = Vec::new();
    for (number, line) in BufReader::new(file.take(FILE_BYTES_MAX)).lines().enumerate() {
        let line = line.map_err(|error| fault(path, error))?;
        if line.trim().is_empty() {
            continue;
        }
        if samples.len() == MAX_SAMPLES {
            return Err(fault(path, format!("the file has more than {MAX_SAMPLES} samples")));
        }
        let sample = serde_json::from_str(&line).map_err(|error| {
            let text = error.to_string();
            let what = text.split(" at line ").next().unwrap_or(&text).to_owned();
            fault(path, format!("line {}: {what}", number + 1))
        })?;
        samples.push(sample);
    }
    Ok(samples)
}

fn calibrate(path: &Path, engine: &EngineArgs, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let samples = samples(path)?;
    let interpolated = Interpolated::new(&samples).map_err(|error| fault(path, error))?;
    let scaled = Scaled::new(engine.roofline()?, &samples).map_err(|error| fault(path, error))?;
    let better = scaled.told().error < interpolated.told().error || interpolated.told().error.is_none();
    let taken = if better { scaled.told() } else { interpolated.told() };
    if json {
        let all = json!({
            "interpolated": interpolated.told(),
            "scaled": scaled.told(),
            "factor": scaled.factor(),
            "taken": taken,
        });
        return Ok(writeln!(out, "{all:#}")?);
    }
    writeln!(out, "{}", interpolated.told())?;
    writeln!(out, "{} ({} on {}, times {:.3})", scaled.told(), engine.model, engine.device, scaled.factor())?;
    Ok(writeln!(out, "the model with the smaller error on samples that were left out of the fit: {taken}")?)
}

/// The bandwidth at which a prefix takes as long to load as to compute.
fn break_even_of(spec: &ModelSpec, compute: Compute, device: Device, tokens: u64) -> Result<f64, Failure> {
    let block_tokens = spec.default_block_tokens();
    let bytes = spec.geometry().bytes_for_tokens(tokens, block_tokens).map_err(Failure::user)?;
    // The new tokens' step is taken either way: what counts is what the prefix adds to it.
    let times = Roofline::new(compute, device, 1);
    let new = 256;
    let ms = times.prefill_ms(0, bytes.tokens + new) - times.prefill_ms(bytes.tokens, new);
    Ok((bytes.stream_bytes + bytes.boundary_bytes) as f64 / ms / 1e6)
}

fn break_even(tokens: u64, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let columns = ["MODEL", "BYTES/TOKEN", "A100", "H100", "H200", "H20", "B200", "L40S"];
    let names = ["a100", "h100", "h200", "h20", "b200", "l40s"];
    let aligned = columns.map(|name| (name, if name == "MODEL" { Align::Left } else { Align::Right }));
    let (mut table, mut rows) = (Table::new(&aligned), Vec::new());
    for (name, compute) in cost::MODELS {
        let Some(spec) = shipped::load(name) else { continue };
        let mut figures = Vec::new();
        for device in names {
            figures.push(break_even_of(&spec, compute, device_of(device)?, tokens)?);
        }
        let shown: Vec<String> = figures.iter().map(|figure| format!("{figure:.2}")).collect();
        let [a, b, c, d, e, f] = shown.try_into().unwrap_or_default();
        table.row([name.to_owned(), format!("{:.0}", compute.kv_bytes), a, b, c, d, e, f]);
        let by_device: serde_json::Map<String, Value> = names
            .iter()
            .zip(&figures)
            .map(|(device, figure)| ((*device).to_owned(), json!(figure)))
            .collect();
        rows.push(json!({ "model": name, "gb_per_s": by_device }));
    }
    if json {
        return Ok(writeln!(out, "{:#}", json!({ "tokens": tokens, "break_even": rows }))?);
    }
    write!(out, "{table}")?;
    Ok(writeln!(
        out,
        "The figures are disk speeds in GB/s. Above this speed, a device loads a prefix of {tokens} \
        tokens faster than it computes the prefix."
    )?)
}

/// A part of a model, as a plan wants it: bytes by layer, and where its blocks are.
type Owned = (kvarts_layout::prefix::Requirement, Vec<u64>, Vec<Run>);

fn parts(spec: &ModelSpec, policy: WindowPolicy, places: &[(u32, Source)]) -> Result<Vec<Owned>, Failure> {
    let (geometry, tokens) = (spec.geometry(), spec.default_block_tokens());
    let mut parts = Vec::new();
    for requirement in spec.requirements(tokens, policy, 1).map_err(Failure::user)?.groups() {
        let coordinate = geometry.coordinate(requirement.group, 1, 0).map_err(Failure::user)?;
        let windowed = matches!(requirement.need, kvarts_layout::prefix::Need::Last { .. });
        let shape = match windowed {
            true => geometry.window_stream_shape(requirement.group, coordinate, tokens),
            false => geometry.shape(requirement.group, coordinate, tokens),
        };
        let shape = shape.map_err(Failure::user)?;
        let mut layers = vec![0; geometry.layers().len()];
        for layer in shape.layers() {
            if let Some(bytes) = layers.get_mut(layer.layer as usize) {
                *bytes += layer.bytes();
            }
        }
        let mut runs: Vec<Run> = Vec::new();
        let stored = places.last().map_or(0, |(to, _)| *to);
        for run in Run::kept(requirement.need, policy, stored, tokens, Sources::NONE) {
            let mut from = run.from;
            for (to, source) in places.iter().filter(|(to, _)| *to > run.from) {
                let end = run.to.min(*to);
                if from < end {
                    runs.push(Run { from, to: end, sources: Sources::of(*source) });
                    from = end;
                }
            }
        }
        parts.push((requirement.clone(), layers, runs));
    }
    Ok(parts)
}

fn restore(arguments: &RestoreArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let name = &arguments.engine.model;
    let spec =
        shipped::load(name).ok_or_else(|| Failure::User(format!("no shipped model is named `{name}`")))?;
    let roofline = arguments.engine.roofline()?;
    let measured = match &arguments.samples {
        Some(path) => Some(Interpolated::new(&samples(path)?).map_err(|error| fault(path, error))?),
        None => None,
    };
    let prefill: &dyn Prefill = measured.as_ref().map_or(&roofline, |table| table);
    let block_tokens = spec.default_block_tokens();
    let blocks = |tokens: u64| u32::try_from(tokens / u64::from(block_tokens)).unwrap_or(u32::MAX);
    let stored = arguments.stored.min(arguments.tokens);
    let places = [(blocks(arguments.in_dram.min(stored)), Source::Dram), (blocks(stored), Source::Disk)];
    let owned = parts(&spec, arguments.windows.0, &places)?;
    let parts: Vec<Part<'_>> = owned
        .iter()
        .map(|(requirement, layer_bytes, runs)| {
            let (group, need, absence) = (requirement.group, requirement.need, requirement.absence);
            Part { group, need, absence, layer_bytes, runs }
        })
        .collect();
    let outstanding_bytes = arguments.queue_mb.saturating_mul(1_000_000);
    let links = Links::NONE
        .with(Source::Dram, Link::gb_per_s(arguments.dram, 0.02))
        .with(Source::Disk, Link { outstanding_bytes, ..Link::gb_per_s(arguments.disk, 0.1) });
    let question = Question {
        block_tokens,
        prompt_tokens: arguments.tokens,
        parts: &parts,
        links: &links,
        overlap: arguments.overlap,
    };
    let plan = question.plan(prefill).map_err(Failure::user)?;
    if arguments.json {
        let plan = json!({ "plan": plan, "prefill": prefill.told() });
        return Ok(writeln!(out, "{plan:#}")?);
    }
    show(&plan, &prefill.told(), out)
}

/// A plan as tables and a sentence.
pub(crate) fn show(plan: &Plan, told: &Told, out: &mut dyn Write) -> Result<(), Failure> {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[right("GROUP"), right("BLOCKS"), ("WHAT", Align::Left), right("BYTES")]);
    for action in &plan.actions {
        let blocks = format!("{}..{}", action.from, action.to);
        table.row([action.group.0.to_string(), blocks, action.does.to_string(), human::bytes(action.bytes)]);
    }
    write!(out, "{table}")?;
    let mut times = Table::new(&[("TIME", Align::Left), right("MS")]);
    for (name, ms) in [
        ("load: wait for the first layer", plan.load_ms),
        ("stall: waits for the other layers", plan.stall_ms),
        ("recompute: tokens computed again", plan.recompute_ms),
        ("compute: total computing time", plan.compute_ms),
        ("time to the first token", plan.ttft_ms),
        ("time with nothing restored", plan.from_nothing_ms),
        ("time with blocks in device memory", plan.held_ms),
        ("benefit", plan.benefit_ms),
    ] {
        times.row([name.to_owned(), format!("{ms:.1}")]);
    }
    writeln!(out, "\n{times}\nboundary: token {}; {}", plan.boundary_tokens, plan.reason)?;
    Ok(writeln!(out, "prefill times: {told}")?)
}

fn routed(arguments: &RouteArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let path = &arguments.file;
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| fault(path, error))?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| fault(path, error))?;
    let asked: RouteFile = serde_json::from_str(&text).map_err(|error| fault(path, error))?;
    let prefill = Roofline::new(compute_of(&asked.model)?, device_of(&asked.device)?, asked.devices);
    let compute = compute_of(&asked.model)?;
    let layers = shipped::load(&asked.model).map_or(1, |spec| spec.geometry().layers().len() as u32);
    let question = route::Question {
        prompt_tokens: asked.prompt_tokens,
        token_bytes: compute.kv_bytes,
        layers,
        owner: asked.owner,
        shared_tokens: asked.shared_tokens,
        forked: asked.forked,
        nodes: &asked.nodes,
        weights: asked.weights,
    };
    question.check().map_err(|error| fault(path, error))?;
    let route = question.route(&prefill);
    let Some(best) = route.best() else {
        return Err(fault(
            path,
            "no node can serve the request: add a node that decodes to the file, or set \
            `network_bytes_per_ms` of the nodes that only prefill",
        ));
    };
    if arguments.json {
        let candidates = if arguments.explain { json!(route.candidates) } else { json!([best]) };
        return Ok(writeln!(out, "{:#}", json!({ "class": route.class, "candidates": candidates }))?);
    }
    writeln!(out, "node {}: {}, {:.1} ms", best.node, best.action.name(), best.cost_ms)?;
    if arguments.explain {
        write!(out, "\n{route}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(command: PlanCommand) -> String {
        let mut out = Vec::new();
        run(&PlanArgs { command }, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn engine() -> EngineArgs {
        EngineArgs { model: "llama-3.1-8b".to_owned(), device: "h100".to_owned(), devices: 1 }
    }

    #[test]
    fn break_even_bandwidths_are_those_that_were_published() {
        // Llama-8B: A100 1.27, H100 4.0, B200 9.2 GB/s, at half of the arithmetic and for short prefixes.
        let spec = shipped::load("llama-3.1-8b").unwrap();
        for (device, published) in [("a100", 1.27), ("h100", 4.0), ("b200", 9.2)] {
            let compute = compute_of("llama-3.1-8b").unwrap();
            let found = break_even_of(&spec, compute, device_of(device).unwrap(), 2048).unwrap();
            assert!((found / published - 1.0).abs() < 0.15, "{device}: {found} for {published}");
        }
        assert!(told(PlanCommand::BreakEven { tokens: 8192, json: false }).contains("deepseek-v3.2"));
    }

    #[test]
    fn a_restore_is_planned_for_every_model_whose_times_are_known_and_said_in_words() {
        for (name, _) in cost::MODELS {
            let arguments = |disk| RestoreArgs {
                engine: EngineArgs { model: name.to_owned(), ..engine() },
                tokens: 32_768,
                stored: 28_672,
                in_dram: 4096,
                disk,
                dram: 50.0,
                queue_mb: 0,
                windows: Windows(WindowPolicy::Full),
                overlap: Overlap::Layers,
                samples: None,
                json: false,
            };
            assert!(
                told(PlanCommand::Restore(Box::new(arguments(100.0))))
                    .contains("all stored blocks are restored"),
                "{name}"
            );
            assert!(
                told(PlanCommand::Restore(Box::new(arguments(0.0001)))).contains("the shorter load"),
                "{name}"
            );
        }
    }

    #[test]
    fn samples_and_nodes_that_are_none_are_told_with_their_place() {
        let directory = std::env::temp_dir().join(format!("kvarts-plan-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let file = directory.join("file");
        let told = |text: &str| {
            std::fs::write(&file, text).unwrap();
            format!("{:?}", calibrate(&file, &engine(), false, &mut Vec::new()).unwrap_err())
        };
        assert!(told("").contains("the list of samples is empty"));
        assert!(
            told("{\"cached\": 0, \"new\": 1, \"ms\": 2}\n{\"cached\": 0, \"mew\": 1}")
                .contains("line 2: unknown field `mew`")
        );
        assert!(told("{\"cached\": 0, \"new\": 1, \"ms\": -2}").contains("sample 1: `ms` must be above 0"));
        let arguments = RouteArgs { file: file.clone(), explain: true, json: false };
        std::fs::write(&file, "{\"prompt_tokens\": 5}").unwrap();
        assert!(
            format!("{:?}", routed(&arguments, &mut Vec::new()).unwrap_err())
                .contains("missing field `model`")
        );
        std::fs::write(&file, r#"{"prompt_tokens": 9000, "model": "qwen3-32b", "device": "h100", "owner": [1, 8000], "nodes": [
            {"node": 1, "decodes": true, "queue_ms": 5, "decoding": 3, "memory_tokens": 8000, "disk_tokens": 8000,
             "disk_bytes_per_ms": 12e6, "disk_queue_ms": 0, "network_bytes_per_ms": 5e7, "network_queue_ms": 0}]}"#).unwrap();
        let mut out = Vec::new();
        routed(&arguments, &mut out).unwrap();
        assert!(String::from_utf8(out).unwrap().starts_with("node 1: colocated, "));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
