//! What was put where and by whom, what was deleted, who was told to own what, and what must not have happened.
//!
//! A delete is one of the cluster: from its acknowledgement on no node that has been told of it gives what had been put before it, and
//! none does from when it is told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cluster::deletes::{CLOCKS_APART_MS, Known, Name};
use kvarts_cluster::ownership::Token;
use kvarts_contract::api::{Placed, ReadEnd, ReadEvent, ReadStream};
use kvarts_contract::clock::Nanos;
use kvarts_layout::plan::Order;
use kvarts_layout::{BlockKey, BlockShape};

use crate::conformance::pages;
use crate::fixture;

/// How long a node may believe that it owns a chain.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    place: usize,
    token: Token,
    from: Nanos,
    until: Nanos,
    /// And how long the node that decides may, which does not hear of everything.
    over: Nanos,
    /// It does not go on with it, whatever it is still answered.
    is_given_up: bool,
}

/// What a producer put: the chunks of a block.
type Content = Arc<Vec<Vec<u8>>>;

/// How long a question may be on its way, and its answer be lost.
const LOST: Duration = Duration::from_secs(20);

/// How much later than a delete something must have been put at a node that has not heard of it to be sure to live: clocks may be
/// apart, and a put takes time.
const APART: Duration = Duration::from_millis(CLOCKS_APART_MS + 1000);
/// How much later than its time a production may still be given.
const ENDS_LATE: Duration = Duration::from_millis(300);

/// A delete, or a shorter time to live.
struct Deleting {
    /// Of everything if none are named.
    keys: Option<Vec<BlockKey>>,
    began: Nanos,
    /// When blocks are over that have less time to live, once that is known.
    over: Option<Nanos>,
    /// What had been put before it.
    dead: Vec<(BlockKey, u64)>,
    /// Who may not have heard of it.
    untold: BTreeSet<usize>,
    /// What nodes know it by, once it is acknowledged.
    name: Option<Name>,
}

impl Deleting {
    fn is_of(&self, key: &BlockKey) -> bool {
        self.keys.as_ref().is_none_or(|keys| keys.contains(key))
    }
}

#[derive(Default)]
struct Notes {
    productions: BTreeMap<BlockKey, BTreeSet<u64>>,
    /// Productions whose put was answered, and when each is over that has a time to live.
    answered: BTreeMap<u64, Option<Nanos>>,
    /// Of each place what was acknowledged as durable and not deleted since.
    durable: BTreeMap<usize, BTreeSet<BlockKey>>,
    deletes: Vec<Deleting>,
    /// What must not be given at a place, from when on: what was deleted, and what was to end sooner.
    dead: BTreeMap<(usize, BlockKey, u64), Nanos>,
    ended: BTreeMap<(usize, BlockKey, u64), Nanos>,
    chains: BTreeMap<u64, Vec<Held>>,
    contents: BTreeMap<(BlockKey, u64), Content>,
    violations: Vec<String>,
    under_way: u64,
    /// Reads that have not ended: by when each must have, and what it is.
    due: BTreeMap<u64, (Nanos, String)>,
    reads: u64,
    whole: u64,
    leases: u64,
}

/// The ledger of a simulation of nodes. Clones are the same one.
#[derive(Clone, Default)]
pub struct Book(Arc<Mutex<Notes>>);

/// A call that is under way.
#[derive(Debug)]
pub struct UnderWay(Book);

/// A read that has not ended.
#[derive(Debug)]
pub struct Due(Book, u64);

impl Drop for Due {
    fn drop(&mut self) {
        self.0.lock().due.remove(&self.1);
    }
}

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Book({:?})", self.counts())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.lock().under_way -= 1;
    }
}

impl Book {
    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something must not have happened.
    pub fn violation(&self, what: String) {
        self.lock().violations.push(what);
    }

    /// What was wrong first.
    pub fn first_violation(&self) -> Option<String> {
        self.lock().violations.first().cloned()
    }

    /// A call begins.
    pub fn begin(&self) -> UnderWay {
        self.lock().under_way += 1;
        UnderWay(self.clone())
    }

    /// The read of this number begins, and must have ended at this time.
    pub fn ends_by(&self, number: u64, due: Nanos, what: &str) -> Due {
        self.lock().due.insert(number, (due, what.to_owned()));
        Due(self.clone(), number)
    }

    /// A read that should have ended.
    pub fn overdue(&self, now: Nanos) -> Option<String> {
        let notes = self.lock();
        let late = notes.due.values().find(|(due, _)| *due < now);
        late.map(|(due, what)| format!("{what} should have ended at {due:?}, and has not at {now:?}"))
    }

