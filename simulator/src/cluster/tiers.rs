//! Tiers of a node: caches in memory, the disk with the engine's own policy, and ways with queues.

use kvarts_store::engine::{Candidate, EvictionPolicy, STEPS_PER_BUDGET};

use crate::ids::IdMap;

const NONE: u32 = u32::MAX;

/// One place in a list.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Its name, if it has one.
    block: Option<u64>,
    before: u32,
    after: u32,
    /// Requests that need it; it is in the list while there are none.
    refs: u32,
}

/// Blocks in memory, as engines keep them: room that was never used is taken first, then what has been free the longest,
/// whether it has a name (and may be a hit until then) or none.
#[derive(Debug)]
pub(super) struct Cache {
    capacity: u64,
    places: IdMap<u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    first: u32,
    last: u32,
    /// Places in the list: with a name or without.
    listed: u64,
    /// Room that is taken by what has no name here.
    taken: u64,
    pinned: u64,
}

impl Cache {
    pub(super) fn new(capacity: u64) -> Self {
        let (places, slots, free) = (IdMap::default(), Vec::new(), Vec::new());
        Self { capacity, places, slots, free, first: NONE, last: NONE, listed: 0, taken: 0, pinned: 0 }
    }

    pub(super) fn has(&self, block: u64) -> bool {
        self.places.contains_key(&block)
    }

    /// Whether a request needs it.
    pub(super) fn is_pinned(&self, block: u64) -> bool {
        self.places.get(&block).is_some_and(|at| self.slots[*at as usize].refs > 0)
    }

    /// All that have names, in no order.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.places.keys().copied()
    }

    /// Whether `blocks` more blocks can be kept for requests.
    pub(super) fn fits(&self, blocks: u64) -> bool {
        self.pinned + self.taken + blocks <= self.capacity
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Blocks that requests do not hold.
    pub(super) fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.pinned + self.taken)
    }

    fn unlink(&mut self, at: u32) {
        let Slot { before, after, .. } = self.slots[at as usize];
        match before {
            NONE => self.first = after,
            _ => self.slots[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            _ => self.slots[after as usize].before = before,
        }
        self.listed -= 1;
    }

    fn link(&mut self, at: u32) {
        let last = self.last;
        let slot = &mut self.slots[at as usize];
        (slot.before, slot.after) = (last, NONE);
        match last {
            NONE => self.first = at,
            _ => self.slots[last as usize].after = at,
        }
        self.last = at;
        self.listed += 1;
    }

    fn add(&mut self, block: Option<u64>) -> u32 {
        let slot = Slot { block, before: NONE, after: NONE, refs: 0 };
        let at = match self.free.pop() {
            Some(at) => {
                self.slots[at as usize] = slot;
                at
            }
            None => {
                self.slots.push(slot);
                self.slots.len() as u32 - 1
            }
        };
        self.link(at);
        at
    }

    /// The block is used now.
    pub(super) fn touch(&mut self, block: u64) {
        if let Some(at) = self.places.get(&block).copied().filter(|at| self.slots[*at as usize].refs == 0) {
            self.unlink(at);
            self.link(at);
        }
    }

    /// Keeps a block, for a request if `pin`; tells what leaves for it. Without room it is not kept.
    pub(super) fn put(&mut self, block: u64, pin: bool, mut gone: impl FnMut(u64)) {
        let at = match self.places.get(&block).copied() {
            Some(at) => at,
            None => {
                if !self.make_room(1, &mut gone) && !pin {
                    return;
                }
                let at = self.add(Some(block));
                self.places.insert(block, at);
                at
            }
        };
        if pin {
            if self.slots[at as usize].refs == 0 {
                self.unlink(at);
                self.pinned += 1;
            }
            self.slots[at as usize].refs += 1;
        } else {
            self.touch(block);
        }
    }

    /// One of the requests that pinned it does not need it any more.
    pub(super) fn unpin(&mut self, block: u64, gone: impl FnMut(u64)) {
        let Some(at) = self.places.get(&block).copied() else { return };
        let slot = &mut self.slots[at as usize];
        slot.refs = slot.refs.saturating_sub(1);
        if slot.refs == 0 {
            self.pinned -= 1;
            self.link(at);
            self.make_room(0, gone);
        }
    }

    /// A block that no request needs is not kept any longer; whether it was there.
    pub(super) fn drop_unpinned(&mut self, block: u64) -> bool {
        let Some(at) = self.places.get(&block).copied().filter(|at| self.slots[*at as usize].refs == 0)
        else {
            return false;
        };
        self.unlink(at);
        self.free.push(at);
        self.places.remove(&block);
        true
    }

    /// Room without names is taken.
    pub(super) fn take(&mut self, blocks: u64, gone: impl FnMut(u64)) {
        self.make_room(blocks, gone);
        self.taken += blocks;
    }

    /// It is given back, and taken again when all that has been free for longer is.
    pub(super) fn give(&mut self, blocks: u64) {
        self.taken -= blocks;
        for _ in 0..blocks {
            if self.pinned + self.taken + self.listed < self.capacity {
                self.add(None);
            }
        }
    }

    /// Room that was taken has a name from now on, and is pinned; if the name is there already, its room is given back.
    pub(super) fn name_taken(&mut self, block: u64, gone: impl FnMut(u64)) {
        self.taken -= 1;
        let there = self.has(block);
        self.put(block, true, gone);
        if there {
            self.taken += 1;
            self.give(1);
        }
    }

    fn make_room(&mut self, more: u64, mut gone: impl FnMut(u64)) -> bool {
        while self.pinned + self.taken + self.listed + more > self.capacity {
            let at = self.first;
            if at == NONE {
                return false;
            }
            self.unlink(at);
            self.free.push(at);
            if let Some(block) = self.slots[at as usize].block {
                self.places.remove(&block);
                gone(block);
            }
        }
        true
    }
}

