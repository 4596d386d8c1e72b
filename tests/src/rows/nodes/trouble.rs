//! What stands still, hangs or is hostile costs itself only.
//!
//! A tenant that behaves reads and puts on one node, first while nothing else happens, then while all of this does: one member stands
//! still, as a process does that is sent `SIGSTOP`; the disk of another one hangs, or is very slow; three other tenants begin reads that
//! they do not take and puts that they do not go on with, hold what they can, look up many blocks, take calls back, and read what only
//! those two nodes have; the bucket of the node answers 503 or nothing, while blocks are restored from it and deleted in it; and blocks are
//! deleted and expire. All of it by one seed, in virtual time.

mod bucket;
mod guests;

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{BlockOutcome, KvStore, Order, Presence};
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_layout::BlockKey;
use kvarts_layout::identity::TenantSalt;
use kvarts_peer::node::PutPolicy;

use self::bucket::Bucket;
use self::guests::{Call, Front, Guest, Times};
use super::{BLOCKS, LATE, RETURNS, Scene, store_options};
use crate::audit;
use crate::conformance::pages;
use crate::fixture;
use crate::nodes::tasks::Owner;
use crate::nodes::town::{Town, USERS};
use crate::rows::pool::until;
use crate::rows::{Row, Tally};
use crate::sim::{Effect, OpKind, Rng, Rule, Seed, When, Which};

/// The node that is asked, the one that stands still, and the one whose disk hangs.
const ASKED: usize = 0;
const STOPPED: usize = 1;
const HUNG: usize = 2;

/// Of the blocks of the scene: those on the node that is asked alone, then those on each of the other two, then those on both; the rest
/// come and go.
const LOCAL: usize = 10;
const BEYOND: [usize; 3] = [13, 16, 18];

/// Tenants that are hostile, and blocks of each: on the node that is asked, and on each of the other two.
const HOSTILE: u32 = 3;
const OWN: u64 = 6;
const ELSEWHERE: u64 = 3;
/// Keys of a look-up: as many as the server looks up beside other calls.
const MANY: u64 = 4096;

/// How often the tenant that behaves reads while nothing else happens.
const IDLE: u64 = 40;
/// How long the trouble lasts: longer than any patience.
const LASTS: (Duration, Duration) = (Duration::from_secs(25), Duration::from_secs(45));

/// How many times as long as without trouble a call of the tenant that behaves may take.
const TIMES: u32 = 3;
/// And how much longer: a read may begin with one more step of the device; a put may wait for a segment that is begun for another one, and
/// for the flush that is under way.
const MORE: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(2)];
/// A put that asks who else has its blocks waits so long for a node that does not answer.
const ASKS: Duration = Duration::from_millis(10);
/// How long a read waits: for each of two nodes from which nothing comes, at worst for one after the other; for one whose connection
/// broke; and for the directory.
const GIVES_UP: Duration = Duration::from_millis(2 * 10_000 + 1_000 + 25 + 100);
/// How long a delete waits for nodes that do not answer, and its own part.
const DELETES: Duration = Duration::from_millis(5_000 + 100);

/// A scene, and its tenants.
struct Course {
    scene: Scene,
    front: Arc<Front>,
    times: Times,
    rng: Rng,
    /// Blocks that the tenant that behaves has put so far beside those of the scene.
    next: u64,
    /// Whether its reads of what is elsewhere have ended, and what it does with the bucket.
    beyond: Arc<()>,
    restores: Arc<()>,
    bucket: Option<Bucket>,
    many: Arc<Vec<BlockKey>>,
    /// By how much operations of the disk that hangs are late, if they end at all.
    late: Option<Duration>,
    /// The tenants; the first one behaves.
    guests: Vec<Guest>,
}

/// The keys of a hostile tenant.
fn own_keys(tenant: u32, range: std::ops::Range<u64>) -> Vec<BlockKey> {
    fixture::keys(100 + u64::from(tenant), range)
}

