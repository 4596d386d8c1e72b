//! Memory that another process maps as well: files in memory, made here and handed out, or taken over from a client.
//!
//! A process that maps a file which another may shorten is killed by the first touch behind its end. So a file of ours is
//! sealed before another process sees it, and [`map`] takes only files in memory, in pages of the usual size, that are sealed
//! against shrinking. The bytes of a file may change at any moment: a [`Region`] made here says so ([`Region::is_shared`]),
//! and nothing may be concluded from them about a disk.
//!
//! No seal keeps its owner from taking pages away and leaving holes. A process that touches a hole needs a page at once,
//! and is killed, or pays, where there is none. So another's file is mapped for devices alone ([`map_foreign`]); this process
//! reads and writes it by its descriptor: a hole is read as zeros without a page, and what fails is an error. This also
//! covers a file that is not sealed and is shortened: a device that is asked to write behind its end answers `EFAULT`.
//!
//! A device that was told of pages writes to them whatever becomes of the file, the mapping, or the process that asked it.
//! [`replace`] takes such pages out of a file: late writes go to unreachable memory, and the next touch finds new pages.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;

use super::aligned::Mapping;
use super::foreign::Foreign;
use super::region::{PAGE, Region};

/// What `fstatfs` says of a file in memory. Those of huge pages are another kind: they can run out of pages, which
/// kills a process that touches one.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Makes a file in memory of whole pages, whose length cannot change any more.
pub fn sealed(bytes: u64) -> io::Result<OwnedFd> {
    let bytes = bytes.max(1).checked_next_multiple_of(PAGE as u64).ok_or(io::ErrorKind::OutOfMemory)?;
    let file = rustix::fs::memfd_create("kvarts", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Seals a file in memory so that others may map it; refused by one that was made without permission to.
pub fn seal(file: impl AsFd) -> io::Result<()> {
    let file = file.as_fd();
    if rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        return Ok(());
    }
    Ok(rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK)?)
}

/// The length of a file in memory that cannot be shortened, in the whole pages that it is mapped in, or what is wrong with it.
pub fn length(file: impl AsFd) -> Result<u64, &'static str> {
    let file = file.as_fd();
    let seals = seals(file)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err("the file is not sealed against shrinking (F_SEAL_SHRINK)");
    }
    // After the seals: from then on it only grows.
    length_now(file)
}

/// The length that a file in memory has now, in whole pages, or what is wrong with it. Where it is not sealed, its owner may shorten it.
pub fn length_now(file: impl AsFd) -> Result<u64, &'static str> {
    let file = file.as_fd();
    seals(file)?;
    let bytes = rustix::fs::fstat(file).map_err(|_| "the descriptor does not refer to a file")?.st_size;
    let bytes = u64::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(PAGE as u64));
    bytes.ok_or("the file is empty: set its length first (ftruncate)")
}

/// Whether it is a file in memory with pages of the usual size. Only of such a file other calls are known to return soon; this one may not.
pub fn is_in_memory(file: impl AsFd) -> Result<(), &'static str> {
    let kind = rustix::fs::fstatfs(file).map_err(|_| "the descriptor does not refer to a file")?;
    // The type's width differs between architectures.
    match kind.f_type as u64 & 0xffff_ffff == TMPFS_MAGIC {
        true => Ok(()),
        false => Err("the file cannot be shared: use an in-memory file (memfd) without huge pages"),
    }
}

