//! A long read as several reads of the engine, each of a window that fits into memory: the next ones under way while
//! one is taken, and what is said of the whole when all have been.
//!
//! Whoever reads so brings the rest ([`Through`]): memory for a window and a read into it, what becomes of bytes that
//! were announced, and where announcements go.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use kvarts_layout::BlockShape;
use kvarts_store::api::{Order, ReadEnd, ReadEvent, ReadStream};
use kvarts_store::error::Reason;

use super::course::{Course, Place};
use super::window::{self, Window};

/// Why a read stops before its last window.
#[derive(Debug)]
pub enum Stop<F> {
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
pub trait Through: Send {
    /// What can be wrong with all of it.
    type Fault: Send;
    /// What a window is read into.
    type Memory: Send + Sync;

    /// Begins to read a window.
    fn begin(
        &self,
        window: &Window,
    ) -> impl Future<Output = Result<(Self::Memory, ReadStream), Stop<Self::Fault>>> + Send;

    /// How many windows may be under way before their turn, as things are now.
    fn ahead(&self) -> usize {
        0
    }

    /// Begins to read a window before its turn, if nobody must wait for it.
    fn begin_ahead(&self, _window: &Window) -> Option<(Self::Memory, ReadStream)> {
        None
    }

    /// Bytes to be fetched at once, as things are now: at most so many.
    fn budget(&self, most: u64) -> u64 {
        most
    }

    /// Takes away the bytes of some blocks of a window, counted in it, which were announced. `offset` is what of each
    /// block's range was taken before.
    fn range(
        &self,
        window: &Window,
        memory: &Self::Memory,
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

/// A window that is being fetched into memory of its own.
struct Fetch<M> {
    window: Window,
    /// Where the window after it begins.
    then: Place,
    memory: M,
    stream: ReadStream,
}

/// A read in windows.
#[derive(Debug)]
pub struct Windows<T> {
    /// Where its windows go.
    pub through: T,
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
    /// In block order: blocks that were announced.
    blocks_done: Vec<u32>,
    failures: BTreeMap<u32, Reason>,
}

impl<T: Through> Windows<T> {
    /// A read of the leading `blocks` of a shape, `budget` bytes at once.
    pub fn new(
        through: T,
        shape: BlockShape,
        order: Order,
        layers: Range<u32>,
        blocks: u32,
        budget: u64,
    ) -> Self {
        let (failures, blocks_done) = (BTreeMap::new(), Vec::new());
        let (good, layers_done) = (blocks, 0);
        Self { through, shape, order, layers, blocks, budget, good, layers_done, blocks_done, failures }
    }

    /// Reads all windows. An error says why there were no more.
    pub async fn run(&mut self) -> Result<(), Stop<T::Fault>> {
        let mut at = Place { block: 0, layer: self.layers.start };
        let mut fetched = VecDeque::new();
        loop {
            let now = match fetched.pop_front() {
                Some(fetch) => fetch,
                None => {
                    let Some((window, then)) = self.course().window(at) else { return Ok(()) };
                    let (memory, stream) = self.through.begin(&window).await?;
                    at = then;
                    Fetch { window, then, memory, stream }
                }
            };
            while fetched.len() < self.through.ahead() {
                let Some((window, then)) = self.course().window(at) else { break };
                let Some((memory, stream)) = self.through.begin_ahead(&window) else { break };
                at = then;
                fetched.push_back(Fetch { window, then, memory, stream });
            }
            let good = self.good;
            let then = match self.order {
                Order::Blocks => self.blocks_window(&now).await?,
                Order::Layers => self.layers_window(&now).await?,
            };
            // Nobody needs more of a block that failed, nor in layer order of those behind it.
            if then != now.then || (good != self.good && self.order == Order::Layers) {
                fetched.clear();
                at = then;
            }
        }
    }

    /// What is still to be read.
    fn course(&self) -> Course<'_> {
        let blocks = if self.order == Order::Layers { self.good } else { self.blocks };
        let (order, layers, budget) = (self.order, self.layers.clone(), self.through.budget(self.budget));
        Course { order, shape: &self.shape, layers, blocks, budget }
    }

    /// What is to be said at the end, and why it is one before all windows were read.
    pub fn end(&self, early: Option<&Reason>) -> ReadEnd {
        let all = early.is_none() || self.order == Order::Blocks;
        let mut failures = self.failures.clone();
        if let Some(reason) = early.filter(|_| self.order == Order::Blocks) {
            // Of those whose window was not read, or not to its end, nobody else says anything.
            let is_missing = |block: &u32| self.blocks_done.binary_search(block).is_err();
            for block in (0..self.blocks).filter(is_missing) {
                failures.entry(block).or_insert_with(|| reason.clone());
            }
        }
        let first_failed = failures.keys().next().copied().filter(|_| self.order == Order::Blocks);
        ReadEnd {
            usable_blocks: self.good.min(first_failed.unwrap_or(self.blocks)),
            usable_layers: if all { self.layers.len() as u32 } else { self.layers_done },
            failures: failures.into_iter().collect(),
            held_bytes: 0,
        }
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

    /// Takes a window in block order and announces its blocks as they are whole; gives where the read goes on.
    async fn blocks_window(&mut self, now: &Fetch<T::Memory>) -> Result<Place, Stop<T::Fault>> {
        let Fetch { window, then, memory, stream } = now;
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
                    self.through.range(window, memory, 0, first..end, offset).await?;
                    taken += end - first;
                    if window.layers.end == all.end {
                        for block in first..end {
                            self.blocks_done.push(window.blocks.start + block);
                            self.through.block_ready(window.blocks.start + block).await?;
                        }
                    }
                }
                ReadEvent::End(end) => {
                    self.ended(window, end)?;
                    // A block of which some layers are missing is not worth its other layers.
                    let broken = taken == 0 && window.layers.end < all.end;
                    let next = Place { block: window.blocks.end, layer: all.start };
                    return Ok(if broken { next } else { *then });
                }
                ReadEvent::Layer { .. } | ReadEvent::Released => {}
            }
        }
    }

