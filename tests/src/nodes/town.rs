//! The nodes of a simulation, and what happens next.
//!
//! Each node is a whole store on a disk of its own, and a whole [`ClusterNode`] over it. One thing happens at a time; when
//! nothing else can, time goes on to whatever comes first.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_cluster::hot::Rule;
use kvarts_cluster::members::{Member, Members, NodeId};
use kvarts_contract::api::{KvStore, ReadEvent, ReadStream, read_channel};
use kvarts_contract::clock::SeededEntropy;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockShape, Coordinate, Group, NamespaceId};
use kvarts_peer::lane::{self, Bell, Host, Join, LaneServer, Ready, ServeLimits, Served, Wire};
use kvarts_peer::node::{
    Calls, ClusterNode, Footing, InMemory, Network, NodeOptions, OFFER_EVERY, Patience, PutPolicy, Secret,
};
use kvarts_peer::path::{Path, Piece};
use kvarts_peer::read::Runner;
use kvarts_store::engine::{Executors, Options, Store};
use tonic::codegen::BoxFuture;

use super::calls::Caller;
use super::net::{Net, Way};
use super::tasks::{Owner, Tasks};
use super::threads::Threads;
use super::wire::{self, End};
use crate::fixture;
use crate::sim::{CrashState, Media, Rng, Seed, SimClock, SimWorld, WorldConfig};

/// Things that happen after which a wait has hung.
pub const STEPS_MAX: u64 = 2_000_000;
/// The least bytes of a piece of a read: less than a layer of a block, about a block, several blocks.
const LEAST_PIECES: [u64; 3] = [8 << 10, 40 << 10, 512 << 10];
/// Tasks of who uses the nodes.
pub const USERS: u64 = 1;
/// The port at which nodes serve bytes.
const LANE_PORT: u16 = 7401;

/// How a node answers others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Manner {
    /// As it should.
    Honest,
    /// With other bytes than its digests say.
    OtherBytes,
    /// It has nothing.
    Nothing,
    /// It never ends.
    Endless,
}

/// A store as a node serves it that may lie.
struct Witty {
    store: Store,
    owner: Owner,
    manner: Arc<AtomicU8>,
}

impl Path for Witty {
    fn read(&self, piece: Piece) -> Result<ReadStream, Reason> {
        let manner = self.manner.load(Ordering::SeqCst);
        if manner == Manner::Honest as u8 {
            return Path::read(&self.store, piece);
        }
        if manner == Manner::Nothing as u8 {
            return Err(Reason::NotHere(piece.request.keys.first().copied().unwrap_or_default()));
        }
        let ((sink, stream), into) = (read_channel(), piece.request.into.clone());
        let (blocks, keys) = (piece.request.keys.len() as u32, piece.request.layers.clone());
        let shape = self.shape(piece.request.namespace, piece.request.group, piece.request.coordinate)?;
        let (inner, owner) = (Path::read(&self.store, piece)?, self.owner.clone());
        self.owner.spawn(Box::pin(async move {
            let end = std::future::poll_fn(|context| inner.poll_end(context)).await;
            if manner == Manner::Endless as u8 {
                owner.sleep_until(owner.now().plus(Duration::from_secs(8))).await;
            }
            let layers = keys.unwrap_or(0..shape.layers().len() as u32);
            let mut part = 0;
            for (layer, of) in (0..).zip(shape.layers()) {
                for chunk in &of.chunks {
                    if layers.contains(&layer) {
                        let block = (0..blocks).next_back().unwrap_or_default();
                        if let Some(some) = into.chunk(part, block, chunk.bytes) {
                            let mut byte = [0];
                            some.copy_out(some.len() - 1, &mut byte);
                            some.copy_in(some.len() - 1, &[byte[0] ^ 0x10]);
                        }
                    }
                    part += 1;
                }
            }
            drop(into);
            if let Ok(end) = end {
                sink.send(ReadEvent::End(end));
            }
        }));
        Ok(stream)
    }
}

impl Served for Witty {
    fn shape(&self, namespace: NamespaceId, group: Group, at: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        Served::shape(&self.store, namespace, group, at)
    }
}

