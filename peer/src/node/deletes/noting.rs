//! Writing entries down, one at a time, and in bounded time.
//!
//! The file lies outside of the store, on a disk that may hang. A call that has the file goes on with it, for as long as that takes:
//! what comes half-way through may not be written over. Who waits for it is told after a while that the list is not written, and what is
//! written after all then counts, and other nodes are told of it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use kvarts_cluster::deletes::{Entry, Log, Name};
use kvarts_cluster::members::NodeId;
use kvarts_contract::error::{Error, Reason};

use super::super::ClusterNode;
use super::kept::{self, Kept};
use super::{failed, lock};
use crate::read::in_time;

/// How long an entry may take to be written, and the one before it.
const NOTED_WITHIN: Duration = Duration::from_secs(10);

/// The file, and what is behind it.
#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) kept: Arc<dyn Kept>,
    /// What the file has is not known: it is written anew.
    pub(super) is_doubtful: bool,
}

type Held = tokio::sync::OwnedMutexGuard<Keeper>;

impl ClusterNode {
    /// Writes an entry down; when this returns it is durable, and counts.
    pub(super) async fn note(
        self: &Arc<Self>,
        name: impl FnOnce(&Log) -> Name,
        entry: &Arc<Entry>,
        lacking: &[NodeId],
    ) -> Result<Name, Error> {
        let runner = &*self.footing.runner;
        let late = |what: &str| {
            let seconds = NOTED_WITHIN.as_secs();
            failed(format!(
                "the list of deletes {what} for {seconds} s: a disk of this node does not respond"
            ))
        };
        let keeper = in_time(runner, NOTED_WITHIN, Arc::clone(&self.deletes.keeper).lock_owned()).await;
        let keeper = keeper.ok_or_else(|| late("has accepted no new entry"))?;
        let name = name(&lock(&self.deletes.log));
        let (node, entry, lacking) = (Arc::clone(self), Arc::clone(entry), lacking.to_vec());
        let mut writing = Box::pin(async move { node.write_down(keeper, name, &entry, &lacking).await });
        // What is done at once needs no task.
        if let Some(written) = (&mut writing).now_or_never() {
            return written;
        }
        let written = in_time(runner, NOTED_WITHIN, self.to_the_end(writing)).await;
        written.ok_or_else(|| late("has not been written"))?
    }

    async fn write_down(
        &self,
        mut keeper: Held,
        name: Name,
        entry: &Arc<Entry>,
        lacking: &[NodeId],
    ) -> Result<Name, Error> {
        let mut image = keeper.is_doubtful.then(|| kept::image(&lock(&self.deletes.log)));
        let frame = kept::frame(&name, entry);
        let kept = Arc::clone(&keeper.kept);
        // Until it is done: this may be left in the middle.
        keeper.is_doubtful = true;
        let written = match &mut image {
            Some(image) => {
                image.extend(frame);
                kept.replace(std::mem::take(image)).await
            }
            None => kept.append(frame).await,
        };
        let failed = |error: std::io::Error| format!("the list of deletes cannot be written: {error}");
        written.map_err(|error| Error(Reason::Away(failed(error))))?;
        keeper.is_doubtful = false;
        let is_shorter = self.deletes.with_log(|log| {
            log.add(name, Arc::clone(entry), lacking.iter().copied());
            log.shorten()
        });
        // Here, and not by who waits: that one may have given up.
        self.note_in_store(entry);
        if is_shorter {
            keeper.is_doubtful = true;
            let image = kept::image(&lock(&self.deletes.log));
            // If it fails, the next entry is written with all others again.
            keeper.is_doubtful = kept.replace(image).await.is_err();
        }
        Ok(name)
    }
}
