//! A connection as the server and its calls know it: whether its client has shown a token, which calls and answers are
//! under way on it, and by when it is closed because nothing happens.
//!
//! Before its first call with a token a connection is a stranger: its bytes and its time are limited, and it is the first
//! to lose its place when all are taken, so that clients with a token find one. With that call it becomes its tenant's, and
//! counts in what the tenant may have of connections; some places are never given to those, so that there is room for
//! strangers to become known. Who has nothing to do with a token takes no place from one who has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Waker;

use futures_util::task::AtomicWaker;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::StallTimeout;
use super::parts::{Part, Parts};
use kvarts_wire::{busy, limits};

/// How often a place is looked for that another may take meanwhile.
const PART_TRIES: usize = 8;

/// Connections of strangers: first those whose tenant may not have them, then by their numbers, which grow: the first came
/// first.
type Numbered = BTreeMap<(bool, u64), Weak<ConnectionState>>;

/// Places for connections, and who has them.
#[derive(Debug)]
pub struct Places {
    all: usize,
    free: Arc<Semaphore>,
    /// Beside these: for administrators on the local socket, when all others are taken.
    kept: Arc<Semaphore>,
    /// Those whose client has shown no token yet, and the same of the places that are kept.
    strangers: Mutex<Numbered>,
    kept_strangers: Mutex<Numbered>,
    /// Those of each tenant.
    known: Mutex<BTreeMap<u32, Known>>,
    /// Those of administrators in places that are kept.
    administrators: Mutex<Known>,
    /// How many each tenant may have.
    parts: Parts,
    /// Connections of each tenant that have calls under way, and the tenants that have such.
    busy: Mutex<BTreeMap<u32, Arc<AtomicUsize>>>,
    busy_tenants: AtomicUsize,
    next: AtomicU64,
    /// Calls that need no token, under way on all connections.
    calls: AtomicUsize,
    /// Bytes that strangers have sent who are strangers still.
    heard: AtomicUsize,
}

/// Connections of one tenant.
#[derive(Default, Debug)]
struct Known {
    connections: BTreeMap<u64, (Instant, Weak<ConnectionState>)>,
    /// The same by how long they rest, as far as it was looked: it is put right when one is wanted.
    order: BTreeSet<(Instant, u64)>,
}

/// A place for a connection.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    permit: OwnedSemaphorePermit,
    is_kept: bool,
}

/// A connection.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionHandle(Arc<ConnectionState>);

#[derive(Debug)]
struct ConnectionState {
    number: u64,
    places: Arc<Places>,
    /// Whether its place is one of those that are kept for administrators.
    is_kept: bool,
    place: Mutex<Option<OwnedSemaphorePermit>>,
    /// What it takes of its tenant's connections; none of a stranger.
    part: Mutex<Option<(u32, Part)>>,
    /// The tenant's connections that have calls under way, of one that is known.
    busy: OnceLock<Arc<AtomicUsize>>,
    is_known: AtomicBool,
    is_cut: AtomicBool,
    /// The task that reads from the connection.
    reader: AtomicWaker,
    /// Calls under way that need no token.
    open_calls: AtomicUsize,
    /// Bytes that it sent as a stranger.
    heard: AtomicUsize,
    work: Mutex<Work>,
}

/// What is under way on a connection.
#[derive(Debug)]
struct Work {
    /// When the connection came in.
    since: Instant,
    calls: usize,
    /// When the last call ended.
    rested: Instant,
    /// Answers that the transport has, by when it got them. Numbers grow, so the first is the oldest.
    answers: BTreeMap<u64, Instant>,
    next: u64,
}

/// A call under way on a connection, for as long as it lives.
#[derive(Debug)]
pub(crate) struct ConnectionCall(ConnectionHandle);

/// An answer that the transport has, for as long as it lives.
#[derive(Debug)]
pub(crate) struct Answered {
    connection: ConnectionHandle,
    number: u64,
}

/// A call that needs no token, for as long as it lives.
#[derive(Debug)]
pub(crate) struct OpenCall(ConnectionHandle);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cuts off the oldest stranger and returns its place; none if no stranger has had long enough to show a token.
fn displace(strangers: &Mutex<Numbered>, now: Instant) -> Option<OwnedSemaphorePermit> {
    loop {
        let (key, connection) = lock(strangers).pop_first()?;
        let Some(connection) = connection.upgrade().map(ConnectionHandle) else { continue };
        if now.saturating_duration_since(lock(&connection.0.work).since) < limits::STRANGERS_GRACE {
            lock(strangers).insert(key, Arc::downgrade(&connection.0));
            return None;
        }
        let place = lock(&connection.0.place).take();
        connection.cut();
        if place.is_some() {
            return place;
        }
    }
}

