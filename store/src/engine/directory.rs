//! The directories of a store: making them, and finding out that they belong together.
//!
//! A directory is a store's when its superblock says so. It is written slot by slot, each slot durable before the
//! other is touched, so a crash leaves at least one good one. A directory that holds anything else is never made
//! into a store. A store of several directories that a crash left half made is finished: shards are made after all
//! superblocks, so where there is none yet nothing can be lost.

use std::rc::Rc;

use kvarts_layout::StoreId;
use kvarts_layout::format::superblock::{Chosen, FILE_BYTES, PairUnsound, Superblock};
use kvarts_layout::format::{self, PAGE, Secret, Unsound, VERSION};

use super::shared::Birth;
use crate::error::Reason;
use crate::io::{Arena, Buf, DirEntry, DirId, Driver, IoError, IoErrorKind, MetaOp, Name, OpenMode};
use crate::rt::{Class, Clock, Entropy};

/// What a store is made with where there is none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) directories: u16,
    pub(crate) shards_per_directory: u32,
    pub(crate) segment_bytes: u64,
    pub(crate) budget: u64,
    pub(crate) record_bytes_max: u64,
}

/// A store as its superblocks describe it.
pub(crate) struct Found {
    pub(crate) birth: Birth,
    /// Every shard with its directory, by shard.
    pub(crate) shards: Vec<(u32, DirId)>,
    /// Bytes of the superblocks on disk.
    pub(crate) superblock_bytes: u64,
}

fn superblock_name(dir: DirId) -> Name {
    Name { dir, path: format::names::SUPERBLOCK.into() }
}

/// What the caller is told about a directory that cannot be used.
pub(crate) fn refused(error: &IoError) -> Reason {
    match error.kind {
        IoErrorKind::NoSpace => Reason::NoSpace,
        IoErrorKind::ReadOnlyFs => Reason::Directory(format!("{error}: the file system takes no writes")),
        IoErrorKind::Permission => {
            Reason::Directory(format!("{error}: give this user the right to write there"))
        }
        _ => Reason::Directory(error.to_string()),
    }
}

/// Reads the superblocks of all directories, or makes the store if none of them has one.
pub(crate) async fn open(
    driver: &Rc<Driver>,
    arena: &Arena,
    plan: &Plan,
    clock: &dyn Clock,
    entropy: &dyn Entropy,
) -> Result<Found, Reason> {
    let mut found = Vec::new();
    for dir in (0..plan.directories).map(DirId) {
        found.push(read(driver, arena, dir).await?);
    }
    if found.iter().all(Option::is_none) {
        return make(driver, arena, plan, clock, entropy).await;
    }
    if found.iter().any(Option::is_none) {
        finish(driver, arena, plan, &mut found).await?;
    }
    join(plan, found)
}

/// Writes the superblocks that a crash kept from being written while the store was made. Leaves everything as it is if
/// any directory has more than a superblock: then the store was in use, and the empty ones are not what it lost.
async fn finish(
    driver: &Rc<Driver>,
    arena: &Arena,
    plan: &Plan,
    found: &mut [Option<Chosen>],
) -> Result<(), Reason> {
    let there: Vec<&Superblock> = found.iter().flatten().map(|chosen| &chosen.superblock).collect();
    let Some(first) = there.first().map(|&first| first.clone()) else { return Ok(()) };
    let seen: Vec<u32> = there.iter().map(|superblock| superblock.directory).collect();
    if first.directories != u32::from(plan.directories) || there.iter().any(|one| one.store != first.store) {
        return Ok(());
    }
    for dir in (0..plan.directories).map(DirId) {
        if foreign(driver, dir).await?.is_some() {
            return Ok(());
        }
    }
    let each = first.shards.len() as u32;
    let missing: Vec<u32> = (0..first.directories).filter(|number| !seen.contains(number)).collect();
    let empty = (0u16..).zip(found.iter_mut()).filter(|(_, chosen)| chosen.is_none());
    for ((at, chosen), directory) in empty.zip(missing) {
        let shards = (0..each).map(|shard| directory * each + shard).collect();
        let superblock = Superblock { directory, shards, sequence: 1, ..first.clone() };
        write_new(driver, arena, DirId(at), &superblock).await?;
        *chosen = read(driver, arena, DirId(at)).await?;
    }
    Ok(())
}

