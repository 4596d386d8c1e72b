//! What this node has: told to those who hold the directory.
//!
//! One task reads the store's events and, when a holder needs a snapshot, its pages; it queues both for all holders, in that
//! order ([`kvarts_cluster::feed`]). One task for each other node sends what is queued for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_cluster::directory::Change;
use kvarts_cluster::feed::{Feed, Message};
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::{Partition, Tag};
use kvarts_contract::api::{Event, EventKind, KvStore, SnapshotCursor};
use kvarts_contract::clock::Nanos;
use kvarts_contract::events::{PAGE_BLOCKS, Subject};
use kvarts_layout::{IndexKey, planted};
use kvarts_wire::proto;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::link::{self, Link, State};
use super::network::CONNECT_TIMEOUT;
use super::{ClusterNode, wire};

/// Events that are taken at a time.
const EVENTS: usize = 256;
/// Messages to one node that are on their way.
const ON_THE_WAY: usize = 8;
/// The pause after a connection that could not be made, and the longest one.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a walk waits for a holder that takes less than a page: longer than a busy machine is silent. The others wait as long.
const BEHIND: Duration = Duration::from_millis(500);
/// How long holders keep the hints of a namespace that went: all that go meanwhile cost one snapshot together.
const OUTDATED: Duration = Duration::from_secs(5);

/// What waits for each holder.
#[derive(Debug, Default)]
pub(super) struct Feeder {
    feeds: Mutex<BTreeMap<NodeId, Feed>>,
    /// Wakes the task that reads the store.
    wanted: Notify,
}

impl Feeder {
    fn feeds(&self) -> MutexGuard<'_, BTreeMap<NodeId, Feed>> {
        self.feeds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These nodes hold the directory, each its partitions. This one, `me`, needs no connection.
    pub(super) fn hold(&self, me: NodeId, held: BTreeMap<NodeId, BTreeSet<Partition>>) {
        let mut feeds = self.feeds();
        feeds.retain(|node, _| held.contains_key(node));
        for (node, partitions) in held {
            let is_first = !feeds.contains_key(&node);
            let feed = feeds.entry(node).or_default();
            feed.hold(partitions);
            if is_first && node == me {
                feed.connect();
            }
        }
        drop(feeds);
        self.wanted.notify_one();
    }

    /// A holder asks for partitions again.
    pub(super) fn again(&self, node: NodeId, partitions: &BTreeSet<Partition>) {
        self.with(node, |feed| feed.again(partitions));
        self.wanted.notify_one();
    }

    /// A holder is connected: it is sent everything.
    fn connect(&self, node: NodeId) {
        self.with(node, Feed::connect);
        self.wanted.notify_one();
    }

    /// A holder is not connected any more: no walk waits for it.
    pub(super) fn disconnect(&self, node: NodeId) {
        self.with(node, Feed::disconnect);
        self.wanted.notify_one();
    }

    fn with<T>(&self, node: NodeId, change: impl FnOnce(&mut Feed) -> T) -> Option<T> {
        self.feeds().get_mut(&node).map(change)
    }

    /// The next message for a holder. There may be room for a page then, or another walk to begin.
    fn next(&self, node: NodeId) -> Option<Message> {
        let (message, was_behind) = self.with(node, |feed| {
            let was_behind = feed.is_behind();
            (feed.take(), was_behind)
        })?;
        if message.is_some() || was_behind {
            self.wanted.notify_one();
        }
        message
    }

    /// What waits for a holder, and snapshots that were begun.
    pub(super) fn counts(&self, node: NodeId) -> (u64, u64) {
        self.with(node, |feed| (feed.waiting() as u64, feed.snapshots())).unwrap_or_default()
    }

    /// Queues what happened. Says whether a whole namespace went, whose blocks are not named: then holders have hints to what is
    /// not there any more, until another snapshot.
    fn note(&self, events: &[Event]) -> bool {
        let (mut feeds, mut unnamed) = (self.feeds(), false);
        for event in events {
            let Subject::Block(block) = &event.subject else {
                unnamed = true;
                continue;
            };
            let change = match event.kind {
                EventKind::Stored => Change::Stored(tag(block)),
                _ => Change::Gone(tag(block)),
            };
            feeds.values_mut().for_each(|feed| feed.note(change));
        }
        unnamed
    }

