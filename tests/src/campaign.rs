//! Crashes and faults: a seeded workload, an end to it, and what must be true afterwards.
//!
//! The ledger knows of every block who has tried to put it and whether it was ever acknowledged as durable. From
//! that follows what any later state may be: bytes of one of those producers, whole; or a miss, unless the block
//! was acknowledged. Nothing here knows how a store keeps its blocks.

pub mod layered;
mod ledger;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, DeleteOutcome, DeleteReply, DeleteRequest, Durability, KvStore, LeaseId,
    LeaseTerms, Order, Parent, Placed, Presence, PutReply, PutRequest, ReadEvent, ReadRequest, ReadStream,
    Target, Verify,
};
use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_contract::ticket::{Abandoned, Ticket};
use kvarts_contract::{class::Class, clock::Nanos};
use kvarts_layout::NamespaceId;
use kvarts_store::engine::{CompactOptions, CompactReport, Executors, Options, Store};

use self::ledger::Known;
pub use self::ledger::Ledger;
use crate::audit;
use crate::fixture::{self, Style};
use crate::sim::{Hang, Media, Rng, Seed, SimWorld, WorldConfig};

/// Keys of each column that workloads are about.
const KEYS: u64 = 12;
/// Steps after which a world hangs: a stop alone takes some thirty thousand while it waits for a stuck disk.
const STEPS_MAX: u64 = 400_000;
/// Puts that a workload has under way at once, at most.
const PUTS_MAX: usize = 3;

/// A block: which of the fixture's columns, and the number of its key.
type Name = (usize, u64);

/// What a store was found to hold: the chunks of each block, or why there are none.
pub type Found = BTreeMap<Name, Result<Vec<Vec<u8>>, Reason>>;

fn key(name: Name) -> kvarts_layout::BlockKey {
    fixture::key(7, name.1)
}

fn content(name: Name, producer: u64) -> Vec<Vec<u8>> {
    let (group, coordinate) = fixture::columns()[name.0];
    fixture::content(&key(name), group, coordinate, producer, &fixture::shape(group, coordinate))
}

/// How strictly a state is judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Judge {
    /// After power cuts and reported errors: acknowledged blocks are there, and nothing looks damaged.
    Strict,
    /// The disk has lied: blocks may be missed or reported damaged, but other bytes are never served.
    BytesOnly,
}

/// What was asked for and is not answered yet.
enum Asked {
    Put(Put),
    Delete(Delete),
}

struct Put {
    names: Vec<Name>,
    durable: bool,
    asked: u64,
    deadline: Option<Nanos>,
    ticket: Ticket<Result<PutReply, Error>>,
}

struct Delete {
    names: Vec<Name>,
    /// Who had put them when it was asked for.
    producers: Vec<BTreeSet<u64>>,
    deadline: Option<Nanos>,
    ticket: Ticket<Result<DeleteReply, Error>>,
}

/// What a workload consists of besides puts, deletes, reads and checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mix {
    /// Nothing.
    Plain,
    /// Compactions under puts and reads.
    Compacting,
    /// Leases and pins that are taken, made longer or shorter, and ended.
    Leasing,
    /// Both.
    All,
}

impl Mix {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Compacting, Self::Leasing, Self::All];

    /// Kinds below this are drawn; those from 15 to 18 compact, those from 19 on are about leases.
    fn draw(self, rng: &mut Rng) -> u64 {
        match self {
            Self::Plain => rng.below(15),
            Self::Compacting => rng.below(19),
            Self::All => rng.below(24),
            Self::Leasing => match rng.below(20) {
                lease @ 15.. => lease + 4,
                other => other,
            },
        }
    }
}

/// What a workload is.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Operations.
    pub ops: usize,
    /// Of which kinds.
    pub mix: Mix,
    /// The deadline of each operation that takes one. They must be answered by then, whatever the disk does.
    pub timeout: Option<Duration>,
    /// Whether the row looks at the ledger between polls while the store goes on by itself. Then each poll asks for one
    /// thing at most: a request that is made, answered and taken back within one poll would never be seen.
    pub watched: bool,
    /// Between which bounds the budget is changed now and then, and what decides when.
    pub budgets: Option<Budgets>,
    /// Whether what goes wrong ends before the store is stopped, and nothing of it may be left by then.
    pub passes: bool,
}

