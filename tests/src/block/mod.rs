//! Real file systems over a disk that remembers: a disk in user space with an ordered log of writes and flushes
//! ([`fuse`]), file systems on it and on images ([`mounted`]). Needs root, `/dev/fuse` and loop devices.
//!
//! What the log has up to any point gives the images that a power cut at that point may leave: everything up to the
//! last flush, and of what was written after it any sectors.

pub mod fuse;
pub mod mounted;
