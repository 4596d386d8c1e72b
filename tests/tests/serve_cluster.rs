//! Servers that are nodes of one cluster: what is put into any of them is read from every one, and each of them is a store as one
//! that stands alone.
#![allow(clippy::disallowed_methods, reason = "real servers stand outside the simulation")]

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::served::{Beside, NOT_AMONG_NODES, Served};
use kvarts_client::Client;
use kvarts_client::session::{Session, SessionTerms};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, KvStore, LeaseTerms, MatchRequest, Order, PlanTerms, Presence, PutRequest,
    ReadRequest,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::error::{Kind, Reason};
use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_layout::{BlockKey, Coordinate, Group, Layout, Requirements};
use kvarts_planner::cost::{Sample, Times};
use kvarts_planner::plan::Source;
use kvarts_tests::conformance::{Desk, all, pages};
use kvarts_tests::fixture::{self, BLOCK_TOKENS};
use kvarts_tests::stage::Scratch;
use kvarts_wire::{convert, proto};
use proto::chain_reply::What;
use proto::chain_request::Ask;
use proto::route_reply::candidate::Action;

/// Clusters of this process so far.
static CLUSTERS: AtomicU8 = AtomicU8::new(0);

/// Nodes of one cluster, whose members a file names.
struct Cluster {
    nodes: Vec<Served>,
    _scratch: Scratch,
}

impl Cluster {
    /// A cluster of `count` nodes.
    fn start(name: &str, count: usize) -> Self {
        Self::start_with(name, count, "", None)
    }

    /// The same; `file` is what else stands in their configuration, `token` an administrator's.
    fn start_with(name: &str, count: usize, file: &str, token: Option<&str>) -> Self {
        Self::start_as(name, count, "", (file, token))
    }

    /// The same; `of_cluster` is what else is set of the cluster.
    fn start_as(name: &str, count: usize, of_cluster: &str, (file, token): (&str, Option<&str>)) -> Self {
        let scratch = Scratch::new(&format!("{name}-members"));
        let mut nodes: Vec<Served> =
            (0..count).map(|n| Served::start(&format!("{name}-{n}"), file)).collect();
        let mut members = "epoch = 1\n".to_owned();
        let cluster = CLUSTERS.fetch_add(1, Ordering::Relaxed);
        for (number, node) in (1u8..).zip(&nodes) {
            // An address of this process alone: a port that no connection takes for itself.
            let [.., high, low] = std::process::id().to_be_bytes();
            let address = format!("127.{}.{high}.{low}:7400", cluster * 8 + number);
            let id = node.daemon().state().engine.stats().store;
            members += &format!("[[node]]\nid = \"{id}\"\naddress = \"{address}\"\n");
        }
        std::fs::create_dir_all(scratch.path()).unwrap();
        let path = scratch.path().join("members.toml");
        std::fs::write(&path, members).unwrap();
        // Where clients need tokens nodes need a secret.
        let secret = scratch.path().join("secret");
        std::fs::write(&secret, [7; 32]).unwrap();
        let (path, secret) = (path.display(), secret.display());
        let file = format!("[cluster]\nmembers = '{path}'\nsecret = '{secret}'\n{of_cluster}{file}");
        nodes.iter_mut().for_each(|node| node.restart_with(&file));
        let cluster = Self { nodes, _scratch: scratch };
        cluster.until_reachable(token);
        cluster
    }

    fn client(&self, node: usize) -> Client {
        self.nodes[node].client(None)
    }

