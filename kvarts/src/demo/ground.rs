//! What the demonstration stands on: a directory, a server in another process, and the prefix that is stored in it.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use kvarts_contract::api::{KvStore, Placed};
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::identity::Arrangement;
use kvarts_layout::key::text_keys;
use kvarts_layout::spec::shipped;
use kvarts_layout::{
    BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, KeyChain, NamespaceId, Requirements,
};

use kvarts_client::{Client, ConnectOptions, Via};
use kvarts_terminal::Failure;
use kvarts_terminal::undo::{Undo, remove};
use kvarts_wire::proto;

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 64;
/// The directory of a store that stands alone.
const STORE: &str = "store";
/// Bytes of a segment file.
const SEGMENT: &str = "32 MiB";
/// Bytes that a place on disk is found again by.
const NEEDLE_BYTES: usize = 64;

/// A directory of this run, the model, and the prefix's keys.
pub(super) struct Ground {
    path: PathBuf,
    _undo: Undo,
    geometry: Geometry,
    identity: Identity,
    pub(super) requirements: Requirements,
    pub(super) group: Group,
    pub(super) coordinate: Coordinate,
    pub(super) shape: BlockShape,
    pub(super) block_tokens: u32,
    pub(super) keys: Vec<BlockKey>,
}

fn identity(model: &str, geometry: &Geometry) -> Identity {
    let arrangement = Arrangement::new("demo", "canonical", "1");
    Identity::new(model, "demo", "bf16", arrangement, geometry, BLOCK_TOKENS)
}

impl Ground {
    pub(super) fn new(below: Option<&Path>, model: &str, tokens: u32) -> Result<Self, Failure> {
        let spec = shipped::load(model).ok_or_else(|| {
            Failure::User(format!("no shipped model is named `{model}`; `kvarts model list` lists them"))
        })?;
        let geometry = spec.geometry().clone();
        let [only] = geometry.groups() else {
            let what = format!(
                "the state of {model} has several groups, but the demonstration supports only \
                models with one group: use another --model"
            );
            return Err(Failure::User(what));
        };
        let group = only.group;
        let coordinate = geometry.coordinate(group, 1, 0).map_err(Failure::user)?;
        let shape = geometry.shape(group, coordinate, BLOCK_TOKENS).map_err(Failure::user)?;
        let requirements = spec.stored_requirements(BLOCK_TOKENS, 1).map_err(Failure::user)?;
        let prompt: Vec<u32> = (0..tokens).collect();
        let keys = text_keys(&prompt, BLOCK_TOKENS);
        let below = below.map_or_else(std::env::temp_dir, Path::to_owned);
        let path = below.join(format!("kvarts-demo-{}", std::process::id()));
        let told = |error: std::io::Error| format!("{}: {error}", path.display());
        let gone = path.clone();
        let made = Undo::of(|| std::fs::create_dir_all(&path).map_err(told), move || remove(&gone));
        let (_undo, ()) = made.map_err(Failure::User)?;
        let identity = identity(model, &geometry);
        let block_tokens = BLOCK_TOKENS;
        let ground = Self {
            path,
            _undo,
            geometry,
            identity,
            requirements,
            group,
            coordinate,
            shape,
            block_tokens,
            keys,
        };
        let wanted = ground.bytes().saturating_mul(2).saturating_add(512 << 20);
        let space = rustix::fs::statvfs(&ground.path).map_err(Failure::user)?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        if free < wanted {
            let (free, wanted) = (kvarts_server::human::bytes(free), kvarts_server::human::bytes(wanted));
            return Err(Failure::User(format!(
                "{}: {free} are free, but {wanted} are needed: use --dir or fewer --tokens",
                below.display()
            )));
        }
        Ok(ground)
    }

