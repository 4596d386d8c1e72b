//! What a read does about a piece that a path did not bring: the blocks that are not there are asked for elsewhere, and the
//! others again where they were.

use std::collections::BTreeMap;
use std::time::Duration;

use kvarts_cluster::dealer::{PathSet, Piece};
use kvarts_cluster::paths::PathId;
use kvarts_contract::api::{Order, ReadEnd};
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::plan::Tile;

use super::OWN;
use super::cut::place;
use super::drive::{Part, Reading};
use super::nodes::{Ended, Request, failure};
use super::request::{self, Ask, State};

/// How long a path may have no room, or no connection, before what only it leads to has failed.
pub(crate) const BUSY_FOR: Duration = Duration::from_secs(1);
/// How long it is not asked after the first time; twice as long after each further one, and at most so long.
const BUSY_PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));
/// What is said of a path that ended a piece without a word.
const ENDED: &str = "the source ended the transfer before all bytes of the piece had arrived";

/// What a path gave of a piece.
struct Got {
    /// Which of its blocks are in their places.
    good: Vec<bool>,
    /// Which are not to be had there, and why.
    bad: BTreeMap<u32, Reason>,
}

impl Got {
    fn of(ask: &Ask, end: ReadEnd, tile: &Tile, order: Order) -> Self {
        let blocks = tile.block_count();
        let mut good = vec![false; blocks as usize];
        // What went to scratch memory is read again.
        if ask.scratch.is_none() && end.usable_layers == tile.layer_count() {
            match order {
                Order::Layers => good.iter_mut().take(end.usable_blocks as usize).for_each(|it| *it = true),
                Order::Blocks => {
                    for block in &ask.blocks {
                        good.get_mut(*block as usize).into_iter().for_each(|it| *it = true);
                    }
                }
            }
        }
        let is_good = |block: u32| good.get(block as usize).copied().unwrap_or(true);
        let mut bad: BTreeMap<u32, Reason> =
            end.failures.into_iter().filter(|(block, _)| !is_good(*block)).collect();
        if bad.is_empty() {
            let left = (0..blocks).filter(|block| !is_good(*block));
            bad = left.map(|block| (block, Reason::Passing(ENDED.to_owned()))).collect();
        }
        Self { good, bad }
    }

    /// Whether it says something of the path that not all of it came.
    fn is_fault(&self) -> bool {
        let is_fault = |reason: &Reason| match reason.kind() {
            Kind::Miss => matches!(reason, Reason::Media(_)),
            Kind::Refused | Kind::Invalid => false,
            Kind::Retry | Kind::Deadline | Kind::Corrupt | Kind::ReadOnly | Kind::Bug => true,
        };
        self.bad.values().any(is_fault)
    }

    /// Whether the path may have it all the same: it has no room, or its connection broke.
    fn is_passing(&self) -> bool {
        let is_passing = |reason: &Reason| {
            matches!(reason, Reason::Busy(_) | Reason::Passing(_)) || reason.kind() == Kind::Deadline
        };
        self.bad.values().all(is_passing)
    }
}

impl Reading {
    /// A request ended without all of its piece, and its memory has been let go of.
    pub(super) fn failed(&mut self, number: u64, now: Nanos) {
        let Some(ask) = self.asks.get_mut(&number) else { return };
        let State::Failed(end) = std::mem::replace(&mut ask.state, State::Stopped) else { return };
        let request = Request { piece: ask.piece, path: ask.path, bytes: ask.bytes };
        let Some(tile) = self.parts.get(ask.piece).map(|part| part.tile.clone()) else { return };
        let got = Got::of(ask, end, &tile, self.progress.order());
        // Those that are in their places are announced, and who verifies them himself needs their digests.
        if let Some((from, to)) = ask.digests.as_ref().zip(self.what.into.digests()) {
            let is_good = |block: u32| got.good.get(block as usize).copied().unwrap_or(false);
            request::copy_digests(&self.what.shape, &tile, (from, to), is_good);
        }
        self.free_places(number);
        let is_again = got.is_passing() && self.pauses(request.path, now);
        if !is_again {
            for (block, reason) in &got.bad {
                self.is_not_there(tile.blocks.start.saturating_add(*block), request.path, reason);
            }
        }
        let how = match is_again {
            true => {
                Ended::Again { is_fault: got.bad.values().any(|reason| matches!(reason, Reason::Passing(_))) }
            }
            false if got.is_fault() => Ended::Failed,
            false => Ended::Missing,
        };
        if how != Ended::Missing
            && let Some(reason) = got.bad.values().next()
        {
            self.nodes.note_failure(request.path, failure(reason));
        }
        self.nodes.ended(&mut self.dealer, request, how, now);
        if !self.dealer.is_asked(request.piece) {
            self.cut_again(request.piece, &got.good);
        }
        if is_again {
            return;
        }
        let mut bad = got.bad.keys().map(|block| tile.blocks.start.saturating_add(*block)).peekable();
        while let Some(start) = bad.next() {
            let mut end = start.saturating_add(1);
            while bad.next_if_eq(&end).is_some() {
                end = end.saturating_add(1);
            }
            self.pass_by(request.path, start..end);
        }
    }

