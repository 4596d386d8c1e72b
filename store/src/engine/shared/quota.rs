//! Keeping a namespace within its quota, and a tenant's together within theirs: what has not been used for longest goes
//! first.
//!
//! It happens on the executor of the shard that the put goes to, in short sections (`steps`), and in memory alone: what
//! counts is what the index points at, so a block that leaves the index is out of the account, and its bytes are dead
//! until their segment is reclaimed. Its name is found afterwards, to tell of it (`quota_events`). It looks at the account's own
//! records, which are kept apart from others', and each time makes room for a share of the limit, so that the next look is
//! that many bytes away. One task at a time does it for an account; others wait in the order in which they came.
//!
//! Which blocks a record has, the index does not say: of accounts with a limit it is kept by record from the put on. Of
//! what recovery found, or what was put before there was a limit, it is learnt by one walk over the index.
//!
//! Records go as a whole, oldest use first, those of one time in log order. One on which another hangs stays until that one has
//! gone: of a chain the end goes first.

mod oldest;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use self::oldest::{Old, Oldest};
use super::Shared;
use crate::engine::tasks::steps::{AT_ONCE, Section};
use crate::index::{BlockFingerprint, Lookup, OwnerCursor, RecordId, RecordInfo};
use crate::ledger::{Account, Known, MakingRoom, OverQuota, Pool, Promise};
use kvarts_contract::blocking::block_on;
use kvarts_contract::error::Reason;
use kvarts_contract::sync::{Mutex, MutexGuard};

/// Each time at least this part of the limit is freed.
const SHARE: u64 = 16;
/// Blocks of one record that go without a turn for others.
const BLOCKS_AT_ONCE: usize = 64;
/// Records that are looked at for each that is noted, whether they are there still.
const LOOKED_AT: usize = 2;
/// The same where the index lacks room.
const LOOKED_AT_ONCE: usize = 256;

/// What a put has of its account's limit.
#[derive(Debug)]
pub(crate) enum Share {
    /// Its bytes.
    Promised(Promise),
    /// This many bytes must become free first.
    Owed(Arc<Account>, u64),
}

/// Takes `bytes` of the account for a put, if they are there: else room is to be made for them. What can never fit is
/// refused.
pub(crate) fn promise(account: &Arc<Account>, bytes: u64) -> Result<Share, Reason> {
    match account.promise(bytes) {
        Ok(promise) => Ok(Share::Promised(promise)),
        Err(over) if bytes > over.limit => Err(refused(over)),
        Err(_) => Ok(Share::Owed(Arc::clone(account), bytes)),
    }
}

fn refused(over: OverQuota) -> Reason {
    Reason::Quota { limit: over.limit, wanted: over.wanted }
}

impl Share {
    /// Makes room for what is owed, and takes it.
    pub(crate) async fn paid(self, shared: &Shared) -> Result<Promise, Reason> {
        match self {
            Self::Promised(promise) => Ok(promise),
            Self::Owed(account, bytes) => {
                loop {
                    let evicted = make_room(shared, &account, bytes).await;
                    match account.promise(bytes) {
                        Ok(promise) => return Ok(promise),
                        // Others took what was freed: there may be more.
                        Err(_) if evicted => {}
                        Err(over) => return Err(refused(over)),
                    }
                }
            }
        }
    }

    /// Whether others' blocks may go for it.
    pub(crate) fn is_owed(&self) -> bool {
        matches!(self, Self::Owed(..))
    }
}

/// Evicts records until `bytes` more fit into the account and its pool, if that can be had; says whether any went.
pub(crate) async fn make_room(shared: &Shared, account: &Account, bytes: u64) -> bool {
    let of_namespace = make_room_in(shared, QuotaScope::Namespace(account), bytes).await;
    match account.pool() {
        Some(pool) => make_room_in(shared, QuotaScope::Tenant(pool), bytes).await || of_namespace,
        None => of_namespace,
    }
}

