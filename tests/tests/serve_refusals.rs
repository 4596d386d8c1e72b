//! What a server answers to requests that it must refuse: the right status each time, nothing stored, no other client
//! disturbed, and no memory kept.

#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::time::Duration;

use crate::served::Served;
use bytes::Bytes;
use kvarts_layout::BlockKey;
use kvarts_tests::fixture;
use kvarts_wire::digest::StreamDigest;
use kvarts_wire::limits;
use kvarts_wire::proto;
use kvarts_wire::proto::models_client::ModelsClient;
use kvarts_wire::proto::put_request::Part;
use kvarts_wire::proto::reads_client::ReadsClient;
use kvarts_wire::proto::store_client::StoreClient;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

/// Bytes of one page of the model that these tests use.
const PAGE: u64 = 4096;

/// A server, a model of flat pages, and raw clients that send whatever they are told.
struct Desk {
    served: Served,
    namespace: Bytes,
    store: StoreClient<Channel>,
    reads: ReadsClient<Channel>,
    models: ModelsClient<Channel>,
}

fn identity(revision: &str) -> proto::Identity {
    let text = |text: &str| text.to_owned();
    proto::Identity {
        model: text("pages"),
        revision: text(revision),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation_recipe: text("none"),
        quantisation_scales: text("none"),
        rope: text("none"),
        window: text("none"),
        arrangement_engine: text("test"),
        arrangement_layout: text("flat"),
        arrangement_version: text("1"),
        block_tokens: 16,
        ..proto::Identity::default()
    }
}

fn registration(revision: &str) -> proto::RegisterModelRequest {
    proto::RegisterModelRequest {
        identity: Some(identity(revision)),
        spec: Some(proto::register_model_request::Spec::OpaquePageBytes(PAGE)),
        columns: vec![proto::Column::default()],
    }
}

fn keys(range: std::ops::Range<u64>) -> Bytes {
    fixture::keys(9, range).iter().flat_map(|key| key.0).collect::<Vec<u8>>().into()
}

impl Desk {
    fn open(name: &str) -> Self {
        let served = Served::start(name, "");
        let endpoint = tonic::transport::Endpoint::from_shared(served.endpoint()).unwrap();
        let channel = served.runtime.block_on(endpoint.connect()).unwrap();
        let mut desk = Self {
            namespace: Bytes::new(),
            store: StoreClient::new(channel.clone()),
            reads: ReadsClient::new(channel.clone()),
            models: ModelsClient::new(channel),
            served,
        };
        let reply = desk.register(registration("refusals")).unwrap();
        assert_eq!(reply.shapes[0].block_bytes, PAGE);
        desk.namespace = reply.namespace;
        desk
    }

    fn register(
        &mut self,
        request: proto::RegisterModelRequest,
    ) -> Result<proto::RegisterModelReply, Status> {
        self.served.runtime.block_on(self.models.register_model(request)).map(tonic::Response::into_inner)
    }

    fn header(&self, blocks: u64) -> proto::PutHeader {
        proto::PutHeader {
            namespace: self.namespace.clone(),
            keys: keys(0..blocks),
            ..proto::PutHeader::default()
        }
    }

    fn put(&mut self, parts: Vec<Part>) -> Result<proto::PutReply, Status> {
        self.put_messages(messages(parts))
    }

    fn put_messages(&mut self, messages: Vec<proto::PutRequest>) -> Result<proto::PutReply, Status> {
        let request = Request::new(tokio_stream::iter(messages));
        self.served.runtime.block_on(self.store.put(request)).map(tonic::Response::into_inner)
    }

    /// The code of a put, after which nothing is there, no memory is held, and a good put works.
    fn refused(&mut self, parts: Vec<Part>) -> Code {
        self.refused_messages(messages(parts)).code()
    }

    fn refused_messages(&mut self, messages: Vec<proto::PutRequest>) -> Status {
        let status = self.put_messages(messages).expect_err("it must be refused");
        assert_eq!(self.here(4), 0, "something of a refused put is here");
        self.expect_free();
        status
    }