/// Budgets that a workload gives a store while it is used.
#[derive(Clone, Copy, Debug)]
pub struct Budgets {
    /// The least, in bytes.
    pub least: u64,
    /// The most.
    pub most: u64,
    /// Decides which and when.
    pub seed: Seed,
}

impl Work {
    /// `ops` operations, without deadlines, on a store whose budget stays as it is.
    pub fn new(ops: usize, mix: Mix) -> Self {
        Self { ops, mix, timeout: None, watched: false, budgets: None, passes: false }
    }
}

/// How much later than its deadline an operation may be answered: what computing takes.
const LATE_MAX: Duration = Duration::from_millis(100);

/// Puts, deletes, reads and checkpoints from a seed, several at once; what comes of them goes into the ledger. It may be
/// dropped at any moment, as a crash does.
pub async fn work(store: &Store, ledger: &RefCell<Ledger>, rng: &mut Rng, ops: usize) {
    work_on(store, ledger, rng, Work::new(ops, Mix::Plain)).await;
}

/// The same, of chained blocks, with compactions under puts and reads.
pub async fn work_compacting(store: &Store, ledger: &RefCell<Ledger>, rng: &mut Rng, ops: usize) {
    work_on(store, ledger, rng, Work::new(ops, Mix::Compacting)).await;
}

/// The same with whatever the mix says.
pub async fn work_on(store: &Store, ledger: &RefCell<Ledger>, rng: &mut Rng, work: Work) {
    let Ok(namespace) = register(store) else { panic!("the small model is accepted") };
    let mut puts = VecDeque::new();
    let mut holds = Vec::new();
    let mut budgets = work.budgets.map(|budgets| (budgets, budgets.seed.rng()));
    for _ in 0..work.ops {
        let deadline = work.timeout.map(|timeout| store.clock().now().plus(timeout));
        let waits_for = |what| ledger.borrow_mut().waits_for = what;
        ledger.borrow_mut().begun += 1;
        match work.mix.draw(rng) {
            0..9 => {
                let bring = Poller::draw(rng);
                puts.push_back(Asked::Put(put(store, namespace, ledger, bring, deadline)));
            }
            9..12 => {
                let (names, target) = draw_target(rng);
                puts.push_back(Asked::Delete(delete(store, namespace, ledger, (names, target), deadline)));
            }
            15..19 => {
                waits_for("a compaction");
                compact(store, namespace, ledger, rng, deadline).await;
            }
            19.. => hold(store, namespace, ledger, rng, &mut holds),
            12 => {
                waits_for("a checkpoint");
                if let Some(Err(error)) = by(store, deadline, store.checkpoint()).await {
                    ledger.borrow_mut().refusals.push(error.0);
                }
            }
            _ => {
                waits_for("a read");
                let found = read_column(store, namespace, rng.index(3), deadline).await;
                in_time(store, Nanos(0), deadline);
                // Reads see blocks that no crash has ended: durability is not asked of them here.
                let violation = ledger.borrow().violation(&found, Judge::BytesOnly);
                assert_eq!(violation, None, "while the store was open");
            }
        }
        if let Some((budgets, rng)) = &mut budgets {
            change_budget(store, ledger, budgets, rng);
        }
        if work.watched {
            pause().await;
        }
        let keep = if rng.below(3) == 0 { 0 } else { PUTS_MAX - 1 };
        while puts.len() > keep {
            settle(store, &mut puts, ledger).await;
        }
        still_held(store, namespace, ledger, &mut holds);
    }
    while !puts.is_empty() {
        settle(store, &mut puts, ledger).await;
    }
}

/// Gives the store another budget, after one operation in four: the least that it may have as often as any other.
fn change_budget(store: &Store, ledger: &RefCell<Ledger>, budgets: &Budgets, rng: &mut Rng) {
    if rng.below(4) > 0 {
        return;
    }
    let bytes = if rng.coin() { budgets.least } else { rng.between(budgets.least, budgets.most) };
    match store.set_budget(bytes) {
        Ok(()) => ledger.borrow_mut().budgets += 1,
        Err(error) => ledger.borrow_mut().refusals.push(error.0),
    }
}

