//! Directories in which no store can be made or opened, found without making or taking anything: what a start refuses before all
//! else, and a check of its configuration as well.
#![allow(clippy::disallowed_methods, reason = "runs before a store is opened, and is not simulated")]

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD};

use super::answered::{WITHIN, answered};
use super::made::{above, refuse_absent};
use super::stop::Stop;

/// Refuses directories in which this process can make no store, or cannot open the one that is there (`is_made`). Says in one line
/// which one, why, and what to do. One that hangs is for opening to judge.
pub fn refuse_unusable(directories: &[PathBuf], is_made: bool, stop: &Stop) -> Result<(), String> {
    let told = |directory: &PathBuf| {
        let asked = directory.clone();
        let said = answered(WITHIN, stop, move || usable(&asked))?;
        said.err().map(|why| format!("{}: {why}", directory.display()))
    };
    let refused: Vec<String> = directories.iter().filter_map(told).collect();
    // A store of several directories is opened without those that are out.
    let is_served = is_made && refused.len() < directories.len();
    match refused.into_iter().next() {
        Some(why) if !is_served => Err(why),
        _ => Ok(()),
    }
}

fn usable(directory: &Path) -> io::Result<()> {
    let is_there = directory.exists();
    if is_there && !directory.is_dir() {
        return Err(io::Error::new(io::ErrorKind::NotADirectory, "the path is a file, not a directory"));
    }
    if !is_there {
        refuse_absent(directory)?;
    }
    writable(if is_there { directory } else { above(directory) })
}

/// Refuses a directory in which this process cannot make a file. Says whose it is.
pub fn writable(directory: &Path) -> io::Result<()> {
    let all = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    let Err(refused) = rustix::fs::accessat(CWD, directory, all, AtFlags::EACCESS) else { return Ok(()) };
    let (refused, shown, user) =
        (io::Error::from(refused), directory.display(), rustix::process::geteuid().as_raw());
    let whose = directory.metadata().ok().filter(|_| refused.kind() == io::ErrorKind::PermissionDenied);
    let advice = whose.map_or_else(String::new, |facts| {
        let owner = facts.uid();
        format!(
            ": the directory belongs to user {owner}, but this process runs as user {user}: `chown \
            {user} {shown}`"
        )
    });
    Err(io::Error::new(refused.kind(), format!("the directory {shown} is not writable: {refused}{advice}")))
}

/// Bytes that are free on the disks of these directories, those that are still to be made included: each disk once.
pub fn free_bytes(directories: &[PathBuf]) -> io::Result<u64> {
    let mut disks = BTreeMap::new();
    for directory in directories {
        let there = if directory.exists() { directory } else { above(directory) };
        let space = rustix::fs::statvfs(there)?;
        disks.insert(there.metadata()?.dev(), space.f_bavail.saturating_mul(space.f_frsize));
    }
    Ok(disks.values().fold(0, |sum: u64, free| sum.saturating_add(*free)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_no_store_can_be_in_are_refused_and_nothing_is_made() {
        let scratch = std::env::temp_dir().join(format!("kvarts-usable-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&scratch);
        std::fs::create_dir(&scratch).unwrap();
        std::fs::write(scratch.join("file"), "").unwrap();
        let at = |name: &str| scratch.join(name);
        let refused = |names: &[&str], is_made| {
            let directories: Vec<PathBuf> = names.iter().map(|name| at(name)).collect();
            refuse_unusable(&directories, is_made, &Stop::default()).err()
        };
        assert_eq!(refused(&["new", "."], false), None);
        let told = refused(&["new", "file"], false).unwrap();
        assert!(told.contains("file: the path is a file, not a directory"), "{told}");
        let told = refused(&["new", "absent/deep"], false).unwrap();
        assert!(told.contains("absent does not exist: mount its disk"), "{told}");
        assert_eq!(refused(&[".", "absent/deep"], true), None, "a store is opened without it");
        assert!(refused(&["absent/deep"], true).is_some());
        let left: Vec<_> =
            std::fs::read_dir(&scratch).unwrap().flatten().map(|one| one.file_name()).collect();
        assert_eq!(left, ["file"]);
        let (one, both) = (free_bytes(&[at("new")]).unwrap(), free_bytes(&[at("new"), at(".")]).unwrap());
        // Other programs write meanwhile.
        assert!(one > 0 && both < one + one / 2, "one disk counts once: {one} {both}");
        std::fs::remove_dir_all(&scratch).unwrap();
    }
}
