//! The shape of a whole store: its directories, which shards lie in which, which files each has.
//!
//! Nothing of a file's content is read here but superblocks, and, where those are lost, segment headers: they repeat
//! the store's id and secret.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use kvarts_layout::format::members::{Members, Standing};
use kvarts_layout::format::names::{FileName, UNFINISHED_COPY, segment_name, shard_name};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::superblock::{Chosen, Superblock};
use kvarts_layout::format::{PAGE, PAGE_BYTES};

use crate::disk::{Disk, Node, NodeKind};
use crate::findings::{self, Finding, Findings, Place};
use crate::segment::Keyring;
use crate::superblock::{self, Seen};
use crate::window::{Tally, Window};

/// Where repair puts what it sets aside; nothing reads it.
pub const QUARANTINE: &str = "quarantine";
/// Names beside the format's that belong in a store's directory.
const HARMLESS: [&str; 8] = [
    LOCK,
    "lost+found",
    QUARANTINE,
    UNFINISHED_COPY,
    "cluster-starts",
    "cluster-starts.new",
    "cluster-deletes",
    "cluster-deletes.new",
];
/// The local socket of a server that has the store open, or had.
const SOCKET: &str = "kvarts.sock";
/// The file that a store in use holds a lock on. It must be a plain file: otherwise use cannot be seen.
const LOCK: &str = "lock";
/// Names of stray files that a report shows.
const STRAYS_SHOWN: usize = 3;
/// Segments of a shard that are asked for the store's secret when the superblock is lost.
const VOTERS: usize = 64;

/// Why a check cannot be made at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CannotRun {
    /// There is no store here.
    NoStore(String),
    /// A copy of a store was being made here and was interrupted.
    Unfinished(String),
    /// Only a newer program can read it.
    Newer(u16),
    /// It was written before the format was frozen.
    Older(u16),
    /// The directories do not belong together.
    Mixed(String),
    /// The operating system refuses.
    Refused(String),
}

impl CannotRun {
    /// What it is: a name that stays.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::NoStore(_) => "no-store",
            Self::Unfinished(_) => "unfinished-copy",
            Self::Newer(_) => "newer-format",
            Self::Older(_) => "older-format",
            Self::Mixed(_) => "mixed-directories",
            Self::Refused(_) => "refused",
        }
    }

    /// What is the matter.
    pub fn what(&self) -> String {
        match self {
            Self::NoStore(directory) => format!("the directory {directory} has no store"),
            Self::Unfinished(directory) => {
                format!(
                    "the directory {directory} has an unfinished copy of a store, because `kvarts compact \
                    --to` was interrupted: run the command again, or delete the directory"
                )
            }
            Self::Newer(version) => format!(
                "the store has format version {version}, which this program does \
                not support"
            ),
            Self::Older(version) => {
                format!("the store has format version {version}, from before the format was frozen")
            }
            Self::Mixed(what) => format!("the directories do not belong to one store: {what}"),
            Self::Refused(what) => what.clone(),
        }
    }

    /// What to do about it; may be empty.
    pub const fn advice(&self) -> &'static str {
        match self {
            Self::NoStore(_) => "use the directory of `kvarts serve --dir`",
            Self::Unfinished(_) => "",
            Self::Newer(_) => "check the store with a newer kvarts",
            Self::Older(_) => "create a new store",
            Self::Mixed(_) => "give the directories of one store, each once",
            Self::Refused(_) => "",
        }
    }
}

impl fmt::Display for CannotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what())?;
        if self.advice().is_empty() { Ok(()) } else { write!(f, ": {}", self.advice()) }
    }
}

impl std::error::Error for CannotRun {}

/// A shard and its files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shard {
    /// Its number.
    pub number: u32,
    /// Which of [`Store::directories`] it lies in.
    pub directory: usize,
    /// Whether its folder is there.
    pub is_there: bool,
    /// Its segments, ascending.
    pub segments: Vec<u32>,
}

/// One directory of a store.
#[derive(Clone, Debug)]
pub struct Directory {
    /// Its files.
    pub disk: Arc<dyn Disk>,
    /// Its superblock, if a slot of it is sound.
    pub superblock: Option<Chosen>,
}

/// A store as its directories show it.
#[derive(Clone, Debug)]
pub struct Store {
    /// What proves its structures.
    pub keyring: Keyring,
    /// Its directories, as they were given.
    pub directories: Vec<Directory>,
    /// Its shards, by number.
    pub shards: Vec<Shard>,
}

