//! Three tenants, three nodes of one cluster, one bucket behind all of them, and what an engine's connector does, in one seeded
//! run: blocks are put, read and deleted, and end; nodes stop hard and come back; tenants go, come back as others, and change
//! their tokens. After each step every tenant reads everything on every node, over gRPC, over the local path, or out of a pool that
//! keeps what was staged: what was put for it and lives, or a miss.
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::serve_tenants::{COLUMN, find, read, register};
use crate::served::Served;
use kvarts_client::Client;
use kvarts_client::pool::{Column, Pool, Stage, StageRequest};
use kvarts_contract::api::{
    BlockOutcome, DeleteOutcome, DeleteRequest, KvStore, Parent, Placed, PutRequest, Target,
};
use kvarts_contract::batch::{BatchKind, Block, Completion, Lane, Memory, Pages, PagesOptions, Terms};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::{BlockKey, NamespaceId};
use kvarts_server::state::auth::TokenHash;
use kvarts_tests::depth::seeds;
use kvarts_tests::fixture::{self, Style};
use kvarts_tests::sim::rng::{Rng, Seed};
use kvarts_tests::stage::Scratch;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Worlds so far.
static WORLDS: AtomicU16 = AtomicU16::new(0);
const NODES: usize = 3;
const NAMES: [&str; 3] = ["red", "green", "blue"];
/// Keys, the same ones for each tenant, in chains of this length.
const KEYS: usize = 16;
const RUN: usize = 4;
const STEPS: u64 = 16;
/// How much longer than it should a block may be found: ends are counted in steps of 100 ms, rounded up by each store on its way.
const SLACK: Duration = Duration::from_millis(800);
const TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes of a pool: too few for all blocks.
const POOL_BYTES: usize = 288 << 10;

/// The chunks of a block.
type Chunks = Vec<Vec<u8>>;

/// A production that may be found.
struct Made {
    number: u64,
    /// When it ends at the latest, by this process's clock.
    ends: Option<Instant>,
    /// Its put was given up: it may be stored at any time, also after a delete.
    is_cut: bool,
}

/// What is known of a key of a tenant.
#[derive(Default)]
struct Known {
    made: Vec<Made>,
    /// Nodes that said that they have it, and that have no reason to have lost it.
    kept: BTreeSet<usize>,
    /// Those of them that stored it behind the key before it.
    linked: BTreeSet<usize>,
}

struct Tenant {
    name: &'static str,
    /// Who has this name now: another one has another salt.
    generation: u32,
    token: u32,
    is_here: bool,
    namespace: Option<NamespaceId>,
    /// Namespaces of those who had the name before.
    before: Vec<NamespaceId>,
    keys: Vec<Known>,
}

impl Tenant {
    fn token(&self) -> String {
        format!("kvarts_{}_{}_{}", self.name, self.generation, self.token)
    }

    fn entry(&self) -> String {
        let (name, hash) = (self.name, TokenHash::of(&self.token()));
        format!(
            "[[tenants]]\nname = '{name}'\nsalt = '{name}-{}'\n[[tokens]]\ntenant = '{name}'\nhash = '{hash}'\n\
             rights = ['read', 'write', 'pin', 'delete', 'admin']\n",
            self.generation
        )
    }
}

fn nothing_known() -> Vec<Known> {
    (0..KEYS).map(|_| Known::default()).collect()
}

/// What was done so far: told if the test fails.
struct Story {
    seed: u64,
    steps: Vec<String>,
}

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}:\n  {}", self.seed, self.steps.join("\n  "));
        }
    }
}

