//! All that a store has, copied into the bucket because an operator asks for it: as sweeps do it, some segments at a time, so that sweeps
//! come in between and what is deleted meanwhile is named by neither.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvarts_cold::{ColdError, Conditions, Pushed};
use kvarts_contract::api::{Leaving, SegmentBlocks};
use kvarts_layout::{BlockKey, NamespaceId};

use super::ColdTier;
use super::spill::{BLOCK_MOST, Parts, SWEEP_BYTES, done, is_of_one, parts_without};

/// What a push came to.
#[derive(Clone, Debug, Default)]
pub struct Copied {
    /// What was pushed, and what was left out.
    pub pushed: Pushed,
    /// Blocks that were there already, beside those that `pushed` counts.
    pub already_there: u64,
    /// Blocks that were gone when they were to be read, or could not be read.
    pub unread: u64,
    /// What the bucket did not take, a sentence for each namespace.
    pub problems: Vec<String>,
    refused: BTreeSet<NamespaceId>,
}

impl Copied {
    fn refuse(&mut self, namespace: NamespaceId, why: &dyn std::fmt::Display) {
        if self.refused.insert(namespace) {
            self.problems.push(format!("namespace {namespace}: {why}"));
        }
    }
}

/// Blocks of a shard by namespace, and the segment to go on with.
type Batch = (BTreeMap<NamespaceId, Vec<Leaving>>, Option<u32>);

impl ColdTier {
    /// Copies every block of the store, or of a namespace of it, that is not in the bucket. An error of the bucket ends it; what is wrong with one
    /// namespace does not concern the others.
    pub async fn push(&self, only: Option<NamespaceId>) -> Result<Copied, ColdError> {
        if let Conditions::NotKept(why) = self.tier.conditions().await? {
            return Err(ColdError::ReadOnly(why));
        }
        let mut copied = Copied::default();
        for shard in 0..self.store.shards() {
            let mut from = Some(0);
            while let Some(segment) = from {
                from = self.push_some((shard, segment), only, &mut copied).await?;
            }
        }
        Ok(copied)
    }

    /// Copies what some segments have. Gives the one to go on with.
    async fn push_some(
        &self,
        place: (u32, u32),
        only: Option<NamespaceId>,
        copied: &mut Copied,
    ) -> Result<Option<u32>, ColdError> {
        // Before anything is looked at: what is deleted from now on is not copied.
        let sweep = self.spilling.begin().await;
        let mut listed = self.tier.points();
        let (mut held, mut next) = self.some(place, only).await?;
        let unknown: Vec<NamespaceId> =
            held.keys().filter(|one| !listed.contains_key(one)).copied().collect();
        if !unknown.is_empty() {
            for namespace in unknown {
                if let Err(error) = self.tier.read_manifest(namespace).await {
                    copied.refuse(namespace, &error);
                }
            }
            // What deletes are known goes before what is listed.
            listed = self.tier.points();
            (held, next) = self.some(place, only).await?;
        }
        let mut pusher = self.pusher();
        for (namespace, all) in held {
            if copied.refused.contains(&namespace) {
                continue;
            }
            let Some(of) = self.namespace(namespace) else { continue };
            pusher.listed(namespace, listed.get(&namespace).copied().unwrap_or_default());
            let before = pusher.pushed();
            let (parts, chosen) = match self.not_there(&all, copied).await {
                Ok(found) => found,
                Err(error) if is_of_one(&error) => {
                    copied.refuse(namespace, &error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let of = (Arc::clone(&of.exported), parts);
            let (_, swept) = self.sweep_one(&sweep, &mut pusher, (namespace, &of), (&mut 0, u64::MAX)).await;
            match swept {
                Ok(()) => {
                    let left = chosen.saturating_sub(done(pusher.pushed()) - done(before));
                    copied.unread += left;
                }
                Err(error) if is_of_one(&error) => copied.refuse(namespace, &error),
                Err(error) => return Err(error),
            }
        }
        copied.pushed += pusher.pushed();
        Ok(next)
    }

    /// What segments from this one on have, until it is enough to be copied at once.
    async fn some(
        &self,
        (shard, mut from): (u32, u32),
        only: Option<NamespaceId>,
    ) -> Result<Batch, ColdError> {
        let (mut found, mut bytes): (BTreeMap<NamespaceId, Vec<Leaving>>, u64) = (BTreeMap::new(), 0);
        loop {
            // ends: an executor answers from memory, or the store is closed
            let held = self.store.held(shard, from).await;
            let held = held.map_err(|_| ColdError::Store("the store is closing".to_owned()))?;
            let SegmentBlocks { runs, next } = held.map_err(|error| ColdError::Store(error.to_string()))?;
            for one in runs {
                if only.is_some_and(|only| only != one.namespace) {
                    continue;
                }
                let shape = self.store.shape(one.namespace, one.group, one.coordinate);
                let each = shape.map_or(0, |shape| shape.block_bytes());
                bytes = bytes.saturating_add(each.saturating_mul(one.keys.len() as u64));
                found.entry(one.namespace).or_default().push(one);
            }
            match next {
                Some(next) if bytes < SWEEP_BYTES => from = next,
                next => return Ok((found, next)),
            }
        }
    }

    /// The parts of runs that the bucket does not have, and how many blocks those are.
    async fn not_there(&self, all: &[Leaving], copied: &mut Copied) -> Result<(Parts, u64), ColdError> {
        let (mut parts, mut chosen) = (Parts::new(), 0);
        for one in all {
            let Ok(shape) = self.store.shape(one.namespace, one.group, one.coordinate) else { continue };
            let count = one.keys.len() as u64;
            if shape.block_bytes() > BLOCK_MOST {
                copied.pushed.too_large += count;
                continue;
            }
            let found = self.tier.locate(one.namespace, (one.group, one.coordinate), &one.keys).await?;
            let found = one.keys.iter().zip(found);
            let there: BTreeSet<BlockKey> =
                found.filter(|(_, found)| found.is_some()).map(|(key, _)| *key).collect();
            let missing = parts_without(one, shape.block_bytes(), |key| there.contains(key));
            let missing_blocks: u64 = missing.iter().map(|part| part.keys.len() as u64).sum();
            copied.already_there += count.saturating_sub(missing_blocks);
            chosen += missing_blocks;
            parts.extend(missing.into_iter().map(|part| (part, Arc::clone(&shape))));
        }
        Ok((parts, chosen))
    }
}
