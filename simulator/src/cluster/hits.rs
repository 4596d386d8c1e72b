//! Where the blocks of a request come from, and which of them are there when it is let in: only these are hits.
//!
//! What a request finds is written down when it comes, run by run, with the time in which each run is on its way. It is counted once,
//! when the request is let in: a block that has come by then is a hit of its own source, one that has not is a miss, and so
//! are those behind it, since state is of use only without holes. So the sum of hits and misses is what was asked for.

use kvarts_planner::plan::{Does, Plan, Source};

use super::run::{Found, Simulation};
use super::spec::Prefetch;
use super::work::{Arrival, Work};

/// Blocks of a prompt that come from one place, one behind the other.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Coming {
    source: Source,
    blocks: u64,
    /// Between these they come evenly.
    begins_at: f64,
    ends_at: f64,
}

impl Coming {
    /// How many of them are there.
    fn come(&self, now: f64) -> u64 {
        if now >= self.ends_at {
            return self.blocks;
        }
        let part = (now - self.begins_at).max(0.0) / (self.ends_at - self.begins_at).max(1e-9);
        (self.blocks as f64 * part) as u64
    }
}

/// Leading blocks that are there by now.
fn come(coming: &[Coming], now: f64) -> u64 {
    let mut sum = 0;
    for run in coming {
        let come = run.come(now);
        sum += come;
        if come < run.blocks {
            break;
        }
    }
    sum
}

impl Prefetch {
    /// Whether a request may begin before all that is loaded for it is there, and computes the rest.
    fn leaves_the_late(self) -> bool {
        matches!(self, Self::BestEffort | Self::Timeout)
    }
}

impl<W: Work> Simulation<'_, W> {
    /// Asks the ways for what a plan loads: when the last of it is there, and what comes when.
    pub(super) fn ask_each(
        &mut self,
        at: u16,
        via: u16,
        arrival: &Arrival,
        found: &Found,
    ) -> (f64, Vec<Coming>) {
        let (now, late) = (self.now, self.cluster.engine.prefetch.leaves_the_late());
        let links = self.links(at, via, &found.peers);
        let (mut last, mut coming) = (now, Vec::new());
        for action in &found.plan.actions {
            let blocks = u64::from(action.to - action.from);
            let Does::Load(source) = action.does else {
                coming.push(Coming { source: Source::Hbm, blocks, begins_at: now, ends_at: now });
                continue;
            };
            let mut ends_at = self.ask_one((at, via), arrival, found, action);
            last = last.max(ends_at);
            if late && source == Source::Dram {
                // What others load already is there no sooner than for them.
                let blocks = arrival.blocks.get(action.from as usize..action.to as usize);
                let loading = &self.nodes[usize::from(at)].loading;
                let ready = blocks.unwrap_or_default().iter().filter_map(|block| loading.get(block));
                ends_at = ready.copied().fold(ends_at, f64::max);
            }
            let takes = links.get(source).map_or(0.0, |link| action.bytes as f64 / link.bytes_per_ms);
            let begins_at = (ends_at - takes).max(now);
            coming.push(Coming { source, blocks, begins_at, ends_at });
        }
        (last, coming)
    }

    /// Blocks that were loaded for a request by now, or that it waits for whenever they come.
    pub(super) fn loaded_by_now(&self, coming: &[Coming]) -> u64 {
        match self.cluster.engine.prefetch.leaves_the_late() {
            true => come(coming, self.now),
            false => coming.iter().map(|run| run.blocks).sum(),
        }
    }

    /// Whether all of it is in device memory: then what counts is what is there when it is let in.
    pub(super) fn is_near(coming: &[Coming]) -> bool {
        coming.iter().all(|run| run.source == Source::Hbm)
    }

    /// What a plan of which nothing is late brings.
    pub(super) fn coming(plan: &Plan, now: f64) -> Vec<Coming> {
        let source = |does: Does| match does {
            Does::Load(source) => source,
            Does::Use | Does::Recompute | Does::LeaveOut => Source::Hbm,
        };
        let run = |from: u32, to: u32, does: Does| Coming {
            source: source(does),
            blocks: u64::from(to - from),
            begins_at: now,
            ends_at: now,
        };
        plan.actions.iter().map(|action| run(action.from, action.to, action.does)).collect()
    }

    /// A request is let in with `there` leading blocks, of which `loaded` came for it. The others that are there are in device
    /// memory since, because others have computed them.
    pub(super) fn note_hits(&mut self, arrival: &Arrival, coming: &[Coming], loaded: u64, there: u64) {
        let block_tokens = u64::from(self.cluster.block_tokens);
        let all = arrival.input_tokens.div_ceil(block_tokens).min(arrival.blocks.len() as u64);
        let there = there.min(all);
        let hits = &mut self.counted.hits;
        let mut left = loaded.min(there);
        hits.hbm += there - left;
        for run in coming {
            let count = run.blocks.min(left);
            left -= count;
            *match run.source {
                Source::Hbm => &mut hits.hbm,
                Source::Dram => &mut hits.dram,
                Source::Disk => &mut hits.disk,
                Source::Peer => &mut hits.peer,
                Source::Cold => &mut hits.cold,
            } += count;
        }
        hits.miss += all - there;
        self.counted.computed_tokens += arrival.input_tokens.saturating_sub(there * block_tokens);
        self.counted.input_tokens += arrival.input_tokens;
        if let Some(slice) = self.counted.slice(self.now) {
            slice.hits += there;
            slice.blocks += all;
        }
    }
}