    /// Bytes of the prefix.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.block_bytes() * self.keys.len() as u64
    }

    /// Keys of what a session adds.
    pub(super) fn session_keys(&self, session: u64, blocks: u64) -> Vec<BlockKey> {
        let last = self.keys.last().copied().unwrap_or_default();
        let mut chain = KeyChain::after(last);
        let tokens = |block: u64| vec![(session * 1000 + block) as u32 + 1_000_000; BLOCK_TOKENS as usize];
        (0..blocks).map(|block| chain.push(&tokens(block), &[])).collect()
    }

    fn store(&self) -> PathBuf {
        self.path.join(STORE)
    }

    /// Writes a file beside the stores.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf, Failure> {
        let path = self.path.join(name);
        std::fs::write(&path, text).map_err(Failure::user)?;
        Ok(path)
    }

    /// The members of a cluster in the order in which the file names them.
    pub(super) fn order(&self, status: &proto::ClusterStatusReply) -> Result<Vec<Vec<u8>>, Failure> {
        let text = std::fs::read_to_string(self.path.join("members.toml")).map_err(Failure::user)?;
        let place = |node: &proto::ClusterNodeStatus| text.find(&node.address).unwrap_or(usize::MAX);
        let mut nodes: Vec<&proto::ClusterNodeStatus> = status.nodes.iter().collect();
        nodes.sort_by_key(|node| place(node));
        Ok(nodes.into_iter().map(|node| node.node.to_vec()).collect())
    }

    /// Finds a chunk of a block on disk, flips a bit of it, and says where: the file and the offset.
    pub(super) fn flip(&self, block: u32) -> Result<(String, u64), Failure> {
        let missing = || {
            let count = self.keys.len();
            Failure::User(format!("the prefix has no block {block}: it has {count} blocks, counted from 0"))
        };
        let key = self.keys.get(block as usize).ok_or_else(missing)?;
        let part = self.shape.chunk_count() / 2;
        let mut needle = vec![0; NEEDLE_BYTES];
        content(key, part, &mut needle);
        let mut files = Vec::new();
        list(&self.store(), &mut files).map_err(Failure::user)?;
        for path in files {
            if let Some(offset) = find(&path, &needle).map_err(Failure::user)? {
                let file = OpenOptions::new().read(true).write(true).open(&path).map_err(Failure::user)?;
                let at = offset + NEEDLE_BYTES as u64 / 2;
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).map_err(Failure::user)?;
                file.write_all_at(&[byte[0] ^ 0x10], at).map_err(Failure::user)?;
                file.sync_all().map_err(Failure::user)?;
                let shown = path.strip_prefix(self.store()).unwrap_or(&path).display().to_string();
                return Ok((shown, at));
            }
        }
        Err(Failure::user("the block was not found on disk"))
    }

    /// What the checker says of the directory: its exit code and its findings.
    pub(super) fn fsck(&self) -> Result<(i32, Vec<String>), Failure> {
        let program = std::env::current_exe().map_err(Failure::user)?;
        let output = Command::new(program).arg("fsck").arg(self.store()).arg("--json").output();
        let output = output.map_err(Failure::user)?;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).map_err(Failure::user)?;
        let findings = report.get("problems").and_then(serde_json::Value::as_array);
        let line = |finding: &serde_json::Value| {
            let text = |name: &str| match finding.get(name)? {
                serde_json::Value::String(text) => Some(format!("{name} {text}")),
                serde_json::Value::Number(number) => Some(format!("{name} {number}")),
                _ => None,
            };
            let parts = ["label", "shard", "segment", "offset", "key", "expected", "found"];
            parts.iter().filter_map(|name| text(name)).collect::<Vec<_>>().join(", ")
        };
        let findings = findings.map(|all| all.iter().map(line).collect()).unwrap_or_default();
        Ok((output.status.code().unwrap_or(-1), findings))
    }
}

