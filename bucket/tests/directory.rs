//! A directory that others use too, and one whose file system hangs.
#![allow(clippy::disallowed_methods, reason = "real files, real threads, real clocks")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use kvarts_bucket::directory::Directory;
use kvarts_cold::{Bucket, Condition, Fault, Places, Tag};
use tokio::runtime::Runtime;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-bucket-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_file_that_a_process_of_the_same_number_is_writing_is_left_alone() {
    let scratch = Scratch::new("numbers");
    let folder = scratch.0.join("manifests");
    fs::create_dir_all(&folder).unwrap();
    // In containers every server is process 1: what the other one has begun has the names that this one would choose by its number.
    let others: Vec<PathBuf> =
        (0..2000).map(|number| folder.join(format!(".partial-{}-{number}", std::process::id()))).collect();
    others.iter().for_each(|path| fs::write(path, "the other's").unwrap());
    let bucket = Directory::new(&scratch.0);
    runtime().block_on(async {
        for number in 0..20 {
            let name = format!("manifests/{number}");
            bucket.put(&name, vec![Bytes::from_static(b"ours")], Condition::Absent).await.unwrap();
        }
    });
    for path in &others {
        assert_eq!(fs::read(path).ok().as_deref(), Some(&b"the other's"[..]), "{}", path.display());
    }
    assert_eq!(names(&folder).len(), 2020);
}

#[test]
fn files_of_writers_that_died_go_when_they_are_old() {
    let scratch = Scratch::new("dead");
    let bucket = Directory::new(&scratch.0);
    let hours_ago = |hours: u64| SystemTime::now() - Duration::from_secs(hours * 3600);
    let deep = scratch.0.join("packs/ab");
    fs::create_dir_all(&deep).unwrap();
    for (path, hours) in [
        (scratch.0.join(".partial-1"), 30),
        (deep.join(".partial-2"), 30),
        (deep.join(".partial-3"), 2),
        (deep.join("pack"), 30),
        (scratch.0.join(".lock"), 30),
    ] {
        let file = File::create(path).unwrap();
        file.set_modified(hours_ago(hours)).unwrap();
    }
    let since = hours_ago(24).duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64;
    let runtime = runtime();
    assert_eq!(runtime.block_on(bucket.tidy(since, true)), Ok(2));
    assert_eq!(names(&deep), [".partial-2", ".partial-3", "pack"]);
    assert_eq!(runtime.block_on(bucket.tidy(since, false)), Ok(2));
    assert_eq!(
        (names(&deep), names(&scratch.0)),
        (vec![".partial-3".to_owned(), "pack".to_owned()], vec![".lock".to_owned(), "packs".to_owned()])
    );
}

#[test]
fn a_condition_is_of_the_bytes_that_are_there_and_not_of_what_is_remembered_of_a_file() {
    let scratch = Scratch::new("bytes");
    let bucket = Directory::new(&scratch.0);
    let put = |body: &'static [u8], condition| {
        bucket.put("manifests/ab", vec![Bytes::from_static(body)], condition)
    };
    runtime().block_on(async {
        let known = put(b"one", Condition::Absent).await.unwrap();
        // Another machine's change, of which this one's file system remembers the file of before: its number, length and times.
        let path = scratch.0.join("manifests/ab");
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        fs::write(&path, "two").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
        assert_eq!(put(b"three", Condition::Is(known.clone())).await, Err(Fault::Changed));
        assert_eq!(put(b"three", Condition::Absent).await, Err(Fault::Changed));
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let (_, now) = bucket.get("manifests/ab", 100).await.unwrap();
        assert_eq!(bucket.head("manifests/ab").await.unwrap().tag, now);
        put(b"three", Condition::Is(now)).await.unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
    });
    assert_eq!(names(&scratch.0.join("manifests")), ["ab"], "nothing is left half-written");
}

/// The threads of this process that have this name: those of other tests come and go.
fn threads(name: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let comm = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
    comm.filter(|comm| comm.trim() == name).count()
}

