//! What passes between nodes: how long it takes, and what does not arrive.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvarts_contract::clock::{Clock, Nanos};
use kvarts_peer::node::ClusterNode;
use kvarts_peer::read::Runner;
use tokio::sync::Notify;

use super::tasks::{Owner, Tasks};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed, SimClock};

/// How long a connection lasts over which nothing passes although something should.
const KEPT: Duration = Duration::from_secs(10);
/// Tasks of the network itself.
pub const NETWORK: u64 = 0;

/// From which node to which, by their places.
pub type Way = (usize, usize);

/// One direction between two nodes.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// Nothing passes, and neither node is told.
    pub is_blocked: bool,
    /// How often it was blocked.
    blocks: u64,
    /// How long a message takes, at least and at most.
    pub delay: (Duration, Duration),
    /// Bytes a second of a connection that carries bytes.
    pub rate: u64,
}

/// What becomes of the bytes of the next connection that carries bytes this way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A bit is another one.
    Flip,
    /// Both sides are told that it is broken.
    Reset,
    /// It ends.
    End,
    /// Nothing more arrives.
    Stall,
}

#[derive(Default)]
struct State {
    links: BTreeMap<Way, Link>,
    blocked: BTreeMap<Way, Arc<AtomicBool>>,
    nodes: BTreeMap<usize, Weak<ClusterNode>>,
    /// Places whose nodes stand still.
    stopped: BTreeSet<usize>,
    /// How often the connection for calls was broken.
    broken: BTreeMap<Way, u64>,
    /// Connections that carry bytes, by the way that one of their directions goes: whether they are broken.
    pipes: Vec<(Way, Weak<AtomicBool>)>,
    /// What the next connections for bytes meet, and after how many bytes.
    faults: Vec<(Way, Fault, u64)>,
    /// After how many messages of its feed the connection for calls breaks, counted from now.
    feed_cut: Option<(Way, u64)>,
}

/// The network.
pub struct Net {
    /// Time.
    pub clock: Arc<SimClock>,
    /// Tasks.
    pub tasks: Arc<Tasks>,
    state: Mutex<State>,
    rng: Mutex<Rng>,
    changed: Notify,
    log: Mutex<(Mixer, u64)>,
}

