//! One node: its tiers, its queues, and the steps of its engine.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use super::spec::{Cluster, Facts};
use super::tiers::{Cache, Disk, Line};
use crate::ids::IdMap;

/// A number of an open request.
pub(super) type Open = u32;

/// What a node does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Mixed,
    Prefill,
    Decode,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) role: Role,
    pub(super) hbm: Cache,
    pub(super) dram: Option<Cache>,
    pub(super) disk: Option<Disk>,
    pub(super) to_dram: Line,
    /// What goes from device memory to the host's: state of sequences that are stopped.
    pub(super) from_hbm: Line,
    pub(super) reads: Line,
    pub(super) writes: Line,
    /// What comes from other nodes, and what goes to them.
    pub(super) network: Line,
    pub(super) sends: Line,
    /// Reads of the cold tier, and writes: a way takes as much in each direction, at the same time.
    pub(super) cold: Line,
    pub(super) cold_writes: Line,
    /// When blocks that are being loaded are there: who wants them too waits and does not load them again.
    pub(super) loading: IdMap<f64>,
    /// Bytes of the cold tier that requests will read by this node's way once they are let in.
    pub(super) cold_due: u64,
    /// Not begun: first come, first served among those whose time has come.
    pub(super) waiting: VecDeque<Open>,
    /// Their state has come from the nodes that prefilled them, and waits in the host's memory for room.
    pub(super) moved: VecDeque<Open>,
    /// They were stopped for want of memory, and their state waits in the host's memory; and room for the state of others.
    pub(super) swapped: VecDeque<Open>,
    pub(super) swap_blocks: u64,
    /// Prefills under way.
    pub(super) prefilling: VecDeque<Open>,
    /// Sequences that decode, by the step in which they end.
    pub(super) decoding: BinaryHeap<Reverse<(u64, Open)>>,
    /// Prefills and sequences that may be stopped, in the order in which they were let in; and how many ever were.
    pub(super) running: BTreeMap<u64, Open>,
    pub(super) let_in: u64,
    /// When which of them needs another block: step, place in that order, request.
    pub(super) growing: BinaryHeap<Reverse<(u64, u64, Open)>>,
    pub(super) context: u64,
    pub(super) steps: u64,
    /// What is prefilled in the step that runs.
    pub(super) chunks: Vec<(Open, u64)>,
    /// When the loads of the step that runs have ended.
    pub(super) loads_end: f64,
    pub(super) busy: bool,
    /// When the step that runs ends.
    pub(super) step_ends: f64,
    /// The earliest wake-up that was asked for.
    pub(super) wakes_at: f64,
    /// Tokens that are to be computed by what waits and runs here.
    pub(super) tokens_due: u64,
    /// Requests that are decoded here and have not ended, wherever they are by now; and the tokens of their prompts.
    pub(super) assigned: u64,
    pub(super) assigned_tokens: u64,
}

impl Node {
    pub(super) fn new(role: Role, cluster: &Cluster, facts: &Facts) -> Self {
        let token_ns = kvarts_planner::keep::token_ns(&facts.times);
        let worth =
            kvarts_planner::keep::worth(facts.block_bytes / u64::from(cluster.block_tokens.max(1)), token_ns);
        let blocks = |gb: f64| (gb * 1e9 / facts.block_bytes.max(1) as f64) as u64;
        let line = |way: Option<(f64, f64)>| {
            let (gb_per_s, latency_ms) = way.unwrap_or((1e-6, 0.0));
            Line::new(gb_per_s, latency_ms)
        };
        Self {
            role,
            hbm: Cache::new(blocks(cluster.hbm.gb)),
            dram: cluster.dram.map(|dram| Cache::new(blocks(dram.gb))),
            disk: cluster.disk.map(|disk| Disk::new(blocks(disk.gb), disk.policy.engine(), worth)),
            to_dram: line(cluster.dram.map(|dram| (dram.gb_per_s, dram.latency_ms))),
            from_hbm: line(cluster.dram.map(|dram| (dram.gb_per_s, dram.latency_ms))),
            reads: line(cluster.disk.map(|disk| (disk.gb_per_s, disk.latency_ms))),
            writes: line(cluster.disk.map(|disk| (disk.write_gb_per_s, disk.latency_ms))),
            network: line(cluster.network.map(|way| (way.gb_per_s, way.latency_ms))),
            sends: line(cluster.network.map(|way| (way.gb_per_s, way.latency_ms))),
            cold: line(cluster.cold.map(|cold| (cold.gb_per_s, cold.latency_ms))),
            cold_writes: line(cluster.cold.map(|cold| (cold.gb_per_s, cold.latency_ms))),
            loading: IdMap::default(),
            cold_due: 0,
            waiting: VecDeque::new(),
            moved: VecDeque::new(),
            swapped: VecDeque::new(),
            swap_blocks: blocks(cluster.engine.swap_gb),
            prefilling: VecDeque::new(),
            decoding: BinaryHeap::new(),
            running: BTreeMap::new(),
            let_in: 0,
            growing: BinaryHeap::new(),
            context: 0,
            steps: 0,
            chunks: Vec::new(),
            loads_end: 0.0,
            busy: false,
            step_ends: 0.0,
            wakes_at: f64::INFINITY,
            tokens_due: 0,
            assigned: 0,
            assigned_tokens: 0,
        }
    }

    /// Requests that wait or run here.
    pub(super) fn load(&self) -> u64 {
        let waiting = self.waiting.len() + self.moved.len() + self.swapped.len();
        (waiting + self.prefilling.len() + self.decoding.len()) as u64
    }

    /// How long a read of the cold tier by this node's way waits for those that were promised before.
    pub(super) fn cold_queue_ms(&self, now: f64) -> f64 {
        self.cold.queue_ms(now) + self.cold_due as f64 / self.cold.bytes_per_ms
    }

    /// Whether a block is in memory or on a disk here.
    pub(super) fn holds(&self, block: u64) -> bool {
        self.hbm.has(block)
            || self.dram.as_ref().is_some_and(|dram| dram.has(block))
            || self.disk.as_ref().is_some_and(|disk| disk.has(block))
    }
}