    /// How many of the first blocks are here.
    fn here(&mut self, blocks: u64) -> usize {
        let request = proto::ExistsRequest {
            namespace: self.namespace.clone(),
            keys: keys(0..blocks),
            ..proto::ExistsRequest::default()
        };
        let reply = self.served.runtime.block_on(self.store.exists(request)).unwrap().into_inner();
        reply.presence().filter(|one| *one == proto::exists_reply::Presence::Here).count()
    }

    /// All memory of requests has come back.
    fn expect_free(&self) {
        let state = self.served.daemon().state();
        for _ in 0..2000 {
            if state.memory.usage().iter().all(|usage| usage.used == 0) && state.calls() == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("memory or calls are kept: {:?}, {} calls", state.memory.usage(), state.calls());
    }

    fn read(&mut self, request: proto::ReadRequest) -> Result<Vec<proto::ReadReply>, Status> {
        self.served.runtime.block_on(async {
            let mut stream = self.reads.get(request).await?.into_inner();
            let mut all = Vec::new();
            while let Some(reply) = stream.message().await? {
                all.push(reply);
            }
            Ok(all)
        })
    }

    /// The status of a read that is refused before it begins.
    fn refused_read(&mut self, request: proto::ReadRequest) -> Status {
        let layers = self.served.runtime.block_on(self.reads.get_layers(request.clone()));
        let status = layers.expect_err("it must be refused before anything is answered");
        let blocks = self.served.runtime.block_on(self.reads.get(request));
        assert_eq!(blocks.expect_err("it must be refused before anything is answered").code(), status.code());
        status
    }

    fn read_request(&self, blocks: u64) -> proto::ReadRequest {
        proto::ReadRequest { namespace: self.namespace.clone(), keys: keys(0..blocks), ..Default::default() }
    }
}

fn data(offset: u64, bytes: &[u8]) -> Part {
    Part::Data(proto::PutData { offset, data: Bytes::copy_from_slice(bytes) })
}

/// The messages of a put, each with its digest.
fn messages(parts: Vec<Part>) -> Vec<proto::PutRequest> {
    let mut digest = StreamDigest::of_put();
    let message = |part: Part| {
        let crc32 = digest.put(&part);
        proto::PutRequest { part: Some(part), crc32 }
    };
    parts.into_iter().map(message).collect()
}

fn page(byte: u8) -> Vec<u8> {
    vec![byte; PAGE as usize]
}

#[test]
fn a_put_that_is_not_what_its_header_says_is_refused_and_leaves_nothing() {
    let mut desk = Desk::open("refusals-put");
    let header = Part::Header(desk.header(1));
    let half = &page(1)[..2000];
    let wrong = [
        ("no message", vec![]),
        ("no header", vec![data(0, &page(1))]),
        ("truncated", vec![header.clone(), data(0, half)]),
        ("no data", vec![header.clone()]),
        ("too long", vec![header.clone(), data(0, &page(1)), data(PAGE, &[1])]),
        ("too long in one message", vec![header.clone(), data(0, &[1; PAGE as usize + 1])]),
        ("reordered", vec![header.clone(), data(2000, half), data(0, half)]),
        ("doubled", vec![header.clone(), data(0, half), data(0, half), data(2000, half)]),
        ("overflowing", vec![header.clone(), data(u64::MAX, half)]),
        ("two headers", vec![header.clone(), header.clone()]),
    ];
    for (name, parts) in wrong {
        // A put that is too long has brought its block whole: that one may be there, the call still fails.
        if name.starts_with("too long") {
            assert_eq!(desk.put(parts).unwrap_err().code(), Code::InvalidArgument, "{name}");
            continue;
        }
        let mut other = Desk { namespace: desk.register(registration(name)).unwrap().namespace, ..desk };
        let parts = parts
            .into_iter()
            .map(|part| match part {
                Part::Header(header) => {
                    Part::Header(proto::PutHeader { namespace: other.namespace.clone(), ..header })
                }
                part => part,
            })
            .collect();
        assert_eq!(other.refused(parts), Code::InvalidArgument, "{name}");
        desk = other;
    }
    let good = vec![Part::Header(desk.header(2)), data(0, &page(1)), data(PAGE, &page(2))];
    assert_eq!(desk.put(good).unwrap().outcomes.len(), 2);
    assert_eq!(desk.here(4), 2);
}

/// As many bytes as the header says, each message undamaged, and not in their places.
#[test]
fn whole_blocks_whose_bytes_are_out_of_order_are_refused() {
    let mut desk = Desk::open("refusals-order");
    let (first, second) = (data(0, &page(1)[..2000]), data(2000, &page(2)[..2096]));
    let shifted = |by: u64| match first.clone() {
        Part::Data(part) => Part::Data(proto::PutData { offset: part.offset.wrapping_add(by), ..part }),
        part => part,
    };
    let header = Part::Header(desk.header(1));
    for (name, parts) in [
        ("reordered", vec![header.clone(), second.clone(), first.clone()]),
        ("behind a gap", vec![header.clone(), shifted(1), second.clone()]),
        ("overflowing", vec![header.clone(), shifted(u64::MAX), second.clone()]),
        ("doubled", vec![header.clone(), first.clone(), data(0, &page(2)[..2096])]),
    ] {
        assert_eq!(desk.refused(parts), Code::InvalidArgument, "{name}");
    }
    assert_eq!(desk.put(vec![header, first, second]).unwrap().outcomes.len(), 1);
}

#[test]
fn bytes_that_were_damaged_on_their_way_are_never_stored() {
    let mut desk = Desk::open("refusals-damage");
    let (header, half) = (desk.header(1), page(7)[..2048].to_vec());
    let good = messages(vec![Part::Header(header.clone()), data(0, &half), data(2048, &half)]);
    let with = |at: usize, part: Part| {
        let mut messages = good.clone();
        messages[at].part = Some(part);
        messages
    };
    let headed = |header: proto::PutHeader| with(0, Part::Header(header));
    let mut flipped = half.clone();
    flipped[100] ^= 1;
    let mut another_key = header.keys.to_vec();
    another_key[31] ^= 0x40;
    let column = Some(proto::Column { group: 1, coordinate: None });
    let parent = Some(proto::Parent { parent: Some(proto::parent::Parent::Root(true)) });
    for (name, messages) in [
        ("a bit of the bytes", with(1, data(0, &flipped))),
        ("a place", with(1, data(1, &half))),
        ("a key", headed(proto::PutHeader { keys: another_key.into(), ..header.clone() })),
        ("the group", headed(proto::PutHeader { column, ..header.clone() })),
        ("what stands before", headed(proto::PutHeader { parent, ..header.clone() })),
        ("where it begins", headed(proto::PutHeader { first_block: Some(0), ..header.clone() })),
        ("what is promised", headed(proto::PutHeader { durability: 1, ..header.clone() })),
        ("the layout", headed(proto::PutHeader { layout: 1, ..header.clone() })),
        ("how long it lives", headed(proto::PutHeader { expires_after_ms: 1 << 40, ..header.clone() })),
        ("where it comes from", headed(proto::PutHeader { origins: vec![1; 16].into(), ..header })),
        ("one that is lost", vec![good[0].clone(), good[2].clone()]),
        (
            "one from elsewhere",
            vec![good[0].clone(), messages(vec![data(0, &half)]).remove(0), good[2].clone()],
        ),
    ] {
        let status = desk.refused_messages(messages);
        let text = status.message();
        assert!(status.code() == Code::InvalidArgument && text.contains("damaged"), "{name}: {status:?}");
    }
    assert_eq!(desk.put_messages(good).unwrap().outcomes.len(), 1);
}

#[test]
fn headers_that_cannot_be_are_refused_with_their_code() {
    let mut desk = Desk::open("refusals-header");
    let good = desk.header(2);
    let twice = [keys(0..1), keys(0..1)].concat();
    let mut cases = vec![
        ("no keys", proto::PutHeader { keys: Bytes::new(), ..good.clone() }),
        ("a torn key", proto::PutHeader { keys: keys(0..2).slice(..63), ..good.clone() }),
        ("a key twice", proto::PutHeader { keys: twice.into(), ..good.clone() }),
        ("a short namespace", proto::PutHeader { namespace: Bytes::from_static(b"x"), ..good.clone() }),
        ("an unknown namespace", proto::PutHeader { namespace: vec![9; 32].into(), ..good.clone() }),
        ("an unknown layout", proto::PutHeader { layout: 99, ..good.clone() }),
        ("an unknown durability", proto::PutHeader { durability: -1, ..good.clone() }),
        ("torn origins", proto::PutHeader { origins: vec![1; 31].into(), ..good.clone() }),
        ("too few origins", proto::PutHeader { origins: vec![1; 16].into(), ..good.clone() }),
    ];
    let column = |group, start, count, of| {
        Some(proto::Column { group, coordinate: Some(proto::Coordinate { start, count, of }) })
    };
    for (name, column) in [
        ("a group that is not there", column(77, 0, 0, 0)),
        ("heads that are not there", column(0, 0, 1, 2)),
        ("heads that overflow", column(0, u32::MAX, u32::MAX, u32::MAX)),
    ] {
        cases.push((name, proto::PutHeader { column, ..good.clone() }));
    }
    let own = proto::parent::Parent::Key(keys(1..2));
    cases.push((
        "its own parent",
        proto::PutHeader { parent: Some(proto::Parent { parent: Some(own) }), ..good },
    ));
    for (name, header) in cases {
        let parts = vec![Part::Header(header), data(0, &page(1)), data(PAGE, &page(1))];
        assert_eq!(desk.refused(parts), Code::InvalidArgument, "{name}");
    }
}

#[test]
fn a_put_that_never_ends_is_ended_by_its_deadline_and_by_its_clients_death() {
    let mut desk = Desk::open("refusals-never");
    let header = desk.header(2);
    for deadline in [Some(Duration::from_millis(300)), None] {
        let (to, sent) = tokio::sync::mpsc::channel(4);
        let mut store = desk.store.clone();
        let header = header.clone();
        let ended = desk.served.runtime.block_on(async move {
            for message in messages(vec![Part::Header(header), data(0, &page(1)[..100])]) {
                to.send(message).await.unwrap();
            }
            let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(sent));
            if let Some(deadline) = deadline {
                request.set_timeout(deadline);
            }
            let call = store.put(request);
            match deadline {
                // Kept open beyond its deadline.
                Some(_) => Some(call.await.unwrap_err().code()),
                // The client goes away in the middle.
                None => tokio::time::timeout(Duration::from_millis(300), call).await.map(|_| Code::Ok).ok(),
            }
        });
        if deadline.is_some() {
            assert!(matches!(ended, Some(Code::DeadlineExceeded | Code::Cancelled)), "{ended:?}");
        }
        desk.expect_free();
        assert_eq!(desk.here(2), 0);
    }
}

