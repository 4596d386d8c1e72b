//! Ranges of memory as the kernel's vectors.

use super::buf::SharedBuf;
use super::region::Region;

/// One element of a vectored transfer, laid out as the kernel's `struct iovec`.
///
/// It borrows nothing: its maker keeps the [`SharedBuf`] for as long as the kernel may use it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IoVec {
    base: *mut u8,
    len: usize,
}

impl IoVec {
    /// The range of a buffer.
    pub fn of(buf: &SharedBuf) -> Self {
        Self { base: buf.as_ptr(), len: buf.len() }
    }

    /// The range of a buffer, but its first `from` bytes.
    pub fn rest(buf: &SharedBuf, from: usize) -> Self {
        let from = from.min(buf.len());
        Self { base: buf.as_ptr().wrapping_add(from), len: buf.len() - from }
    }

    /// Takes the next element in, if it begins where this one ends.
    pub fn join(&mut self, next: Self) -> bool {
        let joins = self.base.wrapping_add(self.len) == next.base;
        self.len += if joins { next.len } else { 0 };
        joins
    }

    /// A stretch of a region, for registering it.
    pub fn piece(region: &Region, offset: usize, len: usize) -> Self {
        debug_assert!(offset.checked_add(len).is_some_and(|end| end <= region.len()));
        Self { base: region.base().wrapping_add(offset), len }
    }

    /// No memory at all.
    pub fn empty() -> Self {
        Self { base: std::ptr::null_mut(), len: 0 }
    }
}
