//! What a match says of the cold tier.

use std::io::Write;

use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;
use kvarts_wire::proto;
use serde_json::{Value, json};

/// As a part of a report.
pub(super) fn report(cold: &proto::match_reply::InCold) -> Value {
    let boundary = |one: &Option<proto::Boundary>| {
        one.as_ref().map(|one| {
            json!({"blocks": one.blocks, "tokens": one.tokens, "recompute_tokens": one.recompute_tokens})
        })
    };
    json!({
        "longest": boundary(&cold.longest), "cheapest": boundary(&cold.cheapest), "blocks": cold.blocks,
        "bytes": cold.bytes, "restore_ms": cold.restore_ms,
    })
}

/// As a line.
pub(super) fn show(cold: &proto::match_reply::InCold, out: &mut dyn Write) -> Result<(), Failure> {
    let longest = cold.longest.clone().unwrap_or_default();
    let takes = cold.restore_ms.map_or_else(String::new, |ms| format!(", about {} ms", grouped(ms)));
    writeln!(
        out,
        "  {} of them ({} tokens) with the cold tier, which brings {} blocks, {}{takes}",
        grouped(u64::from(longest.blocks)),
        grouped(longest.tokens),
        grouped(cold.blocks),
        bytes(cold.bytes)
    )?;
    Ok(())
}
