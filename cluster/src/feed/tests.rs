//! Nodes whose directories are fed over connections that break, while members come and go.

use proptest::prelude::*;

use super::*;
use crate::directory::Directory;
use crate::members::{Member, Members, NodeId};
use crate::partition::Holders;

fn tag(n: u16) -> Tag {
    // Few partitions, so that several blocks share one.
    let mut tag = [0; 16];
    tag[..2].copy_from_slice(&((n % 5) * 0x3333).to_be_bytes());
    tag[2..4].copy_from_slice(&n.to_be_bytes());
    Tag(tag)
}

fn connected() -> Feed {
    let mut feed = Feed::default();
    feed.connect();
    feed
}

fn id(n: usize) -> NodeId {
    kvarts_layout::StoreId([n as u8 + 1; 16])
}

/// What travels from one node to another.
enum Wire {
    Feed(Message),
    /// The other node is to send these again.
    Again(BTreeSet<Partition>),
}

/// One node: its blocks, its directory, what it sends to each other node, and what is on its way there.
struct Node {
    store: BTreeSet<Tag>,
    /// Up to where its walk has come.
    walk: Option<Option<Tag>>,
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
        let feeds = (0..NODES).map(|_| connected()).collect();
        let wires = (0..NODES).map(|_| VecDeque::new()).collect();
        let directory = Directory::new(id(n), members, 10_000);
        let (store, walk) = (BTreeSet::new(), None);
        let mut node = Self { store, walk, directory, members: members.clone(), feeds, wires };
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
            Change::Stored(tag) => self.store.insert(tag),
            Change::Gone(tag) => self.store.remove(&tag),
        };
        self.feeds.iter_mut().for_each(|feed| feed.note(change));
    }

    /// One step of the walk that serves all feeds. Says whether there was anything to do.
    fn step(&mut self) -> bool {
        let feeds = &mut self.feeds;
        let Some(after) = self.walk.take() else {
            let wanted = feeds.iter().any(Feed::wants_walk);
            feeds.iter_mut().for_each(Feed::begin_walk);
            self.walk = wanted.then_some(None);
            return wanted;
        };
        let behind = |tag: &&Tag| after.is_none_or(|after| **tag > after);
        let page: Vec<Tag> = self.store.iter().filter(behind).take(2).copied().collect();
        feeds.iter_mut().for_each(|feed| feed.page(&page));
        match page.last() {
            Some(last) => self.walk = Some(Some(*last)),
            None => feeds.iter_mut().for_each(Feed::end_walk),
        }
        true
    }

    fn take(&mut self, from: usize, wire: Wire) {
        let message = match wire {
            Wire::Feed(message) => message,
            Wire::Again(partitions) => return self.feeds[from].again(&partitions),
        };
        match message {
            Message::Begin(all) => {
                all.iter().for_each(|partition| self.directory.begin_snapshot(id(from), *partition));
            }
            Message::Changes(changes) => drop(self.directory.apply(id(from), &changes)),
            Message::End(all) => {
                all.iter().for_each(|partition| self.directory.end_snapshot(id(from), *partition));
            }
        }
    }
}

/// The connection of two nodes breaks and is made again: what is on its way is lost, and each asks for what it lacks again.
fn cut(nodes: &mut [Node], a: usize, b: usize) {
    for (from, to) in [(a, b), (b, a)] {
        nodes[from].wires[to].clear();
        nodes[from].feeds[to].disconnect();
        nodes[from].feeds[to].connect();
    }
}

