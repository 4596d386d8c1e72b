//! Ranges of a [`Region`], by who may write to them.
//!
//! | | holders | writes | use |
//! |---|---|---|---|
//! | [`BufMut`] | one | `&mut self`, or a device that it was handed to | memory that is being filled |
//! | [`Buf`] | many | none | memory that is full: what a device writes from |
//! | [`SharedBuf`] | many | every holder, by the rule that stands there | memory that is filled in parts while others are read |
//!
//! The compiler keeps the first two apart: memory is filled by one holder, frozen, and read by many. Regions that stand
//! behind them make no other ranges ([`SharedBuf::new`] refuses). A device breaks no rule: a transfer owns the memory
//! that it was given until its completion, and the task that asked for the transfer gets it back then.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

use super::region::{PAGE, Region};

/// Bytes that are copied at once out of another process's file where they are only looked at: they stay in the
/// processor's nearest caches.
const COPY_BYTES: usize = 32 << 10;

/// A range of a region, which it keeps alive. The types around it say who may do what with it.
#[derive(Clone)]
struct Span {
    region: Arc<Region>,
    /// Invariant: `offset + len <= region.len`.
    offset: usize,
    len: usize,
    /// What must outlive this range besides the region: the piece of an arena that it belongs to.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
}

impl Span {
    fn new(region: &Arc<Region>, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= region.len()).then(|| Self { region: Arc::clone(region), offset, len, _keeper: None })
    }

    fn slice(&self, at: usize, len: usize) -> Option<Self> {
        let end = at.checked_add(len)?;
        let offset = self.offset.checked_add(at)?;
        (end <= self.len).then(|| Self { offset, len, ..self.clone() })
    }

    fn also_kept_by(self, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        let all = match &self._keeper {
            Some(first) => Arc::new((Arc::clone(first), keeper)),
            None => keeper,
        };
        Self { _keeper: Some(all), ..self }
    }

    fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `offset <= region.len` (field invariant), so the result is inside or one past the allocation.
        unsafe { self.region.base().add(self.offset) }
    }

    fn check(&self, at: usize, len: usize) {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= self.len),
            "the range ends after the end of the buffer"
        );
    }

    /// Where in the region `at` is.
    fn place(&self, at: usize) -> u64 {
        (self.offset + at) as u64
    }

    fn copy_out(&self, at: usize, bytes: &mut [u8]) {
        self.check(at, bytes.len());
        if let Some(foreign) = self.region.foreign() {
            return foreign.read(self.place(at), bytes);
        }
        // SAFETY: checked above; `bytes` is a live exclusive slice, so it cannot overlap a region, whose memory is lent to
        // digests alone.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr().add(at), bytes.as_mut_ptr(), bytes.len()) }
    }

    fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        if let Some(foreign) = self.region.foreign() {
            return foreign.write(self.place(at), bytes);
        }
        // SAFETY: checked above; the bytes may be those that a digest is shown, of this very region.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.as_ptr().add(at), bytes.len()) }
    }

    fn copy_from(&self, at: usize, source: &Self, from: usize, len: usize) {
        self.check(at, len);
        source.check(from, len);
        match (self.region.foreign(), source.region.foreign()) {
            // SAFETY: both ranges are checked above; `copy` allows overlap.
            (None, None) => unsafe { std::ptr::copy(source.as_ptr().add(from), self.as_ptr().add(at), len) },
            // SAFETY: the destination is checked above, and mapped for as long as its region lives.
            (None, Some(foreign)) => unsafe {
                foreign.read_raw(source.place(from), self.as_ptr().add(at), len);
            },
            // SAFETY: the source is checked above, and mapped for as long as its region lives.
            (Some(foreign), None) => unsafe {
                foreign.write_raw(self.place(at), source.as_ptr().add(from), len);
            },
            (Some(_), Some(_)) => source.pieces(from, len, |done, piece| self.copy_in(at + done, piece)),
        }
    }

    /// Shows copies of the bytes, piece by piece, each with how many were before it.
    fn pieces(&self, at: usize, len: usize, mut look: impl FnMut(usize, &[u8])) {
        let (mut scratch, mut done) = ([0; COPY_BYTES], 0);
        while done < len {
            let some = &mut scratch[..COPY_BYTES.min(len - done)];
            self.copy_out(at + done, some);
            look(done, some);
            done += some.len();
        }
    }

    fn crc32(&self, at: usize, len: usize) -> u32 {
        if self.region.foreign().is_none() {
            return self.digest(at, len, crc32fast::hash);
        }
        let mut hasher = crc32fast::Hasher::new();
        self.pieces(at, len, |_, piece| hasher.update(piece));
        hasher.finalize()
    }

    fn fill(&self, byte: u8) {
        if self.region.foreign().is_some() {
            let some = [byte; COPY_BYTES];
            for at in (0..self.len).step_by(COPY_BYTES) {
                self.copy_in(at, &some[..COPY_BYTES.min(self.len - at)]);
            }
            return;
        }
        // SAFETY: the range is inside the region (field invariant).
        unsafe { std::ptr::write_bytes(self.as_ptr(), byte, self.len) }
    }

    fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_out(0, &mut bytes);
        bytes
    }

    fn digest<T>(&self, at: usize, len: usize, look: impl FnOnce(&[u8]) -> T) -> T {
        self.check(at, len);
        if self.region.foreign().is_some() {
            let mut copy = vec![0; len];
            self.copy_out(at, &mut copy);
            return look(&copy);
        }
        // SAFETY: in range (checked above) and mapped (Region). No holder writes meanwhile: to a `BufMut` only its
        // holder could, to a `Buf` no holder can, and to a `SharedBuf` no holder may (its rule).
        look(unsafe { std::slice::from_raw_parts(self.as_ptr().add(at), len) })
    }
}