    fn until_reachable(&self, token: Option<&str>) {
        let start = Instant::now();
        while !(0..self.nodes.len()).all(|n| {
            self.nodes[n].client(token).cluster_status().unwrap().nodes.iter().all(|node| node.is_reachable)
        }) {
            assert!(start.elapsed() < Duration::from_secs(30), "not all nodes reach each other");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// How many copies of each block a node knows of.
fn copies(client: &Client, desk: &Desk<'_>, keys: &[BlockKey]) -> Vec<usize> {
    let request = desk.read_request(pages(), keys);
    let reply = client.locate(proto::LookupRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(request.group, request.coordinate)),
        keys: convert::key_bytes(keys),
    });
    let reply = reply.unwrap();
    let (mut left, mut found) = (&reply.copies[..], Vec::new());
    while let Some((count, rest)) = left.split_first() {
        found.push(usize::from(*count));
        left = &rest[usize::from(*count) * 2..];
    }
    found
}

fn until_known(client: &Client, desk: &Desk<'_>, keys: &[BlockKey], count: usize) {
    let start = Instant::now();
    loop {
        let found = copies(client, desk, keys);
        if found.iter().all(|found| *found == count) {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{count} copies of each are wanted: {found:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

const COLUMN: fn() -> (Group, Coordinate) = pages;

#[test]
fn a_block_of_any_node_is_read_on_every_node_over_grpc_and_over_the_local_path() {
    let cluster = Cluster::start("cluster-any", 3);
    let stages: Vec<Beside> = (0..3).map(|n| Beside(cluster.client(n))).collect();
    let desks: Vec<Desk<'_>> = stages.iter().map(|stage| Desk::new(stage, "any node")).collect();
    let local: Vec<Beside> = (0..3).map(|n| Beside(cluster.nodes[n].local(None))).collect();
    let local: Vec<Desk<'_>> = local.iter().map(|stage| Desk::new(stage, "any node")).collect();
    for (n, desk) in (0u64..).zip(&desks) {
        // Of each node some blocks, and in one read blocks of all of them.
        desk.store(COLUMN(), &desk.keys(n * 8..n * 8 + 8), 1, Layout::LayerBlock);
    }
    let keys = desks[0].keys(0..24);
    for n in 0..3 {
        until_known(&stages[n].0, &desks[n], &keys, 1);
        for desk in [&desks[n], &local[n]] {
            desk.expect(COLUMN(), &keys, 1);
            let by_layers = ReadRequest { order: Order::Layers, ..desk.read_request(COLUMN(), &keys) };
            let (_, end) = desk.read(&by_layers);
            assert_eq!((end.usable_blocks, end.failures), (24, Vec::new()));
            desk.expect_bytes(&by_layers, &(0..24).collect::<Vec<_>>(), 1);
        }
    }
    let status = cluster.client(0).cluster_status().unwrap();
    assert!(status.nodes.iter().filter(|node| !node.is_me).all(|node| node.read_bytes > 0), "{status:?}");
}

/// What a look-up of single blocks says, at once and by a ticket.
fn look(client: &Client, desk: &Desk<'_>, keys: &[BlockKey], lease: Option<LeaseTerms>) -> Vec<Presence> {
    let ReadRequest { namespace, group, coordinate, .. } = desk.read_request(COLUMN(), keys);
    let request = ContainsRequest { namespace, group, coordinate, keys, lease };
    let at_once = client.contains(&request).unwrap().presence;
    let later = block_on(client.look_up(&request, None)).unwrap().unwrap().presence;
    assert_eq!(at_once, later);
    at_once
}

#[test]
fn a_look_up_finds_what_other_nodes_have_if_the_client_wants_that_and_holds_nothing() {
    let cluster = Cluster::start("cluster-find", 3);
    let stages: Vec<Beside> = (0..3).map(|n| Beside(cluster.client(n))).collect();
    let desks: Vec<Desk<'_>> = stages.iter().map(|stage| Desk::new(stage, "find")).collect();
    let keys = desks[0].keys(0..13);
    for (n, desk) in (0usize..).zip(&desks) {
        desk.store(COLUMN(), &keys[n * 4..n * 4 + 4], 1, Layout::LayerBlock);
    }
    let (asked, desk) = (&cluster.nodes[2], &desks[2]);
    until_known(&stages[2].0, desk, &keys[..12], 1);
    let [own, all] = [8..12, 0..12].map(|here: std::ops::Range<usize>| {
        let one = |key| if here.contains(&key) { Presence::Here } else { Presence::Absent };
        (0..13).map(one).collect::<Vec<_>>()
    });
    let terms = LeaseTerms { hold: Duration::from_secs(5), cap_bytes: 1 << 30, tenant: 0 };
    let (group, coordinate) = COLUMN();
    let need =
        Requirement { group, coordinates: vec![coordinate], need: Need::All, absence: Absence::Required };
    let requirements = Requirements::new(BLOCK_TOKENS, vec![need]).unwrap();
    let matching = MatchRequest {
        namespace: desk.namespace,
        keys: &keys,
        requirements: &requirements,
        recompute_tokens_max: u64::MAX,
        lease: None,
        plan: None,
    };
    // Two seconds for a token: everything is sooner loaded.
    let samples = [1, 1000].map(|new| Sample { cached: 0, new, ms: new as f64 * 2e3 });
    let times = Times::new(samples.to_vec(), None).unwrap();
    let prompt_tokens = 13 * u64::from(BLOCK_TOKENS);
    let block_bytes = fixture::shape(group, coordinate).block_bytes();
    // What is known of counts as soon as its node can be read.
    let (start, among) = (Instant::now(), asked.client_as(false, true));
    while among.match_prefix(&matching).unwrap().usable.longest.blocks < 12 {
        assert!(start.elapsed() < Duration::from_secs(30), "the other nodes are not read");
        std::thread::sleep(Duration::from_millis(10));
    }
    for is_local in [false, true] {
        let [alone, among] = [false, true].map(|of_cluster| asked.client_as(is_local, of_cluster));
        assert_eq!(look(&alone, desk, &keys, None), own, "local: {is_local}");
        assert_eq!(look(&among, desk, &keys, None), all, "local: {is_local}");
        // What is to be held must be here.
        assert_eq!(look(&among, desk, &keys, Some(terms)), own, "local: {is_local}");
        // A match counts what it may count, and what is here is held: the other blocks are not.
        let leased = MatchRequest { lease: Some(terms), ..matching.clone() };
        assert_eq!(alone.match_prefix(&leased).unwrap().usable.longest.blocks, 0, "local: {is_local}");
        assert_eq!(among.match_prefix(&leased).unwrap().usable.longest.blocks, 12, "local: {is_local}");
        // Or it says of the prompt what is here, and what is with the other nodes.
        let found = among.match_beyond(&matching).unwrap();
        let together = found.in_cluster.expect("the server belongs to a cluster");
        assert_eq!((found.own.usable.longest.blocks, together.unasked), (0, 0), "local: {is_local}");
        assert_eq!(together.longest.unwrap().blocks, 12, "local: {is_local}");
        // A plan knows where each of them is: here, or with another node.
        let terms = PlanTerms::new(prompt_tokens, &times);
        let planning = MatchRequest { plan: Some(terms), ..matching.clone() };
        let plan = |client: &Client| client.match_prefix(&planning).unwrap().plan.unwrap().plan;
        assert_eq!(plan(&alone).boundary_blocks, 0, "local: {is_local}");
        let together = plan(&among);
        assert_eq!((together.boundary_blocks, together.recompute_tokens), (12, 0), "local: {is_local}");
        let from = |source, blocks| {
            assert_eq!(together.bytes_from(source), blocks * block_bytes, "local: {is_local}: {together:?}");
        };
        from(Source::Disk, 4);
        from(Source::Peer, 8);
        // And it can be read.
        let stage = Beside(among);
        Desk::new(&stage, "find").expect(COLUMN(), &keys[..12], 1);
    }
}

#[test]
fn blocks_of_a_node_that_is_gone_are_misses_and_the_others_are_not() {
    let mut cluster = Cluster::start("cluster-gone", 3);
    let stages: Vec<Beside> = (0..3).map(|n| Beside(cluster.client(n))).collect();
    let desks: Vec<Desk<'_>> = stages.iter().map(|stage| Desk::new(stage, "gone")).collect();
    for (n, desk) in (0u64..).zip(&desks) {
        desk.store(COLUMN(), &desk.keys(n * 4..n * 4 + 4), 1, Layout::LayerBlock);
    }
    let keys = desks[0].keys(0..12);
    until_known(&stages[0].0, &desks[0], &keys, 1);
    desks[0].expect(COLUMN(), &keys, 1);
    cluster.nodes[2].stop();
    let request = ReadRequest { order: Order::Blocks, ..desks[0].read_request(COLUMN(), &keys) };
    let (_, end) = desks[0].read(&request);
    let lost: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
    assert_eq!(lost, [8, 9, 10, 11], "{:?}", end.failures);
    let kinds: Vec<Kind> = end.failures.iter().map(|(_, reason)| reason.kind()).collect();
    assert!(kinds.iter().all(|kind| matches!(kind, Kind::Miss | Kind::Retry)), "{:?}", end.failures);
    desks[0].expect_bytes(&request, &(0..8).collect::<Vec<_>>(), 1);
}

#[test]
fn with_single_a_put_of_what_another_node_has_is_acknowledged_and_not_written() {
    let mut cluster = Cluster::start_as("cluster-single", 2, "put = 'single'\n", ("", None));
    let (a, b) = (Beside(cluster.client(0)), Beside(cluster.client(1)));
    let local = Beside(cluster.nodes[1].local(None));
    let desk = Desk::new(&a, "single");
    let keys = desk.keys(0..12);
    desk.store(COLUMN(), &keys[2..6], 1, Layout::FullBlock);
    for (stage, keys, held, there) in [(&b, &keys[..8], 2..6, 0..0), (&local, &keys[4..12], 0..2, 2..4)] {
        let desk = Desk::new(stage, "single");
        until_known(&stage.0, &desk, &keys[held.clone()], 1);
        // Bytes of another production: who reads must not meet them under the keys that were held.
        let outcomes = desk.outcomes(desk.request(COLUMN(), keys, 2));
        for (place, outcome) in outcomes.iter().enumerate() {
            let expected = match place {
                place if held.contains(&place) => BlockOutcome::HeldElsewhere,
                place if there.contains(&place) => BlockOutcome::AlreadyThere,
                _ => BlockOutcome::Stored,
            };
            assert_eq!(*outcome, expected, "block {place}: {outcomes:?}");
        }
    }
    let desk = Desk::new(&b, "single");
    until_known(&b.0, &desk, &keys, 1);
    desk.expect(COLUMN(), &keys[2..6], 1);
    desk.expect(COLUMN(), &keys[6..], 2);
    desk.expect(COLUMN(), &keys[..2], 2);
    // What only the other node had is stored here once that one is gone.
    cluster.nodes[0].stop();
    let start = Instant::now();
    while desk.outcomes(desk.request(COLUMN(), &keys[2..6], 3)) != vec![BlockOutcome::Stored; 4] {
        assert!(start.elapsed() < Duration::from_secs(30), "still held by a node that is gone");
    }
    desk.expect(COLUMN(), &keys[2..6], 3);
}

#[test]
fn with_single_the_owner_of_a_chain_stores_and_what_others_take_for_it_comes_to_it() {
    let file = "put = 'single'\ncopy_hold = 3\n";
    let cluster = Cluster::start_as("cluster-owner", 2, file, ("", None));
    let (a, b) = (Beside(cluster.client(0)), Beside(cluster.client(1)));
    let local = Beside(cluster.nodes[1].local(None));
    let desks = [&a, &b, &local].map(|stage| Desk::new(stage, "owner"));
    let keys = desks[0].keys(0..12);
    let request = desks[0].read_request(COLUMN(), &keys);
    let chain = |ask, token: (u64, u64)| proto::ChainRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(request.group, request.coordinate)),
        key: convert::key_bytes(&keys[..1]),
        ask: Some(ask),
        token_epoch: token.0,
        token_number: token.1,
        ..proto::ChainRequest::default()
    };
    let start = Instant::now();
    while cluster.client(0).chain(chain(Ask::ClaimMs(60_000), (0, 0))).unwrap().what() != What::Granted {
        assert!(start.elapsed() < Duration::from_secs(100), "nobody owns the chain");
        std::thread::sleep(Duration::from_millis(100));
    }
    // What the owner puts goes last from then on.
    let put =
        |desk: &Desk<'_>, keys: &[BlockKey], producer| desk.outcomes(desk.request(COLUMN(), keys, producer));
    assert_eq!(put(&desks[0], &keys[..2], 1), vec![BlockOutcome::Stored; 2]);
    let engine = cluster.nodes[0].daemon().state().engine.clone();
    assert_eq!(engine.favoured(request.namespace, COLUMN(), &keys[..3]).unwrap(), [true, true, false]);
    until_known(&b.0, &desks[1], &keys[..2], 1);
    // What the owner has is stored only where it does not answer in time, as on a busy machine.
    let outcomes = put(&desks[1], &keys[..8], 2);
    let is_put =
        |outcome: &BlockOutcome| matches!(outcome, BlockOutcome::HeldElsewhere | BlockOutcome::Stored);
    assert!(outcomes[..2].iter().all(is_put), "{outcomes:?}");
    assert_eq!(outcomes[2..], vec![BlockOutcome::Stored; 6], "for a time");
    assert_eq!(put(&desks[0], &keys[..4], 1).len(), 4);
    // What came to the owner goes last there as well.
    let own = || engine.favoured(request.namespace, COLUMN(), &keys[..8]).unwrap();
    let start = Instant::now();
    while own() != [true; 8] {
        assert!(start.elapsed() < Duration::from_secs(30), "the owner lacks blocks: {:?}", own());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        put(&desks[2], &keys[8..], 2),
        vec![BlockOutcome::Stored; 4],
        "it is not known of which chain"
    );
    // Of the chain one copy is left, the owner's.
    until_known(&b.0, &desks[1], &keys[..8], 1);
    let on_owner = |keys: &[BlockKey]| copy(&a.0, &desks[0], keys).here;
    assert_eq!((on_owner(&keys[..8]), cluster.client(0).cluster_status().unwrap().epoch), (8, 1));
    assert_eq!(put(&desks[2], &keys[..8], 3), vec![BlockOutcome::HeldElsewhere; 8]);
    desks[1].expect(COLUMN(), &keys[4..8], 2);
}

#[test]
fn a_session_that_is_handed_over_goes_on_under_its_number_and_the_owner_before_is_fenced() {
    let cluster = Cluster::start("cluster-session", 2);
    let (a, b) = (Beside(cluster.client(0)), Beside(cluster.client(1)));
    let desks = [&a, &b].map(|stage| Desk::new(stage, "session"));
    let keys = desks[0].keys(0..4);
    desks[0].store(COLUMN(), &keys, 1, Layout::LayerBlock);
    let request = desks[0].read_request(COLUMN(), &keys);
    let namespace = request.namespace;
    let lease = Duration::from_secs(300);
    let open = |client| {
        let terms = SessionTerms { namespace, columns: vec![COLUMN()], shared_blocks: 1, lease };
        Session::open(client, terms, &keys[..2], None).unwrap()
    };
    let start = Instant::now();
    let (mut session, told) = loop {
        let (session, told) = open(&a.0);
        if told.is_owner {
            break (session, told);
        }
        session.close().unwrap();
        assert!(start.elapsed() < Duration::from_secs(100), "the chain has no owner: {told:?}");
        std::thread::sleep(Duration::from_millis(100));
    };
    let (id, before) = (session.id(), told.owner.unwrap());
    assert_eq!(told.held, 2);
    // Its own chain begins behind what is shared. Another node's session there is told who owns it.
    let (other, told) = open(&b.0);
    assert_eq!((told.is_owner, told.owner.map(|owner| owner.node)), (false, Some(before.node.clone())));
    other.close().unwrap();
    let ask = |client: &Client, ask| {
        let request = proto::ChainRequest {
            namespace: namespace.as_bytes().to_vec().into(),
            column: Some(convert::wire_column(request.group, request.coordinate)),
            key: convert::key_bytes(&keys[1..2]),
            ask: Some(ask),
            token_epoch: before.token_epoch,
            token_number: before.token_number,
            ..proto::ChainRequest::default()
        };
        client.chain(request).unwrap().what()
    };
    assert_eq!(ask(&a.0, Ask::Look(true)), What::Granted);
    let told = session.hand_over(&b.0).unwrap();
    let after = told.owner.unwrap();
    assert_eq!((session.id(), told.is_owner), (id, true));
    assert!((after.token_epoch, after.token_number) > (before.token_epoch, before.token_number));
    assert_ne!(after.node, before.node);
    assert_eq!(ask(&a.0, Ask::RenewMs(60_000)), What::Owned);
    assert_eq!(cluster.nodes[0].daemon().state().sessions.table().count(), (0, 0, 0));
    assert!(session.extend(&keys[2..], None).unwrap().is_owner);
    assert!(session.close().unwrap());
    assert_eq!(ask(&a.0, Ask::Look(true)), What::Nobody);
}

#[test]
fn with_keep_a_put_of_what_another_node_has_is_stored_for_a_time() {
    let cluster = Cluster::start_as("cluster-keep", 2, "put = 'keep'\ncopy_hold = 2\n", ("", None));
    let (a, b) = (Beside(cluster.client(0)), Beside(cluster.client(1)));
    let desks = [Desk::new(&a, "keep"), Desk::new(&b, "keep")];
    let keys = desks[0].keys(0..8);
    desks[0].store(COLUMN(), &keys[..4], 1, Layout::FullBlock);
    until_known(&b.0, &desks[1], &keys[..4], 1);
    assert_eq!(desks[1].outcomes(desks[1].request(COLUMN(), &keys, 2)), vec![BlockOutcome::Stored; 8]);
    until_known(&a.0, &desks[0], &keys[..4], 2);
    // The copies go, and blocks without another holder stay.
    until_known(&a.0, &desks[0], &keys, 1);
    desks[1].expect(COLUMN(), &keys[..4], 1);
    desks[1].expect(COLUMN(), &keys[4..], 2);
}

#[test]
fn with_keep_a_put_that_lives_shorter_than_copies_do_goes_by_its_own_time() {
    let cluster = Cluster::start_as("cluster-keep-short", 2, "put = 'keep'\n", ("", None));
    let (a, b) = (Beside(cluster.client(0)), Beside(cluster.client(1)));
    let desks = [Desk::new(&a, "short"), Desk::new(&b, "short")];
    let keys = desks[0].keys(0..4);
    desks[0].store(COLUMN(), &keys, 1, Layout::FullBlock);
    until_known(&b.0, &desks[1], &keys, 1);
    let request =
        PutRequest { expires_after: Some(Duration::from_secs(2)), ..desks[1].request(COLUMN(), &keys, 2) };
    assert_eq!(desks[1].outcomes(request), vec![BlockOutcome::Stored; 4]);
    until_known(&a.0, &desks[0], &keys, 2);
    // Copies live for ten minutes.
    until_known(&a.0, &desks[0], &keys, 1);
}

/// Has a node copy these blocks of others.
fn copy(client: &Client, desk: &Desk<'_>, keys: &[BlockKey]) -> proto::ReplicateReply {
    let request = desk.read_request(COLUMN(), keys);
    let asked = proto::ReplicateRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(request.group, request.coordinate)),
        keys: convert::key_bytes(keys),
        expires_after_ms: 0,
    };
    client.replicate(asked).unwrap()
}

#[test]
fn a_node_that_dies_in_the_middle_of_a_read_costs_nothing_that_another_has() {
    let mut cluster = Cluster::start("cluster-dies", 3);
    let stages: Vec<Beside> = (0..3).map(|n| Beside(cluster.client(n))).collect();
    let desks: Vec<Desk<'_>> = stages.iter().map(|stage| Desk::new(stage, "dies")).collect();
    let keys = desks[1].keys(0..256);
    for some in keys.chunks(64) {
        desks[1].store(COLUMN(), some, 1, Layout::LayerBlock);
    }
    until_known(&stages[2].0, &desks[2], &keys, 1);
    let copied = copy(&stages[2].0, &desks[2], &keys);
    assert_eq!((copied.stored, copied.missing), (256, 0));
    // The copies are of the same production, and count as copies.
    until_known(&stages[0].0, &desks[0], &keys, 2);
    assert_eq!(copy(&stages[2].0, &desks[2], &keys).here, 256);
    let dying = cluster.nodes.remove(1);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(dying));
        for _ in 0..20 {
            desks[0].expect(COLUMN(), &keys, 1);
        }
    });
    desks[0].expect(COLUMN(), &keys, 1);
}

