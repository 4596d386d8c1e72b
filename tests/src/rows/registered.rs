//! Members that register themselves with a service as etcd is: what is held under leases, changed by comparison, and told to watchers
//! late. Nodes start, are killed, move and come back; the service is away, is slow, or has lost everything.
//!
//! What a node decides is the nodes' own ([`View`]); the service and the connections to it are simulated.

use std::collections::{BTreeMap, BTreeSet};

use kvarts_cluster::members::{Member, Members, NodeId};
use kvarts_cluster::registry::{MEMBERS_KEY, View, node_key, registration, taken_key};
use kvarts_layout::StoreId;

use super::pool::{States, until};
use super::{Row, Tally};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed};

/// Nodes at most; one more may have the address of another.
const NODES: u8 = 7;
/// Ticks that a registration outlives its node.
const LEASE: u64 = 15;
/// Ticks that a watcher may be behind.
const BEHIND: u64 = 6;
/// Ticks within which the members are those that run, once nothing goes wrong any more: a lease, and some for each change.
const CONVERGES: u64 = 1200;

/// A value, since which revision, and under whose lease.
#[derive(Clone, Debug)]
struct Value {
    bytes: Vec<u8>,
    revision: i64,
    lease: Option<u64>,
}

/// A change, as watchers are told it.
#[derive(Clone, Debug)]
struct Change {
    at: u64,
    key: String,
    value: Option<Vec<u8>>,
    revision: i64,
}

/// The service.
#[derive(Debug, Default)]
struct Service {
    keys: BTreeMap<String, Value>,
    changes: Vec<Change>,
    revision: i64,
    leases: BTreeMap<u64, u64>,
    next_lease: u64,
    is_away: bool,
    /// How often it has forgotten everything.
    lives: u64,
}

impl Service {
    fn write(&mut self, now: u64, key: &str, value: Option<(&[u8], Option<u64>)>) {
        self.revision += 1;
        let revision = self.revision;
        match value {
            Some((bytes, lease)) => {
                let value = Value { bytes: bytes.to_vec(), revision, lease };
                drop(self.keys.insert(key.to_owned(), value));
            }
            None => drop(self.keys.remove(key)),
        }
        let value = value.map(|(bytes, _)| bytes.to_vec());
        self.changes.push(Change { at: now, key: key.to_owned(), value, revision });
    }

    fn grant(&mut self, now: u64) -> u64 {
        self.next_lease += 1;
        self.leases.insert(self.next_lease, now + LEASE);
        self.next_lease
    }

    fn keep(&mut self, lease: u64, now: u64) -> bool {
        self.leases.get_mut(&lease).map(|until| *until = now + LEASE).is_some()
    }

    /// Ends leases whose time is over.
    fn expire(&mut self, now: u64) {
        let over: Vec<u64> =
            self.leases.iter().filter(|(_, until)| **until <= now).map(|(lease, _)| *lease).collect();
        for lease in over {
            self.leases.remove(&lease);
            let of = self.keys.iter().filter(|(_, value)| value.lease == Some(lease));
            let gone: Vec<String> = of.map(|(key, _)| key.clone()).collect();
            gone.iter().for_each(|key| self.write(now, key, None));
        }
    }

    /// When a key was written; 0 if it is not there.
    fn revision_of(&self, key: &str) -> i64 {
        self.keys.get(key).map_or(0, |value| value.revision)
    }

    fn swap(&mut self, now: u64, value: &[u8], expected: i64) -> Option<i64> {
        (self.revision_of(MEMBERS_KEY) == expected).then(|| {
            self.write(now, MEMBERS_KEY, Some((value, None)));
            self.revision
        })
    }

    /// It is back after it was away: no lease has run out meanwhile.
    fn come_back(&mut self, now: u64) {
        self.is_away = false;
        self.leases.values_mut().for_each(|until| *until = now + LEASE);
    }

    fn forget(&mut self) {
        let (next_lease, lives, is_away) = (self.next_lease, self.lives + 1, self.is_away);
        *self = Self { next_lease, lives, is_away, ..Self::default() };
    }
}

/// A connection to the service.
#[derive(Debug)]
struct Session {
    view: View,
    /// Changes that it was told.
    told: usize,
    life: u64,
    renews_at: u64,
}

