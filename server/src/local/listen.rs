//! The local socket: gRPC and the local path share it, and a connection's first byte says which it is.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;

use super::limits::{HELLO, MAGIC, SESSIONS_MAX, UNKNOWN_MAX};
use super::threads::Threads;
use crate::state::ServerState;

/// Connections that wait for gRPC to take them.
const WAITING: usize = 16;

/// Takes connections until a drain is asked for, and works for those of the local path until they have ended; the others
/// go to `grpc`. Dropping it ends all of its own.
async fn accept(state: Arc<ServerState>, listener: UnixListener, grpc: mpsc::Sender<io::Result<UnixStream>>) {
    let room = Arc::new(Semaphore::new(SESSIONS_MAX));
    let unknown = Arc::new(Semaphore::new(UNKNOWN_MAX));
    let mut sessions = JoinSet::new();
    let threads = Arc::new(Threads::new(state.locals.threads));
    loop {
        tokio::select! {
            // Those beyond wait in the kernel's queue, where they cost this process nothing.
            (place, accepted) = next(&unknown, &listener) => match accepted {
                Ok((stream, _)) => {
                    let of = (Arc::clone(&room), Arc::clone(&threads));
                    sessions.spawn(sort(Arc::clone(&state), (stream, place), grpc.clone(), of));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection of the local socket could not be taken");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = sessions.join_next() => {}
            () = state.drain_asked() => break,
        }
    }
    drop((listener, grpc));
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

/// The next connection, and its place among those that are not known.
async fn next(
    unknown: &Arc<Semaphore>,
    listener: &UnixListener,
) -> (Option<OwnedSemaphorePermit>, io::Result<(UnixStream, SocketAddr)>) {
    // It is never closed.
    let place = Arc::clone(unknown).acquire_owned().await.ok();
    (place, listener.accept().await)
}

async fn sort(
    state: Arc<ServerState>,
    (stream, place): (UnixStream, Option<OwnedSemaphorePermit>),
    grpc: mpsc::Sender<io::Result<UnixStream>>,
    (room, threads): (Arc<Semaphore>, Arc<Threads>),
) {
    let first = tokio::select! {
        first = tokio::time::timeout(HELLO, first_byte(&stream)) => first,
        () = state.drain_asked() => return,
    };
    match first {
        Ok(Ok(Some(byte))) if Some(&byte) == MAGIC.first() => {
            let Ok(_permit) = room.try_acquire_owned() else {
                tracing::warn!(target: "audit", "a local session was refused: all places are taken");
                return;
            };
            drop(grpc);
            threads.serve(state, (stream, place)).await;
        }
        // A server that ends takes no more connections.
        Ok(Ok(Some(_))) => drop(grpc.send(Ok(stream)).await),
        // A client that says nothing, or leaves at once, is owed nothing.
        _ => {}
    }
}

/// The first byte that will be read; none if the other end is gone.
async fn first_byte(stream: &UnixStream) -> io::Result<Option<u8>> {
    loop {
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
