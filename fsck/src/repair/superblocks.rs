//! Rewrites superblock slots: from the other slot, or from what folders and segments prove.

use kvarts_layout::format::members::Membership;
use kvarts_layout::format::names::SUPERBLOCK;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::{PAGE_BYTES, Unsound, VERSION};

use super::{Action, Knowledge, Site};
use crate::disk::DiskWriter;
use crate::store::Store;

/// Makes both slots of every directory good, and the folders of its shards be there.
pub(super) fn fix(sites: &[Site], store: &Store, knowledge: &Knowledge, log: &mut Vec<Action>) {
    for (at, (site, directory)) in sites.iter().zip(&store.directories).enumerate() {
        match &directory.superblock {
            Some(chosen) => match &chosen.other {
                Ok(_) => {}
                Err(Unsound::Newer { .. }) => {
                    site.cannot(
                        log,
                        SUPERBLOCK,
                        "a newer program wrote one slot: repair the store with that program",
                    );
                }
                Err(_) => {
                    let slot = 1 - chosen.slot.min(1);
                    write(site, &chosen.superblock, &[slot], log);
                }
            },
            None if store.shards.iter().any(|shard| shard.directory == at) => {
                match made_again(store, at, knowledge) {
                    Some(superblock) => write(site, &superblock, &[0, 1], log),
                    None => site.cannot(
                        log,
                        SUPERBLOCK,
                        "the shards in this directory do not identify the directory: give all directories",
                    ),
                }
            }
            None => {}
        }
    }
    for shard in store.shards.iter().filter(|shard| !shard.is_there) {
        let Some(site) = sites.get(shard.directory) else { continue };
        let folder = kvarts_layout::format::names::shard_name(shard.number);
        site.act(log, (&folder, "an empty folder for the shard is created".to_owned()), |writer| {
            writer.make_folder(&folder)?;
            writer.sync_folder("")
        });
    }
}

fn write(site: &Site, superblock: &Superblock, slots: &[u32], log: &mut Vec<Action>) {
    let what = format!(
        "superblock slot {} is rewritten",
        slots.iter().map(u32::to_string).collect::<Vec<_>>().join(" and ")
    );
    site.act(log, (SUPERBLOCK, what), |writer| {
        for &slot in slots {
            write_slot(writer, superblock, slot)?;
        }
        writer.sync_folder("")
    });
}

fn write_slot(writer: &dyn DiskWriter, superblock: &Superblock, slot: u32) -> std::io::Result<()> {
    let image = superblock.encode(slot).map_err(std::io::Error::other)?;
    writer.write_at(SUPERBLOCK, u64::from(slot).saturating_mul(PAGE_BYTES), &image)?;
    writer.sync(SUPERBLOCK)
}

/// The superblock of a directory that has lost both slots, where what is left leaves no choice.
fn made_again(store: &Store, at: usize, knowledge: &Knowledge) -> Option<Superblock> {
    let here = |index: usize| -> Vec<u32> {
        store.shards.iter().filter(|shard| shard.directory == index).map(|shard| shard.number).collect()
    };
    let others: Vec<&Superblock> = store
        .directories
        .iter()
        .filter_map(|directory| directory.superblock.as_ref().map(|chosen| &chosen.superblock))
        .collect();
    let shards = here(at);
    let all: Vec<u32> = store.shards.iter().map(|shard| shard.number).collect();
    let shards_total = u32::try_from(all.len()).ok()?;
    if !all.iter().copied().eq(0..shards_total) {
        return None;
    }
    let given = u32::try_from(store.directories.len()).ok()?;
    let (directory, created_ms) = match others.first() {
        None if given == 1 => (0, knowledge.created_ms?),
        Some(other) if other.directories == given && other.shards_total == shards_total => {
            let mut free = (0..given).filter(|number| others.iter().all(|other| other.directory != *number));
            let only = free.next()?;
            if free.next().is_some() {
                return None;
            }
            (only, other.created_ms)
        }
        _ => return None,
    };
    Some(Superblock {
        store: store.keyring.store,
        directory,
        sequence: 1,
        secret: store.keyring.secret.clone(),
        created_ms,
        segment_bytes: store.keyring.segment_bytes,
        min_reader: VERSION,
        clean: false,
        directories: given,
        shards_total,
        shards,
        // Behind the others: what they know to be deleted it is told at the next start.
        membership: Membership::default(),
    })
}
