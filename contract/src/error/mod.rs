//! What a caller is told when something did not work: a kind that says what to do, and a reason that says why.
//!
//! Each [`Reason`] belongs to exactly one [`Kind`], by one function. Nothing is wrapped twice: a reason is made
//! where the fault is seen, and travels up unchanged.

mod cause;
pub mod units;

use std::fmt;

use kvarts_layout::{BlockKey, NamespaceId};

pub use cause::{DeleteCause, DirectoryCause, IdentityCause, LatchCause, MediaCause, ShapeCause, SpaceCause};

/// What the caller must do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// The bytes are not here: recompute them.
    Miss,
    /// Not now: ask again.
    Retry,
    /// Not allowed: a quota, the budget, a right.
    Refused,
    /// The request can never succeed as it is: fix it.
    Invalid,
    /// The deadline passed first.
    Deadline,
    /// Bytes on disk were not what was written: recompute them. It has been reported and counted.
    Corrupt,
    /// The store takes no writes after a fault: once the cause is gone, have it resume or restart it.
    ReadOnly,
    /// A defect in Kvarts: report it.
    Bug,
}

/// Why a request did not succeed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// No live block under this key.
    NotHere(BlockKey),
    /// Another put of this block has not finished.
    InFlight,
    /// A delete met the put: nothing of it is visible.
    Deleted,
    /// The lease has ended.
    LeaseEnded,
    /// Events are missing between what the caller knows and what the store remembers.
    EventGap,
    /// The executor's queue is full, or the store is closing.
    Busy(&'static str),
    /// No server answers where it was said to be; the text says where, and what the system said.
    Away(String),
    /// The machine had too little of something else than disk, or was interrupted. The disk is well.
    Passing(String),
    /// A bound on what is stored is reached, and nothing may go now to make room.
    NoSpace(SpaceCause),
    /// A tenant's cap on pinned bytes would be passed.
    PinCap {
        /// Bytes the cap allows.
        limit: u64,
        /// Bytes that would then be pinned.
        wanted: u64,
    },
    /// The quota on disk bytes of the namespace or its tenant would be passed, and nothing of it may go.
    Quota {
        /// Bytes the quota allows.
        limit: u64,
        /// Bytes that it would then have.
        wanted: u64,
    },
    /// The device has been written as much as its endurance budget allows, and the block was not asked for before.
    NotAdmitted,
    /// The caller has no right to it; the text says which is missing.
    Denied(String),
    /// The namespace was never registered here.
    UnknownNamespace(NamespaceId),
    /// The namespace is registered with another spec.
    SpecMismatch,
    /// The identity lacks a field or breaks a limit.
    Identity(IdentityCause),
    /// This group or coordinate is none of the model's, or what was given has another shape.
    Shape(ShapeCause),
    /// No block, or no layer, was asked for.
    Empty,
    /// More blocks, layers or bytes than one request may have.
    TooMany(&'static str),
    /// The same key twice in one request.
    Duplicate(BlockKey),
    /// A key that stands elsewhere in its chain than the request says.
    OutOfOrder(BlockKey),
    /// Memory of the wrong length.
    Length {
        /// Bytes that the model's shape asks for.
        expected: u64,
        /// Bytes that were given.
        found: u64,
    },
    /// Two destinations share bytes.
    Overlap,
    /// A destination or source outside the memory given.
    OutOfBounds,
    /// The deadline had passed before anything was begun.
    DeadlineInPast,
    /// The deadline passed while the device worked.
    DeadlinePassed,
    /// A digest did not match.
    Digest {
        /// Which shard.
        shard: u32,
        /// Which segment file.
        segment: u32,
        /// Where the record begins in it.
        offset: u64,
        /// What the record's table says.
        expected: u32,
        /// What the bytes on disk gave.
        found: u32,
    },
    /// A record header was not what the index says lies there.
    Header {
        /// Which shard.
        shard: u32,
        /// Which segment file.
        segment: u32,
        /// Where the record should begin.
        offset: u64,
        /// What was found.
        what: String,
    },
    /// The device would not give the bytes, or another step on their way failed.
    Media(MediaCause),
    /// A fault latched the store: it is read-only.
    Latched(LatchCause),
    /// The delete was not begun: it could not be kept.
    NotDeleted(DeleteCause),
    /// The directory cannot be used as a store.
    Directory(DirectoryCause),
    /// Another process has the directory open.
    Locked(String),
    /// The store was written by a newer format.
    Newer {
        /// The format version found.
        found: u16,
    },
    /// The store was written before the format was frozen.
    Older {
        /// The format version found.
        found: u16,
    },
    /// A configuration value that cannot be.
    Config(String),
    /// Something that the code believes impossible.
    Bug(&'static str),
}

impl Reason {
    /// What the caller must do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotHere(_) | Self::Media(_) => Kind::Miss,
            Self::InFlight
            | Self::Busy(_)
            | Self::Away(_)
            | Self::Passing(_)
            | Self::Deleted
            | Self::EventGap => Kind::Retry,
            Self::NoSpace(_)
            | Self::PinCap { .. }
            | Self::Quota { .. }
            | Self::NotAdmitted
            | Self::Denied(_)
            | Self::Locked(_)
            | Self::LeaseEnded => Kind::Refused,
            Self::UnknownNamespace(_)
            | Self::SpecMismatch
            | Self::Identity(_)
            | Self::Shape(_)
            | Self::Empty
            | Self::TooMany(_)
            | Self::Duplicate(_)
            | Self::OutOfOrder(_)
            | Self::Length { .. }
            | Self::Overlap
            | Self::OutOfBounds
            | Self::Directory(_)
            | Self::Newer { .. }
            | Self::Older { .. }
            | Self::Config(_) => Kind::Invalid,
            Self::DeadlineInPast | Self::DeadlinePassed => Kind::Deadline,
            Self::Digest { .. } | Self::Header { .. } => Kind::Corrupt,
            Self::Latched(_) | Self::NotDeleted(_) => Kind::ReadOnly,
            Self::Bug(_) => Kind::Bug,
        }
    }
}

