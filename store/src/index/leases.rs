//! Leases: who may still rely on which blocks, and until when.
//!
//! A lease pins blocks against *eviction* only. An explicit delete and a failed verification take a leased
//! block all the same, and compaction moves it.
//!
//! Two structures share the work:
//! - each partition holds the [`Pins`] of its leased blocks, as pairs of fingerprint and lease; a slot's
//!   *leased* bit is set exactly while its fingerprint has a pair;
//! - the one [`Leases`] table says which leases are in force, whose they are and what they hold. A pair whose
//!   lease is not in force pins nothing: so a lease ends at its instant of expiry, before a sweep has taken its
//!   pairs out.
//!
//! Lock order: partition, its pins, leases. A thread that holds the leases' lock takes no other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use super::lock;
use crate::memory_ids::BlockFingerprint;
use kvarts_contract::api::LeaseId;
use kvarts_contract::clock::Nanos;
use kvarts_contract::sync::Mutex;

/// Memory one pair or one lease takes in a B-tree that is two thirds full, about.
const PAIR_BYTES: usize = 40;
const LEASE_BYTES: usize = 160;

/// Blocks that a tenant's leases and pins hold at most, each counted in every lease that holds it: about 220 MiB of memory.
pub const PINS_MAX: usize = 1 << 22;

/// What a lease is asked for on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerms {
    /// When it ends by itself; `None` for a pin, which ends only when it is unlocked.
    pub until: Option<Nanos>,
    /// Whose it is.
    pub tenant: u32,
    /// How many bytes all leases and pins of the tenant may hold together, this one included; less where the store
    /// has a lower cap for the tenant.
    pub cap_bytes: u64,
}

/// What the leases and pins of all tenants may hold together, and what of it each tenant can have whatever the others hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinShare {
    /// Bytes for all of them.
    pub all: u64,
    /// Bytes that are set aside for each tenant.
    pub each: u64,
    /// For how many tenants.
    pub tenants: u32,
}

impl PinShare {
    /// What tenants may have beyond what is set aside for them, together.
    fn common(self) -> u64 {
        self.all.saturating_sub(self.each.saturating_mul(u64::from(self.tenants)))
    }
}

/// Why a lease was not given, or not renewed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseError {
    /// The tenant would pin more than it may. Unlock something, or match less.
    Cap {
        /// Bytes the tenant may pin.
        limit: u64,
        /// Bytes it would pin with this lease.
        wanted: u64,
    },
    /// The tenant would hold more than [`PINS_MAX`] blocks.
    Blocks,
    /// All tenants together would pin more than they may, and this one more than is set aside for it.
    Together,
    /// No such lease is in force: it has expired or was unlocked. Match again.
    Expired,
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cap { limit, wanted } => {
                write!(
                    f,
                    "the pins would hold {wanted} bytes, but the limit is {limit}: release pins, or \
                    match fewer blocks"
                )
            }
            Self::Blocks => write!(
                f,
                "the pins would hold more than {PINS_MAX} blocks: release pins, or match fewer blocks"
            ),
            Self::Together => {
                f.write_str("the limit of pins of all tenants together is reached: release pins")
            }
            Self::Expired => write!(f, "the lease does not exist or has ended: match again"),
        }
    }
}

impl std::error::Error for LeaseError {}

/// The leased blocks of one partition.
#[derive(Debug, Default)]
pub(super) struct Pins(BTreeSet<(BlockFingerprint, LeaseId)>);

impl Pins {
    pub(super) fn add(&mut self, print: BlockFingerprint, lease: LeaseId) {
        self.0.insert((print, lease));
    }

    /// Drops one pair; false if it was the print's last, or there was none.
    pub(super) fn drop_one(&mut self, print: BlockFingerprint, lease: LeaseId) -> bool {
        self.0.remove(&(print, lease));
        self.of(print).next().is_some()
    }

    pub(super) fn drop_all(&mut self, print: BlockFingerprint) {
        let leases: Vec<_> = self.of(print).collect();
        for lease in leases {
            self.0.remove(&(print, lease));
        }
    }

    pub(super) fn of(&self, print: BlockFingerprint) -> impl Iterator<Item = LeaseId> {
        self.0.range((print, LeaseId(0))..=(print, LeaseId(u64::MAX))).map(|(_, lease)| *lease)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.len() * PAIR_BYTES
    }
}

