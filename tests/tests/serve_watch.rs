//! Events over gRPC: in order, each tenant its own, with gaps told.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;

use crate::served::{Beside, ClientStage, Served};
use kvarts_client::Client;
use kvarts_contract::api::{DeleteRequest, KvStore, Target};
use kvarts_contract::blocking::block_on;
use kvarts_layout::{BlockKey, Coordinate, Group, Layout, NamespaceId};
use kvarts_server::state::auth::TokenHash;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;
use kvarts_wire::proto;
use kvarts_wire::proto::event::What;

/// The next events, as many as are wanted.
fn take(stage: &ClientStage, stream: &mut tonic::Streaming<proto::Event>, count: usize) -> Vec<proto::Event> {
    let all = async {
        let mut events = Vec::new();
        while events.len() < count {
            events.push(stream.message().await.unwrap().expect("the stream goes on"));
        }
        events
    };
    let bounded = async { tokio::time::timeout(Duration::from_secs(30), all).await };
    stage.served.runtime.block_on(bounded).expect("the events come")
}

/// Everything that a caller is shown of what is here: the blocks of each page, and the point of the pages.
fn listed(client: &Client, namespace: Option<NamespaceId>) -> (Vec<Vec<u8>>, proto::Sequence) {
    let (mut blocks, mut token) = (Vec::new(), Bytes::new());
    loop {
        let page = client.list_blocks(namespace, token).unwrap();
        for some in page.blocks {
            assert!(namespace.is_none_or(|wanted| wanted.as_bytes()[..] == some.namespace[..]));
            blocks.extend(some.keys.chunks(32).map(<[u8]>::to_vec));
        }
        token = page.next_page_token;
        if token.is_empty() {
            blocks.sort();
            blocks.dedup();
            return (blocks, page.sequence.unwrap());
        }
    }
}

/// A column whose blocks are small.
fn small() -> (Group, Coordinate) {
    let [_, small, _] = fixture::columns();
    small
}

fn sorted(keys: &[BlockKey]) -> Vec<Vec<u8>> {
    let mut keys: Vec<_> = keys.iter().map(|key| key.as_bytes().to_vec()).collect();
    keys.sort();
    keys
}

fn deleted(stage: &ClientStage, namespace: NamespaceId, keys: &[BlockKey]) {
    let target = Target::Keys { column: None, keys: keys.to_vec() };
    let request = DeleteRequest { namespace, target, deadline: None };
    assert_eq!(block_on(stage.client.delete(request)).unwrap().unwrap().blocks, keys.len() as u64);
}

/// What a watcher has put together until `COMPLETE`, or until there were as many events.
fn told(events: &[proto::Event]) -> Vec<Vec<u8>> {
    let mut here = BTreeSet::new();
    for event in events {
        let keys = event.key.chunks(32).map(<[u8]>::to_vec);
        match event.what() {
            What::Present | What::Stored => here.extend(keys),
            What::Complete | What::Gap => {}
            _ => keys.for_each(|key| assert!(here.remove(&key))),
        }
    }
    here.into_iter().collect()
}

fn watch(client: &Client, after: Option<proto::Sequence>) -> tonic::Streaming<proto::Event> {
    client.watch(proto::WatchRequest { after, ..proto::WatchRequest::default() }).unwrap()
}

#[test]
fn what_happens_is_told_in_order_and_can_be_resumed() {
    let stage = ClientStage::open("watch");
    let desk = Desk::new(&stage, "watched");
    let mut stream = watch(&stage.client, None);
    let keys = desk.keys(0..3);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    let target = Target::Keys { column: None, keys: keys[1..2].to_vec() };
    let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
    assert_eq!(block_on(stage.client.delete(request)).unwrap().unwrap().blocks, 1);
    let events = take(&stage, &mut stream, 4);
    let told: Vec<_> = events.iter().map(|event| (event.what(), event.cause.as_str())).collect();
    let put = (What::Stored, "put");
    assert_eq!(told, [put, put, put, (What::Deleted, "key")]);
    assert_eq!(events[3].key, keys[1].as_bytes().as_slice());
    let again = take(&stage, &mut watch(&stage.client, events[1].sequence), 2);
    assert_eq!(again, events[2..]);
}

#[test]
fn a_point_of_another_stream_is_a_gap_and_the_stream_goes_on() {
    let stage = ClientStage::open("watch-gap");
    let desk = Desk::new(&stage, "watched");
    let stranger = proto::Sequence { stream: 1, number: 1 << 40 };
    let mut stream = watch(&stage.client, Some(stranger));
    assert_eq!(take(&stage, &mut stream, 1)[0].what(), What::Gap);
    desk.store(pages(), &desk.keys(0..1), 1, Layout::FullBlock);
    assert_eq!(take(&stage, &mut stream, 1)[0].what(), What::Stored);
}

