//! Memory of the emulated device: shared memory, so that another process can open it as CUDA's handles allow.
//!
//! This file may hold `unsafe`: it maps a descriptor that it owns.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvarts_contract::buffers::{Region, SharedBuf};
use memmap2::MmapOptions;
use rustix::fs::{MemfdFlags, Mode, OFlags};

use super::super::IpcHandle;
use super::Core;
use crate::error::DeviceError;

/// One allocation, or one that another process made and this one opened.
pub(super) struct Shared {
    core: Arc<Core>,
    region: Arc<Region>,
    buf: SharedBuf,
    len: u64,
    /// None where it is memory of this process that was not allocated here.
    file: Option<OwnedFd>,
    /// Whether another process made it.
    opened: bool,
}

impl Shared {
    pub(super) fn create(core: &Arc<Core>, bytes: u64) -> Result<Self, DeviceError> {
        let no = |_| DeviceError::NoMemory(bytes);
        let file = rustix::fs::memfd_create("kvarts-emulated", MemfdFlags::CLOEXEC).map_err(no)?;
        rustix::fs::ftruncate(&file, bytes.max(1)).map_err(no)?;
        let shared = Self::map(core, file, bytes, false)?;
        core.memories.fetch_add(1, Ordering::AcqRel);
        Ok(shared)
    }

    pub(super) fn open(core: &Arc<Core>, handle: &IpcHandle, bytes: u64) -> Result<Self, DeviceError> {
        let why = |why: String| DeviceError::Call { call: "open of a shared handle", why };
        let text: Vec<u8> = handle.0.iter().copied().take_while(|&byte| byte != 0).collect();
        let path = String::from_utf8(text)
            .map_err(|_| why("the handle is not from an emulated device".to_owned()))?;
        if !path.starts_with("/proc/") {
            return Err(why("the handle is not from an emulated device".to_owned()));
        }
        let file = rustix::fs::open(&*path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| why(error.to_string()))?;
        let size = rustix::fs::fstat(&file).map_err(|error| why(error.to_string()))?.st_size;
        if u64::try_from(size).ok().is_none_or(|size| size < bytes) {
            return Err(DeviceError::OutOfBounds);
        }
        let shared = Self::map(core, file, bytes, true)?;
        core.opened.fetch_add(1, Ordering::AcqRel);
        Ok(shared)
    }

    fn map(core: &Arc<Core>, file: OwnedFd, bytes: u64, opened: bool) -> Result<Self, DeviceError> {
        let len = usize::try_from(bytes.max(1)).map_err(|_| DeviceError::NoMemory(bytes))?;
        // SAFETY: the descriptor is a memfd at least this long (made so, or checked); both ends are this program's
        // tests and benches, which never shrink one. No reference to the bytes is ever made: `SharedBuf` copies in and out.
        let mut map = unsafe { MmapOptions::new().len(len).map_mut(&file) }
            .map_err(|_| DeviceError::NoMemory(bytes))?;
        let base = map.as_mut_ptr();
        // SAFETY: the map owns `len` bytes at `base`, and moving it does not move them.
        let region = unsafe { Region::adopt(base, len, Box::new(map)) };
        let buf = SharedBuf::new(&region, 0, len).ok_or(DeviceError::NoMemory(bytes))?;
        Ok(Self { core: Arc::clone(core), region, buf, len: bytes, file: Some(file), opened })
    }

    /// Memory of this process, which its keeper keeps.
    pub(super) fn over(core: &Arc<Core>, buf: &SharedBuf) -> Self {
        let (region, len) = (Arc::clone(buf.region()), buf.len() as u64);
        Self { core: Arc::clone(core), region, buf: buf.clone(), len, file: None, opened: false }
    }

    pub(super) fn base(&self) -> u64 {
        (self.region.base().addr() + self.buf.offset()) as u64
    }

    pub(super) fn has_file(&self) -> bool {
        self.file.is_some()
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn buf(&self) -> &SharedBuf {
        &self.buf
    }

    /// A path by which a process of the same user opens the memory while this one holds it.
    pub(super) fn handle(&self) -> IpcHandle {
        let number = self.file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let path = format!("/proc/{}/fd/{number}", std::process::id());
        let mut bytes = [0; 64];
        bytes.iter_mut().zip(path.bytes()).for_each(|(to, from)| *to = from);
        IpcHandle(bytes)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.file.is_none() {
            return;
        }
        if self.opened {
            self.core.opened.fetch_sub(1, Ordering::AcqRel);
        } else {
            self.core.memories.fetch_sub(1, Ordering::AcqRel);
            self.core.allocated.fetch_sub(self.len, Ordering::AcqRel);
        }
    }
}
