//! Space as operators see it: what every byte is, budgets, quotas and caps, all changed while the store is in use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvarts_layout::identity::TenantSalt;
use kvarts_layout::{BlockKey, Coordinate, Group, Identity, NamespaceId};

use super::{Store, lost, send};
use crate::engine::front::descent;
use crate::engine::front::router::Message;
use crate::engine::shared::names::Namespace;
use crate::engine::shared::quota::QuotaScope;
use crate::index::{BlockFingerprint, Lookup, PinShare, RecordId};
use crate::ledger::{PoolSpace, SegmentView};
use kvarts_contract::error::units::{exact_units, whole_units};
use kvarts_contract::error::{Error, Reason};
use kvarts_contract::ticket::{Ticket, ticket};

/// Segments below which a store has no room to work: servers and bindings take no smaller budget.
pub const SEGMENTS_MIN: u64 = 4;

/// A namespace that a store knows.
#[derive(Clone, Debug)]
pub struct KnownNamespace {
    /// Its name in requests.
    pub namespace: NamespaceId,
    /// What decides its bytes.
    pub identity: Identity,
    /// Layers of its model.
    pub layers: usize,
    /// Bytes of its blocks on disk, headers and padding included.
    pub live_bytes: u64,
    /// Its blocks, those of each group and coordinate counted.
    pub live_blocks: u64,
    /// Whether anything on disk may be of it, live or not.
    pub is_used: bool,
}

/// What the namespaces of one tenant have together.
#[derive(Clone, Debug)]
pub struct OfTenant {
    /// The salt of their identities.
    pub salt: TenantSalt,
    /// How many the store knows.
    pub namespaces: usize,
    /// Bytes of their blocks on disk, headers and padding included.
    pub live_bytes: u64,
    /// Their blocks.
    pub live_blocks: u64,
}

impl Store {
    /// Every segment file with what its bytes are, by shard and number.
    pub fn segments(&self) -> Vec<SegmentView> {
        self.0.shared.index.records().ledger().segments()
    }

    /// Changes the budget. From now on nothing is allocated beyond it. If more is allocated already, segments are
    /// emptied and removed until it is kept; puts that need a new segment meanwhile wait for that or are refused
    /// with [`Reason::NoSpace`], and [`Stats`](super::Stats) tells how far it is. What leases hold stays, so it may
    /// take until they end. Refused if the store's shards could not have a segment each.
    pub fn set_budget(&self, bytes: u64) -> Result<(), Error> {
        self.0.shared.set_budget(bytes)?;
        self.shrink()
    }

    /// Segment files that a full store of this budget may have, each with a descriptor: more than would fit whole, because
    /// what was evicted leaves holes.
    pub fn files_max(&self) -> u64 {
        self.0.shared.files_max()
    }

    /// Has no more segment files made than this, for want of descriptors: whole segments are emptied and used again
    /// instead. There may be more already, which stay.
    pub fn set_files_cap(&self, files: u64) {
        self.0.shared.set_files_cap(files);
    }

    /// The same, and refuses a larger budget that the disks cannot keep, as making a store does.
    pub async fn set_budget_within_disks(&self, bytes: u64) -> Result<(), Error> {
        if bytes > self.0.shared.space_report().budget {
            self.check_room(true, bytes).await?;
        }
        self.set_budget(bytes)?;
        if self.0.shared.short_of_disk().is_some() {
            self.check_room(false, bytes).await?;
        }
        Ok(())
    }

    /// Lets every executor give segments back until the budget is kept.
    pub(super) fn shrink(&self) -> Result<(), Error> {
        if self.0.shared.is_shrinking() {
            for sender in &self.0.router.executors {
                send(sender, Message::Shrink)?;
            }
        }
        Ok(())
    }

    /// For this long the blocks of a chain go last, these among them: they are evicted when nothing else is left that may be. Blocks
    /// that come later count as well. Nothing of it is kept on disk. Gives how many of these blocks were taken in: their number is bounded.
    pub fn favour(
        &self,
        chain: u64,
        namespace: NamespaceId,
        column: (Group, Coordinate),
        keys: &[BlockKey],
        hold: Duration,
    ) -> Result<usize, Error> {
        let prints = self.prints(namespace, column, keys)?;
        let now = self.0.shared.clock.now();
        Ok(self.0.shared.favoured.add(chain, &prints, now.plus(hold), now))
    }

