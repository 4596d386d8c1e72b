//! The side that serves: it takes connections, and has two threads for each.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kvarts_contract::buffers::{Arena, Region};
use kvarts_layout::StoreId;

use super::bell::Bell;
use super::hello::Member;
use super::limits::{ACCEPT_PAUSE, PIECE_BYTES_MAX};
use super::rate::Rate;
use super::serving::{Counters, Place, ServeLimits, Served, Serving};
use super::session;
use super::wire::{Join, Plain, Wire};

/// What was served so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServeCounts {
    /// Connections now.
    pub connections: u64,
    /// Connections that were let in so far.
    pub let_in: u64,
    /// Connections that were refused, or cut because the other side broke the protocol or was too slow.
    pub cut: u64,
    /// Pieces that were answered.
    pub pieces: u64,
    /// Bytes of blocks that were sent.
    pub bytes: u64,
    /// Blocks that were read again because they did not match at a receiver.
    pub doubts: u64,
    /// Bytes of memory that pieces have now.
    pub memory: u64,
}

/// Serves until it is stopped or dropped.
pub struct LaneServer {
    serving: Arc<Serving>,
    /// Where callers are taken, if this side takes them itself, and the thread that does.
    accepting: Option<(Arc<TcpListener>, Join)>,
    address: SocketAddr,
}

impl LaneServer {
    /// Begins to serve those who call at `listener`.
    pub fn start(
        served: Arc<dyn Served>,
        listener: TcpListener,
        member: Member,
        limits: ServeLimits,
    ) -> std::io::Result<Self> {
        let mut server = Self::called(served, listener.local_addr()?, member, limits)?;
        let listener = Arc::new(listener);
        let (serving, at) = (Arc::clone(&server.serving), Arc::clone(&listener));
        let host = Arc::clone(&serving.member.host);
        let accepting = host.thread("kvarts-lane", Box::new(move || accept(&serving, &at)))?;
        server.accepting = Some((listener, accepting));
        Ok(server)
    }

    /// The same, for callers that others bring ([`LaneServer::take`]): they call at this address.
    pub fn called(
        served: Arc<dyn Served>,
        address: SocketAddr,
        member: Member,
        limits: ServeLimits,
    ) -> std::io::Result<Self> {
        let memory = limits.memory.max(PIECE_BYTES_MAX as usize);
        let limits =
            ServeLimits { connection_memory: limits.connection_memory.max(PIECE_BYTES_MAX), ..limits };
        let (region, _) = Region::anonymous_huge(memory)?;
        let serving = Arc::new(Serving {
            served,
            member,
            limits,
            arena: Arena::new(region),
            rate: Rate::new(limits.bytes_per_second),
            counters: Counters::default(),
            registry: Mutex::default(),
            changed: Bell::new()?,
        });
        Ok(Self { serving, accepting: None, address })
    }

    /// Serves one more connection, if there is a place for it.
    pub fn take(&self, wire: Arc<dyn Wire>) {
        begin(&self.serving, wire);
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The memory that pieces have: for registering it with the engine, whose reads cost less then.
    pub fn memory(&self) -> &Arc<Region> {
        self.serving.arena.region()
    }

    /// From now on at most `bytes_per_second` are served.
    pub fn limit(&self, bytes_per_second: Option<u64>) {
        self.serving.rate.set(bytes_per_second);
    }

    /// From now on these nodes are served and no others: connections of others are cut.
    pub fn serve_only(&self, members: BTreeSet<StoreId>) {
        self.serving.serve_only(members);
    }

    /// What was served so far.
    pub fn counts(&self) -> ServeCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.serving.counters;
        ServeCounts {
            connections: self.serving.lock().wires.len() as u64,
            let_in: of(&counters.let_in),
            cut: of(&counters.cut),
            pieces: of(&counters.pieces),
            bytes: of(&counters.bytes),
            doubts: of(&counters.doubts),
            memory: self.serving.arena.usage().used as u64,
        }
    }

    /// Ends every connection, and returns when no thread serves any more.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Serving { changed, member, .. } = &*self.serving;
        self.serving.lock().stopping = true;
        if let Some((listener, accepting)) = self.accepting.take() {
            changed.ring();
            // The thread that waits for a connection is woken: on Linux this ends the waiting.
            let _ = rustix::net::shutdown(&*listener, rustix::net::Shutdown::Both);
            // It ends as soon as it looks.
            accepting();
        }
        loop {
            changed.answer();
            let wires: Vec<_> = self.serving.lock().wires.values().cloned().collect();
            if wires.is_empty() {
                return;
            }
            wires.iter().for_each(|wire| wire.close());
            member.host.sleep(Some(changed), None, None);
        }
    }
}

impl Drop for LaneServer {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for LaneServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LaneServer({}, {:?})", self.address, self.counts())
    }
}

/// Takes connections until it is time to stop.
fn accept(serving: &Arc<Serving>, listener: &TcpListener) {
    while !serving.is_stopping() {
        // ends: `end` closes the listener
        match listener.accept() {
            Ok((stream, _)) => begin(serving, Arc::new(Plain::new(stream))),
            Err(error) if serving.is_stopping() => tracing::debug!(%error, "the limit of peer connections \
                is reached"),
            Err(error) => {
                tracing::warn!(%error, "a connection of a peer could not be accepted");
                serving.changed.answer();
                if !serving.is_stopping() {
                    serving.member.host.sleep(Some(&serving.changed), None, Some(ACCEPT_PAUSE));
                }
            }
        }
    }
}

/// Gives a connection a place, and its thread.
fn begin(serving: &Arc<Serving>, plain: Arc<dyn Wire>) {
    let Ok(wire) = serving.member.accept(plain) else {
        serving.counters.cut.fetch_add(1, Ordering::Relaxed);
        return;
    };
    let (place, lost) = {
        let mut registry = serving.lock();
        if registry.stopping {
            serving.counters.cut.fetch_add(1, Ordering::Relaxed);
            wire.close();
            return;
        }
        let (number, lost) = registry.enter(&wire);
        (Place { serving: Arc::clone(serving), wire, number }, lost)
    };
    // Its thread ends by itself.
    lost.into_iter().for_each(|wire| wire.close());
    let thread = serving.member.host.thread("kvarts-lane-in", Box::new(move || session::run(place)));
    if let Err(error) = thread {
        tracing::warn!(%error, "the thread for the connection of a peer could not be started");
    }
}
