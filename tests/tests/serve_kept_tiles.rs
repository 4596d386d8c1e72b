//! Tiles that a server keeps: a second read gets them from memory, as they would be read now, and no request waits for
//! memory that they take.

use std::task::{Context, Poll, Waker};

use crate::served::{ClientStage, Served};
use kvarts_client::Client;
use kvarts_contract::api::{DeleteRequest, KvStore, Order, ReadEnd, ReadRequest, Target};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::arena::Within;
use kvarts_contract::error::Reason;
use kvarts_layout::{BlockKey, Layout, NamespaceId};
use kvarts_server::state::auth::TokenHash;
use kvarts_tests::conformance::{Desk, pages};
use kvarts_tests::fixture;

/// Tiles given from memory so far, and those that were read.
fn counts(served: &Served) -> (u64, u64) {
    served.daemon().state().memory.tiles().counts()
}

fn kept_bytes(served: &Served) -> u64 {
    (0..2).map(|part| served.daemon().state().memory.tiles().bytes(part)).sum()
}

#[test]
fn what_is_read_for_the_third_time_comes_from_memory_and_is_what_was_put() {
    let stage = ClientStage::open("kept-tiles");
    let desk = Desk::new(&stage, "kept");
    let keys = desk.keys(0..8);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    for order in [Order::Layers, Order::Blocks] {
        let request = ReadRequest { order, ..desk.read_request(pages(), &keys) };
        for round in 0..4 {
            let before = counts(&stage.served);
            let (_, end) = desk.read(&request);
            assert_eq!((end.usable_blocks, end.failures.len()), (8, 0));
            desk.expect_bytes(&request, &(0..8).collect::<Vec<_>>(), 1);
            let now = counts(&stage.served);
            let (given, read) = (now.0 - before.0, now.1 - before.1);
            assert_eq!((given > 0, read > 0), (round >= 2, round < 2), "{order:?}, round {round}");
        }
    }
    let metrics = stage.served.metrics();
    let (given, read) = counts(&stage.served);
    for line in [
        format!("kvarts_tiles_total{{from=\"kept\"}} {given}\n"),
        format!("kvarts_tiles_total{{from=\"read\"}} {read}\n"),
        "kvarts_request_memory_bytes{part=\"small\"} 0\n".to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    assert!(kept_bytes(&stage.served) > 0);
}

#[test]
fn a_block_that_was_deleted_or_put_anew_is_never_given_as_it_was_kept() {
    let stage = ClientStage::open("kept-gone");
    let desk = Desk::new(&stage, "kept");
    let keys = desk.keys(0..4);
    desk.store(pages(), &keys, 1, Layout::LayerBlock);
    for producer in 2..6 {
        for _ in 0..3 {
            desk.expect(pages(), &keys, producer - 1);
        }
        let given = counts(&stage.served).0;
        assert!(given > 0);
        let target = Target::Keys { column: Some(pages()), keys: keys[1..2].to_vec() };
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        block_on(stage.client.delete(request)).unwrap().unwrap();
        let (_, end) = desk.read(&desk.read_request(pages(), &keys));
        assert_eq!(end.failures, [(1, Reason::NotHere(keys[1]))]);
        let target = Target::Keys { column: Some(pages()), keys: keys.clone() };
        let request = DeleteRequest { namespace: desk.namespace, target, deadline: None };
        block_on(stage.client.delete(request)).unwrap().unwrap();
        desk.store(pages(), &keys, producer, Layout::LayerBlock);
    }
    desk.expect(pages(), &keys, 5);
}

#[test]
fn all_memory_of_requests_can_be_had_however_much_of_it_keeps_tiles() {
    let stage = ClientStage::open("kept-crowded");
    let desk = Desk::new(&stage, "kept");
    let keys: Vec<Vec<BlockKey>> = (0..24).map(|n| desk.keys(n * 40..n * 40 + 40)).collect();
    for some in &keys {
        desk.store(pages(), some, 1, Layout::LayerBlock);
        for _ in 0..2 {
            desk.expect(pages(), some, 1);
        }
    }
    let memory = &stage.served.daemon().state().memory;
    assert!(kept_bytes(&stage.served) > 8 << 20, "{}", kept_bytes(&stage.served));
    stage.served.until("memory is back", |_| memory.usage().iter().all(|usage| usage.used == 0));
    assert!(!memory.is_crowded());
    // Large pieces until one has to wait.
    let mut context = Context::from_waker(Waker::noop());
    let (mut held, mut waits) = (Vec::new(), None);
    let all = Within { own: 0..0, shared: 0..memory.usage()[0].total };
    while waits.is_none() {
        let mut taking = Box::pin(memory.take(memory.piece_max(), &all));
        match taking.as_mut().poll(&mut context) {
            Poll::Ready(piece) => held.push(piece.unwrap()),
            Poll::Pending => waits = Some(taking),
        }
    }
    assert!(held.len() >= 2 && memory.is_crowded(), "{} quarters of it", held.len());
    assert_eq!(memory.tiles().bytes(0), 0, "a request waits beside tiles that are kept");
    drop((waits, held));
    (0..3).for_each(|_| desk.expect(pages(), &keys[0], 1));
    assert!(memory.tiles().bytes(0) > 0);
}

fn configuration() -> String {
    let token = |tenant: &str| {
        let hash = TokenHash::of(&format!("kvarts_{tenant}"));
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = ['read', 'write']\nhash = '{hash}'\n")
    };
    let tenants = ["red", "blue", "green"];
    let names: String = tenants.iter().map(|name| format!("[[tenants]]\nname = '{name}'\n")).collect();
    names + &tenants.map(token).concat()
}

/// A tenant's client as a place where a store stands.
struct Of<'a> {
    served: &'a Served,
    client: Client,
    namespace: NamespaceId,
    keys: Vec<BlockKey>,
}

