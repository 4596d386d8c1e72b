//! Reads of blocks: the request, and the stream of arrived data.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

pub use kvarts_layout::plan::Order;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Group, NamespaceId};

use super::Placed;
use crate::error::{Reason, ShapeCause};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::ticket::Abandoned;
use crate::{class::Class, clock::Nanos};

/// Foreground reads of at most this number of bytes are served before larger ones.
pub const SMALL_READ_BYTES: u64 = 256 << 10;

/// The share of the bytes that a read verifies with their digests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Verify {
    /// Every chunk. This is the default, and costs about 0.04 CPU seconds per GiB.
    #[default]
    Always,
    /// Each chunk with this probability, in thousandths.
    Sample(u16),
    /// No chunk: damaged bytes are delivered as they are.
    Never,
}

impl Verify {
    /// Whether to verify the next chunk. Sampling advances its own generator, whose state the caller seeds once for each read.
    pub fn picks(self, state: &mut u64) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Sample(thousandths) => {
                *state =
                    state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (*state >> 33) % 1000 < u64::from(thousandths)
            }
        }
    }
}

/// The wanted layers of blocks of this shape, all layers if `wanted` is `None`, or the reason why the shape does not have them.
pub fn wanted_layers(wanted: Option<&Range<u32>>, shape: &BlockShape) -> Result<Range<u32>, Reason> {
    let count = shape.layers().len() as u32;
    match wanted {
        None => Ok(0..count),
        Some(range) if range.is_empty() => Err(Reason::Empty),
        Some(range) if range.end > count => Err(Reason::Shape(ShapeCause::Layers { end: range.end, count })),
        Some(range) => Ok(range.clone()),
    }
}

/// A read of blocks into the caller's memory.
#[derive(Clone, Debug)]
pub struct ReadRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The keys of the wanted blocks.
    pub keys: Vec<BlockKey>,
    /// The layers, counted among the layers of this group; `None` for all. To read the layers of blocks one after the other, use a
    /// [`TiledRead`](super::TiledRead): blocks may be replaced between two reads.
    pub layers: Option<Range<u32>>,
    /// The order of delivery.
    pub order: Order,
    /// The places for the blocks. Layers that are not read need no place.
    pub into: Placed,
    /// The share of bytes to verify.
    pub verify: Verify,
    /// The class of the read. A read in [`Class::Background`] does not count as a use of its blocks, which stay as cold as before.
    pub class: Class,
    /// When the caller stops waiting, by the clock of the store. The read then returns the data that has arrived.
    pub deadline: Option<Nanos>,
}

impl ReadRequest {
    /// A read of all layers of these blocks, in the order of the layers, with every byte verified. The caller may change the other fields.
    pub fn new(
        namespace: NamespaceId,
        group: Group,
        coordinate: Coordinate,
        keys: Vec<BlockKey>,
        into: Placed,
    ) -> Self {
        Self {
            namespace,
            group,
            coordinate,
            keys,
            layers: None,
            order: Order::default(),
            into,
            verify: Verify::default(),
            class: Class::Foreground,
            deadline: None,
        }
    }
}

/// An event of a read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReadEvent {
    /// This layer (counted as in the request) of the first `blocks` blocks is complete and verified in the caller's memory. Layers arrive
    /// in order.
    Layer {
        /// The layer of the shape.
        layer: u32,
        /// The number of good leading blocks of the request so far.
        blocks: u32,
    },
    /// This block of the request is complete and verified in the caller's memory. Blocks arrive in order; failed blocks are skipped.
    Block(u32),
    /// The read delivers nothing more.
    End(ReadEnd),
    /// After an end with `held_bytes`: no device writes to the caller's memory any more.
    Released,
}