/// Sends and delivers until nothing is left.
fn settle(nodes: &mut [Node]) {
    loop {
        let mut moved = false;
        for from in 0..NODES {
            moved |= nodes[from].step();
            for to in 0..NODES {
                let Node { feeds, wires, .. } = &mut nodes[from];
                if let Some(message) = feeds[to].take() {
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
        steps in prop::collection::vec((0u8..15, 0usize..NODES, 0usize..NODES, 0u16..30, any::<u8>()), 0..500),
    ) {
        let mut present = [true; NODES];
        let mut current = members(1, present);
        let mut nodes: Vec<Node> = (0..NODES).map(|n| Node::new(n, &current)).collect();
        for (what, from, to, n, by) in steps {
            match what {
                0..3 => nodes[from].change(Change::Stored(tag(n))),
                3..5 => nodes[from].change(Change::Gone(tag(n))),
                5..8 => {
                    let Node { feeds, wires, .. } = &mut nodes[from];
                    let messages = std::iter::from_fn(|| feeds[to].take());
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
                11 | 12 => drop(nodes[from].step()),
                // Blocks go without being named, as those of a namespace do.
                14 => {
                    nodes[from].store.remove(&tag(n));
                    nodes[from].feeds.iter_mut().for_each(Feed::refresh);
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
            let mut told: Vec<NodeId> = nodes[holder].directory.copies(&tag(n)).collect();
            told.sort_unstable();
            let has = |node: &usize| present[*node] && nodes[*node].store.contains(&tag(n));
            let truth: Vec<NodeId> = (0..NODES).filter(has).map(id).collect();
            prop_assert_eq!(told, truth, "block {} at node {}", n, holder);
        }
    }
}

#[test]
fn a_holder_that_takes_nothing_costs_bounded_memory_and_gets_another_snapshot() {
    let mut feed = connected();
    feed.hold(Partition::all().collect());
    let walk = |feed: &mut Feed, page: &[Tag]| {
        feed.begin_walk();
        feed.page(page);
        feed.end_walk();
        std::iter::from_fn(|| feed.take()).collect::<Vec<Message>>()
    };
    assert_eq!(walk(&mut feed, &[]).len(), 2, "all partitions begin and end at once");
    for n in 0..3 * WAITING_MAX {
        feed.note(Change::Stored(tag((n % 1000) as u16)));
        assert!(feed.waiting() <= WAITING_MAX);
    }
    // It has taken nothing: another walk for it would be in vain.
    assert!(!feed.wants_walk());
    while feed.take().is_some() {}
    assert!(feed.wants_walk());
    let messages = walk(&mut feed, &[tag(7)]);
    assert_eq!((feed.snapshots(), messages.len()), (2, 3));
    let Message::Begin(partitions) = &messages[0] else { panic!("{messages:?}") };
    assert_eq!(partitions.len(), 5, "those that changed");
    assert_eq!(messages[1], Message::Changes(vec![Change::Stored(tag(7))]));
}

#[test]
fn a_walk_that_began_before_a_feed_joined_does_not_end_its_snapshot() {
    let mut feed = connected();
    feed.hold([tag(1).partition()].into());
    feed.begin_walk();
    feed.page(&[tag(1)]);
    // The connection breaks while the store is walked: the rest of that walk is not all that there is.
    feed.restart();
    feed.end_walk();
    assert_eq!((feed.take(), feed.wants_walk()), (None, true));
}

#[test]
fn blocks_that_went_without_a_name_cost_one_snapshot_and_nothing_that_waits() {
    let mut feed = connected();
    feed.hold([tag(1).partition()].into());
    feed.begin_walk();
    feed.page(&[tag(1)]);
    feed.refresh();
    feed.note(Change::Stored(tag(6)));
    feed.refresh();
    feed.end_walk();
    let first: Vec<Message> = std::iter::from_fn(|| feed.take()).collect();
    assert_eq!(first[1], Message::Changes(vec![Change::Stored(tag(1)), Change::Stored(tag(6))]));
    feed.begin_walk();
    feed.end_walk();
    let second: Vec<Message> = std::iter::from_fn(|| feed.take()).collect();
    assert_eq!((first.len(), second.len(), feed.wants_walk()), (3, 2, false));
}

#[test]
fn for_a_holder_that_is_away_nothing_waits_and_it_begins_again_when_it_comes() {
    let mut feed = Feed::default();
    feed.hold([tag(1).partition()].into());
    feed.note(Change::Stored(tag(1)));
    assert_eq!((feed.wants_walk(), feed.waiting()), (false, 0));
    feed.connect();
    feed.begin_walk();
    feed.page(&[tag(1)]);
    feed.disconnect();
    feed.note(Change::Gone(tag(1)));
    assert_eq!((feed.is_walking(), feed.wants_walk(), feed.waiting()), (false, false, 0));
    feed.connect();
    assert!(feed.wants_walk());
}