impl<'a> Of<'a> {
    fn new(served: &'a Served, tenant: &str) -> Self {
        let client = served.client(Some(&format!("kvarts_{tenant}")));
        let namespace = client.register(&fixture::identity("kept"), &fixture::geometry()).unwrap();
        Self { served, client, namespace, keys: fixture::keys(77, 0..8) }
    }

    fn put(&self, producer: u64) {
        let (group, coordinate) = pages();
        let shape = fixture::shape(group, coordinate);
        let from = fixture::place(&shape, self.keys.len() as u32, fixture::Style::Blocks, 0).unwrap();
        for (at, key) in (0..).zip(&self.keys) {
            fixture::write_block(&from, at, &fixture::content(key, group, coordinate, producer, &shape));
        }
        let request = kvarts_contract::api::PutRequest {
            namespace: self.namespace,
            group,
            coordinate,
            parent: kvarts_contract::api::Parent::Root,
            first_block: Some(0),
            keys: self.keys.clone(),
            from,
            layout: None,
            durability: kvarts_contract::api::Durability::Durable,
            expires_after: None,
            origins: None,
            deadline: None,
        };
        block_on(self.client.put(request)).unwrap().unwrap();
    }

    fn read(&self) -> (ReadEnd, Vec<Vec<Vec<u8>>>) {
        let (group, coordinate) = pages();
        let shape = fixture::shape(group, coordinate);
        let into = fixture::place(&shape, self.keys.len() as u32, fixture::Style::Blocks, 0).unwrap();
        let request = ReadRequest {
            namespace: self.namespace,
            group,
            coordinate,
            keys: self.keys.clone(),
            layers: None,
            order: Order::Layers,
            into: into.clone(),
            verify: kvarts_contract::api::Verify::Always,
            class: kvarts_contract::class::Class::Foreground,
            deadline: None,
        };
        let end = self.client.read(request).unwrap().wait_blocking();
        (end, (0..8).map(|block| fixture::read_block(&into, block, &shape)).collect())
    }

    fn expect(&self, producer: u64) {
        let ((group, coordinate), (end, blocks)) = (pages(), self.read());
        assert_eq!((end.usable_blocks, end.failures.len()), (8, 0));
        let shape = fixture::shape(group, coordinate);
        for (key, found) in self.keys.iter().zip(blocks) {
            assert_eq!(found, fixture::content(key, group, coordinate, producer, &shape));
        }
    }
}

#[test]
fn what_is_kept_for_one_of_three_tenants_is_given_to_no_other() {
    let served = Served::start("kept-tenants", &configuration());
    let [red, blue, green] = ["red", "blue", "green"].map(|tenant| Of::new(&served, tenant));
    red.put(1);
    (0..4).for_each(|_| red.expect(1));
    let given = counts(red.served).0;
    assert!(given > 0);
    // The same model and the same keys: of another tenant they are something else.
    for other in [&blue, &green] {
        let (end, _) = other.read();
        assert_eq!((end.usable_blocks, end.failures.len()), (0, 8));
    }
    blue.put(2);
    green.put(3);
    for _ in 0..4 {
        red.expect(1);
        blue.expect(2);
        green.expect(3);
    }
    assert!(counts(&served).0 > given);
}
