//! A delete, or a shorter time to live, as it is recorded in a namespace's manifest, with its time. A node that receives a delete late
//! records it with the delete's own time, so that blocks which were put again since stay.

use kvarts_layout::{BlockKey, Coordinate, Group, planted};

use crate::format::deletions::{Delete, Deletions, Listed};
use crate::format::{Manifest, PackEntry, Point, fingerprint, wide_fingerprint};

/// What was deleted of a namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Deleted {
    /// The blocks under these keys, of every group and coordinate.
    Keys(Vec<BlockKey>),
    /// The block under this key and what descends from it. What may descend goes too: where a link leads out of the bucket,
    /// descent cannot be known, nor where there is too much to follow.
    Prefix(BlockKey),
    /// Everything.
    Namespace,
    /// Nothing was, and the blocks under these keys now expire at this time, in milliseconds since 1970: copies that live longer go.
    Later(Vec<BlockKey>, (Group, Coordinate), u64),
}

impl Deleted {
    /// How many keys it names, or one.
    pub fn keys(&self) -> usize {
        match self {
            Self::Keys(keys) | Self::Later(keys, ..) => keys.len().max(1),
            Self::Prefix(_) | Self::Namespace => 1,
        }
    }
}

/// The time of a delete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Now. All that the bucket has of it goes.
    Now,
    /// Now, in a cluster whose nodes say of what they produce since that it was later than this time, in milliseconds since 1970. All that
    /// the bucket has of it goes.
    NowUntil(u64),
    /// Some time ago, and it was heard of now: what was produced at this time or before goes, and what is younger stays.
    Until(u64),
}

/// A delete, or a shorter time to live, and its time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    /// What was deleted.
    pub deleted: Deleted,
    /// And when.
    pub when: When,
}

impl Told {
    fn when(&self) -> When {
        if planted!("late-deletes-are-new") { When::Now } else { self.when }
    }

    /// The time to record in the manifest, when it is recorded at `now_ms`.
    fn at_ms(&self, now_ms: u64) -> u64 {
        match self.when() {
            When::Now => now_ms,
            // Zero says something else in a manifest.
            When::NowUntil(at_ms) | When::Until(at_ms) => at_ms.max(1),
        }
    }

    /// Whether what was produced then goes.
    pub(super) fn is_of(&self, created_ms: u64) -> bool {
        match self.when() {
            When::Now | When::NowUntil(_) => true,
            When::Until(at_ms) => created_ms <= at_ms,
        }
    }

    /// Whether all that there is goes, so that nothing has to be looked at.
    pub(super) fn is_all(&self) -> bool {
        self.deleted == Deleted::Namespace && !matches!(self.when(), When::Until(_))
    }

    /// Whether a pack may have some of it, by what the manifest says of it.
    pub(super) fn may_be_in(&self, pack: &PackEntry) -> bool {
        match &self.deleted {
            Deleted::Keys(keys) | Deleted::Later(keys, ..) => {
                keys.iter().any(|key| pack.may_have(fingerprint(key)))
            }
            Deleted::Prefix(_) | Deleted::Namespace => true,
        }
    }

    /// Whether these deletes say so already of what was heard late: what was named of it went when they were noted, and nothing of it
    /// was named since.
    pub(super) fn is_known(&self, known: &Deletions) -> bool {
        let When::Until(at_ms) = self.when() else { return false };
        match &self.deleted {
            Deleted::Keys(keys) => keys.iter().all(|key| known.was_deleted(wide_fingerprint(key), at_ms)),
            Deleted::Namespace => known.made_after_ms >= at_ms,
            // Of which keys, or of which ends, they do not say.
            Deleted::Prefix(_) | Deleted::Later(..) => false,
        }
    }

    /// The manifest says from its next generation on that this was deleted, if it does not say so already since `since`: then another
    /// attempt of this has, or another delete. Gives whether it said so already.
    pub(super) fn note(&self, manifest: &mut Manifest, since: Point, now_ms: u64) -> bool {
        if planted!("deletes-not-noted") {
            return true;
        }
        let at_ms = self.at_ms(now_ms);
        let delete = Delete { generation: manifest.next_generation(), at_ms };
        let known = &manifest.deletions;
        let is_noted = manifest.since(since).is_some_and(|since| {
            // To a writer that listed it then; when it was produced is another question.
            let is_hidden = |key: &BlockKey| {
                let fingerprint = wide_fingerprint(key);
                known.hides(Listed { since: Some(since), fingerprint, created_ms: u64::MAX })
            };
            let is_deleted = |key: &BlockKey| known.was_deleted(wide_fingerprint(key), at_ms);
            match &self.deleted {
                Deleted::Keys(keys) => keys.iter().all(|key| is_hidden(key) && is_deleted(key)),
                Deleted::Later(keys, ..) => keys.iter().all(is_hidden),
                Deleted::Prefix(root) => since < known.listed_after && is_deleted(root),
                Deleted::Namespace => since < known.listed_after && known.made_after_ms >= at_ms,
            }
        });
        if is_noted || self.is_known(known) {
            return true;
        }
        let deletions = &mut manifest.deletions;
        match &self.deleted {
            Deleted::Keys(keys) => deletions.add_keys(keys.iter().map(wide_fingerprint), delete),
            // The blocks are there, so none is hidden that is listed from now on.
            Deleted::Later(keys, ..) => {
                deletions.add_keys(keys.iter().map(wide_fingerprint), Delete { at_ms: 0, ..delete });
            }
            Deleted::Prefix(root) => {
                // What descends from it is not known here: a writer may have listed any of it.
                deletions.add_unknown(delete);
                deletions.add_keys([wide_fingerprint(root)], delete);
            }
            Deleted::Namespace => deletions.add_all(delete),
        }
        false
    }
}
