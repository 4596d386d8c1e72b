//! What a put does with its blocks: decided by the lease of their chain, and from the directory where no node has one, within a moment.
//!
//! The owner of a chain stores its blocks. Another node stores what the owner lacks for a time, and offers it to the owner. Of a
//! chain without an owner that can be reached, a block is stored where no node has it that can be reached.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::Tag;
use kvarts_layout::{BlockKey, planted};

use super::locate::Asked;
use super::offering::ToOwner;
use super::replicate::Held;
use super::{ClusterNode, Column};

/// What a put does with blocks that another node has, or is to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PutPolicy {
    /// Stores them: no node is asked.
    #[default]
    Store,
    /// Stores them as copies that live for so long at most.
    Keep(Duration),
    /// Says that they are held there, and writes nothing; what the owner of their chain lacks is stored for so long, and offered
    /// to it.
    Single(Duration),
}

/// What a put does with a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fate {
    /// It is stored.
    #[default]
    Stored,
    /// It is stored, and lives for so long at most.
    Copied(Duration),
    /// Another node has it, and it is not written.
    Held,
}

/// What a put does with its blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Placing {
    fates: Vec<Fate>,
    /// Own chains by whose leases some are stored.
    own: Vec<Tag>,
    /// What owners of chains lack: the places of blocks by owner and chain.
    lacking: BTreeMap<(NodeId, Tag), Vec<usize>>,
}

impl Placing {
    /// What is done with the block at a place.
    pub fn fate(&self, place: usize) -> Fate {
        self.fates.get(place).copied().unwrap_or_default()
    }

    /// Names of own chains by whose leases some are stored.
    pub fn own(&self) -> &[Tag] {
        &self.own
    }

    /// Of each block.
    pub fn fates(&self) -> &[Fate] {
        &self.fates
    }
}

/// What puts were told of other nodes.
#[derive(Debug, Default)]
pub(super) struct Puts {
    kept: AtomicU64,
    held: AtomicU64,
    owned: AtomicU64,
    unasked: AtomicU64,
}

/// What became of blocks of puts that other nodes had, for an operator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutCounts {
    /// Blocks that were stored for a time, as another node had them or owned their chain.
    pub kept: u64,
    /// Blocks that were not written, as another node had them.
    pub held: u64,
    /// Blocks that were stored although another node had them, as this one owned their chain.
    pub owned: u64,
    /// Blocks that were stored because the directory did not answer in time.
    pub unasked: u64,
}

impl Puts {
    pub(super) fn counts(&self) -> PutCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PutCounts {
            kept: of(&self.kept),
            held: of(&self.held),
            owned: of(&self.owned),
            unasked: of(&self.unasked),
        }
    }
}

/// Whose a chain is now, as far as this node knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Me,
    Other(NodeId),
}