impl Course {
    fn new(seed: Seed) -> Result<Self, String> {
        let mut rng = seed.child("trouble").rng();
        let count = [3, 3, 3, 4, 5][rng.index(5)];
        let mut town = Town::new(seed, count, &store_options());
        if rng.below(3) == 0 {
            town.rules.0 = PutPolicy::Single(Duration::from_secs(20));
        }
        let scene = Scene::of(town, seed.child("nodes").rng())?;
        let front = Front::new(&(0..=HOSTILE).collect::<Vec<u32>>())?;
        let many = (0..MANY).map(|n| {
            let mut key = [7; 32];
            key[..8].copy_from_slice(&n.to_le_bytes());
            BlockKey(key)
        });
        let many = own_keys(1, 0..OWN).into_iter().chain(many).collect();
        let mut course = Self {
            scene,
            front,
            times: Times::default(),
            rng,
            next: 0,
            beyond: Arc::default(),
            restores: Arc::default(),
            bucket: None,
            many: Arc::new(many),
            late: None,
            guests: Vec::new(),
        };
        course.guests = (0..=HOSTILE).map(|number| course.welcome(number)).collect::<Result<_, _>>()?;
        let clock = &course.scene.town.clock;
        course.bucket = Some(Bucket::new(course.guest(0), clock, seed.child("bucket").rng().next_u64())?);
        Ok(course)
    }

    fn guest(&self, number: u32) -> Guest {
        self.guests[number as usize].clone()
    }

    /// A tenant as the node that is asked knows it.
    fn welcome(&self, number: u32) -> Result<Guest, String> {
        let running =
            self.scene.town.seats[ASKED].running.as_ref().ok_or("the node that is asked is gone")?;
        let namespace = self.know(number, ASKED)?;
        Ok(Guest {
            number,
            namespace,
            front: Arc::clone(&self.front),
            node: Arc::clone(&running.node),
            store: running.store.clone(),
            owner: Owner { tasks: Arc::clone(&self.scene.town.tasks), number: USERS },
            book: self.scene.book.clone(),
            shape: Arc::clone(&self.scene.shape),
        })
    }

    /// A node is shown the model of a tenant.
    fn know(&self, tenant: u32, place: usize) -> Result<kvarts_layout::NamespaceId, String> {
        let running = self.scene.town.seats[place].running.as_ref().ok_or("it does not run")?;
        let salt = TenantSalt(vec![tenant as u8; 16 * usize::from(tenant > 0)]);
        let identity = kvarts_layout::Identity { tenant_salt: salt, ..fixture::identity("nodes") };
        let geometry = fixture::geometry();
        let namespace = running.store.register(&identity, &geometry).map_err(|error| error.to_string())?;
        running.node.know(&identity, &geometry, namespace);
        Ok(namespace)
    }

    fn producer(&mut self, keys: &[BlockKey]) -> u64 {
        self.scene.producers += 1;
        self.scene.book.put(keys, self.scene.producers);
        self.scene.producers
    }

    fn call(&mut self) -> u64 {
        self.scene.calls += 1;
        self.scene.calls
    }

    fn bucket(&self) -> Result<Bucket, String> {
        self.bucket.clone().ok_or_else(|| "there is no bucket".to_owned())
    }

