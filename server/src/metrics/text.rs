//! Metrics as Prometheus reads them.

use std::fmt::{self, Write};

use kvarts_gpudirect::cufile::Decision;
use kvarts_store::rt::Clock;

use super::{CallName, Counted, Metrics};
use crate::node::Node;

/// A label's value: quotes, backslashes and line ends are escaped.
struct Value<'a>(&'a str);

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|character| match character {
            '"' => f.write_str("\\\""),
            '\\' => f.write_str("\\\\"),
            '\n' => f.write_str("\\n"),
            other => f.write_char(other),
        })
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn one(out: &mut String, name: &str, kind: &str, help: &str, value: impl fmt::Display) {
    head(out, name, kind, help);
    let _ = writeln!(out, "{name} {value}");
}

/// Everything that there is to tell of a server.
pub(super) async fn render(node: &Node) -> String {
    let io = node.engine.io().await.unwrap_or_default();
    let mut out = String::with_capacity(16 << 10);
    let Metrics(counted) = &*node.metrics;
    calls(&mut out, &counted.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    engine(&mut out, node);
    queues(&mut out, &io);
    scrub(&mut out, node);
    tenants(&mut out, node);
    memory(&mut out, node);
    device_path(&mut out, &node.decided.files);
    out
}

/// The labels of calls.
fn labels(name: &CallName) -> String {
    let CallName { path, method, class, tenant } = name;
    format!("path=\"{path}\",method=\"{method}\",class=\"{class}\",tenant=\"{}\"", Value(tenant))
}

fn calls(out: &mut String, counted: &Counted) {
    head(out, "kvarts_calls_total", "counter", "Calls that have ended, by how.");
    for (name, calls) in &counted.calls {
        let labels = labels(name);
        for (how, count) in &calls.ended {
            let _ = writeln!(out, "kvarts_calls_total{{{labels},ended=\"{}\"}} {count}", Value(how));
        }
    }
    head(out, "kvarts_call_seconds", "histogram", "How long calls took.");
    for (name, calls) in &counted.calls {
        let labels = labels(name);
        let mut total = 0;
        for (bound, count) in calls.took.cumulative() {
            let bound = bound.map_or("+Inf".to_owned(), |bound| bound.to_string());
            let _ = writeln!(out, "kvarts_call_seconds_bucket{{{labels},le=\"{bound}\"}} {count}");
            total = count;
        }
        let _ = writeln!(out, "kvarts_call_seconds_sum{{{labels}}} {}", calls.took.sum());
        let _ = writeln!(out, "kvarts_call_seconds_count{{{labels}}} {total}");
    }
    head(out, "kvarts_call_bytes_total", "counter", "Bytes of blocks that calls carried.");
    for (name, calls) in &counted.calls {
        for (direction, bytes) in [("in", calls.bytes_in), ("out", calls.bytes_out)] {
            let labels = labels(name);
            let _ = writeln!(out, "kvarts_call_bytes_total{{{labels},direction=\"{direction}\"}} {bytes}");
        }
    }
    head(out, "kvarts_calls_under_way", "gauge", "Calls that have begun and not ended.");
    for (method, count) in &counted.under_way {
        let _ = writeln!(out, "kvarts_calls_under_way{{method=\"{method}\"}} {count}");
    }
    head(out, "kvarts_calls_refused_total", "counter", "Calls that were not let in, by what was missing.");
    for ((method, want), count) in &counted.refused {
        let _ = writeln!(out, "kvarts_calls_refused_total{{method=\"{method}\",want=\"{want}\"}} {count}");
    }
    one(out, "kvarts_blocks_delivered_total", "counter", "Blocks that reads delivered.", counted.hits);
    head(
        out,
        "kvarts_blocks_missed_total",
        "counter",
        "Blocks that were asked for and not delivered, by reason.",
    );
    for (reason, count) in &counted.misses {
        let _ = writeln!(out, "kvarts_blocks_missed_total{{reason=\"{reason}\"}} {count}");
    }
    head(out, "kvarts_clients", "gauge", "Clients by the mode they are in.");
    for (mode, count) in &counted.modes {
        let _ = writeln!(out, "kvarts_clients{{mode=\"{mode}\"}} {count}");
    }
}

/// What the engine has counted since it was opened, by name.
pub(crate) fn engine_counts(counts: &kvarts_store::engine::Counts) -> [(&'static str, u64); 13] {
    [
        ("blocks_stored", counts.blocks_stored),
        ("blocks_deduplicated", counts.blocks_deduplicated),
        ("blocks_refused", counts.blocks_refused),
        ("blocks_not_admitted", counts.blocks_not_admitted),
        ("payload_bytes_stored", counts.payload_bytes_stored),
        ("record_bytes_written", counts.record_bytes_written),
        ("blocks_read", counts.blocks_read),
        ("device_bytes_read", counts.device_bytes_read),
        ("bytes_shared", counts.bytes_shared),
        ("chunks_damaged", counts.chunks_damaged),
        ("blocks_quarantined", counts.blocks_quarantined),
        ("segments_recycled", counts.segments_recycled),
        ("blocks_evicted", counts.blocks_evicted),
    ]
}

fn engine(out: &mut String, node: &Node) {
    let stats = node.engine.stats();
    for (name, value) in engine_counts(&stats.counts) {
        let name = format!("kvarts_engine_{name}_total");
        one(out, &name, "counter", "See `kvarts stat`; since the store was opened.", value);
    }
    one(out, "kvarts_disk_budget_bytes", "gauge", "Bytes that may be on disk.", stats.budget_bytes);
    one(out, "kvarts_disk_allocated_bytes", "gauge", "Bytes that are on disk.", stats.allocated_bytes);
    let free = stats.budget_bytes.saturating_sub(stats.allocated_bytes);
    one(out, "kvarts_disk_free_bytes", "gauge", "Bytes of the budget that are not on disk.", free);
    one(out, "kvarts_index_bytes", "gauge", "Memory that the index of blocks takes.", stats.index.bytes);
    one(out, "kvarts_index_blocks", "gauge", "Blocks in the index.", stats.index.blocks);
    if let Some(most) = stats.index_bytes_max {
        let help = "Memory that the index may take: near it blocks are evicted, beyond it nothing is put.";
        one(out, "kvarts_index_bytes_max", "gauge", help, most);
    }
    let space = stats.space.total;
    head(
        out,
        "kvarts_disk_bytes",
        "gauge",
        "Bytes on disk by what they are; together all that are allocated.",
    );
    for (what, bytes) in
        [("live", space.live), ("dead", space.dead), ("free", space.free), ("overhead", space.overhead)]
    {
        let _ = writeln!(out, "kvarts_disk_bytes{{what=\"{what}\"}} {bytes}");
    }
    let payload = stats.counts.payload_bytes_stored;
    let amplification = stats.counts.record_bytes_written as f64 / payload.max(1) as f64;
    let help = "Bytes written by bytes that clients put.";
    one(out, "kvarts_write_amplification", "gauge", help, if payload == 0 { 1.0 } else { amplification });
    let reports = node.engine.recovery();
    let sum =
        |field: fn(&kvarts_store::engine::RecoveryReport) -> u64| reports.iter().map(field).sum::<u64>();
    let recovered = sum(|report| report.blocks);
    one(out, "kvarts_recovery_blocks", "gauge", "Blocks that the last start found.", recovered);
    let problems = sum(|report| report.problems);
    one(out, "kvarts_recovery_problems", "gauge", "Problems that the last start found.", problems);
    let scanned = sum(|report| report.scanned_bytes);
    one(out, "kvarts_recovery_scanned_bytes", "gauge", "Bytes that the last start scanned.", scanned);
}

/// What waits for the devices, and what they work on.
fn queues(out: &mut String, io: &[(kvarts_store::io::IoFacts, kvarts_store::io::Metrics)]) {
    head(out, "kvarts_device_queue", "gauge", "Operations of each executor by where they are.");
    for (executor, (_, queue)) in io.iter().enumerate() {
        for (place, operations) in
            [("waiting", queue.waiting_ops), ("device", queue.in_flight_ops), ("stuck", queue.stuck_ops)]
        {
            let _ = writeln!(
                out,
                "kvarts_device_queue{{executor=\"{executor}\",place=\"{place}\"}} {operations}"
            );
        }
    }
    head(out, "kvarts_device_queue_bytes", "gauge", "Bytes that each executor's devices work on.");
    for (executor, (_, queue)) in io.iter().enumerate() {
        let _ =
            writeln!(out, "kvarts_device_queue_bytes{{executor=\"{executor}\"}} {}", queue.in_flight_bytes);
    }
    head(out, "kvarts_device_bytes_total", "counter", "Bytes that went to and from each executor's devices.");
    for (executor, (_, queue)) in io.iter().enumerate() {
        for (direction, bytes) in [("read", queue.bytes_read), ("written", queue.bytes_written)] {
            let labels = format!("executor=\"{executor}\",direction=\"{direction}\"");
            let _ = writeln!(out, "kvarts_device_bytes_total{{{labels}}} {bytes}");
        }
    }
}

fn scrub(out: &mut String, node: &Node) {
    let totals = node.scrub.totals();
    let (all, last) = (totals.all, totals.last);
    one(out, "kvarts_scrub_runs_total", "counter", "Runs of the scrubber that have ended.", totals.runs);
    one(out, "kvarts_scrub_under_way", "gauge", "Whether one is under way.", u8::from(totals.under_way));
    one(out, "kvarts_scrub_blocks_total", "counter", "Blocks that it checked.", all.blocks_checked);
    one(out, "kvarts_scrub_bytes_total", "counter", "Their bytes.", all.bytes_checked);
    let damaged = "Blocks that it found damaged.";
    one(out, "kvarts_scrub_blocks_damaged_total", "counter", damaged, all.blocks_damaged);
    let passed = "Blocks that it could not look at.";
    one(out, "kvarts_scrub_blocks_passed_over_total", "counter", passed, all.blocks_passed_over);
    let ended = last.ended_unix_ms as f64 / 1000.0;
    one(
        out,
        "kvarts_scrub_last_end_seconds",
        "gauge",
        "When the last run ended, since 1970; 0: never.",
        ended,
    );
    one(out, "kvarts_scrub_last_blocks", "gauge", "Blocks that the last run checked.", last.blocks_checked);
    let damaged = "Blocks that the last run found damaged.";
    one(out, "kvarts_scrub_last_blocks_damaged", "gauge", damaged, last.blocks_damaged);
}

fn tenants(out: &mut String, node: &Node) {
    head(
        out,
        "kvarts_tenant_disk_bytes",
        "gauge",
        "Live bytes on disk of each tenant, and what it may have.",
    );
    for tenant in node.gate.tenants() {
        let Some(space) = node.engine.tenant_space(&tenant.salt) else { continue };
        let name = Value(&tenant.name);
        let _ = writeln!(out, "kvarts_tenant_disk_bytes{{tenant=\"{name}\",what=\"live\"}} {}", space.live);
        if let Some(limit) = space.limit {
            let _ = writeln!(out, "kvarts_tenant_disk_bytes{{tenant=\"{name}\",what=\"limit\"}} {limit}");
        }
    }
}

/// How files reach the memory of devices, and why so.
fn device_path(out: &mut String, files: &Decision) {
    let help = "How files reach the memory of devices on this host, what it could offer, and why.";
    head(out, "kvarts_device_path", "gauge", help);
    let (mode, offered, reason) = (files.mode.name(), files.offered.name(), Value(&files.reason));
    let _ =
        writeln!(out, "kvarts_device_path{{mode=\"{mode}\",offered=\"{offered}\",reason=\"{reason}\"}} 1");
}

fn memory(out: &mut String, node: &Node) {
    head(out, "kvarts_request_memory_bytes", "gauge", "Memory of requests, by part: used, most used, all.");
    for (part, usage) in ["large", "small"].into_iter().zip(node.memory.usage()) {
        for (what, bytes) in [("used", usage.used), ("most", usage.used_max), ("all", usage.total)] {
            let _ = writeln!(out, "kvarts_request_memory_bytes{{part=\"{part}\",what=\"{what}\"}} {bytes}");
        }
    }
    one(out, "kvarts_shared_bytes", "gauge", "Memory of local clients that is mapped.", node.locals.mapped());
    let clients = node.locals.clients();
    head(out, "kvarts_local_clients", "gauge", "Clients of the local path, by tenant.");
    let mut tenants = std::collections::BTreeMap::<&str, u64>::new();
    for client in &clients {
        *tenants.entry(&client.tenant).or_default() += 1;
    }
    for (tenant, count) in tenants {
        let _ = writeln!(out, "kvarts_local_clients{{tenant=\"{}\"}} {count}", Value(tenant));
    }
    let (turns, waiting) = node.puts.left();
    one(out, "kvarts_put_turns_left", "gauge", "Puts that could take bytes at once.", turns);
    one(out, "kvarts_puts_waiting", "gauge", "Puts that wait for a turn.", waiting);
    let places = node.connections.available_permits();
    one(out, "kvarts_connections_all", "gauge", "Connections that there may be.", node.connections_all);
    one(out, "kvarts_connections_left", "gauge", "Connections that may still come.", places);
    one(out, "kvarts_calls_now", "gauge", "Calls under way in all.", node.calls());
    let clock: &dyn Clock = &**node.clock();
    let seconds = clock.unix_millis() as f64 / 1000.0;
    one(out, "kvarts_time_seconds", "gauge", "The server's wall clock.", seconds);
    head(out, "kvarts_build_info", "gauge", "Which program this is.");
    let _ = writeln!(out, "kvarts_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
}

#[cfg(test)]
mod tests {
    use kvarts_gpudirect::cufile::{Found, Wish, decide};

    use super::*;

    #[test]
    fn the_way_to_devices_is_told_with_what_there_could_be_and_why() {
        let found = Found { device: Ok(()), library: true, module: false };
        let mut out = String::new();
        device_path(&mut out, &decide(&found, Wish::Auto).unwrap());
        let line = out.lines().last().unwrap();
        assert!(
            line.starts_with("kvarts_device_path{mode=\"staging\",offered=\"compatibility\",reason=\""),
            "{line}"
        );
        assert!(line.contains("nvidia-fs") && line.ends_with("\"} 1"), "{line}");
        let found = Found { device: Err("a \"driver\"\nin two lines".to_owned()), ..found };
        let mut out = String::new();
        device_path(&mut out, &decide(&found, Wish::Only(kvarts_gpudirect::cufile::Mode::Staging)).unwrap());
        device_path(&mut out, &decide(&found, Wish::Auto).unwrap());
        assert!(out.contains("reason=\"asked for\""), "{out}");
        assert!(out.ends_with("reason=\"a \\\"driver\\\"\\nin two lines\"} 1\n"), "{out}");
    }
}
