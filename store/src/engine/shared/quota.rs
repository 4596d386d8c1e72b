//! Keeping a namespace within its quota, and the namespaces of a tenant together within theirs: what was not used for
//! longest goes first.
//!
//! A put that would pass a limit waits while records of its account go. Which, is chosen in memory on the executor of
//! the put, by a walk over the account's own records, which are kept apart from others': the oldest, for a share of the limit, so that the
//! next walk is that many bytes away (`oldest`). A record goes after all that hang on it (`waves`), by the executor of its shard, which
//! reads its header for the names of its blocks (`space::evict::of_records`). A limit that is lowered is met in the same way, on
//! the first executor. One task at a time makes room for an account; others wait in the order in which they came.
//!
//! What counts is what the index points at: an evicted block is out of the account at once, and its bytes are dead until their
//! segment is reclaimed. So nothing is punched for a quota.
//!
//! The wait for a shard is bounded: one whose device or executor hangs costs one wait, and nothing of it is chosen for a
//! while.

mod oldest;
mod waves;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kvarts_layout::planted;

use self::oldest::{Old, Oldest};
use self::waves::Waves;
use super::Shared;
use crate::engine::tasks::notify::with_deadline;
use crate::engine::tasks::steps::Section;
use crate::index::{Lookup, OwnerCursor, RecordId, RecordInfo};
use crate::ledger::{Account, MakingRoom, OverQuota, Pool, Promise};
use crate::rt::LocalTask;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_contract::sync::Mutex;

