//! Who decides where a request goes.

use std::cmp::Reverse;

use kvarts_planner::route::{NodeView, Question, Weights};

use super::directory::Leading;
use super::node::{Node, Role};
use super::run::Simulation;
use super::spec::{RouterKind, Side};
use super::work::{Arrival, Dice, Work};

/// Nodes up to which each is looked at for each request; of more, some are drawn.
const ALL_LOOKED_AT: usize = 64;
/// How many are drawn.
const DRAWN: usize = 8;
/// How far the node with the most of a prompt may be behind before it is passed over: SGLang's defaults.
const BEHIND_PART: f64 = 1.5;
const BEHIND_REQUESTS: u64 = 32;
/// Prompts up to which requests are short.
const SHORT_TOKENS: u64 = 8192;
/// DualPath's thresholds: what can be read in 3 s, what can be computed in 5 s.
const READ_MS: f64 = 3000.0;
const COMPUTED_MS: f64 = 5000.0;
/// And how much more than the mean of tokens a node that decodes may get.
const ABOVE_MEAN: f64 = 1.05;

/// Where a request goes: who prefills, who decodes, and by whose way the cold tier is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chosen {
    pub(super) node: u16,
    pub(super) decoder: u16,
    pub(super) via: u16,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Router {
    kind: RouterKind,
    dice: Dice,
    next: usize,
    /// Of each node, whether its last read was by its own way.
    turns: Vec<bool>,
    prefillers: Vec<u16>,
    decoders: Vec<u16>,
}

impl Default for Router {
    fn default() -> Self {
        Self {
            kind: RouterKind::Random,
            dice: Dice(0),
            next: 0,
            turns: Vec::new(),
            prefillers: Vec::new(),
            decoders: Vec::new(),
        }
    }
}

impl Router {
    pub(super) fn new(kind: RouterKind, nodes: &[Node], seed: u64) -> Self {
        let of = |role: &dyn Fn(Role) -> bool| -> Vec<u16> {
            (0u16..).zip(nodes).filter(|(_, node)| role(node.role)).map(|(at, _)| at).collect()
        };
        let prefillers = of(&|role| role != Role::Decode);
        let mut decoders = of(&|role| role == Role::Decode);
        if decoders.is_empty() {
            decoders = of(&|role| role == Role::Mixed);
        }
        Self {
            kind,
            dice: Dice(seed ^ 0x726f_7574_6572),
            next: 0,
            turns: vec![false; nodes.len()],
            prefillers,
            decoders,
        }
    }

    pub(super) fn choose<W: Work>(&mut self, of: &Simulation<'_, W>, arrival: &Arrival) -> Chosen {
        let node = self.prefiller(of, arrival);
        let decoder = match of.nodes[usize::from(node)].role {
            Role::Prefill => self.decoder(of, arrival),
            Role::Mixed | Role::Decode => node,
        };
        let via = match of.cluster.dual_path {
            true if decoder == node => self.shortest_way(of, node),
            true if self.other_side(of, node, decoder) => decoder,
            true | false => node,
        };
        Chosen { node, decoder, via }
    }

    fn other_side<W: Work>(&mut self, of: &Simulation<'_, W>, node: u16, decoder: u16) -> bool {
        let queue = |at: u16| of.nodes[usize::from(at)].cold_queue_ms(of.now);
        match of.cluster.dual_path_side {
            Side::Shorter => queue(decoder) < queue(node),
            // Each node by itself, or else who is next and by which way would go together.
            Side::Turns => self.turns.get_mut(usize::from(node)).is_some_and(|own| {
                *own = !*own;
                !*own
            }),
        }
    }

    /// Among nodes that do both, any other's way to the cold tier may be used.
    fn shortest_way<W: Work>(&mut self, of: &Simulation<'_, W>, node: u16) -> u16 {
        let queue = |at: u16| of.nodes[usize::from(at)].cold_queue_ms(of.now);
        let some = self.some();
        some.into_iter().fold(node, |best, at| if queue(at) < queue(best) { at } else { best })
    }

