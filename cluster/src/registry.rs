//! Members that register themselves: what a coordination service holds of a cluster, and which change of the members is due.
//!
//! Three kinds of keys: `nodes/ID`, which a node keeps under its lease, with its address; `members`, the members of the epoch,
//! written by compare-and-set alone; `taken/ID`, the last epoch that a node is of.
//!
//! At most one of two holders of a partition is confirmed, as with members that a file names: each change adds or removes one
//! member, so that majorities of one epoch and of the next have a node in common, and the next change waits until a majority of
//! the members is of the epoch, so that no majority of an older one can be found any more. A cluster that has lost the
//! majority of its members for good stays as it is; nothing here decides that they are.

use std::collections::BTreeMap;

use kvarts_layout::planted;

use crate::members::{FILE_BYTES_MAX, MEMBERS_MAX, Member, Members, NodeId};

/// Keys that a cluster may have.
pub const KEYS_MAX: usize = 4 * MEMBERS_MAX;

/// The key of the members, behind the cluster's prefix.
pub const MEMBERS_KEY: &str = "members";

/// The key under which a node registers itself.
pub fn node_key(node: NodeId) -> String {
    format!("nodes/{node}")
}

/// The key of the last epoch that a node is of.
pub fn taken_key(node: NodeId) -> String {
    format!("taken/{node}")
}

/// What is held of a cluster, as one of its nodes has last seen it.
#[derive(Clone, Debug, Default)]
pub struct View {
    registered: BTreeMap<NodeId, Member>,
    members: Option<Members>,
    revision: i64,
    taken: BTreeMap<NodeId, u64>,
}

/// How a node registers itself.
pub fn registration(member: &Member) -> String {
    Members::new(0, vec![member.clone()]).map(|one| one.to_text()).unwrap_or_default()
}

fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value).ok().filter(|text| text.len() <= FILE_BYTES_MAX)
}

impl View {
    /// A key has this value from a revision on, or is gone. What is no key or no value of a cluster is passed over.
    pub fn set(&mut self, key: &str, value: Option<&[u8]>, revision: i64) {
        if key == MEMBERS_KEY {
            self.members = value.and_then(text).and_then(|text| Members::parse(text).ok());
            self.revision = if value.is_some() { revision } else { 0 };
        } else if let Some(node) = key.strip_prefix("nodes/").and_then(|id| id.parse::<NodeId>().ok()) {
            let one = value.and_then(text).and_then(|text| Members::parse(text).ok());
            match one.as_ref().and_then(|one| one.get(node)) {
                Some(member) => self.registered.insert(node, member.clone()),
                None => self.registered.remove(&node),
            };
        } else if let Some(node) = key.strip_prefix("taken/").and_then(|id| id.parse::<NodeId>().ok()) {
            match value.and_then(text).and_then(|text| text.trim().parse().ok()) {
                Some(epoch) => self.taken.insert(node, epoch),
                None => self.taken.remove(&node),
            };
        }
    }

    /// The members, if there are any yet.
    pub fn members(&self) -> Option<&Members> {
        self.members.as_ref()
    }

    /// The revision at which the members were written; 0 if they were not.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Whether a node is registered.
    pub fn is_registered(&self, node: NodeId) -> bool {
        self.registered.contains_key(&node)
    }

    /// The last epoch that a node is of, as it says.
    pub fn taken(&self, node: NodeId) -> Option<u64> {
        self.taken.get(&node).copied()
    }

    /// The epoch that `me` has to say it is of, if what is held says another one. `known` are the members that it is of.
    pub fn to_say(&self, me: NodeId, known: Option<&Members>) -> Option<u64> {
        known.map(Members::epoch).filter(|of| self.taken(me) != Some(*of))
    }

    /// The members that `me` is to take over: it is one of them, and they are of a later epoch than those that it was given last.
    pub fn to_take(&self, me: NodeId, last: Option<u64>) -> Option<&Members> {
        let is_new = |members: &&Members| last.is_none_or(|last| last < members.epoch());
        self.members().filter(is_new).filter(|members| members.get(me).is_some())
    }

    /// The change of the members that `me` is to propose, if one is due and it is its turn. `known` are those that it is of.
    pub fn due(&self, me: NodeId, known: Option<&Members>) -> Option<Members> {
        let written = self.members.as_ref().map_or(0, Members::epoch);
        let newest = self.taken.values().copied().fold(known.map_or(0, Members::epoch), u64::max);
        if written < newest && !planted!("epochs-start-over") {
            // What was written was lost. Who knows the last members says them again.
            let known = known.filter(|known| known.epoch() == newest)?;
            return self.of(newest, known.list().to_vec());
        }
        // One proposes: whose registration runs out is followed by the next.
        if self.registered.keys().next() != Some(&me) {
            return None;
        }
        let Some(members) = &self.members else {
            return self.of(0, vec![self.registered.get(&me)?.clone()]);
        };
        let is_of = |member: &&Member| self.taken.get(&member.id).is_some_and(|of| *of >= members.epoch());
        let of_it = members.list().iter().filter(is_of).count();
        if of_it * 2 <= members.list().len() && !planted!("epoch-without-majority") {
            return None;
        }
        let list = self.next(members)?;
        // Members of whom a majority is not there could decide nothing, not even who comes next.
        let there = list.iter().filter(|member| self.registered.contains_key(&member.id)).count();
        let may = there * 2 > list.len() || planted!("members-of-the-gone");
        if may { self.of(members.epoch(), list) } else { None }
    }

