//! The fault campaign: `campaign ROW|all [--tier merge|nightly|release] [--seed S] [--budget N] [--json]`.
//!
//! Ends with 0 if every row ran and found nothing, with 1 if one found something or could not run, with 2 for a
//! command line that it does not understand.
#![allow(clippy::disallowed_methods, reason = "the campaign measures its own time, outside every simulation")]

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

use kvarts_tests::rows::{self, Ask, Row, Tally, Tier};
use serde_json::{Value, json};

const USAGE: &str = "usage: campaign ROW|all|list [--tier merge|nightly|release] [--seed S] [--budget N] \
                     [--workers N] [--allow-skips] [--json]";

struct Arguments {
    which: String,
    ask: Ask,
    json: bool,
    allow_skips: bool,
}

fn number(flag: &str, value: Option<String>) -> Result<u64, String> {
    let value = value.ok_or_else(|| format!("{flag} needs a number"))?;
    value.parse().map_err(|_| format!("{flag} needs a number, not `{value}`"))
}

fn arguments(mut given: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut ask = Ask { tier: Tier::Merge, seed: 0, end: None, budget: None, workers, progress: false };
    let (mut which, mut json, mut allow_skips) = (None, false, false);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--tier" => {
                ask.tier = match given.next().as_deref() {
                    Some("merge") => Tier::Merge,
                    Some("nightly") => Tier::Nightly,
                    Some("release") => Tier::Release,
                    _ => return Err("--tier is merge, nightly or release".to_owned()),
                }
            }
            "--seed" => ask.seed = number("--seed", given.next())?,
            "--budget" => ask.budget = Some(number("--budget", given.next())?),
            "--workers" => ask.workers = number("--workers", given.next())?.max(1) as usize,
            "--json" => json = true,
            "--allow-skips" => allow_skips = true,
            _ if which.is_none() && !argument.starts_with('-') => which = Some(argument),
            _ => return Err(format!("`{argument}` is not understood")),
        }
    }
    Ok(Arguments { which: which.ok_or("which row?")?, ask, json, allow_skips })
}

fn main() -> ExitCode {
    let arguments = match arguments(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("campaign: {why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let mut rows = rows::all();
    if arguments.which == "list" {
        for row in rows {
            println!("{:<4} {} ({})", row.id, row.what, row.counts);
        }
        return ExitCode::SUCCESS;
    }
    if arguments.which != "all" {
        rows.retain(|row| row.id == arguments.which);
    }
    if rows.is_empty() {
        eprintln!("campaign: there is no row `{}`; `campaign list` shows all", arguments.which);
        return ExitCode::from(2);
    }
    let (mut all, mut good) = (Vec::new(), true);
    for row in &rows {
        let start = Instant::now();
        let tally = row.run(&arguments.ask);
        let seconds = start.elapsed().as_secs_f64();
        good &= tally.violations.is_empty() && (arguments.allow_skips || tally.skipped.is_none());
        tell(row, &tally, seconds);
        all.push(value(row, &arguments.ask, &tally, seconds));
    }
    if arguments.json {
        println!("{}", json!({ "rows": all }));
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn value(row: &Row, ask: &Ask, tally: &Tally, seconds: f64) -> Value {
    json!({
        "row": row.id,
        "distinct": tally.distinct,
        "violations": tally.violations.len(),
        "skipped": tally.skipped,
        "seconds": (seconds * 10.0).round() / 10.0,
        "seed": ask.seed,
    })
}

/// A row's line for people, on standard error so that the last line of the output stays JSON.
fn tell(row: &Row, tally: &Tally, seconds: f64) {
    let color = std::io::stderr().is_terminal();
    let red = |text: &str| if color { format!("\x1b[31m{text}\x1b[0m") } else { text.to_owned() };
    let mut out = std::io::stderr().lock();
    let verdict = match (&tally.skipped, tally.violations.len()) {
        (Some(why), _) => red(&format!("SKIPPED: {why}")),
        (None, 0) => "0 violations".to_owned(),
        (None, n) => red(&format!("{n} VIOLATIONS")),
    };
    let _ = writeln!(
        out,
        "{:<4} {:>9} {}, {verdict}, {seconds:.1} s, seeds {}..{}",
        row.id, tally.distinct, row.counts, tally.seeds.start, tally.seeds.end
    );
    for violation in &tally.violations {
        let _ = writeln!(
            out,
            "     seed {}: {}\n     again: campaign {} --seed {} --budget 1 --workers 1",
            violation.seed, violation.what, row.id, violation.seed
        );
    }
}
