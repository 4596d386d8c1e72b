//! What the calls of sessions do to the store and to the table together: leases are taken before the table hears of them, and given back if it
//! refuses them, so that no lease is left that no session has.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvarts_cluster::sessions::{Grant, Name, Refused, Seen, Stand};
use kvarts_contract::api::{ContainsRequest, KvStore, LeaseId, LeaseTerms, MAX_MATCH_ENTRIES, Presence};
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_store::engine::Store;

use super::{LiveSessions, Place, instant};

/// Why a call did nothing.
#[derive(Debug)]
pub enum Failed {
    /// The table refuses it.
    Refused(Refused),
    /// The store does.
    Store(Error),
    /// There are no keys where there must be some.
    NoKeys(&'static str),
}

impl From<Refused> for Failed {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

/// What is held of the blocks of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// In all columns.
    pub blocks: u32,
    /// Of these how many follow on each other from the first of the call on.
    pub leading: u32,
}

/// The sessions of one tenant.
#[derive(Clone, Copy, Debug)]
pub struct TenantSessions<'a> {
    sessions: &'a LiveSessions,
    store: &'a Store,
    tenant: u32,
}

/// Leases that were taken for a session, and are given back unless it has them.
struct Holding<'a> {
    of: TenantSessions<'a>,
    grants: Vec<Grant>,
    held: Held,
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let leases: Vec<u64> = self.grants.iter().map(|grant| grant.lease).collect();
        self.of.sessions.give_back(self.of.store, &leases);
    }
}

impl<'a> TenantSessions<'a> {
    /// Those of the tenant of this number.
    pub fn new(sessions: &'a LiveSessions, store: &'a Store, tenant: u32) -> Self {
        Self { sessions, store, tenant }
    }

    fn now(&self) -> Duration {
        instant(self.store.clock().now())
    }

    fn name(&self, id: u64) -> Name {
        Name { tenant: self.tenant, id }
    }

    /// What a session is; none where there is none of that number.
    pub fn see(&self, id: u64) -> Option<Seen> {
        self.sessions.table().see(self.name(id), self.now())
    }

