//! The connection: its channel, its own runtime, and what it knows of the models it registered.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use kvarts_contract::api::{LeaseId, MAX_REQUEST_BLOCKS, Placed};
use kvarts_contract::blocking::block_on;
use kvarts_contract::clock::SystemClock;
use kvarts_contract::clock::{Clock, Nanos};
use kvarts_contract::error::{Error, IdentityCause, Reason};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use tokio::runtime::{Handle, Runtime};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Response, Status};

use super::answers;
use super::away::{self, deepest};
use super::timeouts::{GRACE, LONGEST};
use super::{ConnectOptions, THREADS_MAX};
use kvarts_wire::proto;
use kvarts_wire::{convert, digest, fault, limits};
use proto::admin_client::AdminClient;
use proto::directory_client::DirectoryClient;
use proto::models_client::ModelsClient;
use proto::plans_client::PlansClient;
use proto::reads_client::ReadsClient;
use proto::sessions_client::SessionsClient;
use proto::store_client::StoreClient;

/// How long after a call whose connection was lost it is made again; a connection that is over is known to be soon.
pub(super) const AGAIN: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(50)];

/// A model that was registered through this connection.
#[derive(Debug)]
pub(super) struct Known {
    identity: Identity,
    geometry: Geometry,
    /// The shapes of its blocks that were asked for.
    shapes: Mutex<BTreeMap<(Group, Coordinate), Arc<BlockShape>>>,
}

/// Shapes of one model that are kept; any others are worked out each time.
const SHAPES_MAX: usize = 256;

impl Known {
    fn shape(&self, group: Group, coordinate: Coordinate) -> Result<Arc<BlockShape>, Reason> {
        let mut shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shape) = shapes.get(&(group, coordinate)) {
            return Ok(Arc::clone(shape));
        }
        let shape = self.geometry.shape(group, coordinate, self.identity.block_tokens);
        let shape = Arc::new(shape?);
        if shapes.len() < SHAPES_MAX {
            shapes.insert((group, coordinate), Arc::clone(&shape));
        }
        Ok(shape)
    }
}

/// One connection.
pub(super) struct Remote {
    /// Taken when the connection goes.
    runtime: Option<Runtime>,
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    call_timeout: Duration,
    pub(super) clock: Arc<dyn Clock>,
    /// Whether look-ups count what other nodes have.
    pub(super) of_cluster: bool,
    known: RwLock<BTreeMap<NamespaceId, Arc<Known>>>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}

fn config(what: impl fmt::Display) -> Error {
    Error(Reason::Config(what.to_string()))
}

/// Makes a call that may be made twice, and again while it is given to connections that are over and not yet known to be.
/// A server that is not there is not waited for.
pub(super) async fn while_lost<T>(
    calls: [impl Future<Output = Result<T, Status>>; AGAIN.len()],
) -> Result<T, Status> {
    let mut answer = Err(Status::unknown("the request was not sent"));
    for (pause, call) in AGAIN.into_iter().zip(calls) {
        tokio::time::sleep(pause).await;
        // ends: the time that its caller has for all attempts (`in_time`)
        answer = call.await;
        let is_lost = |status: &Status| {
            matches!(status.code(), Code::Unknown | Code::Cancelled | Code::ResourceExhausted)
                && fault::is_of_transport(status)
                && !fault::is_late(status)
        };
        if !answer.as_ref().is_err_and(is_lost) {
            break;
        }
    }
    answer
}

/// A call, all of its answer included, which is to come within `left`. The server keeps that time, and so does the transport
/// until the answer begins; nothing else ends an answer that a stalled network has begun to bring, for a minute.
pub(super) async fn in_time<T>(
    left: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let left = left.min(LONGEST).saturating_add(GRACE);
    let late = |_| {
        let seconds = left.as_secs_f64();
        Err(Status::deadline_exceeded(format!("the server has not responded within {seconds:.1} s")))
    };
    tokio::time::timeout(left, call).await.unwrap_or_else(late)
}

/// A lease by its name on the wire; 0 is none.
pub(super) fn lease(name: u64) -> Option<LeaseId> {
    (name != 0).then_some(LeaseId(name))
}

