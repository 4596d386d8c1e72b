//! Writes: puts, deletes, and the log that their records are appended to.

pub(crate) mod delete;
pub(crate) mod draft;
mod image;
pub(crate) mod log;
pub(crate) mod place;
pub(crate) mod put;
mod seal;
