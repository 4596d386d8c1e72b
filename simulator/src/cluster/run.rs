//! The run: one clock, one queue of events, and what each of them does.
//!
//! A request arrives, is routed, and its plan (`kvarts_planner::plan`) says what is loaded for it from where; ways serve
//! one after the other, so each load makes the next one wait. It waits at its node until its layers will come no later
//! than they are computed (or as the prefetch policy says), then runs in the node's steps: new tokens of prefills up to
//! the chunk, one token of every sequence that decodes. Where prefill and decode are apart its state goes to the other
//! node behind its prefill, and waits there in the host's memory for room. What was computed is written to memory and disk, and stays until something else needs room.
//!
//! Memory is bounded by what tiers hold and by the requests that are open.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;

use kvarts_layout::Group;
use kvarts_layout::prefix::{Absence, Need};
use kvarts_planner::cost::Prefill;
use kvarts_planner::plan::{Does, Link, Links, Part, Plan, Question, Run, Source, Sources};

use super::directory::Directory;
use super::figures::Counted;
use super::hits::Coming;
use super::moves::Peer;
use super::node::{Node, Open, Role};
use super::oracle::AHEAD;
use super::router::{Chosen, Router};
use super::spec::{Cluster, Facts, Prefetch, RouterKind, SpecError};
use super::swap::Swapped;
use super::tiers::Cache;
use super::work::{Arrival, Work};
use crate::trace::{TraceError, tokens_are_few};

/// What happens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum What {
    /// The next request that waits for no answer.
    Next,
    /// A session goes on, with the request in this place.
    Turn(u32),
    /// A node's step has ended.
    Step(u16),
    /// A node looks again whose time has come.
    Wake(u16),
    /// A request's state has reached the node that decodes it.
    Moved(u16, Open),
}

/// A request that is open.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) arrival: Arrival,
    /// Its place in the order of arrival.
    pub(super) number: u64,
    pub(super) decoder: u16,
    /// Whose way to the cold tier it uses, and how much it will read by it once it is let in.
    pub(super) via: u16,
    cold_due: u64,
    /// Bytes of its state that the node that decodes it has read itself.
    pub(super) read_by_decoder: u64,
    /// Tokens whose state is there or computed.
    pub(super) at_token: u64,
    /// What comes for it from where, until it is let in.
    pub(super) coming: Vec<Coming>,
    pub(super) starts_at: f64,
    /// When its prefill began.
    pub(super) let_in_at: f64,
    first_token_at: f64,
    /// Tokens of the answer that are there when its prefill ends or, while it decodes, were there then.
    pub(super) made: u64,
    /// While it decodes: the step in which it ends.
    pub(super) ends_at: Option<u64>,
    /// Its place in the order in which the node let requests in.
    pub(super) rank: u64,
    /// How often it was stopped for want of memory, to be computed again.
    pub(super) stopped: u32,
    /// What of it is in the host's memory, while it is stopped and is not computed again.
    pub(super) swapped: Option<Swapped>,
    /// Leading blocks that are pinned, and room without names.
    pub(super) pinned: usize,
    pub(super) taken: u64,
}

impl Running {
    /// Tokens that are to be computed before it decodes: the prompt, and what it had answered when it was stopped.
    pub(super) fn target(&self) -> u64 {
        self.arrival.input_tokens + self.made
    }
}

/// A simulation under way.
#[derive(Debug)]
pub struct Simulation<'a, W> {
    pub(super) cluster: &'a Cluster,
    pub(super) facts: Facts,
    pub(super) nodes: Vec<Node>,
    pub(super) directory: Directory,
    pub(super) cold: Option<Cache>,
    pub(super) work: W,
    pub(super) upcoming: Option<Arrival>,
    /// What comes behind it, as far as an oracle looks; and whether that is all.
    pub(super) ahead: VecDeque<Arrival>,
    no_more: bool,
    events: BinaryHeap<Reverse<(u64, u64, What)>>,
    sequence: u64,
    pub(super) now: f64,
    turns: Vec<Option<Arrival>>,
    turns_free: Vec<u32>,
    pub(super) open: Vec<Option<Running>>,
    open_free: Vec<Open>,
    began: BTreeMap<u32, f64>,
    router: Router,
    layer_bytes: Vec<u64>,
    pub(super) counted: Counted,
    arrived: u64,
}

