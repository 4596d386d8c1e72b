//! Memory that a device may read and write: regions, of which `buf` makes ranges.
//!
//! A device writes behind the compiler's back, and an engine may hand in memory that other processes write, so
//! no Rust reference to the bytes of a region is kept: every access copies in or out, or digests, through raw pointers
//! in `buf`, whose types say who may touch which range.

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memmap2::{Advice, MmapMut};

use super::foreign::Foreign;

/// The alignment of a region's base, and what direct I/O asks of offsets, lengths and memory.
pub const PAGE: usize = 4096;

/// A stretch of memory at a fixed address that lives until its last range is dropped.
pub struct Region {
    base: *mut u8,
    len: usize,
    /// Differs between all regions of a process, so that a ring can remember what it registered.
    id: u64,
    /// Other processes may write to it at any time.
    shared: bool,
    /// Each of its ranges has one holder who may write to it: no other is made of the same bytes.
    owned: AtomicBool,
    /// A driver knows its pages by their place in memory: they must stay the ones they are.
    fixed: AtomicBool,
    /// How its bytes are reached where another process may take its pages away. Let go before the keeper.
    foreign: Option<Arc<Foreign>>,
    /// What keeps the memory alive; never looked into.
    _keeper: Box<dyn Any + Send + Sync>,
}

