//! Which member holds which part of the directory.
//!
//! A block's tag gives one of 4,096 partitions. Of all members the one whose score with a partition is highest holds it: so every
//! node computes the same holders from the same members, and when one joins or leaves no partition moves between two others.

use std::fmt;
use std::sync::LazyLock;

use blake3::Hasher;
use blake3::hazmat::{ContextKey, HasherExt, hash_derive_key_context};
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::members::{Members, NodeId};

/// Partitions of the directory.
pub const PARTITIONS: usize = 4096;

/// The name of a block in the directory, the same on every node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub [u8; 16]);

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tag({:032x})", u128::from_be_bytes(self.0))
    }
}

impl Tag {
    /// The tag of one block. Two blocks with one tag cannot be made: it is the beginning of a cryptographic digest.
    pub fn of(namespace: &NamespaceId, group: Group, coordinate: Coordinate, key: &BlockKey) -> Self {
        // The context is digested once, not for each of a read's thousands of blocks.
        static CONTEXT: LazyLock<ContextKey> =
            LazyLock::new(|| hash_derive_key_context("kvarts cluster directory tag, version 1"));
        let mut hasher = Hasher::new_from_context_key(&CONTEXT);
        hasher.update(namespace.as_bytes());
        hasher.update(&group.0.to_le_bytes());
        hasher.update(&coordinate.to_u64().to_le_bytes());
        hasher.update(key.as_bytes());
        let mut tag = [0; 16];
        hasher.finalize_xof().fill(&mut tag);
        Self(tag)
    }

    /// In which partition it is.
    pub fn partition(&self) -> Partition {
        let [first, second, ..] = self.0;
        Partition(u16::from_be_bytes([first, second]) >> 4)
    }
}

/// One part of the directory: a number under [`PARTITIONS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Partition(u16);

impl Partition {
    /// The partition of this number, if there is one.
    pub fn new(number: u16) -> Option<Self> {
        (usize::from(number) < PARTITIONS).then_some(Self(number))
    }

    /// Its number.
    pub fn number(self) -> usize {
        usize::from(self.0)
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..PARTITIONS as u16).map(Self)
    }
}

/// Who holds which partition in one epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holders {
    epoch: u64,
    /// For each partition a place in `nodes`.
    places: Vec<u16>,
    nodes: Vec<NodeId>,
}

impl Holders {
    /// Computed from the members.
    pub fn of(members: &Members) -> Self {
        let nodes: Vec<NodeId> = members.list().iter().map(|member| member.id).collect();
        let seeds: Vec<u64> = nodes.iter().map(seed).collect();
        let best = |partition: Partition| {
            let scored = (0u16..).zip(&seeds).map(|(place, seed)| (score(*seed, partition), place));
            // Of equal scores the later name: any rule serves that all nodes follow.
            scored.max().map_or(0, |(_, place)| place)
        };
        let places = Partition::all().map(best).collect();
        Self { epoch: members.epoch(), places, nodes }
    }

    /// The epoch whose members these are.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Who holds a partition.
    pub fn holder(&self, partition: Partition) -> Option<NodeId> {
        self.nodes.get(usize::from(*self.places.get(partition.number())?)).copied()
    }

    /// Blocks by who holds their partition: the places of each holder's among `tags`, in their order.
    pub fn split(&self, tags: &[Tag]) -> Vec<(NodeId, Vec<usize>)> {
        let fair = tags.len() / self.nodes.len().max(1);
        // Parts differ a little, and few of them have to grow.
        let room = fair + fair / 4 + 4;
        let mut split: Vec<_> = self.nodes.iter().map(|node| (*node, Vec::with_capacity(room))).collect();
        for (place, tag) in tags.iter().enumerate() {
            let holder = self.places.get(tag.partition().number()).copied().map_or(0, usize::from);
            if let Some((_, places)) = split.get_mut(holder) {
                places.push(place);
            }
        }
        split.retain(|(_, places)| !places.is_empty());
        split
    }