/// What has a limit.
#[derive(Clone, Copy)]
pub(crate) enum QuotaScope<'a> {
    Namespace(&'a Account),
    Tenant(&'a Arc<Pool>),
}

impl<'a> QuotaScope<'a> {
    /// Whose turn it is to make room.
    fn turn(self) -> &'a MakingRoom {
        match self {
            Self::Namespace(account) => &account.making_room,
            Self::Tenant(pool) => &pool.making_room,
        }
    }

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

/// Evicts records of the scope until `bytes` more fit, if that can be had; says whether any went.
async fn make_room_in(shared: &Shared, scope: QuotaScope<'_>, bytes: u64) -> bool {
    let (mut bytes, mut evicted) = (bytes, false);
    // What can never fit makes nothing go.
    while let Some(limit) = scope.limit().filter(|limit| bytes <= *limit) {
        let turn = scope.turn().take().await;
        let excess = scope.excess(bytes);
        if excess > 0 {
            evicted |= evict_oldest(shared, &scope.accounts(shared), excess.max(limit / SHARE)).await > 0;
        }
        drop(turn);
        if scope.limit() == Some(limit) {
            break;
        }
        // A change made meanwhile found the turn taken.
        bytes = 0;
    }
    evicted
}

/// As [`make_room_in`] for a limit that was set just now, on the thread that set it. If another task makes room already,
/// that task keeps the new limit.
pub(crate) fn keep_limit(shared: &Shared, scope: QuotaScope<'_>) {
    let Some(_turn) = scope.turn().try_take() else { return };
    let excess = scope.excess(0);
    if let Some(limit) = scope.limit().filter(|_| excess > 0) {
        block_on(evict_oldest(shared, &scope.accounts(shared), excess.max(limit / SHARE)));
    }
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
    known.insert(record, prints.collect());
    // A few of the others each time: what is gone is forgotten before as much comes again.
    forget_gone(shared, &account, &mut known, LOOKED_AT);
}

/// Looks at a number of records of an account, behind those looked at last, and forgets the blocks of those that are gone.
fn forget_gone(shared: &Shared, account: &Account, known: &mut Known, most: usize) {
    let records = shared.index.records();
    let own = |info: RecordInfo| records.ledger().number_of(info.class) == account.number();
    known.look(most, |id| records.get(id).is_some_and(own));
}

/// The same for one of all accounts, each in its turn: what is gone must not count for long as room that the index lacks.
pub(crate) fn forget_some(shared: &Shared, turn: u64) {
    let accounts = shared.index.records().ledger().accounts();
    let from = turn.checked_rem(accounts.len() as u64).unwrap_or(0) as usize;
    let in_turn = accounts.iter().cycle().skip(from).take(accounts.len().min(LOOKED_AT_ONCE));
    for account in in_turn {
        let mut known = lock(&account.known);
        if known.len() > 0 {
            return forget_gone(shared, account, &mut known, LOOKED_AT_ONCE);
        }
    }
}

/// Evicts records of these accounts that are worth `bytes` together, the longest unused first; gives what went. Those
/// with a lease on any block are passed over.
async fn evict_oldest(shared: &Shared, accounts: &[Arc<Account>], bytes: u64) -> u64 {
    let mut section = Section::begin(&shared.work.quotas, &*shared.clock);
    let mut going = Going { shared, accounts, sum: 0, walked: false, needed: BTreeMap::new() };
    let mut behind = None;
    // One look, unless more of the oldest may not go than it has kept for that.
    loop {
        let mut oldest = Oldest::behind(behind, bytes - going.sum);
        for (place, account) in accounts.iter().enumerate() {
            let look = |id: RecordId, info: &RecordInfo, used: u32| {
                let lies = (info.shard, info.segment, info.page);
                oldest.offer(Old { used, lies, id, share: info.share(info.live), account: place });
            };
            records_of(shared, account, &mut section, look).await;
        }
        while going.sum < bytes
            && let Some(one) = oldest.pop()
        {
            behind = behind.max(Some(one));
            if let Some(freed) = going.evict(one, &mut section).await {
                oldest.again(freed);
            }
        }
        if going.sum >= bytes || !oldest.is_cut() {
            return going.sum;
        }
    }
}

/// Records on their way out.
struct Going<'a> {
    shared: &'a Shared,
    accounts: &'a [Arc<Account>],
    /// Bytes that went.
    sum: u64,
    /// It was learnt which blocks all records have.
    walked: bool,
    /// On these something hangs: they have another turn when that has gone.
    needed: BTreeMap<u64, Old>,
}

