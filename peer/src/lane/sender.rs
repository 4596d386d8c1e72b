//! One connection as its server answers it: pieces are read side by side, as many as there is memory for, and each goes out
//! as soon as all of it is there.
//!
//! The memory of a piece is the arena's again when nothing uses it any more, the disk included, whatever became of the
//! connection. Connections that wait for memory get it in the order of asking, one piece each at a time: none takes what
//! another waits for.

use std::any::Any;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_contract::api::{
    Digests, Origins, Placed, ReadEnd, ReadRequest, ReadStream, TiledRequest, Verify,
};
use kvarts_contract::buffers::BufMut;
use kvarts_contract::buffers::stream::Stretch;
use kvarts_contract::error::Reason;
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::plan::Order;
use kvarts_layout::{BlockShape, OriginId, planted};
use kvarts_wire::{fault, proto};

use super::asked::{self, Asked};
use super::bell::Bell;
use super::connection::Connection;
use super::delivery::Delivery;
use super::frame::{Kind, bare, frame};
use super::limits::{STALL, TAKING_RATE};
use super::serving::Serving;
use super::wire::{Broken, Ready, Wire, moved};
use crate::path::Piece;

/// What of the memory this connection has.
#[derive(Debug)]
struct Share {
    bytes: Arc<AtomicU64>,
    mine: u64,
    bell: Arc<Bell>,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.mine, Ordering::SeqCst);
        self.bell.ring();
    }
}

/// What is to be read: a piece with its number, or blocks in doubt.
type Job = (Option<u64>, Asked);

/// A job that waits for its memory.
struct Taking {
    job: Job,
    memory: Pin<Box<dyn Future<Output = Option<BufMut>> + Send>>,
}

/// A read under way, or one that has ended.
struct Started {
    job: Job,
    shape: Arc<BlockShape>,
    stream: ReadStream,
    into: Placed,
    origins: Arc<Origins>,
}

pub(super) struct Sender {
    serving: Arc<Serving>,
    wire: Arc<dyn Wire>,
    connection: Arc<Connection>,
    waker: Waker,
    waiting: VecDeque<Job>,
    taking: Option<Taking>,
    started: Vec<Started>,
    /// Bytes of memory that this connection has.
    held: Arc<AtomicU64>,
    /// Frames that go out before the next answer.
    small: Vec<u8>,
}

impl Sender {
    pub(super) fn new(serving: Arc<Serving>, wire: Arc<dyn Wire>, connection: Arc<Connection>) -> Self {
        let waker = Waker::from(Arc::clone(&connection.bell));
        let (waiting, started, small) = (VecDeque::new(), Vec::new(), Vec::new());
        let held = Arc::default();
        Self { serving, wire, connection, waker, waiting, taking: None, started, held, small }
    }

    /// Answers until the connection ends, and says why it did.
    pub(super) fn run(mut self) -> Broken {
        let broken = loop {
            if let Err(broken) = self.step() {
                break broken;
            }
        };
        self.wire.close();
        broken
    }

    fn step(&mut self) -> Result<(), Broken> {
        self.look()?;
        let small = std::mem::take(&mut self.small);
        self.send(&small, false)?;
        match self.next_ended() {
            Some((ended, end)) => self.answer(ended, end),
            None => {
                self.sleep(None, None);
                Ok(())
            }
        }
    }

    /// Sees to what was heard, and begins what there is memory for.
    fn look(&mut self) -> Result<(), Broken> {
        self.connection.bell.answer();
        let (mut cancelled, pings) = {
            let mut heard = self.connection.lock();
            if heard.gone {
                return Err(Broken::Gone);
            }
            self.waiting.extend(heard.pieces.drain(..).map(|(number, asked)| (Some(number), asked)));
            self.waiting.extend(heard.doubts.drain(..).map(|asked| (None, asked)));
            (std::mem::take(&mut heard.cancelled), std::mem::take(&mut heard.pings))
        };
        for _ in 0..pings {
            self.small.extend(bare(Kind::Pong, 0));
        }
        // A piece that is being sent goes on: who cancelled it passes over the rest.
        cancelled.retain(|number| self.drop_job(*number));
        for number in cancelled {
            self.refuse(number, 0, None);
        }
        self.begin();
        Ok(())
    }

    /// Drops a job wherever it is. False if it is nowhere any more.
    fn drop_job(&mut self, number: u64) -> bool {
        let is_it = |job: &Job| job.0 == Some(number);
        let before = self.waiting.len() + self.started.len() + usize::from(self.taking.is_some());
        self.waiting.retain(|job| !is_it(job));
        self.started.retain(|started| !is_it(&started.job));
        self.taking.take_if(|taking| is_it(&taking.job));
        before > self.waiting.len() + self.started.len() + usize::from(self.taking.is_some())
    }

