//! The same names as in `contract/src/sync`, over shuttle: each use is a moment at which another thread may go on.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Whether these types are as large as they look.
pub(crate) const PLAIN: bool = false;

/// As `std::sync::atomic`, but sequentially consistent.
pub(crate) mod atomic {
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
}

/// As `std::sync::OnceLock`.
#[derive(Debug, Default)]
pub(crate) struct OnceLock<T> {
    /// Taken around every use, so that each is such a moment.
    turn: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self { turn: Mutex::new(()), value: std::sync::OnceLock::new() }
    }

    pub(crate) fn get(&self) -> Option<&T> {
        let _turn = self.turn.lock();
        self.value.get()
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        let _turn = self.turn.lock();
        self.value.set(value)
    }

    pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let _turn = self.turn.lock();
        self.value.get_or_init(make)
    }
}

/// An eventfd that no kernel waits for. Time does not pass: a wait with a timeout waits as one without.
#[derive(Debug)]
pub(crate) struct Event {
    readable: Mutex<bool>,
    rung: Condvar,
    /// For those who ask for a descriptor.
    fd: OwnedFd,
}

impl Event {
    pub(crate) fn new() -> std::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { readable: Mutex::new(false), rung: Condvar::new(), fd })
    }

    fn readable(&self) -> MutexGuard<'_, bool> {
        self.readable.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn ring(&self) {
        *self.readable() = true;
        self.rung.notify_all();
    }

    pub(crate) fn empty(&self) {
        *self.readable() = false;
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let mut readable = self.readable();
        while !*readable && timeout != Some(Duration::ZERO) {
            readable = self.rung.wait(readable).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        *readable
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

macro_rules! races {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// A mistake that can be switched on. The code that makes it stands where it would have been made.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Race { $($(#[$doc])* $name),* }

        impl Race {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

races! {
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

thread_local! {
    /// All threads of a scene run on one, so this is the scene's.
    static PLANTED: Cell<Option<Race>> = const { Cell::new(None) };
}

/// Switches one mistake on, or all off.
pub(crate) fn plant(race: Option<Race>) {
    PLANTED.set(race);
}

pub(crate) fn planted(race: Race) -> bool {
    PLANTED.get() == Some(race)
}
