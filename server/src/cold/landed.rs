//! What has come of the blocks of one flight, for the reads that wait for them while they are being stored.
//!
//! They lie in the memory that their put takes them from, and go when the flight ends: the store has them then, or they are lost.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvarts_cold::format::PackIndex;
use kvarts_cold::promote::News;
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::{BlockKey, OriginId};

/// Some layers of a block, or all.
#[derive(Clone, Debug)]
struct Piece {
    layers: Range<u32>,
    memory: SharedBuf,
}

/// A block of which something came.
#[derive(Clone, Debug)]
pub(super) struct Came {
    index: Arc<PackIndex>,
    run: u32,
    block: u32,
    pieces: Vec<Piece>,
}

impl Came {
    /// Which production it is.
    pub(super) fn origin(&self) -> Option<OriginId> {
        Some(self.index.run(self.run)?.block(self.block)?.origin)
    }

    /// Whether its time to live is over.
    pub(super) fn has_expired(&self, now_ms: u64) -> bool {
        let expires_ms = self.index.run(self.run).map_or(0, |run| run.run.expires_ms);
        expires_ms != 0 && expires_ms <= now_ms
    }

    /// The digest of a chunk, by its number in the block.
    pub(super) fn digest(&self, chunk: u32) -> Option<u32> {
        self.index.run(self.run)?.block(self.block)?.digests.get(chunk as usize).copied()
    }

    fn has(&self, layers: &Range<u32>) -> bool {
        layers.clone().all(|layer| self.pieces.iter().any(|piece| piece.layers.contains(&layer)))
    }

    /// The chunks of some layers, by their number in the block.
    pub(super) fn chunks(&self, layers: &Range<u32>) -> Option<Vec<(u32, SharedBuf)>> {
        let shape = &self.index.run(self.run)?.shape;
        let (mut found, mut number) = (Vec::new(), 0);
        let mut at: Option<(u32, usize)> = None;
        for (layer, of_layer) in (0u32..).zip(shape.layers()) {
            let piece = self.pieces.iter().find(|piece| piece.layers.contains(&layer));
            // Where the layer begins in its piece: behind the one before, if that was in the same.
            let mut from = match (at, piece) {
                (Some((begin, from)), Some(piece)) if begin == piece.layers.start => from,
                _ => 0,
            };
            for chunk in &of_layer.chunks {
                let bytes = usize::try_from(chunk.bytes).ok()?;
                if layers.contains(&layer) {
                    found.push((number, piece?.memory.slice(from, bytes)?));
                }
                (from, number) = (from.checked_add(bytes)?, number + 1);
            }
            at = piece.map(|piece| (piece.layers.start, from));
        }
        Some(found)
    }
}

/// What is known of a block.
#[derive(Clone, Debug)]
enum State {
    Came(Came),
    InStore,
    Lost,
}

/// What there is of a block for who looks.
#[derive(Debug)]
pub(super) enum Look {
    /// It is on its way.
    Coming,
    /// The layers that were asked for are here.
    Here(Came),
    /// The store has it.
    InStore,
    /// It will not come.
    Lost,
}

/// Blocks of a flight.
#[derive(Debug, Default)]
pub(super) struct Landed(Mutex<BTreeMap<BlockKey, State>>);

impl Landed {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<BlockKey, State>> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what is told of one of these blocks.
    pub(super) fn take(&self, keys: &[BlockKey], news: News<'_>) {
        let (ordinal, arrived) = match news {
            News::NotThere(ordinal) | News::InStore(ordinal) | News::Lost(ordinal) => (ordinal, None),
            News::Came(arrived) => (arrived.part.ordinal, Some(arrived)),
        };
        let Some(key) = keys.get(ordinal) else { return };
        let mut all = self.lock();
        let piece = arrived.and_then(|arrived| {
            let memory = arrived.bytes.as_ref().ok()?.clone();
            Some((arrived, Piece { layers: arrived.part.layers.clone(), memory }))
        });
        match (piece, all.get_mut(key)) {
            (Some((_, piece)), Some(State::Came(came))) => came.pieces.push(piece),
            (Some(_), Some(State::Lost | State::InStore)) => {}
            (Some((arrived, piece)), None) => {
                let (run, block) = (arrived.part.run, arrived.part.block);
                let came = Came { index: Arc::clone(&arrived.index), run, block, pieces: vec![piece] };
                all.insert(*key, State::Came(came));
            }
            (None, _) => {
                let state = if matches!(news, News::InStore(_)) { State::InStore } else { State::Lost };
                all.insert(*key, state);
            }
        }
    }

    /// What there is of some layers of a block.
    pub(super) fn look(&self, key: &BlockKey, layers: &Range<u32>) -> Look {
        match self.lock().get(key) {
            Some(State::Came(came)) if came.has(layers) => Look::Here(came.clone()),
            Some(State::Came(_)) | None => Look::Coming,
            Some(State::InStore) => Look::InStore,
            Some(State::Lost) => Look::Lost,
        }
    }
}