struct World {
    story: Story,
    /// By tenant, node, and whether it is one over the local path.
    clients: BTreeMap<(usize, usize, bool), (Client, NamespaceId)>,
    /// Of each client over the local path, by tenant and node.
    pools: BTreeMap<(usize, usize), Pool>,
    nodes: Vec<Served>,
    addresses: Vec<String>,
    /// What stands in the nodes' configuration besides tenants.
    base: String,
    tenants: Vec<Tenant>,
    keys: Vec<BlockKey>,
    /// All productions, by number.
    made: Vec<String>,
    hits: u64,
    restored: u64,
    /// Blocks that a pool had.
    pooled: u64,
    _scratch: [Scratch; 2],
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn content(key: &BlockKey, number: u64) -> Chunks {
    let (group, coordinate) = COLUMN;
    fixture::content(key, group, coordinate, number, &fixture::shape(group, coordinate))
}

/// Memory for blocks.
fn places(count: usize) -> Placed {
    fixture::place(&fixture::shape(COLUMN.0, COLUMN.1), count as u32, Style::Blocks, 0).unwrap()
}

/// Does what a connector does: a batch over a client, whose answer an eventfd tells of.
fn batch(
    (client, namespace): &(Client, NamespaceId),
    (kind, keys): (BatchKind, &[BlockKey]),
    memory: &Memory<'_>,
    (expires_after, is_cut): (Option<Duration>, bool),
) -> Completion {
    let (group, coordinate) = COLUMN;
    let options = PagesOptions { group, coordinate, expires_after, ..PagesOptions::new(*namespace) };
    let pages = Pages::new(client.store(), options).unwrap();
    let blocks: Vec<Block> = keys.iter().map(|key| Block { group, coordinate, key: *key }).collect();
    let terms = Terms { parent: Parent::Root, ..Terms::default() };
    let id = pages.submit(kind, &blocks, memory, &terms).unwrap();
    if is_cut {
        pages.cancel(id);
    }
    let (mut told, wait) = (Vec::new(), Timespec { tv_sec: 60, tv_nsec: 0 });
    while pages.drain(&mut told) == 0 {
        let bell = pages.event_fd(Lane::Load);
        assert!(poll(&mut [PollFd::new(&bell, PollFlags::IN)], Some(&wait)).unwrap() > 0, "no answer");
    }
    told.remove(0)
}

/// Reads these blocks.
fn look(at: &(Client, NamespaceId), keys: &[BlockKey], is_local: bool) -> Vec<Result<Chunks, Reason>> {
    if is_local {
        let (into, shape) = (places(keys.len()), fixture::shape(COLUMN.0, COLUMN.1));
        let told = batch(at, (BatchKind::Get, keys), &Memory::Placed(&into), (None, false));
        let results = (0..).zip(told.results);
        return results.map(|(n, one)| one.map(|()| fixture::read_block(&into, n, &shape))).collect();
    }
    let (end, blocks) = read(&at.0, at.1, keys).unwrap();
    let mut found: Vec<Result<Chunks, Reason>> = blocks.into_iter().map(Ok).collect();
    for (n, reason) in end.failures {
        found[n as usize] = Err(reason);
    }
    found
}

/// What a put says of a block: whether what it brought may be found, whether the node has one, and whether that is the one it
/// brought.
type Took = (bool, bool, bool);

fn store(
    at: &(Client, NamespaceId),
    (keys, from): (&[BlockKey], Placed),
    (expires_after, is_cut, is_local): (Option<Duration>, bool, bool),
) -> Vec<Took> {
    if is_local {
        let told = batch(at, (BatchKind::Put, keys), &Memory::Placed(&from), (expires_after, is_cut));
        let stored = told.results.iter().filter(|one| one.is_ok()).count();
        let is_all = told.written as usize == stored;
        let took = told.results.iter().map(|one| (one.is_ok() && told.written > 0, one.is_ok(), is_all));
        return took.collect();
    }
    let (group, coordinate) = COLUMN;
    let put = PutRequest::new(at.1, group, coordinate, keys.to_vec(), from);
    let put = PutRequest { parent: Parent::Root, expires_after, ..put };
    let ticket = at.0.put(put);
    if is_cut {
        return vec![(true, false, false); keys.len()];
    }
    let outcomes = block_on(ticket).unwrap().unwrap().outcomes;
    let took = outcomes.iter().map(|outcome| match outcome {
        BlockOutcome::Stored => (true, true, true),
        BlockOutcome::AlreadyThere => (false, true, false),
        // A put that was cut has not ended yet.
        _ => (false, false, false),
    });
    took.collect()
}

/// Stages these blocks, each for itself and a few at a time, and looks at them.
fn staged(pool: &Pool, namespace: NamespaceId, keys: &[BlockKey]) -> Vec<Result<Chunks, Reason>> {
    let (group, coordinate) = COLUMN;
    let shape = Arc::new(fixture::shape(group, coordinate));
    let stage = |key: &BlockKey| {
        let request = StageRequest {
            columns: vec![(Column { namespace, group, coordinate }, Arc::clone(&shape))],
            keys: vec![*key],
            first_block: 0,
            silence: TIMEOUT,
            class: Class::Foreground,
        };
        pool.stage(request).unwrap()
    };
    let looked = |stage: Stage| {
        if stage.wait(TIMEOUT * 2).staged == 0 {
            return Err(stage.why().expect("a reason"));
        }
        let [stretch] = stage.stretches(0)[..] else { panic!("one block is one stretch") };
        let chunk = |part| {
            let (at, bytes) = stretch.part(&shape, part)?;
            Some(SharedBuf::new(pool.region(), at as usize, bytes as usize).unwrap().to_vec())
        };
        Ok((0..).map_while(chunk).collect())
    };
    let some = keys.chunks(4).flat_map(|keys| {
        let stages: Vec<Stage> = keys.iter().map(stage).collect();
        stages.into_iter().map(looked).collect::<Vec<_>>()
    });
    some.collect()
}

impl World {
    fn start(seed: u64) -> Self {
        Self::start_with(seed, 1)
    }

