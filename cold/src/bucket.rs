//! The seam of the network: what is asked of an object storage.

use std::ops::Range;

use bytes::Bytes;

use crate::fault::Fault;
use crate::places::Places;
use crate::time::BoxFuture;

/// Which content of an object this is: equal tags, equal content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tag(pub String);

/// When a put is to happen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Condition {
    /// Always: what was there is replaced.
    Any,
    /// If there is no such object.
    Absent,
    /// If the object has this content.
    Is(Tag),
}

/// What is known of an object without its bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// Its bytes.
    pub bytes: u64,
    /// Its content.
    pub tag: Tag,
    /// When it was written, in milliseconds since 1970, by the bucket's clock.
    pub modified_ms: u64,
}

/// An object of a listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// When it was written, in milliseconds since 1970, by the bucket's clock.
    pub modified_ms: u64,
}

/// An object storage. Puts are atomic: an object is there whole or not at all. No caller trusts what comes back.
pub trait Bucket: Send + Sync {
    /// An object of at most `most` bytes, and which content that is.
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>>;

    /// Exactly these bytes of an object, to their places as they come, from front to back. Gives how many came. Nothing is written to
    /// the places when this has ended or is dropped.
    fn get_range<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        into: &'a Places,
    ) -> BoxFuture<'a, Result<u64, Fault>>;

    /// What is known of an object.
    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>>;

    /// Writes an object, whose bytes follow each other in `body`, if the condition holds.
    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Vec<Bytes>,
        condition: Condition,
    ) -> BoxFuture<'a, Result<Tag, Fault>>;

    /// Deletes an object; that it is not there is no fault.
    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>>;

    /// At most `most` objects whose names begin so, by name, behind `after`. Fewer than `most` are all.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: usize,
    ) -> BoxFuture<'a, Result<Vec<Listed>, Fault>>;

    /// Deletes what writers left half-written before that time, in milliseconds since 1970, or counts it alone. Nothing where puts leave
    /// nothing behind.
    fn tidy<'a>(&'a self, before_ms: u64, dry_run: bool) -> BoxFuture<'a, Result<u64, Fault>> {
        let _ = (before_ms, dry_run);
        Box::pin(std::future::ready(Ok(0)))
    }

    /// Whether it has said with an answer that it keeps versions of objects: what is deleted or replaced stays there.
    fn keeps_versions(&self) -> bool {
        false
    }

    /// When it gave its last answer, in milliseconds since 1970 by its own clock; nothing where it does not say.
    fn answered_ms(&self) -> Option<u64> {
        None
    }
}