/// Threads, connections and sleep of one node.
struct SimHost {
    place: usize,
    net: Arc<Net>,
    threads: Arc<Threads>,
    /// Ends that there may be, by their numbers.
    ends: Arc<Mutex<Vec<std::sync::Weak<End>>>>,
}

impl std::fmt::Debug for SimHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimHost({})", self.place)
    }
}

impl SimHost {
    fn pause(&self, time: Duration) {
        self.threads.sleep(None, None, Some(time));
    }

    fn end(&self, wire: &dyn Wire) -> Option<Arc<End>> {
        let number = wire.descriptor().as_raw_fd();
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.retain(|end| end.strong_count() > 0);
        ends.iter().filter_map(std::sync::Weak::upgrade).find(|end| end.number() == number)
    }
}

impl Host for SimHost {
    fn thread(&self, _: &'static str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Join> {
        self.threads.start(self.place, body)
    }

    fn connect(&self, address: SocketAddr, within: Duration) -> std::io::Result<Arc<dyn Wire>> {
        let to = place_of(address);
        let way = (self.place, to);
        self.pause(self.net.link(way).delay.1);
        let gone = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let is_blocked = self.net.link(way).is_blocked || self.net.link((to, self.place)).is_blocked;
        // The kernel takes connections for a process that stands still.
        if is_blocked && !self.net.is_stopped(to) {
            self.pause(within);
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        let node = self.net.node(to).ok_or_else(gone)?;
        let [caller, called] = wire::connection(&self.net, way)?;
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.extend([Arc::downgrade(&caller), Arc::downgrade(&called)]);
        drop(ends);
        self.net.note("connection", way, &[]);
        if node.take_wire(called) { Ok(caller) } else { Err(gone()) }
    }

    fn sleep(&self, bell: Option<&Bell>, wire: Option<(&dyn Wire, Ready)>, timeout: Option<Duration>) {
        let rung = bell.map(|bell| Arc::clone(bell.rung()));
        let wire = wire.and_then(|(wire, ready)| Some((self.end(wire)?, ready)));
        self.threads.sleep(rung, wire, timeout);
    }
}

fn place_of(address: SocketAddr) -> usize {
    match address.ip() {
        IpAddr::V4(ip) => usize::from(ip.octets()[3]),
        IpAddr::V6(_) => 0,
    }
}

/// The ways of one node to the others.
#[derive(Debug)]
struct SimNetwork {
    place: usize,
    net: Arc<Net>,
}

impl Network for SimNetwork {
    fn calls(&self, member: &Member) -> Result<Calls, String> {
        let to = member.address.parse().map(place_of).map_err(|_| member.address.clone())?;
        Ok(Calls::Given(Arc::new(Caller { net: Arc::clone(&self.net), way: (self.place, to) })))
    }

    fn address(&self, member: &Member, port: u16) -> BoxFuture<SocketAddr, String> {
        let address = member.address.parse::<SocketAddr>().map_err(|_| member.address.clone());
        Box::pin(std::future::ready(address.map(|address| SocketAddr::new(address.ip(), port))))
    }
}

/// What a node that runs has.
pub struct Running {
    /// Its disk and the engine's executors.
    pub world: SimWorld,
    /// Its store.
    pub store: Store,
    /// The node.
    pub node: Arc<ClusterNode>,
    _executors: Executors,
    owner: u64,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Running({:?})", self.world)
    }
}

/// A place for a node.
#[derive(Debug)]
pub struct Seat {
    /// Its name, once it has one.
    pub id: NodeId,
    /// Its disk while it does not run.
    media: Option<Media>,
    /// What runs there.
    pub running: Option<Running>,
    /// How it answers others.
    pub manner: Arc<AtomicU8>,
    /// Its process stands still, and so does everything of it.
    is_stopped: bool,
    /// Where it keeps what was deleted: what is written is durable.
    pub deletes: InMemory,
    starts: u64,
}

/// All nodes.
pub struct Town {
    /// Time.
    pub clock: Arc<SimClock>,
    /// The network.
    pub net: Arc<Net>,
    /// Tasks.
    pub tasks: Arc<Tasks>,
    /// The lane's threads.
    pub threads: Arc<Threads>,
    /// The nodes.
    pub seats: Vec<Seat>,
    ends: Arc<Mutex<Vec<std::sync::Weak<End>>>>,
    options: Options,
    /// What nodes that begin do with puts of what others have, and with what is read often.
    pub rules: (PutPolicy, Option<Rule>),
    /// Bytes that the pieces of reads have at least.
    least_piece: u64,
    seed: Seed,
    rng: Rng,
    next_owner: u64,
    steps: u64,
}

