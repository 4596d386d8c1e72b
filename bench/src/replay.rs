//! `bench replay`: a trace of requests against the real engine, whose budget holds a part of it.
//!
//! Each line of a trace is a request: `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [..]}`, the
//! ids of its blocks in order, equal where prefixes are (the format of the Mooncake traces). The prefix that is here is
//! matched and read, byte by byte; what is missing behind it is put. A block that was read whole is a hit.
//!
//! The store lives on the trace's clock and is driven step by step, so that a replay is the same each time, and the same
//! as `sim disk` without a disk. With `--clock machine` it runs by itself, and no two replays are quite alike.
//!
//! Beside the engine's hits stand those of an exact LRU over blocks, which has the engine's whole physical budget for
//! payload alone, and those of a cache without bounds. Blocks are scaled down, so that a trace takes seconds.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use clap::Args;
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_simulator::disk::{Distinct, Lockstep, Machine, Replay};
use kvarts_store::engine::Store;
use kvarts_store::io::{Features, Io, IoChoice, open_io};
use serde::Deserialize;

use super::device;
use super::report::Report;
use super::scratch::Scratch;
use super::setup::{self, Common, progress};
use crate::sim::disk::{Beside, StoreArgs};
use kvarts_terminal::Failure;

/// The longest line of a trace.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// The arguments of `bench replay`.
#[derive(Args, Debug)]
pub(super) struct ReplayArgs {
    /// The trace: JSON lines with `hash_ids`
    trace: PathBuf,
    #[command(flatten)]
    store: StoreArgs,
    /// Parent of the store's directory [default: the current directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Clock of the blocks' age: trace (repeatable) or machine
    #[arg(long, default_value = "trace", value_parser = ["trace", "machine"])]
    clock: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One line of a trace; the rest of it is of no use here.
#[derive(Deserialize, Debug)]
struct Line {
    timestamp: Option<f64>,
    hash_ids: Vec<u64>,
}

/// Reads a trace: when each request comes, and its blocks. One without times has a request each second.
fn read_trace(path: &PathBuf) -> Result<Vec<(f64, Vec<u64>)>, Failure> {
    let fault = |what: String| Failure::User(format!("{}: {what}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| fault(error.to_string()))?;
    let mut reader = BufReader::new(file);
    let (mut requests, mut line) = (Vec::new(), Vec::new());
    loop {
        line.clear();
        let mut bounded = std::io::Read::take(&mut reader, LINE_BYTES_MAX);
        let read = bounded.read_until(b'\n', &mut line).map_err(|error| fault(error.to_string()))?;
        if read == 0 {
            return match requests.is_empty() {
                true => Err(fault("the trace has no requests".to_owned())),
                false => Ok(requests),
            };
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_slice(&line)
            .map_err(|error| fault(format!("line {}: {error}", requests.len() + 1)))?;
        let at_ms = parsed.timestamp.unwrap_or(requests.len() as f64 * 1000.0);
        requests.push((at_ms, parsed.hash_ids));
    }
}

/// Runs the benchmark.
pub(super) fn run(arguments: &ReplayArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let requests = read_trace(&arguments.trace)?;
    let mut distinct = Distinct::default();
    requests.iter().for_each(|(_, blocks)| distinct.request(blocks));
    let settings = arguments.store.settings(distinct.blocks());
    let common = Common::quiet(arguments.dir.clone(), arguments.json, 3);
    let scratch = Scratch::new(&common, settings.budget_bytes() + (64 << 20))?;
    let mut report = Report::new("replay");
    let before = device::written(scratch.path());
    if arguments.clock == "machine" {
        let home = setup::open(&common, scratch.path(), settings.options())?;
        setup::describe(&mut report, &common, &home)?;
        let stats = |store: &Store| block_on(store.io()).map_err(Failure::user);
        let beside = replay(&requests, home.store(), (arguments, &distinct), None)?;
        beside.tell(&mut report, home.store(), stats(home.store())?)?;
        tell_device(&mut report, home.store(), (before, device::written(scratch.path())));
        home.close().map_err(Failure::user)?;
        return report.write(arguments.json, out);
    }
    let directory = scratch.path().to_owned();
    let make = move || {
        let io = open_io(IoChoice::Auto, std::slice::from_ref(&directory), &Features::default());
        let io = Lockstep::new(io.map_err(|error| error.to_string())?);
        Ok(Rc::new(RefCell::new(io)) as Rc<RefCell<dyn Io>>)
    };
    let machine = Machine::new(1, Box::new(make));
    let store = machine.open(&settings.options()).map_err(Failure::User)?;
    let beside = replay(&requests, &store, (arguments, &distinct), Some(&machine))?;
    let io = machine.wait(store.io()).map_err(Failure::User)?.map_err(Failure::user)?;
    if let Some((facts, _)) = io.first() {
        report.fact("backend", facts.backend);
    }
    beside.tell(&mut report, &store, io)?;
    tell_device(&mut report, &store, (before, device::written(scratch.path())));
    machine.wait(store.close()).map_err(Failure::User)?.map_err(Failure::user)?;
    report.write(arguments.json, out)
}

/// What the device wrote meanwhile for each byte that was put, the file system's own writes and those of other programs included.
fn tell_device(report: &mut Report, store: &Store, written: (Option<u64>, Option<u64>)) {
    if let (Some(before), Some(after)) = written {
        let payload = store.stats().counts.payload_bytes_stored.max(1) as f64;
        report.number("device_written_by_put", after.saturating_sub(before) as f64 / payload);
    }
}

fn replay<'a>(
    requests: &[(f64, Vec<u64>)],
    store: &'a Store,
    (arguments, distinct): (&ReplayArgs, &'a Distinct),
    machine: Option<&'a Machine>,
) -> Result<Beside<'a>, Failure> {
    let settings = arguments.store.settings(distinct.blocks());
    let fill = |memory: &SharedBuf| setup::noise_into(memory);
    let replay = Replay::new(machine, store, &settings, fill).map_err(Failure::User)?;
    let mut beside = Beside::new(replay, settings, distinct);
    let begin = Instant::now();
    for (number, (at_ms, blocks)) in requests.iter().enumerate() {
        progress(&format!("replaying: {number} of {} requests", requests.len()));
        beside.request(*at_ms, blocks)?;
    }
    progress("");
    beside.seconds = begin.elapsed().as_secs_f64();
    // What the same LRU would have with the blocks for which the store had room beside headers and frames: the
    // difference to it is what is evicted, and the rest is what cannot be payload.
    let mut payload = kvarts_simulator::disk::LruHits::new(store.stats().index.blocks as u64);
    requests.iter().for_each(|(_, blocks)| payload.request(blocks));
    beside.lru_of_payload = payload.hits;
    Ok(beside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_line_by_line_and_what_is_no_request_is_named() {
        let common = Common::quiet(Some(std::env::temp_dir()), true, 3);
        let scratch = Scratch::new(&common, 0).unwrap();
        let path = scratch.path().join("trace");
        std::fs::write(&path, "{\"timestamp\":1,\"hash_ids\":[1,2]}\n\n{\"hash_ids\":[]}\n").unwrap();
        assert_eq!(read_trace(&path).unwrap(), [(1.0, vec![1, 2]), (1000.0, vec![])]);
        std::fs::write(&path, "{\"hash_ids\":[1]}\n{\"hash\":[1]}\n").unwrap();
        assert!(format!("{:?}", read_trace(&path).unwrap_err()).contains("line 2"));
        std::fs::write(&path, "").unwrap();
        assert!(read_trace(&path).is_err());
    }
}
