//! Why bytes on disk are not the structure that was looked for, and why a value cannot be written.
//!
//! Each answer is the strongest that the bytes alone can prove; its documentation says what it can be confused
//! with. What an answer *means* depends on where it was met: that is the recovery table (`recovery`).

use std::fmt;

use super::position::Position;
use crate::ids::StoreId;

/// Why bytes are not a sound structure of this store at this place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unsound {
    /// The page is all zero: nothing was ever written here, or a write was lost on a fresh file. A page zeroed
    /// by the device looks the same.
    Empty,
    /// Part of a write arrived: the first sector is zero and a later one is not; or the fixed prefix is proven
    /// and what it describes is missing or different. Later damage to those bytes looks the same: what was
    /// known to be flushed (`durable_upto`) tells the two apart.
    Torn,
    /// What this place held before the segment was recycled: same place, older generation. The tag proves it,
    /// or else the old bytes are partly overwritten and only their crc speaks; a lost write looks the same.
    Stale {
        /// The generation it claims.
        generation: u64,
    },
    /// Proven for this place under a generation later than expected: the newer segment header, superblock or
    /// checkpoint that the reader should have started from was lost.
    Ahead {
        /// The generation it claims.
        generation: u64,
    },
    /// Proven, but for another place: a write or a copy went astray.
    Misdirected {
        /// Where it belongs.
        claimed: Position,
    },
    /// Well formed, with the id of another store. Its tag cannot be checked here, so bytes that a client put
    /// inside a payload look the same.
    Foreign {
        /// The store it claims.
        store: StoreId,
    },
    /// Not what was written. Random bytes, a payload page and a forged structure all look so.
    Damaged {
        /// The first check that failed.
        what: Damage,
    },
    /// Proven, and written by a later version of the format than this reader knows.
    Newer {
        /// The version it names.
        version: u16,
    },
    /// Proven, and written before the format was frozen. A store of such a version is refused as a whole, and no program
    /// can have written such a structure into a store of a later version.
    Older {
        /// The version it names.
        version: u16,
    },
}

/// The check that a damaged structure failed, in the order in which checks are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Damage {
    /// Fewer bytes than the structure's fixed part.
    Length,
    /// The first eight bytes name another structure or none.
    Magic,
    /// The crc of the fixed part does not hold.
    Crc,
    /// The crc holds and the keyed tag does not: the tag itself was damaged, or this is a forgery.
    Tag,
    /// The tag holds and padding or a reserved field is not zero: the writer's fault.
    Padding,
    /// The tag holds and the named field is past its limit or contradicts another: the writer's fault.
    Field(&'static str),
    /// The tag holds and the body is not a valid archive: the writer's fault.
    Body,
}

impl Damage {
    /// A stable name for reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Magic => "magic",
            Self::Crc => "crc",
            Self::Tag => "tag",
            Self::Padding => "padding",
            Self::Field(_) => "field",
            Self::Body => "body",
        }
    }

    /// Whether the tag had already been verified: then the bytes are as the writer left them and the writer
    /// was wrong.
    pub const fn is_writers_fault(self) -> bool {
        matches!(self, Self::Padding | Self::Field(_) | Self::Body)
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => write!(f, "the field {name} is out of bounds"),
            other => write!(f, "{} check failed", other.label()),
        }
    }
}

impl fmt::Display for Unsound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "empty: the structure was never written"),
            Self::Torn => write!(f, "torn: only a part of the structure was written"),
            Self::Stale { generation } => write!(
                f,
                "stale: the structure is a remainder of generation \
                {generation}"
            ),
            Self::Ahead { generation } => write!(
                f,
                "ahead: the structure belongs to the later generation \
                {generation}"
            ),
            Self::Misdirected { claimed } => write!(f, "misdirected: the structure belongs to {claimed}"),
            Self::Foreign { store } => write!(f, "foreign: the structure belongs to store {store}"),
            Self::Damaged { what } => write!(f, "damaged: {what}"),
            Self::Newer { version } => {
                write!(f, "the structure has format version {version}: open the store with a newer kvarts")
            }
            Self::Older { version } => {
                write!(f, "the structure has format version {version}, from before the format was frozen")
            }
        }
    }
}

impl std::error::Error for Unsound {}

/// Why a value cannot be written to disk: it would not decode again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EncodeError {
    /// The named field is past its limit or contradicts another.
    Field(&'static str),
    /// The structure would be longer than its limit: write fewer items.
    TooLarge,
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => write!(f, "the field {name} is out of bounds"),
            Self::TooLarge => write!(
                f,
                "the structure is longer than the limit of its kind: write \
                fewer items"
            ),
        }
    }
}

impl std::error::Error for EncodeError {}
