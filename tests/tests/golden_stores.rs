//! Whole stores as earlier programs wrote them: the checker finds them clean, the engine opens them, and both find the
//! blocks that were put, whatever is changed in either since.
//!
//! `KVARTS_BLESS=1 cargo test -p kvarts-tests golden_stores::` writes the images of this version that are not there. An
//! image that is there is never written again: its version is frozen.
#![allow(clippy::disallowed_methods, reason = "golden files")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Once;

use kvarts_contract::blocking::block_on;
use kvarts_contract::error::Reason;
use kvarts_fsck::check::Level;
use kvarts_fsck::disk::MemoryDisk;
use kvarts_fsck::store::CannotRun;
use kvarts_layout::format::superblock::Superblock;
use kvarts_layout::format::{PAGE, VERSION};
use kvarts_store::engine::{Limits, Options, Store};
use kvarts_store::home::{Home, HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;
use kvarts_tests::golden::{content, folders, home, load};
use kvarts_tests::sim::Seed;
use kvarts_tests::witness::{directories, dump, examine, problems, small, worked};

/// The images of this version: a store that was closed, and one that was killed while it wrote.
const IMAGES: [(&str, bool); 2] = [("closed", true), ("killed", false)];

/// The folders of all images that are kept, of every version, after a blessing if there is to be one.
fn goldens() -> Vec<PathBuf> {
    static BLESSED: Once = Once::new();
    BLESSED.call_once(|| {
        if std::env::var_os("KVARTS_BLESS").is_some() {
            bless();
        }
    });
    let all = folders();
    assert!(IMAGES.iter().all(|(name, _)| all.contains(&folder(name))), "{all:?}");
    all
}

fn folder(name: &str) -> PathBuf {
    home().join(format!("version-{VERSION}-{name}"))
}

/// A store that a program wrote before the format was frozen.
fn never_frozen() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/older/version-0")
}

/// The first seed whose store is small and holds something of everything.
fn bless() {
    for (name, close) in IMAGES.into_iter().filter(|(name, _)| !folder(name).exists()) {
        let (disk, text) = (0..500)
            .map(|seed| directories(&worked(Seed(seed), &small(1), 16, close)).remove(0))
            .map(|disk| (disk.clone(), content(&disk)))
            .find(|(disk, text)| {
                let segments = disk.files().iter().filter(|path| path.contains("segment")).count();
                segments <= 3
                    && text.lines().count() >= 8
                    && disk.contents("shard-0000/checkpoint-0").is_some()
            })
            .expect("a small store");
        let to = folder(name);
        dump(&disk, &to).unwrap();
        std::fs::write(to.join("content.txt"), text).unwrap();
    }
}

#[test]
fn stores_of_every_version_are_clean_and_hold_what_was_put() {
    for folder in goldens() {
        let (disk, name) = (load(&folder), folder.display());
        let checked = examine(std::slice::from_ref(&disk), Level::Deep).unwrap();
        assert!(checked.findings.is_clean(), "{name}\n{}", problems(&checked));
        let expected = std::fs::read_to_string(folder.join("content.txt")).unwrap();
        assert!(expected.lines().count() > 5, "{name} holds too little");
        assert_eq!(content(&disk), expected, "{name}");
    }
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, disk: &MemoryDisk) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-golden-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        dump(disk, &path).unwrap();
        std::fs::create_dir_all(path.join("shard-0000")).unwrap();
        Self(path)
    }

    fn open(&self) -> Result<Home, kvarts_contract::error::Error> {
        Home::open(&HomeOptions {
            directories: vec![self.0.clone()],
            io: IoChoice::Pool,
            runtime: RuntimeChoice::Threads,
            store: Options { limits: Limits { arena_bytes: 2 << 20, ..Limits::default() }, ..small(1) },
            ..HomeOptions::default()
        })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn keys(store: &Store) -> BTreeSet<String> {
    let (mut all, mut cursor) = (BTreeSet::new(), None);
    loop {
        let page = block_on(kvarts_contract::api::KvStore::snapshot(store, cursor)).unwrap().unwrap();
        let line = |key: &kvarts_layout::IndexKey| {
            format!("{} {} {} {}", key.namespace, key.key, key.group.0, key.coordinate.to_u64())
        };
        all.extend(page.blocks.iter().map(line));
        match page.next {
            Some(next) => cursor = Some(next),
            None => return all,
        }
    }
}

#[test]
fn the_engine_opens_stores_of_every_version_and_leaves_them_clean() {
    for (number, folder) in goldens().into_iter().enumerate() {
        let name = folder.display();
        let text = std::fs::read_to_string(folder.join("content.txt")).unwrap();
        let expected: BTreeSet<String> =
            text.lines().map(|line| line.split(' ').take(4).collect::<Vec<_>>().join(" ")).collect();
        let scratch = Scratch::new(&format!("opened-{number}"), &load(&folder));
        let home = scratch.open().unwrap();
        assert_eq!(keys(home.store()), expected, "{name}");
        home.close().unwrap();
        let disk = load(&scratch.0);
        let checked = examine(std::slice::from_ref(&disk), Level::Deep).unwrap();
        assert!(checked.findings.is_clean(), "{name}\n{}", problems(&checked));
        assert_eq!(content(&disk), text, "{name}: the engine changed what is there");
    }
}

#[test]
fn a_store_of_a_newer_version_is_refused_politely_by_both_and_left_alone() {
    let disk = load(&goldens().remove(0));
    let sound = Superblock::decode(&disk.contents("superblock").unwrap()[..PAGE], 0, None).unwrap();
    let newer = Superblock { min_reader: VERSION + 1, ..sound };
    let image = [newer.encode(0).unwrap(), newer.encode(1).unwrap()].concat();
    disk.plant("superblock", image.clone());
    let refused = examine(std::slice::from_ref(&disk), Level::Full).unwrap_err();
    assert_eq!(refused, CannotRun::Newer(VERSION + 1));
    assert!(refused.to_string().contains("newer kvarts"));
    let scratch = Scratch::new("newer", &disk);
    let error = scratch.open().expect_err("a newer store is refused");
    assert!(matches!(error.0, Reason::Newer { found } if found == VERSION + 1), "{error}");
    assert!(error.to_string().contains("newer"), "{error}");
    assert_eq!(std::fs::read(scratch.0.join("superblock")).unwrap(), image);
}

#[test]
fn a_store_from_before_the_freeze_is_refused_by_both_and_left_alone() {
    let disk = load(&never_frozen());
    let refused = examine(std::slice::from_ref(&disk), Level::Full).unwrap_err();
    assert_eq!(refused, CannotRun::Older(0));
    assert!(refused.to_string().contains("before the format was frozen"));
    let scratch = Scratch::new("older", &disk);
    let error = scratch.open().expect_err("what was never frozen is refused");
    assert!(matches!(error.0, Reason::Older { found: 0 }), "{error}");
    assert!(error.to_string().contains("create a new store"), "{error}");
    for path in disk.files() {
        assert_eq!(std::fs::read(scratch.0.join(&path)).unwrap(), disk.contents(&path).unwrap(), "{path}");
    }
}
