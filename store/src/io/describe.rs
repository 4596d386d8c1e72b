//! What an operation on names and files is called in an error.

use kvarts_contract::io_error::{Name, OpKind, Subject};

use super::MetaOp;

/// Which operation a [`MetaOp`] is, on what, from where, over how many bytes.
pub(crate) fn describe(op: &MetaOp) -> (OpKind, Subject, u64, u64) {
    let name = |name: &Name| Subject::Name(Box::new(name.clone()));
    let home = |dir| Subject::Name(Box::new(Name { dir, path: Box::default() }));
    match op {
        MetaOp::Open { name: what, .. } => (OpKind::Open, name(what), 0, 0),
        MetaOp::Close { file } => (OpKind::Close, Subject::File(*file), 0, 0),
        MetaOp::Allocate { file, offset, len } => (OpKind::Allocate, Subject::File(*file), *offset, *len),
        MetaOp::PunchHole { file, offset, len } => (OpKind::PunchHole, Subject::File(*file), *offset, *len),
        MetaOp::Truncate { file, len } => (OpKind::Truncate, Subject::File(*file), *len, 0),
        MetaOp::Rename { from, .. } => (OpKind::Rename, name(from), 0, 0),
        MetaOp::Remove { name: what } => (OpKind::Remove, name(what), 0, 0),
        MetaOp::MakeDir { name: what } => (OpKind::MakeDir, name(what), 0, 0),
        MetaOp::SyncDir { name: what } => (OpKind::SyncDir, name(what), 0, 0),
        MetaOp::List { name: what } => (OpKind::List, name(what), 0, 0),
        MetaOp::Stat { file } => (OpKind::Stat, Subject::File(*file), 0, 0),
        MetaOp::Holes { file, .. } => (OpKind::Holes, Subject::File(*file), 0, 0),
        MetaOp::Space { dir } => (OpKind::Space, home(*dir), 0, 0),
        MetaOp::Reopen { dir } => (OpKind::Open, home(*dir), 0, 0),
        MetaOp::Compute { dir, .. } => (OpKind::Compute, home(*dir), 0, 0),
    }
}
