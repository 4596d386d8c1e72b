//! File systems of the kernel on images and disks in user space: made, mounted over a loop device, checked by their own
//! programs; and whether this machine can do that at all.
#![allow(clippy::disallowed_methods, reason = "starts programs of the system, outside any simulation")]

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::fuse::words;

/// A file system that stores lie on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileSystem {
    /// With its journal of metadata, data written in order.
    Ext4,
    /// With its log of metadata.
    Xfs,
}

/// Runs a program of the system; what it complains of if it fails.
fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(words(&output.stdout));
    }
    Err(format!("{program} {}: {} {}", arguments.join(" "), words(&output.stdout), words(&output.stderr)))
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// What this machine lacks for mounting these file systems, if anything.
pub fn missing(systems: &[FileSystem], programs: &[&str]) -> Option<String> {
    if std::fs::metadata("/proc/self").map_or(true, |own| own.uid() != 0) {
        return Some("only root can mount file systems".to_owned());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Some(format!("there is no {device}"));
        }
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let of_systems = systems.iter().flat_map(|system| system.programs());
    for system in systems {
        if !known.split_whitespace().any(|name| name == system.name()) {
            return Some(format!("the kernel has no {}", system.name()));
        }
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let there = |name: &str| std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    let lacking = of_systems.chain(programs.iter().copied()).find(|name| !there(name));
    lacking.map(|name| format!("{name} is not installed: run scripts/install-campaign"))
}

impl FileSystem {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Ext4, Self::Xfs];

    /// As mount calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    const fn programs(self) -> [&'static str; 4] {
        match self {
            Self::Ext4 => ["mount", "losetup", "mkfs.ext4", "e2fsck"],
            Self::Xfs => ["mount", "losetup", "mkfs.xfs", "xfs_repair"],
        }
    }

    /// Bytes of an image: about the least that its program makes.
    pub const fn image_bytes(self) -> u64 {
        match self {
            Self::Ext4 => 64 << 20,
            Self::Xfs => 320 << 20,
        }
    }

    /// Makes a file system in a new image.
    pub fn make(self, image: &Path) -> Result<(), String> {
        let file = std::fs::File::options().create(true).truncate(true).write(true).open(image);
        file.and_then(|file| file.set_len(self.image_bytes())).map_err(|error| error.to_string())?;
        let image = shown(image);
        match self {
            Self::Ext4 => {
                run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=0,nodiscard", "-b", "4096", &image])
            }
            Self::Xfs => run("mkfs.xfs", &["-q", "-f", "-K", &image]),
        }
        .map(drop)
    }

    /// What its own checker says of an image that is not mounted: an error if it finds anything wrong.
    pub fn check(self, image: &Path) -> Result<(), String> {
        let image = shown(image);
        match self {
            Self::Ext4 => run("e2fsck", &["-f", "-n", &image]),
            Self::Xfs => run("xfs_repair", &["-n", "-f", &image]),
        }
        .map(drop)
    }
}

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub struct Mounted {
    place: PathBuf,
    device: String,
}

impl Mounted {
    /// Mounts the file system in `file` at `place`, over a loop device. Whatever a power cut left in its journal is
    /// replayed by this.
    pub fn new(system: FileSystem, file: &Path, place: &Path) -> Result<Self, String> {
        std::fs::create_dir_all(place).map_err(|error| error.to_string())?;
        let device = run("losetup", &["--find", "--show", &shown(file)])?;
        // From here on dropping undoes it.
        let mounted = Self { place: place.to_owned(), device };
        // Images of one origin share an identity, and several are mounted at once.
        let options = if system == FileSystem::Xfs { "nouuid" } else { "defaults" };
        run("mount", &["-t", system.name(), "-o", options, &mounted.device, &shown(place)])?;
        Ok(mounted)
    }

    /// Where it is.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Unmounts it; an error if it is still in use.
    pub fn unmount(self) -> Result<(), String> {
        let mut outcome = Ok(());
        // Threads that have just ended may hold it for a moment longer.
        for _ in 0..100 {
            outcome = run("umount", &[&shown(&self.place)]).map(drop);
            if outcome.is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        outcome
    }

    /// Ends the file system at once, as it is: nothing that it has in memory is written any more. What was unflushed on
    /// the device stays there.
    pub fn shut_down(&self) -> Result<(), String> {
        run("xfs_io", &["-F", "-x", "-c", "shutdown", &shown(&self.place)]).map(drop)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        if mounts.lines().any(|line| line.split(' ').next() == Some(&self.device)) {
            let _ = run("umount", &["-l", &shown(&self.place)]);
        }
        let _ = run("losetup", &["-d", &self.device]);
    }
}
