//! Keeping a namespace within its quota, and the namespaces of a tenant together within theirs.
//!
//! A put that would pass a limit waits while blocks of its account are evicted (`space::evict::of_accounts`): those of its own
//! shard first, on its executor. Where nothing may go there, other shards evict, one after the other, each for a bounded
//! time: a shard whose device or executor hangs costs one such wait, and is then left alone for a while. A limit that is
//! lowered is met in the same way by all shards, a part in each. One task at a time makes room for an account; others wait in the order in which they came.
//!
//! What counts is what the index points at, so an evicted block is out of the account at once, and its bytes are dead until
//! their segment is reclaimed. A block on which others hang stays until those have gone. So a chain that lies in several shards goes
//! from its end, and all shards are gone through until nothing more goes.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kvarts_layout::planted;

use super::Shared;
use crate::engine::space::Space;
use crate::engine::tasks::notify::with_deadline;
use crate::ledger::{Account, MakingRoom, OverQuota, Pool, Promise};
use crate::rt::LocalTask;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_contract::sync::Mutex;

/// How long a task waits for what another shard evicts: a few footers are read for it.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// How long a shard is not asked that did not answer in time.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(30);

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
    /// Makes room for what is owed by a put in this shard, and takes it.
    pub(crate) async fn paid(self, space: &Space) -> Result<Promise, Reason> {
        match self {
            Self::Promised(promise) => Ok(promise),
            Self::Owed(account, bytes) => {
                let shared = &space.volume.shared;
                let timer = |at| space.volume.driver.sleep_until(at);
                let room = Room { shared, own: Some(space), timer: &timer };
                loop {
                    let evicted = room.make(&account, bytes).await;
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

    /// The numbers of the accounts whose records count in it.
    fn accounts(&self, shared: &Shared) -> BTreeSet<u32> {
        let ledger = shared.index.records().ledger();
        match self {
            Self::Namespace(account) => [account.number()].into(),
            Self::Tenant(pool) => ledger.accounts_in(pool).iter().map(|account| account.number()).collect(),
        }
    }
}

/// Has the shards of a store evict for a limit that was lowered. `timer` is a timer of the executor on which it runs.
pub(crate) async fn keep(shared: &Shared, scope: &QuotaScope, timer: &dyn Fn(Nanos) -> LocalTask) {
    Room { shared, own: None, timer }.make_in(scope, 0).await;
}

/// A task that makes room.
struct Room<'a> {
    shared: &'a Shared,
    /// The shard of the put that it is made for.
    own: Option<&'a Space>,
    timer: &'a dyn Fn(Nanos) -> LocalTask,
}

impl Room<'_> {
    /// Evicts blocks until `bytes` more fit into the account and its pool, if that can be had; says whether any went.
    async fn make(&self, account: &Arc<Account>, bytes: u64) -> bool {
        let of_namespace = self.make_in(&QuotaScope::Namespace(Arc::clone(account)), bytes).await;
        match account.pool() {
            Some(pool) => self.make_in(&QuotaScope::Tenant(Arc::clone(pool)), bytes).await || of_namespace,
            None => of_namespace,
        }
    }

    async fn make_in(&self, scope: &QuotaScope, bytes: u64) -> bool {
        let _turn = scope.turn().take().await;
        // What can never fit makes nothing go.
        if scope.limit().is_none_or(|limit| bytes > limit) || scope.excess(bytes) == 0 {
            return false;
        }
        let accounts = Arc::new(scope.accounts(self.shared));
        let shards = u32::try_from(self.shared.shards()).unwrap_or(u32::MAX).max(1);
        let first = self.own.map_or(0, |own| own.volume.shard);
        let mut evicted = false;
        loop {
            let mut went = 0;
            for shard in (0..shards).map(|step| first.wrapping_add(step) % shards) {
                let excess = scope.excess(bytes);
                if excess == 0 {
                    return evicted || went > 0;
                }
                let part = if self.own.is_some() { excess } else { excess.div_ceil(u64::from(shards)) };
                went += self.evict_in(shard, &accounts, part).await;
            }
            if went == 0 {
                return evicted;
            }
            evicted = true;
        }
    }

    /// Has a shard evict blocks of these accounts; gives how many went.
    async fn evict_in(&self, shard: u32, accounts: &Arc<BTreeSet<u32>>, bytes: u64) -> u64 {
        if let Some(own) = self.own.filter(|own| own.volume.shard == shard) {
            return own.evict_of(accounts, bytes).await;
        }
        let now = self.shared.clock.now();
        if self.shared.silent.is_silent(shard, now) {
            return 0;
        }
        let others = self.shared.others();
        let Some(answer) = others.and_then(|others| others.evict_of(shard, Arc::clone(accounts), bytes))
        else {
            return 0;
        };
        let within = if planted!("quota-waits") { Duration::from_secs(3600) } else { ANSWER_WITHIN };
        match with_deadline(pin!(answer), Some((self.timer)(now.plus(within)))).await {
            Some(went) => went.unwrap_or(0),
            None => {
                self.shared.silent.note(shard, now.plus(ANSWER_WITHIN + ASKED_AGAIN_AFTER));
                0
            }
        }
    }
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
