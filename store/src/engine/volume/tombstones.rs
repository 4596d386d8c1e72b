//! What was deleted: tombstones and namespace epochs of one shard, kept in memory for as long as a record that they
//! kill may lie on disk.
//!
//! Invariant: of two tombstones over the same blocks the one that reaches higher stays.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use kvarts_layout::format::body::{Epoch, Tombstone};
use kvarts_layout::format::footer::{Content, Defined, Entry};
use kvarts_layout::format::marks::{MARK_KEY, Mark};
use kvarts_layout::format::record::Body;
use kvarts_layout::{BlockKey, NamespaceId};

/// Which groups and coordinates of a key a tombstone is for; `None` for all.
type Scope = (Option<u32>, Option<u64>);

/// Memory of one tombstone, with its share of a node of the map.
const TOMBSTONE_BYTES: usize = 112;
/// Below the 128 KiB from which glibc takes a piece outside of the heap, and returns the end of the heap to the kernel.
const HEAP_BYTES_MAX: usize = 96 << 10;

/// What was deleted of one namespace: keys, for which groups and coordinates, and below which sequence.
type Keys = BTreeMap<(BlockKey, Scope), u64>;

/// Deletes as a checkpoint has them, but for the tombstones ([`TombstoneSet::some`]).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Listed {
    /// The namespaces of the tombstones under short ids.
    pub(crate) names: Vec<Defined>,
    pub(crate) epochs: Vec<Epoch>,
}

/// Where a list of tombstones goes on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Behind(Option<(BlockKey, Scope)>);

/// Deletes of some shards, for those of a directory that was out when they were made: of each only what it is for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graves {
    blocks: BTreeSet<Grave>,
    namespaces: BTreeSet<NamespaceId>,
}

/// A deleted key, and for which groups and coordinates.
type Grave = (NamespaceId, BlockKey, Scope);

impl Graves {
    /// Takes in up to `most` of a shard's tombstones of a namespace, those behind `behind`. Gives how many there were, and where to go
    /// on; `None` at the end.
    pub(crate) fn add_some(
        &mut self,
        dead: &TombstoneSet,
        namespace: NamespaceId,
        (behind, most): (Behind, usize),
    ) -> (usize, Option<Behind>) {
        let Some(keys) = dead.blocks.get(&namespace) else { return (0, None) };
        let from = behind.0.map_or(Bound::Unbounded, Bound::Excluded);
        let (mut last, mut count) = (None, 0);
        for &(key, scope) in keys.range((from, Bound::Unbounded)).take(most).map(|(at, _)| at) {
            self.blocks.insert((namespace, key, scope));
            (last, count) = (Some((key, scope)), count + 1);
        }
        (count, (count == most).then_some(Behind(last)))
    }

    /// Takes in the namespaces that a shard knows to be deleted, of which there are few.
    pub(crate) fn add_namespaces(&mut self, dead: &TombstoneSet) {
        self.namespaces.extend(dead.namespaces.keys());
    }

    /// Takes in what others have.
    pub(crate) fn join(&mut self, other: Self) {
        self.blocks.extend(other.blocks);
        self.namespaces.extend(other.namespaces);
    }
}

/// Deletes that recovery must not forget.
#[derive(Clone, Debug, Default)]
pub(crate) struct TombstoneSet {
    blocks: BTreeMap<NamespaceId, Keys>,
    namespaces: BTreeMap<NamespaceId, u64>,
    /// Tombstones in `blocks`.
    tombstones: usize,
    version: u64,
}

/// Makes room in the heap for small allocations that follow: one of this size, freed at once. For small ones glibc extends the heap of
/// a thread other than the first by one page a system call, and each call waits for the page faults of all other threads. The larger one
/// extends the heap once, and glibc keeps the freed memory.
fn extend_heap(bytes: usize) {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(bytes.min(HEAP_BYTES_MAX))));
}

/// The tombstones of one key.
fn of_key(keys: &Keys, key: BlockKey) -> impl Iterator<Item = (&Scope, &u64)> {
    let all = (key, (None, None))..=(key, (Some(u32::MAX), Some(u64::MAX)));
    keys.range(all).map(|((_, scope), below)| (scope, below))
}

impl TombstoneSet {
    /// Notes that records of a block with a sequence below `below` are dead.
    pub(crate) fn bury(&mut self, namespace: NamespaceId, tombstone: &Tombstone) {
        self.version += 1;
        let scope = (tombstone.group, tombstone.coordinate);
        let keys = self.blocks.entry(namespace).or_default();
        let known = keys.len();
        let below = keys.entry((BlockKey(tombstone.key), scope)).or_default();
        *below = tombstone.below.max(*below);
        self.tombstones += keys.len() - known;
    }

