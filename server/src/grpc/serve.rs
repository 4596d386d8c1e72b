//! The transport: connections, TLS, windows, health and reflection.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Router;
use tonic::transport::{Certificate, Server, ServerTlsConfig};
use tonic_health::pb::health_server::{Health, HealthServer};
use tower::layer::util::{Identity as NoLayer, Stack};

use super::admission::AuthLayer;
use super::fair_connection::{self, FairConnection};
use super::services::{Reads, Services};
use super::{health, limits};
use crate::local;
use crate::state::ServerState;
use kvarts_wire::proto;

/// Who the server is, and whom it trusts.
#[derive(Clone)]
pub struct Identity {
    /// Its certificate chain, PEM.
    pub certificate: Vec<u8>,
    /// Its key, PEM.
    pub key: Vec<u8>,
    /// Clients must have a certificate of this authority, PEM.
    pub client_authority: Option<Vec<u8>>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity(redacted, client certificates: {})", self.client_authority.is_some())
    }
}

/// An identity that can be used: its certificates and its key were read, and belong together.
#[derive(Clone, Debug)]
pub struct Tls(Server);

impl Tls {
    /// Reads an identity. Says in one line what is wrong with it.
    pub fn new(identity: &Identity) -> Result<Self, String> {
        let own = tonic::transport::Identity::from_pem(&identity.certificate, &identity.key);
        let mut config = ServerTlsConfig::new().identity(own).timeout(limits::STALL);
        if let Some(authority) = &identity.client_authority {
            config = config.client_ca_root(Certificate::from_pem(authority));
        }
        let server = transport().tls_config(config).map_err(|error| {
            let mut deepest: &dyn std::error::Error = &error;
            while let Some(deeper) = deepest.source() {
                deepest = deeper;
            }
            format!("tls: certificate, key or client_authority cannot be used: {deepest}")
        })?;
        Ok(Self(server))
    }
}

/// Where clients come in.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Over the network, with TLS if there is an identity.
    pub tcp: Option<TcpListener>,
    /// On this host, without TLS; the same tokens are asked for.
    pub unix: Option<UnixListener>,
    /// For the network.
    pub tls: Option<Tls>,
    /// Other identities, as they come.
    pub renewed: Option<mpsc::Receiver<Tls>>,
}

/// Serves until a drain is asked for, then ends what is under way. Connections are closed when their calls have
/// ended. When one of the listeners fails, nothing is served any more.
pub async fn serve(state: Arc<ServerState>, listeners: Listeners) -> Result<(), tonic::transport::Error> {
    let Listeners { tcp, unix, tls, renewed } = listeners;
    let (reporter, health) = tonic_health::server::health_reporter();
    let over_tcp = async {
        match tcp {
            Some(listener) => serve_tcp(&state, listener, (tls, renewed), health.clone()).await,
            None => Ok(()),
        }
    };
    let over_unix = async {
        let Some(listener) = unix else { return Ok(()) };
        // The local path comes in by the same socket.
        let (incoming, local) = local::split(Arc::clone(&state), listener);
        let incoming = placed(Arc::clone(&state), ReceiverStream::new(incoming), true);
        let server = router(&state, transport(), health.clone());
        // ends: a drain, and then `DRAIN_TIMEOUT`, after which it is aborted
        let serving = server.serve_with_incoming_shutdown(incoming, state.drain_asked());
        let (served, ()) = tokio::join!(serving, local);
        served
    };
    tokio::select! {
        served = async { tokio::try_join!(over_tcp, over_unix) } => served.map(|_| ()),
        never = health::keep(Arc::clone(&state), reporter) => match never {},
    }
}

/// Serves over TCP. With another identity, connections that come in have that one from then on; those that were there before
/// are told to go when their calls have ended, and come again.
async fn serve_tcp(
    state: &Arc<ServerState>,
    listener: TcpListener,
    (mut tls, mut renewed): (Option<Tls>, Option<mpsc::Receiver<Tls>>),
    health: HealthServer<impl Health>,
) -> Result<(), tonic::transport::Error> {
    let listener = Arc::new(listener);
    // Dropping them ends them.
    let mut leaving = JoinSet::new();
    loop {
        let (go, gone) = oneshot::channel::<()>();
        let draining = Arc::clone(state);
        let over = async move {
            tokio::select! {
                () = draining.drain_asked() => {}
                // ends: its sender is dropped for another identity; or a drain, the arm before it
                _ = gone => {}
            }
        };
        let incoming = placed(Arc::clone(state), incoming_tcp(Arc::clone(&listener)), false);
        let server = router(state, tls.take().map_or_else(transport, |tls| tls.0), health.clone());
        // ends: a drain or another identity (`over`); at a stop it is aborted after `DRAIN_TIMEOUT`
        let mut serving = Box::pin(server.serve_with_incoming_shutdown(incoming, over));
        let another = async {
            match &mut renewed {
                // ends: serving ends, in the arm beside it
                Some(renewed) => renewed.recv().await,
                None => None,
            }
        };
        tokio::select! {
            // ends: a drain ends serving; another identity is the other arm
            served = &mut serving => {
                served?;
                break;
            }
            // ends: serving ends, in the arm before it
            Some(another) = another => {
                tls = Some(another);
                drop(go);
                leaving.spawn(serving);
            }
        }
    }
    // ends: connections end with their calls; at a stop this is aborted after `DRAIN_TIMEOUT`
    while leaving.join_next().await.is_some() {}
    Ok(())
}

