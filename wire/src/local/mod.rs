//! What travels over the local path: frames, their limits, and the socket. `docs/LOCAL.md` describes it.

pub mod frame;
pub mod limits;
pub mod socket;

use std::ops::Range;

use kvarts_layout::BlockShape;

use crate::proto;

/// How bytes get into a client's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mode {
    /// Into its own pool, verified by the server.
    Direct,
    /// Into memory that it had already, verified by the client.
    Adopted,
    /// Into a window from which the client copies.
    Copied,
}

impl Mode {
    /// Its name, in metrics and statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Adopted => "adopted",
            Self::Copied => "copied",
        }
    }

    /// As a message names it; `None` for what is none of them.
    pub fn from_wire(mode: i32) -> Option<Self> {
        match proto::LocalMode::try_from(mode) {
            Ok(proto::LocalMode::LocalDirect) => Some(Self::Direct),
            Ok(proto::LocalMode::LocalAdopted) => Some(Self::Adopted),
            Ok(proto::LocalMode::LocalCopied) => Some(Self::Copied),
            _ => None,
        }
    }

    /// As a message names it.
    pub fn to_wire(self) -> i32 {
        match self {
            Self::Direct => proto::LocalMode::LocalDirect.into(),
            Self::Adopted => proto::LocalMode::LocalAdopted.into(),
            Self::Copied => proto::LocalMode::LocalCopied.into(),
        }
    }
}

/// The canonical indices of the chunks of some layers.
pub fn parts(shape: &BlockShape, layers: &Range<u32>) -> Range<u32> {
    let count = |layers: Range<u32>| {
        let some = shape.layers().get(layers.start as usize..layers.end as usize).unwrap_or_default();
        some.iter().map(|layer| layer.chunks.len() as u32).sum::<u32>()
    };
    let first = count(0..layers.start);
    first..first + count(layers.clone())
}
