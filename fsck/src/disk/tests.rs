//! Both disks give the same answers.

use std::os::unix::fs::symlink;

use super::*;

struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvarts-fsck-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn nodes(disk: &dyn Disk, folder: &str) -> Vec<(String, NodeKind)> {
    let mut all = Vec::new();
    disk.visit(folder, &mut |node| all.push((node.name, node.kind))).unwrap();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn fill(writer: &dyn DiskWriter) {
    writer.make_folder("shard-0000").unwrap();
    writer.make_folder("shard-0000").unwrap();
    writer.write_at("shard-0000/segment-00000000", 4096, &[7; 100]).unwrap();
    writer.sync("shard-0000/segment-00000000").unwrap();
    writer.rename("shard-0000/segment-00000000", "shard-0000/segment-00000001").unwrap();
    writer.write_at("shard-0000/segment-00000002", 0, &[1]).unwrap();
    writer.rename("shard-0000/segment-00000002", "shard-0000/segment-00000001").unwrap_err();
    writer.write_at("shard-0000/segment-00000003", 0, &[1]).unwrap();
    writer.remove("shard-0000/segment-00000003").unwrap();
    writer.remove("shard-0000/segment-00000003").unwrap();
    writer.sync_folder("shard-0000").unwrap();
}

fn check(disk: &dyn Disk) {
    assert_eq!(nodes(disk, "").last(), Some(&("shard-0000".to_owned(), NodeKind::Folder)));
    let files = ["segment-00000001", "segment-00000002"].map(|name| (name.to_owned(), NodeKind::File));
    assert_eq!(nodes(disk, "shard-0000"), files);
    let file = disk.open("shard-0000/segment-00000001").unwrap();
    assert_eq!((file.len(), file.is_empty()), (4196, false));
    let mut memory = Aligned::new(2 * ALIGN);
    assert_eq!(file.read_at(memory.bytes_mut(), 4096).unwrap(), 100);
    assert_eq!((&memory.bytes()[..100], memory.bytes()[100]), (&[7u8; 100][..], 0));
    assert_eq!(file.read_at(memory.bytes_mut(), 1 << 20).unwrap(), 0);
    assert!(disk.open("shard-0000/segment-00000009").is_err());
}

#[test]
fn real_and_remembered_directories_answer_alike() {
    let scratch = Scratch::new("alike");
    fill(&RealWriter::open(&scratch.0).unwrap());
    for direct in [false, true] {
        check(&RealDisk::open(&scratch.0, direct, false).unwrap());
    }
    let memory = MemoryDisk::new();
    fill(&memory);
    check(&memory);
    assert_eq!(memory.steps().len(), 10, "what is refused is not recorded");
}

#[test]
fn links_pipes_and_folders_are_not_opened() {
    let scratch = Scratch::new("odd");
    std::fs::create_dir(scratch.0.join("folder")).unwrap();
    symlink("/dev/zero", scratch.0.join("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(scratch.0.join("socket")).unwrap();
    let disk = RealDisk::open(&scratch.0, true, false).unwrap();
    let kinds = nodes(&disk, "");
    assert_eq!(kinds[1], ("link".to_owned(), NodeKind::Link));
    assert_eq!(kinds[2], ("socket".to_owned(), NodeKind::Other));
    for name in ["folder", "link", "socket"] {
        assert!(disk.open(name).is_err(), "{name}");
    }
}

#[test]
#[allow(clippy::disallowed_methods, reason = "plays the store that holds the lock")]
fn a_store_that_is_open_elsewhere_is_refused_unless_it_is_asked_for_live() {
    let scratch = Scratch::new("lock");
    let engine = std::fs::File::create(scratch.0.join("lock")).unwrap();
    engine.lock().unwrap();
    assert!(matches!(RealDisk::open(&scratch.0, true, false), Err(real::OpenError::InUse)));
    assert!(matches!(RealWriter::open(&scratch.0), Err(real::OpenError::InUse)));
    RealDisk::open(&scratch.0, true, true).unwrap();
    engine.unlock().unwrap();
    let one = RealDisk::open(&scratch.0, true, false).unwrap();
    let two = RealDisk::open(&scratch.0, true, false).unwrap();
    engine.try_lock().unwrap_err();
    assert!(matches!(RealWriter::open(&scratch.0), Err(real::OpenError::InUse)));
    drop((one, two));
    engine.try_lock().unwrap();
}

#[test]
fn a_folder_that_is_a_link_is_neither_read_nor_written_through() {
    let (scratch, other) = (Scratch::new("linked"), Scratch::new("linked-to"));
    fill(&RealWriter::open(&other.0).unwrap());
    symlink(other.0.join("shard-0000"), scratch.0.join("shard-0000")).unwrap();
    let disk = RealDisk::open(&scratch.0, true, false).unwrap();
    assert!(disk.open("shard-0000/segment-00000001").is_err());
    assert!(disk.visit("shard-0000", &mut |_| panic!("it was followed")).is_err());
    let writer = RealWriter::open(&scratch.0).unwrap();
    assert!(writer.write_at("shard-0000/segment-00000007", 0, &[1]).is_err());
    assert!(writer.remove("shard-0000/segment-00000001").is_err());
    assert!(writer.rename("shard-0000/segment-00000001", "taken").is_err());
    check(&RealDisk::open(&other.0, true, false).unwrap());
}

#[test]
fn a_cut_keeps_the_sectors_that_arrived() {
    let disk = MemoryDisk::new();
    disk.cut_after(1);
    disk.write_at("file", 0, &[1; 1024]).unwrap();
    disk.write_at("file", 0, &[2; 1024]).unwrap_err();
    assert_eq!(disk.contents("file").unwrap(), vec![1; 1024]);
    let mut first = true;
    disk.apply(&Step::Write("file".into(), 0, vec![3; 1024]), &mut || std::mem::replace(&mut first, false));
    assert_eq!(disk.contents("file").unwrap(), [[3; 512], [1; 512]].concat());
}
