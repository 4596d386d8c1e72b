//! Nodes whose directories are fed over connections that break, while members come and go.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::directory::Directory;
use crate::members::{Member, Members, NodeId};
use crate::partition::Holders;

#[derive(Default)]
struct Store(BTreeMap<Tag, OriginId>);

impl Blocks for Store {
    fn after(&self, partition: Partition, after: Option<Tag>, most: usize) -> Vec<(Tag, OriginId)> {
        let behind = |tag: &Tag| after.is_none_or(|after| *tag > after);
        let all = self.0.iter().filter(|(tag, _)| tag.partition() == partition && behind(tag));
        all.map(|(tag, origin)| (*tag, *origin)).take(most.min(2)).collect()
    }
}

fn tag(n: u16) -> Tag {
    // Few partitions, so that several blocks share one.
    let mut tag = [0; 16];
    tag[..2].copy_from_slice(&((n % 5) * 0x3333).to_be_bytes());
    tag[2..4].copy_from_slice(&n.to_be_bytes());
    Tag(tag)
}

fn id(n: usize) -> NodeId {
    kvarts_layout::StoreId([n as u8 + 1; 16])
}

fn origin(n: u8) -> OriginId {
    OriginId([n; 16])
}

/// What travels from one node to another.
enum Wire {
    Feed(Message),
    /// The other node is to send these again.
    Again(BTreeSet<Partition>),
}

/// One node: its blocks, its directory, what it sends to each other node, and what is on its way there.
struct Node {
    store: Store,
    directory: Directory,
    members: Members,
    feeds: Vec<Feed>,
    wires: Vec<VecDeque<Wire>>,
}

const NODES: usize = 4;

fn members(epoch: u64, present: [bool; NODES]) -> Members {
    let one = |n: usize| Member { id: id(n), address: format!("host-{n}:1"), zone: String::new() };
    Members::new(epoch, (0..NODES).filter(|n| present[*n]).map(one).collect()).unwrap()
}

impl Node {
    fn new(n: usize, members: &Members) -> Self {
        let feeds = (0..NODES).map(|_| Feed::default()).collect();
        let wires = (0..NODES).map(|_| VecDeque::new()).collect();
        let directory = Directory::new(id(n), members, 10_000);
        let mut node = Self { store: Store::default(), directory, members: members.clone(), feeds, wires };
        node.learn(members);
        node
    }

    /// The node hears of an epoch.
    fn learn(&mut self, members: &Members) {
        if members.epoch() < self.members.epoch() {
            return;
        }
        let lacks = self.directory.change_members(members);
        let held: BTreeSet<Partition> = self.directory.held().collect();
        for (n, wire) in self.wires.iter_mut().enumerate() {
            let of_all = lacks.members.contains(&id(n));
            let wanted = if of_all { held.clone() } else { lacks.partitions.iter().copied().collect() };
            wire.push_back(Wire::Again(wanted));
        }
        self.members = members.clone();
        let holders = Holders::of(members);
        for (n, feed) in self.feeds.iter_mut().enumerate() {
            feed.hold(holders.held_by(id(n)).collect());
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Stored(tag, origin) => drop(self.store.0.insert(tag, origin)),
            Change::Gone(tag) => drop(self.store.0.remove(&tag)),
        }
        self.feeds.iter_mut().for_each(|feed| feed.note(change));
    }

    fn take(&mut self, from: usize, wire: Wire) {
        let message = match wire {
            Wire::Feed(message) => message,
            Wire::Again(partitions) => return self.feeds[from].again(&partitions),
        };
        match message {
            Message::Begin(partition) => self.directory.begin_snapshot(id(from), partition),
            Message::Changes(changes) => drop(self.directory.apply(id(from), &changes)),
            Message::End(partition) => self.directory.end_snapshot(id(from), partition),
        }
    }
}

/// The connection of two nodes breaks and is made again: what is on its way is lost, and each asks for what it lacks again.
fn cut(nodes: &mut [Node], a: usize, b: usize) {
    for (from, to) in [(a, b), (b, a)] {
        nodes[from].wires[to].clear();
        nodes[from].feeds[to].connected();
    }
}

