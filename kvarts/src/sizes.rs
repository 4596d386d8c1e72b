//! Sizes as arguments: the syntax of the configuration.

use kvarts_server::config::size;

/// How much a store may have on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Budget {
    Bytes(u64),
    /// Of the server's disks, in hundredths.
    Part(u32),
}

/// A size, or a part of the disks such as 90%.
pub(crate) fn budget(text: &str) -> Result<Budget, String> {
    match size::percent(text) {
        Some(part) => part.map(Budget::Part).map_err(|fault| fault.what().to_owned()),
        None => bytes(text).map(Budget::Bytes),
    }
}

/// Bytes, such as 4096, 512K, 5G, "5 GiB" or 5GB.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|fault| fault.what().to_owned())
}
