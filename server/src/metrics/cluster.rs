//! The cluster as Prometheus reads it: members, what this node knows of the others' blocks, and the paths of its reads.

use std::fmt::{Display, Write};

use kvarts_peer::lane::ServeCounts;
use kvarts_peer::node::{HotCounts, OfferCounts, PutCounts, Status};
use kvarts_peer::read::{Brought, FAILURES, PathStatus};

use super::lines::{Value, head, one};

/// Tells everything of a cluster; a server that belongs to none tells nothing.
pub(super) fn cluster(out: &mut String, status: &Status) {
    one(out, "kvarts_cluster_epoch", "gauge", "Epoch of this node's list of members.", status.epoch);
    let reachable = status.nodes.iter().filter(|node| node.is_reachable).count();
    let states = [("reachable", reachable), ("away", status.nodes.len() - reachable)];
    labelled(out, "kvarts_cluster_nodes", "gauge", "Members of the cluster, by state.", "state", states);
    let help = "Nodes whose blocks cannot be read, because the limit of paths is reached.";
    one(out, "kvarts_cluster_nodes_without_path", "gauge", help, status.without_lane);
    let help = "Models whose blocks can be read from other nodes.";
    one(out, "kvarts_cluster_models", "gauge", help, status.models);
    directory(out, status);
    served(out, status);
    let paths: Vec<(&str, &PathStatus)> = status
        .nodes
        .iter()
        .filter_map(|node| Some((if node.is_me { "own" } else { "" }, node.path.as_ref()?)))
        .map(|(own, path)| (if own.is_empty() { &*path.name } else { own }, path))
        .collect();
    load(out, &paths);
    brought(out, &paths);
}

/// A cluster without members.
pub(super) fn nothing() -> Status {
    Status {
        epoch: 0,
        nodes: Vec::new(),
        entries: 0,
        entry_bytes: 0,
        left_out: 0,
        partial: 0,
        chains: 0,
        owned: 0,
        hot: HotCounts::default(),
        puts: PutCounts::default(),
        offers: OfferCounts::default(),
        served: ServeCounts::default(),
        is_registered: None,
        models: 0,
        without_lane: 0,
    }
}

fn labelled<T: Display>(
    out: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    label: &str,
    values: impl IntoIterator<Item = (impl AsRef<str>, T)>,
) {
    head(out, name, kind, help);
    for (of, value) in values {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name}{{{label}=\"{}\"}} {value}", Value(of.as_ref()));
    }
}

fn directory(out: &mut String, status: &Status) {
    let help = "Number of copies of blocks that this node's part of the directory lists.";
    one(out, "kvarts_cluster_directory_entries", "gauge", help, status.entries);
    let help = "Memory of this node's part of the directory, in bytes.";
    one(out, "kvarts_cluster_directory_bytes", "gauge", help, status.entry_bytes);
    let help = "Number of times that this node's part of the directory was full, and therefore omitted or dropped a copy of a block.";
    one(out, "kvarts_cluster_directory_refused_total", "counter", help, status.left_out);
    let help = "Partitions (of 4,096 in the cluster) of the directory on this node that may be incomplete, because a node has not reported all of its blocks yet, or because this node's share of the directory was full.";
    one(out, "kvarts_cluster_directory_partial", "gauge", help, status.partial);
    let help = "Chains (consecutive blocks of one prefix) for which this node chooses the owner.";
    one(out, "kvarts_cluster_chains", "gauge", help, status.chains);
    let help = "Chains that this node owns. On this node, the blocks of these chains are evicted last.";
    one(out, "kvarts_cluster_chains_owned", "gauge", help, status.owned);
    let HotCounts { counted, now, copied, failed } = status.hot;
    let help = "Number of other nodes' blocks whose reads this node counts, to select blocks that it copies.";
    one(out, "kvarts_cluster_hot_counted", "gauge", help, counted);
    let help = "Blocks of other nodes that this node copies because they are read often: copies under way, and copies whose time to live has not ended.";
    one(out, "kvarts_cluster_hot_blocks", "gauge", help, now);
    let how = [("copied", copied), ("failed", failed)];
    let help = "Blocks that were selected for a copy on this node because they are read often.";
    labelled(out, "kvarts_cluster_hot_blocks_total", "counter", help, "how", how);
    let PutCounts { kept, held, owned, unasked } = status.puts;
    let how = [("kept", kept), ("held", held), ("owned", owned), ("unasked", unasked)];
    let help = "Blocks in puts, by outcome: kept (another node owned the chain of the block, or had the block and cluster.put is keep, so this node stored the block for a limited time), held (another node had the block and cluster.put is single, so this node did not store it), owned (another node had the block, but this node owned its chain and stored the block), unasked (the directory did not answer in time, so this node stored the block).";
    labelled(out, "kvarts_cluster_put_blocks_total", "counter", help, "how", how);
    let OfferCounts { forwarded, last, taken, copied, failed } = status.offers;
    let what =
        [("forwarded", forwarded), ("last", last), ("taken", taken), ("copied", copied), ("failed", failed)];
    let help = "Blocks in offers between nodes. Offers of this node: forwarded (offered to the owner of their chain), last (the last copy, offered before its eviction), taken (accepted by other nodes). Offers of other nodes: copied (copied to this node), failed (not copied).";
    labelled(out, "kvarts_cluster_offered_blocks_total", "counter", help, "what", what);
    let others = || status.nodes.iter().filter(|node| !node.is_me);
    let of = |value: fn(&kvarts_peer::node::NodeStatus) -> u64| {
        others().map(move |node| (node.member.id.to_string(), value(node)))
    };
    let help = "Number of changes to this node's blocks that have not yet been sent, per receiving node.";
    labelled(out, "kvarts_cluster_feed_waiting", "gauge", help, "node", of(|node| node.waiting));
    let help = "Number of snapshots of this node's blocks that were started, per receiving node.";
    labelled(out, "kvarts_cluster_feed_snapshots_total", "counter", help, "node", of(|node| node.snapshots));
}

