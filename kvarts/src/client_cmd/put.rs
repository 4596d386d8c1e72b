//! `kvarts put`: blocks from a file to a running server.
//!
//! Nothing is sent before the file is known to have exactly the bytes of the blocks that were named: blocks are stored
//! under their keys for good, and a wrong cut would leave wrong bytes under right keys.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kvarts_contract::api::{BlockOutcome, Durability, KvStore, Parent, PutRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::BlockKey;
use serde_json::json;

use super::subject::{self, Subject};
use super::{KeyArgs, ModelArgs, ServerArgs, memory, placed, print, read};
use crate::files;
use kvarts_client::{Client, Via};
use kvarts_server::human::grouped;
use kvarts_terminal::Failure;

/// Refusals that are shown one by one.
const SHOWN: usize = 10;

/// The arguments of `put`.
#[derive(Args, Debug)]
pub(crate) struct PutArgs {
    /// A file with the bytes of the blocks, or `-` for standard input
    file: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// Return when the blocks are written, before they are flushed
    #[arg(long)]
    relaxed: bool,
    /// Read blocks that were already stored, and fail if their bytes differ from the file
    #[arg(long)]
    verify: bool,
    /// Time to live of the blocks, such as 90s, 30m, 12h, 7d [default: until they are evicted]
    #[arg(long, value_parser = subject::duration)]
    ttl: Option<Duration>,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `put`.
pub(crate) fn put(arguments: &PutArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let subject = Subject::described(&arguments.model, &arguments.keys)?;
    let client = arguments.server.connect(Via::Best)?;
    let subject = subject.registered(&client)?;
    let mut source = source(&arguments.file, &subject)?;
    let (memory, batch) = memory(&client, &subject)?;
    let mut outcomes = Vec::new();
    let mut differing = Vec::new();
    for keys in subject.keys.chunks(batch) {
        fill(&mut source, &memory, subject.shape.block_bytes() as usize, keys.len())
            .map_err(|error| Failure::User(format!("{}: {error}", arguments.file.display())))?;
        let first = outcomes.len();
        let request = request(arguments, &subject, first, keys, &memory)?;
        let answer = block_on(client.put(request)).map_err(Failure::user)?.map_err(Failure::user)?;
        if arguments.verify {
            let there =
                (0..keys.len()).filter(|&at| answer.outcomes.get(at) == Some(&BlockOutcome::AlreadyThere));
            differing.extend(differ(&client, &subject, (first, keys), &memory, there)?);
        }
        outcomes.extend(answer.outcomes);
    }
    report(arguments, &subject, client.path().name(), &outcomes, &differing, out)
}

fn request(
    arguments: &PutArgs,
    subject: &Subject,
    first: usize,
    keys: &[BlockKey],
    memory: &SharedBuf,
) -> Result<PutRequest, Failure> {
    let parent = match first.checked_sub(1).and_then(|before| subject.keys.get(before)) {
        _ if !subject.chained => Parent::Unknown,
        Some(key) => Parent::Key(*key),
        None => Parent::Root,
    };
    Ok(PutRequest {
        namespace: subject.namespace,
        group: subject.group,
        coordinate: subject.coordinate,
        parent,
        first_block: subject.chained.then_some(first as u32),
        keys: keys.to_vec(),
        from: placed(subject, memory, keys.len())?,
        layout: None,
        durability: if arguments.relaxed { Durability::Relaxed } else { Durability::Durable },
        expires_after: arguments.ttl,
        origins: None,
        deadline: None,
    })
}

/// The file, once it is known to have the bytes of all blocks and none more. What cannot tell its length is copied into a
/// temporary file first.
fn source(path: &Path, subject: &Subject) -> Result<File, Failure> {
    let shown = path.display();
    let fault = |error: io::Error| Failure::User(format!("{shown}: {error}"));
    let (blocks, each) = (subject.keys.len() as u64, subject.shape.block_bytes());
    let expected = blocks.saturating_mul(each);
    let opened = match path.as_os_str() == "-" {
        true => None,
        false => Some(File::open(path).map_err(fault)?),
    };
    let (file, found) = match opened {
        Some(file) if file.metadata().map_err(fault)?.is_file() => {
            let len = file.metadata().map_err(fault)?.len();
            (file, len)
        }
        Some(file) => spool(file, files::temporary()?, expected).map_err(fault)?,
        None => spool(io::stdin().lock(), files::temporary()?, expected).map_err(fault)?,
    };
    if found == expected {
        return Ok(file);
    }
    let what = if found > expected { "is longer than" } else { "ends before" };
    let has = if found > expected { "more".to_owned() } else { grouped(found) };
    Err(Failure::User(format!(
        "{shown} {what} its {blocks} blocks of {each} bytes: {} bytes are needed, but {shown} has {has}. No block \
        was stored: check --model, --tp and --rank, and the tokens or keys",
        grouped(expected)
    )))
}

/// What comes from a pipe, in `file`: at most one byte more than is expected, which tells that it is longer.
fn spool(source: impl Read, mut file: File, expected: u64) -> io::Result<(File, u64)> {
    let found = io::copy(&mut source.take(expected.saturating_add(1)), &mut file)?;
    file.seek(SeekFrom::Start(0))?;
    Ok((file, found))
}

fn fill(source: &mut File, memory: &SharedBuf, each: usize, blocks: usize) -> io::Result<()> {
    let mut block = vec![0; each];
    for at in 0..blocks {
        source.read_exact(&mut block)?;
        memory.copy_in(at * each, &block);
    }
    Ok(())
}

/// Those of some blocks whose bytes on the server are not those in memory.
fn differ(
    client: &Client,
    subject: &Subject,
    (first, keys): (usize, &[BlockKey]),
    memory: &SharedBuf,
    there: impl Iterator<Item = usize>,
) -> Result<Vec<usize>, Failure> {
    let each = subject.shape.block_bytes() as usize;
    let (back, _) = super::memory(client, &Subject { keys: Vec::new(), ..subject.clone() })?;
    let (mut ours, mut theirs, mut differing) = (vec![0; each], vec![0; each], Vec::new());
    for at in there {
        let end = read(client, subject, keys.get(at..=at).unwrap_or_default(), &back)?;
        memory.copy_out(at * each, &mut ours);
        back.copy_out(0, &mut theirs);
        // A block that went meanwhile has no bytes that could differ.
        if end.usable_blocks == 1 && ours != theirs {
            differing.push(first + at);
        }
    }
    Ok(differing)
}

fn report(
    arguments: &PutArgs,
    subject: &Subject,
    path: &str,
    outcomes: &[BlockOutcome],
    differing: &[usize],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let count = |wanted: fn(&BlockOutcome) -> bool| outcomes.iter().filter(|one| wanted(one)).count();
    let stored = count(|one| *one == BlockOutcome::Stored);
    let there = count(|one| *one == BlockOutcome::AlreadyThere);
    let elsewhere = count(|one| *one == BlockOutcome::HeldElsewhere);
    let other = outcomes.len() - stored - there - elsewhere;
    let refused: Vec<_> =
        (0..).zip(outcomes).filter_map(|(at, outcome): (u32, _)| refusal(at, outcome)).collect();
    if arguments.server.json {
        let report = json!({
            "namespace": subject.namespace.to_string(), "blocks": outcomes.len(), "stored": stored,
            "already_there": there, "held_elsewhere": elsewhere, "not_stored": refused, "path": path,
            "differing": arguments.verify.then_some(differing),
        });
        print(out, &report)?;
    } else {
        let held = if elsewhere > 0 { format!("{elsewhere} held by another node, ") } else { String::new() };
        writeln!(out, "{stored} blocks stored, {there} were stored before, {held}{other} not stored")?;
        let alike = alike(&refused);
        for (first, last, why) in alike.iter().take(SHOWN) {
            match first == last {
                true => writeln!(out, "  block {first}: {why}")?,
                false => writeln!(out, "  blocks {first} to {last}: {why}")?,
            }
        }
        if alike.len() > SHOWN {
            writeln!(out, "{} more lines are not shown: `--json` prints all lines", alike.len() - SHOWN)?;
        }
        for block in differing.iter().take(SHOWN) {
            writeln!(out, "block {block}: the server has other bytes under this key than the file")?;
        }
    }
    if other == 0 && differing.is_empty() { Ok(()) } else { Err(Failure::Problems) }
}

/// Runs of blocks that were refused for the same reason: the first of each, the last, and why.
fn alike(refused: &[serde_json::Value]) -> Vec<(u64, u64, &str)> {
    let mut runs: Vec<(u64, u64, &str)> = Vec::new();
    for line in refused {
        let (block, why) =
            (line["block"].as_u64().unwrap_or_default(), line["why"].as_str().unwrap_or_default());
        match runs.last_mut() {
            Some((_, last, of_run)) if *last + 1 == block && *of_run == why => *last = block,
            _ => runs.push((block, block, why)),
        }
    }
    runs
}

fn refusal(block: u32, outcome: &BlockOutcome) -> Option<serde_json::Value> {
    match outcome {
        BlockOutcome::Stored | BlockOutcome::AlreadyThere | BlockOutcome::HeldElsewhere => None,
        BlockOutcome::InFlight => {
            Some(json!({"block": block, "why": "another put of the block is under way"}))
        }
        BlockOutcome::Refused(reason) => Some(json!({"block": block, "why": reason.to_string()})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_were_refused_for_one_reason_are_told_in_one_line() {
        let lines = [(3, "full"), (4, "full"), (5, "late"), (7, "late"), (8, "full")];
        let lines = lines.map(|(block, why)| json!({"block": block, "why": why}));
        assert_eq!(alike(&lines), [(3, 4, "full"), (5, 5, "late"), (7, 7, "late"), (8, 8, "full")]);
        assert!(alike(&[]).is_empty());
    }
}
