//! One shard, as the executor that owns it has it: what it reads, its space, its log, and what moves remember.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use super::read::Reads;
use super::shared::Shared;
use super::space::Space;
use super::tasks::notify::Turn;
use super::volume::segment::RecordPlace;
use super::volume::{Spawn, Volume};
use super::write::log::Log;
use crate::driver::Driver;
use kvarts_contract::clock::Nanos;
use kvarts_contract::{buffers::Arena, io_error::DirId};

/// What moves of blocks remember from one to the next.
#[derive(Default)]
pub(crate) struct Moves {
    /// Blocks are being moved: one move at a time bounds the memory that moves take.
    pub(crate) moving: Turn,
    /// Raw records that encoding would not make smaller.
    pub(crate) unpaying: RefCell<BTreeSet<RecordPlace>>,
    /// When segments, of which generation, were looked at for what is cold.
    pub(crate) looked_at: RefCell<BTreeMap<u32, (u64, Nanos)>>,
    /// Bytes of records that were moved out of thin segments.
    pub(crate) thin_bytes: Cell<u64>,
}

impl Moves {
    /// A segment is recycled: forgets what is known of what it held.
    fn forget(&self, number: u32) {
        self.unpaying.borrow_mut().retain(|place| place.segment != number);
        self.looked_at.borrow_mut().remove(&number);
    }
}

/// One shard: its rooms, each of which knows those before it.
pub(crate) struct Shard {
    pub(crate) volume: Rc<Volume>,
    pub(crate) reads: Rc<Reads>,
    pub(crate) space: Rc<Space>,
    pub(crate) log: Rc<Log>,
    pub(crate) moves: Moves,
}

impl Shard {
    /// A shard without segments: recovery finds them. `begun` is called when a segment has been begun.
    pub(crate) fn new(
        place: (u32, DirId),
        shared: Arc<Shared>,
        way: (Rc<Driver>, Arena),
        spawn: Spawn,
        begun: fn(&Rc<Self>),
    ) -> Rc<Self> {
        let volume = Rc::new(Volume::new(place, shared, way, spawn));
        let reads = Rc::new(Reads::new(Rc::clone(&volume)));
        let space = Rc::new(Space::new(Rc::clone(&volume), Rc::clone(&reads)));
        let log = Rc::new(Log::new(Rc::clone(&volume), Rc::clone(&space)));
        let shard = Rc::new(Self { volume, reads, space, log, moves: Moves::default() });
        let own = Rc::downgrade(&shard);
        shard.log.tell_begun(move |segment| {
            if let Some(shard) = own.upgrade() {
                shard.moves.forget(segment);
                begun(&shard);
            }
        });
        shard
    }
}
