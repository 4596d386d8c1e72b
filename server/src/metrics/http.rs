//! Plain HTTP: `GET /metrics` for Prometheus, and `GET /health` for a supervisor. Nothing else is served.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::text;
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
    let (status, kind, body) = match line {
        line if line.starts_with(b"GET /metrics ") => {
            ("200 OK", "text/plain; version=0.0.4; charset=utf-8", text::render(state).await)
        }
        line if line.starts_with(b"GET /health ") => match state.fault() {
            None => ("200 OK", "text/plain", "ok\n".to_owned()),
            Some(why) => ("503 Service Unavailable", "text/plain", format!("{why}\n")),
        },
        _ => ("404 Not Found", "text/plain", "there are /metrics and /health\n".to_owned()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}
