//! Programs that register themselves with a real etcd: they join, are killed, leave and come back, and etcd itself goes and comes.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::etcd::Etcd;
use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{BlockOutcome, KvStore, Placed, PutRequest, ReadRequest};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::identity::Arrangement;
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};
use kvarts_wire::proto;

const PAGE: u64 = 4096;
/// How long a node is a member without a word.
const LEASE_SECONDS: u64 = 3;
/// How long the nodes may take to agree on anything.
const TIMEOUT: Duration = Duration::from_secs(90);

/// A node: its directory, and its process while there is one.
struct Node {
    directory: PathBuf,
    number: u8,
    members: String,
    child: Option<Child>,
    grpc: String,
}

impl Node {
    fn new(number: u8, members: String) -> Self {
        let name = format!("kvarts-etcd-node-{number}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        let mut node = Self { directory, number, members, child: None, grpc: String::new() };
        node.begin();
        node
    }

    fn begin(&mut self) {
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = format!("127.{}.{high}.{low}:7430", 230 + self.number);
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.current_dir(&self.directory).args(["serve", "--listen-grpc", "127.0.0.1:0"]);
        command.args([
            "--listen-metrics",
            "none",
            "--budget",
            "32 MiB",
            "--memory",
            "64 MiB",
            "--segment",
            "256 KiB",
        ]);
        command.args([
            "--cluster",
            &self.members,
            "--cluster-address",
            &address,
            "--cluster-lease",
            &LEASE_SECONDS.to_string(),
        ]);
        let log = File::options().create(true).append(true).open(self.log()).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let grpc = line.split_whitespace().find_map(|word| word.strip_prefix("grpc="));
        self.grpc = grpc.unwrap_or_else(|| panic!("no place in {line:?}")).to_owned();
        self.child = Some(child);
    }

    /// Ends it by a signal.
    fn end(&mut self, signal: &str) {
        let mut child = self.child.take().unwrap();
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        child.wait().unwrap();
    }

    /// Where it says what it has to say.
    fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    fn client(&self) -> Client {
        Client::connect(&ConnectOptions::to(format!("http://{}", self.grpc))).unwrap()
    }

    /// Waits until what it says of the cluster is this.
    fn until(&self, what: &str, mut is_so: impl FnMut(&proto::ClusterStatusReply) -> bool) -> u64 {
        let (client, start) = (self.client(), Instant::now());
        loop {
            let status = client.cluster_status();
            if let Ok(status) = status.as_ref().inspect_err(|error| self.expect_alive(error))
                && is_so(status)
            {
                return status.epoch;
            }
            assert!(start.elapsed() < TIMEOUT, "{what}: {status:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A call that failed may be made again while the process runs: where all processors are taken a connection is given up.
    fn expect_alive(&self, error: &Error) {
        let id = self.child.as_ref().unwrap().id();
        let state = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let is_over = state.rsplit(')').next().is_none_or(|rest| rest.trim_start().starts_with('Z'));
        if is_over || !matches!(error.0, Reason::Busy(_) | Reason::DeadlinePassed) {
            let said = std::fs::read_to_string(self.log()).unwrap_or_default();
            panic!("node {}: {error}; it said: {said}", self.number);
        }
    }

    fn until_whole(&self, count: usize) -> u64 {
        self.until("members that reach each other", |status| {
            status.nodes.len() == count && status.nodes.iter().all(|node| node.is_reachable)
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn register(client: &Client) -> NamespaceId {
    let geometry = Geometry::opaque(PAGE).unwrap();
    let arrangement = Arrangement::new("test", "flat", "1");
    client.register(&Identity::new("pages", "1", "bf16", arrangement, &geometry, 16), &geometry).unwrap()
}

fn memory(byte: u8) -> (SharedBuf, Placed) {
    let buf = SharedBuf::new(&Region::anonymous(PAGE as usize).unwrap(), 0, PAGE as usize).unwrap();
    buf.fill(byte);
    (buf.clone(), Placed::blocks(&BlockShape::opaque(PAGE).unwrap(), buf, 1).unwrap())
}

/// Puts a block into one node, and reads it from each of the others as soon as it is known there.
fn shared(from: &Node, to: &[&Node], byte: u8) {
    let (client, key) = (from.client(), BlockKey([byte; 32]));
    let namespace = register(&client);
    let (group, coordinate) = (Group(0), Coordinate::Replicated);
    let put = PutRequest::new(namespace, group, coordinate, vec![key], memory(byte).1);
    let reply = block_on(client.put(put)).unwrap().unwrap();
    assert_eq!(reply.outcomes, [BlockOutcome::Stored]);
    for node in to {
        let (client, start) = (node.client(), Instant::now());
        register(&client);
        loop {
            let (buf, into) = memory(0);
            let read = ReadRequest::new(namespace, group, coordinate, vec![key], into);
            if client.read(read).unwrap().wait_blocking().usable_blocks == 1 {
                assert_eq!(buf.to_vec(), vec![byte; PAGE as usize]);
                break;
            }
            assert!(start.elapsed() < TIMEOUT, "block {byte} is not found");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn nodes_join_die_leave_and_come_back_and_go_on_while_etcd_is_away() {
    let Some(mut etcd) = Etcd::start("members") else { return };
    let mut nodes: Vec<Node> = (1..4).map(|number| Node::new(number, etcd.members())).collect();
    let formed = nodes.iter().map(|node| node.until_whole(3)).max().unwrap();
    assert!(formed >= 3, "one more epoch with each member");
    shared(&nodes[0], &[&nodes[1], &nodes[2]], 1);

    // One is killed, and comes back with what it had.
    nodes[2].end("-KILL");
    let without = nodes[0].until_whole(2);
    assert!(without > formed);
    shared(&nodes[1], &[&nodes[0]], 2);
    nodes[2].begin();
    let again = nodes.iter().map(|node| node.until_whole(3)).max().unwrap();
    assert!(again > without);
    shared(&nodes[2], &[&nodes[0], &nodes[1]], 3);

    // etcd is gone: everything goes on, with the members known last, for longer than a lease.
    etcd.stop();
    let told = |status: &proto::ClusterStatusReply| {
        status.nodes.iter().any(|node| node.is_me && node.trouble.contains("etcd cannot be reached"))
    };
    for node in &nodes {
        node.until("a word about etcd", told);
    }
    std::thread::sleep(Duration::from_secs(LEASE_SECONDS * 3 / 2));
    shared(&nodes[0], &[&nodes[1], &nodes[2]], 4);
    assert!(nodes.iter().all(|node| node.until_whole(3) == again), "no new epoch");
    etcd.begin();
    for node in &nodes {
        node.until("etcd to be back", |status| !told(status));
    }
    shared(&nodes[1], &[&nodes[0], &nodes[2]], 5);

    // One leaves.
    let before = nodes[0].until_whole(3);
    nodes[1].end("-TERM");
    assert!(nodes[0].until_whole(2) > before);
    shared(&nodes[2], &[&nodes[0]], 6);

    // Another one dies while it comes back.
    nodes[0].end("-KILL");
    nodes[1].begin();
    nodes[1].until_whole(2);
    shared(&nodes[1], &[&nodes[2]], 7);
}