    /// Takes a window in layer order and announces its layers as all of their blocks are taken; gives where the read
    /// goes on.
    async fn layers_window(&mut self, now: &Fetch<T::Memory>) -> Result<Place, Stop<T::Fault>> {
        let Fetch { window, then, memory, stream } = now;
        let whole = window.blocks.start == 0 && then.block == 0;
        loop {
            match stream.next().await {
                ReadEvent::Layer { layer, blocks } => {
                    if (blocks as usize) < window.blocks.len() {
                        self.good = self.good.min(window.blocks.start + blocks);
                    }
                    if blocks > 0 {
                        self.through.range(window, memory, layer, 0..blocks, 0).await?;
                    }
                    if whole {
                        self.layer_ready(layer).await?;
                    }
                }
                ReadEvent::End(end) => {
                    self.ended(window, end)?;
                    if !whole && window.blocks.end >= self.good {
                        self.layer_ready(window.layers.start).await?;
                        return Ok(Place { block: 0, layer: window.layers.end });
                    }
                    return Ok(*then);
                }
                ReadEvent::Block(_) | ReadEvent::Released => {}
            }
        }
    }

    async fn layer_ready(&mut self, layer: u32) -> Result<(), Stop<T::Fault>> {
        self.layers_done = layer + 1 - self.layers.start;
        self.through.layer_ready(layer, self.good).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::{ChunkShape, LayerShape};
    use kvarts_store::api::read_channel;
    use kvarts_store::io::{Region, SharedBuf};
    use kvarts_store::rt::blocking::block_on;
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    /// What a reader was told, in order.
    #[derive(Clone, PartialEq, Eq, Debug)]
    enum Told {
        Range { layer: u32, blocks: Range<u32>, offset: u64 },
        Layer(u32, u32),
        Block(u32),
    }

    /// A store from which some blocks are missing.
    struct Lacking {
        missing: BTreeSet<u32>,
        order: Order,
        ahead: usize,
        /// Windows until the deadline.
        until: usize,
        begun: Mutex<usize>,
        told: Mutex<Vec<Told>>,
        begun_ahead: Mutex<usize>,
    }

    impl Lacking {
        fn begin(&self, window: &Window) -> (SharedBuf, ReadStream) {
            let (sink, stream) = read_channel();
            let blocks = window.blocks.len() as u32;
            let is_missing = |block: &u32| self.missing.contains(&(window.blocks.start + block));
            let failures: Vec<_> =
                (0..blocks).filter(is_missing).map(|block| (block, Reason::OutOfBounds)).collect();
            let usable_blocks = failures.first().map_or(blocks, |failure| failure.0);
            match self.order {
                Order::Layers => {
                    for layer in window.layers.clone() {
                        sink.send(ReadEvent::Layer { layer, blocks: usable_blocks });
                    }
                }
                Order::Blocks => {
                    let here = (0..blocks).filter(|block| !is_missing(block));
                    here.for_each(|block| sink.send(ReadEvent::Block(block)));
                }
            }
            let usable_layers = window.layers.len() as u32;
            sink.send(ReadEvent::End(ReadEnd { usable_blocks, usable_layers, failures, held_bytes: 0 }));
            (SharedBuf::new(&Region::anonymous(4096).unwrap(), 0, 1).unwrap(), stream)
        }

        fn tell(&self, told: Told) -> Result<(), Stop<Reason>> {
            self.told.lock().unwrap().push(told);
            Ok(())
        }
    }

    impl Through for Lacking {
        type Fault = Reason;
        type Memory = SharedBuf;

        async fn begin(&self, window: &Window) -> Result<(SharedBuf, ReadStream), Stop<Reason>> {
            *self.begun.lock().unwrap() += 1;
            if *self.begun.lock().unwrap() > self.until {
                return Err(Stop::Late);
            }
            Ok(Self::begin(self, window))
        }

        fn ahead(&self) -> usize {
            self.ahead
        }

        fn begin_ahead(&self, window: &Window) -> Option<(SharedBuf, ReadStream)> {
            *self.begun_ahead.lock().unwrap() += 1;
            Some(Self::begin(self, window))
        }

        async fn range(
            &self,
            window: &Window,
            _memory: &SharedBuf,
            layer: u32,
            blocks: Range<u32>,
            offset: u64,
        ) -> Result<(), Stop<Reason>> {
            let first = window.blocks.start;
            // In block order a range is of all layers of the window.
            let layer = if self.order == Order::Layers { layer } else { window.layers.start };
            self.tell(Told::Range { layer, blocks: first + blocks.start..first + blocks.end, offset })
        }

        async fn layer_ready(&self, layer: u32, good: u32) -> Result<(), Stop<Reason>> {
            self.tell(Told::Layer(layer, good))
        }

        async fn block_ready(&self, block: u32) -> Result<(), Stop<Reason>> {
            self.tell(Told::Block(block))
        }
    }

    const LAYERS: [u64; 3] = [10, 4, 20];

    /// What is told of a read of five blocks, how it ended, and how many windows were begun before their turn.
    fn read(order: Order, missing: &[u32], budget: u64, ahead: usize) -> (Vec<Told>, ReadEnd, usize) {
        let (told, end, begun, whole) = read_until(order, missing, budget, ahead, usize::MAX);
        assert!(whole);
        (told, end, begun)
    }

    /// The same where the deadline passes after so many windows, and whether it did not.
    fn read_until(
        order: Order,
        missing: &[u32],
        budget: u64,
        ahead: usize,
        until: usize,
    ) -> (Vec<Told>, ReadEnd, usize, bool) {
        let layer =
            |(layer, &bytes): (u32, &u64)| LayerShape { layer, chunks: vec![ChunkShape { bytes, align: 1 }] };
        let shape = BlockShape::new((0..).zip(&LAYERS).map(layer).collect()).unwrap();
        let missing = missing.iter().copied().collect();
        let (told, begun, begun_ahead) = Default::default();
        let lacking = Lacking { missing, order, ahead, until, begun, told, begun_ahead };
        let mut windows = Windows::new(lacking, shape, order, 0..3, 5, budget);
        let early = match block_on(windows.run()) {
            Ok(()) => None,
            Err(Stop::Late) => Some(Reason::DeadlinePassed),
            Err(_) => panic!("nothing else stops it"),
        };
        let (end, through) = (windows.end(early.as_ref()), windows.through);
        (through.told.into_inner().unwrap(), end, through.begun_ahead.into_inner().unwrap(), early.is_none())
    }

    #[test]
    fn what_is_told_does_not_depend_on_what_was_fetched_ahead() {
        for order in [Order::Blocks, Order::Layers] {
            for missing in [&[][..], &[0], &[3], &[1, 4], &[0, 1, 2, 3, 4]] {
                for budget in [1, 9, 15, 34, 70, 1000] {
                    let (told, end, none) = read(order, missing, budget, 0);
                    assert_eq!(none, 0);
                    for ahead in 1..4 {
                        let (again, ended, begun) = read(order, missing, budget, ahead);
                        assert_eq!((&told, &end), (&again, &ended), "{order:?} {missing:?} {budget} {ahead}");
                        assert!(begun > 0 || budget == 1000 || told.len() < 10, "nothing was fetched ahead");
                    }
                }
            }
        }
    }

    #[test]
    fn a_read_that_is_late_calls_nothing_good_that_was_not_announced() {
        let mut late = 0;
        for (missing, budget) in
            [&[][..], &[0], &[3], &[1, 4]].iter().flat_map(|m| [1, 15, 34, 70].map(|b| (m, b)))
        {
            for until in 0..16 {
                let (told, end, _, whole) = read_until(Order::Blocks, missing, budget, 0, until);
                late += usize::from(!whole);
                let ready: Vec<u32> = told
                    .iter()
                    .filter_map(|one| if let Told::Block(at) = one { Some(*at) } else { None })
                    .collect();
                let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
                for block in 0..5 {
                    assert!(ready.contains(&block) != failed.contains(&block), "{block}: {ready:?} {end:?}");
                }
                let leading = (0..).zip(&ready).take_while(|(at, block)| at == *block).count();
                assert_eq!(end.usable_blocks as usize, leading, "{ready:?} {end:?}");
                let (told, end, _, whole) = read_until(Order::Layers, missing, budget, 0, until);
                late += usize::from(!whole);
                let ready: Vec<u32> = told
                    .iter()
                    .filter_map(|one| if let Told::Layer(_, good) = one { Some(*good) } else { None })
                    .collect();
                let layers = end.usable_layers as usize;
                assert!(end.usable_blocks == 0 || layers <= ready.len(), "{ready:?} {end:?}");
                assert!(
                    ready.iter().take(layers).all(|good| *good >= end.usable_blocks),
                    "{ready:?} {end:?}"
                );
            }
        }
        assert!(late > 100, "{late}");
    }

    #[test]
    fn each_good_block_and_each_layer_is_announced_once_and_after_its_bytes() {
        for missing in [&[][..], &[0], &[3], &[1, 4]] {
            let good = missing.first().copied().unwrap_or(5);
            for budget in [1, 9, 15, 34, 70, 1000] {
                let (told, end, _) = read(Order::Blocks, missing, budget, 2);
                let ready: Vec<u32> = told
                    .iter()
                    .filter_map(|one| if let Told::Block(block) = one { Some(*block) } else { None })
                    .collect();
                let expected: Vec<u32> = (0..5).filter(|block| !missing.contains(block)).collect();
                assert_eq!((ready, end.usable_blocks), (expected, good), "{missing:?} {budget}");
                let (told, end, _) = read(Order::Layers, missing, budget, 2);
                let ready: Vec<(u32, u32)> = told
                    .iter()
                    .filter_map(
                        |one| if let Told::Layer(layer, good) = one { Some((*layer, *good)) } else { None },
                    )
                    .collect();
                let all = if good == 0 { 1 } else { 3 };
                let expected: Vec<(u32, u32)> = (0..all).map(|layer| (layer, good)).collect();
                assert!(
                    ready == expected || budget == 1000 || budget == 70,
                    "{ready:?} {missing:?} {budget}"
                );
                assert_eq!((ready.last().unwrap().1, end.usable_blocks), (good, good));
                // Of each layer the bytes of all good blocks came before it was announced.
                let mut come = BTreeSet::new();
                for one in told {
                    match one {
                        Told::Range { layer, blocks, .. } => come.extend(blocks.map(|block| (layer, block))),
                        Told::Layer(layer, good) => {
                            assert!(
                                (0..good).all(|block| come.contains(&(layer, block))),
                                "{layer} {budget}"
                            );
                        }
                        Told::Block(_) => {}
                    }
                }
            }
        }
    }
}
