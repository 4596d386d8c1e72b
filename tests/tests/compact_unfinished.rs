//! Copies by offline compaction that a power cut interrupts: the unfinished copy is named as such, no process opens it, and
//! a second attempt starts anew. The store that was copied is never touched.

use std::io;
use std::sync::{Arc, Mutex};

use kvarts_fsck::check::Level;
use kvarts_fsck::compact::{Options as CompactOptions, Progress, Refusal, Target, elsewhere};
use kvarts_fsck::disk::{Disk, DiskWriter, MemoryDisk};
use kvarts_fsck::findings::Findings;
use kvarts_fsck::repair::{Site, repair};
use kvarts_fsck::store::{CannotRun, survey};
use kvarts_layout::StoreId;
use kvarts_store::engine::{Options, Store};
use kvarts_tests::campaign::{Driven, Judge, Ledger, drive, read_all, reopen, verify, work_compacting};
use kvarts_tests::sim::{Rng, Seed, SimWorld, WorldConfig};
use kvarts_tests::witness::{cut, directories, examine, media, problems, small};

/// Its store has live blocks in both shards.
const SEED: Seed = Seed(66);
const MARK: &str = "unfinished-copy";

/// A store, and what the engine finds in it.
struct Made {
    disk: MemoryDisk,
    ledger: Ledger,
    options: Options,
}

fn made() -> Made {
    let options = small(2);
    let world = SimWorld::new(SEED.0, &WorldConfig::default());
    let launcher = world.launcher();
    let ledger = std::cell::RefCell::new(Ledger::default());
    let mut rng = SEED.child("work").rng();
    let whole = async {
        let (store, _executors) = Store::open(&launcher, &options).await.expect("a fresh disk");
        work_compacting(&store, &ledger, &mut rng, 40).await;
        store.close().await.expect("nothing fails");
    };
    assert!(matches!(drive(&world, u64::MAX, whole), Driven::Done(())), "the workload does not end");
    let image = world.kill();
    let opened = reopen(SEED, &WorldConfig::default(), &options, image.clone()).unwrap();
    let Driven::Done(found) = drive(&opened.world, u64::MAX, read_all(&opened.store)) else {
        panic!("reads")
    };
    assert!(found.values().filter(|state| state.is_ok()).count() > 4, "too little is live: {}", found.len());
    let mut ledger = ledger.into_inner();
    ledger.adopt(&found, false);
    Made { disk: directories(&image).remove(0), ledger, options }
}

/// A directory whose changes are ordered among those of others.
#[derive(Clone, Debug)]
struct Ordered {
    disk: MemoryDisk,
    at: usize,
    order: Arc<Mutex<Vec<usize>>>,
}

impl Ordered {
    fn note(&self, done: io::Result<()>) -> io::Result<()> {
        self.order.lock().unwrap().push(self.at);
        done
    }
}

impl DiskWriter for Ordered {
    fn write_at(&self, path: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.note(self.disk.write_at(path, offset, bytes))
    }
    fn punch(&self, path: &str, offset: u64, bytes: u64) -> io::Result<()> {
        self.note(DiskWriter::punch(&self.disk, path, offset, bytes))
    }
    fn set_len(&self, path: &str, len: u64) -> io::Result<()> {
        self.note(self.disk.set_len(path, len))
    }
    fn sync(&self, path: &str) -> io::Result<()> {
        self.note(self.disk.sync(path))
    }
    fn make_folder(&self, path: &str) -> io::Result<()> {
        self.note(self.disk.make_folder(path))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.note(self.disk.rename(from, to))
    }
    fn remove(&self, path: &str) -> io::Result<()> {
        self.note(DiskWriter::remove(&self.disk, path))
    }
    fn remove_folder(&self, path: &str) -> io::Result<()> {
        self.note(DiskWriter::remove_folder(&self.disk, path))
    }
    fn sync_folder(&self, path: &str) -> io::Result<()> {
        self.note(self.disk.sync_folder(path))
    }
}