    /// Whether a path is asked again after a pause for what it did not bring now. One that was away long before this read is not.
    fn pauses(&mut self, path: PathId, now: Nanos) -> bool {
        let Some(member) = self.members.iter_mut().find(|member| member.number == path) else { return false };
        let since = *member.busy_since.get_or_insert(now);
        let since = member.path.away_since().map_or(since, |away| away.min(since));
        if now.since(since) >= BUSY_FOR {
            return false;
        }
        // Pieces that end together, as those of a connection do that broke, are one reason for a pause.
        if now >= member.pause {
            let (first, most) = BUSY_PAUSE;
            member.pause = now.plus(first.saturating_mul(1 << member.busy.min(16)).min(most));
            member.busy += 1;
        }
        true
    }

    /// A block is not to be had by a path. The own disks' reason counts where they had it, and else the
    /// last of those who had it.
    pub(super) fn is_not_there(&mut self, block: u32, path: PathId, reason: &Reason) {
        self.what.copies.without(self.what.first.saturating_add(block), path);
        if !matches!(reason, Reason::NotHere(_)) {
            let broken = self.lost.broken.entry(block).or_default();
            *broken = broken.with(path);
        }
        let is_absent = matches!(reason, Reason::NotHere(_));
        let is_own = path == OWN && !is_absent;
        let stays = match self.reasons.get(&block) {
            Some((true, _)) => true,
            Some((false, known)) => is_absent && !matches!(known, Reason::NotHere(_)),
            None => false,
        };
        if is_own || !stays {
            self.reasons.insert(block, (is_own, reason.clone()));
        }
    }

    /// The paths that lead to each block of a piece.
    pub(super) fn copies_of(&self, tile: &Tile) -> Vec<PathSet> {
        let first = self.what.first;
        let blocks = first.saturating_add(tile.blocks.start)..first.saturating_add(tile.blocks.end);
        let there = self.members.iter().fold(PathSet::default(), |all, member| all.with(member.number));
        self.what.copies.some(blocks).into_iter().map(|paths| paths.and(there)).collect()
    }

    /// Parts of a tile whose blocks are all where their paths lead, without what is `good`.
    fn cut(&mut self, tile: &Tile, good: &[bool]) -> Vec<(Tile, PathSet)> {
        let copies = self.copies_of(tile);
        self.steps += copies.len() as u64;
        let is_good = |at: u32| good.get(at as usize).copied().unwrap_or(false);
        let mut found: Vec<(Tile, PathSet)> = Vec::new();
        for (at, paths) in (0u32..).zip(copies).filter(|(at, _)| !is_good(*at)) {
            let block = tile.blocks.start.saturating_add(at);
            match found.last_mut() {
                Some((last, known)) if last.blocks.end == block && *known == paths => {
                    last.blocks.end = block.saturating_add(1);
                }
                _ => {
                    let blocks = block..block.saturating_add(1);
                    found.push((Tile { blocks, layers: tile.layers.clone() }, paths));
                }
            }
        }
        found
    }

