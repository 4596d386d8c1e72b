//! The superblock of one directory: which slot counts, what the other one is, and what may be done without either.

use std::io;

use kvarts_layout::format::names::SUPERBLOCK;
use kvarts_layout::format::superblock::{Chosen, FILE_BYTES, PairUnsound, Superblock};
use kvarts_layout::format::{PAGE, Unsound};

use crate::disk::{Aligned, Disk};
use crate::findings::{self, Finding, Findings};

/// What a directory's superblock says.
#[allow(clippy::large_enum_variant, reason = "there is only one value for each directory of a store")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// It can be used.
    Sound(Chosen),
    /// There is no such file.
    Absent,
    /// There is one and nothing was ever written into it, or less than a slot.
    Blank,
    /// Nothing in it can be used.
    Lost,
    /// Only a newer program may open the store.
    Newer(u16),
    /// It was written before the format was frozen.
    Older(u16),
    /// It cannot be opened.
    Unreadable(String),
}

/// Reads the superblock of a directory; what is wrong with it goes into the findings.
pub fn read(disk: &dyn Disk, into: &mut Findings) -> Seen {
    let file = match disk.open(SUPERBLOCK) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Seen::Absent,
        Err(error) => return Seen::Unreadable(error.to_string()),
    };
    let mut memory = Aligned::new(FILE_BYTES);
    let mut read = 0usize;
    for (at, page) in (0u64..).step_by(PAGE).zip(memory.bytes_mut().chunks_mut(PAGE)) {
        match file.read_at(page, at) {
            Ok(bytes) => read = read.saturating_add(bytes),
            Err(error) => {
                // Not zero, and no slot.
                page.fill(0xee);
                read = read.saturating_add(PAGE);
                let finding = Finding::of(findings::MEDIA_ERROR, path(disk)).found(error);
                into.take(Finding {
                    place: findings::Place { offset: Some(at), ..Default::default() },
                    ..finding
                });
            }
        }
    }
    let bytes = memory.bytes().get(..read).unwrap_or_default();
    let seen = judge(disk, bytes, into);
    if file.len() > FILE_BYTES as u64 {
        into.take(Finding::of(findings::SUPERBLOCK_TOO_LONG, path(disk)).found(file.len()));
    }
    if bytes.len() < FILE_BYTES && matches!(seen, Seen::Sound(_) | Seen::Lost) {
        let finding = Finding::of(findings::SUPERBLOCK_TRUNCATED, path(disk));
        into.take(finding.expected(FILE_BYTES).found(bytes.len()));
    }
    seen
}

fn path(disk: &dyn Disk) -> String {
    format!("{}/{SUPERBLOCK}", disk.name())
}

fn judge(disk: &dyn Disk, bytes: &[u8], into: &mut Findings) -> Seen {
    let whole = bytes.len() >= FILE_BYTES;
    match Superblock::decode_pair(bytes, None) {
        Ok(chosen) => {
            if let Err(other) = &chosen.other {
                about_other(disk, &chosen, other, whole, into);
            }
            Seen::Sound(chosen)
        }
        Err(PairUnsound::Conflict) => {
            into.take(Finding::of(findings::SUPERBLOCK_CONFLICT, path(disk)));
            Seen::Lost
        }
        Err(PairUnsound::Both(first, second)) => {
            let slots = [&first, &second];
            if let Some(seen) = slots.iter().find_map(|slot| of_another_version(slot)) {
                return seen;
            }
            let blank = bytes.iter().all(|byte| *byte == 0);
            if blank {
                return Seen::Blank;
            }
            into.take(Finding::of(findings::SUPERBLOCK_LOST, path(disk)).found(format!("{first}; {second}")));
            Seen::Lost
        }
    }
}

fn of_another_version(unsound: &Unsound) -> Option<Seen> {
    match unsound {
        Unsound::Newer { version } => Some(Seen::Newer(*version)),
        Unsound::Older { version } => Some(Seen::Older(*version)),
        _ => None,
    }
}

fn about_other(disk: &dyn Disk, chosen: &Chosen, other: &Unsound, whole: bool, into: &mut Findings) {
    let slot = 1 - chosen.slot.min(1);
    let label = match other {
        // Reported as the length that is missing.
        _ if !whole && slot == 1 => return,
        Unsound::Newer { .. } => findings::SUPERBLOCK_SLOT_NEWER,
        // Slot 0 is written first, and the second state goes into slot 1.
        Unsound::Empty if slot == 1 && chosen.superblock.sequence <= 1 => findings::SUPERBLOCK_ONE_SLOT,
        Unsound::Empty => findings::SUPERBLOCK_SLOT_LOST,
        _ => findings::SUPERBLOCK_SLOT_DAMAGED,
    };
    let place = findings::Place { offset: Some(u64::from(slot) * PAGE as u64), ..Default::default() };
    into.take(Finding { place, ..Finding::of(label, path(disk)).found(other) });
}
