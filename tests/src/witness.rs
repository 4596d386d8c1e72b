//! The checker over images of the simulation: the independent witness of what recovery decides.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvarts_contract::io_error::DirId;
use kvarts_fsck::check::{Checked, Level, Options as CheckOptions, check};
use kvarts_fsck::disk::{Disk, MemoryDisk, Node, NodeKind, Step};
use kvarts_fsck::findings::{self, Findings};
use kvarts_fsck::store::{CannotRun, survey};
use kvarts_fsck::window::Tally;
use kvarts_layout::format::recovery::{RECORD_ROWS, SEGMENT_ROWS, Severity};
use kvarts_store::engine::{Limits, Options, RecoveryReport, Store};

use crate::campaign::{Driven, Ledger, drive, work};
use crate::sim::{Media, Rng, Seed, SimWorld, WorldConfig};

/// The directories of an image, each in memory, by number.
pub fn directories(image: &Media) -> Vec<MemoryDisk> {
    let mut disks = BTreeMap::<u16, MemoryDisk>::new();
    let split = |path: &str| -> Option<(u16, String)> {
        let (dir, rest) = path.split_once('/').unwrap_or((path, ""));
        Some((dir.parse().ok()?, rest.to_owned()))
    };
    for (dir, path) in image.folders().iter().filter_map(|path| split(path)) {
        let disk = disks.entry(dir).or_default();
        if !path.is_empty() {
            disk.plant_folder(&path);
        }
    }
    for (dir, path) in image.paths().iter().filter_map(|path| split(path)) {
        let bytes = image.contents(DirId(dir), &path).unwrap_or_default();
        let disk = disks.entry(dir).or_default();
        disk.plant(&path, bytes);
        disk.punch(&path, &image.holes(DirId(dir), &path));
    }
    disks.into_values().collect()
}

/// The simulation's image of directories in memory, for the engine to open.
pub fn media(disks: &[MemoryDisk]) -> Media {
    let mut media = Media::new(disks.len() as u16, 1 << 40);
    for (dir, disk) in (0..).map(DirId).zip(disks) {
        let mut folders = Vec::new();
        let mut note = |node: Node| {
            if node.kind == NodeKind::Folder {
                folders.push(node.name);
            }
        };
        disk.visit("", &mut note).expect("memory can be listed");
        for folder in folders {
            assert!(media.plant_folder(dir, &folder), "{folder}");
        }
        for path in disk.files() {
            // A folder that was set aside as a whole lies in another.
            for (at, _) in path.match_indices('/') {
                let _ = media.plant_folder(dir, &path[..at]);
            }
            assert!(media.plant(dir, &path, &disk.contents(&path).unwrap_or_default()), "{path}");
            media.plant_holes(dir, &path, &disk.holes(&path));
        }
    }
    media
}

/// What is on the disk if the power fails after these changes: what was synced, and of the rest what chance keeps. A new
/// file whose bytes were synced and whose name was not is there whole or not at all.
pub fn cut(start: &MemoryDisk, steps: &[Step], rng: &mut Rng) -> MemoryDisk {
    let disk = start.fork();
    let there: BTreeSet<String> = start.files().into_iter().collect();
    let folder = |path: &str| path.rsplit_once('/').map_or(String::new(), |(folder, _)| folder.to_owned());
    let synced = |after: &[Step], path: &str| {
        after.iter().any(|later| matches!(later, Step::SyncFolder(one) if *one == folder(path)))
    };
    let mut named = BTreeMap::<&String, bool>::new();
    for (at, step) in steps.iter().enumerate() {
        let after = &steps[at..];
        let durable = match step {
            Step::Write(path, ..) | Step::Punch(path, ..) | Step::SetLen(path, _) => {
                let flushed = after.iter().any(|later| matches!(later, Step::Sync(one) if one == path));
                let about = |one: &Step| matches!(one, Step::Write(p, ..) | Step::SetLen(p, _) if p == path);
                let made = steps.iter().position(about).unwrap_or(at);
                let has_name = there.contains(path) || synced(&steps[made..], path);
                if !has_name && !*named.entry(path).or_insert_with(|| rng.coin()) {
                    continue;
                }
                flushed
            }
            Step::Rename(_, path)
            | Step::MakeFolder(path)
            | Step::Remove(path)
            | Step::RemoveFolder(path) => synced(after, path),
            _ => false,
        };
        disk.apply(step, &mut || durable || rng.coin());
    }
    disk
}

