//! Notices that a directory of the store was taken away while it is in use.
//!
//! Files that are open go on as if nothing had happened: puts would be acknowledged as durable, and a restart finds nothing of them.

use std::time::Duration;

use kvarts_store::home::Places;
use tokio::time::sleep;

/// What is acknowledged in between is lost with the directory.
const EVERY: Duration = Duration::from_secs(2);

/// Looks again and again.
pub(super) async fn keep(places: Places) {
    let mut was_gone = false;
    loop {
        let here = places.clone();
        // A file system that hangs holds up one thread, and no look follows.
        let looked =
            // ends: the file system answers, or the task is aborted at a stop: one thread waits, once
            tokio::task::spawn_blocking(move || here.look().map(|path| path.display().to_string())).await;
        let gone = looked.ok().flatten();
        if let Some(directory) = gone.as_ref().filter(|_| !was_gone) {
            tracing::error!(
                directory,
                "the store's directory was removed, renamed or mounted over: puts are refused; stop the server, put the \
                 directory back and start it again"
            );
        }
        was_gone = gone.is_some();
        sleep(EVERY).await;
    }
}
