//! `Get` and `GetLayers`: the engine's reads as streams, window by window, without copying.
//!
//! One task works for each read. It takes memory for a window, lets the engine fill it, and hands what the engine
//! announces to the connection; memory comes back when the connection has sent it. At most two windows and a few
//! messages of a read wait at a time, however slow its client is, and one that takes nothing for a while is dropped.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId};
use kvarts_store::api::{Order, ReadEnd, ReadEvent, ReadRequest, Verify};
use kvarts_store::error::Reason;
use kvarts_store::io::Buf;
use kvarts_store::rt::Class;
use tokio::sync::mpsc::Sender;
use tonic::Code;

use super::call::Call;
use super::fault::{self, Fault, Outcome};
use super::frame::{self, Outgoing};
use super::window::{self, Window};
use super::{limits, wire};
use crate::node::Frozen;
use crate::proto;
use crate::proto::read_reply::Part;

/// A read that was checked.
#[derive(Debug)]
pub(super) struct Download {
    namespace: NamespaceId,
    group: Group,
    coordinate: Coordinate,
    shape: BlockShape,
    keys: Vec<BlockKey>,
    layers: Range<u32>,
    order: Order,
    class: Class,
}

impl Download {
    pub(super) fn check(call: &Call, order: Order, wire: proto::ReadRequest) -> Outcome<Self> {
        let keys = wire::keys(&wire.keys)?;
        if keys.is_empty() {
            return Err(Reason::Empty.into());
        }
        let mut sorted: Vec<&BlockKey> = keys.iter().collect();
        sorted.sort_unstable();
        if let Some([key, _]) = sorted.array_windows().find(|[a, b]| a == b) {
            return Err(Reason::Duplicate(**key).into());
        }
        let namespace = wire::namespace(&wire.namespace)?;
        let model = call.node.models.get(&call.caller, namespace)?;
        let (group, coordinate) = wire::column(wire.column.as_ref())?;
        let shape = model.shape(group, coordinate)?;
        let count = u32::try_from(shape.layers().len()).map_err(|_| Reason::TooMany("layers"))?;
        let layers = wire.layers.map_or(0..count, |range| range.start..range.end);
        if layers.is_empty() {
            return Err(Reason::Empty.into());
        }
        if layers.end > count {
            return Err(Reason::Shape(format!("layers up to {}, the group has {count}", layers.end)).into());
        }
        let total = window::layers_bytes(&shape, &layers).saturating_mul(keys.len() as u64);
        let largest = shape.layers().iter().map(kvarts_layout::LayerShape::bytes).max().unwrap_or(0);
        if largest > call.node.memory.piece_max() || total > limits::REQUEST_BYTES_MAX {
            return Err(Reason::TooMany("bytes").into());
        }
        let class = match proto::ReadClass::try_from(wire.class) {
            Ok(proto::ReadClass::ReadForeground) => Class::Foreground,
            Ok(proto::ReadClass::ReadPrefetch) => Class::Prefetch,
            Ok(proto::ReadClass::ReadBackground) => Class::Background,
            Err(_) => return Err(Fault::malformed(format!("class: {} is none", wire.class))),
        };
        Ok(Self { namespace, group, coordinate, shape, keys, layers, order, class })
    }

    fn request(&self, call: &Call, window: &Window, memory: &Buf) -> Outcome<ReadRequest> {
        let keys = self.keys.get(window.blocks.start as usize..window.blocks.end as usize);
        Ok(ReadRequest {
            namespace: self.namespace,
            group: self.group,
            coordinate: self.coordinate,
            keys: keys.unwrap_or_default().to_vec(),
            layers: Some(window.layers.clone()),
            order: self.order,
            into: window::place(self.order, &self.shape, window, memory)?,
            verify: Verify::Always,
            class: self.class,
            deadline: Some(call.engine_deadline()),
        })
    }
}

