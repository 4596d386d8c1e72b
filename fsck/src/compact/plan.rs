//! The plan of a compaction: which segments are rewritten, and which records come together.
//!
//! A piece is a run of live blocks of one record. Pieces that follow each other in a prefix, and are small, are joined
//! into one record, up to a limit; a piece belongs to one group, and a chain that bites its tail ends nowhere and
//! is cut. What is grouped depends on the store alone, so compacting what is compact changes nothing.

use std::collections::BTreeMap;

use kvarts_layout::Layout;
use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::{ENCODING_RAW, layout_code};

use super::Options;
use super::inventory::{BlockHash, Held, Inventory, Role, Segment};

/// Blocks of a record at most: as many as the engine puts into one.
pub(super) const RECORD_BLOCKS_MAX: u32 = 4096;
/// Bytes of a merged record at most, unless a segment is small.
const MERGED_BYTES_MAX: u64 = 8 << 20;
/// What a segment has besides records, definitions and what its footer lists: header, trailer, rounding.
const FRAME_BYTES: u64 = 4 * PAGE_BYTES;

/// Live blocks of one record; where nothing is known of their order, with gaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) record: u32,
    pub(super) from: u32,
    /// One past the last.
    pub(super) to: u32,
    /// Live blocks in it.
    pub(super) count: u32,
    /// Bytes that it takes, its share of the header included.
    pub(super) bytes: u64,
    /// Bytes of its blocks alone, decoded: what decides about merging, because merging does not change it.
    pub(super) content: u64,
}

/// Pieces that become one record: a range of [`Plan::pieces`].
pub(super) type Group = std::ops::Range<usize>;

/// What is done.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) pieces: Vec<Piece>,
    /// In the order in which they are read.
    pub(super) groups: Vec<Group>,
    /// Segments that are rewritten and then retired; by index, ascending.
    pub(super) chosen: Vec<bool>,
    /// Bytes that are written, about.
    pub(super) bytes: u64,
    /// Records that are merged into others.
    pub(super) merged: u64,
}

/// Whether a record that was last used then is cold.
pub(super) fn is_cold(options: &Options, last_access_s: u64) -> bool {
    let age = (options.now_ms / 1000).saturating_sub(last_access_s);
    options.zstd_after_s.is_some_and(|after| age >= after)
}

impl Held {
    /// When it was last used, or made.
    pub(super) fn last_used_s(&self) -> u64 {
        self.last_access_s.map_or(self.created_ms / 1000, u64::from)
    }
}

impl Plan {
    /// Everything that is live, in as few records as may be.
    pub(super) fn everything(inventory: &Inventory, options: &Options, segment_bytes: u64) -> Self {
        let mut plan = Self { chosen: vec![true; inventory.segments.len()], ..Self::default() };
        plan.take_pieces(inventory, options, segment_bytes);
        plan.bytes = plan.pieces.iter().fold(0, |sum, piece| piece.bytes.saturating_add(sum));
        plan
    }

    /// What brings a store to the wanted utilisation in place.
    pub(super) fn in_place(
        inventory: &Inventory,
        options: &Options,
        (segment_bytes, pays): (u64, &[bool]),
    ) -> Self {
        let mut plan = Self::everything(inventory, options, segment_bytes);
        plan.chosen = choose(inventory, &plan, options, (segment_bytes, pays));
        let pieces = &plan.pieces;
        let is_chosen = |piece: &Piece| {
            let held = inventory.records.get(piece.record as usize);
            held.is_some_and(|held| plan.chosen.get(held.segment as usize) == Some(&true))
        };
        let touched = |group: &Group| pieces.get(group.clone()).unwrap_or_default().iter().any(is_chosen);
        plan.groups.retain(touched);
        let all = plan.groups.iter().flat_map(|group| pieces.get(group.clone()).unwrap_or_default());
        plan.bytes = all.fold(0, |sum, piece| piece.bytes.saturating_add(sum));
        plan.count_merged();
        plan
    }

    fn count_merged(&mut self) {
        let more = self.groups.iter().map(|group| group.len().saturating_sub(1) as u64);
        self.merged = more.sum();
    }

    fn take_pieces(&mut self, inventory: &Inventory, options: &Options, segment_bytes: u64) {
        let mut loose = Vec::new();
        for (number, held) in (0u32..).zip(&inventory.records) {
            let segment = inventory.segments.get(held.segment as usize);
            if segment.is_some_and(|segment| segment.role != Role::Fixed) {
                pieces_of(inventory, number, held, &mut loose);
            }
        }
        let place = |piece: &Piece| {
            let held = inventory.records.get(piece.record as usize);
            (held.map(|held| (held.segment, held.offset)), piece.from)
        };
        loose.sort_unstable_by_key(place);
        let limit = MERGED_BYTES_MAX.min(segment_bytes / 4);
        let next = if options.merge { links(inventory, options, &loose, limit) } else { BTreeMap::new() };
        self.group(&loose, &next, limit);
        self.count_merged();
    }