/// A node.
#[derive(Debug)]
struct Node {
    me: Member,
    runs: bool,
    lease: u64,
    session: Option<Session>,
    /// What it was given, and what it is of since.
    given: Option<Members>,
    known: Option<Members>,
    /// It does not reach the service.
    is_cut_off: bool,
    /// It has the address of another one, and becomes no member.
    is_twin: bool,
    /// When the service last had it registered.
    registered: u64,
}

impl Node {
    fn new(id: NodeId, address: String) -> Self {
        Self {
            me: Member { id, address, zone: String::new() },
            runs: true,
            lease: 0,
            session: None,
            given: None,
            known: None,
            is_cut_off: false,
            is_twin: false,
            registered: 0,
        }
    }
}

struct Scene {
    rng: Rng,
    now: u64,
    service: Service,
    nodes: Vec<Node>,
    /// Of each epoch that any node knows its members.
    epochs: BTreeMap<u64, Members>,
    mixer: Mixer,
}

fn id(n: u8) -> NodeId {
    StoreId([n + 1; 16])
}

fn address(n: u8, home: u64) -> String {
    format!("host-{n}-{home}:7400")
}

impl Scene {
    fn new(seed: Seed) -> Self {
        let mut rng = seed.child("registered").rng();
        let count = rng.between(3, u64::from(NODES)) as u8;
        let nodes = (0..count).map(|n| Node::new(id(n), address(n, 0))).collect();
        let service = Service { lives: 1, ..Service::default() };
        Self { rng, now: 0, service, nodes, epochs: BTreeMap::new(), mixer: Mixer::new(seed.0) }
    }

    fn wrong<T>(&self, what: impl std::fmt::Display) -> Result<T, String> {
        Err(format!("at {}: {what}", self.now))
    }

    /// Connects, as a node does that was never connected or whose connection broke.
    fn connect(&mut self, at: usize) {
        let (now, node) = (self.now, &mut self.nodes[at]);
        if node.lease == 0 || !self.service.keep(node.lease, now) {
            node.lease = self.service.grant(now);
        }
        let (key, value) = (node_key(node.me.id), registration(&node.me));
        self.service.write(now, &key, Some((value.as_bytes(), Some(node.lease))));
        let mut view = View::default();
        for (key, value) in &self.service.keys {
            view.set(key, Some(&value.bytes), value.revision);
        }
        let (told, life) = (self.service.changes.len(), self.service.lives);
        node.registered = now;
        node.session = Some(Session { view, told, life, renews_at: now + LEASE / 3 });
    }

    /// What a node does with its connection now.
    fn act(&mut self, at: usize) -> Result<(), String> {
        if !self.nodes[at].runs {
            return Ok(());
        }
        let is_reached = !self.service.is_away && !self.nodes[at].is_cut_off;
        let is_over = |session: &Session| session.life != self.service.lives;
        if !is_reached || self.nodes[at].session.as_ref().is_some_and(is_over) {
            self.nodes[at].session = None;
        }
        if !is_reached {
            return Ok(());
        }
        if self.nodes[at].session.is_none() {
            self.connect(at);
        }
        let now = self.now;
        let Node { me, session, lease, given, known, .. } = &mut self.nodes[at];
        let Some(of) = session else { return Ok(()) };
        // It is told of some changes, of those that are old of all.
        let soon = of.told + self.rng.below(6) as usize;
        for (count, change) in self.service.changes.iter().enumerate().skip(of.told) {
            if count >= soon && change.at + BEHIND > now {
                break;
            }
            of.view.set(&change.key, change.value.as_deref(), change.revision);
            of.told = count + 1;
        }
        let has_lapsed = !of.view.is_registered(me.id)
            || now >= of.renews_at && {
                of.renews_at = now + LEASE / 3;
                !self.service.keep(*lease, now)
            };
        if has_lapsed {
            (*session, *lease) = (None, 0);
            return Ok(());
        }
        if let Some(epoch) = of.view.to_say(me.id, known.as_ref()) {
            let value = epoch.to_string();
            self.service.write(now, &taken_key(me.id), Some((value.as_bytes(), None)));
            of.view.set(&taken_key(me.id), Some(value.as_bytes()), 0);
        }
        let mut written = None;
        if let Some(next) = of.view.due(me.id, known.as_ref()) {
            let text = next.to_text();
            if let Some(revision) = self.service.swap(now, text.as_bytes(), of.view.revision()) {
                of.view.set(MEMBERS_KEY, Some(text.as_bytes()), revision);
                written = Some(next);
            }
        }
        while let Some(left) = of.view.to_forget(me.id, known.as_ref()) {
            let members_are_known = self.service.revision_of(MEMBERS_KEY) == of.view.revision();
            if !members_are_known || self.service.revision_of(&node_key(left)) != 0 {
                break;
            }
            self.service.write(now, &taken_key(left), None);
            of.view.set(&taken_key(left), None, 0);
        }
        if let Some(new) = of.view.to_take(me.id, given.as_ref().map(Members::epoch)) {
            *given = Some(new.clone());
        }
        written.map_or(Ok(()), |written| self.look_at(&written))
    }

