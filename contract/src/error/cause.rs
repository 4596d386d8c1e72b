//! What reasons carry: an enum for each stage at which a request, a start or a device can fail, with the error of the stage
//! below as its source. What a server told has its words and no source.

use std::error::Error as StdError;
use std::fmt;
use std::path::PathBuf;

use kvarts_layout::arrange::RunLayoutError;
use kvarts_layout::codec::CodecError;
use kvarts_layout::format::EncodeError;
use kvarts_layout::format::names::shard_name;
use kvarts_layout::format::superblock::PairUnsound;
use kvarts_layout::identity::IdentityError;
use kvarts_layout::plan::{PlacementError, PlanError};
use kvarts_layout::spec::{CanonicalError, SpecError};
use kvarts_layout::{Coordinate, Group, StoreId};
use kvarts_planner::plan::PlanError as RestorePlanError;

use super::Reason;
use super::units::exact_units;
use crate::io_error::{IoError, IoErrorKind};

/// `Display`, `source()` and `From` of the variants that wrap the error of another stage.
macro_rules! wraps {
    ($cause:ident as $reason:ident: $($variant:ident($inner:ty)),+; $own:ident) => {
        impl fmt::Display for $cause {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant(cause) => cause.fmt(f),)+
                    own => $own(own, f),
                }
            }
        }

        impl StdError for $cause {
            fn source(&self) -> Option<&(dyn StdError + 'static)> {
                match self {
                    $(Self::$variant(cause) => Some(cause),)+
                    _ => None,
                }
            }
        }

        $(impl From<$inner> for Reason {
            fn from(cause: $inner) -> Self {
                Self::$reason($cause::$variant(cause))
            }
        })+
    };
}

/// Why a question, or the memory given with it, does not fit the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ShapeCause {
    /// The model has no such state.
    Spec(SpecError),
    /// The spec's canonical bytes are none.
    Canonical(CanonicalError),
    /// There is no such arrangement of a record.
    Record(RunLayoutError),
    /// A record cannot be encoded.
    Encode(EncodeError),
    /// A read or a write cannot be planned.
    Plan(PlanError),
    /// The memory has no place for what is asked.
    Placement(PlacementError),
    /// A restore cannot be planned.
    Restore(RestorePlanError),
    /// Layers past the last.
    Layers {
        /// The first layer that is not asked for.
        end: u32,
        /// Layers of the group.
        count: u32,
    },
    /// Requirements for blocks of another size than the namespace's.
    BlockTokens {
        /// The size asked for.
        asked: u32,
        /// The size of the blocks stored.
        stored: u32,
    },
    /// A put by layers was sealed too early.
    Unfinished {
        /// Layers that were offered.
        offered: u32,
        /// Layers of the group.
        count: u32,
    },
    /// A column of a batch that has no shape.
    Column(Group, Coordinate),
    /// The rule that is broken.
    Rule(&'static str),
    /// A server's words.
    Remote(String),
}

wraps!(ShapeCause as Shape: Spec(SpecError), Canonical(CanonicalError), Record(RunLayoutError), Encode(EncodeError),
    Plan(PlanError), Placement(PlacementError), Restore(RestorePlanError); shape_words);

fn shape_words(fault: &ShapeCause, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match fault {
        ShapeCause::Layers { end, count } => {
            write!(f, "the request ends at layer {end}, but the group has only {count} layers")
        }
        ShapeCause::BlockTokens { asked, stored } => {
            write!(
                f,
                "the request is for blocks of {asked} tokens, but the stored blocks have {stored} tokens"
            )
        }
        ShapeCause::Unfinished { offered, count } => {
            write!(f, "the put was sealed after only {offered} of its {count} layers had been offered")
        }
        ShapeCause::Column(group, coordinate) => {
            write!(f, "the model has no group {} with coordinate {coordinate}", group.0)
        }
        ShapeCause::Rule(rule) => f.write_str(rule),
        ShapeCause::Remote(what) => f.write_str(what),
        _ => Ok(()),
    }
}

/// Why an identity is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum IdentityCause {
    /// A field is missing or breaks a limit.
    Field(IdentityError),
    /// The rule that is broken.
    Rule(&'static str),
    /// A server's words.
    Remote(String),
}

wraps!(IdentityCause as Identity: Field(IdentityError); identity_words);

fn identity_words(fault: &IdentityCause, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match fault {
        IdentityCause::Rule(rule) => f.write_str(rule),
        IdentityCause::Remote(what) => f.write_str(what),
        IdentityCause::Field(_) => Ok(()),
    }
}

/// Which bound leaves no room for a put.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SpaceCause {
    /// The budget of the store, of which pins, leases and puts under way hold what is left of it.
    Budget {
        /// Its bytes.
        limit: u64,
    },
    /// The budget of the store, which is full of what is in use: what could go is the beginning of the same prefix, without which
    /// the blocks could not be used.
    Prefix {
        /// Its bytes.
        limit: u64,
    },
    /// The file system is full, whatever the budget allows.
    Disk,
    /// The memory that the index of blocks may take.
    Index {
        /// Its bytes.
        limit: u64,
    },
    /// The numbers that the index has for records.
    Records,
    /// The segment files that this process may have open.
    Files {
        /// How many.
        most: u64,
    },
    /// A server's words.
    Remote(String),
}