/// The end of a read: the first `usable_layers` wanted layers of the first `usable_blocks` blocks are complete and verified in the caller's
/// memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReadEnd {
    /// The number of good leading blocks.
    pub usable_blocks: u32,
    /// The number of delivered leading layers: all layers, unless the deadline passed first.
    pub usable_layers: u32,
    /// Failed blocks with their reasons, in the order of the request. In block order, blocks after a failed block may be good, and each
    /// good block was announced. In layer order, blocks after the first failed block are not read. The list then contains those of them
    /// that a source knows to be absent, and others may be absent, too.
    pub failures: Vec<(u32, Reason)>,
    /// Zero, unless the deadline passed while the device was writing to this number of bytes of the caller's memory. The caller must not
    /// use that memory before [`ReadEvent::Released`].
    pub held_bytes: u64,
}

#[derive(Default)]
struct Shared {
    events: VecDeque<ReadEvent>,
    waker: Option<Waker>,
    /// The caller has dropped its end.
    dropped: bool,
    /// Who is told of that.
    cancelled: Option<Waker>,
    /// Only the end is of interest: what comes before it is not kept.
    end_only: bool,
    /// What comes before the end is kept, and wakes no task.
    wakes_at_end: bool,
    /// The end, while a device still writes to the caller's memory.
    held: Option<ReadEnd>,
    /// An end was sent.
    ended: bool,
    /// The store has dropped its end: no device has the caller's memory any more.
    gone: bool,
    /// The caller polls, so it does not fetch what arrives: the [`Poller`] fetches all of it, the release of the memory
    /// included.
    attended: bool,
    /// Threads that sleep until an event arrives.
    sleepers: u32,
    /// The first block that failed so far, and why.
    failure: Option<(u32, Reason)>,
}

impl Shared {
    /// Whether an event is there that was not taken, or none will come any more.
    fn has_news(&self) -> bool {
        self.gone || !self.events.is_empty()
    }

    /// Takes every event in; the end, once it is there and nothing is held any more.
    fn take_end(&mut self) -> Option<Result<ReadEnd, Abandoned>> {
        for event in std::mem::take(&mut self.events) {
            match event {
                ReadEvent::End(end) if end.held_bytes == 0 => return Some(Ok(end)),
                ReadEvent::End(end) => self.held = Some(end),
                ReadEvent::Released => return Some(self.released()),
                ReadEvent::Layer { .. } | ReadEvent::Block(_) => {}
            }
        }
        self.gone.then(|| self.released())
    }

    fn released(&mut self) -> Result<ReadEnd, Abandoned> {
        self.held.take().map(|end| ReadEnd { held_bytes: 0, ..end }).ok_or(Abandoned)
    }
}

