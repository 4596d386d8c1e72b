//! The directories of a store: making them, and finding out that they belong together.
//!
//! A directory is a store's when its superblock says so. It is written slot by slot, each slot durable before the
//! other is touched, so a crash leaves at least one good one. The folders of all shards are durable before the first
//! superblock is: a store without one of them has lost it, and none is ever made in its place here. A directory that
//! holds anything else is never made into a store.

mod making;
pub(crate) mod terms;

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use kvarts_layout::format::members::{Members, Standing};
use kvarts_layout::format::names::FileName;
use kvarts_layout::format::superblock::{Chosen, FILE_BYTES, PairUnsound, Superblock};
use kvarts_layout::format::{self, Unsound};

use crate::driver::Driver;
use crate::engine::shared::{Birth, Shared};
use crate::engine::tasks::notify::with_deadline;
use crate::io::{EntryKind, MetaOp, OpenMode};
use crate::rt::Runtime;
use kvarts_contract::class::Class;
use kvarts_contract::error::{DirectoryCause, Reason, SpaceCause};
use kvarts_contract::{
    buffers::Arena,
    io_error::{DirId, IoError, IoErrorKind, Name},
};

/// What a store is opened with, and made with where there is none.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) directories: u16,
    pub(crate) absent: BTreeMap<u16, String>,
    pub(crate) replace: BTreeSet<u16>,
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
    /// Why those directories are out that cannot be used.
    pub(crate) out: BTreeMap<DirId, String>,
    /// Those that lack what was deleted without them.
    pub(crate) behind: BTreeSet<DirId>,
    /// The superblocks of those that are not out.
    pub(crate) superblocks: BTreeMap<DirId, Chosen>,
    /// Bytes of the superblocks on disk.
    pub(crate) superblock_bytes: u64,
    /// Whether it was made, or its making finished, just now: nothing was ever stored in it.
    pub(crate) is_new: bool,
}

/// What is found in a directory.
enum Seen {
    Sound(Box<Chosen>),
    /// Nothing was ever stored in it.
    Empty,
    /// It cannot be used, and why.
    Out(Reason),
}

/// How long a disk may take to say what its directory holds.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

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

/// The way to the directories: of each its own memory.
pub(crate) struct Way<'a> {
    pub(crate) driver: &'a Rc<Driver>,
    pub(crate) arenas: &'a [Arena],
    pub(crate) rt: &'a dyn Runtime,
}

impl Way<'_> {
    /// The staging memory of a directory.
    fn arena(&self, dir: DirId) -> &Arena {
        // There is a part for each directory, and one at least.
        &self.arenas[usize::from(dir.0) % self.arenas.len()]
    }
}

/// Reads the superblocks of all directories, or makes the store if none of them has one. A directory of a store that cannot be used
/// is out.
pub(crate) async fn open(way: &Way<'_>, plan: &Plan) -> Result<Found, Reason> {
    let mut seen = read_all(way, plan).await?;
    if seen.iter().all(|one| matches!(one, Seen::Empty)) {
        return making::make(way, plan).await;
    }
    if !seen.iter().any(|one| matches!(one, Seen::Sound(_))) {
        let first = seen.into_iter().find_map(|one| if let Seen::Out(why) = one { Some(why) } else { None });
        return Err(first
            .unwrap_or(Reason::Bug("a directory has none of the three states: empty, in use, out of use")));
    }
    let is_new =
        seen.iter().any(|one| matches!(one, Seen::Empty)) && making::finish(way, plan, &mut seen).await?;
    making::replace(way, plan, &mut seen).await?;
    join(plan, seen).map(|found| Found { is_new, ..found })
}