    /// Puts pieces into groups along their links.
    fn group(&mut self, loose: &[Piece], next: &BTreeMap<u32, u32>, limit: u64) {
        let mut follows = vec![false; loose.len()];
        for &after in next.values() {
            if let Some(follows) = follows.get_mut(after as usize) {
                *follows = true;
            }
        }
        let mut done = vec![false; loose.len()];
        // Heads of chains first; what is left then goes round in circles.
        for heads in [true, false] {
            for at in 0..loose.len() {
                if !(heads && follows.get(at) == Some(&true)) {
                    self.walk(at, (loose, next), limit, &mut done);
                }
            }
        }
        // A group is read where its first piece lies.
        let pieces = &self.pieces;
        let order = |group: &Group| pieces.get(group.start).map(|piece| (piece.record, piece.from));
        self.groups.sort_by_key(order);
    }

    fn walk(
        &mut self,
        at: usize,
        (loose, next): (&[Piece], &BTreeMap<u32, u32>),
        limit: u64,
        done: &mut [bool],
    ) {
        let mut begin = self.pieces.len();
        let (mut bytes, mut blocks) = (0u64, 0u32);
        let mut here = Some(at);
        while let Some(at) = here {
            let (Some(piece), Some(seen)) = (loose.get(at), done.get_mut(at)) else { break };
            if std::mem::replace(seen, true) {
                break;
            }
            let over = bytes.saturating_add(piece.content) > limit
                || blocks.saturating_add(piece.count) > RECORD_BLOCKS_MAX;
            if over && self.pieces.len() > begin {
                self.groups.push(begin..self.pieces.len());
                (begin, bytes, blocks) = (self.pieces.len(), 0, 0);
            }
            self.pieces.push(*piece);
            (bytes, blocks) = (bytes.saturating_add(piece.content), blocks.saturating_add(piece.count));
            here = u32::try_from(at).ok().and_then(|at| next.get(&at)).map(|next| *next as usize);
        }
        if self.pieces.len() > begin {
            self.groups.push(begin..self.pieces.len());
        }
    }
}

/// The live blocks of a record: runs where they follow each other, all of them where nothing is known.
fn pieces_of(inventory: &Inventory, record: u32, held: &Held, into: &mut Vec<Piece>) {
    let mut open: Option<Piece> = None;
    for block in 0..held.blocks {
        if inventory.is_live(held, block) {
            let piece =
                open.get_or_insert(Piece { record, from: block, to: block, count: 0, bytes: 0, content: 0 });
            piece.to = block.saturating_add(1);
            piece.count = piece.count.saturating_add(1);
        } else if held.chained {
            into.extend(open.take());
        }
    }
    into.extend(open);
    let shape = inventory.spaces.get(held.space as usize);
    let shape = shape.and_then(|space| space.shape(held.group, held.coordinate));
    let block_bytes = shape.map_or(0, |shape| shape.block_bytes());
    for piece in into.iter_mut().rev().take_while(|piece| piece.record == record) {
        piece.bytes = held.share(piece.count);
        piece.content = block_bytes.saturating_mul(u64::from(piece.count));
    }
}

/// What two neighbours in one record must have in common.
type Class = (u32, u32, u64, u64, BlockHash, (bool, bool));

/// For each small piece the one that follows it, by place in the list.
fn links(inventory: &Inventory, options: &Options, pieces: &[Piece], limit: u64) -> BTreeMap<u32, u32> {
    let class = |held: &Held| -> Class {
        let cold = is_cold(options, held.last_used_s());
        // What is in use is neither compressed for its neighbour nor the other way round.
        let encoded = cold || held.encoding != ENCODING_RAW;
        (held.space, held.group, held.coordinate, held.expires_ms, held.extensions, (cold, encoded))
    };
    let print = |held: &Held, block: u32| {
        let at = held.first.saturating_add(u64::from(block));
        usize::try_from(at).ok().and_then(|at| inventory.prints.get(at)).copied()
    };
    let small = |piece: &Piece| -> Option<&Held> {
        let held = inventory.records.get(piece.record as usize)?;
        (held.parent.is_some() && piece.content <= limit / 2).then_some(held)
    };
    let mut ends = BTreeMap::<(BlockHash, Class), u32>::new();
    for (at, piece) in (0u32..).zip(pieces) {
        let Some(held) = small(piece) else { continue };
        if let Some(last) = print(held, piece.to.saturating_sub(1)) {
            ends.insert((last, class(held)), at);
        }
    }
    let mut next = BTreeMap::new();
    for (at, piece) in (0u32..).zip(pieces) {
        let Some(held) = small(piece) else { continue };
        let before = match piece.from.checked_sub(1) {
            Some(before) => print(held, before),
            None => held.parent,
        };
        let Some(&end) = before.and_then(|before| ends.get(&(before, class(held)))) else { continue };
        let Some((first, other)) = pieces.get(end as usize).and_then(|piece| Some((piece, small(piece)?)))
        else {
            continue;
        };
        let after = other.first_block.and_then(|number| number.checked_add(first.to));
        let here = held.first_block.and_then(|number| number.checked_add(piece.from));
        // Of several that follow one block, one is joined to it.
        if end != at && after == here {
            next.entry(end).or_insert(at);
        }
    }
    next
}

