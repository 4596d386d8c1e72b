//! An answer over plain HTTP.

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

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

    pub(super) fn json(told: &Value) -> Self {
        Self { kind: "application/json", ..Self::plain("200 OK", told.to_string()) }
    }

    pub(super) fn with(mut self, more: &str) -> Self {
        self.more.push_str(more);
        self
    }

    pub(super) async fn send(&self, stream: &mut TcpStream, has_body: bool) -> std::io::Result<()> {
        let Self { status, kind, more, body } = self;
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\ncache-control: no-store\r\n\
             x-content-type-options: nosniff\r\nconnection: close\r\n{more}\r\n"
        );
        // ends: `TIMEOUT` of the connection, in `serve`
        stream.write_all(head.as_bytes()).await?;
        if has_body {
            // ends: `TIMEOUT` of the connection, in `serve`
            stream.write_all(body.as_bytes()).await?;
        }
        // ends: `TIMEOUT` of the connection, in `serve`
        stream.shutdown().await
    }
}
