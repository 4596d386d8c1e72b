//! The local socket: gRPC and the local path share it, and a connection's first byte says which it is.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::foreign;
use super::limits::{HELLO, MAGIC, UNKNOWN_MAX};
use super::threads::Threads;
use crate::state::{Guest, Lobby, ServerState};

/// Connections that wait for gRPC to take them.
const WAITING: usize = 16;

/// Takes connections until a drain is asked for, and works for those of the local path until they have ended; the others
/// go to `grpc`. Dropping it ends all of its own.
async fn accept(state: Arc<ServerState>, listener: UnixListener, grpc: mpsc::Sender<io::Result<UnixStream>>) {
    let unknown = Lobby::new(UNKNOWN_MAX);
    let mut sessions = JoinSet::new();
    let threads = Arc::new(Threads::new(state.locals.threads));
    // Who has not said what it wants sends none.
    if let Err(error) = foreign::allow(&listener, false) {
        tracing::info!(%error, "this kernel accepts descriptors from every client that connects (Linux 6.16 \
            can refuse them): give access to the local socket to trusted users only");
    }
    loop {
        tokio::select! {
            // ends: a drain, in another arm
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    // One that came before the listener said so.
                    let _ = foreign::allow(&stream, false);
                    let (guest, threads) = (unknown.enter(), Arc::clone(&threads));
                    sessions.spawn(sort(Arc::clone(&state), (stream, guest), grpc.clone(), threads));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection of the local socket could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            // ends: a drain, in another arm
            Some(_) = sessions.join_next() => {}
            () = state.drain_asked() => break,
        }
    }
    drop((listener, grpc));
    // ends: sessions end at a drain; at a stop this is aborted after `DRAIN_TIMEOUT`
    while sessions.join_next().await.is_some() {}
}

/// The connections that are gRPC's, and what works for the others.
pub(crate) fn split(
    state: Arc<ServerState>,
    listener: UnixListener,
) -> (mpsc::Receiver<io::Result<UnixStream>>, impl Future<Output = ()>) {
    let (to, grpc) = mpsc::channel(WAITING);
    (grpc, accept(state, listener, to))
}

/// Sorts a connection by its first byte. Until it has said who it is it has a place among those that are not known, and loses it to
/// the next where it is the one that has been silent longest.
async fn sort(
    state: Arc<ServerState>,
    (stream, guest): (UnixStream, Guest),
    grpc: mpsc::Sender<io::Result<UnixStream>>,
    threads: Arc<Threads>,
) {
    let first = tokio::select! {
        first = guest.unless_lost(tokio::time::timeout(HELLO, first_byte(&stream))) => first,
        () = state.drain_asked() => return,
    };
    match first {
        None => state.metrics.refused("connect", "connections"),
        Some(Ok(Ok(Some(byte)))) if Some(&byte) == MAGIC.first() => {
            drop(grpc);
            threads.serve(state, (stream, guest)).await;
        }
        // A server that ends takes no more connections.
        // ends: the server of gRPC takes it, or has ended and drops the receiver
        Some(Ok(Ok(Some(_)))) => drop(grpc.send(Ok(stream)).await),
        // A client that says nothing, or leaves at once, is owed nothing.
        _ => {}
    }
}

/// The first byte that will be read; none if the other end is gone.
async fn first_byte(stream: &UnixStream) -> io::Result<Option<u8>> {
    loop {
        // ends: `HELLO`, around it
        stream.readable().await?;
        let mut byte = [0];
        let looked = stream.try_io(Interest::READABLE, || {
            Ok(rustix::net::recv(stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT)?)
        });
        match looked {
            Ok((count, _)) => return Ok((count > 0).then_some(byte[0])),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}