/// Finds out what the directories hold. `None`: making a store here was cut short, and nothing is in it.
pub fn survey(disks: &[Arc<dyn Disk>], into: &mut Findings) -> Result<Option<Store>, CannotRun> {
    let mut seen = Vec::new();
    for disk in disks {
        let superblock = superblock::read(&**disk, into);
        let top = Top::read(&**disk, into)?;
        seen.push((disk, superblock, top));
    }
    for (disk, superblock, top) in &seen {
        match superblock {
            Seen::Absent if top.unfinished => return Err(CannotRun::Unfinished(disk.name())),
            Seen::Newer(version) => return Err(CannotRun::Newer(*version)),
            Seen::Older(version) => return Err(CannotRun::Older(*version)),
            Seen::Unreadable(why) => {
                return Err(CannotRun::Refused(format!(
                    "{}: the superblock could not be opened: {why}",
                    disk.name()
                )));
            }
            _ => {}
        }
    }
    let mut keyring = agreed(&seen)?;
    if keyring.is_none() {
        keyring = seen.iter().find_map(|(disk, _, top)| by_segments(&***disk, &top.shards));
    }
    let Some(keyring) = keyring else {
        // With one that was begun, the others may not have been.
        let begun = seen.iter().any(|(_, superblock, _)| *superblock == Seen::Blank);
        let unmade = |(_, superblock, top): &&(&Arc<dyn Disk>, Seen, Top)| match superblock {
            Seen::Blank => top.is_unused,
            Seen::Absent => begun && top.is_unused,
            _ => false,
        };
        let Some((disk, ..)) = seen.iter().find(|one| !unmade(one)) else {
            for (disk, ..) in &seen {
                into.take(Finding::of(findings::STORE_HALF_MADE, disk.name()));
            }
            return Ok(None);
        };
        return Err(CannotRun::NoStore(disk.name()));
    };
    let mut store = Store { keyring, directories: Vec::new(), shards: Vec::new() };
    let half_made = is_half_made(&seen);
    let mut standings = members(&seen).standings.into_iter();
    for (at, (disk, superblock, top)) in seen.into_iter().enumerate() {
        let standing = matches!(superblock, Seen::Sound(_)).then(|| standings.next()).flatten();
        if let Some(label) = standing.and_then(what_is_out) {
            into.take(Finding::of(label, disk.name()));
        } else if half_made && matches!(superblock, Seen::Absent | Seen::Blank) && !top.shards.is_empty() {
            into.take(Finding::of(findings::STORE_HALF_MADE, disk.name()));
        } else {
            take_directory(&mut store, at, (&**disk, &superblock), &top, into)?;
        }
        let superblock = if let Seen::Sound(chosen) = superblock { Some(chosen) } else { None };
        store.directories.push(Directory { disk: Arc::clone(disk), superblock });
    }
    store.shards.sort_by_key(|shard| shard.number);
    about_whole(&store, into);
    Ok(Some(store))
}

/// What the sound superblocks say of terms, in their order.
fn members<'a>(seen: &'a [(&Arc<dyn Disk>, Seen, Top)]) -> Members {
    let sound = |one: &'a (&Arc<dyn Disk>, Seen, Top)| match &one.1 {
        Seen::Sound(chosen) => Some(&chosen.superblock),
        _ => None,
    };
    let all = seen.iter().find_map(sound).map_or(0, |first| first.directories);
    Members::of(all, &seen.iter().filter_map(sound).map(Superblock::member).collect::<Vec<_>>())
}

/// Why nothing in a directory counts, if so.
fn what_is_out(standing: Standing) -> Option<findings::Label> {
    match standing {
        Standing::Current => None,
        Standing::Behind | Standing::New => Some(findings::DIRECTORY_BEHIND),
        Standing::Replaced => Some(findings::DIRECTORY_REPLACED),
    }
}

/// Whether a store of as many directories as were given was being made: nothing is put into the folders of its shards
/// before all superblocks are there.
fn is_half_made(seen: &[(&Arc<dyn Disk>, Seen, Top)]) -> bool {
    seen.iter().all(|(_, _, top)| top.is_unused)
        && seen.iter().any(|(_, superblock, _)| match superblock {
            Seen::Sound(chosen) => chosen.superblock.directories as usize == seen.len(),
            _ => false,
        })
}

/// What the top of a directory holds.
#[derive(Debug, Default)]
struct Top {
    shards: BTreeSet<u32>,
    /// Whether nothing is in the folders of its shards.
    is_unused: bool,
    /// Whether a store was being copied into it.
    unfinished: bool,
}

