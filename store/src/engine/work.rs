//! Work of requests that is counted, so that a test can tell how it grows with what is asked: from a seed, and however
//! busy the machine is. Time would say less. What the store does by itself counts in `steps`.

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One count, which only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }
}

macro_rules! work {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// The work of one open store.
        #[derive(Debug, Default)]
        pub(crate) struct Counted { $(pub(crate) $name: Count),* }

        /// How much work has been done since the store was opened.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Done { $($(#[$doc])* pub $name: u64),* }

        impl Counted {
            pub(crate) fn done(&self) -> Done {
                Done { $($name: self.$name.0.load(Relaxed)),* }
            }
        }
    };
}

work! {
    /// Steps of reads: runs taken up, slices looked at, planned, followed and taken in.
    read_steps,
    /// Steps of matches: blocks looked at in each column, and columns looked for.
    match_steps,
    /// Footers of segments that were read while the store is open.
    footers_read,
    /// Steps of searches for what descends from a key: blocks listed, links taken in and followed.
    search_steps,
}
