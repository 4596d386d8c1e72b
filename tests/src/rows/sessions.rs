//! Sessions of three tenants on two servers, in virtual time, beside a naive model: opened, extended, forked, renewed, handed over, closed or left
//! to their leases, while blocks are put, deleted and end by themselves, others push out whatever may go, and servers lose their power.
//!
//! What runs is the servers' own ([`TenantSessions`] over the store); calls over gRPC and chains of a cluster are not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvarts_cluster::sessions::{Refused, SESSION_LEASE_MAX};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteRequest, KvStore, LeaseTerms, Presence, PutRequest, Target,
};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_server::state::sessions::holding::{Failed, TenantSessions};
use kvarts_server::state::sessions::{LiveSessions, Place, instant};
use kvarts_store::engine::{Limits, Options};

use super::pool::{States, until};
use super::{Row, Tally};
use crate::conformance::{Desk, pages};
use crate::fixture;
use crate::sim::log::Mixer;
use crate::sim::{Crash, Media, Rng, Seed, SimWorld, WorldConfig};
use crate::stage::{SimStage, Stage, ask};

const STEPS: usize = 60;
const TENANTS: u32 = 3;
/// Blocks of a chain, and chains that begin alike.
const BLOCKS: u64 = 8;
const BRANCHES: u64 = 3;
/// Times to live are counted in tenths of a second.
const NEAR: Duration = Duration::from_secs(1);

fn options() -> Options {
    let every = Duration::from_secs(1 << 40);
    let limits = Limits { arena_bytes: 2 << 20, checkpoint_every: every, ..Limits::default() };
    Options {
        shards_per_directory: 1,
        segment_bytes: 64 << 10,
        budget_bytes: 1 << 20,
        limits,
        ..Options::default()
    }
}

/// The columns of sessions: small blocks, of which all fit into the store.
fn columns() -> [Place; 2] {
    let [_, odd, state] = fixture::columns();
    [odd, state]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    Open,
    HandedOver,
    Over,
}

/// What a call held: of blocks `from .. to` those that were here, by column.
#[derive(Clone, Debug)]
struct Granted {
    from: u32,
    to: u32,
    blocks: BTreeSet<(usize, u32)>,
}

/// A session as its client knows it, on one server.
#[derive(Clone, Debug)]
struct Plain {
    keys: Vec<BlockKey>,
    /// How many leading ones are others' as well.
    shared: u32,
    /// The first block that its client says is its own.
    own: u32,
    parent: Option<(u64, u32)>,
    is: Is,
    until: Duration,
    granted: Vec<Granted>,
}

/// Sessions by tenant and number.
type Plains = BTreeMap<(u32, u64), Plain>;

/// What is needed on a server.
#[derive(Default, Debug)]
struct Needed {
    /// Blocks that must be here.
    blocks: BTreeSet<(usize, BlockKey)>,
    living: BTreeSet<(u32, u64)>,
    rests: BTreeSet<(u32, u64)>,
    /// Leases that the living and the rests have.
    grants: BTreeSet<(u32, u64, usize)>,
}

/// Who lives, and what of all others they stand on.
fn needed(plains: &Plains, now: Duration) -> Needed {
    let mut all = Needed::default();
    let lives = |one: &Plain| one.is != Is::Over && now < one.until;
    for (&(tenant, id), one) in plains.iter().filter(|(_, one)| lives(one)) {
        all.living.insert((tenant, id));
        let (mut next, mut below) = (Some((id, one)), u32::MAX);
        while let Some((id, one)) = next {
            if !lives(one) {
                all.rests.insert((tenant, id));
            }
            for (n, granted) in one.granted.iter().enumerate().filter(|(_, one)| one.from < below) {
                all.grants.insert((tenant, id, n));
                let here = granted.blocks.iter().filter(|(_, block)| *block < below);
                all.blocks.extend(here.map(|(column, block)| (*column, one.keys[*block as usize])));
            }
            below = one.parent.map_or(0, |(_, at)| at);
            next = one.parent.and_then(|(above, _)| Some((above, plains.get(&(tenant, above))?)));
        }
    }
    all
}