impl Known {
    fn add(&mut self, connection: &ConnectionHandle, now: Instant) {
        let number = connection.0.number;
        self.connections.insert(number, (now, Arc::downgrade(&connection.0)));
        self.order.insert((now, number));
    }

    fn remove(&mut self, number: u64) {
        if let Some((seen, _)) = self.connections.remove(&number) {
            self.order.remove(&(seen, number));
        }
    }
}

impl Known {
    /// Takes the connection out that has rested for longest; none if each has a call under way. What is looked at is to be let
    /// go of without the lock: the last to let go of a connection takes it itself.
    fn longest_idle(
        &mut self,
        now: Instant,
        looked_at: &mut Vec<ConnectionHandle>,
    ) -> Option<ConnectionHandle> {
        for _ in 0..2 * self.order.len() {
            let &(seen, number) = self.order.first()?;
            let connection = self.connections.get(&number).and_then(|(_, connection)| connection.upgrade());
            self.remove(number);
            let Some(connection) = connection.map(ConnectionHandle) else { continue };
            looked_at.push(connection.clone());
            let rested = connection.idle_since().unwrap_or(now);
            if rested <= seen && rested < now {
                return Some(connection);
            }
            self.add(&connection, rested);
            if seen >= now {
                return None;
            }
        }
        None
    }
}

impl Places {
    /// `all` places, of which these tenants have parts.
    pub fn new(all: usize, tenants: &[u32]) -> Self {
        let all = all.min(Semaphore::MAX_PERMITS);
        let known = all - all.div_ceil(limits::STRANGERS_PART);
        Self {
            all,
            free: Arc::new(Semaphore::new(all)),
            kept: Arc::new(Semaphore::new(limits::ADMINISTRATORS_PLACES)),
            strangers: Mutex::default(),
            kept_strangers: Mutex::default(),
            known: Mutex::default(),
            administrators: Mutex::default(),
            parts: Parts::new(known as u64, tenants, 0, 0),
            busy: Mutex::default(),
            busy_tenants: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            calls: AtomicUsize::new(0),
            heard: AtomicUsize::new(0),
        }
    }

    /// Divides them among these tenants.
    pub fn divide(&self, tenants: &[u32]) {
        self.parts.divide(tenants);
        // Connections that are there have what counts theirs.
        lock(&self.busy).retain(|tenant, _| tenants.contains(tenant));
    }

    /// All places, but those that are kept for administrators.
    pub fn all(&self) -> usize {
        self.all
    }

    /// Those of them that are free.
    pub fn free(&self) -> usize {
        self.free.available_permits()
    }

    /// Connections of strangers, and calls without a token that are under way on all connections.
    pub fn strangers(&self) -> (usize, usize) {
        let strangers = lock(&self.strangers).len() + lock(&self.kept_strangers).len();
        (strangers, self.calls.load(Ordering::Relaxed))
    }

    /// A place for a connection that comes in: a free one, else that of the oldest stranger. On the local socket, where
    /// administrators come in, one of those that are kept for them, else that of a stranger there, else that of the one that
    /// has rested for longest.
    pub(crate) fn take(&self, now: Instant, is_local: bool) -> Option<ConnectionPlace> {
        let free = Arc::clone(&self.free).try_acquire_owned().ok();
        if let Some(permit) = free.or_else(|| displace(&self.strangers, now)) {
            return Some(ConnectionPlace { permit, is_kept: false });
        }
        let kept = || Arc::clone(&self.kept).try_acquire_owned().ok();
        let rests = || {
            let mut looked_at = Vec::new();
            let connection = lock(&self.administrators).longest_idle(now, &mut looked_at)?;
            connection.cut();
            lock(&connection.0.place).take()
        };
        let permit =
            is_local.then(|| kept().or_else(|| displace(&self.kept_strangers, now)).or_else(rests))??;
        Some(ConnectionPlace { permit, is_kept: true })
    }

