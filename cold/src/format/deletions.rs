//! What was deleted of a namespace lately, as its manifest says it: so that what was listed before a delete is not named after it.
//!
//! A writer lists blocks, reads them, and names their copies some time later; a push of a large store takes hours. Meanwhile they may be
//! deleted by a program that knows nothing of this writer. Both change the manifest by compare-and-set, so there it is decided: a
//! delete leaves the fingerprints of its keys, and a writer names nothing that they hide from it.
//!
//! Generations of the manifest give the order, and do not depend on clocks. Each delete also has a time:
//! a block that was produced before it is not named whenever it was listed, so that a copy on a node that did not hear of
//! the delete does not come back through the bucket. That holds as well as the clocks of the nodes agree.
//!
//! The list is bounded. The oldest deletes are folded into one number: what was listed before the newest of them is refused as a whole.

use std::collections::{BTreeMap, BTreeSet};

use kvarts_layout::planted;

use super::FormatError;
use super::taker::Taker;

/// The most keys that are listed one by one.
pub const KEYS_MAX: usize = 1 << 15;
/// The most deletes that these are of.
pub const DELETES_MAX: usize = 1 << 12;
/// Bytes of a delete, beside its keys.
pub(super) const DELETE: usize = 20;
/// Bytes of a key.
pub(super) const KEY: usize = 8;

/// A state of a manifest. What was listed or read after it was known has seen every delete that it names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Point {
    /// When the manifest was begun; zero where there was none.
    pub begun_ms: u64,
    /// Its generation; zero where there was none.
    pub generation: u64,
}

/// A delete of a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Delete {
    /// The first generation of the manifest that knows it.
    pub generation: u64,
    /// When it was, in milliseconds since 1970; zero where blocks were not deleted and are to live less long.
    pub at_ms: u64,
}

/// A block, as a writer is about to name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Listed {
    /// When the store was asked for it: the generation that was known then. None: a manifest that is gone.
    pub since: Option<u64>,
    /// The wide fingerprint of its key.
    pub fingerprint: u64,
    /// When it was produced, in milliseconds since 1970.
    pub created_ms: u64,
}

/// What was deleted of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Deletions {
    /// What was listed before this generation is not named.
    pub listed_after: u64,
    /// What was produced at this time or before it is not named: all of the namespace was deleted. Zero: it never was.
    pub made_after_ms: u64,
    /// The time of the newest delete whose keys are not here, or not all of them: what was produced before it may have been deleted.
    pub forgotten_ms: u64,
    /// Keys that were deleted, by their wide fingerprints.
    pub keys: BTreeMap<u64, Delete>,
}

impl Deletions {
    /// Keys are deleted.
    pub fn add_keys(&mut self, fingerprints: impl IntoIterator<Item = u64>, delete: Delete) {
        for fingerprint in fingerprints {
            let known = self.keys.entry(fingerprint).or_insert(delete);
            known.generation = known.generation.max(delete.generation);
            known.at_ms = known.at_ms.max(delete.at_ms);
        }
        self.fold();
    }

    /// Keys are deleted of which not all are known here.
    pub fn add_unknown(&mut self, delete: Delete) {
        self.listed_after = self.listed_after.max(delete.generation);
        self.forgotten_ms = self.forgotten_ms.max(delete.at_ms);
    }

    /// Everything is deleted.
    pub fn add_all(&mut self, delete: Delete) {
        self.listed_after = self.listed_after.max(delete.generation);
        self.made_after_ms = self.made_after_ms.max(delete.at_ms);
        let until_ms = self.made_after_ms;
        self.keys.retain(|_, known| known.at_ms > until_ms);
    }

    /// Lets the oldest deletes go where there are too many, the generations of all that is left being later.
    fn fold(&mut self) {
        let mut sizes: BTreeMap<Delete, usize> = BTreeMap::new();
        self.keys.values().for_each(|delete| *sizes.entry(*delete).or_default() += 1);
        if self.keys.len() <= KEYS_MAX && sizes.len() <= DELETES_MAX {
            return;
        }
        let (mut keys, mut deletes) = (0, 0);
        let newest = sizes.iter().rev().find(|(_, count)| {
            keys += **count;
            deletes += 1;
            keys > KEYS_MAX || deletes > DELETES_MAX
        });
        let Some(last) = newest.map(|(delete, _)| delete.generation) else { return };
        let folded = self.keys.values().filter(|delete| delete.generation <= last);
        let at_ms = folded.map(|delete| delete.at_ms).max().unwrap_or(0);
        self.keys.retain(|_, delete| delete.generation > last);
        let listed_after = if planted!("folded-deletes-forgotten") { 0 } else { last };
        self.add_unknown(Delete { generation: listed_after, at_ms });
    }

    /// Whether a block is not to be named.
    pub fn hides(&self, block: Listed) -> bool {
        let Some(since) = block.since else { return true };
        let is_of = |at_ms: u64| at_ms > 0 && block.created_ms <= at_ms;
        if planted!("deletes-not-compared") {
            return false;
        }
        let is_gone = |delete: &Delete| since < delete.generation || is_of(delete.at_ms);
        since < self.listed_after
            || is_of(self.made_after_ms)
            || self.keys.get(&block.fingerprint).is_some_and(is_gone)
    }

