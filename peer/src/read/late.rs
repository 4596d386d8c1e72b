//! Paths from which nothing comes: what only they lead to is asked of the last resort before they have failed.
//!
//! A peer that hangs is noticed after seconds, and one without a connection is tried again for as long as it may be away. A
//! reader does not wait for that where the last resort has the blocks. The path is not asked for a while then; what the last resort
//! has not brought by the end of it may be asked there again.
//!
//! A peer whose disk hangs answers all that is asked of its process, and never the piece. So each request to a peer has an end of its own:
//! what does not come by then is asked for elsewhere, or is a miss.

use std::ops::Range;
use std::time::Duration;

use kvarts_cluster::dealer::PathSet;
use kvarts_cluster::paths::PathId;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::plan::Tile;
use kvarts_layout::planted;
use kvarts_wire::busy;

use super::OWN;
use super::drive::{Member, Reading};
use super::nodes::{Request, failure};
use super::request::Ask;

/// How long a path that is late has had no room or no connection. After that time a range of a bucket is late, too.
const AWAY: Duration = Duration::from_millis(200);
/// How long nothing has come of it: longer than a busy machine is silent.
const SILENT: Duration = Duration::from_millis(500);
/// The rate at which a piece may come beyond that.
const SLOWEST: u64 = 16 << 20;
/// How long a late path is not asked.
const LEFT_ALONE: Duration = Duration::from_secs(1);
/// How long nothing may come of a request to a peer at all, and how many times as long as was to be expected, and at most.
const GIVEN_UP: (Duration, u32, Duration) = (Duration::from_secs(2), 8, Duration::from_secs(10));
/// The rate that is expected of a peer from which nothing has come yet.
const UNKNOWN: u64 = 1 << 20;
/// What is said of one that was given up.
const HANGS: Reason = Reason::Busy(busy::PEER_SILENT);
/// How often it is looked which paths are late.
const EVERY: Duration = Duration::from_millis(20);

/// How long a piece may take at a rate.
fn at_rate(bytes: u64, rate: u64) -> Duration {
    Duration::from_micros(bytes.saturating_mul(1_000_000) / rate)
}

impl Reading {
    /// How long nothing may come of a request that is made now. Of a path that was given up and has brought nothing since little is
    /// expected.
    pub(super) fn patience(&self, Request { path, bytes, .. }: Request, now: Nanos) -> Duration {
        let (least, times, most) = GIVEN_UP;
        self.nodes.deal(now, |paths, now| {
            if paths.is_given_up(path) {
                return SILENT.saturating_add(at_rate(bytes, SLOWEST));
            }
            let expected = paths.time_of(path, 0, now).map(|time| time.saturating_mul(times));
            expected.unwrap_or_else(|| at_rate(bytes, UNKNOWN).saturating_add(least)).clamp(least, most)
        })
    }

    /// Gives up what peers were asked for and has not come for too long: their blocks are not to be had there.
    pub(super) fn look_for_silent(&mut self, now: Nanos) {
        let last = self.what.copies.last_path();
        let heard = |ask: &Ask| {
            let member = self.members.iter().find(|member| member.number == ask.path);
            member.map_or(ask.at, |member| ask.at.max(member.heard))
        };
        let is_silent = |ask: &Ask| {
            let is_peers = ask.path != OWN && !last.has(ask.path) && ask.is_running();
            let is_peers = is_peers && !planted!("silent-peer-awaited");
            is_peers && now.since(ask.at) >= ask.patience && now.since(heard(ask)) >= ask.patience
        };
        let silent = self.asks.values().filter(|ask| is_silent(ask));
        let silent: Vec<(Request, Duration)> = silent.map(|ask| (ask.request(), ask.patience)).collect();
        for (Request { piece, path, .. }, patience) in silent {
            let Some(tile) = self.parts.get(piece).map(|part| part.tile.clone()) else { continue };
            // From where nothing else came either nothing else is awaited.
            let is_all = self.nodes.deal(now, |paths, now| paths.silent_for(path, now) >= patience);
            if is_all {
                self.nodes.deal(now, |paths, _| paths.give_up(path));
            }
            let blocks = if is_all { 0..self.what.request.keys.len() as u32 } else { tile.blocks };
            self.give_up(path, blocks, now);
        }
    }

