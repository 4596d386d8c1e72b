//! Notices that a directory of the store was taken away while it is in use, and brings it back when its disk is there again.
//!
//! Files that are open go on as if nothing had happened: puts would be acknowledged as durable, and a restart finds nothing of them.

use std::time::Duration;

use kvarts_store::home::Places;
use tokio::time::sleep;

use crate::returned;

/// What is acknowledged in between is lost with the directory.
const EVERY: Duration = Duration::from_secs(2);

/// Looks again and again.
pub(super) async fn keep(places: Places) {
    let mut known = Vec::new();
    loop {
        let here = places.clone();
        // A file system that hangs holds up one thread, and no look follows.
        // ends: the file system answers, or the task is aborted at a stop: one thread waits, once
        let gone = tokio::task::spawn_blocking(move || here.look()).await.unwrap_or_default();
        for directory in gone.iter().filter(|directory| !known.contains(*directory)) {
            let directory = directory.display().to_string();
            if places.is_alone() {
                tracing::error!(
                    directory,
                    "the store's directory was removed, renamed or mounted over: puts are refused; \
                    stop the server, put the directory back and start the server again"
                );
            } else {
                tracing::error!(
                    directory,
                    "a directory of the store was removed, renamed or mounted over: its blocks are misses \
                    until the directory is at its path again"
                );
            }
        }
        known = gone;
        let out = places.clone();
        // ends: bringing back a directory ends within a minute, or the task is aborted at a stop
        let tried = tokio::task::spawn_blocking(move || out.bring_back()).await.unwrap_or_default();
        tried
            .iter()
            .for_each(|(directory, outcome)| returned::tell(&directory.display().to_string(), outcome));
        sleep(EVERY).await;
    }
}
