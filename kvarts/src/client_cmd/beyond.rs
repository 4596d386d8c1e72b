//! What a match says of blocks that are not in the server's own store: other nodes of the cluster, and the cold tier.

use std::io::Write;

use kvarts_client::Client;
use kvarts_contract::api::{MatchReply, MatchRequest};
use kvarts_layout::prefix::Boundary;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_wire::proto::match_reply::in_cluster::Holder;
use kvarts_wire::proto::match_reply::{InCluster, InCold};
use kvarts_wire::{convert, proto};
use serde_json::{Value, json};

use super::cluster::id;
use super::subject::Subject;

fn boundary(one: &Option<proto::Boundary>) -> Option<Value> {
    one.as_ref().map(
        |one| json!({"blocks": one.blocks, "tokens": one.tokens, "recompute_tokens": one.recompute_tokens}),
    )
}

/// A node as a person knows it: by its address, or by its id where it has none.
fn name(holder: &Holder) -> String {
    match holder.address.is_empty() {
        false => holder.address.clone(),
        true => id(&holder.node),
    }
}

/// The cluster as a part of a report.
pub(super) fn cluster_report(cluster: &InCluster) -> Value {
    let holder = |holder: &Holder| {
        json!({
            "node": id(&holder.node), "address": holder.address, "blocks": holder.blocks,
            "unreadable": holder.unreadable, "trouble": holder.trouble,
        })
    };
    json!({
        "longest": boundary(&cluster.longest), "cheapest": boundary(&cluster.cheapest), "unasked": cluster.unasked,
        "holders": cluster.holders.iter().map(holder).collect::<Vec<_>>(),
    })
}

/// How many blocks a prefix has together with other nodes, of which `own` are here.
pub(super) fn together(cluster: Option<&InCluster>, own: &Boundary) -> Boundary {
    let longest = cluster.and_then(|cluster| cluster.longest.clone());
    let longest = longest.map(|one| convert::boundary(Some(one)));
    longest.filter(|longest| longest.blocks > own.blocks).unwrap_or_else(|| own.clone())
}

/// How many blocks of a prefix can be read here: from this server's store, from other nodes, or from the cold tier.
pub(super) fn restorable(found: &MatchReply, cluster: Option<&InCluster>, cold: Option<&InCold>) -> u32 {
    let own = &found.usable.longest;
    let cold = cold.and_then(|cold| cold.longest.as_ref()).map_or(0, |longest| longest.blocks);
    together(cluster, own).blocks.max(cold)
}

/// What the cluster says of a subject's blocks, if the server belongs to one.
pub(super) fn of_cluster(client: &Client, subject: &Subject) -> Option<InCluster> {
    // A match counts as one: without a cluster there is none.
    client.models().ok().filter(|models| models.clustered)?;
    let request = MatchRequest {
        namespace: subject.namespace,
        keys: &subject.keys,
        requirements: &subject.requirements,
        recompute_tokens_max: u64::MAX,
        lease: None,
        plan: None,
    };
    // Nothing else may fail because of it.
    client.match_beyond(&request).ok()?.in_cluster
}

/// Where the blocks are that are not here, and why those that are somewhere cannot be read: a line for each node.
pub(super) fn show_cluster(cluster: &InCluster, out: &mut dyn Write) -> Result<(), Failure> {
    let count = |blocks: u32| grouped(u64::from(blocks));
    for holder in cluster.holders.iter().filter(|holder| holder.blocks > 0) {
        writeln!(out, "  {} blocks on {}", count(holder.blocks), name(holder))?;
    }
    for holder in cluster.holders.iter().filter(|holder| holder.unreadable > 0) {
        let Holder { unreadable, trouble, .. } = holder;
        writeln!(out, "  {} blocks on {} cannot be read: {trouble}", count(*unreadable), name(holder))?;
    }
    if cluster.unasked > 0 {
        writeln!(
            out,
            "{} blocks: it is unknown whether other nodes have these blocks",
            count(cluster.unasked)
        )?;
    }
    Ok(())
}

/// The cold tier as a part of a report.
pub(super) fn cold_report(cold: &InCold) -> Value {
    json!({
        "longest": boundary(&cold.longest), "cheapest": boundary(&cold.cheapest), "blocks": cold.blocks,
        "bytes": cold.bytes, "restore_ms": cold.restore_ms,
    })
}

/// The cold tier as a line.
pub(super) fn show_cold(cold: &InCold, out: &mut dyn Write) -> Result<(), Failure> {
    let longest = cold.longest.clone().unwrap_or_default();
    let takes = cold.restore_ms.map_or_else(String::new, |ms| format!(", about {} ms", grouped(ms)));
    writeln!(
        out,
        "  with the cold tier, {} blocks ({} tokens) can be restored; the cold tier restores {} blocks, \
        {}{takes}",
        grouped(u64::from(longest.blocks)),
        grouped(longest.tokens),
        grouped(cold.blocks),
        bytes(cold.bytes)
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_blocks_are_and_why_they_cannot_be_read_is_told_of_each_node() {
        let boundary =
            |blocks| proto::Boundary { blocks, tokens: u64::from(blocks) * 16, ..proto::Boundary::default() };
        let holder = |blocks, unreadable, trouble: &str| Holder {
            node: vec![0xab; 16].into(),
            address: if blocks > 0 { "n1:7400".to_owned() } else { String::new() },
            blocks,
            unreadable,
            trouble: trouble.to_owned(),
        };
        let cluster = |blocks, unasked, holders| InCluster {
            longest: Some(boundary(blocks)),
            cheapest: Some(boundary(blocks)),
            unasked,
            holders,
        };
        let shown = |cluster: &InCluster| {
            let mut out = Vec::new();
            show_cluster(cluster, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let one = cluster(12, 0, vec![holder(8, 0, ""), holder(0, 2, "connection refused")]);
        let nameless = "ab".repeat(16);
        assert_eq!(
            shown(&one),
            format!("  8 blocks on n1:7400\n  2 blocks on {nameless} cannot be read: connection refused\n")
        );
        assert_eq!(
            shown(&cluster(4, 3, vec![])),
            "3 blocks: it is unknown whether other nodes have these blocks\n"
        );
        let own = Boundary { blocks: 4, ..Boundary::default() };
        assert_eq!(together(Some(&one), &own).blocks, 12);
        assert_eq!(
            (together(Some(&cluster(3, 0, vec![])), &own).blocks, together(None, &own).blocks),
            (4, 4)
        );
        let report = cluster_report(&cluster(12, 3, vec![holder(8, 1, "")]));
        assert_eq!((&report["longest"]["blocks"], &report["cheapest"]["tokens"]), (&json!(12), &json!(192)));
        assert_eq!((&report["unasked"], &report["holders"][0]["blocks"]), (&json!(3), &json!(8)));
    }
}