#[derive(Debug)]
struct Lease {
    until: Option<Nanos>,
    tenant: u32,
    bytes: u64,
    prints: Box<[BlockFingerprint]>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// The leases in force, and those that have expired and were not swept up yet.
    by_id: BTreeMap<LeaseId, Lease>,
    /// The same leases where they end by themselves, soonest first.
    ends: BTreeSet<(Nanos, LeaseId)>,
    /// Bytes and blocks pinned by tenant; a tenant without leases is not in it.
    pinned: BTreeMap<u32, (u64, usize)>,
    /// Caps that hold whatever a lease's terms say.
    caps: BTreeMap<u32, u64>,
    /// What all of them may hold together; none: no limit.
    share: Option<PinShare>,
    /// Prints in all leases.
    prints: usize,
    /// Leases that have ended by themselves, and of which blocks they still have pairs. They pin nothing.
    ended: VecDeque<(LeaseId, Vec<BlockFingerprint>)>,
}

impl State {
    /// Whether a tenant may hold this much: what is set aside for it, and beyond that what others leave of the rest.
    fn may_hold(&self, tenant: u32, bytes: u64) -> bool {
        let Some(share) = self.share else { return true };
        if bytes <= share.each {
            return true;
        }
        let others = self.pinned.iter().filter(|(other, _)| **other != tenant);
        let beyond = others.map(|(_, (bytes, _))| bytes.saturating_sub(share.each));
        let common = beyond.fold(bytes - share.each, u64::saturating_add);
        common <= share.common()
    }

    fn remove(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.by_id.remove(&id)?;
        if let Some(until) = lease.until {
            self.ends.remove(&(until, id));
        }
        self.prints -= lease.prints.len();
        if let Some((bytes, blocks)) = self.pinned.get_mut(&lease.tenant) {
            *bytes = bytes.saturating_sub(lease.bytes);
            *blocks = blocks.saturating_sub(lease.prints.len());
            if *blocks == 0 {
                self.pinned.remove(&lease.tenant);
            }
        }
        Some(lease)
    }
}

/// Which leases are in force.
#[derive(Debug, Default)]
pub(super) struct Leases(Mutex<State>);

impl Leases {
    /// Puts a lease in force that holds nothing yet, so that what is pinned in its name is pinned at once.
    pub(super) fn begin(&self, terms: LeaseTerms) -> LeaseId {
        let mut state = lock(&self.0);
        state.next += 1;
        let id = LeaseId(state.next);
        let lease = Lease { until: terms.until, tenant: terms.tenant, bytes: 0, prints: Box::default() };
        state.by_id.insert(id, lease);
        state.ends.extend(terms.until.map(|until| (until, id)));
        id
    }

    /// Charges the lease's tenant and writes down what it holds. After an error it may be tried again; else the caller ends the
    /// lease and drops the pins it took.
    pub(super) fn complete(
        &self,
        id: LeaseId,
        terms: LeaseTerms,
        prints: &[BlockFingerprint],
        bytes: u64,
    ) -> Result<(), LeaseError> {
        let mut state = lock(&self.0);
        let (pinned, blocks) = state.pinned.get(&terms.tenant).copied().unwrap_or_default();
        let (wanted, blocks) = (pinned.saturating_add(bytes), blocks + prints.len());
        let limit = state.caps.get(&terms.tenant).map_or(terms.cap_bytes, |cap| terms.cap_bytes.min(*cap));
        if wanted > limit && !kvarts_layout::planted!("pin-cap-ignored") {
            return Err(LeaseError::Cap { limit, wanted });
        }
        if blocks > PINS_MAX {
            return Err(LeaseError::Blocks);
        }
        if !state.may_hold(terms.tenant, wanted) {
            return Err(LeaseError::Together);
        }
        let lease = state.by_id.get_mut(&id).ok_or(LeaseError::Expired)?;
        lease.bytes = bytes;
        lease.prints = prints.into();
        state.prints += prints.len();
        state.pinned.insert(terms.tenant, (wanted, blocks));
        Ok(())
    }

    /// Ends a lease and gives what it held; `None` if there is none.
    pub(super) fn end(&self, id: LeaseId) -> Option<Box<[BlockFingerprint]>> {
        lock(&self.0).remove(id).map(|lease| lease.prints)
    }

    /// Ends up to `most` leases that have expired by `now`, those that did first. Gives their number.
    pub(super) fn end_expired(&self, now: Nanos, most: usize) -> usize {
        let mut state = lock(&self.0);
        let mut ended = 0;
        while ended < most
            && let Some((_, id)) = state.ends.first().copied().filter(|(until, _)| *until <= now)
            && let Some(lease) = state.remove(id)
        {
            state.prints += lease.prints.len();
            state.ended.push_back((id, lease.prints.into_vec()));
            ended += 1;
        }
        ended
    }

