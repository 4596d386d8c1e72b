//! The way back: layers leave the device as they are computed, and are sealed as blocks when the last is there.
//!
//! [`LayerSink::store_layer`] enqueues the copy of a layer behind what the caller has enqueued so far and returns at
//! once: layer i-1 leaves while layer i is computed. [`LayerSink::seal`] waits for the copies and puts the blocks.
//! Until then the store knows nothing of them: a sink that is dropped, or whose device fails, leaves nothing, on disk
//! or in the arena. The arena holds all layers until the put is answered, because a record's header, which holds the
//! digests of all layers, is what makes its bytes blocks.

use std::sync::Arc;

use kvarts_layout::{BlockKey, Coordinate, Group, Layout, NamespaceId};
use kvarts_store::api::{Durability, Parent, Placed, PutReply, PutRequest};
use kvarts_store::error::Error;
use kvarts_store::io::Buf;
use kvarts_store::rt::Nanos;
use kvarts_store::rt::mailbox::Ticket;

use crate::destination::Destination;
use crate::device::{Batch, Direction, Event, Piece, Stream};
use crate::error::LandError;
use crate::pipeline::Pipeline;
use crate::ring::{Seat, seats};

/// Blocks that are to be stored, layer by layer.
#[derive(Clone, Debug)]
pub struct StoreRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// What stands before the first block.
    pub parent: Parent,
    /// How many blocks of the prompt stand before the first, if known.
    pub first_block: Option<u32>,
    /// One key for each block.
    pub keys: Vec<BlockKey>,
    /// Where the engine has them.
    pub from: Destination,
    /// When the put is acknowledged.
    pub durability: Durability,
    /// When the caller stops caring.
    pub deadline: Option<Nanos>,
}

/// Layers on their way from the device.
#[derive(Debug)]
pub struct LayerSink {
    pipeline: Pipeline,
    request: StoreRequest,
    copies: Stream,
    ring: Buf,
    seats: Vec<Seat>,
    pieces: Vec<Piece>,
    /// The event behind each layer's copy.
    events: Vec<Option<Event>>,
}

impl Drop for LayerSink {
    fn drop(&mut self) {
        // The device may still write to the arena's piece, which is given back after this.
        for event in self.events.iter().flatten() {
            // An error is as good as an end: nothing is written any more.
            let _ = self.pipeline.device().synchronize(event);
        }
    }
}

impl Pipeline {
    /// Begins to take layers. The arena must have room for all of them.
    pub fn store_layers(&self, request: StoreRequest) -> Result<LayerSink, LandError> {
        if request.keys.len() != request.from.blocks() as usize {
            let (keys, places) = (request.keys.len(), request.from.blocks());
            return Err(LandError::Request(format!("{keys} keys for {places} places")));
        }
        let sizes = request.from.layer_bytes();
        let wanted: u64 = sizes.iter().map(|bytes| bytes.next_multiple_of(crate::ring::ALIGN)).sum();
        let total = self.arena().piece_max();
        if wanted > total {
            return Err(LandError::ArenaTooSmall { wanted, total });
        }
        let full = || LandError::ArenaFull { wanted, free: self.arena().usage().largest_free };
        let ring = self.arena().take(wanted, wanted).ok_or_else(full)?;
        let seats = seats(&sizes, ring.len() as u64)
            .filter(|seats| seats.iter().all(|seat| seat.after == 0))
            .ok_or_else(|| LandError::Request("layers that do not fit where they were said to".to_owned()))?;
        let copies = self.device().stream()?;
        let events = vec![None; seats.len()];
        Ok(LayerSink { pipeline: self.clone(), request, copies, ring, seats, pieces: Vec::new(), events })
    }
}

impl LayerSink {
    /// Takes a layer as it is behind everything that `computed` has been given so far. The caller must not change it
    /// before the returned event is done: let the stream that would wait for it.
    pub fn store_layer(&mut self, layer: u32, computed: &Stream) -> Result<Event, LandError> {
        let host = self.host(layer)?;
        let taken = self.events.get(layer as usize).is_some_and(Option::is_some);
        if taken {
            return Err(LandError::Request(format!("layer {layer} was taken before")));
        }
        let device = Arc::clone(self.pipeline.device());
        device.wait(&self.copies, &device.record(computed)?)?;
        self.request.from.pieces(layer, self.request.from.blocks(), &mut self.pieces);
        let batch = Batch {
            direction: Direction::ToHost,
            method: self.pipeline.curve().choose(self.pieces.len() as u64, host.len() as u64),
            host: &host,
            memories: self.request.from.memories(),
            pieces: &self.pieces,
        };
        device.copy(&self.copies, &batch)?;
        let event = device.record(&self.copies)?;
        if let Some(slot) = self.events.get_mut(layer as usize) {
            *slot = Some(event.clone());
        }
        Ok(event)
    }

    fn host(&self, layer: u32) -> Result<Buf, LandError> {
        let seat = self.seats.get(layer as usize);
        seat.and_then(|seat| self.ring.slice(seat.offset as usize, seat.bytes as usize))
            .ok_or_else(|| LandError::Request(format!("the shape has no layer {layer}")))
    }

    /// Waits until every layer has left the device and puts the blocks. A layer that was never taken, or whose copy
    /// failed, makes this an error, and nothing is stored.
    pub fn seal(self) -> Result<Ticket<Result<PutReply, Error>>, LandError> {
        for (layer, event) in self.events.iter().enumerate() {
            let event = event.as_ref();
            let event = event.ok_or_else(|| LandError::Request(format!("layer {layer} was not taken")))?;
            self.pipeline.device().synchronize(event)?;
        }
        let buffers = (0..self.seats.len() as u32).map(|layer| self.host(layer)).collect::<Result<_, _>>()?;
        let request = &self.request;
        let from = Placed::layers(request.from.shape(), buffers, request.from.blocks());
        Ok(self.pipeline.store().put(PutRequest {
            namespace: request.namespace,
            group: request.group,
            coordinate: request.coordinate,
            parent: request.parent,
            first_block: request.first_block,
            keys: request.keys.clone(),
            from: from.map_err(LandError::Store)?,
            // As it lies in the arena, so that it is written without a copy.
            layout: Some(Layout::LayerBlock),
            durability: request.durability,
            expires_after: None,
            origins: None,
            deadline: request.deadline,
        }))
    }
}