/// Looks into all directories at once: one that does not answer costs no more than [`ANSWER_WITHIN`].
async fn read_all(way: &Way<'_>, plan: &Plan) -> Result<Vec<Seen>, Reason> {
    let until = way.rt.clock().now().plus(ANSWER_WITHIN);
    let look = async |dir: DirId| {
        if let Some(why) = plan.absent.get(&dir.0) {
            return Err(Reason::Directory(DirectoryCause::Unusable(why.clone())));
        }
        let deadline = Some(way.rt.sleep_until(until));
        let silent = || Err(Reason::Directory(DirectoryCause::Silent(dir.0)));
        let read = read(way.driver, way.arena(dir), dir);
        with_deadline(pin!(read), deadline).await.unwrap_or_else(silent)
    };
    let mut asked: Vec<_> = (0..plan.directories).map(|dir| Box::pin(look(DirId(dir)))).collect();
    let mut answers: Vec<Option<Result<Option<Chosen>, Reason>>> = asked.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (asked, answer) in asked.iter_mut().zip(&mut answers).filter(|(_, answer)| answer.is_none()) {
            if let Poll::Ready(ready) = asked.as_mut().poll(context) {
                *answer = Some(ready);
            }
        }
        if answers.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    let seen = answers.into_iter().flatten().map(|answer| match answer {
        Ok(Some(chosen)) => Ok(Seen::Sound(Box::new(chosen))),
        Ok(None) => Ok(Seen::Empty),
        Err(why) if is_lost(&why) => Ok(Seen::Out(why)),
        Err(why) => Err(why),
    });
    seen.collect()
}

/// Whether a directory of which this is said may be one of the store all the same. Anything else was given by mistake, or is not the
/// disk's and passes: then another start does better.
pub(crate) fn is_lost(why: &Reason) -> bool {
    if matches!(why, Reason::Directory(DirectoryCause::Io(error)) if error.kind == IoErrorKind::Passing) {
        return false;
    }
    use DirectoryCause::{Io, LostShard, LostSuperblock, Silent, Superblock, Unusable};
    matches!(
        why,
        Reason::Directory(
            Io(_) | Unusable(_) | Silent(_) | LostSuperblock(..) | LostShard(..) | Superblock(..)
        )
    )
}

