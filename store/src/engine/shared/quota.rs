//! Keeping a namespace within its quota, and the namespaces of a tenant together within theirs: the records that were
//! unused for longest go first.
//!
//! A put that would pass a limit waits while records of its account go. Which, is chosen in memory, by walks over the account's own records, which are kept apart from others' (`oldest`), for a share of the limit, so
//! that the next walk is that many bytes away. A record on which others hang is not chosen (`hanging`): it goes right after the last
//! of them, as lately used as they were, in whatever shards they lie. So of a chain the end goes first, and of two chains the one that was
//! unused for longer. The executor of its shard evicts a record, and reads its header for the names of its blocks
//! (`space::evict::of_records`). A limit that is lowered is met in the same way. One task at a time
//! makes room for an account, on an executor; a put that waits goes on as soon as its bytes are there.
//!
//! What counts is what the index points at: an evicted block is out of the account at once, and its bytes are dead until their
//! segment is reclaimed. So nothing is punched for a quota.
//!
//! The wait for a shard is bounded: one whose device or executor hangs costs one wait, and nothing of it is chosen for a
//! while.

mod hanging;
mod oldest;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::task::Poll;
use std::time::Duration;

use kvarts_layout::planted;

use self::hanging::Hanging;
use self::oldest::{Old, Oldest};
use super::Shared;
use crate::engine::tasks::notify::with_deadline;
use crate::engine::tasks::steps::Section;
use crate::index::{Lookup, OwnerCursor, RecordId, RecordInfo};
use crate::ledger::{Account, MakingRoom, OverQuota, Pool, Promise};
use crate::rt::LocalTask;
use kvarts_contract::class::Class;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_contract::sync::Mutex;
use kvarts_contract::ticket::Ticket;

/// Each time at least this part of the limit is freed.
const SHARE: u64 = 16;
/// Records that go at once: few, so that reads find the devices free, and the rest of a chain goes before the end of the next.
const AT_ONCE: usize = 256;
/// Those of one shard.
const OF_A_SHARD: usize = 32;
/// Records before an end of a chain that are looked at.
const LINKS_MAX: u64 = 64;
/// How long a put waits for what shards evict, and how long a lower limit does.
const ANSWER_WITHIN: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];
/// How long nothing is chosen of a shard that did not answer in time.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(10);

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
    /// Has room made for what is owed, and takes it as soon as it is there.
    pub(crate) async fn paid(self, shared: &Arc<Shared>) -> Result<Promise, Reason> {
        match self {
            Self::Promised(promise) => Ok(promise),
            Self::Owed(account, bytes) => loop {
                let scope = QuotaScope::Namespace(Arc::clone(&account));
                let others = shared.others();
                let Some(made) = others.and_then(|others| others.make_quota_room(shared, scope, bytes))
                else {
                    return Err(Reason::Busy("the store is closing"));
                };
                match taken(&account, bytes, made).await {
                    Ok(promise) => return Ok(promise),
                    // Others took what was freed: there may be more.
                    Err(true) => {}
                    Err(false) => return account.promise(bytes).map_err(refused),
                }
            },
        }
    }

    /// Whether others' blocks may go for it.
    pub(crate) fn is_owed(&self) -> bool {
        matches!(self, Self::Owed(..))
    }
}

/// Bytes of the account, as soon as they are there; else what became of the attempt to make room.
async fn taken(account: &Arc<Account>, bytes: u64, made: Ticket<bool>) -> Result<Promise, bool> {
    let mut made = pin!(made);
    poll_fn(|context| {
        account.making_room.wait(context.waker());
        if let Some(pool) = account.pool() {
            pool.making_room.wait(context.waker());
        }
        match account.promise(bytes) {
            Ok(promise) => Poll::Ready(Ok(promise)),
            Err(_) => made.as_mut().poll(context).map(|made| Err(made.unwrap_or(false))),
        }
    })
    .await
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

    /// Bytes have been freed: who waits for them looks again.
    fn freed(&self) {
        match self {
            Self::Namespace(account) => {
                account.making_room.freed();
                if let Some(pool) = account.pool() {
                    pool.making_room.freed();
                }
            }
            Self::Tenant(pool) => pool.making_room.freed(),
        }
    }

    /// Bytes that are to go before this many more fit; `None` if they fit, or can never fit: nothing goes for them.
    fn wanted(&self, bytes: u64) -> Option<u64> {
        let limit = self.limit().filter(|limit| bytes <= *limit)?;
        let excess = self.excess(bytes);
        (excess > 0).then(|| excess.max(limit / SHARE))
    }

    /// By which the executors share the work.
    pub(crate) fn number(&self) -> u32 {
        match self {
            Self::Namespace(account) => account.number(),
            Self::Tenant(_) => 0,
        }
    }

    /// The accounts whose records count in it.
    fn accounts(&self, shared: &Shared) -> Vec<Arc<Account>> {
        match self {
            Self::Namespace(account) => vec![Arc::clone(account)],
            Self::Tenant(pool) => shared.index.records().ledger().accounts_in(pool),
        }
    }
}

