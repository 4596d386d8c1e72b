//! A directory that is out comes back while the store is open.
//!
//! Its shards are opened anew, from their files, as a start opens them: whatever was done to the files meanwhile, and whatever this
//! process still believed of them, counts no more. In this order:
//!
//! 1. Where the directory is still read, it is proved that it can be written to: else it goes on as it is.
//! 2. Nothing of the directory is found any more, and each executor gives up what it had of it: when the last task that knows of
//!    it has ended and its device has answered everything, nothing that was begun before can reach the files.
//! 3. Its superblock is read, and written: it is of this store, has these shards, and was not replaced.
//! 4. Deletes are held: those that begin are refused, and so are those that have begun, because they have no part for it.
//! 5. Its shards are recovered. Before any of their blocks count they are told, durably, what the others know to be deleted.
//! 6. It is in use again, and a term begins with it: then deletes are acknowledged.
//!
//! If any step fails the directory is out as before.

use std::path::PathBuf;
use std::sync::Arc;

use super::Store;
use crate::engine::recover::RecoveryReport;
use crate::engine::shared::directories::Returning;
use crate::engine::shared::spare_room::OtherShards;
use kvarts_contract::error::{DirectoryCause, Error, Reason};
use kvarts_contract::io_error::DirId;

/// Where the directories of a store are, beyond the seam of its disks.
pub(crate) trait DirectoryPlaces: Send + Sync {
    /// Those that are not where they were, each with its number.
    fn gone(&self) -> Vec<(u16, PathBuf)>;

    /// Takes one for this process again, if it is not this process's now; whether it took it.
    fn take_again(&self, at: u16) -> Result<bool, String>;

    /// Lets go of one that was taken again.
    fn let_go(&self, at: u16);
}

impl Store {
    /// Takes a directory that is out into use again, the `at`th that was given: its blocks are found again, less what was deleted
    /// without it. Gives their number. A directory that cannot be used is out as before, and the error says why. Deletes are
    /// refused while its segments are looked through.
    pub async fn bring_back(&self, at: u16) -> Result<u64, Error> {
        let (shared, router, dir) = (&self.0.shared, &self.0.router, DirId(at));
        let returning = shared.directories.begin_return(dir)?;
        let places = self.0.places.get();
        let taken = places.map_or(Ok(false), |places| places.take_again(at));
        let taken = taken.map_err(|why| Error(Reason::Directory(DirectoryCause::Unusable(why))))?;
        let back = self.open_anew(dir, returning).await;
        if let (Err(_), true, Some(places)) = (&back, taken, places) {
            places.let_go(at);
        }
        if let Err(why) = &back {
            shared.directories.stays_out(dir, &why.to_string());
            router.tell_lost(shared);
        }
        // Also where it failed: what is in the index of it goes.
        router.settle(shared).await?;
        let reports = back?;
        self.finish_deletes(&reports).await;
        self.survey_chains()?;
        self.shrink()?;
        Ok(reports.iter().map(|report| report.blocks).sum())
    }

    /// Opens the shards of a directory that is out.
    async fn open_anew(&self, dir: DirId, returning: Returning<'_>) -> Result<Vec<RecoveryReport>, Reason> {
        let (shared, router) = (&self.0.shared, &self.0.router);
        let shards = shared.directories.shards_of(dir);
        if !shared.directories.is_gone(dir) {
            router.look_again(shared, dir).await?;
        }
        returning.hide();
        router.give_up(shared, dir).await?;
        // Forgets what the index has of it.
        router.settle(shared).await?;
        for (shard, _) in &shards {
            let bytes = shared.index.records().ledger().close_all_of(*shard);
            shared.give_budget(bytes);
            shared.set_failing(*shard, None);
        }
        let superblock = router.look_again(shared, dir).await?;
        shared.add_part_of(dir);
        returning.hold_deletes();
        let told = Arc::new(router.graves().await?);
        let reports = router.adopt(shared, &shards, (Some(Arc::clone(&told)), true)).await?;
        returning.rejoin(superblock)?;
        // What came back cannot be named one by one: those who follow the events look again.
        shared.events.change().lose();
        Ok(reports)
    }
}
