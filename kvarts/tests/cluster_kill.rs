//! R34: three programs that are nodes of one cluster; one after the other is killed in the middle of a read from it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{
    BlockOutcome, KvStore, Order, Placed, PutRequest, ReadEvent, ReadRequest, ReadStream,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::error::Kind;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_wire::{convert, proto};

pub(crate) const BLOCK_BYTES: u64 = 64 << 10;
const BLOCKS: usize = 160;
/// Bytes a second that a node gives another one: so that there is a middle of a read.
const RATE: &str = "8 MiB";
/// At which each node gives it.
const LANE_PORT: u16 = 7441;
/// How often nodes are killed at most until a read of each was whole.
const ROUNDS: usize = 10;
pub(crate) const TIMEOUT: Duration = Duration::from_secs(90);

pub(crate) fn column() -> (Group, Coordinate) {
    (Group(0), Coordinate::Replicated)
}

/// Where the nodes are and what they share.
pub(crate) struct Ground(pub(crate) PathBuf);

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A node: its process, and a client of it.
pub(crate) struct Node {
    child: Child,
    pub(crate) client: Client,
}

impl Node {
    pub(crate) fn start(ground: &Path, number: u8, more: &[&str]) -> Self {
        let directory = ground.join(number.to_string());
        std::fs::create_dir_all(&directory).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.current_dir(&directory).args(["serve", "--listen-grpc", "127.0.0.1:0"]);
        command
            .args([
                "--listen-metrics",
                "none",
                "--budget",
                "64 MiB",
                "--memory",
                "64 MiB",
                "--segment",
                "1 MiB",
            ])
            .args(more);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let grpc = line.split_whitespace().find_map(|word| word.strip_prefix("grpc="));
        let grpc = grpc.unwrap_or_else(|| panic!("no place in {line:?}"));
        let client = Client::connect(&ConnectOptions::to(format!("http://{grpc}"))).unwrap();
        Self { child, client }
    }

    pub(crate) fn end(&mut self, signal: &str) {
        let killed = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        self.child.wait().unwrap();
    }