    /// The same; manifests are read again after this many seconds.
    fn start_with(seed: u64, refresh: u64) -> Self {
        let [bucket, members] = ["bucket", "members"].map(|what| Scratch::new(&format!("edges-{what}")));
        let nodes: Vec<Served> = (0..NODES).map(|n| Served::start(&format!("edges-{n}"), "")).collect();
        // Addresses of this process and this world alone.
        let [.., high, low] = std::process::id().to_be_bytes();
        let port = 7461 + WORLDS.fetch_add(1, Ordering::Relaxed);
        let address = |n: usize| format!("127.{}.{high}.{low}:{port}", 221 + n);
        let addresses: Vec<String> = (0..NODES).map(address).collect();
        let member = |(node, address): (&Served, &String)| {
            let id = node.daemon().state().engine.stats().store;
            format!("[[node]]\nid = \"{id}\"\naddress = \"{address}\"\n")
        };
        let list: String = nodes.iter().zip(&addresses).map(member).collect();
        let path = members.below("members.toml");
        std::fs::write(&path, format!("epoch = 1\n{list}")).unwrap();
        let secret = members.below("secret");
        std::fs::write(&secret, [7; 32]).unwrap();
        std::fs::create_dir_all(bucket.path()).unwrap();
        let (path, secret, folder) = (path.display(), secret.display(), bucket.path().display());
        let base = format!(
            "[cluster]\nmembers = '{path}'\nsecret = '{secret}'\n[cold]\nbucket = 'file://{folder}'\nuses = 0\nage = 0\nrefresh = {refresh}\n\
             memory = '128 MiB'\n"
        );
        let tenant = |name| Tenant {
            name,
            generation: 0,
            token: 0,
            is_here: true,
            namespace: None,
            before: Vec::new(),
            keys: nothing_known(),
        };
        let mut world = Self {
            story: Story { seed, steps: Vec::new() },
            clients: BTreeMap::new(),
            pools: BTreeMap::new(),
            nodes,
            addresses,
            base,
            tenants: NAMES.into_iter().map(tenant).collect(),
            keys: fixture::keys(5, 0..KEYS as u64),
            made: Vec::new(),
            hits: 0,
            restored: 0,
            pooled: 0,
            _scratch: [bucket, members],
        };
        let file = world.file();
        world.nodes.iter_mut().for_each(|node| node.restart_with(&file));
        world.connect();
        world.until_reachable();
        world
    }

