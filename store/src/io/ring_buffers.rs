//! Memory registered with one ring: which place of the kernel's table holds which stretch of which region.
//!
//! A region takes one place for each GiB, the most that the kernel takes in one. The region is kept until it is
//! unregistered, because the kernel has its pages pinned until then. A transfer uses a registered place only if
//! it lies in one piece as a whole.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use io_uring::Submitter;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use kvarts_contract::buffers::buf::SharedBuf;
use kvarts_contract::buffers::region::Region;
use kvarts_contract::buffers::vectors::IoVec;

/// The most that the kernel registers in one place of the table.
const PIECE: usize = 1 << 30;
/// Places in the table: 1 TiB of memory in the best case, and no more than the kernel allows (16,384).
const PLACES: u16 = 1024;

/// Bytes that all rings of this process have registered: the kernel counts each registration.
static LOCKED: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct Entry {
    region: Arc<Region>,
    /// The place of each piece, in order.
    places: Vec<u16>,
}

/// The table of one ring.
#[derive(Debug)]
pub(super) struct Registered {
    /// By the region's id: each transfer looks here, and there may be a region for each local client.
    entries: BTreeMap<u64, Entry>,
    free: Vec<u16>,
    piece: usize,
}

impl Registered {
    /// Makes the table in the kernel, empty.
    pub(super) fn new(ring: &Submitter<'_>) -> std::io::Result<Self> {
        ring.register_buffers_sparse(u32::from(PLACES))?;
        Ok(Self { entries: BTreeMap::new(), free: (0..PLACES).rev().collect(), piece: PIECE })
    }

    /// Registers a region. Registering it twice is one registration.
    pub(super) fn add(&mut self, ring: &Submitter<'_>, region: &Arc<Region>) -> Result<(), String> {
        if self.entries.contains_key(&region.id()) {
            return Ok(());
        }
        if region.is_empty() {
            return Err("an empty memory region cannot be registered".to_owned());
        }
        if region.len().div_ceil(self.piece) > self.free.len() {
            return Err(format!("the table of {PLACES} registered buffers is full"));
        }
        let len = region.len() as u64;
        memlock_allows(len)?;
        let mut entry = Entry { region: Arc::clone(region), places: Vec::new() };
        for at in (0..region.len()).step_by(self.piece) {
            let Some(place) = self.free.pop() else { break };
            let iovec = IoVec::piece(region, at, self.piece.min(region.len() - at));
            entry.places.push(place);
            if let Err(error) = update(ring, place, iovec) {
                self.release(ring, &entry);
                return Err(explain(&error, len));
            }
        }
        LOCKED.fetch_add(len, Ordering::Relaxed);
        self.entries.insert(region.id(), entry);
        Ok(())
    }

    /// Takes a region out of the table. Transfers under way end as they began: the kernel holds the pages.
    pub(super) fn remove(&mut self, ring: &Submitter<'_>, region: &Arc<Region>) {
        if let Some(entry) = self.entries.remove(&region.id()) {
            self.release(ring, &entry);
            LOCKED.fetch_sub(entry.region.len() as u64, Ordering::Relaxed);
        }
    }

    fn release(&mut self, ring: &Submitter<'_>, entry: &Entry) {
        for &place in &entry.places {
            // A place that cannot be emptied is not used again: it still stands for the old memory.
            if update(ring, place, IoVec::empty()).is_ok() {
                self.free.push(place);
            }
        }
    }

    /// The place that holds all of `buf`, if one does.
    pub(super) fn place(&self, buf: &SharedBuf) -> Option<u16> {
        let last = buf.len().checked_sub(1)?;
        let entry = self.entries.get(&buf.region().id())?;
        let piece = buf.offset() / self.piece;
        if (buf.offset() + last) / self.piece != piece {
            return None;
        }
        entry.places.get(piece).copied()
    }

    /// The place that holds all of all buffers, if one does.
    pub(super) fn common_place(&self, bufs: &[SharedBuf]) -> Option<u16> {
        let (first, rest) = bufs.split_first()?;
        let place = self.place(first)?;
        rest.iter().all(|buf| self.place(buf) == Some(place)).then_some(place)
    }

