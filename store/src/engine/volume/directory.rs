//! The directories of a store: making them, and finding out that they belong together.
//!
//! A directory is a store's when its superblock says so. It is written slot by slot, each slot durable before the
//! other is touched, so a crash leaves at least one good one. The folders of all shards are durable before the first
//! superblock is: a store without one of them has lost it, and none is ever made in its place here. A directory that
//! holds anything else is never made into a store.

mod making;

use std::collections::BTreeSet;
use std::rc::Rc;

use kvarts_layout::format::names::FileName;
use kvarts_layout::format::superblock::{Chosen, FILE_BYTES, PairUnsound, Superblock};
use kvarts_layout::format::{self, Unsound};

use crate::driver::Driver;
use crate::engine::shared::Birth;
use crate::io::{EntryKind, MetaOp, OpenMode};
use kvarts_contract::error::{DirectoryCause, Reason, SpaceCause};
use kvarts_contract::{
    buffers::Arena,
    io_error::{DirId, IoError, IoErrorKind, Name},
};
use kvarts_contract::{
    class::Class,
    clock::{Clock, Entropy},
};

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
    /// Whether it was made, or its making finished, just now: nothing was ever stored in it.
    pub(crate) is_new: bool,
}

fn superblock_name(dir: DirId) -> Name {
    Name { dir, path: format::names::SUPERBLOCK.into() }
}

/// What the caller is told about a directory that cannot be used.
pub(crate) fn refused(error: &IoError) -> Reason {
    match error.kind {
        IoErrorKind::NoSpace => Reason::NoSpace(SpaceCause::Disk),
        _ => Reason::Directory(DirectoryCause::Io(Box::new(error.clone()))),
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
        return making::make(driver, arena, plan, clock, entropy).await;
    }
    let is_new = found.iter().any(Option::is_none);
    if is_new {
        making::finish(driver, arena, plan, &mut found).await?;
    }
    join(plan, found).map(|found| Found { is_new, ..found })
}

/// The superblock of a directory, `None` if nothing was ever stored in it.
async fn read(driver: &Rc<Driver>, arena: &Arena, dir: DirId) -> Result<Option<Chosen>, Reason> {
    let mode = OpenMode { write: true, create: false, direct: true };
    let file = match driver.open(superblock_name(dir), mode).await {
        Ok(file) => file,
        Err(error) if error.kind == IoErrorKind::NotFound => {
            refuse_unfinished(driver, dir).await?;
            return match Top::read(driver, dir).await?.foreign {
                None => Ok(None),
                Some(name) => Err(Reason::Directory(DirectoryCause::NotEmpty(dir.0, name))),
            };
        }
        Err(error) => return Err(refused(&error)),
    };
    let buf = arena.take(FILE_BYTES).await.ok_or(Reason::Bug("an arena smaller than a superblock"))?;
    let whole = driver.read_into(Class::Background, file, 0, buf).await;
    let bytes = match whole {
        Ok(buf) => buf.to_vec(),
        // A crash while the store was made may have left less: nothing was acknowledged then.
        Err(error) if error.kind == IoErrorKind::Eof => return unmade(driver, dir).await,
        Err(error) => return Err(refused(&error)),
    };
    let _ = driver.meta(MetaOp::Close { file }).await;
    match Superblock::decode_pair(&bytes, None) {
        Ok(chosen) => Ok(Some(chosen)),
        Err(unsound) if is_blank(&unsound) => unmade(driver, dir).await,
        Err(unsound) => Err(judge(dir, unsound)),
    }
}

/// What a directory holds beside its superblock.
struct Top {
    /// Folders of shards in which there is nothing.
    empty: BTreeSet<u32>,
    /// The name of something that stands in the way of making a store there: a folder of a shard only if it is not empty.
    foreign: Option<String>,
}

