//! Calls that need no token, made by somebody who means no good: others have all of theirs.
#![allow(clippy::disallowed_methods, reason = "a real server stands outside the simulation")]

use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http_body::Frame;
use kvarts_server::config::{Config, Settings};
use kvarts_server::daemon::Daemon;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower::{Service, ServiceExt};

/// How long the server may take for anything that a test asks.
const PATIENCE: Duration = Duration::from_secs(60);

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn start(scratch: &Scratch) -> Daemon {
    let text = |text: &str| Some(text.to_owned());
    let settings = Settings {
        directories: Some(scratch.0.join("store").display().to_string()),
        budget: text("16 MiB"),
        segment: text("256 KiB"),
        memory: text("64 MiB"),
        grpc: text("127.0.0.1:0"),
        metrics: text("none"),
        socket: text("none"),
        ..Settings::default()
    };
    Daemon::start(&Config::resolve(None, |_| None, &settings).unwrap()).await.unwrap()
}

/// Some bytes, and then nothing more, and no end.
struct Begun(Bytes);

impl http_body::Body for Begun {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.0.is_empty() {
            return Poll::Pending;
        }
        let length = self.0.len().min(64 << 10);
        Poll::Ready(Some(Ok(Frame::data(self.0.split_to(length)))))
    }
}

/// A message of which all but the last byte comes.
fn almost(length: usize) -> Body {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    bytes.resize(5 + length - 1, 0);
    Body::new(Begun(bytes.freeze()))
}

async fn call(channel: &Channel, path: &str, body: Body) -> http::Response<Body> {
    let request = http::Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .unwrap();
    channel.clone().ready().await.unwrap().call(request).await.unwrap()
}

#[tokio::test]
async fn messages_that_nobody_was_asked_a_token_for_are_refused_by_their_length() {
    let path = std::env::temp_dir().join(format!("kvarts-anybody-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    let scratch = Scratch(path);
    let daemon = start(&scratch).await;
    let endpoint = Endpoint::from_shared(format!("http://{}", daemon.grpc().unwrap())).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let health = "/grpc.health.v1.Health/Check";
    for path in [health, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"] {
        for _ in 0..3 {
            let asked = call(&channel, path, almost((4 << 20) - 1));
            let response = tokio::time::timeout(PATIENCE, asked).await.expect("it waits for all of it");
            // Reflection answers in a stream, whose end says it.
            let refused = Status::from_header_map(response.headers());
            assert!(refused.is_none_or(|status| status.code() == tonic::Code::OutOfRange), "{path}");
        }
    }
    assert_eq!(daemon.node().receiving.bytes(), 0);
    // Who asks in so many words is answered.
    let mut short = BytesMut::new();
    short.put_u8(0);
    short.put_u32(0);
    let response = call(&channel, health, Body::new(Begun(short.freeze())));
    drop(response);
    drop(channel);
    daemon.stop().await.unwrap();
}