/// Returns to the task that polls, once.
async fn pause() {
    let mut paused = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut paused, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Blocks that were here when a lease was given on them.
struct Hold {
    lease: LeaseId,
    until: Nanos,
    names: Vec<Name>,
    /// When it was asked for: a delete that was asked for later wins.
    asked: u64,
}

/// Takes a lease, or changes one that is in force.
fn hold(
    store: &Store,
    namespace: NamespaceId,
    ledger: &RefCell<Ledger>,
    rng: &mut Rng,
    holds: &mut Vec<Hold>,
) {
    let term = [Duration::from_millis(2), Duration::from_millis(40), LeaseTerms::UNLIMITED][rng.index(3)];
    let now = store.clock().now();
    if !holds.is_empty() && rng.coin() {
        let at = rng.index(holds.len());
        if rng.coin() {
            store.unlock(holds.swap_remove(at).lease);
            return;
        }
        match store.renew(holds[at].lease, term) {
            Ok(()) => holds[at].until = now.plus(term),
            Err(Error(Reason::LeaseEnded)) if holds[at].until <= now => drop(holds.swap_remove(at)),
            Err(error) => panic!("a lease in force is not renewed: {error}"),
        }
        return;
    }
    let column = rng.index(3);
    let (group, coordinate) = fixture::columns()[column];
    let first = rng.below(KEYS - 3);
    let names: Vec<Name> = (first..=first + rng.below(3)).map(|n| (column, n)).collect();
    let keys: Vec<_> = names.iter().map(|name| key(*name)).collect();
    let terms = LeaseTerms { hold: term, tenant: 1, cap_bytes: 1 << 30 };
    let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: Some(terms) };
    let asked = ledger.borrow_mut().next();
    let reply = store.contains(&request).unwrap_or_else(|error| panic!("a lease is refused: {error}"));
    if let Some(lease) = reply.lease {
        ledger.borrow_mut().leases += 1;
        let here = names.iter().zip(&reply.presence).filter(|(_, one)| **one == Presence::Here);
        let names = here.map(|(name, _)| *name).collect();
        holds.push(Hold { lease, until: now.plus(term), names, asked });
    }
}

/// What is held by a lease in force, and was not deleted since, is here.
fn still_held(store: &Store, namespace: NamespaceId, ledger: &RefCell<Ledger>, holds: &mut Vec<Hold>) {
    let now = store.clock().now();
    holds.retain(|hold| now < hold.until);
    let ledger = ledger.borrow();
    for hold in holds {
        for name in &hold.names {
            let (group, coordinate) = fixture::columns()[name.0];
            let keys = [key(*name)];
            let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
            let here = store.contains(&request).is_ok_and(|reply| reply.presence == [Presence::Here]);
            let meets = |known: &Known| known.deleting > 0 || known.deleted > hold.asked;
            let deleted = ledger.blocks.get(name).is_some_and(meets);
            assert!(here || deleted, "column {}, key {} is gone under a lease in force", name.0, name.1);
        }
    }
}

/// A compaction that leaves nothing out.
fn everything(encode_cold_after: Option<Duration>) -> CompactOptions {
    CompactOptions {
        dead_thousandths: 0,
        merge_records_min: 2,
        encode_cold_after,
        ..CompactOptions::default()
    }
}

/// Compacts everything that can be, under a read that had begun before.
async fn compact(
    store: &Store,
    namespace: NamespaceId,
    ledger: &RefCell<Ledger>,
    rng: &mut Rng,
    deadline: Option<Nanos>,
) {
    let column = rng.index(3);
    let (into, stream) = begin_column(store, namespace, column, deadline);
    // Everything is cold, or nothing is.
    let encode_cold_after = (rng.below(4) > 0).then_some(Duration::ZERO);
    let compacted = by(store, deadline, store.compact(everything(encode_cold_after))).await;
    compacted.into_iter().for_each(|outcome| ledger.borrow_mut().compacted(outcome));
    let found = end_column(column, &into, &stream).await;
    let violation = ledger.borrow().violation(&found, Judge::BytesOnly);
    assert_eq!(violation, None, "under a compaction");
}

