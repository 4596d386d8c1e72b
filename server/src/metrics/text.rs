//! Metrics as Prometheus reads them.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use kvarts_contract::clock::Clock;
use kvarts_gpudirect::cufile::Decision;
use kvarts_store::driver::DriveLoad;
use kvarts_store::engine::{Counts, Stats};
use kvarts_store::ledger::Space;

use super::lines::{Value, head, one};
use crate::counters::usage::{REST, TENANTS_MAX};
use crate::state::{ServerState, Tenant};
use kvarts_wire::limits;

/// What executors count of their devices, and what it means.
const DEVICE_COUNTERS: [(&str, &str); 7] = [
    ("submissions", "I/O operations submitted to devices, including repeated submissions."),
    ("operations", "I/O operations that ended."),
    ("failed", "I/O operations that ended with an error."),
    ("retried", "I/O submissions repeated after an interruption."),
    ("short", "I/O submissions that continue an incomplete transfer."),
    ("unknown_completions", "I/O completions that belong to no operation under way."),
    ("late_completions", "I/O operations that ended after the call that started them had been dropped."),
];

/// The counters of one executor. What is counted there and not told here does not compile.
fn device_counts(queue: &kvarts_store::driver::Metrics) -> [(&'static str, u64); 7] {
    let kvarts_store::driver::Metrics {
        submitted,
        completed,
        failed,
        retried,
        short,
        unknown_completions,
        late_completions,
        // Told by direction, or as what there is now: see `queues`.
        bytes_read: _,
        bytes_written: _,
        slots: _,
        waiting_ops: _,
        in_flight_ops: _,
        in_flight_bytes: _,
        stuck_ops: _,
        stuck_bytes: _,
        dropped_ops: _,
        dropped_bytes: _,
        arena_bytes: _,
    } = *queue;
    [
        ("submissions", submitted),
        ("operations", completed),
        ("failed", failed),
        ("retried", retried),
        ("short", short),
        ("unknown_completions", unknown_completions),
        ("late_completions", late_completions),
    ]
}

/// Everything that there is to tell of a server.
pub(super) async fn render(state: &ServerState) -> String {
    let told = state.metrics.executors.ask(&state.engine).await;
    let mut out = String::with_capacity(16 << 10);
    // Calls that end wait for the lock: the counters are copied under it and formatted afterwards.
    let counted = state.metrics.lock().clone();
    super::calls::calls(&mut out, &counted);
    engine(&mut out, state);
    one(
        &mut out,
        "kvarts_executors_silent",
        "gauge",
        "1 if an executor did not report within 200 ms. The figures of its devices are then from an earlier scrape.",
        u64::from(told.is_old),
    );
    queues(&mut out, &told.io);
    drives(&mut out, &told.drives, &state.decided.directories);
    scrub(&mut out, state);
    tenants(&mut out, state);
    memory(&mut out, state);
    connections(&mut out, state);
    super::sessions::sessions(&mut out, &state.sessions);
    super::process::process(&mut out);
    device_path(&mut out, &state.decided.files);
    if let Some(node) = &state.decided.cluster {
        super::cluster::cluster(&mut out, &node.status());
    }
    if let Some(cold) = &state.decided.cold {
        super::cold::cold(&mut out, &cold.counted());
    }
    out
}

const STORE_INFO: &str = "Id of the store, as a label; in a cluster also the id of the node.";

fn engine(out: &mut String, state: &ServerState) {
    // What the store tells and is not told here does not compile.
    let Stats {
        store,
        counts,
        index,
        index_bytes_max,
        departures_bytes,
        allocated_bytes,
        budget_bytes,
        tombstones,
        space,
    } = state.engine.stats();
    head(out, "kvarts_store_info", "gauge", STORE_INFO);
    let _ = writeln!(out, "kvarts_store_info{{store=\"{store}\"}} 1");
    for ((name, value), help) in counts.named().into_iter().zip(Counts::helps()) {
        let name = format!("kvarts_engine_{name}_total");
        one(out, &name, "counter", help, value);
    }
    health(out, &state.engine.health(), &state.decided.directories);
    one(
        out,
        "kvarts_disk_budget_bytes",
        "gauge",
        "Disk budget: bytes that the store may allocate (store.budget).",
        budget_bytes,
    );
    one(
        out,
        "kvarts_disk_allocated_bytes",
        "gauge",
        "Bytes that the store has allocated on disk. When the budget is used up, the store evicts blocks; this is normal.",
        allocated_bytes,
    );
    let free = budget_bytes.saturating_sub(allocated_bytes);
    one(out, "kvarts_disk_free_bytes", "gauge", "Bytes of the budget that are not allocated.", free);
    disk_link(out, state);
    for (what, help, size) in [
        ("bytes", "Memory of the index of blocks, in bytes.", index.bytes),
        ("blocks", "Blocks in the index; look-ups can find these blocks.", index.blocks),
        ("records", "Records on disk that are in the index; a record has one block or more.", index.records),
    ] {
        one(out, &format!("kvarts_index_{what}"), "gauge", help, size);
    }
    if let Some(most) = index_bytes_max {
        let help = "Limit of the memory of the index, in bytes (limits.index). Near the limit, blocks are evicted; above the limit, puts are refused.";
        one(out, "kvarts_index_limit_bytes", "gauge", help, most);
    }
    let help = "Memory, in bytes, that records why blocks were removed; at most 1 MiB. Look-ups of removed blocks return these reasons.";
    one(out, "kvarts_departures_bytes", "gauge", help, departures_bytes);
    one(
        out,
        "kvarts_tombstones",
        "gauge",
        "Tombstones: deletes that the store keeps until no copy of the deleted blocks can reappear after a crash.",
        tombstones,
    );
    by_kind(out, space.total);
    cut_off(out, state.engine.cut_off());
    let payload = counts.payload_bytes_stored;
    let written = counts.record_bytes_written + counts.moved_bytes_written;
    let amplification = written as f64 / payload.max(1) as f64;
    let help = "Write amplification: bytes of all records written, including moved records, divided by the bytes that clients put.";
    one(out, "kvarts_write_amplification", "gauge", help, if payload == 0 { 1.0 } else { amplification });
    recovery(out, state);
}

/// What the allocated bytes are.
fn by_kind(out: &mut String, space: Space) {
    head(
        out,
        "kvarts_disk_bytes",
        "gauge",
        "Allocated bytes on disk, by kind; the sum over all kinds is the number of allocated bytes.",
    );
    for (what, bytes) in
        [("live", space.live), ("dead", space.dead), ("free", space.free), ("overhead", space.overhead)]
    {
        let _ = writeln!(out, "kvarts_disk_bytes{{what=\"{what}\"}} {bytes}");
    }
}

/// What is here and of no use.
fn cut_off(out: &mut String, (blocks, bytes): (u64, u64)) {
    for (what, help, value) in [
        (
            "blocks",
            "Live blocks that cannot be used, because an earlier block of their prefix is absent.",
            blocks,
        ),
        ("bytes", "Bytes of the blocks that kvarts_cut_off_blocks counts.", bytes),
    ] {
        one(out, &format!("kvarts_cut_off_{what}"), "gauge", help, value);
    }
}

/// What reads find the disks to be.
fn disk_link(out: &mut String, state: &ServerState) {
    let disk = state.engine.disk_link();
    for (name, help, value) in [
        (
            "bytes_per_second",
            "Read speed of the disks in bytes per second, measured from the reads of the last minutes; if there were no reads, an assumed speed.",
            disk.link.bytes_per_ms * 1e3,
        ),
        (
            "latency_seconds",
            "Latency of disk reads in seconds, without the time of the transfer.",
            disk.link.latency_ms / 1e3,
        ),
        ("outstanding_bytes", "Bytes of reads under way or queued.", disk.link.outstanding_bytes as f64),
    ] {
        one(out, &format!("kvarts_disk_read_{name}"), "gauge", help, value);
    }
}

/// What the last start found.
fn recovery(out: &mut String, state: &ServerState) {
    let reports = state.engine.recovery();
    let sum =
        |field: fn(&kvarts_store::engine::RecoveryReport) -> u64| reports.iter().map(field).sum::<u64>();
    let recovered = sum(|report| report.blocks);
    one(out, "kvarts_recovery_blocks", "gauge", "Blocks that recovery found at the last start.", recovered);
    let problems = sum(|report| report.problems);
    let help = "Problems that recovery found at the last start; kvarts fsck --live lists the problems.";
    one(out, "kvarts_recovery_problems", "gauge", help, problems);
    let scanned = sum(|report| report.scanned_bytes);
    one(
        out,
        "kvarts_recovery_scanned_bytes",
        "gauge",
        "Bytes that recovery scanned at the last start.",
        scanned,
    );
}

/// Whether the store takes writes, and who has died.
fn health(out: &mut String, health: &kvarts_store::engine::Health, directories: &[PathBuf]) {
    let kvarts_store::engine::Health { latched, dead_executors, failing, out: lost, short_of_disk } = health;
    head(
        out,
        "kvarts_read_only",
        "gauge",
        "1 while the store is read-only; a label contains the reason. Remove the cause, then run kvarts resume. Reads continue.",
    );
    let reason = latched.as_deref().unwrap_or_default();
    let _ = writeln!(out, "kvarts_read_only{{reason=\"{}\"}} {}", Value(reason), u8::from(latched.is_some()));
    one(
        out,
        "kvarts_dead_executors",
        "gauge",
        "Executors that have failed. Their blocks are misses until the server is restarted.",
        dead_executors,
    );
    let help = "Shards that refuse puts because their device fails all writes.";
    one(out, "kvarts_failing_shards", "gauge", help, failing.len());
    head(
        out,
        "kvarts_directory_out",
        "gauge",
        "1 while a directory of the store is out of use; a label contains the reason. The blocks of the directory are misses, and puts use the other directories.",
    );
    for (directory, at) in directories.iter().zip(0u16..) {
        let (why, shown) = (lost.get(&at), directory.display().to_string());
        let reason = why.map(String::as_str).unwrap_or_default();
        let labels = format!("directory=\"{}\",reason=\"{}\"", Value(&shown), Value(reason));
        let _ = writeln!(out, "kvarts_directory_out{{{labels}}} {}", u8::from(why.is_some()));
    }
    let help = "1 if the disks had less free space than the budget requires when the store was opened or the budget was changed; stored blocks can still be read.";
    one(out, "kvarts_short_of_disk", "gauge", help, u8::from(short_of_disk.is_some()));
}

/// What the disk of each directory has, and what it does not answer.
fn drives(out: &mut String, loads: &[DriveLoad], directories: &[PathBuf]) {
    type Gauge = fn(&DriveLoad) -> f64;
    let gauges: [(&str, &str, Gauge); 3] = [
        (
            "kvarts_directory_unanswered_seconds",
            "Age, in seconds, of the oldest unanswered operation on a directory's disk. If the age is more than a few seconds, the disk does not respond.",
            |load| load.unanswered.as_secs_f64(),
        ),
        (
            "kvarts_directory_stuck_bytes",
            "Bytes of transfers under way on the disk of a directory that have lasted more than ten seconds, or have passed their deadline.",
            |load| load.stuck_bytes as f64,
        ),
        (
            "kvarts_directory_in_flight_bytes",
            "Bytes of transfers under way on the disk of a directory.",
            |load| load.in_flight_bytes as f64,
        ),
    ];
    for (name, help, value) in gauges {
        head(out, name, "gauge", help);
        for (load, directory) in loads.iter().zip(directories) {
            let shown = directory.display().to_string();
            let _ = writeln!(out, "{name}{{directory=\"{}\"}} {}", Value(&shown), value(load));
        }
    }
}

/// What waits for the devices, and what they work on.
fn queues(out: &mut String, io: &[(kvarts_store::io::IoFacts, kvarts_store::driver::Metrics)]) {
    for (what, help) in DEVICE_COUNTERS {
        let name = format!("kvarts_device_{what}_total");
        head(out, &name, "counter", help);
        for (executor, (_, queue)) in io.iter().enumerate() {
            let count = device_counts(queue).into_iter().find(|(one, _)| *one == what).map_or(0, |(_, n)| n);
            let _ = writeln!(out, "{name}{{executor=\"{executor}\"}} {count}");
        }
    }
    head(out, "kvarts_device_held_bytes", "gauge", "Memory in use by each executor, in bytes, by state.");
    for (executor, (_, queue)) in io.iter().enumerate() {
        for (what, bytes) in
            [("arena", queue.arena_bytes), ("stuck", queue.stuck_bytes), ("dropped", queue.dropped_bytes)]
        {
            let labels = format!("executor=\"{executor}\",what=\"{what}\"");
            let _ = writeln!(out, "kvarts_device_held_bytes{{{labels}}} {bytes}");
        }
    }
    head(out, "kvarts_device_queue", "gauge", "I/O operations of each executor, by state.");
    for (executor, (_, queue)) in io.iter().enumerate() {
        for (place, operations) in [
            ("waiting", queue.waiting_ops),
            ("device", queue.in_flight_ops),
            ("stuck", queue.stuck_ops),
            ("dropped", queue.dropped_ops),
        ] {
            let _ = writeln!(
                out,
                "kvarts_device_queue{{executor=\"{executor}\",place=\"{place}\"}} {operations}"
            );
        }
    }
    head(
        out,
        "kvarts_device_queue_bytes",
        "gauge",
        "Bytes of transfers under way on each executor's devices.",
    );
    for (executor, (_, queue)) in io.iter().enumerate() {
        let _ =
            writeln!(out, "kvarts_device_queue_bytes{{executor=\"{executor}\"}} {}", queue.in_flight_bytes);
    }
    head(
        out,
        "kvarts_device_bytes_total",
        "counter",
        "Bytes written to and read from each executor's devices.",
    );
    for (executor, (_, queue)) in io.iter().enumerate() {
        for (direction, bytes) in [("read", queue.bytes_read), ("written", queue.bytes_written)] {
            let labels = format!("executor=\"{executor}\",direction=\"{direction}\"");
            let _ = writeln!(out, "kvarts_device_bytes_total{{{labels}}} {bytes}");
        }
    }
}

fn scrub(out: &mut String, state: &ServerState) {
    let totals = state.scrub.totals();
    let (all, last) = (totals.all, totals.last);
    one(out, "kvarts_scrub_runs_total", "counter", "Scrubber runs that have ended.", totals.runs);
    one(
        out,
        "kvarts_scrub_under_way",
        "gauge",
        "1 while a scrubber run is under way.",
        u8::from(totals.under_way),
    );
    one(out, "kvarts_scrub_blocks_total", "counter", "Blocks that the scrubber checked.", all.blocks_checked);
    one(out, "kvarts_scrub_bytes_total", "counter", "Bytes that the scrubber checked.", all.bytes_checked);
    let damaged = "Blocks that the scrubber found damaged.";
    one(out, "kvarts_scrub_blocks_damaged_total", "counter", damaged, all.blocks_damaged);
    let passed = "Blocks that the scrubber could not read.";
    one(out, "kvarts_scrub_blocks_passed_over_total", "counter", passed, all.blocks_passed_over);
    let ended = last.ended_unix_ms as f64 / 1000.0;
    one(
        out,
        "kvarts_scrub_last_end_timestamp_seconds",
        "gauge",
        "End of the last scrubber run, in seconds since 1970; 0 if no run has ended.",
        ended,
    );
    one(
        out,
        "kvarts_scrub_last_blocks",
        "gauge",
        "Blocks that the last scrubber run checked.",
        last.blocks_checked,
    );
    let damaged = "Blocks that the last scrubber run found damaged.";
    one(out, "kvarts_scrub_last_blocks_damaged", "gauge", damaged, last.blocks_damaged);
}

/// A value of each tenant; the last of very many are added up under one name.
fn by_tenant(out: &mut String, name: &str, help: &str, values: &[(Arc<Tenant>, Option<u64>)]) {
    head(out, name, "gauge", help);
    let (told, rest) = values.split_at(values.len().min(TENANTS_MAX));
    for (tenant, value) in told {
        if let Some(value) = value {
            let _ = writeln!(out, "{name}{{tenant=\"{}\"}} {value}", Value(&tenant.name));
        }
    }
    if !rest.is_empty() {
        let sum: u64 = rest.iter().filter_map(|(_, value)| *value).sum();
        let _ = writeln!(out, "{name}{{tenant=\"{REST}\"}} {sum}");
    }
}

/// What tenants have on disk, and what their models take.
fn tenants(out: &mut String, state: &ServerState) {
    let tenants = state.gate.tenants();
    let of = |value: &dyn Fn(&Tenant) -> Option<u64>| -> Vec<_> {
        tenants.iter().map(|tenant| (Arc::clone(tenant), value(tenant))).collect()
    };
    let space = |tenant: &Tenant| state.engine.tenant_space(&tenant.salt);
    let help = "Live bytes on disk of each tenant.";
    by_tenant(out, "kvarts_tenant_disk_bytes", help, &of(&|tenant| Some(space(tenant)?.live)));
    let help =
        "Quota of each tenant that has a quota, in bytes. A tenant at its quota evicts its own blocks.";
    by_tenant(out, "kvarts_tenant_disk_limit_bytes", help, &of(&|tenant| space(tenant)?.limit));
    let used = |tenant: &Tenant| state.models.used(tenant.number);
    let help = "Number of models that each tenant has registered.";
    by_tenant(out, "kvarts_tenant_models", help, &of(&|tenant| Some(used(tenant).count as u64)));
    let help = "Approximate memory of each tenant's models, in bytes.";
    by_tenant(out, "kvarts_tenant_models_bytes", help, &of(&|tenant| Some(used(tenant).memory)));
    let help = "Limit of kvarts_tenant_models_bytes for each tenant. At the limit, the server drops the tenant's least recently used model.";
    one(out, "kvarts_tenant_models_limit_bytes", "gauge", help, limits::MODELS_MEMORY_MAX);
}

/// How files reach the memory of devices, and why so.
fn device_path(out: &mut String, files: &Decision) {
    let help = "Path from files to device memory on this host: the mode in use, the mode that the host offers, and the reason.";
    head(out, "kvarts_device_path", "gauge", help);
    let (mode, offered, reason) = (files.mode.name(), files.offered.name(), Value(&files.reason));
    let _ =
        writeln!(out, "kvarts_device_path{{mode=\"{mode}\",offered=\"{offered}\",reason=\"{reason}\"}} 1");
}

fn memory(out: &mut String, state: &ServerState) {
    let usage = state.memory.usage();
    let mut family = |name: &str, help: &str, bytes: [usize; 2]| {
        head(out, name, "gauge", help);
        for (part, bytes) in ["large", "small"].into_iter().zip(bytes) {
            let _ = writeln!(out, "{name}{{part=\"{part}\"}} {bytes}");
        }
    };
    let help = "Memory that requests use, in bytes, by part: small (for reads of up to 256 KiB) or large (for all other requests). The tile cache is not included. At the limit, further requests wait.";
    family("kvarts_request_memory_bytes", help, usage.map(|part| part.used));
    let help = "The highest kvarts_request_memory_bytes since the start.";
    family("kvarts_request_memory_peak_bytes", help, usage.map(|part| part.used_max));
    let help = "Limit of kvarts_request_memory_bytes (limits.memory).";
    family("kvarts_request_memory_limit_bytes", help, usage.map(|part| part.total));
    head(
        out,
        "kvarts_kept_tiles_bytes",
        "gauge",
        "Memory of the tile cache, which keeps tiles of earlier reads, by part of the memory for requests (see kvarts_request_memory_bytes).",
    );
    for (number, part) in ["large", "small"].into_iter().enumerate() {
        let bytes = state.memory.tiles().bytes(number);
        let _ = writeln!(out, "kvarts_kept_tiles_bytes{{part=\"{part}\"}} {bytes}");
    }
    head(
        out,
        "kvarts_tiles_total",
        "counter",
        "Tiles of reads over gRPC, by source: still in memory from an earlier read, or read from disk.",
    );
    let (kept, read) = state.memory.tiles().counts();
    for (from, tiles) in [("kept", kept), ("read", read)] {
        let _ = writeln!(out, "kvarts_tiles_total{{from=\"{from}\"}} {tiles}");
    }
    let help =
        "Memory of large requests and their answers, in bytes. At the limit, further large requests wait.";
    one(out, "kvarts_large_requests_bytes", "gauge", help, state.receiving.bytes());
    let help = "Limit of kvarts_large_requests_bytes.";
    one(out, "kvarts_large_requests_limit_bytes", "gauge", help, limits::LARGE_BYTES_MAX);
    let waiting = state.receiving.waiting();
    one(out, "kvarts_large_requests_waiting", "gauge", "Large requests that wait for memory.", waiting);
    one(
        out,
        "kvarts_shared_bytes",
        "gauge",
        "Memory of local clients that the server has mapped, in bytes.",
        state.locals.mapped(),
    );
    let clients = state.locals.clients();
    head(out, "kvarts_local_clients", "gauge", "Clients of the local path, by tenant.");
    let mut tenants = std::collections::BTreeMap::<&str, u64>::new();
    for client in &clients {
        *tenants.entry(&client.tenant).or_default() += 1;
    }
    for (tenant, count) in tenants {
        let _ = writeln!(out, "kvarts_local_clients{{tenant=\"{}\"}} {count}", Value(tenant));
    }
    let (turns, waiting) = state.puts.left();
    one(
        out,
        "kvarts_put_turns_free",
        "gauge",
        "Number of further puts that the server can process now.",
        turns,
    );
    one(
        out,
        "kvarts_puts_waiting",
        "gauge",
        "Number of puts that wait until another put has ended.",
        waiting,
    );
}

fn connections(out: &mut String, state: &ServerState) {
    let places = state.connections.free();
    let help = "Limit of connections (limits.connections).";
    one(out, "kvarts_connections_limit", "gauge", help, state.connections.all());
    let help = "Free connections. At 0, the server closes a connection without a token when it accepts a new connection.";
    one(out, "kvarts_connections_free", "gauge", help, places);
    let (strangers, open_calls) = state.connections.strangers();
    one(out, "kvarts_connections_unknown", "gauge", "Connections whose client has sent no token.", strangers);
    one(out, "kvarts_calls_without_token", "gauge", "Calls under way that need no token.", open_calls);
    one(out, "kvarts_calls_now", "gauge", "Calls under way, all methods together.", state.calls());
    let clock: &dyn Clock = &**state.clock();
    let seconds = clock.unix_millis() as f64 / 1000.0;
    one(
        out,
        "kvarts_time_seconds",
        "gauge",
        "The server's wall clock, in seconds since 1970: the time at which these figures were read.",
        seconds,
    );
    head(out, "kvarts_build_info", "gauge", "Version of the program.");
    let _ = writeln!(out, "kvarts_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
}

#[cfg(test)]
mod tests {
    use kvarts_gpudirect::cufile::{Found, Wish, decide};

    use super::*;

    #[test]
    fn every_counter_of_the_engine_and_of_its_devices_is_told() {
        let queue = kvarts_store::driver::Metrics::default();
        let names = device_counts(&queue).map(|(name, _)| name);
        assert_eq!(names, DEVICE_COUNTERS.map(|(name, _)| name));
        let mut out = String::new();
        let facts = kvarts_store::io::IoFacts { backend: "ring", features: Vec::new(), warnings: Vec::new() };
        queues(&mut out, &[(facts, queue)]);
        for name in names {
            assert!(
                out.contains(&format!("kvarts_device_{name}_total{{executor=\"0\"}} 0")),
                "{name}: {out}"
            );
        }
        let counts = Counts::default();
        // Each field is a number, and each is named once.
        assert_eq!(counts.named().len() * size_of::<u64>(), size_of_val(&counts));
    }

    #[test]
    fn a_store_that_takes_no_writes_says_so_with_the_reason() {
        let mut out = String::new();
        let latched = Some("writing \"seg\": Input/output error".to_owned());
        let two = ["/disks/0", "/disks/1"].map(PathBuf::from);
        let lost = [(1, "it does not exist".to_owned())].into();
        let sick =
            kvarts_store::engine::Health { latched, dead_executors: 2, out: lost, ..Default::default() };
        health(&mut out, &sick, &two);
        let lines = [
            "kvarts_directory_out{directory=\"/disks/0\",reason=\"\"} 0",
            "kvarts_directory_out{directory=\"/disks/1\",reason=\"it does not exist\"} 1",
        ];
        assert!(lines.iter().all(|line| out.contains(line)), "{out}");
        let expected = "kvarts_read_only{reason=\"writing \\\"seg\\\": Input/output error\"} 1";
        assert!(out.contains(expected) && out.contains("kvarts_dead_executors 2"), "{out}");
        health(&mut out, &kvarts_store::engine::Health::default(), &two);
        assert!(out.contains("kvarts_read_only{reason=\"\"} 0"), "{out}");
    }

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
        assert!(out.contains("reason=\"requested\""), "{out}");
        assert!(out.ends_with("reason=\"a \\\"driver\\\"\\nin two lines\"} 1\n"), "{out}");
    }
}