/// A read under way.
struct Reading {
    call: Arc<Call>,
    download: Download,
    to: Sender<Outgoing>,
    /// Bytes that are fetched at once.
    budget: u64,
    /// Leading blocks that are good so far.
    good: u32,
    /// Wanted layers that were announced.
    layers_done: u32,
    failures: BTreeMap<u32, Reason>,
}

/// Why a read stops before its last window.
enum Stop {
    /// The client went away, or took nothing for too long.
    Gone,
    /// Nothing can be said of the blocks.
    Fault(Fault),
    /// The deadline passed: what was delivered is what there is.
    Late,
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Reason> for Stop {
    fn from(reason: Reason) -> Self {
        Self::Fault(reason.into())
    }
}

/// Works for one read until it has ended or its client is gone.
pub(super) async fn run(call: Arc<Call>, download: Download, to: Sender<Outgoing>) {
    let good = download.keys.len() as u32;
    let budget = limits::WINDOW_BYTES.min(call.node.memory.piece_max());
    let failures = BTreeMap::new();
    let mut reading = Reading { call, download, to, budget, good, layers_done: 0, failures };
    let ended = match reading.download.order {
        Order::Blocks => reading.by_blocks().await,
        Order::Layers => reading.by_layers().await,
    };
    match ended {
        Ok(()) => reading.finish(Ok(()), true).await,
        Err(Stop::Late) => reading.finish(Ok(()), false).await,
        Err(Stop::Fault(fault)) => reading.finish(Err(fault), false).await,
        Err(Stop::Gone) => {}
    }
}

impl Reading {
    async fn by_blocks(&mut self) -> Result<(), Stop> {
        let (all, count) = (self.download.layers.clone(), self.download.keys.len() as u32);
        let each = window::layers_bytes(&self.download.shape, &all);
        let mut first = 0;
        while first < count {
            if each <= self.budget {
                let some = window::fitting(self.budget, each).min(count - first);
                let window = Window { blocks: first..first + some, layers: all.clone() };
                self.blocks_window(&window).await?;
                first += some;
                continue;
            }
            // One block is more than a window: some of its layers at a time, and ready when all are there.
            let (mut left, mut whole) = (all.clone(), true);
            while whole && !left.is_empty() {
                let layers = window::fitting_layers(&self.download.shape, &left, 1, self.budget);
                let window = Window { blocks: first..first + 1, layers };
                whole = self.blocks_window(&window).await? == 1;
                left.start = window.layers.end;
            }
            if whole {
                self.block_ready(first).await?;
            }
            first += 1;
        }
        Ok(())
    }

    async fn by_layers(&mut self) -> Result<(), Stop> {
        let mut left = self.download.layers.clone();
        // Nobody needs more of a block that is behind a failed one.
        while !left.is_empty() && self.good > 0 {
            let layers = window::fitting_layers(&self.download.shape, &left, self.good, self.budget);
            let window = Window { blocks: 0..self.good, layers };
            if window.bytes(&self.download.shape) <= self.budget {
                self.layers_window(&window, true).await?;
                left.start = window.layers.end;
                continue;
            }
            // One layer is more than a window: some of the blocks at a time, and ready when all are there.
            let each = window::layers_bytes(&self.download.shape, &window.layers);
            let (some, mut first) = (window::fitting(self.budget, each), 0);
            while first < self.good {
                let blocks = first..self.good.min(first.saturating_add(some));
                first = blocks.end;
                self.layers_window(&Window { blocks, layers: window.layers.clone() }, false).await?;
            }
            self.layer_ready(left.start).await?;
            left.start = window.layers.end;
        }
        Ok(())
    }