async fn settle(store: &Store, asked: &mut VecDeque<Asked>, ledger: &RefCell<Ledger>) {
    match asked.pop_front() {
        Some(Asked::Put(mut put)) => {
            let looked = store.clock().now();
            ledger.borrow_mut().waits_for = "a put";
            let answer = (&mut put.ticket).await;
            in_time(store, looked, put.deadline);
            match answer {
                Ok(Ok(reply)) => ledger.borrow_mut().answered(&put, reply),
                Ok(Err(error)) => ledger.borrow_mut().refusals.push(error.0),
                Err(_) => {}
            }
        }
        Some(Asked::Delete(mut delete)) => {
            let looked = store.clock().now();
            ledger.borrow_mut().waits_for = "a delete";
            let answer = (&mut delete.ticket).await;
            in_time(store, looked, delete.deadline);
            ledger.borrow_mut().delete_ended(&delete, answer);
        }
        None => {}
    }
}

/// A caller that set a deadline is answered by then, or at once if it looks later.
fn in_time(store: &Store, looked: Nanos, deadline: Option<Nanos>) {
    let now = store.clock().now();
    if let Some(deadline) = deadline.filter(|deadline| now > looked.max(*deadline).plus(LATE_MAX)) {
        panic!("an answer {:?} after its deadline", now.since(deadline));
    }
}

/// The outcome of something that takes no deadline, if it comes before this one; then it is left to itself.
async fn by<T>(store: &Store, deadline: Option<Nanos>, what: impl Future<Output = T>) -> Option<T> {
    let mut what = std::pin::pin!(what);
    std::future::poll_fn(|context| match what.as_mut().poll(context) {
        Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
        Poll::Pending if deadline.is_some_and(|deadline| store.clock().now() >= deadline) => {
            Poll::Ready(None)
        }
        Poll::Pending => Poll::Pending,
    })
    .await
}

impl Ledger {
    fn compacted(&mut self, outcome: Result<CompactReport, Error>) {
        match outcome {
            Ok(report) => {
                self.moved += report.blocks_moved;
                self.merged += report.records_merged;
                self.encoded += report.records_encoded;
            }
            Err(error) => self.refusals.push(error.0),
        }
    }

    fn delete_ended(&mut self, delete: &Delete, answer: Result<Result<DeleteReply, Error>, Abandoned>) {
        let now = self.next();
        for name in &delete.names {
            let known = self.blocks.entry(*name).or_default();
            known.deleted = now;
            known.deleting = known.deleting.saturating_sub(1);
        }
        match answer {
            Ok(Ok(reply)) => {
                for (place, (name, producers)) in delete.names.iter().zip(&delete.producers).enumerate() {
                    match reply.outcomes.get(place) {
                        Some(DeleteOutcome::Refused(reason)) => self.refusals.push(reason.clone()),
                        // Of a namespace there are none.
                        _ => self.deleted(*name, producers),
                    }
                }
            }
            Ok(Err(error)) => self.refusals.push(error.0),
            Err(_) => {}
        }
    }
}

/// What a delete is about: the blocks that it may meet, and how it says so.
fn draw_target(rng: &mut Rng) -> (Vec<Name>, Target) {
    let first = rng.below(KEYS - 3);
    let some = first..=first + rng.below(3);
    let keys = |names: &[Name]| names.iter().map(|name| key(*name)).collect();
    match rng.below(6) {
        0 => Aim::All.target(),
        // Of what follows it, those that hang on blocks that are here go with it.
        1 => Aim::Prefix(first).target(),
        2 => {
            let names = in_all_columns(some);
            (names.clone(), Target::Keys { column: None, keys: keys(&names) })
        }
        _ => {
            let column = rng.index(3);
            let names: Vec<Name> = some.map(|n| (column, n)).collect();
            let target = Target::Keys { column: Some(fixture::columns()[column]), keys: keys(&names) };
            (names, target)
        }
    }
}

