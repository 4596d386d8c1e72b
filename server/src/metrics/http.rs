//! Plain HTTP: `/metrics` for Prometheus, `/health` for a supervisor, and `/`, the status page. It only tells, and what it tells
//! is what the metrics tell.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::{page, text};
use crate::state::ServerState;

/// The most bytes of a request that are read.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// How long a client may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Clients at a time.
const CLIENTS_MAX: usize = 32;

/// Serves until the future is dropped.
pub async fn serve(listener: TcpListener, state: Arc<ServerState>) {
    let turns = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let state = Arc::clone(&state);
                tokio::spawn(async move {
                    // A client that is slow or gone gets nothing, and that is not worth a line.
                    let _ = tokio::time::timeout(TIMEOUT, answer(stream, &state)).await;
                    drop(turn);
                });
            }
            // Out of descriptors, for example: the next one may work.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn answer(mut stream: TcpStream, state: &ServerState) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = stream.read(&mut piece).await?;
        request.extend_from_slice(piece.get(..read).unwrap_or_default());
        if read == 0 || request.len() > REQUEST_BYTES_MAX {
            return Ok(());
        }
    }
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let has_body = match method {
        b"GET" => true,
        b"HEAD" => false,
        _ => {
            let only = Answer::plain("405 Method Not Allowed", "there are GET and HEAD\n".to_owned());
            return only.with("allow: GET, HEAD\r\n").send(&mut stream, true).await;
        }
    };
    let answer = match path.split(|&byte| byte == b'?').next().unwrap_or_default() {
        b"/metrics" => Answer {
            kind: "text/plain; version=0.0.4; charset=utf-8",
            ..Answer::plain("200 OK", text::render(state).await)
        },
        b"/health" => match state.fault() {
            None => Answer::plain("200 OK", "ok\n".to_owned()),
            Some(why) => Answer::plain("503 Service Unavailable", format!("{why}\n")),
        },
        path => page::page(path).unwrap_or_else(|| {
            Answer::plain("404 Not Found", "there are /, /metrics and /health\n".to_owned())
        }),
    };
    answer.send(&mut stream, has_body).await
}

/// What is answered.
pub(super) struct Answer {
    pub(super) status: &'static str,
    pub(super) kind: &'static str,
    /// More lines of its head, each with its end.
    pub(super) more: String,
    pub(super) body: String,
}

impl Answer {
    pub(super) fn plain(status: &'static str, body: String) -> Self {
        Self { status, kind: "text/plain; charset=utf-8", more: String::new(), body }
    }

    pub(super) fn with(mut self, more: &str) -> Self {
        self.more.push_str(more);
        self
    }

    async fn send(&self, stream: &mut TcpStream, has_body: bool) -> std::io::Result<()> {
        let Self { status, kind, more, body } = self;
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\ncache-control: no-store\r\n\
             x-content-type-options: nosniff\r\nconnection: close\r\n{more}\r\n"
        );
        stream.write_all(head.as_bytes()).await?;
        if has_body {
            stream.write_all(body.as_bytes()).await?;
        }
        stream.shutdown().await
    }
}
