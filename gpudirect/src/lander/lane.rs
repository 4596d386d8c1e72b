//! One direction of a lander: a ring on the device, two streams, and who waits for what they were given.
//!
//! The far stream has the copies over the link, the near one the kernels within the device. A ring has a few segments; each is filled by one
//! stream and emptied by the other, which are ordered by events: that a segment is full, and that it is free again.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use super::{Column, Done, lock};
use crate::device::slots::{SlotMove, SlotShape};
use crate::device::{Batch, Device, Direction, Event, Memory, Method, Piece, Stream};
use crate::error::{DeviceError, LandError};
use crate::follow::{Asked, Followed, Follower, keep_for_good};
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::planted;

/// Segments of a ring: while one is copied, another is spread, and the others keep either from standing still.
const SEGMENTS: u64 = 4;
/// What begins in a segment begins at a multiple of this, so that wide loads of the kernel are aligned where those of the pages are.
const ALIGN: u64 = 256;
/// Numbers of slots for which there is memory at least.
const SLOTS_LEAST: usize = 4096;

/// What is kept until an event is done, and who hears of it.
type Kept = (Box<dyn Any + Send>, Done);

/// Memory for the numbers of slots: on the device, and the pinned memory that they are copied from.
#[derive(Debug)]
struct Numbers {
    there: Memory,
    here: SharedBuf,
    room: usize,
    device: Arc<dyn Device>,
    region: Arc<Region>,
    is_pinned: bool,
}

impl Drop for Numbers {
    fn drop(&mut self) {
        if self.is_pinned {
            self.device.unpin(&self.region);
        }
    }
}

impl Numbers {
    fn new(device: &Arc<dyn Device>, room: usize) -> Result<Self, DeviceError> {
        let bytes = room * 4;
        let no_memory = || DeviceError::NoMemory(bytes as u64);
        let region = Region::anonymous(bytes).map_err(|_| no_memory())?;
        let here = SharedBuf::new(&region, 0, bytes).ok_or_else(no_memory)?;
        let there = device.allocate(bytes as u64)?;
        // Without it the copy is slower, and nothing else.
        let is_pinned = device.pin(&region).is_ok();
        Ok(Self { there, here, room, device: Arc::clone(device), region, is_pinned })
    }
}

/// A request that is being enqueued.
#[derive(Debug)]
pub(super) struct Open {
    numbers: Numbers,
    /// Where the numbers of each column begin.
    firsts: Vec<u32>,
}

/// How the layers of a column lie in host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lies {
    /// As extents of a pool have them: layer after layer.
    InExtents,
    /// Each in memory of its own.
    Alone,
}

/// Rows that one kernel moves.
pub(super) struct Launch {
    column: usize,
    part: u32,
    ring: u64,
    first: u32,
    count: u32,
}

/// A segment that is being filled.
#[derive(Default)]
pub(super) struct Fill {
    used: u64,
    pub(super) copies: Vec<Piece>,
    pub(super) launches: Vec<Launch>,
}

