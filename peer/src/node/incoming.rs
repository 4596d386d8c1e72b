//! Connections of other nodes: a limited number at a time.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;

use super::gather::Gathered;
use super::stream::{self, Both, Shown};
use crate::credentials::Credentials;

/// The pause after a connection that could not be taken: one that lacks a descriptor is not asked for again and again.
const PAUSE: Duration = Duration::from_millis(50);

/// How long the other side may take to show who it is.
const GREETING: Duration = Duration::from_secs(5);

/// A connection, and its place among all.
pub(super) struct Placed {
    stream: Gathered<Both>,
    _place: OwnedSemaphorePermit,
}

/// Connections as they come; when there are as many as there may be, the next is taken when one has ended. With credentials only
/// those come that have shown a certificate of the authority, each greeted beside the others.
pub(super) fn limited(
    listener: TcpListener,
    most: usize,
    credentials: Option<Arc<Credentials>>,
) -> impl Stream<Item = io::Result<Placed>> {
    let places = Arc::new(Semaphore::new(most));
    let (to, come) = mpsc::channel(1);
    let accepting = async move {
        while let Ok(place) = Arc::clone(&places).acquire_owned().await {
            let stream = loop {
                match listener.accept().await {
                    Ok((stream, _)) => break stream,
                    Err(_) => tokio::time::sleep(PAUSE).await,
                }
            };
            let (to, credentials) = (to.clone(), credentials.clone());
            tokio::spawn(async move {
                match tokio::time::timeout(GREETING, stream::accept(stream, credentials.as_deref())).await {
                    // Where the channel is closed, the server has ended.
                    Ok(Ok(stream)) => {
                        let stream = Gathered::new(stream);
                        drop(to.send(Ok(Placed { stream, _place: place })).await);
                    }
                    Ok(Err(error)) => tracing::warn!(reason = %error, "a connection of a node was refused"),
                    Err(_) => tracing::warn!("a connection was refused that did not show who it is in time"),
                }
            });
        }
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(accepting);
    // When the server drops this stream, accepting ends, and with it the listener.
    let come =
        futures_util::stream::unfold((ReceiverStream::new(come), tasks), |(mut come, tasks)| async move {
            let one = come.next().await?;
            Some((one, (come, tasks)))
        });
    Box::pin(come)
}

impl Connected for Placed {
    type ConnectInfo = Shown;

    fn connect_info(&self) -> Shown {
        self.stream.get_ref().shown()
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
