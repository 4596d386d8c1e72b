//! What a benchmark's figures mean, in words: whether each that has a bar lies where it must, and what to do if not.
//!
//! A figure is judged as far as the run can tell it from its bar. It may be anywhere in its interval, and a control (one contestant
//! against itself) says how far a ratio strays in this run for no reason: where the bar lies in reach of either, the figure is
//! undecided, neither met nor missed.

mod bars;

use serde_json::{Map, Value, json};

use super::digits::digits;
use bars::{Bar, Bound};

/// What is said of one figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    /// It lies where it must.
    Met,
    /// It does not.
    Missed,
    /// This run does not say.
    Undecided,
    /// There is no bar.
    Told,
}

impl Word {
    fn name(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "MISSED",
            Self::Undecided => "undecided",
            Self::Told => "told",
        }
    }
}

/// A figure of a report, and what is said of it.
struct Judged {
    bar: &'static Bar,
    value: f64,
    /// Where it may be.
    reach: [f64; 2],
    word: Word,
}

/// What is said of a report.
pub(super) struct Verdict {
    /// For programs.
    word: &'static str,
    /// The same for people.
    pub(super) text: String,
    judged: Vec<Judged>,
}

fn pair(value: &Value) -> Option<[f64; 2]> {
    Some([value.get(0)?.as_f64()?, value.get(1)?.as_f64()?])
}

/// The interval of a figure; of one that was measured once it is the figure.
fn interval(report: &Map<String, Value>, figure: &str, value: f64) -> [f64; 2] {
    report.get(&format!("{figure}_interval")).and_then(pair).unwrap_or([value, value])
}

/// How far the controls whose names begin so stray from one, at most.
fn stray(report: &Map<String, Value>, control: &str) -> f64 {
    let controls = report
        .iter()
        .filter(|(name, _)| !control.is_empty() && name.starts_with(control) && !name.ends_with("_interval"));
    let ends = controls.filter_map(|(name, value)| Some(interval(report, name, value.as_f64()?)));
    ends.flatten().map(|end| (end - 1.0).abs()).fold(0.0, f64::max)
}

impl Judged {
    fn of(bar: &'static Bar, report: &Map<String, Value>) -> Option<Self> {
        // A figure that is no number was not measured, and says nothing.
        let value = report.get(bar.figure)?.as_f64().unwrap_or(f64::NAN);
        let ([low, high], stray) = (interval(report, bar.figure, value), stray(report, bar.control));
        let reach = [low.min(value * (1.0 - stray)), high.max(value * (1.0 + stray))];
        let [low, high] = reach;
        let word = match bar.bound {
            None => Word::Told,
            Some(Bound::Least(bound)) if low >= bound => Word::Met,
            Some(Bound::Least(bound)) if high < bound => Word::Missed,
            Some(Bound::Most(bound)) if high <= bound => Word::Met,
            Some(Bound::Most(bound)) if low > bound => Word::Missed,
            Some(_) => Word::Undecided,
        };
        Some(Self { bar, value, reach, word })
    }

    fn must(&self) -> String {
        match self.bar.bound {
            Some(Bound::Least(bound)) => format!("at least {}", digits(bound)),
            Some(Bound::Most(bound)) => format!("at most {}", digits(bound)),
            None => "anything".to_owned(),
        }
    }

    /// The figure, and where it may be if that is not the figure alone.
    fn shown(&self) -> String {
        let [low, high] = self.reach;
        match low < high {
            true => format!("{} ({} to {})", digits(self.value), digits(low), digits(high)),
            false => digits(self.value),
        }
    }

    fn line(&self) -> String {
        let Self { bar, word, .. } = self;
        format!("{}: {} {}, must be {}: {}", word.name(), bar.figure, self.shown(), self.must(), bar.what)
    }

    fn json(&self) -> Value {
        json!({
            "figure": self.bar.figure,
            "value": self.value,
            "reach": self.reach,
            "must": self.must(),
            "what": self.bar.what,
            "verdict": self.word.name(),
        })
    }
}

impl Verdict {
    /// The verdict of a report.
    pub(super) fn of(report: &Map<String, Value>) -> Self {
        let bench = report.get("bench").and_then(Value::as_str).unwrap_or_default();
        let judged: Vec<Judged> = bars::of(bench).iter().filter_map(|bar| Judged::of(bar, report)).collect();
        let is_quotable = report.get("quotable") != Some(&Value::Bool(false));
        let (word, text) = match cfg!(debug_assertions) {
            true => (
                "debug-build",
                "the figures of a debug build are meaningless: build with --release".to_owned(),
            ),
            false => said(&judged, is_quotable),
        };
        Self { word, text, judged }
    }

