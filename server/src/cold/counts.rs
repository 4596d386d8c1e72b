//! What a cold tier counts.

use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_cold::{Limits, Spent};

macro_rules! counts {
    ($($(#[doc = $help:literal])+ $field:ident;)*) => {
        /// Counters, by what they count.
        #[derive(Debug, Default)]
        pub struct Counts {
            $($(#[doc = $help])+ pub(super) $field: AtomicU64,)*
        }

        impl Counts {
            /// Each by its name, and what it means.
            pub fn all(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($field), concat!($($help),+).trim_ascii(), self.$field.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counts! {
    /// Blocks that were brought from the bucket into the store.
    restored_blocks;
    /// Bytes of them.
    restored_bytes;
    /// Bytes that were read from packs beside the blocks that were wanted.
    over_read_bytes;
    /// Blocks that were to be brought and were not: gone, damaged, not read in time, or refused by the store. Misses.
    lost_blocks;
    /// Blocks that were not asked for because too much was under way. Misses.
    refused_blocks;
    /// Blocks that were not asked for because the reads that wanted them had ended before their turn came.
    abandoned_blocks;
    /// Restores that a read began.
    restores;
    /// Reads of which some blocks came from the bucket.
    waited_reads;
    /// Blocks of the bucket that look-ups without a plan were told are there.
    offered_blocks;
    /// Blocks that another node was said to have and did not give in time, and that were asked of the bucket instead.
    not_from_nodes_blocks;
    /// Bytes that reads took of what came from the bucket before it was stored.
    given_bytes;
    /// Pieces of reads whose deadline passed before they came from the bucket.
    late_pieces;
    /// Manifests that could not be read when it was time.
    manifest_failures;
    /// Blocks that were copied into the bucket before their eviction.
    spilled_blocks;
    /// Bytes of them.
    spilled_bytes;
    /// Blocks that were to be copied and were not: evicted sooner, or the bucket did not take them.
    let_go_blocks;
    /// Packs that were taken out of the tier because some of their blocks were deleted.
    withdrawn_packs;
    /// Deletes that were not acknowledged because the bucket could not be told.
    delete_failures;
}

pub(super) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// What a cold tier was and is doing.
#[derive(Clone, Debug)]
pub struct Counted {
    /// Counters since the start: name, meaning, value.
    pub counts: Vec<(&'static str, &'static str, u64)>,
    /// What was asked of the bucket since the start.
    pub total: Spent,
    /// Today.
    pub today: Spent,
    /// How much may be asked.
    pub limits: Limits,
    /// Whether the bucket is left alone after failures.
    pub is_paused: bool,
    /// Whether nothing is written to the bucket, because it does not keep conditions of puts.
    pub is_read_only: bool,
    /// Namespaces whose manifest is known.
    pub manifests: u64,
    /// Memory of manifests and indexes.
    pub memory: u64,
    /// Blocks that are being brought.
    pub under_way: u64,
}
