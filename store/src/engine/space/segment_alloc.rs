//! Where the next segment comes from, and segments that are given back.
//!
//! In this order: a free segment; a new file, if budget and disk allow; one that failed for want of something that passes,
//! emptied, or that failed before anything in it counted; a new file in the room that other shards do not use, or that
//! eviction makes; the one that reclaim empties; a new file in the room that other shards make by eviction. While the budget is passed, segments are removed instead of used.
//!
//! Invariants:
//! - after a write or flush has failed nothing is begun and nothing evicted before the device was seen to take writes
//!   (`trouble`);
//! - bytes are given back to the budget only after the file's name is gone durably;
//! - a segment number that comes again goes on with the generation after the last, so that nothing which still
//!   names the old file (a kept header, an older checkpoint) takes the new one for it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use kvarts_layout::format;
use kvarts_layout::format::footer::Footer;
use kvarts_layout::planted;

use super::evict::batch::Made;
use crate::engine::space::Space;
use crate::engine::volume::segment::{Segment, SegmentState, fault};
use crate::io::policy::{Action, Stage, decide};
use crate::io::{MetaOp, OpenMode};
use crate::rt::Runtime;
use kvarts_contract::error::{Reason, SpaceCause};
use kvarts_contract::io_error::{FileId, IoError};

/// How often a segment may fail at its beginning before it is left alone: its place on the device may be bad.
const MISSES_MAX: u32 = 3;
/// How often a segment is tried for again where nothing could be done and there is room all the same: another may take it first.
const AGAIN_MAX: u32 = 8;
/// How long nothing is given back after nothing could be.
const AGAIN: Duration = Duration::from_millis(50);

impl Space {
    /// A segment that holds nothing. One task at a time calls it.
    pub(crate) async fn next_segment(&self) -> Result<Rc<Segment>, Reason> {
        self.look_for_trouble().await?;
        while self.volume.shared.must_shrink() {
            match self.give_back_one().await {
                Err(Reason::NoSpace(_)) if self.room_of_others().await => {}
                given => given?,
            }
        }
        let (mut round, mut again) = (0, AGAIN_MAX);
        loop {
            if let Some(segment) = self.take_free() {
                return Ok(segment);
            }
            // The bound that is told where nothing can go.
            let bound = match self.create_segment().await {
                Err(bound @ Reason::NoSpace(_)) => bound,
                made => return made,
            };
            if let Some(segment) = self.take_failed().await {
                return Ok(segment);
            }
            if self.spare_of_others().await {
                continue;
            }
            match self.make_room_in_round(round).await {
                Ok(Made::Segment(segment)) => return Ok(segment),
                // Others may take what was given back.
                Ok(Made::Room | Made::Nothing) => round += 1,
                Err(Reason::NoSpace(_)) if self.room_of_others().await => {}
                // What others gave back meanwhile is room, too, for whichever shard it was meant.
                Err(Reason::NoSpace(_)) if self.volume.shared.shortage() == 0 && again > 0 => again -= 1,
                Err(Reason::NoSpace(_)) => return Err(bound),
                Err(reason) => return Err(reason),
            }
        }
    }

    /// Has other shards evict: what lies here is needed by what hangs on it there, or there is nothing here that may go.
    async fn room_of_others(&self) -> bool {
        self.asking.set(true);
        let timer = |at| self.volume.driver.sleep_until(at);
        let made = self.volume.shared.room_of_others(self.volume.shard, timer).await;
        self.asking.set(false);
        made
    }

    /// Makes room for another shard. The answer does not wait for one that waits for others itself.
    pub(crate) async fn make_room_for_another(&self) -> bool {
        if self.asking.get() {
            return false;
        }
        if self.make_room_now().await {
            return true;
        }
        // What is being sealed may go as soon as it is.
        let is_sealing = || {
            let segments = self.volume.segments.borrow();
            segments.values().any(|segment| segment.state.get() == SegmentState::Sealing)
        };
        if !is_sealing() {
            return false;
        }
        self.volume.changed.until(|| (!is_sealing()).then_some(())).await;
        self.make_room_now().await
    }

    async fn make_room_now(&self) -> bool {
        let _turn = self.roll_turn().await;
        match self.make_room_in_round(0).await {
            Ok(Made::Segment(segment)) => {
                let said = segment.may_be_missing() || self.say_free().await;
                let here = segment.state.get() == SegmentState::Free && self.volume.is_unread(&segment);
                said && here && self.remove_segment(&segment).await.is_ok()
            }
            Ok(Made::Room) => true,
            Ok(Made::Nothing) | Err(_) => false,
        }
    }