    /// Cuts a piece that no path is asked for so that all blocks of each part are where its paths lead, without what is `good`.
    pub(super) fn cut_again(&mut self, piece: usize, good: &[bool]) {
        let Some(tile) = self.parts.get(piece).map(|part| part.tile.clone()) else { return };
        let found = self.cut(&tile, good);
        let is_same =
            |(only, paths): &(Tile, PathSet)| *only == tile && *paths == self.dealer.paths_of(piece);
        if !matches!(found.as_slice(), [only] if is_same(only)) {
            self.replace(piece, found);
        }
    }

    /// These stand for a piece that no path is asked for.
    pub(super) fn replace(&mut self, piece: usize, with: impl IntoIterator<Item = (Tile, PathSet)>) {
        // A path may still have the places of all of it.
        let places_of = self.parts.get(piece).and_then(|part| part.places_of);
        self.add(piece, with, places_of);
        self.settle(piece);
    }

    /// These are read as well, after another piece, and this request may have their places.
    fn add(&mut self, piece: usize, with: impl IntoIterator<Item = (Tile, PathSet)>, places_of: Option<u64>) {
        let (mut pieces, mut number) = (Vec::new(), self.parts.len());
        let order = self.progress.order();
        for (tile, paths) in with {
            let (place, bytes) = (place(order, &tile), tile.bytes(&self.what.shape));
            pieces.push(Piece { place, bytes, paths });
            self.open.insert((place, number));
            self.parts.push(Part { tile, bytes, places_of, parked: None });
            places_of.into_iter().for_each(|owner| self.heirs.entry(owner).or_default().push(number));
            number += 1;
        }
        self.dealer.replace(piece, pieces);
    }

    /// Whether another production of a block is read instead of the one that was met, which no path has any more: nothing of it
    /// was announced, and a path that was said to have the block has not failed.
    fn gives_up(&self, block: u32) -> bool {
        let at = block as usize;
        let is_announced = match self.progress.order() {
            Order::Layers => self.next > self.layers.start,
            Order::Blocks => block < self.next,
        };
        let there = self.members.iter().fold(PathSet::default(), |all, member| all.with(member.number));
        let broken = self.lost.broken.get(&block).copied().unwrap_or_default();
        let said = self.lost.said.get(at).copied().unwrap_or_default().and(there);
        let others = broken.iter().fold(said, PathSet::without);
        let may = self.what.is_alone && !is_announced && self.lost.is_known.get(at) == Some(&false);
        if !may || others.is_empty() || self.progress.has_failed(block) {
            return false;
        }
        let at = self.what.first.saturating_add(block);
        let was_met = self.what.origins.give_up(at as usize);
        if was_met {
            self.what.copies.also(at, others);
        }
        was_met
    }

    /// Reads all of these blocks again: of what has come of them nothing counts.
    fn read_again(&mut self, piece: usize, blocks: &[u32]) {
        let now = self.now();
        let has_some = |tile: &Tile| blocks.iter().any(|block| tile.blocks.contains(block));
        let open: Vec<usize> = self.open.iter().map(|(_, piece)| *piece).collect();
        let is_met = |piece: &usize| self.parts.get(*piece).is_some_and(|part| has_some(&part.tile));
        let met: Vec<usize> = open.into_iter().filter(is_met).collect();
        let under_way = self.asks.iter().filter(|(_, ask)| met.contains(&ask.piece));
        let under_way: Vec<u64> = under_way.map(|(number, _)| *number).collect();
        for number in under_way {
            self.stop(number, now);
        }
        let mut whole: Vec<(Tile, PathSet)> = Vec::new();
        for block in blocks {
            let ends = self.bands.iter().skip(1).copied().chain([self.layers.end]);
            for layers in self.bands.iter().zip(ends).map(|(start, end)| *start..end) {
                let is_open = |piece: &usize| {
                    let tile = self.parts.get(*piece).map(|part| &part.tile);
                    tile.is_some_and(|tile| tile.blocks.contains(block) && tile.layers.start == layers.start)
                };
                if !met.iter().any(is_open) {
                    whole.push((Tile { blocks: *block..block + 1, layers }, PathSet::default()));
                }
            }
        }
        for piece in met {
            let parked = self.parts.get_mut(piece).and_then(|part| part.parked.take());
            parked.into_iter().for_each(|number| drop(self.asks.remove(&number)));
            if let Some(tile) = self.parts.get(piece).map(|part| part.tile.clone()) {
                let found = self.cut(&tile, &[]);
                self.replace(piece, found);
            }
        }
        for (tile, paths) in &mut whole {
            *paths = self.copies_of(tile).into_iter().next().unwrap_or_default();
        }
        self.add(piece, whole, None);
    }