/// What frees room that is held: the end of each message about it.
const END_PINS: &str = "end pins (`kvarts pin --list` shows the pins, `kvarts pin --release PIN` ends \
    a pin)";

impl fmt::Display for SpaceCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Budget { limit } => write!(
                f,
                "the store's budget of {} is full, and pins, leases or puts under way protect the blocks \
                from eviction: raise --budget, or {END_PINS}",
                exact_units(*limit)
            ),
            Self::Prefix { limit } => write!(
                f,
                "the store's budget of {} has no room for the rest of this prefix, whose first blocks stay \
                stored: raise --budget, or store shorter prefixes",
                exact_units(*limit)
            ),
            Self::Disk => f.write_str(
                "the file system of the store is full, but the budget is not: free space, or lower --budget below the size of \
                 the file system",
            ),
            Self::Index { limit } => write!(
                f,
                "the memory of the index, {}, is full: raise --index-memory, or put larger blocks",
                exact_units(*limit)
            ),
            Self::Records => f.write_str("the index has no free record numbers: put more blocks in each request"),
            Self::Files { most } => write!(
                f,
                "the store uses all {most} segment files that this process may open, and pins or \
                leases prevent evictions: raise the limit on open files (`ulimit -n`, LimitNOFILE), \
                or {END_PINS}"
            ),
            Self::Remote(cause) if cause.is_empty() => {
                f.write_str("the cause is the same as for an earlier block of this answer")
            }
            Self::Remote(cause) => f.write_str(cause),
        }
    }
}

/// What made the store read-only, or keeps it from deleting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LatchCause {
    /// An error of a device said that it takes no more writes.
    Device(Box<IoError>),
    /// The executor of this number died.
    Executor(usize),
    /// This directory of the store was removed, or another lies in its place: what is written reaches nothing that a restart finds.
    TakenAway(PathBuf),
    /// A server's words.
    Remote(String),
}

impl fmt::Display for LatchCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(cause) => cause.fmt(f),
            Self::Executor(executor) => {
                write!(
                    f,
                    "executor {executor} ended with a panic, so the blocks of its shards cannot be read \
                    until a restart"
                )
            }
            Self::TakenAway(directory) => {
                write!(
                    f,
                    "the directory {} was removed or replaced after the store was opened",
                    directory.display()
                )
            }
            Self::Remote(cause) => f.write_str(cause),
        }
    }
}

impl StdError for LatchCause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Device(cause) => Some(&**cause),
            Self::Executor(_) | Self::TakenAway(_) | Self::Remote(_) => None,
        }
    }
}

/// Why a delete cannot be acknowledged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeleteCause {
    /// A part of the store cannot be read, and what descends from a key may lie there.
    NotAll,
    /// No more than half of the store's directories are in use: a delete could come back with the others.
    TooFew {
        /// Directories in use.
        in_use: u64,
        /// Directories of the store.
        all: u64,
    },
    /// A server's words.
    Remote(String),
}

impl fmt::Display for DeleteCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAll => f.write_str(
                "blocks that descend from the key may lie in a part of the store that cannot be read: \
                delete the keys of these blocks, or delete the namespace",
            ),
            Self::TooFew { in_use, all } => {
                write!(
                    f,
                    "only {in_use} of {all} directories are in use, so the absent directories could bring \
                     deleted blocks back: mount a \
                     missing directory again, or replace it with an empty one (kvarts replace)"
                )
            }
            Self::Remote(cause) => f.write_str(cause),
        }
    }
}

/// Why bytes could not be had.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MediaCause {
    /// An operation of a device failed.
    Io(Box<IoError>),
    /// A stored chunk could not be encoded or decoded.
    Codec(CodecError),
    /// A server, or the connection to it, gave this cause.
    Remote(String),
}

impl fmt::Display for MediaCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(cause) => cause.fmt(f),
            Self::Codec(cause) => cause.fmt(f),
            Self::Remote(cause) => f.write_str(cause),
        }
    }
}

impl StdError for MediaCause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Io(cause) => Some(&**cause),
            Self::Codec(cause) => Some(cause),
            Self::Remote(_) => None,
        }
    }
}

impl From<IoError> for Reason {
    fn from(cause: IoError) -> Self {
        Self::Media(MediaCause::Io(Box::new(cause)))
    }
}

impl From<CodecError> for Reason {
    fn from(cause: CodecError) -> Self {
        Self::Media(MediaCause::Codec(cause))
    }
}