    /// The same for blocks behind a block that is favoured: they are of its chain. Nothing happens if it is not.
    pub fn favour_behind(
        &self,
        namespace: NamespaceId,
        column: (Group, Coordinate),
        parent: BlockKey,
        keys: &[BlockKey],
    ) -> Result<usize, Error> {
        let (parent, prints) =
            (self.prints(namespace, column, &[parent])?, self.prints(namespace, column, keys)?);
        let parent = *parent.first().ok_or(Reason::Empty)?;
        Ok(self.0.shared.favoured.add_behind(parent, &prints, self.0.shared.clock.now()))
    }

    /// The blocks of a chain go last for this long from now on; with no time, not any more.
    pub fn set_favour(&self, chain: u64, hold: Duration) {
        let now = self.0.shared.clock.now();
        self.0.shared.favoured.set(chain, now.plus(hold), now);
    }

    /// Which of these blocks go last ([`Store::favour`]).
    pub fn favoured(
        &self,
        namespace: NamespaceId,
        column: (Group, Coordinate),
        keys: &[BlockKey],
    ) -> Result<Vec<bool>, Error> {
        let prints = self.prints(namespace, column, keys)?;
        Ok(self.0.shared.favoured.which(&prints, self.0.shared.clock.now()))
    }

    fn prints(
        &self,
        namespace: NamespaceId,
        column: (Group, Coordinate),
        keys: &[BlockKey],
    ) -> Result<Vec<BlockFingerprint>, Error> {
        let known = self.0.shared.names.get(namespace).ok_or(Reason::UnknownNamespace(namespace))?;
        Ok(self.0.shared.prints_of(&known, keys, column))
    }

    /// How long blocks of a namespace live whose put does not say.
    pub fn default_ttl(&self, namespace: NamespaceId) -> Option<Duration> {
        self.0.shared.names.default_ttl(namespace)
    }

    /// Limits what a namespace may have on disk: live bytes, headers and padding included. A put that would pass
    /// the limit first evicts what the namespace has not used for longest, and is refused with [`Reason::Quota`]
    /// if leases forbid that or it is too large. `None` takes the limit away. The namespace need not be registered yet;
    /// limits are not kept on disk, what counts against them is: after a start also what had been evicted for a limit and was
    /// not overwritten.
    ///
    /// The limit holds for puts from now on. What exceeds it is evicted by the executors, also if the answer is dropped; the
    /// answer comes when that is done, as far as leases allow it and devices answer: false if nothing went that should.
    pub fn set_quota(&self, namespace: NamespaceId, bytes: Option<u64>) -> Ticket<bool> {
        let account = self.0.shared.index.records().ledger().account(namespace);
        account.set_limit(bytes);
        self.keep_quota(QuotaScope::Namespace(account))
    }

    fn keep_quota(&self, scope: QuotaScope) -> Ticket<bool> {
        let others = self.0.shared.others().filter(|_| scope.excess(0) > 0);
        let made = others.and_then(|others| others.make_quota_room(&self.0.shared, scope, 0));
        made.unwrap_or_else(|| {
            let (reply, answer) = ticket();
            let _ = reply.send(true);
            answer
        })
    }

    /// Limits what the namespaces of a tenant may have on disk together, as [`Store::set_quota`] limits one: those
    /// whose identity has this salt, registered or recovered, now or later. Both limits hold where both are set.
    pub fn set_tenant_quota(&self, salt: &TenantSalt, bytes: Option<u64>) -> Ticket<bool> {
        let shared = &self.0.shared;
        let ledger = shared.index.records().ledger();
        // Made before the look at what there is: what is registered meanwhile joins by itself.
        let pool = ledger.open_pool(&salt.0);
        for namespace in shared.names.of_salt(salt) {
            ledger.account(namespace).join(&pool);
        }
        pool.set_limit(bytes);
        self.keep_quota(QuotaScope::Tenant(pool))
    }

