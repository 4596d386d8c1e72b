//! Which nodes come to have a block by rule: puts that go by the lease of a chain and by what others have, copies of what is read
//! often, blocks that an owner favours. In one simulation with real nodes, as row R33 has it: first leases are claimed, renewed and
//! given up and blocks put at all nodes while connections and nodes fail; then, when all is well, each rule is followed step by step.

mod script;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvarts_cluster::hot::Rule;
use kvarts_cluster::ownership::Token;
use kvarts_cluster::partition::Tag;
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, KvStore, Order, Origins, Parent, Presence, PutRequest, ReadRequest,
};
use kvarts_contract::clock::Clock;
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};
use kvarts_peer::node::{ClusterNode, Column, Fate, Placing, PutPolicy, lease_of};
use kvarts_peer::read::Runner;
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_wire::proto;
use proto::chain_reply::What;
use proto::chain_request::Ask;

use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::pages;
use crate::fixture::{self, Style};
use crate::nodes::ledger::Book;
use crate::nodes::tasks::Owner;
use crate::nodes::town::{STEPS_MAX, Town, USERS};
use crate::sim::{Rng, Seed};

/// Chains that nodes want to own while things go wrong, and their blocks.
const CHAINS: u64 = 3;
const LENGTH: u64 = 6;
/// Blocks of the chain that the rules are followed with.
const SCRIPTED: u64 = 12;
/// How long copies live.
const HOLD: Duration = Duration::from_secs(20);
/// Reads a second from which on a block is copied.
const READS_PER_SECOND: u32 = 2;

/// A cluster and its users.
struct Scene {
    town: Town,
    book: Book,
    rng: Rng,
    /// Those of the chains one after the other, then those of the script.
    keys: Vec<BlockKey>,
    namespace: NamespaceId,
    shape: Arc<BlockShape>,
    policy: PutPolicy,
    producers: u64,
}

/// A put, as a server does one.
struct Putting {
    place: usize,
    node: Arc<ClusterNode>,
    store: Store,
    owner: Owner,
    book: Book,
    shape: Arc<BlockShape>,
    namespace: NamespaceId,
    /// The first blocks of chains, by their numbers.
    chains: Vec<Tag>,
    keys: Vec<BlockKey>,
    parent: Option<BlockKey>,
    producer: u64,
    /// How long its bytes take to come.
    pause: Duration,
}

impl Putting {
    fn column(&self) -> Column<'_> {
        let (group, coordinate) = pages();
        Column { namespace: self.namespace, group, coordinate, keys: &self.keys }
    }

    /// What is stored by a lease is stored by the only one that is in force.
    fn look(&self, placing: &Placing) {
        for own in placing.own() {
            if let Some(chain) = self.chains.iter().position(|chain| chain == own) {
                self.book.stores_as_owner(chain as u64, self.place, self.owner.now());
            }
        }
    }

    /// Decides and stores nothing.
    async fn decide(self) {
        let placing = self.node.place(self.column(), self.parent).await.unwrap_or_default();
        self.look(&placing);
    }

    async fn run(self) -> Vec<Fate> {
        self.node.note_use(&self.column(), self.parent);
        let mut placing = self.node.place(self.column(), self.parent).await.unwrap_or_default();
        self.look(&placing);
        self.owner.sleep_until(self.owner.now().plus(self.pause)).await;
        if !self.node.stands(&placing) {
            placing = self.node.place(self.column(), self.parent).await.unwrap_or_default();
        }
        self.look(&placing);
        let fates: Vec<Fate> = (0..self.keys.len()).map(|at| placing.fate(at)).collect();
        let mut outcomes = Vec::new();
        for run in fates.chunk_by(|one, next| one == next) {
            let from = outcomes.len();
            let keys = &self.keys[from..from + run.len()];
            let expires_after = match run[0] {
                Fate::Stored => None,
                Fate::Copied(hold) => Some(hold),
                Fate::Held => {
                    outcomes.extend(keys.iter().map(|_| BlockOutcome::HeldElsewhere));
                    continue;
                }
            };
            outcomes.extend(self.store_blocks(keys, expires_after).await);
        }
        let is_stored = |at| outcomes.get(at) == Some(&BlockOutcome::Stored);
        self.node.offer_to_owners(self.column(), &placing, None, is_stored);
        fates
    }

    async fn store_blocks(&self, keys: &[BlockKey], expires_after: Option<Duration>) -> Vec<BlockOutcome> {
        let (group, coordinate) = pages();
        let refused = vec![BlockOutcome::HeldElsewhere; keys.len()];
        let Ok(from) = fixture::place(&self.shape, keys.len() as u32, Style::Blocks, 0) else {
            return refused;
        };
        for (at, key) in (0..).zip(keys) {
            let content = fixture::content(key, group, coordinate, self.producer, &self.shape);
            fixture::write_block(&from, at, &content);
        }
        let request = PutRequest {
            parent: Parent::Unknown,
            expires_after,
            ..PutRequest::new(self.namespace, group, coordinate, keys.to_vec(), from)
        };
        match self.store.put(request).await {
            Ok(Ok(reply)) => reply.outcomes,
            _ => refused,
        }
    }
}