impl Top {
    fn read(disk: &dyn Disk, into: &mut Findings) -> Result<Self, CannotRun> {
        let mut top = Self::default();
        let mut strays = Strays::default();
        let mut odd = Vec::new();
        let listed = disk.visit("", &mut |node: Node| match (FileName::parse(&node.name), node.kind) {
            (Some(FileName::Shard(shard)), NodeKind::Folder) => drop(top.shards.insert(shard)),
            (Some(FileName::Superblock), NodeKind::File) => {}
            (Some(FileName::Shard(_) | FileName::Superblock), kind) => odd.push((node.name, kind)),
            (_, kind) if node.name == LOCK && kind != NodeKind::File => odd.push((node.name, kind)),
            (_, NodeKind::Other) if node.name == SOCKET => {}
            _ if HARMLESS.contains(&node.name.as_str()) => top.unfinished |= node.name == UNFINISHED_COPY,
            _ => strays.take(node.name),
        });
        listed
            .map_err(|error| CannotRun::Refused(format!("{} could not be listed: {error}", disk.name())))?;
        for (name, kind) in odd {
            into.take(not_a_file(format!("{}/{name}", disk.name()), kind));
        }
        strays.report(disk.name(), into);
        top.is_unused = top.shards.iter().all(|shard| {
            let mut is_empty = true;
            // What cannot be listed may hold anything.
            disk.visit(&shard_name(*shard), &mut |_| is_empty = false).is_ok() && is_empty
        });
        // A copy has one checkpoint: with a second one it was a store, and was used.
        let is_used = |shard: &u32| disk.open(&crate::checkpoint::path(*shard, 1)).is_ok();
        top.unfinished &= !top.shards.iter().any(is_used);
        Ok(top)
    }
}

fn not_a_file(path: String, kind: NodeKind) -> Finding {
    let what = match kind {
        NodeKind::File => "a file",
        NodeKind::Folder => "a folder",
        NodeKind::Link => "a symbolic link",
        NodeKind::Other => "a device, pipe or socket",
    };
    Finding::of(findings::NOT_A_FILE, path).found(what)
}

#[derive(Debug, Default)]
struct Strays {
    count: u64,
    first: Vec<String>,
}

impl Strays {
    fn take(&mut self, name: String) {
        self.count = self.count.saturating_add(1);
        if self.first.len() < STRAYS_SHOWN {
            self.first.push(name);
        }
    }

    fn report(self, folder: String, into: &mut Findings) {
        if self.count > 0 {
            let more = if self.count > self.first.len() as u64 { ", ..." } else { "" };
            let found = format!("{}: {}{more}", self.count, self.first.join(", "));
            into.take(Finding::of(findings::STRAY_FILES, folder).found(found));
        }
    }
}

/// The keyring that the sound superblocks agree on.
fn agreed(seen: &[(&Arc<dyn Disk>, Seen, Top)]) -> Result<Option<Keyring>, CannotRun> {
    let mut keyring: Option<(Keyring, String)> = None;
    let mut numbers = BTreeMap::new();
    let mut standings = members(seen).standings.into_iter();
    for (disk, superblock, _) in seen {
        let Seen::Sound(chosen) = superblock else { continue };
        let is_replaced = standings.next() == Some(Standing::Replaced);
        let state = &chosen.superblock;
        let own =
            Keyring { store: state.store, secret: state.secret.clone(), segment_bytes: state.segment_bytes };
        if let Some((known, first)) = &keyring {
            if *known != own {
                return Err(CannotRun::Mixed(format!(
                    "{} belongs to store {}, but {first} belongs to store {}",
                    disk.name(),
                    own.store,
                    known.store
                )));
            }
        } else {
            keyring = Some((own, disk.name()));
        }
        if is_replaced {
            continue;
        }
        if let Some(first) = numbers.insert(state.directory, disk.name()) {
            let here = disk.name();
            return Err(CannotRun::Mixed(format!(
                "{here} is the same directory as {first}, or a copy of that directory"
            )));
        }
    }
    Ok(keyring.map(|(keyring, _)| keyring))
}