impl Top {
    async fn read(driver: &Rc<Driver>, dir: DirId) -> Result<Self, Reason> {
        let list = async |path: Box<str>| {
            let entries = driver.list(Name { dir, path }).await;
            entries.map_err(|error| refused(&error))
        };
        let (superblock, mut top) =
            (superblock_name(dir).path, Self { empty: BTreeSet::new(), foreign: None });
        for entry in list("".into()).await? {
            if is_harmless(&entry.name) || entry.name == superblock {
                continue;
            }
            match (FileName::parse(&entry.name), entry.kind) {
                (Some(FileName::Shard(shard)), EntryKind::Dir)
                    if list(entry.name.clone()).await?.is_empty() =>
                {
                    top.empty.insert(shard);
                }
                _ => drop(top.foreign.get_or_insert(entry.name.into())),
            }
        }
        Ok(top)
    }
}

/// Refuses a directory without a superblock into which `kvarts compact --to` was writing when it was interrupted. Such a
/// copy has one checkpoint: with a second one it was a store, and was used.
async fn refuse_unfinished(driver: &Rc<Driver>, dir: DirId) -> Result<(), Reason> {
    let entries = driver.list(Name { dir, path: "".into() }).await.map_err(|error| refused(&error))?;
    if !entries.iter().any(|entry| *entry.name == *format::names::UNFINISHED_COPY) {
        return Ok(());
    }
    let is_shard = |name: &str| matches!(FileName::parse(name), Some(FileName::Shard(_)));
    for shard in entries.iter().filter(|entry| is_shard(&entry.name)) {
        let files = driver.list(Name { dir, path: shard.name.clone() }).await;
        let files = files.map_err(|error| refused(&error))?;
        if files.iter().any(|file| FileName::parse(&file.name) == Some(FileName::Checkpoint(1))) {
            return Ok(());
        }
    }
    Err(Reason::Directory(DirectoryCause::UnfinishedCopy(dir.0)))
}

/// A superblock without content: what a crash leaves of a store that was being made. Nothing is in the folders of its
/// shards before their superblocks are durable, so with anything there the superblock is lost, and none is made in its
/// place.
async fn unmade(driver: &Rc<Driver>, dir: DirId) -> Result<Option<Chosen>, Reason> {
    match Top::read(driver, dir).await?.foreign {
        None => Ok(None),
        Some(name) => Err(Reason::Directory(DirectoryCause::LostSuperblock(dir.0, name))),
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

fn judge(dir: DirId, unsound: PairUnsound) -> Reason {
    if let PairUnsound::Both(first, second) = &unsound {
        for slot in [first, second] {
            match slot {
                Unsound::Newer { version } => return Reason::Newer { found: *version },
                Unsound::Older { version } => return Reason::Older { found: *version },
                _ => {}
            }
        }
    }
    Reason::Directory(DirectoryCause::Superblock(dir.0, Box::new(unsound)))
}

/// All superblocks are of one store, and none is missing.
fn join(plan: &Plan, found: Vec<Option<Chosen>>) -> Result<Found, Reason> {
    let mixed = |cause| Err(Reason::Directory(cause));
    let mut shards = Vec::new();
    let mut first: Option<Superblock> = None;
    let mut seen = std::collections::BTreeSet::new();
    for (at, chosen) in (0u16..).zip(found) {
        let Some(chosen) = chosen else {
            return mixed(DirectoryCause::Extra(at));
        };
        let superblock = chosen.superblock;
        if let Some(first) = &first
            && first.store != superblock.store
        {
            let (store, first) = (superblock.store, first.store);
            return mixed(DirectoryCause::Foreign { directory: at, store, first });
        }
        if !seen.insert(superblock.directory) {
            return mixed(DirectoryCause::Twice(at));
        }
        shards.extend(superblock.shards.iter().map(|&shard| (shard, DirId(at))));
        first.get_or_insert(superblock);
    }
    let Some(first) = first else { return Err(Reason::Bug("a store of no directory")) };
    if seen.len() != first.directories as usize {
        return mixed(DirectoryCause::Count { expected: first.directories, given: seen.len() });
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
    Ok(Found { birth, shards, superblock_bytes: seen.len() as u64 * FILE_BYTES as u64, is_new: false })
}
