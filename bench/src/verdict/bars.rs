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
    least("ratio", 0.9, "speed of layer reads with digests, by that of a bare loop without")
        .beside("control"),
    most(
        "cpu_over_checking",
        1.25,
        "processor time of layer reads by that of a bare loop that checks the same digests",
    )
    .beside("cpu_control"),
];
const PUT: [Bar; 1] =
    [least("ratio", 0.84, "speed of durable puts by that of bare writes and flushes")
        .beside("control_group")];
const MATCH: [Bar; 1] =
    [most("ratio", 0.7, "time of a look-up by that of a plain hash map").beside("control")];
const OPEN: [Bar; 1] =
    [most("ratio", 4.0, "time of a start after a crash by that of a bare read of the same bytes")
        .beside("control")];
const MIXED: [Bar; 1] =
    [most("p99_ratio", 2.6, "99th percentile of layer reads under load by that of the same reads alone")
        .beside("p99_control")];
const SERVE: [Bar; 2] = [
    least("grpc_hot_ratio", 0.93, "speed of gRPC reads from memory by that of a bare server")
        .beside("control"),
    least("local_ratio", 1.0, "speed of local reads by that of the embedded engine").beside("local_control"),
];
const SCALE: [Bar; 1] =
    [most("evict_cost_ratio", 1.1, "cost of eviction with a full index by that with a small one")];
const GPU: [Bar; 1] =
    [least("pipeline_ratio", 0.97, "speed of the layer pipeline by its bound").beside("control_")];
const ENCODED: [Bar; 1] =
    [least("speed_ratio", 0.4, "speed of reads of encoded records by that of raw ones").beside("control")];
const CHURN: [Bar; 1] = [most("most_on_disk_by_budget", 1.0, "most bytes on disk by the budget")];

const COLD: [Bar; 9] = [
    least(
        "restore_ratio",
        0.85,
        "speed of a read by layers until everything has come and is stored, manifest, indexes, digests and content ids included, by that of bare ranged requests for the same bytes",
    )
    .beside("control"),
    told("read_ratio", "the same until the reader has everything"),
    told("fetch_ratio", "the same without a reader and without the store: verified and dropped"),
    told(
        "put_ratio",
        "speed of puts of the same bytes from memory by that of the bare requests: no restore is stored faster",
    ),
    most("over_read", 1.125, "bytes that were fetched of packs by bytes that were asked for"),
    told("restore_cpu_ratio", "processor time of a restore by that of the bare requests"),
    most(
        "spill_p99_ratio",
        1.2,
        "99th percentile of own reads beside a spill at the whole rate that it may have (--spill-mib) by the same without",
    )
    .beside("spill_p99_control"),
    told("restoring_p99_ratio", "the same beside restores"),
    most(
        "trouble_p99_ratio",
        1.1,
        "99th percentile of own reads, beside spills and restores that are wanted, with a bucket that fails, in the worst of five ways, by the same with one that works",
    )
    .beside("working_p99_control"),
];

const DUAL: [Bar; 17] = [
    least("equal_ratio", 1.85, "two peers against the better one").beside("equal_control"),
    most("equal_first_layer_ratio", 1.15, "their first layer against the better one's"),
    least("three_to_one_sum_ratio", 0.90, "peers of three to one against the sum of both"),
    most("three_to_one_first_layer_ratio", 1.15, "their first layer against the better one's"),
    least("dual_ratio", 1.85, "own disk and a peer against the better one"),
    most("dual_first_layer_ratio", 1.15, "their first layer against the better one's"),
    most(
        "collapse_ratio",
        1.25,
        "a path that collapses to a tenth in the middle, against the other one alone",
    ),
    most("own_p99_ratio", 1.33, "99th percentile of own reads while a peer is served"),
    most("failover_longest_pause_s", 1.0, "seconds without a layer after a kill -9"),
    most("failover_errors", 0.0, "blocks that did not come because of it"),
    least("peer_ratio", 0.85, "the unlimited lane against a bare pump"),
    most("peer_cpu_ratio", 1.30, "its processor time, digests apart, against the pump's"),
    least("peer_large_ratio", 0.85, "the same in pieces of 4 MiB"),
    most("peer_large_cpu_ratio", 1.30, "the same in pieces of 4 MiB"),
    most("lookup_round_trips", 3.0, "a look-up of 4,096 keys over 8 nodes, in round trips of bare sockets"),
    most("announced_s_per_million", 20.0, "seconds in which a million blocks are announced"),
    most("directory_bytes_per_entry", 48.0, "bytes of the directory for each copy"),
];
