//! Where the local socket is: the kernel takes no path of more than 107 bytes for one.

use std::path::{Path, PathBuf};

/// The most bytes of a socket's path.
pub(super) const PATH_BYTES_MAX: usize = 107;

/// Whether a socket can be at this path.
pub(super) fn fits(path: &Path) -> bool {
    path.as_os_str().len() <= PATH_BYTES_MAX
}

/// The socket of a store whose first directory this is, by default: in it, where only the server's
/// user can put another.
pub(super) fn of(directory: &Path) -> PathBuf {
    directory.join("kvarts.sock")
}