/// The seals of a file in memory; other files are refused.
fn seals(file: BorrowedFd<'_>) -> Result<SealFlags, &'static str> {
    is_in_memory(file)?;
    rustix::fs::fcntl_get_seals(file).map_err(|_| {
        "the file cannot be sealed against shrinking \
        (F_SEAL_SHRINK)"
    })
}

/// Maps the first `bytes` of a file in memory for reading and writing. `keeper` is dropped when the last user of the
/// memory is gone, a device under way among them.
pub fn map(file: impl AsFd, bytes: u64, keeper: Box<dyn Any + Send + Sync>) -> io::Result<Arc<Region>> {
    let file = file.as_fd();
    let (map, len) = mapped(file, bytes, length(file))?;
    let base = map.base();
    // SAFETY: the map owns `len` bytes at `base`, readable and writable, until it is dropped with the keeper, and
    // moving it does not move them. The file is at least as long and sealed against shrinking (both looked at above,
    // the seal cannot be taken off), so every page of the range has memory behind it at any time.
    Ok(unsafe { Region::adopt_shared(base, len, Box::new((map, keeper))) })
}

/// As [`map`], of a file that this process's own program made and cannot seal, such as an engine's in `/dev/shm`. The program
/// must not shorten it while the region lives: as with the program's own mapping, a touch behind its end kills the process.
pub fn map_own(file: impl AsFd, bytes: u64, keeper: Box<dyn Any + Send + Sync>) -> io::Result<Arc<Region>> {
    let file = file.as_fd();
    let (map, len) = mapped(file, bytes, length_now(file))?;
    let base = map.base();
    // SAFETY: as in `map`; a page that its owner took away kills the process and is no access to other memory.
    Ok(unsafe { Region::adopt_shared(base, len, Box::new((map, keeper))) })
}

/// The mapping of the first `bytes` of a file in memory that has `all`, and its length.
fn mapped(file: BorrowedFd<'_>, bytes: u64, all: Result<u64, &'static str>) -> io::Result<(Mapping, usize)> {
    let refused = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
    let all = all.map_err(refused)?;
    let whole = bytes > 0 && bytes.is_multiple_of(PAGE as u64);
    if !whole || bytes > all {
        return Err(refused("the mapping covers no whole page of the file: at least one page is needed"));
    }
    let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    Ok((Mapping::new(file, len)?, len))
}

/// Gives back memory that takes long to give back, so that no executor waits for it.
pub type Reaper = Arc<dyn Fn(Box<dyn Any + Send + Sync>) + Send + Sync>;

/// What keeps a foreign file mapped. Its end may free gigabytes of pages.
struct Mapped {
    what: Option<Box<dyn Any + Send + Sync>>,
    reaper: Reaper,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Some(what) = self.what.take() {
            (self.reaper)(what);
        }
    }
}

/// As [`map`], of a file whose owner may take pages away at any moment, or shorten it where it is not sealed. Only devices use
/// the mapping; the region's bytes are read and written by the descriptor. The mapping, the descriptor and `keeper` go to `reaper` in the end.
pub fn map_foreign(
    file: OwnedFd,
    bytes: u64,
    keeper: Box<dyn Any + Send + Sync>,
    reaper: &Reaper,
) -> io::Result<Arc<Region>> {
    let (map, len) = mapped(file.as_fd(), bytes, length_now(&file))?;
    let base = map.base();
    let foreign = Arc::new(Foreign::new(file));
    let what: Box<dyn Any + Send + Sync> = Box::new((map, Arc::clone(&foreign), keeper));
    let keeper = Box::new(Mapped { what: Some(what), reaper: Arc::clone(reaper) });
    // SAFETY: as in `map`; and nothing but the region knows the mapping, whose keeper does no more than unmap it.
    Ok(unsafe { Region::adopt_foreign((base, len), foreign, keeper) })
}