#[test]
fn what_others_do_shows_in_no_number_and_a_point_is_its_tenants_alone() {
    let token = |tenant: &str| {
        let hash = TokenHash::of(&format!("kvarts_{tenant}"));
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = ['read', 'write']\nhash = '{hash}'\n")
    };
    let tenants = "[[tenants]]\nname = 'red'\n[[tenants]]\nname = 'blue'\n".to_owned();
    let served = Served::start("watch-tenants", &[tenants, token("red"), token("blue")].concat());
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let stage = ClientStage { client: red.clone(), served };
    let other = Beside(blue.clone());
    let (desk, noise) = (Desk::new(&stage, "watched"), Desk::new(&other, "noise"));
    let mut stream = watch(&red, None);
    let mut points = Vec::new();
    for round in 0..8 {
        noise.store(pages(), &noise.keys(round * 9..round * 9 + 9), 1, Layout::FullBlock);
        desk.store(pages(), &desk.keys(round..round + 1), 1, Layout::FullBlock);
        points.push(take(&stage, &mut stream, 1)[0].sequence.unwrap());
    }
    let engine = stage.served.daemon().state().store().subscribe(None).sequence();
    assert_eq!(engine.number, 80);
    for pair in points.windows(2) {
        assert!(pair[0].number.abs_diff(pair[1].number) > 1 << 20, "{points:?}");
        assert_eq!(pair[0].stream, pair[1].stream);
    }
    assert!(points.iter().all(|point| point.number > 80 && point.stream != engine.stream), "{points:?}");
    // A point resumes exactly, whatever others did in between, and it is of no use to another tenant.
    let again = take(&stage, &mut watch(&red, Some(points[3])), 4);
    assert_eq!(again.iter().map(|event| event.sequence.unwrap()).collect::<Vec<_>>(), points[4..]);
    assert_eq!(take(&stage, &mut watch(&blue, Some(points[3])), 1)[0].what(), What::Gap);
}

#[test]
fn who_watches_by_a_token_that_is_taken_away_is_told_nothing_from_then_on() {
    let file = |tokens: &[&str]| {
        let token = |secret: &&str| {
            let hash = TokenHash::of(secret);
            format!("[[tokens]]\ntenant = 'red'\nrights = ['read', 'write']\nhash = '{hash}'\n")
        };
        "[[tenants]]\nname = 'red'\n".to_owned() + &tokens.iter().map(token).collect::<String>()
    };
    let served = Served::start("watch-taken", &file(&["kvarts_one", "kvarts_two"]));
    let (one, two) = (served.client(Some("kvarts_one")), served.client(Some("kvarts_two")));
    let stage = ClientStage { client: two.clone(), served };
    let desk = Desk::new(&stage, "watched");
    let (mut of_one, mut of_two) = (watch(&one, None), watch(&two, None));
    desk.store(pages(), &desk.keys(0..1), 1, Layout::FullBlock);
    assert_eq!((take(&stage, &mut of_one, 1).len(), take(&stage, &mut of_two, 1).len()), (1, 1));
    stage.served.reload(&file(&["kvarts_two"])).unwrap();
    let ended = stage
        .served
        .runtime
        .block_on(async { tokio::time::timeout(std::time::Duration::from_secs(60), of_one.message()).await });
    assert!(matches!(ended, Ok(Ok(None))), "{ended:?}");
    desk.store(pages(), &desk.keys(1..2), 1, Layout::FullBlock);
    assert_eq!(take(&stage, &mut of_two, 1).len(), 1, "the other one goes on");
}

#[test]
fn what_is_here_is_listed_page_by_page_and_events_go_on_behind_it() {
    let stage = ClientStage::open("watch-list");
    let (desk, other) = (Desk::new(&stage, "listed"), Desk::new(&stage, "other"));
    // More than one page.
    let keys = desk.keys(0..5000);
    for some in keys.chunks(500) {
        desk.store(small(), some, 1, Layout::FullBlock);
    }
    other.store(pages(), &other.keys(0..3), 1, Layout::FullBlock);
    deleted(&stage, desk.namespace, &keys[7..9]);
    let (blocks, sequence) = listed(&stage.client, Some(desk.namespace));
    assert_eq!(blocks, sorted(&[&keys[..7], &keys[9..]].concat()));
    let (all, _) = listed(&stage.client, None);
    assert_eq!(all.len(), 4998 + 3);
    let mut stream = watch(&stage.client, Some(sequence));
    deleted(&stage, desk.namespace, &keys[..1]);
    let event = take(&stage, &mut stream, 1).remove(0);
    assert_eq!((event.what(), &event.key[..]), (What::Deleted, &keys[0].as_bytes()[..]));
    for token in [&b"none"[..], &[7; 32]] {
        assert!(stage.client.list_blocks(None, Bytes::from(token)).is_err(), "{token:?}");
    }
}

