//! This process, under the names that every Prometheus client library uses. What the kernel does not say is left out.

use std::fs;

use rustix::time::{ClockId, clock_gettime};

use super::lines::one;

/// Ticks of the kernel's clock in a second, as it shows them to programs: the same on all machines that Kvarts runs on.
const TICKS: f64 = 100.0;

pub(super) fn process(out: &mut String) {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    let help = "CPU time of the server (user and system), in seconds; its rate is the number of busy cores.";
    one(out, "process_cpu_seconds_total", "counter", help, seconds);
    if let Some(started) = started() {
        let help = "Start of the process, in seconds since 1970.";
        one(out, "process_start_time_seconds", "gauge", help, started);
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let help = "Resident memory of the process, in bytes, including memory shared with local clients.";
    gauge(out, "process_resident_memory_bytes", help, field(&status, "VmRSS:").map(|kib| kib << 10));
    let help = "Mapped address space of the process, in bytes.";
    gauge(out, "process_virtual_memory_bytes", help, field(&status, "VmSize:").map(|kib| kib << 10));
    gauge(out, "process_threads", "Threads of the process.", field(&status, "Threads:"));
    // The one that looks is open while it looks.
    let open = fs::read_dir("/proc/self/fd").ok().map(|all| (all.count() as u64).saturating_sub(1));
    gauge(
        out,
        "process_open_fds",
        "Open file descriptors of the process: segment files, connections, shared memory.",
        open,
    );
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let help = "Limit of the open file descriptors of the process; raise the limit (ulimit -n) before process_open_fds reaches it.";
    gauge(out, "process_max_fds", help, field(&limits, "Max open files"));
}

fn gauge(out: &mut String, name: &str, help: &str, value: Option<u64>) {
    if let Some(value) = value {
        one(out, name, "gauge", help, value);
    }
}

/// The first number behind a name at the begin of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// When the process was started, in seconds since 1970.
fn started() -> Option<f64> {
    let booted = field(&fs::read_to_string("/proc/stat").ok()?, "btime ")?;
    Some(booted as f64 + ticks(&fs::read_to_string("/proc/self/stat").ok()?)? as f64 / TICKS)
}

/// The ticks between the machine's start and the process's: the 22nd field. The second one is a name in parentheses, which
/// may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_told_of_in_base_units() {
        let mut out = String::new();
        process(&mut out);
        let value = |name: &str| -> f64 {
            let line = out.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().parse().unwrap()
        };
        assert!(value("process_resident_memory_bytes ") > 1e5, "{out}");
        assert!(value("process_virtual_memory_bytes ") >= value("process_resident_memory_bytes "));
        assert!(value("process_open_fds ") >= 3.0 && value("process_open_fds ") < value("process_max_fds "));
        assert!(value("process_threads ") >= 1.0 && value("process_cpu_seconds_total ") > 0.0);
        // After this was written, whatever clock the machine has.
        assert!(value("process_start_time_seconds ") > 1.7e9, "{out}");
    }

    #[test]
    fn a_name_with_parentheses_and_spaces_hides_no_field() {
        let rest: Vec<String> = (3..=52).map(|n| n.to_string()).collect();
        assert_eq!(ticks(&format!("7 (a) (b 1 2) {}", rest.join(" "))), Some(22));
        assert_eq!((ticks("7 (a"), ticks("7 (a) S 1")), (None, None));
    }
}