/// The keyring that most segment headers of a directory carry: what is left when both superblock slots are gone.
fn by_segments(disk: &dyn Disk, shards: &BTreeSet<u32>) -> Option<Keyring> {
    let mut votes: Vec<(Keyring, usize)> = Vec::new();
    let mut asked = 0usize;
    let tally = Tally::default();
    for &shard in shards {
        for segment in list_shard(disk, shard, &mut Findings::default()).into_iter().take(VOTERS) {
            let path = format!("{}/{}", shard_name(shard), segment_name(segment));
            let Ok(file) = disk.open(&path) else { continue };
            let mut window = Window::new(&*file, PAGE_BYTES, &tally);
            let Ok(header) = SegmentHeader::decode_unkeyed(window.bytes(0, PAGE)) else { continue };
            asked = asked.saturating_add(1);
            let (store, segment_bytes) = (header.position.store, header.segment_bytes);
            let own = Keyring { store, secret: header.secret, segment_bytes };
            match votes.iter_mut().find(|(known, _)| *known == own) {
                Some((_, count)) => *count = count.saturating_add(1),
                None => votes.push((own, 1)),
            }
        }
    }
    let (keyring, count) = votes.into_iter().max_by_key(|(_, count)| *count)?;
    (count.saturating_mul(2) > asked).then_some(keyring)
}

/// The segments of a shard's folder, ascending.
fn list_shard(disk: &dyn Disk, shard: u32, into: &mut Findings) -> Vec<u32> {
    let folder = shard_name(shard);
    let mut segments = Vec::new();
    let mut strays = Strays::default();
    let mut odd = Vec::new();
    let listed = disk.visit(&folder, &mut |node: Node| match (FileName::parse(&node.name), node.kind) {
        (Some(FileName::Segment(segment)), NodeKind::File) => segments.push(segment),
        (Some(FileName::Checkpoint(_)), NodeKind::File) => {}
        (Some(FileName::Segment(_) | FileName::Checkpoint(_)), kind) => odd.push((node.name, kind)),
        _ => strays.take(node.name),
    });
    let path = format!("{}/{folder}", disk.name());
    if let Err(error) = listed {
        into.take(Finding::of(findings::FOLDER_UNREADABLE, path.clone()).found(error));
    }
    for (name, kind) in odd {
        let place = Place { shard: Some(shard), ..Place::default() };
        into.take(Finding { place, ..not_a_file(format!("{path}/{name}"), kind) });
    }
    strays.report(path, into);
    segments.sort_unstable();
    segments
}

fn take_directory(
    store: &mut Store,
    at: usize,
    (disk, superblock): (&dyn Disk, &Seen),
    top: &Top,
    into: &mut Findings,
) -> Result<(), CannotRun> {
    let expected: BTreeSet<u32> = match superblock {
        Seen::Sound(chosen) => chosen.superblock.shards.iter().copied().collect(),
        Seen::Absent if top.shards.is_empty() => return Err(CannotRun::NoStore(disk.name())),
        Seen::Absent | Seen::Blank => {
            into.take(Finding::of(findings::SUPERBLOCK_LOST, disk.name()).found("nothing"));
            top.shards.clone()
        }
        _ => top.shards.clone(),
    };
    for &number in expected.union(&top.shards) {
        if !expected.contains(&number) {
            let place = Place { shard: Some(number), ..Place::default() };
            let path = format!("{}/{}", disk.name(), shard_name(number));
            into.take(Finding { place, ..Finding::of(findings::SHARD_UNEXPECTED, path) });
            continue;
        }
        let is_there = top.shards.contains(&number);
        let segments = if is_there { list_shard(disk, number, into) } else { Vec::new() };
        about_numbers(disk, number, &segments, into);
        store.shards.push(Shard { number, directory: at, is_there, segments });
    }
    Ok(())
}

fn about_numbers(disk: &dyn Disk, shard: u32, segments: &[u32], into: &mut Findings) {
    let unused = segments.last().map_or(0, |last| u64::from(*last) + 1).saturating_sub(segments.len() as u64);
    if unused > 0 {
        let place = Place { shard: Some(shard), ..Place::default() };
        let finding =
            Finding::of(findings::SEGMENT_NUMBER_UNUSED, format!("{}/{}", disk.name(), shard_name(shard)));
        into.take(Finding { place, ..finding.found(format!("{unused} numbers")) });
    }
}

/// What is missing.
fn about_whole(store: &Store, into: &mut Findings) {
    let states: Vec<&Chosen> = store.directories.iter().filter_map(|one| one.superblock.as_ref()).collect();
    let given = store.directories.len() as u64;
    if let Some(wanted) = states.iter().map(|chosen| u64::from(chosen.superblock.directories)).max()
        && wanted > given
    {
        let finding = Finding::at(findings::DIRECTORY_MISSING, Place::default());
        into.take(finding.expected(format!("{wanted} directories")).found(given));
    }
    for shard in store.shards.iter().filter(|shard| !shard.is_there) {
        let place = Place { shard: Some(shard.number), ..Place::default() };
        into.take(Finding::at(findings::SHARD_MISSING, place));
    }
}
