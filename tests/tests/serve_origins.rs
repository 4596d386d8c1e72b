//! Reads that the server makes in windows: of each block they give bytes of one production, whatever happens between two.
#![allow(clippy::disallowed_methods, reason = "a real server stands outside the simulation")]

use crate::served::ClientStage;
use kvarts_contract::api::{DeleteRequest, KvStore, Target};
use kvarts_layout::Layout;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_tests::stage::ask;
use kvarts_wire::proto::read_reply::Part;
use kvarts_wire::proto::reads_client::ReadsClient;
use kvarts_wire::proto::{self};

/// More than the server has under way at once, and than a connection of the smallest windows takes unread.
const READ_BYTES: u64 = 24 << 20;

#[test]
fn a_long_read_gives_nothing_of_a_block_that_was_put_anew_since_it_began() {
    let stage = ClientStage::open("origins-grpc");
    let desk = Desk::new(&stage, "windows");
    let (group, coordinate) = pages();
    let blocks = READ_BYTES / fixture::shape(group, coordinate).block_bytes();
    let keys = desk.keys(0..blocks);
    let put =
        |producer| keys.chunks(64).for_each(|keys| desk.store(pages(), keys, producer, Layout::LayerBlock));
    put(1);
    let request = proto::ReadRequest {
        namespace: desk.namespace.as_bytes().to_vec().into(),
        column: Some(proto::Column {
            group: group.0,
            coordinate: Some(proto::Coordinate { start: 0, count: 2, of: 2 }),
        }),
        keys: keys.iter().flat_map(|key| key.0).collect::<Vec<u8>>().into(),
        ..proto::ReadRequest::default()
    };
    let runtime = &stage.served.runtime;
    let endpoint = tonic::transport::Endpoint::from_shared(stage.served.endpoint()).unwrap();
    let mut reads = ReadsClient::new(runtime.block_on(endpoint.connect()).unwrap());
    let mut stream = runtime.block_on(reads.get_layers(request.clone())).unwrap().into_inner();
    let first = runtime.block_on(stream.message()).unwrap().unwrap();
    assert!(matches!(first.part, Some(Part::Data(_))), "{first:?}");
    let target = Target::Keys { column: Some(pages()), keys: keys.clone() };
    ask(&stage, stage.client.delete(DeleteRequest { namespace: desk.namespace, target, deadline: None }))
        .unwrap();
    put(2);
    let end = |stream: &mut tonic::Streaming<proto::ReadReply>| loop {
        let reply = runtime.block_on(stream.message()).unwrap().unwrap();
        if let Some(Part::End(end)) = reply.part {
            break end;
        }
    };
    let mixed = end(&mut stream);
    assert!(mixed.usable_blocks == 0 && !mixed.failures.is_empty(), "{} usable", mixed.usable_blocks);
    let mut again = runtime.block_on(reads.get_layers(request)).unwrap().into_inner();
    assert_eq!(u64::from(end(&mut again).usable_blocks), blocks);
}
