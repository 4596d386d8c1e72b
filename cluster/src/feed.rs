//! What a node sends to one holder of partitions, so that the holder's directory says what the node has.
//!
//! Nodes hear of new members at different times. So both sides see to it that nothing is missed: a sender that learns of a new
//! holder sends it a snapshot, and a holder that learns of a new partition or member asks for one ([`Feed::again`]).
//!
//! After each connection a partition begins with a snapshot; from then on its changes follow in their order. A snapshot is the
//! node's blocks page by page, as they lie in its store, among the changes that happen meanwhile: what is read at a time is queued
//! before what changes after it ([`Feed::page`], [`Feed::note`]), so the last word about a block is the last that happened. One
//! walk through the store serves all holders that need a snapshot.
//!
//! A holder that takes its messages too slowly costs no memory: what does not fit is dropped, and its partitions get another
//! snapshot once it has taken something. For one that is not connected nothing waits, and no walk waits for one that takes nothing
//! ([`Feed::fall_behind`]): both cost what they would have known, and no other holder anything.

use std::collections::{BTreeSet, VecDeque};

use kvarts_layout::planted;

use crate::directory::Change;
use crate::partition::{Partition, Tag};

/// Changes that wait for one holder.
pub const WAITING_MAX: usize = 64 << 10;
/// Changes of one message.
pub const MESSAGE_MAX: usize = 1024;

/// One message to a holder, in order with all others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// Everything of these partitions follows, among changes.
    Begin(BTreeSet<Partition>),
    /// What happened, or is so.
    Changes(Vec<Change>),
    /// That was everything of these partitions.
    End(BTreeSet<Partition>),
}

/// Something that waits for the holder.
#[derive(Debug)]
enum Waiting {
    Begin,
    Change(Change),
    End,
}

/// A snapshot.
#[derive(Debug)]
struct Walk {
    partitions: BTreeSet<Partition>,
    /// All pages were queued.
    is_read: bool,
}

/// What one holder is to be sent.
#[derive(Debug, Default)]
pub struct Feed {
    /// There is a connection to the holder: without one nothing waits for it, and it takes part in no walk.
    is_connected: bool,
    /// It took too little: it takes part in no walk before it has taken something.
    is_behind: bool,
    /// Partitions that the holder holds, as far as this node knows.
    partitions: BTreeSet<Partition>,
    /// Those of which it needs a snapshot that has not begun.
    stale: BTreeSet<Partition>,
    /// All of its partitions get another snapshot; until that begins changes go on.
    is_outdated: bool,
    /// The snapshot that is under way, or whose end waits.
    walk: Option<Walk>,
    waiting: VecDeque<Waiting>,
    snapshots: u64,
}

impl Feed {
    /// The holder holds these partitions from now on. What it held before and still does goes on as it was.
    pub fn hold(&mut self, partitions: BTreeSet<Partition>) {
        self.stale.retain(|partition| partitions.contains(partition));
        self.stale.extend(partitions.difference(&self.partitions));
        if let Some(walk) = &mut self.walk {
            walk.partitions.retain(|partition| partitions.contains(partition));
        }
        self.partitions = partitions;
    }

    /// The holder asks for these partitions again: it holds them only now, or dropped what it had of this node. Those that this
    /// node does not know it to hold begin when it learns so.
    pub fn again(&mut self, partitions: &BTreeSet<Partition>) {
        self.stale.extend(partitions.intersection(&self.partitions));
        if let Some(walk) = &mut self.walk {
            walk.partitions.retain(|partition| !partitions.contains(partition));
        }
    }

    /// A connection to the holder was made: everything begins again.
    pub fn connect(&mut self) {
        self.is_connected = true;
        if !planted!("connected-without-snapshot") {
            self.restart();
        }
    }

    /// The connection is gone, and with it what was on its way.
    pub fn disconnect(&mut self) {
        self.is_connected = false;
        if !planted!("connected-without-snapshot") {
            self.restart();
        }
    }

    /// Everything begins again: what was sent before may be lost, or the node does not know what happened to its own blocks.
    pub fn restart(&mut self) {
        self.stale.clone_from(&self.partitions);
        (self.is_outdated, self.is_behind) = (false, false);
        self.walk = None;
        self.waiting.clear();
    }

