//! Memory of a session that the rings know, so that the device's writes to it need not find its pages each time.
//!
//! Memory for direct and for copied reads is registered, and only if its pages are there before the rings are told of it, so that an
//! executor is held up by no more than looking them up. A client that gives pages of it back reads others than the device
//! writes, and its reads fail their digests, as without this. One memory is prepared at a time, however many clients share theirs.
//!
//! The maker of a memory puts it into large pages first. Files in memory have small ones by default, strewn over the
//! machine's memory, and a device that is told of each of them reads at half its speed. Pages that a device is writing to
//! stay as they are: so the client is told of its memory when all this is done.
//!
//! What cannot be registered (a limit on locked memory, a store without a ring) is used as it is.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::aligned::LARGE_PAGE;
use kvarts_contract::buffers::{Region, shared};
use kvarts_store::engine::Store;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::state::locals::Locals;

/// How long a client that wants memory waits for its pages at most.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long an executor that takes no messages is left alone.
const AGAIN: Duration = Duration::from_millis(10);
/// How often it is asked to forget a memory before it is taken for closed.
const TRIES: u32 = 1000;

/// Keeps a memory registered until dropped, and the memory itself a moment longer.
#[derive(Debug)]
pub(super) struct Pinned {
    _held: oneshot::Sender<()>,
}

/// Ends when a memory is as fast as it will be.
#[derive(Debug)]
pub(super) struct Ready(oneshot::Receiver<()>);

impl Pinned {
    /// Begins to register a memory, if there may be so much; `elsewhere` works for it. Also what ends when it is as fast as
    /// it will be.
    pub(super) fn begin(
        (locals, tenant): (&Arc<Locals>, u32),
        store: &Store,
        (region, file): (&Arc<Region>, Option<OwnedFd>),
        elsewhere: &Handle,
    ) -> Option<(Self, Ready)> {
        let part = locals.pinned.try_take(tenant, region.len() as u64)?;
        let (held, released) = oneshot::channel();
        let (working, ready) = oneshot::channel();
        let (store, region, locals) = (store.clone(), Arc::clone(region), Arc::clone(locals));
        elsewhere.spawn(async move {
            keep((&locals, &store), (&region, file), working, released).await;
            drop(part);
        });
        Some((Self { _held: held }, Ready(ready)))
    }
}

impl Ready {
    /// Waits for it, but not for ever.
    pub(super) async fn wait(self) {
        // Whether it is done or was given up: nothing more is done for it.
        let _ = tokio::time::timeout(TIMEOUT, self.0).await;
    }
}

async fn keep(
    (locals, store): (&Arc<Locals>, &Store),
    (region, file): (&Arc<Region>, Option<OwnedFd>),
    working: oneshot::Sender<()>,
    mut released: oneshot::Receiver<()>,
) {
    // ends: those before it prepare memory; a session waits `TIMEOUT` for its own
    let turn = locals.turn.lock().await;
    let is_over = |released: &mut oneshot::Receiver<()>| {
        matches!(released.try_recv(), Err(oneshot::error::TryRecvError::Closed))
    };
    if is_over(&mut released) {
        return;
    }
    let prepared = Arc::clone(region);
    // ends: the kernel has made the pages; the session waits `TIMEOUT`
    let there = tokio::task::spawn_blocking(move || prepare(&prepared, file)).await.unwrap_or_default();
    if !there || is_over(&mut released) {
        return;
    }
    // ends: an executor answers from memory, or the store is closed
    if let Err(why) = store.register_memory(region).await {
        tracing::debug!(why, "the memory of a session could not be registered with the kernel");
    }
    drop((working, turn));
    // Also where one ring of several refused it.
    // ends: the session gives the memory back, or ends
    let _ = released.await;
    for _ in 0..TRIES {
        if store.unregister_memory(region) {
            return;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Whether every page is there. Those of the server's own are made, in large ones where there are some; those of a client's
/// `file` are the client's to make, and to pay for.
fn prepare(region: &Arc<Region>, file: Option<OwnedFd>) -> bool {
    if let Some(file) = file {
        return shared::is_populated(file, region.len() as u64);
    }
    if let Err(error) = region.populate() {
        tracing::debug!(%error, "the kernel has no free pages for the memory of a session");
        return false;
    }
    if region.len() >= LARGE_PAGE && !region.collapse() {
        tracing::debug!(bytes = region.len(), "the memory of a session is only partly in large pages");
    }
    true
}