    /// Begins the next jobs as long as there is memory for them.
    fn begin(&mut self) {
        loop {
            if self.taking.is_none() {
                let Some((number, asked)) = self.waiting.front() else { return };
                let bytes = asked.bytes();
                let held = self.held.load(Ordering::SeqCst);
                if held > 0 && held.saturating_add(bytes) > self.serving.limits.connection_memory {
                    return;
                }
                if let Err(reason) = &asked.shape {
                    let (number, blocks, reason) = (*number, asked.request.keys.len(), reason.clone());
                    self.waiting.pop_front();
                    if let Some(number) = number {
                        self.refuse(number, blocks, Some(&reason));
                    }
                    continue;
                }
                let Some(job) = self.waiting.pop_front() else { return };
                let (arena, bytes) =
                    (self.serving.arena.clone(), usize::try_from(bytes).unwrap_or(usize::MAX));
                self.taking = Some(Taking { job, memory: Box::pin(async move { arena.take(bytes).await }) });
            }
            let Some(taking) = &mut self.taking else { return };
            let Poll::Ready(memory) = taking.memory.as_mut().poll(&mut Context::from_waker(&self.waker))
            else {
                return;
            };
            if let Some(Taking { job, .. }) = self.taking.take() {
                let (number, blocks) = (job.0, job.1.request.keys.len());
                let memory = memory.ok_or(Reason::TooMany("bytes"));
                match memory.and_then(|memory| self.start(job, memory)) {
                    Ok(started) => self.started.push(started),
                    Err(reason) => {
                        if let Some(number) = number {
                            self.refuse(number, blocks, Some(&reason));
                        }
                    }
                }
            }
        }
    }

    fn start(&self, job: Job, memory: BufMut) -> Result<Started, Reason> {
        let asked = &job.1;
        let (shape, mine) = (asked.shape.clone()?, memory.len() as u64);
        self.held.fetch_add(mine, Ordering::SeqCst);
        let bell = Arc::clone(&self.connection.bell);
        let share: Arc<dyn Any + Send + Sync> = Arc::new(Share { bytes: Arc::clone(&self.held), mine, bell });
        let tile = asked.request.whole();
        let into = Placed::tile(asked.request.order, &shape, &tile, memory.kept_by(share))?;
        // Those in doubt are compared here.
        let (into, verify, class) = match job.0 {
            Some(_) => {
                let digests = Digests::new(&shape, tile.block_count());
                (into.with_digests(digests), asked.request.verify, asked.request.class)
            }
            None => (into, Verify::Always, Class::Background),
        };
        let origins = Origins::of(asked.origins.clone());
        let request = ReadRequest { verify, class, ..asked.request.tile(&tile, into.clone())? };
        let stream = self.serving.served.read(Piece { request, origins: Arc::clone(&origins), first: 0 })?;
        Ok(Started { job, shape, stream, into, origins })
    }

    /// The first of those that have ended.
    fn next_ended(&mut self) -> Option<(Started, ReadEnd)> {
        let mut context = Context::from_waker(&self.waker);
        for at in 0..self.started.len() {
            if let Poll::Ready(end) = self.started.get(at)?.stream.poll_end(&mut context) {
                let end = end.unwrap_or_default();
                return Some((self.started.remove(at), end));
            }
        }
        None
    }

    /// Answers a piece of which nothing is sent: with the reason of all its blocks, or because it is not wanted any more.
    fn refuse(&mut self, number: u64, blocks: usize, reason: Option<&Reason>) {
        let code = reason.map_or(0, |reason| fault::detail(reason).reason);
        let answer = proto::LaneAnswer {
            failed: (0..blocks as u32).collect(),
            reasons: vec![code; blocks],
            ..proto::LaneAnswer::default()
        };
        self.connection.lock().open.remove(&number);
        self.small.extend(frame(Kind::Answer, number, &answer));
    }

