//! What it costs to keep windows and states everywhere, at an interval, at the end of a turn, or nowhere: bytes on disk, and tokens that an
//! engine replays.

use std::num::NonZeroU32;

use kvarts_layout::prefix::{
    BYTES_PER_SECOND, TOKENS_PER_SECOND, WindowPolicy, expected_states, expected_window_blocks,
};
use kvarts_layout::spec::{ModelSpec, Role, SpecError};
use kvarts_terminal::{Align, Table};
use serde::Serialize;

use kvarts_server::human::{bytes, grouped};

/// A policy, and what it costs for a prefix.
#[derive(Serialize, Debug)]
pub(crate) struct WindowsReport {
    pub(crate) policy: String,
    /// Bytes of windows and states on disk.
    pub(crate) bytes_for_tokens: u64,
    /// Tokens that are replayed where a prefix ends: the mean over all boundaries, and the most. None: nothing for the next turn of the same
    /// conversation, and everything for any other prefix.
    pub(crate) replay_tokens: Option<Replay>,
}

#[derive(Serialize, Debug)]
pub(crate) struct Replay {
    pub(crate) mean: u64,
    pub(crate) most: u64,
}

/// An interval that is often set by hand, for comparison.
const EVERY: u32 = 4096;

/// The policies; none for a model that has neither windows nor states.
pub(crate) fn of(
    spec: &ModelSpec,
    block_tokens: u32,
    blocks: u64,
    boundary_bytes: u64,
) -> Result<Vec<WindowsReport>, SpecError> {
    if boundary_bytes == 0 {
        return Ok(Vec::new());
    }
    let blocks = u32::try_from(blocks).map_err(|_| SpecError::Overflow)?;
    let auto = WindowPolicy::by_replay(boundary_bytes, block_tokens, TOKENS_PER_SECOND, BYTES_PER_SECOND);
    let auto_name = match auto {
        WindowPolicy::Periodic { tokens } => format!("auto: every {} tokens", grouped(tokens.get().into())),
        _ => "auto: full".to_owned(),
    };
    let mut policies = vec![("full".to_owned(), WindowPolicy::Full), (auto_name, auto)];
    if let Some(tokens) = NonZeroU32::new(EVERY) {
        policies.push((format!("every {} tokens", grouped(EVERY.into())), WindowPolicy::Periodic { tokens }));
    }
    policies.push(("none".to_owned(), WindowPolicy::Zero));
    let mut found = Vec::with_capacity(policies.len() + 1);
    for (policy, kept) in policies {
        let bytes_for_tokens = kept_bytes(spec, kept, block_tokens, blocks).ok_or(SpecError::Overflow)?;
        found.push(WindowsReport {
            policy,
            bytes_for_tokens,
            replay_tokens: Some(replay(kept, block_tokens, blocks)),
        });
    }
    found.push(WindowsReport {
        policy: "turn".to_owned(),
        bytes_for_tokens: boundary_bytes,
        replay_tokens: None,
    });
    Ok(found)
}

/// Bytes of windows and states that are kept of the first `blocks` blocks: of windows each block has its own tokens.
fn kept_bytes(spec: &ModelSpec, policy: WindowPolicy, block_tokens: u32, blocks: u32) -> Option<u64> {
    let mut sum = 0u64;
    for (part, layers) in spec.parts().iter().zip(spec.layers_by_part()) {
        let (count, each) = match part.geometry.role {
            Role::Window { bytes, tokens } => (
                expected_window_blocks(policy, tokens, blocks, block_tokens).count(),
                bytes.checked_mul(block_tokens.into())?,
            ),
            role @ Role::State { .. } => {
                (expected_states(policy, blocks, block_tokens).count(), role.stored_bytes(block_tokens)?)
            }
            Role::Stream { .. } | Role::Page { .. } => continue,
        };
        sum = sum.checked_add(each.checked_mul(layers)?.checked_mul(count as u64)?)?;
    }
    Some(sum)
}

fn replay(policy: WindowPolicy, block_tokens: u32, blocks: u32) -> Replay {
    let (mut last, mut sum, mut most) = (0, 0u64, 0u64);
    for boundary in 1..=blocks {
        if policy.keeps(boundary, block_tokens) {
            last = boundary;
        }
        let tokens = u64::from(boundary - last) * u64::from(block_tokens);
        sum += tokens;
        most = most.max(tokens);
    }
    Replay { mean: sum.checked_div(blocks.into()).unwrap_or(0), most }
}

/// The table of `kvarts model show`.
pub(crate) fn table(reports: &[WindowsReport]) -> Table {
    let mut table = Table::new(&[
        ("WINDOWS AND STATES", Align::Left),
        ("ON DISK", Align::Right),
        ("REPLAYED, MEAN", Align::Right),
        ("REPLAYED, MAXIMUM", Align::Right),
    ]);
    for report in reports {
        let (mean, most) = match &report.replay_tokens {
            Some(Replay { mean, most }) => (grouped(*mean), grouped(*most)),
            None => ("0 for the next turn".to_owned(), "all for other prefixes".to_owned()),
        };
        table.row([report.policy.clone(), bytes(report.bytes_for_tokens), mean, most]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::spec::shipped;

    /// Of a prefix of 32,768 tokens.
    fn costs(name: &str) -> Vec<WindowsReport> {
        let spec = shipped::load(name).unwrap();
        let boundary = spec.geometry().boundary_bytes(256).unwrap();
        of(&spec, 256, 128, boundary).unwrap()
    }

    /// A policy, MiB on disk, and tokens that are replayed.
    fn told(report: &WindowsReport) -> (&str, u64, Option<[u64; 2]>) {
        let replay = report.replay_tokens.as_ref().map(|replay| [replay.mean, replay.most]);
        (&report.policy, report.bytes_for_tokens >> 20, replay)
    }

    #[test]
    fn policies_trade_bytes_on_disk_for_tokens_that_are_replayed() {
        // Of gpt-oss a window is half a block of 256 tokens, and all of a block is kept.
        let found = costs("gpt-oss-20b");
        let expected = [
            ("full", 768, Some([0, 0])),
            ("auto: full", 768, Some([0, 0])),
            ("every 4,096 tokens", 48, Some([1920, 3840])),
            ("none", 0, Some([16512, 32768])),
            ("turn", 3, None),
        ];
        assert_eq!(found.iter().map(told).collect::<Vec<_>>(), expected);
        // Of Gemma a window is four blocks, and takes a fifth of a second to write.
        let gemma = costs("gemma-3-27b");
        let gemma: Vec<_> = gemma.iter().map(told).collect();
        assert_eq!(gemma[1], ("auto: every 4,608 tokens", 2912, Some([2148, 4352])));
        assert!(gemma[1].1 < gemma[0].1 && gemma[1].1 > gemma[4].1, "{gemma:?}");
        assert!(costs("llama-3.1-8b").is_empty());
    }
}