    /// What the holder has of this node may be more than there is: it gets another snapshot, after what waits and what is under
    /// way.
    pub fn refresh(&mut self) {
        self.is_outdated = true;
    }

    /// Whether it waits for a walk through the node's store.
    pub fn wants_walk(&self) -> bool {
        let may_walk = self.is_connected && !self.is_behind && self.walk.is_none();
        may_walk && (self.is_outdated || !self.stale.is_empty())
    }

    /// Leaves the walk, for which there was no room here: its partitions begin again, when the holder has taken something.
    pub fn fall_behind(&mut self) {
        self.drop_waiting(None);
    }

    /// A walk begins: it serves what is stale now. A feed that takes part already begins again at the next one.
    pub fn begin_walk(&mut self) {
        if self.wants_walk() {
            self.snapshots += 1;
            let stale = std::mem::take(&mut self.stale);
            let is_outdated = std::mem::take(&mut self.is_outdated);
            let partitions = if is_outdated { self.partitions.clone() } else { stale };
            self.walk = Some(Walk { partitions, is_read: false });
            self.push(Waiting::Begin);
        }
    }

    /// Whether it takes part in the walk.
    pub fn is_walking(&self) -> bool {
        self.is_connected && self.walk.as_ref().is_some_and(|walk| !walk.is_read)
    }

    /// Whether a page of `blocks` blocks fits.
    pub fn has_room(&self, blocks: usize) -> bool {
        self.waiting.len().saturating_add(blocks) < WAITING_MAX
    }

    /// The next page of the walk: blocks that the node has.
    pub fn page(&mut self, blocks: &[Tag]) {
        for tag in blocks {
            let walk = self.walk.as_ref().filter(|walk| !walk.is_read);
            if walk.is_some_and(|walk| walk.partitions.contains(&tag.partition())) {
                self.push(Waiting::Change(Change::Stored(*tag)));
            }
        }
    }

    /// That was every page.
    pub fn end_walk(&mut self) {
        if let Some(walk) = self.walk.as_mut().filter(|walk| !walk.is_read) {
            walk.is_read = true;
            self.push(Waiting::End);
        }
    }

    /// Something happened on this node.
    pub fn note(&mut self, change: Change) {
        let partition = change.tag().partition();
        // Of one that waits for its snapshot nothing need be said before it.
        if self.is_connected && self.partitions.contains(&partition) && !self.stale.contains(&partition) {
            self.push(Waiting::Change(change));
        }
    }

    fn push(&mut self, waiting: Waiting) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back(waiting);
            return;
        }
        self.drop_waiting(Some(waiting));
    }

    /// Whether the holder has to take something before it takes part in a walk.
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// What waits is dropped, and no half of it is worth more than the other: its partitions begin again.
    fn drop_waiting(&mut self, more: Option<Waiting>) {
        self.is_behind = true;
        let dropped = std::mem::take(&mut self.waiting).into_iter().chain(more);
        let changed = dropped.filter_map(|waiting| match waiting {
            Waiting::Change(change) => Some(change.tag().partition()),
            Waiting::Begin | Waiting::End => None,
        });
        let walked = self.walk.take().map(|walk| walk.partitions).unwrap_or_default();
        self.stale.extend(changed.chain(walked).filter(|partition| self.partitions.contains(partition)));
    }

    /// The next message, if there is anything to say: there is room on the way to the holder.
    pub fn take(&mut self) -> Option<Message> {
        self.is_behind = false;
        let mut changes = Vec::new();
        while let Some(Waiting::Change(change)) = self.waiting.front() {
            if changes.len() == MESSAGE_MAX {
                break;
            }
            changes.push(*change);
            self.waiting.pop_front();
        }
        if !changes.is_empty() {
            return Some(Message::Changes(changes));
        }
        match self.waiting.pop_front()? {
            Waiting::Begin => Some(Message::Begin(
                self.walk.as_ref().map(|walk| walk.partitions.clone()).unwrap_or_default(),
            )),
            Waiting::End => {
                Some(Message::End(self.walk.take().map(|walk| walk.partitions).unwrap_or_default()))
            }
            Waiting::Change(change) => Some(Message::Changes(vec![change])),
        }
    }

    /// Snapshots that were begun so far.
    pub fn snapshots(&self) -> u64 {
        self.snapshots
    }

    /// What waits.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests;
