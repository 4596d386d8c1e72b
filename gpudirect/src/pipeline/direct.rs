//! Layers that come straight from files: read into device memory, verified there, and put in their places by copies
//! within the device. The processor sees none of their bytes.
//!
//! The store lends the files ([`PinnedExtents`]): where every chunk lies, and with which digest. Threads read the ranges of
//! layers into a ring of device memory, as far ahead as it has room; the stream's own thread has each layer digested by
//! the device, compares, and enqueues the copies.
//!
//! **A layer that cannot come this way comes through the arena**, and every layer behind it: where blocks are encoded, where
//! a read fails, where a digest does not match. The ordinary read then finds out what is wrong and says so; nothing here
//! takes a block out of service. A read that does not end within its timeout has failed too: its thread keeps what it
//! reads into until it returns. After [`FAILURES_MAX`] streams in a row that failed so, no more are tried; one that was
//! left (by its caller, or its deadline) counts once a read of it has not ended within the timeout.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Wake, Waker};
use std::time::Duration;

use kvarts_contract::api::Verify;
use kvarts_contract::blocking::block_on;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_store::engine::Store;
use kvarts_store::lend::{LendRequest, PinnedChunk, PinnedExtents};

use super::stream::{CopyQueue, Layer, LayerStream, StagedReader};
use super::{LAYERS_AHEAD, LandRequest, Pipeline};
use crate::device::{Batch, Direction, Event, Method, OpenFile, Piece, Stream};
use crate::device_arena::{DeviceArena, DevicePiece};
use crate::error::{DeviceError, EndReason, LandError};
use crate::pace::Worker;
use crate::ring::{RingPlace, bytes_needed, open_after, places};

/// Streams in a row that had to go on through the arena before no more are tried.
pub const FAILURES_MAX: u32 = 3;

/// Threads that read for one stream: a call waits for its read, and a device wants several at once.
const READERS: usize = 4;

/// What has been read straight into device memory by a pipeline, and its clones.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirectUse {
    /// Layers.
    pub layers: u64,
    /// Bytes of files, what lies between chunks included.
    pub bytes: u64,
    /// Requests that came through the arena, or whose last layers did.
    pub staged: u64,
    /// Why the last of them did.
    pub last_reason: Option<String>,
    /// Whether it is not tried any more, after too many failures in a row.
    pub off: bool,
}

/// What the direct streams of a pipeline share.
pub(super) struct DirectPath {
    lender: Store,
    arena: DeviceArena,
    layers: AtomicU64,
    bytes: AtomicU64,
    staged: AtomicU64,
    failures: AtomicU32,
    last_reason: Mutex<Option<String>>,
    /// What streams read that were left, while a reader has it, and when the read that was waited for began.
    left_behind: Mutex<Vec<(Weak<DirectRead>, Nanos)>>,
}

impl DirectPath {
    pub(super) fn new(lender: Store, arena: DeviceArena) -> Self {
        let (layers, bytes, staged) = Default::default();
        let (failures, last_reason, left_behind) = Default::default();
        Self { lender, arena, layers, bytes, staged, failures, last_reason, left_behind }
    }

    pub(super) fn usage(&self) -> DirectUse {
        DirectUse {
            layers: self.layers.load(Ordering::Acquire),
            bytes: self.bytes.load(Ordering::Acquire),
            staged: self.staged.load(Ordering::Acquire),
            last_reason: self.last_reason.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            off: self.is_off(),
        }
    }

    fn is_off(&self) -> bool {
        self.failures.load(Ordering::Acquire) >= FAILURES_MAX
    }

    /// Notes that a request, or the rest of it, comes through the arena.
    fn note_staged(&self, why: String) {
        self.staged.fetch_add(1, Ordering::AcqRel);
        self.note(why);
    }

    fn note(&self, why: String) {
        *self.last_reason.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// Remembers a stream that was left while it waited for a read since then. With its last reader it is forgotten.
    fn leave_behind(&self, read: &Arc<DirectRead>, since: Nanos) {
        let mut left = self.left_behind.lock().unwrap_or_else(PoisonError::into_inner);
        left.push((Arc::downgrade(read), since));
    }

    /// Counts those of them whose read has not ended by now.
    fn count_left_behind(&self, timeout: Duration) {
        let now = self.lender.clock().now();
        let mut left = self.left_behind.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|(read, since)| {
            let late = read.strong_count() > 0 && now.since(*since) >= timeout;
            if late {
                self.count_failure();
                self.note(late_read(timeout));
            }
            read.strong_count() > 0 && !late
        });
    }

