//! What an operator can do about a problem: where a repair is of no use, it is not advised.

use crate::findings::{self, Findings, Label};

/// Who can put a problem right.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Remedy {
    /// A repair, as far as what is good goes.
    Repair,
    /// The operator who replaces the device.
    Device,
    /// The operator who names all directories.
    Directories,
    /// The operator who starts the store.
    Start,
    /// The operator who takes the directory out.
    TakeOut,
    /// A user who may read the files.
    Access,
    /// A newer program.
    Newer,
}

const DEVICE: &[Label] = &[findings::MEDIA_ERROR];
const DIRECTORIES: &[Label] = &[findings::DIRECTORY_MISSING];
const START: &[Label] = &[findings::DIRECTORY_BEHIND];
const TAKE_OUT: &[Label] = &[findings::DIRECTORY_REPLACED];
const ACCESS: &[Label] = &[findings::FILE_UNREADABLE, findings::FOLDER_UNREADABLE];
/// Rows of the recovery table are known by their names alone.
const NEWER: &[&str] = &["segment-newer", "trailer-newer", "superblock-slot-newer", "checkpoint-newer"];

/// Who can put right what has this label.
pub fn remedy(label: &str) -> Remedy {
    let is_in = |labels: &[Label]| labels.iter().any(|one| one.name == label);
    if is_in(DEVICE) {
        Remedy::Device
    } else if is_in(DIRECTORIES) {
        Remedy::Directories
    } else if is_in(START) {
        Remedy::Start
    } else if is_in(TAKE_OUT) {
        Remedy::TakeOut
    } else if is_in(ACCESS) {
        Remedy::Access
    } else if NEWER.contains(&label) {
        Remedy::Newer
    } else {
        Remedy::Repair
    }
}

/// What to do where a repair is of no use, as a sentence; `None` for a repair.
pub fn advice(remedy: Remedy) -> Option<&'static str> {
    Some(match remedy {
        Remedy::Repair => return None,
        Remedy::Device => {
            "The device fails reads: read the log of the device (dmesg, smartctl), and replace the \
            device before any other step."
        }
        Remedy::Directories => {
            "Give all directories of the store, or mount the missing disk again; if the disk is lost, \
            `kvarts replace` puts an empty directory in its place."
        }
        Remedy::Start => {
            "Start the server with all directories: the server applies the missed deletes to this \
            directory. Check again when the server has stopped."
        }
        Remedy::TakeOut => {
            "Use the directory that replaced this directory; the content of this \
            directory can be deleted."
        }
        Remedy::Access => {
            "Files could not be opened: run this command as the user that owns the store, or look at the log \
            of the file system (dmesg)."
        }
        Remedy::Newer => "A newer program wrote part of the store: use a newer kvarts.",
    })
}

/// What is wanted and what was given, where not all directories of a store were.
pub fn missing_directories(findings: &Findings) -> Option<String> {
    let is_missing = |one: &&findings::Finding| one.label == findings::DIRECTORY_MISSING;
    let one = findings.problems.iter().find(is_missing)?;
    let (wanted, given) =
        (one.expected.as_deref().unwrap_or("more"), one.found.as_deref().unwrap_or("fewer"));
    Some(format!("the store has {wanted}, but only {given} was given: give all directories"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::{Finding, Place};

    #[test]
    fn labels_that_no_repair_can_help_are_labels() {
        for label in DEVICE
            .iter()
            .chain(DIRECTORIES)
            .chain(START)
            .chain(TAKE_OUT)
            .chain(ACCESS)
            .map(|label| label.name)
            .chain(NEWER.iter().copied())
        {
            assert!(findings::label(label).is_some(), "{label}");
            assert!(advice(remedy(label)).is_some(), "{label}");
        }
        assert_eq!(remedy("superblock-lost"), Remedy::Repair);
    }

    #[test]
    fn a_forgotten_directory_is_asked_for() {
        let mut found = Findings::default();
        assert_eq!(missing_directories(&found), None);
        let missing = Finding::at(findings::DIRECTORY_MISSING, Place::default());
        found.take(missing.expected("2 directories").found(1));
        let said = missing_directories(&found).unwrap();
        assert_eq!(said, "the store has 2 directories, but only 1 was given: give all directories");
    }
}
