//! Memory of another process: an engine's pool, opened by its handle so that a daemon lands layers in it.
//!
//! CUDA allows a handle to be opened once for each device and process, and asks that it be closed before the exporter
//! frees the memory. [`Opened`] keeps that: the same handle gives the same memory, which is closed with its last
//! clone. Handles are made from whole allocations; memory of a CUDA pool or of the virtual memory API has none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::device::{Device, IpcHandle, Memory};
use crate::error::DeviceError;

/// What was opened, for one device.
#[derive(Debug)]
pub struct Opened {
    device: Arc<dyn Device>,
    handles: Mutex<BTreeMap<IpcHandle, (u64, Weak<Memory>)>>,
}

impl Opened {
    /// Nothing opened yet.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, handles: Mutex::new(BTreeMap::new()) }
    }

    /// The memory behind a handle. The exporter keeps it until the last clone of the answer is gone: when a session is left,
    /// its destinations are dropped first, and only then may the engine free its pool.
    pub fn open(&self, handle: &IpcHandle, bytes: u64) -> Result<Arc<Memory>, DeviceError> {
        // Held while it is opened: two that ask at once must not open it twice.
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.retain(|_, (_, memory)| memory.strong_count() > 0);
        if let Some((known, memory)) = handles.get(handle)
            && let Some(memory) = memory.upgrade()
        {
            return if *known == bytes { Ok(memory) } else { Err(DeviceError::OutOfBounds) };
        }
        let memory = Arc::new(self.device.import(handle, bytes)?);
        handles.insert(*handle, (bytes, Arc::downgrade(&memory)));
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{Emulated, Model};

    #[test]
    fn a_handle_is_opened_once_shows_the_same_bytes_and_is_closed_with_its_last_user() {
        let (engine, daemon) = (Emulated::new(Model::default()), Emulated::new(Model::default()));
        let pool = engine.allocate(4096).unwrap();
        let handle = engine.export(&pool).unwrap();
        let opened = Opened::new(Arc::new(daemon.clone()));
        let (first, second) = (opened.open(&handle, 4096).unwrap(), opened.open(&handle, 4096).unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(daemon.in_use().opened, 1);
        daemon.poke(&first, 100, b"landed").unwrap();
        assert_eq!(engine.peek(&pool, 100, 6).unwrap(), b"landed");
        drop(first);
        assert_eq!(daemon.in_use().opened, 1);
        drop(second);
        assert_eq!(daemon.in_use().opened, 0);
        assert!(opened.open(&handle, 4096).is_ok(), "it may be opened again");
    }

    #[test]
    fn what_is_no_handle_or_names_too_little_is_refused() {
        let device = Emulated::new(Model::default());
        let opened = Opened::new(Arc::new(device.clone()));
        assert!(matches!(opened.open(&IpcHandle([7; 64]), 1), Err(DeviceError::Call { .. })));
        let pool = device.allocate(4096).unwrap();
        let handle = device.export(&pool).unwrap();
        assert_eq!(opened.open(&handle, 8192).unwrap_err(), DeviceError::OutOfBounds);
        let part = device.adopt(pool.base() + 64, 64).unwrap();
        assert!(device.export(&part).is_err(), "only whole allocations have handles");
        assert_eq!(device.in_use().opened, 0);
    }
}