    async fn spare_of_others(&self) -> bool {
        self.volume.shared.spare_of_others(self.volume.shard, |at| self.volume.driver.sleep_until(at)).await
    }

    /// Makes room, by holes for as many rounds as may be, then by emptying a segment.
    async fn make_room_in_round(&self, round: u32) -> Result<Made, Reason> {
        // What is buried is remembered for as long as there are segments that are older, and each file has an entry in
        // its directory: too much of either, and the oldest go.
        let batches = &self.volume.shared.batches;
        let holes_help = self.volume.tombstones.borrow().len() < batches.tombstones
            && !self.volume.shared.has_too_many_files();
        if round < batches.hole_rounds && holes_help {
            match self.make_room().await {
                Made::Nothing => {}
                made => return Ok(made),
            }
        }
        if round > 2 * batches.hole_rounds {
            return Err(self.volume.shared.budget_full());
        }
        self.reclaim(!holes_help || self.no_holes.get()).await
    }

    /// Gives segments back until the budget is kept, or `stopping`. What cannot go now is tried again.
    pub(crate) async fn shrink(&self, rt: &Rc<dyn Runtime>, stopping: &Cell<bool>) {
        if self.shrinking.replace(true) {
            return;
        }
        while self.volume.shared.is_shrinking() && !stopping.get() && self.volume.refuses_writes().is_none() {
            let turn = self.roll_turn().await;
            // Another task may have given enough back meanwhile.
            let given = if self.volume.shared.is_shrinking() { self.give_back_one().await } else { Ok(()) };
            let given = given.is_ok() || self.room_of_others().await;
            drop(turn);
            if !given {
                rt.sleep_until(rt.clock().now().plus(AGAIN)).await;
            }
        }
        self.shrinking.set(false);
    }

    /// Removes one segment of this shard, emptied if need be.
    pub(crate) async fn give_back_one(&self) -> Result<(), Reason> {
        if !self.removed.borrow().is_empty() {
            return self.finish_removals().await;
        }
        let segment = match self.take_free() {
            Some(segment) => segment,
            None => match self.take_failed().await {
                Some(segment) => segment,
                None if self.spare_of_others().await => return Ok(()),
                None => match self.make_room_in_round(0).await? {
                    Made::Segment(segment) => segment,
                    Made::Room | Made::Nothing => return Ok(()),
                },
            },
        };
        if !segment.may_be_missing() {
            self.empty_more().await;
            // Where a checkpoint has no room at all it goes all the same: no other way leads back to the budget. Should
            // power be cut before the next one, a check says that a segment is missing, although no block is lost.
            self.say_free().await;
            if let Some(reason) = self.volume.refuses_writes() {
                return Err(reason);
            }
            // Whatever was emptied beside it may have taken it along.
            let here = self.volume.segments.borrow().get(&segment.number).map(Rc::clone);
            let is_here = here.is_some_and(|one| Rc::ptr_eq(&one, &segment));
            if !is_here || segment.state.get() != SegmentState::Free {
                return Ok(());
            }
        }
        self.remove_segment(&segment).await
    }

    /// Empties a few more of the segments that must go, so that one checkpoint says it of all of them.
    async fn empty_more(&self) {
        for _ in 1..self.volume.shared.batches.removed_together {
            let free = |one: &&Rc<Segment>| one.state.get() == SegmentState::Free;
            let emptied: u64 =
                self.volume.segments.borrow().values().filter(free).map(|one| one.book.allocated()).sum();
            if emptied >= self.volume.shared.excess() || self.make_room_in_round(0).await.is_err() {
                return;
            }
        }
    }

    /// Gives segments that hold nothing back until the budget has this many bytes more, for a shard that is short of room.
    /// False if there are none, or another task is getting the next segment here.
    pub(crate) async fn give_spare(&self, wanted: u64) -> bool {
        let Some(_turn) = self.try_roll_turn().filter(|_| !planted!("spare-room-kept")) else { return false };
        let mut given = 0;
        // The last one stays: what is to be put here next must have somewhere to go.
        while given < wanted && self.volume.segments.borrow().len() > 1 {
            let segment = match self.take_free() {
                Some(segment) => segment,
                None => match self.recycle_dead(true).await {
                    Made::Segment(segment) => segment,
                    Made::Room => return true,
                    Made::Nothing => break,
                },
            };
            let said = segment.may_be_missing() || self.say_free().await;
            let here = segment.state.get() == SegmentState::Free && self.volume.is_unread(&segment);
            let bytes = segment.book.allocated();
            if !said || !here || self.remove_segment(&segment).await.is_err() {
                break;
            }
            given += bytes;
        }
        given > 0
    }