    /// Makes pieces smaller, so that a test sees their borders.
    #[cfg(test)]
    pub(super) fn set_piece(&mut self, piece: usize) {
        assert!(self.entries.is_empty());
        self.piece = piece;
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let bytes = self.entries.values().map(|entry| entry.region.len() as u64).sum();
        LOCKED.fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn update(ring: &Submitter<'_>, place: u16, iovec: IoVec) -> std::io::Result<()> {
    // SAFETY: `IoVec` has the layout of the kernel's `iovec`. The memory it names is kept mapped by the
    // `Arc<Region>` in the table's entry until the place is emptied or the ring is gone.
    unsafe { ring.register_buffers_update(u32::from(place), std::slice::from_ref(view(&iovec)), None) }
}

/// Refuses before the kernel does: it would touch every page first, for seconds, and then refuse.
fn memlock_allows(len: u64) -> Result<(), String> {
    let privileged = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    check_memlock(len, LOCKED.load(Ordering::Relaxed), getrlimit(Resource::Memlock).current, privileged)
}

fn check_memlock(len: u64, locked: u64, limit: Option<u64>, privileged: bool) -> Result<(), String> {
    match limit {
        Some(limit) if !privileged && locked.saturating_add(len) > limit => Err(format!(
            "the limit on locked memory is {limit} bytes; {locked} bytes are in use. {len} more bytes \
            are needed to register all memory, which makes reads and writes 3 to 10% faster: raise the limit \
            (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock= in containers) to {} bytes or more",
            locked.saturating_add(len)
        )),
        _ => Ok(()),
    }
}

fn explain(error: &std::io::Error, len: u64) -> String {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::NOMEM) => format!(
            "the kernel refused to lock {len} bytes for registered buffers: raise the limit on locked memory \
            (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock= in containers)"
        ),
        Some(Errno::FAULT) => {
            "the memory cannot be registered, because it is mapped from a file on disk".to_owned()
        }
        _ => format!("the kernel refused to register the memory: {error}"),
    }
}

/// A value as the C library's type of the same layout, which the call that takes it names.
///
/// # Safety
/// Both types must have the same layout and take any bits.
pub(super) unsafe fn view<A, B>(value: &A) -> &B {
    const { assert!(size_of::<A>() == size_of::<B>() && align_of::<A>() >= align_of::<B>()) }
    // SAFETY: the caller vouches for the layout; size and alignment are asserted above; the lifetime is the same.
    unsafe { &*(&raw const *value).cast::<B>() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_low_memlock_limit_is_explained_and_a_privileged_process_has_none() {
        let error = check_memlock(100, 50, Some(149), false).unwrap_err();
        for part in ["149", "150", "faster", "ulimit -l"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!error.contains('\n'));
        assert_eq!(check_memlock(100, 50, Some(150), false), Ok(()));
        assert_eq!(check_memlock(100, 50, Some(0), true), Ok(()));
        assert_eq!(check_memlock(u64::MAX, 1, None, false), Ok(()));
    }

    #[test]
    fn a_buffer_across_two_pieces_or_of_another_region_has_no_place() {
        let (region, other) = (Region::anonymous(4 * 4096).unwrap(), Region::anonymous(4096).unwrap());
        let entry = Entry { region: Arc::clone(&region), places: vec![7, 3] };
        let entries = BTreeMap::from([(region.id(), entry)]);
        let table = Registered { entries, free: Vec::new(), piece: 2 * 4096 };
        let place = |offset, len| table.place(&SharedBuf::new(&region, offset, len).unwrap());
        assert_eq!(place(0, 8192), Some(7));
        assert_eq!(place(8192, 8192), Some(3));
        assert_eq!(place(4096, 8192), None);
        assert_eq!(place(8191, 1), Some(7));
        assert_eq!(place(0, 0), None);
        assert_eq!(table.place(&SharedBuf::new(&other, 0, 1).unwrap()), None);
        let bufs = |ranges: [usize; 2]| ranges.map(|at| SharedBuf::new(&region, at, 16).unwrap());
        assert_eq!(table.common_place(&bufs([0, 4096])), Some(7));
        assert_eq!(table.common_place(&bufs([0, 8192])), None);
        assert_eq!(table.common_place(&[]), None);
        LOCKED.fetch_add(region.len() as u64, Ordering::Relaxed);
    }
}
