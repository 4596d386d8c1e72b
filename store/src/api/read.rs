//! Reading blocks: what is asked, and the stream of what has arrived.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use super::Placed;
use crate::error::Reason;
use crate::rt::{Class, Nanos};

/// How much of what is read is compared with its digests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Verify {
    /// Every chunk. The default: it costs about 0.04 CPU seconds a GiB.
    #[default]
    Always,
    /// Each chunk with this probability, in thousandths.
    Sample(u16),
    /// None: damaged bytes are served as they are.
    Never,
}

/// In which order a read delivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// Layer by layer, in execution order: each layer of all blocks.
    #[default]
    Layers,
    /// Block by block, in the order of the request: each block with all its layers.
    Blocks,
}

/// Blocks to be read into the caller's memory.
#[derive(Clone, Debug)]
pub struct ReadRequest {
    /// A registered namespace.
    pub namespace: NamespaceId,
    /// The group of all blocks.
    pub group: Group,
    /// The coordinate of all blocks.
    pub coordinate: Coordinate,
    /// The blocks wanted.
    pub keys: Vec<BlockKey>,
    /// Which layers of the shape, counted among the layers that this group has; `None` for all.
    pub layers: Option<Range<u32>>,
    /// In which order they are delivered.
    pub order: Order,
    /// Where they are wanted. The placement describes all layers of the shape, also when fewer are read.
    pub into: Placed,
    /// How much is compared with digests.
    pub verify: Verify,
    /// What the read is for.
    pub class: Class,
    /// When the caller stops waiting: what has arrived by then is what it gets.
    pub deadline: Option<Nanos>,
}

/// Something that arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReadEvent {
    /// This layer (counted as in the request) of the first `blocks` blocks is complete and verified in the
    /// caller's memory. Layers come in order.
    Layer {
        /// Which layer of the shape.
        layer: u32,
        /// How many leading blocks of the request are good so far.
        blocks: u32,
    },
    /// This block of the request is complete and verified in the caller's memory. Blocks come in order; one that
    /// failed is passed over.
    Block(u32),
    /// Nothing more will be delivered.
    End(ReadEnd),
    /// After an end with `held_bytes`: no device writes to the caller's memory any more.
    Released,
}

/// How a read ended: the first `usable_layers` wanted layers of the first `usable_blocks` blocks are complete and
/// verified in the caller's memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReadEnd {
    /// Leading blocks that are good.
    pub usable_blocks: u32,
    /// Leading layers that were delivered: all of them unless the deadline passed first.
    pub usable_layers: u32,
    /// Blocks that failed, with the reason, in the order of the request. In block order, blocks behind a failed
    /// one may be good: each that is was announced.
    pub failures: Vec<(u32, Reason)>,
    /// Zero, unless the deadline passed while the device was writing to this many bytes of the caller's memory:
    /// it must not be used before [`ReadEvent::Released`].
    pub held_bytes: u64,
}

#[derive(Default)]
struct Shared {
    events: VecDeque<ReadEvent>,
    waker: Option<Waker>,
    dropped: bool,
}

/// The two ends of a stream of events.
#[derive(Default)]
struct Channel {
    shared: Mutex<Shared>,
    arrived: Condvar,
}

impl Channel {
    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        // A panic while the queue is held leaves it whole: each push is one step.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The events of one read, for the caller. Dropping it cancels the read: the store stops as soon as the
/// device has let go of the caller's memory.
pub struct ReadStream(Arc<Channel>);

/// The store's end of a [`ReadStream`].
pub struct ReadSink(Arc<Channel>);

/// Makes both ends.
pub fn read_channel() -> (ReadSink, ReadStream) {
    let channel = Arc::new(Channel::default());
    (ReadSink(Arc::clone(&channel)), ReadStream(channel))
}

impl ReadSink {
    /// Delivers one event.
    pub fn send(&self, event: ReadEvent) {
        let waker = {
            let mut shared = self.0.lock();
            shared.events.push_back(event);
            shared.waker.take()
        };
        self.0.arrived.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether the caller has dropped its end.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().dropped
    }
}

impl ReadStream {
    /// The next event if one has arrived.
    pub fn try_next(&self) -> Option<ReadEvent> {
        self.0.lock().events.pop_front()
    }

    /// Blocks the thread until the next event. Not for simulated time, nor for an executor's thread.
    pub fn next_blocking(&self) -> ReadEvent {
        let mut shared = self.0.lock();
        loop {
            if let Some(event) = shared.events.pop_front() {
                return event;
            }
            shared = self.0.arrived.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Blocks the thread until the read has ended.
    pub fn wait_blocking(&self) -> ReadEnd {
        loop {
            if let ReadEvent::End(end) = self.next_blocking() {
                return end;
            }
        }
    }

    /// The next event, as a future.
    pub fn next(&self) -> impl Future<Output = ReadEvent> + '_ {
        std::future::poll_fn(move |context| self.poll_next(context))
    }

    fn poll_next(&self, context: &mut Context<'_>) -> Poll<ReadEvent> {
        let mut shared = self.0.lock();
        match shared.events.pop_front() {
            Some(event) => Poll::Ready(event),
            None => {
                shared.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for ReadStream {
    fn drop(&mut self) {
        self.0.lock().dropped = true;
    }
}

impl fmt::Debug for ReadStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadStream({} events waiting)", self.0.lock().events.len())
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

    #[test]
    fn events_arrive_in_order_and_a_dropped_stream_cancels() {
        let (sink, stream) = read_channel();
        sink.send(ReadEvent::Block(0));
        sink.send(ReadEvent::End(ReadEnd::default()));
        assert_eq!(stream.try_next(), Some(ReadEvent::Block(0)));
        assert_eq!(stream.wait_blocking(), ReadEnd::default());
        assert_eq!(stream.try_next(), None);
        assert!(!sink.is_cancelled());
        drop(stream);
        assert!(sink.is_cancelled());
    }
}
