//! Calls that need no token, and connections without any, made by clients that mean no good: others have all of theirs.

use std::net::TcpStream;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::raw::{Raw, TIMEOUT, with_token};
use crate::scratch::Scratch;
use bytes::{BufMut, Bytes, BytesMut};
use http_body::Frame;
use kvarts_server::config::{Config, Settings};
use kvarts_server::daemon::Daemon;
use kvarts_server::state::auth::TokenHash;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower::{Service, ServiceExt};

const HEALTH: &str = "/grpc.health.v1.Health/Check";
const TOKEN: &str = "kvarts_of_this_test";

async fn start(scratch: &Scratch, connections: usize, file: &str) -> Daemon {
    let text = |text: &str| Some(text.to_owned());
    let settings = Settings {
        directories: Some(scratch.0.join("store").display().to_string()),
        budget: text("16 MiB"),
        segment: text("256 KiB"),
        memory: text("64 MiB"),
        connections: Some(connections.to_string()),
        grpc: text("127.0.0.1:0"),
        metrics: text("none"),
        socket: text("none"),
        ..Settings::default()
    };
    let config = Config::resolve(Some((Path::new("test.toml"), file)), |_| None, &settings).unwrap();
    Daemon::start(&config).await.unwrap()
}

fn tokens() -> String {
    let hash = TokenHash::of(TOKEN);
    format!("[[tenants]]\nname = 'red'\n[[tokens]]\ntenant = 'red'\nrights = ['read']\nhash = '{hash}'\n")
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

async fn channel(daemon: &Daemon) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("http://{}", daemon.grpc().unwrap())).unwrap().connect().await
}

async fn list(channel: Channel) -> Result<(), Status> {
    let mut models = kvarts_wire::proto::models_client::ModelsClient::new(channel);
    models.list_models(with_token(kvarts_wire::proto::ListModelsRequest::default(), TOKEN)).await.map(|_| ())
}

async fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn messages_that_nobody_was_asked_a_token_for_are_refused_by_their_length() {
    let scratch = Scratch::new("anybody-long");
    let daemon = start(&scratch, 64, "").await;
    let channel = channel(&daemon).await.unwrap();
    // A client that is known may send as much as it likes.
    list(channel.clone()).await.unwrap();
    for path in [HEALTH, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"] {
        for _ in 0..3 {
            let asked = call(&channel, path, almost((4 << 20) - 1));
            let response = tokio::time::timeout(TIMEOUT, asked).await.expect("it waits for all of it");
            // Reflection answers in a stream, whose end says it.
            let refused = Status::from_header_map(response.headers());
            assert!(refused.is_none_or(|status| status.code() == tonic::Code::OutOfRange), "{path}");
        }
    }
    assert_eq!(daemon.state().receiving.bytes(), 0);
    drop(channel);
    daemon.stop().await.unwrap();
}

/// The headers of calls that need no token, many times on each of many connections.
fn crowd(daemon: &Daemon, connections: usize, calls: u32) -> Vec<Raw> {
    let address = daemon.grpc().unwrap().to_string();
    let mut all: Vec<Raw> = (0..connections).map(|_| Raw::connect(&address)).collect();
    for raw in &mut all {
        for number in 0..calls {
            raw.call(number * 2 + 1, "/grpc.health.v1.Health/Watch", None);
            raw.data(number * 2 + 1, &[0; 5], true);
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_shows_no_token_has_a_few_calls_on_a_connection_however_many_it_makes() {
    const CONNECTIONS: usize = 200;
    let scratch = Scratch::new("anybody-watch");
    let daemon = start(&scratch, 1024, &tokens()).await;
    let all = crowd(&daemon, CONNECTIONS, 100);
    let state = daemon.state();
    until("each has what it may", || state.connections.strangers() == (CONNECTIONS, CONNECTIONS * 4)).await;
    list(channel(&daemon).await.unwrap()).await.unwrap();
    assert_eq!(state.connections.strangers(), (CONNECTIONS, CONNECTIONS * 4));
    drop(all);
    until("nothing is kept of them", || state.connections.strangers() == (0, 0)).await;
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_on_which_nobody_shows_a_token_end_whatever_else_they_do() {
    const CONNECTIONS: usize = 200;
    let scratch = Scratch::new("anybody-idle");
    let daemon = start(&scratch, 1024, &tokens()).await;
    let state = daemon.state();
    state.stall_timeout.set(Duration::from_millis(100));
    let all = crowd(&daemon, CONNECTIONS, 3);
    // Refused calls make no client known.
    let mut refused = crowd(&daemon, 20, 0);
    for raw in &mut refused {
        raw.call(1, "/kvarts.v1.Store/Exists", Some("kvarts_not_this_one"));
        raw.data(1, &[0; 5], true);
    }
    until("all of them are in, or gone again", || state.calls() == 0).await;
    until("their places come back", || state.connections.free() == state.connections.all()).await;
    assert_eq!(state.connections.strangers(), (0, 0));
    drop((all, refused));
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_has_a_token_finds_a_place_among_strangers_and_keeps_it() {
    const PLACES: usize = 64;
    let scratch = Scratch::new("anybody-places");
    let daemon = start(&scratch, PLACES, &tokens()).await;
    let (state, address) = (daemon.state(), daemon.grpc().unwrap());
    // No connection goes by itself while the test looks.
    state.stall_timeout.set(TIMEOUT * 10);
    let silent = |count: usize| -> Vec<TcpStream> {
        (0..count).map(|_| TcpStream::connect(address).unwrap()).collect()
    };
    let first = silent(PLACES);
    until("all places are taken", || state.connections.free() == 0).await;
    let start = Instant::now();
    let known = loop {
        if let Ok(channel) = channel(&daemon).await
            && list(channel.clone()).await.is_ok()
        {
            break channel;
        }
        assert!(start.elapsed() < TIMEOUT, "strangers keep everybody out");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    // However many come then, they take each other's places.
    let more = silent(3 * PLACES);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let others = silent(PLACES);
    list(known.clone()).await.unwrap();
    drop((first, more, others, known));
    until("all go", || state.connections.free() == PLACES).await;
    daemon.stop().await.unwrap();
}
