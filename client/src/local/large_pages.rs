//! Puts memory of an engine's into large pages, beside the engine's work.
//!
//! Files in memory have small pages by default, strewn over the machine's memory. A device that reads a block of 1 MiB into them
//! is told of 256 places, one by one, which costs the server more processor time than all else that it does for the block.
//!
//! The pages of a file belong to the engine: this side asks for large ones, so the engine's process pays. A file of which pages
//! are missing stays as it is, because the kernel would make the missing ones. The kernel leaves out pages that a device or a
//! driver holds.

use std::os::fd::AsFd;
use std::sync::Arc;

use kvarts_contract::buffers::aligned::LARGE_PAGE;
use kvarts_contract::buffers::{Region, shared};

/// Bytes between two looks at whether the memory is still in use: some 80 ms of a processor.
const STEP: usize = 32 << 20;

/// Begins, in a thread that ends with the work or with the region. Without the thread, reads are slower and nothing else changes.
pub(super) fn begin(region: &Arc<Region>, file: impl AsFd) {
    let len = region.len();
    if len < LARGE_PAGE || !shared::is_populated(file, len as u64) {
        return;
    }
    let region = Arc::downgrade(region);
    let work = move || {
        let mut small = 0;
        for at in (0..len).step_by(STEP) {
            let Some(region) = region.upgrade() else { return };
            if !region.collapse_part(at..len.min(at + STEP)) {
                small += 1;
            }
        }
        tracing::debug!(
            bytes = len,
            steps_with_small_pages = small,
            "the memory of the engine was moved into large pages"
        );
    };
    let _ = std::thread::Builder::new().name("kvarts-pages".to_owned()).spawn(work);
}