/// What the disk knows of a block, as the engine's index does.
#[derive(Clone, Copy, Debug)]
struct Kept {
    step: u64,
    frequency: u8,
    tip: bool,
    passed: bool,
    /// Which of those that stand in a queue is the right one.
    stamp: u32,
}

/// Kinds of blocks that rank alike but for their age: frequency, tip, passed.
const KINDS: usize = 16;

/// The disk tier: which block leaves is the engine's policy's to say. Blocks of one kind stand in the order of their
/// age, so the one that ranks highest is the oldest of some kind.
#[derive(Debug)]
pub(super) struct Disk {
    capacity: u64,
    policy: EvictionPolicy,
    /// What a byte is worth: see [`kvarts_planner::keep`].
    worth: i8,
    blocks: IdMap<Kept>,
    queues: Vec<std::collections::VecDeque<(u64, u32)>>,
    steps: u64,
    written_in_step: u64,
    stamps: u32,
}

impl Kept {
    fn kind(&self) -> usize {
        let bits = [self.tip, self.passed];
        usize::from(self.frequency.min(3))
            | bits.iter().enumerate().map(|(at, bit)| usize::from(*bit) << (at + 2)).sum::<usize>()
    }

    fn candidate(&self, now: u64, cost: i8) -> Candidate {
        Candidate {
            age: u32::try_from(now - self.step).unwrap_or(u32::MAX),
            frequency: self.frequency,
            tip: self.tip,
            passed: self.passed,
            cost,
            ..Candidate::default()
        }
    }
}

impl Disk {
    pub(super) fn new(capacity: u64, policy: EvictionPolicy, worth: i8) -> Self {
        let queues = (0..KINDS).map(|_| Default::default()).collect();
        let blocks = IdMap::default();
        Self { capacity, policy, worth, blocks, queues, steps: 0, written_in_step: 0, stamps: 0 }
    }

    pub(super) fn has(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    /// All that it has, in no order.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.blocks.keys().copied()
    }