/// Why a run ended early.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RunError {
    /// The cluster is not possible.
    Spec(SpecError),
    /// The trace is not one.
    Trace(TraceError),
}

impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Spec(error) => error.fmt(f),
            Self::Trace(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RunError {}

/// What a prompt finds at a node.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) plan: Plan,
    pub(super) runs: Vec<Run>,
    /// Who has the blocks that come from other nodes, by their places.
    pub(super) peers: Vec<Peer>,
    /// When what others load already is there.
    pub(super) ready_at: f64,
}

impl<'a, W: Work> Simulation<'a, W> {
    /// Everything empty.
    pub fn new(cluster: &'a Cluster, work: W, seed: u64) -> Result<Self, RunError> {
        let facts = cluster.facts().map_err(RunError::Spec)?;
        let of = &cluster.nodes;
        let roles = [(Role::Mixed, of.mixed), (Role::Prefill, of.prefill), (Role::Decode, of.decode)];
        let nodes = roles.into_iter().flat_map(|(role, count)| (0..count).map(move |_| role));
        let nodes: Vec<Node> = nodes.map(|role| Node::new(role, cluster, &facts)).collect();
        let layers = u64::from(facts.layers.max(1));
        let (each, rest) = (facts.block_bytes / layers, facts.block_bytes % layers);
        let layer_bytes = (0..layers).map(|layer| each + u64::from(layer < rest)).collect();
        let cold =
            cluster.cold.map(|cold| Cache::new((cold.gb * 1e9 / facts.block_bytes.max(1) as f64) as u64));
        let router = Router::new(cluster.router, &nodes, seed);
        Ok(Self {
            cluster,
            facts,
            nodes,
            directory: Directory::default(),
            cold,
            work,
            upcoming: None,
            ahead: VecDeque::new(),
            no_more: false,
            events: BinaryHeap::new(),
            sequence: 0,
            now: 0.0,
            turns: Vec::new(),
            turns_free: Vec::new(),
            open: Vec::new(),
            open_free: Vec::new(),
            began: BTreeMap::new(),
            router,
            layer_bytes,
            counted: Counted::default(),
            arrived: 0,
        })
    }

    /// Notes every step ([`Counted::schedule`]): memory grows with the run.
    pub fn recording(mut self) -> Self {
        self.counted.schedule = Some(Vec::new());
        self
    }

    /// Runs to the end; `tell` is told of time and requests now and then.
    pub fn run(mut self, mut tell: impl FnMut(f64, u64)) -> Result<Counted, RunError> {
        self.fetch_next()?;
        if self.upcoming.is_none() {
            // Requests that come by steps need a first one.
            self.at(0.0, What::Wake(0));
        }
        while let Some(Reverse((at, _, what))) = self.events.pop() {
            self.now = f64::from_bits(at);
            self.counted.events += 1;
            if self.counted.events.is_multiple_of(1 << 16) {
                tell(self.now, self.counted.requests);
            }
            match what {
                What::Next => {
                    let arrival = self.upcoming.take();
                    self.fetch_next()?;
                    arrival.into_iter().for_each(|arrival| self.arrive(arrival));
                }
                What::Turn(place) => {
                    let arrival = self.turns.get_mut(place as usize).and_then(Option::take);
                    self.turns_free.push(place);
                    arrival.into_iter().for_each(|arrival| self.arrive(arrival));
                }
                What::Step(node) => self.step_ended(node),
                What::Wake(node) => {
                    if self.nodes[usize::from(node)].wakes_at <= self.now {
                        self.nodes[usize::from(node)].wakes_at = f64::INFINITY;
                    }
                    self.kick(node);
                }
                What::Moved(node, open) => {
                    self.nodes[usize::from(node)].moved.push_back(open);
                    self.kick(node);
                }
            }
        }
        let disks = self.nodes.iter().filter_map(|node| node.disk.as_ref());
        let in_memory = self.nodes.iter().flat_map(|node| node.hbm.blocks());
        self.counted.distinct = [copies(in_memory), copies(disks.flat_map(|disk| disk.blocks()))];
        Ok(self.counted)
    }

