//! The seam of the network: what is asked of an object storage.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

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

/// Why a bucket did not do what was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// There is no such object.
    Missing,
    /// There is no such bucket.
    NoBucket,
    /// The condition of a put does not hold.
    Changed,
    /// Asked too often (429, 503): not before this time has passed, where it says so.
    Busy(Option<Duration>),
    /// Not reached, or broken off: whether it happened is not known.
    Unreachable(String),
    /// The server failed: whether it happened is not known.
    Failed(String),
    /// The credentials are refused.
    Denied(String),
    /// The answer is not as long as it must be.
    Length,
    /// Refused for good.
    Refused(String),
}

impl Fault {
    /// Whether the same request can succeed later.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Unreachable(_) | Self::Failed(_) | Self::Length)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there is no such object"),
            Self::NoBucket => f.write_str("there is no such bucket"),
            Self::Changed => f.write_str("the object was changed by another writer"),
            Self::Busy(_) => f.write_str("the bucket asks for fewer requests"),
            Self::Unreachable(why) => write!(f, "the bucket is not reached: {why}"),
            Self::Failed(why) => {
                write!(f, "the bucket's server failed; if it does so again, its own log says why: {why}")
            }
            Self::Denied(why) => write!(f, "the bucket refuses the credentials: {why}"),
            Self::Length => f.write_str("the answer has the wrong length"),
            Self::Refused(why) => write!(f, "the bucket refuses: {why}"),
        }
    }
}

impl std::error::Error for Fault {}

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

    /// When it gave its last answer, in milliseconds since 1970 by its own clock; nothing where it does not say.
    fn answered_ms(&self) -> Option<u64> {
        None
    }
}