    fn count_failure(&self) {
        self.failures.fetch_add(1, Ordering::AcqRel);
    }
}

fn late_read(timeout: Duration) -> String {
    format!("a read did not end within {} ms", timeout.as_millis())
}

/// Who compares chunks with their digests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verifier {
    Device,
    /// The device has no kernel, and the caller wants samples only: they are copied back.
    Processor,
    /// The caller wants no digests compared.
    Off,
}

/// What the threads of one stream share.
struct DirectRead {
    // Before what it was opened from.
    opened: Vec<OpenFile>,
    lent: PinnedExtents,
    arena: DeviceArena,
    piece: Arc<DevicePiece>,
    places: Vec<RingPlace>,
    /// Where each range of each layer begins in the layer's place.
    bases: Vec<Vec<u64>>,
    state: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug)]
struct Progress {
    /// The next to be read: layer and range.
    next: (usize, usize),
    /// How many layers have memory.
    open: u32,
    /// Stretches of each layer that have not been read.
    left: Vec<usize>,
    failed: Option<DeviceError>,
    stopped: bool,
}

/// Why a layer does not come.
enum Halt {
    /// The caller wants no more.
    Over,
    Deadline,
    /// It must come through the arena, for want of something that others have now.
    Aside(String),
    /// It must come through the arena, because what should work did not.
    Failed(String),
    Device(DeviceError),
}

