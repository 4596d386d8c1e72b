//! Moves aside what does not belong where it lies, and back what does.

use std::io;

use kvarts_layout::format::names::{FileName, segment_name, shard_name};
use kvarts_layout::format::segment::SegmentHeader;
use kvarts_layout::format::{PAGE, PAGE_BYTES};

use super::{Action, Site};
use crate::disk::{Disk, DiskWriter, NodeKind};
use crate::store::{QUARANTINE, Store};
use crate::window::{Tally, Window};

/// Files of one name that are kept in quarantine.
const NAMES_MAX: u32 = 10_000;

/// Moves one name into quarantine, under a name that says where it was.
pub(super) fn set_aside(site: &Site, path: &str, why: &str, log: &mut Vec<Action>) -> bool {
    site.act(log, (path, format!("is moved into {QUARANTINE}: {why}")), |writer| {
        writer.make_folder(QUARANTINE)?;
        let flat = path.replace('/', ".");
        for number in 0..NAMES_MAX {
            let name = if number == 0 { flat.clone() } else { format!("{flat}.{number}") };
            match writer.rename(path, &format!("{QUARANTINE}/{name}")) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(()) => return settle(writer, path),
            }
        }
        Err(io::Error::other(
            "the quarantine has too many files of this name: remove files from the \
            quarantine",
        ))
    })
}

/// Makes the names durable: where it is first, then where it was.
fn settle(writer: &dyn DiskWriter, path: &str) -> io::Result<()> {
    writer.sync_folder(QUARANTINE)?;
    writer.sync_folder("")?;
    match path.rsplit_once('/') {
        Some((folder, _)) => writer.sync_folder(folder),
        None => Ok(()),
    }
}

/// Sets aside names of the format that are no files, and folders of shards that are not the directory's.
pub(super) fn odd_names(sites: &[Site], log: &mut Vec<Action>) {
    for site in sites {
        let mut odd = Vec::new();
        let mut shards = Vec::new();
        let visit = |folder: &str, odd: &mut Vec<(String, &'static str)>, shards: &mut Vec<u32>| {
            // A folder that cannot be listed is reported by the check.
            let _ = site.disk.visit(folder, &mut |node| {
                let path =
                    if folder.is_empty() { node.name.clone() } else { format!("{folder}/{}", node.name) };
                match (FileName::parse(&node.name), node.kind, folder.is_empty()) {
                    (Some(FileName::Shard(shard)), NodeKind::Folder, true) => shards.push(shard),
                    (Some(FileName::Superblock), NodeKind::File, true) => {}
                    (Some(FileName::Segment(_) | FileName::Checkpoint(_)), NodeKind::File, false) => {}
                    (Some(FileName::Shard(_) | FileName::Superblock), _, true)
                    | (Some(FileName::Segment(_) | FileName::Checkpoint(_)), _, false) => {
                        odd.push((path, "the path is not a regular file"));
                    }
                    _ => {}
                }
            });
        };
        visit("", &mut odd, &mut shards);
        let expected = crate::superblock::read(&*site.disk, &mut Default::default());
        for shard in shards {
            let folder = shard_name(shard);
            match &expected {
                crate::superblock::Seen::Sound(chosen) if !chosen.superblock.shards.contains(&shard) => {
                    odd.push((folder, "this directory has no shard of this number"));
                }
                _ => visit(&folder, &mut odd, &mut Vec::new()),
            }
        }
        for (path, why) in odd {
            set_aside(site, &path, why, log);
        }
    }
}

/// Moves segments in quarantine that prove where they belong back to that place, if nothing is there.
pub(super) fn restore(sites: &[Site], store: &Store, moved: &[(u32, u32)], log: &mut Vec<Action>) {
    for (at, site) in sites.iter().enumerate() {
        let mut files = Vec::new();
        // There is no such folder where nothing was ever set aside.
        let _ = site.disk.visit(QUARANTINE, &mut |node| {
            if node.kind == NodeKind::File {
                files.push(format!("{QUARANTINE}/{}", node.name));
            }
        });
        files.sort();
        let mut taken = Vec::new();
        for path in files {
            let Some((shard, segment)) = home_of(&*site.disk, &path, store) else { continue };
            let home =
                store.shards.iter().find(|one| one.number == shard && one.directory == at && one.is_there);
            let Some(home) = home else { continue };
            let is_free = home.segments.binary_search(&segment).is_err() || moved.contains(&(shard, segment));
            if !is_free || taken.contains(&(shard, segment)) {
                continue;
            }
            let target = format!("{}/{}", shard_name(shard), segment_name(segment));
            let done = site.act(
                log,
                (&path, format!("is moved back to {target}, because no file has that name")),
                |writer| {
                    writer.rename(&path, &target)?;
                    writer.sync_folder(&shard_name(shard))?;
                    writer.sync_folder(QUARANTINE)
                },
            );
            if done {
                taken.push((shard, segment));
            }
        }
    }
}

/// Where a file's header proves that it belongs.
fn home_of(disk: &dyn Disk, path: &str, store: &Store) -> Option<(u32, u32)> {
    let file = disk.open(path).ok()?;
    if file.len() != store.keyring.segment_bytes {
        return None;
    }
    let tally = Tally::default();
    let mut window = Window::new(&*file, PAGE_BYTES, &tally);
    let page = window.bytes(0, PAGE);
    let claimed = kvarts_layout::format::seal::claimed_position(page)?;
    let keyring = &store.keyring;
    let place = keyring.position(claimed.shard, claimed.segment);
    let header = SegmentHeader::decode_any_generation(page, &place, &keyring.secret).ok()?;
    (header.segment_bytes == keyring.segment_bytes).then_some((claimed.shard, claimed.segment))
}
