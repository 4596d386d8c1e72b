//! `kvarts stat` and `kvarts resume`: what a running server is and has done, and writes taken again after a fault.

use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use serde_json::{Value, json};

use super::{ServerArgs, print};
use kvarts_client::Via;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_wire::limits::{LOST_DIRECTORY, SHORT_OF_DISK};
use kvarts_wire::proto;

/// The arguments of `stat` and of whatever else says nothing but which server.
#[derive(Args, Debug)]
pub(crate) struct AdminArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,
}

/// Runs `stat`.
pub(crate) fn stat(arguments: &AdminArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let stats = client.stats().map_err(Failure::user)?;
    let store: String = stats.store.iter().map(|byte| format!("{byte:02x}")).collect();
    if arguments.server.json {
        return print(out, &report(&store, &stats));
    }
    writeln!(out, "store {store}, kvarts {}", stats.version)?;
    writeln!(out, "  on disk   {} of {}", bytes(stats.allocated_bytes), bytes(stats.budget_bytes))?;
    if let Some(space) = stats.space {
        let parts = [space.live_bytes, space.dead_bytes, space.free_bytes, space.overhead_bytes].map(bytes);
        let [live, dead, free, overhead] = parts;
        writeln!(out, "            {live} live, {dead} dead, {free} free, {overhead} overhead")?;
        if space.cut_off_blocks > 0 {
            let (blocks, size) = (grouped(space.cut_off_blocks), bytes(space.cut_off_bytes));
            writeln!(
                out,
                "            {blocks} live blocks, {size}, are cut off: an earlier block of the prefix is missing"
            )?;
        }
    }
    for lost in stats.notes.iter().filter_map(|note| note.strip_prefix(LOST_DIRECTORY)) {
        writeln!(out, "  directory {lost}")?;
    }
    if let Some(short) = stats.notes.iter().find_map(|note| note.strip_prefix(SHORT_OF_DISK)) {
        writeln!(out, "  short     {short}")?;
    }
    if let Some(why) = &stats.latched {
        writeln!(out, "  writes    refused: {why}")?;
        writeln!(out, "            remove the cause, then run `kvarts resume` to accept writes again")?;
    }
    show_ownerless(&stats.ownerless, out)?;
    show_first_counts(&stats.counts, out)?;
    show_limits(&stats.limits, out)?;
    let sum = |field: fn(&proto::stats_reply::Recovery) -> u64| stats.recovery.iter().map(field).sum::<u64>();
    let (blocks, problems) = (sum(|one| one.blocks), sum(|one| one.problems));
    writeln!(
        out,
        "  recovery  {} blocks, {} problems at the last start",
        grouped(blocks),
        grouped(problems)
    )?;
    show_other_counts(&stats.counts, out)?;
    if let Some(cold) = &stats.cold {
        show_cold(cold, out)?;
    }
    for one in &stats.local_clients {
        let modes = if one.modes.is_empty() { "no memory".to_owned() } else { one.modes.join(", ") };
        writeln!(
            out,
            "  local client {} (uid {}, tenant {}): {modes}, {} shared, {} requests, {} leases",
            one.pid,
            one.uid,
            one.tenant,
            bytes(one.shared_bytes),
            one.requests_under_way,
            one.leases
        )?;
    }
    Ok(())
}

/// The counters that are looked for first, each with its words, in this order: what look-ups found, and where blocks went.
const FIRST: [(&str, &str); 8] = [
    ("lookup_blocks_here", "blocks looked up and found"),
    ("lookup_blocks_absent", "blocks looked up and absent"),
    ("blocks_read", "blocks read"),
    ("blocks_stored", "blocks stored"),
    ("blocks_evicted", "blocks evicted"),
    ("blocks_expired", "blocks expired"),
    ("blocks_deleted", "blocks deleted"),
    ("blocks_quarantined", "blocks found damaged"),
];

type Counts = BTreeMap<String, u64>;

fn show_first_counts(counts: &Counts, out: &mut dyn Write) -> Result<(), Failure> {
    // A server that is older than this program has not all of them.
    for (count, words) in FIRST.iter().filter_map(|(name, words)| Some((counts.get(*name)?, words))) {
        writeln!(out, "  {words:<28} {:>16}", grouped(*count))?;
    }
    Ok(())
}

/// The other counters, but those that have counted nothing.
fn show_other_counts(counts: &Counts, out: &mut dyn Write) -> Result<(), Failure> {
    let is_first = |name: &str| FIRST.iter().any(|(first, _)| *first == name);
    let others = counts.iter().filter(|(name, _)| !is_first(name));
    let (counted, zeros): (Vec<_>, Vec<_>) = others.partition(|(_, count)| **count > 0);
    for (name, count) in counted {
        writeln!(out, "  {:<28} {:>16}", name.replace('_', " "), grouped(*count))?;
    }
    if !zeros.is_empty() {
        writeln!(out, "  {} more counters are 0: --json lists all counters", zeros.len())?;
    }
    Ok(())
}

/// What is stored and belongs to no tenant of the configuration, and what can be done about it.
fn show_ownerless(ownerless: &[proto::stats_reply::Ownerless], out: &mut dyn Write) -> Result<(), Failure> {
    for one in ownerless {
        let (blocks, size) = (grouped(one.blocks), bytes(one.bytes));
        match one.unsalted {
            true => writeln!(
                out,
                "  no owner  {blocks} blocks, {size}, stored while no tokens were required: assign them to a \
                tenant with `unsalted = true`, or delete them with `kvarts tenant purge --unsalted`"
            )?,
            false => writeln!(
                out,
                "  no owner  {blocks} blocks, {size}, of {} tenants that are not in the configuration: \
                configure the tenants again, or delete the blocks with `kvarts tenant purge NAME`",
                one.tenants
            )?,
        }
    }
    Ok(())
}

