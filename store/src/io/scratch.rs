//! A directory for one test, removed with what is in it when the test ends.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(0);

/// The directory.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new empty directory under the system's directory for temporary files.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// The same where the subject is a disk: below the folder that `KVARTS_DISK` names, if temporary files are in memory.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn on_disk() -> Self {
        Self::below(&std::env::var_os("KVARTS_DISK").map_or_else(std::env::temp_dir, PathBuf::from))
    }

    #[allow(clippy::expect_used, reason = "a test cannot run without a directory")]
    fn below(folder: &Path) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("kvarts-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the directory for temporary files must be writable");
        Self(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