/// A server.
struct Node {
    stage: SimStage,
    namespace: NamespaceId,
    live: LiveSessions,
    plains: Plains,
    /// When blocks end, of those that do.
    ends: BTreeMap<(usize, BlockKey), Duration>,
}

impl Node {
    fn open(seed: Seed, media: Option<Media>) -> Result<Self, String> {
        let config = WorldConfig::default();
        let world = match media {
            Some(media) => SimWorld::with_media(seed.0, &config, media),
            None => SimWorld::new(seed.0, &config),
        };
        let stage = SimStage::open(&world, &options()).map_err(|error| error.to_string())?;
        let namespace = Desk::new(&stage, "sessions").namespace;
        let (plains, ends) = (Plains::new(), BTreeMap::new());
        Ok(Self { stage, namespace, live: LiveSessions::default(), plains, ends })
    }

    fn now(&self) -> Duration {
        instant(self.stage.now())
    }

    fn of(&self, tenant: u32) -> TenantSessions<'_> {
        TenantSessions::new(&self.live, self.stage.engine(), tenant)
    }

    fn desk(&self) -> Desk<'_> {
        Desk { stage: &self.stage, namespace: self.namespace, chain: 0 }
    }

    fn here(&self, column: usize, keys: &[BlockKey], lease: Option<LeaseTerms>) -> Result<Vec<bool>, Reason> {
        let (group, coordinate) = columns()[column];
        let request = ContainsRequest { namespace: self.desk().namespace, group, coordinate, keys, lease };
        let reply = self.stage.engine().contains(&request).map_err(|error| error.0)?;
        reply.lease.map(|lease| self.stage.engine().unlock(lease));
        Ok(reply.presence.iter().map(|one| *one == Presence::Here).collect())
    }

    /// What a call that holds these blocks holds of them.
    fn granted(&self, (first, keys): (u32, &[BlockKey]), of: &[usize]) -> Result<Vec<Granted>, String> {
        let (from, to) = (first, first + keys.len() as u32);
        let mut all = Vec::new();
        for column in of {
            let here = self.here(*column, keys, None).map_err(|why| why.to_string())?;
            let blocks: BTreeSet<_> =
                (from..to).zip(here).filter(|(_, here)| *here).map(|(block, _)| (*column, block)).collect();
            if !blocks.is_empty() {
                all.push(Granted { from, to, blocks });
            }
        }
        Ok(all)
    }

    /// On which session a fork at this place of another one stands: the nearest of which it takes a block.
    fn stands_on(&self, (tenant, mut id): (u32, u64), at: u32) -> Option<(u64, u32)> {
        while at <= self.plains.get(&(tenant, id))?.own {
            (id, _) = self.plains[&(tenant, id)].parent?;
        }
        Some((id, at))
    }

    /// These blocks are gone, held or not.
    fn gone(&mut self, column: usize, gone: &BTreeSet<BlockKey>) {
        for one in self.plains.values_mut() {
            let keys = &one.keys;
            for granted in &mut one.granted {
                granted.blocks.retain(|(of, block)| *of != column || !gone.contains(&keys[*block as usize]));
            }
        }
    }

    /// What has ended by itself is asked for no more.
    fn end_what_ends(&mut self) {
        let near = self.now() + NEAR;
        for column in 0..columns().len() {
            let ended = self.ends.iter().filter(|((of, _), end)| *of == column && **end <= near);
            let gone: BTreeSet<BlockKey> = ended.map(|((_, key), _)| *key).collect();
            self.gone(column, &gone);
        }
        self.ends.retain(|_, end| *end > near);
    }

    /// Pushes out whatever may go.
    fn press(&self, next: &mut u64) -> Result<(), String> {
        let desk = self.desk();
        for _ in 0..24 {
            *next += 1;
            let outcomes = desk.outcomes(desk.request(pages(), &fixture::keys(99, *next..*next + 1), 1));
            if outcomes.iter().any(|one| *one != BlockOutcome::Stored) {
                return Err(format!("a store that can evict refuses: {outcomes:?}"));
            }
        }
        Ok(())
    }

    /// Compares what there is with what the model says.
    fn check(&mut self) -> Result<(), String> {
        self.end_what_ends();
        let now = self.now();
        self.live.expire(self.stage.engine(), now);
        let needed = needed(&self.plains, now);
        let expected = (needed.living.len(), needed.rests.len(), needed.grants.len());
        let found = self.live.table().count();
        if found != expected {
            return Err(format!("sessions, rests and leases: {found:?}, not {expected:?}"));
        }
        for column in 0..columns().len() {
            let keys: Vec<BlockKey> =
                needed.blocks.iter().filter(|(of, _)| *of == column).map(|(_, key)| *key).collect();
            let here = self.here(column, &keys, None).map_err(|why| why.to_string())?;
            if let Some(at) = here.iter().position(|here| !here) {
                return Err(format!("{} of column {column} is held and not here", keys[at]));
            }
        }
        for (tenant, id) in self.plains.keys() {
            if self.of(*tenant).see(*id).is_some() != needed.living.contains(&(*tenant, *id)) {
                return Err(format!("session {id} of {tenant} is seen, or not, unlike the model's"));
            }
        }
        Ok(())
    }

    /// Whether no tenant holds anything: each can hold as much as one block has, and no more is allowed.
    fn holds_nothing(&self) -> Result<(), String> {
        let key = fixture::keys(98, 0..1);
        let (group, coordinate) = columns()[1];
        let outcomes = self.desk().outcomes(self.desk().request((group, coordinate), &key, 1));
        let bytes = fixture::shape(group, coordinate).block_bytes();
        for tenant in 1..=TENANTS {
            let cap_bytes = bytes.max(4096);
            let terms = LeaseTerms { hold: NEAR, tenant, cap_bytes };
            let held = self.here(1, &key, Some(terms));
            if held.as_deref() != Ok(&[true]) {
                return Err(format!("tenant {tenant} still holds something: {held:?}, {outcomes:?}"));
            }
        }
        Ok(())
    }
}