/// Copies into directories; says in which of them each change was made.
fn copy(made: &Made, into: &[MemoryDisk], (shards, id): (u32, u8)) -> Result<Vec<usize>, Refusal> {
    let disks: [Arc<dyn Disk>; 1] = [Arc::new(made.disk.clone())];
    let store = survey(&disks, &mut Findings::default()).unwrap().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let place = |(at, disk): (usize, &MemoryDisk)| -> (Arc<dyn Disk>, Arc<dyn DiskWriter>) {
        let ordered = Ordered { disk: disk.clone(), at, order: Arc::clone(&order) };
        (Arc::new(disk.clone()), Arc::new(ordered))
    };
    let target = Target {
        directories: into.iter().enumerate().map(place).collect(),
        shards,
        store: StoreId([id; 16]),
        secret: [id; 32],
    };
    let options = CompactOptions {
        utilisation_percent: 100,
        now_ms: 4_000_000_000_000,
        threads: 1,
        ..CompactOptions::default()
    };
    elsewhere(&store, &target, &options, &Progress::default())?;
    let order = order.lock().unwrap().clone();
    Ok(order)
}

/// The checker finds a sound store there, and the engine what was copied.
fn expect_whole(made: &Made, disks: &[MemoryDisk], shards: u32, note: &str) {
    let checked = examine(disks, Level::Deep).unwrap_or_else(|error| panic!("{note}: {error}"));
    assert!(checked.findings.is_clean(), "{note}\n{}", problems(&checked));
    let mut config = WorldConfig::default();
    config.disk.dirs = disks.len() as u16;
    let directories = disks.len() as u16;
    let options = Options {
        directories,
        shards_per_directory: shards / u32::from(directories),
        ..made.options.clone()
    };
    // A mark beside a superblock means nothing; the books do not know its page.
    assert!(reopen(SEED, &config, &options, media(disks)).is_ok(), "{note}: it does not open");
    let disks: Vec<MemoryDisk> = disks.iter().map(MemoryDisk::fork).collect();
    disks.iter().for_each(|disk| disk.remove(MARK));
    if let Err(why) = verify(SEED, &config, &options, media(&disks), (&made.ledger, Judge::Strict)) {
        panic!("{note}: {why}");
    }
}

/// What a power cut left is a whole store, or it is named by everybody and copying there again makes one.
fn judge(made: &Made, left: &[MemoryDisk], shards: u32, note: &str) -> bool {
    if left.iter().all(|disk| disk.contents("superblock").is_some()) {
        expect_whole(made, left, shards, note);
        return true;
    }
    let marked = left.iter().any(|disk| disk.contents(MARK).is_some());
    for disk in left.iter().filter(|disk| disk.contents(MARK).is_none()) {
        assert_eq!(disk.files(), Vec::<String>::new(), "{note}: something is there without the mark");
    }
    let config = || {
        let mut config = WorldConfig::default();
        config.disk.dirs = left.len() as u16;
        config
    };
    if marked {
        let seen = examine(left, Level::Full).map(|_| ());
        assert!(matches!(seen, Err(CannotRun::Unfinished(_))), "{note}: {seen:?}");
        let site =
            |disk: &MemoryDisk| Site { disk: Arc::new(disk.clone()), writer: Some(Arc::new(disk.clone())) };
        let sites: Vec<Site> = left.iter().map(site).collect();
        let repaired = repair(&sites, &kvarts_fsck::check::Options::default(), &Default::default());
        assert!(matches!(repaired, Err(CannotRun::Unfinished(_))), "{note}: repair makes something of it");
        let options = Options { directories: left.len() as u16, ..made.options.clone() };
        let opened = reopen(SEED, &config(), &options, media(left));
        let Err(why) = opened.map(|_| ()) else { panic!("{note}: half a copy opens") };
        assert!(why.contains("unfinished copy"), "{note}: {why}");
    }
    let again: Vec<MemoryDisk> = left.iter().map(MemoryDisk::fork).collect();
    let copied = copy(made, &again, (shards, 77));
    assert!(copied.is_ok(), "{note}: it does not start anew: {copied:?}");
    assert!(again.iter().all(|disk| disk.contents(MARK).is_none()), "{note}: the mark stays");
    expect_whole(made, &again, shards, &format!("{note}, again"));
    false
}