fn in_all_columns(range: std::ops::RangeInclusive<u64>) -> Vec<Name> {
    let columns = 0..fixture::columns().len();
    columns.flat_map(|column| range.clone().map(move |n| (column, n))).collect()
}

fn delete(
    store: &Store,
    namespace: NamespaceId,
    ledger: &RefCell<Ledger>,
    (names, target): (Vec<Name>, Target),
    deadline: Option<Nanos>,
) -> Delete {
    let mut producers = ledger.borrow_mut().deleting(&names);
    if let Target::Prefix(root) = &target {
        // The others may stay, by whomever they are.
        let others = names.iter().zip(&mut producers).filter(|(name, _)| key(**name) != *root);
        others.for_each(|(_, producers)| producers.clear());
    }
    let ticket = store.delete(DeleteRequest { namespace, target, deadline });
    Delete { names, producers, deadline, ticket }
}

/// Blocks that are put together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Poller {
    /// In which of the fixture's columns.
    pub column: usize,
    /// The first one's key, by number.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Whose bytes.
    pub producer: u64,
    /// When it is acknowledged.
    pub durable: bool,
    /// How far behind a page boundary they lie in memory.
    pub skew: u64,
}

impl Poller {
    fn draw(rng: &mut Rng) -> Self {
        let column = rng.index(3);
        let first = rng.below(KEYS - 3);
        let count = rng.below(3) + 1;
        // Most blocks can be compressed.
        let producer = rng.next_u64() | u64::from(rng.below(4) > 0);
        let skew = [0, 0, 512][rng.index(3)];
        Self { column, first, count, producer, durable: rng.below(3) > 0, skew }
    }
}

/// What is deleted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aim {
    /// The blocks under a key, in all columns.
    Key(u64),
    /// A key, and what hangs on it.
    Prefix(u64),
    /// Everything.
    All,
}

impl Aim {
    fn target(self) -> (Vec<Name>, Target) {
        match self {
            Self::Key(n) => (in_all_columns(n..=n), Target::Keys { column: None, keys: vec![key((0, n))] }),
            Self::Prefix(n) => (in_all_columns(n..=KEYS - 1), Target::Prefix(key((0, n)))),
            Self::All => (in_all_columns(0..=KEYS - 1), Target::Namespace),
        }
    }
}

/// A step of a script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    /// A put.
    Put(Poller),
    /// Two puts at once.
    Pair(Poller, Poller),
    /// A delete.
    Delete(Aim),
    /// A checkpoint.
    Checkpoint,
    /// A compaction of all that can be, cold records included.
    Compact,
}

/// Takes one step, and waits for its answers.
pub async fn act(store: &Store, ledger: &RefCell<Ledger>, act: Act) {
    let Ok(namespace) = register(store) else { panic!("the small model is accepted") };
    let asked = match act {
        Act::Put(one) => vec![Asked::Put(put(store, namespace, ledger, one, None))],
        Act::Pair(one, two) => {
            [one, two].map(|one| Asked::Put(put(store, namespace, ledger, one, None))).into()
        }
        Act::Delete(aim) => vec![Asked::Delete(delete(store, namespace, ledger, aim.target(), None))],
        Act::Checkpoint => {
            if let Err(error) = store.checkpoint().await {
                ledger.borrow_mut().refusals.push(error.0);
            }
            Vec::new()
        }
        Act::Compact => {
            let compacted = store.compact(everything(Some(Duration::ZERO))).await;
            ledger.borrow_mut().compacted(compacted);
            Vec::new()
        }
    };
    let mut asked = asked.into();
    while !VecDeque::is_empty(&asked) {
        settle(store, &mut asked, ledger).await;
    }
}