/// Two servers and their clients.
struct Scene {
    nodes: Vec<Node>,
    rng: Rng,
    seed: Seed,
    next: u64,
    said: Mixer,
}

/// What the model expects of a call of a session that may be over.
fn same<T>(
    what: &str,
    found: &Result<T, Failed>,
    plain: Option<&Plain>,
    now: Duration,
) -> Result<bool, String> {
    let expected = match plain {
        Some(one) if one.is == Is::Open && now < one.until => None,
        Some(one) if one.is == Is::HandedOver && now < one.until => Some(Refused::HandedOver),
        _ => Some(Refused::Unknown),
    };
    let refused = match found {
        Ok(_) => None,
        Err(Failed::Refused(refused)) => Some(*refused),
        Err(other) => return Err(format!("{what}: {other:?}")),
    };
    if refused == expected {
        Ok(refused.is_none())
    } else {
        Err(format!("{what}: {refused:?}, not {expected:?}"))
    }
}

impl Scene {
    fn keys(&mut self, from: u32, count: u32) -> Vec<BlockKey> {
        let branch = self.rng.below(BRANCHES);
        fixture::keys(branch, u64::from(from)..u64::from(from + count))
    }

    fn seconds(&mut self) -> Duration {
        Duration::from_secs(self.rng.between(2, 60))
    }

    fn some_columns(&mut self) -> Vec<usize> {
        match self.rng.below(4) {
            0 => vec![0],
            1 => vec![1],
            _ => vec![0, 1],
        }
    }

    /// A session of a server, over or not.
    fn any(&mut self, node: usize) -> Option<(u32, u64)> {
        let all: Vec<(u32, u64)> = self.nodes[node].plains.keys().copied().collect();
        if all.is_empty() { None } else { Some(all[self.rng.index(all.len())]) }
    }

