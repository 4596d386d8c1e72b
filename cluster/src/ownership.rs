//! Who owns a chain of blocks: the node whose copy is evicted last, and to whom requests that extend the chain should go.
//!
//! One node at a time has a valid lease with a fencing token. Tokens grow for ever: their first word is the epoch in which this
//! holder took the partition over, which a coordination service or the file of members hands out and never twice.
//!
//! Nodes hear of a change of holders at different times. A holder grants only as long as it was confirmed to be one a moment ago
//! ([`Ownership::confirm`]). The one before it may be confirmed until a new one is confirmed for the first time, and not later: from
//! then on the new one is silent until the other has stopped for that reason. Then, for one longest lease, it takes over the leases
//! that owners renew, with their tokens, and grants nothing else. Nodes are believed about their tokens: one that lies can become
//! an owner at such a time, which costs hits and no bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use kvarts_layout::planted;

use crate::members::NodeId;
use crate::partition::Tag;

/// The longest lease.
pub const LEASE_MAX: Duration = Duration::from_secs(60);
/// How long a holder grants after it asked for the confirmation that it had last.
pub const CONFIRMED_FOR: Duration = Duration::from_secs(5);
/// The longest time for which a replica is noted.
pub const REPLICA_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// How much clocks may run apart over a longest lease.
const DRIFT: Duration = Duration::from_secs(2);
/// Read-only replicas that a chain may have.
pub const REPLICAS_MAX: usize = 15;

/// Orders all leases that were ever granted for a chain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Token {
    /// The epoch in which the holder that granted it took over.
    pub epoch: u64,
    /// The number of the grant within it.
    pub number: u64,
}

/// A valid lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// Who owns the chain.
    pub owner: NodeId,
    /// Which grant it is.
    pub token: Token,
    /// When it ends.
    pub until: Duration,
}

/// Why nothing is granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Another node owns the chain.
    Owned(Lease),
    /// The lease of this token has ended, or was never granted here.
    Stale,
    /// This holder is new: until then the one before it may grant, or a lease of it may be valid.
    New(Duration),
    /// This holder does not know whether it still is one.
    Unconfirmed,
    /// There is no room for more chains or replicas.
    Full,
}

/// What is known of a chain.
#[derive(Clone, Debug)]
struct Chain {
    lease: Lease,
    replicas: BTreeMap<NodeId, Duration>,
}

/// The chains of the partitions that one node holds in one epoch.
#[derive(Clone, Debug)]
pub struct Ownership {
    epoch: u64,
    granted: u64,
    confirmed_until: Duration,
    /// It was never confirmed, and there may be a holder before it that still is.
    is_new: bool,
    /// Until then nothing is answered; then, until `quiet_until`, only leases are renewed.
    silent_until: Duration,
    quiet_until: Duration,
    chains: BTreeMap<Tag, Chain>,
    chains_max: usize,
}

impl Ownership {
    /// Takes over in an epoch that no holder of these partitions had before, of which this node was told at `now`. `first` says
    /// that there was none, so that no lease can be valid.
    pub fn take_over(epoch: u64, first: bool, chains_max: usize, now: Duration) -> Self {
        let first = first || planted!("new-holder-not-silent");
        let confirmed_until = if first { now + CONFIRMED_FOR } else { now };
        let chains = BTreeMap::new();
        let (silent_until, quiet_until) = (now, now);
        let mut new = Self {
            epoch,
            granted: 0,
            confirmed_until,
            is_new: !first,
            silent_until,
            quiet_until,
            chains,
            chains_max,
        };
        if !first {
            new.be_silent(now);
        }
        new
    }

    /// The holder before this one was confirmed at this time at the latest.
    fn be_silent(&mut self, now: Duration) {
        self.silent_until = now + CONFIRMED_FOR + DRIFT;
        self.quiet_until = self.silent_until + LEASE_MAX + DRIFT;
    }

    /// This node asked at that time whether it holds these partitions in this epoch, and was told that it does: no other one is told so
    /// any more. `asked` is the time before the question, not that of the answer.
    pub fn confirm(&mut self, asked: Duration) {
        self.confirmed_until = self.confirmed_until.max(asked + CONFIRMED_FOR);
        if std::mem::replace(&mut self.is_new, false) {
            self.be_silent(asked);
        }
    }

    /// Whether anything may be granted.
    fn may_answer(&self, now: Duration) -> Result<(), Refused> {
        if now >= self.confirmed_until && !planted!("unconfirmed-holder-grants") {
            return Err(Refused::Unconfirmed);
        }
        if now < self.silent_until { Err(Refused::New(self.silent_until)) } else { Ok(()) }
    }

    /// Who owns a chain now, if this holder may say so: one that another may have taken over from says nothing, and one that is new
    /// does not know of leases that their owners have not renewed yet.
    pub fn look(&self, chain: &Tag, now: Duration) -> Result<Lease, Refused> {
        self.may_answer(now)?;
        let nobody = if now < self.quiet_until { Refused::New(self.quiet_until) } else { Refused::Stale };
        self.owner(chain, now).ok_or(nobody)
    }

    /// Who owns a chain now, as far as this holder knows.
    pub fn owner(&self, chain: &Tag, now: Duration) -> Option<Lease> {
        self.chains
            .get(chain)
            .map(|known| known.lease)
            .filter(|lease| now < lease.until || planted!("released-owner-listed"))
    }