    /// Each node has its blocks, and knows where the others are.
    fn settle(&mut self) -> Result<(), String> {
        let bucket = self.bucket()?;
        let producer = self.producer(bucket.keys());
        self.spawn(bucket.fill(producer));
        let keys = self.scene.keys.clone();
        let [stopped, hung, both] = BEYOND;
        for (place, of) in
            [(ASKED, 0..LOCAL), (STOPPED, LOCAL..stopped), (HUNG, stopped..hung), (STOPPED, hung..both)]
        {
            self.scene.put_these(place, keys[of].to_vec(), true, None);
        }
        for tenant in 1..=HOSTILE {
            let [stopped, hung] = [OWN + ELSEWHERE, OWN + 2 * ELSEWHERE];
            for (place, of) in [(ASKED, 0..OWN), (STOPPED, OWN..stopped), (HUNG, stopped..hung)] {
                let namespace = self.know(tenant, place)?;
                let usual = std::mem::replace(&mut self.scene.namespace, namespace);
                // Not noted as durable: a restart looks for the blocks of the scene.
                self.scene.put_these(place, own_keys(tenant, of), false, None);
                self.scene.namespace = usual;
            }
        }
        self.scene.quiet()?;
        self.scene.town.pass(Duration::from_secs(3))?;
        // The blocks of both are copies of one production.
        let node = self.scene.town.node(HUNG).cloned().ok_or("a node is gone")?;
        let (namespace, shape, (group, coordinate)) =
            (self.scene.namespace, Arc::clone(&self.scene.shape), pages());
        let copied = keys[hung..both].to_vec();
        self.scene.spawn(HUNG, async move {
            let column = kvarts_peer::node::Column { namespace, group, coordinate, keys: &copied };
            drop(node.replicate(column, &shape, None).await);
        });
        self.scene.quiet()?;
        self.scene.town.pass(Duration::from_secs(1))
    }

    /// The tenant that behaves reads what is here, and puts, one after the other.
    fn serve(&mut self) {
        let guest = self.guest(0);
        let from = self.rng.index(LOCAL);
        let to = (from + self.rng.between(1, 4) as usize).min(LOCAL);
        let keys = self.scene.keys[from..to].to_vec();
        let order = if self.rng.coin() { Order::Layers } else { Order::Blocks };
        let puts = self.rng.coin().then(|| {
            let count = self.rng.between(1, 2);
            self.next += count;
            fixture::keys(8, self.next - count..self.next)
        });
        let put = puts.map(|keys| (self.producer(&keys), keys));
        let (numbers, times) = ([self.call(), self.call()], self.times.clone());
        self.scene.spawn(ASKED, async move {
            let what = format!("read {} of {} blocks that are here", numbers[0], keys.len());
            let reading = guest.read(&what, &keys, order, None);
            let good = guest.timed(&times, (Call::Read, numbers[0]), &what, reading).await;
            if good.len() != keys.len() {
                guest.book.violation(format!("{what} gave {good:?}"));
            }
            let Some((producer, keys)) = put else { return };
            let what = format!("put {} of {} blocks", numbers[1], keys.len());
            let putting = guest.put(&keys, producer, None);
            let outcomes = guest.timed(&times, (Call::Put, numbers[1]), &what, putting).await;
            if outcomes.iter().any(|one| *one != BlockOutcome::Stored) {
                guest.book.violation(format!("{what}: {outcomes:?}"));
            }
        });
    }

    /// The tenant that behaves reads what nodes have that do not answer, one such read at a time.
    fn read_beyond(&mut self) {
        if Arc::strong_count(&self.beyond) > 1 {
            return;
        }
        let (guest, under_way) = (self.guest(0), Arc::clone(&self.beyond));
        let [_, _, last] = BEYOND;
        let from = self.rng.between(LOCAL as u64 - 2, last as u64 - 2) as usize;
        let to = (from + self.rng.between(2, 8) as usize).min(last);
        let keys = self.scene.keys[from..to].to_vec();
        let order = if self.rng.coin() { Order::Layers } else { Order::Blocks };
        let deadline = [None, None, None, Some(300), Some(4000)][self.rng.index(5)];
        let deadline = deadline.map(Duration::from_millis);
        let number = self.call();
        self.scene.spawn(ASKED, async move {
            let what = format!("read {number} of blocks {from} to {to} that others have");
            let (begun, most) = (guest.now(), deadline.map_or(GIVES_UP, |deadline| deadline + LATE));
            let due = guest.book.ends_by(number, begun.plus(most), &what);
            guest.read(&what, &keys, order, deadline.map(|deadline| begun.plus(deadline))).await;
            drop((due, under_way));
            let took = guest.now().since(begun);
            if took > most {
                guest.book.violation(format!("{what} took {took:?}, not {most:?} at most"));
            }
        });
    }

