//! Making a store, and finishing one whose making a power cut stopped.
//!
//! In this order, each step durable in all directories before the next: the folders of all shards, the superblocks one
//! after the other. So a store with a superblock has had all its folders, and a directory without a superblock whose
//! folders are empty has had nothing in it.

use std::collections::BTreeSet;
use std::rc::Rc;

use kvarts_layout::StoreId;
use kvarts_layout::format::names::shard_name;
use kvarts_layout::format::superblock::{Chosen, FILE_BYTES, Superblock};
use kvarts_layout::format::{PAGE, Secret, VERSION};

use super::{Found, Plan, Top, read, refused, superblock_name};
use crate::driver::Driver;
use crate::engine::shared::Birth;
use crate::io::{MetaOp, OpenMode};
use kvarts_contract::error::{DirectoryCause, Reason};
use kvarts_contract::{
    buffers::Arena,
    io_error::{DirId, IoError, Name},
};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy},
};

/// Makes a store where there is none.
pub(super) async fn make(
    driver: &Rc<Driver>,
    arena: &Arena,
    plan: &Plan,
    clock: &dyn Clock,
    entropy: &dyn Entropy,
) -> Result<Found, Reason> {
    let superblocks = planned(plan, clock, entropy);
    let first = superblocks.first().ok_or(Reason::Bug("a store without a directory"))?;
    for superblock in &superblocks {
        // Before anything is made: what cannot be encoded is a matter of the configuration.
        encoded(superblock, 0)?;
    }
    for (dir, superblock) in (0..plan.directories).map(DirId).zip(&superblocks) {
        make_folders(driver, dir, &superblock.shards).await?;
    }
    for (dir, superblock) in (0..plan.directories).map(DirId).zip(&superblocks) {
        write_new(driver, arena, dir, superblock).await?;
    }
    let of = |(dir, superblock): (u16, &Superblock)| -> Vec<(u32, DirId)> {
        superblock.shards.iter().map(|&shard| (shard, DirId(dir))).collect()
    };
    let shards: Vec<(u32, DirId)> = (0..plan.directories).zip(&superblocks).flat_map(of).collect();
    let birth = Birth {
        store: first.store,
        secret: first.secret.clone(),
        segment_bytes: plan.segment_bytes,
        created_ms: first.created_ms,
        budget: plan.budget,
        record_bytes_max: plan.record_bytes_max.min(plan.segment_bytes / 4),
        shards: shards.len() as u32,
    };
    let superblock_bytes = u64::from(plan.directories) * FILE_BYTES as u64;
    Ok(Found { birth, shards, superblock_bytes, is_new: true })
}

fn planned(plan: &Plan, clock: &dyn Clock, entropy: &dyn Entropy) -> Vec<Superblock> {
    let (mut store, mut secret) = (StoreId::default(), [0; 32]);
    entropy.fill(&mut store.0);
    entropy.fill(&mut secret);
    let (each, created_ms) = (plan.shards_per_directory, clock.unix_millis());
    let of = |directory: u32| Superblock {
        store,
        directory,
        sequence: 1,
        secret: Secret::new(secret),
        created_ms,
        segment_bytes: plan.segment_bytes,
        min_reader: VERSION,
        clean: false,
        directories: u32::from(plan.directories),
        shards_total: u32::from(plan.directories) * each,
        shards: shards_of(directory, each).collect(),
    };
    (0..u32::from(plan.directories)).map(of).collect()
}

fn shards_of(directory: u32, each: u32) -> impl Iterator<Item = u32> {
    (0..each).map(move |shard| directory * each + shard)
}

/// Makes the folders of shards durable that are not there yet.
async fn make_folders(driver: &Rc<Driver>, dir: DirId, shards: &[u32]) -> Result<(), Reason> {
    let refuse = |error: IoError| refused(&error);
    let there = Top::read(driver, dir).await?.empty;
    // A folder too many would be a shard without an executor for as long as the store lives.
    if let Some(other) = there.iter().find(|shard| !shards.contains(shard)) {
        return Err(Reason::Directory(DirectoryCause::OtherSettings(dir.0, *other)));
    }
    for &shard in shards.iter().filter(|shard| !there.contains(shard)) {
        let name = Name { dir, path: shard_name(shard).into() };
        driver.meta(MetaOp::MakeDir { name }).await.map_err(refuse)?;
    }
    // Also those that were there: their names may not be durable yet.
    driver.meta(MetaOp::SyncDir { name: Name { dir, path: "".into() } }).await.map_err(refuse)?;
    Ok(())
}

/// Writes the superblocks that a crash kept from being written while the store was made. Leaves everything as it is if
/// anything was ever stored, or if a directory without a superblock lacks the folders that came before it: then it is
/// not the one in which the store was being made.
pub(super) async fn finish(
    driver: &Rc<Driver>,
    arena: &Arena,
    plan: &Plan,
    found: &mut [Option<Chosen>],
) -> Result<(), Reason> {
    let there: Vec<&Superblock> = found.iter().flatten().map(|chosen| &chosen.superblock).collect();
    let Some(first) = there.first().map(|&first| first.clone()) else { return Ok(()) };
    let seen: BTreeSet<u32> = there.iter().map(|superblock| superblock.directory).collect();
    if first.directories != u32::from(plan.directories) || there.iter().any(|one| one.store != first.store) {
        return Ok(());
    }
    let each = first.shards.len() as u32;
    let mut missing = Vec::new();
    for (dir, chosen) in (0..plan.directories).map(DirId).zip(found.iter()) {
        let top = Top::read(driver, dir).await?;
        if top.foreign.is_some() {
            return Ok(());
        }
        if chosen.is_none() {
            let fits = |number: &u32| top.empty.iter().copied().eq(shards_of(*number, each));
            let number = (0..first.directories).filter(|number| !seen.contains(number)).find(fits);
            let Some(number) = number else { return Ok(()) };
            missing.push((dir, number));
        }
    }
    for (dir, directory) in missing {
        let shards = shards_of(directory, each).collect();
        let superblock = Superblock { directory, shards, sequence: 1, ..first.clone() };
        write_new(driver, arena, dir, &superblock).await?;
        if let Some(chosen) = found.get_mut(usize::from(dir.0)) {
            *chosen = read(driver, arena, dir).await?;
        }
    }
    Ok(())
}

fn encoded(superblock: &Superblock, slot: u32) -> Result<Vec<u8>, Reason> {
    let image = superblock.encode(slot);
    image.map_err(|_| Reason::Config("too many shards or directories".to_owned()))
}

async fn write_new(
    driver: &Rc<Driver>,
    arena: &Arena,
    dir: DirId,
    superblock: &Superblock,
) -> Result<(), Reason> {
    let refuse = |error: IoError| refused(&error);
    let mode = OpenMode { write: true, create: true, direct: true };
    let file = driver.open(superblock_name(dir), mode).await.map_err(refuse)?;
    driver.meta(MetaOp::Allocate { file, offset: 0, len: FILE_BYTES as u64 }).await.map_err(refuse)?;
    for slot in 0..2u32 {
        let image = encoded(superblock, slot)?;
        let mut buf = arena.take(PAGE).await.ok_or(Reason::Bug("an arena smaller than a page"))?;
        buf.copy_in(0, &image);
        let at = u64::from(slot) * PAGE as u64;
        driver.write(Class::Put, file, at, buf, true).await.map_err(refuse)?;
    }
    driver.meta(MetaOp::SyncDir { name: Name { dir, path: "".into() } }).await.map_err(refuse)?;
    let _ = driver.meta(MetaOp::Close { file }).await;
    Ok(())
}
