//! Steps of an engine: who is in them, with how many tokens, and who is stopped for want of memory.
//!
//! The rule is that of vLLM's scheduler, first come, first served. Of a step's tokens each sequence that decodes gets one;
//! then those whose prefill is under way, then those who wait get what is left. A sequence holds the blocks of what it has
//! computed and of what the step computes; one that needs a block where none is free stops the one that was let in last,
//! which gives all of its blocks back, waits before all others and computes its state again, as far as its blocks have
//! left memory by then, unless the engine has room for stopped state in the host's memory (`swap`). A step that stops a
//! sequence lets none in. The first of those that wait is let in when blocks for its
//! whole prompt are free; those that came after it wait, too. Nodes that decode only keep the same rule, and begin with those
//! that were stopped: what has come from other nodes waits behind them.
//!
//! Recordings of the engine itself hold this module to it (`tests/sim_engine.rs`).

use std::cmp::Reverse;

use kvarts_planner::cost::Decode;

use super::figures::Batch;
use super::node::Open;
use super::run::{Running, Simulation, What};
use super::spec::Prefetch;
use super::times::Step;
use super::work::Work;

/// Requests of a queue that are looked at for one whose time has come.
const LOOKED_AT: usize = 64;

/// Who prefills in a step, and how many tokens.
pub(super) type Chunks = Vec<(Open, u64)>;

