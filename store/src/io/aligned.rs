//! A mapping of a file in memory that begins where a large page can.
//!
//! The kernel puts such memory into large pages on request ([`Region::collapse`](super::Region::collapse)), but only where the
//! address and the place in the file are the same part of a large page. It chooses addresses of shared mappings without regard
//! to that, so a request for large pages fails as a whole at nearly every address that it chose.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// Bytes of a large page.
pub const LARGE_PAGE: usize = 2 << 20;

/// The first bytes of a file, mapped for reading and writing until this is dropped.
pub(super) struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: a mapping belongs to the process; unmapping it from any thread is sound, and this type gives no access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, whole pages. The file must have them for as long as the memory is touched.
    pub(super) fn new(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        if len < LARGE_PAGE {
            // SAFETY: the kernel chooses addresses that are free.
            let base = unsafe { map(ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd())? };
            return Ok(Self { base, len });
        }
        // Addresses with room for an aligned start among them; the mapping takes their place in one step, so that no other
        // thread can get them in between.
        let room = len.checked_add(LARGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: as above.
        let reserved = unsafe { map(ptr::null_mut(), room, libc::PROT_NONE, kind, -1)? };
        let before = reserved.align_offset(LARGE_PAGE);
        let base = reserved.wrapping_add(before);
        // SAFETY: the range lies in the reservation, which no code knows but this function.
        let mapped = unsafe { map(base, len, access, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd()) };
        if let Err(error) = mapped {
            // SAFETY: as above; a part that is not mapped any more is no error.
            unsafe { libc::munmap(reserved.cast(), room) };
            return Err(error);
        }
        for (at, len) in [(reserved, before), (base.wrapping_add(len), room - before - len)] {
            if len > 0 {
                // SAFETY: what the mapping left of the reservation.
                unsafe { libc::munmap(at.cast(), len) };
            }
        }
        Ok(Self { base, len })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, whose users are gone (contract of what the base was given to).
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// # Safety
/// With `MAP_FIXED`: no memory in use may lie in the range.
unsafe fn map(at: *mut u8, len: usize, access: i32, kind: i32, file: i32) -> io::Result<*mut u8> {
    // SAFETY: the contract of this function.
    let base = unsafe { libc::mmap(at.cast(), len, access, kind, file, 0) };
    if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base.cast()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use kvarts_contract::buffers::shared::sealed;

    #[test]
    fn mappings_begin_where_a_large_page_can_and_leave_nothing_behind() {
        let odd = LARGE_PAGE + 4096;
        let file = sealed(odd as u64).unwrap();
        // Many at once: an address that is right by chance would be wrong in the next.
        let mappings: Vec<_> = (0..16).map(|_| Mapping::new(file.as_fd(), odd).unwrap()).collect();
        let bases: Vec<usize> = mappings.iter().map(|mapping| mapping.base().addr()).collect();
        assert!(bases.iter().all(|base| base.is_multiple_of(LARGE_PAGE)), "{bases:x?}");
        let reserved = |bases: &[usize]| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let begins =
                maps.lines().filter_map(|line| usize::from_str_radix(line.split('-').next()?, 16).ok());
            begins
                .filter(|begin| bases.iter().any(|base| (*base..base + odd + LARGE_PAGE).contains(begin)))
                .count()
        };
        assert!(reserved(&bases) >= bases.len());
        drop(mappings);
        let small = Mapping::new(file.as_fd(), 4096).unwrap();
        assert!(!small.base().is_null());
    }

    #[test]
    fn a_length_that_no_address_space_has_is_an_error() {
        let file = sealed(4096).unwrap();
        for len in [usize::MAX & !4095, 1 << 62] {
            assert!(Mapping::new(file.as_fd(), len).is_err(), "{len}");
        }
    }
}