impl Scene {
    fn new(seed: Seed) -> Result<Self, String> {
        let mut rng = seed.child("copies").rng();
        let count = [2, 3, 3, 4][rng.index(4)];
        let options = Options {
            shards_per_directory: 1,
            segment_bytes: 512 << 10,
            budget_bytes: 48 << 20,
            executors: 1,
            limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
            ..Options::default()
        };
        let mut town = Town::new(seed, count, &options);
        let policy = if rng.below(4) == 0 { PutPolicy::Keep(HOLD) } else { PutPolicy::Single(HOLD) };
        town.rules = (policy, Some(Rule { reads_per_second: READS_PER_SECOND, hold: HOLD }));
        let (group, coordinate) = pages();
        let identity = fixture::identity("nodes");
        let namespace = identity.namespace_id().map_err(|error| error.to_string())?;
        let shape = Arc::new(fixture::shape(group, coordinate));
        let keys = fixture::keys(7, 0..CHAINS * LENGTH + SCRIPTED);
        let mut scene =
            Self { town, book: Book::default(), rng, keys, namespace, shape, policy, producers: 0 };
        let mut opened = Vec::new();
        for place in 0..count {
            opened.push(scene.town.open(place)?);
        }
        let members = scene.town.members(1, 0..count);
        for (place, store) in opened.into_iter().enumerate() {
            scene.town.begin(place, store, &members)?;
        }
        Ok(scene)
    }

    fn count(&self) -> usize {
        self.town.seats.len()
    }

    fn tag(&self, key: &BlockKey) -> Tag {
        let (group, coordinate) = pages();
        Tag::of(&self.namespace, group, coordinate, key)
    }

    /// The first blocks of all chains; that of the script is the last.
    fn chains(&self) -> Vec<Tag> {
        (0..=CHAINS).map(|chain| self.tag(&self.keys[(chain * LENGTH) as usize])).collect()
    }

    fn owner(&self) -> Owner {
        Owner { tasks: Arc::clone(&self.town.tasks), number: USERS }
    }

    fn putting(&mut self, place: usize, keys: &[BlockKey], parent: Option<BlockKey>) -> Option<Putting> {
        let running = self.town.seats[place].running.as_ref()?;
        self.producers += 1;
        self.book.put(keys, self.producers);
        Some(Putting {
            place,
            node: Arc::clone(&running.node),
            store: running.store.clone(),
            owner: self.owner(),
            book: self.book.clone(),
            shape: Arc::clone(&self.shape),
            namespace: self.namespace,
            chains: self.chains(),
            keys: keys.to_vec(),
            parent,
            producer: self.producers,
            pause: Duration::ZERO,
        })
    }