fn show_cold(cold: &proto::stats_reply::Cold, out: &mut dyn Write) -> Result<(), Failure> {
    let paused = if cold.paused { "; requests to the bucket fail and are paused" } else { "" };
    writeln!(out, "  cold tier {}{paused}", cold.bucket)?;
    if let Some(why) = &cold.read_only {
        writeln!(
            out,
            "    READ-ONLY: {why}; no block is copied into the bucket, and deletes of its blocks are refused"
        )?;
    }
    for (name, count) in &cold.counts {
        writeln!(out, "    {:<22} {:>20}", name.replace('_', " "), grouped(*count))?;
    }
    Ok(())
}

/// A line for each limit: what is used of it, as far as that is counted. The budget has its own line.
fn show_limits(limits: &[proto::stats_reply::Limit], out: &mut dyn Write) -> Result<(), Failure> {
    for limit in limits.iter().filter(|limit| limit.name != "store.budget") {
        let number = |value: u64| if limit.bytes { bytes(value) } else { grouped(value) };
        let most = limit.most.map_or_else(|| "no limit".to_owned(), number);
        match limit.used {
            Some(used) => writeln!(out, "  {:<24} {} of {most}", limit.name, number(used))?,
            None => writeln!(out, "  {:<24} {most}", limit.name)?,
        }
    }
    Ok(())
}

fn report(store: &str, stats: &proto::StatsReply) -> Value {
    let limit = |one: &proto::stats_reply::Limit| json!({"name": one.name, "used": one.used, "most": one.most, "bytes": one.bytes});
    let local = |one: &proto::stats_reply::LocalClient| {
        json!({
            "tenant": one.tenant, "pid": one.pid, "uid": one.uid, "modes": one.modes,
            "shared_bytes": one.shared_bytes, "requests_under_way": one.requests_under_way,
            "leases": one.leases,
        })
    };
    let ownerless = |one: &proto::stats_reply::Ownerless| json!({"unsalted": one.unsalted, "tenants": one.tenants, "blocks": one.blocks, "bytes": one.bytes});
    let recovery = |one: &proto::stats_reply::Recovery| {
        json!({
            "records": one.records, "blocks": one.blocks, "problems": one.problems,
            "scanned_bytes": one.scanned_bytes,
        })
    };
    json!({
        "store": store, "version": stats.version, "budget_bytes": stats.budget_bytes,
        "allocated_bytes": stats.allocated_bytes, "index_bytes": stats.index_bytes,
        "latched": stats.latched, "limits": stats.limits.iter().map(limit).collect::<Vec<_>>(),
        "space": stats.space.map(|space| json!({
            "live_bytes": space.live_bytes, "dead_bytes": space.dead_bytes,
            "free_bytes": space.free_bytes, "overhead_bytes": space.overhead_bytes,
            "cut_off_blocks": space.cut_off_blocks, "cut_off_bytes": space.cut_off_bytes,
        })),
        "counts": stats.counts, "notes": stats.notes,
        "ownerless": stats.ownerless.iter().map(ownerless).collect::<Vec<_>>(),
        "cold": stats.cold.as_ref().map(|cold| json!({
            "bucket": cold.bucket, "paused": cold.paused, "read_only": cold.read_only, "counts": cold.counts,
        })),
        "recovery": stats.recovery.iter().map(recovery).collect::<Vec<_>>(),
        "local_clients": stats.local_clients.iter().map(local).collect::<Vec<_>>(),
    })
}

/// Runs `resume`.
pub(crate) fn resume(arguments: &AdminArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = arguments.server.connect(Via::Grpc)?;
    let why = |error: &kvarts_contract::error::Error| format!("the store is still read-only: {error}");
    let reply = client.resume().map_err(|error| Failure::user(why(&error)))?;
    let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    if arguments.server.json {
        let before = given(&reply.reason);
        let of = |one: &proto::ReturnedDirectory| json!({"directory": one.directory, "blocks": one.blocks, "refused": given(&one.refused)});
        let directories: Vec<_> = reply.directories.iter().map(of).collect();
        return print(
            out,
            &json!({"resumed": before.is_some(), "before": before, "directories": directories}),
        );
    }
    match reply.reason.as_str() {
        "" => writeln!(out, "the store already accepts writes")?,
        before => writeln!(out, "the store accepts writes again; the cause was: {before}")?,
    }
    for proto::ReturnedDirectory { directory, blocks, refused } in &reply.directories {
        match refused.as_str() {
            "" => writeln!(out, "{directory} is in use again, with {blocks} blocks")?,
            why => writeln!(out, "{directory} stays out of use: {why}")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_for_first_comes_first_and_counters_of_nothing_are_one_line() {
        let count = |name: &str, count| (name.to_owned(), count);
        let counts: Counts = [
            count("blocks_deduplicated", 3),
            count("blocks_evicted", 0),
            count("blocks_moved", 0),
            count("bytes_punched", 0),
            count("lookup_blocks_absent", 1234),
            count("lookup_blocks_here", 7),
        ]
        .into();
        let mut out = Vec::new();
        show_first_counts(&counts, &mut out).unwrap();
        show_other_counts(&counts, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let expected = [
            "blocks looked up and found 7",
            "blocks looked up and absent 1,234",
            "blocks evicted 0",
            "blocks deduplicated 3",
            "2 more counters are 0: --json lists all counters",
        ];
        assert_eq!(lines, expected);
    }
}
