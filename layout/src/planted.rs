//! Bugs that are planted on purpose, so that the fault campaign can show that it finds them.
//!
//! [`planted!`](crate::planted!) stands where a bug would be: `if planted!("name")`. Without the feature `planted` it
//! is the word `false`, and no released program is built with that feature. With it, a bug is planted for one
//! thread at a time, by name: the simulation runs whole stores on one thread, so campaigns on others stay sound.
//!
//! The bugs are listed in `docs/FAULT_MODEL.md` with the row of the campaign that must find each; a test compares that
//! list with the places in the sources.

#[cfg(feature = "planted")]
mod registry {
    use std::cell::Cell;
    use std::sync::OnceLock;

    static FOR_GOOD: OnceLock<String> = OnceLock::new();

    thread_local! {
        static BUG: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    /// Plants a bug on this thread, or takes it away.
    pub fn plant(name: Option<&'static str>) {
        BUG.set(name);
    }

    /// The bug that is planted on this thread.
    pub fn current() -> Option<&'static str> {
        BUG.get()
    }

    /// Plants a bug on every thread for as long as this process lives: it must be that of one test.
    pub fn plant_for_good(name: String) {
        // The first one stays.
        let _ = FOR_GOOD.set(name);
    }

    /// Whether this bug is planted on this thread.
    pub fn is(name: &str) -> bool {
        BUG.get() == Some(name) || FOR_GOOD.get().is_some_and(|bug| bug == name)
    }
}

#[cfg(feature = "planted")]
pub use registry::{current, is, plant, plant_for_good};

/// Whether this program has bugs that can be planted.
pub const POSSIBLE: bool = cfg!(feature = "planted");

/// No bug can be planted in this program.
#[cfg(not(feature = "planted"))]
pub fn plant(_name: Option<&'static str>) {}

/// No bug can be planted in this program.
#[cfg(not(feature = "planted"))]
pub fn plant_for_good(_name: String) {}

/// No bug is planted in this program.
#[cfg(not(feature = "planted"))]
pub fn current() -> Option<&'static str> {
    None
}

/// Whether the bug of this name is planted on this thread.
#[cfg(feature = "planted")]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        $crate::planted::is($name)
    };
}

/// Whether the bug of this name is planted: never, in this program.
#[cfg(not(feature = "planted"))]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        false
    };
}