/// What all ranges have: where they are, and ways to read them.
macro_rules! readable {
    ($type:ident) => {
        impl $type {
            /// Bytes.
            pub fn len(&self) -> usize {
                self.0.len
            }

            /// Whether there are no bytes.
            pub fn is_empty(&self) -> bool {
                self.0.len == 0
            }

            /// The region.
            pub fn region(&self) -> &Arc<Region> {
                &self.0.region
            }

            /// Where in the region the range begins.
            pub fn offset(&self) -> usize {
                self.0.offset
            }

            /// Where the range begins. For the kernel; every access by this process is a method of this type.
            pub fn as_ptr(&self) -> *mut u8 {
                self.0.as_ptr()
            }

            /// Whether address and length suit direct I/O.
            pub fn is_aligned(&self) -> bool {
                self.as_ptr().addr().is_multiple_of(PAGE) && self.len().is_multiple_of(PAGE)
            }

            /// Copies `bytes.len()` bytes out, from `at`.
            ///
            /// # Panics
            /// If the range ends before.
            pub fn copy_out(&self, at: usize, bytes: &mut [u8]) {
                self.0.copy_out(at, bytes);
            }

            /// A copy of the bytes.
            pub fn to_vec(&self) -> Vec<u8> {
                self.0.to_vec()
            }

            /// The CRC-32 of `len` bytes from `at`. Of another process's file it is of a copy, which cannot change.
            ///
            /// # Panics
            /// If the range ends before.
            pub fn crc32(&self, at: usize, len: usize) -> u32 {
                self.0.crc32(at, len)
            }

            /// Shows the bytes to `look`, which must not write to the region: digests need a slice, and a copy would
            /// cost what the digest costs. Of another process's file it is a copy.
            ///
            /// # Panics
            /// If the range ends before.
            pub fn digest<T>(&self, at: usize, len: usize, look: impl FnOnce(&[u8]) -> T) -> T {
                self.0.digest(at, len, look)
            }
        }

        impl Readable for $type {}

        impl SpanOf for $type {
            fn span(&self) -> &Span {
                &self.0
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({}+{} of {:?})", stringify!($type), self.0.offset, self.0.len, self.0.region)
            }
        }
    };
}

/// A range that can be copied from.
#[allow(private_bounds, reason = "nothing else is a range")]
pub trait Readable: SpanOf {}

trait SpanOf {
    fn span(&self) -> &Span;
}

/// Memory with one holder, who fills it. A device fills it as `Driver::read_into` says.
pub struct BufMut(Span);

readable!(BufMut);