/// Has the shards of a store evict until `bytes` more fit into the scope, and into the pool of an account, if that can be had. False
/// if they do not fit and nothing went. `timer` is a timer of the executor on which it runs; a put that `is_left` waits for nothing any
/// more, and nothing is begun once that executor `is_ending`.
pub(crate) async fn make_room(
    shared: &Shared,
    (scope, bytes): (QuotaScope, u64),
    timer: &dyn Fn(Nanos) -> LocalTask,
    (is_left, is_ending): (&dyn Fn() -> bool, &dyn Fn() -> bool),
) -> bool {
    // For a lower limit alone no one waits.
    let class = if bytes > 0 { Class::Foreground } else { Class::Background };
    let room = Room { shared, timer, class, is_left, is_ending };
    let pool = match &scope {
        QuotaScope::Namespace(account) => account.pool().cloned().map(QuotaScope::Tenant),
        QuotaScope::Tenant(_) => None,
    };
    // What can never fit into both makes nothing go in either.
    if [Some(&scope), pool.as_ref()]
        .into_iter()
        .flatten()
        .any(|one| one.limit().is_some_and(|limit| bytes > limit))
    {
        return false;
    }
    let made = room.make_in(&scope, bytes).await;
    match pool.filter(|_| scope.excess(bytes) == 0) {
        Some(pool) => room.make_in(&pool, bytes).await,
        None => made,
    }
}

/// A task that makes room.
struct Room<'a> {
    shared: &'a Shared,
    timer: &'a dyn Fn(Nanos) -> LocalTask,
    /// In which headers are read for it.
    class: Class,
    is_left: &'a dyn Fn() -> bool,
    is_ending: &'a dyn Fn() -> bool,
}

/// A record that may go, in the order in which they do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Next {
    /// Second of its last use, and of what hung on it.
    used: u32,
    /// Records of its chain that have gone before it.
    gone: Reverse<u32>,
    old: Old,
}