    pub(super) fn at(&mut self, at: f64, what: What) {
        self.sequence += 1;
        self.events.push(Reverse((at.max(self.now).to_bits(), self.sequence, what)));
    }

    fn fetch_next(&mut self) -> Result<(), RunError> {
        let ahead = if self.cluster.router == RouterKind::Oracle { AHEAD } else { 0 };
        while self.ahead.len() <= ahead && !self.no_more {
            match self.work.next().map_err(RunError::Trace)? {
                Some(arrival) => self.ahead.push_back(arrival),
                None => self.no_more = true,
            }
        }
        self.upcoming = self.ahead.pop_front();
        if let Some(at) = self.upcoming.as_ref().map(|arrival| arrival.at_ms) {
            self.at(at, What::Next);
        }
        Ok(())
    }

    pub(super) fn full_blocks(&self, tokens: u64) -> u64 {
        tokens / u64::from(self.cluster.block_tokens)
    }

    /// What of a prompt is where, as a node sees it, and what would be done with it. `via` is whose way to the cold tier
    /// is used.
    pub(super) fn look(&self, at: u16, via: u16, arrival: &Arrival) -> Option<Found> {
        let node = &self.nodes[usize::from(at)];
        let full = self.full_blocks(arrival.input_tokens.saturating_sub(1)) as usize;
        let (mut runs, mut peers, mut ready_at) = (Vec::<Run>::new(), Vec::new(), 0.0f64);
        for (block, place) in arrival.blocks.iter().take(full).zip(0u32..) {
            // What is being loaded comes to the host's memory, if there is any for state, or to blocks of the first that asked.
            let comes = node.loading.get(block).filter(|at| **at > self.now);
            let source = match comes.filter(|_| node.dram.is_some() || node.hbm.has(*block)) {
                Some(at) => {
                    ready_at = ready_at.max(*at);
                    match node.hbm.has(*block) {
                        true => Source::Hbm,
                        false => Source::Dram,
                    }
                }
                None if node.hbm.has(*block) => Source::Hbm,
                None if node.dram.as_ref().is_some_and(|dram| dram.has(*block)) => Source::Dram,
                None if node.disk.as_ref().is_some_and(|disk| disk.has(*block)) => Source::Disk,
                None => match self.peer(at, (place, *block), peers.last()) {
                    Some(peer) => {
                        peers.push(peer);
                        Source::Peer
                    }
                    None if self.cold.as_ref().is_some_and(|cold| cold.has(*block)) => Source::Cold,
                    None => break,
                },
            };
            match runs.last_mut() {
                Some(run) if run.sources == Sources::of(source) => run.to = place + 1,
                _ => runs.push(Run { from: place, to: place + 1, sources: Sources::of(source) }),
            }
        }
        let links = match self.cluster.engine.plans {
            true => self.links(at, via, &peers),
            // Of a load that takes no time every plan takes all that is there.
            false => [Source::Dram, Source::Disk, Source::Peer, Source::Cold]
                .into_iter()
                .fold(Links::NONE, |links, source| links.with(source, Link::gb_per_s(1e9, 0.0))),
        };
        let (need, absence) = (Need::All, Absence::Required);
        let parts = [Part { group: Group(0), need, absence, layer_bytes: &self.layer_bytes, runs: &runs }];
        let block_tokens = self.cluster.block_tokens;
        let overlap = self.cluster.engine.prefetch.overlap();
        let question = Question {
            block_tokens,
            prompt_tokens: arrival.input_tokens,
            parts: &parts,
            links: &links,
            overlap,
        };
        let plan = question.plan(&self.facts.times).ok()?;
        Some(Found { plan, runs, peers, ready_at })
    }

