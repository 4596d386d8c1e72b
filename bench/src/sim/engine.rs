//! `kvarts sim engine`: a real engine's recordings (`scripts/sim-record`), and what the simulator says of them.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use kvarts_simulator::recorded::{Calibration, Recording, Told};
use kvarts_terminal::{Align, Failure, Table};
use serde_json::{Value, json};

/// The recordings.
#[derive(Args, Debug)]
pub(crate) struct EngineArgs {
    /// Recordings to compare with: JSON lines of `scripts/sim-record`
    #[arg(required = true)]
    recordings: Vec<PathBuf>,
    /// Recording that calibrates the times of steps; can be repeated, for engines that read from disk
    #[arg(long, value_name = "RECORDING", required = true)]
    calibrate: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn read(path: &Path) -> Result<Recording, Failure> {
    let fault = |what: String| Failure::User(format!("{}: {what}", path.display()));
    let file = File::open(path).map_err(|error| fault(error.to_string()))?;
    Recording::read(BufReader::new(file)).map_err(|error| fault(error.to_string()))
}

/// Where an engine's state can be found again, in a word.
fn cache(of: &Recording) -> &'static str {
    match (of.limits.prefix_caching, of.limits.disk) {
        (_, true) => "memory and disk",
        (true, false) => "memory",
        (false, false) => "none",
    }
}

fn calibrated(path: &Path, of: &Recording) -> (Value, Calibration) {
    let times = of.calibrate();
    let measured = times.measured;
    let reads = times.reads.map(|reads| json!({ "ms": reads.ms, "token_us": reads.token_us }));
    let shown = json!({
        "recording": path.display().to_string(),
        "engine": of.limits.engine,
        "workload": of.limits.workload,
        "cache": cache(of),
        "load": of.limits.load,
        "steps": of.decided.len(),
        "step_ms": measured.step_ms,
        "token_us": measured.token_us,
        "sequence_us": measured.sequence_us,
        "pair_ns": measured.pair_ns,
        "prefill_ms": measured.prefill_ms,
        "reads": reads,
        "error": times.error,
    });
    (shown, times)
}

/// Whether the order is the recorded one; where requests came by a clock, it depends on times.
fn same_order(of: &Recording) -> Result<Option<bool>, String> {
    match of.limits.by_clock {
        true => Ok(None),
        false => {
            of.difference().map(|difference| Some(difference.is_none())).map_err(|error| error.to_string())
        }
    }
}

fn row(path: &Path, of: &Recording, order: Option<bool>, told: &Told) -> Value {
    let [ttft, throughput] = told.errors();
    let pair = |[measured, simulated]: [f64; 2], error: f64| json!({ "measured": measured, "simulated": simulated, "error": error });
    let [read, said] = told.tokens_from_disk;
    json!({
        "recording": path.display().to_string(),
        "engine": of.limits.engine,
        "workload": of.limits.workload,
        "cache": cache(of),
        "load": of.limits.load,
        "requests": of.asked.len(),
        "steps": of.decided.len(),
        "same_order": order,
        "ttft_ms": pair(told.ttft_ms, ttft),
        "output_tokens_per_s": pair(told.output_tokens_per_s, throughput),
        "tokens_from_disk": { "measured": read, "simulated": said },
    })
}

/// Runs `sim engine`.
pub(super) fn run(arguments: &EngineArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let mut by = Vec::new();
    for path in &arguments.calibrate {
        let recording = read(path)?;
        let (shown, times) = calibrated(path, &recording);
        by.push((recording.limits, shown, times));
    }
    let (mut rows, mut table) = (Vec::new(), table());
    for path in &arguments.recordings {
        let fault = |what: String| Failure::User(format!("{}: {what}", path.display()));
        let recording = read(path)?;
        // The first that reads from disk as this one does; times of another engine say nothing of it.
        let fits = by.iter().find(|(limits, ..)| {
            limits.engine == recording.limits.engine && limits.disk == recording.limits.disk
        });
        let (_, _, times) = fits.ok_or_else(|| {
            fault(format!(
                "no calibration matches the recording of {} with {}: use --calibrate with a recording of the \
                same engine and with the same use of a disk",
                recording.limits.engine,
                if recording.limits.disk { "a disk" } else { "no disk" }
            ))
        })?;
        let told = recording.told_by(times).map_err(|error| fault(error.to_string()))?;
        let order = same_order(&recording).map_err(fault)?;
        table.row(shown(&recording, order, &told));
        rows.push(row(path, &recording, order, &told));
    }
    if arguments.json {
        let calibrations: Vec<Value> = by.into_iter().map(|(_, shown, _)| shown).collect();
        let all = json!({ "calibrations": calibrations, "recordings": rows });
        serde_json::to_writer_pretty(&mut *out, &all).map_err(std::io::Error::from)?;
        return Ok(writeln!(out)?);
    }
    write!(out, "{table}")?;
    for (limits, _, times) in &by {
        let word = if limits.workload.is_empty() { "calibrated" } else { &limits.workload };
        writeln!(
            out,
            "{word}: the calibration predicts the step times of this recording with an error of {:.1}% on \
            average",
            100.0 * times.error
        )?;
    }
    Ok(())
}

fn table() -> Table {
    let right = |name| (name, Align::Right);
    Table::new(&[
        ("WORKLOAD", Align::Left),
        ("CACHE", Align::Left),
        ("ORDER", Align::Left),
        right("TTFT MS"),
        right("SAID"),
        right("OFF"),
        right("TOKENS/S"),
        right("SAID"),
        right("OFF"),
    ])
}

fn shown(of: &Recording, order: Option<bool>, told: &Told) -> [String; 9] {
    let order = order.map_or("-", |same| if same { "same" } else { "other" });
    let [ttft, throughput] = told.errors().map(|error| format!("{:.1}%", 100.0 * error));
    let number = |value: f64| format!("{value:.1}");
    let ([ttft_was, ttft_said], [rate_was, rate_said]) = (told.ttft_ms, told.output_tokens_per_s);
    [
        of.limits.workload.clone(),
        cache(of).to_owned(),
        order.to_owned(),
        number(ttft_was),
        number(ttft_said),
        ttft,
        number(rate_was),
        number(rate_said),
        throughput,
    ]
}
