//! Eviction: blocks leave one by one, by a policy, and their pages are given back as holes.
//!
//! `policy` ranks, `coldest` says where to look, `choose` picks for as many bytes as are wanted, `batch` takes them out of the index and gives their
//! pages back, `pages` says which pages those are, `thin` moves the last blocks out of segments of which little is
//! left, `of_records` evicts within a quota, `probe` asks the file system for a first hole. Where it cannot make them, whole segments are emptied instead (`engine/space/reclaim.rs`).
//!
//! Order, and why nothing is lost or comes back wrong:
//! - a block leaves the index first, with its event: later look-ups miss;
//! - then its pages are given back, in a segment that no device read holds. A read that was sent there before finds the
//!   block gone when it comes (`engine/read/part_read.rs`), so zeros are never taken for bytes or for damage;
//! - then the file is flushed, and only then, by what the file system says it has, is the budget given back;
//! - a power cut in between leaves any of the pages given back: a block of which one is, is gone; one of which none is,
//!   is here again, as it was acknowledged. Nothing that a tombstone has killed comes back by that, because holes end
//!   no segment: what was begun before the tombstone still counts in `floor`;
//! - a segment with holes is not recycled: when nothing is left in it, its file goes, after a checkpoint that calls it
//!   free. So holes are made only if what is chosen does not empty enough segments as a whole (`choose`).

pub(crate) mod batch;
pub(crate) mod choose;
pub(crate) mod coldest;
mod of_records;
pub(crate) mod pages;
pub(crate) mod probe;
#[cfg(test)]
mod tests;
