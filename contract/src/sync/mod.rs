//! What threads share state by: the standard library's locks and atomics, and the kernel's eventfd, by one name.
//!
//! All of this crate that several threads touch takes them from here, so that `kvarts-schedules` can compile the same
//! sources over a scheduler of its own, which decides at each lock, each atomic and each wait who goes on. In this
//! crate nothing is added to them.

mod event;

pub use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use event::Event;

/// Whether these types are as large as they look.
pub const PLAIN: bool = true;

/// As `std::sync::atomic`.
pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
}

/// Mistakes that `kvarts-schedules` switches on, one at a time, to see that its schedules find each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Race {
    /// Pins are taken after the lock was let go under which the blocks were found.
    LeaseAfterMatch,
    /// A slot's leased bit is set after the lock on the pins was let go.
    HintAfterPins,
    /// A record is read after the lock was let go under which its block was found.
    RecordAfterLookup,
    /// A held record's number is given out again.
    FreeIgnoresHold,
    /// A namespace's live bytes are read and written under two locks.
    CountInTwoSteps,
    /// A sender looks whether a mailbox is empty before it takes the lock.
    MailboxLooksFirst,
    /// An executor looks at what was woken and says that it sleeps under two locks.
    SleepInTwoSteps,
    /// A ticket looks for its answer and begins to wait under two locks.
    TicketWaitsLate,
    /// Who waits for a turn looks before it registers.
    GateLooksFirst,
    /// A step of a read is counted and announced under two locks.
    AnnounceInTwoSteps,
    /// The eventfd's flag is taken back before the eventfd is emptied.
    RearmFirst,
    /// A place is emptied when one turn has ended since a block was moved away.
    OneEpochIsEnough,
}

/// Whether this mistake is switched on: never, here.
#[inline(always)]
pub const fn planted(_: Race) -> bool {
    false
}