/// The segments that are worth rewriting.
fn choose(
    inventory: &Inventory,
    plan: &Plan,
    options: &Options,
    (segment_bytes, pays): (u64, &[bool]),
) -> Vec<bool> {
    let mut leaving = vec![false; inventory.segments.len()];
    for group in &plan.groups {
        let pieces = plan.pieces.get(group.clone()).unwrap_or_default();
        for piece in pieces {
            let Some(held) = inventory.records.get(piece.record as usize) else { continue };
            let pays = pays.get(piece.record as usize) == Some(&true);
            if let Some(leaving) = leaving.get_mut(held.segment as usize) {
                *leaving |= pieces.len() > 1 || changes(inventory, options, held, pieces, pays);
            }
        }
    }
    let wanted = |segment: &Segment| {
        let bytes = segment_bytes.saturating_mul(u64::from(options.utilisation_percent)) / 100;
        matches!(segment.role, Role::Sealed | Role::Tail) && segment.live_bytes < bytes
    };
    let mut chosen = leaving;
    let last =
        inventory.segments.iter().map(|segment| segment.shard).max().map_or(0, |last| last.saturating_add(1));
    for shard in 0..last {
        let here =
            || inventory.segments.iter().enumerate().filter(move |(_, segment)| segment.shard == shard);
        let candidates = || here().filter(|(at, one)| wanted(one) || chosen.get(*at) == Some(&true));
        let places: Vec<usize> = candidates().map(|(at, _)| at).collect();
        let gains = candidates().any(|(_, segment)| segment.dead_bytes > 0)
            || segments_for(inventory, plan, &places, segment_bytes) < places.len();
        if gains {
            for at in places {
                if let Some(chosen) = chosen.get_mut(at) {
                    *chosen = true;
                }
            }
        }
    }
    chosen
}

/// How many segments the groups that begin in these segments take, one behind the other, rather too many than too few.
fn segments_for(inventory: &Inventory, plan: &Plan, places: &[usize], segment_bytes: u64) -> usize {
    let definitions = inventory.spaces.iter().fold(0u64, |sum, space| {
        let bytes = space.spec.len().saturating_add(space.identity.len()) as u64;
        sum.saturating_add(bytes.next_multiple_of(PAGE_BYTES)).saturating_add(2 * PAGE_BYTES)
    });
    let room = segment_bytes.saturating_sub(definitions).saturating_sub(FRAME_BYTES);
    let (mut count, mut left) = (0usize, 0u64);
    for group in &plan.groups {
        let pieces = plan.pieces.get(group.clone()).unwrap_or_default();
        let Some(held) = pieces.first().and_then(|piece| inventory.records.get(piece.record as usize)) else {
            continue;
        };
        if places.binary_search(&(held.segment as usize)).is_err() {
            continue;
        }
        let blocks: u64 = pieces.iter().map(|piece| u64::from(piece.count)).sum();
        let listed = blocks.saturating_mul(64).saturating_add(256);
        let bytes = pieces.iter().fold(listed, |sum, piece| sum.saturating_add(piece.bytes));
        if bytes > left {
            (count, left) = (count.saturating_add(1), room);
        }
        left = left.saturating_sub(bytes);
    }
    count
}

/// Whether a record is to be arranged or encoded otherwise than it is.
fn changes(inventory: &Inventory, options: &Options, held: &Held, pieces: &[Piece], pays: bool) -> bool {
    let count: u32 = pieces.iter().map(|piece| piece.count).sum();
    let target = target_layout(inventory, options, held, count);
    let moves = count > 1 && target.is_some_and(|target| layout_code(target) != held.layout);
    moves || (held.encoding == ENCODING_RAW && is_cold(options, held.last_used_s()) && pays)
}

/// The layout that a record of `blocks` blocks gets; `None` if it keeps its own.
pub(super) fn target_layout(
    inventory: &Inventory,
    options: &Options,
    held: &Held,
    count: u32,
) -> Option<Layout> {
    match options.layout {
        super::LayoutChoice::Keep => None,
        super::LayoutChoice::FullBlock => Some(Layout::FullBlock),
        super::LayoutChoice::LayerBlock => Some(Layout::LayerBlock),
        super::LayoutChoice::Auto => {
            let space = inventory.spaces.get(held.space as usize)?;
            Some(Layout::auto(&space.shape(held.group, held.coordinate)?, count))
        }
    }
}