    /// Calls that have not ended.
    pub fn under_way(&self) -> u64 {
        self.lock().under_way
    }

    /// Reads, blocks that they gave, and leases that were granted.
    pub fn counts(&self) -> [u64; 3] {
        let notes = self.lock();
        [notes.reads, notes.whole, notes.leases]
    }

    /// A put begins: these bytes may be anywhere from now on. Gives how many deletes had begun.
    pub fn put(&self, keys: &[BlockKey], producer: u64) -> usize {
        let mut notes = self.lock();
        for key in keys {
            notes.productions.entry(*key).or_default().insert(producer);
        }
        notes.deletes.len()
    }

    /// A put was answered, whose blocks may live so long from now.
    pub fn answered(&self, producer: u64, ttl: Option<Duration>, now: Nanos) {
        self.lock().answered.insert(producer, ttl.map(|ttl| now.plus(ttl + ENDS_LATE)));
    }

    /// A durable put that began then was acknowledged, before which `deletes` deletes had begun.
    pub fn stored(&self, place: usize, key: BlockKey, (deletes, began): (usize, Nanos)) {
        let mut notes = self.lock();
        let meets = |delete: &Deleting| {
            delete.is_of(&key) && delete.untold.contains(&place) && delete.began.plus(APART) > began
        };
        if notes.deletes.len() == deletes && !notes.deletes.iter().any(meets) {
            notes.durable.entry(place).or_default().insert(key);
        }
    }

    /// A delete, or a shorter time to live, begins in a cluster of that number of places; of everything if no keys are named. Gives
    /// its number.
    pub fn delete(&self, places: usize, keys: Option<&[BlockKey]>, now: Nanos) -> usize {
        let mut notes = self.lock();
        let (keys, untold) = (keys.map(<[BlockKey]>::to_vec), (0..places).collect());
        let mut delete = Deleting { keys, began: now, over: None, dead: Vec::new(), untold, name: None };
        let all = notes.productions.iter().filter(|(key, _)| delete.is_of(key));
        let all = all.flat_map(|(key, producers)| producers.iter().map(|producer| (*key, *producer)));
        let answered: Vec<_> = all.filter(|(_, producer)| notes.answered.contains_key(producer)).collect();
        delete.dead = answered;
        notes.durable.values_mut().for_each(|durable| durable.retain(|key| !delete.is_of(key)));
        notes.deletes.push(delete);
        notes.deletes.len() - 1
    }

    /// It was acknowledged under this name, and these places have it. Blocks that have less time to live are over then.
    pub fn deleted(&self, number: usize, name: Name, told: &[usize], (now, over): (Nanos, Option<Nanos>)) {
        let mut notes = self.lock();
        let delete = &mut notes.deletes[number];
        delete.name = Some(name);
        delete.over = over.map(|over| over.plus(ENDS_LATE));
        drop(notes);
        told.iter().for_each(|place| self.tell(*place, |at, _| at == number, now));
    }

    /// A store is opened again: it may have forgotten that blocks were to end sooner, and gives them to others until they would have.
    pub fn reopened(&self) {
        let mut notes = self.lock();
        notes.ended.clear();
        notes
            .deletes
            .iter_mut()
            .filter(|delete| delete.over.is_some())
            .for_each(|delete| delete.dead.clear());
    }

    /// A place has heard of this.
    pub fn told(&self, place: usize, known: &Known, now: Nanos) {
        self.tell(place, |_, (node, number)| known.get(&node).is_some_and(|last| *last >= number), now);
    }

    fn tell(&self, place: usize, is_it: impl Fn(usize, Name) -> bool, now: Nanos) {
        let mut notes = self.lock();
        let Notes { deletes, dead, ended, .. } = &mut *notes;
        for (at, delete) in (0..).zip(deletes) {
            if delete.name.is_some_and(|name| is_it(at, name)) && delete.untold.remove(&place) {
                let gone = if delete.over.is_some() { &mut *ended } else { &mut *dead };
                for (key, producer) in &delete.dead {
                    let since = gone.entry((place, *key, *producer)).or_insert(Nanos(u64::MAX));
                    *since = delete.over.unwrap_or(now).max(now).min(*since);
                }
            }
        }
    }

    /// What a read must not have given that began then, at this place.
    fn is_gone(&self, (place, began): (usize, Nanos), key: &BlockKey, producer: u64) -> bool {
        let notes = self.lock();
        let all = [&notes.dead, &notes.ended];
        let is_gone = |gone: &&BTreeMap<_, Nanos>| {
            gone.get(&(place, *key, producer)).is_some_and(|since| *since <= began)
        };
        all.iter().any(is_gone)
            || notes.answered.get(&producer).copied().flatten().is_some_and(|end| end < began)
    }

