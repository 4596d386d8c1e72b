//! The bucket behind the disks.

mod cold_blocks;
mod cold_bounds;
mod cold_collectors;
mod cold_members;
mod cold_path;
mod cold_spare;
mod cold_spill;
#[path = "../../bucket/tests/s3/mod.rs"]
mod s3;
