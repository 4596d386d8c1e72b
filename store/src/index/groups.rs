//! A batch of fingerprints, grouped by partition, so that each partition's lock is taken once.

use crate::memory_ids::BlockFingerprint;

/// Which partition a fingerprint belongs to when there are `2^bits`.
#[inline]
pub(super) fn partition_of(print: BlockFingerprint, bits: u32) -> usize {
    // All 64 bits shifted out (one partition) is no shift that `>>` can do.
    print.first().checked_shr(64 - bits).unwrap_or(0) as usize
}

/// The places of a batch's items, partition by partition, ascending within each.
#[derive(Debug)]
pub(super) struct Groups {
    places: Vec<u32>,
    /// Where each partition's places end.
    ends: Vec<u32>,
}

impl Groups {
    /// Groups a batch by a counting sort: two passes over the batch and one over the partitions.
    pub(super) fn of<T>(items: &[T], bits: u32, print: impl Fn(&T) -> BlockFingerprint) -> Self {
        // After the first pass `ends[p]` is the size of partition p, after the second its start, and each
        // place that is filled in moves it towards its end.
        let mut ends = vec![0u32; 1 << bits];
        for item in items {
            ends[partition_of(print(item), bits)] += 1;
        }
        let mut start = 0;
        for end in &mut ends {
            start += std::mem::replace(end, start);
        }
        let mut places = vec![0u32; items.len()];
        for (place, item) in (0u32..).zip(items) {
            let end = &mut ends[partition_of(print(item), bits)];
            places[*end as usize] = place;
            *end += 1;
        }
        Self { places, ends }
    }

    /// Each partition that has items, and their places in the batch.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let mut start = 0;
        self.ends.iter().enumerate().filter_map(move |(partition, end)| {
            let places = &self.places[start as usize..*end as usize];
            start = *end;
            (!places.is_empty()).then_some((partition, places))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_place_is_listed_once_under_its_partition(firsts: Vec<u64>, bits in 0..10u32) {
            let print = |first: &u64| BlockFingerprint::from_parts(*first, 0);
            let groups = Groups::of(&firsts, bits, print);
            let listed: Vec<_> = groups.iter().flat_map(|(p, places)| places.iter().map(move |i| (p, *i))).collect();
            let mut expected: Vec<_> =
                (0u32..).zip(&firsts).map(|(i, f)| (partition_of(print(f), bits), i)).collect();
            expected.sort_unstable();
            prop_assert_eq!(listed, expected);
        }
    }
}