impl Remote {
    pub(super) fn connect(options: &ConnectOptions) -> Result<Self, Error> {
        if options.threads == 0 || options.threads > THREADS_MAX {
            return Err(config(format!(
                "threads: the value must be 1 to {THREADS_MAX}, not {}",
                options.threads
            )));
        }
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime =
            runtime.worker_threads(options.threads).thread_name("kvarts-client").enable_all().build();
        let runtime = runtime.map_err(config)?;
        let endpoint = endpoint(options)?;
        if let (Some(path), true) = (options.endpoint.strip_prefix("unix:"), options.token.is_some()) {
            let path = path.strip_prefix("//").unwrap_or(path);
            let known = super::peer::connect(Path::new(path), options.call_timeout);
            let known = known.and_then(|socket| super::peer::check(socket, options.server_uid));
            known.map_err(|error| away::of_io(path, &error))?;
        }
        // The endpoint's own timeout is for the first of it: one that takes the connection may say nothing to certificates.
        let within = options.call_timeout.min(LONGEST);
        let connecting = async move { tokio::time::timeout(within, endpoint.connect()).await };
        // ends: `within`, the task's own
        let channel = block_on(runtime.spawn(connecting)).map_err(config)?;
        let late = |_| {
            Reason::Away(format!("{}: no connection within {} s", options.endpoint, within.as_secs_f64()))
        };
        let channel = channel.map_err(late)?.map_err(|error| {
            tracing::debug!(?error, "connecting failed");
            away::of_transport(&options.endpoint, &error)
        })?;
        if let Some(time) = options.first_answer {
            let asked = runtime.spawn(answers::anything(channel.clone(), time));
            // ends: `first_answer`, of which the task is made
            block_on(asked).map_err(config)??;
        }
        let token = options.token.as_ref().map(|token| format!("Bearer {token}").parse());
        let token = token.transpose().map_err(|_| config("the token has invalid characters"))?;
        let known = RwLock::new(BTreeMap::new());
        let clock = SystemClock::new();
        let ConnectOptions { call_timeout, of_cluster, .. } = *options;
        Ok(Self { runtime: Some(runtime), channel, token, call_timeout, clock, of_cluster, known })
    }

    pub(super) fn store(&self) -> StoreClient<Channel> {
        StoreClient::new(self.channel.clone()).max_decoding_message_size(limits::MESSAGE_BYTES_MAX)
    }

    pub(super) fn reads(&self) -> ReadsClient<Channel> {
        ReadsClient::new(self.channel.clone()).max_decoding_message_size(limits::MESSAGE_BYTES_MAX)
    }

    pub(super) fn models(&self) -> ModelsClient<Channel> {
        ModelsClient::new(self.channel.clone())
    }

    pub(super) fn plans(&self) -> PlansClient<Channel> {
        PlansClient::new(self.channel.clone()).max_decoding_message_size(limits::MESSAGE_BYTES_MAX)
    }

    pub(super) fn sessions(&self) -> SessionsClient<Channel> {
        SessionsClient::new(self.channel.clone()).max_decoding_message_size(limits::MESSAGE_BYTES_MAX)
    }

