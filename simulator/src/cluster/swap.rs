//! Sequences that were stopped for want of device memory and whose state waits in the host's memory.
//!
//! An engine with room for it (`engine.swap_gb`) copies the state of a sequence that is stopped there, and nothing of it is
//! computed again; one without, or whose room is full, computes it again (see `batch`). The step that stops a sequence waits
//! for the copy, since others get its blocks, and the step that takes it back waits for what has left device memory
//! meanwhile. They come back in the order in which they were let in, before any request that waits, and in no step that stops another one.

use super::batch::Chunks;
use super::node::Open;
use super::run::{Running, Simulation};
use super::work::Work;

/// What of a sequence is in the host's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Swapped {
    blocks: u64,
    /// Its prompt was computed, and parts of the answer.
    decodes: bool,
}

impl<W: Work> Simulation<'_, W> {
    /// Copies the state of a sequence that is being stopped and has given its blocks back; whether there was room for that.
    pub(super) fn swap_out(&mut self, at: u16, open: Open, decodes: bool) -> bool {
        let (now, block_tokens) = (self.now, u64::from(self.cluster.block_tokens));
        let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) else { return false };
        if decodes {
            running.at_token = running.target() - 1;
        }
        let blocks = running.at_token.div_ceil(block_tokens);
        let node = &mut self.nodes[usize::from(at)];
        if blocks == 0 || blocks > node.swap_blocks {
            return false;
        }
        node.swap_blocks -= blocks;
        running.swapped = Some(Swapped { blocks, decodes });
        let end = node.from_hbm.ask(now, blocks * self.facts.block_bytes);
        node.loads_end = node.loads_end.max(end);
        node.swapped.push_front(open);
        self.counted.swapped_bytes += blocks * self.facts.block_bytes;
        true
    }

    /// Takes back those for whose prompt and answer so far there is room.
    pub(super) fn swap_in(&mut self, at: u16, budget: &mut u64, chunks: &mut Chunks) {
        let block_tokens = u64::from(self.cluster.block_tokens);
        while *budget > 0 {
            let node = &self.nodes[usize::from(at)];
            let Some(open) = node.swapped.front().copied() else { return };
            let Some(running) = self.open.get(open as usize).and_then(Option::as_ref) else { return };
            let Running { at_token: there, swapped: Some(swapped), .. } = *running else { return };
            let target = running.target();
            let named = running.arrival.blocks.iter().take((there / block_tokens) as usize);
            let shared = named.clone().filter(|block| node.hbm.is_pinned(**block)).count() as u64;
            let here = named.filter(|block| node.hbm.has(**block)).count() as u64;
            let full = node.running.len() as u64 >= u64::from(self.cluster.engine.batch_max);
            if full || !node.hbm.fits(target.div_ceil(block_tokens) - shared) {
                return;
            }
            let bytes = swapped.blocks.saturating_sub(here) * self.facts.block_bytes;
            let node = &mut self.nodes[usize::from(at)];
            node.swapped.pop_front();
            node.swap_blocks += swapped.blocks;
            let end = node.to_dram.ask(self.now, bytes);
            node.loads_end = node.loads_end.max(end);
            self.counted.swapped_bytes += bytes;
            if let Some(running) = self.open.get_mut(open as usize).and_then(Option::as_mut) {
                running.swapped = None;
            }
            if swapped.decodes {
                self.decode_on(at, open, there);
                *budget -= 1;
            } else {
                self.let_in(at, open);
                self.nodes[usize::from(at)].prefilling.push_back(open);
                let chunk = (target - there).min(*budget);
                self.hold(at, open, there + chunk);
                chunks.push((open, chunk));
                *budget -= chunk;
            }
        }
    }
}