#[test]
fn reads_that_cannot_be_are_refused_before_the_first_byte() {
    let mut desk = Desk::open("refusals-read");
    let good = desk.read_request(2);
    let range = |start, end| Some(proto::read_request::LayerRange { start, end });
    let twice: Bytes = [keys(0..1), keys(0..1)].concat().into();
    for (name, request) in [
        ("no keys", proto::ReadRequest { keys: Bytes::new(), ..good.clone() }),
        ("a torn key", proto::ReadRequest { keys: keys(0..2).slice(1..), ..good.clone() }),
        ("a key twice", proto::ReadRequest { keys: twice, ..good.clone() }),
        ("no layer", proto::ReadRequest { layers: range(0, 0), ..good.clone() }),
        ("layers backwards", proto::ReadRequest { layers: range(2, 1), ..good.clone() }),
        ("a layer past the end", proto::ReadRequest { layers: range(0, 2), ..good.clone() }),
        (
            "layers that overflow",
            proto::ReadRequest { layers: range(u32::MAX - 1, u32::MAX), ..good.clone() },
        ),
        ("an unknown class", proto::ReadRequest { class: 9, ..good.clone() }),
        ("an unknown namespace", proto::ReadRequest { namespace: vec![9; 32].into(), ..good.clone() }),
        ("a short namespace", proto::ReadRequest { namespace: vec![9; 3].into(), ..good.clone() }),
    ] {
        assert_eq!(desk.refused_read(request).code(), Code::InvalidArgument, "{name}");
    }
    let many: Vec<u8> = fixture::keys(1, 0..65_537).iter().flat_map(|key: &BlockKey| key.0).collect();
    let too_many = proto::ReadRequest { keys: many.into(), ..good.clone() };
    assert_eq!(desk.refused_read(too_many).code(), Code::InvalidArgument);
    let oversized = proto::ReadRequest { keys: vec![0; 9 << 20].into(), ..good };
    assert_eq!(desk.refused_read(oversized).code(), Code::InvalidArgument);
    desk.expect_free();
    // What is not here is no error of the call: each block says so.
    let replies = desk.read(desk.read_request(2)).unwrap();
    let Some(proto::read_reply::Part::End(end)) = &replies.last().unwrap().part else {
        panic!("{replies:?}")
    };
    let reasons: Vec<_> = end.failures.iter().map(|one| one.error.as_ref().unwrap().reason()).collect();
    assert_eq!(reasons, [proto::Reason::NotHere; 2]);
    let metrics = desk.served.metrics();
    let missed = |line: &str| {
        line.starts_with("kvarts_blocks_missed_total{") && line.ends_with("reason=\"REASON_NOT_HERE\"} 2")
    };
    assert!(metrics.lines().any(missed), "{metrics}");
}

