//! The ledger of a campaign: of every block who has tried to put it and what was promised, and from that what any later
//! state may be. Nothing here knows how a store keeps its blocks.

use std::collections::{BTreeMap, BTreeSet};

use kvarts_contract::api::{BlockOutcome, ContainsRequest, KvStore, Presence, PutReply, Subscription};
use kvarts_contract::error::Reason;
use kvarts_contract::events::{EventKind, Subject};
use kvarts_store::engine::Store;

use super::{Found, Judge, Name, Put, content, key, register};
use crate::fixture;

/// Events that are taken at once.
const EVENTS: usize = 1024;

/// What is known of one block.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// Who has tried to put it.
    pub(super) producers: BTreeSet<u64>,
    /// Producers of whole copies that may lie in other shards beside the one that counts: what is left of the block if
    /// that one goes, by eviction or by a delete that a crash meets after some shards have written it down.
    pub(super) hidden: BTreeSet<u64>,
    /// Whether a put of it was acknowledged as durable, and no delete was asked for since.
    pub(super) durable: bool,
    /// Until when a delete may have met its puts: when one was asked for last, or answered.
    pub(super) deleted: u64,
    /// Deletes that are asked for and not answered.
    pub(super) deleting: u32,
    /// The last request that had been asked for when it was evicted: what was found of it by then promises nothing.
    pub(super) evicted: u64,
}

impl Known {
    /// The copy that counts may be gone.
    pub(super) fn leaves(&mut self) {
        self.durable = false;
        self.producers.append(&mut self.hidden);
    }
}

/// What may be found, and what must be.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub(super) blocks: BTreeMap<Name, Known>,
    /// Requests so far: one that was asked for later than another one's answer has a higher number.
    pub(super) asked: u64,
    /// Blocks whose delete was acknowledged.
    pub deletes: u64,
    /// Reasons that callers were given.
    pub refusals: Vec<Reason>,
    /// Blocks that compactions moved.
    pub moved: u64,
    /// Records that compactions merged.
    pub merged: u64,
    /// Records that compactions encoded.
    pub encoded: u64,
    /// Blocks that were acknowledged as durable.
    pub acknowledged: u64,
    /// Leases that were given.
    pub leases: u64,
    /// Budgets that were given.
    pub budgets: u64,
    /// What the workload waits for: where it hangs, if it does.
    pub waits_for: &'static str,
    /// Operations of the workload that have begun.
    pub begun: usize,
    /// The events of the store that it is about.
    pub(super) heard: Heard,
}

/// What is heard of an open store. A copy of a ledger hears of the next one.
#[derive(Default)]
pub(super) struct Heard(Option<Subscription>);

impl Clone for Heard {
    fn clone(&self) -> Self {
        Self(None)
    }
}

impl std::fmt::Debug for Heard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Heard" } else { "Heard(nothing)" })
    }
}

impl Ledger {
    /// What is wrong with a state, if anything.
    pub fn violation(&self, found: &Found, judge: Judge) -> Option<String> {
        let unknown = Known::default();
        found.iter().find_map(|(name, state)| {
            let known = self.blocks.get(name).unwrap_or(&unknown);
            let problem = match state {
                Ok(chunks) if known.producers.iter().any(|one| content(*name, *one) == *chunks) => None,
                Ok(_) => Some("bytes that were never put".to_owned()),
                Err(_) if judge == Judge::BytesOnly => None,
                Err(Reason::NotHere(_)) if !known.durable => None,
                Err(Reason::NotHere(_)) => Some("acknowledged and lost".to_owned()),
                Err(reason) => Some(format!("half there: {reason}")),
            };
            problem.map(|problem| format!("column {}, key {}: {problem}; {known:?}", name.0, name.1))
        })
    }

    /// Takes a state for granted: what is there stays, and what is not does not come back by itself, unless the store has
    /// evicted something meanwhile: then it may have, as long as its pages are not given back durably.
    pub fn adopt(&mut self, found: &Found, evicted: bool) {
        for (name, state) in found {
            let known = self.blocks.entry(*name).or_default();
            match state {
                Ok(chunks) => {
                    let counts = |one: &u64| content(*name, *one) == *chunks;
                    let (counting, hidden) = known.producers.iter().partition(|one| counts(one));
                    known.producers = counting;
                    known.hidden.extend::<BTreeSet<u64>>(hidden);
                }
                Err(_) if evicted => known.leaves(),
                Err(_) => {
                    known.producers.clear();
                    known.hidden.clear();
                }
            }
            known.durable = state.is_ok();
            known.deleting = 0;
        }
    }

    /// What is promised where either of two ledgers may hold: what both promise.
    pub fn either(&mut self, other: &Self) {
        for known in self
            .blocks
            .iter_mut()
            .filter(|(name, _)| !other.blocks.contains_key(name))
            .map(|(_, known)| known)
        {
            known.durable = false;
        }
        for (name, theirs) in &other.blocks {
            let ours = self.blocks.entry(*name).or_default();
            ours.durable &= theirs.durable;
            ours.producers.extend(&theirs.producers);
            ours.hidden.extend(&theirs.hidden);
        }
    }

    /// An open store has been found to hold this: what was acknowledged and is not there was evicted.
    pub fn allow_evictions(&mut self, found: &Found) {
        for (name, state) in found {
            if let (Some(known), Err(Reason::NotHere(_))) = (self.blocks.get_mut(name), state) {
                known.leaves();
            }
        }
    }