    fn put(&mut self, node: usize) -> Result<(), String> {
        let (from, count) = (self.rng.below(BLOCKS) as u32, self.rng.between(1, 5) as u32);
        let (keys, of) = (self.keys(from, count), self.some_columns());
        let ttl = if self.rng.below(3) == 0 { Some(self.seconds()) } else { None };
        let node = &mut self.nodes[node];
        node.end_what_ends();
        for column in of {
            let before = node.here(column, &keys, None).map_err(|why| why.to_string())?;
            let desk = node.desk();
            let request = PutRequest { expires_after: ttl, ..desk.request(columns()[column], &keys, 1) };
            let outcomes = desk.outcomes(request);
            let now = node.now();
            for ((key, was_here), outcome) in keys.iter().zip(before).zip(outcomes) {
                if let (Some(ttl), false, true) = (ttl, was_here, outcome == BlockOutcome::Stored) {
                    node.ends.insert((column, *key), now + ttl);
                }
            }
        }
        Ok(())
    }

    fn open(&mut self, node: usize) -> Result<(), String> {
        let (count, until) = (self.rng.between(1, BLOCKS), self.seconds());
        let (keys, of) = (self.keys(0, count as u32), self.some_columns());
        let (tenant, shared) = (self.rng.between(1, u64::from(TENANTS)) as u32, self.rng.below(count) as u32);
        self.next += 1;
        let plain = Plain { keys, shared, own: 0, parent: None, is: Is::Open, until, granted: Vec::new() };
        self.begin(node, (tenant, self.next), plain, &of)
    }

    /// Opens a session there, a new one or one that comes from the other server. `plain.until` says for how long.
    fn begin(&mut self, node: usize, name: (u32, u64), plain: Plain, of: &[usize]) -> Result<(), String> {
        let node = &mut self.nodes[node];
        let (lease, now) = (plain.until, node.now());
        let granted = node.granted((0, &plain.keys), of)?;
        let places: Vec<Place> = of.iter().map(|column| columns()[*column]).collect();
        let namespace = node.desk().namespace;
        let opened = node.of(name.0).open(name.1, namespace, (&plain.keys, plain.shared), &places, lease);
        let held = opened.map_err(|why| format!("open: {why:?}"))?;
        let (all, count) = (&granted, plain.keys.len() as u32);
        let is_held = |block: &u32| {
            of.iter().all(|column| all.iter().any(|one| one.blocks.contains(&(*column, *block))))
        };
        let expected = (0..count).filter(is_held).count() as u32;
        if held.blocks != expected {
            return Err(format!("open: {} blocks are held, not {expected}", held.blocks));
        }
        // What it left here is its own again, as far as it was still needed.
        let needed = needed(&node.plains, now);
        let (parent, mut before) = match node.plains.remove(&name) {
            Some(was) => {
                let kept = was.granted.into_iter().enumerate();
                let is_kept = |n: usize| needed.grants.contains(&(name.0, name.1, n));
                (was.parent, kept.filter(|(n, _)| is_kept(*n)).map(|(_, one)| one).collect())
            }
            None => (None, Vec::new()),
        };
        before.extend(granted);
        let parent = parent.filter(|_| needed.living.contains(&name) || needed.rests.contains(&name));
        node.plains
            .insert(name, Plain { is: Is::Open, until: now + lease, granted: before, parent, ..plain });
        Ok(())
    }

    fn fork(&mut self, node: usize) -> Result<(), String> {
        let Some(name) = self.any(node) else { return Ok(()) };
        let (lease, id) = (self.seconds(), self.next + 1);
        let one = self.nodes[node].plains[&name].clone();
        let at = self.rng.between(u64::from(one.shared) + 1, one.keys.len() as u64) as u32;
        let (now, parent) = (self.nodes[node].now(), self.nodes[node].stands_on(name, at));
        let forked = self.nodes[node].of(name.0).fork(id, name.1, (at, one.keys[at as usize - 1]), lease);
        if same("fork", &forked, Some(&one), now)? {
            self.next = id;
            let (keys, until) = (one.keys[..at as usize].to_vec(), now + lease);
            let fork = Plain { keys, own: at, parent, is: Is::Open, until, granted: Vec::new(), ..one };
            self.nodes[node].plains.insert((name.0, id), fork);
        }
        Ok(())
    }