impl std::fmt::Debug for Town {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Town({:?}, {} steps)", self.seed, self.steps)
    }
}

impl Town {
    /// Places for `count` nodes with stores like this, none of which runs.
    pub fn new(seed: Seed, count: usize, options: &Options) -> Self {
        let config = WorldConfig::default();
        let clock = SimClock::new(config.unix_millis);
        let tasks = Tasks::new(&clock);
        let seat = |_| Seat {
            id: NodeId::default(),
            media: Some(Media::new(config.disk.dirs, config.disk.capacity)),
            running: None,
            manner: Arc::default(),
            is_stopped: false,
            deletes: InMemory::default(),
            starts: 0,
        };
        Self {
            net: Net::new(seed, &clock, &tasks),
            threads: Threads::new(&clock),
            tasks,
            clock,
            seats: (0..count).map(seat).collect(),
            ends: Arc::default(),
            options: options.clone(),
            rules: (PutPolicy::Store, None),
            least_piece: LEAST_PIECES[seed.child("pieces").rng().index(LEAST_PIECES.len())],
            seed,
            rng: seed.child("town").rng(),
            next_owner: USERS + 1,
            steps: 0,
        }
    }

    /// The members that these places are, in an epoch.
    pub fn members(&self, epoch: u64, places: impl Iterator<Item = usize>) -> Members {
        let member = |place: usize| {
            let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, place as u8)), 7400);
            Member { id: self.seats[place].id, address: address.to_string(), zone: String::new() }
        };
        Members::new(epoch, places.map(member).collect()).expect("members of a simulation")
    }

    /// Opens the store of a place, without a node.
    pub fn open(&mut self, place: usize) -> Result<(SimWorld, Store, Executors), String> {
        let media = self.seats[place].media.take().ok_or("it runs already")?;
        self.seats[place].starts += 1;
        let seed = self.seed.nth(place as u64).nth(self.seats[place].starts);
        let world = SimWorld::at(Arc::clone(&self.clock), seed.0, &WorldConfig::default(), media);
        let (launcher, options) = (world.launcher(), self.options.clone());
        let opened = {
            let mut opening = std::pin::pin!(Store::open(&launcher, &options));
            self.drive(&[&world], |context| opening.as_mut().poll(context))?
        };
        let (store, executors) = opened.map_err(|error| format!("a store does not open: {error}"))?;
        self.seats[place].id = store.stats().store;
        Ok((world, store, executors))
    }

    /// Starts a node on a store that was opened.
    pub fn begin(
        &mut self,
        place: usize,
        (world, store, executors): (SimWorld, Store, Executors),
        members: &Members,
    ) -> Result<(), String> {
        let owner = Owner { tasks: Arc::clone(&self.tasks), number: self.next_owner };
        self.next_owner += 1;
        let host = SimHost {
            place,
            net: Arc::clone(&self.net),
            threads: Arc::clone(&self.threads),
            ends: Arc::clone(&self.ends),
        };
        let starts = self.seats[place].starts;
        let footing = Footing {
            runner: Arc::new(owner.clone()),
            host: Arc::new(host),
            entropy: SeededEntropy::new(self.seed.child("node").nth(place as u64).nth(starts).0),
            network: Arc::new(SimNetwork { place, net: Arc::clone(&self.net) }),
            least_piece: self.least_piece,
        };
        let options = NodeOptions {
            cluster: "sim".to_owned(),
            members: members.clone(),
            credentials: None,
            secret: Secret::new(b"of the simulation"),
            entries_max: 10_000,
            chains_max: 64,
            start: starts,
            deletes: Arc::new(self.seats[place].deletes.clone()),
            serve: ServeLimits { memory: 16 << 20, connections: 64, ..ServeLimits::default() },
            put: self.rules.0,
            patience: Patience::default(),
            has_tier: false,
            hot: self.rules.1,
            lane_port: 0,
            offer_every: OFFER_EVERY,
        };
        let witty = Witty {
            store: store.clone(),
            owner: owner.clone(),
            manner: Arc::clone(&self.seats[place].manner),
        };
        let at = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, place as u8)), LANE_PORT);
        let serving =
            |_, member: lane::Member, limits| LaneServer::called(Arc::new(witty), at, member, limits);
        let node = ClusterNode::start_on(store.clone(), footing, serving, options)?;
        let (identity, geometry) = (fixture::identity("nodes"), fixture::geometry());
        let registered = store.register(&identity, &geometry).map_err(|error| error.to_string())?;
        node.know(&identity, &geometry, registered);
        self.net.seat(place, Some(&node));
        self.net.note("start", (place, place), &[starts]);
        self.seats[place].running =
            Some(Running { world, store, node, _executors: executors, owner: owner.number });
        Ok(())
    }

    /// The power of a place fails, or its process is killed. With `is_told`, the nodes that talk to it are told.
    pub fn crash(
        &mut self,
        place: usize,
        is_told: bool,
        state: impl FnOnce(&SimWorld) -> Media,
    ) -> Result<(), String> {
        if self.seats[place].is_stopped {
            // What is left of it has to end.
            self.stand_still(place, false);
        }
        let Some(Running { world, store, node, owner, .. }) = self.seats[place].running.take() else {
            return Ok(());
        };
        self.net.note("crash", (place, place), &[u64::from(is_told)]);
        self.net.seat(place, None);
        let media = state(&world);
        self.seats[place].media = Some(media);
        self.net.break_pipes(|(from, to)| from == place || to == place);
        if is_told {
            for other in (0..self.seats.len()).filter(|other| *other != place) {
                self.net.break_calls((place, other));
            }
        }
        self.tasks.drop_all_of(owner);
        drop(store);
        // What is left of it ends on a thread, as it waits for threads.
        let ended = Arc::new(AtomicU8::new(0));
        let told = Arc::clone(&ended);
        let _ = self.threads.start(
            place,
            Box::new(move || {
                node.stop();
                drop(node);
                told.store(1, Ordering::SeqCst);
            }),
        );
        self.until(STEPS_MAX, |_| ended.load(Ordering::SeqCst) == 1)
    }

    /// The power of a place fails.
    pub fn cut_power(
        &mut self,
        place: usize,
        is_told: bool,
        choose: impl FnOnce(&CrashState) -> Media,
    ) -> Result<(), String> {
        self.crash(place, is_told, |world| choose(&world.cut_power()))
    }

    /// Stops a node and its store, and keeps its disk.
    pub fn stop(&mut self, place: usize) -> Result<(), String> {
        let Some(running) = &self.seats[place].running else { return Ok(()) };
        let store = running.store.clone();
        let closed = {
            let mut closing = std::pin::pin!(store.close());
            self.drive(&[], |context| closing.as_mut().poll(context))?
        };
        closed.map_err(|error| format!("a store does not close: {error}"))?;
        drop(store);
        self.crash(place, true, |world| world.kill())
    }

    /// The process of a place stands still, as by `SIGSTOP`, until it goes on: other nodes are not told, and nothing passes to it or
    /// from it.
    pub fn stand_still(&mut self, place: usize, stops: bool) {
        let Some(running) = &self.seats[place].running else { return };
        self.tasks.stop(running.owner, stops);
        self.threads.stop(place, stops);
        self.net.stop(place, stops);
        self.seats[place].is_stopped = stops;
        for way in self.ways().into_iter().filter(|(from, to)| *from == place || *to == place) {
            self.net.change(way, |link| link.is_blocked = stops);
        }
    }

    /// The disk of a place that does not run.
    pub fn media(&self, place: usize) -> Option<&Media> {
        self.seats[place].media.as_ref()
    }

    /// The node of a place that runs.
    pub fn node(&self, place: usize) -> Option<&Arc<ClusterNode>> {
        self.seats[place].running.as_ref().map(|running| &running.node)
    }

    /// Lets one thing happen; false if nothing can without time passing.
    fn step_now(&mut self, more: &[&SimWorld]) -> bool {
        self.steps += 1;
        let worlds: Vec<SimWorld> = self.worlds(more);
        // Disks, tasks and threads in an order that the seed decides, so that each may be ahead of the others.
        let kinds = worlds.len() + 2;
        let first = self.rng.index(kinds);
        for kind in (0..kinds).map(|at| (at + first) % kinds) {
            let did = match kind {
                0 => self.tasks.step(&mut self.rng),
                1 => {
                    let ready = self.threads.ready();
                    let chosen = self.rng.pick(&ready).copied();
                    chosen.inspect(|number| self.threads.run(*number)).is_some()
                }
                _ => worlds[kind - 2].step_now(),
            };
            if did {
                return true;
            }
        }
        false
    }

    fn worlds(&self, more: &[&SimWorld]) -> Vec<SimWorld> {
        let going = self.seats.iter().filter(|seat| !seat.is_stopped);
        let running = going.filter_map(|seat| seat.running.as_ref()).map(|running| &running.world);
        running.chain(more.iter().copied()).cloned().collect()
    }

    /// Lets one thing happen, or time pass. An error if nothing will happen any more, or a thread panicked.
    fn step(&mut self, more: &[&SimWorld], until: Option<Nanos>) -> Result<(), String> {
        if self.step_now(more) {
            return Ok(());
        }
        if let Some(panic) = self.threads.panics().first() {
            return Err(format!("a thread of the lane panicked: {panic}"));
        }
        let worlds = self.worlds(more);
        let times = worlds.iter().filter_map(SimWorld::next_time);
        let next = times.chain(self.tasks.next_time()).chain(self.threads.next_time()).chain(until).min();
        let next = next.ok_or("nothing is left that could happen")?;
        self.clock.advance_to(next);
        Ok(())
    }

    /// Lets things happen until `done`.
    pub fn until(&mut self, steps_max: u64, mut done: impl FnMut(&mut Self) -> bool) -> Result<(), String> {
        for _ in 0..steps_max {
            if done(self) {
                return Ok(());
            }
            self.step(&[], None)?;
        }
        Err(format!("not done after {steps_max} steps, at {:?}", self.clock.now()))
    }

    /// Lets time pass.
    pub fn pass(&mut self, time: Duration) -> Result<(), String> {
        let until = self.clock.now().plus(time);
        for _ in 0..STEPS_MAX {
            if self.clock.now() >= until {
                return Ok(());
            }
            self.step(&[], Some(until))?;
        }
        Err(format!("{time:?} do not pass: more than {STEPS_MAX} things happen in them"))
    }

    /// Lets things happen until there is an answer.
    pub fn drive<T>(
        &mut self,
        more: &[&SimWorld],
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Result<T, String> {
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..STEPS_MAX {
            if let Poll::Ready(answer) = poll(&mut context) {
                return Ok(answer);
            }
            self.step(more, None)?;
        }
        Err(format!("no answer after {STEPS_MAX} steps"))
    }

    /// A call of a user of a node runs beside everything else, and goes with the node.
    pub fn spawn_at(&self, place: usize, task: impl Future<Output = ()> + Send + 'static) {
        let owner = self.seats[place].running.as_ref().map_or(USERS, |running| running.owner);
        self.tasks.spawn(owner, Box::pin(task));
    }

    /// A digest of all that happened so far, on the network and on every disk that is in use, and how much it was.
    pub fn log(&self) -> (u128, u64) {
        let (digest, events) = self.net.log();
        let mut mixer = crate::sim::log::Mixer::new(0);
        let mut word = |wide: u128| {
            mixer.word(wide as u64);
            mixer.word((wide >> 64) as u64);
        };
        word(digest);
        self.worlds(&[]).iter().for_each(|world| word(world.disk().log().digest()));
        mixer.word(self.clock.now().0);
        (mixer.value(), events)
    }

    /// Which way is from one place to another.
    pub fn ways(&self) -> Vec<Way> {
        let count = self.seats.len();
        (0..count)
            .flat_map(|from| (0..count).map(move |to| (from, to)))
            .filter(|(from, to)| from != to)
            .collect()
    }
}

impl Drop for Town {
    fn drop(&mut self) {
        // Threads first: what they have is let go of before what waits for them.
        self.threads.close();
        self.tasks.close();
        for seat in &mut self.seats {
            seat.running.take();
        }
    }
}