    /// Begins to read a window.
    async fn begin(&self, window: &Window) -> Result<(Buf, kvarts_store::api::ReadStream), Stop> {
        let bytes = window.bytes(&self.download.shape);
        let wait = tokio::time::timeout(limits::WAIT, self.call.node.memory.take(bytes)).await;
        let memory = wait.map_err(|_| Fault::busy("the server's memory for requests is full"))?;
        let memory = memory.ok_or(Reason::TooMany("bytes"))?;
        let request = self.download.request(&self.call, window, &memory)?;
        let stream = self.call.node.store().read(request).map_err(|error| match error.0 {
            Reason::DeadlineInPast => Stop::Late,
            reason => reason.into(),
        })?;
        Ok((memory, stream))
    }

    /// Takes the end of a window's read in; says whether its deadline passed.
    fn ended(&mut self, window: &Window, end: ReadEnd) -> Result<(), Stop> {
        if (end.usable_blocks as usize) < window.blocks.len() {
            self.good = self.good.min(window.blocks.start + end.usable_blocks);
        }
        for (block, reason) in end.failures {
            self.failures.entry(window.blocks.start + block).or_insert(reason);
        }
        let whole = end.usable_layers as usize == window.layers.len();
        if whole { Ok(()) } else { Err(Stop::Late) }
    }

    /// Reads and sends a window in block order; gives how many blocks were sent. Announces them if they are whole.
    async fn blocks_window(&mut self, window: &Window) -> Result<u32, Stop> {
        let (memory, stream) = self.begin(window).await?;
        let all = self.download.layers.clone();
        let (mut sent, mut ahead) = (0, None);
        loop {
            let event = match ahead.take() {
                Some(event) => event,
                None => stream.next().await,
            };
            match event {
                ReadEvent::Block(first) => {
                    // Those that follow and are there already go together.
                    let mut end = first + 1;
                    ahead = stream.try_next();
                    while ahead == Some(ReadEvent::Block(end)) {
                        end += 1;
                        ahead = stream.try_next();
                    }
                    let before = all.start..window.layers.start;
                    let offset = window::layers_bytes(&self.download.shape, &before);
                    self.range(window, &memory, 0, first..end, offset).await?;
                    sent += end - first;
                    if window.layers == all {
                        for block in first..end {
                            self.block_ready(window.blocks.start + block).await?;
                        }
                    }
                }
                ReadEvent::End(end) => {
                    self.ended(window, end)?;
                    return Ok(sent);
                }
                ReadEvent::Layer { .. } | ReadEvent::Released => {}
            }
        }
    }

    /// Reads and sends a window in layer order. Announces each layer if `whole` says that no more of it will come.
    async fn layers_window(&mut self, window: &Window, whole: bool) -> Result<(), Stop> {
        let (memory, stream) = self.begin(window).await?;
        loop {
            match stream.next().await {
                ReadEvent::Layer { layer, blocks } => {
                    if (blocks as usize) < window.blocks.len() {
                        self.good = self.good.min(window.blocks.start + blocks);
                    }
                    if blocks > 0 {
                        self.range(window, &memory, layer, 0..blocks, 0).await?;
                    }
                    if whole {
                        self.layer_ready(layer).await?;
                    }
                }
                ReadEvent::End(end) => return self.ended(window, end),
                ReadEvent::Block(_) | ReadEvent::Released => {}
            }
        }
    }

    /// Sends the bytes of some blocks of a window, which were announced. `offset` is what of each block's range was
    /// sent before.
    async fn range(
        &self,
        window: &Window,
        memory: &Buf,
        layer: u32,
        blocks: Range<u32>,
        offset: u64,
    ) -> Result<(), Stop> {
        let (order, shape) = (self.download.order, &self.download.shape);
        let about = proto::ReadData {
            layer,
            first_block: window.blocks.start + blocks.start,
            blocks: blocks.len() as u32,
            offset,
            ..proto::ReadData::default()
        };
        let mut frame = FrameBuilder { about, crc: crc32fast::Hasher::new(), bytes: Vec::new(), len: 0 };
        for (mut at, mut len) in window::ranges(order, shape, window, layer, blocks.clone()) {
            while len > 0 {
                let some = len.min((limits::FRAME_BYTES - frame.len) as u64);
                let buf = memory.slice(at as usize, some as usize).ok_or(Reason::OutOfBounds)?;
                frame.push(frozen(buf));
                (at, len) = (at + some, len - some);
                if frame.len == limits::FRAME_BYTES {
                    self.data(&mut frame).await?;
                }
            }
        }
        if frame.len > 0 {
            self.data(&mut frame).await?;
        }
        Ok(())
    }