/// What there are too many of, and where, if it is not the request.
fn too_many(what: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match what {
        "bytes in one block for this store's segments" => f.write_str(
            "a block is larger than half of a segment of this store: use smaller blocks, or a store with larger segments",
        ),
        // These name their own bound.
        _ if [" in ", " that ", " of "].iter().any(|word| what.contains(word)) => write!(f, "too many {what}"),
        _ => write!(f, "the request has too many {what}"),
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotHere(key) => write!(f, "block {key} is not stored here"),
            Self::InFlight => f.write_str("another put of this block is under way: retry"),
            Self::Busy(what) => write!(f, "{what}: retry"),
            Self::Away(what) => write!(f, "unavailable: {what}; retry"),
            Self::Deleted => f.write_str("the block was deleted during this put: retry the put"),
            Self::LeaseEnded => f.write_str("the lease has ended: look the blocks up again"),
            Self::EventGap => f.write_str("events are missing: start a new snapshot"),
            Self::Passing(what) => write!(f, "temporary failure ({what}), not caused by the disk: retry"),
            Self::NoSpace(cause) => write!(f, "no room: {cause}"),
            Self::PinCap { limit, wanted } => write!(
                f,
                "the pins of the tenant would hold {wanted} bytes, but the limit is {limit}: end pins \
                (`kvarts pin --list` shows the pins), or raise `pin` of the tenant"
            ),
            Self::Quota { limit, wanted } => write!(
                f,
                "the disk quota of the tenant or model is {limit} bytes, but this put needs {wanted} bytes \
                in total, and no block can be evicted now: raise `disk` of the tenant, delete blocks, or end \
                pins (`kvarts pin --list` shows the pins)"
            ),
            Self::NotAdmitted => f.write_str(
                "not admitted: the daily budget of writes is used up, and the block has not been put often \
                enough: put the block again later, or raise --endurance",
            ),
            Self::Denied(what) => write!(f, "refused: {what}"),
            Self::UnknownNamespace(id) => {
                write!(f, "namespace {id} is not registered: register its identity first")
            }
            Self::SpecMismatch => f.write_str(
                "the identity's fingerprint does not match the given spec: correct the identity or the spec",
            ),
            Self::Identity(what) => write!(f, "identity refused: {what}"),
            Self::Shape(what) => write!(f, "the request does not fit the model: {what}"),
            Self::Empty => f.write_str("the request has no block or no layer"),
            Self::TooMany(what) => too_many(what, f),
            Self::Duplicate(key) => write!(f, "the request has block {key} twice"),
            Self::OutOfOrder(key) => {
                write!(f, "block {key} has another position in the stored chain than in the request")
            }
            Self::Length { expected, found } => {
                write!(f, "the memory has {found} bytes, but the blocks need {expected} bytes")
            }
            Self::Overlap => f.write_str("two destinations overlap in memory"),
            Self::OutOfBounds => f.write_str("a source or destination is outside the request's memory"),
            Self::DeadlineInPast => f.write_str("the deadline had passed before the work began"),
            Self::DeadlinePassed => f.write_str("the deadline passed"),
            Self::Digest { segment, offset, expected, found, .. } => {
                let place = place(*segment, *offset);
                write!(f, "{place}: digest {found:08x} instead of {expected:08x}; the block is a miss")
            }
            Self::Header { segment, offset, what, .. } => {
                write!(f, "{}: {what}; the block is a miss", place(*segment, *offset))
            }
            Self::Media(what) => write!(f, "the bytes could not be read: {what}"),
            Self::NotDeleted(what) => write!(f, "not deleted: {what}"),
            Self::Latched(what) => write!(
                f,
                "the store is read-only after a fault ({what}): remove the cause, then run `kvarts resume` or restart"
            ),
            Self::Directory(what) => what.fmt(f),
            Self::Config(what) => f.write_str(what),
            Self::Locked(what) => write!(f, "{what}: stop that process, or use another directory"),
            Self::Newer { found } => {
                write!(f, "the store has format version {found}, newer than this program: use a newer kvarts")
            }
            Self::Older { found } => write!(
                f,
                "the store has format version {found}, from before the format was frozen: create a new store"
            ),
            Self::Bug(what) => write!(f, "a defect in kvarts, please report it: {what}"),
        }
    }
}