    /// A task of a user of a node, with which it goes.
    fn spawn(&mut self, place: usize, task: impl Future<Output = ()> + Send + 'static) {
        let under_way = self.book.begin();
        self.town.spawn_at(place, async move {
            task.await;
            drop(under_way);
        });
    }

    fn put(&mut self, place: usize) {
        let chain = self.rng.below(CHAINS) * LENGTH;
        let from = self.rng.below(LENGTH);
        let to = self.rng.between(from + 1, LENGTH);
        let keys = self.keys[(chain + from) as usize..(chain + to) as usize].to_vec();
        let parent = from.checked_sub(1).map(|before| self.keys[(chain + before) as usize]);
        let pause = Duration::from_millis([0, 5, 300, 4000][self.rng.index(4)]);
        if let Some(putting) = self.putting(place, &keys, parent) {
            self.spawn(place, async move { drop(Putting { pause, ..putting }.run().await) });
        }
    }

    /// A node asks about a chain; gives the answer to `told`.
    fn chain(
        &mut self,
        place: usize,
        chain: u64,
        how: impl FnOnce(Option<Token>) -> Ask + Send + 'static,
        told: &Told<What>,
    ) {
        let Some(node) = self.town.node(place).cloned() else { return };
        let (clock, book, told) = (Arc::clone(&self.town.clock), self.book.clone(), told.clone());
        let (key, namespace) = (self.keys[(chain * LENGTH) as usize], self.namespace);
        let (group, coordinate) = pages();
        self.spawn(place, async move {
            let asked = clock.now();
            let last = book.last(chain, place, asked);
            let ask = how(last);
            let Token { epoch, number } = last.unwrap_or_default();
            match ask {
                // Whether the node that decides hears of it or not.
                Ask::Release(_) => book.gives_up(Some(chain), place, asked),
                Ask::RenewMs(hold) => {
                    let with = Token { epoch, number };
                    book.asks(chain, with, Duration::from_millis(hold), asked);
                }
                _ => {}
            }
            let request = proto::ChainRequest {
                ask: Some(ask),
                token_epoch: epoch,
                token_number: number,
                node: node.id().0.to_vec().into(),
                ..proto::ChainRequest::default()
            };
            let Ok(reply) = node.chain_of((namespace, group, coordinate), key, request).await else { return };
            let left = Duration::from_millis(reply.lease.as_ref().map_or(0, |lease| lease.left_ms));
            if let (What::Granted, Some((_, token)), Ask::ClaimMs(_) | Ask::RenewMs(_)) =
                (reply.what(), lease_of(&reply), ask)
            {
                book.owns(chain, place, token, (asked, clock.now()), left);
            }
            told.set(reply.what());
        });
    }

    fn read(&mut self, place: usize, keys: Vec<BlockKey>, told: &Told<u32>) {
        let Some(node) = self.town.node(place).cloned() else { return };
        let (group, coordinate) = pages();
        let Ok(into) = fixture::place(&self.shape, keys.len() as u32, Style::Blocks, 0) else { return };
        let request = ReadRequest {
            order: Order::Blocks,
            deadline: Some(self.town.clock.now().plus(Duration::from_secs(20))),
            ..ReadRequest::new(self.namespace, group, coordinate, keys.clone(), into.clone())
        };
        let (book, shape, told) = (self.book.clone(), Arc::clone(&self.shape), told.clone());
        self.spawn(place, async move {
            let origins = Origins::any(keys.len());
            let Ok(stream) = node.read(request, &shape, &origins) else { return };
            let what = format!("a read at node {place}");
            let (good, _) = book.look(&what, (&keys, &into, Order::Blocks), &stream, &shape).await;
            told.set(good.len() as u32);
        });
    }

