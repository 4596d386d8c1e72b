//! Which figures are judged: what each is in words, where its bar is, and which control says how much it moves by itself.

/// Where a figure has to lie.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Bound {
    /// This or more.
    Least(f64),
    /// This or less.
    Most(f64),
}

/// A figure of a report.
pub(super) struct Bar {
    pub(super) figure: &'static str,
    pub(super) what: &'static str,
    /// `None`: the figure is reported and not judged.
    pub(super) bound: Option<Bound>,
    /// Figures whose names begin so are ratios of one contestant to itself, in the same run; empty where there are none.
    pub(super) control: &'static str,
}

impl Bar {
    const fn beside(self, control: &'static str) -> Self {
        Self { control, ..self }
    }
}

const fn least(figure: &'static str, bound: f64, what: &'static str) -> Bar {
    Bar { figure, what, bound: Some(Bound::Least(bound)), control: "" }
}

const fn most(figure: &'static str, bound: f64, what: &'static str) -> Bar {
    Bar { figure, what, bound: Some(Bound::Most(bound)), control: "" }
}

const fn told(figure: &'static str, what: &'static str) -> Bar {
    Bar { figure, what, bound: None, control: "" }
}

/// Those of one benchmark. Of most of them the bar is the worst of the runs that are written down (docs/PERFORMANCE.md).
pub(super) fn of(bench: &str) -> &'static [Bar] {
    match bench {
        "layers" => &LAYERS,
        "put" => &PUT,
        "match" => &MATCH,
        "open" => &OPEN,
        "mixed" => &MIXED,
        "serve" => &SERVE,
        "scale" => &SCALE,
        "gpu" => &GPU,
        "encoded" => &ENCODED,
        "churn" => &CHURN,
        "cold" => &COLD,
        "dual" => &DUAL,
        _ => &[],
    }
}

const LAYERS: [Bar; 2] = [
    least("ratio", 0.9, "speed of layer reads with digests, relative to a bare loop without digests")
        .beside("control"),
    most(
        "cpu_over_checking",
        1.25,
        "CPU time of layer reads, relative to a bare loop that checks the same digests",
    )
    .beside("cpu_control"),
];
const PUT: [Bar; 1] = [least("ratio", 0.84, "speed of durable puts, relative to bare writes and flushes")
    .beside("control_group")];
const MATCH: [Bar; 1] =
    [most("ratio", 0.7, "time of a look-up, relative to a plain hash map").beside("control")];
const OPEN: [Bar; 1] =
    [most("ratio", 4.0, "time of a start after a crash, relative to a bare read of the same bytes")
        .beside("control")];
const MIXED: [Bar; 1] = [most(
    "p99_ratio",
    2.6,
    "99th-percentile time of layer reads under load, relative to the same reads alone",
)
.beside("p99_control")];
const SERVE: [Bar; 2] = [
    least("grpc_hot_ratio", 0.93, "speed of gRPC reads from memory, relative to a bare server")
        .beside("control"),
    least("local_ratio", 1.0, "speed of local reads, relative to the embedded engine")
        .beside("local_control"),
];
const SCALE: [Bar; 1] =
    [most("evict_cost_ratio", 1.1, "cost of eviction with a full index, relative to a small index")];
const GPU: [Bar; 1] = [least(
    "pipeline_ratio",
    0.97,
    "speed of the layer pipeline, relative to a perfect pipeline, which takes the time of its slowest part",
)
.beside("control_")];
const ENCODED: [Bar; 1] =
    [least("speed_ratio", 0.4, "speed of reads of encoded records, relative to raw records")
        .beside("control")];
const CHURN: [Bar; 1] =
    [most("most_on_disk_by_budget", 1.0, "largest number of bytes on disk, relative to the budget")];

const COLD: [Bar; 9] = [
    least(
        "restore_ratio",
        0.85,
        "speed of a read by layers from the bucket until all blocks are stored (with manifest, indexes, \
        digests and content ids), relative to bare ranged requests for the same bytes",
    )
    .beside("control"),
    told(
        "read_ratio",
        "speed of a read by layers from the bucket until the reader has all blocks, \
        relative to the bare requests",
    ),
    told(
        "fetch_ratio",
        "speed of fetches from the bucket that only verify the blocks and then drop them, relative to the \
        bare requests",
    ),
    told(
        "put_ratio",
        "speed of puts of the same bytes from memory, relative to the bare requests (an upper bound for the \
        speed of restores)",
    ),
    most("over_read", 1.125, "bytes read from packs, relative to the requested bytes"),
    told("restore_cpu_ratio", "CPU time of a restore, relative to the bare requests"),
    most(
        "spill_p99_ratio",
        1.2,
        "99th-percentile time of reads from the node's own store during a spill at its full rate \
        (--spill-mib), relative to reads without a spill",
    )
    .beside("spill_p99_control"),
    told(
        "restoring_p99_ratio",
        "99th-percentile time of reads from the node's own store during restores, relative to reads without \
        restores",
    ),
    most(
        "trouble_p99_ratio",
        1.1,
        "99th-percentile time of reads from the node's own store during spills and restores with a failing \
        bucket (the worst of five failures), relative to a working bucket",
    )
    .beside("working_p99_control"),
];

const DUAL: [Bar; 17] = [
    least("equal_ratio", 1.85, "speed of reads from two equal peers, relative to the faster peer alone")
        .beside("equal_control"),
    most(
        "equal_first_layer_ratio",
        1.15,
        "time until the first layer arrives, relative to the faster path alone",
    ),
    least(
        "three_to_one_sum_ratio",
        0.90,
        "speed of reads from two peers with rates of 3 to 1, relative \
        to the sum of their speeds",
    ),
    most(
        "three_to_one_first_layer_ratio",
        1.15,
        "time until the first layer arrives, relative to the faster path alone",
    ),
    least(
        "dual_ratio",
        1.85,
        "speed of reads from the node's own disk and a peer, relative to the \
        faster path alone",
    ),
    most(
        "dual_first_layer_ratio",
        1.15,
        "time until the first layer arrives, relative to the faster path alone",
    ),
    most(
        "collapse_ratio",
        1.25,
        "time of a read over two paths, one of which becomes ten times slower, relative to a read over \
        the other path alone",
    ),
    most(
        "own_p99_ratio",
        1.33,
        "99th-percentile time of reads from the node's own store while the node serves a peer, relative to \
        reads alone",
    ),
    most(
        "failover_longest_pause_s",
        1.0,
        "longest time without a new layer after a kill -9 of a node, in seconds",
    ),
    most("failover_errors", 0.0, "number of blocks that were not read because of the kill -9"),
    least(
        "peer_ratio",
        0.85,
        "speed of the lane between nodes, without rate limits, relative to a bare copy over a socket",
    ),
    most(
        "peer_cpu_ratio",
        1.30,
        "CPU time of the lane between nodes, without digests, relative to a bare copy",
    ),
    least(
        "peer_large_ratio",
        0.85,
        "speed of the lane between nodes for pieces of 4 MiB, without rate limits, relative to a bare copy \
        over a socket",
    ),
    most(
        "peer_large_cpu_ratio",
        1.30,
        "CPU time of the lane between nodes for pieces of 4 MiB, without digests, relative to a bare copy",
    ),
    most(
        "lookup_round_trips",
        3.0,
        "time of a look-up of 4,096 keys over 8 nodes, in round trips of bare sockets",
    ),
    most("announced_s_per_million", 20.0, "seconds until a million blocks are announced"),
    most("directory_bytes_per_entry", 48.0, "memory of the directory for each copy of a block, in bytes"),
];