impl Halt {
    /// What an error means that is no error of a copy.
    fn of(error: DeviceError) -> Self {
        match error {
            DeviceError::Lost(_) | DeviceError::Stuck { .. } => Self::Device(error),
            DeviceError::NoMemory(_) => Self::Aside(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// Begins to read files; `None` if the request must come through the arena.
pub(super) fn land(
    pipeline: &Pipeline,
    path: &Arc<DirectPath>,
    request: &LandRequest,
) -> Result<Option<LayerStream>, LandError> {
    path.count_left_behind(pipeline.read_timeout);
    if path.is_off() {
        return Ok(None);
    }
    let verifier = match (request.verify, pipeline.device.can_digest()) {
        (Verify::Never, _) => Verifier::Off,
        (_, Ok(())) => Verifier::Device,
        (Verify::Sample(_), Err(DeviceError::Foreign(_))) => Verifier::Processor,
        (_, Err(why)) => {
            path.note_staged(why.to_string());
            return Ok(None);
        }
    };
    let read = match DirectRead::plan(path, request) {
        Ok(read) => Arc::new(read),
        Err(why) => {
            path.note_staged(why);
            return Ok(None);
        }
    };
    let copies = pipeline.copies(request)?;
    let counts = (read.places.len() as u32, request.into.blocks());
    let keeps = (Arc::clone(&read.piece), request.into.clone(), copies.clone());
    let seed = path.lender.clock().now().0;
    let followed = pipeline.followed();
    let (pipeline, path, request) = (pipeline.clone(), Arc::clone(path), request.clone());
    let stream = move |queue: &CopyQueue| {
        let (since, samples, chunks, pieces) = Default::default();
        let stream = DirectStream {
            pipeline,
            path,
            request,
            verifier,
            read,
            copies,
            samples,
            queue,
            since,
            chunks,
            pieces,
            seed,
        };
        stream.run();
    };
    LayerStream::start(followed, counts, Box::new(keeps), stream).map(Some)
}

impl DirectRead {
    /// Borrows the blocks and finds room for them; the error is why not.
    fn plan(path: &DirectPath, request: &LandRequest) -> Result<Self, String> {
        let shape = path.lender.shape(request.namespace, request.group, request.coordinate);
        if shape.map_err(|error| error.to_string())? != *request.into.shape() {
            return Err("the destination is for blocks of another shape".to_owned());
        }
        let lent = block_on(path.lender.lend(LendRequest {
            namespace: request.namespace,
            group: request.group,
            coordinate: request.coordinate,
            keys: request.keys.clone(),
            layers: request.layers.clone(),
            class: request.class,
            deadline: request.deadline,
        }));
        let lent = lent.map_err(|why| why.to_string())?;
        let (mut bases, mut rooms) = (Vec::new(), Vec::new());
        for layer in lent.layers() {
            let mut end = 0u64;
            let base = |bytes: u64| {
                let begin = end;
                end += bytes;
                begin
            };
            bases.push(layer.ranges.iter().map(|range| range.bytes).map(base).collect());
            rooms.push(end);
        }
        let least = bytes_needed(&rooms, LAYERS_AHEAD);
        let sum = rooms.iter().sum::<u64>();
        let most = request.depth_bytes.max(least).min(sum.max(least).next_power_of_two());
        let piece = path.arena.take(least, most);
        let piece = piece.ok_or_else(|| {
            format!(
                "the device memory for reads has less than {least} bytes \
            free"
            )
        })?;
        let places =
            places(&rooms, piece.len()).ok_or("the layers do not fit into the device memory for reads")?;
        let files = path.arena.files();
        let opened = lent.files().iter().map(|file| files.open(std::os::fd::AsFd::as_fd(file)));
        let opened = opened.collect::<Result<Vec<_>, _>>().map_err(|error| {
            path.count_failure();
            error.to_string()
        })?;
        let left = lent.layers().iter().map(|layer| layer.ranges.len()).collect();
        let progress = Progress { next: (0, 0), open: 0, left, failed: None, stopped: false };
        Ok(Self {
            opened,
            lent,
            arena: path.arena.clone(),
            piece: Arc::new(piece),
            places,
            bases,
            state: Mutex::new(progress),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        // Every change under the lock is one step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Where a range of a layer lies in the arena's memory.
    fn place(&self, layer: usize, range: usize) -> Option<u64> {
        let base = self.bases.get(layer)?.get(range)?;
        Some(self.piece.offset() + self.places.get(layer)?.offset + base)
    }

    /// The next range to read, once its layer has memory; `None` if there is none any more.
    fn next(&self) -> Option<(usize, usize)> {
        let mut progress = self.lock();
        loop {
            let (layer, range) = progress.next;
            if progress.stopped || progress.failed.is_some() || layer >= self.lent.layers().len() {
                return None;
            }
            if range >= self.lent.layers().get(layer)?.ranges.len() {
                progress.next = (layer + 1, 0);
                continue;
            }
            if layer < progress.open as usize {
                progress.next = (layer, range + 1);
                return Some((layer, range));
            }
            progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What one thread does.
    fn read_along(&self) {
        let _reader = Reader(self);
        while let Some((layer, range)) = self.next() {
            let ended = self.read(layer, range);
            self.change(|progress| match ended {
                Ok(()) => progress.left.iter_mut().skip(layer).take(1).for_each(|left| *left -= 1),
                Err(error) => drop(progress.failed.get_or_insert(error)),
            });
        }
    }

    fn read(&self, layer: usize, index: usize) -> Result<(), DeviceError> {
        let range = self.lent.layers().get(layer).and_then(|layer| layer.ranges.get(index));
        let range = range.ok_or(DeviceError::OutOfBounds)?;
        let which = range.file as usize;
        let files = self.lent.files().get(which).zip(self.opened.get(which));
        let (file, open) = files.ok_or(DeviceError::OutOfBounds)?;
        let at = self.place(layer, index).ok_or(DeviceError::OutOfBounds)?;
        self.arena.read((std::os::fd::AsFd::as_fd(file), open), range.offset, at, range.bytes)
    }
}

/// A thread that reads. If it panics, the stream does not wait for the read that it had begun.
struct Reader<'a>(&'a DirectRead);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "a thread for reads panicked".to_owned();
            let panicked = DeviceError::Call { call: "read of a file", why };
            self.0.change(|progress| {
                progress.failed.get_or_insert(panicked);
            });
        }
    }
}

/// Wakes the stream's own thread, which waits for the same condition as the others.
struct Notifier(Weak<DirectRead>);

impl Wake for Notifier {
    fn wake(self: Arc<Self>) {
        // A thread that looks between a change and this call holds the lock, so no thread misses the change.
        if let Some(read) = self.0.upgrade() {
            read.change(|_| ());
        }
    }
}

/// The stream's own thread: verifies layers and has them copied.
struct DirectStream<'a> {
    pipeline: Pipeline,
    path: Arc<DirectPath>,
    request: LandRequest,
    verifier: Verifier,
    read: Arc<DirectRead>,
    /// The device stream of the copies.
    copies: Stream,
    /// That of what is copied back, if anything is: it does not wait for what the copies wait for.
    samples: Option<Stream>,
    queue: &'a CopyQueue,
    /// Since when a read of the layer that is waited for has not ended.
    since: Nanos,
    /// Chunks that are compared: places in the arena's memory, and digests.
    chunks: Vec<(u64, u64)>,
    pieces: Vec<Piece>,
    /// State of the sampling of digests.
    seed: u64,
}

impl DirectStream<'_> {
    fn run(mut self) {
        let mut readers = Vec::new();
        for _ in 0..READERS {
            let read = Arc::clone(&self.read);
            // With fewer it is slower; with none the first wait would not end.
            if let Ok(reader) = Worker::start("direct-reads", move || read.read_along()) {
                readers.push(reader);
            }
        }
        let halt = match readers.is_empty() {
            true => Some((0, Halt::Aside("the threads for reads could not be started".to_owned()))),
            false => self.bring_all(),
        };
        self.read.change(|progress| progress.stopped = true);
        // A read that stands still keeps what it uses until it ends, and no thread waits for it.
        readers.iter_mut().for_each(Worker::let_go);
        if matches!(halt, Some((_, Halt::Over | Halt::Deadline))) {
            self.path.leave_behind(&self.read, self.since);
        }
        match halt {
            None => self.path.failures.store(0, Ordering::Release),
            Some((_, Halt::Over)) => {}
            Some((_, Halt::Deadline)) => self.queue.shared.fail(EndReason::Deadline),
            Some((_, Halt::Device(error))) => self.queue.shared.fail(EndReason::Device(error)),
            Some((at, Halt::Aside(why))) => {
                self.path.note_staged(why);
                self.detour(at);
            }
            Some((at, Halt::Failed(why))) => {
                self.path.note_staged(why);
                let (path, queue) = (Arc::clone(&self.path), self.queue);
                self.detour(at);
                // Where the ordinary read has found the same, straight reads are not to blame.
                if !queue.shared.is_the_stores_fault() {
                    path.count_failure();
                }
            }
        }
    }

    /// Brings every layer; the first that does not come, and why.
    fn bring_all(&mut self) -> Option<(u32, Halt)> {
        let read = Arc::clone(&self.read);
        // Weak, both: the files go back with the last layer, however long the stream is kept.
        let weak = Arc::downgrade(&read);
        let open = Box::new(move |left| {
            if let Some(read) = weak.upgrade() {
                read.change(|progress| progress.open = open_after(&read.places, left));
            }
        });
        self.queue.shared.add_door(0, open);
        let notifier = Waker::from(Arc::new(Notifier(Arc::downgrade(&read))));
        (0..read.places.len()).find_map(|at| {
            let judged = self.wait(at, &notifier).and_then(|()| self.verify(at));
            let copied = judged.and_then(|()| match self.queue.shared.is_over_or_wake(&notifier) {
                true => Err(Halt::Over),
                false => self.copy(at),
            });
            copied.err().map(|halt| (at as u32, halt))
        })
    }

    /// How long there is until the deadline, if there is one.
    fn time_left(&self) -> Option<Duration> {
        self.request.deadline.map(|deadline| deadline.since(self.path.lender.clock().now()))
    }

    /// Waits until a layer has been read, or no read of it has ended for as long as the timeout.
    fn wait(&mut self, at: usize, notifier: &Waker) -> Result<(), Halt> {
        let (read, clock) = (Arc::clone(&self.read), Arc::clone(self.path.lender.clock()));
        let timeout = self.pipeline.read_timeout;
        let mut left_before = None;
        let mut progress = read.lock();
        loop {
            if self.queue.shared.is_over_or_wake(notifier) {
                return Err(Halt::Over);
            }
            let left = progress.left.get(at).copied();
            if left == Some(0) {
                return Ok(());
            }
            if left != left_before {
                (left_before, self.since) = (left, clock.now());
            }
            let to_deadline = self.time_left();
            if to_deadline.is_some_and(|left| left.is_zero()) {
                return Err(Halt::Deadline);
            }
            if let Some(error) = &progress.failed {
                return Err(Halt::of(error.clone()));
            }
            let patient = timeout.saturating_sub(clock.now().since(self.since));
            if patient.is_zero() {
                return Err(Halt::Failed(late_read(timeout)));
            }
            let most = to_deadline.map_or(patient, |left| left.min(patient));
            progress = read.changed.wait_timeout(progress, most).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for work of the device: for as long as a copy may take, or until the deadline.
    fn wait_for(&self, event: &Event) -> Result<(), Halt> {
        let timeout = self.pipeline.copy_timeout;
        let to_deadline = self.time_left().filter(|left| *left < timeout);
        match self.pipeline.device.synchronize_within(event, to_deadline.unwrap_or(timeout)) {
            Ok(true) => Ok(()),
            Ok(false) if to_deadline.is_some() => Err(Halt::Deadline),
            Ok(false) => Err(Halt::Device(DeviceError::stuck(timeout))),
            Err(error) => Err(Halt::of(error)),
        }
    }

    /// Compares a layer with its digests.
    fn verify(&mut self, at: usize) -> Result<(), Halt> {
        let read = Arc::clone(&self.read);
        let Some(layer) = read.lent.layers().get(at) else { return Ok(()) };
        let blocks = self.request.into.blocks() as usize;
        let parts = self.request.into.shape().layers().get(layer.layer as usize);
        if parts.map(|layer| layer.chunks.len() * blocks) != Some(layer.chunks.len()) {
            return Err(Halt::Failed("the store pinned other chunks than requested".to_owned()));
        }
        if self.request.verify != Verify::Always && !read.lent.is_held() {
            // What is not compared may be whatever has been written there since.
            return Err(Halt::Aside("the store has closed".to_owned()));
        }
        let mut picked: Vec<&PinnedChunk> = Vec::with_capacity(layer.chunks.len());
        picked.extend(layer.chunks.iter().filter(|_| self.request.verify.picks(&mut self.seed)));
        self.chunks.clear();
        for chunk in &picked {
            let place = read.place(at, chunk.range as usize);
            let place = place.ok_or(Halt::Device(DeviceError::OutOfBounds))?;
            self.chunks.push((place + chunk.at, chunk.bytes));
        }
        let found = match self.verifier {
            _ if picked.is_empty() => return Ok(()),
            Verifier::Device => self.digests_there()?,
            _ => self.digests_of_copies()?,
        };
        let wrong = picked.iter().zip(&found).find(|(chunk, found)| chunk.digest != **found);
        match wrong {
            None if found.len() == picked.len() => Ok(()),
            None => {
                Err(Halt::Failed("the number of digests is smaller than the number of chunks".to_owned()))
            }
            Some((chunk, found)) => Err(Halt::Failed(format!(
                "the digest of layer {} of block {} is {found:08x} instead of {:08x}",
                layer.layer, chunk.ordinal, chunk.digest
            ))),
        }
    }

    /// The digests of chunks, by the device.
    fn digests_there(&self) -> Result<Vec<u32>, Halt> {
        let (device, memory) = (&self.pipeline.device, self.read.arena.memory().memory());
        let asked = device.begin_digests(memory, &self.chunks).map_err(Halt::of)?;
        let waited = self.wait_for(asked.event());
        match waited {
            Ok(()) => asked.found().map_err(Halt::of),
            Err(halt) => {
                // The kernel may come to read the piece yet, which is kept until it has.
                let event = asked.event().clone();
                self.queue.keep(Box::new(asked));
                self.queue.follow(Ok(event), false);
                Err(halt)
            }
        }
    }

    /// The digests of chunks that are copied back, one by one: they are few.
    fn digests_of_copies(&mut self) -> Result<Vec<u32>, Halt> {
        let device = Arc::clone(&self.pipeline.device);
        if self.samples.is_none() {
            self.samples = Some(device.stream().map_err(Halt::of)?);
        }
        let stream = self.samples.clone().unwrap_or_else(|| self.copies.clone());
        let most = self.chunks.iter().map(|chunk| chunk.1).max().unwrap_or(0);
        let none = || Halt::of(DeviceError::NoMemory(most));
        let host = self.pipeline.arena.take(most, most).ok_or_else(none)?;
        let memories = std::slice::from_ref(self.read.arena.memory().memory());
        let copied = |&(at, len): &(u64, u64)| {
            let pieces = [Piece { memory: 0, at, host: 0, len }];
            let (direction, method) = (Direction::ToHost, Method::Each);
            let batch = Batch { direction, method, host: &host, memories, pieces: &pieces };
            let copied = device.copy(&stream, &batch).map_err(Halt::of);
            // Behind a part of it as well. What is not done keeps its memory, and the follower waits for it.
            let event = device.record(&stream);
            let ended = event.as_ref().map_err(|error| Halt::of(error.clone()));
            match copied.and(ended.and_then(|event| self.wait_for(event))) {
                Ok(()) => Ok(host.digest(0, len as usize, crc32fast::hash)),
                Err(halt) => {
                    self.queue.keep(Box::new((host.clone(), stream.clone())));
                    self.queue.follow(event, false);
                    Err(halt)
                }
            }
        };
        self.chunks.iter().map(copied).collect()
    }

    /// Enqueues the copies of a layer to where it is wanted.
    fn copy(&mut self, at: usize) -> Result<(), Halt> {
        let (read, device, into) = (&self.read, &self.pipeline.device, &self.request.into);
        let Some(layer) = read.lent.layers().get(at) else { return Ok(()) };
        self.pieces.clear();
        for chunk in &layer.chunks {
            let from = read.place(at, chunk.range as usize).map(|place| place + chunk.at);
            let (which, what) = ((layer.layer, chunk.ordinal), (chunk.to, chunk.bytes));
            let put = from.and_then(|from| into.add_piece(which, what, from, &mut self.pieces));
            put.ok_or(Halt::Device(DeviceError::OutOfBounds))?;
        }
        let from = read.arena.memory().memory();
        let copied = device.spread(&self.copies, from, into.memories(), &self.pieces);
        let what = Layer { layer: layer.layer, blocks: into.blocks() };
        self.queue.enqueued(&**device, &self.copies, what, copied).map_err(Halt::Device)?;
        self.path.layers.fetch_add(1, Ordering::AcqRel);
        let bytes = layer.ranges.iter().map(|range| range.bytes).sum();
        self.path.bytes.fetch_add(bytes, Ordering::AcqRel);
        Ok(())
    }

    /// Brings the layers from this one on through the arena.
    fn detour(self, at: u32) {
        let Self { pipeline, path, request, read, copies, queue, .. } = self;
        let wanted = request.layers.clone().unwrap_or(0..request.into.shape().layers().len() as u32);
        let rest = LandRequest { layers: Some(wanted.start + at..wanted.end), ..request };
        // Unless a read is still under way, the files go back before the store is asked for the same blocks.
        let begun = (path.lender.clone(), Arc::clone(read.lent.origins()));
        drop(read);
        match pipeline.stage(rest, copies, Some(&begun)) {
            Ok(landing) => {
                queue.keep(Box::new(landing.ring.clone()));
                StagedReader::new(landing, queue).run();
            }
            Err(error) => queue.shared.fail(match error {
                LandError::Store(Reason::DeadlineInPast | Reason::DeadlinePassed) => EndReason::Deadline,
                LandError::Store(reason) => EndReason::Store(reason),
                LandError::Device(error) => EndReason::Device(error),
                LandError::ArenaFull { .. } => EndReason::Store(Reason::Busy("the arena is full")),
                LandError::ArenaTooSmall { .. } => EndReason::Store(Reason::TooMany("bytes for this arena")),
                LandError::Request(_) => EndReason::Store(Reason::Bug("a valid request was refused")),
            }),
        }
    }
}
