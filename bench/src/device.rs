//! What a block device says that it wrote.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The unit of the kernel's counts, whatever sectors the device has.
const SECTOR: u64 = 512;

/// Bytes that the device below a directory has written since the machine started, by any program; none where the file system has no device of its own.
pub(super) fn written(directory: &Path) -> Option<u64> {
    let device = std::fs::metadata(directory).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let text = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
    sectors(&text)?.checked_mul(SECTOR)
}

/// The seventh number: sectors that were written.
fn sectors(text: &str) -> Option<u64> {
    text.split_whitespace().nth(6)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seventh_number_of_a_devices_statistics_is_what_it_wrote() {
        assert_eq!(sectors("  9 1 72 3 4 5 4096 7 0 8 9 0\n"), Some(4096));
        assert_eq!(sectors("9 1 72"), None);
        assert_eq!(written(Path::new("/proc")), None);
    }
}