/// Whether each of the first `bytes` bytes of a file in memory has its page. The place at which its other users read on stays
/// as it is: it belongs to what was opened, so the file is opened once more.
pub fn is_populated(file: impl AsFd, bytes: u64) -> bool {
    let name = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let own = rustix::fs::open(name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    own.and_then(|own| rustix::fs::seek(own, SeekFrom::Hole(0))).is_ok_and(|hole| hole >= bytes)
}

/// Takes the pages of `range`, whole ones, out of a file in memory, and cuts off processes that still write to them: the
/// range reads as zeros afterwards. False if some pages could not be taken out and were only overwritten with zeros: the
/// range is a part of a large page that is in use elsewhere. A later call may succeed.
pub fn replace(file: impl AsFd, range: Range<u64>) -> io::Result<bool> {
    if range.is_empty() {
        return Ok(true);
    }
    let file = file.as_fd();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, hole, range.start, range.end - range.start)?;
    match rustix::fs::seek(file, SeekFrom::Data(range.start)) {
        Ok(data) => Ok(data >= range.end),
        Err(Errno::NXIO) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::SharedBuf;

    #[test]
    fn what_is_handed_out_is_seen_by_both_and_cannot_be_shortened() {
        let file = sealed(PAGE as u64 + 1).unwrap();
        assert_eq!(length(&file), Ok(2 * PAGE as u64));
        assert!(rustix::fs::ftruncate(&file, 0).is_err() && rustix::fs::ftruncate(&file, 1 << 20).is_err());
        let (here, there) =
            (map(&file, 8192, Box::new(())).unwrap(), map(&file, 4096, Box::new(())).unwrap());
        assert!(here.is_shared());
        SharedBuf::new(&here, 100, 4).unwrap().copy_in(0, b"seen");
        assert_eq!(SharedBuf::new(&there, 100, 4).unwrap().to_vec(), b"seen");
    }

    #[test]
    fn what_could_be_shortened_is_not_mapped() {
        let open = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 8192).unwrap();
        assert!(length(&open).unwrap_err().contains("F_SEAL_SHRINK"));
        assert!(map(&open, 4096, Box::new(())).is_err());
        seal(&open).unwrap();
        assert!(rustix::fs::ftruncate(&open, 0).is_err());
        assert!(map(&open, 4096, Box::new(())).is_ok());
        for wrong in [0, 1, 4097, 12288] {
            assert!(map(&open, wrong, Box::new(())).is_err(), "{wrong}");
        }
        let unsealable = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealable, 8192).unwrap();
        assert!(length(&unsealable).is_err() && seal(&unsealable).is_err());
    }

    #[test]
    fn other_descriptors_are_refused() {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        assert!(length(&event).is_err());
        let (read, _write) = rustix::pipe::pipe().unwrap();
        assert!(length(&read).is_err());
        let folder = rustix::fs::open("/", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
        assert!(length(&folder).is_err());
    }

    #[test]
    fn the_keeper_goes_with_the_last_user() {
        let file = sealed(4096).unwrap();
        let kept = Arc::new(());
        let region = map(&file, 4096, Box::new(Arc::clone(&kept))).unwrap();
        let buf = SharedBuf::new(&region, 0, 16).unwrap();
        drop(region);
        assert_eq!(Arc::strong_count(&kept), 2);
        drop(buf);
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    fn foreign(bytes: u64) -> (Arc<Region>, OwnedFd) {
        let file = sealed(bytes).unwrap();
        let theirs = rustix::io::fcntl_dupfd_cloexec(&file, 0).unwrap();
        let reaper: Reaper = Arc::new(drop);
        (map_foreign(file, bytes, Box::new(()), &reaper).unwrap(), theirs)
    }

    fn blocks(file: &OwnedFd) -> i64 {
        rustix::fs::fstat(file).unwrap().st_blocks
    }

    #[test]
    fn what_is_read_out_of_a_hole_is_zeros_and_takes_no_page() {
        let (region, theirs) = foreign(1 << 20);
        let buf = SharedBuf::new(&region, 0, 1 << 20).unwrap();
        let own = SharedBuf::new(&Region::anonymous(1 << 20).unwrap(), 0, 1 << 20).unwrap();
        own.fill(9);
        own.copy_from(0, &buf, 0, 1 << 20);
        assert!(own.to_vec() == vec![0; 1 << 20] && buf.to_vec() == vec![0; 1 << 20]);
        assert_eq!(buf.crc32(5, 300_000), crc32fast::hash(&vec![0; 300_000]));
        assert_eq!(buf.digest(5, 300, crc32fast::hash), crc32fast::hash(&[0; 300]));
        assert_eq!((blocks(&theirs), region.has_failed()), (0, false), "a look paid for pages");
        assert!(!is_populated(&theirs, 1 << 20));
    }

    #[test]
    fn copies_reach_another_processs_file_in_every_direction() {
        let ((one, file), (other, _)) = (foreign(1 << 20), foreign(1 << 20));
        let own = SharedBuf::new(&Region::anonymous(1 << 20).unwrap(), 0, 1 << 20).unwrap();
        let bytes: Vec<u8> = (0..1usize << 20).map(|at| (at / 5) as u8).collect();
        own.copy_in(0, &bytes);
        let (one, other) =
            (SharedBuf::new(&one, 0, 1 << 20).unwrap(), SharedBuf::new(&other, 0, 1 << 20).unwrap());
        one.copy_from(0, &own, 0, 1 << 20);
        let theirs = map(&file, 1 << 20, Box::new(())).unwrap();
        assert!(SharedBuf::new(&theirs, 0, 1 << 20).unwrap().to_vec() == bytes);
        other.slice(7, 500_000).unwrap().copy_from(0, &one, 100, 500_000);
        assert!(other.slice(7, 500_000).unwrap().to_vec() == bytes[100..500_100]);
        assert_eq!(other.crc32(7, 500_000), crc32fast::hash(&bytes[100..500_100]));
        other.slice(3, 70_000).unwrap().fill(8);
        assert!(other.slice(3, 70_000).unwrap().to_vec() == vec![8; 70_000]);
        own.copy_from(0, &other, 70_003, 1000);
        assert!(own.to_vec()[..1000] == bytes[70_096..71_096]);
        assert!(is_populated(&file, 1 << 20) && !one.region().has_failed());
    }

    #[test]
    fn a_file_that_takes_no_bytes_any_more_is_an_error_and_not_a_signal() {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        seal(&file).unwrap();
        let theirs = rustix::io::fcntl_dupfd_cloexec(&file, 0).unwrap();
        let reaper: Reaper = Arc::new(drop);
        let region = map_foreign(file, 8192, Box::new(()), &reaper).unwrap();
        rustix::fs::fcntl_add_seals(&theirs, SealFlags::FUTURE_WRITE).unwrap();
        let buf = SharedBuf::new(&region, 0, 8192).unwrap();
        assert!(!region.has_failed());
        buf.copy_in(10, b"refused");
        assert!(region.has_failed());
        assert_eq!(buf.to_vec(), vec![0; 8192]);
    }

    #[test]
    fn a_file_that_is_shortened_is_an_error_and_not_a_signal() {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        let theirs = rustix::io::fcntl_dupfd_cloexec(&file, 0).unwrap();
        assert!(map(&file, 1 << 20, Box::new(())).is_err(), "this process would be killed by a touch");
        let reaper: Reaper = Arc::new(drop);
        let region = map_foreign(file, 1 << 20, Box::new(()), &reaper).unwrap();
        let buf = SharedBuf::new(&region, 0, 1 << 20).unwrap();
        buf.fill(7);
        assert!(!region.has_failed());
        rustix::fs::ftruncate(&theirs, 4096).unwrap();
        let bytes = buf.to_vec();
        assert!(bytes[..4096] == [7; 4096] && bytes[4096..].iter().all(|byte| *byte == 0));
        assert!(region.has_failed(), "bytes that are gone are no bytes");
        // What a device is told of them is what the kernel says of addresses without memory.
        let (read, write) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&write, b"device").unwrap();
        // SAFETY: the region is mapped, and this process looks at it by its descriptor alone.
        let got = unsafe { libc::read(read.as_raw_fd(), region.base().wrapping_add(8192).cast(), 6) };
        assert_eq!((got, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
    }

    #[test]
    fn after_a_cut_no_copy_and_no_new_operation_reaches_the_file() {
        let (region, theirs) = foreign(1 << 20);
        let buf = SharedBuf::new(&region, 0, 1 << 20).unwrap();
        buf.copy_in(0, b"before");
        region.cut_off().unwrap();
        buf.copy_in(0, b"behind");
        assert_eq!(buf.to_vec(), vec![0; 1 << 20]);
        // What a device would do that is asked now: the kernel writes to the addresses.
        let (read, write) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&write, b"device").unwrap();
        // SAFETY: the region is mapped, and no code looks at it.
        let got = unsafe { libc::read(read.as_raw_fd(), region.base().cast(), 6) };
        assert_eq!(got, 6);
        let view = map(&theirs, 1 << 20, Box::new(())).unwrap();
        assert_eq!(&SharedBuf::new(&view, 0, 6).unwrap().to_vec(), b"before");
    }

    #[test]
    fn a_mapping_is_given_back_by_the_reaper_and_nobody_else() {
        let file = sealed(4096).unwrap();
        let (given, kept) = (Arc::new(std::sync::Mutex::new(Vec::new())), Arc::new(()));
        let to = Arc::clone(&given);
        let reaper: Reaper = Arc::new(move |what| to.lock().unwrap().push(what));
        let region = map_foreign(file, 4096, Box::new(Arc::clone(&kept)), &reaper).unwrap();
        drop(SharedBuf::new(&region, 0, 16).unwrap());
        drop(region);
        assert_eq!((given.lock().unwrap().len(), Arc::strong_count(&kept)), (1, 2));
        given.lock().unwrap().clear();
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    #[test]
    fn pages_are_replaced_whole_or_it_is_said_that_they_were_not() {
        let file = sealed(8 << 20).unwrap();
        let region = map(&file, 8 << 20, Box::new(())).unwrap();
        region.populate().unwrap();
        rustix::fs::seek(&file, SeekFrom::Start(5)).unwrap();
        assert!(is_populated(&file, 8 << 20));
        assert_eq!(rustix::fs::tell(&file), Ok(5), "another user of the file reads on elsewhere");
        let all = SharedBuf::new(&region, 0, 8 << 20).unwrap();
        all.fill(7);
        assert!(replace(&file, 4096..12288).unwrap());
        assert!(!is_populated(&file, 8 << 20));
        let bytes = all.slice(0, 16384).unwrap().to_vec();
        assert!(bytes[..4096] == [7; 4096] && bytes[4096..12288] == [0; 8192] && bytes[12288..] == [7; 4096]);
        assert!(replace(&file, 5..5).unwrap());
    }

    /// A ring that was told of pages, and writes into them when the test fills a pipe: as late as a disk can be.
    struct Late {
        ring: io_uring::IoUring,
        write: OwnedFd,
        _read: OwnedFd,
    }

    impl Late {
        /// None where this machine has no ring.
        fn begin(region: &Arc<Region>, at: usize, len: usize) -> Option<Self> {
            let mut ring = io_uring::IoUring::new(4).ok()?;
            let memory = libc::iovec { iov_base: region.base().cast(), iov_len: region.len() };
            // SAFETY: the region lives longer than the ring in these tests.
            unsafe { ring.submitter().register_buffers(&[memory]) }.unwrap();
            let (read, write) = rustix::pipe::pipe().unwrap();
            let to = region.base().wrapping_add(at);
            let fd = io_uring::types::Fd(read.as_raw_fd());
            let entry = io_uring::opcode::ReadFixed::new(fd, to, len as u32, 0).build();
            // SAFETY: as above; the pipe lives as long as the ring.
            unsafe { ring.submission().push(&entry) }.unwrap();
            ring.submit().unwrap();
            Some(Self { ring, write, _read: read })
        }

        /// The late write, to its end.
        fn end(mut self, byte: u8, len: usize) {
            assert_eq!(rustix::io::write(&self.write, &vec![byte; len]).unwrap(), len);
            self.ring.submit_and_wait(1).unwrap();
            assert_eq!(self.ring.completion().next().unwrap().result(), len as i32);
        }
    }

    #[test]
    fn what_is_written_late_to_replaced_pages_is_seen_by_nobody() {
        let file = sealed(1 << 20).unwrap();
        let region = map(&file, 1 << 20, Box::new(())).unwrap();
        let all = SharedBuf::new(&region, 0, 1 << 20).unwrap();
        all.fill(1);
        let (Some(first), Some(second)) = (Late::begin(&region, 0, 4096), Late::begin(&region, 8192, 4096))
        else {
            return;
        };
        assert!(replace(&file, 8192..12288).unwrap());
        all.fill(2);
        second.end(9, 4096);
        assert!(all.to_vec() == vec![2; 1 << 20], "a late write was seen");
        // As it is without that.
        first.end(9, 4096);
        assert!(all.to_vec()[..4096] == [9; 4096]);
    }

    /// Kernels that have large pages make them of a file's wherever it is mapped: as often as it is mapped, because an address
    /// can be right by chance.
    #[test]
    fn files_can_be_put_into_large_pages_wherever_they_are_mapped() {
        let has_large = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        let file = sealed(4 << 20).unwrap();
        let kept: Vec<_> = (0..8).map(|_| map(&file, 4 << 20, Box::new(())).unwrap()).collect();
        for region in &kept {
            region.populate().unwrap();
            assert_eq!(region.collapse(), has_large);
        }
    }

    #[test]
    fn a_large_page_that_a_device_writes_to_is_not_called_replaced_until_it_is() {
        const LARGE: usize = 2 << 20;
        let file = sealed(2 * LARGE as u64).unwrap();
        let region = map(&file, 2 * LARGE as u64, Box::new(())).unwrap();
        let all = SharedBuf::new(&region, 0, 2 * LARGE).unwrap();
        all.fill(1);
        if !region.collapse() {
            return;
        }
        let Some(late) = Late::begin(&region, LARGE, 4096) else { return };
        // The whole of it can be taken out, and a part of it cannot.
        let replaced = replace(&file, LARGE as u64..LARGE as u64 + 4096).unwrap();
        all.slice(LARGE, 4096).unwrap().fill(2);
        late.end(9, 4096);
        let seen = all.slice(LARGE, 4096).unwrap().to_vec() == vec![9; 4096];
        assert_eq!(seen, !replaced, "what is seen of it is what was said");
        // The ring has let go of its pages, in its own time.
        while !replace(&file, LARGE as u64..LARGE as u64 + 4096).unwrap() {
            std::thread::yield_now();
        }
        let bytes = all.to_vec();
        assert!(bytes[LARGE..LARGE + 4096] == [0; 4096] && bytes[..LARGE] == vec![1; LARGE]);
        assert!(bytes[LARGE + 4096..] == vec![1; LARGE - 4096]);
    }
}
