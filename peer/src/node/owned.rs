//! Chains that this node owns: its copies of their blocks are evicted last, and puts of them are stored here.
//!
//! A chain is named by the block at which it begins, and its other blocks are met as they are used: in a match, a read or a put, what
//! stands behind that block is of the chain, and so is what hangs on a block of it. No node is asked for any of this.
//!
//! What stands here of a lease is never more than what the node that decides has granted: it ends by the time at which it was asked
//! for, is given up before that node hears of it, and no answer that comes late brings it back.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cluster::hot::ColumnName;
use kvarts_cluster::ownership::Token;
use kvarts_cluster::partition::Tag;
use kvarts_layout::{BlockKey, planted};
use kvarts_wire::proto;
use proto::chain_reply::What;
use proto::chain_request::Ask;
use tonic::Status;

use super::chain::{TIMEOUT, lease_of};
use super::{ClusterNode, Column};

/// Chains whose blocks a node favours at a time.
const CHAINS_MAX: usize = 1 << 16;
/// Blocks of puts of which it is remembered to which chain they belong; those that were put longest ago are forgotten.
const BEHIND_MAX: usize = 1 << 16;

/// A question about a chain, among all that this node asks.
type Number = u64;

/// What this node was told of its leases.
#[derive(Debug, Default)]
struct Leases {
    /// The first blocks of own chains.
    heads: BTreeMap<ColumnName, BTreeMap<BlockKey, Tag>>,
    own: BTreeMap<Tag, (Token, Duration)>,
    /// Chains that were given up lately: with which question, and when.
    given_up: BTreeMap<Tag, (Number, Duration)>,
    /// The chain that a block was put behind, whosever it is.
    behind: BTreeMap<Tag, Tag>,
    put: VecDeque<Tag>,
}

/// The chains that this node owns, as far as it was told.
#[derive(Debug, Default)]
pub(super) struct Owned {
    some: AtomicBool,
    asked: AtomicU64,
    leases: Mutex<Leases>,
}

impl Owned {
    fn lock(&self) -> MutexGuard<'_, Leases> {
        // Each change is one step.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lease was granted, as the answer to a question. False if it is over, or counts for nothing.
    fn grant(
        &self,
        (column, key, chain): (ColumnName, BlockKey, Tag),
        asked: Number,
        (token, until): (Token, Duration),
        now: Duration,
    ) -> bool {
        let mut leases = self.lock();
        let is_given_up = leases.given_up.get(&chain).is_some_and(|(given_up, _)| asked < *given_up);
        let is_passed = leases.own.get(&chain).is_some_and(|(own, _)| token < *own);
        if leases.own.len() >= CHAINS_MAX {
            leases.sweep(now);
        }
        let has_room = leases.own.len() < CHAINS_MAX || leases.own.contains_key(&chain);
        if is_given_up && !planted!("late-grant-counts") || is_passed || !has_room || until <= now {
            return false;
        }
        leases.heads.entry(column).or_default().insert(key, chain);
        leases.own.insert(chain, (token, until));
        self.some.store(true, Ordering::Relaxed);
        true
    }

    /// A lease is over, by a question or by its answer; answers to earlier questions grant it no more.
    fn give_up(&self, (column, key, chain): (ColumnName, BlockKey, Tag), asked: Number, now: Duration) {
        let mut leases = self.lock();
        leases.given_up.retain(|_, (_, at)| now < *at + 2 * TIMEOUT);
        leases.given_up.insert(chain, (asked, now));
        leases.own.remove(&chain);
        if let Some(heads) = leases.heads.get_mut(&column) {
            heads.remove(&key);
            leases.heads.retain(|_, of| !of.is_empty());
        }
        self.some.store(!leases.own.is_empty(), Ordering::Relaxed);
    }

    /// The token of the lease that this node has of a chain now.
    pub(super) fn lease(&self, chain: &Tag, now: Duration) -> Option<Token> {
        let leases = self.lock();
        let own = leases.own.get(chain).filter(|(_, until)| now < *until || planted!("lease-never-over"));
        own.map(|(token, _)| *token)
    }

    /// Whether any chain may be owned.
    pub(super) fn any(&self) -> bool {
        self.some.load(Ordering::Relaxed)
    }

