//! What calls between nodes go over: TCP as it is, or TLS with the certificate of a node on either side.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use kvarts_cluster::members::NodeId;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::rustls::{CommonState, pki_types::CertificateDer};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::greeting::Greeting;
use crate::credentials::{self, Credentials, Purpose};

/// A connection.
#[derive(Debug)]
pub(super) enum Both {
    Plain(TcpStream),
    Secured(Box<TlsStream<TcpStream>>),
}

/// Who is at the other end of a connection: it has shown that it knows the cluster's secret, and its certificate where there are any.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shown(pub(super) NodeId);

/// What went wrong with TLS, in an operator's words before the library's.
fn told(error: io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<tokio_rustls::rustls::Error>());
    match tls {
        Some(tls) => io::Error::other(format!("{} ({tls})", credentials::told(tls))),
        None if error.kind() == io::ErrorKind::UnexpectedEof => io::Error::other(
            "the other node closed the connection, because it refused this node, or because one of the two \
            nodes has no certificate",
        ),
        None => error,
    }
}

/// Calls the node `peer`. A server that answers there without the certificate of `peer` is told nothing.
pub(super) async fn connect(
    address: &str,
    peer: NodeId,
    (credentials, greeting): (Option<&Credentials>, &Greeting),
) -> io::Result<Both> {
    // ends: `CONNECT_TIMEOUT` around it
    let stream = TcpStream::connect(address).await?;
    // Without it messages wait for each other; a connection that cannot have it works all the same.
    let _ = stream.set_nodelay(true);
    let mut stream = match credentials {
        None => Both::Plain(stream),
        Some(credentials) => {
            let name = credentials::server_name(peer).ok_or(io::ErrorKind::InvalidInput)?;
            let connector = TlsConnector::from(credentials.client(Purpose::Calls));
            // ends: `CONNECT_TIMEOUT` around it
            let stream = connector.connect(name, stream).await.map_err(told)?;
            Both::Secured(Box::new(stream.into()))
        }
    };
    greeting.call(&mut stream, peer).await.map_err(told)?;
    Ok(stream)
}

/// Takes the connection of the caller at the other end of `stream`, and says who that is.
pub(super) async fn accept(
    stream: TcpStream,
    (credentials, greeting): (Option<&Credentials>, &Greeting),
) -> io::Result<(Both, Shown)> {
    let _ = stream.set_nodelay(true);
    let mut stream = match credentials {
        None => Both::Plain(stream),
        Some(credentials) => {
            let acceptor = TlsAcceptor::from(credentials.server(Purpose::Calls));
            Both::Secured(Box::new(acceptor.accept(stream).await.map_err(told)?.into()))
        }
    };
    let certificate = stream.certificate();
    let is_known = |from| match credentials {
        None => true,
        Some(_) => certificate.is_some_and(|certificate| credentials::names(&certificate, from)),
    };
    let from = greeting.answer(&mut stream, is_known).await.map_err(told)?;
    Ok((stream, Shown(from)))
}

impl Both {
    /// The certificate that the other end has shown.
    fn certificate(&self) -> Option<CertificateDer<'static>> {
        let Self::Secured(stream) = self else { return None };
        let state: &CommonState = stream.get_ref().1;
        state.peer_certificates()?.first().map(|certificate| certificate.clone().into_owned())
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
