//! What a directory's file system and disk allow, and how fast they are.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, fstatfs, fstatvfs, openat};

use super::Finding;

/// Bytes of each transfer, and how many are under way at once.
const PIECE: u64 = 1 << 20;
const THREADS: u64 = 8;
/// What memory and places of direct transfers are multiples of.
const ALIGN: u64 = 4096;
/// Below this a store is hardly worth its node.
const FREE_MIN: u64 = 1 << 30;
/// Below this restoring is slower than what most GPUs compute again.
const SLOW: f64 = 500.0;

/// All checks of one directory.
pub(super) fn look(directory: &Path, probe: u64) -> Vec<Finding> {
    let name = directory.display().to_string();
    // A file without a name: nothing is left behind, however this ends.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let plain = match openat(CWD, directory, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        Err(error) => {
            let error = io::Error::from(error);
            return vec![Finding::bad(
                format!("{name}: write"),
                format!("a file cannot be created: {error}"),
                "give an existing directory on a local file system to which this user can write",
            )];
        }
    };
    let magic = fstatfs(&plain).map_or(0, |found| found.f_type as u64);
    let direct = openat(CWD, directory, flags | OFlags::DIRECT, Mode::RUSR | Mode::WUSR)
        .map(File::from)
        .map_err(io::Error::from);
    let (free, total) = fstatvfs(&plain).map_or((0, 0), |found| {
        (found.f_bavail.saturating_mul(found.f_frsize), found.f_blocks.saturating_mul(found.f_frsize))
    });
    let mut findings = vec![file_system(&name, magic), space(&name, free, total), holes(&name, &plain)];
    match direct {
        Err(error) => findings.push(direct_io(&name, Err(error))),
        Ok(file) => {
            findings.push(direct_io(&name, Ok(())));
            let bytes = (probe / PIECE * PIECE).min(free / 2);
            if bytes >= PIECE * THREADS {
                let written =
                    pass(&file, bytes, true).and_then(|write| Ok((write, pass(&file, bytes, false)?)));
                findings.push(speed(&name, bytes, written));
            }
        }
    }
    findings
}

fn file_system(name: &str, magic: u64) -> Finding {
    let check = format!("{name}: file system");
    let local = "use a local ext4 or XFS file system: a store cannot rely on locks, direct I/O and flushes \
        of this file system";
    match magic {
        0xEF53 => Finding::good(check, "ext4"),
        0x5846_5342 => Finding::good(check, "XFS"),
        0x0102_1994 => Finding::better(check, "tmpfs", "all blocks are lost at a reboot: use a disk"),
        0x9123_683E => Finding::better(
            check,
            "btrfs",
            "not tested: the file system copies on write, so each put costs more; use ext4 or XFS",
        ),
        0x794c_7630 => Finding::better(
            check,
            "overlayfs",
            "the directory is in the container's own layer: mount a \
                volume for the store",
        ),
        0x6969 => Finding::bad(check, "NFS", local),
        0xFF53_4D42 | 0xFE53_4D42 => Finding::bad(check, "SMB", local),
        0x6573_5546 => Finding::bad(check, "FUSE", local),
        other => Finding::better(
            check,
            format!("unknown ({other:#x})"),
            "not tested: only ext4 and XFS are \
            tested",
        ),
    }
}

fn space(name: &str, free: u64, total: u64) -> Finding {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let (check, found) =
        (format!("{name}: space"), format!("{:.1} of {:.1} GiB are free", gib(free), gib(total)));
    if free < FREE_MIN {
        Finding::bad(check, found, "free at least 1 GiB, or use another directory")
    } else {
        Finding::good(check, found)
    }
}

/// Whether the file system gives back a hole in a file.
fn holes(name: &str, file: &File) -> Finding {
    let made = file.set_len(8 << 20).map_err(|error| error.to_string()).and_then(|()| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, flags, 0, 4 << 20).map_err(|error| error.to_string())
    });
    let check = format!("{name}: holes");
    match made {
        Ok(()) => Finding::good(check, "holes can be punched"),
        Err(why) => Finding::better(
            check,
            format!("the file system cannot punch holes: {why}"),
            "eviction rewrites more bytes: use ext4 or XFS",
        ),
    }
}

