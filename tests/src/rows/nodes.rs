//! Nodes of one cluster in one simulation, while connections are slow, break and lie, nodes are cut off from each other, lose
//! their power and come back, members change, and blocks are put, read, copied and deleted everywhere.

mod members;
pub(super) mod trouble;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvarts_cluster::deletes::Known;
use kvarts_cluster::members::{Members, NodeId};
use kvarts_cluster::ownership::Token;
use kvarts_cluster::partition::Tag;
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteOutcome, DeleteRequest, Durability, KvStore, Order, Origins, Parent,
    Presence, PutRequest, ReadRequest, Target,
};
use kvarts_contract::clock::Clock;
use kvarts_contract::error::Kind;
use kvarts_fsck::check::Level;
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};
use kvarts_peer::node::{Away, Column, NodeStatus, lease_of};
use kvarts_peer::read::Runner;
use kvarts_store::engine::{Limits, Options};
use kvarts_wire::proto;
use proto::chain_reply::What;
use proto::chain_request::Ask;

use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::pages;
use crate::fixture::{self, Style};
use crate::nodes::ledger::{Book, Due};
use crate::nodes::net::Fault;
use crate::nodes::tasks::Owner;
use crate::nodes::town::{Manner, STEPS_MAX, Town, USERS};
use crate::sim::{Rng, Seed};
use crate::witness::{directories, examine, problems};

/// Blocks of the model.
const BLOCKS: u64 = 24;
/// Chains that nodes want to own.
const CHAINS: u64 = 6;
/// How long a read may take that has no deadline.
const LONGEST: Duration = Duration::from_secs(100);
/// How much later than its deadline a read may end.
const LATE: Duration = Duration::from_millis(5);
/// How long it may take, once nothing goes wrong any more, until every node knows what every other one has.
const CONVERGES: Duration = Duration::from_secs(30);

/// The longest time to live of a block: it is over by the end.
const TTL_MS_MAX: u64 = 8000;
/// How long it may take until a node that was away is asked for bytes again: a connection is tried for 5 s, and again after 5 s.
const RETURNS: Duration = Duration::from_secs(12);