/// One direction.
pub(super) struct Lane {
    device: Arc<dyn Device>,
    ring: [Memory; 1],
    segment_bytes: u64,
    /// The segment that is next, and of each the event behind which it is free.
    next: usize,
    free: Vec<Option<Event>>,
    far: Stream,
    near: Stream,
    /// What layers are cut into, and the pieces of a copy: used again for each, since an engine's thread enqueues them.
    pub(super) fills: Vec<Fill>,
    pieces: Vec<Piece>,
    /// Memory for numbers that no request uses.
    numbers: Arc<Mutex<Vec<Numbers>>>,
    kept: Arc<Mutex<VecDeque<Kept>>>,
    failed: Arc<Mutex<Option<DeviceError>>>,
    events: Option<Sender<Asked>>,
    follower: Follower,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Lane {
    pub(super) fn new(followed: Followed, name: &str, ring_bytes: u64) -> Result<Self, LandError> {
        let device = Arc::clone(&followed.device);
        let segment_bytes = ring_bytes / SEGMENTS / ALIGN * ALIGN;
        if segment_bytes == 0 {
            return Err(LandError::Request(format!(
                "the ring has {ring_bytes} bytes, which is too small for its {SEGMENTS} segments"
            )));
        }
        let ring = [device.allocate(segment_bytes * SEGMENTS)?];
        let (far, near) = (device.stream()?, device.stream()?);
        let kept: Arc<Mutex<VecDeque<Kept>>> = Arc::default();
        let failed: Arc<Mutex<Option<DeviceError>>> = Arc::default();
        let (theirs, fails) = (Arc::clone(&kept), Arc::clone(&failed));
        let tell = move |ended: Result<(), DeviceError>| match ended {
            Ok(()) => {
                let first = lock(&theirs).pop_front();
                if let Some((keeps, done)) = first {
                    // The memory is released before the caller hears of the end.
                    drop(keeps);
                    done.tell(Ok(()));
                }
            }
            Err(error) => {
                lock(&fails).get_or_insert(error.clone());
                give_up(&theirs, &error);
            }
        };
        let keeps = Box::new((ring.clone(), far.clone(), near.clone()));
        let started = Follower::start(name, followed, keeps, tell);
        let (follower, events) = started.map_err(|why| DeviceError::Call { call: "thread", why })?;
        Ok(Self {
            device,
            ring,
            segment_bytes,
            next: 0,
            free: vec![None; SEGMENTS as usize],
            far,
            near,
            fills: Vec::new(),
            pieces: Vec::new(),
            numbers: Arc::default(),
            kept,
            failed,
            events: Some(events),
            follower,
        })
    }

    /// The most that one chunk may have.
    pub(super) fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// What kernels do from now on they do behind this event.
    pub(super) fn near_waits(&self, event: &Event) -> Result<(), DeviceError> {
        self.device.wait(&self.near, event)
    }

    /// A request was enqueued in part: segments and streams are not what the next one takes them for.
    pub(super) fn fail(&mut self, error: &DeviceError) {
        lock(&self.failed).get_or_insert(error.clone());
    }

    /// Begins a request: the numbers of its slots are on their way.
    pub(super) fn open(&mut self, columns: &[Column]) -> Result<Open, LandError> {
        if let Some(error) = lock(&self.failed).clone() {
            return Err(LandError::Device(error));
        }
        let mut firsts = Vec::with_capacity(columns.len());
        let mut all = 0usize;
        for column in columns {
            firsts.push(all as u32);
            all += column.pages.slots().len();
        }
        let mut idle = lock(&self.numbers);
        let fits = idle.iter().position(|numbers| numbers.room >= all);
        let known = fits.map(|at| idle.swap_remove(at));
        drop(idle);
        let numbers = match known {
            Some(numbers) => numbers,
            None => Numbers::new(&self.device, all.max(SLOTS_LEAST).next_power_of_two())?,
        };
        let mut at = 0;
        for slot in columns.iter().flat_map(|column| column.pages.slots()) {
            numbers.here.copy_in(at, &slot.to_le_bytes());
            at += 4;
        }
        let open = Open { numbers, firsts };
        let memories = [open.numbers.there.clone()];
        let batch = Batch {
            direction: Direction::ToDevice,
            method: Method::Each,
            host: &open.numbers.here,
            memories: &memories,
            pieces: &[Piece { memory: 0, at: 0, host: 0, len: at as u64 }],
        };
        // On the stream that reads them.
        if let Err(error) = self.device.copy(&self.near, &batch) {
            keep_for_good(open);
            return Err(error.into());
        }
        Ok(open)
    }

    /// Enqueues the landing of a layer; gives the event behind it.
    pub(super) fn land(
        &mut self,
        open: &mut Open,
        (pool, columns): (&SharedBuf, &[Column]),
        layer: u32,
        lies: Lies,
    ) -> Result<Event, DeviceError> {
        let mut last = None;
        for number in 0..self.cut(columns, layer, lies) {
            let fill = self.take_fill(number);
            let at = self.take_segment(&self.far)?;
            let host = self.copies(pool, &fill, at, Direction::ToDevice)?;
            if !planted!("spread-before-copied") {
                self.device.wait(&self.near, &host)?;
            }
            self.kernels(open, columns, &fill, at, Direction::ToDevice)?;
            let spread = self.device.record(&self.near)?;
            last = Some(self.give_segment(spread));
            self.give_fill(number, fill);
        }
        last.map_or_else(|| self.device.record(&self.near), Ok)
    }

    /// Enqueues that a layer leaves; gives the event behind which its pages are read no more, and the one behind which it is in host memory.
    pub(super) fn save(
        &mut self,
        open: &mut Open,
        (pool, columns): (&SharedBuf, &[Column]),
        layer: u32,
        lies: Lies,
    ) -> Result<(Event, Event), DeviceError> {
        let mut last = None;
        for number in 0..self.cut(columns, layer, lies) {
            let fill = self.take_fill(number);
            let at = self.take_segment(&self.near)?;
            self.kernels(open, columns, &fill, at, Direction::ToHost)?;
            let gathered = self.device.record(&self.near)?;
            if !planted!("left-before-gathered") {
                self.device.wait(&self.far, &gathered)?;
            }
            let left = self.copies(pool, &fill, at, Direction::ToHost)?;
            last = Some((gathered, self.give_segment(left)));
            self.give_fill(number, fill);
        }
        let none = || self.device.record(&self.near).map(|event| (event.clone(), event));
        last.map_or_else(none, Ok)
    }

    /// Cuts a layer into what a segment holds; gives how many there are.
    pub(super) fn cut(&mut self, columns: &[Column], layer: u32, lies: Lies) -> usize {
        let mut cut = 0;
        let mut fill = self.next_fill(cut);
        for (number, Column { stretches, pages }) in columns.iter().enumerate() {
            // Where a layer that lies alone has the next of its parts.
            let mut alone = 0;
            for (part, chunk) in pages.parts_of(layer) {
                let mut slot = 0;
                for stretch in stretches {
                    let host = match lies {
                        Lies::InExtents => stretch.part(pages.shape(), part).map(|(host, _)| host),
                        Lies::Alone => Some(alone),
                    };
                    alone += chunk * u64::from(stretch.count);
                    let Some(mut host) = host else { continue };
                    let mut left = stretch.count;
                    while left > 0 {
                        let room = self.segment_bytes.saturating_sub(fill.used) / chunk;
                        let some = left.min(u32::try_from(room).unwrap_or(u32::MAX));
                        if some == 0 {
                            self.give_fill(cut, fill);
                            cut += 1;
                            fill = self.next_fill(cut);
                            continue;
                        }
                        let (len, count) = (chunk * u64::from(some), some * pages.per_block());
                        fill.add(
                            (host, len),
                            Launch { column: number, part, ring: fill.used, first: slot, count },
                        );
                        (host, slot, left) = (host + len, slot + count, left - some);
                    }
                }
                fill.used = fill.used.next_multiple_of(ALIGN);
            }
        }
        let is_last = !fill.copies.is_empty();
        self.give_fill(cut, fill);
        cut + usize::from(is_last)
    }

    fn take_fill(&mut self, number: usize) -> Fill {
        self.fills.get_mut(number).map(std::mem::take).unwrap_or_default()
    }

    fn give_fill(&mut self, number: usize, fill: Fill) {
        if let Some(place) = self.fills.get_mut(number) {
            *place = fill;
        }
    }

    /// An empty one, with the memory that it had for a layer before.
    fn next_fill(&mut self, number: usize) -> Fill {
        self.fills.resize_with(self.fills.len().max(number + 1), Fill::default);
        let mut fill = self.take_fill(number);
        fill.used = 0;
        fill.copies.clear();
        fill.launches.clear();
        fill
    }

    /// The next segment: what this stream is given from now on runs when it is free.
    fn take_segment(&self, stream: &Stream) -> Result<u64, DeviceError> {
        if let Some(Some(free)) = self.free.get(self.next)
            && !planted!("segment-not-awaited")
        {
            self.device.wait(stream, free)?;
        }
        Ok(self.next as u64 * self.segment_bytes)
    }

    /// It is free again behind this event.
    fn give_segment(&mut self, event: Event) -> Event {
        if let Some(free) = self.free.get_mut(self.next) {
            *free = Some(event.clone());
        }
        self.next = (self.next + 1) % SEGMENTS as usize;
        event
    }

    /// Enqueues the copies of a segment that begins at `at`; gives the event behind them.
    fn copies(
        &mut self,
        pool: &SharedBuf,
        fill: &Fill,
        at: u64,
        direction: Direction,
    ) -> Result<Event, DeviceError> {
        let placed = |piece: &Piece| Piece { at: piece.at + at, ..*piece };
        self.pieces.clear();
        self.pieces.extend(fill.copies.iter().map(placed));
        let batch =
            Batch { direction, method: Method::Each, host: pool, memories: &self.ring, pieces: &self.pieces };
        self.device.copy(&self.far, &batch)?;
        self.device.record(&self.far)
    }

    /// Enqueues its kernels.
    fn kernels(
        &self,
        open: &Open,
        columns: &[Column],
        fill: &Fill,
        at: u64,
        direction: Direction,
    ) -> Result<(), DeviceError> {
        let [ring] = &self.ring;
        for launch in &fill.launches {
            let column = columns.get(launch.column).zip(open.firsts.get(launch.column));
            let (column, first) = column.ok_or(DeviceError::OutOfBounds)?;
            let (pages, shape): (&Memory, SlotShape) =
                column.pages.part(launch.part).ok_or(DeviceError::OutOfBounds)?;
            let moved = SlotMove {
                direction,
                ring: (ring, at + launch.ring),
                pool: pages,
                slots: (&open.numbers.there, first + launch.first, launch.count),
                largest: column.pages.largest(),
                shape,
            };
            self.device.move_slots(&self.near, &moved)?;
        }
        Ok(())
    }

    /// Ends a request: everything is enqueued, or as much of it as could be. What it uses is kept until that is done.
    pub(super) fn close(&mut self, open: Open, keeps: Box<dyn Any + Send>, is_whole: bool) -> Done {
        let done = Done::default();
        // Behind both streams.
        let end = self.device.record(&self.far).and_then(|far| {
            self.device.wait(&self.near, &far)?;
            self.device.record(&self.near)
        });
        let back = Back { numbers: Some(open.numbers), idle: Arc::clone(&self.numbers) };
        let keeps: Box<dyn Any + Send> = Box::new((keeps, back));
        match (end, &self.events) {
            (Ok(event), Some(events)) => {
                // In the order of the events, which are sent under the lane's lock.
                lock(&self.kept).push_back((keeps, done.clone()));
                let sent = events.send(Asked { event, ends_layer: true }).is_ok();
                // Where the thread that follows has ended with a failure, or ends with one in this moment, it may not have seen this one.
                let failed = lock(&self.failed).clone();
                let gone = || DeviceError::Lost("the thread that waits for the device has ended".to_owned());
                if let Some(error) = failed.or_else(|| (!sent).then(gone)) {
                    give_up(&self.kept, &error);
                }
            }
            (end, _) => {
                keep_for_good(keeps);
                let error = end.err().unwrap_or(DeviceError::Lost(
                    "the thread that waits for the device has \
                    ended"
                        .to_owned(),
                ));
                lock(&self.failed).get_or_insert(error.clone());
                done.tell(Err(error));
            }
        }
        if !is_whole {
            done.tell(Err(DeviceError::Partial { wanted: 1, moved: 0 }));
        }
        done
    }
}

/// The device may still use all of this, and when it does not any more cannot be known.
fn give_up(kept: &Mutex<VecDeque<Kept>>, error: &DeviceError) {
    for (keeps, done) in std::mem::take(&mut *lock(kept)) {
        keep_for_good(keeps);
        done.tell(Err(error.clone()));
    }
}

impl Fill {
    /// Adds blocks of a part that lie together in the pool.
    fn add(&mut self, (host, len): (u64, u64), launch: Launch) {
        match self.copies.last_mut() {
            Some(last) if last.host + last.len == host && last.at + last.len == self.used => last.len += len,
            _ => self.copies.push(Piece { memory: 0, at: self.used, host, len }),
        }
        match self.launches.last_mut() {
            Some(last) if last.column == launch.column && last.part == launch.part => {
                last.count += launch.count
            }
            _ => self.launches.push(launch),
        }
        self.used += len;
    }
}

/// Brings memory for numbers back when the device uses it no more.
struct Back {
    numbers: Option<Numbers>,
    idle: Arc<Mutex<Vec<Numbers>>>,
}

impl Drop for Back {
    fn drop(&mut self) {
        lock(&self.idle).extend(self.numbers.take());
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.events = None;
        // It waits until everything is done, unless something is stuck: then the thread keeps what it uses.
        self.follower.leave();
    }
}