impl ClusterNode {
    /// What is to be done with blocks that are put here, `parent` being the one before the first of them, if it is known. Nothing if
    /// all of them are simply stored. What is decided by a lease stands as long as [`ClusterNode::stands`] says so.
    pub async fn place(&self, column: Column<'_>, parent: Option<BlockKey>) -> Option<Placing> {
        let (is_single, hold) = match self.options.put {
            PutPolicy::Store => return None,
            PutPolicy::Keep(hold) => (false, hold),
            PutPolicy::Single(hold) => (true, hold),
        };
        let here = self.own_blocks(&column);
        let tags: Vec<Tag> = column.keys.iter().map(|key| column.tag(key)).collect();
        let parent = parent.map(|key| column.tag(&key));
        let behind = self.owned.chain_of_first(parent.iter().chain(&tags));
        // The blocks, the one before them, and the chain that one of them is known to be of.
        let names: Vec<Tag> = tags.iter().copied().chain(parent).chain(behind).collect();
        let Asked { located, owners, .. } = self.ask_holders(&names, true, self.options.patience.put).await;
        let now = self.now();
        let others = owners.iter().filter(|(_, owner)| *owner != self.me);
        let others: BTreeMap<Tag, NodeId> =
            others.filter_map(|(place, owner)| Some((*names.get(*place)?, *owner))).collect();
        let owner = |chain: &Tag| match self.owned.lease(chain, now) {
            Some(_) => Some(Owner::Me),
            None => others.get(chain).copied().map(Owner::Other),
        };
        let mut chain = parent.filter(|parent| owner(parent).is_some());
        chain = chain.or_else(|| self.owned.chain_of_first(parent.iter()));
        let is_reached = |node: &NodeId| {
            let is_there = self.link(*node).is_some_and(|link| link.state().is_connected)
                && self.can_read(&self.lanes(), node, &column.namespace);
            is_there || planted!("held-by-the-gone") && *node != self.me
        };
        let mut placing = Placing { fates: vec![Fate::Stored; tags.len()], ..Placing::default() };
        let (mut elsewhere, mut owned, mut of_chains) = (0, 0, Vec::new());
        for (place, tag) in tags.iter().enumerate() {
            chain = match chain {
                _ if owner(tag).is_some() => Some(*tag),
                None => self.owned.chain_of_first([tag].into_iter()),
                chain => chain,
            };
            of_chains.extend(chain.filter(|chain| chain != tag).map(|chain| (*tag, chain)));
            let of = chain.and_then(|chain| Some((chain, owner(&chain)?)));
            let is_held = located.copies.get(place).is_some_and(|nodes| nodes.iter().any(is_reached));
            let is_held = is_held && !column.keys.get(place).is_some_and(|key| self.is_deleted(&column, key));
            let fate = match of {
                _ if here.get(place) == Some(&true) => continue,
                Some((chain, Owner::Me)) if !is_held || !planted!("owners-put-held") => {
                    owned += u64::from(is_held);
                    if placing.own.last() != Some(&chain) {
                        placing.own.push(chain);
                    }
                    Fate::Stored
                }
                Some((chain, Owner::Other(other)))
                    if !is_held && is_reached(&other) && !planted!("lease-not-asked") =>
                {
                    placing.lacking.entry((other, chain)).or_default().push(place);
                    Fate::Copied(hold)
                }
                _ if !is_held => continue,
                _ if is_single => Fate::Held,
                _ => Fate::Copied(hold),
            };
            elsewhere += u64::from(fate != Fate::Stored);
            if let Some(of) = placing.fates.get_mut(place) {
                *of = fate;
            }
        }
        self.owned.note_behind(of_chains.into_iter());
        let held = placing.fates.iter().filter(|fate| **fate == Fate::Held).count() as u64;
        self.puts.held.fetch_add(held, Ordering::Relaxed);
        self.puts.kept.fetch_add(elsewhere - held, Ordering::Relaxed);
        self.puts.owned.fetch_add(owned, Ordering::Relaxed);
        let is_unknown = |place: &&usize| here.get(**place) == Some(&false);
        let unasked = located.unasked.iter().filter(is_unknown).count() as u64;
        self.puts.unasked.fetch_add(unasked, Ordering::Relaxed);
        (elsewhere > 0 || !placing.own.is_empty()).then_some(placing)
    }

    /// Whether a block was deleted lately: the directory may not have heard of it.
    fn is_deleted(&self, column: &Column<'_>, key: &BlockKey) -> bool {
        self.deletes.names((column.namespace, (column.group, column.coordinate), key), self.store.wall_ms())
    }

    /// Whether what was decided for a put still holds: the leases by which this node stores blocks are in force. If not, it has to
    /// be decided again for the blocks that are not stored yet.
    pub fn stands(&self, placing: &Placing) -> bool {
        let now = self.now();
        planted!("lease-not-looked-at-again")
            || placing.own.iter().all(|chain| self.owned.lease(chain, now).is_some())
    }

    /// Blocks of a put were stored here that the owners of their chains lack, `stored` says which: they are offered to those, later
    /// and where that can be done. They were put for so long as `ttl` says, however long this node holds them.
    pub fn offer_to_owners(
        &self,
        column: Column<'_>,
        placing: &Placing,
        ttl: Option<Duration>,
        stored: impl Fn(usize) -> bool,
    ) {
        let hold = match self.options.put {
            PutPolicy::Store => return,
            PutPolicy::Keep(hold) | PutPolicy::Single(hold) => hold,
        };
        let now = self.footing.runner.now();
        let until = now.plus(ttl.map_or(hold, |ttl| ttl.min(hold)));
        let held = Held { until, ends: ttl.map(|ttl| now.plus(ttl)) };
        for ((owner, chain), places) in &placing.lacking {
            let there = places.iter().filter(|place| stored(**place));
            let keys: Vec<BlockKey> = there.filter_map(|place| column.keys.get(*place)).copied().collect();
            if !keys.is_empty() {
                let (owner, chain, blocks) = (*owner, *chain, (column.name(), keys));
                self.offers.to_owner(ToOwner { owner, chain, blocks, held });
            }
        }
    }
}
