//! Random histories against a model that is too simple to be wrong.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample;

use super::*;
use kvarts_contract::api::LeaseId;

/// Few keys, in few partitions, some in runs at one home.
const KEYS: usize = 24;

fn prints() -> Vec<BlockFingerprint> {
    let first = |n: u64| ((n % 4) << 62) | ((n / 12) * 0x3fff_ffff_ffff_ffff);
    (0..KEYS as u64).map(|n| BlockFingerprint::from_parts(first(n), n as u32 * 77)).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Reserve(Vec<usize>),
    Commit(sample::Index, u16),
    Abandon(sample::Index),
    Recover(Vec<usize>, u16),
    Move(usize, bool),
    Remove(usize, bool),
    Delete(usize),
    Quarantine(usize, bool),
    Evict(usize, bool),
    Lease { keys: Vec<usize>, lasts: Option<u64>, tenant: u32, cap: u64 },
    Unlock(sample::Index),
    Renew(sample::Index, u64),
    Expire,
    Wait(u64),
    Touch(Vec<usize>, u16),
}

fn step() -> impl Strategy<Value = Step> {
    let key = || 0..KEYS;
    let keys = || vec(key(), 1..12);
    let any_of = any::<sample::Index>;
    // Nine times in ten the location is the right one.
    let right = || prop::bool::weighted(0.9);
    prop_oneof![
        4 => keys().prop_map(Step::Reserve),
        4 => (any_of(), 0..crate::index::EPOCHS).prop_map(|(put, epoch)| Step::Commit(put, epoch)),
        1 => any_of().prop_map(Step::Abandon),
        2 => (keys(), 0..crate::index::EPOCHS).prop_map(|(keys, epoch)| Step::Recover(keys, epoch)),
        2 => (key(), right()).prop_map(|(key, right)| Step::Move(key, right)),
        1 => (key(), right()).prop_map(|(key, right)| Step::Remove(key, right)),
        1 => key().prop_map(Step::Delete),
        1 => (key(), right()).prop_map(|(key, right)| Step::Quarantine(key, right)),
        4 => (key(), right()).prop_map(|(key, right)| Step::Evict(key, right)),
        4 => (keys(), prop::option::weighted(0.8, 0..40u64), 0..3u32, 5..60u64)
            .prop_map(|(keys, lasts, tenant, cap)| Step::Lease { keys, lasts, tenant, cap }),
        1 => any_of().prop_map(Step::Unlock),
        1 => (any_of(), 0..40u64).prop_map(|(lease, lasts)| Step::Renew(lease, lasts)),
        1 => Just(Step::Expire),
        2 => (1..15u64).prop_map(Step::Wait),
        1 => (keys(), 0..crate::index::EPOCHS).prop_map(|(keys, epoch)| Step::Touch(keys, epoch)),
    ]
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum At {
    Pending(usize),
    Live(Location),
    Quarantined(Location),
}

#[derive(Clone, Copy, Debug)]
struct Known {
    at: At,
    heat: Heat,
}

struct ModelLease {
    until: Option<u64>,
    tenant: u32,
    bytes: u64,
}

struct World {
    index: Index,
    prints: Vec<BlockFingerprint>,
    now: u64,
    /// Open puts: ticket and what was reserved. Closed ones stay, to be closed again.
    puts: Vec<(Ticket, Vec<usize>)>,
    known: BTreeMap<usize, Known>,
    live: BTreeMap<RecordId, u16>,
    /// Every lease ever given; those not in `leases` have ended.
    ids: Vec<LeaseId>,
    leases: BTreeMap<LeaseId, ModelLease>,
    pins: BTreeSet<(usize, LeaseId)>,
}

impl World {
    fn new() -> Self {
        Self {
            index: Index::with_partitions(&[1; 32], 0, 2),
            prints: prints(),
            now: 0,
            puts: vec![],
            known: BTreeMap::new(),
            live: BTreeMap::new(),
            ids: vec![],
            leases: BTreeMap::new(),
            pins: BTreeSet::new(),
        }
    }

    fn of(&self, keys: &[usize]) -> Vec<BlockFingerprint> {
        keys.iter().map(|key| self.prints[*key]).collect()
    }

    fn record(&mut self) -> RecordId {
        let id = self.index.records().insert(info(64)).unwrap();
        assert_eq!(self.live.insert(id, 0), None);
        id
    }

    fn forget(&mut self, key: usize) {
        self.known.remove(&key);
        self.pins.retain(|(pinned, _)| *pinned != key);
    }

    fn take(&mut self, location: Location) -> u16 {
        let live = self.live.get_mut(&location.record).unwrap();
        *live -= 1;
        *live
    }

    /// The key's location, or one that it is not at.
    fn location(&self, key: usize, right: bool) -> Location {
        match self.known.get(&key).map(|known| known.at) {
            Some(At::Live(location) | At::Quarantined(location)) if right => location,
            _ => at(RecordId(9999), 3),
        }
    }

    fn is_live(&self, key: usize, location: Location) -> bool {
        self.known.get(&key).is_some_and(|known| known.at == At::Live(location))
    }

    fn in_force(&self, id: LeaseId) -> bool {
        self.leases.get(&id).is_some_and(|lease| lease.until.is_none_or(|until| self.now < until))
    }

    fn leased(&self, key: usize) -> bool {
        self.pins.iter().any(|(pinned, id)| *pinned == key && self.in_force(*id))
    }

    fn end(&mut self, id: LeaseId) {
        self.leases.remove(&id);
        self.pins.retain(|(_, lease)| *lease != id);
    }

    fn sweep(&mut self) -> usize {
        let ended: Vec<_> = self.leases.keys().copied().filter(|id| !self.in_force(*id)).collect();
        ended.iter().for_each(|id| self.end(*id));
        ended.len()
    }

    fn pinned(&self, tenant: u32) -> u64 {
        self.leases.values().filter(|lease| lease.tenant == tenant).map(|lease| lease.bytes).sum()
    }

    fn expected(&self, key: usize) -> Lookup {
        match self.known.get(&key).map(|known| known.at) {
            None => Lookup::Absent,
            Some(At::Pending(_)) => Lookup::Pending,
            Some(At::Live(location)) => Lookup::Live(location),
            Some(At::Quarantined(_)) => Lookup::Quarantined,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Reserve(keys) => self.reserve(keys),
            Step::Commit(put, epoch) if !self.puts.is_empty() => {
                let put = put.index(self.puts.len());
                self.commit(put, epoch);
            }
            Step::Abandon(put) if !self.puts.is_empty() => {
                let put = put.index(self.puts.len());
                let (ticket, keys) = self.puts[put].clone();
                self.index.abandon(ticket, &self.of(&keys));
                self.known.retain(|_, known| known.at != At::Pending(put));
            }
            Step::Recover(keys, epoch) => self.recover(&keys, epoch),
            Step::Move(..) | Step::Remove(..) | Step::Delete(_) | Step::Quarantine(..) | Step::Evict(..) => {
                self.change(step);
            }
            Step::Lease { keys, lasts, tenant, cap } => self.lease(&keys, lasts, tenant, cap),
            Step::Unlock(lease) if !self.ids.is_empty() => {
                let id = self.ids[lease.index(self.ids.len())];
                assert_eq!(self.index.unlock(id), self.leases.contains_key(&id));
                self.end(id);
            }
            Step::Renew(lease, lasts) if !self.ids.is_empty() => {
                let id = self.ids[lease.index(self.ids.len())];
                let until = self.now + lasts;
                let expected = if self.in_force(id) { Ok(()) } else { Err(LeaseError::Expired) };
                assert_eq!(self.index.renew(id, Nanos(until), Nanos(self.now)), expected);
                if expected.is_ok() {
                    self.leases.get_mut(&id).unwrap().until = Some(until);
                }
            }
            Step::Expire => {
                let swept = self.index.expire(Nanos(self.now)).leases;
                assert_eq!(swept, self.sweep());
            }
            Step::Wait(time) => self.now += time,
            Step::Touch(keys, epoch) => {
                self.index.touch(&self.of(&keys), epoch);
                for key in keys {
                    if let Some(known) = self.known.get_mut(&key) {
                        known.heat =
                            Heat { frequency: (known.heat.frequency + 1).min(3), epoch, ..known.heat };
                    }
                }
            }
            Step::Commit(..) | Step::Abandon(_) | Step::Unlock(_) | Step::Renew(..) => {}
        }
    }

    fn reserve(&mut self, keys: Vec<usize>) {
        let mut out = Vec::new();
        let ticket = self.index.reserve(&self.of(&keys), &mut out);
        for (key, out) in keys.iter().zip(out) {
            let expected = match self.known.get(key).map(|known| known.at) {
                Some(At::Live(location)) => Reservation::Live(location),
                Some(At::Pending(_)) => Reservation::InFlight,
                Some(At::Quarantined(_)) | None => {
                    let heat = self.known.get(key).map(|known| known.heat).unwrap_or_default();
                    self.known.insert(*key, Known { at: At::Pending(self.puts.len()), heat });
                    Reservation::Reserved
                }
            };
            assert_eq!(out, expected);
        }
        self.puts.push((ticket, keys));
    }

    fn commit(&mut self, put: usize, epoch: u16) {
        let (ticket, keys) = self.puts[put].clone();
        let record = self.record();
        let lost = self.index.commit(ticket, record, &self.of(&keys), epoch).unwrap();
        let mut expected = Vec::new();
        for (block, key) in (0u16..).zip(&keys) {
            match self.known.get_mut(key) {
                Some(known) if known.at == At::Pending(put) => {
                    *known =
                        Known { at: At::Live(at(record, block)), heat: Heat { epoch, ..Heat::default() } };
                    *self.live.get_mut(&record).unwrap() += 1;
                }
                _ => expected.push(block),
            }
        }
        assert_eq!(lost, expected);
    }

    fn recover(&mut self, keys: &[usize], epoch: u16) {
        let record = self.record();
        let heat = Heat { frequency: (epoch % 4) as u8, epoch, continued: epoch.is_multiple_of(3) };
        let found: Vec<_> = (0..)
            .zip(keys)
            .map(|(block, key)| Recovered { print: self.prints[*key], location: at(record, block), heat })
            .collect();
        let mut conflicts = Vec::new();
        let mut gathering = self.index.gathering(0);
        found.iter().for_each(|one| gathering.push(*one));
        self.index.insert_live(&mut gathering, &mut conflicts).unwrap();
        let mut expected = Vec::new();
        for (key, found) in keys.iter().zip(&found) {
            if self.known.contains_key(key) {
                expected.push((*found, self.expected(*key)));
            } else {
                self.known.insert(*key, Known { at: At::Live(found.location), heat });
                *self.live.get_mut(&record).unwrap() += 1;
            }
        }
        let mut conflicts: Vec<_> =
            conflicts.into_iter().map(|(found, entry)| (found, entry.state)).collect();
        conflicts.sort_unstable_by_key(|(found, _)| found.location);
        assert_eq!(conflicts, expected);
    }

    fn change(&mut self, step: Step) {
        match step {
            Step::Move(key, right) => {
                let (old, new) = (self.location(key, right), at(self.record(), 7));
                let moved = self.index.replace_location(self.prints[key], old, new).unwrap();
                let expected = self.is_live(key, old).then(|| {
                    self.known.get_mut(&key).unwrap().at = At::Live(new);
                    *self.live.get_mut(&new.record).unwrap() += 1;
                    self.take(old)
                });
                assert_eq!(moved, expected);
            }
            Step::Remove(key, right) => {
                let location = self.location(key, right);
                let left = self.index.remove(self.prints[key], location);
                assert_eq!(left, self.removed(key, location));
            }
            Step::Delete(key) => {
                let expected = match self.expected(key) {
                    Lookup::Absent => Deleted::Absent,
                    Lookup::Pending => Deleted::Pending,
                    Lookup::Quarantined => Deleted::Quarantined,
                    Lookup::Live(location) => Deleted::Live { location, left: self.take(location) },
                };
                assert_eq!(self.index.delete(self.prints[key]), expected);
                self.forget(key);
            }
            Step::Quarantine(key, right) => {
                let location = self.location(key, right);
                let left = self.index.quarantine(self.prints[key], location);
                let expected = self.is_live(key, location).then(|| {
                    self.pins.retain(|(pinned, _)| *pinned != key);
                    self.known.get_mut(&key).unwrap().at = At::Quarantined(location);
                    self.take(location)
                });
                assert_eq!(left, expected);
            }
            Step::Evict(key, right) => {
                let location = self.location(key, right);
                let became = self.index.try_evict(self.prints[key], location, Nanos(self.now));
                if self.is_live(key, location) && self.leased(key) {
                    assert_eq!(became, Eviction::Busy);
                } else {
                    let left = self.removed(key, location);
                    assert_eq!(became, left.map_or(Eviction::Gone, |left| Eviction::Evicted { left }));
                }
            }
            _ => {}
        }
    }

    /// What removal at a location does: the live blocks left if one was removed.
    fn removed(&mut self, key: usize, location: Location) -> Option<u16> {
        match self.known.get(&key)?.at {
            At::Live(there) if there == location => {
                self.forget(key);
                Some(self.take(location))
            }
            At::Quarantined(there) if there == location => {
                self.forget(key);
                None
            }
            _ => None,
        }
    }

    fn lease(&mut self, keys: &[usize], lasts: Option<u64>, tenant: u32, cap: u64) {
        let until = lasts.map(|lasts| self.now + lasts);
        let terms = LeaseTerms { until: until.map(Nanos), tenant, cap_bytes: cap };
        // A block costs as much as its place in the request.
        let bytes_of = |place: usize| place as u64;
        let mut out = Vec::new();
        let prints = self.of(keys);
        let lease = self.index.match_and_lease(&prints, terms, Nanos(self.now), bytes_of, &mut out);
        self.sweep();
        let expected: Vec<_> = keys.iter().map(|key| self.expected(*key)).collect();
        assert_eq!(out, expected);
        let live = |place: &usize| matches!(out[*place], Lookup::Live(_));
        let held: Vec<_> = (0..keys.len()).filter(live).collect();
        let bytes = held.iter().map(|place| bytes_of(*place).max(1)).sum::<u64>();
        let wanted = self.pinned(tenant) + bytes;
        match lease {
            Ok(None) => assert!(held.is_empty()),
            Err(error) => {
                assert!(!held.is_empty() && wanted > cap);
                assert_eq!(error, LeaseError::Cap { limit: cap, wanted });
            }
            Ok(Some(id)) => {
                assert!(!held.is_empty() && wanted <= cap);
                self.ids.push(id);
                self.leases.insert(id, ModelLease { until, tenant, bytes });
                self.pins.extend(held.into_iter().map(|place| (keys[place], id)));
            }
        }
    }

    fn check(&self) {
        let mut found = Vec::new();
        self.index.lookup_many(&self.prints, &mut found);
        for (key, print) in self.prints.iter().enumerate() {
            assert_eq!(found[key], self.expected(key), "key {key}");
            assert_eq!(self.index.lookup(*print), found[key], "key {key}");
            let entry = self.index.get(*print);
            assert_eq!(
                entry.map(|entry| entry.heat),
                self.known.get(&key).map(|known| known.heat),
                "key {key}"
            );
            let hint = self.pins.iter().any(|(pinned, _)| *pinned == key);
            assert_eq!(entry.is_some_and(|entry| entry.leased), hint, "key {key}");
            assert_eq!(self.index.is_leased(*print, Nanos(self.now)), self.leased(key), "key {key}");
        }
        for (id, live) in &self.live {
            assert_eq!(self.index.records().get(*id).map(|info| info.live), Some(*live));
        }
        assert_eq!(self.index.leases(), self.leases.len());
        (0..3).for_each(|tenant| assert_eq!(self.index.pinned_bytes(tenant), self.pinned(tenant)));
        assert_eq!(self.index.memory().blocks, self.known.len());
    }
}

proptest! {
    #[test]
    fn any_history_ends_as_in_the_model(steps in vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            world.check();
        }
        let (mut some, mut all) = (Vec::new(), BTreeMap::new());
        for partition in 0..world.index.partitions() {
            world.index.snapshot(partition, &mut some);
            all.extend(some.iter().map(|entry| (entry.print, entry.state)));
        }
        let expected: BTreeMap<_, _> =
            world.known.keys().map(|key| (world.prints[*key], world.expected(*key))).collect();
        prop_assert_eq!(all, expected);
        // When all leases end, nothing of them is left.
        for id in &world.ids {
            world.index.unlock(*id);
        }
        prop_assert_eq!(world.index.leases(), 0);
        let leased = |print: &BlockFingerprint| world.index.get(*print).is_some_and(|entry| entry.leased);
        prop_assert!(!world.prints.iter().any(leased));
    }
}