    async fn data(&self, frame: &mut FrameBuilder) -> Result<(), Stop> {
        let bytes = frame.len as u64;
        let outgoing = frame.take();
        self.call.caller.tenant.spend(bytes).await;
        self.call.bytes_out.fetch_add(bytes, Ordering::Relaxed);
        self.send(outgoing).await
    }

    async fn layer_ready(&mut self, layer: u32) -> Result<(), Stop> {
        self.layers_done = layer + 1 - self.download.layers.start;
        let ready = proto::LayerReady { layer, blocks: self.good };
        self.send(frame::message(Part::Layer(ready))).await
    }

    async fn block_ready(&self, block: u32) -> Result<(), Stop> {
        self.send(frame::message(Part::Block(proto::BlockReady { block }))).await
    }

    async fn send(&self, outgoing: Outgoing) -> Result<(), Stop> {
        match tokio::time::timeout(limits::STALL, self.to.send(outgoing)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Stop::Gone),
            Err(_) => {
                self.call.end(Code::DeadlineExceeded);
                Err(Stop::Gone)
            }
        }
    }

    async fn finish(self, ended: Outcome<()>, whole: bool) {
        let node = &self.call.node;
        self.call.end(ended.as_ref().map_or_else(|fault| fault.code, |()| Code::Ok));
        let mut missed = 0;
        for reason in self.failures.values() {
            node.metrics.missed(reason_name(reason), 1);
            missed += 1;
        }
        node.metrics.hit((self.download.keys.len() as u64).saturating_sub(missed));
        let wanted = self.download.layers.len() as u32;
        let failure = |(block, reason): (&u32, &Reason)| proto::read_end::Failure {
            block: *block,
            error: Some(fault::detail(reason)),
        };
        let end = proto::ReadEnd {
            usable_blocks: self.good,
            usable_layers: if whole || self.download.order == Order::Blocks {
                wanted
            } else {
                self.layers_done
            },
            failures: self.failures.iter().map(failure).collect(),
        };
        if ended.is_ok() && self.send(frame::message(Part::End(end))).await.is_err() {
            return;
        }
        // A client that is gone needs no status.
        let _ = self.send(Outgoing::End(ended)).await;
    }
}

/// The name of a reason in metrics.
pub(super) fn reason_name(reason: &Reason) -> &'static str {
    proto::Reason::try_from(fault::detail(reason).reason).unwrap_or_default().as_str_name()
}

/// Bytes of a window that the engine has announced, to be sent as they are.
fn frozen(buf: Buf) -> Bytes {
    // SAFETY: the engine announced these bytes as complete, and what was announced stays as it is; the memory was
    // taken from the arena for this window alone and goes back when the last of its buffers is dropped, so nobody
    // else writes to it before the connection is done with it.
    unsafe { Frozen::bytes(buf) }
}

/// A message of data that is being put together.
struct FrameBuilder {
    about: proto::ReadData,
    crc: crc32fast::Hasher,
    bytes: Vec<Bytes>,
    len: usize,
}

impl FrameBuilder {
    fn push(&mut self, bytes: Bytes) {
        self.crc.update(&bytes);
        self.len += bytes.len();
        self.bytes.push(bytes);
    }

    /// The message; what follows it in the range begins behind it.
    fn take(&mut self) -> Outgoing {
        self.about.crc32 = std::mem::take(&mut self.crc).finalize();
        let outgoing = frame::data(&self.about, std::mem::take(&mut self.bytes));
        self.about.offset += std::mem::take(&mut self.len) as u64;
        outgoing
    }
}
