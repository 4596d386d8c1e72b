//! Connections of other nodes: a limited number at a time.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;

use super::gather::Gathered;
use super::greeting::Greeting;
use super::stream::{self, Both, Shown};
use crate::credentials::Credentials;
use kvarts_wire::lobby::Lobby;

/// The pause after a connection that could not be taken: one that lacks a descriptor is not asked for again and again.
const PAUSE: Duration = Duration::from_millis(50);

/// How long further refusals are not told of.
const QUIET: Duration = Duration::from_secs(1);

/// How long the other side may take to show who it is.
const GREETING: Duration = Duration::from_secs(5);

/// Connections whose other side has not shown who it is. Where there are as many, the oldest has to go.
const UNPROVEN_MAX: usize = 256;

/// A connection of a node, and its place among all.
pub(super) struct Placed {
    stream: Gathered<Both>,
    shown: Shown,
    _place: OwnedSemaphorePermit,
}

/// Connections of nodes that have shown who they are, as they come, each greeted beside the others; where there are as many as there may
/// be, the next is refused.
pub(super) fn limited(
    listener: TcpListener,
    most: usize,
    credentials: Option<Arc<Credentials>>,
    greeting: Greeting,
) -> impl Stream<Item = io::Result<Placed>> {
    let places = Arc::new(Semaphore::new(most));
    let (to, come) = mpsc::channel(1);
    let accepting = async move {
        let unproven = Lobby::new(UNPROVEN_MAX);
        let quiet_until = Arc::new(Mutex::new(Instant::now()));
        loop {
            // ends: the server drops the stream, and this task with it
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(_) => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let guest = unproven.enter();
            let (to, credentials, greeting) = (to.clone(), credentials.clone(), greeting.clone());
            let (places, quiet_until) = (Arc::clone(&places), Arc::clone(&quiet_until));
            tokio::spawn(async move {
                let shows = stream::accept(stream, (credentials.as_deref(), &greeting));
                let shown = guest.unless_lost(tokio::time::timeout(GREETING, shows)).await;
                drop(guest);
                let refuse = |reason: &dyn std::fmt::Display| {
                    let now = Instant::now();
                    let mut until = quiet_until.lock().unwrap_or_else(PoisonError::into_inner);
                    if *until <= now {
                        *until = now + QUIET;
                        tracing::warn!(%from, %reason, "a connection of a node was refused");
                    }
                };
                match (shown, places.try_acquire_owned()) {
                    (Some(Ok(Ok((stream, shown)))), Ok(place)) => {
                        let stream = Gathered::new(stream);
                        // Where the channel is closed, the server has ended.
                        // ends: the server takes it, or has ended and drops the receiver
                        drop(to.send(Ok(Placed { stream, shown, _place: place })).await);
                    }
                    (Some(Ok(Err(error))), _) => refuse(&error),
                    (Some(Ok(Ok(_))), Err(_)) => refuse(&"the limit of connections is reached"),
                    (Some(Err(_)), _) => refuse(&"the other node did not authenticate itself in time"),
                    (None, _) => refuse(
                        &"too many recent connections ended without authentication, so this one was refused",
                    ),
                }
            });
        }
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(accepting);
    // When the server drops this stream, accepting ends, and with it the listener.
    let come =
        futures_util::stream::unfold((ReceiverStream::new(come), tasks), |(mut come, tasks)| async move {
            // ends: the server, which drops it when the node stops
            let one = come.next().await?;
            Some((one, (come, tasks)))
        });
    Box::pin(come)
}

impl Connected for Placed {
    type ConnectInfo = Shown;

    fn connect_info(&self) -> Shown {
        self.shown
    }
}

impl AsyncRead for Placed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Placed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