/// Connections that come in over TCP, set up as the server's are: also those of the bare server that this one is
/// measured beside.
pub fn incoming_tcp(listener: Arc<TcpListener>) -> impl Stream<Item = std::io::Result<TcpStream>> {
    let accepted = futures_util::stream::unfold(listener, |listener| async {
        // ends: a drain, with which the stream is dropped
        let accepted = listener.accept().await;
        Some((accepted.map(|(stream, _)| stream), listener))
    });
    calmly(accepted).map(|stream| {
        stream.inspect(|stream| {
            // Without it a connection is only slower.
            let _ = stream.set_nodelay(true);
            unpace(stream);
        })
    })
}

/// What comes in, with a rest after each that could not be taken: where there is no descriptor for it, there is none for a
/// while, and asking again at once keeps a processor busy.
fn calmly<S>(incoming: impl Stream<Item = std::io::Result<S>>) -> impl Stream<Item = std::io::Result<S>> {
    incoming.then(|stream| async {
        if let Err(error) = &stream
            && error.kind() != std::io::ErrorKind::ConnectionAborted
        {
            tracing::warn!(%error, "a connection could not be accepted");
            tokio::time::sleep(limits::ACCEPT_PAUSE).await;
        }
        stream
    })
}

/// Lets a connection of this host send as fast as it is taken. Where the host's congestion control paces (BBR), its timers
/// hold back bytes that cross no network, and cost a fifth of a read's processor time.
fn unpace(stream: &TcpStream) {
    let of_this_host = |peer: SocketAddr| peer.ip().to_canonical().is_loopback();
    if stream.peer_addr().is_ok_and(of_this_host) {
        // Every kernel has this option for every user; without it the connection is only slower.
        let _ = rustix::net::sockopt::set_tcp_congestion(stream, "reno");
    }
}

/// Connections that come in, as many as there are places.
fn placed<S>(
    state: Arc<ServerState>,
    incoming: impl Stream<Item = std::io::Result<S>>,
    is_local: bool,
) -> impl Stream<Item = std::io::Result<FairConnection<S>>> {
    incoming.filter_map(move |stream| match stream {
        Ok(stream) => fair_connection::place(&state, stream, is_local).map(Ok),
        Err(error) => Some(Err(error)),
    })
}

/// The transport's settings: also those of the bare server that this one is measured beside.
pub fn transport() -> Server {
    Server::builder()
        .initial_stream_window_size(limits::UPLOAD_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::UPLOAD_CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(limits::STREAMS_PER_CONNECTION)
        .max_frame_size(limits::UPLOAD_FRAME_BYTES)
        .http2_max_header_list_size(limits::HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(limits::KEEPALIVE))
        .http2_keepalive_timeout(Some(limits::KEEPALIVE))
        .tcp_nodelay(true)
}

fn router(
    state: &Arc<ServerState>,
    server: Server,
    health: HealthServer<impl Health>,
) -> Router<Stack<AuthLayer, NoLayer>> {
    let bounded = limits::MESSAGE_BYTES_MAX;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    let router = server
        .layer(AuthLayer::new(Arc::clone(state)))
        .add_service(health.max_decoding_message_size(limits::OPEN_CALL_BYTES_MAX))
        .add_service(Reads)
        .add_service(
            proto::models_server::ModelsServer::new(Services)
                .max_decoding_message_size(limits::MODEL_BYTES_MAX),
        )
        .add_service(proto::store_server::StoreServer::new(Services).max_decoding_message_size(bounded))
        .add_service(
            proto::directory_server::DirectoryServer::new(Services).max_decoding_message_size(bounded),
        )
        .add_service(proto::sessions_server::SessionsServer::new(Services).max_decoding_message_size(bounded))
        .add_service(proto::plans_server::PlansServer::new(Services).max_decoding_message_size(bounded))
        .add_service(proto::admin_server::AdminServer::new(Services).max_decoding_message_size(bounded));
    match reflection {
        Ok(reflection) => {
            router.add_service(reflection.max_decoding_message_size(limits::OPEN_CALL_BYTES_MAX))
        }
        Err(error) => {
            tracing::warn!(%error, "gRPC reflection is not available");
            router
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::tcp_congestion;

    #[tokio::test]
    async fn a_connection_that_cannot_be_taken_is_not_asked_for_again_and_again() {
        let mut asked = 0;
        let endless = tokio_stream::iter(std::iter::repeat_with(|| {
            asked += 1;
            Err::<(), _>(std::io::Error::from_raw_os_error(24))
        }));
        {
            let mut calm = std::pin::pin!(calmly(endless));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            for _ in 0..1000 {
                assert!(calm.as_mut().poll_next(&mut context).is_pending());
            }
            assert!(calm.next().await.unwrap().is_err(), "it is told of after a rest");
        }
        assert!(asked <= 2, "{asked}");
    }

    #[tokio::test]
    async fn a_connection_of_this_host_is_not_paced() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = std::pin::pin!(incoming_tcp(Arc::new(listener)));
        let (client, accepted) = tokio::join!(TcpStream::connect(address), incoming.next());
        let accepted = accepted.unwrap().unwrap();
        assert_eq!(tcp_congestion(&accepted).unwrap(), "reno");
        assert!(accepted.nodelay().unwrap());
        drop(client);
    }
}