    /// Blocks of the tenant that behaves are put for a time; or deleted, or have less time from now on, after which nothing is read
    /// from nodes that have not heard of it.
    fn come_and_go(&mut self, may_end: bool) {
        let [.., first] = BEYOND;
        let from = self.rng.between(first as u64, BLOCKS - 1) as usize;
        let keys = self.scene.keys[from..].to_vec();
        match self.rng.below(if may_end { 4 } else { 2 }) {
            0 | 1 => {
                let ttl = self.rng.coin().then(|| Duration::from_millis(self.rng.between(200, 8000)));
                self.scene.put_these(ASKED, keys, true, ttl);
            }
            2 => {
                let due = self.due(DELETES, "a delete");
                self.scene.delete_these(ASKED, Some(keys), due);
            }
            _ => {
                let due = self.due(DELETES, "a shorter time to live");
                self.scene.shorten_these(ASKED, keys, due);
            }
        }
    }

    /// The tenant that behaves restores what only the bucket has, or deletes it, one after the other.
    fn use_bucket(&mut self) -> Result<(), String> {
        let bucket = self.bucket()?;
        if self.rng.below(4) == 0 {
            bucket.trouble(&mut self.rng);
        }
        if Arc::strong_count(&self.restores) > 1 {
            return Ok(());
        }
        let (under_way, deletes) = (Arc::clone(&self.restores), self.rng.below(8) == 0);
        let keys = bucket.some(&mut self.rng, if deletes { 1 } else { 4 });
        let what = if deletes { "a delete in the bucket" } else { "a restore" };
        let due = self.due(bucket::ENDS, what);
        self.spawn(async move {
            match deletes {
                true => drop(bucket.delete(&keys).await),
                false => bucket.restore(what, &keys).await,
            }
            drop((due, under_way));
        });
        Ok(())
    }

    fn due(&mut self, within: Duration, what: &str) -> Option<crate::nodes::ledger::Due> {
        let number = self.call();
        Some(self.scene.book.ends_by(number, self.scene.town.clock.now().plus(within), what))
    }

