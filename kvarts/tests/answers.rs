//! What clients hold without taking it, and what keeps a server busy: bounded, counted until it is gone, and by turns.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::raw::{Raw, TIMEOUT, framed, keys, put_messages, registration, with_token};
use crate::scratch::Scratch;
use bytes::Bytes;
use kvarts_server::config::{Config, Settings};
use kvarts_server::daemon::Daemon;
use kvarts_server::state::auth::TokenHash;
use kvarts_wire::limits;
use kvarts_wire::proto;
use kvarts_wire::proto::models_client::ModelsClient;
use kvarts_wire::proto::reads_client::ReadsClient;
use kvarts_wire::proto::store_client::StoreClient;
use tonic::transport::{Channel, Endpoint};

const TOKEN: &str = "kvarts_of_this_test";

struct Scene {
    daemon: Daemon,
    channel: Channel,
    namespace: Bytes,
    _scratch: Scratch,
}

impl Scene {
    async fn open(name: &str, tenant: &str) -> Self {
        let scratch = Scratch::new(name);
        let text = |text: &str| Some(text.to_owned());
        let settings = Settings {
            directories: Some(scratch.0.join("store").display().to_string()),
            budget: text("64 MiB"),
            segment: text("1 MiB"),
            memory: text("64 MiB"),
            grpc: text("127.0.0.1:0"),
            metrics: text("none"),
            socket: text("none"),
            ..Settings::default()
        };
        let hash = TokenHash::of(TOKEN);
        let file = format!(
            "[[tenants]]\nname = 'red'\n{tenant}\n[[tokens]]\ntenant = 'red'\nrights = ['read', 'write']\nhash = '{hash}'\n"
        );
        let config = Config::resolve(Some((Path::new("test.toml"), &file)), |_| None, &settings).unwrap();
        let daemon = Daemon::start(&config).await.unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{}", daemon.grpc().unwrap())).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let reply =
            ModelsClient::new(channel.clone()).register_model(with_token(registration(), TOKEN)).await;
        let namespace = reply.unwrap().into_inner().namespace;
        Self { daemon, channel, namespace, _scratch: scratch }
    }

