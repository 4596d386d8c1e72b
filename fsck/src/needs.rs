//! What a task on a store will take of memory and of temporary files, found out before it begins.
//!
//! It is an upper bound: what segments say that they hold counts, whether or not it is live. `fsck/tests/memory.rs` holds each
//! task to it.

use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::footer::ENTRY_BYTES;
use kvarts_layout::format::names::{segment_name, shard_name};

use crate::check::on_threads;
use crate::segment::Ends;
use crate::store::Store;
use crate::window::{READ_BYTES, Tally, Window};

/// Bytes of a footer for a block at least, beside those of its record: its key and its origin.
const NAME_BYTES: u64 = 48;
/// Bytes of a record at least: a page of header, a page of payload.
const RECORD_BYTES: u64 = 2 * PAGE_BYTES;

/// How much there is in a store, at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    /// Segment files.
    pub segments: u64,
    /// Records.
    pub records: u64,
    /// Blocks.
    pub blocks: u64,
}

/// What is to be done with a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// A check that does not compare everything with everything.
    Check,
    /// One that does, with this much memory for it.
    Deep(usize),
    /// Listing what is there: `ls`, `inspect`, an export of a prefix.
    List,
    /// An export of all, or of a namespace.
    Export,
    /// Compaction.
    Compact,
}

/// What a task takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of temporary files.
    pub temporary: u64,
}

/// Memory that an export sorts in before it takes temporary files.
pub const EXPORT_SORT_BYTES: usize = 256 << 20;
/// Bytes of a row of that sort.
pub(crate) const EXPORT_ROW_BYTES: usize = 36;
/// Bytes of a fingerprint of a deep check.
const PRINT_BYTES: u64 = 80;

impl Sizes {
    /// Reads the ends of all segments.
    pub fn of(store: &Store, threads: usize) -> Self {
        let (records, blocks) = (AtomicU64::new(0), AtomicU64::new(0));
        let all: Vec<_> = store
            .shards
            .iter()
            .flat_map(|shard| shard.segments.iter().map(move |number| (shard, *number)))
            .collect();
        let tally = Tally::default();
        on_threads(threads, all.len(), |at| {
            let Some((shard, number)) = all.get(at) else { return };
            let Some(directory) = store.directories.get(shard.directory) else { return };
            let path = format!("{}/{}", shard_name(shard.number), segment_name(*number));
            let Ok(file) = directory.disk.open(&path) else { return };
            let mut window = Window::new(&*file, store.keyring.segment_bytes, &tally);
            window.read_ahead(false);
            let ends = Ends::read(&mut window, &store.keyring, shard.number, *number);
            let (some, named) = match &ends.trailer {
                Ok(trailer) => {
                    let records = u64::from(trailer.record_count);
                    let entries = records.saturating_mul(ENTRY_BYTES as u64);
                    (records, u64::from(trailer.footer_bytes).saturating_sub(entries) / NAME_BYTES)
                }
                // Not sealed: as many as may lie in what is written.
                Err(_) => {
                    let most = file.allocated().min(file.len()) / RECORD_BYTES;
                    (most, most)
                }
            };
            records.fetch_add(some, Ordering::Relaxed);
            blocks.fetch_add(named, Ordering::Relaxed);
        });
        Self { segments: all.len() as u64, records: records.into_inner(), blocks: blocks.into_inner() }
    }

    /// What a task takes of a store of this size.
    pub fn need(&self, task: Task, threads: usize) -> Need {
        // The figures of the table in ARCHITECTURE.md, with what allocators round up.
        let (record, block, fixed) = match task {
            Task::Check => (0, 0, 0),
            Task::Deep(memory) => (50, 0, memory as u64),
            Task::List => (480, 120, 0),
            Task::Export => (90, 2, self.sorted(EXPORT_SORT_BYTES as u64)),
            Task::Compact => (300, 90, 0),
        };
        let temporary = match task {
            Task::Deep(memory) => {
                let all = (self.blocks.saturating_add(2 * self.records)).saturating_mul(PRINT_BYTES);
                if all > memory as u64 { all } else { 0 }
            }
            Task::Export => {
                let all = self.blocks.saturating_mul(EXPORT_ROW_BYTES as u64);
                if all > EXPORT_SORT_BYTES as u64 { all } else { 0 }
            }
            Task::Check | Task::List | Task::Compact => 0,
        };
        let buffers = (threads as u64).saturating_mul(READ_BYTES as u64);
        let memory = buffers
            .saturating_add(fixed)
            .saturating_add(self.segments.saturating_mul(150))
            .saturating_add(self.records.saturating_mul(record))
            .saturating_add(self.blocks.saturating_mul(block));
        Need { memory, temporary }
    }

    /// Memory of an export's sort: while its vector grows the smaller one is there, too.
    fn sorted(&self, most: u64) -> u64 {
        most.min(self.blocks.saturating_mul(EXPORT_ROW_BYTES as u64)).saturating_mul(2)
    }
}
