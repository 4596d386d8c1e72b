//! Programs that are nodes of one cluster with one bucket behind them: of a chain one part is on the own disk, one with a peer, one in
//! the bucket alone; and a peer is killed in the middle of a read of what the bucket has too.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::s3;
use crate::scratch::Scratch;
use crate::served::Server;
use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_contract::api::{
    BlockOutcome, ContainsRequest, KvStore, Order, Placed, Presence, PutRequest, ReadEvent, ReadRequest,
    ReadStream,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::identity::Arrangement;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_server::state::auth::TokenHash;
use kvarts_wire::{convert, proto};

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 96;
const TENANTS: [&str; 3] = ["a", "b", "c"];
const GROUP: Group = Group(0);
const WHOLE: Coordinate = Coordinate::Replicated;
const TIMEOUT: Duration = Duration::from_secs(90);

/// Where a block is at the beginning: of three that follow each other one here, one with the peer, one in the bucket.
fn part(of: usize) -> Vec<usize> {
    (0..BLOCKS).filter(|block| block % 3 == of).collect()
}

fn key(block: usize) -> BlockKey {
    BlockKey([block as u8; 32])
}

/// Tenants have other bytes under the same keys.
fn content(tenant: usize, block: usize) -> Vec<u8> {
    let word = |at: usize| ((block + 1) * 0x9e37 + (tenant + 1) * 0x51d + at / 8 * 0x85eb) as u8;
    (0..BLOCK).map(word).collect()
}

fn configuration(more: &str) -> String {
    let tenant = |name: &&str| {
        let hash = TokenHash::of(name);
        let rights = "rights = ['read', 'write', 'admin']";
        format!("[[tenants]]\nname = '{name}'\n[[tokens]]\ntenant = '{name}'\n{rights}\nhash = '{hash}'\n")
    };
    more.to_owned() + &TENANTS.iter().map(tenant).collect::<String>()
}

fn scratch(name: &str, more: &str) -> Scratch {
    let scratch = Scratch::new(name);
    std::fs::write(scratch.0.join("kvarts.toml"), configuration(more)).unwrap();
    scratch
}

const ARGUMENTS: [&str; 2] = ["--config", "kvarts.toml"];

/// A tenant at a node.
struct At {
    client: Client,
    tenant: usize,
    namespace: NamespaceId,
}

impl At {
    fn new(server: &Server, tenant: usize, via: Via) -> Self {
        let place = match via {
            Via::Local => format!("unix:{}", server.path(server.place("socket")).display()),
            _ => format!("http://{}", server.place("grpc")),
        };
        let token = Some(TENANTS[tenant].to_owned());
        let client = Client::connect(&ConnectOptions { via, token, ..ConnectOptions::to(place) }).unwrap();
        let geometry = Geometry::opaque(BLOCK as u64).unwrap();
        let arrangement = Arrangement::new("test", "flat", "1");
        let identity = Identity::new("pages", "1", "bf16", arrangement, &geometry, 16);
        let namespace = client.register(&identity, &geometry).unwrap();
        Self { client, tenant, namespace }
    }

    fn put(&self, blocks: &[usize]) {
        let (buf, from) = memory(blocks.len());
        for (at, block) in blocks.iter().enumerate() {
            buf.copy_in(at * BLOCK, &content(self.tenant, *block));
        }
        let keys = blocks.iter().map(|block| key(*block)).collect();
        let put = PutRequest::new(self.namespace, GROUP, WHOLE, keys, from);
        let outcomes = block_on(self.client.put(put)).unwrap().unwrap().outcomes;
        assert!(outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored), "{outcomes:?}");
    }

    fn begin(&self, order: Order) -> (SharedBuf, ReadStream) {
        let (buf, into) = memory(BLOCKS);
        let keys = (0..BLOCKS).map(key).collect();
        let request = ReadRequest { order, ..ReadRequest::new(self.namespace, GROUP, WHOLE, keys, into) };
        (buf, self.client.read(request).unwrap())
    }

    /// A read ends whole and right; `after` is called when something was announced.
    fn expect(&self, (buf, stream): (SharedBuf, ReadStream), mut after: impl FnMut()) {
        let end = loop {
            match stream.next_blocking() {
                ReadEvent::End(end) => break end,
                _ => after(),
            }
        };
        assert_eq!((end.usable_blocks as usize, &end.failures[..]), (BLOCKS, &[][..]), "{}", self.tenant);
        let mut found = vec![0; BLOCK];
        for block in 0..BLOCKS {
            buf.copy_out(block * BLOCK, &mut found);
            assert!(found == content(self.tenant, block), "block {block} of {}", TENANTS[self.tenant]);
        }
    }

    fn here(&self) -> usize {
        let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
        let namespace = self.namespace;
        let request =
            ContainsRequest { namespace, group: GROUP, coordinate: WHOLE, keys: &keys, lease: None };
        let presence = self.client.contains(&request).unwrap().presence;
        presence.iter().filter(|one| **one == Presence::Here).count()
    }

    /// Waits until this node knows of a copy of each of these blocks.
    fn until_known(&self, blocks: &[usize]) {
        let keys: Vec<BlockKey> = blocks.iter().map(|block| key(*block)).collect();
        until("a copy of each is known", || {
            let asked = proto::LookupRequest {
                namespace: self.namespace.as_bytes().to_vec().into(),
                column: Some(convert::wire_column(GROUP, WHOLE)),
                keys: convert::key_bytes(&keys),
            };
            let reply = self.client.locate(asked).unwrap();
            let (mut left, mut known) = (&reply.copies[..], true);
            while let Some((count, rest)) = left.split_first() {
                known &= *count == 1;
                left = &rest[usize::from(*count) * 2..];
            }
            known
        });
    }
}

