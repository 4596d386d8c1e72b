//! `kvarts compact` without a directory: a running server moves live blocks together. Needs the right to administer.

use std::io::Write;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{ServerArgs, print};
use crate::fsck_cmd::show_lines;
use kvarts_client::{Client, Via};
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_wire::proto;

/// How often a terminal is shown how far the server is: each time it is asked.
const EVERY: Duration = Duration::from_secs(1);

/// Runs it. Exit code 1 where something was found damaged.
pub(crate) fn compact(server: &ServerArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let client = server.connect(Via::Grpc)?;
    let done = watched(&client)?;
    if server.json {
        let report = json!({
            "segments_emptied": done.segments_emptied, "records_merged": done.records_merged,
            "blocks_moved": done.blocks_moved, "blocks_damaged": done.blocks_damaged,
            "bytes_read": done.bytes_read, "bytes_written": done.bytes_written,
        });
        print(out, &report)?;
    } else {
        show(&done, out)?;
    }
    if done.blocks_damaged == 0 { Ok(()) } else { Err(Failure::Problems) }
}

fn show(done: &proto::CompactReply, out: &mut dyn Write) -> Result<(), Failure> {
    if (done.segments_emptied, done.records_merged, done.blocks_moved) == (0, 0, 0) {
        writeln!(out, "no segment needed compaction")?;
    } else {
        writeln!(
            out,
            "{} segments emptied, {} small records merged, {} blocks moved ({} written)",
            grouped(done.segments_emptied),
            grouped(done.records_merged),
            grouped(done.blocks_moved),
            bytes(done.bytes_written)
        )?;
    }
    if done.blocks_damaged > 0 {
        let damaged = grouped(done.blocks_damaged);
        writeln!(
            out,
            "{damaged} blocks are damaged and are misses from now on; the server's log lists their positions"
        )?;
    }
    Ok(())
}

/// Has the server do it, while a terminal is shown what it has moved so far.
fn watched(client: &Client) -> Result<proto::CompactReply, Failure> {
    let counts = || client.stats().map(|stats| stats.counts).unwrap_or_default();
    let before = counts();
    let line = |seconds: f64| {
        let now = counts();
        let since = |name: &str| {
            let of =
                |counts: &std::collections::BTreeMap<String, u64>| counts.get(name).copied().unwrap_or(0);
            of(&now).saturating_sub(of(&before))
        };
        let (moved, written) = (grouped(since("blocks_moved")), bytes(since("moved_bytes_written")));
        format!("{moved} blocks moved, {written} written, {seconds:.0} s so far")
    };
    std::thread::scope(|scope| {
        let (done, is_done) = channel();
        let work = scope.spawn(move || {
            let reply = client.compact();
            // If the progress is gone, no receiver waits any more.
            let _ = done.send(());
            reply
        });
        show_lines(Instant::now(), EVERY, &line, &is_done);
        let reply = work.join().map_err(|_| {
            Failure::user("a defect in kvarts, please report it: the thread of the call panicked")
        })?;
        reply.map_err(Failure::user)
    })
}
