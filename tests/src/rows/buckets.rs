//! Nodes that share a bucket: sweeps, pushes that take long, deletes of keys, of prefixes and of everything, times to live that become
//! shorter, collectors, and a bucket whose answers are slow, late or lost, that lists late, or that does not keep conditions of puts. In
//! virtual time, from one seed.
//!
//! The ledger is of what was deleted, wherever: a copy that was produced before an acknowledged delete is named by no manifest again,
//! by whichever node it was listed. Half of the courses are of one cluster, whose nodes hear of what another one was asked at once or
//! late, and tell the bucket then: what was put again since stays, and when all have heard of a shorter time to live no copy is named
//! that has a longer one. The stores are tables; what is done to the bucket is the tier's own code.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use kvarts_cold::check::{Finding, Level, check};
use kvarts_cold::collect::{Retention, collect};
use kvarts_cold::format::deletions::{KEYS_MAX, Listed};
use kvarts_cold::format::wide_fingerprint;
use kvarts_cold::testing::{
    BLOCK, Conditional, Faulty, Kind, MemoryBucket, Plan, VirtualTime, key, namespace, namespace_id, run,
};
use kvarts_cold::withdraw::{Deleted, Told, When, withdraw, withdraw_told};
use kvarts_cold::{Access, Bucket, ColdError, Limits, Point, PushOptions, Pusher, Tier, TierOptions, Time};
use kvarts_layout::{Coordinate, Group, NamespaceId};

use super::pool::{States, until};
use super::{Row, Tally};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed};

/// The blocks of the one prefix that there is.
const BLOCKS: u32 = 12;
const PREFIX: u8 = 1;
const COLUMN: (Group, Coordinate) = (Group(0), Coordinate::Replicated);
/// In one course of this number a delete has more keys than a manifest lists.
const LARGE: u64 = 4;

/// What goes wrong with requests.
const KINDS: [Kind; 8] = [
    Kind::Slow(Duration::from_millis(700)),
    Kind::Slow(Duration::from_secs(3)),
    Kind::Late(Duration::from_millis(900)),
    Kind::Late(Duration::from_secs(4)),
    Kind::Afterwards(Duration::from_secs(5)),
    Kind::Lost,
    Kind::Changed,
    Kind::Old,
];

/// How often a node that heard of something late tells the bucket, while that fails.
const TRIES: u32 = 40;

/// A block of a store: when it was produced, and when it ends; zero for never.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Copy {
    created_ms: u64,
    expires_ms: u64,
}

impl Copy {
    /// Whether it ends later than this.
    fn outlives(&self, expires_ms: u64) -> bool {
        self.expires_ms == 0 || self.expires_ms > expires_ms
    }
}

/// A node: a tier of its own, and each block that it has.
struct Node {
    tier: Tier,
    store: RefCell<BTreeMap<u32, Copy>>,
}

/// What was promised of a block: that of what was produced by then no copy ends later than this.
#[derive(Clone, Copy, Debug)]
struct End {
    block: u32,
    until_ms: u64,
    expires_ms: u64,
}

struct Scene {
    seed: Seed,
    time: VirtualTime,
    memory: Arc<MemoryBucket>,
    faulty: Arc<Faulty>,
    nodes: Vec<Node>,
    namespace: NamespaceId,
    /// Until when all copies of a block are to be gone: what acknowledged deletes promised.
    gone: RefCell<BTreeMap<u32, u64>>,
    /// When each block was deleted last, whether that was acknowledged or not.
    deleted: RefCell<BTreeMap<u32, u64>>,
    ends: RefCell<Vec<End>>,
    /// Whether the nodes are of one cluster, and hear of what another one was asked.
    is_cluster: bool,
    acknowledged: Cell<u64>,
    rng: RefCell<Rng>,
    wrong: RefCell<Option<String>>,
}

