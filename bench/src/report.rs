//! What a benchmark found, as one JSON object or as a table.

use std::io::Write;

use serde_json::{Map, Value, json};

use super::digits::digits;
use super::pairs::{Summary, quotable};
use super::verdict::Verdict;
use kvarts_terminal::Failure;
use kvarts_terminal::{Align, Table};

/// Figures in the order in which they are shown.
#[derive(Debug, Default)]
pub(crate) struct Report {
    json: Map<String, Value>,
    lines: Vec<[String; 3]>,
    notes: Vec<String>,
}

impl Report {
    /// A report of one subcommand.
    pub(crate) fn new(bench: &str) -> Self {
        let mut report = Self::default();
        report.json.insert("bench".to_owned(), json!(bench));
        report
    }

    /// Something that is known before anything is measured.
    pub(crate) fn fact(&mut self, name: &str, value: impl Into<Value>) {
        let value = value.into();
        let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        self.lines.push([name.to_owned(), shown, String::new()]);
        self.json.insert(name.to_owned(), value);
    }

    /// A number that was measured once.
    pub(crate) fn number(&mut self, name: &str, value: f64) {
        self.lines.push([name.to_owned(), digits(value), String::new()]);
        self.json.insert(name.to_owned(), json!(value));
    }

    /// A median under its name, and its interval under the name with `_interval`.
    pub(super) fn median(&mut self, name: &str, value: Summary) {
        let interval = format!("{} to {}", digits(value.low), digits(value.high));
        self.lines.push([name.to_owned(), digits(value.median), interval]);
        self.json.insert(name.to_owned(), json!(value.median));
        self.json.insert(format!("{name}_interval"), json!([value.low, value.high]));
    }

    /// The control of what stands above it. Under this name alone it decides whether the run may be quoted.
    pub(super) fn control(&mut self, name: &str, value: Summary) {
        self.median(name, value);
        let so_far = self.json.get("quotable").and_then(Value::as_bool).unwrap_or(true);
        self.json.insert("quotable".to_owned(), json!(so_far && quotable(&value)));
    }

    /// Rows of a table of their own, shown as they are given.
    pub(crate) fn rows(&mut self, name: &str, rows: Vec<Value>) {
        self.json.insert(name.to_owned(), Value::Array(rows));
    }

    /// A line for people.
    pub(crate) fn note(&mut self, line: impl Into<String>) {
        self.notes.push(line.into());
    }

    /// Writes it.
    pub(crate) fn write(mut self, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
        let verdict = Verdict::of(&self.json);
        if json {
            verdict.write(&mut self.json);
            self.json.insert("notes".to_owned(), json!(self.notes));
            serde_json::to_writer_pretty(&mut *out, &self.json).map_err(std::io::Error::from)?;
            return Ok(writeln!(out)?);
        }
        let columns = [("FIGURE", Align::Left), ("VALUE", Align::Right), ("95% INTERVAL", Align::Left)];
        let mut table = Table::new(&columns);
        self.lines.into_iter().for_each(|line| table.row(line));
        write!(out, "{table}")?;
        for line in self.notes.into_iter().chain(verdict.lines()) {
            writeln!(out, "{line}")?;
        }
        writeln!(out, "Verdict: {}", verdict.text)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(median: f64) -> Summary {
        Summary { median, low: median - 0.1, high: median + 0.1 }
    }

    fn json_of(report: Report) -> Value {
        let mut out = Vec::new();
        report.write(true, &mut out).unwrap();
        serde_json::from_slice(&out).unwrap()
    }

    #[test]
    fn one_bad_control_of_several_makes_a_run_unfit_to_quote() {
        let mut report = Report::new("layers");
        report.median("ratio", at(0.5));
        report.control("control", at(1.0));
        assert_eq!(json_of(report)["quotable"], true);
        let mut report = Report::new("put");
        report.control("control", at(1.2));
        report.control("control_fresh", at(1.0));
        let found = json_of(report);
        assert_eq!(found["quotable"], false);
        let word = found["verdict"]["word"].as_str().unwrap();
        assert!(["noisy", "debug-build"].contains(&word), "{found}");
    }

    #[test]
    fn a_median_has_its_interval_beside_it() {
        let mut report = Report::new("layers");
        report.median("ratio", at(0.5));
        let mut text = Vec::new();
        report.write(false, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("0.500") && text.contains("0.400 to 0.600"), "{text}");
        assert!(text.lines().last().unwrap().starts_with("Verdict: "), "{text}");
    }
}
