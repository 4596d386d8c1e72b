//! Chains that this node owns: its copies of their blocks are evicted last.
//!
//! A chain is named by the block at which it begins, and its other blocks are met as they are used: in a match, a read or a put, what
//! stands behind that block is of the chain, and so is what hangs on a block of it. No node is asked for any of this.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cluster::hot::ColumnName;
use kvarts_cluster::partition::Tag;
use kvarts_layout::BlockKey;
use kvarts_wire::proto;
use proto::chain_reply::What;
use proto::chain_request::Ask;
use tonic::Status;

use super::{ClusterNode, Column};

/// Chains whose blocks a node favours at a time.
const CHAINS_MAX: usize = 1 << 16;

/// The first blocks of own chains, and until when each is owned.
type Heads = BTreeMap<BlockKey, (u64, Duration)>;

/// The chains that this node owns, as far as it was told.
#[derive(Debug, Default)]
pub(super) struct Owned {
    some: AtomicBool,
    heads: Mutex<BTreeMap<ColumnName, Heads>>,
}

impl Owned {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ColumnName, Heads>> {
        // Each change is one step.
        self.heads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, column: ColumnName, key: BlockKey, chain: u64, until: Option<Duration>, now: Duration) {
        let mut heads = self.lock();
        let count: usize = heads.values().map(BTreeMap::len).sum();
        if count >= CHAINS_MAX {
            heads.values_mut().for_each(|of| of.retain(|_, (_, until)| now < *until));
        }
        match until {
            Some(until) if heads.values().map(BTreeMap::len).sum::<usize>() < CHAINS_MAX => {
                heads.entry(column).or_default().insert(key, (chain, until));
            }
            Some(_) => {}
            None => {
                heads.get_mut(&column).map(|of| of.remove(&key));
            }
        }
        heads.retain(|_, of| !of.is_empty());
        self.some.store(!heads.is_empty(), Ordering::Relaxed);
    }

    pub(super) fn len(&self, now: Duration) -> usize {
        self.lock().values().flat_map(BTreeMap::values).filter(|(_, until)| now < *until).count()
    }
}

/// The name of a chain in the store.
fn number(tag: &Tag) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = tag.0;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

impl ClusterNode {
    /// As [`ClusterNode::chain`], of the chain that begins with a block; where this node becomes or stays its owner, its blocks
    /// go last here from now on, as far as they are met.
    pub async fn chain_of(
        &self,
        column: ColumnName,
        key: BlockKey,
        asked: proto::ChainRequest,
    ) -> Result<proto::ChainReply, Status> {
        let (namespace, group, coordinate) = column;
        let tag = Tag::of(&namespace, group, coordinate, &key);
        let (ask, begun) = (asked.ask, self.now());
        let reply = self.chain(tag, asked).await?;
        let is_own = reply.lease.as_ref().is_some_and(|lease| lease.node == self.me.0[..]);
        let left = reply.lease.as_ref().map_or(Duration::ZERO, |lease| Duration::from_millis(lease.left_ms));
        let chain = number(&tag);
        match (ask, reply.what()) {
            (Some(Ask::ClaimMs(_) | Ask::RenewMs(_)), What::Granted) if is_own => {
                self.owned.set(column, key, chain, Some(begun + left), begun);
                // A model that is not registered here has no blocks here.
                let _ = self.store.favour(chain, namespace, (group, coordinate), &[key], left);
                self.store.set_favour(chain, left);
            }
            (Some(Ask::Release(_)), What::Nobody | What::Stale | What::Owned)
            | (Some(Ask::RenewMs(_)), What::Stale | What::Owned) => {
                self.owned.set(column, key, chain, None, begun);
                self.store.set_favour(chain, Duration::ZERO);
            }
            _ => {}
        }
        Ok(reply)
    }

    /// Blocks are used here: matched, read or put, `parent` being the one before the first of them, if it is known. Those of own
    /// chains go last from now on.
    pub fn note_use(&self, column: &Column<'_>, parent: Option<BlockKey>) {
        if !self.owned.some.load(Ordering::Relaxed) {
            return;
        }
        let (namespace, at) = (column.namespace, (column.group, column.coordinate));
        let now = self.now();
        let mut runs: Vec<(usize, u64, Duration)> = Vec::new();
        {
            let heads = self.owned.lock();
            if let Some(heads) = heads.get(&(namespace, column.group, column.coordinate)) {
                for (place, key) in column.keys.iter().enumerate() {
                    if let Some((chain, until)) = heads.get(key).filter(|(_, until)| now < *until) {
                        runs.push((place, *chain, until.saturating_sub(now)));
                    }
                }
            }
        }
        let first = runs.first().map_or(column.keys.len(), |(place, ..)| *place);
        let before = column.keys.get(..first).unwrap_or_default();
        // What fails here is a hint less.
        if let Some(parent) = parent.filter(|_| !before.is_empty()) {
            let _ = self.store.favour_behind(namespace, at, parent, before);
        }
        let ends = runs.iter().skip(1).map(|(place, ..)| *place).chain([column.keys.len()]);
        for ((from, chain, left), to) in runs.iter().zip(ends) {
            let keys = column.keys.get(*from..to).unwrap_or_default();
            let _ = self.store.favour(*chain, namespace, at, keys, *left);
        }
    }
}
