//! Memory that blocks lie in: of a pool, of this process, or an engine's own.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_contract::buffers::region::PAGE;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::error::{Error, Reason};

use crate::blocks::Client;
use crate::said::{Status, call, free, given, hand_over, leave_if_wanted, perhaps, wrong};

/// `kvarts_memory`: bytes of a region.
pub(crate) struct Memory {
    region: Arc<Region>,
    at: usize,
    len: usize,
    /// Whether offsets of stretches are offsets in it.
    is_pool: bool,
    /// Of registered memory alone.
    #[allow(dead_code, reason = "the field is never read: dropping it ends the registration")]
    registered: Option<Registered>,
}

/// Memory that is registered, by its first address: its end. Two blocks of one get that lie on the same bytes are noticed within one
/// memory, so none may lie in two.
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Bytes that no other registered memory has.
struct Registered(usize);

impl Registered {
    /// `None` if another has some of them.
    fn new(bytes: Range<usize>) -> Option<Self> {
        let mut all = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.range(..bytes.end).next_back();
        if before.is_some_and(|(_, end)| *end > bytes.start) {
            return None;
        }
        all.insert(bytes.start, bytes.end);
        Some(Self(bytes.start))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        REGISTERED.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

impl Memory {
    /// All of a region.
    fn whole(region: Arc<Region>) -> Self {
        let len = region.len();
        Self { region, at: 0, len, is_pool: false, registered: None }
    }

    /// All of a pool.
    pub(crate) fn pool(region: Arc<Region>) -> Self {
        Self { is_pool: true, ..Self::whole(region) }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// A pool's region: stretches of a pool name places in no other memory.
    pub(crate) fn of_pool(&self) -> Result<&Arc<Region>, Error> {
        match self.is_pool {
            true => Ok(&self.region),
            false => Err(wrong(
                "memory: the call requires the memory of a pool (kvarts_pool_memory, kvarts_attach)",
            )),
        }
    }

    /// `nbytes` from `at` on.
    pub(crate) fn part(&self, at: u64, nbytes: u64) -> Result<SharedBuf, Error> {
        let outside = Error(Reason::OutOfBounds);
        let (Ok(at), Ok(nbytes)) = (usize::try_from(at), usize::try_from(nbytes)) else {
            return Err(outside);
        };
        if nbytes == 0 || at.checked_add(nbytes).is_none_or(|end| end > self.len) {
            return Err(outside);
        }
        SharedBuf::new(&self.region, self.at + at, nbytes).ok_or(outside)
    }
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_memory_take(client: *const Client, nbytes: usize, memory: *mut *mut Memory) -> Status {
    call(|| {
        let Client { remote } = given(client, "client")?;
        hand_over(memory, Memory::whole(remote.pool(nbytes)?), "memory")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_memory_adopt(
    client: *const Client,
    file: c_int,
    nbytes: usize,
    memory: *mut *mut Memory,
) -> Status {
    call(|| {
        let Client { remote } = given(client, "client")?;
        if file < 0 {
            return Err(wrong(format!("file: {file} is not a file descriptor")));
        }
        // SAFETY: the header: a descriptor that is open during the call. One that is not is an error of the call below.
        let file = unsafe { BorrowedFd::borrow_raw(file) };
        let file = file
            .try_clone_to_owned()
            .map_err(|error| wrong(format!("file: the descriptor cannot be duplicated: {error}")))?;
        hand_over(memory, Memory::whole(remote.adopt(file, nbytes as u64)?), "memory")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_memory_register(
    address: *mut c_void,
    nbytes: usize,
    memory: *mut *mut Memory,
) -> Status {
    call(|| {
        let (start, cannot) = (address.expose_provenance(), || {
            wrong(format!(
                "cannot register {nbytes} bytes at {address:p}: an empty range or an invalid address"
            ))
        });
        let base = start / PAGE * PAGE;
        let end = start.checked_add(nbytes).and_then(|end| end.checked_next_multiple_of(PAGE));
        let end = end.filter(|_| start > 0 && nbytes > 0).ok_or_else(cannot)?;
        let registered = Registered::new(start..start + nbytes).ok_or_else(|| {
            wrong(format!(
                "cannot register {nbytes} bytes at {address:p}: some of these bytes are already registered"
            ))
        })?;
        // SAFETY: the header: these bytes stay mapped for as long as a transfer may use them; a page of which some bytes are mapped is mapped
        // whole, and `Memory::part` gives these bytes alone.
        let region =
            unsafe { Region::adopt(std::ptr::with_exposed_provenance_mut(base), end - base, Box::new(())) };
        let (at, registered) = (start - base, Some(registered));
        hand_over(memory, Memory { region, at, len: nbytes, is_pool: false, registered }, "memory")
    })
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_memory_free(memory: *mut Memory) {
    free(memory);
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_memory_address(memory: *const Memory, nbytes: *mut usize) -> *mut c_void {
    let Some(Memory { region, at, len, .. }) = perhaps(memory) else { return std::ptr::null_mut() };
    leave_if_wanted(nbytes, *len);
    region.base().wrapping_add(*at).cast()
}
