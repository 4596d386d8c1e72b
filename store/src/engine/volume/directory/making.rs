//! Making a store, and finishing one whose making a power cut stopped.
//!
//! In this order, each step durable in all directories before the next: the folders of all shards, the superblocks one
//! after the other. So a store with a superblock has had all its folders, and a directory without a superblock whose
//! folders are empty has had nothing in it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvarts_layout::StoreId;
use kvarts_layout::format::members::{Members, Membership, Standing};
use kvarts_layout::format::names::shard_name;
use kvarts_layout::format::superblock::{Chosen, FILE_BYTES, Superblock};
use kvarts_layout::format::{PAGE, Secret, VERSION};

use super::{Found, Plan, Seen, Top, Way, refused, superblock_name};
use crate::driver::Driver;
use crate::engine::shared::Birth;
use crate::io::{MetaOp, OpenMode};
use kvarts_contract::error::{DirectoryCause, Reason};
use kvarts_contract::io_error::{DirId, IoError, Name};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy},
};

/// Makes a store where there is none.
pub(super) async fn make(way: &Way<'_>, plan: &Plan) -> Result<Found, Reason> {
    let superblocks = planned(plan, &**way.rt.clock(), &**way.rt.entropy());
    let first = superblocks.first().ok_or(Reason::Bug("the store has no directory"))?;
    for superblock in &superblocks {
        // Before anything is made: what cannot be encoded is a matter of the configuration.
        encoded(superblock, 0)?;
    }
    for (dir, superblock) in (0..plan.directories).map(DirId).zip(&superblocks) {
        make_folders(way.driver, dir, &superblock.shards).await?;
    }
    let mut written = BTreeMap::new();
    for (dir, superblock) in (0..plan.directories).map(DirId).zip(&superblocks) {
        written.insert(dir, write_new(way, dir, superblock).await?);
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
    let (out, behind) = (BTreeMap::new(), BTreeSet::new());
    Ok(Found { birth, shards, out, behind, superblocks: written, superblock_bytes, is_new: true })
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
        membership: Membership::default(),
    };
    (0..u32::from(plan.directories)).map(of).collect()
}

fn shards_of(directory: u32, each: u32) -> impl Iterator<Item = u32> {
    (0..each).map(move |shard| directory * each + shard)
}

