//! The mark of a copy that is not finished, and starting over where one was interrupted.
//!
//! The mark is durable before anything else of a copy is made, and goes when all superblocks are durable. So a directory
//! with the mark and without a superblock holds no store, and what is in it may be removed.
//!
//! Invariants:
//! - Nothing is removed from a directory without the mark, and nothing but names that a copy makes: with any other name
//!   in it a directory is refused. A second checkpoint is such a name: a store that was used has it.
//! - A directory with mark and superblock is left alone, unless another one with the same mark has no superblock: then
//!   their store was never whole.
//! - The mark outlives everything that is removed.

use std::sync::Arc;

use kvarts_layout::StoreId;
use kvarts_layout::format::names::{FileName, SUPERBLOCK, UNFINISHED_COPY, shard_name};

use super::Refusal;
use crate::disk::{ALIGN, Aligned, Disk, DiskWriter, Node, NodeKind};

/// The superblock until it counts.
pub(super) const SUPERBLOCK_MADE: &str = "superblock.new";

/// A directory of the new store: to be looked at, to be written.
pub type Directory = (Arc<dyn Disk>, Arc<dyn DiskWriter>);

/// Names that may stand in an empty directory.
const HARMLESS: [&str; 2] = ["lock", "lost+found"];
/// Bytes of the mark that name the store: its id in hexadecimal.
const ID_BYTES: usize = 32;

/// What an interrupted copy left in a directory.
#[derive(Debug, Default)]
pub(super) struct Leftover {
    /// What the mark says, if there is one.
    mark: Option<Vec<u8>>,
    superblock: bool,
    shards: Vec<u32>,
    /// Files, by path.
    files: Vec<String>,
}

/// Refuses directories into which no store may be copied, all of them together: each must be empty, or hold what an
/// interrupted copy left. Changes nothing.
pub fn expect_free(disks: &[Arc<dyn Disk>]) -> Result<(), Refusal> {
    look(disks).map(drop)
}

/// What interrupted copies left in the directories of one that is about to be made.
pub(super) fn look(disks: &[Arc<dyn Disk>]) -> Result<Vec<Leftover>, Refusal> {
    let mut all = Vec::new();
    for disk in disks {
        all.push(Leftover::of(&**disk)?);
    }
    for (left, disk) in all.iter().zip(disks) {
        let interrupted =
            |other: &Leftover| !other.superblock && other.mark.is_some() && other.mark == left.mark;
        if left.superblock && !all.iter().any(interrupted) {
            return Err(not_empty(&**disk, SUPERBLOCK, "use an empty directory"));
        }
    }
    Ok(all)
}

fn not_empty(disk: &dyn Disk, name: &str, what: &str) -> Refusal {
    let name: String = name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    Refusal::Cannot(format!("{} is not empty, because it contains {name}: {what}", disk.name()))
}

impl Leftover {
    fn of(disk: &dyn Disk) -> Result<Self, Refusal> {
        let mut left = Self::default();
        let mut other = None;
        disk.visit("", &mut |node: Node| match (FileName::parse(&node.name), node.kind) {
            (Some(FileName::Shard(shard)), NodeKind::Folder) => left.shards.push(shard),
            (Some(FileName::Superblock), NodeKind::File) => left.superblock = true,
            (None, NodeKind::File) if node.name == SUPERBLOCK_MADE => left.files.push(node.name),
            (None, NodeKind::File) if node.name == UNFINISHED_COPY => left.mark = Some(Vec::new()),
            (None, _) if HARMLESS.contains(&node.name.as_str()) => {}
            _ => drop(other.get_or_insert(node.name)),
        })?;
        if left.mark.is_some() {
            left.mark = Some(read_mark(disk)?);
        } else {
            let shard = left.shards.first().map(|shard| shard_name(*shard));
            other = left.superblock.then(|| SUPERBLOCK.to_owned()).or(other).or(shard);
            other = other.or(left.files.first().cloned());
        }
        for &shard in &left.shards {
            let folder = shard_name(shard);
            disk.visit(&folder, &mut |node: Node| {
                let path = format!("{folder}/{}", node.name);
                match (FileName::parse(&node.name), node.kind) {
                    (Some(FileName::Segment(_) | FileName::Checkpoint(0)), NodeKind::File) => {
                        left.files.push(path);
                    }
                    _ => drop(other.get_or_insert(path)),
                }
            })?;
        }
        match other {
            None => Ok(left),
            Some(name) if left.mark.is_some() => Err(not_empty(
                disk,
                &name,
                "the file does not belong to the interrupted copy: move the file away first",
            )),
            Some(name) => Err(not_empty(disk, &name, "use an empty directory")),
        }
    }

    fn is_nothing(&self) -> bool {
        self.mark.is_none() && !self.superblock && self.shards.is_empty() && self.files.is_empty()
    }
}

fn read_mark(disk: &dyn Disk) -> Result<Vec<u8>, Refusal> {
    let mut page = Aligned::new(ALIGN);
    let read = disk.open(UNFINISHED_COPY)?.read_at(page.bytes_mut(), 0)?;
    Ok(page.bytes().get(..read.min(ID_BYTES)).unwrap_or_default().to_vec())
}

/// Removes what an interrupted copy left, and marks the directories for the next one. Durable when it returns.
pub(super) fn begin(
    directories: &[Directory],
    leftovers: &[Leftover],
    store: StoreId,
) -> Result<(), Refusal> {
    for ((_, writer), left) in directories.iter().zip(leftovers) {
        if left.is_nothing() {
            continue;
        }
        if left.superblock {
            // First of all: without it the rest is not taken for a store.
            writer.remove(SUPERBLOCK)?;
            writer.sync_folder("")?;
        }
        for path in &left.files {
            writer.remove(path)?;
        }
        for shard in &left.shards {
            writer.remove_folder(&shard_name(*shard))?;
        }
        writer.sync_folder("")?;
    }
    let text = format!(
        "{store}\n`kvarts compact --to` was creating a store here and did not finish: run the command \
        again, or delete this directory.\n"
    );
    for (_, writer) in directories {
        writer.write_at(UNFINISHED_COPY, 0, text.as_bytes())?;
        writer.set_len(UNFINISHED_COPY, text.len() as u64)?;
        writer.sync(UNFINISHED_COPY)?;
        writer.sync_folder("")?;
    }
    Ok(())
}

/// Takes the marks away, when all superblocks are durable.
pub(super) fn end(directories: &[Directory]) -> Result<(), Refusal> {
    for (_, writer) in directories {
        writer.remove(UNFINISHED_COPY)?;
        writer.sync_folder("")?;
    }
    Ok(())
}

/// Whether a copy into the directory was interrupted.
pub fn is_unfinished(disk: &dyn Disk) -> bool {
    disk.open(UNFINISHED_COPY).is_ok() && disk.open(SUPERBLOCK).is_err()
}