/// The two ends of a stream of events.
#[derive(Default)]
struct Channel {
    shared: Mutex<Shared>,
    arrived: Condvar,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A panic while the queue is held leaves it whole: each push is one step.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes who waits for what was put in: the waker, and a thread. Where no thread sleeps the kernel is not asked.
    fn news(&self, shared: MutexGuard<'_, Shared>, waker: Option<Waker>) {
        let sleeps = shared.sleepers > 0;
        drop(shared);
        if sleeps {
            self.arrived.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A source of a read's events that a thread of this process must poll: a connection.
pub trait Poller: Send + Sync {
    /// Fetches events on this thread, which may sleep, until `done` returns true. Returns earlier if another thread is fetching, or if no
    /// more events will arrive.
    fn fetch(&self, done: &mut dyn FnMut() -> bool);

    /// Lets a thread fetch for a task that waits and cannot fetch.
    fn attend(&self);
}

/// The events of one read, for the caller. Dropping it cancels the read: the store stops as soon as the device no longer uses the caller's
/// memory.
pub struct ReadStream {
    channel: Arc<Channel>,
    bring: Option<Arc<dyn Poller>>,
}

/// The store's end of a [`ReadStream`]. Dropping it without an end ends the stream without usable blocks.
pub struct ReadSink(Arc<Channel>);

/// Creates both ends.
pub fn read_channel() -> (ReadSink, ReadStream) {
    let channel = Arc::new(Channel::default());
    (ReadSink(Arc::clone(&channel)), ReadStream { channel, bring: None })
}

impl ReadSink {
    /// Delivers one event.
    pub fn send(&self, event: ReadEvent) {
        let mut shared = self.0.lock();
        shared.ended |= matches!(event, ReadEvent::End(_));
        let is_early = matches!(event, ReadEvent::Layer { .. } | ReadEvent::Block(_));
        if shared.end_only && is_early {
            return;
        }
        shared.events.push_back(event);
        let waker = if shared.wakes_at_end && is_early { None } else { shared.waker.take() };
        self.0.news(shared, waker);
    }

    /// Reports a failed leading block, before an event that counts fewer blocks because of it.
    pub fn note_failure(&self, ordinal: u32, reason: &Reason) {
        let mut shared = self.0.lock();
        if shared.failure.as_ref().is_none_or(|(known, _)| ordinal < *known) {
            shared.failure = Some((ordinal, reason.clone()));
        }
    }

    /// Whether the caller waits without fetching: as a future, or as a queue that polls from time to time. After the end the caller may
    /// wait for its memory, too, so the memory must be released without a request.
    pub fn is_attended(&self) -> bool {
        self.0.lock().attended
    }

    /// Whether the caller has dropped its end.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().dropped
    }

    /// The same, for a task that is woken when the caller drops its end.
    pub fn poll_cancelled(&self, context: &Context<'_>) -> Poll<()> {
        let mut shared = self.0.lock();
        if shared.dropped {
            return Poll::Ready(());
        }
        shared.cancelled = Some(context.waker().clone());
        Poll::Pending
    }
}

impl ReadStream {
    /// The same stream with a source that must be polled: a thread that blocks on the stream fetches the events itself.
    #[must_use]
    pub fn brought_by(mut self, bring: Arc<dyn Poller>) -> Self {
        self.bring = Some(bring);
        self
    }

    /// The next event, if one has arrived.
    pub fn try_next(&self) -> Option<ReadEvent> {
        let mut shared = self.channel.lock();
        let event = shared.events.pop_front();
        let known = std::mem::replace(&mut shared.attended, true);
        drop(shared);
        if event.is_none() || !known {
            // Who looks now and then waits as well.
            self.attend();
        }
        event
    }

    /// The first block of the request that is known to have failed, and its reason: for callers that stop at the first [`ReadEvent::Layer`]
    /// with fewer blocks than they requested.
    pub fn first_failure(&self) -> Option<(u32, Reason)> {
        self.channel.lock().failure.clone()
    }

    /// Blocks the thread until there is something to `take`.
    fn wait_for<T>(&self, mut take: impl FnMut(&mut Shared) -> Option<T>) -> T {
        loop {
            let mut shared = self.channel.lock();
            if let Some(taken) = take(&mut shared) {
                return taken;
            }
            if let Some(bring) = &self.bring {
                drop(shared);
                bring.fetch(&mut || self.channel.lock().has_news());
                shared = self.channel.lock();
            }
            while !shared.has_news() {
                shared.sleepers += 1;
                shared = self.channel.arrived.wait(shared).unwrap_or_else(PoisonError::into_inner);
                shared.sleepers -= 1;
            }
        }
    }

    /// Blocks the thread until the next event. Do not call it in simulated time or on a thread of an executor.
    pub fn next_blocking(&self) -> ReadEvent {
        // A stream whose store is gone and whose events were all taken has ended; it is not asked for more.
        self.wait_for(|shared| {
            let over = shared.gone.then(|| ReadEvent::End(ReadEnd::default()));
            shared.events.pop_front().or(over)
        })
    }

    /// Blocks the thread until the read has ended.
    pub fn wait_blocking(&self) -> ReadEnd {
        loop {
            if let ReadEvent::End(end) = self.next_blocking() {
                return end;
            }
        }
    }

    /// As [`ReadStream::poll_end`], but blocks the thread. Events before the end are discarded.
    pub fn wait_end(&self) -> Result<ReadEnd, Abandoned> {
        self.channel.lock().end_only = true;
        self.wait_for(Shared::take_end)
    }

    /// The next event, as a future.
    pub fn next(&self) -> impl Future<Output = ReadEvent> + '_ {
        std::future::poll_fn(move |context| self.poll_next(context))
    }

    /// The end of the read, after the read has ended and no device writes to the caller's memory any more. [`Abandoned`] if the store
    /// stopped before, and after the end was taken. From the first call on, events before the end are discarded, and only the end, or the
    /// release, wakes the waker.
    pub fn poll_end(&self, context: &mut Context<'_>) -> Poll<Result<ReadEnd, Abandoned>> {
        let mut shared = self.channel.lock();
        shared.end_only = true;
        let end = shared.take_end();
        self.polled(shared, end, context)
    }

    /// Whether the read has ended. All of its events can then be taken, and the result is true if no block failed and no memory is held.
    /// From the first call on, nothing before the end wakes the waker.
    pub fn poll_over(&self, context: &mut Context<'_>) -> Poll<bool> {
        let mut shared = self.channel.lock();
        shared.wakes_at_end = true;
        let end = shared.events.iter().rev().find_map(|event| match event {
            ReadEvent::End(end) => Some(end.failures.is_empty() && end.held_bytes == 0),
            _ => None,
        });
        // The end that an abandoned read is given tells nothing.
        let abandoned = shared.gone && !shared.ended;
        let over = if abandoned { Some(false) } else { end };
        self.polled(shared, over, context)
    }

    /// The next event. Until then the waker is woken by this event and by nothing else.
    pub fn poll_next(&self, context: &mut Context<'_>) -> Poll<ReadEvent> {
        let mut shared = self.channel.lock();
        shared.wakes_at_end = false;
        let event = shared.events.pop_front();
        self.polled(shared, event, context)
    }

    /// What a future is told. From the first poll on the [`Poller`] fetches what the future waits for, and then the release of
    /// the memory. The release comes after the end, which another caller may have fetched before.
    fn polled<T>(
        &self,
        mut shared: MutexGuard<'_, Shared>,
        found: Option<T>,
        context: &Context<'_>,
    ) -> Poll<T> {
        let known = std::mem::replace(&mut shared.attended, true);
        if found.is_none() {
            shared.waker = Some(context.waker().clone());
        }
        drop(shared);
        if found.is_none() || !known {
            self.attend();
        }
        found.map_or(Poll::Pending, Poll::Ready)
    }

    fn attend(&self) {
        if let Some(bring) = &self.bring {
            bring.attend();
        }
    }
}

impl Drop for ReadSink {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.gone = true;
        if !shared.ended && !shared.end_only {
            shared.events.push_back(ReadEvent::End(ReadEnd::default()));
        }
        let waker = shared.waker.take();
        self.0.news(shared, waker);
    }
}

