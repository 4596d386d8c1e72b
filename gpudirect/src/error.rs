//! What can go wrong on the way to a device, as types that say what to do.

use std::fmt;
use std::time::Duration;

use kvarts_contract::error::{Kind, Reason};

/// Why a device did not do what it was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeviceError {
    /// There is no such device here: use another, or the emulated one.
    Absent(String),
    /// The device is gone; nothing that it holds can be used, and everything asked of it fails from now on.
    Lost(String),
    /// A copy is not done after so long. What it uses is kept until it is, or the device is declared lost.
    Stuck {
        /// How long was waited.
        millis: u64,
    },
    /// A copy moved fewer bytes than it was asked to. The destination holds a mix.
    Partial {
        /// Bytes that were to be moved.
        wanted: u64,
        /// Bytes that were.
        moved: u64,
    },
    /// An address or length that the device cannot take.
    Misaligned {
        /// The offset that was given.
        at: u64,
        /// What it must be a multiple of.
        align: u64,
    },
    /// A piece that leaves its memory.
    OutOfBounds,
    /// The device or the host has no memory of this size.
    NoMemory(u64),
    /// Memory could not be pinned: it works unpinned, only slower.
    Pin(String),
    /// A call failed.
    Call {
        /// Which.
        call: &'static str,
        /// What the driver says.
        why: String,
    },
    /// Something made by another device, or not supported by this one.
    Foreign(&'static str),
    /// The stream is being captured into a graph, which what was asked for would become part of. Nothing was enqueued: ask
    /// again when the capture has ended, or on a stream that is not captured.
    Captured,
}

impl DeviceError {
    /// A copy that is not done after so long.
    pub(crate) fn stuck(timeout: Duration) -> Self {
        Self::Stuck { millis: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX) }
    }

    /// Whether work whose event ended in this is over, so that it touches nothing any more. Any other error is one of
    /// asking: the work may go on.
    pub fn is_an_end(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Partial { .. })
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(why) => write!(f, "no CUDA device: {why}"),
            Self::Lost(why) => write!(
                f,
                "the connection to the device is lost ({why}): restart the process \
                that uses the device"
            ),
            Self::Stuck { millis } => write!(
                f,
                "a copy did not end within {millis} ms; the memory of the copy is freed when the copy ends, \
                or when the device is declared lost"
            ),
            Self::Partial { wanted, moved } => write!(f, "a copy transferred only {moved} of {wanted} bytes"),
            Self::Misaligned { at, align } => {
                write!(f, "the offset {at} is not a multiple of {align}, as this device requires")
            }
            Self::OutOfBounds => f.write_str("a piece of a copy lies outside its device memory"),
            Self::NoMemory(bytes) => {
                write!(
                    f,
                    "{bytes} bytes of device memory could not be allocated: free device memory, or \
                    request less"
                )
            }
            Self::Pin(why) => {
                write!(f, "the memory could not be pinned, so copies from it are slower: {why}")
            }
            Self::Call { call, why } => write!(f, "{call}: {why}"),
            Self::Foreign(what) => write!(f, "this device cannot use {what}"),
            Self::Captured => {
                f.write_str("the stream is being captured into a graph: retry after the capture")
            }
        }
    }
}

impl std::error::Error for DeviceError {}

/// Why a stream of layers ended before all of them were there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EndReason {
    /// The store could not give a block.
    Store(Reason),
    /// The device could not take a layer.
    Device(DeviceError),
    /// The deadline passed.
    Deadline,
    /// The caller stopped it.
    Stopped,
}

impl EndReason {
    /// What the caller must do. A device that fails is a miss: the state is recomputed.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Store(reason) => reason.kind(),
            Self::Device(_) => Kind::Miss,
            Self::Deadline => Kind::Deadline,
            Self::Stopped => Kind::Retry,
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(reason) => reason.fmt(f),
            Self::Device(error) => error.fmt(f),
            Self::Deadline => f.write_str("the deadline passed before every layer had arrived"),
            Self::Stopped => f.write_str("the caller stopped the stream"),
        }
    }
}

/// Why nothing was begun.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LandError {
    /// The store refused the request.
    Store(Reason),
    /// The device refused it.
    Device(DeviceError),
    /// The arena has no room now: ask again when other streams have ended, or make it larger.
    ArenaFull {
        /// Bytes that two layers ahead need.
        wanted: u64,
        /// Bytes of the largest free piece.
        free: u64,
    },
    /// The arena is too small for this request whatever else goes on: make it larger.
    ArenaTooSmall {
        /// Bytes that two layers ahead need.
        wanted: u64,
        /// Bytes of the arena.
        total: u64,
    },
    /// The request contradicts itself.
    Request(String),
}

impl LandError {
    /// What the caller must do.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Store(reason) => reason.kind(),
            Self::Device(_) => Kind::Miss,
            Self::ArenaFull { .. } => Kind::Retry,
            Self::ArenaTooSmall { .. } | Self::Request(_) => Kind::Invalid,
        }
    }
}

impl fmt::Display for LandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(reason) => reason.fmt(f),
            Self::Device(error) => error.fmt(f),
            Self::ArenaFull { wanted, free } => {
                write!(
                    f,
                    "the host memory for layers has only {free} bytes free in one piece, but {wanted} \
                    are needed: retry soon"
                )
            }
            Self::ArenaTooSmall { wanted, total } => {
                write!(
                    f,
                    "the host memory for layers has {total} bytes, but {wanted} are needed: make the memory larger, \
                    or read fewer blocks"
                )
            }
            Self::Request(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for LandError {}

impl From<DeviceError> for LandError {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_says_what_to_do() {
        assert_eq!(EndReason::Device(DeviceError::Lost(String::new())).kind(), Kind::Miss);
        assert_eq!(EndReason::Deadline.kind(), Kind::Deadline);
        assert_eq!(
            EndReason::Store(Reason::NoSpace(kvarts_contract::error::SpaceCause::Disk)).kind(),
            Kind::Refused
        );
        assert_eq!(LandError::ArenaFull { wanted: 2, free: 1 }.kind(), Kind::Retry);
        assert_eq!(LandError::ArenaTooSmall { wanted: 2, total: 1 }.kind(), Kind::Invalid);
    }
}