#[test]
fn damage_on_a_nodes_disk_is_never_served_to_another_and_is_found_there() {
    let cluster = Cluster::start("cluster-damage", 3);
    let stages: Vec<Beside> = (0..3).map(|n| Beside(cluster.client(n))).collect();
    let desks: Vec<Desk<'_>> = stages.iter().map(|stage| Desk::new(stage, "damage")).collect();
    let keys = desks[1].keys(0..8);
    desks[1].store(COLUMN(), &keys, 1, Layout::FullBlock);
    until_known(&stages[0].0, &desks[0], &keys, 1);
    flip(cluster.nodes[1].scratch.path(), &keys[3]);
    let request = ReadRequest { order: Order::Blocks, ..desks[0].read_request(COLUMN(), &keys) };
    let (_, end) = desks[0].read(&request);
    let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
    assert_eq!(failed, [3], "{:?}", end.failures);
    desks[0].expect_bytes(&request, &[0, 1, 2, 4, 5, 6, 7], 1);
    // The node that has it looks at its own disk, takes the block out of service, and says so to the others.
    until_known(&stages[0].0, &desks[0], &keys[3..4], 0);
    until_known(&stages[0].0, &desks[0], &keys[..3], 1);
}

/// Flips a bit of a block on disk.
fn flip(directory: &std::path::Path, key: &BlockKey) {
    let (group, coordinate) = COLUMN();
    let shape = fixture::shape(group, coordinate);
    let chunks = fixture::content(key, group, coordinate, 1, &shape);
    let needle = &chunks[0][..chunks[0].len().min(48)];
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let Ok(mut bytes) = std::fs::read(&path) else { continue };
        if let Some(at) = bytes.windows(needle.len()).position(|window| window == needle) {
            bytes[at] ^= 1;
            use std::os::unix::fs::FileExt;
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
            file.sync_all().unwrap();
            return;
        }
    }
    panic!("the block is not on disk");
}

