//! Opening and closing stores in real directories: what is refused, with which reason, and what survives.
#![allow(clippy::disallowed_methods, reason = "works on real directories, outside the simulation")]

use std::path::{Path, PathBuf};
use std::process::Command;

use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_layout::Layout;
use kvarts_layout::format::superblock::{FILE_BYTES, Superblock};
use kvarts_layout::format::{PAGE, names};
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::stage::{HomeStage, Scratch, small_options};

fn options(directories: &[&Path]) -> HomeOptions {
    HomeOptions {
        directories: directories.iter().map(|path| (*path).to_owned()).collect(),
        io: IoChoice::Auto,
        runtime: RuntimeChoice::Threads,
        store: small_options(1),
        ..HomeOptions::default()
    }
}

fn open(directories: &[&Path]) -> Result<Home, Error> {
    Home::open(&options(directories))
}

fn refusal(directories: &[&Path]) -> Reason {
    open(directories).map(|_| ()).expect_err("it must be refused").0
}

/// Every file below a directory with its bytes, locks aside.
fn content(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.file_name().is_some_and(|name| name == "lock") => {}
                false => found.push((path.clone(), std::fs::read(&path).unwrap())),
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_directory_that_is_open_is_refused_to_others_until_it_is_closed() {
    let scratch = Scratch::new("locked");
    let home = open(&[scratch.path()]).unwrap();
    let reason = refusal(&[scratch.path()]);
    assert!(matches!(reason, Reason::Locked(_)), "{reason:?}");
    assert_eq!(reason.kind(), Kind::Refused);
    home.close().unwrap();
    open(&[scratch.path()]).unwrap().close().unwrap();
}

#[test]
fn a_path_that_is_or_leads_through_a_file_is_refused() {
    let scratch = Scratch::new("file");
    std::fs::create_dir_all(scratch.path()).unwrap();
    let file = scratch.path().join("file");
    std::fs::write(&file, b"not a directory").unwrap();
    for path in [file.clone(), file.join("store")] {
        let reason = refusal(&[&path]);
        assert!(matches!(reason, Reason::Directory(_)), "{reason:?}");
        assert!(reason.to_string().contains("file"), "it names the path: {reason}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"not a directory");
}

#[test]
fn a_directory_that_holds_something_else_is_refused_and_left_as_it_is() {
    let scratch = Scratch::new("foreign");
    std::fs::create_dir_all(scratch.path().join("photos")).unwrap();
    std::fs::write(scratch.path().join("letter.txt"), b"dear reader").unwrap();
    let before = content(scratch.path());
    let reason = refusal(&[scratch.path()]);
    assert!(matches!(reason, Reason::Directory(_)), "{reason:?}");
    assert_eq!(content(scratch.path()), before);
}

#[test]
fn directories_of_two_stores_or_only_some_of_one_are_refused() {
    let scratch = Scratch::new("mixed");
    let at = |name: &str| scratch.below(name);
    let (a0, a1, b0, b1) = (at("a0"), at("a1"), at("b0"), at("b1"));
    open(&[&a0, &a1]).unwrap().close().unwrap();
    open(&[&b0, &b1]).unwrap().close().unwrap();
    let empty = at("empty");
    let wrong: [&[&Path]; 4] = [&[&a0, &b1], &[&a0], &[&a0, &a1, &b0], &[&a0, &a1, &empty]];
    for directories in wrong {
        let reason = refusal(directories);
        assert!(matches!(reason, Reason::Directory(_)), "{directories:?}: {reason:?}");
    }
    // None is made beside a store.
    let home = open(&[&a0, &empty]).unwrap();
    assert!(home.store().health().out[&1].contains("empty does not exist: mount its disk"));
    home.close().unwrap();
    // In another order they are the same store.
    open(&[&a1, &a0]).unwrap().close().unwrap();
    open(&[&b0, &b1]).unwrap().close().unwrap();
}

#[test]
fn a_copy_of_a_directory_beside_the_original_is_refused() {
    let scratch = Scratch::new("copy");
    let (original, copy) = (scratch.below("original"), scratch.below("copy"));
    open(&[&original]).unwrap().close().unwrap();
    std::fs::create_dir_all(&copy).unwrap();
    std::fs::copy(original.join(names::SUPERBLOCK), copy.join(names::SUPERBLOCK)).unwrap();
    let reason = refusal(&[&original, &copy]);
    assert!(matches!(reason, Reason::Directory(_)), "{reason:?}");
}

#[test]
fn an_empty_superblock_beside_shards_is_refused_and_nothing_is_made_in_its_place() {
    let scratch = Scratch::new("blank");
    open(&[scratch.path()]).unwrap().close().unwrap();
    let path = scratch.path().join("superblock");
    for blank in [vec![0; FILE_BYTES], vec![0; 512], Vec::new()] {
        std::fs::write(&path, &blank).unwrap();
        let before = content(scratch.path());
        let reason = refusal(&[scratch.path()]);
        assert!(reason.to_string().contains("fsck --repair"), "{} bytes: {reason}", blank.len());
        assert_eq!(content(scratch.path()), before, "{} bytes", blank.len());
    }
    // Alone it is what a crash leaves of a store that was being made.
    std::fs::remove_dir_all(scratch.path()).unwrap();
    std::fs::create_dir(scratch.path()).unwrap();
    std::fs::write(&path, vec![0; FILE_BYTES]).unwrap();
    open(&[scratch.path()]).unwrap().close().unwrap();
}

#[test]
fn a_store_of_a_newer_format_is_refused_and_left_as_it_is() {
    let scratch = Scratch::new("newer");
    open(&[scratch.path()]).unwrap().close().unwrap();
    let path = scratch.path().join(names::SUPERBLOCK);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len(), FILE_BYTES);
    let superblock = Superblock::decode_pair(&bytes, None).unwrap().superblock;
    let newer = Superblock { min_reader: kvarts_layout::format::VERSION + 1, ..superblock };
    let mut image = Vec::new();
    for slot in 0..2 {
        image.extend_from_slice(&newer.encode(slot).unwrap());
    }
    assert_eq!(image.len(), 2 * PAGE);
    std::fs::write(&path, &image).unwrap();
    let before = content(scratch.path());
    let reason = refusal(&[scratch.path()]);
    assert!(matches!(reason, Reason::Newer { found } if found == newer.min_reader), "{reason:?}");
    assert_eq!(content(scratch.path()), before);
    std::fs::write(&path, &bytes).unwrap();
    open(&[scratch.path()]).unwrap().close().unwrap();
}

#[test]
fn blocks_survive_a_clean_stop_and_a_stop_without_warning() {
    let scratch = Scratch::new("survive");
    for (round, clean) in [(0, true), (1, false), (2, true), (3, false)] {
        let stage = HomeStage::over(&options(&[scratch.path()])).unwrap();
        let desk = Desk::new(&stage, "survive");
        for earlier in 0..round {
            desk.expect(pages(), &desk.keys(earlier * 8..earlier * 8 + 8), earlier);
        }
        desk.store(pages(), &desk.keys(round * 8..round * 8 + 8), round, Layout::LayerBlock);
        if clean { stage.close().unwrap() } else { drop(stage) }
    }
}

/// Runs one test of this program again as an ordinary user with the usual limit on locked memory. Says so, loudly,
/// where it cannot.
fn as_an_ordinary_user(test: &str) {
    let shell = format!(
        "ulimit -l 8192 && exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all \
         --bounding-set=-all \"$0\" --exact --ignored --nocapture {test}"
    );
    let is_root = rustix_uid() == 0;
    let has_setpriv = Command::new("setpriv").arg("--version").output().is_ok();
    if !is_root || !has_setpriv {
        eprintln!("SKIPPED: {test} needs root and setpriv to become an ordinary user");
        return;
    }
    // The program may lie where others cannot reach it: they get a copy.
    let copy = Scratch::new("ordinary");
    std::fs::create_dir_all(copy.path()).unwrap();
    let program = copy.path().join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let output = Command::new("bash").args(["-c", &shell]).arg(&program).current_dir("/").output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// The user that this process runs as.
fn rustix_uid() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(u32::MAX)
}

#[test]
fn an_ordinary_user_with_little_locked_memory_gets_a_store_that_conforms() {
    as_an_ordinary_user("lifecycle::conforms_as_whoever_runs_this");
}

#[test]
#[ignore = "run by another test, as an ordinary user"]
fn conforms_as_whoever_runs_this() {
    for runtime in [RuntimeChoice::Auto, RuntimeChoice::Threads] {
        let options = HomeOptions { runtime, store: small_options(1), ..HomeOptions::default() };
        let stage = HomeStage::open("user", &options).unwrap();
        kvarts_tests::conformance::run_all(&stage);
        println!("{:?}", stage.home().notes());
    }
}

#[test]
fn a_directory_without_the_right_to_write_is_refused_to_an_ordinary_user() {
    as_an_ordinary_user("lifecycle::is_refused_what_is_not_writable");
}

#[test]
#[ignore = "run by another test, as an ordinary user"]
fn is_refused_what_is_not_writable() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("read-only");
    open(&[scratch.path()]).unwrap().close().unwrap();
    let set = |mode| std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(mode)).unwrap();
    set(0o000);
    let reason = refusal(&[scratch.path()]);
    set(0o700);
    assert!(matches!(reason, Reason::Directory(_)), "{reason:?}");
    let reason = refusal(&[Path::new("/kvarts-of-an-ordinary-user")]);
    assert!(matches!(reason, Reason::Directory(_)), "{reason:?}");
    open(&[scratch.path()]).unwrap().close().unwrap();
}