    fn say(&mut self, what: String) {
        self.story.steps.push(what);
    }

    fn file(&self) -> String {
        let here = self.tenants.iter().filter(|tenant| tenant.is_here);
        self.base.clone() + &here.map(Tenant::entry).collect::<String>()
    }

    fn up(&self) -> Vec<usize> {
        (0..NODES).filter(|node| self.nodes[*node].daemon.is_some()).collect()
    }

    fn here(&self) -> Vec<usize> {
        (0..self.tenants.len()).filter(|who| self.tenants[*who].is_here).collect()
    }

    /// A tenant that is here, a node that is up, and a path.
    fn place(&self, rng: &mut Rng) -> (usize, usize, bool) {
        let (here, up) = (self.here(), self.up());
        (here[rng.index(here.len())], up[rng.index(up.len())], rng.coin())
    }

    /// Clients of all that are here, on all nodes that are up.
    fn connect(&mut self) {
        for who in self.here() {
            for node in self.up() {
                for is_local in [false, true] {
                    if self.clients.contains_key(&(who, node, is_local)) {
                        continue;
                    }
                    let (served, token) = (&self.nodes[node], self.tenants[who].token());
                    let client = match is_local {
                        true => served.local(Some(&token)),
                        false => served.client(Some(&token)),
                    };
                    let namespace = register(&client);
                    let tenant = &mut self.tenants[who];
                    let own = *tenant.namespace.get_or_insert(namespace);
                    assert_eq!(own, namespace, "{} has another name on node {node}", tenant.name);
                    assert!(!tenant.before.contains(&own), "{} has what another one had", tenant.name);
                    if is_local {
                        let (memory, _) = client.shared_pool(POOL_BYTES).unwrap();
                        self.pools.insert((who, node), Pool::new(client.store(), client.clock(), &memory));
                    }
                    self.clients.insert((who, node, is_local), (client, namespace));
                }
            }
        }
    }

    fn until_reachable(&self) {
        let (who, up) = (self.here()[0], self.up());
        let is_up = |address: &String| up.iter().any(|node| self.addresses[*node] == *address);
        let reaches_all = |node: &usize| {
            let status = self.clients[&(who, *node, false)].0.cluster_status().unwrap();
            let reached = status.nodes.iter().filter(|one| one.is_reachable && is_up(&one.address));
            reached.count() == up.len()
        };
        until("all nodes reach each other", || up.iter().all(reaches_all));
    }

    /// Waits until the nodes that are up know the same deletes: one that was late was named in the answer.
    fn until_told(&self) {
        let known = |node: &usize| {
            let state = self.nodes[*node].daemon().state();
            state.decided.cluster.as_ref().unwrap().deletes_known()
        };
        let up = self.up();
        until("all nodes are told of a delete", || up.iter().all(|node| known(node) == known(&up[0])));
    }

    fn put(&mut self, rng: &mut Rng) {
        let (who, node, is_local) = self.place(rng);
        let chain = rng.index(KEYS / RUN) * RUN;
        let blocks = chain..chain + 1 + rng.index(RUN);
        let (is_cut, is_short, millis) = (rng.below(8) == 0, rng.below(4) == 0, rng.between(200, 700));
        let ttl = (is_short && !is_cut).then(|| Duration::from_millis(millis));
        let number = self.made.len() as u64;
        let (name, generation) = (NAMES[who], self.tenants[who].generation);
        let said = format!(
            "{name} {generation} puts {blocks:?} on node {node}: production {number}, ttl {ttl:?}, cut {is_cut}, \
             local {is_local}"
        );
        self.made.push(said.clone());
        self.say(said);
        let keys = &self.keys[blocks.clone()];
        let from = places(keys.len());
        (0..).zip(keys).for_each(|(at, key)| fixture::write_block(&from, at, &content(key, number)));
        let took = store(&self.clients[&(who, node, is_local)], (keys, from), (ttl, is_cut, is_local));
        // Later than the node counts.
        let ends = ttl.map(|ttl| Instant::now() + ttl);
        for (at, (may_be, is_there, is_new)) in blocks.clone().zip(took) {
            let known = &mut self.tenants[who].keys[at];
            let is_lasting = !is_cut && ends.is_none() && known.made.iter().all(|made| made.ends.is_none());
            if may_be || is_cut {
                known.made.push(Made { number, ends, is_cut });
            }
            if is_there && is_lasting {
                known.kept.insert(node);
                if is_new && at > blocks.start {
                    known.linked.insert(node);
                }
            }
        }
    }