    fn stand(&mut self, block: u64, change: impl FnOnce(&mut Kept)) {
        self.stamps = self.stamps.wrapping_add(1);
        let stamp = self.stamps;
        if let Some(kept) = self.blocks.get_mut(&block) {
            change(kept);
            kept.stamp = stamp;
            let kind = kept.kind();
            self.queues[kind].push_back((block, stamp));
            // Places of blocks that have moved on take no more room than those of blocks that stand there.
            if self.queues[kind].len() > 2 * self.blocks.len() + 64 {
                let blocks = &self.blocks;
                self.queues[kind]
                    .retain(|(block, stamp)| blocks.get(block).is_some_and(|kept| kept.stamp == *stamp));
            }
        }
    }

    /// These blocks were used.
    pub(super) fn used(&mut self, blocks: &[u64]) {
        let steps = self.steps;
        for block in blocks {
            self.stand(*block, |kept| {
                kept.frequency = (kept.frequency + 1).min(3);
                kept.passed = false;
                kept.step = steps;
            });
        }
    }

    /// Writes blocks of one prompt, in order; gives how many were new, and tells what left for them.
    pub(super) fn put(&mut self, blocks: &[u64], mut gone: impl FnMut(u64)) -> u64 {
        let mut new = 0;
        for (at, block) in blocks.iter().enumerate() {
            if self.capacity == 0 || self.blocks.contains_key(block) {
                continue;
            }
            while self.blocks.len() as u64 >= self.capacity {
                match self.evict() {
                    Some(block) => gone(block),
                    None => return new,
                }
            }
            new += 1;
            self.written_in_step += 1;
            if self.written_in_step * STEPS_PER_BUDGET >= self.capacity {
                self.steps += 1;
                self.written_in_step = 0;
            }
            let (step, tip) = (self.steps, at + 1 == blocks.len());
            let kept = Kept { step, frequency: 0, tip, passed: false, stamp: 0 };
            self.blocks.insert(*block, kept);
            self.stand(*block, |_| ());
        }
        new
    }

    fn evict(&mut self) -> Option<u64> {
        let mut best: Option<(u32, usize, u64)> = None;
        for kind in 0..KINDS {
            while let Some((block, stamp)) = self.queues[kind].front().copied() {
                match self.blocks.get(&block).filter(|kept| kept.stamp == stamp) {
                    Some(kept) => {
                        let rank = self.policy.rank(&kept.candidate(self.steps, self.worth));
                        if best.is_none_or(|(highest, ..)| rank > highest) {
                            best = Some((rank, kind, block));
                        }
                        break;
                    }
                    None => drop(self.queues[kind].pop_front()),
                }
            }
        }
        let (_, kind, block) = best?;
        self.queues[kind].pop_front();
        self.blocks.remove(&block);
        Some(block)
    }
}

/// A way for bytes that serves one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) bytes_per_ms: f64,
    pub(super) latency_ms: f64,
    free_at: f64,
    pub(super) bytes: u64,
}

impl Line {
    pub(super) fn new(gb_per_s: f64, latency_ms: f64) -> Self {
        Self { bytes_per_ms: gb_per_s * 1e6, latency_ms, free_at: 0.0, bytes: 0 }
    }

    /// As a plan sees it.
    pub(super) fn link(&self, now: f64) -> kvarts_planner::plan::Link {
        let outstanding_bytes = ((self.free_at - now).max(0.0) * self.bytes_per_ms) as u64;
        kvarts_planner::plan::Link {
            latency_ms: self.latency_ms,
            bytes_per_ms: self.bytes_per_ms,
            outstanding_bytes,
        }
    }

    /// How long its queue is.
    pub(super) fn queue_ms(&self, now: f64) -> f64 {
        (self.free_at - now).max(0.0)
    }

    /// Asks for bytes; when the last of them is there.
    pub(super) fn ask(&mut self, now: f64, bytes: u64) -> f64 {
        self.bytes += bytes;
        self.free_at = self.free_at.max(now) + bytes as f64 / self.bytes_per_ms;
        self.free_at + self.latency_ms
    }
}
