//! Addresses of this process that are reserved for what a read does not want: no memory stands behind them, but there are
//! only so many of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvarts_store::error::Reason;
use kvarts_store::io::{Region, SharedBuf};

/// What all reads together have of them.
#[derive(Debug)]
pub struct Addresses {
    taken: AtomicU64,
    most: u64,
}

/// A part of them, for as long as it lives.
struct Part {
    all: Arc<Addresses>,
    bytes: u64,
    _region: Arc<Region>,
}

impl Drop for Part {
    fn drop(&mut self) {
        self.all.taken.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

impl Addresses {
    /// At most so many.
    pub fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { taken: AtomicU64::new(0), most })
    }

    /// Those that are taken.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// So many, until the last user of the answer is done. Nobody may touch what is there.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Result<SharedBuf, Reason> {
        let length = usize::try_from(bytes).map_err(|_| Reason::TooMany("bytes"))?;
        let busy = || Reason::Busy("reads under way leave too few addresses for those that they do not want");
        let fits = |now: u64| now.checked_add(bytes).filter(|&sum| sum <= self.most);
        self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits).map_err(|_| busy())?;
        let made = Region::reserved(length)
            .ok()
            .and_then(|region| Some((SharedBuf::new(&region, 0, length)?, region)));
        match made {
            Some((buf, region)) => {
                Ok(buf.kept_by(Arc::new(Part { all: Arc::clone(self), bytes, _region: region })))
            }
            None => {
                self.taken.fetch_sub(bytes, Ordering::SeqCst);
                Err(busy())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_and_they_come_back_with_their_last_user() {
        let all = Addresses::new(1 << 20);
        let one = all.take(600 << 10).unwrap();
        let part = one.slice(0, 4096).unwrap();
        assert!(matches!(all.take(600 << 10), Err(Reason::Busy(_))));
        assert!(all.take(u64::MAX).is_err());
        drop(one);
        assert_eq!(all.taken(), 600 << 10);
        drop(part);
        assert_eq!(all.taken(), 0);
        assert!(all.take(1 << 20).is_ok());
    }

    #[test]
    fn there_may_be_more_than_the_machine_has_memory() {
        // An ordinary mapping of so much is refused.
        let most = 16 << 40;
        let all = Addresses::new(most);
        let some = all.take(most).unwrap();
        assert_eq!(some.slice(most as usize - 8, 8).unwrap().to_vec(), [0; 8]);
    }
}
