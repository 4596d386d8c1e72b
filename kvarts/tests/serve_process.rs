//! The program itself as a server: it starts with nothing, says where it is, stops cleanly, and survives being killed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::scratch::Scratch;
use kvarts_client::{Client, ConnectOptions};
use kvarts_contract::api::{
    BlockOutcome, Durability, KvStore, Order, Parent, Placed, PutRequest, ReadRequest, Verify,
};
use kvarts_contract::blocking::block_on;
use kvarts_contract::buffers::{Region, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_contract::error::Kind;
use kvarts_layout::identity::{Arrangement, Quantisation, TenantSalt};
use kvarts_layout::{BlockKey, BlockShape, Coordinate, Geometry, Group, Identity, NamespaceId};

const PAGE: u64 = 4096;

/// A server in a process of its own; killed when dropped.
struct Server {
    child: Child,
    grpc: String,
    socket: String,
}

fn command_without_segment(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    command.current_dir(directory).args([
        "serve",
        "--listen-grpc",
        "127.0.0.1:0",
        "--listen-metrics",
        "none",
    ]);
    command.args(["--budget", "32 MiB", "--memory", "64 MiB"]);
    command
}

fn command(directory: &Path) -> Command {
    let mut command = command_without_segment(directory);
    command.args(["--segment", "256 KiB"]);
    command
}

impl Server {
    fn start(command: Command) -> Self {
        Self::telling(command, Stdio::null())
    }

    /// A server whose log goes somewhere.
    fn telling(mut command: Command, log: Stdio) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let word = |name: &str| {
            let start = format!("{name}=");
            line.split_whitespace().find_map(|word| word.strip_prefix(start.as_str())).map(str::to_owned)
        };
        let words = word("grpc").zip(word("socket"));
        let (grpc, socket) = words.unwrap_or_else(|| panic!("no place in {line:?}"));
        Self { child, grpc, socket }
    }

    fn client(&self) -> Client {
        Client::connect(&ConnectOptions::to(format!("http://{}", self.grpc))).unwrap()
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    fn wait(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn identity() -> Identity {
    let text = |text: &str| text.to_owned();
    Identity {
        model: text("pages"),
        revision: text("1"),
        tokenizer: text("none"),
        adapter: text("none"),
        kv_dtype: text("bf16"),
        quantisation: Quantisation { recipe: text("none"), scales: text("none") },
        rope: text("none"),
        window: text("none"),
        arrangement: Arrangement { engine: text("test"), layout: text("flat"), version: text("1") },
        block_tokens: 16,
        spec_fingerprint: Geometry::opaque(PAGE).unwrap().fingerprint(),
        tenant_salt: TenantSalt(Vec::new()),
        extras: Default::default(),
    }
}

fn register(client: &Client) -> NamespaceId {
    client.register(&identity(), &Geometry::opaque(PAGE).unwrap()).unwrap()
}

fn memory(byte: u8) -> (SharedBuf, Placed) {
    let buf = SharedBuf::new(&Region::anonymous(PAGE as usize).unwrap(), 0, PAGE as usize).unwrap();
    buf.fill(byte);
    let placed = Placed::blocks(&BlockShape::opaque(PAGE).unwrap(), buf.clone(), 1).unwrap();
    (buf, placed)
}

fn put_request(namespace: NamespaceId, byte: u8) -> PutRequest {
    PutRequest {
        namespace,
        group: Group(0),
        coordinate: Coordinate::Replicated,
        parent: Parent::Unknown,
        first_block: None,
        keys: vec![BlockKey([byte; 32])],
        from: memory(byte).1,
        layout: None,
        durability: Durability::Durable,
        expires_after: None,
        origins: None,
        deadline: None,
    }
}

fn put(client: &Client, namespace: NamespaceId, byte: u8) {
    let reply = block_on(client.put(put_request(namespace, byte))).unwrap().unwrap();
    assert_eq!(reply.outcomes, [BlockOutcome::Stored]);
}

/// How many of one block can be read, and its bytes.
fn read(client: &Client, namespace: NamespaceId, byte: u8) -> (u32, Vec<u8>) {
    let (buf, into) = memory(0);
    let request = ReadRequest {
        namespace,
        group: Group(0),
        coordinate: Coordinate::Replicated,
        keys: vec![BlockKey([byte; 32])],
        layers: None,
        order: Order::Blocks,
        into,
        verify: Verify::Always,
        class: Class::Foreground,
        deadline: None,
    };
    let usable = client.read(request).unwrap().wait_blocking().usable_blocks;
    (usable, buf.to_vec())
}

fn expect(client: &Client, namespace: NamespaceId, byte: u8) {
    assert_eq!(read(client, namespace, byte), (1, vec![byte; PAGE as usize]));
}

#[test]
fn what_was_acknowledged_survives_a_kill_and_a_clean_stop() {
    let scratch = Scratch::new("kill");
    let server = Server::start(command(&scratch.0));
    let client = server.client();
    let namespace = register(&client);
    put(&client, namespace, 1);
    server.signal("-KILL");
    assert_eq!(server.wait(), None, "it was killed");
    // What the killed one left behind (a lock, a socket) is not in the way of the next one.
    let server = Server::start(command(&scratch.0));
    let client = server.client();
    let namespace = register(&client);
    expect(&client, namespace, 1);
    put(&client, namespace, 2);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
    let server = Server::start(command(&scratch.0));
    let over_socket = ConnectOptions::to(format!("unix:{}", scratch.0.join(&server.socket).display()));
    let client = Client::connect(&over_socket).unwrap();
    let namespace = register(&client);
    expect(&client, namespace, 1);
    expect(&client, namespace, 2);
    let stats = client.stats().unwrap();
    assert_eq!(stats.recovery.iter().map(|shard| shard.blocks).sum::<u64>(), 2);
    // A drain that a client asks for is the same clean stop.
    client.drain().unwrap();
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_limit_of_file_sizes_refuses_puts_and_ends_no_server() {
    let scratch = Scratch::new("file-size");
    let server = Server::start(command(&scratch.0));
    let client = server.client();
    let namespace = register(&client);
    put(&client, namespace, 1);
    let pid = Pid::from_raw(server.child.id() as i32);
    let before = getrlimit(Resource::Fsize);
    let limit = |limit| {
        prlimit(pid, Resource::Fsize, limit).unwrap();
    };
    // The next write behind the first pages of the segment is beyond it.
    limit(Rlimit { current: Some(8 << 10), maximum: before.maximum });
    let reply = block_on(client.put(put_request(namespace, 2))).unwrap().unwrap();
    let full =
        matches!(&reply.outcomes[..], [BlockOutcome::Refused(reason)] if reason.kind() == Kind::Refused);
    assert!(full, "{reply:?}");
    expect(&client, namespace, 1);
    limit(before);
    put(&client, namespace, 3);
    expect(&client, namespace, 3);
    drop(client);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_hangup_leaves_the_server_running() {
    let scratch = Scratch::new("hangup");
    let server = Server::start(command(&scratch.0));
    let client = server.client();
    let namespace = register(&client);
    put(&client, namespace, 1);
    server.signal("-HUP");
    expect(&client, namespace, 1);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_store_keeps_the_segment_size_that_it_was_made_with_and_a_start_says_so() {
    let scratch = Scratch::new("segment");
    let run = |segment: &[&str]| {
        let mut command = command_without_segment(&scratch.0);
        command.args(segment);
        let log = scratch.0.join("log");
        let server = Server::telling(command, std::fs::File::create(&log).unwrap().into());
        server.signal("-TERM");
        assert_eq!(server.wait(), Some(0));
        std::fs::read_to_string(log).unwrap()
    };
    assert!(run(&["--segment", "256 KiB"]).contains("segments of 256 KiB"));
    // 32 MiB have no room for segments of the usual size: the store's own counts.
    let log = run(&[]);
    assert!(log.contains("segments of 256 KiB") && !log.contains("no effect"), "{log}");
    let log = run(&["--segment", "1 MiB"]);
    assert!(log.contains("1 MiB has no effect") && log.contains("segments of 256 KiB"), "{log}");
}

#[test]
fn a_start_says_what_it_found_and_warns_of_what_is_lost() {
    let scratch = Scratch::new("found");
    let log = scratch.0.join("log");
    let start = || Server::telling(command(&scratch.0), std::fs::File::create(&log).unwrap().into());
    let told = || std::fs::read_to_string(&log).unwrap();
    let server = start();
    let client = server.client();
    let namespace = register(&client);
    put(&client, namespace, 1);
    drop(client);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
    let server = start();
    assert!(told().contains(": 1 blocks, ") && !told().contains("recovery found"), "{}", told());
    server.signal("-KILL");
    server.wait();
    // A segment that the newest checkpoint knows is gone.
    for shard in std::fs::read_dir(scratch.0.join("kvarts-data")).unwrap().flatten() {
        for file in std::fs::read_dir(shard.path()).into_iter().flatten().flatten() {
            if file.file_name().to_string_lossy().contains("segment") {
                std::fs::remove_file(file.path()).unwrap();
            }
        }
    }
    let server = start();
    assert!(
        told().contains("WARN") && told().contains("recovery found 1 problems (segment-missing)"),
        "{}",
        told()
    );
    assert!(told().contains("kvarts fsck --live ./kvarts-data"), "{}", told());
    drop(server);
}

#[test]
fn damage_that_a_read_meets_is_told_by_the_log() {
    let scratch = Scratch::new("trouble");
    let log = scratch.0.join("log");
    let mut command = command(&scratch.0);
    command.args(["--scrub-hours", "0"]);
    let server = Server::telling(command, std::fs::File::create(&log).unwrap().into());
    let client = server.client();
    let namespace = register(&client);
    put(&client, namespace, 1);
    flip_in_payload(&scratch.0.join("kvarts-data"), 1);
    assert_eq!(read(&client, namespace, 1).0, 0);
    // The line is written after the answer is sent.
    let told = || std::fs::read_to_string(&log).unwrap();
    let mut waits = 0..1000;
    while !told().contains("a read returned a miss for a damaged block") && waits.next().is_some() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let text = told();
    assert!(text.contains("WARN") && text.contains("shard=") && text.contains("offset="), "{text}");
}

/// Changes a byte in the payload of a block whose bytes are all the same.
fn flip_in_payload(store: &Path, byte: u8) {
    let page = vec![byte; PAGE as usize];
    for shard in std::fs::read_dir(store).unwrap().flatten() {
        for file in std::fs::read_dir(shard.path()).into_iter().flatten().flatten() {
            let mut bytes = std::fs::read(file.path()).unwrap();
            let pages = bytes.chunks_exact_mut(PAGE as usize);
            if let Some(found) = pages.into_iter().find(|one| **one == *page) {
                found[77] ^= 0x10;
                std::fs::write(file.path(), bytes).unwrap();
                return;
            }
        }
    }
    panic!("no such page");
}

#[test]
fn a_taken_port_and_a_budget_too_small_are_told_with_what_to_do() {
    let scratch = Scratch::new("taken");
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let serve = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        command.current_dir(&scratch.0).args(["serve", "--segment", "1M", "--memory", "64M"]);
        let output = command.args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let left = std::fs::read_dir(&scratch.0).unwrap().count();
        assert_eq!(left, 0, "{arguments:?}: a start that cannot serve makes no store");
        text(&output.stderr)
    };
    let free = "127.0.0.1:0";
    for (name, at) in [
        ("listen.grpc", ["--listen-grpc", &address, "--listen-metrics", "none"]),
        ("listen.metrics", ["--listen-grpc", free, "--listen-metrics", &address]),
    ] {
        let taken = serve(&[&["--budget", "64M"][..], &at].concat());
        let advice = format!("port {} is in use by another program", other.local_addr().unwrap().port());
        assert!(
            taken.contains(&format!("{name}: {address}"))
                && taken.contains(&advice)
                && taken.contains("port 0 selects a free one"),
            "{taken}"
        );
    }
    let elsewhere = std::env::temp_dir().join(format!("kvarts-taken-{}.sock", std::process::id()));
    let answering = std::os::unix::net::UnixListener::bind(&elsewhere).unwrap();
    let socket = ["--listen-socket", elsewhere.to_str().unwrap(), "--listen-metrics", "none"];
    let taken = serve(&[&["--budget", "64M", "--listen-grpc", free][..], &socket].concat());
    assert!(taken.contains("another server listens on"), "{taken}");
    drop(answering);
    std::fs::remove_file(&elsewhere).unwrap();
    let small = serve(&["--budget", "1M", "--listen-grpc", free, "--listen-metrics", "none"]);
    assert!(small.contains("four segments") && small.contains("--budget \"4 MiB\""), "{small}");
}

/// A file of members that does not name this node.
fn members(address: &str) -> String {
    format!("epoch = 1\n[[node]]\nid = \"{}\"\naddress = \"{address}\"\n", "a1".repeat(16))
}

/// Why a server does not start.
fn refused(scratch: &Scratch, arguments: &[&str]) -> String {
    let output = command(&scratch.0).args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
    text(&output.stderr)
}

#[test]
fn a_start_that_is_refused_leaves_nothing_and_says_so() {
    let scratch = Scratch::new("refused");
    let file = |name: &str, text: &str| scratch.file(name, text);
    let here = scratch.0.display().to_string();
    let garbage = file("garbage", "garbage");
    let (remote, local) =
        (file("remote", &members("192.0.2.1:7400")), file("local", &members("127.0.0.1:7400")));
    let precious = file("precious", "of another");
    let names = || {
        let entries = std::fs::read_dir(&scratch.0).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let serve = |arguments: &[&str]| refused(&scratch, arguments);
    let before = names();
    for (arguments, why) in [
        (&["--tls-certificate", &garbage, "--tls-key", &garbage][..], "tls: "),
        (&["--cluster", &format!("{here}/none")], "cluster.members: "),
        (&["--cluster", &garbage], "cluster.members: "),
        (&["--cluster", &remote], "cluster.certificate: members on other hosts require certificates"),
        (&["--cluster", &remote, "--cluster-secret", &garbage], "32 random bytes are required"),
        (
            &[
                "--cluster",
                &local,
                "--cluster-certificate",
                &garbage,
                "--cluster-key",
                &garbage,
                "--cluster-authority",
                &garbage,
            ],
            "cluster.certificate: the file has no certificate",
        ),
        // Known only once there is a store.
        (&["--listen-socket", &precious], "listen.socket"),
        (&["--listen-socket", &format!("{here}/none/kvarts.sock")], "listen.socket"),
    ] {
        let told = serve(&[arguments, &["--dir", "one,two"][..]].concat());
        assert!(
            told.contains(why) && told.contains("; no store was created in one, two"),
            "{arguments:?}: {told}"
        );
        assert_eq!(names(), before, "{arguments:?}: {told}");
    }
    let told = serve(&["--dir", "one,no disk/kvarts"]);
    let expected = [
        "store.directories: no disk/kvarts: the directory no disk does not exist: mount its disk",
        "`mkdir -p no disk`",
    ];
    assert!(expected.iter().all(|part| told.contains(part)), "{told}");
    assert_eq!(names(), before);
}

#[test]
fn a_refused_start_keeps_a_store_that_it_tells_the_name_of_and_one_that_was_there() {
    let scratch = Scratch::new("kept");
    let serve = |arguments: &[&str]| refused(&scratch, arguments);
    let (long, local) =
        (scratch.file("long", &"s".repeat(32)), scratch.file("local", &members("127.0.0.1:7400")));
    let precious = scratch.file("precious", "of another");
    // Its name is what the operator needs.
    let told = serve(&["--dir", "one", "--cluster", &local, "--cluster-secret", &long]);
    assert!(
        told.contains("this node is not in") && told.contains("created in one, and remains there"),
        "{told}"
    );
    let again = serve(&["--dir", "one", "--cluster", &local, "--cluster-secret", &long]);
    let id = |told: &str| told.split("id = \"").nth(1).unwrap()[..32].to_owned();
    assert_eq!(id(&told), id(&again));
    // A store that was there is one afterwards, and nothing is said of it.
    let told = serve(&["--dir", "one", "--listen-socket", &precious]);
    assert!(told.contains("not a socket") && !told.contains("store was created"), "{told}");
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "of another");
    let mut command = command(&scratch.0);
    command.args(["--dir", "one"]);
    let server = Server::start(command);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn two_servers_do_not_share_a_directory() {
    let scratch = Scratch::new("two");
    let first = Server::start(command(&scratch.0));
    let second = command(&scratch.0).output().unwrap();
    assert_eq!(second.status.code(), Some(2));
    let told = text(&second.stderr);
    assert!(told.contains("is in use by another process"), "{told}");
    // The port is taken as well; the error still names the directory, with the process if the kernel names it.
    let mut second = Command::new(env!("CARGO_BIN_EXE_kvarts"));
    second.current_dir(&scratch.0).args(["serve", "--listen-grpc", &first.grpc, "--listen-metrics", "none"]);
    let told = text(&second.args(["--budget", "32 MiB"]).output().unwrap().stderr);
    assert!(
        told.contains("is in use by another process") && !told.contains("is in use by another program"),
        "{told}"
    );
    let facts = std::fs::metadata(scratch.0.join("kvarts-data/lock")).unwrap();
    let locks = std::fs::read_to_string("/proc/locks").unwrap();
    if locks.contains(&format!(":{} ", std::os::unix::fs::MetadataExt::ino(&facts))) {
        assert!(told.contains(&format!("({})", first.child.id())), "{told}\n{locks}");
    }
}

/// What a load balancer needs: health says no while calls are still served; the second signal ends the wait.
#[test]
fn a_server_that_leaves_says_so_before_it_stops_and_a_second_signal_ends_the_wait() {
    for by_signal in [true, false] {
        let scratch = Scratch::new("lame-duck");
        let mut lame = command(&scratch.0);
        lame.args(["--lame-duck", "30"]);
        let log = std::fs::File::create(scratch.0.join("log")).unwrap();
        let server = Server::telling(lame, log.into());
        let begun = std::time::Instant::now();
        match by_signal {
            true => server.signal("-TERM"),
            false => server.client().drain().unwrap(),
        }
        let told = || std::fs::read_to_string(scratch.0.join("log")).unwrap();
        while !told().contains("calls are accepted for 30 s more") {
            assert!(begun.elapsed().as_secs() < 25, "{}", told());
            std::thread::yield_now();
        }
        register(&server.client());
        server.signal("-INT");
        assert_eq!(server.wait(), Some(0), "{}", told());
        // A stop itself takes less than a second here.
        assert!(begun.elapsed().as_secs() < 25, "it waited all the same: {}", told());
        assert!(told().contains("stopped, with a checkpoint"), "{}", told());
    }
}

#[test]
fn a_log_for_programs_has_the_line_of_the_start_in_its_form() {
    let scratch = Scratch::new("json-line");
    let mut json = command(&scratch.0);
    let mut child =
        json.args(["--log-format", "json"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let _ended_with_it = Server { child, grpc: String::new(), socket: String::new() };
    let told: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line:?}"));
    let message = told["fields"]["message"].as_str().unwrap();
    assert!(message.starts_with("serving grpc=127.0.0.1:") && told["level"] == "INFO", "{line}");
    let time = told["timestamp"].as_str().unwrap_or_default();
    assert!(time.starts_with("20") && time.ends_with('Z'), "{line}");
}

/// What a start refuses before it makes anything a check of the configuration refuses as well, in the same words.
#[test]
fn a_check_refuses_what_a_start_refuses() {
    let scratch = Scratch::new("check");
    let said = |what: &[&str], arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarts"));
        let output = command.current_dir(&scratch.0).args(what).args(arguments).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let nowhere = ["--listen-grpc", "none", "--listen-metrics", "none"];
    std::fs::write(scratch.0.join("file"), "").unwrap();
    for (arguments, expected) in [
        (&["--budget", "90"][..], "store.budget: 90 means 90 B: write 90% for a part of the disks, or 90G"),
        (
            &["--budget", "16M"],
            "store.budget: 16 MiB is too small: the store needs four segments, so use \
            --budget \"128 MiB\"",
        ),
        (&["--budget", "1000 TiB"], "does not fit on the disk"),
        (
            &["--budget", "128M", "--dir", "no/disk"],
            "store.directories: no/disk: the directory no does not exist: mount its disk",
        ),
        (
            &["--budget", "128M", "--dir", "file"],
            "store.directories: file: the path is a file, not a directory",
        ),
        (
            &["--budget", "128M", "--listen-socket", "no/sock"],
            "the directory no does not exist: run `mkdir -p no`",
        ),
        (
            &["--budget", "128M", "--listen-socket", "file"],
            "listen.socket: file: the path exists and is not a socket",
        ),
        (&["--budget", "128M", "--socket-group", "no-such-group"], "the group \"no-such-group\" is not in"),
        (&["--budget", "128M", "--cluster", "no.toml"], "cluster.members: no.toml: "),
    ] {
        let (code, checked) = said(&["config", "check"], arguments);
        assert!(code == Some(2) && checked.contains(expected), "{arguments:?}: {checked}");
        let (code, refused) = said(&["serve"], &[arguments, &nowhere].concat());
        let refused = refused.lines().last().unwrap_or_default().to_owned();
        assert!(
            code == Some(2) && refused.starts_with(checked.trim_end()),
            "{arguments:?}: {refused}\n{checked}"
        );
    }
    let left: Vec<_> = std::fs::read_dir(&scratch.0).unwrap().flatten().map(|one| one.file_name()).collect();
    assert_eq!(left, ["file"], "a check makes nothing, nor does a start that is refused");
    assert_eq!(said(&["config", "check"], &["--budget", "128M", "--listen-socket", "here.sock"]).0, Some(0));
}

/// A user who may not write in the directory, and who is not in the group of the socket.
#[test]
fn a_check_is_made_with_the_rights_of_its_user() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("NOT RUN: only root can be another user");
        return;
    }
    let scratch = Scratch::new("rights");
    let own = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", env!("CARGO_BIN_EXE_kvarts")]);
        let output = command.args(["config", "check", "--budget", "128M"]).args(arguments).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let (ours, theirs) = (scratch.0.join("ours"), scratch.0.join("theirs"));
    std::fs::create_dir(&ours).unwrap();
    std::fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).unwrap();
    std::fs::set_permissions(&ours, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&scratch.0, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let [ours, theirs] = [&ours, &theirs].map(|path| path.to_str().unwrap());
    let (code, told) = own(&["--dir", theirs]);
    assert_eq!(code, Some(0), "{told}");
    for directories in [ours.to_owned(), format!("{ours}/new")] {
        let (code, told) = own(&["--dir", &directories]);
        let expected = [
            format!("the directory {ours} is not writable"),
            "belongs to user 0".to_owned(),
            "`chown 65534".to_owned(),
        ];
        assert!(code == Some(2) && expected.iter().all(|part| told.contains(part)), "{told}");
    }
    let (code, told) = own(&["--dir", theirs, "--listen-socket", &format!("{ours}/sock")]);
    assert!(code == Some(2) && told.contains("listen.socket") && told.contains("is not writable"), "{told}");
    let (code, told) = own(&["--dir", theirs, "--socket-group", "root"]);
    let expected = "the user of the server (65534) is not in the group \"root\": `usermod -aG root USER`";
    assert!(code == Some(2) && told.contains(expected), "{told}");
    assert_eq!(own(&["--dir", theirs, "--socket-group", "65534"]).0, Some(0));
}

#[test]
fn the_service_manager_is_told_when_it_is_ready_and_when_it_stops() {
    let scratch = Scratch::new("notify");
    let path = scratch.0.join("notify.sock");
    let manager = UnixDatagram::bind(&path).unwrap();
    let mut command = command(&scratch.0);
    command.env("NOTIFY_SOCKET", &path);
    let server = Server::start(command);
    let heard = || {
        let mut bytes = [0; 64];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    assert_eq!(heard(), "READY=1");
    server.signal("-TERM");
    assert_eq!(heard(), "STOPPING=1");
    assert_eq!(server.wait(), Some(0));
}

fn kvarts(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvarts")).args(arguments).env_clear().output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_configuration_is_checked_and_shown_without_starting_anything() {
    let scratch = Scratch::new("config");
    let file = scratch.0.join("kvarts.toml");
    std::fs::File::create(&file).unwrap().write_all(b"[store]\nbudget = '1 GiB'\n").unwrap();
    let path = file.to_str().unwrap();
    let shown = kvarts(&["config", "show", "--json", "--config", path, "--executors", "3"]);
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    let settings = shown["settings"].as_array().unwrap();
    let from = |name: &str| settings.iter().find(|one| one["name"] == name).unwrap()["from"].clone();
    assert_eq!((from("store.budget"), from("store.executors")), ("file".into(), "flag".into()));
    assert_eq!(from("listen.grpc"), "default");
    for unset in ["tls.certificate", "cluster.members", "cold.bucket", "limits.index", "store.endurance"] {
        assert_eq!(from(unset), "default");
    }
    let memory = &shown["memory"];
    let parts = memory["parts"].as_array().unwrap();
    let all: u64 = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(memory["bytes"], all);
    let requests = parts.iter().find(|part| part["setting"] == "limits.memory").unwrap();
    assert_eq!(requests["bytes"], 256u64 << 20);
    assert!(
        text(&kvarts(&["config", "check", "--config", path]).stdout)
            .starts_with("the configuration is valid: ")
    );
    // An address of this host alone is open to this host alone.
    for (address, access) in [
        ("127.0.0.1:7440", "all rights for every user of this host (no tokens)"),
        ("none", "all rights for every client that can open the local socket (no tokens)"),
    ] {
        let checked = kvarts(&["config", "check", "--config", path, "--listen-grpc", address]);
        assert!(text(&checked.stdout).trim_end().ends_with(access), "{address}: {}", text(&checked.stdout));
    }
    let open = kvarts(&["config", "check", "--listen-grpc", "0.0.0.0:7440"]);
    assert_eq!(open.status.code(), Some(2));
    assert!(text(&open.stderr).contains("anyone may read and write"));
    let key = scratch.0.join("key.pem");
    std::fs::File::create(&key).unwrap().write_all(b"no key").unwrap();
    let key = key.to_str().unwrap();
    let tls = kvarts(&["config", "check", "--tls-certificate", key, "--tls-key", key]);
    assert_eq!((tls.status.code(), text(&tls.stderr).contains("tls: ")), (Some(2), true), "{tls:?}");
    let group = kvarts(&["config", "check", "--socket-group", "no-such-group"]);
    let told = text(&group.stderr);
    assert!(
        group.status.code() == Some(2) && told.contains("the group \"no-such-group\" is not in"),
        "{told}"
    );
    let token = kvarts(&["config", "token", "--json"]);
    let token: serde_json::Value = serde_json::from_slice(&token.stdout).unwrap();
    assert_eq!(token["hash"].as_str().unwrap().len(), 64);
}