impl BufMut {
    /// Zeroed memory of its own.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        let region = Region::anonymous(len)?;
        Self::of(&region, 0, len).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// A range of a region. No other range of the region may contain a byte of it.
    pub fn of(region: &Arc<Region>, offset: usize, len: usize) -> Option<Self> {
        region.set_owned();
        Span::new(region, offset, len).map(Self)
    }

    /// The same memory, which keeps `keeper` alive until the last user of it is gone, an operation under way among them.
    /// What keeps it already goes first.
    #[must_use]
    pub fn kept_by(self, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        Self(self.0.also_kept_by(keeper))
    }

    /// Copies `bytes` in, to `at`.
    ///
    /// # Panics
    /// If the range ends before.
    pub fn copy_in(&mut self, at: usize, bytes: &[u8]) {
        self.0.copy_in(at, bytes);
    }

    /// Copies `len` bytes from `source` at `from` to `at`.
    ///
    /// # Panics
    /// If either range ends before.
    pub fn copy_from(&mut self, at: usize, source: &impl Readable, from: usize, len: usize) {
        self.0.copy_from(at, source.span(), from, len);
    }

    /// Sets every byte.
    pub fn fill(&mut self, byte: u8) {
        self.0.fill(byte);
    }

    /// Sets some bytes.
    ///
    /// # Panics
    /// If the range ends before.
    pub fn fill_part(&mut self, at: usize, len: usize, byte: u8) {
        self.lent(at, len).fill(byte);
    }

    /// The first `len` bytes as memory of their own; what is behind them stays here. `None`: there are fewer.
    pub fn split_to(&mut self, len: usize) -> Option<Self> {
        let (first, rest) = (self.0.slice(0, len)?, self.0.slice(len, self.0.len.checked_sub(len)?)?);
        self.0 = rest;
        Some(Self(first))
    }

    /// The first `len` bytes, without what is behind them. `None`: there are fewer.
    #[must_use]
    pub fn first(self, len: usize) -> Option<Self> {
        self.0.slice(0, len).map(Self)
    }

    /// Ends the writing.
    pub fn freeze(self) -> Buf {
        Buf(self.0)
    }

    /// Gives up being the only holder.
    pub fn share(self) -> SharedBuf {
        SharedBuf(self.0)
    }

    /// A part, for the device that fills it; who gives it keeps this untouched until then.
    pub fn lent(&self, at: usize, len: usize) -> SharedBuf {
        self.0.check(at, len);
        SharedBuf(Span { offset: self.0.offset + at, len, ..self.0.clone() })
    }
}

/// Memory that is only read. Cloning shares it and copies nothing.
///
/// What was frozen never changes. What was made of a [`SharedBuf`] follows the rule that stands there.
#[derive(Clone)]
pub struct Buf(Span);

readable!(Buf);

impl Buf {
    /// A part of this range.
    pub fn slice(&self, at: usize, len: usize) -> Option<Self> {
        self.0.slice(at, len).map(Self)
    }

    /// For a device, which reads it.
    pub fn lent(self) -> SharedBuf {
        SharedBuf(self.0)
    }
}

impl From<BufMut> for Buf {
    fn from(buf: BufMut) -> Self {
        buf.freeze()
    }
}

impl From<SharedBuf> for Buf {
    fn from(buf: SharedBuf) -> Self {
        Self(buf.0)
    }
}

/// Memory that several holders write and read at the same time, in different places. Cloning shares it and copies
/// nothing.
///
/// The rule: at any moment each byte has one side that may touch it, and passes from side to side by an event. The caller
/// gives the places of a read or a put to the engine with the request; the engine gives a part to the device with an
/// operation and has it back with the completion; a part of a read is the caller's again when it is announced, and of a
/// put when the put has ended. Nothing but a digest is computed of bytes in place.
///
/// It exists because one allocation (an engine's pool of pages, a pool mapped by two processes, the staging of a long
/// read) is filled by devices in parts while other parts are read: no borrow says so. Bytes that another process may
/// write ([`Region::is_shared`]) change against the rule; their digest is then of garbled bytes and proves nothing.
#[derive(Clone)]
pub struct SharedBuf(Span);

readable!(SharedBuf);

