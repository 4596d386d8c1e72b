//! The thread of one peer: it makes the connection, again and again, and takes what comes over it. It alone writes to the
//! memory of pieces and ends their streams, so that a stream that has ended has let go of its memory.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kvarts_contract::clock::Nanos;
use kvarts_contract::error::Reason;
use kvarts_layout::StoreId;
use kvarts_wire::convert;

use super::arrival::{Arrival, Doubted, end_early};
use super::asked::wire_origins;
use super::bell::Bell;
use super::client::{AWAY, Counters, LaneClient, Open, Shared, State, wire_read};
use super::frame::{Head, Incoming, Kind, bare, frame, message};
use super::hello::Member;
use super::limits::{AGAIN, ANSWER_BYTES_MAX, CONNECT, SILENCE, STALL};
use super::wire::{Broken, Ready, Wire};

/// Bytes that are passed over at once.
const SCRATCH_BYTES: usize = 64 << 10;
/// A connection that lasted so long was a good one: the next is tried at once.
const LASTING: Duration = Duration::from_secs(10);
/// How long a thread that waits for nothing in particular sleeps at once.
const LONG: Duration = Duration::from_secs(3600);

pub(super) struct Courier {
    shared: Arc<Shared>,
    scratch: Vec<u8>,
}

/// What is known of a connection.
struct Link {
    wire: Arc<dyn Wire>,
    incoming: Incoming,
    arrival: Option<Arrival>,
    /// When something came the last time.
    heard: Nanos,
    /// The peer was asked whether it is there, and nothing came since.
    pinged: bool,
}

impl LaneClient {
    /// A way to the node `peer`, which answers at `address`. The connection is made by a thread of its own, again and again; until
    /// there is one, reads are refused at once.
    pub fn connect(address: SocketAddr, peer: StoreId, member: Member) -> std::io::Result<Arc<Self>> {
        let state = Mutex::new(State::away(member.clock.now()));
        let (bell, counters) = (Bell::new()?, Counters::default());
        let shared = Arc::new(Shared { address, peer, member, bell, counters, state });
        let (courier, host) = (Courier::new(Arc::clone(&shared)), Arc::clone(&shared.member.host));
        // No thread waits for its end.
        drop(host.thread("kvarts-lane", Box::new(move || courier.run()))?);
        Ok(Arc::new(Self(shared)))
    }
}