    /// Sends what was read of a piece.
    fn answer(&mut self, ended: Started, end: ReadEnd) -> Result<(), Broken> {
        let Started { job: (Some(number), asked), shape, into, origins, stream } = ended else {
            return Ok(());
        };
        drop(stream);
        if end.usable_blocks == 0 && end.failures.is_empty() {
            self.refuse(number, asked.request.keys.len(), Some(&Reason::Busy("the store has stopped")));
            return Ok(());
        }
        let now = self.serving.member.clock.now();
        let (answer, mut stretch) = said(&asked.request, &shape, (&into, &origins), &end, now);
        drop(into);
        let clock = Arc::clone(&self.serving.member.clock);
        let due = self.serving.rate.take(answer.bytes, clock.now());
        loop {
            let left = due.since(clock.now());
            if left.is_zero() {
                break;
            }
            // Who waits for a turn still hears that this node is there.
            let small = std::mem::take(&mut self.small);
            self.send(&small, false)?;
            self.sleep(None, Some(left));
            self.look()?;
        }
        let small = std::mem::take(&mut self.small);
        self.send(&small, true)?;
        self.send(&frame(Kind::Answer, number, &answer), answer.bytes > 0)?;
        let until = self.taken_by(answer.bytes);
        while !stretch.is_done() {
            if moved(self.wire.send_from(&mut stretch))?.is_none() {
                self.wait_for_room(until)?;
            }
        }
        self.connection.lock().open.remove(&number);
        self.serving.counters.pieces.fetch_add(1, Ordering::Relaxed);
        self.serving.counters.bytes.fetch_add(answer.bytes, Ordering::Relaxed);
        Ok(())
    }

    /// When this many bytes must have been taken.
    fn taken_by(&self, bytes: u64) -> Nanos {
        let slow =
            Duration::from_secs(if planted!("untaken-answer-kept") { 1 << 20 } else { bytes / TAKING_RATE });
        self.serving.member.clock.now().plus(STALL + slow)
    }

    /// Sleeps until there is room; begins meanwhile what there is memory for.
    fn wait_for_room(&mut self, until: Nanos) -> Result<(), Broken> {
        let left = until.since(self.serving.member.clock.now());
        if left.is_zero() {
            return Err(Broken::Silent);
        }
        let wire = Arc::clone(&self.wire);
        self.sleep(Some((&*wire, Ready::ToSend)), Some(left));
        self.look()
    }

    fn sleep(&self, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>) {
        self.serving.member.host.sleep(Some(&self.connection.bell), wire, timeout);
    }

    fn send(&mut self, mut bytes: &[u8], more: bool) -> Result<(), Broken> {
        let until = self.taken_by(bytes.len() as u64);
        while !bytes.is_empty() {
            match moved(self.wire.send(bytes, more))? {
                Some(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                None => self.wait_for_room(until)?,
            }
        }
        Ok(())
    }
}

/// What is answered after a read, and the bytes that follow.
fn said(
    asked: &TiledRequest,
    shape: &BlockShape,
    (into, origins): (&Placed, &Origins),
    end: &ReadEnd,
    now: Nanos,
) -> (proto::LaneAnswer, Stretch) {
    let (met, lives) = (origins.met(), origins.lives());
    let has_failed = |block: &u32| end.failures.binary_search_by_key(block, |(failed, _)| *failed).is_ok();
    let all = 0..asked.keys.len() as u32;
    let (layers, blocks) = match asked.order {
        Order::Blocks => (asked.layers.len() as u32, all.filter(|block| !has_failed(block)).collect()),
        Order::Layers => (end.usable_layers, (0..end.usable_blocks).collect::<Vec<_>>()),
    };
    let layers = asked.layers.start..asked.layers.start + layers.min(asked.layers.len() as u32);
    let delivery = Delivery { order: asked.order, layers, blocks };
    let (mut digests, mut stretch) = (Vec::new(), Stretch::with_capacity(delivery.chunks(shape) as usize));
    delivery.each(shape, |chunk| {
        let digest = into.digests().and_then(|digests| digests.get(chunk.part, chunk.block));
        // One that is not known matches nothing but by chance.
        digests.extend_from_slice(&digest.unwrap_or_default().to_le_bytes());
        if let Some(range) = into.chunk(chunk.part, chunk.block, chunk.bytes) {
            stretch.push(range);
        }
    });
    let origin = |block: &u32| met.get(*block as usize).copied().flatten().unwrap_or_default();
    let origins: Vec<OriginId> = delivery.blocks.iter().map(origin).collect();
    let lives = delivery.blocks.iter().map(|block| lives.get(*block as usize).copied().flatten());
    let answer = proto::LaneAnswer {
        usable_blocks: end.usable_blocks,
        usable_layers: end.usable_layers,
        failed: end.failures.iter().map(|(block, _)| *block).collect(),
        reasons: end.failures.iter().map(|(_, reason)| fault::detail(reason).reason).collect(),
        origins: origins.iter().flat_map(|origin| origin.0).collect::<Vec<u8>>().into(),
        digests: digests.into(),
        bytes: delivery.bytes(shape),
        lives: lives.flat_map(|life| asked::wire_life(life, now)).collect::<Vec<u8>>().into(),
    };
    (answer, stretch)
}