    /// The chain that the first of these blocks is of that is known to be of one.
    pub(super) fn chain_of_first<'a>(&self, mut blocks: impl Iterator<Item = &'a Tag>) -> Option<Tag> {
        let leases = self.lock();
        blocks.find_map(|block| leases.behind.get(block)).copied()
    }

    /// Blocks are put behind the beginning of chains.
    pub(super) fn note_behind(&self, blocks: impl Iterator<Item = (Tag, Tag)>) {
        let mut leases = self.lock();
        for (block, chain) in blocks {
            if leases.behind.insert(block, chain).is_none() {
                leases.put.push_back(block);
            }
        }
        while leases.put.len() > BEHIND_MAX {
            if let Some(block) = leases.put.pop_front() {
                leases.behind.remove(&block);
            }
        }
    }

    pub(super) fn len(&self, now: Duration) -> usize {
        self.lock().own.values().filter(|(_, until)| now < *until).count()
    }
}

impl Leases {
    fn sweep(&mut self, now: Duration) {
        self.own.retain(|_, (_, until)| now < *until);
        let own = &self.own;
        self.heads.retain(|_, of| {
            of.retain(|_, chain| own.contains_key(chain));
            !of.is_empty()
        });
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
        let (ask, begun, number_asked) =
            (asked.ask, self.now(), self.owned.asked.fetch_add(1, Ordering::Relaxed));
        let (of, chain) = ((column, key, tag), number(&tag));
        let given_up = || {
            self.owned.give_up(of, number_asked, self.now());
            if !planted!("favour-stays") {
                self.store.set_favour(chain, Duration::ZERO);
            }
        };
        if matches!(ask, Some(Ask::Release(_))) && !planted!("released-after-the-answer") {
            // Before another node can be told that it owns the chain, and whether the holder hears of it or not.
            given_up();
        }
        let reply = self.chain(tag, asked).await?;
        let own = lease_of(&reply).filter(|(owner, _)| *owner == self.me).map(|(_, token)| token);
        let left = reply.lease.as_ref().map_or(Duration::ZERO, |lease| Duration::from_millis(lease.left_ms));
        match (ask, reply.what(), own) {
            (Some(Ask::ClaimMs(_) | Ask::RenewMs(_)), What::Granted, Some(token))
                if self.owned.grant(of, number_asked, (token, begun + left), self.now()) =>
            {
                // A model that is not registered here has no blocks here.
                let _ = self.store.favour(chain, namespace, (group, coordinate), &[key], left);
                self.store.set_favour(chain, left);
            }
            (Some(Ask::Release(_)), What::Nobody | What::Stale | What::Owned, _)
            | (Some(Ask::RenewMs(_)), What::Stale, _)
            | (Some(Ask::ClaimMs(_) | Ask::RenewMs(_)), What::Owned, None) => given_up(),
            _ => {}
        }
        Ok(reply)
    }

    /// Blocks of an own chain came from another node, at which they were put: those that are here are as if they had been put here.
    pub(super) fn note_of_chain(&self, chain: Tag, column: &Column<'_>) {
        if self.owned.lease(&chain, self.now()).is_none() {
            return;
        }
        let there = column.keys.iter().zip(self.own_blocks(column)).filter(|(_, here)| *here);
        let there: Vec<BlockKey> = there.map(|(key, _)| *key).collect();
        self.owned.note_behind(there.iter().map(|key| (column.tag(key), chain)));
        let at = (column.group, column.coordinate);
        // As long as the chain's others.
        let _ = self.store.favour(number(&chain), column.namespace, at, &there, Duration::ZERO);
    }

    /// Blocks are used here: matched, read or put, `parent` being the one before the first of them, if it is known. Those of own
    /// chains go last from now on.
    pub fn note_use(&self, column: &Column<'_>, parent: Option<BlockKey>) {
        if !self.owned.any() {
            return;
        }
        let (namespace, at) = (column.namespace, (column.group, column.coordinate));
        let now = self.now();
        let mut runs: Vec<(usize, u64, Duration)> = Vec::new();
        {
            let leases = self.owned.lock();
            if let Some(heads) = leases.heads.get(&column.name()) {
                for (place, key) in column.keys.iter().enumerate() {
                    let own = heads.get(key).and_then(|chain| Some((chain, leases.own.get(chain)?)));
                    if let Some((chain, (_, until))) = own.filter(|(_, (_, until))| now < *until) {
                        runs.push((place, number(chain), until.saturating_sub(now)));
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
            let from = if planted!("favour-before-the-chain") { 0 } else { *from };
            let keys = column.keys.get(from..to).unwrap_or_default();
            let _ = self.store.favour(*chain, namespace, at, keys, *left);
        }
    }
}