fn memory(blocks: usize) -> (SharedBuf, Placed) {
    let buf = SharedBuf::new(&Region::anonymous(BLOCK * blocks).unwrap(), 0, BLOCK * blocks).unwrap();
    let shape = BlockShape::opaque(BLOCK as u64).unwrap();
    (buf.clone(), Placed::blocks(&shape, buf, blocks as u32).unwrap())
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn metric(server: &Server, name: &str) -> u64 {
    let metrics = server.metrics();
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

/// Bytes that a node has read from others.
fn from_others(at: &At) -> u64 {
    let status = at.client.cluster_status().unwrap();
    status.nodes.iter().filter(|node| !node.is_me).map(|node| node.read_bytes).sum()
}

/// Has these blocks of each tenant pushed into the bucket by a server that is gone then.
fn fill(name: &str, moto: &s3::Server, blocks: &[usize]) {
    let donor = Server::start(scratch(&format!("{name}-donor"), ""), &ARGUMENTS);
    (0..TENANTS.len()).for_each(|tenant| At::new(&donor, tenant, Via::Grpc).put(blocks));
    let store = donor.path("kvarts-data").display().to_string();
    let push = ["cold", "push", &store, "--live", "--all", "--bucket", "s3://blocks/tier"];
    let (code, out, error) = donor.kvarts_with(&push, &moto.environment());
    assert_eq!(code, 0, "{out}{error}");
}

/// Three nodes that reach each other, with a bucket behind each.
fn cluster(name: &str, ground: &Path, moto: &s3::Server, more: &str) -> Vec<Server> {
    let ids = (1u8..=3).map(|number| {
        let alone = Server::start(scratch(&format!("{name}-{number}"), ""), &ARGUMENTS);
        let store = At::new(&alone, 0, Via::Grpc).client.stats().unwrap().store;
        (alone, store.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    });
    let (mut nodes, ids): (Vec<Server>, Vec<String>) = ids.unzip();
    let [.., high, low] = std::process::id().to_be_bytes();
    let base = if name.ends_with('1') { 220 } else { 224 };
    let member = |(number, id): (u8, &String)| {
        format!("[[node]]\nid = \"{id}\"\naddress = \"127.{}.{high}.{low}:7440\"\n", base + number)
    };
    let members = "epoch = 1\n".to_owned() + &(1..).zip(&ids).map(member).collect::<String>();
    let file = ground.join("members.toml");
    std::fs::write(&file, members).unwrap();
    let secret = ground.join("secret");
    std::fs::write(&secret, [7; 32]).unwrap();
    let tier = "bucket = 's3://blocks/tier'\nrefresh = 1\nmemory = '128 MiB'\nspill = 'off'\n";
    let file = configuration(&format!(
        // What is read here is to come from the others, however often.
        "[cluster]\nmembers = '{}'\nsecret = '{}'\nhot_reads = 0\n{more}[cold]\n{tier}",
        file.display(),
        secret.display()
    ));
    for node in &mut nodes {
        std::fs::write(node.path("kvarts.toml"), &file).unwrap();
        node.start_again_with(&ARGUMENTS, &moto.environment());
    }
    for node in &nodes {
        let at = At::new(node, 0, Via::Grpc);
        until("all nodes are reached", || {
            at.client.cluster_status().unwrap().nodes.iter().all(|node| node.is_reachable)
        });
    }
    nodes
}

#[test]
fn one_read_has_blocks_of_the_own_disk_of_a_peer_and_of_the_bucket() {
    let Some(moto) = s3::Server::start() else { return };
    let ground = Scratch::new("cold-cluster-ground-1");
    let (own, there, cold) = (part(0), part(1), part(2));
    fill("cold-cluster-1", &moto, &cold);
    let nodes = cluster("cold-cluster-1", &ground.0, &moto, "");
    for tenant in 0..TENANTS.len() {
        At::new(&nodes[0], tenant, Via::Grpc).put(&own);
        At::new(&nodes[1], tenant, Via::Grpc).put(&there);
    }
    let ways = [(Via::Grpc, Order::Blocks), (Via::Local, Order::Layers), (Via::Local, Order::Blocks)];
    let each = (BLOCKS / 3 * BLOCK) as u64;
    for (tenant, (via, order)) in ways.into_iter().enumerate() {
        let at = At::new(&nodes[0], tenant, via);
        At::new(&nodes[0], tenant, Via::Grpc).until_known(&there);
        assert_eq!(at.here(), own.len(), "before the read");
        at.expect(at.begin(order), || {});
        let so_far = (tenant as u64 + 1) * each;
        until("what came from the bucket is stored", || at.here() == own.len() + cold.len());
        assert_eq!(metric(&nodes[0], "kvarts_cold_restored_bytes_total"), so_far, "of the bucket");
        let at_nodes = At::new(&nodes[0], tenant, Via::Grpc);
        assert_eq!(from_others(&at_nodes), so_far, "of the peer");
        for name in ["not_from_nodes_blocks", "lost_blocks", "over_read_bytes"] {
            assert_eq!(metric(&nodes[0], &format!("kvarts_cold_{name}_total")), 0, "{name}");
        }
    }
    // A second read of each asks the bucket for nothing.
    for tenant in 0..TENANTS.len() {
        let at = At::new(&nodes[0], tenant, Via::Grpc);
        at.expect(at.begin(Order::Layers), || {});
    }
    assert_eq!(metric(&nodes[0], "kvarts_cold_restored_bytes_total"), 3 * each);
    // The third node has no block of its own; peers have all of them, so it asks the bucket for nothing.
    for tenant in 0..TENANTS.len() {
        let at = At::new(&nodes[2], tenant, Via::Grpc);
        at.until_known(&(0..BLOCKS).collect::<Vec<_>>());
        at.expect(at.begin(Order::Blocks), || {});
    }
    assert_eq!(metric(&nodes[2], "kvarts_cold_restored_bytes_total"), 0);
}

#[test]
fn a_peer_that_is_killed_in_the_middle_of_a_read_costs_nothing_that_the_bucket_has() {
    let Some(moto) = s3::Server::start() else { return };
    let ground = Scratch::new("cold-cluster-ground-2");
    let all: Vec<usize> = (0..BLOCKS).collect();
    fill("cold-cluster-2", &moto, &all);
    // So slow that there is a middle of a read.
    let mut nodes = cluster("cold-cluster-2", &ground.0, &moto, "serve_rate = '8 MiB'\n");
    for tenant in 0..TENANTS.len() {
        At::new(&nodes[1], tenant, Via::Grpc).put(&all);
    }
    let ats: Vec<At> = (0..TENANTS.len()).map(|tenant| At::new(&nodes[0], tenant, Via::Grpc)).collect();
    ats.iter().for_each(|at| at.until_known(&all));
    let dying = nodes.remove(1);
    let mut dying = Some(dying);
    let reads: Vec<_> = ats.iter().map(|at| at.begin(Order::Blocks)).collect();
    let mut announced = 0;
    for (at, read) in ats.iter().zip(reads) {
        at.expect(read, || {
            announced += 1;
            if announced == 8 {
                dying.take().unwrap().end();
            }
        });
    }
    assert!(dying.is_none() && metric(&nodes[0], "kvarts_cold_not_from_nodes_blocks_total") > 0);
    assert_eq!(metric(&nodes[0], "kvarts_cold_lost_blocks_total"), 0);
    ats.iter().for_each(|at| at.expect(at.begin(Order::Layers), || {}));
}
