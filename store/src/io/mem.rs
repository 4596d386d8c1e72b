//! Memory that a device may read and write: regions, and refcounted ranges of them.
//!
//! A device writes behind the compiler's back, and an engine may hand in memory that other processes write, so
//! the bytes of a region are never seen through a Rust reference: every access copies in or out, or digests,
//! through raw pointers in this module. Who may touch which range when is the caller's protocol (an operation
//! owns its buffers until its completion); a broken protocol gives garbled bytes, which digests catch.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, MmapMut};

/// The alignment of a region's base, and what direct I/O asks of offsets, lengths and memory.
pub const PAGE: usize = 4096;

/// A stretch of memory at a fixed address that lives until its last [`Buf`] is dropped.
pub struct Region {
    base: *mut u8,
    len: usize,
    /// Differs between all regions of a process, so that a ring can remember what it registered.
    id: u64,
    /// Other processes may write to it at any time.
    shared: bool,
    /// What keeps the memory alive; never looked into.
    _keeper: Box<dyn Any + Send + Sync>,
}

// SAFETY: `base` points at memory that `_keeper` (itself Send + Sync) keeps mapped at that address until drop.
// All access is by raw copies inside this module, so no Rust reference can be invalidated by another thread.
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

    /// Addresses without memory: what is read there is zero, nothing can be written. The kernel need not have as much
    /// memory, whatever it promises to others.
    pub fn reserved(len: usize) -> io::Result<Arc<Self>> {
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses the place, so nothing that is mapped is replaced.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let reserved = Reserved { base: base as usize, len };
        // SAFETY: mapped until `reserved` is dropped. It is not writable: who asks for it promises to write nothing, and
        // a device that was told to gets an error.
        Ok(unsafe { Self::adopt(base.cast(), len, Box::new(reserved)) })
    }

    /// Has the kernel put the region into huge pages as far as it can, and says whether it did so everywhere. What is in it
    /// stays, and nobody who uses it notices but by the speed: a device is told of long stretches instead of single
    /// pages. It takes a processor for up to some milliseconds for each MiB.
    pub fn collapse(&self) -> bool {
        // SAFETY: the range is mapped for as long as the region lives (contract of `adopt`), and this advice changes
        // which pages hold the bytes, not the bytes.
        unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_COLLAPSE) == 0 }
    }

    /// Memory that somebody else allocated.
    ///
    /// # Safety
    /// `base .. base + len` must be mapped readable and writable for as long as `keeper` is not dropped.
    pub unsafe fn adopt(base: *mut u8, len: usize, keeper: Box<dyn Any + Send + Sync>) -> Arc<Self> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { base, len, id, shared: false, _keeper: keeper })
    }

    /// As [`Region::adopt`], of memory that other processes may write to at any time: what is found in it proves
    /// nothing about where it came from.
    ///
    /// # Safety
    /// As of [`Region::adopt`].
    pub unsafe fn adopt_shared(base: *mut u8, len: usize, keeper: Box<dyn Any + Send + Sync>) -> Arc<Self> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { base, len, id, shared: true, _keeper: keeper })
    }

    /// Whether other processes may write to it.
    pub fn is_shared(&self) -> bool {
        self.shared
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

    /// Where the region begins. For the kernel and for device drivers; this module does every other access.
    pub fn base(&self) -> *mut u8 {
        self.base
    }
}

/// Gives reserved addresses back when dropped.
struct Reserved {
    base: usize,
    len: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: this is what was mapped, and the region that it belonged to is gone.
        let _ = unsafe { libc::munmap(self.base as *mut libc::c_void, self.len) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}, {} bytes)", self.id, self.len)
    }
}

