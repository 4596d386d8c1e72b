//! Which nodes hold which blocks, as far as peers and routers know: all of them, whatever their number.

use crate::ids::IdMap;

/// Who holds one block, in the order of their numbers. Most blocks have one holder, which takes no memory of its own.
#[derive(Clone, Debug)]
enum Holders {
    One(u16),
    More(Vec<u16>),
}

impl Holders {
    fn all(&self) -> &[u16] {
        match self {
            Self::One(node) => std::slice::from_ref(node),
            Self::More(nodes) => nodes,
        }
    }

    fn add(&mut self, node: u16) {
        match self {
            Self::One(one) if *one == node => {}
            Self::One(one) => *self = Self::More(vec![node.min(*one), node.max(*one)]),
            Self::More(nodes) => {
                if let Err(place) = nodes.binary_search(&node) {
                    nodes.insert(place, node);
                }
            }
        }
    }

    /// Whether none is left.
    fn remove(&mut self, node: u16) -> bool {
        match self {
            Self::One(one) => *one == node,
            Self::More(nodes) => {
                if let Ok(place) = nodes.binary_search(&node) {
                    nodes.remove(place);
                }
                if let [one] = nodes.as_slice() {
                    *self = Self::One(*one);
                }
                false
            }
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Directory {
    holders: IdMap<Holders>,
}

impl Directory {
    pub(super) fn add(&mut self, block: u64, node: u16) {
        self.holders.entry(block).and_modify(|holders| holders.add(node)).or_insert(Holders::One(node));
    }

    pub(super) fn remove(&mut self, block: u64, node: u16) {
        if self.holders.get_mut(&block).is_some_and(|holders| holders.remove(node)) {
            self.holders.remove(&block);
        }
    }

    /// In the order of their numbers.
    pub(super) fn of(&self, block: u64) -> &[u16] {
        self.holders.get(&block).map_or(&[], Holders::all)
    }

    /// Nodes that hold leading blocks, and how many each: as long as walking once through the holders of each block that
    /// some node still has all before of.
    pub(super) fn leading(&self, blocks: &[u64]) -> Leading {
        let mut leading = Vec::new();
        let Some(first) = blocks.first() else { return Leading(leading) };
        let (mut alive, mut depth) = (self.of(*first).to_vec(), 1);
        for block in blocks.iter().skip(1) {
            if alive.is_empty() {
                break;
            }
            let mut here = self.of(*block).iter().peekable();
            alive.retain(|node| {
                while here.next_if(|other| *other < node).is_some() {}
                let stays = here.peek() == Some(&node);
                if !stays {
                    leading.push((*node, depth));
                }
                stays
            });
            depth += 1;
        }
        leading.extend(alive.into_iter().map(|node| (node, depth)));
        Leading(leading)
    }
}

/// Nodes with the number of leading blocks that each holds, those with the fewest first, and by their numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Leading(Vec<(u16, u32)>);

impl Leading {
    pub(super) fn all(&self) -> &[(u16, u32)] {
        &self.0
    }

    /// Those with the most.
    pub(super) fn most(&self) -> &[(u16, u32)] {
        let most = self.0.last().map_or(0, |(_, blocks)| *blocks);
        let from = self.0.partition_point(|(_, blocks)| *blocks < most);
        self.0.get(from..).unwrap_or_default()
    }

    /// How many a node has.
    pub(super) fn of(&self, node: u16) -> u32 {
        self.0.iter().find(|(other, _)| *other == node).map_or(0, |(_, blocks)| *blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_holder_is_known_and_leading_blocks_are_those_without_a_gap() {
        let mut directory = Directory::default();
        // Of blocks 0..10 node n holds the first n + 1, and node 300 all but the second one.
        for node in (0..9u16).rev() {
            (0..=u64::from(node)).for_each(|block| directory.add(block, node));
        }
        for block in (0..10).filter(|block| *block != 1) {
            directory.add(block, 300);
            directory.add(block, 300);
        }
        assert_eq!(directory.of(0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 300]);
        let blocks: Vec<u64> = (0..10).collect();
        let leading = directory.leading(&blocks);
        let mut expected: Vec<(u16, u32)> = (0..9u16).map(|node| (node, u32::from(node) + 1)).collect();
        expected.insert(1, (300, 1));
        assert_eq!(leading.all(), expected);
        assert_eq!(
            (leading.most(), leading.of(300), leading.of(7), leading.of(77)),
            (&[(8, 9)][..], 1, 8, 0)
        );
        let two = directory.leading(&blocks[..2]);
        assert_eq!(two.most(), (1..9).map(|node| (node, 2)).collect::<Vec<_>>());
        assert_eq!(directory.leading(&[99, 0]).most(), []);
        assert_eq!(directory.leading(&[]).all(), []);
    }

    #[test]
    fn holders_go_one_by_one_and_nothing_stays_behind_the_last() {
        let mut directory = Directory::default();
        (0..12).for_each(|node| directory.add(5, node));
        for node in [3, 0, 11, 3, 1, 2, 4, 5, 6, 7, 8] {
            directory.remove(5, node);
        }
        assert_eq!(directory.of(5), [9, 10]);
        directory.remove(5, 10);
        directory.remove(5, 10);
        assert_eq!(directory.of(5), [9]);
        directory.remove(5, 9);
        assert!(directory.of(5).is_empty() && directory.holders.is_empty());
    }
}