/// What is left of trouble that has ended, if anything: the store must take a block in each column, unless it is full, and
/// write a checkpoint. A namespace of its own: of another one a delete may have failed half-way.
pub async fn aftermath(store: &Store, ledger: &RefCell<Ledger>) -> Option<String> {
    if let Some(why) = store.health().fault() {
        return Some(format!("it stays latched: {why}"));
    }
    let registered = store.register(&fixture::identity("aftermath"), &fixture::geometry());
    let Ok(namespace) = registered else { return Some("the model is refused".to_owned()) };
    for column in 0..fixture::columns().len() {
        let bring = Poller { column, first: KEYS, count: 1, producer: 77, durable: true, skew: 0 };
        match put(store, namespace, ledger, bring, None).ticket.await {
            Ok(Ok(reply)) => match reply.outcomes.first() {
                Some(BlockOutcome::Refused(reason)) if !matches!(reason, Reason::NoSpace(_)) => {
                    return Some(format!("a put is refused: {reason}"));
                }
                _ => {}
            },
            Ok(Err(error)) => return Some(format!("a put is refused: {error}")),
            Err(_) => return Some("a put is not answered".to_owned()),
        }
    }
    let checkpoint = store.checkpoint().await.err().filter(|error| !matches!(error.0, Reason::NoSpace(_)));
    checkpoint.map(|error| format!("no checkpoint: {error}"))
}

fn put(
    store: &Store,
    namespace: NamespaceId,
    ledger: &RefCell<Ledger>,
    bring: Poller,
    deadline: Option<Nanos>,
) -> Put {
    let Poller { column, first, count, producer, durable, skew } = bring;
    let (group, coordinate) = fixture::columns()[column];
    let shape = fixture::shape(group, coordinate);
    let names: Vec<Name> = (first..first + count).map(|n| (column, n)).collect();
    let from = fixture::place(&shape, names.len() as u32, Style::Blocks, skew).expect("a valid placement");
    for (at, name) in (0..).zip(&names) {
        fixture::write_block(&from, at, &content(*name, producer));
    }
    ledger.borrow_mut().tried(&names, producer);
    let asked = ledger.borrow_mut().next();
    let ticket = store.put(PutRequest {
        namespace,
        group,
        coordinate,
        parent: if first == 0 { Parent::Root } else { Parent::Key(key((column, first - 1))) },
        first_block: None,
        keys: names.iter().map(|name| key(*name)).collect(),
        from,
        layout: None,
        durability: if durable { Durability::Durable } else { Durability::Relaxed },
        expires_after: None,
        origins: None,
        deadline,
    });
    Put { names, durable, asked, deadline, ticket }
}

fn register(store: &Store) -> Result<NamespaceId, Error> {
    store.register(&fixture::identity("campaign"), &fixture::geometry())
}

async fn read_column(store: &Store, namespace: NamespaceId, column: usize, deadline: Option<Nanos>) -> Found {
    let (into, stream) = begin_column(store, namespace, column, deadline);
    end_column(column, &into, &stream).await
}

fn begin_column(
    store: &Store,
    namespace: NamespaceId,
    column: usize,
    deadline: Option<Nanos>,
) -> (Placed, ReadStream) {
    let (group, coordinate) = fixture::columns()[column];
    let shape = fixture::shape(group, coordinate);
    let into = fixture::place(&shape, KEYS as u32, Style::Blocks, 0).expect("a valid placement");
    let stream = store.read(ReadRequest {
        namespace,
        group,
        coordinate,
        keys: (0..KEYS).map(|n| key((column, n))).collect(),
        layers: None,
        order: Order::Blocks,
        into: into.clone(),
        verify: Verify::Always,
        class: Class::Foreground,
        deadline,
    });
    (into, stream.expect("a well-formed read"))
}

async fn end_column(column: usize, into: &Placed, stream: &ReadStream) -> Found {
    let (group, coordinate) = fixture::columns()[column];
    let shape = fixture::shape(group, coordinate);
    let end = loop {
        if let ReadEvent::End(end) = stream.next().await {
            break end;
        }
    };
    let state = |at: u32| match end.failures.iter().find(|(block, _)| *block == at) {
        Some((_, reason)) => Err(reason.clone()),
        None => Ok(fixture::read_block(into, at, &shape)),
    };
    (0..KEYS).map(|n| ((column, n), state(n as u32))).collect()
}

/// Everything that an open store holds.
pub async fn read_all(store: &Store) -> Found {
    let Ok(namespace) = register(store) else { panic!("the small model is accepted") };
    let mut found = Found::new();
    for column in 0..fixture::columns().len() {
        found.extend(read_column(store, namespace, column, None).await);
    }
    found
}

