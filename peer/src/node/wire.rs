//! The directory's messages: names of blocks, partitions and nodes as bytes, with bounds.

use std::collections::BTreeSet;

use bytes::Bytes;
use kvarts_cluster::directory::Change;
use kvarts_cluster::feed;
use kvarts_cluster::members::NodeId;
use kvarts_cluster::partition::{PARTITIONS, Partition, Tag};
use kvarts_wire::proto;

/// Names of blocks that one look-up may have.
pub(super) const TAGS_MAX: usize = 64 << 10;
/// Bytes of one change.
const CHANGE_BYTES: usize = 17;

/// What is wrong with a message of another node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Malformed(pub(super) &'static str);

impl From<Malformed> for tonic::Status {
    fn from(malformed: Malformed) -> Self {
        Self::invalid_argument(malformed.0)
    }
}

/// A node's name.
pub(super) fn node(bytes: &[u8]) -> Result<NodeId, Malformed> {
    bytes.try_into().map(kvarts_layout::StoreId).map_err(|_| Malformed("node: 16 bytes"))
}

/// Names of blocks.
pub(super) fn tag_slice(bytes: &[u8]) -> Result<&[[u8; 16]], Malformed> {
    match bytes.as_chunks::<16>() {
        (tags, []) if tags.len() <= TAGS_MAX => Ok(tags),
        _ => Err(Malformed("tags: each tag needs 16 bytes, and at most 65,536 tags are allowed")),
    }
}

/// The name of one.
pub(super) fn tag(bytes: &[u8]) -> Result<Tag, Malformed> {
    bytes.try_into().map(Tag).map_err(|_| Malformed("tag: 16 bytes are required"))
}

/// Some of these names, by their places, as bytes.
pub(super) fn tag_bytes(tags: &[Tag], places: &[usize]) -> Bytes {
    let mut bytes = Vec::with_capacity(places.len() * 16);
    let some = places.iter().filter_map(|place| tags.get(*place));
    some.for_each(|tag| bytes.extend_from_slice(&tag.0));
    bytes.into()
}

/// Who owns the chains that begin with some of `names` names: the place of each name, and the owner.
pub(super) fn owners(list: &[u8], nodes: &[NodeId], names: usize) -> Result<Vec<(usize, NodeId)>, Malformed> {
    const WRONG: Malformed = Malformed("the list of owners is not valid");
    let (all, []) = list.as_chunks::<6>() else { return Err(WRONG) };
    if all.len() > names {
        return Err(WRONG);
    }
    let one = |[a, b, c, d, e, f]: &[u8; 6]| {
        let place = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        let owner = nodes.get(usize::from(u16::from_le_bytes([*e, *f]))).copied();
        owner.filter(|_| place < names).map(|owner| (place, owner)).ok_or(WRONG)
    };
    all.iter().map(one).collect()
}

/// Places of some of `names` names.
pub(super) fn places(list: &[u8], names: usize) -> Result<Vec<usize>, Malformed> {
    const WRONG: Malformed = Malformed("the list of positions is not valid");
    let (all, []) = list.as_chunks::<4>() else { return Err(WRONG) };
    if all.len() > names {
        return Err(WRONG);
    }
    let place = |bytes: &[u8; 4]| Some(u32::from_le_bytes(*bytes) as usize).filter(|place| *place < names);
    all.iter().map(|bytes| place(bytes).ok_or(WRONG)).collect()
}

fn partitions(bytes: &[u8]) -> Result<BTreeSet<Partition>, Malformed> {
    let (all, []) = bytes.as_chunks::<2>() else {
        return Err(Malformed(
            "partitions: each partition needs two \
        bytes",
        ));
    };
    if all.len() > PARTITIONS {
        return Err(Malformed("partitions: the list has more partitions than exist"));
    }
    let one = |bytes: &[u8; 2]| {
        Partition::new(u16::from_le_bytes(*bytes))
            .ok_or(Malformed("partitions: the number of a partition is too large"))
    };
    all.iter().map(one).collect()
}

fn partition_bytes(partitions: &BTreeSet<Partition>) -> Bytes {
    partitions.iter().flat_map(|partition| (partition.number() as u16).to_le_bytes()).collect()
}

/// What a node sends of its blocks, as a message.
pub(super) fn feed_message(message: &feed::Message) -> proto::FeedMessage {
    let mut wire = proto::FeedMessage::default();
    match message {
        feed::Message::Begin(partitions) => wire.begin = partition_bytes(partitions),
        feed::Message::End(partitions) => wire.end = partition_bytes(partitions),
        feed::Message::Changes(changes) => {
            let mut bytes = Vec::with_capacity(changes.len() * CHANGE_BYTES);
            for change in changes {
                bytes.extend_from_slice(&change.tag().0);
                bytes.push(u8::from(matches!(change, Change::Stored(_))));
            }
            wire.changes = bytes.into();
        }
    }
    wire
}

/// What another node sent of its blocks.
pub(super) fn feed_messages(wire: &proto::FeedMessage) -> Result<Vec<feed::Message>, Malformed> {
    let (changes, []) = wire.changes.as_chunks::<CHANGE_BYTES>() else {
        return Err(Malformed("changes: each change needs 17 bytes"));
    };
    if changes.len() > feed::MESSAGE_MAX {
        return Err(Malformed("changes: the message has too many changes"));
    }
    let change = |[tag @ .., what]: &[u8; CHANGE_BYTES]| match what {
        0 => Ok(Change::Gone(Tag(*tag))),
        1 => Ok(Change::Stored(Tag(*tag))),
        _ => Err(Malformed("changes: the kind of a change must be 0 or 1")),
    };
    let mut found = Vec::new();
    if !wire.begin.is_empty() {
        found.push(feed::Message::Begin(partitions(&wire.begin)?));
    }
    if !changes.is_empty() {
        found.push(feed::Message::Changes(changes.iter().map(change).collect::<Result<_, _>>()?));
    }
    if !wire.end.is_empty() {
        found.push(feed::Message::End(partitions(&wire.end)?));
    }
    Ok(found)
}