fn direct_io(name: &str, opened: io::Result<()>) -> Finding {
    let check = format!("{name}: direct I/O");
    match opened {
        Ok(()) => Finding::good(check, "yes"),
        Err(error) => Finding::better(
            check,
            format!("no: {error}"),
            "reads go through the page cache and copy the data once more: use ext4 or XFS",
        ),
    }
}

/// How long all pieces take, eight at once.
fn pass(file: &File, bytes: u64, is_write: bool) -> io::Result<Duration> {
    let began = now();
    std::thread::scope(|scope| {
        let lane = |lane: u64| {
            let pieces = (lane..bytes / PIECE).step_by(THREADS as usize);
            scope.spawn(move || -> io::Result<()> {
                let mut memory = vec![lane as u8 | 1; (PIECE + ALIGN) as usize];
                let start = memory.as_ptr().align_offset(ALIGN as usize);
                let end = start + PIECE as usize;
                let piece = memory.get_mut(start..end).ok_or(io::ErrorKind::OutOfMemory)?;
                for number in pieces {
                    if is_write {
                        file.write_all_at(piece, number * PIECE)?;
                    } else {
                        file.read_exact_at(piece, number * PIECE)?;
                    }
                }
                Ok(())
            })
        };
        let lanes: Vec<_> = (0..THREADS).map(lane).collect();
        lanes.into_iter().try_for_each(|lane| {
            lane.join().map_err(|_| io::Error::other("a thread of the test panicked"))?
        })
    })?;
    if is_write {
        file.sync_data()?;
    }
    Ok(now().saturating_duration_since(began))
}

#[allow(clippy::disallowed_methods, reason = "a measurement of the machine")]
fn now() -> Instant {
    Instant::now()
}

fn speed(name: &str, bytes: u64, times: io::Result<(Duration, Duration)>) -> Finding {
    let check = format!("{name}: speed");
    let (write, read) = match times {
        Ok(times) => times,
        Err(error) => {
            return Finding::bad(
                check,
                format!("the disk failed: {error}"),
                "see dmesg and the disk's SMART log",
            );
        }
    };
    let rate = |time: Duration| bytes as f64 / f64::from(1 << 20) / time.as_secs_f64().max(1e-9);
    let found = format!(
        "{:.0} MiB/s read, {:.0} MiB/s written ({} MiB, direct)",
        rate(read),
        rate(write),
        bytes >> 20
    );
    if rate(read) < SLOW {
        Finding::better(
            check,
            found,
            "loading blocks may be slower than computing them: `kvarts plan break-even` prints the disk \
            speed above which loading is faster; NVMe drives read 3,000 MiB/s and more",
        )
    } else {
        Finding::good(check, found)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Bad, Better, Good};
    use super::*;

    #[test]
    fn file_systems_are_judged_by_what_a_store_relies_on() {
        for (magic, verdict) in [
            (0xEF53, Good),
            (0x5846_5342, Good),
            (0x0102_1994, Better),
            (0x6969, Bad),
            (0x6573_5546, Bad),
            (1, Better),
        ] {
            assert_eq!(file_system("d", magic).verdict, verdict, "{magic:#x}");
        }
    }

    #[test]
    fn a_disk_is_judged_by_what_it_reads() {
        let second = Duration::from_secs(1);
        assert_eq!(speed("d", 4 << 30, Ok((second, second))).verdict, Good);
        assert_eq!(speed("d", 100 << 20, Ok((second, second))).verdict, Better);
        let failed = speed("d", 1, Err(io::ErrorKind::Other.into()));
        assert_eq!(failed.verdict, Bad);
        assert_eq!(space("d", 1 << 20, 1 << 40).verdict, Bad);
        assert_eq!(space("d", 1 << 40, 1 << 40).verdict, Good);
    }

    #[test]
    fn a_directory_is_looked_at_and_nothing_is_left_in_it() {
        let directory = std::env::temp_dir().join(format!("kvarts-doctor-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let findings = look(&directory, 16 << 20);
        assert!(findings.iter().any(|finding| finding.check.ends_with("speed")), "{findings:?}");
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
        std::fs::remove_dir(&directory).unwrap();
        let absent = look(&directory, 0);
        assert_eq!((absent.len(), absent[0].verdict), (1, Bad));
    }
}