// SAFETY: `base` points at memory that `_keeper` (itself Send + Sync) keeps mapped at that address until drop.
// All access is by raw copies in `buf`, so no Rust reference can be invalidated by another thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Region {
    /// Zeroed anonymous memory of at least `len` bytes (rounded up to whole pages, at least one).
    pub fn anonymous(len: usize) -> io::Result<Arc<Self>> {
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut map = MmapMut::map_anon(len)?;
        let base = map.as_mut_ptr();
        // SAFETY: the map owns `len` bytes at `base` and moving the `MmapMut` does not move them.
        Ok(unsafe { Self::adopt(base, len, Box::new(map)) })
    }

    /// As [`Region::anonymous`], in huge pages where the kernel has them; also whether it agreed to try. What it
    /// really gives is up to it.
    pub fn anonymous_huge(len: usize) -> io::Result<(Arc<Self>, bool)> {
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut map = MmapMut::map_anon(len)?;
        // A kernel without huge pages refuses: small ones are as good, only slower to register.
        let huge = map.advise(Advice::HugePage).is_ok();
        let base = map.as_mut_ptr();
        // SAFETY: the map owns `len` bytes at `base` and moving the `MmapMut` does not move them.
        Ok((unsafe { Self::adopt(base, len, Box::new(map)) }, huge))
    }

    /// Has the kernel put the region into huge pages as far as it can, and says whether it did so everywhere. The contents
    /// stay, and users of the region notice only the speed: a device is told of long stretches instead of single pages. The
    /// call takes a processor for up to some milliseconds for each MiB.
    pub fn collapse(&self) -> bool {
        self.collapse_part(0..self.len)
    }

    /// As [`Region::collapse`], of the bytes of this range, which begins with a page.
    pub fn collapse_part(&self, range: Range<usize>) -> bool {
        assert!(range.start <= range.end && range.end <= self.len, "the range lies outside the region");
        // SAFETY: the range is mapped for as long as the region lives (contract of `adopt`), and this advice changes
        // which pages hold the bytes, not the bytes.
        unsafe { libc::madvise(self.base.add(range.start).cast(), range.len(), libc::MADV_COLLAPSE) == 0 }
    }

    /// Has the kernel make every page that is not there, or says why it cannot: later touches find them.
    pub fn populate(&self) -> io::Result<()> {
        // SAFETY: the range is mapped for as long as the region lives (contract of `adopt`), and this advice adds pages of
        // zeros where there are none; it changes no bytes.
        let done = unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_POPULATE_WRITE) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Memory that was allocated elsewhere.
    ///
    /// # Safety
    /// `base .. base + len` must be mapped readable and writable for as long as `keeper` is not dropped.
    pub unsafe fn adopt(base: *mut u8, len: usize, keeper: Box<dyn Any + Send + Sync>) -> Arc<Self> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (owned, fixed, foreign) = (AtomicBool::new(false), AtomicBool::new(false), None);
        Arc::new(Self { base, len, id, shared: false, owned, fixed, foreign, _keeper: keeper })
    }

    /// As [`Region::adopt`], of memory that other processes may write to at any time: what is found in it proves
    /// nothing about where it came from.
    ///
    /// # Safety
    /// As of [`Region::adopt`].
    pub unsafe fn adopt_shared(base: *mut u8, len: usize, keeper: Box<dyn Any + Send + Sync>) -> Arc<Self> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (owned, fixed, foreign) = (AtomicBool::new(false), AtomicBool::new(false), None);
        Arc::new(Self { base, len, id, shared: true, owned, fixed, foreign, _keeper: keeper })
    }

    /// As [`Region::adopt_shared`], of a file whose pages another process may take away at any time: bytes are reached
    /// through `foreign` alone, and the mapping is for devices.
    ///
    /// # Safety
    /// As of [`Region::adopt`], and nothing but the keeper may rely on what is mapped there.
    pub(super) unsafe fn adopt_foreign(
        (base, len): (*mut u8, usize),
        foreign: Arc<Foreign>,
        keeper: Box<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (owned, fixed, foreign) = (AtomicBool::new(false), AtomicBool::new(false), Some(foreign));
        Arc::new(Self { base, len, id, shared: true, owned, fixed, foreign, _keeper: keeper })
    }

    /// Whether other processes may write to it.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Whether each of its ranges has one holder.
    pub(super) fn is_owned(&self) -> bool {
        self.owned.load(Ordering::Relaxed)
    }

    /// From here on its ranges are handed out one by one, each to one holder.
    pub(super) fn set_owned(&self) {
        self.owned.store(true, Ordering::Relaxed);
    }

    /// The way to its bytes where another process may take its pages away.
    pub(super) fn foreign(&self) -> Option<&Foreign> {
        self.foreign.as_deref()
    }

    /// Whether its pages must stay the ones they are: see [`Region::keep_pages`].
    pub fn keeps_pages(&self) -> bool {
        self.fixed.load(Ordering::SeqCst)
    }

    /// Says whether another user may know the pages by their place in memory, as a driver does after `cudaHostRegister`. Code
    /// that replaces pages of a file in memory by new ones leaves these pages alone.
    pub fn keep_pages(&self, keep: bool) {
        self.fixed.store(keep, Ordering::SeqCst);
    }

    /// Whether bytes of another process's file could not be read or written: what was read then is zeros, and what was
    /// written is not there.
    pub fn has_failed(&self) -> bool {
        self.foreign.as_ref().is_some_and(|foreign| foreign.has_failed())
    }

    /// Notes that a device found no memory to write to, and says whether that can be: only another process's file may have been
    /// shortened, or have no room for a page.
    pub fn note_failure(&self) -> bool {
        self.foreign.as_ref().inspect(|foreign| foreign.note_failure()).is_some()
    }

    /// Ends this process's reach into another's file: when this returns, no copy of this process gets there, and a device
    /// that is asked from now on writes elsewhere. What a device had begun goes to the pages that it had begun with.
    pub fn cut_off(&self) -> io::Result<()> {
        match &self.foreign {
            // SAFETY: the range is a mapping of the keeper's, which only devices access (`adopt_foreign`), and which the
            // keeper unmaps by its addresses.
            Some(foreign) => unsafe { foreign.cut_off(self.base, self.len) },
            None => Ok(()),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Differs between all regions of this process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where the region begins. For the kernel and for device drivers; `buf` does every other access.
    pub fn base(&self) -> *mut u8 {
        self.base
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}, {} bytes)", self.id, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::SharedBuf;

    #[test]
    fn large_pages_hold_the_same_bytes() {
        let region = Region::anonymous(5 << 20).unwrap();
        let buf = SharedBuf::new(&region, 0, region.len()).unwrap();
        let bytes: Vec<u8> = (0..region.len()).map(|at| (at / 7) as u8).collect();
        buf.copy_in(0, &bytes);
        // What the kernel can do of it is its own affair.
        let _ = region.collapse();
        assert!(buf.to_vec() == bytes);
        assert!(!Region::anonymous(PAGE).unwrap().collapse(), "no room for a large page");
    }
}
