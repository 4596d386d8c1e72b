//! What `kvarts model` says, for people.

use std::fmt::Write as _;

use kvarts_layout::spec::{ModelSpec, Ratio};

use kvarts_server::human::{bytes, exact_bytes, grouped};
use kvarts_terminal::{Align, Table};

use super::report::{PartReport, Report, TpReport};
use super::windows;

/// The table of `kvarts model list`.
pub(crate) fn list(reports: &[Report]) -> String {
    let mut table = Table::new(&[
        ("MODEL", Align::Left),
        ("LAYERS", Align::Right),
        ("BYTES/TOKEN", Align::Right),
        ("BOUNDARY", Align::Right),
        ("BLOCK TOKENS", Align::Right),
    ]);
    for report in reports {
        let boundary = match report.boundary_bytes {
            0 => "-".to_owned(),
            count => bytes(count),
        };
        table.row([
            report.name.clone(),
            report.layers.to_string(),
            per_token(report.stream_bytes_per_token),
            boundary,
            report.block_tokens.to_string(),
        ]);
    }
    table.to_string()
}

/// The page of `kvarts model show`.
pub(crate) fn show(spec: &ModelSpec, report: &Report) -> String {
    let mut out = format!("{}\n", report.name);
    fact(&mut out, "source", &report.source);
    if !report.note.is_empty() {
        fact(&mut out, "note", &report.note);
    }
    fact(&mut out, "fingerprint", &report.fingerprint);
    fact(&mut out, "layers", &format!("{}: {}", report.layers, layer_order(spec)));
    let multiple = match report.entry_tokens {
        1 => String::new(),
        n => format!(", a multiple of {n}"),
    };
    fact(&mut out, "block", &format!("{} tokens{multiple}", report.block_tokens));
    push(&mut out, format_args!("\n{}", parts(report)));
    notes(&mut out, report);
    out.push('\n');
    fact(&mut out, "streams", &format!("{} B a token", per_token(report.stream_bytes_per_token)));
    fact(&mut out, "boundary", &boundary(report));
    let prefix = format!(
        "{} in {} blocks; with the state at one boundary: {}",
        exact_bytes(report.bytes_for_tokens),
        grouped(report.blocks),
        exact_bytes(report.restore_bytes_for_tokens)
    );
    fact(&mut out, &format!("{} tokens", grouped(report.tokens)), &prefix);
    if !report.windows.is_empty() {
        push(&mut out, format_args!("\n{}", windows::table(&report.windows)));
    }
    if let Some(tp) = &report.tp {
        push(&mut out, format_args!("\n{}", ranks(tp)));
    }
    out
}

/// The line of `kvarts model check`.
pub(crate) fn check(spec: &ModelSpec, report: &Report) -> String {
    let mut line = format!(
        "ok: {}, {} layers, {} B a token, {} at a boundary, fingerprint {}",
        report.name,
        report.layers,
        per_token(report.stream_bytes_per_token),
        bytes(report.boundary_bytes),
        report.fingerprint
    );
    let mut own: Vec<&str> = spec
        .parts()
        .iter()
        .filter(|part| part.geometry.kind.meaning().is_none())
        .map(|part| part.geometry.kind.as_str())
        .collect();
    own.sort_unstable();
    own.dedup();
    if !own.is_empty() {
        push(&mut line, format_args!("; kinds not in the registry: {}", own.join(", ")));
    }
    line
}

fn parts(report: &Report) -> Table {
    let mut table = Table::new(&[
        ("PART", Align::Left),
        ("KIND", Align::Left),
        ("ROLE", Align::Left),
        ("GROUP", Align::Right),
        ("DTYPE", Align::Left),
        ("HEADS", Align::Right),
        ("LAYERS", Align::Right),
        ("BYTES/TOKEN", Align::Right),
        ("LAYER BLOCK", Align::Right),
        ("WHOLE BLOCK", Align::Right),
        ("IF ABSENT", Align::Left),
    ]);
    for part in &report.parts {
        table.row([
            part.name.clone(),
            part.kind.clone(),
            part.role.to_owned(),
            part.group.to_string(),
            part.dtype.clone(),
            if part.heads == 0 { "-".to_owned() } else { part.heads.to_string() },
            part.layers.to_string(),
            part.bytes_per_token.map_or_else(|| "-".to_owned(), per_token),
            grouped(part.layer_bytes_per_block),
            bytes(part.bytes_per_block),
            absence(part),
        ]);
    }
    table
}

