//! A proxy before an S3 server that spoils requests of one kind.
#![allow(dead_code, reason = "each test file that includes this uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "a real socket stands outside the simulation")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the proxy does with requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// The connection is closed.
    Outage,
    /// The server does what is asked, and the connection is closed before its answer.
    Unanswered,
    /// 503 with Retry-After.
    Busy,
    /// 429 with Retry-After.
    TooMany,
    /// 500.
    Failed,
    /// The answer takes a while.
    Slow,
    /// The connection breaks in the middle of the body.
    Truncated,
    /// A body that is shorter, and says so.
    Shorter,
    /// One bit of the body is another one.
    Altered,
    /// A listing of nothing, as before anything was put.
    Stale,
    /// 404.
    Missing,
    /// 403, as of credentials that were taken back.
    Denied,
    /// 400, as S3 answers to a session that ran out.
    Expired,
    /// 404, as of a bucket that was deleted.
    NoBucket,
}

/// Which requests: of a method, if one is named, and with this in the address.
pub(crate) type Of = (Option<&'static str>, &'static str);

type Plan = Arc<Mutex<(Option<(Fault, Of)>, u64)>>;

/// A proxy before an S3 server.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    plan: Plan,
}

impl Proxy {
    pub(crate) fn start(to: u16) -> Self {
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

    pub(crate) fn set(&self, fault: Option<(Fault, Of)>) {
        *self.plan.lock().unwrap() = (fault, 0);
    }

    /// Requests since the last change.
    pub(crate) fn asked(&self) -> u64 {
        self.plan.lock().unwrap().1
    }
}

/// What the proxy answers by itself.
fn own_answer(fault: Fault) -> Option<String> {
    let of = |status: &str, body: &str| {
        let length = body.len();
        Some(format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"))
    };
    // As S3 does it quotes the request, which is not to be seen anywhere.
    let code = |code: &str| {
        format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Token-0>quoted-token</Token-0></Error>")
    };
    match fault {
        Fault::Busy => of("503 Slow Down\r\nRetry-After: 1", ""),
        Fault::TooMany => of("429 Too Many Requests\r\nRetry-After: 1", ""),
        Fault::Failed => of("500 Internal Server Error", &code("InternalError")),
        Fault::Missing => of("404 Not Found", ""),
        Fault::Denied => of("403 Forbidden", &code("InvalidAccessKeyId")),
        Fault::Expired => of("400 Bad Request", &code("ExpiredToken")),
        Fault::NoBucket => of("404 Not Found", &code("NoSuchBucket")),
        Fault::Stale => of(
            "200 OK",
            "<ListBucketResult><Name>blocks</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>\
             </ListBucketResult>",
        ),
        _ => None,
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
        if line == "\r\n" {
            break;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(bytes) = lower.strip_prefix("content-length:") {
            length = bytes.trim().parse().unwrap();
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    let mut words = head.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let fault = {
        let mut plan = plan.lock().unwrap();
        plan.1 += 1;
        let is_of = |of: Of| of.0.is_none_or(|wanted| wanted == method) && path.contains(of.1);
        plan.0.filter(|(_, of)| is_of(*of)).map(|(fault, _)| fault)
    };
    let mut out = stream;
    if let Some(answer) = fault.and_then(own_answer) {
        return out.write_all(answer.as_bytes());
    }
    match fault {
        Some(Fault::Outage) => return stream.shutdown(Shutdown::Both),
        Some(Fault::Slow) => std::thread::sleep(Duration::from_millis(400)),
        _ => {}
    }
    let mut upstream = TcpStream::connect((Ipv4Addr::LOCALHOST, to))?;
    upstream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
    upstream.write_all(&body)?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    let start = answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    let middle = start + (answer.len() - start) / 2;
    match fault {
        Some(Fault::Unanswered) => return stream.shutdown(Shutdown::Both),
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
