//! Keeping a namespace within its quota, and a tenant's together within theirs: what has not been used for longest goes
//! first.
//!
//! It happens on the caller's thread and in memory alone: what counts is what the index points at, so a block that
//! leaves the index is out of the account, and its bytes are dead until their segment is reclaimed. Its name is found
//! afterwards, to tell of it (`naming`). A walk over the
//! index is not free; so each makes room for a share of the limit, and the next is that many bytes away.
//!
//! Records go as a whole, oldest use first, those of one time in log order: a chain that loses its oldest record
//! keeps the others whole.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use kvarts_layout::NamespaceId;

use super::shared::Shared;
use crate::error::Reason;
use crate::index::{Lookup, RecordCursor, RecordId, RecordInfo};
use crate::ledger::{Account, Pool, Promise};

/// Each walk frees at least this part of the limit.
const SHARE: u64 = 16;

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

    /// Whether records of a namespace count in it.
    fn holds(self, shared: &Shared, namespace: NamespaceId) -> bool {
        match self {
            Self::Namespace(account) => account.namespace() == namespace,
            Self::Tenant(pool) => {
                let account = shared.index.records().ledger().account(namespace);
                account.pool().is_some_and(|own| Arc::ptr_eq(own, pool))
            }
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
    let victims = oldest(shared, purse, excess.max(limit / SHARE));
    let mut entries = Vec::new();
    for partition in 0..shared.index.partitions() {
        shared.index.snapshot(partition, &mut entries);
        for entry in &entries {
            if let Lookup::Live(at) = entry.state
                && victims.contains(&at.record)
                && shared.evict_unnamed(entry.print, at)
            {
                shared.counters.blocks_evicted.fetch_add(1, Relaxed);
            }
        }
    }
}

/// Records of the purse that are worth `bytes` together, the longest unused first. Those with a lease on any
/// block are passed over.
fn oldest(shared: &Shared, purse: Purse<'_>, bytes: u64) -> BTreeSet<RecordId> {
    let ages = ages(shared);
    let mut found = Vec::new();
    let mut some = Vec::new();
    let mut cursor = Some(RecordCursor::default());
    while let Some(from) = cursor {
        cursor = shared.index.records().snapshot(from, &mut some);
        for (id, record) in &some {
            let age = ages.get(id.0 as usize).copied().flatten();
            if let Some(age) = age.filter(|_| belongs(shared, purse, record)) {
                let place = (record.shard, record.segment, record.page);
                found.push((std::cmp::Reverse(age), place, *id, record.share(record.live)));
            }
        }
    }
    found.sort_unstable();
    let mut sum = 0u64;
    let needed = found.into_iter().take_while(|(.., share)| {
        let wanted = sum < bytes;
        sum = sum.saturating_add(*share);
        wanted
    });
    needed.map(|(_, _, id, _)| id).collect()
}

fn belongs(shared: &Shared, purse: Purse<'_>, record: &RecordInfo) -> bool {
    let class = shared.classes.get(record.class);
    class.is_some_and(|class| purse.holds(shared, class.namespace.id))
}

/// How many steps ago a block of each record was last used, by the record's number; `None` for records without a
/// live block, and for those of which a lease holds one.
fn ages(shared: &Shared) -> Vec<Option<u16>> {
    let now = shared.epoch();
    let mut ages: Vec<Option<u16>> = Vec::new();
    let mut leased = BTreeSet::new();
    let mut entries = Vec::new();
    for partition in 0..shared.index.partitions() {
        shared.index.snapshot(partition, &mut entries);
        for entry in &entries {
            let Lookup::Live(at) = entry.state else { continue };
            let number = at.record.0 as usize;
            if entry.leased && shared.index.is_leased(entry.print, shared.clock.now()) {
                leased.insert(number);
            }
            if ages.len() <= number {
                ages.resize(number + 1, None);
            }
            if let Some(slot) = ages.get_mut(number) {
                let age = entry.heat.age(now);
                *slot = Some(slot.map_or(age, |known| known.min(age)));
            }
        }
    }
    for number in leased {
        if let Some(slot) = ages.get_mut(number) {
            *slot = None;
        }
    }
    ages
}