    fn extend(&mut self, node: usize) -> Result<(), String> {
        let Some(name) = self.any(node) else { return Ok(()) };
        let one = self.nodes[node].plains[&name].clone();
        let (now, has) = (self.nodes[node].now(), one.keys.len() as u32);
        let more = self.rng.below(3) as u32;
        let mut keys = [one.keys.clone(), self.keys(has, more)].concat();
        let first = match self.rng.below(3) {
            0 => one.own,
            1 => self.rng.between(u64::from(one.own), u64::from(has)) as u32,
            _ => has,
        };
        if first as usize == keys.len() {
            keys.extend(self.keys(has, 1));
        }
        let (of, lease) = (self.some_columns(), if self.rng.coin() { Some(self.seconds()) } else { None });
        let places: Vec<Place> = of.iter().map(|column| columns()[*column]).collect();
        let said = &keys[first as usize..];
        let granted = self.nodes[node].granted((first, said), &of)?;
        let extended = self.nodes[node].of(name.0).extend(name.1, (first, said), &places, lease);
        if same(&format!("extend of {one:?} from {first}"), &extended, Some(&one), now)? {
            let known = self.nodes[node].plains.get_mut(&name).ok_or("a session of the model")?;
            let end = keys.len() as u32;
            known.granted.retain(|one| one.from < first || one.to > end);
            known.granted.extend(granted);
            known.keys = keys;
            known.until = lease.map_or(known.until, |lease| now + lease);
        }
        Ok(())
    }

    fn renew(&mut self, node: usize) -> Result<(), String> {
        let Some(name) = self.any(node) else { return Ok(()) };
        let (lease, now) = (self.seconds(), self.nodes[node].now());
        let renewed = self.nodes[node].of(name.0).renew(name.1, lease);
        if same("renew", &renewed, self.nodes[node].plains.get(&name), now)? {
            self.nodes[node].plains.get_mut(&name).ok_or("a session of the model")?.until = now + lease;
        }
        Ok(())
    }

    fn close(&mut self, node: usize, name: (u32, u64)) -> Result<(), String> {
        let now = self.nodes[node].now();
        let closed = self.nodes[node].of(name.0).close(name.1);
        let one = self.nodes[node].plains.get_mut(&name).ok_or("a session of the model")?;
        let lived = one.is != Is::Over && now < one.until;
        one.is = Is::Over;
        if closed == lived { Ok(()) } else { Err(format!("close: {closed}, not {lived}")) }
    }

    /// From one server to the other. Its client may die on the way.
    fn hand_over(&mut self, node: usize) -> Result<(), String> {
        let Some(name) = self.any(node) else { return Ok(()) };
        let (now, other) = (self.nodes[node].now(), 1 - node);
        let given = self.nodes[node].of(name.0).hand_over(name.1);
        if !same("hand over", &given, self.nodes[node].plains.get(&name), now)? {
            return Ok(());
        }
        let one = self.nodes[node].plains.get_mut(&name).ok_or("a session of the model")?;
        one.is = Is::HandedOver;
        let (keys, shared, until) = (one.keys.clone(), one.shared, Duration::from_secs(30));
        if self.rng.below(4) == 0 {
            return Ok(());
        }
        let of = self.some_columns();
        let plain = Plain { keys, shared, own: 0, parent: None, is: Is::Open, until, granted: Vec::new() };
        self.begin(other, name, plain, &of)?;
        if self.rng.below(4) == 0 { Ok(()) } else { self.close(node, name) }
    }

    /// What another tenant asks of a session.
    fn strange(&mut self, node: usize) -> Result<(), String> {
        let Some((tenant, id)) = self.any(node) else { return Ok(()) };
        let other = tenant % TENANTS + 1;
        if self.nodes[node].plains.contains_key(&(other, id)) {
            return Ok(());
        }
        let (keys, now) = (self.keys(0, 1), self.nodes[node].now());
        let of = self.nodes[node].of(other);
        same("another tenant's renewal", &of.renew(id, NEAR), None, now)?;
        same("another tenant's fork", &of.fork(1 << 40, id, (1, keys[0]), NEAR), None, now)?;
        same("another tenant's extension", &of.extend(id, (1, &keys), &columns(), None), None, now)?;
        same("another tenant's hand-over", &of.hand_over(id), None, now)?;
        if of.close(id) || of.see(id).is_some() {
            Err("another tenant ends or sees it".to_owned())
        } else {
            Ok(())
        }
    }

