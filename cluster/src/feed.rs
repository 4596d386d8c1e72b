//! What a node sends to one holder of partitions, so that the holder's directory says what the node has.
//!
//! Nodes hear of new members at different times. So both sides see to it that nothing is missed: a sender that learns of a new
//! holder sends it a snapshot, and a holder that learns of a new partition or member asks for one ([`Feed::again`]).
//!
//! After each connection a partition begins with a snapshot; from then on its changes follow in their order. A holder that takes
//! them too slowly costs no memory: what does not fit is dropped, and the partition gets another snapshot. A snapshot is read from
//! the node's own store as it is sent, a few blocks at a time, with the changes of the same partition between them: what is read
//! at a time is sent before what changes after it, so the last word about a block is the last that happened.

use std::collections::{BTreeSet, VecDeque};

use kvarts_layout::OriginId;

use crate::directory::Change;
use crate::partition::{Partition, Tag};

/// Changes that wait for one holder.
pub const WAITING_MAX: usize = 64 << 10;
/// Changes of one message.
pub const MESSAGE_MAX: usize = 1024;

/// The blocks of a node, by tag.
pub trait Blocks {
    /// Some of what the node has of a partition behind `after`, in the order of tags; nothing means that there is no more.
    fn after(&self, partition: Partition, after: Option<Tag>, most: usize) -> Vec<(Tag, OriginId)>;
}

/// One message to a holder, in order with all others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// Everything of this partition follows, among changes.
    Begin(Partition),
    /// What happened, or is so.
    Changes(Vec<Change>),
    /// That was everything.
    End(Partition),
}

/// A snapshot that is being sent.
#[derive(Debug)]
struct Walk {
    partition: Partition,
    /// It was announced.
    begun: bool,
    after: Option<Tag>,
}

/// What one holder is to be sent.
#[derive(Debug, Default)]
pub struct Feed {
    /// Partitions that the holder holds, as far as this node knows.
    partitions: BTreeSet<Partition>,
    /// Those of which it needs a snapshot.
    stale: BTreeSet<Partition>,
    walk: Option<Walk>,
    changes: VecDeque<Change>,
    snapshots: u64,
}

impl Feed {
    /// The holder holds these partitions from now on. What it held before and still does goes on as it was.
    pub fn hold(&mut self, partitions: BTreeSet<Partition>) {
        self.stale.retain(|partition| partitions.contains(partition));
        self.stale.extend(partitions.difference(&self.partitions));
        self.partitions = partitions;
        let held = &self.partitions;
        if self.walk.as_ref().is_some_and(|walk| !held.contains(&walk.partition)) {
            self.walk = None;
        }
    }

    /// The holder asks for these partitions again: it holds them only now, or dropped what it had of this node. Those that this
    /// node does not know it to hold begin when it learns so.
    pub fn again(&mut self, partitions: &BTreeSet<Partition>) {
        self.stale.extend(partitions.intersection(&self.partitions));
        if self.walk.as_ref().is_some_and(|walk| partitions.contains(&walk.partition)) {
            self.walk = None;
        }
    }

    /// A connection was made, or made again: what was sent before may be lost.
    pub fn connected(&mut self) {
        self.stale.clone_from(&self.partitions);
        self.walk = None;
        self.changes.clear();
    }

    /// Something happened on this node.
    pub fn note(&mut self, change: Change) {
        let (Change::Stored(tag, _) | Change::Gone(tag)) = change;
        let partition = tag.partition();
        // Of one that waits for its snapshot nothing need be said before it.
        if !self.partitions.contains(&partition) || self.stale.contains(&partition) {
            return;
        }
        if self.changes.len() < WAITING_MAX {
            self.changes.push_back(change);
            return;
        }
        // All that wait are of partitions that begin again: no half of them is worth more than the other.
        for waiting in std::mem::take(&mut self.changes) {
            let (Change::Stored(tag, _) | Change::Gone(tag)) = waiting;
            self.stale.insert(tag.partition());
        }
        self.stale.insert(partition);
        let stale = &self.stale;
        if self.walk.as_ref().is_some_and(|walk| stale.contains(&walk.partition)) {
            self.walk = None;
        }
    }

    /// The next message, if there is anything to say.
    pub fn next(&mut self, blocks: &impl Blocks) -> Option<Message> {
        // Before anything else is read: what happened is older than what is read now.
        if !self.changes.is_empty() {
            let count = self.changes.len().min(MESSAGE_MAX);
            return Some(Message::Changes(self.changes.drain(..count).collect()));
        }
        if self.walk.is_none() {
            let partition = self.stale.pop_first()?;
            self.snapshots += 1;
            self.walk = Some(Walk { partition, begun: false, after: None });
        }
        let walk = self.walk.as_mut()?;
        let partition = walk.partition;
        if !std::mem::replace(&mut walk.begun, true) {
            return Some(Message::Begin(partition));
        }
        let found = blocks.after(partition, walk.after, MESSAGE_MAX);
        match found.last() {
            Some((last, _)) => {
                walk.after = Some(*last);
                Some(Message::Changes(
                    found.into_iter().map(|(tag, origin)| Change::Stored(tag, origin)).collect(),
                ))
            }
            None => {
                self.walk = None;
                Some(Message::End(partition))
            }
        }
    }

    /// Snapshots that were begun so far.
    pub fn snapshots(&self) -> u64 {
        self.snapshots
    }

    /// Changes that wait.
    pub fn waiting(&self) -> usize {
        self.changes.len()
    }
}

#[cfg(test)]
mod tests;
