//! `kvarts cluster status`: the members of a cluster as one of them sees it.

use std::io::Write;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{ServerArgs, print};
use kvarts_client::Via;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::{Align, Failure, Table};
use kvarts_wire::proto;

/// The arguments of `cluster`.
#[derive(Args, Debug)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Show the members, whether they are reachable, their parts of the directory, and the speed of each path
    Status(StatusArgs),
}

#[derive(Args, Debug)]
struct StatusArgs {
    #[command(flatten)]
    server: ServerArgs,
}

/// Runs `cluster`. Exit code 1 where a member cannot be reached.
pub(crate) fn cluster(arguments: &ClusterArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let What::Status(StatusArgs { server }) = &arguments.what;
    let client = server.connect(Via::Grpc)?;
    let status = client.cluster_status().map_err(Failure::user)?;
    match server.json {
        true => print(out, &report(&status))?,
        false => show(&status, out)?,
    }
    match status.nodes.iter().all(|node| node.is_reachable) {
        true => Ok(()),
        false => Err(Failure::Problems),
    }
}

/// A node's id in words.
pub(super) fn id(node: &[u8]) -> String {
    node.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn show(status: &proto::ClusterStatusReply, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out, "epoch {}, {} nodes", status.epoch, status.nodes.len())?;
    let columns = [
        ("node", Align::Left),
        ("address", Align::Left),
        ("zone", Align::Left),
        ("state", Align::Left),
        ("directory", Align::Right),
        ("read from node", Align::Right),
        ("rate", Align::Right),
        ("queue", Align::Right),
    ];
    let mut table = Table::new(&columns);
    for node in &status.nodes {
        let state = match (node.is_me, node.is_reachable) {
            (true, _) if node.trouble.is_empty() => "this node".to_owned(),
            (true, _) => format!("this node; {}", node.trouble),
            (false, true) => "reachable".to_owned(),
            (false, false) if node.trouble.is_empty() => "not reached yet".to_owned(),
            (false, false) => format!("not reachable: {}", node.trouble),
        };
        let rate = match node.bytes_per_second {
            0 => "-".to_owned(),
            rate => format!("{}/s", bytes(rate)),
        };
        let share = format!("{:.1}%", f64::from(node.partitions) * 100.0 / 4096.0);
        table.row([
            id(&node.node),
            node.address.clone(),
            node.zone.clone(),
            state,
            share,
            bytes(node.read_bytes),
            rate,
            bytes(node.outstanding_bytes),
        ]);
    }
    write!(out, "{table}")?;
    writeln!(
        out,
        "directory of this node: {} copies in {} of memory, {} copies refused; this node decides the \
        owners of {} chains",
        grouped(status.entries),
        bytes(status.entry_bytes),
        grouped(status.refused_entries),
        grouped(status.chains)
    )?;
    let (served, pieces) = (bytes(status.served_bytes), grouped(status.served_pieces));
    writeln!(out, "sent to other nodes: {served} in {pieces} pieces")?;
    Ok(())
}

fn report(status: &proto::ClusterStatusReply) -> Value {
    let node = |node: &proto::ClusterNodeStatus| {
        json!({
            "node": id(&node.node), "address": node.address, "zone": node.zone, "is_me": node.is_me,
            "is_reachable": node.is_reachable, "trouble": node.trouble, "partitions": node.partitions,
            "read_bytes": node.read_bytes, "read_pieces": node.read_pieces, "failed_pieces": node.failed_pieces,
            "bytes_per_second": node.bytes_per_second, "outstanding_bytes": node.outstanding_bytes,
            "waiting_changes": node.waiting_changes, "snapshots": node.snapshots,
        })
    };
    json!({
        "epoch": status.epoch, "nodes": status.nodes.iter().map(node).collect::<Vec<_>>(),
        "entries": status.entries, "entry_bytes": status.entry_bytes, "refused_entries": status.refused_entries,
        "chains": status.chains, "served_bytes": status.served_bytes, "served_pieces": status.served_pieces,
    })
}
