//! Writes: puts, deletes, and the log that their records are appended to.

pub(crate) mod delete;
pub(crate) mod log;
pub(crate) mod put;
