//! A region that is in, and its chunks that are not what was put.

use std::sync::atomic::Ordering::Relaxed;

use crate::engine::read::header_cache::Header;
use crate::engine::read::job::ReadJob;
use crate::engine::read::wanted::Wanted;
use kvarts_contract::api::Verify;
use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::Reason;

/// A region that is in, and what its chunks are compared with.
pub(super) struct RegionIn<'a> {
    pub(super) wanted: &'a Wanted,
    pub(super) header: &'a Header,
    /// Where it was read to; none if it landed in its place.
    pub(super) staging: Option<&'a SharedBuf>,
    /// Why it was not read, if so.
    pub(super) failed: Option<Reason>,
    pub(super) verify: Verify,
}

/// The digest that a chunk was put with, if it is known, and the one that its bytes have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Compared {
    pub(super) expected: Option<u32>,
    pub(super) found: u32,
}

/// Notes a chunk that is not what was put. Where it is not `certain` that it was read so, its block stays in service:
/// a read into memory of our own will tell.
pub(super) fn damaged(job: &ReadJob, wanted: &Wanted, ordinal: u32, digest: Compared, certain: bool) {
    if job.has_failed(ordinal) {
        return;
    }
    let Compared { expected, found } = digest;
    let expected = expected.unwrap_or_default();
    let (shard, segment, offset) = (wanted.shard, wanted.segment, wanted.offset);
    let reason = Reason::Digest { shard, segment, offset, expected, found };
    let still_there = job.fail_there(wanted, ordinal, &reason);
    if certain && still_there {
        job.shared.counters.chunks_damaged.fetch_add(1, Relaxed);
        job.quarantine(wanted, ordinal);
    }
}