    fn take_free(&self) -> Option<Rc<Segment>> {
        let segments = self.volume.segments.borrow();
        let free = |segment: &&Rc<Segment>| {
            segment.state.get() == SegmentState::Free
                && self.volume.is_unread(segment)
                && !self.is_hollow(segment)
        };
        segments.values().find(free).map(Rc::clone)
    }

    /// Empties a segment that takes no more records only because something was short when it was written, or in which
    /// nothing counts. Nothing is wrong with it: everything that is acknowledged in its next use is rewritten.
    async fn take_failed(&self) -> Option<Rc<Segment>> {
        let mut failed: Vec<_> =
            self.volume.segments.borrow().values().filter(|one| self.is_usable(one)).map(Rc::clone).collect();
        failed.sort_by_key(|one| (one.misses.get(), !self.is_barren(one)));
        for segment in failed {
            let records = segment.tail.borrow().entries.clone();
            let footer = Footer { records };
            // What a barren one buries was never acknowledged.
            if (self.is_barren(&segment) || self.save_tombstones(&segment, &footer).await)
                && self.is_usable(&segment)
                && self.evict_all(&segment, &footer).await
                && self.is_usable(&segment)
                && self.volume.is_unread(&segment)
            {
                segment.state.set(SegmentState::Free);
                return Some(segment);
            }
        }
        None
    }

    /// Makes a segment file: reserved on disk and durable by name before anything is acknowledged in it.
    async fn create_segment(&self) -> Result<Rc<Segment>, Reason> {
        // What an attempt left behind that could not be undone is this one's to use.
        let bytes = self.volume.shared.segment_bytes;
        self.volume.shared.give_budget(self.residue.take());
        self.volume.shared.take_segment_budget()?;
        let number = self.next_number();
        let mode = OpenMode { write: true, create: true, direct: true };
        let name = self.volume.file_name(&format::names::segment_name(number));
        let file = match self.volume.driver.open(name, mode).await {
            Ok(file) => file,
            Err(error) => {
                self.volume.shared.give_budget(bytes);
                return Err(self.cannot_make(&error));
            }
        };
        let generation = self.volume.retired.borrow().get(&number).copied().unwrap_or(0);
        match self.reserve(file, generation > 0).await {
            Ok(allocated) => {
                // More than was asked for where the file system needs blocks of its own to map the pieces.
                self.volume.shared.charge(allocated - bytes);
                self.volume.retired.borrow_mut().remove(&number);
                let book = self.volume.shared.index.records().ledger().open(self.volume.shard, number);
                book.set_allocated(allocated);
                let segment = Rc::new(Segment::new((number, book), file, generation, SegmentState::Free));
                segment.first_sequence.set(self.volume.sequence.get());
                self.volume.segments.borrow_mut().insert(number, Rc::clone(&segment));
                Ok(segment)
            }
            Err(error) => {
                self.undo(file, number).await;
                Err(self.cannot_make(&error))
            }
        }
    }

    fn next_number(&self) -> u32 {
        // The number of a lost one stays free: in use again, its loss would not be reported any more. That of one which could
        // not be opened is taken.
        let (lost, unreadable) = (self.volume.lost.borrow(), self.volume.unreadable.borrow());
        let retired = self.volume.retired.borrow().keys().copied().find(|number| !lost.contains_key(number));
        let last_of = |last: Option<u32>| last.map_or(0, |last| last.saturating_add(1));
        let behind = || {
            let segments = self.volume.segments.borrow();
            let last = [
                segments.last_key_value().map(|(&last, _)| last),
                lost.last_key_value().map(|(&last, _)| last),
                unreadable.last_key_value().map(|(&last, _)| last),
            ];
            last.map(last_of).into_iter().max().unwrap_or(0)
        };
        retired.unwrap_or_else(behind)
    }

    /// The length of a file whose number `came_again` is durable before anything is written to it: its header will be of
    /// a later generation than the first, and a file that was shorter under such a header would look cut off.
    async fn reserve(&self, file: FileId, came_again: bool) -> Result<u64, IoError> {
        let bytes = self.volume.shared.segment_bytes;
        self.volume.driver.meta(MetaOp::Allocate { file, offset: 0, len: bytes }).await?;
        if came_again {
            self.volume.driver.flush(file).await?;
        }
        if !planted!("directory-not-flushed") {
            self.volume.driver.meta(MetaOp::SyncDir { name: self.volume.home() }).await?;
        }
        let (_, allocated) = self.volume.driver.stat(file).await?;
        Ok(allocated.max(bytes))
    }