    /// Notes that records of a namespace with a sequence below `below` are dead.
    pub(crate) fn bury_all(&mut self, epoch: &Epoch) {
        self.version += 1;
        let below = self.namespaces.entry(NamespaceId(epoch.namespace)).or_default();
        *below = epoch.below.max(*below);
    }

    /// Notes what a record of this namespace says.
    pub(crate) fn bury_body(&mut self, namespace: NamespaceId, body: &Body) {
        match body {
            Body::Tombstones(tombstones) => {
                extend_heap(tombstones.entries.len() * TOMBSTONE_BYTES);
                tombstones.entries.iter().for_each(|tombstone| self.bury(namespace, tombstone));
            }
            Body::Epoch(epoch) => self.bury_all(epoch),
            _ => {}
        }
    }

    /// Notes that some of what others know to be deleted is dead in records with a sequence below `below`: up to `most` tombstones
    /// behind `behind`. Gives where to go on; `None` at the end.
    pub(crate) fn bury_told(
        &mut self,
        told: &Graves,
        below: u64,
        (behind, most): (Option<Grave>, usize),
    ) -> Option<Grave> {
        if behind.is_none() {
            let epoch = |namespace: &NamespaceId| Epoch { below, namespace: namespace.0 };
            told.namespaces.iter().for_each(|namespace| self.bury_all(&epoch(namespace)));
        }
        let from = behind.map_or(Bound::Unbounded, Bound::Excluded);
        let (mut last, mut count) = (None, 0);
        for grave in told.blocks.range((from, Bound::Unbounded)).take(most) {
            let (namespace, BlockKey(key), (group, coordinate)) = *grave;
            self.bury(namespace, &Tombstone { below, coordinate, namespace: 0, group, key });
            (last, count) = (Some(*grave), count + 1);
        }
        last.filter(|_| count == most)
    }

    /// Forgets up to `most` tombstones, whatever they are for; whether there are more.
    pub(crate) fn forget_some(&mut self, most: usize) -> bool {
        for _ in 0..most {
            let Some(mut keys) = self.blocks.first_entry() else { return false };
            self.tombstones -= usize::from(keys.get_mut().pop_first().is_some());
            if keys.get().is_empty() {
                keys.remove();
            }
        }
        true
    }

    /// Forgets some of what no record on disk is old enough for: none has a sequence below `floor`. Looks at up to `most` tombstones of a
    /// namespace, those behind `behind`, and gives where to go on; `None` at the namespace's end.
    pub(crate) fn prune(
        &mut self,
        namespace: NamespaceId,
        behind: Behind,
        (floor, most): (u64, usize),
    ) -> Option<Behind> {
        let keys = self.blocks.get_mut(&namespace)?;
        let from = behind.0.map_or(Bound::Unbounded, Bound::Excluded);
        let mut some: Vec<((BlockKey, Scope), u64)> = Vec::new();
        for (at, below) in keys.range((from, Bound::Unbounded)) {
            // All of one key are looked at together: of two marks of a delete the first is never forgotten after the second.
            if some.len() >= most && some.last().is_some_and(|(last, _)| last.0 != at.0) {
                break;
            }
            some.push((*at, *below));
        }
        for (at, _) in some.iter().filter(|(_, below)| *below <= floor) {
            keys.remove(at);
            self.tombstones -= 1;
        }
        if keys.is_empty() {
            self.blocks.remove(&namespace);
        }
        some.last().filter(|_| some.len() >= most).map(|(at, _)| Behind(Some(*at)))
    }

    /// The same of whole namespaces, of which there are few.
    pub(crate) fn prune_namespaces(&mut self, floor: u64) {
        self.namespaces.retain(|_, below| *below > floor);
    }

    /// The namespaces of which there are tombstones.
    pub(crate) fn namespaces(&self) -> Vec<NamespaceId> {
        self.blocks.keys().copied().collect()
    }

    /// Up to `most` tombstones of a namespace under a short id, those behind `behind`, and where to go on; none at its end.
    pub(crate) fn some(&self, name: &Defined, behind: &mut Behind, most: usize) -> Vec<Tombstone> {
        let Some(keys) = self.blocks.get(&NamespaceId(name.id)) else { return Vec::new() };
        let from = behind.0.map_or(Bound::Unbounded, Bound::Excluded);
        let some = keys.range((from, Bound::Unbounded)).take(most).map(|(&(key, scope), &below)| {
            *behind = Behind(Some((key, scope)));
            Tombstone { below, coordinate: scope.1, namespace: name.local, group: scope.0, key: key.0 }
        });
        some.collect()
    }