    fn delete(&mut self, rng: &mut Rng) {
        let (who, node, is_local) = self.place(rng);
        let root = rng.index(KEYS);
        let chain = root..root / RUN * RUN + RUN;
        let (target, covered) = match rng.below(6) {
            0 => (Target::Namespace, 0..KEYS),
            1 | 2 => (Target::Prefix(self.keys[root]), chain),
            _ => (Target::Keys { column: None, keys: self.keys[chain.clone()].to_vec() }, chain),
        };
        let (of_all, is_keys) = (rng.below(4) == 0, matches!(target, Target::Keys { .. }));
        let is_prefix = matches!(target, Target::Prefix(_));
        self.say(format!(
            "{} deletes {covered:?} on node {node}, prefix {is_prefix}, of all {of_all}, local {is_local}",
            NAMES[who]
        ));
        let (at, is_any_down) = (&self.clients[&(who, node, is_local)], self.up().len() < NODES);
        if is_local && is_keys {
            // As a connector deletes, which is not told who was away.
            let keys = (BatchKind::Delete, &self.keys[covered.clone()]);
            let told = batch(at, keys, &Memory::Nowhere, (None, false));
            let results = covered.clone().zip(told.results);
            let gone = results.filter(|(_, one)| matches!(one, Ok(()) | Err(Reason::NotHere(_))));
            let gone: BTreeSet<usize> = gone.map(|(key, _)| key).collect();
            self.forget(who, covered, &gone);
            self.until_told();
            return;
        }
        let request = DeleteRequest { namespace: at.1, target, deadline: None };
        let (reply, away) = match block_on(at.0.delete_everywhere(request, of_all)).unwrap() {
            Ok(answer) => answer,
            Err(error) => {
                assert!(of_all, "{error}");
                return self.forget(who, covered, &BTreeSet::new());
            }
        };
        if reply.outcomes.iter().any(|one| matches!(one, DeleteOutcome::Refused(_))) {
            assert!(of_all && !away.is_empty(), "{reply:?}");
            return self.forget(who, covered, &BTreeSet::new());
        }
        assert!(!(of_all && is_any_down), "it is acknowledged, and {away:?} were away");
        let is_told = |node: &usize| away.iter().all(|one| one.address != self.addresses[*node]);
        let told: Vec<usize> = (0..NODES).filter(is_told).collect();
        let up = self.up();
        assert!(told.iter().all(|node| up.contains(node)), "a node that is down is not named: {away:?}");
        let is_gone = |key: &usize| !is_prefix || self.descends(who, root..*key, &told);
        let gone: BTreeSet<usize> = covered.clone().filter(is_gone).collect();
        self.forget(who, covered, &gone);
        if told != up {
            self.until_told();
        }
    }

    /// Whether one of these nodes has all blocks of the chain behind the first up to this one, and knows it.
    fn descends(&self, who: usize, chain: Range<usize>, nodes: &[usize]) -> bool {
        let keys = &self.tenants[who].keys;
        let knows = |node: &usize| (chain.start + 1..=chain.end).all(|key| keys[key].linked.contains(node));
        chain.is_empty() || nodes.iter().any(knows)
    }

