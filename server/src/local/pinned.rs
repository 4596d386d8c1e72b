//! Memory of a session that the rings know, so that the device's writes to it need not find its pages each time.
//!
//! Only memory that the server made itself is registered: it cannot be shortened, and its pages are there before the
//! rings are told of it, so that an executor is held up by no more than looking them up. A client that gives pages of it
//! back reads others than the device writes, and its reads fail their digests, as without this.
//!
//! It is put into large pages first. Files in memory have small ones by default, strewn over the machine's memory, and
//! a device that is told of each of them reads at half its speed. Pages that a device is writing to stay as they are: so
//! the client is told of its memory when all this is done.
//!
//! What cannot be registered (a limit on locked memory, a store without a ring) is used as it is.

use std::sync::Arc;
use std::time::Duration;

use kvarts_store::engine::Store;
use kvarts_store::io::mem::PAGE;
use kvarts_store::io::{Buf, Region};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::Locals;

/// What is shorter has no room for a large page.
const LARGE_PAGE: usize = 2 << 20;
/// How long a client that wants memory waits for its pages at most.
const PATIENCE: Duration = Duration::from_secs(5);
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
        locals: &Arc<Locals>,
        store: &Store,
        region: &Arc<Region>,
        elsewhere: &Handle,
    ) -> Option<(Self, Ready)> {
        let part = locals.pin(region.len() as u64)?;
        let (held, released) = oneshot::channel();
        let (working, ready) = oneshot::channel();
        let (store, region) = (store.clone(), Arc::clone(region));
        elsewhere.spawn(async move {
            keep(&store, &region, working, released).await;
            drop(part);
        });
        Some((Self { _held: held }, Ready(ready)))
    }
}

impl Ready {
    /// Waits for it, but not for ever.
    pub(super) async fn wait(self) {
        // Whether it is done or was given up: nothing more is done for it.
        let _ = tokio::time::timeout(PATIENCE, self.0).await;
    }
}

async fn keep(
    store: &Store,
    region: &Arc<Region>,
    working: oneshot::Sender<()>,
    mut released: oneshot::Receiver<()>,
) {
    let touched = Arc::clone(region);
    let _ = tokio::task::spawn_blocking(move || touch(&touched)).await;
    let over = matches!(released.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    if over {
        return;
    }
    if let Err(why) = store.register_memory(region).await {
        tracing::debug!(why, "the memory of a session is not registered");
    }
    drop(working);
    // Also where one ring of several refused it.
    let _ = released.await;
    for _ in 0..TRIES {
        if store.unregister_memory(region) {
            return;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Has the kernel make every page, in large ones where it can. They are read and not written: a client may have put
/// something there by now.
fn touch(region: &Arc<Region>) {
    let mut byte = [0];
    for at in (0..region.len()).step_by(PAGE) {
        if let Some(buf) = Buf::new(region, at, 1) {
            buf.copy_out(0, &mut byte);
        }
    }
    if region.len() >= LARGE_PAGE && !region.collapse() {
        tracing::debug!(bytes = region.len(), "the memory of a session is not all in large pages");
    }
}