    /// What must be at a place.
    pub fn durable(&self, place: usize) -> Vec<BlockKey> {
        self.lock().durable.get(&place).into_iter().flatten().copied().collect()
    }

    fn contents(&self, key: &BlockKey) -> Vec<(u64, Content)> {
        let ((group, coordinate), mut notes) = (pages(), self.lock());
        let producers: Vec<u64> = notes.productions.get(key).into_iter().flatten().copied().collect();
        let content = |producer| {
            let shape = fixture::shape(group, coordinate);
            let made = || Arc::new(fixture::content(key, group, coordinate, producer, &shape));
            (producer, Arc::clone(notes.contents.entry((*key, producer)).or_insert_with(made)))
        };
        producers.into_iter().map(content).collect()
    }

    /// Who put the first layers of a block, as they are now.
    fn producers(
        &self,
        key: &BlockKey,
        placed: &Placed,
        block: u32,
        layers: u32,
        shape: &BlockShape,
    ) -> Vec<u64> {
        let found = fixture::read_block(placed, block, shape);
        let of = fixture::layer_of_chunks(shape);
        let is_it = |content: &Content| {
            content.iter().zip(&found).zip(&of).all(|((put, found), layer)| *layer >= layers || put == found)
        };
        let all = self.contents(key).into_iter().filter(|(_, content)| is_it(content));
        all.map(|(producer, _)| producer).collect()
    }

    /// Whether the first layers of a block are what one producer put.
    fn is_one_production(
        &self,
        key: &BlockKey,
        placed: &Placed,
        block: u32,
        layers: u32,
        shape: &BlockShape,
    ) -> bool {
        // Where no layer arrived nothing can be wrong, whether the block was put or not.
        layers == 0 || !self.producers(key, placed, block, layers, shape).is_empty()
    }

    /// Looks at blocks that a read gave that began then at this place: none was deleted or over by then.
    pub fn look_for_the_gone(
        &self,
        what: &str,
        at: (usize, Nanos),
        (keys, placed, good): (&[BlockKey], &Placed, &[u32]),
        shape: &BlockShape,
    ) {
        let all = shape.layers().len() as u32;
        for block in good {
            let key = &keys[*block as usize];
            let producers = self.producers(key, placed, *block, all, shape);
            if !producers.is_empty() && producers.iter().all(|producer| self.is_gone(at, key, *producer)) {
                self.violation(format!("{what}: block {block}, put by {producers:?}, was deleted or over"));
            }
        }
    }

    /// Looks at what a read announces, until it ends.
    pub async fn look(
        &self,
        what: &str,
        (keys, placed, order): (&[BlockKey], &Placed, Order),
        stream: &ReadStream,
        shape: &BlockShape,
    ) -> (Vec<u32>, ReadEnd) {
        let all = shape.layers().len() as u32;
        let mut good = Vec::new();
        let wrong = |block: u32, when: &str| {
            self.violation(format!("{what}: block {block} {when} is not what one producer put"));
        };
        loop {
            match std::future::poll_fn(|context| stream.poll_next(context)).await {
                ReadEvent::Layer { layer, blocks } => {
                    for block in 0..blocks {
                        if !self.is_one_production(&keys[block as usize], placed, block, layer + 1, shape) {
                            wrong(block, "of an announced layer");
                        }
                    }
                }
                ReadEvent::Block(block) => {
                    good.push(block);
                    if !self.is_one_production(&keys[block as usize], placed, block, all, shape) {
                        wrong(block, "that was announced");
                    }
                }
                ReadEvent::End(end) => {
                    let (layers, blocks) = (end.usable_layers, end.usable_blocks);
                    if order == Order::Layers {
                        good = (0..if layers == all { blocks } else { 0 }).collect();
                        let is_wrong = |block: &u32| {
                            !self.is_one_production(&keys[*block as usize], placed, *block, layers, shape)
                        };
                        (0..blocks).filter(is_wrong).for_each(|block| wrong(block, "of the end"));
                    }
                    let mut notes = self.lock();
                    notes.reads += 1;
                    notes.whole += good.len() as u64;
                    return (good, end);
                }
                ReadEvent::Released => {}
            }
        }
    }

    /// Looks at the same memory again, later: it must not have been written to.
    pub fn look_again(
        &self,
        what: &str,
        keys: &[BlockKey],
        placed: &Placed,
        good: &[u32],
        shape: &BlockShape,
    ) {
        let all = shape.layers().len() as u32;
        for block in good {
            if !self.is_one_production(&keys[*block as usize], placed, *block, all, shape) {
                self.violation(format!("{what}: block {block} was written to after the read had ended"));
            }
        }
    }

