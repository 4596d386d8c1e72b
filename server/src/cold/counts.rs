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
    /// Blocks restored from the bucket into the store.
    restored_blocks;
    /// Bytes of restored blocks.
    restored_bytes;
    /// Bytes read from packs in addition to the requested blocks.
    over_read_bytes;
    /// Blocks whose restore failed: absent, damaged, not read in time, or refused by the store. Reads of these blocks are misses.
    lost_blocks;
    /// Blocks that were not requested from the bucket, because the queue of restores was full; they are misses.
    refused_blocks;
    /// Blocks that were not requested from the bucket, because their reads had ended before the restore started.
    abandoned_blocks;
    /// Restores started by reads.
    restores;
    /// Reads that needed at least one block from the bucket.
    waited_reads;
    /// Blocks of the bucket that look-ups without a plan reported as present.
    offered_blocks;
    /// Blocks that were requested from the bucket, because the node for which the directory listed the block did not deliver it in time.
    not_from_nodes_blocks;
    /// Bytes of restored blocks that reads received before the blocks were stored on disk.
    given_bytes;
    /// Pieces of reads whose deadline passed before they arrived from the bucket.
    late_pieces;
    /// Periodic reads of a manifest that failed.
    manifest_failures;
    /// Blocks uploaded to the bucket before their eviction.
    spilled_blocks;
    /// Bytes of uploaded blocks.
    spilled_bytes;
    /// Blocks that were selected for an upload but not uploaded: evicted before the upload, or the upload failed.
    let_go_blocks;
    /// Packs that were removed from a manifest because some of their blocks were deleted.
    withdrawn_packs;
    /// Deletes that were not acknowledged, because the request to the bucket failed.
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