impl Courier {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, scratch: vec![0; SCRATCH_BYTES] }
    }

    /// Goes on until the client is dropped.
    pub(super) fn run(mut self) {
        let (mut pause, mut told) = (AGAIN.0, None);
        while !self.shared.lock().stopping {
            let begun = self.now();
            let broken = match self.connect() {
                Ok(wire) => self.serve(wire),
                Err(broken) => broken,
            };
            if self.now().since(begun) >= LASTING {
                (pause, told) = (AGAIN.0, None);
            }
            if told.replace(broken) != Some(broken) {
                let Shared { address, peer, .. } = &*self.shared;
                tracing::info!(%peer, %address, reason = %broken, "a connection to a peer could not be \
                    made; retrying");
            }
            self.pause(pause);
            pause = (pause * 2).min(AGAIN.1);
        }
    }

    fn now(&self) -> Nanos {
        self.shared.member.clock.now()
    }

    fn pause(&self, pause: Duration) {
        let until = self.now().plus(pause);
        while !self.shared.lock().stopping {
            let left = until.since(self.now());
            if left.is_zero() {
                return;
            }
            self.shared.bell.answer();
            self.shared.member.host.sleep(Some(&self.shared.bell), None, Some(left));
        }
    }

    fn connect(&self) -> Result<Arc<dyn Wire>, Broken> {
        let Shared { address, peer, member, counters, .. } = &*self.shared;
        counters.attempts.fetch_add(1, Ordering::Relaxed);
        let wire = member.host.connect(*address, CONNECT).map_err(|_| Broken::Gone)?;
        member.connect(wire, *peer)
    }

    /// Takes what comes until the connection ends.
    fn serve(&mut self, wire: Arc<dyn Wire>) -> Broken {
        self.shared.counters.connections.fetch_add(1, Ordering::Relaxed);
        self.shared.lock().attach(Arc::clone(&wire));
        let (incoming, heard) = (Incoming::default(), self.now());
        let mut link = Link { wire, incoming, arrival: None, heard, pinged: false };
        let broken = loop {
            match self.step(&mut link) {
                Ok(true) => {}
                Ok(false) => break Broken::Gone,
                Err(broken) => break broken,
            }
        };
        link.wire.close();
        let open = self.shared.lock().detach(self.now());
        let arriving = link.arrival.and_then(|arrival| arrival.wanted);
        for wanted in arriving.into_iter().chain(open.into_values().filter_map(|open| open.wanted)) {
            let reason = (!wanted.sink.is_cancelled()).then_some(&AWAY);
            end_early(wanted, reason, &self.shared.counters);
        }
        broken
    }

    /// Does what there is to do, or sleeps. False if the client was dropped.
    fn step(&mut self, link: &mut Link) -> Result<bool, Broken> {
        let now = self.now();
        let looks_at = {
            let state = self.shared.lock();
            if state.stopping {
                return Ok(false);
            }
            state.looks_at
        };
        if self.shared.bell.answer() || now >= looks_at {
            self.look(link, now)?;
        }
        if self.take(link)? {
            (link.heard, link.pinged) = (now, false);
            return Ok(true);
        }
        let sending = self.shared.lock().flush_all();
        let ready = if sending { Ready::ForBoth } else { Ready::ToReceive };
        let until = self.shared.lock().looks_at;
        let Shared { member, bell, .. } = &*self.shared;
        member.host.sleep(Some(bell), Some((&*link.wire, ready)), Some(until.since(self.now())));
        Ok(true)
    }

    /// Ends pieces that are late or not wanted any more, and sees whether the peer is there.
    fn look(&self, link: &mut Link, now: Nanos) -> Result<(), Broken> {
        if let Some(arrival) = &mut link.arrival
            && let Some(wanted) = &arrival.wanted
        {
            if wanted.sink.is_cancelled() {
                arrival.let_go(None, &self.shared.counters);
            } else if now >= wanted.deadline {
                arrival.let_go(Some(&Reason::DeadlinePassed), &self.shared.counters);
            }
        }
        let mut over = Vec::new();
        let mut state = self.shared.lock();
        let mut next = now.plus(LONG);
        let mut cancels = Vec::new();
        for (number, open) in &mut state.open {
            let Some(wanted) = &open.wanted else { continue };
            if wanted.sink.is_cancelled() || now >= wanted.deadline {
                if open.is_told {
                    cancels.extend(bare(Kind::Cancel, *number));
                }
                over.extend(open.wanted.take());
            } else {
                next = next.min(wanted.deadline);
            }
        }
        state.open.retain(|_, open| open.is_told || open.wanted.is_some());
        if let Some(wanted) = link.arrival.as_ref().and_then(|arrival| arrival.wanted.as_ref()) {
            next = next.min(wanted.deadline);
        }
        let owes = !state.open.is_empty() || link.arrival.is_some() || link.incoming.has_begun();
        if owes {
            let since = link.heard.max(state.asked_at);
            if now >= since.plus(SILENCE) {
                return Err(Broken::Silent);
            }
            if now >= since.plus(SILENCE / 2) && !link.pinged {
                cancels.extend(bare(Kind::Ping, 0));
                link.pinged = true;
            }
            next = next.min(since.plus(if link.pinged { SILENCE } else { SILENCE / 2 }));
        }
        state.looks_at = next;
        if !cancels.is_empty() {
            state.say(&cancels);
        }
        drop(state);
        for wanted in over {
            let reason = (!wanted.sink.is_cancelled()).then_some(&Reason::DeadlinePassed);
            end_early(wanted, reason, &self.shared.counters);
        }
        Ok(())
    }

    /// Takes something that has come; false if there is nothing now.
    fn take(&mut self, link: &mut Link) -> Result<bool, Broken> {
        let counters = &self.shared.counters;
        if let Some(arrival) = &mut link.arrival {
            if !arrival.is_whole() {
                let left = arrival.left();
                if !arrival.receive(&*link.wire, &mut self.scratch, counters)? {
                    return Ok(false);
                }
                let came = left.saturating_sub(arrival.left());
                self.shared.lock().came(came, self.now());
            }
            if arrival.is_whole()
                && let Some(arrival) = link.arrival.take()
                && let Some(damaged) = arrival.finish(counters)
            {
                self.doubt(damaged);
            }
            return Ok(true);
        }
        let limit = |head: &Head| match head.kind {
            Kind::Answer => self.shared.lock().open.contains_key(&head.number).then_some(ANSWER_BYTES_MAX),
            Kind::Pong => Some(0),
            _ => None,
        };
        let Some((head, body)) = link.incoming.next(&*link.wire, limit)? else { return Ok(false) };
        if head.kind == Kind::Answer {
            let open = self.shared.lock().open.remove(&head.number);
            let open = open.ok_or(Broken::Protocol("an answer arrived without a request"))?;
            link.arrival = Some(self.begin(open, body)?);
        }
        Ok(true)
    }

    fn begin(&self, open: Open, body: Bytes) -> Result<Arrival, Broken> {
        let Open { outline, bytes, mut wanted, .. } = open;
        let arrival = message(body).and_then(|answer| Arrival::new(outline, &mut wanted, &answer));
        if let Ok(arrival) = &arrival {
            self.shared.lock().came(bytes.saturating_sub(arrival.left()), self.now());
        }
        if let Some(wanted) = wanted {
            // What was answered is no answer: the connection ends as well.
            end_early(wanted, Some(&AWAY), &self.shared.counters);
        }
        arrival
    }

    /// Tells the peer of blocks that are not what their digests say.
    fn doubt(&self, Doubted { wanted, outline, blocks }: Doubted) {
        let key = |block: &u32| wanted.request.keys.get(*block as usize).copied();
        let keys: Vec<_> = blocks.iter().filter_map(key).collect();
        let origins = vec![None; keys.len()];
        let timeout = STALL.as_micros() as u64;
        let keys = convert::key_bytes(&keys);
        let doubt = wire_read(&wanted, &outline.layers, keys, wire_origins(&origins), timeout);
        self.shared.lock().say(&frame(Kind::Doubt, 0, &doubt));
    }
}