/// Why directories cannot be used as a store. A number is that of a directory, in the order in which they were given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DirectoryCause {
    /// An operation in it failed.
    Io(Box<IoError>),
    /// It cannot be made, locked or written in; the text says which, and what the system said.
    Unusable(String),
    /// It holds something else than a store; the name of some of it.
    NotEmpty(u16, String),
    /// It holds a copy of a store that was never finished.
    UnfinishedCopy(u16),
    /// It holds blocks without a superblock; the name of some of them.
    LostSuperblock(u16, String),
    /// It lacks the folder of a shard.
    LostShard(u16, u32),
    /// It holds the folder of a shard that an attempt to make a store with other settings left.
    OtherSettings(u16, u32),
    /// Its two superblock slots contradict each other, or neither is sound.
    Superblock(u16, Box<PairUnsound>),
    /// It is empty while others hold a store.
    Extra(u16),
    /// Its disk did not answer when the store was opened.
    Silent(u16),
    /// Another directory has taken its place in the store.
    Replaced(u16),
    /// Fewer than half of the store's directories can be used, and why not the first of the others.
    TooFew {
        /// Directories that can be used.
        found: u32,
        /// Directories of the store.
        all: u32,
        /// What the first of the others is.
        first: String,
    },
    /// It cannot be replaced by an empty one; the text says why.
    NotReplaced(u16, &'static str),
    /// It belongs to another store than the first.
    Foreign {
        /// Which directory.
        directory: u16,
        /// Its store.
        store: StoreId,
        /// The store of the first directory.
        first: StoreId,
    },
    /// It was given twice, or is a copy of another.
    Twice(u16),
    /// A number of directories that is not the store's.
    Count {
        /// Directories of the store.
        expected: u32,
        /// Directories given.
        given: usize,
    },
}

impl fmt::Display for DirectoryCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(cause) => of_io(cause, f),
            Self::Unusable(what) => f.write_str(what),
            Self::NotEmpty(at, name) => write!(
                f,
                "directory {at} is not empty (it contains {name}) but has no store: use an empty \
                directory; if the directory contained a store, run kvarts fsck --repair"
            ),
            Self::UnfinishedCopy(at) => write!(
                f,
                "directory {at} holds an unfinished copy of a store, because `kvarts compact --to` was \
                interrupted: run the command again, or delete the directory"
            ),
            Self::LostSuperblock(at, name) => write!(
                f,
                "directory {at} has no superblock any more ({name} exists, but the superblock is empty): run kvarts fsck \
                 --repair"
            ),
            Self::LostShard(at, shard) => write!(
                f,
                "directory {at} has no folder for shard {shard} any more: run kvarts fsck --repair, which creates an empty one"
            ),
            Self::OtherSettings(at, shard) => write!(
                f,
                "directory {at} has the empty folder {} of an earlier attempt to create a store with other settings: remove the \
                 folder",
                shard_name(*shard)
            ),
            Self::Superblock(at, unsound) => of_slots(*at, unsound, f),
            Self::Extra(at) => {
                write!(
                    f,
                    "directory {at} is empty, but other directories have a store: mount the missing disk; if the disk is lost, \
                     `kvarts replace` puts this directory in its place"
                )
            }
            Self::Silent(at) => {
                write!(f, "the disk of directory {at} does not respond: check the log of the kernel (dmesg)")
            }
            Self::Replaced(at) => {
                write!(f, "directory {at} was replaced: use the directory that replaced it")
            }
            Self::TooFew { found, all, first } => write!(
                f,
                "only {found} of {all} directories of the store can be used. At least half are needed, because the absent \
                 directories could bring deleted blocks back; {first}"
            ),
            Self::NotReplaced(at, why) => {
                write!(f, "directory {at} cannot replace a missing directory: {why}")
            }
            Self::Foreign { directory, store, first } => {
                write!(
                    f,
                    "directory {directory} belongs to store {store}, but the first directory belongs to \
                    store {first}: give the directories of one store"
                )
            }
            Self::Twice(at) => write!(
                f,
                "directory {at} was given twice, or is a copy of another directory: give each directory of \
                the store once"
            ),
            Self::Count { expected, given } => {
                write!(
                    f,
                    "the store has {expected} directories, but {given} were given: give all directories of \
                    the store"
                )
            }
        }
    }
}

/// An error of the file system, with what to do where that is known.
fn of_io(cause: &IoError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match cause.kind {
        IoErrorKind::ReadOnlyFs => write!(
            f,
            "{cause}: the file system is read-only: check the log of the kernel (dmesg), and mount the file system writable"
        ),
        IoErrorKind::Permission => {
            write!(f, "{cause}: give the user of this process the right to write to the directory")
        }
        _ => fmt::Display::fmt(cause, f),
    }
}

/// Two superblock slots of which none can be used.
fn of_slots(at: u16, unsound: &PairUnsound, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match unsound {
        PairUnsound::Conflict => {
            write!(f, "directory {at}: the two superblock slots contradict each other: run kvarts fsck")
        }
        PairUnsound::Both(first, second) => {
            write!(f, "directory {at}: neither superblock slot is valid ({first}; {second}): run kvarts fsck")
        }
    }
}

impl StdError for DirectoryCause {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Io(cause) => Some(&**cause),
            _ => None,
        }
    }
}