/// The error of the public API.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error(pub Reason);

impl Error {
    /// What the caller must do.
    pub fn kind(&self) -> Kind {
        self.0.kind()
    }
}

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        Self(reason)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Reason {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Media(cause) => cause.source(),
            Self::Shape(cause) => cause.source(),
            Self::Identity(cause) => cause.source(),
            Self::Latched(cause) => cause.source(),
            Self::Directory(cause) => cause.source(),
            _ => None,
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl Reason {
    /// A fault of a server, or of the connection to it, in its words.
    pub fn remote(cause: impl Into<String>) -> Self {
        Self::Media(MediaCause::Remote(cause.into()))
    }
}

/// The code rules this state out: a debug build stops here. A release does what the caller does next, which must not
/// announce bytes that were not proven.
#[cold]
pub fn broken_invariant(what: &str) {
    debug_assert!(false, "{what}");
}

/// Where a record lies. No record lies where the header of its segment does: a client is not told where.
fn place(segment: u32, offset: u64) -> String {
    match offset {
        0 => "a block (the server's log has its position)".to_owned(),
        offset => format!("segment {segment} at {offset}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io_error::IoError;
    use kvarts_layout::codec::CodecError;
    use kvarts_layout::identity::IdentityError;
    use kvarts_layout::plan::{PlacementError, PlanError};
    use kvarts_layout::spec::SpecError;

    #[test]
    fn a_damaged_byte_is_corrupt_and_a_full_disk_is_refused() {
        let digest = Reason::Digest { shard: 0, segment: 1, offset: 4096, expected: 1, found: 2 };
        assert_eq!(Error(digest).kind(), Kind::Corrupt);
        let unplaced = Reason::Digest { shard: 0, segment: 0, offset: 0, expected: 1, found: 2 }.to_string();
        assert!(unplaced.contains("the server's log") && !unplaced.contains("segment"), "{unplaced}");
        assert_eq!(Error(Reason::NoSpace(SpaceCause::Disk)).kind(), Kind::Refused);
        assert_eq!(Error(Reason::Quota { limit: 1, wanted: 2 }).kind(), Kind::Refused);
        assert_eq!(Error(Reason::remote("")).kind(), Kind::Miss);
    }

    #[test]
    fn a_bound_that_is_met_is_told_with_its_value_and_what_to_do() {
        let limit = 3 << 30;
        for (cause, expected) in [
            (SpaceCause::Budget { limit }, ["budget of 3 GiB", "raise --budget", "kvarts pin --release PIN"]),
            (SpaceCause::Prefix { limit }, ["budget of 3 GiB", "first blocks stay stored", "raise --budget"]),
            (SpaceCause::Disk, ["file system of the store is full", "free space", "lower --budget"]),
            (SpaceCause::Index { limit }, ["memory of the index, 3 GiB", "is full", "raise --index-memory"]),
            (SpaceCause::Files { most: 77 }, ["77 segment files", "ulimit -n", "kvarts pin --list"]),
        ] {
            let told = Reason::NoSpace(cause).to_string();
            assert!(expected.iter().all(|part| told.contains(part)), "{told}");
        }
        let quota = Reason::Quota { limit: 5, wanted: 7 }.to_string();
        let expected = [
            "disk quota of the tenant or model is 5 bytes",
            "this put needs 7",
            "raise `disk` of the tenant",
            "kvarts pin --list",
        ];
        assert!(expected.iter().all(|part| quota.contains(part)), "{quota}");
    }

    #[test]
    fn a_fault_of_a_device_has_its_cause_as_its_source() {
        use std::error::Error as _;
        let reason = Reason::from(IoError::out_of_memory(9));
        assert!(reason.source().is_some_and(|source| source.is::<IoError>()));
        assert!(Error(reason.clone()).source().is_some() && reason.to_string().contains("9 bytes"));
        assert!(Reason::from(CodecError::NoMemory).source().is_some());
        assert!(
            Reason::remote("").source().is_none() && Reason::NoSpace(SpaceCause::Disk).source().is_none()
        );
    }

    #[test]
    fn an_error_of_another_stage_is_the_source_of_the_reason_and_says_the_same() {
        use std::error::Error as _;
        let wrapped: [(Reason, &dyn std::error::Error); 4] = [
            (SpecError::NoLayers.into(), &SpecError::NoLayers),
            (PlanError::Nothing.into(), &PlanError::Nothing),
            (PlacementError::Blocks.into(), &PlacementError::Blocks),
            (IdentityError::Missing { field: "model" }.into(), &IdentityError::Missing { field: "model" }),
        ];
        for (reason, cause) in wrapped {
            let source = reason.source().map(ToString::to_string);
            assert_eq!(source, Some(cause.to_string()));
            assert!(reason.to_string().ends_with(&cause.to_string()) && reason.kind() == Kind::Invalid);
        }
        let spec = Reason::from(SpecError::NoLayers);
        assert!(spec.source().is_some_and(|source| source.is::<SpecError>()));
        let (io, executor) = (Box::new(IoError::out_of_memory(9)), LatchCause::Executor(3));
        let latched = Reason::Latched(LatchCause::Device(io.clone()));
        assert!(latched.source().is_some_and(|source| source.is::<IoError>()));
        assert!(Reason::Directory(DirectoryCause::Io(io)).source().is_some());
        assert!(Reason::Latched(executor.clone()).source().is_none(), "{executor}");
    }
}
