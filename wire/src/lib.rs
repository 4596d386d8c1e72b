//! The contract between Kvarts and those who talk to it: messages, digests, frames and limits, on both sides.
//!
//! [`proto`] is compiled from `proto/`. What both sides must do alike with it stands here once: decoding in bounded
//! memory ([`codec`]), errors ([`fault`]), digests ([`digest`]), the engine's values as messages ([`convert`], [`plans`]), and the
//! frames of the local path ([`local`]).
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod busy;
pub mod codec;
pub mod convert;
pub mod digest;
pub mod etcd;
pub mod fault;
pub mod limits;
pub mod lobby;
pub mod local;
pub mod plans;
pub mod proto;
pub mod sessions;