    /// What one connection more takes of a tenant's. Where there is none left, the tenant that is furthest above what is set
    /// aside for it loses the connection that has rested for longest; where that is this one, it is one of its own.
    fn part(&self, tenant: u32, now: Instant) -> Option<Part> {
        for _ in 0..PART_TRIES {
            if let Some(part) = self.parts.try_take(tenant, 1) {
                return Some(part);
            }
            let beyond = self.parts.beyond();
            let own = beyond.get(&tenant).copied().unwrap_or_default();
            let furthest = beyond.into_iter().max_by_key(|(_, beyond)| *beyond);
            let furthest = furthest.filter(|(_, beyond)| *beyond > own).map(|(other, _)| other);
            let rests = |tenant: u32| {
                let mut looked_at = Vec::new();
                let mut all = lock(&self.known);
                let found = all.get_mut(&tenant).and_then(|known| known.longest_idle(now, &mut looked_at));
                drop(all);
                found
            };
            let connection = furthest.and_then(rests).or_else(|| rests(tenant))?;
            connection.cut();
            drop(lock(&connection.0.part).take());
        }
        None
    }
}

impl ConnectionHandle {
    /// A connection that came in now.
    pub(crate) fn new(places: &Arc<Places>, place: Option<ConnectionPlace>) -> Self {
        let (now, number) = (Instant::now(), places.next.fetch_add(1, Ordering::Relaxed));
        let is_kept = place.as_ref().is_some_and(|place| place.is_kept);
        let connection = Arc::new(ConnectionState {
            number,
            places: Arc::clone(places),
            is_kept,
            place: Mutex::new(place.map(|place| place.permit)),
            part: Mutex::default(),
            busy: OnceLock::new(),
            is_known: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            open_calls: AtomicUsize::new(0),
            heard: AtomicUsize::new(0),
            work: Mutex::new(Work { since: now, calls: 0, rested: now, answers: BTreeMap::new(), next: 0 }),
        });
        lock(connection.strangers()).insert((true, number), Arc::downgrade(&connection));
        Self(connection)
    }

    /// A call of a tenant was admitted: the client is a stranger no longer, if its tenant may have the connection. Else it
    /// says why not, and the connection is the first to make room.
    pub(crate) fn begin(&self, tenant: u32, is_administrator: bool) -> Result<ConnectionCall, &'static str> {
        let now = Instant::now();
        let first = {
            let mut work = lock(&self.0.work);
            work.calls += 1;
            work.calls == 1
        };
        let call = ConnectionCall(self.clone());
        if self.is_known() {
            if first {
                self.0.is_busy(true);
            }
            return Ok(call);
        }
        let mut charged = lock(&self.0.part);
        // Another call on it may have been the first.
        if self.is_known() {
            return Ok(call);
        }
        if self.0.is_kept && !is_administrator {
            self.refuse(now);
            return Err(busy::KEPT_CONNECTIONS);
        }
        if self.0.is_kept {
            lock(&self.0.places.administrators).add(self, now);
        } else {
            let Some(part) = self.0.places.part(tenant, now) else {
                self.refuse(now);
                return Err(busy::CONNECTIONS);
            };
            *charged = Some((tenant, part));
            lock(&self.0.places.known).entry(tenant).or_default().add(self, now);
        }
        let busy = Arc::clone(lock(&self.0.places.busy).entry(tenant).or_default());
        let _ = self.0.busy.set(busy);
        self.0.is_known.store(true, Ordering::Relaxed);
        self.0.forget_heard();
        // Calls that wait for this lock are counted, and as one with this.
        self.0.is_busy(true);
        self.0.forget_stranger();
        Ok(call)
    }

    /// It is the first to make room from now on, at once.
    fn refuse(&self, now: Instant) {
        lock(&self.0.work).since = now.checked_sub(limits::STRANGERS_GRACE).unwrap_or(now);
        self.0.forget_stranger();
        lock(self.0.strangers()).insert((false, self.0.number), Arc::downgrade(&self.0));
    }

    /// What of a thread's turn the connection has: where several tenants have calls under way, all connections of each of them
    /// have one together.
    pub(crate) fn part_of(&self, turn: usize) -> usize {
        match self.0.busy.get() {
            Some(busy) if self.0.places.busy_tenants.load(Ordering::Relaxed) > 1 => {
                (turn / busy.load(Ordering::Relaxed).max(1)).max(limits::LEAST_TURN_BYTES)
            }
            _ => turn,
        }
    }

    /// Since when nothing is under way on it; none while something is.
    fn idle_since(&self) -> Option<Instant> {
        let work = lock(&self.0.work);
        (work.calls == 0 && self.0.open_calls.load(Ordering::Relaxed) == 0).then_some(work.rested)
    }

    /// The transport gets an answer.
    pub(crate) fn answer(&self) -> Answered {
        let mut work = lock(&self.0.work);
        let number = work.next;
        work.next += 1;
        work.answers.insert(number, Instant::now());
        Answered { connection: self.clone(), number }
    }

    /// A call without a token begins, if the connection may have one more of them.
    pub(crate) fn open_call(&self) -> Option<OpenCall> {
        self.0.places.calls.fetch_add(1, Ordering::Relaxed);
        let before = self.0.open_calls.fetch_add(1, Ordering::Relaxed);
        let call = OpenCall(self.clone());
        (before < limits::OPEN_CALLS_MAX).then_some(call)
    }

    /// Ends the connection, with all of its streams and what is kept for them.
    pub(crate) fn cut(&self) {
        self.0.is_cut.store(true, Ordering::SeqCst);
        self.0.reader.wake();
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::SeqCst)
    }

    pub(crate) fn is_known(&self) -> bool {
        self.0.is_known.load(Ordering::Relaxed)
    }

    /// Registers the task that reads from the connection, to be woken when it is cut off.
    pub(crate) fn register(&self, waker: &Waker) {
        self.0.reader.register(waker);
    }

    /// It sent this many bytes more, as a stranger; says whether it may go on. Until what was sent makes a call it may all be kept in memory.
    pub(crate) fn hears(&self, bytes: usize) -> bool {
        let own = self.0.heard.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let all = self.0.places.heard.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        own <= if all > limits::STRANGERS_SUM_BYTES {
            limits::STRANGERS_FEW_BYTES
        } else {
            limits::STRANGERS_BYTES_MAX
        }
    }

    /// When the connection is closed unless something happens; none while something is under way. `begun` tells whether its
    /// first bytes have come.
    pub(crate) fn until(&self, stall_timeout: &StallTimeout, begun: bool) -> Option<Instant> {
        if !self.is_known() {
            let stall_timeout = if begun { stall_timeout.first_request() } else { stall_timeout.get() };
            return Some(lock(&self.0.work).since + stall_timeout);
        }
        let work = lock(&self.0.work);
        let taken = |at: &Instant| *at + 2 * stall_timeout.get();
        let idle = work.calls == 0 && self.0.open_calls.load(Ordering::Relaxed) == 0;
        let idle = idle.then(|| work.rested + stall_timeout.idle());
        let answers = work.answers.first_key_value().map(|(_, at)| taken(at));
        answers.into_iter().chain(idle).min()
    }

    /// As if all of it had been that much earlier.
    #[cfg(test)]
    pub(crate) fn age(&self, by: std::time::Duration) {
        let mut work = lock(&self.0.work);
        work.since -= by;
        work.rested -= by;
        work.answers.values_mut().for_each(|at| *at -= by);
    }
}