impl SharedBuf {
    /// The range `offset .. offset + len`. `None`: the region ends before, or its ranges have one holder each.
    pub fn new(region: &Arc<Region>, offset: usize, len: usize) -> Option<Self> {
        if region.is_owned() {
            return None;
        }
        Span::new(region, offset, len).map(Self)
    }

    /// A part of this range.
    pub fn slice(&self, at: usize, len: usize) -> Option<Self> {
        self.0.slice(at, len).map(Self)
    }

    /// The same range, which keeps `keeper` alive instead of what kept it: so do its clones and slices, an operation under
    /// way among them.
    #[must_use]
    pub fn kept_by(self, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Span { _keeper: Some(keeper), ..self.0 })
    }

    /// The same range, which keeps `keeper` alive as well. What keeps it already goes first.
    #[must_use]
    pub fn also_kept_by(self, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        Self(self.0.also_kept_by(keeper))
    }

    /// Copies `bytes` in, to `at`.
    ///
    /// # Panics
    /// If the range ends before.
    pub fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.0.copy_in(at, bytes);
    }

    /// Copies `len` bytes from `source` at `from` to `at`; the ranges may overlap.
    ///
    /// # Panics
    /// If either range ends before.
    pub fn copy_from(&self, at: usize, source: &impl Readable, from: usize, len: usize) {
        self.0.copy_from(at, source.span(), from, len);
    }

    /// Sets every byte.
    pub fn fill(&self, byte: u8) {
        self.0.fill(byte);
    }
}

impl From<BufMut> for SharedBuf {
    fn from(buf: BufMut) -> Self {
        buf.share()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_never_leaves_its_region() {
        let region = Region::anonymous(100).unwrap();
        assert_eq!(region.len(), PAGE);
        assert!(SharedBuf::new(&region, PAGE, 1).is_none());
        assert!(SharedBuf::new(&region, usize::MAX, 2).is_none());
        let buf = SharedBuf::new(&region, 10, 20).unwrap();
        assert!(buf.slice(10, 11).is_none());
        assert!(buf.slice(usize::MAX, 1).is_none());
        assert_eq!(buf.slice(5, 15).map(|part| (part.offset(), part.len())), Some((15, 15)));
    }

    #[test]
    fn bytes_go_in_and_come_out() {
        let buf = SharedBuf::new(&Region::anonymous(PAGE).unwrap(), 8, 16).unwrap();
        buf.copy_in(4, b"abcd");
        buf.copy_from(8, &buf.clone(), 4, 4);
        let mut out = [0; 4];
        buf.copy_out(8, &mut out);
        assert_eq!(&out, b"abcd");
        assert_eq!(buf.digest(4, 4, <[u8]>::to_vec), b"abcd");
    }

    #[test]
    fn memory_outlives_the_region_handle() {
        let buf = SharedBuf::new(&Region::anonymous(PAGE).unwrap(), 0, PAGE).unwrap();
        buf.fill(7);
        assert_eq!(buf.to_vec(), vec![7; PAGE]);
    }

    #[test]
    fn memory_that_one_fills_is_reached_by_no_other_way() {
        let mut buf = BufMut::zeroed(2 * PAGE).unwrap();
        assert!(SharedBuf::new(buf.region(), 0, 1).is_none(), "a second writer");
        let arena = crate::buffers::Arena::new(Region::anonymous(4 * PAGE).unwrap());
        let piece = arena.try_take(PAGE).unwrap();
        assert!(
            SharedBuf::new(piece.region(), 0, 1).is_none() && SharedBuf::new(arena.region(), 0, 1).is_none()
        );
        buf.fill(1);
        let mut first = buf.split_to(PAGE).unwrap();
        first.fill(2);
        buf.fill_part(1, 2, 3);
        assert_eq!((first.to_vec(), &buf.to_vec()[..4]), (vec![2; PAGE], &[1, 3, 3, 1][..]));
        assert!(buf.split_to(PAGE + 1).is_none() && buf.len() == PAGE);
        let frozen = first.first(10).unwrap().freeze();
        assert_eq!((frozen.clone().to_vec(), frozen.slice(2, 9).is_none()), (vec![2; 10], true));
    }
}