#[test]
fn a_file_system_that_hangs_holds_so_many_threads_and_no_more() {
    let scratch = Scratch::new("hangs");
    // Opening a pipe that has no writer does not return.
    let pipe = scratch.0.join("pack");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let bucket = Directory::new(&scratch.0);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("hanging")
        .enable_all()
        .build();
    let runtime = runtime.unwrap();
    runtime.block_on(async {
        let impatient = |_| tokio::time::timeout(Duration::from_millis(200), bucket.get("pack", 100));
        for _ in 0..4 {
            let given_up = futures_util::future::join_all((0..40).map(impatient)).await;
            assert!(given_up.iter().all(Result::is_err), "it does not hang");
        }
        // Other work finds a thread.
        tokio::task::spawn_blocking(|| ()).await.unwrap();
    });
    let held = threads("hanging");
    // It comes back: so do the threads.
    let writer = File::options().write(true).open(&pipe).unwrap();
    drop(writer);
    assert!((32..48).contains(&held), "{held} threads");
    fs::remove_file(&pipe).unwrap();
    fs::write(&pipe, "bytes").unwrap();
    let (bytes, _) = runtime.block_on(bucket.get("pack", 100)).unwrap();
    assert_eq!(&bytes[..], b"bytes");
    runtime.shutdown_background();
}

#[test]
fn a_directory_that_is_not_there_is_no_bucket_whatever_is_asked_and_is_not_made() {
    let scratch = Scratch::new("absent");
    let path = scratch.0.join("mount/bucket");
    let bucket = Directory::new(&path);
    let body = || vec![Bytes::from_static(b"one")];
    runtime().block_on(async {
        for condition in [Condition::Any, Condition::Absent, Condition::Is(Tag("1".to_owned()))] {
            let put = bucket.put("manifests/one", body(), condition.clone()).await;
            assert_eq!(put, Err(Fault::NoBucket), "{condition:?}");
        }
        assert_eq!(bucket.get("manifests/one", 10).await, Err(Fault::NoBucket));
        assert_eq!(bucket.head("manifests/one").await, Err(Fault::NoBucket));
        let (places, _) = Places::of_own(1).unwrap();
        assert_eq!(bucket.get_range("manifests/one", 0..1, &places).await, Err(Fault::NoBucket));
        assert_eq!(bucket.delete("manifests/one").await, Err(Fault::NoBucket));
        assert_eq!(bucket.list("manifests", None, 10).await, Err(Fault::NoBucket));
        assert_eq!(bucket.tidy(u64::MAX, false).await, Err(Fault::NoBucket));
    });
    assert_eq!(names(&scratch.0), Vec::<String>::new(), "nothing is made in the place of a mount");
    // It comes back, and is a bucket without anything in it.
    fs::create_dir_all(&path).unwrap();
    runtime().block_on(async {
        assert_eq!(bucket.get("manifests/one", 10).await, Err(Fault::Missing));
        assert_eq!(bucket.list("manifests", None, 10).await, Ok(Vec::new()));
        bucket.put("manifests/deep/one", body(), Condition::Absent).await.unwrap();
    });
}

#[test]
fn a_process_that_holds_the_lock_and_hangs_keeps_no_read_waiting_and_puts_for_a_bounded_time() {
    let scratch = Scratch::new("held");
    let bucket = Directory::new(&scratch.0).waiting_for_lock(Duration::from_millis(100));
    let body = || vec![Bytes::from_static(b"one")];
    let (held, runtime) = (File::create(scratch.0.join(".lock")).unwrap(), runtime());
    held.lock().unwrap();
    runtime.block_on(async {
        bucket.put("packs/one", body(), Condition::Any).await.unwrap();
        // More of them than there are threads for the file system.
        let puts = (0..40).map(|number| {
            let (bucket, name) = (bucket.clone(), format!("manifests/{number}"));
            tokio::spawn(async move { bucket.put(&name, body(), Condition::Absent).await })
        });
        let puts: Vec<_> = puts.collect();
        for _ in 0..100 {
            assert_eq!(&bucket.get("packs/one", 10).await.unwrap().0[..], b"one");
        }
        assert!(!puts.last().unwrap().is_finished(), "they did not wait");
        let mut puts = puts.into_iter();
        let first = puts.next().unwrap().await.unwrap().unwrap_err();
        assert!(matches!(&first, Fault::Unreachable(why) if why.contains("fuser")), "{first:?}");
        // It goes on, or dies: so do they.
        held.unlock().unwrap();
        let last = puts.next_back().unwrap().await.unwrap();
        assert!(last.is_ok(), "{last:?}");
    });
}
