//! A long read as several reads of the engine, each of a window that fits into memory: in which order the windows go,
//! and what is said of the whole when they have.
//!
//! Whoever reads so brings the rest ([`Through`]): memory for a window and a read into it, what becomes of bytes that
//! were announced, and where announcements go.

use std::collections::BTreeMap;
use std::ops::Range;

use kvarts_layout::BlockShape;
use kvarts_store::api::{Order, ReadEnd, ReadEvent, ReadStream};
use kvarts_store::error::Reason;
use kvarts_store::io::Buf;

use super::window::{self, Window};

/// Why a read stops before its last window.
pub(crate) enum Stop<F> {
    /// The client went away, or took nothing for too long.
    Gone,
    /// Nothing can be said of the blocks.
    Fault(F),
    /// The deadline passed: what was delivered is what there is.
    Late,
}

impl<F: From<Reason>> From<Reason> for Stop<F> {
    fn from(reason: Reason) -> Self {
        Self::Fault(reason.into())
    }
}

/// What a window's bytes go through.
pub(crate) trait Through: Send {
    /// What can be wrong with all of it.
    type Fault: Send;

    /// Begins to read a window.
    fn begin(
        &self,
        window: &Window,
    ) -> impl Future<Output = Result<(Buf, ReadStream), Stop<Self::Fault>>> + Send;

    /// Takes away the bytes of some blocks of a window, counted in it, which were announced. `offset` is what of each
    /// block's range was taken before.
    fn range(
        &self,
        window: &Window,
        memory: &Buf,
        layer: u32,
        blocks: Range<u32>,
        offset: u64,
    ) -> impl Future<Output = Result<(), Stop<Self::Fault>>> + Send;

    /// A layer of the first `good` blocks is complete.
    fn layer_ready(
        &self,
        layer: u32,
        good: u32,
    ) -> impl Future<Output = Result<(), Stop<Self::Fault>>> + Send;

    /// A block is complete.
    fn block_ready(&self, block: u32) -> impl Future<Output = Result<(), Stop<Self::Fault>>> + Send;
}

/// A read in windows.
pub(crate) struct Windows<T> {
    pub(crate) through: T,
    shape: BlockShape,
    order: Order,
    layers: Range<u32>,
    blocks: u32,
    /// Bytes that are fetched at once.
    budget: u64,
    /// Leading blocks that are good so far.
    good: u32,
    /// Wanted layers that were announced.
    layers_done: u32,
    failures: BTreeMap<u32, Reason>,
}

impl<T: Through> Windows<T> {
    pub(crate) fn new(
        through: T,
        shape: BlockShape,
        order: Order,
        layers: Range<u32>,
        blocks: u32,
        budget: u64,
    ) -> Self {
        let failures = BTreeMap::new();
        Self { through, shape, order, layers, blocks, budget, good: blocks, layers_done: 0, failures }
    }

    /// Reads all windows. An error says why there were no more.
    pub(crate) async fn run(&mut self) -> Result<(), Stop<T::Fault>> {
        match self.order {
            Order::Blocks => self.by_blocks().await,
            Order::Layers => self.by_layers().await,
        }
    }

    /// What is to be said at the end. `whole` if all windows were read.
    pub(crate) fn end(&self, whole: bool) -> ReadEnd {
        let all = whole || self.order == Order::Blocks;
        ReadEnd {
            usable_blocks: self.good,
            usable_layers: if all { self.layers.len() as u32 } else { self.layers_done },
            failures: self.failures.iter().map(|(block, reason)| (*block, reason.clone())).collect(),
            held_bytes: 0,
        }
    }

    async fn by_blocks(&mut self) -> Result<(), Stop<T::Fault>> {
        let (all, count) = (self.layers.clone(), self.blocks);
        let each = window::layers_bytes(&self.shape, &all);
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
                let layers = window::fitting_layers(&self.shape, &left, 1, self.budget);
                let window = Window { blocks: first..first + 1, layers };
                whole = self.blocks_window(&window).await? == 1;
                left.start = window.layers.end;
            }
            if whole {
                self.through.block_ready(first).await?;
            }
            first += 1;
        }
        Ok(())
    }

    async fn by_layers(&mut self) -> Result<(), Stop<T::Fault>> {
        let mut left = self.layers.clone();
        // Nobody needs more of a block that is behind a failed one.
        while !left.is_empty() && self.good > 0 {
            let layers = window::fitting_layers(&self.shape, &left, self.good, self.budget);
            let window = Window { blocks: 0..self.good, layers };
            if window.bytes(&self.shape) <= self.budget {
                self.layers_window(&window, true).await?;
                left.start = window.layers.end;
                continue;
            }
            // One layer is more than a window: some of the blocks at a time, and ready when all are there.
            let each = window::layers_bytes(&self.shape, &window.layers);
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

    /// Takes the end of a window's read in; says whether its deadline passed.
    fn ended(&mut self, window: &Window, end: ReadEnd) -> Result<(), Stop<T::Fault>> {
        if (end.usable_blocks as usize) < window.blocks.len() {
            self.good = self.good.min(window.blocks.start + end.usable_blocks);
        }
        for (block, reason) in end.failures {
            self.failures.entry(window.blocks.start + block).or_insert(reason);
        }
        let whole = end.usable_layers as usize == window.layers.len();
        if whole { Ok(()) } else { Err(Stop::Late) }
    }

    /// Reads a window in block order; gives how many blocks were taken. Announces them if they are whole.
    async fn blocks_window(&mut self, window: &Window) -> Result<u32, Stop<T::Fault>> {
        let (memory, stream) = self.through.begin(window).await?;
        let all = self.layers.clone();
        let (mut taken, mut ahead) = (0, None);
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
                    let offset = window::layers_bytes(&self.shape, &before);
                    self.through.range(window, &memory, 0, first..end, offset).await?;
                    taken += end - first;
                    if window.layers == all {
                        for block in first..end {
                            self.through.block_ready(window.blocks.start + block).await?;
                        }
                    }
                }
                ReadEvent::End(end) => {
                    self.ended(window, end)?;
                    return Ok(taken);
                }
                ReadEvent::Layer { .. } | ReadEvent::Released => {}
            }
        }
    }

    /// Reads a window in layer order. Announces each layer if `whole` says that no more of it will come.
    async fn layers_window(&mut self, window: &Window, whole: bool) -> Result<(), Stop<T::Fault>> {
        let (memory, stream) = self.through.begin(window).await?;
        loop {
            match stream.next().await {
                ReadEvent::Layer { layer, blocks } => {
                    if (blocks as usize) < window.blocks.len() {
                        self.good = self.good.min(window.blocks.start + blocks);
                    }
                    if blocks > 0 {
                        self.through.range(window, &memory, layer, 0..blocks, 0).await?;
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

    async fn layer_ready(&mut self, layer: u32) -> Result<(), Stop<T::Fault>> {
        self.layers_done = layer + 1 - self.layers.start;
        self.through.layer_ready(layer, self.good).await
    }
}
