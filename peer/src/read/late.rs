//! Paths from which nothing comes: what only they lead to is asked of the last resort before they have failed.
//!
//! A peer that hangs is noticed after seconds, and one without a connection is tried again for as long as it may be away. A
//! reader does not wait for that where the last resort has the blocks. The path is not asked for a while then; what the last resort
//! has not brought by the end of it may be asked there again.

use std::time::Duration;

use kvarts_cluster::dealer::PathSet;
use kvarts_contract::clock::Nanos;
use kvarts_layout::plan::Tile;

use super::OWN;
use super::drive::{Member, Reading};

/// How long a path that is late has had no room or no connection. After that time a range of a bucket is late, too.
const AWAY: Duration = Duration::from_millis(200);
/// How long nothing has come of it: longer than a busy machine is silent.
const SILENT: Duration = Duration::from_millis(500);
/// The rate at which a piece may come beyond that.
const SLOWEST: u64 = 16 << 20;
/// How long a late path is not asked.
const LEFT_ALONE: Duration = Duration::from_secs(1);
/// How often it is looked which paths are late.
const EVERY: Duration = Duration::from_millis(20);

impl Reading {
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
            let patience = SILENT.saturating_add(Duration::from_micros(ask.bytes * 1_000_000 / SLOWEST));
            now.since(ask.at.max(member.heard)) >= patience
        });
        is_away || is_silent
    }
}
