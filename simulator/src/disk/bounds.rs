//! What a replay stands beside: an exact LRU over blocks, and a cache without bounds.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::IdMap;

/// Hits of an exact LRU over blocks, as leading runs: a request gets what is there before its first miss.
#[derive(Debug)]
pub struct LruHits {
    capacity: u64,
    last: IdMap<u64>,
    order: BTreeMap<u64, u64>,
    clock: u64,
    /// Hits so far.
    pub hits: u64,
}

impl LruHits {
    /// An LRU of `capacity` blocks.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, last: IdMap::default(), order: BTreeMap::new(), clock: 0, hits: 0 }
    }

    /// The next request.
    pub fn request(&mut self, blocks: &[u64]) {
        self.hits += blocks.iter().take_while(|block| self.last.contains_key(block)).count() as u64;
        // The blocks before others are used after them: of one request the last leaves first.
        for block in blocks.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.last.insert(*block, self.clock) {
                self.order.remove(&before);
            }
            self.order.insert(self.clock, *block);
        }
        while self.last.len() as u64 > self.capacity {
            if let Some((_, block)) = self.order.pop_first() {
                self.last.remove(&block);
            }
        }
    }
}

/// Hits of a cache without bounds.
#[derive(Debug, Default)]
pub struct IdealHits {
    seen: IdMap<()>,
    /// Hits so far.
    pub hits: u64,
}

impl IdealHits {
    /// The next request.
    pub fn request(&mut self, blocks: &[u64]) {
        self.hits += blocks.iter().take_while(|block| self.seen.contains_key(block)).count() as u64;
        self.seen.extend(blocks.iter().map(|block| (*block, ())));
    }
}

/// How many blocks a trace has, and how many different ones.
#[derive(Debug, Default)]
pub struct Distinct {
    seen: BTreeSet<u64>,
    /// Requests so far.
    pub requests: u64,
    /// Blocks of all of them.
    pub references: u64,
}

impl Distinct {
    /// The next request.
    pub fn request(&mut self, blocks: &[u64]) {
        self.requests += 1;
        self.references += blocks.len() as u64;
        self.seen.extend(blocks);
    }

    /// Different blocks so far.
    pub fn blocks(&self) -> u64 {
        self.seen.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lru_has_the_leading_runs_of_what_was_used_last() {
        let hits = |capacity, requests: &[&[u64]]| {
            let mut lru = LruHits::new(capacity);
            requests.iter().for_each(|request| lru.request(request));
            lru.hits
        };
        assert_eq!(hits(4, &[&[1, 2], &[1, 2, 3], &[9, 1]]), 2);
        // Of [1, 2, 3] the last leaves first.
        assert_eq!(hits(2, &[&[1, 2, 3], &[1, 2, 3]]), 2);
        let mut ideal = IdealHits::default();
        [[1, 2], [1, 3], [1, 3]].iter().for_each(|request| ideal.request(request));
        assert_eq!(ideal.hits, 3);
        let mut distinct = Distinct::default();
        [[1, 2], [1, 3]].iter().for_each(|request| distinct.request(request));
        assert_eq!((distinct.requests, distinct.references, distinct.blocks()), (2, 4, 3));
    }
}
