//! A router that knows what no real one does: how long every answer will be, and which requests come next.
//!
//! Of every node it counts out when the request's first token would be there: when those before it are computed, with the
//! room that answers leave when they end, and when its state comes by the ways as they are, whatever the engine plans. Then
//! it lets the next requests of the trace come ([`AHEAD`] of them), each to the node where its own first token would come
//! soonest by then, with the prompts before it in place. The node with the least sum of times to the first token is taken.
//!
//! It is no bound: it looks one request and then greedily ahead, it counts what the next ones compute and what they bring
//! from other nodes and not what they load beside, and of sessions it knows beginnings only, as turns come when answers end.

use kvarts_planner::cost::{Decode, Prefill};
use kvarts_planner::plan::Does;

use super::directory::Leading;
use super::router::Router;
use super::run::{Found, Running, Simulation};
use super::spec::Prefetch;
use super::work::{Arrival, Work};

/// Requests that it knows beforehand, besides the next one.
pub(super) const AHEAD: usize = 31;
/// Of a longer queue the rest is counted by its tokens.
const COUNTED: usize = 256;

/// One of the next requests.
struct Next<'a> {
    arrival: &'a Arrival,
    /// Milliseconds that it computes on each of the nodes that are looked at, with what there is now.
    compute: Vec<f64>,
    /// Leading tokens that each of them has, and that any node has.
    there: Vec<u64>,
    anywhere: u64,
    /// Leading tokens that it has in common with each one before it, the request itself first.
    common: Vec<u64>,
}

impl Router {
    /// See the module.
    pub(super) fn oracle<W: Work>(&mut self, of: &Simulation<'_, W>, arrival: &Arrival) -> u16 {
        let leading = of.directory.leading(&arrival.blocks);
        let nodes = self.candidates(of, &leading);
        let needed = of.blocks_of(arrival.input_tokens + arrival.output_tokens);
        let clear: Vec<f64> = nodes.iter().map(|at| of.clear_at(*at, needed)).collect();
        let next = self.next_ones(of, arrival, &nodes);
        let mut best = (f64::INFINITY, f64::INFINITY, 0);
        for (place, (at, clear_at)) in nodes.iter().zip(&clear).enumerate() {
            let Some(found) = of.look(*at, *at, arrival) else { continue };
            let first = of.first_token_at(*clear_at, *at, &found);
            let total = first + Self::total_of_next(of, &next, clear.clone(), (place, first));
            if (total, first) < (best.0, best.1) {
                best = (total, first, *at);
            }
        }
        best.2
    }

    fn next_ones<'a, W: Work>(
        &self,
        of: &'a Simulation<'_, W>,
        arrival: &'a Arrival,
        nodes: &[u16],
    ) -> Vec<Next<'a>> {
        let ahead: Vec<&Arrival> = of.upcoming.iter().chain(&of.ahead).collect();
        let block_tokens = u64::from(of.cluster.block_tokens);
        let all: Vec<&Arrival> = std::iter::once(arrival).chain(ahead.iter().copied()).collect();
        let next = |(place, arrival): (usize, &&'a Arrival)| {
            let most = arrival.input_tokens.saturating_sub(1) / block_tokens * block_tokens;
            let leading: Leading = of.directory.leading(&arrival.blocks);
            let tokens = |blocks: u32| (u64::from(blocks) * block_tokens).min(most);
            let there: Vec<u64> = nodes.iter().map(|at| tokens(leading.of(*at))).collect();
            let anywhere = leading.most().first().map_or(0, |(_, blocks)| tokens(*blocks));
            let compute = |there: &u64| of.facts.times.prefill_ms(*there, arrival.input_tokens - there);
            let compute = there.iter().map(compute).collect();
            let common = |other: &&Arrival| {
                let same = other.blocks.iter().zip(&arrival.blocks).take_while(|(one, other)| one == other);
                (same.count() as u64 * block_tokens).min(most)
            };
            let common = all.iter().take(place + 1).map(common).collect();
            Next { arrival, compute, there, anywhere, common }
        };
        ahead.iter().enumerate().map(next).collect()
    }

    /// The sum of the times of the next ones' first tokens, each where it comes soonest, if the request goes to a place.
    fn total_of_next<W: Work>(
        of: &Simulation<'_, W>,
        next: &[Next<'_>],
        mut clear: Vec<f64>,
        (place, first): (usize, f64),
    ) -> f64 {
        let token_ms = of.facts.block_bytes as f64
            / f64::from(of.cluster.block_tokens)
            / of.cluster.network.map_or(f64::INFINITY, |network| network.gb_per_s * 1e6);
        let fetches = of.cluster.network.is_some();
        let (mut total, mut places) = (0.0, vec![place]);
        clear[place] = clear[place].max(first);
        for one in next {
            let at = one.arrival.at_ms.max(of.now);
            let mut best = (f64::INFINITY, 0);
            for (node, clear_at) in clear.iter().enumerate() {
                let mut there = one.there[node];
                let common = one.common.iter().zip(&places).filter(|(_, place)| **place == node);
                there = there.max(common.map(|(tokens, _)| *tokens).max().unwrap_or(0));
                let compute = match there == one.there[node] {
                    true => one.compute[node],
                    false => of.facts.times.prefill_ms(there, one.arrival.input_tokens - there),
                };
                let mut first = clear_at.max(at) + compute;
                if fetches && one.anywhere > there {
                    let fetched = at + (one.anywhere - there) as f64 * token_ms;
                    let rest =
                        of.facts.times.prefill_ms(one.anywhere, one.arrival.input_tokens - one.anywhere);
                    first = first.min((clear_at + rest).max(at + rest).max(fetched));
                }
                if first < best.0 {
                    best = (first, node);
                }
            }
            total += best.0 - one.arrival.at_ms;
            clear[best.1] = best.0;
            places.push(best.1);
        }
        total
    }
}