    /// Up to `most` blocks of which a lease that has ended by itself still has pairs; `None` if there are none.
    pub(super) fn take_ended(&self, most: usize) -> Option<(LeaseId, Vec<BlockFingerprint>)> {
        let mut state = lock(&self.0);
        let (id, prints) = state.ended.front_mut()?;
        let (id, some) = (*id, prints.split_off(prints.len().saturating_sub(most)));
        if prints.is_empty() {
            state.ended.pop_front();
        }
        state.prints -= some.len();
        Some((id, some))
    }

    /// Whether it is in force.
    pub(super) fn is_in_force(&self, id: LeaseId, now: Nanos) -> bool {
        self.any_in_force(std::iter::once(id), now)
    }

    pub(super) fn renew(&self, id: LeaseId, until: Nanos, now: Nanos) -> Result<(), LeaseError> {
        let mut state = lock(&self.0);
        let State { by_id, ends, .. } = &mut *state;
        let lease = by_id.get_mut(&id).filter(|lease| in_force(lease, now)).ok_or(LeaseError::Expired)?;
        if let Some(old) = lease.until.replace(until) {
            ends.remove(&(old, id));
        }
        ends.insert((until, id));
        Ok(())
    }

    /// Whether any of these leases is in force.
    pub(super) fn any_in_force(&self, ids: impl Iterator<Item = LeaseId>, now: Nanos) -> bool {
        let state = lock(&self.0);
        ids.into_iter().any(|id| state.by_id.get(&id).is_some_and(|lease| in_force(lease, now)))
    }

    pub(super) fn set_cap(&self, tenant: u32, bytes: Option<u64>) {
        let caps = &mut lock(&self.0).caps;
        match bytes {
            Some(bytes) => drop(caps.insert(tenant, bytes)),
            None => drop(caps.remove(&tenant)),
        }
    }

    pub(super) fn set_share(&self, share: Option<PinShare>) {
        lock(&self.0).share = share;
    }

    pub(super) fn pinned_bytes(&self, tenant: u32) -> u64 {
        lock(&self.0).pinned.get(&tenant).map_or(0, |(bytes, _)| *bytes)
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.0).by_id.len()
    }

    pub(super) fn bytes(&self) -> usize {
        let state = lock(&self.0);
        state.by_id.len() * LEASE_BYTES + state.prints * size_of::<BlockFingerprint>()
    }
}

fn in_force(lease: &Lease, now: Nanos) -> bool {
    lease.until.is_none_or(|until| now < until) || kvarts_layout::planted!("lease-never-ends")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tenants_pin_half_of_it_together_and_each_has_its_part() {
        let leases = Leases::default();
        leases.set_share(Some(PinShare { all: 100, each: 25, tenants: 2 }));
        let lease = |tenant, bytes| {
            let terms = LeaseTerms { until: None, tenant, cap_bytes: u64::MAX };
            let id = leases.begin(terms);
            leases.complete(id, terms, &[BlockFingerprint::default()], bytes).map(|()| id)
        };
        let first = lease(1, 25).unwrap();
        let beyond = lease(1, 50).unwrap();
        assert_eq!(lease(1, 1), Err(LeaseError::Together), "its own and all that is common");
        lease(2, 25).unwrap();
        assert_eq!(lease(2, 1), Err(LeaseError::Together), "the first has what is common");
        assert_eq!(leases.pinned_bytes(1) + leases.pinned_bytes(2), 100);
        leases.end(first).unwrap();
        assert!(lease(2, 1).is_ok(), "what the first has beyond its part is less by then");
        leases.end(beyond).unwrap();
        leases.set_share(None);
        assert!(lease(1, 1 << 40).is_ok());
    }

    #[test]
    fn a_tenant_holds_so_many_blocks_at_most_whatever_they_count() {
        let leases = Leases::default();
        let terms = LeaseTerms { until: None, tenant: 1, cap_bytes: u64::MAX };
        let half = vec![BlockFingerprint::default(); PINS_MAX / 2];
        let lease = |terms: LeaseTerms, prints: &[_]| {
            let id = leases.begin(terms);
            let completed = leases.complete(id, terms, prints, prints.len() as u64).map(|()| id);
            if completed.is_err() {
                leases.end(id);
            }
            completed
        };
        let first = lease(terms, &half).unwrap();
        lease(terms, &half).unwrap();
        assert_eq!(lease(terms, &half[..1]), Err(LeaseError::Blocks));
        assert!(lease(LeaseTerms { tenant: 2, ..terms }, &half).is_ok(), "another tenant's are its own");
        assert_eq!((leases.len(), leases.pinned_bytes(1)), (3, PINS_MAX as u64));
        leases.end(first);
        assert!(lease(terms, &half).is_ok());
    }
}