    fn delete(&mut self, node: usize) -> Result<(), String> {
        let (from, count) = (self.rng.below(BLOCKS) as u32, self.rng.between(1, 4) as u32);
        let (keys, of) = (self.keys(from, count), self.some_columns());
        let node = &mut self.nodes[node];
        for column in of {
            let target = Target::Keys { column: Some(columns()[column]), keys: keys.clone() };
            let request = DeleteRequest { namespace: node.desk().namespace, target, deadline: None };
            let ticket = node.stage.engine().delete(request);
            ask(&node.stage, ticket).map_err(|error| error.to_string())?;
            node.gone(column, &keys.iter().copied().collect());
            node.ends.retain(|(of, key), _| *of != column || !keys.contains(key));
        }
        Ok(())
    }

    /// The server starts again: no sessions exist, and nothing is held for them.
    fn lose_power(&mut self, at: usize) -> Result<(), String> {
        let seed = self.seed.child("again").nth(self.next);
        self.next += 1;
        let node = self.nodes.remove(at);
        let ends = node.ends.keys().copied().collect::<Vec<_>>();
        let media = node.stage.cut_power().image(Crash::LoseAll);
        let mut node = Node::open(seed, Some(media))?;
        // How much of a time is over is known to a second or so: those go.
        for (column, key) in ends {
            let target = Target::Keys { column: Some(columns()[column]), keys: vec![key] };
            let request = DeleteRequest { namespace: node.desk().namespace, target, deadline: None };
            let ticket = node.stage.engine().delete(request);
            ask(&node.stage, ticket).map_err(|error| error.to_string())?;
        }
        node.holds_nothing()?;
        node.plains.clear();
        self.nodes.insert(at, node);
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        let node = self.rng.index(self.nodes.len());
        let what = self.rng.below(26);
        self.said.word(what);
        match what {
            0..5 => self.put(node)?,
            5..8 => self.open(node)?,
            8..11 => self.fork(node)?,
            11..14 => self.extend(node)?,
            14 => self.renew(node)?,
            15 => {
                if let Some(name) = self.any(node) {
                    self.close(node, name)?;
                }
            }
            16 | 17 => self.hand_over(node)?,
            18 => self.strange(node)?,
            19 => self.delete(node)?,
            20 if self.rng.below(3) == 0 => self.lose_power(node)?,
            21..24 => self.nodes[node].press(&mut self.next)?,
            _ => {
                let by = Duration::from_millis(self.rng.between(100, 30_000));
                for node in &self.nodes {
                    node.stage.advance(by);
                }
            }
        }
        self.nodes.iter_mut().try_for_each(Node::check)
    }

    fn run(&mut self) -> Result<(), String> {
        for step in 0..STEPS {
            self.step().map_err(|why| format!("step {step}: {why}"))?;
        }
        for node in &mut self.nodes {
            node.press(&mut self.next)?;
            node.check()?;
            // All clients die.
            node.stage.advance(SESSION_LEASE_MAX);
            node.check()?;
            if node.live.table().count() != (0, 0, 0) {
                return Err(format!("after all leases there are {:?}", node.live.table().count()));
            }
            node.holds_nothing()?;
            node.stage.look()?;
        }
        Ok(())
    }
}

fn one(seed: Seed, states: &States) -> Result<(), String> {
    let nodes = (0..2).map(|n| Node::open(seed.nth(n), None)).collect::<Result<_, _>>()?;
    let mut scene = Scene { nodes, rng: seed.child("sessions").rng(), seed, next: 0, said: Mixer::new(0) };
    scene.run()?;
    for node in &scene.nodes {
        scene.said.word(node.stage.world().disk().log().digest() as u64);
    }
    states.reach(scene.said.value());
    Ok(())
}

/// Row R45.
pub(super) fn row() -> Row {
    Row {
        id: "R45",
        what: "sessions on two servers, with deletes, times to live, power cuts, forks and hand-overs, beside a naive model",
        counts: "courses",
        targets: [60, 20_000, 200_000],
        run: |ask, target| -> Tally { until(ask, target, one) },
    }
}
