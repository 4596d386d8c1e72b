//! Two programs that are nodes of one cluster: what is deleted through one of them, or ends, is given by neither from then on,
//! whichever of them has a copy of it.

use std::time::{Duration, Instant};

use kvarts_contract::api::{
    BlockOutcome, DeleteOutcome, DeleteReply, DeleteRequest, KvStore, Order, Parent, Placed, PutRequest,
    ReadRequest, Target, TtlRequest,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_layout::{BlockKey, BlockShape, NamespaceId};
use kvarts_wire::{convert, proto};

use crate::cluster_kill::{
    BLOCK_BYTES, Ground, Node, TIMEOUT, column, content, members, register, until_known,
};

/// How long what has ended may be found, on a busy machine: far less than a copy lives by itself.
const SOON: Duration = Duration::from_secs(30);

/// Two nodes that copy at once what is read from the other, for ten minutes.
struct Two {
    ground: Ground,
    nodes: [Node; 2],
    namespace: NamespaceId,
    arguments: Vec<String>,
}

impl Two {
    fn start(name: &str, port: u16) -> Self {
        let ground = format!("kvarts-{name}-{}", std::process::id());
        let ground = Ground(std::env::temp_dir().join(ground));
        let _ = std::fs::remove_dir_all(&ground.0);
        let file = members(&ground.0, 2, port).display().to_string();
        let arguments = ["--cluster", &file, "--cluster-hot-reads", "1"].map(str::to_owned).to_vec();
        let nodes = [1, 2].map(|number| Self::node(&ground, number, &arguments));
        nodes.iter().for_each(Node::until_whole);
        let namespace = register(&nodes[0].client);
        register(&nodes[1].client);
        Self { ground, nodes, namespace, arguments }
    }

    fn node(ground: &Ground, number: u8, arguments: &[String]) -> Node {
        Node::start(&ground.0, number, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn put(&self, node: usize, keys: &[BlockKey], expires_after: Option<Duration>) {
        let (buf, from) = memory(keys.len());
        for (place, key) in keys.iter().enumerate() {
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            content(usize::from(key.0[0]), &mut bytes);
            buf.copy_in(place * BLOCK_BYTES as usize, &bytes);
        }
        let (group, coordinate) = column();
        let put = PutRequest::new(self.namespace, group, coordinate, keys.to_vec(), from);
        let put = PutRequest { parent: Parent::Root, expires_after, ..put };
        let reply = block_on(self.nodes[node].client.put(put)).unwrap().unwrap();
        assert_eq!(reply.outcomes, vec![BlockOutcome::Stored; keys.len()]);
    }

    /// How many of these blocks a read brings, which are what was put.
    fn read(&self, node: usize, keys: &[BlockKey]) -> usize {
        let ((group, coordinate), (buf, into)) = (column(), memory(keys.len()));
        let request = ReadRequest {
            order: Order::Blocks,
            ..ReadRequest::new(self.namespace, group, coordinate, keys.to_vec(), into)
        };
        let stream = self.nodes[node].client.read(request).unwrap();
        let end = std::future::poll_fn(|context| stream.poll_end(context));
        let end = block_on(end).unwrap();
        let failed: Vec<u32> = end.failures.iter().map(|(block, _)| *block).collect();
        let (mut wanted, mut found) = (vec![0; BLOCK_BYTES as usize], vec![0; BLOCK_BYTES as usize]);
        for (place, key) in keys.iter().enumerate().filter(|(place, _)| !failed.contains(&(*place as u32))) {
            content(usize::from(key.0[0]), &mut wanted);
            buf.copy_out(place * BLOCK_BYTES as usize, &mut found);
            assert!(wanted == found, "block {place}");
        }
        keys.len() - failed.len()
    }

    /// Reads on the second node until it has copies of its own of what the first has.
    fn warm(&self, keys: &[BlockKey]) {
        until_known(&self.nodes[1].client, self.namespace, keys, 1);
        let start = Instant::now();
        // A holder of the directory that is late costs a read.
        for _ in 0..30 {
            self.read(1, keys);
            assert!(start.elapsed() < TIMEOUT);
        }
        until_known(&self.nodes[0].client, self.namespace, keys, 2);
    }

    /// Has the second node copy what the first has.
    fn replicate(&self, keys: &[BlockKey]) {
        let ((group, coordinate), start) = (column(), Instant::now());
        let asked = proto::ReplicateRequest {
            namespace: self.namespace.as_bytes().to_vec().into(),
            column: Some(convert::wire_column(group, coordinate)),
            keys: convert::key_bytes(keys),
            expires_after_ms: 0,
        };
        // The directory hears of what was put a moment later.
        while self.nodes[1].client.replicate(asked.clone()).unwrap().missing > 0 {
            assert!(start.elapsed() < TIMEOUT, "not copied");
        }
    }

    fn delete(
        &self,
        target: Target,
        of_all: bool,
    ) -> Result<(DeleteReply, Vec<proto::NodeAway>), kvarts_contract::error::Error> {
        let request = DeleteRequest { namespace: self.namespace, target, deadline: None };
        block_on(self.nodes[0].client.delete_everywhere(request, of_all)).unwrap()
    }

    fn until_gone(&self, keys: &[BlockKey], what: &str) {
        let start = Instant::now();
        while self.read(0, keys) + self.read(1, keys) > 0 {
            assert!(start.elapsed() < SOON, "{what}");
        }
    }
}

fn memory(blocks: usize) -> (SharedBuf, Placed) {
    let bytes = BLOCK_BYTES as usize * blocks;
    let buf = SharedBuf::new(&Region::anonymous(bytes).unwrap(), 0, bytes).unwrap();
    (buf.clone(), Placed::blocks(&BlockShape::opaque(BLOCK_BYTES).unwrap(), buf, blocks as u32).unwrap())
}

fn keys(range: std::ops::Range<u8>) -> Vec<BlockKey> {
    range.map(|n| BlockKey([n; 32])).collect()
}

#[test]
fn what_is_deleted_through_one_node_is_given_by_none_and_what_is_put_later_lives() {
    let two = Two::start("deleted", 7450);
    let all = keys(0..12);
    let column = Some(column());
    for (of, target) in [
        (&all[..4], Target::Keys { column, keys: all[..4].to_vec() }),
        (&all[4..8], Target::Prefix(all[4])),
        (&all[8..], Target::Namespace),
    ] {
        two.put(0, of, None);
        two.warm(of);
        let (reply, away) = two.delete(target.clone(), true).unwrap();
        assert_eq!((reply.blocks, away), (8, Vec::new()), "two copies of each are gone: {target:?}");
        assert!(reply.outcomes.iter().all(|one| *one == DeleteOutcome::Deleted), "{reply:?}");
        assert_eq!((two.read(0, of), two.read(1, of)), (0, 0), "{target:?}");
        two.put(0, of, None);
        until_known(&two.nodes[1].client, two.namespace, of, 1);
        assert_eq!((two.read(0, of), two.read(1, of)), (4, 4), "{target:?}");
        two.delete(target, true).unwrap();
    }
    // What only the other node has.
    let other = keys(20..24);
    two.put(1, &other, None);
    let (reply, _) = two.delete(Target::Keys { column, keys: other.clone() }, false).unwrap();
    assert_eq!((reply.blocks, reply.outcomes), (4, vec![DeleteOutcome::Deleted; 4]));
    assert_eq!((two.read(0, &other), two.read(1, &other)), (0, 0));
}

#[test]
fn a_node_that_was_away_hears_of_a_delete_before_it_gives_or_takes_and_the_caller_is_told() {
    let mut two = Two::start("deleted-away", 7451);
    let all = keys(0..8);
    two.put(0, &all, None);
    two.warm(&all);
    two.nodes[1].end("-KILL");
    let target = |keys: &[BlockKey]| Target::Keys { column: Some(column()), keys: keys.to_vec() };
    let (reply, away) = two.delete(target(&all[..4]), false).unwrap();
    assert_eq!(reply.outcomes, vec![DeleteOutcome::Deleted; 4]);
    assert_eq!(away.len(), 1);
    assert!(away[0].address.ends_with(":7451") && !away[0].trouble.is_empty(), "{away:?}");
    let (reply, away) = two.delete(target(&all[4..]), true).unwrap();
    assert!(reply.outcomes.iter().all(|one| matches!(one, DeleteOutcome::Refused(_))), "{reply:?}");
    assert_eq!((away.len(), two.read(0, &all)), (1, 0));
    // The first node starts anew as well: it has not forgotten.
    two.nodes[0].end("-KILL");
    for (at, number) in [(0, 1), (1, 2)] {
        two.nodes[at] = Two::node(&two.ground, number, &two.arguments);
        register(&two.nodes[at].client);
    }
    two.nodes.iter().for_each(Node::until_whole);
    assert_eq!((two.read(0, &all), two.read(1, &all)), (0, 0));
}

#[test]
fn no_copy_outlives_the_block_that_it_is_of_however_long_copies_live() {
    let two = Two::start("ended", 7452);
    let all = keys(0..8);
    two.put(0, &all[..4], Some(Duration::from_secs(8)));
    two.replicate(&all[..4]);
    two.until_gone(&all[..4], "copies live longer than the blocks that they are of");
    two.put(0, &all[4..], None);
    two.warm(&all[4..]);
    let (group, coordinate) = column();
    let ttl = Some(Duration::from_secs(1));
    let request = TtlRequest { namespace: two.namespace, group, coordinate, keys: &all[4..], ttl };
    assert_eq!(two.nodes[0].client.set_ttl(&request).unwrap().changed, [true; 4]);
    two.until_gone(&all[4..], "copies go on when the blocks have ended sooner");
}