    /// The partitions that a node holds.
    pub fn held_by(&self, node: NodeId) -> impl Iterator<Item = Partition> + '_ {
        Partition::all().filter(move |partition| self.holder(*partition) == Some(node))
    }
}

fn seed(node: &NodeId) -> u64 {
    let digest = blake3::derive_key("kvarts cluster rendezvous, version 1", node.as_bytes());
    let [a, b, c, d, e, f, g, h, ..] = digest;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// How much a node wants a partition. The steps are those of SplitMix64's output.
fn score(seed: u64, partition: Partition) -> u64 {
    let mut mixed = seed ^ u64::from(partition.0).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::Member;

    fn node(n: u16) -> NodeId {
        let mut id = [7; 16];
        id[..2].copy_from_slice(&n.to_le_bytes());
        kvarts_layout::StoreId(id)
    }

    fn members(numbers: impl Iterator<Item = u16>) -> Members {
        let one = |n| Member { id: node(n), address: format!("host-{n}:1"), zone: String::new() };
        Members::new(1, numbers.map(one).collect()).unwrap()
    }

    #[test]
    fn partitions_are_spread_evenly() {
        for count in [1, 3, 8, 100] {
            let holders = Holders::of(&members(0..count));
            let most = (0..count).map(|n| holders.held_by(node(n)).count()).max().unwrap();
            let fair = PARTITIONS / usize::from(count);
            assert!(most <= fair + fair / 2 + 4, "{most} of {PARTITIONS} with {count} nodes");
        }
    }

    #[test]
    fn when_a_node_leaves_only_its_own_partitions_move() {
        let (all, fewer) = (Holders::of(&members(0..8)), Holders::of(&members((0..8).filter(|n| *n != 3))));
        for partition in Partition::all() {
            let (before, after) = (all.holder(partition), fewer.holder(partition));
            assert!(before == after || before == Some(node(3)), "{partition:?} moved between two others");
            assert_ne!(after, Some(node(3)));
        }
    }

    #[test]
    fn blocks_are_split_by_their_holders_and_keep_their_order() {
        let holders = Holders::of(&members(0..5));
        let name = |n: u64| Tag(*blake3::hash(&n.to_le_bytes()).as_bytes().first_chunk().unwrap());
        let tags: Vec<Tag> = (0..1000).map(name).collect();
        let split = holders.split(&tags);
        assert_eq!(split.iter().map(|(_, places)| places.len()).sum::<usize>(), 1000);
        for (node, places) in &split {
            assert!(places.is_sorted());
            assert!(places.iter().all(|place| holders.holder(tags[*place].partition()) == Some(*node)));
        }
        assert_eq!(holders.split(&[]), Vec::new());
    }

    /// Written down: nodes of different versions must agree.
    #[test]
    fn tags_and_holders_are_those_of_version_1() {
        let tag = Tag::of(&NamespaceId([1; 32]), Group(2), Coordinate::default(), &BlockKey([3; 32]));
        let holders = Holders::of(&members(0..3));
        let first: Vec<u16> = holders.places.iter().take(12).copied().collect();
        assert_eq!(format!("{tag:?} {:?} {first:?}", tag.partition()), GOLDEN);
    }

    const GOLDEN: &str =
        "Tag(1919c4ae859f7af025f5ca8c17fc1836) Partition(401) [1, 1, 0, 2, 0, 1, 1, 1, 1, 0, 2, 2]";

    #[test]
    fn whatever_names_a_block_is_in_its_tag() {
        let of = |namespace, group, key| {
            Tag::of(&NamespaceId([namespace; 32]), Group(group), Coordinate::default(), &BlockKey([key; 32]))
        };
        let tags = [of(0, 0, 0), of(1, 0, 0), of(0, 1, 0), of(0, 0, 1)];
        for (n, tag) in tags.iter().enumerate() {
            assert!(tags[n + 1..].iter().all(|other| other != tag));
        }
    }
}
