//! What an operator must hear of at once: damage that a read met, and a disk that takes no more. Few lines, whatever
//! clients do: damage is limited by the second, a full disk is told when it begins and when it ends.

use std::sync::{Mutex, PoisonError};

use kvarts_layout::NamespaceId;
use kvarts_store::api::BlockOutcome;
use kvarts_store::error::{Kind, Reason};

use super::Audit;

/// Tells the log of faults that only an operator can do something about.
#[derive(Debug, Default)]
pub struct Trouble {
    /// Blocks that were refused since the disk was found full; none while it is not.
    refused: Mutex<Option<u64>>,
}

/// What a put said of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Heard {
    /// The first refusal.
    Begins,
    /// Blocks were stored again after this many refusals.
    Ends(u64),
    Nothing,
}

impl Trouble {
    /// What a read could not deliver. A damaged block is told with its place in the store.
    pub fn read_ended<'a>(
        &self,
        audit: &Audit,
        namespace: NamespaceId,
        failures: impl Iterator<Item = &'a Reason>,
    ) {
        for reason in failures {
            let damaged = reason.kind() == Kind::Corrupt || matches!(reason, Reason::Media(_));
            if !damaged || !audit.may_tell() {
                continue;
            }
            match reason {
                Reason::Digest { shard, segment, offset, .. }
                | Reason::Header { shard, segment, offset, .. } => {
                    tracing::warn!(target: "audit", %namespace, shard, segment, offset, "a read met a damaged block, served as a miss: {reason}");
                }
                _ => {
                    tracing::warn!(target: "audit", %namespace, "a read met a block that the disk would not give: {reason}")
                }
            }
        }
    }

    /// What became of the blocks of a put.
    pub fn put_ended(&self, outcomes: &[BlockOutcome]) {
        match self.hear(outcomes) {
            Heard::Begins => tracing::warn!(
                "the budget or the disk is full and nothing may be evicted: puts are refused, reads go on; \
                 raise the budget, free the disk, or release pins"
            ),
            Heard::Ends(refused) => tracing::info!(refused, "puts are stored again: there is room"),
            Heard::Nothing => {}
        }
    }

    fn hear(&self, outcomes: &[BlockOutcome]) -> Heard {
        let full =
            outcomes.iter().filter(|one| **one == BlockOutcome::Refused(Reason::NoSpace)).count() as u64;
        let stored = outcomes.contains(&BlockOutcome::Stored);
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        match (&mut *refused, full) {
            (None, 1..) => {
                *refused = Some(full);
                Heard::Begins
            }
            (Some(before), 1..) => {
                *before = before.saturating_add(full);
                Heard::Nothing
            }
            (Some(_), 0) if stored => refused.take().map_or(Heard::Nothing, Heard::Ends),
            _ => Heard::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_once_when_it_begins_and_once_when_it_ends() {
        let trouble = Trouble::default();
        let full = [BlockOutcome::Refused(Reason::NoSpace), BlockOutcome::Refused(Reason::NoSpace)];
        let heard = [
            trouble.hear(&[BlockOutcome::Stored]),
            trouble.hear(&full),
            trouble.hear(&full),
            trouble.hear(&[BlockOutcome::AlreadyThere]),
            trouble.hear(&[BlockOutcome::Stored, BlockOutcome::Stored]),
            trouble.hear(&[BlockOutcome::Stored]),
        ];
        let nothing = Heard::Nothing;
        assert_eq!(heard, [nothing, Heard::Begins, nothing, nothing, Heard::Ends(4), nothing]);
    }
}