impl Going<'_> {
    /// Evicts a record if it may go. Gives one that has waited for that.
    async fn evict(&mut self, one: Old, section: &mut Section<'_>) -> Option<Old> {
        let (shared, now) = (self.shared, self.shared.clock.now());
        let account = self.accounts.get(one.account)?;
        if !self.walked && !lock(&account.known).has(one.id) {
            self.walked = true;
            learn(shared, self.accounts, section).await;
        }
        let prints = lock(&account.known).remove(one.id)?;
        let (mut leased, mut held) = (false, None);
        for some in prints.chunks(BLOCKS_AT_ONCE) {
            leased |= some.iter().any(|print| shared.index.is_leased(*print, now));
            held = held.or_else(|| some.iter().copied().find(|print| shared.index.hanging(*print) > 0));
            section.step(some.len() as u64).await;
        }
        if leased || held.is_some() {
            lock(&account.known).insert(one.id, prints);
            if let Some(held) = held.filter(|_| !leased) {
                self.needed.insert(held.first(), one);
            }
            return None;
        }
        let parent = shared.index.records().get(one.id).map_or(0, |info| info.parent);
        for some in prints.chunks(BLOCKS_AT_ONCE) {
            some.iter().for_each(|print| evict(shared, one.id, *print));
            section.step(some.len() as u64).await;
        }
        self.sum = self.sum.saturating_add(one.share);
        self.needed.remove(&parent)
    }
}

/// Takes a block out if it is in this record still.
fn evict(shared: &Shared, record: RecordId, print: BlockFingerprint) {
    if let Lookup::Live(at) = shared.index.lookup(print)
        && at.record == record
        && shared.evict_unnamed(print, at)
    {
        shared.counters.blocks_evicted.fetch_add(1, Relaxed);
    }
}

/// Shows every record of an account that has a live block, with the second of its last use.
async fn records_of(
    shared: &Shared,
    account: &Account,
    section: &mut Section<'_>,
    mut look: impl FnMut(RecordId, &RecordInfo, u32),
) {
    let mut some = Vec::new();
    for shard in 0..u16::try_from(shared.shards()).unwrap_or(u16::MAX) {
        let mut cursor = Some(OwnerCursor::default());
        while let Some(from) = cursor {
            cursor = shared.index.records().snapshot_of((shard, Some(account.number())), from, &mut some);
            some.iter()
                .filter(|(_, info, _)| info.live > 0)
                .for_each(|(id, info, used)| look(*id, info, *used));
            section.step(some.len().max(1) as u64).await;
        }
    }
}

/// Learns which blocks the records of these accounts have, by a walk over the index.
async fn learn(shared: &Shared, accounts: &[Arc<Account>], section: &mut Section<'_>) {
    let mut wanted = BTreeMap::<RecordId, (usize, Vec<BlockFingerprint>)>::new();
    for (place, account) in accounts.iter().enumerate() {
        let look = |id, _: &RecordInfo, _| drop(wanted.insert(id, (place, Vec::new())));
        records_of(shared, account, section, look).await;
    }
    let mut entries = Vec::new();
    for partition in 0..shared.index.partitions() {
        let mut next = Some(BlockFingerprint::default());
        while let Some(from) = next {
            next = shared.index.snapshot_part(partition, from, AT_ONCE as usize / 2, &mut entries);
            for entry in &entries {
                if let Lookup::Live(at) = entry.state
                    && let Some((_, prints)) = wanted.get_mut(&at.record)
                {
                    prints.push(entry.print);
                }
            }
            section.step(entries.len() as u64).await;
        }
    }
    for (id, (place, prints)) in wanted {
        if let Some(account) = accounts.get(place) {
            lock(&account.known).insert(id, prints.into());
        }
        section.step(1).await;
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}