impl ConnectionState {
    /// What it sent counts no longer among strangers' bytes.
    fn forget_heard(&self) {
        self.places.heard.fetch_sub(self.heard.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    fn strangers(&self) -> &Mutex<Numbered> {
        if self.is_kept { &self.places.kept_strangers } else { &self.places.strangers }
    }

    /// A known connection has its first call under way, or none any more.
    fn is_busy(&self, is_busy: bool) {
        let Some(busy) = self.busy.get() else { return };
        let tenants = &self.places.busy_tenants;
        if is_busy {
            if busy.fetch_add(1, Ordering::Relaxed) == 0 {
                tenants.fetch_add(1, Ordering::Relaxed);
            }
        } else if busy.fetch_sub(1, Ordering::Relaxed) == 1 {
            tenants.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn forget_stranger(&self) {
        let mut strangers = lock(self.strangers());
        for is_welcome in [true, false] {
            strangers.remove(&(is_welcome, self.number));
        }
    }
}

impl Drop for ConnectionState {
    fn drop(&mut self) {
        self.forget_stranger();
        self.forget_heard();
        if !*self.is_known.get_mut() {
            return;
        }
        if self.is_kept {
            lock(&self.places.administrators).remove(self.number);
            return;
        }
        let part = self.part.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // Without one it was taken out when it was cut.
        let Some((tenant, _part)) = part else { return };
        let mut all = lock(&self.places.known);
        if let Some(known) = all.get_mut(&tenant) {
            known.remove(self.number);
            if known.connections.is_empty() {
                all.remove(&tenant);
            }
        }
    }
}

impl Drop for ConnectionCall {
    fn drop(&mut self) {
        let mut work = lock(&self.0.0.work);
        work.calls -= 1;
        work.rested = Instant::now();
        let rests = work.calls == 0;
        drop(work);
        if rests {
            self.0.0.is_busy(false);
        }
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        lock(&self.connection.0.work).answers.remove(&self.number);
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.0.open_calls.fetch_sub(1, Ordering::Relaxed);
        self.0.0.places.calls.fetch_sub(1, Ordering::Relaxed);
    }
}