#[test]
fn what_is_longer_than_its_limit_is_refused() {
    let mut desk = Desk::open("refusals-long");
    // A message of a put: more than 4 MiB of data, in order and undamaged.
    let blocks = limits::PUT_DATA_BYTES_MAX as u64 / PAGE + 1;
    let parts = vec![Part::Header(desk.header(blocks)), data(0, &vec![7; (blocks * PAGE) as usize])];
    assert_eq!(desk.refused(parts), Code::InvalidArgument);
    // Blocks that are larger than any piece of the memory of requests.
    let large = Some(proto::register_model_request::Spec::OpaquePageBytes(60 << 20));
    let large = proto::RegisterModelRequest { spec: large, ..registration("large") };
    let namespace = desk.register(large).unwrap().namespace;
    let request = proto::ReadRequest { namespace: namespace.clone(), keys: keys(0..1), ..Default::default() };
    assert_eq!(desk.read(request).unwrap_err().code(), Code::InvalidArgument);
    let header = proto::PutHeader { namespace, keys: keys(0..1), ..Default::default() };
    let refused = desk.put(vec![Part::Header(header)]).unwrap_err();
    assert!(refused.code() == Code::InvalidArgument && refused.message().contains("too many bytes"));
    desk.expect_free();
}

/// Two bytes each on the wire, and many times that in memory.
#[test]
fn more_repeated_messages_than_any_request_has_are_refused_before_they_are_decoded() {
    let mut desk = Desk::open("refusals-parts");
    let many = limits::PARTS_MAX + 1;
    let request = proto::MatchRequest {
        requirements: vec![proto::Requirement::default(); many],
        ..proto::MatchRequest::default()
    };
    let matched = desk.served.runtime.block_on(desk.store.r#match(request)).unwrap_err();
    let columns = vec![proto::Column::default(); many];
    let models = desk.register(proto::RegisterModelRequest { columns, ..registration("parts") }).unwrap_err();
    for status in [matched, models] {
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().contains("parts") && !status.details().is_empty(), "{status:?}");
    }
    let toml = proto::register_model_request::Spec::Toml(" ".repeat(limits::MODEL_BYTES_MAX));
    let long = desk.register(proto::RegisterModelRequest { spec: Some(toml), ..registration("long") });
    let long = long.unwrap_err();
    assert!(long.code() == Code::InvalidArgument && long.message().contains("too large"), "{long:?}");
    desk.expect_free();
}

