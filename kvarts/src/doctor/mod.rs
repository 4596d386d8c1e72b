//! `kvarts doctor`: whether this machine can run a server well, and what to change where it cannot.
//!
//! Each check is a [`Finding`]: what was found, how it is judged, what to do. The judgements are functions of plain values, which
//! `machine` and `disk` look up.

mod bucket;
mod disk;
mod engine;
mod machine;

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use kvarts_gpudirect::cufile;
use kvarts_gpudirect::device::cuda;
use serde::{Deserialize, Serialize};
use serde_json::json;

use kvarts_terminal::{Align, Failure, Table};

/// Arguments of `kvarts doctor`.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Existing directories of the store
    #[arg(value_name = "DIR", default_value = ".")]
    directories: Vec<PathBuf>,
    /// Bytes to write to each directory and read again, to measure the disk; 0 skips the measurement
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = crate::sizes::bytes)]
    probe: u64,
    /// The bucket of a cold tier, tested with one small object: s3://BUCKET/PREFIX or file:///DIRECTORY
    #[arg(long, value_name = "URL")]
    bucket: Option<String>,
    /// Check that this engine provides the interfaces that the connectors of Kvarts need
    #[arg(long, value_name = "ENGINE", value_parser = ["vllm", "sglang", "lmcache"])]
    engine: Option<String>,
    /// The Python in which the engine and Kvarts' module are installed
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How something is judged.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Good,
    /// A server runs, and would run better with a change.
    #[serde(rename = "improve")]
    Better,
    /// A server does not run, or not safely.
    Bad,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Better => "improve",
            Self::Bad => "BAD",
        }
    }
}

/// The result of one check.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
struct Finding {
    check: String,
    verdict: Verdict,
    found: String,
    advice: Option<String>,
}

impl Finding {
    fn good(check: impl Into<String>, found: impl Into<String>) -> Self {
        Self { check: check.into(), verdict: Verdict::Good, found: found.into(), advice: None }
    }

    fn better(check: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        let advice = Some(advice.into());
        Self { check: check.into(), verdict: Verdict::Better, found: found.into(), advice }
    }

    fn bad(check: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { verdict: Verdict::Bad, ..Self::better(check, found, advice) }
    }
}

/// Runs the checks.
pub(crate) fn run(arguments: &DoctorArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let mut findings = machine::look(&arguments.directories);
    for directory in &arguments.directories {
        findings.extend(disk::look(directory, arguments.probe));
    }
    findings.extend(arguments.bucket.iter().map(|address| bucket::look(address)));
    findings.extend(arguments.engine.iter().map(|engine| engine::look(engine, &arguments.python)));
    findings.push(devices(cuda::count().map_err(|error| error.to_string())));
    let verdict = findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Good);
    let sentence = sentence(&findings);
    if arguments.json {
        let all = json!({ "verdict": verdict, "sentence": sentence, "findings": findings });
        writeln!(out, "{all:#}")?;
    } else {
        show(&findings, out)?;
        writeln!(out, "\n{sentence}")?;
    }
    if verdict == Verdict::Bad { Err(Failure::Problems) } else { Ok(()) }
}

/// The table, and below it what to change.
fn show(findings: &[Finding], out: &mut dyn Write) -> Result<(), Failure> {
    let mut table = Table::new(&[("CHECK", Align::Left), ("VERDICT", Align::Left), ("FOUND", Align::Left)]);
    for finding in findings {
        table.row([finding.check.clone(), finding.verdict.name().to_owned(), finding.found.clone()]);
    }
    write!(out, "{table}")?;
    for finding in findings {
        if let Some(advice) = &finding.advice {
            writeln!(out, "\n{}: {advice}", finding.check)?;
        }
    }
    Ok(())
}

/// All of it in one sentence.
fn sentence(findings: &[Finding]) -> String {
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
    match (count(Verdict::Bad), count(Verdict::Better)) {
        (0, 0) => "This machine is ready for a server.".to_owned(),
        (0, better) => {
            format!("This machine can run a server; {better} of {} checks advise a change.", findings.len())
        }
        (bad, _) => {
            format!(
                "{bad} of {} checks failed: correct the causes before you run a server on this machine.",
                findings.len()
            )
        }
    }
}

/// The devices that layers can be delivered to. A machine without one is as it should be: the store does not need it.
fn devices(found: Result<u32, String>) -> Finding {
    let count = match &found {
        Ok(count) => format!("{count} CUDA devices"),
        Err(why) => why.to_string(),
    };
    match cufile::decide(&cufile::look(found.map(drop)), cufile::Wish::Auto) {
        // Where there is no device there is one way for layers, and the reason is told already.
        Ok(_) if count.starts_with("no CUDA device") => Finding::good("GPU", count),
        Ok(decision) => Finding::good("GPU", format!("{count}; {decision}")),
        Err(why) => Finding::good("GPU", format!("{count}; {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finding_decides_the_sentence() {
        let [good, better, bad] =
            [Finding::good("a", "b"), Finding::better("a", "b", "c"), Finding::bad("a", "b", "c")];
        assert!(sentence(std::slice::from_ref(&good)).contains("ready"));
        assert!(sentence(&[good.clone(), better.clone()]).contains("1 of 2 checks advise"));
        assert!(sentence(&[bad.clone(), better.clone(), good.clone()]).starts_with("1 of 3 checks failed"));
        assert!(bad.verdict > better.verdict && better.verdict > good.verdict);
    }

    #[test]
    fn a_machine_without_a_device_is_no_worse() {
        let finding = devices(Err("libcuda.so cannot be loaded".to_owned()));
        assert_eq!(finding.verdict, Verdict::Good);
        assert!(finding.found.contains("libcuda.so"), "{}", finding.found);
    }
}