impl Drop for ReadStream {
    fn drop(&mut self) {
        let (ended, waker) = {
            let mut shared = self.channel.lock();
            shared.dropped = true;
            (shared.ended, shared.cancelled.take())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        if !ended {
            // The source sees that the read is no longer wanted.
            self.attend();
        }
    }
}

impl fmt::Debug for ReadStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadStream({} events waiting)", self.channel.lock().events.len())
    }
}

impl fmt::Debug for ReadSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadSink")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::SpaceCause;

    #[test]
    fn events_arrive_in_order_and_a_dropped_stream_cancels() {
        let (sink, stream) = read_channel();
        sink.send(ReadEvent::Block(0));
        sink.send(ReadEvent::End(ReadEnd::default()));
        assert_eq!(stream.try_next(), Some(ReadEvent::Block(0)));
        assert_eq!(stream.wait_blocking(), ReadEnd::default());
        assert_eq!(stream.try_next(), None);
        [4, 2, 3].iter().for_each(|&ordinal| sink.note_failure(ordinal, &Reason::NoSpace(SpaceCause::Disk)));
        assert_eq!(stream.first_failure(), Some((2, Reason::NoSpace(SpaceCause::Disk))));
        assert!(!sink.is_cancelled());
        drop(stream);
        assert!(sink.is_cancelled());
    }

    #[test]
    fn a_source_that_waits_is_woken_when_its_caller_goes() {
        let (counted, (sink, stream)) = (Arc::new(Counted::default()), read_channel());
        let waker = Waker::from(Arc::clone(&counted));
        let context = Context::from_waker(&waker);
        assert!(sink.poll_cancelled(&context).is_pending());
        drop(stream);
        assert_eq!(counted.0.load(std::sync::atomic::Ordering::SeqCst), 1);
        assert!(sink.poll_cancelled(&context).is_ready());
    }

    #[test]
    fn a_sink_that_goes_without_an_end_ends_the_stream_with_nothing_usable() {
        let (sink, stream) = read_channel();
        sink.send(ReadEvent::Block(0));
        drop(sink);
        assert_eq!(stream.wait_blocking(), ReadEnd::default());
    }

    #[derive(Default)]
    struct Counted(std::sync::atomic::AtomicUsize);

    impl std::task::Wake for Counted {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn a_poll_for_the_end_is_woken_by_the_end_alone_and_waits_for_the_release() {
        let (counted, (sink, stream)) = (Arc::new(Counted::default()), read_channel());
        let waker = Waker::from(Arc::clone(&counted));
        let mut context = Context::from_waker(&waker);
        let wakes = || counted.0.load(std::sync::atomic::Ordering::SeqCst);
        sink.send(ReadEvent::Block(0));
        assert!(stream.poll_end(&mut context).is_pending());
        (1..100).for_each(|block| sink.send(ReadEvent::Block(block)));
        assert_eq!((wakes(), stream.channel.lock().events.len()), (0, 0));
        sink.send(ReadEvent::End(ReadEnd { usable_blocks: 7, held_bytes: 1, ..ReadEnd::default() }));
        assert_eq!(wakes(), 1);
        assert!(stream.poll_end(&mut context).is_pending());
        sink.send(ReadEvent::Released);
        assert_eq!(wakes(), 2);
        let end = ReadEnd { usable_blocks: 7, ..ReadEnd::default() };
        assert_eq!(stream.poll_end(&mut context), Poll::Ready(Ok(end)));
    }

    #[test]
    fn a_poll_for_a_read_that_is_over_is_woken_once_and_finds_everything_that_was_told() {
        let (counted, (sink, stream)) = (Arc::new(Counted::default()), read_channel());
        let waker = Waker::from(Arc::clone(&counted));
        let mut context = Context::from_waker(&waker);
        let wakes = || counted.0.load(std::sync::atomic::Ordering::SeqCst);
        assert!(stream.poll_over(&mut context).is_pending());
        (0..100).for_each(|block| sink.send(ReadEvent::Block(block)));
        assert!((wakes(), stream.poll_over(&mut context)) == (0, Poll::Pending));
        sink.send(ReadEvent::End(ReadEnd::default()));
        assert_eq!((wakes(), stream.poll_over(&mut context)), (1, Poll::Ready(true)));
        assert_eq!((0..100).filter(|block| stream.try_next() == Some(ReadEvent::Block(*block))).count(), 100);
        assert_eq!(stream.try_next(), Some(ReadEvent::End(ReadEnd::default())));
        // One that failed in part, or that a device still writes to, is over as well.
        for (failures, held_bytes) in [(vec![(0, Reason::NoSpace(SpaceCause::Disk))], 0), (Vec::new(), 1)] {
            let (sink, stream) = read_channel();
            assert!(stream.poll_over(&mut context).is_pending());
            sink.send(ReadEvent::End(ReadEnd { failures, held_bytes, ..ReadEnd::default() }));
            assert_eq!(stream.poll_over(&mut context), Poll::Ready(false));
        }
        let (sink, stream) = read_channel();
        assert!(stream.poll_over(&mut context).is_pending());
        drop(sink);
        assert_eq!((wakes(), stream.poll_over(&mut context)), (4, Poll::Ready(false)));
    }

    #[test]
    fn a_poll_for_the_end_of_an_abandoned_read_is_woken_and_told() {
        let (counted, (sink, stream)) = (Arc::new(Counted::default()), read_channel());
        let waker = Waker::from(Arc::clone(&counted));
        let mut context = Context::from_waker(&waker);
        assert!(stream.poll_end(&mut context).is_pending());
        drop(sink);
        assert_eq!(counted.0.load(std::sync::atomic::Ordering::SeqCst), 1);
        assert_eq!(stream.poll_end(&mut context), Poll::Ready(Err(Abandoned)));
    }
}
