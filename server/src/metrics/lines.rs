//! Lines as Prometheus reads them.

use std::fmt::{self, Write};

/// A label's value: quotes, backslashes and line ends are escaped.
pub(super) struct Value<'a>(pub(super) &'a str);

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

pub(super) fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

pub(super) fn one(out: &mut String, name: &str, kind: &str, help: &str, value: impl fmt::Display) {
    head(out, name, kind, help);
    let _ = writeln!(out, "{name} {value}");
}
