//! R35 and R36: connections between nodes that end, or change a byte, at every place: of an answer that carries blocks, and of the
//! messages that say where blocks are.
#![allow(clippy::disallowed_methods, reason = "real time, real connections")]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{self, GROUP, Stage, key, options, patient, strangers};
use crate::depth::depth;
use crate::proxied::{Cut, Proxy, Way};
use kvarts_cluster::members::{Member, Members, NodeId};
use kvarts_cluster::partition::{Holders, Tag};
use kvarts_contract::api::{Order, Origins, Placed, ReadEvent, ReadRequest};
use kvarts_contract::buffers::BufMut;
use kvarts_contract::error::Kind;
use kvarts_layout::{BlockKey, Coordinate};
use kvarts_peer::node::{ClusterNode, VERSION};
use kvarts_wire::proto;
use tokio::net::TcpListener;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Between places at which an answer is cut.
const STEP: usize = 4096;
/// Before each change one of this many places is tried, by night all of them. A place's number says how an answer is cut there, and
/// in which order it is read: so no multiple of 2 or 3.
const EVERY: usize = 5;

/// An address of this process and of this use alone, on this host.
fn host() -> Ipv4Addr {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 130 + NEXT.fetch_add(1, Ordering::Relaxed) as u8, high, low)
}

async fn listener() -> TcpListener {
    TcpListener::bind((host(), 0)).await.unwrap()
}

fn member(id: NodeId, address: SocketAddr) -> Member {
    Member { id, address: address.to_string(), zone: String::new() }
}

fn tag(stage: &Stage, key: &BlockKey) -> Tag {
    Tag::of(&stage.namespace, GROUP, Coordinate::default(), key)
}

/// At which port a node serves bytes: asked as the node `from`.
async fn lane_port(from: NodeId, to: &Member) -> u16 {
    let node = from.0.to_vec().into();
    let cluster = "test".to_owned();
    let request = proto::JoinRequest { version: VERSION, cluster, node, ..proto::JoinRequest::default() };
    let mut client = strangers::calls(from, strangers::SECRET, (to.address.clone(), to.id)).await.unwrap();
    client.join(request).await.unwrap().into_inner().lane_port.try_into().unwrap()
}

/// Nodes that have blocks, and one that reads from them over wires that can be cut.
struct Scene {
    reader: Stage,
    stages: [Stage; 2],
    nodes: Vec<Arc<ClusterNode>>,
    /// As the reader is told them.
    members: Members,
    own: SocketAddr,
    wire: Proxy,
}

impl Scene {
    async fn new(name: &str) -> Self {
        let reader = Stage::new(&format!("{name}-reader"));
        let stages = ["one", "other"].map(|which| Stage::new(&format!("{name}-{which}")));
        let (own, listeners) = (listener().await, [listener().await, listener().await]);
        let own_address = own.local_addr().unwrap();
        let list = stages.iter().zip(&listeners);
        let real: Vec<Member> =
            list.map(|(stage, listener)| member(stage.id(), listener.local_addr().unwrap())).collect();
        let me = member(reader.id(), own_address);
        let members = Members::new(1, real.iter().cloned().chain([me.clone()]).collect()).unwrap();
        let mut nodes = Vec::new();
        for (stage, listener) in stages.iter().zip(listeners) {
            nodes.push(ClusterNode::start(stage.store().clone(), listener, options(&members)).unwrap());
        }
        // The reader finds each of them at another address, with the same ports; both wires are one.
        let mut wire: Option<Proxy> = None;
        let mut told = vec![me];
        for node in &real {
            let (address, host) = (node.address.parse::<SocketAddr>().unwrap(), host());
            // Calls pass over a wire of their own.
            let calls = std::net::TcpListener::bind((host, address.port())).unwrap();
            Proxy::start(address).beside(calls, address);
            let lane = SocketAddr::new(address.ip(), lane_port(reader.id(), node).await);
            let bytes = std::net::TcpListener::bind((host, lane.port())).unwrap();
            let first = wire.take().unwrap_or_else(|| Proxy::start(lane));
            wire = Some(first.beside(bytes, lane));
            told.push(member(node.id, SocketAddr::from((host, address.port()))));
        }
        let members = Members::new(1, told).unwrap();
        drop(own);
        Self { reader, stages, nodes, members, own: own_address, wire: wire.unwrap() }
    }