    /// These blocks may have gone, and of them those for good.
    fn forget(&mut self, who: usize, covered: Range<usize>, gone: &BTreeSet<usize>) {
        for at in covered {
            let known = &mut self.tenants[who].keys[at];
            known.kept.clear();
            known.linked.clear();
            if gone.contains(&at) {
                known.made.retain(|made| made.is_cut);
            }
        }
    }

    fn stop(&mut self, node: usize, is_hard: bool) {
        self.say(format!("node {node} stops, hard {is_hard}"));
        self.clients.retain(|(_, at, _), _| *at != node);
        self.pools.retain(|(_, at), _| *at != node);
        if is_hard { self.nodes[node].halt() } else { self.nodes[node].stop() }
    }

    /// A node comes back; it has heard of all deletes when the others reach it and it them.
    fn begin(&mut self, node: usize) {
        self.say(format!("node {node} starts"));
        let file = self.file();
        self.nodes[node].begin_with(&file);
        self.connect();
        self.until_reachable();
    }

    /// All that a node has goes into the bucket, and the node goes away: then the others read from the bucket what it alone had.
    fn away(&mut self, rng: &mut Rng) {
        // The one that has most of what no other one is known to have.
        let of = |node: &usize| {
            let known = self.tenants.iter().flat_map(|tenant| &tenant.keys);
            known.filter(|known| known.kept.len() == 1 && known.kept.contains(node)).count()
        };
        let node = self.up().into_iter().max_by_key(of).unwrap();
        self.say(format!("node {node} pushes what it has"));
        for who in self.here() {
            let (client, namespace) = &self.clients[&(who, node, false)];
            let pushed = client.cold_push(Some(*namespace)).unwrap();
            if pushed.blocks + pushed.already_there == 0 {
                continue;
            }
            for other in self.up() {
                self.nodes[other].until("the manifest is known", |daemon| {
                    let known = daemon.state().decided.cold.as_ref().unwrap().known(*namespace);
                    known.is_some_and(|known| !known.manifest.packs.is_empty())
                });
            }
        }
        let is_hard = rng.coin();
        self.stop(node, is_hard);
    }

    fn back(&mut self) {
        let up = self.up();
        for node in &up {
            let counted = self.nodes[*node].daemon().state().decided.cold.as_ref().unwrap().counted();
            let restored = counted.counts.iter().find(|(name, ..)| *name == "restored_blocks");
            self.restored += restored.unwrap().2;
        }
        (0..NODES).filter(|node| !up.contains(node)).for_each(|node| self.begin(node));
    }

    /// Nodes read their configuration again; who had a client of this tenant until now is let in no more.
    fn renew(&mut self, who: usize, what: &str) {
        self.say(format!("{} {what}", NAMES[who]));
        let old: Vec<Client> = self.clients_of(who);
        self.clients.retain(|(of, ..), _| *of != who);
        self.pools.retain(|(of, _), _| *of != who);
        let file = self.file();
        for node in self.up() {
            self.nodes[node].reload(&file).unwrap();
        }
        for client in old {
            let error = client.models().unwrap_err();
            assert!(matches!(error.0, Reason::Denied(_)), "{}: {error}", NAMES[who]);
        }
        self.connect();
    }

    fn clients_of(&self, who: usize) -> Vec<Client> {
        let own = self.clients.iter().filter(|((of, ..), _)| *of == who);
        own.map(|(_, (client, _))| client.clone()).collect()
    }

    fn come_or_go(&mut self, rng: &mut Rng) {
        let who = rng.index(NAMES.len());
        let Some(gone) = self.tenants.iter().position(|tenant| !tenant.is_here) else {
            self.tenants[who].is_here = false;
            return self.renew(who, "goes");
        };
        let tenant = &mut self.tenants[gone];
        tenant.before.extend(tenant.namespace.take());
        (tenant.generation, tenant.token, tenant.is_here) = (tenant.generation + 1, 0, true);
        tenant.keys = nothing_known();
        self.renew(gone, "comes as another one");
    }