    /// A hostile tenant does something.
    fn be_hostile(&mut self, tenant: u32, until: Nanos) {
        let guest = self.guest(tenant);
        let from = self.rng.below(OWN);
        let here = own_keys(tenant, from..self.rng.between(from + 1, OWN));
        let what = format!("a read of tenant {tenant}");
        match self.rng.below(11) {
            0..=2 => {
                let events = self.rng.below(4);
                self.spawn(async move { guest.read_and_stand_still(&here, events, until).await });
            }
            3 => {
                let blocks = self.rng.between(1, 8) as usize;
                self.spawn(async move { guest.put_and_stand_still(blocks, until).await });
            }
            4 => {
                let number = 1000 + self.call();
                let (keys, layers) = (own_keys(tenant, number..number + 3), self.rng.below(3) as u32);
                self.producer(&keys);
                self.spawn(async move { guest.layers_and_stand_still(&keys, layers, until).await });
            }
            5 => {
                let hold = Duration::from_millis(self.rng.between(100, 8000));
                drop(guest.look_up(&self.many, hold, 4 * self.scene.shape.block_bytes()));
            }
            6 => {
                let after = Duration::from_micros(self.rng.below(2000));
                self.spawn(async move {
                    let reading = async { drop(guest.read(&what, &here, Order::Layers, None).await) };
                    guest.cut_off(after, reading).await;
                });
            }
            7 => {
                let (after, producer) = (Duration::from_micros(self.rng.below(2000)), self.producer(&here));
                self.spawn(async move {
                    let putting = async { drop(guest.put(&here, producer, None).await) };
                    guest.cut_off(after, putting).await;
                });
            }
            8 => {
                let (bytes, ends) = (self.rng.between(1, 96) * 4096, self.rng.between(10, 20_000));
                let until = until.min(guest.now().plus(Duration::from_millis(ends)));
                self.spawn(async move { guest.hold(bytes, until).await });
            }
            9 => {
                let producer = self.producer(&here);
                self.spawn(async move {
                    guest.delete(&here).await;
                    drop(guest.put(&here, producer, None).await);
                });
            }
            _ => {
                let there = own_keys(tenant, OWN - 1..OWN + 2 * ELSEWHERE);
                let after = Duration::from_millis(self.rng.between(1, 20_000));
                self.spawn(async move {
                    let reading = async { drop(guest.read(&what, &there, Order::Blocks, None).await) };
                    guest.cut_off(after, reading).await;
                });
            }
        }
    }

    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.scene.spawn(ASKED, task);
    }

    /// One member stands still, perhaps in the middle of what it asked for, and the disk of another one hangs.
    fn begin_trouble(&mut self) -> Result<(), String> {
        if self.rng.coin() {
            // What it is sent does not fit on the way.
            self.scene.town.net.change((ASKED, STOPPED), |link| link.rate = 64 << 10);
            let keys = self.scene.keys[..LOCAL].to_vec();
            self.scene.read(STOPPED, keys, Order::Layers, None);
            let pause = Duration::from_micros(self.rng.between(1000, 60_000));
            self.scene.town.pass(pause)?;
        }
        self.scene.town.stand_still(STOPPED, true);
        self.bucket()?.trouble(&mut self.rng);
        let which = if self.rng.coin() { Which::Any } else { Which::Kind(OpKind::Read) };
        self.late = self.rng.coin().then(|| Duration::from_millis(self.rng.between(100, 40_000)));
        let effect = self.late.map_or(Effect::Stuck, Effect::Delay);
        let running = self.scene.town.seats[HUNG].running.as_ref().ok_or("a node is gone")?;
        running.world.disk().inject(Rule::new(which, When::From(1), effect));
        Ok(())
    }

    fn trouble(&mut self) -> Result<(), String> {
        self.begin_trouble()?;
        let (least, most) = LASTS;
        let lasts =
            Duration::from_millis(self.rng.between(least.as_millis() as u64, most.as_millis() as u64));
        let (half, ends) = {
            let now = self.scene.town.clock.now();
            (now.plus(lasts / 2), now.plus(lasts))
        };
        while self.scene.town.clock.now() < ends {
            for tenant in 1..=HOSTILE {
                for _ in 0..self.rng.below(4) {
                    self.be_hostile(tenant, ends);
                }
            }
            self.serve();
            if self.rng.below(3) == 0 {
                self.read_beyond();
            }
            self.use_bucket()?;
            if self.rng.below(6) == 0 {
                let may_end = self.scene.town.clock.now() > half;
                self.come_and_go(may_end);
            }
            let pause = Duration::from_millis(self.rng.between(20, 1200));
            self.scene.town.pass(pause)?;
            self.scene.look()?;
        }
        let asked = self.scene.town.node(ASKED).ok_or("the node that is asked is gone")?;
        let held = asked.status().served.memory;
        if held > 0 {
            return Err(format!("{lasts:?} after a node stood still {held} bytes are held for it"));
        }
        Ok(())
    }

    /// All is well again.
    fn end_trouble(&mut self) -> Result<(), String> {
        self.scene.town.stand_still(STOPPED, false);
        self.scene.heal_network();
        if let Some(running) = &self.scene.town.seats[HUNG].running {
            running.world.disk().heal();
        }
        // What is under way there ends as late.
        self.scene.town.pass(self.late.unwrap_or_default())?;
        if self.late.is_none() {
            self.scene.crash(HUNG)?;
            self.scene.restart(HUNG)?;
            for tenant in 1..=HOSTILE {
                self.know(tenant, HUNG)?;
            }
        }
        self.bucket()?.heal();
        self.scene.town.pass(RETURNS.max(bucket::IN_USE))?;
        self.scene.quiet()?;
        self.scene.hear()?;
        self.scene.converge()?;
        let looking = self.bucket()?.look();
        self.spawn(looking);
        self.scene.quiet()?;
        self.scene.read_everything()
    }

    /// Nothing is left of it.
    fn look_for_what_is_left(&mut self) -> Result<(), String> {
        self.scene.town.pass(Duration::from_secs(10))?;
        self.scene.holds_nothing()?;
        self.front.holds_nothing()?;
        for (place, seat) in self.scene.town.seats.iter().enumerate() {
            let Some(running) = &seat.running else { return Err(format!("node {place} does not run")) };
            let note = |why: String| format!("node {place}: {why}");
            let report = audit::books(&running.store).map_err(note)?;
            audit::budget(&report).map_err(note)?;
        }
        for tenant in 1..=HOSTILE {
            let (guest, keys) = (self.guest(tenant), own_keys(tenant, 0..OWN));
            let (producer, book) = (self.producer(&keys), self.scene.book.clone());
            let layered = own_keys(tenant, 500..510);
            self.producer(&layered);
            let block = self.scene.shape.block_bytes().next_multiple_of(4096);
            self.spawn(async move {
                let outcomes = guest.put(&keys, producer, None).await;
                let is_there =
                    |one: &BlockOutcome| matches!(one, BlockOutcome::Stored | BlockOutcome::AlreadyThere);
                if !outcomes.iter().all(is_there) {
                    book.violation(format!("tenant {tenant} puts its blocks again: {outcomes:?}"));
                }
                let leased = guest.look_up(&keys[..1], Duration::from_secs(1), block);
                if leased != [Presence::Here] {
                    book.violation(format!("tenant {tenant} still holds blocks: {leased:?}"));
                }
                let missing = guest.all_layered(&layered).await;
                if missing > 0 {
                    book.violation(format!("{missing} puts by layers are still under way"));
                }
                guest.pause(Duration::from_millis(50)).await;
            });
            self.scene.quiet()?;
        }
        self.scene.look()
    }

    fn run(&mut self) -> Result<(), String> {
        self.settle()?;
        if self.rng.below(4) > 0 {
            // There are connections for bytes by then, and rates are known.
            for _ in 0..3 {
                self.read_beyond();
                self.scene.quiet()?;
            }
        }
        for _ in 0..IDLE {
            self.serve();
            let pause = Duration::from_millis(self.rng.between(10, 200));
            self.scene.town.pass(pause)?;
        }
        self.scene.quiet()?;
        let asks = if self.scene.town.rules.0 == PutPolicy::Store { Duration::ZERO } else { ASKS };
        self.times.hold_to(|call, p99| match call {
            Call::Read => p99 * TIMES + MORE[0],
            Call::Put => p99 * TIMES + MORE[1] + asks,
        });
        self.trouble()?;
        self.end_trouble()?;
        self.look_for_what_is_left()?;
        for _ in 0..4 {
            self.serve();
            self.scene.town.pass(Duration::from_millis(100))?;
        }
        self.scene.quiet()
    }
}

/// One seed; gives a digest of all that happened.
fn one(seed: Seed) -> Result<u128, String> {
    let mut course = Course::new(seed)?;
    course.run()?;
    Ok(course.scene.town.log().0)
}

/// Row R46.
pub(in crate::rows) fn row() -> Row {
    Row {
        id: "R46",
        what: "what stands still, hangs or is hostile, all at once, beside a tenant that behaves",
        counts: "courses",
        targets: [10, 2_000, 40_000],
        run: |ask, target| -> Tally { until(ask, target, |seed, states| super::replayed(seed, states, one)) },
    }
}