    pub(super) fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(self.channel.clone())
    }

    pub(super) fn directory(&self) -> DirectoryClient<Channel> {
        DirectoryClient::new(self.channel.clone()).max_decoding_message_size(limits::MESSAGE_BYTES_MAX)
    }

    /// A request with the token and the time that is left for it.
    pub(super) fn request<T>(&self, message: T, deadline: Option<Nanos>) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        request.set_timeout(self.left(deadline));
        request
    }

    /// How long a call may take.
    pub(super) fn left(&self, deadline: Option<Nanos>) -> Duration {
        deadline.map_or(self.call_timeout, |deadline| deadline.since(self.clock.now()))
    }

    /// A request that may take as long as the server allows.
    pub(super) fn endless<T>(&self, message: T) -> Request<T> {
        let mut request = self.request(message, None);
        request.metadata_mut().remove("grpc-timeout");
        request
    }

    /// Runs on the client's own threads.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            runtime.spawn(work);
        }
    }

    /// Runs something that waits, on a thread for that.
    pub(super) fn spawn_waiting(&self, work: impl FnOnce() + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            // ends: its work connects, which has `call_timeout`
            runtime.spawn_blocking(work);
        }
    }

    /// Waits for an answer on this thread, no longer than the client's timeout.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<Response<T>, Status>> + Send + 'static,
    ) -> Result<T, Error> {
        self.ask_endless(in_time(self.call_timeout, work))
    }

    /// The same for as long as it takes.
    pub(super) fn ask_endless<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<Response<T>, Status>> + Send + 'static,
    ) -> Result<T, Error> {
        let handle: &Handle =
            self.runtime.as_ref().map(Runtime::handle).ok_or(Reason::Busy("the connection is closed"))?;
        // ends: `call_timeout` in `ask`; without it the connection, once the server is silent (`KEEPALIVE`)
        let answer = block_on(handle.spawn(work)).map_err(|_| Reason::Busy("the connection is closed"))?;
        answer.map(Response::into_inner).map_err(|status| Error(fault::reason_of(&status)))
    }

    /// The same, for what may be asked twice: once more if the connection is lost, or if the server does not know a model
    /// that it was told of: it has been restarted.
    pub(super) fn ask_again<T: Send + 'static, F>(&self, work: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    {
        let twice = || while_lost(AGAIN.map(|_| work()));
        match self.ask(twice()) {
            Err(Error(Reason::UnknownNamespace(namespace))) if self.known(namespace).is_some() => {
                if let Some(known) = self.known(namespace) {
                    self.register(&known.identity, &known.geometry)?;
                }
                self.ask(twice())
            }
            answer => answer,
        }
    }

    pub(super) fn register(&self, identity: &Identity, geometry: &Geometry) -> Result<NamespaceId, Error> {
        if !identity.tenant_salt.is_empty() {
            let rule = IdentityCause::Rule(
                "tenant_salt: remove the field, because the server sets \
                the salt",
            );
            return Err(Error(Reason::Identity(rule)));
        }
        let mut models = self.models();
        let request = self.request(registration(identity, geometry), None);
        let reply = self.ask(async move { models.register_model(request).await })?;
        Ok(self.learn(&reply, identity, geometry)?)
    }

    /// Registers all models again: the server has been restarted.
    pub(super) fn register_all(&self) -> Result<(), Reason> {
        let known: Vec<Arc<Known>> =
            self.known.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for known in known {
            self.register(&known.identity, &known.geometry).map_err(|error| error.0)?;
        }
        Ok(())
    }

    /// Registers a model again that the server has forgotten.
    pub(super) async fn register_again(&self, namespace: NamespaceId) -> Result<(), Reason> {
        let known = self.known(namespace).ok_or(Reason::UnknownNamespace(namespace))?;
        let request = self.request(registration(&known.identity, &known.geometry), None);
        let mut models = self.models();
        let reply = in_time(self.call_timeout, models.register_model(request)).await;
        let reply = reply.map_err(|status| fault::reason_of(&status))?.into_inner();
        self.learn(&reply, &known.identity, &known.geometry).map(drop)
    }

    fn learn(
        &self,
        reply: &proto::RegisterModelReply,
        identity: &Identity,
        geometry: &Geometry,
    ) -> Result<NamespaceId, Reason> {
        if digest::of_model(&convert::wire_identity(identity), &reply.namespace) != reply.crc32 {
            return Err(Reason::remote("the answer to a registration was damaged in transit: retry"));
        }
        let namespace = <[u8; 32]>::try_from(&reply.namespace[..]);
        let namespace =
            namespace.map(NamespaceId).map_err(|_| Reason::Bug("the server sent an invalid namespace"))?;
        let (identity, geometry, shapes) = (identity.clone(), geometry.clone(), Mutex::default());
        let known = Arc::new(Known { identity, geometry, shapes });
        self.known.write().unwrap_or_else(PoisonError::into_inner).insert(namespace, known);
        Ok(namespace)
    }

    pub(super) fn known(&self, namespace: NamespaceId) -> Option<Arc<Known>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(&namespace).cloned()
    }

    /// The shape of blocks that lie in `places`; refused if the places are for another one.
    pub(super) fn shape(
        &self,
        namespace: NamespaceId,
        (group, coordinate): (Group, Coordinate),
        places: &Placed,
        layers: Option<&Range<u32>>,
    ) -> Result<Arc<BlockShape>, Reason> {
        let known = self.known(namespace).ok_or(Reason::UnknownNamespace(namespace))?;
        let shape = known.shape(group, coordinate)?;
        let layers = layers.cloned().unwrap_or(0..shape.layers().len() as u32);
        places.places().check(&shape, layers)?;
        Ok(shape)
    }

    /// What can be said of any request's keys, places and deadline before it is sent.
    pub(super) fn check(
        &self,
        keys: &[BlockKey],
        places: &Placed,
        deadline: Option<Nanos>,
    ) -> Result<(), Reason> {
        if keys.is_empty() {
            return Err(Reason::Empty);
        }
        if keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks"));
        }
        if deadline.is_some_and(|deadline| deadline <= self.clock.now()) {
            return Err(Reason::DeadlineInPast);
        }
        let mut sorted: Vec<&BlockKey> = keys.iter().collect();
        sorted.sort_unstable();
        if let Some([key, _]) = sorted.array_windows().find(|[a, b]| a == b) {
            return Err(Reason::Duplicate(**key));
        }
        let (expected, found) = (keys.len() as u64, u64::from(places.block_count()));
        if places.gate().is_some() {
            // The other end does not wait for the gate: layers that share memory would overwrite each other.
            return Err(Reason::Overlap);
        }
        if expected == found { Ok(()) } else { Err(Reason::Length { expected, found }) }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Also from within another runtime, where waiting is forbidden.
            runtime.shutdown_background();
        }
    }
}

