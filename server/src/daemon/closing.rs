//! Closing the store at a stop, in bounded time.

use std::path::PathBuf;
use std::time::Duration;

use kvarts_contract::error::Error;

/// How long it may take. What is under way has half a minute, by the store's own limit, and checkpoints are written in it; a thread that
/// the kernel holds in a call keeps no limit.
pub(super) const WITHIN: Duration = Duration::from_secs(60);

/// Closes the store that lies in these directories; says which ones if it has not closed `within` that time. The process can end then:
/// what was acknowledged as durable is there at the next start.
pub(super) async fn closed(
    close: impl FnOnce() -> Result<(), Error> + Send + 'static,
    directories: &[PathBuf],
    within: Duration,
) -> Result<(), String> {
    match tokio::time::timeout(within, tokio::task::spawn_blocking(close)).await {
        Ok(closed) => closed.map_err(|error| error.to_string())?.map_err(|error| error.to_string()),
        Err(_) => {
            let names: Vec<String> = directories.iter().map(|path| path.display().to_string()).collect();
            Err(format!(
                "the store in {} could not be closed within {} s, because a disk does not respond; its last \
                checkpoint was not written, and the next start reads the log instead",
                names.join(", "),
                within.as_secs_f64()
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::error::Reason;

    #[tokio::test]
    async fn a_store_that_does_not_close_is_named_and_keeps_no_server() {
        let directories = [PathBuf::from("/mnt/a"), PathBuf::from("/mnt/b")];
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let hangs = move || {
            let _ = gone.recv();
            Ok(())
        };
        let told = closed(hangs, &directories, Duration::from_millis(5)).await.unwrap_err();
        assert!(told.contains("/mnt/a, /mnt/b") && told.contains("within 0.005 s"), "{told}");
        // Its thread is let go.
        drop(go);
        let busy = || {
            Err(Error(Reason::Busy("the store could not be closed in time, because a disk does not respond")))
        };
        assert!(closed(busy, &directories, WITHIN).await.unwrap_err().contains("a disk does not respond"));
        assert_eq!(closed(|| Ok(()), &directories, WITHIN).await, Ok(()));
    }
}
