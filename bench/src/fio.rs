//! fio beside the bare loop, where it is installed: the same reads of the same files in the same order, as deep.
//!
//! The bare loop is what ratios are taken to, so it must not be slow itself. fio replays its extents from an I/O log, one
//! job a lane, through io_uring with registered memory; its own report says how long that took, without its start.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::bare::Plan;
use super::pairs::Sample;
use kvarts_terminal::Failure;

/// Bytes whose reading takes tens of milliseconds on any device.
const BYTES_MIN: u64 = 256 << 20;

/// The bare loop's reads, written down for fio.
#[derive(Debug)]
pub(super) struct Fio {
    logs: Vec<PathBuf>,
    depth: u64,
}

impl Fio {
    /// Writes the logs below `directory`, where the plan's files are; none if fio is not installed, or the reads take
    /// too few of the milliseconds in which it tells time.
    pub(super) fn prepare(directory: &Path, plan: &Plan, window: u64) -> Result<Option<Self>, Failure> {
        if plan.bytes < BYTES_MIN {
            return Ok(None);
        }
        let installed =
            Command::new("fio").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !installed.is_ok_and(|status| status.success()) {
            return Ok(None);
        }
        let extents: usize = plan.lanes.iter().map(|lane| lane.len()).sum();
        let mean = plan.bytes / (extents as u64).max(1);
        let mut logs = Vec::new();
        for (index, lane) in plan.lanes.iter().enumerate().filter(|(_, lane)| !lane.is_empty()) {
            let shown = |path: &str| directory.join(path).display().to_string();
            let mut paths: Vec<&str> = lane.iter().map(|extent| &*extent.path).collect();
            paths.sort_unstable();
            paths.dedup();
            let mut log = String::from("fio version 2 iolog\n");
            for path in &paths {
                let path = shown(path);
                // A text cannot refuse what is written to it.
                let _ = write!(log, "{path} add\n{path} open\n");
            }
            for extent in lane.iter() {
                let _ =
                    writeln!(log, "{} read {} {}", shown(&extent.path), extent.offset, extent.memory.len());
            }
            let at = directory.join(format!("lane-{index}.iolog"));
            std::fs::write(&at, log)?;
            logs.push(at);
        }
        Ok(Some(Self { logs, depth: (window / mean.max(1)).max(1) }))
    }

    /// One replay.
    pub(super) fn replay(&self) -> Result<Sample, Failure> {
        let mut command = Command::new("fio");
        command.args(["--output-format=json", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1"]);
        command.args(["--replay_no_stall=1", "--thread=1"]).arg(format!("--iodepth={}", self.depth));
        for (index, log) in self.logs.iter().enumerate() {
            command.arg(format!("--name=lane{index}")).arg(format!("--read_iolog={}", log.display()));
        }
        let output = command.output()?;
        let report: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| Failure::User(format!("the report of fio is not valid JSON: {error}")))?;
        let jobs = report["jobs"].as_array().cloned().unwrap_or_default();
        let runtime = |job: &Value| job["read"]["runtime"].as_f64().unwrap_or(0.0);
        let slowest = jobs.iter().map(runtime).fold(0.0, f64::max);
        if !output.status.success() || slowest == 0.0 {
            let why = String::from_utf8_lossy(&output.stderr);
            return Err(Failure::User(format!(
                "fio: {}",
                why.lines().next().unwrap_or("the report of fio has no reads")
            )));
        }
        Ok(Sample { seconds: slowest / 1e3, ..Sample::default() })
    }
}
