//! Sizes as arguments: the syntax of the configuration.

use kvarts_server::config::size;

/// Bytes, such as 4096, 512K, 5G, "5 GiB" or 5GB.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|fault| fault.what().to_owned())
}
