//! Sessions of this server's clients: the table of the node ([`kvarts_cluster::sessions`]) with its clock, and the chains that are
//! claimed for it.
//!
//! What ends is given back here, by its client or by its lease: leases to the store at once, chains by the caller that may wait for other nodes
//! ([`LiveSessions::free`]). Nothing of it outlives the process.

pub mod holding;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cluster::ownership::Token;
use kvarts_cluster::sessions::{ChainName, Ended, Sessions};
use kvarts_contract::api::{KvStore, LeaseId};
use kvarts_contract::clock::Nanos;
use kvarts_layout::{Coordinate, Group};
use kvarts_store::engine::Store;

/// A column of a chain.
pub type Place = (Group, Coordinate);

/// What sessions of one chain have of its owner's leases.
#[derive(Clone, Debug)]
pub struct Claim {
    /// By column, the token of this node's lease.
    pub tokens: BTreeMap<Place, Token>,
    /// When they were asked for last.
    pub asked: Duration,
}

/// Claims by tenant and chain.
type Claims = BTreeMap<(u32, ChainName), Claim>;

/// How often things happened.
#[derive(Debug, Default)]
pub struct SessionCounts {
    /// Opened, those that came from other nodes among them.
    pub opened: AtomicU64,
    /// Forked.
    pub forked: AtomicU64,
    /// Extended.
    pub extended: AtomicU64,
    /// Handed over to another node.
    pub handed_over: AtomicU64,
    /// Closed by their clients.
    pub closed: AtomicU64,
    /// Over because their lease had ended.
    pub expired: AtomicU64,
}

/// The sessions of a server.
#[derive(Debug, Default)]
pub struct LiveSessions {
    table: Mutex<Sessions>,
    claims: Mutex<Claims>,
    /// What is counted.
    pub counts: SessionCounts,
}

/// The time of the table.
pub fn instant(now: Nanos) -> Duration {
    Duration::from_nanos(now.0)
}

impl LiveSessions {
    /// The table; not to be locked across a wait.
    pub fn table(&self) -> MutexGuard<'_, Sessions> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back to the store what ended sessions held.
    pub fn give_back(&self, store: &Store, leases: &[u64]) {
        for lease in leases {
            store.unlock(LeaseId(*lease));
        }
    }

    /// Ends what is over by now.
    pub fn expire(&self, store: &Store, now: Duration) {
        let Ended { leases, expired, .. } = self.table().expire(now);
        self.counts.expired.fetch_add(expired as u64, Ordering::Relaxed);
        self.give_back(store, &leases);
    }

    /// Ends what tenants had that are gone, and divides the room among those that are there.
    pub fn divide(&self, store: &Store, gone: &[u32], tenants: usize) {
        let ended = {
            let mut table = self.table();
            table.share_among(tenants);
            table.forget(gone)
        };
        self.give_back(store, &ended.leases);
    }

    /// A column of a chain is this node's, by this token.
    pub fn claimed(&self, chain: (u32, ChainName), place: Place, token: Token, asked: Duration) {
        let mut claims = self.claims();
        let claim = claims.entry(chain).or_insert_with(|| Claim { tokens: BTreeMap::new(), asked });
        claim.tokens.insert(place, token);
        claim.asked = claim.asked.min(asked);
    }

    /// The lease of this token goes on, as it was asked at that time; or is over.
    pub fn renewed(&self, chain: (u32, ChainName), place: Place, token: Token, asked: Option<Duration>) {
        let mut claims = self.claims();
        let Some(claim) = claims.get_mut(&chain) else { return };
        // One that was claimed anew meanwhile is another lease.
        if claim.tokens.get(&place) != Some(&token) {
            return;
        }
        match asked {
            Some(asked) => claim.asked = asked,
            None => drop(claim.tokens.remove(&place)),
        }
        if claim.tokens.is_empty() {
            claims.remove(&chain);
        }
    }

    /// The columns of a chain that this node owns, as far as it knows.
    pub fn claim(&self, chain: &(u32, ChainName)) -> Option<Claim> {
        self.claims().get(chain).cloned()
    }

    /// Takes out the claims of chains on which no session of this node stands: they are to be released.
    pub fn free(&self) -> Vec<(ChainName, Claim)> {
        let table = self.table();
        let mut claims = self.claims();
        let over: Vec<(u32, ChainName)> =
            claims.keys().filter(|chain| !table.stands_on(chain)).copied().collect();
        over.into_iter().filter_map(|chain| Some((chain.1, claims.remove(&chain)?))).collect()
    }

    /// Claims that were asked for before that time: they are to be renewed.
    pub fn to_renew(&self, before: Duration) -> Vec<((u32, ChainName), Claim)> {
        let claims = self.claims();
        claims
            .iter()
            .filter(|(_, claim)| claim.asked < before)
            .map(|(at, claim)| (*at, claim.clone()))
            .collect()
    }

    /// Chains that are claimed.
    pub fn claimed_chains(&self) -> usize {
        self.claims().len()
    }
}
