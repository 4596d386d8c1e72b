//! Calls and what they asked for, as Prometheus reads them.

use std::fmt::Write;

use super::lines::{Value, head};
use crate::counters::histogram::Histogram;
use crate::counters::usage::Usage;
use crate::counters::{CallName, Counted};

/// Tells everything that the server counts of calls.
pub(super) fn calls(out: &mut String, counted: &Counted) {
    by_tenant(out, counted);
    times(out, counted);
    head(out, "kvarts_calls_under_way", "gauge", "Calls under way, by method.");
    for (method, count) in &counted.under_way {
        let _ = writeln!(out, "kvarts_calls_under_way{{method=\"{method}\"}} {count}");
    }
    let help = "Calls that the server refused before any work, by cause: no token, no right, the tenant's limit of calls (retry), no connection left, or a drain. The audit lines in the log name the tenants.";
    head(out, "kvarts_calls_refused_total", "counter", help);
    for ((method, want), count) in &counted.refused {
        let _ = writeln!(out, "kvarts_calls_refused_total{{method=\"{method}\",want=\"{want}\"}} {count}");
    }
    usage(out, counted);
    head(out, "kvarts_clients", "gauge", "Clients of the local path, by transfer mode.");
    for (mode, count) in &counted.modes {
        let _ = writeln!(out, "kvarts_clients{{mode=\"{mode}\"}} {count}");
    }
}

fn by_tenant(out: &mut String, counted: &Counted) {
    let labels = |name: &CallName| {
        let CallName { path, method, class, tenant } = name;
        format!("path=\"{path}\",method=\"{method}\",class=\"{class}\",tenant=\"{}\"", Value(tenant))
    };
    let help = "Calls that have ended, by gRPC code; calls on the local path have gRPC codes, too. A read with code OK may have missed blocks: see kvarts_blocks_missed_total.";
    head(out, "kvarts_calls_total", "counter", help);
    for (name, calls) in &counted.calls {
        let labels = labels(name);
        for (code, count) in &calls.ended {
            let _ = writeln!(out, "kvarts_calls_total{{{labels},code=\"{code}\"}} {count}");
        }
    }
    head(
        out,
        "kvarts_call_bytes_total",
        "counter",
        "Bytes of blocks in calls, by direction: in (puts) or out (reads).",
    );
    for (name, calls) in &counted.calls {
        let labels = labels(name);
        for (direction, bytes) in [("in", calls.bytes_in), ("out", calls.bytes_out)] {
            let _ = writeln!(out, "kvarts_call_bytes_total{{{labels},direction=\"{direction}\"}} {bytes}");
        }
    }
}

fn times(out: &mut String, counted: &Counted) {
    let help = "Duration of calls in seconds, from their admission until their answer was sent.";
    head(out, "kvarts_call_seconds", "histogram", help);
    for ((path, method, class), took) in &counted.took {
        let labels = format!("path=\"{path}\",method=\"{method}\",class=\"{class}\"");
        histogram(out, "kvarts_call_seconds", &labels, took);
    }
    let help = "Time to the first layer of layer-by-layer reads, in seconds: from the admission of the read until the first layer was sent to the connection, or was complete in the memory of the local client. After this time an engine can begin to compute.";
    head(out, "kvarts_first_layer_seconds", "histogram", help);
    for ((path, class), took) in &counted.first_layer {
        histogram(out, "kvarts_first_layer_seconds", &format!("path=\"{path}\",class=\"{class}\""), took);
    }
}

fn histogram(out: &mut String, name: &str, labels: &str, took: &Histogram) {
    let mut total = 0;
    for (bound, count) in took.cumulative() {
        let bound = bound.map_or("+Inf".to_owned(), |bound| bound.to_string());
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
        total = count;
    }
    let _ = writeln!(out, "{name}_sum{{{labels}}} {}\n{name}_count{{{labels}}} {total}", took.sum());
}