#[test]
fn a_tenant_reads_nothing_of_another_ones_through_another_node() {
    let token = |tenant: &str, token: &str| {
        let hash = kvarts_server::state::auth::TokenHash::of(token);
        format!("[[tokens]]\ntenant = '{tenant}'\nrights = ['read', 'write', 'admin']\nhash = '{hash}'\n")
    };
    let tenants = ["a", "b", "c"].map(|name| format!("[[tenants]]\nname = '{name}'\n") + &token(name, name));
    let cluster = Cluster::start_with("cluster-tenants", 2, &tenants.concat(), Some("a"));
    let of = |node: usize, tenant: &str| Beside(cluster.nodes[node].client(Some(tenant)));
    let among = |tenant| Beside(cluster.nodes[1].client_of_cluster(Some(tenant)));
    let (a, others) = (of(0, "a"), [among("b"), among("c")]);
    let desk = Desk::new(&a, "mine");
    let keys = desk.keys(0..4);
    desk.store(COLUMN(), &keys, 1, Layout::LayerBlock);
    let same = of(1, "a");
    let same_desk = Desk::new(&same, "mine");
    until_known(&same.0, &same_desk, &keys, 1);
    same_desk.expect(COLUMN(), &keys, 1);
    for other in &others {
        let desk = Desk::new(other, "mine");
        assert_eq!(copies(&other.0, &desk, &keys), [0; 4]);
        assert_eq!(look(&other.0, &desk, &keys, None), [Presence::Absent; 4]);
        let (_, end) = desk.read(&ReadRequest { order: Order::Blocks, ..desk.read_request(COLUMN(), &keys) });
        assert!(end.failures.iter().all(|(_, reason)| matches!(reason, Reason::NotHere(_))), "{end:?}");
        assert_eq!(end.failures.len(), 4);
    }
}