    /// A tenant asks for what is another one's by its name.
    fn pry(&mut self, rng: &mut Rng) {
        let ((who, node, is_local), here) = (self.place(rng), self.here());
        let other = *here.iter().find(|other| **other != who).unwrap();
        self.say(format!("{} asks node {node} for what {} has", NAMES[who], NAMES[other]));
        let (client, _) = &self.clients[&(who, node, is_local)];
        let foreign = self.tenants[other].namespace.unwrap();
        let error = find(client, foreign, &self.keys, None).unwrap_err();
        assert_eq!(error.0, Reason::UnknownNamespace(foreign));
        let request = DeleteRequest { namespace: foreign, target: Target::Namespace, deadline: None };
        let error = block_on(client.delete_everywhere(request, false)).unwrap().unwrap_err();
        assert_eq!(error.0, Reason::UnknownNamespace(foreign));
    }

    fn step(&mut self, step: u64, rng: &mut Rng) {
        match (step % 8, rng.below(20)) {
            (3, _) => self.put(rng),
            (4, _) => self.away(rng),
            // The node that is away hears of it when it comes back; until then its blocks are in the bucket.
            (5, _) => self.delete(rng),
            (6, _) => self.back(),
            (_, 0..=8) => self.put(rng),
            (_, 9..=13) => self.delete(rng),
            (_, 14) => {
                let node = self.place(rng).1;
                let is_hard = rng.coin();
                self.stop(node, is_hard);
                self.begin(node);
            }
            (_, 15) => {
                let who = self.place(rng).0;
                self.tenants[who].token += 1;
                self.renew(who, "has another token");
            }
            (_, 16 | 17) => self.come_or_go(rng),
            _ => self.pry(rng),
        }
    }

    /// Every tenant reads everything on every node, all at once: where a node is away each read may wait for it.
    fn check(&mut self, is_local: bool) {
        let asked = Instant::now();
        let of_path = self.clients.iter().filter(|((.., of_path), _)| *of_path == is_local);
        let keys = &self.keys;
        let found: Vec<_> = std::thread::scope(|scope| {
            let read = of_path
                .map(|((who, node, _), at)| ((*who, *node), scope.spawn(move || look(at, keys, is_local))));
            let reads: Vec<_> = read.collect();
            reads.into_iter().map(|(place, one)| (place, one.join().expect("a read that ends"))).collect()
        });
        for (place, found) in found {
            self.hits += self.judge(place, asked, &found);
        }
    }

    /// The same out of the pools of all tenants on all nodes, of which each has room for a part.
    fn check_pools(&mut self) {
        let keys = &self.keys;
        let places: Vec<_> = self.pools.iter().collect();
        let found: Vec<_> = std::thread::scope(|scope| {
            let stage = places.into_iter().map(|(place, pool)| {
                let namespace = self.clients[&(place.0, place.1, true)].1;
                (*place, Instant::now(), scope.spawn(move || staged(pool, namespace, keys)))
            });
            let stages: Vec<_> = stage.collect();
            let ends = |(place, asked, one): (_, _, std::thread::ScopedJoinHandle<'_, Vec<_>>)| {
                (place, asked, one.join().expect("stages that end"))
            };
            stages.into_iter().map(ends).collect()
        });
        for (place, asked, found) in found {
            self.hits += self.judge(place, asked, &found);
        }
        self.pooled += self.pools.values().map(|pool| pool.counts().hits).max().unwrap_or(0);
    }

