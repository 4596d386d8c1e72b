//! Where a dry run writes: nowhere. Everything before that is what a real run does, so its numbers are the real ones.

use std::io;

use crate::disk::DiskWriter;

/// Takes every change and makes none.
#[derive(Debug)]
pub(super) struct Discard;

impl DiskWriter for Discard {
    fn write_at(&self, _: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, _: &str, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_len(&self, _: &str, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn make_folder(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn rename(&self, _: &str, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn remove(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn remove_folder(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn sync_folder(&self, _: &str) -> io::Result<()> {
        Ok(())
    }
}
