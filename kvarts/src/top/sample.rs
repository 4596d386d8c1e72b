//! What a server's metrics say at one moment: the text that Prometheus reads, as numbers by name and labels.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::metrics_address::{ask, strange};

/// Values of one moment, each under its name.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Sample(BTreeMap<String, Vec<Series>>);

/// One value and what it is of.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Series {
    labels: BTreeMap<String, String>,
    pub(super) value: f64,
}

impl Series {
    /// The value of a label; empty if there is none.
    pub(super) fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

impl Sample {
    /// Asks a server.
    pub(super) fn fetch(address: SocketAddr) -> Result<Self, String> {
        let answer = ask(address, "/metrics")?;
        if !answer.is("200") {
            return Err(strange(address, "/metrics", &answer));
        }
        let sample = Self::parse(&answer.body);
        if sample.0.contains_key("kvarts_build_info") {
            Ok(sample)
        } else {
            Err(format!("http://{address}/metrics is not the metrics page of Kvarts"))
        }
    }

    /// Reads the text; a line that is none of a value is passed over.
    pub(super) fn parse(text: &str) -> Self {
        let mut all = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, series)) = parse_line(line) {
                all.0.entry(name.to_owned()).or_default().push(series);
            }
        }
        all
    }

    /// All values of a name.
    pub(super) fn all(&self, name: &str) -> &[Series] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// The sum of the values of a name of which `these` are taken.
    pub(super) fn sum(&self, name: &str, these: impl Fn(&Series) -> bool) -> f64 {
        self.all(name).iter().filter(|series| these(series)).map(|series| series.value).sum()
    }

    /// The sum of all values of a name.
    pub(super) fn total(&self, name: &str) -> f64 {
        self.sum(name, |_| true)
    }

    /// The values of a label of a name, in their order, each once.
    pub(super) fn labels(&self, name: &str, label: &str) -> Vec<String> {
        let mut all: Vec<String> =
            self.all(name).iter().map(|series| series.label(label).to_owned()).collect();
        all.sort();
        all.dedup();
        all
    }
}

fn parse_line(line: &str) -> Option<(&str, Series)> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, value) = match rest.strip_prefix('{') {
        Some(rest) => parse_labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    let value = value.split_whitespace().next()?.parse().ok()?;
    Some((name, Series { labels, value }))
}

/// The labels up to the closing brace, and what stands behind it.
fn parse_labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut letters = quoted.char_indices();
        loop {
            match letters.next()? {
                (_, '\\') => match letters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (at, '"') => {
                    rest = quoted.get(at + 1..)?;
                    break;
                }
                (_, other) => value.push(other),
            }
        }
        labels.insert(name.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_name_and_labels() {
        let text = "# HELP a What.\n# TYPE a counter\na{x=\"1\",y=\"a\\\"b\\\\c\\nd\"} 2\na{x=\"2\"} 3.5\nb 7\nc NaN\nbroken{x=\"\nd{} 1\n";
        let sample = Sample::parse(text);
        assert_eq!(sample.total("a"), 5.5);
        assert_eq!(sample.sum("a", |series| series.label("x") == "2"), 3.5);
        assert_eq!(sample.all("a")[0].label("y"), "a\"b\\c\nd");
        assert_eq!(sample.total("b"), 7.0);
        assert_eq!(sample.total("d"), 1.0);
        assert_eq!(sample.total("absent"), 0.0);
        assert!(sample.all("broken").is_empty());
        assert_eq!(sample.labels("a", "x"), ["1", "2"]);
    }

    #[test]
    fn no_text_makes_it_fail() {
        for text in [
            "",
            "{",
            "a",
            "a{",
            "a{x",
            "a{x=",
            "a{x=\"",
            "a{x=\"\\",
            "a{}",
            "a{,,}",
            "a b",
            "\u{0}",
            "\u{e4}{\u{f6}=\"\u{fc}\"} 1",
        ] {
            let _ = Sample::parse(text);
        }
    }
}