#[test]
fn a_node_of_three_conforms() {
    let cluster = Cluster::start("cluster-conforms", 3);
    let stage = Beside(cluster.client(1));
    let mut count = 0;
    for (name, case) in all().into_iter().filter(|(name, _)| !NOT_AMONG_NODES.contains(name)) {
        eprintln!("guarantee: {name}");
        case(&Desk::new(&stage, name));
        count += 1;
    }
    assert_eq!(count, all().len() - NOT_AMONG_NODES.len());
}

/// A question for a route of these blocks to engines beside two nodes, the first of which is busy for as long as is said.
fn routing(cluster: &Cluster, desk: &Desk<'_>, keys: &[BlockKey], busy_ms: f64) -> proto::RouteRequest {
    let (group, coordinate) = COLUMN();
    let need =
        Requirement { group, coordinates: vec![coordinate], need: Need::All, absence: Absence::Required };
    let requirements = Requirements::new(BLOCK_TOKENS, vec![need]).unwrap();
    let node = |at: usize| proto::route_request::Node {
        node: at as u32 + 1,
        decodes: true,
        queue_ms: if at == 0 { busy_ms } else { 0.0 },
        store: cluster.nodes[at].daemon().state().engine.stats().store.0.to_vec().into(),
        ..proto::route_request::Node::default()
    };
    // Two seconds for a token: everything is sooner loaded.
    let samples = [1, 1000].map(|new| Sample { cached: 0, new, ms: new as f64 * 2e3 });
    proto::RouteRequest {
        prompt_tokens: keys.len() as u64 * u64::from(BLOCK_TOKENS) + 1,
        times: Some(kvarts_wire::plans::wire_times(&Times::new(samples.to_vec(), None).unwrap())),
        nodes: vec![node(0), node(1)],
        explain: true,
        prompt: Some(proto::route_request::Prompt {
            namespace: desk.namespace.as_bytes().to_vec().into(),
            keys: convert::key_bytes(keys),
            requirements: convert::wire_requirements(&requirements),
        }),
        ..proto::RouteRequest::default()
    }
}

