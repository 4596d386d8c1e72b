//! What a match says of blocks that are not in the server's own store: other nodes of the cluster, and the cold tier.

use std::io::Write;

use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_wire::proto;
use kvarts_wire::proto::match_reply::{InCluster, InCold};
use serde_json::{Value, json};

fn boundary(one: &Option<proto::Boundary>) -> Option<Value> {
    one.as_ref().map(
        |one| json!({"blocks": one.blocks, "tokens": one.tokens, "recompute_tokens": one.recompute_tokens}),
    )
}

/// The cluster as a part of a report.
pub(super) fn cluster_report(cluster: &InCluster) -> Value {
    json!({
        "longest": boundary(&cluster.longest), "cheapest": boundary(&cluster.cheapest), "unasked": cluster.unasked,
    })
}

/// The cluster as a line, if other nodes have more than the `own` blocks, or may have.
pub(super) fn show_cluster(cluster: &InCluster, own: u32, out: &mut dyn Write) -> Result<(), Failure> {
    let longest = cluster.longest.clone().unwrap_or_default();
    if longest.blocks > own {
        let (blocks, tokens) = (grouped(u64::from(longest.blocks)), grouped(longest.tokens));
        writeln!(out, "  {blocks} of them ({tokens} tokens) with other nodes of the cluster")?;
    }
    if cluster.unasked > 0 {
        let unasked = grouped(u64::from(cluster.unasked));
        writeln!(out, "  of {unasked} blocks the cluster's directory did not answer in time")?;
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
        "  {} of them ({} tokens) with the cold tier, which brings {} blocks, {}{takes}",
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
    fn other_nodes_are_told_where_they_have_more_or_may_have() {
        let boundary =
            |blocks| proto::Boundary { blocks, tokens: u64::from(blocks) * 16, ..proto::Boundary::default() };
        let cluster = |blocks, unasked| InCluster {
            longest: Some(boundary(blocks)),
            cheapest: Some(boundary(blocks)),
            unasked,
        };
        let shown = |cluster: &InCluster, own| {
            let mut out = Vec::new();
            show_cluster(cluster, own, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown(&cluster(12, 0), 4), "  12 of them (192 tokens) with other nodes of the cluster\n");
        assert_eq!(shown(&cluster(4, 0), 4), "");
        assert_eq!(
            shown(&cluster(4, 3), 4),
            "  of 3 blocks the cluster's directory did not answer in time\n"
        );
        let report = cluster_report(&cluster(12, 3));
        assert_eq!((&report["longest"]["blocks"], &report["cheapest"]["tokens"]), (&json!(12), &json!(192)));
        assert_eq!(report["unasked"], 3);
    }
}