/// Cuts the power at every change of a copy; gives back the first image in which one directory has a superblock and
/// another has none, and one from the middle.
fn cuts(made: &Made, start: &[MemoryDisk], (shards, id): (u32, u8), rng: &mut Rng) -> Vec<Vec<MemoryDisk>> {
    let whole: Vec<MemoryDisk> = start.iter().map(MemoryDisk::fork).collect();
    let order = copy(made, &whole, (shards, id)).unwrap();
    let steps: Vec<_> = whole.iter().map(MemoryDisk::steps).collect();
    let (mut stores, mut none, mut kept) = (0, 0, Vec::new());
    for changes in 0..=order.len() {
        let count = |at: usize| order[..changes].iter().filter(|one| **one == at).count();
        let left: Vec<MemoryDisk> =
            start.iter().enumerate().map(|(at, disk)| cut(disk, &steps[at][..count(at)], rng)).collect();
        let note = format!("{} directories, cut after {changes} of {}", start.len(), order.len());
        if judge(made, &left, shards, &note) {
            stores += 1;
        } else {
            none += 1;
        }
        let has = |disk: &MemoryDisk| disk.contents("superblock").is_some();
        let is_between = left.iter().any(has) && !left.iter().all(has);
        if (is_between && kept.len() == 1) || (kept.is_empty() && changes == order.len() / 2) {
            kept.push(left);
        }
    }
    assert!(stores >= 1 && none > 20, "{stores} {none}");
    kept
}

#[test]
fn a_power_cut_on_the_way_to_another_store_leaves_the_old_one_and_a_copy_that_is_begun_anew() {
    let made = made();
    let before = made.disk.fork();
    let mut rng = SEED.child("cuts").rng();
    let one = cuts(&made, &[MemoryDisk::new()], (3, 9), &mut rng);
    // Interrupted again while it starts anew, with fewer shards.
    cuts(&made, &one[0], (1, 10), &mut rng);
    let two = cuts(&made, &[MemoryDisk::new(), MemoryDisk::new()], (4, 11), &mut rng);
    assert_eq!(two.len(), 2, "no cut fell between two superblocks");
    cuts(&made, &two[1], (2, 12), &mut rng);
    assert_eq!(made.disk.steps(), [], "the old store was written");
    assert!(before.files().iter().all(|path| before.contents(path) == made.disk.contents(path)));
    expect_whole(&made, std::slice::from_ref(&made.disk), 2, "the old one");
}

#[test]
fn nothing_is_removed_that_an_interrupted_copy_did_not_leave() {
    let made = made();
    let whole = MemoryDisk::new();
    copy(&made, std::slice::from_ref(&whole), (2, 9)).unwrap();
    let refused = |disks: &[MemoryDisk], name: &str| {
        let before: Vec<Vec<String>> = disks.iter().map(MemoryDisk::files).collect();
        let why = copy(&made, disks, (2, 10)).unwrap_err().to_string();
        assert!(why.contains("not empty") && why.contains(name), "{why}");
        assert_eq!(before, disks.iter().map(MemoryDisk::files).collect::<Vec<_>>(), "something went");
    };
    // A store, one with the mark of the cut after its last superblock, one without superblock or mark.
    refused(&[whole.fork()], "superblock");
    let late = whole.fork();
    late.plant(MARK, format!("{}\n", StoreId([9; 16])).into_bytes());
    refused(&[late.fork()], "superblock");
    expect_whole(&made, &[late.fork()], 2, "with a mark that came too late to be removed");
    let lost = whole.fork();
    lost.remove("superblock");
    refused(&[lost.fork()], "shard-0000");
    // The mark, and a file that is not the store's.
    lost.plant(MARK, format!("{}\n", StoreId([9; 16])).into_bytes());
    let strange = lost.fork();
    strange.plant("notes.txt", vec![1]);
    refused(&[strange], "notes.txt");
    let inside = lost.fork();
    inside.plant("shard-0000/notes.txt", vec![1]);
    refused(&[inside], "notes.txt");
    // A store that was used since, and lost its superblock: a mark that came too late does not make it a copy.
    let used = lost.fork();
    used.plant("shard-0000/checkpoint-1", used.contents("shard-0000/checkpoint-0").unwrap());
    refused(&[used.fork()], "shard-0000/checkpoint-1");
    let checked = examine(std::slice::from_ref(&used), Level::Quick).unwrap();
    assert_eq!(checked.findings.times("superblock-lost"), 1, "{}", problems(&checked));
    let opened = reopen(SEED, &WorldConfig::default(), &made.options, media(&[used]));
    let Err(why) = opened.map(|_| ()) else { panic!("it opens without its superblock") };
    assert!(!why.contains("unfinished"), "{why}");
    // A store beside the leftover of another copy.
    let other = MemoryDisk::new();
    other.plant(MARK, format!("{}\n", StoreId([8; 16])).into_bytes());
    refused(&[late, other], "superblock");
    copy(&made, &[lost], (2, 10)).unwrap();
}
