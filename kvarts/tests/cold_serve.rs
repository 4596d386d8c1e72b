//! `kvarts serve` with a real S3 server behind it, through a proxy that spoils what it answers: hits are lost, and no byte is wrong.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::s3;
use crate::scratch::Scratch;
use crate::served::Server;

/// What the proxy does with answers about some objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// The connection is closed.
    Outage,
    /// 503 with Retry-After.
    Busy,
    /// 429 with Retry-After.
    TooMany,
    /// The answer takes a while.
    Slow,
    /// The connection breaks in the middle of the body.
    Truncated,
    /// A body that is shorter, and says so.
    Shorter,
    /// One bit of the body is another one.
    Altered,
    /// 404.
    Missing,
    /// 403, as of credentials that ran out.
    Denied,
}

const FAULTS: [Fault; 9] = [
    Fault::Outage,
    Fault::Busy,
    Fault::TooMany,
    Fault::Slow,
    Fault::Truncated,
    Fault::Shorter,
    Fault::Altered,
    Fault::Missing,
    Fault::Denied,
];

type Plan = Arc<Mutex<(Option<(Fault, &'static str)>, u64)>>;

/// A proxy before an S3 server.
struct Proxy {
    port: u16,
    plan: Plan,
}

impl Proxy {
    fn start(to: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (port, plan) = (listener.local_addr().unwrap().port(), Plan::default());
        let known = Arc::clone(&plan);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let plan = Arc::clone(&known);
                std::thread::spawn(move || drop(pass(&stream, to, &plan)));
            }
        });
        Self { port, plan }
    }

    fn set(&self, fault: Option<(Fault, &'static str)>) {
        *self.plan.lock().unwrap() = (fault, 0);
    }

    /// Requests since the last change.
    fn asked(&self) -> u64 {
        self.plan.lock().unwrap().1
    }
}

/// One request, and its answer.
fn pass(stream: &TcpStream, to: u16, plan: &Plan) -> std::io::Result<()> {
    let mut from = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if line == "\r\n" {
            break;
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    let path = head.split_whitespace().nth(1).unwrap_or_default();
    let fault = {
        let mut plan = plan.lock().unwrap();
        plan.1 += 1;
        plan.0.filter(|(_, of)| path.contains(of)).map(|(fault, _)| fault)
    };
    let mut out = stream;
    let status = |line: &str| format!("HTTP/1.1 {line}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    match fault {
        Some(Fault::Outage) => return stream.shutdown(Shutdown::Both),
        Some(Fault::Busy) => return out.write_all(status("503 Slow Down\r\nRetry-After: 1").as_bytes()),
        Some(Fault::TooMany) => {
            return out.write_all(status("429 Too Many Requests\r\nRetry-After: 1").as_bytes());
        }
        Some(Fault::Missing) => return out.write_all(status("404 Not Found").as_bytes()),
        Some(Fault::Denied) => return out.write_all(status("403 Forbidden").as_bytes()),
        Some(Fault::Slow) => std::thread::sleep(Duration::from_millis(400)),
        Some(Fault::Truncated | Fault::Shorter | Fault::Altered) | None => {}
    }
    let mut upstream = TcpStream::connect((Ipv4Addr::LOCALHOST, to))?;
    upstream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
    upstream.write_all(&body)?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    let start = answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let middle = start + (answer.len() - start) / 2;
    match fault {
        Some(Fault::Truncated) => answer.truncate(middle),
        Some(Fault::Altered) if middle < answer.len() => answer[middle] ^= 1,
        Some(Fault::Shorter) => {
            let head = String::from_utf8_lossy(&answer[..start]).into_owned();
            let lines = head.split("\r\n").map(|line| match line.to_ascii_lowercase() {
                lower if lower.starts_with("content-length:") => {
                    format!("Content-Length: {}", middle - start)
                }
                _ => line.to_owned(),
            });
            let mut shorter = lines.collect::<Vec<_>>().join("\r\n").into_bytes();
            shorter.extend_from_slice(&answer[start..middle]);
            answer = shorter;
        }
        _ => {}
    }
    out.write_all(&answer)
}

/// A server with an empty store, and the bucket behind the proxy.
fn node(name: &str, proxy: &Proxy, first: &Server) -> Server {
    let server = Server::start_with(
        Scratch::new(name),
        &["--cold-bucket", "s3://blocks/tier", "--cold-refresh", "1", "--cold-memory", "128M"],
        &environment(proxy.port),
    );
    for file in ["ID.toml", "tokens", "more"] {
        std::fs::copy(first.path(file), server.path(file)).unwrap();
    }
    server
}

fn environment(port: u16) -> Vec<(&'static str, String)> {
    let own = |text: &str| text.to_owned();
    vec![
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ACCESS_KEY_ID", own("some")),
        ("AWS_SECRET_ACCESS_KEY", own("secret")),
        ("AWS_REGION", own("us-east-1")),
    ]
}

/// Reads the ten blocks; gives whether all came. Those that came are what was put.
fn get(server: &Server) -> bool {
    let (code, ..) = server.client(&["get", "--force", "--to", "back"], &["--tokens", "tokens"]);
    let back = std::fs::read(server.path("back")).unwrap_or_default();
    assert!(back.iter().all(|byte| *byte == 7 || *byte == 0), "a wrong byte");
    let is_whole = code == 0 && back == vec![7; 10 * 4096];
    assert!(code != 0 || is_whole, "an answer that says it is whole, and is not");
    is_whole
}

#[test]
fn whatever_the_bucket_answers_hits_are_lost_and_no_byte_is_wrong() {
    let Some(moto) = s3::Server::start() else { return };
    let first = Server::start(Scratch::new("cold-first"), &[]);
    first.store_pages();
    let store = first.path("kvarts-data").display().to_string();
    let push = ["cold", "push", &store, "--live", "--all", "--bucket", "s3://blocks/tier"];
    let (code, out, error) = first.kvarts_with(&push, &environment(moto.port));
    assert_eq!(code, 0, "{out}{error}");
    let proxy = Proxy::start(moto.port);
    let well = node("cold-well", &proxy, &first);
    let (_, out, _) = well.client(&["match", "--json"], &["--tokens", "tokens"]);
    assert!(out.contains("\"cold\"") && out.contains("\"blocks\": 10"), "{out}");
    assert!(get(&well), "nothing is wrong yet");
    // Blocks are given while they are being stored, and counted when they are.
    let begun = Instant::now();
    while !well.metrics().lines().any(|line| line == "kvarts_cold_restored_blocks_total 10") {
        assert!(begun.elapsed() < Duration::from_secs(30), "ten blocks are not stored");
        std::thread::sleep(Duration::from_millis(20));
    }
    for (at, fault) in FAULTS.into_iter().enumerate() {
        for of in ["/manifests/", "/indexes/", "/packs/"] {
            proxy.set(Some((fault, of)));
            let server = node(&format!("cold-fault-{at}-{}", of.len()), &proxy, &first);
            let begun = Instant::now();
            let came = get(&server);
            assert!(came == (fault == Fault::Slow), "{fault:?} of {of}: {came}");
            assert!(begun.elapsed() < Duration::from_secs(50), "{fault:?} of {of}");
            assert!(proxy.asked() < 60, "{fault:?} of {of}: {} requests", proxy.asked());
            // It serves on, puts included.
            server.store_pages();
            assert!(get(&server), "{fault:?} of {of}");
        }
    }
}