    /// Blocks are not where a path leads: pieces that have some of them are not asked for there.
    pub(super) fn pass_by(&mut self, path: PathId, blocks: std::ops::Range<u32>) {
        let order = self.progress.order();
        let mut met: Vec<usize> = Vec::new();
        let starts: Vec<u32> = match order {
            Order::Blocks => vec![self.layers.start],
            Order::Layers => self.bands.clone(),
        };
        for layer in starts {
            let at = |block: u32| match order {
                Order::Blocks => u64::from(block) << 32,
                Order::Layers => u64::from(layer) << 32 | u64::from(block),
            };
            let from = if order == Order::Layers { at(0) } else { 0 };
            for &(_, piece) in self.open.range((from, 0)..(at(blocks.end), 0)).rev() {
                self.steps += 1;
                match self.parts.get(piece).map(|part| part.tile.blocks.end) {
                    Some(end) if end > blocks.start => met.push(piece),
                    _ => break,
                }
            }
        }
        for piece in met {
            let is_here = self.parts.get(piece).is_some_and(|part| part.parked.is_some());
            if self.dealer.is_asked(piece) {
                self.dealer.without(piece, path);
            } else if !is_here && self.dealer.paths_of(piece).has(path) {
                self.cut_again(piece, &[]);
            }
        }
    }

    /// Whether the last resort leads to some blocks of a tile, to which no path does.
    pub(super) fn resorts(&mut self, tile: &Tile) -> bool {
        let (copies, first) = (&self.what.copies, self.what.first);
        let found = copies.resort(tile.blocks.clone().map(|block| first.saturating_add(block)));
        for block in &found {
            let at = block.saturating_sub(first) as usize;
            // Another production may be there than the one that was met.
            self.lost.said.get_mut(at).into_iter().for_each(|said| *said = said.or(copies.last_path()));
        }
        !found.is_empty()
    }

    /// What no path leads to has failed.
    pub(super) fn settle_lost(&mut self) {
        while let Some(piece) = self.dealer.take_lost() {
            let Some(tile) = self.parts.get(piece).map(|part| part.tile.clone()) else { continue };
            if self.copies_of(&tile).iter().any(|paths| !paths.is_empty()) {
                self.cut_again(piece, &[]);
                continue;
            }
            if self.resorts(&tile) {
                self.cut_again(piece, &[]);
                continue;
            }
            let again: Vec<u32> = tile.blocks.clone().filter(|block| self.gives_up(*block)).collect();
            if !again.is_empty() {
                self.read_again(piece, &again);
                continue;
            }
            self.settle(piece);
            for block in tile.blocks {
                let not_here = || {
                    let key = self.what.request.keys.get(block as usize);
                    key.map_or(Reason::OutOfBounds, |key| Reason::NotHere(*key))
                };
                let reason = self.reasons.get(&block).map_or_else(not_here, |(_, reason)| reason.clone());
                self.fail(block, reason);
            }
        }
    }

    /// A block has failed. What is under way and of no use without it is stopped.
    pub(super) fn fail(&mut self, block: u32, reason: Reason) {
        if self.progress.has_failed(block) {
            return;
        }
        self.progress.fail(block, reason);
        let now = self.now();
        let of_no_use = |ask: &Ask| {
            let part = self.parts.get(ask.piece);
            ask.is_counted() && part.is_some_and(|part| self.is_unwanted(&part.tile))
        };
        let useless: Vec<(u64, usize)> = self
            .asks
            .iter()
            .filter(|(_, ask)| of_no_use(ask))
            .map(|(number, ask)| (*number, ask.piece))
            .collect();
        for (number, piece) in useless {
            self.settle(piece);
            self.stop(number, now);
        }
    }
}