    /// Gives how many blocks were there.
    fn judge(&self, (who, node): (usize, usize), asked: Instant, found: &[Result<Chunks, Reason>]) -> u64 {
        let mut hits = 0;
        for (at, (found, known)) in found.iter().zip(&self.tenants[who].keys).enumerate() {
            let place = format!("block {at} of {} on node {node}", NAMES[who]);
            match found {
                Ok(chunks) => {
                    let lives = |made: &&Made| made.ends.is_none_or(|ends| asked < ends + SLACK);
                    let is_it = |made: &Made| content(&self.keys[at], made.number) == *chunks;
                    let is_good = known.made.iter().filter(lives).any(is_it);
                    assert!(is_good, "{place} is {}", self.origin(at, chunks));
                    hits += 1;
                }
                Err(reason) => {
                    assert!(!known.kept.contains(&node), "{place} was kept there: {reason}");
                    let is_miss = matches!(reason.kind(), Kind::Miss | Kind::Retry | Kind::Deadline);
                    assert!(is_miss, "{place}: {reason}");
                }
            }
        }
        hits
    }

    /// What was put of which these are the bytes.
    fn origin(&self, at: usize, chunks: &[Vec<u8>]) -> String {
        let numbered = (0..).zip(&self.made);
        let mut numbered = numbered.filter(|(number, _)| content(&self.keys[at], *number) == *chunks);
        numbered.next().map_or("of no production".to_owned(), |(_, said)| said.clone())
    }

    fn until_ended(&self) {
        let made = self.tenants.iter().flat_map(|tenant| &tenant.keys).flat_map(|known| &known.made);
        let Some(last) = made.filter_map(|made| made.ends).max() else { return };
        until("the last block has ended", || Instant::now() > last + SLACK);
    }
}

#[test]
fn each_tenant_reads_its_own_blocks_that_live_or_nothing_whatever_nodes_tenants_and_the_bucket_do() {
    let (mut hits, mut restored, mut pooled) = (0, 0, 0);
    for seed in 0..seeds(2, 12) {
        let mut world = World::start(seed);
        for step in 0..STEPS {
            world.step(step, &mut Seed(seed).child("edges").nth(step).rng());
            match step % 3 {
                0 => world.check_pools(),
                of_path => world.check(of_path == 1),
            }
        }
        for node in 0..NODES {
            world.stop(node, true);
            world.begin(node);
        }
        world.until_ended();
        [false, true].into_iter().for_each(|is_local| world.check(is_local));
        world.check_pools();
        (hits, restored, pooled) = (hits + world.hits, restored + world.restored, pooled + world.pooled);
    }
    assert!(hits > 0 && restored > 0, "{hits} blocks were read, {restored} came from the bucket");
    assert!(pooled > 0, "no pool had anything");
}

#[test]
fn what_was_deleted_is_not_brought_from_the_bucket_by_a_node_that_has_none_of_it_and_an_old_manifest() {
    let mut world = World::start_with(0, 300);
    let (red, chain) = (0, 0..RUN);
    let from = places(RUN);
    let keys = world.keys[chain].to_vec();
    (0..).zip(&keys).for_each(|(at, key)| fixture::write_block(&from, at, &content(key, 7)));
    let took = store(&world.clients[&(red, 0, false)], (&keys, from), (None, false, false));
    assert_eq!(took, [(true, true, true); RUN]);
    let namespace = world.clients[&(red, 0, false)].1;
    world.stop(1, true);
    let pushed = world.clients[&(red, 0, false)].0.cold_push(Some(namespace)).unwrap();
    assert_eq!(pushed.blocks, RUN as u64);
    // Node 1 reads the manifest now, and not again before this is over.
    world.begin(1);
    world.nodes[1].until("the manifest is known", |daemon| {
        let known = daemon.state().decided.cold.as_ref().unwrap().known(namespace);
        known.is_some_and(|known| !known.manifest.packs.is_empty())
    });
    let request = DeleteRequest { namespace, target: Target::Prefix(keys[0]), deadline: None };
    let (reply, away) =
        block_on(world.clients[&(red, 0, false)].0.delete_everywhere(request, true)).unwrap().unwrap();
    assert_eq!((reply.blocks, away.len()), (RUN as u64, 0));
    world.stop(0, true);
    for is_local in [false, true] {
        let found = look(&world.clients[&(red, 1, is_local)], &keys, is_local);
        assert!(found.iter().all(Result::is_err), "{found:?}");
    }
}
