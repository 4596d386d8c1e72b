//! The threads that work for sessions of the local path.
//!
//! A session belongs to one thread, which has its own event loop: what wakes the session wakes that thread and no other.
//! A pool of threads that take work from each other would wake a second one to look for more each time, which is a large
//! part of what a short call takes. What keeps a processor busy (puts, which copy) is done elsewhere.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::UnixStream;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::line::Line;
use super::session;
use crate::state::{Guest, ServerState};

/// One thread, until it is dropped.
struct Worker {
    handle: Handle,
    /// Dropped when the thread may end; its sessions end with it.
    _stop: oneshot::Sender<()>,
}

impl Worker {
    fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        // ends: the owner is dropped, and with it the sender
        let work = move || drop(runtime.block_on(stopped));
        std::thread::Builder::new().name("kvarts-session".to_owned()).spawn(work)?;
        Ok(Self { handle, _stop: stop })
    }
}

/// The threads: as many as there may be, once there are as many sessions.
pub(super) struct Threads {
    most: usize,
    workers: Mutex<Vec<Worker>>,
    next: AtomicUsize,
}

/// Ends a task when its waiter is gone.
struct Ends(AbortHandle);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Threads {
    /// At most this many, at least one.
    pub(super) fn new(most: usize) -> Self {
        Self { most: most.max(1), workers: Mutex::default(), next: AtomicUsize::new(0) }
    }

    /// The thread whose turn it is.
    fn handle(&self) -> io::Result<Handle> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if workers.len() < self.most {
            workers.push(Worker::start()?);
        }
        let worker = workers.get(turn % workers.len().max(1));
        worker.map(|worker| worker.handle.clone()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Works for one connection until it ends. Dropping the future ends it.
    pub(super) async fn serve(&self, state: Arc<ServerState>, (stream, unknown): (UnixStream, Guest)) {
        let ready = self.handle().and_then(|handle| Ok((handle, stream.into_std()?)));
        let (handle, stream) = match ready {
            Ok(ready) => ready,
            Err(error) => {
                tracing::warn!(%error, "the thread for a local session could not be started");
                return;
            }
        };
        let elsewhere = Handle::current();
        let session = handle.spawn(async move {
            match Line::new(stream) {
                Ok(line) => session::run(state, (line, unknown), elsewhere).await,
                Err(error) => tracing::warn!(%error, "a local session could not be started"),
            }
        });
        let _ends = Ends(session.abort_handle());
        // ends: the session, whose own waits end; dropping this aborts it
        if let Err(error) = session.await
            && error.is_panic()
        {
            tracing::error!(%error, "a local session panicked");
        }
    }
}
