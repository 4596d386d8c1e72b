//! Space: where the next segment comes from, and how blocks leave to make room for it.

pub(crate) mod evict;
pub(crate) mod reclaim;
pub(crate) mod segment_alloc;
pub(crate) mod trouble;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use kvarts_layout::planted;

use self::trouble::Detours;
use super::read::Reads;
use super::tasks::notify::Turn;
use super::volume::Volume;
use super::volume::segment::Segment;

/// What is known of the space of one shard, and who is at work on it.
pub(crate) struct Space {
    pub(crate) volume: Rc<Volume>,
    /// They forget what leaves.
    pub(crate) reads: Rc<Reads>,
    /// Bytes of the budget that files have which could not be made, and not be removed.
    pub(crate) residue: Cell<u64>,
    /// Open segments without a record that puts by layers have left: the next of them, or the next roll, takes one.
    pub(crate) parked: RefCell<Vec<Rc<Segment>>>,
    /// In which segment a write or flush failed last, until the device was seen to take writes again.
    pub(crate) trouble: RefCell<Option<Rc<Segment>>>,
    /// How often it was not, and writes went elsewhere.
    pub(crate) detours: Cell<Detours>,
    /// Segments whose names are gone, and not durably yet.
    pub(crate) removed: RefCell<Vec<Rc<Segment>>>,
    /// A task is getting the next segment; others wait.
    pub(crate) rolling: Cell<bool>,
    /// The task that is getting it waits for other shards to make room.
    pub(crate) asking: Cell<bool>,
    /// Segments are being given back.
    pub(crate) shrinking: Cell<bool>,
    /// The file system makes no holes: segments are emptied as a whole.
    pub(crate) no_holes: Cell<bool>,
    /// It was seen to make holes of single pages.
    pub(crate) has_holes: Cell<bool>,
    /// It is being asked.
    pub(crate) probing: Turn,
    /// How many segments had been recycled when hollow ones were removed last.
    pub(crate) hollow_removed_at: Cell<u64>,
}

impl Drop for Space {
    fn drop(&mut self) {
        self.give_residue_back();
    }
}

impl Space {
    /// What could not be removed counts no more: the directory is out, or is looked through again.
    pub(crate) fn give_residue_back(&self) {
        let residue = self.residue.take();
        if !planted!("half-made-files-counted") {
            self.volume.shared.give_budget(residue);
        }
    }

    pub(crate) fn new(volume: Rc<Volume>, reads: Rc<Reads>) -> Self {
        Self {
            volume,
            reads,
            residue: Cell::new(0),
            parked: RefCell::default(),
            trouble: RefCell::default(),
            detours: Cell::default(),
            removed: RefCell::default(),
            rolling: Cell::new(false),
            asking: Cell::new(false),
            shrinking: Cell::new(false),
            no_holes: Cell::new(false),
            has_holes: Cell::new(false),
            probing: Turn::default(),
            hollow_removed_at: Cell::new(0),
        }
    }
}

impl Space {
    /// Waits until no task is getting the next segment. Until the result is dropped, no other task does.
    pub(crate) async fn roll_turn(&self) -> RollTurn<'_> {
        self.volume.changed.until(|| (!self.rolling.replace(true)).then_some(())).await;
        RollTurn(self)
    }

    /// The same if no task is getting it.
    pub(crate) fn try_roll_turn(&self) -> Option<RollTurn<'_>> {
        (!self.rolling.replace(true)).then(|| RollTurn(self))
    }
}

/// See [`Space::roll_turn`].
pub(crate) struct RollTurn<'a>(&'a Space);

impl Drop for RollTurn<'_> {
    fn drop(&mut self) {
        self.0.rolling.set(false);
        self.0.volume.changed.wake_all();
    }
}
