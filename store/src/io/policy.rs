//! What the engine does about a failed operation: one function, so that there is one answer.

use kvarts_contract::io_error::{IoError, IoErrorKind};

/// What the operation was for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Reading bytes of stored blocks, or of footers and checkpoints.
    Read,
    /// Writing bytes of a put (headers included) into a segment.
    PutData,
    /// Making written bytes durable: a flush, or a write that is durable itself.
    PutFlush,
    /// Writing or flushing what the store itself lives on: superblock, checkpoint, names.
    Metadata,
    /// Giving space back: punching, truncating, removing.
    Reclaim,
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The blocks in question are a typed miss; the segment stays in use.
    Miss,
    /// The blocks in question are a typed miss, and the segment is listed for scrubbing.
    MissAndScrub,
    /// Seal the segment as suspect, write what it had not acknowledged elsewhere, never flush it again.
    SealSuspect,
    /// Try again after a while where the same may be done twice; if that does not help, refuse it for now. Nothing is wrong
    /// with the disk.
    NotNow,
    /// Refuse the put (or postpone the checkpoint) with "no space"; everything else goes on.
    RefuseNoSpace,
    /// Take no more puts until an operator had a look; reads go on.
    LatchReadOnly,
    /// Leave it for later: nothing is lost by not having done it.
    Postpone,
}

/// What the engine does about `error`, which met it in `stage`.
pub fn decide(error: &IoError, stage: Stage) -> Action {
    use IoErrorKind::{Deadline, NoSpace, Passing, Permission, ReadOnlyFs};
    match (stage, error.kind) {
        // A cache may miss. Time or memory that ran out says nothing about the bytes; everything else may mean that they are
        // gone, which scrubbing will tell. A file that ends early is damage too: what is read was written once.
        (Stage::Read, Deadline | Passing) => Action::Miss,
        (Stage::Read, _) => Action::MissAndScrub,

        // Full is not broken: nothing was written beyond what the completion said, eviction makes room, and an
        // engine that stops at ENOSPC takes a node down for want of a cache. In a flush, though, it means that
        // bytes already accepted were dropped (delayed allocation, quotas on network mounts): the next flush of the
        // same file would report success over a hole.
        (Stage::PutData, NoSpace) => Action::RefuseNoSpace,
        (Stage::PutFlush, NoSpace) => Action::SealSuspect,
        (Stage::Metadata, NoSpace) => Action::RefuseNoSpace,

        // No descriptor, no memory, an interruption: the disk was not even asked. Only of a flush it is not known what it
        // did before it was interrupted, and none is repeated: below.
        (Stage::PutData | Stage::Metadata, Passing) if !kvarts_layout::planted!("shortage-latches") => {
            Action::NotNow
        }

        // The file system has stopped taking writes: another segment on it will not do better. Ext4 gets there
        // after a failed flush, when it aborts its journal.
        (Stage::PutData | Stage::PutFlush | Stage::Metadata | Stage::Reclaim, ReadOnlyFs) => {
            Action::LatchReadOnly
        }
        (Stage::PutData | Stage::Metadata, Permission) => Action::LatchReadOnly,

        // After a failed write or flush the kernel may have marked the pages clean, so a second flush would succeed
        // without the bytes; with direct I/O the device may have dropped its cache. Therefore a flush is never
        // repeated: records without an acknowledgement are written again, elsewhere. A flush that did not end in time is
        // the same, for it may yet fail when no task listens.
        (Stage::PutData | Stage::PutFlush, _) => Action::SealSuspect,

        // Without these the store cannot say what it holds; what is on disk is still whole, so reads go on.
        (Stage::Metadata, _) => Action::LatchReadOnly,

        // Space that was not given back is counted as used, and reclaim comes by again.
        (Stage::Reclaim, _) => Action::Postpone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::io_error::FileId;
    use kvarts_contract::io_error::{OpKind, Subject};

    const KINDS: [IoErrorKind; 11] = [
        IoErrorKind::Eof,
        IoErrorKind::NoSpace,
        IoErrorKind::ReadOnlyFs,
        IoErrorKind::Permission,
        IoErrorKind::NotFound,
        IoErrorKind::Exists,
        IoErrorKind::Media,
        IoErrorKind::Deadline,
        IoErrorKind::Unsupported,
        IoErrorKind::Passing,
        IoErrorKind::Other(22),
    ];

    fn act(kind: IoErrorKind, stage: Stage) -> Action {
        let subject = Subject::File(FileId(0));
        decide(&IoError { kind, op: OpKind::Write, subject, offset: 0, len: 1, errno: 5 }, stage)
    }

    #[test]
    fn a_failed_read_is_a_miss_whatever_the_reason() {
        for kind in KINDS {
            let passes = matches!(kind, IoErrorKind::Deadline | IoErrorKind::Passing);
            let expected = if passes { Action::Miss } else { Action::MissAndScrub };
            assert_eq!(act(kind, Stage::Read), expected, "{kind:?}");
        }
    }

    #[test]
    fn no_failed_flush_leaves_its_segment_in_use() {
        for kind in KINDS {
            let action = act(kind, Stage::PutFlush);
            assert!(matches!(action, Action::SealSuspect | Action::LatchReadOnly), "{kind:?} {action:?}");
        }
        assert_eq!(act(IoErrorKind::NoSpace, Stage::PutFlush), Action::SealSuspect);
    }

    #[test]
    fn a_full_disk_stops_neither_puts_elsewhere_nor_the_store() {
        assert_eq!(act(IoErrorKind::NoSpace, Stage::PutData), Action::RefuseNoSpace);
        assert_eq!(act(IoErrorKind::NoSpace, Stage::Metadata), Action::RefuseNoSpace);
        assert_eq!(act(IoErrorKind::NoSpace, Stage::Reclaim), Action::Postpone);
    }

    #[test]
    fn what_is_not_the_disks_latches_nothing() {
        let stages = [Stage::Read, Stage::PutData, Stage::PutFlush, Stage::Metadata, Stage::Reclaim];
        let actions = stages.map(|stage| act(IoErrorKind::Passing, stage));
        let expected = [Action::Miss, Action::NotNow, Action::SealSuspect, Action::NotNow, Action::Postpone];
        assert_eq!(actions, expected);
    }

    #[test]
    fn a_media_error_while_writing_seals_the_segment_and_a_read_only_file_system_latches_the_store() {
        assert_eq!(act(IoErrorKind::Media, Stage::PutData), Action::SealSuspect);
        assert_eq!(act(IoErrorKind::Media, Stage::Metadata), Action::LatchReadOnly);
        for stage in [Stage::PutData, Stage::PutFlush, Stage::Metadata, Stage::Reclaim] {
            assert_eq!(act(IoErrorKind::ReadOnlyFs, stage), Action::LatchReadOnly);
        }
    }
}