    pub(crate) fn until_whole(&self) {
        let start = Instant::now();
        while !self.client.cluster_status().unwrap().nodes.iter().all(|node| node.is_reachable) {
            assert!(start.elapsed() < TIMEOUT, "not all nodes are reached");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file of members that this number of nodes are, whose stores are made for it.
pub(crate) fn members(ground: &Path, count: u8, port: u16) -> PathBuf {
    let mut members = "epoch = 1\n".to_owned();
    for number in 1..=count {
        let mut alone = Node::start(ground, number, &[]);
        let store = alone.client.stats().unwrap().store;
        let id: String = store.iter().map(|byte| format!("{byte:02x}")).collect();
        // An address of this process alone, with a port that no connection takes for itself.
        let [.., high, low] = std::process::id().to_be_bytes();
        members +=
            &format!("[[node]]\nid = \"{id}\"\naddress = \"127.{}.{high}.{low}:{port}\"\n", 240 + number);
        alone.end("-TERM");
    }
    let file = ground.join("members.toml");
    std::fs::write(&file, members).unwrap();
    file
}

/// Three nodes that reach each other.
fn cluster(ground: &Path) -> ([Node; 3], Vec<String>) {
    let more = [
        "--cluster".to_owned(),
        members(ground, 3, 7440).display().to_string(),
        "--cluster-serve-rate".to_owned(),
        RATE.to_owned(),
        // What is read here is to come from the others, however often.
        "--cluster-hot-reads".to_owned(),
        "0".to_owned(),
        // A killed node comes back at the same port.
        "--cluster-lane-port".to_owned(),
        LANE_PORT.to_string(),
    ];
    let args: Vec<&str> = more.iter().map(String::as_str).collect();
    let nodes = [1, 2, 3].map(|number| Node::start(ground, number, &args));
    nodes.iter().for_each(Node::until_whole);
    let [.., high, low] = std::process::id().to_be_bytes();
    for node in 241..=243 {
        std::net::TcpStream::connect((std::net::Ipv4Addr::new(127, node, high, low), LANE_PORT)).unwrap();
    }
    (nodes, more.to_vec())
}

pub(crate) fn register(client: &Client) -> NamespaceId {
    let geometry = Geometry::opaque(BLOCK_BYTES).unwrap();
    let arrangement = Arrangement::new("test", "flat", "1");
    client.register(&Identity::new("pages", "1", "bf16", arrangement, &geometry, 16), &geometry).unwrap()
}

pub(crate) fn content(block: usize, into: &mut [u8]) {
    let word = |at: usize| ((block + 1) * 0x9e37 + at / 8 * 0x85eb) as u8;
    into.iter_mut().enumerate().for_each(|(at, byte)| *byte = word(at));
}

fn memory() -> (SharedBuf, Placed) {
    let bytes = BLOCK_BYTES as usize * BLOCKS;
    let buf = SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
    (buf.clone(), Placed::blocks(&BlockShape::opaque(BLOCK_BYTES).unwrap(), buf, BLOCKS as u32).unwrap())
}

fn begin(client: &Client, namespace: NamespaceId, keys: &[BlockKey]) -> (SharedBuf, ReadStream) {
    let ((group, coordinate), (buf, into)) = (column(), memory());
    let request = ReadRequest {
        order: Order::Blocks,
        ..ReadRequest::new(namespace, group, coordinate, keys.to_vec(), into)
    };
    (buf, client.read(request).unwrap())
}

/// What comes of a read: `after` is called with the number of each block that is announced. Blocks that came are what was put, and
/// those that did not are misses, or to be asked for again. Gives how many came.
fn end((buf, stream): (SharedBuf, ReadStream), mut after: impl FnMut(u32)) -> usize {
    let (mut wanted, mut found) = (vec![0; BLOCK_BYTES as usize], vec![0; BLOCK_BYTES as usize]);
    let mut came = 0;
    loop {
        match stream.next_blocking() {
            ReadEvent::Block(block) => {
                content(block as usize, &mut wanted);
                buf.copy_out(block as usize * BLOCK_BYTES as usize, &mut found);
                assert!(wanted == found, "block {block}");
                came += 1;
                after(block);
            }
            ReadEvent::Layer { .. } | ReadEvent::Released => {}
            ReadEvent::End(end) => {
                let is_no_error = |kind| matches!(kind, Kind::Miss | Kind::Retry);
                assert!(
                    end.failures.iter().all(|(_, reason)| is_no_error(reason.kind())),
                    "{:?}",
                    end.failures
                );
                assert_eq!(came + end.failures.len(), BLOCKS);
                return came;
            }
        }
    }
}

pub(crate) fn until_known(client: &Client, namespace: NamespaceId, keys: &[BlockKey], copies: u8) {
    let ((group, coordinate), start) = (column(), Instant::now());
    loop {
        let asked = proto::LookupRequest {
            namespace: namespace.as_bytes().to_vec().into(),
            column: Some(convert::wire_column(group, coordinate)),
            keys: convert::key_bytes(keys),
        };
        let reply = client.locate(asked).unwrap();
        let (mut left, mut known) = (&reply.copies[..], true);
        while let Some((count, rest)) = left.split_first() {
            known &= *count == copies;
            left = &rest[usize::from(*count) * 2..];
        }
        if known {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{copies} copies of each block are wanted");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_read_from_a_node_that_is_killed_in_the_middle_ends_whole_and_reads_go_on() {
    let ground = Ground(std::env::temp_dir().join(format!("kvarts-killed-nodes-{}", std::process::id())));
    let _ = std::fs::remove_dir_all(&ground.0);
    let ([reader, one, other], arguments) = cluster(&ground.0);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (namespace, (group, coordinate)) = (register(&one.client), column());
    let keys: Vec<BlockKey> = (0..BLOCKS).map(|n| BlockKey([n as u8; 32])).collect();
    let (buf, from) = memory();
    for block in 0..BLOCKS {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        content(block, &mut bytes);
        buf.copy_in(block * BLOCK_BYTES as usize, &bytes);
    }
    let put = PutRequest::new(namespace, group, coordinate, keys.clone(), from);
    let reply = block_on(one.client.put(put)).unwrap().unwrap();
    assert!(reply.outcomes.iter().all(|outcome| *outcome == BlockOutcome::Stored));
    register(&other.client);
    until_known(&other.client, namespace, &keys, 1);
    let asked = proto::ReplicateRequest {
        namespace: namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(group, coordinate)),
        keys: convert::key_bytes(&keys),
        expires_after_ms: 0,
    };
    let copied = other.client.replicate(asked).unwrap();
    assert_eq!((copied.stored, copied.missing), (BLOCKS as u32, 0));
    register(&reader.client);
    let (mut others, mut whole) = ([one, other], [false; 2]);
    // A holder of the directory that does not answer within 25 ms, as on a machine that is busy, costs blocks that are there.
    for round in 0..ROUNDS {
        if whole == [true; 2] {
            return;
        }
        let (at, number) = [(0, 2), (1, 3)][round % 2];
        until_known(&reader.client, namespace, &keys, 2);
        let (mut killed, dies) = (None, &mut others[at]);
        let came = end(begin(&reader.client, namespace, &keys), |block| {
            // Not at the first block: both nodes owe something then.
            if block >= 8 && killed.is_none() {
                dies.end("-KILL");
                killed = Some(Instant::now());
            }
        });
        let Some(killed) = killed else { continue };
        whole[at] |= came == BLOCKS;
        let whole_after = loop {
            let came = end(begin(&reader.client, namespace, &keys), |_| {});
            if came == BLOCKS {
                break killed.elapsed();
            }
            assert!(killed.elapsed() < TIMEOUT, "reads do not become whole again: {came} of {BLOCKS} blocks");
        };
        eprintln!(
            "node {number} killed: {came} of {BLOCKS} blocks came; whole reads again after {whole_after:?}"
        );
        // It comes back with what it had.
        others[at] = Node::start(&ground.0, number, &arguments);
        others[at].until_whole();
        reader.until_whole();
    }
    panic!("in {ROUNDS} rounds no read was whole from a node that was killed in its middle: {whole:?}");
}