#[test]
fn a_route_knows_which_node_has_how_much_of_a_prompt_and_says_what_it_does_not_know() {
    let cluster = Cluster::start("cluster-route", 2);
    let stages: Vec<Beside> = (0..2).map(|n| Beside(cluster.client(n))).collect();
    let desks: Vec<Desk<'_>> = stages.iter().map(|stage| Desk::new(stage, "route")).collect();
    let keys = desks[0].keys(0..8);
    desks[0].store(COLUMN(), &keys[..6], 1, Layout::LayerBlock);
    desks[1].store(COLUMN(), &keys[..2], 1, Layout::LayerBlock);
    (0..2).for_each(|n| until_known(&stages[n].0, &desks[n], &keys[..2], 2));
    (0..2).for_each(|n| until_known(&stages[n].0, &desks[n], &keys[2..6], 1));
    let block_tokens = u64::from(BLOCK_TOKENS);
    for asked in 0..2 {
        let route = |request| cluster.client(asked).route_filled(request).unwrap();
        let found = route(routing(&cluster, &desks[0], &keys, 0.0));
        let filled = found.filled.unwrap();
        let blocks: Vec<_> = filled.nodes.iter().map(|node| node.blocks).collect();
        assert_eq!((blocks, filled.unasked), (vec![Some(6), Some(2)], 0), "asked {asked}");
        assert_eq!(filled.here[..], cluster.nodes[asked].daemon().state().engine.stats().store.0);
        let owner = filled.owner.unwrap();
        assert_eq!((owner.node, owner.tokens, filled.owner_has_lease), (1, 6 * block_tokens, false));
        // Nothing was read yet, and the disks of another node are never known.
        assert!(filled.nodes[1 - asked].disk_is_assumed && filled.nodes[0].network_is_assumed);
        assert_eq!(filled.bucket_blocks, None);
        let best = &found.candidates[0];
        assert_eq!((best.node, best.cached_tokens), (1, 6 * block_tokens), "asked {asked}: {best:?}");
        // One that is busy for longer than its blocks spare is passed over; the other one fetches them.
        let found = route(routing(&cluster, &desks[0], &keys, 1e6));
        assert_eq!((found.candidates[0].node, found.candidates[0].cached_tokens), (2, 6 * block_tokens));
        // What the caller says wins.
        let mut told = routing(&cluster, &desks[0], &keys, 0.0);
        told.nodes[0].disk_tokens = Some(0);
        told.nodes[1].disk_tokens = Some(8 * block_tokens);
        let found = route(told);
        let owner = found.filled.unwrap().owner.unwrap();
        assert_eq!((owner.node, owner.tokens), (2, 8 * block_tokens));
        let from_disk = |one: &&proto::route_reply::Candidate| one.action() == Action::FromDisk;
        let from_disk: Vec<_> = found.candidates.iter().filter(from_disk).map(|one| one.node).collect();
        assert_eq!((from_disk, found.candidates[0].cached_tokens), (vec![2], 8 * block_tokens));
        // A store that is no member's has nothing that is known, and a model that is not the caller's is refused.
        let mut stranger = routing(&cluster, &desks[0], &keys, 0.0);
        stranger.nodes[0].store = vec![9; 16].into();
        let filled = route(stranger).filled.unwrap();
        assert_eq!((filled.nodes[0].blocks, filled.nodes[1].blocks), (None, Some(2)));
        assert_eq!(filled.nodes[0].trouble, "the node is not a member of this server's cluster");
        let mut unknown = routing(&cluster, &desks[0], &keys, 0.0);
        unknown.prompt.as_mut().unwrap().namespace = vec![9; 32].into();
        assert!(cluster.client(asked).route_filled(unknown).is_err());
    }
    as_engines_look_up(&cluster, &desks, &keys);
    owner_by_lease(&cluster, &desks, &keys);
}

