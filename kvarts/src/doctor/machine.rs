//! What the kernel, its limits and the clock allow.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kvarts_store::io::{Features, IoChoice, OpenError, open_io};
use rustix::process::{Resource, getrlimit};

use super::Finding;

/// What rings and registered memory take at least.
const LOCKED_MIN: u64 = 8 << 20;
/// Connections and segment files of a small server; of a large one.
const FILES_MIN: u64 = 1024;
const FILES_GOOD: u64 = 65_536;
/// Before this no clock is right: 2025-01-01, in seconds since 1970.
const EARLIEST: u64 = 1_735_689_600;

/// All checks of the machine; `directories` are what the way to the disks is opened with.
pub(super) fn look(directories: &[PathBuf]) -> Vec<Finding> {
    let text = |path: &str| crate::files::read_text(Path::new(path), 4096, "a setting").unwrap_or_default();
    vec![
        kernel(&text("/proc/sys/kernel/osrelease")),
        rings(directories),
        locked(getrlimit(Resource::Memlock).current),
        files(getrlimit(Resource::Nofile).maximum),
        huge_pages(
            &text("/sys/kernel/mm/transparent_hugepage/enabled"),
            &text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        ),
        memory(&text("/proc/meminfo"), &text("/sys/fs/cgroup/memory.max")),
        clock(now(), &text("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
    ]
}

#[allow(clippy::disallowed_methods, reason = "checks the clock of the machine")]
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn kernel(release: &str) -> Finding {
    let mut numbers =
        release.trim().split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().ok());
    let version = (numbers.next().flatten(), numbers.next().flatten());
    let found = format!("Linux {}", release.trim());
    match version {
        (Some(major), Some(minor)) if (major, minor) >= (6, 1) => Finding::good("kernel", found),
        (Some(major), Some(minor)) if (major, minor) >= (5, 15) => Finding::better(
            "kernel",
            found,
            "use Linux 6.1 or newer: io_uring then does more of its work in the thread that waits for \
            the results",
        ),
        (Some(_), Some(_)) => Finding::better(
            "kernel",
            found,
            "io_uring needs Linux 5.15; on older kernels the server uses threads, which need more CPU time \
            for each read",
        ),
        _ => Finding::better(
            "kernel",
            "the version of the kernel cannot be read",
            "the server needs Linux, 5.15 or newer for io_uring",
        ),
    }
}

fn rings(directories: &[PathBuf]) -> Finding {
    match open_io(IoChoice::Ring, directories, &Features::default()) {
        Ok(io) => {
            let facts = io.facts();
            let off = facts
                .features
                .iter()
                .filter_map(|(name, state)| state.as_ref().err().map(|why| format!("{name}: {why}")));
            let off: Vec<String> = off.collect();
            if off.is_empty() {
                Finding::good("io_uring", "all features that the server uses")
            } else {
                Finding::good("io_uring", format!("yes; without {}", off.join("; ")))
            }
        }
        Err(OpenError::Environment(why)) => Finding::better(
            "io_uring",
            "not tested",
            format!("{why}: repeat the check with a directory that this user can open"),
        ),
        Err(why) => Finding::better("io_uring", "no", why.to_string()),
    }
}

/// `limit` is in bytes; nothing stands for no limit.
fn locked(limit: Option<u64>) -> Finding {
    let advice = "raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, --ulimit \
        memlock=-1 in containers): reads are 3 to 10% faster with memory that is registered with the kernel";
    match limit {
        None => Finding::good("locked memory", "unlimited"),
        Some(bytes) if bytes < LOCKED_MIN => {
            Finding::better("locked memory", format!("{} KiB", bytes >> 10), advice)
        }
        Some(bytes) => Finding::better("locked memory", format!("{} MiB", bytes >> 20), advice),
    }
}

fn files(limit: Option<u64>) -> Finding {
    let advice = "raise the limit (ulimit -Hn 65536, LimitNOFILE=65536 in systemd): each segment file and \
        each connection needs a file descriptor";
    match limit {
        None => Finding::good("open files", "unlimited"),
        Some(count) if count < FILES_MIN => Finding::bad("open files", count.to_string(), advice),
        Some(count) if count < FILES_GOOD => Finding::better("open files", count.to_string(), advice),
        Some(count) => Finding::good("open files", count.to_string()),
    }
}

/// The word in brackets of such a setting of the kernel.
fn chosen(setting: &str) -> &str {
    setting.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("absent", |(word, _)| word)
}

fn huge_pages(private: &str, shared: &str) -> Finding {
    let found = format!("private memory: {}; shared memory: {}", chosen(private), chosen(shared));
    let is_private_good = matches!(chosen(private), "always" | "madvise");
    // Shared memory is put into large pages on request (`MADV_COLLAPSE`), which a kernel refuses only where this says deny.
    let is_shared_good = !matches!(chosen(shared), "absent" | "deny");
    let change = match (is_private_good, is_shared_good) {
        (true, true) => return Finding::good("huge pages", found),
        (false, true) => "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled".to_owned(),
        (true, false) => "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled".to_owned(),
        (false, false) => {
            "in /sys/kernel/mm/transparent_hugepage: echo madvise > enabled; echo never > shmem_enabled"
                .to_owned()
        }
    };
    Finding::better(
        "huge pages",
        found,
        format!(
            "{change}. Reads over the network use private memory, and reads of clients on this host \
            use shared memory; large pages halve the work of both kinds of reads"
        ),
    )
}

/// From `/proc/meminfo`, and from the limit of the control group, if it has one.
fn memory(meminfo: &str, group: &str) -> Finding {
    let of = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    let all = of("MemTotal").unwrap_or(0);
    let usable = group.trim().parse::<u64>().map_or(all, |limit| limit.min(all));
    let found = format!("{:.1} GiB", usable as f64 / f64::from(1 << 30));
    if usable < 1 << 30 {
        Finding::bad(
            "memory",
            found,
            "a server needs at least 1 GiB: 26 to 30 bytes a block for the index, and 512 MiB for \
            requests",
        )
    } else {
        Finding::good("memory", found)
    }
}

/// The time since 1970, and where the kernel takes time from.
fn clock(now: Duration, source: &str) -> Finding {
    let source = source.trim();
    if now.as_secs() < EARLIEST {
        return Finding::bad(
            "clock",
            format!("{} s after 1970", now.as_secs()),
            "set the clock (NTP, chrony): times to live and certificates depend on it",
        );
    }
    match source {
        "hpet" | "acpi_pm" | "jiffies" => Finding::better(
            "clock",
            format!("the time is plausible; clock source {source}"),
            "each read of this clock is a system call: choose tsc or the hypervisor's clock (clocksource= of \
            the kernel)",
        ),
        _ => Finding::good("clock", format!("the time is plausible; clock source {source}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Bad, Better, Good};
    use super::*;

    #[test]
    fn kernels_are_judged_by_their_version() {
        for (release, verdict) in [
            ("6.18.5\n", Good),
            ("6.1.0-18-amd64", Good),
            ("5.15.0-91-generic", Better),
            ("5.4.0", Better),
            ("", Better),
        ] {
            assert_eq!(kernel(release).verdict, verdict, "{release}");
        }
        assert!(kernel("5.4.0").advice.unwrap().contains("5.15"));
    }

    #[test]
    fn limits_are_judged_by_what_a_server_needs() {
        assert_eq!(locked(None).verdict, Good);
        assert_eq!(locked(Some(64 << 10)).found, "64 KiB");
        assert_eq!(locked(Some(1 << 30)).verdict, Better);
        assert_eq!(files(Some(256)).verdict, Bad);
        assert_eq!(files(Some(4096)).verdict, Better);
        assert_eq!(files(Some(1 << 20)).verdict, Good);
    }

    #[test]
    fn settings_of_large_pages_are_read_from_their_brackets() {
        let shared_off = "always within_size advise never [deny] force";
        let shared_on = "always within_size advise [never] deny force";
        assert_eq!(huge_pages("always [madvise] never", shared_on).verdict, Good);
        for (private, shared, names) in [
            (
                "always [madvise] never",
                shared_off,
                "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            ),
            ("always [madvise] never", "", "shmem_enabled"),
            (
                "always madvise [never]",
                shared_on,
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            ),
            ("always madvise [never]", shared_off, "echo madvise > enabled; echo never > shmem_enabled"),
        ] {
            let found = huge_pages(private, shared);
            let advice = found.advice.unwrap();
            assert!(found.verdict == Better && advice.contains(names), "{private} {shared}: {advice}");
            assert_eq!(advice.contains("shmem_enabled"), shared != shared_on, "{advice}");
        }
        assert_eq!(chosen(""), "absent");
    }

    #[test]
    fn memory_is_what_the_control_group_leaves() {
        let machine = "MemTotal:       24000000 kB\nMemFree: 1 kB\n";
        assert_eq!(memory(machine, "max\n").verdict, Good);
        assert_eq!(memory(machine, "536870912\n").verdict, Bad);
        assert_eq!(memory("", "").verdict, Bad);
    }

    #[test]
    fn a_clock_that_was_never_set_is_bad_and_a_slow_one_is_told() {
        assert_eq!(clock(Duration::from_secs(60), "tsc").verdict, Bad);
        assert_eq!(clock(Duration::from_secs(EARLIEST + 1), "hpet\n").verdict, Better);
        assert_eq!(clock(Duration::from_secs(EARLIEST + 1), "kvm-clock\n").verdict, Good);
    }

    #[test]
    fn this_machine_is_looked_at_without_a_failure() {
        assert_eq!(look(&[std::env::temp_dir()]).len(), 7);
    }
}