#[test]
fn models_that_cannot_be_are_refused() {
    let mut desk = Desk::open("refusals-model");
    let good = registration("other");
    let unnamed = proto::Identity { model: String::new(), ..identity("x") };
    let fingerprint = proto::Identity { spec_fingerprint: vec![1; 32].into(), ..identity("x") };
    let torn = proto::Identity { spec_fingerprint: vec![1; 31].into(), ..identity("x") };
    let spec = |spec| proto::RegisterModelRequest { spec: Some(spec), ..registration("other") };
    use proto::register_model_request::Spec;
    let part = |kind: &str| proto::Part { kind: kind.to_owned(), ..proto::Part::default() };
    let geometry =
        |parts, layer| proto::Geometry { parts, layers: vec![proto::geometry::Layer { parts: layer }] };
    for (name, request) in [
        ("no identity", proto::RegisterModelRequest { identity: None, ..good.clone() }),
        ("no name", proto::RegisterModelRequest { identity: Some(unnamed), ..good.clone() }),
        ("another spec", proto::RegisterModelRequest { identity: Some(fingerprint), ..good.clone() }),
        ("a torn fingerprint", proto::RegisterModelRequest { identity: Some(torn), ..good.clone() }),
        ("no spec", proto::RegisterModelRequest { spec: None, ..good.clone() }),
        ("no bytes", spec(Spec::OpaquePageBytes(0))),
        ("too many bytes", spec(Spec::OpaquePageBytes(u64::MAX))),
        ("an unknown spec", spec(Spec::Shipped("no-such-model".to_owned()))),
        ("a spec that is no TOML", spec(Spec::Toml("= =".to_owned()))),
        ("a part without a role", spec(Spec::Geometry(geometry(vec![part("k")], vec![0])))),
        ("a layer of a part that is not there", spec(Spec::Geometry(geometry(vec![], vec![7])))),
        ("a part number that overflows", spec(Spec::Geometry(geometry(vec![], vec![u32::MAX])))),
        (
            "columns without end",
            proto::RegisterModelRequest { columns: vec![Default::default(); 257], ..good },
        ),
    ] {
        assert_eq!(desk.register(request).unwrap_err().code(), Code::InvalidArgument, "{name}");
    }
}

