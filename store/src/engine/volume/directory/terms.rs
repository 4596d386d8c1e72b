//! Beginning a term: another set of directories is in use than before (`format::members`).
//!
//! The term is proposed to each of them, durably, and when it is in all, each takes it, durably. A directory that cannot be
//! written is lost, and the others begin again.

use std::collections::BTreeMap;
use std::pin::pin;

use kvarts_layout::format::PAGE;
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::superblock::{Chosen, Superblock};

use super::making::encoded;
use super::{ANSWER_WITHIN, Way, refused, superblock_name};
use crate::engine::shared::Shared;
use crate::engine::tasks::notify::with_deadline;
use crate::io::{MetaOp, OpenMode};
use kvarts_contract::class::Class;
use kvarts_contract::error::{DirectoryCause, Reason};
use kvarts_contract::io_error::DirId;

/// Has the directories in use begin a term, if it takes one and they are enough, and lets deletes be acknowledged again.
pub(crate) async fn settle(way: &Way<'_>, shared: &Shared) {
    loop {
        let (mut superblocks, members) = shared.directories.superblocks();
        let may_begin = members.may_delete();
        if may_begin && !members.is_settled() {
            let next = members.next(u32::try_from(superblocks.len()).unwrap_or(u32::MAX));
            let begun = match round((way, shared), &mut superblocks, |known| known.propose(&next)).await {
                Ok(()) => round((way, shared), &mut superblocks, |_| next).await,
                lost => lost,
            };
            if let Err((dir, why)) = begun {
                shared.lose(dir, &why.to_string(), false);
                continue;
            }
        }
        // Where another one was lost meanwhile, once more.
        if shared.directories.settle(superblocks, may_begin) {
            return;
        }
    }
}

/// Writes what each directory knows then, one after the other: a power cut leaves some of them with it.
async fn round(
    (way, shared): (&Way<'_>, &Shared),
    superblocks: &mut BTreeMap<DirId, Chosen>,
    knows: impl Fn(Membership) -> Membership,
) -> Result<(), (DirId, Reason)> {
    for (&dir, chosen) in superblocks {
        let membership = knows(chosen.superblock.membership);
        *chosen = write_next(way, dir, chosen, membership).await.map_err(|why| (dir, why))?;
        shared.directories.note(dir, chosen);
    }
    Ok(())
}

/// Writes what a directory knows from now on. Gives its superblocks as they are then.
pub(super) async fn write_next(
    way: &Way<'_>,
    dir: DirId,
    known: &Chosen,
    membership: Membership,
) -> Result<Chosen, Reason> {
    let sequence = known.superblock.sequence.saturating_add(1);
    let superblock = Superblock { sequence, membership, ..known.superblock.clone() };
    let (slot, other) = (1 - known.slot.min(1), Ok(known.superblock.sequence));
    let deadline = Some(way.rt.sleep_until(way.rt.clock().now().plus(ANSWER_WITHIN)));
    let written = with_deadline(pin!(write(way, dir, &superblock, slot)), deadline).await;
    written.unwrap_or(Err(Reason::Directory(DirectoryCause::Silent(dir.0))))?;
    Ok(Chosen { other, slot, superblock })
}

/// Writes a state into the slot that does not hold the one before.
async fn write(way: &Way<'_>, dir: DirId, state: &Superblock, slot: u32) -> Result<(), Reason> {
    let image = encoded(state, slot)?;
    let mode = OpenMode { write: true, create: false, direct: true };
    let file = way.driver.open(superblock_name(dir), mode).await.map_err(|error| refused(&error))?;
    let page = way.arena(dir).take(PAGE).await;
    let mut page = page.ok_or(Reason::Bug("the memory of the executor is smaller than a page"))?;
    page.copy_in(0, &image);
    let written = way.driver.write(Class::Put, file, u64::from(slot) * PAGE as u64, page, true).await;
    let _ = way.driver.meta(MetaOp::Close { file }).await;
    written.map_err(|error| refused(&error))
}