/// How driving a future ended.
#[derive(Debug)]
pub enum Driven<T> {
    /// It is done.
    Done(T),
    /// The disk had done as many operations as were allowed.
    Cut,
    /// Nothing happened any more, or too much.
    Hung(Hang),
}

/// Steps the world until the future is done or the disk has completed `operations` operations.
pub fn drive<T>(world: &SimWorld, operations: u64, future: impl Future<Output = T>) -> Driven<T> {
    observe(world, operations, &mut || (), future)
}

/// The same; `watch` is called each time that the disk has completed another operation.
pub fn observe<T>(
    world: &SimWorld,
    operations: u64,
    watch: &mut dyn FnMut(),
    future: impl Future<Output = T>,
) -> Driven<T> {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    let mut value = None;
    let mut cut = false;
    let mut seen = world.disk().operations().1;
    let ran = world.run_until(STEPS_MAX, || {
        let completed = world.disk().operations().1;
        if completed != seen {
            seen = completed;
            watch();
        }
        cut = completed >= operations;
        if !cut && let Poll::Ready(ready) = future.as_mut().poll(&mut context) {
            value = Some(ready);
        }
        cut || value.is_some()
    });
    match (value, ran) {
        (Some(value), _) => Driven::Done(value),
        (None, Ok(())) => Driven::Cut,
        (None, Err(hang)) => Driven::Hung(hang),
    }
}

/// A store that was opened in a world of its own.
pub struct Opened {
    /// The world.
    pub world: SimWorld,
    /// The store.
    pub store: Store,
    _executors: Executors,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Opened({:?})", self.world)
    }
}

/// A store over what an earlier one left, opened without trouble.
pub fn reopen(seed: Seed, config: &WorldConfig, options: &Options, media: Media) -> Result<Opened, String> {
    let world = SimWorld::with_media(seed.0, config, media);
    let launcher = world.launcher();
    match drive(&world, u64::MAX, Store::open(&launcher, options)) {
        Driven::Done(Ok((store, executors))) => Ok(Opened { world, store, _executors: executors }),
        Driven::Done(Err(error)) => Err(format!("it does not open: {error}")),
        Driven::Cut => Err("cut without a limit".to_owned()),
        Driven::Hung(hang) => Err(format!("opening hangs: {hang}")),
    }
}

/// The books of a store after recovery, to the byte.
fn audit_recovered(opened: &Opened, judge: Judge) -> Result<(), String> {
    opened.world.settle();
    let report = audit::books(&opened.store)?;
    // A disk that lies may hold anything beside what the store knows.
    if judge == Judge::Strict {
        audit::budget(&report)?;
        audit::disk_recovered(&report, &opened.store.segments(), &opened.world.disk().media())?;
    }
    Ok(())
}

fn look(opened: &Opened) -> Result<Found, String> {
    match drive(&opened.world, u64::MAX, read_all(&opened.store)) {
        Driven::Done(found) => Ok(found),
        other => Err(format!("reading ends with {other:?}")),
    }
}

/// Opens a store on what a crash left: it must hold nothing that the ledger forbids. Gives it, still open, with what it
/// holds, and how many operations opening it took.
pub fn verify_once(
    seed: Seed,
    config: &WorldConfig,
    options: &Options,
    image: Media,
    (ledger, judge): (&Ledger, Judge),
) -> Result<(Opened, Found, u64), String> {
    let opened = reopen(seed.child("first"), config, options, image)?;
    let operations = opened.world.disk().operations().1;
    audit_recovered(&opened, judge)?;
    let found = look(&opened)?;
    let mut ledger = ledger.clone();
    ledger.allow_evicted(&found, opened.store.stats().counts.blocks_evicted);
    match ledger.violation(&found, judge) {
        Some(violation) => Err(format!("{violation}\nrecovery: {:?}", opened.store.recovery())),
        None => Ok((opened, found, operations)),
    }
}