    /// A line for each figure.
    pub(super) fn lines(&self) -> impl Iterator<Item = String> + '_ {
        self.judged.iter().map(Judged::line)
    }

    /// The same for programs: its fields in a report.
    pub(super) fn write(&self, report: &mut Map<String, Value>) {
        report.insert("verdicts".to_owned(), self.judged.iter().map(Judged::json).collect());
        report.insert("verdict".to_owned(), json!({ "word": self.word, "text": self.text }));
    }
}

/// The word of a run, and its text.
fn said(judged: &[Judged], is_quotable: bool) -> (&'static str, String) {
    if !is_quotable {
        let text = "noisy run: a control, the ratio of a program to itself, differs from 1 by more than 5%; \
            repeat on an idle machine";
        return ("noisy", text.to_owned());
    }
    let some = |word: Word| judged.iter().filter(move |one| one.word == word);
    let told = |word: Word| -> String {
        let texts = some(word)
            .map(|one| format!("{} is {}, but {} is expected", one.bar.what, one.shown(), one.must()));
        texts.collect::<Vec<_>>().join("; ")
    };
    let [met, missed, undecided] = [Word::Met, Word::Missed, Word::Undecided].map(|word| some(word).count());
    match (met, missed, undecided) {
        (0, 0, 0) => ("none", "this benchmark has no expected figures: compare two runs".to_owned()),
        (_, 0, 0) => ("as-expected", format!("as expected: {}", told(Word::Met))),
        (_, 0, _) => (
            "undecided",
            format!(
                "undecided, because the expected bound lies within the noise of this run: {}; repeat on an idle \
                machine, with more rounds",
                told(Word::Undecided)
            ),
        ),
        _ => (
            "worse",
            format!(
                "worse than expected: {}; docs/PERFORMANCE.md explains the limits of the figures",
                told(Word::Missed)
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said_of(bench: &str, mut figures: Value) -> (&'static str, String) {
        let report = figures.as_object_mut().unwrap();
        report.insert("bench".to_owned(), json!(bench));
        let is_quotable = report.get("quotable") != Some(&Value::Bool(false));
        said(&Verdict::of(report).judged, is_quotable)
    }

    fn words(bench: &str, mut figures: Value) -> Vec<&'static str> {
        let report = figures.as_object_mut().unwrap();
        report.insert("bench".to_owned(), json!(bench));
        Verdict::of(report).judged.iter().map(|one| one.word.name()).collect()
    }

    #[test]
    fn a_run_is_as_expected_worse_noisy_or_of_no_expectation() {
        let (word, text) = said_of("layers", json!({"ratio": 0.97, "quotable": true}));
        assert_eq!(word, "as-expected");
        assert!(text.contains("is 0.970, but at least 0.900 is expected"), "{text}");
        assert_eq!(said_of("layers", json!({"ratio": 0.5})).0, "worse");
        assert_eq!(said_of("match", json!({"ratio": 0.5})).0, "as-expected");
        assert_eq!(said_of("layers", json!({"ratio": 0.97, "quotable": false})).0, "noisy");
        assert_eq!(said_of("times", json!({"latency_ms": 1.0})).0, "none");
        assert_eq!(
            said_of("cold", json!({"read_ratio": 0.1})).0,
            "none",
            "a figure without a bound is not judged"
        );
        let (word, text) = said_of("serve", json!({"grpc_hot_ratio": 0.95, "local_ratio": 0.5}));
        assert!(word == "worse" && text.contains("local reads") && !text.contains("gRPC"), "{text}");
    }

    #[test]
    fn a_bar_inside_the_interval_is_undecided() {
        let at = |value: f64, low: f64, high: f64| {
            words("put", json!({"ratio": value, "ratio_interval": [low, high]}))[0]
        };
        // At least 0.84.
        assert_eq!(at(0.88, 0.85, 0.91), "met");
        assert_eq!(at(0.88, 0.84, 0.91), "met", "all of it may be the bar itself");
        assert_eq!(at(0.88, 0.83, 0.91), "undecided");
        assert_eq!(at(0.82, 0.80, 0.84), "undecided");
        assert_eq!(at(0.82, 0.80, 0.83), "MISSED");
        let at = |value: f64, low: f64, high: f64| {
            words("dual", json!({"own_p99_ratio": value, "own_p99_ratio_interval": [low, high]}))[0]
        };
        // At most 1.33.
        assert_eq!(at(1.2, 1.1, 1.33), "met");
        assert_eq!(at(1.2, 1.1, 1.34), "undecided");
        assert_eq!(at(1.5, 1.3, 1.6), "undecided");
        assert_eq!(at(1.5, 1.33, 1.6), "undecided");
        assert_eq!(at(1.5, 1.4, 1.6), "MISSED");
    }

    #[test]
    fn a_bar_within_what_a_control_moves_by_is_undecided_whatever_the_interval() {
        let figures = |value: f64, control: [f64; 2]| {
            json!({
                "cpu_over_checking": value, "cpu_over_checking_interval": [value - 0.01, value + 0.01],
                "cpu_control": 1.0, "cpu_control_interval": control,
            })
        };
        // At most 1.25.
        for (value, control, word) in [
            (1.29, [0.99, 1.01], "MISSED"),
            (1.29, [0.96, 1.01], "undecided"),
            (1.29, [1.0, 1.04], "undecided"),
            (1.20, [0.97, 1.03], "met"),
            (1.20, [0.94, 1.0], "undecided"),
            (1.10, [0.94, 1.06], "met"),
        ] {
            assert_eq!(words("layers", figures(value, control)), [word], "{value} {control:?}");
        }
        // A figure that was measured once, with the widest of several controls.
        let gpu = |control: f64| {
            words("gpu", json!({"pipeline_ratio": 0.98, "control_a": 1.0, "control_b": control}))[0]
        };
        assert_eq!((gpu(1.005), gpu(0.98)), ("met", "undecided"));
        // A control of another figure says nothing of this one.
        let other = json!({"cpu_over_checking": 1.2, "control": 0.5, "quotable": false});
        assert_eq!(words("layers", other), ["met"]);
    }

    #[test]
    fn a_run_with_an_undecided_figure_is_undecided_unless_another_one_is_missed() {
        let ratio = |value: f64| json!({"ratio": value, "ratio_interval": [value - 0.05, value + 0.05], "cpu_over_checking": 1.2});
        assert_eq!(said_of("layers", ratio(0.97)).0, "as-expected");
        let (word, text) = said_of("layers", ratio(0.92));
        assert_eq!(word, "undecided");
        assert!(
            text.contains("0.920 (0.870 to 0.970), but at least 0.900") && !text.contains("1.2"),
            "{text}"
        );
        let (word, text) = said_of(
            "layers",
            json!({"ratio": 0.92, "ratio_interval": [0.87, 0.97], "cpu_over_checking": 1.3}),
        );
        assert!(word == "worse" && text.contains("digests is 1.300") && !text.contains("0.92"), "{text}");
    }

    #[test]
    fn each_figure_has_a_line_and_an_object_and_one_that_was_not_measured_has_none() {
        let report = json!({"bench": "cold", "restore_ratio": 0.84, "spill_p99_ratio": 1.2,
            "fetch_ratio": 0.1, "trouble_p99_ratio": null});
        let mut report = report.as_object().unwrap().clone();
        let verdict = Verdict::of(&report);
        let lines: Vec<String> = verdict.lines().collect();
        assert!(
            lines[0].starts_with("MISSED: restore_ratio 0.840, must be at least 0.850: speed"),
            "{lines:?}"
        );
        verdict.write(&mut report);
        let rows = report["verdicts"].as_array().unwrap();
        let words: Vec<_> = rows.iter().map(|row| row["verdict"].as_str().unwrap()).collect();
        assert_eq!(words, ["MISSED", "told", "met", "undecided"]);
        assert_eq!((&rows[0]["reach"], &rows[0]["must"]), (&json!([0.84, 0.84]), &json!("at least 0.850")));
    }

    #[test]
    fn the_figures_of_a_debug_build_say_nothing() {
        let report = json!({"bench": "layers", "ratio": 1.0});
        let word = Verdict::of(report.as_object().unwrap()).word;
        assert_eq!(word, if cfg!(debug_assertions) { "debug-build" } else { "as-expected" });
    }
}
