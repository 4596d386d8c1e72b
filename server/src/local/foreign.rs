//! Descriptors of clients. A call on one may take as long as its maker wants: `close` of a socket that lingers, of a file whose file
//! system is a process of the client's, or of one on a server that hangs, and `fstatfs` of the last two. So no thread that works for others
//! makes such a call before the file is known to be one in memory; nor does the kernel there, which closes what is in the queue of a
//! connection that is closed, or what does not fit into what was asked for.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::buffers::shared;
use tokio::sync::oneshot;

use crate::state::parts::Part;
use kvarts_wire::fault::{Fault, Outcome};

/// How long the look at a descriptor may take.
const LOOK: Duration = Duration::from_secs(5);

/// `SO_PASSRIGHTS` of Linux 6.16, which libraries do not have yet.
const PASS_RIGHTS: libc::c_int = 83;

/// Whether descriptors may be sent to this connection, or to those that come to this listener. Where they may not, who sends one is refused.
/// A kernel before Linux 6.16 cannot refuse them.
#[allow(unsafe_code, reason = "the safe functions of the libraries do not support this socket option")]
pub(super) fn allow(socket: impl AsFd, allowed: bool) -> io::Result<()> {
    let value = libc::c_int::from(allowed);
    let (socket, bytes) = (socket.as_fd(), size_of_val(&value) as libc::socklen_t);
    // SAFETY: the descriptor is open while it is borrowed, and the kernel reads `bytes` bytes of `value`, which lives until the call returns.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            PASS_RIGHTS,
            std::ptr::from_ref(&value).cast(),
            bytes,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Drops it on a thread of its own. The place of its session is taken until that has ended: a tenant has as many of these threads as it may
/// have sessions.
pub(super) fn close(what: impl Send + 'static, place: Option<Arc<Part>>) {
    let closing = move || {
        drop(what);
        drop(place);
    };
    // Without a thread it is closed here.
    let _ = std::thread::Builder::new().name("kvarts-closing".to_owned()).spawn(closing);
}

/// The descriptor, if it is one of a file in memory. One that does not answer is its session's end.
pub(super) async fn looked_at(file: OwnedFd, place: Arc<Part>) -> Result<Outcome<OwnedFd>, &'static str> {
    let (tell, told) = oneshot::channel();
    let looking = move || {
        let looked = shared::is_in_memory(&file);
        match looked {
            // It is closed here if its session has ended meanwhile.
            Ok(()) => drop(tell.send(Ok(file))),
            Err(what) => {
                let _ = tell.send(Err(Fault::malformed(format!("share: {what}"))));
                drop(file);
            }
        }
        drop(place);
    };
    std::thread::Builder::new()
        .name("kvarts-closing".to_owned())
        .spawn(looking)
        .map_err(|_| "no thread of the server is free to check a descriptor")?;
    match tokio::time::timeout(LOOK, told).await {
        Ok(Ok(looked)) => Ok(looked),
        _ => Err("the file of the descriptor does not respond"),
    }
}
