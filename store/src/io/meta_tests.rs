//! Operations on names and files, on a real directory.

use super::*;
use crate::io::scratch::Scratch;

fn meta(scratch: &Scratch) -> Meta {
    Meta::new(&[scratch.path().to_owned()], &Files::new(), true).unwrap()
}

fn name(path: &str) -> Name {
    Name { dir: DirId(0), path: path.into() }
}

const MAKE: OpenMode = OpenMode { write: true, create: true, direct: false };

fn open(meta: &Meta, path: &str, mode: OpenMode) -> Result<FileId, Errno> {
    match meta.execute(&MetaOp::Open { name: name(path), mode })? {
        Some(Reply::Opened(file)) => Ok(file),
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_that_could_lead_out_of_the_directory_are_refused() {
    for path in ["..", "a/../b", "/etc", "a//b", "a/", "./a", "a\0b"] {
        assert_eq!(components(path), Err(Errno::INVAL), "{path:?}");
    }
    assert_eq!(components(&"a".repeat(256)), Err(Errno::NAMETOOLONG));
    assert_eq!(components(&"a/".repeat(40)), Err(Errno::NAMETOOLONG));
    assert_eq!(components("a/b"), Ok(vec!["a", "b"]));
    assert_eq!(components(""), Ok(vec![]));
}

#[test]
fn a_symbolic_link_is_followed_neither_as_a_file_nor_as_a_directory() {
    let (scratch, outside) = (Scratch::on_disk(), Scratch::on_disk());
    let meta = meta(&scratch);
    std::os::unix::fs::symlink(outside.path(), scratch.path().join("way-out")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("file"), scratch.path().join("link")).unwrap();
    assert_eq!(open(&meta, "link", MAKE), Err(Errno::LOOP));
    assert!(open(&meta, "way-out/file", MAKE).is_err());
    assert!(meta.execute(&MetaOp::List { name: name("way-out") }).is_err());
    assert!(std::fs::read_dir(outside.path()).unwrap().next().is_none());
    let Ok(Some(Reply::Listing(entries))) = meta.execute(&MetaOp::List { name: name("") }) else { panic!() };
    assert!(entries.iter().all(|entry| entry.kind == EntryKind::Other) && entries.len() == 2);
}

#[test]
fn something_that_is_no_regular_file_is_not_opened_and_does_not_block() {
    let scratch = Scratch::on_disk();
    let meta = meta(&scratch);
    rustix::fs::mkfifoat(CWD, scratch.path().join("pipe"), Mode::from_raw_mode(0o600)).unwrap();
    meta.execute(&MetaOp::MakeDir { name: name("dir") }).unwrap();
    for path in ["pipe", "dir"] {
        for mode in [MAKE, OpenMode { write: false, create: false, direct: false }] {
            assert!(open(&meta, path, mode).is_err(), "{path} {mode:?}");
        }
    }
}

#[test]
fn an_opened_file_blocks_and_keeps_direct_io_if_the_file_system_has_it() {
    let scratch = Scratch::on_disk();
    let meta = meta(&scratch);
    let file = open(&meta, "file", OpenMode { direct: true, ..MAKE }).unwrap();
    let flags = fcntl_getfl(meta.files.get(file).unwrap().as_fd()).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK));
    assert_eq!(flags.contains(OFlags::DIRECT), meta.files.cached().is_none());
}

#[test]
fn a_read_changes_no_time_of_access_of_an_own_file() {
    let scratch = Scratch::on_disk();
    let meta = meta(&scratch);
    let file = open(&meta, "file", MAKE).unwrap();
    let opened = meta.files.get(file).unwrap();
    assert!(fcntl_getfl(opened.as_fd()).unwrap().contains(OFlags::NOATIME));
    rustix::io::pwrite(opened.as_fd(), b"one", 0).unwrap();
    // A time of access before the last change is what a mount with `relatime` sets to now at the next read.
    let long_ago = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
    let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
    let times = rustix::fs::Timestamps { last_access: long_ago, last_modification: now };
    rustix::fs::futimens(opened.as_fd(), &times).unwrap();
    rustix::io::pread(opened.as_fd(), &mut [0; 3][..], 0).unwrap();
    assert_eq!(fstat(opened.as_fd()).unwrap().st_atime, 1);
}

#[test]
fn renaming_across_directories_is_refused() {
    let scratch = Scratch::on_disk();
    let meta = meta(&scratch);
    meta.execute(&MetaOp::MakeDir { name: name("dir") }).unwrap();
    open(&meta, "file", MAKE).unwrap();
    let rename = |from: &str, to: &str| meta.execute(&MetaOp::Rename { from: name(from), to: name(to) });
    assert_eq!(rename("file", "dir/file"), Err(Errno::INVAL));
    assert_eq!(rename("file", ""), Err(Errno::INVAL));
    assert_eq!(rename("file", "other"), Ok(None));
    assert_eq!(rename("file", "third"), Err(Errno::NOENT));
}

#[test]
fn a_directory_that_is_a_file_or_absent_is_named_in_the_error() {
    let scratch = Scratch::on_disk();
    open(&meta(&scratch), "file", MAKE).unwrap();
    for missing in ["file", "absent"] {
        let path = scratch.path().join(missing);
        let error = Meta::new(std::slice::from_ref(&path), &Files::new(), true).unwrap_err();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
}

#[test]
fn files_are_for_their_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::on_disk();
    let meta = meta(&scratch);
    open(&meta, "file", MAKE).unwrap();
    meta.execute(&MetaOp::MakeDir { name: name("dir") }).unwrap();
    for path in ["file", "dir"] {
        let mode = std::fs::metadata(scratch.path().join(path)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{path}");
    }
}

/// What a start asks of a file grows with the holes below the end of its records, and with nothing else.
#[test]
fn a_file_without_holes_below_a_place_costs_one_question_and_each_hole_two_more() {
    let page = PAGE as u64;
    let end = 4096 * page;
    for (count, upto) in [(0, end / 2), (1, end / 2), (400, end / 2), (400, 0), (400, 21 * page), (400, end)]
    {
        // Holes of a page at every fifth, and all of the last quarter.
        let data = |at: u64| at < 3 * end / 4 && (!(at / page).is_multiple_of(5) || at / page / 5 >= count);
        let mut asked = 0;
        let found = holes_by((end, upto), |to| {
            asked += 1;
            let (from, wanted) = match to {
                SeekFrom::Hole(from) => (from, false),
                SeekFrom::Data(from) => (from, true),
                _ => panic!("{to:?}"),
            };
            Ok((from..end).step_by(PAGE).find(|at| data(*at) == wanted))
        });
        let found = found.unwrap();
        let expected = (0..end).step_by(PAGE).filter(|at| *at < upto && !data(*at));
        let starts = expected.filter(|at| *at == 0 || data(*at - page)).collect::<Vec<_>>();
        assert_eq!(
            found.iter().map(|(at, _)| *at).collect::<Vec<_>>(),
            starts,
            "{count} holes, up to {upto}"
        );
        let last = u64::from(found.last().is_none_or(|(at, len)| at + len < upto)) * u64::from(upto > 0);
        assert_eq!(asked, 2 * found.len() as u64 + last, "{count} holes, up to {upto}");
    }
}