/// Every file below a directory, in order of name.
fn list(directory: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    let mut entries = std::fs::read_dir(directory)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(std::fs::DirEntry::path);
    for entry in entries {
        let kind = entry.file_type()?;
        if kind.is_dir() {
            list(&entry.path(), files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// Where in a file these bytes are.
fn find(path: &Path, needle: &[u8]) -> std::io::Result<Option<u64>> {
    let mut file = File::open(path)?;
    let (mut bytes, mut base) = (Vec::new(), 0u64);
    loop {
        let kept = bytes.len().min(needle.len() - 1);
        bytes.drain(..bytes.len() - kept);
        base = base.saturating_sub(kept as u64);
        let got = file.by_ref().take(4 << 20).read_to_end(&mut bytes)?;
        if got == 0 {
            return Ok(None);
        }
        // Chunks begin at even offsets: what is looked for is rare enough by its first bytes.
        let first = needle.first().copied().unwrap_or_default();
        let mut at = 0;
        while let Some(next) = bytes.get(at..).and_then(|rest| rest.iter().position(|byte| *byte == first)) {
            at += next;
            if bytes.get(at..at + needle.len()) == Some(needle) {
                return Ok(Some(base + at as u64));
            }
            at += 1;
        }
        base += bytes.len() as u64;
    }
}

/// The first bytes of a chunk, as its producer makes them: a sequence that looks random (splitmix64).
pub(super) fn content(key: &BlockKey, part: u32, bytes: &mut [u8]) {
    let [a, b, c, d, e, f, g, h, ..] = key.0;
    let mut state = u64::from_le_bytes([a, b, c, d, e, f, g, h]) ^ (u64::from(part) << 32);
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let mixed = (mixed ^ (mixed >> 31)).to_le_bytes();
        word.copy_from_slice(mixed.get(..word.len()).unwrap_or_default());
    }
}

/// A server in another process, killed when this is dropped.
pub(super) struct Server {
    child: Arc<Mutex<Option<Child>>>,
    _undo: Undo,
    endpoint: String,
}

/// Until it has ended; it may have already.
fn kill(child: &Mutex<Option<Child>>) {
    if let Some(child) = child.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Server {
    /// Starts one in the ground's directory and waits until it serves.
    pub(super) fn start(ground: &Ground) -> Result<Self, Failure> {
        Self::start_at(ground, STORE, &[])
    }

    /// Starts one in a directory of this name, with these arguments besides.
    pub(super) fn start_at(ground: &Ground, name: &str, more: &[String]) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(Failure::user)?;
        let log = ground.path.join(format!("{name}.log"));
        let socket = ground.path.join(format!("{name}.socket"));
        let file = File::create(&log).map_err(Failure::user)?;
        let budget = format!("{} MiB", (ground.bytes() >> 20) * 3 / 2 + 384);
        let mut command = Command::new(program);
        command
            .arg("serve")
            .args(["--dir", &ground.path.join(name).display().to_string()])
            .args(["--budget", &budget, "--segment", SEGMENT])
            .args(["--listen-grpc", "none", "--listen-metrics", "none", "--log-level", "warn"])
            .args(["--listen-socket", &socket.display().to_string()])
            .args(more)
            .env_remove("KVARTS_CONFIG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file);
        let child = Arc::new(Mutex::new(None));
        let (started, gone) = (Arc::clone(&child), Arc::clone(&child));
        let start = move || {
            let mut child = command.spawn().map_err(|error| error.to_string())?;
            let pipe = child.stdout.take();
            *started.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
            pipe.ok_or_else(|| "the output of the server cannot be read".to_owned())
        };
        let (_undo, pipe) = Undo::of(start, move || kill(&gone)).map_err(Failure::User)?;
        let server = Self { child, _undo, endpoint: format!("unix:{}", socket.display()) };
        let mut line = String::new();
        // One line, or none if it ended.
        BufReader::new(pipe).read_line(&mut line).map_err(Failure::user)?;
        if line.starts_with("serving ") {
            return Ok(server);
        }
        let log = std::fs::read_to_string(log).unwrap_or_default();
        Err(Failure::User(format!("the server did not start: {}", log.trim())))
    }

    /// A client over gRPC.
    pub(super) fn client(&self) -> Result<Client, Failure> {
        let options = ConnectOptions { via: Via::Grpc, ..ConnectOptions::to(self.endpoint.clone()) };
        Client::connect(&options).map_err(Failure::user)
    }

    /// SIGKILL: whatever it was doing, it does no more.
    pub(super) fn kill(self) {
        kill(&self.child);
    }

    /// SIGTERM, and waits for it to end.
    pub(super) fn stop(self) -> Result<(), Failure> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(child) = child.as_mut() else { return Ok(()) };
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).map_err(Failure::user)?;
        child.wait().map(drop).map_err(Failure::user)
    }
}

/// The prefix as a client of one server sees it.
pub(super) struct Prefix<'a> {
    pub(super) ground: &'a Ground,
    pub(super) client: Client,
    pub(super) namespace: NamespaceId,
    /// Shared with the server.
    pub(super) pool: SharedBuf,
}

impl<'a> Prefix<'a> {
    pub(super) fn new(ground: &'a Ground, server: &Server) -> Result<Self, Failure> {
        let options = ConnectOptions { via: Via::Local, ..ConnectOptions::to(server.endpoint.clone()) };
        let client = Client::connect(&options).map_err(Failure::user)?;
        let namespace = client.register(&ground.identity, &ground.geometry).map_err(Failure::user)?;
        let bytes = usize::try_from(ground.bytes()).map_err(Failure::user)?;
        let region = client.pool(bytes).map_err(Failure::user)?;
        let pool = SharedBuf::new(&region, 0, bytes)
            .ok_or_else(|| Failure::user("the memory for the blocks could not be allocated"))?;
        Ok(Self { ground, client, namespace, pool })
    }

    /// Places for the first `blocks` blocks of the pool: a buffer for each layer, as for a layerwise load.
    pub(super) fn placed(&self, blocks: usize) -> Result<Placed, Failure> {
        let mut at = 0;
        let mut layers = Vec::new();
        for layer in self.ground.shape.layers() {
            let bytes = layer.bytes() as usize * blocks;
            layers.push(
                self.pool
                    .slice(at, bytes)
                    .ok_or_else(|| Failure::user("the memory for the blocks could not be allocated"))?,
            );
            at += bytes;
        }
        Placed::layers(&self.ground.shape, layers, blocks as u32).map_err(Failure::user)
    }

    /// Every chunk with its part, block and place.
    fn chunks(&self, placed: &Placed, blocks: usize, layer: Option<u32>) -> Vec<(u32, u32, SharedBuf)> {
        let of_layer = (0u32..).zip(self.ground.shape.layers());
        let chunks = of_layer.flat_map(|(at, layer)| layer.chunks.iter().map(move |chunk| (at, chunk.bytes)));
        let mut all = Vec::new();
        for (part, (at, bytes)) in (0u32..).zip(chunks) {
            if layer.is_some_and(|layer| layer != at) {
                continue;
            }
            for block in 0..blocks as u32 {
                all.extend(placed.chunk(part, block, bytes).map(|buf| (part, block, buf)));
            }
        }
        all
    }

    /// Fills the pool with these blocks, as their producer makes them.
    pub(super) fn fill(&self, keys: &[BlockKey]) -> Result<(), Failure> {
        let placed = self.placed(keys.len())?;
        let mut bytes = Vec::new();
        for (part, block, buf) in self.chunks(&placed, keys.len(), None) {
            let Some(key) = keys.get(block as usize) else { continue };
            bytes.resize(buf.len(), 0);
            content(key, part, &mut bytes);
            buf.copy_in(0, &bytes);
        }
        Ok(())
    }

    /// Bytes of chunks of a layer that are not what was put.
    pub(super) fn differing(&self, layer: u32) -> Result<u64, Failure> {
        let keys = &self.ground.keys;
        let placed = self.placed(keys.len())?;
        let (mut expected, mut differing) = (Vec::new(), 0);
        for (part, block, buf) in self.chunks(&placed, keys.len(), Some(layer)) {
            let Some(key) = keys.get(block as usize) else { continue };
            expected.resize(buf.len(), 0);
            content(key, part, &mut expected);
            let same = buf.digest(0, buf.len(), |found| found == expected);
            differing += if same { 0 } else { buf.len() as u64 };
        }
        Ok(differing)
    }

    /// Blocks that the server found on disk when it started.
    pub(super) fn recovered(&self) -> Result<u64, Failure> {
        let stats = self.client.stats().map_err(Failure::user)?;
        Ok(stats.recovery.iter().map(|shard| shard.blocks).sum())
    }
}
