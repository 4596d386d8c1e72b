//! How much memory there is for this process, and what part of it its local clients may share with it unless the configuration says
//! otherwise.

use std::path::{Path, PathBuf};

use super::Config;
use crate::state::locals::Group;

/// The most that is shared without being asked for.
const SHARED_MAX: u64 = 64 << 30;
/// The part of all memory that is shared: one byte in this many.
const PART: u64 = 4;
const PAGE: u64 = 4096;

/// Bounds on the memory of this process: the machine's, and those of the groups that it is in.
pub(super) fn of_this_machine() -> Vec<u64> {
    let machine = read(Path::new("/proc/meminfo")).as_deref().and_then(total);
    let groups = read(Path::new("/proc/self/cgroup")).map_or_else(Vec::new, |text| groups(&text));
    machine.into_iter().chain(groups.iter().filter_map(|path| limit(path))).collect()
}

/// The group in which this process is charged for files in memory, if its memory is limited: none where other processes are in the group as well, or a
/// store is in memory itself; they are charged, too.
pub(crate) fn charged_group(config: &Config) -> Option<Group> {
    let mounts = read(Path::new("/proc/self/mounts")).unwrap_or_default();
    if config.directories.iter().any(|directory| is_in_memory(&mounts, directory)) {
        return None;
    }
    let groups = groups(&read(Path::new("/proc/self/cgroup"))?);
    let own = groups.first()?.parent()?;
    let processes = read(&own.join("cgroup.procs"))?;
    let is_alone = processes.trim() == std::process::id().to_string();
    let is_limited = groups.iter().any(|path| limit(path).is_some());
    (is_alone && is_limited).then(|| Group { statistics: own.join("memory.stat") })
}

/// Whether the mount of a directory is of files in memory. The directory is not opened: its drive may hang.
fn is_in_memory(mounts: &str, directory: &Path) -> bool {
    let Ok(directory) = std::path::absolute(directory) else { return false };
    let of = |line: &'_ str| -> Option<(usize, bool)> {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        directory.starts_with(place).then_some((place.len(), kind == "tmpfs"))
    };
    // Of several mounts at one place the last one is seen.
    mounts.lines().filter_map(of).max_by_key(|(len, _)| *len).is_some_and(|(_, is_in_memory)| is_in_memory)
}

/// The limit in a file; none if it is absent, or says that there is none: version 2 says "max", and version 1 a number that no machine has.
fn limit(path: &Path) -> Option<u64> {
    read(path)?.trim().parse().ok().filter(|limit| *limit < u64::MAX >> 2)
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// What is shared where memory is bounded so.
pub(super) fn share(bounds: &[u64]) -> u64 {
    let least = bounds.iter().copied().min().unwrap_or(u64::MAX);
    (least / PART / PAGE * PAGE).clamp(PAGE, SHARED_MAX)
}

/// What is shared by default on this machine, as the setting says it.
pub(super) fn default_share() -> String {
    match share(&of_this_machine()) {
        small @ 0..0x10_0000 => small.to_string(),
        share => format!("{} MiB", share >> 20),
    }
}

/// Bytes that the machine has.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The files that bound the memory of a process in these groups, and of the groups around them. In a container its own group
/// is the root of what it sees.
fn groups(text: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            some if some.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let own = Path::new(path.trim_start_matches('/'));
        files.extend(own.ancestors().map(|group| Path::new(root).join(group).join(file)));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_what_a_process_may_have_is_shared_and_not_more_than_was_ever_meant() {
        assert_eq!(share(&[16 << 30]), 4 << 30);
        assert_eq!(share(&[1 << 50]), 64 << 30);
        assert_eq!(share(&[512 << 30, 1 << 30]), 256 << 20);
        assert_eq!((share(&[]), share(&[10])), (64 << 30, 4096));
        assert!(!of_this_machine().is_empty());
    }

    #[test]
    fn a_directory_is_in_memory_if_the_innermost_mount_around_it_is() {
        let mounts =
            "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n/dev/nvme0n1 /dev/shm/disk xfs rw 0 0\n";
        for (directory, wanted) in [
            ("/data", false),
            ("/dev/shm", true),
            ("/dev/shm/kvarts/0", true),
            ("/dev/shmem", false),
            ("/dev/shm/disk/0", false),
        ] {
            assert_eq!(is_in_memory(mounts, Path::new(directory)), wanted, "{directory}");
        }
        assert!(is_in_memory(
            &format!("{mounts}none /dev/shm/disk tmpfs rw 0 0\n"),
            Path::new("/dev/shm/disk")
        ));
        assert!(!is_in_memory("nonsense", Path::new("/data")));
    }

    #[test]
    fn bounds_are_found_where_kernels_write_them() {
        assert_eq!(total("MemFree: 3 kB\nMemTotal:       16 kB\n"), Some(16 << 10));
        assert_eq!(total("MemTotal: much\n"), None);
        let two = groups("0::/a/b\n");
        let wanted =
            ["/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/memory.max"];
        assert_eq!(two, wanted.map(PathBuf::from));
        let one = groups("5:cpu,cpuacct:/x\n4:memory:/\nnonsense\n");
        assert_eq!(one, [PathBuf::from("/sys/fs/cgroup/memory/memory.limit_in_bytes")]);
    }
}