fn absence(part: &PartReport) -> String {
    match part.recompute_tokens {
        Some(tokens) => format!("replay {} tokens", grouped(tokens)),
        None => "required".to_owned(),
    }
}

fn notes(out: &mut String, report: &Report) {
    for part in &report.parts {
        if part.readers > 0 {
            let (kept, readers) = (part.layers, part.readers);
            push(
                out,
                format_args!("{}: stored by {kept} layers, read by {readers} later layers\n", part.name),
            );
        }
        if let Some(multiple) = part.empty_at_multiple_of {
            let held = bytes(part.held_bytes.unwrap_or(0));
            push(out, format_args!("{}: no state is stored at multiples of {multiple} tokens; ", part.name));
            push(out, format_args!("the engine holds {held} in between\n"));
        }
        if !part.note.is_empty() {
            push(out, format_args!("{}: {}\n", part.name, part.note));
        }
    }
}

fn boundary(report: &Report) -> String {
    let parts: Vec<String> = report
        .parts
        .iter()
        .filter(|part| part.boundary_bytes > 0)
        .map(|part| format!("{} {}", part.name, bytes(part.boundary_bytes)))
        .collect();
    match parts.as_slice() {
        [] => "nothing".to_owned(),
        [_] => exact_bytes(report.boundary_bytes),
        parts => format!("{}: {}", exact_bytes(report.boundary_bytes), parts.join(", ")),
    }
}

fn ranks(tp: &TpReport) -> String {
    let mut table = Table::new(&[
        ("GROUP", Align::Right),
        ("CLASS", Align::Left),
        ("HEADS", Align::Right),
        ("STORED AS", Align::Left),
        ("RANKS EACH", Align::Right),
        ("RANK'S BLOCK", Align::Right),
    ]);
    for group in &tp.groups {
        let stored = match group.coordinates.as_slice() {
            [only] => only.text.clone(),
            [first, .., last] => format!("{} x {} ... {}", group.coordinates.len(), first.text, last.text),
            [] => String::new(),
        };
        table.row([
            group.group.to_string(),
            group.class.to_owned(),
            if group.heads == 0 { "-".to_owned() } else { group.heads.to_string() },
            stored,
            group.ranks_per_coordinate.to_string(),
            bytes(group.bytes_per_block),
        ]);
    }
    let mut out = format!("{} tensor-parallel ranks\n{table}", tp.ranks);
    fact(&mut out, "each rank", &format!("{} B a token", per_token(tp.stream_bytes_per_token)));
    fact(&mut out, "", &format!("{} at a boundary", exact_bytes(tp.boundary_bytes)));
    fact(&mut out, "", &format!("{} for the tokens above", exact_bytes(tp.bytes_for_tokens)));
    out
}

/// The layers in execution order: `2 x hca, 29 x (csa, hca), csa`.
fn layer_order(spec: &ModelSpec) -> String {
    let run = |(repeat, kinds): (usize, Vec<&str>)| match (repeat, kinds.as_slice()) {
        (1, kinds) => kinds.join(", "),
        (repeat, [kind]) => format!("{repeat} x {kind}"),
        (repeat, kinds) => format!("{repeat} x ({})", kinds.join(", ")),
    };
    spec.layer_runs().into_iter().map(run).collect::<Vec<_>>().join(", ")
}

fn per_token(ratio: Ratio) -> String {
    match ratio.whole() {
        Some(whole) => grouped(whole),
        None => match ratio.to_string().split_once('.') {
            Some((whole, fraction)) => match whole.parse() {
                Ok(whole) => format!("{}.{fraction}", grouped(whole)),
                Err(_) => ratio.to_string(),
            },
            None => ratio.to_string(),
        },
    }
}

fn fact(out: &mut String, name: &str, value: &str) {
    push(out, format_args!("  {name:<17}{value}\n"));
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
}
