//! What the figures must be, and what each of them is.

use serde_json::json;

use crate::digits::digits;
use crate::report::Report;

/// A figure: what it is in words, the least and the most that it may be.
type Must = (&'static str, &'static str, Option<f64>, Option<f64>);

const MUSTS: [Must; 9] = [
    (
        "restore_ratio",
        "speed of a read by layers until everything has come and is stored, manifest, indexes, digests and content ids included, by that of bare ranged requests for the same bytes",
        Some(0.85),
        None,
    ),
    ("read_ratio", "the same until the reader has everything", None, None),
    ("fetch_ratio", "the same without a reader and without the store: verified and dropped", None, None),
    (
        "put_ratio",
        "speed of puts of the same bytes from memory by that of the bare requests: no restore is stored faster",
        None,
        None,
    ),
    ("over_read", "bytes that were fetched of packs by bytes that were asked for", None, Some(1.125)),
    ("restore_cpu_ratio", "processor time of a restore by that of the bare requests", None, None),
    (
        "spill_p99_ratio",
        "99th percentile of own reads beside a spill at the whole rate that it may have (--spill-mib) by the same without",
        None,
        Some(1.2),
    ),
    ("restoring_p99_ratio", "the same beside restores", None, None),
    (
        "trouble_p99_ratio",
        "99th percentile of own reads, beside spills and restores that are wanted, with a bucket that fails, in the worst of five ways, by the same with one that works",
        None,
        Some(1.1),
    ),
];

/// Says of every figure that was measured what it is, and whether it is what it must be.
pub(super) fn judge(report: &mut Report) {
    let mut rows = Vec::new();
    for (figure, what, least, most) in MUSTS {
        let Some(value) = report.value(figure) else { continue };
        let is_met = least.is_none_or(|least| value >= least) && most.is_none_or(|most| value <= most);
        let must = match (least, most) {
            (Some(least), _) => format!("at least {}", digits(least)),
            (None, Some(most)) => format!("at most {}", digits(most)),
            (None, None) => "anything".to_owned(),
        };
        let verdict = match (least.or(most), is_met) {
            (None, _) => "told",
            (Some(_), true) => "met",
            (Some(_), false) => "MISSED",
        };
        report.note(format!("{verdict}: {figure} {} (must be {must}): {what}", digits(value)));
        rows.push(
            json!({ "figure": figure, "value": value, "must": must, "what": what, "verdict": verdict }),
        );
    }
    report.rows("verdicts", rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_met_missed_or_only_told() {
        let mut report = Report::new("cold");
        report.number("restore_ratio", 0.84);
        report.number("spill_p99_ratio", 1.2);
        report.number("fetch_ratio", 0.1);
        judge(&mut report);
        let mut out = Vec::new();
        report.write(true, &mut out).unwrap();
        let found: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let rows = found["verdicts"].as_array().unwrap();
        let verdicts: Vec<_> = rows.iter().map(|row| row["verdict"].as_str().unwrap()).collect();
        assert_eq!(verdicts, ["MISSED", "told", "met"]);
        assert!(found["notes"][0].as_str().unwrap().contains("at least 0.850"));
    }
}