    /// The ways to what a node can load from, as they are now.
    pub(super) fn links(&self, at: u16, via: u16, peers: &[Peer]) -> Links {
        let node = &self.nodes[usize::from(at)];
        Links::NONE
            .with(Source::Dram, node.to_dram.link(self.now))
            .with(Source::Disk, node.reads.link(self.now))
            .with(Source::Peer, self.peer_link(at, peers))
            .with(Source::Cold, self.cold_link(at, via))
    }

    /// Milliseconds of computing that wait at a node.
    pub(super) fn queue_ms(&self, node: u16) -> f64 {
        self.nodes[usize::from(node)].tokens_due as f64 * self.token_ms()
    }

    pub(super) fn token_ms(&self) -> f64 {
        self.facts.times.prefill_ms(0, 8192) / 8192.0
    }

    fn arrive(&mut self, arrival: Arrival) {
        let Some(node) = self.take_in(arrival) else { return };
        if self.upcoming.as_ref().is_some_and(|next| next.at_ms <= self.now) {
            // Those who come at the same time may be in the same step.
            let now = self.now;
            return self.at(now, What::Wake(node));
        }
        self.kick(node);
    }

    /// A request waits at a node from now on: which one.
    pub(super) fn take_in(&mut self, arrival: Arrival) -> Option<u16> {
        self.arrived += 1;
        let few = tokens_are_few(arrival.input_tokens, arrival.output_tokens);
        let tokens = arrival.input_tokens.saturating_add(arrival.output_tokens);
        let needed = tokens.div_ceil(u64::from(self.cluster.block_tokens));
        if let Some((session, _)) = arrival.session {
            self.began.entry(session).or_insert(self.now);
        }
        if !few || self.nodes.iter().all(|node| node.hbm.capacity() < needed) {
            // It fits nowhere, ever.
            return self.refuse(&arrival);
        }
        let mut router = std::mem::take(&mut self.router);
        let chosen = router.choose(self, &arrival);
        self.router = router;
        let Chosen { node, decoder, via } = chosen;
        let Some(found) = self.look(node, via, &arrival) else { return self.refuse(&arrival) };
        self.count_owner(node, &arrival);
        let open = self.begin(arrival, (node, decoder, via), &found);
        self.nodes[usize::from(node)].waiting.push_back(open);
        self.counted.open_max = self.counted.open_max.max((self.open.len() - self.open_free.len()) as u64);
        Some(node)
    }

    /// A request is not taken, and counted as such; with it ends its session.
    fn refuse(&mut self, arrival: &Arrival) -> Option<u16> {
        self.counted.refused += 1;
        if let Some((session, _)) = arrival.session {
            self.began.remove(&session);
            let next = self.work.refused(session, self.now);
            self.turn(next);
        }
        None
    }

    fn count_owner(&mut self, node: u16, arrival: &Arrival) {
        let leading = self.directory.leading(&arrival.blocks);
        if leading.most().is_empty() {
            return;
        }
        self.counted.with_owner += 1;
        self.counted.to_owner += u64::from(leading.most().iter().any(|(owner, _)| *owner == node));
    }

