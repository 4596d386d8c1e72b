//! An extent: a run of a chain's blocks in one piece of the pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvarts_contract::api::{Order, Placed, ReadEvent, ReadRequest, ReadStream, Verify};
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::class::Class;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::plan::Tile;
use kvarts_layout::{BlockKey, BlockShape, planted};

use super::column::Column;

/// How much of a layer lies together, about: a copy of this many bytes uses a link well.
const STRETCH_BYTES: u64 = 2 << 20;
/// The most blocks of an extent.
const BLOCKS_MAX: u64 = 256;
/// An extent is at most this part of the pool: one in this many.
const PART: u64 = 16;

/// How many blocks of a shape one extent has at most, in a pool of this many bytes.
pub(super) fn blocks_of(shape: &BlockShape, pool: u64) -> u64 {
    let layer = shape.layers().iter().map(kvarts_layout::LayerShape::bytes).max().unwrap_or(0).max(1);
    let by_room = pool / PART / shape.block_bytes().max(1);
    STRETCH_BYTES.div_ceil(layer).min(by_room).clamp(1, BLOCKS_MAX)
}

/// What became of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// It is asked for.
    Coming,
    /// It is here, verified.
    Here,
    /// It is not, and will not come.
    Failed,
}

/// A read of an extent's blocks.
#[derive(Debug)]
pub(super) enum Read {
    /// Its turn has not come.
    Waits,
    /// It is under way.
    Going(ReadStream),
    /// It is over, one way or the other.
    Over,
}

/// A run of blocks.
#[derive(Debug)]
pub(super) struct Extent {
    pub(super) column: Column,
    pub(super) shape: Arc<BlockShape>,
    pub(super) keys: Vec<BlockKey>,
    pub(super) states: Vec<State>,
    pub(super) memory: SharedBuf,
    pub(super) read: Read,
    pub(super) class: Class,
    /// Blocks that are here and that no stage finds any more.
    pub(super) withdrawn: u32,
    /// Stages that hold it.
    pub(super) holders: u32,
    /// The turn of its last use, and how far its first block is from the beginning of its chain.
    pub(super) used: u64,
    pub(super) depth: u32,
    /// When something of it came last, or its read began.
    pub(super) heard: Nanos,
    /// What the store said of its deletes before the read began.
    pub(super) deletes: Option<u64>,
    /// Why blocks of it did not come, where that was said.
    pub(super) reasons: BTreeMap<u32, Reason>,
}

impl Extent {
    /// Asks for its blocks.
    pub(super) fn request(&self) -> Result<ReadRequest, Reason> {
        let tile = Tile { blocks: 0..self.keys.len() as u32, layers: 0..self.shape.layers().len() as u32 };
        let Column { namespace, group, coordinate } = self.column;
        Ok(ReadRequest {
            namespace,
            group,
            coordinate,
            keys: self.keys.clone(),
            layers: None,
            // Each block counts as soon as it is here.
            order: Order::Blocks,
            into: Placed::tile(Order::Layers, &self.shape, &tile, self.memory.clone())?,
            verify: Verify::Always,
            class: self.class,
            deadline: None,
        })
    }

    /// Takes in what its read told; true if that was the end.
    pub(super) fn heard(&mut self, event: ReadEvent, now: Nanos) -> bool {
        self.heard = now;
        match event {
            ReadEvent::Block(block) => {
                if planted!("blocks-behind-count-too") {
                    self.states.fill(State::Here);
                }
                if let Some(state) = self.states.get_mut(block as usize) {
                    *state = State::Here;
                }
                false
            }
            ReadEvent::Layer { .. } => false,
            // Each good block was announced before. Memory that a disk may still write to is kept by the read itself.
            ReadEvent::End(end) => {
                self.reasons.extend(end.failures);
                self.end();
                true
            }
            ReadEvent::Released => false,
        }
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self) {
        self.read = Read::Over;
        for state in &mut self.states {
            if *state == State::Coming {
                *state = State::Failed;
            }
        }
    }

    /// Whether it may go.
    pub(super) fn is_free(&self) -> bool {
        self.holders == 0 && matches!(self.read, Read::Over)
    }

    /// Blocks that are here.
    pub(super) fn here(&self) -> u64 {
        self.states.iter().filter(|state| **state == State::Here).count() as u64
    }
}