    /// Removes what was made of a file: an allocation that failed may have got some of its bytes, and neither they
    /// nor the descriptor may stay behind with every attempt on a full disk.
    async fn undo(&self, file: FileId, number: u32) {
        let emptied = self.volume.driver.meta(MetaOp::Truncate { file, len: 0 }).await;
        let _ = self.volume.driver.meta(MetaOp::Close { file }).await;
        let name = self.volume.file_name(&format::names::segment_name(number));
        let removed = self.volume.driver.meta(MetaOp::Remove { name }).await;
        if emptied.is_ok() || removed.is_ok() {
            self.volume.shared.give_budget(self.volume.shared.segment_bytes);
        } else {
            self.residue.set(self.residue.get() + self.volume.shared.segment_bytes);
        }
    }

    fn cannot_make(&self, error: &IoError) -> Reason {
        match decide(error, Stage::Metadata) {
            Action::RefuseNoSpace => Reason::NoSpace(SpaceCause::Disk),
            Action::NotNow => fault(error),
            _ => self.volume.latch(error),
        }
    }

    /// Removes a segment that holds nothing. Where that fails, it stays as it is, and counted.
    pub(crate) async fn remove_segment(&self, segment: &Rc<Segment>) -> Result<(), Reason> {
        let name = self.volume.file_name(&format::names::segment_name(segment.number));
        self.volume.driver.meta(MetaOp::Remove { name }).await.map_err(|error| self.cannot_remove(&error))?;
        // It is not used any more. Until its name is gone durably it counts, and so does what it may bring back.
        segment.state.set(SegmentState::Suspect);
        self.removed.borrow_mut().push(Rc::clone(segment));
        self.finish_removals().await
    }

    /// Makes the removal of all segments durable whose names are gone, and gives back what they had. Where that fails, the next one does
    /// it for all.
    pub(crate) async fn finish_removals(&self) -> Result<(), Reason> {
        let removed = self.removed.borrow().clone();
        if removed.is_empty() {
            return Ok(());
        }
        let synced = self.volume.driver.meta(MetaOp::SyncDir { name: self.volume.home() }).await;
        synced.map_err(|error| self.cannot_remove(&error))?;
        for segment in removed {
            let was_here = {
                let mut waiting = self.removed.borrow_mut();
                let before = waiting.len();
                waiting.retain(|one| !Rc::ptr_eq(one, &segment));
                waiting.len() < before
            };
            if was_here {
                self.forget_removed(&segment).await;
            }
        }
        Ok(())
    }

    async fn forget_removed(&self, segment: &Segment) {
        let number = segment.number;
        self.volume.segments.borrow_mut().remove(&number);
        self.volume.retired.borrow_mut().insert(number, segment.generation.get());
        let _ = self.volume.driver.meta(MetaOp::Close { file: segment.file }).await;
        self.volume.shared.index.records().ledger().close(self.volume.shard, number);
        if !planted!("budget-leaked") {
            self.volume.shared.give_budget(segment.book.allocated());
        }
    }

    fn cannot_remove(&self, error: &IoError) -> Reason {
        match decide(error, Stage::Reclaim) {
            Action::LatchReadOnly => self.volume.latch(error),
            _ => self.volume.shared.budget_full(),
        }
    }

    /// Whether a segment that takes no more records may be recycled, and no task works on it: the disk was full, nothing in
    /// it counts, or something else was short and what it holds is the oldest, which goes first anyway.
    fn is_usable(&self, segment: &Segment) -> bool {
        let well = match segment.broken() {
            Some(Reason::NoSpace(_)) => true,
            Some(Reason::Passing(_)) => segment.book.live() == 0 || self.is_oldest(segment),
            _ => false,
        };
        segment.state.get() == SegmentState::Suspect
            && (well || (self.is_barren(segment) && !planted!("barren-segments-stay")))
            && segment.misses.get() < MISSES_MAX
            && self.volume.is_unread(segment)
            && segment.is_quiet()
    }

    /// Whether no sealed segment is older.
    fn is_oldest(&self, segment: &Segment) -> bool {
        let first = segment.first_sequence.get();
        let segments = self.volume.segments.borrow();
        let mut sealed = segments.values().filter(|one| one.state.get() == SegmentState::Sealed);
        sealed.all(|one| one.first_sequence.get() > first)
    }

    /// Whether nothing in a segment that failed was ever acknowledged as durable, and nothing in it is live.
    fn is_barren(&self, segment: &Segment) -> bool {
        segment.broken().is_some() && segment.tail.borrow().durable_upto == 0 && segment.book.live() == 0
    }
}
