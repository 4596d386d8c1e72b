//! The free bytes of the disks that a store lies on.

use std::collections::BTreeMap;

use crate::driver::Driver;
use crate::engine::shared::directories::Directories;
use crate::engine::volume::directory::refused;
use crate::io::DiskSpace;
use kvarts_contract::error::Reason;
use kvarts_contract::io_error::DirId;

/// Free bytes of the file systems that hold these directories, each counted once; of those in use.
pub(crate) async fn free_space(driver: &Driver, directories: &Directories) -> Result<u64, Reason> {
    let mut devices = BTreeMap::new();
    for dir in (0..).map(DirId).take(directories.count()).filter(|dir| !directories.is_out(*dir)) {
        let DiskSpace { free, device, .. } = driver.space(dir).await.map_err(|error| refused(&error))?;
        devices.insert(device, free);
    }
    Ok(devices.values().fold(0, |sum: u64, free| sum.saturating_add(*free)))
}
