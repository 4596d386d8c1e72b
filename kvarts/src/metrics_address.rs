//! A question to a server's metrics address: plain HTTP, which needs no token.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::client_cmd::subject::hung;

/// How long a server may take for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The most bytes of an answer: a server with a thousand tenants has less.
const BYTES_MAX: u64 = 16 << 20;

/// What a server answered.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Its first line.
    pub(crate) first: String,
    pub(crate) body: String,
}

impl Answer {
    /// Whether it has this status.
    pub(crate) fn is(&self, status: &str) -> bool {
        self.first.split(' ').nth(1) == Some(status)
    }
}

/// Asks a server for a path.
pub(crate) fn ask(address: SocketAddr, path: &str) -> Result<Answer, String> {
    let said = |error: std::io::Error| match error.kind() {
        ErrorKind::WouldBlock => hung(&format!("http://{address}{path}"), TIMEOUT),
        _ => format!(
            "http://{address}{path} sent no answer: {error}; check that the server runs with a metrics \
            address (--listen-metrics)"
        ),
    };
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT).map_err(said)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(said)?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(said)?;
    let mut bytes = Vec::new();
    stream.take(BYTES_MAX).read_to_end(&mut bytes).map_err(said)?;
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let first = head.lines().next().unwrap_or("nothing").to_owned();
    Ok(Answer { first, body: body.to_owned() })
}

/// An answer that no server of Kvarts gives.
pub(crate) fn strange(address: SocketAddr, path: &str, answer: &Answer) -> String {
    let first = &answer.first;
    format!(
        "http://{address}{path} answered {first:?}: check that this is the metrics address of a Kvarts \
        server"
    )
}
