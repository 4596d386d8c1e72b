//! What the figures must be, and whether they are.

use serde_json::json;

use crate::digits::digits;
use crate::report::Report;

/// How much a figure must be.
#[derive(Clone, Copy, Debug)]
enum Bound {
    Least(f64),
    Most(f64),
}

/// A figure of the report, what it is in words, and how much it must be.
struct Must {
    figure: &'static str,
    what: &'static str,
    bound: Bound,
}

const fn least(figure: &'static str, what: &'static str, bound: f64) -> Must {
    Must { figure, what, bound: Bound::Least(bound) }
}

const fn most(figure: &'static str, what: &'static str, bound: f64) -> Must {
    Must { figure, what, bound: Bound::Most(bound) }
}

const MUSTS: [Must; 17] = [
    least("equal_ratio", "two peers against the better one", 1.85),
    most("equal_first_layer_ratio", "their first layer against the better one's", 1.15),
    least("three_to_one_sum_ratio", "peers of three to one against the sum of both", 0.90),
    most("three_to_one_first_layer_ratio", "their first layer against the better one's", 1.15),
    least("dual_ratio", "own disk and a peer against the better one", 1.85),
    most("dual_first_layer_ratio", "their first layer against the better one's", 1.15),
    most(
        "collapse_ratio",
        "a path that collapses to a tenth in the middle, against the other one alone",
        1.25,
    ),
    most("own_p99_ratio", "99th percentile of own reads while a peer is served", 1.33),
    most("failover_longest_pause_s", "seconds without a layer after a kill -9", 1.0),
    most("failover_errors", "blocks that did not come because of it", 0.0),
    least("peer_ratio", "the unlimited lane against a bare pump", 0.85),
    most("peer_cpu_ratio", "its processor time, digests apart, against the pump's", 1.30),
    least("peer_large_ratio", "the same in pieces of 4 MiB", 0.85),
    most("peer_large_cpu_ratio", "the same in pieces of 4 MiB", 1.30),
    most("lookup_round_trips", "a look-up of 4,096 keys over 8 nodes, in round trips of bare sockets", 3.0),
    most("announced_s_per_million", "seconds in which a million blocks are announced", 20.0),
    most("directory_bytes_per_entry", "bytes of the directory for each copy", 48.0),
];

/// Says of every figure that was measured whether it is what it must be.
pub(super) fn judge(report: &mut Report) {
    let mut rows = Vec::new();
    for Must { figure, what, bound } in MUSTS {
        let Some(value) = report.value(figure) else { continue };
        let (is_met, limit) = match bound {
            Bound::Least(bound) => (value >= bound, format!("at least {}", digits(bound))),
            Bound::Most(bound) => (value <= bound, format!("at most {}", digits(bound))),
        };
        let verdict = if is_met { "met" } else { "MISSED" };
        report.note(format!("{verdict}: {figure} {} (must be {limit}): {what}", digits(value)));
        rows.push(json!({ "figure": figure, "value": value, "must": limit, "verdict": verdict }));
    }
    report.rows("verdicts", rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_judged_by_its_bound_and_one_that_was_not_measured_is_not() {
        let mut report = Report::new("dual");
        report.number("dual_ratio", 1.84);
        report.number("own_p99_ratio", 1.33);
        judge(&mut report);
        let mut out = Vec::new();
        report.write(true, &mut out).unwrap();
        let found: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let rows = found["verdicts"].as_array().unwrap();
        let verdicts: Vec<_> = rows.iter().map(|row| row["verdict"].as_str().unwrap()).collect();
        assert_eq!(verdicts, ["MISSED", "met"]);
        assert!(found["notes"][0].as_str().unwrap().contains("at least 1.85"));
    }
}
