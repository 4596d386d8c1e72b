//! A real etcd in a process of its own.
#![allow(dead_code, unreachable_pub, reason = "each test file that includes this uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "starts processes")]

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long it may take until it answers.
const TIMEOUT: Duration = Duration::from_secs(60);

/// It runs until it is stopped or dropped; its directory goes with it.
pub struct Etcd {
    directory: PathBuf,
    client: SocketAddr,
    peer: SocketAddr,
    child: Option<Child>,
}

/// A port of this host that is free now.
fn port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

impl Etcd {
    /// One for a test of this name; none, and a word about it, where it is not installed.
    pub fn start(name: &str) -> Option<Self> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            let required = std::env::var("KVARTS_ETCD").is_ok_and(|value| value == "required");
            assert!(!required, "run scripts/etcd first");
            eprintln!("SKIPPED: etcd is not installed; run scripts/etcd");
            return None;
        }
        let directory = std::env::temp_dir().join(format!("kvarts-etcd-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        let mut etcd = Self { directory, client: port(), peer: port(), child: None };
        etcd.begin();
        Some(etcd)
    }

    /// Starts again with what it knew.
    pub fn begin(&mut self) {
        let (client, peer) = (format!("http://{}", self.client), format!("http://{}", self.peer));
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(&self.directory)
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.unwrap());
        let start = Instant::now();
        while TcpStream::connect(self.client).is_err() {
            assert!(start.elapsed() < TIMEOUT, "etcd does not answer");
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
        format!("etcd://{}/kvarts/test", self.client)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