fn served(out: &mut String, status: &Status) {
    let ServeCounts { connections, let_in, cut, pieces, bytes, doubts, memory } = status.served;
    let help = "Connections over which other nodes read from this node.";
    one(out, "kvarts_cluster_served_connections", "gauge", help, connections);
    let how = [("let_in", let_in), ("cut", cut)];
    let help = "Connections over which other nodes read from this node, by result: let_in (accepted), or cut (refused, or closed early).";
    labelled(out, "kvarts_cluster_served_connections_total", "counter", help, "how", how);
    one(
        out,
        "kvarts_cluster_served_pieces_total",
        "counter",
        "Number of pieces of reads that this node sent to other nodes.",
        pieces,
    );
    one(
        out,
        "kvarts_cluster_served_bytes_total",
        "counter",
        "Bytes of blocks that this node sent to other nodes.",
        bytes,
    );
    let help = "Blocks that this node read again because another node found a wrong digest.";
    one(out, "kvarts_cluster_served_doubts_total", "counter", help, doubts);
    let help = "Memory for pieces that are being sent to other nodes, in bytes.";
    one(out, "kvarts_cluster_served_memory_bytes", "gauge", help, memory);
}

/// How fast each path is and what waits there.
fn load(out: &mut String, paths: &[(&str, &PathStatus)]) {
    let of = |value: fn(&PathStatus) -> u64| paths.iter().map(move |(name, path)| (*name, value(path)));
    let help = "Rate of reads over each path, in bytes a second, measured while requests are outstanding on the path.";
    let rate = |path: &PathStatus| path.rate.unwrap_or_default() as u64;
    labelled(out, "kvarts_cluster_path_bytes_per_second", "gauge", help, "path", of(rate));
    let help = "Bytes that were requested on each path and have not yet been received.";
    labelled(
        out,
        "kvarts_cluster_path_outstanding_bytes",
        "gauge",
        help,
        "path",
        of(|path| path.outstanding),
    );
    let help = "Reads that use each path now.";
    labelled(out, "kvarts_cluster_path_reads", "gauge", help, "path", of(|path| path.reads.into()));
    let help = "1 while a path is paused after repeated failures.";
    let is_left_alone = |path: &PathStatus| path.is_left_alone.into();
    labelled(out, "kvarts_cluster_path_left_alone", "gauge", help, "path", of(is_left_alone));
}

