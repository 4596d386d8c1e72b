//! What a server decides by the size of its disk and of its machine, where nothing was set: shards, and the memory of the
//! index.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kvarts_layout::format::names::SUPERBLOCK;

/// Shards of a directory that `serve` makes, at most: as many executors can serve one device.
const SHARDS_MAX: u64 = 16;
/// Segments that a shard should have at least: emptying one is a small part of it, and so is the one that each start
/// of the server begins in each shard.
const SEGMENTS_EACH: u64 = 32;
/// The index may take so much of the memory.
const INDEX_PART: u64 = 4;

/// Shards of each directory of a store that is made: up to sixteen, fewer where the budget has less than 32 segments for
/// each.
pub(crate) fn shards(budget: u64, directories: usize, segment_bytes: u64) -> u32 {
    let segments = budget / (directories as u64).max(1) / segment_bytes.max(1);
    let shards = (segments / SEGMENTS_EACH).clamp(2, SHARDS_MAX);
    // A power of two: as many executors share them evenly.
    u32::try_from(1 << shards.ilog2()).unwrap_or(2)
}

/// Memory that the index may take: a part of what this process may have, by the machine and its control group. `None`
/// where neither says.
pub(crate) fn index_bytes() -> Option<u64> {
    let machine = read("/proc/meminfo").and_then(|text| total(&text));
    let group = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let group = group.iter().find_map(|path| read(path)?.trim().parse::<u64>().ok());
    let may = machine.into_iter().chain(group).min()?;
    Some((may / INDEX_PART).max(16 << 20))
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Bytes of memory that `/proc/meminfo` tells.
fn total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The part of the free room that a budget as a part of the disk may take, in hundredths: other programs write until the store is made.
const MOST_OF_FREE: u64 = 99;
/// The part of the room on the disk that a store takes by default, in hundredths.
pub(super) const FREE_SHARE: u64 = 80;

/// A budget that the disks of these directories have room for: this part of them in hundredths, or most of what is free; what
/// the store has there already counts as free. Directories on one file system share its room.
pub(crate) fn budget(directories: &[PathBuf], part: Option<u32>) -> Result<u64, String> {
    // Of a store that is there, an absent directory counts as much as the others: its share waits for it.
    let is_store = |directory: &&PathBuf| directory.join(SUPERBLOCK).exists();
    let there: Vec<&PathBuf> = directories.iter().filter(is_store).collect();
    let counted = if there.is_empty() { directories.iter().collect() } else { there };
    let mut disks: BTreeMap<u64, Room> = BTreeMap::new();
    for directory in counted.iter().copied() {
        let (number, room) = room(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let here = disks.entry(number).or_default();
        *here = Room { own: here.own.saturating_add(room.own), ..room };
    }
    let total = disks.values().map(|room| room.share(part)).fold(0, u64::saturating_add);
    Ok(total / counted.len().max(1) as u64 * directories.len() as u64)
}

/// Bytes of a file system, those of them that are free, and those that the store has there.
#[derive(Clone, Copy, Default)]
struct Room {
    all: u64,
    free: u64,
    own: u64,
}

impl Room {
    fn share(self, part: Option<u32>) -> u64 {
        let Self { all, free, own } = self;
        match part {
            // No more than there is: other programs may have a part of the disk.
            Some(part) => {
                (all / 100).saturating_mul(part.into()).min((free / 100 * MOST_OF_FREE).saturating_add(own))
            }
            None => (free / 100 * FREE_SHARE).saturating_add(own),
        }
    }
}

/// The number of the file system that a directory is on, or will be made on, and its room.
fn room(directory: &Path) -> std::io::Result<(u64, Room)> {
    // One that is absent will be made on the disk of the directory above.
    let above = directory.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = if directory.exists() { directory } else { above };
    let space = rustix::fs::statvfs(place)?;
    let [all, free] = [space.f_blocks, space.f_bavail].map(|blocks| blocks.saturating_mul(space.f_frsize));
    Ok((place.metadata()?.dev(), Room { all, free, own: bytes_below(directory) }))
}

/// Bytes of the files below a directory. What cannot be read counts as nothing.
fn bytes_below(directory: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let size = |entry: std::fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => bytes_below(&entry.path()),
        Ok(kind) if kind.is_file() => entry.metadata().map_or(0, |data| data.blocks().saturating_mul(512)),
        _ => 0,
    };
    entries.flatten().map(size).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_disk_gets_sixteen_shards_and_a_small_one_what_its_segments_allow() {
        let segment = 256 << 20;
        assert_eq!(shards(1 << 30, 1, 32 << 20), 2);
        assert_eq!(shards(1 << 30, 1, segment), 2);
        assert_eq!(shards(16 << 30, 1, segment), 2);
        assert_eq!(shards(64 << 30, 1, segment), 8);
        assert_eq!(shards(128 << 30, 1, segment), 16);
        assert_eq!(shards(4 << 40, 1, segment), 16);
        assert_eq!(shards(512 << 30, 8, segment), 8);
        assert_eq!(shards(32 << 20, 2, 256 << 10), 2);
        assert_eq!(shards(32 << 20, 1, 256 << 10), 4);
    }

    #[test]
    fn directories_on_one_file_system_share_it_and_those_on_two_have_both() {
        let of = |directories: &[&str], part| {
            let directories: Vec<PathBuf> = directories.iter().map(PathBuf::from).collect();
            budget(&directories, part).unwrap()
        };
        // Two of them are still to be made, both beside this package.
        let (one, two) = (of(&["none-1"], Some(1)), of(&["none-1", "none-2"], Some(1)));
        // Each of two directories has half, and a byte may be cut off.
        assert!(one > 0 && one.abs_diff(two) < 2, "{one} {two}");
        // Other programs write meanwhile.
        let (one, two) = (of(&["none-1"], None), of(&["none-1", "none-2"], None));
        assert!(two < one + one / 2, "{one} {two}");
        // Where a second file system is at hand, both count.
        let other = Path::new("/dev/shm")
            .metadata()
            .is_ok_and(|facts| facts.dev() != Path::new(".").metadata().unwrap().dev());
        if other {
            let (here, there) = (of(&["none-1"], Some(1)), of(&["/dev/shm/none"], Some(1)));
            assert!((here + there).abs_diff(of(&["none-1", "/dev/shm/none"], Some(1))) < 2);
        }
    }

    #[test]
    fn a_part_is_of_all_and_at_most_what_is_free_or_the_stores() {
        let room = Room { all: 1000, free: 300, own: 100 };
        assert_eq!([Some(10), Some(90), None].map(|part| room.share(part)), [100, 397, 340]);
    }

    #[test]
    fn the_memory_of_a_machine_is_found_in_what_the_kernel_tells() {
        assert_eq!(total("MemTotal:       16384 kB\nMemFree: 3 kB\n"), Some(16 << 20));
        assert_eq!(total("nothing"), None);
        assert!(index_bytes().is_some_and(|bytes| bytes >= 16 << 20));
    }
}
