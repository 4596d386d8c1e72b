//! What calls between nodes go over: TCP as it is, or TLS with the certificate of a node on either side.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use kvarts_cluster::members::NodeId;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::rustls::{CommonState, pki_types::CertificateDer};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::credentials::{self, Credentials, Purpose};

/// A connection.
#[derive(Debug)]
pub(super) enum Both {
    Plain(TcpStream),
    Secured(Box<TlsStream<TcpStream>>),
}

/// Who is at the other end of a connection, as far as a certificate shows it.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown(Option<Arc<CertificateDer<'static>>>);

impl Shown {
    /// Whether a certificate was shown that names this node.
    pub(super) fn names(&self, node: NodeId) -> bool {
        self.0.as_ref().is_some_and(|certificate| credentials::names(certificate, node))
    }
}

/// What went wrong with TLS, in an operator's words before the library's.
fn told(error: io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<tokio_rustls::rustls::Error>());
    match tls {
        Some(tls) => io::Error::other(format!("{} ({tls})", credentials::told(tls))),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            io::Error::other("it ends the connection: it does not speak TLS, or refuses this node")
        }
        None => error,
    }
}

/// Calls the node `peer`. A server that answers there without the certificate of `peer` is told nothing.
pub(super) async fn connect(
    address: &str,
    peer: NodeId,
    credentials: Option<&Credentials>,
) -> io::Result<Both> {
    let stream = TcpStream::connect(address).await?;
    // Without it messages wait for each other; a connection that cannot have it works all the same.
    let _ = stream.set_nodelay(true);
    let Some(credentials) = credentials else { return Ok(Both::Plain(stream)) };
    let name = credentials::server_name(peer).ok_or(io::ErrorKind::InvalidInput)?;
    let connector = TlsConnector::from(credentials.client(Purpose::Calls));
    let stream = connector.connect(name, stream).await.map_err(told)?;
    Ok(Both::Secured(Box::new(stream.into())))
}

/// Takes the connection of the caller at the other end of `stream`.
pub(super) async fn accept(stream: TcpStream, credentials: Option<&Credentials>) -> io::Result<Both> {
    let _ = stream.set_nodelay(true);
    let Some(credentials) = credentials else { return Ok(Both::Plain(stream)) };
    let acceptor = TlsAcceptor::from(credentials.server(Purpose::Calls));
    let stream = acceptor.accept(stream).await.map_err(told)?;
    Ok(Both::Secured(Box::new(stream.into())))
}

impl Both {
    /// Who is at the other end.
    pub(super) fn shown(&self) -> Shown {
        let Self::Secured(stream) = self else { return Shown::default() };
        let state: &CommonState = stream.get_ref().1;
        let certificate = state.peer_certificates().and_then(|chain| chain.first());
        Shown(certificate.map(|certificate| Arc::new(certificate.clone().into_owned())))
    }
}

impl AsyncRead for Both {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, into),
            Self::Secured(stream) => Pin::new(stream).poll_read(context, into),
        }
    }
}

impl AsyncWrite for Both {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Secured(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Secured(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Secured(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
            Self::Secured(stream) => Pin::new(stream).poll_write_vectored(context, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Secured(stream) => stream.is_write_vectored(),
        }
    }
}
