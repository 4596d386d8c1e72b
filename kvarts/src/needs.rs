//! What an offline command will take of memory and of temporary files, told before it begins.
//!
//! It is told where it is much, or where a person looks on; what there is no room for is refused, not found out after hours.
#![allow(clippy::disallowed_methods, reason = "an offline command on a real machine")]

use std::io::{IsTerminal, Write};

use kvarts_fsck::check::Options;
use kvarts_fsck::needs::{Need, Sizes, Task};
use kvarts_fsck::store::Store;
use kvarts_server::human::{bytes, grouped};
use kvarts_terminal::Failure;

/// Memory that is told of wherever it is asked for.
const MUCH: u64 = 512 << 20;

/// Tells what a command will take of this store; refused if the folder for temporary files has not the room.
pub(crate) fn tell((command, task): (&str, Task), store: &Store, options: &Options) -> Result<(), Failure> {
    let sizes = Sizes::of(store, options.threads);
    let need = sizes.need(task, options.threads);
    let available = available();
    let mut err = std::io::stderr();
    let much = need.memory >= MUCH.min(available.unwrap_or(MUCH)) || need.temporary > 0;
    if much || err.is_terminal() {
        // One who cannot read it misses nothing.
        let _ = writeln!(err, "{}", line(command, &sizes, &need, options, available));
    }
    if need.temporary == 0 {
        return Ok(());
    }
    let folder = options.spill.display();
    let space = rustix::fs::statvfs(&options.spill);
    let space = space.map_err(|error| Failure::User(format!("{folder}: {error}")))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free >= need.temporary {
        return Ok(());
    }
    let (wanted, free) = (bytes(need.temporary), bytes(free));
    Err(Failure::User(format!(
        "{command} needs up to {wanted} for temporary files, but {folder} has only {free} free: set TMPDIR \
        to a folder with more space"
    )))
}

fn line(command: &str, sizes: &Sizes, need: &Need, options: &Options, available: Option<u64>) -> String {
    let mut line = format!(
        "kvarts: {command} will use up to {} of memory for {} records and {} blocks",
        bytes(need.memory),
        grouped(sizes.records),
        grouped(sizes.blocks)
    );
    if need.temporary > 0 {
        line += &format!(" and {} of temporary files in {}", bytes(need.temporary), options.spill.display());
    }
    if let Some(available) = available.filter(|available| need.memory > *available) {
        line += &format!(
            "; only {} are available on this machine, so the kernel may kill the process",
            bytes(available)
        );
    }
    line
}

/// Memory that this machine says is available; `None` where it does not say.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_said_with_what_there_is() {
        let sizes = Sizes { segments: 40_000, records: 100_000_000, blocks: 100_000_000 };
        let said =
            |task, available| line("ls", &sizes, &sizes.need(task, 2), &Options::default(), Some(available));
        let list = said(Task::List, 1 << 30);
        assert!(list.contains("100 000 000 blocks") || list.contains("100,000,000 blocks"), "{list}");
        assert!(list.contains("only 1 GiB are available on this machine"), "{list}");
        assert!(!said(Task::List, 1 << 40).contains("available"));
        let export = said(Task::Export, 1 << 40);
        assert!(export.contains("of temporary files in"), "{export}");
        let [list, export] = [Task::List, Task::Export].map(|task| sizes.need(task, 2).memory);
        assert!(export * 5 < list, "{export} {list}");
        assert!(available().is_some_and(|bytes| bytes > 0));
    }
}