/// The superblock of a directory, `None` if the directory is empty.
async fn read(driver: &Rc<Driver>, arena: &Arena, dir: DirId) -> Result<Option<Chosen>, Reason> {
    let mode = OpenMode { write: true, create: false, direct: true };
    let file = match driver.open(superblock_name(dir), mode).await {
        Ok(file) => file,
        Err(error) if error.kind == IoErrorKind::NotFound => {
            return match foreign(driver, dir).await? {
                None => Ok(None),
                Some(name) => Err(Reason::Directory(format!(
                    "directory {} is not empty ({name} is in it) and holds no store: use an empty directory",
                    dir.0
                ))),
            };
        }
        Err(error) => return Err(refused(&error)),
    };
    let buf = arena.take(FILE_BYTES).await.ok_or(Reason::Bug("an arena smaller than a superblock"))?;
    let whole = driver.read(Class::Background, file, 0, buf.clone()).await;
    let bytes = match whole {
        Ok(()) => buf.to_vec(),
        // A crash while the store was made may have left less: nothing was acknowledged then.
        Err(error) if error.kind == IoErrorKind::Eof => return unmade(driver, dir).await,
        Err(error) => return Err(refused(&error)),
    };
    let _ = driver.meta(MetaOp::Close { file }).await;
    match Superblock::decode_pair(&bytes, None) {
        Ok(chosen) => Ok(Some(chosen)),
        Err(unsound) if is_blank(&unsound) => unmade(driver, dir).await,
        Err(unsound) => judge(dir, unsound),
    }
}

/// The name of something in the directory that stands in the way of making a store there.
async fn foreign(driver: &Rc<Driver>, dir: DirId) -> Result<Option<String>, Reason> {
    let entries = driver.list(Name { dir, path: "".into() }).await.map_err(|error| refused(&error))?;
    let superblock = superblock_name(dir).path;
    let name = |entry: &DirEntry| {
        (!is_harmless(&entry.name) && *entry.name != *superblock).then(|| entry.name.to_string())
    };
    Ok(entries.iter().find_map(name))
}

/// A superblock without content: what a crash leaves of a store that was being made. Shards are made after their
/// superblocks are durable, so with anything beside it the superblock is lost, and nothing is made in its place.
async fn unmade(driver: &Rc<Driver>, dir: DirId) -> Result<Option<Chosen>, Reason> {
    match foreign(driver, dir).await? {
        None => Ok(None),
        Some(name) => Err(Reason::Directory(format!(
            "directory {} has lost its superblock ({name} is beside an empty one): run kvarts fsck --repair",
            dir.0
        ))),
    }
}

fn is_blank(unsound: &PairUnsound) -> bool {
    matches!(unsound, PairUnsound::Both(first, second)
        if [first, second].iter().all(|slot| matches!(slot, Unsound::Empty)))
}

/// What may stand in a directory in which a store is made: a lock, file-system housekeeping, and what a crash
/// left of an earlier attempt.
fn is_harmless(name: &str) -> bool {
    name == "lock" || name == "lost+found"
}

fn judge(dir: DirId, unsound: PairUnsound) -> Result<Option<Chosen>, Reason> {
    let PairUnsound::Both(first, second) = &unsound else {
        return Err(Reason::Directory(format!(
            "directory {}: the two superblock slots contradict each other: run kvarts fsck",
            dir.0
        )));
    };
    let slots = [first, second];
    let of_another_version = slots.iter().find_map(|slot| match slot {
        Unsound::Newer { version } => Some(Reason::Newer { found: *version }),
        Unsound::Older { version } => Some(Reason::Older { found: *version }),
        _ => None,
    });
    if let Some(reason) = of_another_version {
        return Err(reason);
    }
    Err(Reason::Directory(format!(
        "directory {}: no superblock slot is sound ({first}; {second}): run kvarts fsck",
        dir.0
    )))
}