impl Net {
    /// A network without nodes.
    pub fn new(seed: Seed, clock: &Arc<SimClock>, tasks: &Arc<Tasks>) -> Arc<Self> {
        Arc::new(Self {
            clock: Arc::clone(clock),
            tasks: Arc::clone(tasks),
            state: Mutex::default(),
            rng: Mutex::new(seed.child("net").rng()),
            changed: Notify::new(),
            log: Mutex::new((Mixer::new(seed.0), 0)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws from the network's own seed.
    pub fn draw<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        draw(&mut self.rng.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes something that happened.
    pub fn note(&self, what: &str, (from, to): Way, words: &[u64]) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let (mixer, events) = &mut *log;
        *events += 1;
        mixer.text(what);
        [self.clock.now().0, from as u64, to as u64].iter().chain(words).for_each(|word| mixer.word(*word));
    }

    /// A digest of all that happened, and how much it was.
    pub fn log(&self) -> (u128, u64) {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        (log.0.value(), log.1)
    }

    /// One direction between two nodes, as it is now.
    pub fn link(&self, way: Way) -> Link {
        let usual = (Duration::from_micros(50), Duration::from_micros(400));
        let new = Link { is_blocked: false, blocks: 0, delay: usual, rate: 400 << 20 };
        *self.lock().links.entry(way).or_insert(new)
    }

    /// Changes one direction.
    pub fn change(self: &Arc<Self>, way: Way, change: impl FnOnce(&mut Link)) {
        let was = self.link(way);
        let now = {
            let mut state = self.lock();
            let Some(link) = state.links.get_mut(&way) else { return };
            change(link);
            link.blocks += u64::from(link.is_blocked && !was.is_blocked);
            let link = *link;
            state.blocked.entry(way).or_default().store(link.is_blocked, Ordering::SeqCst);
            link
        };
        if now.is_blocked && !was.is_blocked {
            let (net, owner) = (Arc::clone(self), self.owner());
            self.tasks.spawn(
                NETWORK,
                Box::pin(async move {
                    owner.sleep_until(owner.now().plus(KEPT)).await;
                    let link = net.link(way);
                    if link.is_blocked && link.blocks == now.blocks {
                        net.break_calls(way);
                    }
                }),
            );
        }
        self.changed.notify_waiters();
    }

    /// Whether nothing passes this way, at any time.
    pub(super) fn blocked(&self, way: Way) -> Arc<AtomicBool> {
        Arc::clone(self.lock().blocked.entry(way).or_default())
    }

    fn owner(&self) -> Owner {
        Owner { tasks: Arc::clone(&self.tasks), number: NETWORK }
    }

    /// Breaks the connections between two nodes: callers that use them are told.
    pub fn break_calls(&self, (a, b): Way) {
        {
            let mut state = self.lock();
            *state.broken.entry((a, b)).or_default() += 1;
            *state.broken.entry((b, a)).or_default() += 1;
        }
        self.changed.notify_waiters();
    }

    /// Breaks the connections that carry bytes, from one node to another.
    pub fn break_pipes(&self, is_meant: impl Fn(Way) -> bool) {
        let mut state = self.lock();
        state.pipes.retain(|(_, is_reset)| is_reset.strong_count() > 0);
        let meant = state.pipes.iter().filter(|(way, _)| is_meant(*way));
        meant.filter_map(|(_, is_reset)| is_reset.upgrade()).for_each(|it| it.store(true, Ordering::SeqCst));
    }

    /// The connection for calls of this way, by how often it was broken.
    pub fn connection(&self, way: Way) -> u64 {
        self.lock().broken.get(&way).copied().unwrap_or_default()
    }

    /// The node of a place stands still, or goes on.
    pub(super) fn stop(&self, place: usize, stops: bool) {
        self.note("stop", (place, place), &[u64::from(stops)]);
        let mut state = self.lock();
        if stops {
            state.stopped.insert(place);
        } else {
            state.stopped.remove(&place);
        }
    }

    /// Whether the node of a place stands still.
    pub(super) fn is_stopped(&self, place: usize) -> bool {
        self.lock().stopped.contains(&place)
    }

    /// Who is at this place now.
    pub fn node(&self, place: usize) -> Option<Arc<ClusterNode>> {
        self.lock().nodes.get(&place).and_then(Weak::upgrade)
    }

    /// From now on this node, or none, is at this place.
    pub fn seat(&self, place: usize, node: Option<&Arc<ClusterNode>>) {
        match node {
            Some(node) => drop(self.lock().nodes.insert(place, Arc::downgrade(node))),
            None => drop(self.lock().nodes.remove(&place)),
        }
        self.changed.notify_waiters();
    }

    /// The next connection for bytes this way meets a fault after `after` bytes.
    pub fn plan(&self, way: Way, fault: Fault, after: u64) {
        self.lock().faults.push((way, fault, after));
    }

    /// Nothing is planned any more.
    pub fn forget_plans(&self) {
        let mut state = self.lock();
        state.faults.clear();
        state.feed_cut = None;
    }

    /// What is planned for a new connection for bytes.
    pub(super) fn planned(&self, way: Way) -> Option<(Fault, u64)> {
        let mut state = self.lock();
        let at = state.faults.iter().position(|(of, ..)| *of == way)?;
        let (_, fault, after) = state.faults.swap_remove(at);
        Some((fault, after))
    }

    pub(super) fn keep(&self, way: Way, is_reset: &Arc<AtomicBool>) {
        self.lock().pipes.push((way, Arc::downgrade(is_reset)));
    }

    /// The connection for calls this way breaks after `after` more messages of a stream.
    pub fn cut_feed(&self, way: Way, after: u64) {
        self.lock().feed_cut = Some((way, after));
    }

    /// Counts a message of a stream; says whether the connection breaks now.
    pub(super) fn counts_out(&self, way: Way) -> bool {
        let mut state = self.lock();
        match &mut state.feed_cut {
            Some((of, 0)) if *of == way => {
                state.feed_cut = None;
                true
            }
            Some((of, left)) if *of == way => {
                *left -= 1;
                false
            }
            _ => false,
        }
    }

    /// Whether a connection still is, and whether anything passes this way.
    fn passes(&self, way: Way, of: Way, connection: u64) -> Result<bool, ()> {
        if self.connection(of) == connection { Ok(!self.link(way).is_blocked) } else { Err(()) }
    }

    /// A message of a connection passes this way. An error if the connection breaks.
    pub async fn pass(self: Arc<Self>, way: Way, of: Way, connection: u64) -> Result<(), ()> {
        let (low, high) = self.link(way).delay;
        let nanos = self.draw(|rng| rng.between(low.as_nanos() as u64, high.as_nanos() as u64));
        let owner = self.owner();
        owner.sleep_until(owner.now().plus(Duration::from_nanos(nanos))).await;
        loop {
            let changed = self.changed.notified();
            if self.passes(way, of, connection)? {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Returns when a connection is broken.
    pub async fn breaks(self: Arc<Self>, way: Way, connection: u64) {
        loop {
            let changed = self.changed.notified();
            if self.connection(way) != connection {
                return;
            }
            changed.await;
        }
    }

    /// When bytes that are sent now arrive, behind those before them.
    pub(super) fn arrival(&self, way: Way, bytes: usize, busy: &mut Nanos) -> Nanos {
        let Link { delay: (low, high), rate, .. } = self.link(way);
        let takes = bytes as u64 * 1_000_000_000 / rate.max(1);
        *busy = Nanos(busy.0.max(self.clock.now().0).saturating_add(takes));
        let nanos = self.draw(|rng| rng.between(low.as_nanos() as u64, high.as_nanos() as u64));
        busy.plus(Duration::from_nanos(nanos))
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Net")
    }
}