    /// All prefilling nodes, or some of many.
    fn some(&mut self) -> Vec<u16> {
        if self.prefillers.len() <= ALL_LOOKED_AT {
            return self.prefillers.clone();
        }
        (0..DRAWN).map(|_| self.prefillers[self.dice.below(self.prefillers.len())]).collect()
    }

    /// Who decodes what another node prefills: the one with the fewest requests that have not ended, those that are still on
    /// their way to it among them. DualPath's rule looks at those first that this prompt leaves near the mean of tokens.
    fn decoder<W: Work>(&mut self, of: &Simulation<'_, W>, arrival: &Arrival) -> u16 {
        let some: Vec<u16> = match self.decoders.len() {
            few if few <= ALL_LOOKED_AT => self.decoders.clone(),
            many => (0..DRAWN).map(|_| self.decoders[self.dice.below(many)]).collect(),
        };
        let tokens = |at: u16| of.nodes[usize::from(at)].assigned_tokens;
        let requests = |at: u16| of.nodes[usize::from(at)].assigned;
        let all = arrival.input_tokens + some.iter().map(|at| tokens(*at)).sum::<u64>();
        let most = ABOVE_MEAN * all as f64 / some.len().max(1) as f64;
        let high =
            |at: u16| self.kind == RouterKind::DualPath && (tokens(at) + arrival.input_tokens) as f64 > most;
        let rank = |at: &u16| match high(*at) {
            true => (true, tokens(*at), requests(*at), *at),
            false => (false, requests(*at), tokens(*at), *at),
        };
        some.into_iter().min_by_key(rank).unwrap_or(0)
    }

    fn least_loaded<W: Work>(of: &Simulation<'_, W>, some: &[u16]) -> u16 {
        let load = |at: &&u16| {
            let node = &of.nodes[usize::from(**at)];
            (node.tokens_due, node.load(), **at)
        };
        some.iter().min_by_key(load).copied().unwrap_or(0)
    }

    fn prefiller<W: Work>(&mut self, of: &Simulation<'_, W>, arrival: &Arrival) -> u16 {
        let count = self.prefillers.len();
        match self.kind {
            RouterKind::Random => self.prefillers[self.dice.below(count)],
            RouterKind::RoundRobin => {
                self.next = (self.next + 1) % count;
                self.prefillers[self.next]
            }
            RouterKind::PowerOfTwo => {
                let two = [self.dice.below(count), self.dice.below(count)].map(|at| self.prefillers[at]);
                Self::least_loaded(of, &two)
            }
            RouterKind::Bucket => {
                let short = arrival.input_tokens <= SHORT_TOKENS;
                let (some, others) = self.prefillers.split_at(count.div_ceil(2));
                let bucket = if short || others.is_empty() { some } else { others };
                Self::least_loaded(of, bucket)
            }
            RouterKind::CacheAware => self.cache_aware(of, arrival),
            RouterKind::OwnerServe => self.owner_serve(of, arrival),
            RouterKind::DualPath => self.dual_path(of),
            RouterKind::Oracle => self.oracle(of, arrival),
        }
    }

    fn cache_aware<W: Work>(&mut self, of: &Simulation<'_, W>, arrival: &Arrival) -> u16 {
        let some = self.some();
        let idle = Self::least_loaded(of, &some);
        let leading = of.directory.leading(&arrival.blocks);
        let load = |at: u16| of.nodes[usize::from(at)].load();
        let can = |at: &u16| of.nodes[usize::from(*at)].role != Role::Decode;
        let best = leading
            .all()
            .iter()
            .filter(|(at, _)| can(at))
            .max_by_key(|(at, blocks)| (*blocks, u64::MAX - load(*at), u16::MAX - *at));
        let Some((at, _)) = best else { return idle };
        let behind =
            load(*at) > load(idle) + BEHIND_REQUESTS && load(*at) as f64 > BEHIND_PART * load(idle) as f64;
        if behind { idle } else { *at }
    }