    /// Whether a block that was produced then was deleted for certain, whenever it was listed.
    pub fn was_deleted(&self, fingerprint: u64, created_ms: u64) -> bool {
        let is_of = |at_ms: u64| at_ms > 0 && created_ms <= at_ms;
        is_of(self.made_after_ms) || self.keys.get(&fingerprint).is_some_and(|delete| is_of(delete.at_ms))
    }

    /// Whether a block that was produced then may have been deleted without being named here.
    pub fn is_doubtful(&self, created_ms: u64) -> bool {
        created_ms <= self.forgotten_ms
    }

    /// The deletes, each with its keys.
    fn by_delete(&self) -> BTreeMap<Delete, Vec<u64>> {
        let mut all: BTreeMap<Delete, Vec<u64>> = BTreeMap::new();
        for (fingerprint, delete) in &self.keys {
            all.entry(*delete).or_default().push(*fingerprint);
        }
        all
    }

    /// Memory that it takes, about.
    pub fn memory_bytes(&self) -> usize {
        self.keys.len().saturating_mul(48)
    }

    /// Holds it to what a reader of a manifest of this generation will say.
    pub(super) fn check(&self, generation: u64) -> Result<(), FormatError> {
        let deletes: BTreeSet<&Delete> = self.keys.values().collect();
        if self.keys.len() > KEYS_MAX || deletes.len() > DELETES_MAX {
            return Err(FormatError::Rule("the list of deletes exceeds the limit of deletes or of keys"));
        }
        let mut generations = deletes
            .iter()
            .map(|delete| delete.generation)
            .chain((self.listed_after > 0).then_some(self.listed_after));
        if generations.all(|one| (1..=generation).contains(&one)) {
            Ok(())
        } else {
            Err(FormatError::Rule("the generation of a delete is later than the generation of the list"))
        }
    }

    /// How many deletes and keys are written.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.by_delete().len(), self.keys.len())
    }

    /// Its numbers, as they stand in the head of a manifest.
    pub(super) fn encode_head(&self, bytes: &mut Vec<u8>) {
        for field in [self.listed_after, self.made_after_ms, self.forgotten_ms] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        let (deletes, keys) = self.counts();
        for count in [deletes, keys] {
            bytes.extend_from_slice(&(count as u32).to_le_bytes());
        }
    }

    /// Its deletes, then their keys.
    pub(super) fn encode_lists(&self, bytes: &mut Vec<u8>) {
        let all = self.by_delete();
        for (delete, keys) in &all {
            bytes.extend_from_slice(&delete.generation.to_le_bytes());
            bytes.extend_from_slice(&delete.at_ms.to_le_bytes());
            bytes.extend_from_slice(&(keys.len() as u32).to_le_bytes());
        }
        for fingerprint in all.values().flatten() {
            bytes.extend_from_slice(&fingerprint.to_le_bytes());
        }
    }

    /// Reads its numbers, and how many deletes and keys follow.
    pub(super) fn take_head(taker: &mut Taker<'_>) -> Result<(Self, (usize, usize)), FormatError> {
        let (listed_after, made_after_ms, forgotten_ms) = (taker.u64()?, taker.u64()?, taker.u64()?);
        let counts = (taker.count()?, taker.count()?);
        if counts.0 > DELETES_MAX || counts.1 > KEYS_MAX {
            return Err(FormatError::Rule(
                "a number of deletes or keys in the head of the manifest is too large",
            ));
        }
        Ok((Self { listed_after, made_after_ms, forgotten_ms, keys: BTreeMap::new() }, counts))
    }

    /// Reads its deletes and their keys, whose bytes are known to be there.
    pub(super) fn take_lists(
        &mut self,
        taker: &mut Taker<'_>,
        (deletes, keys): (usize, usize),
    ) -> Result<(), FormatError> {
        let mut all: Vec<(Delete, usize)> = Vec::with_capacity(deletes);
        let mut left = keys;
        for _ in 0..deletes {
            let delete = Delete { generation: taker.u64()?, at_ms: taker.u64()? };
            let count = taker.count()?;
            if all.last().is_some_and(|(before, _)| *before >= delete) || count == 0 {
                return Err(FormatError::Rule("the deletes must be sorted, and each must have a key"));
            }
            left = left.checked_sub(count).ok_or(FormatError::Rule(
                "the number of deleted keys differs \
                from the number given in the head of the manifest",
            ))?;
            all.push((delete, count));
        }
        if left != 0 {
            return Err(FormatError::Rule(
                "the number of deleted keys differs from the number given in the head of the manifest",
            ));
        }
        for (delete, count) in all {
            let mut before = None;
            for _ in 0..count {
                let fingerprint = taker.u64()?;
                if before.is_some_and(|before| before >= fingerprint)
                    || self.keys.insert(fingerprint, delete).is_some()
                {
                    return Err(FormatError::Rule("the deleted keys must be sorted and distinct"));
                }
                before = Some(fingerprint);
            }
        }
        Ok(())
    }
}
