//! What a store in use says by now. It removes a file only after a checkpoint has called the segment free, so a segment
//! that looks lost is judged by the checkpoint that is the newest after it was looked at.

use std::sync::{Mutex, PoisonError};

use kvarts_layout::format::PAGE;
use kvarts_layout::format::Position;
use kvarts_layout::format::checkpoint::{CheckpointHeader, SEGMENT_FREE, SegmentState};

use crate::checkpoint::{self, Known};
use crate::disk::Disk;
use crate::findings::Findings;
use crate::store::Store;
use crate::window::{Tally, Window};

/// How often a checkpoint is read before it counts as gone.
const TRIES: usize = 4;

/// The checkpoints that were read since a check began: at most as many as the store has written meanwhile.
#[derive(Debug)]
pub(super) struct Newest<'a> {
    store: &'a Store,
    tally: &'a Tally,
    shards: Vec<Mutex<Known>>,
}

/// What a checkpoint says of one segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said {
    /// Which checkpoint; zero if there is none.
    sequence: u64,
    /// What it says.
    pub known: Option<SegmentState>,
    /// How many live records it lists.
    pub listed: u64,
}

impl Said {
    /// What a checkpoint says of a segment.
    pub(super) fn by(checkpoint: &Known, segment: u32) -> Self {
        Self {
            sequence: checkpoint.sequence(),
            known: checkpoint.segments.get(&segment).copied(),
            listed: checkpoint.listed.get(&segment).copied().unwrap_or(0),
        }
    }

    /// Whether it says that the segment was in use.
    pub(super) fn is_used(&self) -> bool {
        self.known.is_some_and(|known| known.state != SEGMENT_FREE)
    }
}

impl<'a> Newest<'a> {
    /// For the shards of a store.
    pub(super) fn new(store: &'a Store, tally: &'a Tally) -> Self {
        Self { store, tally, shards: store.shards.iter().map(|_| Mutex::default()).collect() }
    }

    /// What the newest checkpoint of the shard at `at` says, unless that is what was `said` before.
    pub(super) fn after(&self, at: usize, segment: u32, said: &Said) -> Option<Said> {
        let shard = self.store.shards.get(at)?;
        let disk = &*self.store.directories.get(shard.directory)?.disk;
        let mut newest = self.shards.get(at)?.lock().unwrap_or_else(PoisonError::into_inner);
        // Where two are written while both files are read, neither was whole when its turn came.
        for _ in 0..TRIES {
            if newest.sequence().max(said.sequence) >= self.sequence(disk, shard.number) {
                break;
            }
            let records = (self.tally, false);
            *newest =
                checkpoint::read(disk, &self.store.keyring, shard.number, records, &mut Findings::default());
        }
        (newest.sequence() > said.sequence).then(|| Said::by(&newest, segment))
    }

    /// The sequence of the newest checkpoint: its header is written after all that is behind it.
    fn sequence(&self, disk: &dyn Disk, shard: u32) -> u64 {
        let keyring = &self.store.keyring;
        let of = |slot: u32| {
            let file = disk.open(&checkpoint::path(shard, slot)).ok()?;
            let place = Position { store: keyring.store, shard, segment: slot, generation: 0, offset: 0 };
            let mut window = Window::new(&*file, file.len(), self.tally);
            window.read_ahead(false);
            let header = CheckpointHeader::decode(window.bytes(0, PAGE), &place, &keyring.secret).ok()?;
            Some(header.position.generation)
        };
        of(0).max(of(1)).unwrap_or(0)
    }
}