/// A route that says nothing of a prompt's columns is of those that the latest match required.
fn as_engines_look_up(cluster: &Cluster, desks: &[Desk<'_>], keys: &[BlockKey]) {
    let blocks = |requirements: Vec<proto::Requirement>| -> Vec<Option<u32>> {
        let mut request = routing(cluster, &desks[0], keys, 0.0);
        request.prompt.as_mut().unwrap().requirements = requirements;
        let filled = cluster.client(0).route_filled(request).unwrap().filled.unwrap();
        filled.nodes.iter().map(|node| node.blocks).collect()
    };
    assert_eq!(blocks(Vec::new()), [Some(0), Some(0)], "nothing has said yet what engines need");
    let said = routing(cluster, &desks[0], keys, 0.0).prompt.unwrap().requirements;
    let requirements = convert::requirements(BLOCK_TOKENS, &said).unwrap();
    let matching = MatchRequest {
        namespace: desks[0].namespace,
        keys: &keys[..1],
        requirements: &requirements,
        recompute_tokens_max: 0,
        lease: None,
        plan: None,
    };
    cluster.client(0).match_prefix(&matching).unwrap();
    assert_eq!(blocks(Vec::new()), [Some(6), Some(2)]);
    assert_eq!(blocks(said), [Some(6), Some(2)]);
}

/// The node with the lease of a chain is its owner, also where another node has more of it.
fn owner_by_lease(cluster: &Cluster, desks: &[Desk<'_>], keys: &[BlockKey]) {
    let request = desks[0].read_request(COLUMN(), keys);
    let claim = proto::ChainRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(request.group, request.coordinate)),
        key: convert::key_bytes(&keys[..1]),
        ask: Some(Ask::ClaimMs(60_000)),
        ..proto::ChainRequest::default()
    };
    let start = Instant::now();
    while cluster.client(1).chain(claim.clone()).unwrap().what() != What::Granted {
        assert!(start.elapsed() < Duration::from_secs(100), "no node owns the chain");
        std::thread::sleep(Duration::from_millis(100));
    }
    let found = cluster.client(0).route_filled(routing(cluster, &desks[0], keys, 0.0)).unwrap();
    let filled = found.filled.unwrap();
    let owner = filled.owner.unwrap();
    assert_eq!((owner.node, owner.tokens), (2, 2 * u64::from(BLOCK_TOKENS)));
    assert!(
        filled.owner_has_lease
            && filled.leased_by[..] == routing(cluster, &desks[0], keys, 0.0).nodes[1].store[..]
    );
}
