//! The part of `scripts/gpu-run` that runs on the machine with the GPU: every step with a limit and a result of its own, one
//! JSON object and one page of text at the end, and written anew after each step, so that a machine which is taken away has
//! told what it knew.
//!
//! It needs what lies beside it (the program, the device tests, libraries), a driver, and nothing else: no
//! compiler, no registry, no network, no shell.
#![allow(
    clippy::disallowed_methods,
    reason = "starts processes and measures their time, outside every simulation"
)]

mod judge;
mod steps;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use steps::Outcome;

const USAGE: &str = "usage: gpu_run OUT [--scratch DIR] [--seconds N] [--small] [--lib DIR]...
  OUT        where report.json, report.txt and log.txt are written
  --scratch  where stores are made: a file system on a disk, with 4 GiB free [default: OUT/scratch]
  --seconds  for everything together [default: 540]
  --small    moves little: to see that everything runs, not how fast
  --lib      a folder with libcuda.so.1 or libcufile.so.0 that the loader does not look into by itself";

/// What was asked for.
pub(crate) struct Asked {
    out: PathBuf,
    scratch: PathBuf,
    seconds: u64,
    small: bool,
    libraries: Vec<PathBuf>,
    /// Where the programs lie.
    here: PathBuf,
}

fn asked(mut given: impl Iterator<Item = String>) -> Result<Asked, String> {
    let here = std::env::current_exe().map_err(|error| error.to_string())?;
    let here = here.parent().map(Path::to_owned).ok_or("a program lies in a folder")?;
    let (mut out, mut scratch, mut seconds, mut small, mut libraries) = (None, None, 540, false, Vec::new());
    while let Some(argument) = given.next() {
        let mut value = |what: &str| given.next().ok_or_else(|| format!("{argument} needs {what}"));
        match argument.as_str() {
            "--scratch" => scratch = Some(PathBuf::from(value("a folder")?)),
            "--seconds" => {
                seconds = value("a number")?.parse().map_err(|_| "--seconds needs a number".to_owned())?;
            }
            "--lib" => libraries.push(PathBuf::from(value("a folder")?)),
            "--small" => small = true,
            _ if out.is_none() && !argument.starts_with('-') => out = Some(PathBuf::from(argument)),
            _ => return Err(format!("`{argument}` is not understood")),
        }
    }
    let out = out.ok_or("where to?")?;
    let scratch = scratch.unwrap_or_else(|| out.join("scratch"));
    Ok(Asked { out, scratch, seconds, small, libraries, here })
}

fn main() -> ExitCode {
    let asked = match asked(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(why) => {
            eprintln!("gpu_run: {why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let fault = |path: &Path, error: std::io::Error| {
        eprintln!("gpu_run: {}: {error}", path.display());
        ExitCode::from(2)
    };
    for folder in [&asked.out, &asked.scratch] {
        if let Err(error) = std::fs::create_dir_all(folder) {
            return fault(folder, error);
        }
    }
    let begin = Instant::now();
    let (mut all, facts) = (Vec::new(), steps::facts());
    for step in steps::all(&asked) {
        let left = Duration::from_secs(asked.seconds).saturating_sub(begin.elapsed());
        let outcome = step.run(&asked, left);
        println!("{:<28} {:>7.1} s  {}", outcome.name, outcome.seconds, outcome.line());
        all.push(outcome);
        if let Err(error) = write(&asked, &facts, &all, begin.elapsed()) {
            return fault(&asked.out, error);
        }
    }
    // What of the stores is left there belongs to steps that were stopped.
    let _ = std::fs::remove_dir_all(&asked.scratch);
    match all.iter().any(|outcome| outcome.failed()) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}

/// Writes what is known so far.
fn write(asked: &Asked, facts: &Value, all: &[Outcome], taken: Duration) -> std::io::Result<()> {
    let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let musts = judge::musts(all, asked.small);
    let report = json!({
        "unix_seconds": date,
        "seconds": (taken.as_secs_f64() * 10.0).round() / 10.0,
        "small": asked.small,
        "machine": facts,
        "musts": musts,
        "steps": all.iter().map(Outcome::json).collect::<Vec<_>>(),
    });
    std::fs::write(asked.out.join("report.json"), serde_json::to_string_pretty(&report)? + "\n")?;
    std::fs::write(asked.out.join("report.txt"), judge::page(&report, all, asked.small))
}
