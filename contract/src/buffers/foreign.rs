//! Memory of another process, reached by its file: every access is a system call, so that a file which was shortened is an
//! error and not a signal.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

/// The way to the bytes of a file whose owner may take its pages away.
pub(super) struct Foreign {
    file: OwnedFd,
    /// False when it was cut off. Held while bytes are copied, so that cutting off waits for them.
    open: RwLock<bool>,
    failed: AtomicBool,
}

impl Foreign {
    /// A file that other processes write to.
    pub(super) fn new(file: OwnedFd) -> Self {
        Self { file, open: RwLock::new(true), failed: AtomicBool::new(false) }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Notes that a device could not write to the mapping.
    pub(super) fn note_failure(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    /// Copies bytes out of the file. What cannot be read is zeros.
    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) {
        // SAFETY: `bytes` is a live exclusive slice.
        unsafe { self.read_raw(at, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// As `read`.
    ///
    /// # Safety
    /// `to .. to + len` must be writable.
    pub(super) unsafe fn read_raw(&self, at: u64, to: *mut u8, len: usize) {
        let file = self.file.as_raw_fd();
        let done = self.transfer(at, len, |at, done, len| {
            // SAFETY: inside the range that the caller answers for.
            unsafe { libc::pread(file, to.add(done).cast(), len, at) }
        });
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(to.add(done), 0, len - done) }
    }

    /// Copies bytes into the file. What cannot be written is left out.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        // SAFETY: `bytes` is a live slice.
        unsafe { self.write_raw(at, bytes.as_ptr(), bytes.len()) }
    }

    /// As `write`.
    ///
    /// # Safety
    /// `from .. from + len` must be readable.
    pub(super) unsafe fn write_raw(&self, at: u64, from: *const u8, len: usize) {
        let file = self.file.as_raw_fd();
        self.transfer(at, len, |at, done, len| {
            // SAFETY: inside the range that the caller answers for.
            unsafe { libc::pwrite(file, from.add(done).cast(), len, at) }
        });
    }

    /// Repeats a system call until `len` bytes are done; gives how many are, and notes if those are fewer.
    fn transfer(&self, at: u64, len: usize, call: impl Fn(libc::off_t, usize, usize) -> isize) -> usize {
        let mut done = 0;
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        while *open && done < len {
            let place = libc::off_t::try_from(at + done as u64).unwrap_or(libc::off_t::MAX);
            match usize::try_from(call(place, done, len - done)) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if done < len {
            self.note_failure();
        }
        done
    }

    /// See [`Region::cut_off`].
    ///
    /// # Safety
    /// `base .. base + len` must be a mapping that only devices access.
    pub(super) unsafe fn cut_off(&self, base: *mut u8, len: usize) -> io::Result<()> {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = false;
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
        );
        // SAFETY: the range is a mapping whose bytes no code relies on (contract), and it stays one, in one step.
        let now = unsafe { libc::mmap(base.cast(), len, access, kind, -1, 0) };
        if now == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