/// Each time at least this part of the limit is freed.
const SHARE: u64 = 16;
/// Records of one shard that go at once: their headers are read for it.
const OF_A_SHARD: usize = 32;
/// Records of such shards that are passed over at once.
const AT_ONCE: usize = 1024;
/// How long a task waits for what shards evict.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// How long nothing is chosen of a shard that did not answer in time.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// A record that is to go: its number, and the segment and page where it lies.
pub(crate) type ToGo = (RecordId, (u32, u32));

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
    /// Makes room for what is owed, and takes it. `timer` is a timer of the executor on which it runs.
    pub(crate) async fn paid(
        self,
        shared: &Shared,
        timer: &dyn Fn(Nanos) -> LocalTask,
    ) -> Result<Promise, Reason> {
        match self {
            Self::Promised(promise) => Ok(promise),
            Self::Owed(account, bytes) => {
                let room = Room { shared, timer };
                loop {
                    let made = room.make(&account, bytes).await;
                    match account.promise(bytes) {
                        Ok(promise) => return Ok(promise),
                        // Others took what was freed: there may be more.
                        Err(_) if made => {}
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

/// What has a limit.
#[derive(Clone, Debug)]
pub(crate) enum QuotaScope {
    Namespace(Arc<Account>),
    Tenant(Arc<Pool>),
}

impl QuotaScope {
    /// Whose turn it is to make room.
    fn turn(&self) -> &MakingRoom {
        match self {
            Self::Namespace(account) => &account.making_room,
            Self::Tenant(pool) => &pool.making_room,
        }
    }

    fn limit(&self) -> Option<u64> {
        match self {
            Self::Namespace(account) => account.space().limit,
            Self::Tenant(pool) => pool.space().limit,
        }
    }

    /// Bytes that must go before this many more fit.
    pub(crate) fn excess(&self, bytes: u64) -> u64 {
        match self {
            Self::Namespace(account) => account.excess(bytes),
            Self::Tenant(pool) => pool.excess(bytes),
        }
    }

    /// Bytes that are to go before this many more fit; `None` if they fit, or can never fit: nothing goes for them.
    fn wanted(&self, bytes: u64) -> Option<u64> {
        let limit = self.limit().filter(|limit| bytes <= *limit)?;
        let excess = self.excess(bytes);
        (excess > 0).then(|| excess.max(limit / SHARE))
    }

    /// The accounts whose records count in it.
    fn accounts(&self, shared: &Shared) -> Vec<Arc<Account>> {
        match self {
            Self::Namespace(account) => vec![Arc::clone(account)],
            Self::Tenant(pool) => shared.index.records().ledger().accounts_in(pool),
        }
    }
}

/// Has the shards of a store evict for a limit that was lowered. `timer` is a timer of the executor on which it runs.
pub(crate) async fn keep(shared: &Shared, scope: &QuotaScope, timer: &dyn Fn(Nanos) -> LocalTask) {
    Room { shared, timer }.make_in(scope, 0).await;
}

/// A task that makes room.
struct Room<'a> {
    shared: &'a Shared,
    timer: &'a dyn Fn(Nanos) -> LocalTask,
}

impl Room<'_> {
    /// Evicts records until `bytes` more fit into the account and its pool, if that can be had. False if they do not fit and nothing
    /// went.
    async fn make(&self, account: &Arc<Account>, bytes: u64) -> bool {
        let of_namespace = self.make_in(&QuotaScope::Namespace(Arc::clone(account)), bytes).await;
        match account.pool().filter(|_| of_namespace) {
            Some(pool) => self.make_in(&QuotaScope::Tenant(Arc::clone(pool)), bytes).await,
            None => of_namespace,
        }
    }

    async fn make_in(&self, scope: &QuotaScope, bytes: u64) -> bool {
        let _turn = scope.turn().take().await;
        let accounts = scope.accounts(self.shared);
        let mut section = Section::begin(&self.shared.work.quotas, &*self.shared.clock);
        let (mut behind, mut evicted, mut chosen) = (None, false, Waves::new());
        // One look, unless more of the oldest may not go than it has kept for that.
        while let Some(wanted) = scope.wanted(bytes) {
            let mut oldest = Oldest::behind(behind, wanted);
            for account in &accounts {
                self.offer(account, &mut oldest, &mut section).await;
            }
            while let Some(wanted) = scope.wanted(bytes)
                && let Some(last) = self.choose((&mut oldest, wanted), &mut chosen, &mut section).await
            {
                behind = behind.max(Some(last));
                evicted |= self.evict(&mut chosen, wanted, &mut section).await;
            }
            if !oldest.is_cut() {
                break;
            }
        }
        while chosen.forget_one() {
            section.step(1).await;
        }
        evicted || scope.excess(bytes) == 0
    }

    /// Chooses the oldest records that are worth so many bytes, and gives the last of them; `None` if there is none. One that was
    /// chosen before, and stayed for what hangs on it, goes after that.
    async fn choose(
        &self,
        (oldest, wanted): (&mut Oldest, u64),
        chosen: &mut Waves<Old>,
        section: &mut Section<'_>,
    ) -> Option<Old> {
        let (mut ids, mut bytes, mut last) = (Vec::new(), 0u64, None);
        while bytes < wanted
            && let Some(one) = oldest.pop()
        {
            bytes = bytes.saturating_add(one.share);
            last = Some(one);
            ids.push(one.id);
            chosen.add(one.id, one);
            section.step(1).await;
        }
        for &id in &ids {
            let hanging = self.shared.index.records().get(id).filter(|info| info.hangs);
            if let Some(info) = hanging
                && let Lookup::Live(before) = self.shared.index.lookup_first(info.parent)
            {
                chosen.hangs(id, before.record);
            }
            section.step(1).await;
        }
        for &id in &ids {
            chosen.is_first(id);
            section.step(1).await;
        }
        last
    }

    /// Offers every record of an account that has a live block, but those of shards that do not answer.
    async fn offer(&self, account: &Account, oldest: &mut Oldest, section: &mut Section<'_>) {
        let mut some = Vec::new();
        for shard in 0..u16::try_from(self.shared.shards()).unwrap_or(u16::MAX) {
            let now = self.shared.clock.now();
            let mut cursor = (!self.shared.silent.is_silent(shard.into(), now)).then(OwnerCursor::default);
            while let Some(from) = cursor {
                let owner = (shard, Some(account.number()));
                cursor = self.shared.index.records().snapshot_of(owner, from, &mut some);
                for (id, info, used) in some.iter().filter(|(_, info, _)| info.live > 0) {
                    let lies = (info.shard, info.segment, info.page);
                    oldest.offer(Old { used: *used, lies, id: *id, share: info.share(info.live) });
                }
                section.step(some.len().max(1) as u64).await;
            }
        }
    }

    /// Has the shards evict of what is chosen so many bytes, if they can; says whether anything went.
    async fn evict(&self, chosen: &mut Waves<Old>, mut wanted: u64, section: &mut Section<'_>) -> bool {
        let mut evicted = false;
        loop {
            let (mut by_shard, mut bytes, mut later) = (BTreeMap::<u32, Vec<ToGo>>::new(), 0, Vec::new());
            while bytes < wanted
                && later.len() < AT_ONCE
                && let Some((id, one)) = chosen.take()
            {
                let (shard, segment, page) = one.lies;
                let of_shard = by_shard.entry(shard.into()).or_default();
                match of_shard.len() < OF_A_SHARD {
                    true => {
                        of_shard.push((id, (segment, page)));
                        bytes = bytes.saturating_add(one.share);
                    }
                    false => later.push(id),
                }
                section.step(1).await;
            }
            later.into_iter().for_each(|id| chosen.is_first(id));
            if by_shard.is_empty() {
                return evicted;
            }
            let now = self.shared.clock.now();
            let (others, by) = (self.shared.others(), now.plus(ANSWER_WITHIN));
            let ask = |(shard, records)| {
                let is_silent = self.shared.silent.is_silent(shard, now);
                let others = others.as_ref().filter(|_| !is_silent)?;
                Some((shard, others.evict_records(shard, records)?))
            };
            let asked: Vec<_> = by_shard.into_iter().filter_map(ask).collect();
            section.pause();
            for (shard, answer) in asked {
                let by = if planted!("quota-waits") { now.plus(Duration::from_secs(3600)) } else { by };
                match with_deadline(pin!(answer), Some((self.timer)(by))).await {
                    Some(gone) => {
                        let gone = gone.unwrap_or_default();
                        evicted |= gone.blocks > 0;
                        for id in gone.records {
                            wanted = wanted.saturating_sub(chosen.gone(id).map_or(0, |one| one.share));
                        }
                    }
                    None => self.shared.silent.note(shard, self.shared.clock.now().plus(ASKED_AGAIN_AFTER)),
                }
            }
        }
    }
}

/// What a shard has evicted.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    /// Blocks.
    pub(crate) blocks: u64,
    /// Records of which nothing is left.
    pub(crate) records: Vec<RecordId>,
}

/// Whether a record is still the one that was chosen.
pub(crate) fn is_same(info: &RecordInfo, lies: (u32, u32)) -> bool {
    (info.segment, info.page) == lies && info.live > 0
}

/// Shards that did not answer in time, and until when they are not asked.
#[derive(Debug, Default)]
pub(crate) struct SilentShards(Mutex<BTreeMap<u32, Nanos>>);

impl SilentShards {
    fn is_silent(&self, shard: u32, now: Nanos) -> bool {
        let silent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        silent.get(&shard).is_some_and(|until| now < *until)
    }

    fn note(&self, shard: u32, until: Nanos) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(shard, until);
    }
}
