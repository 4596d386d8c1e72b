//! Writes a model spec as TOML that reads back to an equal spec.

use std::fmt::Write as _;
use std::num::NonZeroU32;

use super::geometry::Role;
use super::{Absence, ModelSpec, Part};

/// The longest sequence of layer kinds that is looked for as a repeated run.
const MAX_PERIOD: usize = 16;

pub(super) fn to_toml(spec: &ModelSpec) -> String {
    let mut out = String::new();
    text(&mut out, "name", &spec.name);
    text(&mut out, "source", &spec.source);
    optional_text(&mut out, "note", &spec.note);
    line(&mut out, format_args!("block_tokens = {}", spec.block_tokens));
    line(&mut out, format_args!("layers = ["));
    for (repeat, kinds) in spec.layer_runs() {
        let of: Vec<String> = kinds.iter().map(|kind| format!("\"{kind}\"")).collect();
        let repeat = if repeat > 1 { format!("repeat = {repeat}, ") } else { String::new() };
        line(&mut out, format_args!("    {{ {repeat}of = [{}] }},", of.join(", ")));
    }
    line(&mut out, format_args!("]\n\n[layer]"));
    for kind in &spec.layer_kinds {
        line(&mut out, format_args!("{} = [{}]", kind.name, names(spec, &kind.parts)));
    }
    if spec.layer_kinds.iter().any(|kind| !kind.reads.is_empty()) {
        line(&mut out, format_args!("\n[reads]"));
    }
    for kind in spec.layer_kinds.iter().filter(|kind| !kind.reads.is_empty()) {
        line(&mut out, format_args!("{} = [{}]", kind.name, names(spec, &kind.reads)));
    }
    spec.parts.iter().for_each(|part| write_part(&mut out, part));
    out
}

fn names(spec: &ModelSpec, parts: &[u16]) -> String {
    let known = parts.iter().filter_map(|&part| spec.parts.get(usize::from(part)));
    known.map(|part| format!("\"{}\"", part.name)).collect::<Vec<_>>().join(", ")
}

fn write_part(out: &mut String, part: &Part) {
    line(out, format_args!("\n[part.{}]", part.name));
    line(out, format_args!("kind = \"{}\"", part.geometry.kind));
    let (role, bytes) = match part.geometry.role {
        Role::Stream { bytes, .. } => ("stream", bytes),
        Role::Page { bytes } => ("page", bytes),
        Role::Window { bytes, .. } => ("window", bytes),
        Role::State { bytes, .. } => ("state", bytes),
    };
    line(out, format_args!("role = \"{role}\""));
    line(out, format_args!("bytes = {bytes}"));
    match part.geometry.role {
        Role::Stream { tokens, .. } if tokens > 1 => line(out, format_args!("per_tokens = {tokens}")),
        Role::Window { tokens, .. } => line(out, format_args!("window_tokens = {tokens}")),
        Role::State { empty_at_multiple_of: Some(tokens), .. } => {
            line(out, format_args!("empty_at_multiple_of = {}", NonZeroU32::get(tokens)));
        }
        _ => {}
    }
    text(out, "dtype", &part.dtype);
    line(out, format_args!("heads = {}", part.geometry.heads));
    if part.geometry.align > 1 {
        line(out, format_args!("align = {}", part.geometry.align));
    }
    if part.geometry.group != part.geometry.role.class().default_group() {
        line(out, format_args!("group = {}", part.geometry.group));
    }
    if let Absence::Recompute { tokens } = part.absence {
        line(out, format_args!("recompute_tokens = {tokens}"));
    }
    optional_text(out, "note", &part.note);
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{text}");
}

fn text(out: &mut String, key: &str, value: &str) {
    line(out, format_args!("{key} = {}", toml::Value::from(value)));
}

fn optional_text(out: &mut String, key: &str, value: &str) {
    if !value.is_empty() {
        text(out, key, value);
    }
}

/// Splits a sequence into runs `(repeat, kinds)`: at each point the period that covers most.
pub(super) fn runs(layers: &[u16]) -> Vec<(usize, &[u16])> {
    let mut runs: Vec<(usize, &[u16])> = Vec::new();
    let mut rest = layers;
    while !rest.is_empty() {
        let mut best = (1usize, rest.get(..1).unwrap_or(rest));
        for period in 1..=MAX_PERIOD {
            let Some(head) = rest.get(..period) else { break };
            let repeat = rest.chunks_exact(period).take_while(|chunk| *chunk == head).count();
            let covers = |(repeat, of): (usize, &[u16])| repeat.saturating_mul(of.len());
            if repeat > 1 && covers((repeat, head)) > covers(best) {
                best = (repeat, head);
            }
        }
        rest = rest.get(best.0.saturating_mul(best.1.len())..).unwrap_or_default();
        runs.push(best);
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::runs;
    use proptest::prelude::*;

    #[test]
    fn a_repeated_pattern_is_one_run() {
        let layers: Vec<u16> = [0, 0].into_iter().chain([1, 0].repeat(29)).chain([1]).collect();
        assert_eq!(runs(&layers), [(2, &[0][..]), (29, &[1, 0]), (1, &[1])]);
        let layers: Vec<u16> = [0, 0, 0, 0, 0, 1].repeat(10).into_iter().chain([0, 0]).collect();
        assert_eq!(runs(&layers), [(10, &[0, 0, 0, 0, 0, 1][..]), (2, &[0])]);
    }

    proptest! {
        #[test]
        fn runs_unroll_to_the_same_layers(layers in prop::collection::vec(0u16..3, 0..80)) {
            let unrolled: Vec<u16> = runs(&layers).into_iter().flat_map(|(n, of)| of.repeat(n)).collect();
            prop_assert_eq!(unrolled, layers);
        }
    }
}
