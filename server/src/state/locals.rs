//! The clients of the local path, and what all of them share: each tenant has a part of it.

pub(crate) mod kept;
pub(crate) mod named;
pub(crate) mod pools;
mod reaper;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::parts::Parts;
use kvarts_wire::local::{Mode, limits};

pub use kept::Group;
use kept::Kept;
use named::Names;
use pools::Pools;
use reaper::Reaper;

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

/// A client that is here.
#[derive(Debug)]
struct Present {
    facts: ClientFacts,
    /// Its short reads under way, which others count.
    short: Arc<AtomicU32>,
    end: End,
}

/// Ends the session of a client of this tenant.
pub(crate) struct End {
    tenant: u32,
    end: Box<dyn Fn() + Send + Sync>,
}

impl End {
    pub(crate) fn new(tenant: u32, end: impl Fn() + Send + Sync + 'static) -> Self {
        Self { tenant, end: Box::new(end) }
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "End({})", self.tenant)
    }
}

/// The clients of the local path, and what all of them share.
#[derive(Debug)]
pub struct Locals {
    clients: Mutex<BTreeMap<u64, Present>>,
    next: AtomicU64,
    /// Sessions.
    pub(crate) sessions: Parts,
    /// Bytes of clients' memory that are mapped.
    pub(crate) mapped: Parts,
    /// Descriptors of that memory.
    pub(crate) files: Parts,
    /// Bytes of it that are registered with the engine's rings, or about to be.
    pub(crate) pinned: Parts,
    /// Bytes of requests that are being received.
    pub(crate) receiving: Parts,
    /// Turns to receive a whole body beside that: one for each tenant.
    pub(crate) whole: Parts,
    /// Bytes of answers that are not taken.
    pub(crate) untaken: Parts,
    /// Bytes of clients' memory that may be mapped at a time.
    mapped_max: u64,
    /// Bytes of memory that the server made for clients, ever, and the most. A client may keep it for as long as it likes.
    made: AtomicU64,
    made_max: u64,
    /// What clients keep of files that they shared, and this process is charged for.
    pub(crate) kept: Arc<Kept>,
    /// One memory at a time is prepared and registered.
    pub(crate) turn: tokio::sync::Mutex<()>,
    /// Sessions by the names that their clients gave them.
    pub(crate) names: Arc<Names>,
    /// Memory that several sessions share.
    pub(crate) pools: Pools,
    /// This server among all that ever ran.
    pub(crate) instance: [u8; 16],
    pub(crate) reaper: Reaper,
    /// Threads that work for sessions.
    pub(crate) threads: usize,
}

impl Default for Locals {
    fn default() -> Self {
        let limits = LocalLimits { mapped_max: 0, files_max: limits::MEMORY_FILES_MAX, threads: 1 };
        Self::new(limits, &[], [0; 16])
    }
}

/// What the clients on this host may use together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalLimits {
    /// Bytes of their memory that are mapped.
    pub mapped_max: u64,
    /// Open files of that memory.
    pub files_max: u64,
    /// Threads that serve them.
    pub threads: usize,
}

impl Locals {
    /// No client yet; `tenants` are those that clients may belong to.
    pub fn new(limits: LocalLimits, tenants: &[u32], instance: [u8; 16]) -> Self {
        let LocalLimits { mapped_max, files_max, threads } = limits;
        let large = 2 * tenants.len().max(1) as u64 * limits::BODY_BYTES_MAX as u64;
        // No session waits here: one that finds too little is refused.
        let shared = |all: u64| Parts::new(all, tenants, 0, 0);
        Self {
            clients: Mutex::default(),
            next: AtomicU64::new(0),
            sessions: shared(limits::SESSIONS_MAX as u64),
            mapped: shared(mapped_max),
            files: shared(files_max),
            pinned: shared(limits::PINNED_BYTES_MAX),
            // Enough that each tenant can have one request of any length received at any time.
            receiving: shared(limits::RECEIVING_BYTES_MAX.max(large)),
            whole: Parts::new(0, tenants, 1, 0),
            untaken: shared(limits::UNTAKEN_BYTES_MAX),
            made: AtomicU64::new(0),
            mapped_max,
            made_max: mapped_max / limits::MADE_PART,
            kept: Arc::default(),
            turn: tokio::sync::Mutex::default(),
            names: Arc::default(),
            pools: Pools::default(),
            instance,
            reaper: Reaper::default(),
            threads,
        }
    }

    /// The same, charged in a control group for what is mapped and for what was made for clients.
    pub fn in_group(self, group: Option<Group>) -> Self {
        let kept = Kept::new(group, self.mapped_max.saturating_add(self.made_max));
        Self { kept, ..self }
    }

    /// Divides what sessions share among these tenants.
    pub fn divide(&self, tenants: &[u32]) {
        let Self { sessions, mapped, files, pinned, receiving, whole, untaken, .. } = self;
        for parts in [sessions, mapped, files, pinned, receiving, whole, untaken] {
            parts.divide(tenants);
        }
    }

    /// Ends the sessions of tenants that are gone.
    pub fn end(&self, tenants: &[u32]) {
        for client in self.lock().values().filter(|client| tenants.contains(&client.end.tenant)) {
            (client.end.end)();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Present>> {
        // Each change is one step.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All clients that are here.
    pub fn clients(&self) -> Vec<ClientFacts> {
        let client = |Present { facts, short, .. }: &Present| {
            let under_way = facts.under_way.saturating_add(short.load(Ordering::Relaxed));
            ClientFacts { under_way, ..facts.clone() }
        };
        self.lock().values().map(client).collect()
    }

    /// Bytes of clients' memory that are mapped now.
    pub fn mapped(&self) -> u64 {
        self.mapped.used()
    }

    /// The most of them.
    pub fn mapped_max(&self) -> u64 {
        self.mapped_max
    }

    /// Bytes of it that are registered with the engine's rings, as far as those took them, or about to be.
    pub fn pinned(&self) -> u64 {
        self.pinned.used()
    }

    /// Counts memory that the server is about to make; false if there is no more for that. It is never given back: the client
    /// has the descriptor, and it cannot be seen when it lets go of it.
    pub(crate) fn make(&self, bytes: u64) -> bool {
        let fits = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= self.made_max);
        self.made.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits).is_ok()
    }
}

/// A client's entry among all of them, for as long as it lives.
#[derive(Debug)]
pub(crate) struct Entry {
    all: Arc<Locals>,
    number: u64,
}

impl Entry {
    pub(crate) fn new(all: &Arc<Locals>, facts: ClientFacts, short: &Arc<AtomicU32>, end: End) -> Self {
        let number = all.next.fetch_add(1, Ordering::Relaxed);
        all.lock().insert(number, Present { facts, short: Arc::clone(short), end });
        Self { all: Arc::clone(all), number }
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut ClientFacts)) {
        if let Some(client) = self.all.lock().get_mut(&self.number) {
            change(&mut client.facts);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.all.lock().remove(&self.number);
    }
}