    /// Opening evicts blocks if the bytes that a power cut gave back to files, or that checkpoints need, are more than the
    /// budget has left. At most `evicted` blocks may be absent for that reason.
    pub(super) fn allow_evicted(&mut self, found: &Found, evicted: u64) {
        let absent = |name: &Name| matches!(found.get(name), Some(Err(Reason::NotHere(_))));
        let missed = |(name, known): &(&Name, &mut Known)| known.durable && absent(name);
        let count = self.blocks.iter_mut().filter(missed).count() as u64;
        if count > 0 && count <= evicted {
            self.blocks.iter_mut().filter(missed).for_each(|(_, known)| known.leaves());
        }
    }

    /// A block that is not here was evicted, if the store has evicted any.
    fn allow_absent(&mut self, store: &Store) {
        if store.stats().counts.blocks_evicted == 0 {
            return;
        }
        let Ok(namespace) = register(store) else { return };
        for (name, known) in &mut self.blocks {
            let (group, coordinate) = fixture::columns()[name.0];
            let keys = [key(*name)];
            let request = ContainsRequest { namespace, group, coordinate, keys: &keys, lease: None };
            let here = store.contains(&request).is_ok_and(|reply| reply.presence.contains(&Presence::Here));
            if !here {
                known.leaves();
            }
        }
    }

    /// What an open store has told since the first call: a block whose eviction it recorded may be gone, and no other. What a
    /// store has evicted by the first call, while it was opened, was told before that: what is not here then may be gone.
    ///
    /// # Panics
    /// If events were lost: then nothing can be said.
    pub fn allow_evicted_by(&mut self, store: &Store) {
        if self.heard.0.is_none() {
            self.heard.0 = Some(store.subscribe(None));
            self.allow_absent(store);
        }
        let Some(heard) = &mut self.heard.0 else { return };
        loop {
            let events = heard.try_next(EVENTS).expect("no events are lost between two looks");
            if events.is_empty() {
                return;
            }
            for event in events.iter().filter(|event| event.kind == EventKind::Evicted) {
                let Subject::Block(name) = &event.subject else { continue };
                let column = fixture::columns().iter().position(|one| *one == (name.group, name.coordinate));
                let evicted =
                    |known: &(&Name, &mut Known)| Some(known.0.0) == column && key(*known.0) == name.key;
                if let Some((_, known)) = self.blocks.iter_mut().find(evicted) {
                    known.leaves();
                    known.evicted = self.asked;
                }
            }
        }
    }

    pub(super) fn tried(&mut self, names: &[Name], producer: u64) {
        for name in names {
            self.blocks.entry(*name).or_default().producers.insert(producer);
        }
    }

    pub(super) fn answered(&mut self, put: &Put, reply: PutReply) {
        for (name, outcome) in put.names.iter().zip(reply.outcomes) {
            match outcome {
                BlockOutcome::Stored | BlockOutcome::AlreadyThere => {
                    let known = self.blocks.entry(*name).or_default();
                    // A delete that was asked for after the put may have met it, and so may an eviction.
                    known.durable |= put.durable && put.asked > known.deleted && put.asked > known.evicted;
                    self.acknowledged += u64::from(put.durable);
                }
                BlockOutcome::Refused(reason) => self.refusals.push(reason),
                BlockOutcome::InFlight | BlockOutcome::HeldElsewhere => {}
            }
        }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.asked += 1;
        self.asked
    }

    /// A delete is asked for: from now on the blocks may be gone. Gives who had put them by then.
    pub(super) fn deleting(&mut self, names: &[Name]) -> Vec<BTreeSet<u64>> {
        let asked = self.next();
        let known = names.iter().map(|name| {
            let known = self.blocks.entry(*name).or_default();
            known.leaves();
            known.deleted = asked;
            known.deleting += 1;
            known.producers.clone()
        });
        known.collect()
    }

    /// It was acknowledged: what had been put by then never comes back.
    pub(super) fn deleted(&mut self, name: Name, producers: &BTreeSet<u64>) {
        self.deletes += 1;
        self.blocks.entry(name).or_default().producers.retain(|producer| !producers.contains(producer));
    }

    /// Mixes in what is promised, and nothing of how it came about.
    pub fn promises(&self, into: &mut crate::sim::log::Mixer) {
        for (name, known) in &self.blocks {
            into.word(name.0 as u64);
            into.word(name.1);
            into.word(u64::from(known.durable));
            known.producers.iter().for_each(|producer| into.word(*producer));
            into.word(u64::MAX);
            known.hidden.iter().for_each(|producer| into.word(*producer));
            into.word(u64::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: Name = (2, 4);

    fn found(producer: u64) -> Found {
        Found::from([(NAME, Ok(content(NAME, producer)))])
    }

    fn of_two_producers() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.tried(&[NAME], 1);
        ledger.tried(&[NAME], 2);
        ledger.adopt(&found(2), false);
        ledger
    }

    #[test]
    fn of_two_copies_the_one_that_counts_stays_until_it_may_have_left() {
        let mut ledger = of_two_producers();
        assert_eq!(ledger.violation(&found(2), Judge::Strict), None);
        assert!(ledger.violation(&found(1), Judge::Strict).is_some(), "nothing has happened to the other");
        // Some shards have written the delete down when the power fails.
        let producers = ledger.deleting(&[NAME]);
        assert_eq!(ledger.violation(&found(1), Judge::Strict), None);
        ledger.deleted(NAME, &producers[0]);
        for producer in [1, 2] {
            assert!(ledger.violation(&found(producer), Judge::Strict).is_some(), "it was deleted");
        }
    }

    #[test]
    fn what_was_absent_once_has_no_copy_to_come_back() {
        let mut ledger = of_two_producers();
        ledger.adopt(&Found::from([(NAME, Err(Reason::NotHere(key(NAME))))]), false);
        ledger.deleting(&[NAME]);
        for producer in [1, 2] {
            assert!(ledger.violation(&found(producer), Judge::Strict).is_some());
        }
    }
}