    /// Nodes that are looked at: those that have the most of the prompt among them.
    pub(super) fn candidates<W: Work>(&mut self, of: &Simulation<'_, W>, leading: &Leading) -> Vec<u16> {
        let mut some = self.some();
        let can = |at: &u16| of.nodes[usize::from(*at)].role != Role::Decode;
        some.extend(leading.all().iter().rev().map(|(at, _)| *at).filter(can).take(DRAWN));
        some.sort_unstable();
        some.dedup();
        some
    }

    fn owner_serve<W: Work>(&mut self, of: &Simulation<'_, W>, arrival: &Arrival) -> u16 {
        let block_tokens = u64::from(of.cluster.block_tokens);
        let leading = of.directory.leading(&arrival.blocks);
        let views: Vec<NodeView> = self
            .candidates(of, &leading)
            .into_iter()
            .map(|at| {
                let node = &of.nodes[usize::from(at)];
                let there = u64::from(leading.of(at));
                let near = |block: &&u64| {
                    node.hbm.has(**block) || node.dram.as_ref().is_some_and(|dram| dram.has(**block))
                };
                let device = arrival.blocks.iter().take_while(|block| node.hbm.has(**block)).count() as u64;
                let memory = arrival.blocks.iter().take_while(near).count() as u64;
                NodeView {
                    node: u32::from(at),
                    decodes: node.role == Role::Mixed,
                    queue_ms: of.queue_ms(at),
                    decoding: node.decoding.len() as u64,
                    memory_tokens: memory * block_tokens,
                    device_tokens: device * block_tokens,
                    memory_bytes_per_ms: node.to_dram.bytes_per_ms,
                    disk_tokens: there.max(memory) * block_tokens,
                    disk_bytes_per_ms: node.reads.bytes_per_ms,
                    disk_queue_ms: node.reads.queue_ms(of.now),
                    network_bytes_per_ms: of.cluster.network.map_or(0.0, |_| node.network.bytes_per_ms),
                    network_queue_ms: node.network.queue_ms(of.now),
                }
            })
            .collect();
        // Device memory of another node is not read: what it has there only is of no use elsewhere.
        let readable = |at: u16| {
            let node = &of.nodes[usize::from(at)];
            let here = |block: &&u64| {
                node.dram.as_ref().is_some_and(|dram| dram.has(**block))
                    || node.disk.as_ref().is_some_and(|disk| disk.has(**block))
            };
            arrival.blocks.iter().take_while(here).count() as u64
        };
        let owners = leading.all().iter().rev().take(DRAWN).map(|(at, _)| (readable(*at), Reverse(*at)));
        let owner = owners.max().filter(|(blocks, _)| *blocks > 0);
        let question = Question {
            prompt_tokens: arrival.input_tokens,
            token_bytes: of.facts.block_bytes as f64 / block_tokens as f64,
            layers: of.facts.layers,
            owner: owner.map(|(blocks, Reverse(at))| (u32::from(at), blocks * block_tokens)),
            shared_tokens: 0,
            forked: false,
            nodes: &views,
            weights: Weights::default(),
        };
        let route = question.route(&of.facts.times);
        route.best().and_then(|best| u16::try_from(best.node).ok()).unwrap_or(0)
    }

    /// The fewest tokens among those that are neither overloaded nor far behind with reading.
    fn dual_path<W: Work>(&mut self, of: &Simulation<'_, W>) -> u16 {
        let some = self.some();
        let overloaded = |at: &u16| of.queue_ms(*at) > COMPUTED_MS;
        let reading = |at: &u16| of.nodes[usize::from(*at)].cold_queue_ms(of.now) > READ_MS;
        let good: Vec<u16> = some.iter().copied().filter(|at| !overloaded(at) && !reading(at)).collect();
        let fair: Vec<u16> = some.iter().copied().filter(|at| !overloaded(at)).collect();
        match (good.is_empty(), fair.is_empty()) {
            (false, _) => Self::least_loaded(of, &good),
            (true, false) => Self::least_loaded(of, &fair),
            (true, true) => Self::least_loaded(of, &some),
        }
    }
}
