//! Lending blocks as they lie in files, to a reader that reads them himself.

use super::{FULL, Store, lost};
use crate::engine::front::router::Message;
use crate::engine::read::lend;
use crate::lend::{LendRequest, NotLent, PinnedExtents};
use kvarts_contract::error::Reason;

impl Store {
    /// Says where blocks lie in segment files, and holds the segments until the answer is dropped: for a reader whose
    /// memory the store cannot write. All of the blocks or none: each is here, is stored as it is, and the header of
    /// its record has proved under which key it lies and which digests its chunks have. Their bytes are not looked at.
    /// Like a read it counts as a use of the blocks. What [`PinnedExtents`] holds up while it lives is said there.
    pub async fn lend(&self, request: LendRequest) -> Result<PinnedExtents, NotLent> {
        let begun = lend::begin(&self.0.shared, request)?;
        for (shard, part) in begun.parts {
            if let Some(Message::Lend(_, part)) = self.0.router.offer(shard, Message::Lend(shard, part)) {
                part.refuse(Reason::Busy(FULL));
            }
        }
        let mut proven = Vec::with_capacity(begun.answers.len());
        for answer in begun.answers {
            // What other shards hold goes back with what this drops.
            proven.push(lost(answer.await)??);
        }
        begun.job.lend(proven)
    }
}
