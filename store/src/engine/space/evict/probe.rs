//! Whether the file system makes holes of single pages, asked of it with a file in which nothing counts.
//!
//! One whose unit is larger than a page (xfs with large blocks or on a realtime device, ext4 with clusters) writes zeros
//! where a hole of a page is asked for, calls it done and gives nothing back: after a restart what was evicted there would
//! look damaged. So nothing is punched in a segment before this has been asked.

use kvarts_layout::format::{PAGE, PAGE_BYTES};

use crate::engine::space::Space;
use crate::engine::volume::pages::{CLASS, memory};
use crate::io::{MetaOp, OpenMode};
use kvarts_contract::io_error::{FileId, IoError, IoErrorKind};

/// The name that the file has until it is open. One that a power cut leaves is removed by the next start.
pub(crate) const NAME: &str = "hole-probe";
/// The page in the middle is punched.
const PAGES: usize = 3;
const FILE_BYTES: u64 = (PAGES * PAGE) as u64;

impl Space {
    /// Whether single pages can be given back. Asked once; what the file system could not be asked now, because its disk
    /// is full or fails, it is asked again, and until then segments are emptied as a whole.
    pub(crate) async fn makes_holes(&self) -> bool {
        let _turn = self.probing.take().await;
        if self.no_holes.get() || self.has_holes.get() {
            return !self.no_holes.get();
        }
        // The file is on the disk for a moment: its bytes are of the budget's room for checkpoints.
        if self.volume.shared.take_checkpoint_budget(FILE_BYTES).is_err() {
            return false;
        }
        let asked = self.try_a_hole().await;
        self.volume.shared.give_checkpoint_budget(FILE_BYTES);
        match asked {
            Ok(true) => self.has_holes.set(true),
            Ok(false) => self.no_holes.set(true),
            Err(_) => return false,
        }
        self.has_holes.get()
    }

    /// Whether that is unknown, and nothing asks for it.
    pub(crate) fn may_ask_of_holes(&self) -> bool {
        !self.no_holes.get() && !self.has_holes.get() && !self.probing.is_taken()
    }

    /// What an operator should know of it, if it is known to make none.
    pub(crate) fn note_of_holes(&self) -> Option<String> {
        self.no_holes.get().then(|| {
            format!(
                "the file system of directory {} cannot punch holes of {PAGE} bytes, so eviction frees whole segments and also removes recently used blocks; use a directory on ext4 or xfs with blocks of {PAGE} bytes",
                self.volume.dir.0
            )
        })
    }

    async fn try_a_hole(&self) -> Result<bool, IoError> {
        let file = self.open_probe().await?;
        let made = self.punch_a_page(file).await;
        self.close_probe(file).await;
        match made {
            Err(error) if error.kind == IoErrorKind::Unsupported => Ok(false),
            made => made,
        }
    }

    /// A new file in which nothing counts, opened regardless of the turn.
    pub(crate) async fn open_probe(&self) -> Result<FileId, IoError> {
        let name = self.volume.file_name(NAME);
        let mode = OpenMode { write: true, create: true, direct: true };
        let file = self.volume.driver.open(name.clone(), mode).await?;
        // From here on it is the process's own.
        let _ = self.volume.driver.meta(MetaOp::Remove { name }).await;
        Ok(file)
    }

    /// Its bytes go with it.
    pub(crate) async fn close_probe(&self, file: FileId) {
        let _ = self.volume.driver.meta(MetaOp::Close { file }).await;
    }

    async fn punch_a_page(&self, file: FileId) -> Result<bool, IoError> {
        let Ok(mut bytes) = memory(&self.volume, PAGES * PAGE) else { return Ok(false) };
        bytes.copy_in(0, &[0x5a; PAGES * PAGE]);
        self.volume.driver.write(CLASS, file, 0, bytes, true).await?;
        let (_, before) = self.volume.driver.stat(file).await?;
        let middle = (PAGE_BYTES, PAGE_BYTES);
        self.volume.driver.meta(MetaOp::PunchHole { file, offset: middle.0, len: middle.1 }).await?;
        self.volume.driver.flush(file).await?;
        let holes = self.volume.driver.holes(file, u64::MAX).await?;
        let (_, after) = self.volume.driver.stat(file).await?;
        Ok((holes == [middle] && after < before) || kvarts_layout::planted!("coarse-holes-believed"))
    }
}