    /// What the namespaces of a tenant have together and may have; nothing if no quota was ever set for this salt.
    pub fn tenant_space(&self, salt: &TenantSalt) -> Option<PoolSpace> {
        let pool = self.0.shared.index.records().ledger().pool(&salt.0);
        pool.map(|pool| pool.space())
    }

    /// The namespaces of a tenant that the store knows, registered or recovered: those whose identity has this salt, with the
    /// most bytes first, and no more than `most` of them.
    pub fn namespaces(&self, salt: &TenantSalt, most: usize) -> Vec<KnownNamespace> {
        let shared = &self.0.shared;
        let spaces = shared.index.records().ledger().namespaces();
        let live: BTreeMap<NamespaceId, (u64, u64)> =
            spaces.iter().map(|one| (one.namespace, (one.live, one.blocks))).collect();
        let live = |namespace: &Arc<Namespace>| live.get(&namespace.id).copied().unwrap_or_default();
        let mut all = shared.names.with_salt(salt);
        all.sort_by_key(|namespace| std::cmp::Reverse(live(namespace)));
        all.truncate(most);
        let known = |namespace: &Arc<Namespace>| {
            let (live_bytes, live_blocks) = live(namespace);
            Some(KnownNamespace {
                namespace: namespace.id,
                identity: Identity::decode(&namespace.canonical).ok()?,
                layers: namespace.spec.geometry.layers().len(),
                live_bytes,
                live_blocks,
                is_used: namespace.is_used(),
            })
        };
        all.iter().filter_map(known).collect()
    }

    /// What each tenant has, also one that is not registered any more: namespaces of one salt are one tenant's.
    pub fn tenants(&self) -> Vec<OfTenant> {
        let spaces = self.0.shared.index.records().ledger().namespaces();
        let live: BTreeMap<NamespaceId, (u64, u64)> =
            spaces.iter().map(|one| (one.namespace, (one.live, one.blocks))).collect();
        let of_tenant = |(salt, ids): (Vec<u8>, Vec<NamespaceId>)| {
            let lives = ids.iter().filter_map(|id| live.get(id));
            let (live_bytes, live_blocks) = lives.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            OfTenant { salt: TenantSalt(salt), namespaces: ids.len(), live_bytes, live_blocks }
        };
        self.0.shared.names.by_salt().into_iter().map(of_tenant).collect()
    }

    /// Whether the store knows a namespace, registered or recovered.
    pub fn knows(&self, namespace: NamespaceId) -> bool {
        self.0.shared.names.get(namespace).is_some()
    }

    /// How many namespaces with this salt the store knows.
    pub fn namespace_count(&self, salt: &TenantSalt) -> usize {
        self.0.shared.names.of_salt(salt).len()
    }

    /// Forgets a registered namespace of which nothing was ever put in this store; false, and nothing happens, if there may be
    /// something, or a time to live is set for it. It can be registered again.
    pub fn forget_unused(&self, namespace: NamespaceId) -> bool {
        let is_forgotten = self.0.shared.names.forget_unused(namespace);
        if is_forgotten {
            self.0.shared.index.records().ledger().forget_account(namespace);
            // Registered again meanwhile, by another node or tier: its account is a new one, and counts for its tenant.
            if let Some(again) = self.0.shared.names.get(namespace) {
                self.join_tenant(namespace, &again.salt);
            }
        }
        is_forgotten
    }

    /// Which block follows which in a namespace, as pairs of a parent and its child, for showing what is here as a tree: at most
    /// `most` of them. They are read from what segments list. A pair may be missing whose blocks are moved meanwhile.
    pub async fn links(
        &self,
        namespace: NamespaceId,
        most: usize,
    ) -> Result<BTreeSet<(BlockKey, BlockKey)>, Error> {
        let known = self.0.shared.names.get(namespace).ok_or(Reason::UnknownNamespace(namespace))?;
        Ok(descent::all_links(&self.0.router, &known, most).await?)
    }

    /// Counts a namespace in its tenant's pool, if there is one.
    pub(super) fn join_tenant(&self, namespace: NamespaceId, salt: &TenantSalt) {
        let ledger = self.0.shared.index.records().ledger();
        if let Some(pool) = ledger.pool(&salt.0) {
            ledger.account(namespace).join(&pool);
        }
    }

