//! The tables of docs/reference/json.md, and outputs of the program that are compared with them field by field.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// What stands in backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Of each command its fields, and whether they are always there.
pub(crate) type Tables = BTreeMap<String, BTreeMap<String, bool>>;

/// Where the tables begin that need no server with blocks, or more than one.
const APART: &str = "\n## Nodes, buckets and measurements\n";

/// The page's tables: those of a server, its store and this machine; and the others.
pub(crate) fn documented() -> [Tables; 2] {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/json.md");
    let text = std::fs::read_to_string(path).unwrap();
    let compared = text.split("\n## Others").next().unwrap();
    let (first, second) = compared.split_once(APART).expect("the page has the heading");
    [tables(first), tables(second)]
}

fn tables(text: &str) -> Tables {
    let mut all = Tables::new();
    let mut command = None;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("### ") {
            command = Some(name.trim_matches('`').to_owned());
        } else if let (Some(command), Some(row)) = (&command, line.strip_prefix("| `")) {
            let (fields, meaning) = row.split_once(" | ").unwrap();
            for field in quoted(&format!("`{fields}")) {
                let fields = all.entry(command.clone()).or_default();
                assert!(
                    fields.insert(field.to_owned(), !meaning.starts_with("only ")).is_none(),
                    "{command}: {field} twice"
                );
            }
        }
    }
    all
}

/// The names of all fields of a value, as the page writes them.
fn fields(value: &Value, before: &str, all: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                let here = if before.is_empty() { name.clone() } else { format!("{before}.{name}") };
                all.insert(here.clone());
                fields(value, &here, all);
            }
        }
        Value::Array(list) => {
            for value in list {
                let here = format!("{before}[]");
                all.insert(here.clone());
                fields(value, &here, all);
            }
        }
        _ => {}
    }
}

/// Whether one field of the page is this one of the output, or stands for it: a list or an object is told by its parts, or as a
/// whole, in words.
fn stands_for(page: &str, output: &str) -> bool {
    let within = |outer: &str, inner: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('.') || rest.starts_with('['))
    };
    let whole = page.strip_suffix(".*").unwrap_or(page);
    // Names that are data.
    page == "*"
        || page == output
        || within(page, output)
        || within(output, page)
        || whole == output
        || within(whole, output)
}

/// What differed so far, and which commands were compared.
#[derive(Default)]
pub(crate) struct Compared(Vec<String>, BTreeSet<String>);

impl Compared {
    pub(crate) fn take(&mut self, documented: &Tables, command: &str, output: &Value) {
        self.1.insert(command.to_owned());
        let Some(page) = documented.get(command) else {
            return self.0.push(format!("{command}: not on the page"));
        };
        let mut told = BTreeSet::new();
        fields(output, "", &mut told);
        for field in &told {
            if !page.keys().any(|known| stands_for(known, field)) {
                self.0.push(format!("{command}: {field} is not on the page"));
            }
        }
        for (known, _) in page.iter().filter(|(known, is_always)| **is_always && *known != "*") {
            let name = known.strip_suffix(".*").unwrap_or(known);
            // Elements of an empty list, and parts of what is null, cannot be seen.
            let seen = told.iter().any(|field| field == name)
                || told.iter().any(|field| is_empty_above(field, name, output));
            if !seen {
                self.0.push(format!("{command}: {known} is on the page and not in {output}"));
            }
        }
    }

    /// Everything is as it is documented, and every table was compared.
    pub(crate) fn expect_all(self, documented: Tables) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
        let tables: BTreeSet<String> = documented.into_keys().collect();
        assert_eq!(self.1, tables, "a table that no output was compared with");
    }
}

/// Whether the field is a list without elements above this name.
fn is_empty_above(field: &str, name: &str, output: &Value) -> bool {
    name.strip_prefix(field).is_some_and(|rest| rest.starts_with("[]"))
        && !field.contains("[]")
        && field
            .split('.')
            .try_fold(output, |value, part| value.get(part))
            .is_some_and(|value| value.as_array().is_some_and(Vec::is_empty))
}