    /// Members were written: each change is one, and a majority of them was there lately.
    fn look_at(&mut self, written: &Members) -> Result<(), String> {
        let epoch = written.epoch();
        if let Some(known) = self.epochs.get(&epoch).filter(|known| *known != written) {
            return self.wrong(format!("epoch {epoch} has two lists: {known:?} and {written:?}"));
        }
        if let Some(before) = epoch.checked_sub(1).and_then(|before| self.epochs.get(&before)) {
            let list = |of: &Members| of.list().iter().cloned().map(|one| (one.id, one.address)).collect();
            let (one, other): (BTreeMap<_, _>, BTreeMap<_, _>) = (list(before), list(written));
            let all: BTreeSet<_> = one.keys().chain(other.keys()).collect();
            let changed = all.into_iter().filter(|id| one.get(id) != other.get(id)).count();
            if changed > 1 {
                return self.wrong(format!("{changed} members change at once in epoch {epoch}"));
            }
        }
        let lately =
            |node: &&Node| written.get(node.me.id).is_some() && node.registered + BEHIND + 2 >= self.now;
        let there = self.nodes.iter().filter(lately).count();
        if there * 2 <= written.list().len() && epoch > 1 {
            return self
                .wrong(format!("epoch {epoch}: {there} of {} members are there", written.list().len()));
        }
        self.epochs.insert(epoch, written.clone());
        Ok(())
    }

    /// One tick.
    fn tick(&mut self) -> Result<(), String> {
        self.now += 1;
        if !self.service.is_away {
            self.service.expire(self.now);
        }
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        while !order.is_empty() {
            let at = order.swap_remove(self.rng.index(order.len()));
            self.act(at)?;
            // The node takes over what it was given, sooner or later.
            let Node { given, known, .. } = &mut self.nodes[at];
            let epoch = |of: &Option<Members>| of.as_ref().map_or(0, Members::epoch);
            if epoch(given) > epoch(known) && self.rng.below(3) > 0 {
                known.clone_from(given);
            }
        }
        for node in &mut self.nodes {
            if self.service.keys.contains_key(&node_key(node.me.id)) {
                node.registered = self.now;
            }
        }
        // Of no two epochs a majority of the members is of its own at the same time.
        let is_of = |one: &Member, epoch| {
            let of = |node: &&Node| node.me.id == one.id && node.runs;
            let node = self.nodes.iter().find(of);
            node.is_some_and(|node| node.known.as_ref().is_some_and(|known| known.epoch() == epoch))
        };
        let has_majority = |epoch: u64, members: &Members| {
            members.list().iter().filter(|one| is_of(one, epoch)).count() * 2 > members.list().len()
        };
        let whole: Vec<u64> = self
            .epochs
            .iter()
            .filter(|(epoch, of)| has_majority(**epoch, of))
            .map(|(epoch, _)| *epoch)
            .collect();
        if whole.len() > 1 {
            return self.wrong(format!("epochs {whole:?} have each a majority"));
        }
        let newest = self.epochs.keys().next_back().copied().unwrap_or(0);
        [self.now, newest, self.service.revision as u64].into_iter().for_each(|word| self.mixer.word(word));
        Ok(())
    }

    fn kill(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        (node.runs, node.session, node.given, node.known) = (false, None, None, None);
        // A process that starts anew knows of no lease.
        node.lease = 0;
    }

