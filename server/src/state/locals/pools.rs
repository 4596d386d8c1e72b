//! Files in memory that several sessions of one tenant share: a pool of an engine, whose scheduler has it filled and whose workers
//! take blocks out of it.
//!
//! A pool is found by its tenant and its name together, so another tenant that knows the name finds nothing. It is counted once, however
//! many sessions share it, and is gone with the last of them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::kept::Watched;
use crate::state::parts::Part;
use kvarts_wire::local::limits::POOL_SESSIONS_MAX;

/// Bytes of a name.
pub(crate) const NAME_BYTES: usize = 16;

/// The name of a pool among those of a tenant.
pub(crate) type Name = [u8; NAME_BYTES];

/// A file that sessions share.
#[derive(Debug)]
pub(crate) struct Pool {
    file: Watched,
    bytes: u64,
    /// Its part of what clients may share, and of the open files.
    _counted: (Part, Part),
}

/// A session's share in a pool.
#[derive(Debug)]
pub(crate) struct Shared(Arc<Pool>);

impl Shared {
    /// The file.
    pub(crate) fn file(&self) -> &OwnedFd {
        self.0.file.file()
    }

    /// How much of it is shared.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Whether no more sessions may share it.
    pub(crate) fn is_full(&self) -> bool {
        Arc::strong_count(&self.0) > POOL_SESSIONS_MAX
    }

    /// Whether it is this one.
    pub(crate) fn is(&self, file: &OwnedFd, bytes: u64) -> bool {
        let of = |file: &OwnedFd| rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino));
        self.0.bytes == bytes && of(self.file()).is_some_and(|mine| of(file) == Some(mine))
    }
}

/// The pools that are shared.
#[derive(Debug, Default)]
pub(crate) struct Pools(Mutex<BTreeMap<(u32, Name), Weak<Pool>>>);

impl Pools {
    /// The pool of this name.
    pub(crate) fn find(&self, tenant: u32, name: Name) -> Option<Shared> {
        let pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pools.get(&(tenant, name))?.upgrade().map(Shared)
    }

    /// Gives a file a name; none if another file has it. A client that comes again after its connection broke, and those that share the
    /// memory with it, bring the same file: it stays one pool.
    pub(crate) fn name(
        &self,
        (tenant, name): (u32, Name),
        (file, bytes): (Watched, u64),
        counted: (Part, Part),
    ) -> Option<Shared> {
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|_, pool| pool.strong_count() > 0);
        if let Some(known) = pools.get(&(tenant, name)).and_then(Weak::upgrade) {
            let known = Shared(known);
            return known.is(file.file(), bytes).then_some(known);
        }
        let pool = Arc::new(Pool { file, bytes, _counted: counted });
        pools.insert((tenant, name), Arc::downgrade(&pool));
        Some(Shared(pool))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::locals::kept::Kept;
    use crate::state::parts::Parts;
    use kvarts_contract::buffers::shared;

    #[test]
    fn a_pool_is_its_tenants_one_file_for_each_name_and_gone_with_its_last_user() {
        let (pools, parts) = (Pools::default(), Parts::new(1 << 20, &[1, 2], 0, 0));
        let counted = || (parts.try_take(1, 4096).unwrap(), parts.try_take(1, 1).unwrap());
        let file = shared::sealed(4096).unwrap();
        let kept = Kept::new(None, 0);
        let dup = |file: &OwnedFd| (Watched::new(&kept, 1, (file.try_clone().unwrap(), 4096)), 4096);
        let first = pools.name((1, [7; 16]), dup(&file), counted()).unwrap();
        let again = pools.name((1, [7; 16]), dup(&file), counted()).unwrap();
        assert!(Arc::ptr_eq(&first.0, &again.0), "one pool");
        assert_eq!(parts.used(), 4097, "counted once");
        assert!(pools.name((1, [7; 16]), dup(&shared::sealed(4096).unwrap()), counted()).is_none());
        assert!(!first.is_full());
        let many: Vec<Shared> = (0..POOL_SESSIONS_MAX).map(|_| pools.find(1, [7; 16]).unwrap()).collect();
        assert!(first.is_full());
        drop(many);
        assert!(pools.find(2, [7; 16]).is_none(), "another tenant's");
        assert!(pools.find(1, [8; 16]).is_none());
        drop(first);
        assert!(pools.find(1, [7; 16]).is_some(), "one user is left");
        drop(again);
        assert!(pools.find(1, [7; 16]).is_none());
        assert_eq!(parts.used(), 0);
        // The name is free again.
        assert!(pools.name((1, [7; 16]), dup(&shared::sealed(4096).unwrap()), counted()).is_some());
    }
}
