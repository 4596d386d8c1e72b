//! Memory that another process maps as well: files in memory, made here and handed out, or taken over from a client.
//!
//! Whoever maps a file that somebody else may shorten is killed by the first touch behind its end. So nothing is
//! mapped here that can be shortened: a file of ours is sealed before anybody sees it, and one of somebody else's must
//! be a file in memory, in pages of the usual size, that is sealed against shrinking. Its bytes may change at any
//! moment: a [`Region`] made here says so ([`Region::is_shared`]), and nothing may be concluded from them about a disk.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use memmap2::MmapOptions;
use rustix::fs::{MemfdFlags, SealFlags};

use super::mem::{PAGE, Region};

/// What `fstatfs` says of a file in memory. Those of huge pages are another kind: they can run out of pages, which
/// kills whoever touches one.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Makes a file in memory of whole pages, whose length nobody can change any more.
pub fn sealed(bytes: u64) -> io::Result<OwnedFd> {
    let bytes = bytes.max(1).checked_next_multiple_of(PAGE as u64).ok_or(io::ErrorKind::OutOfMemory)?;
    let file = rustix::fs::memfd_create("kvarts", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Seals a file in memory so that others may map it; refused by one that was made without permission to.
pub fn seal(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK)?)
}

/// The length of a file in memory that cannot be shortened, or what is wrong with it.
pub fn length(file: impl AsFd) -> Result<u64, &'static str> {
    let file = file.as_fd();
    let kind = rustix::fs::fstatfs(file).map_err(|_| "the descriptor is no file")?;
    // The type's width differs between architectures.
    if kind.f_type as u64 & 0xffff_ffff != TMPFS_MAGIC {
        return Err("only files in memory with pages of the usual size can be shared");
    }
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|_| "the file cannot be sealed")?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err("the file is not sealed against shrinking (F_SEAL_SHRINK)");
    }
    // After the seals: from then on it only grows.
    let bytes = rustix::fs::fstat(file).map_err(|_| "the descriptor is no file")?.st_size;
    u64::try_from(bytes).map_err(|_| "the file has no length")
}

/// Maps the first `bytes` of a file in memory for reading and writing. `keeper` is dropped when the last user of the
/// memory is gone, a device under way among them.
pub fn map(file: impl AsFd, bytes: u64, keeper: Box<dyn Any + Send + Sync>) -> io::Result<Arc<Region>> {
    let refused = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
    let file = file.as_fd();
    let all = length(file).map_err(refused)?;
    let whole = bytes > 0 && bytes.is_multiple_of(PAGE as u64);
    if !whole || bytes > all {
        return Err(refused("what is mapped is whole pages of the file, at least one"));
    }
    let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let map = MmapOptions::new().len(len).map_raw(&file)?;
    let base = map.as_mut_ptr();
    // SAFETY: the map owns `len` bytes at `base`, readable and writable, until it is dropped with the keeper, and
    // moving it does not move them. The file is at least as long and sealed against shrinking (both looked at above,
    // the seal cannot be taken off), so every page of the range has memory behind it at any time.
    Ok(unsafe { Region::adopt_shared(base, len, Box::new((map, keeper))) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Buf;

    #[test]
    fn what_is_handed_out_is_seen_by_both_and_cannot_be_shortened() {
        let file = sealed(PAGE as u64 + 1).unwrap();
        assert_eq!(length(&file), Ok(2 * PAGE as u64));
        assert!(rustix::fs::ftruncate(&file, 0).is_err() && rustix::fs::ftruncate(&file, 1 << 20).is_err());
        let (here, there) =
            (map(&file, 8192, Box::new(())).unwrap(), map(&file, 4096, Box::new(())).unwrap());
        assert!(here.is_shared());
        Buf::new(&here, 100, 4).unwrap().copy_in(0, b"seen");
        assert_eq!(Buf::new(&there, 100, 4).unwrap().to_vec(), b"seen");
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
        let buf = Buf::new(&region, 0, 16).unwrap();
        drop(region);
        assert_eq!(Arc::strong_count(&kept), 2);
        drop(buf);
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}