/// Makes the folders of shards durable that are not there yet.
pub(super) async fn make_folders(driver: &Rc<Driver>, dir: DirId, shards: &[u32]) -> Result<(), Reason> {
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

/// Writes the superblocks that a crash kept from being written while the store was made, and says whether it did. Leaves
/// everything as it is if anything was ever stored, or if a directory without a superblock lacks the folders that came before it: then it
/// is not the one in which the store was being made.
pub(super) async fn finish(way: &Way<'_>, plan: &Plan, seen: &mut [Seen]) -> Result<bool, Reason> {
    let sound =
        |one: &Seen| if let Seen::Sound(chosen) = one { Some(chosen.superblock.clone()) } else { None };
    let there: Vec<Superblock> = seen.iter().filter_map(sound).collect();
    let Some(first) = there.first().cloned() else { return Ok(false) };
    let numbers: BTreeSet<u32> = there.iter().map(|superblock| superblock.directory).collect();
    let is_one = first.directories == u32::from(plan.directories)
        && there.iter().all(|one| one.store == first.store && one.membership == Membership::default())
        && seen.iter().all(|one| !matches!(one, Seen::Out(_)));
    if !is_one {
        return Ok(false);
    }
    let each = first.shards.len() as u32;
    let mut missing = Vec::new();
    for (dir, one) in (0..plan.directories).map(DirId).zip(seen.iter()) {
        let top = Top::read(way.driver, dir).await?;
        if top.foreign.is_some() {
            return Ok(false);
        }
        if matches!(one, Seen::Empty) {
            let fits = |number: &u32| top.empty.iter().copied().eq(shards_of(*number, each));
            let number = (0..first.directories).filter(|number| !numbers.contains(number)).find(fits);
            let Some(number) = number else { return Ok(false) };
            missing.push((dir, number));
        }
    }
    for (dir, directory) in missing {
        let shards = shards_of(directory, each).collect();
        let superblock = Superblock { directory, shards, sequence: 1, ..first.clone() };
        let written = write_new(way, dir, &superblock).await?;
        if let Some(one) = seen.get_mut(usize::from(dir.0)) {
            *one = Seen::Sound(Box::new(written));
        }
    }
    Ok(true)
}

/// Makes the empty directories that are to be replaced parts of the store. A crash in the middle leaves them as they were, or as
/// parts that know of nothing yet: the next start goes on.
pub(super) async fn replace(way: &Way<'_>, plan: &Plan, seen: &mut [Seen]) -> Result<(), Reason> {
    let refuse = |at: u16, why| Err(Reason::Directory(DirectoryCause::NotReplaced(at, why)));
    for (nth, &at) in plan.replace.iter().enumerate() {
        let found =
            |one: &Seen| if let Seen::Sound(chosen) = one { Some(chosen.superblock.clone()) } else { None };
        let states: Vec<Superblock> = seen.iter().filter_map(found).collect();
        let all = states.first().map_or(0, |first| first.directories);
        let members = Members::of(all, &states.iter().map(Superblock::member).collect::<Vec<_>>());
        let counts = |(state, standing): (&Superblock, &Standing)| {
            (*standing != Standing::Replaced).then(|| (state.directory, state.shards.clone()))
        };
        let here: BTreeMap<u32, Vec<u32>> =
            states.iter().zip(&members.standings).filter_map(counts).collect();
        let Some(first) = states.first() else { return refuse(at, "no directory of the store can be used") };
        let missing: Vec<u32> = (0..first.directories).filter(|number| !here.contains_key(number)).collect();
        if !matches!(seen.get(usize::from(at)), Some(Seen::Empty)) {
            return refuse(at, "the directory is not empty");
        }
        if !members.may_open() {
            return refuse(
                at,
                "fewer than half of the other directories can be used, so deleted blocks could come back",
            );
        }
        if missing.len() != plan.replace.len() - nth {
            return refuse(
                at,
                "other directories are missing too: replace all missing directories in one \
                command, or mount the others first",
            );
        }
        let number = missing.first().copied().unwrap_or(0);
        let Some(membership) = members.in_place_of(number) else {
            return refuse(
                at,
                "the missing directory cannot be replaced, because the store has too many directories: only \
                the first directories of a store can be replaced",
            );
        };
        let known: BTreeSet<u32> = here.into_values().flatten().collect();
        let lost: Vec<u32> = (0..first.shards_total).filter(|shard| !known.contains(shard)).collect();
        let each = lost.len().div_ceil(missing.len()).max(1);
        let shards: Vec<u32> = lost.chunks(each).next().unwrap_or_default().to_vec();
        make_folders(way.driver, DirId(at), &shards).await?;
        let superblock = Superblock { directory: number, shards, sequence: 1, membership, ..first.clone() };
        let written = write_new(way, DirId(at), &superblock).await?;
        if let Some(one) = seen.get_mut(usize::from(at)) {
            *one = Seen::Sound(Box::new(written));
        }
    }
    Ok(())
}

pub(super) fn encoded(superblock: &Superblock, slot: u32) -> Result<Vec<u8>, Reason> {
    let image = superblock.encode(slot);
    image.map_err(|_| Reason::Config("the store has too many shards or directories".to_owned()))
}

/// Writes the superblock of a directory that has none, and gives what is there then.
pub(super) async fn write_new(way: &Way<'_>, dir: DirId, superblock: &Superblock) -> Result<Chosen, Reason> {
    let (driver, refuse) = (way.driver, |error: IoError| refused(&error));
    let mode = OpenMode { write: true, create: true, direct: true };
    let file = driver.open(superblock_name(dir), mode).await.map_err(refuse)?;
    driver.meta(MetaOp::Allocate { file, offset: 0, len: FILE_BYTES as u64 }).await.map_err(refuse)?;
    for slot in 0..2u32 {
        let image = encoded(superblock, slot)?;
        let page = way.arena(dir).take(PAGE).await;
        let mut page = page.ok_or(Reason::Bug("the memory of the executor is smaller than a page"))?;
        page.copy_in(0, &image);
        let at = u64::from(slot) * PAGE as u64;
        driver.write(Class::Put, file, at, page, true).await.map_err(refuse)?;
    }
    driver.meta(MetaOp::SyncDir { name: Name { dir, path: "".into() } }).await.map_err(refuse)?;
    let _ = driver.meta(MetaOp::Close { file }).await;
    Ok(Chosen { superblock: superblock.clone(), slot: 1, other: Ok(superblock.sequence) })
}