    /// These blocks are not to be had from a peer.
    fn give_up(&mut self, path: PathId, blocks: Range<u32>, now: Nanos) {
        let is_of = |ask: &Ask| {
            let tile = self.parts.get(ask.piece).map(|part| &part.tile.blocks);
            ask.path == path
                && ask.is_running()
                && tile.is_some_and(|of| of.start >= blocks.start && of.end <= blocks.end)
        };
        let asks = self.asks.iter().filter(|(_, ask)| is_of(ask));
        let asks: Vec<(u64, usize)> = asks.map(|(number, ask)| (*number, ask.piece)).collect();
        let first = self.what.first;
        let said =
            self.what.copies.some(first.saturating_add(blocks.start)..first.saturating_add(blocks.end));
        let led_there = blocks.clone().zip(said).filter(|(_, paths)| paths.has(path));
        led_there.for_each(|(block, _)| self.is_not_there(block, path, &HANGS));
        for (number, piece) in asks {
            self.nodes.note_failure(path, failure(&HANGS));
            self.stop(number, now);
            if !self.dealer.is_asked(piece) {
                self.cut_again(piece, &[]);
            }
        }
        self.pass_by(path, blocks);
    }

    /// Has the last resort bring what only late paths lead to.
    pub(super) fn look_for_late(&mut self, now: Nanos) {
        let last = self.what.copies.last_path();
        if last.is_empty() || now < self.late_at {
            return;
        }
        self.late_at = now.plus(EVERY);
        let others = |member: &&Member| member.number != OWN && !last.has(member.number);
        let late = self.members.iter().filter(others).filter(|member| self.is_member_late(member, now));
        let late = late.fold(PathSet::default(), |late, member| late.with(member.number));
        if late.is_empty() {
            return;
        }
        let open: Vec<usize> = self.open.iter().map(|(_, piece)| *piece).collect();
        let mut any = false;
        for piece in open {
            let paths = self.dealer.paths_of(piece);
            if paths.is_empty() || !late.iter().fold(paths, PathSet::without).is_empty() {
                continue;
            }
            let Some(tile) = self.parts.get(piece).map(|part| part.tile.clone()) else { continue };
            if self.comes_at_last(&tile) {
                let asks = self.asks.iter().filter(|(_, ask)| ask.piece == piece);
                let asks: Vec<u64> = asks.map(|(number, _)| *number).collect();
                asks.into_iter().for_each(|number| self.stop(number, now));
                self.cut_again(piece, &[]);
                any = true;
            }
        }
        for member in self.members.iter_mut().filter(|member| any && late.has(member.number)) {
            member.pause = member.pause.max(now.plus(LEFT_ALONE));
        }
    }

    /// Whether the last resort leads to some blocks of a tile, from now on.
    fn comes_at_last(&mut self, tile: &Tile) -> bool {
        let last = self.what.copies.last_path();
        self.resorts(tile) || self.copies_of(tile).iter().any(|paths| !paths.and(last).is_empty())
    }

    fn is_member_late(&self, member: &Member, now: Nanos) -> bool {
        let is_away = member.busy_since.is_some_and(|since| now.since(since) >= AWAY);
        let asks = self.asks.values().filter(|ask| ask.path == member.number && ask.is_counted());
        let first = asks.min_by_key(|ask| ask.at);
        let is_silent = first.is_some_and(|ask| {
            let patience = SILENT.saturating_add(at_rate(ask.bytes, SLOWEST));
            now.since(ask.at.max(member.heard)) >= patience
        });
        is_away || is_silent
    }
}
