//! Bytes on their ways: what a prompt is loaded from, state that goes to the node that decodes, what is written.
//!
//! What goes from one node to another takes room on the sender's line and on the receiver's; it is there when both have
//! carried all of it. A peer that has a block on its disk only reads it there first, beside sending what it has read.
//! Without a network in the cluster's file nothing is read from peers, and state that has to move takes no time.

use kvarts_planner::plan::{Action, Does, Link, Source};

use super::node::{Node, Open};
use super::run::{Found, Running, Simulation, What};
use super::work::{Arrival, Work};

/// Writes that are further behind are left out: a cache need not keep everything.
const BEHIND_MS: f64 = 5000.0;

/// Where a block that another node has is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Peer {
    /// The block's place in the prompt.
    pub(super) place: u32,
    pub(super) holder: u16,
    /// From its disk, as it is not in its memory.
    pub(super) on_disk: bool,
}

impl<W: Work> Simulation<'_, W> {
    /// What another node has of a block in its host's memory or on its disk: where it is read. Memory comes before disks, then
    /// the node that has less to send and to read; of equals the one that gave the block before, then the first.
    pub(super) fn peer(&self, at: u16, (place, block): (u32, u64), before: Option<&Peer>) -> Option<Peer> {
        if self.cluster.network.is_none() || (self.cluster.dram.is_none() && self.cluster.disk.is_none()) {
            return None;
        }
        // What a peer is still loading itself it cannot give yet.
        let in_memory = |node: &Node| {
            node.dram.as_ref().is_some_and(|dram| dram.has(block))
                && node.loading.get(&block).is_none_or(|at| *at <= self.now)
        };
        if let Some(before) = before.filter(|before| !before.on_disk)
            && in_memory(&self.nodes[usize::from(before.holder)])
        {
            return Some(Peer { place, ..*before });
        }
        let mut best: Option<((bool, f64, bool), Peer)> = None;
        for holder in self.directory.of(block).iter().copied().filter(|holder| *holder != at) {
            let node = &self.nodes[usize::from(holder)];
            let on_disk = !in_memory(node);
            if on_disk && !node.disk.as_ref().is_some_and(|disk| disk.has(block)) {
                continue;
            }
            let reads = if on_disk { node.reads.queue_ms(self.now) } else { 0.0 };
            let behind = node.sends.queue_ms(self.now).max(reads);
            let rank = (on_disk, behind, before.is_none_or(|before| before.holder != holder));
            if best.is_none_or(|(least, _)| rank < least) {
                best = Some((rank, Peer { place, holder, on_disk }));
            }
        }
        best.map(|(_, peer)| peer)
    }

    /// The way from these peers, as slow as the slowest line of it.
    pub(super) fn peer_link(&self, at: u16, peers: &[Peer]) -> Link {
        let mut link = self.nodes[usize::from(at)].network.link(self.now);
        for peer in peers.chunk_by(|one, other| (one.holder, one.on_disk) == (other.holder, other.on_disk)) {
            let Some(peer) = peer.first() else { continue };
            let node = &self.nodes[usize::from(peer.holder)];
            link = slower(link, node.sends.link(self.now));
            if peer.on_disk {
                link = slower(link, node.reads.link(self.now));
            }
        }
        link
    }

    /// The way to the cold tier through a node, and from there.
    pub(super) fn cold_link(&self, at: u16, via: u16) -> Link {
        let (node, other) = (&self.nodes[usize::from(at)], &self.nodes[usize::from(via)]);
        let link = other.cold.link(self.now);
        match via != at && self.cluster.network.is_some() {
            true => slower(slower(link, other.sends.link(self.now)), node.network.link(self.now)),
            false => link,
        }
    }

    /// Asks the ways for what a plan loads; when the last of it is there.
    pub(super) fn ask(&mut self, at: u16, via: u16, arrival: &Arrival, found: &Found) -> f64 {
        let ends = found.plan.actions.iter().map(|action| self.ask_one((at, via), arrival, found, action));
        ends.fold(0.0, f64::max).max(self.now)
    }

    /// Asks the ways for what one action of a plan loads; when it is there.
    pub(super) fn ask_one(
        &mut self,
        (at, via): (u16, u16),
        arrival: &Arrival,
        found: &Found,
        action: &Action,
    ) -> f64 {
        let now = self.now;
        let Does::Load(source) = action.does else { return now };
        let node = &mut self.nodes[usize::from(at)];
        match source {
            Source::Disk => node.reads.ask(now, action.bytes),
            Source::Peer => {
                let given = |peer: &&Peer| (action.from..action.to).contains(&peer.place);
                let peers: Vec<Peer> = found.peers.iter().filter(given).copied().collect();
                self.ask_peers(at, arrival, &peers)
            }
            Source::Cold => {
                self.counted.cold_reads += 1;
                self.counted.by_other_path += u64::from(via != at);
                let read = self.nodes[usize::from(via)].cold.ask(now, action.bytes);
                read.max(self.send(via, at, now, action.bytes))
            }
            Source::Dram | Source::Hbm => node.to_dram.ask(now, action.bytes),
        }
    }

    fn ask_peers(&mut self, at: u16, arrival: &Arrival, peers: &[Peer]) -> f64 {
        let (now, mut end) = (self.now, self.now);
        for run in peers.chunk_by(|one, other| (one.holder, one.on_disk) == (other.holder, other.on_disk)) {
            let Some(Peer { holder, on_disk, .. }) = run.first().copied() else { continue };
            let blocks = run.iter().filter_map(|peer| arrival.blocks.get(peer.place as usize).copied());
            let blocks: Vec<u64> = blocks.collect();
            let bytes = run.len() as u64 * self.facts.block_bytes;
            end = end.max(self.send(holder, at, now, bytes));
            let node = &mut self.nodes[usize::from(holder)];
            if on_disk {
                end = end.max(node.reads.ask(now, bytes));
                // What others read stays as what is read here does.
                node.disk.iter_mut().for_each(|disk| disk.used(&blocks));
            } else {
                node.dram.iter_mut().for_each(|dram| blocks.iter().for_each(|block| dram.touch(*block)));
            }
        }
        end
    }

    /// Bytes go from one node to another, as they have been coming since `from`; when the last of them has come.
    fn send(&mut self, sender: u16, receiver: u16, from: f64, bytes: u64) -> f64 {
        if sender == receiver || bytes == 0 {
            return from;
        }
        self.counted.network_bytes += bytes;
        if self.cluster.network.is_none() {
            return from;
        }
        let sent = self.nodes[usize::from(sender)].sends.ask(from, bytes);
        sent.max(self.nodes[usize::from(receiver)].network.ask(from, bytes))
    }

    /// How much of a request's state the node that decodes it will have read itself, for the one that prefills.
    pub(super) fn read_by_decoder((at, decoder, via): (u16, u16, u16), found: &Found) -> u64 {
        if via == at || via != decoder { 0 } else { found.plan.bytes_from(Source::Cold) }
    }

    /// A request's state goes to the node that decodes it, less what that one has read itself. Layers go as they are
    /// computed, from the beginning of the prefill on: behind its end the last one's share is left, and what the lines have
    /// not carried by then.
    pub(super) fn move_state(&mut self, at: u16, open: Open) {
        let Some(running) = self.open.get(open as usize).and_then(Option::as_ref) else { return };
        let Running { decoder, let_in_at, read_by_decoder, .. } = *running;
        let blocks = running.arrival.input_tokens as f64 / f64::from(self.cluster.block_tokens);
        let bytes = (blocks * self.facts.block_bytes as f64) as u64;
        let bytes = bytes.saturating_sub(read_by_decoder);
        let carried = self.send(at, decoder, let_in_at, bytes);
        let last = (bytes / u64::from(self.facts.layers.max(1))) as f64;
        let line = &self.nodes[usize::from(decoder)].network;
        let share = match self.cluster.network {
            Some(_) => last / line.bytes_per_ms + line.latency_ms,
            None => 0.0,
        };
        let end = carried.max(self.now + share);
        self.at(end, What::Moved(decoder, open));
    }

    /// Writes what was computed behind what is there already: to memory, to disk, to the cold tier.
    pub(super) fn write(&mut self, at: u16, blocks: &[u64]) {
        let now = self.now;
        let single = self.cluster.disk.is_some_and(|disk| disk.single_owner);
        let owned: Vec<u64> = match single {
            true => blocks.iter().copied().filter(|block| !self.is_on_a_peer_s_disk(at, *block)).collect(),
            false => Vec::new(),
        };
        let (node, mut gone) = (&mut self.nodes[usize::from(at)], Vec::new());
        if let Some(dram) = &mut node.dram {
            blocks.iter().for_each(|block| dram.put(*block, false, |block| gone.push(block)));
        }
        if let Some(cold) = self.cold.as_mut().filter(|_| node.cold_writes.queue_ms(now) < BEHIND_MS) {
            let mut new = 0;
            for block in blocks {
                new += u64::from(!cold.has(*block));
                cold.put(*block, false, |_| ());
            }
            let bytes = new * self.facts.block_bytes;
            node.cold_writes.ask(now, bytes);
            self.counted.cold_bytes_written += bytes;
        }
        if let Some(disk) = node.disk.as_mut().filter(|_| node.writes.queue_ms(now) < BEHIND_MS) {
            let new = disk.put(if single { &owned } else { blocks }, |block| gone.push(block));
            let bytes = new * self.facts.block_bytes;
            node.writes.ask(now, bytes);
            self.counted.disk_bytes_written += bytes;
        }
        self.forget(at, &gone);
        self.remember(at, blocks);
    }

    /// What is loaded is in memory from then on, and who asks for it before waits for the same load.
    pub(super) fn keep_loaded(&mut self, at: u16, arrival: &Arrival, found: &Found, loaded_at: f64) {
        let (boundary, now) = (found.plan.boundary_blocks, self.now);
        let (mut gone, mut kept) = (Vec::new(), Vec::new());
        let node = &mut self.nodes[usize::from(at)];
        if node.loading.len() > 1 << 16 {
            node.loading.retain(|_, at| *at > now);
        }
        for run in found.runs.iter().filter(|run| run.from < boundary) {
            let some =
                arrival.blocks.get(run.from as usize..run.to.min(boundary) as usize).unwrap_or_default();
            match run.sources.iter().next() {
                Some(Source::Hbm) => some.iter().for_each(|block| node.hbm.touch(*block)),
                Some(Source::Dram) => {
                    some.iter().for_each(|block| node.dram.iter_mut().for_each(|dram| dram.touch(*block)));
                }
                source => {
                    if let (Some(Source::Disk), Some(disk)) = (source, &mut node.disk) {
                        disk.used(some);
                    }
                    for block in some {
                        node.loading.insert(*block, loaded_at);
                        if let Some(dram) = &mut node.dram {
                            dram.put(*block, false, |block| gone.push(block));
                        }
                    }
                    kept.extend_from_slice(some);
                }
            }
        }
        self.forget(at, &gone);
        self.remember(at, &kept);
    }

    /// Others learn of what a node has now.
    fn remember(&mut self, at: u16, blocks: &[u64]) {
        for block in blocks.iter().filter(|block| self.nodes[usize::from(at)].holds(**block)) {
            self.directory.add(*block, at);
        }
    }

    /// What has left a tier of a node is not there any more, unless another tier has it.
    pub(super) fn forget(&mut self, at: u16, gone: &[u64]) {
        for block in gone {
            if !self.nodes[usize::from(at)].holds(*block) {
                self.directory.remove(*block, at);
            }
        }
    }

    fn is_on_a_peer_s_disk(&self, at: u16, block: u64) -> bool {
        let on_disk = |holder: &u16| {
            let disk = self.nodes[usize::from(*holder)].disk.as_ref();
            *holder != at && disk.is_some_and(|disk| disk.has(block))
        };
        self.directory.of(block).iter().any(on_disk)
    }
}

/// Two lines in a row, as one.
fn slower(one: Link, other: Link) -> Link {
    let wait = |link: &Link| link.outstanding_bytes as f64 / link.bytes_per_ms;
    let bytes_per_ms = one.bytes_per_ms.min(other.bytes_per_ms);
    let outstanding_bytes = (wait(&one).max(wait(&other)) * bytes_per_ms) as u64;
    Link { latency_ms: one.latency_ms.max(other.latency_ms), bytes_per_ms, outstanding_bytes }
}
