//! Which memory of a session may still be written to, also after its end.
//!
//! What a device was told to write it writes, whatever becomes of the connection. A client whose connection broke asks by
//! the name that it gave its session; no other knows it. A restarted server tells it nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvarts_contract::buffers::Region;

/// Bytes of a name.
pub(crate) const NAME_BYTES: usize = 16;

/// The memories of a session that has ended.
type Left = Vec<Weak<Region>>;

/// The sessions that have names: those that last, and those of which memory is still in use.
#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<BTreeMap<[u8; NAME_BYTES], Option<Left>>>);

/// A session's memories, for as long as it lasts.
#[derive(Debug)]
pub(crate) struct Named {
    all: Arc<Names>,
    name: Option<[u8; NAME_BYTES]>,
    regions: Left,
}

fn is_used(left: &Left) -> bool {
    left.iter().any(|region| region.strong_count() > 0)
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<[u8; NAME_BYTES], Option<Left>>> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a session; none if there is one of that name, or the name is no name.
    pub(crate) fn begin(self: &Arc<Self>, name: &[u8]) -> Option<Named> {
        let (all, regions) = (Arc::clone(self), Vec::new());
        if name.is_empty() {
            return Some(Named { all, name: None, regions });
        }
        let name = <[u8; NAME_BYTES]>::try_from(name).ok()?;
        let mut names = self.lock();
        names.retain(|_, left| left.as_ref().is_none_or(is_used));
        if names.contains_key(&name) {
            return None;
        }
        names.insert(name, None);
        drop(names);
        Some(Named { all, name: Some(name), regions })
    }

    /// Whether the session of this name lasts, or memory of it is still in use.
    pub(crate) fn is_under_way(&self, name: &[u8]) -> bool {
        let Ok(name) = <[u8; NAME_BYTES]>::try_from(name) else { return false };
        self.lock().get(&name).is_some_and(|left| left.as_ref().is_none_or(is_used))
    }
}

impl Named {
    /// Notes a memory of the session.
    pub(crate) fn shares(&mut self, region: &Arc<Region>) {
        self.regions.retain(|region| region.strong_count() > 0);
        self.regions.push(Arc::downgrade(region));
    }

    /// The memories that are in use.
    pub(crate) fn in_use(&self) -> Vec<Arc<Region>> {
        self.regions.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Ends every way into these memories but that of devices that write already; false if one could not be cut off.
pub(crate) fn cut_off(some: &[Arc<Region>]) -> bool {
    let cut = |region: &Arc<Region>| {
        let cut = region.cut_off();
        cut.inspect_err(|error| tracing::error!(%error, "the memory of a client cannot be detached")).is_ok()
    };
    // All of them, also behind one that could not be.
    some.iter().filter(|region| !cut(region)).count() == 0
}

impl Drop for Named {
    fn drop(&mut self) {
        let Some(name) = self.name else { return };
        let left = std::mem::take(&mut self.regions);
        let mut names = self.all.lock();
        if is_used(&left) {
            names.insert(name, Some(left));
        } else {
            names.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::buffers::{SharedBuf, shared};

    #[test]
    fn a_session_is_under_way_until_nobody_uses_its_memory() {
        let (names, region) = (Arc::new(Names::default()), Region::anonymous(4096).unwrap());
        let mut named = names.begin(&[7; 16]).unwrap();
        assert!(names.begin(&[7; 16]).is_none() && names.begin(&[7; 15]).is_none());
        assert!(names.is_under_way(&[7; 16]) && !names.is_under_way(&[8; 16]) && !names.is_under_way(&[]));
        named.shares(&region);
        drop(named);
        assert!(names.is_under_way(&[7; 16]), "a device may still write");
        drop(region);
        assert!(!names.is_under_way(&[7; 16]));
        assert!(names.begin(&[7; 16]).is_some() && names.begin(&[]).unwrap().name.is_none());
        assert!(names.lock().is_empty());
    }

    /// What a session leaves in use when it ends is a client's, who may have other bytes there by then.
    #[test]
    fn what_is_cut_off_is_not_written_to_any_more_by_whoever_still_has_it() {
        let names = Arc::new(Names::default());
        let mut named = names.begin(&[7; 16]).unwrap();
        let reaper: shared::Reaper = Arc::new(drop);
        let file = shared::sealed(8192).unwrap();
        let theirs = shared::map(&file, 8192, Box::new(())).unwrap();
        let theirs = SharedBuf::new(&theirs, 0, 8192).unwrap();
        let region = shared::map_foreign(file, 8192, Box::new(()), &reaper).unwrap();
        named.shares(&region);
        let used = SharedBuf::new(&region, 0, 8192).unwrap();
        used.copy_in(0, b"before");
        assert!(cut_off(&named.in_use()));
        used.copy_in(0, b"behind");
        assert_eq!(&theirs.to_vec()[..6], b"before");
        assert!(cut_off(&named.in_use()), "it may be done twice");
    }
}
