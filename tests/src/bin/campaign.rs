//! The fault campaign: `campaign ROW[,ROW]|all|list [--tier merge|nightly|release] [--seed S|A..B] [--budget N]
//! [--resume FILE] [--workers N] [--allow-skips] [--json]`.
//!
//! `--seed A..B` runs exactly those seeds. `--resume FILE` runs a tier in pieces and notes in the file how far it has
//! come, so that it may be stopped at any time and gone on with; the numbers are then those of all pieces together.
//!
//! Ends with 0 if every row ran and found nothing, with 1 if one found something or could not run, with 2 for a
//! command line that it does not understand.
#![allow(clippy::disallowed_methods, reason = "the campaign measures its own time, outside every simulation")]

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use kvarts_tests::rows::{self, Ask, Row, Tally, Tier};
use serde_json::{Value, json};

const USAGE: &str = "usage: campaign ROW[,ROW]|all|list [--tier merge|nightly|release] [--seed S|A..B] \
                     [--budget N] [--resume FILE] [--workers N] [--allow-skips] [--json] [--planted BUG]";
/// Pieces of a row that is resumed.
const PIECES: u64 = 40;

struct Arguments {
    which: String,
    ask: Ask,
    resume: Option<PathBuf>,
    json: bool,
    allow_skips: bool,
}

fn number(flag: &str, value: Option<&str>) -> Result<u64, String> {
    let value = value.ok_or_else(|| format!("{flag} needs a number"))?;
    value.parse().map_err(|_| format!("{flag} needs a number, not `{value}`"))
}

/// `S`, or `A..B` without B.
fn seeds(value: Option<&str>) -> Result<(u64, Option<u64>), String> {
    match value.and_then(|value| value.split_once("..")) {
        None => Ok((number("--seed", value)?, None)),
        Some((from, to)) => {
            let (from, to) = (number("--seed", Some(from))?, number("--seed", Some(to))?);
            if from < to {
                Ok((from, Some(to)))
            } else {
                Err(format!("--seed {from}..{to} is no seed at all"))
            }
        }
    }
}

fn arguments(mut given: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let progress = std::io::stderr().is_terminal();
    let mut ask = Ask { tier: Tier::Merge, seed: 0, end: None, budget: None, workers, progress };
    let (mut which, mut resume, mut json, mut allow_skips) = (None, None, false, false);
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
            "--seed" => (ask.seed, ask.end) = seeds(given.next().as_deref())?,
            "--budget" => ask.budget = Some(number("--budget", given.next().as_deref())?),
            "--resume" => resume = Some(given.next().ok_or("--resume needs a file")?.into()),
            "--workers" => ask.workers = number("--workers", given.next().as_deref())?.max(1) as usize,
            "--planted" => {
                let name = given.next().ok_or("--planted needs the name of a bug")?;
                rows::planted::plant(&name)?;
            }
            "--json" => json = true,
            "--allow-skips" => allow_skips = true,
            _ if which.is_none() && !argument.starts_with('-') => which = Some(argument),
            _ => return Err(format!("`{argument}` is not understood")),
        }
    }
    if resume.is_some() && (ask.seed, ask.end, ask.budget) != (0, None, None) {
        return Err("--resume goes through a tier: it takes no --seed and no --budget".to_owned());
    }
    Ok(Arguments { which: which.ok_or("which row?")?, ask, resume, json, allow_skips })
}

/// The rows that were asked for.
fn chosen(which: &str, tier: Tier) -> Result<Vec<Row>, String> {
    let mut all = rows::all();
    if which == "all" {
        all.retain(|row| row.is_in(tier));
        return Ok(all);
    }
    let names: Vec<&str> = which.split(',').collect();
    if let Some(name) = names.iter().find(|name| all.iter().all(|row| row.id != **name)) {
        return Err(format!("there is no row `{name}`; `campaign list` shows all"));
    }
    all.retain(|row| names.contains(&row.id));
    Ok(all)
}

