//! What a KV-cache artifact is, how it is named, and where every byte of it lies.
//!
//! This crate is pure arithmetic: it does no I/O, reads no clock and holds no `unsafe` code. The engine
//! (`kvarts-store`) and the offline checker (`kvarts-fsck`) share nothing but this crate, so that each can
//! convict the other.
//!
//! Every decoder takes any bytes at all and answers with a value or a typed error: it never panics, never
//! hangs, and never allocates more than a stated multiple of its input. The lints below keep it so.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::print_stdout,
        clippy::print_stderr
    )
)]

pub mod arrange;
pub mod codec;
pub mod coord;
pub mod cut;
pub mod export;
pub mod format;
pub mod identity;
pub mod ids;
pub mod import;
pub mod key;
pub mod plan;
pub mod planted;
pub mod prefix;
pub mod shape;
pub mod spec;

pub use arrange::{Overhead, RunLayout};
pub use coord::Coordinate;
pub use identity::Identity;
pub use ids::{BlockKey, ContentId, Fingerprint, Group, NamespaceId, OriginId, StoreId};
pub use key::{BlockExtra, IndexKey, KeyChain};
pub use prefix::{Requirements, UsablePrefix};
pub use shape::{BlockShape, ChunkShape, LayerShape, Layout};
pub use spec::{Geometry, ModelSpec};
