//! `kvarts scrub`, `checkpoint`, `budget`, `drain` and `reload`: a running server is told to do something. All need the right
//! to administer.

use std::io::Write;

use clap::Args;
use serde_json::json;

use super::stat::AdminArgs;
use super::sure::Sure;
use super::{ServerArgs, print};
use crate::sizes::Budget;
use kvarts_client::Via;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;

/// The arguments of `budget`.
#[derive(Args, Debug)]
pub(crate) struct BudgetArgs {
    /// The new limit of the store's bytes on disk, such as 5G, "3.5 TiB", or 90% of the server's disks; without
    /// a size the command shows the budget
    #[arg(value_name = "SIZE|PERCENT", value_parser = crate::sizes::budget)]
    size: Option<Budget>,
    #[command(flatten)]
    sure: Sure,
    #[command(flatten)]
    server: ServerArgs,
}

/// The arguments of `drain`.
#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    sure: Sure,
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `scrub`. Exit code 1 where something is damaged.
pub(crate) fn scrub(arguments: &AdminArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let found = client.scrub().map_err(Failure::user)?;
    if arguments.server.json {
        let report = json!({
            "blocks_checked": found.blocks_checked, "bytes_checked": found.bytes_checked,
            "blocks_damaged": found.blocks_damaged, "blocks_gone": found.blocks_gone,
            "blocks_passed_over": found.blocks_passed_over,
        });
        print(out, &report)?;
    } else {
        let (blocks, size) = (grouped(found.blocks_checked), bytes(found.bytes_checked));
        writeln!(out, "{blocks} blocks ({size}) were compared with their digests")?;
        match found.blocks_damaged {
            0 => writeln!(out, "no block is damaged")?,
            damaged => writeln!(
                out,
                "{} blocks are damaged and are misses from now on; the server's log lists their positions",
                grouped(damaged)
            )?,
        }
        if found.blocks_passed_over > 0 {
            let passed = grouped(found.blocks_passed_over);
            writeln!(out, "{passed} blocks could not be checked now: run the command again")?;
        }
    }
    if found.blocks_damaged == 0 { Ok(()) } else { Err(Failure::Problems) }
}

/// Runs `checkpoint`.
pub(crate) fn checkpoint(arguments: &AdminArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    client.checkpoint().map_err(Failure::user)?;
    match arguments.server.json {
        true => print(out, &json!({"written": true})),
        false => Ok(writeln!(out, "a checkpoint was written and shortens the next start")?),
    }
}

/// Runs `budget`.
pub(crate) fn budget(arguments: &BudgetArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let stats = client.stats().map_err(Failure::user)?;
    let before = stats.budget_bytes;
    let (now, allocated) = match arguments.size {
        None => (before, stats.allocated_bytes),
        Some(Budget::Part(part)) => {
            let used = bytes(stats.allocated_bytes);
            arguments.sure.ask(&format!(
                "the store has allocated {used}: if {part}% of the server's disks is less than {used}, \
                the store evicts blocks"
            ))?;
            let reply = client.set_budget_part(part).map_err(Failure::user)?;
            (reply.budget_bytes, reply.allocated_bytes)
        }
        Some(Budget::Bytes(size)) => {
            if size < stats.allocated_bytes {
                let (size, used) = (bytes(size), bytes(stats.allocated_bytes));
                arguments.sure.ask(&format!(
                    "the store has allocated {used}: the store evicts blocks until at most {size} are \
                    allocated"
                ))?;
            }
            let reply = client.set_budget(size).map_err(Failure::user)?;
            (reply.budget_bytes, reply.allocated_bytes)
        }
    };
    if arguments.server.json {
        let report = json!({"budget_bytes": now, "allocated_bytes": allocated, "before_bytes": before});
        return print(out, &report);
    }
    let used = bytes(allocated);
    match arguments.size {
        None => writeln!(out, "budget {}, {used} allocated", bytes(now))?,
        Some(_) => {
            let before = bytes(before);
            writeln!(out, "budget {} from now on (before: {before}), {used} allocated", bytes(now))?;
            if allocated > now {
                writeln!(
                    out,
                    "  the store removes segments until it fits the budget; `kvarts budget` shows the \
                    progress"
                )?;
            }
            writeln!(out, "  the next start uses store.budget from the configuration again")?;
        }
    }
    Ok(())
}

/// Runs `drain`.
pub(crate) fn drain(arguments: &DrainArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    if arguments.sure.will_ask() {
        // It needs the same right: what the server refuses is refused before the question.
        client.stats().map_err(Failure::user)?;
    }
    arguments.sure.ask("the server accepts no more calls and stops")?;
    client.drain().map_err(Failure::user)?;
    match arguments.server.json {
        true => print(out, &json!({"draining": true})),
        false => Ok(writeln!(out, "the server finishes its calls, writes a checkpoint and stops")?),
    }
}

/// Runs `reload`.
pub(crate) fn reload(arguments: &AdminArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let notes = client.reload().map_err(Failure::user)?;
    if arguments.server.json {
        return print(out, &json!({"reloaded": true, "notes": notes}));
    }
    writeln!(out, "tenants, tokens and certificates are reloaded")?;
    for note in notes {
        writeln!(out, "  {note}")?;
    }
    Ok(())
}
