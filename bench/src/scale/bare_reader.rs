//! Reads of one page of a file without any store: what the disk alone makes a read wait.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvarts_terminal::Failure;
use rustix::fs::OFlags;

const PAGE: usize = 4096;
/// Between two reads: a reader that never rests would take a processor from what is measured.
const PAUSE: Duration = Duration::from_millis(1);

/// A file that only this reads.
pub(super) struct BareReader(File);

impl BareReader {
    pub(super) fn new(path: PathBuf) -> Result<Self, Failure> {
        std::fs::write(&path, [1; PAGE]).map_err(Failure::user)?;
        File::open(&path).and_then(|file| file.sync_all()).map_err(Failure::user)?;
        // Past the page cache, as the store reads.
        let direct = OFlags::DIRECT.bits().cast_signed();
        OpenOptions::new().read(true).custom_flags(direct).open(&path).map(Self).map_err(Failure::user)
    }

    /// Seconds of each read until it is done.
    pub(super) fn read_until(&self, done: &AtomicBool) -> Result<Vec<f64>, Failure> {
        let (mut memory, mut seconds) = (vec![0; 2 * PAGE], Vec::new());
        let from = memory.as_ptr().align_offset(PAGE).min(PAGE);
        let page = memory.get_mut(from..from + PAGE).unwrap_or_default();
        while !done.load(Ordering::Acquire) {
            let begin = Instant::now();
            self.0.read_exact_at(page, 0).map_err(Failure::user)?;
            seconds.push(begin.elapsed().as_secs_f64());
            std::thread::sleep(PAUSE);
        }
        Ok(seconds)
    }
}