#[test]
fn a_reader_that_takes_nothing_holds_a_bounded_part_of_memory_and_disturbs_nobody() {
    let mut desk = Desk::open("refusals-slow");
    let pages: Vec<u8> = (0..1024u32).flat_map(|n| page(n as u8)).collect();
    let mut parts = vec![Part::Header(desk.header(1024))];
    parts.extend((0..).zip(pages.chunks(1 << 20)).map(|(n, piece)| data(n << 20, piece)));
    assert!(desk.put(parts).unwrap().outcomes.iter().all(|one| one.error.is_none()));
    let stuck: Vec<_> = (0..8)
        .map(|_| desk.served.runtime.block_on(desk.reads.clone().get(desk.read_request(1024))).unwrap())
        .collect();
    std::thread::sleep(Duration::from_millis(200));
    let used = desk.served.daemon().state().memory.usage()[0].used;
    assert!(used as u64 <= 8 * limits::TILE_BYTES, "{used} bytes are held for clients that take nothing");
    // On a connection of its own: what one connection has on its way is shared by its streams.
    let endpoint = tonic::transport::Endpoint::from_shared(desk.served.endpoint()).unwrap();
    let other = ReadsClient::new(desk.served.runtime.block_on(endpoint.connect()).unwrap());
    let stuck_on = std::mem::replace(&mut desk.reads, other);
    assert_eq!(desk.read(desk.read_request(1)).unwrap().len(), 3);
    drop((stuck, stuck_on));
    desk.expect_free();
}

#[test]
fn what_a_client_never_takes_comes_back_after_the_stall_timeout() {
    let mut desk = Desk::open("refusals-never");
    let pages: Vec<u8> = (0..1024u32).flat_map(|n| page(n as u8)).collect();
    let mut parts = vec![Part::Header(desk.header(1024))];
    parts.extend((0..).zip(pages.chunks(1 << 20)).map(|(n, piece)| data(n << 20, piece)));
    assert!(desk.put(parts).unwrap().outcomes.iter().all(|one| one.error.is_none()));
    // Some whose work is never done, and some of which everything waits already; all on one connection, whose client
    // answers pings and reads nothing.
    let stuck: Vec<_> = [1024, 1024, 1024, 1024, 200, 200, 40, 40, 40]
        .map(|blocks| {
            let request = desk.read_request(blocks);
            desk.served.runtime.block_on(desk.reads.clone().get(request)).unwrap()
        })
        .into();
    let state = std::sync::Arc::clone(desk.served.daemon().state());
    let held = || state.memory.usage().map(|usage| usage.used);
    // The last of them may still be on their way: a response begins before its blocks are read.
    desk.served.until("both parts of the memory are held", |_| held().iter().all(|used| *used > 0));
    state.stall_timeout.set(Duration::from_millis(100));
    desk.served.until("those who take nothing hold nothing", |_| held() == [0, 0] && state.calls() == 0);
    state.stall_timeout.set(limits::STALL);
    let other = tonic::transport::Endpoint::from_shared(desk.served.endpoint()).unwrap();
    desk.reads = ReadsClient::new(desk.served.runtime.block_on(other.connect()).unwrap());
    assert_eq!(desk.read(desk.read_request(1)).unwrap().len(), 3);
    drop(stuck);
}

