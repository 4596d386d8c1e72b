//! What of `bench gpu` is about bytes: that those on the device are those of the blocks, and that layers which leave the
//! device are the same when they come again.

use std::time::{Duration, Instant};

use kvarts_contract::api::{Durability, Parent};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::SharedBuf;
use kvarts_gpudirect::device::{Batch, Direction, Method, Piece, drain};
use kvarts_gpudirect::error::LandError;
use kvarts_gpudirect::gather::copy_split;
use kvarts_gpudirect::store_layers::{LayerSink, StoreRequest};
use kvarts_layout::BlockKey;
use serde_json::{Value, json};

use super::Stage;
use crate::pairs::summary;
use crate::setup::{self, expect_stored, key};
use kvarts_terminal::Failure;

/// Bytes of a put by layers: less than a segment, and more than what is put whole.
const PUT_BYTES: u64 = 192 << 20;
/// How long a put waits for the arena.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often layers leave.
const ROUNDS: u64 = 3;

impl Stage<'_> {
    /// Looks at the bytes on the device after a pass, and lets them leave and come again.
    pub(super) fn bytes(&self) -> Result<Value, Failure> {
        // The host's memory has the blocks as the engine reads them.
        self.race.engine(self.store)?;
        let longest = self.hosts.iter().map(SharedBuf::len).max().unwrap_or_default();
        let scratch = setup::memory(longest)?;
        let device = self.opened.device();
        // It works without, only slower.
        let pinned = device.pin(scratch.region()).is_ok();
        let found = self.bytes_by(&scratch);
        if pinned {
            device.unpin(scratch.region());
        }
        found
    }

    fn bytes_by(&self, scratch: &SharedBuf) -> Result<Value, Failure> {
        self.wipe(scratch)?;
        self.lands(&self.keys)?;
        let right = self.is_right(scratch)?;
        let (mut back, mut copy, mut streamed, mut keys) = (Vec::new(), Vec::new(), true, Vec::new());
        for round in 0..ROUNDS {
            keys = (0..self.keys.len() as u64).map(|number| key(100 + round, number)).collect();
            let begin = Instant::now();
            streamed &= self.leaves(&keys)?;
            back.push(begin.elapsed().as_secs_f64() * 1e3);
            let begin = Instant::now();
            for layer in 0..self.layers() {
                self.move_layer(layer, Direction::ToHost, scratch)?;
            }
            copy.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        self.wipe(scratch)?;
        self.lands(&keys)?;
        Ok(json!({
            "bytes_right": right,
            "back_ms": summary(back).median,
            "back_copy_ms": summary(copy).median,
            "back_by_layers": streamed,
            "back_right": self.is_right(scratch)?,
        }))
    }

    /// Moves all pieces of a layer, between the pool and memory that is laid out as the engine's own.
    fn move_layer(&self, layer: u32, direction: Direction, host: &SharedBuf) -> Result<(), Failure> {
        let (device, mut pieces) = (self.opened.device(), Vec::<Piece>::new());
        self.into.pieces(layer, self.into.blocks(), &mut pieces);
        let stream = device.stream().map_err(Failure::user)?;
        let (method, memories) = (Method::Each, self.into.memories());
        let batch = Batch { direction, method, host, memories, pieces: &[] };
        let copied = copy_split(&*device, &stream, &self.curve, &batch, &mut pieces);
        copied.and(drain(&*device, &stream)).map_err(Failure::user)
    }

    /// Nothing of what was there may look like what comes.
    fn wipe(&self, scratch: &SharedBuf) -> Result<(), Failure> {
        scratch.fill(0xee);
        (0..self.layers()).try_for_each(|layer| self.move_layer(layer, Direction::ToDevice, scratch))
    }

    fn is_right(&self, scratch: &SharedBuf) -> Result<bool, Failure> {
        for (layer, host) in (0u32..).zip(&self.hosts) {
            scratch.fill(0);
            self.move_layer(layer, Direction::ToHost, scratch)?;
            let there = scratch
                .slice(0, host.len())
                .ok_or_else(|| Failure::user("the memory of the benchmark is too small for a layer"))?;
            if there.to_vec() != host.to_vec() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Begins a put by layers. The piece of the arena that the one before it had comes back a moment behind its answer.
    fn begin(&self, request: &StoreRequest) -> Result<LayerSink, Failure> {
        let begin = Instant::now();
        loop {
            match self.pipeline.store_layers(request.clone()) {
                Err(LandError::ArenaFull { .. }) if begin.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_micros(100));
                }
                begun => return begun.map_err(Failure::user),
            }
        }
    }

    /// Stores what is in the pool under other keys, layer by layer; whether all of it was written while it came.
    fn leaves(&self, keys: &[BlockKey]) -> Result<bool, Failure> {
        let compute = self.opened.device().stream().map_err(Failure::user)?;
        let each = (PUT_BYTES / self.into.shape().block_bytes().max(1)).max(1) as usize;
        let (read, mut parent, mut streamed) = (&self.race.request, Parent::Root, true);
        for (at, some) in keys.chunks(each).enumerate() {
            let first = at * each;
            let request = StoreRequest {
                namespace: read.namespace,
                group: read.group,
                coordinate: read.coordinate,
                parent,
                first_block: None,
                keys: some.to_vec(),
                from: self.pool.of(first..first + some.len())?,
                durability: Durability::Durable,
                deadline: None,
            };
            let mut sink = self.begin(&request)?;
            streamed &= sink.is_streamed();
            for layer in 0..self.layers() {
                sink.store_layer(layer, &compute).map_err(Failure::user)?;
            }
            expect_stored(&block_on(sink.seal().map_err(Failure::user)?))?;
            parent = some.last().map_or(Parent::Root, |last| Parent::Key(*last));
        }
        Ok(streamed)
    }
}