    /// Every holder gets another snapshot.
    fn refresh_all(&self) {
        self.feeds().values_mut().for_each(Feed::refresh);
    }

    fn restart_all(&self) {
        self.feeds().values_mut().for_each(Feed::restart);
    }

    /// Begins a walk if a holder waits for one.
    fn begin_walk(&self) -> bool {
        let mut feeds = self.feeds();
        let wanted = feeds.values().any(Feed::wants_walk);
        feeds.values_mut().for_each(Feed::begin_walk);
        wanted
    }

    /// Whether all who walk have room for a page; nothing if none walks any more.
    fn has_room(&self) -> Option<bool> {
        let feeds = self.feeds();
        let walking = || feeds.values().filter(|feed| feed.is_walking());
        walking().next()?;
        Some(walking().all(|feed| feed.has_room(PAGE_BLOCKS)))
    }

    /// The walk has waited long enough: who has no room leaves it, unless it is for that one alone.
    fn leave_behind(&self) {
        let mut feeds = self.feeds();
        let is_behind = |feed: &Feed| feed.is_walking() && !feed.has_room(PAGE_BLOCKS);
        let others = feeds.values().any(|feed| feed.wants_walk() || (feed.is_walking() && !is_behind(feed)));
        if others {
            feeds.values_mut().filter(|feed| is_behind(feed)).for_each(Feed::fall_behind);
        }
    }

    fn page(&self, blocks: &[IndexKey]) {
        let tags: Vec<Tag> = blocks.iter().map(tag).collect();
        self.feeds().values_mut().for_each(|feed| feed.page(&tags));
    }

    fn end_walk(&self) {
        self.feeds().values_mut().for_each(Feed::end_walk);
    }
}

/// The name of a block in the directory.
pub(super) fn tag(block: &IndexKey) -> Tag {
    Tag::of(&block.namespace, block.group, block.coordinate, &block.key)
}

/// The page of a walk that comes next.
type Next = Option<SnapshotCursor>;

/// The walk through the store, if one is under way.
#[derive(Default)]
struct Walk {
    next: Option<Next>,
    /// Until when it waits for holders that have no room.
    waits_until: Option<Nanos>,
}

impl Walk {
    /// Whether a page is to be read now. Who lets a walk wait too long leaves it, unless it is for that holder alone.
    fn goes_on(&mut self, feeder: &Feeder, now: Nanos) -> bool {
        if self.waits_until.take_if(|until| *until <= now).is_some() {
            feeder.leave_behind();
        }
        match self.next.as_ref().and_then(|_| feeder.has_room()) {
            None => {
                *self = Self::default();
                feeder.begin_walk()
            }
            Some(true) => {
                self.waits_until = None;
                true
            }
            Some(false) => {
                self.waits_until.get_or_insert_with(|| now.plus(BEHIND));
                false
            }
        }
    }
}

/// Reads the store for all holders, until it is closed.
pub(super) async fn read_store(node: Arc<ClusterNode>) {
    let mut events = node.store.subscribe(None);
    let (mut walk, mut outdated) = (Walk::default(), None::<Nanos>);
    loop {
        let (feeder, now) = (&node.feeder, node.footing.runner.now());
        if outdated.is_some_and(|due| due <= now) {
            outdated = None;
            feeder.refresh_all();
        }
        let may_walk = walk.goes_on(feeder, now);
        if may_walk {
            walk.next = page(&node, walk.next.flatten()).await;
        }
        let taken = match may_walk {
            true => events.try_next(EVENTS).map(Some),
            false => tokio::select! {
                biased;
                taken = events.next(EVENTS) => taken.transpose(),
                // ends: events in the arm before it, the next arm's time, or the node stops
                () = feeder.wanted.notified() => Ok(Some(Vec::new())),
                () = until(&node, outdated.into_iter().chain(walk.waits_until).min()) => Ok(Some(Vec::new())),
            },
        };
        match taken {
            Ok(Some(taken)) => {
                if feeder.note(&taken) {
                    outdated.get_or_insert_with(|| node.footing.runner.now().plus(OUTDATED));
                }
            }
            // The store is closed.
            Ok(None) => return,
            Err(_gap) => {
                events = node.store.subscribe(None);
                feeder.restart_all();
                walk = Walk::default();
            }
        }
        node.take_own();
        node.links().iter().for_each(|link| link.news.notify_one());
    }
}