#[test]
fn what_is_listed_is_the_tenants_own() {
    let token = |tenant: &str| {
        let hash = TokenHash::of(&format!("kvarts_{tenant}"));
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = ['read', 'write']\nhash = '{hash}'\n")
    };
    let tenants = "[[tenants]]\nname = 'red'\n[[tenants]]\nname = 'blue'\n".to_owned();
    let served = Served::start("watch-list-own", &[tenants, token("red"), token("blue")].concat());
    let (red, blue) = (served.client(Some("kvarts_red")), served.client(Some("kvarts_blue")));
    let stage = ClientStage { client: red.clone(), served };
    let other = Beside(blue.clone());
    let (desk, noise) = (Desk::new(&stage, "listed"), Desk::new(&other, "noise"));
    let keys = desk.keys(0..4);
    desk.store(pages(), &keys, 1, Layout::FullBlock);
    noise.store(pages(), &noise.keys(0..9), 1, Layout::FullBlock);
    assert_eq!(listed(&red, None).0, sorted(&keys));
    assert_eq!(listed(&blue, None).0, sorted(&noise.keys(0..9)));
    assert!(red.list_blocks(Some(noise.namespace), Bytes::new()).is_err());
    let of_blue = proto::WatchRequest {
        namespace: noise.namespace.as_bytes().to_vec().into(),
        ..proto::WatchRequest::default()
    };
    assert!(red.watch(of_blue).is_err());
    let snapshot = proto::WatchRequest { snapshot: true, ..proto::WatchRequest::default() };
    let events = take(&stage, &mut red.watch(snapshot).unwrap(), 5);
    assert_eq!((told(&events), events[4].what()), (sorted(&keys), What::Complete));
}

#[test]
fn a_watcher_who_takes_runs_is_told_of_many_blocks_at_once_and_of_one_model_alone() {
    let stage = ClientStage::open("watch-runs");
    let (desk, other) = (Desk::new(&stage, "runs"), Desk::new(&stage, "other"));
    let keys = desk.keys(0..1000);
    desk.store(pages(), &keys[..500], 1, Layout::FullBlock);
    other.store(pages(), &other.keys(0..3), 1, Layout::FullBlock);
    let request = proto::WatchRequest {
        after: None,
        namespace: desk.namespace.as_bytes().to_vec().into(),
        snapshot: true,
        runs: true,
    };
    let mut stream = stage.client.watch(request.clone()).unwrap();
    let mut events = take(&stage, &mut stream, 1);
    while events.last().unwrap().what() != What::Complete {
        events.extend(take(&stage, &mut stream, 1));
    }
    assert_eq!(told(&events), sorted(&keys[..500]));
    desk.store(pages(), &keys[500..], 1, Layout::FullBlock);
    other.store(pages(), &other.keys(3..6), 1, Layout::FullBlock);
    deleted(&stage, desk.namespace, &keys[..10]);
    let complete = events.len();
    // The number of blocks may already be right before the last events arrive.
    while told(&events) != sorted(&keys[10..]) {
        events.extend(take(&stage, &mut stream, 1));
    }
    assert!(events.len() - complete < 200, "{} messages for 510 events", events.len() - complete);
    // From a point there is no snapshot; a point of another server is a gap, and then there is one.
    let after = events.last().unwrap().sequence;
    let mut again = stage.client.watch(proto::WatchRequest { after, ..request.clone() }).unwrap();
    deleted(&stage, desk.namespace, &keys[10..11]);
    assert_eq!(take(&stage, &mut again, 1)[0].what(), What::Deleted);
    let stranger = Some(proto::Sequence { stream: 1, number: 1 << 40 });
    let mut lost = stage.client.watch(proto::WatchRequest { after: stranger, ..request }).unwrap();
    let mut events = take(&stage, &mut lost, 1);
    assert_eq!(events[0].what(), What::Gap);
    while events.last().unwrap().what() != What::Complete {
        events.extend(take(&stage, &mut lost, 1));
    }
    assert_eq!(told(&events), sorted(&keys[11..]));
}