/// The same, and again on what that left; both must hold the same. Gives the second, still open, with what it holds.
pub fn verify(
    seed: Seed,
    config: &WorldConfig,
    options: &Options,
    image: Media,
    (ledger, judge): (&Ledger, Judge),
) -> Result<(Opened, Found, u64), String> {
    let (first, found, operations) = verify_once(seed, config, options, image, (ledger, judge))?;
    let first_report = first.store.recovery().to_vec();
    let evicted = first.store.stats().counts.blocks_evicted;
    let again = reopen(seed.child("again"), config, options, first.world.kill())?;
    audit_recovered(&again, judge)?;
    let second = look(&again)?;
    // What a store evicts while it is opened may be here at the next start: its pages were not given back durably yet.
    let evicted_again = again.store.stats().counts.blocks_evicted;
    let absent = |from: &Found, name: &Name| matches!(from[name], Err(Reason::NotHere(_)));
    let left = |from: &Found, other: &Found, name: &Name| absent(from, name) && other[name].is_ok();
    let lefts =
        |from: &Found, other: &Found| from.keys().filter(|name| left(from, other, name)).count() as u64;
    let (some, others) = (lefts(&found, &second) <= evicted, lefts(&second, &found) <= evicted_again);
    let differs = |name: &&Name| {
        let evicted = some && left(&found, &second, name) || others && left(&second, &found, name);
        found[*name] != second[*name] && !evicted
    };
    if let Some(name) = found.keys().find(differs).filter(|_| judge == Judge::Strict) {
        let who = |found: &Found| found[name].as_ref().ok().map(|chunks| producer_of(ledger, *name, chunks));
        return Err(format!(
            "column {}, key {}: {:?} at the first recovery, {:?} at the second, {:?}\nfirst: {:?}\nsecond: {:?}",
            name.0,
            name.1,
            who(&found),
            who(&second),
            ledger.blocks.get(name),
            first_report,
            again.store.recovery()
        ));
    }
    let mut ledger = ledger.clone();
    ledger.allow_evicted(&found, evicted);
    ledger.allow_evicted(&second, evicted_again);
    match ledger.violation(&second, judge) {
        Some(violation) => Err(format!("at the second recovery {violation}")),
        None => Ok((again, second, operations)),
    }
}

/// Whose bytes these are.
fn producer_of(ledger: &Ledger, name: Name, chunks: &[Vec<u8>]) -> Option<u64> {
    let known = ledger.blocks.get(&name)?;
    known.producers.iter().copied().find(|one| content(name, *one) == chunks)
}

/// Reasons that no workload here should be given, whatever the disk does.
pub fn defects(ledger: &Ledger) -> Vec<&Reason> {
    let wrong = |reason: &&Reason| match reason {
        // What the disk did while the store was opened.
        Reason::Directory(_) => false,
        other => matches!(other.kind(), Kind::Bug | Kind::Invalid),
    };
    ledger.refusals.iter().filter(wrong).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::witness::small;

    /// The power cut on real file systems found bytes that a put had brought which was deleted within the same poll.
    #[test]
    fn a_workload_that_is_watched_asks_for_one_thing_a_poll_however_fast_it_is_answered() {
        for mix in Mix::ALL {
            let (world, ledger) =
                (SimWorld::new(5, &WorldConfig::default()), RefCell::new(Ledger::default()));
            let Driven::Done(Ok((store, _executors))) =
                drive(&world, u64::MAX, Store::open(&world.launcher(), &small(2)))
            else {
                panic!("it does not open")
            };
            let (mut rng, work) = (Seed(5).rng(), Work { watched: true, ..Work::new(60, mix) });
            let mut work = std::pin::pin!(work_on(&store, &ledger, &mut rng, work));
            let mut context = Context::from_waker(Waker::noop());
            let mut begun = 0;
            while work.as_mut().poll(&mut context).is_pending() {
                let now = ledger.borrow().begun;
                assert!(now - begun <= 1, "{mix:?}: {} operations in one poll", now - begun);
                begun = now;
                world.settle();
            }
            assert_eq!(ledger.borrow().begun, 60);
            assert!(ledger.borrow().deletes > 0 && ledger.borrow().acknowledged > 0, "{mix:?}");
        }
    }
}
