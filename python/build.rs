//! Takes what classes and their methods guarantee from the stubs, which say it, for `help()`: `stub!("Pages.put")` is the
//! text of that method's docstring there. A name that no stub has does not compile.

#![expect(
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a build script: it stops where a file cannot be read or written"
)]

use std::fmt::Write as _;
use std::{env, fs, path::Path};

const STUBS: [(&str, &str); 2] = [("", "kvarts/__init__.pyi"), ("gpu.", "kvarts/gpu.pyi")];

fn main() {
    let mut arms = String::new();
    for (prefix, stub) in STUBS {
        println!("cargo::rerun-if-changed={stub}");
        let text = fs::read_to_string(stub).expect("a stub can be read");
        for (name, doc) in documented(&text) {
            writeln!(arms, "    (\"{prefix}{name}\") => {{ r###\"{doc}\"### }};")
                .expect("a string takes text");
        }
    }
    let out = env::var_os("OUT_DIR").expect("cargo says where to write");
    let file = Path::new(&out).join("stub.rs");
    fs::write(file, format!("macro_rules! stub {{\n{arms}}}\n")).expect("the macro can be written");
}

/// Docstrings of classes, of what is in them and of functions, by `Class`, `Class.method` and `function`: of several
/// definitions the first that has one.
fn documented(text: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    let (mut class, mut name, mut begun) = ("", None::<String>, true);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let (inner, indent) = (line.trim_start(), line.len() - line.trim_start().len());
        if let Some(rest) = inner.strip_prefix("class ").filter(|_| indent == 0) {
            class = identifier(rest);
            (name, begun) = (Some(class.to_owned()), true);
        } else if let Some(rest) = inner.strip_prefix("def ").filter(|_| indent == 4) {
            (name, begun) = (Some(format!("{class}.{}", identifier(rest))), false);
        } else if indent == 0 && inner.starts_with("def ") {
            (name, begun) = (Some(identifier(inner.trim_start_matches("def ")).to_owned()), false);
        }
        // A signature may have several lines.
        begun |= line.ends_with(':');
        let (Some(of), Some(first)) = (&name, inner.strip_prefix("\"\"\"").filter(|_| begun)) else {
            continue;
        };
        let mut doc = first.to_owned();
        while !doc.ends_with("\"\"\"") {
            let next = lines.next().expect("a docstring has an end");
            doc.push('\n');
            doc.push_str(next.get(indent..).unwrap_or_default());
        }
        doc.truncate(doc.len() - 3);
        if !found.iter().any(|(other, _)| other == of) {
            found.push((of.clone(), doc.trim_end().to_owned()));
        }
        name = None;
    }
    found
}

fn identifier(text: &str) -> &str {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or_default()
}