    /// Makes `node` the owner, or says who is. The owner that claims again gets a new token, and its lease ends no earlier than it was
    /// told before: answers may pass each other on their way.
    pub fn claim(
        &mut self,
        chain: Tag,
        node: NodeId,
        hold: Duration,
        now: Duration,
    ) -> Result<Lease, Refused> {
        self.may_answer(now)?;
        let told = match self.owner(&chain, now) {
            Some(lease) if lease.owner != node => return Err(Refused::Owned(lease)),
            None if now < self.quiet_until => return Err(Refused::New(self.quiet_until)),
            own => own.map_or(now, |lease| lease.until),
        };
        if !self.chains.contains_key(&chain) && self.is_full(node, now) {
            return Err(Refused::Full);
        }
        self.granted += 1;
        let token = Token { epoch: self.epoch, number: self.granted };
        let lease = Lease { owner: node, token, until: told.max(now + hold.min(LEASE_MAX)) };
        let new = Chain { lease, replicas: BTreeMap::new() };
        let known = self.chains.entry(chain).or_insert(new);
        known.lease = lease;
        // The owner's copy is no replica.
        known.replicas.remove(&node);
        Ok(lease)
    }

    /// Goes on with a lease that has not ended. One that the holder before this one granted is taken over as it is, if this
    /// holder is new.
    pub fn renew(
        &mut self,
        chain: Tag,
        node: NodeId,
        token: Token,
        hold: Duration,
        now: Duration,
    ) -> Result<Lease, Refused> {
        self.may_answer(now)?;
        let until = now + hold.min(LEASE_MAX);
        if let Some(known) = self.chains.get_mut(&chain) {
            let valid = now < known.lease.until;
            if valid
                && known.lease.owner == node
                && (known.lease.token == token || planted!("old-token-renewed"))
            {
                known.lease.until = known.lease.until.max(until);
                return Ok(known.lease);
            }
            // A later grant of an older holder ends an earlier one that was renewed first.
            let is_older = known.lease.token >= token || token.epoch >= self.epoch;
            if is_older || now >= self.quiet_until {
                return Err(if valid { Refused::Owned(known.lease) } else { Refused::Stale });
            }
        } else if now >= self.quiet_until || token.epoch >= self.epoch {
            return Err(Refused::Stale);
        } else if self.is_full(node, now) {
            return Err(Refused::Full);
        }
        let lease = Lease { owner: node, token, until };
        let new = Chain { lease, replicas: BTreeMap::new() };
        let known = self.chains.entry(chain).or_insert(new);
        known.lease = lease;
        Ok(lease)
    }

    /// Ends a lease early. What is known of the chain stays. A holder that is new notes it of a lease that it does not know yet: a renewal
    /// of it may come later that was asked for before.
    pub fn release(&mut self, chain: &Tag, node: NodeId, token: Token, now: Duration) -> Result<(), Refused> {
        self.may_answer(now)?;
        let may_be_unknown = now < self.quiet_until && token.epoch < self.epoch;
        if let Some(known) = self.chains.get_mut(chain) {
            let is_it = known.lease.owner == node && known.lease.token == token && now < known.lease.until;
            if is_it || (may_be_unknown && known.lease.token < token) {
                known.lease = Lease { owner: node, token, until: now };
                return Ok(());
            }
            return Err(Refused::Stale);
        }
        if !may_be_unknown {
            return Err(Refused::Stale);
        }
        if self.is_full(node, now) {
            return Err(Refused::Full);
        }
        let lease = Lease { owner: node, token, until: now };
        let ended = Chain { lease, replicas: BTreeMap::new() };
        self.chains.insert(*chain, ended);
        Ok(())
    }

    /// Whether a token is that of the valid lease: what another node asks before it does as an owner says.
    pub fn is_valid(&self, chain: &Tag, token: Token, now: Duration) -> bool {
        self.owner(chain, now).is_some_and(|lease| lease.token == token)
    }

    /// Notes a read-only copy on a node, which ends by itself. The owner grants it.
    pub fn replicate(
        &mut self,
        chain: &Tag,
        token: Token,
        on: NodeId,
        hold: Duration,
        now: Duration,
    ) -> Result<Duration, Refused> {
        let known =
            self.chains.get_mut(chain).filter(|known| known.lease.token == token && now < known.lease.until);
        let known = known.ok_or(Refused::Stale)?;
        known.replicas.retain(|_, until| now < *until);
        if known.lease.owner == on {
            return Err(Refused::Owned(known.lease));
        }
        if known.replicas.len() >= REPLICAS_MAX && !known.replicas.contains_key(&on) {
            return Err(Refused::Full);
        }
        let until = now + hold.min(REPLICA_MAX);
        known.replicas.insert(on, until);
        Ok(until)
    }

    /// Where read-only copies are.
    pub fn replicas(&self, chain: &Tag, now: Duration) -> impl Iterator<Item = NodeId> + '_ {
        let replicas = self.chains.get(chain).into_iter().flat_map(|known| &known.replicas);
        replicas.filter(move |(_, until)| now < **until).map(|(node, _)| *node)
    }

    /// Chains that are known.
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// Whether there is no room for one more chain of this node. Chains without an owner make room. The last quarter is for nodes that
    /// own fewer: one that claims without end leaves it to the others.
    fn is_full(&mut self, node: NodeId, now: Duration) -> bool {
        if self.chains.len() >= self.chains_max {
            self.chains.retain(|_, known| now < known.lease.until);
        }
        let most = self.chains_max - self.chains_max / 4;
        self.chains.len() >= self.chains_max
            || self.chains.len() >= most
                && self.chains.values().filter(|known| known.lease.owner == node).count() >= most
    }
}

#[cfg(test)]
mod tests;
