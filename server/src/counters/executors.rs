//! What the executors said last of their devices: for a scrape in which one of them says nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvarts_store::driver::{DriveLoad, Metrics};
use kvarts_store::engine::Store;
use kvarts_store::io::IoFacts;

/// How long they are waited for: a scrape tells all else, too, and a supervisor waits for it.
const WITHIN: Duration = Duration::from_millis(200);

/// What they said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// Of each executor.
    pub(crate) io: Vec<(IoFacts, Metrics)>,
    /// Of each directory.
    pub(crate) drives: Vec<DriveLoad>,
    /// Some of it is what was said to an earlier scrape.
    pub(crate) is_old: bool,
}

/// What they said last.
#[derive(Debug, Default)]
pub(crate) struct Executors(Mutex<Told>);

impl Executors {
    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What they say in time; of what they do not, what they said before.
    pub(crate) async fn ask(&self, store: &Store) -> Told {
        let (io, drives) = tokio::join!(
            tokio::time::timeout(WITHIN, store.io()),
            tokio::time::timeout(WITHIN, store.drives())
        );
        let mut last = self.lock();
        // One that has died says nothing any more: the others' figures are the last ones, too.
        let (io, drives) = (io.ok().and_then(Result::ok), drives.ok().and_then(Result::ok));
        last.is_old = io.is_none() || drives.is_none();
        last.io = io.unwrap_or_else(|| std::mem::take(&mut last.io));
        last.drives = drives.unwrap_or_else(|| std::mem::take(&mut last.drives));
        last.clone()
    }
}