#[test]
fn a_match_of_too_many_keys_at_too_many_coordinates_is_refused_with_the_figure() {
    let mut desk = Desk::open("refusals-match");
    let mut asked = |keys_asked: usize, count: u32| {
        let coordinates = (0..count).map(|start| proto::Coordinate { start, count: 1, of: count }).collect();
        let requirement = proto::Requirement { coordinates, ..proto::Requirement::default() };
        let request = proto::MatchRequest {
            namespace: desk.namespace.clone(),
            keys: vec![7; 32 * keys_asked].into(),
            block_tokens: 16,
            requirements: vec![requirement],
            ..proto::MatchRequest::default()
        };
        desk.served.runtime.block_on(desk.store.r#match(request)).unwrap_err()
    };
    let status = asked(65_536, 17);
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("1114112"), "{status:?}");
    // That many may be asked for; the status is about columns that this model does not have.
    let status = asked(65_536, 16);
    assert!(!status.message().contains("times"), "{status:?}");
}

#[test]
fn shapes_of_a_column_are_given_once() {
    let mut desk = Desk::open("refusals-columns");
    let twice = vec![proto::Column::default(), proto::Column::default()];
    let request = proto::RegisterModelRequest { columns: twice, ..registration("columns") };
    let status = desk.register(request).unwrap_err();
    assert_eq!((status.code(), status.message().contains("twice")), (Code::InvalidArgument, true));
}

#[test]
fn a_tenants_models_fit_into_a_list_of_one_message() {
    let mut desk = Desk::open("refusals-models");
    let large = |number: u32| {
        let revision = format!("{number}{}", "r".repeat(200));
        let mut request = registration(&revision);
        if let Some(identity) = &mut request.identity {
            for text in [&mut identity.rope, &mut identity.adapter, &mut identity.quantisation_recipe] {
                *text = "x".repeat(1000);
            }
        }
        request
    };
    // More than a message has room for: those that nothing uses make room.
    let registered = 1500;
    for number in 0..registered {
        desk.register(large(number)).unwrap();
    }
    let listed = desk.served.runtime.block_on(desk.models.list_models(proto::ListModelsRequest::default()));
    let listed = listed.unwrap().into_inner().models.len() as u32;
    assert!((200..registered).contains(&listed), "{listed}");
    // One that went is registered again.
    desk.register(large(0)).unwrap();
}

#[test]
fn deletes_that_cannot_be_are_refused() {
    use proto::delete_request::{Keys, Target};
    let mut desk = Desk::open("refusals-delete");
    let of_keys = |keys| Some(Target::OfKeys(Keys { column: None, keys }));
    for (name, target) in [
        ("nothing", None),
        ("not everything", Some(Target::Everything(false))),
        ("no keys", of_keys(Bytes::new())),
        ("a torn key", of_keys(keys(0..1).slice(1..))),
        ("a torn prefix", Some(Target::Prefix(keys(0..2)))),
    ] {
        let request = proto::DeleteRequest { namespace: desk.namespace.clone(), target, of_all: false };
        let status = desk.served.runtime.block_on(desk.store.delete(request)).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{name}");
    }
}

/// A client asks for a drain, and serving has ended before a caller waits for its end.
#[test]
fn a_server_that_ended_serving_before_it_is_told_to_stop_still_stops_cleanly() {
    let mut served = Served::start("ended", "");
    let mut daemon = served.daemon.take().unwrap();
    daemon.state().start_drain();
    served.runtime.block_on(async {
        // Which of the two it sees first is up to chance.
        for _ in 0..40 {
            daemon.drained().await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        daemon.stop().await.unwrap();
    });
}
