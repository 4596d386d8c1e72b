//! Every dependency has a licence that `deny.toml` allows. Needs no network: it reads what cargo already has.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Whether `expression` (SPDX with AND, OR, WITH and parentheses, or the older slash) can be met by `allowed`.
///
/// Licences are judged from the loosest operator inwards; parentheses are only met around OR, which is how
/// crates use them.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let expression = expression.trim();
    if let Some(parts) = split_outside_parentheses(expression, " AND ") {
        return parts.iter().all(|part| is_allowed(part, allowed));
    }
    if let Some(parts) =
        split_outside_parentheses(expression, " OR ").or_else(|| split_outside_parentheses(expression, "/"))
    {
        return parts.iter().any(|part| is_allowed(part, allowed));
    }
    match expression.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => is_allowed(inner, allowed),
        None => allowed.contains(expression),
    }
}

fn split_outside_parentheses<'a>(text: &'a str, operator: &str) -> Option<Vec<&'a str>> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0usize, 0usize);
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ if depth == 0 && at >= start && text[at..].starts_with(operator) => {
                parts.push(&text[start..at]);
                start = at + operator.len();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    (parts.len() > 1).then_some(parts)
}

#[test]
fn every_dependency_has_an_allowed_licence() {
    let deny: toml::Value =
        toml::from_str(&std::fs::read_to_string(root().join("deny.toml")).unwrap()).unwrap();
    let allowed: BTreeSet<String> = deny["licenses"]["allow"]
        .as_array()
        .unwrap()
        .iter()
        .map(|licence| licence.as_str().unwrap().to_owned())
        .collect();
    let exceptions: BTreeSet<(&str, &str)> = deny["licenses"]["exceptions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry["crate"].as_str().unwrap(), entry["allow"][0].as_str().unwrap()))
        .collect();
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 10);
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none stated");
        let name = package["name"].as_str().unwrap();
        assert!(
            is_allowed(licence, &allowed) || exceptions.contains(&(name, licence)),
            "{name} is under {licence}"
        );
    }
}

#[test]
fn licence_expressions_are_judged_by_their_operators() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "Zlib".to_owned()]);
    for (expression, verdict) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("(GPL-3.0 OR MIT) AND Zlib", true),
        ("(GPL-3.0 OR MIT) AND GPL-2.0", false),
        ("MIT OR GPL-3.0 AND GPL-2.0", false),
    ] {
        assert_eq!(is_allowed(expression, &allowed), verdict, "{expression}");
    }
}
