//! What callers are told.

use std::fmt;

use kvarts_layout::NamespaceId;

use crate::fault::Fault;
use crate::format::FormatError;

/// Why something was not done. Whatever it was: a restore that fails is a miss, a push that fails leaves nothing visible.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ColdError {
    /// The bucket, of this object, after every retry.
    Bucket(String, Fault),
    /// After an outage the bucket is left alone for a while.
    Paused,
    /// The budget of the day is spent: of requests, of bytes written, or of bytes read.
    Budget(&'static str),
    /// An object is not what its name says.
    Object(String, FormatError),
    /// The manifest of a namespace has no room for another pack: collect garbage, or keep less.
    Full(NamespaceId),
    /// The manifest of a namespace has no room for another pack that is to be deleted: their grace has to pass.
    Waiting(NamespaceId),
    /// Other writers changed the manifest each time.
    Contended(NamespaceId),
    /// The clock here and the bucket's are this many milliseconds apart: what is old cannot be told.
    Clocks(u64),
    /// The pack's name waits for its deletion: the pack needs another one.
    Condemned,
    /// Some of its blocks were deleted while the pack was on its way: it is not named.
    Withdrawn,
    /// The manifest of a namespace is another one, or gone, since blocks were listed: what was deleted meanwhile is not known.
    Anew(NamespaceId),
    /// The bucket does not keep conditions of puts, in this way: nothing is changed there.
    ReadOnly(String),
    /// The store that blocks are to be brought into refuses them.
    Store(String),
}

impl fmt::Display for ColdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bucket(name, fault) => write!(f, "{name}: {fault}"),
            Self::Paused => f.write_str("requests to the bucket are paused after repeated failures"),
            Self::Budget(what) => {
                write!(f, "the daily budget of {what} is used up: retry after midnight UTC")
            }
            Self::Object(name, error) => write!(f, "{name}: {error}"),
            Self::Full(namespace) => {
                write!(f, "the manifest of namespace {namespace} is full and cannot list more packs")
            }
            Self::Waiting(namespace) => write!(
                f,
                "the manifest of namespace {namespace} is full of packs that wait for deletion: run `kvarts \
                cold gc`, with a shorter --grace if the grace period has not passed"
            ),
            Self::Contended(namespace) => {
                write!(
                    f,
                    "other writers changed the manifest of namespace {namespace} during each attempt: \
                    retry"
                )
            }
            Self::Clocks(apart_ms) => {
                let seconds = apart_ms / 1000;
                write!(
                    f,
                    "the local clock and the bucket's clock differ by {seconds} s: set the local \
                    clock, then retry; nothing was changed"
                )
            }
            Self::Store(why) => write!(f, "the store: {why}"),
            Self::Withdrawn => f.write_str("blocks of the pack were deleted during the push"),
            Self::Anew(namespace) => write!(
                f,
                "the manifest of namespace {namespace} was created again after the blocks were listed, so \
                deletes since then are unknown: retry"
            ),
            Self::ReadOnly(why) => write!(
                f,
                "the bucket is read-only for kvarts: {why}, so writers could overwrite each other's changes \
                and deletes"
            ),
            Self::Condemned => f.write_str("a pack of this name waits for its deletion"),
        }
    }
}

impl std::error::Error for ColdError {}

impl ColdError {
    /// What a tenant is told: what to do, and nothing of the bucket, its address and its answers.
    pub fn for_tenants(&self) -> &'static str {
        match self {
            Self::Budget(_) => "the daily budget of the bucket is used up: retry after midnight UTC",
            Self::Contended(_) => "other writers changed the manifest at the same time: retry",
            Self::ReadOnly(_) => {
                "the bucket is read-only for kvarts, so deletes cannot be recorded in the bucket"
            }
            _ => "the request to the bucket failed: retry later",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_hear_nothing_of_the_bucket() {
        let bucket = |fault| ColdError::Bucket("kvarts-cold-1/manifests/ab".to_owned(), fault);
        for error in [
            bucket(Fault::Denied("403 Forbidden, quoted".to_owned())),
            bucket(Fault::Unreachable("http://quoted".to_owned())),
            ColdError::Budget("requests"),
            ColdError::Paused,
            ColdError::ReadOnly("quoted".to_owned()),
        ] {
            let told = error.for_tenants();
            assert!(!told.contains("kvarts-cold") && !told.contains("quoted"), "{told}");
        }
    }
}