/// What each path brought and did not bring.
fn brought(out: &mut String, paths: &[(&str, &PathStatus)]) {
    let help = "Bytes of pieces that were read completely, by path.";
    let bytes = paths.iter().map(|(name, path)| (*name, path.brought.bytes));
    labelled(out, "kvarts_cluster_path_bytes_total", "counter", help, "path", bytes);
    let name = "kvarts_cluster_path_pieces_total";
    head(
        out,
        name,
        "counter",
        "Pieces of reads, by path and result: complete, missing, failed, cancelled, or requested twice.",
    );
    for (path, status) in paths {
        let Brought { pieces, bytes: _, missing, failed, cancelled, twice, failures: _ } = status.brought;
        let ways = [
            ("whole", pieces),
            ("missing", missing),
            ("failed", failed),
            ("cancelled", cancelled),
            ("twice", twice),
        ];
        for (how, count) in ways {
            let _ = writeln!(out, "{name}{{path=\"{}\",how=\"{how}\"}} {count}", Value(path));
        }
    }
    let name = "kvarts_cluster_path_failures_total";
    head(out, name, "counter", "Failed pieces, by path and reason.");
    for (path, status) in paths {
        for (reason, count) in FAILURES.iter().zip(status.brought.failures) {
            let _ = writeln!(out, "{name}{{path=\"{}\",reason=\"{reason}\"}} {count}", Value(path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_cluster::members::Member;
    use kvarts_cluster::paths::PathId;
    use kvarts_peer::node::NodeStatus;

    fn node(n: u8, is_me: bool, path: Option<PathStatus>) -> NodeStatus {
        let id = kvarts_layout::StoreId([n; 16]);
        NodeStatus {
            member: Member { id, address: format!("host-{n}:1"), zone: String::new() },
            is_me,
            is_reachable: n < 3,
            trouble: String::new(),
            partitions: 1,
            waiting: 7,
            snapshots: 2,
            path,
        }
    }

    fn path(number: u16, name: &str) -> PathStatus {
        let brought = Brought {
            pieces: 11,
            bytes: 12,
            missing: 13,
            failed: 14,
            cancelled: 15,
            twice: 16,
            failures: [21, 22, 23, 24, 25],
        };
        PathStatus {
            number: PathId(number),
            name: name.into(),
            rate: Some(1e6),
            outstanding: 17,
            strikes: 0,
            is_left_alone: number == 1,
            reads: 3,
            brought,
        }
    }

    #[test]
    fn everything_that_a_node_knows_of_its_cluster_is_told() {
        let status = Status {
            epoch: 9,
            nodes: vec![
                node(1, true, Some(path(0, "own disks"))),
                node(2, false, Some(path(1, "02"))),
                node(3, false, None),
            ],
            entries: 31,
            entry_bytes: 32,
            left_out: 33,
            partial: 34,
            chains: 34,
            owned: 36,
            hot: HotCounts { counted: 37, now: 38, copied: 39, failed: 40 },
            puts: PutCounts { kept: 41, held: 42, owned: 44, unasked: 43 },
            offers: OfferCounts { forwarded: 45, last: 46, taken: 47, copied: 48, failed: 49 },
            served: ServeCounts {
                connections: 1,
                let_in: 2,
                cut: 3,
                pieces: 4,
                bytes: 5,
                doubts: 6,
                memory: 7,
            },
            is_registered: None,
            models: 35,
            without_lane: 1,
        };
        let mut out = String::new();
        cluster(&mut out, &status);
        for line in [
            "kvarts_cluster_epoch 9",
            "kvarts_cluster_nodes{state=\"reachable\"} 2",
            "kvarts_cluster_nodes{state=\"away\"} 1",
            "kvarts_cluster_directory_entries 31",
            "kvarts_cluster_directory_refused_total 33",
            "kvarts_cluster_directory_partial 34",
            "kvarts_cluster_feed_waiting{node=\"02020202020202020202020202020202\"} 7",
            "kvarts_cluster_chains_owned 36",
            "kvarts_cluster_hot_counted 37",
            "kvarts_cluster_hot_blocks 38",
            "kvarts_cluster_hot_blocks_total{how=\"failed\"} 40",
            "kvarts_cluster_put_blocks_total{how=\"held\"} 42",
            "kvarts_cluster_put_blocks_total{how=\"owned\"} 44",
            "kvarts_cluster_offered_blocks_total{what=\"last\"} 46",
            "kvarts_cluster_served_bytes_total 5",
            "kvarts_cluster_path_bytes_per_second{path=\"own\"} 1000000",
            "kvarts_cluster_path_outstanding_bytes{path=\"02\"} 17",
            "kvarts_cluster_path_left_alone{path=\"02\"} 1",
            "kvarts_cluster_path_pieces_total{path=\"own\",how=\"twice\"} 16",
            "kvarts_cluster_path_failures_total{path=\"02\",reason=\"damaged\"} 24",
        ] {
            assert!(out.lines().any(|told| told == line), "{line} is not in\n{out}");
        }
    }
}