async fn until(node: &ClusterNode, due: Option<Nanos>) {
    match due {
        Some(due) => node.footing.runner.sleep_until(due).await,
        // ends: the other arms of its only `select!`, or the node stops
        None => std::future::pending().await,
    }
}

/// Reads the next page for all who walk; gives where the walk goes on. A store that cannot be read is asked again.
async fn page(node: &ClusterNode, cursor: Next) -> Option<Next> {
    let feeder = &node.feeder;
    // ends: an executor answers from memory, or the store is closed
    match node.store.snapshot(cursor).await {
        Ok(Ok(page)) => {
            feeder.page(&page.blocks);
            if page.next.is_none() {
                feeder.end_walk();
            }
            page.next.map(Some)
        }
        _ => {
            node.sleep(PAUSE).await;
            Some(cursor)
        }
    }
}

/// What this node holds of its own directory is told without a message.
pub(super) fn own_messages(feeder: &Feeder, me: NodeId) -> impl Iterator<Item = Message> + '_ {
    std::iter::from_fn(move || feeder.next(me))
}

/// Sends one other node what it is to know, for as long as it is a member.
pub(super) async fn send(node: Arc<ClusterNode>, link: Arc<Link>) {
    let mut pause = PAUSE;
    while node.is_linked(&link) {
        if let Err(trouble) = connection(&node, &link, &mut pause).await {
            link.set_state(State { is_connected: false, trouble });
            node.end_feed(&link);
        }
        node.sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// One connection, until it breaks. Says why it did.
async fn connection(node: &Arc<ClusterNode>, link: &Arc<Link>, pause: &mut Duration) -> Result<(), String> {
    let join = node.join_request(&node.members());
    let said = |status: tonic::Status| link::told(&status);
    let joined = link.join(join, CONNECT_TIMEOUT * 2).await.map_err(said)?;
    if wire::node(&joined.node) != Ok(link.id()) {
        return Err(format!("another node listens at {}", link.member.address));
    }
    // Before any bytes are asked of it.
    node.meet(link).await?;
    if let Some(port) = u16::try_from(joined.lane_port).ok().filter(|port| *port > 0) {
        node.open_lane(link.id(), node.footing.network.address(&link.member, port).await?)?;
    }
    let (to, messages) = mpsc::channel(ON_THE_WAY);
    let mut asked = link.feed(ReceiverStream::new(messages)).await.map_err(said)?;
    node.feeder.connect(link.id());
    link.set_state(State { is_connected: true, trouble: String::new() });
    *pause = PAUSE;
    loop {
        // Room first: what is taken from the queue is sent, whatever the other node asks meanwhile.
        let room = tokio::select! {
            biased;
            asked = asked.message() => {
                take_asked(node, link, asked)?;
                continue;
            }
            // ends: the connection, which keep-alive ends (`KEEP_ALIVE`); its end is the arm before it
            room = to.reserve() => room.map_err(|_| "the connection broke".to_owned())?,
        };
        if !node.is_linked(link) {
            return Ok(());
        }
        if planted!("message-lost-to-a-question") {
            drop(room);
            if let Some(message) = node.feeder.next(link.id()) {
                tokio::select! {
                    biased;
                    asked = asked.message() => take_asked(node, link, asked)?,
                    sent = to.send(wire::feed_message(&message)) => sent.map_err(|_| String::new())?,
                }
                continue;
            }
        } else if let Some(message) = node.feeder.next(link.id()) {
            room.send(wire::feed_message(&message));
            continue;
        } else {
            drop(room);
        }
        tokio::select! {
            biased;
            // ends: the connection, which keep-alive ends (`KEEP_ALIVE`); its end is the next arm
            () = link.news.notified() => {}
            asked = asked.message() => take_asked(node, link, asked)?,
        }
    }
}

fn take_asked(
    node: &ClusterNode,
    link: &Link,
    asked: Result<Option<proto::FeedReply>, tonic::Status>,
) -> Result<(), String> {
    match asked {
        Ok(Some(reply)) => {
            let again = wire::asked_again(&reply).map_err(|malformed| malformed.0.to_owned())?;
            node.feeder.again(link.id(), &again);
            Ok(())
        }
        Ok(None) => Err("the other node ended the connection".to_owned()),
        Err(status) => Err(link::told(&status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, StoreId};

    const ME: NodeId = StoreId([1; 16]);
    const OTHER: NodeId = StoreId([2; 16]);
    const THIRD: NodeId = StoreId([3; 16]);
    /// More than may wait for one holder, for each of them.
    const PAGES: u32 = 80;

    fn blocks(page: u32) -> Vec<IndexKey> {
        let block = |n: usize| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&(u64::from(page) << 32 | n as u64).to_le_bytes());
            let (namespace, key) = (NamespaceId([7; 32]), BlockKey(key));
            IndexKey { namespace, key, group: Group(0), coordinate: Coordinate::default() }
        };
        (0..PAGE_BLOCKS).map(block).collect()
    }

    fn three() -> Feeder {
        let feeder = Feeder::default();
        let part = |third: usize| Partition::all().filter(|it| it.number() % 3 == third).collect();
        feeder.hold(ME, [(ME, part(0)), (OTHER, part(1)), (THIRD, part(2))].into());
        feeder
    }

    /// Takes all that waits for a holder: how many blocks, and whether its snapshot has ended.
    fn drain(feeder: &Feeder, node: NodeId) -> (usize, bool) {
        std::iter::from_fn(|| feeder.next(node)).fold((0, false), |(blocks, ended), message| match message {
            Message::Changes(changes) => (blocks + changes.len(), ended),
            Message::Begin(_) => (blocks, ended),
            Message::End(_) => (blocks, true),
        })
    }

    /// Walks the store until each of these holders has its whole snapshot; the other holders take nothing from their queues. Gives how many blocks
    /// each was sent, and how long the walk took.
    fn walk(feeder: &Feeder, reading: &[NodeId]) -> (Vec<usize>, Duration) {
        let (mut walk, mut now, mut page) = (Walk::default(), Nanos::default(), 0);
        let mut told = vec![(0, false); reading.len()];
        for _ in 0..4 * PAGES {
            if walk.goes_on(feeder, now) {
                page = if walk.next.is_none() { 0 } else { page + 1 };
                feeder.page(&blocks(page));
                walk.next = Some(None);
                if page + 1 == PAGES {
                    feeder.end_walk();
                    walk.next = None;
                }
            } else if let Some(until) = walk.waits_until {
                now = now.max(until);
            }
            for ((blocks, ended), node) in told.iter_mut().zip(reading) {
                let (more, over) = drain(feeder, *node);
                (*blocks, *ended) = (*blocks + more, *ended || over);
            }
            if told.iter().all(|(_, ended)| *ended) {
                break;
            }
        }
        assert!(told.iter().all(|(_, ended)| *ended), "{told:?}");
        (told.iter().map(|(blocks, _)| *blocks).collect(), now.since(Nanos::default()))
    }

    #[test]
    fn a_member_that_never_came_costs_the_others_no_block_and_no_time() {
        let feeder = three();
        feeder.connect(OTHER);
        let (told, took) = walk(&feeder, &[ME, OTHER]);
        assert!(told.iter().all(|blocks| *blocks > 100_000), "{told:?}");
        assert_eq!((took, feeder.counts(THIRD).0), (Duration::ZERO, 0));
    }

    #[test]
    fn a_member_that_takes_nothing_costs_the_others_half_a_second_once_and_gets_its_snapshot_when_it_takes() {
        let feeder = three();
        [OTHER, THIRD].into_iter().for_each(|node| feeder.connect(node));
        let (told, took) = walk(&feeder, &[ME, OTHER]);
        assert!(told.iter().all(|blocks| *blocks > 100_000), "{told:?}");
        assert_eq!(took, BEHIND);
        // Another walk for it alone would be in vain.
        assert!(!Walk::default().goes_on(&feeder, Nanos::default()));
        assert_eq!(drain(&feeder, THIRD), (0, false));
        let (told, took) = walk(&feeder, &[THIRD]);
        assert!(told[0] > 100_000 && took.is_zero(), "{told:?} {took:?}");
    }
}
