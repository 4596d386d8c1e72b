//! Real S3 servers: moto, which keeps its objects in memory, and s3s-fs, which keeps them in a directory.
#![allow(dead_code, reason = "each test file that includes this uses a part of it")]
#![allow(
    clippy::disallowed_methods,
    reason = "a real process and a real socket stand outside the simulation"
)]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
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
    directory: Option<PathBuf>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.directory.iter().for_each(|directory| drop(std::fs::remove_dir_all(directory)));
    }
}

/// A program that a script brings, if it is here; it must be where the variable says `required`.
fn program(place: &str, script: &str, variable: &str) -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools").join(place);
    if program.exists() {
        return Some(program);
    }
    assert_ne!(std::env::var(variable).as_deref(), Ok("required"), "run {script}");
    eprintln!("not tried: this S3 server is not here ({script} brings it)");
    None
}

impl Server {
    /// moto, if it is here; it must be where `KVARTS_MOTO=required`.
    pub(crate) fn start() -> Option<Self> {
        let program = program("moto/bin/moto_server", "scripts/moto", "KVARTS_MOTO")?;
        let make_bucket = |own: &Self| own.ask(&format!("PUT /{BUCKET}")).starts_with("HTTP/1.1 200");
        Some(Self::begin(&program, &[], None, make_bucket))
    }

    /// s3s-fs, if it is here; it must be where `KVARTS_S3S_FS=required`.
    pub(crate) fn start_s3s_fs(name: &str) -> Option<Self> {
        let program = program("s3s-fs/bin/s3s-fs", "scripts/s3s-fs", "KVARTS_S3S_FS")?;
        let directory = std::env::temp_dir().join(format!("kvarts-s3s-fs-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(directory.join(BUCKET)).unwrap();
        let place = directory.display().to_string();
        let arguments = [place.as_str(), "--access-key", "some", "--secret-key", "secret"];
        // What is not signed is refused.
        let is_up = |own: &Self| own.ask("GET /").starts_with("HTTP/1.1 403");
        Some(Self::begin(&program, &arguments, Some(&directory), is_up))
    }

    fn begin(
        program: &Path,
        arguments: &[&str],
        directory: Option<&Path>,
        is_up: impl Fn(&Self) -> bool,
    ) -> Self {
        let begin = Instant::now();
        // The port was free a moment ago; where another process took it meanwhile, the server ends: another port then.
        loop {
            let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            let child = Command::new(program)
                .args(arguments)
                .args(["--host", "127.0.0.1", "--port", &free.to_string()])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut server = Self { child, port: free, directory: None };
            while server.child.try_wait().unwrap().is_none() {
                if is_up(&server) {
                    server.directory = directory.map(Path::to_owned);
                    return server;
                }
                assert!(begin.elapsed() < PATIENCE, "the S3 server does not answer");
                std::thread::sleep(Duration::from_millis(50));
            }
            assert!(begin.elapsed() < PATIENCE, "the S3 server does not start");
        }
    }

    /// Its answer to a request without a body and without a signature; nothing if there is none.
    fn ask(&self, request: &str) -> String {
        let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)) else {
            return String::new();
        };
        let request = format!(
            "{request} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        let mut answer = String::new();
        let read = stream.write_all(request.as_bytes()).is_ok() && stream.read_to_string(&mut answer).is_ok();
        if read { answer } else { String::new() }
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