/// The superblock of a directory of an open store, beside those of the directories in use: an error if it is another's, was replaced, has
/// other shards than this process took for its own, or cannot be written again.
pub(crate) async fn look_again(way: &Way<'_>, shared: &Shared, dir: DirId) -> Result<Chosen, Reason> {
    let unusable = |why: &str| Reason::Directory(DirectoryCause::Unusable(why.to_owned()));
    let deadline = Some(way.rt.sleep_until(way.rt.clock().now().plus(ANSWER_WITHIN)));
    let reading = read(way.driver, way.arena(dir), dir);
    let silent = || Err(Reason::Directory(DirectoryCause::Silent(dir.0)));
    let read = with_deadline(pin!(reading), deadline).await.unwrap_or_else(silent)?;
    let found =
        read.ok_or_else(|| unusable("the directory is empty: mount its disk, or start with --replace"))?;
    let (mut superblocks, _) = shared.directories.superblocks();
    superblocks.insert(dir, found.clone());
    let members = members_of(&superblocks)?;
    let standing = superblocks.keys().zip(&members.standings).find(|(at, _)| **at == dir);
    if standing.is_none_or(|(_, standing)| *standing == Standing::Replaced) {
        return Err(Reason::Directory(DirectoryCause::Replaced(dir.0)));
    }
    let expected = shared.directories.shards_of(dir);
    if !found.superblock.shards.iter().eq(expected.iter().map(|(shard, _)| shard)) {
        return Err(unusable(
            "the shards in the directory differ from the shards assigned to the directory: restart the server",
        ));
    }
    terms::write_next(way, dir, &found, found.superblock.membership).await
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
    let buf = arena.take(FILE_BYTES).await.ok_or(Reason::Bug(
        "the memory of the executor is smaller than a \
        superblock",
    ))?;
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

/// All superblocks are of one store, and enough of its directories are there.
fn join(plan: &Plan, seen: Vec<Seen>) -> Result<Found, Reason> {
    let (mut superblocks, mut out) = (BTreeMap::new(), BTreeMap::new());
    for (dir, seen) in (0..).map(DirId).zip(seen) {
        match seen {
            Seen::Sound(chosen) => drop(superblocks.insert(dir, *chosen)),
            Seen::Empty => drop(out.insert(dir, Reason::Directory(DirectoryCause::Extra(dir.0)))),
            Seen::Out(why) => drop(out.insert(dir, why)),
        }
    }
    let first = superblocks.values().next().map(|chosen: &Chosen| chosen.superblock.clone());
    let first = first.ok_or(Reason::Bug("the store has no directory"))?;
    let members = members_of(&superblocks)?;
    if plan.directories != u16::try_from(first.directories).unwrap_or(u16::MAX) {
        let (expected, given) = (first.directories, usize::from(plan.directories));
        return Err(Reason::Directory(DirectoryCause::Count { expected, given }));
    }
    let mut behind = BTreeSet::new();
    for (dir, standing) in superblocks.keys().copied().zip(&members.standings).collect::<Vec<_>>() {
        match standing {
            Standing::Current => {}
            Standing::Behind | Standing::New => drop(behind.insert(dir)),
            Standing::Replaced => {
                superblocks.remove(&dir);
                out.insert(dir, Reason::Directory(DirectoryCause::Replaced(dir.0)));
            }
        }
    }
    if !members.may_open() {
        let ((found, all), first) = (members.present(), out.values().next());
        let first = first.map_or_else(String::new, ToString::to_string);
        return Err(Reason::Directory(DirectoryCause::TooFew { found, all, first }));
    }
    let shards = shards(&first, &superblocks, &out);
    let birth = Birth {
        store: first.store,
        secret: first.secret,
        segment_bytes: first.segment_bytes,
        created_ms: first.created_ms,
        budget: plan.budget,
        record_bytes_max: plan.record_bytes_max.min(first.segment_bytes / 4),
        shards: shards.len() as u32,
    };
    let superblock_bytes = u64::from(plan.directories) * FILE_BYTES as u64;
    let out = out.into_iter().map(|(dir, why)| (dir, why.to_string())).collect();
    Ok(Found { birth, shards, out, behind, superblocks, superblock_bytes, is_new: false })
}

/// What the directories are to one store; refused if they are not of one, or one of them twice.
fn members_of(superblocks: &BTreeMap<DirId, Chosen>) -> Result<Members, Reason> {
    let mixed = |cause| Err(Reason::Directory(cause));
    let states: Vec<&Superblock> = superblocks.values().map(|chosen| &chosen.superblock).collect();
    for ((dir, _), state) in superblocks.iter().zip(&states) {
        if let Some(first) = states.first().filter(|first| first.store != state.store) {
            let (store, first) = (state.store, first.store);
            return mixed(DirectoryCause::Foreign { directory: dir.0, store, first });
        }
    }
    let all = states.first().map_or(0, |first| first.directories);
    let members = Members::of(all, &states.iter().map(|state| state.member()).collect::<Vec<_>>());
    let mut numbers = BTreeSet::new();
    for ((dir, standing), state) in superblocks.keys().zip(&members.standings).zip(&states) {
        if *standing != Standing::Replaced && !numbers.insert(state.directory) {
            return mixed(DirectoryCause::Twice(dir.0));
        }
    }
    Ok(members)
}

/// The directory of each shard. Those that no superblock has belong to what is out, as many to each.
fn shards(
    first: &Superblock,
    superblocks: &BTreeMap<DirId, Chosen>,
    out: &BTreeMap<DirId, Reason>,
) -> Vec<(u32, DirId)> {
    let of = |(dir, chosen): (&DirId, &Chosen)| {
        chosen.superblock.shards.iter().map(|&shard| (shard, *dir)).collect::<Vec<_>>()
    };
    let mut shards: BTreeMap<u32, DirId> = superblocks.iter().flat_map(of).collect();
    let missing: Vec<u32> = (0..first.shards_total).filter(|shard| !shards.contains_key(shard)).collect();
    let each = missing.len().div_ceil(out.len().max(1)).max(1);
    for (some, dir) in missing.chunks(each).zip(out.keys()) {
        shards.extend(some.iter().map(|shard| (*shard, *dir)));
    }
    shards.into_iter().collect()
}