/// What the checker says of directories in memory.
pub fn examine(disks: &[MemoryDisk], level: Level) -> Result<Checked, CannotRun> {
    let disks: Vec<Arc<dyn Disk>> = disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect();
    examine_disks(&disks, level)
}

/// What the checker says of directories, wherever they are.
pub fn examine_disks(disks: &[Arc<dyn Disk>], level: Level) -> Result<Checked, CannotRun> {
    let mut found = Findings::default();
    let Some(store) = survey(disks, &mut found)? else {
        return Ok(Checked { findings: found, ..Checked::default() });
    };
    let options = CheckOptions { level, threads: 1, ..CheckOptions::default() };
    match check(&store, &options, &Tally::default(), found) {
        Ok(checked) => Ok(checked),
        Err(error) => Err(CannotRun::Refused(error.to_string())),
    }
}

/// Whether a label is a row of the recovery table that a recovery can take: it reads no record that a footer lists.
fn is_recoverys(name: &str) -> bool {
    let rows = RECORD_ROWS.iter().map(|row| &row.row).chain(SEGMENT_ROWS.iter().map(|row| &row.row));
    let mut rows = rows.filter(|row| row.severity != Severity::Normal && !row.label.starts_with("listed-"));
    rows.any(|row| row.label == name)
}

/// The notes and problems of the recovery table that the checker met.
pub fn checkers_rows(checked: &Checked) -> BTreeSet<&'static str> {
    checked.findings.counts.keys().copied().filter(|name| is_recoverys(name)).collect()
}

/// The notes and problems that recovery met.
pub fn recoverys_rows(reports: &[RecoveryReport]) -> BTreeSet<&'static str> {
    let all = reports.iter().flat_map(|report| report.rows.keys().copied());
    all.filter(|name| is_recoverys(name)).collect()
}

/// Blocks that recovery found on disk: those it took in, and those that were dead or there twice.
pub fn recoverys_blocks(reports: &[RecoveryReport]) -> u64 {
    reports.iter().map(|report| report.blocks + report.duplicates + report.deleted + report.evicted).sum()
}

/// The problems of a check, one a line, for an assertion.
pub fn problems(checked: &Checked) -> String {
    let line = |finding: &findings::Finding| {
        format!("{} {:?} {:?} {:?}", finding.label.name, finding.place, finding.file, finding.found)
    };
    checked.findings.problems.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A store of the simulation after a seeded workload, stopped cleanly or killed.
pub fn worked(seed: Seed, options: &Options, ops: usize, close: bool) -> Media {
    let mut config = WorldConfig::default();
    config.disk.dirs = options.directories;
    let world = SimWorld::new(seed.0, &config);
    let launcher = world.launcher();
    let ledger = RefCell::new(Ledger::default());
    let mut rng = seed.child("work").rng();
    let whole = async {
        let (store, _executors) = Store::open(&launcher, options).await.expect("a fresh disk");
        work(&store, &ledger, &mut rng, ops).await;
        if close {
            store.close().await.expect("nothing fails");
        }
    };
    assert!(matches!(drive(&world, u64::MAX, whole), Driven::Done(())), "the workload does not end");
    world.kill()
}

/// Options of a small store.
pub fn small(shards: u32) -> Options {
    Options {
        shards_per_directory: shards,
        segment_bytes: 64 << 10,
        budget_bytes: 48 << 20,
        executors: 1,
        limits: Limits { arena_bytes: 2 << 20, ..Limits::default() },
        ..Options::default()
    }
}

/// Writes a directory out.
#[allow(clippy::disallowed_methods, reason = "a real directory outside any store")]
pub fn dump(disk: &MemoryDisk, to: &std::path::Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for path in disk.files() {
        let target = to.join(&path);
        if let Some(folder) = target.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(target, disk.contents(&path).unwrap_or_default())?;
    }
    Ok(())
}
