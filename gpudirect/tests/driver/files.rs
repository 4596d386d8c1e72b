//! The stand-in for libcufile by itself: that it is found, that it reads into device memory, that it sees misuse.

use std::fs::File;
use std::io::Write;

use kvarts_gpudirect::device::Device;
use kvarts_gpudirect::device::cuda::{Cuda, has_cufile};

use crate::copies::pattern;
use crate::standin::{Files, Kit, Standin, here, inside};

/// A file of these bytes that no other process sees.
pub(crate) fn file(bytes: &[u8]) -> File {
    let path = std::env::temp_dir().join(format!("kvarts-standin-{}", std::process::id()));
    let mut written = File::create(&path).unwrap();
    written.write_all(bytes).unwrap();
    let file = File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file
}

#[test]
fn cufile_is_found_and_reads_into_device_memory() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("a cuFile that does as a test says");
        assert!(has_cufile());
        let device = Cuda::open(0).unwrap();
        let (files, memory) = (Files::load(), device.allocate(8192).unwrap());
        let (bytes, base) = (pattern(10_000, 2), memory.base());
        let file = file(&bytes);
        assert_eq!(files.driver("cuFileDriverOpen"), 0);
        let handle = files.register(&file).unwrap();
        assert_eq!(files.register_buffer(base, 8192), 0);
        assert_eq!(files.read(handle, base, 4096, 100, 512), 4096);
        assert!(standin.peek(base + 512, 4096) == bytes[100..4196]);
        assert!(standin.peek(base, 512).iter().all(|byte| *byte == 0xd5), "and nowhere else");
        assert_eq!(files.read(handle, base, 4096, 9000, 0), 1000, "the end of the file");
        files.next_reads(1, 7, 1);
        assert_eq!(files.read(handle, base, 4096, 0, 0), 7);
        files.next_reads(2, 5, 1);
        assert_eq!(files.read(handle, base, 4096, 0, 0), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(5));
        files.next_reads(3, 5030, 1);
        assert_eq!(files.read(handle, base, 4096, 0, 0), -5030);
        assert_eq!(files.read(handle, base, 4096, 0, 0), 4096);
        assert_eq!(files.deregister_buffer(base), 0);
        files.deregister(handle);
        assert_eq!(files.driver("cuFileDriverClose_v2"), 0);
    });
}

#[test]
fn the_stand_in_sees_misuse_of_files() {
    inside(Kit::Whole, here!(), |standin| {
        standin.only("a cuFile that does as a test says");
        let device = Cuda::open(0).unwrap();
        let (files, memory) = (Files::load(), device.allocate(8192).unwrap());
        let (base, file) = (memory.base(), file(&pattern(8192, 1)));
        let saw = |says: &str| saw(standin, says);
        assert_eq!(files.driver("cuFileDriverClose"), 5001);
        saw("without cuFileDriverOpen");
        files.driver("cuFileDriverOpen");
        let handle = files.register(&file).unwrap();
        assert_eq!(files.register(&file), Err(5028));
        assert_eq!(files.read(handle, base, 4096, 0, 0), -5024);
        saw("a buffer that is not registered");
        assert_eq!(files.register_buffer(1 << 20, 4096), 5013);
        saw("no device memory");
        assert_eq!(files.register_buffer(base, 4096), 0);
        assert_eq!(files.register_buffer(base, 4096), 5023);
        assert_eq!(files.read(handle, base, 4096, 0, 1), -5022);
        saw("beyond its buffer");
        files.align(4096);
        assert_eq!(files.read(handle, base, 512, 0, 0), -5022);
        saw("not aligned");
        files.align(1);
        files.deregister(handle);
        assert_eq!(files.read(handle, base, 4096, 0, 0), -5027);
        saw("deregistered");
        files.deregister(handle);
        saw("no handle");
        assert_eq!(standin.live()[0], "contexts retained: 1");
        drop(memory);
        assert_eq!(files.deregister_buffer(base), 0);
        saw("freed before");
        assert_eq!(files.deregister_buffer(base), 5024);
        saw("not registered");
        files.driver("cuFileDriverClose");
    });
}

/// What was seen since the last time, and nothing else.
fn saw(standin: &Standin, says: &str) {
    let misuse = standin.misuse();
    assert!(misuse.len() == 1 && misuse[0].contains(says), "{misuse:?} for {says}");
    standin.forgive();
}