/// A file system in memory, unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    /// `None`, said loudly, where this process may not mount.
    fn new(at: &Path) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let tried =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=256m", "kvarts-test"]).arg(at).output();
        if tried.is_ok_and(|output| output.status.success()) {
            return Some(Self(at.to_owned()));
        }
        eprintln!("SKIPPED: a read-only file system needs the right to mount");
        None
    }

    fn remount(&self, how: &str) {
        let again =
            || Command::new("mount").args(["-o", &format!("remount,{how}")]).arg(&self.0).output().unwrap();
        // It is busy while a child that another test starts is between fork and exec: it has our files open until then.
        let mut output = again();
        for _ in 0..500 {
            if output.status.success() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            output = again();
        }
        panic!("{output:?}");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A mount that stays is seen by the removal of the directory below it.
        let _ = Command::new("umount").arg(&self.0).output();
    }
}

#[test]
fn a_read_only_file_system_is_refused_and_nothing_on_it_is_lost() {
    let scratch = Scratch::new("mount");
    let Some(mount) = Mount::new(&scratch.path().join("mount")) else { return };
    let directory = mount.0.join("store");
    let stage = HomeStage::over(&options(&[&directory])).unwrap();
    let desk = Desk::new(&stage, "read-only");
    desk.store(pages(), &desk.keys(0..8), 0, Layout::LayerBlock);
    stage.close().unwrap();
    mount.remount("ro");
    let before = content(&directory);
    let reason = refusal(&[&directory]);
    assert!(matches!(reason, Reason::Directory(_)), "{reason:?}");
    assert_eq!(content(&directory), before);
    mount.remount("rw");
    let stage = HomeStage::over(&options(&[&directory])).unwrap();
    let desk = Desk::new(&stage, "read-only");
    desk.expect(pages(), &desk.keys(0..8), 0);
    stage.close().unwrap();
}
