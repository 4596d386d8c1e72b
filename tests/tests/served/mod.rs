//! A server inside the test's own process, on a directory of its own, and clients of it.
#![allow(dead_code, reason = "each test file that includes this uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

pub(crate) mod etcd;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::KvStore;
use kvarts_contract::clock::Nanos;
use kvarts_server::config::{Config, Settings};
use kvarts_server::daemon::Daemon;
use kvarts_tests::stage::{Scratch, Stage};
use tokio::runtime::Runtime;

/// Guarantees that are for one store alone.
pub(crate) const NOT_AMONG_NODES: [&str; 5] = [
    "a lease counts against its tenant's cap until it ends",
    "events tell of each block, in order, and a snapshot with them is the content",
    "a point of another stream is a gap",
    "a put that a delete meets is refused, and stays away",
    "of two puts of one key at once one stores it whole",
];

/// How long a server may take for anything that a test asks.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A server that runs until it is dropped.
pub(crate) struct Served {
    pub(crate) runtime: Runtime,
    pub(crate) daemon: Option<Daemon>,
    pub(crate) scratch: Scratch,
    file: String,
}

fn text(value: impl ToString) -> Option<String> {
    Some(value.to_string())
}

impl Served {
    /// A server with small segments, ports of its own, and whatever else the configuration file says.
    pub(crate) fn start(name: &str, file: &str) -> Self {
        let scratch = Scratch::new(name);
        let runtime = Runtime::new().unwrap();
        let mut served = Self { runtime, daemon: None, scratch, file: file.to_owned() };
        served.open(SocketAddr::from(([127, 0, 0, 1], 0)));
        served
    }

    /// The same with another file from now on: it stops and starts.
    pub(crate) fn restart_with(&mut self, file: &str) {
        self.stop();
        self.file = file.to_owned();
        self.open(SocketAddr::from(([127, 0, 0, 1], 0)));
    }

    pub(crate) fn open(&mut self, grpc: SocketAddr) {
        let config = self.config(grpc, &self.file);
        self.daemon = Some(self.runtime.block_on(Daemon::start(&config)).unwrap());
    }

    /// Reads another file, as SIGHUP does.
    pub(crate) fn reload(&self, file: &str) -> Result<Vec<String>, String> {
        let config = self.config(self.daemon().grpc().unwrap(), file);
        self.runtime.block_on(self.daemon().reload(&config))
    }

    fn config(&self, grpc: SocketAddr, file: &str) -> Config {
        let settings = Settings {
            directories: text(self.scratch.path().display()),
            budget: text("48 MiB"),
            segment: text("256 KiB"),
            memory: text("64 MiB"),
            grpc: text(grpc),
            metrics: text("127.0.0.1:0"),
            ..Settings::default()
        };
        Config::resolve(Some((Path::new("test.toml"), file)), |_| None, &settings).unwrap()
    }

    /// Stops cleanly and starts again in the same directory, at this address.
    pub(crate) fn restart_at(&mut self, grpc: SocketAddr) {
        self.stop();
        self.open(grpc);
    }

    /// Stops cleanly.
    pub(crate) fn stop(&mut self) {
        let daemon = self.daemon.take().expect("it runs");
        self.runtime.block_on(daemon.stop()).unwrap();
    }

    /// Stops as a process that is killed: its store writes no checkpoint, and what is under way is not waited for.
    pub(crate) fn halt(&mut self) {
        let daemon = self.daemon.take().expect("it runs");
        self.runtime.block_on(daemon.state().engine.halt());
        // What is left has no store to write to, and lets go of the directory and the ports.
        let _ = self.runtime.block_on(daemon.stop());
    }

    /// Starts again after a stop, with another file from now on.
    pub(crate) fn begin_with(&mut self, file: &str) {
        self.file = file.to_owned();
        self.open(SocketAddr::from(([127, 0, 0, 1], 0)));
    }