    /// A node that left and that still says which epoch it is of: `me` is to forget it, being the first of the members that are there and of the
    /// members as they are written. What a node says that comes back is written anew.
    pub fn to_forget(&self, me: NodeId, known: Option<&Members>) -> Option<NodeId> {
        let members = self.members.as_ref().filter(|members| known == Some(*members))?;
        let first = members.list().iter().find(|member| self.registered.contains_key(&member.id))?;
        if first.id != me {
            return None;
        }
        // The greatest epoch that is said stays among the members': by it a service that lost what was written is seen through.
        let has_left = |(node, of): &(&NodeId, &u64)| {
            **of <= members.epoch() && members.get(**node).is_none() && !self.registered.contains_key(node)
        };
        self.taken.iter().find(has_left).map(|(node, _)| *node)
    }

    fn of(&self, before: u64, list: Vec<Member>) -> Option<Members> {
        Members::new(before.checked_add(1)?, list).ok()
    }

    /// The members with one change.
    fn next(&self, members: &Members) -> Option<Vec<Member>> {
        let mut list = members.list().to_vec();
        let gone = list.iter().position(|member| !self.registered.contains_key(&member.id));
        if let Some(gone) = gone.filter(|_| !planted!("lapsed-stay")) {
            if planted!("two-changes-at-once") {
                list.retain(|member| self.registered.contains_key(&member.id));
                return (!list.is_empty()).then_some(list);
            }
            list.remove(gone);
            return (!list.is_empty()).then_some(list);
        }
        let moved = |member: &Member| {
            self.registered.get(&member.id).filter(|now| *now != member && !planted!("moved-not-followed"))
        };
        let is_free = |list: &[Member], one: &Member| {
            planted!("address-twice")
                || list.iter().all(|other| other.id == one.id || other.address != one.address)
        };
        for place in 0..list.len() {
            if let Some(now) = list.get(place).and_then(moved).filter(|now| is_free(&list, now))
                && let Some(member) = list.get_mut(place)
            {
                *member = now.clone();
                return Some(list);
            }
        }
        let new =
            self.registered.values().find(|one| members.get(one.id).is_none() && is_free(&list, one))?;
        if list.len() >= MEMBERS_MAX {
            return None;
        }
        list.push(new.clone());
        Some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(n: u8) -> NodeId {
        kvarts_layout::StoreId([n; 16])
    }

    fn member(n: u8) -> Member {
        Member { id: id(n), address: format!("host-{n}:1"), zone: "z".to_owned() }
    }

    /// A service, and nodes that see it at once.
    #[derive(Default)]
    struct Service {
        view: View,
        revision: i64,
        /// The epoch that each node is of.
        of: BTreeMap<NodeId, Members>,
    }

    impl Service {
        fn write(&mut self, key: &str, value: Option<&str>) {
            self.revision += 1;
            self.view.set(key, value.map(str::as_bytes), self.revision);
        }

        fn register(&mut self, n: u8) {
            self.write(&node_key(id(n)), Some(&registration(&member(n))));
        }

        fn expire(&mut self, n: u8) {
            self.write(&node_key(id(n)), None);
        }

        /// A node takes over the members, if it is one of them.
        fn take(&mut self, n: u8) {
            let known = self.of.get(&id(n)).map_or(0, Members::epoch);
            let new = |members: &&Members| members.get(id(n)).is_some() && members.epoch() > known;
            let members = self.view.members().filter(new).cloned();
            if let Some(members) = members {
                self.write(&taken_key(id(n)), Some(&members.epoch().to_string()));
                self.of.insert(id(n), members);
            }
        }

        fn propose(&mut self, n: u8) -> bool {
            let due = self.view.due(id(n), self.of.get(&id(n)));
            if let Some(members) = &due {
                self.write(MEMBERS_KEY, Some(&members.to_text()));
            }
            due.is_some()
        }

        fn forget(&mut self, n: u8) -> bool {
            let left = self.view.to_forget(id(n), self.of.get(&id(n)));
            left.iter().for_each(|node| self.write(&taken_key(*node), None));
            left.is_some()
        }

        /// Everybody who is registered goes on until nothing is due.
        fn settle(&mut self) -> Vec<NodeId> {
            for _ in 0..100 {
                let there: Vec<u8> = self.view.registered.keys().map(|node| node.0[0]).collect();
                there.iter().for_each(|n| self.take(*n));
                let proposed = there.iter().filter(|n| self.propose(**n)).count();
                let forgotten = there.iter().filter(|n| self.forget(**n)).count();
                if proposed + forgotten == 0 {
                    break;
                }
            }
            self.view.members().map(|all| all.list().iter().map(|one| one.id).collect()).unwrap_or_default()
        }
    }

    #[test]
    fn nodes_join_leave_and_come_back_one_at_a_time() {
        let mut service = Service::default();
        for n in 1..4 {
            service.register(n);
        }
        assert_eq!(service.settle(), [id(1), id(2), id(3)]);
        assert_eq!(service.view.members().map(Members::epoch), Some(3), "one more with each member");
        service.expire(1);
        assert_eq!(service.settle(), [id(2), id(3)]);
        service.register(1);
        assert_eq!(service.settle(), [id(1), id(2), id(3)]);
        assert_eq!(service.view.members().map(Members::epoch), Some(5));
        let moved = Member { address: "elsewhere:1".to_owned(), ..member(2) };
        service.write(&node_key(id(2)), Some(&registration(&moved)));
        service.settle();
        assert_eq!(service.view.members().and_then(|all| all.get(id(2)).cloned()), Some(moved));
    }

    #[test]
    fn of_nodes_that_left_nothing_is_kept() {
        let mut service = Service::default();
        (1..4).for_each(|n| service.register(n));
        service.settle();
        // Disks are replaced, and with each the node's name.
        for n in 4..100 {
            service.expire(n - 1);
            service.register(n);
            service.settle();
            assert!(service.view.members().unwrap().get(id(n)).is_some());
        }
        let kept: Vec<NodeId> = service.view.taken.keys().copied().collect();
        assert_eq!(kept, [id(1), id(2), id(99)]);
    }

    #[test]
    fn members_without_a_majority_stay_until_one_is_back() {
        let mut service = Service::default();
        (1..4).for_each(|n| service.register(n));
        service.settle();
        service.expire(2);
        service.expire(3);
        assert_eq!(service.settle().len(), 3, "one of three decides nothing");
        service.register(4);
        assert_eq!(service.settle().len(), 3);
        service.register(3);
        assert_eq!(service.settle(), [id(1), id(3), id(4)]);
    }

    #[test]
    fn epochs_grow_although_the_service_forgets() {
        let mut service = Service::default();
        (1..4).for_each(|n| service.register(n));
        service.settle();
        // All that was written is gone; the nodes still run.
        let of = std::mem::take(&mut service.of);
        service = Service { of, ..Service::default() };
        (1..4).for_each(|n| service.register(n));
        assert_eq!(service.settle(), [id(1), id(2), id(3)]);
        assert!(service.view.members().unwrap().epoch() > 3);
        // An old copy of it is back.
        let old = Members::new(1, vec![member(1)]).unwrap();
        service.write(MEMBERS_KEY, Some(&old.to_text()));
        assert_eq!(service.settle(), [id(1), id(2), id(3)]);
    }

    #[test]
    fn what_nobody_wrote_as_it_should_be_is_passed_over() {
        let mut view = View::default();
        for key in ["", "nodes/", "nodes/12", "nodes/../members", "taken/x", "other"] {
            view.set(key, Some(b"epoch = 1"), 1);
        }
        view.set(&node_key(id(1)), Some(registration(&member(2)).as_bytes()), 2);
        view.set(&node_key(id(2)), Some(&[0xff; 9]), 3);
        view.set(&taken_key(id(2)), Some(b"-1"), 4);
        view.set(MEMBERS_KEY, Some(b"none"), 5);
        assert!(view.registered.is_empty() && view.taken.is_empty() && view.members().is_none());
        let twin = Member { address: member(1).address, ..member(2) };
        view.set(&node_key(id(1)), Some(registration(&member(1)).as_bytes()), 6);
        view.set(&node_key(id(2)), Some(registration(&twin).as_bytes()), 7);
        view.set(MEMBERS_KEY, Some(Members::new(1, vec![member(1)]).unwrap().to_text().as_bytes()), 8);
        view.set(&taken_key(id(1)), Some(b"1"), 9);
        assert_eq!(view.due(id(1), None), None, "two nodes with one address");
    }

    proptest! {
        /// Whatever happens in whatever order, of no two epochs a majority of the members is of its own at the same time.
        #[test]
        fn no_two_epochs_have_a_majority_at_a_time(steps in prop::collection::vec((0u8..4, 1u8..6), 1..120)) {
            let (mut service, mut all) = (Service::default(), BTreeMap::<u64, Members>::new());
            for (what, n) in steps {
                match what {
                    0 => service.register(n),
                    1 => service.expire(n),
                    2 => service.take(n),
                    _ => drop(service.propose(n)),
                }
                if let Some(members) = service.view.members() {
                    let known = all.entry(members.epoch()).or_insert_with(|| members.clone());
                    prop_assert_eq!(&*known, members, "an epoch has one list");
                }
                let whole = |members: &&Members| {
                    let of = |one: &&Member| {
                        service.of.get(&one.id).is_some_and(|now| now.epoch() == members.epoch())
                    };
                    members.list().iter().filter(of).count() * 2 > members.list().len()
                };
                prop_assert!(all.values().filter(whole).count() <= 1);
            }
        }
    }
}