/// All superblocks are of one store, and none is missing.
fn join(plan: &Plan, found: Vec<Option<Chosen>>) -> Result<Found, Reason> {
    let mixed = |what: String| Err(Reason::MixedDirectories(what));
    let mut shards = Vec::new();
    let mut first: Option<Superblock> = None;
    let mut seen = std::collections::BTreeSet::new();
    for (at, chosen) in (0u16..).zip(found) {
        let Some(chosen) = chosen else {
            return mixed(format!("directory {at} is empty while others hold a store: leave it out"));
        };
        let superblock = chosen.superblock;
        if let Some(first) = &first
            && first.store != superblock.store
        {
            return mixed(format!(
                "directory {at} belongs to store {}, the first to {}",
                superblock.store, first.store
            ));
        }
        if !seen.insert(superblock.directory) {
            return mixed(format!("directory {at} was given twice, or is a copy of another"));
        }
        shards.extend(superblock.shards.iter().map(|&shard| (shard, DirId(at))));
        first.get_or_insert(superblock);
    }
    let Some(first) = first else { return mixed("no directory".to_owned()) };
    if seen.len() != first.directories as usize {
        return mixed(format!("the store has {} directories, {} were given", first.directories, seen.len()));
    }
    shards.sort_unstable();
    let birth = Birth {
        store: first.store,
        secret: first.secret,
        segment_bytes: first.segment_bytes,
        created_ms: first.created_ms,
        budget: plan.budget,
        record_bytes_max: plan.record_bytes_max.min(first.segment_bytes / 4),
        shards: shards.len() as u32,
    };
    Ok(Found { birth, shards, superblock_bytes: seen.len() as u64 * FILE_BYTES as u64 })
}

async fn make(
    driver: &Rc<Driver>,
    arena: &Arena,
    plan: &Plan,
    clock: &dyn Clock,
    entropy: &dyn Entropy,
) -> Result<Found, Reason> {
    let (mut store, mut secret) = (StoreId::default(), [0; 32]);
    entropy.fill(&mut store.0);
    entropy.fill(&mut secret);
    let created_ms = clock.unix_millis();
    let each = plan.shards_per_directory;
    let mut shards = Vec::new();
    for dir in 0..plan.directories {
        let here: Vec<u32> = (0..each).map(|shard| u32::from(dir) * each + shard).collect();
        shards.extend(here.iter().map(|&shard| (shard, DirId(dir))));
        let superblock = Superblock {
            store,
            directory: u32::from(dir),
            sequence: 1,
            secret: Secret::new(secret),
            created_ms,
            segment_bytes: plan.segment_bytes,
            min_reader: VERSION,
            clean: false,
            directories: u32::from(plan.directories),
            shards_total: u32::from(plan.directories) * each,
            shards: here,
        };
        write_new(driver, arena, DirId(dir), &superblock).await?;
    }
    let birth = Birth {
        store,
        secret: Secret::new(secret),
        segment_bytes: plan.segment_bytes,
        created_ms,
        budget: plan.budget,
        record_bytes_max: plan.record_bytes_max.min(plan.segment_bytes / 4),
        shards: shards.len() as u32,
    };
    let superblock_bytes = u64::from(plan.directories) * FILE_BYTES as u64;
    Ok(Found { birth, shards, superblock_bytes })
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
        let image = superblock
            .encode(slot)
            .map_err(|_| Reason::Config("too many shards or directories".to_owned()))?;
        let buf: Buf = arena.take(PAGE).await.ok_or(Reason::Bug("an arena smaller than a page"))?;
        buf.copy_in(0, &image);
        let at = u64::from(slot) * PAGE as u64;
        driver.write(Class::Put, file, at, buf, true).await.map_err(refuse)?;
    }
    driver.meta(MetaOp::SyncDir { name: Name { dir, path: "".into() } }).await.map_err(refuse)?;
    let _ = driver.meta(MetaOp::Close { file }).await;
    Ok(())
}
