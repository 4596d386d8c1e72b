//! A real etcd in a process of its own.
#![allow(dead_code, unreachable_pub, reason = "each test file that includes this uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "starts processes")]

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// How long it may take until it answers.
const TIMEOUT: Duration = Duration::from_secs(60);

/// It runs until it is stopped or dropped; its directory goes with it.
pub struct Etcd {
    directory: PathBuf,
    client: SocketAddr,
    tls: SocketAddr,
    peer: SocketAddr,
    secured: Option<Secured>,
    child: Option<Child>,
}

/// Where it is called over TLS, and what it shows there: PEM files. Callers have to show a certificate of the same authority.
pub struct Secured {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub authority: PathBuf,
}

/// An address of this host at which no other program listens, and from which no connection is made. A port of 127.0.0.1
/// that was free a moment ago may belong to a connection by now: a suite of tests makes many.
fn own_address() -> Ipv4Addr {
    static STARTED: AtomicU8 = AtomicU8::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 150 + STARTED.fetch_add(1, Ordering::Relaxed), high, low)
}

impl Etcd {
    /// One for a test of this name; none, and a word about it, where it is not installed.
    pub fn start(name: &str) -> Option<Self> {
        Self::start_at(name, own_address(), None)
    }

    /// The same, called over TLS besides: then nodes are told of that alone. What it shows is made for its address.
    pub fn start_secured(name: &str, secured: impl FnOnce(&str) -> Secured) -> Option<Self> {
        let address = own_address();
        Self::start_at(name, address, Some(secured(&address.to_string())))
    }

    fn start_at(name: &str, address: Ipv4Addr, secured: Option<Secured>) -> Option<Self> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            let required = std::env::var("KVARTS_ETCD").is_ok_and(|value| value == "required");
            assert!(!required, "run scripts/etcd first");
            eprintln!("SKIPPED: etcd is not installed; run scripts/etcd");
            return None;
        }
        let directory = std::env::temp_dir().join(format!("kvarts-etcd-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        let [client, peer, tls] = [2379, 2380, 2381].map(|port| SocketAddr::from((address, port)));
        let mut etcd = Self { directory, client, tls, peer, secured, child: None };
        etcd.begin();
        Some(etcd)
    }

    /// Starts again with what it knew.
    pub fn begin(&mut self) {
        let (client, peer) = (format!("http://{}", self.client), format!("http://{}", self.peer));
        let mut command = Command::new("etcd");
        let mut clients = client.clone();
        if let Some(Secured { certificate, key, authority }) = &self.secured {
            clients = format!("{client},https://{}", self.tls);
            command.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(authority);
        }
        // Beside its data, which it makes itself.
        let log = self.directory.with_extension("log");
        let child = command
            .arg("--data-dir")
            .arg(&self.directory)
            .args(["--listen-client-urls", &clients, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap"])
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn();
        let child = self.child.insert(child.unwrap());
        let start = Instant::now();
        // What it listens at first may answer before it gives up for want of another port.
        let (client, peer) = (self.client, self.peer);
        let called = [Some(client), Some(peer), self.secured.as_ref().map(|_| self.tls)];
        while !called.iter().flatten().all(|address| TcpStream::connect(address).is_ok()) {
            let log = || std::fs::read_to_string(&log).unwrap_or_default();
            assert!(child.try_wait().unwrap().is_none(), "etcd ended: {}", log());
            assert!(start.elapsed() < TIMEOUT, "etcd does not answer: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends it at once.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// What a node is told.
    pub fn members(&self) -> String {
        format!("etcd://{}/kvarts/test", self.endpoint())
    }

    /// Where a node calls it.
    pub fn endpoint(&self) -> SocketAddr {
        if self.secured.is_some() { self.tls } else { self.client }
    }

    /// An administrator's call, by the way that needs no client: a message as JSON.
    pub fn administer(&self, call: &str, message: &str) {
        use std::io::{Read, Write};
        let mut stream = TcpStream::connect(self.client).unwrap();
        let length = message.len();
        let head = format!(
            "POST /v3/{call} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(message.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{call}: {answer}");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.directory);
        let _ = std::fs::remove_file(self.directory.with_extension("log"));
    }
}