impl<W: Work> Simulation<'_, W> {
    fn blocks_of(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.cluster.block_tokens))
    }

    /// When a node can compute a prompt that comes now and needs so much room: behind those before it, when enough of the
    /// answers that it decodes have ended.
    fn clear_at(&self, at: u16, needed: u64) -> f64 {
        let node = &self.nodes[usize::from(at)];
        let open = |open: &u32| self.open.get(*open as usize).and_then(Option::as_ref);
        let mut clear = if node.busy { node.step_ends.max(self.now) } else { self.now };
        let (mut counted, mut before) = (0, needed);
        let left = |running: &Running, from: u64| {
            let tokens = running.target().saturating_sub(from);
            (tokens, self.facts.times.prefill_ms(from, tokens))
        };
        for number in &node.prefilling {
            let Some(running) = open(number) else { continue };
            let now = node.chunks.iter().find(|(other, _)| node.busy && other == number);
            let chunk = now.map_or(0, |(_, chunk)| *chunk);
            let (tokens, ms) = left(running, running.at_token + chunk);
            clear += ms;
            counted += tokens + chunk;
            let held = running.pinned as u64 + running.taken;
            before += self.blocks_of(running.target()).saturating_sub(held);
        }
        for running in node.waiting.iter().take(COUNTED).filter_map(open) {
            let (tokens, ms) = left(running, running.at_token);
            clear += ms;
            counted += tokens;
            before += self.blocks_of(running.target());
        }
        clear += node.tokens_due.saturating_sub(counted) as f64 * self.token_ms();
        clear.max(self.room_at(at, before))
    }

    /// When this number of blocks will be free, by the ends of the answers that are decoded: they are known here.
    fn room_at(&self, at: u16, blocks: u64) -> f64 {
        let node = &self.nodes[usize::from(at)];
        let mut room = node.hbm.room();
        if room >= blocks {
            return self.now;
        }
        let mut ends: Vec<(u64, u32)> = node.decoding.iter().map(|one| one.0).collect();
        ends.sort_unstable();
        let step_ms = self.facts.times.decode_ms(node.decoding.len() as u64, node.context);
        let mut steps = 0;
        for (end, open) in ends {
            if room >= blocks {
                break;
            }
            let running = self.open.get(open as usize).and_then(Option::as_ref);
            room += running.map_or(0, |running| running.pinned as u64 + running.taken);
            steps = end.saturating_sub(node.steps);
        }
        self.now + steps as f64 * step_ms
    }

    /// When the first token is there of what a node has found, if it may compute from `clear` on.
    fn first_token_at(&self, clear: f64, at: u16, found: &Found) -> f64 {
        let (plan, links) = (&found.plan, self.links(at, at, &found.peers));
        let mut load = 0.0f64;
        for action in &plan.actions {
            let Does::Load(source) = action.does else { continue };
            if let Some(link) = links.get(source) {
                load = load.max(link.wait_ms() + action.bytes as f64 / link.bytes_per_ms);
            }
        }
        let (compute, loaded) = (plan.compute_ms, (self.now + load).max(found.ready_at));
        match self.cluster.engine.prefetch {
            Prefetch::WaitComplete => clear.max(loaded) + compute,
            Prefetch::Blocking => clear.max(found.ready_at) + load + compute,
            Prefetch::Layerwise => clear.max(found.ready_at) + load.max(compute),
            // Best effort and timeout compute what is late, which is no sooner.
            Prefetch::Overlap | Prefetch::BestEffort | Prefetch::Timeout => (clear + compute).max(loaded),
        }
    }
}
