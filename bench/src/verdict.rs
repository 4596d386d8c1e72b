//! What a benchmark's figures mean, in words: whether they are what was measured before (docs/PERFORMANCE.md), or what to do.

use serde_json::{Map, Value, json};

use super::digits::digits;

/// What is expected of a figure.
enum Expected {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

use Expected::{AtLeast, AtMost};

/// By benchmark: the figure that is judged, what it is, and what is expected of it: the worst of the runs that are written down.
const FIGURES: &[(&str, &str, &str, Expected)] = &[
    ("layers", "ratio", "speed of layer reads with digests, beside a bare loop without", AtLeast(0.9)),
    ("put", "ratio", "speed of durable puts beside bare writes and flushes", AtLeast(0.84)),
    ("match", "ratio", "time of a look-up beside a plain hash map", AtMost(0.7)),
    ("open", "ratio", "time of a start after a crash beside a bare read of the same bytes", AtMost(4.0)),
    (
        "mixed",
        "p99_ratio",
        "99th percentile of layer reads under load beside the same reads alone",
        AtMost(2.6),
    ),
    ("serve", "grpc_hot_ratio", "speed of gRPC reads from memory beside a bare server", AtLeast(0.93)),
    ("serve", "local_ratio", "speed of local reads beside the embedded engine", AtLeast(1.0)),
    ("scale", "evict_cost_ratio", "cost of eviction with a full index beside a small one", AtMost(1.1)),
    ("gpu", "pipeline_ratio", "speed of the layer pipeline beside its bound", AtLeast(0.97)),
    ("encoded", "speed_ratio", "speed of reads of encoded records beside raw ones", AtLeast(0.4)),
    ("churn", "most_on_disk_by_budget", "most bytes on disk beside the budget", AtMost(1.0)),
];

/// The verdict: a word for programs, and its text.
pub(super) fn of(report: &Map<String, Value>) -> (&'static str, String) {
    let bench = report.get("bench").and_then(Value::as_str).unwrap_or_default();
    if cfg!(debug_assertions) {
        return (
            "debug-build",
            "this is a debug build: its figures say nothing; build with --release".to_owned(),
        );
    }
    judged(bench, report)
}

fn judged(bench: &str, report: &Map<String, Value>) -> (&'static str, String) {
    if report.get("quotable") == Some(&Value::Bool(false)) {
        let text = "noisy run: a control, one contestant against itself, is off by more than 5%; repeat on an idle machine";
        return ("noisy", text.to_owned());
    }
    let figures = FIGURES.iter().filter(|(of, ..)| *of == bench);
    let known = figures.filter_map(|(_, name, what, expected)| {
        let value = report.get(*name)?.as_f64()?;
        let (is_met, limit) = match expected {
            AtLeast(limit) => (value >= *limit, format!("at least {}", digits(*limit))),
            AtMost(limit) => (value <= *limit, format!("at most {}", digits(*limit))),
        };
        Some((is_met, format!("{what} is {} ({limit} is expected)", digits(value))))
    });
    let known: Vec<(bool, String)> = known.collect();
    let told = |met: bool| -> String {
        known
            .iter()
            .filter(|(is_met, _)| *is_met == met)
            .map(|(_, text)| text.as_str())
            .collect::<Vec<_>>()
            .join("; ")
    };
    match (known.is_empty(), known.iter().all(|(is_met, _)| *is_met)) {
        (true, _) => ("none", "nothing is expected of this benchmark's figures: compare two runs".to_owned()),
        (false, true) => ("as-expected", format!("as expected: {}", told(true))),
        (false, false) => {
            let text =
                format!("worse than expected: {}; docs/PERFORMANCE.md says what bounds it", told(false));
            ("worse", text)
        }
    }
}

/// The same in a report for programs.
pub(super) fn as_json((word, text): &(&'static str, String)) -> Value {
    json!({ "word": word, "text": text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(bench: &str, figures: Value) -> (&'static str, String) {
        judged(bench, figures.as_object().unwrap())
    }

    #[test]
    fn a_run_is_as_expected_worse_noisy_or_of_no_expectation() {
        let (word, text) = verdict("layers", json!({"ratio": 0.97, "quotable": true}));
        assert_eq!(word, "as-expected");
        assert!(text.contains("0.970 (at least 0.900 is expected)"), "{text}");
        assert_eq!(verdict("layers", json!({"ratio": 0.5})).0, "worse");
        assert_eq!(verdict("match", json!({"ratio": 0.5})).0, "as-expected");
        assert_eq!(verdict("layers", json!({"ratio": 0.97, "quotable": false})).0, "noisy");
        assert_eq!(verdict("times", json!({"latency_ms": 1.0})).0, "none");
        let (word, text) = verdict("serve", json!({"grpc_hot_ratio": 0.95, "local_ratio": 0.5}));
        assert!(word == "worse" && text.contains("local reads") && !text.contains("gRPC"), "{text}");
    }

    #[test]
    fn the_figures_of_a_debug_build_say_nothing() {
        if cfg!(debug_assertions) {
            assert_eq!(of(json!({"bench": "layers", "ratio": 1.0}).as_object().unwrap()).0, "debug-build");
        }
    }
}
