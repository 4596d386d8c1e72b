//! The directory of a run: it goes when the run ends, fails or is interrupted (`kvarts_terminal::undo`), unless it is to be kept.

use std::path::{Path, PathBuf};

use kvarts_terminal::Failure;
use kvarts_terminal::undo::{Undo, remove};

use super::setup::Common;

/// A directory of this run, removed at the end unless it is to be kept.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    _undo: Option<Undo>,
}

impl Scratch {
    /// Makes it; refused if the file system has less room than `bytes`.
    pub(crate) fn new(common: &Common, bytes: u64) -> Result<Self, Failure> {
        let below = common.dir.clone().unwrap_or_else(|| PathBuf::from("."));
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", below.display());
        let fault = |error: &dyn std::fmt::Display| Failure::User(told(error));
        std::fs::create_dir_all(&below).map_err(|error| fault(&error))?;
        let space = rustix::fs::statvfs(&below).map_err(|error| fault(&error))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        if free < bytes {
            return Err(fault(&format!(
                "{} MiB are free, but the run needs {} MiB: free space, or use another --dir",
                free >> 20,
                bytes >> 20
            )));
        }
        let path = below.join(format!("kvarts-bench-{}", std::process::id()));
        let make = || std::fs::create_dir(&path).map_err(|error| told(&error));
        if common.keep {
            make().map_err(Failure::User)?;
            return Ok(Self { path, _undo: None });
        }
        let gone = path.clone();
        let (undo, ()) = Undo::of(make, move || remove(&gone)).map_err(Failure::User)?;
        Ok(Self { path, _undo: Some(undo) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A directory in it, of one part of a run: its bytes are given back before the next part begins.
    pub(crate) fn part(&self, name: &str) -> Result<Part, Failure> {
        let path = self.path.join(name);
        std::fs::create_dir(&path).map_err(|error| Failure::User(format!("{}: {error}", path.display())))?;
        Ok(Part { path, keep: self._undo.is_none() })
    }
}

/// A part of a run's directory, removed when the value is dropped.
#[derive(Debug)]
pub(crate) struct Part {
    path: PathBuf,
    keep: bool,
}

impl Part {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.keep {
            remove(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_with_its_value_and_a_part_before_it() {
        let below = std::env::temp_dir().join(format!("kvarts-scratch-{}", std::process::id()));
        let common = Common::quiet(Some(below.clone()), true, 3);
        assert!(Scratch::new(&common, u64::MAX).is_err(), "no file system has so much room");
        let scratch = Scratch::new(&common, 0).unwrap();
        let path = scratch.path().to_owned();
        let part = scratch.part("part").unwrap();
        std::fs::write(part.path().join("file"), "").unwrap();
        drop(part);
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
        drop(scratch);
        assert_eq!(std::fs::read_dir(&below).unwrap().count(), 0);
        let kept = Scratch::new(&Common { keep: true, ..common }, 0).unwrap();
        drop(kept.part("part").unwrap());
        let part = kept.path().join("part");
        drop(kept);
        assert!(part.exists());
        std::fs::remove_dir_all(&below).unwrap();
    }
}