/// A range of a [`Region`], which it keeps alive. Cloning shares the memory, it copies nothing.
#[derive(Clone)]
pub struct Buf {
    region: Arc<Region>,
    /// Invariant: `offset + len <= region.len`.
    offset: usize,
    len: usize,
    /// What must outlive this range besides the region: the piece of an arena that it belongs to.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl Buf {
    /// The range `offset .. offset + len`, or `None` if the region ends before it.
    pub fn new(region: &Arc<Region>, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= region.len).then(|| Self { region: Arc::clone(region), offset, len, _keeper: None })
    }

    /// A part of this range.
    pub fn slice(&self, at: usize, len: usize) -> Option<Self> {
        let end = at.checked_add(len)?;
        let offset = self.offset.checked_add(at)?;
        (end <= self.len).then(|| Self { offset, len, ..self.clone() })
    }

    /// The same range, which keeps `keeper` alive as well: so do its clones and slices, an operation under way
    /// among them.
    #[must_use]
    pub fn kept_by(self, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _keeper: Some(keeper), ..self }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Where in the region the range begins.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Where the range begins. For the kernel; every access by this process is a method of this type.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `offset <= region.len` (field invariant), so the result is inside or one past the allocation.
        unsafe { self.region.base.add(self.offset) }
    }

    /// Whether address and length suit direct I/O.
    pub fn is_aligned(&self) -> bool {
        self.as_ptr().addr().is_multiple_of(PAGE) && self.len.is_multiple_of(PAGE)
    }

    fn check(&self, at: usize, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "range past the end of a buffer");
    }

    /// Copies `bytes.len()` bytes out, from `at`.
    ///
    /// # Panics
    /// If the range ends before.
    pub fn copy_out(&self, at: usize, bytes: &mut [u8]) {
        self.check(at, bytes.len());
        // SAFETY: checked above; `bytes` is a live exclusive slice, so it cannot overlap a region (module doc).
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr().add(at), bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Copies `bytes` in, to `at`.
    ///
    /// # Panics
    /// If the range ends before.
    pub fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: as in `copy_out`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.as_ptr().add(at), bytes.len()) }
    }

    /// Copies `len` bytes from `source` at `from` to `at`; the ranges may overlap.
    ///
    /// # Panics
    /// If either range ends before.
    pub fn copy_from(&self, at: usize, source: &Self, from: usize, len: usize) {
        self.check(at, len);
        source.check(from, len);
        // SAFETY: both ranges are checked above; `copy` allows overlap.
        unsafe { std::ptr::copy(source.as_ptr().add(from), self.as_ptr().add(at), len) }
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the range is inside the region (field invariant).
        unsafe { std::ptr::write_bytes(self.as_ptr(), byte, self.len) }
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_out(0, &mut bytes);
        bytes
    }

    /// Shows the bytes to `look`, which must not write to the region.
    ///
    /// This is the only place where region memory is seen through a reference: digests need a slice, and a copy
    /// would cost what the digest costs. If somebody writes at the same time the digest is of garbled bytes and
    /// will not match; nothing but a digest may be computed from the slice.
    pub fn digest<T>(&self, at: usize, len: usize, look: impl FnOnce(&[u8]) -> T) -> T {
        self.check(at, len);
        // SAFETY: in range (checked above) and mapped (Region); see the doc for concurrent writers.
        look(unsafe { std::slice::from_raw_parts(self.as_ptr().add(at), len) })
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({}+{} of {:?})", self.offset, self.len, self.region)
    }
}

/// One element of a vectored transfer, laid out as the kernel's `struct iovec`.
///
/// It borrows nothing: whoever makes one keeps the [`Buf`] for as long as the kernel may use it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct IoVec {
    base: *mut u8,
    len: usize,
}

impl IoVec {
    /// The range of a buffer.
    pub(crate) fn of(buf: &Buf) -> Self {
        Self { base: buf.as_ptr(), len: buf.len() }
    }

    /// A stretch of a region, for registering it.
    pub(crate) fn piece(region: &Region, offset: usize, len: usize) -> Self {
        debug_assert!(offset.checked_add(len).is_some_and(|end| end <= region.len()));
        Self { base: region.base().wrapping_add(offset), len }
    }

    /// No memory at all.
    pub(crate) fn empty() -> Self {
        Self { base: std::ptr::null_mut(), len: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_pages_hold_the_same_bytes() {
        let region = Region::anonymous(5 << 20).unwrap();
        let buf = Buf::new(&region, 0, region.len()).unwrap();
        let bytes: Vec<u8> = (0..region.len()).map(|at| (at / 7) as u8).collect();
        buf.copy_in(0, &bytes);
        // What the kernel can do of it is its own affair.
        let _ = region.collapse();
        assert!(buf.to_vec() == bytes);
        assert!(!Region::anonymous(PAGE).unwrap().collapse(), "no room for a large page");
    }

    #[test]
    fn a_range_never_leaves_its_region() {
        let region = Region::anonymous(100).unwrap();
        assert_eq!(region.len(), PAGE);
        assert!(Buf::new(&region, PAGE, 1).is_none());
        assert!(Buf::new(&region, usize::MAX, 2).is_none());
        let buf = Buf::new(&region, 10, 20).unwrap();
        assert!(buf.slice(10, 11).is_none());
        assert!(buf.slice(usize::MAX, 1).is_none());
        assert_eq!(buf.slice(5, 15).map(|part| (part.offset(), part.len())), Some((15, 15)));
    }

    #[test]
    fn bytes_go_in_and_come_out() {
        let buf = Buf::new(&Region::anonymous(PAGE).unwrap(), 8, 16).unwrap();
        buf.copy_in(4, b"abcd");
        buf.copy_from(8, &buf.clone(), 4, 4);
        let mut out = [0; 4];
        buf.copy_out(8, &mut out);
        assert_eq!(&out, b"abcd");
        assert_eq!(buf.digest(4, 4, <[u8]>::to_vec), b"abcd");
    }

    #[test]
    fn memory_outlives_the_region_handle() {
        let buf = Buf::new(&Region::anonymous(PAGE).unwrap(), 0, PAGE).unwrap();
        buf.fill(7);
        assert_eq!(buf.to_vec(), vec![7; PAGE]);
    }
}