    /// Whether records of a segment bury anything that may lie on disk, where none has a sequence below `floor`.
    pub(crate) fn are_in(entries: &[Entry], floor: u64) -> bool {
        entries.iter().any(|entry| match &entry.content {
            Content::Tombstones(tombstones) => tombstones.entries.iter().any(|one| one.below > floor),
            Content::Epoch(epoch) => epoch.below > floor,
            _ => false,
        })
    }

    /// Namespaces whose delete a crash stopped between two shards, by the marks of this one.
    pub(crate) fn half_deleted(&self) -> Vec<NamespaceId> {
        let is_half = |keys: &Keys| {
            let reach = |mark: Mark| keys.get(&(BlockKey(MARK_KEY), mark.scope())).copied();
            Mark::is_half(reach)
        };
        self.blocks.iter().filter(|(_, keys)| is_half(keys)).map(|(namespace, _)| *namespace).collect()
    }

    /// How many tombstones there are of each namespace that has some.
    pub(crate) fn by_namespace(&self) -> impl Iterator<Item = (NamespaceId, usize)> {
        self.blocks.iter().map(|(namespace, keys)| (*namespace, keys.len()))
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.tombstones + self.namespaces.len()
    }

    /// A number that changes with everything that is buried.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Whether nothing is dead.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.namespaces.is_empty()
    }

    /// Whether a record of this namespace is dead as a whole.
    pub(crate) fn covers(&self, namespace: NamespaceId, sequence: u64) -> bool {
        self.namespaces.get(&namespace).is_some_and(|&below| sequence < below)
    }

    /// Whether this block of a record is dead.
    pub(crate) fn covers_block(
        &self,
        (namespace, key): (NamespaceId, BlockKey),
        (group, coordinate): (u32, u64),
        sequence: u64,
    ) -> bool {
        let Some(keys) = self.blocks.get(&namespace) else { return false };
        of_key(keys, key).any(|((for_group, for_coordinate), below)| {
            sequence < *below
                && for_group.is_none_or(|one| one == group)
                && for_coordinate.is_none_or(|one| one == coordinate)
        })
    }

    /// The namespaces of the tombstones under short ids, and the epochs.
    pub(crate) fn listed(&self) -> Listed {
        let name = |(local, namespace): (u32, &NamespaceId)| Defined { local, id: namespace.0 };
        let epoch = |(namespace, &below): (&NamespaceId, &u64)| Epoch { below, namespace: namespace.0 };
        Listed {
            names: (0u32..).zip(self.blocks.keys()).map(name).collect(),
            epochs: self.namespaces.iter().map(epoch).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: NamespaceId = NamespaceId([1; 32]);

    fn tombstone(key: u8, scope: Scope, below: u64) -> Tombstone {
        Tombstone { below, coordinate: scope.1, namespace: 0, group: scope.0, key: [key; 32] }
    }

    fn covered(dead: &TombstoneSet, key: u8, place: (u32, u64), sequence: u64) -> bool {
        dead.covers_block((HERE, BlockKey([key; 32])), place, sequence)
    }

    /// As a checkpoint has them, a few at a time.
    fn listed(dead: &TombstoneSet) -> Vec<Tombstone> {
        let mut all = Vec::new();
        for name in &dead.listed().names {
            let mut behind = Behind::default();
            loop {
                let some = dead.some(name, &mut behind, 2);
                if some.is_empty() {
                    break;
                }
                all.extend(some);
            }
        }
        all
    }

    #[test]
    fn what_is_forgotten_a_few_at_a_time_is_all_that_is_old_enough() {
        let mut dead = TombstoneSet::default();
        (0..100).for_each(|key| dead.bury(HERE, &tombstone(key, (None, None), u64::from(key) % 7)));
        let (mut behind, mut looks) = (Some(Behind::default()), 0);
        while let Some(from) = behind {
            behind = dead.prune(HERE, from, (4, 8));
            looks += 1;
        }
        let left = |key: u8| u64::from(key) % 7 > 4;
        assert_eq!(looks, 13, "eight at a time");
        assert_eq!(dead.len(), (0..100).filter(|key| left(*key)).count());
        assert!((0..100).all(|key| covered(&dead, key, (0, 0), 0) == left(key)));
        assert_eq!(listed(&dead).len(), dead.len());
        behind = Some(Behind::default());
        while let Some(from) = behind {
            behind = dead.prune(HERE, from, (100, 8));
        }
        assert!(dead.is_empty() && dead.namespaces().is_empty());
    }

    #[test]
    fn a_tombstone_kills_what_is_older_within_its_scope() {
        let mut dead = TombstoneSet::default();
        dead.bury(HERE, &tombstone(1, (None, None), 10));
        dead.bury(HERE, &tombstone(2, (Some(3), None), 10));
        assert!(covered(&dead, 1, (7, 0), 9) && !covered(&dead, 1, (7, 0), 10));
        assert!(covered(&dead, 2, (3, 0), 9) && !covered(&dead, 2, (4, 0), 9));
        assert!(!covered(&dead, 3, (3, 0), 9));
        assert!(!dead.covers_block((NamespaceId([2; 32]), BlockKey([1; 32])), (0, 0), 1));
    }

    #[test]
    fn of_two_tombstones_over_the_same_blocks_the_higher_stays() {
        let mut dead = TombstoneSet::default();
        for below in [10, 20, 15] {
            dead.bury(HERE, &tombstone(1, (None, None), below));
            dead.bury_all(&Epoch { below, namespace: HERE.0 });
        }
        assert!(covered(&dead, 1, (0, 0), 19) && !covered(&dead, 1, (0, 0), 20));
        assert!(dead.covers(HERE, 19) && !dead.covers(HERE, 20));
    }

    #[test]
    fn a_delete_that_did_not_end_is_told_until_one_did() {
        let mut dead = TombstoneSet::default();
        let mut note = |mark: Mark, below, expected: &[NamespaceId]| {
            dead.bury(HERE, &mark.tombstone(0, below));
            assert_eq!(dead.half_deleted(), expected);
            let mut again = TombstoneSet::default();
            listed(&dead).iter().for_each(|tombstone| again.bury(HERE, tombstone));
            assert_eq!(again.half_deleted(), expected, "a checkpoint says it too");
        };
        note(Mark::Begun, 10, &[HERE]);
        note(Mark::Ended, 12, &[]);
        note(Mark::Begun, 20, &[HERE]);
        note(Mark::Ended, 21, &[]);
        // Forgotten together, or the begin first.
        dead.prune(HERE, Behind::default(), (20, 1));
        assert_eq!((dead.half_deleted(), dead.len()), (vec![], 1), "one at a time is both marks at a time");
    }

    #[test]
    fn deletes_are_told_a_few_at_a_time_and_completely() {
        let other = NamespaceId([2; 32]);
        let mut dead = TombstoneSet::default();
        for key in 0..50 {
            dead.bury(HERE, &tombstone(key, (None, None), 3));
            dead.bury(other, &tombstone(key, (Some(u32::from(key)), None), 3));
        }
        dead.bury_all(&Epoch { below: 3, namespace: other.0 });
        for most in [1, 7, 50, 64] {
            let mut graves = Graves::default();
            for namespace in dead.namespaces() {
                let mut behind = Some(Behind::default());
                while let Some(from) = behind {
                    (_, behind) = graves.add_some(&dead, namespace, (from, most));
                }
            }
            graves.add_namespaces(&dead);
            let (mut told, mut behind) = (TombstoneSet::default(), None);
            loop {
                behind = told.bury_told(&graves, 9, (behind, most));
                if behind.is_none() {
                    break;
                }
            }
            let keys =
                |set: &TombstoneSet| listed(set).iter().map(|one| (one.key, one.group)).collect::<Vec<_>>();
            assert_eq!((told.len(), keys(&told)), (dead.len(), keys(&dead)), "{most} at a time");
            assert!(listed(&told).iter().all(|one| one.below == 9) && told.covers(other, 8));
            while told.forget_some(most) {}
            assert_eq!(told.len(), 1, "but for the namespace");
        }
    }

    #[test]
    fn what_is_listed_buries_the_same_again() {
        let mut dead = TombstoneSet::default();
        let other = NamespaceId([2; 32]);
        dead.bury(other, &tombstone(1, (None, Some(0)), 10));
        dead.bury(HERE, &tombstone(1, (None, None), 11));
        dead.bury(HERE, &tombstone(2, (Some(1), None), 12));
        dead.bury_all(&Epoch { below: 5, namespace: other.0 });
        let Listed { names, epochs } = dead.listed();
        let tombstones = listed(&dead);
        let mut again = TombstoneSet::default();
        for tombstone in &tombstones {
            again.bury(NamespaceId(names[tombstone.namespace as usize].id), tombstone);
        }
        epochs.iter().for_each(|epoch| again.bury_all(epoch));
        assert_eq!((again.blocks, again.namespaces), (dead.blocks, dead.namespaces));
    }
}