fn main() -> ExitCode {
    let arguments = arguments(std::env::args().skip(1));
    let rows = arguments.as_ref().map_err(Clone::clone).and_then(|given| match given.which.as_str() {
        "list" => Ok(Vec::new()),
        which => chosen(which, given.ask.tier),
    });
    let (arguments, rows) = match (arguments, rows) {
        (Ok(arguments), Ok(rows)) => (arguments, rows),
        (Err(why), _) | (_, Err(why)) => {
            eprintln!("campaign: {why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if arguments.which == "list" {
        list();
        return ExitCode::SUCCESS;
    }
    let mut notes = match arguments.resume.as_deref().map(Notes::open).transpose() {
        Ok(notes) => notes,
        Err(why) => {
            eprintln!("campaign: {why}");
            return ExitCode::from(2);
        }
    };
    let (mut all, mut good) = (Vec::new(), true);
    for row in &rows {
        let (tally, seconds) = match &mut notes {
            Some(notes) => notes.go_on(row, &arguments.ask),
            None => timed(row, &arguments.ask),
        };
        good &= tally.violations.is_empty() && (arguments.allow_skips || tally.skipped.is_none());
        tell(row, arguments.ask.tier, &tally, seconds);
        all.push(value(row, &arguments.ask, &tally, seconds));
    }
    if arguments.json {
        println!("{}", json!({ "rows": all }));
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn list() {
    for row in rows::all() {
        let [merge, nightly, release] = row.targets;
        println!("{:<4} {} ({})", row.id, row.what, row.counts);
        println!("     merge {merge}, nightly {nightly}, release {release}");
    }
}

fn timed(row: &Row, ask: &Ask) -> (Tally, f64) {
    let start = Instant::now();
    let tally = row.run(ask);
    (tally, start.elapsed().as_secs_f64())
}

/// How far rows have come, in a file.
struct Notes {
    path: PathBuf,
    rows: BTreeMap<String, Value>,
}

impl Notes {
    fn open(path: &Path) -> Result<Self, String> {
        let rows = match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str::<BTreeMap<String, Value>>(&text)
                .map_err(|error| format!("{}: {error}: give another file to --resume", path.display()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        Ok(Self { path: path.to_owned(), rows })
    }

    /// Runs the pieces of a row that have not been run.
    fn go_on(&mut self, row: &Row, ask: &Ask) -> (Tally, f64) {
        let key = format!("{} {:?}", row.id, ask.tier);
        let of = |name: &str| self.rows.get(&key).and_then(|noted| noted[name].as_u64()).unwrap_or(0);
        let (mut tally, mut milliseconds) = (Tally::default(), of("milliseconds"));
        (tally.distinct, tally.visited) = (of("distinct"), of("visited"));
        tally.seeds = 0..of("next");
        let (target, closed) = (row.target(ask), row.seeds(ask.tier));
        let done = |tally: &Tally| match closed {
            Some(seeds) => tally.seeds.end >= seeds,
            None => tally.distinct >= target,
        };
        while !done(&tally) && tally.violations.is_empty() && tally.skipped.is_none() {
            let mut piece = Ask { seed: tally.seeds.end, ..*ask };
            match closed {
                Some(seeds) => piece.end = Some((piece.seed + seeds.div_ceil(PIECES)).min(seeds)),
                None => piece.budget = Some(target.div_ceil(PIECES).min(target - tally.distinct)),
            }
            let (part, seconds) = timed(row, &piece);
            milliseconds += (seconds * 1000.0) as u64;
            tally.distinct += part.distinct;
            tally.visited += part.visited;
            (tally.violations, tally.skipped) = (part.violations, part.skipped);
            if tally.skipped.is_none() && tally.violations.is_empty() {
                tally.seeds.end = part.seeds.end;
                self.note(&key, &tally, milliseconds);
            }
        }
        (tally, milliseconds as f64 / 1000.0)
    }

    fn note(&mut self, key: &str, tally: &Tally, milliseconds: u64) {
        let noted = json!({
            "next": tally.seeds.end,
            "distinct": tally.distinct,
            "visited": tally.visited,
            "milliseconds": milliseconds,
        });
        self.rows.insert(key.to_owned(), noted);
        let beside = self.path.with_extension("new");
        let text = serde_json::to_string_pretty(&self.rows).unwrap_or_default();
        let written =
            std::fs::write(&beside, text + "\n").and_then(|()| std::fs::rename(&beside, &self.path));
        if let Err(error) = written {
            eprintln!("campaign: {}: {error}: this piece will be run again", self.path.display());
        }
    }
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
fn tell(row: &Row, tier: Tier, tally: &Tally, seconds: f64) {
    let color = std::io::stderr().is_terminal();
    let red = |text: &str| if color { format!("\x1b[31m{text}\x1b[0m") } else { text.to_owned() };
    let mut out = std::io::stderr().lock();
    let verdict = match (&tally.skipped, tally.violations.len()) {
        (Some(why), _) => red(&format!("SKIPPED: {why}")),
        (None, 0) => "0 violations".to_owned(),
        (None, n) => red(&format!("{n} VIOLATIONS")),
    };
    let visited = if tally.visited > 0 { format!(" of {} visited", tally.visited) } else { String::new() };
    let _ = writeln!(
        out,
        "{:<4} {:>9} {}{visited}, {verdict}, {seconds:.1} s, seeds {}..{}",
        row.id, tally.distinct, row.counts, tally.seeds.start, tally.seeds.end
    );
    for violation in &tally.violations {
        let _ = writeln!(
            out,
            "     seed {}: {}\n     again: campaign {} --tier {} --seed {}..{} --workers 1",
            violation.seed,
            violation.what,
            row.id,
            tier.name(),
            violation.seed,
            violation.seed + 1
        );
    }
}
