//! What the log says of directories that were out of use.

use kvarts_contract::error::Error;

/// Logs what came of an attempt to use one again.
pub(crate) fn tell(directory: &str, outcome: &Result<u64, Error>) {
    match outcome {
        Ok(blocks) => tracing::warn!(directory, blocks, "the directory is in use again"),
        Err(why) => {
            tracing::warn!(directory, %why, "the directory stays out of use; the server retries")
        }
    }
}
