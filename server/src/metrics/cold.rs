//! The cold tier as Prometheus reads it.

use std::fmt::Write;

use kvarts_cold::{Limits, Spent};

use super::lines::{head, one};
use crate::cold::{Counted, Counts};

/// Tells everything of a cold tier; a server without one tells nothing.
pub(super) fn cold(out: &mut String, counted: &Counted) {
    for (name, help, value) in &counted.counts {
        one(out, &format!("kvarts_cold_{name}_total"), "counter", help, value);
    }
    let Spent { requests, retries, hedges, failures, written_bytes, read_bytes } = counted.total;
    one(
        out,
        "kvarts_cold_requests_total",
        "counter",
        "Requests to the bucket, including repeated requests.",
        requests,
    );
    one(
        out,
        "kvarts_cold_retries_total",
        "counter",
        "Repeated requests to the bucket; kvarts_cold_requests_total includes them.",
        retries,
    );
    let help = "Ranges of packs that were requested a second time because the first answer was late.";
    one(out, "kvarts_cold_hedges_total", "counter", help, hedges);
    one(out, "kvarts_cold_failures_total", "counter", "Requests to the bucket that failed.", failures);
    one(out, "kvarts_cold_written_bytes_total", "counter", "Bytes written to the bucket.", written_bytes);
    one(out, "kvarts_cold_read_bytes_total", "counter", "Bytes read from the bucket.", read_bytes);
    let budgets = [
        ("requests", counted.today.requests, counted.limits.requests_a_day),
        ("written_bytes", counted.today.written_bytes, counted.limits.written_bytes_a_day),
        ("read_bytes", counted.today.read_bytes, counted.limits.read_bytes_a_day),
    ];
    let help = "Use of the daily limits (UTC): cold.requests, cold.written, cold.read.";
    head(out, "kvarts_cold_today", "gauge", help);
    for (of, used, _) in budgets {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "kvarts_cold_today{{budget=\"{of}\"}} {used}");
    }
    head(
        out,
        "kvarts_cold_today_limit",
        "gauge",
        "Limit of kvarts_cold_today. When a limit is reached, the server sends no more requests that count towards it until midnight UTC.",
    );
    for (of, _, most) in budgets {
        let _ = writeln!(out, "kvarts_cold_today_limit{{budget=\"{of}\"}} {most}");
    }
    let help = "1 while requests to the bucket are paused after failures: blocks of the bucket are misses.";
    one(out, "kvarts_cold_paused", "gauge", help, u8::from(counted.is_paused));
    let help = "1 while uploads are off, because the bucket does not support conditional puts.";
    one(out, "kvarts_cold_read_only", "gauge", help, u8::from(counted.is_read_only));
    let help = "Namespaces whose manifest the server has read from the bucket.";
    one(out, "kvarts_cold_manifests", "gauge", help, counted.manifests);
    let help = "Approximate memory of manifests and indexes of packs, in bytes.";
    one(out, "kvarts_cold_memory_bytes", "gauge", help, counted.memory);
    one(
        out,
        "kvarts_cold_blocks_under_way",
        "gauge",
        "Blocks being restored from the bucket.",
        counted.under_way,
    );
}

/// A tier that has done nothing.
pub(super) fn nothing() -> Counted {
    Counted {
        counts: Counts::default().all(),
        total: Spent::default(),
        today: Spent::default(),
        limits: Limits::default(),
        is_paused: false,
        is_read_only: false,
        manifests: 0,
        memory: 0,
        under_way: 0,
    }
}
