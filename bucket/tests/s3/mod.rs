//! A real S3 server: moto, which keeps its objects in memory.
#![allow(dead_code, reason = "each test file that includes this uses a part of it")]
#![allow(
    clippy::disallowed_methods,
    reason = "a real process and a real socket stand outside the simulation"
)]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The bucket that it has.
pub(crate) const BUCKET: &str = "blocks";
const PATIENCE: Duration = Duration::from_secs(60);

/// The server; ended with the value.
pub(crate) struct Server {
    child: Child,
    /// Where it is.
    pub(crate) port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// A server, if there is moto here; there must be where `KVARTS_MOTO=required`.
    pub(crate) fn start() -> Option<Self> {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/moto/bin/moto_server");
        if !program.exists() {
            assert_ne!(std::env::var("KVARTS_MOTO").as_deref(), Ok("required"), "run scripts/moto");
            eprintln!("not tried: there is no S3 server (scripts/moto brings one)");
            return None;
        }
        let begin = Instant::now();
        // The port was free a moment ago; where another process took it meanwhile, the server ends: another port then.
        loop {
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            let child = Command::new(&program)
                .args(["--host", "127.0.0.1", "--port", &free.to_string()])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut server = Self { child, port: free };
            while server.child.try_wait().unwrap().is_none() {
                if server.make_bucket() {
                    return Some(server);
                }
                assert!(begin.elapsed() < PATIENCE, "the S3 server does not answer");
                std::thread::sleep(Duration::from_millis(50));
            }
            assert!(begin.elapsed() < PATIENCE, "the S3 server does not start");
        }
    }

    fn make_bucket(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)) else { return false };
        let request = format!(
            "PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        let mut answer = String::new();
        stream.write_all(request.as_bytes()).is_ok()
            && stream.read_to_string(&mut answer).is_ok()
            && answer.starts_with("HTTP/1.1 200")
    }

    /// What a client of it needs to know.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let own = |text: &str| text.to_owned();
        vec![
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{}", self.port)),
            ("AWS_ACCESS_KEY_ID", own("some")),
            ("AWS_SECRET_ACCESS_KEY", own("secret")),
            ("AWS_REGION", own("us-east-1")),
        ]
    }
}