fn registration(identity: &Identity, geometry: &Geometry) -> proto::RegisterModelRequest {
    proto::RegisterModelRequest {
        identity: Some(convert::wire_identity(identity)),
        spec: Some(proto::register_model_request::Spec::Geometry(convert::wire_geometry(geometry))),
        columns: Vec::new(),
    }
}

/// The transport's settings for an endpoint.
pub fn endpoint(options: &ConnectOptions) -> Result<Endpoint, Error> {
    let endpoint = Endpoint::from_shared(options.endpoint.clone());
    let mut endpoint = endpoint
        .map_err(|error| config(format!("{}: {error}", options.endpoint)))?
        .connect_timeout(options.call_timeout)
        .initial_stream_window_size(limits::STREAM_WINDOW_BYTES)
        .initial_connection_window_size(limits::CONNECTION_WINDOW_BYTES)
        .max_frame_size(limits::HTTP_FRAME_BYTES)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(limits::KEEPALIVE)
        .keep_alive_timeout(limits::KEEPALIVE);
    if options.endpoint.starts_with("https:") {
        let mut tls = ClientTlsConfig::new();
        if let Some(authority) = &options.authority {
            tls = tls.ca_certificate(Certificate::from_pem(authority));
        }
        if let Some((certificate, key)) = &options.identity {
            tls = tls.identity(tonic::transport::Identity::from_pem(certificate, key));
        }
        if let Some(name) = &options.server_name {
            tls = tls.domain_name(name.clone());
        }
        endpoint = endpoint.tls_config(tls).map_err(|error| config(deepest(&error)))?;
    }
    Ok(endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_takes_the_connection_and_shows_no_certificate_costs_the_timeout_and_is_named() {
        // The kernel takes connections for it.
        let still = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = still.local_addr().unwrap();
        let options = ConnectOptions {
            call_timeout: Duration::from_millis(50),
            ..ConnectOptions::to(format!("https://{address}"))
        };
        let told = Remote::connect(&options).unwrap_err().to_string();
        assert!(told.contains(&format!("https://{address}: no connection within 0.05 s")), "{told}");
    }
}