/// A part of what happens.
type Part<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Runs all parts, each as far as it comes.
async fn all(mut parts: Vec<Part<'_>>) {
    std::future::poll_fn(|context| {
        parts.retain_mut(|part| part.as_mut().poll(context).is_pending());
        if parts.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn tier(time: &VirtualTime, faulty: &Arc<Faulty>, seed: u64) -> Tier {
    let limits = Limits { failures_before_pause: 1000, ..Limits::default() };
    let bucket = Arc::clone(faulty) as Arc<dyn Bucket>;
    let access = Access::new(bucket, Arc::new(time.clone()), limits, seed);
    Tier::new(access, TierOptions::default())
}

impl Scene {
    fn new(seed: Seed) -> Self {
        let mut rng = seed.rng();
        let time = VirtualTime::default();
        let clock: Arc<dyn Time> = Arc::new(time.clone());
        let memory = MemoryBucket::new(Arc::clone(&clock));
        let faulty = Faulty::new(Arc::clone(&memory) as Arc<dyn Bucket>, clock, rng.next_u64());
        let count = rng.between(1, 3);
        let node =
            |number: u64| Node { tier: tier(&time, &faulty, seed.0 + number), store: RefCell::default() };
        Self {
            nodes: (0..count).map(node).collect(),
            seed,
            memory,
            faulty,
            namespace: namespace_id("r1"),
            gone: RefCell::default(),
            deleted: RefCell::default(),
            ends: RefCell::default(),
            is_cluster: seed.child("cluster").rng().below(2) == 0,
            acknowledged: Cell::new(0),
            rng: RefCell::new(rng),
            wrong: RefCell::default(),
            time,
        }
    }

    /// Whether more keys are deleted here than a manifest lists.
    fn is_large(&self) -> bool {
        self.seed.0.is_multiple_of(LARGE)
    }

    fn below(&self, bound: u64) -> u64 {
        self.rng.borrow_mut().below(bound)
    }

    /// Other parts go on for a while, or for none.
    async fn pause(&self, most_ms: u64) {
        let long = self.below(most_ms);
        self.time.sleep(Duration::from_millis(long)).await;
    }

    fn wrong(&self, what: String) {
        self.wrong.borrow_mut().get_or_insert(what);
    }

    /// A block is produced on this node, and perhaps copied to another one, which keeps when that was.
    fn produce(&self, node: usize, block: u32) {
        let now_ms = self.time.wall_ms();
        let copied = self.below(2 * self.nodes.len() as u64) as usize;
        for (number, other) in self.nodes.iter().enumerate() {
            if number == node || number == copied {
                let mut store = other.store.borrow_mut();
                let is_over = |copy: &Copy| copy.expires_ms != 0 && copy.expires_ms <= now_ms;
                let new = Copy { created_ms: now_ms, expires_ms: 0 };
                let copy = store.entry(block).or_insert(new);
                if is_over(copy) {
                    *copy = new;
                }
            }
        }
    }

    /// Lists what a node has, and pushes it some time later. A sweep looks before each block whether it is still there; a push out of files does not.
    async fn push(&self, node: usize, is_sweep: bool) {
        let Node { tier, store } = &self.nodes[node];
        // What deletes are known goes before what is listed.
        let listed = match is_sweep {
            true => tier.points().get(&self.namespace).copied().unwrap_or_default(),
            false => match tier.read_manifest(self.namespace).await {
                Ok(known) => known.manifest.point(),
                Err(_) => Point::default(),
            },
        };
        let blocks = store.borrow().clone();
        self.pause(if is_sweep { 2000 } else { 60_000 }).await;
        let options = PushOptions { pack_bytes: 3 * BLOCK as u64, ..PushOptions::default() };
        let mut pusher = Pusher::new(tier, options);
        pusher.listed(self.namespace, listed);
        for (block, copy) in blocks {
            let is_it = |now: &Copy| now.created_ms == copy.created_ms;
            if is_sweep && !store.borrow().get(&block).is_some_and(is_it) {
                continue;
            }
            self.pause(300).await;
            let (mut one, payload) = run("r1", PREFIX, block, block + 1);
            (one.created_ms, one.expires_ms) = (copy.created_ms, copy.expires_ms);
            match pusher.add(&namespace("r1"), &one, &payload).await {
                Ok(()) | Err(ColdError::Withdrawn) => {}
                Err(_) => return,
            }
        }
        // Whatever came of it is seen in the bucket.
        let _ = pusher.finish().await;
    }

    /// As a call of `Delete`: the store, then the bucket, then the answer. Other nodes hear at once of what a manifest does not
    /// keep; of anything else late in a cluster, and never in none.
    async fn delete(&self, node: usize) {
        let first = self.below(u64::from(BLOCKS)) as u32;
        let (deleted, going) = match self.below(5) {
            0 => (Deleted::Prefix(key(PREFIX, first)), first..BLOCKS),
            1 => (Deleted::Namespace, 0..BLOCKS),
            _ => (Deleted::Keys(vec![key(PREFIX, first)]), first..first + 1),
        };
        let is_prefix = matches!(deleted, Deleted::Prefix(_));
        // A manifest that has folded a delete says of older copies elsewhere no more than that they are in doubt.
        let is_heard = is_prefix || self.is_large();
        let begun_ms = self.time.wall_ms();
        self.pause(1500).await;
        let take = |number: usize| {
            self.nodes[number].store.borrow_mut().retain(|block, copy| {
                !(going.contains(block) && (number == node || copy.created_ms <= begun_ms))
            });
        };
        let others = || (0..self.nodes.len()).filter(|number| *number != node);
        take(node);
        others().filter(|_| is_heard).for_each(take);
        for block in going.clone() {
            let mut last = self.deleted.borrow_mut();
            let at_ms = last.entry(block).or_default();
            *at_ms = begun_ms.max(*at_ms);
        }
        let when = if self.is_cluster { When::NowUntil(begun_ms) } else { When::Now };
        let told = Told { deleted: deleted.clone(), when };
        let tier = &self.nodes[node].tier;
        if withdraw_told(tier, self.namespace, std::slice::from_ref(&told)).await.is_ok() {
            self.acknowledged.set(self.acknowledged.get() + 1);
            let promised: BTreeMap<u32, u64> = going.clone().map(|block| (block, begun_ms)).collect();
            for (block, until_ms) in &promised {
                let mut gone = self.gone.borrow_mut();
                let until = gone.entry(*block).or_default();
                *until = (*until_ms).max(*until);
            }
            // What others have deleted meanwhile it may not have read yet.
            self.expect_gone(tier, &promised, "on the node of the delete").await;
        }
        // Of what is folded a late one would be noted anew.
        if self.is_cluster && !self.is_large() {
            for number in others() {
                self.pause(20_000).await;
                take(number);
                self.hear(number, deleted.clone(), begun_ms).await;
            }
        }
    }

    /// As a call of `SetTtl` of a cluster: the store, then the bucket; the other nodes hear of it late, and tell the bucket too.
    async fn shorten(&self, node: usize) {
        let block = self.below(u64::from(BLOCKS)) as u32;
        let begun_ms = self.time.wall_ms();
        let expires_ms = begun_ms + 1 + self.below(90_000);
        let deleted = Deleted::Later(vec![key(PREFIX, block)], COLUMN, expires_ms);
        self.pause(1500).await;
        let cut = |number: usize| {
            let mut store = self.nodes[number].store.borrow_mut();
            let copy = store.get_mut(&block).filter(|copy| number == node || copy.created_ms <= begun_ms);
            copy.filter(|copy| copy.outlives(expires_ms))
                .into_iter()
                .for_each(|copy| copy.expires_ms = expires_ms);
        };
        cut(node);
        let told = Told { deleted: deleted.clone(), when: When::Now };
        let tier = &self.nodes[node].tier;
        if withdraw_told(tier, self.namespace, &[told]).await.is_err() {
            return;
        }
        self.acknowledged.set(self.acknowledged.get() + 1);
        for number in (0..self.nodes.len()).filter(|number| *number != node) {
            self.pause(10_000).await;
            cut(number);
            if !self.hear(number, deleted.clone(), begun_ms).await {
                return;
            }
        }
        let end = End { block, until_ms: begun_ms, expires_ms };
        self.ends.borrow_mut().push(end);
        self.expect_ends(tier, &[end], "when all have heard").await;
    }

    /// A node has carried out what another one was asked at this time, and tells the bucket until that has it.
    async fn hear(&self, node: usize, deleted: Deleted, at_ms: u64) -> bool {
        let told = [Told { deleted, when: When::Until(at_ms) }];
        for _ in 0..TRIES {
            match withdraw_told(&self.nodes[node].tier, self.namespace, &told).await {
                Ok(_) => return true,
                Err(ColdError::ReadOnly(_)) => return false,
                Err(_) => self.pause(5000).await,
            }
        }
        false
    }

    /// A delete of more keys than a manifest lists, none of which is in a store here.
    async fn delete_many(&self) {
        let keys = (0..KEYS_MAX as u32 + 1).map(|block| key(9, block)).collect();
        let _ = withdraw(&self.nodes[0].tier, self.namespace, &[Deleted::Keys(keys)]).await;
    }

    async fn collect(&self, node: usize) {
        let stored_bytes = (self.below(3) == 0).then(|| self.below(20) * BLOCK as u64);
        let retention = Retention { stored_bytes, ..Retention::default() };
        // What it did is seen in the bucket.
        let _ = collect(&self.nodes[node].tier, self.namespace, &retention).await;
    }

    /// Looks through all packs that are named for what was promised to be gone.
    async fn expect_gone(&self, tier: &Tier, promised: &BTreeMap<u32, u64>, what: &str) {
        let Ok(known) = tier.manifest(self.namespace).await else { return };
        for pack in known.manifest.packs.keys() {
            let Ok(index) = tier.index(self.namespace, *pack).await else { continue };
            for run in index.runs().iter().map(|indexed| &indexed.run) {
                for (block, until_ms) in promised {
                    let is_it = run.blocks.iter().any(|one| one.key == key(PREFIX, *block));
                    if is_it && run.created_ms <= *until_ms {
                        let made = run.created_ms;
                        self.wrong(format!("{what}: block {block} of {made} is back, deleted at {until_ms}"));
                    }
                }
            }
        }
    }

    /// Looks through all packs that are named for what lives longer than was promised.
    async fn expect_ends(&self, tier: &Tier, promised: &[End], what: &str) {
        let Ok(known) = tier.manifest(self.namespace).await else { return };
        for pack in known.manifest.packs.keys() {
            let Ok(index) = tier.index(self.namespace, *pack).await else { continue };
            for run in index.runs().iter().map(|indexed| &indexed.run) {
                let copy = Copy { created_ms: run.created_ms, expires_ms: run.expires_ms };
                let is_of = |end: &&End| {
                    run.blocks.iter().any(|one| one.key == key(PREFIX, end.block))
                        && copy.created_ms <= end.until_ms
                };
                if let Some(end) = promised.iter().filter(is_of).find(|end| copy.outlives(end.expires_ms)) {
                    self.wrong(format!("{what}: a copy outlives its block: {copy:?}, {end:?}"));
                }
            }
        }
    }

    /// In a cluster nothing is hidden that was produced since its last delete, whenever nodes heard of that.
    async fn expect_younger(&self, tier: &Tier) {
        let Ok(known) = tier.read_manifest(self.namespace).await else { return };
        for (block, at_ms) in self.deleted.borrow().iter() {
            let created_ms = at_ms + 1;
            let fingerprint = wide_fingerprint(&key(PREFIX, *block));
            let listed = Listed { since: Some(u64::MAX), fingerprint, created_ms };
            if known.manifest.deletions.hides(listed) {
                self.wrong(format!(
                    "block {block} of {created_ms} is hidden, and was last deleted at {at_ms}"
                ));
            }
        }
    }

    /// What was put again since a delete is found when a node has heard of the delete late.
    async fn expect_put_again(&self) {
        let (first, last) = (&self.nodes[0], &self.nodes[self.nodes.len() - 1]);
        for kind in 0..3u32 {
            let deleted = match kind {
                0 => Deleted::Keys(vec![key(PREFIX, kind)]),
                1 => Deleted::Prefix(key(PREFIX, kind)),
                _ => Deleted::Namespace,
            };
            let at_ms = self.time.wall_ms();
            let told = |when| [Told { deleted: deleted.clone(), when }];
            let known = withdraw_told(&first.tier, self.namespace, &told(When::NowUntil(at_ms))).await;
            self.time.sleep(Duration::from_secs(1)).await;
            let created_ms = self.time.wall_ms();
            first.store.borrow_mut().clear();
            first.store.borrow_mut().insert(kind, Copy { created_ms, expires_ms: 0 });
            self.push(0, false).await;
            let heard = withdraw_told(&last.tier, self.namespace, &told(When::Until(at_ms))).await;
            let fresh = tier(&self.time, &self.faulty, self.seed.0 + 98);
            let found = fresh.locate(self.namespace, COLUMN, &[key(PREFIX, kind)]).await;
            let created = found.as_ref().map(|found| {
                let run = found.first().and_then(|found| found.as_ref()?.run());
                run.map(|indexed| indexed.run.created_ms)
            });
            if known.is_err() || heard.is_err() || created != Ok(Some(created_ms)) {
                self.wrong(format!(
                    "{deleted:?}, heard of late: what was put again is {created:?}: {heard:?}"
                ));
            }
        }
    }

    /// All that happens to a node.
    async fn live(&self, node: usize) {
        for _ in 0..4 {
            self.pause(12_000).await;
            for _ in 0..self.below(6) {
                let block = self.below(u64::from(BLOCKS)) as u32;
                self.produce(node, block);
            }
            let is_sweep = self.below(3) > 0;
            match self.below(8) {
                0 => self.collect(node).await,
                1 => self.faulty.remember_listings().await,
                _ => self.push(node, is_sweep).await,
            }
        }
    }

    async fn deletes(&self) {
        for _ in 0..3 {
            self.pause(25_000).await;
            let node = self.below(self.nodes.len() as u64) as usize;
            if self.is_cluster && !self.is_large() && self.below(3) == 0 {
                self.shorten(node).await;
                continue;
            }
            self.delete(node).await;
            // What was just deleted is folded at once, while pushes that listed it go on.
            if self.is_large() && self.below(2) == 0 {
                self.delete_many().await;
            }
        }
    }

    /// Parts of a course, with faults.
    fn course(&self, conditional: Conditional) {
        let often = [0, 150, 400][(self.seed.0 % 3) as usize];
        // A server that knows no conditions never says that one does not hold.
        let happens = |kind: &Kind| conditional == Conditional::Kept || *kind != Kind::Changed;
        let kinds = KINDS.into_iter().filter(happens).collect();
        self.faulty.plan(Plan { thousandths: often, kinds, ..Plan::default() });
        self.faulty.conditional(conditional);
        (0..self.nodes.len()).for_each(|node| (0..BLOCKS).for_each(|block| self.produce(node, block)));
        let mut parts: Vec<Part<'_>> = Vec::new();
        for node in 0..self.nodes.len() {
            parts.push(Box::pin(self.live(node)));
        }
        (0..2).for_each(|_| parts.push(Box::pin(self.deletes())));
        self.time.run(all(parts));
        self.faulty.plan(Plan::default());
        // Whatever was given up and is still on its way has happened by then, and the grace of collectors is over.
        self.time.pass(Duration::from_secs(60));
    }

    /// What must be true of the bucket when all is quiet.
    async fn expect(&self, conditional: Conditional) {
        let fresh = tier(&self.time, &self.faulty, self.seed.0 + 99);
        let promised = self.gone.borrow().clone();
        self.expect_gone(&fresh, &promised, "on a new node").await;
        let ends = self.ends.borrow().clone();
        self.expect_ends(&fresh, &ends, "on a new node").await;
        if conditional != Conditional::Kept {
            let is_read = self.nodes.iter().all(|node| {
                node.tier.remembered(self.namespace).is_none_or(|known| known.manifest.packs.is_empty())
            });
            if self.acknowledged.get() > 0 || !is_read {
                self.wrong("a bucket that does not keep conditions was changed".to_owned());
            }
            return;
        }
        let checked = check(&fresh, self.namespace, Level::Full, false).await;
        let Ok(checked) = checked else { return self.wrong(format!("no check: {checked:?}")) };
        let is_back = |finding: &Finding| matches!(finding, Finding::DeletedBlocks(..));
        for found in checked.found.iter().filter(|found| !is_back(&found.finding)) {
            self.wrong(found.finding.to_string());
        }
        for found in checked.found.iter().filter(|found| is_back(&found.finding)) {
            self.wrong(format!("the check: {}", found.finding));
        }
        if self.is_cluster {
            self.expect_younger(&fresh).await;
            self.expect_put_again().await;
        }
    }
}

/// What becomes of conditions in a course: most buckets keep them.
fn conditional(seed: Seed) -> Conditional {
    match seed.child("conditional").rng().below(10) {
        0 => Conditional::Ignored,
        1 => Conditional::MatchIgnored,
        2 => Conditional::Refused,
        _ => Conditional::Kept,
    }
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    let (scene, conditional) = (Scene::new(seed), conditional(seed));
    scene.course(conditional);
    scene.time.run(scene.expect(conditional));
    if let Some(wrong) = scene.wrong.borrow_mut().take() {
        return Err(wrong);
    }
    let mut mixer = Mixer::new(0);
    for name in scene.memory.names() {
        mixer.text(&name);
    }
    for (block, until) in scene.gone.borrow().iter() {
        mixer.word(u64::from(*block));
        mixer.word(*until);
    }
    mixer.word(scene.time.now().as_millis() as u64);
    states.reach(mixer.value());
    Ok(())
}

/// Row R41.
pub(super) fn row() -> Row {
    Row {
        id: "R41",
        what: "nodes that share a bucket: pushes, sweeps, deletes, shorter times to live and collectors, over one that fails, lists late or ignores conditions",
        counts: "courses",
        targets: [300, 20_000, 200_000],
        run: |ask, target| -> Tally { until(ask, target, one) },
    }
}
