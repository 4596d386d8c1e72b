//! Compaction into a new store: everything live, spread over as many shards and directories as are wanted.
//!
//! The new store has an id and a secret of its own. Its superblocks get their names last, when everything else is
//! durable: a power cut before leaves directories that no engine takes for a store, and the old one as it was. Until
//! then they have a mark that says so, see [`super::unfinished`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvarts_layout::StoreId;
use kvarts_layout::format::members::Membership;
use kvarts_layout::format::names::{SUPERBLOCK, shard_name};
use kvarts_layout::format::superblock::{MAX_SHARDS, MAX_SHARDS_PER_DIRECTORY, Superblock};
use kvarts_layout::format::{PAGE_BYTES, Secret, VERSION};

use super::discard::Discard;
use super::graves::Graves;
use super::inventory::{Inventory, Role};
use super::plan::Plan;
use super::sink::{Sink, Start, Statement, write_checkpoint};
use super::source::{Reader, shard_of};
use super::unfinished::{self, Directory, SUPERBLOCK_MADE};
use super::{Options, Progress, Refusal, Report};
use crate::segment::Keyring;
use crate::store::Store;

/// Where a store goes.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its directories: empty, or with what an interrupted copy left, which is removed.
    pub directories: Vec<Directory>,
    /// Its shards in all.
    pub shards: u32,
    /// Its id, drawn at random.
    pub store: StoreId,
    /// Its secret, drawn at random.
    pub secret: [u8; 32],
}

impl Target {
    /// Which shards lie in a directory, or why there are too many or too few.
    fn spread(&self) -> Result<Vec<Vec<u32>>, Refusal> {
        let directories = u32::try_from(self.directories.len()).unwrap_or(u32::MAX);
        let each = self.shards.div_ceil(directories.max(1)) as usize;
        if directories == 0
            || self.shards < directories
            || self.shards > MAX_SHARDS
            || each > MAX_SHARDS_PER_DIRECTORY
        {
            return Err(Refusal::Cannot(format!(
                "the store has {} shards, which cannot be divided among {directories} directories: each \
                directory takes 1 to {MAX_SHARDS_PER_DIRECTORY} shards",
                self.shards
            )));
        }
        let place =
            |shard: u32| u64::from(shard).saturating_mul(u64::from(directories)) / u64::from(self.shards);
        let all = |directory: u64| (0..self.shards).filter(|shard| place(*shard) == directory).collect();
        Ok((0..u64::from(directories)).map(all).collect())
    }
}

/// Compacts a sound store into a new one.
pub fn elsewhere(
    store: &Store,
    target: &Target,
    options: &Options,
    progress: &Progress,
) -> Result<Report, Refusal> {
    let spread = target.spread()?;
    let disks: Vec<_> = target.directories.iter().map(|(disk, _)| Arc::clone(disk)).collect();
    let leftovers = unfinished::look(&disks)?;
    let segment_bytes = store.keyring.segment_bytes;
    let inventory = Inventory::take(store, options.now_ms, options.threads)?;
    let mut report = Report::of(&inventory, options, segment_bytes);
    let stays = inventory.segments.iter().find(|one| one.role == Role::Fixed && one.live_bytes > 0);
    if let Some(segment) = stays {
        let path = super::inventory::path(store, segment);
        return Err(Refusal::Cannot(format!(
            "{path} has records that this program cannot rewrite: use a newer kvarts"
        )));
    }
    let plan = Plan::everything(&inventory, options, segment_bytes);
    progress.planned.store(plan.bytes, Ordering::Relaxed);
    report.records_merged = plan.merged;
    let pretend = |(disk, _): &Directory| -> Directory { (Arc::clone(disk), Arc::new(Discard)) };
    let pretended =
        Target { directories: target.directories.iter().map(pretend).collect(), ..target.clone() };
    let target = if options.dry_run { &pretended } else { target };
    unfinished::begin(&target.directories, &leftovers, target.store)?;
    let keyring = Keyring { store: target.store, secret: Secret::new(target.secret), segment_bytes };
    let mut sinks = Vec::new();
    for ((_, writer), shards) in target.directories.iter().zip(&spread) {
        for &shard in shards {
            writer.make_folder(&shard_name(shard))?;
            sinks.push((
                Arc::clone(writer),
                Sink::new(
                    Arc::clone(writer),
                    &keyring,
                    Start { shard, next_number: 0, sequence: 1 },
                    options.now_ms,
                ),
            ));
        }
        writer.sync_folder("")?;
    }
    let mut reader = Reader::new(store, &inventory, options)?;
    for group in &plan.groups {
        let made = reader.make(&plan, group)?;
        report.count(&made);
        let shard = made.blocks.blocks.first().map_or(0, |name| shard_of(&name.key, target.shards));
        let Some((_, sink)) = sinks.get_mut(shard as usize) else { continue };
        let before = sink.bytes_written;
        sink.write(&inventory.spaces, made)?;
        progress.add(sink.bytes_written.saturating_sub(before));
    }
    for (shard, (writer, sink)) in (0u32..).zip(&mut sinks) {
        sink.seal()?;
        let statement = Statement {
            segments: sink.sealed.clone(),
            records: std::mem::take(&mut sink.records),
            graves: &Graves::default(),
            next_sequence: sink.sequence,
        };
        let position = keyring.position(shard, 0).under(1);
        write_checkpoint(&**writer, &keyring, position, options.now_ms, statement)?;
        report.bytes_written = report.bytes_written.saturating_add(sink.bytes_written);
        report.segments_after = report.segments_after.saturating_add(sink.sealed.len() as u64);
    }
    report.bytes_read = reader.bytes_read;
    superblocks(target, &keyring, spread, options.now_ms)?;
    unfinished::end(&target.directories)?;
    Ok(report)
}

/// Makes a store of what lies there.
fn superblocks(
    target: &Target,
    keyring: &Keyring,
    spread: Vec<Vec<u32>>,
    now_ms: u64,
) -> Result<(), Refusal> {
    let directories = u32::try_from(spread.len()).unwrap_or(u32::MAX);
    for (directory, ((_, writer), shards)) in (0u32..).zip(target.directories.iter().zip(spread)) {
        let superblock = Superblock {
            store: keyring.store,
            directory,
            sequence: 1,
            secret: keyring.secret.clone(),
            created_ms: now_ms,
            segment_bytes: keyring.segment_bytes,
            min_reader: VERSION,
            clean: false,
            directories,
            shards_total: target.shards,
            shards,
            membership: Membership::default(),
        };
        // Whole under another name first: an engine takes an empty superblock for a directory of its own to use.
        for slot in 0..2u32 {
            let image = superblock.encode(slot);
            let image =
                image.map_err(|error| Refusal::Cannot(format!("a superblock cannot be written: {error}")))?;
            writer.write_at(SUPERBLOCK_MADE, u64::from(slot).saturating_mul(PAGE_BYTES), &image)?;
        }
        writer.sync(SUPERBLOCK_MADE)?;
    }
    for (_, writer) in &target.directories {
        writer.rename(SUPERBLOCK_MADE, SUPERBLOCK)?;
        writer.sync_folder("")?;
    }
    Ok(())
}