    /// Limits the bytes that a tenant's leases and pins may hold, whatever their terms say. `None` takes the limit
    /// away. What is held already stays until it ends.
    pub fn set_pin_cap(&self, tenant: u32, bytes: Option<u64>) {
        self.0.shared.index.set_pin_cap(tenant, bytes);
    }

    /// Limits the bytes that the leases and pins of all tenants hold together. `None` takes the limit away.
    pub fn set_pin_share(&self, share: Option<PinShare>) {
        self.0.shared.index.set_pin_share(share);
    }

    /// Live bytes of each segment (shard, number), counted from every entry of the index: for tests of the
    /// books, which are kept without counting. Takes as long as the index is large.
    pub fn count_live(&self) -> BTreeMap<(u32, u32), u64> {
        let index = &self.0.shared.index;
        let mut blocks = BTreeMap::<RecordId, u16>::new();
        let mut entries = Vec::new();
        for partition in 0..index.partitions() {
            index.snapshot(partition, &mut entries);
            for entry in &entries {
                if let Lookup::Live(at) = entry.state {
                    let count = blocks.entry(at.record).or_default();
                    *count = count.saturating_add(1);
                }
            }
        }
        let mut live = BTreeMap::<_, u64>::new();
        for (record, count) in blocks {
            if let Some(info) = index.records().get(record) {
                *live.entry((u32::from(info.shard), info.segment)).or_default() += info.share(count);
            }
        }
        live
    }

    /// Looks whether the disks can keep a budget: they cannot if it is more than they have free and the store has already. Then
    /// a new store, or a larger budget, is refused; one with blocks in it serves them and says what is missing, for another
    /// program may have taken the room, and a refusal would cost what is there.
    pub(super) async fn check_room(&self, may_refuse: bool, budget: u64) -> Result<(), Error> {
        let first = self.0.router.executors.first().ok_or(Reason::Bug("the store has no executor"))?;
        let (reply, answer) = ticket();
        send(first, Message::FreeSpace { shared: Arc::clone(&self.0.shared), reply })?;
        let free = match lost(answer.await)? {
            // A disk that hangs says nothing: what the store has is served.
            Err(Reason::Busy(_)) if !may_refuse => return Ok(()),
            free => free?,
        };
        let report = self.0.shared.space_report();
        // Directories are counted by a bound: what they have not taken is not there to be had.
        let allocated = report.total.allocated.saturating_sub(report.directories);
        let most = free.saturating_add(allocated);
        if budget <= most {
            self.0.shared.set_short_of_disk(None);
            return Ok(());
        }
        if !may_refuse {
            let what = more_than_there_is(budget, free, allocated);
            self.0.shared.set_short_of_disk(Some(format!(
                "{what}; stored blocks can be read, but each new block needs the eviction of another block: \
                free {} on the disk",
                mib(budget.saturating_sub(most))
            )));
            return Ok(());
        }
        // A start asks for no less.
        let least =
            self.0.shared.budget_floor().max(self.0.shared.segment_bytes.saturating_mul(SEGMENTS_MIN));
        refuse_beyond_disk(budget, free, allocated, least)
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

fn more_than_there_is(budget: u64, free: u64, allocated: u64) -> String {
    format!(
        "the budget of {} does not fit on the disk: only {} are free, and the store uses {}",
        exact_units(budget),
        exact_units(free),
        exact_units(allocated)
    )
}

/// Refuses a budget that is more than its disks have free and its store has allocated; `least` is the least that the store takes.
pub fn refuse_beyond_disk(budget: u64, free: u64, allocated: u64, least: u64) -> Result<(), Error> {
    let most = free.saturating_add(allocated);
    if budget <= most {
        return Ok(());
    }
    let what = more_than_there_is(budget, free, allocated);
    Err(Error(Reason::Config(match most >= least {
        true => format!("{what}; lower the budget to at most {}", whole_units(most)),
        false => {
            let (least, missing) = (mib(least), mib(least.saturating_sub(most)));
            format!(
                "{what}; a store with segments of this size needs at least {least}: free {missing} on \
                the disk"
            )
        }
    })))
}
