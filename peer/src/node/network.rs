//! How a node reaches the others: over the machine's network, or a simulation's.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use kvarts_cluster::members::Member;
use kvarts_contract::clock::Entropy;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, StdError, http};
use tonic::transport::{Channel, Endpoint};

use super::gather::Gathered;
use super::greeting::Greeting;
use super::stream;
use crate::credentials::Credentials;
use crate::lane::Host;
use crate::read::Runner;

/// How long a connection may take to be made.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a connection that nothing is said on is tried, and how long the answer may take.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(5);
pub(super) const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// What takes the calls to one other node.
pub trait Called: Send + Sync {
    /// One call.
    fn call(&self, request: http::Request<Body>) -> BoxFuture<http::Response<Body>, StdError>;
}

/// Calls to one other node.
#[derive(Clone)]
pub enum Calls {
    /// Over a connection.
    Channel(Channel),
    /// Over something else.
    Given(Arc<dyn Called>),
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

impl Service<http::Request<Body>> for Calls {
    type Response = http::Response<Body>;
    type Error = StdError;
    type Future = BoxFuture<http::Response<Body>, StdError>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        match self {
            Self::Channel(channel) => channel.poll_ready(context).map_err(Into::into),
            Self::Given(_) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            Self::Channel(channel) => {
                let answer = channel.call(request);
                // ends: the time of the call that asks (`in_time`); a stream's connection by `KEEP_ALIVE`
                Box::pin(async move { answer.await.map_err(Into::into) })
            }
            Self::Given(called) => called.call(request),
        }
    }
}

/// The ways to other nodes.
pub trait Network: Send + Sync + fmt::Debug {
    /// Calls to a member; a connection is made when it is first used.
    fn calls(&self, member: &Member) -> Result<Calls, String>;
    /// Where a member takes connections at another port.
    fn address(&self, member: &Member, port: u16) -> BoxFuture<SocketAddr, String>;
}

/// What a node stands on.
#[derive(Clone, Debug)]
pub struct Footing {
    /// Time, timers and a place for tasks.
    pub runner: Arc<dyn Runner>,
    /// Threads of connections that carry bytes.
    pub host: Arc<dyn Host>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
    /// The ways to other nodes.
    pub network: Arc<dyn Network>,
    /// The least bytes of a piece of a read: a simulation reads less, in as many pieces.
    pub least_piece: u64,
}

/// The network of the machine.
#[derive(Debug)]
pub(super) struct OfTheMachine {
    /// With a certificate of this node every call is encrypted.
    pub(super) credentials: Option<Arc<Credentials>>,
    /// What is said first on each connection.
    pub(super) greeting: Greeting,
}

impl Network for OfTheMachine {
    fn calls(&self, member: &Member) -> Result<Calls, String> {
        let endpoint = Endpoint::from_shared(format!("http://{}", member.address));
        let endpoint = endpoint.map_err(|error| format!("address {:?}: {error}", member.address))?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        let (address, peer) = (member.address.clone(), member.id);
        let (credentials, greeting) = (self.credentials.clone(), self.greeting.clone());
        let connector = tower::service_fn(move |_| {
            let (address, credentials, greeting) = (address.clone(), credentials.clone(), greeting.clone());
            async move {
                // A task of its own: the call that wanted the connection may be given up before the first words are said, and nothing would
                // go on with them until the next one.
                let connecting = tokio::spawn(async move {
                    let connecting = stream::connect(&address, peer, (credentials.as_deref(), &greeting));
                    tokio::time::timeout(CONNECT_TIMEOUT, connecting).await
                });
                // ends: `CONNECT_TIMEOUT`, inside the task
                let stream = connecting.await.map_err(std::io::Error::other)???;
                Ok::<_, std::io::Error>(TokioIo::new(Gathered::new(stream)))
            }
        });
        Ok(Calls::Channel(endpoint.connect_with_connector_lazy(connector)))
    }

    fn address(&self, member: &Member, port: u16) -> BoxFuture<SocketAddr, String> {
        let address = member.address.clone();
        Box::pin(async move {
            let (host, _) = address.rsplit_once(':').unwrap_or_default();
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let told = |error: &dyn fmt::Display| format!("{host}: {error}");
            // A resolver may take longer than any connection.
            let found = tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((host, port))).await;
            let seconds = CONNECT_TIMEOUT.as_secs();
            let late =
                |_| told(&format_args!("the host name of the node was not resolved within {seconds} s"));
            let mut found = found.map_err(late)?.map_err(|error| told(&error))?;
            found.next().ok_or_else(|| told(&"the host name has no address"))
        })
    }
}