/// A holder asks for partitions again.
pub(super) fn again(partitions: &BTreeSet<Partition>) -> proto::FeedReply {
    proto::FeedReply { again: partition_bytes(partitions) }
}

/// What a holder asks for again.
pub(super) fn asked_again(wire: &proto::FeedReply) -> Result<BTreeSet<Partition>, Malformed> {
    partitions(&wire.again)
}

/// Copies of blocks, for a message: nodes are named once.
#[derive(Debug, Default)]
pub(super) struct CopyList {
    nodes: Vec<NodeId>,
    copies: Vec<u8>,
}

impl CopyList {
    /// An empty one, with memory for this number of blocks without a copy.
    pub(super) fn with_room(blocks: usize) -> Self {
        Self { nodes: Vec::new(), copies: Vec::with_capacity(blocks) }
    }

    /// The place of a node, which is named if it was not.
    pub(super) fn place_of(&mut self, node: NodeId) -> u16 {
        let place = self.nodes.iter().position(|known| *known == node).unwrap_or_else(|| {
            self.nodes.push(node);
            self.nodes.len() - 1
        });
        place as u16
    }

    /// The copies of the next block.
    pub(super) fn push(&mut self, nodes: impl Iterator<Item = NodeId>) {
        let count_at = self.copies.len();
        self.copies.push(0);
        let mut count = 0u8;
        for node in nodes {
            let place = self.place_of(node);
            self.copies.extend_from_slice(&place.to_le_bytes());
            count += 1;
        }
        if let Some(place) = self.copies.get_mut(count_at) {
            *place = count;
        }
    }

    /// The nodes that were named, and the list.
    pub(super) fn into_parts(self) -> (Vec<NodeId>, Bytes) {
        (self.nodes, self.copies.into())
    }
}

/// The copies of `blocks` blocks. `nodes` are those that the list names.
pub(super) fn copies(list: &[u8], nodes: &[NodeId], blocks: usize) -> Result<Vec<Vec<NodeId>>, Malformed> {
    const WRONG: Malformed = Malformed("the list of copies is not valid");
    let (mut left, mut found) = (list, Vec::with_capacity(blocks.min(TAGS_MAX)));
    for _ in 0..blocks {
        let (count, rest) = left.split_first().ok_or(WRONG)?;
        let (places, rest) = rest.split_at_checked(usize::from(*count) * 2).ok_or(WRONG)?;
        let place =
            |bytes: &[u8; 2]| nodes.get(usize::from(u16::from_le_bytes(*bytes))).copied().ok_or(WRONG);
        found.push(places.as_chunks::<2>().0.iter().map(place).collect::<Result<_, _>>()?);
        left = rest;
    }
    if left.is_empty() { Ok(found) } else { Err(WRONG) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(n: u8) -> NodeId {
        kvarts_layout::StoreId([n; 16])
    }

    proptest! {
        #[test]
        fn what_a_node_says_of_its_blocks_arrives_as_it_was_said(
            changes in prop::collection::vec((any::<[u8; 16]>(), any::<bool>()), 1..100),
            parts in prop::collection::btree_set(0u16..4096, 1..50),
        ) {
            let change = |(tag, there): &([u8; 16], bool)| match there {
                true => Change::Stored(Tag(*tag)),
                false => Change::Gone(Tag(*tag)),
            };
            let parts: BTreeSet<Partition> = parts.into_iter().filter_map(Partition::new).collect();
            let changes = feed::Message::Changes(changes.iter().map(change).collect());
            for message in [changes, feed::Message::Begin(parts.clone()), feed::Message::End(parts.clone())] {
                prop_assert_eq!(feed_messages(&feed_message(&message)), Ok(vec![message]));
            }
            prop_assert_eq!(asked_again(&again(&parts)), Ok(parts));
        }

        #[test]
        fn copies_arrive_as_they_were_said(said in prop::collection::vec(prop::collection::vec(0u8..9, 0..5), 0..50)) {
            let said: Vec<Vec<NodeId>> = said.into_iter().map(|of| of.into_iter().map(id).collect()).collect();
            let mut list = CopyList::default();
            said.iter().for_each(|nodes| list.push(nodes.iter().copied()));
            let (nodes, bytes) = list.into_parts();
            prop_assert_eq!(copies(&bytes, &nodes, said.len()), Ok(said));
        }

        #[test]
        fn bytes_of_a_hostile_node_are_refused_or_bounded(bytes in prop::collection::vec(any::<u8>(), 0..200), blocks in 0usize..100) {
            let _ = copies(&bytes, &[id(1), id(2)], blocks);
            let _ = tag_slice(&bytes);
            let _ = owners(&bytes, &[id(1), id(2)], blocks);
            let _ = node(&bytes);
            let wire = proto::FeedMessage { changes: bytes.clone().into(), begin: bytes.clone().into(), end: bytes.into() };
            let _ = feed_messages(&wire);
        }
    }

    #[test]
    fn a_list_for_fewer_or_more_blocks_is_refused() {
        let mut list = CopyList::default();
        list.push([id(1)].into_iter());
        list.push([].into_iter());
        let (nodes, bytes) = list.into_parts();
        assert!(copies(&bytes, &nodes, 2).is_ok());
        assert!(copies(&bytes, &nodes, 1).is_err() && copies(&bytes, &nodes, 3).is_err());
        assert!(copies(&bytes, &[], 2).is_err(), "a node that was not named");
    }
}
