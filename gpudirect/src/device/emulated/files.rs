//! Reads of files into the emulated device's memory, by the processor: what a disk with a way to the device would do.

use std::any::Any;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::{Files, Memory, OpenFile, Registered};
use super::{Core, memory_of};
use crate::error::DeviceError;

/// Bytes that are read at once.
const STEP: u64 = 1 << 20;
const PAGE: u64 = 4096;

#[derive(Debug)]
struct Straight(Arc<Core>);

/// Something that is counted while it lives.
struct Counted<T> {
    core: Arc<Core>,
    what: T,
}

impl<T: Send + Sync + 'static> Counted<T> {
    fn count(core: &Arc<Core>, what: T) -> Arc<dyn Any + Send + Sync> {
        core.files.fetch_add(1, Ordering::AcqRel);
        Arc::new(Self { core: Arc::clone(core), what })
    }
}

impl<T> Drop for Counted<T> {
    fn drop(&mut self) {
        self.core.files.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(super) fn open(core: &Arc<Core>) -> Result<Arc<dyn Files>, DeviceError> {
    if core.faults.no_files {
        return Err(DeviceError::Foreign("files, because the emulated device is set to refuse them"));
    }
    Ok(Arc::new(Straight(Arc::clone(core))))
}

fn failed(why: impl ToString) -> DeviceError {
    DeviceError::Call { call: "read of a file", why: why.to_string() }
}

impl Files for Straight {
    fn register(&self, memory: &Memory) -> Result<Registered, DeviceError> {
        memory_of(memory)?;
        Ok(Registered::new(memory, Counted::count(&self.0, ())))
    }

    fn open(&self, file: BorrowedFd<'_>) -> Result<OpenFile, DeviceError> {
        let file: OwnedFd = rustix::io::fcntl_dupfd_cloexec(file, 0).map_err(failed)?;
        Ok(OpenFile(Counted::count(&self.0, file)))
    }

    fn read(
        &self,
        file: &OpenFile,
        offset: u64,
        into: &Registered,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        self.0.alive()?;
        into.check(at, len)?;
        let file = file.0.downcast_ref::<Counted<OwnedFd>>();
        let file = file.ok_or(DeviceError::Foreign("a file of another device"))?;
        let number = self.0.reads.fetch_add(1, Ordering::AcqRel);
        let is = |fault: Option<u64>| fault == Some(number);
        if is(self.0.faults.stuck_read) {
            self.0.stick();
            self.0.alive()?;
        }
        if is(self.0.faults.failed_read) || self.0.reads_fail.load(Ordering::Acquire) {
            return Err(failed("the emulated device is set to fail reads"));
        }
        let to = memory_of(into.memory())?;
        // Files may be open for direct I/O, which asks for whole pages of memory too.
        let mut bounce = vec![0; (STEP.min(len) + PAGE) as usize];
        let skew = bounce.as_ptr().align_offset(PAGE as usize);
        let mut done = 0;
        while done < len {
            let step = STEP.min(len - done) as usize;
            let bytes = bounce.get_mut(skew..skew + step).ok_or(DeviceError::OutOfBounds)?;
            let found = rustix::io::pread(&file.what, &mut *bytes, offset + done).map_err(failed)?;
            if found == 0 {
                return Err(failed("the file ends before the end of the read"));
            }
            to.copy_in((at + done) as usize, bytes.get(..found).unwrap_or_default());
            done += found as u64;
        }
        if is(self.0.faults.garbled_read) && len > 0 {
            let mut byte = [0];
            to.copy_out((at + len / 2) as usize, &mut byte);
            to.copy_in((at + len / 2) as usize, &[!byte[0]]);
        }
        Ok(())
    }
}