    /// Blocks of which the reader holds no part of the directory.
    fn keys(&self, count: usize) -> Vec<BlockKey> {
        let holders = Holders::of(&self.members);
        let held =
            |key: &BlockKey| holders.holder(tag(&self.reader, key).partition()) != Some(self.reader.id());
        (0..).map(key).filter(held).take(count).collect()
    }

    /// The reader, from its beginning: it knows nothing of the ways to others.
    async fn begin(&self) -> Arc<ClusterNode> {
        let start = Instant::now();
        let listener = loop {
            match TcpListener::bind(self.own).await {
                Ok(listener) => break listener,
                Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let node = ClusterNode::start(self.reader.store().clone(), listener, patient(&self.members)).unwrap();
        let (identity, geometry) = common::model();
        node.know(&identity, &geometry, self.reader.namespace);
        node
    }

    /// Reads; blocks that are announced are what was put, and nothing is a defect. Gives how many came.
    async fn read(&self, node: &Arc<ClusterNode>, keys: &[BlockKey], order: Order, what: &str) -> usize {
        let Stage { shape, namespace, .. } = &self.reader;
        let bytes = shape.block_bytes() as usize;
        let memory = BufMut::zeroed(bytes * keys.len()).unwrap().share();
        let into = Placed::blocks(shape, memory.clone(), keys.len() as u32).unwrap();
        let request = ReadRequest {
            order,
            ..ReadRequest::new(*namespace, GROUP, Coordinate::default(), keys.to_vec(), into)
        };
        let stream = node.read(request, shape, &Origins::any(keys.len())).unwrap();
        let mut announced = BTreeSet::new();
        let end = loop {
            match std::future::poll_fn(|context| stream.poll_next(context)).await {
                ReadEvent::Block(block) => drop(announced.insert(block)),
                ReadEvent::Layer { .. } | ReadEvent::Released => {}
                ReadEvent::End(end) => break end,
            }
        };
        if order == Order::Layers && end.usable_layers as usize == shape.layers().len() {
            announced.extend(0..end.usable_blocks);
        }
        let is_defect = |kind: Kind| matches!(kind, Kind::Bug | Kind::Invalid);
        assert!(
            end.failures.iter().all(|(_, reason)| !is_defect(reason.kind())),
            "{what}: {:?}",
            end.failures
        );
        for block in &announced {
            let mut found = vec![0; bytes];
            memory.copy_out(*block as usize * bytes, &mut found);
            assert!(found == common::content(&keys[*block as usize], bytes), "{what}: block {block}");
        }
        announced.len()
    }

    async fn until_read(&self, node: &Arc<ClusterNode>, keys: &[BlockKey], what: &str) {
        let start = Instant::now();
        while self.read(node, keys, Order::Blocks, what).await < keys.len() {
            assert!(start.elapsed() < TIMEOUT, "{what}: blocks are not found");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// How long the answer to a read is that was whole: where all processors are taken one may end short.
    async fn whole_answer(&self, node: &Arc<ClusterNode>, keys: &[BlockKey], what: &str) -> usize {
        let start = Instant::now();
        loop {
            self.wire.carried();
            if self.read(node, keys, Order::Blocks, what).await == keys.len() {
                return self.wire.carried().1;
            }
            assert!(start.elapsed() < TIMEOUT, "{what}: no read is whole");
        }
    }
}

/// What happens to an answer at a place of it.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Cut,
    Flip,
}

/// Puts the same blocks into some of the nodes, and has an answer suffer at each place. Gives how many reads there were, and how
/// many of them were whole nevertheless. `first` is the first place where not all are tried.
async fn suffer(name: &str, copies: usize, fault: Fault, first: usize) -> (usize, usize) {
    let scene = Scene::new(name).await;
    let keys = scene.keys(6);
    // One production, wherever it is.
    scene.stages[0].put(&keys);
    let mut node = scene.begin().await;
    if copies == 2 {
        let (identity, geometry) = common::model();
        scene.nodes[1].know(&identity, &geometry, scene.reader.namespace);
        let column = kvarts_peer::node::Column {
            namespace: scene.reader.namespace,
            group: GROUP,
            coordinate: Coordinate::default(),
            keys: &keys,
        };
        let shape = Arc::new(scene.reader.shape.clone());
        let start = Instant::now();
        while scene.nodes[1].replicate(column, &shape, None).await.is_err()
            || !scene.nodes[0]
                .locate(&tags(&scene, &keys), TIMEOUT)
                .await
                .copies
                .iter()
                .all(|all| all.len() == 2)
        {
            assert!(start.elapsed() < TIMEOUT, "{name}: no second copy");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    scene.until_read(&node, &keys, name).await;
    let answer = scene.whole_answer(&node, &keys, name).await;
    let least = scene.reader.shape.block_bytes() as usize * keys.len();
    assert!(answer >= least, "{answer} bytes of an answer");
    let (mut reads, mut whole) = (0, 0);
    let places = (0..answer).step_by(STEP).enumerate();
    for (number, place) in places.skip(depth(first, 0)).step_by(depth(EVERY, 1)) {
        let what = format!("{name}, {fault:?} at {place} of {answer}");
        let order = if number % 2 == 0 { Order::Blocks } else { Order::Layers };
        let start = Instant::now();
        let came = loop {
            match fault {
                Fault::Cut => scene.wire.cut_after(Way::Down, place, Cut::turn(number)),
                Fault::Flip => scene.wire.flip(Way::Down, place, 1 << (number % 8)),
            }
            let came = scene.read(&node, &keys, order, &what).await;
            let suffered = match fault {
                Fault::Cut => scene.wire.was_cut(),
                Fault::Flip => scene.wire.was_flipped(),
            };
            // A look-up that is late on a busy machine finds nothing to read, so that no answer was there to suffer.
            if suffered {
                break Some(came);
            }
            // Where two nodes have all of it the other one may send what is behind this place, each time.
            if copies > 1 && came == keys.len() && start.elapsed() > TIMEOUT / 10 {
                break None;
            }
            assert!(start.elapsed() < TIMEOUT, "{what}: no answer came so far");
        };
        if let Some(came) = came {
            (reads, whole) = (reads + 1, whole + usize::from(came == keys.len()));
        }
        // A new reader does not remember that a way was bad.
        node.stop();
        node = scene.begin().await;
        scene.until_read(&node, &keys, &what).await;
    }
    node.stop();
    (reads, whole)
}

fn tags(scene: &Scene, keys: &[BlockKey]) -> Vec<Tag> {
    keys.iter().map(|key| tag(&scene.reader, key)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_cut_anywhere_gives_right_bytes_or_a_miss() {
    let (reads, whole) = suffer("cut-one", 1, Fault::Cut, 0).await;
    eprintln!("{whole} of {reads} reads were whole after their connection was made again");
    assert!(reads >= depth(4, 24));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_which_a_byte_is_changed_anywhere_gives_right_bytes_or_a_miss() {
    let (reads, whole) = suffer("flip-one", 1, Fault::Flip, 1).await;
    eprintln!("{whole} of {reads} reads were whole after a byte was changed");
    assert!(reads >= depth(4, 24));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_cut_anywhere_costs_nothing_that_another_node_has() {
    let (reads, whole) = suffer("cut-two", 2, Fault::Cut, 2).await;
    assert!(reads >= depth(4, 24) && whole == reads, "{whole} of {reads} were whole");
}

/// A wire for calls that ends after a number of the caller's frames.
struct FrameWire {
    at: SocketAddr,
    state: Arc<Mutex<Frames>>,
}

#[derive(Default)]
struct Frames {
    /// Frames that may still pass, of connections made since it was said.
    left: Option<usize>,
    generation: u64,
    open: Vec<(TcpStream, TcpStream)>,
}

impl FrameWire {
    fn start(to: SocketAddr) -> Self {
        let listener = std::net::TcpListener::bind((host(), 0)).unwrap();
        let at = listener.local_addr().unwrap();
        let state = Arc::<Mutex<Frames>>::default();
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { continue };
                let generation = {
                    let mut state = shared.lock().unwrap();
                    state.open.push((client.try_clone().unwrap(), server.try_clone().unwrap()));
                    state.generation
                };
                let (mut back, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut back, &mut to_client);
                    let _ = to_client.shutdown(Shutdown::Both);
                });
                let state = Arc::clone(&shared);
                std::thread::spawn(move || carry(&client, &server, generation, &state));
            }
        });
        Self { at, state }
    }

    /// Ends what is connected, and the connections that come, once `frames` frames of those have passed.
    fn cut_after(&self, frames: usize) {
        let mut state = self.state.lock().unwrap();
        (state.left, state.generation) = (Some(frames), state.generation + 1);
        for (client, server) in state.open.drain(..) {
            let _ = client.shutdown(Shutdown::Both);
            let _ = server.shutdown(Shutdown::Both);
        }
    }

    /// Whether a connection was ended since.
    fn was_cut(&self) -> bool {
        self.state.lock().unwrap().left.is_none()
    }
}

/// Carries frames until one may not pass any more.
fn carry(mut client: &TcpStream, mut server: &TcpStream, generation: u64, state: &Mutex<Frames>) {
    let (mut greeting, mut preface) = ([0; 88], [0; 24]);
    let mut pass = |bytes: &mut [u8]| client.read_exact(bytes).is_ok() && server.write_all(bytes).is_ok();
    let mut good = pass(&mut greeting) && pass(&mut preface);
    while good {
        let mut head = [0; 9];
        good = client.read_exact(&mut head).is_ok();
        let mut frame = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        good = good && client.read_exact(&mut frame).is_ok();
        let mut state = state.lock().unwrap();
        let counts = good && state.generation == generation;
        match state.left {
            Some(0) if counts => {
                state.left = None;
                good = false;
            }
            Some(left) if counts => state.left = Some(left - 1),
            _ => {}
        }
        drop(state);
        good = good && server.write_all(&head).is_ok() && server.write_all(&frame).is_ok();
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

/// How many frames of a connection are tried.
const FRAMES: usize = 24;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_has_is_known_again_wherever_its_messages_were_cut() {
    let [a, b] = ["feed-cut-a", "feed-cut-b"].map(Stage::new);
    let (at_a, at_b) = (listener().await, listener().await);
    let wire = FrameWire::start(at_b.local_addr().unwrap());
    let list = |of_b| {
        let both = vec![member(a.id(), at_a.local_addr().unwrap()), member(b.id(), of_b)];
        Members::new(1, both).unwrap()
    };
    let (told, real) = (list(wire.at), list(at_b.local_addr().unwrap()));
    let holds = ClusterNode::start(b.store().clone(), at_b, options(&real)).unwrap();
    let says = ClusterNode::start(a.store().clone(), at_a, options(&told)).unwrap();
    let holders = Holders::of(&real);
    let mut keys = (0..).map(key).filter(|key| holders.holder(tag(&a, key).partition()) == Some(b.id()));
    let (mut all, mut there) = (Vec::new(), BTreeSet::new());
    for frames in 0..FRAMES {
        wire.cut_after(frames);
        let start = Instant::now();
        while !wire.was_cut() {
            // Something comes, something goes.
            let new = keys.next().unwrap();
            a.put(&[new]);
            all.push(new);
            there.insert(new);
            if all.len() % 3 == 0 {
                let old = all[all.len() / 2];
                a.delete(&[old]);
                there.remove(&old);
            }
            assert!(start.elapsed() < TIMEOUT, "no frame {frames} came");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let tags: Vec<Tag> = all.iter().map(|key| tag(&a, key)).collect();
        let start = Instant::now();
        loop {
            let known = holds.locate(&tags, TIMEOUT).await.copies;
            let wrong = all.iter().zip(&known).position(|(key, nodes)| {
                *nodes != if there.contains(key) { vec![a.id()] } else { Vec::new() }
            });
            let Some(wrong) = wrong else { break };
            assert!(start.elapsed() < TIMEOUT, "cut at frame {frames}: block {wrong} of {}", all.len());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    says.stop();
    holds.stop();
}
