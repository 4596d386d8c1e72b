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
            Self::Paused => f.write_str("the bucket failed again and again and is left alone for a while"),
            Self::Budget(what) => write!(f, "the budget of {what} a day is spent"),
            Self::Object(name, error) => write!(f, "{name}: {error}"),
            Self::Full(namespace) => {
                write!(f, "namespace {namespace}: its manifest has no room for more packs")
            }
            Self::Waiting(namespace) => write!(
                f,
                "namespace {namespace}: its manifest has no room for more packs that wait for their deletion: \
                 collect garbage, with a shorter grace if theirs has not passed"
            ),
            Self::Contended(namespace) => {
                write!(f, "namespace {namespace}: other writers changed its manifest each time: try again")
            }
            Self::Clocks(apart_ms) => {
                let seconds = apart_ms / 1000;
                write!(
                    f,
                    "the clock here and the bucket's are {seconds} s apart: set the clock; nothing was changed"
                )
            }
            Self::Store(why) => write!(f, "the store: {why}"),
            Self::Withdrawn => f.write_str("blocks of the pack were deleted meanwhile"),
            Self::Anew(namespace) => write!(
                f,
                "namespace {namespace}: its manifest was begun anew since the blocks were listed, so what was deleted meanwhile is not known: \
                 try again"
            ),
            Self::ReadOnly(why) => write!(
                f,
                "the bucket can only be read: {why}, so writers would undo each other's changes and deletes would be undone"
            ),
            Self::Condemned => f.write_str("a pack of this name is to be deleted"),
        }
    }
}

impl std::error::Error for ColdError {}

impl ColdError {
    /// What a tenant is told: what to do, and nothing of the bucket, its address and its answers.
    pub fn for_tenants(&self) -> &'static str {
        match self {
            Self::Budget(_) => "the bucket may not be asked for more today",
            Self::Contended(_) => "others were changing the same: try again",
            Self::ReadOnly(_) => "the bucket can only be read, so nothing can be deleted there",
            _ => "the bucket was not told: try again later",
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