    /// Holds what is here of blocks of a session, from its block `first` on.
    fn hold(
        &self,
        namespace: NamespaceId,
        columns: &[Place],
        (first, keys): (u32, &[BlockKey]),
        hold: Duration,
    ) -> Result<Holding<'a>, Error> {
        let to = u32::try_from(keys.len()).ok().and_then(|count| first.checked_add(count));
        let to = to.ok_or(Reason::TooMany("blocks"))?;
        if keys.len().saturating_mul(columns.len()) > MAX_MATCH_ENTRIES {
            return Err(Reason::TooMany("blocks").into());
        }
        let mut holding = Holding { of: *self, grants: Vec::new(), held: Held { blocks: 0, leading: 0 } };
        let mut here = vec![!columns.is_empty(); keys.len()];
        let terms = LeaseTerms { hold, tenant: self.tenant, cap_bytes: u64::MAX };
        for &(group, coordinate) in columns {
            let request = ContainsRequest { namespace, group, coordinate, keys, lease: Some(terms) };
            let found = self.store.contains(&request)?;
            holding.grants.extend(found.lease.map(|lease| Grant { lease: lease.0, from: first, to }));
            let presence = found.presence.iter().map(|one| *one == Presence::Here);
            here.iter_mut().zip(presence).for_each(|(all, one)| *all &= one);
        }
        holding.held = Held {
            blocks: here.iter().filter(|here| **here).count() as u32,
            leading: here.iter().take_while(|here| **here).count() as u32,
        };
        Ok(holding)
    }

    /// Opens a session of these blocks, whose own chain begins behind `shared` of them.
    pub fn open(
        &self,
        id: u64,
        namespace: NamespaceId,
        (keys, shared): (&[BlockKey], u32),
        columns: &[Place],
        lease: Duration,
    ) -> Result<Held, Failed> {
        let (Some(&head), Some(&tip)) = (keys.get(shared as usize), keys.last()) else {
            return Err(Failed::NoKeys("keys: at least one block after the shared blocks is required"));
        };
        let (name, now) = (self.name(id), self.now());
        self.sessions.expire(self.store, now);
        if !self.sessions.table().has_room(self.tenant, columns.len()) {
            return Err(Refused::Full.into());
        }
        let mut holding = self.hold(namespace, columns, (0, keys), lease)?;
        let stand = Stand { namespace, head, tip, blocks: keys.len() as u32 };
        self.sessions.table().open(name, stand, holding.grants.clone(), lease, now)?;
        holding.grants.clear();
        self.sessions.counts.opened.fetch_add(1, Ordering::Relaxed);
        Ok(holding.held)
    }

    /// Opens a session that goes on from the first blocks of another one, of which `tip` is the last.
    pub fn fork(
        &self,
        id: u64,
        of: u64,
        (blocks, tip): (u32, BlockKey),
        lease: Duration,
    ) -> Result<(), Failed> {
        let (name, now) = (self.name(id), self.now());
        self.sessions.expire(self.store, now);
        let held = self.sessions.table().fork(name, of, (blocks, tip), lease, now)?;
        self.sessions.counts.forked.fetch_add(1, Ordering::Relaxed);
        self.keep(name, &held, lease)
    }

    /// Has the store keep leases of a session for as long as it lasts. One that the store no longer has ends the session: what stands on it
    /// is not held.
    fn keep(&self, of: Name, leases: &[u64], hold: Duration) -> Result<(), Failed> {
        for lease in leases {
            let Err(error) = self.store.renew(LeaseId(*lease), hold) else { continue };
            // Another call may have put a new one in its place.
            let ended = {
                let mut table = self.sessions.table();
                if table.has(of, *lease) { table.close(of, self.now()) } else { continue }
            };
            self.sessions.give_back(self.store, &ended.unwrap_or_default().leases);
            return Err(error.into());
        }
        Ok(())
    }

    /// What a session is that may be extended by these blocks.
    pub fn may_extend(
        &self,
        id: u64,
        (first, keys): (u32, &[BlockKey]),
        columns: usize,
    ) -> Result<Seen, Failed> {
        let tip = *keys.last().ok_or(Failed::NoKeys("keys: at least one key is required"))?;
        let (table, now) = (self.sessions.table(), self.now());
        table.may_extend(self.name(id), (first, keys.len() as u32, tip), columns, now)?;
        Ok(table.see(self.name(id), now).ok_or(Refused::Unknown)?)
    }

    /// Goes on with a session: these blocks follow on its block `first`. `lease`: from now on, where it is another one.
    pub fn extend(
        &self,
        id: u64,
        (first, keys): (u32, &[BlockKey]),
        columns: &[Place],
        lease: Option<Duration>,
    ) -> Result<Held, Failed> {
        let known = self.may_extend(id, (first, keys), columns.len())?;
        let (name, count, tip) =
            (self.name(id), keys.len() as u32, keys.last().copied().unwrap_or(known.stand.tip));
        if let Some(lease) = lease {
            self.renew(id, lease)?;
        }
        let begun = self.now();
        let left = self.sessions.table().left(name, begun)?;
        let mut holding = self.hold(known.stand.namespace, columns, (first, keys), left)?;
        let (over, later) = {
            let (mut table, now) = (self.sessions.table(), self.now());
            let over = table.extend(name, (first, count, tip), holding.grants.clone(), now)?;
            // Meanwhile it may have been renewed, or forked for longer.
            let left_now = table.left(name, now)?;
            (over, (now + left_now > begun + left).then_some(left_now))
        };
        self.sessions.give_back(self.store, &over);
        let new: Vec<u64> = std::mem::take(&mut holding.grants).iter().map(|grant| grant.lease).collect();
        if let Some(left) = later {
            self.keep(name, &new, left)?;
        }
        self.sessions.counts.extended.fetch_add(1, Ordering::Relaxed);
        Ok(holding.held)
    }

    /// Makes a session last longer, or less long.
    pub fn renew(&self, id: u64, lease: Duration) -> Result<(), Failed> {
        let leases = self.sessions.table().renew(self.name(id), lease, self.now())?;
        self.keep(self.name(id), &leases, lease)
    }

    /// Lets a session go on at another node: what it is of, and whether none of this node stands on its chain any more.
    pub fn hand_over(&self, id: u64) -> Result<(Stand, bool), Failed> {
        let given = self.sessions.table().hand_over(self.name(id), self.now())?;
        self.sessions.counts.handed_over.fetch_add(1, Ordering::Relaxed);
        Ok(given)
    }

    /// Ends a session; false if there is none.
    pub fn close(&self, id: u64) -> bool {
        let ended = self.sessions.table().close(self.name(id), self.now());
        let Some(ended) = ended else { return false };
        self.sessions.counts.closed.fetch_add(1, Ordering::Relaxed);
        self.sessions.give_back(self.store, &ended.leases);
        true
    }
}