    /// Something that a user does.
    fn act(&mut self) {
        let place = self.rng.index(self.count());
        let chain = self.rng.below(CHAINS);
        match self.rng.below(10) {
            0..=3 => {
                let (hold, kind) = (self.rng.between(500, 20_000), self.rng.below(4));
                let ask = move |last: Option<Token>| match (kind, last) {
                    (0, Some(_)) => Ask::RenewMs(hold),
                    (1, Some(_)) => Ask::Release(true),
                    _ => Ask::ClaimMs(hold),
                };
                self.chain(place, chain, ask, &Told::default());
            }
            4..=8 => self.put(place),
            _ => {
                let from = self.rng.index((CHAINS * LENGTH) as usize);
                let keys = self.keys[from..=from].to_vec();
                self.read(place, keys, &Told::default());
            }
        }
    }

    fn trouble(&mut self) -> Result<(), String> {
        let ways = self.town.ways();
        let Some(&way) = self.rng.pick(&ways) else { return Ok(()) };
        let place = way.0;
        match self.rng.below(6) {
            0 => self.town.net.change(way, |link| link.is_blocked = true),
            1 => {
                let most = Duration::from_micros(self.rng.between(1000, 900_000));
                self.town.net.change(way, |link| link.delay.1 = most);
            }
            2 => self.town.net.break_calls(way),
            3 => {
                self.book.gives_up(None, place, self.town.clock.now());
                let is_told = self.rng.coin();
                self.town.crash(place, is_told, |world| world.kill())?;
            }
            _ => self.heal()?,
        }
        Ok(())
    }

    /// All nodes run, and reach each other.
    fn heal(&mut self) -> Result<(), String> {
        for way in self.town.ways() {
            self.town.net.change(way, |link| {
                link.is_blocked = false;
                link.delay = (Duration::from_micros(50), Duration::from_micros(400));
            });
        }
        let members = self.town.members(1, 0..self.count());
        for place in 0..self.count() {
            if self.town.seats[place].running.is_none() {
                let opened = self.town.open(place)?;
                self.town.begin(place, opened, &members)?;
            }
        }
        Ok(())
    }

    fn has(&self, place: usize, key: &BlockKey) -> bool {
        let ((group, coordinate), keys) = (pages(), std::slice::from_ref(key));
        let request = ContainsRequest { namespace: self.namespace, group, coordinate, keys, lease: None };
        let running = self.town.seats[place].running.as_ref();
        running.is_some_and(|running| {
            running.store.contains(&request).is_ok_and(|reply| reply.presence == [Presence::Here])
        })
    }

    fn quiet(&mut self) -> Result<(), String> {
        let book = self.book.clone();
        self.town.until(STEPS_MAX, |_| book.under_way() == 0)?;
        self.look()
    }

    fn look(&self) -> Result<(), String> {
        self.book.first_violation().map_or(Ok(()), Err)
    }

    fn run(&mut self) -> Result<(), String> {
        for _ in 0..self.rng.between(6, 20) {
            (0..self.rng.between(1, 6)).for_each(|_| self.act());
            if self.rng.below(3) == 0 {
                self.trouble()?;
            }
            let most = [2, 40, 700, 3000][self.rng.index(4)];
            let pause = self.rng.below(most * 1000);
            self.town.pass(Duration::from_micros(pause))?;
            self.look()?;
        }
        self.heal()?;
        self.quiet()?;
        self.follow_the_rules()
    }
}

/// What came of something that a user asked for.
#[derive(Debug)]
struct Told<T>(Arc<Mutex<Option<T>>>);

impl<T> Default for Told<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Clone for Told<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Told<T> {
    fn set(&self, what: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
    }

    fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    let mut scene = Scene::new(seed)?;
    scene.run()?;
    states.reach(scene.town.log().0);
    Ok(())
}

/// Row R39.
pub(super) fn row() -> Row {
    Row {
        id: "R39",
        what: "which nodes come to have a block: puts by lease and directory, hot copies, favoured blocks",
        counts: "courses",
        targets: [20, 4_000, 80_000],
        run: |ask, target| -> Tally { until(ask, target, one) },
    }
}