    /// Notes when the request may begin. Unless its load waits for the step that lets it in, the ways are asked for it now.
    fn begin(&mut self, arrival: Arrival, (at, decoder, via): (u16, u16, u16), found: &Found) -> Open {
        let (plan, now) = (&found.plan, self.now);
        let engine = &self.cluster.engine;
        let (mut loaded_at, mut cold_due, mut coming) = (now, 0, Vec::new());
        if engine.prefetch.is_in_step() {
            cold_due = plan
                .actions
                .iter()
                .filter(|one| one.does == Does::Load(Source::Cold))
                .map(|one| one.bytes)
                .sum();
            self.nodes[usize::from(via)].cold_due += cold_due;
        } else {
            (loaded_at, coming) = self.ask_each(at, via, &arrival, found);
            self.keep_loaded(at, &arrival, found, loaded_at);
            loaded_at = loaded_at.max(found.ready_at);
        }
        let overlapped = match engine.plans {
            // The plan saw its own ways: what others have asked a peer for meanwhile may make it later.
            true => (now + plan.load_ms + plan.stall_ms).max(loaded_at - plan.compute_ms),
            false => loaded_at - plan.compute_ms,
        };
        let starts_at = match engine.prefetch {
            Prefetch::Overlap => overlapped.max(found.ready_at).max(now),
            Prefetch::WaitComplete => loaded_at,
            Prefetch::BestEffort | Prefetch::Blocking | Prefetch::Layerwise => now,
            Prefetch::Timeout => loaded_at.min(now + engine.timeout_ms),
        };
        let (blocks, block_tokens) = (plan.boundary_blocks, u64::from(self.cluster.block_tokens));
        let planned = u64::from(blocks) * block_tokens;
        self.nodes[usize::from(at)].tokens_due += arrival.input_tokens - planned;
        self.nodes[usize::from(decoder)].assigned += 1;
        self.nodes[usize::from(decoder)].assigned_tokens += arrival.input_tokens;
        let running = Running {
            number: self.arrived - 1,
            made: 0,
            ends_at: None,
            rank: 0,
            stopped: 0,
            swapped: None,
            arrival,
            decoder,
            via,
            cold_due,
            read_by_decoder: Self::read_by_decoder((at, decoder, via), found),
            at_token: planned,
            coming,
            starts_at,
            let_in_at: now,
            first_token_at: 0.0,
            pinned: 0,
            taken: 0,
        };
        match self.open_free.pop() {
            Some(place) => {
                self.open[place as usize] = Some(running);
                place
            }
            None => {
                self.open.push(Some(running));
                self.open.len() as Open - 1
            }
        }
    }