    /// A node was told that it owns a chain from now on, for what is left of `left` since it asked.
    pub fn owns(&self, chain: u64, place: usize, token: Token, (asked, now): (Nanos, Nanos), left: Duration) {
        let held = Held {
            place,
            token,
            from: now,
            until: asked.plus(left),
            over: now.plus(left),
            is_given_up: false,
        };
        let mut notes = self.lock();
        notes.leases += 1;
        let before = notes.chains.entry(chain).or_default();
        let overlap = before.iter().find(|other| other.place != place && other.until > now).copied();
        let later = before.iter().find(|other| other.token > token && other.from < asked).copied();
        // Answers may pass each other: of its own leases a node goes by the latest, and by none that it has given up.
        let own = before.iter().filter(|other| other.place == place);
        let is_passed = { own }.any(|own| own.token > token || own.token == token && own.is_given_up);
        let overlap = overlap.filter(|_| !is_passed);
        if !is_passed {
            before.push(held);
        }
        for (other, what) in
            overlap.map(|it| (it, "two owners")).into_iter().chain(later.map(|it| (it, "an old token")))
        {
            notes.violations.push(format!("chain {chain}: {what}: {other:?} and {held:?}"));
        }
    }

    /// A node stores blocks as the owner of their chain: it is that one, and no other is.
    pub fn stores_as_owner(&self, chain: u64, place: usize, now: Nanos) {
        let mut notes = self.lock();
        let all = || notes.chains.get(&chain).into_iter().flatten().filter(|held| held.until > now);
        let is_own = all().any(|held| held.place == place);
        let other = all().find(|held| held.place != place).copied();
        if let Some(other) = other {
            notes.violations.push(format!("chain {chain}: node {place} stores as owner, beside {other:?}"));
        } else if !is_own {
            notes.violations.push(format!("chain {chain}: node {place} stores as owner, and is none"));
        }
    }

    /// A node gives a chain up, or is gone.
    pub fn gives_up(&self, chain: Option<u64>, place: usize, now: Nanos) {
        let mut notes = self.lock();
        let all = notes.chains.iter_mut().filter(|(number, _)| chain.is_none_or(|chain| chain == **number));
        let held = all.flat_map(|(_, held)| held).filter(|held| held.place == place);
        held.for_each(|held| (held.until, held.is_given_up) = (held.until.min(now), true));
    }

    /// The lease of a chain that a node has now.
    pub fn last(&self, chain: u64, place: usize, now: Nanos) -> Option<Token> {
        let notes = self.lock();
        let held = notes.chains.get(&chain)?.iter().rev().find(|held| held.place == place)?;
        (held.until > now).then_some(held.token)
    }

    /// A lease that a node had of a chain before the one that is in force now.
    pub fn earlier(&self, chain: u64, place: usize, now: Nanos) -> Option<Token> {
        let notes = self.lock();
        let own = || notes.chains.get(&chain).into_iter().flatten().filter(|held| held.place == place);
        let last = own().filter(|held| held.until > now).map(|held| held.token).max()?;
        own().map(|held| held.token).find(|token| *token < last)
    }

    /// A node asks that a lease goes on for so long, whether it hears of the answer or not.
    pub fn asks(&self, chain: u64, token: Token, hold: Duration, now: Nanos) {
        let mut notes = self.lock();
        let held = notes.chains.get_mut(&chain).into_iter().flatten().filter(|held| held.token == token);
        held.for_each(|held| held.over = held.over.max(now.plus(hold + LOST)));
    }

    /// A node gave this lease of a chain up, and was told that no node owns the chain.
    pub fn is_given_up(&self, chain: u64, token: Token, now: Nanos) {
        let mut notes = self.lock();
        let held = notes.chains.get_mut(&chain).into_iter().flatten().filter(|held| held.token == token);
        held.for_each(|held| held.over = held.over.min(now));
    }

    /// A node was told who owns a chain: that lease must not have been over before.
    pub fn is_owned(&self, chain: u64, token: Token, asked: Nanos) {
        let mut notes = self.lock();
        let all = notes.chains.get(&chain).into_iter().flatten().filter(|held| held.token == token);
        let held = all.max_by_key(|held| held.over).copied();
        if let Some(held) = held.filter(|held| held.over.plus(Duration::from_millis(1)) < asked) {
            notes
                .violations
                .push(format!("chain {chain}: {held:?} is over, and was still told at {asked:?}"));
        }
    }
}