impl Room<'_> {
    /// Evicts records until `bytes` more fit into the scope, if that can be had. False if they do not fit and nothing went.
    async fn make_in(&self, scope: &QuotaScope, bytes: u64) -> bool {
        let _turn = scope.turn().take().await;
        let bytes = if (self.is_left)() { 0 } else { bytes };
        let accounts = scope.accounts(self.shared);
        let mut section = Section::begin(&self.shared.work.quotas, &*self.shared.clock);
        let (mut behind, mut evicted) = (None, false);
        // One look, unless more of the oldest may not go than are kept for that.
        while let Some(wanted) = scope.wanted(bytes).filter(|_| !(self.is_ending)()) {
            let mut hanging = self.hanging(&accounts, &mut section).await;
            let silent = self.shared.silent.shards(self.shared.clock.now());
            let mut oldest = Oldest::behind(behind, wanted);
            self.walk(&accounts, &mut section, |id, info, used| {
                let lies = (info.shard, info.segment, info.page);
                if hanging.is_end(id) && !silent.contains(&info.shard.into()) {
                    oldest.offer(Old { used, lies, id, share: info.share(info.live) });
                }
            })
            .await;
            let (is_cut, mut ends) = (oldest.is_cut(), BTreeSet::new());
            while let Some(old) = oldest.pop() {
                behind = behind.max(Some(old));
                ends.insert(Next { used: old.used, gone: Reverse(0), old });
                section.step(1).await;
            }
            let limit = scope.limit();
            let is_over = || scope.limit() != limit || (self.is_ending)();
            let freed = || scope.freed();
            evicted |= self.evict((&mut ends, &mut hanging), (wanted, &is_over, &freed), &mut section).await;
            while ends.pop_first().is_some() || hanging.forget_some() {
                section.step(1).await;
            }
            if !is_cut && !is_over() {
                break;
            }
        }
        evicted || scope.excess(bytes) == 0
    }

    /// Shows every record of these accounts that has a live block, with the second of its last use.
    async fn walk(
        &self,
        accounts: &[Arc<Account>],
        section: &mut Section<'_>,
        mut look: impl FnMut(RecordId, &RecordInfo, u32),
    ) {
        let mut some = Vec::new();
        for account in accounts {
            for shard in 0..u16::try_from(self.shared.shards()).unwrap_or(u16::MAX) {
                let mut cursor = Some(OwnerCursor::default());
                while let Some(from) = cursor {
                    let owner = (shard, Some(account.number()));
                    cursor = self.shared.index.records().snapshot_of(owner, from, &mut some);
                    let live = some.iter().filter(|(_, info, _)| info.live > 0);
                    live.for_each(|(id, info, used)| look(*id, info, *used));
                    section.step(some.len().max(1) as u64).await;
                }
            }
        }
    }

    /// How many records hang on each.
    async fn hanging(&self, accounts: &[Arc<Account>], section: &mut Section<'_>) -> Hanging {
        let mut hanging = Hanging::default();
        self.walk(accounts, section, |_, info, _| {
            if let Some(before) = self.before(info) {
                hanging.add(before);
            }
        })
        .await;
        hanging
    }

    /// The record that a record hangs on.
    fn before(&self, info: &RecordInfo) -> Option<RecordId> {
        match self.shared.index.lookup_first(info.parent) {
            Lookup::Live(before) if info.hangs => Some(before.record),
            _ => None,
        }
    }

    /// Has the shards evict of these ends of chains, and of what becomes one, the wanted bytes, if they can; says whether anything
    /// went.
    async fn evict(
        &self,
        (ends, hanging): (&mut BTreeSet<Next>, &mut Hanging),
        (mut wanted, is_over, freed): (u64, &dyn Fn() -> bool, &dyn Fn()),
        section: &mut Section<'_>,
    ) -> bool {
        let mut evicted = false;
        while !is_over() {
            let (mut by_shard, mut bytes) = (BTreeMap::<u32, Vec<ToGo>>::new(), 0u64);
            let (mut going, mut later) = (BTreeMap::new(), Vec::new());
            while bytes < wanted
                && going.len() + later.len() < AT_ONCE
                && let Some(next) = ends.pop_first()
            {
                let Old { lies: (shard, segment, page), id, share, .. } = next.old;
                let of_shard = by_shard.entry(shard.into()).or_default();
                if of_shard.len() < OF_A_SHARD {
                    of_shard.push((id, (segment, page)));
                    let info = self.shared.index.records().get(id);
                    let before = info.and_then(|info| self.before(&info));
                    let (behind_it, links) = self.going_after(&next, before, hanging);
                    bytes = bytes.saturating_add(share).saturating_add(behind_it);
                    going.insert(id, (next, before));
                    section.step(1 + links).await;
                } else {
                    later.push(next);
                }
            }
            ends.extend(later);
            if going.is_empty() {
                break;
            }
            let gone = self.ask(by_shard, section).await;
            if gone.blocks > 0 {
                evicted = true;
                freed();
            }
            for (next, before) in gone.records.iter().filter_map(|id| going.remove(id)) {
                wanted = wanted.saturating_sub(next.old.share);
                if let Some(id) = before.filter(|before| hanging.remove(*before))
                    && let Some(info) = self.shared.index.records().get(id)
                {
                    let used = self.shared.index.records().used(id);
                    let lies = (info.shard, info.segment, info.page);
                    let old = Old { used, lies, id, share: info.share(info.live) };
                    let gone = Reverse(next.gone.0.saturating_add(1));
                    ends.insert(Next { used: used.max(next.used), gone, old });
                }
            }
        }
        evicted
    }

    /// Bytes of the records before an end that go after it, and before all that was used later; and how many these are. They are
    /// counted when it goes, so that not the ends of more chains go at once than are wanted of all.
    fn going_after(&self, next: &Next, mut before: Option<RecordId>, hanging: &Hanging) -> (u64, u64) {
        let records = self.shared.index.records();
        let (mut bytes, mut links) = (0u64, 0);
        while links < LINKS_MAX
            && let Some(id) = before.filter(|id| hanging.is_on(*id, 1) && records.used(*id) <= next.used)
            && let Some(info) = records.get(id)
        {
            bytes = bytes.saturating_add(info.share(info.live));
            before = self.before(&info);
            links += 1;
        }
        (bytes, links)
    }

    /// Has shards evict records, at the same time; gives what went by an end of the wait.
    async fn ask(&self, by_shard: BTreeMap<u32, Vec<ToGo>>, section: &mut Section<'_>) -> Gone {
        let now = self.shared.clock.now();
        let within = ANSWER_WITHIN[usize::from(self.class == Class::Background)];
        let (others, by, silent) = (self.shared.others(), now.plus(within), self.shared.silent.shards(now));
        let ask = |(shard, records)| {
            let others = others.as_ref().filter(|_| !silent.contains(&shard))?;
            Some((shard, others.evict_records(shard, (records, self.class))?))
        };
        let asked: Vec<_> = by_shard.into_iter().filter_map(ask).collect();
        section.pause();
        let mut gone = Gone::default();
        for (shard, answer) in asked {
            let by = if planted!("quota-waits") { now.plus(Duration::from_secs(3600)) } else { by };
            match with_deadline(pin!(answer), Some((self.timer)(by))).await {
                Some(answer) => {
                    let answer = answer.unwrap_or_default();
                    gone.blocks += answer.blocks;
                    gone.records.extend(answer.records);
                }
                None => self.shared.silent.note(shard, self.shared.clock.now().plus(ASKED_AGAIN_AFTER)),
            }
        }
        gone
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
    /// Those that are not asked at this time.
    fn shards(&self, now: Nanos) -> BTreeSet<u32> {
        let silent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        silent.iter().filter(|(_, until)| now < **until).map(|(shard, _)| *shard).collect()
    }

    fn note(&self, shard: u32, until: Nanos) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(shard, until);
    }
}