    /// A request was let in whose load begins with the step.
    pub(super) fn load_in_step(&mut self, at: u16, open: Open, found: &Found) {
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        let (via, again) = (running.via, running.stopped > 0);
        let due = std::mem::take(&mut running.cold_due);
        let arrival = std::mem::take(&mut running.arrival);
        self.nodes[usize::from(via)].cold_due -= due;
        let loaded_at = self.ask(at, via, &arrival, found);
        if !again {
            let boundary = u64::from(found.plan.boundary_blocks);
            self.note_hits(&arrival, &Self::coming(&found.plan, self.now), boundary, boundary);
        }
        self.keep_loaded(at, &arrival, found, loaded_at);
        let node = &mut self.nodes[usize::from(at)];
        node.loads_end = node.loads_end.max(loaded_at).max(found.ready_at);
        if let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) {
            running.read_by_decoder = Self::read_by_decoder((at, running.decoder, via), found);
            running.arrival = arrival;
        }
    }

    /// The first token is there, or another one of a request that had been stopped.
    pub(super) fn prefilled(&mut self, at: u16, open: Open) {
        let now = self.now;
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        running.made += 1;
        let decoder = running.decoder;
        if running.stopped == 0 || running.made == 1 {
            running.first_token_at = now;
            let ttft = now - running.arrival.at_ms;
            self.counted.ttft.add(ttft);
            if let Some(kind) = &running.arrival.kind {
                self.counted.ttft_by_kind.entry(Arc::clone(kind)).or_default().add(ttft);
            }
            let blocks: Vec<u64> = running.arrival.blocks.iter().take(running.pinned).copied().collect();
            if let Some(slice) = self.counted.slice(now) {
                slice.ended += 1;
                slice.ttft_ms += ttft;
            }
            self.write(at, &blocks);
        }
        if decoder == at {
            return self.decode(at, open);
        }
        self.let_go(at, open);
        self.move_state(at, open);
    }

    /// Begins to decode: all of its state is here.
    pub(super) fn decode(&mut self, at: u16, open: Open) {
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        let (input, output, made) =
            (running.arrival.input_tokens, running.arrival.output_tokens, running.made);
        let node = &mut self.nodes[usize::from(at)];
        if made >= output {
            node.context += input + output - 1;
            return self.finish(at, open);
        }
        // The step that runs does not know of it yet.
        let first = node.steps + u64::from(node.busy);
        let ends_at = first + output - made;
        running.ends_at = Some(ends_at);
        node.decoding.push(Reverse((ends_at, open)));
        node.context += input + made - 1;
        // The step in which what it holds is full, and it needs another block.
        let held = (running.pinned as u64 + running.taken) * u64::from(self.cluster.block_tokens);
        let grows = first + 1 + held.saturating_sub(input + made - 1);
        if grows <= ends_at {
            node.growing.push(Reverse((grows, running.rank, open)));
        }
    }

    /// Its room is given back, the end of its blocks first; they stay until others need the room.
    pub(super) fn let_go(&mut self, at: u16, open: Open) {
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        let (node, mut gone) = (&mut self.nodes[usize::from(at)], Vec::new());
        if node.running.get(&running.rank) == Some(&open) {
            node.running.remove(&running.rank);
        }
        node.hbm.give(running.taken);
        for block in running.arrival.blocks.iter().take(running.pinned).rev() {
            node.hbm.unpin(*block, |block| gone.push(block));
            if !self.cluster.engine.prefix_caching && node.hbm.drop_unpinned(*block) {
                gone.push(*block);
            }
        }
        (running.pinned, running.taken) = (0, 0);
        self.forget(at, &gone);
    }

    pub(super) fn finish(&mut self, at: u16, open: Open) {
        self.name_filled(at, open);
        self.let_go(at, open);
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::take) else { return };
        self.open_free.push(open);
        let (arrival, now) = (running.arrival, self.now);
        let decoded = arrival.output_tokens.saturating_sub(1);
        let node = &mut self.nodes[usize::from(at)];
        node.context = node.context.saturating_sub(arrival.input_tokens + decoded);
        node.assigned -= 1;
        node.assigned_tokens -= arrival.input_tokens;
        self.counted.requests += 1;
        self.counted.output_tokens += arrival.output_tokens;
        self.counted.end_ms = now;
        self.counted.step.add(now - arrival.at_ms);
        if decoded > 0 {
            self.counted.tpot.add((now - running.first_token_at) / decoded as f64);
        }
        // What the answer filled, where it is known by name. The state of its last token is never computed.
        let filled = self.full_blocks(arrival.input_tokens + decoded) as usize;
        let from = self.full_blocks(arrival.input_tokens) as usize;
        if let Some(blocks) = arrival.blocks.get(from..filled.min(arrival.blocks.len()).max(from)) {
            let mut gone = Vec::new();
            for block in blocks {
                let hbm = &mut self.nodes[usize::from(at)].hbm;
                if self.cluster.engine.prefix_caching && !hbm.has(*block) {
                    hbm.put(*block, false, |block| gone.push(block));
                }
            }
            self.write(at, blocks);
            self.forget(at, &gone);
        }
        let Some((session, last)) = arrival.session else { return };
        if last {
            let began = self.began.remove(&session).unwrap_or(now);
            self.counted.task.add(now - began);
            self.counted.sessions += 1;
        } else {
            let next = self.work.ended(session, now);
            self.turn(next);
        }
    }

    /// What a session asks next, if anything, and what others do that waited for the end of its request.
    fn turn(&mut self, mut next: Option<Arrival>) {
        while let Some(arrival) = next.take().or_else(|| self.work.another(self.now)) {
            let at = arrival.at_ms;
            let place = match self.turns_free.pop() {
                Some(place) => place,
                None => {
                    self.turns.push(None);
                    self.turns.len() as u32 - 1
                }
            };
            self.turns[place as usize] = Some(arrival);
            self.at(at, What::Turn(place));
        }
    }
}

/// Different blocks, and all of them.
fn copies(blocks: impl Iterator<Item = u64>) -> (u64, u64) {
    let (mut seen, mut all) = (crate::ids::IdMap::<()>::default(), 0);
    for block in blocks {
        seen.insert(block, ());
        all += 1;
    }
    (seen.len() as u64, all)
}
