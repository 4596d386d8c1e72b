//! Segments of which blocks were evicted, and whose end is damaged: their records alone must say then what is here, what
//! was evicted, and what power left of an eviction that it cut short. None of it is damage, and nothing comes back.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvarts_fsck::check::Options as CheckOptions;
use kvarts_fsck::contents::{self, Fate, Run};
use kvarts_fsck::disk::{Disk, MemoryDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::store::survey;
use kvarts_fsck::window::Tally;
use kvarts_layout::format::{PAGE, Structure};

use super::bits::{changed, quarantined};
use super::repaired::repaired;
use super::stores::{Answers, Make, Prepared, look, prepared, structures};
use crate::sim::Seed;

/// A sealed segment with holes among its records.
struct Holed {
    disk: usize,
    path: String,
    footer: usize,
    trailer: usize,
    log_end: u64,
}

fn holed(store: &Prepared) -> Vec<Holed> {
    let segments = store.files().into_iter().filter(|(_, path)| path.contains("segment-"));
    let of = |(disk, path): (usize, String)| {
        let bytes = store.disks[disk].contents(&path)?;
        let found = structures(&bytes);
        let at = |wanted| found.iter().find(|one| one.1 == wanted).map(|one| one.0);
        let (footer, trailer) = (at(Structure::Footer)?, at(Structure::Trailer)?);
        let log_end = u64::from_le_bytes(bytes[trailer + 120..trailer + 128].try_into().ok()?);
        let one = Holed { disk, path, footer, trailer, log_end };
        (!one.holes(&store.disks).is_empty()).then_some(one)
    };
    segments.filter_map(of).collect()
}

impl Holed {
    /// Holes among its records.
    fn holes(&self, disks: &[MemoryDisk]) -> Vec<(u64, u64)> {
        let mut holes = disks[self.disk].holes(&self.path);
        holes.retain(|(at, _)| *at < self.log_end);
        holes
    }
}

/// Segments that list something, by shard and number: what is damaged in one that is free is no problem.
fn in_use(disks: &[MemoryDisk]) -> Result<BTreeSet<String>, String> {
    let path = |run: &Run| format!("shard-{:04}/segment-{:08}", run.shard, run.segment);
    Ok(read(disks)?.iter().map(path).collect())
}

/// What the checker reads.
fn read(disks: &[MemoryDisk]) -> Result<Vec<Run>, String> {
    let disks: Vec<Arc<dyn Disk>> = disks.iter().map(|disk| Arc::new(disk.clone()) as _).collect();
    let store = survey(&disks, &mut Findings::default()).map_err(|why| why.to_string())?;
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let store = store.ok_or("there is no store")?;
    Ok(contents::read(&store, &options, 0, &Tally::default(), Findings::default()).runs)
}

/// What the checker calls live.
fn live(disks: &[MemoryDisk]) -> Result<BTreeSet<(u64, [u8; 32])>, String> {
    let of = |run: &Run| {
        let named = run.blocks.blocks.iter().zip(&run.fates).filter(|(_, fate)| **fate == Fate::Live);
        named.map(|(name, _)| (run.blocks.coordinate, name.key)).collect::<Vec<_>>()
    };
    Ok(read(disks)?.iter().flat_map(of).collect())
}

/// The store answers as before, and says that so much is damaged.
fn same(store: &Prepared, disks: &[MemoryDisk], before: &Answers, damaged: u64) -> Result<Answers, String> {
    let expected = live(disks)?;
    let (found, opened) = store.ask(disks)?;
    quarantined(&found)?;
    let changed = changed(before, &found);
    let problems: u64 = opened.store.recovery().iter().map(|report| report.problems).sum();
    if !changed.is_empty() || problems != damaged {
        return Err(format!("{problems} problems of {damaged}, answers that changed: {changed:?}"));
    }
    let left = crate::witness::directories(&opened.world.kill());
    match live(&left)? == expected {
        true => Ok(found),
        false => Err("the checker finds other blocks before a start and after it".to_owned()),
    }
}

/// An end is damaged, and of some evictions a page is left.
fn remains(seed: Seed, store: &Prepared) -> Result<(), String> {
    let (disks, mut rng) = (store.fork(), seed.child("remains").rng());
    let (mut all, in_use) = (holed(store), in_use(&disks)?);
    all.retain(|segment| in_use.contains(&segment.path));
    for segment in &all {
        for (at, len) in segment.holes(&store.disks) {
            if len >= 3 * PAGE as u64 && rng.coin() {
                // Behind the header of a record that went as a whole.
                let page = at as usize + PAGE;
                disks[segment.disk].tamper(&segment.path, |bytes| bytes[page..page + PAGE].fill(0x77));
            }
        }
    }
    let checked = look(&disks).map_err(|why| why.to_string())?;
    if !checked.findings.is_clean() {
        let problems = crate::witness::problems(&checked);
        return Err(format!("what power left of an eviction is called damage: {problems}"));
    }
    let expected = live(&disks)?;
    let segment = &all[rng.index(all.len())];
    let at = if rng.coin() { segment.trailer } else { segment.footer };
    disks[segment.disk].tamper(&segment.path, |bytes| bytes[at + 200] ^= 4);
    let checked = look(&disks).map_err(|why| why.to_string())?;
    if checked.findings.problem_count != 1 || live(&disks)? != expected {
        return Err(format!("the checker: {}", crate::witness::problems(&checked)));
    }
    let found = same(store, &disks, &store.sound, 1)?;
    repaired(store, &disks, &found, None)
}

/// No checkpoint knows of seals, and trailers did not arrive: what a footer lists was durable before it.
fn unknown_seals(store: &Prepared) -> Result<(), String> {
    let disks = store.fork();
    for (disk, path) in store.files().into_iter().filter(|(_, path)| path.contains("checkpoint")) {
        disks[disk].remove(&path);
    }
    let (before, _) = store.ask(&disks)?;
    let expected = live(&disks)?;
    for segment in holed(store) {
        let at = segment.trailer;
        disks[segment.disk].tamper(&segment.path, |bytes| bytes[at..at + PAGE].fill(0));
    }
    if live(&disks)? != expected {
        return Err("the checker finds other blocks without trailers".to_owned());
    }
    same(store, &disks, &before, 0).map(drop)
}

/// What happens to the ends of segments with holes costs nothing.
pub(super) fn play(seed: Seed) -> Result<(), String> {
    let store = prepared(Make::Holed);
    match seed.child("ends").rng().index(3) {
        0 => unknown_seals(store),
        _ => remains(seed, store),
    }
}