    pub(crate) fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    /// Where gRPC listens.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.daemon().grpc().unwrap())
    }

    /// A client with this token, or none.
    pub(crate) fn client(&self, token: Option<&str>) -> Client {
        let options =
            ConnectOptions { token: token.map(str::to_owned), ..ConnectOptions::to(self.endpoint()) };
        Client::connect(&options).unwrap()
    }

    /// A client over the local path.
    pub(crate) fn local(&self, token: Option<&str>) -> Client {
        let socket = self.daemon().socket().unwrap().display().to_string();
        let token = token.map(str::to_owned);
        let options =
            ConnectOptions { via: Via::Local, token, ..ConnectOptions::to(format!("unix:{socket}")) };
        Client::connect(&options).unwrap()
    }

    /// A client whose look-ups ask other nodes too.
    pub(crate) fn client_of_cluster(&self, token: Option<&str>) -> Client {
        let token = token.map(str::to_owned);
        let options = ConnectOptions { token, of_cluster: true, ..ConnectOptions::to(self.endpoint()) };
        Client::connect(&options).unwrap()
    }

    /// A client over one of the paths, whose look-ups ask other nodes too or do not.
    pub(crate) fn client_as(&self, is_local: bool, of_cluster: bool) -> Client {
        let socket = format!("unix:{}", self.daemon().socket().unwrap().display());
        let via = if is_local { Via::Local } else { Via::Grpc };
        Client::connect(&ConnectOptions { via, of_cluster, ..ConnectOptions::to(socket) }).unwrap()
    }

    /// Waits until `done`.
    pub(crate) fn until(&self, what: &str, mut done: impl FnMut(&Daemon) -> bool) {
        let start = Instant::now();
        while !done(self.daemon()) {
            assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The text of the metrics.
    pub(crate) fn metrics(&self) -> String {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(self.daemon().metrics().unwrap()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        text
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            // A failing test is told by its own panic.
            let _ = self.runtime.block_on(daemon.stop());
        }
    }
}

/// A client as the place where a store under test stands.
pub(crate) struct ClientStage {
    pub(crate) client: Client,
    pub(crate) served: Served,
}

impl ClientStage {
    pub(crate) fn open(name: &str) -> Self {
        let served = Served::start(name, "");
        Self { client: served.client(None), served }
    }

    /// The same over the local socket.
    pub(crate) fn over_socket(name: &str) -> Self {
        let served = Served::start(name, "");
        let socket = served.daemon().socket().unwrap().display().to_string();
        let options = ConnectOptions { via: Via::Grpc, ..ConnectOptions::to(format!("unix:{socket}")) };
        Self { client: Client::connect(&options).unwrap(), served }
    }

    /// The same over the local path.
    pub(crate) fn local(name: &str) -> Self {
        let served = Served::start(name, "");
        Self { client: served.local(None), served }
    }
}

impl Stage for ClientStage {
    fn store(&self) -> &dyn KvStore {
        &self.client
    }

    fn wait(&self, done: &mut dyn FnMut() -> bool) {
        wait(done);
    }

    fn rest(&self) {
        rest();
    }

    fn now(&self) -> Nanos {
        self.client.clock().now()
    }

    fn advance(&self, _by: Duration) -> bool {
        false
    }
}

/// Another client of a server that its test keeps running.
pub(crate) struct Beside(pub(crate) Client);

impl Stage for Beside {
    fn store(&self) -> &dyn KvStore {
        &self.0
    }

    fn wait(&self, done: &mut dyn FnMut() -> bool) {
        wait(done);
    }

    fn rest(&self) {
        rest();
    }

    fn now(&self) -> Nanos {
        self.0.clock().now()
    }

    fn advance(&self, _by: Duration) -> bool {
        false
    }
}

fn wait(done: &mut dyn FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "no answer for {TIMEOUT:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn rest() {
    std::thread::sleep(Duration::from_millis(20));
}