    /// Something goes wrong, or changes.
    fn trouble(&mut self) {
        let at = self.rng.index(self.nodes.len());
        match self.rng.below(11) {
            0..=3 => self.kill(at),
            4..=6 => self.nodes[at].runs = true,
            7 => self.nodes[at].is_cut_off = !self.nodes[at].is_cut_off,
            8 => self.service.is_away = true,
            9 if self.service.is_away => self.service.come_back(self.now),
            10 if !self.nodes[at].runs => {
                // It moves, now and then to where another one is.
                let home = self.rng.below(3);
                let of =
                    if self.rng.below(4) == 0 { self.rng.below(self.nodes.len() as u64) } else { at as u64 };
                self.nodes[at].me.address = address(of as u8, home);
                self.nodes[at].runs = true;
            }
            _ => {}
        }
    }

    /// Everything is as it should be from now on.
    fn heal(&mut self) {
        if self.service.is_away {
            self.service.come_back(self.now);
        }
        for at in 0..self.nodes.len() {
            // Who is where another one was is put right, on a new process, and so is one or the other besides.
            let (n, right) = (at as u8, address(at as u8, 7));
            let is_own = (0..3).any(|home| self.nodes[at].me.address == address(n, home));
            if !is_own || self.rng.coin() {
                self.kill(at);
                self.nodes[at].me.address = right;
            }
            self.nodes[at].is_cut_off = false;
            self.nodes[at].runs = true;
        }
    }

    /// The members are the nodes that run, each with its address, and each node is of their epoch.
    fn converge(&mut self) -> Result<(), String> {
        let begun = self.now;
        loop {
            let all: Vec<&Node> = self.nodes.iter().filter(|node| node.runs && !node.is_twin).collect();
            let is_right = |members: &&Members| {
                let of_it = |node: &Node| {
                    members.get(node.me.id) == Some(&node.me) && node.known.as_ref() == Some(*members)
                };
                members.list().len() == all.len() && all.iter().all(|node| of_it(node))
            };
            let newest = self.epochs.values().next_back();
            if newest.filter(is_right).is_some() {
                return Ok(());
            }
            if self.now > begun + CONVERGES {
                let all: Vec<&Member> = all.iter().map(|node| &node.me).collect();
                let told = format!("{newest:?} after {CONVERGES} ticks without a fault; there are {all:?}");
                return self.wrong(told);
            }
            self.tick()?;
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for _ in 0..self.rng.between(1, 12) {
            for _ in 0..self.rng.between(1, 4) {
                self.trouble();
            }
            for _ in 0..self.rng.between(1, 40) {
                self.tick()?;
            }
        }
        self.heal();
        self.converge()?;
        if self.rng.below(3) == 0 {
            let newest = self.epochs.keys().next_back().copied().unwrap_or(0);
            self.service.forget();
            self.converge_beyond(newest)?;
        }
        let at = self.rng.index(self.nodes.len());
        if self.rng.coin() {
            // One that takes part in nothing, and proposes before all others.
            let other = (at + 1) % self.nodes.len();
            let twin = Node::new(StoreId([0; 16]), self.nodes[other].me.address.clone());
            self.nodes.push(Node { is_twin: true, ..twin });
        }
        // One that is gone is no member before long, and is one again when it is back.
        self.kill(at);
        self.converge()?;
        self.forgets(at)?;
        self.nodes[at].runs = true;
        self.converge()
    }

    /// What the service keeps of a node that left goes before long.
    fn forgets(&mut self, at: usize) -> Result<(), String> {
        let (begun, kept) = (self.now, taken_key(self.nodes[at].me.id));
        while self.service.keys.contains_key(&kept) {
            if self.now > begun + CONVERGES {
                return self.wrong(format!("{kept} is kept of a node that left"));
            }
            self.tick()?;
        }
        Ok(())
    }

    /// All that the service knew is gone: the same members stand there again, in a later epoch.
    fn converge_beyond(&mut self, epoch: u64) -> Result<(), String> {
        let begun = self.now;
        while self.epochs.keys().next_back().is_none_or(|newest| *newest <= epoch) {
            if self.now > begun + CONVERGES {
                return self.wrong(format!("no epoch beyond {epoch} after the service has lost everything"));
            }
            self.tick()?;
        }
        self.converge()
    }
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    let mut scene = Scene::new(seed);
    scene.run()?;
    states.reach(scene.mixer.value());
    Ok(())
}

/// Row R38.
pub(super) fn row() -> Row {
    Row {
        id: "R38",
        what: "members that register themselves, while nodes and the service that holds their names come and go",
        counts: "courses",
        targets: [2_000, 200_000, 2_000_000],
        run: |ask, target| -> Tally { until(ask, target, one) },
    }
}