fn store_options() -> Options {
    Options {
        shards_per_directory: 1,
        segment_bytes: 512 << 10,
        budget_bytes: 48 << 20,
        executors: 1,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// A cluster and its users.
struct Scene {
    town: Town,
    book: Book,
    rng: Rng,
    keys: Vec<BlockKey>,
    namespace: NamespaceId,
    shape: Arc<BlockShape>,
    producers: u64,
    /// The members of the latest epoch, and who is told of which epoch next.
    epoch: u64,
    inside: BTreeSet<usize>,
    to_tell: Vec<(usize, Members)>,
    told: Vec<Members>,
    calls: u64,
}

impl Scene {
    fn new(seed: Seed) -> Result<Self, String> {
        let mut rng = seed.child("nodes").rng();
        let count = [2, 3, 3, 3, 3, 4, 5, 8][rng.index(8)];
        Self::of(Town::new(seed, count, &store_options()), rng)
    }

    /// All nodes of a town run.
    fn of(town: Town, rng: Rng) -> Result<Self, String> {
        let count = town.seats.len();
        let (group, coordinate) = pages();
        let identity = fixture::identity("nodes");
        let namespace = identity.namespace_id().map_err(|error| error.to_string())?;
        let shape = Arc::new(fixture::shape(group, coordinate));
        let mut scene = Self {
            town,
            book: Book::default(),
            rng,
            keys: fixture::keys(7, 0..BLOCKS),
            namespace,
            shape,
            producers: 0,
            epoch: 1,
            inside: (0..count).collect(),
            to_tell: Vec::new(),
            told: Vec::new(),
            calls: 0,
        };
        // Names are made with the stores: all are opened before any node begins.
        let mut opened = Vec::new();
        for place in 0..count {
            opened.push(scene.town.open(place)?);
        }
        let members = scene.members();
        scene.told.push(members.clone());
        for (place, store) in opened.into_iter().enumerate() {
            scene.town.begin(place, store, &members)?;
        }
        Ok(scene)
    }

    fn members(&self) -> Members {
        self.town.members(self.epoch, self.inside.iter().copied())
    }

    fn count(&self) -> usize {
        self.town.seats.len()
    }

    fn some(&mut self) -> Vec<BlockKey> {
        let from = self.rng.index(BLOCKS as usize);
        let len = self.rng.between(1, 12) as usize;
        self.keys[from..(from + len).min(BLOCKS as usize)].to_vec()
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
        if self.town.seats[place].running.is_none() {
            return;
        }
        let keys = self.some();
        let durable = self.rng.below(3) > 0;
        let ttl = (self.rng.below(5) == 0).then(|| Duration::from_millis(self.rng.between(200, TTL_MS_MAX)));
        self.put_these(place, keys, durable, ttl);
    }

    fn put_these(&mut self, place: usize, keys: Vec<BlockKey>, durable: bool, ttl: Option<Duration>) {
        let Some(running) = &self.town.seats[place].running else { return };
        let store = running.store.clone();
        self.producers += 1;
        let (producer, (group, coordinate)) = (self.producers, pages());
        let Ok(from) = fixture::place(&self.shape, keys.len() as u32, Style::Blocks, 0) else { return };
        for (at, key) in (0..).zip(&keys) {
            let content = fixture::content(key, group, coordinate, producer, &self.shape);
            fixture::write_block(&from, at, &content);
        }
        let request = PutRequest {
            parent: Parent::Unknown,
            expires_after: ttl,
            durability: if durable { Durability::Durable } else { Durability::Relaxed },
            ..PutRequest::new(self.namespace, group, coordinate, keys.clone(), from)
        };
        let (clock, book) = (Arc::clone(&self.town.clock), self.book.clone());
        let begun = (book.put(&keys, producer), clock.now());
        self.spawn(place, async move {
            let Ok(Ok(reply)) = store.put(request).await else { return };
            book.answered(producer, ttl, clock.now());
            for (key, outcome) in keys.iter().zip(reply.outcomes) {
                if durable && ttl.is_none() && outcome == BlockOutcome::Stored {
                    book.stored(place, *key, begun);
                }
            }
        });
    }

    fn delete(&mut self, place: usize) {
        if self.town.node(place).is_some() {
            let all = self.rng.below(8) == 0;
            let keys = self.some();
            self.delete_these(place, (!all).then_some(keys), None);
        }
    }

    /// These blocks, or everything; what is `due` is over with the answer.
    fn delete_these(&mut self, place: usize, keys: Option<Vec<BlockKey>>, due: Option<Due>) {
        let Some(node) = self.town.node(place).cloned() else { return };
        let (clock, book) = (Arc::clone(&self.town.clock), self.book.clone());
        let number = book.delete(self.count(), keys.as_deref(), clock.now());
        let target = keys.map_or(Target::Namespace, |keys| Target::Keys { column: None, keys });
        let request = DeleteRequest { namespace: self.namespace, target, deadline: None };
        let ids = self.ids();
        self.spawn(place, async move {
            let before = node.members();
            let Ok(deleted) = node.delete(request).await else { return };
            drop(due);
            let is_refused = |one: &DeleteOutcome| matches!(one, DeleteOutcome::Refused(_));
            if deleted.reply.outcomes.iter().any(is_refused) {
                return;
            }
            let told = told(&ids, (&*before, &*node.members()), &deleted.away);
            book.deleted(number, deleted.name, &told, (clock.now(), None));
        });
    }

    /// Blocks are to end sooner than they would.
    fn shorten(&mut self, place: usize) {
        if self.town.node(place).is_some() {
            let keys = self.some();
            self.shorten_these(place, keys, None);
        }
    }

    fn shorten_these(&mut self, place: usize, keys: Vec<BlockKey>, due: Option<Due>) {
        let Some(node) = self.town.node(place).cloned() else { return };
        let ttl = Duration::from_millis(self.rng.between(200, TTL_MS_MAX));
        let (clock, book) = (Arc::clone(&self.town.clock), self.book.clone());
        let number = book.delete(self.count(), Some(&keys), clock.now());
        let (namespace, ids) = (self.namespace, self.ids());
        self.spawn(place, async move {
            let before = node.members();
            let Ok(shorter) = node.end_sooner(namespace, pages(), keys, ttl).await else { return };
            drop(due);
            let told = told(&ids, (&*before, &*node.members()), &shorter.away);
            let now = clock.now();
            book.deleted(number, shorter.name, &told, (now, Some(now.plus(ttl))));
        });
    }

    fn ids(&self) -> Vec<NodeId> {
        self.town.seats.iter().map(|seat| seat.id).collect()
    }

    fn read(&mut self, place: usize, keys: Vec<BlockKey>, order: Order, deadline: Option<Duration>) {
        let Some(node) = self.town.node(place).cloned() else { return };
        let ((group, coordinate), clock) = (pages(), Arc::clone(&self.town.clock));
        let Ok(into) = fixture::place(&self.shape, keys.len() as u32, Style::Blocks, 0) else { return };
        let begun = clock.now();
        let request = ReadRequest {
            order,
            deadline: deadline.map(|deadline| begun.plus(deadline)),
            ..ReadRequest::new(self.namespace, group, coordinate, keys.clone(), into.clone())
        };
        self.calls += 1;
        let what = format!("read {} of {} blocks at node {place} in order {order:?}", self.calls, keys.len());
        let (book, shape) = (self.book.clone(), Arc::clone(&self.shape));
        let owner = Owner { tasks: Arc::clone(&self.town.tasks), number: USERS };
        let bound = deadline.map_or(LONGEST, |deadline| deadline + LATE);
        let due = self.book.ends_by(self.calls, begun.plus(bound), &what);
        self.spawn(place, async move {
            let origins = Origins::any(keys.len());
            let stream = match node.read(request, &shape, &origins) {
                Ok(stream) => stream,
                Err(error) if error.0.kind() == Kind::Bug => {
                    return book.violation(format!("{what}: {error}"));
                }
                Err(_) => return,
            };
            let (good, end) = book.look(&what, (&keys, &into, order), &stream, &shape).await;
            drop(due);
            book.look_for_the_gone(&what, (place, begun), (&keys, &into, &good), &shape);
            let took = clock.now().since(begun);
            if took > bound {
                book.violation(format!("{what} ended after {took:?}, not within {bound:?}"));
            }
            if let Some((block, reason)) = end.failures.iter().find(|(_, reason)| reason.kind() == Kind::Bug)
            {
                book.violation(format!("{what}: block {block}: {reason}"));
            }
            owner.sleep_until(clock.now().plus(Duration::from_secs(2))).await;
            book.look_again(&what, &keys, &into, &good, &shape);
        });
    }

    fn replicate(&mut self, place: usize) {
        let Some(node) = self.town.node(place).cloned() else { return };
        let (keys, shape, namespace) = (self.some(), Arc::clone(&self.shape), self.namespace);
        let (group, coordinate) = pages();
        self.spawn(place, async move {
            let column = Column { namespace, group, coordinate, keys: &keys };
            drop(node.replicate(column, &shape, None).await);
        });
    }

    fn chain(&mut self, place: usize) {
        let Some(node) = self.town.node(place).cloned() else { return };
        let (number, clock, book) = (self.rng.below(CHAINS), Arc::clone(&self.town.clock), self.book.clone());
        let (group, coordinate) = pages();
        let tag = Tag::of(&self.namespace, group, coordinate, &self.keys[number as usize]);
        let hold = self.rng.between(500, 60_000);
        let asked = clock.now();
        // No node goes on with a lease that is over: a new holder would believe it.
        let last = book.last(number, place, asked);
        let ask = match (self.rng.below(6), last) {
            (0 | 1, Some(_)) => Ask::RenewMs(hold),
            (2, Some(_)) => Ask::Release(true),
            (3, _) => Ask::Look(true),
            _ => Ask::ClaimMs(hold),
        };
        // Now and then it goes on with a lease that it has made another one of since.
        let earlier = book.earlier(number, place, asked).filter(|_| self.rng.below(4) == 0);
        let ask = if earlier.is_some() { Ask::RenewMs(hold) } else { ask };
        let Token { epoch, number: token } = earlier.or(last).unwrap_or_default();
        if matches!(ask, Ask::Release(_)) {
            // Whether the node that decides hears of it or not.
            book.gives_up(Some(number), place, asked);
        }
        let with = Token { epoch, number: token };
        if matches!(ask, Ask::RenewMs(_)) {
            book.asks(number, with, Duration::from_millis(hold), asked);
        }
        let releases = matches!(ask, Ask::Release(_));
        let may_own = matches!(ask, Ask::ClaimMs(_) | Ask::RenewMs(_));
        let request = proto::ChainRequest {
            ask: Some(ask),
            token_epoch: epoch,
            token_number: token,
            node: node.id().0.to_vec().into(),
            ..proto::ChainRequest::default()
        };
        self.spawn(place, async move {
            let Ok(reply) = node.chain(tag, request).await else { return };
            if releases && reply.what() == What::Nobody {
                book.is_given_up(number, with, clock.now());
            }
            let Some((_, token)) = lease_of(&reply) else { return };
            let left = Duration::from_millis(reply.lease.as_ref().map_or(0, |lease| lease.left_ms));
            match (reply.what(), earlier) {
                // A holder that is new knows no better.
                (What::Granted, Some(earlier)) if token == earlier => {}
                (What::Granted, Some(earlier)) => {
                    book.violation(format!("chain {number}: node {place} renews {token:?} with {earlier:?}"));
                }
                (What::Granted, None) if may_own => {
                    book.owns(number, place, token, (asked, clock.now()), left);
                }
                (What::Owned | What::Granted, _) => book.is_owned(number, token, asked),
                _ => {}
            }
        });
    }

    /// Something that a user does.
    fn act(&mut self) {
        let place = self.rng.index(self.count());
        match self.rng.below(13) {
            0..=3 => self.put(place),
            4..=8 => {
                let keys = self.some();
                let order = if self.rng.coin() { Order::Layers } else { Order::Blocks };
                let deadline = [None, Some(50), Some(400), Some(3000)][self.rng.index(4)];
                self.read(place, keys, order, deadline.map(Duration::from_millis));
            }
            9 => self.delete(place),
            10 => self.replicate(place),
            11 => self.shorten(place),
            _ => (0..3).for_each(|_| self.chain(place)),
        }
    }

    /// Something that goes wrong, or changes.
    fn trouble(&mut self) -> Result<(), String> {
        let ways = self.town.ways();
        let Some(&way) = self.rng.pick(&ways) else { return Ok(()) };
        let place = way.0;
        match self.rng.below(14) {
            0 => self.town.net.change(way, |link| link.is_blocked = true),
            1 => self.cut_off(place),
            2 => self.heal_network(),
            3 => {
                let most = Duration::from_micros(self.rng.between(100, 300_000));
                let rate = self.rng.between(64 << 10, 50 << 20);
                self.town.net.change(way, |link| (link.delay.1, link.rate) = (most.max(link.delay.0), rate));
            }
            4 => self.town.net.break_calls(way),
            5 => self.town.net.break_pipes(|of| of == way),
            6 | 7 => {
                let fault = [Fault::Flip, Fault::Reset, Fault::End, Fault::Stall][self.rng.index(4)];
                let after = self.rng.below(600 << 10);
                self.town.net.plan(way, fault, after);
                self.town.net.break_pipes(|of| of == (way.1, way.0));
            }
            8 => {
                let after = self.rng.below(6);
                self.town.net.cut_feed(way, after);
            }
            9 => {
                let manner =
                    [Manner::Honest, Manner::OtherBytes, Manner::Nothing, Manner::Endless][self.rng.index(4)];
                self.town.seats[place].manner.store(manner as u8, Ordering::SeqCst);
            }
            10 => self.crash(place)?,
            11 => {
                self.book.gives_up(None, place, self.town.clock.now());
                self.town.stop(place)?;
            }
            12 => {
                for place in 0..self.count() {
                    if self.rng.coin() {
                        self.restart(place)?;
                    }
                }
            }
            _ => self.change_members(),
        }
        Ok(())
    }

    /// Nothing passes to a node or from it.
    fn cut_off(&mut self, place: usize) {
        let ways = self.town.ways().into_iter().filter(|(from, to)| *from == place || *to == place);
        ways.for_each(|way| self.town.net.change(way, |link| link.is_blocked = true));
    }

    fn heal_network(&mut self) {
        for way in self.town.ways() {
            self.town.net.change(way, |link| {
                link.is_blocked = false;
                (link.delay, link.rate) =
                    ((Duration::from_micros(50), Duration::from_micros(400)), 400 << 20);
            });
        }
    }

    fn crash(&mut self, place: usize) -> Result<(), String> {
        self.book.gives_up(None, place, self.town.clock.now());
        let (is_told, seed) = (self.rng.coin(), Seed(self.rng.next_u64()));
        self.town.cut_power(place, is_told, |state| {
            let crashes = state.enumerate(2, seed);
            let crash = seed.rng().pick(&crashes).cloned();
            state.image(crash.unwrap_or(crate::sim::Crash::KeepAll))
        })
    }

    /// Starts a node that does not run, and looks at what its store has kept.
    fn restart(&mut self, place: usize) -> Result<(), String> {
        if self.town.seats[place].running.is_some() {
            return Ok(());
        }
        let note = |what: String| format!("node {place}: {what}");
        if let Some(image) = self.town.media(place) {
            let checked = examine(&directories(image), Level::Full).map_err(|error| format!("{error:?}"))?;
            if !checked.findings.is_clean() {
                return Err(note(format!("after it was gone: {}", problems(&checked))));
            }
        }
        self.book.reopened();
        let opened = self.town.open(place)?;
        let lost: Vec<BlockKey> = self.book.durable(place);
        let lost = lost.into_iter().filter(|key| !has(&opened.1, self.namespace, key)).count();
        if lost > 0 {
            return Err(note(format!("{lost} blocks are gone that were acknowledged as durable")));
        }
        // It has the file of members that there is now, or that of before if it was not told.
        let mut members = self.members();
        if members.get(self.town.seats[place].id).is_none() {
            let mut places = self.inside.clone();
            places.insert(place);
            members = self.town.members(self.epoch.saturating_sub(1).max(1), places.into_iter());
        }
        self.town.begin(place, opened, &members)
    }

    /// Everything is as it should be from now on.
    fn heal(&mut self) -> Result<(), String> {
        self.heal_network();
        self.town.net.forget_plans();
        self.town.net.break_pipes(|_| true);
        for seat in &self.town.seats {
            seat.manner.store(Manner::Honest as u8, Ordering::SeqCst);
        }
        let is_without_one = self.count() > 2 && self.rng.below(3) == 0;
        self.inside = (0..self.count()).collect();
        if is_without_one {
            let place = self.rng.index(self.count());
            self.inside.remove(&place);
        }
        self.epoch += 1;
        let members = self.members();
        for place in 0..self.count() {
            self.restart(place)?;
            if self.inside.contains(&place)
                && let Some(node) = self.town.node(place).cloned()
            {
                node.change_members(members.clone())?;
            }
        }
        Ok(())
    }

    /// Which nodes really have each block.
    fn truth(&self) -> Vec<Vec<usize>> {
        let at = |key: &BlockKey| {
            let stores = self
                .inside
                .iter()
                .filter_map(|place| Some((place, self.town.seats[*place].running.as_ref()?)));
            stores
                .filter(|(_, running)| has(&running.store, self.namespace, key))
                .map(|(place, _)| *place)
                .collect()
        };
        self.keys.iter().map(at).collect()
    }

    fn tags(&self) -> impl Iterator<Item = Tag> + '_ {
        let (group, coordinate) = pages();
        self.keys.iter().map(move |key| Tag::of(&self.namespace, group, coordinate, key))
    }

    /// What a node is told of where blocks are, and of which ones it is told that they may be anywhere.
    fn told_at(&mut self, place: usize) -> Result<(Vec<Vec<usize>>, BTreeSet<usize>), String> {
        let Some(node) = self.town.node(place).cloned() else {
            return Err(format!("node {place} does not run"));
        };
        let tags: Vec<Tag> = self.tags().collect();
        let located = {
            let mut locating = std::pin::pin!(node.locate(&tags, Duration::from_secs(1)));
            self.town.drive(&[], |context| locating.as_mut().poll(context))?
        };
        let place_of = |id| self.town.seats.iter().position(|seat| seat.id == id).unwrap_or(usize::MAX);
        let mut copies: Vec<Vec<usize>> =
            located.copies.into_iter().map(|nodes| nodes.into_iter().map(place_of).collect()).collect();
        copies.iter_mut().for_each(|places| places.sort_unstable());
        Ok((copies, located.unasked.into_iter().collect()))
    }

    /// The nodes that a node reaches, or has not tried to.
    fn within_reach(&self, place: usize) -> BTreeSet<usize> {
        let status = self.town.node(place).map(|node| node.status().nodes).unwrap_or_default();
        let near = |node: &&NodeStatus| !node.is_me && node.trouble.is_empty();
        let ids: BTreeSet<NodeId> = status.iter().filter(near).map(|node| node.member.id).collect();
        (0..self.count()).filter(|at| ids.contains(&self.town.seats[*at].id)).collect()
    }

    /// A node starts again, or all do. From then on no node is told that a block is nowhere which a node has that it reaches.
    fn start_again(&mut self) -> Result<(), String> {
        let all: Vec<usize> = self.inside.iter().copied().collect();
        let again = match self.rng.coin() {
            true => vec![all[self.rng.index(all.len())]],
            false => all.clone(),
        };
        for place in &again {
            self.town.stop(*place)?;
        }
        for place in &again {
            self.restart(*place)?;
        }
        for _ in 0..16 {
            let place = all[self.rng.index(all.len())];
            self.hides_nothing(place)?;
            let pause = 1 << self.rng.below(15);
            self.town.pass(Duration::from_micros(pause))?;
        }
        Ok(())
    }

    fn hides_nothing(&mut self, place: usize) -> Result<(), String> {
        let near = self.within_reach(place);
        let (told, unknown) = self.told_at(place)?;
        let (near, truth) = (&near & &self.within_reach(place), self.truth());
        for (block, told) in told.iter().enumerate().filter(|(block, _)| !unknown.contains(block)) {
            if let Some(at) = truth[block].iter().find(|at| told.is_empty() && near.contains(at)) {
                return Err(format!("node {place} is told that block {block} is nowhere, and {at} has it"));
            }
        }
        Ok(())
    }

    /// Every node knows what every other one has, within a bound.
    fn converge(&mut self) -> Result<(), String> {
        let begun = self.town.clock.now();
        loop {
            let (truth, mut last) = (self.truth(), None);
            for place in self.inside.clone() {
                let (told, _) = self.told_at(place)?;
                if told != truth {
                    let differs =
                        told.iter().zip(&truth).position(|(told, truth)| told != truth).unwrap_or(0);
                    last = Some(format!(
                        "node {place} is told that block {differs} is at {:?}, and it is at {:?}",
                        told[differs], truth[differs]
                    ));
                }
            }
            let Some(last) = last else { return Ok(()) };
            if self.town.clock.now().since(begun) > CONVERGES {
                return Err(format!("{CONVERGES:?} after the last fault {last}"));
            }
            self.town.pass(Duration::from_millis(500))?;
        }
    }

    /// Every node has heard of everything that was deleted, or does within a bound.
    fn hear(&mut self) -> Result<(), String> {
        let begun = self.town.clock.now();
        loop {
            let now = self.town.clock.now();
            let known = |place: &usize| Some((*place, self.town.node(*place)?.deletes_known()));
            let known: Vec<(usize, Known)> = self.inside.iter().filter_map(known).collect();
            known.iter().for_each(|(place, known)| self.book.told(*place, known, now));
            if known.windows(2).all(|two| two[0].1 == two[1].1) {
                return Ok(());
            }
            if now.since(begun) > CONVERGES {
                return Err(format!(
                    "{CONVERGES:?} after the last fault not all nodes know what was deleted: {known:?}"
                ));
            }
            self.town.pass(Duration::from_millis(500))?;
        }
    }

    /// What any node has every node reads, whole.
    fn read_everything(&mut self) -> Result<(), String> {
        let truth = self.truth();
        let there: Vec<BlockKey> =
            self.keys.iter().zip(&truth).filter(|(_, at)| !at.is_empty()).map(|(key, _)| *key).collect();
        if there.is_empty() {
            return Ok(());
        }
        for place in self.inside.clone() {
            let before = self.book.counts();
            self.read(place, there.clone(), Order::Blocks, None);
            self.quiet()?;
            let after = self.book.counts();
            if after[1] - before[1] != there.len() as u64 {
                let came = after[1] - before[1];
                return Err(format!("of {} blocks that nodes have node {place} reads {came}", there.len()));
            }
        }
        Ok(())
    }

    /// Whatever users asked for ends.
    fn quiet(&mut self) -> Result<(), String> {
        let book = self.book.clone();
        self.town
            .until(STEPS_MAX, |town| book.under_way() == 0 || book.overdue(town.clock.now()).is_some())?;
        self.look()
    }

    /// Nothing is kept by who has nothing to do.
    fn bounds(&mut self) -> Result<(), String> {
        self.town.pass(Duration::from_secs(3))?;
        let copies: u64 = self.truth().iter().map(|at| at.len() as u64).sum();
        let entries = self.holds_nothing()?;
        // Those of nodes that left go when their partition is next touched.
        if entries < copies || entries > 2 * BLOCKS * self.count() as u64 {
            return Err(format!("the directory has {entries} entries of {copies} copies"));
        }
        Ok(())
    }

    /// No node holds anything for others or from them; gives the entries of the directory.
    fn holds_nothing(&self) -> Result<u64, String> {
        let mut entries = 0;
        for place in self.inside.clone() {
            let Some(node) = self.town.node(place) else { continue };
            let status = node.status();
            entries += status.entries;
            if status.served.memory > 0 {
                return Err(format!(
                    "node {place} keeps {} bytes for pieces of others",
                    status.served.memory
                ));
            }
            if status.chains > CHAINS {
                return Err(format!("node {place} knows {} chains of {CHAINS}", status.chains));
            }
            let owed: u64 =
                status.nodes.iter().filter_map(|node| node.path.as_ref()).map(|path| path.outstanding).sum();
            if owed > 0 {
                return Err(format!("node {place} counts {owed} bytes as under way"));
            }
        }
        Ok(entries)
    }

    fn run(&mut self) -> Result<(), String> {
        let rounds = self.rng.between(10, 40);
        let calm = self.rng.below(5) == 0;
        for _ in 0..rounds {
            (0..self.rng.below(4)).for_each(|_| self.act());
            if !calm && self.rng.below(3) == 0 {
                self.trouble()?;
            }
            self.tell()?;
            let most = [2, 40, 700, 3000][self.rng.index(4)];
            let pause = self.rng.below(most * 1000);
            self.town.pass(Duration::from_micros(pause))?;
            self.look()?;
        }
        if self.rng.below(4) == 0 {
            self.leave_behind()?;
        }
        self.heal()?;
        self.town.pass(RETURNS)?;
        self.quiet()?;
        self.look()?;
        self.hear()?;
        self.converge()?;
        self.read_everything()?;
        self.look()?;
        if self.rng.below(3) == 0 {
            self.start_again()?;
            self.converge()?;
        }
        self.bounds()
    }

    fn look(&self) -> Result<(), String> {
        let wrong = self.book.first_violation().or_else(|| self.book.overdue(self.town.clock.now()));
        wrong.map_or(Ok(()), Err)
    }
}

/// Which places have what was acknowledged: who was a member all the time, and is not said to be away.
fn told(ids: &[NodeId], (before, after): (&Members, &Members), away: &[Away]) -> Vec<usize> {
    let is_told = |id: &NodeId| {
        before.get(*id).is_some() && after.get(*id).is_some() && !away.iter().any(|away| away.node == *id)
    };
    (0..).zip(ids).filter(|(_, id)| is_told(id)).map(|(place, _)| place).collect()
}

fn has(store: &impl KvStore, namespace: NamespaceId, key: &BlockKey) -> bool {
    let ((group, coordinate), keys) = (pages(), std::slice::from_ref(key));
    let request = ContainsRequest { namespace, group, coordinate, keys, lease: None };
    store.contains(&request).is_ok_and(|reply| reply.presence == [Presence::Here])
}

/// One seed; gives a digest of all that happened.
fn one(seed: Seed) -> Result<u128, String> {
    let mut scene = Scene::new(seed)?;
    scene.run()?;
    Ok(scene.town.log().0)
}

/// Runs a seed, some of them twice: a seed replays everything.
fn replayed(seed: Seed, states: &States, one: impl Fn(Seed) -> Result<u128, String>) -> Result<(), String> {
    let digest = one(seed)?;
    states.reach(digest);
    if seed.0.is_multiple_of(16) && one(seed)? != digest {
        return Err("the same seed went another way the second time".to_owned());
    }
    Ok(())
}

/// Row R33.
pub(super) fn row() -> Row {
    Row {
        id: "R33",
        what: "nodes of a cluster in one simulation, while the network, nodes and members fail and change",
        counts: "courses",
        targets: [20, 10_000, 200_000],
        run: |ask, target| -> Tally { until(ask, target, |seed, states| replayed(seed, states, one)) },
    }
}