/// Sends and delivers until nothing is left.
fn settle(nodes: &mut [Node]) {
    loop {
        let mut moved = false;
        for from in 0..NODES {
            for to in 0..NODES {
                let Node { feeds, wires, store, .. } = &mut nodes[from];
                if let Some(message) = feeds[to].next(store) {
                    wires[to].push_back(Wire::Feed(message));
                }
                if let Some(message) = nodes[from].wires[to].pop_front() {
                    nodes[to].take(from, message);
                    moved = true;
                }
            }
        }
        if !moved {
            return;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn when_nothing_fails_any_more_every_directory_says_what_the_nodes_have(
        steps in prop::collection::vec((0u8..12, 0usize..NODES, 0usize..NODES, 0u16..30, any::<u8>()), 0..500),
    ) {
        let mut present = [true; NODES];
        let mut current = members(1, present);
        let mut nodes: Vec<Node> = (0..NODES).map(|n| Node::new(n, &current)).collect();
        for (what, from, to, n, by) in steps {
            match what {
                0..3 => nodes[from].change(Change::Stored(tag(n), origin(by % 2))),
                3..5 => nodes[from].change(Change::Gone(tag(n))),
                5..8 => {
                    let Node { feeds, wires, store, .. } = &mut nodes[from];
                    let messages = std::iter::from_fn(|| feeds[to].next(store));
                    wires[to].extend(messages.take(usize::from(by % 8)).map(Wire::Feed));
                }
                8..10 => for _ in 0..by % 8 {
                    if let Some(message) = nodes[from].wires[to].pop_front() {
                        nodes[to].take(from, message);
                    }
                },
                // The connection breaks: what is on its way is lost.
                10 => {
                    cut(&mut nodes, from, to);
                }
                // A member leaves or comes back, with an empty directory; the others hear of it when they hear of it.
                _ if by % 3 == 0 && from != 0 => {
                    present[from] = !present[from];
                    current = members(current.epoch() + 1, present);
                    if present[from] {
                        let store = std::mem::take(&mut nodes[from].store);
                        nodes[from] = Node::new(from, &current);
                        nodes[from].store = store;
                        (0..NODES).filter(|other| *other != from).for_each(|other| cut(&mut nodes, from, other));
                    }
                }
                _ => nodes[to].learn(&current),
            }
        }
        // Everybody hears of the members, connections are made again where partitions have moved, and everything is delivered.
        for node in &mut nodes {
            node.learn(&current);
        }
        settle(&mut nodes);
        let holders = Holders::of(&current);
        for n in 0..30 {
            let holder = holders.holder(tag(n).partition()).unwrap();
            let holder = (0..NODES).find(|n| id(*n) == holder).unwrap();
            let mut told: Vec<(NodeId, OriginId)> =
                nodes[holder].directory.copies(&tag(n)).map(|copy| (copy.node, copy.origin)).collect();
            told.sort_unstable();
            let has = |node: &usize| Some((id(*node), *nodes[*node].store.0.get(&tag(n))?));
            let truth: Vec<_> = (0..NODES).filter(|node| present[*node]).filter_map(|node| has(&node)).collect();
            prop_assert_eq!(told, truth, "block {} at node {}", n, holder);
        }
    }
}

#[test]
fn a_holder_that_takes_nothing_costs_bounded_memory_and_gets_another_snapshot() {
    let mut feed = Feed::default();
    feed.hold(Partition::all().collect());
    let mut store = Store::default();
    while let Some(message) = feed.next(&store) {
        assert!(!matches!(message, Message::Changes(_)));
    }
    for n in 0..3 * WAITING_MAX {
        let change = Change::Stored(tag((n % 1000) as u16), origin(1));
        feed.note(change);
        assert!(feed.waiting() <= WAITING_MAX);
    }
    store.0.insert(tag(7), origin(1));
    let before = feed.snapshots();
    let messages: Vec<Message> = std::iter::from_fn(|| feed.next(&store)).collect();
    assert!(feed.snapshots() > before && feed.snapshots() <= before + 5, "the five partitions that changed");
    assert!(messages.contains(&Message::Changes(vec![Change::Stored(tag(7), origin(1))])));
}
