//! The reason of a plan, in words.

use std::fmt;

use kvarts_layout::Group;
use serde::{Serialize, Serializer};

/// Why a plan goes on from its boundary and from no other.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reason {
    /// No block is there.
    Nothing,
    /// Blocks are there, but no boundary has what it needs.
    Unusable(Group, u32),
    /// All that can be used is used, up to the last block before the end of the prompt.
    All,
    /// All that can be used is used; behind it this group lacks a block.
    Missing(Group, u32),
    /// More could be used, and to bring it would take longer than to compute it: the times to the first token with the
    /// longest boundary, and with this one.
    Shorter {
        /// Tokens before the longest boundary.
        longest_tokens: u64,
        /// To the first token from there.
        longest_ms: f64,
        /// To the first token by this plan.
        ms: f64,
    },
    /// To bring anything would take longer than to compute it.
    Slower {
        /// Tokens before the longest boundary.
        longest_tokens: u64,
        /// To the first token from there.
        longest_ms: f64,
        /// To the first token with nothing restored.
        ms: f64,
    },
}

impl Reason {
    /// Whether more is there, and the ways to it are too slow to bring it.
    pub fn is_too_slow(&self) -> bool {
        matches!(self, Self::Shorter { .. } | Self::Slower { .. })
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => write!(f, "no block of the prompt is stored"),
            Self::Unusable(group, block) => {
                write!(
                    f,
                    "the prompt cannot be restored at any block boundary: group {group} lacks block \
                    {block}"
                )
            }
            Self::All => write!(f, "all stored blocks are restored"),
            Self::Missing(group, block) => {
                write!(f, "all usable blocks are restored; group {group} lacks block {block}")
            }
            Self::Shorter { longest_tokens, longest_ms, ms } => write!(
                f,
                "with a load up to token {longest_tokens}, the first token takes {longest_ms:.1} ms; with \
                the shorter load of this plan, the first token takes {ms:.1} ms"
            ),
            Self::Slower { longest_tokens, longest_ms, ms } => write!(
                f,
                "a load is slower than computing: {longest_ms:.1} ms to the first token with \
                {longest_tokens} tokens restored, {ms:.1} ms with none"
            ),
        }
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}
