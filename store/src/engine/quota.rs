//! Keeping a namespace within its quota, and a tenant's together within theirs: what has not been used for longest goes
//! first.
//!
//! It happens on the caller's thread and in memory alone: what counts is what the index points at, so a block that
//! leaves the index is out of the account, and its bytes are dead until their segment is reclaimed. Its name is found
//! afterwards, to tell of it (`naming`). It looks at the account's own records, which are kept apart from others', and
//! each time makes room for a share of the limit, so that the next look is that many bytes away.
//!
//! Which blocks a record has, the index does not say: of accounts with a limit it is kept by record from the put on. Of
//! what recovery found, or what was put before there was a limit, it is learnt by one walk over the index.
//!
//! Records go as a whole, oldest use first, those of one time in log order: a chain that loses its oldest record
//! keeps the others whole.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use super::shared::Shared;
use crate::error::Reason;
use crate::index::{BlockFingerprint, Lookup, OwnerCursor, RecordId, RecordInfo};
use crate::ledger::{Account, Known, Pool, Promise};
use crate::sync::{Mutex, MutexGuard};

/// Each time at least this part of the limit is freed.
const SHARE: u64 = 16;
/// Records whose blocks are known before those are looked for that are gone.
const KNOWN_MIN: usize = 1024;

/// Takes `bytes` of the account for a put, evicting what must go for it.
pub(crate) fn promise(shared: &Shared, account: &Arc<Account>, bytes: u64) -> Result<Promise, Reason> {
    account.promise(bytes).or_else(|_| {
        make_room(shared, account, bytes);
        account.promise(bytes).map_err(|over| Reason::Quota { limit: over.limit, wanted: over.wanted })
    })
}

/// Evicts records until `bytes` more fit into the account and its pool, if that can be had.
pub(crate) fn make_room(shared: &Shared, account: &Account, bytes: u64) {
    make_room_in(shared, Purse::Namespace(account), bytes);
    if let Some(pool) = account.pool() {
        make_room_in(shared, Purse::Tenant(pool), bytes);
    }
}

/// What has a limit.
#[derive(Clone, Copy)]
pub(crate) enum Purse<'a> {
    Namespace(&'a Account),
    Tenant(&'a Arc<Pool>),
}

impl Purse<'_> {
    fn limit(self) -> Option<u64> {
        match self {
            Self::Namespace(account) => account.space().limit,
            Self::Tenant(pool) => pool.space().limit,
        }
    }

    fn excess(self, bytes: u64) -> u64 {
        match self {
            Self::Namespace(account) => account.excess(bytes),
            Self::Tenant(pool) => pool.excess(bytes),
        }
    }

    /// The accounts whose records count in it.
    fn accounts(self, shared: &Shared) -> Vec<Arc<Account>> {
        let ledger = shared.index.records().ledger();
        match self {
            Self::Namespace(account) => vec![ledger.account(account.namespace())],
            Self::Tenant(pool) => ledger.accounts_in(pool),
        }
    }
}

/// Evicts records of the purse until `bytes` more fit, if that can be had.
pub(crate) fn make_room_in(shared: &Shared, purse: Purse<'_>, bytes: u64) {
    let limit = match purse.limit() {
        // What can never fit makes nothing go.
        Some(limit) if bytes <= limit => limit,
        _ => return,
    };
    let one = match purse {
        Purse::Namespace(account) => &account.making_room,
        Purse::Tenant(pool) => &pool.making_room,
    };
    let _one = one.lock().unwrap_or_else(PoisonError::into_inner);
    let excess = purse.excess(bytes);
    if excess == 0 {
        return;
    }
    evict_oldest(shared, &purse.accounts(shared), excess.max(limit / SHARE));
}

/// Notes which blocks a record has, if its account has a limit.
pub(crate) fn note(
    shared: &Shared,
    class: u32,
    record: RecordId,
    prints: impl Iterator<Item = BlockFingerprint>,
) {
    let records = shared.index.records();
    let Some(account) = records.ledger().account_of(class).filter(|account| account.is_limited()) else {
        return;
    };
    let mut known = lock(&account.known);
    known.records.insert(record, prints.collect());
    if known.records.len() > known.looked_through_at.max(KNOWN_MIN) {
        let own = |id: RecordId| {
            let info = records.get(id).filter(|info| info.live > 0);
            info.is_some_and(|info| records.ledger().number_of(info.class) == account.number())
        };
        known.records.retain(|id, _| own(*id));
        known.looked_through_at = 2 * known.records.len();
    }
}

/// Evicts records of these accounts that are worth `bytes` together, the longest unused first. Those with a lease on any
/// block are passed over.
fn evict_oldest(shared: &Shared, accounts: &[Arc<Account>], bytes: u64) {
    let mut found = Vec::new();
    for (place, account) in accounts.iter().enumerate() {
        records_of(shared, account, |id, info, used| {
            found.push((used, (info.shard, info.segment, info.page), id, info.share(info.live), place));
        });
    }
    found.sort_unstable();
    let (mut sum, mut walked, now) = (0u64, false, shared.clock.now());
    for (_, _, id, share, place) in found {
        let Some(account) = accounts.get(place).filter(|_| sum < bytes) else { break };
        if !walked && !lock(&account.known).records.contains_key(&id) {
            walked = true;
            learn(shared, accounts);
        }
        let Some(prints) = lock(&account.known).records.remove(&id) else { continue };
        shared.work.quotas.add(prints.len() as u64);
        if prints.iter().any(|print| shared.index.is_leased(*print, now)) {
            lock(&account.known).records.insert(id, prints);
            continue;
        }
        for print in &prints {
            if let Lookup::Live(at) = shared.index.lookup(*print)
                && at.record == id
                && shared.evict_unnamed(*print, at)
            {
                shared.counters.blocks_evicted.fetch_add(1, Relaxed);
            }
        }
        sum = sum.saturating_add(share);
    }
}

/// Shows every record of an account that has a live block, with the second of its last use.
fn records_of(shared: &Shared, account: &Account, mut look: impl FnMut(RecordId, &RecordInfo, u32)) {
    let mut some = Vec::new();
    for shard in 0..u16::try_from(shared.shards()).unwrap_or(u16::MAX) {
        let mut cursor = Some(OwnerCursor::default());
        while let Some(from) = cursor {
            cursor = shared.index.records().snapshot_of((shard, Some(account.number())), from, &mut some);
            shared.work.quotas.add(some.len() as u64);
            some.iter()
                .filter(|(_, info, _)| info.live > 0)
                .for_each(|(id, info, used)| look(*id, info, *used));
        }
    }
}

/// Learns which blocks the records of these accounts have, by a walk over the index.
fn learn(shared: &Shared, accounts: &[Arc<Account>]) {
    let mut wanted = BTreeMap::<RecordId, (usize, Vec<BlockFingerprint>)>::new();
    for (place, account) in accounts.iter().enumerate() {
        records_of(shared, account, |id, _, _| drop(wanted.insert(id, (place, Vec::new()))));
    }
    let mut entries = Vec::new();
    for partition in 0..shared.index.partitions() {
        shared.index.snapshot(partition, &mut entries);
        shared.work.quotas.add(entries.len() as u64);
        for entry in &entries {
            if let Lookup::Live(at) = entry.state
                && let Some((_, prints)) = wanted.get_mut(&at.record)
            {
                prints.push(entry.print);
            }
        }
    }
    for (id, (place, prints)) in wanted {
        if let Some(account) = accounts.get(place) {
            lock(&account.known).records.insert(id, prints.into());
        }
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}