fn usage(out: &mut String, counted: &Counted) {
    let mut family = |name: &str, help: &str, told: &dyn Fn(&Usage) -> Vec<(String, u64)>| {
        head(out, name, "counter", help);
        for (tenant, model, usage) in counted.usages.each() {
            for (more, count) in told(usage) {
                let (tenant, model) = (Value(tenant), Value(model));
                let _ = writeln!(out, "{name}{{tenant=\"{tenant}\",model=\"{model}\"{more}}} {count}");
            }
        }
    };
    let help = "Blocks looked up by match and exists, by result: here, pending (being put), or the reason of absence: evicted, expired, deleted, out_of_service (damaged), never_stored (according to this server's records), cut_off (stored, but an earlier block of the prefix is missing), unregistered (no model of that name was registered since the start). The hit ratio is the rate of found=\"here\" divided by the rate of all results. After the first 32 models of a tenant, further models have model=\"other\"; after the first 256 tenants, further tenants have tenant=\"other\".";
    family("kvarts_lookup_blocks_total", help, &|usage| {
        // Look-ups without a model have a name of their own: of models there are none.
        let told =
            usage.lookups.named().into_iter().filter(|(what, count)| *count > 0 || *what != "unregistered");
        told.map(|(what, count)| (format!(",found=\"{what}\""), count)).collect()
    });
    let help = "Complete and verified blocks that reads delivered, by tenant and model as in kvarts_lookup_blocks_total.";
    family("kvarts_blocks_delivered_total", help, &|usage| vec![(String::new(), usage.delivered)]);
    let help = "Blocks that reads requested but did not receive, by reason. REASON_NOT_HERE: the block was never stored, or was evicted before the read (to prevent the eviction, take a lease with the match). Blocks that look-ups did not find are counted in kvarts_lookup_blocks_total.";
    family("kvarts_blocks_missed_total", help, &|usage| {
        usage.missed.iter().map(|(reason, count)| (format!(",reason=\"{reason}\""), *count)).collect()
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvarts_contract::api::Missing;

    use super::*;
    use crate::counters::{Ended, Lookup, Metrics};

    #[test]
    fn a_hit_ratio_by_tenant_and_model_can_be_made() {
        let metrics = Metrics::default();
        let missing = Missing { evicted: 4, never_stored: 6, ..Missing::default() };
        metrics.looked_up("red \"team\"", "m", Lookup { here: 3, pending: 1, missing, unregistered: 0 });
        metrics.looked_up("red \"team\"", "m", Lookup { here: 2, ..Lookup::default() });
        metrics.looked_up_unregistered("red \"team\"", 9);
        metrics.read_ended("blue", "n", 7, [("REASON_DIGEST", 2)].into());
        let mut out = String::new();
        calls(&mut out, &metrics.lock());
        for line in [
            "kvarts_lookup_blocks_total{tenant=\"red \\\"team\\\"\",model=\"m\",found=\"here\"} 5",
            "kvarts_lookup_blocks_total{tenant=\"red \\\"team\\\"\",model=\"m\",found=\"evicted\"} 4",
            "kvarts_lookup_blocks_total{tenant=\"red \\\"team\\\"\",model=\"m\",found=\"never_stored\"} 6",
            "kvarts_lookup_blocks_total{tenant=\"red \\\"team\\\"\",model=\"unregistered\",found=\"unregistered\"} 9",
            "kvarts_blocks_delivered_total{tenant=\"blue\",model=\"n\"} 7",
            "kvarts_blocks_missed_total{tenant=\"blue\",model=\"n\",reason=\"REASON_DIGEST\"} 2",
        ] {
            assert!(out.lines().any(|told| told == line), "{line} is not in\n{out}");
        }
    }

    #[test]
    fn times_are_told_without_tenants_and_calls_with_them() {
        let metrics = Metrics::default();
        for tenant in ["a", "b"] {
            let name = CallName {
                path: "grpc",
                method: "get_layers",
                class: "foreground",
                tenant: tenant.to_owned(),
            };
            let first_layer = Some(Duration::from_micros(100));
            metrics.call_began("get_layers");
            let took = Duration::from_millis(1);
            metrics.call_ended(name, Ended { code: "OK", took, first_layer, bytes_in: 0, bytes_out: 9 });
        }
        let mut out = String::new();
        calls(&mut out, &metrics.lock());
        let of = "path=\"grpc\",method=\"get_layers\",class=\"foreground\"";
        for line in [
            format!("kvarts_calls_total{{{of},tenant=\"a\",code=\"OK\"}} 1"),
            format!("kvarts_call_bytes_total{{{of},tenant=\"b\",direction=\"out\"}} 9"),
            format!("kvarts_call_seconds_count{{{of}}} 2"),
            "kvarts_first_layer_seconds_bucket{path=\"grpc\",class=\"foreground\",le=\"0.000064\"} 0"
                .to_owned(),
            "kvarts_first_layer_seconds_bucket{path=\"grpc\",class=\"foreground\",le=\"0.000128\"} 2"
                .to_owned(),
            "kvarts_first_layer_seconds_count{path=\"grpc\",class=\"foreground\"} 2".to_owned(),
        ] {
            assert!(out.lines().any(|told| told == line), "{line} is not in\n{out}");
        }
    }
}
