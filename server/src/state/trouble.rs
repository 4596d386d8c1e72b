//! What an operator must hear of at once: damage that a read met, a disk that takes no more, and one that fails writes.
//! Few lines, whatever clients do: damage is limited by the second, the others are told when they begin and when they end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use kvarts_contract::api::BlockOutcome;
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::NamespaceId;
use kvarts_store::engine::Health;

use super::Audit;

/// Tells the log of faults that only an operator can do something about.
#[derive(Debug, Default)]
pub struct Trouble {
    /// Blocks that were refused since the disk was found full; none while it is not.
    refused: Mutex<Option<u64>>,
    /// It was told that shards fail writes, and not yet that none does any more.
    failing: AtomicBool,
}

/// What a put said of the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Heard {
    /// The first refusal, and why.
    Begins(String),
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
                    tracing::warn!(target: "audit", %namespace, shard, segment, offset, "a read returned a \
                        miss for a damaged block: {reason}");
                }
                _ => {
                    tracing::warn!(target: "audit", %namespace, "a read from disk failed, and the \
                        block is a miss: {reason}")
                }
            }
        }
    }

    /// What became of the blocks of a put, and how the store is.
    pub fn put_ended(&self, outcomes: &[BlockOutcome], health: impl FnOnce() -> Health) {
        self.failing(outcomes, health);
        match self.hear(outcomes) {
            Heard::Begins(why) => tracing::warn!("puts are refused, reads continue: {why}"),
            Heard::Ends(refused) => tracing::info!(refused, "puts are accepted again: the store has space"),
            Heard::Nothing => {}
        }
    }

    fn failing(&self, outcomes: &[BlockOutcome], health: impl FnOnce() -> Health) {
        let told = self.failing.load(Ordering::Relaxed);
        let met = |one: &BlockOutcome| matches!(one, BlockOutcome::Refused(Reason::Media(_)));
        if !told && !outcomes.iter().any(met) {
            return;
        }
        let failing = health().failing;
        let ended = failing.is_empty();
        if told != ended || self.failing.swap(!ended, Ordering::Relaxed) != ended {
            return;
        }
        match failing.first_key_value() {
            Some((shard, why)) => tracing::warn!(
                shard,
                shards = failing.len(),
                "all writes to a device fail, so its shards refuse puts; reads continue. Each new put \
                tries the device again; check the device: {why}"
            ),
            None => tracing::info!("writes to the device succeed again: puts are accepted in all shards"),
        }
    }

    fn hear(&self, outcomes: &[BlockOutcome]) -> Heard {
        let mut bounds = outcomes.iter().filter_map(|one| match one {
            BlockOutcome::Refused(why @ Reason::NoSpace(_)) => Some(why),
            _ => None,
        });
        let bound = bounds.next();
        let full = bound.map_or(0, |_| 1 + bounds.count() as u64);
        let stored = outcomes.contains(&BlockOutcome::Stored);
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        match (&mut *refused, bound) {
            (None, Some(why)) => {
                *refused = Some(full);
                Heard::Begins(why.to_string())
            }
            (Some(before), Some(_)) => {
                *before = before.saturating_add(full);
                Heard::Nothing
            }
            (Some(_), None) if stored => refused.take().map_or(Heard::Nothing, Heard::Ends),
            _ => Heard::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::error::SpaceCause;

    #[test]
    fn a_full_disk_is_told_once_when_it_begins_and_once_when_it_ends() {
        let trouble = Trouble::default();
        let refused = || BlockOutcome::Refused(Reason::NoSpace(SpaceCause::Disk));
        let full = [refused(), refused()];
        let heard = [
            trouble.hear(&[BlockOutcome::Stored]),
            trouble.hear(&full),
            trouble.hear(&full),
            trouble.hear(&[BlockOutcome::AlreadyThere]),
            trouble.hear(&[BlockOutcome::Stored, BlockOutcome::Stored]),
            trouble.hear(&[BlockOutcome::Stored]),
        ];
        let nothing = || Heard::Nothing;
        let begins = Heard::Begins(Reason::NoSpace(SpaceCause::Disk).to_string());
        assert_eq!(heard, [nothing(), begins, nothing(), nothing(), Heard::Ends(4), nothing()]);
    }
}
