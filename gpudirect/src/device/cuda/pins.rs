//! Host memory that this process has pinned, for all devices together: the driver pins a stretch once, for every context,
//! and refuses it a second time.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvarts_contract::buffers::Region;

use super::sys::Context;
use crate::error::DeviceError;

/// A region that is pinned.
#[derive(Debug)]
struct Pin {
    /// Devices that use it.
    users: u64,
    /// The context in which it was pinned, which lives as long as the pin. None if other code in this process has pinned it.
    by: Option<Context>,
}

/// All of them, by the numbers of their regions.
#[derive(Debug)]
pub(super) struct Pins(BTreeMap<u64, Pin>);

/// Those of this process, locked while the driver is asked: who comes meanwhile must find the answer.
pub(super) fn all() -> MutexGuard<'static, Pins> {
    static PINS: Mutex<Pins> = Mutex::new(Pins(BTreeMap::new()));
    PINS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pins {
    /// One device more uses a region; the first pins it.
    pub(super) fn join(&mut self, context: &Context, region: &Region) -> Result<(), DeviceError> {
        if let Some(pin) = self.0.get_mut(&region.id()) {
            pin.users += 1;
            return Ok(());
        }
        let by = context.pin(region)?.then(|| context.clone());
        self.0.insert(region.id(), Pin { users: 1, by });
        Ok(())
    }

    /// One device less. With the last one the region is unpinned, in the context that pinned it.
    pub(super) fn leave(&mut self, region: &Region) {
        let Some(pin) = self.0.get_mut(&region.id()) else { return };
        pin.users -= 1;
        if pin.users == 0
            && let Some(Pin { by: Some(context), .. }) = self.0.remove(&region.id())
        {
            context.unpin(region);
        }
    }
}
