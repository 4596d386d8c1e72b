//! A thread that gives memory of clients back: taking gigabytes out of an address space takes time that neither an
//! executor nor a session's thread has.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, mpsc};

use kvarts_contract::buffers::shared;

/// The thread; it ends when its last sender is gone.
#[derive(Clone)]
pub(crate) struct Reaper(pub(crate) shared::Reaper);

impl fmt::Debug for Reaper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reaper")
    }
}

impl Default for Reaper {
    fn default() -> Self {
        let (to, from) = mpsc::channel::<Box<dyn Any + Send + Sync>>();
        let work = move || from.into_iter().for_each(drop);
        let started = std::thread::Builder::new().name("kvarts-reaper".to_owned()).spawn(work);
        if let Err(error) = started {
            tracing::warn!(%error, "the thread that frees shared memory could not be started; other threads \
                will free this memory instead, which may delay calls");
        }
        // Without the thread, what was sent comes back and goes here.
        Self(Arc::new(move |what| drop(to.send(what))))
    }
}
