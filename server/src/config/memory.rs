//! How much memory there is for this process, and what part of it its local clients may share with it unless the configuration says
//! otherwise.

use std::path::{Path, PathBuf};

/// The most that is shared without being asked for.
const SHARED_MAX: u64 = 64 << 30;
/// The part of all memory that is shared: one byte in this many.
const PART: u64 = 4;
const PAGE: u64 = 4096;

/// Bounds on the memory of this process: the machine's, and those of the groups that it is in.
pub(super) fn of_this_machine() -> Vec<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let machine = read(Path::new("/proc/meminfo")).as_deref().and_then(total);
    let groups = read(Path::new("/proc/self/cgroup")).map_or_else(Vec::new, |text| groups(&text));
    machine.into_iter().chain(groups.iter().filter_map(|path| read(path)?.trim().parse().ok())).collect()
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