    async fn until(&self, what: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn exists(&self, count: u64) -> proto::ExistsRequest {
        let (namespace, keys) = (self.namespace.clone(), keys(0..count));
        proto::ExistsRequest { namespace, keys, ..Default::default() }
    }

    fn read(&self, blocks: std::ops::Range<u64>) -> proto::ReadRequest {
        proto::ReadRequest { namespace: self.namespace.clone(), keys: keys(blocks), ..Default::default() }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_nobody_takes_counts_until_it_is_gone_and_its_connection_is_cut() {
    const CALLS: u32 = 50;
    let scene = Scene::open("answers-untaken", "").await;
    let state = scene.daemon.state();
    state.stall_timeout.set(Duration::from_millis(500));
    let read = framed(&scene.read(0..1500));
    // Neither the first byte nor any other of an answer is taken; one of them takes a few.
    let address = scene.daemon.grpc().unwrap().to_string();
    let mut slow: Vec<Raw> = [0, 0, 1, 1000].map(|window| Raw::with_window(&address, window)).into();
    for raw in &mut slow {
        for number in 0..CALLS {
            raw.call(number * 2 + 1, "/kvarts.v1.Reads/Get", Some(TOKEN));
            raw.data(number * 2 + 1, &read, true);
        }
    }
    scene.until("their calls are under way", || state.calls() > 0).await;
    let kept = || state.connections.all() - state.connections.free();
    scene.until("their connections are cut", || kept() <= 1).await;
    scene.until("and nothing counts any more", || state.calls() == 0).await;
    assert_eq!(state.receiving.bytes(), 0);
    drop(slow);
    let Scene { daemon, channel, .. } = scene;
    drop(channel);
    daemon.stop().await.unwrap();
}

/// The transport has all of such an answer as soon as the client takes a byte of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_one_piece_counts_until_it_is_taken_or_its_connection_is_cut() {
    const CLIENTS: u64 = 4;
    let scene = Scene::open("answers-one-piece", "").await;
    let state = scene.daemon.state();
    state.stall_timeout.set(Duration::from_secs(2));
    let (ask, address) = (framed(&scene.exists(1500)), scene.daemon.grpc().unwrap().to_string());
    let mut slow: Vec<Raw> = (0..CLIENTS).map(|_| Raw::with_window(&address, 1)).collect();
    for raw in &mut slow {
        raw.call(1, "/kvarts.v1.Store/Exists", Some(TOKEN));
        raw.data(1, &ask, true);
    }
    scene.until("their calls are under way", || state.calls() == CLIENTS).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(state.calls(), CLIENTS, "what was answered and not taken is forgotten");
    let kept = || state.connections.all() - state.connections.free();
    scene.until("their connections are cut", || kept() <= 1).await;
    scene.until("and nothing counts any more", || state.calls() == 0).await;
    drop(slow);
    let Scene { daemon, channel, .. } = scene;
    drop(channel);
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_look_up_takes_turns_and_a_short_one_does_not_wait_for_it() {
    let scene = Scene::open("answers-turns", "").await;
    let state = scene.daemon.state();
    let mut turns = Vec::new();
    while let Some(turn) = state.heavy.try_take(1, 1) {
        turns.push(turn);
    }
    let store = StoreClient::new(scene.channel.clone());
    let ask = |count: u64| {
        let (mut store, request) = (store.clone(), with_token(scene.exists(count), TOKEN));
        tokio::spawn(
            async move { store.exists(request).await.map(|reply| reply.into_inner().presence.len()) },
        )
    };
    let long = ask(20_000);
    scene.until("the long one waits for its turn", || state.heavy.left().1 == 1).await;
    assert_eq!(ask(1000).await.unwrap().unwrap(), 1000);
    assert!(!long.is_finished());
    drop(turns);
    assert_eq!(long.await.unwrap().unwrap(), 20_000);
    assert_eq!(state.heavy.left(), (state.heavy.all(), 0));
    scene.daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_waits_for_its_own_bandwidth_holds_no_memory_and_waits_no_longer_than_its_deadline() {
    const READS: u64 = 40;
    let scene = Scene::open("answers-toll", "bandwidth = '1 MiB'").await;
    let state = scene.daemon.state();
    let messages = put_messages(&scene.namespace, 0..16);
    let request = with_token(tokio_stream::iter(messages), TOKEN);
    StoreClient::new(scene.channel.clone()).put(request).await.unwrap();
    let reads = ReadsClient::new(scene.channel.clone());
    let all: Vec<_> = (0..READS)
        .map(|_| {
            let mut request = with_token(scene.read(0..16), TOKEN);
            request.set_timeout(Duration::from_secs(5));
            let mut reads = reads.clone();
            tokio::spawn(async move {
                let mut stream = reads.get(request).await?.into_inner();
                let mut bytes = 0;
                while let Some(reply) = stream.message().await? {
                    if let Some(proto::read_reply::Part::Data(data)) = reply.part {
                        bytes += data.data.len() as u64;
                    }
                }
                Ok::<u64, tonic::Status>(bytes)
            })
        })
        .collect();
    scene.until("most of them are under way", || state.calls() > READS / 2).await;
    let used = state.memory.usage()[0].used;
    assert!(used <= 8 << 20, "{used} bytes are held by reads that wait for bandwidth");
    let mut bytes = 0;
    for read in all {
        bytes += read.await.unwrap().unwrap_or(0);
    }
    assert!(bytes < READS << 20, "more than the bandwidth: {bytes}");
    scene.until("none waits any longer", || state.calls() == 0).await;
    scene.daemon.stop().await.unwrap();
}

/// A model of `layers` layers, each a page.
fn deep(revision: &str, layers: usize) -> proto::RegisterModelRequest {
    let part = proto::Part {
        kind: "opaque".to_owned(),
        role: Some(proto::part::Role::Page(proto::part::Page { bytes: 16 })),
        ..Default::default()
    };
    let layer = proto::geometry::Layer { parts: vec![0] };
    let geometry = proto::Geometry { parts: vec![part], layers: vec![layer; layers] };
    let mut request = registration();
    request.identity.as_mut().unwrap().revision = revision.to_owned();
    request.spec = Some(proto::register_model_request::Spec::Geometry(geometry));
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_of_many_layers_take_bounded_memory_and_make_room_for_each_other() {
    let scene = Scene::open("answers-models", "").await;
    let mut models = ModelsClient::new(scene.channel.clone());
    for number in 0..200 {
        models.register_model(with_token(deep(&number.to_string(), 4000), TOKEN)).await.unwrap();
    }
    let used = scene.daemon.state().models.used(1);
    assert!(
        used.memory <= limits::MODELS_MEMORY_MAX && used.memory > limits::MODELS_MEMORY_MAX / 2,
        "{used:?}"
    );
    // One that went comes back, and small models have room.
    models.register_model(with_token(deep("0", 4000), TOKEN)).await.unwrap();
    models.register_model(with_token(deep("small", 4), TOKEN)).await.unwrap();
    scene.daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_that_claim_many_keys_and_send_nothing_take_bounded_memory() {
    use kvarts_wire::digest::StreamDigest;
    let scene = Scene::open("answers-claims", "calls = 4096").await;
    let state = scene.daemon.state();
    let (to, _keep) = tokio::sync::broadcast::channel::<()>(1);
    let header =
        proto::PutHeader { namespace: scene.namespace.clone(), keys: keys(0..60_000), ..Default::default() };
    let part = proto::put_request::Part::Header(header);
    let header = proto::PutRequest { crc32: StreamDigest::of_put().put(&part), part: Some(part) };
    let put = || {
        let (header, mut stop) = (header.clone(), to.subscribe());
        let messages = async_messages(header, async move { drop(stop.recv().await) });
        let mut store = StoreClient::new(scene.channel.clone());
        tokio::spawn(async move { store.put(with_token(messages, TOKEN)).await })
    };
    let puts: Vec<_> = (0..100).map(|_| put()).collect();
    scene.until("some wait for others", || state.receiving.waiting() > 0).await;
    assert!(state.receiving.bytes() <= limits::LARGE_BYTES_MAX as u64);
    // On a connection of its own: what waits takes the window of theirs.
    let endpoint = Endpoint::from_shared(format!("http://{}", scene.daemon.grpc().unwrap())).unwrap();
    let other = endpoint.connect().await.unwrap();
    let small = StoreClient::new(other).exists(with_token(scene.exists(10), TOKEN)).await;
    assert_eq!(small.unwrap().into_inner().presence.len(), 10);
    puts.iter().for_each(|put| put.abort());
    drop(to);
    scene.until("nothing is kept of them", || state.receiving.bytes() == 0 && state.calls() == 0).await;
    scene.daemon.stop().await.unwrap();
}

/// One message, and then none until `stop` ends.
fn async_messages(
    message: proto::PutRequest,
    stop: impl Future<Output = ()> + Send + 'static,
) -> impl tokio_stream::Stream<Item = proto::PutRequest> + Send + 'static {
    let (to, messages) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        // A receiver that is gone needs none.
        let _ = to.send(message).await;
        tokio::select! {
            () = stop => {}
            () = to.closed() => {}
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(messages)
}