impl<W: Work> Simulation<'_, W> {
    /// Begins a step, if there is something to do and none runs.
    pub(super) fn kick(&mut self, at: u16) {
        if self.nodes[usize::from(at)].busy {
            return;
        }
        while let Some(arrival) = self.work.before_step(self.nodes[usize::from(at)].steps, self.now) {
            self.take_in(arrival);
        }
        let mut stopped = Vec::new();
        self.nodes[usize::from(at)].loads_end = 0.0;
        self.grow(at, &mut stopped);
        let node = &mut self.nodes[usize::from(at)];
        let mut chunks = std::mem::take(&mut node.chunks);
        chunks.clear();
        let mut budget =
            u64::from(self.cluster.engine.chunk_tokens).saturating_sub(node.decoding.len() as u64);
        self.go_on(at, &mut budget, &mut chunks, &mut stopped);
        if stopped.is_empty() {
            self.swap_in(at, &mut budget, &mut chunks);
            self.admit(at, &mut budget, &mut chunks);
            self.take_moved(at, &mut budget);
        }
        let mut step = Step::default();
        for (open, chunk) in &chunks {
            let from = self.running(*open).map_or(0, |running| running.at_token);
            self.facts.times.prefill(&mut step, from, *chunk);
        }
        let node = &mut self.nodes[usize::from(at)];
        let (batch, context) = (node.decoding.len() as u64, node.context);
        node.chunks = chunks;
        if node.chunks.is_empty() && batch == 0 {
            return self.wake_later(at);
        }
        self.facts.times.decode(&mut step, batch, context);
        let ms = self.with_loads(at, self.facts.times.step_ms(&step));
        if batch > 0 {
            self.counted.interference_ms += ms - self.facts.times.decode_ms(batch, context);
            self.counted.decoding_ms += ms;
        }
        self.note(at, ms, stopped);
        self.nodes[usize::from(at)].busy = true;
        let end = self.now + ms;
        self.nodes[usize::from(at)].step_ends = end;
        self.at(end, What::Step(at));
    }

    fn running(&self, open: Open) -> Option<&Running> {
        self.open.get(open as usize).and_then(Option::as_ref)
    }

    /// The step is written down, if steps are.
    fn note(&mut self, at: u16, ms: f64, stopped: Vec<u64>) {
        if self.counted.schedule.is_none() {
            return;
        }
        let node = &self.nodes[usize::from(at)];
        let tokens = node.running.values().filter_map(|open| {
            let chunk = node.chunks.iter().find(|(other, _)| other == open).map(|(_, chunk)| *chunk);
            let running = self.running(*open)?;
            Some((running.number, chunk.or(running.ends_at.map(|_| 1))?))
        });
        let batch = Batch { node: at, at_ms: self.now, ms, tokens: tokens.collect(), stopped };
        self.counted.schedule.iter_mut().for_each(|schedule| schedule.push(batch.clone()));
    }

    /// Sequences that decode get the blocks that they need for the next step.
    fn grow(&mut self, at: u16, stopped: &mut Vec<u64>) {
        let node = &mut self.nodes[usize::from(at)];
        let (next, mut due) = (node.steps + 1, Vec::new());
        while let Some(Reverse((step, rank, open))) =
            node.growing.peek().copied().filter(|one| one.0.0 <= next)
        {
            node.growing.pop();
            // One that was stopped or has ended stands there under a rank that is not used again.
            if node.running.get(&rank) == Some(&open) {
                due.push((rank, open, step));
            }
        }
        due.sort_unstable();
        for (rank, open, step) in due {
            if !self.nodes[usize::from(at)].running.contains_key(&rank) {
                continue;
            }
            self.name_filled(at, open);
            if !self.make_room(at, open, 1, stopped) {
                continue;
            }
            let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { continue };
            running.taken += 1;
            let again = step + u64::from(self.cluster.block_tokens);
            let (node, mut gone) = (&mut self.nodes[usize::from(at)], Vec::new());
            if running.ends_at.is_some_and(|end| again <= end) {
                node.growing.push(Reverse((again, rank, open)));
            }
            node.hbm.take(1, |block| gone.push(block));
            self.forget(at, &gone);
        }
    }

    /// Stops those that were let in last until `blocks` are free; whether the one that needs them still runs.
    fn make_room(&mut self, at: u16, open: Open, blocks: u64, stopped: &mut Vec<u64>) -> bool {
        while !self.nodes[usize::from(at)].hbm.fits(blocks) {
            let last = self.nodes[usize::from(at)].running.last_key_value().map(|(_, last)| *last);
            let Some(last) = last else { return false };
            stopped.extend(self.running(last).map(|running| running.number));
            self.stop(at, last);
            if last == open {
                return false;
            }
        }
        true
    }

    /// It gives back what it has and waits before all others: to be taken back, or to be computed again.
    fn stop(&mut self, at: u16, open: Open) {
        self.name_filled(at, open);
        self.let_go(at, open);
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        let node = &mut self.nodes[usize::from(at)];
        let end = running.ends_at.take();
        let again = if let Some(end) = end {
            node.decoding.retain(|Reverse((_, other))| *other != open);
            running.made = running.arrival.output_tokens - (end - node.steps);
            node.context -= running.target() - 1;
            running.target()
        } else {
            node.prefilling.retain(|other| *other != open);
            running.at_token
        };
        self.counted.preemptions += 1;
        if self.swap_out(at, open, end.is_some()) {
            return;
        }
        let node = &mut self.nodes[usize::from(at)];
        node.tokens_due += again;
        node.waiting.push_front(open);
        if let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) {
            (running.at_token, running.stopped) = (0, running.stopped.saturating_add(1));
        }
    }

    /// Blocks that an answer has filled get their names, where these are known.
    pub(super) fn name_filled(&mut self, at: u16, open: Open) {
        let block_tokens = u64::from(self.cluster.block_tokens);
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        let (node, mut gone) = (&mut self.nodes[usize::from(at)], Vec::new());
        let Some(end) = running.ends_at.filter(|_| node.running.get(&running.rank) == Some(&open)) else {
            return;
        };
        let there =
            running.arrival.input_tokens + running.arrival.output_tokens - end.saturating_sub(node.steps) - 1;
        let filled = ((there / block_tokens) as usize).min(running.arrival.blocks.len());
        while running.pinned < filled && running.taken > 0 {
            let Some(block) = running.arrival.blocks.get(running.pinned) else { break };
            node.hbm.name_taken(*block, |block| gone.push(block));
            running.pinned += 1;
            running.taken -= 1;
        }
        self.forget(at, &gone);
    }

    /// Blocks for everything up to a token are held, by name where they will be full.
    pub(super) fn hold(&mut self, at: u16, open: Open, up_to: u64) {
        let block_tokens = u64::from(self.cluster.block_tokens);
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        let (node, mut gone) = (&mut self.nodes[usize::from(at)], Vec::new());
        let named = ((up_to / block_tokens) as usize).min(running.arrival.blocks.len());
        while running.pinned < named {
            let Some(block) = running.arrival.blocks.get(running.pinned) else { break };
            if running.taken > 0 {
                running.taken -= 1;
                node.hbm.name_taken(*block, |block| gone.push(block));
            } else {
                node.hbm.put(*block, true, |block| gone.push(block));
            }
            running.pinned += 1;
        }
        let more = up_to.div_ceil(block_tokens).saturating_sub(running.pinned as u64 + running.taken);
        running.taken += more;
        node.hbm.take(more, |block| gone.push(block));
        self.forget(at, &gone);
    }

    /// Prefills under way get what is left of the step's tokens.
    fn go_on(&mut self, at: u16, budget: &mut u64, chunks: &mut Chunks, stopped: &mut Vec<u64>) {
        let (mut place, block_tokens) = (0, u64::from(self.cluster.block_tokens));
        while *budget > 0 {
            let Some(open) = self.nodes[usize::from(at)].prefilling.get(place).copied() else { return };
            let Some(running) = self.running(open) else { return };
            let chunk = (running.target() - running.at_token).min(*budget);
            let up_to = running.at_token + chunk;
            let held = running.pinned as u64 + running.taken;
            let more = up_to.div_ceil(block_tokens).saturating_sub(held);
            if !self.make_room(at, open, more, stopped) {
                return;
            }
            self.hold(at, open, up_to);
            chunks.push((open, chunk));
            *budget -= chunk;
            place += 1;
        }
    }

    fn wake_later(&mut self, at: u16) {
        let starts = self.nodes[usize::from(at)].waiting.iter().take(LOOKED_AT);
        let starts = starts.filter_map(|open| self.running(*open)).map(|one| one.starts_at);
        let first = starts.filter(|start| *start > self.now).fold(f64::INFINITY, f64::min);
        if first < self.nodes[usize::from(at)].wakes_at {
            self.nodes[usize::from(at)].wakes_at = first;
            self.at(first, What::Wake(at));
        }
    }

    /// Lets in who waits, as long as there is room and the step has tokens left.
    fn admit(&mut self, at: u16, budget: &mut u64, chunks: &mut Chunks) {
        let (mut looked, block_tokens) = (0, u64::from(self.cluster.block_tokens));
        while looked < LOOKED_AT && *budget > 0 {
            let node = &self.nodes[usize::from(at)];
            let all = (node.prefilling.len() + node.decoding.len()) as u64;
            let Some(open) = node.waiting.get(looked).copied() else { return };
            if !node.swapped.is_empty() || all >= u64::from(self.cluster.engine.batch_max) {
                return;
            }
            let Some(running) = self.running(open) else { return };
            if running.starts_at > self.now {
                looked += 1;
                continue;
            }
            let found = match self.cluster.engine.prefetch.is_in_step() {
                true => self.look(at, running.via, &running.arrival),
                false => None,
            };
            let loaded = found.as_ref().map_or(0, |found| found.plan.boundary_tokens);
            let there = self.there_now(at, running).max(loaded);
            let hits = running.arrival.blocks.iter().take((there / block_tokens) as usize);
            let shared = hits.filter(|block| node.hbm.is_pinned(**block)).count() as u64;
            let target = running.target();
            if !node.hbm.fits(target.div_ceil(block_tokens) - shared) {
                // First come, first served: those behind it wait as well.
                return;
            }
            let node = &mut self.nodes[usize::from(at)];
            node.waiting.remove(looked);
            node.let_in += 1;
            let rank = node.let_in;
            node.running.insert(rank, open);
            node.prefilling.push_back(open);
            self.begin_prefill(at, open, rank, there);
            if let Some(found) = found {
                self.load_in_step(at, open, &found);
            }
            let chunk = (target - there).min(*budget);
            self.hold(at, open, there + chunk);
            chunks.push((open, chunk));
            *budget -= chunk;
        }
    }

    /// Lets in requests whose state has come from other nodes: they hold blocks for it and for the next token.
    fn take_moved(&mut self, at: u16, budget: &mut u64) {
        let block_tokens = u64::from(self.cluster.block_tokens);
        while *budget > 0 {
            let node = &self.nodes[usize::from(at)];
            let Some(open) = node.moved.front().copied() else { return };
            let Some(running) = self.running(open) else { return };
            let there = running.target() - 1;
            let named = running.arrival.blocks.iter().take((there / block_tokens) as usize);
            let shared = named.filter(|block| node.hbm.is_pinned(**block)).count() as u64;
            let full = node.running.len() as u64 >= u64::from(self.cluster.engine.batch_max);
            let needed = running.target().div_ceil(block_tokens) - shared;
            let others = !node.waiting.is_empty() || !node.swapped.is_empty();
            if full || others || !node.hbm.fits(needed) {
                return;
            }
            self.nodes[usize::from(at)].moved.pop_front();
            self.decode_on(at, open, there);
            *budget -= 1;
        }
    }

    /// A sequence is let in again, behind all others.
    pub(super) fn let_in(&mut self, at: u16, open: Open) {
        let node = &mut self.nodes[usize::from(at)];
        node.let_in += 1;
        let rank = node.let_in;
        node.running.insert(rank, open);
        if let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) {
            running.rank = rank;
        }
    }

    /// A sequence whose state is in the host's memory decodes on: it holds blocks for what is there and for the next token.
    pub(super) fn decode_on(&mut self, at: u16, open: Open, there: u64) {
        let block_tokens = u64::from(self.cluster.block_tokens);
        self.let_in(at, open);
        self.hold(at, open, there);
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        if (running.pinned as u64 + running.taken) * block_tokens <= there {
            running.taken += 1;
            let (node, mut gone) = (&mut self.nodes[usize::from(at)], Vec::new());
            node.hbm.take(1, |block| gone.push(block));
            self.forget(at, &gone);
        }
        self.decode(at, open);
    }

    /// How long a step takes with the loads that began with it.
    fn with_loads(&self, at: u16, ms: f64) -> f64 {
        let load = (self.nodes[usize::from(at)].loads_end - self.now).max(0.0);
        match self.cluster.engine.prefetch {
            // Layers come evenly: either the last one to come is computed last, or computing ends behind the first one.
            Prefetch::Layerwise if load > 0.0 => {
                let layers = f64::from(self.facts.layers.max(1));
                (load + ms / layers).max(load / layers + ms)
            }
            _ => load + ms,
        }
    }

    /// Tokens whose state a request finds when it is let in: what device memory has by then, or what was loaded for it.
    fn there_now(&self, at: u16, running: &Running) -> u64 {
        let block_tokens = u64::from(self.cluster.block_tokens);
        let full = self.full_blocks(running.target() - 1) as usize;
        let hbm = &self.nodes[usize::from(at)].hbm;
        let near =
            running.arrival.blocks.iter().take(full).take_while(|block| hbm.has(**block)).count() as u64;
        if running.stopped > 0 || Self::is_near(&running.coming) {
            return near * block_tokens;
        }
        self.loaded_by_now(&running.coming).max(near) * block_tokens
    }

    fn begin_prefill(&mut self, at: u16, open: Open, rank: u64, there: u64) {
        let block_tokens = u64::from(self.cluster.block_tokens);
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return };
        let was = std::mem::replace(&mut running.at_token, there);
        (running.rank, running.let_in_at) = (rank, self.now);
        let node = &mut self.nodes[usize::from(at)];
        node.tokens_due = node.tokens_due + was - there;
        if running.stopped > 0 || self.cluster.engine.prefetch.is_in_step() {
            return;
        }
        let (arrival, coming) = (std::mem::take(&mut running.arrival), std::mem::take(&mut running.coming));
        self.note_hits(&arrival, &coming, self.loaded_by_now(&coming), there / block_tokens);
        if let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) {
            running.arrival = arrival;
        }
    }

    pub(super) fn step_ended(&mut self, at: u16) {
        let node = &mut self.nodes[usize::from(at)];
        node.busy = false;
        node.steps += 1;
        node.context += node.decoding.len() as u64;
        let (steps, mut ended) = (node.steps, Vec::new());
        while node.decoding.peek().is_some_and(|Reverse((step, _))| *step <= steps) {
            ended.extend(node.decoding.pop().map(|Reverse((_, open))| open));
        }
        ended.sort_by_key(|open| self.running(*open).map_or(0, |running| running.rank));
        ended.into_iter().for_each(|open| self.finish(at, open));
        let chunks = std::mem::take(&mut self.nodes[usize::from(at)].chunks);
        for (open, chunk) in &chunks {
            self.nodes[usize::from(at)].tokens_due -= chunk;
            let Some(running) = self.open.get_mut(*open as usize).and_then(Option::as_mut) else { continue };
            running.at_token += chunk;
            if running.at_token >= running.target() {
                self.nodes[usize::from(at)].prefilling.retain(|other| other != open);
                self.prefilled(at, *open);
            }
        }
        self.nodes[usize::from(at)].chunks = chunks;
        self.kick(at);
    }
}
