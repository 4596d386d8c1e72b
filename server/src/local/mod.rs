//! The local path: programs on the same host, whose memory the server's disks write to.
//!
//! A client connects to the server's unix socket, says who it is by the same token as over gRPC, and shares memory
//! with the server in one of three modes. Requests then name places in that memory, and what travels over the socket is
//! a few messages for a whole prefix. `docs/LOCAL.md` describes what travels.
//!
//! What a client does to its memory or its socket harms nobody else:
//! - only files in memory that cannot be shortened are mapped, so no touch of them can kill the server;
//! - what is found in a client's memory proves nothing about a disk: a digest that does not match there is looked up
//!   again in memory of the server's own before a block is called damaged;
//! - a put is copied out of the client's memory first, and stored only if the copy has the digest that came with it;
//! - everything that a client holds belongs to its session and goes with it: requests, memories, leases, frames. A
//!   piece of memory that a device still writes to stays mapped until the device is done.
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod frame;
pub mod limits;
mod listen;
mod memory;
mod outbox;
mod pinned;
mod places;
mod put;
mod read;
mod session;
pub(crate) mod socket;
mod threads;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use listen::split;
pub(crate) use read::parts;

use crate::proto;

/// How bytes get into a client's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mode {
    /// Into its own pool, verified by the server.
    Direct,
    /// Into memory that it had already, verified by the client.
    Adopted,
    /// Into a window from which the client copies.
    Copied,
}

impl Mode {
    /// Its name, in metrics and statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Adopted => "adopted",
            Self::Copied => "copied",
        }
    }

    pub(crate) fn from_wire(mode: i32) -> Option<Self> {
        match proto::LocalMode::try_from(mode) {
            Ok(proto::LocalMode::LocalDirect) => Some(Self::Direct),
            Ok(proto::LocalMode::LocalAdopted) => Some(Self::Adopted),
            Ok(proto::LocalMode::LocalCopied) => Some(Self::Copied),
            _ => None,
        }
    }

    pub(crate) fn to_wire(self) -> i32 {
        match self {
            Self::Direct => proto::LocalMode::LocalDirect.into(),
            Self::Adopted => proto::LocalMode::LocalAdopted.into(),
            Self::Copied => proto::LocalMode::LocalCopied.into(),
        }
    }
}

/// The process at the other end of a connection, as the kernel says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peer {
    /// Its number.
    pub pid: u32,
    /// Whose it is.
    pub uid: u32,
}

/// A client as statistics show it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientFacts {
    /// Whose token it has.
    pub tenant: String,
    /// Which process it is.
    pub peer: Peer,
    /// The modes of what it shares.
    pub modes: BTreeSet<Mode>,
    /// Bytes that it shares.
    pub shared_bytes: u64,
    /// Requests under way.
    pub under_way: u32,
    /// Leases that end with it.
    pub leases: u32,
}

/// The clients of the local path, and the memory that all of them share with the server.
#[derive(Debug, Default)]
pub struct Locals {
    clients: Mutex<BTreeMap<u64, ClientFacts>>,
    next: AtomicU64,
    /// Bytes of clients' memory that are mapped.
    mapped: AtomicU64,
    /// The most that may be.
    mapped_max: u64,
    /// Bytes of it that are registered with the engine's rings, or about to be.
    pinned: AtomicU64,
    /// Bytes of requests that are being received, in all sessions.
    receiving: AtomicU64,
    /// Threads that work for sessions.
    threads: usize,
}

impl Locals {
    /// Nobody yet; at most this much of clients' memory at a time, and so many threads for them.
    pub fn new(mapped_max: u64, threads: usize) -> Self {
        Self { mapped_max, threads, ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, ClientFacts>> {
        // Each change is one step.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everybody who is here.
    pub fn clients(&self) -> Vec<ClientFacts> {
        self.lock().values().cloned().collect()
    }

    /// Bytes of clients' memory that are mapped now.
    pub fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::SeqCst)
    }

    /// Takes `bytes` of what may be mapped, until the answer is dropped.
    fn map(self: &Arc<Self>, bytes: u64) -> Option<Mapped> {
        let fits = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= self.mapped_max);
        let taken = self.mapped.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits);
        taken.is_ok().then(|| Mapped { all: Arc::clone(self), bytes })
    }

    /// Bytes of it that are registered with the engine's rings, as far as those took them, or about to be.
    pub fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::SeqCst)
    }

    /// Takes `bytes` of what may be registered, until the answer is dropped.
    fn pin(self: &Arc<Self>, bytes: u64) -> Option<PinnedBytes> {
        let fits = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= limits::PINNED_BYTES_MAX);
        let taken = self.pinned.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits);
        taken.is_ok().then(|| PinnedBytes { all: Arc::clone(self), bytes })
    }

    /// Takes `bytes` of what may be received at a time, until the answer is dropped.
    fn receive(self: &Arc<Self>, bytes: u64) -> Option<Receiving> {
        let fits = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= limits::RECEIVING_BYTES_MAX);
        let taken = self.receiving.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits);
        taken.is_ok().then(|| Receiving { all: Arc::clone(self), bytes })
    }
}

/// A part of what may be mapped.
#[derive(Debug)]
struct Mapped {
    all: Arc<Locals>,
    bytes: u64,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.all.mapped.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// A part of what may be registered.
#[derive(Debug)]
struct PinnedBytes {
    all: Arc<Locals>,
    bytes: u64,
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        self.all.pinned.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// A part of what may be received.
#[derive(Debug)]
struct Receiving {
    all: Arc<Locals>,
    bytes: u64,
}

impl Drop for Receiving {
    fn drop(&mut self) {
        self.all.receiving.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// A client's entry among all of them, for as long as it lives.
#[derive(Debug)]
struct Entry {
    all: Arc<Locals>,
    number: u64,
}

impl Entry {
    fn new(all: &Arc<Locals>, facts: ClientFacts) -> Self {
        let number = all.next.fetch_add(1, Ordering::Relaxed);
        all.lock().insert(number, facts);
        Self { all: Arc::clone(all), number }
    }

    fn change(&self, change: impl FnOnce(&mut ClientFacts)) {
        if let Some(facts) = self.all.lock().get_mut(&self.number) {
            change(facts);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.all.lock().remove(&self.number);
    }
}
